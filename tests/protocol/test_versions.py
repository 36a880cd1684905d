"""The on-policy rule, row by row."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.versions import Span, Verdict, Version, covers, judge


def spans(*parts: tuple[int, int, int, int]) -> list[Span]:
    """From (generation, step, start, end)."""
    return [Span(Version(g, s), start, end) for g, s, start, end in parts]


def pure(generation: int, step: int, length: int = 4) -> tuple[list[Span], int]:
    return spans((generation, step, 0, length)), length


BATCH = Version(2, 10)

# completions, max_lag, verdict
TABLE = {
    "pure": ([pure(2, 10), pure(2, 10)], 0, Verdict.ADMISSIBLE),
    "pure in two spans": ([(spans((2, 10, 0, 1), (2, 10, 1, 4)), 4)], 0, Verdict.ADMISSIBLE),
    "one step old": ([pure(2, 9), pure(2, 9)], 0, Verdict.TOO_OLD),
    "one step old, lag 1": ([pure(2, 9)], 1, Verdict.ADMISSIBLE),
    "two steps old, lag 1": ([pure(2, 8)], 1, Verdict.TOO_OLD),
    "oldest allowed, lag 3": ([pure(2, 7), pure(2, 10)], 3, Verdict.ADMISSIBLE),
    "beyond, lag 3": ([pure(2, 6), pure(2, 10)], 3, Verdict.TOO_OLD),
    "one completion older": ([pure(2, 10), pure(2, 9)], 0, Verdict.SPANS_VERSIONS),
    "updated in flight": (
        [(spans((2, 9, 0, 1), (2, 10, 1, 4)), 4)],
        0,
        Verdict.SPANS_VERSIONS,
    ),
    "updated in flight, lag 1": ([(spans((2, 9, 0, 1), (2, 10, 1, 4)), 4)], 1, Verdict.ADMISSIBLE),
    "updated in flight, oldest counts": (
        [(spans((2, 8, 0, 1), (2, 10, 1, 4)), 4)],
        1,
        Verdict.TOO_OLD,
    ),
    "old and mixed": ([(spans((2, 8, 0, 1), (2, 9, 1, 4)), 4)], 0, Verdict.TOO_OLD),
    "newer": ([pure(2, 11)], 0, Verdict.TOO_NEW),
    "newer, lag 5": ([pure(2, 11)], 5, Verdict.TOO_NEW),
    "one token newer": ([(spans((2, 10, 0, 3), (2, 11, 3, 4)), 4)], 1, Verdict.TOO_NEW),
    "other generation": ([pure(1, 10)], 0, Verdict.OTHER_GENERATION),
    "other generation, any lag": ([pure(1, 10)], 99, Verdict.OTHER_GENERATION),
    "later generation": ([pure(3, 0)], 99, Verdict.OTHER_GENERATION),
    "one token of another generation": (
        [pure(2, 10), (spans((1, 9, 0, 1), (2, 10, 1, 4)), 4)],
        99,
        Verdict.OTHER_GENERATION,
    ),
    "no span": ([([], 4)], 0, Verdict.UNPROVEN),
    "one completion without": ([pure(2, 10), ([], 4)], 9, Verdict.UNPROVEN),
    "gap": ([(spans((2, 10, 0, 1), (2, 10, 2, 4)), 4)], 9, Verdict.UNPROVEN),
    "gap at the start": ([(spans((2, 10, 1, 4)), 4)], 9, Verdict.UNPROVEN),
    "gap at the end": ([(spans((2, 10, 0, 3)), 4)], 9, Verdict.UNPROVEN),
    "overlap": ([(spans((2, 10, 0, 3), (2, 10, 2, 4)), 4)], 9, Verdict.UNPROVEN),
    "beyond the end": ([(spans((2, 10, 0, 5)), 4)], 9, Verdict.UNPROVEN),
    "nothing at all": ([], 0, Verdict.UNPROVEN),
    "no token": ([([], 0)], 0, Verdict.UNPROVEN),
    "one without a token": ([pure(2, 10), ([], 0)], 0, Verdict.ADMISSIBLE),
}


@pytest.mark.parametrize(("completions", "max_lag", "verdict"), TABLE.values(), ids=TABLE.keys())
def test_judge(completions: list[tuple[list[Span], int]], max_lag: int, verdict: Verdict) -> None:
    assert judge(completions, BATCH, max_lag) is verdict


def test_at_the_first_steps_any_lag_reaches_to_the_first_weights() -> None:
    assert judge([pure(2, 0)], Version(2, 1), 5) is Verdict.ADMISSIBLE


@pytest.mark.parametrize(
    ("verdict", "end"),
    [
        (Verdict.OTHER_GENERATION, "stale"),
        (Verdict.TOO_OLD, "stale"),
        (Verdict.TOO_NEW, "impure"),
        (Verdict.SPANS_VERSIONS, "impure"),
        (Verdict.UNPROVEN, "impure"),
    ],
)
def test_every_refusal_has_its_end_in_the_accounts(verdict: Verdict, end: str) -> None:
    assert verdict.end == end


def test_an_admissible_group_has_no_refusal() -> None:
    with pytest.raises(ValueError, match="no end of refusal"):
        _ = Verdict.ADMISSIBLE.end


steps = st.integers(0, 20)


@given(st.lists(steps, min_size=1, max_size=6), steps, st.integers(0, 4))
def test_a_pure_group_is_admissible_exactly_within_the_lag(
    sampled: list[int], step: int, max_lag: int
) -> None:
    admissible = all(step - max_lag <= s <= step for s in sampled)
    verdict = judge([pure(0, s) for s in sampled], Version(0, step), max_lag)
    assert (verdict is Verdict.ADMISSIBLE) == admissible


@given(st.lists(st.integers(1, 5), max_size=6))
def test_spans_end_to_end_cover_and_one_missing_does_not(lengths: list[int]) -> None:
    parts, position = [], 0
    for length in lengths:
        parts.append(Span(Version(0, 0), position, position + length))
        position += length
    assert covers(parts, position)
    assert not covers(parts, position + 1)
    for i in range(len(parts)):
        assert not covers(parts[:i] + parts[i + 1 :], position)


def test_versions_are_ordered_as_pairs_and_read_back() -> None:
    assert max(Version(0, 900), Version(1, 0), Version(0, 901)) == Version(1, 0)
    assert Version.parse("3.17") == Version(3, 17)
    assert Version(3, 17).next_step() == Version(3, 18)


@pytest.mark.parametrize("text", ["3", "3.", ".1", "a.b", "1.2.3", "-1.0", "1.-1", ""])
def test_other_texts_are_no_version(text: str) -> None:
    with pytest.raises(ValueError, match="not of the form"):
        Version.parse(text)
