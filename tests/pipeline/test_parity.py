"""The log-probs that the sampler reports are those of the weights that were published last.

Tolerances in float32: mean |Δ| < 1e-5 and max < 1e-3 against a plain forward pass of transformers;
weights that are one Adam step of lr 1e-6 older miss them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from protocol.versions import Span
from tests.actors.engines import SharedEngine, adam_step, engine, forward_logprobs

__all__ = ["engine"]

MEAN, MAX = 1e-5, 1e-3
PROMPTS = ("3+6=", "12+345=", "99999+1234=")
END = 2


@pytest.fixture(scope="module")
def updates(engine: SharedEngine) -> list[Path]:
    """Three consecutive versions of the weights; the last step is as small as lr 1e-6 makes it."""
    first = adam_step(engine.base, engine.directory / "w1", 1e-4)
    second = adam_step(first, engine.directory / "w2", 1e-4)
    third = adam_step(second, engine.directory / "w3", 1e-6)
    return [first, second, third]


def gaps(engine: SharedEngine, weights: Path, temperature: float) -> torch.Tensor:
    """|sampler − transformers| of every sampled token, by the weights in `weights`."""
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    prompts = [engine.engine.encode(prompt, 16) for prompt in PROMPTS]
    assert len({len(prompt) for prompt in prompts}) == len(prompts)
    futures = [engine.start(p, n=16, temperature=temperature) for p in prompts]
    found: list[float] = []
    ended = 0
    for prompt, future in zip(prompts, futures, strict=True):
        for sampled in future.result(60):
            own = forward_logprobs(model, prompt, sampled.tokens, temperature)
            found += [abs(a - b) for a, b in zip(sampled.logprobs, own, strict=True)]
            ended += sampled.tokens[-1] == END
    assert ended > 0
    return torch.tensor(found)


def agrees(found: torch.Tensor) -> bool:
    return bool(found.mean() < MEAN and found.max() < MAX)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_after_three_updates_the_log_probs_are_those_of_the_newest_weights_alone(
    engine: SharedEngine, updates: list[Path], temperature: float
) -> None:
    for weights in updates:
        # Each version fills the prefix cache, which the next must not see.
        version = engine.load(weights)
        sampled = engine.generate(engine.engine.encode(PROMPTS[-1], 16), n=2)
        assert all(s.spans == [Span(version, 0, len(s.tokens))] for s in sampled)
    newest = gaps(engine, updates[2], temperature)
    assert agrees(newest), (newest.mean(), newest.max())
    one_step_old = gaps(engine, updates[1], temperature)
    assert not agrees(one_step_old), (one_step_old.mean(), one_step_old.max())


def test_without_the_temperature_the_same_log_probs_do_not_agree(
    engine: SharedEngine, updates: list[Path]
) -> None:
    engine.load(updates[2])
    model = AutoModelForCausalLM.from_pretrained(updates[2], dtype=torch.float32)
    prompt = engine.engine.encode(PROMPTS[1], 16)
    found = [
        abs(a - b)
        for sampled in engine.generate(prompt, n=16, temperature=0.7)
        for a, b in zip(
            sampled.logprobs, forward_logprobs(model, prompt, sampled.tokens, 1.0), strict=True
        )
    ]
    assert not agrees(torch.tensor(found))
