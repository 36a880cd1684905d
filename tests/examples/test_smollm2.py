"""The real 135M instruct model: chat template, `math` reward, a few steps. Slow on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "smollm2"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_real_model_trains_on_word_problems(tmp_path: Path) -> None:
    python = sys.executable
    subprocess.run([python, str(EXAMPLE / "get_model.py")], cwd=REPOSITORY, check=True)
    command = [python, "-m", "deploy.local.cli", "run", str(EXAMPLE / "config.yaml")]
    done = subprocess.run(
        [*command, "--run-id", "test", "--set", f"run.dir={tmp_path}"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "test" / "summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["accounts"]["ends"]["trained"] > 0
    assert summary["impure_groups_trained"] == 0
    assert (tmp_path / "test" / "model" / "model.safetensors").is_file()
