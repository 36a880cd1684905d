"""A learner without a model: the real protocol over a real broker, with weights that are no more
than a version.

It checks every batch group by group as the real one must, publishes before it reports the step, and
breaks its promises where a test asks for it. What it saw and did stays in its attributes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable
from typing import Any

from protocol.config import Config
from protocol.kafka import Kafka, Producer, Record
from protocol.messages import (
    BatchGroup,
    BatchRecord,
    BatchReleased,
    EventRecord,
    GroupEnd,
    LearnerReady,
    RewardGroup,
    RunEnded,
    StepCompleted,
    StopRequested,
    WeightsPublished,
)
from protocol.topics import Topics
from protocol.versions import Verdict, Version, judge
from tests.pipeline.simulated import READ_SECONDS, Died


class SimulatedLearner:
    """The learner's side of the protocol: every batch of a run, checked group by group."""

    def __init__(
        self,
        topics: Topics,
        producer: Producer,
        config: Config,
        *,
        generation: int = 0,
        step_seconds: float = 0.0,
        skips: frozenset[int] = frozenset(),
        dies_at: int | None = None,
    ) -> None:
        """
        Args:
            step_seconds: how long a step takes.
            skips: steps whose loss is not finite.
            dies_at: it falls silent for ever when it is given the batch of this step.
        """
        self.topics = topics
        self.producer = producer
        self.config = config
        self.version = Version(generation, 0)
        self.step_seconds = step_seconds
        self.skips = skips
        self.dies_at = dies_at
        self.batches: list[BatchReleased] = []
        self.completed: list[StepCompleted] = []
        self.trained: list[tuple[Version, RewardGroup]] = []
        self.ended: RunEnded | None = None
        self._groups: dict[tuple[int, int], Record] = {}
        self._stepped = asyncio.Condition()

    async def reached(self, steps: int) -> None:
        """Wait until so many steps are completed."""
        async with self._stepped:
            await self._stepped.wait_for(lambda: len(self.completed) >= steps)

    async def publish(self) -> None:
        """Say that weights of the current version lie complete; returns when acknowledged."""
        digest = hashlib.sha256(str(self.version).encode()).hexdigest()
        message = WeightsPublished(
            version=self.version,
            path=str(self.version),
            files={"model.safetensors": digest},
            bytes=1,
        )
        await (await self.producer.send(self.topics.weights, message, partition=0))

    async def ready(self) -> None:
        """Publish the first weights and say that batches may come."""
        await self.publish()
        await self._event(LearnerReady(version=self.version))

    async def request_stop(self) -> None:
        """As on SIGTERM, after the step."""
        await self._event(StopRequested(sender="learner"))

    def take_groups(self, records: list[Record]) -> None:
        """Records of `groups`."""
        for record in records:
            self._groups[record.partition, record.offset] = record

    async def step(self, batch: BatchReleased, groups: Callable[[], Any]) -> None:
        """Train one batch: find and judge its groups, publish, and report every end.

        `groups` reads further records of `groups` into `take_groups`.
        """
        if batch.version != self.version:
            return
        self.batches.append(batch)
        if batch.version.step == self.dies_at:
            raise Died
        started = time.monotonic()
        deadline = started + self.config.waits.group
        ends = [await self._end(group, batch.version, groups, deadline) for group in batch.groups]
        waited = time.monotonic() - started
        await asyncio.sleep(self.step_seconds)
        self.version = batch.version.next_step()
        await self.publish()
        completed = StepCompleted(
            version=batch.version, ends=ends, metrics=self._metrics(batch.version, waited)
        )
        await self._event(completed)
        async with self._stepped:
            self.completed.append(completed)
            self._stepped.notify_all()

    async def _end(
        self, group: BatchGroup, version: Version, more: Callable[[], Any], deadline: float
    ) -> GroupEnd:
        place = (group.ref.partition, group.ref.offset)
        while place not in self._groups and time.monotonic() < deadline:
            await more()
        record = self._groups.pop(place, None)
        if record is None:
            return GroupEnd(group.task, group.attempt, "failed", "not found")
        message = record.message
        if record.ref != group.ref or not isinstance(message, RewardGroup):
            return GroupEnd(group.task, group.attempt, "failed", "other content")
        if message.id != group.id:
            return GroupEnd(group.task, group.attempt, "failed", f"is group {message.id}")
        spans = [(c.spans, c.length) for c in message.completions]
        verdict = judge(spans, version, self.config.run.max_lag)
        if verdict is not Verdict.ADMISSIBLE:
            return GroupEnd(group.task, group.attempt, verdict.end, verdict)
        if version.step in self.skips:
            return GroupEnd(group.task, group.attempt, "skipped", "loss is not finite")
        self.trained.append((version, message))
        return GroupEnd(group.task, group.attempt, "trained")

    def _metrics(self, version: Version, waited: float) -> dict[str, float]:
        groups = [group for trained_at, group in self.trained if trained_at == version]
        rewards = [c.reward for g in groups for c in g.completions if c.reward is not None]
        tokens = sum(c.length for g in groups for c in g.completions)
        metrics = {
            "loss": 0.0,
            "tokens": float(tokens),
            "impure_trained": 0.0,
            "seconds_wait": waited,
            "seconds_train": self.step_seconds,
        }
        if rewards:
            metrics["reward_mean"] = sum(rewards) / len(rewards)
        return metrics

    async def _event(self, event: EventRecord) -> None:
        await self.producer.send(self.topics.events, event, partition=0)


async def serve_learner(kafka: Kafka, topics: Topics, learner: SimulatedLearner) -> None:
    """Read for `learner`, with readers of its own, until the run ends or the learner dies."""
    async with contextlib.AsyncExitStack() as stack:
        groups = await kafka.reader(topics.groups, RewardGroup)
        stack.push_async_callback(groups.stop)
        batches = await kafka.reader(topics.batches, BatchRecord)
        stack.push_async_callback(batches.stop)
        await groups.assign(await groups.ends())
        await batches.assign({0: 0})
        await learner.ready()

        async def more() -> None:
            learner.take_groups(await groups.read(READ_SECONDS))

        while learner.ended is None:
            for record in await batches.read(READ_SECONDS):
                if isinstance(record.message, RunEnded):
                    learner.ended = record.message
                elif isinstance(record.message, BatchReleased):
                    with contextlib.suppress(Died):
                        await learner.step(record.message, more)
                        continue
                    return
