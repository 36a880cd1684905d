"""Snapshots of the scheduler: the core's state, and where in the topics it holds.

Invariant: a snapshot is a function of the events before its offset, taken when every earlier
command is acknowledged; a file under its final name is whole, and says so itself (SHA-256). The one
before the newest is kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import sys
import time
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgpack
import msgspec

from protocol.versions import Count

log = logging.getLogger(__name__)

MAGIC = b"reprise-scheduler-snapshot\n"
FORMAT = 1
KEPT = 2
SUFFIX = ".snapshot"
ARRAY, BIG_INT = 1, 2
DIGEST_BYTES = 32


class SnapshotError(Exception):
    """A snapshot that cannot be used, or written. Names the file and what is wrong."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One snapshot.

    Attributes:
        run, incarnation: whose topics the offsets belong to.
        fingerprints: SHA-256 of each data file, by name of the set; empty text for data.train.
        events: offset on `events` of the first event that is not in the state.
        tasks, batches: end offset of each partition at that moment.
        state: `Core.state()`; numbers, texts, bytes, lists, maps and `array.array`.
    """

    run: str
    incarnation: Count
    fingerprints: dict[str, str]
    events: Count
    tasks: dict[int, Count]
    batches: dict[int, Count]
    state: dict[str, Any]
    format: int = FORMAT


def frozen(value: Any) -> Any:
    """A copy of a state that later events cannot change. Tuples stay tuples in it."""
    if isinstance(value, Mapping):
        return {key: frozen(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(frozen, value)) if _nested(value) else value[:]
    if isinstance(value, array | bytearray):
        return value[:]
    return value


def _nested(values: list[Any] | tuple[Any, ...]) -> bool:
    return any(isinstance(v, list | tuple | Mapping | array | bytearray) for v in values)


class Report(Protocol):
    """Where the writer tells how a snapshot went."""

    def snapshot(self, ok: bool, held_up: float) -> None: ...


class SnapshotWriter:
    """Says when a snapshot is due, and writes one at a time in a thread.

    One that cannot be written is reported, and no reason to end the run: the one before it holds.
    """

    def __init__(self, directory: Path, most_outcomes: int, period: float, report: Report) -> None:
        """A snapshot is due `most_outcomes` outcomes or `period` seconds after the last."""
        self.outcomes = 0
        """Outcomes since the last snapshot."""
        self._directory = directory
        self._most_outcomes = most_outcomes
        self._period = period
        self._report = report
        self._last = time.monotonic()
        self._writing: asyncio.Task[None] | None = None

    def due(self) -> bool:
        """Is it time for the next, and the last one written?"""
        if self._writing is not None and not self._writing.done():
            return False
        return self.outcomes >= self._most_outcomes or time.monotonic() - self._last >= self._period

    def start(self, snapshot: Snapshot, *, held_up: float) -> None:
        """Write `snapshot`, the taking of which held up the events for `held_up` seconds."""
        self.outcomes, self._last = 0, time.monotonic()
        self._writing = asyncio.create_task(self._write(snapshot, held_up))

    async def written(self) -> None:
        """Wait for the one that is being written."""
        if self._writing is not None:
            await self._writing

    async def _write(self, snapshot: Snapshot, held_up: float) -> None:
        try:
            await asyncio.to_thread(write_snapshot, self._directory, snapshot)
        except SnapshotError as error:
            self._report.snapshot(False, held_up)
            log.error("%s; until one is written the run resumes from the one before", error)
        else:
            self._report.snapshot(True, held_up)


def write_snapshot(directory: Path, snapshot: Snapshot) -> Path:
    """Write `snapshot`, then remove all but the newest two. Raises SnapshotError.

    May run in a thread if nothing changes the snapshot's state meanwhile: see `frozen`.
    """
    path = directory / f"{snapshot.events:020d}{SUFFIX}"
    body: bytes = msgpack.packb(
        {name: getattr(snapshot, name) for name in snapshot.__struct_fields__},
        default=_pack,
        use_bin_type=True,
    )
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(MAGIC + hashlib.sha256(body).digest() + body)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_directory(directory)
        for old in snapshot_paths(directory)[:-KEPT]:
            old.unlink()
    except OSError as error:
        raise SnapshotError(f"{path}: cannot be written: {error.strerror}") from None
    return path


def read_snapshot(path: Path) -> Snapshot:
    """The snapshot in `path`. Raises SnapshotError if it is not whole, or of another format."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise SnapshotError(f"{path}: cannot be read: {error.strerror}") from None
    start = len(MAGIC) + DIGEST_BYTES
    digest, body = raw[len(MAGIC) : start], raw[start:]
    if not raw.startswith(MAGIC) or len(raw) < start:
        raise SnapshotError(f"{path}: is no snapshot of a scheduler")
    if hashlib.sha256(body).digest() != digest:
        raise SnapshotError(f"{path}: is damaged (its SHA-256 differs); use the one before it")
    content = msgpack.unpackb(body, raw=False, strict_map_key=False, ext_hook=_unpack)
    if content.get("format") != FORMAT:
        raise SnapshotError(
            f"{path}: has format {content.get('format')}; this release reads {FORMAT}"
        )
    return msgspec.convert(content, Snapshot)


def snapshot_paths(directory: Path) -> list[Path]:
    """The snapshots in `directory`, oldest first."""
    return sorted(directory.glob(f"[0-9]*{SUFFIX}"))


def _pack(value: Any) -> msgpack.ExtType:
    if isinstance(value, array):
        return msgpack.ExtType(ARRAY, value.typecode.encode() + _little(value[:]).tobytes())
    if isinstance(value, int):
        size = value.bit_length() // 8 + 1
        return msgpack.ExtType(BIG_INT, value.to_bytes(size, "little", signed=True))
    raise TypeError(f"a snapshot cannot hold {type(value).__name__}: {value!r:.80}")


def _unpack(code: int, data: bytes) -> Any:
    if code == ARRAY:
        values: array[Any] = array(data[:1].decode())
        values.frombytes(data[1:])
        return _little(values)
    if code == BIG_INT:
        return int.from_bytes(data, "little", signed=True)
    raise SnapshotError(f"unknown extension {code} in a snapshot")


def _little(values: array[Any]) -> array[Any]:
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
