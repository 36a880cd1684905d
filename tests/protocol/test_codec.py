"""Bytes are a valid message, or one ProtocolError says what is wrong and where."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, get_args

import msgpack
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.arrays import pack_float32, pack_int32, unpack_float32, unpack_int32
from protocol.codec import SCHEMA, ProtocolError, decode, encode
from protocol.messages import (
    AnyMessage,
    BatchRecord,
    EventRecord,
    GroupRecord,
    Message,
    Outcome,
    RewardGroup,
    TaskRecord,
    Tick,
    WeightsRecord,
    group_id,
    task_id,
)
from protocol.versions import Version
from tests.protocol.examples import FAILED, GROUP, MESSAGES, OUTCOME, TASK

IDS = [f"{type(m).__name__}-{i}" for i, m in enumerate(MESSAGES)]
Body = dict[str, Any]


def body_of(message: Message) -> Body:
    """The plain map that is on the wire."""
    body: Body = msgpack.unpackb(encode(message))
    return body


def decode_body(body: Any) -> Any:
    return decode(msgpack.packb(body))


def error_of(body: Any) -> str:
    with pytest.raises(ProtocolError) as caught:
        decode_body(body)
    return str(caught.value)


@pytest.mark.parametrize("message", MESSAGES, ids=IDS)
def test_every_message_comes_back_equal(message: Message) -> None:
    assert decode(encode(message)) == message


def test_the_examples_hold_every_type() -> None:
    assert {type(m) for m in MESSAGES} == set(get_args(AnyMessage))


def test_the_topics_carry_what_the_design_lists() -> None:
    names = {kind.__name__ for kind in get_args(TaskRecord)}
    assert names == {"Task", "Assigned", "Rejoin", "RunEnded"}
    assert GroupRecord.__name__ == "RewardGroup"
    assert {k.__name__ for k in get_args(BatchRecord)} == {
        "BatchReleased",
        "SnapshotWritten",
        "RunEnded",
    }
    assert WeightsRecord.__name__ == "WeightsPublished"


def test_a_message_of_another_topic_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"Task: Invalid value 'Task' - at `\$.type`"):
        decode(encode(TASK), EventRecord)


def test_two_releases_run_side_by_side() -> None:
    """A newer release adds fields, also inside; this one reads what it knows."""
    body = body_of(GROUP)
    body["newer"] = {"anything": [1]}
    body["completions"][0]["newer"] = 1.5
    assert decode_body(body) == GROUP


def test_the_schema_number_is_on_the_wire() -> None:
    assert body_of(TASK)["schema"] == SCHEMA


@pytest.mark.parametrize("schema", [SCHEMA + 1, 0, "1", 1.0, True, None, [1]])
def test_another_schema_is_refused(schema: Any) -> None:
    text = error_of({**body_of(TASK), "schema": schema})
    assert text == f"unknown schema {schema!r} - at `$.schema`; this release reads {SCHEMA}"


def test_an_unknown_or_missing_tag_is_named() -> None:
    assert "Invalid value 'Tsak' - at `$.type`" in error_of({**body_of(TASK), "type": "Tsak"})
    body = body_of(TASK)
    del body["type"]
    assert "missing required field `type`" in error_of(body)


def required_fields() -> Iterator[Any]:
    for message, name in zip(MESSAGES, IDS, strict=True):
        for field in message.__struct_fields__:
            body = body_of(message)
            del body[field]
            try:
                decode_body(body)
            except ProtocolError:
                yield pytest.param(message, field, id=f"{name}-{field}")


REQUIRED = list(required_fields())


@pytest.mark.parametrize(("message", "field"), REQUIRED)
def test_a_missing_field_is_named(message: Message, field: str) -> None:
    body = body_of(message)
    del body[field]
    text = error_of(body)
    assert text.startswith(f"{type(message).__name__}: ")
    assert field in text


def test_what_has_no_default_is_required() -> None:
    assert len(REQUIRED) >= sum(
        len([f for f in m.__struct_fields__ if f not in m.__struct_defaults__]) > 0
        for m in MESSAGES
    )
    assert {p.values[1] for p in REQUIRED if p.values[0] is TASK} == {
        "id", "attempt", "actor", "problem", "purpose", "reason", "version", "group_size",
        "temperature", "max_tokens", "seed", "prompt",
    }  # fmt: skip


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every number, text and byte string in a body."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if path or key not in ("type", "schema", "answer", "extra"):
                yield from leaves(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from leaves(inner, (*path, index))
    elif value is not None:
        yield path


def with_value(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    inner = body
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return body


@pytest.mark.parametrize("message", MESSAGES, ids=IDS)
def test_a_wrong_type_anywhere_is_refused_and_its_place_named(message: Message) -> None:
    for path in leaves(body_of(message)):
        text = error_of(with_value(body_of(message), path, {"wrong": []}))
        assert text.startswith(f"{type(message).__name__}: ")
        assert f"$.{path[0]}" in text, path


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("message", MESSAGES, ids=IDS)
def test_no_number_of_a_message_is_nan_or_infinite(message: Message, value: float) -> None:
    for path in leaves(body_of(message)):
        error_of(with_value(body_of(message), path, value))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_no_log_prob_is_nan_or_infinite(value: float) -> None:
    body = body_of(GROUP)
    body["completions"][0]["logprobs"] = pack_float32([-0.5, value, -0.5])
    assert "logprobs: not finite - at `$.completions[0]`" in error_of(body)


def test_log_probs_of_opposite_infinities_do_not_cancel() -> None:
    body = body_of(GROUP)
    body["completions"][0]["logprobs"] = pack_float32([float("inf"), float("-inf"), 0.0])
    assert "logprobs: not finite" in error_of(body)


def test_the_largest_log_probs_are_finite() -> None:
    largest = 3.4028234663852886e38
    body = body_of(GROUP)
    body["completions"][0]["logprobs"] = pack_float32([-largest] * 3)
    assert unpack_float32(decode_body(body).completions[0].logprobs)[0] == -largest


def completion(**changes: Any) -> Body:
    body = body_of(GROUP)
    body["completions"][0].update(changes)
    return body


def outcome(message: Outcome = OUTCOME, **changes: Any) -> Body:
    return {**body_of(message), **changes}


INCONSISTENT = {
    "half a token": (completion(tokens=b"\0" * 11), "tokens: 11 bytes are no int32 array"),
    "log-prob missing": (completion(logprobs=b"\0" * 8), "logprobs: 8 bytes for 12 bytes of tok"),
    "log-prob too many": (completion(logprobs=b"\0" * 16), "logprobs: 16 bytes for 12 bytes"),
    "span beyond": (completion(spans=[[[2, 7], 0, 4]]), r"spans: \[0, 4\) does not lie in 3 tok"),
    "span empty": (completion(spans=[[[2, 7], 1, 1]]), r"spans: \[1, 1\) does not lie in 3 tokens"),
    "span reversed": (completion(spans=[[[2, 7], 2, 1]]), "spans: "),
    "span negative": (completion(spans=[[[2, 7], -1, 2]]), r"spans\[0\]\[1\]|>= 0"),
    "reward alone": (completion(correct=None), "reward and correct: one is given and the other"),
    "correct alone": (completion(reward=None), "reward and correct: one is given and the other"),
    "correct above 1": (completion(correct=1.5), "<= 1.0 - at `.*correct`"),
    "no prompt": ({**body_of(GROUP), "prompt_tokens": b""}, "prompt_tokens: 0 bytes are no non-em"),
    "half a prompt token": ({**body_of(GROUP), "prompt_tokens": b"\0" * 6}, "prompt_tokens: 6 by"),
    "no completion": ({**body_of(GROUP), "completions": []}, "length >= 1 - at `\\$.completions`"),
    "greedy group": ({**body_of(GROUP), "temperature": 0.0}, "temperature"),
    "lengths differ": (outcome(lengths=[3]), r"rewards, correct, .*differ \(2, 2, 1, 2\)"),
    "rewards missing": (outcome(rewards=[]), r"rewards, correct, .*differ \(0, 2, 2, 2\)"),
    "ok without rewards": (
        outcome(rewards=[], correct=[], lengths=[], truncated=[]),
        "rewards: empty in an outcome that is ok",
    ),
    "ok without versions": (outcome(oldest=None), "oldest, newest: missing in an outcome that"),
    "failed without why": (outcome(FAILED, why=""), "why: empty in a failed outcome"),
    "short digest": (outcome(group=[0, 1, b"x"]), "group"),
    "attempt 0": ({**body_of(TASK), "attempt": 0}, ">= 1 - at `\\$.attempt`"),
    "empty id": ({**body_of(TASK), "id": ""}, "length >= 1 - at `\\$.id`"),
    "long id": ({**body_of(TASK), "id": "x" * 513}, "length <= 512 - at `\\$.id`"),
    "negative step": ({**body_of(TASK), "version": [0, -1]}, r"at `\$.version\[1\]`"),
    "half a version": ({**body_of(TASK), "version": [0]}, r"at `\$.version`"),
    "long tick": ({**body_of(Tick(epoch=1, seconds=2.0)), "seconds": 2.001}, "<= 2.0"),
    "negative tick": ({**body_of(Tick(epoch=1, seconds=2.0)), "seconds": -0.1}, ">= 0.0"),
}


@pytest.mark.parametrize(("body", "message"), INCONSISTENT.values(), ids=INCONSISTENT.keys())
def test_what_does_not_fit_together_is_refused(body: Body, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        decode_body(body)


def test_a_message_that_is_wrong_cannot_even_be_built() -> None:
    with pytest.raises(ValueError, match="lengths differ"):
        Outcome(actor="a", task="t", attempt=1, status="ok", rewards=[1.0])


HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "truncated": encode(GROUP)[:-3],
    "trailing": encode(GROUP) + b"\x00",
    "deep lists": b"\x91" * 100_000,
    "deep maps": b"\x81\xa1a" * 100_000,
    "deep inside": msgpack.packb({"schema": 1, "type": "Task"})[:-5] + b"\xa1x" + b"\x91" * 9000,
    "giant list": b"\xdd\xff\xff\xff\xff",
    "giant map": b"\xdf\xff\xff\xff\xff",
    "giant text": b"\xdb\xff\xff\xff\xff",
    "giant bytes": b"\xc6\xff\xff\xff\xff",
    "giant extension": b"\xc9\xff\xff\xff\xff\x01",
    "extension": msgpack.packb({"schema": 1, "type": msgpack.ExtType(5, b"x")}),
    "timestamp": b"\xd6\xff\x00\x00\x00\x00",
    "number as key": msgpack.packb({1: 2, "schema": 1}),
    "list as key": b"\x81\x91\x01\x01",
    "map as key": b"\x81\x80\x01",
    "bad UTF-8": b"\xa2\xff\xfe",
    "never used byte": b"\xc1",
    "a list": msgpack.packb([1, 2]),
    "a number": b"\x07",
    "nil": b"\xc0",
}


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_bytes_are_one_error(raw: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(raw)
    assert len(str(caught.value)) > len("not msgpack: ")


def test_declared_lengths_allocate_no_more_than_the_input() -> None:
    """A thousand nested lists that each declare 131,071 items in 5 bytes: refused at once."""
    start = time.monotonic()
    with pytest.raises(ProtocolError):
        decode(b"\xdd\x00\x01\xff\xff" * 1000)
    assert time.monotonic() - start < 1


def test_free_content_that_cannot_be_written_is_an_error() -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    for extra in ({"n": 2**64}, {"deep": deep}):
        with pytest.raises(ProtocolError, match="Task: cannot be encoded: "):
            encode(msgspec.structs.replace(TASK, extra=extra))


def test_the_size_limit_holds_on_both_sides_and_names_the_ways_out() -> None:
    size = len(encode(GROUP))
    assert decode(encode(GROUP, max_bytes=size), max_bytes=size) == GROUP
    with pytest.raises(ProtocolError, match=f"RewardGroup: {size} bytes.*kafka.max_message_bytes"):
        encode(GROUP, max_bytes=size - 1)
    with pytest.raises(ProtocolError, match=f"^{size} bytes, above the limit of {size - 1}$"):
        decode(encode(GROUP), max_bytes=size - 1)


SAMPLES = [encode(m) for m in MESSAGES]
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5)
    | st.binary(max_size=12),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
many = settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))


def valid_or_refused(raw: bytes) -> None:
    """Whatever it is: a ProtocolError, or a message that survives the wire."""
    try:
        message = decode(raw)
    except ProtocolError:
        return
    again = decode(encode(message))
    assert type(again) is type(message)
    assert encode(again) == encode(message)


edits = st.lists(
    st.tuples(st.integers(0, 4096), st.integers(0, 9), st.binary(max_size=9)),
    min_size=1,
    max_size=4,
)


@many
@given(st.sampled_from(SAMPLES), edits)
def test_changed_bytes_are_refused_or_valid(
    sample: bytes, changes: list[tuple[int, int, bytes]]
) -> None:
    raw = bytearray(sample)
    for place, removed, inserted in changes:
        start = place % (len(raw) + 1)
        raw[start : start + removed] = inserted
    valid_or_refused(bytes(raw))


@many
@given(st.sampled_from(MESSAGES), st.data())
def test_changed_fields_are_refused_or_valid(message: Message, data: st.DataObject) -> None:
    body = body_of(message)
    paths = [*leaves(body), *[(key,) for key in body]]
    with_value(body, data.draw(st.sampled_from(paths)), data.draw(plain))
    valid_or_refused(msgpack.packb(body))


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_valid(raw: bytes) -> None:
    valid_or_refused(raw)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_token_ids_come_back(tokens: list[int]) -> None:
    raw = pack_int32(tokens)
    assert list(unpack_int32(raw)) == tokens
    assert raw == b"".join(t.to_bytes(4, "little", signed=True) for t in tokens)


def test_ids_name_generation_attempt_and_version() -> None:
    assert task_id(2, 17) == "2-17"
    assert group_id("2-17", 2) == "2-17/2" == GROUP.id == TASK.group
    assert isinstance(GROUP, RewardGroup)
    assert GROUP.generation == 2
    assert str(Version(2, 17)) == "2.17"
