"""Before one-sided WRITEs of a transaction: the leader is asked to take them.

A WRITE cannot wait at the broker until the coordinator has added its partition to the transaction,
so the producer asks once for each partition and transaction, by a message of its own.
"""

from __future__ import annotations

from kdirect.client.transaction import Transaction
from kdirect.errors import DeliveryError, NotLeaderError, TimedOutError
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode, error_kind
from kdirect.model import TopicPartition
from kdirect.wire.broker_errors import broker_error
from kdirect.wire.connection import Connection

LEAST_MS = 100.0  # an answer is waited for, however little time is left


def may_enter(connection: Connection) -> bool:
    """Does the broker take transactions over RDMA?"""
    return connection.supports(p.EnterTransactionRequest.API_KEY)


def enter_transaction(
    connection: Connection,
    transaction: Transaction,
    tp: TopicPartition,
    sequence: int,
    until: float,
) -> bool:
    """Ask the leader of `tp`, whose next batch has this sequence, once.  False: it cannot be said
    by `until` (monotonic s), or the transaction before is not over yet: ask again.
    DeliveryError: it is refused.  ClosedError and the like: another broker leads now."""
    r = p.EnterTransactionRequest
    row = r.EnteredTopic.EnteredPartition(partition_index=tp.partition, sequence=sequence)
    left_ms = (until - connection._monotonic()) * 1000
    try:
        answer = connection.request(
            r(
                transactional_id=transaction.transactional_id,
                producer_id=transaction.producer_id,
                producer_epoch=transaction.epoch,
                topics=[r.EnteredTopic(name=tp.topic, partitions=[row])],
            ),
            max(left_ms, LEAST_MS),
        )
    except TimedOutError:
        return False
    code = next((x.error_code for t in answer.topics for x in t.partitions), -1)
    if code == ErrorCode.NONE:
        return True
    if error_kind(code).stale and code != ErrorCode.NOT_COORDINATOR:
        raise NotLeaderError(f"{tp}: another broker leads it", hint="ask for metadata")
    if error_kind(code).retriable:
        return False
    cause = broker_error(code, f"{tp}: a batch of a transaction")
    error = DeliveryError(cause.message, hint=cause.hint or "the batch was not committed")
    error.__cause__ = cause
    raise error
