"""Held-out sets at exact versions, driven through the core."""

from __future__ import annotations

import math
from typing import Any

import pytest

from protocol.messages import Held, LearnerReady, Released
from protocol.records import EvalRecord
from protocol.versions import Version
from scheduler.commands import IssueTask, WriteRecord
from scheduler.evaluation import EvalSet
from tests.scheduler.driving import Driven, batches, completed, config, failed, of, outcome


def held_out(**change: Any) -> EvalSet:
    plain: dict[str, Any] = {
        "name": "held_out",
        "sources": ["x", "x", "y"],
        "every": 2,
        "n": 4,
        "greedy": True,
        "temperature": 0.7,
        "max_tokens": 5,
    }
    return EvalSet(**{**plain, **change})


def driven(*sets: EvalSet, steps: int = 4, **run: Any) -> Driven:
    cfg = config(
        run={"steps": steps, "prompts_per_step": 2, **run},
        actors={"slots": 50, "prefetch": 0, "max": 2},
    )
    return Driven(cfg, 100, sets)


def split(tasks: list[IssueTask]) -> tuple[list[IssueTask], list[IssueTask]]:
    """Training tasks, evaluation tasks."""
    return (
        [task for task in tasks if task.purpose == "train"],
        [task for task in tasks if task.purpose == "eval"],
    )


def answer(task: IssueTask, right: int) -> Any:
    return outcome(task, [1.0] * right + [0.0] * (task.group_size - right))


def records(d: Driven) -> list[EvalRecord]:
    written = [command.record for command in of(WriteRecord, d.log)]
    return [record for record in written if isinstance(record, EvalRecord)]


def test_each_problem_gets_sampled_completions_and_a_greedy_one_at_the_exact_version() -> None:
    _, tasks = split(driven(held_out()).ready())
    assert [(t.problem, t.group_size, t.temperature) for t in tasks] == [
        (problem, *kind) for problem in range(3) for kind in ((4, 0.7), (1, 0.0))
    ]
    for task in tasks:
        assert (task.dataset, task.reason, task.send) == ("held_out", "eval", "none")
        assert task.exact
        assert task.max_tokens == 5
        assert task.version == Version(0, 0)


def test_only_the_release_of_that_steps_batch_waits_for_it() -> None:
    d = driven(held_out())
    training, tasks = split(d.ready())
    assert len(training) == 2
    assert batches(d.apply(*[outcome(task) for task in training])) == []
    assert d.core.waiting_for == "evaluation"
    assert batches(d.apply(*[answer(task, 1) for task in tasks[:-1]])) == []
    assert len(batches(d.apply(answer(tasks[-1], 1)))) == 1


def test_it_is_due_before_the_first_step_every_so_many_and_after_the_last() -> None:
    d = driven(held_out(every=2), steps=5)
    todo: list[Any] = [LearnerReady(version=Version(0, 0))]
    while todo:
        commands = d.apply(*todo)
        todo = [answer(task, 1) for task in of(IssueTask, commands)]
        todo += [completed(batch) for batch in batches(commands)]
    assert [record.version.step for record in records(d)] == [0, 2, 4, 5]
    assert d.core.accounts.ends["evaluated"] == 4 * 6
    assert d.core.accounts.in_flight == 0


def test_the_figures_are_those_of_the_completions() -> None:
    d = driven(held_out())
    _, tasks = split(d.ready())
    right = {(0, 4): 3, (0, 1): 1, (1, 4): 0, (1, 1): 0, (2, 4): 1, (2, 1): 1}
    d.apply(*[answer(task, right[task.problem, task.group_size]) for task in tasks])
    (record,) = records(d)
    assert record.mean == pytest.approx(4 / 12)
    assert record.passed == pytest.approx(2 / 3)
    assert record.greedy == pytest.approx(2 / 3)
    assert (record.problems, record.failed, record.n) == (3, 0, 4)
    # Unbiased variance of each problem's mean: p̂(1−p̂)/(n−1).
    variance = (0.75 * 0.25 + 0 + 0.25 * 0.75) / 3
    assert record.standard_error == pytest.approx(math.sqrt(variance) / 3)
    assert record.by_source == {
        "x": {"mean": 3 / 8, "passed": 0.5, "greedy": 0.5, "problems": 2},
        "y": {"mean": 1 / 4, "passed": 1.0, "greedy": 1.0, "problems": 1},
    }


def test_accuracy_is_over_what_did_not_fail_and_the_number_is_beside_it() -> None:
    d = driven(held_out(greedy=False))
    _, tasks = split(d.ready())
    wrong_version = answer(tasks[1], 4)
    d.apply(
        failed(tasks[0]),
        outcome(tasks[1], [1.0] * 4, oldest=Version(0, 0), newest=Version(0, 1)),
        answer(tasks[2], 1),
    )
    (record,) = records(d)
    assert wrong_version.newest == Version(0, 0)
    assert record.failed == 2
    assert record.mean == 0.25
    assert record.greedy is None
    assert record.by_source["x"]["mean"] is None
    assert d.ends == {"failed": 2, "evaluated": 1}


def test_an_evaluation_task_that_no_actor_finishes_expires_and_the_run_goes_on() -> None:
    cfg = config(waits={"max_attempts": 1})
    d = Driven(cfg, 100, [held_out(sources=["x"], greedy=False)])
    training, (task,) = split(d.ready())
    d.apply(*[outcome(each) for each in training])
    d.batch(Released(actor="a", attempts=[Held(task.id, 1)]))
    (record,) = records(d)
    assert (record.failed, record.mean, record.passed) == (1, None, None)
    assert d.ends == {"expired": 1}


def test_evaluation_never_teaches_and_is_outside_the_admission_bound() -> None:
    d = driven(held_out(sources=["x"] * 20))
    training, tasks = split(d.ready())
    assert (len(training), len(tasks)) == (2, 40)
    d.apply(*[answer(task, 1) for task in tasks])
    assert d.core._training.teaching.distinct == 0


def test_a_learner_that_starts_anew_starts_a_running_evaluation_at_its_version() -> None:
    d = driven(held_out(every=2))
    _, tasks = split(d.ready())
    d.apply(answer(tasks[0], 1))
    _, again = split(d.ready(generation=1, step=1))
    assert {task.version for task in again} == {Version(1, 1)}
    assert len(again) == 6
    assert d.ends == {"evaluated": 1, "stale": 7}
    d.apply(*[answer(task, 1) for task in again])
    assert [record.version for record in records(d)] == [Version(1, 1)]


def test_one_sample_a_problem_has_no_standard_error() -> None:
    d = driven(held_out(n=1, greedy=False))
    _, tasks = split(d.ready())
    d.apply(*[answer(task, 1) for task in tasks])
    assert records(d)[0].standard_error is None
