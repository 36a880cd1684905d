"""Looks at a run from outside: its metrics file, its logs, and each process's /healthz.

Invariant: works on a thread of its own and swallows every error, so that trouble in looking never
stops or slows the run.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import urllib.request
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from deploy.local.history import History, LineTail
from protocol.rundir import RunDir

log = logging.getLogger(__name__)

ANSWER_SECONDS = 2.0
KEPT_WARNINGS = 4
STARTING, NOT_ANSWERING = "starting", "not answering"
UNKNOWN_STATES = (STARTING, NOT_ANSWERING)
# The format that every process logs in: date time LEVEL name: message. Warnings of libraries stay
# in the log.
TROUBLE = re.compile(
    rb"^\S+ \S+ (?:(?:ERROR|CRITICAL) \S+|WARNING (?:scheduler|actors|learner|protocol)\S*): (.*)$"
)
ANYWHERE = ("0.0.0.0", "::", "")


@dataclass(frozen=True)
class ProcessFacts:
    """What one process says about itself."""

    name: str
    state: str
    seconds: float | None = None
    version: str = ""


class Observer:
    """Gathers what a view shows, once a second."""

    def __init__(
        self, run: RunDir, names: list[str], *, host: str = "127.0.0.1", period: float = 1.0
    ) -> None:
        """`names` are the processes of the run, in the order in which they are shown; `host` is
        where they listen (metrics.host)."""
        self._host = "127.0.0.1" if host in ANYWHERE else host
        self._run = run
        self._names = names
        self._period = period
        self._metrics = LineTail(run.metrics)
        self._logs = {name: LineTail(run.logs / f"{name}.log") for name in names}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="observer", daemon=True)
        self.history = History()
        self.processes: dict[str, ProcessFacts] = {
            name: ProcessFacts(name, STARTING) for name in names
        }
        self.warnings: deque[str] = deque(maxlen=KEPT_WARNINGS)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look a last time, and no more."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(3 * ANSWER_SECONDS)
        self.look(health=False)

    def look(self, *, health: bool = True) -> None:
        """One round."""
        try:
            for line in self._metrics.new():
                self.history.add_line(line)
            for name, lines in self._logs.items():
                for line in lines.new():
                    if found := TROUBLE.match(line):
                        self.warnings.append(f"{name}: {found[1].decode('utf-8', 'replace')}")
            if health:
                for name in self._names:
                    self.processes[name] = self._ask(name)
        except Exception:
            log.debug("looking at the run failed", exc_info=True)

    def _loop(self) -> None:
        while not self._stopped.wait(self._period):
            self.look()

    def _ask(self, name: str) -> ProcessFacts:
        path = self._run.processes / f"{name}.json"
        if not path.exists():
            return ProcessFacts(name, STARTING)
        try:
            return _facts(name, path, self._host)
        except (OSError, ValueError, TypeError):
            return ProcessFacts(name, NOT_ANSWERING)


def _facts(name: str, path: Path, host: str) -> ProcessFacts:
    port = int(json.loads(path.read_text())["port"])
    url = f"http://{host}:{port}/healthz"
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as answer:
            facts = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        # 503 says that it is not alive by its own progress; the facts say why.
        facts = json.loads(error.read())
    seconds = facts.get("seconds")
    return ProcessFacts(
        name,
        str(facts.get("state", "running")) + ("" if facts.get("alive", True) else " (stuck)"),
        float(seconds) if isinstance(seconds, int | float) else None,
        str(facts.get("version") or ""),
    )
