"""The round of one step: the places of its batch, and what holds each of them.

Invariant: each of the `planned` places holds a task (`alive`: issued and not ended), or is owed a
first pick (`owed`: the strategy had none when the round was picked), or wants a replacement
(`vacant`), or was given up: alive + owed + vacant ≤ planned. Replacements ≤ max_refill, and no
problem is issued twice for one step.
"""

from __future__ import annotations

from typing import Any

from scheduler.accounts import Task


class Round:
    """The round of one step.

    Attributes:
        step: of its batch.
        selected: whether the strategy made its first selection.
        owed, vacant: places without a task, see the module.
        refills: replacements issued.
        places: tasks issued; the next one's place.
        used: problems issued for this step, also for an empty round before this one.
        alive: its tasks that have not ended, by id.
        waiting: how many of them have no outcome.
        dry: the strategy had nothing to offer, and nothing has changed since.
        replays: tasks whose problem had been visited before.
        ends: how its tasks ended, for an empty round.
    """

    __slots__ = (
        "alive",
        "dry",
        "ends",
        "owed",
        "places",
        "refills",
        "replays",
        "selected",
        "step",
        "used",
        "vacant",
        "waiting",
    )

    def __init__(self, step: int) -> None:
        self.step = step
        self.selected = False
        self.owed = 0
        self.vacant = 0
        self.refills = 0
        self.places = 0
        self.used: set[int] = set()
        self.alive: dict[str, Task] = {}
        self.waiting = 0
        self.dry = False
        self.replays = 0
        self.ends: dict[str, int] = {}

    def again(self) -> None:
        """It came out empty: a new round for the same step, with a new refill."""
        self.selected = False
        self.owed = self.vacant = self.refills = 0
        self.dry = False
        self.ends = {}

    def add(self, task: Task) -> None:
        """A task takes one of its places."""
        task.step = self.step
        self.alive[task.id] = task
        self.used.add(task.problem)
        if not task.got:
            self.waiting += 1

    def remove(self, task: Task) -> None:
        """A task ended, goes to the learner, or moves to another round."""
        del self.alive[task.id]
        if not task.got:
            self.waiting -= 1

    def state(self) -> list[Any]:
        """What `from_state` needs."""
        return [
            self.step,
            self.selected,
            self.owed,
            self.vacant,
            self.refills,
            self.places,
            sorted(self.used),
            list(self.alive),
            self.dry,
            self.replays,
            dict(self.ends),
        ]

    @classmethod
    def from_state(cls, state: list[Any], tasks: dict[str, Task]) -> Round:
        """The round that `state` was taken of."""
        new = cls(state[0])
        new.selected, new.owed, new.vacant, new.refills, new.places = state[1:6]
        new.used = set(state[6])
        new.alive = {name: tasks[name] for name in state[7]}
        new.waiting = sum(not task.got for task in new.alive.values())
        new.dry, new.replays, new.ends = state[8], state[9], dict(state[10])
        return new
