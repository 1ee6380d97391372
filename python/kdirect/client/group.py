"""A consumer's membership in its group: joining, syncing and heartbeats (Kafka's classic group
protocol).

It owns the member's id and generation, and the one thread that keeps the member alive while the
consumer works.  The connection to the coordinator, and what is asked over it by members and others
alike, is the `CoordinatorLink`'s.  The consumer owns what is read and the callbacks.  `assignors`
decides which member reads what.

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

from kdirect.client.assignors import (
    ASSIGNORS,
    PROTOCOL_TYPE,
    check_strategies,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)
from kdirect.client.coordinator_link import ELSEWHERE, CoordinatorLink
from kdirect.client.transaction import GroupMetadata
from kdirect.errors import (
    BrokerError,
    ConfigError,
    KdirectError,
    ProtocolError,
    TimedOutError,
    UnknownTopicError,
)
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.model import TopicPartition
from kdirect.wire.broker_errors import broker_error
from kdirect.wire.cluster import Cluster
from kdirect.wire.connection import Connection, Pending

log = logging.getLogger("kdirect.client")

OUT, JOINING, SYNCING, STABLE = "out", "joining", "syncing", "stable"

_NOT_YET = frozenset((ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.REBALANCE_IN_PROGRESS))
_FENCED = frozenset((ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION))
_GONE = (
    "the group was rebalanced meanwhile: who has the partition now reads from the last commit on"
)
_HINTS: dict[int, str] = {
    ErrorCode.INCONSISTENT_GROUP_PROTOCOL: (
        "the group's members have no assignor in common: see partition.assignment.strategy"
    ),
    ErrorCode.INVALID_SESSION_TIMEOUT: (
        "set session.timeout.ms between the broker's group.min and group.max.session.timeout.ms"
    ),
    ErrorCode.GROUP_MAX_SIZE_REACHED: "the broker's group.max.size is reached",
    ErrorCode.FENCED_INSTANCE_ID: "another consumer runs with the same group.instance.id",
}


class Owner(Protocol):
    """What the thread of a membership calls of its consumer."""

    def activity(self) -> int:
        """A number that changes as long as the consumer is polled."""

    def news(self) -> None:
        """Something happened that the next poll must look at."""

    def clock(self, now: float) -> float:
        """Called when its time comes, with the monotonic time in s; returns when to call again."""


class Membership:
    """One consumer's membership; see the module.  Public methods are called on the consumer's
    thread.  Raises ConfigError for settings that are missing or contradict each other."""

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
        self._strategies = check_strategies(settings["partition.assignment.strategy"])
        if settings["heartbeat.interval.ms"] >= self._session_ms:
            raise ConfigError(
                f"heartbeat.interval.ms {settings['heartbeat.interval.ms']} is not below"
                f" session.timeout.ms {self._session_ms}",
                hint="a third of it is usual",
            )
        self._cluster = cluster
        self._environment = cluster.environment
        self._owner = weakref.ref(owner)
        self._topics: frozenset[str] = frozenset()
        self._subscribed = False  # between `join` and `leave`
        self._lock = threading.Lock()  # guards state, ids and flags, not requests
        stable = settings["isolation.level"] == "read_committed"
        self._link = CoordinatorLink(cluster, self.group_id, stable=stable)
        self._pending: Pending | None = None
        self._pending_until = 0.0
        self._not_before = 0.0
        self._failures = 0
        self._protocol = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    # -- joining -----------------------------------------------------------------------------------

    def join(self, topics: Iterable[str]) -> None:
        """Begin to join, or to join again, as a reader of `topics`.  The caller must have given up
        its partitions before.  `advance` does the work."""
        with self._lock:
            self._topics = frozenset(topics)
            self._subscribed = True
            self._pending = None
            self.state = JOINING
            self.rebalancing = False
            self.lost = ""
        self.start_thread()

    def advance(self, timeout_ms: float) -> list[TopicPartition] | None:
        """Continue joining for at most about `timeout_ms`.  Returns the assigned partitions, or
        None if joining takes longer.

        After a transient error it tries again.  Raises BrokerError if the coordinator refuses the
        member for another reason.
        """
        deadline = self._environment.monotonic() + timeout_ms / 1000
        while self.state in (JOINING, SYNCING):
            now = self._environment.monotonic()
            if now < self._not_before:
                if self._not_before >= deadline:
                    self._environment.sleep(max(0.0, deadline - now))
                    return None
                self._environment.sleep(self._not_before - now)
            try:
                if self._pending is None:
                    self._pending = (
                        self._send_sync([]) if self.state == SYNCING else self._send_join()
                    )
                pending = self._pending
                if not pending.wait(max(0.0, (deadline - self._environment.monotonic()) * 1000)):
                    if self._environment.monotonic() < self._pending_until:
                        return None
                    raise TimedOutError(
                        f"the coordinator of group {self.group_id!r} does not answer"
                        f" {pending.name}",
                        hint="see the broker",
                    )
                self._pending = None
                answer = pending.result(0)
                found = self._joined(answer) if self.state == JOINING else self._synced(answer)
                if found is not None:
                    return found
            except KdirectError as e:
                self._pending = None
                self._join_again()
                if isinstance(e, BrokerError) or not e.retriable:
                    raise
                self._pause(f"{e}", drop=True)
            if self._environment.monotonic() >= deadline:
                return None
        return None

    def _join_again(self) -> None:
        """After a failed sync, join instead of syncing again.  The coordinator may not have
        received this leader's assignments, and a sync without them would leave the group with
        nothing to read."""
        with self._lock:
            if self.state == SYNCING:
                self.state = JOINING

    def _send_join(self) -> Pending:
        r = p.JoinGroupRequest
        metadata = encode_subscription(self._topics)
        message = r(
            group_id=self.group_id,
            session_timeout_ms=self._session_ms,
            rebalance_timeout_ms=int(self._poll_interval_s * 1000),
            member_id=self.member_id,
            group_instance_id=self._instance_id,
            protocol_type=PROTOCOL_TYPE,
            protocols=[
                r.JoinGroupRequestProtocol(name=name, metadata=metadata)
                for name in self._strategies
            ],
            reason="",
        )
        self._pending_until = (
            self._environment.monotonic() + self._poll_interval_s + self._cluster.timeout_ms / 1000
        )
        return self._link.connection().submit(message)

    def _joined(self, answer: Any) -> list[TopicPartition] | None:
        code = answer.error_code
        if code:
            if code == ErrorCode.MEMBER_ID_REQUIRED:
                self.member_id = answer.member_id
            else:
                self._refused(code, "joining")
            return None
        with self._lock:
            self.member_id, self.generation = answer.member_id, answer.generation_id
            self._protocol = answer.protocol_name or ""
            self.is_leader = answer.leader == answer.member_id
            self.state = SYNCING
        assignments: list[tuple[str, bytes]] = []
        if self.is_leader and not getattr(answer, "skip_assignment", False):
            assignments = self._assign(
                [(m.member_id, m.group_instance_id, bytes(m.metadata)) for m in answer.members]
            )
        self._pending = self._send_sync(assignments)
        return None

    def _assign(self, members: list[tuple[str, str | None, bytes]]) -> list[tuple[str, bytes]]:
        assignor = ASSIGNORS.get(self._protocol)
        if assignor is None:
            raise ProtocolError(
                f"group {self.group_id!r} chose the assignor {self._protocol!r}, which was not"
                " offered"
            )
        read = [
            (member_id, instance, decode_subscription(metadata))
            for member_id, instance, metadata in members
        ]
        counts: dict[str, int] = {}
        for topic in sorted(frozenset().union(*(m[2] for m in read))):
            try:
                counts[topic] = len(self._cluster.partitions(topic, refresh=True))
            except UnknownTopicError:
                log.warning("group %s reads topic %s, which does not exist", self.group_id, topic)
        return [
            (member_id, encode_assignment(tps)) for member_id, tps in assignor(read, counts).items()
        ]

    def _send_sync(self, assignments: list[tuple[str, bytes]]) -> Pending:
        r = p.SyncGroupRequest
        message = r(
            group_id=self.group_id,
            generation_id=self.generation,
            member_id=self.member_id,
            group_instance_id=self._instance_id,
            protocol_type=PROTOCOL_TYPE,
            protocol_name=self._protocol,
            assignments=[
                r.SyncGroupRequestAssignment(member_id=m, assignment=a) for m, a in assignments
            ],
        )
        self._pending_until = (
            self._environment.monotonic() + self._poll_interval_s + self._cluster.timeout_ms / 1000
        )
        return self._link.connection().submit(message)

    def _synced(self, answer: Any) -> list[TopicPartition] | None:
        if answer.error_code:
            self._join_again()
            if answer.error_code != ErrorCode.REBALANCE_IN_PROGRESS:
                self._refused(answer.error_code, "syncing")
            return None
        tps = decode_assignment(bytes(answer.assignment or b""))
        with self._lock:
            self.state = STABLE
            self._failures = 0
            self.rebalances += 1
        log.info(
            "member %s of group %s, generation %d: %s",
            self.member_id,
            self.group_id,
            self.generation,
            ", ".join(map(str, tps)) or "none",
        )
        return tps

    def _refused(self, code: int, doing: str) -> None:
        if code in _FENCED:
            self._reset_member()
        elif code in ELSEWHERE:
            self._pause(ErrorCode(code).name, drop=True)
        elif code in _NOT_YET:
            self._pause(ErrorCode(code).name, drop=False)
        else:
            with self._lock:
                self.state = OUT
            raise broker_error(code, f"{doing} group {self.group_id!r}", hint=_HINTS.get(code, ""))

    def _reset_member(self) -> None:
        with self._lock:
            self.generation = -1
            if self._instance_id is None:
                self.member_id = ""

    def _pause(self, why: str, *, drop: bool) -> None:
        """Set when to try again, after a wait that doubles with each failure.  With `drop`, on a
        new connection."""
        self._failures += 1
        log.info("group %s: %s; trying again", self.group_id, why)
        settings = self._cluster.settings
        wait_ms = min(
            settings["reconnect.backoff.ms"] << min(self._failures, 10),
            settings["reconnect.backoff.max.ms"],
        )
        self._not_before = self._environment.monotonic() + wait_ms / 1000
        if drop:
            self._link.drop()

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
        if member and state != STABLE:
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
                if code in _FENCED or code == ErrorCode.FENCED_INSTANCE_ID:
                    self._fence(ErrorCode(code).name)
                gone = code in _FENCED or code == ErrorCode.REBALANCE_IN_PROGRESS
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
        self._link.patiently(
            lambda left_ms: self.check_commit(self.send_commit(offsets).result(left_ms)), timeout_ms
        )

    def committed(
        self, tps: Iterable[TopicPartition], timeout_ms: float | None = None
    ) -> dict[TopicPartition, int | None]:
        """The offsets that the group has committed; None for a partition without one."""
        return self._link.committed(tps, timeout_ms)

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
            if self._stop.wait(
                max(0.001, min(next_beat, next_clock) - self._environment.monotonic())
            ):
                return
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
            if now < next_beat:
                continue
            next_beat = now + self._interval_s
            if self.state != STABLE:
                continue
            if now - active_at > self._poll_interval_s:
                self._give_up()
                continue
            try:
                self._beat()
            except KdirectError as e:
                log.info("heartbeat of group %s: %s", self.group_id, e)
                if not self._stop.is_set():
                    self._link.drop()

    def _give_up(self) -> None:
        log.warning(
            "group %s: no poll for %.0f s (max.poll.interval.ms):"
            " this consumer's partitions go to the others",
            self.group_id,
            self._poll_interval_s,
        )
        self._send_leave()
        self._fence("no poll within max.poll.interval.ms")
        self._reset_member()

    def _beat(self) -> None:
        with self._lock:
            generation, member_id = self.generation, self.member_id
        message = p.HeartbeatRequest(
            group_id=self.group_id,
            generation_id=generation,
            member_id=member_id,
            group_instance_id=self._instance_id,
        )
        answer = self._link.connection().request(
            message, min(self._cluster.timeout_ms, self._session_ms)
        )
        code = answer.error_code
        if not code or (generation, member_id) != (self.generation, self.member_id):
            return
        if code == ErrorCode.REBALANCE_IN_PROGRESS:
            # Heartbeats continue: the owner may still work on the records that it has, and joins
            # again with its next poll.
            self.rebalancing = True
            self._tell()
        elif code in _FENCED or code == ErrorCode.FENCED_INSTANCE_ID:
            self._fence(ErrorCode(code).name)
            self._reset_member()
        elif code in ELSEWHERE:
            self._link.drop()

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

    def _send_leave(self) -> None:
        # A static member does not leave: it may return within its session, to the same partitions.
        if not self.member_id or self._instance_id is not None:
            return
        r = p.LeaveGroupRequest
        message = r(
            group_id=self.group_id,
            member_id=self.member_id,
            members=[r.MemberIdentity(member_id=self.member_id, group_instance_id=None, reason="")],
        )
        try:
            # A request after a join that still waits would get no answer: take a new connection.
            if self._pending is not None:
                self._link.drop()
            self._link.connection().request(message, min(5000, self._cluster.timeout_ms))
        except KdirectError as e:
            log.info("leaving group %s: %s; its session will end by itself", self.group_id, e)

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
        self._pending = None
        self._reset_member()

    def close(self) -> None:
        """Leave the group, end the thread and give the connection back."""
        self._stop.set()
        if self._pid != os.getpid():
            return
        self.leave()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)
        self._link.give_back()
