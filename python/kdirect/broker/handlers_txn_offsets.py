"""TxnOffsetCommit: what a transaction commits of a group's offsets.

The offsets become visible with the commit of the transaction (`kdirect.broker.offsets`).  The
coordinator of the group is the leader of the partition that keeps them, so it asks the
transaction's coordinator as the leader of any other partition does
(`kdirect.broker.transaction_checks`), and the log admits the transaction first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from kdirect.broker.answers import Answer, later, respond
from kdirect.broker.connection import Connection
from kdirect.broker.failures import explain
from kdirect.broker.groups import fits
from kdirect.broker.services import Services
from kdirect.broker.transaction_checks import Subject, TransactionChecks
from kdirect.errors import KdirectError
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.format.group_records import CommittedOffset
from kdirect.model import TopicPartition

IMPLICIT = 5  # the version from which on the group's coordinator adds the partition
KNOWS_MEMBERS = 3  # the version from which on a member of the group may say that it is one
KNOWS_LOADING = 2


class Groups(Protocol):
    """Who is a member of what."""

    def refusal(self, group: str) -> int:
        """Why nothing may be said of a group here; NONE: its coordinator is this broker."""

    def may_commit(
        self, group: str, generation: int, member_id: str, instance_id: str | None
    ) -> int:
        """May this member commit offsets of the group now?  An error code."""


class TxnOffsetHandlers:
    """See the module; one for the broker."""

    def __init__(self, services: Services, groups: Groups, checks: TransactionChecks) -> None:
        self._services = services
        self._store = services.offsets
        self._groups = groups
        self._checks = checks
        self._metadata_max: int = services.config["offset.metadata.max.bytes"]

    def txn_offset_commit(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        return later(self._commit(header, request))

    async def _commit(self, header: p.RequestHeader, request: Any) -> Answer:
        version = header.api_version
        error = self._may_commit(version, request)
        now = self._services.environment.time_ms()
        offsets: dict[TopicPartition, CommittedOffset] = {}
        codes: dict[TopicPartition, int] = {}
        for t in request.topics:
            for x in t.partitions:
                tp = TopicPartition(t.name, x.partition_index)
                codes[tp] = error or self._check_offset(tp, x.committed_metadata)
                if not codes[tp]:
                    epoch = x.committed_leader_epoch if version >= 2 else -1
                    offsets[tp] = CommittedOffset(
                        x.committed_offset, epoch, x.committed_metadata or "", now
                    )
        if offsets:
            code = await self._commit_offsets(version, request, offsets)
            codes |= dict.fromkeys(offsets, code)
        return respond(header, p.TxnOffsetCommitResponse, topics=_rows(version, codes))

    def _may_commit(self, version: int, request: Any) -> int:
        group = request.group_id
        if not group or not fits(group):
            return ErrorCode.INVALID_GROUP_ID
        if version >= KNOWS_MEMBERS:
            member, instance = request.member_id, request.group_instance_id
            if request.generation_id >= 0 or member or instance is not None:
                code = self._groups.may_commit(group, request.generation_id, member, instance)
                # As Kafka: this request's clients do not know the other one, and would not abort.
                stale = code == ErrorCode.STALE_MEMBER_EPOCH
                return ErrorCode.ILLEGAL_GENERATION if stale else code
        return self._groups.refusal(group)

    def _check_offset(self, tp: TopicPartition, metadata: str | None) -> int:
        if len((metadata or "").encode()) > self._metadata_max:
            return ErrorCode.OFFSET_METADATA_TOO_LARGE
        known = self._services.topics.find(tp.topic)
        if known is None or known.deleting or not 0 <= tp.partition < known.partition_count:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return ErrorCode.NONE

    async def _commit_offsets(
        self, version: int, request: Any, offsets: dict[TopicPartition, CommittedOffset]
    ) -> int:
        group, producer = request.group_id, (request.producer_id, request.producer_epoch)
        try:
            if self._services.replicas is None and not self._store.partition_count:
                await self._services.files.admin(self._store.create_topic)
            log = self._store.partition_of(group)
            subject = Subject(request.transactional_id, *producer, version >= IMPLICIT)
            sequence = self._store.next_sequence(log, producer)
            code = await self._checks.admit(log, subject, sequence)
            if code:
                return _told(version, code)
            partition = await self._store.commit_in_transaction(group, producer, offsets)
            if partition is not None and partition.acknowledgements_wait():
                await self._services.flusher.flushed(partition)
        except (KdirectError, OSError) as e:
            explain(e, "a commit of offsets in a transaction")
            return self._groups.refusal(group) or ErrorCode.COORDINATOR_NOT_AVAILABLE
        return ErrorCode.NONE

    def table(self) -> Iterable[tuple[str, Any, bool]]:
        """(API name, handler, whether later requests of the connection wait for its answer)."""
        return (("TxnOffsetCommit", self.txn_offset_commit, True),)


def _told(version: int, code: int) -> int:
    """The code in the words of a version.  What passes is what this request's clients retry."""
    if code == ErrorCode.PRODUCER_FENCED:
        return ErrorCode.INVALID_PRODUCER_EPOCH
    if code in (ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE):
        return ErrorCode.COORDINATOR_LOAD_IN_PROGRESS  # the group's coordinator is here
    if code == ErrorCode.CONCURRENT_TRANSACTIONS and version < IMPLICIT:
        return ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    if code == ErrorCode.TRANSACTION_ABORTABLE and version < IMPLICIT - 1:
        return ErrorCode.INVALID_TXN_STATE
    return code


def _rows(version: int, codes: dict[TopicPartition, int]) -> list[dict[str, Any]]:
    topics: dict[str, list[dict[str, int]]] = {}
    for tp, code in codes.items():
        if code == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS and version < KNOWS_LOADING:
            code = ErrorCode.COORDINATOR_NOT_AVAILABLE
        row = {"partition_index": tp.partition, "error_code": int(code)}
        topics.setdefault(tp.topic, []).append(row)
    return [{"name": n, "partitions": rows} for n, rows in topics.items()]
