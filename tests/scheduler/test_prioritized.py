"""Prioritized replay: which problems are chosen, and why."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.config import PrioritizedConfig
from scheduler.grading import Figures
from scheduler.pools import posterior_mean
from scheduler.strategies.prioritized import FALLBACK_NOTICE, Prioritized

NONE: frozenset[int] = frozenset()


def strategy(problems: int, **config: Any) -> Prioritized:
    plain = {"exploration": 0.0, "retest_share": 0.0, "cooldown": 0}
    return Prioritized(PrioritizedConfig(**{**plain, **config}), problems, seed=1)


def group(right: int, n: int = 8) -> Figures:
    p = right / n
    return Figures(n, right, p, p, p * (1 - p), right in (0, n), False)


def visit(s: Prioritized, step: int, right: dict[int, int] | int, count: int = 0) -> list[int]:
    """Choose problems for `step`, show a group of each, and give them back."""
    picks = [p for p, _ in s.select(step, count or len(right), NONE)]  # type: ignore[arg-type]
    for problem in picks:
        s.observe(problem, step, group(right if isinstance(right, int) else right[problem]))
        s.free(problem)
    return picks


def test_the_problem_nearest_to_one_half_comes_first() -> None:
    s = strategy(4)
    visit(s, 0, {0: 1, 1: 4, 2: 6, 3: 2})
    order = [s.select(step, 1, NONE)[0] for step in range(1, 5)]
    # ω·64 = right · (8 − right): 7, 16, 12, 12; the two 12s in random order.
    assert order[0] == (1, "heap")
    assert {order[1][0], order[2][0]} == {2, 3}
    assert order[3] == (0, "heap")


@pytest.mark.parametrize(("right", "reason"), [(4, "heap"), (1, "unseen")])
def test_an_unseen_problem_stands_at_the_expected_omega(right: int, reason: str) -> None:
    s = strategy(10, initial_omega=1 / 6)
    visit(s, 0, right, count=1)
    # (1/6 + ω)/2 is below ω = ¼ and above ω = 7/64.
    assert s.select(1, 1, NONE)[0][1] == reason


def test_the_expected_omega_is_the_mean_of_first_visits_begun_at_initial_omega() -> None:
    s = strategy(3, initial_omega=0.1, cooldown=3)
    assert s.expected_omega == 0.1
    for step, right in enumerate((4, 0, 2)):
        visit(s, step, right, count=1)
    after = (0.1 + 16 / 64 + 0 + 12 / 64) / 4
    assert s.expected_omega == pytest.approx(after)
    visit(s, 9, 4, count=3)
    assert s.expected_omega == pytest.approx(after)


def test_the_optimistic_option_sees_every_problem_before_it_replays_one() -> None:
    s = strategy(40, initial="optimistic", cooldown=1)
    reasons = []
    for step in range(14):
        picks = s.select(step, 4, NONE)
        reasons += [reason for _, reason in picks]
        for problem, _ in picks:
            s.observe(problem, step, group(4))
            s.free(problem)
    assert reasons[:40] == ["unseen"] * 40
    assert set(reasons[40:]) == {"heap"}


@pytest.mark.parametrize(("cooldown", "again"), [(0, 4), (1, 4), (2, 5), (5, 8)])
def test_a_problem_used_in_step_s_is_eligible_from_s_plus_cooldown_on(
    cooldown: int, again: int
) -> None:
    s = strategy(20, cooldown=cooldown, initial_omega=0.01)
    picks = visit(s, 3, 4, count=1)
    chosen_at = next(
        step for step in range(3, 20) if picks[0] in [p for p, _ in s.refill(step, 1, NONE)]
    )
    assert chosen_at == again


def test_a_task_that_taught_nothing_leaves_its_problem_as_it_was() -> None:
    s = strategy(1, cooldown=1)
    ((problem, reason),) = s.select(0, 1, NONE)
    s.free(problem)
    assert s.select(1, 1, NONE) == [(problem, reason)] == [(0, "unseen")]


def test_exploration_takes_its_exact_share_over_all_problems_not_those_of_the_heap() -> None:
    s = strategy(40, exploration=0.3, cooldown=1)
    explored: list[int] = []
    for step in range(4000):
        picks = s.select(step, 3, NONE)
        explored += [problem for problem, reason in picks if reason == "explore"]
        for problem, _ in picks:
            # Half of the problems are mixed, and the heap chooses them; the others never are.
            s.observe(problem, step, group(4 if problem < 20 else 0))
            s.free(problem)
    assert len(explored) == 3600  # .3 · 3 · 4000: nothing is lost to rounding
    # Half of the draws ± sqrt(3600)/2 = 30; 5 standard deviations.
    assert abs(sum(problem < 20 for problem in explored) - 1800) < 150


def test_exploration_is_uniform_where_nothing_cools() -> None:
    s = strategy(10, exploration=1.0)
    drawn = Counter(visit(s, step, 4, count=1)[0] for step in range(5000))
    # χ² with 9 degrees of freedom: above 33.7 once in 10,000.
    assert sum((n - 500) ** 2 / 500 for n in drawn.values()) < 33.7


def test_exploration_finds_the_last_eligible_problem_and_then_none() -> None:
    s = strategy(5000, exploration=1.0, cooldown=9)
    picked = [p for p, reason in s.select(0, 4999, NONE) if reason == "explore"]
    assert len(set(picked)) == 4999
    assert s.select(0, 2, NONE)[0][1] == "explore"
    assert s.select(0, 1, NONE) == []


def test_the_first_zero_variance_group_stays_in_the_heap_at_the_posterior_mean() -> None:
    s = strategy(3, retest_after=5)
    visit(s, 0, {0: 8, 1: 0, 2: 1})
    assert s.pools() == {
        "unseen": 0,
        "heap": 0,
        "solved": 0,
        "unsolved": 0,
        "cooling": 3,
        "in_flight": 0,
    }
    picks = s.select(1, 3, NONE)
    assert picks[0] == (2, "heap")  # 7/64 is more than the posterior mean, .05
    assert {picks[1], picks[2]} == {(0, "heap"), (1, "heap")}
    assert s._omega[0] == s._omega[1] == posterior_mean(8, 8)


def test_further_ones_send_it_away_until_its_due_date() -> None:
    s = strategy(2, retest_after=3, retest_share=0.5)
    visit(s, 0, {0: 8, 1: 4})
    visit(s, 1, {0: 8, 1: 4})
    # Second in a row at step 1: due 2 · 3 steps later.
    assert s.refill(6, 2, NONE) == [(1, "refill")]
    s.free(1)
    assert s.pools()["solved"] == 1
    assert s.select(7, 2, NONE) == [(0, "retest_solved"), (1, "heap")]


def test_retests_are_due_ahead_of_the_heap_oldest_first_up_to_their_share() -> None:
    s = strategy(60, retest_after=2, retest_share=0.25)
    for step in range(10):
        for problem, _ in s.refill(step, 4, NONE):
            s.observe(problem, step, group(0 if problem % 2 else 8))
            s.free(problem)
    due = [s._pools._due[problem] for problem in range(60)]
    picks = s.select(12, 8, NONE)
    retests = [(problem, reason) for problem, reason in picks if reason.startswith("retest")]
    assert len(retests) == 2
    assert picks[:2] == retests
    watched = sorted(due[problem] for problem in range(60) if due[problem])
    assert [due[problem] for problem, _ in retests] == watched[:2]
    for problem, reason in retests:
        assert reason == ("retest_unsolved" if problem % 2 else "retest_solved")


def test_cooldown_binds_where_the_due_date_comes_earlier() -> None:
    s = strategy(4, retest_after=1, retest_share=1.0, cooldown=5)
    (problem,) = visit(s, 0, 0, count=1)
    for step in range(1, 5):
        assert problem not in [p for p, _ in s.refill(step, 1, NONE)]
    assert s.select(5, 1, NONE) == [(problem, "retest_unsolved")]


def test_a_fractional_share_is_exact_over_a_run() -> None:
    s = strategy(4000, exploration=0.1, cooldown=1)
    reasons = Counter(r for step in range(100) for _, r in s.select(step, 7, NONE))
    assert reasons["explore"] == 70


def test_a_replacement_comes_from_heap_and_unseen_and_never_from_a_pool() -> None:
    s = strategy(6, retest_after=1, retest_share=1.0, exploration=0.0)
    for step in (0, 1):
        for problem, _ in s.refill(step, 3, NONE):
            s.observe(problem, step, group(0))
            s.free(problem)
    away = {p for p in range(6) if s._status[p] == 5}
    taken: list[int] = []
    for step in range(50, 60):
        taken += [problem for problem, reason in s.refill(step, 6, NONE) if reason == "refill"]
    assert set(taken) == set(range(6)) - away
    assert s.refill(70, 6, NONE) == []


def test_the_fallback_is_said_once() -> None:
    s = strategy(4, cooldown=3)
    visit(s, 0, 4, count=2)
    picks = s.select(1, 4, NONE)
    assert [reason for _, reason in picks] == ["unseen", "unseen", "fallback", "fallback"]
    assert s.take_notices() == [FALLBACK_NOTICE]
    for problem, _ in picks:
        s.free(problem)
    assert [reason for _, reason in s.select(2, 4, NONE)] == ["fallback"] * 4
    assert s.take_notices() == []


def test_the_fallback_takes_due_problems_before_later_dates_before_cooling_ones() -> None:
    s = strategy(3, retest_after=4, cooldown=2, initial_omega=0.001)
    dates: dict[int, int] = {}
    # Each problem is shown twice without variance: away, with a date 8 steps after the second.
    for step, problem in ((0, 0), (2, 0), (3, 1), (5, 1)):
        others = {p for p in range(3) if p != problem}
        ((chosen, _),) = s.refill(step, 1, others)
        assert chosen == problem
        s.observe(problem, step, group(0))
        s.free(problem)
        dates[problem] = step + 8
    ((last, _),) = s.refill(11, 1, NONE)
    s.observe(last, 11, group(4))
    s.free(last)
    assert dates == {0: 10, 1: 13}
    # At step 12 problem 0 is due, 1 is not yet, 2 cools until 13.
    assert s.select(12, 3, NONE) == [(0, "fallback"), (1, "fallback"), (2, "fallback")]


def test_used_problems_are_never_chosen() -> None:
    s = strategy(30, exploration=0.5, retest_share=0.5, retest_after=1)
    for step in range(4):
        visit(s, step, 0, count=10)
    used = set(range(0, 30, 2))
    assert not used & {problem for problem, _ in s.select(9, 30, used)}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(0, 6), st.sampled_from([0, 0.3, 1]))
def test_every_problem_is_in_one_place_and_a_reload_continues_alike(
    seed: int, problems: int, cooldown: int, exploration: float
) -> None:
    rng = Random(seed)
    config = {"exploration": exploration, "cooldown": cooldown, "retest_after": 2, "retest_max": 9}
    s, flying = strategy(problems, **config), list[tuple[int, int]]()
    for step in range(25):
        for _ in range(rng.randrange(3)):
            used = set(rng.sample(range(problems), rng.randrange(problems + 1)))
            choose = rng.choice([s.select, s.refill])
            at = step + rng.randrange(3)
            chosen = [problem for problem, _ in choose(at, rng.randrange(6), used)]
            assert len(set(chosen)) == len(chosen)
            assert not set(chosen) & (used | {problem for problem, _ in flying})
            flying += [(problem, at) for problem in chosen]
        rng.shuffle(flying)
        for problem, at in flying[: rng.randrange(len(flying) + 1)]:
            if rng.random() < 0.8:
                s.observe(problem, at, group(rng.choice([0, 0, 3, 4, 8, 8])))
            s.free(problem)
            flying.remove((problem, at))
        pools = s.pools()
        assert sum(pools.values()) == problems
        assert pools["in_flight"] == len(flying)
    other = strategy(problems, **config)
    other.load(s.state())
    for step in range(30, 40):
        assert other.state() == s.state()
        picks = s.select(step, 5, NONE)
        assert other.select(step, 5, NONE) == picks
        for problem, _ in picks:
            for each in (s, other):
                each.observe(problem, step, group(problem % 9))
                each.free(problem)
