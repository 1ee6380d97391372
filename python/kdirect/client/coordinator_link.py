"""What a consumer has with the coordinator of its group: a connection, and the offsets that the
group commits.

Owns: the private connection to the coordinator, the search for it, and the messages about committed
offsets.  It knows nothing of how members join: who commits is said by the caller.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from kdirect.errors import BrokerError, BrokerUnavailableError, KdirectError
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.format.schema import build
from kdirect.model import TopicPartition
from kdirect.wire.attempt import Attempt
from kdirect.wire.broker_errors import broker_error
from kdirect.wire.cluster import Cluster
from kdirect.wire.connection import Connection, Pending

log = logging.getLogger("kdirect.client")

# Versions of OffsetFetch: the last that is about one group, and the first that names its member.
ONE_GROUP, MEMBERS_FETCH_FROM = 7, 9
AT_HAND_S = 0.05  # for a coordinator that answers at once
# The coordinator is another broker, or is to be looked for.
ELSEWHERE = frozenset((ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE))


class CoordinatorLink:
    """See the module.  Used by the consumer's thread, and by the one that keeps its member
    alive."""

    def __init__(self, cluster: Cluster, group_id: str, *, stable: bool = False) -> None:
        """`stable`: offsets that a transaction may still commit are waited for."""
        self.group_id = group_id
        self._stable = stable
        self._cluster = cluster
        self._environment = cluster.environment
        self._lock = threading.Lock()  # guards the connection, not requests
        self._connection: Connection | None = None
        self._drops = 0  # how often it was given up as broken
        self._search: Attempt[Connection] | None = None  # while the coordinator is looked for

    # -- the connection ----------------------------------------------------------------------------

    def connection(self, timeout_ms: float | None = None) -> Connection:
        """The private connection to the coordinator.  It is not shared, because a JoinGroup waits
        for the other members, and requests on one connection are answered in order.  `timeout_ms`:
        to find and reach it, where there is none; default: as for any request."""
        with self._lock:
            connection = self._connection
            if connection is not None and not connection.closed:
                return connection
        fresh = self._cluster.lease_coordinator(self.group_id, timeout_ms=timeout_ms)
        with self._lock:
            if self._connection is None or self._connection.closed:
                self._connection = fresh
                return fresh
            found = self._connection
        fresh.close()
        return found

    def is_reached(self) -> bool:
        """Is there a connection to the coordinator?  Where there is none it is looked for, and
        nobody waits longer than a moment."""
        with self._lock:
            connection = self._connection
        if connection is not None and not connection.closed:
            return True
        if self._search is None:
            self._search = self._environment.spawn(self.connection)
            self._search.wait(AT_HAND_S)
        if not self._search.done:
            return False
        search, self._search = self._search, None
        try:
            return not search.result().closed
        except KdirectError as e:
            log.warning("group %s: its coordinator is looked for: %s", self.group_id, e)
            return False

    @property
    def drops(self) -> int:
        """For `drop`: how often the connection was dropped."""
        with self._lock:
            return self._drops

    def drop(self, since: int | None = None) -> None:
        """Give the connection up as broken, and look for the coordinator again.  Requests of the
        other thread that wait for an answer over it fail with an error that is retriable.

        `since`: what `drops` was before the connection was used; if the other thread has dropped
        that one meanwhile, the next one, which may serve, is left alone."""
        with self._lock:
            if since is not None and since != self._drops:
                return
            self._drops += 1
            connection, self._connection = self._connection, None
        self._cluster.forget_coordinator(self.group_id)
        if connection is None:
            return
        if connection.closed:
            connection.close()
            return
        # Not `close`: nobody has closed the consumer, so whoever waits may ask again.
        connection.abort(
            BrokerUnavailableError(
                f"the connection to {connection.peer} was dropped: the coordinator of group"
                f" {self.group_id!r} is looked for again",
                hint="try again",
            )
        )

    def give_back(self) -> None:
        """The connection is not needed any more."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            self._cluster.give_back(connection)

    # -- offsets -----------------------------------------------------------------------------------

    def send_commit(
        self,
        offsets: Mapping[TopicPartition, int],
        metadata: str,
        generation: int,
        member_id: str,
        instance_id: str | None,
    ) -> Pending:
        """Send a commit of this member; -1, "" and None: of nobody in particular."""
        r = p.OffsetCommitRequest
        topics: dict[str, list[Any]] = {}
        for tp, offset in offsets.items():
            topics.setdefault(tp.topic, []).append(
                r.OffsetCommitRequestTopic.OffsetCommitRequestPartition(
                    partition_index=tp.partition,
                    committed_offset=offset,
                    committed_leader_epoch=-1,
                    committed_metadata=metadata,
                )
            )
        return self.connection().submit(
            r(
                group_id=self.group_id,
                generation_id_or_member_epoch=generation,
                member_id=member_id,
                group_instance_id=instance_id,
                retention_time_ms=-1,
                topics=[
                    r.OffsetCommitRequestTopic(name=name, partitions=partitions)
                    for name, partitions in topics.items()
                ],
            )
        )

    def committed(
        self,
        tps: Iterable[TopicPartition],
        timeout_ms: float | None = None,
        member: Callable[[], tuple[str, int] | None] = lambda: None,
    ) -> dict[TopicPartition, int | None]:
        """The offsets that the group has committed; None for a partition without one.  `member`:
        id and epoch of the one that asks, where the coordinator is to check them."""
        wanted = list(tps)
        topics: dict[str, list[int]] = {}
        for tp in wanted:
            topics.setdefault(tp.topic, []).append(tp.partition)

        def ask(left_ms: float) -> dict[TopicPartition, int | None]:
            answer = self._fetch_offsets(topics, member(), left_ms)
            self._check_fetch(answer.error_code)
            out: dict[TopicPartition, int | None] = dict.fromkeys(wanted)
            for t in answer.topics:
                for x in t.partitions:
                    self._check_fetch(x.error_code)
                    out[TopicPartition(t.name, x.partition_index)] = (
                        x.committed_offset if x.committed_offset >= 0 else None
                    )
            return out

        return self.patiently(ask, timeout_ms) if wanted else {}

    def _fetch_offsets(
        self, topics: dict[str, list[int]], member: tuple[str, int] | None, left_ms: float
    ) -> Any:
        """The answer about this group, within `left_ms`."""
        until = self._environment.monotonic() + left_ms / 1000
        rows = [{"name": name, "partition_indexes": numbers} for name, numbers in topics.items()]
        request = partial(build, p.OffsetFetchRequest, require_stable=self._stable)
        connection = self.connection(left_ms)
        left_ms = max(0.0, (until - self._environment.monotonic()) * 1000)
        if member is None or not connection.speaks(p.OffsetFetchRequest, MEMBERS_FETCH_FROM):
            message = request(group_id=self.group_id, topics=rows)
            return connection.submit(message, most=ONE_GROUP).result(left_ms)
        member_id, epoch = member
        group = {
            "group_id": self.group_id,
            "member_id": member_id,
            "member_epoch": epoch,
            "topics": rows,
        }
        return connection.submit(request(groups=[group])).result(left_ms).groups[0]

    def _check_fetch(self, code: int) -> None:
        if code:
            if code in ELSEWHERE:
                self.drop()
            raise broker_error(code, f"committed offsets of group {self.group_id!r}")

    def patiently(self, use: Callable[[float], Any], timeout_ms: float | None) -> Any:
        """`use(ms that are left)`, repeated after transient errors for up to `timeout_ms` (default:
        request.timeout.ms)."""
        backoff = self._cluster.backoff(
            self._cluster.timeout_ms if timeout_ms is None else timeout_ms
        )
        while True:
            drops = self.drops
            try:
                return use(backoff.remaining_ms())
            except KdirectError as e:
                if isinstance(e, BrokerError) and e.code == ErrorCode.REBALANCE_IN_PROGRESS:
                    raise  # a rebalance ends only if the caller polls
                if isinstance(e, BrokerError) and e.code == ErrorCode.STALE_MEMBER_EPOCH:
                    # The answer to a heartbeat, which is on its way, brings the new one.
                    if not backoff.wait():
                        raise
                    continue
                if not isinstance(e, BrokerError) and e.retriable:
                    self.drop(drops)
                if not e.retriable or not backoff.wait():
                    raise
