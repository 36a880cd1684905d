"""The buffer of groups: what is kept, what is handed out, and the end of everything else."""

from __future__ import annotations

import hashlib

import pytest

from learner.groups import GroupBuffer
from protocol.codec import ProtocolError, encode
from protocol.messages import BatchGroup, Completion, GroupEnd, GroupRef, RewardGroup
from protocol.versions import Span, Version
from tests.learner.tiny import make_group

MISSING = "not found"


def group_of(spans: list[Span], number: int = 1) -> RewardGroup:
    """A group of two completions of 3 tokens; the second has `spans`."""
    group = make_group(number, [1.0, 0.0], [3, 3], prompt_length=2, version=spans[0].version)
    first, second = group.completions
    fields = {name: getattr(second, name) for name in second.__struct_fields__}
    changed = Completion(**{**fields, "spans": spans})
    return RewardGroup(
        **{
            **{name: getattr(group, name) for name in group.__struct_fields__},
            "completions": [first, changed],
        }
    )


def pure(version: Version, number: int = 1) -> RewardGroup:
    return group_of([Span(version, 0, 3)], number)


class Filled:
    """A buffer that one group was put into, and the batch's name for it."""

    def __init__(self, group: RewardGroup, *, max_lag: int = 0, capacity: int = 9) -> None:
        self.raw = encode(group)
        self.buffer = GroupBuffer(0, max_lag, capacity)
        ref = GroupRef(0, 5, hashlib.sha256(self.raw).digest())
        self.named = BatchGroup(group.task, group.attempt, ref)
        self.group = group

    def add(self) -> None:
        self.buffer.add((0, 5), self.raw, self.group)

    def take(self, version: Version) -> bytes | GroupEnd:
        return self.buffer.take(self.named, version, MISSING)


def test_a_pure_group_of_the_batchs_version_is_handed_out_once() -> None:
    filled = Filled(pure(Version(0, 0)))
    assert not filled.buffer.knows(filled.named.ref)
    filled.add()
    assert filled.buffer.knows(filled.named.ref)
    assert filled.take(Version(0, 0)) == filled.raw
    assert filled.take(Version(0, 0)) == GroupEnd(filled.group.task, 1, "failed", MISSING)


@pytest.mark.parametrize(
    ("spans", "end", "why"),
    [
        ([Span(Version(0, 3), 0, 3)], "stale", "too_old"),
        ([Span(Version(1, 4), 0, 3)], "stale", "other_generation"),
        ([Span(Version(0, 3), 0, 1), Span(Version(0, 4), 1, 3)], "impure", "spans_versions"),
        ([Span(Version(0, 4), 0, 2)], "impure", "unproven"),
        ([Span(Version(0, 5), 0, 3)], "impure", "too_new"),
    ],
)
@pytest.mark.parametrize("advanced", [False, True])
def test_a_group_that_the_rule_refuses_ends_with_the_verdict(
    spans: list[Span], end: str, why: str, advanced: bool
) -> None:
    group = group_of(spans)
    filled = Filled(group)
    if advanced:
        filled.buffer.advance(4)
    filled.add()
    filled.buffer.advance(4)
    assert filled.take(Version(0, 4)) == GroupEnd(group.task, 1, end, why)  # type: ignore[arg-type]


def test_lag_is_counted_when_the_batch_is_trained_by_the_oldest_token() -> None:
    spans = [Span(Version(0, 2), 0, 1), Span(Version(0, 4), 1, 3)]
    for step, admitted in ((4, True), (5, False)):
        filled = Filled(group_of(spans), max_lag=2)
        filled.add()
        filled.buffer.advance(step)
        assert len(filled.buffer) == admitted
        taken = filled.take(Version(0, step))
        assert taken == (
            filled.raw if admitted else GroupEnd(filled.group.task, 1, "stale", "too_old")
        )


def test_a_group_of_weights_ahead_of_the_batch_waits_for_its_own() -> None:
    filled = Filled(pure(Version(0, 1)))
    filled.add()
    filled.buffer.advance(1)
    assert filled.take(Version(0, 1)) == filled.raw


def test_other_content_than_the_outcome_named_is_failed() -> None:
    filled = Filled(pure(Version(0, 0)))
    other = pure(Version(0, 0), number=2)
    filled.buffer.add((0, 5), encode(other), other)
    end = filled.take(Version(0, 0))
    assert isinstance(end, GroupEnd)
    assert (end.task, end.end) == (filled.group.task, "failed")
    assert "partition 0 offset 5 of groups has other content" in end.why


def test_the_digest_decides_even_where_the_id_agrees() -> None:
    filled = Filled(pure(Version(0, 0)))
    ref = GroupRef(0, 5, bytes(32))
    filled.add()
    end = filled.buffer.take(BatchGroup(filled.group.task, 1, ref), Version(0, 0), MISSING)
    assert isinstance(end, GroupEnd)
    assert end.end == "failed"


def test_a_record_that_is_no_group_is_failed_with_its_error() -> None:
    filled = Filled(pure(Version(0, 0)))
    filled.buffer.add((0, 5), b"x", ProtocolError("not msgpack"))
    assert filled.buffer.knows(filled.named.ref)
    end = filled.take(Version(0, 0))
    assert end == GroupEnd(filled.group.task, 1, "failed", "undecodable: not msgpack")


def test_the_buffer_is_bounded_and_says_so() -> None:
    buffer = GroupBuffer(0, 0, capacity=3)
    for offset in range(5):
        group = pure(Version(0, 0), number=offset)
        buffer.add((0, offset), encode(group), group)
    assert len(buffer) == 3
    end = buffer.take(BatchGroup("0-0", 1, GroupRef(0, 0, bytes(32))), Version(0, 0), MISSING)
    assert isinstance(end, GroupEnd)
    assert end.end == "failed"
    assert "3 later groups" in end.why


def test_groups_that_nobody_trained_go_when_the_step_rises() -> None:
    buffer = GroupBuffer(0, 1, capacity=99)
    for offset, step in enumerate((0, 1, 2)):
        group = pure(Version(0, step), number=offset)
        buffer.add((0, offset), encode(group), group)
    buffer.advance(2)
    assert len(buffer) == 2
    assert buffer.size > 0
    buffer.advance(4)
    assert len(buffer) == buffer.size == 0
