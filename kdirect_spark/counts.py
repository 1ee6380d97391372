"""What a task has done, for the metrics that Spark shows (docs/spark.md, "Metrics").

Owns: `TaskCounts`, the counts of the present task of this process; the file by which the JVM learns
those of a reader while it reads; and the text by which it learns those of a writer.

Law: counting never fails a task.  What cannot be told is logged at level debug, and the task goes
on.  The JVM (`TaskCounts.scala`) trusts none of it.

The file.  Arrow batches have no room for anything but rows, and a reader of which Spark needs no
more (`limit`) is killed.  So the shim makes an empty file for each reader, and hands its name over
with the pickled partition, of which it makes a call of `partition_with_counts`.  The worker
overwrites the file whole: with the first batch, then at most every TELL_EVERY_S, and at the end.
It holds COUNTS, each as 64 bits, little endian.  The reader in the JVM has it deleted.

The text.  A task that writes tells its counts once, in its commit message, between two marks that
the JVM finds in the pickled bytes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.serializers import CPickleSerializer

from kdirect.errors import KdirectError

if TYPE_CHECKING:
    from pyspark.sql.datasource import InputPartition

    from kdirect.model import TopicPartition

log = logging.getLogger("kdirect_spark")

# The order in which the file has them; TaskCounts.scala has the same names.
COUNTS = (
    "rows",
    "reads",
    "read_bytes",
    "tcp_bytes",
    "object_bytes",
    "crc_failures",
    "wait_us",
    "transports",
    "offset_out_of_range",
    "data_loss",
    "lag_partitions",
    "lag_sum_ms",
    "lag_min_ms",
    "lag_max_ms",
)
WRITTEN = (
    "records",
    "requests",
    "write_bytes",
    "send_bytes",
    "tcp_bytes",
    "wait_us",
    "transports",
)
TELL_EVERY_S = 0.1
MOST = 2**53  # the JVM believes no count that is larger
BEGIN, END = "kdirect.written[", "]"

# Of a set of transports, one bit for each; `OTHER` for what is not among them.
TRANSPORTS = {"shm": 1, "verbs": 2, "tcp": 4, "objects": 8}
OTHER = 16

# How the counts of a reader come about: sums of its statistics (docs/metrics.md, "reader").
_OF_READER = {
    "reads": ("reads", "slot_reads", "aborted_reads"),
    "read_bytes": ("read_bytes", "slot_read_bytes"),
    "tcp_bytes": ("fetched_bytes",),
    "object_bytes": ("client_cold_bytes",),
    "crc_failures": ("torn_slot_reads",),
    "wait_us": ("read_wait_us", "fetch_wait_us", "pause_us"),
}
_LAYOUT = struct.Struct(f"<{len(COUNTS)}q")


def bit_of(transport: str) -> int:
    """The bit of a transport in a set of them."""
    return TRANSPORTS.get(transport, OTHER)


class TaskCounts:
    """The counts of one task that reads.  `path`: the file for the JVM; None: nobody asks.  One
    thread at a time changes it."""

    def __init__(self, path: str | None = None) -> None:
        self._path = path
        self._counts = dict.fromkeys(COUNTS, 0)
        self._lags: dict[TopicPartition, int] = {}
        self._tell_at = 0.0

    def __getitem__(self, name: str) -> int:
        """One of COUNTS.  Those of time lags are there after `tell`."""
        return self._counts[name]

    def add(self, name: str, n: int) -> None:
        self._counts[name] += n

    def lost(self, offsets: int) -> None:
        """Records are missing: so many offsets of what was to be read."""
        self.add("data_loss", 1)
        self.add("offset_out_of_range", max(0, offsets))

    def uses(self, transport: str) -> None:
        self._counts["transports"] |= bit_of(transport)

    def is_at(self, tp: TopicPartition, newest_ms: int) -> None:
        """What was handed out last of `tp`, whose newest record is of this time; -1: none was."""
        if newest_ms >= 0:
            self._lags[tp] = max(0, time.time_ns() // 1_000_000 - newest_ms)

    @property
    def is_due(self) -> bool:
        """Whether it is time to `tell`."""
        return self._path is not None and time.monotonic() >= self._tell_at

    def tell(self) -> None:
        """Write the file."""
        if self._path is None:
            return
        self._tell_at = time.monotonic() + TELL_EVERY_S
        counts, lags = self._counts, self._lags.values()
        counts["lag_partitions"], counts["lag_sum_ms"] = len(lags), sum(lags)
        counts["lag_min_ms"], counts["lag_max_ms"] = min(lags, default=0), max(lags, default=0)
        try:
            data = _LAYOUT.pack(*(min(n, MOST) for n in counts.values()))
            file = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.pwrite(file, data, 0)
            finally:
                os.close(file)
        except (OSError, struct.error) as e:
            log.debug("the counts of a task are not told: %s", e)
            self._path = None


class ReaderCounts:
    """Adds what one reader of `tp` does to the counts of its task.  `reader` has `statistics()`,
    `transport` and `newest_ms`."""

    def __init__(self, counts: TaskCounts, tp: TopicPartition, reader: Any) -> None:
        self._counts = counts
        self._tp = tp
        self._reader = reader
        self._before = dict.fromkeys(_OF_READER, 0)

    def handed_out(self, rows: int) -> None:
        """Called for each batch, before Spark has it."""
        self._counts.add("rows", rows)
        if self._counts.is_due:
            self.note()
            self._counts.tell()

    def note(self) -> None:
        """Count what the reader has done since the last call."""
        counts, seen = self._counts, self._reader.statistics()
        for name, parts in _OF_READER.items():
            now = sum(seen.get(part, 0) for part in parts)
            if name == "wait_us":
                now += 1000 * seen.get("client_cold_wait_ms", 0)
            counts.add(name, now - self._before[name])
            self._before[name] = now
        counts.uses(self._reader.transport)
        counts.is_at(self._tp, self._reader.newest_ms)


_present = TaskCounts()


def present() -> TaskCounts:
    """The counts of the task that this process runs.  It runs one at a time."""
    return _present


def partition_with_counts(pickled: bytes, path: str) -> InputPartition:
    """The partition of the task that begins now, which tells its counts in the file `path`.  The
    shim makes a pickled call of this, so it is called where Spark's worker unpickles."""
    global _present
    _present = TaskCounts(path)
    partition: InputPartition = CPickleSerializer().loads(pickled)
    return partition


class WriterCounts:
    """What one task does with a producer, which may serve other tasks before and after."""

    def __init__(self) -> None:
        self._transport = ""
        self._before: dict[str, int] = {}
        self._after: dict[str, int] = {}
        self._waited_s = 0.0

    def begin(self, producer: Any) -> None:
        self._before = _numbers(producer.statistics())

    def end(self, producer: Any, session: Any) -> None:
        """Called once all records are acknowledged.  `session`: of the producer."""
        self._after = _numbers(producer.statistics())
        try:
            # Known by now where records went one-sidedly; else a broker may be asked.
            self._transport = session.transport
        except KdirectError as e:
            log.debug("the transport of a task is not told: %s", e)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The time within is that of waiting for the broker."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._waited_s += time.monotonic() - began

    @property
    def done(self) -> dict[str, int]:
        """WRITTEN, without the rows."""
        made = {name: n - self._before.get(name, 0) for name, n in self._after.items()}
        ways = {way: made.get(f"{way}_bytes", 0) for way in ("rdma", "send", "tcp")}
        direct = bit_of(self._transport) if ways["rdma"] or ways["send"] else 0
        return {
            "requests": sum(made.get(f"{way}_requests", 0) for way in ways),
            "write_bytes": ways["rdma"],
            "send_bytes": ways["send"],
            "tcp_bytes": ways["tcp"],
            "wait_us": round(self._waited_s * 1e6),
            "transports": direct | (TRANSPORTS["tcp"] if ways["tcp"] else 0),
        }

    def text(self, rows: int) -> str:
        """For the commit message of a task that wrote `rows` rows."""
        counts = {"records": rows} | self.done
        return f"{BEGIN}{','.join(str(counts[name]) for name in WRITTEN)}{END}"


def _numbers(statistics: dict[str, Any]) -> dict[str, int]:
    return {name: n for name, n in statistics.items() if isinstance(n, int)}
