"""How encoded requests reach their partitions: the I/O of a producer.

Owns: the face to the layer above, and which request takes which way.  What becomes of ways is
`machine_driver`'s: they are opened, lost and found again as the `PartitionWriter` of each partition
decides.  A request whose acknowledgement was lost with its connection may have been committed and
is sent again; with `enable.idempotence`, the default, it was stamped when it was first sent
(`kdirect.client.idempotence`), and the broker drops what it has.  What may not enter: records,
columns, the choice of partitions.

`rdma.produce` says how RDMA is used: exclusively, shared, or as the broker likes.  Where the broker
refuses (it is switched off, the partition is written over another transport) records travel over
TCP, and RDMA is tried again after a second.

`send` takes an encoded request and may wait for room (`room_ms`), never for its answer; a request
sent with a `tag` is answered by exactly one outcome from `outcomes`, in order within its partition;
errors of requests without a tag are raised by `flush`.  No call waits longer than it is told to:
while a broker is away its requests are kept in the backlog of their `PartitionWriter`, and each
call tries once to send them.  Where the new way takes fewer at a time than the one that ended,
every look at outcomes sends as many as there is room for, nothing newer overtakes the rest, and the
rest fails when the delivery timeout is over.  Callers hold one lock around every call.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from kdirect.client.broker_link import BrokerLink
from kdirect.client.direct_append import (
    NOT_TAKEN,
    RELEASE_WAIT_MS,
    REQUEST_FULL,
    REQUEST_SENT,
    UNANSWERED,
    DirectAppender,
    Sync,
)
from kdirect.client.direct_write import NO_ROOM_BUFFER, NO_ROOM_FILE, SENT, SENT_AND_ASK
from kdirect.client.lost_broker import LOST, has_moved
from kdirect.client.machine_driver import IDLE, OVER_RDMA, MachineDriver, Outcome
from kdirect.client.partition_writer import (
    Closing,
    DirectWanted,
    GiveBack,
    Looked,
    Needed,
    PartitionWriter,
    State,
)
from kdirect.client.request_append import RequestAppender
from kdirect.client.transaction_entry import NO_FILE, Entry, answers_of, leave_transaction
from kdirect.client.written_partition import WrittenPartition, no_room
from kdirect.errors import (
    AccessDeniedError,
    BufferFullError,
    ClosedError,
    DeliveryError,
    KdirectError,
    TimedOutError,
)
from kdirect.model import TopicPartition
from kdirect.wire.channel import Channel
from kdirect.wire.connection import Pending

log = logging.getLogger("kdirect.client")

LEAVE_WAIT_MS = 500  # for a leader that is told of the end of a transaction
REACH_PAUSE_S = 0.1  # between two attempts to open a way, which wait for connect.timeout.ms each
SYNC_WAIT_MS = 10  # for the acknowledgement of a record, with the producer's lock held


class ProduceDriver(MachineDriver):
    """See the module.  `settings` are resolved CLIENT options."""

    # -- sending -----------------------------------------------------------------------------------

    def send(
        self,
        tp: TopicPartition,
        data: Any,
        records: int,
        tag: Any = None,
        room_ms: float | None = None,
        *,
        patient: bool = True,
    ) -> None:
        """Send one request of whole batches, through whatever it takes.  Waits for room, not for
        the answer: BufferFullError when there is none within `room_ms` (None: the delivery
        timeout, which also bounds the wait for a broker that was reached before and is away), or,
        if not `patient`, as soon as the partition cannot be written for now.  DeliveryError when
        the request can never be taken.  Neither has an outcome."""
        waits_ms = self.timeout_ms if room_ms is None else room_ms
        deadline = self._monotonic() + waits_ms / 1000
        until_written = deadline if patient else 0.0
        p = self._partitions.get(tp) or self._add(tp)
        writer = p.writer
        while True:
            if (
                writer.direct_retry_at is not None
                and writer.state is State.TCP
                and self._monotonic() >= writer.direct_retry_at
            ):
                self._feed(p, DirectWanted())
            appender = p.appender
            if appender is None:
                try:
                    self._make_way(p, until_written)
                except KdirectError as e:
                    if room_ms is not None or not self._waits_for_broker(e, deadline):
                        raise
                continue
            if writer.backlog and not self._resend(p, until_written):
                self._require_time(tp, until_written)
                continue
            if isinstance(appender, RequestAppender):
                sending = appender.submit(data, records, tag, deadline, patient=patient)
            else:
                if not appender.entered:
                    self._open_companions(appender)
                    if p.appender is not appender:
                        continue
                sending = appender.submit(data, records, tag, deadline)
            if sending is REQUEST_SENT:
                return
            if sending is REQUEST_FULL:
                raise self._no_room(tp)
            self._recover(p)

    def _open_companions(self, appender: DirectAppender) -> None:
        """Open a way to the other partitions of this leader that are about to be written: one
        request has them all enter the transaction."""
        leader = self.session.cluster.leader_address_at_hand
        for tp in self.about_to_write():
            p = self._partitions.get(tp) or self._add(tp)
            if p.writer.state is State.IDLE and leader(tp) == appender.link.address:
                try:
                    self._feed(p, Needed())
                except KdirectError as e:  # it is said when something is sent there
                    log.debug("%s: %s", tp, e)

    def try_record(
        self,
        tp: TopicPartition,
        value: bytes | None,
        key: bytes | None,
        timestamp_ms: int,
        tag: Any = None,
        room_ms: int = 60000,
    ) -> bool:
        """Send one record at once as a batch of its own, where the way is RDMA; False: not taken,
        use `send`.  BufferFullError when there is no room within `room_ms`."""
        try:
            appender = self._direct[tp]
        except KeyError:
            appender = self._open_direct_way(tp)
        if appender is None or (self.transaction is not None and not appender.entered):
            return False
        writer = appender.writer
        while (code := writer.try_record(value, key, timestamp_ms, tag)) != SENT:
            if code == SENT_AND_ASK:
                appender.ask_next()
                break
            try:
                if code == NO_ROOM_FILE and appender.take_next(self._monotonic() + room_ms / 1000):
                    continue
                # Wait for a quarter of the window, so that a full one costs one sleep and not one a
                # record.
                if code != NO_ROOM_BUFFER or writer.meets or not writer.in_flight:
                    return False
                quarter = writer.acknowledged + (writer.in_flight >> 2)
                if not writer.wait_acknowledged(quarter, room_ms):
                    return False
            except TimedOutError:
                raise self._no_room(tp, room_ms) from None
        return True

    def record_sync(
        self, tp: TopicPartition, value: bytes | None, key: bytes | None, timestamp_ms: int
    ) -> int | Sync:
        """As `try_record`, then wait for the acknowledgement, though only a moment, for the caller
        holds a lock: the record's offset.  NOT_TAKEN: use `send`.  UNANSWERED: it was sent, and
        `tag_last` must say before any other call under which tag its outcome is told."""
        appender = self._direct.get(tp) or self._open_direct_way(tp)
        if appender is None or (self.transaction is not None and not appender.entered):
            return NOT_TAKEN
        writer = appender.writer
        if writer.in_flight:
            return NOT_TAKEN
        code = writer.try_record(value, key, timestamp_ms)
        if code == NO_ROOM_FILE:
            try:
                if appender.take_next(self._monotonic() + SYNC_WAIT_MS / 1000):
                    code = writer.try_record(value, key, timestamp_ms)
            except TimedOutError:
                return NOT_TAKEN
        if code == SENT_AND_ASK:
            appender.ask_next()
        elif code != SENT:
            return NOT_TAKEN
        try:
            if writer.wait_acknowledged(writer.posted - 1, SYNC_WAIT_MS):
                return int(writer.last_offset_base)
        except TimedOutError:
            pass
        return UNANSWERED

    def tag_last(self, tp: TopicPartition, tag: Any) -> None:
        """Tell the outcome of the record that `record_sync` sent to `tp` under this tag."""
        appender = self._partitions[tp].appender
        assert isinstance(appender, DirectAppender), "it has just sent the record"
        appender.writer.tag_last(tag)

    def _make_way(self, p: WrittenPartition, deadline: float) -> None:
        """Open a way to a partition that has none, or wait until there is something to try.  Raises
        when none can be opened; BufferFullError at the deadline."""
        if p.writer.state is State.LOST:
            self._feed(p, Looked())
            if p.writer.state is State.LOST:
                self._require_time(p.tp, deadline, p.writer.why)
                self._wait_for_attempt(p, deadline)
        elif self._closed:
            raise ClosedError("the producer is closed", hint="make a new one")
        elif p.writer.state in (State.OPENING, State.REOPENING):
            raise no_room(p.tp)  # this thread opens the way, and has come back in a signal handler
        else:
            self._need(p)

    def _waits_for_broker(self, why: KdirectError, deadline: float) -> bool:
        """Wait a moment for a broker that a way could not be opened to: it was reached before, so
        it may come back.  False if it never was, or at the deadline."""
        left_s = deadline - self._monotonic()
        may_pass = isinstance(why, LOST) or has_moved(why)
        if not may_pass or self._closed or left_s <= 0:
            return False
        if not self.session.cluster.has_reached("control"):
            return False
        log.info("waiting for a broker that is away: %s", why)
        self._environment.sleep(min(REACH_PAUSE_S, left_s))
        return True

    def _need(self, p: WrittenPartition, timeout_ms: float | None = None) -> None:
        """Open a way to a partition that has none, and that is to be written."""
        try:
            self._feed(p, Needed(timeout_ms))
        except AccessDeniedError as e:
            if e.held and self.transaction is not None:
                self.kept_off(e)
            raise

    def _open_direct_way(self, tp: TopicPartition) -> DirectAppender | None:
        """What sends records of `tp` at once, opened now if there is no way yet; None: use
        `send`."""
        self._open_way(tp)
        return self._direct.get(tp)

    def _open_way(self, tp: TopicPartition, timeout_ms: float | None = None) -> WrittenPartition:
        p = self._partitions.get(tp) or self._add(tp)
        if p.writer.state is State.IDLE:
            self._need(p, timeout_ms)
        return p

    def _add(self, tp: TopicPartition) -> WrittenPartition:
        writer = PartitionWriter(
            str(tp),
            self.timeout_ms,
            idempotent=self._identities.idempotent,
            transactional=self.transaction is not None,
        )
        p = self._partitions[tp] = WrittenPartition(tp, writer)
        return p

    def _no_room(self, tp: TopicPartition, waited_ms: float | None = None) -> BufferFullError:
        """What is under way is given up, where nothing is answered any more."""
        if self._partitions[tp].is_silent(self._monotonic(), self.timeout_ms / 1000):
            self.expire(tp)
        return no_room(tp, waited_ms)

    def _require_time(self, tp: TopicPartition, deadline: float, why: Any = None) -> None:
        if self._monotonic() >= deadline:
            raise no_room(tp) from why

    # -- answers -----------------------------------------------------------------------------------

    def outcomes(self) -> list[Outcome]:
        """Take the outcomes that are known, without waiting for more, and send again what was lost:
        whoever looks for outcomes need not call anything else to have them."""
        for link in self.links:
            link.drain()
        for p in list(self._partitions.values()):
            appender = p.appender
            if appender is not None and not appender.collect():
                self._recover(p)
            elif p.writer.backlog or p.writer.state is State.LEAVING:
                self._feed(p, Looked(answered=not p.in_flight))
        if self._silent.next_look and self._monotonic() >= self._silent.next_look:
            for p, silent, p.link in self._silent.moved(list(self._partitions.values())):
                log.warning("%s: its broker is silent, and another one leads it", p.tp)
                self._drop(silent)
        taken = self._outcomes[:]
        self._outcomes.clear()
        return taken

    @property
    def in_flight(self) -> int:
        """Records sent and not answered."""
        return sum(p.in_flight for p in self._partitions.values())

    @property
    def wants_look(self) -> bool:
        """Is there a request that goes on its way, or a head that is given back, only when somebody
        looks for outcomes?"""
        return any(p.unsent or p.writer.state is State.LEAVING for p in self._partitions.values())

    def needs_no_look(self, tp: TopicPartition) -> bool:
        """Is everything sent to `tp` under way over RDMA, so that its outcomes may wait for the
        caller's next call?"""
        p = self._partitions.get(tp)
        return p is not None and p.writer.state is State.DIRECT and not p.unsent

    def is_let_in(self, tp: TopicPartition) -> bool:
        """Does nothing wait for a leader that is asked to let the transaction into `tp`?"""
        p = self._partitions.get(tp)
        appender = p.appender if p is not None else None
        return not isinstance(appender, DirectAppender) or appender.entered

    def wait_answered(self, timeout_ms: float) -> bool:
        """Wait until everything sent is answered, at most about `timeout_ms`; True when it is.
        Errors become outcomes, or wait for `raise_errors`."""
        deadline = self._monotonic() + timeout_ms / 1000
        return all(self._wait_answered(p, deadline) for p in list(self._partitions.values()))

    def flush(self) -> None:
        """Wait until everything sent is answered, for the delivery timeout; what is not by then has
        failed.  Raises the first error of a request without a tag."""
        if not self.wait_answered(self.timeout_ms):
            for tp in list(self._partitions):
                self.expire(tp)
        self.raise_errors()

    def expire(self, tp: TopicPartition) -> None:
        """Give up what is not answered of `tp`; it may have been committed all the same."""
        p = self._partitions.get(tp)
        if p is not None and p.in_flight:
            self._take_back(p, p.overdue())

    def raise_errors(self) -> None:
        """Raise the first error of a request without a tag, if there is one; log the others."""
        if self.errors:
            errors = self.errors[:]
            self.errors.clear()
            if len(errors) > 1:
                others = "; ".join(map(str, errors[1:10]))
                log.error("%d more requests failed: %s", len(errors) - 1, others)
            raise errors[0]

    # -- ways --------------------------------------------------------------------------------------

    def paths(self) -> dict[TopicPartition, str]:
        """How each partition written so far is written now: exclusive, shared, ..., lost, idle."""
        return {tp: p.path for tp, p in self._partitions.items()}

    def appender(self, tp: TopicPartition) -> DirectAppender | RequestAppender | None:
        """What sends to `tp`, if there is a way to it."""
        p = self._partitions.get(tp)
        return p.appender if p is not None else None

    def open(
        self, tp: TopicPartition, timeout_ms: float | None = None
    ) -> DirectAppender | RequestAppender | None:
        """As `appender`, with a way opened if there is none yet.  TimedOutError when the broker
        does not grant access within `timeout_ms`."""
        return self._open_way(tp, timeout_ms).appender

    def leads_direct(self, tp: TopicPartition) -> bool:
        """Is `tp` written by RDMA?  Opens a way if there is none yet."""
        p = self._partitions.get(tp)
        if p is None or p.writer.state is IDLE:
            p = self._open_way(tp)
        return p.writer.state in OVER_RDMA

    def has_direct(self, tp: TopicPartition) -> bool:
        """Is `tp` written by RDMA now?  Opens nothing."""
        p = self._partitions.get(tp)
        return p is not None and p.writer.state in OVER_RDMA

    def is_direct(self, tp: TopicPartition, timeout_ms: float | None = None) -> bool:
        """Can `tp` be written by RDMA now?  Opens a way, or tries again; else TimedOutError."""
        p = self._partitions.get(tp) or self._add(tp)
        self._feed(p, DirectWanted(timeout_ms))
        return p.writer.state is State.DIRECT

    def give_back(self, tp: TopicPartition) -> None:
        """End RDMA access to `tp`, if there is any, once everything under way is answered.  Does
        not wait for that."""
        p = self._partitions.get(tp)
        if p is not None:
            self._feed(p, GiveBack(answered=not p.in_flight))

    def release(self) -> None:
        """Give all access back, for nothing is under way; waits for each broker a moment."""
        held: dict[BrokerLink, list[int]] = {}
        for p in self._partitions.values():
            appender = p.appender
            if (
                isinstance(appender, DirectAppender)
                and appender.writer.granted
                and not appender.broken
                and not appender.in_flight
            ):
                held.setdefault(appender.link, []).append(appender.writer.file_id)
        for link, file_ids in held.items():
            try:
                if link.channel is not None:
                    link.channel.release(file_ids, RELEASE_WAIT_MS)
            except KdirectError as e:
                log.debug("release of %d partitions: %s", len(file_ids), e)

    # -- transactions ------------------------------------------------------------------------------

    def begin_transaction(self, producer_id: int, epoch: int) -> None:
        """What is sent from here on belongs to a transaction of this id and epoch; nothing is under
        way."""
        self._identities.restart(producer_id, epoch)

    def give_back_held(self) -> None:
        """Give back the heads that this producer holds alone; see `give_back`."""
        for link in self.links:
            link.drain()  # what is answered by now holds up no head
        for tp, p in list(self._partitions.items()):
            appender = p.appender
            if isinstance(appender, DirectAppender) and not appender.writer.shared:
                self.give_back(tp)

    def leave_transaction(self, until: float) -> None:
        """The transaction is about to end, and nothing of it is under way.  The leaders of heads
        that this producer holds alone are told, so that the markers may come there.  Waits for
        their answers, a moment and until then (monotonic s) at most: without one they take the head
        back for a marker."""
        assert self.transaction is not None
        for link in self.links:
            link.drain()  # whoever is recalled gives the head back instead
        leaving: dict[Channel, list[Entry]] = {}
        for p in list(self._partitions.values()):
            appender = p.appender
            if not isinstance(appender, DirectAppender) or appender.broken:
                continue
            entry = appender.leave_transaction()
            if entry is None:
                continue
            if entry.file_id == NO_FILE:
                self.give_back(p.tp)
            else:
                leaving.setdefault(appender.channel, []).append(entry)
        told: list[tuple[list[Entry], Pending]] = []
        for channel, entries in leaving.items():
            try:
                told.append((entries, leave_transaction(channel, self.transaction, entries)))
            except KdirectError as e:
                log.debug("%s: %s", channel.connection.peer, e)
        for entries, pending in told:
            left_ms = min(LEAVE_WAIT_MS, (until - self._monotonic()) * 1000)
            try:
                answers = answers_of(pending.result(max(0.0, left_ms)))
            except KdirectError as e:
                log.debug("%d heads: %s", len(entries), e)
                continue
            for entry in entries:
                answer = answers.get(entry.tp)
                if answer is None or answer.code:
                    self.give_back(entry.tp)

    # -- the end -----------------------------------------------------------------------------------

    def abort(self) -> None:
        """Give access back without waiting; what is not acknowledged may or may not be committed,
        and has failed."""
        if self._closed:
            return
        self._closed = True
        error = DeliveryError(
            "the producer was closed before the broker answered",
            hint="flush before closing",
            maybe_committed=True,
        )
        ended = [(p, self._taken_back(p)) for p in self._partitions.values()]
        # The queue pairs end first: an appender that is closed while its queue pair lasts asks the
        # broker to end its access, and waits.
        for link in self.links:
            link.close()
        for p, returned in ended:
            self._feed(p, Closing(returned, error))

    def statistics(self) -> dict[str, int]:
        """Acknowledged, by way: `rdma_records`, `rdma_bytes`, `rdma_requests`; `tcp_`, `send_`."""
        out = Counter(self._retired)
        for p in self._partitions.values():
            if p.appender is not None:
                out.update(p.appender.statistics())
        return dict(out)
