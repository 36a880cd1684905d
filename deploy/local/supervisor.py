"""Starts the processes of a run, watches them, and stops them in order.

Invariants: what was started has ended, with all its descendants, once `close` returns; every wait
has a deadline; a user's first stop lets the run end by itself, the second kills at once. The order
of a stop is the design's: the learner first, while the scheduler lives, then the scheduler, then
the actors.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Literal

from deploy.local.process import GuardedProcess, describe_exit
from protocol.config import WaitsConfig
from protocol.rundir import RunDir

log = logging.getLogger(__name__)

Role = Literal["broker", "scheduler", "learner", "actor"]
STOP_ORDER: tuple[Role, ...] = ("learner", "scheduler", "actor")
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PERIOD_SECONDS = 0.1


@dataclass(frozen=True)
class ChildSpec:
    """One process to start."""

    name: str
    role: Role
    command: Sequence[str]
    env: Mapping[str, str]


@dataclass(frozen=True)
class Deadlines:
    """Longest waits of the supervisor, in seconds."""

    end: float
    """For the other processes, once the run is over or one of them has left."""
    stop: float
    """For the run to end by itself after the user's stop."""
    next: float
    """For a process to follow the one before it in a stop, before it is asked too."""
    grace: float
    """Between asking what is left to end and killing it."""

    @classmethod
    def of(cls, waits: WaitsConfig) -> Deadlines:
        """As the run's own waits imply: the learner still writes the model after the end."""
        return cls(
            end=waits.drain + waits.grace + waits.loading,
            stop=waits.drain + waits.grace + 60.0,
            next=5.0,
            grace=waits.grace,
        )


class ChildDied(Exception):
    """A process ended as it should not. The text holds its name, its end and the end of its log."""


class StoppedByUser(Exception):
    """The user stopped the run. `killed` tells whether it was not left to end by itself."""

    def __init__(self, number: int, *, killed: bool) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number
        self.killed = killed


class StopSignals:
    """Counts the user's stop signals while it is entered; the default handlers come back after."""

    def __init__(self) -> None:
        self.count = 0
        self.last = int(signal.SIGINT)
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        for number in STOP_SIGNALS:
            self._before[number] = signal.signal(number, self._caught)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.last = number


@dataclass
class Child:
    """One started process."""

    spec: ChildSpec
    process: GuardedProcess
    asked: bool = False
    """It was asked to end."""

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def ask(self) -> None:
        """SIGTERM, once."""
        if not self.asked and self.running:
            self.asked = True
            self.process.terminate()


@dataclass
class Supervisor:
    """The processes of one run. `broker` is watched like them, and stopped by its owner."""

    run: RunDir
    deadlines: Deadlines
    signals: StopSignals
    say: Callable[[str], None] = print
    tick: Callable[[], None] = lambda: None
    """Called while waiting, several times a second."""
    over: Callable[[], bool] = lambda: False
    """Has the scheduler recorded the end of the run? Its exit code then says only how."""
    broker: Callable[[], int | None] = lambda: None
    """Exit code of the embedded broker, None while it runs or where there is none."""
    children: list[Child] = field(default_factory=list)

    def start(self, specs: Sequence[ChildSpec]) -> None:
        """Start the processes. They end with `close`, whatever happens."""
        for spec in specs:
            log_path = self.run.logs / f"{spec.name}.log"
            process = GuardedProcess(spec.command, log_path, spec.env)
            self.children.append(Child(spec, process))

    def watch(self) -> None:
        """Return once every process has ended as it should.

        Raises:
            ChildDied: one ended with an error, or did not end in time.
            StoppedByUser: after everything has ended.
        """
        first_end: float | None = None
        while any(child.running for child in self.children):
            if self.signals.count:
                self._stop_for_user()
            self._raise_if_died()
            if first_end is None and self._ending():
                first_end = time.monotonic()
            if first_end is not None and time.monotonic() - first_end > self.deadlines.end:
                raise ChildDied(self._not_ended("after the others had left", self.deadlines.end))
            self._pause()
        if self.signals.count:
            raise StoppedByUser(self.signals.last, killed=False)
        self._raise_if_died()

    def close(self) -> None:
        """End whatever still runs: asked in order, then killed."""
        for role in STOP_ORDER:
            for child in self._of(role):
                child.ask()
        deadline = time.monotonic() + self.deadlines.grace
        while self._running() and time.monotonic() < deadline and self.signals.count < 2:
            self._pause()
        self.kill()

    def kill(self) -> None:
        """End whatever still runs, at once."""
        for child in self._running():
            child.process.kill()

    def _pause(self) -> None:
        self.tick()
        time.sleep(PERIOD_SECONDS)

    def _of(self, role: Role) -> list[Child]:
        return [child for child in self.children if child.spec.role == role]

    def _running(self) -> list[Child]:
        return [child for child in self.children if child.running]

    def _ending(self) -> bool:
        """Has the scheduler left, or the learner, or every actor?"""
        groups = [self._of(role) for role in STOP_ORDER]
        return any(group and not any(c.running for c in group) for group in groups)

    def _raise_if_died(self) -> None:
        for child in self.children:
            code = child.process.poll()
            if code not in (None, 0) and not (child.spec.role == "scheduler" and self.over()):
                raise ChildDied(
                    f"{child.spec.name} ended unexpectedly ({describe_exit(code)}); "
                    f"the end of {child.process.log}:\n{child.process.tail()}"
                )
        code = self.broker()
        if code is not None:
            raise ChildDied(
                f"the embedded broker ended unexpectedly ({describe_exit(code)}); see "
                f"{self.run.logs / 'broker.log'}"
            )

    def _not_ended(self, when: str, seconds: float) -> str:
        names = ", ".join(child.spec.name for child in self._running())
        logs = "\n".join(f"{c.process.log}:\n{c.process.tail(10)}" for c in self._running())
        return f"{names} did not end within {seconds:g} s {when}; the end of\n{logs}"

    def _stop_for_user(self) -> None:
        """The learner, then each of the others as it is left alone; always raises."""
        self.say("Stopping: the learner ends its step first. Ctrl-C again kills at once.")
        deadline = time.monotonic() + self.deadlines.stop
        killed = False
        for role in STOP_ORDER:
            for child in self._of(role):
                child.ask()
            if not self._wait_stopping(role, deadline):
                killed = True
                break
        if self._running():
            if self.signals.count < 2:
                self.say(self._not_ended("after the stop", self.deadlines.stop))
                self.close()
            self.kill()
        for child in self.children:
            code = child.process.poll()
            if code not in (0, 128 + signal.SIGTERM, 128 + signal.SIGKILL):
                self.say(f"{child.spec.name}: {describe_exit(code or 0)}; see {child.process.log}")
        raise StoppedByUser(self.signals.last, killed=killed)

    def _wait_stopping(self, role: Role, deadline: float) -> bool:
        """Wait until `role` has ended, and then a while for the next to follow by itself."""
        later = STOP_ORDER[STOP_ORDER.index(role) + 1 :]
        ended: float | None = None
        while time.monotonic() < deadline and self.signals.count < 2:
            if ended is None and not any(child.running for child in self._of(role)):
                ended = time.monotonic()
            if ended is not None:
                following = [c for r in later[:1] for c in self._of(r) if c.running]
                if not following or time.monotonic() - ended > self.deadlines.next:
                    return True
            self._pause()
        return False
