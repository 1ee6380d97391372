"""Carries out what the machines of partitions decide: how the ways of a producer are opened, lost
and found again.

Owns: for each partition written a `PartitionWriter`, which decides, and an appender, which sends;
for each broker that leads one a `BrokerLink`; what is to be sent again, and the wait for a broker
that is away.  Which request takes which way is `kdirect.client.produce_driver`'s, which stands on
this.
"""

from __future__ import annotations

import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from kdirect.client.broker_link import BrokerLink, BrokerLinks
from kdirect.client.direct_append import MODES, REQUEST_FULL, REQUEST_SENT, Answers, DirectAppender
from kdirect.client.identities import Identities
from kdirect.client.lost_broker import LOST, as_moved
from kdirect.client.partition_writer import (
    Close,
    Drain,
    Drained,
    DropLink,
    Effect,
    Event,
    Expired,
    Looked,
    NotTaken,
    Open,
    Opened,
    OpenFailed,
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
from kdirect.client.transaction_entry import may_enter
from kdirect.client.written_partition import WrittenPartition
from kdirect.errors import (
    AccessDeniedError,
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
EXCLUSIVE_WAIT_S = 1.0  # for an exclusive holder that is about to leave, or was lost
# As names of the module, which are found faster than members of an enum: for each record over TCP.
IDLE, OVER_RDMA = State.IDLE, (State.DIRECT, State.LEAVING)

# Of a request that was sent with a tag: this; the offset of its first record, or -1; the error.
Outcome = tuple[Any, int, DeliveryError | None]


class MachineDriver:
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
        self.transaction = self._identities.transaction  # None: the producer has none
        if self.transaction is not None and self._mode == layout.PRODUCE_AUTO:
            # The coordinator's markers come between the batches.  On a shared head they reserve
            # room as any producer does.
            self._mode = layout.PRODUCE_SHARED
        # The partitions that have records of the transaction by now, whether sent or not.
        self.about_to_write: Callable[[], Iterable[TopicPartition]] = lambda: ()
        # Another producer holds a partition that the transaction has to write, and stays.
        self.kept_off: Callable[[AccessDeniedError], None] = lambda error: None
        self._outcomes: list[Outcome] = []  # appenders hold this very list
        self._retired = Counter[str]()  # what appenders that have ended had counted
        self._silent = SilentBrokers(session.environment, session.cluster, self.links)
        self._closed = False

    def has_rdma(self, tp: TopicPartition) -> bool:
        """Is there RDMA to the leader of `tp`?  While nobody knows the leader, what was so before
        holds: to ask a broker that is away would wait for it."""
        known = self._rdma.get(tp)
        if known is None or self.session.cluster.leader_address_at_hand(tp) is not None:
            known = self.session.transport_to(tp) != "tcp"
            if known and self.transaction is not None:
                known = may_enter(self.session.cluster.connection_for(tp))
            self._rdma[tp] = known
        return known

    # -- effects -----------------------------------------------------------------------------------

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
                transaction=self.transaction,
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
        wait_s = EXCLUSIVE_WAIT_S
        if self.transaction is not None:
            # Two transactions may wait for each other.  Where they begin at the same time, and
            # again after each abort, one of them still gives way first.
            wait_s *= random.uniform(1.0, 2.0)
        most = wait_s if timeout_ms is None else timeout_ms / 1000
        exclusive_until = self._monotonic() + min(wait_s, most)
        while True:
            if self._closed:  # by this thread, in a signal handler
                raise ClosedError("the producer is closed", hint="make a new one")
            link = p.link = self.links.to_leader(p.tp)
            if link.broken:
                self._drop(link)
            try:
                appender = DirectAppender(
                    link,
                    p.tp,
                    self.settings,
                    self._environment,
                    self._identities.of(p.tp),
                    self._outcomes,
                    self._mode,
                    timeout_ms,
                    self.transaction,
                )
                appender.companions = partial(self._companions, appender)
                return appender
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

    def _companions(self, appender: DirectAppender) -> list[DirectAppender]:
        """Those of the same leader that are about to be written in the transaction, too."""
        others = (self._direct.get(tp) for tp in self.about_to_write())
        return [
            a
            for a in others
            if a is not None
            and a is not appender
            and a.channel is appender.channel
            and not (a.entered or a.writer.revoked)
        ]

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

    # -- waiting -----------------------------------------------------------------------------------

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
