"""Drives a core by hand: configs, outcomes, and a record of what came out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from protocol.config import Config
from protocol.messages import (
    BatchReleased,
    GroupEnd,
    GroupRef,
    Joined,
    LearnerReady,
    Outcome,
    SchedulerStarted,
    StepCompleted,
    Tick,
)
from protocol.versions import Version
from scheduler.commands import Command, IssueTask, SendBatch
from scheduler.core import Core
from scheduler.evaluation import EvalSet

C = TypeVar("C")
RIGHT, WRONG, MIXED = (1.0, 1.0), (0.0, 0.0), (1.0, 0.0)
REF = GroupRef(0, 7, bytes(32))


def config(**sections: Any) -> Config:
    """A valid config with groups of 2; `run={"steps": 3}` and so on change it."""
    base: dict[str, Any] = {
        "model": {"path": "model"},
        "data": {"train": "train.jsonl"},
        "run": {"steps": 4, "prompts_per_step": 2},
        "rollout": {"group_size": 2, "max_tokens": 8},
        "strategy": {"name": "prioritized"},
        "actors": {"slots": 8, "prefetch": 2, "max": 4},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return Config.model_validate(base)


def outcome(task: IssueTask, /, rewards: Sequence[float | None] = MIXED, **other: Any) -> Outcome:
    """What the actor of `task` sends when its group has these rewards."""
    graded = [reward for reward in rewards if reward is not None]
    sent = task.send == "all" or (task.send == "mixed" and len(set(graded)) > 1)
    values: dict[str, Any] = {
        "actor": task.actor,
        "task": task.id,
        "attempt": task.attempt,
        "status": "ok",
        "rewards": list(rewards),
        "correct": list(rewards),
        "lengths": [3] * len(rewards),
        "truncated": [False] * len(rewards),
        "oldest": task.version,
        "newest": task.version,
        "group": REF if sent else None,
    }
    return Outcome(**{**values, **other})


def failed(task: IssueTask) -> Outcome:
    """What the actor of `task` sends when its grader fails."""
    return Outcome(
        actor=task.actor, task=task.id, attempt=task.attempt, status="failed", why="grader died"
    )


def completed(batch: BatchReleased, end: Any = "trained", **metrics: float) -> StepCompleted:
    """The learner did the batch, and every group came to `end`."""
    ends = [GroupEnd(group.task, group.attempt, end) for group in batch.groups]
    return StepCompleted(version=batch.version, ends=ends, metrics=metrics)


class Driven:
    """A core with a learner of generation 0 and one actor, and what it commanded."""

    def __init__(
        self,
        cfg: Config,
        problems: int = 100,
        eval_sets: Sequence[EvalSet] = (),
        actors: Sequence[str] = ("a",),
    ) -> None:
        self.core = Core(cfg, problems, eval_sets)
        self.log: list[Command] = []
        self.apply(SchedulerStarted(epoch=1, host="", pid=0))
        for actor in actors:
            self.apply(Joined(actor=actor, slots=cfg.actors.slots, version=Version(0, 0)))
        self.log.clear()

    def ready(self, generation: int = 0, step: int = 0) -> list[IssueTask]:
        """A learner is ready; returns the tasks that were issued."""
        return self.tasks(LearnerReady(version=Version(generation, step)))

    def apply(self, *events: Any) -> list[Command]:
        """Apply events; returns their commands."""
        commands = [command for event in events for command in self.core.apply(event)]
        self.log += commands
        return commands

    def tasks(self, *events: Any) -> list[IssueTask]:
        """Apply events; returns the tasks that they caused."""
        return of(IssueTask, self.apply(*events))

    def batch(self, *events: Any) -> BatchReleased:
        """Apply events; returns the one batch that they caused."""
        (batch,) = batches(self.apply(*events))
        return batch

    def wait(self, seconds: int) -> list[Command]:
        """Log time passes."""
        return self.apply(*[Tick(epoch=1, seconds=1.0)] * seconds)

    @property
    def ends(self) -> dict[str, int]:
        """Ends that occurred, with their numbers."""
        return {end: count for end, count in self.core.accounts.ends.items() if count}


def of(kind: type[C], commands: Sequence[Any]) -> list[C]:
    """The commands of one kind."""
    return [command for command in commands if isinstance(command, kind)]


def batches(commands: Sequence[Any]) -> list[BatchReleased]:
    """The batches among the commands."""
    messages = [command.message for command in of(SendBatch, commands)]
    return [message for message in messages if isinstance(message, BatchReleased)]
