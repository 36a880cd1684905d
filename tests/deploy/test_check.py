"""Bad input gives one clear line, exit code 2 and no traceback, before anything starts."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.local import budget
from deploy.local.check import check, unwritable
from deploy.local.cli import parse_overrides
from protocol.config import Config, ConfigError, load_config
from tests.deploy.canned import config as canned_config

GOOD_LINE = '{"id": "a", "prompt": "1+1=", "answer": "2"}\n'


def reprise(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deploy.local.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A config that is in order, with the embedded broker."""
    canned_config(tmp_path, 10)
    path = tmp_path / "config.yaml"
    edit(path, kafka={})
    return path


def edit(path: Path, **sections: Any) -> None:
    raw = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(raw | sections))


def train_with(text: str, encoding: str = "utf-8") -> Callable[[Path], None]:
    return lambda path: path.with_name("train.jsonl").write_bytes(text.encode(encoding)) and None


BAD_INPUT: list[tuple[str, Callable[[Path], None], str]] = [
    (
        "unknown key",
        lambda path: edit(path, rollout={"group_sice": 8}),
        "config.yaml: rollout.group_sice: unknown key",
    ),
    ("line that is not JSON", train_with(GOOD_LINE + "{oops\n"), "train.jsonl: line 2: not JSON"),
    (
        "line without a prompt",
        train_with('{"id": "a", "answer": "2"}\n'),
        "train.jsonl: line 1: prompt: is missing",
    ),
    ("duplicate id", train_with(GOOD_LINE * 2), "train.jsonl: line 2: id: 'a' is the id of line 1"),
    ("empty file", train_with(""), "train.jsonl: is empty"),
    ("empty line", train_with(GOOD_LINE + "\n"), "train.jsonl: line 2: is empty"),
    ("UTF-16", train_with(GOOD_LINE, "utf-16"), "train.jsonl: is UTF-16"),
    (
        "unreachable broker",
        lambda path: edit(path, kafka={"bootstrap_servers": "127.0.0.1:1"}),
        "kafka.bootstrap_servers: Kafka broker 127.0.0.1:1: not reachable",
    ),
    (
        "run directory below a file",
        lambda path: edit(path, run={"steps": 1, "dir": str(path / "runs")}),
        "config.yaml/runs: cannot be written: Not a directory",
    ),
    (
        "model that does not exist",
        lambda path: edit(path, model={"path": "no-such-model"}),
        "no-such-model: no such directory",
    ),
    ("no config file", lambda path: path.unlink(), "config.yaml: no such file"),
]


@pytest.mark.parametrize(
    ("spoil", "expected"), [pytest.param(s, e, id=name) for name, s, e in BAD_INPUT]
)
def test_bad_input_is_one_line_and_exit_code_2(
    spoil: Callable[[Path], None], expected: str, path: Path
) -> None:
    spoil(path)
    result = reprise("run", str(path))
    assert result.returncode == 2, result
    errors = result.stderr.splitlines()
    assert len(errors) == 1, result.stderr
    assert errors[0].startswith("error: ")
    assert expected in errors[0]
    assert result.stdout == ""
    assert not (path.parent / "runs").exists()


def test_a_good_config_is_accepted_and_said_what_it_will_send(path: Path) -> None:
    result = reprise("check", str(path))
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines()[-1] == f"{path}: ok"
    assert "data.train: 40 problems" in result.stdout
    assert not (path.parent / "runs").exists(), "a check leaves nothing behind"


def test_all_mistakes_are_told_in_one_pass(path: Path) -> None:
    train_with("{oops\n")(path)
    edit(path, model={"path": "no-such-model"}, actors={"count": 9, "max": 4})
    result = reprise("check", str(path))
    assert result.returncode == 2
    fields = sorted(line.split(": ")[1] for line in result.stderr.splitlines())
    assert fields == ["actors.count", "data.train", "model.path"]


def only(path: Path, overrides: dict[str, Any], *, offline: bool = True) -> str:
    """The one mistake that a check of the config with `overrides` finds."""
    found = check(load_config(path, overrides), offline=offline)
    assert len(found.mistakes) == 1, found.mistakes
    return found.mistakes[0]


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"run.prompts_per_step": 41}, r"run\.prompts_per_step: 41 is more than the 40 problems"),
    ({"rollout.max_tokens": 49}, r"rollout\.max_tokens: 16 \+ 49 = 65 is more than the 64"),
    ({"model.chat_template": "always"}, r"model\.chat_template: always, but .* has none"),
    ({"grading.rewards": [{"name": "exakt"}]}, r"grading\.rewards.*exakt"),
    ({"grading.rewards": [{"name": "json:no_such"}]}, r"grading\.rewards.*json.*no_such"),
    ({"learner.deepspeed": "ds.json"}, r"learner\.deepspeed: .*ds\.json: cannot be read"),
    (
        {"learner.deepspeed": {"train_batch_size": 250}},
        r"learner\.deepspeed\.train_batch_size: 250 is not .* = 256",
    ),
    ({"kafka.idempotence": True}, r"kafka\.idempotence: true, but the embedded broker"),
    ({"eval": [{"data": "nowhere.jsonl"}]}, r"eval\.0\.data: .*nowhere\.jsonl: no such file"),
    (
        {"kafka.max_message_bytes": 65536, "rollout.group_size": 256},
        # 256 × (8 × 8 + 512) + 16 × 4
        r"kafka\.max_message_bytes: 65,536, but one group may take 147,520 bytes.*"
        r"lower rollout\.max_tokens or rollout\.group_size",
    ),
]


@pytest.mark.parametrize(("overrides", "expected"), MISTAKES)
def test_mistakes_name_the_field(path: Path, overrides: dict[str, Any], expected: str) -> None:
    assert re.search(expected, only(path, overrides))


def test_the_bytes_of_a_run_are_prompts_times_group_times_tokens_times_8_times_steps(
    path: Path,
) -> None:
    config = load_config(path, {"run.max_refill": 4, "run.steps": 7})
    # prompts × group × max_tokens × 8 × steps × (1 + refill ÷ prompts)
    assert budget.run_bytes(config) == 16 * 16 * 8 * 8 * 7 * (1 + 4 / 16)


def test_more_than_half_the_free_memory_with_the_embedded_broker_names_the_ways_out(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = budget.run_bytes(load_config(path))
    monkeypatch.setattr(budget, "free_memory", lambda: 2 * total)
    assert check(load_config(path)).mistakes == []
    monkeypatch.setattr(budget, "free_memory", lambda: 2 * total - 2)
    line = only(path, {})
    assert line.startswith("kafka.bootstrap_servers: the embedded broker keeps every group")
    assert "use another broker" in line
    assert "run.steps" in line
    other = {"kafka.bootstrap_servers": "127.0.0.1:1"}
    assert check(load_config(path, other), offline=True).mistakes == []


def test_a_hub_model_is_accepted_offline(path: Path) -> None:
    config = load_config(path, {"model.path": "hf://no-such-organisation/no-such-model"})
    assert check(config, offline=True).mistakes == []


def test_a_hub_that_cannot_be_reached_is_a_mistake_otherwise(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "no-cache"))
    line = only(path, {"model.path": "hf://org/name"}, offline=False)
    assert line.startswith("model.path: hf://org/name: http://127.0.0.1:1 cannot be reached")


def test_held_out_prompts_that_are_trained_on_are_a_warning(path: Path) -> None:
    config = load_config(path, {"eval": [{"data": "train.jsonl", "name": "seen"}]})
    found = check(config)
    assert found.mistakes == []
    assert found.warnings == [
        "eval seen: 40 of 40 prompts are in data.train too; its accuracy is not a held-out figure"
    ]


def test_a_directory_that_cannot_be_written_is_seen_without_leaving_one(tmp_path: Path) -> None:
    assert unwritable(Path("/proc/reprise/runs")) != ""
    assert unwritable(tmp_path / "a" / "b") == ""
    assert not (tmp_path / "a").exists()


def test_the_installed_command_finds_a_reward_in_the_working_directory(path: Path) -> None:
    # `python -m` searches the working directory by itself; the installed script does not.
    path.with_name("brevity.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"
    )
    edit(path, grading={"rewards": [{"name": "brevity:score"}]})
    script = Path(sys.executable).with_name("reprise")
    done = subprocess.run(
        [str(script), "check", path.name], cwd=path.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_overrides_are_yaml_values_by_dotted_name(path: Path) -> None:
    given = parse_overrides(["run.steps=5", "run.keep_zero_variance=true", "run.name=x-1"])
    config: Config = load_config(path, given)
    assert (config.run.steps, config.run.keep_zero_variance, config.run.name) == (5, True, "x-1")
    with pytest.raises(ConfigError, match="FIELD=VALUE"):
        parse_overrides(["run.steps"])


def test_the_command_imports_neither_torch_nor_vllm() -> None:
    names = "deploy.local.cli", "deploy.local.check", "deploy.local.launch"
    code = f"import sys, {', '.join(names)}; print({{'torch', 'vllm'}} & {{*sys.modules}})"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"
