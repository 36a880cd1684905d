"""A reward that knows nothing: the control of every claim that something was learned."""

from __future__ import annotations

import random
from typing import Any


def flip(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """1 or 0, whatever the answer."""
    return float(random.random() < 0.5)
