"""Bench row of compaction: a log on tmpfs with plain batches of 1 KiB records, of whose keys each
comes four times, compacted once by one thread; against a bare read and write of the same bytes.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

from sides import Figure, figure

VALUE_BYTES = 1024
RECORDS_A_BATCH = 16
REPEATS = 4


def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(
        prefix="kdirect-bench-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    )


def _bare(paths: list[Path], directory: Path) -> float:
    """Seconds of reading the files and writing what compaction writes: a fourth of them."""
    begin = time.perf_counter()
    for path in paths:
        data = path.read_bytes()
        copy = directory / "copy"
        copy.write_bytes(data[: len(data) // REPEATS])
        copy.unlink()
    return time.perf_counter() - begin


def _once(batches: int, value_bytes: int) -> tuple[float, float, int]:
    """(seconds of compaction, of the bare reads and writes, bytes that were read)."""
    import pyarrow as pa

    from kdirect.format.encode import ArrowEncoder
    from kdirect.log.cleaning import Cleaning, Memory, dirt_of
    from kdirect.log.config import LogConfig
    from kdirect.log.manager import LogManager
    from kdirect.model import TopicPartition

    encoder = ArrowEncoder(batch_bytes=1 << 20)
    values = pa.array([os.urandom(value_bytes)] * RECORDS_A_BATCH, pa.binary())
    with _directory() as name:
        config = LogConfig(compacts=True, deletes=False)
        with LogManager([name], config) as manager:
            partition = manager.create_partition(TopicPartition("t", 0))
            for i in range(batches):
                first = i % (batches // REPEATS) * RECORDS_A_BATCH
                keys = pa.array([b"key-%d" % (first + j) for j in range(RECORDS_A_BATCH)])
                (batch,) = encoder.encode(values, keys, default_timestamp_ms=1)
                partition.append(bytes(batch))
            partition.roll()
            partition.flush()
            paths = [s.path for s in partition.segments if s.size]
            bare = _bare(paths, Path(name))
            now_ms = int(time.time() * 1000)
            dirt = dirt_of(partition, None, now_ms)
            begin = time.perf_counter()
            done = Cleaning(partition, dirt, Memory(128 << 20, 0.9, 512 << 10), now_ms).run()
            seconds = time.perf_counter() - begin
            if done.records_kept * REPEATS != done.records_read:
                raise RuntimeError(f"{done.records_kept} of {done.records_read} records were kept")
            return seconds, bare, done.bytes_read


def compact(seconds: float, quick: bool) -> list[Figure]:
    """MB of a log that one thread compacts in a second, keys and rewriting together, for records of
    1 KiB and of 100 bytes."""
    rows = []
    for value_bytes in (VALUE_BYTES, 100):
        batches = 64 if quick else (256 << 20) // (RECORDS_A_BATCH * (value_bytes + 20)) // 4 * 4
        batches = min(batches, 40_000)
        rounds = [_once(batches, value_bytes) for _ in range(1 if quick else 3)]
        size = rounds[0][2] / 1e6
        rows.append(
            figure(
                "compact",
                size / statistics.median(r[0] for r in rounds),
                "MB/s",
                "a bare read and write of the same bytes",
                size / statistics.median(r[1] for r in rounds),
                value_bytes=value_bytes,
                megabytes=size,
                records_a_batch=RECORDS_A_BATCH,
            )
        )
    return rows


__all__ = ["compact"]
