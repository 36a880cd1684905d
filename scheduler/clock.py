"""Log time, and the watchdogs that run on it.

Invariant: time is the sum of the current scheduler's ticks and nothing else; no clock is read. A
watchdog only ever moves forward by a tick, so a scheduler that was down has missed no deadline.
"""

from __future__ import annotations

from typing import Any

from protocol.config import WaitsConfig
from protocol.messages import Tick


class Clock:
    """Seconds of log time, and how long nothing has happened.

    Attributes:
        seconds: log time.
        epoch: of the scheduler whose ticks count.
    """

    def __init__(self, waits: WaitsConfig) -> None:
        self._waits = waits
        self.seconds = 0.0
        self.epoch = 0
        self._without_progress = 0.0
        self._without_actor = 0.0

    def start(self, epoch: int) -> bool:
        """A scheduler starts; returns whether its epoch is newer than the current one."""
        newer = epoch > self.epoch
        self.epoch = max(epoch, self.epoch)
        return newer

    def tick(self, event: Tick) -> bool:
        """Time passes, if the tick is the current scheduler's."""
        if event.epoch != self.epoch:
            return False
        self.seconds += event.seconds
        return True

    def progress(self) -> None:
        """An outcome or a step came in."""
        self._without_progress = 0.0

    def stuck(self, seconds: float, *, outstanding: bool, actors: int) -> bool:
        """Did nothing come in for `no_progress`, with work outstanding and an actor joined?"""
        if outstanding and actors:
            self._without_progress += seconds
        return self._without_progress >= self._waits.no_progress

    def alone(self, seconds: float, *, outstanding: bool, actors: int) -> bool:
        """Is it time to say that work waits and no actor has joined? Once every `first_actor`."""
        if actors or not outstanding:
            self._without_actor = 0.0
            return False
        self._without_actor += seconds
        if self._without_actor < self._waits.first_actor:
            return False
        self._without_actor = 0.0
        return True

    def state(self) -> list[Any]:
        """What `load` needs."""
        return [self.seconds, self.epoch, self._without_progress, self._without_actor]

    def load(self, state: list[Any]) -> None:
        """Become the clock that `state` was taken of."""
        self.seconds, self.epoch, self._without_progress, self._without_actor = state
