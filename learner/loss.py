"""GRPO as formulae: advantages, the scale of each token, and the loss of a set of tokens.

Invariant: everything is per token and additive. Each token carries its own scale, computed once
over the whole batch, so the loss is the same whatever the packing and however many ranks add up
their parts. Three log-probabilities are kept apart: `sampler` (μ) came with the group, `old` is the
learner's own before the first update of the step, `new` is that of this forward pass. The clip
acts on new/old alone; μ enters nothing but the detached weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from protocol.config import LossConfig


def advantages(
    rewards: Sequence[float | None], kind: Literal["centred", "std"]
) -> list[float | None]:
    """Advantage of each completion of one group; None for a completion that was not graded.

    centred: Aᵢ = rᵢ − mean(r), so that mean(A²) is the group's variance, p(1 − p) for 0/1 rewards
    (Dr. GRPO, arXiv 2503.20783). std: (rᵢ − mean(r)) / std(r), the population's standard deviation
    (GRPO, arXiv 2402.03300, eq. 3); 0 where all rewards are equal. Mean and deviation are over the
    graded completions.
    """
    graded = [r for r in rewards if r is not None]
    if not graded or min(graded) == max(graded):
        # Equal rewards are told by comparison: their mean may be off by a rounding error.
        return [None if r is None else 0.0 for r in rewards]
    mean = math.fsum(graded) / len(graded)
    deviation = 1.0
    if kind == "std":
        # hypot squares nothing, so the largest rewards that a message may hold do not overflow.
        deviation = math.hypot(*(r - mean for r in graded)) / math.sqrt(len(graded))
    return [None if r is None else (r - mean) / deviation for r in rewards]


def token_scales(
    lengths: Sequence[Sequence[int]],
    kind: Literal["token", "sequence", "constant"],
    *,
    prompts_per_step: int,
    group_size: int,
    max_tokens: int,
) -> list[list[float]]:
    """Factor of each token's loss in the sum over the batch, for each completion of each group.

    `lengths` holds the tokens that enter the loss, 0 for a completion that is left out. With N
    tokens, S completions and g groups in the loss, and P = prompts_per_step:

    token     1 / (N · P/g): one denominator for all ranks and micro-batches (DAPO, arXiv
              2503.14476, eq. 8)
    sequence  1 / (lengthᵢ · S · P/g): each completion's mean first (GRPO, arXiv 2402.03300, eq. 3)
    constant  1 / (P · group_size · max_tokens) (Dr. GRPO, arXiv 2503.20783)

    P/g makes an under-filled step a smaller one; `constant` does so by itself.
    """
    counted = [[n for n in group if n] for group in lengths]
    groups = sum(1 for group in counted if group)
    sequences = sum(len(group) for group in counted)
    tokens = sum(sum(group) for group in counted)

    def scale(length: int) -> float:
        if not length:
            return 0.0
        if kind == "token":
            return groups / (tokens * prompts_per_step)
        if kind == "sequence":
            return groups / (length * sequences * prompts_per_step)
        return 1 / (prompts_per_step * group_size * max_tokens)

    return [[scale(n) for n in group] for group in lengths]


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each token under the tempered softmax, and that distribution's entropy.

    Args:
        logits: [N, V], of any float type; computed in float32.
        tokens: [N], the token that followed.
        temperature: [N].

    Returns [N] log-probs, with gradient, and [N] entropies in nats, without.
    """
    log_softmax = (logits.float() / temperature.unsqueeze(-1)).log_softmax(-1)
    chosen = log_softmax.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        entropy = torch.special.entr(log_softmax.exp()).sum(-1)
    return chosen, entropy


@dataclass(slots=True)
class TokenSums:
    """Sums and maxima over the tokens in the loss, of one rank or of all."""

    loss: float = 0.0
    tokens: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    weight: float = 0.0
    weight_truncated: float = 0.0
    kl_sampler: float = 0.0
    gap: float = 0.0
    max_gap: float = 0.0
    max_deviation: float = 0.0

    def add(self, other: TokenSums) -> None:
        """Take in other tokens."""
        for field in fields(self):
            mine, its = getattr(self, field.name), getattr(other, field.name)
            joined = max(mine, its) if field.name.startswith("max_") else mine + its
            setattr(self, field.name, joined)

    def metrics(self) -> dict[str, float]:
        """The step's numbers by the names that `StepCompleted.metrics` has.

        `kl_sampler` estimates KL(sampler ‖ learner), the tokens being the sampler's: mean of
        r − 1 − log r with r = old/μ (k3, Schulman 2020).
        """
        n = max(self.tokens, 1.0)
        return {
            "loss": self.loss,
            "tokens": self.tokens,
            "entropy": self.entropy / n,
            "clip_share": self.clipped / n,
            "weight_mean": self.weight / n,
            "weight_truncated_share": self.weight_truncated / n,
            "weight_max_deviation": self.max_deviation,
            "kl_sampler": self.kl_sampler / n,
            "logprob_gap_mean": self.gap / n,
            "logprob_gap_max": self.max_gap,
        }


def grpo(
    new: Tensor,
    old: Tensor,
    sampler: Tensor,
    advantage: Tensor,
    scale: Tensor,
    config: LossConfig,
    reference: Tensor | None = None,
) -> Tensor:
    """The loss of N tokens; all tensors are [N], and only `new` carries a gradient.

    With ρ = exp(new − old) and the detached weight w = min(exp(old − μ), C):

    loss = − Σₜ scaleₜ · wₜ · min(ρₜ Aₜ, clip(ρₜ, 1 − clip_low, 1 + clip_high) Aₜ)

    (PPO, arXiv 1707.06347, eq. 7; decoupled from the sampler as in arXiv 2110.00641, truncated as
    in V-trace, arXiv 1802.01561). With `reference`, the log-probs under the first weights, each
    token's loss also holds kl · (exp(ref − new) − (ref − new) − 1), under the same weight, for it
    too is an expectation under the learner (k3; GRPO, arXiv 2402.03300, eq. 4).
    """
    ratio = (new - old).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    objective = torch.minimum(ratio * advantage, clipped * advantage)
    if reference is not None:
        gap = reference - new
        objective = objective - config.kl * (gap.exp() - gap - 1)
    weight = (old - sampler).exp().clamp(max=config.importance_cap)
    return -(scale * weight * objective).sum()


@torch.no_grad()
def token_sums(
    loss: Tensor,
    new: Tensor,
    old: Tensor,
    sampler: Tensor,
    advantage: Tensor,
    entropy: Tensor,
    config: LossConfig,
) -> TokenSums:
    """What the metrics need of N tokens; tensors are [N], `loss` is their scalar.

    A token counts as clipped where the clip takes its gradient away: ρ > 1 + clip_high with A > 0,
    or ρ < 1 − clip_low with A < 0.
    """
    if not new.numel():
        return TokenSums()
    ratio = (new - old).exp()
    clipped = ((ratio > 1 + config.clip_high) & (advantage > 0)) | (
        (ratio < 1 - config.clip_low) & (advantage < 0)
    )
    # Double precision: 1 − r and log r cancel to nothing in single precision where r is near 1.
    log_ratio = old.double() - sampler.double()
    raw = log_ratio.exp()
    weight = raw.clamp(max=config.importance_cap)
    return TokenSums(
        loss=loss.item(),
        tokens=float(new.numel()),
        entropy=entropy.double().sum().item(),
        clipped=clipped.sum().item(),
        weight=weight.sum().item(),
        weight_truncated=(raw > config.importance_cap).sum().item(),
        kl_sampler=(raw - 1 - log_ratio).sum().item(),
        gap=log_ratio.abs().sum().item(),
        max_gap=log_ratio.abs().max().item(),
        max_deviation=(weight - 1).abs().max().item(),
    )
