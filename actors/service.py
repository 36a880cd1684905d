"""The actor: joins the run, rolls out the tasks addressed to it, and leaves in order.

Invariants: every task that was taken ends in exactly one of an outcome, `Released` or `EngineDied`
(or nothing, where the scheduler said that it gave this actor up or that the run is over for a
finished task); a task starts only on weights that it allows; and whatever the main loop does, the
Kafka thread keeps the heartbeat, and ends the process when the main loop no longer answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from actors.engine import Engine, EngineDead
from actors.intake import Intake, attempts
from actors.link import Link
from actors.loader import Loader
from actors.rewards import Pool
from actors.rollout import MAX_WHY, unreadable_outcome
from actors.runner import Runner
from actors.status import StateClock, Status
from actors.weights import WeightsError, WeightsRefused
from protocol.codec import ProtocolError
from protocol.config import Config, ConfigError
from protocol.http import MonitorServer
from protocol.kafka import BrokerError, Record
from protocol.loops import LoopThread, MainWatch
from protocol.messages import (
    EngineDied,
    Joined,
    Rejoin,
    Released,
    RunEnded,
    Task,
    WeightsPublished,
)
from protocol.metrics import ActorMetrics
from protocol.rundir import RunDir
from protocol.versions import Version

log = logging.getLogger(__name__)

FLUSH_SECONDS = 10.0
TICK_SECONDS = 0.5
# A drained actor still gives back, for so long, what was sent before the scheduler heard of it.
ANSWER_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Leaving:
    """Why the actor leaves, and with which exit code."""

    why: str
    code: int
    drain: bool = False
    engine_died: bool = False


class Actor:
    """One actor process; `run` on the main loop returns the exit code."""

    def __init__(self, config: Config, run: RunDir, name: str, engine: Engine) -> None:
        self._config = config
        self._run_dir = run
        self._name = name
        self._engine = engine
        self._status = Status(StateClock())
        self._registry = CollectorRegistry()
        self._metrics = ActorMetrics(self._registry)
        self._intake = Intake(config.actors.slots, config.run.max_lag)
        self._kafka = LoopThread()
        self._link = Link(config, run.identity.topics, self._status, self._receive, name)
        self._pool = Pool(config)
        self._runner = Runner(config, engine, self._pool, self._kafka, self._link, self._metrics)
        self._loader = Loader(config, run.weights, engine)
        self._rollouts: dict[str, asyncio.Task[None]] = {}
        self._draining = False
        self._monitor: MonitorServer | None = None

    async def run(self) -> int:
        """Serve until the run ends, SIGTERM, or an error that cannot be mended."""
        self._loop = asyncio.get_running_loop()
        self._leaving: asyncio.Future[Leaving] = self._loop.create_future()
        self._watch = MainWatch(self._config.waits.main)
        background = [asyncio.create_task(self._watch.watch_loop())]
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)
        try:
            background.append(asyncio.create_task(self._guarded(self._work())))
            leaving = await self._leaving
            log.info("leaving: %s", leaving.why)
            await self._leave(leaving)
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await self._engine.stop()
            await self._pool.stop()
            if self._monitor is not None:
                self._monitor.stop()
            self._kafka.stop()
            self._watch.stop()
        if leaving.code:
            log.error("%s", leaving.why)
        return leaving.code

    # The way in.

    async def _work(self) -> None:
        self._serve_metrics()
        await self._kafka.run(self._link.start())
        # A run that is over is known before an engine is started for it.
        await self._kafka.run(self._link.catch_up())
        if self._leaving.done():
            return
        self._kafka.submit(self._link.run()).add_done_callback(self._link_ended)
        await self._pool.start()
        await self._engine.start()
        self._update()
        loading = asyncio.create_task(self._load_versions())
        ticking = asyncio.create_task(self._tick())
        try:
            await asyncio.gather(loading, ticking)
        finally:
            loading.cancel()
            ticking.cancel()

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """Turn what goes wrong into a reason to leave."""
        try:
            await work
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._draining = False
        if isinstance(error, ConfigError):
            self._leave_with(Leaving(str(error), 2))
        elif isinstance(error, EngineDead):
            self._leave_with(Leaving(str(error), 1, engine_died=True))
        elif isinstance(error, BrokerError | WeightsError | WeightsRefused):
            self._leave_with(Leaving(str(error), 1))
        else:
            log.error("unexpected error", exc_info=error)
            self._leave_with(Leaving(f"unexpected error: {error!r}", 1))

    def _leave_with(self, leaving: Leaving) -> None:
        if not self._leaving.done():
            self._leaving.set_result(leaving)

    def _link_ended(self, future: Any) -> None:
        """On the Kafka thread: it ends only by an error, or when stopped."""
        if not future.cancelled() and (error := future.exception()) is not None:
            self._loop.call_soon_threadsafe(self._fail, error)

    def _on_signal(self) -> None:
        # A second signal cuts the grace period short.
        self._draining = False
        self._leave_with(Leaving("SIGTERM: draining", 0, drain=True))

    async def _join(self) -> None:
        """Become an actor under a new id."""
        version = self._status.version
        if version is None or self._leaving.done():
            return
        actor = f"{self._name}-{secrets.token_hex(4)}"
        await self._kafka.run(self._link.prepare_join(actor))
        self._link.post(
            Joined(
                actor=actor,
                slots=self._config.actors.slots,
                version=version,
                host=socket.gethostname(),
                pid=os.getpid(),
            )
        )
        self._status.actor = actor
        log.info("joined as %s with weights %s", actor, version)

    # What comes in.

    def _receive(self, record: Record) -> None:
        """On the Kafka thread."""
        self._loop.call_soon_threadsafe(self._on_record, record)

    def _on_record(self, record: Record) -> None:
        message = record.message
        if isinstance(message, Task):
            self._on_task(message, record.offset)
        elif isinstance(message, WeightsPublished):
            self._loader.published(message)
        elif isinstance(message, RunEnded):
            self._draining = False
            why = f"the run ended: {message.reason} {message.detail}".rstrip()
            self._leave_with(Leaving(why, 0))
        elif isinstance(message, Rejoin):
            self._rejoining = asyncio.create_task(self._guarded(self._rejoin()))
        elif isinstance(message, ProtocolError):
            self._on_bad_record(record)

    def _on_task(self, task: Task, offset: int) -> None:
        if task.actor != self._status.actor:
            return
        if not self._intake.offer(task, offset, self._loop.time()):
            return
        if self._leaving.done():
            self._release([task], self._leaving.result().why)
            return
        if self._status.version is not None:
            # No heartbeat follows here: a scheduler that has not heard of the weights yet would
            # send the same task again at once, and again.
            self._release_useless(self._status.version)
        self._advance()

    def _on_bad_record(self, record: Record) -> None:
        kind = record.topic.rpartition(".")[2]
        log.error("%s partition %d offset %d: %s", record.topic, record.partition, record.offset,
                  record.message)  # fmt: skip
        self._metrics.dead_letters.labels("actor", kind).inc()
        if kind == "tasks":
            self._kafka.submit(self._link.dead_letter(record))
            outcome = unreadable_outcome(record.raw, str(record.message))
            if outcome is not None and outcome.actor == self._status.actor:
                self._link.post(outcome)
                self._metrics.attempts.labels("failed").inc()

    async def _rejoin(self) -> None:
        log.warning("given up by the scheduler as %s; dropping what is held", self._status.actor)
        self._status.actor = None
        self._cancel(self._intake.started)
        self._intake.clear()
        self._update()
        await self._join()

    # What runs.

    def _advance(self) -> None:
        """Start what can start, and say what is going on."""
        version = self._status.version
        if version is not None and not self._loader.applying and not self._leaving.done():
            for task in self._intake.start(version):
                # Listed before it is told, so that no heartbeat lacks a task that was started.
                self._status.held = tuple(attempts(self._intake.started))
                self._rollouts[task.group] = asyncio.create_task(self._roll_out(task))
        self._update()

    async def _roll_out(self, task: Task) -> None:
        try:
            outcome = await self._runner.run(task, self._on_sampled)
        except asyncio.CancelledError:
            return
        except Exception as error:
            self._fail(error)
            return
        if self._rollouts.pop(task.group, None) is None or self._is_over(task):
            return
        self._link.post(outcome)
        self._intake.end(task)
        self._advance()

    def _on_sampled(self, task: Task) -> None:
        self._intake.sampled(task)
        self._advance()

    def _is_over(self, task: Task) -> bool:
        over = self._leaving.done() and not self._draining
        return over or task.actor != self._status.actor

    def _cancel(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            rollout = self._rollouts.pop(task.group, None)
            if rollout is not None:
                rollout.cancel()

    def _release(self, tasks: list[Task], why: str) -> None:
        """Give tasks back, unrun or unfinished."""
        if not tasks:
            return
        assert self._status.actor is not None
        self._cancel(tasks)
        self._link.post(
            Released(actor=self._status.actor, attempts=attempts(tasks), why=why[:MAX_WHY])
        )
        self._metrics.attempts.labels("released").inc(len(tasks))
        for task in tasks:
            self._intake.end(task)
        self._update()

    def _release_useless(self, version: Version) -> bool:
        """Were there any?"""
        if self._status.actor is None:
            return False
        useless = self._intake.useless(version)
        self._release(useless, f"weights {version} make it useless")
        return bool(useless)

    def _make_way(self, version: Version) -> None:
        """Give back what new weights make useless, and ask for work."""
        if self._release_useless(version):
            # After Released the scheduler sends no work before it hears of this actor again.
            self._link.beat()

    def _update(self) -> None:
        """Bring the status that other threads read up to date."""
        status, intake = self._status, self._intake
        before = status.clock.state
        if self._leaving.done():
            status.clock.enter("draining")
        elif self._loader.applying:
            status.clock.enter("loading")
        elif intake.running:
            status.clock.enter("generating")
        elif intake.finishing:
            status.clock.enter("grading")
        elif intake.waiting or status.version is None:
            status.clock.enter("waiting_for_weights")
        else:
            status.clock.enter("idle")
        now = time.monotonic()
        if self._engine.tokens != status.tokens or before != status.clock.state:
            status.last_token = now
        self._metrics.tokens.inc(max(0, self._engine.tokens - status.tokens))
        status.tokens = self._engine.tokens
        status.held = tuple(attempts(intake.started))
        status.unstarted = intake.unstarted_offset

    async def _tick(self) -> None:
        """What time brings: tasks that waited too long, deadlines, figures."""
        published: dict[str, float] = {}
        failures: dict[str, int] = {}
        waits = self._config.waits
        while True:
            await asyncio.sleep(min(TICK_SECONDS, waits.heartbeat / 2))
            self._update()
            if (version := self._status.version) is not None and self._status.actor is not None:
                late = self._intake.overdue(version, self._loop.time(), waits.weights)
                self._release(late, f"no newer weights than {version} in {waits.weights:g} s")
            why = self._status.overdue(waits, time.monotonic())
            if why is None and self._engine.dead:
                why = "the engine's process is gone"
            if why is not None and not self._leaving.done():
                raise EngineDead(why)
            for state, seconds in self._status.clock.seconds().items():
                gained = seconds - published.get(state, 0.0)
                self._metrics.state_seconds.labels("actor", state).inc(max(0.0, gained))
                published[state] = seconds
            for kind, count in self._pool.failures.items():
                self._metrics.grader_failures.labels(kind).inc(count - failures.get(kind, 0))
                failures[kind] = count
            self._metrics.held.labels("running").set(len(self._intake.running))
            self._metrics.held.labels("finishing").set(len(self._intake.finishing))
            self._metrics.held.labels("waiting").set(len(self._intake.waiting))

    # Weights.

    async def _load_versions(self) -> None:
        """Load every newest version; join after the first."""
        while True:
            version, path = await self._loader.next_verified()
            self._make_way(version)
            began = time.monotonic()
            loading = asyncio.ensure_future(self._loader.load(path, version))
            await asyncio.sleep(0)
            self._update()
            version = await loading
            self._metrics.load_seconds.observe(time.monotonic() - began)
            self._metrics.version_step.labels("actor").set(version.step)
            self._metrics.version_generation.labels("actor").set(version.generation)
            self._status.version = version
            log.info("weights %s loaded in %.2f s", version, time.monotonic() - began)
            # What came while they were loaded, and where newer ones took their place.
            self._make_way(version)
            if self._status.actor is None:
                await self._join()
            self._advance()

    # The way out.

    async def _leave(self, leaving: Leaving) -> None:
        actor = self._status.actor
        self._update()
        if actor is not None:
            # The scheduler sends no work to one that drains.
            self._link.beat()
            if leaving.drain:
                await self._drain()
            if leaving.engine_died:
                self._report_death(actor, leaving.why)
            self._release([*self._intake.waiting, *self._intake.started], leaving.why)
            if not leaving.engine_died:
                self._link.beat()
            try:
                await asyncio.wait_for(self._kafka.run(self._link.flush()), FLUSH_SECONDS)
            except (TimeoutError, BrokerError) as error:
                log.warning("events were not flushed: %r", error)
        self._status.actor = None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._kafka.run(self._link.stop()), FLUSH_SECONDS)

    async def _drain(self) -> None:
        """Finish what runs, within the grace period, and give back what still comes."""
        self._draining = True
        self._release(self._intake.waiting, "draining")
        began, grace = self._loop.time(), self._config.waits.grace
        while self._draining and (spent := self._loop.time() - began) < grace:
            if not self._rollouts and spent > ANSWER_SECONDS:
                break
            await asyncio.sleep(0.05)
        self._draining = False

    def _report_death(self, actor: str, why: str) -> None:
        """Name what the engine held; what waited or was sampled already is released instead."""
        held = self._intake.running
        self._link.post(EngineDied(actor=actor, attempts=attempts(held), error=why[:MAX_WHY]))
        self._cancel(held)
        for task in held:
            self._intake.end(task)

    # Watched from outside.

    def _serve_metrics(self) -> None:
        metrics = self._config.metrics
        try:
            self._monitor = MonitorServer(self._registry, self._health, metrics.host, metrics.port)
        except OSError as error:
            raise ConfigError(str(error)) from None
        self._run_dir.register_process(self._name, self._monitor.port)

    def _health(self) -> tuple[bool, dict[str, Any]]:
        status = self._status
        overdue = status.overdue(self._config.waits, time.monotonic())
        silent = self._watch.silent_for
        facts = {
            "state": status.clock.state,
            "seconds": round(status.clock.seconds_in_state, 1),
            "version": None if status.version is None else str(status.version),
            "actor": status.actor,
            "held": len(status.held),
            "tokens": status.tokens,
        }
        if overdue is not None:
            facts["overdue"] = overdue
        return overdue is None and silent < self._config.waits.main, facts
