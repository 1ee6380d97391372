"""One partition whose head file this producer holds: its grants, from the first to the last.

Owns: the requests to the broker for access to a head file, and the memory that a `FileWriter`
works with.  What may not enter: what happens when access ends.  A `DirectAppender` says that it
cannot go on (`Sending.ENDED`) and hands back what is under way (`take_back`);
`kdirect.client.partition_writer` decides the rest.

Memory.  The acknowledgement ring belongs to the producer, and the broker WRITEs into it until it
has given the grant up: `close` waits a moment for that, and leaves the ring to the end of the
channel when the broker does not answer.
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from kdirect.client.broker_link import BrokerLink
from kdirect.client.direct_write import (
    NO_ROOM_BUFFER,
    NO_ROOM_FILE,
    SENT,
    SENT_AND_ASK,
    FileWriter,
)
from kdirect.client.idempotence import ProducerIdentity
from kdirect.client.partition_writer import Returned
from kdirect.client.transaction import Transaction
from kdirect.client.transaction_entry import (
    NO_FILE,
    Entry,
    EntryAnswer,
    answers_of,
    enter_transaction,
    has_entered,
    may_leave,
)
from kdirect.errors import (
    AccessDeniedError,
    BrokerUnavailableError,
    ClosedError,
    DeliveryError,
    KdirectError,
    NotLeaderError,
    QueuePairError,
    TimedOutError,
)
from kdirect.format import layout
from kdirect.format.error_codes import ErrorCode
from kdirect.model import TopicPartition
from kdirect.wire.channel import granted
from kdirect.wire.connection import Pending, broker_error
from kdirect.wire.environment import Environment

log = logging.getLogger("kdirect.client")

# A producer that fills half a file within this time asks for the next one ahead.
AHEAD_WITHIN_S = 5.0
RELEASE_WAIT_MS = 500  # for the answer to a release; the broker acts on it all the same
REFUSED_WAIT_MS = 1000  # for the answers to what was sent after a refused request
ENTRY_WAIT_MS = 10.0  # for a leader that is asked to let a transaction in, at each call
MODES = {  # the values of rdma.produce
    "exclusive": layout.PRODUCE_EXCLUSIVE,
    "shared": layout.PRODUCE_SHARED,
    "auto": layout.PRODUCE_AUTO,
    "off": -1,
}


class Sending(enum.Enum):
    """What became of a request that was given to an appender."""

    SENT = "sent"
    FULL = "full"  # there was no room for it in time
    ENDED = "ended"  # the appender cannot go on: take back what it has under way


# As names of the module, which are found faster than members of an enum: for each request.
REQUEST_SENT, REQUEST_FULL = Sending.SENT, Sending.FULL


class Sync(enum.Enum):
    """Why a record that was sent by itself, to wait for its acknowledgement, has no offset."""

    NOT_TAKEN = "not taken"
    UNANSWERED = "unanswered"


NOT_TAKEN, UNANSWERED = Sync.NOT_TAKEN, Sync.UNANSWERED


class Answers(enum.Enum):
    """What a wait for answers came to."""

    ALL = "all"
    NOT_YET = "not yet"
    ENDED = "ended"  # some will not come from this appender


class Asked(NamedTuple):
    """A leader is asked to let a transaction, of this number, into the partitions of these
    appenders.  Each of them has this very tuple until the answer is taken in."""

    number: int
    pending: Pending
    entries: dict[DirectAppender, Entry]

    def is_stale(self, appender: DirectAppender) -> bool:
        """Does the answer say nothing of what this appender would write to now?  Its file is
        another one, or ends, or its batches go on with another sequence."""
        return appender.entry != self.entries[appender]

    def leave(self) -> None:
        """No appender waits for the answer any more."""
        for appender in self.entries:
            if appender._entering is self:
                appender._entering = None

    def give_up(self) -> None:
        """Nobody wants the answer, which is dropped when it comes."""
        self.leave()
        try:
            self.pending.result(0)
        except KdirectError as e:
            log.debug("a transaction that was to be let in: %s", e)


class DirectAppender:
    """See the module.

    The send buffer holds several batches (and the largest batch the topic takes); each half of the
    acknowledgement ring twice the window.  While it fills a file that it holds exclusively, it asks
    for the next one (`ask_next`, when half is full) and goes on there without a pause
    (`take_next`).

    The constructor asks for access.  TimedOutError when the broker does not answer within
    `timeout_ms`; AccessDeniedError, QueuePairError or TransportError when it refuses.
    """

    def __init__(
        self,
        link: BrokerLink,
        tp: TopicPartition,
        settings: dict[str, Any],
        environment: Environment,
        identity: ProducerIdentity | None,
        outcomes: list[Any],
        mode: int,
        timeout_ms: float | None,
        transaction: Transaction | None = None,
    ) -> None:
        self.tp = tp
        self._transaction = transaction
        self._entered = -1  # the number of the transaction that the leader was told of
        self._entering: Asked | None = None  # what it has not answered, or nobody has taken in
        # Those of other partitions of the same leader that are to be written in the transaction.
        self.companions: Callable[[], Iterable[DirectAppender]] = lambda: ()
        self.link = link
        self.channel, self.router = link.open(tp)
        self.next_asked: Pending | None = None  # the request for the file after the present one
        self._settings = settings
        self._monotonic = environment.monotonic
        self._mode = mode
        self._asked: Pending | None = None  # the request for a file in place of the full one
        self._asked_to_enter = False  # by which the broker may append there until it is entered
        self._passed_over = -1  # a file that was granted and is to be given back
        self._filling_since = 0.0  # when the present file was granted, or `ask_next` was called
        self._max_request_bytes = 0
        entries = 2
        while entries < 2 * settings["max.in.flight"]:
            entries *= 2
        self._ring = self.channel.remote_writable_memory(2 * entries * layout.ACK_BYTES)
        self.writer = FileWriter(
            str(tp), self.router, self.channel.qp, self._ring, entries // 2, outcomes
        )
        self.writer.identity = identity
        self.writer.compare_and_swap = settings["rdma.produce.atomic"] == "cas"
        if settings["rdma.notify"] == "send":
            self.writer.set_notices(self.channel.local_memory(entries // 2 * layout.NOTICE_BYTES))
        try:
            self._enter(
                self.channel.produce_access(
                    *self._wanted(1), **self._terms(), timeout_ms=timeout_ms
                )
            )
        except TimedOutError:
            # Access may still be granted, and recalled through the ring, which ends with the
            # channel.
            raise
        except BaseException:
            self.writer.close()
            raise

    # -- sending -----------------------------------------------------------------------------------

    def submit(self, data: Any, records: int, tag: Any, deadline: float) -> Sending:
        """Send a request; waits for room until the deadline, but for the leader to let a
        transaction in only a moment.  DeliveryError when it can never be taken."""
        if len(data) > self._max_request_bytes:
            self._refuse_too_large(len(data))
        while True:
            if not self.entered:
                try:
                    if not self._enter_transaction(deadline):
                        return Sending.FULL
                except (NotLeaderError, AccessDeniedError, ClosedError, BrokerUnavailableError):
                    return Sending.ENDED
            code = self.writer.try_batches(data, records, tag)
            if code == SENT:
                return REQUEST_SENT
            if code == SENT_AND_ASK:
                self.ask_next()
                return REQUEST_SENT
            try:
                if not self._make_room(code, len(data), deadline):
                    return Sending.ENDED
            except TimedOutError:
                return Sending.FULL
            except (AccessDeniedError, QueuePairError, ClosedError, BrokerUnavailableError):
                return Sending.ENDED

    @property
    def entered(self) -> bool:
        """Does the leader take batches of the present transaction, if there is one?"""
        return self._transaction is None or self._transaction.number == self._entered

    def _enter_transaction(self, deadline: float) -> bool:
        """Have the leader take batches of the transaction, and in the same request those of other
        partitions that it leads; False: not yet.  Callers hold the producer's lock, so this waits a
        moment only, and the next call, for whichever of the partitions, takes the answer in."""
        assert self._transaction is not None
        number = self._transaction.number
        asked = self._entering
        if asked is not None and (asked.number != number or asked.is_stale(self)):
            asked.give_up()
            asked = None
        if asked is None:
            entries = {a: a.entry for a in (self, *self.companions())}
            pending = enter_transaction(self.channel, self._transaction, list(entries.values()))
            asked = Asked(number, pending, entries)
            for appender in entries:
                appender._entering = asked
        left_ms = (deadline - self._monotonic()) * 1000
        if not asked.pending.wait(max(0.0, min(ENTRY_WAIT_MS, left_ms))):
            return False
        if self._entering is not asked:  # a signal handler has come in between, and was faster
            return self.entered
        others = [a for a in asked.entries if a._entering is asked and a is not self]
        asked.leave()
        answers = answers_of(asked.pending.result(0))
        for appender in others:
            entry = asked.entries[appender]
            try:
                if not asked.is_stale(appender):
                    appender._take_entry(entry, answers.get(entry.tp))
            except KdirectError as e:  # it asks itself, and then says what is the matter
                log.debug("%s: %s", entry.tp, e)
        return self._take_entry(asked.entries[self], answers.get(self.tp))

    @property
    def entry(self) -> Entry:
        """What the leader is asked about this partition."""
        writer = self.writer
        assert writer.identity is not None
        # A head that is held alone is the broker's to append to until it names the place where the
        # producer goes on.  Where this grant is about to end nothing more is written under it.
        ends = not writer.granted or writer.recalled or writer.revoked or writer.in_flight
        goes_on = self._counts_places and not ends
        file_id = int(writer.file_id) if goes_on else NO_FILE
        return Entry(self.tp, writer.identity.next_sequence, file_id)

    def _take_entry(self, entry: Entry, answer: EntryAnswer | None) -> bool:
        if not has_entered(entry, answer):
            return False
        assert self._transaction is not None and answer is not None
        if entry.file_id != NO_FILE:
            self.writer.resume(answer.position, answer.order)
        self._entered = self._transaction.number
        return True

    @property
    def _counts_places(self) -> bool:
        """Is this a transactional producer that wants its heads alone, so that it agrees with the
        broker on when markers come between?"""
        alone = self._transaction is not None and self._mode == layout.PRODUCE_EXCLUSIVE
        return alone and may_leave(self.channel.connection)

    def leave_transaction(self) -> Entry | None:
        """The transaction is about to end: nothing more is written before the next entry.  What the
        leader has to be told of this partition; None: nothing."""
        if not (self._counts_places and self.entered):
            return None
        entry = self.entry
        self._entered = -1
        return entry

    def _refuse_too_large(self, size: int) -> None:
        # What the broker would answer, without the way to it.
        cause = broker_error(
            ErrorCode.MESSAGE_TOO_LARGE,
            str(self.tp),
            f"a batch of {size} bytes is over max.message.bytes ({self._max_request_bytes})",
        )
        raise DeliveryError(cause.message, hint=cause.hint) from cause

    def _make_room(self, code: int, size: int, deadline: float) -> bool:
        """Wait until a request that was not taken may be tried again.  False: this appender cannot
        go on.  TimedOutError at the deadline."""
        writer = self.writer
        if code == NO_ROOM_BUFFER:
            if writer.in_flight:
                return bool(writer.wait_acknowledged(writer.acknowledged, self._left_ms(deadline)))
            self._wait_for_others(deadline)
            return True
        if code != NO_ROOM_FILE:
            return False
        if self.take_next(deadline):
            return True
        if writer.in_flight and not writer.wait_acknowledged(
            writer.posted - 1, self._left_ms(deadline)
        ):
            return False
        self.grant_by(size, deadline)
        return True

    def _left_ms(self, deadline: float) -> int:
        """Time until the deadline; TimedOutError when it is over."""
        left = math.ceil((deadline - self._monotonic()) * 1000)
        if left <= 0:
            raise TimedOutError(f"{self.tp}: no room for another request in time")
        return left

    def _wait_for_others(self, deadline: float) -> None:
        """The window is taken by other partitions of this queue pair: wait for any
        acknowledgement."""
        router = self.router
        # Or only for completions of WRITEs that are acknowledged already, which come at once.
        for _ in range(1000):
            if router.drain() != 0 or not router.sends_under_way:
                return
        router.wait(min(100, self._left_ms(deadline)))

    # -- grants ------------------------------------------------------------------------------------

    def grant_by(self, min_bytes: int, deadline: float) -> None:
        """The file is full: get access to one with room for `min_bytes`; nothing may be under way.

        TimedOutError when the broker has not answered by the deadline; a later call takes the
        answer then, and until it has come nothing more goes into the old file, of which the broker
        was told that it is finished."""
        if self._asked is None:
            if self.writer.recalled:
                self._entered = -1  # a marker may be what it was recalled for
            terms = self._terms()
            self._asked = self.channel.ask_produce_access(*self._wanted(min_bytes), **terms)
            self._asked_to_enter = terms["enters"]
            self.writer.finish_file()
        if not self._asked.wait(max(0.0, (deadline - self._monotonic()) * 1000)):
            raise TimedOutError(
                f"{self.tp}: access to the next file is not granted yet",
                hint="the broker may be stopped or overloaded",
            )
        asked, self._asked = self._asked, None
        answer = granted(self.tp, asked.result(0))
        # Recalled or revoked before the answer was here: ask again.
        if self.router.take_stray(answer.file_id):
            self._passed_over = answer.file_id
            return
        self._passed_over = -1
        if self._asked_to_enter:
            # Whatever was entered while the answer was on its way, it was not this file.
            self._entered = -1
        self._enter(answer)

    def _wanted(self, min_bytes: int) -> tuple[Any, ...]:
        return self.tp, min_bytes, self._ring, self.writer.ring_entries

    def _terms(self) -> dict[str, Any]:
        writer = self.writer
        finished, end = (writer.file_id if writer.granted else -1), writer.end
        if self._passed_over >= 0:
            finished, end = self._passed_over, (-1, -1)
        return {
            "mode": self._mode,
            "max_in_flight": self._settings["max.in.flight"],
            "finished": finished,
            "end": end,
            "enters": self._counts_places and not self.entered,
            **self._promise(),
        }

    def _promise(self) -> dict[str, Any]:
        """What acknowledgements are to say, and by which leader."""
        return {
            "acks": -1 if self._settings["acks"] in ("all", "-1") else 1,
            "leader_epoch": self.link.leader_epoch(self.tp),
        }

    def _enter(self, answer: Any) -> None:
        """Go on in the file that was granted."""
        writer = self.writer
        self._max_request_bytes = answer.max_message_bytes
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
        self.next_asked = None  # what it brought has ended with the file before
        self._filling_since = self._monotonic()
        if not shared and self.channel.grants_ahead and answer.length >= answer.full_length:
            writer.ask_when_half_full()

    def ask_next(self) -> None:
        """The file is half full: ask for the next one.  Not where files fill slowly: there a roll
        that takes a moment does no harm, and a file that is prepared and lies idle does."""
        writer = self.writer
        since, self._filling_since = self._filling_since, self._monotonic()
        if self._filling_since - since > AHEAD_WITHIN_S or writer.recalled:
            return
        try:
            self.next_asked = self.channel.ask_produce_access(
                *self._wanted(1),
                mode=self._mode,
                max_in_flight=self._settings["max.in.flight"],
                ack_offset=writer.other_half,
                ahead_of=writer.file_id,
                **self._promise(),
            )
        except KdirectError as e:  # the connection ended, which the next request notices
            log.debug("%s: the next file was not asked for: %s", self.tp, e)

    def take_next(self, deadline: float) -> bool:
        """This file is full.  Was the next one granted?  Waits for the answer, if it was asked for;
        False: ask for access in the ordinary way.  TimedOutError at the deadline."""
        pending, writer = self.next_asked, self.writer
        if pending is None or self._asked is not None or writer.recalled or writer.revoked:
            return False
        left = max(0, math.ceil((deadline - self._monotonic()) * 1000))
        if not pending.done and not pending.wait(left):
            raise TimedOutError(
                f"{self.tp}: the broker did not grant the next file in time",
                hint="the broker may be stopped or overloaded",
            )
        # The file before the present one shares its half of the ring with the next.
        first = writer.first_of_file
        if first and not writer.wait_acknowledged(first - 1, left):
            return False
        self.next_asked = None
        try:
            answer = granted(self.tp, pending.result(0))
        except KdirectError as e:
            log.debug("%s: the next file was not granted: %s", self.tp, e)
            return False
        if self.router.take_stray(answer.file_id):  # revoked before the answer was here
            return False
        writer.open_next(answer.file_id, answer.address, answer.rkey, answer.length)
        return True

    # -- answers -----------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """How the partition is written."""
        return "shared" if self.writer.shared else "exclusive"

    @property
    def in_flight(self) -> int:
        """Records not acknowledged."""
        records: int = self.writer.records_in_flight
        return records

    @property
    def last_offset(self) -> int:
        """Base offset of the request that was acknowledged last; -1: none was."""
        return int(self.writer.last_offset_base)

    @property
    def requests_acknowledged(self) -> int:
        """How many requests were acknowledged."""
        return int(self.writer.requests_acknowledged)

    def collect(self) -> bool:
        """Make outcomes of what is acknowledged.  False: this appender cannot go on."""
        writer = self.writer
        return not (writer.collect() or (writer.in_flight and self.broken))

    def wait_answered(self, deadline: float) -> Answers:
        """Wait for every acknowledgement until the deadline."""
        writer = self.writer
        left_ms = max(0, math.ceil((deadline - self._monotonic()) * 1000))
        try:
            if writer.wait_acknowledged(writer.posted - 1, left_ms):
                return Answers.ALL
        except TimedOutError:
            return Answers.NOT_YET
        except (ClosedError, QueuePairError):
            pass  # another thread closed the queue pair
        return Answers.ENDED

    @property
    def broken(self) -> bool:
        """The queue pair broke, or the control connection ended, with which the broker takes its
        grants back."""
        return self.channel.closed or bool(self.router.broken)

    def take_back(self, *, wait: bool = False) -> Returned:
        """The requests that were refused or are not answered, which are not this appender's any
        more.  With `wait`, and when a request was refused, first the answers to those after it: if
        all of them come, the grant goes on."""
        writer, broken = self.writer, self.broken
        if wait and not broken:
            self.router.drain()
        refused = wait and bool(writer.failures) and not broken
        answered = writer.wait_answers(REFUSED_WAIT_MS) if refused else False
        failures = writer.take_refused()
        if refused and answered and not writer.revoked:
            return Returned(failures, (), int(writer.requests_acknowledged), grant_lasts=True)
        unanswered = writer.unacknowledged()
        writer.forget()
        return Returned(failures, unanswered, int(writer.requests_acknowledged), broken=self.broken)

    def log_end(self, repeated: int) -> None:
        """Say in the log why access ended, if it did, and how many requests are repeated."""
        # Whichever is noticed first: the queue pair's end, or the control connection's, with which
        # the broker takes its grants back.
        if self.router.broken:
            log.warning(
                "%s: the RDMA connection broke (%s); %d requests are repeated",
                self.tp,
                self.router.broken,
                repeated,
            )
        elif self.channel.closed:
            log.warning(
                "%s: the connection to its leader ended (%s); %d requests are repeated",
                self.tp,
                self.channel.connection.error or "closed with its queue pair",
                repeated,
            )
        elif repeated:
            log.info("%s: access ended; %d requests are repeated", self.tp, repeated)

    def statistics(self) -> dict[str, int]:
        """What was acknowledged; see docs/metrics.md."""
        w = self.writer
        return {
            "rdma_records": w.records_acknowledged,
            "rdma_bytes": w.bytes_acknowledged,
            "rdma_requests": w.requests_acknowledged,
            "rdma_files_ahead": w.files_ahead,
        }

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Give access back, then free the memory: until the broker has answered it may write into
        the ring, and a WRITE into one that is gone would break the queue pair.  Where it does not
        answer, the ring goes with the channel."""
        self._entering = None
        if self.channel.closed or self._release():
            self.writer.close()
        else:
            self.writer.wait_completed()
            self.writer.end_grant()

    def _release(self) -> bool:
        """Has the broker given up everything that it granted?"""
        held = [self.writer.file_id] if self.writer.granted else []
        held += [self._passed_over] if self._passed_over >= 0 else []
        self.writer.wait_completed()
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
