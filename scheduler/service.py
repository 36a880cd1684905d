"""The scheduler's service: moves bytes between Kafka and the core, and decides nothing.

Invariants: every event of this incarnation goes through `core.apply` once, in the order of the log;
the commands it causes are sent before the next event is applied, in order per partition, without
waiting for their acknowledgement (at most MAX_UNACKNOWLEDGED at once); a snapshot is taken between
two events, when all of them are acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from protocol.codec import ProtocolError
from protocol.config import Config
from protocol.kafka import BrokerError, Kafka, Producer, Reader, Record
from protocol.messages import EventRecord, Outcome, SchedulerStarted, StopRequested, Task, Tick
from protocol.records import RunRecord, to_line
from protocol.rundir import RunDir
from protocol.topics import CONTROL_PARTITION
from scheduler.commands import (
    Command,
    DeadLetter,
    IssueTask,
    Leave,
    Say,
    SendBatch,
    SendControl,
    WriteRecord,
)
from scheduler.core import Core
from scheduler.monitor import Monitor
from scheduler.problems import Problems
from scheduler.snapshot import Snapshot, SnapshotWriter, frozen

log = logging.getLogger(__name__)

MAX_UNACKNOWLEDGED = 4096
MAX_RECORDS = 500
READ_SECONDS = 0.2
REFRESH_SECONDS = 0.1
MAX_TICK_SECONDS = 2.0
EPOCH = 1
# Dead letters that are logged one by one; further ones are only counted.
MAX_LOGGED_LETTERS = 20


class RunFileError(Exception):
    """A file of the run directory that cannot be written. Names it and the reason."""


class Service:
    """One scheduler at work; `run` it once."""

    def __init__(
        self,
        *,
        config: Config,
        run_dir: RunDir,
        core: Core,
        problems: Mapping[str | None, Problems],
        kafka: Kafka,
        monitor: Monitor,
        stop: asyncio.Event,
    ) -> None:
        """Args:
        problems: the training problems under None, each evaluation set under its name.
        stop: set when the user asks the run to end; it then ends through the core.
        """
        self._config = config
        self._run_dir = run_dir
        self._core = core
        self._problems = problems
        self._kafka = kafka
        self._monitor = monitor
        self._identity = run_dir.identity
        self._topics = self._identity.topics
        self._producer: Producer
        self._events: Reader
        # End offset by partition, from the acknowledgements: nobody else writes to these topics.
        self._ends: dict[str, dict[int, int]] = {}
        self._metrics_file: BinaryIO
        self._next_event = 0
        self._left: bool | None = None
        self._stop = stop
        self._dead_letters = 0
        self._refreshed = 0.0
        self._snapshots = SnapshotWriter(
            run_dir.scheduler, config.waits.snapshot_outcomes, config.waits.snapshot, monitor
        )

    async def run(self) -> bool:
        """Serve until the core leaves. Returns whether the run ended as it should.

        Raises:
            BrokerError: the broker cannot be used.
            DataError: a data file changed meanwhile.
            RunFileError: metrics.jsonl cannot be written.
        """
        async with self._opened():
            await self._event(
                SchedulerStarted(epoch=EPOCH, host=socket.gethostname(), pid=os.getpid())
            )
            consuming = asyncio.create_task(self._consume())
            helpers = [asyncio.create_task(w) for w in (self._tick(), self._stop_when_asked())]
            work: list[asyncio.Future[Any]] = [consuming, *helpers, self._producer.failure]
            try:
                while not consuming.done():
                    done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
                    for future in done:
                        future.result()
                        work.remove(future)
                await _cancelled(helpers)
                await self._take_snapshot()
                await self._snapshots.written()
                self._monitor.survey()
                self._refresh()
                return bool(self._left)
            finally:
                await _cancelled([consuming, *helpers])

    @contextlib.asynccontextmanager
    async def _opened(self) -> AsyncIterator[None]:
        """Clients and files, closed in the end whatever happened."""
        async with contextlib.AsyncExitStack() as stack:
            self._metrics_file = stack.enter_context(_append_to(self._run_dir.metrics))
            self._producer = await self._kafka.producer()
            stack.push_async_callback(self._producer.stop)
            for topic in (self._topics.tasks, self._topics.batches):
                self._ends[topic] = await self._ends_of(topic)
            self._events = await self._kafka.reader(self._topics.events, EventRecord)
            stack.push_async_callback(self._events.stop)
            await self._events.partitions()
            await self._events.assign({0: 0})
            yield

    async def _ends_of(self, topic: str) -> dict[int, int]:
        reader = await self._kafka.reader(topic)
        try:
            return await reader.ends()
        finally:
            await reader.stop()

    async def _consume(self) -> None:
        """Apply events until the core leaves."""
        last = time.monotonic()
        while self._left is None:
            records = await self._events.read(READ_SECONDS, MAX_RECORDS)
            now = time.monotonic()
            if records:
                last = now
            elif now - last > self._config.waits.kafka:
                raise BrokerError(
                    f"topic {self._topics.events}: not even the scheduler's own ticks came back "
                    f"for {now - last:.0f} s; is the broker {self._kafka.config.bootstrap_servers} "
                    "well?"
                )
            for record in records:
                await self._apply(record)
                if self._left is not None:
                    break
            if now - self._refreshed >= REFRESH_SECONDS:
                self._refresh()
            if self._left is None and self._snapshots.due():
                await self._take_snapshot()
            # The ticks and the producer get their turn even where records never run out.
            await asyncio.sleep(0)

    def _refresh(self) -> None:
        self._refreshed = time.monotonic()
        self._monitor.refresh(behind=self._events.behind, unacknowledged=self._producer.pending)

    async def _apply(self, record: Record) -> None:
        event = record.message
        if isinstance(event, ProtocolError):
            await self._put_aside(record, str(event))
        else:
            commands = self._core.apply(event)
            self._note(event)
            for command in commands:
                await self._carry_out(command, record)
        self._next_event = record.offset + 1

    def _note(self, event: EventRecord) -> None:
        self._monitor.event(event)
        if isinstance(event, Outcome):
            self._snapshots.outcomes += 1
        if isinstance(event, Tick) and event.epoch == EPOCH:
            self._monitor.tick_applied()
            self._monitor.survey()

    async def _carry_out(self, command: Command, record: Record) -> None:
        match command:
            case IssueTask():
                self._monitor.issued(command)
                await self._send(self._topics.tasks, self._task(command), command.partition)
            case SendControl(message):
                await self._send(self._topics.tasks, message, CONTROL_PARTITION)
            case SendBatch(message):
                await self._send(self._topics.batches, message, 0)
            case WriteRecord(run_record):
                self._write(run_record)
            case DeadLetter(why):
                await self._put_aside(record, why)
            case Say(level, text):
                log.log(logging.getLevelNamesMapping()[level.upper()], "%s", text)
            case Leave(ok):
                self._left = ok

    def _task(self, command: IssueTask) -> Task:
        """The task with what the core does not know: the problem's content."""
        problem = self._problems[command.dataset][command.problem]
        return Task(
            id=command.id,
            attempt=command.attempt,
            actor=command.actor,
            problem=problem.id,
            purpose=command.purpose,
            reason=command.reason,
            version=command.version,
            group_size=command.group_size,
            temperature=command.temperature,
            max_tokens=command.max_tokens,
            seed=command.seed,
            prompt=problem.prompt,
            answer=problem.answer,
            data_source=problem.data_source,
            extra=problem.extra,
            send=command.send,
            exact=command.exact,
            alone=command.alone,
        )

    async def _send(self, topic: str, message: Any, partition: int) -> None:
        await self._producer.room(MAX_UNACKNOWLEDGED)
        sent = await self._producer.send(topic, message, partition=partition)
        sent.add_done_callback(self._acknowledged)

    def _acknowledged(self, sent: asyncio.Future[Any]) -> None:
        if not sent.cancelled() and sent.exception() is None:
            record = sent.result()
            self._ends[record.topic][record.partition] = record.offset + 1

    async def _event(self, event: EventRecord) -> None:
        await self._producer.send(self._topics.events, event, partition=0)

    async def _put_aside(self, record: Record, why: str) -> None:
        """Send the record to the dead-letter topic, with the reason and where it lay."""
        self._monitor.dead_letter()
        self._dead_letters += 1
        if self._dead_letters <= MAX_LOGGED_LETTERS:
            log.warning("event at offset %d of %s: %s", record.offset, record.topic, why)
            if self._dead_letters == MAX_LOGGED_LETTERS:
                log.warning("further events that do not fit are counted, not logged")
        headers = {"reason": why, "partition": record.partition, "offset": record.offset}
        await self._producer.room(MAX_UNACKNOWLEDGED)
        await self._producer.send_raw(
            self._topics.dead(record.topic),
            record.raw,
            partition=0,
            headers=[(name, str(value).encode()[:4096]) for name, value in headers.items()],
        )

    def _write(self, record: RunRecord) -> None:
        self._monitor.record(record)
        try:
            self._metrics_file.write(to_line(record))
            self._metrics_file.flush()
        except OSError as error:
            raise RunFileError(
                f"{self._run_dir.metrics}: cannot be written: {error.strerror}"
            ) from None

    async def _tick(self) -> None:
        """Append the time that passed, again and again."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(self._config.waits.tick)
            now = time.monotonic()
            self._monitor.ticked()
            await self._event(Tick(epoch=EPOCH, seconds=min(now - last, MAX_TICK_SECONDS)))
            last = now

    async def _stop_when_asked(self) -> None:
        await self._stop.wait()
        log.info("stop requested; the run ends after the step that is being trained")
        await self._event(StopRequested(sender="scheduler"))

    async def _take_snapshot(self) -> None:
        """Copy the state between two events; a thread writes it."""
        await self._snapshots.written()
        start = time.monotonic()
        await self._producer.flush()
        snapshot = Snapshot(
            run=self._identity.run,
            incarnation=self._identity.incarnation,
            fingerprints={n or "": p.fingerprint for n, p in self._problems.items()},
            events=self._next_event,
            tasks=dict(self._ends[self._topics.tasks]),
            batches=dict(self._ends[self._topics.batches]),
            state=frozen(self._core.state()),
        )
        self._snapshots.start(snapshot, held_up=time.monotonic() - start)


def _append_to(path: Path) -> BinaryIO:
    try:
        return path.open("ab")
    except OSError as error:
        raise RunFileError(f"{path}: cannot be written: {error.strerror}") from None


async def _cancelled(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
