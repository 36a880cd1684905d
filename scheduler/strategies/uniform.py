"""Uniform: shuffled epochs, each problem once an epoch. The baseline.

Invariant: within an epoch every problem is offered exactly once, in random order; one that cannot
be taken at its turn (in flight since the last epoch, or used in this step already) is deferred, not
lost, and is the first to be taken as soon as it can be (two deferred turns of one problem count as
one). Every draw is unbiased, so the reason of a
first selection is `explore`.
"""

from __future__ import annotations

from array import array
from collections.abc import Set
from random import Random
from typing import Any

from scheduler.flat import dump, dump_random, load, load_random
from scheduler.grading import Figures
from scheduler.strategies.base import Pick, Strategy

UNSEEN, MIXED, SOLVED, UNSOLVED = range(4)


class Uniform(Strategy):
    """Problems in shuffled order; nothing is learned but where they stand."""

    def __init__(self, problems: int, seed: int) -> None:
        self._problems = problems
        self._rng = Random(seed)
        self._order = array("I", range(problems))
        self._next = 0
        self._deferred: list[int] = []
        self._status = bytearray(problems)
        self._flying = bytearray(problems)
        self._available = [problems, 0, 0, 0]
        self._in_flight = 0

    def select(self, step: int, count: int, used: Set[int], *, first: bool = True) -> list[Pick]:
        """The next problems of the shuffled order."""
        return [(problem, "explore") for problem in self._choose(count, used)]

    def refill(self, step: int, count: int, used: Set[int]) -> list[Pick]:
        """The next problems of the shuffled order."""
        return [(problem, "refill") for problem in self._choose(count, used)]

    def observe(self, problem: int, step: int, figures: Figures) -> None:
        """Only for `pools`: whether the latest group was mixed, solved or unsolved."""
        if not figures.zero_variance:
            self._status[problem] = MIXED
        else:
            self._status[problem] = SOLVED if figures.p >= 0.5 else UNSOLVED

    def free(self, problem: int) -> None:
        """No longer in flight."""
        self._flying[problem] = 0
        self._in_flight -= 1
        self._available[self._status[problem]] += 1

    def pools(self) -> dict[str, int]:
        """By latest group; `heap` holds those whose latest group had variance."""
        unseen, mixed, solved, unsolved = self._available
        return {
            "unseen": unseen,
            "heap": mixed,
            "solved": solved,
            "unsolved": unsolved,
            "cooling": 0,
            "in_flight": self._in_flight,
        }

    def metrics(self) -> dict[str, float]:
        """Share of the epoch that has been offered."""
        return {"epoch_share": self._next / self._problems}

    def take_notices(self) -> list[str]:
        """Nothing to say."""
        return []

    def _choose(self, count: int, used: Set[int]) -> list[int]:
        chosen: list[int] = []
        kept: dict[int, None] = {}
        for problem in self._deferred:
            if len(chosen) == count or not self._take(problem, used, chosen):
                kept[problem] = None
        left: int | None = None  # problems that could be taken; counted only when one could not
        while len(chosen) < count and left != 0:
            problem = self._shuffled()
            if problem not in kept and self._take(problem, used, chosen):
                left = None if left is None else left - 1
            else:
                kept[problem] = None
                if left is None:
                    waiting = sum(not self._flying[p] for p in used)
                    left = self._problems - self._in_flight - waiting
        self._deferred = list(kept)
        return chosen

    def _take(self, problem: int, used: Set[int], chosen: list[int]) -> bool:
        if self._flying[problem] or problem in used:
            return False
        self._flying[problem] = 1
        self._in_flight += 1
        self._available[self._status[problem]] -= 1
        chosen.append(problem)
        return True

    def _shuffled(self) -> int:
        """The next of the epoch's random order, which is drawn as it is needed (Fisher–Yates)."""
        if self._next == self._problems:
            self._next = 0
        order, here = self._order, self._next
        there = self._rng.randrange(here, self._problems)
        order[here], order[there] = order[there], order[here]
        self._next += 1
        return order[here]

    def state(self) -> dict[str, Any]:
        """Flat arrays, and the generator's state."""
        return {
            "rng": dump_random(self._rng),
            "order": dump(self._order),
            "next": self._next,
            "deferred": list(self._deferred),
            "status": bytes(self._status),
            "flying": bytes(self._flying),
            "available": list(self._available),
            "in_flight": self._in_flight,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Become the strategy that `state` was taken of."""
        load_random(self._rng, state["rng"])
        self._order = load("I", state["order"])
        self._next = state["next"]
        self._deferred = list(state["deferred"])
        self._status = bytearray(state["status"])
        self._flying = bytearray(state["flying"])
        self._available = list(state["available"])
        self._in_flight = state["in_flight"]
