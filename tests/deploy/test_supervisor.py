"""What happens to the processes of a run when it ends, fails, is stopped or is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

FAKES = Path(__file__).with_name("fakes.py")
WHOLE = ("scheduler:scheduler:scheduler", "learner:learner:learner", "actor-0:actor:actor")
DEADLINE = 30.0


class Launched:
    """A launcher in a process of its own, over fake children."""

    def __init__(self, folder: Path, children: tuple[str, ...]) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, str(FAKES), "launch", str(folder), *children],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait_for(self, *names: str) -> None:
        end = time.monotonic() + DEADLINE
        while not all((self.folder / name).exists() for name in names):
            assert time.monotonic() < end, f"{names} did not appear"
            time.sleep(0.02)

    def started(self) -> list[psutil.Process]:
        """Every process that it started, at any depth."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def finish(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, output

    def term_time(self, name: str) -> float:
        return float((self.folder / f"{name}.term").read_text())


def all_gone(processes: list[psutil.Process]) -> bool:
    return psutil.wait_procs(processes, timeout=DEADLINE)[1] == []


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[object]:
    launched: list[Launched] = []

    def start(*children: str) -> Launched:
        launched.append(Launched(tmp_path, children))
        return launched[-1]

    yield start
    for run in launched:
        run.process.kill()
        run.process.communicate()


def test_a_run_that_ends_by_itself_is_a_success(launch, tmp_path: Path) -> None:
    run = launch(*WHOLE)
    run.wait_for("scheduler.ready", "learner.ready", "actor-0.ready")
    (tmp_path / "stop").touch()
    assert run.finish() == (0, "")
    assert not list(tmp_path.glob("*.term"))


def test_a_child_that_dies_is_reported_with_the_end_of_its_log(launch) -> None:
    run = launch(*WHOLE[:2], "actor-0:actor:crash")
    code, output = run.finish()
    assert code == 1
    first, *log = output.strip().splitlines()
    assert first.startswith("actor-0 ended unexpectedly (exit code 3)")
    assert log[-1] == "ValueError: no such model"
    assert log[-2].strip() == "line 29"
    assert len(log) == 20


def test_a_child_that_does_not_end_when_asked_is_killed_with_all_below_it(launch) -> None:
    run = launch("learner:learner:deaf", "actor-0:actor:learner")
    run.wait_for("learner.ready", "actor-0.ready")
    processes = run.started()
    # Two guards, two children, and a grandchild that left the session.
    assert len(processes) == 5
    psutil.Process(int((run.folder / "actor-0.pid").read_text())).kill()
    code, output = run.finish()
    assert code == 1
    assert "actor-0 ended unexpectedly (killed by SIGKILL)" in output
    assert all_gone(processes)


def test_a_stop_goes_to_the_learner_and_the_run_ends_by_itself(launch) -> None:
    run = launch(*WHOLE)
    run.wait_for("scheduler.ready", "learner.ready", "actor-0.ready")
    processes = run.started()
    run.process.send_signal(signal.SIGINT)
    code, output = run.finish()
    assert code == 128 + signal.SIGINT
    assert '{"killed": false}' in output
    assert (run.folder / "learner.term").exists()
    assert not (run.folder / "actor-0.term").exists(), "RunEnded reached it first"
    assert all_gone(processes)


def test_a_stop_reaches_the_scheduler_when_the_learner_has_gone_without_a_word(launch) -> None:
    run = launch("scheduler:scheduler:scheduler", "actor-0:actor:actor", "learner:learner:actor")
    run.wait_for("scheduler.ready", "learner.ready", "actor-0.ready")
    run.process.send_signal(signal.SIGTERM)
    code, _ = run.finish()
    assert code == 128 + signal.SIGTERM
    assert run.term_time("learner") < run.term_time("scheduler")


def test_a_second_stop_kills_at_once(launch) -> None:
    run = launch("scheduler:scheduler:scheduler", "learner:learner:deaf")
    run.wait_for("scheduler.ready", "learner.ready")
    processes = run.started()
    run.process.send_signal(signal.SIGINT)
    assert run.process.stdout.readline().startswith("Stopping")
    run.process.send_signal(signal.SIGINT)
    code, output = run.finish()
    assert code == 128 + signal.SIGINT
    assert '{"killed": true}' in output
    assert all_gone(processes)


def test_nothing_is_left_when_the_launcher_is_killed(launch) -> None:
    run = launch(*WHOLE[:2], "actor-0:actor:deaf")
    run.wait_for("scheduler.ready", "learner.ready", "actor-0.ready")
    processes = run.started()
    assert len(processes) == 7
    run.process.kill()
    assert all_gone(processes)


def test_nothing_is_left_when_a_guard_is_killed(launch) -> None:
    run = launch("scheduler:scheduler:scheduler", "actor-0:actor:actor")
    run.wait_for("scheduler.ready", "actor-0.ready")
    processes = run.started()
    psutil.Process(int((run.folder / "actor-0.pid").read_text())).parent().kill()
    code, output = run.finish()
    assert code == 1
    assert "actor-0 ended unexpectedly" in output
    assert all_gone(processes)


def test_a_process_that_stays_after_the_end_is_named_and_ended(launch) -> None:
    run = launch("scheduler:scheduler:early", "learner:learner:deaf")
    run.wait_for("learner.ready")
    processes = run.started()
    code, output = run.finish()
    assert code == 1
    assert "learner did not end within" in output
    assert all_gone(processes)
