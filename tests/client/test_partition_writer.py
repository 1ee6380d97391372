"""The machine that decides what a producer does about one partition: its table, and the promises
that hold whatever happens in whatever order.  No I/O, no clock."""

from __future__ import annotations

import math
import random
import typing
from collections import deque

import pytest

from kdirect.client import partition_writer as pw
from kdirect.client.partition_writer import PartitionWriter, Returned, State, Way
from kdirect.errors import (
    AccessDeniedError,
    BrokerUnavailableError,
    ConfigError,
    DeliveryError,
    QueuePairError,
)
from kdirect.format.codec import encode_records
from kdirect.format.error_codes import ErrorCode

TIMEOUT_S = 10.0
GONE = DeliveryError("given up", hint="none", maybe_committed=True)
EVENTS = typing.get_args(pw.Event)
EXAMPLES = {
    pw.Needed: pw.Needed(),
    pw.Opened: pw.Opened(Way.DIRECT),
    pw.OpenFailed: pw.OpenFailed(QueuePairError("broken")),
    pw.Reached: pw.Reached(),
    pw.Unreached: pw.Unreached(BrokerUnavailableError("away", hint="wait")),
    pw.Returned: Returned(),
    pw.Looked: pw.Looked(),
    pw.Resent: pw.Resent(),
    pw.NotTaken: pw.NotTaken(GONE),
    pw.DirectWanted: pw.DirectWanted(),
    pw.Drained: pw.Drained(True),
    pw.GiveBack: pw.GiveBack(True),
    pw.Expired: pw.Expired(Returned(), GONE),
    pw.Closing: pw.Closing(Returned(), GONE),
}


def requests(*tags):
    """Requests of one record each, with these tags."""
    return [(encode_records([(None, str(tag).encode(), [], 1)]), 1, tag) for tag in tags]


def refused(code, *tags):
    return [(*request, code) for request in requests(*tags)]


def told(effects):
    return [effect.tag for effect in effects if isinstance(effect, pw.Tell)]


def kinds(effects):
    return [type(effect) for effect in effects]


def waiting(writer):
    return [tag for _, _, tag in writer.backlog]


def made(*events, now=0.0, idempotent=True, transactional=False):
    """A machine that has seen these events."""
    writer = PartitionWriter(
        "t-0", TIMEOUT_S * 1000, idempotent=idempotent, transactional=transactional
    )
    for event in events:
        writer.on(event, now)
    return writer


def direct(**more):
    return made(pw.Needed(), pw.Opened(Way.DIRECT), **more)


def lost(*tags, **more):
    writer = direct(**more)
    writer.on(Returned(unanswered=requests(*tags), broken=True), 0.0)
    assert writer.state is State.LOST
    return writer


# -- the table -------------------------------------------------------------------------------------


def test_every_state_is_in_the_table_and_every_state_and_event_is_used():
    assert set(pw.TABLE) == set(State)
    assert set(EXAMPLES) == set(EVENTS)
    assert {event for row in pw.TABLE.values() for event in row} == set(EVENTS)
    following = {s for row in pw.TABLE.values() for _, states in row.values() for s in states}
    assert following == set(State), "every state can be reached"


@pytest.mark.parametrize("state", State)
def test_an_event_that_a_state_does_not_know_is_an_error(state):
    for event in set(EVENTS) - set(pw.TABLE[state]):
        writer = made()
        writer.state = state
        with pytest.raises(LookupError, match=rf"t-0: .*in state {state.name}"):
            writer.on(EXAMPLES[event], 0.0)
        assert writer.state is state


# -- opening ---------------------------------------------------------------------------------------


def test_a_partition_is_opened_when_it_is_needed_and_the_caller_is_told_when_that_fails():
    writer = made()
    assert writer.on(pw.Needed(250), 0.0) == (pw.Open(True, 250),)
    error = BrokerUnavailableError("away", hint="wait")
    assert writer.on(pw.OpenFailed(error), 0.0) == (pw.Raise(error),)
    assert writer.state is State.IDLE


def test_a_broker_that_is_lost_while_a_partition_is_opened_is_looked_for_where_there_are_others():
    writer = made(pw.Needed())
    error = BrokerUnavailableError("it closed the connection while answering", hint="wait")
    assert writer.on(pw.OpenFailed(error, elsewhere=True), 5.0) == ()
    assert writer.state is State.LOST
    assert writer.on(pw.Looked(), 6.0) == (pw.Probe(True),)
    assert writer.on(pw.Reached(), 6.0) == (pw.Open(True),)
    closing = made(pw.Needed())
    assert closing.on(pw.OpenFailed(error, True, elsewhere=True), 5.0) == (pw.Raise(error),)


@pytest.mark.parametrize("opening", [made(pw.Needed()), lost(1)], ids=["opening", "reopening"])
def test_a_partition_that_is_closed_while_it_is_opened_stays_closed(opening):
    waiting_before = waiting(opening)
    if opening.state is State.LOST:
        opening.on(pw.Reached(), 0.0)
    for event in (pw.Looked(), pw.DirectWanted(), pw.GiveBack(True)):
        assert opening.on(event, 0.0) == ()
    assert told(opening.on(pw.Closing(Returned(), GONE), 0.0)) == waiting_before
    error = QueuePairError("broken")
    assert opening.on(pw.OpenFailed(error), 0.0) == (pw.Raise(error),)
    assert kinds(opening.on(pw.Opened(Way.DIRECT), 0.0)) == [pw.DropLink, pw.Close, pw.Raise]
    assert opening.state is State.CLOSED


def test_what_expires_while_its_way_is_opened_is_told_once():
    writer = lost(1, 2)
    writer.on(pw.Reached(), 0.0)
    assert told(writer.on(pw.Expired(Returned(), GONE), 0.0)) == [1, 2]
    assert writer.on(pw.Opened(Way.DIRECT), 0.0) == () and writer.deadline == math.inf
    writer = lost(1)
    writer.on(pw.Reached(), 0.0)
    writer.on(pw.Expired(Returned(), GONE), 5.0)
    assert told(writer.on(pw.OpenFailed(QueuePairError("broken")), 5.0)) == []
    assert writer.state is State.IDLE


def test_rdma_that_was_refused_is_tried_again_after_a_while_when_nothing_is_under_way():
    writer = made(pw.Needed(), pw.Opened(Way.TCP, denied=True), now=5.0)
    assert writer.on(pw.DirectWanted(), 5.9) == ()
    assert writer.on(pw.DirectWanted(30), 6.0) == (pw.Drain(30),)
    assert writer.on(pw.Drained(False, 30), 6.1) == () and writer.state is State.TCP
    assert writer.on(pw.DirectWanted(), 7.0) == ()
    assert writer.on(pw.DirectWanted(), 7.1) == (pw.Drain(),)
    assert writer.on(pw.Drained(True), 7.2) == (pw.Close(), pw.Open(True))
    assert writer.state is State.OPENING


def test_rdma_that_cannot_be_had_at_all_is_not_tried_again():
    writer = made(pw.Needed(), pw.Opened(Way.TCP))
    assert writer.on(pw.DirectWanted(), 1e9) == ()


# -- what comes back -------------------------------------------------------------------------------


def test_what_is_not_answered_is_repeated_in_order_before_what_waited():
    writer = direct()
    writer.on(Returned(unanswered=requests(1, 2, 3), broken=True), 0.0)
    writer.on(pw.Reached(), 0.0)
    assert writer.on(pw.Opened(Way.TCP), 0.0) == (pw.Resend(),)
    writer.on(pw.Resent(), 0.0)
    assert waiting(writer) == [2, 3]
    writer = lost(1, 2, 3)
    for event in (pw.Reached(), pw.Opened(Way.DIRECT), pw.Resent()):
        writer.on(event, 0.0)
    writer.on(Returned(unanswered=requests(1), broken=True), 1.0)  # it broke again meanwhile
    assert waiting(writer) == [1, 2, 3]


def test_access_that_ends_with_nothing_under_way_is_asked_for_when_it_is_needed():
    writer = direct()
    assert kinds(writer.on(Returned(), 0.0)) == [pw.Close]
    assert writer.state is State.IDLE


def test_a_queue_pair_that_broke_is_looked_for_first_even_with_nothing_under_way():
    assert lost().on(pw.Looked(), 0.0) == (pw.Probe(True),)


def test_what_a_link_that_was_given_up_leaves_is_probed_and_others_are_asked_for_when_needed():
    writer = direct()
    writer.on(Returned(unanswered=requests(1), doubted=True), 0.0)
    assert writer.state is State.LOST and writer.on(pw.Looked(), 0.0) == (pw.Probe(True),)
    writer = direct()
    writer.on(Returned(doubted=True), 0.0)
    assert writer.state is State.IDLE


@pytest.mark.parametrize("idempotent", [True, False])
def test_a_request_refused_for_good_fails_alone(idempotent):
    writer = direct(idempotent=idempotent)
    effects = writer.on(Returned(refused(ErrorCode.MESSAGE_TOO_LARGE, 1), grant_lasts=True), 0.0)
    assert told(effects) == [1] and not effects[0].error.maybe_committed
    assert kinds(effects) == [pw.Tell] + [pw.Renew] * idempotent
    assert writer.state is State.DIRECT and not writer.backlog


def test_requests_refused_for_a_transient_reason_are_repeated_a_few_times_and_then_fail():
    writer = direct()
    for _ in range(pw.REFUSALS):
        code = ErrorCode.NOT_ENOUGH_REPLICAS
        effects = writer.on(Returned(refused(code, 1, 2), accepted=7, grant_lasts=True), 0.0)
        assert effects == (pw.Resend(),) and waiting(writer) == [1, 2]
        writer.on(pw.Resent(), 0.0)
        writer.on(pw.Resent(), 0.0)
    assert told(writer.on(Returned(refused(code, 1, 2), accepted=7, grant_lasts=True), 0.0)) == [
        1,
        2,
    ]


def test_one_request_that_is_taken_in_between_begins_the_count_of_refusals_again():
    writer = direct()
    for accepted in range(3 * pw.REFUSALS):
        refusal = Returned(
            refused(ErrorCode.NOT_ENOUGH_REPLICAS, 1), accepted=accepted, grant_lasts=True
        )
        assert not told(writer.on(refusal, 0.0))
        writer.on(pw.Resent(), 0.0)


def test_a_gap_in_the_sequence_begins_a_new_one_for_what_is_repeated():
    writer = direct()
    out_of_order = refused(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, 1, 2)
    effects = writer.on(Returned(out_of_order, requests(3), broken=True), 0.0)
    assert pw.Renew in kinds(effects) and not told(effects) and waiting(writer) == [1, 2, 3]
    writer = direct(idempotent=False)
    assert told(writer.on(Returned(out_of_order, grant_lasts=True), 0.0)) == [1, 2]


def test_a_request_that_can_never_be_taken_leaves_the_backlog():
    writer = lost(1, 2)
    writer.on(pw.Reached(), 0.0)
    writer.on(pw.Opened(Way.DIRECT), 0.0)
    (tell,) = writer.on(pw.NotTaken(ConfigError("too large", hint="send less")), 0.0)
    assert tell.tag == 1 and isinstance(tell.error, DeliveryError) and waiting(writer) == [2]


# -- lost ------------------------------------------------------------------------------------------


def test_attempts_become_rarer_and_end_with_the_delivery_timeout():
    writer, now, pauses = lost(1, 2), 0.0, []
    away = BrokerUnavailableError("away", hint="wait")
    while writer.state is State.LOST:
        effects = writer.on(pw.Looked(), now)
        assert effects == (pw.Probe(True),)
        effects = writer.on(pw.Unreached(away), now)
        if writer.state is State.LOST:
            assert effects == (pw.DropLink(),)
            assert writer.on(pw.Looked(), writer.retry_at - 1e-6) == ()
            pauses.append(writer.retry_at - now)
            now = writer.retry_at
    assert told(effects) == [1, 2] and kinds(effects)[0] is pw.Renew
    assert "away" in effects[-1].error.message and now < TIMEOUT_S
    expected = [min(pw.FIRST_PAUSE_S * 2**i, pw.LONGEST_PAUSE_S) for i in range(len(pauses))]
    assert pauses == pytest.approx(expected) and len(pauses) > 10
    assert writer.state is State.IDLE and writer.deadline == math.inf


def test_a_look_after_the_deadline_gives_up_though_no_attempt_is_due():
    writer = lost(1)
    writer.on(pw.Unreached(QueuePairError("x")), 0.0)
    assert told(writer.on(pw.Looked(), TIMEOUT_S)) == [1]


def test_what_cannot_pass_is_not_tried_again():
    writer = lost(1)
    assert told(writer.on(pw.Unreached(ConfigError("no", hint="")), 0.0)) == [1]
    writer = lost(1)
    closed = pw.Unreached(QueuePairError("x"), final=True)
    assert told(writer.on(closed, 0.0)) == [1]


def test_access_that_another_has_keeps_the_queue_pair():
    writer = lost(1)
    writer.on(pw.Reached(), 0.0)
    assert writer.on(pw.OpenFailed(AccessDeniedError("held")), 0.0) == ()
    assert writer.state is State.LOST and waiting(writer) == [1]


@pytest.mark.parametrize("transactional", [False, True])
@pytest.mark.parametrize("held", [False, True])
def test_a_transaction_does_not_wait_for_whoever_holds_the_partition(transactional, held):
    """That producer may wait for a partition of this transaction."""
    writer = made(pw.Needed(), pw.Opened(Way.DIRECT), transactional=transactional)
    writer.on(Returned(unanswered=requests(1, 2)), 0.0)
    assert writer.on(pw.Looked(), 0.0) == (pw.Probe(False),)
    writer.on(pw.Reached(), 0.0)
    error = AccessDeniedError("another has it")
    error.held = held
    effects = writer.on(pw.OpenFailed(error), 0.0)
    if transactional and held:
        assert told(effects) == [1, 2] and effects[-1].error.__cause__ is error
        assert writer.state is State.IDLE and not writer.backlog
    else:
        assert effects == ()
        assert writer.state is State.LOST and waiting(writer) == [1, 2]


# -- leaving and the end ---------------------------------------------------------------------------


def test_access_is_given_back_at_once_or_when_everything_is_answered():
    writer = direct()
    assert kinds(writer.on(pw.GiveBack(True), 0.0)) == [pw.Close]
    writer = direct()
    assert writer.on(pw.GiveBack(False), 0.0) == () and writer.state is State.LEAVING
    assert writer.on(pw.Looked(False), 0.0) == ()
    assert kinds(writer.on(pw.Looked(True), 0.0)) == [pw.Close] and writer.state is State.IDLE
    writer = direct()
    writer.on(pw.GiveBack(False), 0.0)
    writer.on(pw.DirectWanted(), 0.0)
    assert writer.state is State.DIRECT, "it is wanted after all"


def test_a_backlog_whose_time_is_over_is_taken_back():
    writer = lost(1)
    writer.on(pw.Reached(), 0.0)
    writer.on(pw.Opened(Way.TCP), 0.0)
    assert writer.on(pw.Looked(), TIMEOUT_S - 0.1) == (pw.Resend(),)
    (take_back,) = writer.on(pw.Looked(), TIMEOUT_S)
    effects = writer.on(pw.Expired(Returned(unanswered=requests(0)), take_back.error), TIMEOUT_S)
    assert told(effects) == [0, 1] and pw.Renew in kinds(effects)


def test_what_is_given_up_over_rdma_takes_the_queue_pair_with_it():
    assert kinds(direct().on(EXAMPLES[pw.Expired], 0.0)) == [pw.Renew, pw.DropLink, pw.Close]
    over_tcp = made(pw.Needed(), pw.Opened(Way.TCP))
    assert kinds(over_tcp.on(EXAMPLES[pw.Expired], 0.0)) == [pw.Renew, pw.Close]


# -- whatever happens ------------------------------------------------------------------------------


class Driver:
    """Sends numbers over nothing: it carries out effects by rolling dice."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.writer = made(transactional=self.random.random() < 0.5)
        self.under_way = deque()
        self.outcomes = []
        self.now = 0.0

    def feed(self, event):
        before = self.writer.state
        effects = self.writer.on(event, self.now)
        assert self.writer.state in pw.TABLE[before][type(event)][1]
        for effect in effects:
            self.carry_out(effect)

    def carry_out(self, effect):
        dice = self.random
        match effect:
            case pw.Tell(tag, _):
                self.outcomes.append(tag)
            case pw.Open():
                error = dice.choice((QueuePairError("x"), AccessDeniedError("held")))
                if isinstance(error, AccessDeniedError):
                    error.held = dice.random() < 0.5
                way = pw.Opened(dice.choice(tuple(Way)), denied=dice.random() < 0.5)
                self.feed(way if dice.random() < 0.6 else pw.OpenFailed(error))
            case pw.Probe():
                if dice.random() < 0.7:
                    away = pw.Unreached(BrokerUnavailableError("away", hint="wait"))
                    self.feed(dice.choice((pw.Reached(), away)))
            case pw.Resend():
                while self.writer.backlog and dice.random() < 0.7:
                    self.under_way.append(self.writer.backlog[0])
                    self.feed(pw.Resent())
            case pw.TakeBack(error):
                self.feed(pw.Expired(self.returned(), error))
            case pw.Drain():
                if self.writer.state is State.TCP:
                    self.feed(pw.Drained(not self.under_way and not self.writer.backlog))
            case pw.Close():
                assert not self.under_way, "an appender was closed with requests under way"

    def returned(self, **more):
        requests = list(self.under_way)
        self.under_way.clear()
        number = self.random.randint(0, min(2, len(requests)))
        code = self.random.choice((ErrorCode.NOT_ENOUGH_REPLICAS, ErrorCode.MESSAGE_TOO_LARGE))
        if self.writer.state not in (State.DIRECT, State.LEAVING):
            number = 0
        if more.get("grant_lasts"):
            number = len(requests)
        refusals = [(*request, code) for request in requests[:number]]
        return Returned(refusals, requests[number:], **more)

    def step(self, tag):
        dice, state = self.random, self.writer.state
        self.now += dice.choice((0.0, 0.001, 0.1, 2.0))
        what = dice.random()
        if state in (State.DIRECT, State.LEAVING, State.TCP):
            if what < 0.4 and not self.writer.backlog:
                self.under_way.extend(requests(tag))
                return True
            if what < 0.6 and self.under_way:
                self.outcomes.append(self.under_way.popleft()[2])
            elif what < 0.7 and state is not State.TCP:
                self.feed(self.returned(broken=dice.random() < 0.5))
            elif what < 0.75 and state is not State.TCP and self.under_way:
                self.feed(self.returned(grant_lasts=True))
            elif what < 0.8:
                self.feed(pw.GiveBack(not self.under_way))
            elif what < 0.85:
                self.feed(pw.DirectWanted())
            elif what < 0.87:
                self.feed(pw.Expired(self.returned(), GONE))
            else:
                self.feed(pw.Looked(not self.under_way))
        elif state is State.IDLE:
            self.feed(pw.Needed())
        else:
            self.feed(pw.Looked())
        return False


def test_every_request_has_one_outcome_and_they_are_sent_in_order(seed):
    for i in range(300):
        driver, tag = Driver(seed + i), 0
        for _ in range(300):
            if driver.step(tag):
                tag += 1
            in_order = [t for _, _, t in (*driver.under_way, *driver.writer.backlog)]
            assert in_order == sorted(in_order), f"seed {seed + i}: out of order"
        driver.feed(pw.Closing(driver.returned(), GONE))
        assert sorted(driver.outcomes) == list(range(tag)), f"seed {seed + i}"
        assert driver.writer.state is State.CLOSED and not driver.writer.backlog


def test_a_gap_in_a_transaction_is_final():
    writer = PartitionWriter("t-0", TIMEOUT_S * 1000, idempotent=True, transactional=True)
    writer.on(pw.Needed(), 0.0)
    writer.on(pw.Opened(Way.DIRECT), 0.0)
    codes = refused(ErrorCode.MESSAGE_TOO_LARGE, 1)
    codes += refused(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, 2, 3)
    effects = writer.on(Returned(codes, grant_lasts=True), 0.0)
    assert told(effects) == [1, 2, 3]
    assert pw.Renew not in kinds(effects)
    assert not writer.backlog
    assert writer.state is State.DIRECT


def test_what_follows_a_transient_refusal_keeps_its_sequence_in_a_transaction():
    writer = PartitionWriter("t-0", TIMEOUT_S * 1000, idempotent=True, transactional=True)
    writer.on(pw.Needed(), 0.0)
    writer.on(pw.Opened(Way.DIRECT), 0.0)
    codes = refused(ErrorCode.NOT_ENOUGH_REPLICAS, 1)
    codes += refused(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, 2)
    effects = writer.on(Returned(codes, grant_lasts=True), 0.0)
    assert told(effects) == []
    assert pw.Renew not in kinds(effects)
    assert list(writer.backlog) == requests(1, 2)
