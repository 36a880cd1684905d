"""Rank 0's Kafka side: released batches and the groups that they name.

Invariants: it runs on a thread and loop of its own and does no training; both topics are read from
the ends noted at the start, so nothing of an earlier learner is seen; a group is kept only while it
could still be trained, so the buffer is bounded; nothing is handed out that is not the very content
that the scheduler's outcome named, or that the on-policy rule refuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from protocol.codec import ProtocolError
from protocol.config import Config
from protocol.kafka import BrokerError, Kafka, Producer, Reader, Record
from protocol.messages import (
    BatchGroup,
    BatchRecord,
    BatchReleased,
    GroupEnd,
    LearnerReady,
    Message,
    RewardGroup,
    RunEnded,
    SnapshotWritten,
    StepCompleted,
    StopRequested,
    WeightsPublished,
)
from protocol.topics import Topics
from protocol.versions import Verdict, Version, judge

log = logging.getLogger(__name__)

# Longest pause of a reader without a record; it bounds nothing but how soon a reader can end.
POLL_SECONDS = 0.5
REMEMBERED = 10_000

Place = tuple[int, int]
"""Partition and offset on `groups`."""


class LearnerError(Exception):
    """The learner cannot go on. Names the topic, what was found and what was expected."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What became of a released batch's groups.

    Attributes:
        admitted: the groups to train, in the batch's order.
        raw: their records' bytes.
        refused: the end of every other group.
    """

    admitted: list[BatchGroup] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    refused: list[GroupEnd] = field(default_factory=list)


class Inbox:
    """Reads `groups` and `batches`, and sends what the learner has to say.

    Every method is a coroutine of the Kafka thread's loop.
    """

    def __init__(self, kafka: Kafka, topics: Topics, config: Config) -> None:
        self._kafka = kafka
        self._topics = topics
        self._config = config
        self._generation = -1
        self._step = 0
        self._kept: OrderedDict[Place, bytes] = OrderedDict()
        self._dropped: OrderedDict[Place, tuple[str, str]] = OrderedDict()
        self._oldest: dict[Place, int] = {}
        self._queue: list[BatchReleased] = []
        self._ended: RunEnded | None = None
        self._failure: BaseException | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._readers: list[Reader] = []
        self._producer: Producer | None = None
        self._changed = asyncio.Condition()
        self.dead_letters = 0
        """Records of `groups` that were no message."""

    @property
    def capacity(self) -> int:
        """Most groups kept: twice what L + 1 steps may issue, for second attempts and surplus."""
        run = self._config.run
        return 2 * (run.max_lag + 1) * (run.prompts_per_step + self._config.max_refill)

    @property
    def kept(self) -> int:
        """Groups kept now."""
        return len(self._kept)

    async def start(self, generation: int) -> None:
        """Start the clients, note the ends of both topics and read on from there."""
        self._generation = generation
        self._producer = await self._kafka.producer()
        groups = await self._kafka.reader(self._topics.groups, RewardGroup)
        self._readers.append(groups)
        batches = await self._kafka.reader(self._topics.batches, BatchRecord)
        self._readers.append(batches)
        for reader in (groups, batches):
            await reader.assign(await reader.ends())
        self._tasks = [
            asyncio.create_task(self._guard(self._read(groups, self._take_group))),
            asyncio.create_task(self._guard(self._read(batches, self._take_batch))),
        ]

    async def stop(self) -> None:
        """Stop the clients; what was sent is flushed first."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._producer is not None:
            with contextlib.suppress(BrokerError):
                await self._producer.flush()
            await self._producer.stop()
        for reader in self._readers:
            await reader.stop()

    async def publish(self, message: WeightsPublished) -> None:
        """Send on `weights` and wait for the acknowledgement."""
        await self._acknowledged(self._topics.weights, message)

    async def tell(self, message: LearnerReady | StepCompleted | StopRequested) -> None:
        """Send on `events` and wait for the acknowledgement."""
        await self._acknowledged(self._topics.events, message)

    async def next(self, version: Version, wait: float) -> BatchReleased | RunEnded | None:
        """The batch of `version`, the end of the run, or None after `wait` seconds.

        Raises LearnerError: the record is of a newer learner or of another step, or a reader ended.
        """
        self._advance(version)

        def found() -> bool:
            return bool(self._queue or self._ended)

        await self._until(found, wait)
        while self._queue:
            batch = self._queue.pop(0)
            if batch.version == version:
                return batch
            if batch.version > version:
                raise LearnerError(
                    f"topic {self._topics.batches}: batch {batch.version} was released and this "
                    f"learner waits for {version}; "
                    + (
                        "a newer learner has taken over, so this one stops"
                        if batch.version.generation > version.generation
                        else "a batch in between was lost"
                    )
                )
            log.warning("batch %s came late and is ignored; %s is due", batch.version, version)
        return self._ended

    async def collect(self, batch: BatchReleased) -> Collected:
        """The groups of `batch`, waiting for each at most `waits.group`, and why not the others."""
        wait = self._config.waits.group
        places = [(g.ref.partition, g.ref.offset) for g in batch.groups]

        def there() -> bool:
            return all(p in self._kept or p in self._dropped for p in places)

        await self._until(there, wait)
        collected = Collected()
        for group, place in zip(batch.groups, places, strict=True):
            raw = self._kept.get(place)
            end = self._refusal(group, batch.version, raw, place)
            if end is None and raw is not None:
                collected.admitted.append(group)
                collected.raw.append(raw)
            elif end is not None:
                collected.refused.append(GroupEnd(group.task, group.attempt, *end))
        for place in places:
            self._forget(place)
        return collected

    def _refusal(
        self, group: BatchGroup, version: Version, raw: bytes | None, place: Place
    ) -> tuple[str, str] | None:
        """The end and reason of a group that may not be trained, or None."""
        where = f"topic {self._topics.groups} partition {place[0]} offset {place[1]}"
        if raw is None:
            return self._dropped.get(place) or (
                "failed",
                f"not found within {self._config.waits.group:g} s (waits.group): {where}",
            )
        message = self._kafka_decode(raw)
        if hashlib.sha256(raw).digest() != group.ref.digest or message.id != group.id:
            return (
                "failed",
                f"{where} has other content than its outcome says "
                f"(group {message.id}, {group.id} expected)",
            )
        verdict = _verdict(message, version, self._config.run.max_lag)
        return None if verdict is Verdict.ADMISSIBLE else (verdict.end, verdict.value)
