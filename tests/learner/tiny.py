"""A tiny random model and hand-made groups for the learner's tests."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from protocol.arrays import pack_float32, pack_int32, unpack_int32
from protocol.config import Config
from protocol.messages import Completion, Reason, RewardGroup
from protocol.versions import Span, Version

TOKENIZER = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
VOCABULARY = 16
END = 2
FIRST = Version(0, 0)


def make_model(directory: Path, *, tied: bool = False, seed: int = 7) -> Path:
    """A random Llama of two layers with the quickstart's tokenizer, in Hugging Face layout."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.2,
            tie_word_embeddings=tied,
            bos_token_id=1,
            eos_token_id=END,
            pad_token_id=0,
        )
    )
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(directory)
    return directory


def make_config(model: Path, *, dtype: str = "float32", **overrides: Any) -> Config:
    """A config for `model`; overrides by section."""
    raw: dict[str, Any] = {
        "model": {"path": str(model), "dtype": dtype},
        "data": {"train": "unused.jsonl"},
        "run": {"prompts_per_step": 3},
        "rollout": {"group_size": 4, "max_tokens": 12, "max_prompt_tokens": 12},
        "learner": {"micro_batch_tokens": 60, "warmup_steps": 0},
    }
    for section, values in overrides.items():
        raw[section] = {**raw.get(section, {}), **values}
    return Config.model_validate(raw)


def make_group(
    number: int,
    rewards: list[float | None],
    lengths: list[int],
    *,
    prompt_length: int,
    version: Version = FIRST,
    temperature: float = 1.0,
    truncated: tuple[int, ...] = (),
    reason: Reason = "heap",
) -> RewardGroup:
    """A group of random tokens and random sampler log-probs; a function of its arguments alone."""
    rng = random.Random(number)
    tokens = [[rng.randrange(3, VOCABULARY) for _ in range(n - 1)] + [END] for n in lengths]
    prompt = [1] + [rng.randrange(3, VOCABULARY) for _ in range(prompt_length - 1)]
    return RewardGroup(
        task=f"{version.generation}-{number}",
        attempt=1,
        actor="a",
        problem=f"p{number}",
        data_source="",
        reason=reason,
        temperature=temperature,
        prompt_tokens=pack_int32(prompt),
        completions=[
            Completion(
                tokens=pack_int32(ids),
                logprobs=pack_float32([-abs(rng.gauss(2.5, 0.7)) for _ in ids]),
                spans=[Span(version, 0, len(ids))],
                finish="length" if i in truncated else "stop",
                reward=reward,
                correct=None if reward is None else float(reward >= 1),
            )
            for i, (ids, reward) in enumerate(zip(tokens, rewards, strict=True))
        ],
    )


def uneven_groups() -> list[RewardGroup]:
    """Three groups of 4 with unlike lengths, temperatures and rewards; one completion ungraded, two
    truncated. Two ranks get unlike shares of tokens whatever the split."""
    first = make_group(1, [1.0, 0.0, 0.0, 1.0], [1, 9, 4, 2], prompt_length=3)
    second = make_group(
        2,
        [0.25, None, 1.0, 0.5],
        [12, 3, 7, 5],
        prompt_length=9,
        temperature=0.7,
        truncated=(0,),
    )
    third = make_group(
        3,
        [0.0, 0.0, 1.0, 0.0],
        [2, 2, 11, 12],
        prompt_length=5,
        temperature=1.3,
        truncated=(3,),
    )
    return [first, second, third]


def ids_of(raw: bytes) -> list[int]:
    """Token ids in `raw`."""
    return list(unpack_int32(raw))


def quiet_environment() -> dict[str, str]:
    """The environment of a rank process in tests: one thread, no look-up on the net."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
