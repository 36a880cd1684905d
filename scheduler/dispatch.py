"""The queue of attempts that wait for an actor, and which actor gets the next one.

Invariant: an attempt is in the queue exactly while its task has neither an outcome nor an actor;
it goes to the actor with the largest free share of its capacity (ties: the one that joined first),
so that equal actors share evenly; a new attempt goes to another actor than the one that lost it,
if another has room. What the next batch needs goes first: training tasks by round, the evaluation
of a version right after the round of that step; within these, in the order of issue.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any

from scheduler.accounts import Books, Task
from scheduler.roster import Actor, Roster

SMALLEST_REBUILT = 256


class Dispatch:
    """Addresses queued attempts to actors.

    Attributes:
        queue: (urgency, number, attempt, task id), a heap; what no longer waits is skipped when it
            comes to the top.
        changed: actors whose room has changed since an attempt was addressed, by name; whoever
            changes it adds them.
    """

    def __init__(self, books: Books, roster: Roster) -> None:
        self._books, self._roster = books, roster
        self.queue: list[tuple[int, int, int, str]] = []
        self.changed: dict[str, Actor] = {}
        # (−free share, order, name); valid while that is still the actor's share.
        self._rooms: list[tuple[float, int, str]] = []
        self._most_rooms = SMALLEST_REBUILT

    def add(self, tasks: Iterable[Task]) -> None:
        """The latest attempt of each of `tasks` waits for an actor."""
        for task in tasks:
            task.actor = None
            urgency = 2 * task.step + (0 if task.training else 1)
            heapq.heappush(self.queue, (urgency, task.number, task.attempt, task.id))

    def next(self) -> tuple[Task, Actor] | None:
        """Address the most urgent attempt; None where nothing waits or nobody has room."""
        task = self._first()
        if task is None:
            return None
        actor = self._choose(task.avoid)
        if actor is None:
            return None
        heapq.heappop(self.queue)
        task.actor = actor.name
        actor.take(task)
        self.changed[actor.name] = actor
        return task, actor

    def waiting(self) -> list[Task]:
        """Tasks whose latest attempt waits, most urgent first."""
        return [self._books.tasks[entry[3]] for entry in sorted(self.queue) if self._waits(entry)]

    def _waits(self, entry: tuple[int, int, int, str]) -> bool:
        task = self._books.tasks.get(entry[3])
        return task is not None and task.attempt == entry[2] and not task.got and task.actor is None

    def _first(self) -> Task | None:
        queue = self.queue
        while queue:
            if self._waits(queue[0]):
                return self._books.tasks[queue[0][3]]
            heapq.heappop(queue)
        return None

    def _choose(self, avoid: str | None) -> Actor | None:
        for actor in self.changed.values():
            if actor.free > 0:
                room = (-actor.free / actor.capacity, actor.order, actor.name)
                heapq.heappush(self._rooms, room)
        self.changed.clear()
        if len(self._rooms) > self._most_rooms:
            self._rebuild()
        best = self._top()
        if best is None or best.name != avoid:
            return best
        aside = heapq.heappop(self._rooms)
        other = self._top()
        while other is best:
            heapq.heappop(self._rooms)
            other = self._top()
        heapq.heappush(self._rooms, aside)
        return best if other is None else other

    def _top(self) -> Actor | None:
        rooms = self._rooms
        while rooms:
            share, order, name = rooms[0]
            actor = self._roster.actors.get(name)
            if (
                actor is not None
                and actor.order == order
                and actor.free > 0
                and share == -actor.free / actor.capacity
            ):
                return actor
            heapq.heappop(rooms)
        return None

    def _rebuild(self) -> None:
        self._rooms = [(-a.free / a.capacity, a.order, a.name) for a in self._roster if a.free > 0]
        heapq.heapify(self._rooms)
        self.changed.clear()
        self._most_rooms = 4 * len(self._rooms) + SMALLEST_REBUILT

    def state(self) -> list[list[Any]]:
        """What `load` needs; which actor has how much room follows from the roster."""
        return [list(entry) for entry in sorted(self.queue) if self._waits(entry)]

    def load(self, state: list[list[Any]]) -> None:
        """Become the queue that `state` was taken of; books and roster come first."""
        self.queue = [(urgency, number, attempt, name) for urgency, number, attempt, name in state]
        heapq.heapify(self.queue)
        self._rebuild()
