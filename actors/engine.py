"""What the service needs of an inference engine, so that tests and fault benches can put in one
that is simulated (`python -m actors --engine module:Class`).

Invariant: every completion comes back whole, with the token ids and log-probs that were sampled and
with the engine's own evidence of the weights that sampled them; an aborted one never comes back.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from protocol.config import Config
from protocol.messages import Prompt
from protocol.versions import Span, Version


class PromptError(Exception):
    """A prompt that cannot be rolled out: which limit it breaks. The task ends `failed`."""


class RequestError(Exception):
    """The engine refused or gave up this one request; the engine itself is well."""


class LoadFailed(Exception):
    """Weights that could not be read. The engine lives, and is paused until a load succeeds."""


class EngineDead(Exception):
    """The engine is gone; the process must leave."""


@dataclass(frozen=True, slots=True)
class Request:
    """`n` completions of one prompt.

    Attributes:
        id: unique in this process.
        temperature: 0 is greedy.
        seed: None lets the engine draw.
        logprobs: whether the sampled tokens' log-probs are wanted.
    """

    id: str
    prompt_tokens: Sequence[int]
    n: int
    temperature: float
    max_tokens: int
    seed: int | None = None
    logprobs: bool = True


@dataclass(frozen=True, slots=True)
class Sampled:
    """One completion.

    Attributes:
        tokens: ids, the end token included where one was sampled.
        logprobs: one per token, of the tempered distribution that was sampled; empty where none
            were asked for.
        text: the tokens decoded, special tokens left out.
        finish: `stop` where it ended by itself.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    spans: list[Span]
    text: str
    finish: Literal["stop", "length"]


class Engine(abc.ABC):
    """An inference engine on the main loop. `name` tells actors on one machine apart."""

    def __init__(self, config: Config, name: str) -> None:
        self.config = config
        self.name = name

    @abc.abstractmethod
    async def start(self) -> None:
        """Start, on the base model. Raises ConfigError for what the user can mend."""

    @abc.abstractmethod
    def encode(self, prompt: Prompt, max_tokens: int) -> list[int]:
        """Token ids of a prompt that leaves room for `max_tokens`. Raises PromptError."""

    @abc.abstractmethod
    async def generate(self, request: Request) -> list[Sampled]:
        """All completions of a request, in the engine's order; cancelling aborts them.

        Raises RequestError, EngineDead.
        """

    @abc.abstractmethod
    async def load(self, path: Path, version: Version) -> None:
        """Replace the weights under pause and forget every cached prefix.

        Tokens sampled from here on are reported as `version`'s. Raises LoadFailed, after which
        nothing is sampled until a later load succeeds; raises EngineDead.
        """

    @property
    @abc.abstractmethod
    def tokens(self) -> int:
        """Tokens sampled since the start: the sign of life while generating."""

    @property
    def dead(self) -> bool:
        """Is the engine gone? Requests say so themselves; this is for when there are none."""
        return False

    @abc.abstractmethod
    async def stop(self) -> None:
        """End the engine and all of its processes."""
