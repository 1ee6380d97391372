"""Where records of remote storage lie, for clients that fetch them past the broker (LocateRecords).

Owns: who is told: nobody where ``remote.log.client.access`` is `broker`, of the broker or of the
topic; and what they are told: keys below the store's URI, which has no credentials, or signed URLs
of single objects.  A URL is signed only for a partition that the client may read here, on a thread,
and stands in no log and no error.

On the event loop: it looks at what the metadata says, which is in memory.  The store is not asked,
so an object may be gone by the time that a client asks for it: then it asks here again.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kdirect.broker.answers import Answer, later, respond
from kdirect.broker.failures import explain
from kdirect.errors import FormatError, OffsetOutOfRangeError, RefusedError
from kdirect.format import layout
from kdirect.format import protocol as p
from kdirect.format.remote_metadata import RemoteSegment
from kdirect.format.segment_object import TailPlace, parse_custom_metadata
from kdirect.log.partition import Partition
from kdirect.objects.store import ObjectStore
from kdirect.storage.remote_logs import RemoteLogs
from kdirect.storage.upload import key_of

# Of one answer, but one for each partition.  A client that wants more asks again, from the end of
# the last one on.
MOST_LOCATIONS = 128
MOST_SIGNED = 32  # of a partition: a URL is good for a while only
Wanted = Sequence[tuple[Any, "Partition | Exception"]]


class RemoteLocations:
    """See the module.  `expiry_s`: how long a signed URL is good for."""

    def __init__(
        self, logs: RemoteLogs, store: ObjectStore, *, cluster_id: str, expiry_s: int
    ) -> None:
        self._logs = logs
        self._store = store
        self._cluster_id = cluster_id
        self._expiry_s = expiry_s
        self._signer: ThreadPoolExecutor | None = None

    def answer(self, header: p.RequestHeader, wanted: Wanted) -> Answer:
        """The response to a LocateRecords: of each partition that it names the request's part, and
        the partition, or why this broker does not lead it."""
        share = max(1, MOST_LOCATIONS // max(1, len(wanted)))
        rows = []
        signed = False
        for x, partition in wanted:
            is_signed = _access(partition) == "presigned"
            signed = signed or is_signed
            rows.append(self._row(x, partition, min(share, MOST_SIGNED) if is_signed else share))
        if signed:
            return later(self._sign(header, rows))
        return self._respond(header, rows, signed)

    def _respond(self, header: p.RequestHeader, rows: list[dict[str, Any]], signed: bool) -> Answer:
        return respond(
            header,
            p.LocateRecordsResponse,
            cluster_id=self._cluster_id,
            store_uri=None if signed else self._store.uri,
            partitions=rows,
        )

    def _row(self, x: Any, partition: Partition | Exception, room: int) -> dict[str, Any]:
        out: dict[str, Any] = {
            "error_code": 0,
            "error_message": None,
            "topic_id": uuid.UUID(int=0),
            "leader_epoch": -1,
            "log_start_offset": -1,
            "local_log_start_offset": -1,
            "high_watermark": -1,
            "dense_from": 0,
            "locations": [],
        }
        name = f"{x.topic}-{x.partition}"
        try:
            if isinstance(partition, Exception):
                raise partition
            out.update(
                topic_id=partition.topic_id,
                leader_epoch=partition.leader_epoch,
                log_start_offset=partition.log_start_offset,
                local_log_start_offset=partition.local_log_start_offset,
                high_watermark=partition.high_watermark,
                dense_from=partition.dense_from,
            )
            if not out["log_start_offset"] <= x.from_offset <= out["high_watermark"]:
                raise OffsetOutOfRangeError(
                    f"offset {x.from_offset} of {name} is outside"
                    f" [{out['log_start_offset']}, {out['high_watermark']}]"
                )
            _require_access(partition)
            most = min(room, x.max_locations) if x.max_locations > 0 else room
            for location in self._locations(x, out, partition):
                if len(out["locations"]) >= most:
                    break
                out["locations"].append(location)
            return out
        except RefusedError as e:
            code, message = e.code, str(e)
        except Exception as e:
            code, message = explain(e, f"location of records of {name}")
        return {**out, "locations": [], "error_code": code, "error_message": message}

    def _locations(
        self, x: Any, log: dict[str, Any], partition: Partition
    ) -> Iterator[dict[str, Any]]:
        """From the offset asked for on, in order, without a gap."""
        where = (partition.topic_id, x.partition)
        end = x.to_offset
        if end == layout.TO_LOCAL_LOG_START:
            end = log["local_log_start_offset"]
        elif end < 0:
            end = log["high_watermark"]
        offset = x.from_offset
        for piece in self._logs.pieces(*where, offset):
            tail = _tail_of(piece.segment)
            if piece.start >= end or tail is None:
                break
            offset = piece.segment.end_offset
            yield self._object(piece.segment, tail, piece.start)
        start = max(offset, log["local_log_start_offset"])
        end = min(end, log["high_watermark"])
        if x.to_offset >= 0 and offset == start < end:
            yield {
                **_NOWHERE,
                "kind": layout.LOCATION_BROKER,
                "start_offset": start,
                "base_offset": start,
                "end_offset": end,
            }

    def _object(self, segment: RemoteSegment, tail: TailPlace, start: int) -> dict[str, Any]:
        return {
            "kind": layout.LOCATION_OBJECT,
            "start_offset": start,
            "base_offset": segment.base_offset,
            "end_offset": segment.end_offset,
            "key": key_of(segment, self._cluster_id),
            "url": None,
            "segment_id": segment.segment_id,
            "log_bytes": segment.size,
            "tail_position": tail.position,
            "tail_length": tail.length,
            "max_timestamp": segment.max_timestamp_ms,
            "min_timestamp": -1,
            "leader_epochs": [
                {"epoch": epoch, "start_offset": at} for epoch, at in segment.leader_epochs
            ],
        }

    # -- signing -----------------------------------------------------------------------------------

    async def _sign(self, header: p.RequestHeader, rows: list[dict[str, Any]]) -> Answer:
        if self._signer is None:
            self._signer = ThreadPoolExecutor(1, "kdirect-presign")
        await asyncio.get_running_loop().run_in_executor(self._signer, self._sign_rows, rows)
        return self._respond(header, rows, True)

    def _sign_rows(self, rows: list[dict[str, Any]]) -> None:
        """On its thread: to sign takes a tenth of a millisecond, and to look for the credentials of
        the machine may take a request."""
        for row in rows:
            try:
                for location in row["locations"]:
                    if location["kind"] == layout.LOCATION_OBJECT:
                        location["url"] = self._store.presign(location["key"], self._expiry_s)
            except Exception as e:
                row["locations"] = []
                row["error_code"], row["error_message"] = explain(e, "signing of a URL")

    def close(self) -> None:
        """Any thread."""
        if self._signer is not None:
            self._signer.shutdown(wait=False, cancel_futures=True)


_NOWHERE: dict[str, Any] = {
    "key": None,
    "url": None,
    "segment_id": uuid.UUID(int=0),
    "log_bytes": 0,
    "tail_position": 0,
    "tail_length": 0,
    "max_timestamp": -1,
    "min_timestamp": -1,
    "leader_epochs": [],
}


def _access(partition: Partition | Exception) -> str:
    return "" if isinstance(partition, Exception) else partition.config.remote_client_access


def _require_access(partition: Partition) -> None:
    """RefusedError where the topic's objects are not for clients."""
    config = partition.config
    if config.remote_client_access != "broker":
        return
    own = (config.overrides or {}).get("remote.log.client.access") == "broker"
    whose = "the topic" if own else "this broker"
    raise RefusedError(
        layout.ERROR_ACCESS_DISABLED,
        f"remote.log.client.access of {whose} is broker: {partition.topic_partition} is read"
        " through the broker",
    )


def _tail_of(segment: RemoteSegment) -> TailPlace | None:
    """Where the tail of its object is; None where that is not known, as of objects that another
    program stored: those are read through the broker."""
    try:
        custom = parse_custom_metadata(segment.custom)
    except FormatError:
        return None
    return None if custom is None else custom.tail


__all__ = ["MOST_LOCATIONS", "MOST_SIGNED", "RemoteLocations", "Wanted"]
