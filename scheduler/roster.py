"""The actors that have joined: their leases, their partitions of `tasks`, and what each one holds.

Invariant: a partition belongs to at most one joined actor; an attempt that was addressed to an
actor is held by it until its outcome, its release or the actor's loss comes back, so that what an
actor holds is counted from the scheduler's own accounts and never exceeds slots + prefetch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from protocol.messages import Heartbeat, Held
from scheduler.accounts import Task

# Names of lost actors that are remembered, so as not to answer each of their heartbeats.
MAX_STRANGERS = 10_000


class Actor:
    """One joined actor.

    Attributes:
        order: the how many-th to join; the one earlier in order goes first on ties.
        capacity: slots + prefetch, the most attempts it may hold.
        free: attempts that it could take now.
        partition: of `tasks`, its alone; None while it waits for one.
        heard: log time of its last event.
        state: what it said last that it does.
        paused: released work and has not said since that it works: it gets none.
        held: attempt by task id, of what was addressed to it and has not come back.
        started: task ids among them that it said it started.
        outcomes: that it sent.
        tokens, seconds: as its last heartbeat said.
    """

    __slots__ = (
        "_works",
        "capacity",
        "free",
        "heard",
        "held",
        "name",
        "order",
        "outcomes",
        "partition",
        "paused",
        "seconds",
        "started",
        "state",
        "tokens",
    )

    def __init__(self, name: str, order: int, capacity: int, heard: float) -> None:
        self.name = name
        self.order = order
        self.capacity = capacity
        self.heard = heard
        self.partition: int | None = None
        self.state = "idle"
        self.paused = False
        self.held: dict[str, int] = {}
        self.started: set[str] = set()
        self.free = 0
        self._works = False
        self.outcomes = 0
        self.tokens = 0
        self.seconds: dict[str, float] = {}

    def count(self) -> None:
        """Bring `free` up to date after a change of partition, pause or what it holds."""
        self._works = self.partition is not None and not self.paused
        self.free = self.capacity - len(self.held) if self._works else 0

    def take(self, task: Task) -> None:
        """The latest attempt of `task` is addressed to it."""
        self.held[task.id] = task.attempt
        self.free -= 1

    def give_back(self, task: str, attempt: int) -> bool:
        """An attempt came back, however. Returns whether it was held."""
        if self.held.get(task) != attempt:
            return False
        del self.held[task]
        self.started.discard(task)
        if self._works:
            self.free += 1
        return True

    def pause(self, paused: bool) -> None:
        """It takes no work, or takes some again."""
        self.paused = paused
        self.count()

    def missing(self, listed: list[Held]) -> list[tuple[str, int]]:
        """Started and unfinished attempts that its list of held ones no longer names."""
        names = {(held.task, held.attempt) for held in listed}
        mine = [(task, attempt) for task, attempt in self.held.items() if task in self.started]
        return [pair for pair in mine if pair not in names]

    def figures(self) -> dict[str, float]:
        """For the end record: outcomes, tokens, and seconds by state."""
        return {"tasks": self.outcomes, "tokens": self.tokens, **self.seconds}

    def state_list(self) -> list[Any]:
        """What `from_state` needs."""
        return [
            self.name,
            self.order,
            self.capacity,
            self.heard,
            self.partition,
            self.state,
            self.paused,
            dict(self.held),
            sorted(self.started),
            self.outcomes,
            self.tokens,
            dict(self.seconds),
        ]

    @classmethod
    def from_state(cls, state: list[Any]) -> Actor:
        """The actor that `state_list` was taken of."""
        actor = cls(*state[:4])
        actor.partition, actor.state, actor.paused = state[4:7]
        actor.held, actor.started = dict(state[7]), set(state[8])
        actor.outcomes, actor.tokens, actor.seconds = state[9], state[10], dict(state[11])
        actor.count()
        return actor


class Roster:
    """The joined actors, in the order in which they joined."""

    def __init__(self, most: int, prefetch: int, lease: float) -> None:
        """`most`: partitions for actors, numbered from 1; `lease`: seconds of log time."""
        self._most, self._prefetch, self._lease = most, prefetch, lease
        self.actors: dict[str, Actor] = {}
        self._joins = 0
        self._past: dict[str, dict[str, float]] = {}
        # Log time of the last answer to a name that is not joined.
        self._strangers: dict[str, float] = {}

    def __iter__(self) -> Iterator[Actor]:
        return iter(self.actors.values())

    def __len__(self) -> int:
        return len(self.actors)

    def join(self, name: str, slots: int, now: float) -> Actor:
        """A new actor, without a partition yet."""
        actor = Actor(name, self._joins, slots + self._prefetch, now)
        self._joins += 1
        self.actors[name] = actor
        self._strangers.pop(name, None)
        return actor

    def leave(self, actor: Actor) -> None:
        """The actor is given up; its partition is free for the next."""
        del self.actors[actor.name]
        _add(self._past.setdefault(actor.name, {}), actor)

    def seat(self) -> list[Actor]:
        """Give free partitions, lowest first, to waiting actors; returns those that got one."""
        waiting = [actor for actor in self if actor.partition is None]
        if not waiting:
            return []
        taken = {actor.partition for actor in self}
        free = [p for p in range(1, self._most + 1) if p not in taken]
        seated = waiting[: len(free)]
        for actor, partition in zip(seated, free, strict=False):
            actor.partition = partition
            actor.count()
        return seated

    def heartbeat(self, actor: Actor, event: Heartbeat) -> None:
        """Note what the actor says of itself; whether it takes work follows from it."""
        actor.state = event.state
        actor.pause(event.state == "draining")
        actor.tokens = event.tokens
        if event.seconds:
            actor.seconds = dict(event.seconds)

    def silent(self, now: float) -> list[Actor]:
        """Actors whose lease has lapsed."""
        return [actor for actor in self if now - actor.heard > self._lease]

    def answer(self, name: str, now: float) -> bool:
        """Should one that is not joined be told (again) to join as new? At most once a lease."""
        last = self._strangers.get(name)
        if last is not None and now - last <= self._lease:
            return False
        self._strangers.pop(name, None)
        self._strangers[name] = now
        if len(self._strangers) > MAX_STRANGERS:
            del self._strangers[next(iter(self._strangers))]
        return True

    def figures(self) -> dict[str, dict[str, float]]:
        """By actor, lost ones included."""
        figures = {name: dict(past) for name, past in self._past.items()}
        for actor in self:
            _add(figures.setdefault(actor.name, {}), actor)
        return figures

    def summary(self) -> dict[str, dict[str, Any]]:
        """The joined ones, for people and metrics."""
        return {
            actor.name: {
                "state": actor.state,
                "open": len(actor.held),
                "capacity": actor.capacity,
                "partition": actor.partition,
                "heard": actor.heard,
                "tokens": actor.tokens,
                "seconds": dict(actor.seconds),
                "outcomes": actor.outcomes,
            }
            for actor in self
        }

    def state(self) -> dict[str, Any]:
        """What `load` needs."""
        return {
            "actors": [actor.state_list() for actor in self],
            "joins": self._joins,
            "past": [[name, dict(past)] for name, past in self._past.items()],
            "strangers": [[name, at] for name, at in self._strangers.items()],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Become the roster that `state` was taken of."""
        actors = [Actor.from_state(actor) for actor in state["actors"]]
        self.actors = {actor.name: actor for actor in actors}
        self._joins = state["joins"]
        self._past = {name: dict(past) for name, past in state["past"]}
        self._strangers = dict(state["strangers"])


def _add(figures: dict[str, float], actor: Actor) -> None:
    # Tokens and seconds count from the start of the actor's process, however often it joined.
    for name, value in actor.figures().items():
        before = figures.get(name, 0)
        figures[name] = before + value if name == "tasks" else max(before, value)
