"""Sessions of clients that fetch (KIP-227): what each has asked for, and which of them are kept.

Law: pure; the clock is passed in, and nothing here knows of partitions' logs.  A session belongs to
no connection.  Epochs, eviction and what an incremental answer names are Apache Kafka's
(`FetchSession.scala`).

A session costs nothing for partitions of which there is no news: those that may have some are its
`marked` ones, and only these are looked at.  A partition is marked when a request names it, when
its log grows, and as long as its last answer had something; `SessionRow.wake` marks it.

Followers have sessions of another kind (`kdirect.member.fetch_sessions`).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kdirect.format.datapath import Fetched
from kdirect.model import TopicPartition

INITIAL_EPOCH = 0
FINAL_EPOCH = -1
NO_SESSION = 0
MAX_EPOCH = (1 << 31) - 1

# A topic as a request names it: by name, or by id.
TopicKey = str | uuid.UUID | None


def next_epoch(epoch: int) -> int:
    """The epoch of the request after this one."""
    if epoch < 0:
        return FINAL_EPOCH
    return 1 if epoch == MAX_EPOCH else epoch + 1


class SessionRow:
    """One partition of a session: what was asked for, and what was told.  Its attributes are those
    of a partition in a Fetch request.  It stands in the broker's table of who waits: `wake` is
    called when the log has grown (`missing` is that of a `Waiter` who waits for any byte)."""

    __slots__ = (
        "current_leader_epoch",
        "fetch_offset",
        "high_watermark",
        "last_fetched_epoch",
        "log_start_offset",
        "missing",
        "partition",
        "partition_max_bytes",
        "session",
        "stands",
        "topic",
    )

    def __init__(self, topic: TopicKey, partition: int) -> None:
        self.topic = topic
        self.partition = partition
        self.high_watermark = -1  # as last told, and so is the next
        self.log_start_offset = -1
        self.missing = 0
        self.session: FetchSession | None = None
        self.stands: TopicPartition | None = None  # under which it is in the table

    def ask(self, asked: object) -> None:
        """Take over what a request says of the partition."""
        self.current_leader_epoch = getattr(asked, "current_leader_epoch", -1)
        self.fetch_offset: int = getattr(asked, "fetch_offset")  # noqa: B009
        self.last_fetched_epoch = getattr(asked, "last_fetched_epoch", -1)
        self.partition_max_bytes: int = getattr(asked, "partition_max_bytes")  # noqa: B009

    @property
    def key(self) -> tuple[TopicKey, int]:
        return self.topic, self.partition

    def has_news(self, found: Fetched) -> bool:
        """Does an incremental answer name the partition?"""
        return bool(
            found.size
            or found.buffers
            or found.error
            or found.high_watermark != self.high_watermark
            or found.log_start_offset != self.log_start_offset
            or found.preferred >= 0
            or found.diverging
        )

    def told(self, found: Fetched) -> None:
        """The client is sent this answer."""
        self.high_watermark = -1 if found.error else found.high_watermark
        self.log_start_offset = found.log_start_offset

    def wake(self) -> None:
        """There may be news."""
        self.missing = 0
        session = self.session
        if session is not None:
            session.marked[self.key] = None
            session.woken()


@dataclass(slots=True, eq=False)
class FetchSession:
    """One session.  `epoch` is that of the next request."""

    number: int
    by_id: bool  # topics are named by their ids
    created_ms: int
    rows: dict[tuple[TopicKey, int], SessionRow]
    used_ms: int = 0
    epoch: int = 1
    size: int = -1  # when it was used last
    marked: dict[tuple[TopicKey, int], None] = field(default_factory=dict)
    # Called when a partition was marked while a request waits.
    woken: Callable[[], None] = lambda: None

    def update(
        self,
        named: Iterable[tuple[TopicKey, object]],
        forgotten: Iterable[tuple[TopicKey, int]],
    ) -> list[SessionRow]:
        """Take over what a request names, then leave out what is to be forgotten, whose rows are
        returned."""
        for topic, asked in named:
            key = topic, int(asked.partition)  # type: ignore[attr-defined]
            row = self.rows.get(key)
            if row is None:
                row = self.rows[key] = SessionRow(*key)
                row.session = self
            row.ask(asked)
            self.marked[key] = None
        gone = []
        for key in forgotten:
            row = self.rows.pop(key, None)
            self.marked.pop(key, None)
            if row is not None:
                gone.append(row)
        return gone

    def to_the_end(self, row: SessionRow) -> None:
        """It has had its turn: others come first the next time."""
        self.rows[row.key] = self.rows.pop(row.key)
        if row.key in self.marked:
            del self.marked[row.key]
            self.marked[row.key] = None


class SessionCache:
    """The sessions that are kept: `slots` of them at most.  `draw` draws the number of a new one.

    When all slots are taken, a new session gets that of one that was not used for `eviction_ms`, or
    of one that is as old and has fewer partitions than the new one: the smallest."""

    def __init__(self, slots: int, eviction_ms: int, draw: Callable[[], int]) -> None:
        self._slots = slots
        self._eviction_ms = eviction_ms
        self._draw = draw
        self.sessions: dict[int, FetchSession] = {}  # the one used longest ago comes first
        self.evicted = 0
        # A session has ended.
        self.ended: Callable[[FetchSession], None] = lambda session: None

    def get(self, number: int) -> FetchSession | None:
        return self.sessions.get(number)

    def create(
        self, now_ms: int, by_id: bool, rows: dict[tuple[TopicKey, int], SessionRow]
    ) -> FetchSession | None:
        """A new session with these rows, or None: there is no slot for it."""
        if len(self.sessions) >= self._slots and not self._evict(len(rows), now_ms):
            return None
        number = self._draw()
        while number == NO_SESSION or number in self.sessions:
            number = self._draw()
        session = FetchSession(number, by_id, now_ms, rows)
        for row in rows.values():
            row.session = session
        self.sessions[number] = session
        self.touch(session, now_ms)
        return session

    def touch(self, session: FetchSession, now_ms: int) -> None:
        """A session is used."""
        session.used_ms = now_ms
        session.size = len(session.rows)
        self.sessions[session.number] = self.sessions.pop(session.number)

    def remove(self, number: int) -> None:
        session = self.sessions.pop(number, None)
        if session is not None:
            self.ended(session)

    def _evict(self, size: int, now_ms: int) -> bool:
        oldest = next(iter(self.sessions.values()), None)
        if oldest is None:
            return False
        if now_ms - oldest.used_ms <= self._eviction_ms:
            # Old enough when it was used last.
            old = [
                s for s in self.sessions.values() if s.used_ms - s.created_ms > self._eviction_ms
            ]
            oldest = min(old, key=lambda s: (s.size, s.number), default=None)
            if oldest is None or size <= oldest.size:
                return False
        self.remove(oldest.number)
        self.evicted += 1
        return True
