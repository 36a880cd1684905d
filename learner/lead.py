"""What rank 0 decides: the course of a learner's life, from its first weights to the export.

Invariants: `LearnerReady` follows the acknowledged weights of step 0, and `StepCompleted(s)` those
of s + 1; every group of a batch gets exactly one end; the step number rises and weights are
published whatever became of the batch; every wait has a deadline and a name.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Generator
from dataclasses import dataclass

from learner import weights
from learner.inbox import Collected, Inbox, LearnerError
from learner.monitor import Monitor
from learner.orders import Idle, Leave, Order, Save, Train
from learner.trainer import StepResult
from protocol.config import Config
from protocol.loops import LoopThread
from protocol.messages import (
    BatchReleased,
    GroupEnd,
    LearnerReady,
    RunEnded,
    StepCompleted,
    StopRequested,
)
from protocol.rundir import RunDir
from protocol.versions import Version

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Longest wait between two orders; the user's stop is noticed within it."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What the ranks report of an order `Train`; seconds are rank 0's."""

    result: StepResult
    seconds_assemble: float
    seconds_train: float


Orders = Generator[Order, Trained | None, None]


class Lead:
    """Rank 0's decisions as a sequence of orders."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        generation: int,
        inbox: Inbox,
        kafka: LoopThread,
        monitor: Monitor,
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._inbox = inbox
        self._kafka = kafka
        self._monitor = monitor
        self._poll = min(POLL_SECONDS, config.waits.collective / 4)
        self.version = Version(generation, 0)
        self.stop_requested = False
        """Set by the signal handler: finish the step, then end."""

    def orders(self) -> Orders:
        """The orders of a whole run; send what came of each. Raises LearnerError, BrokerError."""
        yield from self._publish()
        if not self.stop_requested:
            self._kafka.run_blocking(
                self._inbox.tell(
                    LearnerReady(
                        version=self.version,
                        ranks=self._config.learner.ranks,
                        host=socket.gethostname(),
                        pid=os.getpid(),
                    )
                )
            )
            log.info("ready at version %s", self.version)
        ended = None
        while ended is None:
            started = time.monotonic()
            found = yield from self._next()
            if isinstance(found, BatchReleased):
                yield from self._step(found, started)
            else:
                ended = found
        log.info("the run has ended: %s %s", ended.reason, ended.detail)
        self._monitor.enter("exporting", self.version)
        weights.export(self._run_dir.weights / str(self.version), self._run_dir.model)
        yield Leave()

    def _next(self) -> Generator[Order, Trained | None, BatchReleased | RunEnded]:
        """The next batch or the end of the run, with idle orders while there is neither."""
        self._monitor.enter("waiting", self.version)
        wait = self._config.waits.batch
        deadline = time.monotonic() + wait
        while not self.stop_requested:
            found = self._kafka.run_blocking(self._inbox.next(self.version, self._poll))
            self._monitor.kept(self._inbox)
            if found is not None:
                return found
            if time.monotonic() > deadline:
                raise LearnerError(
                    f"no batch of version {self.version} and no end of the run within {wait:g} s "
                    "(waits.batch); see what the scheduler and the actors wait for"
                )
            yield Idle()
        return (yield from self._drain())

    def _drain(self) -> Generator[Order, Trained | None, RunEnded]:
        """The user's stop: tell the scheduler, then wait for it to end the run."""
        self._monitor.enter("draining", self.version)
        log.info("stopping at version %s", self.version)
        self._kafka.run_blocking(self._inbox.tell(StopRequested(sender="learner")))
        wait = self._config.waits.drain
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline:
            ended = self._kafka.run_blocking(self._inbox.end(self._poll))
            if ended is not None:
                return ended
            yield Idle()
        log.warning("the scheduler did not end the run within %g s (waits.drain)", wait)
        return RunEnded(reason="stopped", detail="the learner was stopped")

    def _step(self, batch: BatchReleased, started: float) -> Orders:
        """One optimizer step; `started` is when the wait for its batch began."""
        collected = self._kafka.run_blocking(self._inbox.collect(batch))
        received = time.monotonic()
        self._monitor.enter("training", self.version)
        trained = yield Train(batch.version, collected.raw)
        assert trained is not None
        done = time.monotonic()
        self.version = batch.version.next_step()
        yield from self._publish()
        seconds = {
            "wait": received - started,
            "assemble": trained.seconds_assemble,
            "train": trained.seconds_train,
            "publish": time.monotonic() - done,
        }
        metrics = trained.result.metrics | {f"seconds_{k}": v for k, v in seconds.items()}
        ends = _ends(collected, trained.result)
        completed = StepCompleted(version=batch.version, ends=ends, metrics=metrics)
        self._kafka.run_blocking(self._inbox.tell(completed))
        self._monitor.step(completed, skipped=trained.result.skipped is not None)
        log.info(
            "step %s: %d of %d groups trained; %s",
            batch.version,
            sum(end.end == "trained" for end in ends),
            len(ends),
            ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items()),
        )

    def _publish(self) -> Orders:
        """Write, announce and tidy up the weights of the current version."""
        self._monitor.enter("publishing", self.version)
        directory = weights.prepare(self._run_dir.weights, self.version)
        yield Save(str(directory))
        message = weights.publish(directory, self.version)
        self._kafka.run_blocking(self._inbox.publish(message))
        self._monitor.published(message)
        keep, max_lag = self._config.learner.keep_weights, self._config.run.max_lag
        weights.prune(self._run_dir.weights, self.version, keep=keep, max_lag=max_lag)


def _ends(collected: Collected, result: StepResult) -> list[GroupEnd]:
    if result.skipped is None:
        ends = [GroupEnd(g.task, g.attempt, "trained") for g in collected.admitted]
    else:
        ends = [GroupEnd(g.task, g.attempt, "skipped", result.skipped) for g in collected.admitted]
        log.warning("no weight changed: %s", result.skipped)
    return ends + collected.refused
