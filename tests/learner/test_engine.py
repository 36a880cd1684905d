"""The DeepSpeed trainer against plain PyTorch written here from the formulae, on 1 and 2 ranks.

The reference runs each completion alone, without padding, in float64, and knows nothing of
packing, ranks or ZeRO. Gradients are read off a step of plain SGD with a learning rate so large
that the step dwarfs the weights, so that w₀ − w₁ loses no digits.
"""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.trainer import StepResult
from protocol.arrays import pack_float32, unpack_float32
from protocol.config import Config
from protocol.messages import Completion, RewardGroup
from protocol.versions import Version
from tests.learner.tiny import ids_of, make_config, make_group, make_model, uneven_groups
from tests.learner.tiny import quiet_environment as environment

REPOSITORY = Path(__file__).parents[2]
STEP = Version(0, 0)
STAGES = (0, 1, 2, 3)
RANKS = (1, 2)
BIG = 1e4
ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}}
GRADIENT_CASES: dict[str, dict[str, Any]] = {
    "token": {},
    "sequence": {"denominator": "sequence", "truncated": "mask"},
    "constant": {"denominator": "constant", "advantage": "std", "importance_cap": 1.2},
}
SGD_CASES: dict[str, dict[str, Any]] = {
    "two_updates": {"updates_per_step": 2, "clip_low": 0.05, "clip_high": 0.1},
    "kl": {"kl": 0.5},
}
Step = tuple[Version, list[RewardGroup], bool]
"""Version, groups, and whether the gradient is made NaN on the last rank."""


def one_in_the_loss() -> list[RewardGroup]:
    """A batch of one group with one completion left in the loss: fewer than there are ranks."""
    return [make_group(9, [1.0, 0.0], [4, 6], prompt_length=4, truncated=(1,))]


def overflowing() -> list[RewardGroup]:
    """A batch whose loss leaves float32 in one completion alone."""
    return [*uneven_groups(), make_group(8, [1e300, 0.0], [3, 5], prompt_length=3)]


def on_policy(model: Path, temperature: float) -> list[RewardGroup]:
    """Groups whose sampler log-probs are those of the model itself, computed one by one."""
    net = AutoModelForCausalLM.from_pretrained(model).double()
    groups = []
    for n in (4, 5, 6):
        group = make_group(
            n, [1.0, 0.0, 0.0, 1.0], [n, 9, 1, 3], prompt_length=n, temperature=temperature
        )
        completions = [
            Completion(
                tokens=c.tokens,
                logprobs=pack_float32(completion_logprobs(net, group, c).tolist()),
                spans=c.spans,
                finish=c.finish,
                reward=c.reward,
                correct=c.correct,
            )
            for c in group.completions
        ]
        fields = {name: getattr(group, name) for name in group.__struct_fields__}
        groups.append(RewardGroup(**{**fields, "completions": completions}))
    return groups


@dataclass
class Case:
    config: Callable[[int], Config]
    steps: list[Step]


def cases(model: Path) -> dict[str, Case]:
    def sgd(rate: float, loss: dict[str, Any], steps: Sequence[list[RewardGroup]]) -> Case:
        learner = {
            "deepspeed": {
                "optimizer": {"type": "SGD", "params": {"lr": rate}},
                "gradient_clipping": 0,
            },
            "loss": loss,
        }
        return Case(
            lambda ranks: configure(model, ranks, learner), [(STEP, g, False) for g in steps]
        )

    def adam(
        stage: int,
        steps: Sequence[list[RewardGroup]],
        more: dict[str, Any] | None = None,
        dtype: str = "float32",
        **learner: Any,
    ) -> Case:
        settings = {
            "deepspeed": {
                "optimizer": ADAM,
                "zero_optimization": {"stage": stage},
                "gradient_clipping": 0.5,
                **(more or {}),
            },
            **learner,
        }
        return Case(
            lambda ranks: configure(model, ranks, settings, dtype),
            [(STEP, g, False) for g in steps],
        )

    uneven = uneven_groups()
    found = {name: sgd(BIG, loss, [uneven]) for name, loss in GRADIENT_CASES.items()}
    found |= {name: sgd(0.3, loss, [uneven, uneven]) for name, loss in SGD_CASES.items()}
    found["one"] = sgd(BIG, {"truncated": "mask"}, [one_in_the_loss()])
    found["small_micro_batches"] = adam(0, [uneven] * 3, micro_batch_tokens=24)
    found["recomputed"] = adam(0, [uneven] * 3, {"activation_checkpointing": {}})
    found["bfloat16"] = adam(2, [uneven] * 3, dtype="bfloat16")
    found["warm_up"] = adam(1, [uneven] * 3, warmup_steps=4)
    halving = {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}
    found["schedule"] = adam(0, [uneven] * 3, {"scheduler": halving}, warmup_steps=4)
    for temperature in (1.0, 0.7):
        found[f"on_policy_{temperature}"] = adam(0, [on_policy(model, temperature)])
    for stage in STAGES:
        found[f"adam_{stage}"] = adam(stage, [uneven] * 3)
        skipping = found[f"skip_{stage}"] = adam(stage, [overflowing(), *[uneven] * 4])
        skipping.steps[2] = (STEP, uneven, True)
    return found


def configure(model: Path, ranks: int, learner: dict[str, Any], dtype: str = "float32") -> Config:
    return make_config(
        model,
        dtype=dtype,
        learner={"ranks": ranks, **learner},
        rollout={"group_size": 4, "max_tokens": 12, "max_prompt_tokens": 12},
    )


class Runs:
    """What the trainer made of every case on 1 and on 2 ranks."""

    def __init__(self, directory: Path) -> None:
        self.model = make_model(directory / "model")
        self.cases = cases(self.model)
        self.directory = directory
        for ranks in RANKS:
            place = directory / str(ranks)
            place.mkdir()
            content = [(n, c.config(ranks), c.steps) for n, c in self.cases.items()]
            (place / "cases.pickle").write_bytes(pickle.dumps(content))
            launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            command = [sys.executable, *(launch if ranks > 1 else [])]
            command += ["-m", "tests.learner.worker", str(place), str(ranks)]
            done = subprocess.run(
                command, cwd=REPOSITORY, env=environment(), capture_output=True, timeout=300
            )
            assert done.returncode == 0, done.stderr.decode()[-4000:]

    def weights(self, case: str, ranks: int) -> dict[str, torch.Tensor]:
        return load(self.directory / str(ranks) / case)

    def results(self, case: str, ranks: int) -> list[StepResult]:
        content: list[StepResult] = pickle.loads(
            (self.directory / str(ranks) / f"{case}.pickle").read_bytes()
        )
        return content


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    # Threads only get in each other's way where every tensor is tiny.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Runs(tmp_path_factory.mktemp("engine"))
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def after_adam(runs: Runs) -> dict[str, torch.Tensor]:
    """Weights after three steps of plain torch AdamW; no stage of ZeRO has a say in them."""
    case = runs.cases["adam_0"]
    reference = Reference(runs.model, case.config(1))
    optimizer = torch.optim.AdamW(
        reference.net.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1
    )
    reference.train(optimizer, case.steps, clip=0.5)
    return dict(reference.net.state_dict())


def load(directory: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(directory).state_dict())


def completion_logprobs(
    net: torch.nn.Module, group: RewardGroup, completion: Completion
) -> torch.Tensor:
    """log p(token | before) of a completion, tempered: one sequence, no padding."""
    prompt, tokens = ids_of(group.prompt_tokens), ids_of(completion.tokens)
    ids = torch.tensor([prompt + tokens])
    logits = net(input_ids=ids, use_cache=False).logits[0]
    log_softmax = torch.log_softmax(logits / group.temperature, dim=-1)
    return torch.stack([log_softmax[len(prompt) + t - 1, token] for t, token in enumerate(tokens)])


class Reference:
    """GRPO from the formulae, completion by completion, in float64."""

    def __init__(self, model: Path, config: Config) -> None:
        self.net = AutoModelForCausalLM.from_pretrained(model).double()
        self.first = AutoModelForCausalLM.from_pretrained(model).double()
        self.config = config
        self.old: dict[tuple[str, int], torch.Tensor] = {}

    def loss(self, groups: list[RewardGroup]) -> torch.Tensor:
        """The loss of one update; `self.old` is filled where it is empty."""
        c = self.config.learner.loss
        chosen = []
        for group in groups:
            graded = [x.reward for x in group.completions if x.reward is not None]
            mean = sum(graded) / len(graded)
            std = math.sqrt(sum((r - mean) ** 2 for r in graded) / len(graded))
            for i, x in enumerate(group.completions):
                if x.reward is None or (c.truncated == "mask" and x.finish == "length"):
                    continue
                a = x.reward - mean
                chosen.append((group, i, x, a / std if c.advantage == "std" else a))
        tokens = sum(x.length for _, _, x, _ in chosen)
        groups_in = len({group.id for group, _, _, _ in chosen})
        prompts = self.config.run.prompts_per_step
        loss = torch.zeros((), dtype=torch.float64)
        for group, i, x, a in chosen:
            new = completion_logprobs(self.net, group, x)
            old = self.old.setdefault((group.id, i), new.detach())
            mu = torch.tensor(list(unpack_float32(x.logprobs)), dtype=torch.float64)
            weight = torch.minimum(torch.exp(old - mu), torch.tensor(c.importance_cap))
            ratio = torch.exp(new - old)
            bounded = torch.clip(ratio, 1 - c.clip_low, 1 + c.clip_high)
            gain = torch.minimum(ratio * a, bounded * a)
            if c.kl:
                with torch.no_grad():
                    ref = completion_logprobs(self.first, group, x)
                gain = gain - c.kl * (torch.exp(ref - new) - (ref - new) - 1)
            denominator = {
                "token": tokens * prompts / groups_in,
                "sequence": x.length * len(chosen) * prompts / groups_in,
                "constant": prompts * self.config.rollout.group_size * 12,
            }[c.denominator]
            loss = loss - (weight * gain).sum() / denominator
        return loss

    def train(self, optimizer: torch.optim.Optimizer, steps: list[Step], clip: float = 0) -> None:
        for _, groups, _ in steps:
            self.old = {}
            for _ in range(self.config.learner.loss.updates_per_step):
                optimizer.zero_grad()
                self.loss(groups).backward()
                if clip:
                    torch.nn.utils.clip_grad_norm_(self.net.parameters(), clip)
                optimizer.step()


def assert_close(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], relative: float
) -> None:
    """Every tensor is within `relative` of the expected one, in the 2-norm."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = (found[name].double() - value.double()).norm() / value.double().norm()
        assert error < relative, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", [*GRADIENT_CASES, "one"])
def test_loss_and_gradient_equal_plain_pytorch(runs: Runs, name: str, ranks: int) -> None:
    case = runs.cases[name]
    reference = Reference(runs.model, case.config(ranks))
    loss = reference.loss(case.steps[0][1])
    loss.backward()
    (result,) = runs.results(name, ranks)
    assert result.skipped is None
    assert result.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    before, after = load(runs.model), runs.weights(name, ranks)
    found = {n: (before[n].double() - after[n].double()) / BIG for n in before}
    expected = {n: p.grad for n, p in reference.net.named_parameters() if p.grad is not None}
    assert_close(found, expected, 1e-5)
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
    assert result.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", [*SGD_CASES])
def test_further_updates_and_kl_equal_plain_pytorch(runs: Runs, name: str, ranks: int) -> None:
    case = runs.cases[name]
    reference = Reference(runs.model, case.config(ranks))
    reference.train(torch.optim.SGD(reference.net.parameters(), lr=0.3), case.steps)
    before, after = load(runs.model), runs.weights(name, ranks)
    moved = {n: after[n].double() - before[n].double() for n in before}
    expected = {n: v - before[n].double() for n, v in reference.net.state_dict().items()}
    # Each step rounds the weights to float32, about 1e-7 of them and 1e-5 of how far they move.
    assert_close(moved, expected, 1e-4)
    if name == "two_updates":
        assert all(result.metrics["clip_share"] > 0 for result in runs.results(name, ranks))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", STAGES)
def test_three_adam_steps_equal_plain_torch_at_every_zero_stage(
    runs: Runs, after_adam: dict[str, torch.Tensor], stage: int, ranks: int
) -> None:
    after = runs.weights(f"adam_{stage}", ranks)
    for name, value in after_adam.items():
        assert torch.allclose(after[name].double(), value, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("other", ["small_micro_batches", "recomputed"])
def test_the_result_depends_on_neither_packing_nor_recomputation(
    runs: Runs, other: str, ranks: int
) -> None:
    expected, found = (runs.weights(name, ranks) for name in ("adam_0", other))
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("ranks", RANKS)
def test_the_models_precision_is_trained_and_published(runs: Runs, ranks: int) -> None:
    weights = runs.weights("bfloat16", ranks)
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    for in_half, in_single in zip(
        runs.results("bfloat16", ranks), runs.results("adam_2", ranks), strict=True
    ):
        # 8 bits of mantissa; the log-probs of 67 tokens enter the loss.
        assert in_half.metrics["loss"] == pytest.approx(in_single.metrics["loss"], abs=0.02)


def test_one_and_two_ranks_report_the_same_numbers(runs: Runs) -> None:
    for name in runs.cases.keys() - {"bfloat16"}:
        one, two = runs.results(name, 1), runs.results(name, 2)
        for a, b in zip(one, two, strict=True):
            assert a.skipped == b.skipped
            assert a.metrics.keys() == b.metrics.keys()
            if a.skipped is None:
                assert a.metrics == pytest.approx(b.metrics, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_on_policy_nothing_is_clipped_and_every_weight_is_one(
    runs: Runs, temperature: float, ranks: int
) -> None:
    (result,) = runs.results(f"on_policy_{temperature}", ranks)
    assert result.metrics["clip_share"] == 0
    assert result.metrics["weight_max_deviation"] < 1e-4
    assert result.metrics["weight_truncated_share"] == 0
    assert result.metrics["logprob_gap_mean"] < 1e-5


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_is_not_finite_changes_nothing_on_any_rank(
    runs: Runs, stage: int, ranks: int
) -> None:
    results = runs.results(f"skip_{stage}", ranks)
    assert [r.skipped for r in results] == [
        "the loss is not finite",
        None,
        "the gradient is not finite",
        None,
        None,
    ]
    assert all(math.isfinite(v) for r in results for v in r.metrics.values())
    kept, clean = runs.weights(f"skip_{stage}", ranks), runs.weights(f"adam_{stage}", ranks)
    for name, value in clean.items():
        assert torch.allclose(kept[name], value, rtol=1e-6, atol=1e-7), name


@pytest.mark.parametrize("ranks", RANKS)
def test_the_learning_rate_rises_over_the_warm_up(runs: Runs, ranks: int) -> None:
    rates = [r.metrics["lr"] for r in runs.results("warm_up", ranks)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3])


@pytest.mark.parametrize("ranks", RANKS)
def test_the_warm_up_multiplies_the_schedule_and_does_not_feed_back_into_it(
    runs: Runs, ranks: int
) -> None:
    rates = [r.metrics["lr"] for r in runs.results("schedule", ranks)]
    assert rates == pytest.approx([1e-3 * 1 / 4, 0.5e-3 * 2 / 4, 0.25e-3 * 3 / 4])
