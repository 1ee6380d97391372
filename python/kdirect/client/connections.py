"""What a process holds open for one set of client settings, and the handles of those who use it.

Owns: the cache of `SharedConnections`, one for each process and settings, and with each of them the
cluster's connections, the transports proven, the parked readers and the slots that answer
`watermarks`.  A `Handle` is one caller's use of it: to close a handle ends the caller's use, and
the connections end with the last handle that anybody still has.

The cache goes by process id: PySpark forks its workers, and a device, queue pair or socket opened
before a fork is of no use after it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from kdirect.client.admin import Admin
from kdirect.client.cold_places import ColdPlace, Wanted, locate
from kdirect.client.cold_stores import ColdStores
from kdirect.client.reader import ParkedReaders
from kdirect.client.record_counts import CountWanted, counts
from kdirect.client.two_sided import FRAME_BYTES, MessageConnection
from kdirect.client.watermarks import Watermarks
from kdirect.errors import ClosedError
from kdirect.format import protocol
from kdirect.model import EARLIEST_OFFSET, TopicPartition
from kdirect.options import CLIENT
from kdirect.wire.broker_errors import broker_error
from kdirect.wire.channel import Channel
from kdirect.wire.cluster import Cluster
from kdirect.wire.connection import Connection
from kdirect.wire.environment import SYSTEM, Environment
from kdirect.wire.transport import Transports

INIT_PRODUCER_ID = 22
H = TypeVar("H", bound="Handle")

_shared: dict[tuple[int, tuple], SharedConnections] = {}
_lock = threading.RLock()  # of the cache, and of who uses what


def shared_connections(settings: Mapping[str, Any] | str) -> SharedConnections:
    """Those of this process for these client settings (a mapping of CLIENT options, or just
    "host:port").  ConfigError for settings that cannot be."""
    given = {"bootstrap.servers": settings} if isinstance(settings, str) else dict(settings)
    resolved = CLIENT.resolve({k: v for k, v in given.items() if v is not None})
    key = (os.getpid(), tuple(sorted((k, str(v)) for k, v in resolved.items())))
    with _lock:
        for old in [k for k in _shared if k[0] != key[0]]:
            del _shared[old]  # inherited by a fork: its descriptors belong to the parent
        found = _shared.get(key)
        if found is None or found.closed:
            found = _shared[key] = SharedConnections(resolved)
        return found


def open_handle(settings: Mapping[str, Any] | str, kind: type[H]) -> H:
    """A new handle on `shared_connections(settings)`."""
    with _lock:  # nobody else may end them in between
        return kind(shared_connections(settings))


def close_all() -> None:
    """End the connections of this process, whoever uses them."""
    with _lock:
        ended = [shared for (pid, _), shared in _shared.items() if pid == os.getpid()]
        _shared.clear()
        for shared in ended:
            shared.closed = True
    for shared in ended:
        shared.close()


class SharedConnections:
    """See the module.  Thread-safe.  Nothing is opened before it is needed."""

    def __init__(self, settings: Mapping[str, Any], environment: Environment = SYSTEM) -> None:
        self.settings = dict(settings)
        self.environment = environment
        self.closed = False
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self.parked = ParkedReaders()
        self.cold_stores = ColdStores(self.settings, environment)
        self._cluster: Cluster | None = None
        self._admin: Admin | None = None
        self._transports: Transports | None = None
        self._watermarks: Watermarks | None = None
        self._local_starts: dict[TopicPartition, int] = {}  # as leaders told last
        self._handles: weakref.WeakSet[Handle] = weakref.WeakSet()

    def check(self) -> None:
        """ClosedError unless this process may use them."""
        if self.closed:
            raise ClosedError("the session is closed", hint="call kdirect.connect again")
        if self.pid != os.getpid():
            raise ClosedError(
                "the session belongs to the process that was forked from",
                hint="call kdirect.connect in this process",
            )

    @property
    def cluster(self) -> Cluster:
        with self.lock:
            self.check()
            if self._cluster is None:
                self._cluster = Cluster(self.settings, self.environment)
            return self._cluster

    @property
    def admin(self) -> Admin:
        with self.lock:
            if self._admin is None:
                self._admin = Admin(self.cluster)
            return self._admin

    @property
    def transports(self) -> Transports:
        with self.lock:
            if self._transports is None:
                self._transports = Transports(self.settings, self.cluster, self.environment)
            return self._transports

    def transport_to(self, tp: TopicPartition, *, closest: bool = False) -> str:
        """See `Transports.name`."""
        return self.transports.name(tp, closest=closest)

    def channel(self, tp: TopicPartition, *, closest: bool = False, **sizes: int) -> Channel:
        """See `Transports.channel`."""
        self.check()
        return self.transports.channel(tp, closest=closest, **sizes)

    def watermarks(
        self, tps: Iterable[TopicPartition], topic_ids: Mapping[str, str] | None
    ) -> dict[TopicPartition, tuple[int, int]]:
        """See `Handle.watermarks`."""
        with self.lock:
            self.check()
            if self._watermarks is None:
                self._watermarks = Watermarks(self, self.admin, self.settings, self.environment)
            watermarks = self._watermarks
        return watermarks.of(tps, topic_ids)

    def locate(
        self, ranges: Mapping[TopicPartition, tuple[int, int]], *, afresh: bool
    ) -> dict[TopicPartition, tuple[ColdPlace, ...]]:
        """See `Handle.locate`."""
        stores = self.cold_stores
        found: dict[TopicPartition, tuple[ColdPlace, ...]] = dict.fromkeys(ranges, ())
        wanted = {
            tp: start
            for tp, (start, _) in ranges.items()
            if stores.is_used
            and not stores.is_refused(tp.topic)
            # What the broker had itself is not asked for again, or each micro-batch would ask.  If
            # it is cold by now, whoever reads it finds out.
            and (afresh or stores.prefers_cold or start < self._local_starts.get(tp, start + 1))
        }
        while wanted:
            views, _ = locate(
                self.cluster,
                [Wanted(tp, start, ranges[tp][1]) for tp, start in wanted.items()],
                self.settings["request.timeout.ms"],
            )
            self._local_starts.update((tp, 0) for tp in wanted if tp not in views)
            self._local_starts.update((tp, max(v.local_start, 0)) for tp, v in views.items())
            wanted = {}
            for tp, view in views.items():
                places = tuple(
                    x
                    for x in view.places
                    if x.url is None and (stores.prefers_cold or x.start_offset < view.local_start)
                )
                found[tp] += places
                # An answer has room for so many; where it ends with what the broker has, it is all.
                if places and not view.is_all and places[-1].end_offset < ranges[tp][1]:
                    wanted[tp] = places[-1].end_offset
        return found

    def join(self, handle: Handle) -> None:
        """`handle` uses them."""
        with _lock:
            self._handles.add(handle)

    def leave(self, handle: Handle) -> None:
        """`handle` uses them no more; the last one ends them."""
        with _lock:
            self._handles.discard(handle)
            if self._handles or self.closed:
                return
            self.closed = True  # from here on nobody gets a handle on them
        self.close()

    def close(self) -> None:
        """End all connections, and with them what reads and writes over them.  `closed` is set."""
        with self.lock:
            transports, watermarks, cluster = self._transports, self._watermarks, self._cluster
        # Without the lock, for whoever looks at watermarks takes it while holding theirs.
        self.parked.close()
        if transports is not None:
            transports.close()
        if watermarks is not None:
            watermarks.close()
        if cluster is not None:
            cluster.close()


class Handle:
    """One caller's use of the connections of its process.  Thread-safe.

    A handle that is dropped without `close` leaves the connections open for the next user in this
    process.
    """

    def __init__(self, shared: SharedConnections) -> None:
        self.settings = dict(shared.settings)
        self._shared = shared
        self._closed = False
        shared.join(self)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether this use has ended."""
        return self._closed or self._shared.closed

    def check(self) -> None:
        """ClosedError unless this process may use the handle."""
        if self._closed:
            raise ClosedError("the session is closed", hint="call kdirect.connect again")
        self._shared.check()

    @property
    def environment(self) -> Environment:
        """Clock, threads, devices."""
        return self._shared.environment

    @property
    def cluster(self) -> Cluster:
        """Brokers, leaders, TCP connections."""
        self.check()
        return self._shared.cluster

    @property
    def admin(self) -> Admin:
        """Topics, offsets, groups."""
        return Admin(self.cluster, owner=self)

    @property
    def parked(self) -> ParkedReaders:
        """Where readers leave what the next reader of their partition can use."""
        return self._shared.parked

    @property
    def cold_stores(self) -> ColdStores:
        """The object stores of remote storage."""
        return self._shared.cold_stores

    def locate(
        self, ranges: Mapping[TopicPartition, tuple[int, int]], *, afresh: bool = False
    ) -> dict[TopicPartition, tuple[ColdPlace, ...]]:
        """Where the records of each partition lie from the first offset up to the second: the
        objects of remote storage that may be read past the broker, in order; what follows them the
        broker has itself, or had when it was last asked, unless it is to be asked `afresh`.  Signed
        URLs are credentials, and objects that need one are left out.  Raises what the broker cannot
        be asked with."""
        self.check()
        return self._shared.locate(ranges, afresh=afresh)

    def count_records(
        self,
        wanted: Iterable[CountWanted],
        *,
        topic_ids: Mapping[str, str] = MappingProxyType({}),
    ) -> dict[CountWanted, int]:
        """How many records each range of offsets has, of those of which the brokers know it without
        reading them (with read_committed: where no batch of a transaction is in the range).
        `topic_ids`: of the topics that are meant."""
        self.check()
        settings = self.settings
        return counts(
            self.cluster,
            wanted,
            topic_ids,
            committed_only=settings["isolation.level"] == "read_committed",
            timeout_ms=settings["request.timeout.ms"],
        )

    def remember_places(self, places: Iterable[ColdPlace]) -> None:
        """`locate`, in whatever process, has found these: whoever reads there does not ask."""
        self.check()
        self._shared.cold_stores.remember(places)

    # -- transport ---------------------------------------------------------------------------------

    @property
    def transport(self) -> str:
        """`verbs`, `shm` or `tcp`: the first that a data READ has proven, at the first call, to the
        broker that answered first.  `transport_to` tells it for each broker."""
        if self.settings["transport"] == "tcp":
            return "tcp"  # known without a broker to ask
        self.check()
        chosen = self._shared.transports.first().chosen
        assert chosen is not None
        return chosen

    @property
    def transport_reason(self) -> str:
        """Why that transport."""
        if self.settings["transport"] == "tcp":
            return "transport=tcp is set"
        self.check()
        return self._shared.transports.first().reason

    def transport_to(self, tp: TopicPartition, *, closest: bool = False) -> str:
        """The transport to the broker that leads `tp`, or with `closest` to the one that it is read
        at with `client.rack`; asks it once."""
        self.check()
        return self._shared.transport_to(tp, closest=closest)

    def channel(self, tp: TopicPartition, *, closest: bool = False, **sizes: int) -> Channel:
        """A new queue pair to the broker that leads `tp`, or with `closest` to the one that it is
        read at."""
        self.check()
        return self._shared.channel(tp, closest=closest, **sizes)

    def channel_over(self, connection: Connection, **sizes: int) -> Channel | None:
        """A new queue pair to the broker of `connection`, which controls it; None where that broker
        is reached over TCP only."""
        self.check()
        transport = self._shared.transports.to(connection)
        return (
            None if transport.name(connection) == "tcp" else transport.channel(connection, **sizes)
        )

    def messages(self, tp: TopicPartition, settings: Mapping[str, Any]) -> MessageConnection:
        """A new queue pair for requests in SENDs, to the broker that leads `tp`.  QueuePairError
        and the like when it cannot be had."""
        connection = self.cluster.connection_for(tp)
        transport = self._shared.transports.to(connection)
        name = transport.name(connection)
        return MessageConnection(
            connection,
            name,
            environment=self.environment,
            message_bytes=settings["batch.bytes"] + FRAME_BYTES,
            requests=settings["max.in.flight"],
            spin_us=settings["spin.us"],
            device_options=transport.device_options(connection, name),
        )

    def new_producer_id(self) -> tuple[int, int] | None:
        """(producer id, epoch) for an idempotent producer; None when the broker has none to
        give."""

        def ask(connection: Connection, left_ms: float) -> tuple[int, int] | None:
            if not connection.supports(INIT_PRODUCER_ID):
                return None
            answer = connection.request(
                protocol.InitProducerIdRequest(
                    transactional_id=None,
                    transaction_timeout_ms=60_000,
                    producer_id=-1,
                    producer_epoch=-1,
                ),
                left_ms,
            )
            if answer.error_code:
                raise broker_error(answer.error_code, "a new producer id")
            return answer.producer_id, answer.producer_epoch

        return self.cluster.ask_any(ask)

    # -- topics and offsets ------------------------------------------------------------------------

    def list_topics(self) -> dict[str, int]:
        """Partitions of every topic that is not internal."""
        return {name: info.partitions for name, info in self.admin.list_topics().items()}

    def earliest_offsets(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """First offset of each partition."""
        found = self.admin.list_offsets(dict.fromkeys(tps, EARLIEST_OFFSET))
        return {tp: x[0] for tp, x in found.items()}

    def latest_offsets(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """High watermark of each partition (last stable offset with read_committed)."""
        return {tp: mark for tp, (_, mark) in self.watermarks(list(tps)).items()}

    def offsets_for_times(
        self, times_ms: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int | None]:
        """First offset whose timestamp is at or after the time; None: there is no such record."""
        found = self.admin.list_offsets(dict(times_ms))
        return {tp: (x[0] if x is not None and x[0] >= 0 else None) for tp, x in found.items()}

    def watermarks(
        self, tps: Iterable[TopicPartition], *, topic_ids: Mapping[str, str] | None = None
    ) -> dict[TopicPartition, tuple[int, int]]:
        """(log start offset, high watermark) of each partition.

        Over RDMA one slot READ for each broker once their slots are granted, without the brokers'
        CPU; over TCP two requests.  With `topic_ids`, UnknownTopicError tells of a topic that has
        not the id given here any more, even if there is another of its name: one request more for
        each new slot, and over TCP.
        """
        wanted = list(tps)
        if not wanted:
            return {}
        self.check()
        return self._shared.watermarks(wanted, topic_ids)

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """End this use: no more can be made with it.  The connections end with the last use of
        them, and with the connections the readers, consumers and producers over them.  More than
        once is nothing."""
        if not self._closed:
            self._closed = True
            if self._shared.pid == os.getpid():  # in a forked child nothing is ours to end
                self._shared.leave(self)
