"""Stand-ins for the processes of a run, and a launcher that supervises them.

`fakes.py child NAME KIND DIR`: they talk through files in DIR instead of through Kafka. `stop` asks
the fake scheduler to end the run, `ended` tells everyone that it is over; `NAME.term` is left by a
SIGTERM. Kind `scripted` plays a whole run of ten steps, `stuck` one that ends
without progress.
`fakes.py reprise KIND… -- ARGUMENTS` is the `reprise` command over a fake scheduler, learner and
actor of these kinds.
`fakes.py launch DIR NAME:ROLE:KIND…` supervises children like `reprise run` does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from deploy.local import cli, environment
from deploy.local.supervisor import (
    ChildDied,
    ChildSpec,
    Deadlines,
    StoppedByUser,
    StopSignals,
    Supervisor,
)
from protocol.config import Config
from protocol.records import to_line
from protocol.rundir import RunDir

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.deploy.canned import records

DEADLINES = Deadlines(end=3.0, stop=20.0, next=1.0, grace=1.0)
PERIOD = 0.02


def appears(path: Path) -> None:
    while not path.exists():
        time.sleep(PERIOD)


def child(name: str, kind: str, folder: Path) -> int:
    """`kind`: scheduler, learner, actor behave; crash fails; deaf does not end when asked, and has
    a grandchild in a session of its own; early leaves at once."""
    (folder / f"{name}.pid").write_text(str(os.getpid()))
    if kind == "crash":
        print("\n".join(f"line {i}" for i in range(30)), "\nValueError: no such model", flush=True)
        return 3
    if kind == "early":
        return 0
    if kind == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        grandchild = subprocess.Popen(
            [sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True
        )
        (folder / f"{name}-grandchild.pid").write_text(str(grandchild.pid))
        (folder / f"{name}.ready").touch()
        while True:
            signal.pause()

    if kind in ("scripted", "stuck"):
        run = RunDir(folder)
        reason = "finished" if kind == "scripted" else "no_progress"
        run.metrics.write_bytes(b"".join(map(to_line, records(10, reason=reason))))
        run.model.mkdir()
        (run.model / "config.json").write_text("{}")
        (folder / "ended").touch()
        return 0 if kind == "scripted" else 1

    def on_term(number: int, frame: object) -> None:
        (folder / f"{name}.term").write_text(str(time.monotonic()))
        if kind in ("learner", "scheduler"):
            (folder / "stop").touch()
        else:
            sys.exit(0)

    signal.signal(signal.SIGTERM, on_term)
    (folder / f"{name}.ready").touch()
    if kind == "scheduler":
        appears(folder / "stop")
        (folder / "ended").touch()
    appears(folder / "ended")
    return 0


def launch(folder: Path, children: list[str]) -> int:
    run = RunDir(folder)
    run.logs.mkdir()
    specs = []
    for entry in children:
        name, role, kind = entry.split(":")
        command = [sys.executable, __file__, "child", name, kind, str(folder)]
        specs.append(ChildSpec(name, role, command, dict(os.environ)))  # type: ignore[arg-type]
    with StopSignals() as signals:
        supervisor = Supervisor(run, DEADLINES, signals, say=lambda text: print(text, flush=True))
        try:
            supervisor.start(specs)
            supervisor.watch()
        except ChildDied as error:
            print(error)
            return 1
        except StoppedByUser as stopped:
            print(json.dumps({"killed": stopped.killed}))
            return stopped.exit_code
        finally:
            supervisor.close()
    return 0


def reprise(kinds: list[str], arguments: list[str]) -> None:
    def specs(config: Config, run: RunDir, environ: Mapping[str, str]) -> list[ChildSpec]:
        roles = ("scheduler", "learner", "actor")
        return [
            ChildSpec(
                role,
                role,  # type: ignore[arg-type]
                [sys.executable, __file__, "child", role, kind, str(run.root)],
                environ,
            )
            for role, kind in zip(roles, kinds, strict=True)
        ]

    environment.specs = specs
    cli.app(arguments)


if __name__ == "__main__":
    if sys.argv[1] == "child":
        sys.exit(child(sys.argv[2], sys.argv[3], Path(sys.argv[4])))
    if sys.argv[1] == "reprise":
        end = sys.argv.index("--")
        reprise(sys.argv[2:end], sys.argv[end + 1 :])
    sys.exit(launch(Path(sys.argv[2]), sys.argv[3:]))
