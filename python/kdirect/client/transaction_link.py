"""The requests of a transactional producer to coordinators: what `Transaction` wants is sent, and
what was answered is told to it.

Owns: the connections to the coordinator of the transactional id and of groups, the search for them,
the messages, and the pauses between attempts.  At most one request is under way.  What may not
enter: what an answer means (`kdirect.client.transaction`), and records.

A thread calls `turn` with the producer's lock held, which takes in the answer that is there and
sends the next request.  Then it waits by `wait`, which needs no lock.  Several threads may do so.
A coordinator is looked for on a thread besides, so that nobody waits for the lock meanwhile.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import Any

from kdirect.client.transaction import (
    AddOffsets,
    AddPartitions,
    Answer,
    CommitOffsets,
    EndTransaction,
    InitProducer,
    Next,
    Request,
    Transaction,
)
from kdirect.errors import KdirectError, TransactionError
from kdirect.format import protocol as p
from kdirect.model import TopicPartition
from kdirect.wire.attempt import Attempt
from kdirect.wire.cluster import GROUP, TRANSACTION, Cluster
from kdirect.wire.connection import Connection, Pending

log = logging.getLogger("kdirect.client")

PAUSE_S, MOST_PAUSE_S = 0.02, 1.0
AT_HAND_S = 0.05  # for a coordinator that answers at once
# While the markers of the transaction before are written.
SOON_S, MOST_SOON_S = 0.0005, 0.02
# With the first protocol: what later versions mean to a broker is the second one.
FIRST_PROTOCOL = {
    p.ProduceRequest.API_KEY: 11,
    p.EndTxnRequest.API_KEY: 4,
    p.TxnOffsetCommitRequest.API_KEY: 4,
}
RENEWS_SINCE = 3  # of InitProducerId (KIP-360)


class TransactionLink:
    """See the module.  `settings` are resolved CLIENT options, with a transactional.id."""

    def __init__(self, cluster: Cluster, settings: dict[str, Any], machine: Transaction) -> None:
        self._machine = machine
        self._cluster = cluster
        self._environment = cluster.environment
        self._monotonic = cluster.environment.monotonic
        self._timeout_ms: int = settings["transaction.timeout.ms"]
        self._connections: dict[tuple[int, str], Connection] = {}
        self._search: tuple[tuple[int, str], Attempt[Connection]] | None = None
        self._closing = threading.Lock()  # for the two that follow
        self._closed = False
        self._found: list[Connection] = []  # by a search whose result nobody has taken yet
        self._sent: tuple[Request, Pending] | None = None
        self._sent_at = 0.0
        self._not_before = 0.0
        self._pause = PAUSE_S
        self._soon = SOON_S

    def turn(self, left_ms: float) -> bool:
        """Take in an answer that is here, and send what is pending.  True: nothing is pending any
        more.  Raises the error that the machine is in, and what no further attempt can mend.  A
        coordinator is looked for in `left_ms`, and waited for as long as one that is at hand."""
        machine = self._machine
        if self._sent is not None:
            request, pending = self._sent
            late = self._monotonic() - self._sent_at > self._cluster.timeout_ms / 1000
            if not pending.done and not late:
                return False
            self._sent = None
            self._take(request, pending)
        if machine.pending is None:
            machine.check()
            return True
        if self._monotonic() >= self._not_before:
            self._send(machine.pending, left_ms)
        return False

    def wait(self, until: float) -> None:
        """Wait until there may be something for `turn` to do, or until then (monotonic s)."""
        now = self._monotonic()
        sent, search = self._sent, self._search
        if sent is not None:
            sent[1].wait(max(0.0, min(until - now, 1.0)) * 1000)
        elif search is not None:
            search[1].wait(max(0.0, min(until - now, 1.0)))
        else:
            self._environment.sleep(max(0.0, min(until, self._not_before) - now))

    def give_up(self) -> None:
        """Nobody waits any longer for what is under way."""
        if self._sent is not None and not self._sent[1].done:
            request, _ = self._sent
            self._sent = None
            self._machine.lost(request)
            self._drop(request)

    def close(self) -> None:
        """End the connections."""
        self._sent = None
        with self._closing:
            self._closed = True
            found = [*self._connections.values(), *self._found]
            self._found.clear()
        for connection in found:
            connection.close()
        self._connections.clear()

    # -- within ------------------------------------------------------------------------------------

    def _send(self, request: Request, left_ms: float) -> None:
        try:
            connection = self._connection(request, left_ms)
            if connection is None:
                return
            message = self._message(request)
            most = FIRST_PROTOCOL.get(message.API_KEY) if self._machine.version < 2 else None
            self._sent = request, connection.submit(message, most=most)
            self._sent_at = self._monotonic()
        except KdirectError as e:
            if not e.retriable:
                raise
            log.info("%s: %s", self._machine.transactional_id, e)
            self._drop(request)
            self._later(Next.AGAIN)

    def _take(self, request: Request, pending: Pending) -> None:
        try:
            answer = _answer(request, pending.result(0))
        except KdirectError as e:
            self._machine.lost(request)
            self._drop(request)
            if not e.retriable:
                raise
            log.info("%s: %s", self._machine.transactional_id, e)
            self._later(Next.AGAIN)
            return
        follows = self._machine.answered(request, answer)
        if follows is Next.ELSEWHERE:
            self._drop(request)
        if follows in (Next.GO_ON, Next.FAILED):
            self._pause, self._soon, self._not_before = PAUSE_S, SOON_S, 0.0
        else:
            self._later(follows)

    def _later(self, follows: Next) -> None:
        if follows is Next.SOON:
            pause, self._soon = self._soon, min(2 * self._soon, MOST_SOON_S)
        else:
            pause, self._pause = self._pause, min(2 * self._pause, MOST_PAUSE_S)
        self._not_before = self._monotonic() + pause

    def _key(self, request: Request) -> tuple[int, str]:
        if isinstance(request, CommitOffsets):
            return GROUP, request.group.group_id
        return TRANSACTION, self._machine.transactional_id

    def _connection(self, request: Request, left_ms: float) -> Connection | None:
        """None: it is looked for."""
        key = self._key(request)
        connection = self._connections.get(key)
        if connection is None or connection.closed:
            if self._search is None:
                call = partial(self._find, key, max(1.0, left_ms))
                self._search = key, self._environment.spawn(call)
                self._search[1].wait(AT_HAND_S)
            of, search = self._search
            if not search.done:
                return None
            self._search = None
            connection = self._connections[of] = search.result()
            self._found.clear()
            if of != key:  # what a call before has looked for
                return None
        if isinstance(request, InitProducer):
            self._choose_protocol(connection)
        return connection

    def _find(self, key: tuple[int, str], left_ms: float) -> Connection:
        """On a thread that others do not wait for."""
        found = self._cluster.lease_coordinator(key[1], key[0], left_ms)
        with self._closing:
            if not self._closed:
                self._found.append(found)
                return found
        found.close()
        return found

    def _choose_protocol(self, connection: Connection) -> None:
        machine = self._machine
        if not connection.supports(p.EndTxnRequest.API_KEY):
            raise TransactionError(
                f"the broker at {connection.peer} has no transactions",
                hint="use a broker that has them, or leave out transactional.id",
            )
        machine.can_renew = connection.speaks(p.InitProducerIdRequest, RENEWS_SINCE)
        second = connection.features.get("transaction.version", 1) >= 2 and all(
            connection.speaks(message, FIRST_PROTOCOL[message.API_KEY] + 1)
            for message in (p.ProduceRequest, p.EndTxnRequest, p.TxnOffsetCommitRequest)
        )
        machine.version = 2 if second else 1

    def _drop(self, request: Request) -> None:
        kind, key = self._key(request)
        connection = self._connections.pop((kind, key), None)
        self._cluster.forget_coordinator(key, kind)
        if connection is not None:
            connection.close()

    def _message(self, request: Request) -> Any:
        machine = self._machine
        name, producer_id, epoch = machine.transactional_id, machine.producer_id, machine.epoch
        match request:
            case InitProducer(known_id, known_epoch):
                return p.InitProducerIdRequest(
                    transactional_id=name,
                    transaction_timeout_ms=self._timeout_ms,
                    producer_id=known_id,
                    producer_epoch=known_epoch,
                )
            case AddPartitions(partitions):
                return p.AddPartitionsToTxnRequest(
                    v3_and_below_transactional_id=name,
                    v3_and_below_producer_id=producer_id,
                    v3_and_below_producer_epoch=epoch,
                    v3_and_below_topics=_by_topic(
                        partitions, p.AddPartitionsToTxnRequest.AddPartitionsToTxnTopic
                    ),
                )
            case AddOffsets(group_id):
                return p.AddOffsetsToTxnRequest(
                    transactional_id=name,
                    producer_id=producer_id,
                    producer_epoch=epoch,
                    group_id=group_id,
                )
            case EndTransaction(commit):
                return p.EndTransaction(name, producer_id, epoch, commit)
            case CommitOffsets():
                return _commit_message(request, name, producer_id, epoch)
        raise AssertionError(request)


def _by_topic(partitions: tuple[TopicPartition, ...], row: Any) -> list[Any]:
    topics: dict[str, list[int]] = {}
    for tp in partitions:
        topics.setdefault(tp.topic, []).append(tp.partition)
    return [row(name=name, partitions=numbers) for name, numbers in topics.items()]


def _commit_message(request: CommitOffsets, name: str, producer_id: int, epoch: int) -> Any:
    r = p.TxnOffsetCommitRequest
    topics: dict[str, list[Any]] = {}
    for tp, offset in request.offsets.items():
        topics.setdefault(tp.topic, []).append(
            r.TxnOffsetCommitRequestTopic.TxnOffsetCommitRequestPartition(
                partition_index=tp.partition,
                committed_offset=offset,
                committed_leader_epoch=-1,
                committed_metadata="",
            )
        )
    return r(
        transactional_id=name,
        group_id=request.group.group_id,
        producer_id=producer_id,
        producer_epoch=epoch,
        generation_id=request.group.generation,
        member_id=request.group.member_id,
        group_instance_id=request.group.group_instance_id,
        topics=[
            r.TxnOffsetCommitRequestTopic(name=topic, partitions=rows)
            for topic, rows in topics.items()
        ],
    )


def _answer(request: Request, response: Any) -> Answer:
    match request:
        case AddPartitions():
            codes = tuple(
                row.partition_error_code
                for topic in response.results_by_topic_v3_and_below
                for row in topic.results_by_partition
            )
            return Answer(codes)
        case CommitOffsets():
            return Answer(tuple(row.error_code for t in response.topics for row in t.partitions))
        case InitProducer():
            return Answer((response.error_code,), response.producer_id, response.producer_epoch)
        case EndTransaction():
            given = getattr(response, "producer_id", -1), getattr(response, "producer_epoch", -1)
            return Answer((response.error_code,), *given)
    return Answer((response.error_code,))
