"""The DeepSpeed config of a run: the user's, plus what follows from the run.

Invariant: what the user wrote is used as written; where it contradicts the run, ConfigError names
the field. Imports neither torch nor deepspeed, so that `reprise check` can call it anywhere.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from protocol.config import Config, ConfigError

DEFAULT_OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-6, "weight_decay": 0.0}}
"""Where the user names none; the learning rate is that of common full fine-tuning RL recipes."""
DEFAULT_CLIPPING = 1.0
"""Largest norm of the gradient where the user names none."""
ADAMS = ("adam", "adamw")
WARMUP_SCHEDULERS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
DERIVED = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def check_learner(config: Config) -> None:
    """Raise ConfigError for settings of the learner that cannot be run."""
    longest = config.rollout.max_prompt_tokens + config.rollout.max_tokens
    if config.learner.micro_batch_tokens < longest:
        raise ConfigError(
            f"learner.micro_batch_tokens: {config.learner.micro_batch_tokens} is less than the "
            f"longest prompt and completion, rollout.max_prompt_tokens + rollout.max_tokens = "
            f"{longest}; raise it or lower those"
        )
    deepspeed_config(config, on_cpu=False)


def deepspeed_config(config: Config, *, on_cpu: bool) -> dict[str, Any]:
    """The dict that `deepspeed.initialize` gets.

    DeepSpeed sees batches of one micro-step: the learner marks the last micro-step of an update
    itself, since their number changes from step to step, and its loss already holds the global
    denominator.

    Raises ConfigError: the file cannot be read, or a field contradicts the run.
    """
    user = _read(config.learner.deepspeed)
    _refuse_auto(user, "learner.deepspeed")
    _check_batch_sizes(user, config)
    scheduler = (user.get("scheduler") or {}).get("type")
    if scheduler in WARMUP_SCHEDULERS and config.learner.warmup_steps:
        raise ConfigError(
            f"learner.deepspeed.scheduler.type: {scheduler} warms up by itself and "
            f"learner.warmup_steps is {config.learner.warmup_steps}; set learner.warmup_steps: 0 "
            "or take another scheduler"
        )
    merged = {
        **{k: v for k, v in user.items() if k not in DERIVED},
        "train_batch_size": config.learner.ranks,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
    }
    merged.setdefault("optimizer", DEFAULT_OPTIMIZER)
    # Releases of DeepSpeed differ in their default.
    merged.setdefault("gradient_clipping", DEFAULT_CLIPPING)
    # DeepSpeed reports on its own every so many steps unless told not to.
    merged.setdefault("steps_per_print", None)
    if not any(k in user for k in ("bf16", "bfloat16", "fp16", "torch_autocast")):
        merged |= _precision(config.model.dtype)
    if on_cpu:
        merged["optimizer"] = _on_cpu(merged["optimizer"])
    return merged


def _read(given: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    where = f"learner.deepspeed: {given}"
    try:
        content = json.loads(Path(given).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: must be a JSON object; found {type(content).__name__}")
    return content


def _refuse_auto(section: dict[str, Any], name: str) -> None:
    """`auto` is for the Hugging Face Trainer to fill in; only batch sizes may be left to us."""
    for key, value in section.items():
        if isinstance(value, dict):
            _refuse_auto(value, f"{name}.{key}")
        elif value == "auto" and key not in (*DERIVED, "train_batch_size"):
            raise ConfigError(f"{name}.{key}: 'auto' is not filled in here; write the value")


def _check_batch_sizes(user: dict[str, Any], config: Config) -> None:
    for key in DERIVED:
        if user.get(key, "auto") != "auto":
            raise ConfigError(
                f"learner.deepspeed.{key}: {user[key]} cannot be kept: micro-batches hold "
                f"learner.micro_batch_tokens ({config.learner.micro_batch_tokens}) tokens and as "
                "many completions as fit; leave the field out"
            )
    given = user.get("train_batch_size", "auto")
    expected = config.run.prompts_per_step * config.rollout.group_size
    if given not in ("auto", expected):
        raise ConfigError(
            f"learner.deepspeed.train_batch_size: {given} is not run.prompts_per_step × "
            f"rollout.group_size = {expected}; correct it or leave it out"
        )


def _precision(dtype: str) -> dict[str, Any]:
    if dtype == "bfloat16":
        return {"bf16": {"enabled": True}}
    return {"fp16": {"enabled": True}} if dtype == "float16" else {}


def _on_cpu(optimizer: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's own Adam needs a compiled operator; on CPU the one of torch is taken."""
    if str(optimizer.get("type", "")).lower() not in ADAMS:
        return optimizer
    return {**optimizer, "params": {"torch_adam": True, **optimizer.get("params", {})}}
