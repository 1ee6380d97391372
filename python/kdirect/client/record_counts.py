"""How many records lie in ranges of offsets, as the leaders tell (CountRecords).

Law: a number is told only if reading the range would give as many records; whoever gets none reads.
So nothing here is an error: a leader that is away, moves, does not know the request, or answers
what cannot be, tells no number.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kdirect.errors import KdirectError
from kdirect.format import protocol as p
from kdirect.model import TopicPartition
from kdirect.wire.cluster import Cluster
from kdirect.wire.connection import Connection

log = logging.getLogger("kdirect.client")

AT_ONCE = 64  # ranges in one request


class CountWanted(NamedTuple):
    """The offsets [start, stop) of a partition."""

    tp: TopicPartition
    start: int
    stop: int


def counts(
    cluster: Cluster,
    wanted: Iterable[CountWanted],
    topic_ids: Mapping[str, str],
    *,
    committed_only: bool,
    timeout_ms: float | None,
) -> dict[CountWanted, int]:
    """The numbers of records of those ranges of which they are known.  `topic_ids`: of the topics
    that are meant; no number is told of another one that has the name.  `timeout_ms` limits each
    request."""
    out: dict[CountWanted, int] = {}
    parts = {x: (0, x.start) for x in wanted}  # records so far, and up to where
    while parts:
        of_connection: dict[int, tuple[Connection, list[CountWanted]]] = {}
        for x in parts:
            try:
                connection = cluster.connection_for(x.tp, timeout_ms=timeout_ms)
            except KdirectError as e:
                log.debug("the records of %s are not counted: %s", x.tp, e)
                continue
            if connection.supports(p.CountRecordsRequest.API_KEY):
                of_connection.setdefault(id(connection), (connection, []))[1].append(x)
        unfinished: dict[CountWanted, tuple[int, int]] = {}
        for connection, those in of_connection.values():
            for i in range(0, len(those), AT_ONCE):
                some = those[i : i + AT_ONCE]
                request = _request(cluster, some, parts, topic_ids, committed_only)
                try:
                    answer = connection.request(request, timeout_ms)
                except KdirectError as e:
                    log.debug("records are not counted: %s", e)
                    continue
                for x, row in zip(some, answer.partitions, strict=False):
                    records, reached = parts[x]
                    if not _is_told(x, reached, row):
                        continue
                    if row.next_offset == x.stop:
                        out[x] = records + row.records
                    else:
                        unfinished[x] = records + row.records, row.next_offset
        parts = unfinished
    return out


def _is_told(x: CountWanted, start: int, row: Any) -> bool:
    """Whether an answer says how many records there are, and that can be.  It counts to the end, or
    at least one batch further."""
    if row.error_code:
        log.debug("the records of %s are not counted: %s", x.tp, row.error_message)
        return False
    goes_on = start < row.next_offset <= x.stop or start == row.next_offset == x.stop
    return goes_on and 0 <= row.records <= row.next_offset - start


def _request(
    cluster: Cluster,
    wanted: list[CountWanted],
    parts: Mapping[CountWanted, tuple[int, int]],
    topic_ids: Mapping[str, str],
    committed_only: bool,
) -> Any:
    return p.CountRecordsRequest(
        isolation_level=int(committed_only),
        partitions=[
            p.CountRecordsRequest.CountTarget(
                topic=x.tp.topic,
                topic_id=_id_of(x.tp.topic, topic_ids),
                partition=x.tp.partition,
                current_leader_epoch=cluster.leader_epoch(x.tp),
                start_offset=parts[x][1],
                stop_offset=x.stop,
            )
            for x in wanted
        ],
    )


def _id_of(topic: str, topic_ids: Mapping[str, str]) -> uuid.UUID:
    text = topic_ids.get(topic)
    return uuid.UUID(text) if text else uuid.UUID(int=0)


__all__ = ["CountWanted", "counts"]
