"""Many partitions over Kafka's Fetch, with one request under way at each leader.

Owns: the leased connections, where each partition stands, and the bytes fetched and not yet
consumed.  What is in the bytes is the codec's business; when to give up is the consumer's.

Invariants:

- Bytes of a partition are whole batches, in order, without a gap; they are a window into the answer
  they came in.
- An answer for a partition that was moved meanwhile is dropped.
- A request waits at the broker (`silence` says for how long) only while no wanted partition has
  bytes in hand: a partition with bytes in hand must not wait for the others' news.

The work for a record does not grow with the number of partitions.  Each partition is in one of
these places, and a step looks at how many are in a place, never at each of them:

- ready: bytes or an error are in hand.  `next_ready` names them in turn.
- new: its leader is to be looked up.
- hungry: nothing is in hand, and the last answer had something, or had no room for it, or there was
  none yet.
- quiet: the last answer had nothing.  Hungry and quiet are places at a leader; those of a leader
  that is lost stay there while it is looked for (`lost_broker`), and are new once it was reached.
- later: it has no leader; it is new again after RETRY_S.
- under way: named in a request that is not answered.
- paused: whatever it has is kept.

A partition that turns hungry while a request waits at the broker (it was assigned, moved or
resumed) makes that request be given up, and sent again with it, but not before the next look is
due.

While nothing is ready, a request names all that are hungry or quiet.  While something is, a request
names the hungry ones once they are as many as those that are ready, so each partition is named
about once for each time that it brought bytes.  The quiet ones, which would be named again and
again for nothing, are looked at as often as takes a tenth of the time or so (LOOK_S, LOOK_S_EACH).
Nothing is asked for while more is in hand than one answer has room for, unless none of that is
ready.

One thread at a time.
"""

from __future__ import annotations

import enum
import logging
import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kdirect.client.aborted import without_aborted
from kdirect.client.cursor import TcpCursor
from kdirect.client.lost_broker import CONNECT_MS_BESIDES, LOST, Search, as_left, ask_leader
from kdirect.client.silence import FetchWait
from kdirect.client.tcp_fetch import Asked, answered, fetch_request
from kdirect.errors import BrokerError, ClosedError, KdirectError
from kdirect.model import TopicPartition
from kdirect.wire.attempt import Attempt
from kdirect.wire.bell import Bell
from kdirect.wire.broker_errors import broker_error
from kdirect.wire.cluster import Cluster
from kdirect.wire.connection import Connection, Pending, wait_for_any
from kdirect.wire.metadata import Node

log = logging.getLogger("kdirect.client")

RETRY_S = 0.1
NEWS_EVERY_S = 2.0  # between two questions which replicas of the rack are in sync
# Quiet partitions are looked at no more often than this while others have bytes in hand, and as
# much less often for each of them: to name one takes client and broker about 10 us each.
LOOK_S = 0.01
LOOK_S_EACH = 1e-4
ANSWER_PARTITIONS = 16  # an answer has room for `fetch.max.read.bytes` of so many partitions

# In the order in which partitions came there.  A plain dict would have to skip all that were
# deleted before its first entry.
_Place = OrderedDict[TopicPartition, None]


@dataclass(slots=True, eq=False)
class _Partition:
    cursor: TcpCursor  # what is in hand
    fetch_offset: int  # of the next request: after what is in hand
    last_epoch: int  # leader epoch of the batch before it; -1: not known
    max_bytes: int
    error: KdirectError | None = None
    high_watermark: int = -1
    log_start_offset: int = -1
    paused: bool = False
    place: _Place | None = None  # None: under way, later or paused
    leader: _Leader | None = None  # None: to be looked up


@dataclass(slots=True, eq=False)
class _Leader:
    node: Node
    connection: Connection | None = None
    hungry: _Place = field(default_factory=OrderedDict)
    quiet: _Place = field(default_factory=OrderedDict)
    next_look: float = 0.0
    pending: Pending | None = None
    asked: dict[TopicPartition, int] = field(default_factory=dict)  # what is pending: offsets
    waits: bool = False  # at the broker, for the first record: the pending request
    wait_ms: int = 0  # how long the next one waits
    until: float = 0.0
    search: Search[Connection] | None = None  # it is lost, and looked for


class _News(enum.Enum):
    """What an answer had for one partition."""

    FOUND = enum.auto()  # bytes, or an error
    NOTHING = enum.auto()
    MORE = enum.auto()  # there are records, but they were not in this answer
    LATER = enum.auto()  # its leader is being elected, or has moved


class TcpRound:
    """Reads the partitions given to `assign`.  `settings`: rows of the client table.  `bell` ends a
    wait."""

    def __init__(
        self, cluster: Cluster, settings: Mapping[str, Any], bell: Bell | None = None
    ) -> None:
        self._cluster = cluster
        self._environment = cluster.environment
        self._committed_only = settings["isolation.level"] == "read_committed"
        self._fetch_bytes: int = settings["fetch.max.read.bytes"]
        self._max_batch_bytes: int = settings["max.batch.bytes"]
        self._wait = FetchWait.of(settings)
        self._bell = bell
        self._min_bytes: int = settings["fetch.min.bytes"]
        self._partitions: dict[TopicPartition, _Partition] = {}
        self._ready: _Place = OrderedDict()
        self._new: _Place = OrderedDict()
        self._later: OrderedDict[TopicPartition, float] = OrderedDict()  # when each is new again
        self._held_bytes = 0
        self._leaders: dict[Node, _Leader] = {}
        self._news: Attempt[None] | None = None  # while it is asked where replicas are
        self._next_news = self._environment.monotonic() + NEWS_EVERY_S
        # What searches for lost leaders came to that were in vain, for the caller to take.
        self.in_vain: list[KdirectError] = []
        self._pid = os.getpid()
        self.fetches = self.fetched_bytes = self.asked_partitions = 0

    def __contains__(self, tp: TopicPartition) -> bool:
        return tp in self._partitions

    def assign(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Read these too, from these offsets; those read already are moved there."""
        for tp, offset in offsets.items():
            self._forget(tp)
            cursor = TcpCursor(tp, offset, self, max_batch_bytes=self._max_batch_bytes)
            self._partitions[tp] = _Partition(cursor, offset, -1, self._fetch_bytes)
            self._put(tp, self._new)

    def follow(self, tp: TopicPartition, epoch: int) -> None:
        """`tp`, which was just assigned, is read after a batch of this leader epoch."""
        partition = self._partitions[tp]
        partition.last_epoch = epoch
        partition.cursor.follow(epoch)

    def release(self, tps: Iterable[TopicPartition]) -> None:
        for tp in tps:
            self._forget(tp)

    def pause(self, tps: Iterable[TopicPartition]) -> None:
        """Ask for no more of these (which are read), and do not name them as ready; bytes in hand
        are kept."""
        for tp in tps:
            self._partitions[tp].paused = True
            self._put(tp, None)

    def resume(self, tps: Iterable[TopicPartition]) -> None:
        for tp in tps:
            partition = self._partitions[tp]
            if partition.paused:
                partition.paused = False
                self._settle(tp, partition)

    @property
    def ready(self) -> int:
        """How many partitions have bytes or an error in hand and are not paused."""
        return len(self._ready)

    def next_ready(self) -> TopicPartition:
        """The ready partition that was named least recently.  There must be one."""
        tp = next(iter(self._ready))
        self._ready.move_to_end(tp)
        return tp

    def cursor(self, tp: TopicPartition) -> TcpCursor | None:
        partition = self._partitions.get(tp)
        return partition.cursor if partition is not None else None

    def bring(self, cursor: TcpCursor, wait_ms: float) -> bool:
        """See `TcpCursor`.  Bytes are brought by `step`, for all partitions together; here is
        raised, once, what the broker answered for one of them: OffsetOutOfRangeError,
        UnknownTopicError, CorruptBatchError (frame), ..."""
        partition = self._partitions[cursor.tp]
        error, partition.error = partition.error, None
        if error is not None:
            self._settle(cursor.tp, partition)
            raise error
        return False

    def consumed(self, cursor: TcpCursor, n: int) -> None:
        """See `TcpCursor`."""
        self._held_bytes -= n
        if not len(cursor.data):
            self._settle(cursor.tp, self._partitions[cursor.tp])

    def watermarks(self, tp: TopicPartition) -> tuple[int, int]:
        """(log start offset, high watermark) as of the last answer, -1 before."""
        partition = self._partitions[tp]
        return partition.log_start_offset, partition.high_watermark

    def step(self, wait_ms: float) -> bool:
        """Ask for what is lacking, and take in answers; waits up to `wait_ms` for one.  True: there
        is news of some partition.

        A leader that is gone takes down its own partitions only: they stay where they are while it
        is looked for, and `in_vain` tells of each search that found nothing.
        """
        if self._pid != os.getpid():
            raise ClosedError(
                "the consumer belongs to the process that was forked from",
                hint="open a new one in this process",
            )
        now = self._environment.monotonic()
        if self._cluster.rack is not None:
            self._look_for_replicas(now)
        self._ask(now)
        for leader in self._leaders.values():
            if leader.pending is not None and leader.waits and leader.hungry:
                wait_ms = max(0.0, min(wait_ms, (leader.next_look - now) * 1000))
        if self._unsettled:
            wait_ms = min(wait_ms, 1000 * RETRY_S)
        busy = [leader for leader in self._leaders.values() if leader.pending is not None]
        if self._take_each(busy):
            return True
        if not busy and wait_ms > 0:
            self._environment.sleep(min(wait_ms, 1000 * RETRY_S) / 1000)
        until = now + wait_ms / 1000
        while busy and all(leader.pending is not None for leader in busy):
            left_ms = (until - self._environment.monotonic()) * 1000
            if left_ms <= 0 or wait_for_any(_connections(busy), left_ms, self._bell):
                break
            if self._take_each(busy):
                return True
        return False

    def _take_each(self, leaders: Iterable[_Leader]) -> bool:
        news = False
        for leader in leaders:
            news |= self._take(leader)
        return news

    @property
    def _unsettled(self) -> bool:
        """Is there something that no answer tells the end of?"""
        return (
            bool(self._new or self._later)
            or self._news is not None
            or any(leader.search is not None for leader in self._leaders.values())
        )

    @property
    def waits_on(self) -> list[Connection] | None:
        """The connections on which the next news comes; None where there is more to do than to wait
        for it."""
        leaders = self._leaders.values()
        if self._unsettled or self._ready or any(x.hungry or x.quiet for x in leaders):
            return None
        return _connections(x for x in leaders if x.pending is not None)

    # -- places ------------------------------------------------------------------------------------

    def _put(self, tp: TopicPartition, place: _Place | None) -> None:
        partition = self._partitions[tp]
        if partition.place is not None:
            del partition.place[tp]
        else:
            self._later.pop(tp, None)
        partition.place = place
        if place is not None:
            place[tp] = None

    def _settle(self, tp: TopicPartition, partition: _Partition, *, quiet: bool = False) -> None:
        """Put `tp` where it belongs: to the ready ones if it has something in hand."""
        if partition.paused:
            self._put(tp, None)
        elif len(partition.cursor.data) or partition.error is not None:
            self._put(tp, self._ready)
        elif partition.leader is None:
            self._put(tp, self._new)
        else:
            self._put(tp, partition.leader.quiet if quiet else partition.leader.hungry)

    def _put_later(self, tp: TopicPartition, partition: _Partition) -> None:
        """Look its leader up again, but not at once."""
        partition.leader = None
        self._put(tp, None)
        if not partition.paused:
            self._later[tp] = self._environment.monotonic() + RETRY_S

    def _forget(self, tp: TopicPartition) -> None:
        partition = self._partitions.get(tp)
        if partition is not None:
            self._put(tp, None)
            self._held_bytes -= len(partition.cursor.data)
            del self._partitions[tp]

    def _cut(self, leader: _Leader) -> None:
        """Give up a request that waits for a first record: another partition wants to wait, too."""
        asked, leader.asked, leader.pending = leader.asked, {}, None
        if leader.connection is not None:
            leader.connection.close()
        for tp in asked:
            partition = self._partitions.get(tp)
            if partition is not None and partition.leader is leader and partition.place is None:
                self._settle(tp, partition, quiet=True)

    def _drop(self, leader: _Leader) -> None:
        """Close a leader's connection; its partitions are looked up again."""
        del self._leaders[leader.node]
        if leader.connection is not None:
            leader.connection.close()
        for tp, partition in self._partitions.items():
            if partition.leader is leader:
                partition.leader = None
                self._settle(tp, partition)

    # -- leaders that are lost ---------------------------------------------------------------------

    def is_lost(self, tp: TopicPartition) -> bool:
        """Is the leader of `tp` looked for?"""
        partition = self._partitions.get(tp)
        if partition is None or partition.leader is None:
            return False
        return partition.leader.search is not None

    def _lose(self, leader: _Leader, error: KdirectError, asked: Iterable[TopicPartition]) -> None:
        """Look for `leader`; `asked` are what its last request named."""
        leader.pending, leader.asked = None, {}
        if leader.connection is not None:
            leader.connection.close()
        for tp in asked:
            partition = self._partitions.get(tp)
            if partition is not None and partition.leader is leader and partition.place is None:
                self._settle(tp, partition)
        places = [*leader.hungry, *leader.quiet]
        for tp in places:
            self._cluster.leave_replica(tp)
        self._forget_leaders(leader)
        log.warning("%s; its %d partitions wait until it is back", error.message, len(places))
        cluster = self._cluster

        def reach() -> Connection:
            # `places` does not change; a connection given back is the next one that is leased.
            connection = cluster.lease(places[0])
            try:
                cluster.give_back(connection)
            except KdirectError:
                connection.close()
                raise
            return connection

        leader.search = Search(self._environment, reach)

    def _forget_leaders(self, leader: _Leader) -> None:
        """Another broker may lead its partitions by now."""
        for topic in {tp.topic for tp, x in self._partitions.items() if x.leader is leader}:
            self._cluster.forget(topic)

    def _look_for(self, leader: _Leader, search: Search[Connection]) -> None:
        if not leader.hungry and not leader.quiet:
            return
        try:
            if search.found() is None:
                return
        except LOST as e:
            self.in_vain.append(e)
            return
        except KdirectError as e:
            # It concerns one of the partitions: each is told when its leader is looked up.
            log.debug("the search for a lost broker ends: %s", e)
        self._drop(leader)

    # -- replicas of the rack ----------------------------------------------------------------------

    def _look_for_replicas(self, now: float) -> None:
        """Replicas of the rack come and go: every NEWS_EVERY_S brokers are asked, nobody waits, and
        what is to be read elsewhere by now is new."""
        cluster = self._cluster
        if self._news is None:
            if now >= self._next_news and self._partitions:
                self._next_news = now + NEWS_EVERY_S
                tps = list(self._partitions)
                self._news = self._environment.spawn(lambda: ask_leader(cluster, *tps))
            return
        if not self._news.done:
            return
        self._news = None
        for tp, partition in self._partitions.items():
            if partition.leader is None or partition.leader.search is not None:
                continue
            node = cluster.reader_at_hand(tp)
            if node is not None and node != partition.leader.node:
                partition.leader = None  # whose answer, if one is under way, is dropped
                self._settle(tp, partition)

    # -- requests ----------------------------------------------------------------------------------

    def _ask(self, now: float) -> None:
        for leader in list(self._leaders.values()):
            if leader.search is not None:
                self._look_for(leader, leader.search)
        while self._later and self._later[tp := next(iter(self._later))] <= now:
            self._put(tp, self._new)
        if self._new:
            self._find_leaders()
        for leader in list(self._leaders.values()):
            if (
                leader.pending is not None
                and leader.waits
                and leader.hungry
                and now >= leader.next_look
            ):
                self._cut(leader)
            if leader.pending is None and leader.search is None and (leader.hungry or leader.quiet):
                self._ask_leader(leader, now)

    def _find_leaders(self) -> None:
        """A partition that has no leader, or is unknown, concerns itself alone."""
        found, failed = self._cluster.leaders(self._new, closest=True)
        for node, tps in found.items():
            leader = self._leaders.get(node)
            if leader is None:
                leader = self._leaders[node] = _Leader(node, wait_ms=self._wait.first_ms)
            for tp in tps:
                self._partitions[tp].leader = leader
                self._put(tp, leader.hungry)
        for tp, error in failed.items():
            partition = self._partitions[tp]
            if isinstance(error, BrokerError) and error.retriable:
                self._put_later(tp, partition)
            else:
                partition.error = error
                self._settle(tp, partition)

    def _ask_leader(self, leader: _Leader, now: float) -> None:
        """Name the partitions whose turn it is; see the module."""
        wait_ms = 0
        if not self._ready:
            wait_ms = min(leader.wait_ms, int(1000 * RETRY_S)) if self._later else leader.wait_ms
        elif self._held_bytes > ANSWER_PARTITIONS * self._fetch_bytes:
            return
        look = not self._ready or now >= leader.next_look
        if not look and len(leader.hungry) < len(self._ready):
            return
        tps = [*leader.hungry, *leader.quiet] if look else list(leader.hungry)
        if look:
            leader.next_look = now + max(LOOK_S, LOOK_S_EACH * len(tps))
        if leader.connection is None or leader.connection.closed:
            try:
                leader.connection = self._cluster.lease(
                    tps[0], timeout_ms=CONNECT_MS_BESIDES, closest=True
                )
            except LOST as e:
                self._lose(leader, e, ())
                return
            except KdirectError:
                self._drop(leader)  # another broker may lead its partitions by now
                raise
        self._send(leader, leader.connection, tps, wait_ms, now)
        if leader.pending is not None:
            for tp in tps:
                self._put(tp, None)

    def _send(
        self,
        leader: _Leader,
        connection: Connection,
        tps: list[TopicPartition],
        wait_ms: int,
        now: float,
    ) -> None:
        cluster, partitions = self._cluster, self._partitions
        rows = [
            Asked(tp, x.fetch_offset, x.max_bytes, cluster.leader_epoch(tp), x.last_epoch)
            for tp in tps
            for x in (partitions[tp],)
        ]
        message = fetch_request(
            rows,
            wait_ms=wait_ms,
            min_bytes=self._min_bytes,
            max_bytes=max(x.max_bytes for x in rows) * min(len(tps), ANSWER_PARTITIONS),
            committed_only=self._committed_only,
        )
        asked = {x.tp: x.offset for x in rows}
        try:
            leader.pending = connection.submit(message)
        except LOST as e:
            self._lose(leader, e, ())
            return
        leader.asked = asked
        leader.waits = wait_ms > 0
        self.asked_partitions += len(asked)
        leader.until = now + (self._cluster.timeout_ms + wait_ms) / 1000

    def _take(self, leader: _Leader) -> bool:
        pending, asked = leader.pending, leader.asked
        assert pending is not None and leader.connection is not None
        try:
            if not pending.wait(0.0) and self._environment.monotonic() < leader.until:
                return False
            leader.pending, leader.asked = None, {}
            answer = pending.result(0)
            if answer.error_code:
                raise broker_error(answer.error_code, f"fetch from {leader.connection.peer}")
        except LOST as e:
            self._lose(leader, e, asked)
            return False
        except KdirectError:
            for topic in {tp.topic for tp in asked}:
                self._cluster.forget(topic)
            self._drop(leader)
            raise
        self.fetches += 1
        news = False
        short: list[TopicPartition] = []
        for topic in answer.responses:
            for x in topic.partitions:
                tp = TopicPartition(topic.topic, x.partition_index)
                partition = self._partitions.get(tp)
                if (
                    partition is None
                    or asked.pop(tp, None) != partition.fetch_offset
                    or partition.leader is not leader
                ):
                    continue
                brought = self._arrived(tp, partition, x)
                news |= brought is _News.FOUND
                if brought is _News.LATER:
                    self._put_later(tp, partition)
                elif brought is _News.MORE:
                    short.append(tp)
                else:
                    self._settle(tp, partition, quiet=True)
        for tp in short:  # without any news they would be asked for at once, and again at once
            self._settle(tp, self._partitions[tp], quiet=not news)
        for tp in asked:  # what the broker left out
            partition = self._partitions.get(tp)
            if partition is not None and partition.leader is leader and partition.place is None:
                self._settle(tp, partition, quiet=True)
        if news or leader.waits:
            leader.wait_ms = self._wait.after(leader.wait_ms, found=news)
        return news

    def _arrived(self, tp: TopicPartition, partition: _Partition, x: Any) -> _News:
        offset = partition.fetch_offset
        try:
            found = answered(
                tp, offset, partition.last_epoch, x, partition.max_bytes, self._max_batch_bytes
            )
        except KdirectError as error:
            e = as_left(self._cluster, tp, error)
            if x.error_code and e.retriable:
                # The leader moved, or is being elected, or the topic was deleted: metadata tells.
                self._cluster.forget(tp.topic)
                return _News.LATER
            partition.error = e
            return _News.FOUND
        partition.high_watermark, partition.log_start_offset = x.high_watermark, x.log_start_offset
        if found.needed:
            partition.max_bytes = found.needed
            return _News.MORE
        if not len(found.data):
            end = x.last_stable_offset if self._committed_only else x.high_watermark
            return _News.MORE if end > offset else _News.NOTHING
        data = found.data
        if self._committed_only and x.aborted_transactions:
            aborted = [(t.producer_id, t.first_offset) for t in x.aborted_transactions]
            data = without_aborted(data, aborted)
        partition.cursor.arrived(data, found.last_epoch)
        partition.fetch_offset, partition.last_epoch = found.next_offset, found.last_epoch
        partition.max_bytes = self._fetch_bytes
        self.fetched_bytes += len(found.data)
        self._held_bytes += len(found.data)
        return _News.FOUND

    def close(self) -> None:
        leaders, self._leaders = self._leaders, {}
        if self._pid == os.getpid():
            for leader in leaders.values():
                if leader.connection is None:
                    continue
                if leader.pending is None:
                    self._cluster.give_back(leader.connection)
                else:
                    leader.connection.close()
        for place in (self._partitions, self._ready, self._new, self._later):
            place.clear()

    def statistics(self) -> dict[str, int]:
        return {
            "fetches": self.fetches,
            "fetched_bytes": self.fetched_bytes,
            "fetch_partitions": self.asked_partitions,
        }


def _connections(leaders: Iterable[_Leader]) -> list[Connection]:
    return [x.connection for x in leaders if x.connection is not None]
