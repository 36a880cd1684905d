"""The formulae of the loss, against numbers worked out here."""

from __future__ import annotations

import math

import pytest
import torch

from learner.loss import advantages, grpo, token_logprobs, token_scales, token_sums
from protocol.config import LossConfig


def test_centred_advantages_have_mean_square_p_times_one_minus_p() -> None:
    values = advantages([1.0, 0.0, 0.0, 1.0, 0.0], "centred")
    assert values == pytest.approx([0.6, -0.4, -0.4, 0.6, -0.4])
    assert sum(v * v for v in values if v is not None) / 5 == pytest.approx(0.4 * 0.6)


def test_std_advantages_have_mean_square_one() -> None:
    values = advantages([1.0, 0.0, 0.0, 1.0, 0.0], "std")
    assert sum(v * v for v in values if v is not None) / 5 == pytest.approx(1.0)
    assert values[0] == pytest.approx(0.6 / math.sqrt(0.24))


def test_the_largest_reward_that_a_message_may_hold_has_an_advantage() -> None:
    assert advantages([1e300, -1e300], "std") == pytest.approx([1.0, -1.0])


def test_an_ungraded_completion_is_in_neither_baseline_nor_loss() -> None:
    assert advantages([1.0, None, 0.0], "centred") == [0.5, None, -0.5]
    assert advantages([None, None], "std") == [None, None]


@pytest.mark.parametrize("kind", ["centred", "std"])
def test_equal_rewards_give_no_advantage_even_where_their_mean_is_rounded(kind: str) -> None:
    assert advantages([0.1, 0.1, None, 0.1], kind) == [0.0, 0.0, None, 0.0]  # type: ignore[arg-type]


def test_token_denominator_counts_all_tokens_and_shrinks_an_under_filled_step() -> None:
    # 6 tokens; 2 of 8 groups: 1 / (6 · 8/2).
    scales = token_scales(
        [[1, 2], [3, 0], [0, 0]], "token", prompts_per_step=8, group_size=2, max_tokens=9
    )
    assert scales == [
        pytest.approx([1 / 24, 1 / 24]),
        pytest.approx([1 / 24, 0.0]),
        [0.0, 0.0],
    ]


def test_sequence_denominator_gives_each_completion_the_same_weight() -> None:
    lengths = [[1, 2], [5, 0]]
    scales = token_scales(lengths, "sequence", prompts_per_step=2, group_size=2, max_tokens=9)
    per_completion = [
        scale * length
        for of_scales, of_lengths in zip(scales, lengths, strict=True)
        for scale, length in zip(of_scales, of_lengths, strict=True)
    ]
    assert per_completion == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])


def test_constant_denominator_depends_on_no_length() -> None:
    scales = token_scales(
        [[1, 2], [5, 0]], "constant", prompts_per_step=4, group_size=2, max_tokens=9
    )
    assert scales == [[1 / 72, 1 / 72], [1 / 72, 0.0]]


def test_logits_are_divided_by_the_temperature_before_the_softmax() -> None:
    logits = torch.tensor([[1.0, 2.0, -0.5], [0.3, 0.1, 0.2]])
    chosen, entropy = token_logprobs(logits, torch.tensor([1, 2]), torch.tensor([0.5, 2.0]))
    for row, (target, temperature) in enumerate([(1, 0.5), (2, 2.0)]):
        powers = [math.exp(v / temperature) for v in logits[row].tolist()]
        p = [v / sum(powers) for v in powers]
        assert chosen[row].item() == pytest.approx(math.log(p[target]), rel=1e-6)
        assert entropy[row].item() == pytest.approx(-sum(v * math.log(v) for v in p), rel=1e-6)


def _terms(count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(scale: float) -> torch.Tensor:
        return scale * torch.randn(count, generator=generator, dtype=torch.float64)

    old = -draw(1.0).abs()
    return {
        "old": old,
        "new": (old + draw(0.4)).requires_grad_(),
        "sampler": old + draw(0.6),
        "advantage": draw(1.0),
        "scale": draw(0.1).abs(),
        "reference": old + draw(0.5),
    }


def test_loss_and_gradient_equal_the_formula_token_by_token() -> None:
    config = LossConfig(clip_low=0.1, clip_high=0.3, importance_cap=1.5, kl=0.2)
    t = _terms(400)
    new, old, sampler, advantage, scale = (
        t[name] for name in ("new", "old", "sampler", "advantage", "scale")
    )
    loss = grpo(new, old, sampler, advantage, scale, config, t["reference"])
    (gradient,) = torch.autograd.grad(loss, new)
    expected_loss, clipped, truncated = 0.0, 0, 0
    for i in range(400):
        log_new, log_old, mu, a, c, ref = (
            t[name][i].item()
            for name in ("new", "old", "sampler", "advantage", "scale", "reference")
        )
        ratio = math.exp(log_new - log_old)
        weight = min(math.exp(log_old - mu), 1.5)
        inside = min(max(ratio, 0.9), 1.3)
        k3 = math.exp(ref - log_new) - (ref - log_new) - 1
        expected_loss -= c * weight * (min(ratio * a, inside * a) - 0.2 * k3)
        # d min(ρA, clip(ρ)A)/d new is ρA, or 0 where the clipped term is the smaller.
        slope = ratio * a if ratio * a <= inside * a else 0.0
        expected = -c * weight * (slope - 0.2 * (1 - math.exp(ref - log_new)))
        assert gradient[i].item() == pytest.approx(expected, rel=1e-9, abs=1e-15)
        clipped += ratio * a > inside * a
        truncated += math.exp(log_old - mu) > 1.5
    assert loss.item() == pytest.approx(expected_loss, rel=1e-12)
    assert 40 < clipped < 360
    assert 40 < truncated < 360
    sums = token_sums(loss.detach(), new, old, sampler, advantage, old, config)
    assert (sums.clipped, sums.weight_truncated, sums.tokens) == (clipped, truncated, 400)


def test_the_sampler_enters_the_weight_and_not_the_clipped_ratio() -> None:
    config = LossConfig(importance_cap=2.0)
    new = torch.tensor([-1.0, -1.0], requires_grad=True)
    old, advantage, scale = new.detach(), torch.tensor([1.0, 1.0]), torch.tensor([1.0, 1.0])
    # Ratios of learner to sampler of e and e⁻¹ lie far outside the clip; both tokens still learn.
    sampler = torch.tensor([-2.0, 0.0])
    loss = grpo(new, old, sampler, advantage, scale, config)
    (gradient,) = torch.autograd.grad(loss, new)
    assert gradient.tolist() == pytest.approx([-2.0, -math.exp(-1)])


def test_on_policy_both_ratios_are_one() -> None:
    config = LossConfig()
    new = torch.tensor([-0.3, -2.0, -1.1], requires_grad=True)
    old = new.detach()
    advantage = torch.tensor([0.5, -0.5, 0.25])
    scale = torch.full((3,), 1 / 3)
    loss = grpo(new, old, old, advantage, scale, config)
    (gradient,) = torch.autograd.grad(loss, new)
    assert gradient.tolist() == pytest.approx((-advantage / 3).tolist())
    numbers = token_sums(loss.detach(), new, old, old, advantage, old, config).metrics()
    assert numbers["clip_share"] == 0
    assert numbers["weight_mean"] == 1
    assert numbers["weight_max_deviation"] == 0
    assert numbers["kl_sampler"] == 0


def test_kl_of_learner_to_sampler_is_estimated_without_cancellation() -> None:
    # At a constant gap of δ the estimate is e^δ − 1 − δ ≈ δ²/2, far below float32's resolution.
    old = torch.full((1000,), -1.0)
    sampler = old - 2**-12
    zero = torch.zeros(1000)
    numbers = token_sums(zero.sum(), old, old, sampler, zero, zero, LossConfig()).metrics()
    assert numbers["kl_sampler"] == pytest.approx(2**-25, rel=1e-3)
    assert numbers["logprob_gap_mean"] == pytest.approx(2**-12)
