"""The scheduler's decisions: a deterministic state machine over one log of events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from protocol.config import Config
from protocol.messages import EventRecord
from protocol.records import Accounts
from protocol.versions import Version
from scheduler.commands import Command
from scheduler.evaluation import EvalSet


class Core:
    """`apply(event) -> commands`; the state is a function of the events so far."""

    def __init__(self, config: Config, problems: int, eval_sets: Sequence[EvalSet] = ()) -> None:
        self.config = config

    def apply(self, event: EventRecord) -> list[Command]:
        """Apply one event and return what is to be done. Never raises on an event."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Plain data (msgpack-able) from which `restore` makes the same core again."""
        raise NotImplementedError

    @classmethod
    def restore(
        cls, config: Config, problems: int, eval_sets: Sequence[EvalSet], state: dict[str, Any]
    ) -> Core:
        """The core that `state` was taken of; its next decisions are the same, bit for bit."""
        raise NotImplementedError

    @property
    def accounts(self) -> Accounts:
        """Every issued task and how it ended."""
        raise NotImplementedError

    def pools(self) -> dict[str, int]:
        """Training problems by where they are: unseen, heap, solved, unsolved, cooling, in_flight."""
        raise NotImplementedError

    @property
    def version(self) -> Version | None:
        """The weights that the next batch changes; None before the first LearnerReady."""
        raise NotImplementedError

    @property
    def roster(self) -> dict[str, dict[str, Any]]:
        """Joined actors: state, open (tasks), capacity, partition, tokens, seconds (by state)."""
        raise NotImplementedError

    @property
    def counters(self) -> dict[str, int]:
        """Events applied, by type."""
        raise NotImplementedError

    @property
    def notes(self) -> dict[str, int]:
        """What was unusual, by kind: dead letters, late outcomes, re-issues, …"""
        raise NotImplementedError

    @property
    def issued(self) -> dict[tuple[str, str], int]:
        """Tasks issued, by (purpose, reason)."""
        raise NotImplementedError

    @property
    def seconds(self) -> float:
        """Log time: the sum of the ticks."""
        raise NotImplementedError

    @property
    def waiting_for(self) -> str:
        """What the run waits for now, for people."""
        raise NotImplementedError

    @property
    def wanted_slots(self) -> int:
        """Tasks that could run at this moment, were there slots for all of them."""
        raise NotImplementedError
