"""Uniform: shuffled epochs."""

from __future__ import annotations

from collections import Counter

from scheduler.grading import Figures
from scheduler.strategies.uniform import Uniform

NONE: frozenset[int] = frozenset()


def epochs(s: Uniform, picks: int, at_once: int = 4) -> list[int]:
    order: list[int] = []
    for step in range(picks // at_once):
        chosen = [problem for problem, _ in s.select(step, at_once, NONE)]
        for problem in chosen:
            s.free(problem)
        order += chosen
    return order


def test_each_problem_comes_once_an_epoch_in_an_order_that_differs() -> None:
    order = epochs(Uniform(20, seed=0), 100)
    parts = [order[k : k + 20] for k in range(0, 100, 20)]
    assert all(sorted(part) == list(range(20)) for part in parts)
    assert len({tuple(part) for part in parts}) == 5


def test_the_seed_decides_the_order() -> None:
    assert epochs(Uniform(20, seed=0), 40) == epochs(Uniform(20, seed=0), 40)
    assert epochs(Uniform(20, seed=0), 40) != epochs(Uniform(20, seed=1), 40)


def test_the_first_of_an_epoch_is_uniform() -> None:
    first = Counter(epochs(Uniform(5, seed=n), 1, at_once=1)[0] for n in range(2000))
    # χ² with 4 degrees of freedom: above 23.5 once in 10,000.
    assert sum((n - 400) ** 2 / 400 for n in first.values()) < 23.5


def test_a_problem_in_flight_at_its_turn_is_deferred_not_lost() -> None:
    s = Uniform(4, seed=3)
    ((held, _),) = s.select(0, 1, NONE)
    for step in range(1, 4):
        ((problem, _),) = s.select(step, 1, NONE)
        s.free(problem)
    later = []
    for step in range(4, 8):
        if step == 7:
            s.free(held)
        ((problem, _),) = s.select(step, 1, NONE)
        later.append(problem)
        s.free(problem)
    # The next epoch is whole; the held one comes in it as soon as it can.
    assert sorted(later) == [0, 1, 2, 3]
    assert later[3] == held


def test_where_all_are_in_flight_or_used_there_are_no_more() -> None:
    s = Uniform(5, seed=0)
    assert len(s.select(0, 9, {1, 2})) == 3
    assert s.refill(0, 1, {1, 2}) == []
    assert {problem for problem, reason in s.refill(0, 9, NONE) if reason == "refill"} == {1, 2}


def test_pools_tell_the_latest_group_and_a_reload_continues_alike() -> None:
    s = Uniform(6, seed=0)
    for number, (problem, reason) in enumerate(s.select(0, 4, NONE)):
        assert reason == "explore"
        right = (0, 8, 4, 4)[number]
        s.observe(problem, 0, Figures(8, right, right / 8, 0, 0, right in (0, 8), False))
        if number < 3:
            s.free(problem)
    assert s.pools() == {
        "unseen": 2,
        "heap": 1,
        "solved": 1,
        "unsolved": 1,
        "cooling": 0,
        "in_flight": 1,
    }
    other = Uniform(6, seed=9)
    other.load(s.state())
    assert [s.refill(1, 2, NONE) for _ in range(4)] == [other.refill(1, 2, NONE) for _ in range(4)]
