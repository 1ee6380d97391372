"""Producing: records and Arrow batches to the partitions that lead them, over RDMA or Kafka's protocol.

Owns: the choice of partition, one target a partition (`_DirectTarget` over RDMA, `_TcpTarget` over TCP), and
what happens when access ends: requests that were not acknowledged are repeated, in order.  Delivery
is at least once: a request whose acknowledgement was lost with its connection may have been committed and
is sent again.

A partition that another RDMA producer holds, or that plain Kafka producers are writing, cannot be had
exclusively; its records then travel over TCP, and RDMA is tried again after a second.  Records without a key go where
access can be had: a producer keeps to one partition for a while, gives it back, and takes the next that is free.

Thread-safe: one lock a producer.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdirect.client.channel import Channel
from kdirect.client.connection import broker_error
from kdirect.client.direct_write import AckRouter, FileWriter
from kdirect.client.partitioner import murmur2, partition_for_keys
from kdirect.client.session import Session, connect
from kdirect.client.tcp import Append, TcpAppender
from kdirect.errors import (
    AccessDeniedError,
    BrokerUnavailableError,
    ClosedError,
    ConfigError,
    DeliveryError,
    KdirectError,
    QueuePairError,
    TimedOutError,
    TransportError,
    UnknownTopicError,
)
from kdirect.format import layout
from kdirect.format.codec import ArrowEncoder, encode_records
from kdirect.model import TopicPartition, check_topic_name
from kdirect.options import CLIENT

log = logging.getLogger("kdirect.client")

# What FileWriter.try_* return.
SENT, NO_ROOM_FILE, NO_ROOM_BUFFER, NOT_GRANTED, BROKEN = range(5)

NOTICES = 64  # receives beyond the window, for notices of revocation
DIRECT_RETRY_S = 1.0
DIRECT_ATTEMPTS = 5
STICKY_BYTES = 8 << 20  # records without a key stay with one partition for so long: access to another costs two requests
TCP_BATCH_BYTES = 64 << 10
Header = tuple[str, bytes | None]


class Producer:
    """Sends records.  `settings` are CLIENT options (or "host:port"); made by `kdirect.Producer(...)` or `Session.producer`.

    `produce` sends one record as a batch of its own (over RDMA at once; over TCP small records are gathered until `flush` or
    64 KiB); `send_arrow` sends columns in batches of `batch.bytes`.  Both return before the broker has answered; `flush` waits for
    the answers and raises what went wrong.  Use as a context manager, or call `close`.
    """

    def __init__(self, settings: Mapping[str, Any] | str, *, session: Session | None = None) -> None:
        given = {"bootstrap.servers": settings} if isinstance(settings, str) else dict(settings)
        self.settings = CLIENT.resolve({k: v for k, v in given.items() if v is not None})
        self._session = session if session is not None else connect(self.settings)
        self._lock = threading.RLock()
        self._targets: dict[tuple[str, int], _DirectTarget | _TcpTarget] = {}
        self._direct_retry: dict[tuple[str, int], float] = {}
        self._partitions: dict[str, int] = {}
        self._sticky: dict[str, list[int]] = {}
        self._router: AckRouter | None = None
        self._channel: Channel | None = None
        self._encoder = ArrowEncoder(compression=self.settings["compression.type"], batch_bytes=self.settings["batch.bytes"])
        self._errors: list[KdirectError] = []
        self._closed = False
        self._retired: dict[str, int] = {}
        self.timeout_ms: int = self.settings["delivery.timeout.ms"]

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    # -- sending ---------------------------------------------------------------------------------------

    def produce(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Sequence[Header] | None = None,
        timestamp_ms: int = -1,
    ) -> None:
        """Send one record.  `partition` None: by the key (murmur2, as Kafka's), or sticky without a key.  `timestamp_ms` -1: now."""
        with self._lock:
            if partition is None:
                partition = self._choose(topic, key, len(value) if value is not None else 0)
            target = self._targets.get((topic, partition))
            if target is None:
                target = self._target(topic, partition)
            if target.__class__ is _DirectTarget and headers is None and self.settings["compression.type"] == "none":
                writer: FileWriter = target.writer  # type: ignore[union-attr]
                while (code := writer.try_record(value, key, timestamp_ms)) != SENT:
                    # Wait for a quarter of the window, so that a full one costs one sleep and not one a record.
                    if code != NO_ROOM_BUFFER or not writer.in_flight:
                        break
                    if not writer.wait_acknowledged(writer.acknowledged + (writer.in_flight >> 2), self.timeout_ms):
                        break
                else:
                    return
            self._one(target, value, key, headers, timestamp_ms)

    def produce_sync(
        self, topic: str, value: bytes | None, key: bytes | None = None, partition: int | None = None, timestamp_ms: int = -1
    ) -> int:
        """Send one record and wait for its acknowledgement; the record's offset.  Raises DeliveryError."""
        with self._lock:
            if partition is None:
                partition = self._choose(topic, key, len(value) if value is not None else 0)
            target = self._targets.get((topic, partition))
            if target is None:
                target = self._target(topic, partition)
            if target.__class__ is _DirectTarget:
                writer = target.writer  # type: ignore[union-attr]
                if writer.in_flight == 0 and writer.try_record(value, key, timestamp_ms) == SENT:
                    if writer.wait_acknowledged(writer.appended - 1, self.timeout_ms):
                        return writer.last_offset_base
                    return self._recover(target, "produce").finish_last(self)  # type: ignore[arg-type]
            self._one(target, value, key, None, timestamp_ms)
            return self._targets[(topic, partition)].finish_last(self)

    def _one(
        self,
        target: _DirectTarget | _TcpTarget,
        value: bytes | None,
        key: bytes | None,
        headers: Sequence[Header] | None,
        timestamp_ms: int,
    ) -> None:
        stamp = timestamp_ms if timestamp_ms >= 0 else int(time.time() * 1000)
        if isinstance(target, _TcpTarget):
            target.gather(key, value, headers, stamp)
            return
        data = encode_records([(key, value, list(headers or ()), stamp)], compression=self.settings["compression.type"])
        self._send(target, data, 1)

    def send_arrow(self, data: pa.RecordBatch | pa.Table, topic: str | None = None, *, timestamp_ms: int | None = None) -> int:
        """Send columns: `value` (binary or string) and optionally `key`, `headers` (list<struct<key:string,value:binary>>), `topic`,
        `partition` (int), `timestamp` (timestamp; else `timestamp_ms`, else now).  The argument `topic` goes before the column.  Returns
        the number of records."""
        with self._lock:
            self._check()
            if data.num_rows == 0:
                return 0
            columns = {name: data.column(name) for name in data.schema.names}
            if "value" not in columns:
                raise ConfigError("the column `value` is missing", hint="name the column to send `value`")
            if topic is not None:
                self._send_topic(topic, columns, data.num_rows, timestamp_ms)
                return data.num_rows
            if "topic" not in columns:
                raise ConfigError("no topic: neither an argument nor a column `topic`", hint="set the option topic, or add the column")
            if columns["topic"].null_count:
                raise ConfigError(
                    f"{columns['topic'].null_count} rows have no topic", hint="fill the column `topic`, or set the option topic"
                )
            for name in pc.unique(columns["topic"]).to_pylist():
                mask = pc.equal(columns["topic"], name)
                part = {k: pc.filter(v, mask) for k, v in columns.items()}
                self._send_topic(name, part, len(part["value"]), timestamp_ms)
            return data.num_rows

    def _send_topic(self, topic: str, columns: dict[str, Any], rows: int, timestamp_ms: int | None) -> None:
        count = self._partition_count(topic)
        keys = columns.get("key")
        if keys is not None and keys.null_count == rows:
            keys = None
        given = columns.get("partition")
        if given is not None and given.null_count == rows:
            given = None
        if given is None and (keys is None or count == 1):
            self._send_rows(topic, self._choose(topic, None, columns["value"].nbytes) if count > 1 else 0, columns, keys, timestamp_ms)
            return
        wanted = np.zeros(rows, dtype=np.int32)
        if keys is not None:
            wanted[:] = partition_for_keys(_one_array(keys), count)
            if keys.null_count:
                wanted[np.asarray(_one_array(pc.is_null(keys)))] = self._choose(topic, None)
        elif given is not None and given.null_count:
            wanted[:] = self._choose(topic, None)
        if given is not None:
            known = np.asarray(_one_array(pc.is_valid(given)))
            chosen = np.asarray(_one_array(pc.fill_null(pc.cast(given, pa.int32()), 0)))
            wanted[known] = chosen[known]
            bad = chosen[known & ((chosen < 0) | (chosen >= count))]
            if len(bad):
                raise UnknownTopicError(
                    f"partition {int(bad[0])} of topic {topic} does not exist", hint=f"it has {count} partitions, 0 to {count - 1}"
                )
        # One stable sort brings each partition's rows together in their order.
        order = np.argsort(wanted, kind="stable")
        ends = np.cumsum(np.bincount(wanted, minlength=count))
        rearranged = {k: v.take(pa.array(order)) for k, v in columns.items() if k in ("value", "key", "headers", "timestamp")}
        start = 0
        for partition, end in enumerate(ends.tolist()):
            if end > start:
                part = {k: v.slice(start, end - start) for k, v in rearranged.items()}
                self._send_rows(topic, partition, part, part.get("key") if keys is not None else None, timestamp_ms)
            start = end

    def _send_rows(self, topic: str, partition: int, columns: dict[str, Any], keys: Any, timestamp_ms: int | None) -> None:
        timestamps = columns.get("timestamp")
        if timestamps is not None:
            timestamps = pc.cast(pc.cast(timestamps, pa.timestamp("ms", getattr(timestamps.type, "tz", None)), safe=False), pa.int64())
        now = timestamp_ms if timestamp_ms is not None else int(time.time() * 1000)
        batches = self._encoder.encode(columns["value"], keys, columns.get("headers"), timestamps, default_timestamp_ms=now)
        for batch in batches:
            target = self._targets.get((topic, partition)) or self._target(topic, partition)
            self._send(target, batch.data, batch.records_count)

    # -- partitions ------------------------------------------------------------------------------------

    def _partition_count(self, topic: str) -> int:
        count = self._partitions.get(topic)
        if count is None:
            count = self._partitions[check_topic_name(topic)] = len(self._session.cluster.partitions(topic))
        return count

    def _choose(self, topic: str, key: bytes | None, size: int = 0) -> int:
        """The partition of a record with `key`, or of about `size` bytes of records without one."""
        count = self._partitions.get(topic) or self._partition_count(topic)
        if key is not None:
            return (murmur2(key) & 0x7FFFFFFF) % count
        sticky = self._sticky.get(topic)
        if sticky is None:
            sticky = self._sticky[topic] = [random.randrange(count), STICKY_BYTES]
        sticky[1] += size + 64
        if sticky[1] > STICKY_BYTES:
            sticky[0] = self._next_free(topic, sticky[0], count)
            sticky[1] = 0
        return sticky[0]

    def _next_free(self, topic: str, current: int, count: int) -> int:
        """The next partition that can be written by RDMA, giving back the current one; the next at all if there is none."""
        if count == 1:
            return 0
        target = self._targets.get((topic, current))
        if isinstance(target, _DirectTarget):
            target.finish(self)
            if (topic, current) in self._targets:
                self._retire((topic, current))
        if self._session.transport != "tcp":
            for step in range(1, count + 1):
                partition = (current + step) % count
                found = self._target(topic, partition)
                if isinstance(found, _TcpTarget):
                    self._maybe_direct_again(found)
                    found = self._target(topic, partition)
                if isinstance(found, _DirectTarget):
                    return partition
        return (current + 1) % count

    # -- targets ---------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the producer is closed", hint="make a new one")

    def _target(self, topic: str, partition: int) -> _DirectTarget | _TcpTarget:
        self._check()
        count = self._partition_count(topic)
        if not 0 <= partition < count:
            raise UnknownTopicError(
                f"partition {partition} of topic {topic} does not exist", hint=f"it has {count} partitions, 0 to {count - 1}"
            )
        key = (topic, partition)
        target = self._targets.get(key)
        if target is not None:
            return target
        tp = TopicPartition(topic, partition)
        if self._session.transport != "tcp" and time.monotonic() >= self._direct_retry.get(key, 0.0):
            direct = self._open_direct(tp)
            if direct is not None:
                self._targets[key] = direct
                return direct
            self._direct_retry[key] = time.monotonic() + DIRECT_RETRY_S
        tcp = self._targets[key] = _TcpTarget(self, tp)
        return tcp

    def _open_direct(self, tp: TopicPartition) -> _DirectTarget | None:
        """Exclusive access to `tp`, or None when TCP has to do for now: somebody else has it, or the path is lost (for a moment, or for
        good, as with a broker that came back without RDMA)."""
        for attempt in range(DIRECT_ATTEMPTS):
            try:
                return _DirectTarget(self, tp)
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
            channel = self._session.channel(tp, receives=window + NOTICES, sends=window + NOTICES)
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

    def _send(self, target: _DirectTarget | _TcpTarget, data: Any, records: int) -> None:
        """Send one request, through whatever it takes; raises when the time allowed is over or the error is final."""
        if isinstance(target, _TcpTarget):
            target.send(data, records)
            self._maybe_direct_again(target)
            return
        deadline = time.monotonic() + self.timeout_ms / 1000
        while True:
            writer = target.writer
            if len(data) > target.max_request_bytes:
                raise DeliveryError(
                    f"a batch of {len(data)} bytes is too large for {target.tp} (max.message.bytes {target.max_request_bytes})",
                    hint="lower batch.bytes, or raise the topic's max.message.bytes",
                )
            code = writer.try_batches(data, records)
            if code == SENT:
                return
            if code == NO_ROOM_BUFFER:
                if writer.in_flight:
                    if not writer.wait_acknowledged(writer.acknowledged, self._left(deadline, target)):
                        target = self._recover_direct(target, "produce", data, records)
                        if not isinstance(target, _DirectTarget):
                            return
                else:
                    self._wait_router(deadline, target)
            elif code == NO_ROOM_FILE:
                if writer.in_flight and not writer.wait_acknowledged(writer.appended - 1, self._left(deadline, target)):
                    target = self._recover_direct(target, "produce", data, records)
                    if not isinstance(target, _DirectTarget):
                        return
                    continue
                try:
                    target.grant(len(data))
                except (AccessDeniedError, QueuePairError, ClosedError, BrokerUnavailableError):
                    target = self._recover_direct(target, "a new head file", data, records)
                    if not isinstance(target, _DirectTarget):
                        return
            else:
                target = self._recover_direct(target, "produce", data, records)
                if not isinstance(target, _DirectTarget):
                    return

    def _recover_direct(self, target: _DirectTarget, doing: str, data: Any, records: int) -> _DirectTarget | _TcpTarget:
        """`_recover`, and if the partition went over to TCP, send the request in hand there."""
        new = self._recover(target, doing)
        if isinstance(new, _TcpTarget):
            new.send(data, records)
        return new

    def _wait_router(self, deadline: float, target: _DirectTarget) -> None:
        """The window is taken by other partitions of this queue pair: wait for any acknowledgement."""
        assert self._router is not None
        for _ in range(1000):  # or only for completions of WRITEs that are acknowledged already, which come at once
            if self._router.drain() != 0 or not self._router.sends_under_way:
                break
        else:
            self._router.wait(min(100, self._left(deadline, target)))

    def _left(self, deadline: float, target: _DirectTarget | _TcpTarget) -> int:
        left = int((deadline - time.monotonic()) * 1000)
        if left <= 0:
            raise DeliveryError(
                f"{target.tp}: not delivered within {self.timeout_ms} ms",
                hint="the broker is down or overloaded; raise delivery.timeout.ms to wait longer",
                maybe_committed=True,
            )
        return left

    def _maybe_direct_again(self, target: _TcpTarget) -> None:
        key = (target.tp.topic, target.tp.partition)
        if self._session.transport != "tcp" and time.monotonic() >= self._direct_retry.get(key, float("inf")):
            target.finish(self)
            self._retire(key)
            self._target(*key)

    def _retire(self, key: tuple[str, int]) -> None:
        target = self._targets.pop(key)
        for name, value in target.statistics().items():
            self._retired[name] = self._retired.get(name, 0) + value
        target.close()

    def _recover(self, target: _DirectTarget, doing: str) -> _DirectTarget | _TcpTarget:
        """Access ended, a request failed, or the queue pair broke.  Take what was not acknowledged, get access again (or go over to TCP),
        and repeat it in order.  A request that the broker refused for good is reported and left out."""
        deadline = time.monotonic() + self.timeout_ms / 1000
        key = (target.tp.topic, target.tp.partition)
        writer = target.writer
        router = self._router
        if router is not None and not router.broken:
            router.drain()
        pending = writer.unacknowledged()
        code = writer.error_code
        writer.forget()
        if code != 0 and pending:
            _, records = pending.pop(0)
            error = broker_error(code, f"{target.tp}: a batch of {records} records")
            if error.retriable and code == 2:  # damaged on the way, or by us: once more is harmless
                log.warning("%s", error)
            self._errors.append(DeliveryError(error.message, hint=error.hint or "the batch was not committed", maybe_committed=False))
        if router is not None and router.broken:
            log.warning("%s: the RDMA connection broke (%s); %d requests are repeated", target.tp, router.broken, len(pending))
        self._retire(key)
        pause = 0.01
        while True:
            try:
                new = self._target(*key)
                break
            except (QueuePairError, BrokerUnavailableError, ClosedError, TimedOutError) as e:
                if time.monotonic() + pause > deadline or self._session.closed:
                    raise DeliveryError(f"{target.tp}: {doing} failed: {e.message}", hint=e.hint, maybe_committed=True) from e
                self._drop_channel()
                time.sleep(pause)
                pause = min(pause * 2, 1.0)
        for data, records in pending:
            self._send(self._targets.get(key) or new, data, records)
        return self._targets.get(key) or new

    # -- finishing -------------------------------------------------------------------------------------

    def flush(self, timeout_ms: int | None = None) -> None:
        """Wait until everything sent is acknowledged.  Raises DeliveryError (the first, if several)."""
        with self._lock:
            self._check()
            if timeout_ms is not None:
                kept, self.timeout_ms = self.timeout_ms, timeout_ms
            try:
                for key in list(self._targets):
                    self._targets[key].finish(self)
            finally:
                if timeout_ms is not None:
                    self.timeout_ms = kept
            self._raise_errors()

    def _raise_errors(self) -> None:
        if self._errors:
            errors, self._errors = self._errors, []
            if len(errors) > 1:
                log.error("%d more requests failed: %s", len(errors) - 1, "; ".join(map(str, errors[1:10])))
            raise errors[0]

    def close(self) -> None:
        """Flush, then give access back."""
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self.abort()

    def abort(self) -> None:
        """Give access back without waiting; what is not acknowledged may or may not be committed."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for key in list(self._targets):
                self._retire(key)
            self._drop_channel()

    def statistics(self) -> dict[str, int]:
        """Records and bytes acknowledged, by path: `rdma_records`, `rdma_bytes`, `rdma_requests`, `tcp_records`, `tcp_bytes`,
        `tcp_requests`."""
        with self._lock:
            out = dict(self._retired)
            for target in self._targets.values():
                for name, value in target.statistics().items():
                    out[name] = out.get(name, 0) + value
            return out


def _one_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """`column` as one array (a table's columns come in chunks)."""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


class _DirectTarget:
    """One partition whose head file this producer holds.

    The send buffer holds several batches (and the largest batch the topic takes); the acknowledgement ring twice the window.
    """

    def __init__(self, producer: Producer, tp: TopicPartition) -> None:
        self.tp = tp
        self._settings = producer.settings
        self.channel, router = producer.ack_router(tp)
        window = self._settings["max.in.flight"]
        entries = 2
        while entries < 2 * window:
            entries *= 2
        self._ring = self.channel.remote_writable_memory(entries * layout.ACK_BYTES)
        self.writer = FileWriter(str(tp), router, self.channel.qp, self._ring, entries // 2)
        self.max_request_bytes = 0
        self.grant(1)

    def grant(self, min_bytes: int) -> None:
        """Get access to a head file with room for `min_bytes`; nothing may be under way."""
        answer = self.channel.produce_access(self.tp, min_bytes, self._ring, self.writer.ring_entries)
        self.max_request_bytes = answer.max_message_bytes
        wanted = max(2 * self._settings["batch.bytes"], self._settings["send.buffer.bytes"] // 8, answer.max_message_bytes + 4096)
        if self.writer.buffer_bytes < wanted:
            self.writer.set_buffer(self.channel.local_memory(wanted))
        self.writer.open(answer.file_id, answer.address, answer.rkey, answer.length, answer.position)

    def finish(self, producer: Producer) -> None:
        """Wait for every acknowledgement."""
        target: _DirectTarget | _TcpTarget = self
        deadline = time.monotonic() + producer.timeout_ms / 1000
        while True:
            if isinstance(target, _TcpTarget):
                target.finish(producer)
                return
            writer = target.writer
            if not writer.in_flight:
                return
            try:
                if writer.wait_acknowledged(writer.appended - 1, producer._left(deadline, target)):
                    return
            except TimedOutError as e:
                raise DeliveryError(e.message, hint=e.hint, maybe_committed=True) from e
            target = producer._recover(target, "flush")

    def finish_last(self, producer: Producer) -> int:
        self.finish(producer)
        producer._raise_errors()
        target = producer._targets.get((self.tp.topic, self.tp.partition))
        return target.writer.last_offset_base if isinstance(target, _DirectTarget) else target.last_offset if target else -1

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


class _TcpTarget:
    """One partition written by Kafka's Produce."""

    def __init__(self, producer: Producer, tp: TopicPartition) -> None:
        self.tp = tp
        settings = producer.settings
        self._compression = settings["compression.type"]
        self._appender = TcpAppender(producer._session.cluster, tp, settings["acks"], settings["delivery.timeout.ms"])
        self._gathered: list[tuple[bytes | None, bytes | None, list[Header], int]] = []
        self._gathered_bytes = 0
        self.last_offset = -1
        self._last: tuple[Append, int] | None = None
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

    def send(self, data: Any, records: int) -> None:
        """Send encoded batches, behind what was gathered."""
        self._send_gathered()
        self._put(data, records)

    def _put(self, data: Any, records: int) -> None:
        self._last = (self._appender.submit(data), records)
        self._records += records
        self._bytes += len(data)
        self._requests += 1

    def finish(self, producer: Producer) -> None:
        """Wait for every answer."""
        self._send_gathered()
        self._appender.flush()
        if self._last is not None and self._last[0].base_offset >= 0:
            self.last_offset = self._last[0].base_offset + self._last[1] - 1

    def finish_last(self, producer: Producer) -> int:
        self.finish(producer)
        producer._raise_errors()
        return self.last_offset

    def statistics(self) -> dict[str, int]:
        return {"tcp_records": self._records, "tcp_bytes": self._bytes, "tcp_requests": self._requests}

    def close(self) -> None:
        try:
            self._appender.close()
        except KdirectError as e:
            log.warning("%s: closing with requests unanswered: %s", self.tp, e)
