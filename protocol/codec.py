"""Messages as bytes and back: msgpack on the wire, msgspec for types.

Invariant: `decode` returns a valid message or raises ProtocolError, whatever the bytes; it never
allocates more than a constant multiple of the input and refuses inputs above the limit unread.
"""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec

from protocol.messages import AnyMessage, Message

SCHEMA = 1
DEFAULT_MAX_BYTES = 32 * 1024 * 1024
# Of one list or map. An actor's lists have at most group_size (65,536) entries.
MAX_ITEMS = 131_072


class ProtocolError(Exception):
    """Bytes that are no message of this protocol. Says what is wrong and where."""


def encode(message: Message, *, max_bytes: int = DEFAULT_MAX_BYTES) -> bytes:
    """The msgpack bytes of `message`.

    Raises ProtocolError above `max_bytes`, or where free content (`Task.answer`, `Task.extra`)
    cannot be written: nested too deeply, or an integer beyond 64 bits.
    """
    try:
        body = msgspec.to_builtins(message, builtin_types=(bytes,))
        body["schema"] = SCHEMA
        raw: bytes = msgpack.packb(body, use_bin_type=True)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"{type(message).__name__}: cannot be encoded: {error}") from error
    if len(raw) > max_bytes:
        raise ProtocolError(
            f"{type(message).__name__}: {len(raw)} bytes, above the limit of {max_bytes} "
            "(kafka.max_message_bytes); lower rollout.max_tokens or rollout.group_size, "
            "or raise the limit on every process and topic"
        )
    return raw


def decode(raw: bytes, kind: Any = AnyMessage, *, max_bytes: int = DEFAULT_MAX_BYTES) -> Any:
    """The message in `raw`.

    Args:
        raw: the value of one Kafka record.
        kind: message type or union of types that may come here.
        max_bytes: larger inputs are refused unread.

    Raises:
        ProtocolError: no msgpack, unknown schema or tag, missing field, wrong type, number out of
            range, inconsistent lengths, trailing or too many bytes.
    """
    if len(raw) > max_bytes:
        raise ProtocolError(f"{len(raw)} bytes, above the limit of {max_bytes}")
    try:
        body = msgpack.unpackb(
            raw,
            raw=False,
            strict_map_key=True,
            max_str_len=max_bytes,
            max_bin_len=max_bytes,
            # An item takes a byte at least, so that a declared length allocates no more than input.
            max_array_len=min(MAX_ITEMS, len(raw)),
            max_map_len=min(MAX_ITEMS, len(raw)),
            max_ext_len=0,
        )
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError, MemoryError) as error:
        raise ProtocolError(f"not msgpack: {str(error) or type(error).__name__}") from error
    if not isinstance(body, dict):
        raise ProtocolError(f"a message is a map; found {type(body).__name__}")
    schema = body.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        raise ProtocolError(
            f"unknown schema {schema!r} - at `$.schema`; this release reads {SCHEMA}"
        )
    try:
        return msgspec.convert(body, type=kind)
    except (msgspec.ValidationError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"{body.get('type')!s:.64}: {error}") from error
