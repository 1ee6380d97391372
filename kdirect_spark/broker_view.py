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

from kdirect.errors import KdirectError, UnknownTopicError
from kdirect.model import TopicPartition
from kdirect_spark import offsets, worker
from kdirect_spark.cold_plan import LocatedRange, split_at_objects, split_further
from kdirect_spark.offsets import AtTimes, Limit, Offsets, Plan
from kdirect_spark.settings import SourceSettings

log = logging.getLogger("kdirect_spark")


@dataclass(frozen=True)
class RangePartition(InputPartition):
    """What one task reads: the records of one topic partition with offsets in [start, stop).
    `places`: the objects of remote storage that hold them; signed URLs are not among them."""

    topic: str
    partition: int
    start: int
    stop: int
    places: tuple[Any, ...] = ()


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

    def topic_ids(self, topics: Iterable[str]) -> dict[str, str]:
        """The ids of those of `topics` that exist, as they were last seen; "" where the broker
        assigns none."""
        wanted = list(topics)
        if any(topic not in self._ids for topic in wanted):
            self._list_topics()
        return {topic: self._ids[topic] or "" for topic in wanted if topic in self._ids}

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
        `take_created_again` tells of each topic that offsets are given of."""
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
        of the option that set it, for errors; see `offsets.resolve_limit`."""
        partitions = list(partitions)
        by_time = None
        if isinstance(limit, AtTimes):
            times = {tp: ms for tp, ms in limit.times(partitions).items() if tp in watermarks}
            by_time = self.look(lambda s: s.offsets_for_times(times)) if times else {}
        return offsets.resolve_limit(limit, option, partitions, watermarks, by_time)

    def input_partitions(self, plan: Plan, *, by_object: bool = False) -> list[InputPartition]:
        """The ranges of `plan` as Spark partitions, split for minPartitions and
        maxRecordsPerPartition, and, with `by_object`, where objects of remote storage end."""
        settings = self._settings
        located = [LocatedRange(r) for r in plan.ranges if r.size > 0]
        if settings.client.get("cold.reads") != "broker":
            places = self.look(lambda s: s.locate(_wanted(plan)))
            if any(places.values()):
                located = split_at_objects(
                    plan.ranges, places, by_object=by_object, min_partitions=settings.min_partitions
                )
        return [
            RangePartition(*x.range.topic_partition, x.range.start, x.range.stop, x.places)
            for x in split_further(located, settings.min_partitions, settings.max_records)
        ]


def _wanted(plan: Plan) -> dict[TopicPartition, tuple[int, int]]:
    return {r.topic_partition: (r.start, r.stop) for r in plan.ranges if r.size > 0}
