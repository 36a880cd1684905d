"""The service moves bytes: a scripted core shows what goes in and what becomes of its commands."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from prometheus_client import CollectorRegistry

from deploy.local.broker import EmbeddedBroker
from protocol.config import EMBEDDED_FETCH_WAIT, Config, load_config
from protocol.kafka import BrokerError, Kafka, Producer
from protocol.messages import (
    Assigned,
    BatchReleased,
    EventRecord,
    Heartbeat,
    Joined,
    Outcome,
    RunEnded,
    SchedulerStarted,
    StopRequested,
    Task,
    Tick,
)
from protocol.records import Accounts, EndRecord, from_line
from protocol.rundir import RunDir, RunIdentity
from protocol.topics import Topics, create_or_verify
from protocol.versions import Version
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
from scheduler.monitor import Monitor
from scheduler.problems import DataError, Problems
from scheduler.service import Service
from scheduler.snapshot import read_snapshot, snapshot_paths

V0 = Version(0, 0)
ROWS = [
    {"id": "a", "prompt": "1+1=", "answer": "2", "data_source": "sums", "level": 3},
    {"id": "b", "prompt": [{"role": "user", "content": "?"}], "answer": [1]},
]
LEAVE = Outcome(actor="script", task="0-0", attempt=1, status="failed", why="leave")
Answer = Callable[[EventRecord], list[Command]]


class ScriptedCore:
    """Answers events as the script says, leaves at LEAVE, and remembers what it was given."""

    version = V0
    seconds = 0.0
    waiting_for = "rollouts"
    wanted_slots = 3
    accounts = Accounts(issued=1, in_flight=0, ends={"trained": 1})
    roster: ClassVar[dict[str, Any]] = {}
    notes: ClassVar[dict[str, int]] = {}

    def __init__(self, answer: Answer) -> None:
        self.events: list[EventRecord] = []
        self._answer = answer
        self._applied = asyncio.Event()

    async def reached(self, events: int) -> None:
        """Wait until so many events are applied."""
        while len(self.events) < events:
            self._applied.clear()
            await self._applied.wait()

    def apply(self, event: EventRecord) -> list[Command]:
        self.events.append(event)
        self._applied.set()
        return [Leave(ok=True)] if event == LEAVE else self._answer(event)

    def pools(self) -> dict[str, int]:
        return {"unseen": 2}

    def state(self) -> dict[str, Any]:
        return {"applied": len(self.events)}


class Play:
    """One service in this process, and what is around it."""

    def __init__(self, directory: Path, topics: Topics, kafka_section: dict[str, Any]) -> None:
        self.topics = topics
        self.run_dir = RunDir(directory / "run")
        self.run_dir.create(RunIdentity(topics.run, topics.incarnation))
        train = directory / "train.jsonl"
        train.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        raw = {
            "model": {"path": "m"},
            "data": {"train": str(train)},
            "actors": {"max": 3},
            "kafka": kafka_section,
            "waits": {"tick": 0.05, "kafka": 20.0, "snapshot_outcomes": 10},
        }
        self.run_dir.config.write_text(yaml.safe_dump(raw))
        self.config: Config = load_config(self.run_dir.config)
        self.kafka = Kafka(self.config.kafka, wait=20.0)
        self.stop = asyncio.Event()
        self.registry = CollectorRegistry()
        self.core: ScriptedCore

    async def create_topics(self) -> None:
        admin = await self.kafka.admin()
        await create_or_verify(admin, self.topics.specs(self.config))
        await admin.close()

    def service(self, answer: Answer) -> Service:
        self.core = ScriptedCore(answer)
        core: Any = self.core
        return Service(
            config=self.config,
            run_dir=self.run_dir,
            core=core,
            problems={
                None: Problems.load(self.config.data.train, self.config.data.fields),
                "held_out": Problems.load(self.config.data.train, self.config.data.fields),
            },
            kafka=self.kafka,
            monitor=Monitor(self.registry, core, wait=5.0),
            stop=self.stop,
        )

    async def run(self, answer: Answer, *events: EventRecord | bytes) -> bool:
        """Send `events`, then LEAVE, and serve until the end."""
        async with self.producer() as producer:
            for event in (*events, LEAVE):
                if isinstance(event, bytes):
                    await producer.send_raw(self.topics.events, event, partition=0)
                else:
                    await producer.send(self.topics.events, event, partition=0)
            await producer.flush()
        return await asyncio.wait_for(self.service(answer).run(), 30)

    @contextlib.asynccontextmanager
    async def producer(self) -> AsyncIterator[Producer]:
        producer = await self.kafka.producer()
        yield producer
        await producer.stop()

    async def written(self, topic: str) -> list[Any]:
        """All records of a topic, in order per partition."""
        reader = await self.kafka.reader(topic)
        await reader.assign(dict.fromkeys(await reader.partitions(), 0))
        records = []
        while batch := await reader.read(0.5):
            records += batch
        await reader.stop()
        return records

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


@pytest.fixture
async def play(tmp_path: Path, topics: Topics, kafka_section: dict[str, Any]) -> Play:
    play = Play(tmp_path, topics, kafka_section)
    await play.create_topics()
    return play


def issue(number: int, *, partition: int = 2, problem: int = 0, dataset: str | None = None) -> Any:
    return IssueTask(
        partition=partition,
        actor="actor-0.x",
        id=f"0-{number}",
        attempt=1,
        dataset=dataset,
        problem=problem,
        purpose="train" if dataset is None else "eval",
        reason="heap" if dataset is None else "eval",
        version=V0,
        group_size=4,
        temperature=1.0,
        max_tokens=8,
        seed=5,
        send="mixed",
        exact=False,
        alone=False,
    )


def joined(number: int) -> Joined:
    return Joined(actor=f"actor-{number}.x", slots=2, version=V0)


def nothing(event: EventRecord) -> list[Command]:
    return []


async def test_every_event_is_applied_once_in_the_order_of_the_log(play: Play) -> None:
    events = [joined(i) for i in range(1500)]
    assert await play.run(nothing, *events)
    assert [e for e in play.core.events if isinstance(e, Joined)] == events
    assert play.metric("reprise_events_total", type="Joined") == 1500


async def test_a_task_is_sent_with_the_content_of_its_problem(play: Play) -> None:
    def answer(event: EventRecord) -> list[Command]:
        if not isinstance(event, Joined):
            return []
        return [issue(1), issue(2, partition=3, problem=1, dataset="held_out")]

    await play.run(answer, joined(0))
    first, second = await play.written(play.topics.tasks)
    if first.partition == 3:
        first, second = second, first
    assert (first.partition, second.partition) == (2, 3)
    assert first.message == Task(
        id="0-1",
        attempt=1,
        actor="actor-0.x",
        problem="a",
        purpose="train",
        reason="heap",
        version=V0,
        group_size=4,
        temperature=1.0,
        max_tokens=8,
        seed=5,
        prompt="1+1=",
        answer="2",
        data_source="sums",
        extra={"level": 3},
    )
    assert second.message.prompt[0].content == "?"
    assert (second.message.purpose, second.message.data_source) == ("eval", "")
    assert play.metric("reprise_tasks_issued_total", purpose="train", reason="heap") == 1


async def test_commands_go_where_they_belong_in_the_order_they_were_given(play: Play) -> None:
    ended = RunEnded(reason="finished")
    batch = BatchReleased(version=V0, groups=[], planned=4)

    def answer(event: EventRecord) -> list[Command]:
        match event:
            case Joined(actor=actor):
                return [SendControl(Assigned(actor=actor, partition=1)), SendBatch(batch)]
            case Heartbeat():
                return [SendControl(ended), SendBatch(ended), Say("warning", "well")]
        return []

    beat = Heartbeat(actor="a", state="idle", version=V0)
    await play.run(answer, *[joined(i) for i in range(300)], beat)
    control = await play.written(play.topics.tasks)
    assert {r.partition for r in control} == {0}
    assert [r.message for r in control] == [
        *[Assigned(actor=f"actor-{i}.x", partition=1) for i in range(300)],
        ended,
    ]
    assert [r.message for r in await play.written(play.topics.batches)] == [*[batch] * 300, ended]


async def test_what_is_no_event_or_does_not_fit_is_put_aside_with_the_reason(play: Play) -> None:
    def answer(event: EventRecord) -> list[Command]:
        return [DeadLetter("unknown actor")] if isinstance(event, Joined) else []

    await play.run(answer, b"\xc1junk", joined(0))
    reader = await play.kafka.reader(play.topics.dead(play.topics.events))
    await reader.assign({0: 0})
    letters = []
    while len(letters) < 2:
        letters.append(await reader._consumer.getone())
    await reader.stop()
    headers = [dict(letter.headers) for letter in letters]
    assert letters[0].value == b"\xc1junk"
    assert headers[0]["reason"].startswith(b"not msgpack: ")
    assert (headers[0]["partition"], headers[0]["offset"]) == (b"0", b"0")
    assert (headers[1]["reason"], headers[1]["offset"]) == (b"unknown actor", b"1")
    assert not any(isinstance(e, bytes) for e in play.core.events)
    assert play.metric("reprise_dead_letters_total", role="scheduler", topic="events") == 2


async def test_time_is_what_the_service_itself_appends(play: Play) -> None:
    """Started comes first, and the ticks add up to the time that passed, each at most 2 s."""
    serving = asyncio.create_task(play.service(nothing).run())
    loop = asyncio.get_running_loop()
    async with play.producer() as producer:
        await play.core.reached(2)
        start, ticks_before = loop.time(), len(play.core.events) - 1
        await play.core.reached(22)
        passed, ticks = loop.time() - start, play.core.events[1:22]
        await producer.send(play.topics.events, LEAVE, partition=0)
        await asyncio.wait_for(serving, 10)
    started = play.core.events[0]
    assert isinstance(started, SchedulerStarted)
    assert started.epoch == 1
    assert all(isinstance(t, Tick) and t.epoch == 1 and 0.05 <= t.seconds <= 2 for t in ticks)
    counted = [t for t in ticks[ticks_before:] if isinstance(t, Tick)]
    assert sum(t.seconds for t in counted) == pytest.approx(passed, abs=0.2)


async def test_a_stop_becomes_an_event_and_the_core_decides(play: Play) -> None:
    def answer(event: EventRecord) -> list[Command]:
        return [Leave(ok=False)] if isinstance(event, StopRequested) else []

    service = play.service(answer)
    play.stop.set()
    assert await asyncio.wait_for(service.run(), 10) is False
    assert play.core.events[-1] == StopRequested(sender="scheduler")


async def test_records_are_appended_to_metrics_jsonl_at_once(play: Play) -> None:
    end = EndRecord(
        reason="finished",
        detail="",
        version=V0,
        seconds=1.0,
        rollouts=4,
        rollout_tokens=9,
        trained_tokens=9,
        impure_groups_trained=0,
        accounts=ScriptedCore.accounts,
        actors={},
    )
    seen: list[bytes] = []

    def answer(event: EventRecord) -> list[Command]:
        if isinstance(event, Heartbeat):
            seen.append(play.run_dir.metrics.read_bytes())
        return [WriteRecord(end)] if isinstance(event, Joined) else []

    await play.run(answer, joined(0), Heartbeat(actor="a", state="idle", version=V0))
    assert [from_line(line) for line in seen[0].splitlines()] == [end]


async def test_a_snapshot_holds_the_state_between_two_events(play: Play) -> None:
    def answer(event: EventRecord) -> list[Command]:
        return [issue(len(play.core.events))] if isinstance(event, Outcome) else []

    failed = Outcome(actor="a", task="0-1", attempt=1, status="failed", why="x")
    await play.run(answer, *[failed] * 25)
    snapshots = [read_snapshot(p) for p in snapshot_paths(play.run_dir.scheduler)]
    assert snapshots
    for snapshot in snapshots:
        assert snapshot.state == {"applied": snapshot.events}
        assert set(snapshot.tasks) == {0, 1, 2, 3}
        assert (snapshot.run, snapshot.incarnation) == (play.topics.run, 1)
    last = snapshots[-1]
    assert last.events == len(play.core.events)
    assert last.tasks == {0: 0, 1: 0, 2: 25, 3: 0}
    assert last.batches == {0: 0}
    assert last.fingerprints.keys() == {"", "held_out"}
    assert play.metric("reprise_snapshots_total", result="ok") >= 1


async def test_the_metrics_show_the_core_and_the_lag(play: Play) -> None:
    await play.run(nothing, joined(0))
    assert play.metric("reprise_tasks_ended_total", end="trained") == 1
    assert play.metric("reprise_problems", pool="unseen") == 2
    assert play.metric("reprise_tasks_in_flight") == 0
    lag = play.metric("reprise_events_lag_seconds")
    assert lag is not None
    assert 0 <= lag < 20


async def test_a_data_file_that_changed_ends_the_service(play: Play) -> None:
    def answer(event: EventRecord) -> list[Command]:
        if isinstance(event, Joined):
            play.config.data.train.write_text("changed\n")
            return [issue(1)]
        return []

    with pytest.raises(DataError, match="line 1 is no longer problem 'a'"):
        await play.run(answer, joined(0))


async def test_a_broker_that_goes_away_ends_the_service_with_its_name(
    tmp_path: Path, topics: Topics
) -> None:
    with EmbeddedBroker(tmp_path / "broker.log") as broker:
        section = {
            "bootstrap_servers": broker.bootstrap_servers,
            "idempotence": False,
            "fetch_wait": EMBEDDED_FETCH_WAIT,
            "replication_factor": 1,
        }
        play = Play(tmp_path, topics, section)
        play.kafka = Kafka(play.config.kafka, wait=1.0)
        await play.create_topics()
        serving = asyncio.create_task(play.service(nothing).run())
        await play.core.reached(1)
        broker.stop()
        with pytest.raises(BrokerError):
            await asyncio.wait_for(serving, 30)


def test_the_process_refuses_bad_input_in_one_line_with_2(
    tmp_path: Path, topics: Topics, kafka_section: dict[str, Any]
) -> None:
    def run(directory: Path) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "scheduler", "--run-dir", str(directory)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "Traceback" not in done.stderr
        return done.returncode, done.stderr.strip().splitlines()[-1]

    code, line = run(tmp_path / "none")
    assert code == 2
    assert f"{tmp_path / 'none' / 'config.yaml'}: no such file" in line

    play = Play(tmp_path, topics, kafka_section)
    play.config.data.train.write_text('{"id": "a", "prompt": "x"}\n')
    code, line = run(play.run_dir.root)
    assert code == 2
    assert "train.jsonl: line 1: answer: is missing" in line

    raw = yaml.safe_load(play.run_dir.config.read_text())
    raw["kafka"] = {}
    play.run_dir.config.write_text(yaml.safe_dump(raw))
    code, line = run(play.run_dir.root)
    assert code == 2
    assert "kafka.bootstrap_servers: is `embedded`" in line

    (play.run_dir.root / "run.json").unlink()
    code, line = run(play.run_dir.root)
    assert code == 2
    assert "run.json: cannot be read" in line
