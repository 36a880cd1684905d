"""Rank 0's Kafka side: released batches and their groups in, the learner's word out.

Invariants: it runs on a thread and loop of its own and trains nothing; both topics are read by
manual assignment from the ends noted at the start, so nothing of an earlier learner is met; what
the learner says is acknowledged before it goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from learner.groups import GroupBuffer
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
    StepCompleted,
    StopRequested,
    WeightsPublished,
)
from protocol.topics import Topics
from protocol.versions import Version

log = logging.getLogger(__name__)

# A read that finds nothing lasts this long; nothing depends on it but how soon a reader can stop.
POLL_SECONDS = 1.0


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
    """Every method is a coroutine of the Kafka thread's loop."""

    def __init__(self, kafka: Kafka, topics: Topics, config: Config, generation: int) -> None:
        """`generation`: this learner's; batches of a lower one are ignored."""
        run = config.run
        self._kafka = kafka
        self._topics = topics
        self._wait = config.waits
        # Open groups of L + 1 steps with their replacements, and once more for second attempts.
        capacity = 2 * (run.max_lag + 1) * (run.prompts_per_step + config.max_refill)
        self.groups = GroupBuffer(generation, run.max_lag, capacity, config.kafka.max_message_bytes)
        self.dead_letters = 0
        """Records of `groups` that are no message."""
        self._batches: list[BatchReleased] = []
        self._ended: RunEnded | None = None
        self._failure: Exception | None = None
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._readers: list[Reader] = []
        self._producer: Producer | None = None

    async def start(self) -> None:
        """Start the clients; read `groups` from its end as of now, and `batches` whole.

        Batches of older versions are ignored, and an end of the run that came early is seen.
        """
        self._producer = await self._kafka.producer()
        for topic, kind, take, whole in (
            (self._topics.groups, RewardGroup, self._take_group, False),
            (self._topics.batches, BatchRecord, self._take_batch, True),
        ):
            reader = await self._kafka.reader(topic, kind)
            self._readers.append(reader)
            ends = await reader.ends()
            await reader.assign(dict.fromkeys(ends, 0) if whole else ends)
            self._tasks.append(asyncio.create_task(self._guarded(self._read(reader, take))))

    async def stop(self) -> None:
        """Stop the clients; what was sent goes out first, within a bound."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for reader in self._readers:
            await reader.stop()
        if self._producer is not None:
            await self._producer.stop()

    async def publish(self, message: WeightsPublished) -> None:
        """Send on `weights` and wait for the acknowledgement, at most `waits.kafka`."""
        await self._send(self._topics.weights, message)

    async def tell(self, message: LearnerReady | StepCompleted | StopRequested) -> None:
        """Send on `events` and wait for the acknowledgement, at most `waits.kafka`."""
        await self._send(self._topics.events, message)

    async def next(self, version: Version, wait: float) -> BatchReleased | RunEnded | None:
        """The batch of `version`, or the end of the run, or None after `wait` seconds.

        Raises LearnerError: the batch is of a newer learner or of a later step, or cannot be read.
        """
        self.groups.advance(version.step)
        await self._until(lambda: bool(self._batches or self._ended), wait)
        while self._batches:
            batch = self._batches.pop(0)
            if batch.version == version:
                return batch
            if batch.version > version:
                newer = batch.version.generation > version.generation
                raise LearnerError(
                    f"topic {self._topics.batches}: found the batch of version {batch.version}, "
                    f"expected {version}; "
                    + ("a newer learner has taken over" if newer else "a batch in between is lost")
                )
            log.warning("ignored a late batch of version %s; %s is due", batch.version, version)
        return self._ended

    async def end(self, wait: float) -> RunEnded | None:
        """The end of the run, or None after `wait` seconds; batches are dropped meanwhile."""
        await self._until(lambda: self._ended is not None, wait)
        return self._ended

    async def collect(self, batch: BatchReleased) -> Collected:
        """The groups of `batch`, waiting for all of them at most `waits.group`."""

        def there() -> bool:
            return all(self.groups.knows(group.ref) for group in batch.groups)

        await self._until(there, self._wait.group)
        collected = Collected()
        for group in batch.groups:
            missing = (
                f"not found within {self._wait.group:g} s (waits.group) at partition "
                f"{group.ref.partition} offset {group.ref.offset} of topic {self._topics.groups}"
            )
            taken = self.groups.take(group, batch.version, missing)
            if isinstance(taken, GroupEnd):
                log.warning("group %s: %s: %s", group.id, taken.end, taken.why)
                collected.refused.append(taken)
            else:
                collected.admitted.append(group)
                collected.raw.append(taken)
        return collected

    async def _send(self, topic: str, message: Message) -> None:
        assert self._producer is not None
        partition = 0
        name = type(message).__name__
        try:
            async with asyncio.timeout(self._wait.kafka):
                await (await self._producer.send(topic, message, partition=partition))
        except TimeoutError:
            raise BrokerError(
                f"topic {topic}: {name} was not acknowledged within {self._wait.kafka:g} s "
                "(waits.kafka)"
            ) from None

    async def _until(self, condition: Callable[[], bool], wait: float) -> None:
        """Return when `condition` holds or `wait` seconds are over. Raises what ended a reader."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait):
                while not condition() and self._failure is None:
                    self._changed.clear()
                    await self._changed.wait()
        if self._failure is not None:
            raise self._failure

    async def _read(
        self, reader: Reader, take: Callable[[Record], Coroutine[Any, Any, None]]
    ) -> None:
        while True:
            for record in await reader.read(POLL_SECONDS):
                await take(record)
            self._changed.set()

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """A reader that ends takes the learner with it, at its next wait."""
        try:
            await work
        except Exception as error:
            self._failure = error
            self._changed.set()

    async def _take_group(self, record: Record) -> None:
        self.groups.add((record.partition, record.offset), record.raw, record.message)
        if isinstance(record.message, ProtocolError):
            self.dead_letters += 1
            log.error(
                "topic %s partition %d offset %d: %s",
                record.topic,
                record.partition,
                record.offset,
                record.message,
            )
            assert self._producer is not None
            headers = {
                "reason": record.message,
                "partition": record.partition,
                "offset": record.offset,
            }
            await self._producer.send_raw(
                self._topics.dead(record.topic),
                record.raw,
                partition=0,
                headers=[(name, str(value).encode()[:4096]) for name, value in headers.items()],
            )

    async def _take_batch(self, record: Record) -> None:
        message = record.message
        if isinstance(message, ProtocolError):
            raise LearnerError(
                f"topic {record.topic} offset {record.offset}: not a batch: {message}; scheduler "
                "and learner are of releases that do not fit"
            )
        if isinstance(message, RunEnded):
            self._ended = message
        elif isinstance(message, BatchReleased):
            self._batches.append(message)
