"""The scheduler's decisions: a deterministic state machine over one log of events.

`apply(event) -> commands` is the only way to change the state, which is a function of the events so
far: no I/O, no clock, no thread, and randomness is seeded and held in the state. An event that does
not fit is counted and put aside (`DeadLetter`), never an exception.

The core wires the parts together and lets each keep its own promise: `Books` (every task ends
once), `Fleet` (who may take work, what becomes of it when an actor is lost), `Training` (rounds,
batches, what the strategy learns), `Evaluation`, `Clock` (log time, watchdogs), `Ending`. The first
outcome of a task wins, whichever attempt it is of; later ones are only counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

from protocol.config import Config, PrioritizedConfig
from protocol.messages import (
    EngineDied,
    EventRecord,
    Heartbeat,
    Joined,
    LearnerReady,
    Outcome,
    Released,
    RunEndReason,
    SchedulerStarted,
    Started,
    StepCompleted,
    StopRequested,
    Tick,
)
from protocol.records import Accounts, EndRecord
from protocol.versions import Version
from scheduler.accounts import Books, Task
from scheduler.clock import Clock
from scheduler.commands import Command, IssueTask, Leave, SendBatch, WriteRecord
from scheduler.ending import DRAINING, LEFT, STOPPING, Ending
from scheduler.evaluation import EvalSet, Evaluation
from scheduler.fleet import Fleet
from scheduler.journal import Journal
from scheduler.roster import Actor
from scheduler.training import Training

LARGEST_STEP = 2**31 - 1


class Core:
    """The state machine. Properties are read-only views, for metrics."""

    def __init__(self, config: Config, problems: int, eval_sets: Sequence[EvalSet] = ()) -> None:
        """`problems`: how many training problems there are. Raises ValueError if it cannot be."""
        _check(config, problems)
        self._config = config
        self._journal = Journal()
        self._books = Books()
        self._clock = Clock(config.waits)
        self._fleet = Fleet(config, self._books, self._clock, self._journal, self._give_up)
        self._training = Training(config, problems, self._books)
        self._evaluation = Evaluation(config, eval_sets, self._books)
        self._ending = Ending(config.waits.drain)
        self._counters: dict[str, int] = {}
        self._handlers: dict[type, Callable[[Any], None]] = {
            Joined: self._fleet.joined,
            Started: self._fleet.started,
            Heartbeat: self._fleet.heartbeat,
            Released: self._fleet.released,
            EngineDied: self._fleet.engine_died,
            Outcome: self._outcome,
            Tick: self._tick,
            SchedulerStarted: self._scheduler_started,
            StepCompleted: self._step_completed,
            LearnerReady: self._learner_ready,
            StopRequested: self._stop_requested,
        }

    def apply(self, event: EventRecord) -> list[Command]:
        """Apply one event; returns what is to be done, in order. Never raises on an event."""
        kind = type(event)
        name = kind.__name__
        self._counters[name] = self._counters.get(name, 0) + 1
        if self._ending.phase == LEFT:
            return []
        commands = self._journal.begin()
        self._handlers[kind](event)
        if kind is not Started:
            self._advance(commands)
        return commands

    @property
    def accounts(self) -> Accounts:
        """Every issued task and how it ended."""
        return self._books.accounts

    @property
    def version(self) -> Version | None:
        """The weights that the next batch changes; None before the first LearnerReady."""
        return self._training.version

    @property
    def roster(self) -> dict[str, dict[str, Any]]:
        """By joined actor: state, open (tasks), capacity, partition, heard (log seconds), tokens,
        seconds (by state) and outcomes."""
        return self._fleet.roster.summary()

    @property
    def actors_joined(self) -> int:
        """Actors that hold a lease."""
        return len(self._fleet.roster)

    @property
    def counters(self) -> dict[str, int]:
        """Events applied, by type."""
        return dict(self._counters)

    @property
    def notes(self) -> dict[str, int]:
        """What was unusual, by kind: late outcomes, re-issues, dead letters, …"""
        return dict(self._journal.notes)

    @property
    def issued(self) -> dict[tuple[str, str], int]:
        """Tasks issued, by (purpose, reason)."""
        return dict(self._books.issued)

    @property
    def seconds(self) -> float:
        """Log time: the sum of the ticks."""
        return self._clock.seconds

    @property
    def waiting_for(self) -> str:
        """What the run waits for now, in one of a few phrases."""
        if self._ending.begun:
            return ("", "last optimizer step", "work in flight", "nothing")[self._ending.phase]
        if self.version is None:
            return "learner"
        if not self.actors_joined:
            return "actors"
        cause = self._training.waits_for(not self._evaluation.running)
        return "optimizer step" if cause == "learner" else cause

    @property
    def wanted_slots(self) -> int:
        """Tasks that wait for an actor or run: as many slots would be in use if there were any."""
        return sum(not task.got for task in self._books.tasks.values())

    def pools(self) -> dict[str, int]:
        """Training problems: unseen, heap, solved, unsolved, cooling, in_flight."""
        return self._training.teaching.strategy.pools()

    def strategy_metrics(self) -> dict[str, float]:
        """Further figures of the strategy, by name."""
        return self._training.teaching.strategy.metrics()

    def state(self) -> dict[str, Any]:
        """Plain data (maps with text keys, lists, numbers, text, bytes) for `restore`."""
        return {
            "books": self._books.state(),
            "fleet": self._fleet.state(),
            "training": self._training.state(),
            "evaluation": self._evaluation.state(),
            "clock": self._clock.state(),
            "ending": self._ending.state(),
            "counters": dict(self._counters),
            "notes": dict(self._journal.notes),
        }

    @classmethod
    def restore(
        cls, config: Config, problems: int, eval_sets: Sequence[EvalSet], state: dict[str, Any]
    ) -> Self:
        """The core that `state` was taken of; its next decisions are the same, bit for bit."""
        core = cls(config, problems, eval_sets)
        # The others look up their tasks in the books.
        core._books.load(state["books"])
        core._fleet.load(state["fleet"])
        core._training.load(state["training"])
        core._evaluation.load(state["evaluation"])
        core._clock.load(state["clock"])
        core._ending.load(state["ending"])
        core._counters = dict(state["counters"])
        core._journal.notes = dict(state["notes"])
        return core

    def _outcome(self, event: Outcome) -> None:
        self._fleet.outcome(event)
        task = self._books.tasks.get(event.task)
        if task is None and not self._books.was_issued(event.task):
            self._journal.put_aside(f"task {event.task}: an outcome, but no such task was issued")
        elif task is None or task.got:
            self._journal.note("late_outcomes")
            self._training.report.late(event)
        elif event.attempt > task.attempt or (
            event.attempt == task.attempt and event.actor != task.actor
        ):
            self._journal.put_aside(
                f"task {event.task}: an outcome of attempt {event.attempt} by {event.actor}, to "
                f"whom it was not addressed (attempt {task.attempt} is at {task.actor})"
            )
        else:
            self._clock.progress()
            task.actor = None
            if self._ending.begun:
                self._close(task, "failed" if event.status == "failed" else "surplus")
            elif task.training:
                self._training.outcome(task, event)
            else:
                self._evaluation.outcome(task, event)

    def _learner_ready(self, event: LearnerReady) -> None:
        current, version = self.version, event.version
        if self._ending.begun:
            self._journal.note("learner_ready_after_the_end")
        elif current is not None and version.generation < current.generation:
            self._journal.note("lower_generation")
        elif current is not None and version.generation == current.generation:
            self._journal.put_aside(
                f"version {version}: the learner of this generation was ready before"
            )
        elif version.step > self._config.run.steps:
            self._journal.put_aside(
                f"version {version}: beyond run.steps ({self._config.run.steps}); raise it"
            )
        else:
            again = "" if current is None else f"; open tasks of {current} end stale"
            self._journal.say("info", f"learner ready at version {version}{again}")
            self._clock.progress()
            self._evaluation.drop()
            self._training.begin(version)
            self._fleet.dispatch.add(self._evaluation.start(version))

    def _step_completed(self, event: StepCompleted) -> None:
        current = self.version
        if current is not None and event.version.generation < current.generation:
            self._journal.note("lower_generation")
        elif self._training.batch is None or event.version != current:
            self._journal.put_aside(
                f"version {event.version}: a step, but no batch of this version is at the learner"
            )
        else:
            self._clock.progress()
            record = self._training.complete(event, self._clock.seconds)
            self._journal.commands.append(WriteRecord(record))
            if not self._ending.begun:
                self._fleet.dispatch.add(self._evaluation.start(event.version.next_step()))

    def _scheduler_started(self, event: SchedulerStarted) -> None:
        if not self._clock.start(event.epoch):
            self._journal.note("old_epoch")

    def _stop_requested(self, event: StopRequested) -> None:
        if self._ending.begun:
            self._journal.note("stop_requested_again")
            return
        if event.sender == "learner" and self._training.batch is not None:
            # It finished its step or dropped it before it asked: no StepCompleted will come.
            for task in list(self._training.batch.values()):
                self._close(task, "surplus")
            self._training.batch = None
        self._begin_end(event.reason, event.detail)

    def _tick(self, event: Tick) -> None:
        clock = self._clock
        if not clock.tick(event):
            self._journal.note("old_epoch")
            return
        cause = self._training.waits_for(not self._evaluation.running)
        self._training.report.waited(cause, event.seconds)
        self._fleet.lapse()
        if self._ending.begun:
            return
        outstanding, actors = bool(self._books.tasks), self.actors_joined
        if clock.alone(event.seconds, outstanding=outstanding, actors=actors):
            self._journal.say(
                "error",
                f"no actor has joined for {self._config.waits.first_actor:.0f} s, and "
                f"{self.wanted_slots} tasks wait; look at the actors' logs",
            )
        if clock.stuck(event.seconds, outstanding=outstanding, actors=actors):
            self._begin_end("no_progress", self._stuck())

    def _advance(self, commands: list[Command]) -> None:
        """Do what the event has made possible: records, new tasks, a batch, addresses, the end."""
        training, evaluation = self._training, self._evaluation
        evaluated = not evaluation.running
        if not evaluated:
            for record in evaluation.records(self._clock.seconds, training.report.rollouts):
                commands.append(WriteRecord(record))
            evaluated = not evaluation.running
        if not self._ending.begun:
            self._train(commands, evaluated)
            if training.over is not None:
                self._begin_end(*training.over)
            elif evaluated and training.done:
                self._begin_end("finished", "")
        if self._ending.begun:
            self._wind_down(commands)
            return
        dispatch = self._fleet.dispatch
        while dispatch.queue and (pair := dispatch.next()) is not None:
            commands.append(self._issue(*pair))

    def _train(self, commands: list[Command], evaluated: bool) -> None:
        training = self._training
        while True:
            if training.short:
                self._fleet.dispatch.add(training.fill())
            batch = training.release(self._clock.seconds, evaluated)
            if batch is not None:
                commands.append(SendBatch(batch))
            if not training.short or training.over is not None:
                break
        if training.notices:
            for text in training.notices:
                self._journal.say("warning", text)
            training.notices.clear()

    def _issue(self, task: Task, actor: Actor) -> IssueTask:
        assert actor.partition is not None
        run = self._config.run
        tested = None if task.training else self._evaluation.sets[task.dataset]
        mixed_or_all: Any = "all" if run.keep_zero_variance else "mixed"
        return IssueTask(
            partition=actor.partition,
            actor=actor.name,
            id=task.id,
            attempt=task.attempt,
            dataset=None if tested is None else tested.name,
            problem=task.problem,
            purpose=task.purpose,
            reason=task.reason,
            version=task.version,
            group_size=task.group_size,
            temperature=task.temperature,
            max_tokens=self._config.rollout.max_tokens if tested is None else tested.max_tokens,
            seed=task.seed,
            send=mixed_or_all if tested is None else "none",
            exact=tested is not None or run.max_lag == 0,
            alone=False,
        )

    def _give_up(self, task: Task) -> None:
        """No attempt of the task will bring an outcome any more."""
        if self._ending.begun:
            self._close(task, "surplus")
        elif task.training:
            self._training.give_up(task)
        else:
            self._evaluation.give_up(task)

    def _close(self, task: Task, end: str) -> None:
        if task.training:
            self._training.close(task, end)
        else:
            self._evaluation.close(task, end)

    def _begin_end(self, reason: RunEndReason, detail: str) -> None:
        """No new work from here on; what nobody holds ends at once."""
        self._ending.begin(reason, detail, self._clock.seconds)
        self._fleet.closed = True
        for task in [*self._fleet.dispatch.waiting(), *self._training.ready]:
            self._close(task, "surplus")

    def _wind_down(self, commands: list[Command]) -> None:
        now, ending = self._clock.seconds, self._ending
        if ending.phase == STOPPING and (self._training.batch is None or ending.overdue(now)):
            ending.drain(now)
            commands.append(SendBatch(ending.message))
            self._journal.control(ending.message)
            text = f"run ended: {ending.reason} {ending.detail}".rstrip()
            self._journal.say("info" if ending.ok else "error", text)
        if ending.phase == DRAINING and (not self._books.tasks or ending.overdue(now)):
            for task in list(self._books.tasks.values()):
                self._close(task, "expired")
            ending.leave()
            commands += [WriteRecord(self._end_record()), Leave(ending.ok)]

    def _end_record(self) -> EndRecord:
        report = self._training.report
        return EndRecord(
            reason=self._ending.reason,
            detail=self._ending.detail,
            version=self.version or Version(0, 0),
            seconds=self._clock.seconds,
            rollouts=report.rollouts,
            rollout_tokens=report.rollout_tokens,
            trained_tokens=report.trained_tokens,
            impure_groups_trained=report.impure_trained,
            accounts=self.accounts,
            actors=self._fleet.roster.figures(),
        )

    def _stuck(self) -> str:
        accounts = self.accounts
        ends = ", ".join(f"{count} {end}" for end, count in accounts.ends.items() if count)
        return (
            f"nothing came in for {self._config.waits.no_progress:.0f} s while waiting for "
            f"{self.waiting_for} at version {self.version}: {accounts.in_flight} of "
            f"{accounts.issued} tasks in flight, {self.actors_joined} actors joined, ends: "
            f"{ends or 'none'}"
        )


def _check(config: Config, problems: int) -> None:
    if problems < 1:
        raise ValueError(f"problems: {problems}; at least one training problem is needed")
    furthest = config.run.steps + config.run.max_lag
    if isinstance(config.strategy, PrioritizedConfig):
        furthest += max(config.strategy.cooldown, config.strategy.retest_max)
    if furthest > LARGEST_STEP:
        raise ValueError(
            f"run.steps, with run.max_lag and the strategy's delays: {furthest} is beyond the "
            f"largest step, {LARGEST_STEP}"
        )
