"""Responses to Fetch and Produce, built by hand.  No I/O.

The two responses of the data path: record bytes of a Fetch go out as the views that the log hands
out, never through an encoder.  Field by field these follow Kafka's FetchResponse.json (versions 4
to 18) and ProduceResponse.json (versions 0 to 13); a test compares them with the schema-driven
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
_DIVERGING = struct.Struct(">iq")  # leader epoch, its end offset
_LEADER = struct.Struct(">ii")  # broker, leader epoch
_ABORTED = struct.Struct(">qq")  # producer id, first offset
_PRODUCED_V0 = struct.Struct(">ihq")  # partition, error code, base offset
_PRODUCED_V2 = struct.Struct(">ihqq")  # ... log append time
_PRODUCED_V5 = struct.Struct(">ihqqq")  # ... log start offset


class Fetched(NamedTuple):
    """One partition of a Fetch response.  `buffers` hold whole batches, `size` bytes in all.

    Of a cluster: `preferred` is the broker where this consumer should read (version 11 and later,
    KIP-392); `diverging` the (leader epoch, end offset) from which on the fetching replica has
    other records than the leader (version 12 and later).  `aborted`: (producer id, first offset) of
    the aborted transactions of which a consumer has to know that reads what is committed.
    `leader`: the (broker, leader epoch) to turn to after an error, told from version 16 on."""

    partition: int
    error: int
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    buffers: Sequence[Any]
    size: int
    preferred: int = -1
    diverging: tuple[int, int] | None = None
    aborted: Sequence[tuple[int, int]] = ()
    leader: tuple[int, int] | None = None


class NodeEndpoint(NamedTuple):
    """Where clients reach a broker, as Produce (version 10) and Fetch (version 16) name it after an
    error (KIP-951)."""

    node_id: int
    host: str
    port: int
    rack: str | None = None


class Produced(NamedTuple):
    """One partition of a Produce response.  `leader`: the (broker, leader epoch) to turn to after
    an error, told from version 10 on (KIP-951).  `record_errors`: which records of the batch it was
    refused for, and why, told from version 8 on (KIP-467)."""

    partition: int
    error: int
    base_offset: int
    log_append_time: int
    log_start_offset: int
    message: str | None
    leader: tuple[int, int] | None = None
    record_errors: Sequence[tuple[int, str]] = ()


def _tags(fields: Sequence[tuple[int, bytes]]) -> bytes:
    """The tagged fields of a structure, in the order of their numbers."""
    out = bytearray(uvarint(len(fields)))
    for number, value in fields:
        out += uvarint(number) + uvarint(len(value)) + value
    return bytes(out)


def _compact_text(text: str | None) -> bytes:
    if text is None:
        return b"\0"
    encoded = text.encode()
    return uvarint(len(encoded) + 1) + encoded


def _text(text: str | None) -> bytes:
    if text is None:
        return _I16.pack(-1)
    encoded = text.encode()
    return _I16.pack(len(encoded)) + encoded


def _record_errors(errors: Sequence[tuple[int, str]], *, flexible: bool) -> bytes:
    if not flexible:
        rows = (_I32.pack(number) + _text(why) for number, why in errors)
        return _I32.pack(len(errors)) + b"".join(rows)
    rows = (_I32.pack(number) + _compact_text(why) + b"\0" for number, why in errors)
    return uvarint(len(errors) + 1) + b"".join(rows)


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
    topics: Iterable[tuple[Any, Sequence[Fetched]]],
    committed_only: bool = False,
    *,
    session_id: int = 0,
    nodes: Sequence[NodeEndpoint] = (),
) -> list[Any]:
    """The body as a list of buffers, in order.  From version 13 on topics are named by the 16 bytes
    of their ids.  The aborted transactions are a list, empty or not, for a consumer that reads what
    is committed only, and null for others, as in Kafka.  `nodes`: the brokers that partitions name
    as their leaders."""
    topics = list(topics)
    out: list[Any] = []
    flexible = version >= 12
    aborted = uvarint(int(committed_only)) if flexible else _I32.pack(0 if committed_only else -1)
    before_records = aborted + _NO_REPLICA if version >= 11 else aborted
    piece = bytearray(_FETCH_HEAD.pack(0, error, session_id) if version >= 7 else _I32.pack(0))
    piece += uvarint(len(topics) + 1) if flexible else _I32.pack(len(topics))
    for name, partitions in topics:
        piece += _topic_head(version >= 13, flexible, name, len(partitions))
        for p in partitions:
            if version >= 5:
                piece += _FETCH_PARTITION_V5.pack(
                    p.partition, p.error, p.high_watermark, p.last_stable_offset, p.log_start_offset
                )
            else:
                piece += _FETCH_PARTITION_V4.pack(
                    p.partition, p.error, p.high_watermark, p.last_stable_offset
                )
            if p.aborted:
                piece += _aborted_list(p.aborted, flexible=flexible)
                if version >= 11:
                    piece += _I32.pack(p.preferred)
            elif p.preferred >= 0 and version >= 11:
                piece += aborted + _I32.pack(p.preferred)
            else:
                piece += before_records
            piece += uvarint(p.size + 1) if flexible else _I32.pack(p.size)
            if p.size:
                out.append(piece)
                out.extend(p.buffers)
                piece = bytearray()
            if flexible:
                has_tags = p.diverging is not None or p.leader is not None
                piece += _fetched_tags(version, p) if has_tags else b"\0"
        if flexible:
            piece += b"\0"
    if flexible:
        piece += _node_tags(nodes) if version >= 16 and nodes else b"\0"
    if piece:
        out.append(piece)
    return out


def _topic_head(by_id: bool, flexible: bool, name: str | bytes, partitions: int) -> bytes:
    """How the rows of a topic begin: its name, or the bytes of its id, and how many there are."""
    text = name.encode() if isinstance(name, str) else name
    if by_id:
        return text + uvarint(partitions + 1)
    if flexible:
        return uvarint(len(text) + 1) + text + uvarint(partitions + 1)
    return _I16.pack(len(text)) + text + _I32.pack(partitions)


def _fetched_tags(version: int, fetched: Fetched) -> bytes:
    tags = []
    if fetched.diverging is not None:
        tags.append((0, _DIVERGING.pack(*fetched.diverging) + b"\0"))
    if fetched.leader is not None and version >= 16:
        tags.append((1, _LEADER.pack(*fetched.leader) + b"\0"))
    return _tags(tags)


def _aborted_list(aborted: Sequence[tuple[int, int]], *, flexible: bool) -> bytes:
    out = bytearray(uvarint(len(aborted) + 1) if flexible else _I32.pack(len(aborted)))
    for entry in aborted:
        out += _ABORTED.pack(*entry)
        if flexible:
            out += b"\0"
    return bytes(out)


def produce_response(
    version: int,
    topics: Sequence[tuple[str | bytes, Sequence[Produced]]],
    nodes: Sequence[NodeEndpoint] = (),
) -> bytes:
    """The body.  From version 13 on topics are named by the 16 bytes of their ids.  `nodes`: the
    brokers that its partitions name as their leaders."""
    flexible = version >= 9
    out = bytearray(uvarint(len(topics) + 1) if flexible else _I32.pack(len(topics)))
    for name, partitions in topics:
        out += _topic_head(version >= 13, flexible, name, len(partitions))
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
                out += _record_errors(p.record_errors, flexible=flexible)
                if flexible:  # the message, who leads
                    out += _compact_text(p.message)
                    if version >= 10 and p.leader is not None:
                        out += _tags([(0, _LEADER.pack(*p.leader) + b"\0")])
                    else:
                        out += b"\0"
                else:
                    out += _text(p.message)
        if flexible:
            out += b"\0"
    if version >= 1:
        out += _I32.pack(0)
    if flexible:
        out += _node_tags(nodes) if version >= 10 and nodes else b"\0"
    return bytes(out)


def _node_tags(nodes: Sequence[NodeEndpoint]) -> bytes:
    rows = bytearray(uvarint(len(nodes) + 1))
    for node in nodes:
        rows += _I32.pack(node.node_id) + _compact_text(node.host) + _I32.pack(node.port)
        rows += _compact_text(node.rack) + b"\0"
    return _tags([(0, bytes(rows))])
