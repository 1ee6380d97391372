"""The paths on which an encoded request reaches its partition: over RDMA, over Kafka's protocol, or
none for now.

Law of the room: a path knows one partition and its requests under way; it says what became of them
to the `ProducePaths` that it is given.  Which path a partition has, and what follows when one ends,
is decided there (`kdirect.client.produce_paths`).

Every path has the same face: `accept` a request (False: look again, this path may have ended),
`settle`, `collect` outcomes, `lost` (what is under way will not be answered here) and `bring_on`
(so take it elsewhere), `take_pending` when it ends, `in_flight`, `last_offset`, `statistics`,
`close`; and the `backlog`, requests that are repeated here and have found no room yet, oldest
first, with its `backlog_deadline`, when they have failed.  What is in the backlog counts as under
way.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from kdirect.client.direct_write import FileWriter
from kdirect.client.idempotence import ProducerIdentity
from kdirect.client.tcp_append import Append, Route, TcpAppender
from kdirect.errors import (
    AccessDeniedError,
    BrokerUnavailableError,
    BufferFullError,
    ClosedError,
    CorruptBatchError,
    DeliveryError,
    KdirectError,
    QueuePairError,
    TimedOutError,
)
from kdirect.format import layout
from kdirect.format.batch import iterate_batches
from kdirect.format.protocol import ErrorCode, error_kind
from kdirect.model import TopicPartition
from kdirect.wire.channel import granted
from kdirect.wire.connection import Connection, Pending, broker_error

if TYPE_CHECKING:
    from kdirect.client.produce_paths import ProducePaths

log = logging.getLogger("kdirect.client")

# What FileWriter.try_* return.
SENT, NO_ROOM_FILE, NO_ROOM_BUFFER, NOT_GRANTED, BROKEN, SENT_AND_ASK = range(6)

FIRST_PAUSE_S, LONGEST_PAUSE_S = (
    0.01,
    1.0,
)  # between two attempts to reach a partition that was lost
AHEAD_WITHIN_S = (
    5.0  # a producer that fills half a file within this time asks for the next one ahead
)
RELEASE_WAIT_MS = 500  # for the answer to a release; the broker acts on it all the same
REFUSALS = 5  # times that requests are repeated which the broker refuses for a passing reason, without one that it takes


# What is repeated of a request: its bytes, how many records they are, its tag.
Request = tuple[Any, int, Any]


class Outcome(NamedTuple):
    """What became of a request that was sent with a tag."""

    tag: Any
    base_offset: int  # of its first record; -1 after an error, and where the broker did not say
    error: DeliveryError | None


class DirectPath:
    """One partition whose head file this producer holds.

    The send buffer holds several batches (and the largest batch the topic takes); each half of the
    acknowledgement ring twice the window.

    While it fills a file that it holds exclusively, it asks for the next one (`ask_next`, when half
    is full) and goes on there without a pause (`take_next`).
    """

    def __init__(
        self, paths: ProducePaths, tp: TopicPartition, timeout_ms: float | None = None
    ) -> None:
        self.tp = tp
        self.backlog: deque[Request] = deque()
        self.backlog_deadline = math.inf
        self._asked: Pending | None = None  # for the file after the one that is full
        self._passed_over = -1  # a file that was granted and is to be given back
        self.leaving = False  # to be given back once everything is answered
        self._settings = paths.settings
        self.channel, self.router = paths.ack_router(tp)
        window = self._settings["max.in.flight"]
        entries = 2
        while entries < 2 * window:
            entries *= 2
        self._mode = paths.mode
        self._ring = self.channel.remote_writable_memory(2 * entries * layout.ACK_BYTES)
        self._next: Pending | None = None  # the request for the next file
        self._filling_since = (
            0.0  # when the present file was granted, or the next one was asked for
        )
        self.writer = FileWriter(str(tp), self.router, self.channel.qp, self._ring, entries // 2)
        self.writer.identity = paths.identity(tp)
        self.writer.compare_and_swap = self._settings["rdma.produce.atomic"] == "cas"
        if self._settings["rdma.notify"] == "send":
            self.writer.set_notices(self.channel.local_memory(entries // 2 * layout.NOTICE_BYTES))
        self.max_request_bytes = 0
        self._window = entries // 2
        self.tags: deque[tuple[int, Any]] = (
            deque()
        )  # (sequence number, tag) of requests that want an outcome
        self._refused_tags: dict[int, Any] = {}
        self._restamp = False  # what is not answered lies behind a gap
        self._further = 0  # records sent beyond one a request
        self._refusals = (0, 0)  # refusals in a row, and requests acknowledged before them
        try:
            self.grant(1, timeout_ms)
        except (
            TimedOutError
        ):  # it may still be granted, and recalled through the ring, which goes with the channel
            raise
        except BaseException:
            self.writer.close()
            raise

    def grant(self, min_bytes: int, timeout_ms: float | None = None) -> None:
        """Get access to a head file with room for `min_bytes`; nothing may be under way."""
        self._enter(
            self.channel.produce_access(
                *self._wanted(min_bytes), **self._terms(), timeout_ms=timeout_ms
            )
        )

    def grant_by(self, min_bytes: int, deadline: float) -> None:
        """As `grant`, when the file is full.  TimedOutError when the broker has not answered by the
        deadline; a later call takes the answer then, and until it has come nothing more goes into
        the old file, of which the broker was told that it is finished."""
        if self._asked is None:
            self._asked = self.channel.ask_produce_access(*self._wanted(min_bytes), **self._terms())
            self.writer.finish_file()
        if not self._asked.wait(max(0.0, (deadline - time.monotonic()) * 1000)):
            raise TimedOutError(
                f"{self.tp}: access to the next file is not granted yet",
                hint="the broker may be stopped or overloaded",
            )
        asked, self._asked = self._asked, None
        answer = granted(self.tp, asked.result(0))
        if self.router.take_stray(
            answer.file_id
        ):  # recalled or revoked before the answer was here: ask again
            self._passed_over = answer.file_id
            return
        self._passed_over = -1
        self._enter(answer)

    def _wanted(self, min_bytes: int) -> tuple[Any, ...]:
        return self.tp, min_bytes, self._ring, self.writer.ring_entries

    def _terms(self) -> dict[str, Any]:
        writer = self.writer
        finished, end = (
            writer.file_id if writer.granted else -1,
            (writer.end_order, writer.end_position),
        )
        if self._passed_over >= 0:
            finished, end = self._passed_over, (-1, -1)
        return {
            "mode": self._mode,
            "max_in_flight": self._settings["max.in.flight"],
            "finished": finished,
            "end": end,
        }

    def _enter(self, answer: Any) -> None:
        """Go on in the file that was granted."""
        writer = self.writer
        self.max_request_bytes = answer.max_message_bytes
        wanted = max(
            2 * self._settings["batch.bytes"],
            self._settings["send.buffer.bytes"] // 8,
            answer.max_message_bytes + 4096,
        )
        if writer.buffer_bytes < wanted:
            writer.set_buffer(self.channel.local_memory(wanted))
        shared = answer.mode == layout.PRODUCE_SHARED
        if shared and not writer.has_landing:
            writer.set_landing(self.channel.local_memory(layout.SHARED_WORD_BYTES))
        word = (answer.word_address, answer.word_rkey) if shared else (0, 0)
        writer.open(
            answer.file_id,
            answer.address,
            answer.rkey,
            answer.length,
            answer.position,
            *word,
            answer.max_in_flight,
        )
        self._next = None  # what it brought has ended with the file before
        self._filling_since = time.monotonic()
        if not shared and self.channel.grants_ahead and answer.length >= answer.full_length:
            writer.ask_when_half_full()

    def ask_next(self) -> None:
        """The file is half full: ask for the next one.  Not where files fill slowly: there a roll
        that takes a moment does no harm, and a file that is prepared and lies idle does."""
        writer = self.writer
        since, self._filling_since = self._filling_since, time.monotonic()
        if self._filling_since - since > AHEAD_WITHIN_S or writer.recalled:
            return
        try:
            self._next = self.channel.ask_produce_access(
                self.tp, 1, self._ring, writer.ring_entries, mode=self._mode, max_in_flight=self._settings["max.in.flight"],
                ack_offset=writer.other_half, ahead_of=writer.file_id,
            )  # fmt: skip
        except KdirectError as e:  # the connection ended, which the next request notices
            log.debug("%s: the next file was not asked for: %s", self.tp, e)

    def take_next(self, deadline: float) -> bool:
        """This file is full.  Was the next one granted?  Waits for the answer, if it was asked for;
        False: ask for access in the ordinary way.  TimedOutError at the deadline."""
        pending, writer = self._next, self.writer
        if pending is None or self._asked is not None or writer.recalled or writer.revoked:
            return False
        left = max(0, math.ceil((deadline - time.monotonic()) * 1000))
        if not pending.done and not pending.wait(left):
            raise TimedOutError(
                f"{self.tp}: the broker did not grant the next file in time",
                hint="the broker may be stopped or overloaded",
            )
        # The file before the present one shares its half of the ring with the next.
        first = writer.first_of_file
        if first and not writer.wait_acknowledged(first - 1, left):
            return False
        self._next = None
        try:
            answer = granted(self.tp, pending.result(0))
        except KdirectError as e:
            log.debug("%s: the next file was not granted: %s", self.tp, e)
            return False
        if self.router.take_stray(answer.file_id):  # revoked before the answer was here
            return False
        writer.open_next(answer.file_id, answer.address, answer.rkey, answer.length)
        return True

    @property
    def in_flight(self) -> int:
        """Records not acknowledged."""
        w = self.writer
        sent = (
            int(w.appended + self._further - w.records_answered) if w.in_flight else int(w.failures)
        )
        return sent + sum(records for _, records, _ in self.backlog) if self.backlog else sent

    @property
    def last_offset(self) -> int:
        return int(self.writer.last_offset_base)

    def accept(
        self, paths: ProducePaths, data: Any, records: int, tag: Any, deadline: float
    ) -> bool:
        """Send a request; False: look again, this path may have ended.  BufferFullError at the
        deadline."""
        writer, tp = self.writer, self.tp
        if len(data) > self.max_request_bytes:
            # What the broker would answer, without the way to it.
            cause = broker_error(
                ErrorCode.MESSAGE_TOO_LARGE,
                str(tp),
                f"a batch of {len(data)} bytes is over max.message.bytes ({self.max_request_bytes})",
            )
            raise DeliveryError(cause.message, hint=cause.hint) from cause
        if self.tags and not self.remember(paths, max(0.0, (deadline - time.monotonic()) * 1000)):
            paths.recover(self)
            return False
        code = writer.try_batches(data, records)
        if code == SENT_AND_ASK:
            self.ask_next()
            code = SENT
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
            elif code == NO_ROOM_FILE and self.take_next(deadline):
                pass
            elif code == NO_ROOM_FILE and (
                not writer.in_flight
                or writer.wait_acknowledged(writer.appended - 1, left_ms(tp, deadline))
            ):
                self.collect(paths)
                self.grant_by(len(data), deadline)
            else:
                paths.recover(self)
        except TimedOutError:
            raise full(tp) from None
        except (AccessDeniedError, QueuePairError, ClosedError, BrokerUnavailableError):
            paths.recover(self)
        return False

    def remember(self, paths: ProducePaths, room_ms: float) -> bool:
        """Make sure that another request does not make the writer forget the offset of one with a
        tag: it remembers one window.  False: the writer can no longer be used."""
        writer = self.writer
        self.collect(paths)
        while self.tags and writer.appended - self.tags[0][0] >= self._window:
            try:
                # A quarter of the window at once, so that a full one costs one sleep and not one a
                # record.
                if not writer.wait_acknowledged(
                    writer.acknowledged + (writer.in_flight >> 2), math.ceil(room_ms)
                ):
                    return False
            except TimedOutError:
                raise full(self.tp, room_ms) from None
            self.collect(paths)
        return True

    def take_pending(self, paths: ProducePaths) -> deque[Request]:
        """(bytes, records, tag) of the requests not acknowledged, which are this path's no more."""
        writer = self.writer
        tags = dict(self.tags)
        self.tags.clear()
        pending = deque(
            (d, n, tags.get(writer.acknowledged + i))
            for i, (d, n) in enumerate(writer.unacknowledged())
        )
        pending.extend(self.backlog)
        self.backlog.clear()
        if self._restamp:
            pending = deque((ProducerIdentity.unstamped(d), n, tag) for d, n, tag in pending)
        writer.forget()
        return pending

    def go_on(self) -> None:
        """Everything is answered, and what was refused is taken care of."""
        if self._restamp:
            self._restamp = False
            for i, (data, records, tag) in enumerate(self.backlog):
                self.backlog[i] = ProducerIdentity.unstamped(data), records, tag

    def take_failures(self, paths: ProducePaths) -> deque[Request]:
        """Report the requests that were refused for good; (bytes, records, tag) of the others, to
        be sent again before anything that is not answered.  Behind one that was refused for good an
        idempotent producer begins a new sequence."""
        writer = self.writer
        failures = writer.take_failures()
        if not failures:
            return deque()
        count, before = self._refusals
        self._refusals = count, before = (
            (count + 1 if before == writer.requests_acknowledged else 1),
            writer.requests_acknowledged,
        )
        again: deque[Request] = deque()
        renew = writer.identity is not None and failures[0][3] in (
            ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
            ErrorCode.INVALID_PRODUCER_EPOCH,
        )
        for sequence, data, records, code in failures:
            tag = self._refused_tags.pop(sequence, None)
            if count <= REFUSALS and _may_repeat(code, data, writer.identity is not None):
                again.append((data, records, tag))
                continue
            renew = writer.identity is not None
            cause = broker_error(code, f"{self.tp}: a batch of {records} records")
            error = DeliveryError(
                cause.message,
                hint=cause.hint or "the batch was not committed",
                maybe_committed=False,
            )
            error.__cause__ = cause
            paths.fail(error, tag)
        if renew:
            log.info("%s: %d requests go on under a new sequence", self.tp, len(again))
            paths.renew(self.tp)
            # What is not answered lies behind the gap, so it will not be taken, or belongs to a
            # path that has ended.
            again = deque(
                (ProducerIdentity.unstamped(data), records, tag) for data, records, tag in again
            )
            self._restamp = True
        return again

    def settle(self, paths: ProducePaths, deadline: float) -> bool:
        """Wait for every acknowledgement until the deadline; False: not all, or the path has ended."""
        if self.backlog and not paths.send_backlog(self, deadline):
            return False
        writer = self.writer
        try:
            if writer.wait_acknowledged(
                writer.appended - 1, max(0, math.ceil((deadline - time.monotonic()) * 1000))
            ):
                return True
        except TimedOutError:
            return False
        except (ClosedError, QueuePairError):
            pass  # the queue pair was closed beneath it
        paths.recover(self)
        return False

    @property
    def ended(self) -> bool:
        """The queue pair broke, or the control connection ended, with which the broker takes its
        grants back."""
        return self.channel.closed or bool(self.router.broken)

    @property
    def lost(self) -> bool:
        w = self.writer
        return bool(w.failures or (w.in_flight and (w.revoked or self.ended)))

    def bring_on(self, paths: ProducePaths) -> None:
        paths.recover(self)

    def collect(self, paths: ProducePaths) -> None:
        """Outcomes of what is acknowledged."""
        tags, writer = self.tags, self.writer
        while tags and tags[0][0] < writer.acknowledged:
            sequence, tag = tags.popleft()
            if writer.failures and writer.refused(sequence):
                self._refused_tags[sequence] = tag
                continue
            paths._outcomes.append(Outcome(tag, writer.offset_of(sequence), None))

    def statistics(self) -> dict[str, int]:
        w = self.writer
        return {
            "rdma_records": w.records_acknowledged, "rdma_bytes": w.bytes_acknowledged, "rdma_requests": w.requests_acknowledged,
            "rdma_files_ahead": w.files_ahead,
        }  # fmt: skip

    def close(self) -> None:
        """Give access back, then free the memory: until the broker has answered it may write into
        the ring, and a WRITE into one that is gone would break the queue pair.  Where it does not
        answer, the ring goes with the channel."""
        if self.channel.closed or self._release():
            self.writer.close()
        else:
            self.writer.settle()
            self.writer.end_grant()

    def _release(self) -> bool:
        """Has the broker given up everything that it granted?"""
        held = [self.writer.file_id] if self.writer.granted else []
        held += [self._passed_over] if self._passed_over >= 0 else []
        self.writer.settle()
        self.writer.end_grant()
        if self._asked is not None and self._asked.wait(RELEASE_WAIT_MS):
            try:
                held.append(granted(self.tp, self._asked.result(0)).file_id)
            except KdirectError as e:
                log.debug("%s: the next file was not granted: %s", self.tp, e)
        try:
            self.channel.release(held, RELEASE_WAIT_MS)
        except KdirectError as e:
            log.debug("release of %s: %s", self.tp, e)
            return self.channel.closed
        return self._asked is None or self._asked.done


class MessageRoute(Route):
    """The way of requests in SENDs: the producer's queue pair for them, or TCP where the broker has
    none."""

    def __init__(self, paths: ProducePaths, tp: TopicPartition) -> None:
        super().__init__(paths.session.cluster, tp)
        self._paths = paths

    def at_hand(self) -> Connection | None:
        return super().at_hand() if self._paths.messages_refused else self._paths.messages_at_hand

    @property
    def reached(self) -> bool:
        return super().reached if self._paths.messages_refused else self._paths.messages_reached

    def connect(self, timeout_ms: float | None = None) -> Connection:
        """As `ProducePaths.message_connection`, which waits up to `request.timeout.ms`."""
        return self._paths.message_connection(self._tp) or super().connect(timeout_ms)


class TcpPath:
    """One partition written by Kafka's Produce, over TCP or, with `produce.path=send`, in SENDs.
    It repeats by itself what it lost."""

    lost = False

    def __init__(self, paths: ProducePaths, tp: TopicPartition) -> None:
        self.tp = tp
        settings = paths.settings
        self._identity = paths.identity(tp)
        self.two_sided = settings["produce.path"] == "send" and paths.session.transport != "tcp"
        self._appender = TcpAppender(
            paths.session.cluster, tp, settings["acks"], settings["delivery.timeout.ms"], identity=self._identity,
            route=MessageRoute(paths, tp) if self.two_sided else None,
        )  # fmt: skip
        self.last_offset = -1
        self.backlog: deque[Request] = deque()
        self.backlog_deadline = math.inf
        self._sent: deque[tuple[Append, int, Any]] = deque()
        self._in_flight = 0
        self._records = self._bytes = self._requests = 0

    def accept(
        self, paths: ProducePaths, data: Any, records: int, tag: Any, deadline: float
    ) -> bool:
        """Send a request; BufferFullError when the window is full at the deadline."""
        if self.two_sided and len(data) > paths.settings["batch.bytes"]:
            raise DeliveryError(
                f"a batch of {len(data)} bytes is too large for a message (batch.bytes {paths.settings['batch.bytes']})",
                hint="raise batch.bytes, by which the broker's buffers are sized, or use produce.path=rdma or tcp",
                maybe_committed=False,
            )
        append = self._appender.submit(data, room_ms=max(0.0, (deadline - time.monotonic()) * 1000))
        self._sent.append((append, records, tag))
        self._in_flight += records
        self._records += records
        self._bytes += len(data)
        self._requests += 1
        self._collect(paths)
        return True

    @property
    def in_flight(self) -> int:
        """Records not answered."""
        return (
            self._in_flight + sum(records for _, records, _ in self.backlog)
            if self.backlog
            else self._in_flight
        )

    def settle(self, paths: ProducePaths, deadline: float) -> bool:
        """Wait for every answer until the deadline; False: not all."""
        if self.backlog and not paths.send_backlog(self, deadline):
            return False
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

    def bring_on(self, paths: ProducePaths) -> None:
        """Nothing is ever lost."""

    def collect(self, paths: ProducePaths) -> None:
        """Outcomes of what is answered."""
        if self._sent and not self._sent[0][0].done:
            self._appender.poll()
        self._collect(paths)

    def _collect(self, paths: ProducePaths) -> None:
        while self._sent and self._sent[0][0].done:
            append, records, tag = self._sent.popleft()
            append.seen = True
            self._in_flight -= records
            if append.error is not None:
                paths.fail(append.error, tag)
                continue
            self.last_offset = append.base_offset
            if tag is not None:
                paths._outcomes.append(Outcome(tag, append.base_offset, None))

    def take_pending(self, paths: ProducePaths) -> deque[Request]:
        """(bytes, records, tag) of the requests not answered, which are this path's no more."""
        pending = deque((bytes(a.data), n, tag) for a, n, tag in self._sent if not a.done)
        pending.extend(self.backlog)
        self.backlog.clear()
        self._sent.clear()
        self._in_flight = 0
        self._appender.abandon()
        return pending

    def statistics(self) -> dict[str, int]:
        way = "send" if self.two_sided else "tcp"
        return {
            f"{way}_records": self._records,
            f"{way}_bytes": self._bytes,
            f"{way}_requests": self._requests,
        }

    def close(self) -> None:
        try:
            self._appender.close()
        except KdirectError as e:
            log.warning("%s: closing with requests unanswered: %s", self.tp, e)


class LostPath:
    """Requests of a partition to which there is no way now: the broker is away, or was a moment
    ago.

    Every call on it tries once to open a path and to send them, and so does every look at outcomes;
    those that are not on their way by their deadline have failed.
    """

    last_offset = -1
    backlog_deadline = math.inf

    def __init__(self, ended: DirectPath, pending: deque[Request], deadline: float) -> None:
        self.tp = ended.tp
        self.backlog: deque[Request] = deque()  # stays empty: everything of this path waits
        self._connection = ended.channel.connection
        self._doubted = (
            ended.ended
        )  # it may not answer: to be asked first, for opening waits as long as request.timeout.ms
        self._pending = pending
        self._deadline = deadline
        self._not_before = 0.0
        self._pause = FIRST_PAUSE_S
        self._why: KdirectError | None = None

    @property
    def in_flight(self) -> int:
        return sum(records for _, records, _ in self._pending)

    @property
    def lost(self) -> bool:
        return bool(self._pending)

    def bring_on(self, paths: ProducePaths) -> None:
        self.revive(paths)

    def _next_attempt(self, paths: ProducePaths) -> float:
        return max(self._not_before, paths.away_until(self._connection))

    def revive(self, paths: ProducePaths) -> bool:
        """Try once; True when this path has ended, for a better one or because its time is over."""
        now = time.monotonic()
        if now < self._next_attempt(paths):
            return False
        tp = self.tp
        try:
            if (self._doubted or self._connection.closed) and not paths.answers(self._connection):
                return False
            paths._paths.pop(tp, None)
            paths.open(tp)
        except (
            QueuePairError,
            BrokerUnavailableError,
            ClosedError,
            TimedOutError,
            AccessDeniedError,
        ) as e:
            paths._paths[tp] = self
            self._why = e
            if now + self._pause < self._deadline and not paths.session.closed:
                if not isinstance(e, AccessDeniedError):
                    paths._drop_channel()
                    self._doubted = True
                self._not_before = time.monotonic() + self._pause
                self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
                return False
            self._give_up(paths, e)
            return True
        except KdirectError as e:
            self._give_up(paths, e)
            return True
        paths.resend(tp, self._pending, self._deadline)
        return True

    def _give_up(self, paths: ProducePaths, why: KdirectError | None) -> None:
        paths._paths.pop(self.tp, None)
        text, hint = (
            (why.message, why.hint)
            if why is not None
            else ("no way to its leader", "see the broker's log")
        )
        error = DeliveryError(f"{self.tp}: not delivered: {text}", hint=hint, maybe_committed=True)
        paths.renew(self.tp)
        for _, _, tag in self.take_pending(paths):
            paths.fail(error, tag)

    def accept(
        self, paths: ProducePaths, data: Any, records: int, tag: Any, deadline: float
    ) -> bool:
        if not self.revive(paths):
            self._wait(paths, time.monotonic() + left_ms(self.tp, deadline) / 1000)
        return False

    def settle(self, paths: ProducePaths, deadline: float) -> bool:
        if not self.revive(paths):
            self._wait(paths, deadline)
        return False

    def _wait(self, paths: ProducePaths, until: float) -> None:
        """Until there is something to try again."""
        if not paths.await_answer(self._connection, until):
            time.sleep(max(0.0, min(self._next_attempt(paths), until) - time.monotonic()))

    def collect(self, paths: ProducePaths) -> None:
        """Nothing is known but that their time is over."""
        if self._pending and time.monotonic() >= self._deadline:
            self._give_up(paths, self._why)

    def take_pending(self, paths: ProducePaths) -> deque[Request]:
        pending, self._pending = self._pending, deque()
        return pending

    def statistics(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """Nothing is held."""


Path = DirectPath | TcpPath | LostPath


def _may_repeat(code: int, data: bytes, idempotent: bool) -> bool:
    """May a request that was refused with `code` be taken another time?"""
    if code in (ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, ErrorCode.INVALID_PRODUCER_EPOCH):
        return idempotent
    if code == ErrorCode.CORRUPT_MESSAGE:
        try:
            return sum(1 for _ in iterate_batches(data)) > 0
        except CorruptBatchError:
            return False  # it was damaged before it was sent
    return bool(error_kind(code).retriable)


def left_ms(tp: TopicPartition, deadline: float) -> int:
    """Time until the deadline; BufferFullError when it is over."""
    left = math.ceil((deadline - time.monotonic()) * 1000)
    if left <= 0:
        raise full(tp)
    return left


def full(tp: TopicPartition, waited_ms: float | None = None) -> BufferFullError:
    after = f" after {waited_ms:.0f} ms" if waited_ms else ""
    return BufferFullError(
        f"{tp}: no room for another request{after}",
        hint="the broker takes them more slowly than they come, or is stopped; raise max.block.ms to wait longer",
    )
