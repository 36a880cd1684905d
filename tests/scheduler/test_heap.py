"""The addressable heap against a plain dictionary."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.heap import AddressableHeap

PROBLEMS = 12
PRIORITY = st.floats(allow_nan=False, width=64) | st.sampled_from([0.0, -0.0, 0.25, 1 / 6])
OPERATION = st.tuples(st.integers(0, PROBLEMS - 1), st.sampled_from("puxt"), PRIORITY)


def heap(problems: int = PROBLEMS, seed: int = 0) -> AddressableHeap:
    return AddressableHeap(problems, Random(seed))


@given(st.lists(OPERATION, max_size=200), st.integers(0, 200))
def test_it_is_a_dictionary_whose_largest_value_can_be_taken(
    operations: list[tuple[int, str, float]], reload_at: int
) -> None:
    mine, model = heap(), dict[int, float]()
    for number, (problem, operation, priority) in enumerate(operations):
        if number == reload_at:
            state = mine.state()
            mine = heap(seed=1)
            mine.load(state)
        if operation == "p" and problem not in model:
            mine.push(problem, priority)
            model[problem] = priority
        elif operation == "u" and problem in model:
            mine.update(problem, priority)
            model[problem] = priority
        elif operation == "x" and problem in model:
            assert mine.remove(problem) == model.pop(problem)
        elif operation == "t" and model:
            assert mine.peek()[1] == max(model.values())
            top, value = mine.pop()
            assert model.pop(top) == value
        assert len(mine) == len(model)
        assert set(mine) == set(model)
        assert all((p in mine) == (p in model) for p in range(PROBLEMS))
    drained = [mine.pop() for _ in range(len(mine))]
    assert [value for _, value in drained] == sorted(model.values(), reverse=True)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda h: (h.push(1, 0.1), h.push(1, 0.2)), ValueError),
        (lambda h: h.update(1, 0.1), KeyError),
        (lambda h: h.remove(1), KeyError),
        (lambda h: h.priority(1), KeyError),
        (lambda h: h.pop(), IndexError),
        (lambda h: h.peek(), IndexError),
    ],
)
def test_what_is_not_there_is_an_error(call: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        call(heap())


def test_a_problem_that_left_is_never_given_out_again_by_what_it_left_behind() -> None:
    mine = heap()
    mine.push(3, 1.0)
    mine.push(4, 0.5)
    mine.remove(3)
    mine.push(3, 0.1)
    assert [mine.pop()[0] for _ in range(2)] == [4, 3]


def test_its_size_stays_of_the_order_of_what_is_in_it() -> None:
    mine = heap(1000)
    for problem in range(1000):
        mine.push(problem, 0.1)
    for round_ in range(50):
        for problem in range(1000):
            mine.update(problem, 0.001 * round_)
    assert len(mine._entries) <= 1.5 * 1000 + 64
    for problem in range(990):
        mine.remove(problem)
    assert len(mine._entries) <= 1.5 * 10 + 64


def test_equal_priorities_come_out_in_random_order() -> None:
    first: Counter[int] = Counter()
    rng = Random(5)
    for _ in range(2000):
        mine = AddressableHeap(4, rng)
        for problem in range(4):
            mine.push(problem, 0.25)
        first[mine.pop()[0]] += 1
    # Each is first 500 ± 19 times (binomial); 5 standard deviations.
    assert all(abs(first[problem] - 500) < 97 for problem in range(4))
