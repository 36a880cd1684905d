"""The open rounds together: which groups make the next batch, and what it has to wait for.

A batch takes ready groups of all open rounds, oldest version first, then in the order of issue.
Tasks of its own round that it leaves behind move on: what remains is dealt to the later rounds in
the same order.

Why no group becomes too old. At current step c and lag L, a task issued at version v may be
trained in batches up to v + L, and is issued for a round ≤ v + L. The batch of step c is held back
while, for any v in [c − L, c], late tasks (without an outcome) are among more tasks of versions ≤ v
than the batches after it take: remaining(≤ v) > planned · (v + L − c). For v = c − L this is the
rule that no group issued at step c − L is left without an outcome; for L ≥ 2 the others keep fast
young groups from crowding out slow old ones. The rounds up to v + L hold at most `planned` tasks
each, so waiting for the late ones suffices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scheduler.accounts import Task
from scheduler.round import Round


def _age(task: Task) -> tuple[int, int]:
    """Oldest version first, then the order of issue."""
    return task.version.step, task.number


class OpenRounds:
    """The rounds of the current step and of those after it.

    Attributes:
        ready: groups that wait for a batch.
    """

    def __init__(self, planned: int, lag: int) -> None:
        """`planned`: groups of a full batch; `lag`: largest age L in steps."""
        self._planned, self._lag = planned, lag
        self._rounds: dict[int, Round] = {}
        self.ready = 0
        # Tasks without outcome by the step of their version.
        self._waiting: dict[int, int] = {}

    def __iter__(self) -> Iterator[Round]:
        return iter(self._rounds.values())

    def open(self, step: int) -> Round:
        """The round of `step`; it is opened if it is not."""
        found = self._rounds.get(step)
        if found is None:
            found = self._rounds[step] = Round(step)
        return found

    @property
    def tasks(self) -> Iterator[Task]:
        """Tasks in all rounds."""
        return (task for each in self for task in each.alive.values())

    def __len__(self) -> int:
        return sum(len(each.alive) for each in self)

    def add(self, current: Round, task: Task) -> None:
        """A task is issued for a round."""
        current.add(task)
        step = task.version.step
        self._waiting[step] = self._waiting.get(step, 0) + 1

    def got(self, task: Task, attempt: int) -> None:
        """The first outcome of a task came in."""
        task.got = attempt
        self._rounds[task.step].waiting -= 1
        self._no_longer_waits(task)

    def remove(self, task: Task) -> Round | None:
        """A task ended; returns its round, None if it was at the learner."""
        current = self._rounds.get(task.step)
        if current is None or task.id not in current.alive:
            return None
        current.remove(task)
        if not task.got:
            self._no_longer_waits(task)
        elif task.ref is not None:
            self.ready -= 1
        return current

    def too_old(self, step: int) -> int:
        """Tasks without outcome that would be too old for the batch after that of `step`."""
        waiting, last = self._waiting, step - self._lag
        if len(waiting) == 1:
            (version,) = waiting
            return waiting[version] if version <= last else 0
        return sum(count for version, count in waiting.items() if version <= last)

    def size(self, step: int, too_old: int) -> int | None:
        """Groups that the batch of `step` would take, were it not for late ones.

        A full batch if so many are ready; what its round has ready if nothing of the round is open
        but tasks that would be too old for the next batch; where its round has come to nothing,
        what the later rounds have ready when nothing of them is open either. None if it is too
        early; 0 if there is nothing at all. `too_old` is that of `step`.
        """
        if self.ready >= self._planned:
            return self._planned
        current = self._rounds.get(step)
        if current is None or current.waiting > too_old:
            return None
        if current.alive:
            return len(current.alive) - current.waiting
        return None if self._waiting else self.ready

    def held(self, step: int, size: int, too_old: int) -> bool:
        """Has a batch of `size` groups to wait for late ones?"""
        return too_old > 0 or (self._lag > 1 and bool(self.late(step, size)))

    def late(self, step: int, size: int) -> list[Task]:
        """The tasks without outcome that hold up a batch of `size` groups; see the module."""
        tasks = sorted(self.tasks, key=_age)
        for version in range(step - self._lag, max(step, step - self._lag + 1)):
            old = [task for task in tasks if task.version.step <= version]
            late = [task for task in old if not task.got]
            remaining = len(old) - min(size, len(old) - len(late))
            if late and remaining > self._planned * (version + self._lag - step):
                return late
        return []

    def take(self, step: int, size: int) -> tuple[list[Task], Round]:
        """Take the batch of `step` out, and deal what remains to the later rounds.

        Returns its groups, oldest first, and its round, which is closed. A later round whose groups
        were taken gets tasks of the closed one in exchange; where those do not suffice its places
        become vacant.
        """
        groups = sorted((task for task in self.tasks if task.got), key=_age)[:size]
        current = self._rounds.pop(step)
        later = [self._rounds[s] for s in sorted(self._rounds)]
        sizes = [len(each.alive) for each in later]
        for task in groups:
            (current if task.step == step else self._rounds[task.step]).remove(task)
        self.ready -= size
        if current.alive or [len(each.alive) for each in later] != sizes:
            self._deal([current, *later], later, sizes)
        return groups, current

    def clear(self) -> None:
        """Close all rounds; their tasks have ended."""
        self._rounds, self._waiting, self.ready = {}, {}, 0

    def _deal(self, old: list[Round], later: list[Round], sizes: list[int]) -> None:
        remaining = sorted((task for each in old for task in each.alive.values()), key=_age)
        for each in old:
            for task in list(each.alive.values()):
                each.remove(task)
        for each, size in zip(later, sizes, strict=True):
            dealt, remaining = remaining[:size], remaining[size:]
            for task in dealt:
                each.add(task)
            each.vacant += size - len(dealt)

    def _no_longer_waits(self, task: Task) -> None:
        waiting, step = self._waiting, task.version.step
        if waiting[step] == 1:
            del waiting[step]
        else:
            waiting[step] -= 1

    def state(self) -> list[Any]:
        """What `load` needs."""
        return [each.state() for each in self]

    def load(self, state: list[Any], tasks: dict[str, Task]) -> None:
        """Become the rounds that `state` was taken of; `tasks` are those in flight."""
        rounds = [Round.from_state(each, tasks) for each in state]
        self._rounds = {each.step: each for each in rounds}
        self.ready = sum(task.ref is not None for task in self.tasks)
        self._waiting = {}
        for task in self.tasks:
            if not task.got:
                step = task.version.step
                self._waiting[step] = self._waiting.get(step, 0) + 1
