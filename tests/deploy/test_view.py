"""What a person sees of a run, from a canned metrics.jsonl."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from rich.console import Console

from deploy.local.history import History, LineTail, centred, smooth
from deploy.local.observer import Observer
from deploy.local.view import LiveView, PlainView, clock_text, draw, make_view
from protocol.config import load_config
from protocol.http import MonitorServer
from protocol.records import to_line
from protocol.rundir import RunDir
from tests.deploy.canned import records, run_dir

STEPS = 50


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return run_dir(tmp_path, STEPS)


def observed(run: RunDir, *names: str) -> Observer:
    observer = Observer(run, list(names))
    observer.look()
    return observer


def test_plain_lines_are_one_per_ten_steps_and_one_per_evaluation(run: RunDir) -> None:
    lines: list[str] = []
    view = PlainView(load_config(run.config), observed(run), lines.append)
    view.refresh()
    view.refresh()
    steps = [line for line in lines if "reward" in line]
    assert [line[: len("step  1/50")] for line in steps] == [
        "step  1/50", "step 10/50", "step 20/50", "step 30/50", "step 40/50", "step 50/50"
    ]  # fmt: skip
    evals = [line for line in lines if "held_out" in line]
    assert [line[: len("step  0/50")] for line in evals] == [
        "step  0/50",
        "step 25/50",
        "step 50/50",
    ]
    assert "mean@4 0.390 ± 0.012" in evals[0]
    assert "greedy 0.720" in evals[0]
    assert len(steps) + len(evals) == len(lines)


def test_the_eta_is_the_pace_of_the_last_steps_times_what_is_left(run: RunDir) -> None:
    lines: list[str] = []
    PlainView(load_config(run.config), observed(run), lines.append).refresh()
    # A canned step takes 1.5 s, so 40 steps before the end are a minute.
    tenth = next(line for line in lines if line.startswith("step 10/50"))
    assert "ETA 1:00" in tenth


def test_a_line_a_minute_says_what_everyone_does_when_nothing_ends(run: RunDir) -> None:
    now = [0.0]
    lines: list[str] = []
    observer = observed(run, "scheduler", "learner")
    view = PlainView(load_config(run.config), observer, lines.append, clock=lambda: now[0])
    view.refresh()
    shown = len(lines)
    now[0] = 59.0
    view.refresh()
    assert len(lines) == shown
    now[0] = 61.0
    view.refresh()
    assert lines[shown:] == ["step 50/50  scheduler starting, learner starting"]


def test_the_picture_shows_progress_figures_processes_and_warnings(run: RunDir) -> None:
    server = MonitorServer(
        CollectorRegistry(),
        lambda: (True, {"state": "waiting_for_batch", "seconds": 3.2, "version": "0.50"}),
        "127.0.0.1",
        0,
    )
    run.register_process("learner", server.port)
    (run.logs / "learner.log").write_text(
        "2026-01-01 00:00:00,000 INFO learner: fine\n"
        "2026-01-01 00:00:00,000 WARNING torch: a library's own concern\n"
        "2026-01-01 00:00:00,000 WARNING learner.service: the batch is small\n"
    )
    observer = observed(run, "learner", "actor-0")
    server.stop()
    console = Console(file=io.StringIO(), width=110, force_terminal=False)
    console.print(draw(load_config(run.config), observer, 61.0))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for expected in (
        "step 50/50",
        "1:01 elapsed",
        "held_out accuracy",
        "0.390",
        "0.610",
        "waiting for batch",
        "weights 0.50",
        "actor-0",
        "starting",
        "! learner: the batch is small",
        "unseen",
        "trained 800",
    ):
        assert expected in text, text
    assert "own concern" not in text


def test_a_process_that_does_not_answer_is_said_to_be_so(run: RunDir) -> None:
    facts = {"name": "learner", "pid": os.getpid(), "port": 1}
    (run.processes / "learner.json").write_text(json.dumps(facts))
    assert observed(run, "learner").processes["learner"].state == "not answering"


def test_trouble_in_a_view_never_reaches_the_run(run: RunDir) -> None:
    observer = observed(run)
    observer.history = None  # type: ignore[assignment]
    observer.look()
    config = load_config(run.config)
    PlainView(config, observer, lambda text: None).refresh()
    console = Console(file=io.StringIO(), force_terminal=True)
    with LiveView(config, observer, console) as view:
        view.say("a line")
    assert "the view failed" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_live_picture_needs_a_terminal(run: RunDir) -> None:
    config, observer = load_config(run.config), observed(run)
    terminal = Console(file=io.StringIO(), force_terminal=True)
    pipe = Console(file=io.StringIO(), force_terminal=False)
    assert isinstance(make_view(config, observer, terminal, live=True), LiveView)
    assert isinstance(make_view(config, observer, terminal, live=False), PlainView)
    assert isinstance(make_view(config, observer, pipe, live=True), PlainView)


def test_half_a_line_is_left_for_the_next_time_and_nonsense_is_counted(tmp_path: Path) -> None:
    first, second = (to_line(record) for record in records(1)[:2])
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(first + second[:10])
    tail, history = LineTail(path), History()
    for line in tail.new():
        history.add_line(line)
    assert (len(history.evals), history.done) == (1, 0)
    with path.open("ab") as file:
        file.write(second[10:] + b"nonsense\n")
    for line in tail.new():
        history.add_line(line)
    assert (len(history.evals), history.done, history.unreadable) == (1, 1, 1)


def test_means_are_over_what_is_there() -> None:
    assert smooth([None, 1.0, None, 3.0, 5.0], width=2) == [None, 1.0, 1.0, 2.0, 4.0]
    assert centred([None, 1.0, None, 3.0, 5.0], reach=1) == [1.0, 1.0, 2.0, 4.0, 4.0]
    assert (clock_text(59.6), clock_text(3661)) == ("1:00", "1:01:01")
