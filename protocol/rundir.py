"""What lies where in a run directory, `runs/<id>/`.

config.yaml     the whole config as used       run.json      run id, incarnation, seed
metrics.jsonl   one record a line              logs/         one file a process
processes/      pid, port, state of each       weights/      published, by version
generations/    numbers taken by learners      model/        the trained model, HF layout
scheduler/      snapshots                      report.html, summary.json
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from protocol.topics import Topics


@dataclass(frozen=True)
class RunIdentity:
    """The id of a run and which incarnation of its topics is in use."""

    run: str
    incarnation: int

    @property
    def topics(self) -> Topics:
        """Its topics."""
        return Topics(self.run, self.incarnation)


@dataclass(frozen=True)
class RunDir:
    """Paths of one run."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def processes(self) -> Path:
        return self.root / "processes"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    @property
    def generations(self) -> Path:
        return self.root / "generations"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def scheduler(self) -> Path:
        return self.root / "scheduler"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    def create(self, identity: RunIdentity) -> None:
        """Make the directory and its folders. Raises FileExistsError, PermissionError."""
        self.root.mkdir(parents=True)
        for folder in (self.logs, self.processes, self.weights, self.generations, self.scheduler):
            folder.mkdir()
        write_atomic(self.root / "run.json", json.dumps(asdict(identity)).encode())

    @property
    def identity(self) -> RunIdentity:
        """As `create` wrote it."""
        return RunIdentity(**json.loads((self.root / "run.json").read_text()))

    def register_process(self, name: str, port: int) -> None:
        """Note this process's pid and monitoring port in processes/<name>.json."""
        facts = {"name": name, "pid": os.getpid(), "port": port}
        write_atomic(self.processes / f"{name}.json", json.dumps(facts).encode())


def write_atomic(path: Path, content: bytes) -> None:
    """Write to a temporary name, sync, rename: the file is old or new, never half."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
