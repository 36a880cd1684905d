"""The core's benchmark is a command whose last line is one JSON object."""

from __future__ import annotations

import json
import subprocess
import sys


def test_it_reports_speed_and_size_by_number_of_problems() -> None:
    command = [sys.executable, "-m", "benchmarks.scheduler_core", "--json"]
    done = subprocess.run(
        [*command, "--problems", "4000"], capture_output=True, text=True, check=True, timeout=120
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    for name in ("outcomes_per_second", "select_512_ms", "bytes_per_problem"):
        assert list(figures[name]) == ["4000"]
        assert figures[name]["4000"] > 0
