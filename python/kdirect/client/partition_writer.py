"""What a producer does about one partition: the states of its way to the broker, without I/O.

Owns: the decision what happens to requests when access is granted, refused, recalled or lost, when
the broker is away and when their time is over; and the *backlog*, requests that are to be repeated
and have found no room yet, oldest first.  What may not enter: connections, clocks, waiting.  Events
come with the time, and effects are returned for `kdirect.client.produce_driver` to carry out.

The states, and what leads from one to another:

    IDLE ── Needed ──> OPENING ── Opened ──> DIRECT or TCP
                          └── OpenFailed ──> IDLE, and the caller is told; or LOST, where another
                                             broker is to lead the partition
    DIRECT ── GiveBack ──> LEAVING ── Looked, all answered ──> IDLE
    DIRECT, LEAVING ── Returned ──> the same, if the grant goes on;
                                    LOST, if something is under way or the queue pair broke; IDLE
    TCP ── DirectWanted, Drained ──> OPENING
    LOST ── Looked, Reached ──> REOPENING ── Opened ──> DIRECT or TCP
                                    └── OpenFailed ──> LOST; or IDLE, when the time is over, and
                                                     where a holder keeps a transaction off
    each of them ── Expired ──> IDLE        each of them ── Closing ──> CLOSED

While a way is opened, the thread that opens it may come back to the partition: in a signal handler
that flushes, purges or closes the producer.  OPENING and REOPENING know what such a call may want,
and CLOSED what an opening may come to that began before; REOPENING stays when its backlog expires.

TCP is the state of a partition that is written by Kafka's Produce requests, whether these travel
over TCP or, with `produce.path=send`, in SENDs: the appender differs, the decisions do not.

`TABLE` holds every event that a state knows, the method that handles it, and the states that may
follow.  Any other event is an error of the driver.  A record on the happy path is no event: the
machine is asked when something does not go as it should, or changes.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kdirect.client.idempotence import ProducerIdentity
from kdirect.client.lost_broker import has_moved
from kdirect.errors import (
    AccessDeniedError,
    BrokerUnavailableError,
    ClosedError,
    CorruptBatchError,
    DeliveryError,
    KdirectError,
    QueuePairError,
    TimedOutError,
)
from kdirect.format.batch import iterate_batches
from kdirect.format.error_codes import ErrorCode, error_kind
from kdirect.wire.connection import broker_error

# Between two attempts to reach a partition that was lost.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 1.0
MOVED_PAUSE_S = 0.1  # the longest, where another broker leads it, or will in a moment
DIRECT_RETRY_S = 1.0  # until RDMA is tried again, where it was refused
# How often in a row requests are repeated that the broker refuses for a transient reason.
REFUSALS = 5

# What is repeated of a request: its bytes, how many records they are, its tag.
Request = tuple[Any, int, Any]
# A request that the broker refused: the same, and Kafka's error code.
Refused = tuple[Any, int, Any, int]

# Errors after which a lost partition is looked for again.
TRANSIENT = (
    AccessDeniedError,
    BrokerUnavailableError,
    ClosedError,
    QueuePairError,
    TimedOutError,
)
_OUT_OF_SEQUENCE = (ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, ErrorCode.INVALID_PRODUCER_EPOCH)


class State(enum.Enum):
    """See the module."""

    IDLE = "idle"  # no way is open, and nothing is under way
    OPENING = "opening"
    DIRECT = "direct"  # over RDMA
    LEAVING = "leaving"  # over RDMA, to be given back once everything is answered
    TCP = "tcp"  # by Produce requests
    LOST = "lost"  # no way for now; what was under way waits in the backlog
    REOPENING = "reopening"
    CLOSED = "closed"


class Way(enum.Enum):
    """What was opened."""

    DIRECT = "direct"
    TCP = "tcp"


# -- events ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Needed:
    """Somebody has a request for the partition, or wants to know how it is written."""

    timeout_ms: float | None = None  # for the broker's grant; None: request.timeout.ms


@dataclass(frozen=True, slots=True)
class Opened:
    """The effect `Open` succeeded.  `denied`: RDMA was asked for and refused."""

    way: Way
    denied: bool = False


@dataclass(frozen=True, slots=True)
class OpenFailed:
    """The effect `Open` failed.  `final`: the session is closed, so no attempt will succeed.
    `elsewhere`: the broker was lost, and another one may lead the partition soon."""

    error: KdirectError
    final: bool = False
    elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class Reached:
    """The effect `Probe` found that the broker answers."""


@dataclass(frozen=True, slots=True)
class Unreached:
    """The effect `Probe` found that the broker does not answer."""

    error: KdirectError
    final: bool = False


@dataclass(frozen=True, slots=True)
class Returned:
    """The requests of an appender that cannot go on as it is, in the order they were sent in.

    `refused` were answered with an error; `unanswered` were not answered, and come after them.
    `accepted`: requests that the appender has had acknowledged so far.  `grant_lasts`: only the
    refused requests stand in the way.  `broken`: the queue pair or its connection ended.
    `doubted`: the queue pair was given up, for the broker did not answer over it."""

    refused: Sequence[Refused] = ()
    unanswered: Sequence[Request] = ()
    accepted: int = 0
    grant_lasts: bool = False
    broken: bool = False
    doubted: bool = False


@dataclass(frozen=True, slots=True)
class Looked:
    """Somebody looks at the answers.  `answered`: everything that was sent is answered."""

    answered: bool = False


@dataclass(frozen=True, slots=True)
class Resent:
    """The oldest request of the backlog is on its way."""


@dataclass(frozen=True, slots=True)
class NotTaken:
    """The oldest request of the backlog can never be taken."""

    error: KdirectError


@dataclass(frozen=True, slots=True)
class DirectWanted:
    """Somebody wants to write by RDMA, if that can be had."""

    timeout_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Drained:
    """The effect `Drain` is over.  `answered`: everything that was sent is answered."""

    answered: bool
    timeout_ms: float | None = None


@dataclass(frozen=True, slots=True)
class GiveBack:
    """RDMA access is to be given back.  `answered`: everything that was sent is answered."""

    answered: bool


@dataclass(frozen=True, slots=True)
class Expired:
    """Nobody waits any longer for what is under way, which is in `returned`."""

    returned: Returned
    error: DeliveryError


@dataclass(frozen=True, slots=True)
class Closing:
    """The producer ends.  What was under way is in `returned`."""

    returned: Returned
    error: DeliveryError


# -- effects ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Open:
    """Open a way; over RDMA, if `direct` and it can be had.  Answer: Opened or OpenFailed."""

    direct: bool
    timeout_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """Does the broker answer?  Ask it if `doubted`.  Answer: Reached, Unreached, or none yet."""

    doubted: bool


@dataclass(frozen=True, slots=True)
class Close:
    """Give access back and free what the appender holds."""


@dataclass(frozen=True, slots=True)
class DropLink:
    """End the queue pair to the broker, for it does not answer over it."""


@dataclass(frozen=True, slots=True)
class Resend:
    """Send of the backlog what there is room for.  Answer: Resent or NotTaken for each."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Wait a moment until everything is answered.  Answer: Drained."""

    timeout_ms: float | None = None


@dataclass(frozen=True, slots=True)
class TakeBack:
    """Take back from the appender what is under way.  Answer: Expired, with this error."""

    error: DeliveryError


@dataclass(frozen=True, slots=True)
class Renew:
    """Begin a new sequence: what was sent before leaves a gap in the old one."""


@dataclass(frozen=True, slots=True)
class Tell:
    """One request failed for good."""

    tag: Any
    error: DeliveryError


@dataclass(frozen=True, slots=True)
class Raise:
    """The call that is at it fails."""

    error: KdirectError


Event = (
    Needed | Opened | OpenFailed | Reached | Unreached | Returned | Looked | Resent | NotTaken
    | DirectWanted | Drained | GiveBack | Expired | Closing
)  # fmt: skip
Effect = Open | Probe | Close | DropLink | Resend | Drain | TakeBack | Renew | Tell | Raise


class PartitionWriter:
    """See the module.  `name` of the partition; `timeout_ms`: delivery.timeout.ms.  A
    `transactional` producer is idempotent and begins no new sequence: after a gap the transaction
    can only be aborted.  So it can where another producer holds the partition: that one may wait
    for a partition of this transaction, and then one of the two has to give way."""

    def __init__(
        self, name: str, timeout_ms: float, *, idempotent: bool, transactional: bool = False
    ) -> None:
        self.state = State.IDLE
        self.backlog: deque[Request] = deque()
        self.deadline = math.inf  # when what is in the backlog has failed
        self.retry_at = 0.0  # LOST: no attempt before
        self.direct_retry_at: float | None = None  # None: RDMA was not refused
        self._name = name
        self._timeout_ms = timeout_ms
        self._idempotent = idempotent
        self._transactional = transactional
        self._renews = idempotent and not transactional
        self._pause = FIRST_PAUSE_S
        self._doubted = False  # the broker may not answer, so it is probed before anybody waits
        self._why: KdirectError | None = None  # the last attempt failed
        self._refusals = 0  # in a row
        self._accepted_before = 0  # requests that were acknowledged before them

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        """Go to the next state.  `now`: seconds on a clock that never goes back.

        LookupError when this state does not know the event."""
        row = TABLE[self.state].get(type(event))
        if row is None:
            raise LookupError(f"{self._name}: {event} in state {self.state.name}")
        handle, following = row
        effects = handle(self, event, now)
        assert self.state in following, f"{self._name}: {event} led to {self.state.name}"
        return effects

    @property
    def backlog_records(self) -> int:
        """Records in the backlog."""
        return sum(records for _, records, _ in self.backlog)

    # -- opening -----------------------------------------------------------------------------------

    def _open(self, event: Needed, now: float) -> Sequence[Effect]:
        self.state = State.OPENING
        return (Open(self._may_be_direct(now), event.timeout_ms),)

    def _may_be_direct(self, now: float) -> bool:
        return self.direct_retry_at is None or now >= self.direct_retry_at

    def _opened(self, event: Opened, now: float) -> Sequence[Effect]:
        self.state = State.DIRECT if event.way is Way.DIRECT else State.TCP
        self._refusals = self._accepted_before = 0
        if event.denied:
            self.direct_retry_at = now + DIRECT_RETRY_S
        return self._resend()

    def _resend(self) -> Sequence[Effect]:
        if self.backlog:
            return (Resend(),)
        self.deadline = math.inf
        return ()

    def _open_failed(self, event: OpenFailed, now: float) -> Sequence[Effect]:
        if (has_moved(event.error) or event.elsewhere) and not event.final:
            self.state = State.LOST
            self._why, self._pause = event.error, FIRST_PAUSE_S
            self._doubted = event.elsewhere
            self.retry_at = now + self._pause
            return ()
        self.state = State.IDLE
        return (Raise(event.error),)

    def _opened_late(self, event: Opened, now: float) -> Sequence[Effect]:
        closed = ClosedError("the producer is closed", hint="make a new one")
        return (DropLink(), Close(), Raise(closed))

    def _open_failed_late(self, event: OpenFailed, now: float) -> Sequence[Effect]:
        return (Raise(event.error),)

    # -- written -----------------------------------------------------------------------------------

    def _resent(self, event: Resent, now: float) -> Sequence[Effect]:
        self.backlog.popleft()
        if not self.backlog:
            self.deadline = math.inf
        return ()

    def _not_taken(self, event: NotTaken, now: float) -> Sequence[Effect]:
        error = event.error
        if not isinstance(error, DeliveryError):
            error = DeliveryError(
                f"{self._name}: not delivered again: {error.message}",
                hint=error.hint,
                maybe_committed=True,
            )
        tag = self.backlog[0][2]
        self._resent(Resent(), now)
        return (Tell(tag, error),)

    def _look(self, event: Looked, now: float) -> Sequence[Effect]:
        if self.backlog:
            return (TakeBack(self.overdue()),) if now >= self.deadline else (Resend(),)
        if self.state is State.LEAVING and event.answered:
            self.state = State.IDLE
            return (Close(),)
        return ()

    def overdue(self, refusal: KdirectError | None = None) -> DeliveryError:
        """The error of requests whose delivery timeout is over, and which were refused before."""
        why = "" if refusal is None else f"; refused before: {refusal.message}"
        return DeliveryError(
            f"{self._name}: not delivered within {self._timeout_ms} ms{why}",
            hint="the broker is down or overloaded; raise delivery.timeout.ms to wait longer",
            maybe_committed=True,
        )

    def _give_back(self, event: GiveBack, now: float) -> Sequence[Effect]:
        if event.answered and not self.backlog:
            self.state = State.IDLE
            return (Close(),)
        self.state = State.LEAVING
        return ()

    def _stay(self, event: DirectWanted, now: float) -> Sequence[Effect]:
        self.state = State.DIRECT
        return ()

    def _drain(self, event: DirectWanted, now: float) -> Sequence[Effect]:
        if self.direct_retry_at is None or now < self.direct_retry_at:
            return ()
        return (Drain(event.timeout_ms),)

    def _drained(self, event: Drained, now: float) -> Sequence[Effect]:
        if not event.answered:
            self.direct_retry_at = now + DIRECT_RETRY_S
            return ()
        self.state = State.OPENING
        return (Close(), Open(True, event.timeout_ms))

    def _nothing(self, event: Event, now: float) -> Sequence[Effect]:
        return ()

    # -- requests that come back -------------------------------------------------------------------

    def _returned(self, event: Returned, now: float) -> Sequence[Effect]:
        effects: list[Effect] = []
        repeated, renewed = self._judge(event, effects)
        if event.grant_lasts:
            if renewed:
                self.backlog = deque(_unstamped(self.backlog))
            self.backlog.extendleft(reversed(repeated))
            if repeated:
                self.deadline = min(self.deadline, now + self._timeout_ms / 1000)
            return (*effects, *self._resend())
        rest: Iterable[Request] = (*event.unanswered, *self.backlog)
        self.backlog = deque((*repeated, *(_unstamped(rest) if renewed else rest)))
        effects.append(Close())
        if self.backlog or event.broken:
            self.state = State.LOST
            self.deadline = now + self._timeout_ms / 1000
            self.retry_at, self._pause = 0.0, FIRST_PAUSE_S
            self._doubted, self._why = event.broken or event.doubted, None
        else:
            self.state = State.IDLE
            self.deadline = math.inf
        return effects

    def _judge(self, event: Returned, effects: list[Effect]) -> tuple[list[Request], bool]:
        """Of the refused requests, those that are sent again before anything that is not answered;
        effects tell of the others.  True when a new sequence begins, which is so for an idempotent
        producer after a request that was refused for good: what comes after it in the old sequence
        will not be taken, or belongs to an appender that has ended."""
        if not event.refused:
            return [], False
        self._refusals = self._refusals + 1 if event.accepted == self._accepted_before else 1
        self._accepted_before = event.accepted
        repeated: list[Request] = []
        gap = self._idempotent and event.refused[0][3] in _OUT_OF_SEQUENCE
        renewed = gap and self._renews
        for data, records, tag, code in event.refused:
            follows = self._idempotent and (self._renews or not gap)
            if self._refusals <= REFUSALS and _may_repeat(code, data, follows):
                repeated.append((data, records, tag))
                continue
            gap, renewed = True, self._renews
            effects.append(Tell(tag, self._refusal(code, records)))
        if renewed:
            effects.append(Renew())
            repeated = list(_unstamped(repeated))
        return repeated, renewed

    def _refusal(self, code: int, records: int) -> DeliveryError:
        cause = broker_error(code, f"{self._name}: a batch of {records} records")
        error = DeliveryError(
            cause.message, hint=cause.hint or "the batch was not committed", maybe_committed=False
        )
        error.__cause__ = cause
        return error

    # -- lost --------------------------------------------------------------------------------------

    def _look_for(self, event: Looked, now: float) -> Sequence[Effect]:
        if self.backlog and now >= self.deadline:
            return self._give_up()
        return (Probe(self._doubted),) if now >= self.retry_at else ()

    def _reopen(self, event: Reached, now: float) -> Sequence[Effect]:
        self.state = State.REOPENING
        return (Open(self._may_be_direct(now)),)

    def _retry(self, event: OpenFailed | Unreached, now: float) -> Sequence[Effect]:
        error = self._why = event.error
        moved = has_moved(error)
        kept_off = isinstance(error, AccessDeniedError) and error.held and self._transactional
        if (
            event.final
            or kept_off
            or not (moved or isinstance(error, TRANSIENT))
            or now + self._pause >= self.deadline
        ):  # fmt: skip
            return self._give_up()
        self.state = State.LOST
        self.retry_at = now + self._pause
        self._pause = min(2 * self._pause, MOVED_PAUSE_S if moved else LONGEST_PAUSE_S)
        if moved or isinstance(error, AccessDeniedError):
            return ()
        self._doubted = True
        return (DropLink(),)

    @property
    def why(self) -> KdirectError | None:
        """Why the last attempt to reach the partition has failed."""
        return self._why

    def _give_up(self) -> Sequence[Effect]:
        why = self._why
        text, hint = "no way to its leader", "see the broker's log"
        if why is not None:
            text, hint = why.message, why.hint
        error = DeliveryError(
            f"{self._name}: not delivered: {text}", hint=hint, maybe_committed=True
        )
        error.__cause__ = why
        return (Renew(), *self._end(State.IDLE, self.backlog, error))

    # -- the end -----------------------------------------------------------------------------------

    def _end(
        self, state: State, requests: Iterable[Request], error: DeliveryError
    ) -> Sequence[Effect]:
        told = tuple(Tell(tag, error) for _, _, tag in requests)
        self.state = state
        self.backlog = deque()
        self.deadline = math.inf
        return told

    def _expired(self, event: Expired, now: float) -> Sequence[Effect]:
        effects: list[Effect] = []
        repeated, _ = self._judge(event.returned, effects)
        effects.append(Renew())  # what is given up leaves a gap in the sequence
        if self.state in (State.DIRECT, State.LEAVING):
            # A broker that is silent would not answer a release; it sees the queue pair go.
            effects.append(DropLink())
        if self.state is not State.LOST:
            effects.append(Close())
        everything = (*repeated, *event.returned.unanswered, *self.backlog)
        if self.state is not State.REOPENING:
            return (*effects, *self._end(State.IDLE, everything, event.error))
        told = self._end(State.REOPENING, everything, event.error)
        self.deadline = now  # nothing waits for another attempt, if this one fails
        return (*effects, *told)

    def _close(self, event: Closing, now: float) -> Sequence[Effect]:
        effects: list[Effect] = []
        repeated, _ = self._judge(event.returned, effects)
        if self.state not in (State.LOST, State.IDLE):
            effects.append(Close())
        everything = (*repeated, *event.returned.unanswered, *self.backlog)
        return (*effects, *self._end(State.CLOSED, everything, event.error))


def _may_repeat(code: int, data: bytes, idempotent: bool) -> bool:
    """May a request that was refused with `code` be taken another time?"""
    if code in _OUT_OF_SEQUENCE:
        return idempotent
    if code == ErrorCode.CORRUPT_MESSAGE:
        try:
            return sum(1 for _ in iterate_batches(data)) > 0
        except CorruptBatchError:
            return False  # it was damaged before it was sent
    return bool(error_kind(code).retriable)


def _unstamped(requests: Iterable[Request]) -> Iterable[Request]:
    """The requests without their sequence numbers, which they get when they are sent."""
    return ((ProducerIdentity.unstamped(data), records, tag) for data, records, tag in requests)


_S, _W = State, PartitionWriter
Row = tuple[Callable[..., Sequence[Effect]], frozenset[State]]


def _to(handle: Callable[..., Sequence[Effect]], *following: State) -> Row:
    return handle, frozenset(following)


_DIRECT: dict[type, Row] = {
    Returned: _to(_W._returned, _S.DIRECT, _S.LEAVING, _S.LOST, _S.IDLE),
    Looked: _to(_W._look, _S.DIRECT, _S.LEAVING, _S.IDLE),
    Resent: _to(_W._resent, _S.DIRECT, _S.LEAVING),
    NotTaken: _to(_W._not_taken, _S.DIRECT, _S.LEAVING),
    DirectWanted: _to(_W._stay, _S.DIRECT),
    GiveBack: _to(_W._give_back, _S.LEAVING, _S.IDLE),
    Expired: _to(_W._expired, _S.IDLE),
    Closing: _to(_W._close, _S.CLOSED),
}


def _while_opened(state: State) -> dict[type, Row]:
    """What the thread that opens a way may want meanwhile."""
    return {
        Looked: _to(_W._nothing, state),
        DirectWanted: _to(_W._nothing, state),
        GiveBack: _to(_W._nothing, state),
        Closing: _to(_W._close, _S.CLOSED),
    }


# For each state, the events that it knows: the method that handles it, the states that may follow.
TABLE: dict[State, dict[type, Row]] = {
    _S.IDLE: {
        Needed: _to(_W._open, _S.OPENING),
        Looked: _to(_W._nothing, _S.IDLE),
        DirectWanted: _to(_W._open, _S.OPENING),
        GiveBack: _to(_W._nothing, _S.IDLE),
        Closing: _to(_W._close, _S.CLOSED),
    },
    _S.OPENING: {
        **_while_opened(_S.OPENING),
        Opened: _to(_W._opened, _S.DIRECT, _S.TCP),
        OpenFailed: _to(_W._open_failed, _S.IDLE, _S.LOST),
    },
    _S.DIRECT: _DIRECT,
    _S.LEAVING: _DIRECT,
    _S.TCP: {
        Looked: _to(_W._look, _S.TCP),
        Resent: _to(_W._resent, _S.TCP),
        NotTaken: _to(_W._not_taken, _S.TCP),
        DirectWanted: _to(_W._drain, _S.TCP),
        Drained: _to(_W._drained, _S.OPENING, _S.TCP),
        GiveBack: _to(_W._nothing, _S.TCP),
        Expired: _to(_W._expired, _S.IDLE),
        Closing: _to(_W._close, _S.CLOSED),
    },
    _S.LOST: {
        Looked: _to(_W._look_for, _S.LOST, _S.IDLE),
        Reached: _to(_W._reopen, _S.REOPENING),
        Unreached: _to(_W._retry, _S.LOST, _S.IDLE),
        DirectWanted: _to(_W._nothing, _S.LOST),
        GiveBack: _to(_W._nothing, _S.LOST),
        Expired: _to(_W._expired, _S.IDLE),
        Closing: _to(_W._close, _S.CLOSED),
    },
    _S.REOPENING: {
        **_while_opened(_S.REOPENING),
        Opened: _to(_W._opened, _S.DIRECT, _S.TCP),
        OpenFailed: _to(_W._retry, _S.LOST, _S.IDLE),
        Expired: _to(_W._expired, _S.REOPENING),
    },
    _S.CLOSED: {
        Opened: _to(_W._opened_late, _S.CLOSED),
        OpenFailed: _to(_W._open_failed_late, _S.CLOSED),
    },
}
