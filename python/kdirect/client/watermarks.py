"""Where the logs begin and end: (log start offset, high watermark) of many partitions.

Owns: one fetcher for each broker, whose slots are looked at and whose files are never read.  Once
its slots are granted, an answer costs one slot READ for each broker and none of its CPU.
Partitions that READs cannot tell of are asked for over Kafka's protocol, by two requests.

Thread-safe: a lock is held while slots are looked at, and not while a broker is asked for
watermarks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kdirect.client.admin import Admin
from kdirect.client.direct import DirectFetcher
from kdirect.client.lost_broker import as_moved, concerning, has_moved, look_again
from kdirect.client.read_paths import DirectPaths, ReadConnections
from kdirect.errors import (
    AccessDeniedError,
    BrokerUnavailableError,
    ClosedError,
    KdirectError,
    QueuePairError,
    UnknownTopicError,
)
from kdirect.model import EARLIEST_OFFSET, LATEST_OFFSET, TopicPartition
from kdirect.wire.backoff import Backoff
from kdirect.wire.environment import Environment

log = logging.getLogger("kdirect.client")

Marks = dict[TopicPartition, tuple[int, int]]


class _Known(NamedTuple):
    """The answer to the last call, all of it by READs.  `marks` are in the order of `wanted`."""

    wanted: list[TopicPartition]
    topic_ids: dict[str, str] | None
    fetchers: tuple[DirectFetcher, ...]
    marks: Marks


class Watermarks:
    """See the module.  `settings`: rows of the client table."""

    def __init__(
        self,
        connections: ReadConnections,
        admin: Admin,
        settings: Mapping[str, Any],
        environment: Environment,
    ) -> None:
        self._lock = threading.Lock()
        self._connections = connections
        # The topic that the watermarks of a partition are of; only while ids are asked for.
        self._topic_ids: dict[TopicPartition, str] = {}
        self._admin = admin
        self._environment = environment
        self._max_age_s: float = settings["metadata.max.age.ms"] / 1000
        self._direct = DirectPaths(connections, settings)
        # Partitions that the broker has no slot for, and until when not to ask for one again.
        self._without_slot: dict[TopicPartition, float] = {}
        self._known: _Known | None = None

    def of(
        self, tps: Iterable[TopicPartition], topic_ids: Mapping[str, str] | None = None
    ) -> Marks:
        """The watermarks of each partition.  With `topic_ids`, UnknownTopicError tells of a topic
        that has not the id given here any more: it was deleted, and another has its name.  Whatever
        is learned, by a new slot or over TCP, is followed by a request for the topic's id.

        All or nothing: where a broker cannot be reached, the error names it and a partition that it
        leads (also as `topic_partition`).  The partitions of other brokers are answered by a call
        without those."""
        wanted = list(tps)
        began = self._environment.monotonic()
        moved: Backoff | None = None
        lost: Backoff | None = None
        while True:
            try:
                out, asked = self._look_twice(wanted, topic_ids)
                break
            except KdirectError as e:
                # Leaders move, and those that were just elected cannot tell for a moment.
                cluster = self._connections.cluster
                if has_moved(e):
                    backoff = moved = moved or cluster.backoff(cluster.timeout_ms)
                elif isinstance(e, QueuePairError | BrokerUnavailableError):
                    took_ms = (self._environment.monotonic() - began) * 1000
                    left_ms = max(0.0, cluster.settings["connect.timeout.ms"] - took_ms)
                    backoff = lost = lost or cluster.backoff(left_ms)
                else:
                    raise
                if not backoff.wait():
                    raise
                for topic in {tp.topic for tp in wanted}:
                    cluster.forget(topic)
        if asked:  # this may take long where a broker is lost: nobody waits for the lock meanwhile
            out |= self._ask([tp for tp in wanted if tp in asked])
            if topic_ids is not None and (others := _others(self._ids(asked), topic_ids)):
                raise _deleted(others[0])
        return {tp: out[tp] for tp in wanted} if asked or list(out) != wanted else out

    def _look_twice(
        self, wanted: list[TopicPartition], topic_ids: Mapping[str, str] | None
    ) -> tuple[Marks, set[TopicPartition]]:
        with self._lock:
            try:
                return self._look(wanted, topic_ids)
            except (QueuePairError, BrokerUnavailableError, ClosedError) as e:
                log.debug("watermarks are looked at again: %s", e)
                self._without_slot.clear()
                return self._look(wanted, topic_ids)

    def _look(
        self, wanted: list[TopicPartition], topic_ids: Mapping[str, str] | None
    ) -> tuple[Marks, set[TopicPartition]]:
        """What READs tell; the partitions that have to be asked for."""
        if self._known is not None and (known := self._look_again(self._known, wanted, topic_ids)):
            return known, set()
        now = self._environment.monotonic()
        direct = self._direct
        asked = {tp for tp in wanted if self._without_slot.get(tp, 0.0) > now}
        watched = {tp for tp in wanted if tp not in asked}
        new: set[TopicPartition] = set()
        for fetcher in direct.moved():
            direct.drop(fetcher)
        for fetcher in list(direct):
            if not watched.isdisjoint(fetcher.partitions):
                self._refresh(fetcher)
                if topic_ids is not None:
                    ended = [tp for tp in fetcher.partitions if fetcher.stream(tp).revoked]
                    self._raise_ended([tp for tp in ended if tp in watched], topic_ids)
                new |= watched.intersection(fetcher.stale())
        new |= {tp for tp in watched if direct.fetcher_of(tp) is None}
        if new:
            for tp in new:
                self._topic_ids.pop(tp, None)
            asked |= self._enter([tp for tp in wanted if tp in new], now)
        out: Marks = {}
        for tp in watched - asked:
            found = direct.fetcher_of(tp)
            assert found is not None
            out[tp] = found.watermarks(tp)
        if topic_ids is not None:
            if entered := out.keys() - self._topic_ids.keys():
                self._topic_ids |= self._ids(entered)
            others = _others({tp: self._topic_ids[tp] for tp in out}, topic_ids)
            if others:
                # Or the broker that told the id is behind: the next call gets a new slot, and asks.
                self._direct.release(others)
                raise _deleted(others[0])
        # A file that was finished while it was entered has no slot, of which news would come.
        if not asked and all(watched.isdisjoint(fetcher.stale()) for fetcher in direct):
            ids = None if topic_ids is None else dict(topic_ids)
            self._known = _Known(wanted, ids, tuple(direct), {tp: out[tp] for tp in wanted})
        return out, asked

    def _look_again(
        self, known: _Known, wanted: list[TopicPartition], topic_ids: Mapping[str, str] | None
    ) -> Marks | None:
        """The answer if the question is the same as before: only what has changed is looked at.
        None where more has to be done than that."""
        self._known = None  # until all of it is known again
        if known.wanted != wanted or known.topic_ids != topic_ids:
            return None
        moved = self._direct.moved()
        for fetcher in moved:
            self._direct.drop(fetcher)
        if moved or tuple(self._direct) != known.fetchers:
            return None
        for fetcher in known.fetchers:
            try:
                news = fetcher.news()
            except KdirectError:
                self._direct.drop(fetcher)
                raise
            if news is None:
                return None
            for tp in news:
                if tp in known.marks:
                    known.marks[tp] = fetcher.watermarks(tp)
        self._known = known
        return dict(known.marks)

    def _refresh(self, fetcher: DirectFetcher) -> None:
        try:
            fetcher.refresh()
        except KdirectError:
            self._direct.drop(fetcher)
            raise

    def _raise_ended(self, revoked: list[TopicPartition], topic_ids: Mapping[str, str]) -> None:
        """Of partitions whose slots were revoked: UnknownTopicError where they were deleted.
        Another broker leads the others."""
        for tp in revoked:
            self._direct.release([tp])
            try:
                look_again(self._connections.cluster, tp, topic_ids.get(tp.topic))
            except UnknownTopicError:
                raise _deleted(tp) from None

    def _ids(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, str]:
        """The ids of the topics that `tps` are of now; "" where the broker has none.

        Asked for after what they are to be the ids of: if one is as expected, so was the topic all
        the time, for no id is given twice."""
        found = self._connections.cluster.refresh(sorted({tp.topic for tp in tps}))
        return {tp: (found[tp.topic].topic_id or "") if tp.topic in found else "gone" for tp in tps}

    def _enter(self, tps: list[TopicPartition], now: float) -> set[TopicPartition]:
        """Get slots; the partitions that have to be asked for."""
        entered = self._direct.enter(dict.fromkeys(tps, LATEST_OFFSET))
        for error in entered.lost.values():
            raise concerning([tp for tp, e in entered.lost.items() if e is error], error) from error
        for tp, error in entered.refused.items():
            raise as_moved(self._connections.cluster, tp, error)
        denied = {tp: e for tp, e in entered.over_tcp.items() if isinstance(e, AccessDeniedError)}
        if denied:
            # Most likely there are more partitions than slots: those that have one keep it.
            first = next(iter(denied))
            log.warning(
                "watermarks of %d partitions, %s among them, are asked for over TCP: %s",
                len(denied),
                first,
                denied[first],
            )
            self._without_slot |= dict.fromkeys(denied, now + self._max_age_s)
        return set(entered.over_tcp)

    def _ask(self, tps: list[TopicPartition]) -> Marks:
        starts = self._admin.list_offsets(dict.fromkeys(tps, EARLIEST_OFFSET))
        ends = self._admin.list_offsets(dict.fromkeys(tps, LATEST_OFFSET))
        return {tp: (starts[tp][0], ends[tp][0]) for tp in tps}

    def close(self) -> None:
        """Give all slots back; the next call asks for them again."""
        with self._lock:
            self._without_slot.clear()
            self._known = None
            self._direct.close()


def _deleted(tp: TopicPartition) -> UnknownTopicError:
    return UnknownTopicError(f"{tp} was deleted while it was watched", hint="list the topics again")


def _others(
    found: Mapping[TopicPartition, str], topic_ids: Mapping[str, str]
) -> list[TopicPartition]:
    """The partitions of which what was learned is another topic's."""
    return [tp for tp, i in found.items() if i and topic_ids.get(tp.topic, i) != i]
