"""`kdirect.Producer`: sends records and Arrow batches, and reports what became of them.

Owns: the calls, which way a record takes, waiting, and delivery reports.  What may not enter: how
records become batches and when these are sent (`producer_batches`), how a request reaches its
partition and what is repeated when that fails (`produce_driver`, `partition_writer`), which
partition a record goes to (`run_partition`), and how many partitions a topic has (`topics`).

Names and conventions are confluent-kafka's: timeouts are **seconds**, and `on_delivery(error,
message)` runs inside `poll` and `flush`.  docs/python-api.md lists what differs.  The rules that
matter:

- With linger.ms=0 (the default) a plain record over RDMA leaves inside `produce`, as a batch of its
  own.  Other records are gathered by partition and leave when a batch is full, when linger.ms is
  over, or, over TCP, as soon as the producer's thread runs.
- Records of one partition leave in the order of the calls, whichever way they go.
- `produce` blocks for max.block.ms when there is no room, then raises BufferFullError, which is a
  BufferError.  While a partition cannot be written for now, the room is that in buffer.memory.
- No failure is silent: it goes to the record's callback or future, and where the record has none,
  `flush` and `close` raise it.
- A producer belongs to the process that made it: in a forked child every call is a ClosedError.

Thread-safe.  A producer has one lock.  Callbacks, and those of futures, run without the lock.  A
thread that waits while it holds the lock releases it every few milliseconds.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from kdirect.client import process_end
from kdirect.client.admin import TopicInfo
from kdirect.client.connections import Handle, open_handle
from kdirect.client.deliveries import (
    DeliveredBatch,
    Delivery,
    OnDelivery,
    Sent,
)
from kdirect.client.direct_append import UNANSWERED, Sync
from kdirect.client.gather import as_bytes
from kdirect.client.linger_thread import FIRST_PAUSE_S
from kdirect.client.partitioner import Keys
from kdirect.client.producer_batches import SLICE_MS, TURN_S
from kdirect.client.producer_transactions import ProducerTransactions
from kdirect.client.run_partition import RunPartitions
from kdirect.client.send_columns import ColumnEncoder
from kdirect.errors import BufferFullError, KdirectError
from kdirect.model import TopicPartition
from kdirect.options import CLIENT

log = logging.getLogger("kdirect.client")

REPORTS_AHEAD = 1000  # reports that may wait for poll before produce runs their callbacks
Header = tuple[str, bytes | None]


class Producer(ProducerTransactions):
    """Sends records.  `settings`: client settings (docs/options.md), or "host:port"; made here or
    by `Session.producer`.

    `produce` sends a record and may report by a callback, `send` returns a future, `produce_sync`
    waits for the offset, `send_arrow` sends columns.  `flush` waits for everything.  Use as a
    context manager, or call `close`.  `partitioner`: a function (key or None, partitions) ->
    partition in place of the setting; `on_delivery`: the callback of records that name none.
    """

    def __init__(
        self,
        settings: Mapping[str, Any] | str,
        *,
        session: Handle | None = None,
        partitioner: Callable[[bytes | None, int], int] | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> None:
        given = {"bootstrap.servers": settings} if isinstance(settings, str) else dict(settings)
        self.settings = CLIENT.resolve({k: v for k, v in given.items() if v is not None})
        self._owns_session = session is None  # and closes it
        self._session = session if session is not None else open_handle(self.settings, Handle)
        super().__init__(self._session, self.settings)
        self._keys = Keys(partitioner if partitioner is not None else self.settings["partitioner"])
        self._on_delivery = on_delivery
        self._partition_of = self._topics.partition_of
        if self._transaction is not None:
            self._partition_of = self._partition_in_transaction
        self._at_once = self._linger_s == 0 and self._compression == "none"
        self._try_record: Callable[..., bool] = self._driver.try_record
        self._record_sync: Callable[..., int | Sync] = self._driver.record_sync
        self._runs = RunPartitions(
            self._environment,
            self._driver,
            self._topics,
            self._keys,
            self._block_ms,
            self._send_gathered,
            self._look_soon,
        )
        self._choose = self._runs.choose
        self._columns = ColumnEncoder(
            self.settings, self._topics, self._keys, self._runs.next_of_run
        )
        process_end.add(self, Producer._close_in_child)

    def _close_in_child(self) -> None:
        self._lock = threading.RLock()  # another thread of the parent may have held it
        self._topics.close()
        self._open = {}
        self._closed = True

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def __len__(self) -> int:
        """Records not delivered yet."""
        with self._lock:
            return sum(g.records for g in self._open.values()) + self._driver.in_flight

    def __bool__(self) -> bool:
        return True

    # -- sending -----------------------------------------------------------------------------------

    def produce(
        self,
        topic: str,
        value: bytes | str | None = None,
        key: bytes | str | None = None,
        *,
        partition: int | None = None,
        headers: Sequence[Header] | Mapping[str, bytes | None] | None = None,
        timestamp: int | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> None:
        """Send one record.  `partition` None or -1: by the key, or with the others that have none.
        `timestamp`: ms since 1970, None: now. `headers`: (name, value) pairs, or a mapping; None
        and an empty collection are the same.

        `on_delivery(error, message)` is called by a later `poll` or `flush`, in the order of the
        partition; `message` has the offset. BufferFullError when there is no room within
        max.block.ms; DeliveryError when the record is larger than its topic takes.
        """
        if value.__class__ is not bytes and value is not None:
            value = as_bytes(value, "value")
        if key is not None and key.__class__ is not bytes:
            key = as_bytes(key, "key")
        if on_delivery is None:
            on_delivery = self._on_delivery
        with self._lock:
            if partition is None or partition == -1:
                size = len(value) if value is not None else 0
                partition = self._choose(topic, key, size)  # type: ignore[arg-type]
            tp = self._partition_of(topic, partition)
            sent = False
            if self._at_once and not headers and tp not in self._open:
                stamp = -1 if timestamp is None else timestamp
                if on_delivery is not None:
                    sent = self._send_tagged(tp, value, key, stamp, on_delivery)
                elif self._try_record(tp, value, key, stamp, None, self._block_ms):
                    return
            if not sent:
                self._gather(tp, value, key, headers, timestamp, on_delivery)
        if self._resolved:
            self._resolve_futures()
        if len(self._reports) > REPORTS_AHEAD:
            self._run_callbacks()

    def send(
        self,
        topic: str,
        value: bytes | str | None = None,
        key: bytes | str | None = None,
        *,
        partition: int | None = None,
        headers: Sequence[Header] | Mapping[str, bytes | None] | None = None,
        timestamp: int | None = None,
    ) -> Delivery:
        """As `produce`; a future whose result is the `Message` with its offset."""
        delivery = Delivery(self._await_delivery)
        self.produce(
            topic,
            value,
            key,
            partition=partition,
            headers=headers,
            timestamp=timestamp,
            on_delivery=delivery,
        )
        self._wake_thread(sent=True)
        return delivery

    def produce_sync(
        self,
        topic: str,
        value: bytes | str | None = None,
        key: bytes | str | None = None,
        *,
        partition: int | None = None,
        headers: Sequence[Header] | Mapping[str, bytes | None] | None = None,
        timestamp: int | None = None,
    ) -> int:
        """Send one record and wait for its acknowledgement; the record's offset (-1 with acks=0
        over TCP).  Raises DeliveryError."""
        late = None
        if (
            self._at_once
            and not headers
            and value.__class__ is bytes
            and (key is None or key.__class__ is bytes)
        ):
            with self._lock:
                if partition is None or partition == -1:
                    partition = self._choose(topic, key, len(value))  # type: ignore[arg-type]
                tp = self._partition_of(topic, partition)
                if tp not in self._open:
                    stamp = -1 if timestamp is None else timestamp
                    offset: Any = self._record_sync(tp, value, key, stamp)
                    if offset.__class__ is int:
                        return offset  # type: ignore[no-any-return]
                    if offset is UNANSWERED:
                        # From here on without the lock, which other threads want.
                        late = Delivery(self._await_delivery)
                        tag = self._tag(tp, value, key, stamp, late)
                        self._driver.tag_last(tp, tag)
                        self._sent.append(tag)
        if late is None:
            late = Delivery(self._await_delivery)
            self.produce(
                topic,
                value,
                key,
                partition=partition,
                headers=headers,
                timestamp=timestamp,
                on_delivery=late,
            )
        return int(late.result(self._delivery_s + 1).offset())

    def send_arrow(
        self,
        data: pa.RecordBatch | pa.Table,
        topic: str | None = None,
        *,
        timestamp: int | None = None,
        on_delivery: Callable[[KdirectError | None, DeliveredBatch], None] | None = None,
    ) -> int:
        """Send columns: `value` (binary or string) and optionally `key`, `headers`
        (list<struct<key:string,value:binary>>), `topic`, `partition` (int), `timestamp` (timestamp
        or ms; else the argument, else now).  The argument `topic` goes before the column. Batches
        have `batch.bytes`; `on_delivery` is called for each as `DeliveredBatch`.  Waits for room,
        up to the delivery timeout. Returns the number of records."""
        with self._lock:
            self._check()
            if self._transaction is not None:
                self._transaction.check_open()
            if data.num_rows == 0:
                return 0
            now = timestamp if timestamp is not None else self._time_ms()
            parts: Iterable[tuple[TopicPartition, Any]] = self._columns.split(data, topic)
            if self._transaction is not None:
                parts = list(parts)
                self._named.update(tp for tp, _ in parts)
            try:
                for tp, columns in parts:
                    self._send_columns(tp, columns, now, on_delivery)
            finally:
                self._named.clear()
            if self._driver.wants_look:
                self._wake_thread(sent=True)
        self._resolve_futures()
        return int(data.num_rows)

    def _send_columns(
        self, tp: TopicPartition, columns: dict[str, Any], now: int, on_delivery: Any
    ) -> None:
        until, number = self._monotonic() + self._delivery_s, self._transaction_number
        while tp in self._open and not self._send_batches(self._open[tp], self._delivery_s * 1000):
            if not self._waits_to_enter(tp, number, until):
                break
        self._enter(tp)
        for batch in self._columns.encode(columns, now):
            tag = None
            if on_delivery is not None:
                tag = Sent(
                    tp,
                    None,
                    batch.records_count,
                    [],
                    self._monotonic() + self._delivery_s,
                    0,
                    on_delivery,
                )
            self._send_encoded(tp, batch, tag)
            if tag is not None:
                self._sent.append(tag)

    def _send_encoded(self, tp: TopicPartition, batch: Any, tag: Any) -> None:
        until, number = self._monotonic() + self._delivery_s, self._transaction_number
        while True:
            try:
                self._driver.send(tp, batch.data, batch.records_count, tag)
                return
            except BufferFullError:
                if not self._waits_to_enter(tp, number, until):
                    raise

    def _send_tagged(self, tp: TopicPartition, value: Any, key: Any, stamp: int, sink: Any) -> bool:
        """Send one record at once, and remember whom to tell.  False: it was not taken, and nothing
        is remembered."""
        if stamp < 0:
            stamp = self._time_ms()
        tag = self._tag(tp, value, key, stamp, sink)
        if not self._try_record(tp, value, key, stamp, tag, self._block_ms):
            return False
        self._sent.append(tag)
        if len(self._sent) & 127 == 0:
            self._take_outcomes()
        return True

    def _tag(self, tp: TopicPartition, value: Any, key: Any, stamp: int, sink: Any) -> Sent:
        """Whom to tell of one record."""
        if stamp < 0:
            stamp = self._time_ms()
        deadline = self._monotonic() + self._delivery_s
        return Sent(tp, None, 1, [(0, sink, key, value, None, stamp)], deadline)

    # -- partitions --------------------------------------------------------------------------------

    def list_topics(self) -> dict[str, TopicInfo]:
        """All topics that are not internal."""
        self._check()
        return self._session.admin.list_topics()

    # -- finishing ---------------------------------------------------------------------------------

    def poll(self, timeout: float = 0.0) -> int:
        """Run the callbacks of what was delivered or has failed; how many.  Waits up to `timeout`
        seconds for a first one, as long as something is under way; for ever if negative."""
        deadline = self._monotonic() + timeout if timeout >= 0 else float("inf")
        while True:
            with self._lock:
                self._check()
                self._take_outcomes()
                pending = bool(self._sent or self._open or self._resolved)
                if not self._reports and pending and timeout != 0:
                    self._driver.wait_answered(
                        max(0.0, min(SLICE_MS, (deadline - self._monotonic()) * 1000))
                    )
                    self._take_outcomes()
            self._resolve_futures()
            served = self._run_callbacks()
            if served or not pending or self._monotonic() >= deadline:
                return served
            self._environment.sleep(TURN_S if self._sent else FIRST_PAUSE_S)

    def _await_delivery(self, delivery: Delivery, timeout: float | None) -> bool:
        """Do the producer's work until `delivery` is done or the time is over; whether it is."""
        deadline = float("inf") if timeout is None else self._monotonic() + timeout
        while not delivery.done():
            left_ms = (deadline - self._monotonic()) * 1000
            with self._lock:
                if self._closed:
                    break
                for gathering in list(self._open.values()):
                    self._send_batches(gathering, 0.0)
                self._driver.wait_answered(max(0.0, min(left_ms, SLICE_MS)))
                self._take_outcomes()
            self._resolve_futures(within=True)
            if left_ms <= 0:
                break
            if not delivery.done():
                self._environment.sleep(TURN_S)
        return delivery.done()

    def flush(self, timeout: float | None = None) -> int:
        """Send everything, wait for the answers, call back.  The number of records not delivered
        after `timeout` seconds; None, or below 0: wait until each is delivered or has failed
        (delivery.timeout.ms), 0 then.  Raises the first DeliveryError that no callback or future
        was told."""
        if timeout is not None and timeout < 0:
            timeout = None
        deadline = self._monotonic() + (self._delivery_s if timeout is None else timeout)
        while True:
            with self._lock:
                self._check()
                left_ms = max(0.0, (deadline - self._monotonic()) * 1000)
                stuck = False
                for gathering in list(self._open.values()):
                    stuck |= not self._send_batches(
                        gathering, 0.0 if stuck else min(left_ms, SLICE_MS)
                    )
                done = self._driver.wait_answered(
                    min(max(0.0, (deadline - self._monotonic()) * 1000), SLICE_MS)
                )
                if self._sent:
                    self._take_outcomes()
                if done and not stuck and not self._open:
                    break
                if self._monotonic() >= deadline:
                    if timeout is None:
                        self._expire_all()
                    break
            self._resolve_futures()
            self._environment.sleep(TURN_S)
        self._resolve_futures()
        if self._reports:
            self._run_callbacks()
        with self._lock:
            self._driver.raise_errors()
            return 0 if done and not self._open else len(self)

    def purge(self, in_queue: bool = True, in_flight: bool = True) -> None:
        """Give up records: those not sent yet (`in_queue`) were not committed; those under way
        (`in_flight`) may be.  Their callbacks and futures get an error; no call raises one."""
        with self._lock:
            self._check()
            if in_queue:
                self._drop_gathered("the record was purged")
            if in_flight:
                for tp in self._topics.partitions():
                    self._driver.expire(tp)
                self._take_outcomes()
            self._driver.errors.clear()
        self._resolve_futures()
        self._run_callbacks()

    def close(self, timeout: float | None = None) -> None:
        """Flush, then give access back.  What is not delivered after `timeout` seconds has failed:
        DeliveryError, unless its callback or future was told."""
        if self._closed:
            return
        try:
            if self.flush(timeout) == 0:
                with self._lock:
                    self._driver.release()
        finally:
            self.abort()
        self._driver.raise_errors()

    def abort(self) -> None:
        """Give access back without waiting.  Records not sent are dropped, those under way may or
        may not be committed; callbacks and futures are told."""
        with self._lock:
            if self._closed:
                return
            self._drop_gathered("the producer was closed")
            self._closed = True
            self._topics.close()
            self._driver.abort()
            self._leave_coordinators()
            for tag, base_offset, error in self._driver.outcomes():
                self._answer(tag, base_offset, error)
            self._sent.clear()
            self._wake.set()
        if self._owns_session:
            self._session.close()
        self._resolve_futures()
        self._run_callbacks()

    def statistics(self) -> dict[str, Any]:
        """Records, bytes and requests acknowledged, by path (`rdma_records`, `tcp_bytes`, ...), and
        what waits; `paths` says for each partition written so far ("topic-0") which path it uses
        now.  See docs/metrics.md."""
        with self._lock:
            out: dict[str, Any] = dict(self._driver.statistics())
            # Partitions as text, so that statistics can be logged as JSON.
            out["paths"] = {str(tp): path for tp, path in self._driver.paths().items()}
            out["waiting_records"] = sum(g.records for g in self._open.values())
            out["in_flight_records"] = self._driver.in_flight
            out["failed_records"] = self._failed
            out["waiting_reports"] = len(self._reports)
            return out
