"""Where the records of a partition lie in remote storage, as its leader tells.

Owns: the request (LocateRecords), and that an answer can be: keys of the partition that was asked
for, ranges that follow each other from the offset on that was asked for.  What an object holds is
checked when it is read (`cold_object`); which store is gone to, before (`cold_trust`).

Signed URLs are credentials: no `repr`, message or log has one.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from kdirect.errors import KdirectError, ProtocolError
from kdirect.format import layout
from kdirect.format import protocol as p
from kdirect.format.segment_object import SegmentIdentity, TailPlace, parse_key
from kdirect.model import TopicPartition
from kdirect.wire.channel import access_error
from kdirect.wire.cluster import Cluster
from kdirect.wire.connection import Connection

AT_ONCE = 64  # partitions in one request: an answer has a limited number of places
_LARGEST_LOG = (1 << 31) - 1
_LARGEST_TAIL = 1 << 30
_HINT = "broker and client are of different versions, or the broker is not what it says"


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdPlace:
    """One object.  Records are wanted of it from `start_offset` on; `epochs` are (leader epoch,
    start offset), rising.  Of `store_uri` and `url` one is None."""

    identity: SegmentIdentity
    start_offset: int
    base_offset: int
    end_offset: int
    log_bytes: int
    tail: TailPlace
    max_timestamp_ms: int
    min_timestamp_ms: int
    epochs: tuple[tuple[int, int], ...]
    dense_from: int
    key: str
    store_uri: str | None
    url: str | None = field(repr=False, compare=False)

    @property
    def segment_id(self) -> uuid.UUID:
        return self.identity.segment_id

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy for another process has no URL: plans are shown, and kept."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "url"}
        return _without_url, (values,)


def _without_url(values: dict[str, Any]) -> ColdPlace:
    return ColdPlace(**values, url=None)


class ColdView(NamedTuple):
    """What a leader knows of a partition from one offset on.  `error`: why it tells no places, or
    why nobody knows; `local_start`: what is below it is in remote storage only; -1: not told;
    `is_all`: there are no more of them, as what follows is at the leader only."""

    places: tuple[ColdPlace, ...]
    local_start: int
    error: KdirectError | None = None
    is_all: bool = False


class Wanted(NamedTuple):
    """A partition, the offset to begin at, and the one to end at (`layout.TO_...`)."""

    tp: TopicPartition
    start: int
    stop: int


def locate(
    cluster: Cluster, wanted: Iterable[Wanted], timeout_ms: float | None
) -> tuple[dict[TopicPartition, ColdView], int]:
    """What the leaders tell of these, and by how many requests; `timeout_ms` limits each of them.
    Those that are led by a broker without tiered storage are left out; what a broker does not
    answer, or answers wrongly, is the `error` of its partitions."""
    of_connection: dict[int, tuple[Connection, list[Wanted]]] = {}
    out: dict[TopicPartition, ColdView] = {}
    for x in wanted:
        try:
            connection = cluster.connection_for(x.tp, timeout_ms=timeout_ms)
        except KdirectError as e:
            out[x.tp] = ColdView((), -1, e)
            continue
        if connection.supports(layout.API_LOCATE_RECORDS):
            of_connection.setdefault(id(connection), (connection, []))[1].append(x)
    requests = 0
    for connection, those in of_connection.values():
        for i in range(0, len(those), AT_ONCE):
            part = those[i : i + AT_ONCE]
            requests += 1
            try:
                out.update(_views(part, connection.request(_request(cluster, part), timeout_ms)))
            except KdirectError as e:
                out.update((x.tp, ColdView((), -1, e)) for x in part)
    return out, requests


def _request(cluster: Cluster, wanted: list[Wanted]) -> Any:
    return p.LocateRecordsRequest(
        partitions=[
            p.LocateRecordsRequest.LocateTarget(
                topic=x.tp.topic,
                partition=x.tp.partition,
                current_leader_epoch=cluster.leader_epoch(x.tp),
                from_offset=x.start,
                to_offset=x.stop,
                max_locations=0,
            )
            for x in wanted
        ]
    )


def _views(wanted: list[Wanted], answer: Any) -> dict[TopicPartition, ColdView]:
    if len(answer.partitions) != len(wanted):
        raise ProtocolError(
            f"a broker located {len(answer.partitions)} of {len(wanted)} partitions", hint=_HINT
        )
    out = {}
    for x, row in zip(wanted, answer.partitions, strict=True):
        error = None
        if row.error_code:
            what = f"locating records of {x.tp} from offset {x.start} on"
            error = access_error(row.error_code, row.error_message, what)
        places = () if error is not None else _places(x, answer, row)
        is_all = bool(row.locations) and row.locations[-1].kind == layout.LOCATION_BROKER
        out[x.tp] = ColdView(places, row.local_log_start_offset, error, is_all)
    return out


def _places(wanted: Wanted, answer: Any, row: Any) -> tuple[ColdPlace, ...]:
    """ProtocolError for places that cannot be."""
    out = []
    offset = wanted.start
    for x in row.locations:
        if x.kind != layout.LOCATION_OBJECT:
            break
        fault = _fault(wanted.tp, offset, answer, row, x)
        if fault:
            raise ProtocolError(
                f"the broker located records of {wanted.tp} from offset {offset} on in an object"
                f" that {fault}",
                hint=_HINT,
            )
        identity, _ = parse_key("", x.key) or (None, 0)
        assert identity is not None
        out.append(
            ColdPlace(
                identity=identity,
                start_offset=offset,
                base_offset=x.base_offset,
                end_offset=x.end_offset,
                log_bytes=x.log_bytes,
                tail=TailPlace(x.tail_position, x.tail_length),
                max_timestamp_ms=x.max_timestamp,
                min_timestamp_ms=x.min_timestamp,
                epochs=tuple((e.epoch, e.start_offset) for e in x.leader_epochs),
                dense_from=row.dense_from,
                key=x.key,
                store_uri=answer.store_uri if x.url is None else None,
                url=x.url,
            )
        )
        offset = x.end_offset
    return tuple(out)


def _fault(tp: TopicPartition, offset: int, answer: Any, row: Any, x: Any) -> str:
    """What is wrong with a location; empty when nothing is."""
    found = parse_key("", x.key or "")
    if found is None:
        return "has no key of a segment"
    identity, base_offset = found
    if (identity.topic, identity.partition, identity.topic_id) != (*tp, row.topic_id):
        return f"is of {identity.topic}-{identity.partition}"
    if (identity.cluster_id, identity.segment_id) != (answer.cluster_id, x.segment_id):
        return "is of another cluster or segment than it says"
    if base_offset != x.base_offset or not x.base_offset <= offset < x.end_offset:
        return f"has offsets from {x.base_offset} to {x.end_offset}"
    if not layout.BATCH_HEADER_BYTES <= x.log_bytes <= _LARGEST_LOG:
        return f"has {x.log_bytes} bytes of log"
    if x.tail_position != x.log_bytes or not 0 < x.tail_length <= _LARGEST_TAIL:
        return f"has a tail of {x.tail_length} bytes at {x.tail_position}"
    epochs = [e.epoch for e in x.leader_epochs]
    if not epochs or epochs != sorted(epochs):
        return "has no leader epochs, or such as do not rise"
    if x.url is None:
        return "" if answer.store_uri else "is in no store"
    try:
        parts = urlsplit(x.url)
    except ValueError:
        return "has a signed URL that is none"
    if parts.scheme not in ("http", "https") or not unquote(parts.path).endswith("/" + x.key):
        return "has a signed URL of another object"
    return ""


__all__ = ["ColdPlace", "ColdView", "Wanted", "locate"]
