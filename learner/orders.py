"""What rank 0 tells every rank to do next.

Invariant: each order is carried out by all ranks at once, in the same order, so that collectives
meet; rank 0 alone decides.
"""

from __future__ import annotations

import msgspec

from protocol.versions import Version


class Idle(msgspec.Struct, frozen=True, tag=True):
    """Nothing yet. Said often enough that no rank waits in vain for its deadline."""


class Save(msgspec.Struct, frozen=True, tag=True):
    """Write the model into `directory`."""

    directory: str


class Train(msgspec.Struct, frozen=True, tag=True):
    """One optimizer step on the groups whose records are `groups`."""

    version: Version
    groups: list[bytes]


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The run is over for this learner, or `error` ended rank 0."""

    error: str = ""


Order = Idle | Save | Train | Leave


def encode(order: Order) -> bytes:
    """The order as bytes."""
    return msgspec.msgpack.encode(order)


def decode(raw: bytes) -> Order:
    """The order in `raw`, as `encode` made it."""
    order: Order = msgspec.msgpack.decode(raw, type=Order)
    return order
