"""From released groups to the micro-batches of each rank.

Invariants: every rank takes the same number of micro-steps, if need be with empty ones; the padded
tokens of a micro-batch never exceed the bound; assembly and packing are functions of the groups and
the config alone, so all ranks compute the same plan without a word between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.loss import advantages, token_scales
from protocol.config import Config
from protocol.messages import RewardGroup
from protocol.versions import Verdict, Version, judge


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion in the loss, with its prompt.

    Attributes:
        tokens: [prompt + completion] int64.
        prompt_length: tokens of the prompt.
        sampler: [completion] float32, the sampler's log-probs (μ).
        advantage: of every token.
        scale: factor of every token in the loss of the whole batch.
        temperature: at which it was sampled.
    """

    tokens: NDArray[np.int64]
    prompt_length: int
    sampler: NDArray[np.float32]
    advantage: float
    scale: float
    temperature: float


@dataclass(frozen=True, slots=True)
class Batch:
    """Everything one optimizer step trains, and the numbers that the groups alone give."""

    rollouts: list[Rollout]
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tensors of one forward pass: B rows padded on the right to T; N tokens in the loss.

    Padding on the right is never seen through a causal mask, so no attention mask is needed.

    Attributes:
        ids: [B, T] int64.
        in_loss: [B, T] bool: tokens of completions.
        first: logits before this position predict no token in the loss.
        targets, sampler, advantage, scale, temperature: [N], in the row-major order of `in_loss`.
    """

    ids: Tensor
    in_loss: Tensor
    first: int
    targets: Tensor
    sampler: Tensor
    advantage: Tensor
    scale: Tensor
    temperature: Tensor


def assemble(groups: Sequence[RewardGroup], version: Version, config: Config) -> Batch:
    """The completions of `groups` that enter the loss of the step on weights `version`.

    Left out are completions that were not graded, those without a token, and, with
    `truncated: mask`, those that were cut off (they still count in the baseline).
    """
    loss = config.learner.loss
    values = [advantages([c.reward for c in g.completions], loss.advantage) for g in groups]
    lengths = [
        [
            0 if a is None or (c.finish == "length" and loss.truncated == "mask") else c.length
            for a, c in zip(of_group, g.completions, strict=True)
        ]
        for of_group, g in zip(values, groups, strict=True)
    ]
    scales = token_scales(
        lengths,
        loss.denominator,
        prompts_per_step=config.run.prompts_per_step,
        group_size=config.rollout.group_size,
        max_tokens=config.rollout.max_tokens,
    )
    rollouts = []
    for g, of_values, of_scales in zip(groups, values, scales, strict=True):
        prompt = np.frombuffer(g.prompt_tokens, dtype="<i4")
        for c, value, scale in zip(g.completions, of_values, of_scales, strict=True):
            if value is not None and scale:
                tokens = np.concatenate([prompt, np.frombuffer(c.tokens, dtype="<i4")])
                rollouts.append(
                    Rollout(
                        tokens.astype(np.int64),
                        len(prompt),
                        np.frombuffer(c.logprobs, dtype="<f4"),
                        value,
                        scale,
                        g.temperature,
                    )
                )
    metrics = group_metrics(groups, values, version)
    metrics["prompt_tokens"] = float(sum(r.prompt_length for r in rollouts))
    return Batch(rollouts, metrics)


def group_metrics(
    groups: Sequence[RewardGroup], values: Sequence[Sequence[float | None]], version: Version
) -> dict[str, float]:
    """Numbers of a step that its groups alone give, by the names of `StepCompleted.metrics`.

    Lengths are over all completions of the trained groups; rewards are the mean over groups of
    their graded completions' mean; `reward_explored_mean` is absent in a step that trains no
    exploration draw.
    """
    if not groups:
        return {"impure_trained": 0.0}
    completions = [c for g in groups for c in g.completions]
    lengths = np.array([c.length for c in completions])
    truncated = [c.finish == "length" for c in completions]
    sizes = [abs(a) for of_group in values for a in of_group if a is not None]
    ages = [
        version.step - min(s.version.step for c in g.completions for s in c.spans) for g in groups
    ]
    metrics = {
        "length_mean": float(lengths.mean()),
        "length_p95": float(np.percentile(lengths, 95)),
        "truncated_share": float(np.mean(truncated)),
        "staleness_mean": float(np.mean(ages)),
        "impure_trained": float(
            sum(
                judge([(c.spans, c.length) for c in g.completions], version, 0)
                is not Verdict.ADMISSIBLE
                for g in groups
            )
        ),
    }
    if sizes:
        metrics["mean_abs_advantage"] = float(np.mean(sizes))
    for name, chosen in (
        ("reward_mean", list(groups)),
        ("reward_explored_mean", [g for g in groups if g.reason == "explore"]),
    ):
        means = [mean for g in chosen if (mean := _mean_reward(g)) is not None]
        if means:
            metrics[name] = float(np.mean(means))
    return metrics


def _mean_reward(group: RewardGroup) -> float | None:
    graded = [c.reward for c in group.completions if c.reward is not None]
    return sum(graded) / len(graded) if graded else None


def pack(
    rollouts: Sequence[Rollout], ranks: int, micro_batch_tokens: int
) -> list[list[list[Rollout]]]:
    """The rollouts of each micro-step of each rank: [rank][micro-step], equally many for each rank.

    Longest first, each goes to the rank with the fewest tokens so far; a rank's micro-batch then
    holds neighbours in length, as many as fit padded to the longest.

    Raises ValueError for a rollout that is longer than a micro-batch.
    """
    order = sorted(rollouts, key=lambda r: -len(r.tokens))
    if order and len(order[0].tokens) > micro_batch_tokens:
        raise ValueError(
            f"learner.micro_batch_tokens: {micro_batch_tokens} is less than the "
            f"{len(order[0].tokens)} tokens of one prompt and completion; raise it"
        )
    shares: list[list[Rollout]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for rollout in order:
        rank = loads.index(min(loads))
        shares[rank].append(rollout)
        loads[rank] += len(rollout.tokens)
    plans = [_split(share, micro_batch_tokens) for share in shares]
    steps = max(1, *(len(plan) for plan in plans))
    return [plan + [[] for _ in range(steps - len(plan))] for plan in plans]


def _split(share: Sequence[Rollout], micro_batch_tokens: int) -> list[list[Rollout]]:
    """Cut rollouts, longest first, so that rows × longest stays within the bound."""
    plan: list[list[Rollout]] = []
    for rollout in share:
        if plan and (len(plan[-1]) + 1) * len(plan[-1][0].tokens) <= micro_batch_tokens:
            plan[-1].append(rollout)
        else:
            plan.append([rollout])
    return plan


def collate(rollouts: Sequence[Rollout], device: torch.device | str = "cpu") -> MicroBatch:
    """The tensors of one micro-batch. An empty one is one row of two tokens, none in the loss."""
    width = max((len(r.tokens) for r in rollouts), default=2)
    ids = np.zeros((max(1, len(rollouts)), width), dtype=np.int64)
    in_loss = np.zeros(ids.shape, dtype=bool)
    for row, rollout in enumerate(rollouts):
        ids[row, : len(rollout.tokens)] = rollout.tokens
        in_loss[row, rollout.prompt_length : len(rollout.tokens)] = True
    counts = [len(r.sampler) for r in rollouts]

    def per_token(values: list[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), counts)).to(device)

    sampler = np.concatenate([r.sampler for r in rollouts]) if rollouts else np.zeros(0)
    return MicroBatch(
        ids=torch.from_numpy(ids).to(device),
        in_loss=torch.from_numpy(in_loss).to(device),
        first=min((r.prompt_length for r in rollouts), default=1) - 1,
        targets=torch.from_numpy(ids[in_loss]).to(device),
        sampler=torch.from_numpy(sampler.astype(np.float32)).to(device),
        advantage=per_token([r.advantage for r in rollouts]),
        scale=per_token([r.scale for r in rollouts]),
        temperature=per_token([r.temperature for r in rollouts]),
    )
