"""A learner's generation number: taken from the run directory, never computed.

Invariant: no two starts of a learner ever share one, for the folder of the number is created
exclusively; so no version of one start is ever met again in another.
"""

from __future__ import annotations

from pathlib import Path


def take_generation(generations: Path) -> int:
    """Create and return the next number: one above the highest there, 0 in an empty folder.

    Another learner that starts at the same moment gets another number. Raises OSError if the
    folder cannot be written.
    """
    while True:
        taken = [int(p.name) for p in generations.iterdir() if p.name.isdecimal()]
        number = max(taken, default=-1) + 1
        try:
            (generations / str(number)).mkdir()
        except FileExistsError:
            continue
        return number
