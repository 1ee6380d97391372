"""The batches of a producer: records on their way into them, and when they are sent.

Owns: the open batch of each partition, back-pressure, what was handed to the driver and is not
answered, and the one thread that sends what lingers.  What may not enter: the API, which is
`kdirect.client.producer`, and how a request reaches its partition (`produce_driver`).

Everything here runs with the producer's lock held, which a wait for room releases.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

from kdirect.client.connections import Handle
from kdirect.client.deliveries import Callbacks, Gathering, Sent
from kdirect.client.linger_thread import FIRST_PAUSE_S, send_what_lingers
from kdirect.client.produce_driver import ProduceDriver
from kdirect.client.run_partition import RECORD_OVERHEAD
from kdirect.client.topics import Topics
from kdirect.errors import BufferFullError, DeliveryError, KdirectError
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.client")

SLICE_MS = 10.0  # longest wait with the lock held, but for room
# Between two such waits, for other threads that want the lock: Python does not hand it on.
TURN_S = 0.0002
ERRORS_KEPT = 100
# What the producer's thread waits for: to be woken, for linger.ms, for room and answers.
IDLE, LINGERING, BUSY = range(3)


class ProducerBatches:
    """See the module."""

    def __init__(self, session: Handle, settings: dict[str, Any]) -> None:
        self._lock = threading.RLock()
        self._environment = session.environment
        self._monotonic = self._environment.monotonic
        self._time_ms = self._environment.time_ms
        self._topics = Topics(session, settings)
        self._check = self._topics.check
        self._compression: str = settings["compression.type"]
        self._batch_bytes: int = settings["batch.bytes"]
        self._linger_s: float = settings["linger.ms"] / 1000
        self._block_ms: int = settings["max.block.ms"]
        self._most_held: int = settings["buffer.memory"]
        self._delivery_s: float = settings["delivery.timeout.ms"] / 1000
        self._open: dict[TopicPartition, Gathering] = {}  # those with records
        self._idle_builders: dict[TopicPartition, Gathering] = {}
        self._sent: deque[Sent] = deque()  # handed to the driver, oldest first
        self._held = 0
        self._callbacks = Callbacks()
        self._reports, self._resolved = self._callbacks.reports, self._callbacks.resolved
        self._failed = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._thread_state = IDLE
        self._driver = ProduceDriver(session, settings)

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
            sent = self._send_batches(gathering, float(self._block_ms), patient=False)
            if not (sent and at_once and self._driver.needs_no_look(tp)):
                self._wake_thread(sent=True)
            elif len(self._sent) & 127 == 0:
                self._take_outcomes()
        else:
            self._wake_thread()

    def _enter(self, tp: TopicPartition) -> None:
        """Before a batch is sent to `tp`.  May release the lock while it waits."""

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
                self._enter(sent.tp)
                if not full or full[0] is not sent:  # another thread has sent it, or dropped it
                    continue
                self._driver.send(sent.tp, sent.data, sent.records, sent, room_ms, patient=patient)
                gathering.why = None
            except BufferFullError as e:
                gathering.why = e.__cause__ or gathering.why
                return False
            except KdirectError as e:
                if e.retriable and not isinstance(e, DeliveryError):
                    return False  # no way to the broker now
                if not full or full[0] is not sent:
                    continue
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

    def _send_gathered(self, tp: TopicPartition) -> None:
        """Send what is gathered for `tp`, as far as there is room now."""
        if tp in self._open:
            self._send_batches(self._open[tp], 0.0)

    def _look_soon(self) -> None:
        """A head was given back: is that so only once somebody has looked for outcomes?"""
        if self._driver.wants_look:
            self._wake_thread(sent=True)

    def _expire_all(self) -> None:
        for tp in {sent.tp for sent in self._sent} | set(self._topics.partitions()):
            self._driver.expire(tp)
        for gathering in list(self._open.values()):
            self._send_batches(gathering, 0.0)
        self._take_outcomes()

    def _drop_gathered(self, why: str) -> None:
        for tp, gathering in list(self._open.items()):
            gathering.close_batch()
            while gathering.full:
                sent = gathering.full.popleft()
                self._answer(sent, -1, DeliveryError(f"{sent.tp}: {why}", hint="it was not sent"))
            del self._open[tp]

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
            busy = bool(self._sent) or stuck or self._driver.wants_look
            if not self._open and not busy:
                self._thread_state = IDLE
                return None
            self._thread_state = BUSY if busy else LINGERING
            if busy:
                due = min(due, now + (FIRST_PAUSE_S if moved else pause))
            return max(0.0, due - self._monotonic())
