"""What every strategy is: the choice of the next problems, and what it learns from their groups.

Invariant, kept by every strategy: a problem that was chosen is in flight until `free`, and is not
chosen meanwhile; one in `used` is never chosen. Strategies know problem numbers and figures of
groups; no token of a rollout ever reaches them. They are functions of the calls so far and of the
seed: no clock, no global randomness.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Set
from typing import Any

from protocol.messages import Reason
from scheduler.grading import Figures

Pick = tuple[int, Reason]
"""A problem, and why it was chosen."""

POOLS = ("unseen", "heap", "solved", "unsolved", "cooling", "in_flight")


class Strategy(ABC):
    """Chooses among the problems 0 … n−1."""

    @abstractmethod
    def select(self, step: int, count: int, used: Set[int], *, first: bool = True) -> list[Pick]:
        """Choose problems for the round of `step`; fewer than `count` where there are no more.

        Args:
            step: of the round.
            count: how many problems.
            used: problems that were issued for this step already.
            first: False for the rest of a selection that came out short: the shares of
                exploration and retests are spent once for a round.
        """

    @abstractmethod
    def refill(self, step: int, count: int, used: Set[int]) -> list[Pick]:
        """Choose replacements, reason `refill`; none where there is nothing more to offer."""

    @abstractmethod
    def observe(self, problem: int, step: int, figures: Figures) -> None:
        """Learn from the group of a problem that is in flight; `step` is its round's."""

    @abstractmethod
    def free(self, problem: int) -> None:
        """The task of a problem ended, however: it may be chosen again when its time comes."""

    @abstractmethod
    def pools(self) -> dict[str, int]:
        """Number of problems by POOLS; each problem is in one."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Further figures, by name."""

    @abstractmethod
    def take_notices(self) -> list[str]:
        """Sentences for the user since the last call; each kind is said once in a run."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What `load` needs, as plain data."""

    @abstractmethod
    def load(self, state: dict[str, Any]) -> None:
        """Become the strategy that `state` was taken of."""
