"""The accounts: every issued task, and the one end that each of them comes to.

Invariant, after every event: issued = Σ ends + in flight, where in flight is the number of tasks in
the table; a task leaves it by exactly one call of `end`, whatever happened to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from protocol.messages import GroupRef, Purpose, Reason, task_id
from protocol.records import Accounts
from protocol.versions import Version

ENDS = (
    "trained",
    "zero_variance",
    "stale",
    "impure",
    "skipped",
    "failed",
    "expired",
    "surplus",
    "evaluated",
)
ZERO_VARIANCE = ("all_right", "all_wrong", "mostly_truncated")


class Task:
    """One issued task that has not ended.

    Attributes:
        id, number, version, reason, seed, …: as in `protocol.messages.Task`.
        dataset: index of the evaluation set; -1 for the training problems.
        problem: index in that data set.
        step: of its round (training), or of the evaluated version.
        attempt: the latest; it waits for an actor while `actor` is None.
        avoid: the actor that lost the attempt before.
        got: attempt whose outcome came first; 0 while there is none.
        ref, oldest, reward: of that outcome.
    """

    __slots__ = (
        "actor",
        "attempt",
        "avoid",
        "dataset",
        "got",
        "group_size",
        "id",
        "number",
        "oldest",
        "problem",
        "purpose",
        "reason",
        "ref",
        "reward",
        "seed",
        "step",
        "temperature",
        "version",
    )

    def __init__(
        self,
        number: int,
        version: Version,
        purpose: Purpose,
        reason: Reason,
        dataset: int,
        problem: int,
        step: int,
        group_size: int,
        temperature: float,
        seed: int,
    ) -> None:
        self.number = number
        self.id = task_id(version.generation, number)
        self.version = version
        self.purpose: Purpose = purpose
        self.reason: Reason = reason
        self.dataset = dataset
        self.problem = problem
        self.step = step
        self.group_size = group_size
        self.temperature = temperature
        self.seed = seed
        self.attempt = 1
        self.actor: str | None = None
        self.avoid: str | None = None
        self.got = 0
        self.ref: GroupRef | None = None
        self.oldest: Version | None = None
        self.reward = 0.0

    @property
    def training(self) -> bool:
        """Is it a training task?"""
        return self.dataset < 0

    def state(self) -> list[Any]:
        """What `from_state` needs."""
        ref, oldest = self.ref, self.oldest
        return [
            self.number,
            [self.version.generation, self.version.step],
            self.purpose,
            self.reason,
            self.dataset,
            self.problem,
            self.step,
            self.group_size,
            self.temperature,
            self.seed,
            self.attempt,
            self.actor,
            self.avoid,
            self.got,
            None if ref is None else [ref.partition, ref.offset, ref.digest],
            None if oldest is None else [oldest.generation, oldest.step],
            self.reward,
        ]

    @classmethod
    def from_state(cls, state: list[Any]) -> Task:
        """The task that `state` was taken of."""
        task = cls(state[0], Version(*state[1]), *state[2:10])
        task.attempt, task.actor, task.avoid, task.got = state[10:14]
        task.ref = None if state[14] is None else GroupRef(*state[14])
        task.oldest = None if state[15] is None else Version(*state[15])
        task.reward = state[16]
        return task


class Books:
    """The table of tasks in flight, and how many were issued and ended."""

    def __init__(self) -> None:
        self.tasks: dict[str, Task] = {}
        self.next_number = 0
        self.issued: dict[tuple[str, str], int] = {}
        self._ends = dict.fromkeys(ENDS, 0)
        self._zero_variance = dict.fromkeys(ZERO_VARIANCE, 0)

    def issue(
        self,
        version: Version,
        purpose: Purpose,
        reason: Reason,
        dataset: int,
        problem: int,
        step: int,
        group_size: int,
        temperature: float,
        seed: int,
    ) -> Task:
        """Book a new task; see `Task` for the arguments."""
        number = self.next_number
        self.next_number = number + 1
        task = Task(
            number, version, purpose, reason, dataset, problem, step, group_size, temperature, seed
        )
        self.tasks[task.id] = task
        key = (purpose, reason)
        self.issued[key] = self.issued.get(key, 0) + 1
        return task

    def end(self, task: Task, end: str, kind: str = "") -> None:
        """Book the end of a task; `kind` is one of ZERO_VARIANCE where that is the end."""
        del self.tasks[task.id]
        self._ends[end] += 1
        if kind:
            self._zero_variance[kind] += 1

    def was_issued(self, task: str) -> bool:
        """Was a task of this id issued, whether or not it has ended?"""
        _, dash, number = task.partition("-")
        return bool(dash) and number.isdecimal() and int(number) < self.next_number

    def of_training(self) -> Iterator[Task]:
        """Training tasks in flight, in the order of issue."""
        return (task for task in self.tasks.values() if task.training)

    @property
    def accounts(self) -> Accounts:
        """As they are written."""
        return Accounts(
            issued=self.next_number,
            in_flight=len(self.tasks),
            ends=dict(self._ends),
            zero_variance=dict(self._zero_variance),
        )

    def state(self) -> dict[str, Any]:
        """What `load` needs."""
        return {
            "tasks": [task.state() for task in self.tasks.values()],
            "next_number": self.next_number,
            "issued": [[*key, count] for key, count in self.issued.items()],
            "ends": dict(self._ends),
            "zero_variance": dict(self._zero_variance),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Become the books that `state` was taken of."""
        tasks = [Task.from_state(task) for task in state["tasks"]]
        self.tasks = {task.id: task for task in tasks}
        self.next_number = state["next_number"]
        self.issued = {(purpose, reason): n for purpose, reason, n in state["issued"]}
        self._ends = dict(state["ends"])
        self._zero_variance = dict(state["zero_variance"])
