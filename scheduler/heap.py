"""An addressable max-heap of problems on the C `heapq`.

Invariant: an entry is valid exactly when its id is the one that the heap holds for its problem;
`update` and `remove` only change that id, so what they leave behind is skipped when it comes to
the top, and removed for good as soon as it outnumbers half of the valid entries. So the size stays
O(valid entries), and no decision depends on what is left behind.

An entry is one integer, so that a million of them take 60 bytes each and compare in C: from the
top bit down the priority (largest first), a random 62-bit number that breaks ties and is the id of
the entry, and the problem.
"""

from __future__ import annotations

import heapq
import struct
from array import array
from collections.abc import Iterator
from random import Random
from typing import Any

from scheduler.flat import dump, load

ID_BITS = 62
PROBLEM_BITS = 32
_SHIFT = ID_BITS + PROBLEM_BITS
_ID_MASK = (1 << ID_BITS) - 1
_PROBLEM_MASK = (1 << PROBLEM_BITS) - 1
_SMALLEST_COMPACTED = 64
_DOUBLE, _INT64 = struct.Struct("<d"), struct.Struct("<q")


def _descending(priority: float) -> int:
    """An integer ≥ 0 that is the smaller, the greater the float is (NaN excluded)."""
    # Bits of an IEEE double, read as a signed integer, rise with it; negative ones fall.
    (bits,) = _INT64.unpack(_DOUBLE.pack(priority + 0.0))
    if bits < 0:
        bits ^= 0x7FFF_FFFF_FFFF_FFFF
    result: int = (1 << 63) - bits
    return result


class AddressableHeap:
    """Problems 0 … n−1 by priority, greatest first; equal ones in random order."""

    def __init__(self, problems: int, rng: Random) -> None:
        """`rng` gives the entry ids; 16 bytes a problem, and about 60 for each that is in it."""
        if problems > 1 << PROBLEM_BITS:
            raise ValueError(f"problems: {problems} is more than {1 << PROBLEM_BITS}")
        self._rng = rng
        self._priority = array("d", bytes(8 * problems))
        self._id = array("q", bytes(8 * problems))
        self._entries: list[int] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, problem: int) -> bool:
        return self._id[problem] != 0

    def push(self, problem: int, priority: float) -> None:
        """Add a problem. Raises ValueError if it is there already."""
        if self._id[problem]:
            raise ValueError(f"problem {problem} is in the heap already; use update")
        self._add(problem, priority)
        self._size += 1

    def update(self, problem: int, priority: float) -> None:
        """Change the priority of a problem that is there. Raises KeyError if it is not."""
        if not self._id[problem]:
            raise KeyError(f"problem {problem} is not in the heap")
        self._add(problem, priority)
        self._compact()

    def remove(self, problem: int) -> float:
        """Take a problem out; returns its priority. Raises KeyError if it is not there."""
        if not self._id[problem]:
            raise KeyError(f"problem {problem} is not in the heap")
        self._id[problem] = 0
        self._size -= 1
        self._compact()
        return self._priority[problem]

    def peek(self) -> tuple[int, float]:
        """The problem of greatest priority, and that priority. Raises IndexError if empty."""
        problem = self._top()
        return problem, self._priority[problem]

    def pop(self) -> tuple[int, float]:
        """Take out the problem of greatest priority. Raises IndexError if empty."""
        problem = self._top()
        heapq.heappop(self._entries)
        self._id[problem] = 0
        self._size -= 1
        return problem, self._priority[problem]

    def priority(self, problem: int) -> float:
        """Priority of a problem that is there. Raises KeyError if it is not."""
        if not self._id[problem]:
            raise KeyError(f"problem {problem} is not in the heap")
        return self._priority[problem]

    def __iter__(self) -> Iterator[int]:
        """The problems that are there, by number."""
        return (problem for problem, entry in enumerate(self._id) if entry)

    def state(self) -> dict[str, Any]:
        """What `load` needs; entries follow from it."""
        return {"priority": dump(self._priority), "id": dump(self._id)}

    def load(self, state: dict[str, Any]) -> None:
        """Become the heap that `state` was taken of."""
        self._priority = load("d", state["priority"])
        self._id = load("q", state["id"])
        self._entries = [self._entry(p) for p, entry in enumerate(self._id) if entry]
        self._size = len(self._entries)
        heapq.heapify(self._entries)

    def _add(self, problem: int, priority: float) -> None:
        self._priority[problem] = priority
        self._id[problem] = self._rng.getrandbits(ID_BITS) or 1
        heapq.heappush(self._entries, self._entry(problem))

    def _entry(self, problem: int) -> int:
        order = _descending(self._priority[problem])
        return (order << _SHIFT) | (self._id[problem] << PROBLEM_BITS) | problem

    def _top(self) -> int:
        entries, ids = self._entries, self._id
        while entries:
            entry = entries[0]
            problem = entry & _PROBLEM_MASK
            if (entry >> PROBLEM_BITS) & _ID_MASK == ids[problem]:
                return problem
            heapq.heappop(entries)
        raise IndexError("the heap is empty")

    def _compact(self) -> None:
        if len(self._entries) > 1.5 * self._size + _SMALLEST_COMPACTED:
            ids = self._id
            self._entries = [
                entry
                for entry in self._entries
                if (entry >> PROBLEM_BITS) & _ID_MASK == ids[entry & _PROBLEM_MASK]
            ]
            heapq.heapify(self._entries)
