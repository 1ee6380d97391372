"""What the planner of a query asks the broker (topics, watermarks, offsets by time), and what it
hands to tasks.

Law: it reaches the broker through `worker.session` only, and at first use only, because Spark
builds readers in one process and uses them in another.  `offsets` decides what is planned.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.sql.datasource import InputPartition

from kdirect.errors import BrokerUnavailableError, KdirectError, UnknownTopicError
from kdirect.model import TopicPartition
from kdirect_spark import limits, placement, worker
from kdirect_spark.cold_plan import LocatedRange, split_at_objects, split_further
from kdirect_spark.limits import Limit
from kdirect_spark.offsets import AtTimes, OffsetRange, Offsets, Plan
from kdirect_spark.patience import Patience
from kdirect_spark.settings import SourceSettings

log = logging.getLogger("kdirect_spark")


@dataclass(frozen=True)
class RangePartition(InputPartition):
    """What one task reads: the records of one topic partition with offsets in [start, stop).
    `places`: the objects of remote storage that hold them; signed URLs are not among them.
    `hosts`: where the task should run, for the shim (`placement.marked`).  `topic_id`: of the
    topic, where brokers give ids; what else has its name is not read.  `losses`: how many the
    planner has found, which one of a plan's tasks counts."""

    topic: str
    partition: int
    start: int
    stop: int
    places: tuple[Any, ...] = ()
    hosts: str = ""
    topic_id: str | None = None
    losses: int = 0


@dataclass(frozen=True)
class RangeGroup(InputPartition):
    """What one task reads if that is more than one range, or than one part of one."""

    ranges: tuple[RangePartition, ...]
    hosts: str = ""


def ranges_of(partition: InputPartition | None) -> tuple[RangePartition, ...]:
    """What a task reads.  Spark passes None for a plan without partitions."""
    if isinstance(partition, RangeGroup):
        return partition.ranges
    return (partition,) if isinstance(partition, RangePartition) else ()


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
        self._resolved: tuple[TopicPartition, ...] | None = None  # of them
        self._ids: dict[str, str | None] = {}  # as they were listed last
        self._first_ids: dict[str, str | None] = {}  # and first
        self._refreshed = 0.0
        self._answered = False  # has the broker, once?
        self._has_located = False

    def session(self) -> Any:
        """This process's session for the source's client settings."""
        return worker.session(self._settings.client)

    def look(self, call: Any) -> Any:
        """`call(session)`, repeated after retriable errors as often as fetchOffset.numRetries says,
        every fetchOffset.retryIntervalMs.  A broker that has answered before and is away now is
        waited for within request.timeout.ms; one that never has is not tried again, so that a start
        with a wrong address fails early.  Raises the last error, or the first that is not
        retriable."""
        patience = Patience("the planner", self._settings.planner_patience_ms)
        retries_left = self._settings.retries
        while True:
            try:
                found = call(self.session())
            except KdirectError as e:
                # Nobody answers where nobody ever did: for connect.timeout.ms it was tried again.
                nobody = isinstance(e, BrokerUnavailableError) and not self._answered
                if e.retriable and retries_left and not nobody:
                    log.warning("the request for the broker's offsets failed, trying again: %s", e)
                    time.sleep(self._settings.retry_interval_ms / 1000)
                elif not (self._answered and patience.outlasts(e)):
                    raise
                retries_left = max(0, retries_left - 1)
            else:
                self._answered = True
                return found

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
        if must_exist or self._resolved is None:
            subscription = self._settings.subscription
            self._resolved = subscription.resolve(self._topics, must_exist=must_exist)
        return self._resolved

    def _list_topics(self) -> dict[str, int]:
        found = self.look(lambda s: s.admin.list_topics())
        self._refreshed = time.monotonic()
        self._topics = {name: topic.partitions for name, topic in found.items()}
        self._resolved = None
        self._ids |= {name: topic.topic_id for name, topic in found.items()}
        self._first_ids = self._ids | self._first_ids
        return self._topics

    def topic_ids(self, topics: Iterable[str]) -> dict[str, str]:
        """The ids of those of `topics` that exist, as they were last seen; "" where the broker
        assigns none."""
        wanted = list(topics)
        if any(topic not in self._ids for topic in wanted):
            self._list_topics()
        return {topic: self._ids[topic] or "" for topic in wanted if topic in self._ids}

    @property
    def first_ids(self) -> Mapping[str, str | None]:
        """The id that each topic had when this process saw it first."""
        return self._first_ids

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
            return self._ask(first)
        except UnknownTopicError:  # deleted; a new topic may have its name
            pass
        wanted: list[TopicPartition] = []
        for listing in range(LISTINGS):
            existing = self._list_topics()
            wanted = [tp for tp in first if tp.partition < existing.get(tp.topic, 0)]
            if not wanted:
                return {}
            try:
                return self._ask(wanted)
            except UnknownTopicError:  # deleted or created again since it was listed
                time.sleep(FIRST_LISTING_WAIT_S * 2**listing)
        out: dict[TopicPartition, tuple[int, int]] = {}
        for topic in dict.fromkeys(tp.topic for tp in wanted):
            those = [tp for tp in wanted if tp.topic == topic]
            try:
                out |= self._ask(those)
            except UnknownTopicError as e:
                log.warning("topic %s comes and goes: %s", topic, e)
        return out

    def _ask(self, tps: list[TopicPartition]) -> dict[TopicPartition, tuple[int, int]]:
        """Their watermarks, of the topics that were listed last: those of others are refused, so
        `topic_ids` tells whose they are."""
        names = {tp.topic for tp in tps}
        ids = {topic: i for topic in names if (i := self._ids.get(topic)) is not None}
        found: dict[TopicPartition, tuple[int, int]]
        found = self.look(lambda s: s.watermarks(tps, topic_ids=ids))
        return found

    def resolve(
        self,
        limit: Limit,
        option: str,
        partitions: Iterable[TopicPartition],
        watermarks: Mapping[TopicPartition, tuple[int, int]],
    ) -> Offsets:
        """The offset of each partition at the start or the end of the query.  `option` is the name
        of the option that set it, for errors; see `limits.resolve`."""
        partitions = list(partitions)
        by_time = None
        limit = limits.resolved(limit, time.time_ns() // 1_000_000)
        if isinstance(limit, AtTimes):
            times = {tp: ms for tp, ms in limit.times(partitions).items() if tp in watermarks}
            by_time = self.first_offsets(times)
        return limits.resolve(limit, option, partitions, watermarks, by_time)

    def first_offsets(
        self, times: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int | None]:
        """The offset of the first record of that time (ms since 1970) or later in each partition;
        None if there is none."""
        found: dict[TopicPartition, int | None]
        found = self.look(lambda s: s.offsets_for_times(times)) if times else {}
        return found

    def counted(self, ranges: Iterable[OffsetRange]) -> dict[OffsetRange, int]:
        """How many records these ranges have, those of which the brokers know it."""
        # Imported at first use: few queries count.
        from kdirect.client.record_counts import CountWanted

        wanted = {CountWanted(r.topic_partition, r.start, r.stop): r for r in ranges}
        ids = {topic: i for topic, i in self._ids.items() if i}
        found: dict[CountWanted, int]
        found = self.look(lambda s: s.count_records(wanted, topic_ids=ids)) if wanted else {}
        return {wanted[x]: n for x, n in found.items()}

    def input_partitions(self, plan: Plan, *, by_object: bool = False) -> list[InputPartition]:
        """The ranges of `plan` as Spark partitions, split for minPartitions and
        maxRecordsPerPartition, and, with `by_object`, where objects of remote storage end."""
        settings = self._settings
        located = [LocatedRange(r) for r in plan.ranges if r.size > 0]
        if settings.client.get("cold.reads") != "broker":
            # A process plans query after query, and what was not cold for one may be for the next.
            afresh, self._has_located = not self._has_located, True
            places = self.look(lambda s: s.locate(_wanted(plan), afresh=afresh))
            if any(places.values()):
                located = split_at_objects(
                    plan.ranges, places, by_object=by_object, min_partitions=settings.min_partitions
                )
        pieces = split_further(located, settings.min_partitions, settings.max_records)
        tasks = self._tasks(pieces)
        if plan.losses:
            losses = RangePartition("", -1, 0, 0, losses=len(plan.losses))
            first = tasks[0] if tasks else losses
            tasks[:1] = (
                [RangeGroup((losses, *ranges_of(first)), first.hosts)] if tasks else [losses]
            )
        return tasks

    def _tasks(self, pieces: list[LocatedRange]) -> list[InputPartition]:
        """One partition for each piece, or for several of them: those of one topic partition
        between which nothing is read, if nothing splits it, and what coalescePartitions joins."""
        settings = self._settings
        hosts = self.hosts({x.range.topic_partition for x in pieces})
        ranges = []
        for x in pieces:
            tp = x.range.topic_partition
            # Objects are fetched past the broker, from wherever they are.
            near = "" if x.places else placement.marked(hosts[tp])
            topic_id = self._ids.get(tp.topic)
            ranges.append(
                RangePartition(*tp, x.range.start, x.range.stop, x.places, near, topic_id)
            )
        split = settings.min_partitions or settings.max_records or any(r.places for r in ranges)
        tasks = [[r] for r in ranges]
        if not split:
            of: dict[tuple[str, int], list[RangePartition]] = {}
            for r in ranges:
                of.setdefault((r.topic, r.partition), []).append(r)
            tasks = list(of.values())
        if settings.coalesce_partitions is not None:
            sizes = [sum(r.stop - r.start for r in task) for task in tasks]
            homes = [task[0].hosts for task in tasks]
            groups = placement.grouped(sizes, homes, settings.coalesce_partitions)
            tasks = [[r for i in group for r in tasks[i]] for group in groups]
        return [
            task[0] if len(task) == 1 else RangeGroup(tuple(task), _common_hosts(task))
            for task in tasks
        ]

    def hosts(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, tuple[str, ...]]:
        """The names of the hosts of the brokers that partitions are read at, as far as known."""
        cluster = self.session().cluster
        out: dict[TopicPartition, tuple[str, ...]] = {}
        for tp in tps:
            found = cluster.leader_address_at_hand(tp, closest=True)
            out[tp] = () if found is None else placement.names_of(found[0])
        return out


def _common_hosts(task: Iterable[RangePartition]) -> str:
    hosts = {r.hosts for r in task}
    return hosts.pop() if len(hosts) == 1 else ""


def _wanted(plan: Plan) -> dict[TopicPartition, tuple[int, int]]:
    """From the first to the last offset that is read of each partition."""
    out: dict[TopicPartition, tuple[int, int]] = {}
    for r in plan.ranges:
        if r.size > 0:
            start, stop = out.get(r.topic_partition, (r.start, r.stop))
            out[r.topic_partition] = min(start, r.start), max(stop, r.stop)
    return out
