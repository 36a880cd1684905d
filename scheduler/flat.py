"""Flat arrays and random states as bytes and back, for the scheduler's snapshots.

Invariant: the bytes are little-endian on every machine, and `load(dump(x)) == x`.
"""

from __future__ import annotations

import sys
from array import array
from random import Random
from typing import Any

_LITTLE = sys.byteorder == "little"


def dump(values: array[Any]) -> bytes:
    """The items as little-endian bytes."""
    if not _LITTLE:
        values = values[:]
        values.byteswap()
    return values.tobytes()


def load(typecode: str, data: bytes) -> array[Any]:
    """The array of which `dump` made `data`."""
    values: array[Any] = array(typecode, data)
    if not _LITTLE:
        values.byteswap()
    return values


def dump_random(rng: Random) -> bytes:
    """State of a generator of which only integers and uniform floats were drawn: 625 words."""
    _, words, _ = rng.getstate()
    return dump(array("I", words))


def load_random(rng: Random, data: bytes) -> None:
    """Give `rng` the state of which `dump_random` made `data`."""
    rng.setstate((3, tuple(load("I", data)), None))
