"""EnterTransaction: a producer is about to write batches of its transaction by one-sided WRITEs, or
has written the last of them.

Such a batch cannot wait at the broker for an answer of the transaction's coordinator, as a Produce
request does (`kdirect.broker.transaction_checks`).  So the producer asks before its first WRITE of
a transaction: the leader has the coordinator add the partitions, and lets their logs know.  A WRITE
that comes without is refused with INVALID_TXN_STATE by the kernel.

A producer that holds a head alone counts its places itself, and the marker that ends a transaction
comes between.  So it says when it has nothing under way and leaves the transaction.  Until it
enters the next one the head is the broker's to append to, and the answer to that request says where
the producer goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from kdirect.broker.answers import Answer, later, respond
from kdirect.broker.connection import Connection
from kdirect.broker.failures import explain
from kdirect.broker.grants import Grant, Peer
from kdirect.broker.services import Services
from kdirect.broker.topics import INTERNAL_TOPICS
from kdirect.broker.transaction_checks import Subject, TransactionChecks
from kdirect.errors import KdirectError, RefusedError
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.model import TopicPartition


class HeldHeads(Protocol):
    """As much of `kdirect.broker.produce_access.ProduceAccess` as is needed here."""

    def pause(self, grant: Grant, /) -> bool:
        """The producer that holds a head alone leaves its transaction.  False: it has to give the
        head back."""

    def resume(self, grant: Grant, /) -> tuple[int, int] | None:
        """It goes on at this position, with a request of this order.  None: as above."""


class ClientAccess(Protocol):
    """As much of `kdirect.broker.access.AccessManager` as is needed here."""

    @property
    def produce(self) -> HeldHeads:
        """The heads that producers write."""

    def peer_of(self, connection: Any, connection_id: int, /) -> Peer:
        """The queue pair of that number on this connection.  RefusedError."""


class Place(NamedTuple):
    """Where a producer goes on in the head that it holds alone; -1: it holds none."""

    position: int = -1
    order: int = -1


NOWHERE = Place()


class EnterHandlers:
    """See the module; one for the broker.  `access`: None where there is no RDMA."""

    def __init__(
        self, services: Services, checks: TransactionChecks, access: ClientAccess | None
    ) -> None:
        self._services = services
        self._checks = checks
        self._access = access

    def enter(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        grants = self._grants(connection, request)
        if request.leaves:
            return self._leave(header, request, grants)
        return later(self._enter(header, request, grants))

    def _grants(self, connection: Connection, request: Any) -> dict[TopicPartition, Grant]:
        """The granted files that the request names, of those partitions."""
        ids = {
            TopicPartition(topic.name, row.partition_index): row.file_id
            for topic in request.topics
            for row in topic.partitions
            if row.file_id >= 0
        }
        if not ids or self._access is None:
            return {}
        try:
            peer = self._access.peer_of(connection, request.connection_id)
        except RefusedError:
            return {}  # its queue pair has ended, and every grant with it
        grants = {tp: peer.grants.get(file_id) for tp, file_id in ids.items()}
        return {
            tp: grant
            for tp, grant in grants.items()
            if grant is not None and grant.is_produce and grant.partition.topic_partition == tp
        }

    # -- entering ----------------------------------------------------------------------------------

    async def _enter(
        self, header: p.RequestHeader, request: Any, grants: dict[TopicPartition, Grant]
    ) -> Answer:
        subject = Subject(
            request.transactional_id, request.producer_id, request.producer_epoch, True
        )
        wanted = [
            (TopicPartition(topic.name, row.partition_index), row.sequence)
            for topic in request.topics
            for row in topic.partitions
        ]
        codes = await asyncio.gather(*(self._admit(subject, *one) for one in wanted))
        rows = []
        for (tp, _), code in zip(wanted, codes, strict=True):
            # From here on the broker appends nothing between.
            admitted = code == ErrorCode.NONE and tp in grants
            rows.append((tp, int(code), self._resumed(grants[tp]) if admitted else NOWHERE))
        return _respond(header, rows)

    def _resumed(self, grant: Grant) -> Place:
        assert self._access is not None
        place = self._access.produce.resume(grant)
        return NOWHERE if place is None else Place(*place)

    async def _admit(self, subject: Subject, tp: TopicPartition, sequence: int) -> int:
        if not subject.name or tp.topic in INTERNAL_TOPICS:
            return ErrorCode.INVALID_TXN_STATE
        try:
            replicas = self._services.replicas
            if replicas is not None:
                partition = replicas.leader(tp)
                replicas.may_append(tp)
            else:
                partition = self._services.topics.partition(tp.topic, tp.partition)
            return await self._checks.admit(partition, subject, sequence)
        except (KdirectError, OSError, LookupError) as e:
            return explain(e, f"a transaction that enters {tp}")[0]

    # -- leaving -----------------------------------------------------------------------------------

    def _leave(
        self, header: p.RequestHeader, request: Any, grants: dict[TopicPartition, Grant]
    ) -> Answer:
        rows = []
        for topic in request.topics:
            for row in topic.partitions:
                tp = TopicPartition(topic.name, row.partition_index)
                held = (
                    self._access is not None
                    and tp in grants
                    and self._access.produce.pause(grants[tp])
                )
                code = ErrorCode.NONE if held else ErrorCode.NOT_LEADER_OR_FOLLOWER
                rows.append((tp, int(code), NOWHERE))
        return _respond(header, rows)

    def table(self) -> Iterable[tuple[str, Any, bool]]:
        """(API name, handler, whether later requests of the connection wait for its answer)."""
        return (("EnterTransaction", self.enter, False),)


def _respond(header: p.RequestHeader, rows: list[tuple[TopicPartition, int, Place]]) -> Answer:
    topics: dict[str, list[dict[str, int]]] = {}
    for tp, code, place in rows:
        topics.setdefault(tp.topic, []).append(
            {
                "partition_index": tp.partition,
                "error_code": code,
                "position": place.position,
                "order": place.order,
            }
        )
    return respond(
        header,
        p.EnterTransactionResponse,
        topics=[{"name": name, "partitions": found} for name, found in topics.items()],
    )
