"""Which groups a batch takes, and what it waits for."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from protocol.versions import Version
from scheduler.accounts import Task
from scheduler.rounds import OpenRounds
from tests.scheduler.driving import REF


def opened(
    planned: int, lag: int, tasks: Iterable[tuple[int, int, bool]]
) -> tuple[OpenRounds, list[Task]]:
    """Rounds with tasks, each of (round, step of its version, whether its group is ready)."""
    rounds, made = OpenRounds(planned, lag), []
    for number, (step, version, ready) in enumerate(tasks):
        task = Task(number, Version(0, version), "train", "heap", -1, number, step, 2, 1.0, 0)
        rounds.add(rounds.open(step), task)
        made.append(task)
        if ready:
            rounds.got(task, 1)
            task.ref = REF
            rounds.ready += 1
    return rounds, made


def size(rounds: OpenRounds, step: int) -> int | None:
    return rounds.size(step, rounds.too_old(step))


def test_a_batch_takes_the_oldest_version_first_then_the_order_of_issue() -> None:
    rounds, tasks = opened(2, 1, [(5, 5, True), (5, 4, True), (6, 5, True), (6, 5, True)])
    taken, closed = rounds.take(5, 2)
    assert taken == [tasks[1], tasks[0]]
    assert closed.step == 5
    assert [sorted(each.alive) for each in rounds] == [["0-2", "0-3"]]


def test_what_it_leaves_of_its_own_round_moves_on_in_exchange() -> None:
    rounds, tasks = opened(2, 1, [(0, 0, True), (0, 0, False), (1, 0, True), (1, 0, False)])
    taken, _ = rounds.take(0, 2)
    assert taken == [tasks[0], tasks[2]]
    (later,) = rounds
    assert set(later.alive) == {"0-1", "0-3"}
    assert later.waiting == 2
    assert later.vacant == 0
    assert tasks[1].step == 1
    assert tasks[1].problem in later.used


def test_a_later_round_whose_groups_are_not_made_good_has_vacant_places() -> None:
    rounds, tasks = opened(2, 1, [(0, 0, True), (1, 0, True), (1, 0, False)])
    taken, _ = rounds.take(0, 2)
    assert taken == tasks[:2]
    (later,) = rounds
    assert later.vacant == 1


@pytest.mark.parametrize(
    ("lag", "tasks", "expected"),
    [
        # Lag 0: everything open is too old for the next batch; so many could go without it.
        (0, [(3, 3, True), (3, 3, False)], 1),
        (0, [(3, 3, True), (3, 3, True)], 2),
        # Lag 1: a young task of the round is waited for, unless a full batch is ready.
        (1, [(3, 2, True), (3, 3, False)], None),
        (1, [(3, 2, True), (3, 3, False), (4, 3, True)], 2),
        (1, [(3, 2, True), (3, 2, False)], 1),
        # The round came to nothing: what the later ones have, once they are complete.
        (1, [(4, 3, True), (4, 3, False)], None),
        (1, [(4, 3, True)], 1),
        (1, [], 0),
    ],
)
def test_how_large_the_batch_would_be(
    lag: int, tasks: list[tuple[int, int, bool]], expected: int | None
) -> None:
    rounds, _ = opened(2, lag, tasks)
    rounds.open(3)
    assert size(rounds, 3) == expected


def test_a_group_of_the_oldest_admissible_version_is_waited_for() -> None:
    rounds, tasks = opened(1, 1, [(3, 2, False), (4, 3, True)])
    assert rounds.held(3, 1, rounds.too_old(3))
    assert rounds.late(3, 1) == [tasks[0]]
    rounds, _ = opened(1, 1, [(3, 3, False), (4, 3, True)])
    assert not rounds.held(3, 1, rounds.too_old(3))


def test_at_lag_2_fast_young_groups_do_not_crowd_out_slow_old_ones() -> None:
    # Two slow tasks of version 2 may be trained in batches 3 and 4 (lag 2): if batch 3 took the
    # young group, only batch 4 were left for both of them.
    rounds, tasks = opened(1, 2, [(3, 2, False), (4, 2, False), (5, 3, True)])
    assert rounds.too_old(3) == 0
    assert rounds.held(3, 1, 0)
    assert rounds.late(3, 1) == tasks[:2]
    # With one of them there is room.
    rounds, _ = opened(1, 2, [(3, 2, False), (4, 3, False), (5, 3, True)])
    assert not rounds.held(3, 1, 0)
