"""The rest of a run as one actor sees it: broker, learner and scheduler in the test's hand."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from protocol.codec import decode
from protocol.config import Config, dump_config, load_config
from protocol.kafka import Kafka
from protocol.messages import (
    Assigned,
    EventRecord,
    GroupRecord,
    Joined,
    Message,
    RewardGroup,
    Task,
    WeightsPublished,
)
from protocol.rundir import RunDir, RunIdentity
from protocol.topics import Topics, create_or_verify
from protocol.versions import Version

M = TypeVar("M", bound=Message)
WAIT = 30.0
FAST = {"heartbeat": 0.1, "lease": 5.0, "grace": 5.0, "kafka": 10.0}


class World:
    """Sends what others send, and keeps every event of the actor in order."""

    def __init__(self, kafka: Kafka, topics: Topics, run: RunDir, config: Config) -> None:
        self.kafka = kafka
        self.topics = topics
        self.run = run
        self.config = config
        self.events: list[Any] = []
        self._numbers = 0

    async def start(self) -> None:
        admin = await self.kafka.admin()
        await create_or_verify(admin, self.topics.specs(self.config))
        await admin.close()
        self.producer = await self.kafka.producer()
        self._reader = await self.kafka.reader(self.topics.events, EventRecord)
        await self._reader.assign({0: 0})
        self.groups = await self.kafka.reader(self.topics.groups, GroupRecord)
        await self.groups.assign(dict.fromkeys(await self.groups.partitions(), 0))

    async def stop(self) -> None:
        await self._reader.stop()
        await self.groups.stop()
        await self.producer.stop()

    async def publish(self, version: Version, content: bytes = b"weights", **fields: Any) -> Path:
        """Write and announce weights, as the learner does."""
        directory = self.run.weights / str(version)
        directory.mkdir(exist_ok=True)
        (directory / "model.safetensors").write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        message = {
            "version": version,
            "path": str(version),
            "files": {"model.safetensors": digest},
            "bytes": len(content),
            **fields,
        }
        await (await self.producer.send(self.topics.weights, WeightsPublished(**message)))
        return directory

    async def control(self, message: Message) -> None:
        await (await self.producer.send(self.topics.tasks, message, partition=0))

    async def assign(self, joined: Joined, partition: int = 1) -> None:
        await self.control(Assigned(actor=joined.actor, partition=partition))

    async def task(self, actor: str, version: Version, partition: int = 1, **fields: Any) -> Task:
        """Send a task; its fields are a training task's where not given."""
        self._numbers += 1
        task = Task(
            **{
                "id": f"{version.generation}-{self._numbers}",
                "attempt": 1,
                "actor": actor,
                "problem": f"p{self._numbers}",
                "purpose": "train",
                "reason": "unseen",
                "version": version,
                "group_size": 4,
                "temperature": 1.0,
                "max_tokens": 16,
                "seed": self._numbers,
                "prompt": "what?",
                "answer": "right",
                "send": "all",
                **fields,
            }
        )
        await (await self.producer.send(self.topics.tasks, task, partition=partition))
        return task

    async def next(self, kind: type[M], where: Callable[[M], bool] = lambda _: True) -> M:
        """The first event of this kind that fits and was not returned before."""
        deadline = asyncio.get_running_loop().time() + WAIT
        while True:
            for index, event in enumerate(self.events):
                if isinstance(event, kind) and where(event):
                    del self.events[index]
                    return event
            if asyncio.get_running_loop().time() > deadline:
                raise AssertionError(f"no {kind.__name__} came; there are {self.events}")
            await self.read()

    async def read(self) -> None:
        """Take in what is there or comes within a moment."""
        self.events += [record.message for record in await self._reader.read(0.1)]

    async def group(self) -> tuple[RewardGroup, bytes]:
        """The next group on `groups`, with its record's bytes."""
        deadline = asyncio.get_running_loop().time() + WAIT
        while asyncio.get_running_loop().time() < deadline:
            for record in await self.groups.read(0.1, max_records=1):
                return decode(record.raw, RewardGroup), record.raw
        raise AssertionError("no group came")


@asynccontextmanager
async def world(
    kafka: Kafka, topics: Topics, directory: Path, *, kafka_section: dict[str, Any], **sections: Any
) -> AsyncIterator[World]:
    """A run directory, its topics, and clients; `sections` of the config."""
    run = RunDir(directory / "run")
    run.create(RunIdentity(topics.run, topics.incarnation))
    raw = {
        "model": {"path": "m"},
        "data": {"train": "t"},
        **sections,
        "kafka": {**kafka_section, "group_partitions": 1},
        "actors": {"slots": 2, "max": 3, **sections.get("actors", {})},
        "waits": {**FAST, **sections.get("waits", {})},
    }
    dump_config(Config(**raw), run.config)
    made = World(kafka, topics, run, load_config(run.config))
    await made.start()
    try:
        yield made
    finally:
        await made.stop()
