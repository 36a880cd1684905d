"""The calendar of cooling problems: which may be chosen again from which step on.

Invariant: a problem is in the calendar at most once, under the step from which it is eligible, and
leaves it exactly when that step is reached or when it is taken out; at most the problems of the
last `cooldown` steps are in it, so it stays small.
"""

from __future__ import annotations

from typing import Any


class Cooldown:
    """Cooling problems by the step at which their cooldown ends."""

    def __init__(self) -> None:
        # Insertion order within a step is kept, so that what comes out is a function of the events.
        self._until: dict[int, dict[int, None]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, problem: int, until: int) -> None:
        """`problem` is eligible from step `until` on."""
        self._until.setdefault(until, {})[problem] = None
        self._size += 1

    def remove(self, problem: int, until: int) -> None:
        """Take out a problem that was added with `until`."""
        problems = self._until[until]
        del problems[problem]
        if not problems:
            del self._until[until]
        self._size -= 1

    def due(self, step: int) -> list[int]:
        """Take out the problems that are eligible at `step`, earliest first."""
        dates = sorted(date for date in self._until if date <= step)
        problems = [problem for date in dates for problem in self._until.pop(date)]
        self._size -= len(problems)
        return problems

    def oldest(self) -> list[int]:
        """All cooling problems, the one that is eligible earliest first; they stay in."""
        return [problem for date in sorted(self._until) for problem in self._until[date]]

    def state(self) -> list[list[Any]]:
        """What `load` needs."""
        return [[until, list(self._until[until])] for until in sorted(self._until)]

    def load(self, state: list[list[Any]]) -> None:
        """Become the calendar that `state` was taken of."""
        self._until = {until: dict.fromkeys(problems) for until, problems in state}
        self._size = sum(map(len, self._until.values()))
