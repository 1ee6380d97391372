"""Readers of Spark's Python Data Source API: a batch and a stream of micro-batches.

Law: planning (topics, offsets, ranges) runs in the driver's planner process, and is here; reading
runs in Spark's tasks, and is in `reading`.  Spark builds readers in one process and uses them in
another.  `offsets` decides what is planned; the broker is asked through `BrokerView`.

Life of a stream in the planner process: initialOffset for a new query, then latestOffset,
partitions and commit in turn.  Each record between two checkpointed offsets is read exactly once.
A micro-batch that is repeated reads the same offsets again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition

from kdirect.errors import ConfigError, KdirectError
from kdirect.model import TopicPartition
from kdirect_spark import clear_errors, limits, offsets, real_time, topic_ids
from kdirect_spark.broker_view import BrokerView
from kdirect_spark.clear_errors import leave_with_spark, sentence_first
from kdirect_spark.epoch_offset import refuse_accelerated
from kdirect_spark.offsets import Offsets, Plan
from kdirect_spark.reading import read_range
from kdirect_spark.settings import SourceSettings
from kdirect_spark.versions import SameVersion

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

BEHIND_S = 5.0  # for a high watermark that is below what was read of the same topic
BEHIND_PAUSE_S = 0.1
NO_IDS: Mapping[str, str] = {}
GROUP_RETRY_S = 1.0  # between attempts to commit a group's offsets


@sentence_first
class KdirectBatchReader(SameVersion, DataSourceReader):
    """A batch query: reads once from the starting to the ending offsets."""

    def __init__(self, settings: SourceSettings) -> None:
        self._settings = settings

    def partitions(self) -> list[InputPartition]:
        view, plan, _ = self.plan()
        return view.input_partitions(plan, by_object=True)

    def plan(self) -> tuple[BrokerView, Plan, dict[TopicPartition, tuple[int, int]]]:
        """What the query reads, and the (log start offset, high watermark) of each partition of
        it."""
        settings = self._settings
        _log_warnings(settings.warnings)
        view = BrokerView(settings)
        partitions = view.partitions(must_exist=True)
        watermarks = view.watermarks(partitions, must_exist=True)
        start = view.resolve(settings.starting, settings.starting_option, partitions, watermarks)
        start = limits.within(settings.starting, start, watermarks)
        end = view.resolve(settings.ending, settings.ending_option, partitions, watermarks)
        end = limits.within(settings.ending, end, watermarks)
        names = (settings.starting_option, settings.ending_option)
        plan = offsets.plan_batch(start, end, watermarks, names)
        return view, plan.check(settings.fail_on_data_loss, log.warning), watermarks

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


class _StreamReader(SameVersion, DataSourceStreamReader):
    """What the readers for all versions of Spark's API share.  Only the planner process changes its
    state:

    - `_start`: where a new query starts, and whether a micro-batch has begun since;
    - `_target`: the end that Trigger.AvailableNow fixed;
    - `_seen`: the high watermarks that the broker returned last.

    Offsets name the ids of their topics (`topic_ids`).  A topic that has another id at the end of a
    micro-batch than at its start was deleted and created again in between.
    """

    def __init__(self, settings: SourceSettings) -> None:
        self._settings = settings
        self._view = BrokerView(settings)
        self._start = offsets.QueryStart(limits.moves(settings.starting))
        self._target: Offsets | None = None
        self._seen: Offsets | None = None
        self._target_ids: dict[str, str] = {}
        self._start_ids: dict[str, str] = {}
        self._told_of_absence = False
        self._parsed: tuple[dict, Offsets] = {}, {}
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
                named = limits.named_offsets(settings.starting)
                initial = {
                    tp: n if tp in named else min(n, ceiling.get(tp, n))
                    for tp, n in initial.items()
                }
            self._start.resolve(initial)
            self._start_ids = self._ids_now(initial)
        return topic_ids.with_ids(offsets.to_json(initial), self._start_ids)

    def partitions(self, start: dict, end: dict) -> list[InputPartition]:
        plan = self.plan(start, end)
        if plan is None:
            return []
        return self._view.input_partitions(plan, by_object=self._target is not None)

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
        end_ids = topic_ids.ids_of(end)
        plan = offsets.plan_stream(
            begin,
            stop,
            watermarks,
            topic_ids.others(self._ids_of(start), end_ids),
            topic_ids.others(end_ids, self._ids_now(watermarks)),
            topic_ids.same(topic_ids.ids_of(start), end_ids),
            is_start=is_start,
        )
        return plan.check(self._settings.fail_on_data_loss, log.warning)

    def _begin(self, start: dict) -> Offsets:
        """The offsets that a start says.  The engine asks with the same one until there is news,
        often where nothing else is done."""
        if start != self._parsed[0]:
            refuse_accelerated(start)
            self._parsed = start, offsets.from_json(start, "start offset")
        return self._parsed[1]

    def topic_ids(self, topics: Iterable[str]) -> dict[str, str]:
        """The ids of these topics; "" where the broker assigns none."""
        return self._view.topic_ids(topics)

    def _ids_now(self, partitions: Iterable[TopicPartition]) -> dict[str, str]:
        """The ids of the topics whose watermarks were asked for last."""
        return self._view.topic_ids(sorted({tp.topic for tp in partitions}))

    def _ids_of(self, start: dict) -> dict[str, str]:
        """The ids of the topics of an offset; where it names none, as in a checkpoint of Spark's
        Kafka connector, those that this process saw first."""
        first = {topic: i for topic, i in self._view.first_ids.items() if i}
        return first | topic_ids.ids_of(start)

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
        """Close the session, as far as possible, where the planner process ends right afterwards.
        One that goes on (`pyspark_kdirect.planner`) keeps its connections for the next query."""
        try:
            if self._seen is not None and not clear_errors.is_kept_planner():
                self._view.session().close()
        except Exception as e:
            log.debug("closing the planner's session: %s", e)
        leave_with_spark()

    # -- what the versions below override or share

    def _ceiling(self) -> Offsets | None:
        """Ends that the engine got before it asked where the query starts.  The query may not start
        at higher offsets."""
        return self._target

    def _available(
        self, start: Offsets, ids: Mapping[str, str] = NO_IDS
    ) -> tuple[Offsets, Offsets]:
        """(ends of what can be read from `start`, of the topics of these ids, on, earliest
        offsets), both by partition.  With a fixed end, the earliest offsets are those of partitions
        that `start` lacks, or whose topic was created again."""
        if self._target is not None:
            behind = [tp for tp, end in self._target.items() if end < start.get(tp, 0)]
            if behind:
                # The end was fixed before the engine said how far the query has come.
                settled = self._settled(start, ids)
                self._target |= {tp: settled[tp][1] for tp in behind if tp in settled}
                self._target_ids |= self._ids_now(behind)
            again = topic_ids.others(ids, self._target_ids)
            fresh = {tp for tp in self._target if tp not in start or tp.topic in again}
            return dict(self._target), {
                tp: low for tp, (low, _) in self._view.watermarks(fresh).items()
            }
        watermarks = self._settled(start, ids)
        self._seen = {tp: high for tp, (_, high) in watermarks.items()}
        return dict(self._seen), {tp: low for tp, (low, _) in watermarks.items()}

    def _settled(
        self, start: Offsets, ids: Mapping[str, str]
    ) -> dict[TopicPartition, tuple[int, int]]:
        """The watermarks of what is subscribed to.  Where one is below `start`, of the topics of
        these ids, it is asked for again for a while."""
        began = time.monotonic()
        retries_left = self._settings.retries
        while True:
            watermarks = self._view.watermarks(self._view.partitions(must_exist=False))
            behind = [tp for tp, (_, high) in watermarks.items() if high < start.get(tp, 0)]
            if not behind:
                break
            # A high watermark is below what was read: its leader has just taken over, or come back
            # and does not know yet how far its replicas are, or the topic was created again.  Ask
            # again before calling it a loss.
            again = topic_ids.others(ids, self._ids_now(behind))
            settles = start != self._start.offsets and not again.issuperset(t for t, _ in behind)
            patience_s = BEHIND_S if settles else 0.0
            if retries_left <= 0 and time.monotonic() - began >= patience_s:
                break
            retries_left -= 1
            interval_s = self._settings.retry_interval_ms / 1000
            time.sleep(interval_s if retries_left >= 0 else max(interval_s, BEHIND_PAUSE_S))
        return watermarks

    def _all_gone(self, start: Offsets) -> None:
        """Nothing is left to be read, so there is no end to write into the checkpoint: an offset
        without partitions would forget where the query was.  DataLossError, or a warning once."""
        names = ", ".join(sorted({tp.topic for tp in start}))
        losses = tuple(
            f"{tp} is gone; it was read up to offset {start[tp]}" for tp in sorted(start)
        )
        if self._settings.fail_on_data_loss:
            offsets.Plan((), losses).check(True, log.warning)
        if not self._told_of_absence:
            log.warning("%s: waiting for topics to come back (failOnDataLoss is false)", names)
        self._told_of_absence = True


@sentence_first
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
        before = self._seen
        if before is None:
            self._view.partitions(must_exist=False, refresh=True)
        end, _ = self._available({})
        if not end and before:
            self._all_gone(before)
            self._seen = end = before
        return topic_ids.with_ids(offsets.to_json(end), self._ids_now(end))


if ADMISSION_CONTROL:

    @sentence_first
    class KdirectStreamReader(_StreamReader, SupportsTriggerAvailableNow):
        """For pyspark 4.2 and later."""

        _last_trigger: float | None = None
        _opens_empty = False  # is the first batch of the query to be an empty one?

        def getDefaultReadLimit(self) -> Any:
            if self._settings.max_offsets is not None:
                return ReadMaxRows(self._settings.max_offsets)
            if self._settings.min_offsets is not None:
                return ReadMinRows(self._settings.min_offsets)
            return ReadAllAvailable()

        def latestOffset(self, start: dict, limit: Any) -> dict:
            begin = self._begin(start)
            # Everything before `begin` has been processed.  That includes the last micro-batch,
            # for which the engine may never call commit().
            self._commit_group(begin)
            if self._start.begin(begin):
                self._opens_empty = True
                return start  # the first micro-batch is empty: see QueryStart
            start_ids = self._ids_of(start)
            end, earliest = self._available(begin, start_ids)
            if not end and begin:
                self._all_gone(begin)
                return start
            self._told_of_absence = False
            ids = self._target_ids if self._target is not None else self._ids_now(end)
            again = topic_ids.others(start_ids, ids)
            if end == begin and not again:
                return start  # which may be without ids, and need not be written down again
            begin = {tp: n for tp, n in begin.items() if tp.topic not in again}
            if not isinstance(limit, ReadAllAvailable):
                if self._hold_back(begin, end, earliest):
                    return start
                if isinstance(limit, ReadMaxRows):
                    end = offsets.rate_limit(limit.max_rows, begin, end, earliest)
            return topic_ids.with_ids(offsets.to_json(end), ids)

        def prepareForTriggerAvailableNow(self) -> None:
            # The topics need not exist here: a new query asks for its initial offset next, which
            # requires them.
            self._view.partitions(must_exist=False, refresh=True)
            self._target = None
            self._target = self._available({})[0]
            self._target_ids = self._ids_now(self._target)

        def partitions(self, start: dict, end: dict) -> list[InputPartition]:
            if not real_time.has_no_end(end):
                return super().partitions(start, end)
            real_time.check(self._settings)
            end = self.latestOffset(start, ReadAllAvailable())
            plan = self.plan(start, end)
            starts = offsets.from_json(end, "end offset")
            starts |= {r.topic_partition: r.start for r in plan.ranges} if plan else {}
            is_empty, self._opens_empty = self._opens_empty, False
            return real_time.live_partitions(
                self._settings,
                starts,
                self._ids_now(starts) | topic_ids.ids_of(end),  # an idle topic's end has none
                self._view.hosts(starts),
                is_empty=is_empty,
            )

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


def _log_warnings(warnings: Iterable[str]) -> None:
    for warning in warnings:
        log.warning("%s", warning)
