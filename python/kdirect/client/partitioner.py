"""Which partition a record goes to: Kafka's rule for keys, runs of rows for records without one.

Law: by default the same key goes to the same partition as from Kafka's Java producer (murmur2 of
the key's bytes, sign bit cleared, modulo the number of partitions), so jobs can move over with
their keys; `Keys` has librdkafka's other rules by their names.  Rows without a key go in runs of
neighbours to one partition after the other: batches stay large, and long inputs spread evenly.
"""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from kdirect.client.partitioner_kernel import fill_runs, hash_rows, murmur2, sort_rows
from kdirect.errors import ConfigError, FormatError, UnknownTopicError

if TYPE_CHECKING:
    import numpy

__all__ = [
    "PARTITIONERS",
    "STICKY_ROWS",
    "Keys",
    "Partitioner",
    "check_partition",
    "group_by_partition",
    "murmur2",
    "partition_for_key",
    "partition_for_keys",
]

STICKY_ROWS = 4096


def partition_for_key(key: bytes, partitions: int) -> int:
    """The partition of one key."""
    _check_count(partitions)
    return (murmur2(key) & 0x7FFFFFFF) % partitions


def partition_for_keys(keys: pa.Array | pa.ChunkedArray, partitions: int) -> numpy.ndarray:
    """The partition of each key as int32, -1 where the key is null.  Keys: binary, string, their
    large forms or fixed-size binary.

    ConfigError for another type or `partitions` below 1; FormatError when the array's offsets are
    broken.
    """
    return _array(_hash(keys, partitions)[0]).to_numpy(zero_copy_only=True)


PARTITIONERS = ("murmur2_random", "murmur2", "consistent_random", "consistent", "random")


class Keys:
    """How keys choose partitions.  `rule` is one of PARTITIONERS, librdkafka's names, or a function
    (key or None, partitions) -> partition.

    murmur2_random is Java's rule, and the default; consistent_random, librdkafka's own default,
    takes CRC-32.  In the ``_random`` rules a record without a key (for consistent_random also one
    with an empty key) has no preference, and goes where the producer's run is; in the others all
    such records go to one partition.
    """

    def __init__(self, rule: str | Callable[[bytes | None, int], int]) -> None:
        self.own = rule if callable(rule) else None
        self.nulls_too = self.own is not None or rule in ("murmur2", "consistent")
        self._crc = rule in ("consistent", "consistent_random")
        self._empty_too = rule == "consistent_random"
        self.hashed = rule != "random"
        self.is_default = rule == "murmur2_random"

    def of(self, key: bytes | None, partitions: int) -> int:
        """The partition of one record, -1 for no preference."""
        if self.own is not None:
            return int(self.own(key, partitions))
        if key is None or (self._empty_too and not key):
            if not self.nulls_too:
                return -1
            key = b""
        if not self.hashed:
            return -1
        return (
            zlib.crc32(key) % partitions if self._crc else (murmur2(key) & 0x7FFFFFFF) % partitions
        )

    def of_column(self, keys: pa.Array, partitions: int) -> numpy.ndarray:
        """The partition of each row as int32, -1 for no preference.  A caller's own function is
        called for each row."""
        if self.own is not None:
            whole = bytearray()
            for key in keys.to_pylist():
                whole += self.of(
                    key.encode() if isinstance(key, str) else key, partitions
                ).to_bytes(4, "little", signed=True)
            return _array(memoryview(whole).cast("i")).to_numpy(zero_copy_only=True)
        if not self.hashed:
            return _array(memoryview(bytearray(b"\xff" * (4 * len(keys)))).cast("i")).to_numpy(
                zero_copy_only=True
            )
        out, nulls = _hash(keys, partitions, crc=self._crc)
        found = _array(out).to_numpy(zero_copy_only=True)
        if nulls and self.nulls_too:
            found = pc.if_else(
                pc.less(pa.array(found), 0), self.of(None, partitions), pa.array(found)
            ).to_numpy()
        if self._empty_too:
            empty = pc.equal(pc.fill_null(pc.binary_length(keys), 0), 0)
            found = pc.if_else(empty, -1, pa.array(found)).to_numpy()
        return found.astype("int32", copy=False)


def check_partition(topic: str, partition: int, partitions: int) -> None:
    """UnknownTopicError unless there is such a partition."""
    if not 0 <= partition < partitions:
        raise UnknownTopicError(
            f"partition {partition} of topic {topic} does not exist",
            hint=f"it has {partitions} partitions, 0 to {partitions - 1}",
        )


class Partitioner:
    """Assigns rows of one topic, with and without keys.  Thread-safe.

    Rows without a key go to one partition for `sticky_rows` rows (1: round robin), across calls,
    then to the next; the first partition is random, so that many writers do not begin with the
    same.
    """

    def __init__(
        self, partitions: int, *, sticky_rows: int = STICKY_ROWS, first: int | None = None
    ) -> None:
        _check_count(partitions)
        if sticky_rows < 1:
            raise ConfigError(
                f"a run of {sticky_rows} rows is not possible",
                hint="give sticky_rows of at least 1",
            )
        self.partitions = partitions
        self.sticky_rows = sticky_rows
        self._lock = threading.Lock()
        self._partition = random.randrange(partitions) if first is None else first % partitions
        self._left = sticky_rows

    def assign(self, keys: pa.Array | pa.ChunkedArray | None, rows: int | None = None) -> pa.Array:
        """The partition of each row as int32 without nulls.  `keys` None: `rows` rows without a
        key."""
        if keys is None:
            out, nulls = memoryview(bytearray(b"\xff" * (4 * (rows or 0)))).cast("i"), rows or 0
        else:
            out, nulls = _hash(keys, self.partitions)
        if nulls:
            with self._lock:
                self._partition, self._left = fill_runs(
                    out, self._partition, self._left, self.sticky_rows, self.partitions
                )
        return _array(out)

    def partition(self, key: bytes | None) -> int:
        """The partition of one record."""
        if key is not None:
            return partition_for_key(key, self.partitions)
        with self._lock:
            if self._left == 0:
                self._partition, self._left = (
                    (self._partition + 1) % self.partitions,
                    self.sticky_rows,
                )
            self._left -= 1
            return self._partition


def group_by_partition(assigned: pa.Array, partitions: int) -> list[tuple[int, pa.Array]]:
    """``(partition, row numbers as int64)`` of each partition that has rows, rows in their order:
    what `take` wants.

    `assigned` is int32 without nulls, each in [0, partitions): ConfigError names the first that is
    not.
    """
    _check_count(partitions)
    if not pa.types.is_int32(assigned.type) or assigned.null_count:
        raise ConfigError(
            f"partitions of type {assigned.type} with {assigned.null_count} nulls",
            hint="give int32 without nulls",
        )
    rows = len(assigned)
    if rows == 0:
        return []
    buffer = assigned.buffers()[1]
    given = (
        memoryview(buffer).cast("B")[4 * assigned.offset : 4 * (assigned.offset + rows)].cast("i")
    )
    starts = memoryview(bytearray(8 * (partitions + 1))).cast("q")
    order = pa.allocate_buffer(8 * rows)
    broken = sort_rows(given, starts, memoryview(order).cast("B").cast("q"))
    if broken >= 0:
        raise ConfigError(
            f"row {broken} goes to partition {given[broken]}, and the topic has {partitions}",
            hint=f"use partitions from 0 to {partitions - 1}",
        )
    numbers = pa.Array.from_buffers(pa.int64(), rows, [None, order])
    return [
        (p, numbers.slice(starts[p], starts[p + 1] - starts[p]))
        for p in range(partitions)
        if starts[p + 1] > starts[p]
    ]


def _hash(
    keys: pa.Array | pa.ChunkedArray, partitions: int, *, crc: bool = False
) -> tuple[memoryview, int]:
    """(partition of each row as int32, -1 for null keys; number of those)."""
    _check_count(partitions)
    out = memoryview(bytearray(4 * len(keys))).cast("i")
    done = nulls = 0
    for chunk in keys.chunks if isinstance(keys, pa.ChunkedArray) else [keys]:
        kind = chunk.type
        if pa.types.is_binary(kind) or pa.types.is_string(kind):
            offset_bytes = 4
        elif pa.types.is_large_binary(kind) or pa.types.is_large_string(kind):
            offset_bytes = 8
        elif pa.types.is_fixed_size_binary(kind):
            offset_bytes = 0
        elif pa.types.is_null(kind):
            out[done : done + len(chunk)] = memoryview(bytearray(b"\xff" * (4 * len(chunk)))).cast(
                "i"
            )
            done, nulls = done + len(chunk), nulls + len(chunk)
            continue
        else:
            raise ConfigError(
                f"keys of type {kind} have no bytes to hash",
                hint="cast the key column to binary or string",
            )
        if len(chunk):
            found, broken = hash_rows(
                *_addresses(chunk, offset_bytes),
                chunk.offset,
                len(chunk),
                partitions,
                out[done : done + len(chunk)],
                crc,
            )
            if broken >= 0:
                raise FormatError(
                    f"the offsets of row {done + broken} of the key column are broken",
                    hint="validate the array at its source",
                )
            nulls += found
        done += len(chunk)
    return out, nulls


def _addresses(chunk: pa.Array, offset_bytes: int) -> tuple[int, int, int, int, int]:
    """Addresses of validity and offsets, width of an offset, address and size of the data, all
    checked for size."""
    buffers: list[Any] = chunk.buffers()
    end = chunk.offset + len(chunk)
    validity = buffers[0]
    if offset_bytes:
        offsets, data = buffers[1], buffers[2]
        if offsets is None or offsets.size < (end + 1) * offset_bytes:
            raise FormatError(
                "the offsets buffer of the key column is too short",
                hint="validate the array at its source",
            )
        size = 0 if data is None else data.size
    else:
        offsets, data, size = None, buffers[1], chunk.type.byte_width
        if data is not None and data.size < end * size:
            raise FormatError(
                "the data buffer of the key column is too short",
                hint="validate the array at its source",
            )
    if validity is not None and validity.size * 8 < end:
        raise FormatError(
            "the validity buffer of the key column is too short",
            hint="validate the array at its source",
        )
    return (
        0 if validity is None else validity.address,
        0 if offsets is None else offsets.address,
        offset_bytes,
        0 if data is None else data.address,
        size,
    )


def _array(partitions: memoryview) -> pa.Array:
    return pa.Array.from_buffers(pa.int32(), len(partitions), [None, pa.py_buffer(partitions)])


def _check_count(partitions: int) -> None:
    if not 1 <= partitions <= 0x7FFFFFFF:
        raise ConfigError(
            f"a topic has no {partitions} partitions", hint="give a number of at least 1"
        )
