"""Makes everything in this directory but the config: the model, its tokenizer and the problems.

    python examples/quickstart/make_model.py            # about ten minutes on one CPU core

The model is a Llama of 0.86 M parameters that adds: the prompt is `12+345=`, the completion `357`
and the end token. It is trained in two phases. First on right answers, until greedy decoding is
right on nearly everything it is meant to learn. Then, shortly, on answers of which one digit is
often wrong, the more often the longer the numbers: the right answer stays the most likely one and
stops being the habit. So the base model knows the sums and does not dependably say them, problems
run from nearly always solved to never solved (five digits, in neither phase), and reinforcement
learning has something to sharpen.

The same machine and torch release give the same files; elsewhere rounding differs and so do the
weights. The files in the repository are the reference, and the tests measure those.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional as F
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

SEED = 0
VOCABULARY = ["<pad>", "<bos>", "<eos>", "<unk>", *"0123456789+="]
PAD, BOS, EOS, UNK = range(4)
TOKEN_ID = {token: i for i, token in enumerate(VOCABULARY)}

CLEAN_STEPS = 1000
NOISY_STEPS = 200
PROBLEMS_PER_STEP = 256


@dataclass(frozen=True, slots=True)
class Kind:
    """Sums of an i-digit and a j-digit number, in either order."""

    digits: tuple[int, int]
    corruption: float | None
    """Probability of one wrong digit in the noisy phase; None: in neither phase."""
    train: int
    held_out: int
    """Number of problems for reinforcement learning and for its evaluation."""
    greedy_needed: float = 0.0
    """Greedy accuracy that the clean phase must reach."""

    @property
    def name(self) -> str:
        """The data source of its problems."""
        return f"add-{self.digits[0]}+{self.digits[1]}"


KINDS = (
    Kind((1, 1), corruption=0.0, train=43, held_out=12, greedy_needed=0.9),
    Kind((1, 2), corruption=0.08, train=332, held_out=100, greedy_needed=0.9),
    Kind((2, 2), corruption=0.4, train=150, held_out=45, greedy_needed=0.9),
    Kind((2, 3), corruption=0.62, train=150, held_out=45, greedy_needed=0.9),
    Kind((3, 3), corruption=0.76, train=150, held_out=45, greedy_needed=0.9),
    Kind((3, 4), corruption=0.86, train=150, held_out=45, greedy_needed=0.8),
    Kind((4, 4), corruption=0.93, train=150, held_out=45, greedy_needed=0.8),
    Kind((5, 5), corruption=None, train=375, held_out=112),
)
TAUGHT = tuple(kind for kind in KINDS if kind.corruption is not None)


class Sum(NamedTuple):
    """`prompt` without the answer, and an answer that may be corrupted."""

    prompt: str
    answer: str


def draw_sum(kind: Kind, rng: random.Random) -> Sum:
    """A uniform draw of both numbers and of their order."""
    a, b = (rng.randrange(10 ** (n - 1) if n > 1 else 0, 10**n) for n in kind.digits)
    if rng.random() < 0.5:
        a, b = b, a
    return Sum(f"{a}+{b}=", str(a + b))


def corrupt(answer: str, rng: random.Random) -> str:
    """The answer with one digit, anywhere, replaced by another one."""
    position = rng.randrange(len(answer))
    wrong = rng.choice([digit for digit in "0123456789" if digit != answer[position]])
    return answer[:position] + wrong + answer[position + 1 :]


def encode(sums: Sequence[Sum]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B, T], padded on the right, and a mask [B, T] of answers with their end token."""
    width = max(len(s.prompt) + len(s.answer) + 1 for s in sums)
    ids = torch.full((len(sums), width), PAD)
    is_answer = torch.zeros(len(sums), width, dtype=torch.bool)
    for i, (prompt, answer) in enumerate(sums):
        row = [*(TOKEN_ID[character] for character in prompt + answer), EOS]
        ids[i, : len(row)] = torch.tensor(row)
        is_answer[i, len(prompt) : len(row)] = True
    return ids, is_answer


def train_step(
    model: LlamaForCausalLM, sums: Sequence[Sum], optimizers: Sequence[torch.optim.Optimizer]
) -> list[bool]:
    """One step of cross-entropy on the answers; which answers were the argmax before it."""
    ids, is_answer = encode(sums)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits  # [B, T-1, V]
    target, counted = ids[:, 1:], is_answer[:, 1:]
    F.cross_entropy(logits[counted], target[counted]).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    right: list[bool] = ((logits.argmax(-1) == target) | ~counted).all(-1).tolist()
    return right


def schedule(
    optimizers: Sequence[torch.optim.Optimizer], scale: Callable[[int], float]
) -> list[torch.optim.lr_scheduler.LambdaLR]:
    """Learning rates that follow `scale(step)` times their first value."""
    return [torch.optim.lr_scheduler.LambdaLR(optimizer, scale) for optimizer in optimizers]


def train_clean(model: LlamaForCausalLM, rng: random.Random, steps: int) -> None:
    """Right answers only; the kinds that are still wrong are drawn more often.

    Muon for the matrices of the layers: it learns to add in natural digit order in about a tenth of
    AdamW's steps.
    """
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.2),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    fall = steps * 0.4
    schedules = schedule(
        optimizers, lambda step: min(1.0, (step + 1) / 50, max(0.01, (steps - step) / fall))
    )
    wrong_share = [1.0] * len(TAUGHT)
    for step in range(steps):
        drawn = rng.choices(
            range(len(TAUGHT)), [share + 0.05 for share in wrong_share], k=PROBLEMS_PER_STEP
        )
        right = train_step(model, [draw_sum(TAUGHT[k], rng) for k in drawn], optimizers)
        for rate in schedules:
            rate.step()
        for k, is_right in zip(drawn, right, strict=True):
            wrong_share[k] += 0.01 * ((not is_right) - wrong_share[k])
        if (step + 1) % 50 == 0:
            shares = " ".join(
                f"{k.name} {1 - w:.2f}" for k, w in zip(TAUGHT, wrong_share, strict=True)
            )
            print(f"clean step {step + 1}/{steps}: {shares}", flush=True)


def train_noisy(model: LlamaForCausalLM, rng: random.Random, steps: int) -> None:
    """Answers with one wrong digit, as often as each kind says; all kinds alike."""
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.95), weight_decay=0.0)
    ]
    schedules = schedule(optimizers, lambda step: min((step + 1) / 10, (steps - step) / steps))
    for _ in range(steps):
        sums = []
        for kind in rng.choices(TAUGHT, k=PROBLEMS_PER_STEP):
            prompt, answer = draw_sum(kind, rng)
            is_corrupted = rng.random() < (kind.corruption or 0.0)
            sums.append(Sum(prompt, corrupt(answer, rng) if is_corrupted else answer))
        train_step(model, sums, optimizers)
        for rate in schedules:
            rate.step()


@torch.no_grad()
def measure(model: LlamaForCausalLM, kind: Kind, count: int = 500) -> tuple[float, float]:
    """Exact accuracy at temperature 1 and greedy accuracy on fresh sums of a kind."""
    rng = random.Random(f"{SEED}-measure-{kind.name}")
    ids, is_answer = encode([draw_sum(kind, rng) for _ in range(count)])
    log_probs = model(input_ids=ids[:, :-1], use_cache=False).logits.log_softmax(-1)
    target, counted = ids[:, 1:], is_answer[:, 1:]
    chosen = log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1).masked_fill(~counted, 0.0)
    is_argmax = ((log_probs.argmax(-1) == target) | ~counted).all(-1)
    return chosen.sum(-1).exp().mean().item(), is_argmax.float().mean().item()


def report(model: LlamaForCausalLM, phase: str) -> dict[str, float]:
    """Prints both accuracies of every kind; the greedy ones by name."""
    measured = {kind.name: measure(model, kind) for kind in KINDS}
    for name, (exact, greedy) in measured.items():
        print(f"after the {phase} phase  {name}  exact {exact:.3f}  greedy {greedy:.3f}")
    return {name: greedy for name, (_, greedy) in measured.items()}


def new_model() -> LlamaForCausalLM:
    """The untrained model. Untied, so that a reload of the weights names every tensor."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            initializer_range=0.05,
            tie_word_embeddings=False,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
        )
    )


def new_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; adds no special tokens and has no chat template."""
    tokenizer = Tokenizer(models.WordLevel(TOKEN_ID, unk_token=VOCABULARY[UNK]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=VOCABULARY[PAD],
        bos_token=VOCABULARY[BOS],
        eos_token=VOCABULARY[EOS],
        unk_token=VOCABULARY[UNK],
        model_max_length=64,
        clean_up_tokenization_spaces=False,
    )


def save_model(model: LlamaForCausalLM, directory: Path) -> None:
    """Weights, config and tokenizer in Hugging Face layout; a generation config that changes
    nothing."""
    model.generation_config = GenerationConfig(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)
    model.save_pretrained(directory)
    new_tokenizer().save_pretrained(directory)
    for path in directory.iterdir():
        path.chmod(0o644)


def write_problems(directory: Path) -> None:
    """`train.jsonl` and `held_out.jsonl`: no sum is in both, a+b and b+a counting as one."""
    rng = random.Random(f"{SEED}-problems")
    train: list[dict[str, str]] = []
    held_out: list[dict[str, str]] = []
    for kind in KINDS:
        by_pair: dict[tuple[str, ...], Sum] = {}
        while len(by_pair) < kind.train + kind.held_out:
            drawn = draw_sum(kind, rng)
            by_pair.setdefault(tuple(sorted(drawn.prompt.rstrip("=").split("+"))), drawn)
        rows = [
            {
                "id": s.prompt.rstrip("="),
                "prompt": s.prompt,
                "answer": s.answer,
                "data_source": kind.name,
            }
            for s in by_pair.values()
        ]
        held_out += rows[: kind.held_out]
        train += rows[kind.held_out :]
    for name, rows in (("train", train), ("held_out", held_out)):
        # So that the first few of either file stand for all of it.
        rng.shuffle(rows)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def main() -> None:
    """Both phases, then the files; fails, with nothing written, if the clean phase fell short."""
    parser = argparse.ArgumentParser(description="Make the model and problems of the quickstart.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="target directory")
    out: Path = parser.parse_args().out
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    model = new_model()
    train_clean(model, rng, CLEAN_STEPS)
    greedy = report(model, "clean")
    short = [kind.name for kind in TAUGHT if greedy[kind.name] < kind.greedy_needed]
    if short:
        raise SystemExit(f"greedy accuracy too low after {CLEAN_STEPS} clean steps: {short}")
    train_noisy(model, rng, NOISY_STEPS)
    report(model, "noisy")
    save_model(model, out / "model")
    write_problems(out)


if __name__ == "__main__":
    main()
