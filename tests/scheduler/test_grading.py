"""What is counted of a group."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.config import GradingConfig
from protocol.counting import has_variance, omega, solve_rate
from protocol.messages import Outcome
from protocol.versions import Version
from scheduler.grading import Grader

REWARD = st.none() | st.floats(-10, 10)


def group(rewards: list[Any], correct: list[Any] | None = None, truncated: int = 0) -> Outcome:
    n = len(rewards)
    counted = [None if r is None else 1.0 if r >= 1 else 0.0 for r in rewards]
    return Outcome(
        actor="a",
        task="0-0",
        attempt=1,
        status="ok",
        rewards=rewards,
        correct=counted if correct is None else correct,
        lengths=[1] * n,
        truncated=[k < truncated for k in range(n)],
        oldest=Version(0, 0),
        newest=Version(0, 0),
    )


@pytest.mark.parametrize("right", range(9))
def test_for_rewards_0_and_1_omega_is_p_times_1_minus_p(right: int) -> None:
    figures = Grader(GradingConfig()).figures(group([1.0] * right + [0.0] * (8 - right)))
    assert figures.p == right / 8
    assert figures.omega == pytest.approx(right / 8 * (1 - right / 8), abs=1e-15)
    assert figures.zero_variance == (right in (0, 8))
    assert figures.mixed == (0 < right < 8)


def test_omega_is_in_units_of_the_declared_range() -> None:
    grading = GradingConfig(range=(-1.0, 1.0))
    assert Grader(grading).figures(group([1.0, -1.0])).omega == 0.25


@given(st.lists(REWARD, min_size=1, max_size=20))
def test_the_figures_are_those_that_all_processes_share(rewards: list[float | None]) -> None:
    grading = GradingConfig(range=(-10.0, 10.0))
    outcome = group(rewards)
    if all(reward is None for reward in rewards):
        with pytest.raises(ValueError, match="graded"):
            Grader(grading).figures(outcome)
        return
    figures = Grader(grading).figures(outcome)
    assert figures.graded == sum(reward is not None for reward in rewards)
    assert figures.p == pytest.approx(solve_rate(outcome.correct))
    assert figures.omega == pytest.approx(omega(rewards, 20.0), abs=1e-15)
    assert figures.zero_variance == (not has_variance(rewards, 1e-6, 20.0))


def test_variance_in_the_reward_alone_is_shaping_only() -> None:
    figures = Grader(GradingConfig()).figures(group([0.2, 0.4], correct=[0.0, 0.0]))
    assert figures.shaping_only
    assert not figures.zero_variance
    assert figures.p == 0


def test_a_group_without_variance_is_of_one_of_three_kinds() -> None:
    grader = Grader(GradingConfig())
    assert grader.figures(group([1.0, 1.0])).kind == "all_right"
    assert grader.figures(group([0.0, 0.0])).kind == "all_wrong"
    assert grader.figures(group([0.0, 0.0, 0.0], truncated=2)).kind == "mostly_truncated"
    assert grader.figures(group([0.0, 0.0], truncated=1)).kind == "all_wrong"


def test_rewards_whose_squares_overflow_are_an_arithmetic_error() -> None:
    with pytest.raises(ArithmeticError):
        Grader(GradingConfig()).figures(group([1e300, -1e300]))
    assert math.isfinite(Grader(GradingConfig()).figures(group([1e100, 0.0])).omega)
