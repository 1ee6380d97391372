"""A process's way to the log: one `Session` per settings, with the transport chosen and proven.

Owns: the cluster connection, the choice of transport, idle readers kept warm between uses (so that
a micro-batch costs no request to the broker), and the slots that answer `watermarks`.  Everything a
caller needs of records goes through `reader` and `producer`; both work over RDMA or over Kafka's
protocol.

`connect` caches sessions by process id and settings: PySpark forks its workers, and a device, queue
pair or socket opened before a fork is of no use after it.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from kdirect.client.admin import Admin
from kdirect.client.direct import DirectFetcher
from kdirect.client.tcp_fetch import TcpFetcher
from kdirect.client.two_sided import FRAME_BYTES, MessageConnection
from kdirect.errors import (
    AccessDeniedError,
    BrokerUnavailableError,
    ClosedError,
    ProtocolError,
    QueuePairError,
    TimedOutError,
    UnknownTopicError,
)
from kdirect.format import protocol
from kdirect.format.codec import ArrowDecoder
from kdirect.model import EARLIEST_OFFSET, LATEST_OFFSET, TopicPartition
from kdirect.options import CLIENT
from kdirect.wire.channel import Channel
from kdirect.wire.cluster import Cluster
from kdirect.wire.connection import Connection, broker_error
from kdirect.wire.environment import SYSTEM, Environment
from kdirect.wire.transport import Transports

if TYPE_CHECKING:
    from kdirect.client.producer import Producer

log = logging.getLogger("kdirect.client")

IDLE_READERS = 256
INIT_PRODUCER_ID = 22
PARKED_BUFFER_BYTES = 256 << 10
FIRST_WAIT_S = 50e-6
LONGEST_WAIT_S = 5e-3
DEFAULT_TARGET_ROWS = 1 << 16
DEFAULT_TARGET_BYTES = 4 << 20

_sessions: dict[tuple[int, tuple], Session] = {}
_sessions_lock = threading.Lock()


def connect(settings: Mapping[str, Any] | str) -> Session:
    """The session of this process for these client settings (a mapping of CLIENT options, or just
    "host:port").

    Sessions are cached by process id and settings and shared by threads.  Raises ConfigError for
    settings that cannot be; the broker is contacted on first use.
    """
    given = {"bootstrap.servers": settings} if isinstance(settings, str) else dict(settings)
    resolved = CLIENT.resolve(given)
    key = (os.getpid(), tuple(sorted((k, str(v)) for k, v in resolved.items())))
    with _sessions_lock:
        for old in [k for k in _sessions if k[0] != key[0]]:
            del _sessions[old]  # inherited by a fork: its descriptors belong to the parent
        session = _sessions.get(key)
        if session is None or session.closed:
            session = _sessions[key] = Session(resolved)
        return session


class Session:
    """See the module.  Thread-safe.  Made by `connect`."""

    def __init__(self, settings: Mapping[str, Any], environment: Environment = SYSTEM) -> None:
        self.settings = dict(settings)
        self.environment = environment
        self.closed = False
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._cluster: Cluster | None = None
        self._admin: Admin | None = None
        self._of_brokers: Transports | None = None
        self._idle: deque[_DirectSource] = deque()  # parked, the latest last
        self._watcher: DirectFetcher | None = None
        self._slotless: dict[
            TopicPartition, float
        ] = {}  # partitions that the broker has no slot for, and until when not to ask again

    def _check(self) -> None:
        if self.closed:
            raise ClosedError("the session is closed", hint="call kdirect.connect again")
        if self._pid != os.getpid():
            raise ClosedError(
                "the session belongs to the process that was forked from",
                hint="call kdirect.connect in this process",
            )

    @property
    def cluster(self) -> Cluster:
        with self._lock:
            self._check()
            if self._cluster is None:
                self._cluster = Cluster(self.settings, self.environment)
            return self._cluster

    @property
    def admin(self) -> Admin:
        """Topics, offsets, groups."""
        with self._lock:
            if self._admin is None:
                self._admin = Admin(self.cluster)
            return self._admin

    # -- transport ---------------------------------------------------------------------------------

    @property
    def transport(self) -> str:
        """`verbs`, `shm` or `tcp`: the first that a data READ has proven, at the first call, to the
        broker that answered first.  `transport_to` tells it for each broker."""
        with self._lock:
            if self.settings["transport"] == "tcp":
                return "tcp"  # known without a broker to ask
            first = self._transports.first()
            assert first.chosen is not None
            return first.chosen

    @property
    def transport_reason(self) -> str:
        """Why that transport."""
        if self.settings["transport"] == "tcp":
            return "transport=tcp is set"
        return self._transports.first().reason

    def transport_to(self, tp: TopicPartition) -> str:
        """The transport to the broker that leads `tp`; asks it once."""
        return self._transports.name(tp)

    @property
    def _transports(self) -> Transports:
        with self._lock:
            if self._of_brokers is None:
                self._of_brokers = Transports(self.settings, self.cluster, self.environment)
            return self._of_brokers

    def channel(self, tp: TopicPartition, **sizes: int) -> Channel:
        """A new queue pair to the broker that leads `tp`."""
        self._check()
        return self._transports.channel(tp, **sizes)

    def messages(self, tp: TopicPartition, settings: Mapping[str, Any]) -> MessageConnection:
        """A new queue pair for requests in SENDs, to the broker that leads `tp`.  QueuePairError
        and the like when it cannot be had."""
        self._check()
        connection = self.cluster.connection_for(tp)
        transport = self._transports.to(connection)
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
        """(producer id, epoch) for an idempotent producer; None when the broker has none to give."""

        def ask(connection: Connection) -> tuple[int, int] | None:
            if not connection.supports(INIT_PRODUCER_ID):
                return None
            answer = connection.request(
                protocol.InitProducerIdRequest(
                    transactional_id=None,
                    transaction_timeout_ms=60_000,
                    producer_id=-1,
                    producer_epoch=-1,
                )
            )
            if answer.error_code:
                raise broker_error(answer.error_code, "a new producer id")
            return answer.producer_id, answer.producer_epoch

        return self.cluster.call(self.cluster.control_connection, ask)

    # -- topics and offsets ------------------------------------------------------------------------

    def list_topics(self) -> dict[str, int]:
        """Partitions of every topic that is not internal."""
        return {name: info.partitions for name, info in self.admin.list_topics().items()}

    def earliest_offsets(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """First offset of each partition."""
        return {
            tp: x[0]
            for tp, x in self.admin.list_offsets(dict.fromkeys(tps, EARLIEST_OFFSET)).items()
        }

    def latest_offsets(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """High watermark of each partition (last stable offset with read_committed)."""
        return {tp: mark for tp, (_, mark) in self.watermarks(list(tps)).items()}

    def offsets_for_times(
        self, times_ms: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int | None]:
        """First offset whose timestamp is at or after the time; None: no such record."""
        found = self.admin.list_offsets(dict(times_ms))
        return {tp: (x[0] if x is not None and x[0] >= 0 else None) for tp, x in found.items()}

    def watermarks(
        self, tps: Iterable[TopicPartition], *, same: bool = False
    ) -> dict[TopicPartition, tuple[int, int]]:
        """(log start offset, high watermark) of each partition.

        Over RDMA one slot READ for all of them once their slots are granted, without the broker's
        CPU; over TCP two requests.  With `same`, UnknownTopicError tells over RDMA, once, of a
        partition that was deleted since the last call, even if there is another of its name.
        """
        wanted = list(tps)
        if not wanted:
            return {}
        with self._lock:
            if self.transport == "tcp":
                return self._asked_watermarks(wanted)
            now = time.monotonic()
            for attempt in (0, 1, 2):
                slotless = [tp for tp in wanted if self._slotless.get(tp, 0.0) > now]
                try:
                    out = self._slot_watermarks([tp for tp in wanted if tp not in slotless], same)
                    return out | self._asked_watermarks(slotless) if slotless else out
                except (QueuePairError, BrokerUnavailableError, ClosedError):
                    self._drop_watcher()
                    if attempt:
                        raise
                except AccessDeniedError as e:
                    # Most likely there are more partitions than slots: those that have one keep it,
                    # the others are asked for.
                    without = [
                        tp for tp in wanted if self._watcher is None or tp not in self._watcher
                    ] or wanted
                    log.warning(
                        "watermarks of %d partitions, %s among them, are asked for over TCP: %s",
                        len(without),
                        without[0],
                        e,
                    )
                    self._slotless |= dict.fromkeys(
                        without, now + self.settings["metadata.max.age.ms"] / 1000
                    )
            return self._asked_watermarks(wanted)

    def _asked_watermarks(self, tps: list[TopicPartition]) -> dict[TopicPartition, tuple[int, int]]:
        starts = self.admin.list_offsets(dict.fromkeys(tps, EARLIEST_OFFSET))
        ends = self.admin.list_offsets(dict.fromkeys(tps, LATEST_OFFSET))
        return {tp: (starts[tp][0], ends[tp][0]) for tp in tps}

    def _drop_watcher(self) -> None:
        watcher, self._watcher = self._watcher, None
        self._slotless.clear()
        if watcher is not None:
            watcher.close()

    def _slot_watermarks(
        self, wanted: list[TopicPartition], same: bool
    ) -> dict[TopicPartition, tuple[int, int]]:
        if not wanted:
            return {}
        if self._watcher is None or self._watcher.channel.closed:
            self._watcher = DirectFetcher(self.channel(wanted[0]), self.settings)
        watcher = self._watcher
        watcher.refresh()
        ended = [tp for tp in wanted if same and tp in watcher and watcher.stream(tp).revoked]
        if ended:
            watcher.release(ended)
            raise UnknownTopicError(
                f"{ended[0]} was deleted while it was watched", hint="list the topics again"
            )
        again = [tp for tp in wanted if tp not in watcher] + [
            tp for tp in watcher.stale() if tp in set(wanted)
        ]
        if again:
            watcher.assign(dict.fromkeys(again, LATEST_OFFSET))
        return {tp: watcher.watermarks(tp) for tp in wanted}

    # -- reading -----------------------------------------------------------------------------------

    def reader(
        self,
        tp: TopicPartition,
        start_offset: int,
        stop_offset: int,
        *,
        include_headers: bool = False,
        target_rows: int = DEFAULT_TARGET_ROWS,
        target_bytes: int = DEFAULT_TARGET_BYTES,
        timeout_ms: int | None = None,
    ) -> Reader:
        """Read offsets [start, stop) of one partition as Arrow batches; see `Reader`."""
        self._check()
        return Reader(self, tp, start_offset, stop_offset, include_headers, target_rows, target_bytes,
                      timeout_ms if timeout_ms is not None else self.settings["request.timeout.ms"])  # fmt: skip

    def _source(self, tp: TopicPartition, offset: int) -> _DirectSource | _TcpSource:
        """A source of bytes that stands at `offset`: a warm one if there is one."""
        if self.transport == "tcp":
            return _TcpSource(
                TcpFetcher(
                    self.cluster, tp, offset, isolation_level=self.settings["isolation.level"]
                ),
                self.settings,
            )
        while (warm := self._warm(tp, offset)) is not None:
            try:
                if warm.go_on(offset):
                    return warm
            except (
                QueuePairError,
                BrokerUnavailableError,
                ClosedError,
                ProtocolError,
                AccessDeniedError,
            ) as e:
                log.debug("%s: a parked reader is of no use any more: %s", tp, e)
            except BaseException:
                warm.close()
                raise
            warm.close()
        fetcher: DirectFetcher | None = None
        try:
            fetcher = DirectFetcher(self.channel(tp), self.settings)
            fetcher.assign({tp: offset})
        except BaseException as e:
            if fetcher is not None:
                fetcher.close()
            if not isinstance(e, AccessDeniedError):
                raise
            log.warning("%s is read over TCP: %s", tp, e)
            return _TcpSource(
                TcpFetcher(
                    self.cluster, tp, offset, isolation_level=self.settings["isolation.level"]
                ),
                self.settings,
            )
        return _DirectSource(fetcher, tp, offset)

    def _warm(self, tp: TopicPartition, offset: int) -> _DirectSource | None:
        """Take a parked source of `tp`: one that stands at `offset`, else the one that was parked
        last."""
        with self._lock:
            parked = [source for source in self._idle if source.tp == tp]
            found = next(
                (source for source in parked if source.next_offset == offset),
                parked[-1] if parked else None,
            )
            if found is not None:
                self._idle.remove(found)
            return found

    def _park(self, source: _DirectSource | _TcpSource) -> None:
        """Keep a source for the next reader of its partition; too many, and one of those that were
        there is closed."""
        if isinstance(source, _DirectSource):
            stream = source.fetcher.stream(source.tp) if source.tp in source.fetcher else None
            if stream is not None and stream.buffer_bytes > PARKED_BUFFER_BYTES:
                stream.close()  # what was READ and not consumed is READ again
            with self._lock:
                if stream is not None and not self.closed and not source.fetcher.channel.closed:
                    self._idle.append(source)
                    if len(self._idle) <= IDLE_READERS:
                        return
                    # Any of the others.  If the oldest went, a worker that reads more partitions in
                    # turn than are kept would find none.
                    other = random.randrange(IDLE_READERS)
                    source = self._idle[other]
                    del self._idle[other]
        source.close()

    # -- writing -----------------------------------------------------------------------------------

    def producer(self, **settings: Any) -> Producer:
        """A new producer; `settings` override the session's (`acks="1"`, or
        `compression_type="zstd"` with underscores)."""
        from kdirect.client.producer import Producer

        overrides = {k.replace("_", "."): v for k, v in settings.items()}
        return Producer({**self.settings, **overrides}, session=self)

    def close(self) -> None:
        """End all connections; readers and producers made by this session end with it."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            if self._pid != os.getpid():
                return
            for source in self._idle:
                source.close()
            self._idle.clear()
            if self._of_brokers is not None:
                self._of_brokers.close()
            if self._watcher is not None:
                self._watcher.close()
            if self._cluster is not None:
                self._cluster.close()


class _DirectSource:
    """Bytes of one partition by READ."""

    def __init__(self, fetcher: DirectFetcher, tp: TopicPartition, offset: int) -> None:
        self.transport = fetcher.channel.transport
        self.fetcher = fetcher
        self.tp = tp
        self.next_offset = offset

    def go_on(self, offset: int) -> bool:
        """Stand at `offset` after a pause; False: make a new source.  What was READ before counts
        only while a slot says that the partition is still the one it was READ from: it may have
        been deleted meanwhile, and another made under its name."""
        if self.fetcher.channel.closed:
            return False
        stream = self.fetcher.stream(self.tp)
        # Bytes that were READ before the pause were compared with the log then: they are looked at
        # anew.
        stays = self.next_offset == offset and not stream.sealed and not stream.buffered
        if stays and self.fetcher.feed(self.tp).slot_index >= 0:
            self.fetcher.refresh()
            return not stream.revoked
        self.fetcher.assign({self.tp: offset})
        self.next_offset = offset
        return True

    def feed(self, decoder: ArrowDecoder) -> int:
        consumed = self.fetcher.decode(self.tp, decoder)
        if consumed:
            self.next_offset = decoder.next_offset
        return consumed

    def fill(self, next_offset: int, wait_ms: int) -> bool:
        return self.fetcher.fill(self.tp, next_offset)

    def reopen(self, session: Session, offset: int) -> _DirectSource | _TcpSource:
        self.close()
        return session._source(self.tp, offset)

    def close(self) -> None:
        self.fetcher.close()

    def statistics(self) -> dict[str, int]:
        return self.fetcher.statistics()


class _TcpSource:
    """Bytes of one partition by Kafka's Fetch."""

    transport = "tcp"

    def __init__(self, fetcher: TcpFetcher, settings: Mapping[str, Any]) -> None:
        self.fetcher = fetcher
        self.tp = fetcher.topic_partition
        self._fetch_bytes = settings["fetch.max.read.bytes"]
        self._data: memoryview = memoryview(b"")
        self._fetched = 0

    def feed(self, decoder: ArrowDecoder) -> int:
        if not len(self._data):
            return 0
        consumed = decoder.feed(self._data)
        self._data = self._data[consumed:]
        return consumed

    def fill(self, next_offset: int, wait_ms: int) -> bool:
        self.fetcher.seek(next_offset)
        data = self._data = self.fetcher.fetch(self._fetch_bytes, wait_ms).data
        self._fetched += len(data)
        return len(data) > 0

    def reopen(self, session: Session, offset: int) -> _DirectSource | _TcpSource:
        self.close()
        return session._source(self.tp, offset)

    def close(self) -> None:
        self.fetcher.close()

    def statistics(self) -> dict[str, int]:
        return {"fetched_bytes": self._fetched}


class Reader:
    """Reads [start, stop) of one partition.

    `batches()` yields pyarrow.RecordBatches (schema of `kdirect.format.codec.ArrowDecoder`), in
    offset order, never a record outside the range; offsets that hold no record (compacted, or
    control records) are skipped.  Raises OffsetOutOfRangeError when the start has been deleted,
    TimedOutError when the range is not there `timeout_ms` after the last progress.  A connection
    lost on the way is replaced and reading goes on behind the last record handed out.  Memory: one
    batch of `target_bytes`, and the READ buffer.
    """

    def __init__(
        self, session: Session, tp: TopicPartition, start_offset: int, stop_offset: int, include_headers: bool, target_rows: int,
        target_bytes: int, timeout_ms: int,
    ) -> None:  # fmt: skip
        self._session = session
        self.tp = tp
        self._start = start_offset
        self._stop = stop_offset
        self._timeout_ms = timeout_ms
        self._decoder_settings: dict[str, Any] = {
            "include_headers": include_headers, "target_rows": target_rows, "target_bytes": target_bytes,
            "max_decompressed_bytes": session.settings["max.batch.bytes"],
        }  # fmt: skip
        self._source: _DirectSource | _TcpSource | None = None
        self._before: dict[str, int] = {}
        self._totals: dict[str, int] = {}

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The records of the range; see the class."""
        if self._start >= self._stop:
            return
        decoder = self._decoder(self._start)
        self._open(self._start)
        last_progress = time.monotonic()
        pause = FIRST_WAIT_S
        failures = 0
        while decoder.next_offset < self._stop:
            assert self._source is not None
            try:
                if self._source.feed(decoder):
                    last_progress = time.monotonic()
                    pause = FIRST_WAIT_S
                    failures = 0
                    if decoder.full:
                        yield decoder.take()
                    continue
                if decoder.full:
                    yield decoder.take()
                    continue
                if self._source.fill(decoder.next_offset, 100):
                    continue
            except (QueuePairError, BrokerUnavailableError, ClosedError) as e:
                failures += 1
                if failures > 3 or self._session.closed:
                    raise
                log.warning(
                    "%s: connection lost (%s); reading on from offset %d",
                    self.tp,
                    e,
                    decoder.next_offset,
                )
                self._account()
                source, self._source = self._source, None
                self._before = {}
                self._source = source.reopen(self._session, decoder.next_offset)
                continue
            if (time.monotonic() - last_progress) * 1000 > self._timeout_ms:
                raise TimedOutError(
                    f"{self.tp}: offset {decoder.next_offset} of [{self._start}, {self._stop}) did not become readable"
                    f" in {self._timeout_ms} ms",
                    hint="the records may have been deleted, or the range ends beyond the high watermark",
                )
            if self._source.transport != "tcp":
                time.sleep(pause)
                pause = min(pause * 2, LONGEST_WAIT_S)
        if decoder.rows:
            yield decoder.take()

    def _decoder(self, offset: int) -> ArrowDecoder:
        return ArrowDecoder(
            self.tp.topic,
            self.tp.partition,
            start_offset=offset,
            stop_offset=self._stop,
            **self._decoder_settings,
        )

    def _open(self, offset: int) -> None:
        self._source = self._session._source(self.tp, offset)
        self._before = self._source.statistics()

    def _account(self) -> None:
        if self._source is not None:
            for name, value in self._source.statistics().items():
                self._totals[name] = self._totals.get(name, 0) + value - self._before.get(name, 0)
            self._before = self._source.statistics()

    @property
    def transport(self) -> str:
        """What this reader uses; the session's choice until it has started."""
        return self._source.transport if self._source is not None else self._session.transport

    def statistics(self) -> dict[str, int]:
        """What this reader has moved: `reads` and `read_bytes` one-sidedly, or `fetched_bytes` over
        TCP."""
        self._account()
        return dict(self._totals)

    def close(self) -> None:
        """Stop; a warm RDMA source goes back to the session for the next reader of this partition."""
        self._account()
        source, self._source = self._source, None
        if source is not None:
            self._session._park(source)
