"""What the tests of compaction share: batches of keyed records with every codec, what a log has,
and the model that a compacted log is compared with: a dictionary."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pyarrow as pa

from kdirect.format import layout
from kdirect.format.batch import CODEC_NAMES, crc32c, iterate_batches
from kdirect.format.decode import ArrowDecoder
from kdirect.format.encode import ArrowEncoder
from kdirect.log.cleaning import Cleaned, Cleaning, Memory, dirt_of
from kdirect.log.partition import Partition

NOW = 1_700_000_000_000
MEMORY = Memory(table_bytes=1 << 20, load_factor=0.9, piece_bytes=1 << 16)


class Kept(NamedTuple):
    """A record of a log."""

    offset: int
    key: bytes | None
    value: bytes | None
    timestamp_ms: int


def keyed(
    records: list[tuple[bytes | None, bytes | None]],
    *,
    codec: int = 0,
    timestamp_ms: int = NOW,
    producer: tuple[int, int, int] = (-1, -1, -1),
    transactional: bool = False,
) -> bytes:
    """A batch of these keys and values, a millisecond apart; `producer`: id, epoch, sequence."""
    encoder = ArrowEncoder(compression=CODEC_NAMES[codec], batch_bytes=1 << 20)
    (batch,) = encoder.encode(
        pa.array([value for _, value in records], pa.binary()),
        pa.array([key for key, _ in records], pa.binary()),
        timestamps_ms=pa.array([timestamp_ms + i for i in range(len(records))], pa.int64()),
        default_timestamp_ms=timestamp_ms,
        producer_id=producer[0],
        producer_epoch=producer[1],
        base_sequence=producer[2],
    )
    data = bytearray(batch)
    if transactional:
        data[layout.BATCH_ATTRIBUTES + 1] |= layout.ATTRIBUTE_TRANSACTIONAL
        checked = bytes(data[layout.BATCH_ATTRIBUTES :])
        data[layout.BATCH_CRC : layout.BATCH_ATTRIBUTES] = crc32c(checked).to_bytes(4, "big")
    return bytes(data)


def records_of(partition: Partition, offset: int | None = None) -> list[Kept]:
    """Every record that a reader gets."""
    offset = partition.log_start_offset if offset is None else offset
    decoder = ArrowDecoder("t", 0, start_offset=offset)
    out: list[Kept] = []
    while buffers := partition.read(offset, 1 << 20):
        for buffer in buffers:
            data = bytes(buffer)
            offset = max([offset, *(info.next_offset for info in iterate_batches(data))])
            while data:
                data = data[decoder.feed(data) :]
                rows = decoder.take()
                columns = [rows.column(n).to_pylist() for n in ("offset", "key", "value")]
                stamps = rows.column("timestamp").cast(pa.int64()).to_pylist()
                out += map(Kept, *columns, (stamp // 1000 for stamp in stamps))
    return out


def last_of_each_key(records: list[Kept]) -> dict[bytes, bytes]:
    """What a table has that was made of the records."""
    table: dict[bytes, bytes] = {}
    for r in records:
        assert r.key is not None
        if r.value is None:
            table.pop(r.key, None)
        else:
            table[r.key] = r.value
    return table


def compact(
    partition: Partition, cleaned_to: int | None = None, *, now_ms: int = NOW, **memory: Any
) -> Cleaned:
    """Compact what may be compacted."""
    dirt = dirt_of(partition, cleaned_to, now_ms)
    return Cleaning(partition, dirt, MEMORY._replace(**memory), now_ms).run()


def fill(
    partition: Partition, rng: random.Random, batches: int, keys: int, **settings: Any
) -> list[Kept]:
    """Append random batches and roll now and then; what was appended."""
    out: list[Kept] = []
    for _ in range(batches):
        records: list[tuple[bytes | None, bytes | None]] = [
            (b"k%d" % rng.randrange(keys), rng.choice([None, rng.randbytes(rng.randrange(50))]))
            for _ in range(rng.randint(1, 20))
        ]
        codec = rng.choice([0, 0, 1, 2, 3, 4])
        base = partition.append(keyed(records, codec=codec, **settings), NOW).base_offset
        out += [Kept(base + i, k, v, NOW + i) for i, (k, v) in enumerate(records)]
        if rng.random() < 0.15:
            partition.roll()
    partition.roll()
    return out
