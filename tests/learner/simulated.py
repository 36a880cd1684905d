"""A trainer without a model: `--trainer tests.learner.simulated:Simulated` in tests of the service.

Its one weight is the number of steps it took.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from learner.batch import Batch
from learner.ranks import Ranks
from learner.trainer import StepResult
from protocol.config import Config


class Simulated:
    """Takes every step that has a completion in the loss."""

    def __init__(self, config: Config, ranks: Ranks, progress: Callable[[], None]) -> None:
        self._ranks = ranks
        self._steps = 0

    def step(self, batch: Batch) -> StepResult:
        if not batch.rollouts:
            return StepResult("no completion of the batch enters the loss", batch.metrics)
        self._steps += 1
        return StepResult(None, {**batch.metrics, "loss": 0.0})

    def save(self, directory: Path) -> None:
        if self._ranks.leads:
            (directory / "config.json").write_text(json.dumps({"model_type": "simulated"}))
            save_file({"steps": torch.tensor([self._steps])}, directory / "model.safetensors")
