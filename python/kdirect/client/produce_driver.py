"""How encoded requests reach their partitions: the I/O of a producer.

Owns: for each partition written a `PartitionWriter`, which decides, and an appender, which sends;
and for each broker that leads one a `BrokerLink`.  A request whose acknowledgement was lost with
its connection may have been committed and is sent again; with `enable.idempotence`, the default, it
was stamped when it was first sent (`kdirect.client.idempotence`), and the broker drops what it has.
What may not enter: records, columns, the choice of partitions.

`rdma.produce` says how RDMA is used: exclusively, shared, or as the broker likes.  Where the broker
refuses (it is switched off, the partition is written over another transport) records travel over
TCP, and RDMA is tried again after a second.

The face to the layer above is `ProduceDriver`.  `send` takes an encoded request and may wait for
room (`room_ms`), never for its answer; a request sent with a `tag` is answered by exactly one
outcome from `outcomes`, in order within its partition; errors of requests without a tag are raised
by `flush`.  No call waits longer than it is told to: while a broker is away its requests are kept
in the backlog of their `PartitionWriter`, and each call tries once to send them.  Where the new way
takes fewer at a time than the one that ended, every look at outcomes sends as many as there is room
for, nothing newer overtakes the rest, and the rest fails when the delivery timeout is over.
Callers hold one lock around every call.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from dataclasses import replace
from typing import Any

from kdirect.client.broker_link import BrokerLink, BrokerLinks
from kdirect.client.direct_append import (
    MODES,
    NOT_TAKEN,
    RELEASE_WAIT_MS,
    REQUEST_FULL,
    REQUEST_SENT,
    UNANSWERED,
    Answers,
    DirectAppender,
    Sync,
)
from kdirect.client.direct_write import NO_ROOM_BUFFER, NO_ROOM_FILE, SENT, SENT_AND_ASK
from kdirect.client.identities import Identities
from kdirect.client.lost_broker import LOST, as_moved
from kdirect.client.partition_writer import (
    Close,
    Closing,
    DirectWanted,
    Drain,
    Drained,
    DropLink,
    Effect,
    Event,
    Expired,
    GiveBack,
    Looked,
    Needed,
    NotTaken,
    Open,
    Opened,
    OpenFailed,
    PartitionWriter,
    Probe,
    Raise,
    Reached,
    Renew,
    Resend,
    Resent,
    Returned,
    State,
    TakeBack,
    Tell,
    Unreached,
    Way,
)
from kdirect.client.producing_session import ProducingSession
from kdirect.client.request_append import RequestAppender
from kdirect.client.silent_brokers import SilentBrokers
from kdirect.client.written_partition import WrittenPartition, no_room
from kdirect.errors import (
    AccessDeniedError,
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

DRAIN_S = 0.1  # how long requests under way over TCP may hold up the return to RDMA
DIRECT_ATTEMPTS = 5
SYNC_WAIT_MS = 10  # for the acknowledgement of a record, with the producer's lock held
EXCLUSIVE_WAIT_S = 1.0  # for an exclusive holder that is about to leave, or was lost
# As names of the module, which are found faster than members of an enum: for each record over TCP.
IDLE, OVER_RDMA = State.IDLE, (State.DIRECT, State.LEAVING)

# Of a request that was sent with a tag: this; the offset of its first record, or -1; the error.
Outcome = tuple[Any, int, DeliveryError | None]


class ProduceDriver:
    """See the module.  `settings` are resolved CLIENT options."""

    def __init__(self, session: ProducingSession, settings: dict[str, Any]) -> None:
        self.session = session
        self.settings = settings
        self.timeout_ms: int = settings["delivery.timeout.ms"]
        self.errors: list[KdirectError] = []
        self.links = BrokerLinks(session, settings)
        self._environment = session.environment
        self._monotonic = session.environment.monotonic
        self._partitions: dict[TopicPartition, WrittenPartition] = {}
        # Of those with a way: what a record may go to at once (RDMA access, and nothing is to be
        # repeated before), or None.
        self._direct: dict[TopicPartition, DirectAppender | None] = {}
        self._mode = MODES[settings["rdma.produce"]] if settings["produce.path"] == "rdma" else -1
        self._rdma: dict[TopicPartition, bool] = {}  # whether the leader was reached by RDMA
        self._identities = Identities(session, settings)
        self._outcomes: list[Outcome] = []  # appenders hold this very list
        self._retired = Counter[str]()  # what appenders that have ended had counted
        self._silent = SilentBrokers(session.environment, session.cluster, self.links)
        self._closed = False

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
        timeout), or, if not `patient`, as soon as the partition cannot be written for now.
        DeliveryError when the request can never be taken.  Neither has an outcome."""
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
                self._make_way(p, until_written)
                continue
            if writer.backlog and not self._resend(p, until_written):
                self._require_time(tp, until_written)
                continue
            if isinstance(appender, RequestAppender):
                sending = appender.submit(data, records, tag, deadline, patient=patient)
            else:
                sending = appender.submit(data, records, tag, deadline)
            if sending is REQUEST_SENT:
                return
            if sending is REQUEST_FULL:
                raise self._no_room(tp)
            self._recover(p)

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
        if appender is None:
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
        if appender is None:
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
            self._feed(p, Needed())

    def _open_direct_way(self, tp: TopicPartition) -> DirectAppender | None:
        """What sends records of `tp` at once, opened now if there is no way yet; None: use
        `send`."""
        self._open_way(tp)
        return self._direct.get(tp)

    def _open_way(self, tp: TopicPartition, timeout_ms: float | None = None) -> WrittenPartition:
        p = self._partitions.get(tp) or self._add(tp)
        if p.writer.state is State.IDLE:
            self._feed(p, Needed(timeout_ms))
        return p

    def _add(self, tp: TopicPartition) -> WrittenPartition:
        writer = PartitionWriter(str(tp), self.timeout_ms, idempotent=self._identities.idempotent)
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
    def unsent(self) -> bool:
        """Is there a request that goes on its way only when somebody looks for outcomes?"""
        return any(p.unsent for p in self._partitions.values())

    def wait_answered(self, timeout_ms: float) -> bool:
        """Wait until everything sent is answered, at most about `timeout_ms`; True when it is.
        Errors become outcomes, or wait for `raise_errors`."""
        deadline = self._monotonic() + timeout_ms / 1000
        return all(self._wait_answered(p, deadline) for p in list(self._partitions.values()))

    def _wait_answered(self, p: WrittenPartition, deadline: float) -> bool:
        while p.in_flight:
            if self._wait_some(p, deadline):
                return True
            if self._monotonic() >= deadline:
                return False
        return True

    def _wait_some(self, p: WrittenPartition, deadline: float) -> bool:
        """Wait until everything of `p` is answered, or something has changed; whether it is."""
        appender = p.appender
        if appender is None:
            self._feed(p, Looked())
            if p.writer.state is State.LOST:
                self._wait_for_attempt(p, deadline)
            elif p.writer.state is State.REOPENING:  # by this thread, which cannot go on meanwhile
                self._environment.sleep(max(0.0, deadline - self._monotonic()))
            return False
        if p.writer.backlog and not self._resend(p, deadline):
            return False
        answers = appender.wait_answered(deadline)
        if answers is Answers.ENDED:
            self._recover(p)
        return answers is Answers.ALL

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

    def has_rdma(self, tp: TopicPartition) -> bool:
        """Is there RDMA to the leader of `tp`?  While nobody knows the leader, what was so before
        holds: to ask a broker that is away would wait for it."""
        known = self._rdma.get(tp)
        if known is None or self.session.cluster.leader_address_at_hand(tp) is not None:
            known = self._rdma[tp] = self.session.transport_to(tp) != "tcp"
        return known

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

    # -- the driver of the machines ----------------------------------------------------------------

    def _feed(self, p: WrittenPartition, event: Event) -> None:
        """Give an event to the machine of `p`, and carry out what follows."""
        events: deque[Event] = deque((event,))
        failed: KdirectError | None = None
        while events:
            for effect in p.writer.on(events.popleft(), self._monotonic()):
                if isinstance(effect, Raise):
                    failed = effect.error
                elif (answer := self._carry_out(p, effect)) is not None:
                    events.append(answer)
        if p.writer.state is State.IDLE:
            self._direct.pop(p.tp, None)
        else:
            at_once = p.writer.state is State.DIRECT and not p.writer.backlog
            appender = p.appender if at_once else None
            self._direct[p.tp] = appender if isinstance(appender, DirectAppender) else None
        if failed is not None:
            raise failed

    def _carry_out(self, p: WrittenPartition, effect: Effect) -> Event | None:
        """Do what the machine wants; the event that answers it, if there is one."""
        match effect:
            case Tell(tag, error):
                self._tell(tag, error)
            case Renew():
                self._identities.renew(p.tp)
            case Resend():
                self._resend(p, 0.0)
            case Open(direct, timeout_ms):
                try:
                    return self._open(p, direct, timeout_ms)
                except BaseException:  # an interrupt, or what nobody expects
                    p.writer.on(OpenFailed(ClosedError("opening was interrupted")), 0.0)
                    raise
            case Close():
                self._close_appender(p)
            case Probe(doubted):
                return self._probe(p, doubted)
            case DropLink():
                if p.link is not None:
                    self._drop(p.link)
            case Drain(timeout_ms):
                most = DRAIN_S if timeout_ms is None else min(DRAIN_S, timeout_ms / 1000)
                answered = self._wait_answered(p, self._monotonic() + most)
                # Requests that were given up meanwhile are no hindrance, but their way is.
                return Drained(answered, timeout_ms) if p.writer.state is State.TCP else None
            case TakeBack(error):
                return Expired(self._taken_back(p), error)
        return None

    def _tell(self, tag: Any, error: DeliveryError) -> None:
        """One request failed for good."""
        if tag is None:
            self.errors.append(error)
        else:
            self._outcomes.append((tag, -1, error))

    def _resend(self, p: WrittenPartition, until: float) -> bool:
        """Send the backlog of `p`, in order, and wait for room `until` then (monotonic seconds).

        True when all of it is on its way; False when there is no room for the rest, or the way has
        ended and the next one has the rest."""
        writer, appender = p.writer, p.appender
        if writer.backlog and self._monotonic() >= writer.deadline:
            self._take_back(p, p.overdue())
            return False
        while writer.backlog and appender is not None:
            data, records, tag = writer.backlog[0]
            try:
                sending = appender.submit(data, records, tag, until)
            except KdirectError as e:
                self._feed(p, NotTaken(e))
                continue
            if sending is REQUEST_SENT:
                self._feed(p, Resent())
            elif sending is REQUEST_FULL:
                return False
            else:
                self._recover(p)
                if p.appender is not appender:
                    return False
        return True

    def _recover(self, p: WrittenPartition) -> None:
        """Access ended, a request was refused, or the queue pair broke.  Take what was not
        committed, and send it again, in order.  A request that was refused for good is reported and
        left out."""
        appender = p.appender
        if not isinstance(appender, DirectAppender):
            return
        returned = appender.take_back(wait=True)
        if p.appender is not appender:
            return  # a signal handler took everything back meanwhile, and closed the appender
        if not returned.grant_lasts:
            waiting = len(returned.unanswered) + len(returned.refused) + len(p.writer.backlog)
            appender.log_end(waiting)
        self._feed(p, returned)
        if p.writer.state is State.LOST:
            self._feed(p, Looked())

    def _taken_back(self, p: WrittenPartition) -> Returned:
        return p.appender.take_back() if p.appender is not None else Returned()

    def _take_back(self, p: WrittenPartition, error: DeliveryError) -> None:
        """Give up what is under way to `p`."""
        self._feed(p, Expired(self._taken_back(p), error))

    def _open(self, p: WrittenPartition, direct: bool, timeout_ms: float | None) -> Event:
        try:
            over_rdma = self._mode >= 0 and direct and self.has_rdma(p.tp)
            if over_rdma:
                appender = self._open_direct(p, timeout_ms)
                if appender is not None:
                    self._silent.watch()
                    p.appender, p.link = appender, appender.link
                    return Opened(Way.DIRECT)
            two_sided = self.settings["produce.path"] == "send" and self.has_rdma(p.tp)
            p.appender = RequestAppender(
                self.session.cluster,
                self.links,
                p.tp,
                self.settings,
                self._identities.of(p.tp),
                self._outcomes,
                self.errors,
                two_sided=two_sided,
            )
            return Opened(Way.TCP, denied=over_rdma)
        except KdirectError as e:
            closed = self.session.closed
            error = e if closed else as_moved(self.session.cluster, p.tp, e)
            patient = timeout_ms is None or not isinstance(e, TimedOutError)
            lost = patient and isinstance(e, LOST) and self.session.cluster.has_several_brokers
            return OpenFailed(error, closed, lost)

    def _open_direct(self, p: WrittenPartition, timeout_ms: float | None) -> DirectAppender | None:
        """Access to `p`, or None when TCP has to do for now: it is refused, or the way is lost (for
        a moment, or for good, as with a broker that came back without RDMA).  AccessDeniedError
        when it was asked for exclusively and somebody else has it."""
        attempt = 0
        most = EXCLUSIVE_WAIT_S if timeout_ms is None else timeout_ms / 1000
        exclusive_until = self._monotonic() + min(EXCLUSIVE_WAIT_S, most)
        while True:
            if self._closed:  # by this thread, in a signal handler
                raise ClosedError("the producer is closed", hint="make a new one")
            link = p.link = self.links.to_leader(p.tp)
            if link.broken:
                self._drop(link)
            try:
                return DirectAppender(
                    link,
                    p.tp,
                    self.settings,
                    self._environment,
                    self._identities.of(p.tp),
                    self._outcomes,
                    self._mode,
                    timeout_ms,
                )
            except AccessDeniedError as e:
                if not (e.held and self._mode == layout.PRODUCE_EXCLUSIVE):
                    log.info("%s is written over TCP: %s", p.tp, e)
                    return None
                if self._monotonic() >= exclusive_until:
                    raise
                self._environment.sleep(0.01)
            except (TransportError, QueuePairError) as e:
                self._drop(link)
                attempt += 1
                if attempt == DIRECT_ATTEMPTS:
                    log.warning("%s is written over TCP: %s", p.tp, e)
                    return None
                self._environment.sleep(0.001 * 4 ** (attempt - 1))

    def _close_appender(self, p: WrittenPartition) -> None:
        appender, p.appender = p.appender, None
        if appender is not None:
            self._retired.update(appender.statistics())
            appender.close()

    def _drop(self, link: BrokerLink) -> None:
        """End the queue pair to one broker, and with it the access to every partition that it
        leads.  What these have under way is repeated over the next one."""
        channel = link.forget_channel()
        if channel is None:
            return
        ended = [
            (p, p.appender.take_back())
            for p in self._partitions.values()
            if isinstance(p.appender, DirectAppender) and p.appender.channel is channel
        ]
        channel.close()
        for p, returned in ended:
            if p.writer.state in OVER_RDMA:
                self._feed(p, replace(returned, broken=False, doubted=True))

    # -- brokers that are away ---------------------------------------------------------------------

    def _probe(self, p: WrittenPartition, doubted: bool) -> Event | None:
        """Does the broker of `p` answer?  None: that is not known yet."""
        link = p.link
        if link is None:
            return Reached()
        if self._monotonic() < link.away_until:
            return None  # its partitions ask it by turns, not each
        if not doubted and not link.connection_closed:
            return Reached()
        try:
            answers = link.answers(p.tp)
        except KdirectError as e:
            moved = self.links.moved(p.tp, link)
            if moved is None:
                return Unreached(e, self.session.closed)
            self._drop(link)
            p.link = moved  # which the next look asks
            return None
        return Reached() if answers else None

    def _wait_for_attempt(self, p: WrittenPartition, until: float) -> None:
        """Wait until there is something to try again."""
        link = p.link
        if link is not None and link.wait_probe(until):
            return
        next_attempt = max(p.writer.retry_at, link.away_until if link is not None else 0.0)
        self._environment.sleep(max(0.0, min(next_attempt, until) - self._monotonic()))

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
