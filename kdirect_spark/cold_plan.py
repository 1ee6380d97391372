"""Ranges of offsets that lie in objects of remote storage: split at their borders among tasks.

Law: pure.  The planner asks the broker where records lie, once a query or micro-batch, and passes
it in (`kdirect_spark.broker_view`).

One topic partition with a hundred remote segments is read by up to a hundred tasks, each of which
knows its objects: no task asks the broker for them.  But a task keeps its slot busy for some 30 ms
whatever it reads (measured with hot records, two tasks or sixteen), in which it could read 64 MiB:
small objects are read by one task together, as long as there are `TASKS` of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kdirect.model import TopicPartition
from kdirect_spark.offsets import OffsetRange, split

# Of log in one task, about, if the objects of its partition have as much.
LEAST_BYTES, MOST_BYTES = 4 << 20, 256 << 20
TASKS = 8  # and more: a query over less than as many times `MOST_BYTES` has smaller ones


class Place(Protocol):
    """An object; `kdirect.client.cold_places.ColdPlace`."""

    @property
    def base_offset(self) -> int: ...

    @property
    def end_offset(self) -> int: ...

    @property
    def log_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class LocatedRange:
    """What one task reads.  `places`: the objects that hold it, in order, as far as it lies in
    objects; empty: the broker has it."""

    range: OffsetRange
    places: tuple[Place, ...] = ()


def split_at_objects(
    ranges: Iterable[OffsetRange],
    places: Mapping[TopicPartition, Sequence[Place]],
    *,
    by_object: bool = True,
    min_partitions: int | None = None,
) -> list[LocatedRange]:
    """Each range in pieces that end where an object does; what lies after the last object of its
    partition stays whole.  Without `by_object` the ranges are not split.  `places` of a partition
    follow each other without a gap, and the first one holds the start of the range.  With
    `min_partitions` small objects share a task only as far as there are that many tasks: to split
    later, within objects, would have several tasks fetch each of them."""
    out: list[LocatedRange] = []
    ranges = list(ranges)
    wanted = _bytes_of_a_task(ranges, places, min_partitions) if by_object else 0
    for whole in ranges:
        if not by_object:
            out.append(LocatedRange(whole, tuple(places.get(whole.topic_partition, ()))))
            continue
        start = whole.start
        held: list[Place] = []
        for place in places.get(whole.topic_partition, ()):
            if place.end_offset <= start:
                continue
            if place.base_offset >= whole.stop or (place.base_offset > start and not held):
                break
            # As near to what is wanted as whole objects come: those of full segments lack a little.
            if held and sum(p.log_bytes for p in held) + place.log_bytes / 2 > wanted:
                end = held[-1].end_offset
                out.append(LocatedRange(_part(whole, start, end), tuple(held)))
                start, held = end, []
            held.append(place)
        if held:
            end = min(held[-1].end_offset, whole.stop)
            out.append(LocatedRange(_part(whole, start, end), tuple(held)))
            start = end
        if start < whole.stop:
            out.append(LocatedRange(_part(whole, start, whole.stop)))
    return out


def split_further(
    located: Sequence[LocatedRange], min_partitions: int | None, max_records: int | None
) -> list[LocatedRange]:
    """Pieces as `minPartitions` and `maxRecordsPerPartition` want them (`offsets.split`), each with
    the objects that hold it."""
    pieces = split([x.range for x in located], min_partitions, max_records)
    out: list[LocatedRange] = []
    at = 0
    for piece in pieces:
        while not _holds(located[at].range, piece):
            at += 1
        places = located[at].places
        mine = (p for p in places if p.base_offset < piece.stop and p.end_offset > piece.start)
        out.append(LocatedRange(piece, tuple(mine)))
    return out


def _bytes_of_a_task(
    ranges: Iterable[OffsetRange],
    places: Mapping[TopicPartition, Sequence[Place]],
    min_partitions: int | None,
) -> int:
    total = sum(
        place.log_bytes
        for x in ranges
        for place in places.get(x.topic_partition, ())
        if place.base_offset < x.stop and place.end_offset > x.start
    )
    wanted = min(max(total // TASKS, LEAST_BYTES), MOST_BYTES)
    return min(wanted, total // min_partitions) if min_partitions else wanted


def _part(whole: OffsetRange, start: int, stop: int) -> OffsetRange:
    return OffsetRange(whole.topic_partition, start, stop)


def _holds(whole: OffsetRange, piece: OffsetRange) -> bool:
    return (
        whole.topic_partition == piece.topic_partition
        and whole.start <= piece.start
        and piece.stop <= whole.stop
    )


__all__ = [
    "LEAST_BYTES",
    "MOST_BYTES",
    "TASKS",
    "LocatedRange",
    "Place",
    "split_at_objects",
    "split_further",
]
