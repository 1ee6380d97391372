"""Kafka's Produce of one partition: the datapath of a producer where no RDMA path leads to the
broker.

Owns: the order of batches on the wire, and their retries.  It takes whole record batches and does
not look into them.  It works with any Kafka broker of 2.1 or later.

Invariants:

- `TcpAppender` keeps several requests under way.  Batches are committed in the order they were
  given, with one exception: a batch that the broker refuses for a transient reason while it takes
  the next one is sent again after that one.
- A batch whose connection broke before the answer is sent again, and may then be in the log twice
  (at-least-once), unless the appender has an identity.  With an identity its batches carry a
  producer id and a sequence: the broker drops the second copy, and a batch that it refuses because
  an earlier one is missing is sent again after that one.  A batch that was given up may have left a
  gap.  When the broker says so, by refusing the next batch, then that batch and those after it,
  which cannot be in the log, are sent under the next epoch.
- An appender with an identity sends one batch at a time until the broker has acknowledged one of
  its producer id.  Before that the broker has no sequence to compare with and takes whichever batch
  comes first, so the second would pass the first where only the first is refused.
- An error says whether the batch may have been committed nevertheless.
- No call waits longer than it is told to, except for the very first connection
  (`LeaderRoute.was_reached`).  A thread of its own looks for any later connection (`Attempt`), also
  for an appender that takes the place of one that was given up.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from typing import Any

from kdirect.client.idempotence import ProducerIdentity
from kdirect.client.transaction import Transaction
from kdirect.client.transaction_link import FIRST_PROTOCOL
from kdirect.errors import (
    BrokerError,
    BufferFullError,
    ClosedError,
    DeliveryError,
    KdirectError,
    ProtocolError,
    TimedOutError,
)
from kdirect.format import protocol
from kdirect.format.error_codes import ErrorCode, error_kind
from kdirect.model import TopicPartition
from kdirect.wire.attempt import Attempt
from kdirect.wire.cluster import Cluster
from kdirect.wire.connection import Connection, Pending, broker_error

log = logging.getLogger("kdirect.client")

MAX_WINDOW = 128
KAFKA_REMEMBERS = 5  # so many batches of each producer in each partition

ACKS = {"0": 0, "1": 1, "all": -1, "-1": -1}

RENUMBERED_AT_MOST = 2
UNANSWERED_WAIT_S = 0.01  # with acks=0 no answer says that a request has left
_OUT_OF_SEQUENCE = frozenset(
    (ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, ErrorCode.INVALID_PRODUCER_EPOCH)
)

# The broker may have written the batch although it answers with an error.
_MAYBE_COMMITTED = frozenset(
    (
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        ErrorCode.UNKNOWN_SERVER_ERROR,
    )
)


class Append:
    """A batch on its way.  `base_offset` and `log_append_time` (ms, -1 for none) are set when
    `done`."""

    __slots__ = (
        "_appender",
        "_attempts",
        "_deadline",
        "_maybe_committed",
        "_pending",
        "_renumbered",
        "base_offset",
        "data",
        "done",
        "error",
        "log_append_time",
        "seen",
    )

    def __init__(self, appender: TcpAppender, data: Any, deadline: float) -> None:
        self._appender = appender
        self._deadline = deadline
        self._attempts = 0
        self._renumbered = 0
        self._maybe_committed = False
        self._pending: Pending | None = None
        self.data = data
        self.done = False
        self.error: DeliveryError | None = None
        self.seen = False  # its error was raised to the caller
        self.base_offset = -1
        self.log_append_time = -1

    def result(self) -> int:
        """Wait until the broker has answered: the base offset (-1 with acks=0).  DeliveryError when
        it gave up."""
        return self._appender._wait_done(self)


class LeaderRoute:
    """How an appender comes to the leader of its partition: over the cluster's connection for data.
    Thread-safe."""

    def __init__(self, cluster: Cluster, tp: TopicPartition) -> None:
        self._cluster = cluster
        self._tp = tp

    def connection_at_hand(self) -> Connection | None:
        """A connection for which nobody has to be waited for; None when there is none."""
        return self._cluster.connection_at_hand(self._tp, "data")

    @property
    def was_reached(self) -> bool:
        """Was a broker reached on this route, by whichever appender?  Then no call waits for the
        next connection."""
        return self._cluster.has_reached("data")

    def connect(self, timeout_ms: float | None = None) -> Connection:
        """Wait for a connection, as `Cluster.connection_for`."""
        return self._cluster.connection_for(self._tp, "data", timeout_ms)


class TcpAppender:
    """Writes batches to one partition.  Thread-safe; requests go out and answers come in while a
    caller is inside, there is no thread.

    `acks` as the option of that name, `timeout_ms` the delivery timeout of a batch, `window` the
    requests under way at most (1: strictly one after the other); `route` leads over other
    connections than the cluster's.  The batches are those of `transaction`, if there is one: then
    a gap in the sequence is final, because the transaction can only be aborted.
    """

    def __init__(
        self,
        cluster: Cluster,
        tp: TopicPartition,
        acks: str | int | None = None,
        timeout_ms: int | None = None,
        *,
        window: int | None = None,
        identity: ProducerIdentity | None = None,
        route: LeaderRoute | None = None,
        transaction: Transaction | None = None,
    ) -> None:
        settings = cluster.settings
        self.topic_partition = tp
        self._route = route or LeaderRoute(cluster, tp)
        self.acks = ACKS[str(settings["acks"] if acks is None else acks)]
        self.timeout_ms: int = settings["delivery.timeout.ms"] if timeout_ms is None else timeout_ms
        self.window = max(1, window or min(settings["max.in.flight"], MAX_WINDOW))
        self._cluster = cluster
        self._environment = cluster.environment
        self._monotonic = cluster.environment.monotonic
        self._identity = identity
        self._transaction = transaction
        self._known_id = -1  # the producer id of which the broker has acknowledged a batch
        self._max_bytes: int = settings["send.buffer.bytes"]
        self._lock = threading.RLock()
        self._queue: deque[Append] = deque()  # in order; requests under way first
        self._queued_bytes = 0
        self._failed: list[Append] = []
        self._connection: Connection | None = None
        self._why: KdirectError | None = None  # of failure, since a batch was acknowledged
        self._not_before = 0.0  # no attempt to send
        self._reaching: Attempt[Connection] | None = None  # another connection, once there was one
        self._look_again = False  # for the leader, once nothing is under way any more
        self._out_of_sequence = (
            False  # what is queued needs a new sequence, once nothing is under way any more
        )
        self._heard = 0.0  # the last answer, or when a request went out before which there was none
        self._pid = os.getpid()
        self._closed = False
        self._batches = self._bytes = self._retries = 0

    @property
    def connected(self) -> bool:
        """Has it a connection to the leader of its partition?"""
        return self._connection is not None

    @property
    def unsent(self) -> bool:
        """Is there a batch that is to be sent, now or again, once the broker allows it?"""
        return any(a._pending is None for a in self._queue)

    @property
    def refusal(self) -> KdirectError | None:
        """Why the broker has refused a batch since one was acknowledged, if that was the last
        failure."""
        return self._why if isinstance(self._why, BrokerError) else None

    def append(self, data: Any) -> int:
        """Write whole batches (one, as a rule) and wait: the base offset.  Errors as
        `Append.result`."""
        return self.submit(data).result()

    def submit(self, data: Any, room_ms: float | None = None, *, patient: bool = True) -> Append:
        """Send batches without waiting for their acknowledgement; waits only while the window is
        full, BufferFullError after `room_ms`, or if not `patient` as soon as nothing is under way:
        the broker is away, or refuses for now what is sent.  `data` must not change until the
        Append is done."""
        room = None if room_ms is None else self._monotonic() + room_ms / 1000
        with self._lock:
            self._check()
            data = memoryview(data).cast("B")
            append = Append(self, data, self._monotonic() + self.timeout_ms / 1000)
            size = len(data)
            while self._queue and (
                len(self._queue) >= self.window or self._queued_bytes + size > self._max_bytes
            ):
                before = len(self._queue)
                self._step()
                if len(self._queue) < before:
                    continue
                waits = patient or self._first_under_way() is not None
                if waits and (room is None or self._monotonic() < room):
                    self._wait(room)
                else:
                    raise BufferFullError(
                        f"{self.topic_partition}: {len(self._queue)} requests are not answered"
                        f" after {room_ms or 0:.0f} ms",
                        hint="the broker takes them more slowly than they come, or is stopped;"
                        " raise max.block.ms to wait longer",
                    )
            if self._identity is not None:
                append.data = memoryview(self._identity.stamp(data))
            self._queue.append(append)
            self._queued_bytes += size
            self._send()
            return append

    def poll(self) -> int:
        """Take in acknowledgements that have arrived, and send again what has to be, without
        waiting; the number of batches under way."""
        with self._lock:
            self._check()
            self._step()
            return len(self._queue)

    def abandon(self) -> None:
        """Forget the batches under way; their answers are not waited for."""
        with self._lock:
            self._queue.clear()
            self._queued_bytes = 0
            self._out_of_sequence = False
            self._failed.clear()

    def flush(self, timeout_ms: float | None = None) -> None:
        """Wait for all batches given so far.  Raises the first DeliveryError that no `result` has
        raised yet; TimedOutError after `timeout_ms`, and the batches stay under way."""
        deadline = None if timeout_ms is None else self._monotonic() + timeout_ms / 1000
        with self._lock:
            self._check()
            while self._queue:
                before = len(self._queue)
                self._step()
                if len(self._queue) < before:
                    continue
                if deadline is not None and self._monotonic() >= deadline:
                    raise TimedOutError(
                        f"{len(self._queue)} batches of {self.topic_partition} are not"
                        f" acknowledged after {timeout_ms:.0f} ms",
                        hint="wait longer, or look at the broker",
                    )
                self._wait(deadline)
            failed = [a for a in self._failed if not a.seen]
            self._failed.clear()
            if failed:
                failed[0].seen = True
                assert failed[0].error is not None
                raise failed[0].error

    def close(self) -> None:
        """Flush, then refuse more.  The connection is the cluster's and stays."""
        if self._closed:
            return
        try:
            if self._pid == os.getpid():
                self.flush()
        finally:
            self._closed = True
            self._connection = None

    def __enter__(self) -> TcpAppender:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def statistics(self) -> dict[str, int]:
        return {
            "batches": self._batches,
            "written_bytes": self._bytes,
            "retries": self._retries,
            "in_flight": len(self._queue),
        }

    # -- within: all with the lock held ------------------------------------------------------------

    def _wait_done(self, append: Append) -> int:
        with self._lock:
            while not append.done:
                self._check()
                self._step()
                if not append.done:
                    self._wait(None)
            if append.error is not None:
                append.seen = True
                raise append.error
            return append.base_offset

    def _step(self) -> None:
        """Take in the answers that are here, give up what is overdue, send what may be sent.  Waits
        for nothing."""
        queue, connection = self._queue, self._connection
        if connection is not None and not connection.closed:
            try:
                connection.poll()
            except KdirectError:
                pass  # the requests under way have it
        while (
            (first := self._first_under_way()) is not None
            and first._pending is not None
            and first._pending.done
        ):
            self._heard = self._monotonic()
            self._handle_answer(first, first._pending)
        now = self._monotonic()
        overdue = first is not None and first is queue[0] and now >= first._deadline
        if overdue or (first is not None and now >= self._heard + self._cluster.timeout_ms / 1000):
            waited_ms = (now - self._heard) * 1000
            refused = f"; refused before: {self._why}" if self.refusal else ""
            silent = TimedOutError(
                f"no answer to an append to {self.topic_partition} within {waited_ms:.0f} ms"
                f"{refused}",
                hint="see the broker's log, or raise request.timeout.ms",
            )
            self._lose(silent)
            why = self._why or silent  # silence after a refusal tells less than the refusal
            self._retry(queue[0], silent)
            self._why = why
        while queue and now >= queue[0]._deadline:
            self._give_up(
                queue[0],
                self._why or TimedOutError("it could not be sent", hint="see the broker's log"),
            )
        self._send()

    def _wait(self, until: float | None) -> None:
        """Wait until an answer is here, or there is something else to do, but no longer than
        `until`."""
        if not self._queue:
            return
        first, now = self._first_under_way(), self._monotonic()
        end = self._queue[0]._deadline if until is None else min(until, self._queue[0]._deadline)
        if first is None and self._reaching is not None:
            self._reaching.wait(end - now)
        elif first is None or first._pending is None:
            self._environment.sleep(min(end, self._not_before) - now)
        elif not first._pending.done:
            end = min(
                end,
                self._heard + self._cluster.timeout_ms / 1000,
                now + UNANSWERED_WAIT_S if self.acks == 0 else end,
            )
            first._pending.wait(max(0.0, (end - now) * 1000))

    def _first_under_way(self) -> Append | None:
        return next((a for a in self._queue if a._pending is not None), None)

    def _send(self) -> None:
        """Send what is queued and not under way, in order, as far as the window goes.  What fails
        is told by the batches."""
        waiting = [a for a in self._queue if a._pending is None]
        under_way = len(self._queue) - len(waiting)
        if not waiting or self._monotonic() < self._not_before:
            return
        if under_way and (self._out_of_sequence or waiting[0] is not self._queue[under_way]):
            return  # those under way were sent after one that was refused: first their answers
        if not under_way and self._look_again:
            self._connection, self._look_again = None, False
        try:
            if self._connection is None or self._connection.closed:
                if under_way:
                    return  # they come first again, once their loss is noticed
                self._connection = self._reach()
                if self._connection is None:
                    return
            if self._out_of_sequence:
                self._renumber(self._connection)
                waiting = list(self._queue)
            for append in waiting[: max(0, self._window_at(self._connection) - under_way)]:
                append._attempts += 1
                append._pending = self._connection.submit_later(
                    self._message(append), most=self._highest
                )
                if not under_way:
                    self._heard = self._monotonic()
                under_way += 1
                append._maybe_committed |= self.acks == 0
        except KdirectError as e:
            self._lose(e)
            if not self._queue:
                return
            head = self._queue[0]
            if e.retriable:
                self._retry(head, e)
            else:
                self._give_up(head, e)
        else:
            if self.acks == 0:
                while (
                    self._queue
                    and (pending := self._queue[0]._pending) is not None
                    and pending.done
                ):
                    self._handle_answer(self._queue[0], pending)

    def _reach(self) -> Connection | None:
        """A connection to the leader; None while it is looked for."""
        if self._reaching is None:
            route = self._route
            connection = route.connection_at_hand()
            if connection is not None:
                return connection
            if not route.was_reached:
                return route.connect()
            connect_ms = self._cluster.settings["connect.timeout.ms"]
            self._reaching = self._environment.spawn(lambda: route.connect(connect_ms))
        if not self._reaching.done:
            return None
        reaching, self._reaching = self._reaching, None
        return reaching.result()

    def _window_at(self, connection: Connection) -> int:
        """How many requests may be under way: of an idempotent producer one, until the broker knows
        its producer id; then as many batches as Kafka remembers, for it refuses an older one that
        is repeated as if there were a gap; kdirect's broker knows a duplicate however old."""
        if self._identity is None:
            return self.window
        if self._identity.producer_id != self._known_id:
            return 1
        return self.window if connection.is_kdirect else min(self.window, KAFKA_REMEMBERS)

    @property
    def _highest(self) -> int | None:
        """The highest version of Produce, where a later one would mean another protocol."""
        transaction = self._transaction
        first = transaction is not None and transaction.version < 2
        return FIRST_PROTOCOL[protocol.ProduceRequest.API_KEY] if first else None

    def _message(self, append: Append) -> Any:
        r, tp = protocol.ProduceRequest, self.topic_partition
        return r(
            transactional_id=self._transaction.transactional_id if self._transaction else None,
            acks=self.acks,
            timeout_ms=min(self._cluster.timeout_ms, self.timeout_ms),
            topic_data=[
                r.TopicProduceData(
                    name=tp.topic,
                    partition_data=[
                        r.TopicProduceData.PartitionProduceData(
                            index=tp.partition, records=append.data
                        )
                    ],
                )
            ],
        )

    def _handle_answer(self, append: Append, pending: Pending) -> None:
        """The answer to `append`, or its failure, is here."""
        try:
            if self.acks == 0:
                pending.result(0)
                self._done(append)
                return
            error = self._apply(append, self._answer(pending))
        except KdirectError as e:
            head = self._queue[0]
            self._lose(e)
            if e.retriable:
                self._retry(head, e)
            else:
                self._give_up(append, e)
            return
        if error is not None and self._queue[0] is append:
            self._retry(append, error)

    def _answer(self, pending: Pending) -> Any:
        response = pending.result(0)
        tp = self.topic_partition
        for topic in response.responses:
            for partition in topic.partition_responses:
                if topic.name == tp.topic and partition.index == tp.partition:
                    return partition
        raise ProtocolError(
            f"the broker's answer to an append to {tp} does not hold that partition",
            hint="see the broker's log",
        )

    def _apply(self, append: Append, answer: Any) -> KdirectError | None:
        """Settle `append` by its answer; returns the error, and settles nothing, when it may be
        sent again."""
        append._pending = None
        if answer.error_code in (ErrorCode.NONE, ErrorCode.DUPLICATE_SEQUENCE_NUMBER):
            append.base_offset, append.log_append_time = (
                answer.base_offset,
                answer.log_append_time_ms,
            )
            if self._identity is not None:
                self._known_id = self._identity.producer_id
            self._done(append)
            return None
        append._maybe_committed |= answer.error_code in _MAYBE_COMMITTED
        if self._identity is not None and answer.error_code in _OUT_OF_SEQUENCE:
            if (
                append._maybe_committed
                and self._connection is not None
                and not self._connection.is_kdirect
            ):
                self._give_up_uncertain(append)
                return None
            may_renumber = self._transaction is None and append._renumbered < RENUMBERED_AT_MOST
            if self._queue[0] is append and may_renumber:
                self._out_of_sequence = True
                return broker_error(answer.error_code, f"append to {self.topic_partition}")
            if self._queue[0] is not append:
                return broker_error(
                    answer.error_code, f"append to {self.topic_partition}"
                )  # again, after the one that it waits for
        error = broker_error(
            answer.error_code, f"append to {self.topic_partition}", answer.error_message
        )
        if error_kind(answer.error_code).retriable:
            error.retriable = (
                True  # UNKNOWN_TOPIC_OR_PARTITION too: it passes when only the leader has moved
            )
            return error
        self._give_up(append, error)
        return None

    def _lose(self, error: KdirectError) -> None:
        """The connection is gone, silent or was never had.  Answers come in order, so after one
        that does not come there is none."""
        lost = [a for a in self._queue if a._pending is not None]
        for append in lost:
            append._maybe_committed = True
            append._pending = None
        if lost and self._connection is not None:
            self._connection.abort(error)
        self._connection = None

    def _retry(self, head: Append, error: KdirectError) -> None:
        """Make another attempt later, or give `head` up when its time is over before that."""
        self._why = error
        now = self._monotonic()
        pause = self._cluster.backoff((head._deadline - now) * 1000, head._attempts).pause()
        if pause is None:
            self._give_up(head, error)
            return
        self._not_before = now + pause
        self._retries += 1
        self._look_again = True
        self._cluster.forget(self.topic_partition.topic)

    def _done(self, append: Append) -> None:
        append.done = True
        append._pending = None
        self._queue.remove(append)
        self._queued_bytes -= len(append.data)
        if append.error is None:
            self._why = None
            self._batches += 1
            self._bytes += len(append.data)
        append.data = b""

    def _give_up(self, append: Append, cause: KdirectError) -> None:
        after = f" within {self.timeout_ms} ms" if cause.retriable else ""
        append.error = DeliveryError(
            f"{len(append.data)} bytes were not delivered to {self.topic_partition}{after}:"
            f" {cause.message}",
            hint=cause.hint,
            maybe_committed=append._maybe_committed,
        )
        append.error.__cause__ = cause
        self._failed = [a for a in self._failed if not a.seen]
        self._failed.append(append)
        self._done(append)

    def _give_up_uncertain(self, append: Append) -> None:
        """The batch is out of sequence: either one before it is missing, or it is in the log and
        Kafka has forgotten that.  With a new number it could be there twice.  A kdirect broker says
        which of the two is the case; others do not."""
        self._give_up(
            append,
            broker_error(
                ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, f"append to {self.topic_partition}"
            ),
        )

    def _renumber(self, connection: Connection) -> None:
        """The oldest batch does not follow what the broker has, and nothing is under way: what is
        queued goes on under a new sequence."""
        assert self._identity is not None
        self._out_of_sequence = False
        log.info(
            "%s: %d batches go on under a new sequence", self.topic_partition, len(self._queue)
        )
        self._identity.renew()
        for append in list(self._queue):
            if append._maybe_committed and not connection.is_kdirect:
                self._give_up_uncertain(append)
                continue
            append._renumbered += 1
            append.data = memoryview(self._identity.stamp(ProducerIdentity.unstamped(append.data)))

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"the writer of {self.topic_partition} is closed")
        if self._pid != os.getpid():
            raise ClosedError(
                f"the writer of {self.topic_partition} belongs to process {self._pid}",
                hint="open a new one in this process",
            )
