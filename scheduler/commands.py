"""What the core asks its service to do. The core decides, the service moves bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protocol.messages import Assigned, BatchReleased, Purpose, Reason, Rejoin, RunEnded
from protocol.records import RunRecord
from protocol.versions import Version


@dataclass(frozen=True, slots=True)
class IssueTask:
    """Send one task to one actor, on its partition of `tasks`.

    Attributes:
        partition: of `tasks`, this actor's alone.
        dataset: None for the training problems, otherwise the name of an evaluation set.
        problem: index of the problem in that data set. The service puts in prompt, answer and
            columns; the core knows numbers only.

    The other attributes are those of `protocol.messages.Task`.
    """

    partition: int
    actor: str
    id: str
    attempt: int
    dataset: str | None
    problem: int
    purpose: Purpose
    reason: Reason
    version: Version
    group_size: int
    temperature: float
    max_tokens: int
    seed: int
    send: Literal["mixed", "all", "none"]
    exact: bool
    alone: bool


@dataclass(frozen=True, slots=True)
class SendControl:
    """Send on the control partition of `tasks`."""

    message: Assigned | Rejoin | RunEnded


@dataclass(frozen=True, slots=True)
class SendBatch:
    """Send on `batches`."""

    message: BatchReleased | RunEnded


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """Append to metrics.jsonl."""

    record: RunRecord


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """The event just applied did not fit the state: put it aside with the reason."""

    why: str


@dataclass(frozen=True, slots=True)
class Say:
    """Log one line for the user."""

    level: Literal["info", "warning", "error"]
    text: str


@dataclass(frozen=True, slots=True)
class Leave:
    """The run is over and its accounts are final: stop the service. `ok` is False on an error."""

    ok: bool


Command = IssueTask | SendControl | SendBatch | WriteRecord | DeadLetter | Say | Leave
