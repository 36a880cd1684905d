"""Which task runs next, which waits, and which has become useless."""

from __future__ import annotations

from typing import Any

import pytest

from actors.intake import Intake, is_useless
from protocol.messages import Task
from protocol.versions import Version

NOW = Version(1, 5)


def task(number: int, version: Version = NOW, **fields: Any) -> Task:
    return Task(
        **{
            "id": f"{version.generation}-{number}",
            "attempt": 1,
            "actor": "a",
            "problem": "p",
            "purpose": "train",
            "reason": "heap",
            "version": version,
            "group_size": 2,
            "temperature": 1.0,
            "max_tokens": 8,
            "seed": 0,
            "prompt": "?",
            **fields,
        }
    )


def intake(*tasks: Task, slots: int = 2, max_lag: int = 0) -> Intake:
    made = Intake(slots, max_lag)
    for offset, held in enumerate(tasks):
        assert made.offer(held, offset, now=float(offset))
    return made


def test_at_most_slots_run_and_the_rest_waits_in_order() -> None:
    tasks = [task(n) for n in range(4)]
    held = intake(*tasks)
    assert held.start(NOW) == tasks[:2]
    assert held.start(NOW) == []
    held.end(tasks[1])
    assert held.start(NOW) == [tasks[2]]
    assert held.waiting == [tasks[3]]


def test_a_sampled_task_is_still_held_and_takes_no_slot() -> None:
    tasks = [task(n) for n in range(3)]
    held = intake(*tasks)
    held.start(NOW)
    held.sampled(tasks[0])
    assert held.start(NOW) == [tasks[2]]
    assert held.finishing == [tasks[0]]
    assert {t.id for t in held.started} == {t.id for t in tasks}
    # Newer weights take nothing away from what has left the engine.
    assert held.useless(Version(1, 6)) == tasks[1:]
    held.end(tasks[0])
    assert held.started == tasks[1:]


def test_an_attempt_enters_once_also_after_it_ended_and_the_next_attempt_does() -> None:
    first = task(0)
    held = intake(first)
    assert not held.offer(first, 1, now=0)
    held.start(NOW)
    held.end(first)
    assert not held.offer(first, 2, now=0)
    assert held.offer(task(0, attempt=2), 3, now=0)


def test_a_task_that_waits_for_weights_blocks_no_other() -> None:
    later, ready = task(0, Version(1, 6)), task(1)
    held = intake(later, ready, slots=1)
    assert held.start(NOW) == [ready]
    assert held.lacking(NOW) == [later]
    held.end(ready)
    assert held.start(NOW) == []
    assert held.start(Version(1, 6)) == [later]


def test_a_task_alone_runs_by_itself_and_is_not_starved() -> None:
    tasks = [task(0), task(1, alone=True), task(2)]
    held = intake(*tasks, slots=3)
    assert held.start(NOW) == [tasks[0]]
    held.end(tasks[0])
    assert held.start(NOW) == [tasks[1]]
    assert held.start(NOW) == []
    held.end(tasks[1])
    assert held.start(NOW) == [tasks[2]]


def test_what_waits_too_long_for_newer_weights_is_overdue() -> None:
    later, ready = task(0, Version(2, 0)), task(1)
    held = intake(ready, later, slots=0)
    assert held.overdue(NOW, now=10.0, wait=9.0) == []
    assert held.overdue(NOW, now=10.5, wait=9.0) == [later]
    assert held.overdue(Version(2, 0), now=99.0, wait=9.0) == []


@pytest.mark.parametrize(
    ("fields", "max_lag", "useless"),
    [
        ({"version": Version(1, 5)}, 0, False),
        ({"version": Version(1, 4)}, 0, True),
        ({"version": Version(1, 4)}, 1, False),
        ({"version": Version(1, 3)}, 1, True),
        ({"version": Version(1, 6)}, 0, False),
        ({"version": Version(0, 5)}, 9, True),
        ({"version": Version(2, 0)}, 0, False),
        ({"version": Version(1, 4), "purpose": "eval", "exact": True}, 9, True),
        ({"version": Version(1, 5), "purpose": "eval", "exact": True}, 0, False),
        ({"version": Version(1, 6), "purpose": "eval", "exact": True}, 0, False),
    ],
)
def test_useless_is_what_no_batch_and_no_evaluation_can_use(
    fields: dict[str, Any], max_lag: int, useless: bool
) -> None:
    assert is_useless(task(0, **fields), NOW, max_lag) is useless


def test_lag_is_counted_from_the_oldest_task_that_has_not_started() -> None:
    held = intake(task(0), task(1), task(2), slots=2)
    assert held.unstarted_offset == 0
    held.start(NOW)
    assert held.unstarted_offset == 2
    held.end(held.running[0])
    held.start(NOW)
    assert held.unstarted_offset == 3
