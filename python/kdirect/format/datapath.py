"""Responses to Fetch and Produce, built by hand.  No I/O.

The two responses of the data path: record bytes of a Fetch go out as the views that the log hands
out, never through an encoder.  Field by field these follow Kafka's FetchResponse.json (versions 4
to 12) and ProduceResponse.json (versions 0 to 10); a test compares them with the schema-driven
decoder.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

_I32 = struct.Struct(">i")
_I16 = struct.Struct(">h")
_FETCH_HEAD = struct.Struct(">ihi")  # throttle time, error code, session id
_FETCH_PARTITION_V4 = struct.Struct(
    ">ihqq"
)  # partition, error code, high watermark, last stable offset
_FETCH_PARTITION_V5 = struct.Struct(">ihqqq")  # ... log start offset
_NO_REPLICA = _I32.pack(-1)
_PRODUCED_V0 = struct.Struct(">ihq")  # partition, error code, base offset
_PRODUCED_V2 = struct.Struct(">ihqq")  # ... log append time
_PRODUCED_V5 = struct.Struct(">ihqqq")  # ... log start offset


class Fetched(NamedTuple):
    """One partition of a Fetch response.  `buffers` hold whole batches, `size` bytes in all."""

    partition: int
    error: int
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    buffers: Sequence[Any]
    size: int


class Produced(NamedTuple):
    """One partition of a Produce response."""

    partition: int
    error: int
    base_offset: int
    log_append_time: int
    log_start_offset: int
    message: str | None


def uvarint(value: int) -> bytes:
    """An unsigned variable-length integer."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def fetch_response(
    version: int,
    error: int,
    topics: Iterable[tuple[str, Sequence[Fetched]]],
    committed_only: bool = False,
) -> list[Any]:
    """The body as a list of buffers, in order.  The aborted transactions, of which there are none,
    are an empty list for a consumer that reads what is committed only, and null for others, as in
    Kafka."""
    topics = list(topics)
    out: list[Any] = []
    flexible = version >= 12
    aborted = uvarint(int(committed_only)) if flexible else _I32.pack(0 if committed_only else -1)
    before_records = aborted + _NO_REPLICA if version >= 11 else aborted
    piece = bytearray(_FETCH_HEAD.pack(0, error, 0) if version >= 7 else _I32.pack(0))
    piece += uvarint(len(topics) + 1) if flexible else _I32.pack(len(topics))
    for name, partitions in topics:
        text = name.encode()
        if flexible:
            piece += uvarint(len(text) + 1) + text + uvarint(len(partitions) + 1)
        else:
            piece += _I16.pack(len(text)) + text + _I32.pack(len(partitions))
        for p in partitions:
            if version >= 5:
                piece += _FETCH_PARTITION_V5.pack(
                    p.partition, p.error, p.high_watermark, p.last_stable_offset, p.log_start_offset
                )
            else:
                piece += _FETCH_PARTITION_V4.pack(
                    p.partition, p.error, p.high_watermark, p.last_stable_offset
                )
            if flexible:
                piece += before_records + uvarint(p.size + 1)
            else:
                piece += before_records + _I32.pack(p.size)
            if p.size:
                out.append(piece)
                out.extend(p.buffers)
                piece = bytearray()
            if flexible:
                piece += b"\0"
        if flexible:
            piece += b"\0"
    if flexible:
        piece += b"\0"
    if piece:
        out.append(piece)
    return out


def produce_response(version: int, topics: Sequence[tuple[str, Sequence[Produced]]]) -> bytes:
    """The body."""
    flexible = version >= 9
    out = bytearray(uvarint(len(topics) + 1) if flexible else _I32.pack(len(topics)))
    for name, partitions in topics:
        text = name.encode()
        if flexible:
            out += uvarint(len(text) + 1) + text + uvarint(len(partitions) + 1)
        else:
            out += _I16.pack(len(text)) + text + _I32.pack(len(partitions))
        for p in partitions:
            if version >= 5:
                out += _PRODUCED_V5.pack(
                    p.partition, p.error, p.base_offset, p.log_append_time, p.log_start_offset
                )
            elif version >= 2:
                out += _PRODUCED_V2.pack(p.partition, p.error, p.base_offset, p.log_append_time)
            else:
                out += _PRODUCED_V0.pack(p.partition, p.error, p.base_offset)
            if version >= 8:
                message = None if p.message is None else p.message.encode()
                if flexible:  # no record errors, the message, no tags
                    out += (
                        b"\1"
                        + (b"\0" if message is None else uvarint(len(message) + 1) + message)
                        + b"\0"
                    )
                else:
                    out += _I32.pack(0) + (
                        _I16.pack(-1) if message is None else _I16.pack(len(message)) + message
                    )
        if flexible:
            out += b"\0"
    if version >= 1:
        out += _I32.pack(0)
    if flexible:
        out += b"\0"
    return bytes(out)
