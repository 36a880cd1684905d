"""Held-out sets, measured at exact versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EvalSet:
    """One held-out set.

    Attributes:
        name: as in metrics; the `dataset` of its tasks.
        sources: data source of each problem; its length is the number of problems.
        every: steps between evaluations; the first weights and the last are evaluated in any case.
        n: sampled completions a problem.
        greedy: whether each problem gets one greedy completion besides.
        temperature: of the sampled completions.
        max_tokens: longest completion.
    """

    name: str
    sources: Sequence[str]
    every: int
    n: int
    greedy: bool
    temperature: float
    max_tokens: int
