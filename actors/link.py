"""The actor's end of Kafka, on its own thread and loop.

Invariants: heartbeats go out whatever the main loop does; events leave in the order in which they
were posted, so a heartbeat never overtakes the outcome that emptied its list; an outcome is posted
only after its group is acknowledged (`deliver` returns the pointer); the actor reads its own
partition from the end that it noted before it joined, and nothing of the past.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable

from actors.status import Status
from protocol.codec import ProtocolError
from protocol.config import Config
from protocol.kafka import BrokerError, Kafka, Producer, Reader, Record
from protocol.messages import (
    Assigned,
    GroupRef,
    Heartbeat,
    Held,
    Message,
    RunEnded,
    TaskRecord,
    WeightsPublished,
)
from protocol.topics import CONTROL_PARTITION, Topics

log = logging.getLogger(__name__)

READ_SECONDS = 0.5
FULL_HEARTBEAT = 10


class Link:
    """All methods that are coroutines run on the Kafka thread's loop; `post` on any thread."""

    def __init__(
        self,
        config: Config,
        topics: Topics,
        status: Status,
        receive: Callable[[Record], None],
        client_id: str,
    ) -> None:
        """`receive` is called on the Kafka thread with each record that is this actor's business:
        its tasks, `Rejoin`, `RunEnded`, `WeightsPublished`, and ProtocolErrors."""
        self._config = config
        self._topics = topics
        self._status = status
        self._receive = receive
        self._kafka = Kafka(config.kafka, wait=config.waits.kafka, client_id=client_id)
        self._queue: deque[Message] = deque()
        self._wake = asyncio.Event()
        self._sent = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: asyncio.Task[None] | None = None
        self._noted: dict[int, int] = {}
        self._positions: dict[int, int] = {}
        self._weights_position = 0
        self._reassign = False
        self._partition: int | None = None
        self._actor: str | None = None

    async def start(self) -> None:
        """Connect. Raises BrokerError."""
        self._loop = asyncio.get_running_loop()
        self._producer: Producer = await self._kafka.producer()
        self._tasks: Reader = await self._kafka.reader(
            self._topics.tasks, TaskRecord, group_id=f"{self._topics.tasks}.actors"
        )
        self._weights: Reader = await self._kafka.reader(self._topics.weights, WeightsPublished)
        self._positions = {CONTROL_PARTITION: 0}
        await self._tasks.assign(self._positions)
        await self._weights.assign({0: 0})

    async def catch_up(self) -> None:
        """Receive all that the control partition and `weights` hold at this moment."""
        end = (await self._tasks.ends([CONTROL_PARTITION]))[CONTROL_PARTITION]
        while self._positions[CONTROL_PARTITION] < end:
            await self._read_tasks()
        end = (await self._weights.ends([0]))[0]
        while self._weights_position < end:
            await self._read_weights()

    async def run(self) -> None:
        """Read, send and beat until cancelled. Raises BrokerError."""
        work = [
            self._follow_tasks(),
            self._follow_weights(),
            self._send(),
            self._beat(),
            self._commit(),
            self._watch_producer(),
        ]
        tasks = [asyncio.ensure_future(part) for part in work]
        self._running = asyncio.current_task()
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def prepare_join(self, actor: str) -> None:
        """Note the ends of all partitions, give up the partition held, and be `actor` from now.

        Post Joined after this has returned.
        """
        noted = await self._tasks.ends()
        self._noted, self._actor, self._partition = noted, actor, None
        self._positions = {CONTROL_PARTITION: self._positions[CONTROL_PARTITION]}
        self._reassign = True

    def post(self, message: Message) -> None:
        """Queue an event, in order with all others."""
        self._queue.append(message)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake.set)

    def beat(self) -> None:
        """Post a heartbeat now, on any thread; nothing before the actor has joined."""
        self._post_heartbeat(self._status.held)

    async def deliver(self, raw: bytes) -> GroupRef:
        """Send an encoded group and wait until it is acknowledged. Raises BrokerError."""
        future = await self._producer.send_raw(self._topics.groups, raw)
        try:
            metadata = await future
        except Exception as error:
            raise BrokerError(f"topic {self._topics.groups}: {error!r}") from None
        return Record(self._topics.groups, metadata.partition, metadata.offset, None, raw).ref

    async def dead_letter(self, record: Record) -> None:
        """Put a record of `tasks` that is no message aside."""
        topic = self._topics.dead(self._topics.tasks)
        await self._producer.send_raw(
            topic, record.raw, partition=0, headers=[("why", str(record.message).encode())]
        )

    async def flush(self) -> None:
        """Wait until everything posted is acknowledged. Raises BrokerError."""
        while self._queue:
            self._sent.clear()
            await self._sent.wait()
        await self._producer.flush()

    async def stop(self) -> None:
        """End `run` and close the clients."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        for client in ("_tasks", "_weights", "_producer"):
            if hasattr(self, client):
                await getattr(self, client).stop()

    async def _follow_tasks(self) -> None:
        while True:
            await self._read_tasks()

    async def _follow_weights(self) -> None:
        while True:
            await self._read_weights()

    async def _read_tasks(self) -> None:
        if self._reassign:
            self._reassign = False
            await self._tasks.assign(self._positions)
        for record in await self._tasks.read(READ_SECONDS):
            if record.partition in self._positions:
                self._positions[record.partition] = record.offset + 1
                self._on_task_record(record)

    def _on_task_record(self, record: Record) -> None:
        message = record.message
        if isinstance(message, Assigned):
            if message.actor == self._actor:
                self._take_partition(message.partition)
        elif isinstance(message, RunEnded | ProtocolError) or message.actor == self._actor:
            self._receive(record)

    def _take_partition(self, partition: int) -> None:
        if partition not in self._noted:
            raise BrokerError(
                f"topic {self._topics.tasks}: assigned partition {partition}, which is not among "
                f"its {len(self._noted)}"
            )
        if partition != self._partition:
            log.info("%s reads partition %d of %s", self._actor, partition, self._topics.tasks)
            self._partition = partition
            self._positions[partition] = self._noted[partition]
            self._reassign = True

    async def _read_weights(self) -> None:
        for record in await self._weights.read(READ_SECONDS):
            self._weights_position = record.offset + 1
            self._receive(record)

    async def _send(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                await self._producer.send(self._topics.events, self._queue[0], partition=0)
                self._queue.popleft()
            self._sent.set()

    async def _beat(self) -> None:
        told: tuple[Held, ...] | None = None
        count = 0
        while True:
            await asyncio.sleep(self._config.waits.heartbeat)
            held = self._status.held
            full = held != told or count % FULL_HEARTBEAT == 0
            if self._post_heartbeat(held if full else None):
                told, count = held, count + 1

    def _post_heartbeat(self, held: tuple[Held, ...] | None) -> bool:
        """False where there is no actor yet, or no longer."""
        status = self._status
        actor, version = status.actor, status.version
        if actor is None or version is None:
            return False
        self.post(
            Heartbeat(
                actor=actor,
                state=status.clock.state,
                version=version,
                held=None if held is None else list(held),
                tokens=status.tokens,
                seconds=status.clock.seconds(),
            )
        )
        return True

    async def _commit(self) -> None:
        while True:
            await asyncio.sleep(self._config.waits.heartbeat)
            if self._partition is not None and self._status.unstarted is not None:
                with contextlib.suppress(TimeoutError):
                    commit = self._tasks.commit({self._partition: self._status.unstarted})
                    await asyncio.wait_for(commit, self._config.waits.kafka)

    async def _watch_producer(self) -> None:
        await asyncio.shield(self._producer.failure)
