"""Where partitions begin to be read: numbers for "the earliest" and "the latest" offset."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from kdirect.client.lost_broker import CONNECT_MS_BESIDES, LOST
from kdirect.client.read_paths import ReadConnections
from kdirect.errors import ConfigError, KdirectError
from kdirect.model import EARLIEST_OFFSET, LATEST_OFFSET, TopicPartition
from kdirect.wire.environment import Environment


class OffsetLookup(ReadConnections, Protocol):
    """What a consumer's reading needs of a session."""

    @property
    def environment(self) -> Environment:
        """Clock, and threads for searches."""

    def earliest_offsets(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """First offset of each partition."""

    def latest_offsets(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """High watermark of each partition."""


def resolve(
    session: OffsetLookup, offsets: Mapping[TopicPartition, int]
) -> dict[TopicPartition, int]:
    """`offsets` with numbers for -1 and -2."""
    out = dict(offsets)
    earliest = [tp for tp, o in out.items() if o == EARLIEST_OFFSET]
    latest = [tp for tp, o in out.items() if o == LATEST_OFFSET]
    for tp, offset in out.items():
        if offset < EARLIEST_OFFSET:
            raise ConfigError(
                f"offset {offset} of {tp} cannot be",
                hint="give an offset, -1 (latest) or -2 (earliest)",
            )
    if earliest:
        out |= session.earliest_offsets(earliest)
    if latest:
        out |= session.latest_offsets(latest)
    return out


def resolve_reached(
    session: OffsetLookup, offsets: Mapping[TopicPartition, int], others_are_read: bool
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, KdirectError]]:
    """`resolve`; of several brokers, partitions of those that are lost keep their -1 and -2, and
    are told with the error.  `others_are_read`: partitions of brokers that are not lost."""
    wanted = [tp for tp, o in offsets.items() if o in (LATEST_OFFSET, EARLIEST_OFFSET)]
    out = dict(offsets)
    lost: dict[TopicPartition, KdirectError] = {}
    if not wanted:
        return resolve(session, offsets), {}
    cluster = session.cluster
    groups, _ = cluster.leaders(wanted)
    if len(groups) < 2 and not others_are_read:
        return resolve(session, offsets), {}
    for tps in groups.values():
        try:
            cluster.connection_for(tps[0], timeout_ms=CONNECT_MS_BESIDES)
        except LOST as e:
            lost.update(dict.fromkeys(tps, e))
    if len(lost) == len(out) and not others_are_read:
        raise next(iter(lost.values()))
    out.update(resolve(session, {tp: o for tp, o in offsets.items() if tp not in lost}))
    return out, lost
