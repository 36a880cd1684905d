"""`reprise run` from the first check to the report, on a real broker, over fake processes."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from deploy.local.environment import placement, specs
from protocol.config import load_config
from protocol.rundir import RunDir
from tests.deploy.canned import config as canned_config
from tests.deploy.canned import run_dir
from tests.deploy.fakes import __file__ as FAKES

DEADLINE = 60.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A config with the embedded broker; its reward has no exact accuracy."""
    canned_config(tmp_path, 10)
    path = tmp_path / "config.yaml"
    raw = yaml.safe_load(path.read_text())
    raw |= {"kafka": {}, "grading": {"rewards": [{"name": "numeric"}]}}
    path.write_text(yaml.safe_dump(raw))
    return path


def reprise(path: Path, *kinds: str, arguments: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [sys.executable, FAKES, "reprise", *kinds, "--", "run", str(path), *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def only_run(path: Path) -> RunDir:
    (root,) = (path.parent / "runs").iterdir()
    return RunDir(root)


def broker_of(run: RunDir) -> tuple[str, int]:
    host, port = yaml.safe_load(run.config.read_text())["kafka"]["bootstrap_servers"].split(":")
    return host, int(port)


def nothing_left(run: RunDir) -> None:
    mentions = [
        p.pid
        for p in psutil.process_iter(["cmdline"])
        if any(str(run.root) in argument for argument in p.info["cmdline"] or [])
    ]
    assert mentions == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(broker_of(run), timeout=1)


def test_a_run_ends_with_summary_report_and_nothing_left(path: Path) -> None:
    process = reprise(path, "scripted", "learner", "actor")
    output, errors = process.communicate(timeout=DEADLINE)
    assert (process.returncode, errors) == (0, "")
    run = only_run(path)
    assert run.root.name.startswith("canned-")
    resolved = load_config(run.config)
    assert resolved.kafka.idempotence is False
    assert resolved.kafka.replication_factor == 1
    assert run.identity.incarnation == 1
    summary = json.loads(run.summary.read_text())
    assert summary["steps"] == 10
    assert summary["held_out_accuracy_kind"] == "sampled"
    assert "0.390 ± 0.012 → 0.610 ± 0.012" in output
    assert output.rstrip().endswith(f"{run.report}")
    assert run.report.is_file()
    nothing_left(run)


def test_a_run_that_ended_badly_is_finished_in_order_and_fails(path: Path) -> None:
    process = reprise(path, "stuck", "learner", "actor")
    output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert "the run did not end well: no outcome for 3600 s" in output
    assert "ended unexpectedly" not in output
    run = only_run(path)
    assert not list(run.root.glob("*.term")), "the others left by themselves"
    nothing_left(run)


def test_a_child_that_dies_ends_the_run_with_the_end_of_its_log(path: Path) -> None:
    process = reprise(path, "scheduler", "learner", "crash")
    output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert "actor ended unexpectedly (exit code 3)" in output
    assert "ValueError: no such model" in output
    nothing_left(only_run(path))


def test_ctrl_c_ends_the_run_and_says_how_to_go_on(path: Path) -> None:
    process = reprise(path, "scheduler", "learner", "actor")
    end = time.monotonic() + DEADLINE
    while len(list(path.parent.glob("runs/*/*.ready"))) < 3:
        assert time.monotonic() < end
        time.sleep(0.05)
    run = only_run(path)
    (run.weights / "0.3").mkdir()
    (run.weights / "0.3" / "manifest.json").touch()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 128 + signal.SIGINT
    assert f"--set model.path={run.weights / '0.3'}" in output
    nothing_left(run)


def test_what_cannot_start_is_one_line_and_exit_code_2(path: Path) -> None:
    (path.parent / "runs" / "mine").mkdir(parents=True)
    for arguments, expected in (
        (("--run-id", "mine"), "exists already"),
        (("--run-id", "no spaces"), "does not fit"),
        (("--set", "metrics.port=9100"), "metrics.port: 9100 cannot be the port of every process"),
    ):
        process = reprise(path, "scripted", "learner", "actor", arguments=arguments)
        _, errors = process.communicate(timeout=DEADLINE)
        assert process.returncode == 2
        assert expected in errors
        assert len(errors.splitlines()) == 1


def test_children_get_threads_engine_settings_and_secrets_by_environment(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    config = load_config(
        run.config,
        {"actors.threads": 1, "kafka.sasl_password": "secret", "learner.threads": 2},
    )
    found = specs(config, run, {"CUDA_VISIBLE_DEVICES": "", "HOME": "/root"})
    scheduler, learner, *actors = found
    assert [a.name for a in actors] == ["actor-0", "actor-1"]
    assert actors[0].command[1:] == [
        "-m",
        "actors",
        "--run-dir",
        str(run.root),
        "--name",
        "actor-0",
    ]
    assert learner.env["OMP_NUM_THREADS"] == "2"
    assert learner.env["DS_ACCELERATOR"] == "cpu"
    assert actors[0].env["OMP_NUM_THREADS"] == "1"
    assert actors[0].env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert actors[0].env["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert actors[0].env["HF_HUB_OFFLINE"] == "1"
    assert scheduler.env["REPRISE_KAFKA_SASL_PASSWORD"] == "secret"
    assert "OMP_NUM_THREADS" not in scheduler.env


def test_gpus_go_to_the_ranks_and_then_to_the_actors(tmp_path: Path) -> None:
    config = load_config(
        run_dir(tmp_path).config,
        {"learner.ranks": 2, "actors.engine": {"tensor_parallel_size": 2}},
    )
    assert placement(config, list("0123456")) == {
        "learner": ["0", "1"],
        "actor-0": ["2", "3"],
        "actor-1": ["4", "5"],
    }
    assert placement(config, list("01234")) == {}, "too few: all see all"
