"""Token ids and log-probs as raw little-endian arrays: int32 and float32, 4 bytes an element."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable

ITEM_BYTES = 4


def pack_int32(values: Iterable[int]) -> bytes:
    """Little-endian int32 bytes of `values`. Raises OverflowError beyond 32 bits."""
    return _little(array("i", values)).tobytes()


def unpack_int32(raw: bytes) -> array[int]:
    """The int32 array in `raw`. Raises ValueError if its length is no multiple of 4."""
    return _unpack("i", raw)


def pack_float32(values: Iterable[float]) -> bytes:
    """Little-endian float32 bytes of `values`."""
    return _little(array("f", values)).tobytes()


def unpack_float32(raw: bytes) -> array[float]:
    """The float32 array in `raw`. Raises ValueError if its length is no multiple of 4."""
    return _unpack("f", raw)


def all_finite(raw: bytes) -> bool:
    """Is no element of the float32 array in `raw` NaN or infinite?

    A sum of float32 values in double precision cannot overflow, so it is finite if they all are.
    """
    return math.isfinite(sum(unpack_float32(raw)))


def _unpack(code: str, raw: bytes) -> array:  # type: ignore[type-arg]
    values = array(code)
    values.frombytes(raw)
    return _little(values)


def _little(values: array) -> array:  # type: ignore[type-arg]
    if sys.byteorder == "big":
        values.byteswap()
    return values
