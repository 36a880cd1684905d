"""How far the scheduler lags behind on `events` with many actors.

    python -m benchmarks.scheduler_service [--actors 1000] [--seconds 30] [--json]

A real embedded broker, a real scheduler process, and this process, which plays a learner and all
actors on one shared producer: each sends a heartbeat every 2 s, takes tasks and returns outcomes.
The lag is measured from outside, by a process of its own: ten times a second a record that is no
event is appended to `events`; the scheduler puts it aside on `events.dead` when its turn comes. The
time between is how long an event waits, both ways through the broker included.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from deploy.local.broker import EmbeddedBroker
from protocol.config import EMBEDDED_FETCH_WAIT, FETCH_WAIT, KafkaConfig
from protocol.kafka import Kafka, Producer, Reader
from protocol.messages import AnyMessage, RunEnded, TaskRecord, WeightsRecord
from protocol.topics import Topics
from tests.pipeline.simulated import (
    Behaviour,
    SimulatedActor,
    producing,
)
from tests.pipeline.simulated_learner import SimulatedLearner, serve_learner
from tests.pipeline.stage import Stage, write_problems

HEARTBEAT = 2.0
TASK_SECONDS = 4.0
PROBE_SECONDS = 0.1
PROBE = b"\xc1"
SLICE = 0.02
PROBLEMS = 100_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--actors", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        broker = stack.enter_context(EmbeddedBroker(Path(directory) / "broker.log"))
        figures = asyncio.run(
            measure(Path(directory), broker.bootstrap_servers, options.actors, options.seconds)
        )
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:32} {value:,.3f}")
    return 0


async def measure(directory: Path, servers: str, actors: int, seconds: float) -> dict[str, float]:
    """One run of `seconds` once all actors have joined."""
    stage = Stage(
        directory,
        Topics(f"bench-{uuid.uuid4().hex[:8]}", 1),
        {
            "bootstrap_servers": servers,
            "idempotence": False,
            "replication_factor": 1,
            "fetch_wait": EMBEDDED_FETCH_WAIT,
        },
        run={"steps": 1_000_000, "prompts_per_step": max(1, actors // 2), "max_lag": 1},
        data={"train": str(write_problems(directory / "many.jsonl", PROBLEMS))},
        actors={"max": actors, "slots": 4},
        waits={"tick": 1.0, "heartbeat": HEARTBEAT, "lease": 45.0, "snapshot_outcomes": 2000},
    )
    began = time.monotonic()
    await stage.create_topics()
    created = time.monotonic() - began
    async with stage.scheduler() as process, producing(stage.kafka) as producer:
        load = Load(stage, producer, actors)
        async with load.running():
            before, started = await numbers(stage), time.monotonic()
            used = cpu_seconds(process.pid)
            lags = sorted(await probed(stage, seconds))
            after, passed = await numbers(stage), time.monotonic() - started
            used = cpu_seconds(process.pid) - used
        stage.stop()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 5)

    def rate(name: str) -> float:
        return (after[name] - before[name]) / passed

    return {
        "lag_seconds_p50": quantile(lags, 0.5),
        "lag_seconds_p99": quantile(lags, 0.99),
        "lag_seconds_max": lags[-1],
        "actors": after["reprise_actors_joined"],
        "seconds": passed,
        "events_per_second": rate("events"),
        "heartbeats_per_second": rate("Heartbeat"),
        "outcomes_per_second": rate("Outcome"),
        "steps": after["StepCompleted"] - before["StepCompleted"],
        "scheduler_cpu_share": used / passed,
        "create_topics_seconds": created,
        "snapshot_seconds": after["reprise_snapshot_seconds"],
    }


class Load:
    """All actors and the learner, on one producer."""

    def __init__(self, stage: Stage, producer: Producer, actors: int) -> None:
        self.stage = stage
        self.producer = producer
        self._behaviour = Behaviour(seconds=TASK_SECONDS)
        self._actors = [
            SimulatedActor(
                stage.topics, producer, name=f"actor-{i}", slots=4, behaviour=self._behaviour
            )
            for i in range(actors)
        ]
        self._by_id: dict[str, SimulatedActor] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> Any:
        """Everything runs and every actor has its partition."""
        topics = self.stage.topics
        # Each fetch of all partitions of `tasks` costs this process more than the wait saves.
        patient = self.stage.config.kafka.model_copy(update={"fetch_wait": FETCH_WAIT})
        kafka = Kafka(patient, wait=30.0)
        async with contextlib.AsyncExitStack() as stack:
            weights = await opened(stack, kafka, topics.weights, WeightsRecord)
            tasks = await opened(stack, kafka, topics.tasks, TaskRecord)
            learner = SimulatedLearner(topics, self.producer, self.stage.config)
            jobs: list[Coroutine[Any, Any, None]] = [
                serve_learner(kafka, topics, learner),
                self._read(weights, self._load),
                self._read(tasks, self._dispatch),
                self._beat(),
            ]
            working = asyncio.gather(*jobs)
            joining = asyncio.ensure_future(self._join_all())
            both: list[asyncio.Future[Any]] = [working, joining]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            joining.result()
            yield
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await working

    async def _join_all(self) -> None:
        for actor in self._actors:
            await actor.loaded()
            await actor.join()
            self._by_id[actor.id] = actor
        for actor in self._actors:
            await actor.assigned.wait()

    async def _read(self, reader: Reader, use: Callable[[Any], Any]) -> None:
        while True:
            for record in await reader.read(0.2):
                await use(record.message)

    async def _load(self, message: Any) -> None:
        for actor in self._actors:
            await actor.load(message.version)

    async def _dispatch(self, message: Any) -> None:
        if isinstance(message, RunEnded):
            sys.exit(f"the run ended: {message.reason} {message.detail}")
        actor = self._by_id.get(message.actor)
        if actor is not None:
            await actor.take(message)
            self._by_id[actor.id] = actor

    async def _beat(self) -> None:
        """Heartbeats, spread evenly over their period."""
        number, begun = 0, time.monotonic()
        while True:
            due = (time.monotonic() - begun) / HEARTBEAT * len(self._actors)
            while number < due:
                actor = self._actors[number % len(self._actors)]
                if actor.id:
                    await actor.beat()
                number += 1
            await asyncio.sleep(SLICE)


async def probed(stage: Stage, seconds: float) -> list[float]:
    """Lags over so many seconds, seen by another process."""
    loop = asyncio.get_running_loop()
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return await loop.run_in_executor(
            pool, probe, stage.config.kafka.model_dump(mode="json"), stage.topics, seconds
        )


def probe(kafka_section: dict[str, Any], topics: Topics, seconds: float) -> list[float]:
    """Append records that are no events, and time how long each takes to be put aside."""
    return asyncio.run(_probe(Kafka(KafkaConfig(**kafka_section), wait=30.0), topics, seconds))


async def _probe(kafka: Kafka, topics: Topics, seconds: float) -> list[float]:
    sent: list[float] = []
    lags: list[float] = []
    async with contextlib.AsyncExitStack() as stack:
        producer = await stack.enter_async_context(producing(kafka))
        dead = await kafka.reader(topics.dead(topics.events))
        stack.push_async_callback(dead.stop)
        await dead.assign(await dead.ends())

        async def send() -> None:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                sent.append(time.monotonic())
                await producer.send_raw(topics.events, PROBE, partition=0)
                await asyncio.sleep(PROBE_SECONDS)

        sending = asyncio.create_task(send())
        while not sending.done() or len(lags) < len(sent):
            records = await dead.read(0.2)
            now = time.monotonic()
            lags.extend(now - begun for begun in sent[len(lags) : len(lags) + len(records)])
        await sending
    return lags


async def opened(
    stack: contextlib.AsyncExitStack, kafka: Kafka, topic: str, kind: Any = AnyMessage
) -> Reader:
    """A reader of everything in `topic`, from its beginning."""
    reader = await kafka.reader(topic, kind)
    stack.push_async_callback(reader.stop)
    await reader.assign(dict.fromkeys(await reader.partitions(), 0))
    return reader


async def numbers(stage: Stage) -> dict[str, float]:
    """What the scheduler serves at /metrics: events by type, their sum, gauges by name."""
    text = await asyncio.to_thread(stage.monitor, "/metrics")
    found = {"events": 0.0, "StepCompleted": 0.0, "Outcome": 0.0, "Heartbeat": 0.0}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "reprise_events_total":
                found[sample.labels["type"]] = sample.value
                found["events"] += sample.value
            elif not sample.labels:
                found[sample.name] = sample.value
    return found


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def quantile(ordered: list[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


if __name__ == "__main__":
    sys.exit(main())
