"""Runs one command as the root of a process tree that cannot outlive the launcher.

`python deploy/local/child.py LAUNCHER_PID CMD…`, started in a session of its own.

Invariant: when this guard ends, every descendant of the command has ended, whatever session it put
itself into; and the guard ends when the command ends, when it is told to, and when the launcher is
gone, kill -9 included. On Linux it is the reaper of its descendants, so an orphan comes to it and
not to init. Standard library only: it starts in milliseconds, under `python -I -S`.

Signals: TERM, INT and HUP go to the command; QUIT kills the tree at once. The exit code is the
command's; a command that a signal ended gives 128 + its number.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

LINUX = sys.platform == "linux"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LAUNCHER_GONE = signal.SIGUSR1
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
WATCHED = {*FORWARDED, signal.SIGQUIT, signal.SIGCHLD, LAUNCHER_GONE}
# Time that what a finished command leaves behind has to end by itself.
LINGER_SECONDS = 5.0
PERIOD_SECONDS = 0.5


def prctl(option: int, value: int) -> None:
    """The Linux call of that name. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def descendants(root: int) -> list[int]:
    """Every living process below `root`, zombies left out."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                # pid (name) state parent …; the name may hold spaces and brackets.
                state, parent = (entry / "stat").read_text().rpartition(") ")[2].split()[:2]
                if state not in "ZX":
                    children.setdefault(int(parent), []).append(int(entry.name))
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


class Guard:
    """Starts the command and waits for its end, or for the end of the launcher."""

    def __init__(self, launcher: int, command: list[str]) -> None:
        self._launcher = launcher
        if LINUX:
            prctl(PR_SET_CHILD_SUBREAPER, 1)
            prctl(PR_SET_PDEATHSIG, LAUNCHER_GONE)
        signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
        self._code: int | None = None
        self._pid = os.fork()
        if self._pid == 0:
            self._become(command)

    def _become(self, command: list[str]) -> None:
        try:
            if LINUX:
                prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
            os.execvp(command[0], command)
        except OSError as error:
            print(f"{command[0]}: cannot be started: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)

    def run(self) -> int:
        """Returns the exit code of the command once its tree has ended."""
        while self._code is None and os.getppid() == self._launcher:
            caught = signal.sigtimedwait(WATCHED, PERIOD_SECONDS)
            self._reap()
            if self._code is None and caught is not None:
                if caught.si_signo in FORWARDED:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(self._pid, caught.si_signo)
                elif caught.si_signo == signal.SIGQUIT:
                    break
        if self._code is not None:
            self._linger()
        self._kill_tree()
        return 128 + signal.SIGKILL if self._code is None else self._code

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._pid:
                    code = os.waitstatus_to_exitcode(status)
                    self._code = 128 - code if code < 0 else code

    def _linger(self) -> None:
        """Let what is left end by itself, for a while, but no longer than the launcher lives."""
        left = self._left()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + LINGER_SECONDS
        while left and time.monotonic() < deadline and os.getppid() == self._launcher:
            caught = signal.sigtimedwait(WATCHED, 0.05)
            if caught is not None and caught.si_signo == signal.SIGQUIT:
                return
            self._reap()
            left = self._left()

    def _kill_tree(self) -> None:
        # Killed processes may have forked meanwhile: until none is left.
        while left := self._left():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            signal.sigtimedwait({signal.SIGCHLD}, 0.05)
            self._reap()

    def _left(self) -> list[int]:
        if LINUX:
            return descendants(os.getpid())
        return [self._pid] if self._code is None else []


def main(arguments: list[str]) -> int:
    """Arguments: the launcher's process id, then the command."""
    return Guard(int(arguments[0]), arguments[1:]).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
