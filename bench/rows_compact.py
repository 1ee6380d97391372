"""Bench rows of compaction: a log on tmpfs with plain batches of 1 KiB records, of whose keys each
comes four times, compacted once by one thread, against a bare read and write of the same bytes; and
what a compacted topic of the broker's own state costs a start, which reads all of it.
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


COMMITS_BYTES = 100 << 20  # a segment of __consumer_offsets


def _start_s(directory: str, group: str) -> float:
    """Seconds from the start of a broker until it says what a group has committed."""
    import kdirect
    from kdirect.client import connect

    begin = time.perf_counter()
    with kdirect.Broker(log_dirs=directory) as broker:
        settings = {"bootstrap.servers": broker.bootstrap_servers, "transport": "tcp"}
        with connect(settings) as session:
            found = session.admin.committed_offsets(group)
            seconds = time.perf_counter() - begin
    if len(found) != 1:
        raise RuntimeError(f"group {group} has committed {found}")
    return seconds


def _commit_much(directory: str, groups: int, most_bytes: int) -> int:
    """So many bytes of commits, each a batch of its own, by all groups in turns; how many."""
    from kdirect.format.batch import encode_single_bytes
    from kdirect.format.group_records import CommittedOffset, offset_key, offset_value
    from kdirect.log.config import LogConfig
    from kdirect.log.manager import LogManager
    from kdirect.model import TopicPartition

    now = int(time.time() * 1000)
    size = count = 0
    config = LogConfig(segment_bytes=2 * COMMITS_BYTES, compacts=True, deletes=False)
    with LogManager([directory], config) as logs:
        partition = logs.partitions[TopicPartition("__consumer_offsets", 0)]
        while size < most_bytes:
            piece = b"".join(
                encode_single_bytes(
                    offset_value(CommittedOffset(i, -1, "", now)),
                    offset_key(f"group-{i % groups}", "t", 0),
                    now,
                )
                for i in range(count, count + 500)
            )
            if partition.append(piece, now).error:
                raise RuntimeError("a commit was refused")
            size, count = size + len(piece), count + 500
    return count


def load_offsets(seconds: float, quick: bool) -> list[Figure]:
    """How much later a broker that starts says what a group has committed, for 100 MiB of commits
    in __consumer_offsets, by few groups and by many."""
    import kdirect
    from kdirect.client import connect
    from kdirect.model import TopicPartition

    most_bytes = COMMITS_BYTES // 10 if quick else COMMITS_BYTES
    rows = []
    for groups, bar in ((100, 2.0), (100_000, 4.0)):
        with _directory() as directory:
            with kdirect.Broker(log_dirs=directory) as broker:
                settings = {"bootstrap.servers": broker.bootstrap_servers, "transport": "tcp"}
                with connect(settings) as session:
                    session.admin.create_topic("t", 1)
                    session.admin.commit_offsets("group-0", {TopicPartition("t", 0): 1})
            empty = statistics.median(_start_s(directory, "group-0") for _ in range(3))
            count = _commit_much(directory, groups, most_bytes)
            full = sorted(_start_s(directory, "group-0") for _ in range(3))
            rows.append(
                figure(
                    "load-offsets",
                    statistics.median(full) - empty,
                    "s",
                    f"bar: {bar:g} s",
                    bar,
                    lower_is_better=True,
                    mib=most_bytes >> 20,
                    commits=count,
                    groups=groups,
                    start_s=empty,
                    slowest_s=full[-1] - empty,
                )
            )
    return rows
