"""The response to FetchAsReplica, built by hand.  No I/O.

Record bytes go out as the views that the log hands out, as in `kdirect.format.datapath`; a test
compares the bytes with what the schema-driven decoder makes of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kdirect.format.datapath import uvarint

_HEAD = struct.Struct(">hi")  # error code, session id
_PARTITION = struct.Struct(">ihiqqq")  # as the fields of `CopiedPartition`


class CopiedPartition(NamedTuple):
    """One partition of the response.  `segment` is the base offset of the segment that holds the
    records; `buffers` hold whole batches."""

    partition: int
    error: int
    leader_epoch: int
    high_watermark: int
    log_start_offset: int
    segment: int
    buffers: Sequence[Any]


def fetch_as_replica_response(
    error: int, session: int, topics: Iterable[tuple[str, Sequence[CopiedPartition]]]
) -> list[Any]:
    """The body as a list of buffers, in order."""
    topics = list(topics)
    out: list[Any] = []
    piece = bytearray(_HEAD.pack(error, session)) + uvarint(len(topics) + 1)
    for name, partitions in topics:
        text = name.encode()
        piece += uvarint(len(text) + 1) + text + uvarint(len(partitions) + 1)
        for row in partitions:
            piece += _PARTITION.pack(*row[:6])
            size = sum(len(buffer) for buffer in row.buffers)
            piece += uvarint(size + 1)
            if size:
                out.append(piece)
                out.extend(row.buffers)
                piece = bytearray()
            piece += b"\0"
        piece += b"\0"
    piece += b"\0"
    out.append(piece)
    return out
