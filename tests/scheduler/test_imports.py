"""A scheduler image is small: what the scheduler imports needs no tensor library."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import protocol

HEAVY = ("torch", "vllm", "transformers", "numpy", "deepspeed")


@pytest.mark.parametrize(
    "modules",
    [
        "scheduler",
        "scheduler.core",
        "scheduler.service, scheduler.__main__",
        ", ".join(f"protocol.{m.name}" for m in pkgutil.iter_modules(protocol.__path__)),
    ],
)
def test_no_tensor_library_comes_along(modules: str) -> None:
    program = f"import {modules}, sys; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
