"""Kafka clients of every process, with all their settings in one place.

Invariants: no send is fire-and-forget: each returns a future, and the first that fails also fails
`Producer.failure`, which every service waits on. A reader is assigned by hand and never joins a
group; it seeks only to an offset that the partition holds (a seek past the end is silent on some
brokers). Sizes are the same for producer, consumer and topic.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from aiokafka.helpers import create_ssl_context
from aiokafka.structs import RecordMetadata

from protocol import __version__
from protocol.codec import SCHEMA, ProtocolError, decode, encode
from protocol.config import FETCH_WAIT, KafkaConfig
from protocol.messages import AnyMessage, GroupRef, Message

log = logging.getLogger(__name__)

HEADERS = [("schema", str(SCHEMA).encode()), ("release", __version__.encode())]
# Room for keys, headers and framing around the largest value.
OVERHEAD_BYTES = 16 * 1024
STOP_SECONDS = 10.0


class BrokerError(Exception):
    """The broker cannot be used. Names its address, what was tried and for how long."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a topic: `message` is a ProtocolError where the bytes are no message."""

    topic: str
    partition: int
    offset: int
    message: Any
    raw: bytes

    @property
    def ref(self) -> GroupRef:
        """Pointer to this record, with the digest of its value."""
        return GroupRef(self.partition, self.offset, hashlib.sha256(self.raw).digest())


class Kafka:
    """Makes the clients of one process."""

    def __init__(self, config: KafkaConfig, *, wait: float, client_id: str = "reprise") -> None:
        """`wait` is how long a start or a request may take before it is an error, in seconds."""
        if config.embedded:
            raise ValueError("kafka.bootstrap_servers: the launcher puts in the broker's address")
        self.config = config
        self.wait = wait
        self.client_id = client_id

    def _common(self) -> dict[str, Any]:
        config = self.config
        common: dict[str, Any] = {
            "bootstrap_servers": config.bootstrap_servers,
            "client_id": self.client_id,
            "security_protocol": config.security_protocol,
            "request_timeout_ms": int(min(self.wait, 40.0) * 1000),
        }
        if config.security_protocol in ("SSL", "SASL_SSL"):
            common["ssl_context"] = create_ssl_context(
                cafile=_text(config.ssl_cafile),
                certfile=_text(config.ssl_certfile),
                keyfile=_text(config.ssl_keyfile),
            )
        if config.sasl_mechanism is not None:
            password = config.sasl_password
            common |= {
                "sasl_mechanism": config.sasl_mechanism,
                "sasl_plain_username": config.sasl_username,
                "sasl_plain_password": None if password is None else password.get_secret_value(),
            }
        return common

    async def admin(self) -> AIOKafkaAdminClient:
        """A started admin client; close it."""
        return await self._started(lambda: AIOKafkaAdminClient(**self._common()), "close")

    async def producer(self) -> Producer:
        """A started producer."""
        config = self.config
        client = await self._started(
            lambda: AIOKafkaProducer(
                **self._common(),
                acks="all",
                enable_idempotence=config.idempotence is not False,
                compression_type=None if config.compression == "none" else config.compression,
                max_request_size=config.max_message_bytes + OVERHEAD_BYTES,
                linger_ms=0,
            ),
            "stop",
        )
        return Producer(client, config.max_message_bytes)

    async def consumer(self, *, group_id: str | None = None) -> AIOKafkaConsumer:
        """A started, unassigned consumer. `group_id` only lets it commit, for lag to be watched."""
        size = self.config.max_message_bytes + OVERHEAD_BYTES
        return await self._started(
            lambda: AIOKafkaConsumer(
                **self._common(),
                group_id=group_id,
                enable_auto_commit=False,
                auto_offset_reset="none",
                max_partition_fetch_bytes=size,
                fetch_max_bytes=max(size, 52_428_800),
                fetch_max_wait_ms=int(1000 * (self.config.fetch_wait or FETCH_WAIT)),
            ),
            "stop",
        )

    async def reader(
        self, topic: str, kind: Any = AnyMessage, *, group_id: str | None = None
    ) -> Reader:
        """A reader of all of `topic`'s partitions; assign it before reading."""
        consumer = await self.consumer(group_id=group_id)
        return Reader(consumer, topic, kind, self.config.max_message_bytes, self.wait)

    async def _started(self, make: Callable[[], Any], stop: str) -> Any:
        """Start a client, again and again with growing pauses until `wait` is over."""
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + self.wait, 0.1
        while True:
            client = make()
            try:
                await asyncio.wait_for(client.start(), max(0.1, deadline - loop.time()))
                return client
            except (KafkaError, OSError, TimeoutError) as error:
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(getattr(client, stop)(), STOP_SECONDS)
                if loop.time() + pause > deadline:
                    raise BrokerError(
                        f"Kafka broker {self.config.bootstrap_servers}: not reachable within "
                        f"{self.wait:g} s ({type(error).__name__}: {error}); start it, or correct "
                        "kafka.bootstrap_servers"
                    ) from None
                log.warning("waiting for the Kafka broker %s", self.config.bootstrap_servers)
            await asyncio.sleep(pause)
            pause = min(2 * pause, 5.0)


class Producer:
    """Encodes and sends messages; in order per partition; sends without waiting for acks."""

    def __init__(self, client: AIOKafkaProducer, max_bytes: int) -> None:
        self._client = client
        self._max_bytes = max_bytes
        self._pending: set[asyncio.Future[RecordMetadata]] = set()
        self._acknowledged = asyncio.Event()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with the first send that failed. Wait on it beside the service's own work."""

    async def send(
        self, topic: str, message: Message, *, partition: int | None = None
    ) -> asyncio.Future[RecordMetadata]:
        """Queue `message`; the future is its acknowledgement. Waits only for room in the buffer.

        Raises ProtocolError if the message is above the size limit.
        """
        return await self.send_raw(
            topic, encode(message, max_bytes=self._max_bytes), partition=partition
        )

    async def send_raw(
        self,
        topic: str,
        raw: bytes,
        *,
        partition: int | None = None,
        headers: Iterable[tuple[str, bytes]] = (),
    ) -> asyncio.Future[RecordMetadata]:
        """Queue bytes that are encoded already, or that are no message (dead letters)."""
        if self.failure.done():
            self.failure.result()
        with _naming(topic, "a record cannot be sent"):
            future: asyncio.Future[RecordMetadata] = await self._client.send(
                topic, raw, partition=partition, headers=[*HEADERS, *headers]
            )
        self._pending.add(future)
        future.add_done_callback(self._sent)
        return future

    def _sent(self, future: asyncio.Future[RecordMetadata]) -> None:
        self._pending.discard(future)
        self._acknowledged.set()
        if not future.cancelled() and (error := future.exception()) and not self.failure.done():
            self.failure.set_exception(
                BrokerError(f"a record was not acknowledged: {type(error).__name__}: {error}")
            )
            self.failure.exception()  # marks it as seen; send and flush raise it again

    @property
    def pending(self) -> int:
        """Records sent and not acknowledged yet."""
        return len(self._pending)

    async def room(self, most: int) -> None:
        """Wait until fewer than `most` records are unacknowledged. Raises BrokerError."""
        while len(self._pending) >= most:
            self._acknowledged.clear()
            await self._acknowledged.wait()
        if self.failure.done():
            self.failure.result()

    async def flush(self) -> None:
        """Wait until everything sent so far is acknowledged. Raises BrokerError if one was not."""
        while self._pending:
            await asyncio.wait(set(self._pending))
        if self.failure.done():
            self.failure.result()

    async def stop(self) -> None:
        """Stop the client; what is queued is sent first, within a bound."""
        await _stop(self._client.stop())


class Reader:
    """Reads one topic from offsets that its owner names."""

    def __init__(
        self, consumer: AIOKafkaConsumer, topic: str, kind: Any, max_bytes: int, wait: float
    ) -> None:
        self._consumer = consumer
        self.topic = topic
        self._kind = kind
        self._max_bytes = max_bytes
        self._wait = wait
        self._positions: dict[int, int] = {}

    async def partitions(self) -> list[int]:
        """All partitions of the topic. Raises BrokerError if the topic does not appear in time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait
        while True:
            await self._consumer._client.force_metadata_update()
            found = self._consumer._client.cluster.partitions_for_topic(self.topic)
            if found:
                return sorted(found)
            if loop.time() > deadline:
                raise BrokerError(f"topic {self.topic}: does not exist after {self._wait:g} s")
            await asyncio.sleep(0.1)

    async def ends(self, partitions: Iterable[int] | None = None) -> dict[int, int]:
        """End offset of each partition: where the next record will lie, or somewhat before.

        Tansu reports the first record of the last batch + 1, so that what is read from there on may
        hold records that were there already.
        """
        chosen = await self.partitions() if partitions is None else list(partitions)
        with _naming(self.topic, "its end cannot be read"):
            ends = await self._consumer.end_offsets([self._at(p) for p in chosen])
        return {tp.partition: end for tp, end in ends.items()}

    async def assign(self, offsets: dict[int, int]) -> None:
        """Read from `offsets`, by partition, and no other partition.

        Raises BrokerError if an offset does not lie between the partition's first and its end.
        """
        tps = [self._at(p) for p in offsets]
        with _naming(self.topic, "its first and end offsets cannot be read"):
            first = await self._consumer.beginning_offsets(tps)
            end = await self._consumer.end_offsets(tps)
        for tp in tps:
            wanted = offsets[tp.partition]
            if wanted > end[tp] > first[tp]:
                end[tp] = await self._end_of_last_batch(tp, end[tp])
            if not first[tp] <= wanted <= end[tp]:
                raise BrokerError(
                    f"topic {self.topic} partition {tp.partition}: offset {wanted} is wanted and "
                    f"[{first[tp]}, {end[tp]}] is there; the topic was deleted or truncated"
                )
        self._consumer.assign(tps)
        self._positions = dict(offsets)
        for tp in tps:
            self._consumer.seek(tp, offsets[tp.partition])

    async def _end_of_last_batch(self, tp: TopicPartition, reported: int) -> int:
        """The end by reading what lies at `reported` - 1; see `ends`."""
        self._consumer.assign([tp])
        self._consumer.seek(tp, reported - 1)
        with _naming(self.topic, "its last records cannot be read"):
            batches = await self._consumer.getmany(timeout_ms=int(self._wait * 1000))
        return max(reported, *(int(r.offset) + 1 for r in batches.get(tp, [])), 0)

    async def read(self, timeout: float, max_records: int | None = None) -> list[Record]:
        """Records that are there, or that come within `timeout` seconds; in order per partition."""
        with _naming(self.topic, "it cannot be read"):
            batches = await self._consumer.getmany(
                timeout_ms=int(timeout * 1000), max_records=max_records
            )
        for tp, records in batches.items():
            self._positions[tp.partition] = records[-1].offset + 1
        return [self._record(record) for records in batches.values() for record in records]

    @property
    def behind(self) -> int:
        """Records of the assigned partitions that are not read yet, as of the last answer."""
        behind = 0
        for tp in self._consumer.assignment():
            end, next_offset = self._consumer.highwater(tp), self._positions[tp.partition]
            behind += 0 if end is None else max(0, end - next_offset)
        return behind

    async def commit(self, offsets: dict[int, int]) -> None:
        """Publish how far this reader is, so that its lag can be watched. Nothing depends on it."""
        with contextlib.suppress(KafkaError):
            await self._consumer.commit({self._at(p): offset for p, offset in offsets.items()})

    async def stop(self) -> None:
        """Stop the client, within a bound."""
        await _stop(self._consumer.stop())
        # Where the broker is away the line above may end early; this one may run twice.
        await _stop(self._consumer._client.close())

    def _at(self, partition: int) -> TopicPartition:
        return TopicPartition(self.topic, partition)

    def _record(self, record: Any) -> Record:
        raw = record.value or b""
        try:
            message: Any = decode(raw, self._kind, max_bytes=self._max_bytes)
        except ProtocolError as error:
            message = error
        return Record(record.topic, record.partition, record.offset, message, raw)


@contextlib.contextmanager
def _naming(topic: str, what: str) -> Iterator[None]:
    """Raise a client's error as a BrokerError that names the topic."""
    try:
        yield
    except KafkaError as error:
        raise BrokerError(f"topic {topic}: {what} ({type(error).__name__}: {error})") from None


async def _stop(stopping: Awaitable[None]) -> None:
    try:
        await asyncio.wait_for(stopping, STOP_SECONDS)
    except asyncio.CancelledError:
        # A fetch that a consumer cancels on its way out comes back as if we were cancelled.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
    except (KafkaError, OSError, TimeoutError) as error:
        log.warning("a Kafka client did not stop cleanly: %r", error)


def _text(path: Any) -> str | None:
    return None if path is None else str(path)
