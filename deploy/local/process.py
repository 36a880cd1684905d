"""A command that runs under a guard (`deploy.local.child`), seen from the launcher.

Invariant: once `kill` or `wait_or_kill` has returned, no process of the command's tree is alive.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

GUARD = Path(__file__).with_name("child.py")
KILL_SECONDS = 10.0


class GuardedProcess:
    """One started command, its output in a file."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        *,
        stdout: Path | None = None,
    ) -> None:
        """Start `command`. stderr is appended to `log`, and so is stdout unless it has its own
        file. Raises OSError."""
        self.log = log
        guard = [sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), *command]
        with log.open("ab") as errors, (stdout or log).open("ab") as output:
            self._guard = subprocess.Popen(
                guard,
                env=dict(os.environ if env is None else env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the guard; its session and group have this number too."""
        return self._guard.pid

    def poll(self) -> int | None:
        """Exit code once the command's whole tree has ended, else None; 128 + n for signal n."""
        code = self._guard.poll()
        return None if code is None else self._ended(code)

    def terminate(self) -> None:
        """Ask the command to end (SIGTERM)."""
        self._signal(signal.SIGTERM)

    def wait(self, timeout: float) -> int:
        """Wait for the end of the tree. Raises subprocess.TimeoutExpired."""
        return self._ended(self._guard.wait(timeout))

    def kill(self) -> int:
        """End the whole tree at once; returns the exit code."""
        self._signal(signal.SIGQUIT)
        try:
            return self.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            return self.wait(KILL_SECONDS)

    def _ended(self, code: int) -> int:
        if code >= 0:
            return code
        # The guard itself was killed: what it guarded is at least still in its group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        return 128 - code

    def _signal(self, number: signal.Signals) -> None:
        if self._guard.poll() is None:
            self._guard.send_signal(number)

    def tail(self, lines: int = 20) -> str:
        """The end of the log, at most `lines` lines."""
        return tail(self.log, lines)


def tail(path: Path, lines: int = 20) -> str:
    """The last `lines` lines of a text file; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 65536))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])


def describe_exit(code: int) -> str:
    """`exit code 3`, or the signal that ended it."""
    if code > 128:
        try:
            return f"killed by {signal.Signals(code - 128).name}"
        except ValueError:
            pass
    return f"exit code {code}"
