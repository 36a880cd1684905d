"""The value a user wrote is the value that is used; one that cannot be used is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from protocol.config import (
    Config,
    ConfigError,
    GradingConfig,
    PrioritizedConfig,
    UniformConfig,
    dump_config,
    load_config,
)

MINIMAL: dict[str, Any] = {"model": {"path": "model"}, "data": {"train": "train.jsonl"}}


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BOOTSTRAP_SERVERS", "SASL_USERNAME", "SASL_PASSWORD"):
        monkeypatch.delenv(f"REPRISE_KAFKA_{name}", raising=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


def load(path: Path, raw: Any, **overrides: Any) -> Config:
    path.write_text(raw if isinstance(raw, str) else yaml.safe_dump(raw), encoding="utf-8")
    return load_config(path, {k.replace("__", "."): v for k, v in overrides.items()})


def error_of(path: Path, raw: Any, **overrides: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, raw, **overrides)
    return str(caught.value)


def with_field(dotted: str, value: Any) -> dict[str, Any]:
    raw: dict[str, Any] = {k: dict(v) for k, v in MINIMAL.items()}
    inner = raw
    *sections, last = dotted.split(".")
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[last] = value
    return raw


def test_model_and_data_are_enough_and_paths_are_relative_to_the_file(path: Path) -> None:
    config = load(path, MINIMAL)
    assert config.model.path == str(path.parent / "model")
    assert config.data.train == path.parent / "train.jsonl"
    assert config.run.dir == Path.cwd() / "runs"
    assert config.run.max_lag == 0
    assert config.max_refill == config.run.prompts_per_step


@pytest.mark.parametrize(
    "field",
    ["steps", "run.stepps", "rollout.topp", "kafka.acks", "waits.tick_s",
     "learner.loss.kl_beta", "grading.rewards_", "data.fields.question", "actors.engine_"],
)  # fmt: skip
def test_an_unknown_key_is_an_error_that_names_it(path: Path, field: str) -> None:
    text = error_of(path, with_field(field, 1))
    assert text.startswith(f"{path}: {field}: unknown key")
    assert "\n" not in text


def test_every_mistake_gets_its_own_line(path: Path) -> None:
    raw = {"run": {"steps": 0, "foo": 1}, "model": {}, "data": {"train": "t"}}
    lines = error_of(path, raw).splitlines()
    assert {line.split(": ")[1] for line in lines} == {"run.steps", "run.foo", "model.path"}
    assert "found 0" in next(line for line in lines if "run.steps" in line)
    assert "is missing and has no default" in next(line for line in lines if "model.path" in line)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_p", 0.9),
        ("top_k", 50),
        ("top_k", 1),
        ("min_p", 0.05),
        ("repetition_penalty", 1.1),
        ("presence_penalty", 0.1),
        ("frequency_penalty", -0.1),
    ],
)
def test_sampling_that_changes_the_distribution_is_refused(
    path: Path, field: str, value: float
) -> None:
    text = error_of(path, with_field(f"rollout.{field}", value))
    assert f"{field}: {value} changes the sampled distribution" in text
    assert text.startswith(f"{path}: rollout: ")


@pytest.mark.parametrize(
    ("field", "value"),
    [("top_p", 1), ("top_k", 0), ("top_k", -1), ("min_p", 0), ("repetition_penalty", 1.0),
     ("presence_penalty", 0), ("frequency_penalty", 0.0)],
)  # fmt: skip
def test_neutral_sampling_may_be_written_down(path: Path, field: str, value: float) -> None:
    assert getattr(load(path, with_field(f"rollout.{field}", value)).rollout, field) == value


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("run.name", "My Run", "run.name: "),
        ("run.prompts_per_step", -1, "run.prompts_per_step: "),
        ("run.max_lag", -1, "run.max_lag: "),
        ("rollout.group_size", 1, "rollout.group_size: "),
        ("rollout.temperature", 0, "rollout.temperature: "),
        ("waits.tick", 2.5, "waits.tick: "),
        ("waits.lease", float("inf"), "waits.lease: "),
        ("waits.lease", 3.0, "waits.lease: 3.0 must be more than two heartbeats"),
        ("kafka.max_message_bytes", 100, "kafka.max_message_bytes: "),
        ("metrics.port", 70000, "metrics.port: "),
        ("strategy", {"name": "random"}, "strategy: "),
        ("strategy", {"cooldown": 3}, "strategy: needs 'name': one of prioritized, uniform"),
        ("strategy", {"name": "uniform", "cooldown": 3}, "strategy.cooldown: unknown key"),
        (
            "strategy",
            {"name": "prioritized", "exploration": 0.95, "retest_share": 0.1},
            "exploration + retest_share: 0.95 + 0.1 is more than the whole batch",
        ),
        ("strategy", {"name": "prioritized", "retest_max": 5}, "retest_max: 5 is less than"),
        ("grading.rewards", [], "grading.rewards: "),
        ("grading.range", [1, 0], "range: [1.0, 0.0] must be [smallest, largest]"),
        ("grading.min_graded", 17, "grading.min_graded: 17 is more than rollout.group_size (16)"),
        ("learner.deepspeed", 3, "learner.deepspeed: "),
        ("learner.loss.clip_low", 1.0, "learner.loss.clip_low: "),
        ("learner.loss.importance_cap", 0.5, "learner.loss.importance_cap: "),
        ("eval", [{"data": "a"}, {"data": "b"}], "eval: two sets are named 'held_out'"),
        ("eval", [{"data": "a", "temperature": 0}], "eval.0.temperature: "),
    ],
)
def test_values_that_cannot_be_used_are_named(
    path: Path, field: str, value: Any, message: str
) -> None:
    text = error_of(path, with_field(field, value))
    assert all(line.startswith(f"{path}: ") for line in text.splitlines())
    assert message in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "must be a map of sections; found NoneType"),
        ("- a\n- b\n", "must be a map of sections; found list"),
        ("run: {steps: [}", "not YAML: "),
        ("run: 3\nmodel: {path: m}\ndata: {train: t}\n", "run: "),
    ],
)
def test_a_file_that_is_no_config_is_one_clear_line(path: Path, content: str, message: str) -> None:
    text = error_of(path, content)
    assert text.startswith(f"{path}: ")
    assert message in text
    assert "\n" not in text


def test_a_file_that_cannot_be_read_is_named(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{path}: no such file$"):
        load_config(path)
    with pytest.raises(ConfigError, match=f"^{tmp_path}: is a directory"):
        load_config(tmp_path)
    path.write_bytes("model: {path: ä}".encode("latin-1"))
    with pytest.raises(ConfigError, match=f"^{path}: not UTF-8 .* at byte 14"):
        load_config(path)


def test_overrides_by_dotted_name_win_over_the_file(path: Path) -> None:
    config = load(path, with_field("run.steps", 7), run__steps=9, learner__loss__kl=0.5)
    assert (config.run.steps, config.learner.loss.kl) == (9, 0.5)
    assert "run.stepps: unknown key" in error_of(path, MINIMAL, run__stepps=1)
    assert "model.path: path is not a section" not in error_of(path, MINIMAL, model__path__x=1)


def test_secrets_come_from_the_environment_and_are_never_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPRISE_KAFKA_BOOTSTRAP_SERVERS", "broker:9092")
    monkeypatch.setenv("REPRISE_KAFKA_SASL_USERNAME", "me")
    monkeypatch.setenv("REPRISE_KAFKA_SASL_PASSWORD", "hunter2")
    config = load(path, with_field("kafka.sasl_mechanism", "PLAIN"))
    assert config.kafka.bootstrap_servers == "broker:9092"
    assert config.kafka.sasl_username == "me"
    assert config.kafka.sasl_password is not None
    assert config.kafka.sasl_password.get_secret_value() == "hunter2"
    dump_config(config, path)
    assert "hunter2" not in path.read_text() + repr(config) + str(config.model_dump(mode="json"))
    # A process that reads the written config gets the secret from its own environment.
    assert load_config(path).kafka == config.kafka


def test_a_password_in_the_file_is_not_written_either(path: Path) -> None:
    config = load(path, with_field("kafka.sasl_password", "hunter2"))
    dump_config(config, path)
    assert "hunter2" not in path.read_text() + repr(config)


def test_what_is_written_reads_back_equal(path: Path) -> None:
    raw = {
        **MINIMAL,
        "eval": [{"data": "held.jsonl", "name": "h", "limit": 3}],
        "strategy": {"name": "prioritized", "cooldown": 2},
        "grading": {"range": [-1, 1], "rewards": [{"name": "math", "options": {"x": 1}}]},
        "learner": {"deepspeed": {"zero_optimization": {"stage": 2}}},
        "kafka": {"bootstrap_servers": "a:1,b:2"},
    }
    config = load(path, raw)
    dump_config(config, path)
    assert load_config(path) == config


def test_the_strategy_is_chosen_by_its_type(path: Path) -> None:
    assert isinstance(load(path, MINIMAL).strategy, PrioritizedConfig)
    assert isinstance(load(path, with_field("strategy.name", "uniform")).strategy, UniformConfig)


@pytest.mark.parametrize(("group_size", "needed"), [(2, 2), (7, 7), (8, 7), (16, 14), (20, 18)])
def test_all_but_one_in_eight_must_be_graded(group_size: int, needed: int) -> None:
    assert GradingConfig().needed(group_size) == needed
    assert GradingConfig(min_graded=2).needed(group_size) == 2


def test_every_field_has_a_sentence() -> None:
    def fields(model: Any, where: str) -> Any:
        for name, field in model.model_fields.items():
            yield f"{where}{name}", field.description
            inner = field.annotation
            if hasattr(inner, "model_fields"):
                yield from fields(inner, f"{where}{name}.")

    missing = [name for name, text in fields(Config, "") if not text]
    assert missing == []
