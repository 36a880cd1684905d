"""Exact accuracy: the probability that a model, sampled as it is, gives the one right string.

Where the reward is 1 for one string and 0 for every other, the expected reward of a problem is the
probability of that string's tokens followed by the end token. One teacher-forced pass computes it,
so nothing here is sampled and two calls on the same weights give the same figure. The token ids are
those of the sampler: the prompt as the actor encodes it, the answer as the tokenizer encodes it on
its own, then the end token. With a tokenizer that can spell the answer in several ways (BPE), the
figure counts this one spelling and is a lower bound.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

Stratum = Literal["always", "often", "seldom", "never"]

ALWAYS_FROM = 0.8
OFTEN_FROM = 0.5
SELDOM_FROM = 0.01


class Problem(NamedTuple):
    """A prompt with the one completion text that is right; `data_source` names its class."""

    prompt: str
    answer: str
    data_source: str
    id: str


@dataclass(frozen=True, slots=True)
class ExactResult:
    """What one teacher-forced pass over N problems says.

    `entropy` is teacher-forced: the entropy (nats) of the next-token distribution at every position
    of the right answer, end token included, averaged over those positions. It is not the entropy
    along sampled completions.
    """

    mean: float
    per_problem: tuple[float, ...]
    """[N], in the order of the problems: probability of the answer and the end token."""
    by_data_source: dict[str, float]
    """Mean of `per_problem` over the problems of each data source."""
    greedy: float
    """Share of the problems whose answer and end token are the argmax at every position."""
    entropy: float


def read_problems(path: Path | str) -> list[Problem]:
    """The problems of a JSON-lines file with the keys id, prompt, answer and data_source.

    Raises ValueError that names the file, the line and the field.
    """
    problems: list[Problem] = []
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: not JSON ({error.msg})") from error
            if not isinstance(row, dict):
                raise ValueError(f"{where}: expected a JSON object, found {type(row).__name__}")
            for field in Problem._fields:
                if not isinstance(row.get(field), str):
                    raise ValueError(f"{where}: field '{field}' must be a string")
            problems.append(Problem(*(row[field] for field in Problem._fields)))
    if not problems:
        raise ValueError(f"{path}: no problems in it")
    return problems


def exact_accuracy(
    model_path: Path | str,
    problems: Sequence[Problem],
    *,
    temperature: float = 1.0,
    batch_size: int = 256,
) -> ExactResult:
    """`score` with the float32 model and the tokenizer of a directory in Hugging Face layout."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    return score(model, tokenizer, problems, temperature=temperature, batch_size=batch_size)


@torch.no_grad()
def score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    *,
    temperature: float = 1.0,
    batch_size: int = 256,
) -> ExactResult:
    """Exact accuracy of `model` when it is sampled at `temperature`, without top-p, top-k or
    penalties.

    Raises ValueError if there are no problems, the temperature is not positive or the tokenizer has
    no end token.
    """
    if not problems:
        raise ValueError("no problems to score")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, found {temperature}")
    was_training = model.training
    model.eval()
    encoded = [
        (encode_prompt(tokenizer, problem.prompt), encode_answer(tokenizer, problem.answer))
        for problem in problems
    ]
    # Neighbours in length share a batch, so that little of it is padding.
    order = sorted(range(len(problems)), key=lambda i: len(encoded[i][0]) + len(encoded[i][1]))
    probability = torch.zeros(len(problems), dtype=torch.float64)
    is_argmax = torch.zeros(len(problems), dtype=torch.bool)
    entropy_sum, positions = 0.0, 0
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        scored = _score_batch(model, [encoded[i] for i in indices], temperature)
        probability[indices] = scored.log_prob.exp()
        is_argmax[indices] = scored.is_argmax
        entropy_sum += scored.entropy_sum
        positions += scored.positions
    model.train(was_training)
    per_problem: list[float] = probability.tolist()
    return ExactResult(
        mean=sum(per_problem) / len(per_problem),
        per_problem=tuple(per_problem),
        by_data_source=mean_by([problem.data_source for problem in problems], per_problem),
        greedy=is_argmax.double().mean().item(),
        entropy=entropy_sum / positions,
    )


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Token ids of the prompt as the sampler gets it: in the model's chat template where it has
    one."""
    if tokenizer.chat_template is None:
        return list(tokenizer(prompt)["input_ids"])
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def encode_answer(tokenizer: PreTrainedTokenizerBase, answer: str) -> list[int]:
    """Token ids that the sampler gives for this answer, end token included."""
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end token (eos_token): an answer would never end")
    return [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


class _BatchScore(NamedTuple):
    log_prob: torch.Tensor
    """[B] float64: log-probability of the answer and the end token."""
    is_argmax: torch.Tensor
    """[B] bool."""
    entropy_sum: float
    positions: int


def _score_batch(
    model: PreTrainedModel, encoded: Sequence[tuple[list[int], list[int]]], temperature: float
) -> _BatchScore:
    """One forward pass over B rows of prompt and answer, padded on the right to T ids."""
    rows = [prompt + answer for prompt, answer in encoded]
    width = max(len(row) for row in rows)
    # Right padding under a causal mask never reaches a position that is read.
    ids = torch.zeros(len(rows), width, dtype=torch.long)  # [B, T]
    is_answer = torch.zeros(len(rows), width, dtype=torch.bool)  # [B, T]
    for i, ((prompt, _), row) in enumerate(zip(encoded, rows, strict=True)):
        ids[i, : len(row)] = torch.tensor(row)
        is_answer[i, len(prompt) : len(row)] = True
    logits = model(input_ids=ids.to(model.device), use_cache=False).logits.cpu()  # [B, T, V]
    log_probs = (logits[:, :-1].double() / temperature).log_softmax(-1)  # [B, T-1, V]
    target, counted = ids[:, 1:], is_answer[:, 1:]  # [B, T-1]
    chosen = log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)  # [B, T-1]
    entropy = torch.special.entr(log_probs.exp()).sum(-1)  # [B, T-1]
    return _BatchScore(
        log_prob=chosen.masked_fill(~counted, 0.0).sum(-1),
        is_argmax=((log_probs.argmax(-1) == target) | ~counted).all(-1),
        entropy_sum=entropy[counted].sum().item(),
        positions=int(counted.sum()),
    )


def stratum(accuracy: float) -> Stratum:
    """How often a problem of this exact accuracy is solved.

    In a group of 16, a problem at the bound of `always` (.8) is right in 13 on average, and one at
    the bound of `never` (.01) is wrong in all of them with probability .99**16 = .85.
    """
    if accuracy >= ALWAYS_FROM:
        return "always"
    if accuracy >= OFTEN_FROM:
        return "often"
    return "seldom" if accuracy >= SELDOM_FROM else "never"


def strata(per_problem_before: Sequence[float]) -> list[Stratum]:
    """The stratum of each problem, by its exact accuracy before training; the order is kept."""
    return [stratum(accuracy) for accuracy in per_problem_before]


def mean_by(keys: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    """Mean of the values under each key: [N] and [N]; keys in the order of their first use."""
    grouped: dict[str, list[float]] = {}
    for key, value in zip(keys, values, strict=True):
        grouped.setdefault(key, []).append(value)
    return {key: sum(group) / len(group) for key, group in grouped.items()}


def _print_table(result: ExactResult, by_stratum: Mapping[str, float]) -> None:
    print(f"exact accuracy  {result.mean:.4f}  ({len(result.per_problem)} problems)")
    print(f"greedy accuracy {result.greedy:.4f}")
    print(f"entropy         {result.entropy:.4f} nats a token, teacher-forced")
    for title, means in (("data source", result.by_data_source), ("stratum", by_stratum)):
        print(f"by {title}")
        for key, mean in means.items():
            print(f"  {key:<14}{mean:.4f}")


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m learner.exact --model DIR --data FILE`; exit code 2 if either cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m learner.exact",
        description="Exact accuracy of a model on problems with one right string each.",
    )
    parser.add_argument("--model", required=True, help="directory in Hugging Face layout")
    parser.add_argument("--data", required=True, help="JSON lines: id, prompt, answer, data_source")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    options = parser.parse_args(arguments)
    if not Path(options.model, "config.json").is_file():
        return _refuse(f"--model {options.model}: no config.json there; expected a model directory")
    try:
        result = exact_accuracy(
            options.model,
            read_problems(options.data),
            temperature=options.temperature,
            batch_size=options.batch_size,
        )
    except (OSError, ValueError) as error:
        return _refuse(str(error))
    problem_strata = strata(result.per_problem)
    by_stratum = mean_by(problem_strata, result.per_problem)
    if options.json:
        summary: dict[str, Any] = asdict(result)
        print(json.dumps(summary | {"strata": problem_strata, "by_stratum": by_stratum}))
    else:
        _print_table(result, by_stratum)
    return 0


def _refuse(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
