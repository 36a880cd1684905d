"""A file of problems is either wholly usable, or one line says what is wrong with it and where."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from protocol.config import FieldsConfig
from protocol.messages import ChatMessage
from scheduler.problems import DataError, Problem, Problems

FIELDS = FieldsConfig()
GOOD = {"id": "a", "prompt": "1+1=", "answer": "2"}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "train.jsonl"


def test_every_problem_is_read_back_by_its_index(path: Path) -> None:
    write(
        path,
        {**GOOD, "data_source": "sums", "level": 3, "tags": ["x"]},
        {"id": 7, "prompt": [{"role": "user", "content": "ä→"}], "answer": {"any": [1.5]}},
        {**GOOD, "id": "c", "data_source": None},
    )
    problems = Problems.load(path, FIELDS)
    assert [problems[i] for i in range(len(problems))] == [
        Problem("a", "1+1=", "2", "sums", {"level": 3, "tags": ["x"]}),
        Problem("7", [ChatMessage("user", "ä→")], {"any": [1.5]}, "", {}),
        Problem("c", "1+1=", "2", "", {}),
    ]
    assert problems.ids == ["a", "7", "c"]
    assert problems.sources == ["sums", "", ""]
    assert problems.fingerprint == hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(IndexError, match="problem 3 of 3"):
        problems[3]


def test_columns_have_the_names_that_the_config_gives(path: Path) -> None:
    write(path, {"uid": 1, "question": "q", "solution": "s", "topic": "t", "id": "extra"})
    fields = FieldsConfig(id="uid", prompt="question", answer="solution", data_source="topic")
    assert Problems.load(path, fields)[0] == Problem("1", "q", "s", "t", {"id": "extra"})


def test_a_limit_keeps_the_first_problems_and_still_checks_all(path: Path) -> None:
    write(path, GOOD, {**GOOD, "id": "b"}, {**GOOD, "id": "c"})
    problems = Problems.load(path, FIELDS, limit=2)
    assert [problems[i].id for i in range(len(problems))] == ["a", "b"]
    assert len(problems.sources) == 2
    write(path, GOOD, {**GOOD, "id": "b"}, {"id": "c"})
    with pytest.raises(DataError, match="line 3: prompt: is missing"):
        Problems.load(path, FIELDS, limit=2)


def test_a_utf8_byte_order_mark_windows_line_ends_and_no_last_newline_are_fine(path: Path) -> None:
    rows = [json.dumps({**GOOD, "id": i}).encode() for i in "ab"]
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(rows))
    problems = Problems.load(path, FIELDS)
    assert [problems[0].id, problems[1].id] == ["a", "b"]


DEEP = "[" * 70 + "]" * 70
BOTTOMLESS = "[" * 100_000
WRONG_LINES = {
    "not json": ('{"id": 1,', "line 2: not JSON: .*; found '{\"id\": 1,'"),
    "blank": ("", "line 2: is empty"),
    "array": ("[1]", r"line 2: must be a JSON object; found \[1\]"),
    "no prompt": ('{"id": 1, "answer": 2}', "prompt: is missing; the line has id, answer"),
    "null prompt": ('{"id": 1, "prompt": null, "answer": 2}', "prompt: is null"),
    "empty prompt": ('{"id": 1, "prompt": "", "answer": 2}', "prompt: is empty"),
    "no turns": ('{"id": 1, "prompt": [], "answer": 2}', "prompt: is an empty list"),
    "number": ('{"id": 1, "prompt": 3, "answer": 2}', "prompt: must be a text or .*; found 3"),
    "text turn": ('{"id": 1, "prompt": ["x"], "answer": 2}', r"prompt\[0\]: must be {role, con"),
    "no role": ('{"id": 1, "prompt": [{"content": "x"}], "answer": 2}', r"prompt\[0\].role: "),
    "no content": ('{"id": 1, "prompt": [{"role": "user"}], "answer": 2}', r"prompt\[0\].content:"),
    "other key": (
        '{"id": 1, "prompt": [{"role": "user", "content": "x", "tool": 1}], "answer": 2}',
        r"prompt\[0\].tool: unknown key",
    ),
    "no answer": ('{"id": 1, "prompt": "x"}', "answer: is missing"),
    "null answer": ('{"id": 1, "prompt": "x", "answer": null}', "answer: is null"),
    "no id": ('{"prompt": "x", "answer": 2}', "id: is missing"),
    "true id": (
        '{"id": true, "prompt": "x", "answer": 2}',
        "id: must be a text or a whole .* True",
    ),
    "float id": ('{"id": 1.5, "prompt": "x", "answer": 2}', "id: must be a text or a whole .* 1.5"),
    "empty id": ('{"id": "", "prompt": "x", "answer": 2}', "id: must have 1 to 512 characters"),
    "source": ('{"id": 1, "prompt": "x", "answer": 2, "data_source": 3}', "data_source: must be"),
    "huge number": ('{"id": 1, "prompt": "x", "answer": 99999999999999999999}', "cannot be sent"),
    "deep": (f'{{"id": 1, "prompt": "x", "answer": {DEEP}}}', "line 2: nested more than 64 deep"),
    "bottomless": (BOTTOMLESS, "line 2: not JSON: nested too deeply"),
    "duplicate": (json.dumps(GOOD), "line 2: id: 'a' is the id of line 1 already"),
}


@pytest.mark.parametrize(("line", "message"), WRONG_LINES.values(), ids=WRONG_LINES.keys())
def test_a_wrong_line_is_named_with_its_field_in_one_line(
    path: Path, line: str, message: str
) -> None:
    path.write_text(json.dumps(GOOD) + "\n" + line + "\n", "utf-8")
    with pytest.raises(DataError, match=message) as caught:
        Problems.load(path, FIELDS)
    text = str(caught.value)
    assert text.startswith(f"{path}: line 2: ")
    assert "\n" not in text
    assert len(text) < 400


def test_ids_that_differ_only_in_type_are_duplicates(path: Path) -> None:
    write(path, {**GOOD, "id": 1}, {**GOOD, "id": "1"})
    with pytest.raises(DataError, match="line 2: id: '1' is the id of line 1 already"):
        Problems.load(path, FIELDS)


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        ("utf-16", "is UTF-16 LE .*byte order mark ff fe.*save it as UTF-8"),
        ("utf-16-le", "line 1: holds zero bytes: UTF-16 or a binary file"),
        ("utf-32", "is UTF-32 LE"),
        ("latin-1", "line 1: not UTF-8 .*at byte 23 of the line"),
    ],
)
def test_other_encodings_are_named(path: Path, encoding: str, message: str) -> None:
    line = json.dumps({"id": "a", "prompt": "ä", "answer": "x"}, ensure_ascii=False) + "\n"
    assert line.index("ä") == 23
    path.write_bytes(line.encode(encoding))
    with pytest.raises(DataError, match=message):
        Problems.load(path, FIELDS)


def test_a_file_that_is_empty_missing_or_a_folder_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    for path, message in (
        (empty, "is empty"),
        (tmp_path / "none.jsonl", "no such file"),
        (tmp_path, "cannot be read: Is a directory"),
    ):
        with pytest.raises(DataError, match=f"^{path}: {message}"):
            Problems.load(path, FIELDS)


def test_a_problem_too_large_for_a_record_is_refused_before_the_run(path: Path) -> None:
    write(path, GOOD, {**GOOD, "id": "b", "prompt": "x" * 70_000})
    with pytest.raises(DataError, match=r"line 2: cannot be sent: .*above the limit of 65536"):
        Problems.load(path, FIELDS, max_bytes=65_536)
    assert len(Problems.load(path, FIELDS)) == 2


def test_a_file_changed_after_it_was_read_is_noticed(path: Path) -> None:
    write(path, GOOD, {**GOOD, "id": "b"})
    problems = Problems.load(path, FIELDS)
    with path.open("r+b") as file:
        file.write(path.read_bytes().replace(b'"b"', b'"c"'))
    with pytest.raises(DataError, match="line 2 is no longer problem 'b'"):
        problems[1]
    os.truncate(path, 10)
    with pytest.raises(DataError, match="line 1 is no longer problem 'a'"):
        problems[0]


def test_a_hundred_thousand_problems_load_in_seconds(path: Path) -> None:
    with path.open("w") as file:
        file.writelines(
            f'{{"id": "p{i}", "prompt": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(100_000)
        )
    start = time.monotonic()
    assert Problems.load(path, FIELDS)[99_999].answer == "100000"
    # A tenth of a million in a tenth of half a minute; measured: 1 s.
    assert time.monotonic() - start < 6
