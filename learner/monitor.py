"""What rank 0 shows of itself: state and its age for /healthz, numbers for /metrics.

Invariant: a state that lasts longer than its deadline is reported as not alive.
"""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import CollectorRegistry

from learner.inbox import Inbox
from protocol.config import WaitsConfig
from protocol.messages import StepCompleted, WeightsPublished
from protocol.metrics import LearnerMetrics
from protocol.versions import Version

ROLE = "learner"


class Monitor:
    """State and numbers of the learner."""

    def __init__(self, registry: CollectorRegistry, waits: WaitsConfig) -> None:
        self.metrics = LearnerMetrics(registry)
        self._waits = waits
        self._state = "starting"
        self._version: Version | None = None
        self._since = time.monotonic()

    def enter(self, state: str, version: Version | None = None) -> None:
        """The learner does something else now."""
        now = time.monotonic()
        self.metrics.state_seconds.labels(ROLE, self._state).inc(now - self._since)
        self._state, self._since = state, now
        if version is not None:
            self._version = version

    def health(self) -> tuple[bool, dict[str, Any]]:
        """For MonitorServer: alive, and the facts."""
        seconds = time.monotonic() - self._since
        waits = self._waits
        deadline = {"waiting": waits.batch + waits.group, "draining": waits.drain}.get(
            self._state, waits.collective
        )
        facts = {
            "state": self._state,
            "seconds": round(seconds, 3),
            "version": None if self._version is None else str(self._version),
        }
        return seconds <= deadline + waits.main, facts

    def kept(self, inbox: Inbox) -> None:
        """What the inbox holds."""
        self.metrics.groups_kept.set(len(inbox.groups))
        self.metrics.kept_bytes.set(inbox.groups.size)

    def published(self, message: WeightsPublished) -> None:
        """A version lies complete and is announced."""
        self.metrics.published_bytes.inc(message.bytes)
        self.metrics.version_step.labels(ROLE).set(message.version.step)
        self.metrics.version_generation.labels(ROLE).set(message.version.generation)

    def step(self, completed: StepCompleted, *, skipped: bool) -> None:
        """A step is done."""
        metrics = self.metrics
        metrics.steps.labels("skipped" if skipped else "updated").inc()
        for end in completed.ends:
            metrics.groups_ended.labels(end.end).inc()
        for name, value in completed.metrics.items():
            if name in metrics.step:
                metrics.step[name].set(value)
            elif name.startswith("seconds_"):
                metrics.phase_seconds.labels(name.removeprefix("seconds_")).observe(value)
        if not skipped:
            metrics.tokens.labels("completion").inc(completed.metrics.get("tokens", 0.0))
            metrics.tokens.labels("prompt").inc(completed.metrics.get("prompt_tokens", 0.0))
