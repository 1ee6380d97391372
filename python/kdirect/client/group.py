"""A consumer's membership in a group of Kafka's classic protocol: joining, syncing and heartbeats.

It owns the member's generation, and what a cooperative member says that it owns.  What members of
both protocols have in common is `group_member`'s; `assignors` decides which member reads what.

A cooperative member (KIP-429) joins again with what it has, and reads it on meanwhile.  What an
assignment leaves out it gives back, and then joins once more, so that another member can be given
that.  Its commits count until the coordinator has a new generation.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

from kdirect.client.assignors import (
    ASSIGNORS,
    COOPERATIVE_STICKY,
    Assignment,
    check_strategies,
    cooperative_sticky_assignor,
)
from kdirect.client.coordinator_link import ELSEWHERE
from kdirect.client.group_member import (
    FENCED,
    HINTS,
    JOINING,
    OUT,
    STABLE,
    SYNCING,
    GroupMember,
    Owner,
)
from kdirect.errors import (
    BrokerError,
    ConfigError,
    KdirectError,
    ProtocolError,
    TimedOutError,
    UnknownTopicError,
)
from kdirect.format import protocol as p
from kdirect.format.consumer_protocol import (
    PROTOCOL_TYPE,
    Subscription,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)
from kdirect.format.error_codes import ErrorCode
from kdirect.model import TopicPartition
from kdirect.wire.broker_errors import broker_error
from kdirect.wire.cluster import Cluster
from kdirect.wire.connection import Pending

log = logging.getLogger("kdirect.client")

_NOT_YET = frozenset((ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.REBALANCE_IN_PROGRESS))
# The member joins once more; a static one that another has replaced does not.
_JOIN_AGAIN = FENCED - {ErrorCode.FENCED_INSTANCE_ID}


class Membership(GroupMember):
    """See the module, and `GroupMember`."""

    def __init__(self, cluster: Cluster, settings: Mapping[str, Any], owner: Owner) -> None:
        super().__init__(cluster, settings, owner)
        self._strategies = check_strategies(settings["partition.assignment.strategy"])
        if settings["heartbeat.interval.ms"] >= self._session_ms:
            raise ConfigError(
                f"heartbeat.interval.ms {settings['heartbeat.interval.ms']} is not below"
                f" session.timeout.ms {self._session_ms}",
                hint="a third of it is usual",
            )
        self.incremental = COOPERATIVE_STICKY in self._strategies
        self._rack: str | None = settings["client.rack"]
        self._owned: frozenset[TopicPartition] = frozenset()  # of a cooperative member
        self._owned_generation = -1  # in which it was given that
        self._joins_again = False  # after this assignment: it gave something back
        self._pending: Pending | None = None
        self._pending_until = 0.0
        self._protocol = ""

    # -- joining -----------------------------------------------------------------------------------

    def join(self, topics: Iterable[str], regex: str = "") -> None:
        """See `GroupMember.join`.  Expressions were matched by the caller: there is no `regex`."""
        with self._lock:
            self._topics = frozenset(topics)
            self._subscribed = True
            if self.lost:
                self._owned, self._owned_generation = frozenset(), -1
            self._pending = None
            self.state = JOINING
            self.rebalancing = False
            self.lost = ""
        self.start_thread()

    def advance(self, timeout_ms: float) -> list[TopicPartition] | None:
        """See `GroupMember.advance`.  After a transient error it tries again."""
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
        metadata = encode_subscription(self._subscription())
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

    def _subscription(self) -> Subscription:
        if not self.incremental:
            return Subscription(self._topics, version=0)
        generation = self._owned_generation
        # Leaders of old, which do not know the field, look for the generation in the user data.
        data = generation.to_bytes(4, "big", signed=True)
        return Subscription(self._topics, data, self._owned, generation, self._rack)

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
        if self._protocol not in self._strategies:
            raise ProtocolError(
                f"group {self.group_id!r} chose the assignor {self._protocol!r}, which was not"
                " offered"
            )
        said = {member_id: decode_subscription(metadata) for member_id, _, metadata in members}
        counts: dict[str, int] = {}
        for topic in sorted(frozenset().union(*(s.topics for s in said.values()))):
            try:
                counts[topic] = len(self._cluster.partitions(topic, refresh=True))
            except UnknownTopicError:
                log.warning("group %s reads topic %s, which does not exist", self.group_id, topic)
        given: Assignment
        if self._protocol == COOPERATIVE_STICKY:
            given = cooperative_sticky_assignor(said, counts)
        else:
            read = [(m, instance, said[m].topics) for m, instance, _ in members]
            given = ASSIGNORS[self._protocol](read, counts)
        return [(member_id, encode_assignment(tps)) for member_id, tps in given.items()]

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
            self._owned_generation = self.generation
            self._joins_again = False
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
        if code in _JOIN_AGAIN:
            self._fence(ErrorCode(code).name)
            self._reset_member()
        elif code in ELSEWHERE:
            self._pause(ErrorCode(code).name, drop=True)
        elif code in _NOT_YET:
            self._pause(ErrorCode(code).name, drop=False)
        else:
            self._fence(ErrorCode(code).name)
            with self._lock:
                self.state = OUT
            raise broker_error(code, f"{doing} group {self.group_id!r}", hint=HINTS.get(code, ""))

    # -- what a cooperative member has -------------------------------------------------------------

    def gave_back(self, kept: Iterable[TopicPartition]) -> bool:
        """See `GroupMember.gave_back`."""
        with self._lock:
            self._owned &= frozenset(kept)
            self._joins_again = True
        return False

    def took(self, tps: Iterable[TopicPartition]) -> bool:
        """See `GroupMember.took`."""
        with self._lock:
            if self.incremental:
                if self.state != STABLE:
                    return False
                self._owned = frozenset(tps)
                self.rebalancing |= self._joins_again
                self._joins_again = False
        return True

    def _fence(self, why: str) -> None:
        with self._lock:
            if self._owned and self.state != OUT:
                self.state = STABLE  # it has something to lose, even while it joins
        super()._fence(why)

    def _pause(self, why: str, *, drop: bool) -> None:
        """Set when to try again, after a wait that doubles with each failure.  With `drop`, on a
        new connection."""
        log.info("group %s: %s; trying again", self.group_id, why)
        self._not_before = self._environment.monotonic() + self._backoff_s()
        if drop:
            self._link.drop()

    def _reset_member(self) -> None:
        super()._reset_member()
        with self._lock:
            self._owned, self._owned_generation = frozenset(), -1
            if self._instance_id is None:
                self.member_id = ""

    # -- staying and leaving -----------------------------------------------------------------------

    def _beat(self) -> float:
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
            return self._interval_s
        if code == ErrorCode.REBALANCE_IN_PROGRESS:
            # Heartbeats continue: the owner may still work on the records that it has, and joins
            # again with its next poll.
            self.rebalancing = True
            self._tell()
        elif code in FENCED:
            self._fence(ErrorCode(code).name)
            self._reset_member()
        elif code in ELSEWHERE:
            self._link.drop()
        return self._interval_s

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
        # A request after a join that still waits would get no answer: take a new connection.
        if self._pending is not None:
            self._link.drop()
        self._ask_to_leave(message)

    def leave(self) -> None:
        """Leave the group.  `join` may be called again."""
        super().leave()
        if self._pid == os.getpid():
            self._pending = None
