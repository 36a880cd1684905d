"""The engine on real vLLM: what comes back, what versions it proves, and what it refuses."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from actors.engine import LoadFailed, PromptError
from actors.vllm_engine import VllmEngine, check_settings, context_length
from protocol.config import Config, ConfigError
from protocol.versions import Span, Version, covers
from tests.actors.engines import QUICKSTART, SharedEngine, engine, forward_logprobs

__all__ = ["engine"]

END = 2


@pytest.fixture(autouse=True)
def base_weights(engine: SharedEngine) -> Version:
    return engine.load(engine.base)


def test_completions_are_whole_and_end_with_the_end_token_unless_cut(
    engine: SharedEngine, base_weights: Version
) -> None:
    prompt = engine.engine.encode("3+6=", 16)
    sampled = engine.generate(prompt, n=16) + engine.generate(prompt, n=4, max_tokens=1)
    for completion in sampled:
        assert len(completion.logprobs) == len(completion.tokens)
        assert completion.spans == [Span(base_weights, 0, len(completion.tokens))]
        assert (completion.finish == "stop") == (completion.tokens[-1] == END)
    # The text of the graders leaves the end token out.
    assert any(c.text == "9" and list(c.tokens)[-1] == END for c in sampled)
    assert {c.finish for c in sampled} == {"stop", "length"}


def test_the_models_generation_config_does_not_change_what_is_sampled(
    engine: SharedEngine,
) -> None:
    """Frequencies of the first token against the exact probabilities, by a χ² bound: with top_k 1
    or a low temperature nearly all mass would lie on one token."""
    prompt = engine.engine.encode("999+99=", 16)
    model = AutoModelForCausalLM.from_pretrained(engine.base, dtype=torch.float32)
    draws = [
        c.tokens[0]
        for future in [engine.start(prompt, n=128, max_tokens=1, temperature=2.0) for _ in range(8)]
        for c in future.result(60)
    ]
    counts = Counter(draws)
    expected = {
        token: len(draws) * torch.tensor(forward_logprobs(model, prompt, [token], 2.0)).exp().item()
        for token in range(16)
    }
    assert sum(expected.values()) == pytest.approx(len(draws), rel=1e-4)
    chi_squared = sum((counts[t] - e) ** 2 / e for t, e in expected.items() if e > 5)
    # 15 degrees of freedom at most: P(χ² > 50) < 2e-5.
    assert chi_squared < 50


def test_greedy_is_the_most_probable_token_and_every_completion_the_same(
    engine: SharedEngine,
) -> None:
    prompt = engine.engine.encode("3+6=", 16)
    first, second = engine.generate(prompt, n=2, temperature=0.0, logprobs=False)
    assert first == second
    assert list(first.logprobs) == []
    model = AutoModelForCausalLM.from_pretrained(engine.base, dtype=torch.float32)
    for position, token in enumerate(first.tokens):
        ids = torch.tensor([[*prompt, *first.tokens[:position]]])
        assert model(ids).logits[0, -1].argmax().item() == token


def test_a_seed_repeats_a_request_and_its_completions_differ(
    engine: SharedEngine, flat: Path
) -> None:
    engine.load(flat)
    prompt = engine.engine.encode("99+99=", 16)
    first, again, other = (
        [list(c.tokens) for c in engine.generate(prompt, n=8, seed=seed)] for seed in (5, 5, 600)
    )
    assert first == again
    assert first != other
    assert len({tuple(tokens) for tokens in first}) > 1


def test_an_update_in_mid_generation_shows_in_the_spans(engine: SharedEngine, flat: Path) -> None:
    before = engine.load(flat)
    futures = [start_long(engine) for _ in range(16)]
    wait_for_a_token(engine, futures[0])
    after = engine.load(flat)
    sampled = [c for future in futures for c in future.result(60)]
    assert all(covers(c.spans, len(c.tokens)) for c in sampled)
    assert [before, after] in [[s.version for s in c.spans] for c in sampled]


def test_a_whole_load_overwrites_what_a_broken_one_left(
    engine: SharedEngine, tmp_path: Path
) -> None:
    """The broken one ends after some of the tensors of each fused layer."""
    zeros = {
        name: torch.zeros_like(tensor)
        for name, tensor in load_file(engine.base / "model.safetensors").items()
        if "q_proj" in name or "gate_proj" in name or "norm" in name
    }
    assert zeros
    save_file(zeros, tmp_path / "model-1.safetensors")
    (tmp_path / "model-2.safetensors").write_bytes(b"cut")
    for path in (tmp_path, tmp_path / "removed"):
        with pytest.raises(LoadFailed, match=str(path)):
            engine.load(path)
        engine.load(engine.base)
        prompt = engine.engine.encode("3+6=", 16)
        model = AutoModelForCausalLM.from_pretrained(engine.base, dtype=torch.float32)
        for c in engine.generate(prompt):
            exact = forward_logprobs(model, prompt, c.tokens, 1.0)
            assert list(c.logprobs) == pytest.approx(exact, abs=1e-3)


def test_a_cancelled_request_is_gone_and_the_engine_goes_on(
    engine: SharedEngine, flat: Path
) -> None:
    engine.load(flat)
    future = start_long(engine)
    wait_for_a_token(engine, future)
    future.cancel()
    with pytest.raises(CancelledError):
        future.result(10)
    assert len(engine.generate(engine.engine.encode("3+6=", 16), n=2)) == 2


@pytest.fixture(scope="module")
def flat(engine: SharedEngine) -> Path:
    """Weights whose logits are all 0: the end token is one among sixteen, completions are long."""
    model = AutoModelForCausalLM.from_pretrained(engine.base, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    model.save_pretrained(engine.directory / "flat")
    return engine.directory / "flat"


def start_long(engine: SharedEngine) -> Any:
    return engine.start(engine.engine.encode("3+6=", 16), n=16, max_tokens=50)


def wait_for_a_token(engine: SharedEngine, future: Any) -> None:
    before = engine.engine.tokens
    while engine.engine.tokens == before:
        assert not future.done()
        time.sleep(0.001)


def test_stop_texts_end_a_completion_and_stay_in_its_tokens(
    engine: SharedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = engine.config.rollout.model_copy(update={"stop": ["4", "6"]})
    config = engine.config.model_copy(update={"rollout": rollout})
    monkeypatch.setattr(engine.engine, "config", config)
    sampled = engine.generate(engine.engine.encode("12+34=", 16), n=16)
    stopped = [c for c in sampled if c.text[-1:] in ("4", "6")]
    assert stopped
    assert all(c.finish == "stop" and len(c.logprobs) == len(c.tokens) for c in stopped)
    assert not any({"4", "6"} & set(c.text[:-1]) for c in sampled)


def test_a_prompt_that_does_not_fit_is_refused_with_its_limit(engine: SharedEngine) -> None:
    # Each character is a token.
    assert len(engine.engine.encode("1" * 32, 16)) == 32
    with pytest.raises(PromptError, match=r"33 tokens.*rollout\.max_prompt_tokens \(32\)"):
        engine.engine.encode("1" * 33, 16)
    with pytest.raises(PromptError, match="leaves 8 beside"):
        engine.engine.encode("1" * 20, 40)


def config(path: Path | str = QUICKSTART, **sections: Any) -> Config:
    return Config(**{"model": {"path": str(path)}, "data": {"train": "t"}, **sections})


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("generation_config", "another distribution"),
        ("logprobs_mode", "another distribution"),
        ("speculative_config", "another distribution"),
        ("max_model_len", r"rollout\.max_prompt_tokens"),
        ("dtype", r"model\.dtype"),
    ],
)
def test_engine_arguments_that_change_the_distribution_are_refused(key: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"actors\.engine\.{key}: .*{says}"):
        check_settings(config(actors={"engine": {key: "x"}}))


def test_a_temperature_that_vllm_does_not_sample_at_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.temperature: 3"):
        check_settings(config(rollout={"temperature": 3.0}))


async def test_an_unknown_engine_argument_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"actors\.engine\.gpu_memory: unknown"):
        await VllmEngine(config(actors={"engine": {"gpu_memory": 1}}), "a").start()


def test_the_context_holds_prompt_and_completion_as_far_as_the_model_reaches() -> None:
    def length(prompt: int, completion: int) -> int:
        rollout = {"max_prompt_tokens": prompt, "max_tokens": completion}
        return context_length(config(rollout=rollout), str(QUICKSTART))

    assert length(16, 8) == 24
    assert length(60, 8) == 64
    with pytest.raises(ConfigError, match="context of 64"):
        length(16, 64)
    with pytest.raises(ConfigError, match=r"model\.path"):
        context_length(config("/nowhere"), "/nowhere")
