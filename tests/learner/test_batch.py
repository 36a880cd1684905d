"""Assembly and packing: what enters the loss, and how it is laid out over ranks and micro-steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.batch import Rollout, assemble, collate, pack
from protocol.config import Config
from protocol.messages import Completion, RewardGroup
from protocol.versions import Span, Version
from tests.learner.tiny import ids_of, make_config, make_group, uneven_groups

STEP = Version(0, 0)


def config(**loss: object) -> Config:
    return make_config(Path("unused"), learner={"loss": loss})


def rollout(length: int, prompt: int = 1) -> Rollout:
    return Rollout(
        np.arange(length, dtype=np.int64), prompt, np.zeros(length - prompt, np.float32), 0, 1, 1
    )


def test_a_rollout_is_its_prompt_and_completion_as_they_were_sampled() -> None:
    groups = uneven_groups()
    rollouts = assemble(groups, STEP, config()).rollouts
    sampled = [(g, c) for g in groups for c in g.completions if c.reward is not None]
    assert len(rollouts) == len(sampled) == 11
    for r, (g, c) in zip(rollouts, sampled, strict=True):
        assert r.tokens.tolist() == ids_of(g.prompt_tokens) + ids_of(c.tokens)
        assert r.prompt_length == len(ids_of(g.prompt_tokens))
        assert r.sampler.tobytes() == c.logprobs
        assert r.temperature == g.temperature


def test_truncated_completions_are_masked_from_the_loss_and_kept_in_the_baseline() -> None:
    group = make_group(1, [1.0, 0.0, 0.0, 0.0], [3, 3, 5, 2], prompt_length=2, truncated=(2,))
    train = assemble([group], STEP, config(truncated="train"))
    mask = assemble([group], STEP, config(truncated="mask"))
    assert [r.advantage for r in train.rollouts] == [0.75, -0.25, -0.25, -0.25]
    assert [r.advantage for r in mask.rollouts] == [0.75, -0.25, -0.25]
    # One group of three: 1 / (tokens · 3/1).
    assert train.rollouts[0].scale == pytest.approx(1 / (13 * 3))
    assert mask.rollouts[0].scale == pytest.approx(1 / (8 * 3))


def test_numbers_of_the_groups() -> None:
    groups = [
        make_group(1, [1.0, 0.0, 0.0, 1.0], [1, 9, 4, 2], prompt_length=3, reason="explore"),
        make_group(
            2,
            [1.0, None, 1.0, 0.0],
            [12, 3, 7, 5],
            prompt_length=9,
            truncated=(0,),
            version=Version(0, 3),
        ),
    ]
    metrics = assemble(groups, Version(0, 5), config()).metrics
    lengths = [1, 9, 4, 2, 12, 3, 7, 5]
    assert metrics["length_mean"] == pytest.approx(np.mean(lengths))
    assert metrics["length_p95"] == pytest.approx(np.percentile(lengths, 95))
    assert metrics["truncated_share"] == 1 / 8
    assert metrics["reward_mean"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert metrics["reward_explored_mean"] == pytest.approx(1 / 2)
    assert metrics["mean_abs_advantage"] == pytest.approx((4 * 0.5 + 2 / 3 + 1 / 3 + 1 / 3) / 7)
    assert metrics["prompt_tokens"] == 4 * 3 + 3 * 9
    assert metrics["staleness_mean"] == (5 + 2) / 2
    assert metrics["impure_trained"] == 2


def test_a_group_of_exactly_the_steps_version_is_pure_and_one_that_mixes_is_not() -> None:
    pure = make_group(1, [1.0, 0.0], [4, 4], prompt_length=2, version=Version(0, 5))
    first, second = pure.completions
    mixed_spans = [Span(Version(0, 4), 0, 1), Span(Version(0, 5), 1, 4)]
    mixed = RewardGroup(
        **{
            **{name: getattr(pure, name) for name in pure.__struct_fields__},
            "completions": [
                first,
                Completion(
                    tokens=second.tokens,
                    logprobs=second.logprobs,
                    spans=mixed_spans,
                    finish="stop",
                    reward=0.0,
                    correct=0.0,
                ),
            ],
        }
    )
    metrics = assemble([pure, mixed], Version(0, 5), config()).metrics
    assert metrics["impure_trained"] == 1
    assert metrics["staleness_mean"] == 0.5


@given(
    lengths=st.lists(st.integers(2, 40), max_size=60),
    ranks=st.integers(1, 5),
    bound=st.integers(40, 200),
)
def test_every_rollout_lies_in_one_micro_batch_within_the_bound_and_ranks_step_alike(
    lengths: list[int], ranks: int, bound: int
) -> None:
    rollouts = [rollout(n) for n in lengths]
    plan = pack(rollouts, ranks, bound)
    assert len(plan) == ranks
    assert len({len(steps) for steps in plan}) == 1
    assert len(plan[0]) >= 1
    placed = [r for steps in plan for micro in steps for r in micro]
    assert sorted(map(id, placed)) == sorted(map(id, rollouts))
    for steps in plan:
        for micro in steps:
            assert len(micro) * max((len(r.tokens) for r in micro), default=0) <= bound
    assert plan == pack(rollouts, ranks, bound)
    if len(rollouts) >= ranks:
        assert all(any(steps) for steps in plan)


def test_a_rollout_longer_than_a_micro_batch_names_the_field() -> None:
    with pytest.raises(ValueError, match=r"learner\.micro_batch_tokens: 10 .* 11 tokens"):
        pack([rollout(11)], 1, 10)


def test_collated_rows_are_padded_on_the_right_and_flattened_in_order() -> None:
    rollouts = assemble(uneven_groups(), STEP, config()).rollouts[:3]
    micro = collate(rollouts)
    width = max(len(r.tokens) for r in rollouts)
    assert micro.ids.shape == (3, width)
    assert micro.first == 3 - 1
    flat = [int(t) for r in rollouts for t in r.tokens[r.prompt_length :]]
    assert micro.targets.tolist() == flat
    assert micro.ids[micro.in_loss].tolist() == flat
    for row, r in enumerate(rollouts):
        assert micro.ids[row, : len(r.tokens)].tolist() == r.tokens.tolist()
        assert not micro.in_loss[row, len(r.tokens) :].any()
    assert micro.advantage.tolist() == pytest.approx(
        [r.advantage for r in rollouts for _ in r.sampler]
    )


def test_an_empty_micro_batch_holds_no_token_of_the_loss() -> None:
    micro = collate([])
    assert micro.ids.numel() > 0
    assert not micro.in_loss.any()
    assert micro.targets.numel() == micro.scale.numel() == 0
