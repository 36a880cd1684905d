"""Topics on a real broker: made or verified by one function, and empty when a run starts."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from protocol.config import Config
from protocol.kafka import OVERHEAD_BYTES, Kafka
from protocol.messages import Tick
from protocol.topics import TopicError, Topics, TopicSpec, create_or_verify, require_empty

ACTORS = 5


@pytest.fixture
def specs(topics: Topics, kafka_section: dict[str, Any]) -> list[TopicSpec]:
    config = Config(
        model={"path": "m"}, data={"train": "t"}, actors={"max": ACTORS}, kafka=kafka_section
    )
    return topics.specs(config)


@pytest.fixture
async def admin(kafka: Kafka) -> AsyncIterator[AIOKafkaAdminClient]:
    client = await kafka.admin()
    yield client
    await client.close()


def test_names_carry_run_and_incarnation() -> None:
    topics = Topics("quickstart-7", 3)
    assert topics.tasks == "reprise.quickstart-7.3.tasks"
    assert topics.dead(topics.events) == "reprise.quickstart-7.3.events.dead"
    assert Topics("quickstart-7", 4).tasks != topics.tasks


def test_sizes_are_those_of_the_clients(kafka_section: dict[str, Any], topics: Topics) -> None:
    config = Config(
        model={"path": "m"},
        data={"train": "t"},
        kafka={**kafka_section, "max_message_bytes": 2**20, "group_partitions": 3},
        actors={"max": 9},
    )
    by_name = {spec.name: spec for spec in topics.specs(config)}
    assert by_name[topics.tasks].partitions == 10
    assert by_name[topics.groups].partitions == 3
    assert by_name[topics.events].partitions == 1
    assert by_name[topics.batches].partitions == by_name[topics.weights].partitions == 1
    assert {spec.settings["max.message.bytes"] for spec in by_name.values()} == {
        str(2**20 + OVERHEAD_BYTES)
    }


async def test_created_once_then_verified(
    kafka: Kafka, admin: AIOKafkaAdminClient, specs: list[TopicSpec], topics: Topics
) -> None:
    await create_or_verify(admin, specs)
    await create_or_verify(admin, specs)
    reader = await kafka.reader(topics.tasks)
    assert await reader.partitions() == list(range(ACTORS + 1))
    await reader.stop()


async def test_what_is_missing_is_added(admin: AIOKafkaAdminClient, specs: list[TopicSpec]) -> None:
    await create_or_verify(admin, specs[:2])
    await create_or_verify(admin, specs)
    assert {s.name for s in specs} <= set(await admin.list_topics())


async def test_other_partitions_are_an_error(
    admin: AIOKafkaAdminClient, specs: list[TopicSpec]
) -> None:
    await create_or_verify(admin, specs)
    other = dataclasses.replace(specs[0], partitions=ACTORS + 2)
    with pytest.raises(
        TopicError,
        match=rf"topic {specs[0].name}: has {ACTORS + 1} partitions, {ACTORS + 2} expected; delete",
    ):
        await create_or_verify(admin, [other])


async def test_another_size_limit_is_an_error(
    admin: AIOKafkaAdminClient, specs: list[TopicSpec]
) -> None:
    await create_or_verify(admin, specs)
    settings = {**specs[1].settings, "max.message.bytes": "7777777"}
    with pytest.raises(
        TopicError, match=rf"topic {specs[1].name}: max.message.bytes is \d+, 7777777 expected"
    ):
        await create_or_verify(admin, [dataclasses.replace(specs[1], settings=settings)])


async def test_a_used_topic_is_refused_at_the_start_of_a_run(
    kafka: Kafka, admin: AIOKafkaAdminClient, specs: list[TopicSpec], topics: Topics
) -> None:
    await create_or_verify(admin, specs)
    consumer = await kafka.consumer()
    await require_empty(consumer, specs)
    producer = await kafka.producer()
    await producer.send(topics.events, Tick(epoch=1, seconds=1.0), partition=0)
    await producer.flush()
    with pytest.raises(TopicError, match=rf"topic {topics.events}: holds records .*\{{0: 1\}}"):
        await require_empty(consumer, specs)
    await producer.stop()
    await consumer.stop()


async def test_the_next_incarnation_is_empty_again(
    kafka: Kafka, admin: AIOKafkaAdminClient, specs: list[TopicSpec], topics: Topics
) -> None:
    await create_or_verify(admin, specs)
    producer = await kafka.producer()
    await producer.send(topics.events, Tick(epoch=1, seconds=1.0), partition=0)
    await producer.flush()
    following = Topics(topics.run, topics.incarnation + 1)
    renamed = [
        dataclasses.replace(s, name=s.name.replace(f".{topics.incarnation}.", ".2.")) for s in specs
    ]
    assert following.events in {s.name for s in renamed}
    await create_or_verify(admin, renamed)
    consumer = await kafka.consumer()
    await require_empty(consumer, renamed)
    await producer.stop()
    await consumer.stop()
