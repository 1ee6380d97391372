"""One object out of one sealed segment: what is sent, and that it is sound.

Law of the room: the segment's bytes go from its mapping to the store without a copy of ours.  Every
batch is checked before the first byte goes (frame, CRC, offsets): a segment that the disk has
damaged is not copied, because its copy would outlive the sound ones of other replicas.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from kdirect.errors import CorruptLogError
from kdirect.format.batch import crc32c
from kdirect.format.remote_metadata import RemoteSegment
from kdirect.format.segment_files import pack_leader_epochs, pack_transaction_index
from kdirect.format.segment_object import (
    Section,
    SegmentFacts,
    SegmentIdentity,
    TailPlace,
    object_key,
    pack_tail,
)
from kdirect.log.scan import scan_segment
from kdirect.log.tiering import SealedLog
from kdirect.objects.store import ObjectStore
from kdirect.objects.uploads import PART_BYTES
from kdirect.storage.throttle import Throttle
from kdirect.storage.topic_section import TopicSection

# Checked, and taken of what may be sent in a second, in one go.
PIECE_BYTES = 1 << 20


Outcome: TypeAlias = TailPlace | BaseException
GIVEN_UP = (
    "the store has taken nothing for {:g} s; it is given up (remote.log.copy.timeout.ms) and tried"
    " again"
)


class RunningUpload:
    """One upload, between the thread that may hang in it and the one that may not.  It has ended,
    or is given up, and never both: what was given up may be deleted by who ends it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.ended = threading.Event()
        self.outcome: Outcome | None = None
        self.given_up = False
        self.heard_at = clock()  # the store has taken something
        self._lock = threading.Lock()

    def end(self, outcome: Outcome) -> bool:
        """False when it was given up before."""
        with self._lock:
            if self.given_up:
                return False
            self.outcome = outcome
        self.ended.set()
        return True

    def give_up(self) -> bool:
        """False when it has ended before."""
        with self._lock:
            self.given_up = self.outcome is None
        return self.given_up


class Copier(NamedTuple):
    """Who copies: the cluster and the broker, and the leader epoch of the partition; and what is to
    be known of its topic."""

    cluster_id: str
    broker_id: int
    leader_epoch: int
    topic: TopicSection


def identity_of(segment: RemoteSegment, cluster_id: str) -> SegmentIdentity:
    """What the object of a segment says of itself."""
    return SegmentIdentity(
        cluster_id=cluster_id,
        topic=segment.topic,
        topic_id=segment.topic_id,
        partition=segment.partition,
        segment_id=segment.segment_id,
    )


def key_of(segment: RemoteSegment, cluster_id: str) -> str:
    """The key of its object, below the URI of the store."""
    return object_key("", identity_of(segment, cluster_id), segment.base_offset)


def upload(
    store: ObjectStore,
    segment: RemoteSegment,
    sealed: SealedLog,
    producers: bytes,
    copier: Copier,
    throttle: Throttle,
    stop: Callable[[], bool],
) -> TailPlace:
    """Store the object of `segment`, which is a copy of `sealed`; where its tail is.  `producers`:
    the producer snapshot at its end.

    CorruptLogError: the segment is damaged.  ClosedError: it was deleted.  Errors of the store
    as in `ObjectStore.put`; after those the object may be there."""
    log = sealed.open()
    first_timestamp = _check(log, sealed)
    offset_index, time_index = sealed.read_indexes()
    facts = SegmentFacts(
        identity=identity_of(segment, copier.cluster_id),
        base_offset=sealed.base_offset,
        end_offset=sealed.end_offset,
        log_bytes=sealed.size,
        max_timestamp_ms=sealed.max_timestamp,
        min_timestamp_ms=first_timestamp,
        broker_id=copier.broker_id,
        leader_epoch=copier.leader_epoch,
    )
    sections = {
        Section.OFFSET_INDEX: offset_index,
        Section.TIME_INDEX: time_index,
        Section.TRANSACTION_INDEX: pack_transaction_index(sealed.aborted),
        Section.PRODUCERS: producers,
        Section.LEADER_EPOCHS: pack_leader_epochs(segment.leader_epochs),
        Section.TOPIC: copier.topic.pack(),
    }
    tail = pack_tail(facts, crc32c(log), sections)
    key = key_of(segment, copier.cluster_id)
    store.put(key, len(log) + len(tail), _pieces(log, tail, throttle, stop), stop=stop)
    return TailPlace(len(log), len(tail))


def _check(log: memoryview, sealed: SealedLog) -> int:
    """The smallest timestamp that a batch begins with.  CorruptLogError."""
    scanned = scan_segment(
        sealed.segment.address,  # mapped as long as `log` is held
        len(log),
        sealed.base_offset,
        sealed.base_offset,
        PIECE_BYTES,
        dense_from=sealed.segment.dense_from,
    )
    if scanned.size != len(log) or scanned.end_offset > sealed.end_offset:
        raise CorruptLogError(
            f"{sealed.segment.path} is damaged at position {scanned.size}, behind offset"
            f" {scanned.end_offset}: {scanned.reason or 'it ends there'}",
            hint="it is not copied to remote storage; restore it from a good copy",
        )
    return int(scanned.first_timestamp)


def _pieces(
    log: memoryview, tail: bytes, throttle: Throttle, stop: Callable[[], bool]
) -> Iterator[memoryview]:
    """As large as a part of an upload, which is sent without a copy then."""
    for data in (log, memoryview(tail)):
        for at in range(0, len(data), PART_BYTES):
            part = data[at : at + PART_BYTES]
            for taken in range(0, len(part), PIECE_BYTES):
                throttle.take(min(PIECE_BYTES, len(part) - taken), stop)
            yield part


__all__ = ["Copier", "identity_of", "key_of", "upload"]
