"""The machine of a partition's head, without I/O: every pair of state and event, and the walks that
the driver takes through them."""

from __future__ import annotations

import pytest

from kdirect.broker.head_life import (
    ABORTS,
    GRANTED,
    HOLD_OFF_MAX_S,
    HOLD_OFF_S,
    LED_ELSEWHERE,
    NEXT_FILE_TRANSITIONS,
    RECALL_CHECKS,
    SHARED_S,
    TRANSITIONS,
    Ask,
    Effect,
    EndReason,
    Event,
    HeadLife,
    HoldOff,
    Mode,
    NextFile,
    NextFileEvent,
    Room,
    State,
)

ASK = Ask(alone=False, shared=False, room=Room.ENOUGH)
ALONE = ASK._replace(alone=True)
SHARED = ASK._replace(shared=True)
REQUESTS = {
    Event.REQUEST,
    Event.REQUEST_ALONE,
    Event.REQUEST_ELSEWHERE,
    Event.REQUEST_FULL,
    Event.APPEND,
    Event.MARKER,
}
ANSWERS = {
    Effect.GRANT,
    Effect.GRANT_NEXT,
    Effect.WAIT,
    Effect.RESERVE,
    Effect.INSERT,
    Effect.REFUSE_HELD,
    Effect.REFUSE_ELSEWHERE,
    Effect.REFUSE_HELD_OFF,
    Effect.REFUSE_WANTED,
    Effect.REFUSE_GROWING,
    Effect.REFUSE_TWICE,
    Effect.REFUSE_NOT_LED,
}
# Effects after which the worker commits nothing more of the head.
STOPS = {
    Effect.STOP,
    Effect.REVOKE,
    Effect.WITHDRAW,
    Effect.FAIL_WAITING,
    Effect.REPORT_CUT,
}
DROPS = {Effect.DROP_NEXT, Effect.DROP_NEXT_SILENTLY}


def life_in(state: State, next_file: NextFile = NextFile.NONE) -> HeadLife:
    life = HeadLife()
    life.state, life.next_file = state, next_file
    return life


def opened(ask: Ask, now: float = 0.0) -> HeadLife:
    life = HeadLife()
    life.on(life.classify(ask, now), now)
    return life


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("state", State)
def test_every_event_in_every_state(state: State, event: Event) -> None:
    """What the table says happens, and nothing where it says nothing; and no state may be left
    without what must be done on the way."""
    life = life_in(state, NextFile.GRANTED)
    effects = life.on(event, 1.0)
    row = TRANSITIONS.get((state, event))
    if row is None:
        assert (life.state, life.next_file, effects) == (state, NextFile.GRANTED, ())
        return
    assert (life.state, effects) == (row.state, row.effects)
    if row.reason is not None:
        assert life.reason is row.reason
    dropped = bool(DROPS & set(effects))
    assert (life.next_file is NextFile.NONE) == dropped
    if event in REQUESTS or (event.name.startswith("OPEN_") and event is not Event.OPEN_FAILED):
        assert len(ANSWERS & set(effects)) == 1, "a request has one answer"
    if state in GRANTED and row.state in (State.CLOSING, State.DELETING, State.RESIGNING):
        assert dropped, "the next file does not outlive a head that ends otherwise"
    if row.state is State.CLOSING and state is not State.CLOSING:
        assert effects[-1] is Effect.CLOSE and STOPS & set(effects)
    if row.state is State.RESIGNING and state in GRANTED:
        assert effects[-1] is Effect.CLOSE and STOPS & set(effects)
    if row.state in (State.ENDING, State.LEAVING) and state not in (row.state, State.ENDING):
        assert effects[-1] is Effect.CLOSE_LATER and STOPS & set(effects)
    if row.state is State.NOBODY and state is not State.NOBODY and event is not Event.OPEN_FAILED:
        assert Effect.RESUME in effects or event in (Event.DELETED, Event.LEAD)
    if event is Event.RESIGN:
        assert row.state in LED_ELSEWHERE
    elif state in LED_ELSEWHERE and event not in (Event.LEAD, Event.DELETED):
        assert row.state in LED_ELSEWHERE, "nothing else makes this broker the leader"
    if row.state is State.RESIGNED and state is not State.RESIGNED:
        assert effects[-1] is Effect.REPORT_RESIGNED


@pytest.mark.parametrize("state", State)
def test_a_marker_waits_where_an_append_does(state: State) -> None:
    """Only whoever writes nothing is not asked to make room for it."""
    marker, append = (TRANSITIONS.get((state, e)) for e in (Event.MARKER, Event.APPEND))
    assert marker == append
    life = life_in(state)
    assert life.classify_marker(fits_between=False) is Event.MARKER
    between = life.classify_marker(fits_between=True)
    if state is not State.EXCLUSIVE:
        assert between is Event.MARKER and (state, Event.MARKER_BETWEEN) not in TRANSITIONS
        return
    assert life.on(between, 0.0) == (Effect.INSERT,)
    assert life.state is State.EXCLUSIVE and life.reason is EndReason.NONE


def test_a_marker_does_not_keep_off_who_wants_the_partition_alone() -> None:
    """Kafka clients that write do."""
    for event, refused in ((Event.MARKER, False), (Event.APPEND, True)):
        life = opened(ALONE)
        life.on(event, 0.0)
        assert life.state is State.RECALLED
        life.on(Event.FINISHED, 0.0)
        life.on(Event.CLOSED, 0.0)
        assert (life.held_off(True, 0.1) is not None) == refused


def test_transactional_producers_hold_a_head_in_turn() -> None:
    """The one that is between two transactions is recalled for the other one, and for nobody else
    who could not share the head."""
    for ask, event, answer in (
        (ALONE._replace(in_turn=True), Event.REQUEST, Effect.WAIT),
        (ALONE, Event.REQUEST_ALONE, Effect.REFUSE_HELD),
        (SHARED._replace(in_turn=True), Event.REQUEST_ALONE, Effect.REFUSE_HELD),
    ):
        life = opened(ALONE)
        assert life.classify(ask, 0.0) is event
        effects = life.on(event, 0.0)
        assert answer in effects
        assert (life.state is State.RECALLED) == (answer is Effect.WAIT)
        assert life.held_off(True, 0.0) is None
    life = life_in(State.RECALLED)
    assert life.classify(ALONE._replace(in_turn=True), 0.0) is Event.REQUEST_ALONE


@pytest.mark.parametrize("state", State)
def test_every_state_is_left_and_answers_everybody(state: State) -> None:
    ways = {row.state for (at, _), row in TRANSITIONS.items() if at is state}
    assert ways - {state}, "there is no way out"
    if state is not State.NOBODY:  # there a request is one of the OPEN events
        assert {(state, event) for event in REQUESTS} <= TRANSITIONS.keys()
    if state in GRANTED:
        for event in (Event.LEFT, Event.ROLLED_AWAY, Event.DELETE):
            assert (state, event) in TRANSITIONS
    assert (state, Event.RESIGN) in TRANSITIONS or state in LED_ELSEWHERE


@pytest.mark.parametrize("event", NextFileEvent)
@pytest.mark.parametrize("state", NextFile)
def test_every_event_of_the_next_file(state: NextFile, event: NextFileEvent) -> None:
    life = life_in(State.EXCLUSIVE, state)
    effects = life.on_next_file(event)
    row = NEXT_FILE_TRANSITIONS.get((state, event))
    assert (life.next_file, effects) == ((row.state, row.effects) if row else (state, ()))
    if event.name.startswith("ASKED"):
        assert row is not None and len(ANSWERS & set(effects)) == 1


def test_every_effect_is_used() -> None:
    rows = [*TRANSITIONS.values(), *NEXT_FILE_TRANSITIONS.values()]
    assert {effect for row in rows for effect in row.effects} == set(Effect)


@pytest.mark.parametrize(
    ("ask", "mode", "state"),
    [
        (ASK, Mode.EXCLUSIVE, State.EXCLUSIVE),
        (ALONE, Mode.ALONE, State.EXCLUSIVE),
        (SHARED, Mode.SHARED, State.SHARED),
    ],
)
def test_the_first_producer_gets_the_head_as_it_asks(ask: Ask, mode: Mode, state: State) -> None:
    life = HeadLife()
    assert life.on(life.classify(ask, 0.0), 0.0) == (Effect.OPEN, Effect.GRANT)
    assert (life.state, life.mode, life.reason) == (state, mode, EndReason.NONE)


@pytest.mark.parametrize(
    ("room", "effects", "state"),
    [
        (Room.BUSY, (Effect.WAIT,), State.NOBODY),
        (Room.NONE, (Effect.MAKE_ROOM, Effect.WAIT), State.MAKING_ROOM),
    ],
)
def test_a_head_without_room_is_made_first(room: Room, effects: object, state: State) -> None:
    life = HeadLife()
    ask = ASK._replace(room=room)
    assert life.on(life.classify(ask, 0.0), 0.0) == effects
    assert life.state is state


def test_a_second_producer_has_the_first_recalled_and_shares_the_next_head() -> None:
    life = opened(ASK)
    assert life.on(life.classify(ASK, 5.0), 5.0) == (Effect.RECALL, Effect.WAIT)
    assert life.on(life.classify(ASK, 5.0), 5.0) == (Effect.WAIT,), "once is enough"
    assert life.on(Event.FINISHED, 5.0)[-1] is Effect.CLOSE and not life.rolls
    life.on(Event.CLOSED, 5.0)
    assert life.classify(ASK, 5.0 + SHARED_S - 0.1) is Event.OPEN_SHARED
    assert life.classify(ASK, 5.0 + SHARED_S) is Event.OPEN_EXCLUSIVE


@pytest.mark.parametrize("holder", [ASK, ALONE, SHARED])
def test_who_wants_to_be_alone_is_refused_where_others_are(holder: Ask) -> None:
    life = opened(holder)
    assert life.on(life.classify(ALONE, 0.0), 0.0) == (Effect.REFUSE_HELD,)
    if holder is ALONE:
        assert life.on(life.classify(SHARED, 0.0), 0.0) == (Effect.REFUSE_HELD,)


def test_a_head_that_is_shared_over_one_transport_is_refused_over_another() -> None:
    life = opened(SHARED)
    ask = SHARED._replace(same_transport=False)
    assert life.on(life.classify(ask, 0.0), 0.0) == (Effect.REFUSE_ELSEWHERE,)


def test_a_recalled_producer_has_time_as_long_as_it_writes() -> None:
    life = opened(ASK)
    life.on(Event.APPEND, 0.0)
    for _ in range(RECALL_CHECKS):
        event = life.classify_recall(progress=True)
        assert life.on(event, 0.0) == (Effect.CHECK_RECALL_LATER,)
    assert life.classify_recall(progress=True) is Event.RECALL_IGNORED
    assert life.on(Event.RECALL_IGNORED, 0.0) == (Effect.REVOKE, Effect.CLOSE_LATER)
    assert life.on(Event.GRACE_OVER, 0.0)[-1] is Effect.CLOSE and not life.rolls
    idle = opened(ASK)
    idle.on(Event.IDLE, 0.0)
    assert idle.classify_recall(progress=False) is Event.RECALL_IGNORED


@pytest.mark.parametrize(
    ("events", "rolls"),
    [
        ((Event.FULL, Event.DRAINED), True),
        ((Event.IDLE, Event.DRAINED), False),
        ((Event.FULL, Event.LEFT), False),
        ((Event.FULL, Event.ROLLED_AWAY), False),
        ((Event.ABORTED, Event.GRACE_OVER), False),
        ((Event.ABORTED_FULL, Event.GRACE_OVER), True),
        ((Event.FULL, Event.ABORTED, Event.GRACE_OVER), True),
        ((Event.ABORTED_FULL, Event.LEFT), False),
    ],
)
def test_a_full_head_is_followed_by_a_fresh_file(events: tuple[Event, ...], rolls: bool) -> None:
    life = opened(SHARED)
    for event in events:
        effects = life.on(event, 0.0)
    assert life.state is State.CLOSING and effects[-1] is Effect.CLOSE
    assert life.rolls == rolls


def test_the_next_file_is_made_granted_and_becomes_the_head() -> None:
    life = opened(ASK)
    facts = {"wanted": False, "growing": False, "from_it": False}

    def ask() -> tuple[Effect, ...]:
        return life.on_next_file(life.classify_next_file(**facts))

    assert ask() == (Effect.MAKE_NEXT, Effect.WAIT)
    assert ask() == (Effect.WAIT,)
    assert life.on_next_file(NextFileEvent.MADE) == (Effect.SERVE,)
    assert ask() == (Effect.GRANT_NEXT,)
    life.on_next_file(NextFileEvent.GRANTED)
    assert ask() == (Effect.REFUSE_TWICE,)
    assert life.on(Event.NEXT_WRITTEN, 0.0) == (Effect.STOP_FOR_NEXT,)
    assert life.on(Event.STOPPED, 0.0) == (Effect.SUCCEED,)
    facts["from_it"] = True
    assert ask() == (Effect.WAIT,)
    life.on_next_file(NextFileEvent.BECAME_HEAD)
    assert life.on(life.classify_succession(begun=True, wanted=False), 0.0) == ()
    assert (life.state, life.next_file) == (State.EXCLUSIVE, NextFile.NONE)


@pytest.mark.parametrize("fact", ["wanted", "growing"])
def test_the_next_file_is_refused_where_it_would_be_in_the_way(fact: str) -> None:
    life = opened(ASK)
    facts = {"wanted": False, "growing": False, "from_it": False, fact: True}
    (effect,) = life.on_next_file(life.classify_next_file(**facts))
    assert effect is {"wanted": Effect.REFUSE_WANTED, "growing": Effect.REFUSE_GROWING}[fact]


@pytest.mark.parametrize(
    "state", [s for s in State if s.name not in ("EXCLUSIVE", "SUCCEEDING", "ABANDONED")]
)
def test_only_who_goes_on_alone_gets_the_next_file(state: State) -> None:
    life = life_in(state)
    event = life.classify_next_file(wanted=False, growing=False, from_it=False)
    assert life.on_next_file(event) == (Effect.REFUSE_WANTED,)


@pytest.mark.parametrize("wanted", [False, True])
def test_a_recall_follows_the_producer_into_the_next_file(wanted: bool) -> None:
    life = life_in(State.EXCLUSIVE, NextFile.GRANTED)
    if not wanted:  # it was wanted before
        life.on(Event.APPEND, 0.0)
    life.on(Event.NEXT_WRITTEN, 0.0)
    life.on(Event.STOPPED, 0.0)
    life.on_next_file(NextFileEvent.BECAME_HEAD)
    event = life.classify_succession(begun=True, wanted=wanted)
    assert life.on(event, 0.0) == (Effect.RECALL,)
    assert life.state is State.RECALLED


@pytest.mark.parametrize("why", [Event.NEXT_LEFT, Event.DELETE])
@pytest.mark.parametrize("wanted", [False, True])
def test_a_succession_that_is_not_wanted_any_more_ends_at_once(why: Event, wanted: bool) -> None:
    """Its producer is told, because what it wrote into the next file is not committed."""
    life = life_in(State.SUCCEEDING, NextFile.GRANTED)
    assert life.on(why, 0.0) == ()
    life.on_next_file(NextFileEvent.BECAME_HEAD)
    event = life.classify_succession(begun=True, wanted=wanted)
    assert life.on(event, 0.0) == (Effect.REVOKE, Effect.CLOSE)


def test_a_next_file_that_is_made_too_late_is_discarded() -> None:
    life = life_in(State.EXCLUSIVE, NextFile.BEING_MADE)
    life.on(Event.LEFT, 0.0)
    assert life.on_next_file(NextFileEvent.MADE) == (Effect.DISCARD_NEXT, Effect.SERVE)


def test_a_producer_that_is_gone_is_told_nothing() -> None:
    """Its ring may be gone, too."""
    life = life_in(State.EXCLUSIVE, NextFile.GRANTED)
    assert life.on(Event.LEFT, 0.0) == (Effect.STOP, Effect.DROP_NEXT_SILENTLY, Effect.CLOSE)
    life = life_in(State.EXCLUSIVE, NextFile.GRANTED)
    assert life.on(Event.FINISHED, 0.0) == (Effect.STOP, Effect.DROP_NEXT, Effect.CLOSE)


def test_heads_that_are_aborted_again_and_again_ban_producers_for_a_while() -> None:
    life = HeadLife()
    for i in range(ABORTS):
        assert life.held_off(False, float(i)) is None
        life.on(life.classify(SHARED, float(i)), float(i))
        life.on(Event.ABORTED, float(i))
        life.on(Event.GRACE_OVER, float(i))
        life.on(Event.CLOSED, float(i))
    now = float(ABORTS - 1)
    assert life.held_off(False, now) == (HoldOff.BANNED, HOLD_OFF_S)
    assert life.on(life.classify(SHARED, now), now) == (Effect.REFUSE_HELD_OFF,)
    assert life.held_off(False, now + HOLD_OFF_S) is None


def test_who_wants_to_be_alone_is_held_off_longer_each_time_that_kafka_clients_write() -> None:
    life, now, seconds = HeadLife(), 0.0, HOLD_OFF_S
    for _ in range(8):
        life.on(life.classify(ALONE, now), now)
        life.on(Event.APPEND, now)
        life.on(Event.FINISHED, now)
        life.on(Event.CLOSED, now)
        assert life.held_off(True, now) == (HoldOff.CONTENDED, min(seconds, HOLD_OFF_MAX_S))
        assert life.held_off(False, now) is None, "others may share it"
        now += min(seconds, HOLD_OFF_MAX_S)
        seconds *= 2
    now += 2 * HOLD_OFF_MAX_S
    life.on(life.classify(ALONE, now), now)
    life.on(Event.APPEND, now)
    assert life.held_off(True, now) == (HoldOff.CONTENDED, HOLD_OFF_S), "it was quiet for long"


def test_a_topic_that_is_made_again_has_no_history() -> None:
    life = opened(ALONE)
    life.on(Event.APPEND, 0.0)
    life.forget_history()
    assert life.held_off(True, 0.0) is None


def test_who_resigns_tells_producers_first_and_ends_their_keys_then() -> None:
    life = opened(SHARED)
    assert life.on(Event.RESIGN, 0.0) == (Effect.WITHDRAW, Effect.DROP_NEXT, Effect.CLOSE_LATER)
    assert life.on(life.classify(SHARED, 0.0), 0.0) == (Effect.REFUSE_NOT_LED,)
    assert life.on(Event.GRACE_OVER, 0.0)[-1] is Effect.CLOSE and not life.rolls
    assert life.on(Event.CLOSED, 0.0) == (Effect.FORGET, Effect.RESUME, Effect.REPORT_RESIGNED)
    assert life.on(life.classify(ASK, 0.0), 0.0) == (Effect.REFUSE_NOT_LED,)
    assert life.on(Event.RESIGN, 0.0) == ()
    assert life.on(Event.LEAD, 0.0) == (Effect.SERVE,)
    assert life.on(life.classify(ASK, 0.0), 0.0) == (Effect.OPEN, Effect.GRANT)


@pytest.mark.parametrize(
    ("state", "end"),
    [
        (State.MAKING_ROOM, Event.ROOM_MADE),
        (State.CLOSING, Event.CLOSED),
        (State.SUCCEEDING, Event.SUCCESSION_FAILED),
        (State.ABANDONED, Event.SUCCESSION_FAILED),
    ],
)
def test_who_resigns_waits_for_the_thread_that_is_at_work(state: State, end: Event) -> None:
    life = life_in(state)
    assert life.on(Event.RESIGN, 0.0) == ()
    assert life.on(Event.LEAD, 0.0) == (), "first it has to have resigned"
    assert life.on(end, 0.0)[-2:] == (Effect.RESUME, Effect.REPORT_RESIGNED)
    assert life.state is State.RESIGNED


@pytest.mark.parametrize("begun", [False, True])
def test_a_file_that_becomes_the_head_meanwhile_ends_with_the_leadership(begun: bool) -> None:
    life = life_in(State.SUCCEEDING, NextFile.GRANTED)
    life.on(Event.RESIGN, 0.0)
    life.on_next_file(NextFileEvent.BECAME_HEAD)
    event = life.classify_succession(begun=begun, wanted=False)
    assert life.on(event, 0.0) == (Effect.WITHDRAW, Effect.CLOSE)
    assert life.state is State.RESIGNING


def test_a_head_that_ends_when_the_broker_resigns_ends_once() -> None:
    """The moment that producers have is over once."""
    life = opened(SHARED)
    life.on(Event.ABORTED, 0.0)
    assert life.on(Event.RESIGN, 0.0) == (Effect.WITHDRAW,)
    assert life.on(Event.GRACE_OVER, 0.0)[-1] is Effect.CLOSE
    assert life.on(Event.GRACE_OVER, 0.0) == ()


def test_a_partition_that_is_deleted_while_the_broker_resigns_is_free() -> None:
    life = life_in(State.DELETING)
    assert life.on(Event.RESIGN, 0.0) == ()
    assert life.on(Event.DELETED, 0.0) == (Effect.FORGET, Effect.REPORT_RESIGNED)
    assert life.state is State.NOBODY
    life = life_in(State.DELETING)
    life.on(Event.RESIGN, 0.0)
    assert life.on(Event.DELETION_FAILED, 0.0) == (Effect.WITHDRAW, Effect.CLOSE)
    life.on(Event.CLOSED, 0.0)
    assert life.state is State.RESIGNED
