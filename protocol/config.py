"""The one YAML file of a run, typed and validated before anything starts.

Invariant: the value a user wrote is the value that is used; one that cannot be used is an error
that names the field. Unknown keys are errors. Input paths are relative to the config file;
`run.dir` is relative to where the command is started. All durations are seconds. Fields marked
*our choice* hold a constant that no paper gives.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from protocol.codec import DEFAULT_MAX_BYTES

HUB = "hf://"
EMBEDDED = "embedded"
FETCH_WAIT, EMBEDDED_FETCH_WAIT = 0.2, 0.02

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveSeconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
FiniteNumber = Annotated[float, Field(allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class ConfigError(Exception):
    """A configuration that cannot be run. Each line names one field or file, and what to do."""


class Section(BaseModel):
    """Base of all sections: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class RunConfig(Section):
    """Identity and length of the run."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")] = "run"
    """Start of the run's id and of its topic names."""
    dir: Path = Path("runs")
    """Where run directories are made."""
    seed: NonNegative = 0
    """Seeds selection, task seeds, and the learner."""
    steps: Positive = 100
    """Optimizer steps."""
    prompts_per_step: Positive = 16
    """Groups in a full batch."""
    max_lag: NonNegative = 0
    """Largest age, in steps, of the oldest token of a trained group. 0 is strictly on-policy."""
    on_straggler: Literal["wait", "drop"] = "wait"
    """Whether a batch waits for groups that would be too old for the next one."""
    straggler_wait: PositiveSeconds = 1800.0
    """Longest such wait; the tasks waited for then end `expired`."""
    max_refill: NonNegative | None = None
    """Replacements a round may issue, all together. Default: prompts_per_step."""
    keep_zero_variance: bool = False
    """Train groups whose rewards are all equal too, instead of replacing them."""
    max_empty_rounds: Positive = 3
    """Rounds in a row without one trainable group that end the run."""


class ModelConfig(Section):
    """The model to train."""

    path: str
    """Directory in Hugging Face layout, or hf://organisation/name."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of the weights in the engine and in what is published."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """Apply the model's chat template: where the model has one, always, or never."""
    trust_remote_code: bool = False
    """Run code that lies beside the weights."""


class FieldsConfig(Section):
    """Names of the columns in the data files."""

    id: str = "id"
    """Unique id of the problem."""
    prompt: str = "prompt"
    """Text, or a list of {role, content} turns."""
    answer: str = "answer"
    """What the reward compares with."""
    data_source: str = "data_source"
    """Kind of problem, for metrics and rewards; may be absent."""


class DataConfig(Section):
    """The training problems."""

    train: Path
    """JSONL, UTF-8, one problem a line."""
    fields: FieldsConfig = FieldsConfig()
    """Column names, for this file and for those of `eval`."""


class EvalConfig(Section):
    """One held-out set."""

    data: Path
    """JSONL, like data.train."""
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")] = "held_out"
    """Name in metrics."""
    every: Positive = 50
    """Steps between evaluations; the first weights and the last are evaluated in any case."""
    n: Annotated[int, Field(ge=1, le=4096)] = 4
    """Sampled completions a problem, for mean@n and pass@n."""
    greedy: bool = True
    """One greedy completion a problem besides."""
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Of the n sampled completions."""
    max_tokens: Positive | None = None
    """Default: rollout.max_tokens."""
    limit: Positive | None = None
    """Use only the first so many problems."""


class RolloutConfig(Section):
    """How completions are sampled. What changes the distribution other than temperature is refused:
    the learner computes the probability of each token under the tempered softmax alone."""

    group_size: Annotated[int, Field(ge=2, le=4096)] = 16
    """Completions a prompt (G)."""
    max_tokens: Positive = 1024
    """Longest completion."""
    max_prompt_tokens: Positive = 1024
    """Longest prompt; a longer one is a failed outcome, never cut."""
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Sampling temperature."""
    stop: list[str] = []
    """Texts that end a completion, besides the model's end token."""
    seeded: bool = False
    """Give Task.seed to the engine: repeatable and slower, for it draws such requests singly."""
    top_p: float = 1.0
    """Only 1."""
    top_k: int = 0
    """Only 0 (off)."""
    min_p: float = 0.0
    """Only 0."""
    repetition_penalty: float = 1.0
    """Only 1."""
    presence_penalty: float = 0.0
    """Only 0."""
    frequency_penalty: float = 0.0
    """Only 0."""

    @model_validator(mode="after")
    def _neutral(self) -> RolloutConfig:
        neutral = RolloutConfig.model_fields
        for name in (
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            value, only = getattr(self, name), neutral[name].default
            if value != only and not (name == "top_k" and value == -1):
                raise ValueError(
                    f"{name}: {value} changes the sampled distribution, so that the learner's "
                    f"probabilities would be wrong; only {only} is supported"
                )
        return self


class UniformConfig(Section):
    """Problems in shuffled order, each once an epoch: the baseline."""

    name: Literal["uniform"]


class PrioritizedConfig(Section):
    """Prioritized Replay (Fatemi, arXiv 2601.02648): a max-heap on ω = p(1−p), with pools.

    The paper's reachable text gives no constants; each one here is our choice.
    """

    name: Literal["prioritized"] = "prioritized"
    initial: Literal["expected", "optimistic"] = "expected"
    """Priority of an unseen problem: running mean of ω over first visits, or the largest ω, ¼, with
    which nothing is replayed before every problem has been seen once."""
    initial_omega: Annotated[float, Field(gt=0, le=0.25)] = 1 / 6
    """Start of that running mean: E[p(1−p)] for uniform p. Our choice."""
    cooldown: NonNegative = 5
    """Steps before a problem may be chosen again; 1 allows the next step. Our choice: without it a
    few problems near ½ are drawn again and again, measured worse than uniform."""
    exploration: Fraction = 0.25
    """Share of each batch drawn uniformly over all problems that are not cooling. Our choice."""
    retest_after: Positive = 10
    """Steps until a problem whose group had no variance is due for a retest. Our choice."""
    retest_max: Positive = 160
    """Longest such delay; it doubles with every further group without variance. Our choice."""
    retest_share: Fraction = 0.10
    """Largest share of a batch that due problems take ahead of the heap. Our choice."""

    @model_validator(mode="after")
    def _arithmetic(self) -> PrioritizedConfig:
        if self.retest_max < self.retest_after:
            raise ValueError(
                f"retest_max: {self.retest_max} is less than retest_after ({self.retest_after})"
            )
        if self.exploration + self.retest_share > 1:
            raise ValueError(
                f"exploration + retest_share: {self.exploration} + {self.retest_share} is more "
                "than the whole batch"
            )
        return self


StrategyConfig = Annotated[PrioritizedConfig | UniformConfig, Field(discriminator="name")]


class RewardConfig(Section):
    """One reward function; several are added with their weights."""

    name: str
    """`exact`, `numeric`, `math`, or `module:function`."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Factor of this function's reward."""
    style: Literal["auto", "verl", "trl"] = "auto"
    """Signature of a custom function: compute_score(data_source, solution_str, ground_truth,
    extra_info), or reward_func(prompts, completions, **columns). `auto` goes by parameter names."""
    timeout: PositiveSeconds = 10.0
    """Deadline for grading one completion; the child process is killed at it."""
    options: dict[str, Any] = {}
    """Further keyword arguments of the function."""


class GradingConfig(Section):
    """How rewards become what is trained and what is counted."""

    rewards: Annotated[list[RewardConfig], Field(min_length=1)] = [RewardConfig(name="exact")]
    """The reward functions."""
    workers: Positive = 2
    """Grader child processes per actor."""
    memory_bytes: Annotated[int, Field(ge=2**26)] = 4 * 2**30
    """Most private memory of a grader process."""
    range: tuple[FiniteNumber, FiniteNumber] | None = None
    """Smallest and largest possible reward. ω is divided by its squared width."""
    correct_at: FiniteNumber = 1.0
    """A completion counts as correct from this reward on, unless the function says itself."""
    variance_tolerance: Annotated[float, Field(ge=0, lt=1)] = 1e-6
    """A group has no variance when max − min ≤ this × the reward range."""
    min_graded: Positive | None = None
    """Graded completions a group needs to stand. Default: all but one in eight."""

    @model_validator(mode="after")
    def _range(self) -> GradingConfig:
        if self.range is not None and not self.range[0] < self.range[1]:
            raise ValueError(f"range: {list(self.range)} must be [smallest, largest]")
        return self

    @property
    def width(self) -> float:
        """Width of the reward range; 1 where none is declared."""
        return 1.0 if self.range is None else self.range[1] - self.range[0]

    def needed(self, group_size: int) -> int:
        """Graded completions that a group of `group_size` needs to stand."""
        return group_size - group_size // 8 if self.min_graded is None else self.min_graded


class LossConfig(Section):
    """GRPO. Clip and importance weight are separate: the clip acts on new/old, both the learner's
    own; the detached weight min(exp(old − sampler), importance_cap) multiplies the token's loss."""

    advantage: Literal["centred", "std"] = "centred"
    """r − mean, so that the mean squared advantage of a group is its priority ω; or divided by the
    standard deviation besides."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Lower clip: ratio ≥ 1 − clip_low."""
    clip_high: Annotated[float, Field(gt=0, le=10)] = 0.2
    """Upper clip: ratio ≤ 1 + clip_high."""
    importance_cap: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 2.0
    """Truncation C of the importance weight of learner over sampler."""
    denominator: Literal["token", "sequence", "constant"] = "token"
    """`token`: completion tokens in the loss over all ranks, times prompts_per_step ÷ groups in the
    loss; `sequence`: mean over each completion first; `constant`: prompts_per_step × group_size ×
    max_tokens."""
    kl: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight of the KL divergence to the first weights (k3 estimator); 0 is off."""
    truncated: Literal["train", "mask"] = "train"
    """Whether tokens of truncated completions enter the loss. They always count in the baseline."""
    updates_per_step: Positive = 1
    """Optimizer updates on one batch; from the second on they are off-policy to their own data."""


class LearnerConfig(Section):
    """The trainer."""

    ranks: Positive = 1
    """Processes on this machine (data parallel)."""
    deepspeed: dict[str, Any] | str = {}
    """DeepSpeed config, inline or the path of its JSON. Batch sizes follow from the run and may be
    left out; where given they must agree."""
    micro_batch_tokens: Positive = 16384
    """Prompt and completion tokens, padding included, of one forward pass of one rank."""
    warmup_steps: NonNegative = 10
    """Steps over which the learning rate rises linearly; Adam's first step moves every weight by
    the learning rate, whatever the gradient."""
    loss: LossConfig = LossConfig()
    """The loss."""
    keep_weights: Annotated[int, Field(ge=2)] = 3
    """Newest published versions kept on disk."""
    threads: Positive | None = None
    """CPU threads a rank; default: the library's."""


class ActorsConfig(Section):
    """The rollout workers."""

    count: NonNegative = 1
    """Actors that `reprise run` starts on this machine."""
    slots: Positive = 64
    """Tasks an actor runs at once."""
    prefetch: NonNegative = 8
    """Tasks it may hold besides, so that no slot waits for the scheduler."""
    max: Positive = 64
    """Most actors ever at once; `tasks` has one partition more."""
    engine: dict[str, Any] = {}
    """Further arguments of vLLM's AsyncEngineArgs."""
    threads: Positive | None = None
    """CPU threads of an engine; default: the library's."""


class WaitsConfig(Section):
    """Every lease, period and deadline, so that none is hidden and tests can run fast."""

    tick: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Period of the scheduler's clock."""
    listen_ticks: NonNegative = 3
    """Ticks for which a starting scheduler listens for another one."""
    heartbeat: PositiveSeconds = 2.0
    """Period of an actor's heartbeat."""
    lease: PositiveSeconds = 45.0
    """Silence after which an actor's work is given to others."""
    first_actor: PositiveSeconds = 1800.0
    """Longest wait for an actor to join before the run reports that it has none."""
    no_progress: PositiveSeconds = 3600.0
    """Time without an outcome or a step, work being outstanding and an actor joined, that ends the
    run."""
    drain: PositiveSeconds = 60.0
    """Longest wait at the end of the run for what is still in flight."""
    grace: PositiveSeconds = 30.0
    """Time an actor has to finish work after SIGTERM."""
    weights: PositiveSeconds = 600.0
    """Longest wait of an actor for the weights that a task needs."""
    loading: PositiveSeconds = 600.0
    """Longest load of weights."""
    token: PositiveSeconds = 300.0
    """Longest time without a token while an engine generates."""
    main: PositiveSeconds = 120.0
    """Longest time a process's main loop may not answer its Kafka thread."""
    group: PositiveSeconds = 60.0
    """Longest wait of the learner for a released group."""
    batch: PositiveSeconds = 7200.0
    """Longest wait of the learner for a batch."""
    collective: PositiveSeconds = 1800.0
    """Longest wait of a rank for the others."""
    kafka: PositiveSeconds = 60.0
    """Longest wait for the broker to answer."""
    snapshot_outcomes: Positive = 2000
    """Outcomes between two snapshots of the scheduler."""
    snapshot: PositiveSeconds = 600.0
    """Longest time between two snapshots."""
    max_attempts: Positive = 10
    """Attempts of a task before it ends `expired`."""


class KafkaConfig(Section):
    """The broker. Settings that a producer, a consumer and a topic share are raised together."""

    bootstrap_servers: str = EMBEDDED
    """host:port,… of a Kafka cluster; `embedded` starts a broker on this machine."""
    max_message_bytes: Annotated[int, Field(ge=65536, le=2**30)] = DEFAULT_MAX_BYTES
    """Largest record, for producers, consumers and topics alike."""
    compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = "lz4"
    """Of the producers."""
    idempotence: bool | None = None
    """Idempotent producers. Default: on, except with the embedded broker, which has none."""
    fetch_wait: Annotated[float, Field(gt=0, le=30)] | None = None
    """Longest time a fetch waits at the broker for records. Default: 0.2, and 0.02 with the
    embedded broker, which looks again only after half of it."""
    replication_factor: Positive | None = None
    """Of the topics. Default: the broker's, and 1 with the embedded broker."""
    group_partitions: Positive = 8
    """Partitions of `groups`."""
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """How to talk to the cluster."""
    ssl_cafile: Path | None = None
    """CA that signed the brokers' certificates."""
    ssl_certfile: Path | None = None
    """Our certificate, for mutual TLS."""
    ssl_keyfile: Path | None = None
    """Its key."""
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = None
    """SASL mechanism."""
    sasl_username: str | None = None
    """SASL user; or REPRISE_KAFKA_SASL_USERNAME."""
    sasl_password: SecretStr | None = Field(default=None, exclude=True)
    """SASL password; better given as REPRISE_KAFKA_SASL_PASSWORD, and never written to disk."""

    @property
    def embedded(self) -> bool:
        """Is the broker ours to start?"""
        return self.bootstrap_servers == EMBEDDED


class MetricsConfig(Section):
    """Where each process serves /metrics and /healthz."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port; 0 takes a free one, which the process writes to processes/ in the run directory."""


class Config(Section):
    """A whole run."""

    run: RunConfig = RunConfig()
    """Identity and length."""
    model: ModelConfig
    """What is trained."""
    data: DataConfig
    """On which problems."""
    eval: list[EvalConfig] = []
    """Measured on which."""
    rollout: RolloutConfig = RolloutConfig()
    """How completions are sampled."""
    grading: GradingConfig = GradingConfig()
    """How they are graded."""
    strategy: StrategyConfig = PrioritizedConfig()
    """How problems are chosen."""
    actors: ActorsConfig = ActorsConfig()
    """Rollout workers."""
    learner: LearnerConfig = LearnerConfig()
    """Trainer."""
    kafka: KafkaConfig = KafkaConfig()
    """Broker."""
    waits: WaitsConfig = WaitsConfig()
    """Leases, periods, deadlines."""
    metrics: MetricsConfig = MetricsConfig()
    """Metrics endpoints."""

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        names = [e.name for e in self.eval]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"eval: two sets are named {name!r}; give each its own name")
        needed = self.grading.min_graded
        if needed is not None and needed > self.rollout.group_size:
            raise ValueError(
                f"grading.min_graded: {needed} is more than rollout.group_size "
                f"({self.rollout.group_size})"
            )
        if self.waits.lease <= 2 * self.waits.heartbeat:
            raise ValueError(
                f"waits.lease: {self.waits.lease} must be more than two heartbeats "
                f"({self.waits.heartbeat} each)"
            )
        return self

    @property
    def max_refill(self) -> int:
        """Replacements a round may issue."""
        return self.run.prompts_per_step if self.run.max_refill is None else self.run.max_refill


SECRETS = {
    "REPRISE_KAFKA_SASL_USERNAME": ("kafka", "sasl_username"),
    "REPRISE_KAFKA_SASL_PASSWORD": ("kafka", "sasl_password"),
    "REPRISE_KAFKA_BOOTSTRAP_SERVERS": ("kafka", "bootstrap_servers"),
}


def load_config(path: Path, overrides: dict[str, Any] | None = None) -> Config:
    """Read, override and validate the config file of a run.

    Args:
        path: YAML file.
        overrides: values by dotted field name, as `--set run.steps=5` gives them.

    Environment variables in SECRETS come last. Raises ConfigError with one line for each mistake.
    """
    raw = _read_yaml(path)
    for dotted, value in (overrides or {}).items():
        _set(raw, dotted.split("."), value, dotted)
    for variable, place in SECRETS.items():
        if variable in os.environ:
            _set(raw, list(place), os.environ[variable], variable)
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(_line(path, e) for e in error.errors())) from None
    return _absolute(config, path.parent)


def dump_config(config: Config, path: Path) -> None:
    """Write the whole config, defaults included and secrets excluded, as YAML."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    path.write_text(text, encoding="utf-8")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a directory; name the config file in it") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must be a map of sections; found {type(raw).__name__}")
    return raw


def _set(raw: dict[str, Any], keys: list[str], value: Any, name: str) -> None:
    for key in keys[:-1]:
        child = raw.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{name}: {key} is not a section")
        raw = child
    raw[keys[-1]] = value


BRANCHES = ("prioritized", "uniform", "dict[str,any]", "str")


def _line(path: Path, error: Any) -> str:
    # A union's branch ('prioritized', 'dict[str,any]') is no part of the field's name.
    names = [str(part) for part in error["loc"]]
    kept = [n for n in names if n not in BRANCHES]
    field = ".".join(kept if kept else names) or "config"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        message = "unknown key; see docs/configuration.md for the fields there are"
    elif error["type"] == "missing":
        message = "is missing and has no default"
    elif error["type"] == "union_tag_not_found":
        message = f"needs {error['ctx']['discriminator']}: one of {', '.join(BRANCHES[:2])}"
    elif error["type"] != "value_error":
        message += f"; found {error['input']!r:.80}"
    return f"{path}: {field}: {message}"


def _absolute(config: Config, base: Path) -> Config:
    def here(path: Path) -> Path:
        return path if path.is_absolute() else (base / path).resolve()

    model_path = config.model.path
    if not model_path.startswith(HUB):
        model_path = str(here(Path(model_path)))
    deepspeed = config.learner.deepspeed
    if isinstance(deepspeed, str):
        deepspeed = str(here(Path(deepspeed)))
    tls = {
        name: here(value)
        for name in ("ssl_cafile", "ssl_certfile", "ssl_keyfile")
        if (value := getattr(config.kafka, name)) is not None
    }
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"dir": config.run.dir.absolute()}),
            "model": config.model.model_copy(update={"path": model_path}),
            "data": config.data.model_copy(update={"train": here(config.data.train)}),
            "eval": [e.model_copy(update={"data": here(e.data)}) for e in config.eval],
            "learner": config.learner.model_copy(update={"deepspeed": deepspeed}),
            "kafka": config.kafka.model_copy(update=tls),
        }
    )
