"""Due dates of problems without variance, and the calendar of cooling ones."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.cooldown import Cooldown
from scheduler.pools import Pools, posterior_mean


def by_quadrature(correct: int, graded: int) -> float:
    """E[p(1−p)] under Beta(½ + correct, ½ + graded − correct), by the midpoint rule.

    With p = sin²θ the density p^(a−1) (1−p)^(b−1) dp is 2 sin^(2a−1)θ cos^(2b−1)θ dθ, smooth even
    for a = ½.
    """
    n, a, b = 20_000, 0.5 + correct, 0.5 + graded - correct
    mass = total = 0.0
    for k in range(n):
        theta = (k + 0.5) / n * math.pi / 2
        s, c = math.sin(theta), math.cos(theta)
        weight = s ** (2 * a - 1) * c ** (2 * b - 1)
        mass += weight
        total += weight * (s * c) ** 2
    return total / mass


@pytest.mark.parametrize(("correct", "graded"), [(0, 8), (8, 8), (16, 16), (3, 8), (0, 1)])
def test_the_posterior_mean_of_p_1_minus_p_is_its_integral(correct: int, graded: int) -> None:
    assert posterior_mean(correct, graded) == pytest.approx(by_quadrature(correct, graded))


def test_the_first_group_watches_and_further_ones_send_away_with_double_the_delay() -> None:
    pools = Pools(1, Random(0), retest_after=10, retest_max=35)
    dates = []
    for step in (100, 200, 300, 400):
        away = pools.zero_variance(0, step)
        assert away == (step > 100)
        pools.put(0)
        dates.append(pools.earliest())
        pools.take(0)
    assert dates == [(0, 110), (0, 220), (0, 335), (0, 435)]


def test_a_group_with_variance_ends_the_wait_and_the_delay_begins_anew() -> None:
    pools = Pools(1, Random(0), retest_after=10, retest_max=160)
    pools.zero_variance(0, 0)
    pools.zero_variance(0, 20)
    pools.mixed(0)
    pools.put(0)
    assert pools.earliest() is None
    assert not pools.zero_variance(0, 50)
    pools.put(0)
    assert pools.earliest() == (0, 60)


def test_the_earliest_date_comes_first() -> None:
    pools = Pools(5, Random(0), retest_after=10, retest_max=160)
    for problem, step in ((0, 7), (1, 3), (2, 9), (3, 1)):
        pools.zero_variance(problem, step)
        pools.put(problem)
    order = []
    while (first := pools.earliest()) is not None:
        order.append(first)
        pools.take(first[0])
    assert order == [(3, 11), (1, 13), (0, 17), (2, 19)]


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=40, unique_by=lambda x: x[0]
    )
)
def test_the_calendar_gives_each_problem_once_when_its_step_comes(
    entries: list[tuple[int, int]],
) -> None:
    calendar = Cooldown()
    for problem, until in entries:
        calendar.add(problem, until)
    if entries:
        calendar.remove(*entries[0])
        del entries[0]
    assert sorted(calendar.oldest(), key=lambda p: dict(entries)[p]) == calendar.oldest()
    came: dict[int, int] = {}
    for step in range(22):
        for problem in calendar.due(step):
            assert problem not in came
            came[problem] = step
        assert len(calendar) == len(entries) - len(came)
    assert came == dict(entries)
