"""The actors' comings and goings, and what becomes of the attempts that they hold.

Invariant: an attempt that comes back without an outcome (its actor fell silent, released it, lost
it or lost its engine) is issued again at once, to another actor if one has room; after
`waits.max_attempts` the task is given up. An actor that released work gets none until its next
heartbeat says that it works, so that one that leaves does not use up attempts. `Joined` always
means: I hold nothing. An actor that speaks without being joined is told to join as new, once a
lease.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from protocol.config import Config
from protocol.messages import (
    Assigned,
    EngineDied,
    Heartbeat,
    Joined,
    Outcome,
    Rejoin,
    Released,
    Started,
)
from scheduler.accounts import Books, Task
from scheduler.clock import Clock
from scheduler.dispatch import Dispatch
from scheduler.journal import Journal
from scheduler.roster import Actor, Roster


class Fleet:
    """Applies the events of actors.

    Attributes:
        roster: the joined actors.
        dispatch: the queue of attempts, and who gets the next one.
        closed: the run ends: nobody joins, and what comes back is given up.
    """

    def __init__(
        self,
        config: Config,
        books: Books,
        clock: Clock,
        journal: Journal,
        give_up: Callable[[Task], None],
    ) -> None:
        """`give_up` ends a task of which no attempt will bring an outcome any more."""
        self._max_attempts = config.waits.max_attempts
        self._books = books
        self._clock = clock
        self._journal = journal
        self._give_up = give_up
        self.roster = Roster(config.actors.max, config.actors.prefetch, config.waits.lease)
        self.dispatch = Dispatch(books, self.roster)
        self.closed = False

    def joined(self, event: Joined) -> None:
        """An actor takes work; it gets a partition if one is free."""
        if self.closed:
            self._journal.note("joined_after_the_end")
            return
        before = self.roster.actors.get(event.actor)
        if before is not None:
            self._journal.note("joined_again")
            self._lose(before)
        self.roster.join(event.actor, event.slots, self._clock.seconds)
        where = f" on {event.host} (pid {event.pid})" if event.host else ""
        self._journal.say("info", f"actor {event.actor}{where} joined with {event.slots} slots")
        self._seat()

    def started(self, event: Started) -> None:
        """An attempt entered an engine."""
        actor = self.spoke(event.actor)
        if actor is not None and actor.held.get(event.task) == event.attempt:
            actor.started.add(event.task)
        else:
            self._journal.note("started_unknown")

    def heartbeat(self, event: Heartbeat) -> None:
        """An actor lives, and tells what it does and perhaps what it holds."""
        actor = self.spoke(event.actor)
        if actor is None:
            return
        self.roster.heartbeat(actor, event)
        if event.held is not None:
            for task, attempt in actor.missing(event.held):
                self._journal.note("lost_by_actor")
                actor.give_back(task, attempt)
                self._came_back(task, attempt, actor.name)
        self.dispatch.changed[actor.name] = actor

    def released(self, event: Released) -> None:
        """Attempts go back unrun or unfinished."""
        actor = self.spoke(event.actor)
        if actor is None:
            return
        actor.pause(True)
        for each in event.attempts:
            if actor.give_back(each.task, each.attempt):
                self._came_back(each.task, each.attempt, actor.name)
            else:
                self._journal.note("released_unknown")

    def engine_died(self, event: EngineDied) -> None:
        """An actor leaves because its engine died."""
        self._journal.note("engine_deaths")
        actor = self.roster.actors.get(event.actor)
        if actor is None:
            return
        why = event.error or "no reason given"
        self._journal.say("warning", f"actor {actor.name}: its engine died: {why}")
        self._lose(actor)
        self._seat()

    def outcome(self, event: Outcome) -> None:
        """An attempt is no longer held, whatever its outcome is worth."""
        actor = self.spoke(event.actor)
        if actor is not None and actor.give_back(event.task, event.attempt):
            actor.outcomes += 1
            self.dispatch.changed[actor.name] = actor

    def lapse(self) -> None:
        """Time passed: give up the actors that are silent."""
        for actor in self.roster.silent(self._clock.seconds):
            silence = self._clock.seconds - actor.heard
            self._journal.note("silent_actors")
            self._journal.say(
                "warning",
                f"actor {actor.name}: silent for {silence:.0f} s; the {len(actor.held)} tasks "
                "that it holds go to others",
            )
            self._lose(actor)
        self._seat()

    def spoke(self, name: str) -> Actor | None:
        """An event of an actor: keeps its lease; None if it is not joined."""
        actor = self.roster.actors.get(name)
        if actor is not None:
            actor.heard = self._clock.seconds
            return actor
        self._journal.note("spoke_unjoined")
        if not self.closed and self.roster.answer(name, self._clock.seconds):
            self._journal.control(Rejoin(actor=name))
        return None

    def _came_back(self, name: str, attempt: int, actor: str) -> None:
        task = self._books.tasks.get(name)
        if task is None or task.got or task.attempt != attempt:
            return
        task.actor = None
        if self.closed or attempt >= self._max_attempts:
            self._give_up(task)
            return
        self._journal.note("reissued")
        task.attempt += 1
        task.avoid = actor
        self.dispatch.add([task])

    def _lose(self, actor: Actor) -> None:
        self.roster.leave(actor)
        for task, attempt in list(actor.held.items()):
            self._came_back(task, attempt, actor.name)

    def _seat(self) -> None:
        for actor in self.roster.seat():
            assert actor.partition is not None
            self._journal.control(Assigned(actor=actor.name, partition=actor.partition))
            self.dispatch.changed[actor.name] = actor

    def state(self) -> dict[str, Any]:
        """What `load` needs."""
        return {
            "roster": self.roster.state(),
            "dispatch": self.dispatch.state(),
            "closed": self.closed,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Become what `state` was taken of; the books come first."""
        self.roster.load(state["roster"])
        self.dispatch.load(state["dispatch"])
        self.closed = state["closed"]
