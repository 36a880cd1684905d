"""The solved and unsolved pools: problems whose groups had no variance, with a date for a retest.

Invariant: a problem has a due date exactly while its latest group had no variance. After the first
such group it is watched: it stays in the heap, at a low priority, and is due `retest_after` steps
later. After each further one in a row it is away: out of the heap, with twice the delay, at most
`retest_max`. A group with variance ends both.
"""

from __future__ import annotations

from array import array
from random import Random
from typing import Any

from scheduler.flat import dump, load
from scheduler.heap import AddressableHeap


def posterior_mean(correct: float, graded: int) -> float:
    """E[p(1−p)] under the posterior Beta(½ + correct, ½ + graded − correct).

    For Beta(a, b): E[p] = a/(a+b) and E[p²] = a(a+1)/((a+b)(a+b+1)), so that
    E[p(1−p)] = ab/((a+b)(a+b+1)). The prior is Jeffreys' Beta(½, ½). `correct` is the sum of
    `correct` over the `graded` completions of the group.
    """
    a, b = 0.5 + correct, 0.5 + graded - correct
    return a * b / ((a + b) * (a + b + 1))


class Pools:
    """Due dates of problems without variance, earliest first."""

    def __init__(self, problems: int, rng: Random, retest_after: int, retest_max: int) -> None:
        """`retest_after`, `retest_max`: first and longest delay in steps."""
        self._after, self._max = retest_after, retest_max
        self._delay = array("i", bytes(4 * problems))
        self._due = array("i", bytes(4 * problems))
        # Problems that have a due date and are not in flight. Priority −date: the earliest on top.
        self._dates = AddressableHeap(problems, rng)

    def zero_variance(self, problem: int, step: int) -> bool:
        """The group of `step` had no variance. Returns whether the problem leaves the heap."""
        again = self._delay[problem] > 0
        self._delay[problem] = min(2 * self._delay[problem], self._max) if again else self._after
        self._due[problem] = step + self._delay[problem]
        return again

    def mixed(self, problem: int) -> None:
        """The latest group had variance: the problem has no due date any longer."""
        self._delay[problem] = 0

    def put(self, problem: int) -> None:
        """The problem is no longer in flight: its due date, if it has one, counts again."""
        if self._delay[problem]:
            self._dates.push(problem, -float(self._due[problem]))

    def take(self, problem: int) -> None:
        """The problem is in flight: until it is put back no due date of it counts."""
        if problem in self._dates:
            self._dates.remove(problem)

    def earliest(self) -> tuple[int, int] | None:
        """The problem that is due first, and the step; None if there is none. It stays in."""
        if not self._dates:
            return None
        problem, date = self._dates.peek()
        return problem, -int(date)

    def state(self) -> dict[str, Any]:
        """What `load` needs."""
        return {
            "delay": dump(self._delay),
            "due": dump(self._due),
            "dates": self._dates.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Become the pools that `state` was taken of."""
        self._delay = load("i", state["delay"])
        self._due = load("i", state["due"])
        self._dates.load(state["dates"])
