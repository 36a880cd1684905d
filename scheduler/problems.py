"""The problems of one JSONL file: validated once, then re-read a line at a time.

Invariant: after `load` every line is known to be a problem that fits into a Task record, ids are
unique, and only ids, line offsets and data sources stay in memory. A line that is no longer what
was validated is an error, never another problem.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import msgspec

from protocol.codec import DEFAULT_MAX_BYTES, ProtocolError, decode, encode
from protocol.config import FieldsConfig
from protocol.messages import ChatMessage, Prompt, Task
from protocol.versions import Version

MAX_ID, MAX_SOURCE = 512, 4096
# From this many bytes on a line is tried as a whole record, against the codec's own limits.
LONG_LINE_BYTES = 32 * 1024
MAX_DEPTH = 64
UTF8_BOM = b"\xef\xbb\xbf"
# The marks of UTF-32 begin with those of UTF-16, so they are looked for first.
OTHER_BOMS = (
    (b"\xff\xfe\x00\x00", "UTF-32 LE"),
    (b"\x00\x00\xfe\xff", "UTF-32 BE"),
    (b"\xff\xfe", "UTF-16 LE"),
    (b"\xfe\xff", "UTF-16 BE"),
)

_parse_json = msgspec.json.Decoder().decode


class DataError(Exception):
    """Data that cannot be used, in one line: the file, the line, the field, and what to do."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One line. `extra` holds every column that has no other place."""

    id: str
    prompt: Prompt
    answer: Any
    data_source: str
    extra: dict[str, Any]


class Problems:
    """The problems of one file by index, in the order of its lines."""

    def __init__(
        self,
        path: Path,
        fields: FieldsConfig,
        file: BinaryIO,
        ids: list[str],
        offsets: array[int],
        sources: tuple[str, ...],
        source_index: array[int],
        fingerprint: str,
    ) -> None:
        """Use `load`."""
        self.path = path
        self.ids = ids
        """Id by index."""
        self.source_names = sources
        """The different data sources; empty text where a line names none."""
        self.fingerprint = fingerprint
        """SHA-256 (hex) of the whole file."""
        self._fields = fields
        self._file = file
        self._offsets = offsets
        self._source_index = source_index

    @classmethod
    def load(
        cls,
        path: Path,
        fields: FieldsConfig,
        *,
        limit: int | None = None,
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> Problems:
        """Read and validate all of `path`; keep the first `limit` problems.

        Args:
            path: JSONL, UTF-8, one object a line.
            fields: names of the columns.
            limit: problems kept; None keeps all.
            max_bytes: largest record (kafka.max_message_bytes).

        Raises:
            DataError: the first thing that is wrong.
        """
        try:
            file = path.open("rb")
        except FileNotFoundError:
            raise DataError(f"{path}: no such file") from None
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        try:
            scan = _Scan(path, fields, max_bytes)
            for offset, line in _lines(path, file, scan.digest):
                scan.add(offset, line)
            return cls._kept(scan, file, limit)
        except BaseException:
            file.close()
            raise

    @classmethod
    def _kept(cls, scan: _Scan, file: BinaryIO, limit: int | None) -> Problems:
        if not scan.ids:
            raise DataError(f"{scan.path}: is empty; one problem a line is expected")
        scan.offsets.append(file.tell())
        kept = len(scan.ids) if limit is None else min(limit, len(scan.ids))
        return cls(
            scan.path,
            scan.fields,
            file,
            list(scan.ids)[:kept],
            scan.offsets[: kept + 1],
            tuple(scan.sources),
            scan.source_index[:kept],
            scan.digest.hexdigest(),
        )

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def sources(self) -> list[str]:
        """Data source by index."""
        return [self.source_names[i] for i in self._source_index]

    def __getitem__(self, index: int) -> Problem:
        """Read problem `index` (0 ≤ index < len) from the file.

        Raises DataError if the line is not the one that `load` validated.
        """
        if not 0 <= index < len(self.ids):
            raise IndexError(f"{self.path}: problem {index} of {len(self.ids)}")
        start, end = self._offsets[index], self._offsets[index + 1]
        try:
            raw = os.pread(self._file.fileno(), end - start, start)
            problem = _parse(raw, self._fields)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror}") from None
        except _LineError:
            raise self._changed(index) from None
        if problem.id != self.ids[index]:
            raise self._changed(index)
        return problem

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _changed(self, index: int) -> DataError:
        return DataError(
            f"{self.path}: line {index + 1} is no longer problem {self.ids[index]!r}; the file was "
            "changed while it was in use: start again with it as it is now"
        )


class _LineError(Exception):
    """What is wrong with one line."""


class _Scan:
    """What `load` gathers, line by line."""

    def __init__(self, path: Path, fields: FieldsConfig, max_bytes: int) -> None:
        self.path = path
        self.fields = fields
        self.max_bytes = max_bytes
        self.digest = hashlib.sha256()
        self.ids: dict[str, int] = {}
        self.offsets = array("q")
        self.sources: dict[str, int] = {}
        self.source_index = array("L")

    def add(self, offset: int, line: bytes) -> None:
        number = len(self.ids) + 1
        try:
            problem = _parse(line, self.fields)
            _require_fits(problem, len(line), self.max_bytes)
        except _LineError as error:
            raise DataError(f"{self.path}: line {number}: {error}") from None
        first = self.ids.setdefault(problem.id, number)
        if first != number:
            raise DataError(
                f"{self.path}: line {number}: {self.fields.id}: {problem.id!r} is the id of line "
                f"{first} already; ids must be unique"
            )
        self.offsets.append(offset)
        self.source_index.append(self.sources.setdefault(problem.data_source, len(self.sources)))


def _lines(path: Path, file: BinaryIO, digest: Any) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of each line, once; every byte goes into `digest`."""
    try:
        offset = 0
        for line in file:
            digest.update(line)
            if offset == 0:
                for mark, name in OTHER_BOMS:
                    if line.startswith(mark):
                        raise DataError(
                            f"{path}: is {name} (byte order mark {mark.hex(' ')}); save it as UTF-8"
                        )
                if line.startswith(UTF8_BOM):
                    offset, line = len(UTF8_BOM), line[len(UTF8_BOM) :]
                    if not line:
                        return
            yield offset, line
            offset += len(line)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def _parse(line: bytes, fields: FieldsConfig) -> Problem:
    """The problem in `line`. Raises _LineError naming the field."""
    row = _object(line)
    identity = _identity(row, fields.id)
    prompt = _prompt(row, fields.prompt)
    if row.get(fields.answer) is None:
        found = "is null" if fields.answer in row else _missing(row)
        raise _LineError(f'{fields.answer}: {found}; where a reward needs none, put ""')
    source = row.get(fields.data_source)
    source = "" if source is None else source
    if not isinstance(source, str) or len(source) > MAX_SOURCE:
        raise _LineError(
            f"{fields.data_source}: must be a text of at most {MAX_SOURCE} characters; found "
            f"{_short(source)}"
        )
    taken = (fields.id, fields.prompt, fields.answer, fields.data_source)
    extra = {name: value for name, value in row.items() if name not in taken}
    return Problem(identity, prompt, row[fields.answer], source, extra)


def _object(line: bytes) -> dict[str, Any]:
    if line.isspace() or not line:
        raise _LineError("is empty; one JSON object a line is expected")
    try:
        row = _parse_json(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _LineError(_not_json(line, error)) from None
    if not isinstance(row, dict):
        raise _LineError(f"must be a JSON object; found {_short(row)}")
    return row


def _not_json(line: bytes, error: Exception) -> str:
    if b"\x00" in line:
        return "holds zero bytes: UTF-16 or a binary file; save it as UTF-8"
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as wrong:
        return f"not UTF-8 ({wrong.reason} at byte {wrong.start} of the line); save it as UTF-8"
    reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    return f"not JSON: {reason}; found {_short(line.decode('utf-8').strip())}"


def _identity(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None:
        raise _LineError(f"{name}: {_missing(row) if name not in row else 'is null'}")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _LineError(f"{name}: must be a text or a whole number; found {_short(value)}")
    text = str(value)
    if not 1 <= len(text) <= MAX_ID:
        raise _LineError(f"{name}: must have 1 to {MAX_ID} characters; found {len(text)}")
    return text


def _prompt(row: dict[str, Any], name: str) -> Prompt:
    value = row.get(name)
    if value is None:
        raise _LineError(f"{name}: {_missing(row) if name not in row else 'is null'}")
    if isinstance(value, str):
        if not value:
            raise _LineError(f"{name}: is empty")
        return value
    if not isinstance(value, list):
        raise _LineError(
            f"{name}: must be a text or a list of {{role, content}} turns; found {_short(value)}"
        )
    if not value:
        raise _LineError(f"{name}: is an empty list")
    return [_turn(turn, f"{name}[{i}]") for i, turn in enumerate(value)]


def _turn(turn: Any, where: str) -> ChatMessage:
    if not isinstance(turn, dict):
        raise _LineError(f"{where}: must be {{role, content}}; found {_short(turn)}")
    for key in turn:
        if key not in ("role", "content"):
            raise _LineError(f"{where}.{key}: unknown key; a turn has role and content")
    role, content = turn.get("role"), turn.get("content")
    if not isinstance(role, str) or not 1 <= len(role) <= MAX_ID:
        raise _LineError(f"{where}.role: must be a non-empty text; found {_short(role)}")
    if not isinstance(content, str):
        raise _LineError(f"{where}.content: must be a text; found {_short(content)}")
    return ChatMessage(role, content)


def _require_fits(problem: Problem, line_bytes: int, max_bytes: int) -> None:
    """Raise _LineError unless the problem fits into a record that an actor accepts."""
    if _deeper([problem.answer, problem.extra], MAX_DEPTH):
        raise _LineError(f"nested more than {MAX_DEPTH} deep")
    if line_bytes < LONG_LINE_BYTES:
        # The numbers of JSON have no bounds, those of msgpack have 64 bits.
        try:
            msgpack.packb((problem.answer, problem.extra))
        except (OverflowError, ValueError) as error:
            raise _LineError(f"cannot be sent: {error}") from None
        return
    try:
        decode(encode(_largest_task(problem), max_bytes=max_bytes), Task, max_bytes=max_bytes)
    except (ProtocolError, OverflowError, ValueError) as error:
        raise _LineError(f"cannot be sent: {error}") from None


def _largest_task(problem: Problem) -> Task:
    """A Task with this problem, its other fields as long as they can be."""
    return Task(
        id="0" * MAX_ID,
        attempt=2**31,
        actor="a" * MAX_ID,
        problem=problem.id,
        purpose="train",
        reason="retest_unsolved",
        version=Version(2**52, 2**52),
        group_size=65536,
        temperature=1.0,
        max_tokens=2**31,
        seed=2**52,
        prompt=problem.prompt,
        answer=problem.answer,
        data_source=problem.data_source,
        extra=problem.extra,
    )


def _deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True


def _missing(row: dict[str, Any]) -> str:
    columns = ", ".join(list(row)[:8])
    return f"is missing; the line has {columns or 'no columns'}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
