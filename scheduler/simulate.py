"""A simulated world around the core: actors, a learner and time, without Kafka and without a model.

Invariant: a function of the arguments: time is simulated, and events due at the same moment are
delivered in the order in which they arose. Tests and benchmarks drive the very same core with it.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from random import Random

from protocol.messages import (
    ActorState,
    Assigned,
    BatchReleased,
    EventRecord,
    GroupEnd,
    GroupRef,
    Heartbeat,
    Held,
    Joined,
    LearnerReady,
    Outcome,
    Rejoin,
    Released,
    RunEnded,
    SchedulerStarted,
    Started,
    StepCompleted,
    Tick,
)
from protocol.records import RunRecord
from protocol.versions import Version
from scheduler.commands import Command, IssueTask, Leave, SendBatch, SendControl, WriteRecord
from scheduler.core import Core

DIGEST = bytes(32)


class Simulation:
    """One run.

    Attributes:
        now: simulated seconds.
        issued: every task that was issued to an actor, in order.
        batches: every batch that was released, in order.
        records: what was written to metrics.jsonl.
        commands: every other command, in order.
        left: how the core left; None while it has not.
        seconds_by_event: processor time that `Core.apply` took, and calls, by event type.
    """

    def __init__(
        self,
        core: Core,
        solve_rates: Sequence[float],
        *,
        actors: Sequence[int] = (64,),
        mean_seconds: float = 5.0,
        train_seconds: float = 3.0,
        heartbeat: float = 2.0,
        tick: float = 1.0,
        seed: int = 0,
        generation: int = 0,
    ) -> None:
        """Args:
        solve_rates: true p of each training problem; evaluation problems have ½.
        actors: slots of each.
        mean_seconds: of a task; exponentially distributed.
        train_seconds: of an optimizer step.
        """
        self.core = core
        self.now = 0.0
        self.issued: list[IssueTask] = []
        self.batches: list[BatchReleased] = []
        self.records: list[RunRecord] = []
        self.commands: list[Command] = []
        self.left: bool | None = None
        self.seconds_by_event: dict[str, tuple[float, int]] = {}
        self._rates = solve_rates
        self._rng = Random(seed)
        self._mean, self._train_seconds = mean_seconds, train_seconds
        self._heartbeat, self._tick = heartbeat, tick
        self._events: list[tuple[float, int, EventRecord]] = []
        self._count = 0
        self._running: dict[str, dict[tuple[str, int], IssueTask]] = {}
        self._slots: dict[str, int] = {}
        self._version = Version(generation, 0)
        self._put(0.0, SchedulerStarted(epoch=1, host="here", pid=1))
        self._put(tick, Tick(epoch=1, seconds=tick))
        self._put(0.0, LearnerReady(version=self._version))
        for number, slots in enumerate(actors):
            self.join(f"actor-{number}", slots)

    def join(self, name: str, slots: int) -> None:
        """An actor starts."""
        self._running[name] = {}
        self._slots[name] = slots
        self._put(0.0, Joined(actor=name, slots=slots, version=self._version))
        self._put(self._heartbeat, self._beat(name))

    def kill(self, name: str) -> None:
        """An actor dies without a word."""
        del self._running[name]

    def run(self, most_events: int) -> None:
        """Deliver events until the core leaves. Raises RuntimeError after `most_events`."""
        for _ in range(most_events):
            if self.left is not None:
                return
            self.step()
        raise RuntimeError(
            f"the run has not ended after {most_events} events; it waits for "
            f"{self.core.waiting_for} at version {self.core.version}: {self.core.accounts}"
        )

    def step(self) -> None:
        """Deliver the next event."""
        self.now, _, event = heapq.heappop(self._events)
        if isinstance(event, Heartbeat | Outcome) and event.actor not in self._running:
            return
        if isinstance(event, Heartbeat):
            event = self._beat(event.actor)
            self._put(self._heartbeat, event)
        elif isinstance(event, Tick):
            self._put(self._tick, event)
        elif isinstance(event, Outcome):
            if self._running[event.actor].pop((event.task, event.attempt), None) is None:
                return
        elif isinstance(event, StepCompleted):
            self._version = event.version.next_step()
        self.apply(event)

    def apply(self, event: EventRecord) -> None:
        """Apply an event, and let the world react to the commands."""
        start = time.thread_time()
        commands = self.core.apply(event)
        taken = time.thread_time() - start
        name = type(event).__name__
        total, calls = self.seconds_by_event.get(name, (0.0, 0))
        self.seconds_by_event[name] = (total + taken, calls + 1)
        for command in commands:
            match command:
                case IssueTask():
                    self.issued.append(command)
                    self._start(command)
                case SendBatch(BatchReleased() as batch):
                    self.batches.append(batch)
                    self._train(batch)
                case WriteRecord(record):
                    self.records.append(record)
                case SendControl(message):
                    self.commands.append(command)
                    self._control(message)
                case Leave(ok):
                    self.left = ok
                case _:
                    self.commands.append(command)

    def outcome(self, task: IssueTask, version: Version | None = None) -> Outcome:
        """What the actor of `task` would send: rewards 0 and 1 with the problem's solve rate."""
        rate = self._rates[task.problem] if task.dataset is None else 0.5
        rewards = [float(self._rng.random() < rate) for _ in range(task.group_size)]
        mixed = task.send == "all" or (task.send == "mixed" and min(rewards) < max(rewards))
        return Outcome(
            actor=task.actor,
            task=task.id,
            attempt=task.attempt,
            status="ok",
            rewards=list(rewards),
            correct=list(rewards),
            lengths=[4] * task.group_size,
            truncated=[False] * task.group_size,
            oldest=version or task.version,
            newest=version or task.version,
            group=GroupRef(0, len(self.issued), DIGEST) if mixed else None,
        )

    def _start(self, task: IssueTask) -> None:
        running = self._running.get(task.actor)
        if running is None:
            return
        running[task.id, task.attempt] = task
        self._put(0.0, Started(actor=task.actor, task=task.id, attempt=task.attempt))
        self._put(self._rng.expovariate(1 / self._mean), self.outcome(task))

    def _train(self, batch: BatchReleased) -> None:
        ends = [GroupEnd(group.task, group.attempt, "trained") for group in batch.groups]
        done = StepCompleted(version=batch.version, ends=ends, metrics={"tokens": 1.0})
        self._put(self._train_seconds, done)

    def _control(self, message: Assigned | Rejoin | RunEnded) -> None:
        if isinstance(message, Rejoin) and message.actor in self._running:
            self._running[message.actor].clear()
            slots = self._slots[message.actor]
            self._put(0.0, Joined(actor=message.actor, slots=slots, version=self._version))
        elif isinstance(message, RunEnded):
            for name, running in self._running.items():
                if running:
                    attempts = [Held(*key) for key in running]
                    self._put(0.0, Released(actor=name, attempts=attempts, why="run ended"))
                running.clear()

    def _beat(self, name: str) -> Heartbeat:
        held = [Held(*key) for key in self._running[name]]
        state: ActorState = "generating" if held else "idle"
        return Heartbeat(actor=name, state=state, version=self._version, held=held)

    def _put(self, delay: float, event: EventRecord) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + delay, self._count, event))
