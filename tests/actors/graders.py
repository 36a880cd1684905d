"""Reward functions as users write them, and as nobody should."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> float:
    print("printing must not disturb the pipe")
    return float(len(solution_str)) if data_source == "long" else float(solution_str == "right")


def scored(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any) -> Any:
    return {
        "score": extra_info["score"],
        "acc": solution_str == ground_truth,
        "format": 0.5,
        "note": "text",
    }


def misbehaving(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, hang: float = 600.0
) -> Any:
    """Does what the completion says."""
    if solution_str == "hang":
        time.sleep(hang)
    if solution_str == "crash":
        os.abort()
    if solution_str == "exit":
        sys.exit(3)
    if solution_str == "raise":
        raise RuntimeError("no")
    if solution_str == "memory":
        return len(bytearray(1 << 34))
    values: dict[str, Any] = {
        "nan": float("nan"),
        "inf": float("inf"),
        "text": "1.0",
        "none": None,
        "dict": {"acc": 1.0},
        "acc": {"score": 1.0, "acc": 7},
        "huge": 1e299,
        "beyond": 1.1e300,
        "component": {"score": 1.0, "length": 1.1e300},
        "environment": float(len(set(os.environ) - ALLOWED)),
        "descriptors": float(len(list(Path("/proc/self/fd").iterdir()))),
        "cores": float("torch" in sys.modules or "pydantic" in sys.modules),
    }
    return values.get(solution_str, 1.0)


ALLOWED = {
    "PATH",
    "LANG",
    "LC_CTYPE",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
}


def reward_func(prompts: list[Any], completions: list[Any], level: list[int], **_: Any) -> Any:
    """TRL's way; chat completions are lists of messages."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [None if text == "none" else float(n) for text, n in zip(texts, level, strict=True)]


async def matches(completions: list[str], solution: list[str]) -> list[float]:
    return [float(c == s) for c, s in zip(completions, solution, strict=True)]


def half(completions: list[str]) -> list[float | None]:
    return [None if c == "none" else 0.5 for c in completions]


def neither(text: str) -> float:
    return 1.0


not_a_function = 7
