"""Requests about what groups have committed: OffsetCommit, OffsetFetch, OffsetDelete.

Turns requests into changes of the offset store, for groups that this broker coordinates.  Whether
it does, and who is a member, `Groups` says (`kdirect.broker.handlers_groups`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from typing import Any, Protocol

from kdirect.broker.answers import Answer, later, respond
from kdirect.broker.connection import Connection
from kdirect.broker.consumer_group_state import ConsumerGroup
from kdirect.broker.failures import explain
from kdirect.broker.group_state import Group
from kdirect.broker.services import Services
from kdirect.errors import FormatError, KdirectError
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.format.group_records import CommittedOffset, subscribed_topics
from kdirect.model import TopicPartition


class Groups(Protocol):
    """Who is a member of what."""

    def refusal(self, group: str) -> int:
        """Why nothing may be said of a group here; NONE: its coordinator is this broker."""

    def may_commit(
        self, group: str, generation: int, member_id: str, instance_id: str | None, version: int
    ) -> int:
        """May this member commit offsets of the group now?  An error code.  `version`: of the
        OffsetCommit."""

    def may_fetch(self, group: str, member_id: str | None, epoch: int) -> int:
        """May this member be told what the group has committed?  An error code."""

    def find(self, group: str) -> Group | None:
        """A group as it is at this moment."""

    def find_consumer(self, group: str) -> ConsumerGroup | None:
        """The same of a group of KIP-848."""


# The version of OffsetCommit from which on a group that is not there has a code of its own
# (KIP-848).
GROUP_NOT_FOUND_FROM = 9


class OffsetHandlers:
    """Handlers about committed offsets; one for the broker."""

    def __init__(self, services: Services, groups: Groups) -> None:
        self._services = services
        self._groups = groups
        self._store = services.offsets
        self._environment = services.environment
        self._metadata_max: int = services.config["offset.metadata.max.bytes"]

    def offset_commit(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        version = header.api_version
        error = self._groups.may_commit(
            request.group_id,
            request.generation_id_or_member_epoch,
            request.member_id,
            request.group_instance_id if version >= 7 else None,
            version,
        )
        if error == ErrorCode.ILLEGAL_GENERATION and version >= GROUP_NOT_FOUND_FROM:
            known = self._groups.find(request.group_id) is not None
            known = known or request.group_id in self._store.groups()
            error = error if known else ErrorCode.GROUP_ID_NOT_FOUND
        now = self._environment.time_ms()
        offsets: dict[TopicPartition, CommittedOffset] = {}
        rows = []
        for t in request.topics:
            parts = []
            for x in t.partitions:
                code = error or self._check_offset(t.name, x)
                if not code:
                    epoch = x.committed_leader_epoch if version >= 6 else -1
                    offsets[TopicPartition(t.name, x.partition_index)] = CommittedOffset(
                        x.committed_offset, epoch, x.committed_metadata or "", now
                    )
                parts.append({"partition_index": x.partition_index, "error_code": code})
            rows.append({"name": t.name, "partitions": parts})
        committed = self._store.commit(request.group_id, offsets)
        if committed.done() and committed.exception() is None:
            partition = committed.result()
            if partition is None or not partition.acknowledgements_wait():
                return respond(header, p.OffsetCommitResponse, topics=rows)
        return later(self._committed_later(header, request.group_id, committed, rows))

    async def _committed_later(
        self,
        header: p.RequestHeader,
        group: str,
        committed: Awaitable[Any],
        rows: list[dict[str, Any]],
    ) -> Answer:
        try:
            partition = await committed
            if partition is not None and partition.acknowledgements_wait():
                await self._services.flusher.flushed(partition)
        except (KdirectError, OSError) as e:
            self._fail_rows(group, rows, e)
        return respond(header, p.OffsetCommitResponse, topics=rows)

    def _fail_rows(self, group: str, rows: list[dict[str, Any]], error: BaseException) -> None:
        explain(error, "a commit of offsets")
        # Kafka's clients retry these; they do not expect a storage error from a coordinator.
        code = self._groups.refusal(group) or ErrorCode.COORDINATOR_NOT_AVAILABLE
        for row in rows:
            for part in row["partitions"]:
                part["error_code"] = part["error_code"] or code

    def _check_offset(self, topic: str, x: Any) -> int:
        if len((x.committed_metadata or "").encode()) > self._metadata_max:
            return ErrorCode.OFFSET_METADATA_TOO_LARGE
        return self._unknown(topic, x.partition_index)

    def _unknown(self, topic: str, index: int) -> int:
        """UNKNOWN_TOPIC_OR_PARTITION, or NONE."""
        known = self._services.topics.find(topic)
        if known is None or known.deleting or not 0 <= index < known.partition_count:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return 0

    def offset_fetch(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        if header.api_version >= 8:
            groups = [
                {
                    "group_id": g.group_id,
                    **self._fetched_by(g, header.api_version, request.require_stable),
                }
                for g in request.groups
            ]
            return respond(header, p.OffsetFetchResponse, groups=groups)
        stable = header.api_version >= 7 and request.require_stable
        fields = self._fetched_or_error(request.group_id, request.topics, stable)
        return respond(header, p.OffsetFetchResponse, **fields)

    def _fetched_by(self, g: Any, version: int, stable: bool) -> dict[str, Any]:
        """What a member is told; from version 9 on it says who it is."""
        if version >= 9 and not self._groups.refusal(g.group_id):
            error = self._groups.may_fetch(g.group_id, g.member_id, g.member_epoch)
            if error:
                return {"topics": [], "error_code": error}
        return self._fetched_or_error(g.group_id, g.topics, stable)

    def _fetched_or_error(self, group: str, topics: Any, stable: bool) -> dict[str, Any]:
        if error := self._groups.refusal(group):
            return {"topics": [], "error_code": error}
        return {"topics": self._fetched(group, topics, stable), "error_code": 0}

    def _fetched(self, group: str, topics: Any, stable: bool) -> list[dict[str, Any]]:
        """`stable`: nothing is told of what a transaction may be about to change."""
        known = self._store.offsets(group)
        unstable = self._store.unstable(group) if stable else set()
        wanted: dict[str, list[int]] = {}
        if topics is None:
            for tp in (*known, *(unstable - known.keys())):
                wanted.setdefault(tp.topic, []).append(tp.partition)
        else:
            for t in topics:
                wanted.setdefault(t.name, []).extend(t.partition_indexes)
        rows = []
        for name, indexes in wanted.items():
            parts = []
            for i in indexes:
                tp = TopicPartition(name, i)
                code = ErrorCode.UNSTABLE_OFFSET_COMMIT if tp in unstable else ErrorCode.NONE
                c = (None if code else known.get(tp)) or CommittedOffset(-1, -1, "", 0)
                parts.append(
                    {
                        "partition_index": i,
                        "committed_offset": c.offset,
                        "committed_leader_epoch": c.leader_epoch,
                        "metadata": c.metadata,
                        "error_code": code,
                    }
                )
            rows.append({"name": name, "partitions": parts})
        return rows

    def offset_delete(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        return later(self._offset_delete(header, request))

    async def _offset_delete(self, header: p.RequestHeader, request: Any) -> Answer:
        if refusal := self._groups.refusal(request.group_id):
            return respond(header, p.OffsetDeleteResponse, error_code=refusal, topics=[])
        group = self._groups.find(request.group_id)
        is_known = group is not None or self._groups.find_consumer(request.group_id) is not None
        if not is_known and not self._store.has_offsets(request.group_id):
            code = ErrorCode.GROUP_ID_NOT_FOUND
            return respond(header, p.OffsetDeleteResponse, error_code=code, topics=[])
        new = self._groups.find_consumer(request.group_id)
        used: frozenset[str] = frozenset() if new is None else new.all_subscribed()
        if group is not None and group.members:
            if group.protocol_type != "consumer":
                code = ErrorCode.NON_EMPTY_GROUP
                return respond(header, p.OffsetDeleteResponse, error_code=code, topics=[])
            used = self._subscribed(group)
        gone, rows = [], []
        for t in request.topics:
            parts = []
            for x in t.partitions:
                why: int = self._unknown(t.name, x.partition_index)
                if not why and t.name in used:
                    why = ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC
                if not why:
                    gone.append(TopicPartition(t.name, x.partition_index))
                parts.append({"partition_index": x.partition_index, "error_code": why})
            rows.append({"name": t.name, "partitions": parts})
        try:
            await self._store.forget(request.group_id, gone)
        except KdirectError as e:
            failure = self._groups.refusal(request.group_id)
            failure = failure or explain(e, "deletion of offsets")[0]
            return respond(header, p.OffsetDeleteResponse, error_code=failure, topics=[])
        return respond(header, p.OffsetDeleteResponse, error_code=0, topics=rows)

    def _subscribed(self, group: Group) -> frozenset[str]:
        out: set[str] = set()
        for m in group.members.values():
            try:
                out |= subscribed_topics(
                    m.metadata(group.protocol or (m.protocols[0][0] if m.protocols else None))
                )
            except FormatError:  # a client's own format: we cannot tell
                pass
        return frozenset(out)

    def table(self) -> Iterable[tuple[str, Any, bool]]:
        return (
            ("OffsetCommit", self.offset_commit, True),
            ("OffsetFetch", self.offset_fetch, True),
            ("OffsetDelete", self.offset_delete, True),
        )
