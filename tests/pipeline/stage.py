"""A run directory, its topics and a real scheduler process, for simulated actors and learners."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import yaml

from protocol.config import Config, load_config
from protocol.kafka import Kafka
from protocol.records import EndRecord, EvalRecord, RunRecord, StepRecord, from_line
from protocol.rundir import RunDir, RunIdentity
from protocol.topics import Topics, create_or_verify
from tests.pipeline.simulated import (
    SimulatedActor,
    producing,
    serve_actor,
)
from tests.pipeline.simulated_learner import SimulatedLearner, serve_learner

FAST = {
    "tick": 0.1,
    "heartbeat": 0.2,
    "lease": 2.0,
    "drain": 10.0,
    "no_progress": 60.0,
    "group": 20.0,
    "kafka": 20.0,
}
REPOSITORY = Path(__file__).parents[2]


def write_problems(path: Path, count: int, prefix: str = "p") -> Path:
    """`count` problems of three data sources."""
    with path.open("w", encoding="utf-8") as file:
        for i in range(count):
            row = {"id": f"{prefix}{i}", "prompt": f"{i}+1=", "answer": str(i + 1)}
            file.write(json.dumps({**row, "data_source": f"s{i % 3}", "level": i % 7}) + "\n")
    return path


class Stage:
    """One run without its actors and its learner."""

    def __init__(
        self, directory: Path, topics: Topics, kafka_section: dict[str, Any], **sections: Any
    ) -> None:
        """`sections` of the config; what they leave out is small and fast."""
        self.run_dir = RunDir(directory / "run")
        self.topics = topics
        self.run_dir.create(RunIdentity(topics.run, topics.incarnation))
        raw = {
            "model": {"path": "none"},
            "data": {"train": str(write_problems(directory / "train.jsonl", 600))},
            "kafka": kafka_section,
            **sections,
            "rollout": {"group_size": 4, "max_tokens": 8, **sections.get("rollout", {})},
            "actors": {"max": 8, **sections.get("actors", {})},
            "waits": {**FAST, **sections.get("waits", {})},
        }
        self.run_dir.config.write_text(yaml.safe_dump(raw), encoding="utf-8")
        self.config: Config = load_config(self.run_dir.config)
        self.kafka = Kafka(self.config.kafka, wait=20.0, client_id="reprise-test")
        self.log = self.run_dir.logs / "scheduler.log"
        self._process: asyncio.subprocess.Process | None = None

    async def create_topics(self) -> None:
        """As the launcher does."""
        admin = await self.kafka.admin()
        try:
            await create_or_verify(admin, self.topics.specs(self.config))
        finally:
            await admin.close()

    @contextlib.asynccontextmanager
    async def scheduler(self) -> AsyncIterator[asyncio.subprocess.Process]:
        """The scheduler process; killed at the end if it still runs."""
        await self.create_topics()
        with self.log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "scheduler",
                "--run-dir",
                str(self.run_dir.root),
                cwd=REPOSITORY,
                stderr=log,
                env={**os.environ, "PYTHONFAULTHANDLER": "1"},
            )
        try:
            yield self._process
        finally:
            if self._process.returncode is None:
                self._process.send_signal(signal.SIGKILL)
                await self._process.wait()

    async def play(
        self,
        *actors: dict[str, Any],
        learner: dict[str, Any] | None = None,
        meanwhile: Any = None,
        timeout: float = 60.0,
    ) -> Played:
        """A whole run: scheduler process, one actor for each of `actors`, one learner.

        Args:
            actors, learner: keyword arguments of the simulated processes.
            meanwhile: awaited beside them, called with this stage and the learner.
            timeout: longest whole run, in seconds.
        """
        async with contextlib.AsyncExitStack() as stack:
            process = await stack.enter_async_context(self.scheduler())
            cast: list[SimulatedActor] = []
            for number, options in enumerate(actors):
                producer = await stack.enter_async_context(producing(self.kafka))
                options = {"name": f"actor-{number}", "seed": number, **options}
                cast.append(SimulatedActor(self.topics, producer, **options))
            producer = await stack.enter_async_context(producing(self.kafka))
            trainer = SimulatedLearner(self.topics, producer, self.config, **(learner or {}))
            work = [serve_actor(self.kafka, self.topics, self.config, actor) for actor in cast]
            work.append(serve_learner(self.kafka, self.topics, trainer))
            if meanwhile is not None:
                work.append(meanwhile(self, trainer))
            code = asyncio.ensure_future(process.wait())
            playing = asyncio.gather(*work, code)
            try:
                await asyncio.wait_for(playing, timeout)
            except TimeoutError:
                raise AssertionError(
                    f"not over after {timeout} s; the scheduler said:\n{self.log.read_text()}"
                ) from None
            return Played(self, code.result(), cast, trainer)

    async def appended(self, topic: str, records: int) -> None:
        """Wait until partition 0 of `topic` holds so many records."""
        reader = await self.kafka.reader(topic)
        try:
            await reader.assign({0: 0})
            while records > 0:
                records -= len(await reader.read(5.0))
        finally:
            await reader.stop()

    def stop(self) -> None:
        """SIGTERM to the scheduler."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)

    def records(self) -> list[RunRecord]:
        """What the scheduler wrote to metrics.jsonl."""
        return [from_line(line) for line in self.run_dir.metrics.read_bytes().splitlines()]

    def monitor(self, path: str) -> str:
        """What the scheduler serves at `path`. Blocks; call it from a thread."""
        facts = json.loads((self.run_dir.processes / "scheduler.json").read_text())
        with urllib.request.urlopen(f"http://127.0.0.1:{facts['port']}{path}") as answer:
            return str(answer.read().decode())


class Played:
    """A run that is over, and what it left."""

    def __init__(
        self, stage: Stage, code: int, actors: list[SimulatedActor], learner: SimulatedLearner
    ) -> None:
        self.code = code
        self.actors = actors
        self.learner = learner
        self.log = stage.log.read_text()
        self.records = stage.records()
        self.steps = [r for r in self.records if isinstance(r, StepRecord)]
        self.evals = [r for r in self.records if isinstance(r, EvalRecord)]
        ends = [r for r in self.records if isinstance(r, EndRecord)]
        assert len(ends) == 1, self.log
        self.end = ends[0]
        assert self.records[-1] is self.end
