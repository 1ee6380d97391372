"""Which path brings the bytes of each partition that is read: READs, objects or Fetch requests.

Owns: one `DirectFetcher` for each broker, found by the leader of a partition, and the one decision
to read a partition over TCP: where the transport to its leader is TCP, where it has no leader now,
or where the broker denies access (a broker has a limited number of slots and queue pairs).  Before
that comes the object store (`cold`), for offsets that the broker does not have itself; with
``prefer.cold`` it comes before READs, too.  What may not enter: which partition is looked at next,
and how often something is tried again.

Invariants:

- A partition has one path at a time, and a cursor while it has one.
- A broker that is lost ends its own fetcher only.  The partitions of other brokers are read on.
- Lost connections are not errors of partitions: they are raised as they are (`LOST`), and the
  partitions concerned have no path until they are entered again.

One thread at a time, or its owner's lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kdirect.client.cold import ColdReads
from kdirect.client.cold_stores import ColdStores
from kdirect.client.cursor import Cursor
from kdirect.client.direct import DirectFetcher
from kdirect.client.lost_broker import CONNECT_MS_BESIDES, LOST, as_left, ask_leader
from kdirect.errors import (
    AccessDeniedError,
    BrokerError,
    KdirectError,
    QueuePairError,
    TransportError,
    UnknownTopicError,
)
from kdirect.model import TopicPartition
from kdirect.wire.attempt import Attempt
from kdirect.wire.channel import Channel
from kdirect.wire.cluster import Cluster
from kdirect.wire.environment import Environment

log = logging.getLogger("kdirect.client")

NEWS_EVERY_S = 2.0  # between two questions where partitions are led whose slots are looked at


class ReadConnections(Protocol):
    """What reading needs of a session."""

    @property
    def cluster(self) -> Cluster:
        """Who leads what, and connections."""

    @property
    def cold_stores(self) -> ColdStores | None:
        """The object stores of remote storage; None where nothing is read past the broker."""

    def transport_to(self, tp: TopicPartition, *, closest: bool = False) -> str:
        """The transport to the leader of `tp`; with `closest` to the broker that it is read at."""

    def channel(self, tp: TopicPartition, *, closest: bool = False) -> Channel:
        """A new queue pair to the leader of `tp`; with `closest` to the broker that it is read
        at."""


class TcpSource(Protocol):
    """What reads partitions over TCP: `TcpRound`, `SinglePartition`."""

    def assign(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Read these too, from these offsets."""

    def cursor(self, tp: TopicPartition) -> Cursor | None:
        """The cursor of a partition that is read."""

    def follow(self, tp: TopicPartition, epoch: int) -> None:
        """Before what is read of `tp`, which was just assigned, is a batch of this leader epoch."""

    def release(self, tps: Iterable[TopicPartition]) -> None:
        """Stop reading these, as far as they are read."""

    def close(self) -> None:
        """The end."""

    def statistics(self) -> dict[str, int]:
        """What was fetched."""


@dataclass(slots=True)
class Entered:
    """What became of partitions that were to be read.  Those that are in none of these are READ."""

    # No READ leads there.  The error says why, if that may change: access was denied, or there is
    # no leader now.  None: the transport to the leader is TCP.
    over_tcp: dict[TopicPartition, KdirectError | None] = field(default_factory=dict)
    refused: dict[TopicPartition, KdirectError] = field(default_factory=dict)
    # A broker was lost; its partitions are to be entered again.
    lost: dict[TopicPartition, KdirectError] = field(default_factory=dict)
    # Their broker has not answered yet: to be entered again soon.
    asked: set[TopicPartition] = field(default_factory=set)


class DirectPaths:
    """A fetcher for each broker.  With `besides` no caller waits long for one broker while others
    are read: see `DirectFetcher`.  With `closest` partitions are read at replicas of `client.rack`
    (`kdirect.wire.closest`), else at their leaders."""

    def __init__(
        self,
        connections: ReadConnections,
        settings: Mapping[str, Any],
        besides: Environment | None = None,
        *,
        closest: bool = False,
    ) -> None:
        self._connections = connections
        self._besides = besides
        self._closest = closest
        self._others = False  # are partitions read over TCP, too?
        self._settings = settings
        self._committed_only = settings["isolation.level"] == "read_committed"
        self._tcp_only = settings["transport"] == "tcp"
        self._fetchers: dict[tuple[str, int], DirectFetcher] = {}
        self._home: dict[TopicPartition, DirectFetcher] = {}  # who reads it, or read it last
        self._has_read = False
        self._news: Attempt[None] | None = None  # while leaders are asked for
        self._next_news = 0.0

    def __iter__(self) -> Iterator[DirectFetcher]:
        return iter(self._fetchers.values())

    def __len__(self) -> int:
        return len(self._fetchers)

    def fetcher_of(self, tp: TopicPartition) -> DirectFetcher | None:
        """The fetcher that reads `tp`."""
        fetcher = self._home.get(tp)
        return fetcher if fetcher is not None and tp in fetcher else None

    def enter(self, offsets: Mapping[TopicPartition, int]) -> Entered:
        """Enter the files that hold these offsets, with one request for each broker.

        Raises what asking for the leaders raises when no broker answers.
        """
        out = Entered()
        if self._tcp_only:
            out.over_tcp = dict.fromkeys(offsets)
            return out
        for tps in self._by_leader(offsets, out):
            part = {tp: offsets[tp] for tp in tps}
            try:
                self._enter_at(part, out)
            except LOST as e:  # there is no fetcher
                out.lost.update(dict.fromkeys(part, e))
        return out

    def _by_leader(
        self, tps: Iterable[TopicPartition], out: Entered
    ) -> Iterable[list[TopicPartition]]:
        """`tps`, grouped by their leaders; those that have none go over TCP, where they are waited
        for."""
        cluster = self._connections.cluster
        found, failed = cluster.leaders(tps, closest=self._closest)
        unknown = [tp for tp, e in failed.items() if isinstance(e, UnknownTopicError)]
        if unknown:
            # What is known of a topic may be older than its newest partitions.
            for topic in {tp.topic for tp in unknown}:
                cluster.forget(topic)
            again, failed_again = cluster.leaders(unknown, closest=self._closest)
            failed.update(failed_again)
            for node, those in again.items():
                found.setdefault(node, []).extend(those)
                for tp in those:
                    del failed[tp]
        for tp, error in failed.items():
            if isinstance(error, BrokerError) and error.retriable:
                out.over_tcp[tp] = error
            else:
                out.refused[tp] = error
        return found.values()

    def _enter_at(self, offsets: Mapping[TopicPartition, int], out: Entered) -> None:
        """Enter partitions of one broker."""
        try:
            fetcher = self._fetcher(next(iter(offsets)))
        except AccessDeniedError as e:  # no queue pair is to be had, by the broker's limits
            out.over_tcp.update(dict.fromkeys(offsets, e))
            return
        if fetcher is None:
            out.over_tcp.update(dict.fromkeys(offsets))
            return
        try:
            try:
                self._sort(offsets, fetcher, fetcher.enter(offsets), out)
            except LOST:
                raise
            except AccessDeniedError as e:
                out.over_tcp.update(dict.fromkeys(offsets, e))
            except KdirectError:
                # The request failed as a whole: asked alone, each partition says what is wrong.
                for tp, offset in offsets.items():
                    self._enter_alone(tp, offset, fetcher, out)
        except LOST as e:
            out.lost.update(dict.fromkeys([*self.drop(fetcher), *offsets], e))

    def _enter_alone(
        self, tp: TopicPartition, offset: int, fetcher: DirectFetcher, out: Entered
    ) -> None:
        try:
            self._sort({tp: offset}, fetcher, fetcher.enter({tp: offset}), out)
        except LOST:
            raise
        except AccessDeniedError as e:
            out.over_tcp[tp] = e
        except KdirectError as e:
            out.refused[tp] = as_left(self._connections.cluster, tp, e)

    def _sort(
        self,
        offsets: Mapping[TopicPartition, int],
        fetcher: DirectFetcher,
        refused: Mapping[TopicPartition, KdirectError],
        out: Entered,
    ) -> None:
        for tp in offsets:
            error = refused.get(tp)
            if error is None:
                self._move_home(tp, fetcher)
            elif isinstance(error, AccessDeniedError) and error.undecided:
                out.asked.add(tp)
            elif isinstance(error, AccessDeniedError):
                out.over_tcp[tp] = error
            else:
                out.refused[tp] = as_left(self._connections.cluster, tp, error)

    def _move_home(self, tp: TopicPartition, fetcher: DirectFetcher) -> None:
        """`fetcher` reads `tp`, which another broker may have led until now."""
        before = self._home.get(tp)
        self._home[tp] = fetcher
        self._has_read = True
        if before is not None and before is not fetcher and tp in before:
            before.release([tp])

    def _fetcher(self, tp: TopicPartition) -> DirectFetcher | None:
        """The fetcher of the broker that leads `tp`; None where only TCP leads there."""
        connections, closest = self._connections, self._closest
        # Nor long where all brokers were lost at once: those who read go on asking, and look for
        # them meanwhile.
        if self._fetchers or (self._besides is not None and self._has_read):
            connections.cluster.connection_for(tp, timeout_ms=CONNECT_MS_BESIDES, closest=closest)
        if connections.transport_to(tp, closest=closest) == "tcp":
            return None
        address = connections.cluster.leader_address(tp, closest=closest)
        fetcher = self._fetchers.get(address)
        if fetcher is None or fetcher.channel.closed:
            if fetcher is not None:
                fetcher.close()
                del self._fetchers[address]
            try:
                channel = connections.channel(tp, closest=closest)
            except TransportError as e:
                # A READ over this transport was proven before: the broker goes, or comes back.
                raise QueuePairError(
                    f"no queue pair to the leader of {tp}: {e.message}", hint=e.hint
                ) from e
            address = (channel.connection.host, channel.connection.port)
            fetcher = self._fetchers.get(address)
            if fetcher is not None and not fetcher.channel.closed:
                channel.close()  # the partition has moved to a broker that is known
                return fetcher
            if fetcher is not None:
                fetcher.close()
            if self._committed_only and not channel.lists_aborted:
                channel.close()  # of an older broker only a Fetch tells what was aborted
                return None
            epoch_of = connections.cluster.leader_epoch
            of_replica = closest and connections.cluster.rack is not None
            fetcher = DirectFetcher(channel, self._settings, epoch_of, of_replica=of_replica)
            self._fetchers[address] = fetcher
            self._count_brokers()
        return fetcher

    def moved(self) -> list[DirectFetcher]:
        """The fetchers of brokers that some of their partitions are to be read at no more, for
        others lead them, or replicas of the rack come and go, as far as brokers say.

        Where there are several brokers, they are asked every NEWS_EVERY_S, and nobody waits: the
        slots of a broker that is stopped stay as they are."""
        cluster = self._connections.cluster
        if self._news is not None:
            if not self._news.done:
                return []
            self._news = None
            known = cluster.leader_address_at_hand
            return [
                fetcher
                for address, fetcher in self._fetchers.items()
                if any(
                    known(tp, closest=self._closest) not in (None, address)
                    for tp in fetcher.partitions
                )
            ]
        now = cluster.environment.monotonic()
        if now >= self._next_news:
            self._next_news = now + NEWS_EVERY_S
            tps = [tp for fetcher in self._fetchers.values() for tp in fetcher.partitions]
            if tps and cluster.has_several_brokers:
                self._news = cluster.environment.spawn(lambda: ask_leader(cluster, *tps))
        return []

    def others_are_read(self) -> None:
        """There are partitions that are read over TCP."""
        self._others = True
        self._count_brokers()

    def _count_brokers(self) -> None:
        several = self._others or len(self._fetchers) > 1
        for fetcher in self._fetchers.values():
            fetcher.besides = self._besides if several else None

    def drop_broken(self) -> list[TopicPartition]:
        """Close the fetchers whose channels are broken; the partitions that they read."""
        out: list[TopicPartition] = []
        for address, fetcher in list(self._fetchers.items()):
            if fetcher.channel.closed:
                out += fetcher.partitions
                self._close(address)
        return out

    def home(self, tp: TopicPartition) -> DirectFetcher | None:
        """The fetcher that reads `tp`, or that lost it by an error."""
        return self._home.get(tp)

    def drop(self, fetcher: DirectFetcher) -> list[TopicPartition]:
        """Close a fetcher whose broker was lost; the partitions that it read."""
        out = list(fetcher.partitions)
        for address, other in list(self._fetchers.items()):
            if other is fetcher:
                self._close(address)
        return out

    def _close(self, address: tuple[str, int]) -> None:
        fetcher = self._fetchers.pop(address)
        self._home = {tp: x for tp, x in self._home.items() if x is not fetcher}
        self._count_brokers()
        fetcher.close()

    def release(self, tps: Iterable[TopicPartition]) -> None:
        """Stop reading these, as far as they are read.  A broker that is lost meanwhile has taken
        its grants back anyway."""
        of_fetcher: dict[int, list[TopicPartition]] = {}
        for tp in tps:
            fetcher = self._home.pop(tp, None)
            if fetcher is not None:
                of_fetcher.setdefault(id(fetcher), []).append(tp)
        for address, fetcher in list(self._fetchers.items()):
            released = of_fetcher.get(id(fetcher), [])
            if released and set(released) >= set(fetcher.partitions):
                self._close(address)
            elif released:
                try:
                    fetcher.release(released)
                except LOST:
                    fetcher.channel.close()  # `drop_broken` finds it

    def close(self) -> None:
        for address in list(self._fetchers):
            self._close(address)

    def statistics(self) -> dict[str, int]:
        """The sums of `DirectFetcher.statistics`; nothing where no fetcher is open."""
        out: dict[str, int] = {}
        for fetcher in self._fetchers.values():
            for name, value in fetcher.statistics().items():
                out[name] = out.get(name, 0) + value
        return out


class ReadPaths:
    """READs where brokers grant them, objects for what is cold, and TCP for the other partitions.

    `open_tcp` makes the source of the latter when it is first needed; `besides` is that of
    `DirectPaths`, `cold` reads objects.
    """

    def __init__(
        self,
        connections: ReadConnections,
        settings: Mapping[str, Any],
        open_tcp: Callable[[], TcpSource],
        besides: Environment | None = None,
        cold: ColdReads | None = None,
    ) -> None:
        self.direct = DirectPaths(connections, settings, besides, closest=True)
        self.cold = cold
        self.tcp: Any = None  # a TcpSource, once it was needed
        self.second_best: set[TopicPartition] = set()  # over TCP, but perhaps not for ever
        self._open_tcp = open_tcp
        self._warned = False

    def enter(self, offsets: Mapping[TopicPartition, int]) -> Entered:
        """Read these from these offsets, by the path that there is.  Those that were not refused,
        nor lost, and whose broker is not still asked, have a cursor then."""
        cold, others = self.cold, offsets
        refused: dict[TopicPartition, KdirectError] = {}
        if cold is not None:
            cold.release(offsets)
            first = {
                tp: x for tp, x in offsets.items() if cold.comes_first or cold.is_located(tp, x)
            }
            if first:
                refused = cold.enter(first)
                others = {
                    tp: x for tp, x in offsets.items() if tp not in cold and tp not in refused
                }
                self.direct.release([tp for tp in offsets if tp not in others])
        entered = self.direct.enter(others) if others else Entered()
        over_tcp = entered.over_tcp
        if cold is not None and not cold.comes_first:
            maybe = {tp: offsets[tp] for tp, e in over_tcp.items() if _may_be_cold(e)}
            refused |= cold.enter(maybe, [tp for tp in maybe if over_tcp[tp] is not None])
            for tp in maybe:
                if tp in cold or tp in refused:
                    del over_tcp[tp]
        entered.refused.update(refused)
        self.second_best.difference_update(offsets)
        self.second_best.update(tp for tp, e in over_tcp.items() if e is not None)
        if self.tcp is not None:
            self.tcp.release([tp for tp in offsets if tp not in over_tcp])
        if over_tcp:
            denied = {tp: e for tp, e in over_tcp.items() if isinstance(e, AccessDeniedError)}
            if denied:
                self._warn(denied)
            if self.tcp is None:
                self.tcp = self._open_tcp()
                self.direct.others_are_read()
            self.tcp.assign({tp: offsets[tp] for tp in over_tcp})
        return entered

    def _warn(self, denied: Mapping[TopicPartition, AccessDeniedError]) -> None:
        """Say it once as a warning: a consumer may have thousands of partitions more than the
        broker has slots for it."""
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        others = f" and {len(denied) - 1} other partitions are" if len(denied) > 1 else " is"
        first = next(iter(denied))
        log.log(level, "%s%s read over TCP: %s", first, others, denied[first])

    def cursor(self, tp: TopicPartition) -> Cursor | None:
        """The cursor of `tp`; None while it has no path."""
        fetcher = self.direct.fetcher_of(tp)
        if fetcher is not None:
            return fetcher.cursor(tp)
        if self.cold is not None and tp in self.cold:
            return self.cold.cursor(tp)
        return self.tcp.cursor(tp) if self.tcp is not None else None

    def follow(self, tp: TopicPartition, epoch: int) -> None:
        """`tp`, which was just entered, is read on after a batch of this leader epoch."""
        fetcher = self.direct.fetcher_of(tp)
        if fetcher is not None:
            fetcher.cursor(tp).follow(epoch)
        elif self.cold is not None and tp in self.cold:
            self.cold.follow(tp, epoch)
        elif self.tcp is not None:
            self.tcp.follow(tp, epoch)

    def release(self, tps: Iterable[TopicPartition]) -> None:
        """Stop reading these."""
        tps = list(tps)
        self.second_best.difference_update(tps)
        if self.tcp is not None:
            self.tcp.release(tps)
        if self.cold is not None:
            self.cold.release(tps)
        self.direct.release(tps)

    def close(self) -> None:
        self.direct.close()
        if self.cold is not None:
            self.cold.close()
        tcp, self.tcp = self.tcp, None
        if tcp is not None:
            tcp.close()

    def statistics(self) -> dict[str, int]:
        """What was read, by path."""
        out = self.direct.statistics()
        if self.tcp is not None:
            out |= self.tcp.statistics()
        if self.cold is not None:
            out |= self.cold.statistics()
        return out


def _may_be_cold(error: KdirectError | None) -> bool:
    """Over TCP nobody says beforehand whether an offset is in remote storage only."""
    return error is None or (isinstance(error, AccessDeniedError) and error.tiered)
