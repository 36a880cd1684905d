"""What may teach the strategy, and how often each problem was visited.

Invariant: the strategy learns from the first outcome of a training task and nothing else: of its
first attempt, of the current generation, of a version not older than the last one observed for the
problem, whatever becomes of the group afterwards (trained, zero-variance, impure, stale, surplus).
For the strategy steps never go back: after a learner that starts anew at an earlier step they count
on from where they were, so that cooldowns and due dates keep their distance.
"""

from __future__ import annotations

from array import array
from collections.abc import Set
from typing import Any

from protocol.config import Config, PrioritizedConfig
from protocol.versions import Version
from scheduler.accounts import Task
from scheduler.flat import dump, load
from scheduler.grading import Figures
from scheduler.strategies.base import Pick, Strategy
from scheduler.strategies.prioritized import Prioritized
from scheduler.strategies.uniform import Uniform


def make_strategy(config: Config, problems: int) -> Strategy:
    """The strategy that the config names."""
    if isinstance(config.strategy, PrioritizedConfig):
        return Prioritized(config.strategy, problems, config.run.seed)
    return Uniform(problems, config.run.seed)


class Teaching:
    """The strategy, and who may speak to it.

    Attributes:
        distinct: problems that were visited.
        most_visits: of one problem.
    """

    def __init__(self, config: Config, problems: int) -> None:
        self.strategy = make_strategy(config, problems)
        self.distinct = 0
        self.most_visits = 0
        self._visits = array("I", bytes(4 * problems))
        # The strategy's step is the round's plus this.
        self._offset = 0
        self._latest = 0
        # 1 + step of the last observed version of the current generation; 0 is none.
        self._observed = array("I", bytes(4 * problems))

    def visited(self, problem: int) -> bool:
        """Did a group of this problem teach the strategy before?"""
        return self._visits[problem] > 0

    def begin(self, step: int) -> None:
        """A learner of a new generation is ready at `step`."""
        # Every version observed so far is older than any that comes now.
        self._observed = array("I", bytes(4 * len(self._observed)))
        self._offset = max(self._offset, self._latest - step)

    def select(self, step: int, count: int, used: Set[int], *, first: bool) -> list[Pick]:
        """Problems for the round of `step`; see `Strategy.select`."""
        return self.strategy.select(self._at(step), count, used, first=first)

    def refill(self, step: int, count: int, used: Set[int]) -> list[Pick]:
        """Replacements for the round of `step`; see `Strategy.refill`."""
        return self.strategy.refill(self._at(step), count, used)

    def outcome(
        self, task: Task, attempt: int, oldest: Version, current: Version, group: Figures
    ) -> None:
        """The first outcome of a training task whose group stands; `oldest` is its version."""
        problem = task.problem
        # The learner may be one step ahead of what it reported, and never more.
        possible = oldest.generation == current.generation and oldest.step <= current.step + 1
        if attempt != 1 or not possible or oldest.step + 1 < self._observed[problem]:
            return
        self._observed[problem] = oldest.step + 1
        visits = self._visits[problem] + 1
        self._visits[problem] = visits
        if visits == 1:
            self.distinct += 1
        if visits > self.most_visits:
            self.most_visits = visits
        self.strategy.observe(problem, self._at(task.step), group)

    def _at(self, step: int) -> int:
        step += self._offset
        self._latest = max(self._latest, step)
        return step

    def state(self) -> dict[str, Any]:
        """What `load` needs."""
        return {
            "strategy": self.strategy.state(),
            "distinct": self.distinct,
            "most_visits": self.most_visits,
            "offset": self._offset,
            "latest": self._latest,
            "visits": dump(self._visits),
            "observed": dump(self._observed),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Become what `state` was taken of."""
        self.strategy.load(state["strategy"])
        self.distinct, self.most_visits = state["distinct"], state["most_visits"]
        self._offset, self._latest = state["offset"], state["latest"]
        self._visits = load("I", state["visits"])
        self._observed = load("I", state["observed"])
