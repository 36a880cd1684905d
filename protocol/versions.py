"""The version tag of weights, and the one rule that says which groups may be trained.

Invariant: versions are totally ordered as (generation, step). `step` counts optimizer steps;
`generation` is taken anew at every start of a learner, so an undone step's version never comes
again and every group of an undone step is refused whatever the allowed lag.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class Version(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Weights after `step` optimizer steps of learner start number `generation`."""

    generation: Count
    step: Count

    def __str__(self) -> str:
        return f"{self.generation}.{self.step}"

    def next_step(self) -> Version:
        """The version that the optimizer step on this version's weights produces."""
        return Version(self.generation, self.step + 1)

    @classmethod
    def parse(cls, text: str) -> Version:
        """Read `generation.step`, as `str(version)` writes it. Raises ValueError."""
        generation, dot, step = text.partition(".")
        if not (dot and generation.isdecimal() and step.isdecimal()):
            raise ValueError(f"version {text!r} is not of the form generation.step")
        return cls(int(generation), int(step))


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) of one completion were sampled with `version`, as the engine reports."""

    version: Version
    start: Count
    end: Count


class Verdict(enum.StrEnum):
    """Whether a group may be trained in a batch, or why not."""

    ADMISSIBLE = "admissible"
    OTHER_GENERATION = "other_generation"
    TOO_OLD = "too_old"
    TOO_NEW = "too_new"
    SPANS_VERSIONS = "spans_versions"
    UNPROVEN = "unproven"

    @property
    def end(self) -> Literal["stale", "impure"]:
        """The end that the accounts book for a refused group: `stale` or `impure`."""
        if self in (Verdict.OTHER_GENERATION, Verdict.TOO_OLD):
            return "stale"
        if self is Verdict.ADMISSIBLE:
            raise ValueError("an admissible group has no end of refusal")
        return "impure"


def covers(spans: Sequence[Span], length: int) -> bool:
    """Do the spans prove a version for each of `length` tokens, in order and without a gap?"""
    position = 0
    for span in spans:
        if span.start != position or span.end <= span.start:
            return False
        position = span.end
    return position == length


def judge(
    completions: Iterable[tuple[Sequence[Span], int]], batch: Version, max_lag: int
) -> Verdict:
    """The on-policy rule, on the evidence in the group.

    Args:
        completions: the spans and the token count of each completion of the group.
        batch: the version of the weights that the optimizer step is about to change.
        max_lag: largest allowed `batch.step - step of the oldest token`.

    At `max_lag` 0 the group must be *pure* and of the batch's own version: every token of every
    completion sampled with exactly `batch`. At `max_lag` L > 0 the oldest token counts, and no
    token may be newer than the batch's weights. Groups of another generation are never admissible.
    """
    oldest: Version | None = None
    newest: Version | None = None
    for spans, length in completions:
        if not covers(spans, length):
            return Verdict.UNPROVEN
        for span in spans:
            oldest = span.version if oldest is None else min(oldest, span.version)
            newest = span.version if newest is None else max(newest, span.version)
    if oldest is None or newest is None:
        return Verdict.UNPROVEN
    if oldest.generation != batch.generation or newest.generation != batch.generation:
        return Verdict.OTHER_GENERATION
    if newest.step > batch.step:
        return Verdict.TOO_NEW
    if oldest.step < batch.step - max_lag:
        # At lag 0 a group that mixes this version with an older one is impure rather than late.
        return Verdict.SPANS_VERSIONS if max_lag == 0 and newest == batch else Verdict.TOO_OLD
    return Verdict.ADMISSIBLE
