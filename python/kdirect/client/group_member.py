"""A consumer's membership in its group, whichever protocol it speaks: who the member is, the thread
that keeps it alive, and commits in its name.

It owns the member's state and id, and the one thread.  The connection to the coordinator, and what
is asked over it by members and others alike, is the `CoordinatorLink`'s.  The consumer owns what is
read and the callbacks.  How a member joins, and what it says to stay, is `group`'s (Kafka's classic
protocol) and `consumer_group`'s (KIP-848).

Invariants:

- `advance` blocks no longer than the caller says: a rebalance that takes longer continues at the
  next call.  `join` does not block.
- The thread only sends heartbeats, sets flags and calls the owner's `clock`.  No callback of a user
  runs on it, and no record passes through it.
- A member that was fenced, or whose owner did not poll for `max.poll.interval.ms`, has no
  partitions any more.  `lost` says why, and the coordinator refuses commits of the old generation.
- Between `join` and `leave` every commit is a member's.  Outside of a generation it is refused
  here, because the coordinator of an empty group would accept it as a commit without a member.
- The thread ends with the consumer, even if nobody closes it: it holds its owner weakly, and leaves
  the group when the owner is gone.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from kdirect.client.coordinator_link import ELSEWHERE, CoordinatorLink
from kdirect.client.transaction import GroupMetadata
from kdirect.errors import ConfigError, KdirectError
from kdirect.format.error_codes import ErrorCode
from kdirect.model import TopicPartition
from kdirect.wire.broker_errors import broker_error
from kdirect.wire.cluster import Cluster
from kdirect.wire.connection import Connection, Pending

log = logging.getLogger("kdirect.client")

OUT, JOINING, SYNCING, STABLE = "out", "joining", "syncing", "stable"
LEAVE_MS = 5000.0  # to find the coordinator, and for its answer: without one the session ends

FENCED = frozenset(
    (
        ErrorCode.UNKNOWN_MEMBER_ID,
        ErrorCode.ILLEGAL_GENERATION,
        ErrorCode.FENCED_MEMBER_EPOCH,
        ErrorCode.FENCED_INSTANCE_ID,
    )
)
_GONE = (
    "the group was rebalanced meanwhile: who has the partition now reads from the last commit on"
)
HINTS: dict[int, str] = {
    ErrorCode.INCONSISTENT_GROUP_PROTOCOL: (
        "the group's members have no assignor in common: see partition.assignment.strategy"
    ),
    ErrorCode.INVALID_SESSION_TIMEOUT: (
        "set session.timeout.ms between the broker's group.min and group.max.session.timeout.ms"
    ),
    ErrorCode.GROUP_MAX_SIZE_REACHED: "the broker's limit of members of a group is reached",
    ErrorCode.FENCED_INSTANCE_ID: "another consumer runs with the same group.instance.id",
    ErrorCode.UNRELEASED_INSTANCE_ID: "another consumer runs with the same group.instance.id",
    ErrorCode.UNSUPPORTED_ASSIGNOR: (
        "set group.remote.assignor to one of the broker's group.consumer.assignors, or leave it out"
    ),
    ErrorCode.INVALID_REGULAR_EXPRESSION: (
        "the broker matches the whole name, with RE2's expressions; correct it"
    ),
}


class Owner(Protocol):
    """What the thread of a membership calls of its consumer."""

    def activity(self) -> int:
        """A number that changes as long as the consumer is polled."""

    def news(self) -> None:
        """Something happened that the next poll must look at."""

    def clock(self, now: float) -> float:
        """Called when its time comes, with the monotonic time in s; returns when to call again."""


class GroupMember:
    """One consumer's membership; see the module.  Public methods are called on the consumer's
    thread.  Raises ConfigError for settings that are missing or contradict each other.

    `incremental`: assignments name what is given and taken on top of what is read, and what stays
    is read on throughout.  Otherwise everything is given back before a rebalance.
    """

    incremental = False
    finds_topics = False  # the coordinator looks for topics that come, and for partitions

    def __init__(self, cluster: Cluster, settings: Mapping[str, Any], owner: Owner) -> None:
        self.group_id: str = settings["group.id"]
        if not self.group_id:
            raise ConfigError(
                "a consumer without group.id has no group",
                hint="set group.id, or assign partitions yourself",
            )
        self.member_id = ""
        self.generation = -1
        self.state = OUT
        self.lost = ""  # why the assigned partitions are no longer ours; empty if they are
        self.rebalancing = False  # the coordinator wants everybody to join again
        self.is_leader = False
        self.rebalances = 0
        self._instance_id: str | None = settings["group.instance.id"]
        self._session_ms: int = settings["session.timeout.ms"]
        self._interval_s: float = settings["heartbeat.interval.ms"] / 1000
        self._poll_interval_s: float = settings["max.poll.interval.ms"] / 1000
        self._cluster = cluster
        self._environment = cluster.environment
        self._owner = weakref.ref(owner)
        self._topics: frozenset[str] = frozenset()
        self._subscribed = False  # between `join` and `leave`
        self._lock = threading.Lock()  # guards state, ids and flags, not requests
        stable = settings["isolation.level"] == "read_committed"
        self._link = CoordinatorLink(cluster, self.group_id, stable=stable)
        self._not_before = 0.0
        self._failures = 0
        self._stop = threading.Event()
        self._poked = threading.Event()  # the thread has something to do
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    # -- joining, as each protocol does it ---------------------------------------------------------

    def join(self, topics: Iterable[str], regex: str = "") -> None:
        """Begin to join, or to join again, as a reader of `topics`, and of those that the broker
        finds for `regex`.  Unless the member is `incremental`, the caller must have given up its
        partitions before.  `advance` does the work."""
        raise NotImplementedError

    def advance(self, timeout_ms: float) -> list[TopicPartition] | None:
        """Continue joining for at most about `timeout_ms`.  Returns the assigned partitions, or
        None if it takes longer, or there is nothing new.  Raises BrokerError if the coordinator
        refuses the member for a reason that does not pass."""
        raise NotImplementedError

    @property
    def settled(self) -> bool:
        """Has `advance` nothing to do?"""
        return self.state == STABLE

    def gave_back(self, kept: Iterable[TopicPartition]) -> bool:
        """An incremental member reads nothing but these any more.  Whether it may take nothing
        before `advance` has said so once more."""
        return False

    def took(self, tps: Iterable[TopicPartition]) -> bool:
        """May an incremental member begin to read these now, as `advance` has said?  If not, it
        says what to do at its next call."""
        return True

    def _beat(self) -> float:
        """Send a heartbeat; in how many seconds the next one is due.  On the thread."""
        raise NotImplementedError

    def _beats(self) -> bool:
        """Are there heartbeats to send?"""
        return self.state == STABLE

    def _send_leave(self) -> None:
        raise NotImplementedError

    def _ask_to_leave(self, message: Any) -> None:
        """Send what `_send_leave` has to say, without long patience."""
        patience_ms = min(LEAVE_MS, self._cluster.timeout_ms)
        try:
            self._link.connection(patience_ms).request(message, patience_ms)
        except KdirectError as e:
            log.info("leaving group %s: %s; its session will end by itself", self.group_id, e)

    def _reset_member(self) -> None:
        with self._lock:
            self.generation = -1

    def _backoff_s(self) -> float:
        """A wait that doubles with each failure in a row."""
        self._failures += 1
        settings = self._cluster.settings
        wait_ms: float = min(
            settings["reconnect.backoff.ms"] << min(self._failures, 10),
            settings["reconnect.backoff.max.ms"],
        )
        return wait_ms / 1000

    # -- offsets -----------------------------------------------------------------------------------

    @property
    def metadata(self) -> GroupMetadata:
        """Who commits, as a coordinator checks it that commits with a transaction."""
        with self._lock:
            return GroupMetadata(self.group_id, self.generation, self.member_id, self._instance_id)

    def send_commit(self, offsets: Mapping[TopicPartition, int], metadata: str = "") -> Pending:
        """Send a commit as this member, or, if it has not joined or has left, as nobody in
        particular.  Pass the answer to `check_commit`.  Raises BrokerError if the member is outside
        of a generation.
        """
        with self._lock:
            state, generation, member_id, member = (
                self.state,
                self.generation,
                self.member_id,
                self._subscribed,
            )
        in_generation = state == STABLE or (self.incremental and generation >= 0)
        if member and not in_generation:
            code = ErrorCode.ILLEGAL_GENERATION if state == OUT else ErrorCode.REBALANCE_IN_PROGRESS
            raise broker_error(code, f"a commit for group {self.group_id!r}", hint=_GONE)
        if not member:
            return self._link.send_commit(offsets, metadata, -1, "", None)
        return self._link.send_commit(offsets, metadata, generation, member_id, self._instance_id)

    @property
    def is_member(self) -> bool:
        """May it commit as a member of the present generation?"""
        return self._subscribed and self.state == STABLE

    @property
    def instance_id(self) -> str | None:
        """`group.instance.id`."""
        return self._instance_id

    def coordinator(self) -> Connection:
        """The private connection to the coordinator."""
        return self._link.connection()

    def check_commit(self, answer: Any) -> None:
        """Raise BrokerError if a commit's answer has an error; it is retriable if another attempt
        may help."""
        for topic in answer.topics:
            for partition in topic.partitions:
                code = partition.error_code
                if not code:
                    continue
                if code in ELSEWHERE:
                    self._link.drop()
                if code in FENCED:
                    self._fence(ErrorCode(code).name)
                gone = code in FENCED or code == ErrorCode.REBALANCE_IN_PROGRESS
                tp = TopicPartition(topic.name, partition.partition_index)
                raise broker_error(
                    code,
                    f"committing {tp} for group {self.group_id!r}",
                    hint=_GONE if gone else "",
                )

    def commit(
        self, offsets: Mapping[TopicPartition, int], timeout_ms: float | None = None
    ) -> None:
        """Commit and wait.  After transient errors it is repeated for up to `timeout_ms` (default:
        request.timeout.ms).  Raises what `send_commit` and `check_commit` raise."""
        monotonic = self._environment.monotonic

        def attempt(left_ms: float) -> None:
            until = monotonic() + left_ms / 1000
            # Else `send_commit` would look for the coordinator for as long as any request may take.
            self._link.connection(left_ms)
            pending = self.send_commit(offsets)
            self.check_commit(pending.result(max(0.0, (until - monotonic()) * 1000)))

        self._link.patiently(attempt, timeout_ms)

    def committed(
        self, tps: Iterable[TopicPartition], timeout_ms: float | None = None
    ) -> dict[TopicPartition, int | None]:
        """The offsets that the group has committed; None for a partition without one."""
        return self._link.committed(tps, timeout_ms, self._asks_for_offsets)

    def _asks_for_offsets(self) -> tuple[str, int] | None:
        """Who asks for committed offsets, if the coordinator is to check it."""
        return None

    def is_reached(self) -> bool:
        """Is there a connection to the coordinator?  Where there is none it is looked for, and
        nobody waits longer than a moment."""
        return self._link.is_reached()

    # -- staying -----------------------------------------------------------------------------------

    def start_thread(self) -> None:
        """Start the thread, unless it runs: for the first join, or for an owner that has timers."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._keep, name=f"kdirect-group-{self.group_id}", daemon=True
            )
            self._thread.start()

    def _keep(self) -> None:
        next_beat = self._environment.monotonic() + self._interval_s
        next_clock = 0.0
        activity, active_at = -1, self._environment.monotonic()
        while True:
            self._poked.wait(max(0.001, min(next_beat, next_clock) - self._environment.monotonic()))
            if self._stop.is_set():
                return
            poked = self._poked.is_set()
            self._poked.clear()
            owner = self._owner()
            if owner is None:
                self.leave()
                return
            now = self._environment.monotonic()
            seen = owner.activity()
            if seen != activity:
                activity, active_at = seen, now
            if now >= next_clock:
                next_clock = owner.clock(now)
            del owner
            if now < next_beat and not poked:
                continue
            next_beat = now + self._interval_s
            if not self._beats():
                continue
            if now - active_at > self._poll_interval_s:
                self._give_up("no poll within max.poll.interval.ms")
                continue
            drops = self._link.drops
            try:
                next_beat = now + self._beat()
            except KdirectError as e:
                log.info("heartbeat of group %s: %s", self.group_id, e)
                if not self._stop.is_set():
                    self._link.drop(drops)

    def _give_up(self, why: str) -> None:
        """Leave, on the thread; the next poll joins again."""
        log.warning("group %s: %s: this consumer's partitions go to the others", self.group_id, why)
        self._send_leave()
        self._fence(why)
        self._reset_member()

    def _fence(self, why: str) -> None:
        with self._lock:
            if self.state == STABLE:
                self.state = OUT
                self.lost = why
                self.generation = -1
        self._tell()

    def _tell(self) -> None:
        owner = self._owner()
        if owner is not None:
            owner.news()

    # -- leaving -----------------------------------------------------------------------------------

    def leave(self) -> None:
        """Leave the group.  `join` may be called again."""
        if self._pid != os.getpid():
            return
        with self._lock:
            was, self.state = self.state, OUT
            self.rebalancing = self._subscribed = False
            self.lost = ""
        if was != OUT:
            self._send_leave()
        self._reset_member()

    def close(self) -> None:
        """Leave the group, end the thread and give the connection back."""
        self._stop.set()
        self._poked.set()
        if self._pid != os.getpid():
            return
        self.leave()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)
        self._link.give_back()
