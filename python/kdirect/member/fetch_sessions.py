"""How a leader serves the brokers that copy its partitions over TCP.

Owns: one fetch session for each follower: what it follows here, from where on, and what it has been
told.  A request names only what has changed since the one before, and so does a response; an idle
session is one request that waits.  Whatever may be new for a follower is marked (`mark`), and only
marked partitions are looked at: the cost of a request does not grow with what the session follows.

A request tells first: its offsets are what the follower has committed (`Leader.confirmed`).  Then
it asks: it is answered as soon as there are records, an error, or a new high watermark; the last
one alone waits a moment (`TELL_S`), because it mostly goes out with records.  Records of one
partition are of one segment in each response, so that the follower can begin its segments where
they begin here.

A follower that the leader writes to (`kdirect.member.push`) keeps its row, and says in it that it
takes no records this way.  Then it is told of errors and of the log start alone: neither records
nor the high watermark wake it.

A session ends with its connection, with a newer session of the same broker, and when it is not what
the follower thinks it is; then the follower begins another one, and tells everything again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

from kdirect.cluster.leading_replica import Confirmed
from kdirect.errors import KdirectError, OffsetOutOfRangeError, TieredOffsetError
from kdirect.format.error_codes import ErrorCode
from kdirect.format.replica_fetch import CopiedPartition, Push, fetch_as_replica_response
from kdirect.log.partition import Partition
from kdirect.log.replica_log import Copied
from kdirect.member.leading import Leader
from kdirect.member.throttle import Pace
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.member")

PARTITION_BYTES = 1 << 20
TELL_S = 0.005
LONGEST_WAIT_MS = 60_000


class Found(NamedTuple):
    """What a leader is to a follower: itself, or an error code."""

    leader: Leader | None
    error: int


class _Row:
    """What a session knows of one partition.  `seen`: where the log ended when the follower was
    last answered; `sent`: number of the response in which records are on their way, or being read,
    and no more go out until the follower has taken it; 0 where there are none; `told`: high
    watermark, log start, segment and push; `watched`: `appended` will be heard of the next commit
    by RDMA; `pushed`: the follower takes no records this way, and `push_ended`, `push_wants`: what
    it is to be told about that; `push_begun`: its file is being written, though its own word that
    it takes no records may still be under way."""

    __slots__ = (
        "epoch",
        "is_held_back",
        "offset",
        "push_begun",
        "push_ended",
        "push_wants",
        "pushed",
        "seen",
        "sent",
        "told",
        "watched",
    )

    def __init__(self, epoch: int, offset: int) -> None:
        self.epoch = epoch
        self.offset = offset
        self.seen = -1
        self.sent = 0
        self.told: tuple[int, ...] = ()
        self.watched = False
        self.pushed = False
        self.push_begun = False
        self.push_ended = False
        self.push_wants = Push.NOTHING
        self.is_held_back = False  # a timer will mark it


class _Session:
    """Of one follower."""

    def __init__(self, number: int, broker: int, incarnation: int, connection: Hashable) -> None:
        self.number = number
        self.broker = broker
        self.incarnation = incarnation
        self.connection = connection
        self.rows: dict[TopicPartition, _Row] = {}
        self.marked: dict[TopicPartition, None] = {}  # in the order in which they are served
        self.waiter: asyncio.Future[None] | None = None
        self.teller: asyncio.TimerHandle | None = None
        self.turn = 0  # the newest request; responses have the same numbers
        self.ended = False

    def wake(self) -> None:
        """Let a request that waits look again."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def end(self) -> None:
        self.ended = True
        if self.teller is not None:
            self.teller.cancel()
            self.teller = None
        self.wake()


class FetchSessions:
    """See the module.  `find(tp, epoch)`: who leads; `incarnation_of(broker)`: the registered one,
    -1 where there is none; `read` awaits what reads cold bytes, `release` gives buffers back;
    `offers(partition, offset)`: what is offered to a follower whose log ends there, a `Push`;
    `held_back(leader, broker)`: the rate at which that follower may catch up, None where nothing
    holds it back."""

    def __init__(
        self,
        *,
        find: Callable[[TopicPartition, int], Found],
        incarnation_of: Callable[[int], int],
        read: Callable[..., Awaitable[Any]],
        release: Callable[[Any], None],
        watch: Callable[[TopicPartition], None],
        offers: Callable[[Partition, int], Push] = lambda partition, offset: Push.NOTHING,
        held_back: Callable[[Leader, int], Pace | None] = lambda leader, broker: None,
    ) -> None:
        self._find = find
        self._offers = offers
        self._held_back = held_back
        self._incarnation_of = incarnation_of
        self._read = read
        self._release = release
        self._watch = watch
        self._sessions: dict[int, _Session] = {}  # by broker
        self._followers: dict[TopicPartition, dict[int, _Session]] = {}
        self._number = 0
        self.on_lost: Callable[[int, list[TopicPartition]], None] = lambda broker, partitions: None
        self.requests = 0
        self.sent_bytes = 0

    # -- what happens ------------------------------------------------------------------------------

    def mark(self, tp: TopicPartition) -> None:
        """There is other news than records: tell the followers now."""
        if tp not in self._followers:
            self._watch(tp)  # nobody fetches, but the leader is to hear of commits by RDMA
        for session in self._followers.get(tp, {}).values():
            session.marked[tp] = None
            session.rows[tp].watched = False
            session.wake()

    def grown(self, tp: TopicPartition) -> None:
        """There are more records: tell the followers that fetch them now."""
        if tp not in self._followers:
            self._watch(tp)
        for session in self._followers.get(tp, {}).values():
            row = session.rows[tp]
            if not row.pushed:
                session.marked[tp] = None
                row.watched = False
                session.wake()

    def fetches(self, tp: TopicPartition) -> bool:
        """Does some follower get its records this way?"""
        return any(not s.rows[tp].pushed for s in self._followers.get(tp, {}).values())

    def want_file(self, tp: TopicPartition, broker: int, ahead: bool) -> None:
        """This follower is to let its leader write more: the file after the present one, or more of
        that."""
        found = self._pushed_row(tp, broker)
        if found is not None:
            session, row = found
            row.push_wants = Push.WANTS_NEXT if ahead else Push.WANTS
            session.marked[tp] = None
            session.wake()

    def begin_push(self, tp: TopicPartition, broker: int) -> None:
        """This follower's file is written from now on: what it was to be told of an earlier push
        holds no more."""
        session = self._followers.get(tp, {}).get(broker)
        if session is not None:
            row = session.rows[tp]
            row.push_begun, row.push_ended, row.push_wants = True, False, Push.NOTHING

    def end_push(self, tp: TopicPartition, broker: int) -> None:
        """Nothing more is written to this follower: tell it to fetch."""
        found = self._pushed_row(tp, broker)
        if found is not None:
            session, row = found
            row.push_ended = True
            session.marked[tp] = None
            session.wake()

    def _pushed_row(self, tp: TopicPartition, broker: int) -> tuple[_Session, _Row] | None:
        """The row of a follower that is pushed to, or will say so in a request under way."""
        session = self._followers.get(tp, {}).get(broker)
        if session is None:
            return None
        row = session.rows[tp]
        return (session, row) if row.pushed or row.push_begun else None

    def mark_soon(self, tp: TopicPartition) -> None:
        """The high watermark has moved: tell the followers, with records if they come at once."""
        for session in self._followers.get(tp, {}).values():
            if session.rows[tp].pushed:
                continue
            session.marked[tp] = None
            if session.teller is None and session.waiter is not None:
                loop = asyncio.get_running_loop()
                session.teller = loop.call_later(TELL_S, self._tell, session)

    def _tell(self, session: _Session) -> None:
        session.teller = None
        session.wake()

    def connection_closed(self, connection: Hashable) -> None:
        """Sessions end with their connection."""
        for session in list(self._sessions.values()):
            if session.connection == connection:
                self._end(session, lost=True)

    def stop(self) -> None:
        """Answer what waits; nothing is served any more."""
        for session in list(self._sessions.values()):
            self._end(session, lost=False)

    def _end(self, session: _Session, *, lost: bool) -> None:
        if self._sessions.get(session.broker) is session:
            del self._sessions[session.broker]
        for tp in session.rows:
            self._forget(session, tp)
        session.end()
        if lost:
            self.on_lost(session.broker, list(session.rows))

    def _forget(self, session: _Session, tp: TopicPartition) -> None:
        sessions = self._followers.get(tp, {})
        if sessions.get(session.broker) is session:
            del sessions[session.broker]
            if not sessions:
                del self._followers[tp]
                self._watch(tp)

    # -- requests ----------------------------------------------------------------------------------

    async def answer(self, connection: Hashable, request: Any) -> list[Any]:
        """The body of the response to a FetchAsReplica."""
        self.requests += 1
        known = self._incarnation_of(request.broker_id)
        if known < 0 or known != request.incarnation:
            # A process that was replaced, or one of which this broker has not heard yet.
            return fetch_as_replica_response(ErrorCode.STALE_BROKER_EPOCH, 0, ())
        session = self._session(connection, request)
        if session is None:
            return fetch_as_replica_response(ErrorCode.FETCH_SESSION_ID_NOT_FOUND, 0, ())
        session.turn += 1
        turn = session.turn
        self._listen(session, request)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(max(request.max_wait_ms, 0), LONGEST_WAIT_MS) / 1000
        while True:
            topics = {}
            if session.turn == turn:
                topics = await self._collect(session, turn, max(request.max_bytes, 1))
            if topics or session.ended or session.turn != turn or loop.time() >= deadline:
                return fetch_as_replica_response(0, session.number, topics.items())
            if not session.marked:
                await self._wait(session, deadline)

    async def _wait(self, session: _Session, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        session.waiter = waiter = loop.create_future()
        timer = loop.call_at(deadline, session.wake)
        try:
            await waiter
        finally:
            timer.cancel()
            if session.waiter is waiter:  # else a newer request waits, which the teller is to wake
                session.waiter = None
                if session.teller is not None:
                    session.teller.cancel()
                    session.teller = None

    def _session(self, connection: Hashable, request: Any) -> _Session | None:
        """The session of the request; a new one where it asks for that.  None: there is no such."""
        session = self._sessions.get(request.broker_id)
        if request.session_id == 0:
            if session is not None:
                self._end(session, lost=False)
            self._number = self._number % 0x7FFFFFFF + 1
            session = _Session(self._number, request.broker_id, request.incarnation, connection)
            self._sessions[request.broker_id] = session
            return session
        if session is None or session.number != request.session_id:
            return None
        if (session.connection, session.incarnation) != (connection, request.incarnation):
            return None
        session.wake()  # a request that still waits is answered: its follower has given it up
        return session

    def _listen(self, session: _Session, request: Any) -> None:
        """Hear what a follower has, and what it asks for."""
        for topic in request.forgotten:
            for number in topic.partitions:
                tp = TopicPartition(topic.topic, number)
                session.rows.pop(tp, None)
                session.marked.pop(tp, None)
                self._forget(session, tp)
        for topic in request.topics:
            for x in topic.partitions:
                tp = TopicPartition(topic.topic, x.partition)
                row = session.rows.get(tp)
                if row is None or row.epoch != x.leader_epoch:
                    row = session.rows[tp] = _Row(x.leader_epoch, x.fetch_offset)
                    self._followers.setdefault(tp, {})[session.broker] = session
                if row.pushed != x.pushed:
                    row.pushed, row.told, row.watched = x.pushed, (), False
                    if not x.pushed:
                        row.push_begun = row.push_ended = False
                        row.push_wants = Push.NOTHING
                if x.full:
                    row.told = ()  # it asks for the same again, be it a segment without records
                if row.sent <= request.answers:
                    row.offset, row.sent = x.fetch_offset, 0
                    session.marked[tp] = None
                self._confirm(session, tp, row, x)

    def _confirm(self, session: _Session, tp: TopicPartition, row: _Row, asked: Any) -> None:
        leader = self._find(tp, row.epoch).leader
        if leader is None:
            return
        end, offset = leader.partition.log_end_offset, asked.fetch_offset
        level = offset >= (row.seen if row.seen >= 0 else end)
        if row.pushed:  # it is answered with no records
            row.seen = end
        event = Confirmed(session.broker, session.incarnation, row.epoch, offset, level, asked.full)
        leader.confirmed(event)
        leader.starts_at(session.broker, asked.log_start_offset)

    # -- what there is to tell ---------------------------------------------------------------------

    async def _collect(
        self, session: _Session, turn: int, room: int
    ) -> dict[str, list[CopiedPartition]]:
        """What is new among the marked partitions, as far as there is room."""
        topics: dict[str, list[CopiedPartition]] = {}
        for tp in list(session.marked):
            if room <= 0 or session.ended:
                break
            row = session.rows.get(tp)
            session.marked.pop(tp, None)
            # Records on their way to a follower that is pushed to are thrown away there, and it
            # says nothing of them.
            if row is None or (row.sent and not row.pushed):
                continue
            found = self._find(tp, row.epoch)
            told: CopiedPartition | None = _refusal(tp, found.error)
            pace = None
            if found.leader is not None:
                partition = found.leader.partition
                pace = None if row.pushed else self._held_back(found.leader, session.broker)
                if pace is not None and partition.log_end_offset > row.offset:
                    if (wait_s := pace.wait_s()) > 0:
                        self._mark_later(session, tp, row, wait_s)
                        continue
                most = room if pace is None else min(room, pace.most)
                told = await self._look(tp, row, found.leader, most, turn, pace)
                is_sound = told is None or told.error == 0
                lacks_records = not row.pushed and partition.log_end_offset > row.offset
                if is_sound and not row.sent and lacks_records:
                    # It has grown while a thread looked, and another request may have left it out.
                    session.marked[tp] = None
                    session.wake()
            if told is not None:
                topics.setdefault(tp.topic, []).append(told)
                size = sum(len(buffer) for buffer in told.buffers)
                if size and pace is not None:
                    pace.take(size)
                room -= size
                self.sent_bytes += size
        return topics

    def _mark_later(self, session: _Session, tp: TopicPartition, row: _Row, wait_s: float) -> None:
        """It is looked at again when its throttle lets more pass."""
        if not row.is_held_back:
            row.is_held_back = True
            loop = asyncio.get_running_loop()
            loop.call_later(wait_s, self._mark_again, session, tp, row)

    def _mark_again(self, session: _Session, tp: TopicPartition, row: _Row) -> None:
        row.is_held_back = False
        if session.rows.get(tp) is row and not session.ended:
            session.marked[tp] = None
            session.wake()

    async def _look(
        self,
        tp: TopicPartition,
        row: _Row,
        leader: Leader,
        room: int,
        number: int,
        pace: Pace | None,
    ) -> CopiedPartition | None:
        """What is to be told of one partition; None where there is nothing new."""
        partition = leader.partition
        if row.pushed:
            return _tell_pushed(tp, row, partition)
        if not row.watched:
            row.watched = True
            self._watch(tp)
        row.sent = number  # a newer request must not send the same while this one reads
        try:
            copied = await self._copy(leader, row.offset, min(PARTITION_BYTES, room))
        except (OffsetOutOfRangeError, TieredOffsetError) as e:
            row.sent = 0
            start = partition.first_kept_offset
            is_tiered = isinstance(e, TieredOffsetError)
            code = TieredOffsetError.code if is_tiered else ErrorCode.OFFSET_OUT_OF_RANGE
            return _refusal(tp, code)._replace(leader_epoch=row.epoch, log_start_offset=start)
        except (KdirectError, OSError) as e:  # the follower's other partitions go on
            row.sent = 0
            log.error("%s cannot be copied from offset %d on: %s", tp, row.offset, e)
            return _refusal(tp, ErrorCode.KAFKA_STORAGE_ERROR)
        row.sent = number if copied.buffers and not leader.has_resigned else 0
        if leader.has_resigned:
            # While it was read, the log may have been cut, and have got records of another leader:
            # in the old epoch they are no continuation of what the follower has.
            return _refusal(tp, ErrorCode.NOT_LEADER_OR_FOLLOWER)
        row.seen = partition.log_end_offset
        # After the log was read, and before the mark: what is missing in what was read lies below.
        dense_from = partition.dense_from if row.offset < partition.dense_from else 0
        mark, start = partition.high_watermark, partition.log_start_offset
        push = self._offers(partition, row.offset)
        if push == Push.OFFERED and pace is not None:
            push = Push.NOTHING  # what is pushed is not held back
        told = (mark, start, copied.segment, copied.segment_bytes, push)
        if not copied.buffers and told == row.told:
            return None
        row.told = told
        return CopiedPartition(tp.partition, 0, row.epoch, *told, copied.buffers, dense_from)

    async def _copy(self, leader: Leader, offset: int, length: int) -> Copied:
        partition, release = leader.partition, self._release
        copied = partition.read_for_replica_nowait(offset, length, release=release)
        if copied is None:
            work = partial(partition.read_for_replica, offset, length, release=release)
            copied = await self._read(work)
        return copied


def _refusal(tp: TopicPartition, error: int) -> CopiedPartition:
    return CopiedPartition(tp.partition, error, -1, -1, -1, -1, -1, Push.NOTHING, ())


def _tell_pushed(tp: TopicPartition, row: _Row, partition: Partition) -> CopiedPartition | None:
    """What a follower that is written to is told."""
    mark, start = partition.high_watermark, partition.log_start_offset
    push = Push.ENDED if row.push_ended else row.push_wants
    wants, row.push_wants = row.push_wants, Push.NOTHING
    known = (start, row.push_ended)
    if known == row.told and wants == Push.NOTHING:  # it may want the same more than once
        return None
    row.told = known
    base, size = partition.kernel.segment_base_offset, partition.config.segment_bytes
    return CopiedPartition(tp.partition, 0, row.epoch, mark, start, base, size, push, ())


__all__ = ["FetchSessions", "Found"]
