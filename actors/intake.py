"""Which task runs next, which waits, and which has become useless: decisions only, no I/O.

A task waits, then runs in the engine, then is finished (graded, sent), then ends. Invariants: no
(task, attempt) enters twice; at most `slots` tasks run, and one that is being graded takes no slot;
a task that waits for newer weights blocks no other; a task marked `alone` starts when nothing else
has, and holds back those behind it until then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from protocol.messages import Held, Task
from protocol.versions import Version

# A copy that comes later than this many other tasks is not expected of any broker.
REMEMBERED = 100_000


@dataclass(slots=True)
class _Waiting:
    task: Task
    offset: int
    since: float


class Intake:
    """The tasks that one actor holds. Times are seconds of any one clock."""

    def __init__(self, slots: int, max_lag: int) -> None:
        self._slots = slots
        self._max_lag = max_lag
        self._waiting: dict[str, _Waiting] = {}
        self._running: dict[str, Task] = {}
        self._finishing: dict[str, Task] = {}
        self._seen: dict[str, None] = {}
        self._next_offset: int | None = None

    @property
    def running(self) -> list[Task]:
        """In the engine, in the order of their start."""
        return list(self._running.values())

    @property
    def finishing(self) -> list[Task]:
        """Sampled and not ended."""
        return list(self._finishing.values())

    @property
    def started(self) -> list[Task]:
        """Started and not ended."""
        return self.running + self.finishing

    @property
    def waiting(self) -> list[Task]:
        """Held and not started, in the order of their coming."""
        return [held.task for held in self._waiting.values()]

    @property
    def unstarted_offset(self) -> int | None:
        """Offset of the oldest task that has not started; what lag is counted from."""
        return next((h.offset for h in self._waiting.values()), self._next_offset)

    def offer(self, task: Task, offset: int, now: float) -> bool:
        """Take a task that came in. False if this (task, attempt) was seen before."""
        self._next_offset = offset + 1
        if task.group in self._seen:
            return False
        self._seen[task.group] = None
        if len(self._seen) > REMEMBERED:
            del self._seen[next(iter(self._seen))]
        self._waiting[task.group] = _Waiting(task, offset, now)
        return True

    def start(self, version: Version) -> list[Task]:
        """The tasks to start now, on weights `version`; they are running from here on."""
        started: list[Task] = []
        if any(task.alone for task in self._running.values()):
            return started
        for key, held in list(self._waiting.items()):
            if len(self._running) >= self._slots:
                break
            if held.task.version > version:
                continue
            if held.task.alone and (self._running or self._finishing):
                break
            del self._waiting[key]
            self._running[key] = held.task
            started.append(held.task)
            if held.task.alone:
                break
        return started

    def sampled(self, task: Task) -> None:
        """The task left the engine; its slot is free."""
        self._finishing[task.group] = self._running.pop(task.group)

    def end(self, task: Task) -> None:
        """The task ended, however it did."""
        self._running.pop(task.group, None)
        self._finishing.pop(task.group, None)
        self._waiting.pop(task.group, None)

    def useless(self, version: Version) -> list[Task]:
        """Tasks that wait or run and that weights `version` make useless.

        What is sampled already costs nothing more, and its outcome still teaches.
        """
        return [
            task
            for task in (*self.waiting, *self.running)
            if is_useless(task, version, self._max_lag)
        ]

    def lacking(self, version: Version) -> list[Task]:
        """Tasks that wait for weights newer than `version`."""
        return [task for task in self.waiting if task.version > version]

    def overdue(self, version: Version, now: float, wait: float) -> list[Task]:
        """Tasks that have waited longer than `wait` for weights newer than `version`."""
        return [
            held.task
            for held in self._waiting.values()
            if held.task.version > version and now - held.since > wait
        ]

    def clear(self) -> None:
        """Hold nothing any more."""
        self._waiting.clear()
        self._running.clear()
        self._finishing.clear()
        self._next_offset = None


def is_useless(task: Task, version: Version, max_lag: int) -> bool:
    """Can no batch and no evaluation use this task once weights `version` are loaded?

    A training task issued at step s belongs to batches up to step s + max_lag; an exact task to
    its own version. One that asks for newer weights is never useless: it waits for them.
    """
    if task.version >= version:
        return False
    if task.version.generation != version.generation or task.exact:
        return True
    return task.purpose == "train" and version.step - task.version.step > max_lag


def attempts(tasks: Iterable[Task]) -> list[Held]:
    """The tasks as heartbeats and releases name them."""
    return [Held(task.id, task.attempt) for task in tasks]
