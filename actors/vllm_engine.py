"""vLLM as the engine: `AsyncLLM`, whose processes are children of the actor.

Invariant: what is sampled is the tempered softmax and nothing else (no top-p, top-k, min-p,
penalties, nor the model's generation_config), and log-probs are of exactly that distribution. A
setting that would change it is refused with its field named.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import multiprocessing
import os
import zlib
from pathlib import Path
from typing import Any

from actors.engine import (
    Engine,
    EngineDead,
    LoadFailed,
    PromptError,
    Request,
    RequestError,
    Sampled,
)
from actors.prompts import PromptEncoder
from protocol.config import HUB, Config, ConfigError
from protocol.messages import Prompt
from protocol.versions import Span, Version

log = logging.getLogger(__name__)

GIB = 2**30
STOP_SECONDS = 1.0
MAX_TEMPERATURE = 2.0
# Of AsyncEngineArgs: ours to set, with the field of our config that does.
OURS = {
    "model": "model.path",
    "tokenizer": "model.path",
    "model_weights": "model.path",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "seed": "run.seed",
    "max_model_len": "rollout.max_prompt_tokens and rollout.max_tokens",
    "worker_extension_cls": "nothing",
    "disable_log_stats": "nothing",
    "skip_tokenizer_init": "nothing",
    "stream_interval": "nothing",
}
# These make the engine sample from, or report, another distribution than the learner computes.
CHANGES_DISTRIBUTION = (
    "generation_config",
    "override_generation_config",
    "logprobs_mode",
    "logits_processors",
    "speculative_config",
    "spec_method",
    "spec_model",
    "spec_tokens",
    "quantization",
    "quantization_config",
    "hf_overrides",
    "model_class_overrides",
    "kv_cache_dtype",
    "load_format",
    "enable_lora",
    "default_mm_loras",
    "reasoning_config",
    "diffusion_config",
    "watermark_config",
    "scheduler_cls",
    "worker_cls",
)


class VllmEngine(Engine):
    """One AsyncLLM. All methods run on the loop that ran `start`."""

    async def start(self) -> None:
        set_environment(self.config)
        args = await asyncio.to_thread(engine_args, self.config, self.name)
        from vllm.v1.engine.async_llm import AsyncLLM  # imported by the line above

        self._counter = _TokenCounter()
        log.info("starting vLLM on %s", self.config.model.path)
        # In a thread: a start takes minutes for a large model, and the main loop must answer.
        self._llm = await asyncio.to_thread(
            AsyncLLM.from_engine_args, args, stat_loggers=[self._counter.logger]
        )
        await self._llm.collective_rpc("die_with_actor", args=(os.getpid(),))
        tokenizer: Any = self._llm.get_tokenizer()
        if getattr(tokenizer, "clean_up_tokenization_spaces", False):
            # Graders see what was sampled, not a tidier text.
            tokenizer.clean_up_tokenization_spaces = False
        self._tokenizer = tokenizer
        self._context = self._llm.model_config.max_model_len
        self._encoder = PromptEncoder(
            self._tokenizer, self.config.model, self.config.rollout.max_prompt_tokens
        )
        self._end_tokens = sorted(self._find_end_tokens())
        if not self._end_tokens:
            raise ConfigError(
                f"model.path: {self.config.model.path}: neither the tokenizer nor "
                "generation_config.json names an end token (eos)"
            )

    def encode(self, prompt: Prompt, max_tokens: int) -> list[int]:
        room = self._context - max_tokens
        if room < 1:
            raise PromptError(
                f"the task's max_tokens is {max_tokens}; the model's context is {self._context}"
            )
        return self._encoder.encode(prompt, room)

    async def generate(self, request: Request) -> list[Sampled]:
        from vllm.exceptions import VLLMValidationError
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            stream = self._llm.generate(
                {"type": "token", "prompt_token_ids": list(request.prompt_tokens)},
                self._sampling(request),
                request.id,
            )
            (output,) = [output async for output in stream]
        except EngineDeadError as error:
            raise EngineDead(f"vLLM: {error}") from None
        except (VLLMValidationError, ValueError) as error:
            raise RequestError(f"vLLM refuses the request: {error}") from None
        except Exception as error:
            if self._llm.errored:
                raise EngineDead(f"vLLM: {error!r}") from None
            raise RequestError(f"vLLM: {error!r}: {error.__cause__!r}") from None
        completions = [self._sampled(c, request) for c in output.outputs]
        # Greedy completions of one prompt are one completion; vLLM refuses n > 1 there.
        return completions * request.n if request.temperature == 0 else completions

    async def load(self, path: Path, version: Version) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            # Frozen requests are computed anew on resume, with the new weights, from no cache.
            await self._llm.pause_generation(mode="keep", clear_cache=True)
            await self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
            await self._llm.update_weight_version(str(version))
            await self._llm.resume_generation()
        except EngineDeadError as error:
            raise EngineDead(f"vLLM, loading {path}: {error}") from None
        except Exception as error:
            why = f"vLLM cannot load {path}: {error!r}"
            try:
                await self._llm.collective_rpc("end_reload")
            except Exception as another:
                raise EngineDead(f"{why}, and then: {another!r}") from None
            # Some weights may be new and some old: it stays paused.
            raise LoadFailed(why) from None

    @property
    def tokens(self) -> int:
        return self._counter.tokens

    @property
    def dead(self) -> bool:
        return hasattr(self, "_llm") and bool(self._llm.errored)

    async def stop(self) -> None:
        if hasattr(self, "_llm"):
            # What follows is wanted, and vLLM calls it errors.
            logging.getLogger("vllm").setLevel(logging.CRITICAL)
            await asyncio.to_thread(self._llm.shutdown, STOP_SECONDS)
        # An engine that is still starting has no handle yet.
        for child in multiprocessing.active_children():
            child.kill()

    def _sampling(self, request: Request) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        stop = self.config.rollout.stop
        return SamplingParams(
            n=1 if request.temperature == 0 else request.n,
            temperature=request.temperature,
            max_tokens=request.max_tokens,
            seed=request.seed,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            logprobs=0 if request.logprobs else None,
            flat_logprobs=True,
            stop=stop or None,
            stop_token_ids=self._end_tokens,
            detokenize=bool(stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _sampled(self, completion: Any, request: Request) -> Sampled:
        if completion.finish_reason not in ("stop", "length"):
            raise RequestError(f"vLLM ended the request: {completion.finish_reason}")
        tokens = list(completion.token_ids)
        logprobs = completion.logprobs.logprobs if request.logprobs else []
        if request.logprobs and len(logprobs) != len(tokens):
            raise RequestError(f"vLLM gave {len(logprobs)} log-probs for {len(tokens)} tokens")
        spans = [
            Span(Version.parse(span.version), span.start, span.end)
            for span in completion.weight_versions or []
        ]
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return Sampled(tokens, logprobs, spans, text, completion.finish_reason)

    def _find_end_tokens(self) -> set[int]:
        """The tokenizer's end token, and those of generation_config.json: chat models have more."""
        found = self._llm.model_config.try_get_generation_config().get("eos_token_id")
        ends = {found} if isinstance(found, int) else set(found or ())
        if self._tokenizer.eos_token_id is not None:
            ends.add(self._tokenizer.eos_token_id)
        return ends


class _TokenCounter:
    """Counts sampled tokens as vLLM reports them after each of its steps."""

    def __init__(self) -> None:
        self.tokens = 0

    def logger(self, vllm_config: Any, engine_index: int = 0) -> Any:
        """A StatLoggerBase that counts here."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        counter = self

        class Logger(StatLoggerBase):
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                pass

            def record(
                self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any
            ) -> None:
                if iteration_stats is not None:
                    counter.tokens += iteration_stats.num_generation_tokens

            def log_engine_initialized(self) -> None:
                pass

        return Logger(vllm_config, engine_index)


def set_environment(config: Config) -> None:
    """What vLLM reads from the environment, before it is imported; the user's own values stand."""
    defaults = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # What vLLM leaves behind is cleaned up; the last lines of the log are for our errors.
        "PYTHONWARNINGS": "ignore:resource_tracker:UserWarning",
        # Actors that share a machine must not be bound to the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    if not config.model.path.startswith(HUB):
        defaults["HF_HUB_OFFLINE"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if config.actors.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(config.actors.threads)


def engine_args(config: Config, name: str) -> Any:
    """vLLM's AsyncEngineArgs for actor `name`. Raises ConfigError that names the field."""
    check_settings(config)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for key in config.actors.engine:
        if key not in known:
            raise ConfigError(
                f"actors.engine.{key}: unknown; the arguments of vLLM's AsyncEngineArgs may be "
                "given here"
            )
    path = config.model.path.removeprefix(HUB)
    sequences = config.actors.slots * config.rollout.group_size
    arguments: dict[str, Any] = {
        "model": path,
        "dtype": config.model.dtype,
        "trust_remote_code": config.model.trust_remote_code,
        # Actors must not draw the same numbers.
        "seed": zlib.crc32(f"{config.run.seed}/{name}".encode()),
        "max_num_seqs": sequences,
        "max_model_len": context_length(config, path),
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_extension_cls": "actors.vllm_worker.DiesWithActor",
    }
    if current_platform.is_cpu():
        arguments["enforce_eager"] = True
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            arguments["kv_cache_memory_bytes"] = GIB
    return AsyncEngineArgs(**{**arguments, **config.actors.engine})


def check_settings(config: Config) -> None:
    """What can be known without vLLM, for `reprise check` too.

    Raises ConfigError, a line each, for keys of `actors.engine` that are ours or change the
    distribution, and for temperatures that vLLM does not sample at.
    """
    temperatures = {"rollout.temperature": config.rollout.temperature}
    temperatures |= {f"eval.{e.name}.temperature": e.temperature for e in config.eval}
    mistakes = [
        f"{field}: {temperature:g}; vLLM samples at {MAX_TEMPERATURE:g} at most"
        for field, temperature in temperatures.items()
        if temperature > MAX_TEMPERATURE
    ]
    for key in config.actors.engine:
        if key in OURS:
            mistakes.append(f"actors.engine.{key}: is set by {OURS[key]}; remove it here")
        if key in CHANGES_DISTRIBUTION:
            mistakes.append(
                f"actors.engine.{key}: would let the engine sample from another distribution than "
                "the one whose probabilities the learner computes; remove it"
            )
    if mistakes:
        raise ConfigError("\n".join(mistakes))


def context_length(config: Config, path: str) -> int:
    """Prompt and completion at their longest, as far as the model reaches.

    Raises ConfigError where the model's context cannot hold a completion of rollout.max_tokens.
    """
    from transformers import AutoConfig

    try:
        model = AutoConfig.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"model.path: {config.model.path}: {reason}") from None
    text = model.get_text_config()
    reach = getattr(text, "max_position_embeddings", None)
    rollout = config.rollout
    longest = max([rollout.max_tokens, *(e.max_tokens or 0 for e in config.eval)])
    wanted = rollout.max_prompt_tokens + longest
    if reach is None or wanted <= reach:
        return wanted
    if longest >= reach:
        raise ConfigError(
            f"rollout.max_tokens: {longest} tokens (eval.max_tokens included) leave no room for a "
            f"prompt in the model's context of {reach}"
        )
    log.warning(
        "rollout.max_prompt_tokens %d + max_tokens %d is more than the model's context of %d: "
        "prompts above %d tokens end as failed",
        rollout.max_prompt_tokens,
        longest,
        reach,
        reach - longest,
    )
    return int(reach)
