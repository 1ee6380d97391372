"""Columns that are views, as tests make them and look at them."""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Iterator

import pyarrow as pa

from kdirect.format import batch
from kdirect.format.codec import SCHEMA, SCHEMA_WITH_HEADERS, encode_records

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
INLINE = 12  # bytes of a value that a view holds itself
SIZES = (0, 1, 4, 11, 12, 13, 20, 100, 1000, 5000)


class Owned:
    """Bytes at an address that stay there as long as the object lives."""

    def __init__(self, data: bytes) -> None:
        self.memory = (ctypes.c_char * max(1, len(data))).from_buffer_copy(data or b"\0")
        self.address = ctypes.addressof(self.memory)
        self.end = self.address + len(data)

    def __len__(self) -> int:
        return self.end - self.address


def at_offset(data: bytes, offset: int) -> bytes:
    stamped = bytearray(data)
    batch.stamp(stamped, offset, 0)
    return bytes(stamped)


def some_bytes(rng: random.Random, null: float) -> bytes | None:
    """Bytes that repeat themselves: the encoder leaves batches as they are that do not shrink."""
    size = rng.choice(SIZES)
    return None if rng.random() < null else (rng.randbytes(4) * size)[:size]


def some_batches(rng: random.Random, codec: str | None = None) -> list[bytes]:
    """Batches that continue one another.  Nulls, keys and headers are in some of them only."""
    out, offset = [], 0
    for _ in range(rng.randrange(1, 9)):
        keys, nulls, headers = rng.choice((0, 0.5, 1)), rng.choice((0, 0, 0.3)), rng.random() < 0.3
        rows = [
            (
                some_bytes(rng, 1 - keys),
                some_bytes(rng, nulls),
                [(rng.choice("äbc"), some_bytes(rng, 0.2)) for _ in range(rng.randrange(3))]
                if headers
                else None,
                1_700_000_000_000 + i,
            )
            for i in range(rng.randrange(1, 40))
        ]
        out.append(at_offset(encode_records(rows, codec or rng.choice(CODECS)), offset))
        offset += len(rows)
    return out


def byte_columns(taken: pa.RecordBatch) -> list[pa.Array]:
    columns = [taken["key"], taken["value"]]
    if "headers" in taken.schema.names:
        columns.append(taken["headers"].values.field("value"))
    return columns


def long_views(column: pa.Array) -> Iterator[tuple[int, int, int]]:
    """(address, length, number of the data buffer) of each value that is not within its view."""
    validity, views, *data = column.buffers()
    raw = memoryview(views)
    for row in range(column.offset, column.offset + len(column)):
        length, _, number, offset = struct.unpack_from("=i4sii", raw, 16 * row)
        if validity is not None and not validity[row // 8] & 0xFF & (1 << row % 8):
            continue
        assert length >= 0
        if length > INLINE:
            assert 0 <= number < len(data) and 0 <= offset <= data[number].size - length
            yield data[number].address + offset, length, number


def check_places(taken: pa.RecordBatch, *owned: Owned) -> int:
    """That each data buffer lies in memory of `owned`, or is a decompressed batch if none is given;
    how many views refer to one."""
    count = 0
    for column in byte_columns(taken):
        assert column.type == pa.binary_view()
        for buffer in column.buffers()[2:]:
            assert not owned or any(
                o.address <= buffer.address and buffer.address + buffer.size <= o.end for o in owned
            )
        count += sum(1 for _ in long_views(column))
    return count


def as_copied(taken: pa.RecordBatch) -> pa.RecordBatch:
    """The rows with the types of the copying decoder."""
    if "headers" not in taken.schema.names:
        return taken.cast(SCHEMA)
    fields = list(SCHEMA_WITH_HEADERS)
    columns = [c.cast(f.type) for c, f in zip(taken.columns[:-1], fields[:-1], strict=True)]
    columns.append(pa.array(taken["headers"].to_pylist(), fields[-1].type))
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA_WITH_HEADERS)
