"""What the scheduler writes to `metrics.jsonl`, one JSON object a line, for people and programs.

Written by the scheduler alone; read by the live view, the report and the summary. Times are log
time: seconds of the run during which a scheduler lived.
"""

from __future__ import annotations

from typing import Any

import msgspec

from protocol.messages import RunEndReason
from protocol.versions import Version


class Accounts(msgspec.Struct, frozen=True, kw_only=True):
    """Every issued task ends exactly once: issued = Σ ends + in_flight.

    `ends` has the keys trained, zero_variance, stale, impure, skipped, failed, expired, surplus and
    evaluated (the end of an evaluation task); `zero_variance` says which of those were all right,
    all wrong or mostly truncated.
    """

    issued: int
    in_flight: int
    ends: dict[str, int]
    zero_variance: dict[str, int] = {}


class ReasonCount(msgspec.Struct, kw_only=True):
    """Groups of one reason of choice whose outcomes came in during one step."""

    groups: int = 0
    mixed: int = 0
    zero_variance: int = 0
    reward: float = 0.0
    """Sum over the groups of the mean reward."""
    correct: float = 0.0
    """Sum over the groups of p."""
    shaping_only: int = 0
    """Groups with variance in the reward and none in what is counted."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="type"):
    """One completed optimizer step."""

    version: Version
    seconds: float
    rollouts: int
    """Completions of training tasks so far, whatever their end."""
    rollout_tokens: int
    groups: int
    """Groups released in the batch."""
    planned: int
    trained: int
    reward_trained: float | None
    """Mean reward over trained groups: held near ½ by selection, not progress."""
    reward_explored: float | None
    """Mean reward over this step's exploration draws alone: unbiased."""
    zero_variance_share: float | None
    """Of the groups whose outcomes came in during this step, before filtering."""
    replay_share: float | None
    """Of the groups picked for this round, those whose problem had been visited before."""
    mean_abs_advantage: float | None
    by_reason: dict[str, ReasonCount]
    pools: dict[str, int]
    distinct_problems: int
    most_visits: int
    lag: dict[str, int]
    """Trained groups by age of their oldest token in steps."""
    accounts: Accounts
    learner: dict[str, float]
    """The learner's numbers of this step."""
    waited: dict[str, float]
    """Seconds of this step by what the scheduler waited for: rollouts, learner, evaluation."""
    empty_rounds: int = 0
    """Rounds that came out without one trainable group before this batch."""
    dropped: int = 0
    """Tasks given up as stragglers for this batch."""
    dropped_length: float | None = None
    """Mean completion length of stragglers whose outcome came in late, during this step."""


class EvalRecord(msgspec.Struct, frozen=True, kw_only=True, tag="eval", tag_field="type"):
    """One held-out set at one version."""

    name: str
    version: Version
    seconds: float
    rollouts: int
    """Training completions so far."""
    problems: int
    failed: int
    """Tasks that ended failed or expired; the figures are over the others."""
    n: int
    mean: float | None
    """mean@n: mean of `correct` over all sampled completions."""
    standard_error: float | None
    """Of `mean`, for these problems: sqrt(Σ p(1−p) / n) / problems."""
    passed: float | None
    """pass@n: share of problems with at least one correct completion."""
    greedy: float | None
    by_source: dict[str, dict[str, float | None]]
    """`mean`, `passed`, `greedy` and `problems` by data source."""


class EndRecord(msgspec.Struct, frozen=True, kw_only=True, tag="end", tag_field="type"):
    """The run is over."""

    reason: RunEndReason
    detail: str
    version: Version
    seconds: float
    rollouts: int
    rollout_tokens: int
    trained_tokens: int
    impure_groups_trained: int
    """Trained groups whose spans did not prove one version equal to the step's; 0 by the rule."""
    accounts: Accounts
    actors: dict[str, dict[str, float]]
    """By actor: tasks ended, tokens, and seconds by state."""


RunRecord = StepRecord | EvalRecord | EndRecord


def to_line(record: RunRecord) -> bytes:
    """The record as one line of JSON."""
    return msgspec.json.encode(record) + b"\n"


def from_line(line: bytes | str) -> RunRecord:
    """The record in one line. Raises msgspec.ValidationError or msgspec.DecodeError."""
    record: Any = msgspec.json.decode(line, type=RunRecord)
    assert isinstance(record, StepRecord | EvalRecord | EndRecord)
    return record
