"""An actor without a model: the real protocol over a real broker, with invented tokens.

It keeps the promises that the design asks of a real one (an outcome only after its group is
acknowledged, held ids in heartbeats), and breaks them where a test asks for it. What it saw and did
stays in its attributes. The learner beside it is in `simulated_learner`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from protocol.arrays import pack_float32, pack_int32
from protocol.codec import encode
from protocol.config import Config
from protocol.kafka import Kafka, Producer
from protocol.messages import (
    Assigned,
    Completion,
    EventRecord,
    GroupRef,
    Heartbeat,
    Held,
    Joined,
    Outcome,
    Rejoin,
    Released,
    RewardGroup,
    RunEnded,
    Started,
    Task,
    TaskRecord,
    WeightsRecord,
)
from protocol.topics import CONTROL_PARTITION, Topics
from protocol.versions import Span, Version

READ_SECONDS = 0.2
Success = Callable[[str], float]
"""Probability that a completion of a problem, given by its id, is right."""


def spread(problem: str) -> float:
    """A quarter of all problems never solved, a quarter always, the others evenly between."""
    place = int.from_bytes(hashlib.sha256(problem.encode()).digest()[:4], "big") / 2**32
    return min(1.0, max(0.0, 2 * place - 0.5))


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """How a simulated actor works.

    Attributes:
        seconds: each task takes.
        failing: share of tasks whose grader fails.
        dies_at: it falls silent for ever when it starts its so many-th task.
        drops_at: it forgets its so many-th task after it started it, and lives on.
    """

    seconds: float = 0.0
    failing: float = 0.0
    dies_at: int | None = None
    drops_at: int | None = None


GOOD = Behaviour()


class Died(Exception):
    """A simulated process came to its simulated end."""


class SimulatedActor:
    """One actor's side of the protocol. `serve` gives it Kafka clients of its own; without it, the
    owner passes in what it reads with `take` and calls `beat`, so that many can share clients."""

    def __init__(
        self,
        topics: Topics,
        producer: Producer,
        *,
        name: str = "actor-0",
        slots: int = 8,
        success: Success = spread,
        behaviour: Behaviour = GOOD,
        seed: int = 0,
    ) -> None:
        self.topics = topics
        self.producer = producer
        self.name = name
        self.slots = slots
        self.behaviour = behaviour
        self.success = success
        self.version: Version | None = None
        self.id = ""
        self.partition: int | None = None
        self.held: dict[tuple[str, int], Task] = {}
        self.started = 0
        self.outcomes = 0
        self.tokens = 0
        self.ended: RunEnded | None = None
        self.assigned = asyncio.Event()
        self.died = asyncio.Event()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with an error that was not simulated."""
        self.note_ends: Callable[[], Awaitable[None]] | None = None
        """Called before every `Joined`."""
        self.rejoined = 0
        self._random = random.Random(f"{seed} {name}")
        self._seen: set[tuple[str, int]] = set()
        self._free = asyncio.Semaphore(slots)
        self._newer = asyncio.Condition()
        self._working: set[asyncio.Task[None]] = set()
        self._told: list[Held] | None = None
        self._beats = 0

    async def join(self) -> None:
        """Take a new id and ask for work. Weights must be loaded."""
        assert self.version is not None
        if self.note_ends is not None:
            await self.note_ends()
        self.id, self.partition, self._told = f"{self.name}.{uuid.uuid4().hex[:8]}", None, None
        await self._event(Joined(actor=self.id, slots=self.slots, version=self.version))

    async def load(self, version: Version) -> None:
        """These weights are in use from now on."""
        async with self._newer:
            if self.version is None or version > self.version:
                self.version = version
            self._newer.notify_all()

    async def loaded(self) -> None:
        """Wait until there are weights."""
        async with self._newer:
            await self._newer.wait_for(lambda: self.version is not None)

    async def take(self, message: TaskRecord) -> None:
        """One record of `tasks`, whoever it is addressed to."""
        match message:
            case RunEnded():
                self.ended = message
                await self.release("run ended")
            case Assigned(actor=self.id, partition=partition):
                self.partition = partition
                self.assigned.set()
            case Rejoin(actor=self.id):
                self.rejoined += 1
                self._drop_all()
                await self.join()
            case Task(actor=self.id) if (message.id, message.attempt) not in self._seen:
                self._seen.add((message.id, message.attempt))
                work = asyncio.create_task(self._work(message))
                self._working.add(work)
                work.add_done_callback(self._worked)

    async def beat(self) -> None:
        """One heartbeat."""
        assert self.version is not None
        held = [Held(task, attempt) for task, attempt in self.held]
        self._beats += 1
        tell = held != self._told or self._beats % 10 == 0
        self._told = held
        await self._event(
            Heartbeat(
                actor=self.id,
                state="generating" if held else "idle",
                version=self.version,
                held=held if tell else None,
                tokens=self.tokens,
            )
        )

    async def release(self, why: str) -> None:
        """Give back what is held and take no more of it, as on SIGTERM."""
        held = [Held(task, attempt) for task, attempt in self.held]
        self._drop_all()
        if held:
            await self._event(Released(actor=self.id, attempts=held, why=why))
        await self.producer.flush()

    def _drop_all(self) -> None:
        for work in self._working:
            work.cancel()
        self.held.clear()

    def _worked(self, work: asyncio.Task[None]) -> None:
        self._working.discard(work)
        if not work.cancelled() and (error := work.exception()):
            if isinstance(error, Died):
                self.died.set()
                self._drop_all()
            elif not self.failure.done():
                self.failure.set_exception(error)

    async def _work(self, task: Task) -> None:
        key = (task.id, task.attempt)
        async with self._free:
            if self.died.is_set():
                return
            version = await self._weights_for(task)
            if version is None:
                reason = f"needs {task.version}, weights are {self.version}"
                given_back = [Held(*key)]
                await self._event(Released(actor=self.id, attempts=given_back, why=reason))
                return
            self.held[key] = task
            self.started += 1
            place = self.started
            await self._event(Started(actor=self.id, task=task.id, attempt=task.attempt))
            await asyncio.sleep(self.behaviour.seconds)
            if place == self.behaviour.dies_at:
                raise Died
            if place == self.behaviour.drops_at:
                del self.held[key]
                return
            await self._finish(task)
            self.held.pop(key, None)

    async def _weights_for(self, task: Task) -> Version | None:
        """Wait for the weights that the task needs; None if they are gone by."""
        async with self._newer:
            await self._newer.wait_for(lambda: self.version and self.version >= task.version)
        assert self.version is not None
        gone = self.version.generation != task.version.generation or (
            task.exact and self.version != task.version
        )
        return None if gone else self.version

    async def _finish(self, task: Task) -> None:
        assert self.version is not None
        if self._random.random() < self.behaviour.failing:
            await self._event(
                Outcome(
                    actor=self.id,
                    task=task.id,
                    attempt=task.attempt,
                    status="failed",
                    why="grader: simulated failure",
                )
            )
            return
        completions = [
            self._completion(task, self.version, task.temperature) for _ in range(task.group_size)
        ]
        rewards = [c.reward for c in completions]
        ref = None
        if task.send == "all" or (task.send == "mixed" and len(set(rewards)) > 1):
            ref = await self._send_group(task, completions)
        self.outcomes += 1
        self.tokens += sum(c.length for c in completions)
        await self._event(
            Outcome(
                actor=self.id,
                task=task.id,
                attempt=task.attempt,
                status="ok",
                rewards=rewards,
                correct=[c.correct for c in completions],
                lengths=[c.length for c in completions],
                truncated=[c.finish == "length" for c in completions],
                oldest=self.version,
                newest=self.version,
                group=ref,
                prompt_length=len(str(task.prompt)),
                generate_seconds=self.behaviour.seconds,
            )
        )

    def _completion(self, task: Task, version: Version, temperature: float) -> Completion:
        chance = self.success(task.problem)
        right = chance >= 0.5 if temperature == 0 else self._random.random() < chance
        length = self._random.randint(1, task.max_tokens)
        return Completion(
            tokens=pack_int32(self._random.randrange(100) for _ in range(length)),
            logprobs=pack_float32(-self._random.random() for _ in range(length)),
            spans=[Span(version, 0, length)],
            finish="length" if length == task.max_tokens else "stop",
            reward=float(right),
            correct=float(right),
        )

    async def _send_group(self, task: Task, completions: list[Completion]) -> GroupRef:
        group = RewardGroup(
            task=task.id,
            attempt=task.attempt,
            actor=self.id,
            problem=task.problem,
            data_source=task.data_source,
            reason=task.reason,
            temperature=task.temperature,
            prompt_tokens=pack_int32([1, 2, 3]),
            completions=completions,
        )
        raw = encode(group)
        sent = await (await self.producer.send_raw(self.topics.groups, raw))
        return GroupRef(sent.partition, sent.offset, hashlib.sha256(raw).digest())

    async def _event(self, event: EventRecord) -> None:
        if not self.died.is_set():
            await self.producer.send(self.topics.events, event, partition=0)


async def serve_actor(kafka: Kafka, topics: Topics, config: Config, actor: SimulatedActor) -> None:
    """Read and beat for `actor`, with readers of its own, until the run ends or the actor dies."""
    async with contextlib.AsyncExitStack() as stack:
        weights = await kafka.reader(topics.weights, WeightsRecord)
        stack.push_async_callback(weights.stop)
        tasks = await kafka.reader(topics.tasks, TaskRecord)
        stack.push_async_callback(tasks.stop)
        await weights.assign({0: 0})
        while actor.version is None:
            for record in await weights.read(READ_SECONDS):
                await actor.load(record.message.version)
        noted: dict[int, int] = {}
        control = 0

        async def note_ends() -> None:
            noted.update(await tasks.ends())

        actor.note_ends = note_ends
        await tasks.assign({CONTROL_PARTITION: control})
        await actor.join()

        async def load() -> None:
            while True:
                for record in await weights.read(READ_SECONDS):
                    await actor.load(record.message.version)

        async def beat() -> None:
            while True:
                await asyncio.sleep(config.waits.heartbeat)
                await actor.beat()

        async def read() -> None:
            nonlocal control
            reading = None
            while actor.ended is None:
                for record in await tasks.read(READ_SECONDS):
                    await actor.take(record.message)
                    if record.partition == CONTROL_PARTITION:
                        control = record.offset + 1
                if actor.partition is not None and actor.partition != reading:
                    reading = actor.partition
                    await tasks.assign({CONTROL_PARTITION: control, reading: noted[reading]})

        await _first_of(read(), load(), beat(), actor.died.wait(), actor.failure)


@contextlib.asynccontextmanager
async def producing(kafka: Kafka) -> AsyncIterator[Producer]:
    """A producer, flushed and stopped at the end."""
    producer = await kafka.producer()
    try:
        yield producer
        await producer.flush()
    finally:
        await producer.stop()


async def _first_of(*work: Any) -> None:
    """Wait for the first to end, cancel the others, raise its error."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
