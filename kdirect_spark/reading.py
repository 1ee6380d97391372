"""What a task does: read one range of offsets as Arrow batches of the query's row.

Law: it runs in Spark's worker processes, and reaches the broker through `worker.session` only.
`RangeReading` owns what both kinds of rows share: losses, decoding ahead, statistics, what is
dropped.  `RecordRows` are those of Spark's Kafka connector; those of values are in `value_rows`.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from kdirect.errors import (
    DataLossError,
    OffsetOutOfRangeError,
    TruncatedLogError,
    UnknownTopicError,
)
from kdirect.format.bad_values import Dropped, described
from kdirect.model import TopicPartition
from kdirect_spark import offsets, worker
from kdirect_spark.broker_view import BrokerView, RangePartition
from kdirect_spark.offsets import OffsetRange
from kdirect_spark.prefetch import prefetched
from kdirect_spark.settings import SourceSettings

log = logging.getLogger("kdirect_spark")


def read_range(settings: SourceSettings, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """The records of one RangePartition as Arrow batches with the selected columns of the query's
    row.  A thread decodes them ahead, by at most prefetchBytes.  Raises DataLossError if records
    are gone, unless failOnDataLoss is false, and BadValueError in valueMode FAILFAST."""
    if not isinstance(partition, RangePartition):
        return  # Spark passes one empty partition for a plan without partitions
    tp = TopicPartition(partition.topic, partition.partition)
    work = RangeReading(
        settings, OffsetRange(tp, partition.start, partition.stop), partition.places
    )
    batches = prefetched(work.batches(), settings.prefetch_bytes, lambda _: work.is_done)
    try:
        yield from batches
    finally:
        batches.close()  # type: ignore[attr-defined]
        worker.settle()


class Rows(Protocol):
    """What a task reads [start, stop) of a partition with, until something of it is gone."""

    def __init__(
        self, settings: SourceSettings, session: Any, tp: TopicPartition, start: int, stop: int
    ) -> None: ...

    @property
    def dropped(self) -> Dropped:
        """Values that gave no row."""

    @property
    def next_offset(self) -> int:
        """The offset after what was yielded or dropped."""

    @property
    def transport(self) -> str:
        """What the records are read over."""

    def batches(self) -> Generator[pa.RecordBatch, None, None]:
        """The rows, in the order of their offsets, in batches with at least one."""

    def statistics(self) -> dict[str, int]:
        """What was done, for taskStatisticsDir."""

    def close(self) -> None:
        """Give back what the partition is read with."""


class RecordRows:
    """Records as rows of Spark's Kafka connector."""

    def __init__(
        self, settings: SourceSettings, session: Any, tp: TopicPartition, start: int, stop: int
    ) -> None:
        self.dropped = Dropped()  # none ever
        self._columns = settings.columns and list(settings.columns)
        self._reader = session.reader(
            tp,
            start,
            stop,
            include_headers=settings.include_headers,
            target_bytes=settings.batch_bytes,
        )

    @property
    def next_offset(self) -> int:
        return self._reader.next_offset

    @property
    def transport(self) -> str:
        return str(self._reader.transport)

    def batches(self) -> Generator[pa.RecordBatch, None, None]:
        for batch in self._reader:
            if batch.num_rows:
                yield batch.select(self._columns) if self._columns else batch

    def statistics(self) -> dict[str, int]:
        return self._reader.statistics()

    def close(self) -> None:
        self._reader.close()


def _kind(settings: SourceSettings) -> type[Rows]:
    if settings.values is None:
        return RecordRows
    # Imported at first use: what decodes takes a while to import, and most queries take bytes.
    from kdirect_spark.value_rows import ValueRows

    return ValueRows


class RangeReading:
    """How a task reads one range.  If records within it are gone, a further reader continues after
    them.  `next_offset` is the offset after what was read.  One thread runs `batches`."""

    def __init__(
        self, settings: SourceSettings, work: OffsetRange, places: tuple[Any, ...] = ()
    ) -> None:
        self.next_offset = work.start
        self._places = places  # where the planner has found them
        self.dropped = Dropped()
        self._settings = settings
        self._work = work

    @property
    def is_done(self) -> bool:
        """Whether the range ends with the batch that was yielded last."""
        return self.next_offset >= self._work.stop

    def batches(self) -> Generator[pa.RecordBatch, None, None]:
        """The range as Arrow batches with the selected columns."""
        try:
            yield from self._batches()
        finally:
            self._tell_of_dropped()

    def _batches(self) -> Generator[pa.RecordBatch, None, None]:
        while not self.is_done:
            try:
                yield from self._read()
                return
            except UnknownTopicError as e:
                tp = self._work.topic_partition
                self._lost(f"{tp} is gone; offsets {{}} were still to be read", e)
                return
            except TruncatedLogError as e:
                # What the log has at these offsets now is read.
                self._lost(f"{e.message}; {{}} were still to be read", e)
            except OffsetOutOfRangeError as e:
                tp = self._work.topic_partition
                watermarks = BrokerView(self._settings).watermarks([tp])
                earliest, latest = watermarks.get(tp, (0, 0))
                held = f"{tp} holds offsets {earliest} to {latest}"
                self._lost(f"{held}; {{}} were to be read", e)
                if not self.next_offset < earliest < self._work.stop:
                    return
                self.next_offset = earliest

    def _read(self) -> Generator[pa.RecordBatch, None, None]:
        """The batches of one reader, from `next_offset` on."""
        settings, work = self._settings, self._work
        session = worker.session(settings.task_client)
        if self._places:
            session.remember_places(self._places)
            self._places = ()  # when they are gone, the broker knows better
        rows = _kind(settings)(settings, session, work.topic_partition, self.next_offset, work.stop)
        try:
            for batch in rows.batches():
                self.next_offset = rows.next_offset
                yield batch
        finally:
            self.next_offset = rows.next_offset
            self.dropped.merge(rows.dropped)
            _note(settings, work, rows)
            rows.close()

    def _lost(self, loss: str, cause: Exception) -> None:
        """Raise DataLossError, or log a warning if failOnDataLoss is false.  `loss` says what is
        gone, with {} where the offsets belong."""
        loss = loss.format(f"{self.next_offset} to {self._work.stop}")
        if self._settings.fail_on_data_loss:
            text = f"records are missing: {loss}"
            raise DataLossError(text, hint=offsets.LOSS_HINT) from cause
        log.warning("records are missing: %s (failOnDataLoss is false)", loss)

    def _tell_of_dropped(self) -> None:
        """Say once what a task dropped.  A null value is a tombstone, which alone is no news."""
        dropped, values = self.dropped, self._settings.values
        if values is None or values.mode == "FAILFAST" or not dropped.samples:
            return
        tp = self._work.topic_partition
        counts = ", ".join(f"{reason.value} {n}" for reason, n in dropped.counts.items())
        first = "; ".join(described(tp, row) for row in dropped.samples)
        log.warning(
            "%s offsets %d to %d: %d values were dropped (%s): %s",
            tp,
            self._work.start,
            self._work.stop,
            dropped.total,
            counts,
            first,
        )


def _note(settings: SourceSettings, work: OffsetRange, rows: Rows) -> None:
    """With taskStatisticsDir, append one JSON line that says what a task's reader did to a file of
    this process in that directory."""
    if settings.statistics_dir is None:
        return
    line = {
        "topic": work.topic_partition.topic,
        "partition": work.topic_partition.partition,
        "start": work.start,
        "stop": work.stop,
        "transport": rows.transport,
        **rows.statistics(),
    }
    with open(
        Path(settings.statistics_dir) / f"task-statistics-{os.getpid()}.jsonl",
        "a",
        encoding="utf-8",
    ) as f:
        f.write(json.dumps(line) + "\n")
