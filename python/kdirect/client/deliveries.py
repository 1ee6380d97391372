"""What became of records: futures, delivery reports, and the batches that carry them.

Owns: `Delivery` (a future whose own `result` does the producer's work), `Gathering`, the open batch
of a partition with the callbacks and futures of its records, and `Sent`, the tag under which a
request travels and by which its outcome finds the records again.  No I/O and no lock: the producer
calls in with its own lock held, and runs callbacks without it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from kdirect.client.gather import RecordBuilder
from kdirect.client.message import Message
from kdirect.errors import DeliveryError, KdirectError, TimedOutError
from kdirect.model import CREATE_TIME, TopicPartition

OnDelivery = Callable[[KdirectError | None, Message], None]


class DeliveredBatch(NamedTuple):
    """What a callback of `send_arrow` gets: `records` of one partition from `base_offset` on (-1:
    not delivered, or acks=0)."""

    topic: str
    partition: int
    base_offset: int
    records: int


class Delivery(Future):
    """The outcome of one record: `result` is its `Message`, with partition, offset and timestamp;
    `exception` a DeliveryError.

    A `concurrent.futures.Future` (``asyncio.wrap_future`` makes it awaitable), but that waiting for
    it also does the producer's work, so that it is there soonest.  It cannot be cancelled.
    """

    def __init__(self, drive: Callable[[Delivery, float | None], bool]) -> None:
        """`drive(delivery, timeout)` works until it is done, for so many seconds; whether it is."""
        super().__init__()
        self._drive = drive
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> Message:
        self._await(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._await(timeout)
        return super().exception(0)

    def _await(self, timeout: float | None) -> None:
        if not self.done() and not self._drive(self, timeout):
            raise TimedOutError(
                f"the record is not delivered after {timeout} s",
                hint="wait longer; it is still on its way",
            )

    def __call__(self, error: KdirectError | None, message: Message) -> None:
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(message)


# A record whose outcome somebody wants: its index in the batch, the callback or future, its key,
# value, headers and timestamp.
Report = tuple[int, Any, bytes | None, bytes | None, Any, int]
# A callback or future that is due, with the error and the message that it is called with.
Call = tuple[Any, KdirectError | None, Any]


class Sent:
    """A request, with the callbacks and futures of its records.  `held` bytes count against
    buffer.memory until it is answered; `data` is kept until it was handed to the driver."""

    __slots__ = ("_reports", "_whole", "data", "deadline", "done", "held", "records", "tp")

    def __init__(
        self,
        tp: TopicPartition,
        data: Any,
        records: int,
        reports: list[Report],
        deadline: float,
        held: int = 0,
        whole: Any = None,
    ) -> None:
        self.tp = tp
        self.data = data
        self.records = records
        self.deadline = deadline
        self.held = held
        self.done = False
        self._reports = reports
        self._whole = whole  # a callback for the batch

    def answer(
        self,
        base_offset: int,
        error: DeliveryError | None,
        ready: deque[Call],
        resolved: deque[Call],
    ) -> bool:
        """Put the reports of callbacks into `ready`, and those of futures into `resolved`.  True
        when somebody hears of the error."""
        self.done = True
        self.data = None
        tp = self.tp
        for index, sink, key, value, headers, timestamp in self._reports:
            offset = base_offset + index if base_offset >= 0 and error is None else -1
            message = Message(
                tp.topic,
                value,
                key,
                tp.partition,
                offset,
                (CREATE_TIME, timestamp),
                headers,
                error,
            )
            (resolved if sink.__class__ is Delivery else ready).append((sink, error, message))
        if self._whole is not None:
            ready.append(
                (
                    self._whole,
                    error,
                    DeliveredBatch(
                        tp.topic,
                        tp.partition,
                        -1 if error is not None else base_offset,
                        self.records,
                    ),
                )
            )
        heard = self._whole is not None or len(self._reports) == self.records
        self._reports = []
        return heard


class Gathering:
    """The open batch of one partition, and full ones that wait for room; `why` there is none, as
    far as it is known."""

    __slots__ = ("builder", "deadline", "due", "full", "held", "reports", "tp", "why")

    def __init__(self, tp: TopicPartition, compression: str) -> None:
        self.tp = tp
        self.builder = RecordBuilder(compression)
        self.reports: list[Report] = []
        self.full: deque[Sent] = deque()
        self.held = 0
        self.due = self.deadline = 0.0
        self.why: BaseException | None = None

    @property
    def records(self) -> int:
        return int(self.builder.records) + sum(sent.records for sent in self.full)

    def close_batch(self) -> None:
        """The open batch, if it has a record, is full."""
        n = self.builder.records
        if n:
            self.full.append(
                Sent(self.tp, self.builder.take(), n, self.reports, self.deadline, self.held)
            )
            self.reports = []
            self.held = 0


class Callbacks:
    """The callbacks and futures that are due.  Filled with the producer's lock held, and called
    without it."""

    def __init__(self) -> None:
        self.reports: deque[Call] = deque()  # for `run`
        self.resolved: deque[Call] = deque()  # for `resolve_futures`
        self._resolving: set[int] = set()  # threads that are at it
        self._running = False

    def run(self) -> int:
        """Run the callbacks that are due, none of them inside another; how many."""
        if self._running:
            return 0
        self._running = True
        count = 0
        try:
            while self.reports:
                callback, error, message = self.reports.popleft()
                count += 1
                callback(error, message)
        finally:
            self._running = False
        return count

    def resolve_futures(self, *, within: bool = False) -> None:
        """Give futures their results: what is done then may wait for another thread, which
        produces.  A callback of a future that sends again leaves the next ones to the call that it
        is in, however many there are, unless it waits (`within`)."""
        me = threading.get_ident()
        outer = me not in self._resolving
        if not self.resolved or not (outer or within):
            return
        self._resolving.add(me)
        try:
            while self.resolved:
                try:
                    future, error, message = self.resolved.popleft()
                except IndexError:
                    return  # another thread was faster
                future(error, message)
        finally:
            if outer:
                self._resolving.discard(me)
