"""What the leader of a tiered partition does with its remote segments: copy, adopt, delete, clean
up.  Decisions only.

Law of the room: a machine that touches nothing, no store, log, clock or thread.  `on(event)` gives
the effects; a driver carries them out and tells the outcome as an event.  One value for each
leadership: it begins with the metadata that was committed before, and is dropped with the
leadership.

A remote segment is known by its metadata only, and its metadata by records that are committed::

                 Put stored             below the log start
    STARTED ------------------> FINISHED ------------------> DELETE_STARTED ---> (forgotten)
       |                                                        ^     Delete done
       +--------------------------------------------------------+
                 Put failed, or nothing sound was found

- **One try, one id.**  Each try to copy has a segment id, hence a key, of its own.  What an earlier
  try may still be writing can neither be mistaken for this one nor overwrite it.
- **Adoption.**  A STARTED that this leadership did not begin was left by a broker that died, or by
  one that led before.  Its object is looked at: a whole one is counted (FINISHED), anything else is
  deleted.  When the store does not answer, it is looked at again later.  Should the other broker
  still finish its upload, its FINISHED comes after our DELETE_STARTED and changes nothing; the
  object is an orphan, which the sweep finds.
- **Older leaderships.**  In a cluster one that is over may go on for a while, and its records may
  come late.  Each record carries the leader epoch of its writer, and one of an older epoch than a
  record before it changes nothing, for any reader of the topic.  So a leadership first writes a
  record that says nothing but its epoch (`fences`), and decides once it has read that: what it
  relies on cannot be taken away by another one any more.  A leadership that reads a newer epoch is
  over.  A broker that is alone has no need of that.
- **STARTED counts nowhere**: neither in sizes nor in retention nor for readers (KAFKA-17062).
- **Local segments** go only below `Tiered`: up to there every offset that is here has a FINISHED
  copy.
- **Deletion** of records: first the log start moves (`MoveLogStart`, durable before
  `LogStartMoved`), then segments wholly below it get DELETE_STARTED, then their objects go.  A
  deletion that fails is repeated.
- A segment that is **not of this log's history** (an unclean election took its leader epochs away)
  is counted nowhere; it goes when the log start or ``retention.ms`` has passed it.
- A segment that another one **covers whole** is superfluous, and goes.

======================  ==========================================================================
event                   what it says
======================  ==========================================================================
`Recorded`              a metadata record is committed (before `Loaded`: was found in the topic)
`Unrecorded`            a metadata record could not be written
`Loaded`                every record that was committed before this leadership has been told
`Looked`                what the partition says of itself, its configuration, the time
`PutEnded`              an upload has ended, or was given up
`Checked`               what an object looked like whose upload another leadership had begun
`DeleteEnded`           an object is gone, or could not be deleted
`LogStartMoved`         the log start is at an offset, durably
`TopicDeleted`          the topic is gone: everything of it goes
======================  ==========================================================================

Nothing happens before `Loaded` and the first `Looked`; what has to be tried again waits for the
first `Looked` after its time.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kdirect.format.remote_metadata import (
    PartitionDeleteState,
    RemotePartitionDelete,
    RemoteSegment,
    RemoteSegmentUpdate,
    SegmentState,
)
from kdirect.format.segment_object import (
    CustomMetadata,
    TailPlace,
    pack_custom_metadata,
    parse_custom_metadata,
)
from kdirect.storage.copy_rules import (
    LocalLog,
    LocalSegment,
    TierConfig,
    first_anywhere,
    kept_from,
    next_to_copy,
    pause_ms,
)
from kdirect.storage.lineage import belongs, epochs_between
from kdirect.storage.remote_events import (
    Check,
    Checked,
    Delete,
    DeleteEnded,
    Effect,
    Event,
    Figures,
    Forget,
    Found,
    Loaded,
    LogStartMoved,
    LookAgain,
    Looked,
    MoveLogStart,
    Put,
    PutEnded,
    Recorded,
    Tiered,
    TopicDeleted,
    Unrecorded,
    Write,
)
from kdirect.storage.remote_segments import RemoteSegments
from kdirect.storage.segment_states import NO_EPOCH, NO_SEGMENT, epoch_of, follows, updated

MOST_DELETIONS = 32  # under way at once, of one partition
MOST_FAILED = 3  # tries whose remains are not deleted yet; more are not begun

# -- the machine -----------------------------------------------------------------------------------

_S = SegmentState
_FORGOTTEN = PartitionDeleteState.DELETE_PARTITION_FINISHED


@dataclass(slots=True)
class _Held:
    """A segment of which there is metadata.  `mine`: a try of this leadership, whose upload, where
    `is_new`, has not begun.  `busy`: an upload, a look or a deletion is under way.  `writing`: the
    state whose record is.  `is_leaving`: that record may be committed, so nothing else may be
    decided any more."""

    segment: RemoteSegment
    mine: bool = False
    is_new: bool = False
    busy: bool = False
    is_leaving: bool = False
    writing: SegmentState | None = None
    failures: int = 0
    not_before_ms: int = 0

    @property
    def is_idle(self) -> bool:
        return not self.busy and self.writing is None


class RemoteLog:
    """See the module.  `new_id` gives segment ids that nobody else has.  Any one thread."""

    def __init__(
        self,
        topic: str,
        topic_id: uuid.UUID,
        partition: int,
        *,
        broker_id: int,
        leader_epoch: int = 0,
        fences: bool = False,
        new_id: Callable[[], uuid.UUID] = uuid.uuid4,
    ) -> None:
        self._topic = topic
        self._topic_id = topic_id
        self._partition = partition
        self._broker_id = broker_id
        self._epoch = leader_epoch
        self._fences = fences
        self._newest_epoch = NO_EPOCH  # of all records
        self._fencing: RemoteSegmentUpdate | None = None  # the record of the epoch, once written
        self._is_fenced = False  # and it was read
        self._is_over = False
        self._new_id = new_id
        self._held: dict[uuid.UUID, _Held] = {}
        self.segments = RemoteSegments()  # FINISHED, and of this log's history
        self._loaded = False
        self.is_doomed = False  # the topic was deleted
        self._deleted: PartitionDeleteState | None = None  # what the metadata says of that
        self._writing: PartitionDeleteState | None = None
        self._now_ms = 0
        self._local: LocalLog | None = None
        self._config = TierConfig()
        self._lineage: tuple[tuple[int, int], ...] = ()
        self._moving: set[uuid.UUID] = set()  # STARTED, or being deleted
        self._aside: set[uuid.UUID] = set()  # FINISHED, and not among `segments`
        self._retiring: set[uuid.UUID] = set()  # their DELETE_SEGMENT_STARTED was written
        self._copying: uuid.UUID | None = None
        self._copy_failures = 0
        self._copy_not_before_ms = 0
        self._deleting = 0
        self.tiered_end = -1  # of the last `Tiered`

    def on(self, event: Event) -> list[Effect]:
        """What is to be done after an event, in this order."""
        if self._is_over:
            return []
        return self._HANDLERS[type(event)](self, event)  # type: ignore[operator]

    # -- metadata ----------------------------------------------------------------------------------

    def _recorded(self, event: Recorded) -> list[Effect]:
        record = event.record
        if isinstance(record, RemotePartitionDelete):
            return self._partition_recorded(record)
        epoch = epoch_of(record)
        if NO_EPOCH < epoch < self._newest_epoch:
            return []
        self._newest_epoch = max(epoch, self._newest_epoch)
        if self._newest_epoch > self._epoch and self._loaded:
            self._is_over = True
            return []
        if record.segment_id == NO_SEGMENT:
            return self._fenced(record)
        held = self._held.get(record.segment_id)
        if isinstance(record, RemoteSegment):
            if held is None:
                self._held[record.segment_id] = held = _Held(record)
                self._moving.add(record.segment_id)
            elif held.writing is not record.state:
                return []  # it was told before
        elif held is None:
            return []
        elif follows(record.state, held.segment.state):
            held.segment = updated(held.segment, record)
        elif held.writing is not record.state:
            return []  # of a leader that was not one any more
        if held.writing not in (None, record.state):
            return []  # by somebody else: what we are writing decides
        held.writing = None
        held.failures = 0
        self._note(held)
        return self._entered(held) if self._decides else []

    def _unrecorded(self, event: Unrecorded) -> list[Effect]:
        record = event.record
        if isinstance(record, RemotePartitionDelete):
            self._writing = None  # the next look tries again
            return []
        if record.segment_id == NO_SEGMENT:
            self._fencing = None
            return []
        held = self._held.get(record.segment_id)
        if held is None or held.writing is not record.state:
            return []
        held.writing = None
        if isinstance(record, RemoteSegment):  # its copy has not begun
            self._drop(held)
            self._copy_ended(failed=True)
            return []
        self._pause(held)
        return []

    def _note(self, held: _Held) -> None:
        """Put a segment where its state belongs."""
        segment_id = held.segment.segment_id
        if held.segment.state is _S.COPY_SEGMENT_FINISHED and not held.is_leaving:
            self._moving.discard(segment_id)
            held.mine = False  # no try any more: its deletion, one day, is not that of remains
            if self._local is not None:
                self._count(held.segment)
        elif held.segment.state > _S.COPY_SEGMENT_FINISHED:
            counted = segment_id in self.segments
            self.segments.remove(segment_id)
            self._aside.discard(segment_id)
            self._retiring.discard(segment_id)
            self._moving.add(segment_id)
            if counted and self._local is not None:
                self._count_those_aside()  # one that it covered may hold what it held
            if held.segment.state is _S.DELETE_SEGMENT_FINISHED:
                self._drop(held)

    def _entered(self, held: _Held) -> list[Effect]:
        """What follows from the state that a segment has reached."""
        segment, state = held.segment, held.segment.state
        if state is _S.COPY_SEGMENT_STARTED:
            return self._go_on(held)
        if segment.segment_id == self._copying:
            self._copy_ended(failed=state is not _S.COPY_SEGMENT_FINISHED)
        if state is _S.COPY_SEGMENT_FINISHED:
            return [*self._say_tiered(), LookAgain()]
        return self._go_on(held) if state is _S.DELETE_SEGMENT_STARTED else self._after_deletion()

    def _drop(self, held: _Held) -> None:
        del self._held[held.segment.segment_id]
        self._moving.discard(held.segment.segment_id)

    def _loaded_all(self, event: Loaded) -> list[Effect]:
        self._loaded = True
        if self._newest_epoch > self._epoch:
            self._is_over = True
            return []
        return self._look() if self._local is not None else []

    @property
    def _decides(self) -> bool:
        """Is everything known that decisions need, and can it not be changed by others any more?"""
        return self._loaded and self._local is not None and (self._is_fenced or not self._fences)

    def _fence(self) -> list[Effect]:
        """Write that this epoch has begun."""
        if self._fencing is not None:
            return []
        self._fencing = self._update(NO_SEGMENT, _S.DELETE_SEGMENT_FINISHED, self._custom())
        return [Write(self._fencing)]

    def _fenced(self, record: RemoteSegment | RemoteSegmentUpdate) -> list[Effect]:
        if record != self._fencing:  # of this epoch it may be one that was written before
            return []
        self._is_fenced = True
        return self._look() if self._decides else []

    # -- the work of one segment -------------------------------------------------------------------

    def _go_on(self, held: _Held) -> list[Effect]:
        """The next effect of a segment that is on its way in or out."""
        if not held.is_idle or self._now_ms < held.not_before_ms:
            return []
        segment = held.segment
        is_there = segment.state <= _S.COPY_SEGMENT_FINISHED
        if is_there and (held.is_leaving or self.is_doomed):
            return self._write(held, _S.DELETE_SEGMENT_STARTED)
        if segment.state is _S.COPY_SEGMENT_STARTED:
            held.busy = True
            if held.is_new:
                held.is_new = False
                return [Put(segment)]
            return [Check(segment)]
        if segment.state is _S.DELETE_SEGMENT_STARTED:
            if self._deleting >= MOST_DELETIONS:
                return []
            self._deleting += 1
            held.busy = True
            return [Delete(segment)]
        return []

    def _put_ended(self, event: PutEnded) -> list[Effect]:
        held = self._held.get(event.segment_id)
        if held is None or not held.busy:
            return []
        held.busy = False
        if held.segment.state is not _S.COPY_SEGMENT_STARTED:
            return []  # somebody has begun to delete it: the next look goes on
        if event.tail is not None and not self.is_doomed:
            return self._write(held, _S.COPY_SEGMENT_FINISHED, event.tail)
        if event.segment_id == self._copying:
            self._copy_ended(failed=True)
        return self._write(held, _S.DELETE_SEGMENT_STARTED)

    def _checked(self, event: Checked) -> list[Effect]:
        held = self._held.get(event.segment_id)
        if held is None or not held.busy:
            return []
        held.busy = False
        if held.segment.state is not _S.COPY_SEGMENT_STARTED:
            return self._go_on(held)  # its own leader has said what became of it
        if event.found is Found.UNKNOWN:
            self._pause(held)
            return []
        if event.found is Found.SOUND and not self.is_doomed:
            return self._write(held, _S.COPY_SEGMENT_FINISHED, event.tail)
        return self._write(held, _S.DELETE_SEGMENT_STARTED)

    def _delete_ended(self, event: DeleteEnded) -> list[Effect]:
        held = self._held.get(event.segment_id)
        if held is None or not held.busy:
            return []
        held.busy = False
        self._deleting -= 1
        if event.done:
            return self._write(held, _S.DELETE_SEGMENT_FINISHED)
        self._pause(held)
        return []

    def _write(
        self, held: _Held, state: SegmentState, tail: TailPlace | None = None
    ) -> list[Effect]:
        held.writing = state
        held.is_leaving |= state is _S.DELETE_SEGMENT_STARTED
        known = parse_custom_metadata(held.segment.custom)
        if tail is None and known is not None:
            tail = known.tail
        return [Write(self._update(held.segment.segment_id, state, self._custom(tail)))]

    def _custom(self, tail: TailPlace | None = None) -> bytes:
        return pack_custom_metadata(CustomMetadata(self._epoch, tail))

    def _update(
        self, segment_id: uuid.UUID, state: SegmentState, custom: bytes
    ) -> RemoteSegmentUpdate:
        return RemoteSegmentUpdate(
            topic=self._topic,
            topic_id=self._topic_id,
            partition=self._partition,
            segment_id=segment_id,
            broker_id=self._broker_id,
            event_timestamp_ms=self._now_ms,
            custom=custom,
            state=state,
        )

    def _pause(self, held: _Held) -> None:
        held.failures += 1
        held.not_before_ms = self._now_ms + pause_ms(held.failures)

    def _copy_ended(self, *, failed: bool) -> None:
        self._copying = None
        self._copy_failures = self._copy_failures + 1 if failed else 0
        if failed:
            self._copy_not_before_ms = self._now_ms + pause_ms(self._copy_failures)

    # -- looking -----------------------------------------------------------------------------------

    def _looked(self, event: Looked) -> list[Effect]:
        self._now_ms, self._local, self._config = event.now_ms, event.local, event.config
        return self._look() if self._loaded else []

    def _look(self) -> list[Effect]:
        assert self._local is not None
        if self.is_doomed:
            return self._delete_all()
        if self._local.epochs != self._lineage:
            self._lineage = self._local.epochs
            self._count_again()
        if not self._decides:
            return self._fence()
        effects = self._say_tiered()
        kept = self._kept_from()
        if kept > self._local.log_start_offset:
            effects.append(MoveLogStart(kept))
        effects += self._retire()
        for segment_id in list(self._moving):
            effects += self._go_on(self._held[segment_id])
        return effects + self._begin_copy(kept)

    def _kept_from(self) -> int:
        local = self._local
        assert local is not None
        if self._config.deletes_all:
            return max(local.log_start_offset, local.local_start_offset)
        kept = kept_from(local, self.segments, self._config, self._now_ms)
        aside = [self._held[segment_id].segment for segment_id in self._aside]
        return max(kept, first_anywhere(local, self.segments, aside)) if self._fences else kept

    def _log_start_moved(self, event: LogStartMoved) -> list[Effect]:
        if self._local is None or event.offset <= self._local.log_start_offset:
            return []
        self._local = self._local._replace(log_start_offset=event.offset)
        return self._retire() if self._decides and not self.is_doomed else []

    def _retire(self) -> list[Effect]:
        """Begin to delete what is below the log start, of no history of this log and too old, or
        covered by another segment.  No more at once than are deleted at once."""
        effects: list[Effect] = []
        for segment in self._superfluous():
            if len(self._retiring) + self._deleting >= MOST_DELETIONS:
                break
            effects += self._retire_one(self._held[segment.segment_id])
        return effects

    def _retire_one(self, held: _Held) -> list[Effect]:
        if not held.is_idle or self._now_ms < held.not_before_ms:
            return []
        self._retiring.add(held.segment.segment_id)
        self._moving.add(held.segment.segment_id)
        return self._write(held, _S.DELETE_SEGMENT_STARTED)

    def _superfluous(self) -> Iterator[RemoteSegment]:
        """Segments that are to go."""
        assert self._local is not None
        start, retention_ms = self._local.log_start_offset, self._config.retention_ms
        yield from list(self.segments) if self._config.deletes_all else self.segments.below(start)
        for segment_id in list(self._aside):
            segment = self._held[segment_id].segment
            age_ms = self._now_ms - segment.max_timestamp_ms
            if (
                segment.end_offset <= start
                or self._is_covered(segment)
                or self._config.deletes_all
                or 0 <= retention_ms < age_ms
            ):
                yield segment

    def _is_covered(self, segment: RemoteSegment) -> bool:
        """Does one segment that counts hold all that this one holds?"""
        found = self.segments.at(segment.base_offset)
        return (
            found is not None
            and found.segment_id != segment.segment_id
            and found.end_offset >= segment.end_offset
        )

    # -- which segments count ----------------------------------------------------------------------

    def _count(self, segment: RemoteSegment) -> None:
        """Let a FINISHED segment count if it is of this log's history and no other one holds all of
        it; those that it covers itself count no longer."""
        assert self._local is not None
        if not belongs(segment, self._local) or self._is_covered(segment):
            self._aside.add(segment.segment_id)
            return
        for other in self.segments.within(segment.base_offset, segment.end_offset):
            self.segments.remove(other.segment_id)
            self._aside.add(other.segment_id)
        self.segments.add(segment)

    def _count_those_aside(self) -> None:
        aside = [self._held[segment_id].segment for segment_id in self._aside]
        self._aside.clear()
        for segment in sorted(aside, key=lambda s: (s.base_offset, -s.end_offset)):
            self._count(segment)

    def _count_again(self) -> None:
        """The log has another history than before: it leads again, or it has a new epoch."""
        assert self._local is not None
        held = [h for h in self._held.values() if h.segment.state is _S.COPY_SEGMENT_FINISHED]
        still = [h.segment for h in held if not h.is_leaving]
        self._moving.difference_update(segment.segment_id for segment in still)
        self.segments.load(segment for segment in still if belongs(segment, self._local))
        self._aside = {s.segment_id for s in still if s.segment_id not in self.segments}

    def _say_tiered(self) -> list[Effect]:
        """How far the local log is copied, if that is not what was said, or what the log knows: one
        that was not tiered for a moment has forgotten it."""
        assert self._local is not None
        if self._config.deletes_all:
            return []
        start = self._local.local_start_offset
        end = self.segments.covered_from(start)
        if end <= start or self._are_leaving(start):
            end = -1
        if end == self.tiered_end and self._local.told_end in (None, max(0, end)):
            return []
        self.tiered_end = end
        return [Tiered(end)]

    def _are_leaving(self, start: int) -> bool:
        """Are copies above `start` about to be deleted?  They are none any more."""
        leaving = (self._held[i].segment for i in self._retiring if i in self.segments)
        return any(segment.end_offset > start for segment in leaving)

    # -- copying -----------------------------------------------------------------------------------

    def _begin_copy(self, kept: int) -> list[Effect]:
        local = self._local
        assert local is not None
        if self._copying is not None or self._now_ms < self._copy_not_before_ms:
            return []
        if self._failed_tries() >= MOST_FAILED or self._is_to_be_adopted(local):
            return []
        if self._are_leaving(local.local_start_offset):
            return []
        found = next_to_copy(local, self._config, max(self.tiered_end, kept), self._now_ms)
        if found is None:
            return []
        segment = self._new_segment(found, local)
        self._copying = segment.segment_id
        self._held[segment.segment_id] = _Held(
            segment, mine=True, is_new=True, writing=_S.COPY_SEGMENT_STARTED
        )
        self._moving.add(segment.segment_id)
        return [Write(segment)]

    def _failed_tries(self) -> int:
        """Tries of this leadership whose remains are not deleted yet."""
        return sum(self._held[segment_id].mine for segment_id in self._moving)

    def _is_to_be_adopted(self, local: LocalLog) -> bool:
        """Is there an object that may turn out to be the copy that would be made next?  It is
        waited for: what is there need not be uploaded again."""
        start = max(self.tiered_end, local.log_start_offset)
        return any(
            held.segment.state is _S.COPY_SEGMENT_STARTED
            and not held.mine
            and held.segment.end_offset > start
            for held in map(self._held.__getitem__, self._moving)
        )

    def _new_segment(self, found: LocalSegment, local: LocalLog) -> RemoteSegment:
        return RemoteSegment(
            topic=self._topic,
            topic_id=self._topic_id,
            partition=self._partition,
            segment_id=self._new_id(),
            base_offset=found.base_offset,
            end_offset=found.end_offset,
            broker_id=self._broker_id,
            max_timestamp_ms=found.newest_ms,
            event_timestamp_ms=self._now_ms,
            leader_epochs=epochs_between(local.epochs, found.base_offset, found.end_offset),
            size=found.size,
            custom=self._custom(),
            state=_S.COPY_SEGMENT_STARTED,
            txn_index_empty=not found.has_aborted,
        )

    # -- the topic is gone -------------------------------------------------------------------------

    def _topic_deleted(self, event: TopicDeleted) -> list[Effect]:
        self.is_doomed = True
        return self._delete_all() if self._loaded else []

    def _partition_recorded(self, record: RemotePartitionDelete) -> list[Effect]:
        self._writing = None
        self.is_doomed = True
        self._deleted = record.state
        if record.state is not _FORGOTTEN:
            return self._delete_all() if self._loaded else []
        self._held.clear()
        self.segments.clear()
        for some in (self._moving, self._aside, self._retiring):
            some.clear()
        return [Forget()] if self._loaded else []

    def _delete_all(self) -> list[Effect]:
        """Bring every segment out, once it is known that all have to go; an upload that is under
        way ends first."""
        if self._deleted is _FORGOTTEN:
            return [Forget()]
        if self._deleted is None:
            return self._write_partition(PartitionDeleteState.DELETE_PARTITION_MARKED)
        if not self._held:
            return self._write_partition(_FORGOTTEN)
        effects = [effect for i in list(self._moving) for effect in self._go_on(self._held[i])]
        for held in list(self._held.values()):
            if len(self._retiring) + self._deleting >= MOST_DELETIONS:
                break
            if held.segment.state is _S.COPY_SEGMENT_FINISHED:
                effects += self._retire_one(held)
        return effects

    def _after_deletion(self) -> list[Effect]:
        if not self._loaded:
            return []
        if self.is_doomed:
            return self._delete_all()
        return self._retire() if self._decides else []

    def _write_partition(self, state: PartitionDeleteState) -> list[Effect]:
        if self._writing is not None:
            return []
        self._writing = state
        return [Write(self._partition_delete(state))]

    def _partition_delete(self, state: PartitionDeleteState) -> RemotePartitionDelete:
        return RemotePartitionDelete(
            topic=self._topic,
            topic_id=self._topic_id,
            partition=self._partition,
            state=state,
            event_timestamp_ms=self._now_ms,
            broker_id=self._broker_id,
        )

    # -- looking from outside ----------------------------------------------------------------------

    @property
    def is_deleted(self) -> bool:
        """Does the metadata say that all of the partition goes?"""
        return self._deleted is not None

    @property
    def is_ready(self) -> bool:
        """Is everything known that was committed before, so that what no segment holds is nowhere
        in the store?"""
        return self._decides

    def is_leaving(self, segment_id: uuid.UUID) -> bool:
        """Is it committed that the object of a segment goes, so that nobody adopts it any more?"""
        held = self._held.get(segment_id)
        return held is None or held.segment.state > _S.COPY_SEGMENT_FINISHED

    @property
    def is_empty(self) -> bool:
        """Is there no segment of which there is metadata?"""
        return not self._held

    def figures(self) -> Figures:
        """For the metrics of the partition.  Any thread."""
        local = self._local
        moving = [held for i in list(self._moving) if (held := self._held.get(i)) is not None]
        deleting = [h.segment.size for h in moving if h.segment.state is _S.DELETE_SEGMENT_STARTED]
        done = self.tiered_end if local is None else max(self.tiered_end, local.log_start_offset)
        behind = [s.size for s in (local.sealed if local else ()) if s.end_offset > done]
        return Figures(
            copy_lag_bytes=sum(behind),
            copy_lag_segments=len(behind),
            delete_lag_bytes=sum(deleting),
            delete_lag_segments=len(deleting),
            metadata_count=len(self._held),
            remote_bytes=sum(segment.size for segment in self.segments),
        )

    _HANDLERS = {
        Recorded: _recorded,
        Unrecorded: _unrecorded,
        Loaded: _loaded_all,
        Looked: _looked,
        PutEnded: _put_ended,
        Checked: _checked,
        DeleteEnded: _delete_ended,
        LogStartMoved: _log_start_moved,
        TopicDeleted: _topic_deleted,
    }
