"""Which datapath carries an encoded request to its partition, and what happens when access ends.

Owns: one path a partition (`DirectPath` over RDMA, `TcpPath` over Kafka's protocol), the producer's queue pair, and recovery:
requests that were not acknowledged are repeated, in order.  Delivery is at least once: a request whose acknowledgement was lost with
its connection may have been committed and is sent again.  What may not enter: records, columns, the choice of partitions.

A partition that another RDMA producer holds, or that plain Kafka producers are writing, cannot be had exclusively; its records
then travel over TCP, and RDMA is tried again after a second.

The face to the layer above is `ProducePaths`: `send` takes an encoded request and may wait for room, never for its answer; a request
sent with a `tag` is answered by an `Outcome` from `outcomes`, in order within its partition; errors of requests without a tag are raised by
`flush`.  Callers hold one lock around every call.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from kdirect.client.channel import Channel
from kdirect.client.connection import broker_error
from kdirect.client.direct_write import AckRouter, FileWriter
from kdirect.client.session import Session
from kdirect.client.tcp import Append, TcpAppender
from kdirect.errors import (
    AccessDeniedError,
    BrokerUnavailableError,
    ClosedError,
    DeliveryError,
    KdirectError,
    QueuePairError,
    TimedOutError,
    TransportError,
)
from kdirect.format import layout
from kdirect.format.codec import encode_records
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.client")

# What FileWriter.try_* return.
SENT, NO_ROOM_FILE, NO_ROOM_BUFFER, NOT_GRANTED, BROKEN = range(5)

NOTICES = 64  # receives beyond the window, for notices of revocation
DIRECT_RETRY_S = 1.0
DIRECT_ATTEMPTS = 5
TCP_BATCH_BYTES = 64 << 10
Header = tuple[str, bytes | None]


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
        self._paths: dict[TopicPartition, DirectPath | TcpPath] = {}
        self._direct_retry: dict[TopicPartition, float] = {}
        self._router: AckRouter | None = None
        self._channel: Channel | None = None
        self._outcomes: deque[Outcome] = deque()
        self._retired: dict[str, int] = {}
        self._closed = False

    # -- sending ---------------------------------------------------------------------------------------

    def send(self, tp: TopicPartition, data: Any, records: int, tag: Any = None) -> None:
        """Send one request of whole batches, through whatever it takes.  Waits for room, not for the answer.  DeliveryError when the
        time allowed is over or the request can never be taken; then it has no outcome."""
        path = self._paths.get(tp) or self.open(tp)
        self._send(path, data, records, tag)
        if isinstance(path, TcpPath):
            self._maybe_direct_again(path)

    def try_record(self, tp: TopicPartition, value: bytes | None, key: bytes | None, timestamp_ms: int) -> bool:
        """Send one record at once as a batch of its own, where the path is RDMA and has room; False: not taken, use `send`."""
        path = self._paths.get(tp) or self.open(tp)
        if path.__class__ is not DirectPath:
            return False
        writer: FileWriter = path.writer  # type: ignore[union-attr]
        if path.tags:  # type: ignore[union-attr]
            path.collect(self._outcomes)
        while (code := writer.try_record(value, key, timestamp_ms)) != SENT:
            # Wait for a quarter of the window, so that a full one costs one sleep and not one a record.
            if code != NO_ROOM_BUFFER or not writer.in_flight:
                return False
            if not writer.wait_acknowledged(writer.acknowledged + (writer.in_flight >> 2), self.timeout_ms):
                return False
        return True

    def record_sync(self, tp: TopicPartition, value: bytes | None, key: bytes | None, timestamp_ms: int) -> int:
        """As `try_record`, then wait for the acknowledgement: the record's offset, or -1: not taken, use `send` and `finish`."""
        path = self._paths.get(tp) or self.open(tp)
        if path.__class__ is not DirectPath:
            return -1
        writer: FileWriter = path.writer  # type: ignore[union-attr]
        if writer.in_flight or writer.try_record(value, key, timestamp_ms) != SENT:
            return -1
        if writer.wait_acknowledged(writer.appended - 1, self.timeout_ms):
            return int(writer.last_offset_base)
        return self._recover(path, "produce").finish_last(self)  # type: ignore[arg-type]

    def gather(
        self, tp: TopicPartition, key: bytes | None, value: bytes | None, headers: Iterable[Header] | None, timestamp_ms: int
    ) -> bool:
        """Keep one record for the next request, where the path is TCP; False: not taken, use `send`."""
        path = self._paths.get(tp) or self.open(tp)
        if isinstance(path, TcpPath):
            path.gather(key, value, headers, timestamp_ms)
            return True
        return False

    # -- answers ---------------------------------------------------------------------------------------

    def outcomes(self) -> list[Outcome]:
        """Take the outcomes that are known, without waiting."""
        if self._router is not None and not self._router.broken:
            self._router.drain()
        for path in list(self._paths.values()):
            path.collect(self._outcomes)
        taken = list(self._outcomes)
        self._outcomes.clear()
        return taken

    def flush(self) -> None:
        """Wait until everything sent is answered.  Raises the first error of a request without a tag."""
        for tp in list(self._paths):
            self._paths[tp].finish(self)
        self.raise_errors()

    def finish(self, tp: TopicPartition) -> int:
        """Wait for the answers of one partition; the base offset of its last request."""
        return self._paths[tp].finish_last(self)

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

    def open(self, tp: TopicPartition) -> DirectPath | TcpPath:
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
        if isinstance(path, DirectPath):
            path.finish(self)
            if tp in self._paths:
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

    def _send(self, path: DirectPath | TcpPath, data: Any, records: int, tag: Any = None) -> None:
        """Send one request, through whatever it takes; raises when the time allowed is over or the error is final."""
        if isinstance(path, TcpPath):
            path.send(data, records, tag)
            return
        deadline = time.monotonic() + self.timeout_ms / 1000
        while True:
            writer = path.writer
            if len(data) > path.max_request_bytes:
                raise DeliveryError(
                    f"a batch of {len(data)} bytes is too large for {path.tp} (max.message.bytes {path.max_request_bytes})",
                    hint="lower batch.bytes, or raise the topic's max.message.bytes",
                )
            code = writer.try_batches(data, records)
            if code == SENT:
                path.sent(tag, self._outcomes)
                return
            if code == NO_ROOM_BUFFER:
                if writer.in_flight:
                    if not writer.wait_acknowledged(writer.acknowledged, self._left(deadline, path)):
                        path = self._recover_direct(path, "produce", data, records, tag)
                        if not isinstance(path, DirectPath):
                            return
                else:
                    self._wait_router(deadline, path)
            elif code == NO_ROOM_FILE:
                if writer.in_flight and not writer.wait_acknowledged(writer.appended - 1, self._left(deadline, path)):
                    path = self._recover_direct(path, "produce", data, records, tag)
                    if not isinstance(path, DirectPath):
                        return
                    continue
                try:
                    path.grant(len(data))
                except (AccessDeniedError, QueuePairError, ClosedError, BrokerUnavailableError):
                    path = self._recover_direct(path, "a new head file", data, records, tag)
                    if not isinstance(path, DirectPath):
                        return
            else:
                path = self._recover_direct(path, "produce", data, records, tag)
                if not isinstance(path, DirectPath):
                    return

    def _recover_direct(self, path: DirectPath, doing: str, data: Any, records: int, tag: Any) -> DirectPath | TcpPath:
        """`_recover`, and if the partition went over to TCP, send the request in hand there."""
        new = self._recover(path, doing)
        if isinstance(new, TcpPath):
            new.send(data, records, tag)
        return new

    def _wait_router(self, deadline: float, path: DirectPath) -> None:
        """The window is taken by other partitions of this queue pair: wait for any acknowledgement."""
        assert self._router is not None
        for _ in range(1000):  # or only for completions of WRITEs that are acknowledged already, which come at once
            if self._router.drain() != 0 or not self._router.sends_under_way:
                break
        else:
            self._router.wait(min(100, self._left(deadline, path)))

    def _left(self, deadline: float, path: DirectPath | TcpPath) -> int:
        left = int((deadline - time.monotonic()) * 1000)
        if left <= 0:
            raise DeliveryError(
                f"{path.tp}: not delivered within {self.timeout_ms} ms",
                hint="the broker is down or overloaded; raise delivery.timeout.ms to wait longer",
                maybe_committed=True,
            )
        return left

    def _maybe_direct_again(self, path: TcpPath) -> None:
        key = path.tp
        if self.session.transport != "tcp" and time.monotonic() >= self._direct_retry.get(key, float("inf")):
            path.finish(self)
            self._retire(key)
            self.open(key)

    def _retire(self, key: TopicPartition) -> None:
        path = self._paths.pop(key)
        for name, value in path.statistics().items():
            self._retired[name] = self._retired.get(name, 0) + value
        path.close()

    def _recover(self, path: DirectPath, doing: str) -> DirectPath | TcpPath:
        """Access ended, a request failed, or the queue pair broke.  Take what was not acknowledged, get access again (or go over to TCP),
        and repeat it in order.  A request that the broker refused for good is reported and left out."""
        deadline = time.monotonic() + self.timeout_ms / 1000
        key = path.tp
        writer = path.writer
        router = self._router
        if router is not None and not router.broken:
            router.drain()
        path.collect(self._outcomes)
        tags = dict(path.tags)
        pending = [(data, records, tags.get(writer.acknowledged + i)) for i, (data, records) in enumerate(writer.unacknowledged())]
        code = writer.error_code
        writer.forget()
        if code != 0 and pending:
            _, records, tag = pending.pop(0)
            error = broker_error(code, f"{path.tp}: a batch of {records} records")
            if error.retriable and code == 2:  # damaged on the way, or by us: once more is harmless
                log.warning("%s", error)
            self.fail(DeliveryError(error.message, hint=error.hint or "the batch was not committed", maybe_committed=False), tag)
        if router is not None and router.broken:
            log.warning("%s: the RDMA connection broke (%s); %d requests are repeated", path.tp, router.broken, len(pending))
        self._retire(key)
        pause = 0.01
        while True:
            try:
                new = self.open(key)
                break
            except (QueuePairError, BrokerUnavailableError, ClosedError, TimedOutError) as e:
                if time.monotonic() + pause > deadline or self.session.closed:
                    raise DeliveryError(f"{path.tp}: {doing} failed: {e.message}", hint=e.hint, maybe_committed=True) from e
                self._drop_channel()
                time.sleep(pause)
                pause = min(pause * 2, 1.0)
        for data, records, tag in pending:
            self._send(self._paths.get(key) or new, data, records, tag)
        return self._paths.get(key) or new

    # -- the end ---------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Give access back without waiting; what is not acknowledged may or may not be committed."""
        if self._closed:
            return
        self._closed = True
        for tp in list(self._paths):
            self._retire(tp)
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
        self.grant(1)

    def grant(self, min_bytes: int) -> None:
        """Get access to a head file with room for `min_bytes`; nothing may be under way."""
        answer = self.channel.produce_access(self.tp, min_bytes, self._ring, self.writer.ring_entries)
        self.max_request_bytes = answer.max_message_bytes
        wanted = max(2 * self._settings["batch.bytes"], self._settings["send.buffer.bytes"] // 8, answer.max_message_bytes + 4096)
        if self.writer.buffer_bytes < wanted:
            self.writer.set_buffer(self.channel.local_memory(wanted))
        self.writer.open(answer.file_id, answer.address, answer.rkey, answer.length, answer.position)

    def sent(self, tag: Any, outcomes: deque[Outcome]) -> None:
        """The last request carries `tag`."""
        if self.tags:
            self.collect(outcomes)
        if tag is not None:
            self.tags.append((self.writer.appended - 1, tag))

    def collect(self, outcomes: deque[Outcome]) -> None:
        """Outcomes of what is acknowledged.  The writer remembers the offsets of one window, so this comes before each `sent`."""
        tags, writer = self.tags, self.writer
        while tags and tags[0][0] < writer.acknowledged:
            sequence, tag = tags.popleft()
            outcomes.append(Outcome(tag, writer.offset_of(sequence), None))

    def finish(self, paths: ProducePaths) -> None:
        """Wait for every acknowledgement."""
        path: DirectPath | TcpPath = self
        deadline = time.monotonic() + paths.timeout_ms / 1000
        while True:
            if isinstance(path, TcpPath):
                path.finish(paths)
                return
            writer = path.writer
            if not writer.in_flight:
                return
            try:
                if writer.wait_acknowledged(writer.appended - 1, paths._left(deadline, path)):
                    return
            except TimedOutError as e:
                raise DeliveryError(e.message, hint=e.hint, maybe_committed=True) from e
            path = paths._recover(path, "flush")

    def finish_last(self, paths: ProducePaths) -> int:
        self.finish(paths)
        paths.raise_errors()
        path = paths._paths.get(self.tp)
        return path.writer.last_offset_base if isinstance(path, DirectPath) else path.last_offset if path else -1

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
        self._compression = settings["compression.type"]
        self._appender = TcpAppender(paths.session.cluster, tp, settings["acks"], settings["delivery.timeout.ms"])
        self._gathered: list[tuple[bytes | None, bytes | None, list[Header], int]] = []
        self._gathered_bytes = 0
        self.last_offset = -1
        self._last: tuple[Append, int] | None = None
        self._tagged: deque[tuple[Append, Any]] = deque()
        self._records = self._bytes = self._requests = 0

    def gather(self, key: bytes | None, value: bytes | None, headers: Iterable[Header] | None, timestamp_ms: int) -> None:
        """Keep one record until 64 KiB are together, or `finish`."""
        self._gathered.append((key, value, list(headers or ()), timestamp_ms))
        self._gathered_bytes += len(key or b"") + len(value or b"") + 32
        if self._gathered_bytes >= TCP_BATCH_BYTES:
            self._send_gathered()

    def _send_gathered(self) -> None:
        if self._gathered:
            records, self._gathered, self._gathered_bytes = self._gathered, [], 0
            self._put(encode_records(records, compression=self._compression), len(records))

    def send(self, data: Any, records: int, tag: Any = None) -> None:
        """Send encoded batches, behind what was gathered."""
        self._send_gathered()
        self._put(data, records, tag)

    def _put(self, data: Any, records: int, tag: Any = None) -> None:
        append = self._appender.submit(data)
        self._last = (append, records)
        if tag is not None:
            self._tagged.append((append, tag))
        self._records += records
        self._bytes += len(data)
        self._requests += 1

    def finish(self, paths: ProducePaths) -> None:
        """Wait for every answer."""
        self._send_gathered()
        while self._tagged and not self._tagged[-1][0].done:
            try:
                self._tagged[-1][0].result()
            except DeliveryError:
                pass  # told by its outcome
        for append, _ in self._tagged:
            append.seen = True
        self._appender.flush()
        if self._last is not None and self._last[0].base_offset >= 0:
            self.last_offset = self._last[0].base_offset + self._last[1] - 1

    def finish_last(self, paths: ProducePaths) -> int:
        self.finish(paths)
        paths.raise_errors()
        return self.last_offset

    def collect(self, outcomes: deque[Outcome]) -> None:
        """Outcomes of what is answered."""
        if self._tagged and not self._tagged[0][0].done:
            self._appender.poll()
        while self._tagged and self._tagged[0][0].done:
            append, tag = self._tagged.popleft()
            append.seen = True
            outcomes.append(Outcome(tag, append.base_offset, append.error))

    def statistics(self) -> dict[str, int]:
        return {"tcp_records": self._records, "tcp_bytes": self._bytes, "tcp_requests": self._requests}

    def close(self) -> None:
        try:
            self._appender.close()
        except KdirectError as e:
            log.warning("%s: closing with requests unanswered: %s", self.tp, e)
