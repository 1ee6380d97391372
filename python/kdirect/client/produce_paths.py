"""Which datapath carries an encoded request to its partition, and what happens when access ends.

Owns: one path a partition (`DirectPath` over RDMA, `TcpPath` over Kafka's protocol, `LostPath` while neither can be had), the producer's
queue pair, and recovery: requests that were not acknowledged are repeated, in order.  Delivery is at least once: a request whose
acknowledgement was lost with its connection may have been committed and is sent again.  What may not enter: records, columns, the choice of
partitions.

A partition that another RDMA producer holds, or that plain Kafka producers are writing, cannot be had exclusively; its records
then travel over TCP, and RDMA is tried again after a second.

The face to the layer above is `ProducePaths`: `send` takes an encoded request and may wait for room (`room_ms`), never for its answer; a
request sent with a `tag` is answered by exactly one `Outcome` from `outcomes`, in order within its partition; errors of requests without a
tag are raised by `flush`.  No call waits longer than it is told: while a broker is away its requests are kept on a `LostPath`, and each
call tries once to bring them on their way again.  Callers hold one lock around every call.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any, NamedTuple

from kdirect.client.channel import Channel
from kdirect.client.connection import Connection, broker_error
from kdirect.client.direct_write import AckRouter, FileWriter
from kdirect.client.session import Session
from kdirect.client.tcp import Append, TcpAppender
from kdirect.errors import (
    AccessDeniedError,
    BrokerUnavailableError,
    BufferFullError,
    ClosedError,
    DeliveryError,
    KdirectError,
    QueuePairError,
    TimedOutError,
    TransportError,
)
from kdirect.format import layout
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.client")

# What FileWriter.try_* return.
SENT, NO_ROOM_FILE, NO_ROOM_BUFFER, NOT_GRANTED, BROKEN = range(5)

NOTICES = 64  # receives beyond the window, for notices of revocation
DIRECT_RETRY_S = 1.0
DIRECT_TURN_S = 0.1  # how long requests under way over TCP may hold up the return to RDMA
DIRECT_ATTEMPTS = 5
PROBE_MS = 1000  # how long a broker that was lost is waited for before it counts as still away


class Outcome(NamedTuple):
    """What became of a request that was sent with a tag."""

    tag: Any
    base_offset: int  # of its first record; -1 after an error, and where the broker did not say
    error: DeliveryError | None


class ProducePaths:
    """See the module.  `settings` are resolved CLIENT options."""

    def __init__(self, session: Session, settings: dict[str, Any]) -> None:
        self.session = session
        self.settings = settings
        self.timeout_ms: int = settings["delivery.timeout.ms"]
        self.errors: list[KdirectError] = []
        self._paths: dict[TopicPartition, Path] = {}
        self._direct_retry: dict[TopicPartition, float] = {}
        self._router: AckRouter | None = None
        self._channel: Channel | None = None
        self._outcomes: deque[Outcome] = deque()
        self._retired: dict[str, int] = {}
        self._closed = False

    # -- sending ---------------------------------------------------------------------------------------

    def send(self, tp: TopicPartition, data: Any, records: int, tag: Any = None, room_ms: float | None = None) -> None:
        """Send one request of whole batches, through whatever it takes.  Waits for room, not for the answer: BufferFullError when there is
        none within `room_ms` (None: the delivery timeout).  DeliveryError when the request can never be taken.  Neither has an outcome."""
        deadline = time.monotonic() + (self.timeout_ms if room_ms is None else room_ms) / 1000
        while True:
            path = self._paths.get(tp) or self.open(tp)
            if path.accept(self, data, records, tag, deadline):
                break
        if isinstance(path, TcpPath):
            self._maybe_direct_again(path)

    def try_record(
        self, tp: TopicPartition, value: bytes | None, key: bytes | None, timestamp_ms: int, tag: Any = None, room_ms: int = 60000
    ) -> bool:
        """Send one record at once as a batch of its own, where the path is RDMA; False: not taken, use `send`.  BufferFullError when there
        is no room within `room_ms`."""
        path = self._paths.get(tp) or self.open(tp)
        if path.__class__ is not DirectPath:
            return False
        writer: FileWriter = path.writer  # type: ignore[union-attr]
        if path.tags and not path.remember(self, room_ms):  # type: ignore[union-attr]
            return False
        while (code := writer.try_record(value, key, timestamp_ms)) != SENT:
            # Wait for a quarter of the window, so that a full one costs one sleep and not one a record.
            if code != NO_ROOM_BUFFER or not writer.in_flight:
                return False
            try:
                if not writer.wait_acknowledged(writer.acknowledged + (writer.in_flight >> 2), room_ms):
                    return False
            except TimedOutError:
                raise _full(tp, room_ms) from None
        if tag is not None:
            path.tags.append((writer.appended - 1, tag))  # type: ignore[union-attr]
        return True

    def record_sync(self, tp: TopicPartition, value: bytes | None, key: bytes | None, timestamp_ms: int) -> int:
        """As `try_record`, then wait for the acknowledgement: the record's offset, or -1: not taken, use `send` and `finish`."""
        path = self._paths.get(tp) or self.open(tp)
        if path.__class__ is not DirectPath:
            return -1
        writer: FileWriter = path.writer  # type: ignore[union-attr]
        if writer.in_flight or writer.try_record(value, key, timestamp_ms) != SENT:
            return -1
        try:
            if writer.wait_acknowledged(writer.appended - 1, self.timeout_ms):
                return int(writer.last_offset_base)
        except TimedOutError as e:
            self.expire(tp)
            self.errors.pop()
            raise DeliveryError(e.message, hint=e.hint, maybe_committed=True) from e
        return self.finish(tp)

    # -- answers ---------------------------------------------------------------------------------------

    def outcomes(self) -> list[Outcome]:
        """Take the outcomes that are known, without waiting."""
        if self._router is not None and not self._router.broken:
            self._router.drain()
        for path in list(self._paths.values()):
            path.collect(self)
        taken = list(self._outcomes)
        self._outcomes.clear()
        return taken

    @property
    def in_flight(self) -> int:
        """Records sent and not answered."""
        return sum(path.in_flight for path in self._paths.values())

    def settle(self, timeout_ms: float) -> bool:
        """Wait until everything sent is answered, at most about `timeout_ms`; True when it is.  Errors become outcomes, or wait for
        `raise_errors`."""
        deadline = time.monotonic() + timeout_ms / 1000
        return all(self._settle(tp, deadline) for tp in list(self._paths))

    def _settle(self, tp: TopicPartition, deadline: float) -> bool:
        while (path := self._paths.get(tp)) is not None and path.in_flight:
            if not path.settle(self, deadline) and time.monotonic() >= deadline:
                return False
        return True

    def flush(self) -> None:
        """Wait until everything sent is answered, for the delivery timeout; what is not by then has failed.  Raises the first error of a
        request without a tag."""
        if not self.settle(self.timeout_ms):
            for tp in list(self._paths):
                self.expire(tp)
        self.raise_errors()

    def finish(self, tp: TopicPartition) -> int:
        """Wait for the answers of one partition, as `flush` does; the base offset of its last request."""
        if not self._settle(tp, time.monotonic() + self.timeout_ms / 1000):
            self.expire(tp)
        self.raise_errors()
        path = self._paths.get(tp)
        return path.last_offset if path is not None else -1

    def expire(self, tp: TopicPartition) -> None:
        """Give up everything of `tp` that is not answered: it may have been committed all the same."""
        path = self._paths.get(tp)
        if path is None or not path.in_flight:
            return
        self._give_up(
            path,
            DeliveryError(
                f"{tp}: not delivered within {self.timeout_ms} ms",
                hint="the broker is down or overloaded; raise delivery.timeout.ms to wait longer",
                maybe_committed=True,
            ),
        )

    def _give_up(self, path: Path, error: DeliveryError) -> None:
        """End a path whose requests are not waited for any more."""
        path.collect(self)
        pending = path.take_pending(self)
        if isinstance(path, DirectPath):
            self._drop_channel()  # a broker that is silent would not answer a release; it sees the queue pair go
        self._retire(path.tp)
        for _, _, tag in pending:
            self.fail(error, tag)

    def raise_errors(self) -> None:
        if self.errors:
            errors, self.errors = self.errors, []
            if len(errors) > 1:
                log.error("%d more requests failed: %s", len(errors) - 1, "; ".join(map(str, errors[1:10])))
            raise errors[0]

    def fail(self, error: DeliveryError, tag: Any) -> None:
        """One request failed for good."""
        if tag is None:
            self.errors.append(error)
        else:
            self._outcomes.append(Outcome(tag, -1, error))

    # -- paths -----------------------------------------------------------------------------------------

    def open(self, tp: TopicPartition) -> Path:
        """The path of `tp`, opened now if it is not yet."""
        path = self._paths.get(tp)
        if path is not None:
            return path
        if self.session.transport != "tcp" and time.monotonic() >= self._direct_retry.get(tp, 0.0):
            direct = self._open_direct(tp)
            if direct is not None:
                self._paths[tp] = direct
                return direct
            self._direct_retry[tp] = time.monotonic() + DIRECT_RETRY_S
        tcp = self._paths[tp] = TcpPath(self, tp)
        return tcp

    def is_direct(self, tp: TopicPartition) -> bool:
        """Can `tp` be written by RDMA now?  Opens its path; tries again where it was refused a while ago."""
        path = self.open(tp)
        if isinstance(path, TcpPath):
            self._maybe_direct_again(path)
            path = self.open(tp)
        return isinstance(path, DirectPath)

    def give_back(self, tp: TopicPartition) -> None:
        """Wait for what is under way, then end RDMA access to `tp`, if there is any."""
        path = self._paths.get(tp)
        if isinstance(path, DirectPath) and self._settle(tp, time.monotonic() + self.timeout_ms / 1000) and self._paths.get(tp) is path:
            self._retire(tp)

    def _open_direct(self, tp: TopicPartition) -> DirectPath | None:
        """Exclusive access to `tp`, or None when TCP has to do for now: somebody else has it, or the path is lost (for a moment, or for
        good, as with a broker that came back without RDMA)."""
        for attempt in range(DIRECT_ATTEMPTS):
            try:
                return DirectPath(self, tp)
            except AccessDeniedError as e:
                log.info("%s is written over TCP: %s", tp, e)
                return None
            except (TransportError, QueuePairError) as e:
                self._drop_channel()
                if attempt == DIRECT_ATTEMPTS - 1:
                    log.warning("%s is written over TCP: %s", tp, e)
            time.sleep(0.001 * 4**attempt)
        return None

    def ack_router(self, tp: TopicPartition) -> tuple[Channel, AckRouter]:
        """The producer's queue pair, opened when first needed and again when it broke."""
        if self._channel is not None and (self._channel.closed or self._router is None or self._router.broken):
            self._drop_channel()
        if self._channel is None:
            window = self.settings["max.in.flight"]
            channel = self.session.channel(tp, receives=window + NOTICES, sends=window + NOTICES)
            self._channel = channel
            self._router = AckRouter(
                channel.qp, channel.send_cq, channel.recv_cq, window + NOTICES, min(window, channel.max_in_flight), self.settings["spin.us"]
            )
        assert self._router is not None
        return self._channel, self._router

    def _drop_channel(self) -> None:
        channel, self._channel, self._router = self._channel, None, None
        if channel is not None:
            channel.close()

    def wait_router(self, tp: TopicPartition, deadline: float) -> None:
        """The window is taken by other partitions of this queue pair: wait for any acknowledgement."""
        assert self._router is not None
        for _ in range(1000):  # or only for completions of WRITEs that are acknowledged already, which come at once
            if self._router.drain() != 0 or not self._router.sends_under_way:
                return
        self._router.wait(min(100, left_ms(tp, deadline)))

    def _maybe_direct_again(self, path: TcpPath) -> None:
        key = path.tp
        if self.session.transport != "tcp" and time.monotonic() >= self._direct_retry.get(key, float("inf")):
            if path.settle(self, time.monotonic() + DIRECT_TURN_S):
                self._retire(key)
                self.open(key)
            else:
                self._direct_retry[key] = time.monotonic() + DIRECT_RETRY_S

    def _retire(self, key: TopicPartition) -> None:
        path = self._paths.pop(key)
        for name, value in path.statistics().items():
            self._retired[name] = self._retired.get(name, 0) + value
        path.close()

    def recover(self, path: DirectPath) -> None:
        """Access ended, a request failed, or the queue pair broke.  Take what was not acknowledged, and bring it on its way again, in
        order.  A request that the broker refused for good is reported and left out."""
        router, writer = self._router, path.writer
        if router is not None and not router.broken:
            router.drain()
        path.collect(self)
        code = writer.error_code
        pending = path.take_pending(self)
        if code != 0 and pending:
            _, records, tag = pending.popleft()
            error = broker_error(code, f"{path.tp}: a batch of {records} records")
            if error.retriable and code == 2:  # damaged on the way, or by us: once more is harmless
                log.warning("%s", error)
            self.fail(DeliveryError(error.message, hint=error.hint or "the batch was not committed", maybe_committed=False), tag)
        if router is not None and router.broken:
            log.warning("%s: the RDMA connection broke (%s); %d requests are repeated", path.tp, router.broken, len(pending))
        self._retire(path.tp)
        if pending or path.channel.closed or router is None or router.broken:
            lost = self._paths[path.tp] = LostPath(path, pending, time.monotonic() + self.timeout_ms / 1000)
            lost.revive(self)

    def resend(self, tp: TopicPartition, pending: deque[tuple[Any, int, Any]]) -> None:
        """Send again what a path that ended had not delivered."""
        while pending:
            data, records, tag = pending.popleft()
            try:
                self.send(tp, data, records, tag)
            except DeliveryError as e:
                self.fail(e, tag)
            except KdirectError as e:
                self.fail(DeliveryError(f"{tp}: not delivered again: {e.message}", hint=e.hint, maybe_committed=True), tag)

    # -- the end ---------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Give access back without waiting; what is not acknowledged may or may not be committed, and has failed."""
        if self._closed:
            return
        self._closed = True
        error = DeliveryError("the producer was closed before the broker answered", hint="flush before closing", maybe_committed=True)
        for path in list(self._paths.values()):
            if path.in_flight:
                self._give_up(path, error)
            else:
                self._retire(path.tp)
        self._drop_channel()

    def statistics(self) -> dict[str, int]:
        """Records and bytes acknowledged, by path: `rdma_records`, `rdma_bytes`, `rdma_requests`, `tcp_records`, `tcp_bytes`,
        `tcp_requests`."""
        out = dict(self._retired)
        for path in self._paths.values():
            for name, value in path.statistics().items():
                out[name] = out.get(name, 0) + value
        return out


class DirectPath:
    """One partition whose head file this producer holds.

    The send buffer holds several batches (and the largest batch the topic takes); the acknowledgement ring twice the window.
    """

    def __init__(self, paths: ProducePaths, tp: TopicPartition) -> None:
        self.tp = tp
        self._settings = paths.settings
        self.channel, router = paths.ack_router(tp)
        window = self._settings["max.in.flight"]
        entries = 2
        while entries < 2 * window:
            entries *= 2
        self._ring = self.channel.remote_writable_memory(entries * layout.ACK_BYTES)
        self.writer = FileWriter(str(tp), router, self.channel.qp, self._ring, entries // 2)
        self.max_request_bytes = 0
        self.tags: deque[tuple[int, Any]] = deque()  # (sequence number, tag) of requests that want an outcome
        self._window = entries // 2
        self._further = 0  # records sent beyond one a request
        self.grant(1)

    def grant(self, min_bytes: int) -> None:
        """Get access to a head file with room for `min_bytes`; nothing may be under way."""
        answer = self.channel.produce_access(self.tp, min_bytes, self._ring, self.writer.ring_entries)
        self.max_request_bytes = answer.max_message_bytes
        wanted = max(2 * self._settings["batch.bytes"], self._settings["send.buffer.bytes"] // 8, answer.max_message_bytes + 4096)
        if self.writer.buffer_bytes < wanted:
            self.writer.set_buffer(self.channel.local_memory(wanted))
        self.writer.open(answer.file_id, answer.address, answer.rkey, answer.length, answer.position)

    @property
    def in_flight(self) -> int:
        """Records not acknowledged."""
        w = self.writer
        return int(w.appended + self._further - w.records_acknowledged) if w.in_flight else 0

    @property
    def last_offset(self) -> int:
        return int(self.writer.last_offset_base)

    def accept(self, paths: ProducePaths, data: Any, records: int, tag: Any, deadline: float) -> bool:
        """Send a request; False: look again, this path may have ended.  BufferFullError at the deadline."""
        writer, tp = self.writer, self.tp
        if len(data) > self.max_request_bytes:
            raise DeliveryError(
                f"a batch of {len(data)} bytes is too large for {tp} (max.message.bytes {self.max_request_bytes})",
                hint="lower batch.bytes, or raise the topic's max.message.bytes",
            )
        if self.tags and not self.remember(paths, max(0.0, (deadline - time.monotonic()) * 1000)):
            paths.recover(self)
            return False
        code = writer.try_batches(data, records)
        if code == SENT:
            self._further += records - 1
            if tag is not None:
                self.tags.append((writer.appended - 1, tag))
            return True
        try:
            if code == NO_ROOM_BUFFER:
                if not writer.in_flight:
                    paths.wait_router(tp, deadline)
                elif not writer.wait_acknowledged(writer.acknowledged, left_ms(tp, deadline)):
                    paths.recover(self)
            elif code == NO_ROOM_FILE and (not writer.in_flight or writer.wait_acknowledged(writer.appended - 1, left_ms(tp, deadline))):
                self.collect(paths)
                self.grant(len(data))
            else:
                paths.recover(self)
        except TimedOutError:
            raise _full(tp) from None
        except (AccessDeniedError, QueuePairError, ClosedError, BrokerUnavailableError):
            paths.recover(self)
        return False

    def remember(self, paths: ProducePaths, room_ms: float) -> bool:
        """Make sure that another request does not make the writer forget the offset of one with a tag: it remembers one window.  False: the
        writer can no longer be used."""
        writer = self.writer
        self.collect(paths)
        while self.tags and writer.appended - self.tags[0][0] >= self._window:
            try:
                # A quarter of the window at once, so that a full one costs one sleep and not one a record.
                if not writer.wait_acknowledged(writer.acknowledged + (writer.in_flight >> 2), int(room_ms)):
                    return False
            except TimedOutError:
                raise _full(self.tp, room_ms) from None
            self.collect(paths)
        return True

    def take_pending(self, paths: ProducePaths) -> deque[tuple[Any, int, Any]]:
        """(bytes, records, tag) of the requests not acknowledged, which are this path's no more."""
        writer = self.writer
        tags = dict(self.tags)
        self.tags.clear()
        pending = deque((d, n, tags.get(writer.acknowledged + i)) for i, (d, n) in enumerate(writer.unacknowledged()))
        writer.forget()
        return pending

    def settle(self, paths: ProducePaths, deadline: float) -> bool:
        """Wait for every acknowledgement until the deadline; False: not all, or the path has ended."""
        writer = self.writer
        try:
            if writer.wait_acknowledged(writer.appended - 1, max(0, int((deadline - time.monotonic()) * 1000))):
                return True
        except TimedOutError:
            return False
        paths.recover(self)
        return False

    def collect(self, paths: ProducePaths) -> None:
        """Outcomes of what is acknowledged."""
        tags, writer = self.tags, self.writer
        while tags and tags[0][0] < writer.acknowledged:
            sequence, tag = tags.popleft()
            paths._outcomes.append(Outcome(tag, writer.offset_of(sequence), None))

    def statistics(self) -> dict[str, int]:
        w = self.writer
        return {"rdma_records": w.records_acknowledged, "rdma_bytes": w.bytes_acknowledged, "rdma_requests": w.acknowledged}

    def close(self) -> None:
        file_id = self.writer.file_id
        granted = self.writer.granted
        self.writer.close()
        if granted and not self.channel.closed:
            try:
                self.channel.release([file_id])
            except KdirectError as e:
                log.debug("release of %s: %s", self.tp, e)


class TcpPath:
    """One partition written by Kafka's Produce."""

    def __init__(self, paths: ProducePaths, tp: TopicPartition) -> None:
        self.tp = tp
        settings = paths.settings
        self._appender = TcpAppender(paths.session.cluster, tp, settings["acks"], settings["delivery.timeout.ms"])
        self.last_offset = -1
        self._sent: deque[tuple[Append, int, Any]] = deque()
        self.in_flight = 0
        self._records = self._bytes = self._requests = 0

    def accept(self, paths: ProducePaths, data: Any, records: int, tag: Any, deadline: float) -> bool:
        """Send a request; BufferFullError when the window is full at the deadline."""
        append = self._appender.submit(data, room_ms=max(0.0, (deadline - time.monotonic()) * 1000))
        self._sent.append((append, records, tag))
        self.in_flight += records
        self._records += records
        self._bytes += len(data)
        self._requests += 1
        self._collect(paths)
        return True

    def settle(self, paths: ProducePaths, deadline: float) -> bool:
        """Wait for every answer until the deadline."""
        while self._sent:
            try:
                self._appender.flush(max(0.0, (deadline - time.monotonic()) * 1000))
            except TimedOutError:
                self._collect(paths)
                return not self._sent
            except DeliveryError:
                pass  # told by its outcome
            self._collect(paths)
        return True

    def collect(self, paths: ProducePaths) -> None:
        """Outcomes of what is answered."""
        if self._sent and not self._sent[0][0].done:
            self._appender.poll()
        self._collect(paths)

    def _collect(self, paths: ProducePaths) -> None:
        while self._sent and self._sent[0][0].done:
            append, records, tag = self._sent.popleft()
            append.seen = True
            self.in_flight -= records
            if append.error is not None:
                paths.fail(append.error, tag)
                continue
            self.last_offset = append.base_offset
            if tag is not None:
                paths._outcomes.append(Outcome(tag, append.base_offset, None))

    def take_pending(self, paths: ProducePaths) -> deque[tuple[Any, int, Any]]:
        """(bytes, records, tag) of the requests not answered, which are this path's no more."""
        pending = deque((bytes(a.data), n, tag) for a, n, tag in self._sent if not a.done)
        self._sent.clear()
        self.in_flight = 0
        self._appender.abandon()
        return pending

    def statistics(self) -> dict[str, int]:
        return {"tcp_records": self._records, "tcp_bytes": self._bytes, "tcp_requests": self._requests}

    def close(self) -> None:
        try:
            self._appender.close()
        except KdirectError as e:
            log.warning("%s: closing with requests unanswered: %s", self.tp, e)


class LostPath:
    """Requests of a partition to which there is no way now: the broker is away, or was a moment ago.

    Every call on it tries once to open a path and to send them; those that are not on their way by their deadline have failed.
    """

    last_offset = -1

    def __init__(self, ended: DirectPath, pending: deque[tuple[Any, int, Any]], deadline: float) -> None:
        self.tp = ended.tp
        self._connection = ended.channel.connection
        self._pending = pending
        self._deadline = deadline
        self._not_before = 0.0
        self._pause = 0.01
        self._why: KdirectError | None = None

    @property
    def in_flight(self) -> int:
        return sum(records for _, records, _ in self._pending)

    def revive(self, paths: ProducePaths) -> bool:
        """Try once; True when this path has ended, for a better one or because its time is over."""
        now = time.monotonic()
        if now < self._not_before:
            return False
        tp, old = self.tp, self._connection
        try:
            if old.closed:  # opening would wait for the broker as long as connect.timeout.ms
                Connection(old.host, old.port, old.client_id, PROBE_MS).close()
            paths._paths.pop(tp, None)
            paths.open(tp)
        except (QueuePairError, BrokerUnavailableError, ClosedError, TimedOutError) as e:
            paths._paths[tp] = self
            self._why = e
            if now + self._pause < self._deadline and not paths.session.closed:
                paths._drop_channel()
                self._not_before = time.monotonic() + self._pause
                self._pause = min(2 * self._pause, 1.0)
                return False
            self._give_up(paths, e)
            return True
        except KdirectError as e:
            self._give_up(paths, e)
            return True
        paths.resend(tp, self._pending)
        return True

    def _give_up(self, paths: ProducePaths, why: KdirectError | None) -> None:
        paths._paths.pop(self.tp, None)
        text, hint = (why.message, why.hint) if why is not None else ("no way to its leader", "see the broker's log")
        error = DeliveryError(f"{self.tp}: not delivered: {text}", hint=hint, maybe_committed=True)
        for _, _, tag in self.take_pending(paths):
            paths.fail(error, tag)

    def accept(self, paths: ProducePaths, data: Any, records: int, tag: Any, deadline: float) -> bool:
        if not self.revive(paths):
            time.sleep(min(max(0.0, self._not_before - time.monotonic()), left_ms(self.tp, deadline) / 1000))
        return False

    def settle(self, paths: ProducePaths, deadline: float) -> bool:
        if not self.revive(paths):
            time.sleep(max(0.0, min(self._not_before, deadline) - time.monotonic()))
        return False

    def collect(self, paths: ProducePaths) -> None:
        """Nothing is known but that their time is over."""
        if time.monotonic() >= self._deadline:
            self._give_up(paths, self._why)

    def take_pending(self, paths: ProducePaths) -> deque[tuple[Any, int, Any]]:
        pending, self._pending = self._pending, deque()
        return pending

    def statistics(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """Nothing is held."""


Path = DirectPath | TcpPath | LostPath


def left_ms(tp: TopicPartition, deadline: float) -> int:
    """Time until the deadline; BufferFullError when it is over."""
    left = int((deadline - time.monotonic()) * 1000)
    if left <= 0:
        raise _full(tp)
    return left


def _full(tp: TopicPartition, waited_ms: float | None = None) -> BufferFullError:
    after = f" after {waited_ms:.0f} ms" if waited_ms else ""
    return BufferFullError(
        f"{tp}: no room for another request{after}",
        hint="the broker takes them more slowly than they come, or is stopped; raise max.block.ms to wait longer",
    )
