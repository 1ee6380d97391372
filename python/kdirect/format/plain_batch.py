"""One record batch of a few records, without Arrow.  No I/O.

For batches that are rare and small: others are encoded by `kdirect.format.encode` and
`kdirect.client.gather`, one record alone by `kdirect.format.batch.encode_single_bytes`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from kdirect.format.batch import crc32c

# Of record batch v2: base offset, length, leader epoch, magic, CRC; then, which the CRC is of,
# attributes, last offset delta, first and last time, producer id, its epoch, sequence, count.
_HEAD = struct.Struct(">qiibI")
_BODY = struct.Struct(">hiqqqhii")
_BEFORE_LENGTH = 12


def encode_records(rows: Sequence[tuple[bytes | None, bytes | None]], now_ms: int) -> bytes:
    """An uncompressed batch of (key, value) records, all of the same time (ms since 1970); None is
    a null key or value.  At least one row."""
    records = bytearray()
    for delta, (key, value) in enumerate(rows):
        body = b"".join(
            (b"\0", _varint(0), _varint(delta), _optional(key), _optional(value), _varint(0))
        )
        records += _varint(len(body)) + body
    covered = _BODY.pack(0, len(rows) - 1, now_ms, now_ms, -1, -1, -1, len(rows)) + records
    length = _HEAD.size - _BEFORE_LENGTH + len(covered)
    return _HEAD.pack(0, length, -1, 2, crc32c(covered)) + covered


def _varint(value: int) -> bytes:
    """Zigzag encoded."""
    rest = value << 1 if value >= 0 else (-value << 1) - 1
    out = bytearray()
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)
    return bytes(out)


def _optional(field: bytes | None) -> bytes:
    return _varint(-1) if field is None else _varint(len(field)) + field
