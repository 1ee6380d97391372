"""The response to FetchAsReplica, built by hand.  No I/O.

Record bytes go out as the views that the log hands out, as in `kdirect.format.datapath`; a test
compares the bytes with what the schema-driven decoder makes of them.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kdirect.format.datapath import uvarint

_HEAD = struct.Struct(">hi")  # error code, session id
_PARTITION = struct.Struct(">ihiqqqqb")  # as the fields of `CopiedPartition`
_DENSE_FROM = struct.Struct(">BBBq")  # one tagged field: its number, its size, its value


class Push(enum.IntEnum):
    """What a leader says of writing into a follower's file."""

    NOTHING = 0
    OFFERED = 1  # the follower's log ends in the leader's last segment
    ENDED = 2  # nothing more is written under the present grant
    WANTS = 3  # the follower is to let the leader write more of the file
    WANTS_NEXT = 4  # the follower is to let the leader write the next file
    SEGMENTS = 5  # the follower's log ends below that: it may READ the segments that it lacks


class Feed(enum.IntEnum):
    """How a replica gets its records."""

    LEADS = 0  # from clients
    STOPPED = 1  # not at all: it is fenced, or compares its log with its leader's
    FETCHED = 2  # it fetches them over TCP
    READ = 3  # it READs sealed segments out of its leader's memory
    PUSHED = 4  # its leader writes into its file


class Feeding(NamedTuple):
    """How one replica gets its records; `transport` of READ and PUSHED, `reason` of the others,
    where there is something to say."""

    feed: Feed
    transport: str = ""
    reason: str = ""


class CopiedPartition(NamedTuple):
    """One partition of the response.  `segment` is the base offset of the segment that holds the
    records, `segment_bytes` what it may become; `push` is a `Push`; `buffers` hold whole
    batches.  `dense_from`: below it compaction may have removed records."""

    partition: int
    error: int
    leader_epoch: int
    high_watermark: int
    log_start_offset: int
    segment: int
    segment_bytes: int
    push: int
    buffers: Sequence[Any]
    dense_from: int = 0


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
            piece += _PARTITION.pack(*row[:8])
            size = sum(len(buffer) for buffer in row.buffers)
            piece += uvarint(size + 1)
            if size:
                out.append(piece)
                out.extend(row.buffers)
                piece = bytearray()
            piece += _DENSE_FROM.pack(1, 0, 8, row.dense_from) if row.dense_from else b"\0"
        piece += b"\0"
    piece += b"\0"
    out.append(piece)
    return out
