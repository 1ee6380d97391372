"""Whether produced records have keys, which a compacted topic asks of them.

Law of the file: pure, and of bytes that nobody changes.  A record without a key could never be
replaced, so Kafka refuses the request (INVALID_RECORD), and so does this log.  Damaged records are
refused with them: they could not be compacted later.

Compressed records have to be decompressed for that, which takes long: never on an event loop.
Producers over RDMA change bytes while they are looked at, so they get no access to the head of a
compacted log (`kdirect.broker.produce_access`); they produce by Write+Send's messages or TCP.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from kdirect.errors import KdirectError
from kdirect.format import layout
from kdirect.format.batch import BatchInfo, iterate_batches
from kdirect.format.compression import Decompressor
from kdirect.log.clean_run import (
    ALL_KEYED,
    COMPRESSED,
    keyless_records,
    look_for_keys,
    records_are_keyed,
)

INVALID_RECORD = 87  # Kafka's code
MOST_NAMED = 1000  # records of one request that are named; Kafka names all


class KeylessRefusal(NamedTuple):
    """What the log answers to a request with records that have no key; as a `CommitResult` that
    names them.  `records`: their numbers in their batch, in their order; none where a record is
    damaged."""

    records: tuple[int, ...]
    error: int = INVALID_RECORD
    batches: int = 0
    duplicate: bool = False
    base_offset: int = -1
    last_offset: int = -1
    end_position: int = -1
    log_append_time: int = -1


def are_keyed_nowait(data: Any) -> bool | None:
    """Has each record of the batches a key?  None: they are compressed."""
    found = look_for_keys(data)
    return None if found == COMPRESSED else found == ALL_KEYED


def are_keyed(data: Any, max_plain_bytes: int) -> bool:
    """The same of compressed batches too, whose records have at most so many bytes together."""
    quick = are_keyed_nowait(data)
    if quick is not None:
        return quick
    data = bytes(data)
    try:
        for info, plain in _plain_batches(data, max_plain_bytes):
            if not (info.is_control or records_are_keyed(plain, info.records_count)):
                return False
    except KdirectError:
        return False
    return True


def refuse_keyless(data: Any, max_plain_bytes: int) -> KeylessRefusal:
    """The refusal of a request that is not keyed; it names the records without a key."""
    found: list[int] = []
    try:
        for info, plain in _plain_batches(bytes(data), max_plain_bytes):
            if not info.is_control:
                found += keyless_records(plain, info.records_count, MOST_NAMED - len(found))
    except KdirectError:
        pass  # damaged: nothing more is named
    return KeylessRefusal(tuple(found))


def refuse_keyless_nowait(data: Any) -> KeylessRefusal | None:
    """The same of batches of which none is compressed; None: one is, so it is a thread's work."""
    data = bytes(data)
    try:
        compressed = any(_codec(info) for info in iterate_batches(data, check_crc=False))
    except KdirectError:
        compressed = True  # or there is no telling
    return None if compressed else refuse_keyless(data, 0)


def _codec(info: BatchInfo) -> int:
    return info.attributes & layout.ATTRIBUTE_CODEC_MASK


def _plain_batches(data: bytes, max_plain_bytes: int) -> Iterator[tuple[BatchInfo, bytes]]:
    """The batches with their records, decompressed.  FormatError, CorruptLogError."""
    tool = Decompressor()
    for info in iterate_batches(data):
        start = info.position + layout.BATCH_HEADER_BYTES
        plain = data[start : info.position + info.size]
        if codec := _codec(info):
            plain = bytes(tool.run(codec, plain, max_plain_bytes))
            max_plain_bytes -= len(plain)
        yield info, plain
