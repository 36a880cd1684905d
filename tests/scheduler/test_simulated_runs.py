"""Whole runs of the core in a simulated world."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import msgpack
import pytest

from protocol.config import Config
from protocol.messages import EventRecord
from protocol.records import EndRecord
from scheduler.commands import Command
from scheduler.core import Core
from scheduler.evaluation import EvalSet
from scheduler.simulate import Simulation
from tests.scheduler.driving import config


def beta_rates(problems: int) -> list[float]:
    rng = Random(11)
    return [rng.betavariate(0.5, 0.5) for _ in range(problems)]


def simulated(cfg: Config, problems: int, eval_sets: Any = (), **world: Any) -> Simulation:
    return Simulation(Core(cfg, problems, eval_sets), beta_rates(problems), **world)


@pytest.mark.parametrize("lag", [0, 1, 2, 3])
@pytest.mark.parametrize("prompts", [1, 4])
def test_lag_is_bounded_by_admission_and_order_not_by_dropping(lag: int, prompts: int) -> None:
    run = {"steps": 150, "prompts_per_step": prompts, "max_lag": lag, "max_refill": 1000}
    cfg = config(run=run, rollout={"group_size": 8}, strategy={"name": "uniform"})
    # Task lengths are exponential: many short ones, a few very long.
    sim = simulated(cfg, 3000, actors=(16, 16), train_seconds=0.5)
    sim.run(100_000)
    ends = sim.core.accounts.ends
    assert ends["trained"] == 150 * prompts
    assert {end: ends[end] for end in ("stale", "impure", "expired", "failed")} == dict.fromkeys(
        ("stale", "impure", "expired", "failed"), 0
    )
    assert all(len(batch.groups) == prompts for batch in sim.batches)
    issued = {task.id: task.version.step for task in sim.issued}
    ages = [batch.version.step - issued[g.task] for batch in sim.batches for g in batch.groups]
    assert max(ages) == lag


def test_more_lag_takes_less_time() -> None:
    seconds = []
    for lag in (0, 1):
        run = {"steps": 40, "prompts_per_step": 8, "max_lag": lag}
        sim = simulated(config(run=run, rollout={"group_size": 8}), 3000, actors=(16,))
        sim.run(100_000)
        seconds.append(sim.now)
    assert seconds[1] < 0.75 * seconds[0]


def test_an_actor_that_dies_costs_its_own_work_and_nothing_else() -> None:
    cfg = config(
        run={"steps": 30, "prompts_per_step": 8, "max_refill": 1000},
        rollout={"group_size": 8},
        waits={"lease": 10},
    )
    sim = simulated(cfg, 500, actors=(8, 8, 8))
    while len(sim.batches) < 10:
        sim.step()
    open_then = sim.core.roster["actor-1"]["open"]
    sim.kill("actor-1")
    sim.join("actor-9", 8)
    sim.run(100_000)
    assert sim.left
    assert sim.core.accounts.ends["trained"] == 240
    assert sim.core.notes["reissued"] >= open_then
    again = [task for task in sim.issued if task.attempt > 1]
    assert len(again) == sim.core.notes["reissued"]
    assert all(task.actor != "actor-1" for task in again)
    assert {task.partition for task in sim.issued if task.actor == "actor-9"} <= {2, 4}


def test_two_equal_actors_each_do_at_least_a_third() -> None:
    cfg = config(run={"steps": 30, "prompts_per_step": 8})
    sim = simulated(cfg, 500, actors=(8, 8))
    sim.run(100_000)
    (end,) = [record for record in sim.records if isinstance(record, EndRecord)]
    tasks = [figures["tasks"] for figures in end.actors.values()]
    assert min(tasks) >= sum(tasks) / 3


def test_the_same_events_make_the_same_run() -> None:
    def run() -> Simulation:
        cfg = config(run={"steps": 20, "prompts_per_step": 8, "max_lag": 1})
        sim = simulated(cfg, 300, [EvalSet("h", ["x"] * 5, 5, 2, True, 1.0, 4)], actors=(8, 4))
        sim.run(100_000)
        return sim

    first, second = run(), run()
    assert first.issued == second.issued
    assert first.records == second.records
    assert first.core.state() == second.core.state()


class Twins:
    """A core and the one restored from its state: every event goes to both."""

    def __init__(self, core: Core, cfg: Config, problems: int, sets: list[EvalSet]) -> None:
        state = msgpack.unpackb(msgpack.packb(core.state()), strict_map_key=True)
        self.cores = (core, Core.restore(cfg, problems, sets, state))
        self.events = 0

    def apply(self, event: EventRecord) -> list[Command]:
        commands, same = (core.apply(event) for core in self.cores)
        assert commands == same
        self.events += 1
        return commands

    def packed(self) -> tuple[bytes, ...]:
        return tuple(msgpack.packb(core.state()) for core in self.cores)


@pytest.mark.parametrize("name", ["prioritized", "uniform"])
def test_a_restored_core_decides_alike_for_the_next_thousand_events(name: str) -> None:
    cfg = config(
        run={"steps": 200, "prompts_per_step": 8, "max_lag": 2},
        rollout={"group_size": 8},
        strategy={"name": name},
    )
    sets = [EvalSet("h", ["x"] * 9, 3, 2, True, 1.0, 4)]
    sim = simulated(cfg, 300, sets, actors=(8, 8))
    while not (len(sim.batches) > 20 and sim.core.waiting_for == "evaluation"):
        sim.step()
    twins = Twins(sim.core, cfg, 300, sets)
    before = twins.packed()
    assert before[0] == before[1]
    sim.core = twins  # type: ignore[assignment]
    while twins.events < 1000:
        sim.step()
    after = twins.packed()
    assert after[0] == after[1] != before[0]


def late_picks(initial: str) -> list[tuple[str, bool]]:
    """Reason, and whether the problem was visited before, of each pick after step 20 of a run that
    can visit a tenth of its problems."""
    steps, prompts = 80, 16
    cfg = config(
        run={"steps": steps, "prompts_per_step": prompts},
        rollout={"group_size": 16},
        strategy={"name": "prioritized", "initial": initial},
        actors={"slots": 64, "prefetch": 8, "max": 2},
    )
    sim = simulated(cfg, 10 * steps * prompts)
    sim.run(100_000)
    seen: set[int] = set()
    picks = []
    for task in sim.issued:
        if task.version.step >= 20:
            picks.append((task.reason, task.problem in seen))
        seen.add(task.problem)
    return picks


def test_with_ten_times_more_problems_than_visits_a_quarter_of_the_picks_are_replays() -> None:
    picks = late_picks("expected")
    assert sum(replay for _, replay in picks) / len(picks) >= 0.25


def test_with_optimistic_priorities_the_heap_replays_nothing() -> None:
    picks = late_picks("optimistic")
    replays = Counter(reason for reason, replay in picks if replay)
    assert set(replays) <= {"explore", "retest_solved", "retest_unsolved"}
    # By chance: exploration is a quarter of a batch, and at most a tenth was visited before.
    assert replays["explore"] / len(picks) < 0.025


def test_exploration_and_retests_take_their_shares_of_first_selections() -> None:
    cfg = config(
        run={"steps": 200, "prompts_per_step": 8},
        rollout={"group_size": 8},
        strategy={"name": "prioritized", "exploration": 0.25, "retest_share": 0.1},
    )
    sim = simulated(cfg, 200)
    sim.run(200_000)
    reasons = Counter(task.reason for task in sim.issued)
    first = sum(count for reason, count in reasons.items() if reason != "refill")
    assert first == 1600
    assert reasons["explore"] == 400
    assert 0 < reasons["retest_solved"] + reasons["retest_unsolved"] <= 160
