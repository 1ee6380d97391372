"""What an object store knows of a cluster whose metadata is lost: its topics, and of each partition
the segments, leader epochs and producers.

Reads the objects of one cluster and changes nothing.  The store is listed once; of each object the
footer is read, and of the last one of each partition the whole tail.  An object that is damaged is
named and left out, and so is one whose key and footer disagree.  A store that does not answer ends
it all: what is left out is an orphan from then on.

Where several segments hold an offset, the one of the newest leader epoch counts, then the one that
reaches furthest: an unclean election may have left copies of records that the log lost.

The log starts at the first offset that is there.  What is missing between (an object that is
damaged or gone) is a gap of the log, which is named: nothing that is sound is given up for it.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from kdirect.errors import CorruptObjectError, FormatError, ObjectNotFoundError
from kdirect.format.remote_metadata import RemoteSegment, SegmentState
from kdirect.format.segment_files import parse_leader_epochs
from kdirect.format.segment_object import (
    CustomMetadata,
    Section,
    SegmentObject,
    needs,
    pack_custom_metadata,
    parse_custom_metadata,
    parse_key,
    parse_tail,
    require_identity,
)
from kdirect.objects.store import ObjectInfo, ObjectStore
from kdirect.storage.topic_section import TopicSection, parse_topic
from kdirect.storage.upload import key_of

TAIL_GUESS_BYTES = 64 << 10
THREADS = 16
# The epoch of rebuilt metadata: no newer than that of any leadership that reads it, and the same of
# all records, for one that is older than the record before it changes nothing.
NO_LEADERSHIP = 0

Report = Callable[[str], None]


class _Found(NamedTuple):
    """An object that is sound as far as was looked."""

    info: ObjectInfo
    footer: SegmentObject
    epochs: tuple[tuple[int, int], ...]
    topic: TopicSection
    producers: bytes


@dataclass(slots=True)
class RebuiltPartition:
    """One partition.  `epochs`: (leader epoch, first offset) ascending; `producers`: the producer
    snapshot at `end_offset`; `gaps`: (first, end) of offsets that no segment has."""

    segments: list[RemoteSegment]
    log_start_offset: int
    end_offset: int
    epochs: list[tuple[int, int]]
    producers: bytes
    gaps: list[tuple[int, int]]


@dataclass(slots=True)
class RebuiltTopic:
    name: str
    topic_id: uuid.UUID
    section: TopicSection
    partitions: dict[int, RebuiltPartition] = field(default_factory=dict)


def read_objects(store: ObjectStore, cluster_id: str, report: Report) -> list[RebuiltTopic]:
    """The topics of a cluster, by name.  `report` is told of what is left out, and why.  Errors of
    the store."""
    listed = [info for info in store.list(f"{cluster_id}/") if parse_key("", info.key)]
    with ThreadPoolExecutor(THREADS, "kdirect-remote-rebuild") as pool:
        found = [x for x in pool.map(lambda info: _read(store, info, report), listed) if x]
    by_topic: dict[uuid.UUID, list[_Found]] = {}
    for each in found:
        by_topic.setdefault(each.footer.identity.topic_id, []).append(each)
    topics = [_topic(objects) for objects in by_topic.values()]
    kept = sorted(_newest_of_each_name(topics, by_topic, report), key=lambda t: t.name)
    for topic in kept:
        for number, partition in topic.partitions.items():
            for start, end in partition.gaps:
                name = f"{topic.name}-{number}"
                report(f"{name} lacks offsets {start} to {end - 1}: no sound object has them")
    return kept


def read_partition(
    store: ObjectStore, cluster_id: str, segments: Iterable[RemoteSegment]
) -> RebuiltPartition:
    """The same of one partition whose metadata is there.  CorruptObjectError when an object is
    damaged or gone: then nothing is known for sure.  Errors of the store."""
    infos = []
    for segment in segments:
        key, custom = key_of(segment, cluster_id), parse_custom_metadata(segment.custom)
        known = None if custom is None or custom.tail is None else custom.tail.object_bytes
        size = store.size(key) if known is None else known
        infos.append(ObjectInfo(key=key, size=size or 0, modified_ms=segment.event_timestamp_ms))
    reports: list[str] = []
    with ThreadPoolExecutor(THREADS, "kdirect-remote-rebuild") as pool:
        found = list(pool.map(lambda info: _read(store, info, reports.append), infos))
    if reports:
        raise CorruptObjectError(reports[0], hint="restore it from a good copy")
    return _partition([each for each in found if each is not None])


def _read(store: ObjectStore, info: ObjectInfo, report: Report) -> _Found | None:
    try:
        tail = store.get_tail(info.key, info.size, min(info.size, TAIL_GUESS_BYTES))
        wanted = needs(tail, info.size)
        if wanted > len(tail):
            tail = store.get_tail(info.key, info.size, wanted)
        footer, sections = parse_tail(tail, info.size)
        parsed = parse_key("", info.key)
        assert parsed is not None
        identity, base_offset = parsed
        require_identity(footer, identity, base_offset)
        return _Found(
            info,
            footer,
            parse_leader_epochs(sections[Section.LEADER_EPOCHS]),
            parse_topic(sections[Section.TOPIC]),
            bytes(sections[Section.PRODUCERS]),
        )
    except (FormatError, ObjectNotFoundError) as e:
        report(f"{info.key} is left out: {e}")
        return None


def _newest_of_each_name(
    topics: Iterable[RebuiltTopic], objects: dict[uuid.UUID, list[_Found]], report: Report
) -> Iterator[RebuiltTopic]:
    """Where a topic was deleted and made again under its name, the later one."""

    def newest(topic: RebuiltTopic) -> int:
        return max(x.info.modified_ms for x in objects[topic.topic_id])

    names: dict[str, RebuiltTopic] = {}
    for topic in sorted(topics, key=newest):
        before = names.get(topic.name)
        if before is not None:
            report(
                f"topic {topic.name} of id {before.topic_id} is left out: a later topic of this"
                f" name has id {topic.topic_id}"
            )
        names[topic.name] = topic
    yield from names.values()


def _topic(objects: list[_Found]) -> RebuiltTopic:
    newest = max(objects, key=lambda x: x.info.modified_ms)
    identity = newest.footer.identity
    topic = RebuiltTopic(identity.topic, identity.topic_id, newest.topic)
    for number in sorted({x.footer.identity.partition for x in objects}):
        mine = [x for x in objects if x.footer.identity.partition == number]
        topic.partitions[number] = _partition(mine)
    return topic


def _partition(objects: list[_Found]) -> RebuiltPartition:
    chain = list(_chain(objects))
    epochs: list[tuple[int, int]] = []
    for each in chain:
        for epoch, start in each.epochs:
            if not epochs or epoch > epochs[-1][0]:
                epochs.append((epoch, max(start, epochs[-1][1] if epochs else start)))
    return RebuiltPartition(
        segments=[_segment(x) for x in objects],
        log_start_offset=chain[0].footer.base_offset,
        end_offset=chain[-1].footer.end_offset,
        epochs=epochs,
        producers=chain[-1].producers,
        gaps=[
            (before.footer.end_offset, after.footer.base_offset)
            for before, after in itertools.pairwise(chain)
            if before.footer.end_offset < after.footer.base_offset
        ],
    )


def _chain(objects: list[_Found]) -> Iterator[_Found]:
    """The objects that make the log, in order: the run without a gap that reaches the last offset
    that any of the newest epoch has, and those before it."""
    ordered = sorted(objects, key=lambda x: (x.footer.base_offset, x.footer.end_offset))
    runs: list[list[_Found]] = []
    while ordered:
        run: list[_Found] = []
        end = ordered[0].footer.base_offset
        while (following := _best(ordered, end)) is not None:
            run.append(following)
            end = following.footer.end_offset
        runs.append(run)
        ordered = [x for x in ordered if x.footer.base_offset > end]
    last = max(runs, key=lambda run: (run[-1].footer.leader_epoch, run[-1].footer.end_offset))
    for run in runs[: runs.index(last) + 1]:
        yield from run


def _best(objects: list[_Found], offset: int) -> _Found | None:
    holding = [x for x in objects if x.footer.base_offset <= offset < x.footer.end_offset]
    return max(holding, key=lambda x: (x.footer.leader_epoch, x.footer.end_offset), default=None)


def _segment(found: _Found) -> RemoteSegment:
    footer = found.footer
    identity = footer.identity
    return RemoteSegment(
        topic=identity.topic,
        topic_id=identity.topic_id,
        partition=identity.partition,
        segment_id=identity.segment_id,
        base_offset=footer.base_offset,
        end_offset=footer.end_offset,
        broker_id=footer.broker_id,
        max_timestamp_ms=footer.max_timestamp_ms,
        event_timestamp_ms=max(0, found.info.modified_ms),
        leader_epochs=found.epochs,
        size=footer.log_bytes,
        custom=pack_custom_metadata(CustomMetadata(NO_LEADERSHIP, footer.tail)),
        state=SegmentState.COPY_SEGMENT_FINISHED,
        txn_index_empty=footer.sections[Section.TRANSACTION_INDEX].length == 0,
    )


__all__ = ["RebuiltPartition", "RebuiltTopic", "read_objects", "read_partition"]
