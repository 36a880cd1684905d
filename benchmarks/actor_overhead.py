"""What the pipeline costs an actor: its rollout tokens/s over those of the same engine driven
directly, with the same requests, in the same run.

The engine is real vLLM on the quickstart model; the actor is the real service, fed over a real
broker: it reads tasks, samples, grades in child processes, sends the groups with variance and
reports outcomes. Rounds of both kinds alternate, each kind coming first in turn, and the median of
the pairs' ratios counts, so that a slow moment of the machine hits both. `--json` prints one JSON
object as the last line.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from actors.engine import Request
from actors.service import Actor
from actors.vllm_engine import VllmEngine
from deploy.local.broker import EmbeddedBroker
from protocol.config import Config, load_config
from protocol.kafka import Kafka
from protocol.loops import LoopThread
from protocol.messages import (
    Assigned,
    EventRecord,
    Joined,
    Outcome,
    RunEnded,
    Task,
    WeightsPublished,
)
from protocol.rundir import RunDir, RunIdentity
from protocol.topics import Topics, create_or_verify
from protocol.versions import Version

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart"
VERSION = Version(0, 0)
PARTITION = 1
TIMEOUT = 600.0


class Feeder:
    """The scheduler's and the learner's part, on a thread of its own."""

    def __init__(self, config: Config, topics: Topics) -> None:
        self._config = config
        self._topics = topics
        self._kafka = Kafka(config.kafka, wait=config.waits.kafka, client_id="feeder")
        self._round = 0

    async def start(self) -> None:
        admin = await self._kafka.admin()
        await create_or_verify(admin, self._topics.specs(self._config))
        await admin.close()
        self._producer = await self._kafka.producer()
        self._events = await self._kafka.reader(self._topics.events, EventRecord)
        await self._events.assign({0: 0})

    async def publish(self, directory: Path) -> None:
        """Announce the weights in `directory`."""
        files = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in directory.iterdir()}
        message = WeightsPublished(version=VERSION, path=str(directory), files=files, bytes=0)
        await self._producer.send(self._topics.weights, message)

    async def join(self) -> str:
        """Wait for the actor and give it its partition; its id."""
        (joined,) = await self._collect(Joined, 1)
        await self._producer.send(
            self._topics.tasks, Assigned(actor=joined.actor, partition=PARTITION), partition=0
        )
        return str(joined.actor)

    async def round(self, actor: str, problems: list[dict[str, str]]) -> tuple[int, float]:
        """Have all problems rolled out; completion tokens and seconds."""
        self._round += 1
        began = time.perf_counter()
        for number, problem in enumerate(problems):
            task = self._task(actor, f"{self._round}-{number}", problem)
            await self._producer.send(self._topics.tasks, task, partition=PARTITION)
        outcomes = await self._collect(Outcome, len(problems))
        seconds = time.perf_counter() - began
        if failed := [o.why for o in outcomes if o.status != "ok"]:
            raise RuntimeError(f"{len(failed)} tasks failed, the first: {failed[0]}")
        return sum(sum(o.lengths) for o in outcomes), seconds

    async def end(self) -> None:
        await self._producer.send(self._topics.tasks, RunEnded(reason="finished"), partition=0)
        await self._producer.flush()

    async def stop(self) -> None:
        await self._events.stop()
        await self._producer.stop()

    def _task(self, actor: str, number: str, problem: dict[str, str]) -> Task:
        rollout = self._config.rollout
        return Task(
            id=number,
            attempt=1,
            actor=actor,
            problem=problem["id"],
            purpose="train",
            reason="unseen",
            version=VERSION,
            group_size=rollout.group_size,
            temperature=rollout.temperature,
            max_tokens=rollout.max_tokens,
            seed=0,
            prompt=problem["prompt"],
            answer=problem["answer"],
            data_source=problem["data_source"],
        )

    async def _collect(self, kind: type[Any], count: int) -> list[Any]:
        found: list[Any] = []
        deadline = time.monotonic() + TIMEOUT
        while len(found) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(found)} of {count} {kind.__name__} came")
            records = await self._events.read(0.5)
            found += [r.message for r in records if isinstance(r.message, kind)]
        return found


async def direct_round(
    engine: VllmEngine, round_number: int, problems: list[dict[str, str]]
) -> tuple[int, float]:
    """The same requests straight into vLLM; completion tokens and seconds."""
    rollout = engine.config.rollout
    began = time.perf_counter()

    async def one(number: int, prompt: str) -> int:
        tokens = engine.encode(prompt, rollout.max_tokens)
        request = Request(
            f"direct-{round_number}-{number}",
            tokens,
            rollout.group_size,
            rollout.temperature,
            rollout.max_tokens,
        )
        stream = engine._llm.generate(
            {"type": "token", "prompt_token_ids": tokens}, engine._sampling(request), request.id
        )
        (output,) = [output async for output in stream]
        return sum(len(completion.token_ids) for completion in output.outputs)

    counts = await asyncio.gather(*(one(i, p["prompt"]) for i, p in enumerate(problems)))
    return sum(counts), time.perf_counter() - began


async def measure(directory: Path, servers: str, tasks: int, pairs: int) -> dict[str, Any]:
    """Alternate rounds of both kinds; figures for the JSON."""
    run = RunDir(directory / "run")
    run.create(RunIdentity("bench", 1))
    write_config(run.config, servers)
    config = load_config(run.config)
    weights = run.weights / str(VERSION)
    shutil.copytree(QUICKSTART / "model", weights)
    lines = (QUICKSTART / "train.jsonl").read_text(encoding="utf-8").splitlines()
    # Evenly over the file, so over all kinds of problems.
    problems = [json.loads(line) for line in lines[:: max(1, len(lines) // tasks)]][:tasks]

    thread = LoopThread("feeder")
    feeder = Feeder(config, run.identity.topics)
    await thread.run(feeder.start())
    engine = VllmEngine(config, "actor-0")
    serving = asyncio.create_task(Actor(config, run, "actor-0", engine).run())
    await thread.run(feeder.publish(weights))
    actor = await thread.run(feeder.join())
    # Both ways once unmeasured: the engine's first steps are slow.
    await thread.run(feeder.round(actor, problems))
    await direct_round(engine, 0, problems)
    rates: dict[str, list[float]] = {"pipeline": [], "direct": []}
    for number in range(1, pairs + 1):
        order = ("pipeline", "direct") if number % 2 else ("direct", "pipeline")
        for kind in order:
            if kind == "pipeline":
                tokens, seconds = await thread.run(feeder.round(actor, problems))
            else:
                tokens, seconds = await direct_round(engine, number, problems)
            rates[kind].append(tokens / seconds)
        print(f"pair {number}: pipeline {rates['pipeline'][-1]:.0f} tokens/s, "
              f"direct {rates['direct'][-1]:.0f}")  # fmt: skip
    await thread.run(feeder.end())
    code = await serving
    await thread.run(feeder.stop())
    thread.stop()
    if code:
        raise RuntimeError(f"the actor left with {code}")
    ratios = [p / d for p, d in zip(rates["pipeline"], rates["direct"], strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "pipeline_tokens_per_second": statistics.median(rates["pipeline"]),
        "direct_tokens_per_second": statistics.median(rates["direct"]),
        "tasks": tasks,
        "pairs": pairs,
    }


def write_config(path: Path, servers: str) -> None:
    """The quickstart's config on this broker."""
    raw = yaml.safe_load((QUICKSTART / "config.yaml").read_text(encoding="utf-8"))
    raw["model"]["path"] = str(QUICKSTART / "model")
    raw["data"]["train"] = str(QUICKSTART / "train.jsonl")
    raw["eval"] = []
    raw["kafka"] = {"bootstrap_servers": servers, "idempotence": False, "replication_factor": 1}
    path.write_text(yaml.safe_dump(raw), encoding="utf-8")


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", type=int, default=192, help="groups a round (default 192)")
    parser.add_argument("--pairs", type=int, default=7, help="rounds of each kind (default 7)")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="reprise-bench-") as name:
        directory = Path(name)
        with EmbeddedBroker(directory / "broker.log") as broker:
            figures = asyncio.new_event_loop().run_until_complete(
                measure(directory, broker.bootstrap_servers, arguments.tasks, arguments.pairs)
            )
    print(f"ratio {figures['ratio']:.3f} (pipeline over direct, median of {arguments.pairs} pairs)")
    if arguments.json:
        print(json.dumps(figures))
    sys.stdout.flush()
    # vLLM leaves threads behind that nothing can end.
    os._exit(0)


if __name__ == "__main__":
    main()
