"""How the rewards of a group are counted: pure functions that scheduler, actors and learner share.

Invariant: an ungraded completion (None) takes no part in any figure. The actor decides with
`has_variance` whether a group travels, and the scheduler with the same function whether to expect
one, so the two cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable


def graded(values: Iterable[float | None]) -> list[float]:
    """The values of the completions that were graded."""
    return [value for value in values if value is not None]


def solve_rate(correct: Iterable[float | None]) -> float:
    """p: mean of `correct` over the graded completions. Raises ValueError if none is graded."""
    values = graded(correct)
    if not values:
        raise ValueError("no completion is graded")
    return sum(values) / len(values)


def omega(rewards: Iterable[float | None], width: float) -> float:
    """ω: mean squared centred reward over the graded completions, in units of the range squared.

    For rewards 0 and 1 this is p(1 − p): Σ(r − p)² / n = p(1 − p)² + (1 − p)p². `width` is the
    width of the reward range (`grading.width`). Raises ValueError if no completion is graded.
    """
    values = graded(rewards)
    if not values:
        raise ValueError("no completion is graded")
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values) / width**2


def has_variance(rewards: Iterable[float | None], tolerance: float, width: float) -> bool:
    """Is max − min over the graded completions more than `tolerance` × the reward range?"""
    values = graded(rewards)
    return bool(values) and max(values) - min(values) > tolerance * width
