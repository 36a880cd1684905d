"""From sampled and graded completions to what is sent: the group and its outcome. Pure functions.

Invariant: an outcome is `ok` only if enough completions are graded and every token's version is
proven; the group travels only if `Task.send` asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgpack
import msgspec
from msgspec import Meta

from actors.engine import Sampled
from actors.rewards.pool import Grade
from protocol.arrays import pack_float32, pack_int32
from protocol.config import GradingConfig
from protocol.counting import has_variance
from protocol.messages import ChatMessage, Completion, Id, Outcome, Prompt, RewardGroup, Task
from protocol.versions import covers

MAX_WHY = 4096


class _Attempt(msgspec.Struct, tag="Task", tag_field="type"):
    """What of a Task names the attempt."""

    id: Id
    attempt: Annotated[int, Meta(ge=1)]
    actor: Id


class Unusable(Exception):
    """The attempt ends `failed`, and why."""


def check(sampled: Sequence[Sampled], grades: Sequence[Grade], grading: GradingConfig) -> None:
    """Raise Unusable unless a group stands."""
    for completion in sampled:
        if not covers(completion.spans, len(completion.tokens)):
            raise Unusable(
                "the engine does not prove which weights sampled each token: "
                f"{completion.spans} for {len(completion.tokens)} tokens"
            )
    # A greedy evaluation has one completion, whatever min_graded says of training groups.
    needed = min(grading.needed(len(grades)), len(grades))
    graded = sum(grade.reward is not None for grade in grades)
    if graded < needed:
        why = next(grade.why for grade in grades if grade.reward is None)
        raise Unusable(f"{graded} of {len(grades)} completions graded, {needed} needed: {why}")


def wants_group(task: Task, grades: Sequence[Grade], grading: GradingConfig) -> bool:
    """Does `Task.send` ask for this group's tokens?"""
    if task.send == "mixed":
        rewards = [grade.reward for grade in grades]
        return has_variance(rewards, grading.variance_tolerance, grading.width)
    return task.send == "all"


def reward_group(
    task: Task,
    prompt_tokens: Sequence[int],
    sampled: Sequence[Sampled],
    grades: Sequence[Grade],
) -> RewardGroup:
    """The group as the learner gets it. Raises Unusable where a log-prob is not finite."""
    try:
        completions = [
            Completion(
                tokens=pack_int32(s.tokens),
                logprobs=pack_float32(s.logprobs),
                spans=s.spans,
                finish=s.finish,
                reward=g.reward,
                correct=g.correct,
                components=g.components,
            )
            for s, g in zip(sampled, grades, strict=True)
        ]
        return RewardGroup(
            task=task.id,
            attempt=task.attempt,
            actor=task.actor,
            problem=task.problem,
            data_source=task.data_source,
            reason=task.reason,
            temperature=task.temperature,
            prompt_tokens=pack_int32(prompt_tokens),
            completions=completions,
        )
    except ValueError as error:
        raise Unusable(f"the engine's output is no group: {error}") from None


def ok_outcome(task: Task, sampled: Sequence[Sampled], grades: Sequence[Grade]) -> dict[str, Any]:
    """Fields of the Outcome of a group that stands; times and the pointer are the caller's."""
    versions = [span.version for s in sampled for span in s.spans]
    return {
        "actor": task.actor,
        "task": task.id,
        "attempt": task.attempt,
        "status": "ok",
        "rewards": [g.reward for g in grades],
        "correct": [g.correct for g in grades],
        "lengths": [len(s.tokens) for s in sampled],
        "truncated": [s.finish == "length" for s in sampled],
        "oldest": min(versions),
        "newest": max(versions),
        "components": mean_components(grades),
    }


def failed_outcome(task: Task, why: str, **fields: Any) -> Outcome:
    """The Outcome of an attempt that has no group."""
    return Outcome(
        actor=task.actor,
        task=task.id,
        attempt=task.attempt,
        status="failed",
        why=why[:MAX_WHY],
        **fields,
    )


def unreadable_outcome(raw: bytes, error: str) -> Outcome | None:
    """The failed Outcome of a task that cannot be decoded, if at least its attempt can be read."""
    try:
        found = msgspec.convert(msgpack.unpackb(raw), type=_Attempt)
    except (
        msgspec.ValidationError,
        msgpack.UnpackException,
        ValueError,
        TypeError,
        RecursionError,
        MemoryError,
    ):
        return None
    return Outcome(
        actor=found.actor,
        task=found.id,
        attempt=found.attempt,
        status="failed",
        why=f"the task cannot be read: {error}"[:MAX_WHY],
    )


def mean_components(grades: Sequence[Grade]) -> dict[str, float]:
    """Mean of each component over the graded completions that have it."""
    values: dict[str, list[float]] = {}
    for grade in grades:
        if grade.reward is not None:
            for name, value in grade.components.items():
                values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def plain_prompt(prompt: Prompt) -> str | list[dict[str, str]]:
    """The prompt as graders get it: text, or turns as {role, content}."""
    if isinstance(prompt, str):
        return prompt
    return [_turn(turn) for turn in prompt]


def _turn(turn: ChatMessage) -> dict[str, str]:
    return {"role": turn.role, "content": turn.content}
