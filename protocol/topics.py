"""The topics of one incarnation of a run: their names, partitions and settings.

Invariant: a new run and every resume take the next incarnation and so start on topics that hold no
record; nothing of the past can reach them. One function creates the topics or verifies them, and a
topic that exists with other settings is an error.
"""

from __future__ import annotations

from dataclasses import dataclass

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError, TopicAlreadyExistsError, for_code

from protocol.config import Config
from protocol.kafka import OVERHEAD_BYTES

CONTROL_PARTITION = 0
DEAD_SUFFIX = ".dead"


class TopicError(Exception):
    """A topic that cannot be used. Names it, what was found, what was expected, what to do."""


@dataclass(frozen=True)
class TopicSpec:
    """One topic as it must be."""

    name: str
    partitions: int
    replication_factor: int
    settings: dict[str, str]


@dataclass(frozen=True)
class Topics:
    """Topic names of incarnation `incarnation` of run `run`."""

    run: str
    incarnation: int

    def _name(self, kind: str) -> str:
        return f"reprise.{self.run}.{self.incarnation}.{kind}"

    @property
    def tasks(self) -> str:
        """scheduler → actors."""
        return self._name("tasks")

    @property
    def groups(self) -> str:
        """actors → learner."""
        return self._name("groups")

    @property
    def events(self) -> str:
        """everyone → scheduler."""
        return self._name("events")

    @property
    def batches(self) -> str:
        """scheduler → learner."""
        return self._name("batches")

    @property
    def weights(self) -> str:
        """learner → actors."""
        return self._name("weights")

    def dead(self, topic: str) -> str:
        """Where records of `topic` go that cannot be used."""
        return topic + DEAD_SUFFIX

    def specs(self, config: Config) -> list[TopicSpec]:
        """All topics of the run, as they must be."""
        replication = config.kafka.replication_factor
        if replication is None:
            replication = 1 if config.kafka.embedded else -1
        settings = {
            # The broker counts keys, headers and framing too.
            "max.message.bytes": str(config.kafka.max_message_bytes + OVERHEAD_BYTES),
            "cleanup.policy": "delete",
            "retention.ms": "-1",
            "retention.bytes": "-1",
        }
        partitions = {
            self.tasks: config.actors.max + 1,
            self.groups: config.kafka.group_partitions,
            self.events: 1,
            self.batches: 1,
            self.weights: 1,
            self.dead(self.tasks): 1,
            self.dead(self.groups): 1,
            self.dead(self.events): 1,
        }
        return [TopicSpec(name, n, replication, settings) for name, n in partitions.items()]


async def create_or_verify(admin: AIOKafkaAdminClient, specs: list[TopicSpec]) -> None:
    """Make sure that every topic exists as its spec says.

    Raises:
        TopicError: a topic exists with other partitions or settings, or cannot be created.
    """
    existing = set(await admin.list_topics())
    missing = [spec for spec in specs if spec.name not in existing]
    if missing:
        await _create(admin, missing)
    found = {t["topic"]: t for t in await admin.describe_topics([s.name for s in specs])}
    for spec in specs:
        topic = found.get(spec.name)
        partitions = len(topic["partitions"]) if topic else 0
        if partitions != spec.partitions:
            raise TopicError(
                f"topic {spec.name}: has {partitions} partitions, {spec.partitions} expected; "
                "delete the topic or take another run.name"
            )
    for spec in specs:
        if spec.name in existing:
            await _verify_settings(admin, spec)


async def require_empty(consumer: AIOKafkaConsumer, specs: list[TopicSpec]) -> None:
    """Raise TopicError unless no topic holds a record: this incarnation was never used before."""
    for spec in specs:
        ends = await consumer.end_offsets(
            [TopicPartition(spec.name, p) for p in range(spec.partitions)]
        )
        used = {tp.partition: end for tp, end in ends.items() if end}
        if used:
            raise TopicError(
                f"topic {spec.name}: holds records (end offset {used} by partition); a run starts "
                "on empty topics: delete the topic or take another run.name"
            )


async def _create(admin: AIOKafkaAdminClient, specs: list[TopicSpec]) -> None:
    new = [
        NewTopic(
            name=spec.name,
            num_partitions=spec.partitions,
            replication_factor=spec.replication_factor,
            topic_configs=spec.settings,
        )
        for spec in specs
    ]
    try:
        response = await admin.create_topics(new)
    except TopicAlreadyExistsError:
        return
    except KafkaError as error:
        names = [spec.name for spec in specs]
        raise TopicError(f"topics {names}: cannot be created: {error!r}") from None
    for name, code, *rest in response.topic_errors:
        kind = for_code(code)
        if code and kind is not TopicAlreadyExistsError:
            raise TopicError(f"topic {name}: cannot be created: {kind.__name__} {rest}")


async def _verify_settings(admin: AIOKafkaAdminClient, spec: TopicSpec) -> None:
    responses = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, spec.name)])
    reported: dict[str, str] = {}
    for response in responses:
        for resource in response.resources:
            # (error code, error message, type, name, entries); an entry begins with name, value.
            reported.update({entry[0]: entry[1] for entry in resource[4]})
    for name, expected in spec.settings.items():
        value = reported.get(name)
        if value is not None and value != expected:
            raise TopicError(
                f"topic {spec.name}: {name} is {value}, {expected} expected; "
                "change the topic's setting or take another run.name"
            )
