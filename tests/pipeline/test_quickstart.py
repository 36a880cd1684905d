"""The quickstart as a user runs it: real broker, scheduler, vLLM actors and DeepSpeed learner."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from protocol.records import EndRecord, StepRecord, from_line

REPOSITORY = Path(__file__).parents[2]
CONFIG = REPOSITORY / "examples" / "quickstart" / "config.yaml"
SEEDS = (0, 1, 2)


class Finished:
    """What a run of `reprise run` left behind."""

    def __init__(self, root: Path, printed: str) -> None:
        self.root, self.printed = root, printed
        self.left: list[str] = []
        self.summary: dict[str, Any] = json.loads((root / "summary.json").read_text())
        lines = (root / "metrics.jsonl").read_bytes().splitlines()
        self.records = [from_line(line) for line in lines]

    @property
    def steps(self) -> list[StepRecord]:
        return [record for record in self.records if isinstance(record, StepRecord)]

    @property
    def gain(self) -> float:
        accuracy = self.summary["held_out_accuracy"]
        return float(accuracy["after"] - accuracy["before"])


def quickstart(folder: Path, *sets: str) -> Finished:
    """Run the example with some values set otherwise; fails unless it ends with exit code 0."""
    values = [f"run.dir={folder}", *sets]
    command = [sys.executable, "-m", "deploy.local.cli", "run", str(CONFIG), "--run-id", "test"]
    done = subprocess.run(
        [*command, *(word for value in values for word in ("--set", value))],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Finished(folder / "test", done.stdout)


def of_a_run() -> dict[int, str]:
    """Processes that a run could have started: Python, graders and vLLM's too, and the broker."""
    found = {}
    for process in psutil.process_iter(["cmdline", "name"]):
        line = " ".join(process.info["cmdline"] or [process.info["name"]])
        if any(word in line for word in (sys.executable, "python", "tansu", "VLLM")):
            found[process.pid] = line
    return found


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A short run with two actors, at a learning rate that shows within few steps."""
    before = of_a_run()
    run = quickstart(
        tmp_path_factory.mktemp("quickstart"),
        "run.steps=30",
        "actors.count=2",
        "learner.warmup_steps=2",
        "learner.deepspeed.optimizer.params.lr=0.0001",
        "eval=[{data: held_out.jsonl, every: 100, n: 4, greedy: false, limit: 64}]",
    )
    run.left = [line for pid, line in of_a_run().items() if pid not in before]
    return run


def test_two_actors_share_the_work(shared: Finished) -> None:
    (end,) = (record for record in shared.records if isinstance(record, EndRecord))
    done = {name: figures["tasks"] for name, figures in end.actors.items()}
    assert len(done) == 2
    assert min(done.values()) >= sum(done.values()) / 3, done


def test_every_task_ends_once_and_every_step_trains(shared: Finished) -> None:
    accounts = shared.summary["accounts"]
    assert accounts["issued"] == sum(accounts["ends"].values())
    assert accounts["in_flight"] == 0
    assert [step.version.step for step in shared.steps] == list(range(30))
    assert accounts["ends"]["trained"] == sum(step.trained for step in shared.steps)
    assert f"{accounts['issued']:,} issued" in shared.printed


def test_strictly_on_policy_data_is_proved_by_its_spans(shared: Finished) -> None:
    assert shared.summary["impure_groups_trained"] == 0
    for step in shared.steps:
        assert step.lag == {"0": step.trained}
        assert step.learner["clip_share"] == 0
        assert step.learner["weight_max_deviation"] < 1e-4
        assert step.learner["logprob_gap_mean"] < 1e-5
        assert step.learner["logprob_gap_max"] < 1e-3


def test_the_model_gets_better_and_the_exported_one_is_the_measured_one(shared: Finished) -> None:
    assert shared.gain > 0.10
    measured = subprocess.run(
        [
            *(sys.executable, "-m", "learner.exact", "--json"),
            *("--model", str(shared.root / "model")),
            *("--data", str(CONFIG.parent / "held_out.jsonl")),
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    per_problem = json.loads(measured.stdout.splitlines()[-1])["per_problem"][:64]
    accuracy = sum(per_problem) / len(per_problem)
    assert accuracy == pytest.approx(shared.summary["held_out_accuracy"]["after"], abs=1e-4)


def test_nothing_is_left_running(shared: Finished) -> None:
    assert shared.left == []


@pytest.mark.parametrize("after", ["the first step", "the start"])
def test_ctrl_c_ends_the_run_and_everything_it_started(tmp_path: Path, after: str) -> None:
    before = of_a_run()
    values = (f"run.dir={tmp_path}", "eval=[]")
    command = [sys.executable, "-m", "deploy.local.cli", "run", str(CONFIG), "--run-id", "test"]
    running = subprocess.Popen(
        [*command, *(word for value in values for word in ("--set", value))],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert running.stdout is not None
    awaited = r"step +1/" if after == "the first step" else "logs in"
    lines = []
    for line in running.stdout:
        lines.append(line)
        if re.search(awaited, line):
            break
    running.send_signal(signal.SIGINT)
    rest, _ = running.communicate(timeout=180)
    assert running.returncode == 130, "".join(lines) + rest
    assert [line for pid, line in of_a_run().items() if pid not in before] == []
    if after == "the first step":
        accounts = json.loads((tmp_path / "test" / "summary.json").read_text())["accounts"]
        assert accounts["issued"] == sum(accounts["ends"].values())
        assert accounts["in_flight"] == 0
        assert "go on from them with" in rest


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_three_seeds_learn_what_they_knew(tmp_path: Path) -> None:
    gains = []
    for seed in SEEDS:
        run = quickstart(tmp_path / str(seed), f"run.seed={seed}")
        summary = run.summary
        gains.append(run.gain)
        strata = summary["accuracy_by_stratum"]
        assert strata["always"]["after"] >= strata["always"]["before"] - 0.02
        assert summary["greedy_accuracy"]["after"] >= summary["greedy_accuracy"]["before"] - 0.08
        assert summary["impure_groups_trained"] == 0
        for when in ("before", "after"):
            error = summary["sampled"]["standard_error"][when]
            exact = summary["held_out_accuracy"][when]
            assert summary["sampled"][when] == pytest.approx(exact, abs=3 * error)
    assert min(gains) >= 0.18
    assert sum(gains) / len(gains) >= 0.20


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_with_random_rewards_nothing_is_gained(tmp_path: Path) -> None:
    reward = "grading.rewards=[{name: 'tests.pipeline.coin:flip'}]"
    base = CONFIG.parent / "model"
    run = quickstart(tmp_path, reward)

    def exact(model: Path) -> float:
        command = [sys.executable, "-m", "learner.exact", "--json", "--model", str(model)]
        done = subprocess.run(
            [*command, "--data", str(CONFIG.parent / "held_out.jsonl")],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=True,
        )
        return float(json.loads(done.stdout.splitlines()[-1])["mean"])

    assert exact(run.root / "model") - exact(base) < 0.02
