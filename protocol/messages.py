"""Every message that crosses a process boundary: typed, immutable, validated when it is built.

Invariant: a message that exists is consistent (lengths agree, numbers are finite, ids are well
formed). Decoding goes through the same checks, so nothing else needs to validate what it receives.
Fields that a newer release adds are ignored by an older one; a new *meaning* gets a new tag.

Topics: `tasks` carries Task, Assigned, Rejoin, RunEnded; `groups` carries RewardGroup; `events`
carries Joined, Started, Heartbeat, Released, EngineDied, Outcome, StepCompleted, LearnerReady,
Tick, SchedulerStarted, StopRequested; `batches` carries BatchReleased, SnapshotWritten, RunEnded;
`weights` carries WeightsPublished.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from protocol.arrays import ITEM_BYTES, all_finite
from protocol.versions import Count, Span, Version

# NaN and infinity pass a bare float; they do not pass a bound.
Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Share = Annotated[float, Meta(ge=0, le=1)]
Id = Annotated[str, Meta(min_length=1, max_length=512)]
Text = Annotated[str, Meta(max_length=4096)]
Int32 = Annotated[int, Meta(ge=-(2**31), lt=2**31)]

Purpose = Literal["train", "eval"]
Reason = Literal[
    "heap", "unseen", "explore", "retest_solved", "retest_unsolved", "fallback", "refill", "eval"
]
ActorState = Literal[
    "starting", "idle", "generating", "grading", "waiting_for_weights", "loading", "draining"
]
GroupEndName = Literal["trained", "stale", "impure", "skipped", "failed"]
FinishReason = Literal["stop", "length"]
RunEndReason = Literal[
    "finished", "stopped", "nothing_left_to_learn", "grader_failing", "no_progress", "error"
]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type"):
    """Base of all messages. The tag on the wire is the class name, in field `type`."""


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a chat prompt."""

    role: Id
    content: str


Prompt = str | list[ChatMessage]


def task_id(generation: int, number: int) -> str:
    """The id of task `number` issued under `generation`; unique over all resumes of a run."""
    return f"{generation}-{number}"


def group_id(task: str, attempt: int) -> str:
    """The id of the reward group that `attempt` of `task` makes."""
    return f"{task}/{attempt}"


class Task(Message, frozen=True, kw_only=True):
    """scheduler → one actor, on that actor's partition of `tasks`: one prompt to roll out.

    Attributes:
        id: `generation-number`.
        attempt: 1 for the first issue; a re-issue after a lost actor is the next number.
        actor: the only actor that may run it.
        problem: id of the problem in the data.
        reason: why the strategy chose it.
        version: the oldest weights it may be rolled out with; with `exact`, the only ones.
        group_size: completions to sample.
        temperature: 0 is greedy.
        max_tokens: longest completion, end token included.
        seed: function of run seed, round and place in the round; used only where
            `rollout.seeded` says so.
        send: which finished groups are sent whole: only those with variance in the reward
            (`mixed`), every one (`all`), or none (`none`, evaluation).
        alone: start only while nothing else is held (a suspect of killing an engine).
        prompt: plain text, or chat turns to which the model's chat template is applied.
        answer: what the grader compares with (verl: `ground_truth`).
        extra: further columns of the problem (verl: `extra_info`; TRL: `**columns`).
    """

    id: Id
    attempt: Annotated[int, Meta(ge=1)]
    actor: Id
    problem: Id
    purpose: Purpose
    reason: Reason
    version: Version
    group_size: Annotated[int, Meta(ge=1, le=65536)]
    temperature: Annotated[float, Meta(ge=0, le=100)]
    max_tokens: Annotated[int, Meta(ge=1)]
    seed: Count
    prompt: Prompt
    answer: Any = None
    data_source: Text = ""
    extra: dict[str, Any] = {}
    send: Literal["mixed", "all", "none"] = "mixed"
    exact: bool = False
    alone: bool = False

    @property
    def group(self) -> str:
        """Id of the group that this attempt makes."""
        return group_id(self.id, self.attempt)


class Assigned(Message, frozen=True, kw_only=True):
    """scheduler → actors, control partition: `partition` of `tasks` is now this actor's alone."""

    actor: Id
    partition: Annotated[int, Meta(ge=1)]


class Rejoin(Message, frozen=True, kw_only=True):
    """scheduler → one actor: you were given up; drop what you hold and join as new."""

    actor: Id


class RunEnded(Message, frozen=True, kw_only=True):
    """scheduler → everyone: no more work will come."""

    reason: RunEndReason
    detail: Text = ""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled answer, as the engine made it; never re-tokenised.

    Attributes:
        tokens: little-endian int32, the end token included where one was sampled.
        logprobs: little-endian float32, one per token: log of the probability under the tempered
            distribution that was sampled.
        spans: which weights sampled which tokens, as the engine reports.
        reward: what is trained; None where the grader failed or gave none.
        correct: what is counted, in [0, 1]; None exactly where `reward` is None.
        components: further numbers of the grader, by name.
    """

    tokens: bytes
    logprobs: bytes
    spans: list[Span]
    finish: FinishReason
    reward: Finite | None
    correct: Share | None
    components: dict[str, Finite] = {}

    def __post_init__(self) -> None:
        if len(self.tokens) % ITEM_BYTES:
            raise ValueError(f"tokens: {len(self.tokens)} bytes are no int32 array")
        if len(self.logprobs) != len(self.tokens):
            raise ValueError(
                f"logprobs: {len(self.logprobs)} bytes for {len(self.tokens)} bytes of tokens"
            )
        if not all_finite(self.logprobs):
            raise ValueError("logprobs: not finite")
        if (self.reward is None) != (self.correct is None):
            raise ValueError("reward and correct: one is given and the other is not")
        for span in self.spans:
            if not span.start < span.end <= self.length:
                raise ValueError(
                    f"spans: [{span.start}, {span.end}) does not lie in {self.length} tokens"
                )

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.tokens) // ITEM_BYTES


class RewardGroup(Message, frozen=True, kw_only=True):
    """actor → learner: all completions of one task's prompt, graded."""

    task: Id
    attempt: Annotated[int, Meta(ge=1)]
    actor: Id
    problem: Id
    data_source: Text
    reason: Reason
    temperature: Annotated[float, Meta(gt=0, le=100)]
    prompt_tokens: bytes
    completions: Annotated[list[Completion], Meta(min_length=1)]

    def __post_init__(self) -> None:
        if not self.prompt_tokens or len(self.prompt_tokens) % ITEM_BYTES:
            raise ValueError(
                f"prompt_tokens: {len(self.prompt_tokens)} bytes are no non-empty int32 array"
            )

    @property
    def id(self) -> str:
        """Id of the group."""
        return group_id(self.task, self.attempt)

    @property
    def generation(self) -> int | None:
        """Generation of the oldest token; None where the spans prove none."""
        versions = [span.version for c in self.completions for span in c.spans]
        return min(versions).generation if versions else None


class GroupRef(msgspec.Struct, frozen=True):
    """Where a group lies on `groups`, and the SHA-256 (raw) of its record's value."""

    partition: Count
    offset: Count
    digest: Annotated[bytes, Meta(min_length=32, max_length=32)]


class Joined(Message, frozen=True, kw_only=True):
    """actor → scheduler: I have loaded `version`, noted the ends of `tasks`, and take work.

    `actor` is new at every process start; `slots` is how many tasks may run at once.
    """

    actor: Id
    slots: Annotated[int, Meta(ge=1, le=1_000_000)]
    version: Version
    host: Text = ""
    pid: Count = 0


class Started(Message, frozen=True, kw_only=True):
    """actor → scheduler: the task entered the engine."""

    actor: Id
    task: Id
    attempt: Annotated[int, Meta(ge=1)]


class Held(msgspec.Struct, frozen=True, array_like=True):
    """One attempt that an actor holds."""

    task: Id
    attempt: Annotated[int, Meta(ge=1)]


class Heartbeat(Message, frozen=True, kw_only=True):
    """actor → scheduler: keeps the lease of the actor.

    Attributes:
        state: what the actor does now.
        version: of its weights.
        held: started and unfinished attempts; None where unchanged since the last list.
        tokens: sampled since its process started.
        seconds: spent in each state since its process started.
    """

    actor: Id
    state: ActorState
    version: Version
    held: list[Held] | None = None
    tokens: Count = 0
    seconds: dict[str, Seconds] = {}


class Released(Message, frozen=True, kw_only=True):
    """actor → scheduler: these attempts go back unrun or unfinished; no prompt is to blame."""

    actor: Id
    attempts: Annotated[list[Held], Meta(min_length=1)]
    why: Text = ""


class EngineDied(Message, frozen=True, kw_only=True):
    """actor → scheduler: the engine died while it held these attempts; the actor leaves."""

    actor: Id
    attempts: list[Held]
    error: Text = ""


class Outcome(Message, frozen=True, kw_only=True):
    """actor → scheduler: how an attempt ended: numbers and a pointer, never a token.

    Sent only after the group, if one is sent, is acknowledged by the broker.

    Attributes:
        status: `failed` where no group stands (grader failing, too large, prompt too long, …).
        why: what failed; empty otherwise.
        rewards, correct, lengths, truncated: one entry per completion, in the group's order;
            reward and correct are None where a completion could not be graded.
        oldest, newest: versions over all tokens.
        group: where the group lies; None if none was sent.
        components: mean over the graded completions, by name.
        generate_seconds, grade_seconds: of this attempt.
    """

    actor: Id
    task: Id
    attempt: Annotated[int, Meta(ge=1)]
    status: Literal["ok", "failed"]
    why: Text = ""
    rewards: list[Finite | None] = []
    correct: list[Share | None] = []
    lengths: list[Count] = []
    truncated: list[bool] = []
    oldest: Version | None = None
    newest: Version | None = None
    group: GroupRef | None = None
    components: dict[str, Finite] = {}
    prompt_length: Count = 0
    generate_seconds: Seconds = 0.0
    grade_seconds: Seconds = 0.0

    def __post_init__(self) -> None:
        sizes = {len(self.rewards), len(self.correct), len(self.lengths), len(self.truncated)}
        if len(sizes) != 1:
            raise ValueError(
                "rewards, correct, lengths, truncated: lengths differ "
                f"({len(self.rewards)}, {len(self.correct)}, {len(self.lengths)}, "
                f"{len(self.truncated)})"
            )
        if self.status == "ok":
            if not self.rewards:
                raise ValueError("rewards: empty in an outcome that is ok")
            if self.oldest is None or self.newest is None:
                raise ValueError("oldest, newest: missing in an outcome that is ok")
        elif not self.why:
            raise ValueError("why: empty in a failed outcome")


class Tick(Message, frozen=True, kw_only=True):
    """scheduler → itself: `seconds` of its monotonic clock passed since its last tick."""

    epoch: Count
    seconds: Annotated[float, Meta(ge=0, le=2)]


class SchedulerStarted(Message, frozen=True, kw_only=True):
    """scheduler → itself and its rivals: ticks of a lower epoch move time no longer."""

    epoch: Count
    host: Text
    pid: Count


class GroupEnd(msgspec.Struct, frozen=True):
    """The end of one group of a released batch, and why where it was not trained."""

    task: Id
    attempt: Annotated[int, Meta(ge=1)]
    end: GroupEndName
    why: Text = ""


class StepCompleted(Message, frozen=True, kw_only=True):
    """learner → scheduler: the batch of `version` is done and the next weights lie complete.

    Attributes:
        version: of the batch, that is of the weights that the step changed.
        ends: the end of every group of the batch.
        metrics: numbers of the step by name (loss, entropy, seconds by phase, …).
        checkpoint: whether a checkpoint of the next version is being made.
    """

    version: Version
    ends: list[GroupEnd]
    metrics: dict[str, Finite] = {}
    checkpoint: bool = False


class LearnerReady(Message, frozen=True, kw_only=True):
    """learner → scheduler: weights of `version` are published; batches may come.

    A restored learner names the checkpoint and the SHA-256 of the scheduler's half of it.
    """

    version: Version
    ranks: Annotated[int, Meta(ge=1)] = 1
    host: Text = ""
    pid: Count = 0
    checkpoint: Text = ""
    sha256: Text = ""


class StopRequested(Message, frozen=True, kw_only=True):
    """learner or scheduler → scheduler: the user asked the run to end."""

    sender: Literal["learner", "scheduler"]
    reason: RunEndReason = "stopped"
    detail: Text = ""


class BatchGroup(msgspec.Struct, frozen=True):
    """One group of a released batch."""

    task: Id
    attempt: Annotated[int, Meta(ge=1)]
    ref: GroupRef

    @property
    def id(self) -> str:
        """Id of the group."""
        return group_id(self.task, self.attempt)


class BatchReleased(Message, frozen=True, kw_only=True):
    """scheduler → learner: the exact groups of one optimizer step on the weights `version`.

    `planned` is the number of groups asked for; fewer groups mean that the round's refill was
    spent or the strategy had nothing more to offer.
    """

    version: Version
    groups: list[BatchGroup]
    planned: Count


class SnapshotWritten(Message, frozen=True, kw_only=True):
    """scheduler → learner: its half of the checkpoint of `version` lies complete."""

    version: Version
    sha256: Text


class WeightsPublished(Message, frozen=True, kw_only=True):
    """learner → actors: weights of `version` lie complete in `path` under the weights root.

    `files` maps each file's name to the SHA-256 (hex) of its content.
    """

    version: Version
    path: Id
    files: Annotated[dict[str, str], Meta(min_length=1)]
    bytes: Count


TaskRecord = Task | Assigned | Rejoin | RunEnded
GroupRecord = RewardGroup
EventRecord = (
    Joined
    | Started
    | Heartbeat
    | Released
    | EngineDied
    | Outcome
    | Tick
    | SchedulerStarted
    | StepCompleted
    | LearnerReady
    | StopRequested
)
BatchRecord = BatchReleased | SnapshotWritten | RunEnded
WeightsRecord = WeightsPublished
AnyMessage = TaskRecord | GroupRecord | EventRecord | BatchRecord | WeightsRecord
