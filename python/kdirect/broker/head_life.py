"""Who may write a partition's head, and what follows from what happens to it: pure decisions
(KafkaDirect §4.2.2).

Law of the room: (state, event, now) in, (state, effects) out.  No I/O, no clock, no lock, no
knowledge of queue pairs, files or requests.  `kdirect.broker.produce_access` drives it: it turns
what happens into events, and carries out the effects.

One `HeadLife` stands for one partition and outlives its heads.  `TRANSITIONS` is the whole machine
for the head, `NEXT_FILE_TRANSITIONS` that for the file which is granted ahead to the producer that
fills the head.  A pair that is in neither table cannot happen, or means nothing: then the state
stays and there are no effects.

    NOBODY ------ a producer asks, no room -------> MAKING_ROOM ---- room made, or not ----> NOBODY
    NOBODY ------ a producer asks ---------------> EXCLUSIVE, or SHARED
    EXCLUSIVE --- somebody else wants it, or it is idle ---------------------------------> RECALLED
    EXCLUSIVE, RECALLED --- the next file is written to ---> SUCCEEDING ---> EXCLUSIVE, or RECALLED
    SHARED ------ full, or idle ---------------------------------------------------------> DRAINING
    any of these  a hole, damage, a recall that is not heeded -----------------------------> ENDING
    any of these, and ENDING --- drained, left, sealed, time is up ------> CLOSING ------> NOBODY
    any of these  too few replicas are in sync for a producer that waits for them -------> ENDING
    any of these, and ENDING --- the topic is about to be deleted ------> DELETING ------> NOBODY
    DELETING ---- the topic could not be deleted -----------------------> CLOSING -------> NOBODY
    any of these  this broker does not lead any more --> LEAVING --> RESIGNING --> RESIGNED
    RESIGNED ---- this broker leads again -------------------------------------------------> NOBODY

What each state means is written at its name in `State`.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from typing import NamedTuple

SHARED_S = 10.0  # after a partition had several producers, the next head is shared at once
HOLD_OFF_S = 1.0  # how long a partition is not granted at first, after what `HoldOff` says
HOLD_OFF_MAX_S = 30.0
ABORTS = 5  # so many heads that were aborted
ABORTS_WITHIN_S = 10.0  # within this time ban RDMA producers from the partition for a while
RECALL_CHECKS = 100


class State(Enum):
    """Who may write the head, or why nobody may."""

    NOBODY = "no RDMA producer has access; Kafka clients are appended to the head directly"
    MAKING_ROOM = "a thread makes a head with the room that a producer asked for"
    EXCLUSIVE = "one producer writes the head; Kafka clients wait, markers may come between"
    RECALLED = "that producer was asked to finish what it has under way, and to come back"
    SHARED = "any number of producers reserve on the head's word; the broker does for Kafka clients"
    DRAINING = "the word is closed; the head ends when everything reserved is committed"
    ENDING = "nothing is committed any more; producers have a moment to stop before their keys end"
    CLOSING = "a thread ends the keys and repairs the file, or moves the log to a fresh one"
    SUCCEEDING = "a thread seals the head and puts the file that was granted ahead in its place"
    ABANDONED = "the same, but the next head ends at once: its producer or the topic is gone"
    DELETING = "the topic is being deleted, and the deletion ends the keys"
    LEAVING = "another broker is to lead; producers have a moment to stop before their keys end"
    RESIGNING = "another broker is to lead; a thread is still at work with the head, or its end"
    RESIGNED = "another broker leads: nobody has access, and nobody is given it"


# Producers may hold a key to the head in these states, and no thread is at work with its end.
GRANTED = frozenset(
    {
        State.EXCLUSIVE,
        State.RECALLED,
        State.SHARED,
        State.DRAINING,
        State.ENDING,
        State.LEAVING,
    }
)

# Another broker leads the partition, or is to.
LED_ELSEWHERE = frozenset({State.LEAVING, State.RESIGNING, State.RESIGNED})


class NextFile(Enum):
    """The file that is granted ahead to the producer of an exclusive head."""

    NONE = "there is none"
    BEING_MADE = "a thread makes it"
    MADE = "it can be granted"
    GRANTED = "the producer may write it; nothing in it is committed before it is the head"


class Mode(Enum):
    """In which way producers hold the present head."""

    ALONE = "one producer, which asked to be alone"
    EXCLUSIVE = "one producer, until another comes"
    SHARED = "any number of producers"


class EndReason(Enum):
    """Why a head was recalled, is drained or ends."""

    NONE = "it goes on"
    WANTED = "somebody else wants to write, too"
    IDLE = "nothing was written for a while"
    FULL = "it takes no more records"
    BROKEN = "a request is missing or damaged"
    LEFT = "its producers are done with it, or gone"
    SEALED = "a thread seals it, by time or for retention"
    DELETED = "the topic is being deleted"
    SUCCEEDED = "the next file is the head now, and its producer is gone"
    RESIGNED = "another broker is to lead the partition"
    TOO_FEW = "a producer waits for replicas, and too few are in sync to commit anything"


class HoldOff(Enum):
    """Why a partition is not granted for a while."""

    BANNED = "shared writes to it failed again and again"
    CONTENDED = "Kafka clients write it"


class Event(Enum):
    """What happens to a head.  Those up to OPEN_SHARED are requests for access, which
    `HeadLife.classify` distinguishes."""

    REQUEST = auto()  # a producer asks that takes the head together with others
    REQUEST_ALONE = auto()  # the one that asks or the one that holds the head wants to be alone
    REQUEST_ELSEWHERE = auto()  # ... over another transport: the word's atomics would not be atomic
    REQUEST_FULL = auto()  # ... and the head has no byte left to grant
    OPEN_HELD_OFF = auto()  # a producer asks while nobody has access, and is refused for a while
    OPEN_BUSY = auto()  # ... while a thread is at work with the head
    OPEN_NO_ROOM = auto()  # ... but the head has no room
    OPEN_ALONE = auto()
    OPEN_EXCLUSIVE = auto()
    OPEN_SHARED = auto()
    OPEN_FAILED = auto()  # a head that was to be granted could not be prepared for it
    ROOM_MADE = auto()  # a thread has made room, or could not
    APPEND = auto()  # a Kafka client appends
    MARKER = auto()  # a coordinator's marker of a transaction is to be appended
    # ... while the exclusive producer is between two transactions, and writes nothing
    MARKER_BETWEEN = auto()
    FULL = auto()  # a reservation has passed the end of a shared head
    FINISHED = auto()  # the exclusive producer has filled the head, and asks for the next
    LEFT = auto()  # the last producer of the head released it, or is gone
    ONE_LOST = auto()  # one producer of a shared head is gone without saying so; others remain
    IDLE = auto()  # nobody has written for a while what may be given back to the disk
    DRAINED = auto()  # the worker: everything reserved is committed
    ABORTED = auto()  # the worker: a hole is too old, or a request is damaged
    ABORTED_FULL = auto()  # the worker: a request found no room
    RECALL_HEEDED = auto()  # since the last check the recalled producer has written on
    RECALL_IGNORED = auto()  # ... it has not: it is idle, stopped, or gone
    GRACE_OVER = auto()  # producers had their moment
    ROLLED_AWAY = auto()  # a thread is about to seal the head for a reason of its own
    NEXT_WRITTEN = auto()  # the producer's first request in the file that was granted ahead
    STOPPED = auto()  # the worker commits nothing more of the head before it
    NEXT_LEFT = auto()  # the producer of that file released it, or is gone
    NEXT_IS_HEAD = auto()  # the thread is done: that file is the head
    NEXT_IS_WANTED = auto()  # ... and somebody else wants to write, too
    NEXT_HAS_ENDED = auto()  # ... but nothing of it is committed
    SUCCESSION_FAILED = auto()  # ... it could not become the head
    DELETE = auto()  # the topic is about to be deleted
    DELETED = auto()  # it is deleted
    DELETION_FAILED = auto()  # it could not be deleted, and its partitions go on
    CLOSED = auto()  # the thread that ended the head is done
    # fewer replicas are in sync than min.insync.replicas, and a producer of the head has acks=all
    TOO_FEW = auto()
    RESIGN = auto()  # this broker does not lead the partition any more
    LEAD = auto()  # it leads again


class NextFileEvent(Enum):
    """What happens to the file that is granted ahead."""

    ASKED = auto()  # the producer that fills the head asks for it
    ASKED_WHILE_WANTED = auto()  # ... but others want to write, or the head ends
    ASKED_WHILE_GROWING = auto()  # ... but the head itself can still grow
    ASKED_FROM_IT = auto()  # the producer of that file asks for the one after it
    MADE = auto()
    FAILED = auto()
    GRANTED = auto()
    DROPPED = auto()  # the head ends otherwise
    BECAME_HEAD = auto()


class Effect(Enum):
    """What the driver does, in the order in which a row names them."""

    # answers to a request for access, or to an append
    GRANT = auto()
    WAIT = auto()
    REFUSE_HELD = auto()
    REFUSE_ELSEWHERE = auto()
    REFUSE_HELD_OFF = auto()
    REFUSE_WANTED = auto()
    REFUSE_GROWING = auto()
    REFUSE_TWICE = auto()
    REFUSE_NOT_LED = auto()
    RESERVE = auto()  # on the word, for a Kafka client
    INSERT = auto()  # a marker, at the tail of a head whose producer writes nothing
    # what is done to the head
    OPEN = auto()  # hold the partition, and let the worker take requests for the head
    MAKE_ROOM = auto()  # on a thread
    RECALL = auto()  # tell the holder through its ring, and check on it later
    CHECK_RECALL_LATER = auto()
    DRAIN = auto()  # close the word, and be told when everything reserved is committed
    EXPIRE_HOLE = auto()  # the hole that a lost producer left is waited for a moment only
    STOP = auto()  # the worker commits nothing more; producers know, or are gone
    REVOKE = auto()  # the same, and producers are told through their rings
    WITHDRAW = auto()  # as REVOKE; what waits to be acknowledged is not; close the word
    FAIL_WAITING = auto()  # as WITHDRAW, but only what waits for replicas is not acknowledged
    REPORT_CUT = auto()  # the worker has told the producers; close the word
    CLOSE_LATER = auto()  # once producers had a moment to notice
    CLOSE = auto()  # on a thread: end keys, repair the file or move the log to a fresh one
    FORGET = auto()  # the head's access; what the broker itself had reserved waits again
    RESUME = auto()  # let the partition be appended to, and look at who waits for access
    REPORT_RESIGNED = auto()  # no producer can write a byte that is or will be committed
    # the file that is granted ahead
    MAKE_NEXT = auto()  # on a thread
    GRANT_NEXT = auto()
    DISCARD_NEXT = auto()  # a file that was made for nothing
    FAIL_NEXT = auto()  # refuse those who wait for it
    SERVE = auto()  # look at who waits for access
    DROP_NEXT = auto()  # tell its producer that nothing of it is committed; end keys, remove it
    DROP_NEXT_SILENTLY = auto()  # the same, when the producer is gone, and with it perhaps its ring
    STOP_FOR_NEXT = auto()  # as STOP; STOPPED follows, unless the head has ended meanwhile
    SUCCEED = auto()  # on a thread: seal the head, put the next file in its place
    END_NEXT = auto()  # forget a next file that could not become the head


class Row(NamedTuple):
    """What one event does in one state.  `reason` None: as before."""

    state: State
    effects: tuple[Effect, ...] = ()
    reason: EndReason | None = None


class NextFileRow(NamedTuple):
    state: NextFile
    effects: tuple[Effect, ...] = ()


S, E, X = State, Event, Effect
_CLOSE = (X.STOP, X.DROP_NEXT, X.CLOSE)
_LEFT = (X.STOP, X.DROP_NEXT_SILENTLY, X.CLOSE)
_CUT = (X.REPORT_CUT, X.CLOSE_LATER)
_WAIT_FOR_IT = (X.RECALL, X.WAIT)
_WITHDRAW = (X.WITHDRAW, X.DROP_NEXT, X.CLOSE_LATER)
_FAIL = (X.FAIL_WAITING, X.DROP_NEXT, X.CLOSE_LATER)
_RESIGNED = (X.RESUME, X.REPORT_RESIGNED)


def _ends(state: State) -> dict[tuple[State, Event], Row]:
    """The ways in which every head ends to which producers have keys."""
    return {
        (state, E.LEFT): Row(S.CLOSING, _LEFT, EndReason.LEFT),
        (state, E.ROLLED_AWAY): Row(S.CLOSING, _CLOSE, EndReason.SEALED),
        (state, E.DELETE): Row(S.DELETING, (X.DROP_NEXT,), EndReason.DELETED),
        (state, E.TOO_FEW): Row(S.ENDING, _FAIL, EndReason.TOO_FEW),
        (state, E.RESIGN): Row(S.LEAVING, _WITHDRAW, EndReason.RESIGNED),
    }


def _is_led_elsewhere(state: State) -> dict[tuple[State, Event], Row]:
    """A state in which another broker is the one to ask."""
    requests = (E.REQUEST, E.REQUEST_ALONE, E.REQUEST_ELSEWHERE, E.REQUEST_FULL)
    return {
        **{(state, event): Row(state, (X.REFUSE_NOT_LED,)) for event in requests},
        # Where these are refused: `Appends.refuse`.
        **{(state, event): Row(state, (X.WAIT,)) for event in (E.APPEND, E.MARKER)},
    }


def _waits(state: State) -> dict[tuple[State, Event], Row]:
    """A state in which whoever wants to write waits."""
    requests = (E.REQUEST, E.REQUEST_ALONE, E.REQUEST_ELSEWHERE, E.REQUEST_FULL)
    appends = (E.APPEND, E.MARKER)
    return {(state, event): Row(state, (X.WAIT,)) for event in (*requests, *appends)}


def _refuses(state: State) -> dict[tuple[State, Event], Row]:
    """A state in which a producer that cannot share the head is refused."""
    return {
        (state, E.REQUEST_ALONE): Row(state, (X.REFUSE_HELD,)),
        (state, E.REQUEST_ELSEWHERE): Row(state, (X.REFUSE_ELSEWHERE,)),
    }


def _aborts(state: State, reason: EndReason = EndReason.BROKEN) -> dict[tuple[State, Event], Row]:
    return {
        (state, E.ABORTED): Row(S.ENDING, _CUT, reason),
        (state, E.ABORTED_FULL): Row(S.ENDING, _CUT, EndReason.FULL),
    }


def _exclusive(state: State) -> dict[tuple[State, Event], Row]:
    """What one producer that holds the head alone can do to it."""
    return {
        (state, E.FINISHED): Row(S.CLOSING, _CLOSE, EndReason.LEFT),
        (state, E.NEXT_WRITTEN): Row(state, (X.STOP_FOR_NEXT,)),
        (state, E.STOPPED): Row(S.SUCCEEDING, (X.SUCCEED,)),
        (state, E.NEXT_LEFT): Row(S.CLOSING, _CLOSE, EndReason.LEFT),
    }


TRANSITIONS: dict[tuple[State, Event], Row] = {
    (S.NOBODY, E.OPEN_HELD_OFF): Row(S.NOBODY, (X.REFUSE_HELD_OFF,)),
    (S.NOBODY, E.OPEN_BUSY): Row(S.NOBODY, (X.WAIT,)),
    (S.NOBODY, E.OPEN_NO_ROOM): Row(S.MAKING_ROOM, (X.MAKE_ROOM, X.WAIT)),
    (S.NOBODY, E.OPEN_ALONE): Row(S.EXCLUSIVE, (X.OPEN, X.GRANT), EndReason.NONE),
    (S.NOBODY, E.OPEN_EXCLUSIVE): Row(S.EXCLUSIVE, (X.OPEN, X.GRANT), EndReason.NONE),
    (S.NOBODY, E.OPEN_SHARED): Row(S.SHARED, (X.OPEN, X.GRANT), EndReason.NONE),
    (S.NOBODY, E.RESIGN): Row(S.RESIGNED, (X.REPORT_RESIGNED,)),
    #
    **_waits(S.MAKING_ROOM),
    (S.MAKING_ROOM, E.ROOM_MADE): Row(S.NOBODY, (X.RESUME,)),
    (S.MAKING_ROOM, E.RESIGN): Row(S.RESIGNING),
    #
    **_ends(S.EXCLUSIVE),
    **_refuses(S.EXCLUSIVE),
    **_aborts(S.EXCLUSIVE),
    **_exclusive(S.EXCLUSIVE),
    (S.EXCLUSIVE, E.OPEN_FAILED): Row(S.NOBODY),
    (S.EXCLUSIVE, E.REQUEST): Row(S.RECALLED, _WAIT_FOR_IT, EndReason.WANTED),
    (S.EXCLUSIVE, E.REQUEST_FULL): Row(S.RECALLED, _WAIT_FOR_IT, EndReason.WANTED),
    (S.EXCLUSIVE, E.APPEND): Row(S.RECALLED, _WAIT_FOR_IT, EndReason.WANTED),
    (S.EXCLUSIVE, E.MARKER): Row(S.RECALLED, _WAIT_FOR_IT, EndReason.WANTED),
    (S.EXCLUSIVE, E.MARKER_BETWEEN): Row(S.EXCLUSIVE, (X.INSERT,)),
    (S.EXCLUSIVE, E.IDLE): Row(S.RECALLED, (X.RECALL,), EndReason.IDLE),
    #
    **_waits(S.RECALLED),
    **_ends(S.RECALLED),
    **_refuses(S.RECALLED),
    **_aborts(S.RECALLED),
    **_exclusive(S.RECALLED),
    (S.RECALLED, E.RECALL_HEEDED): Row(S.RECALLED, (X.CHECK_RECALL_LATER,)),
    (S.RECALLED, E.RECALL_IGNORED): Row(S.ENDING, (X.REVOKE, X.CLOSE_LATER)),
    #
    **_ends(S.SHARED),
    **_refuses(S.SHARED),
    **_aborts(S.SHARED),
    (S.SHARED, E.OPEN_FAILED): Row(S.NOBODY),
    (S.SHARED, E.REQUEST): Row(S.SHARED, (X.GRANT,)),
    (S.SHARED, E.REQUEST_FULL): Row(S.DRAINING, (X.DRAIN, X.WAIT), EndReason.FULL),
    (S.SHARED, E.APPEND): Row(S.SHARED, (X.RESERVE,)),
    (S.SHARED, E.MARKER): Row(S.SHARED, (X.RESERVE,)),
    (S.SHARED, E.FULL): Row(S.DRAINING, (X.DRAIN,), EndReason.FULL),
    (S.SHARED, E.IDLE): Row(S.DRAINING, (X.DRAIN,), EndReason.IDLE),
    (S.SHARED, E.ONE_LOST): Row(S.SHARED, (X.EXPIRE_HOLE,)),
    #
    **_waits(S.DRAINING),
    **_ends(S.DRAINING),
    **_aborts(S.DRAINING, EndReason.FULL),
    (S.DRAINING, E.FULL): Row(S.DRAINING, (X.DRAIN,)),  # now somebody knows where it ends
    (S.DRAINING, E.ONE_LOST): Row(S.DRAINING, (X.EXPIRE_HOLE,)),
    (S.DRAINING, E.DRAINED): Row(S.CLOSING, _CLOSE),
    #
    **_waits(S.ENDING),
    **_ends(S.ENDING),
    (S.ENDING, E.FINISHED): Row(S.CLOSING, _CLOSE, EndReason.LEFT),
    (S.ENDING, E.NEXT_LEFT): Row(S.CLOSING, _CLOSE, EndReason.LEFT),
    (S.ENDING, E.GRACE_OVER): Row(S.CLOSING, _CLOSE),
    (S.ENDING, E.TOO_FEW): Row(S.ENDING, (X.FAIL_WAITING,)),
    (S.ENDING, E.RESIGN): Row(S.LEAVING, (X.WITHDRAW,), EndReason.RESIGNED),  # GRACE_OVER follows
    #
    **_waits(S.CLOSING),
    (S.CLOSING, E.CLOSED): Row(S.NOBODY, (X.FORGET, X.RESUME)),
    (S.CLOSING, E.RESIGN): Row(S.RESIGNING),
    #
    **_waits(S.SUCCEEDING),
    (S.SUCCEEDING, E.NEXT_LEFT): Row(S.ABANDONED),
    (S.SUCCEEDING, E.DELETE): Row(S.ABANDONED),
    (S.SUCCEEDING, E.TOO_FEW): Row(S.ABANDONED, (X.FAIL_WAITING,)),
    (S.SUCCEEDING, E.RESIGN): Row(S.RESIGNING),
    (S.SUCCEEDING, E.NEXT_IS_HEAD): Row(S.EXCLUSIVE, (), EndReason.NONE),
    (S.SUCCEEDING, E.NEXT_IS_WANTED): Row(S.RECALLED, (X.RECALL,), EndReason.WANTED),
    (S.SUCCEEDING, E.NEXT_HAS_ENDED): Row(S.CLOSING, (X.REVOKE, X.CLOSE), EndReason.SUCCEEDED),
    (S.SUCCEEDING, E.SUCCESSION_FAILED): Row(S.NOBODY, (X.END_NEXT, X.FORGET, X.RESUME)),
    #
    **_waits(S.ABANDONED),
    (S.ABANDONED, E.RESIGN): Row(S.RESIGNING),
    (S.ABANDONED, E.NEXT_IS_HEAD): Row(S.CLOSING, (X.REVOKE, X.CLOSE), EndReason.SUCCEEDED),
    (S.ABANDONED, E.NEXT_IS_WANTED): Row(S.CLOSING, (X.REVOKE, X.CLOSE), EndReason.SUCCEEDED),
    (S.ABANDONED, E.NEXT_HAS_ENDED): Row(S.CLOSING, (X.REVOKE, X.CLOSE), EndReason.SUCCEEDED),
    (S.ABANDONED, E.SUCCESSION_FAILED): Row(S.NOBODY, (X.END_NEXT, X.FORGET, X.RESUME)),
    #
    **_waits(S.DELETING),
    (S.DELETING, E.DELETED): Row(S.NOBODY, (X.FORGET,)),
    # The file stays the head, with what producers have written past its tail.
    (S.DELETING, E.DELETION_FAILED): Row(S.CLOSING, (X.REVOKE, X.CLOSE)),
    (S.DELETING, E.RESIGN): Row(S.RESIGNING),
    #
    **_is_led_elsewhere(S.LEAVING),
    (S.LEAVING, E.LEFT): Row(S.RESIGNING, _LEFT),
    (S.LEAVING, E.FINISHED): Row(S.RESIGNING, _CLOSE),
    (S.LEAVING, E.ROLLED_AWAY): Row(S.RESIGNING, _CLOSE),
    (S.LEAVING, E.DELETE): Row(S.RESIGNING, _CLOSE),
    (S.LEAVING, E.GRACE_OVER): Row(S.RESIGNING, _CLOSE),
    #
    # Each event is the end of what the thread was at when this state was entered.
    **_is_led_elsewhere(S.RESIGNING),
    (S.RESIGNING, E.CLOSED): Row(S.RESIGNED, (X.FORGET, *_RESIGNED)),
    (S.RESIGNING, E.ROOM_MADE): Row(S.RESIGNED, _RESIGNED),
    (S.RESIGNING, E.NEXT_IS_HEAD): Row(S.RESIGNING, (X.WITHDRAW, X.CLOSE)),
    (S.RESIGNING, E.NEXT_IS_WANTED): Row(S.RESIGNING, (X.WITHDRAW, X.CLOSE)),
    (S.RESIGNING, E.NEXT_HAS_ENDED): Row(S.RESIGNING, (X.WITHDRAW, X.CLOSE)),
    (S.RESIGNING, E.SUCCESSION_FAILED): Row(S.RESIGNED, (X.END_NEXT, X.FORGET, *_RESIGNED)),
    (S.RESIGNING, E.DELETED): Row(S.NOBODY, (X.FORGET, X.REPORT_RESIGNED)),
    (S.RESIGNING, E.DELETION_FAILED): Row(S.RESIGNING, (X.WITHDRAW, X.CLOSE)),
    #
    **_is_led_elsewhere(S.RESIGNED),
    (S.RESIGNED, E.LEAD): Row(S.NOBODY, (X.SERVE,)),
}

N, F = NextFile, NextFileEvent
NEXT_FILE_TRANSITIONS: dict[tuple[NextFile, NextFileEvent], NextFileRow] = {
    **{(n, F.ASKED_WHILE_WANTED): NextFileRow(n, (X.REFUSE_WANTED,)) for n in N},
    **{(n, F.ASKED_WHILE_GROWING): NextFileRow(n, (X.REFUSE_GROWING,)) for n in N},
    **{(n, F.ASKED_FROM_IT): NextFileRow(n, (X.WAIT,)) for n in N},
    **{(n, F.DROPPED): NextFileRow(N.NONE) for n in N},
    (N.NONE, F.ASKED): NextFileRow(N.BEING_MADE, (X.MAKE_NEXT, X.WAIT)),
    (N.NONE, F.MADE): NextFileRow(N.NONE, (X.DISCARD_NEXT, X.SERVE)),
    (N.NONE, F.FAILED): NextFileRow(N.NONE, (X.SERVE,)),
    (N.BEING_MADE, F.ASKED): NextFileRow(N.BEING_MADE, (X.WAIT,)),
    (N.BEING_MADE, F.MADE): NextFileRow(N.MADE, (X.SERVE,)),
    (N.BEING_MADE, F.FAILED): NextFileRow(N.NONE, (X.FAIL_NEXT, X.SERVE)),
    (N.MADE, F.ASKED): NextFileRow(N.MADE, (X.GRANT_NEXT,)),
    (N.MADE, F.GRANTED): NextFileRow(N.GRANTED),
    (N.GRANTED, F.ASKED): NextFileRow(N.GRANTED, (X.REFUSE_TWICE,)),
    (N.GRANTED, F.BECAME_HEAD): NextFileRow(N.NONE),
}


class Room(Enum):
    """What there is for a producer that asks while nobody has access."""

    BUSY = auto()  # a thread is at work with the head, or appends wait
    NONE = auto()
    ENOUGH = auto()


class Ask(NamedTuple):
    """A request for access.  `same_transport`, `full` are of the present head, `room` counts where
    there is none."""

    alone: bool  # it wants no other producer
    shared: bool  # it wants others to be let in
    same_transport: bool = True
    full: bool = False
    room: Room = Room.BUSY
    # It is transactional, and the one that holds the head alone is between two transactions.
    in_turn: bool = False


_MODES = {
    Event.OPEN_ALONE: Mode.ALONE,
    Event.OPEN_EXCLUSIVE: Mode.EXCLUSIVE,
    Event.OPEN_SHARED: Mode.SHARED,
}


class HeadLife:
    """See the module.  `on` and `on_next_file` change the state and return the effects; `now` is
    in seconds and never goes back."""

    __slots__ = (
        "_aborts",
        "_checks_left",
        "_held_off",
        "_shared_until",
        "mode",
        "next_file",
        "reason",
        "state",
    )

    def __init__(self) -> None:
        self.state = State.NOBODY
        self.mode = Mode.EXCLUSIVE
        self.reason = EndReason.NONE
        self.next_file = NextFile.NONE
        self._checks_left = 0
        self.forget_history()

    def forget_history(self) -> None:
        """Forget what has happened to heads of the partition: a new topic of its name may come."""
        self._shared_until = float("-inf")
        self._held_off: dict[HoldOff, tuple[float, float]] = {}  # (until, for how long that was)
        self._aborts: deque[float] = deque(maxlen=ABORTS)

    @property
    def is_granted(self) -> bool:
        """Producers may hold a key to the head, and no thread is at work with its end."""
        return self.state in GRANTED

    @property
    def rolls(self) -> bool:
        """Is the head followed by a fresh file when it is closed?"""
        return self.reason is EndReason.FULL

    def on(self, event: Event, now: float) -> tuple[Effect, ...]:
        row = TRANSITIONS.get((self.state, event))
        if event in (Event.APPEND, Event.MARKER):
            self._shared_until = now + SHARED_S
            # A marker does not say that somebody else writes the partition.
            if event is Event.APPEND and self.mode is Mode.ALONE and row is not None:
                self._hold_off(HoldOff.CONTENDED, now)
        if row is None:
            return ()
        self._remember(event, row, now)
        self.state = row.state
        if row.reason is not None:
            self.reason = row.reason
        if Effect.DROP_NEXT in row.effects or Effect.DROP_NEXT_SILENTLY in row.effects:
            self.on_next_file(NextFileEvent.DROPPED)
        return row.effects

    def _remember(self, event: Event, row: Row, now: float) -> None:
        """What later decisions follow from."""
        if event in _MODES:
            self.mode = _MODES[event]
        elif event is Event.RECALL_HEEDED:
            self._checks_left -= 1
        elif event in (Event.ABORTED, Event.ABORTED_FULL):
            self._aborts.append(now)
            if len(self._aborts) == ABORTS and now - self._aborts[0] < ABORTS_WITHIN_S:
                self._hold_off(HoldOff.BANNED, now)
                self._aborts.clear()
        if Effect.RECALL in row.effects:
            self._checks_left = RECALL_CHECKS
            if row.reason is EndReason.WANTED:
                self._shared_until = now + SHARED_S

    def on_next_file(self, event: NextFileEvent) -> tuple[Effect, ...]:
        row = NEXT_FILE_TRANSITIONS.get((self.next_file, event))
        if row is None:
            return ()
        self.next_file = row.state
        return row.effects

    # -- which event it is -------------------------------------------------------------------------

    def classify(self, ask: Ask, now: float) -> Event:
        """Which event a request for access is."""
        if self.state is State.NOBODY:
            return self._classify_open(ask, now)
        if ask.in_turn and ask.alone and self.state is State.EXCLUSIVE:
            return Event.REQUEST  # so that nobody waits for a producer that is fenced, and idle
        if ask.alone or self.mode is Mode.ALONE:
            return Event.REQUEST_ALONE
        if not ask.same_transport:
            return Event.REQUEST_ELSEWHERE
        return Event.REQUEST_FULL if ask.full else Event.REQUEST

    def _classify_open(self, ask: Ask, now: float) -> Event:
        if self.held_off(ask.alone, now) is not None:
            return Event.OPEN_HELD_OFF
        if ask.room is not Room.ENOUGH:
            return Event.OPEN_BUSY if ask.room is Room.BUSY else Event.OPEN_NO_ROOM
        if ask.shared or (not ask.alone and now < self._shared_until):
            return Event.OPEN_SHARED
        return Event.OPEN_ALONE if ask.alone else Event.OPEN_EXCLUSIVE

    def classify_marker(self, *, fits_between: bool) -> Event:
        """Which event a marker is.  `fits_between`: the exclusive producer is between two
        transactions, and the head has room for the marker."""
        inserted = fits_between and self.state is State.EXCLUSIVE
        return Event.MARKER_BETWEEN if inserted else Event.MARKER

    def classify_next_file(self, *, wanted: bool, growing: bool, from_it: bool) -> NextFileEvent:
        """Which event a request for the next file is.  `wanted`: others wait to write; `from_it`:
        the producer asks from the next file, for the one after it."""
        writing = (State.EXCLUSIVE, State.SUCCEEDING, State.ABANDONED)
        if wanted or self.state not in writing or self.reason is not EndReason.NONE:
            return NextFileEvent.ASKED_WHILE_WANTED
        if growing:
            return NextFileEvent.ASKED_WHILE_GROWING
        return NextFileEvent.ASKED_FROM_IT if from_it else NextFileEvent.ASKED

    def classify_recall(self, *, progress: bool) -> Event:
        """Which event a check of a recalled producer is.  `progress`: it has committed something
        since the last one."""
        heeded = progress and self._checks_left > 0
        return Event.RECALL_HEEDED if heeded else Event.RECALL_IGNORED

    def classify_succession(self, *, begun: bool, wanted: bool) -> Event:
        """Which event the end of a succession is.  `begun`: the worker commits what has arrived in
        the next head; `wanted`: others wait to write."""
        if not begun:
            return Event.NEXT_HAS_ENDED
        recalled = self.reason in (EndReason.WANTED, EndReason.IDLE)
        return Event.NEXT_IS_WANTED if wanted or recalled else Event.NEXT_IS_HEAD

    # -- what is not granted for a while -----------------------------------------------------------

    def held_off(self, alone: bool, now: float) -> tuple[HoldOff, float] | None:
        """Why a producer is not granted the partition, and for how many seconds more; None: it may
        be.  A ban is for all, what Kafka clients write is kept from those who want it alone."""
        for why in (HoldOff.BANNED, HoldOff.CONTENDED) if alone else (HoldOff.BANNED,):
            until, _ = self._held_off.get(why, (float("-inf"), 0.0))
            if now < until:
                return why, until - now
        return None

    def _hold_off(self, why: HoldOff, now: float) -> None:
        """For a second at first, twice as long each time it happens again soon."""
        until, seconds = self._held_off.get(why, (float("-inf"), 0.0))
        again = now < until + 2 * seconds
        seconds = min(2 * seconds, HOLD_OFF_MAX_S) if again else HOLD_OFF_S
        self._held_off[why] = (now + seconds, seconds)
