"""Actors come, take work, fall silent and go, driven through the core."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from protocol.messages import (
    Assigned,
    EngineDied,
    Heartbeat,
    Held,
    Joined,
    Rejoin,
    Released,
    Started,
)
from protocol.versions import Version
from scheduler.commands import DeadLetter, IssueTask, SendControl
from tests.scheduler.driving import Driven, config, failed, of, outcome

V0 = Version(0, 0)


def joined(name: str, slots: int = 8) -> Joined:
    return Joined(actor=name, slots=slots, version=V0)


def heartbeat(name: str, held: list[IssueTask] | None = None, state: Any = "idle") -> Heartbeat:
    listed = None if held is None else [Held(task.id, task.attempt) for task in held]
    return Heartbeat(actor=name, state=state, version=V0, held=listed)


def started(task: IssueTask) -> Started:
    return Started(actor=task.actor, task=task.id, attempt=task.attempt)


def released(*tasks: IssueTask) -> Released:
    return Released(actor=tasks[0].actor, attempts=[Held(t.id, t.attempt) for t in tasks])


def driven(*actors: str, prompts: int = 2, **waits: Any) -> Driven:
    return Driven(config(run={"prompts_per_step": prompts}, waits=waits), actors=actors)


def test_the_lowest_free_partition_is_the_actors_alone() -> None:
    d = driven()
    commands = d.apply(joined("x"), joined("y"), joined("z"))
    assert [c.message for c in of(SendControl, commands)] == [
        Assigned(actor="x", partition=1),
        Assigned(actor="y", partition=2),
        Assigned(actor="z", partition=3),
    ]
    d.apply(EngineDied(actor="y", attempts=[]))
    assert Assigned(actor="w", partition=2) in [
        c.message for c in d.apply(joined("w")) if isinstance(c, SendControl)
    ]


def test_one_more_actor_than_partitions_waits_for_one_that_is_freed() -> None:
    d = driven("a", "b", "c", "d")
    assert of(SendControl, d.apply(joined("late"))) == []
    d.ready()
    assert all(task.actor != "late" for task in of(IssueTask, d.log))
    (freed,) = of(SendControl, d.apply(EngineDied(actor="b", attempts=[])))
    assert freed.message == Assigned(actor="late", partition=2)


def test_no_actor_has_more_open_tasks_than_slots_and_prefetch() -> None:
    d = driven("a", prompts=30)
    tasks = d.ready()
    assert len(tasks) == 10
    assert d.core.wanted_slots == 30
    assert len(d.tasks(outcome(tasks[0]))) == 1


def test_equal_actors_share_evenly_and_unequal_ones_by_capacity() -> None:
    d = driven("a", "b", prompts=12)
    assert Counter(task.actor for task in d.ready()) == {"a": 6, "b": 6}
    d = driven("a", prompts=20)
    d.apply(joined("large", slots=28))  # capacity 30 against 10
    assert Counter(task.actor for task in d.ready()) == {"a": 5, "large": 15}


def test_a_silent_actors_work_goes_to_others_as_a_new_attempt() -> None:
    d = driven("a", "b", lease=10)
    first, second = d.ready()
    assert {first.actor, second.actor} == {"a", "b"}
    lost = first if first.actor == "a" else second
    for _ in range(11):
        d.apply(heartbeat("b"))
        commands = d.wait(1)
    (again,) = of(IssueTask, commands)
    assert (again.id, again.attempt, again.actor) == (lost.id, 2, "b")
    assert again.seed == lost.seed
    assert d.core.accounts.issued == 2


def test_a_silent_actor_that_speaks_again_is_told_to_join_as_new_once_a_lease() -> None:
    d = driven("a", "b", lease=10)
    d.wait(11)
    answers = of(SendControl, d.apply(heartbeat("a"), heartbeat("a")))
    assert [answer.message for answer in answers] == [Rejoin(actor="a")]
    assert of(SendControl, d.wait(11)) == []
    assert len(of(SendControl, d.apply(heartbeat("a")))) == 1
    assert of(SendControl, d.apply(joined("a2")))[0].message == Assigned(actor="a2", partition=1)


def test_a_heartbeat_keeps_the_lease() -> None:
    d = driven("a", lease=10)
    tasks = d.ready()
    for _ in range(5):
        d.wait(9)
        d.apply(heartbeat("a"))
    assert list(d.core.roster) == ["a"]
    assert d.core.roster["a"]["open"] == len(tasks)


def test_released_work_is_issued_again_at_once_to_another_actor() -> None:
    d = driven("a", "b", prompts=4)
    mine = [task for task in d.ready() if task.actor == "a"]
    again = d.tasks(released(*mine))
    assert [(task.id, task.attempt, task.actor) for task in again] == [
        (task.id, 2, "b") for task in mine
    ]


def test_the_only_actor_gets_what_it_released_when_it_says_that_it_works() -> None:
    d = driven("a")
    first, _ = d.ready()
    assert d.tasks(released(first)) == []
    assert d.tasks(heartbeat("a", state="draining")) == []
    (again,) = d.tasks(heartbeat("a"))
    assert (again.id, again.attempt) == (first.id, 2)


def test_a_started_task_that_a_heartbeat_no_longer_lists_is_issued_again() -> None:
    d = driven("a")
    first, second = d.ready()
    assert d.tasks(heartbeat("a", held=[])) == []  # on its way, and not started
    d.apply(started(first), started(second))
    assert d.tasks(heartbeat("a")) == []  # unchanged
    assert d.tasks(heartbeat("a", held=[first, second])) == []
    (again,) = d.tasks(heartbeat("a", held=[second]))
    assert (again.id, again.attempt) == (first.id, 2)


def test_a_lost_attempt_goes_to_another_actor_even_where_the_loser_has_more_room() -> None:
    d = driven("a", "b", prompts=9)
    mine = [task for task in d.ready() if task.actor == "a"]
    d.apply(*[started(task) for task in mine])
    d.apply(*[outcome(task) for task in mine[1:]])
    assert d.core.roster["a"]["open"] < d.core.roster["b"]["open"]
    (again,) = d.tasks(heartbeat("a", held=[]))
    assert (again.id, again.actor) == (mine[0].id, "b")


def test_when_an_engine_dies_its_work_goes_to_others_and_its_actor_is_gone() -> None:
    d = driven("a", "b")
    lost = next(task for task in d.ready() if task.actor == "a")
    (again,) = d.tasks(EngineDied(actor="a", attempts=[], error="CUDA"))
    assert (again.id, again.attempt, again.actor) == (lost.id, 2, "b")
    assert list(d.core.roster) == ["b"]
    assert d.core.notes["engine_deaths"] == 1


def test_after_max_attempts_a_task_ends_expired_and_is_replaced() -> None:
    d = driven("a", max_attempts=3)
    first, _ = d.ready()
    task = first
    for attempt in (2, 3):
        d.apply(released(task))
        (task,) = d.tasks(heartbeat("a"))
        assert (task.id, task.attempt) == (first.id, attempt)
    d.apply(released(task))
    (replacement,) = d.tasks(heartbeat("a"))
    assert replacement.id != first.id
    assert replacement.reason == "refill"
    assert d.ends == {"expired": 1}


def test_the_first_outcome_of_a_task_wins_whichever_attempt_it_is_of() -> None:
    d = driven("a", "b", lease=10)
    mine = next(task for task in d.ready() if task.actor == "a")
    for _ in range(11):
        d.apply(heartbeat("b"))
        d.wait(1)
    (again,) = [task for task in of(IssueTask, d.log) if task.attempt == 2]
    d.apply(outcome(mine))
    d.apply(failed(again))
    assert d.core.notes["late_outcomes"] == 1
    assert d.ends == {}
    other = next(t for t in of(IssueTask, d.log) if t.id != mine.id and t.attempt == 1)
    (group,) = [g for g in d.batch(outcome(other)).groups if g.task == mine.id]
    assert group.attempt == 1


def test_a_second_attempt_does_not_teach_the_strategy() -> None:
    d = driven("a")
    first, _ = d.ready()
    d.apply(released(first))
    (again,) = d.tasks(heartbeat("a"))
    d.apply(outcome(again))
    assert d.core._training.teaching.distinct == 0


@pytest.mark.parametrize("change", [{"actor": "b"}, {"attempt": 2}, {"task": "0-77"}])
def test_an_outcome_that_nobody_was_asked_for_is_put_aside(change: Any) -> None:
    d = driven("a", "b")
    mine = next(task for task in d.ready() if task.actor == "a")
    assert len(of(DeadLetter, d.apply(outcome(mine, **change)))) == 1
    assert d.core.accounts.in_flight == 2


def test_an_actor_that_joins_again_holds_nothing() -> None:
    d = driven("a")
    tasks = d.ready()
    again = d.tasks(joined("a"))
    assert [(task.id, task.attempt) for task in again] == [(task.id, 2) for task in tasks]


def test_the_summary_of_an_actor() -> None:
    d = driven("a")
    tasks = d.ready()
    d.wait(3)
    d.apply(
        Heartbeat(
            actor="a",
            state="generating",
            version=V0,
            tokens=40,
            seconds={"generating": 2.5},
        ),
        outcome(tasks[0]),
    )
    assert d.core.roster["a"] == {
        "state": "generating",
        "open": 1,
        "capacity": 10,
        "partition": 1,
        "heard": 3.0,
        "tokens": 40,
        "seconds": {"generating": 2.5},
        "outcomes": 1,
    }
