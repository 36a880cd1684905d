"""What holds after every event, whatever the events are."""

from __future__ import annotations

from random import Random
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.messages import (
    EngineDied,
    EventRecord,
    GroupEnd,
    Heartbeat,
    Held,
    Joined,
    LearnerReady,
    Outcome,
    Released,
    SchedulerStarted,
    Started,
    StepCompleted,
    StopRequested,
    Tick,
)
from protocol.versions import Version
from scheduler.commands import Command, IssueTask
from scheduler.core import Core
from scheduler.evaluation import EvalSet
from tests.scheduler.driving import MIXED, RIGHT, WRONG, batches, config, failed, of, outcome

PROBLEMS = 14
EVAL = [EvalSet("held_out", ["x", "y"], 2, 2, True, 1.0, 4)]


class Chaos:
    """Invents events, fitting and unfitting ones, and checks the core after each of them."""

    def __init__(self, seed: int, lag: int, **run: Any) -> None:
        self.rng = Random(seed)
        self.config = config(
            run={"steps": 5, "prompts_per_step": 3, "max_lag": lag, "straggler_wait": 30, **run},
            actors={"slots": 2, "prefetch": 1, "max": 2},
            waits={"max_attempts": 3, "lease": 10, "drain": 20, "no_progress": 500},
            strategy={"name": self.rng.choice(["prioritized", "uniform"])},
        )
        self.core = self.watched(Core(self.config, PROBLEMS, EVAL))
        self.twin: Core | None = None
        self.tasks: list[IssueTask] = []
        self.outcomes: list[Outcome] = []
        self.won: dict[str, Outcome] = {}
        self.batch: Any = None
        self.names = 0
        self.generation = 0
        self.left = False
        self.learner_stopped = False

    def watched(self, core: Core) -> Core:
        """Every issue of a training task is noted: no problem twice for one step."""
        issued: set[tuple[int, int, int]] = set()
        issue = core._books.issue

        def watch(*args: Any) -> Any:
            version, purpose, _, _, problem, step = args[:6]
            if purpose == "train":
                assert (version.generation, step, problem) not in issued
                issued.add((version.generation, step, problem))
            return issue(*args)

        core._books.issue = watch  # type: ignore[method-assign]
        return core

    def apply(self, event: EventRecord) -> list[Command]:
        task = self.core._books.tasks.get(event.task) if isinstance(event, Outcome) else None
        open_before = task is not None and not task.got
        commands = self.core.apply(event)
        if isinstance(event, Outcome) and open_before and task is not None and task.got:
            self.won[task.id] = event
        if self.twin is not None:
            assert self.twin.apply(event) == commands
        self.tasks += of(IssueTask, commands)
        for batch in batches(commands):
            self.check_batch(batch)
            self.batch = batch
        self.left = self.left or any(type(c).__name__ == "Leave" for c in commands)
        self.check()
        return commands

    def check(self) -> None:
        core, run = self.core, self.config.run
        accounts = core.accounts
        assert accounts.issued == sum(accounts.ends.values()) + accounts.in_flight
        assert sum(accounts.zero_variance.values()) == accounts.ends["zero_variance"]
        training = [task for task in core._books.tasks.values() if task.training]
        problems = [task.problem for task in training]
        assert len(set(problems)) == len(problems)
        assert len(training) <= (run.max_lag + 1) * run.prompts_per_step
        pools = core.pools()
        assert sum(pools.values()) == PROBLEMS
        assert pools["in_flight"] == len(training)
        partitions = [a["partition"] for a in core.roster.values() if a["partition"] is not None]
        assert len(set(partitions)) == len(partitions)
        assert set(partitions) <= {1, 2}
        assert all(a["open"] <= a["capacity"] for a in core.roster.values())

    def check_batch(self, batch: Any) -> None:
        assert 1 <= len(batch.groups) <= self.config.run.prompts_per_step
        assert batch.version == self.core.version
        for group in batch.groups:
            came = self.won[group.task]
            assert came.attempt == group.attempt
            assert came.oldest is not None
            assert came.newest is not None
            assert came.oldest.generation == batch.version.generation
            assert batch.version.step - came.oldest.step <= self.config.run.max_lag
            assert came.newest.step <= batch.version.step

    def anything(self) -> EventRecord:
        """One event, fitting or not."""
        rng = self.rng
        kind = rng.choice(
            ["outcome"] * 8
            + ["step"] * 3
            + ["join", "beat", "tick", "tick", "started", "released", "late", "odd", "learner"]
        )
        if kind == "outcome" and self.tasks:
            return self.result(rng.choice(self.tasks[-8:]))
        if kind == "late" and self.outcomes:
            return rng.choice(self.outcomes)
        if kind == "step" and self.batch is not None:
            ends = ["trained"] * 6 + ["stale", "impure", "skipped", "failed"]
            named = [g for g in self.batch.groups if rng.random() < 0.9]
            return StepCompleted(
                version=self.batch.version,
                ends=[GroupEnd(g.task, g.attempt, rng.choice(ends)) for g in named],  # type: ignore[arg-type]
            )
        if kind == "tick":
            return Tick(epoch=rng.choice([1, 1, 1, 0]), seconds=2.0)
        if kind == "learner":
            self.generation += rng.random() < 0.05
            generation = self.generation - (rng.random() < 0.3 and self.generation > 0)
            return LearnerReady(version=Version(generation, rng.choice([0, 0, 1, 9])))
        return self.of_an_actor(kind)

    def of_an_actor(self, kind: str) -> EventRecord:
        rng = self.rng
        name = f"actor-{rng.randrange(max(1, self.names - 3), self.names + 2)}"
        mine = [task for task in self.tasks if task.actor == name][-3:]
        held = [Held(task.id, task.attempt) for task in mine if rng.random() < 0.7]
        if kind == "join" or not self.names:
            self.names += 1
            return Joined(actor=f"actor-{self.names}", slots=2, version=Version(0, 0))
        if kind == "started" and mine:
            return Started(actor=name, task=mine[0].id, attempt=mine[0].attempt)
        if kind == "released" and held:
            return Released(actor=name, attempts=held)
        if kind == "odd":
            return rng.choice(
                [
                    EngineDied(actor=name, attempts=held, error="boom"),
                    Outcome(actor=name, task="0-99999", attempt=1, status="failed", why="?"),
                    Outcome(actor=name, task="no task", attempt=1, status="failed", why="?"),
                    SchedulerStarted(epoch=rng.choice([0, 1]), host="", pid=0),
                    StepCompleted(version=Version(7, 7), ends=[]),
                    Started(actor=name, task="9-9", attempt=4),
                ]
            )
        state: Any = rng.choice(["generating", "idle", "draining"])
        listed = rng.choice([None, held])
        return Heartbeat(actor=name, state=state, version=Version(0, 0), held=listed)

    def result(self, task: IssueTask) -> Outcome:
        rng = self.rng
        now = self.core.version or Version(0, 0)
        version = rng.choice([task.version] * 6 + [now, now.next_step(), Version(9, 0)])
        rewards = rng.choice([MIXED] * 4 + [RIGHT, WRONG, (None, 1.0), (1.0,)])
        result = outcome(task, rewards, oldest=min(task.version, version), newest=version)
        if rng.random() < 0.1:
            result = failed(task)
        if rng.random() < 0.1:
            result = outcome(task, MIXED, group=None)
        self.outcomes.append(result)
        return result

    def finish(self) -> None:
        """From here on everyone behaves; the run has to end."""
        self.apply(Joined(actor="last", slots=4, version=Version(0, 0)))
        if self.core.version is None:
            self.apply(LearnerReady(version=Version(self.generation + 1, 0)))
        done: set[tuple[str, int]] = set()
        for _ in range(2000):
            if self.left:
                return
            mine = [task for task in self.tasks if task.actor == "last"]
            todo = [task for task in mine if (task.id, task.attempt) not in done]
            if todo:
                rewards = self.rng.choice([MIXED, MIXED, RIGHT, WRONG])
                task = todo[0]
                done.add((task.id, task.attempt))
                # Its weights are the current ones, or the task's own where those are demanded.
                now = task.version if task.exact or self.core.version is None else self.core.version
                result = outcome(task, rewards, oldest=now, newest=now)
                self.outcomes.append(result)
                self.apply(result)
            elif self.batch is not None and self.batch.version == self.core.version:
                batch, self.batch = self.batch, None
                ends = [GroupEnd(g.task, g.attempt, "trained") for g in batch.groups]
                self.apply(StepCompleted(version=batch.version, ends=ends))
            self.apply(Heartbeat(actor="last", state="generating", version=Version(0, 0)))
            self.apply(Tick(epoch=1, seconds=2.0))
        pytest.fail(f"waits for {self.core.waiting_for}: {self.core.accounts}, {self.core.roster}")


def packed(core: Core) -> bytes:
    data: bytes = msgpack.packb(core.state(), use_bin_type=True)
    return data


def restored(chaos: Chaos) -> Core:
    state = msgpack.unpackb(packed(chaos.core), raw=False, strict_map_key=True)
    return Core.restore(chaos.config, PROBLEMS, EVAL, state)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32),
    lag=st.integers(0, 3),
    keep=st.booleans(),
    straggler=st.sampled_from(["wait", "drop"]),
    refill=st.sampled_from([None, 0, 1]),
    events=st.integers(20, 250),
    stop=st.sampled_from([None, None, "learner", "scheduler"]),
)
def test_whatever_happens_every_task_ends_once_and_the_run_ends(
    seed: int, lag: int, keep: bool, straggler: str, refill: int | None, events: int, stop: Any
) -> None:
    chaos = Chaos(seed, lag, keep_zero_variance=keep, on_straggler=straggler, max_refill=refill)
    chaos.apply(SchedulerStarted(epoch=1, host="", pid=0))
    for number in range(events):
        chaos.apply(chaos.anything())
        if number == events // 2:
            chaos.twin = restored(chaos)
            assert packed(chaos.twin) == packed(chaos.core)
    if stop is not None:
        chaos.apply(StopRequested(sender=stop))
    chaos.finish()
    accounts = chaos.core.accounts
    assert accounts.in_flight == 0
    assert chaos.twin is not None
    assert packed(chaos.twin) == packed(chaos.core)
