"""What is counted of a group: the figures that the scheduler decides by, from one outcome.

Invariant: ungraded completions take no part in any figure; `correct` is what is counted and
`reward` what is trained, and a rule uses the one that its name says.
"""

from __future__ import annotations

from operator import mul
from typing import Any, NamedTuple

from protocol.config import GradingConfig
from protocol.counting import graded
from protocol.messages import Outcome

# Beyond it sums of ω over a run might not be finite.
LARGEST_OMEGA = 1e300


class Figures(NamedTuple):
    """One group in numbers.

    Attributes:
        graded: completions that were graded.
        correct: sum of `correct` over them.
        p: mean of `correct` over them.
        reward: mean reward over them.
        omega: ω, the mean squared centred reward over the squared width of the reward range.
        zero_variance: max − min of the rewards ≤ variance_tolerance × range.
        truncated: more than half of all completions reached the length limit.
    """

    graded: int
    correct: float
    p: float
    reward: float
    omega: float
    zero_variance: bool
    truncated: bool

    @property
    def mixed(self) -> bool:
        """0 < p < 1, and nothing else."""
        return 0.0 < self.p < 1.0

    @property
    def shaping_only(self) -> bool:
        """Is there variance in the reward and none in what is counted?"""
        return not self.zero_variance and not self.mixed

    @property
    def kind(self) -> str:
        """Which zero-variance group it is: `mostly_truncated`, `all_right` or `all_wrong`."""
        if self.truncated:
            return "mostly_truncated"
        return "all_right" if self.p >= 0.5 else "all_wrong"


class Grader:
    """Makes the figures of groups, by the rules of one config.

    The rules are those of `protocol.counting`, which actors use, computed in one go.
    """

    def __init__(self, grading: GradingConfig) -> None:
        self._flat = grading.variance_tolerance * grading.width
        self._width_squared = grading.width**2

    def figures(self, outcome: Outcome, *, complete: bool = False) -> Figures:
        """The figures of an outcome that has at least one graded completion.

        ω is the mean squared centred reward, Σ(r − r̄)²/n ÷ width², in float64. With centred
        advantages A = r − r̄ it is the mean squared advantage of the group, by which Prioritized
        Replay (Fatemi, arXiv 2601.02648) sorts. For rewards 0 and 1 with k of n right, r̄ = p = k/n
        and ω = (k(1−p)² + (n−k)p²)/n = p(1−p)² + (1−p)p² = p(1−p): greatest at p = ½, zero at 0
        and 1.

        `complete`: every completion is known to be graded. Raises ValueError if none is,
        OverflowError for rewards whose squares no float64 can hold.
        """
        rewards: Any = outcome.rewards
        correct: Any = outcome.correct
        if not complete:
            rewards, correct = graded(rewards), graded(correct)
        n = len(rewards)
        if n == 0:
            raise ValueError("no completion is graded")
        total = sum(correct)
        mean = sum(rewards) / n
        centred = [reward - mean for reward in rewards]
        omega = sum(map(mul, centred, centred)) / n / self._width_squared
        if omega > LARGEST_OMEGA:
            raise OverflowError(f"rewards: ω is {omega}")
        return Figures(
            n,
            total,
            total / n,
            mean,
            omega,
            max(rewards) - min(rewards) <= self._flat,
            2 * sum(outcome.truncated) > len(outcome.truncated),
        )
