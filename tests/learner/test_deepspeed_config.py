"""The DeepSpeed config: the user's as written, the rest derived, contradictions named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from learner.deepspeed_config import check_learner, deepspeed_config
from protocol.config import Config, ConfigError
from tests.learner.tiny import make_config


def config(deepspeed: dict[str, Any] | str, **learner: Any) -> Config:
    return make_config(Path("m"), learner={"deepspeed": deepspeed, "ranks": 2, **learner})


def test_what_the_user_wrote_is_used_and_the_rest_is_filled_in() -> None:
    user = {
        "optimizer": {"type": "Adam", "params": {"lr": 3e-4}},
        "zero_optimization": {"stage": 2},
        "gradient_clipping": 0.3,
        "train_batch_size": 12,
    }
    made = deepspeed_config(config(user), on_cpu=True)
    assert made["zero_optimization"] == {"stage": 2}
    assert made["gradient_clipping"] == 0.3
    assert made["optimizer"] == {"type": "Adam", "params": {"lr": 3e-4, "torch_adam": True}}
    assert made["train_batch_size"] == 2
    assert made["gradient_accumulation_steps"] == 1
    assert user["optimizer"] == {"type": "Adam", "params": {"lr": 3e-4}}


def test_an_empty_config_trains_with_adamw_in_the_models_precision() -> None:
    made = deepspeed_config(config({}), on_cpu=False)
    assert made["optimizer"] == {"type": "AdamW", "params": {"lr": 1e-6, "weight_decay": 0.0}}
    assert made["gradient_clipping"] == 1.0
    assert "bf16" not in made
    raw = config({}).model_dump()
    raw["model"]["dtype"] = "bfloat16"
    assert deepspeed_config(Config.model_validate(raw), on_cpu=False)["bf16"] == {"enabled": True}
    raw["learner"]["deepspeed"] = {"fp16": {"enabled": True}}
    assert "bf16" not in deepspeed_config(Config.model_validate(raw), on_cpu=False)


def test_a_json_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"gradient_clipping": 0.5}))
    assert deepspeed_config(config(str(path)), on_cpu=False)["gradient_clipping"] == 0.5


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot be read: No such file"), ("{", "not JSON"), ("[1]", "must be a JSON object")],
)
def test_a_file_that_is_no_config_is_named(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=f"learner.deepspeed: {path}: {said}"):
        deepspeed_config(config(str(path)), on_cpu=False)


@pytest.mark.parametrize(
    ("user", "said"),
    [
        ({"train_batch_size": 16}, r"train_batch_size: 16 is not .* = 12"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps: 4 cannot be kept"),
        ({"train_micro_batch_size_per_gpu": 4}, "train_micro_batch_size_per_gpu: 4 cannot be kept"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
            r"learner\.deepspeed\.optimizer\.params\.lr: 'auto'",
        ),
    ],
)
def test_a_contradiction_names_the_field(user: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        deepspeed_config(config(user), on_cpu=False)


def test_batch_sizes_may_be_left_to_us() -> None:
    user = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    assert deepspeed_config(config(user), on_cpu=False)["train_micro_batch_size_per_gpu"] == 1


def test_two_warm_ups_are_a_conflict_unless_ours_is_off() -> None:
    user = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}
    with pytest.raises(ConfigError, match=r"scheduler\.type: WarmupLR .*learner.warmup_steps: 0"):
        deepspeed_config(config(user, warmup_steps=10), on_cpu=False)
    made = deepspeed_config(config(user, warmup_steps=0), on_cpu=False)
    assert made["scheduler"] == user["scheduler"]


def test_a_micro_batch_must_hold_the_longest_rollout() -> None:
    check_learner(config({}, micro_batch_tokens=24))
    with pytest.raises(ConfigError, match=r"learner\.micro_batch_tokens: 23 .* = 24"):
        check_learner(config({}, micro_batch_tokens=23))
