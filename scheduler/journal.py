"""What the core says while it applies an event: the commands, and counts of what was unusual."""

from __future__ import annotations

from typing import Literal

from protocol.messages import Assigned, Rejoin, RunEnded
from scheduler.commands import Command, DeadLetter, Say, SendControl


class Journal:
    """The commands of the event at hand, in order, and notes: counts over the whole run."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.notes: dict[str, int] = {}

    def begin(self) -> list[Command]:
        """A new event is applied; returns the list that will hold its commands."""
        self.commands = []
        return self.commands

    def note(self, name: str) -> None:
        """Count something unusual."""
        self.notes[name] = self.notes.get(name, 0) + 1

    def say(self, level: Literal["info", "warning", "error"], text: str) -> None:
        """One line for the user."""
        self.commands.append(Say(level, text))

    def put_aside(self, why: str) -> None:
        """The event at hand does not fit the state."""
        self.note("dead_letters")
        self.commands.append(DeadLetter(why))

    def control(self, message: Assigned | Rejoin | RunEnded) -> None:
        """Send on the control partition."""
        self.commands.append(SendControl(message))
