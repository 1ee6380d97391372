"""Whether a partition belongs to a transaction, asked of its coordinator before the first records
of the transaction are taken (KIP-890).

A batch of a transaction that the log has not been told of is refused by the kernel with nothing
changed.  Then the coordinator is asked, without holding anybody up: whether the producer has added
the partition (first protocol), or to add it (second protocol).  If it agrees, the log admits the
transaction, unless a marker has come meanwhile, and the batch is appended once more.

    batch --- unverified ---> ticket ---> coordinator ---> admitted ---> batch
                                              |
                                              ---> refused, or not known now: an error

Questions of one transaction that come up together are one request.  Batches of the same producer
that come to the partition meanwhile take their turn after it: the log would find a gap before them.

On the event loop.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple

from kdirect.broker.failures import explain
from kdirect.broker.handlers_transactions import TransactionHandlers
from kdirect.broker.services import Services
from kdirect.broker.transactions import EPOCH_BUMPS
from kdirect.errors import KdirectError
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.format.schema import build
from kdirect.log.kernel_transactions import admit_transaction, begin_verification
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition

CALL_S = 5.0
# A transaction that follows at once may find the one before not complete yet: Kafka's
# add.partitions.to.txn.retry.backoff.ms and add.partitions.to.txn.retry.backoff.max.ms.
RETRY_S = 0.02
RETRY_FOR_S = 0.1
IMPLICIT = 12  # the version of Produce from which on the leader adds the partition
KNOWS_ABORTABLE = 11  # and from which on its sender knows TRANSACTION_ABORTABLE
# The producer id, its epoch and the first sequence of a batch, at 43.
_PRODUCER = struct.Struct(">qhi")
_PRODUCER_AT = 43
_PASSING = (
    ErrorCode.NETWORK_EXCEPTION,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_COORDINATOR,
    ErrorCode.CONCURRENT_TRANSACTIONS,
)


class Subject(NamedTuple):
    """A transaction of a producer; `implicit`: partitions are to be added to it."""

    name: str
    producer_id: int
    epoch: int
    implicit: bool


class TransactionChecks:
    """See the module.  `peers`: the connections to other brokers, None where the broker is
    alone."""

    def __init__(self, services: Services, handlers: TransactionHandlers, peers: Any) -> None:
        self._services = services
        self._handlers = handlers
        self._peers = peers
        self._asked: dict[Subject, tuple[set[TopicPartition], asyncio.Future[Any]]] = {}
        # (partition, producer id) -> the last append of the producer that is under way
        self._turns: dict[tuple[TopicPartition, int], asyncio.Future[Any]] = {}

    def holds(self, partition: Partition, batch: Any) -> bool:
        """Does an append of this batch's producer to a partition wait for an answer?"""
        if not self._turns or len(batch) < _PRODUCER_AT + _PRODUCER.size:
            return False
        producer_id, _, _ = _PRODUCER.unpack_from(batch, _PRODUCER_AT)
        return (partition.topic_partition, producer_id) in self._turns

    def in_turn(
        self,
        partition: TopicPartition,
        batch: bytes,
        append: Callable[[asyncio.Future[Any] | None], Coroutine[Any, Any, Any]],
    ) -> asyncio.Task[Any]:
        """Begin `append(before)`, which first waits until `before` is done, however it ends: the
        append of the same producer to the partition that has come before it, or None."""
        producer_id = -1
        if len(batch) >= _PRODUCER_AT + _PRODUCER.size:
            producer_id, _, _ = _PRODUCER.unpack_from(batch, _PRODUCER_AT)
        key = (partition, producer_id)
        task = asyncio.ensure_future(append(self._turns.get(key)))
        self._turns[key] = task

        def ended(done: asyncio.Task[Any]) -> None:
            if self._turns.get(key) is done:
                del self._turns[key]

        task.add_done_callback(ended)
        return task

    async def admitted(
        self, partition: Partition, name: str | None, batch: bytes, version: int
    ) -> int:
        """Has the log admitted the transaction of a batch that it refused as unverified?  A code
        for its producer, in the words of a version of Produce."""
        if not name:
            return ErrorCode.INVALID_TXN_STATE
        producer_id, epoch, sequence = _PRODUCER.unpack_from(batch, _PRODUCER_AT)
        subject = Subject(name, producer_id, epoch, version >= IMPLICIT)
        code = await self.admit(partition, subject, sequence)
        if code == ErrorCode.PRODUCER_FENCED:
            return ErrorCode.INVALID_PRODUCER_EPOCH  # what Produce is told of it
        if code == ErrorCode.TRANSACTION_ABORTABLE and version < KNOWS_ABORTABLE:
            return ErrorCode.INVALID_TXN_STATE
        if code == ErrorCode.CONCURRENT_TRANSACTIONS and version >= IMPLICIT:
            return code
        return ErrorCode.NOT_ENOUGH_REPLICAS if code in _PASSING else code

    async def admit(self, partition: Partition, subject: Subject, sequence: int) -> int:
        """Ask the coordinator about a partition, and let the log know; `sequence` is the first of
        the batch that is to follow.  The coordinator's code, or the log's."""
        now = self._services.environment.time_ms()
        error, ticket = begin_verification(
            partition.kernel, subject.producer_id, subject.epoch, sequence, now
        )
        if error or not ticket:
            return int(error)
        tp = partition.topic_partition
        code = await self._ask(subject, tp)
        waited = 0.0
        while code == ErrorCode.CONCURRENT_TRANSACTIONS and subject.implicit:
            if waited >= RETRY_FOR_S:
                return code
            await asyncio.sleep(RETRY_S)
            waited += RETRY_S
            code = await self._ask(subject, tp)
        if code != ErrorCode.NONE:
            return code
        if not admit_transaction(partition.kernel, subject.producer_id, subject.epoch, ticket):
            return ErrorCode.CONCURRENT_TRANSACTIONS  # a marker has come meanwhile
        return ErrorCode.NONE

    # -- asking ------------------------------------------------------------------------------------

    async def _ask(self, subject: Subject, tp: TopicPartition) -> int:
        """The coordinator's code for a partition; one request for all that is asked together."""
        found = self._asked.get(subject)
        if found is None:
            loop = asyncio.get_running_loop()
            found = self._asked[subject] = (set(), loop.create_future())
            loop.call_soon(self._begin, subject)
        found[0].add(tp)
        codes: Mapping[TopicPartition, int] = await asyncio.shield(found[1])
        return codes.get(tp, int(ErrorCode.NOT_COORDINATOR))

    def _begin(self, subject: Subject) -> None:
        partitions, future = self._asked.pop(subject)
        task = asyncio.ensure_future(self._codes(subject, partitions))

        def told(done: asyncio.Future[Any]) -> None:
            failed = done.cancelled() or done.exception() is not None
            if failed and not done.cancelled():
                explain(done.exception() or Exception(), "a question about a transaction")
            if not future.done():
                future.set_result({} if failed else done.result())

        task.add_done_callback(told)

    async def _codes(
        self, subject: Subject, partitions: set[TopicPartition]
    ) -> dict[TopicPartition, int]:
        cluster, handlers = self._services.cluster, self._handlers
        coordinator = cluster.transaction_coordinator_of(subject.name)
        name, producer_id, epoch, implicit = subject
        if coordinator == cluster.node_id:
            if not implicit:
                return handlers.verify(name, producer_id, epoch, partitions)
            reply = await handlers.add(name, producer_id, epoch, partitions, EPOCH_BUMPS)
            return dict.fromkeys(partitions, reply.code)
        if coordinator < 0 or self._peers is None:
            return {}
        return await self._ask_other(coordinator, subject, partitions)

    async def _ask_other(
        self, coordinator: int, subject: Subject, partitions: set[TopicPartition]
    ) -> dict[TopicPartition, int]:
        topics: dict[str, list[int]] = {}
        for tp in partitions:
            topics.setdefault(tp.topic, []).append(tp.partition)
        request = build(
            p.AddPartitionsToTxnRequest,
            transactions=[
                {
                    "transactional_id": subject.name,
                    "producer_id": subject.producer_id,
                    "producer_epoch": subject.epoch,
                    "verify_only": not subject.implicit,
                    "topics": [{"name": n, "partitions": found} for n, found in topics.items()],
                }
            ],
        )
        try:
            answer = await self._peers.call(coordinator, request, timeout_s=CALL_S, version=5)
        except KdirectError:
            return {}
        return {
            TopicPartition(topic.name, row.partition_index): row.partition_error_code
            for result in answer.results_by_transaction
            for topic in result.topic_results
            for row in topic.results_by_partition
        }
