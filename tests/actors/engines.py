"""One real vLLM engine for the whole test session (a start takes most of a minute on a busy
machine), and weights to put into it.

Its base model is the quickstart's, beside a generation_config.json that would wreck every
log-prob if the engine heeded it.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.engine import Request, Sampled
from actors.vllm_engine import VllmEngine
from protocol.config import Config
from protocol.loops import LoopThread
from protocol.versions import Version

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
HOSTILE = {
    "eos_token_id": 2,
    "do_sample": True,
    "top_k": 1,
    "temperature": 0.1,
    "repetition_penalty": 2.0,
}
START_SECONDS = 300.0


class SharedEngine:
    """A VllmEngine on a loop of its own, for tests that have none."""

    def __init__(self) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self.directory = Path(tempfile.mkdtemp(prefix="reprise-engine-"))
        self.base = self.directory / "base"
        shutil.copytree(QUICKSTART, self.base)
        (self.base / "generation_config.json").write_text(json.dumps(HOSTILE))
        self.config = Config(
            model={"path": str(self.base)},
            data={"train": "t"},
            rollout={"max_prompt_tokens": 32, "max_tokens": 16, "group_size": 16},
            actors={"slots": 16},
        )
        self.engine = VllmEngine(self.config, "test")
        self._host = LoopThread("engine")
        self._step = 0
        self._requests = 0
        self._host.run_blocking(self.engine.start(), START_SECONDS)

    def load(self, path: Path) -> Version:
        """Load the weights in `path` as the next version."""
        self._step += 1
        version = Version(0, self._step)
        self._host.run_blocking(self.engine.load(path, version), 60)
        return version

    def start(self, prompt: Sequence[int], **fields: Any) -> Any:
        """The future of a request's completions."""
        self._requests += 1
        request = Request(
            **{"n": 8, "temperature": 1.0, "max_tokens": 16, **fields},
            id=f"r{self._requests}",
            prompt_tokens=prompt,
        )
        return self._host.submit(self.engine.generate(request))

    def generate(self, prompt: Sequence[int], **fields: Any) -> list[Sampled]:
        """A request's completions."""
        found: list[Sampled] = self.start(prompt, **fields).result(60)
        return found

    def close(self) -> None:
        """End the engine; a second time does nothing."""
        if self.directory.exists():
            self._host.run_blocking(self.engine.stop(), 60)
            self._host.stop()
            shutil.rmtree(self.directory)


@functools.cache
def shared_engine() -> SharedEngine:
    """The session's engine; the first that asks starts it."""
    return SharedEngine()


@pytest.fixture(scope="session")
def engine() -> Iterator[SharedEngine]:
    """The session's engine, in whichever test module this fixture is imported."""
    shared = shared_engine()
    yield shared
    shared.close()


def forward_logprobs(
    model: Any, prompt: Sequence[int], tokens: Sequence[int], temperature: float
) -> list[float]:
    """Log-probs of `tokens` after `prompt` by one plain forward pass of transformers, at the
    tempered softmax."""
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return [float(value) for value in chosen]


def adam_step(source: Path, target: Path, lr: float) -> Path:
    """The weights of `source` after Adam's first step on a few sums: every weight moves by `lr`
    against the sign of its gradient. Written as the learner publishes them."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART)
    for text in ("3+6=9", "12+34=46", "99+1=100"):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        model(ids, labels=ids).loss.backward()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.grad is not None:
                weight -= lr * weight.grad.sign()
    model.save_pretrained(target)
    return target
