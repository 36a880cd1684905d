"""What the actor does now and how long it has done what, readable from any thread.

Invariant: at each moment the actor is in exactly one state, and the seconds over all states add up
to the time since its start.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from protocol.config import WaitsConfig
from protocol.messages import ActorState, Held
from protocol.versions import Version


class StateClock:
    """Adds up the seconds in each state."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._state: ActorState = "starting"
        self._since = clock()
        self._seconds: dict[str, float] = {}

    @property
    def state(self) -> ActorState:
        """The state now."""
        return self._state

    @property
    def seconds_in_state(self) -> float:
        """Since the state was entered."""
        return self._clock() - self._since

    def enter(self, state: ActorState) -> None:
        """Change the state; entering the same state again changes nothing."""
        with self._lock:
            if state == self._state:
                return
            now = self._clock()
            self._seconds[self._state] = self._seconds.get(self._state, 0.0) + now - self._since
            self._state, self._since = state, now

    def seconds(self) -> dict[str, float]:
        """Seconds in each state so far, the present one included."""
        with self._lock:
            present = self._seconds.get(self._state, 0.0) + self._clock() - self._since
            return {**self._seconds, self._state: present}


@dataclass(slots=True)
class Status:
    """What the main loop tells the Kafka thread; each attribute is replaced whole.

    Attributes:
        actor: None before the actor has joined.
        held: started and unfinished attempts.
        unstarted: offset of the oldest task not started, for the lag to be watched.
    """

    clock: StateClock
    actor: str | None = None
    version: Version | None = None
    held: tuple[Held, ...] = ()
    tokens: int = 0
    unstarted: int | None = None
    last_token: float = 0.0

    def overdue(self, waits: WaitsConfig, now: float) -> str | None:
        """Which deadline the present state has broken, if any."""
        state = self.clock.state
        if state == "generating" and now - self.last_token > waits.token:
            return f"no token for {now - self.last_token:.0f} s (waits.token {waits.token:g})"
        limit = {"loading": waits.loading, "draining": waits.grace}.get(state)
        if limit is not None and self.clock.seconds_in_state > limit:
            return f"{state} for {self.clock.seconds_in_state:.0f} s ({limit:g} allowed)"
        return None
