"""Requests about where records are: ListOffsets, OffsetForLeaderEpoch, DeleteRecords,
LocateRecords, CountRecords.

Law: as in `kdirect.broker.handlers_data`, whose handlers these are a part of.  What opens batches
or files runs on a thread; what remote storage knows is asked on threads of its own.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from kdirect.broker.answers import Answer, later, respond
from kdirect.broker.connection import Connection
from kdirect.broker.failures import explain
from kdirect.broker.remote_requests import LATEST_TIERED, MAX_TIMESTAMP, Times
from kdirect.broker.services import Services
from kdirect.broker.topics import INTERNAL_TOPICS
from kdirect.errors import FencedLeaderEpochError, KdirectError, UnknownLeaderEpochError
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.log import record_count
from kdirect.log.partition import Partition
from kdirect.model import EARLIEST_OFFSET, LATEST_OFFSET

EARLIEST_LOCAL = -4
# Versions of ListOffsets from which on there are these; for older ones they mean nothing.
_FROM_VERSION = {MAX_TIMESTAMP: 7, EARLIEST_LOCAL: 8, LATEST_TIERED: 9}
LOWEST_TIME = LATEST_TIERED  # below it nothing is known
FROM_EARLIEST_LOCAL = 8  # the version of ListOffsets


class Reader(NamedTuple):
    """Who asks: by which version of Fetch or ListOffsets, from which rack ("": not told), and
    whether only for what transactions have committed.  `remote_times`: what lookups by time have
    found in remote storage."""

    version: int
    rack: str
    committed_only: bool
    remote_times: Times = {}


def _not_found(index: int, code: int) -> dict[str, Any]:
    """The row of a partition where ListOffsets has found nothing."""
    return {
        "partition_index": index,
        "error_code": code,
        "timestamp": -1,
        "offset": -1,
        "leader_epoch": -1,
    }


class LookupHandlers:
    """Handlers of requests about offsets.  Used on the event loop."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._remote = services.remote_reads

    def list_offsets(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        if any(
            x.timestamp >= 0 or x.timestamp == MAX_TIMESTAMP
            for t in request.topics
            for x in t.partitions
        ):
            return later(self._look_up_later(header, request))
        return self._look_up(header, request, {})

    async def _look_up_later(self, header: p.RequestHeader, request: Any) -> Answer:
        """A search by time opens batches.  They may be large, so it runs on a thread; what remote
        storage knows is asked first, on threads of its own."""
        times: Times = {}
        if self._remote is not None:
            times = await self._remote.find_times(list(self._remote_lookups(request)))
        return await self._services.files.look_up(self._look_up, header, request, times)

    def _remote_lookups(self, request: Any) -> Iterable[tuple[Partition, int]]:
        for topic in request.topics:
            for x in topic.partitions:
                if x.timestamp >= 0 or x.timestamp == MAX_TIMESTAMP:
                    with contextlib.suppress(KdirectError):  # the lookup itself says what it is
                        yield self._led(topic.name, x.partition_index, -1), x.timestamp

    def _look_up(self, header: p.RequestHeader, request: Any, times: Times) -> Answer:
        reader = Reader(header.api_version, "", request.isolation_level == 1, times)
        asked = Counter((t.name, x.partition_index) for t in request.topics for x in t.partitions)
        return respond(
            header,
            p.ListOffsetsResponse,
            topics=[
                {
                    "name": t.name,
                    "partitions": [
                        self._list_offset(reader, t.name, x)
                        if asked[t.name, x.partition_index] == 1
                        else _not_found(x.partition_index, ErrorCode.INVALID_REQUEST)
                        for x in t.partitions
                    ],
                }
                for t in request.topics
            ],
        )

    def _list_offset(self, reader: Reader, name: str, x: Any) -> dict[str, Any]:
        out = _not_found(x.partition_index, 0)
        if x.timestamp < LOWEST_TIME or reader.version < _FROM_VERSION.get(x.timestamp, 0):
            return {**out, "error_code": ErrorCode.UNSUPPORTED_VERSION}
        try:
            partition = self._led(name, x.partition_index, x.current_leader_epoch)
            found = self._find_offset(reader, partition, x.timestamp)
        except Exception as e:
            return {
                **out,
                "error_code": explain(e, f"offset lookup in {name}-{x.partition_index}")[0],
            }
        if found is None:
            return out
        return {
            **out,
            "offset": found[0],
            "timestamp": found[1],
            "leader_epoch": partition.leader_epoch if found[0] >= 0 else -1,
        }

    def _find_offset(
        self, reader: Reader, partition: Partition, timestamp: int
    ) -> tuple[int, int] | None:
        """(offset, timestamp in ms, or -1 if `timestamp` names an end of the log); None if there is
        no such record below the end that the client may read."""
        end = partition.last_stable_offset if reader.committed_only else partition.high_watermark
        if timestamp == LATEST_OFFSET:
            return end, -1
        if timestamp == EARLIEST_OFFSET:
            return partition.log_start_offset, -1
        if timestamp == EARLIEST_LOCAL:
            return partition.local_log_start_offset, -1
        if timestamp == LATEST_TIERED:
            return (-1 if self._remote is None else self._remote.latest_tiered(partition)), -1
        found = None
        if timestamp == MAX_TIMESTAMP or timestamp >= 0:
            remote = reader.remote_times.get((partition.topic_partition, timestamp))
            if isinstance(remote, BaseException):
                raise remote
            found = remote or self._find_local(partition, timestamp)
        return found if found is not None and found[0] < end else None

    def _find_local(self, partition: Partition, timestamp: int) -> tuple[int, int] | None:
        if timestamp == MAX_TIMESTAMP:
            return partition.largest_timestamp()
        return partition.offset_for_timestamp(timestamp)

    def offset_for_leader_epoch(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        return respond(
            header,
            p.OffsetForLeaderEpochResponse,
            topics=[
                {
                    "topic": t.topic,
                    "partitions": [self._epoch_end(t.topic, x) for x in t.partitions],
                }
                for t in request.topics
            ],
        )

    def _epoch_end(self, name: str, x: Any) -> dict[str, Any]:
        out = {"error_code": 0, "partition": x.partition, "leader_epoch": -1, "end_offset": -1}
        try:
            partition = self._led(name, x.partition, x.current_leader_epoch)
            epoch, end = partition.end_offset_for_epoch(x.leader_epoch)
            return {**out, "leader_epoch": epoch, "end_offset": end}
        except Exception as e:
            return {**out, "error_code": explain(e, f"epoch lookup in {name}-{x.partition}")[0]}

    def delete_records(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        return later(self._services.files.admin(self._delete_records, header, request))

    def _delete_records(self, header: p.RequestHeader, request: Any) -> Answer:
        return respond(
            header,
            p.DeleteRecordsResponse,
            topics=[
                {
                    "name": t.name,
                    "partitions": [self._delete_before(t.name, x) for x in t.partitions],
                }
                for t in request.topics
            ],
        )

    def _delete_before(self, name: str, x: Any) -> dict[str, Any]:
        out = {"partition_index": x.partition_index, "low_watermark": -1, "error_code": 0}
        try:
            if name in INTERNAL_TOPICS:
                return {**out, "error_code": ErrorCode.INVALID_TOPIC_EXCEPTION}
            partition = self._services.topics.partition(name, x.partition_index)
            if not partition.config.deletes:  # as Kafka: the topic's policy says that they stay
                return {**out, "error_code": ErrorCode.POLICY_VIOLATION}
            partition.delete_records(partition.high_watermark if x.offset == -1 else x.offset)
            return {**out, "low_watermark": partition.log_start_offset}
        except Exception as e:
            return {
                **out,
                "error_code": explain(e, f"deletion of records from {name}-{x.partition_index}")[0],
            }

    def locate_records(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        """Where a client that reads past the broker finds records of remote storage."""
        assert self._remote is not None
        return self._remote.locate(header, [(x, self._to_locate(x)) for x in request.partitions])

    def count_records(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        """How many records lie in ranges of offsets: looks at their batches, on a thread."""
        return later(self._services.files.look_up(self._count_records, header, request))

    def _count_records(self, header: p.RequestHeader, request: Any) -> Answer:
        committed_only = request.isolation_level == 1
        allowance = record_count.Allowance(record_count.MOST_BYTES)
        return respond(
            header,
            p.CountRecordsResponse,
            partitions=[self._count(x, committed_only, allowance) for x in request.partitions],
        )

    def _count(
        self, x: Any, committed_only: bool, allowance: record_count.Allowance
    ) -> dict[str, Any]:
        out = {"error_code": 0, "error_message": None, "records": -1, "next_offset": x.start_offset}
        try:
            partition = self._led(x.topic, x.partition, x.current_leader_epoch)
            wanted = x.topic_id
            if wanted is not None and wanted.int:
                topic = self._services.topics.by_id(wanted)
                if topic is None or topic.name != x.topic:
                    return {**out, "error_code": ErrorCode.INCONSISTENT_TOPIC_ID}
            found = partition.count_records(
                x.start_offset, x.stop_offset, committed_only=committed_only, allowance=allowance
            )
        except Exception as e:
            code, message = explain(e, f"counting records of {x.topic}-{x.partition}")[:2]
            return {**out, "error_code": code, "error_message": message}
        return out if found is None else {**out, **found._asdict()}

    def _to_locate(self, x: Any) -> Partition | Exception:
        try:
            return self._led(x.topic, x.partition, x.current_leader_epoch)
        except Exception as e:
            return e

    def _led(self, name: str, index: int, epoch: int) -> Partition:
        """A partition that this broker leads, for a client that believes in the leader epoch
        `epoch` (-1: in none).  FencedLeaderEpochError, UnknownLeaderEpochError where it is
        another one."""
        partition = self._services.topics.partition(name, index)
        if epoch >= 0 and epoch != partition.leader_epoch:
            what = f"leader epoch {epoch} of partition {name}-{index}"
            if epoch < partition.leader_epoch:
                raise FencedLeaderEpochError(f"{what} is over; it is {partition.leader_epoch}")
            raise UnknownLeaderEpochError(f"{what} has not begun; it is {partition.leader_epoch}")
        return partition
