"""Starts the rank processes of a learner on this machine and ends as they end.

Invariant: no rank outlives another that failed, nor this process. `torchrun` is not used, for it
kills the ranks 30 s after a SIGTERM, in the middle of a step that is to be finished.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

PARENT = "REPRISE_LAUNCHER_PID"
CHECK_SECONDS = 0.2
# From the first rank that left well to the last: they all got the same order to leave.
LEAVE_SECONDS = 60.0


def launch(arguments: Sequence[str], ranks: int) -> int:
    """Run `python -m learner ARGUMENTS` as `ranks` processes; the worst exit code of them.

    SIGTERM and SIGINT go to rank 0, which finishes its step and tells the others.
    """
    port = _free_port()
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    children: list[subprocess.Popen[bytes]] = []

    def stop(*_: object) -> None:
        if children and children[0].poll() is None:
            children[0].send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    try:
        for rank in range(ranks):
            place = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                PARENT: str(os.getpid()),
            }
            # A group of its own: a terminal's Ctrl-C must reach the ranks through here alone.
            children.append(
                subprocess.Popen(
                    [sys.executable, "-m", "learner", *arguments],
                    env={"OMP_NUM_THREADS": threads, **os.environ, **place},
                    process_group=0,
                )
            )
        return _watch(children)
    finally:
        for child in children:
            child.kill()
            child.wait()


def _watch(children: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until all have left, one has failed, or the last does not follow the first."""
    first_left: float | None = None
    while True:
        codes = [child.poll() for child in children]
        failed = [code for code in codes if code]
        if failed:
            # A rank that died of another's end is not the one to report.
            time.sleep(CHECK_SECONDS)
            own = [code for child in children if (code := child.poll())]
            return next((code for code in own if code > 0), 1)
        if all(code == 0 for code in codes):
            return 0
        if first_left is None and any(code == 0 for code in codes):
            first_left = time.monotonic()
        if first_left is not None and time.monotonic() - first_left > LEAVE_SECONDS:
            print("error: a rank of the learner did not leave with the others", file=sys.stderr)
            return 1
        time.sleep(CHECK_SECONDS)


def end_with_launcher() -> None:
    """In a rank process: leave at once when the launcher is gone."""
    launcher = os.environ.get(PARENT)
    if launcher is None:
        return

    def check() -> None:
        while os.getppid() == int(launcher):
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=check, name="launcher-watch", daemon=True).start()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
