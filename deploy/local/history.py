"""What `metrics.jsonl` says so far, and the figures that views, summary and report draw from it.

Pure apart from reading the file. A line that cannot be read is counted and left out: a view must
not stop a run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from protocol.records import EndRecord, EvalRecord, RunRecord, StepRecord, from_line

WINDOW = 20


@dataclass
class History:
    """The records of a run in the order in which they were written."""

    steps: list[StepRecord] = field(default_factory=list)
    evals: list[EvalRecord] = field(default_factory=list)
    end: EndRecord | None = None
    unreadable: int = 0

    def add(self, record: RunRecord) -> None:
        """The next record."""
        match record:
            case StepRecord():
                self.steps.append(record)
            case EvalRecord():
                self.evals.append(record)
            case EndRecord():
                self.end = record

    def add_line(self, line: bytes) -> None:
        """The next line of the file."""
        try:
            self.add(from_line(line))
        except (msgspec.MsgspecError, ValueError):
            self.unreadable += 1

    @classmethod
    def read(cls, path: Path) -> History:
        """All of a file; none where there is no file."""
        history, tail = cls(), LineTail(path)
        for line in tail.new():
            history.add_line(line)
        return history

    def evals_of(self, name: str) -> list[EvalRecord]:
        """Of one held-out set."""
        return [record for record in self.evals if record.name == name]

    @property
    def done(self) -> int:
        """Optimizer steps completed."""
        return len(self.steps)

    @property
    def rollouts(self) -> int:
        """Completions of training tasks so far."""
        if self.end is not None:
            return self.end.rollouts
        return self.steps[-1].rollouts if self.steps else 0

    def seconds_per_step(self) -> float | None:
        """Mean of the last WINDOW steps; the first holds the start-up and is left out."""
        recent = self.steps[-WINDOW - 1 :]
        if len(recent) < 2:
            return None
        return (recent[-1].seconds - recent[0].seconds) / (len(recent) - 1)

    def tokens_per_second(self) -> float | None:
        """Rollout tokens over the last WINDOW steps, per second of the run."""
        recent = self.steps[-WINDOW - 1 :]
        if len(recent) < 2 or recent[-1].seconds <= recent[0].seconds:
            return None
        tokens = recent[-1].rollout_tokens - recent[0].rollout_tokens
        return tokens / (recent[-1].seconds - recent[0].seconds)


def smooth(values: Sequence[float | None], width: int = WINDOW) -> list[float | None]:
    """Mean of the last `width` values that are there, at each place; None before the first."""
    window: deque[float] = deque(maxlen=width)
    means: list[float | None] = []
    for value in values:
        if value is not None:
            window.append(value)
        means.append(sum(window) / len(window) if window else None)
    return means


def centred(values: Sequence[float | None], reach: int | None = None) -> list[float | None]:
    """Mean of what is there within `reach` places on both sides; None where nothing is.

    Without `reach` it is a twentieth of the values, between 1 and WINDOW ÷ 2.
    """
    if reach is None:
        reach = min(WINDOW // 2, max(1, len(values) // 20))
    means: list[float | None] = []
    for i in range(len(values)):
        near = [v for v in values[max(0, i - reach) : i + reach + 1] if v is not None]
        means.append(sum(near) / len(near) if near else None)
    return means


class LineTail:
    """The lines added to a file since last asked; an incomplete one is left for the next time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> list[bytes]:
        """Complete new lines; none where the file cannot be read."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                added = file.read()
        except OSError:
            return []
        complete = added[: added.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete.splitlines()
