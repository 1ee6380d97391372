"""`kdirect.Producer`: sends records and Arrow batches, and reports what became of them.

Owns: records on their way into batches, back-pressure, delivery reports, and the one thread that
sends what lingers.  What may not enter: how a request reaches its partition and what is repeated
when that fails (`produce_driver`, `partition_writer`), which partition a record goes to
(`run_partition`), and how many partitions a topic has (`topics`).

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
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from kdirect.client import process_end
from kdirect.client.admin import TopicInfo
from kdirect.client.connections import Handle, open_handle
from kdirect.client.deliveries import (
    Callbacks,
    DeliveredBatch,
    Delivery,
    Gathering,
    OnDelivery,
    Sent,
)
from kdirect.client.direct_append import UNANSWERED, Sync
from kdirect.client.gather import as_bytes
from kdirect.client.linger_thread import FIRST_PAUSE_S, send_what_lingers
from kdirect.client.partitioner import Keys
from kdirect.client.produce_driver import ProduceDriver
from kdirect.client.run_partition import RECORD_OVERHEAD, RunPartitions
from kdirect.client.send_columns import ColumnEncoder
from kdirect.client.topics import Topics
from kdirect.errors import BufferFullError, DeliveryError, KdirectError
from kdirect.model import TopicPartition
from kdirect.options import CLIENT

log = logging.getLogger("kdirect.client")

SLICE_MS = 10.0  # longest wait with the lock held, but for room
# Between two such waits, for other threads that want the lock: Python does not hand it on.
TURN_S = 0.0002
REPORTS_AHEAD = 1000  # reports that may wait for poll before produce runs their callbacks
ERRORS_KEPT = 100
# What the producer's thread waits for: to be woken, for linger.ms, for room and answers.
IDLE, LINGERING, BUSY = range(3)
Header = tuple[str, bytes | None]


class Producer:
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
        self._lock = threading.RLock()
        self._keys = Keys(partitioner if partitioner is not None else self.settings["partitioner"])
        self._on_delivery = on_delivery
        self._environment = self._session.environment
        self._monotonic = self._environment.monotonic
        self._time_ms = self._environment.time_ms
        self._topics = Topics(self._session, self.settings)
        self._partition_of, self._check = self._topics.partition_of, self._topics.check
        self._compression: str = self.settings["compression.type"]
        self._batch_bytes: int = self.settings["batch.bytes"]
        self._linger_s: float = self.settings["linger.ms"] / 1000
        self._block_ms: int = self.settings["max.block.ms"]
        self._most_held: int = self.settings["buffer.memory"]
        self._delivery_s: float = self.settings["delivery.timeout.ms"] / 1000
        self._at_once = self._linger_s == 0 and self._compression == "none"
        self._open: dict[TopicPartition, Gathering] = {}  # those with records
        self._idle_builders: dict[TopicPartition, Gathering] = {}
        self._sent: deque[Sent] = deque()  # handed to the driver, oldest first
        self._held = 0
        self._callbacks = Callbacks()
        self._reports, self._resolved = self._callbacks.reports, self._callbacks.resolved
        self._resolve_futures = self._callbacks.resolve_futures
        self._run_callbacks = self._callbacks.run
        self._failed = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._thread_state = IDLE
        self._driver = ProduceDriver(self._session, self.settings)
        self._try_record: Callable[..., bool] = self._driver.try_record
        self._record_sync: Callable[..., int | Sync] = self._driver.record_sync
        self._runs = RunPartitions(
            self._environment,
            self._driver,
            self._topics,
            self._keys,
            self._block_ms,
            self._send_gathered,
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
            if data.num_rows == 0:
                return 0
            now = timestamp if timestamp is not None else self._time_ms()
            for tp, columns in self._columns.split(data, topic):
                self._send_columns(tp, columns, now, on_delivery)
            if self._driver.unsent:
                self._wake_thread(sent=True)
        self._resolve_futures()
        return int(data.num_rows)

    def _send_columns(
        self, tp: TopicPartition, columns: dict[str, Any], now: int, on_delivery: Any
    ) -> None:
        if tp in self._open:
            self._send_batches(self._open[tp], self._delivery_s * 1000)
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
            self._driver.send(tp, batch.data, batch.records_count, tag)
            if tag is not None:
                self._sent.append(tag)

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

    # -- batches -----------------------------------------------------------------------------------

    def _gather(
        self,
        tp: TopicPartition,
        value: Any,
        key: Any,
        headers: Any,
        timestamp: int | None,
        sink: Any,
    ) -> None:
        """Put a record into its partition's open batch; send what is full or due."""
        if headers:
            # The batch and the report both read them, and the report comes later: a generator would
            # be used up by then, and a list that the caller goes on with would have changed.
            headers = list(headers.items()) if isinstance(headers, Mapping) else list(headers)
        size = (
            RECORD_OVERHEAD
            + (len(value) if value is not None else 0)
            + (len(key) if key is not None else 0)
        )
        if self._held + size > self._most_held and self._held:
            self._wait_for_room(size)
        at_once = self._linger_s == 0 and self._is_written_directly(
            tp
        )  # asked before the record is taken: what it raises is not sent
        if timestamp is None and sink is not None:
            timestamp = self._time_ms()  # for the report; else the batch takes its own
        gathering = self._open.get(tp)
        if gathering is None:
            gathering = self._idle_builders.get(tp)
            if gathering is None:
                gathering = self._idle_builders[tp] = Gathering(tp, self._compression)
        builder = gathering.builder
        if builder.records and builder.size + size > self._batch_bytes:
            gathering.close_batch()
            self._send_batches(gathering, 0.0)
            self._wake_thread(sent=True)
        if not builder.records:
            now = self._monotonic()
            gathering.due = now + self._linger_s
            gathering.deadline = now + self._delivery_s
        filled = builder.add(key, value, headers, timestamp)
        if sink is not None:
            report: Any = (builder.records - 1, sink, key, value, headers, timestamp)
            gathering.reports.append(report)
        gathering.held += size
        self._held += size
        self._open[tp] = gathering
        if filled >= self._batch_bytes or at_once:
            self._send_batches(gathering, float(self._block_ms), patient=False)
            self._wake_thread(sent=True)
        else:
            self._wake_thread()

    def _is_written_directly(self, tp: TopicPartition) -> bool:
        try:
            return self._driver.leads_direct(tp)
        except KdirectError as e:
            if e.retriable:
                return False  # the broker is away: the record is kept for it
            raise

    def _send_batches(self, gathering: Gathering, room_ms: float, *, patient: bool = True) -> bool:
        """Hand a partition's batches to its path, in order; False when there is no room for one
        within `room_ms`, or as `ProduceDriver.send` if not `patient`."""
        gathering.close_batch()
        full = gathering.full
        while full:
            sent = full[0]
            try:
                if self._monotonic() >= sent.deadline:
                    why = f": {gathering.why}" if gathering.why is not None else ""
                    raise DeliveryError(
                        f"{sent.tp}: {sent.records} records were not sent within"
                        f" delivery.timeout.ms{why}",
                        hint="the broker is down or overloaded; raise delivery.timeout.ms to wait"
                        " longer",
                    )
                self._driver.send(sent.tp, sent.data, sent.records, sent, room_ms, patient=patient)
                gathering.why = None
            except BufferFullError as e:
                gathering.why = e.__cause__ or gathering.why
                return False
            except KdirectError as e:
                if e.retriable and not isinstance(e, DeliveryError):
                    return False  # no way to the broker now
                full.popleft()
                error = (
                    e
                    if isinstance(e, DeliveryError)
                    else DeliveryError(f"{sent.tp}: {e.message}", hint=e.hint)
                )
                if error is not e:
                    error.__cause__ = e
                self._answer(sent, -1, error)
                continue
            full.popleft()
            sent.data = None
            self._sent.append(sent)
        if not gathering.builder.records:
            self._open.pop(gathering.tp, None)
        return True

    def _wait_for_room(self, size: int) -> None:
        deadline = self._monotonic() + self._block_ms / 1000
        while self._held + size > self._most_held:
            for gathering in list(self._open.values()):
                self._send_batches(gathering, 0.0)
            left_ms = (deadline - self._monotonic()) * 1000
            self._driver.wait_answered(max(0.0, min(left_ms, SLICE_MS)))
            self._take_outcomes()
            self._lock.release()  # `produce` holds it once
            try:
                self._environment.sleep(TURN_S if left_ms > 0 else 0.0)
            finally:
                self._lock.acquire()
            self._check()  # another thread may have closed it meanwhile
            if left_ms <= 0 and self._held + size > self._most_held:
                self._wake_thread(sent=True)  # which calls the futures that were resolved here
                raise BufferFullError(
                    f"{self._held} bytes of records are not acknowledged after {self._block_ms} ms",
                    hint="the broker takes them more slowly than they come, or is stopped; raise"
                    " max.block.ms or buffer.memory",
                )

    def _take_outcomes(self) -> bool:
        """Take in outcomes, and give up what is overdue.  True when there were outcomes."""
        sent = self._sent
        outcomes = self._driver.outcomes()
        for tag, base_offset, error in outcomes:
            self._answer(tag, base_offset, error)
        while sent and (sent[0].done or self._monotonic() >= sent[0].deadline):
            head = sent.popleft()
            if not head.done:
                self._driver.expire(head.tp)
                for tag, base_offset, error in self._driver.outcomes():
                    self._answer(tag, base_offset, error)
        return bool(outcomes)

    def _answer(self, sent: Sent, base_offset: int, error: DeliveryError | None) -> None:
        self._held -= sent.held
        heard = sent.answer(base_offset, error, self._reports, self._resolved)
        if error is not None:
            self._failed += sent.records
            if not heard:
                if len(self._driver.errors) < ERRORS_KEPT:
                    self._driver.errors.append(error)
                else:
                    log.error("%s", error)

    # -- the thread --------------------------------------------------------------------------------

    def _wake_thread(self, *, sent: bool = False) -> None:
        """There is something for the thread: the first record of a batch, or a request under way
        whose answer is awaited."""
        if self._thread_state == IDLE or (sent and self._thread_state == LINGERING):
            self._thread_state = BUSY
            if self._thread is None or not self._thread.is_alive():
                wake = self._wake
                arguments = (weakref.ref(self, lambda _: wake.set()), wake)
                self._thread = threading.Thread(
                    target=send_what_lingers, args=arguments, name="kdirect-producer", daemon=True
                )
                self._thread.start()
            self._wake.set()

    def _work(self, pause: float) -> float | None:
        """One turn of the thread: send what is due, take in outcomes.  How long to wait before the
        next; None: until roused."""
        with self._lock:
            if self._closed:
                return None
            now = self._monotonic()
            stuck = False
            due = float("inf")
            for gathering in list(self._open.values()):
                if gathering.full or now >= gathering.due:
                    stuck |= not self._send_batches(gathering, 0.0)
                else:
                    due = min(due, gathering.due)
            moved = self._take_outcomes()
            busy = bool(self._sent) or stuck or self._driver.unsent
            if not self._open and not busy:
                self._thread_state = IDLE
                return None
            self._thread_state = BUSY if busy else LINGERING
            if busy:
                due = min(due, now + (FIRST_PAUSE_S if moved else pause))
            return max(0.0, due - self._monotonic())

    # -- partitions --------------------------------------------------------------------------------

    def _send_gathered(self, tp: TopicPartition) -> None:
        """Send what is gathered for `tp`, as far as there is room now."""
        if tp in self._open:
            self._send_batches(self._open[tp], 0.0)

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

    def _expire_all(self) -> None:
        for tp in {sent.tp for sent in self._sent} | set(self._topics.partitions()):
            self._driver.expire(tp)
        for gathering in list(self._open.values()):
            self._send_batches(gathering, 0.0)
        self._take_outcomes()

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

    def _drop_gathered(self, why: str) -> None:
        for tp, gathering in list(self._open.items()):
            gathering.close_batch()
            while gathering.full:
                sent = gathering.full.popleft()
                self._answer(sent, -1, DeliveryError(f"{sent.tp}: {why}", hint="it was not sent"))
            del self._open[tp]

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
