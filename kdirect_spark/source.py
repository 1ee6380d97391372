"""Readers of Spark's Python Data Source API: a batch and a stream of micro-batches.

Law: planning (topics, offsets, ranges) runs in the driver's planner process, and reading runs in
Spark's tasks.  Both reach the broker through `worker.session` only, and at first use only, because
Spark builds readers in one process and uses them in another.  `offsets` decides what is planned;
this module does the I/O.

Life of a stream in the planner process: initialOffset for a new query, then latestOffset,
partitions and commit in turn.  Each record between two checkpointed offsets is read exactly once.
A micro-batch that is repeated reads the same offsets again.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition

from kdirect.errors import (
    ConfigError,
    DataLossError,
    KdirectError,
    OffsetOutOfRangeError,
    TruncatedLogError,
    UnknownTopicError,
)
from kdirect.model import TopicPartition
from kdirect_spark import offsets, worker
from kdirect_spark.offsets import AtTimes, Limit, OffsetRange, Offsets, Plan
from kdirect_spark.prefetch import prefetched
from kdirect_spark.settings import SourceSettings
from kdirect_spark.slash.checkpoint import refuse_accelerated

try:  # pyspark 4.2 and later: the engine passes the start offset and a read limit to latestOffset
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadMaxRows,
        ReadMinRows,
        SupportsTriggerAvailableNow,
    )

    ADMISSION_CONTROL = True
except ImportError:
    ADMISSION_CONTROL = False

log = logging.getLogger("kdirect_spark")

GROUP_RETRY_S = 1.0  # between attempts to commit a group's offsets


@dataclass(frozen=True)
class RangePartition(InputPartition):
    """What one task reads: the records of one topic partition with offsets in [start, stop)."""

    topic: str
    partition: int
    start: int
    stop: int


# How often topics are listed before those whose offsets are refused are called gone: a topic can be
# deleted and created again between a listing and the request for its offsets, and a deletion takes
# its time.  The wait before the next listing doubles from the first one on.
LISTINGS = 8
FIRST_LISTING_WAIT_S = 0.005


class BrokerView:
    """What a planner knows of the broker.  The list of topics is kept for
    partitionDiscoveryIntervalMs; offsets are requested each time.  Used from one thread."""

    def __init__(self, settings: SourceSettings) -> None:
        self._settings = settings
        self._topics: dict[str, int] | None = None
        self._ids: dict[str, str | None] = {}
        self._created_again: set[str] = set()
        self._refreshed = 0.0

    def session(self) -> Any:
        """This process's session for the source's client settings."""
        return worker.session(self._settings.client)

    def look(self, call: Any) -> Any:
        """`call(session)`, repeated after retriable errors as often as fetchOffset.numRetries says,
        every fetchOffset.retryIntervalMs.  Raises the last error, or the first that is not
        retriable."""
        for retries_left in range(self._settings.retries, -1, -1):
            try:
                return call(self.session())
            except KdirectError as e:
                if not e.retriable or not retries_left:
                    raise
                log.warning("the request for the broker's offsets failed, trying again: %s", e)
                time.sleep(self._settings.retry_interval_ms / 1000)
        raise AssertionError("not reached")

    def partitions(self, *, must_exist: bool, refresh: bool = False) -> tuple[TopicPartition, ...]:
        """The partitions of the subscription; see `resolve` of the classes in `offsets` for
        `must_exist`.  Lists the topics again if `refresh` is set or the last list is older than
        partitionDiscoveryIntervalMs."""
        now = time.monotonic()
        if (
            refresh
            or self._topics is None
            or (now - self._refreshed) * 1000 >= self._settings.discovery_interval_ms
        ):
            self._list_topics()
        assert self._topics is not None
        return self._settings.subscription.resolve(self._topics, must_exist=must_exist)

    def _list_topics(self) -> dict[str, int]:
        found = self.look(lambda s: s.admin.list_topics())
        self._refreshed = time.monotonic()
        self._topics = {name: topic.partitions for name, topic in found.items()}
        for name, topic in found.items():
            if self._ids.setdefault(name, topic.topic_id) != topic.topic_id:
                self._created_again.add(name)
                self._ids[name] = topic.topic_id
        return self._topics

    def take_created_again(self) -> frozenset[str]:
        """Topics that this process saw deleted and created again since the last call."""
        out = frozenset(self._created_again)
        self._created_again.clear()
        return out

    def watermarks(
        self, partitions: Iterable[TopicPartition], *, must_exist: bool = False
    ) -> dict[TopicPartition, tuple[int, int]]:
        """(log start offset, high watermark) of each partition in `partitions` that exists: a topic
        that comes and goes while it is asked for is left out, as one that is gone.  With
        `must_exist` UnknownTopicError names what is missing."""
        first = list(partitions)
        found = self._watermarks(first)
        missing = [tp for tp in first if tp not in found]
        if missing and must_exist:
            raise UnknownTopicError(
                f"{', '.join(map(str, missing))} was deleted while the query was planned",
                hint="start the query again once the topic is there",
            )
        return found

    def _watermarks(self, first: list[TopicPartition]) -> dict[TopicPartition, tuple[int, int]]:
        if not first:
            return {}
        try:
            return self.look(lambda s: s.watermarks(first, same=True))
        except UnknownTopicError:  # deleted; a new topic may have its name
            pass
        wanted: list[TopicPartition] = []
        for listing in range(LISTINGS):
            existing = self._list_topics()
            wanted = [tp for tp in first if tp.partition < existing.get(tp.topic, 0)]
            if not wanted:
                return {}
            try:
                return self.look(lambda s, wanted=wanted: s.watermarks(wanted))
            except UnknownTopicError:  # deleted or created again since it was listed
                time.sleep(FIRST_LISTING_WAIT_S * 2**listing)
        out: dict[TopicPartition, tuple[int, int]] = {}
        for topic in dict.fromkeys(tp.topic for tp in wanted):
            those = [tp for tp in wanted if tp.topic == topic]
            try:
                out |= self.look(lambda s, those=those: s.watermarks(those))
            except UnknownTopicError as e:
                log.warning("topic %s comes and goes: %s", topic, e)
        return out

    def resolve(
        self,
        limit: Limit,
        option: str,
        partitions: Iterable[TopicPartition],
        watermarks: Mapping[TopicPartition, tuple[int, int]],
    ) -> Offsets:
        """The offset of each partition at the start or the end of the query.  `option` is the name
        of the option that set it, for errors; see `offsets.resolve_limit`."""
        partitions = list(partitions)
        by_time = None
        if isinstance(limit, AtTimes):
            times = {tp: ms for tp, ms in limit.times(partitions).items() if tp in watermarks}
            by_time = self.look(lambda s: s.offsets_for_times(times)) if times else {}
        return offsets.resolve_limit(limit, option, partitions, watermarks, by_time)

    def input_partitions(self, plan: Plan) -> list[InputPartition]:
        """The ranges of `plan` as Spark partitions, split for minPartitions and
        maxRecordsPerPartition."""
        ranges = offsets.split(
            plan.ranges, self._settings.min_partitions, self._settings.max_records
        )
        return [
            RangePartition(r.topic_partition.topic, r.topic_partition.partition, r.start, r.stop)
            for r in ranges
        ]


class KdirectBatchReader(DataSourceReader):
    """A batch query: reads once from the starting to the ending offsets."""

    def __init__(self, settings: SourceSettings) -> None:
        self._settings = settings

    def partitions(self) -> list[InputPartition]:
        settings = self._settings
        _log_warnings(settings.warnings)
        view = BrokerView(settings)
        partitions = view.partitions(must_exist=True)
        watermarks = view.watermarks(partitions, must_exist=True)
        start = view.resolve(settings.starting, settings.starting_option, partitions, watermarks)
        end = view.resolve(settings.ending, settings.ending_option, partitions, watermarks)
        return view.input_partitions(
            offsets.plan_batch(start, end, watermarks).check(
                settings.fail_on_data_loss, log.warning
            )
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_range(self._settings, partition)


class GroupOffsets:
    """The offsets that a query commits for `kafka.group.id`, so that tools show its lag.

    The checkpoint alone decides where a query continues.  A failed commit is therefore logged and
    tried again later, and never fails the query.
    """

    def __init__(self, view: BrokerView, group_id: str | None) -> None:
        self._view = view
        self._group_id = group_id
        self._committed: Offsets | None = None
        self._retry_at = 0.0

    def commit(self, done: Offsets) -> None:
        """Commit `done`, unless there is no group or it is committed already."""
        now = time.monotonic()
        if self._group_id is None or done == self._committed or now < self._retry_at:
            return
        try:
            self._view.session().admin.commit_offsets(self._group_id, done)
            self._committed = done
        except KdirectError as e:
            self._retry_at = now + GROUP_RETRY_S
            log.warning("offsets of group %s could not be committed: %s", self._group_id, e)


class _StreamReader(DataSourceStreamReader):
    """What the readers for all versions of Spark's API share.  Only the planner process changes its
    state:

    - `_start`: where a new query starts, and whether a micro-batch has begun since;
    - `_target`: the end that Trigger.AvailableNow fixed;
    - `_seen`: the high watermarks that the broker returned last;
    - `_planned`: the start of the last planned micro-batch, with the topics that were found to be
      created again before it, so that planning it again gives the same ranges.
    """

    def __init__(self, settings: SourceSettings) -> None:
        self._settings = settings
        self._view = BrokerView(settings)
        self._start = offsets.QueryStart(offsets.moves(settings.starting))
        self._target: Offsets | None = None
        self._seen: Offsets | None = None
        self._planned: tuple[dict, frozenset[str]] | None = None
        self._group = GroupOffsets(self._view, settings.group_id)

    def initialOffset(self) -> dict:
        """Where a new query starts.  The engine asks again until the first micro-batch has run, and
        gets the same answer each time."""
        initial = self._start.offsets
        if initial is None:
            settings = self._settings
            _log_warnings(settings.warnings)
            partitions = self._view.partitions(must_exist=True, refresh=True)
            watermarks = self._view.watermarks(partitions, must_exist=True)
            initial = self._view.resolve(
                settings.starting, settings.starting_option, partitions, watermarks
            )
            if (ceiling := self._ceiling()) is not None:
                # The engine already knows the ends.  Records that arrived since then belong to a
                # later micro-batch, so the start may not lie beyond those ends.
                named = offsets.named_offsets(settings.starting)
                initial = {
                    tp: n if tp in named else min(n, ceiling.get(tp, n))
                    for tp, n in initial.items()
                }
            self._start.resolve(initial)
        return offsets.to_json(initial)

    def partitions(self, start: dict, end: dict) -> list[InputPartition]:
        plan = self.plan(start, end)
        return [] if plan is None else self._view.input_partitions(plan)

    def plan(self, start: dict, end: dict) -> Plan | None:
        """What the micro-batch between these offsets reads; None if it is empty.  Raises
        DataLossError, or logs a warning, if records are gone."""
        refuse_accelerated(start)
        if start == end:
            return None
        begin, stop = offsets.from_json(start, "start offset"), offsets.from_json(end, "end offset")
        is_start = begin == self._start.offsets
        if self._start.repeats_first(begin):
            # The first micro-batch did not finish and runs again.  Its end is in the checkpoint,
            # but its start was resolved again.
            if self._start.was_empty(stop):
                return None
            # Partitions that were added since then belong to the next micro-batch.
            begin = {tp: n for tp, n in begin.items() if tp in stop}
        watermarks = self._view.watermarks(sorted(begin.keys() | stop.keys()))
        if self._planned is None or self._planned[0] != start:
            self._planned = (start, self._view.take_created_again())
        plan = offsets.plan_stream(begin, stop, watermarks, self._planned[1], is_start=is_start)
        return plan.check(self._settings.fail_on_data_loss, log.warning)

    def watermarks(self, end: dict) -> dict[TopicPartition, tuple[int, int]]:
        """(log start offset, high watermark) of the partitions of an offset that exist."""
        return self._view.watermarks(sorted(offsets.from_json(end, "end offset")))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_range(self._settings, partition)

    def commit(self, end: dict) -> None:
        """With `kafka.group.id`, commit `end` as the group's offsets.  The engine calls this when
        it makes the next micro-batch."""
        self._commit_group(offsets.from_json(end, "end offset"))

    def _commit_group(self, done: Offsets) -> None:
        if done != self._start.offsets:  # nothing was read up to the start
            self._group.commit(done)

    def stop(self) -> None:
        """Close the session, as far as possible: the planner process ends right afterwards."""
        try:
            if self._seen is not None:
                self._view.session().close()
        except Exception as e:
            log.debug("closing the planner's session: %s", e)

    # -- what the versions below override or share

    def _ceiling(self) -> Offsets | None:
        """Ends that the engine got before it asked where the query starts.  The query may not start
        at higher offsets."""
        return self._target

    def _available(self, start: Offsets) -> tuple[Offsets, Offsets]:
        """(ends of what can be read from `start` on, earliest offsets), both by partition.  With a
        fixed end, the earliest offsets are those of partitions that `start` lacks."""
        if self._target is not None:
            partitions: Iterable[TopicPartition] = self._target
            return dict(self._target), {
                tp: low
                for tp, (low, _) in self._view.watermarks(set(partitions) - start.keys()).items()
            }
        watermarks: dict[TopicPartition, tuple[int, int]] = {}
        for retries_left in range(self._settings.retries, -1, -1):
            watermarks = self._view.watermarks(self._view.partitions(must_exist=False))
            if not retries_left or all(
                high >= start.get(tp, 0) for tp, (_, high) in watermarks.items()
            ):
                break
            # A high watermark is below what was read: a leader is just taking over, or the topic
            # was created again.  Ask again before calling it a loss.
            time.sleep(self._settings.retry_interval_ms / 1000)
        self._seen = {tp: high for tp, (_, high) in watermarks.items()}
        return dict(self._seen), {tp: low for tp, (low, _) in watermarks.items()}


class KdirectLegacyStreamReader(_StreamReader):
    """For pyspark 4.0 and 4.1, whose engine asks for the latest offset without passing the offsets
    that the query has reached."""

    def __init__(self, settings: SourceSettings) -> None:
        for value, option in (
            (settings.max_offsets, "maxOffsetsPerTrigger"),
            (settings.min_offsets, "minOffsetsPerTrigger"),
        ):
            if value is not None:
                raise ConfigError(
                    f"option {option} needs pyspark 4.2 or later",
                    hint="upgrade pyspark, or remove the option",
                )
        super().__init__(settings)

    def _ceiling(self) -> Offsets | None:
        return self._seen  # the engine asks for the latest offset first

    def latestOffset(self) -> dict:  # type: ignore[override]
        if self._seen is None:
            self._view.partitions(must_exist=False, refresh=True)
        return offsets.to_json(self._available({})[0])


if ADMISSION_CONTROL:

    class KdirectStreamReader(_StreamReader, SupportsTriggerAvailableNow):
        """For pyspark 4.2 and later."""

        _last_trigger: float | None = None

        def getDefaultReadLimit(self) -> Any:
            if self._settings.max_offsets is not None:
                return ReadMaxRows(self._settings.max_offsets)
            if self._settings.min_offsets is not None:
                return ReadMinRows(self._settings.min_offsets)
            return ReadAllAvailable()

        def latestOffset(self, start: dict, limit: Any) -> dict:
            refuse_accelerated(start)
            begin = offsets.from_json(start, "start offset")
            # Everything before `begin` has been processed.  That includes the last micro-batch,
            # for which the engine may never call commit().
            self._commit_group(begin)
            if self._start.begin(begin):
                return offsets.to_json(begin)  # the first micro-batch is empty: see QueryStart
            end, earliest = self._available(begin)
            if isinstance(limit, ReadAllAvailable):
                return offsets.to_json(end)
            if self._hold_back(begin, end, earliest):
                return start
            if isinstance(limit, ReadMaxRows):
                end = offsets.rate_limit(limit.max_rows, begin, end, earliest)
            return offsets.to_json(end)

        def prepareForTriggerAvailableNow(self) -> None:
            # The topics need not exist here: a new query asks for its initial offset next, which
            # requires them.
            self._view.partitions(must_exist=False, refresh=True)
            self._target = None
            self._target = self._available({})[0]

        def reportLatestOffset(self) -> dict | None:
            return None if self._seen is None else offsets.to_json(self._seen)

        def _hold_back(self, start: Offsets, end: Offsets, earliest: Offsets) -> bool:
            """Whether minOffsetsPerTrigger delays the micro-batch, at most for maxTriggerDelay.
            The first one is never delayed, nor one whose end is fixed."""
            wanted = self._settings.min_offsets
            now = time.monotonic()
            if (
                wanted is None
                or self._target is not None
                or self._last_trigger is None
                or (now - self._last_trigger) * 1000 >= self._settings.max_delay_ms
                or sum(offsets.new_records(start, end, earliest).values()) >= wanted
            ):
                self._last_trigger = now
                return False
            return True


def stream_reader(settings: SourceSettings) -> _StreamReader:
    """The reader for the installed pyspark.  Raises ConfigError for an option that it lacks."""
    return (
        KdirectStreamReader(settings) if ADMISSION_CONTROL else KdirectLegacyStreamReader(settings)
    )


# -- in a task -------------------------------------------------------------------------------------


def read_range(settings: SourceSettings, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """The records of one RangePartition as Arrow batches with the selected columns of Spark's Kafka
    row.  A thread decodes them ahead, by at most prefetchBytes.  Raises DataLossError if records
    are gone, unless failOnDataLoss is false."""
    if not isinstance(partition, RangePartition):
        return  # Spark passes one empty partition for a plan without partitions
    tp = TopicPartition(partition.topic, partition.partition)
    work = _RangeReading(settings, OffsetRange(tp, partition.start, partition.stop))
    batches = prefetched(work.batches(), settings.prefetch_bytes, lambda _: work.is_done)
    try:
        yield from batches
    finally:
        batches.close()  # type: ignore[attr-defined]
        worker.settle()


class _RangeReading:
    """How a task reads one range.  If records within it are gone, a further reader continues after
    them.  `next_offset` is the offset after what was read.  One thread runs `batches`."""

    def __init__(self, settings: SourceSettings, work: OffsetRange) -> None:
        self.next_offset = work.start
        self._settings = settings
        self._work = work

    @property
    def is_done(self) -> bool:
        """Whether the range ends with the batch that was yielded last."""
        return self.next_offset >= self._work.stop

    def batches(self) -> Generator[pa.RecordBatch, None, None]:
        """The range as Arrow batches with the selected columns."""
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
        columns = settings.columns and list(settings.columns)
        session = worker.session(settings.task_client)
        with session.reader(
            work.topic_partition,
            self.next_offset,
            work.stop,
            include_headers=settings.include_headers,
            target_bytes=settings.batch_bytes,
        ) as reader:
            try:
                for batch in reader:
                    self.next_offset = reader.next_offset
                    if batch.num_rows:
                        yield batch.select(columns) if columns else batch
            finally:
                _note(settings, work, session, reader)

    def _lost(self, loss: str, cause: Exception) -> None:
        """Raise DataLossError, or log a warning if failOnDataLoss is false.  `loss` says what is
        gone, with {} where the offsets belong."""
        loss = loss.format(f"{self.next_offset} to {self._work.stop}")
        if self._settings.fail_on_data_loss:
            text = f"records are missing: {loss}"
            raise DataLossError(text, hint=offsets.LOSS_HINT) from cause
        log.warning("records are missing: %s (failOnDataLoss is false)", loss)


def _note(settings: SourceSettings, work: OffsetRange, session: Any, reader: Any) -> None:
    """With taskStatisticsDir, append one JSON line that says what a task's reader did to a file of
    this process in that directory."""
    if settings.statistics_dir is None:
        return
    line = {
        "topic": work.topic_partition.topic,
        "partition": work.topic_partition.partition,
        "start": work.start,
        "stop": work.stop,
        "transport": session.transport,
        **reader.statistics(),
    }
    with open(
        Path(settings.statistics_dir) / f"task-statistics-{os.getpid()}.jsonl",
        "a",
        encoding="utf-8",
    ) as f:
        f.write(json.dumps(line) + "\n")


def _log_warnings(warnings: Iterable[str]) -> None:
    for warning in warnings:
        log.warning("%s", warning)
