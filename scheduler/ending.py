"""How a run ends: which phase it is in, why, and how long the phase may last.

Invariant: phases only go forward: running → stopping (a batch is at the learner, and its
StepCompleted is waited for) → draining (RunEnded is sent; what actors hold comes back) → left. Each
of the two in the middle lasts at most `waits.drain` of log time.
"""

from __future__ import annotations

from typing import Any

from protocol.messages import RunEnded, RunEndReason

RUNNING, STOPPING, DRAINING, LEFT = range(4)
# Ends that are as they should be: the exit code is 0.
GOOD: tuple[RunEndReason, ...] = ("finished", "stopped", "nothing_left_to_learn")


class Ending:
    """The end of the run, as far as it has come.

    Attributes:
        phase: RUNNING, STOPPING, DRAINING or LEFT.
        begun: no new work is given out any longer.
        reason, detail: why, once it has begun.
    """

    def __init__(self, drain: float) -> None:
        """`drain`: longest wait of a phase, in seconds of log time."""
        self._drain = drain
        self.phase = RUNNING
        self.begun = False
        self.reason: RunEndReason = "finished"
        self.detail = ""
        self._since = 0.0

    @property
    def ok(self) -> bool:
        """Did the run end as it should?"""
        return self.reason in GOOD

    @property
    def message(self) -> RunEnded:
        """For actors and learner."""
        return RunEnded(reason=self.reason, detail=self.detail)

    def begin(self, reason: RunEndReason, detail: str, now: float) -> None:
        """The run is to end."""
        self.phase, self.begun = STOPPING, True
        self.reason, self.detail, self._since = reason, detail[:4096], now

    def drain(self, now: float) -> None:
        """Everyone is told."""
        self.phase, self._since = DRAINING, now

    def leave(self) -> None:
        """The accounts are final."""
        self.phase = LEFT

    def overdue(self, now: float) -> bool:
        """Has the phase lasted as long as it may?"""
        return now - self._since >= self._drain

    def state(self) -> list[Any]:
        """What `load` needs."""
        return [self.phase, self.reason, self.detail, self._since]

    def load(self, state: list[Any]) -> None:
        """Become the ending that `state` was taken of."""
        self.phase, self.reason, self.detail, self._since = state
        self.begun = self.phase != RUNNING
