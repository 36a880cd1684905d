"""A snapshot is whole or it is refused; the one before the newest is kept."""

from __future__ import annotations

import asyncio
import random
from array import array
from pathlib import Path
from typing import Any

import pytest

from scheduler.snapshot import (
    Snapshot,
    SnapshotError,
    SnapshotWriter,
    frozen,
    read_snapshot,
    snapshot_paths,
    write_snapshot,
)

STATE: dict[str, Any] = {
    "omega": array("d", [0.25, float("nan"), -1e300]),
    "index": array("q", [-1, 2**62]),
    "flags": array("B", [0, 255]),
    "random": list(random.Random(3).getstate()[1]),
    "large": 2**127 - 1,
    "small": -(2**90),
    "roster": {"actor-0": {"open": ["0-1", "0-2"], "version": [0, 3]}},
    "by_partition": {1: "actor-0", 2: None},
    "seconds": 0.1 + 0.2,
    "blob": b"\x00\xff",
}


def snapshot(events: int = 41, state: dict[str, Any] = STATE) -> Snapshot:
    return Snapshot(
        run="r-1",
        incarnation=2,
        fingerprints={"": "ab", "held_out": "cd"},
        events=events,
        tasks={0: 3, 1: 0},
        batches={0: 7},
        state=state,
    )


def test_it_reads_back_bit_for_bit(tmp_path: Path) -> None:
    path = write_snapshot(tmp_path, snapshot())
    back = read_snapshot(path)
    assert back.state["omega"].tobytes() == STATE["omega"].tobytes()
    assert back.state.pop("omega").typecode == "d"
    assert back.state == {k: v for k, v in STATE.items() if k != "omega"}
    assert (back.events, back.tasks, back.batches) == (41, {0: 3, 1: 0}, {0: 7})
    assert (back.run, back.incarnation) == ("r-1", 2)
    assert back.fingerprints == {"": "ab", "held_out": "cd"}


def test_the_newest_two_are_kept_and_nothing_half_written(tmp_path: Path) -> None:
    for events in (5, 40, 300, 2000):
        write_snapshot(tmp_path, snapshot(events))
    assert [read_snapshot(p).events for p in snapshot_paths(tmp_path)] == [300, 2000]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("place", [0, 30, 60, -1])
def test_a_changed_byte_is_noticed(tmp_path: Path, place: int) -> None:
    path = write_snapshot(tmp_path, snapshot())
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)
    with pytest.raises(SnapshotError, match=f"{path}: is (damaged|no snapshot)"):
        read_snapshot(path)


@pytest.mark.parametrize("kept", [0, 10, 40, 100])
def test_a_shortened_file_is_noticed(tmp_path: Path, kept: int) -> None:
    path = write_snapshot(tmp_path, snapshot())
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(SnapshotError, match=f"{path}: is (damaged|no snapshot)"):
        read_snapshot(path)


def test_a_missing_file_and_an_unwritable_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=r"none: cannot be read: No such file"):
        read_snapshot(tmp_path / "none")
    with pytest.raises(SnapshotError, match=r"gone/.*: cannot be written: No such file"):
        write_snapshot(tmp_path / "gone", snapshot())


def test_what_a_snapshot_cannot_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="cannot hold set"):
        write_snapshot(tmp_path, snapshot(state={"x": {1, 2}}))


def test_a_frozen_state_does_not_follow_the_live_one() -> None:
    live: dict[str, Any] = {"a": array("d", [1.0]), "b": {"c": [[1], array("q", [2])]}, "d": [1]}
    copy = frozen(live)
    live["a"][0] = live["b"]["c"][1][0] = 9
    live["b"]["c"][0].append(3)
    live["d"].append(2)
    assert copy == {"a": array("d", [1.0]), "b": {"c": [[1], array("q", [2])]}, "d": [1]}


class Report:
    def __init__(self) -> None:
        self.results: list[bool] = []

    def snapshot(self, ok: bool, held_up: float) -> None:
        self.results.append(ok)


async def test_one_is_due_after_so_many_outcomes_or_so_much_time(tmp_path: Path) -> None:
    report = Report()
    writer = SnapshotWriter(tmp_path, 3, 3600.0, report)
    assert not writer.due()
    writer.outcomes = 3
    assert writer.due()
    writer.start(snapshot(), held_up=0.0)
    assert not writer.due()
    await writer.written()
    assert report.results == [True]
    assert [p.name for p in snapshot_paths(tmp_path)] == [f"{41:020d}.snapshot"]
    timed = SnapshotWriter(tmp_path, 1000, 0.01, report)
    await asyncio.sleep(0.02)
    assert timed.due()


async def test_one_that_cannot_be_written_is_reported_and_tried_again_when_due(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = Report()
    writer = SnapshotWriter(tmp_path / "gone", 1, 3600.0, report)
    writer.start(snapshot(), held_up=0.0)
    await writer.written()
    assert report.results == [False]
    assert "cannot be written" in caplog.text
    writer.outcomes = 1
    assert writer.due()
