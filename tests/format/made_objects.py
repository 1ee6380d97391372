"""Objects for tests, small and complete, and a second writer of their bytes that shares nothing
with the one under test.
"""

from __future__ import annotations

import struct
import uuid
from typing import Any

from kafka.record.util import calc_crc32c

from kdirect.format.segment_object import Section, SegmentFacts, SegmentIdentity

BASE = 1000
TIME = 1_700_000_000_000
IDENTITY = SegmentIdentity(
    cluster_id="bVJ2c1JxTkJ-_dPR0xHQQg",
    topic="flights.raw",
    topic_id=uuid.UUID("7d2e6a0c-43b1-4c52-9fa2-2f1e0b1c3d4e"),
    partition=7,
    segment_id=uuid.UUID("00112233-4455-6677-8899-aabbccddeeff"),
)
EPOCHS = ((3, BASE), (5, BASE + 6))


def batches(ref: Any, count: int = 4, records: int = 3, value: bytes = b"v" * 30) -> list[bytes]:
    """Batches that follow each other from BASE on; the second half has epoch 5."""
    return [
        ref.simple(
            [(b"k", value)] * records,
            base_offset=BASE + i * records,
            leader_epoch=3 if i * records < 6 else 5,
            base_timestamp=TIME + i,
            max_timestamp=TIME + i + 2,
        )
        for i in range(count)
    ]


def sections(logs: list[bytes], records: int = 3) -> dict[Section, bytes]:
    """Indexes of these batches: an entry for each but the first."""
    starts = [sum(map(len, logs[:i])) for i in range(len(logs))]
    last = [i * records + records - 1 for i in range(len(logs))]
    return {
        Section.OFFSET_INDEX: b"".join(
            struct.pack(">II", last[i], starts[i]) for i in range(1, len(logs))
        ),
        Section.TIME_INDEX: b"".join(
            struct.pack(">qI", TIME + i + 2, last[i]) for i in range(1, len(logs))
        ),
        Section.TRANSACTION_INDEX: struct.pack(">hqqqq", 0, 9, BASE - 5, BASE + 2, BASE + 3),
        Section.PRODUCERS: b"a snapshot",
        Section.LEADER_EPOCHS: b"0\n2\n3 1000\n5 1006\n",
        Section.TOPIC: b'{"partitions": 9, "configs": {"retention.ms": "-1"}}',
    }


def facts(logs: list[bytes], records: int = 3, **changes: Any) -> SegmentFacts:
    values: dict[str, Any] = {
        "identity": IDENTITY,
        "base_offset": BASE,
        "end_offset": BASE + len(logs) * records,
        "log_bytes": sum(map(len, logs)),
        "max_timestamp_ms": TIME + len(logs) + 1,
        "min_timestamp_ms": TIME,
        "broker_id": 2,
        "leader_epoch": 6,
        **changes,
    }
    return SegmentFacts(**values)


def write(f: SegmentFacts, log: bytes, parts: dict[Section, bytes], version: int = 1) -> bytes:
    """The whole object, as the diagram in `kdirect.format.layout` has it."""
    out, table = log, struct.pack("<HHIQQ", 0, 0, calc_crc32c(log), 0, len(log))
    for kind in range(1, 7):
        data = parts.get(Section(kind), b"")
        table += struct.pack("<HHIQQ", kind, 0, calc_crc32c(data), len(out), len(data))
        out += data
    i = f.identity
    cluster, topic = i.cluster_id.encode(), i.topic.encode()
    footer = struct.pack("<HHiii", version, 7, f.broker_id, f.leader_epoch, i.partition)
    footer += struct.pack(
        "<qqqq", f.base_offset, f.end_offset, f.max_timestamp_ms, f.min_timestamp_ms
    )
    footer += i.topic_id.bytes + i.segment_id.bytes
    footer += struct.pack("<HHI", len(cluster), len(topic), 0) + table + cluster + topic
    return out + with_trailer(footer)


def with_trailer(footer: bytes) -> bytes:
    return footer + struct.pack("<II", len(footer), calc_crc32c(footer)) + b"KDSEGEND"


def with_footer(data: bytes, change: Any) -> bytes:
    """The object with what `change` makes of its footer, and a trailer that fits."""
    (length,) = struct.unpack_from("<I", data, len(data) - 16)
    footer = bytearray(data[-16 - length : -16])
    change(footer)
    return data[: -16 - length] + with_trailer(bytes(footer))
