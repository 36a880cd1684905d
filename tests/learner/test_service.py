"""The learner's process on a real broker: weights out, batches in, every group's end told.

The test plays scheduler and actors. The model is tiny and real where a test is about training;
elsewhere a simulated trainer stands in.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from protocol.codec import encode
from protocol.config import Config, dump_config
from protocol.kafka import Kafka, Producer, Reader, Record
from protocol.messages import (
    BatchGroup,
    BatchReleased,
    EventRecord,
    GroupRef,
    LearnerReady,
    RewardGroup,
    RunEnded,
    StepCompleted,
    StopRequested,
    WeightsPublished,
)
from protocol.rundir import RunDir, RunIdentity
from protocol.topics import Topics, create_or_verify
from protocol.versions import Version
from tests.learner.tiny import make_config, make_group, make_model, quiet_environment

REPOSITORY = Path(__file__).parents[2]
SIMULATED = "tests.learner.simulated:Simulated"
START_SECONDS = 90.0
ANSWER_SECONDS = 30.0


class Stage:
    """A learner process and the test's own clients on its topics."""

    def __init__(self, config: Config, topics: Topics, directory: Path) -> None:
        self.config = config
        self.topics = topics
        self.run_dir = RunDir(directory)
        self.log = directory.with_suffix(".log")
        self.producer: Producer
        self.events: Reader
        self.weights: Reader
        self._process: subprocess.Popen[bytes]

    async def open(self, kafka: Kafka) -> None:
        admin = await kafka.admin()
        await create_or_verify(admin, self.topics.specs(self.config))
        await admin.close()
        self.producer = await kafka.producer()
        self.events = await kafka.reader(self.topics.events, EventRecord)
        self.weights = await kafka.reader(self.topics.weights, WeightsPublished)
        for reader in (self.events, self.weights):
            await reader.assign(await reader.ends())
        self.run_dir.create(RunIdentity(self.topics.run, self.topics.incarnation))
        dump_config(self.config, self.run_dir.config)

    def start(self, *arguments: str) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "learner", "--run-dir", str(self.run_dir.root), *arguments],
                cwd=REPOSITORY,
                env=quiet_environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    async def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        for client in (self.producer, self.events, self.weights):
            await client.stop()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    async def exit_code(self) -> int:
        return await asyncio.to_thread(self._process.wait, ANSWER_SECONDS)

    async def read(self, reader: Reader, wait: float = ANSWER_SECONDS) -> Any:
        """The next message; fails at once if the learner ended."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        while loop.time() < deadline:
            records: list[Record] = await reader.read(0.2, max_records=1)
            if records:
                return records[0].message
            code = self._process.poll()
            assert code is None, f"the learner left with {code}: {self.log.read_text()[-3000:]}"
        raise AssertionError(f"no message within {wait} s: {self.log.read_text()[-3000:]}")

    async def ready(self) -> WeightsPublished:
        """The first weights, which come before `LearnerReady`."""
        published = await self.read(self.weights, START_SECONDS)
        ready = await self.read(self.events)
        assert isinstance(ready, LearnerReady)
        assert ready.version == published.version
        assert ready.ranks == self.config.learner.ranks
        return published

    async def send_group(self, group: RewardGroup, partition: int = 0) -> BatchGroup:
        """As an actor: the group on its topic; as the scheduler: its name in a batch."""
        raw = encode(group)
        sent = await (await self.producer.send_raw(self.topics.groups, raw, partition=partition))
        ref = GroupRef(partition, sent.offset, hashlib.sha256(raw).digest())
        return BatchGroup(group.task, group.attempt, ref)

    async def release(self, version: Version, groups: list[BatchGroup]) -> None:
        batch = BatchReleased(version=version, groups=groups, planned=len(groups))
        await (await self.producer.send(self.topics.batches, batch, partition=0))

    async def end(self) -> None:
        ended = RunEnded(reason="finished")
        await (await self.producer.send(self.topics.batches, ended, partition=0))

    def get(self, path: str) -> str:
        facts = json.loads((self.run_dir.processes / "learner.json").read_text())
        with urllib.request.urlopen(f"http://127.0.0.1:{facts['port']}/{path}") as answer:
            text: str = answer.read().decode()
            return text


Opener = Callable[..., Any]


@pytest.fixture
def stage(kafka: Kafka, kafka_section: dict[str, Any], topics: Topics, tmp_path: Path) -> Opener:
    """Opens a stage: `async with stage(model, learner={…}) as s`; `taken` generations are gone."""

    @asynccontextmanager
    async def opened(
        model: Path, *arguments: str, taken: int = 0, **sections: Any
    ) -> AsyncIterator[Stage]:
        config = make_config(
            model,
            **{
                "kafka": kafka_section,
                "actors": {"max": 2},
                "learner": {
                    "micro_batch_tokens": 60,
                    "warmup_steps": 0,
                    "deepspeed": {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
                    **sections.pop("learner", {}),
                },
                "waits": {"group": 2.0, "kafka": 15.0, **sections.pop("waits", {})},
                **sections,
            },
        )
        made = Stage(config, topics, tmp_path / "run")
        await made.open(kafka)
        for generation in range(taken):
            (made.run_dir.generations / str(generation)).mkdir()
        made.start(*arguments)
        try:
            yield made
        finally:
            await made.close()

    return opened


def load(directory: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(directory).state_dict())


def groups_at(version: Version) -> list[RewardGroup]:
    return [
        make_group(1, [1.0, 0.0, 0.0, 1.0], [1, 9, 4, 2], prompt_length=3, version=version),
        make_group(2, [0.0, 0.0, 1.0, 0.0], [3, 2, 11, 12], prompt_length=5, version=version),
    ]


@pytest.mark.parametrize("ranks", [1, 2])
async def test_two_steps_from_ready_to_the_exported_model(
    stage: Opener, tmp_path: Path, ranks: int
) -> None:
    model = make_model(tmp_path / "model", tied=ranks == 2)
    async with stage(model, learner={"ranks": ranks}) as s:
        assert (await s.ready()).version == Version(0, 0)
        first = load(s.run_dir.weights / "0.0")
        base = load(model)
        assert all(torch.equal(first[name], base[name]) for name in base)

        # Step 0: two groups to train, and one for each way of being refused.
        now = Version(0, 0)
        batch = [await s.send_group(g, partition=i) for i, g in enumerate(groups_at(now))]
        stale = await s.send_group(
            make_group(3, [1.0, 0.0], [2, 2], prompt_length=2, version=Version(5, 0))
        )
        ahead = await s.send_group(
            make_group(4, [1.0, 0.0], [2, 2], prompt_length=2, version=Version(0, 1))
        )
        there = await s.send_group(make_group(5, [1.0, 0.0], [2, 2], prompt_length=2))
        changed = BatchGroup("0-5", 1, GroupRef(0, there.ref.offset, bytes(32)))
        lost = BatchGroup("0-6", 1, GroupRef(0, 10_000, bytes(32)))
        broken = await (await s.producer.send_raw(s.topics.groups, b"no group", partition=0))
        undecodable = BatchGroup("0-7", 1, GroupRef(0, broken.offset, bytes(32)))
        await s.release(now, [*batch, stale, ahead, changed, lost, undecodable])

        published = await s.read(s.weights)
        completed = await s.read(s.events)
        assert published.version == Version(0, 1)
        assert isinstance(completed, StepCompleted)
        assert completed.version == now
        ends = {end.task: (end.end, end.why) for end in completed.ends}
        assert len(ends) == len(completed.ends) == 7
        assert ends["0-1"] == ends["0-2"] == ("trained", "")
        assert ends["5-3"] == ("stale", "other_generation")
        assert ends["0-4"] == ("impure", "too_new")
        assert ends["0-5"][0] == ends["0-6"][0] == ends["0-7"][0] == "failed"
        assert "other content than its outcome says" in ends["0-5"][1]
        assert "not found within 2 s" in ends["0-6"][1]
        assert "undecodable" in ends["0-7"][1]
        assert_metrics(completed.metrics)

        # Step 1: nothing left to train; the step number rises and weights are published anyway.
        await s.release(Version(0, 1), [lost])
        again = await s.read(s.weights)
        completed = await s.read(s.events)
        assert (again.version, completed.version) == (Version(0, 2), Version(0, 1))
        assert [e.end for e in completed.ends] == ["failed"]

        assert_published(s.run_dir.weights, again)
        after = {v: load(s.run_dir.weights / v) for v in ("0.1", "0.2")}
        assert any(not torch.equal(after["0.1"][name], base[name]) for name in base)
        assert all(torch.equal(after["0.1"][name], after["0.2"][name]) for name in base)
        health = json.loads(s.get("healthz"))
        assert health["alive"]
        assert health["version"] == "0.2"
        shown = s.get("metrics")
        assert 'reprise_learner_groups_total{end="trained"} 2.0' in shown
        assert 'reprise_version_step{role="learner"} 2.0' in shown

        await s.end()
        assert await s.exit_code() == 0
        exported = load(s.run_dir.model)
        assert all(torch.equal(exported[name], after["0.2"][name]) for name in base)
        assert not (s.run_dir.model / "manifest.json").exists()
        assert (s.run_dir.model / "generation_config.json").is_file()
        tokenizer = AutoTokenizer.from_pretrained(s.run_dir.model)
        original = AutoTokenizer.from_pretrained(model)
        assert tokenizer("1+2=")["input_ids"] == original("1+2=")["input_ids"]


def assert_metrics(metrics: dict[str, float]) -> None:
    """Of step 0 of the test above: two groups of four completions are trained."""
    assert set(metrics) == {
        *("loss", "entropy", "clip_share", "weight_truncated_share", "weight_mean"),
        *("weight_max_deviation", "kl_sampler", "logprob_gap_mean", "logprob_gap_max"),
        *("length_mean", "length_p95", "truncated_share", "grad_norm", "lr", "reward_mean"),
        *("mean_abs_advantage", "tokens", "prompt_tokens", "staleness_mean", "impure_trained"),
        *("seconds_wait", "seconds_assemble", "seconds_train", "seconds_publish"),
    }
    assert metrics["tokens"] == (1 + 9 + 4 + 2) + (3 + 2 + 11 + 12)
    assert metrics["prompt_tokens"] == 4 * 3 + 4 * 5
    assert metrics["reward_mean"] == pytest.approx((0.5 + 0.25) / 2)
    assert metrics["clip_share"] == metrics["staleness_mean"] == metrics["impure_trained"] == 0
    assert metrics["lr"] == 1e-3
    assert metrics["grad_norm"] > 0


def assert_published(root: Path, message: WeightsPublished) -> None:
    """The files lie under the weights root, each as the record and the manifest say."""
    directory = root / message.path
    manifest = json.loads((directory / "manifest.json").read_text())
    assert manifest["files"] == message.files
    assert {p.name for p in directory.iterdir()} == {*message.files, "manifest.json"}
    for name, digest in message.files.items():
        assert hashlib.sha256((directory / name).read_bytes()).hexdigest() == digest
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= message.files.keys()


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_stop_tells_the_scheduler_and_the_model_is_exported(
    stage: Opener, tmp_path: Path, ranks: int
) -> None:
    async with stage(tmp_path, "--trainer", SIMULATED, learner={"ranks": ranks}) as s:
        await s.ready()
        s.signal(signal.SIGTERM)
        assert await s.read(s.events) == StopRequested(sender="learner")
        await s.end()
        assert await s.exit_code() == 0
        assert (s.run_dir.model / "model.safetensors").is_file()


async def test_a_stop_without_an_answer_ends_after_the_drain(stage: Opener, tmp_path: Path) -> None:
    async with stage(tmp_path, "--trainer", SIMULATED, waits={"drain": 0.5}) as s:
        await s.ready()
        s.signal(signal.SIGTERM)
        assert await s.exit_code() == 0
        assert (s.run_dir.model / "config.json").is_file()


async def test_a_second_learner_takes_the_next_generation_and_ends_the_first(
    stage: Opener, tmp_path: Path
) -> None:
    async with stage(tmp_path, "--trainer", SIMULATED) as s:
        assert (await s.ready()).version == Version(0, 0)
        await s.release(Version(1, 0), [])
        assert await s.exit_code() == 1
        last = s.log.read_text().strip().splitlines()[-1]
        assert "found the batch of version 1.0, expected 0.0; a newer learner" in last
        s.start("--trainer", SIMULATED)
        assert (await s.ready()).version == Version(1, 0)
        await s.end()
        assert await s.exit_code() == 0


async def test_batches_of_earlier_generations_and_steps_are_ignored(
    stage: Opener, tmp_path: Path
) -> None:
    async with stage(tmp_path, "--trainer", SIMULATED, taken=3) as s:
        assert (await s.ready()).version == Version(3, 0)
        for version in ((2, 9), (3, 0), (3, 0), (2, 10), (3, 1)):
            await s.release(Version(*version), [])
        done = [(await s.read(s.events)).version for _ in range(2)]
        assert done == [Version(3, 0), Version(3, 1)]
        await s.end()
        assert await s.exit_code() == 0


async def test_a_batch_that_never_comes_has_a_deadline_with_a_name(
    stage: Opener, tmp_path: Path
) -> None:
    async with stage(tmp_path, "--trainer", SIMULATED, waits={"batch": 0.5}) as s:
        await s.ready()
        assert await s.exit_code() == 1
        last = s.log.read_text().strip().splitlines()[-1]
        assert last.startswith("error: no batch of version 0.0")
        assert "(waits.batch)" in last


async def test_no_rank_outlives_another_that_was_killed(stage: Opener, tmp_path: Path) -> None:
    async with stage(tmp_path, "--trainer", SIMULATED, learner={"ranks": 2}) as s:
        await s.ready()
        ranks = await asyncio.to_thread(children, s._process.pid)
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        assert await s.exit_code() == 1
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sorted(int(child) for child in listed)


async def test_a_model_that_is_not_there_is_one_line_and_exit_code_two(
    stage: Opener, tmp_path: Path
) -> None:
    async with stage(tmp_path / "nowhere") as s:
        assert await s.exit_code() == 2
        text = s.log.read_text()
        assert text.strip().splitlines()[-1] == (
            f"error: model.path: {tmp_path / 'nowhere'}: no such directory"
        )
        assert "Traceback" not in text
