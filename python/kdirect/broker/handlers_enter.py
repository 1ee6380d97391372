"""EnterTransaction: a producer is about to write batches of its transaction by one-sided WRITEs.

Such a batch cannot wait at the broker for an answer of the transaction's coordinator, as a Produce
request does (`kdirect.broker.transaction_checks`).  So the producer asks once for each partition
and transaction before its first WRITE: the leader has the coordinator add the partition, and lets
the log know.  A WRITE that comes without is refused with INVALID_TXN_STATE by the kernel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from kdirect.broker.answers import Answer, later, respond
from kdirect.broker.connection import Connection
from kdirect.broker.failures import explain
from kdirect.broker.services import Services
from kdirect.broker.topics import INTERNAL_TOPICS
from kdirect.broker.transaction_checks import Subject, TransactionChecks
from kdirect.errors import KdirectError
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.model import TopicPartition


class EnterHandlers:
    """See the module; one for the broker."""

    def __init__(self, services: Services, checks: TransactionChecks) -> None:
        self._services = services
        self._checks = checks

    def enter(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        return later(self._enter(header, request))

    async def _enter(self, header: p.RequestHeader, request: Any) -> Answer:
        subject = Subject(
            request.transactional_id, request.producer_id, request.producer_epoch, True
        )
        wanted = [
            (TopicPartition(topic.name, row.partition_index), row.sequence)
            for topic in request.topics
            for row in topic.partitions
        ]
        codes = await asyncio.gather(*(self._admit(subject, *one) for one in wanted))
        topics: dict[str, list[dict[str, int]]] = {}
        for (tp, _), code in zip(wanted, codes, strict=True):
            row = {"partition_index": tp.partition, "error_code": int(code)}
            topics.setdefault(tp.topic, []).append(row)
        rows = [{"name": name, "partitions": found} for name, found in topics.items()]
        return respond(header, p.EnterTransactionResponse, topics=rows)

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

    def table(self) -> Iterable[tuple[str, Any, bool]]:
        """(API name, handler, whether later requests of the connection wait for its answer)."""
        return (("EnterTransaction", self.enter, False),)
