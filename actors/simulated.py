"""An engine without a model: it draws texts, waits, and reports versions as vLLM does.

For tests and fault benches: `python -m actors --engine actors.simulated:SimulatedEngine`. Its
options stand in `actors.engine` of the config: `texts` (drawn uniformly), `seconds` (of one
completion), `die_after` (requests after which it is dead), `silent` (never samples a token).
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from actors.engine import Engine, EngineDead, PromptError, Request, Sampled
from protocol.config import Config, ConfigError
from protocol.messages import Prompt
from protocol.versions import Span, Version

END_TOKEN = 0
PARTS = 4


@dataclass(frozen=True, slots=True)
class Options:
    """What `actors.engine` may hold."""

    texts: tuple[str, ...] = ("right", "wrong")
    seconds: float = 0.05
    die_after: int | None = None
    silent: bool = False


class SimulatedEngine(Engine):
    """Tokens are the text's UTF-8 bytes + 1, then the end token 0."""

    def __init__(self, config: Config, name: str) -> None:
        super().__init__(config, name)
        known = {field.name for field in fields(Options)}
        if unknown := set(config.actors.engine) - known:
            raise ConfigError(f"actors.engine: {sorted(unknown)} unknown; known: {sorted(known)}")
        self.options = Options(**config.actors.engine)
        self.loads: list[Version] = []
        self._random = random.Random(f"{config.run.seed}/{name}")
        self._running = asyncio.Event()
        self._running.set()
        self._version: Version | None = None
        self._tokens = 0
        self._requests = 0

    async def start(self) -> None:
        await asyncio.sleep(0)

    def encode(self, prompt: Prompt, max_tokens: int) -> list[int]:
        text = prompt if isinstance(prompt, str) else "\n".join(turn.content for turn in prompt)
        tokens = [byte + 1 for byte in text.encode()]
        if len(tokens) > (limit := self.config.rollout.max_prompt_tokens):
            raise PromptError(
                f"the prompt has {len(tokens)} tokens, more than rollout.max_prompt_tokens "
                f"({limit})"
            )
        return tokens

    async def generate(self, request: Request) -> list[Sampled]:
        self._requests += 1
        if self.options.die_after is not None and self._requests > self.options.die_after:
            raise EngineDead(f"simulated: dead after {self.options.die_after} requests")
        if self.options.silent:
            await asyncio.Event().wait()
        draws = [self._random.choice(self.options.texts) for _ in range(request.n)]
        tokens = [[b + 1 for b in text.encode()] + [END_TOKEN] for text in draws]
        # Version of each quarter of every completion: an update may come in between.
        versions: list[Version] = []
        for _ in range(PARTS):
            await self._running.wait()
            assert self._version is not None
            versions.append(self._version)
            await asyncio.sleep(self.options.seconds / PARTS)
            self._tokens += sum(map(len, tokens)) // PARTS
        return [
            self._sampled(text, ids[: request.max_tokens], len(ids), versions, request)
            for text, ids in zip(draws, tokens, strict=True)
        ]

    async def load(self, path: Path, version: Version) -> None:
        self._running.clear()
        await asyncio.sleep(0)
        self._version = version
        self.loads.append(version)
        self._running.set()

    @property
    def tokens(self) -> int:
        return self._tokens

    async def stop(self) -> None:
        await asyncio.sleep(0)

    def _sampled(
        self,
        text: str,
        tokens: list[int],
        whole: int,
        versions: list[Version],
        request: Request,
    ) -> Sampled:
        finish: Literal["stop", "length"] = "stop" if len(tokens) == whole else "length"
        # All of the choice lies in the first token.
        logprobs = [-math.log(len(self.options.texts))] + [0.0] * (len(tokens) - 1)
        return Sampled(
            tokens,
            logprobs if request.logprobs else [],
            _spans(versions, len(tokens)),
            text if finish == "stop" else text[: len(tokens)],
            finish,
        )


def _spans(versions: list[Version], length: int) -> list[Span]:
    spans: list[Span] = []
    for position in range(length):
        version = versions[position * len(versions) // length]
        if spans and spans[-1].version == version:
            spans[-1] = Span(version, spans[-1].start, position + 1)
        else:
            spans.append(Span(version, position, position + 1))
    return spans
