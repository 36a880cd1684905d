"""The real trainer: GRPO on a DeepSpeed engine with any ZeRO stage, on one or many ranks.

Invariants: the gradient is that of the one global loss of `learner.loss`, whatever the packing and
the number of ranks; a step whose loss or gradient is not finite changes no weight on any rank; the
model runs without dropout, so its log-probs are those of the distribution that is sampled.

DeepSpeed averages gradients over ranks and, by its own count, over micro-steps. Here the loss
carries the global denominator, so it is multiplied by the number of ranks, DeepSpeed's count of
micro-steps is 1, and the last micro-step of an update is marked explicitly.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.config import DeepSpeedConfigError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from learner.batch import Batch, MicroBatch, collate, pack
from learner.deepspeed_config import deepspeed_config
from learner.loss import TokenSums, grpo, token_logprobs, token_sums
from learner.ranks import Ranks
from learner.trainer import StepResult
from protocol.config import HUB, Config, ConfigError

log = logging.getLogger(__name__)

MAX_SHARD = "5GB"


def load_model(config: Config, dtype: torch.dtype) -> PreTrainedModel:
    """The model at `model.path`, without dropout. Raises ConfigError if it cannot be read."""
    model: PreTrainedModel = _read(
        AutoModelForCausalLM, config, dtype=dtype, attn_implementation="sdpa"
    )
    model.eval()
    return model


def _read(kind: Any, config: Config, **options: Any) -> Any:
    path = config.model.path
    if not path.startswith(HUB) and not Path(path).is_dir():
        raise ConfigError(f"model.path: {path}: no such directory")
    try:
        return kind.from_pretrained(
            path.removeprefix(HUB), trust_remote_code=config.model.trust_remote_code, **options
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path}: cannot be loaded: {error}") from error


class DeepSpeedTrainer:
    """`learner.trainer.Trainer` on DeepSpeed."""

    def __init__(
        self, config: Config, ranks: Ranks, progress: Callable[[], None] = lambda: None
    ) -> None:
        """Load the model and wrap it; `progress` is called after every micro-step.

        Raises ConfigError: the DeepSpeed config contradicts the run or is none, or the model
        cannot be read.
        """
        self._config = config
        self._ranks = ranks
        self._progress = progress
        self._steps = 0
        settings = deepspeed_config(config, on_cpu=ranks.device.type == "cpu")
        torch.manual_seed(config.run.seed)
        if config.learner.threads is not None:
            torch.set_num_threads(config.learner.threads)
        dtype = _training_dtype(settings)
        self._tokenizer = _read(AutoTokenizer, config)
        model = load_model(config, dtype)
        if "activation_checkpointing" in settings:
            _checkpoint_activations(model)
        self._engine, self._schedule = _initialize(model, settings)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._reference: PreTrainedModel | None = None
        if config.learner.loss.kl > 0:
            self._reference = load_model(config, dtype).to(ranks.device).requires_grad_(False)

    def step(self, batch: Batch) -> StepResult:
        """`updates_per_step` updates on `batch`, the same on every rank. Collective.

        Metrics are means over the updates; `old` is this model before the first of them.
        """
        if not batch.rollouts:
            return StepResult("no completion of the batch enters the loss", dict(batch.metrics))
        plan = pack(batch.rollouts, self._ranks.size, self._config.learner.micro_batch_tokens)
        micros = [collate(part, self._ranks.device) for part in plan[self._ranks.rank]]
        reference = self._reference_logprobs(micros)
        old: list[Tensor] = []
        updates: list[dict[str, float]] = []
        skipped = None
        for _ in range(self._config.learner.loss.updates_per_step):
            sums = self._accumulate(micros, old, reference)
            numbers = sums.metrics()
            skipped = self._apply(sums, numbers)
            updates.append(numbers)
            if skipped:
                break
        if len(updates) > 1:
            # A step whose first update changed the weights is done, whatever became of later ones.
            skipped = None
        self._steps += skipped is None
        return StepResult(skipped, {**batch.metrics, **_means(updates)})

    def _accumulate(
        self, micros: list[MicroBatch], old: list[Tensor], reference: list[Tensor | None]
    ) -> TokenSums:
        """Forward and backward of every micro-step; returns the sums over all ranks.

        `old` is filled in the first update and read in later ones.
        """
        loss_config = self._config.learner.loss
        sums = TokenSums()
        total = sums
        first_update = not old
        for i, micro in enumerate(micros):
            last = i == len(micros) - 1
            self._engine.set_gradient_accumulation_boundary(last)
            new, entropy = self._logprobs(self._engine, micro)
            if first_update:
                old.append(new.detach())
            tokens = (new, old[i], micro.sampler, micro.advantage)
            loss = grpo(*tokens, micro.scale, loss_config, reference[i])
            sums.add(token_sums(loss, *tokens, entropy, loss_config))
            if last:
                total = self._ranks.total(sums)
                if not math.isfinite(total.loss):
                    # A loss that is not finite on one rank must undo the step on all of them.
                    loss = loss * math.nan
            self._engine.backward(loss * self._ranks.size)
            self._progress()
        return total

    def _logprobs(self, model: nn.Module, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """[N] log-probs and [N] entropies of the tokens in the loss, under the tempered softmax."""
        keep = micro.ids.shape[1] - micro.first
        arguments: dict[str, Any] = {"input_ids": micro.ids, "use_cache": False}
        if self._keeps_logits:
            arguments["logits_to_keep"] = keep
        logits = model(**arguments).logits[:, -keep:]
        # The logits at one position are of the token at the next.
        chosen = logits[:, :-1][micro.in_loss[:, micro.first + 1 :]]
        return token_logprobs(chosen, micro.targets, micro.temperature)

    @torch.no_grad()
    def _reference_logprobs(self, micros: list[MicroBatch]) -> list[Tensor | None]:
        if self._reference is None:
            return [None for _ in micros]
        return [self._logprobs(self._reference, micro)[0] for micro in micros]

    def _apply(self, sums: TokenSums, numbers: dict[str, float]) -> str | None:
        """One optimizer update. Adds `lr` and `grad_norm`; returns why it was skipped, if so."""
        engine = self._engine
        groups = engine.optimizer.param_groups
        scheduled = [group["lr"] for group in groups]
        rise = min(1.0, (self._steps + 1) / max(1, self._config.learner.warmup_steps))
        for group, rate in zip(groups, scheduled, strict=True):
            group["lr"] = rate * rise
        numbers["lr"] = groups[0]["lr"]
        applied, norm = self._engine_step()
        for group, rate in zip(groups, scheduled, strict=True):
            group["lr"] = rate
        if norm is not None:
            numbers["grad_norm"] = norm
        if applied:
            if self._schedule is not None:
                self._schedule.step()
            return None
        what = "gradient" if math.isfinite(sums.loss) else "loss"
        return f"the {what} is not finite"

    def _engine_step(self) -> tuple[bool, float | None]:
        """Whether DeepSpeed changed the weights, and the gradient's norm before clipping."""
        engine = self._engine
        optimizer = engine.optimizer
        if hasattr(optimizer, "overflow"):
            # The unfused half-precision wrapper of stage 0 reports the norm of the scaled loss.
            scaled = type(optimizer).__name__ == "FP16_UnfusedOptimizer"
            scale = float(optimizer.loss_scale_config.cur_scale) if scaled else 1.0
            engine.step()
            norm = engine.get_global_grad_norm()
            return bool(engine.was_step_applied()), None if norm is None else float(norm) / scale
        # Stage 0 in float32: a plain torch optimizer, which would take a step whatever the norm.
        grads = [p.grad for p in engine.module.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(grads))
        if not math.isfinite(norm):
            engine.zero_grad()
            return False, norm
        engine.step()
        return True, norm

    def save(self, directory: Path) -> None:
        """Rank 0 writes the model in Hugging Face layout, in `model.dtype`. Collective."""
        dtype = getattr(torch, self._config.model.dtype)
        module = self._engine.module
        state = {}
        for name, parameter in module.named_parameters():
            with _gathered(parameter):
                if self._ranks.leads:
                    state[name] = parameter.detach().to("cpu", dtype, copy=True)
        if not self._ranks.leads:
            return
        for name, buffer in _persistent_buffers(module):
            state[name] = buffer.detach().cpu().clone()
        module.save_pretrained(directory, state_dict=state, max_shard_size=MAX_SHARD)
        self._tokenizer.save_pretrained(directory)
        described = directory / "config.json"
        content = json.loads(described.read_text(encoding="utf-8"))
        if content.get("dtype") != self._config.model.dtype:
            content["dtype"] = self._config.model.dtype
            described.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _initialize(model: PreTrainedModel, settings: dict[str, Any]) -> tuple[Any, Any]:
    """The DeepSpeed engine around `model`, and its schedule, which the engine no longer steps: the
    warm-up multiplies what the schedule says."""
    if not torch.cuda.is_available():
        # DeepSpeed would compile an operator for inference, a minute that training never uses.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    try:
        engine, _, _, schedule = deepspeed.initialize(
            model=model,
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            config=settings,
            dist_init_required=False,
        )
    except (ValueError, TypeError, AssertionError, DeepSpeedConfigError) as error:
        raise ConfigError(f"learner.deepspeed: refused by DeepSpeed: {error}") from error
    engine.lr_scheduler = None
    return engine, schedule


def _training_dtype(settings: dict[str, Any]) -> torch.dtype:
    for keys, dtype in ((("bf16", "bfloat16"), torch.bfloat16), (("fp16",), torch.float16)):
        if any((settings.get(key) or {}).get("enabled") for key in keys):
            return dtype
    return torch.float32


def _checkpoint_activations(model: PreTrainedModel) -> None:
    """Recompute activations in the backward pass. The model then thinks that it trains, which
    would switch dropout on; a model that has any is refused."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ConfigError(
                f"learner.deepspeed.activation_checkpointing: {name} has dropout {module.p}; "
                "set it to 0 in the model's config.json"
            )
    for name, value in vars(model.config).items():
        if "dropout" in name and isinstance(value, float) and value > 0:
            raise ConfigError(
                f"learner.deepspeed.activation_checkpointing: the model's {name} is {value}; "
                "set it to 0 in the model's config.json"
            )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()


def _gathered(parameter: nn.Parameter) -> AbstractContextManager[Any]:
    """The whole of a parameter that ZeRO-3 has spread over the ranks."""
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters([parameter])
    return context


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    saved = set(module.state_dict().keys())
    return ((name, buffer) for name, buffer in module.named_buffers() if name in saved)


def _means(updates: list[dict[str, float]]) -> dict[str, float]:
    """Mean of each number over the updates that have it, where it is finite."""
    means = {}
    for name in updates[0]:
        values = [u[name] for u in updates if name in u and math.isfinite(u[name])]
        if values:
            means[name] = sum(values) / len(values)
    return means
