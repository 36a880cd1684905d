"""summary.json and report.html, from canned records and figures."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest

from deploy.local.exact import obstacle, write_problems
from deploy.local.history import History
from deploy.local.outcome import how_to_go_on, newest_model, result_lines
from deploy.local.rebuild import rebuild, summary_of
from deploy.local.report import ReportError
from protocol.config import load_config
from protocol.records import StepRecord, to_line
from protocol.rundir import RunDir
from tests.deploy.canned import records, run_dir

STEPS = 50


COMMAND = ["reprise", "run", "c.yaml", "--set", "run.steps=5"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    return run_dir(tmp_path, STEPS)


def test_the_summary_has_the_promised_keys(run: RunDir) -> None:
    run.model.mkdir()
    summary = summary_of(run)
    assert set(summary) == {
        "run_id", "base_model", "exported_model", "held_out", "held_out_accuracy",
        "held_out_accuracy_kind", "sampled", "greedy_accuracy", "entropy", "accuracy_by_stratum",
        "steps", "rollouts", "seconds", "wall_seconds", "seed", "strategy", "accounts",
        "impure_groups_trained",
        "tokens_per_second", "end",
    }  # fmt: skip
    assert summary["base_model"] == "model", "relative to the working directory"
    assert summary["exported_model"] == "runs/canned-1/model"
    assert summary["held_out"] == "held_out.jsonl"
    assert summary["end"] == {"reason": "finished", "detail": ""}


def test_accuracy_is_exact_where_it_was_computed_with_the_sampled_beside_it(run: RunDir) -> None:
    summary = summary_of(run)
    assert summary["held_out_accuracy_kind"] == "exact"
    # The mean of the canned probabilities: (.99 + .95 + .8 + .6 + .4 + .1 + .001) ÷ 8.
    assert summary["held_out_accuracy"]["before"] == pytest.approx(3.841 / 8)
    # +.2 each where there is room, +.01 and +.05 at the top, none for the unsolvable.
    assert summary["held_out_accuracy"]["after"] == pytest.approx((3.841 + 0.06 + 0.8) / 8)
    assert summary["sampled"]["before"] == pytest.approx(0.39)
    # sqrt(Σ p(1−p) ÷ n) ÷ 8 with n = 4 and the canned p.
    variance = sum(p * (1 - p) for p in (0.99, 0.95, 0.8, 0.6, 0.4, 0.1, 0.001)) / 4
    assert summary["sampled"]["standard_error"]["before"] == pytest.approx(variance**0.5 / 8)


def test_strata_are_those_before_training(run: RunDir) -> None:
    strata = summary_of(run)["accuracy_by_stratum"]
    assert {name: s["problems"] for name, s in strata.items()} == {
        "always": 2, "often": 2, "seldom": 2, "never": 2
    }  # fmt: skip
    assert strata["often"]["before"] == pytest.approx(0.7)
    assert strata["often"]["after"] == pytest.approx(0.9)
    assert strata["never"]["after"] == pytest.approx(0.0005)


def test_without_exact_figures_the_sampled_ones_stand(tmp_path: Path) -> None:
    summary = summary_of(run_dir(tmp_path, STEPS, exact=False))
    assert summary["held_out_accuracy_kind"] == "sampled"
    assert summary["held_out_accuracy"]["after"] == pytest.approx(0.61)
    assert summary["greedy_accuracy"]["before"] == pytest.approx(0.72)
    assert summary["accuracy_by_stratum"] is None


def test_every_issued_task_has_one_end(run: RunDir) -> None:
    accounts = summary_of(run)["accounts"]
    assert accounts["issued"] == sum(accounts["ends"].values()) + accounts["in_flight"]
    assert accounts["in_flight"] == 0
    assert accounts["ends"]["trained"] == 16 * STEPS


def test_rates_are_tokens_per_second_at_work(run: RunDir) -> None:
    rates = summary_of(run)["tokens_per_second"]
    # Two actors, 60,000 tokens in 150 s each; a step of 2,700 tokens in half a second.
    assert rates == {"actor": 400.0, "learner": 5400.0}


def test_a_run_that_was_cut_short_has_a_summary_too(tmp_path: Path) -> None:
    summary = summary_of(run_dir(tmp_path, STEPS, ended=False))
    assert summary["end"] is None
    assert summary["accounts"]["in_flight"] == 3
    assert summary["tokens_per_second"]["actor"] is None


def test_the_result_is_a_few_lines_with_the_accounts_and_the_paths(run: RunDir) -> None:
    run.report.touch()
    text = "\n".join(result_lines(summary_of(run), run))
    assert re.search(r"0\.480 → 0\.588   \(\+0\.10[78]\)   exact", text)
    assert "0.390 ± 0.055 → 0.610 ± 0.049" in text
    assert re.search(r"[\d,]+ issued = 800 trained \+ .* \+ 0 in flight", text)
    assert "runs/canned-1/report.html" in text


def test_the_report_is_one_file_whose_figures_are_well_formed_and_told_in_words(
    run: RunDir,
) -> None:
    rebuild(run.root)
    page = run.report.read_text()
    assert not re.search(r"(?:src|href)=\"(?:https?:)?//", page), "nothing is loaded from outside"
    figures = re.findall(r"<svg .*?</svg>", page, re.DOTALL)
    assert len(figures) == 10
    for figure in figures:
        ElementTree.fromstring(figure)
    captions = re.findall(r'<span class="hidden"> (.*?)</span>', page, re.DOTALL)
    assert len(captions) == len(figures)
    for label in ("rollouts", "optimizer step", "nats a token", "tokens", "seconds", "problems"):
        assert f">{label}</text>" in page, label
    assert "held near ½ by selection, not progress" in page
    assert "unbiased" in page


def test_the_report_of_a_run_without_any_evaluation_leaves_out_what_is_not_there(
    tmp_path: Path,
) -> None:
    run = run_dir(tmp_path, STEPS, exact=False)
    steps = [r for r in records(3) if isinstance(r, StepRecord)]
    run.metrics.write_bytes(b"".join(map(to_line, steps)))
    rebuild(run.root)
    page = run.report.read_text()
    assert "Held-out accuracy" not in page
    assert "Where the problems are" in page


def test_a_directory_that_is_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"holds no run\.json"):
        rebuild(tmp_path)


def test_exact_accuracy_is_only_for_one_right_string(run: RunDir) -> None:
    assert obstacle(load_config(run.config)) == ""
    for overrides, reason in (
        ({"grading.rewards": [{"name": "math"}]}, "one right string"),
        ({"eval": []}, "no held-out set"),
        ({"rollout.stop": ["\n"]}, "rollout.stop"),
        ({"model.path": "hf://a/b"}, "hub"),
    ):
        assert reason in obstacle(load_config(run.config, overrides))


def test_the_held_out_problems_are_written_as_the_exact_pass_reads_them(
    run: RunDir, tmp_path: Path
) -> None:
    config = load_config(run.config)
    path = write_problems(config, run)
    assert path is not None
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 8
    assert rows[1] == {
        "id": "held_out-1", "prompt": "held_out 1=", "answer": "1", "data_source": "add"
    }  # fmt: skip


def test_the_newest_complete_weights_are_where_a_stopped_run_goes_on(run: RunDir) -> None:
    assert "start again" in how_to_go_on(run, COMMAND)
    for version in ("0.9", "0.10", "0.11"):
        (run.weights / version).mkdir()
        if version != "0.11":
            (run.weights / version / "manifest.json").touch()
    assert newest_model(run) == run.weights / "0.10"
    printed = how_to_go_on(run, COMMAND)
    words = shlex.split(printed.splitlines()[-1])
    assert words[:-2] == COMMAND
    # A relative path would be looked for beside the config file.
    assert words[-2:] == ["--set", f"model.path={(run.weights / '0.10').absolute()}"]


def test_history_survives_a_missing_file(tmp_path: Path) -> None:
    assert History.read(tmp_path / "none").rollouts == 0
