"""Whole runs: a real scheduler process and a real broker, between simulated actors and learners."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from protocol.records import Accounts, EndRecord
from protocol.topics import Topics
from protocol.versions import Version
from tests.pipeline.simulated import Behaviour, spread
from tests.pipeline.simulated_learner import SimulatedLearner
from tests.pipeline.stage import Played, Stage, write_problems

STEPS, PROMPTS, GROUP = 6, 4, 4


@pytest.fixture
def make_stage(tmp_path: Path, topics: Topics, kafka_section: dict[str, Any]) -> Any:
    def make(**sections: Any) -> Stage:
        # Enough replacements that a round is short only for another reason.
        run = {"steps": STEPS, "prompts_per_step": PROMPTS, "max_refill": 40}
        run |= sections.pop("run", {})
        return Stage(tmp_path, topics, kafka_section, run=run, **sections)

    return make


def assert_balanced(accounts: Accounts) -> None:
    assert accounts.in_flight == 0
    assert accounts.issued == sum(accounts.ends.values())
    assert sum(accounts.zero_variance.values()) == accounts.ends.get("zero_variance", 0)


def assert_every_step_full(played: Played, steps: int = STEPS) -> None:
    """Each optimizer step got a full batch, of groups that the learner found admissible."""
    assert [b.version for b in played.learner.batches] == [Version(0, s) for s in range(steps)]
    for batch, completed in zip(played.learner.batches, played.learner.completed, strict=True):
        assert len(batch.groups) == batch.planned == PROMPTS
        assert [e.end for e in completed.ends] == ["trained"] * PROMPTS
    assert [s.version for s in played.steps] == [Version(0, s) for s in range(steps)]
    assert played.end.accounts.ends["trained"] == steps * PROMPTS


async def test_a_run_ends_by_itself_with_every_account_settled(
    make_stage: Any, tmp_path: Path
) -> None:
    held_out = write_problems(tmp_path / "held_out.jsonl", 9, "h")
    stage = make_stage(
        eval=[{"data": str(held_out), "every": 4, "n": 2}], waits={"snapshot_outcomes": 10}
    )
    played = await stage.play({"slots": 2, "behaviour": SLOW}, {"slots": 2, "behaviour": SLOW})
    assert (played.code, played.end.reason) == (0, "finished")
    assert played.learner.ended is not None
    assert [a.ended for a in played.actors] == [played.learner.ended] * 2
    assert_balanced(played.end.accounts)
    assert_every_step_full(played)

    assert [(e.version.step, e.problems, e.failed) for e in played.evals] == [
        (0, 9, 0),
        (4, 9, 0),
        (STEPS, 9, 0),
    ]
    # Greedy completions of simulated actors are right exactly where p ≥ ½.
    greedy = sum(spread(f"h{i}") >= 0.5 for i in range(9)) / 9
    assert [e.greedy for e in played.evals] == pytest.approx([greedy] * 3)
    assert {name for e in played.evals for name in e.by_source} == {"s0", "s1", "s2"}

    work = [a.outcomes for a in played.actors]
    assert min(work) >= sum(work) / 3
    assert sum(work) == played.end.accounts.issued
    assert sum(a.tokens for a in played.actors) >= played.end.rollout_tokens > 0
    assert played.end.rollouts % GROUP == 0
    assert played.end.impure_groups_trained == 0
    assert played.end.version == Version(0, STEPS)


SLOW = Behaviour(seconds=0.02)


@pytest.mark.parametrize("max_lag", [1, 2])
async def test_generation_overlaps_training_within_the_lag(make_stage: Any, max_lag: int) -> None:
    stage = make_stage(run={"max_lag": max_lag, "steps": 8})
    played = await stage.play(
        {"slots": 3, "behaviour": SLOW}, {"slots": 3}, learner={"step_seconds": 0.1}
    )
    assert (played.code, played.end.reason) == (0, "finished")
    assert_balanced(played.end.accounts)
    assert_every_step_full(played, 8)
    ages = {
        version.step - span.version.step
        for version, group in played.learner.trained
        for c in group.completions
        for span in c.spans
    }
    assert ages <= set(range(max_lag + 1))
    # Otherwise nothing overlapped, and the setting does nothing.
    assert max(ages) >= 1


async def test_an_actor_that_dies_silently_loses_nothing(make_stage: Any) -> None:
    stage = make_stage()
    played = await stage.play(
        {"behaviour": Behaviour(seconds=0.02, dies_at=5)}, {"behaviour": SLOW}
    )
    assert played.actors[0].died.is_set()
    assert (played.code, played.end.reason) == (0, "finished")
    assert_balanced(played.end.accounts)
    assert_every_step_full(played)
    assert played.end.accounts.ends.get("expired", 0) == 0


async def test_a_task_that_an_actor_forgot_is_issued_again(make_stage: Any) -> None:
    stage = make_stage()
    played = await stage.play({"behaviour": Behaviour(drops_at=3)}, {})
    assert (played.code, played.end.reason) == (0, "finished")
    assert_balanced(played.end.accounts)
    assert_every_step_full(played)


async def test_a_failing_grader_costs_a_replacement_and_no_reward_of_zero(make_stage: Any) -> None:
    stage = make_stage()
    played = await stage.play({"behaviour": Behaviour(failing=0.2)}, {})
    assert (played.code, played.end.reason) == (0, "finished")
    assert_balanced(played.end.accounts)
    assert_every_step_full(played)
    assert played.end.accounts.ends["failed"] > 0


async def test_a_skipped_step_still_advances_the_version(make_stage: Any) -> None:
    played = await make_stage().play({}, learner={"skips": frozenset({2})})
    assert (played.code, played.end.reason) == (0, "finished")
    assert_balanced(played.end.accounts)
    assert played.end.accounts.ends["skipped"] == PROMPTS
    assert played.end.version == Version(0, STEPS)
    assert [s.trained for s in played.steps] == [PROMPTS, PROMPTS, 0, PROMPTS, PROMPTS, PROMPTS]


async def test_a_run_with_nothing_left_to_learn_says_so(make_stage: Any) -> None:
    def always(problem: str) -> float:
        return 1.0

    stage = make_stage(run={"max_empty_rounds": 2})
    played = await stage.play({"success": always}, {"success": always})
    assert (played.code, played.end.reason) == (0, "nothing_left_to_learn")
    assert_balanced(played.end.accounts)
    assert played.learner.batches == []
    assert played.end.accounts.ends["zero_variance"] == played.end.accounts.issued > 0


async def test_the_scheduler_shows_what_it_does_and_sigterm_ends_the_run_in_order(
    make_stage: Any,
) -> None:
    shown: dict[str, Any] = {}

    async def stop(stage: Stage, learner: SimulatedLearner) -> None:
        # The third batch came, so the scheduler had applied the end of the second step.
        await learner.reached(3)
        shown["health"] = json.loads(await asyncio.to_thread(stage.monitor, "/healthz"))
        shown["metrics"] = await asyncio.to_thread(stage.monitor, "/metrics")
        stage.stop()

    stage = make_stage(run={"steps": 1000})
    played = await stage.play({"behaviour": SLOW}, {"behaviour": SLOW}, meanwhile=stop)
    assert (played.code, played.end.reason) == (0, "stopped")
    assert_balanced(played.end.accounts)
    assert 3 <= len(played.steps) < 1000
    health = shown["health"]
    assert health["alive"] is True
    assert (health["actors"], health["version"].split(".")[0]) == (2, "0")
    assert {"state", "seconds", "in_flight", "lag_seconds", "lag_records"} <= health.keys()
    counted = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(shown["metrics"])
        for sample in family.samples
    }
    assert counted["reprise_events_total", "StepCompleted"] >= 2
    assert counted["reprise_events_total", "Joined"] == 2
    assert counted["reprise_events_lag_seconds",] < 20
    assert all(a.ended is not None for a in played.actors)


async def test_a_stop_before_anything_began_ends_the_run_too(make_stage: Any) -> None:
    stage = make_stage()
    async with stage.scheduler() as process:
        # Ticks are appended: the scheduler is at work, and its signal handlers are in place.
        await stage.appended(stage.topics.events, 3)
        stage.stop()
        assert await asyncio.wait_for(process.wait(), 30) == 0
    (end,) = stage.records()
    assert isinstance(end, EndRecord)
    assert (end.reason, end.accounts.issued) == ("stopped", 0)
    assert_balanced(end.accounts)


async def test_a_run_directory_that_cannot_be_written_is_one_clear_line(
    make_stage: Any,
) -> None:
    stage = make_stage()
    stage.run_dir.metrics.mkdir()
    async with stage.scheduler() as process:
        assert await asyncio.wait_for(process.wait(), 30) == 1
    lines = stage.log.read_text().splitlines()
    assert f"{stage.run_dir.metrics}: cannot be written: Is a directory" in lines[-1]
    assert not any("Traceback" in line for line in lines)
