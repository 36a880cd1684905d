"""Speed and size of the scheduler's core, for growing numbers of problems.

Each number of problems is measured in a process of its own. Every problem is visited once first, so
that heap, pools and dates are as full as they get (solve rates from Beta(½, ½), so that many groups
have no variance); then rounds of 512 groups of 16 completions run through `Core.apply`: selection,
issue, addresses to 8 actors, Started, Outcome, replacements, batch, StepCompleted. All times are
processor time of the one thread; rates are those of the median round. Bytes per problem are the
growth of the process's resident set from before the core was made to after the rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import statistics
import time
from array import array
from pathlib import Path
from random import Random
from typing import Any

from protocol.config import Config
from protocol.messages import (
    EventRecord,
    GroupEnd,
    GroupRef,
    Joined,
    LearnerReady,
    Outcome,
    SchedulerStarted,
    Started,
    StepCompleted,
    Tick,
)
from protocol.versions import Version
from scheduler.commands import Command, IssueTask, SendBatch
from scheduler.core import Core
from scheduler.grading import Figures
from scheduler.strategies.base import Strategy

PROMPTS, GROUP, ACTORS, SLOTS = 512, 16, 8, 128
ROUNDS, SELECTIONS = 60, 200
VISITED_AT_ONCE = 4096


def main() -> None:
    """Measure, print a table, and with --json one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    arguments = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    context = multiprocessing.get_context("spawn")
    print(
        f"{'problems':>10} {'outcomes/s':>11} {'whole cycle/s':>14} {'select 512 ms':>14} "
        f"{'p95 ms':>7} {'bytes/problem':>14} {'state MB':>9}"
    )
    for problems in arguments.problems:
        with context.Pool(1) as pool:
            figures = pool.apply(measure, (problems,))
        print(
            f"{problems:>10,} {figures['outcomes_per_second']:>11,.0f} "
            f"{figures['cycle_outcomes_per_second']:>14,.0f} {figures['select_512_ms']:>14.2f} "
            f"{figures['select_512_p95_ms']:>7.2f} {figures['bytes_per_problem']:>14.0f} "
            f"{figures['state_mb']:>9.1f}",
            flush=True,
        )
        for name, value in figures.items():
            results.setdefault(name, {})[str(problems)] = round(value, 3)
    if arguments.json:
        print(json.dumps(results))


def measure(problems: int) -> dict[str, float]:
    """All figures for one number of problems."""
    config = Config.model_validate(
        {
            "model": {"path": "model"},
            "data": {"train": "train.jsonl"},
            "run": {"steps": 1_000_000, "prompts_per_step": PROMPTS},
            "rollout": {"group_size": GROUP},
            "actors": {"slots": SLOTS},
            # Until all were visited unseen problems go first; afterwards it makes no difference.
            "strategy": {"name": "prioritized", "initial": "optimistic"},
        }
    )
    gc.collect()
    before = _resident_bytes()
    core = Core(config, problems)
    world = _World(core, problems)
    strategy = core._training.teaching.strategy
    world.step = visit_all(strategy, world.rates, world.rng)
    world.run()
    # What the world holds is not the core's.
    size = _resident_bytes() - before - 8 * problems
    selections = select_often(strategy, world)
    state = core.state()
    return {
        "outcomes_per_second": statistics.median(world.outcome_rates),
        "cycle_outcomes_per_second": statistics.median(world.cycle_rates),
        "select_512_ms": 1e3 * statistics.median(selections),
        "select_512_p95_ms": 1e3 * statistics.quantiles(selections, n=20)[-1],
        "bytes_per_problem": size / problems,
        "state_mb": _bytes_in(state) / 1e6,
    }


def visit_all(strategy: Strategy, rates: array[float], rng: Random) -> int:
    """One group of every problem; returns the step after the last."""
    step = 0
    while strategy.pools()["unseen"]:
        for problem, _ in strategy.refill(step, VISITED_AT_ONCE, frozenset()):
            strategy.observe(problem, step, _group(rates[problem], rng))
            strategy.free(problem)
        step += 1
    return step


def select_often(strategy: Strategy, world: _World) -> list[float]:
    """Seconds of one selection of 512, again and again, each problem visited in between."""
    seconds: list[float] = []
    for step in range(world.step + 1, world.step + 1 + SELECTIONS):
        start = time.thread_time()
        picks = strategy.select(step, PROMPTS, frozenset())
        seconds.append(time.thread_time() - start)
        for problem, _ in picks:
            strategy.observe(problem, step, _group(world.rates[problem], world.rng))
            strategy.free(problem)
    return seconds


class _World:
    """Actors and a learner that answer at once."""

    def __init__(self, core: Core, problems: int) -> None:
        self.rng = Random(0)
        self.rates = array("d", (self.rng.betavariate(0.5, 0.5) for _ in range(problems)))
        self.core = core
        self.step = 0
        self.seconds = 0.0
        # Per round: outcomes per second of applying outcomes, and of applying all events.
        self.outcome_rates: list[float] = []
        self.cycle_rates: list[float] = []

    def run(self) -> None:
        """So many rounds."""
        version, last = Version(0, self.step), self.step + ROUNDS
        start: list[EventRecord] = [SchedulerStarted(epoch=1, host="", pid=0)]
        start += [Joined(actor=f"actor-{n}", slots=SLOTS, version=version) for n in range(ACTORS)]
        start.append(LearnerReady(version=version))
        commands = self._apply(start)
        outcomes, outcome_seconds, began = 0, 0.0, self.seconds
        while self.step < last:
            tasks = [command for command in commands if isinstance(command, IssueTask)]
            batches = [command for command in commands if isinstance(command, SendBatch)]
            commands = []
            if tasks:
                commands += self._apply([_started(task) for task in tasks])
                events: list[EventRecord] = [self._outcome(task) for task in tasks]
                before = self.seconds
                commands += self._apply(events)
                outcome_seconds += self.seconds - before
                outcomes += len(events)
            for batch in batches:
                groups: Any = batch.message
                ends = [GroupEnd(g.task, g.attempt, "trained") for g in groups.groups]
                done = StepCompleted(version=groups.version, ends=ends)
                commands += self._apply([Tick(epoch=1, seconds=1.0), done])
                self.step += 1
                self.outcome_rates.append(outcomes / outcome_seconds)
                self.cycle_rates.append(outcomes / (self.seconds - began))
                outcomes, outcome_seconds, began = 0, 0.0, self.seconds

    def _apply(self, events: list[EventRecord]) -> list[Command]:
        apply = self.core.apply
        commands: list[Command] = []
        start = time.thread_time()
        for event in events:
            commands += apply(event)
        self.seconds += time.thread_time() - start
        return commands

    def _outcome(self, task: IssueTask) -> Outcome:
        rate = self.rates[task.problem]
        rewards: list[float | None] = [float(self.rng.random() < rate) for _ in range(GROUP)]
        mixed = len(set(rewards)) > 1
        return Outcome(
            actor=task.actor,
            task=task.id,
            attempt=task.attempt,
            status="ok",
            rewards=rewards,
            correct=rewards,
            lengths=[100] * GROUP,
            truncated=[False] * GROUP,
            oldest=task.version,
            newest=task.version,
            group=GroupRef(0, 0, bytes(32)) if mixed else None,
        )


def _started(task: IssueTask) -> Started:
    return Started(actor=task.actor, task=task.id, attempt=task.attempt)


def _group(rate: float, rng: Random) -> Figures:
    right = sum(rng.random() < rate for _ in range(GROUP))
    p = right / GROUP
    return Figures(GROUP, right, p, p, p * (1 - p), right in (0, GROUP), False)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def _bytes_in(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_bytes_in, value.values()))
    if isinstance(value, list):
        return sum(map(_bytes_in, value))
    return len(value) if isinstance(value, bytes | str) else 8


if __name__ == "__main__":
    main()
