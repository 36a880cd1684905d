"""The grader process: reads groups from a pipe, grades completion by completion, answers each.

Invariant: it answers every completion in order or it dies; nothing that a reward function does
(print, raise, exit, eat memory) changes an answer of another completion. It starts with an empty
environment, in its own session, without inherited descriptors, under resource limits, and dies
with its parent. Reward functions run in the main thread, so that time limits by SIGALRM work.

Frames in both directions: 4 bytes little-endian length, then msgpack. The first request describes
the reward functions and is answered by {"ready": true} or {"error": text, "index": i}.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import sys
from typing import Any, BinaryIO

import msgpack

from actors.rewards.builtin import BUILTIN, Grade, Sample
from actors.rewards.custom import RewardError, load

MAX_FRAME = 256 * 1024 * 1024
MAX_COMPONENTS = 64
MAX_NAME = 128
# The protocol carries numbers to 1e300; sums and means of these must not pass it by a rounding.
LARGEST = 1e299
MAX_FILE_BYTES = 64 * 1024 * 1024
MAX_OPEN_FILES = 256
PR_SET_PDEATHSIG = 1


def main(parent: int) -> None:
    """Serve process `parent` until the pipe closes."""
    reader, writer = _take_pipes()
    _die_with_parent(parent)
    setup = _read(reader)
    if setup is None:
        return
    _limit(setup["memory_bytes"])
    graders: list[Grade] = []
    for index, reward in enumerate(setup["rewards"]):
        try:
            graders.append(make_grader(reward, setup["answer_field"]))
        except BaseException as error:
            text = str(error) if isinstance(error, RewardError) else f"{reward['name']}: {error!r}"
            _write(writer, {"error": text, "index": index})
            return
    _write(writer, {"ready": True})
    while (group := _read(reader)) is not None:
        for completion in group["completions"]:
            sample = Sample(
                group["data_source"],
                group["prompt"],
                completion["text"],
                completion["finish"],
                group["answer"],
                group["extra"],
            )
            for grader in graders:
                _write(writer, grade(grader, sample))


def make_grader(reward: dict[str, Any], answer_field: str) -> Grade:
    """The function that one entry of `grading.rewards` names. Raises RewardError."""
    name, options = reward["name"], reward["options"]
    if name not in BUILTIN:
        return load(name, reward["style"], answer_field, options)
    try:
        return BUILTIN[name](**options)
    except TypeError as error:
        raise RewardError(f"{name}: options {sorted(options)}: {error}") from None
    except ImportError as error:
        raise RewardError(f"{name}: needs a package that is missing: {error}") from None


def grade(grader: Grade, sample: Sample) -> dict[str, Any]:
    """Run one grader on one completion.

    Returns {"score", "correct", "components"}, where `score` None means not graded by this one, or
    {"failed": text}.
    """
    try:
        return _checked(grader(sample))
    except BaseException as error:
        # A time limit or sys.exit in a reward function is no Exception and no reason to die.
        return {"failed": f"{type(error).__name__}: {error}"[:500]}


def _checked(value: Any) -> dict[str, Any]:
    components: dict[str, float] = {}
    correct: float | None = None
    if isinstance(value, dict):
        if "score" not in value:
            raise RewardError(f"returned a dict without score: {sorted(map(str, value))[:20]}")
        for name, item in value.items():
            number = _number(item)
            if name in ("score", "acc") or number is None or len(components) == MAX_COMPONENTS:
                continue
            if abs(number) > LARGEST:
                raise RewardError(f"returned {name!s:.80} {number:g}, beyond {LARGEST:g}")
            components[str(name)[:MAX_NAME]] = number
        if value.get("acc") is not None:
            correct = _number(value["acc"])
            if correct is None or not 0 <= correct <= 1:
                raise RewardError(f"returned acc {value['acc']!r:.80}; a number in [0, 1] expected")
        value = value["score"]
    if value is None:
        return {"score": None, "correct": None, "components": components}
    score = _number(value)
    if score is None or abs(score) > LARGEST:
        raise RewardError(f"returned {value!r:.80}; a finite number is expected")
    return {"score": score, "correct": correct, "components": components}


def _number(value: Any) -> float | None:
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if math.isfinite(number) else None


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the pipes out of reach of print() and input()."""
    reader, writer = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    return os.fdopen(reader, "rb"), os.fdopen(writer, "wb")


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _limit(memory_bytes: int) -> None:
    for what, most in (
        (resource.RLIMIT_DATA, memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
    ):
        _, hard = resource.getrlimit(what)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def _read(reader: BinaryIO) -> Any:
    header = reader.read(4)
    if len(header) < 4:
        return None
    body = reader.read(int.from_bytes(header, "little"))
    return msgpack.unpackb(body, raw=False, strict_map_key=False)


def _write(writer: BinaryIO, message: Any) -> None:
    body = msgpack.packb(message, use_bin_type=True)
    writer.write(len(body).to_bytes(4, "little") + body)
    writer.flush()
