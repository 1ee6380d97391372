"""Whether produced records have keys, which a compacted topic asks of them.

Law of the file: pure, and of bytes that nobody changes.  A record without a key could never be
replaced, so Kafka refuses the request (INVALID_RECORD), and so does this log.  Damaged records are
refused with them: they could not be compacted later.

Compressed records have to be decompressed for that, which takes long: never on an event loop.
Producers over RDMA change bytes while they are looked at, so they get no access to the head of a
compacted log (`kdirect.broker.produce_access`); they produce by Write+Send's messages or TCP.
"""

from __future__ import annotations

from typing import Any

from kdirect.errors import KdirectError
from kdirect.format import layout
from kdirect.format.batch import iterate_batches
from kdirect.format.compression import Decompressor
from kdirect.log.clean_run import (
    ALL_KEYED,
    COMPRESSED,
    look_for_keys,
    records_are_keyed,
)


def are_keyed_nowait(data: Any) -> bool | None:
    """Has each record of the batches a key?  None: they are compressed."""
    found = look_for_keys(data)
    return None if found == COMPRESSED else found == ALL_KEYED


def are_keyed(data: Any, max_plain_bytes: int) -> bool:
    """The same of compressed batches too, whose records have at most so many bytes each."""
    quick = are_keyed_nowait(data)
    if quick is not None:
        return quick
    data = bytes(data)
    tool = Decompressor()
    try:
        for info in iterate_batches(data):
            start = info.position + layout.BATCH_HEADER_BYTES
            body = data[start : info.position + info.size]
            codec = info.attributes & layout.ATTRIBUTE_CODEC_MASK
            plain = tool.run(codec, body, max_plain_bytes) if codec else body
            if not (info.is_control or records_are_keyed(plain, info.records_count)):
                return False
    except KdirectError:
        return False
    return True
