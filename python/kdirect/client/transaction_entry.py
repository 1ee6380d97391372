"""What a producer asks the leaders of its partitions before the one-sided WRITEs of a transaction,
and tells them after the last of them.

A WRITE cannot wait at the broker until the coordinator has added its partition to the transaction,
so the producer asks before the first one, by a message of its own: once for all partitions of a
leader that it is about to write.

A head that the producer holds alone has one more need.  The marker that ends the transaction comes
after the last batch, and the producer counts the places of its batches itself.  So it tells the
leader when it has nothing under way and *leaves*.  From then on the leader may append markers.  The
answer to the next entry says where the producer goes on, and nothing is written before it is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kdirect.client.transaction import Transaction
from kdirect.errors import AccessDeniedError, DeliveryError, NotLeaderError
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode, error_kind
from kdirect.model import TopicPartition
from kdirect.wire.broker_errors import broker_error
from kdirect.wire.channel import Channel
from kdirect.wire.connection import Connection, Pending

NO_FILE = -1


def may_enter(connection: Connection) -> bool:
    """Does the broker take transactions over RDMA?"""
    return connection.supports(p.EnterTransactionRequest.API_KEY)


def may_leave(connection: Connection) -> bool:
    """Does the broker append markers to heads that a producer holds alone?"""
    return connection.speaks(p.EnterTransactionRequest, 1)


class Entry(NamedTuple):
    """A partition that is about to be written, or was; the sequence of its next batch; the file
    that the producer holds alone there (NO_FILE: none, or it may not go on in it)."""

    tp: TopicPartition
    sequence: int
    file_id: int


class EntryAnswer(NamedTuple):
    """What the leader said of one partition: Kafka's error code, and where the producer goes on in
    the head that it holds alone (-1: it has to give that back)."""

    code: int
    position: int
    order: int


def enter_transaction(
    channel: Channel, transaction: Transaction, entries: Sequence[Entry]
) -> Pending:
    """Ask the leader of these partitions, once.  Its answer goes through `answers_of`.
    ClosedError and the like: another broker leads now."""
    return channel.connection.submit(_request(channel, transaction, entries, leaves=False))


def leave_transaction(
    channel: Channel, transaction: Transaction, entries: Sequence[Entry]
) -> Pending:
    """Tell the leader that nothing more is written to these files in this transaction.  Its answer
    goes through `answers_of`."""
    return channel.connection.submit(_request(channel, transaction, entries, leaves=True))


def answers_of(answer: Any) -> dict[TopicPartition, EntryAnswer]:
    """What was said of each partition."""
    return {
        TopicPartition(topic.name, row.partition_index): EntryAnswer(
            row.error_code, row.position, row.order
        )
        for topic in answer.topics
        for row in topic.partitions
    }


def has_entered(entry: Entry, answer: EntryAnswer | None) -> bool:
    """May the partition be written?  False: it cannot be said yet, or the transaction before is not
    over: ask again.  DeliveryError: it is refused.  NotLeaderError: another broker leads now.
    AccessDeniedError: the head has to be given back."""
    if answer is None:
        return False
    code, tp = answer.code, entry.tp
    if code == ErrorCode.NONE:
        if entry.file_id != NO_FILE and answer.position < 0:
            raise AccessDeniedError(f"{tp}: its head has ended", hint="ask for access again")
        return True
    if error_kind(code).stale and code != ErrorCode.NOT_COORDINATOR:
        raise NotLeaderError(f"{tp}: another broker leads it", hint="ask for metadata")
    if error_kind(code).retriable:
        return False
    cause = broker_error(code, f"{tp}: a batch of a transaction")
    error = DeliveryError(cause.message, hint=cause.hint or "the batch was not committed")
    error.__cause__ = cause
    raise error


def _request(
    channel: Channel, transaction: Transaction, entries: Sequence[Entry], *, leaves: bool
) -> Any:
    r = p.EnterTransactionRequest
    row = r.EnteredTopic.EnteredPartition
    topics: dict[str, list[Any]] = {}
    for entry in entries:
        topics.setdefault(entry.tp.topic, []).append(
            row(
                partition_index=entry.tp.partition,
                sequence=entry.sequence,
                file_id=entry.file_id,
            )
        )
    return r(
        transactional_id=transaction.transactional_id,
        producer_id=transaction.producer_id,
        producer_epoch=transaction.epoch,
        topics=[r.EnteredTopic(name=name, partitions=rows) for name, rows in topics.items()],
        connection_id=channel.connection_id,
        leaves=leaves,
    )
