"""The groups that rank 0 keeps until a batch names them.

Invariants: a group is kept only while it could still be trained, and never more than `capacity`;
what is handed out is the very content that the scheduler's outcome named and passes the on-policy
rule on the evidence in the group; of every other group the end and the reason are known. Pure: no
I/O and no clock.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

from protocol.codec import DEFAULT_MAX_BYTES, ProtocolError, decode
from protocol.messages import BatchGroup, GroupEnd, GroupEndName, GroupRef, RewardGroup
from protocol.versions import Verdict, Version, judge

Place = tuple[int, int]
"""Partition and offset on `groups`."""
Refusal = tuple[GroupEndName, str]
"""End of a group that is not trained, and why."""

REMEMBERED = 10_000
"""Refusals remembered: a batch that names a dropped group comes soon after it or never."""


@dataclass(frozen=True, slots=True)
class _Kept:
    raw: bytes
    oldest: int
    """Step of its oldest token."""


class GroupBuffer:
    """Groups by their place in the topic."""

    def __init__(
        self, generation: int, max_lag: int, capacity: int, max_bytes: int = DEFAULT_MAX_BYTES
    ) -> None:
        """`capacity`: most groups kept; beyond it the one that came first goes."""
        self._generation = generation
        self._max_lag = max_lag
        self._capacity = capacity
        self._max_bytes = max_bytes
        self._step = 0
        self._kept: OrderedDict[Place, _Kept] = OrderedDict()
        # Counted along, for another thread reads it.
        self._size = 0
        self._refused: OrderedDict[Place, Refusal] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def size(self) -> int:
        """Bytes of what is kept."""
        return self._size

    def add(self, place: Place, raw: bytes, message: RewardGroup | ProtocolError) -> None:
        """Take in one record."""
        if isinstance(message, ProtocolError):
            self._refuse(place, ("failed", f"undecodable: {message}"))
            return
        verdict = _judge(message, Version(self._generation, self._step), self._max_lag)
        # Too new for this step is in time for a later one; every other refusal is for good.
        if verdict not in (Verdict.ADMISSIBLE, Verdict.TOO_NEW):
            self._refuse(place, _refusal(verdict))
            return
        steps = [span.version.step for c in message.completions for span in c.spans]
        self._forget(place)
        self._kept[place] = _Kept(raw, min(steps))
        self._size += len(raw)
        while len(self._kept) > self._capacity:
            first = next(iter(self._kept))
            self._refuse(
                first, ("failed", f"no room: {self._capacity} later groups are kept already")
            )

    def advance(self, step: int) -> None:
        """The batch of `step` is next: groups that are too old for it go."""
        self._step = step
        version = Version(self._generation, step)
        for place, kept in list(self._kept.items()):
            if kept.oldest < step - self._max_lag:
                message = self._decode(kept.raw)
                self._refuse(place, _refusal(_judge(message, version, self._max_lag)))

    def knows(self, ref: GroupRef) -> bool:
        """Has the record that `ref` points to been read?"""
        place = (ref.partition, ref.offset)
        return place in self._kept or place in self._refused

    def take(self, group: BatchGroup, version: Version, missing: str) -> bytes | GroupEnd:
        """The record's bytes of a group of the batch of `version`, or its end if refused.

        `missing` is the reason to give where its record was not read.
        """
        place = (group.ref.partition, group.ref.offset)
        kept = self._forget(place)
        refusal = self._refused.pop(place, None) or ("failed", missing)
        if kept is not None:
            found = self._check(kept.raw, group, version)
            if found is None:
                return kept.raw
            refusal = found
        end, why = refusal
        return GroupEnd(group.task, group.attempt, end, why[:4096])

    def _check(self, raw: bytes, group: BatchGroup, version: Version) -> Refusal | None:
        message = self._decode(raw)
        if hashlib.sha256(raw).digest() != group.ref.digest or message.id != group.id:
            return (
                "failed",
                f"partition {group.ref.partition} offset {group.ref.offset} of groups has other "
                f"content than its outcome says (it holds group {message.id})",
            )
        verdict = _judge(message, version, self._max_lag)
        return None if verdict is Verdict.ADMISSIBLE else _refusal(verdict)

    def _forget(self, place: Place) -> _Kept | None:
        kept = self._kept.pop(place, None)
        if kept is not None:
            self._size -= len(kept.raw)
        return kept

    def _refuse(self, place: Place, refusal: Refusal) -> None:
        self._forget(place)
        self._refused[place] = refusal
        while len(self._refused) > REMEMBERED:
            self._refused.popitem(last=False)

    def _decode(self, raw: bytes) -> RewardGroup:
        message: RewardGroup = decode(raw, RewardGroup, max_bytes=self._max_bytes)
        return message


def _judge(message: RewardGroup, batch: Version, max_lag: int) -> Verdict:
    return judge([(c.spans, c.length) for c in message.completions], batch, max_lag)


def _refusal(verdict: Verdict) -> Refusal:
    return ("stale" if verdict.end == "stale" else "impure"), verdict.value
