"""What one Fetch request asks for, in a session or outside of any, and what of it is answered.

Owns: the sessions of a broker's clients, and how rows of a session stand in the table of those
who wait (`Waiters`).  A context stands for its request in the handlers of Fetch: it says which
partitions are looked at, by which names, and makes the answer out of what was found.  From version
13 on requests name topics by their ids; an id that nobody knows stands for the name then, and is
answered UNKNOWN_TOPIC_ID.  An id is resolved at each look, so a topic that was made again under its
old name is another one.

A broker that is alone looks only at the marked rows of a session; in a cluster all of them are
looked at, because more than appends changes what is to be told.

All methods run on the event loop, but for `topics`, which a thread that reads asks for, too.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kdirect.broker.answers import Answer
from kdirect.broker.fetch_session_cache import (
    FINAL_EPOCH,
    INITIAL_EPOCH,
    NO_SESSION,
    FetchSession,
    SessionCache,
    SessionRow,
    TopicKey,
    next_epoch,
)
from kdirect.broker.services import Services
from kdirect.broker.waiters import Waiter
from kdirect.format.datapath import Fetched, NodeEndpoint, fetch_response
from kdirect.format.error_codes import ErrorCode
from kdirect.model import TopicPartition

BY_ID = 13  # the version of Fetch from which on topics are named by their ids
NAMES_LEADERS = 16  # the version that says where the leaders are which an error names (KIP-951)
EVICTION_MS = 120_000  # as in Kafka, where it is min.incremental.fetch.session.eviction.ms
FULL_LOOK_MS = 10_000  # so often all rows are marked: what moves a log start wakes nobody
NO_ID = uuid.UUID(int=0)

# What was found: partitions by the name of their topic, or by an id that nobody knows.
Found = list[tuple[Any, list[Fetched]]]


class AskedTopic:
    """Partitions of one topic.  `topic`: its name, or, where nobody knows its id, the id."""

    __slots__ = ("partitions", "topic")

    def __init__(self, topic: str | uuid.UUID, partitions: list[Any]) -> None:
        self.topic = topic
        self.partitions = partitions


class Asking:
    """What every Fetch says, in a session or not."""

    __slots__ = (
        "_contexts",
        "_names",
        "endpoints",
        "isolation_level",
        "max_bytes",
        "max_wait_ms",
        "min_bytes",
        "version",
    )

    def __init__(self, contexts: FetchContexts, version: int, request: Any) -> None:
        self.version = version
        self.max_wait_ms: int = request.max_wait_ms
        self.min_bytes: int = request.min_bytes
        self.max_bytes: int = request.max_bytes
        self.isolation_level: int = request.isolation_level
        self._contexts = contexts
        self._names: dict[str, uuid.UUID] = {}  # ids of the topics that are looked at
        # Where the client reaches these brokers.
        self.endpoints: Callable[[set[int]], Sequence[NodeEndpoint]] = lambda leaders: ()

    def _encoded(self, found: Found, session: int) -> Answer:
        topics: Iterable[Any] = found
        if self.version >= BY_ID:
            topics = [(_id_bytes(name, self._names), rows) for name, rows in found]
        nodes: Sequence[NodeEndpoint] = ()
        if self.version >= NAMES_LEADERS:
            leaders = {x.leader[0] for _, rows in found for x in rows if x.leader is not None}
            nodes = self.endpoints(leaders) if leaders else ()
        return Answer(
            fetch_response(
                self.version,
                0,
                topics,
                self.isolation_level == 1,
                session_id=session,
                nodes=nodes,
            )
        )


class FullFetch(Asking):
    """A request that names all its partitions.  `opens`: it asks for a session."""

    __slots__ = ("_opens", "_request", "topics")

    def __init__(self, contexts: FetchContexts, version: int, request: Any, *, opens: bool) -> None:
        super().__init__(contexts, version, request)
        self._opens = opens
        self._request = request
        self.topics: Sequence[Any] = request.topics
        if version >= BY_ID:
            self.topics = [
                AskedTopic(contexts.name_of(t.topic_id, self._names), t.partitions)
                for t in request.topics
            ]

    @property
    def is_empty(self) -> bool:
        """Does it name no partition?"""
        return not self.topics

    def awaited(self) -> list[TopicPartition]:
        """The partitions whose growth it waits for."""
        return _awaited(self.topics)

    def wait(self, waiter: Waiter) -> None:
        """It waits from now on."""

    def end_wait(self, waiter: Waiter) -> None:
        """It waits no longer."""

    def looked(self, found: Found) -> None:
        """This is all that there is now."""

    def answer(self, found: Found) -> Answer:
        number = NO_SESSION
        if self._opens:
            number = self._contexts.open(self.version, self._request, found, self._names)
        return self._encoded(found, number)


class SessionFetch(Asking):
    """An incremental request of a session: it has named what has changed, and is answered with
    that."""

    __slots__ = ("_epoch", "_session")

    def __init__(
        self, contexts: FetchContexts, version: int, request: Any, session: FetchSession
    ) -> None:
        super().__init__(contexts, version, request)
        self._session = session
        self._epoch = session.epoch  # of the request after this one

    @property
    def topics(self) -> Sequence[Any]:
        """Those to be looked at, in the order of their turns."""
        out: list[AskedTopic] = []
        last: TopicKey = None
        for key in self._contexts.keys_to_look_at(self._session):
            row = self._session.rows.get(key)
            if row is None:
                continue
            if not out or row.topic != last:
                last = row.topic
                name = last if isinstance(last, str) else self._contexts.name_of(last, self._names)
                out.append(AskedTopic(name, []))
            out[-1].partitions.append(row)
        return out

    @property
    def is_empty(self) -> bool:
        return False  # else the session would have ended

    def awaited(self) -> list[TopicPartition]:
        return [] if self._contexts.looks_at_news_only else _awaited(self.topics)

    def wait(self, waiter: Waiter) -> None:
        self._session.woken = waiter.wake

    def end_wait(self, waiter: Waiter) -> None:
        if self._session.woken == waiter.wake:
            self._session.woken = _nobody_waits

    def _rows(self, found: Found) -> Iterable[tuple[SessionRow, Fetched, Any]]:
        for name, rows in found:
            key = self._names.get(name, name) if self.version >= BY_ID else name
            for one in rows:
                row = self._session.rows.get((key, one.partition))
                if row is not None:
                    yield row, one, name

    def looked(self, found: Found) -> None:
        if self._contexts.looks_at_news_only:
            for row, one, name in self._rows(found):
                if not one.error:
                    self._contexts.stand(row, one, name)

    def answer(self, found: Found) -> Answer:
        session = self._session
        if session.epoch != self._epoch:  # another request has come in between
            error = ErrorCode.INVALID_FETCH_SESSION_EPOCH
            return Answer(fetch_response(self.version, error, (), session_id=session.number))
        told: Found = []
        for row, one, name in list(self._rows(found)):
            if not row.has_news(one):
                continue
            row.told(one)
            if one.size:
                session.to_the_end(row)
            if not told or told[-1][0] != name:
                told.append((name, []))
            told[-1][1].append(one)
        return self._encoded(told, session.number)


class FetchContexts:
    """See the module."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._time_ms = services.environment.time_ms
        self.looks_at_news_only = services.membership is None
        slots = services.config["max.incremental.fetch.session.cache.slots"]
        chance = random.SystemRandom()
        self.cache = SessionCache(slots, EVICTION_MS, lambda: chance.randrange(1, 1 << 31))
        self.cache.ended = self._leave_all
        self._full_looks: dict[int, int] = {}

    def begin(self, version: int, request: Any) -> FullFetch | SessionFetch | int:
        """What stands for the request, or the error code of the answer."""
        number = getattr(request, "session_id", NO_SESSION)
        epoch = getattr(request, "session_epoch", FINAL_EPOCH)
        if epoch in (INITIAL_EPOCH, FINAL_EPOCH):
            if number != NO_SESSION:
                self.cache.remove(number)
            return FullFetch(self, version, request, opens=epoch == INITIAL_EPOCH)
        session = self.cache.get(number)
        if session is None:
            return ErrorCode.FETCH_SESSION_ID_NOT_FOUND
        if session.epoch != epoch:
            return ErrorCode.INVALID_FETCH_SESSION_EPOCH
        if session.by_id != (version >= BY_ID):
            return ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR
        for row in session.update(_named(version, request), _forgotten(version, request)):
            self._leave(row)
        if not session.rows:
            self.cache.remove(number)
            return FullFetch(self, version, request, opens=False)
        now_ms = self._time_ms()
        self.cache.touch(session, now_ms)
        session.epoch = next_epoch(session.epoch)
        if now_ms - self._full_looks.get(number, 0) >= FULL_LOOK_MS:
            self._full_looks[number] = now_ms
            session.marked = dict.fromkeys(session.rows)
        return SessionFetch(self, version, request, session)

    def open(self, version: int, request: Any, found: Found, names: dict[str, uuid.UUID]) -> int:
        """The number of the session that a full Fetch asks for, of which `found` is the answer, or
        NO_SESSION: there is no room for it."""
        rows: dict[tuple[TopicKey, int], SessionRow] = {}
        for topic, asked in _named(version, request):
            row = rows[topic, int(asked.partition)] = SessionRow(topic, int(asked.partition))
            row.ask(asked)
        for name, ones in found:
            for one in ones:
                told = rows.get((names.get(name, name), one.partition))
                if told is not None:
                    told.told(one)
        session = self.cache.create(self._time_ms(), version >= BY_ID, rows)
        if session is None:
            return NO_SESSION
        session.marked = dict.fromkeys(rows)
        self._full_looks[session.number] = session.created_ms
        return session.number

    # -- names -------------------------------------------------------------------------------------

    def name_of(self, topic_id: uuid.UUID | None, names: dict[str, uuid.UUID]) -> str | uuid.UUID:
        """The name of a topic, which is noted in `names`, or the id itself: nobody knows it."""
        topic_id = topic_id or NO_ID
        topic = self._services.topics.find_by_id(topic_id)
        if topic is None or getattr(topic, "deleting", False):
            return topic_id
        names[topic.name] = topic_id
        return topic.name

    # -- rows that wait ----------------------------------------------------------------------------

    def keys_to_look_at(self, session: FetchSession) -> list[tuple[TopicKey, int]]:
        return list(session.marked if self.looks_at_news_only else session.rows)

    def stand(self, row: SessionRow, found: Fetched, name: str) -> None:
        """A partition of a session was looked at: its row is woken when its log grows, and is not
        looked at before if there is nothing to be told."""
        session, tp = row.session, TopicPartition(name, row.partition)
        if session is None or self.cache.get(session.number) is not session:
            return
        if row.stands != tp:
            self._leave(row)
            row.stands = tp
            self._services.waiters.stand(tp, row)
        self._services.watch(tp)
        if row.has_news(found) or row.fetch_offset < found.high_watermark:
            return
        session.marked.pop(row.key, None)
        partition = self._services.logs.partitions.get(tp)
        # Records that came after the look, and before it stood there, have woken nobody.
        if partition is None or partition.high_watermark != found.high_watermark:
            session.marked[row.key] = None
            session.woken()

    def _leave(self, row: SessionRow) -> None:
        if row.stands is not None:
            self._services.waiters.leave(row.stands, row)
            row.stands = None

    def _leave_all(self, session: FetchSession) -> None:
        self._full_looks.pop(session.number, None)
        for row in session.rows.values():
            self._leave(row)
            row.session = None


def _nobody_waits() -> None:
    pass


def _awaited(topics: Iterable[Any]) -> list[TopicPartition]:
    return [
        TopicPartition(t.topic, x.partition)
        for t in topics
        if isinstance(t.topic, str)
        for x in t.partitions
    ]


def _id_bytes(name: str | uuid.UUID, names: dict[str, uuid.UUID]) -> bytes:
    return (names[name] if isinstance(name, str) else name).bytes


def _named(version: int, request: Any) -> Iterable[tuple[TopicKey, Any]]:
    for t in request.topics:
        topic = (t.topic_id or NO_ID) if version >= BY_ID else t.topic
        for x in t.partitions:
            yield topic, x


def _forgotten(version: int, request: Any) -> Iterable[tuple[TopicKey, int]]:
    for t in request.forgotten_topics_data:
        topic = (t.topic_id or NO_ID) if version >= BY_ID else t.topic
        for number in t.partitions:
            yield topic, int(number)
