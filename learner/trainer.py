"""What the service needs of a trainer, so that tests can run the same service with a simulated one.

Invariant: every method is called on all ranks in the same order.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from learner.batch import Batch
from learner.ranks import Ranks
from protocol.config import Config


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step.

    Attributes:
        skipped: why the weights did not change; None where they did.
        metrics: by the names of `StepCompleted.metrics`; all finite.
    """

    skipped: str | None
    metrics: dict[str, float]


class Trainer(Protocol):
    """Trains and saves one model on all ranks."""

    def step(self, batch: Batch) -> StepResult:
        """One optimizer step on `batch`, which is the same on every rank."""

    def save(self, directory: Path) -> None:
        """Rank 0 writes the model in Hugging Face layout, tokenizer included, into `directory`."""


MakeTrainer = Callable[[Config, Ranks, Callable[[], None]], Trainer]
"""Makes a trainer from the run's config, the ranks, and what to call as work goes on."""


def find_trainer(name: str) -> MakeTrainer:
    """The trainer class that `module:Class` names. Raises ValueError if there is none."""
    module, colon, attribute = name.partition(":")
    try:
        found: MakeTrainer = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--trainer {name}: no such module:Class ({error})") from error
    if not colon:
        raise ValueError(f"--trainer {name}: must be module:Class")
    return found
