"""What a task does: read one range of offsets as Arrow batches of the query's row.

Law: it runs in Spark's worker processes, and reaches the broker through `worker.session` only.
`RangeReading` owns what both kinds of rows share: losses, decoding ahead, statistics, what is
dropped.  `RecordRows` are those of Spark's Kafka connector; those of values are in `value_rows` and
`record_values`.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from kdirect.errors import (
    CorruptBatchError,
    DataLossError,
    KdirectError,
    OffsetOutOfRangeError,
    TruncatedLogError,
    UnknownTopicError,
)
from kdirect.format.bad_values import Dropped, described
from kdirect.model import TopicPartition
from kdirect_spark import offsets, worker
from kdirect_spark.broker_view import BrokerView, ranges_of
from kdirect_spark.counts import ReaderCounts, present
from kdirect_spark.offsets import OffsetRange
from kdirect_spark.patience import Patience
from kdirect_spark.prefetch import prefetched
from kdirect_spark.record_times import check_times
from kdirect_spark.rows import Rows, TaskRange
from kdirect_spark.settings import SourceSettings

log = logging.getLogger("kdirect_spark")

T = TypeVar("T")


def read_range(settings: SourceSettings, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """The records of a RangePartition or RangeGroup as Arrow batches with the selected columns of
    the query's row.  A thread decodes them ahead, by at most prefetchBytes.  Raises DataLossError
    if records are gone, unless failOnDataLoss is false, and BadValueError in valueMode FAILFAST."""
    ranges = ranges_of(partition)
    present().add("data_loss", sum(x.losses for x in ranges))
    work = [
        RangeReading(
            settings,
            OffsetRange(TopicPartition(x.topic, x.partition), x.start, x.stop),
            x.places,
            x.topic_id,
        )
        for x in ranges
    ]
    if not work:
        return  # Spark passes one empty partition for a plan without partitions
    batches = prefetched(_one_by_one(work), settings.prefetch_bytes, lambda _: work[-1].is_done)
    try:
        yield from batches
    finally:
        batches.close()  # type: ignore[attr-defined]
        present().tell()
        worker.settle()


def _one_by_one(work: list[RangeReading]) -> Generator[pa.RecordBatch, None, None]:
    for x in work:
        yield from x.batches()


class RecordRows(Rows):
    """Records as rows of Spark's Kafka connector."""

    def __init__(self, given: TaskRange) -> None:
        settings = given.settings
        super().__init__(given.reader(include_headers=settings.include_headers), Dropped())
        self._session = given.session
        self._tp = given.tp
        self._columns = settings.columns and list(settings.columns)

    def batches(self) -> Generator[pa.RecordBatch, None, None]:
        for batch in self._reader:
            if batch.num_rows:
                check_times(self._session, self._tp, batch)
                yield batch.select(self._columns) if self._columns else batch

    def live_batches(self) -> Generator[tuple[pa.RecordBatch, pa.Array] | None, None, None]:
        for batch in self._reader.live_batches():
            if batch is None:
                yield None
                continue
            check_times(self._session, self._tp, batch)
            yield batch.select(self._columns) if self._columns else batch, batch.column("offset")


def _kind(settings: SourceSettings) -> Callable[[TaskRange], Rows]:
    if settings.values is None:
        return RecordRows
    # Imported at first use: what decodes takes a while to import, and most queries take bytes.
    if settings.values.is_engines:
        from kdirect_spark.value_rows import ValueRows

        return ValueRows
    from kdirect_spark.record_values import RecordValues

    return RecordValues


class RangeReading:
    """How a task reads one range.  If records within it are gone, a further reader continues after
    them; if the broker is away, one continues when it is back, within kafkaConsumer.pollTimeoutMs
    of the last progress.  `next_offset` is the offset after what was read.  One thread runs
    `batches`, or, with `live_ms`, `live_batches` (`Rows.live_batches`), which has no end unless the
    partition is gone."""

    def __init__(
        self,
        settings: SourceSettings,
        work: OffsetRange,
        places: tuple[Any, ...] = (),
        topic_id: str | None = None,
        live_ms: int | None = None,
    ) -> None:
        self.next_offset = work.start
        self._live_ms = live_ms
        self._topic_id = topic_id
        self._places = places  # where the planner has found them
        self.dropped = Dropped()
        self._settings = settings
        self._work = work
        self._patience = Patience(str(work.topic_partition), settings.patience_ms)

    @property
    def is_done(self) -> bool:
        """Whether the range ends with the batch that was yielded last."""
        return self.next_offset >= self._work.stop

    def batches(self) -> Generator[pa.RecordBatch, None, None]:
        """The range as Arrow batches with the selected columns."""
        try:
            yield from self._batches(lambda rows: rows.batches())
        finally:
            self._tell_of_dropped()

    def live_batches(self) -> Generator[tuple[pa.RecordBatch, pa.Array] | None, None, None]:
        try:
            yield from self._batches(lambda rows: rows.live_batches())
        finally:
            self._tell_of_dropped()

    def _batches(self, batches_of: Callable[[Rows], Iterator[T]]) -> Generator[T, None, None]:
        goes_on = True
        self._patience.progressed()  # a task may have read other ranges for long before this one
        while goes_on and not self.is_done:
            try:
                try:
                    yield from self._read(batches_of)
                    return
                except (UnknownTopicError, OffsetOutOfRangeError) as e:
                    goes_on = self._goes_on_after(e)
            except KdirectError as e:
                # The planner has reached the broker at this address, so it is away for a while.
                if not self._patience.outlasts(e):
                    raise

    def _goes_on_after(self, gone: UnknownTopicError | OffsetOutOfRangeError) -> bool:
        """Records of the range are gone.  Whether there are others to be read, from `next_offset`
        on."""
        tp = self._work.topic_partition
        rest = self._stop - self.next_offset  # what is lost of one without an end, nobody knows
        if isinstance(gone, UnknownTopicError):
            loss = f"{tp} is gone; offsets {{}} were still to be read ({gone.message})"
            self._lost(loss, gone, rest)
            return False
        if isinstance(gone, TruncatedLogError):
            # What the log has at these offsets now is read.
            self._lost(f"{gone.message}; {{}} were still to be read", gone, 0)
            return True
        view = BrokerView(self._settings)
        now = view.topic_ids([tp.topic]).get(tp.topic)
        if self._topic_id and now and now != self._topic_id:
            loss = f"{tp} was deleted and created again; {{}} were still to be read"
            self._lost(loss, gone, rest)
            return False
        earliest, latest = view.watermarks([tp]).get(tp, (0, 0))
        held = f"{tp} holds offsets {earliest} to {latest}"
        goes_on = self.next_offset < earliest < self._work.stop
        missing = earliest - self.next_offset if goes_on else rest
        self._lost(f"{held}; {{}} were to be read", gone, missing)
        if not goes_on:
            return False
        self.next_offset = earliest
        return True

    def _read(self, batches_of: Callable[[Rows], Iterator[T]]) -> Generator[T, None, None]:
        """The batches of one reader, from `next_offset` on."""
        settings, work = self._settings, self._work
        session = worker.session(settings.task_client)
        if self._places:
            session.remember_places(self._places)
            self._places = ()  # when they are gone, the broker knows better
        rows = _kind(settings)(
            TaskRange(
                settings,
                session,
                work.topic_partition,
                self.next_offset,
                work.stop,
                self._topic_id,
                self._live_ms,
            )
        )
        counts = ReaderCounts(present(), work.topic_partition, rows)
        try:
            for batch in batches_of(rows):
                self.next_offset = rows.next_offset
                counts.handed_out(_rows_in(batch))
                yield batch
                self._patience.progressed()  # however long Spark has taken
            if rows.transport == "tcp":
                rows.check_topic()  # by a READ, only what was granted is read
        except CorruptBatchError:
            present().add("crc_failures", 1)
            raise
        finally:
            counts.note()
            self.next_offset = rows.next_offset
            self.dropped.merge(rows.dropped)
            _note(settings, work, self._stop, rows)
            rows.close()

    def _lost(self, loss: str, cause: Exception, missing: int) -> None:
        """Raise DataLossError, or log a warning if failOnDataLoss is false.  `loss` says what is
        gone, with {} where the offsets belong; these are so many."""
        present().lost(missing)
        last = "and later" if self._live_ms is not None else f"to {self._work.stop}"
        loss = loss.format(f"{self.next_offset} {last}")
        if self._settings.fail_on_data_loss:
            text = f"records are missing: {loss}"
            raise DataLossError(text, hint=offsets.LOSS_HINT) from cause
        log.warning("records are missing: %s (failOnDataLoss is false)", loss)

    @property
    def _stop(self) -> int:
        """The end of the range, or how far one without an end was read."""
        return self.next_offset if self._live_ms is not None else self._work.stop

    def _tell_of_dropped(self) -> None:
        """Say once what a task dropped.  A null value is a tombstone, which alone is no news."""
        dropped, values = self.dropped, self._settings.values
        if values is None or values.mode == "FAILFAST" or not dropped.samples:
            return
        tp = self._work.topic_partition
        counts = ", ".join(f"{reason.value} {n}" for reason, n in dropped.counts.items())
        first = "; ".join(described(tp, row) for row in dropped.samples)
        log.warning(
            "%s offsets %d to %d: %d values %s (%s): %s",
            tp,
            self._work.start,
            self._stop,
            dropped.total,
            "have a row of nulls" if values.mode == "PERMISSIVE" else "were dropped",
            counts,
            first,
        )


def _rows_in(handed_out: Any) -> int:
    """How many rows are in what `Rows.batches` or `Rows.live_batches` yields."""
    batch = handed_out[0] if isinstance(handed_out, tuple) else handed_out
    return 0 if batch is None else int(batch.num_rows)


def _note(settings: SourceSettings, work: OffsetRange, stop: int, rows: Rows) -> None:
    """Say what a task's reader did: in a line of the log at level info, and with taskStatisticsDir
    in one line of JSON, appended to a file of this process in that directory."""
    if settings.statistics_dir is None and not log.isEnabledFor(logging.INFO):
        return
    line = {
        "topic": work.topic_partition.topic,
        "partition": work.topic_partition.partition,
        "start": work.start,
        "stop": stop,
        "transport": rows.transport,
        **rows.statistics(),
    }
    log.info("read: %s", line)
    if settings.statistics_dir is None:
        return
    with open(
        Path(settings.statistics_dir) / f"task-statistics-{os.getpid()}.jsonl",
        "a",
        encoding="utf-8",
    ) as f:
        f.write(json.dumps(line) + "\n")
