"""Rounds, replacements and batches, driven through the core."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.messages import GroupEnd, StepCompleted
from protocol.records import EndRecord, StepRecord
from protocol.versions import Version
from scheduler.commands import DeadLetter, IssueTask, Leave, Say, WriteRecord
from tests.scheduler.driving import (
    MIXED,
    RIGHT,
    WRONG,
    Driven,
    batches,
    completed,
    config,
    failed,
    of,
    outcome,
)


def driven(problems: int = 100, strategy: dict[str, Any] | None = None, **run: Any) -> Driven:
    waits = {"lease": 1000}
    return Driven(config(run=run, strategy=strategy or {}, waits=waits), problems)


def finish(d: Driven, tasks: list[IssueTask]) -> None:
    """Every group is mixed and trained, until nothing is left to do."""
    events: list[Any] = [outcome(task) for task in tasks]
    while events:
        commands = d.apply(*events)
        events = [outcome(task) for task in of(IssueTask, commands)]
        events += [completed(batch) for batch in batches(commands)]


def test_nothing_is_issued_before_the_learner_is_ready() -> None:
    d = driven()
    assert d.core.accounts.issued == 0
    assert len(d.ready()) == 2


def test_a_full_batch_is_released_when_its_last_group_is_in() -> None:
    d = driven()
    first, second = d.ready()
    assert first.version == Version(0, 0)
    assert first.exact
    assert d.apply(outcome(first)) == []
    batch = d.batch(outcome(second))
    assert [group.task for group in batch.groups] == [first.id, second.id]
    assert batch.version == Version(0, 0)
    assert batch.planned == 2
    assert d.core.accounts.in_flight == 2
    assert d.ends == {}
    following = d.tasks(completed(batch))
    assert d.ends == {"trained": 2}
    assert [task.version for task in following] == [Version(0, 1)] * 2


@pytest.mark.parametrize("rewards", [RIGHT, WRONG])
def test_a_group_without_variance_is_replaced_at_once(rewards: Any) -> None:
    d = driven()
    first, _ = d.ready()
    (replacement,) = d.tasks(outcome(first, rewards))
    assert replacement.reason == "refill"
    assert replacement.problem != first.problem
    assert d.ends == {"zero_variance": 1}
    kind = "all_right" if rewards == RIGHT else "all_wrong"
    assert d.core.accounts.zero_variance[kind] == 1


def test_it_is_trained_where_the_config_says_so() -> None:
    d = driven(keep_zero_variance=True)
    first, second = d.ready()
    assert first.send == "all"
    assert len(d.batch(outcome(first, RIGHT), outcome(second, WRONG)).groups) == 2


def test_variance_in_the_reward_alone_is_trained_and_counted_apart() -> None:
    d = driven()
    first, second = d.ready()
    shaped = outcome(first, (0.1, 0.3), correct=[0.0, 0.0])
    record = step_record(d, d.batch(shaped, outcome(second)))
    assert sum(count.shaping_only for count in record.by_reason.values()) == 1
    assert sum(count.mixed for count in record.by_reason.values()) == 1
    assert record.trained == 2


def step_record(d: Driven, batch: Any, **metrics: float) -> StepRecord:
    (record,) = [
        command.record
        for command in of(WriteRecord, d.apply(completed(batch, **metrics)))
        if isinstance(command.record, StepRecord)
    ]
    return record


@pytest.mark.parametrize(
    "end",
    [
        lambda task: failed(task),
        lambda task: outcome(task, (1.0,)),
        lambda task: outcome(task, (None, None)),
        lambda task: outcome(task, MIXED, group=None),
        lambda task: outcome(task, (1e300, -1e300), correct=[1.0, 0.0]),
    ],
)
def test_a_group_that_does_not_stand_is_failed_and_replaced(end: Any) -> None:
    d = driven()
    first, _ = d.ready()
    assert [task.reason for task in d.tasks(end(first))] == ["refill"]
    assert d.ends == {"failed": 1}


def test_one_completion_in_eight_may_be_ungraded() -> None:
    d = Driven(config(rollout={"group_size": 8}))
    first, second = d.ready()
    d.apply(outcome(first, [None, 0.0] + [1.0] * 6))
    assert d.ends == {}
    d.apply(outcome(second, [None, None] + [1.0, 0.0] * 3))
    assert d.ends == {"failed": 1}


@pytest.mark.parametrize(
    ("oldest", "newest", "end"),
    [
        (Version(0, 0), Version(0, 1), "impure"),
        (Version(0, 1), Version(0, 1), "impure"),
        (Version(3, 0), Version(3, 0), "stale"),
    ],
)
def test_at_lag_0_a_group_of_another_version_is_refused_and_replaced(
    oldest: Version, newest: Version, end: str
) -> None:
    d = driven()
    first, _ = d.ready()
    replacement = d.tasks(outcome(first, oldest=oldest, newest=newest))
    assert d.ends == {end: 1}
    assert len(replacement) == 1


def test_at_lag_0_older_tokens_are_impure_with_new_ones_and_stale_alone() -> None:
    for newest, end in ((Version(0, 1), "impure"), (Version(0, 0), "stale")):
        d = driven()
        batch = d.batch(*[outcome(task) for task in d.ready()])
        first, _ = d.tasks(completed(batch))
        d.apply(outcome(first, oldest=Version(0, 0), newest=newest))
        assert d.ends == {"trained": 2, end: 1}


def test_all_replacements_of_a_round_together_spend_max_refill() -> None:
    d = driven(max_refill=3, max_empty_rounds=1)
    todo = d.ready()
    issued = []
    while todo:
        replacements = d.tasks(outcome(todo.pop(), RIGHT))
        issued += replacements
        todo += replacements
    assert [task.reason for task in issued] == ["refill"] * 3
    assert d.ends == {"zero_variance": 5}


def test_a_smaller_batch_goes_when_the_refill_is_spent_and_says_so() -> None:
    d = driven(max_refill=1)
    first, second = d.ready()
    (third,) = d.tasks(outcome(first, RIGHT))
    commands = d.apply(outcome(second), outcome(third, WRONG))
    (batch,) = batches(commands)
    assert [group.task for group in batch.groups] == [second.id]
    assert batch.planned == 2
    assert any("1 of 2 groups" in say.text for say in of(Say, commands))


def test_a_smaller_batch_goes_when_the_strategy_has_no_more_problems() -> None:
    d = driven(problems=1)
    (only,) = d.ready()
    assert len(d.batch(outcome(only)).groups) == 1


def test_a_problem_is_issued_once_for_a_step_also_in_a_new_round_of_it() -> None:
    d = driven(problems=5, max_refill=1, max_empty_rounds=9)
    todo = d.ready()
    seen: list[int] = []
    while todo:
        task = todo.pop()
        seen.append(task.problem)
        todo += d.tasks(outcome(task, WRONG))
    assert sorted(seen) == [0, 1, 2, 3, 4]


def test_an_empty_round_is_not_released_and_a_new_one_begins() -> None:
    d = driven(max_refill=0)
    first, second = d.ready()
    commands = d.apply(outcome(first, RIGHT), outcome(second, RIGHT))
    assert batches(commands) == []
    again = of(IssueTask, commands)
    assert [task.version for task in again] == [Version(0, 0)] * 2
    record = step_record(d, d.batch(*[outcome(task) for task in again]))
    assert record.empty_rounds == 1


@pytest.mark.parametrize(
    ("answer", "reason", "ok", "counts"),
    [
        (lambda task: outcome(task, RIGHT), "nothing_left_to_learn", True, "6 zero_variance"),
        (failed, "grader_failing", False, "6 failed"),
    ],
)
def test_empty_rounds_in_a_row_end_the_run_with_what_caused_it(
    answer: Any, reason: str, ok: bool, counts: str
) -> None:
    d = driven(max_refill=0, max_empty_rounds=3)
    todo = d.ready()
    while todo:
        todo = d.tasks(*[answer(task) for task in todo])
    (end,) = [c.record for c in of(WriteRecord, d.log) if isinstance(c.record, EndRecord)]
    assert end.reason == reason
    assert counts in end.detail
    assert of(Leave, d.log) == [Leave(ok)]


def test_a_released_group_is_open_until_its_step_is_completed() -> None:
    d = driven(max_lag=1)
    tasks = d.ready()
    assert len(tasks) == 4  # (L + 1) · prompts_per_step
    d.batch(*[outcome(task) for task in tasks[:2]])
    assert d.core.accounts.in_flight == 4


def test_no_round_is_opened_beyond_the_last_step() -> None:
    assert len(driven(max_lag=5, steps=2).ready()) == 4


def test_at_lag_1_a_batch_waits_for_the_groups_that_would_be_too_old_for_the_next() -> None:
    d = driven(max_lag=1)
    tasks = d.ready()
    batch = d.batch(outcome(tasks[0]), outcome(tasks[3]))
    # Tasks 1 and 2 are of version 0 still: batch 1 waits for both, and takes them before others.
    young = d.tasks(completed(batch))
    assert batches(d.apply(*[outcome(task) for task in young], outcome(tasks[1]))) == []
    batch = d.batch(outcome(tasks[2]))
    assert [group.task for group in batch.groups] == [tasks[1].id, tasks[2].id]
    assert "stale" not in d.ends


def test_tokens_of_a_newer_version_than_the_task_are_fine_within_the_lag() -> None:
    d = driven(max_lag=1)
    tasks = d.ready()
    batch = d.batch(outcome(tasks[0]), outcome(tasks[1]))
    # The next weights are out before the scheduler hears of the step.
    d.apply(outcome(tasks[2], newest=Version(0, 1)))
    d.apply(completed(batch))
    record = step_record(d, d.batch(outcome(tasks[3])))
    assert record.lag == {"1": 2}


def test_a_ready_group_that_is_too_old_for_the_next_batch_ends_stale_and_is_replaced() -> None:
    d = driven(max_lag=1)
    tasks = d.ready()
    young = d.tasks(completed(d.batch(outcome(tasks[0]), outcome(tasks[1]))))
    # Issued at version 1, so others go first, and rolled out with older weights than it asked for.
    d.apply(outcome(young[0], oldest=Version(0, 0), newest=Version(0, 1)))
    batch = d.batch(outcome(tasks[2]), outcome(tasks[3]))
    issued = d.tasks(completed(batch))
    assert d.ends == {"trained": 4, "stale": 1}
    assert sorted(task.reason == "refill" for task in issued) == [False, False, True]


def test_the_wait_for_stragglers_is_bounded_in_log_time() -> None:
    d = driven(straggler_wait=30)
    first, second = d.ready()
    d.wait(100)  # no group is ready: nothing could go without the others
    d.apply(outcome(first))
    assert batches(d.wait(29)) == []
    (batch,) = batches(d.wait(1))
    assert [group.task for group in batch.groups] == [first.id]
    assert d.ends == {"expired": 1}
    record = step_record(d, batch)
    assert record.dropped == 1
    # What was dropped comes in late: it is counted, and its length shown.
    d.apply(outcome(second, lengths=[5, 8], truncated=[False, True]))
    assert d.core.notes["late_outcomes"] == 1
    todo = [task for task in of(IssueTask, d.log) if task.version.step == 1]
    assert step_record(d, d.batch(*[outcome(task) for task in todo])).dropped_length == 6.5


def test_drop_trades_the_wait_for_speed_once_a_full_batch_is_ready() -> None:
    d = driven(max_lag=1, on_straggler="drop")
    tasks = d.ready()
    batch = d.batch(outcome(tasks[0]), outcome(tasks[3]))
    young = d.tasks(completed(batch))
    commands = d.apply(*[outcome(task) for task in young])
    assert len(batches(commands)) == 1
    assert d.ends == {"trained": 2, "expired": 2}


def test_trained_is_booked_by_the_learner_alone_and_an_unnamed_group_is_failed() -> None:
    d = driven(prompts_per_step=5)
    batch = d.batch(*[outcome(task) for task in d.ready()])
    ends: Any = ["trained", "stale", "impure", "skipped"]
    named = [GroupEnd(g.task, g.attempt, end) for g, end in zip(batch.groups, ends, strict=False)]
    d.apply(StepCompleted(version=batch.version, ends=named))
    assert d.ends == dict.fromkeys(["trained", "stale", "impure", "skipped", "failed"], 1)
    assert d.core.version == Version(0, 1)


def test_a_step_that_fits_no_batch_is_put_aside_and_a_lower_generation_ignored() -> None:
    d = driven()
    d.ready(generation=2)
    assert len(of(DeadLetter, d.apply(StepCompleted(version=Version(2, 0), ends=[])))) == 1
    assert d.apply(StepCompleted(version=Version(1, 0), ends=[])) == []
    assert d.core.notes == {"dead_letters": 1, "lower_generation": 1}


def test_a_learner_that_starts_anew_ends_what_is_open_and_rounds_begin_there() -> None:
    d = driven(max_lag=1)
    tasks = d.ready()
    batch = d.batch(outcome(tasks[0]), outcome(tasks[1]))
    d.apply(outcome(tasks[2]))
    fresh = d.ready(generation=1, step=0)
    assert d.ends == {"stale": 4}
    assert [task.version for task in fresh] == [Version(1, 0)] * 4
    assert all(task.id.startswith("1-") for task in fresh)
    assert d.apply(completed(batch)) == []
    late = d.apply(outcome(tasks[3]))
    assert of(IssueTask, late) == []
    assert d.core.accounts.in_flight == 4
    finish(d, fresh)
    assert d.core.accounts.in_flight == 0


def test_seeds_depend_on_run_seed_round_and_place_alone() -> None:
    def seeds(**run: Any) -> list[int]:
        d = driven(**run)
        tasks = d.ready()
        batch = d.batch(*[outcome(task) for task in tasks])
        return [task.seed for task in [*tasks, *d.tasks(completed(batch))]]

    plain = seeds()
    assert len(set(plain)) == 4
    assert all(0 <= seed < 2**53 for seed in plain)
    assert seeds() == plain
    assert not set(seeds(seed=1)) & set(plain)
    d = driven()
    d.ready(generation=0)
    assert [task.seed for task in d.ready(generation=5)] == plain[:2]


def test_what_may_teach_the_strategy() -> None:
    d = driven(problems=2, prompts_per_step=1)
    visits = d.core._training.teaching._visits
    (first,) = d.ready()
    problem = first.problem
    d.apply(failed(first))
    assert visits[problem] == 0  # a failed group teaches nothing
    (second,) = [task for task in of(IssueTask, d.log) if task.id == "0-1"]
    other = second.problem
    d.apply(outcome(second, oldest=Version(0, 0), newest=Version(0, 1)))
    assert visits[other] == 1  # an impure one does


def test_the_record_of_a_step() -> None:
    d = driven(problems=50, prompts_per_step=4, strategy={"exploration": 0.5})
    tasks = d.ready()
    explored = [task for task in tasks if task.reason == "explore"]
    assert len(explored) == 2
    (refill,) = d.tasks(outcome(explored[0], RIGHT))
    d.wait(3)
    rest = [task for task in tasks if task is not explored[0]]
    (batch,) = batches(d.apply(*[outcome(task) for task in [*rest, refill]]))
    d.wait(2)
    record = step_record(d, batch, tokens=24.0, mean_abs_advantage=0.5, loss=0.1)
    assert record.version == Version(0, 0)
    assert record.seconds == 5.0
    assert (record.rollouts, record.rollout_tokens) == (10, 30)
    assert (record.groups, record.planned, record.trained) == (4, 4, 4)
    assert record.reward_trained == 0.5
    assert record.reward_explored == 0.75  # (1 + ½) / 2
    assert record.zero_variance_share == 0.2
    assert record.replay_share == 0.0
    assert record.mean_abs_advantage == 0.5
    assert record.distinct_problems == 5
    assert record.most_visits == 1
    assert record.lag == {"0": 4}
    assert record.accounts.ends["trained"] == 4
    assert record.waited == {"rollouts": 3.0, "learner": 2.0, "evaluation": 0.0}
    assert record.by_reason["explore"].groups == 2
    assert record.by_reason["explore"].zero_variance == 1
    assert record.by_reason["refill"].mixed == 1
    assert record.learner["loss"] == 0.1
    assert sum(record.pools.values()) == 50


def test_a_run_of_given_steps_finishes_with_every_task_accounted_for() -> None:
    d = driven(steps=3)
    finish(d, d.ready())
    (end,) = [c.record for c in of(WriteRecord, d.log) if isinstance(c.record, EndRecord)]
    assert end.reason == "finished"
    assert end.version == Version(0, 3)
    assert end.accounts.in_flight == 0
    assert d.ends == {"trained": 6}
    assert of(Leave, d.log) == [Leave(True)]
