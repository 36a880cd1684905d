"""The actor's service over a real broker, with an engine that the test holds in its hand."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import pytest

from actors.engine import EngineDead, LoadFailed, Request, Sampled
from actors.service import Actor
from actors.simulated import SimulatedEngine
from protocol.codec import encode
from protocol.kafka import Kafka
from protocol.messages import (
    EngineDied,
    Heartbeat,
    Held,
    Joined,
    Outcome,
    Rejoin,
    Released,
    RunEnded,
    Started,
)
from protocol.topics import Topics
from protocol.versions import Version
from tests.actors.world import World, world

V0, V1, V2 = Version(0, 0), Version(0, 1), Version(0, 2)
MakeWorld = Callable[..., AbstractAsyncContextManager[World]]


class HeldEngine(SimulatedEngine):
    """Completions come when the test says so; everything else is the simulated engine's."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gates: dict[str, asyncio.Event] = {}
        self.cancelled: list[str] = []
        self.death: Exception | None = None

    async def generate(self, request: Request) -> list[Sampled]:
        gate = self.gates[request.id] = asyncio.Event()
        try:
            await gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.id)
            raise
        if self.death is not None:
            raise self.death
        return await super().generate(request)


@pytest.fixture
def make_world(
    kafka: Kafka, topics: Topics, tmp_path: Path, kafka_section: dict[str, Any]
) -> MakeWorld:
    return partial(world, kafka, topics, tmp_path, kafka_section=kafka_section)


@asynccontextmanager
async def acting(
    made: World, kind: type[SimulatedEngine] = SimulatedEngine
) -> AsyncIterator[tuple[Any, asyncio.Task[int]]]:
    """An actor on this loop; the end of the block ends the run."""
    engine = kind(made.config, "actor-0")
    serving = asyncio.create_task(Actor(made.config, made.run, "actor-0", engine).run())
    try:
        yield engine, serving
        await made.control(RunEnded(reason="finished"))
        await asyncio.wait_for(serving, 20)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def test_a_group_is_rolled_out_graded_sent_and_reported(make_world: MakeWorld) -> None:
    async with make_world() as made, acting(made):
        await made.publish(V0)
        joined = await made.next(Joined)
        assert (joined.slots, joined.version) == (2, V0)
        await made.assign(joined)
        task = await made.task(joined.actor, V0)
        assert (await made.next(Started)).task == task.id
        group, raw = await made.group()
        outcome = await made.next(Outcome)
    assert (group.task, group.attempt, group.problem) == (task.id, 1, task.problem)
    assert [c.reward for c in group.completions] == outcome.rewards == outcome.correct
    assert set(outcome.rewards) <= {0.0, 1.0}
    # The simulated engine's texts are five letters and an end token.
    assert outcome.lengths == [c.length for c in group.completions] == [6] * 4
    assert (outcome.oldest, outcome.newest) == (V0, V0)
    assert outcome.group is not None
    assert outcome.group.digest == hashlib.sha256(raw).digest()


async def test_send_decides_what_becomes_of_the_tokens(make_world: MakeWorld) -> None:
    async with (
        make_world(actors={"slots": 1, "engine": {"texts": ["right"]}}) as made,
        acting(made),
    ):
        await made.publish(V0)
        joined = await made.next(Joined)
        await made.assign(joined)
        sent = {}
        for send in ("mixed", "all", "none"):
            await made.task(joined.actor, V0, send=send)
            sent[send] = (await made.next(Outcome)).group is not None
    assert sent == {"mixed": False, "all": True, "none": False}


async def test_only_the_own_partition_is_read_and_only_what_is_addressed_and_new(
    make_world: MakeWorld,
) -> None:
    async with make_world() as made:
        # Left behind by an actor that had the partition before.
        await made.task("actor-9-dead", V0, partition=2)
        async with acting(made, HeldEngine) as (engine, _):
            await made.publish(V0)
            joined = await made.next(Joined)
            await made.assign(joined, partition=2)
            await made.task(joined.actor, V0, partition=1)
            await made.task("actor-9-dead", V0, partition=2)
            mine = await made.task(joined.actor, V0, partition=2)
            await made.producer.send(made.topics.tasks, mine, partition=2)
            marker = await made.task(joined.actor, V0, partition=2)
            assert (await made.next(Started)).task == mine.id
            assert (await made.next(Started)).task == marker.id
            assert set(engine.gates) == {mine.group, marker.group}


async def test_a_task_waits_for_newer_weights_and_goes_back_when_they_do_not_come(
    make_world: MakeWorld,
) -> None:
    async with make_world(waits={"weights": 1.0}) as made, acting(made):
        await made.publish(V0)
        joined = await made.next(Joined)
        await made.assign(joined)
        waiting = await made.task(joined.actor, V1)
        await made.next(Heartbeat, lambda h: h.state == "waiting_for_weights")
        await made.publish(V1)
        outcome = await made.next(Outcome)
        assert (outcome.task, outcome.oldest) == (waiting.id, V1)
        too_new = await made.task(joined.actor, Version(7, 0))
        released = await made.next(Released)
        assert released.attempts == [Held(too_new.id, 1)]


async def test_new_weights_give_back_what_they_make_useless(make_world: MakeWorld) -> None:
    async with make_world() as made, acting(made, HeldEngine) as (engine, _):
        await made.publish(V0)
        joined = await made.next(Joined)
        await made.assign(joined)
        running = await made.task(joined.actor, V0)
        evaluation = await made.task(joined.actor, V0, purpose="eval", exact=True, send="none")
        queued = await made.task(joined.actor, V0)
        ahead = await made.task(joined.actor, V1)
        await made.next(Started)
        await made.next(Started)
        await made.publish(V1)
        released = await made.next(Released)
        assert {h.task for h in released.attempts} == {running.id, evaluation.id, queued.id}
        assert sorted(engine.cancelled) == sorted([running.group, evaluation.group])
        assert (await made.next(Started)).task == ahead.id
        # Late work for weights that are gone goes back at once.
        late = await made.task(joined.actor, V0)
        assert (await made.next(Released)).attempts == [Held(late.id, 1)]
        assert engine.loads == [V0, V1]


async def test_after_new_weights_gave_work_back_the_scheduler_hears_at_once(
    make_world: MakeWorld,
) -> None:
    async with (
        make_world(waits={"heartbeat": 120.0, "lease": 300.0}) as made,
        acting(made, HeldEngine),
    ):
        await made.publish(V0)
        joined = await made.next(Joined)
        await made.assign(joined)
        await made.task(joined.actor, V0)
        await made.next(Started)
        await made.publish(V1)
        await made.next(Heartbeat)
        kinds = [type(event) for event in made.events]
        assert kinds == [Released]


async def test_with_lag_an_update_in_mid_generation_shows_in_the_spans(
    make_world: MakeWorld,
) -> None:
    async with (
        make_world(run={"max_lag": 1}, actors={"engine": {"seconds": 2.0}}) as made,
        acting(made),
    ):
        await made.publish(V0)
        joined = await made.next(Joined)
        await made.assign(joined)
        await made.task(joined.actor, V0)
        await made.next(Started)
        await made.publish(V1)
        group, _ = await made.group()
        outcome = await made.next(Outcome)
    assert (outcome.oldest, outcome.newest) == (V0, V1)
    assert [s.version for s in group.completions[0].spans] == [V0, V1]


async def test_heartbeats_name_state_version_and_what_is_held(make_world: MakeWorld) -> None:
    async with make_world() as made, acting(made, HeldEngine) as (engine, _):
        await made.publish(V0)
        joined = await made.next(Joined)
        idle = await made.next(Heartbeat, lambda h: h.state == "idle")
        assert (idle.actor, idle.version, idle.held) == (joined.actor, V0, [])
        await made.assign(joined)
        task = await made.task(joined.actor, V0)
        await made.next(Started)
        busy = await made.next(Heartbeat, lambda h: bool(h.held))
        assert (busy.state, busy.held) == ("generating", [Held(task.id, 1)])
        engine.gates[task.group].set()
        await made.next(Outcome)
        done = await made.next(Heartbeat, lambda h: h.held == [])
        assert done.tokens >= 4 * 5
        assert done.seconds["generating"] > 0
        # An unchanged list is left out, save on every tenth.
        quiet = [(await made.next(Heartbeat)).held for _ in range(12)]
        assert quiet.count([]) <= 2
        assert quiet.count(None) >= 10


async def test_a_heartbeat_never_lacks_what_was_started_and_has_not_ended(
    make_world: MakeWorld,
) -> None:
    async with (
        make_world(
            actors={"slots": 8, "engine": {"seconds": 0.02}}, waits={"heartbeat": 0.02}
        ) as made,
        acting(made),
    ):
        await made.publish(V0)
        joined = await made.next(Joined)
        await made.assign(joined)
        for _ in range(60):
            await made.task(joined.actor, V0, group_size=2)
        log: list[Any] = []
        while sum(isinstance(e, Outcome) for e in log) < 60:
            await made.read()
            log += made.events
            made.events.clear()
    open_now: set[str] = set()
    checked = 0
    for event in log:
        if isinstance(event, Started):
            open_now.add(event.task)
        elif isinstance(event, Outcome):
            open_now.discard(event.task)
        elif isinstance(event, Heartbeat) and event.held is not None:
            assert open_now <= {h.task for h in event.held}
            checked += 1
    assert checked > 5


async def test_whatever_is_wrong_with_one_prompt_is_a_failed_outcome(
    make_world: MakeWorld,
) -> None:
    async with (
        make_world(
            rollout={"max_prompt_tokens": 10},
            grading={"rewards": [{"name": "tests.actors.graders:misbehaving"}], "workers": 1},
            actors={"engine": {"texts": ["nan"]}},
        ) as made,
        acting(made),
    ):
        await made.publish(V0)
        joined = await made.next(Joined)
        await made.assign(joined)
        await made.task(joined.actor, V0, prompt="x" * 11)
        long = await made.next(Outcome)
        await made.task(joined.actor, V0)
        ungraded = await made.next(Outcome)
    assert (long.status, ungraded.status) == ("failed", "failed")
    assert "rollout.max_prompt_tokens (10)" in long.why
    assert "0 of 4 completions graded, 4 needed" in ungraded.why
    assert (ungraded.rewards, ungraded.group) == ([], None)


async def test_a_group_above_the_size_limit_is_a_failed_outcome(
    make_world: MakeWorld, kafka_section: dict[str, Any]
) -> None:
    small = {**kafka_section, "max_message_bytes": 65536}
    async with make_world(kafka_section=small) as made, acting(made):
        await made.publish(V0)
        joined = await made.next(Joined)
        await made.assign(joined)
        await made.task(joined.actor, V0, group_size=1500)
        outcome = await made.next(Outcome)
    assert outcome.status == "failed"
    assert "kafka.max_message_bytes" in outcome.why


async def test_a_task_that_cannot_be_decoded_is_a_failed_outcome(make_world: MakeWorld) -> None:
    async with make_world() as made, acting(made):
        await made.publish(V0)
        joined = await made.next(Joined)
        await made.assign(joined)
        good = await made.task(joined.actor, V0)
        body = {**msgpack.unpackb(encode(good)), "id": "0-99", "temperature": -1.0}
        for change in ({"attempt": 0}, {"actor": "another"}, {"id": 7}, {}):
            raw = msgpack.packb({**body, **change})
            await made.producer.send_raw(made.topics.tasks, raw, partition=1)
        outcome = await made.next(Outcome, lambda o: o.status == "failed")
        assert (outcome.actor, outcome.task, outcome.attempt) == (joined.actor, "0-99", 1)
        assert "temperature" in outcome.why
        await made.task(joined.actor, V0)
        outcomes = [await made.next(Outcome) for _ in range(2)]
        assert [o.status for o in outcomes] == ["ok", "ok"]


async def test_a_given_up_actor_drops_everything_and_joins_as_new(make_world: MakeWorld) -> None:
    async with make_world() as made, acting(made, HeldEngine) as (engine, _):
        await made.publish(V0)
        first = await made.next(Joined)
        await made.assign(first)
        lost = await made.task(first.actor, V0)
        await made.next(Started)
        await made.control(Rejoin(actor=first.actor))
        second = await made.next(Joined)
        assert second.actor != first.actor
        assert engine.cancelled == [lost.group]
        await made.assign(second)
        again = await made.task(second.actor, V0, id=lost.id, attempt=2)
        assert (await made.next(Started)).attempt == again.attempt
        engine.gates[again.group].set()
        assert (await made.next(Outcome)).actor == second.actor


async def test_the_end_of_the_run_releases_what_is_held(make_world: MakeWorld) -> None:
    async with make_world() as made, acting(made, HeldEngine) as (_, serving):
        await made.publish(V0)
        joined = await made.next(Joined)
        await made.assign(joined)
        tasks = [await made.task(joined.actor, V0) for _ in range(3)]
        await made.next(Started)
        await made.control(RunEnded(reason="finished"))
        assert await asyncio.wait_for(serving, 20) == 0
        released = await made.next(Released)
        assert {h.task for h in released.attempts} == {t.id for t in tasks}


async def test_an_actor_that_starts_late_leaves_before_it_starts_an_engine(
    make_world: MakeWorld,
) -> None:
    class NoEngine(SimulatedEngine):
        async def start(self) -> None:
            raise AssertionError("started")

    async with make_world() as made:
        await made.control(RunEnded(reason="finished"))
        actor = Actor(made.config, made.run, "actor-0", NoEngine(made.config, "actor-0"))
        assert await asyncio.wait_for(actor.run(), 20) == 0


async def test_a_dead_engine_names_what_it_held_and_the_actor_leaves(
    make_world: MakeWorld,
) -> None:
    async with make_world() as made, acting(made, HeldEngine) as (engine, serving):
        await made.publish(V0)
        joined = await made.next(Joined)
        await made.assign(joined)
        tasks = [await made.task(joined.actor, V0) for _ in range(3)]
        await made.next(Started)
        await made.next(Started)
        engine.death = EngineDead("out of memory " * 1000)
        engine.gates[tasks[0].group].set()
        assert await asyncio.wait_for(serving, 20) == 1
        died = await made.next(EngineDied)
        assert {h.task for h in died.attempts} == {tasks[0].id, tasks[1].id}
        assert "out of memory" in died.error
        assert (await made.next(Released)).attempts == [Held(tasks[2].id, 1)]


async def test_an_engine_that_dies_while_idle_is_noticed(make_world: MakeWorld) -> None:
    class Mortal(SimulatedEngine):
        gone = False

        @property
        def dead(self) -> bool:
            return self.gone

    async with make_world() as made, acting(made, Mortal) as (engine, serving):
        await made.publish(V0)
        await made.next(Joined)
        engine.gone = True
        assert await asyncio.wait_for(serving, 20) == 1
        assert (await made.next(EngineDied)).attempts == []


async def test_an_engine_without_a_token_in_time_counts_as_dead(make_world: MakeWorld) -> None:
    async with (
        make_world(actors={"engine": {"silent": True}}, waits={"token": 0.5}) as made,
        acting(made) as (_, serving),
    ):
        await made.publish(V0)
        joined = await made.next(Joined)
        await made.assign(joined)
        task = await made.task(joined.actor, V0)
        assert await asyncio.wait_for(serving, 20) == 1
        died = await made.next(EngineDied)
        assert died.attempts == [Held(task.id, 1)]
        assert "waits.token" in died.error


async def test_damaged_weights_are_never_loaded(make_world: MakeWorld) -> None:
    async with (
        make_world(waits={"loading": 1.0}) as made,
        acting(made) as (engine, serving),
    ):
        await made.publish(V0)
        await made.next(Joined)
        await made.publish(V1, files={"model.safetensors": "0" * 64})
        assert await asyncio.wait_for(serving, 20) == 1
        assert engine.loads == [V0]


class FailingEngine(SimulatedEngine):
    """V1 cannot be loaded; the test says when that comes out."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.loading = asyncio.Event()
        self.fail = asyncio.Event()

    async def load(self, path: Path, version: Version) -> None:
        if version == V1:
            self._running.clear()
            self.loading.set()
            await self.fail.wait()
            raise LoadFailed("no such file")
        await super().load(path, version)


@pytest.mark.parametrize("newer_first", [True, False])
async def test_weights_that_are_removed_while_they_are_loaded_give_way_to_newer_ones(
    make_world: MakeWorld, newer_first: bool
) -> None:
    async with make_world() as made, acting(made, FailingEngine) as (engine, _):
        await made.publish(V0)
        joined = await made.next(Joined)
        await made.assign(joined)
        directory = await made.publish(V1)
        await engine.loading.wait()
        # For V1, and useless by the time it could start.
        late = await made.task(joined.actor, V1)
        await made.next(Heartbeat, lambda h: h.state == "loading")
        if newer_first:
            await made.publish(V2)
            await asyncio.sleep(0.5)
            engine.fail.set()
        else:
            shutil.rmtree(directory)
            engine.fail.set()
            await asyncio.sleep(0.5)
            await made.publish(V2)
        assert (await made.next(Released)).attempts == [Held(late.id, 1)]
        await made.next(Heartbeat, lambda h: h.version == V2)
        await made.task(joined.actor, V2)
        assert (await made.next(Outcome)).oldest == V2
        assert engine.loads == [V0, V2]


async def test_weights_that_lie_complete_and_cannot_be_loaded_end_the_engine(
    make_world: MakeWorld,
) -> None:
    async with make_world() as made, acting(made, FailingEngine) as (engine, serving):
        engine.fail.set()
        await made.publish(V0)
        await made.next(Joined)
        await made.publish(V1)
        assert await asyncio.wait_for(serving, 20) == 1
        assert "no such file" in (await made.next(EngineDied)).error


async def test_the_newest_weights_are_loaded_and_older_ones_passed_over(
    make_world: MakeWorld,
) -> None:
    async with make_world() as made:
        for version in (V0, V2, V1):
            await made.publish(version)
        async with acting(made) as (engine, _):
            assert (await made.next(Joined)).version == V2
            assert engine.loads == [V2]


async def spawn(made: World, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "actors", "--run-dir", str(made.run.root), "--name", "actor-0"),
        *("--engine", "actors.simulated:SimulatedEngine", *arguments),
        stderr=asyncio.subprocess.PIPE,
    )


async def test_sigterm_drains_and_the_process_leaves_with_zero(make_world: MakeWorld) -> None:
    async with make_world(actors={"slots": 1, "engine": {"seconds": 1.0}}) as made:
        process = await spawn(made)
        await made.publish(V0)
        joined = await made.next(Joined)
        await made.assign(joined)
        running = await made.task(joined.actor, V0)
        queued = await made.task(joined.actor, V0)
        await made.next(Started)
        port = json.loads((made.run.processes / "actor-0.json").read_text())["port"]
        url = f"http://127.0.0.1:{port}"
        health = json.loads(await asyncio.to_thread(_get, f"{url}/healthz"))
        assert (health["alive"], health["state"], health["version"]) == (True, "generating", "0.0")
        assert "reprise_actor_tokens_total" in await asyncio.to_thread(_get, f"{url}/metrics")
        os.kill(process.pid, signal.SIGTERM)
        assert (await made.next(Released)).attempts == [Held(queued.id, 1)]
        assert (await made.next(Outcome)).task == running.id
        _, errors = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 0, errors.decode()


async def test_an_idle_actor_says_that_it_leaves_and_gives_back_what_still_comes(
    make_world: MakeWorld,
) -> None:
    async with make_world(waits={"heartbeat": 20.0, "lease": 60.0}) as made:
        process = await spawn(made)
        await made.publish(V0)
        joined = await made.next(Joined)
        await made.assign(joined)
        # The partition is read from here on.
        await made.task(joined.actor, V0)
        await made.next(Outcome)
        os.kill(process.pid, signal.SIGTERM)
        assert (await made.next(Heartbeat)).state == "draining"
        late = await made.task(joined.actor, V0)
        assert (await made.next(Released)).attempts == [Held(late.id, 1)]
        assert (await made.next(Heartbeat)).state == "draining"
        await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 0
        assert not [e for e in made.events if isinstance(e, Started) and e.task == late.id]


async def test_no_heartbeat_of_a_draining_actor_says_anything_else(
    make_world: MakeWorld,
) -> None:
    async with make_world(actors={"engine": {"seconds": 1.0}}, waits={"heartbeat": 0.02}) as made:
        process = await spawn(made)
        await made.publish(V0)
        joined = await made.next(Joined)
        await made.assign(joined)
        await made.task(joined.actor, V0)
        await made.next(Started)
        os.kill(process.pid, signal.SIGTERM)
        await asyncio.wait_for(process.communicate(), 20)
        await made.next(Outcome)
        await made.read()
        states = [e.state for e in made.events if isinstance(e, Heartbeat)]
        assert set(states[states.index("draining") :]) == {"draining"}


async def test_without_a_broker_the_process_says_so_and_leaves_with_one(
    make_world: MakeWorld,
) -> None:
    async with make_world() as made:
        text = made.run.config.read_text()
        servers = made.config.kafka.bootstrap_servers
        made.run.config.write_text(
            text.replace(servers, "127.0.0.1:1").replace("kafka: 10.0", "kafka: 1.0")
        )
        process = await spawn(made)
        _, errors = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 1
        assert "kafka.bootstrap_servers" in errors.decode().splitlines()[-1]


async def test_a_reward_that_cannot_be_imported_is_bad_input(make_world: MakeWorld) -> None:
    async with make_world(grading={"rewards": [{"name": "nowhere:f"}]}) as made:
        process = await spawn(made)
        _, errors = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 2
        last = errors.decode().splitlines()[-1]
        assert "grading.rewards[0].name" in last


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())
