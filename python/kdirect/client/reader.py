"""Readers of one partition: a range of offsets as Arrow batches.

Owns: `Reader`, its one level of retries, and the pool of parked readers, which keeps what READs a
partition warm between two uses (so that a micro-batch costs no request to the broker).  Which path
brings the bytes is `read_paths`', where they are read is the cursor's.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from kdirect.client.cold import ColdCursor, cold_reads
from kdirect.client.cursor import Cursor, DirectCursor, TcpCursor
from kdirect.client.lost_broker import LOST, as_left, as_moved, has_moved, look_again
from kdirect.client.read_paths import ReadConnections, ReadPaths
from kdirect.client.tcp_fetch import SinglePartition
from kdirect.client.truncation import ReadEpochs
from kdirect.errors import (
    AccessDeniedError,
    BrokerError,
    BrokerUnavailableError,
    ClosedError,
    KdirectError,
    NotLeaderError,
    OffsetOutOfRangeError,
    ProtocolError,
    QueuePairError,
    TimedOutError,
    UnknownTopicError,
)
from kdirect.format.codec import ArrowDecoder
from kdirect.model import TopicPartition
from kdirect.wire.environment import Environment

log = logging.getLogger("kdirect.client")

IDLE_READERS = 256
PARKED_BUFFER_BYTES = 256 << 10
FIRST_WAIT_S = 50e-6
LONGEST_WAIT_S = 5e-3
FETCH_WAIT_MS = 100
MOVED_WAIT_S = 0.02  # between two looks where the partition is led
REPLICA_PATIENCE_S = 1.0  # without progress, before it is asked where the partition is read
TRIES = 3  # lost connections without a record in between before one is raised
# What reading may go on after.
MAY_PASS = (*LOST, AccessDeniedError, BrokerError, NotLeaderError, OffsetOutOfRangeError)
DEFAULT_TARGET_ROWS = 1 << 16
DEFAULT_TARGET_BYTES = 4 << 20


class Place(NamedTuple):
    """Where a reader reads: the cursor of its partition, and the paths that it belongs to.
    `topic_id`: of the topic, if that was asked for after the file was entered."""

    paths: ReadPaths
    cursor: Cursor
    topic_id: str | None = None

    def goes_on(self, offset: int) -> bool:
        """Would `resume` at `offset` read on in the file that was entered, without a request?"""
        cursor = self.cursor
        if type(cursor) is not DirectCursor or cursor.slot_index < 0:
            return False
        stream = cursor.stream
        return cursor.next_offset == offset and not stream.sealed and not stream.buffered


class ParkedReaders:
    """Places that READ, kept from one reader of a partition to the next.  Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._parked: deque[Place] = deque()  # the latest last

    def take(self, tp: TopicPartition, offset: int) -> Place | None:
        """A place at which `tp` can be read from `offset` on, if one is parked."""
        while (place := self._pop(tp, offset)) is not None:
            goes_on = place.goes_on(offset)
            try:
                if place.cursor.resume(offset):
                    # Another file may be another topic's.
                    return place if goes_on else place._replace(topic_id=None)
            except (
                QueuePairError,
                BrokerUnavailableError,
                ClosedError,
                ProtocolError,
                AccessDeniedError,
            ) as e:
                log.debug("%s: a parked reader cannot be used any more: %s", tp, e)
            except BaseException:
                place.paths.close()
                raise
            place.paths.close()
        return None

    def _pop(self, tp: TopicPartition, offset: int) -> Place | None:
        """One of `tp` that is at `offset`, else the one that was parked last."""
        with self._lock:
            parked = [place for place in self._parked if place.cursor.tp == tp]
            found = next(
                (place for place in parked if place.cursor.next_offset == offset),
                parked[-1] if parked else None,
            )
            if found is not None:
                self._parked.remove(found)
            return found

    def park(self, place: Place) -> None:
        """Keep a place for the next reader of its partition, or close it; when there are too many,
        another one is closed."""
        paths, cursor, _ = place
        reads = type(cursor) is DirectCursor and paths.cursor(cursor.tp) is cursor
        if reads:
            if cursor.stream.buffer_bytes > PARKED_BUFFER_BYTES:
                cursor.stream.close()  # what was READ and not consumed is READ again
            fetcher = paths.direct.fetcher_of(cursor.tp)
            with self._lock:
                if fetcher is not None and not self._closed and not fetcher.channel.closed:
                    self._parked.append(place)
                    if len(self._parked) <= IDLE_READERS:
                        return
                    # Evict at random, but not the newest: with the least recently used one, a
                    # worker cycling through more partitions than are kept would never find any.
                    other = random.randrange(IDLE_READERS)
                    paths = self._parked[other].paths
                    del self._parked[other]
        paths.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            parked, self._parked = self._parked, deque()
        for place in parked:
            place.paths.close()


class ReaderConnections(ReadConnections, Protocol):
    """What a reader needs of a session."""

    settings: dict[str, Any]

    @property
    def environment(self) -> Environment:
        """Clock and sleep."""

    @property
    def closed(self) -> bool:
        """Whether it has ended."""

    @property
    def transport(self) -> str:
        """What the session reads over."""

    @property
    def parked(self) -> ParkedReaders:
        """The pool of the session."""

    def check(self) -> None:
        """ClosedError unless this process may use it."""


class Reader:
    """Reads [start, stop) of one partition.

    `batches()`, or iterating the reader, yields pyarrow.RecordBatches (schema of
    `kdirect.format.codec.ArrowDecoder`), in offset order, never a record outside the range; offsets
    that hold no record (compacted, or control records) are skipped.  Raises OffsetOutOfRangeError
    when the start has been deleted, TimedOutError when the range is not there `timeout_ms` after
    the last progress.  A connection lost on the way is replaced and reading goes on after the last
    record handed out.  With `topic_id`, UnknownTopicError tells that the topic of this id is gone,
    whatever has its name now; over TCP `check_topic` says so of what was read last.  Memory: one
    batch of `target_bytes`, and the READ buffer.

    With `live_ms` a reader follows its partition: what there is is handed out at once, and not only
    when a batch is full, and the range need not be there.  Each time that nothing is there,
    `live_batches` yields None and `fillings` yields with an empty decoder, and whoever reads waits
    as it likes; over TCP the broker waits for a record first, for `live_ms` at most.

    Use it as a context manager, or `close` it: then what it read with serves the next reader of its
    partition.  One thread at a time.
    """

    def __init__(
        self,
        session: ReaderConnections,
        tp: TopicPartition,
        start_offset: int,
        stop_offset: int,
        *,
        timeout_ms: int,
        topic_id: str | None = None,
        live_ms: int | None = None,
        **decoder_settings: Any,
    ) -> None:
        self.tp = tp
        self._session = session
        self._settings: Mapping[str, Any] = session.settings
        self._environment = session.environment
        self._stop = stop_offset
        self._timeout_ms = timeout_ms
        self._live = live_ms is not None
        self._wait_ms = FETCH_WAIT_MS if live_ms is None else live_ms
        self._decoder_settings = decoder_settings
        self._next_offset = start_offset
        self._place: Place | None = None
        self._cold_end = -1  # of what came from objects; there may be a gap before it
        self._wanted_id = topic_id  # only this topic is read, no other of its name
        self._file_id = -1  # of the granted file, which is this topic's
        self._topic_id: str | None = None  # of the topic that is read
        self._epochs = ReadEpochs(session.cluster)
        self._before: dict[str, int] = {}
        self._totals: dict[str, int] = {}
        self._paused_s = 0.0
        self._newest_ms = -1

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self.batches()

    @property
    def next_offset(self) -> int:
        """The offset after the last record that was handed out, or after the gap that follows it;
        at first the start of the range, and never beyond its end.  All records of the range below
        it were handed out."""
        return self._next_offset

    @property
    def newest_ms(self) -> int:
        """The newest timestamp of the batches that were handed out, in ms since 1970; -1: none was.
        It is what their producer or the broker wrote, and may lie in the future."""
        return self._newest_ms

    def batches(self, *, views: bool = False) -> Iterator[pa.RecordBatch]:
        """The records of the range from `next_offset` on; see the class.

        With `views`, keys, values and values of headers are columns of type `binary_view`, which
        point at the bytes where they were found: in the broker's segment over shared memory, in
        what a READ or a Fetch has brought elsewhere.  Nothing is copied, and these bytes stay as
        they are as long as a column lives, whatever becomes of the segment, the reader and the
        broker.  So a column that is kept keeps memory, or the space of a segment that was deleted;
        cast it to `binary` for a copy.  What is compressed is decompressed once, into memory of its
        own.  docs/security.md says what another process of the same user could do."""
        for batch in self.live_batches(views=views):
            if batch is not None:
                yield batch

    def live_batches(self, *, views: bool = False) -> Iterator[pa.RecordBatch | None]:
        """The same, and None each time that nothing is there, with `live_ms`."""
        decoder = ArrowDecoder(
            self.tp.topic,
            self.tp.partition,
            views=views,
            **self.decoder_range,
            **self._decoder_settings,
        )
        for _ in self.fillings(decoder):
            if decoder.rows:
                yield decoder.take()
            elif self._live:
                yield None

    @property
    def decoder_range(self) -> dict[str, Any]:
        """The arguments of a decoder that is to be filled from `next_offset` on."""
        return {
            "start_offset": self._next_offset,
            "stop_offset": self._stop,
            "max_decompressed_bytes": self._settings["max.batch.bytes"],
        }

    def fillings(self, decoder: ArrowDecoder) -> Iterator[None]:
        """Fill a decoder that was made with `decoder_range`.  Yields each time that it is full, and
        at the end of the range if it has moved since: whoever made it takes its rows then.  With
        `live_ms` also when it holds what there is, and when nothing is there."""
        if self._next_offset >= self._stop:
            return
        if self._place is not None and self._place.cursor.next_offset > self._next_offset:
            # An error came after records that were decoded and not handed out.
            self.close()
        for _ in self._fillings(decoder):
            self._next_offset = min(decoder.next_offset, self._stop)
            self._newest_ms = max(self._newest_ms, decoder.newest_ms)
            yield
        last = min(decoder.next_offset, self._stop)
        if last > self._next_offset:
            self._next_offset = last
            self._newest_ms = max(self._newest_ms, decoder.newest_ms)
            yield

    def _fillings(self, decoder: ArrowDecoder) -> Iterator[None]:
        """Each time that `decoder` is full, until the range is read.  The one place where reading
        is tried again."""
        now = self._environment.monotonic
        last_progress = asked = now()
        pause = FIRST_WAIT_S
        failures, lost_at = 0, last_progress
        while decoder.next_offset < self._stop:
            before, began = decoder.next_offset, now()
            place = self._place
            try:
                if place is None:
                    place = self._open(max(decoder.next_offset, self._cold_end))
                found = self._fill(place, decoder)
            except MAY_PASS as error:
                if self._leave_cold(error):
                    continue
                e = as_left(self._session.cluster, self.tp, error)
                if isinstance(e, OffsetOutOfRangeError):
                    raise
                if has_moved(e):
                    # Over TCP this has been tried for request.timeout.ms (`tcp_fetch`).
                    if self._session.closed or (place is not None and not self._reads()):
                        raise
                    if (now() - last_progress) * 1000 > self._timeout_ms:
                        raise
                    self._find_leader(e)
                    continue
                failures = 1 if decoder.next_offset > before else failures + 1
                if failures == 1:
                    lost_at = began
                if not self._may_reopen(place, e, failures, now() - lost_at):
                    raise
                log.warning("%s: %s; reading on from offset %d", self.tp, e, decoder.next_offset)
                if place is None:  # it was lost while it was entered
                    self._find_leader(e)
                else:
                    self._leave()
                continue
            if decoder.next_offset > before or found:
                last_progress = now()
                pause = FIRST_WAIT_S
                failures = 0
                if decoder.full or (self._live and decoder.rows):
                    yield
                continue
            if (now() - last_progress) * 1000 > self._timeout_ms and not self._live:
                raise self._not_there(decoder.next_offset)
            if now() - max(last_progress, asked) > REPLICA_PATIENCE_S:
                asked = now()
                self.check_topic()  # what is not there may have been another topic's
            if now() - last_progress > REPLICA_PATIENCE_S and self._is_elsewhere():
                self._leave()
            if self._live:
                yield
            elif self._reads():
                pause = self._pause(pause)

    def _pause(self, seconds: float) -> float:
        """Wait for more to be readable.  How long to wait the next time."""
        self._paused_s += seconds
        self._environment.sleep(seconds)
        return min(seconds * 2, LONGEST_WAIT_S)

    def _fill(self, place: Place, decoder: ArrowDecoder) -> bool:
        """Whether something came."""
        cursor = place.cursor
        if self._live and isinstance(cursor, TcpCursor):
            found = cursor.fill_decoder_once(decoder, self._wait_ms)
        else:
            found = cursor.fill_decoder(decoder, self._wait_ms)
        self._check_file(place)
        return bool(found)

    def _open(self, offset: int) -> Place:
        """A place to read at: a parked one if there is one."""
        session = self._session
        session.check()
        settings = self._settings
        cold = cold_reads(session, settings, session.environment, stop=self._stop)
        # What a parked place would take from a broker comes from the store.
        past = cold is not None and (cold.comes_first or cold.is_located(self.tp, offset))
        place = None if past else session.parked.take(self.tp, offset)
        before = {} if place is None else place.paths.statistics()
        if place is None:
            paths = ReadPaths(
                session,
                settings,
                lambda: SinglePartition(session.cluster, settings, self._wanted_id),
                cold=cold,
            )
            try:
                entered = paths.enter({self.tp: offset})
                for error in entered.lost.values():
                    raise error
                for error in entered.refused.values():
                    raise as_moved(session.cluster, self.tp, error)
            except BaseException:
                paths.close()
                raise
            cursor = paths.cursor(self.tp)
            assert cursor is not None
            if (epoch := self._epochs.before(self.tp, offset)) >= 0:
                paths.follow(self.tp, epoch)
            place = Place(paths, cursor)
            before = paths.direct.statistics()
        self._place = place
        self._before = before
        over_tcp = isinstance(place.cursor, TcpCursor)  # where `check_topic` follows what was read
        if self._wanted_id is not None and not over_tcp and place.topic_id != self._wanted_id:
            try:
                self.check_topic()
            except BaseException:
                self._leave()
                raise
            self._place = place = place._replace(topic_id=self._wanted_id)
        self._file_id = _file_of(place)
        self._topic_id = self._wanted_id or session.cluster.topic_id(self.tp.topic)
        for error in self._epochs.check({self.tp: offset}).values():
            self._leave()
            raise error
        return place

    def check_topic(self) -> None:
        """Ask for the id of the topic: what was read before is of the topic that was wanted, for no
        id is given twice.  UnknownTopicError if it is another one's now.  Nobody is asked where
        each answer was for the id."""
        if self._wanted_id is None or self._asks_by_id():
            return
        now = self._session.cluster.refresh([self.tp.topic]).get(self.tp.topic)
        if now is None or now.topic_id != self._wanted_id:
            what = "was deleted" if now is None else "was deleted and created again"
            raise UnknownTopicError(
                f"the topic of {self.tp} {what} before it was read",
                hint="look the topic up again and open a new reader",
            )

    def _check_file(self, place: Place) -> None:
        """A further file was entered, by the name of the topic: is it of the same one?  Nothing of
        it is handed out before."""
        if self._wanted_id is not None and (file_id := _file_of(place)) != self._file_id:
            self.check_topic()
            self._file_id = file_id

    def _asks_by_id(self) -> bool:
        tcp = self._place.paths.tcp if self._place is not None else None
        return isinstance(tcp, SinglePartition) and not self._reads() and tcp.asks_by_id

    def _is_elsewhere(self) -> bool:
        """Is the range to be read at another broker than it is, which has nothing more of it?"""
        if self._session.cluster.leave_replica(self.tp):
            return True
        return self._place is not None and bool(self._place.paths.direct.moved())

    def _find_leader(self, why: KdirectError) -> None:
        """Another broker leads the partition, or its leader is not ready: read there next, soon."""
        log.info("%s: %s", self.tp, why.message)
        cluster = self._session.cluster
        look_again(cluster, self.tp, self._topic_id)
        self._leave()
        self._environment.sleep(MOVED_WAIT_S)

    def _leave(self) -> None:
        """Give the place up."""
        self._account()
        place, self._place = self._place, None
        self._before = {}
        if place is not None:
            self._epochs.note(place.cursor)
            place.paths.close()

    def _may_reopen(
        self, place: Place | None, why: KdirectError, failures: int, lost_s: float
    ) -> bool:
        """Is the partition entered again after this error, the `failures`-th without a record in
        between, `lost_s` seconds after the first?  A broker of several has that long until another
        one leads; one alone has the time that a connection may take."""
        if self._session.closed or isinstance(why, BrokerError):
            return False
        if place is None:
            several = self._session.cluster.has_several_brokers
            patience_ms = self._timeout_ms if several else self._settings["connect.timeout.ms"]
            return isinstance(why, LOST) and lost_s * 1000 < patience_ms
        # Over TCP this has been tried for request.timeout.ms (`tcp_fetch`).
        return failures <= TRIES and self._reads()

    def _reads(self) -> bool:
        """Do READs bring the bytes?"""
        return self._place is not None and type(self._place.cursor) is DirectCursor

    def _is_cold(self) -> bool:
        """Do objects bring the bytes?"""
        return self._place is not None and isinstance(self._place.cursor, ColdCursor)

    def _leave_cold(self, error: KdirectError) -> bool:
        """Does `error` say that what follows is at the broker, or that the store cannot be read?
        Then the partition is entered again."""
        if self._place is None or not (self._is_cold() and isinstance(error, AccessDeniedError)):
            return False
        self._cold_end = self._place.cursor.next_offset
        self._leave()
        return True

    def _not_there(self, offset: int) -> TimedOutError:
        return TimedOutError(
            f"{self.tp}: offset {offset} of a range that ends at {self._stop} did not become"
            f" readable in {self._timeout_ms} ms",
            hint="the records may have been deleted, or the range ends beyond the high watermark",
        )

    def _account(self) -> None:
        if self._place is not None:
            now = self._place.paths.statistics()
            for name, value in now.items():
                self._totals[name] = self._totals.get(name, 0) + value - self._before.get(name, 0)
            self._before = now

    @property
    def transport(self) -> str:
        """What this reader uses; the session's choice until it has started."""
        if self._place is None:
            return self._session.transport
        if self._is_cold():
            return "objects"
        fetcher = self._place.paths.direct.fetcher_of(self.tp)
        return fetcher.channel.transport if fetcher is not None else "tcp"

    def statistics(self) -> dict[str, int]:
        """What this reader has moved: `reads` and `read_bytes` one-sidedly, or `fetched_bytes` over
        TCP."""
        self._account()
        return self._totals | {"pause_us": round(self._paused_s * 1e6)}

    def close(self) -> None:
        """Stop; what READs the partition goes back to the session for the next reader of it."""
        self._account()
        place, self._place = self._place, None
        if place is not None:
            self._session.parked.park(place)


def _file_of(place: Place) -> int:
    """The id of the file that is READ; -1: none is."""
    cursor = place.cursor
    return cursor.stream.file_id if type(cursor) is DirectCursor else -1
