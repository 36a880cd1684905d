"""What the scheduler shows of itself: its Prometheus metrics and the facts of /healthz.

Invariant: everything is read off events, commands and the core's views; nothing here is an input of
a decision. `health` may be called from any thread: it sees the facts of the last `refresh`.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from prometheus_client import CollectorRegistry

from protocol.messages import EventRecord
from protocol.metrics import SchedulerMetrics
from protocol.records import EvalRecord, RunRecord, StepRecord
from scheduler.commands import IssueTask
from scheduler.core import Core


class Monitor:
    """Metrics and health of one scheduler."""

    def __init__(self, registry: CollectorRegistry, core: Core, wait: float) -> None:
        """`wait`: seconds without progress of the service after which it is not alive."""
        self._metrics = SchedulerMetrics(registry)
        self._core = core
        self._wait = wait
        self._ticks: deque[float] = deque()
        self._lag = 0.0
        self._ends: dict[str, int] = {}
        self._zero_variance: dict[str, int] = {}
        self._notes: dict[str, int] = {}
        self._actors = 0
        self._events: dict[str, Any] = {}
        self._state = "starting"
        self._since = self._refreshed = time.monotonic()
        self._facts: dict[str, Any] = {}
        self.refresh(behind=0, unacknowledged=0)

    def ticked(self) -> None:
        """A tick of our own was sent."""
        self._ticks.append(time.monotonic())

    def tick_applied(self) -> None:
        """The oldest of our own ticks on the way was applied."""
        if self._ticks:
            self._lag = time.monotonic() - self._ticks.popleft()

    @property
    def lag(self) -> float:
        """Seconds that an event waits for the scheduler now."""
        try:
            return max(self._lag, time.monotonic() - self._ticks[0])
        except IndexError:
            return self._lag

    def event(self, event: EventRecord) -> None:
        """An event was applied."""
        name = type(event).__name__
        counter = self._events.get(name)
        if counter is None:
            counter = self._events[name] = self._metrics.events.labels(name)
        counter.inc()

    def issued(self, task: IssueTask) -> None:
        """A task was sent."""
        if task.attempt == 1:
            self._metrics.issued.labels(task.purpose, task.reason).inc()
        else:
            self._metrics.reissued.labels(task.purpose).inc()

    def dead_letter(self) -> None:
        """An event was put aside."""
        self._metrics.dead_letters.labels("scheduler", "events").inc()

    def snapshot(self, ok: bool, held_up: float) -> None:
        """A snapshot was taken, holding up the events for `held_up` seconds, and written or not."""
        self._metrics.snapshots.labels("ok" if ok else "failed").inc()
        self._metrics.snapshot_seconds.set(held_up)

    def record(self, record: RunRecord) -> None:
        """A record was written to metrics.jsonl."""
        if isinstance(record, StepRecord):
            self._step(record)
        elif isinstance(record, EvalRecord):
            for figure in ("mean", "passed", "greedy"):
                value = getattr(record, figure)
                if value is not None:
                    self._metrics.accuracy.labels(record.name, figure).set(value)

    def refresh(self, *, behind: int, unacknowledged: int) -> None:
        """Bring gauges, counters by end and the facts up to date with the core.

        Args:
            behind: events written and not applied.
            unacknowledged: records sent and not acknowledged.
        """
        metrics, core = self._metrics, self._core
        accounts, now = core.accounts, time.monotonic()
        _raise_to(metrics.ended, self._ends, accounts.ends)
        _raise_to(metrics.zero_variance, self._zero_variance, accounts.zero_variance)
        metrics.in_flight.set(accounts.in_flight)
        metrics.log_seconds.set(core.seconds)
        metrics.events_lag_seconds.set(self.lag)
        metrics.events_lag_records.set(behind)
        metrics.unacknowledged.set(unacknowledged)
        state = core.waiting_for
        if state != self._state:
            self._state, self._since = state, now
        if core.version is not None:
            metrics.version_generation.labels("scheduler").set(core.version.generation)
            metrics.version_step.labels("scheduler").set(core.version.step)
        self._refreshed = now
        self._facts = {
            "version": None if core.version is None else str(core.version),
            "actors": self._actors,
            "issued": accounts.issued,
            "in_flight": accounts.in_flight,
            "log_seconds": round(core.seconds, 3),
            "lag_seconds": round(self.lag, 3),
            "lag_records": behind,
        }

    def survey(self) -> None:
        """Bring up to date what takes longer to gather: actors, pools, unusual things."""
        metrics, core = self._metrics, self._core
        self._actors = len(core.roster)
        metrics.actors.set(self._actors)
        metrics.wanted_slots.set(core.wanted_slots)
        for pool, size in core.pools().items():
            metrics.problems.labels(pool).set(size)
        _raise_to(metrics.notes, self._notes, core.notes)

    def health(self) -> tuple[bool, dict[str, Any]]:
        """For MonitorServer: alive while `refresh` is called."""
        now = time.monotonic()
        facts = {"state": self._state, "seconds": round(now - self._since, 1), **self._facts}
        return now - self._refreshed <= self._wait, facts

    def _step(self, record: StepRecord) -> None:
        metrics = self._metrics
        for name, gauge in (
            ("zero_variance_share", metrics.zero_variance_share),
            ("replay_share", metrics.replay_share),
            ("reward_trained", metrics.reward.labels("trained")),
            ("reward_explored", metrics.reward.labels("explored")),
        ):
            value = getattr(record, name)
            if value is not None:
                gauge.set(value)
        for reason, count in record.by_reason.items():
            metrics.groups.labels(reason, "mixed").inc(count.mixed)
            metrics.groups.labels(reason, "zero").inc(count.zero_variance)
            metrics.groups.labels(reason, "shaping_only").inc(count.shaping_only)
        metrics.batch_groups.labels("planned").inc(record.planned)
        metrics.batch_groups.labels("released").inc(record.groups)
        for cause, seconds in record.waited.items():
            metrics.state_seconds.labels("scheduler", f"waiting_for_{cause}").inc(seconds)
        metrics.rollouts.set(record.rollouts)
        metrics.rollout_tokens.set(record.rollout_tokens)


def _raise_to(counter: Any, shown: dict[str, int], counts: dict[str, int]) -> None:
    for name, count in counts.items():
        before = shown.get(name, 0)
        if count > before:
            counter.labels(name).inc(count - before)
            shown[name] = count
