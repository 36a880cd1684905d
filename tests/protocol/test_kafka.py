"""The clients: no send is forgotten, no offset is taken on trust, an absent broker is named."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from deploy.local.broker import EmbeddedBroker
from protocol.codec import ProtocolError, encode
from protocol.config import Config, KafkaConfig
from protocol.kafka import BrokerError, Kafka, Producer, Reader
from protocol.messages import EventRecord, GroupRef, Heartbeat, Task, Tick
from protocol.topics import Topics, create_or_verify
from protocol.versions import Version
from tests.protocol.examples import TASK


def tick(number: int) -> Tick:
    return Tick(epoch=number, seconds=1.0)


@pytest.fixture
async def events(
    kafka: Kafka, topics: Topics, kafka_section: dict[str, Any]
) -> AsyncIterator[tuple[Producer, Reader]]:
    """A producer, and a reader of the topic `events`, unassigned."""
    config = Config(
        model={"path": "m"}, data={"train": "t"}, actors={"max": 2}, kafka=kafka_section
    )
    admin = await kafka.admin()
    await create_or_verify(admin, topics.specs(config))
    await admin.close()
    producer, reader = await kafka.producer(), await kafka.reader(topics.events, EventRecord)
    yield producer, reader
    await producer.stop()
    await reader.stop()


async def read(reader: Reader, count: int) -> list[Any]:
    records: list[Any] = []
    while len(records) < count:
        records += await reader.read(5.0)
    return records


async def test_records_come_in_the_order_in_which_they_were_sent(
    events: tuple[Producer, Reader], topics: Topics
) -> None:
    producer, reader = events
    for i in range(2000):
        await producer.send(topics.events, tick(i), partition=0)
    await producer.flush()
    assert producer.pending == 0
    assert 0 < (await reader.ends())[0] <= 2000
    await reader.assign({0: 0})
    records = await read(reader, 2000)
    assert [r.message for r in records] == [tick(i) for i in range(2000)]
    assert [r.offset for r in records] == list(range(2000))
    assert reader.behind == 0


async def test_a_record_points_to_itself_with_its_digest(
    events: tuple[Producer, Reader], topics: Topics
) -> None:
    producer, reader = events
    sent = await (await producer.send(topics.events, tick(1), partition=0))
    await reader.assign({0: 0})
    (record,) = await read(reader, 1)
    assert record.ref == GroupRef(0, sent.offset, hashlib.sha256(encode(tick(1))).digest())


async def test_bytes_that_are_no_message_come_as_an_error_with_their_bytes(
    events: tuple[Producer, Reader], topics: Topics
) -> None:
    producer, reader = events
    await producer.send_raw(topics.events, b"\xc1junk", partition=0)
    await producer.send(topics.events, TASK, partition=0)
    await producer.send(topics.events, tick(1), partition=0)
    await reader.assign({0: 0})
    junk, task, good = await read(reader, 3)
    assert isinstance(junk.message, ProtocolError)
    assert junk.raw == b"\xc1junk"
    assert isinstance(task.message, ProtocolError)
    assert "Invalid value 'Task'" in str(task.message)
    assert good.message == tick(1)


async def test_schema_and_release_are_in_the_headers_beside_those_of_a_dead_letter(
    events: tuple[Producer, Reader], topics: Topics, kafka: Kafka
) -> None:
    producer, _ = events
    dead = topics.dead(topics.events)
    await producer.send_raw(dead, b"x", partition=0, headers=[("reason", b"why")])
    await producer.flush()
    reader = await kafka.reader(dead)
    await reader.assign({0: 0})
    message = await reader._consumer.getone()
    assert dict(message.headers)["reason"] == b"why"
    assert dict(message.headers)["schema"] == b"1"
    assert "release" in dict(message.headers)
    await reader.stop()


@pytest.mark.parametrize("offset", [4, 99999])
async def test_an_offset_past_the_end_is_refused(
    events: tuple[Producer, Reader], topics: Topics, offset: int
) -> None:
    producer, reader = events
    for i in range(3):
        await producer.send(topics.events, tick(i), partition=0)
    await producer.flush()
    with pytest.raises(
        BrokerError,
        match=rf"topic {topics.events} partition 0: offset {offset} is wanted and \[0, 3\] is",
    ):
        await reader.assign({0: offset})


async def test_reading_starts_at_any_offset_that_is_there_the_end_included(
    events: tuple[Producer, Reader], topics: Topics
) -> None:
    producer, reader = events
    for i in range(3):
        await producer.send(topics.events, tick(i), partition=0)
    await producer.flush()
    for offset in (2, 3, 0, 1):
        await reader.assign({0: offset})
    await reader.assign({0: 2})
    assert [r.message for r in await read(reader, 1)] == [tick(2)]
    await reader.assign({0: 3})
    await producer.send(topics.events, tick(3), partition=0)
    assert [r.message for r in await read(reader, 1)] == [tick(3)]


async def test_ends_are_where_the_next_record_lies(
    events: tuple[Producer, Reader], topics: Topics
) -> None:
    producer, reader = events
    for i in range(3):
        assert await reader.ends() == {0: i}
        sent = await (await producer.send(topics.events, tick(i), partition=0))
        assert sent.offset == i


async def test_room_waits_for_acknowledgements(
    events: tuple[Producer, Reader], topics: Topics
) -> None:
    producer, _ = events
    for i in range(500):
        await producer.room(10)
        assert producer.pending < 10
        await producer.send(topics.events, tick(i), partition=0)
    await producer.flush()
    assert producer.pending == 0


async def test_a_message_above_the_limit_is_not_sent(
    kafka_section: dict[str, Any], topics: Topics
) -> None:
    small = Kafka(KafkaConfig(**{**kafka_section, "max_message_bytes": 65_536}), wait=10)
    producer = await small.producer()
    task = Task(**{**{f: getattr(TASK, f) for f in TASK.__struct_fields__}, "prompt": "x" * 70_000})
    with pytest.raises(ProtocolError, match="above the limit of 65536"):
        await producer.send(topics.tasks, task, partition=0)
    await producer.stop()


async def test_the_largest_message_passes_producer_broker_and_consumer(
    events: tuple[Producer, Reader], topics: Topics, kafka: Kafka
) -> None:
    """Sizes are raised together: what encode allows, a reader gets back."""
    producer, _ = events
    limit = kafka.config.max_message_bytes
    raw = b"\x00" * limit
    await (await producer.send_raw(topics.groups, raw, partition=0))
    reader = await kafka.reader(topics.groups)
    await reader.assign({0: 0})
    (record,) = await read(reader, 1)
    assert len(record.raw) == limit
    await reader.stop()


async def test_a_broker_that_is_not_there_is_named_within_the_wait() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        kafka = Kafka(KafkaConfig(bootstrap_servers=address), wait=1.0)
        start = asyncio.get_running_loop().time()
        with pytest.raises(BrokerError, match=f"{address}: not reachable within 1 s .*correct kaf"):
            await kafka.producer()
        assert asyncio.get_running_loop().time() - start < 5


async def test_a_topic_that_is_not_there_is_named(kafka_section: dict[str, Any]) -> None:
    kafka = Kafka(KafkaConfig(**kafka_section), wait=0.5)
    reader = await kafka.reader("reprise.none.1.events")
    with pytest.raises(BrokerError, match=r"topic reprise.none.1.events: does not exist after 0.5"):
        await reader.partitions()
    await reader.stop()


async def test_a_broker_that_goes_away_fails_the_producer(tmp_path: Path) -> None:
    """Nothing is fire-and-forget: the lost send fails `failure`, flush and the next send."""
    with EmbeddedBroker(tmp_path / "broker.log") as broker:
        section = {"bootstrap_servers": broker.bootstrap_servers, "idempotence": False}
        config = Config(model={"path": "m"}, data={"train": "t"}, kafka=section)
        config = config.model_copy(
            update={"kafka": config.kafka.model_copy(update={"replication_factor": 1})}
        )
        topics = Topics("gone", 1)
        kafka = Kafka(config.kafka, wait=2.0)
        admin = await kafka.admin()
        await create_or_verify(admin, topics.specs(config))
        await admin.close()
        producer = await kafka.producer()
        await (await producer.send(topics.events, tick(0), partition=0))
        broker.stop()
        await producer.send(topics.events, tick(1), partition=0)
        with pytest.raises(BrokerError, match="not acknowledged"):
            await producer.flush()
        with pytest.raises(BrokerError):
            await producer.failure
        beat = Heartbeat(actor="a", state="idle", version=Version(0, 0))
        with pytest.raises(BrokerError):
            await producer.send(topics.events, beat, partition=0)
        await producer.stop()


def test_a_client_needs_the_brokers_address() -> None:
    with pytest.raises(ValueError, match="the launcher puts in the broker's address"):
        Kafka(KafkaConfig(), wait=1.0)
