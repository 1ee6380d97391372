"""A partition that this broker leads, as it is pushed to followers (KafkaDirect §4.3.2).

Owns: the marks of its replicas, the rings to its followers, and the registrations of its segments
as sources of their WRITEs.  What may not enter: who follows, who is in sync and whether the high
watermark stands still, which `kdirect.cluster.leading_replica` decides; messages; the WRITEs, which
the produce worker posts (`kdirect.broker.push`).

Life: with the leadership; `start` for each grant of a follower, `stop` when that ends, `close`.
Threads: any; `_rolled` runs on the thread that rolls, with the partition's roll lock held, and
waits for no other than this object's lock, under which nobody waits for a roll.

Memory: a source is a segment that is acquired, registered in the follower's protection domain for
local use.  It is given back when no WRITE from it is under way and the follower needs no more of
it, or with the queue pair.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

from kdirect.broker.followed_head import AckRing, FileGrant
from kdirect.broker.push import Pushing, PushRing, PushState
from kdirect.broker.slices import Slices
from kdirect.errors import KdirectError, LogError
from kdirect.format import layout
from kdirect.log.partition import Partition
from kdirect.log.replica_marks import ReplicaMarks
from kdirect.log.segment import Segment
from kdirect.rdma.contract import Access, Memory

log = logging.getLogger("kdirect.broker.rdma")

LEAST_ENTRIES = 16


class RingMemory:
    """What a ring needs of the leader's memory before the follower can grant anything: its
    acknowledgement ring, and the image of the slot.  Both are cut from larger regions of its
    link."""

    def __init__(self, domain: Any, window: int, slices: Slices | None = None) -> None:
        slices = Slices(domain) if slices is None else slices
        self.window = 1
        while self.window < window:
            self.window *= 2
        self.domain = domain
        # Twice the window, and room for acknowledgements whose completions come late.
        entries = max(LEAST_ENTRIES, 2 * self.window)
        # The follower WRITEs it; see kdirect.broker.push for when an entry may be read.
        self.acks = slices.take(
            2 * entries * layout.ACK_BYTES,
            Access.LOCAL_WRITE | Access.REMOTE_WRITE,
            "kdirect-push-acks",
        )
        self.image = slices.take(layout.SLOT_BYTES, Access.LOCAL_WRITE, "kdirect-push-slots")
        self.ring = AckRing(self.acks.address, self.acks.rkey, entries)

    def give_back(self) -> None:
        """The ring has ended, and the follower acknowledges nothing more by it."""
        self.acks.give_back()
        self.image.give_back()


class _Left(NamedTuple):
    """What a ring that has ended has named as sources.  `posted`: WRITEs over its link until then,
    of which the last ones may be its own."""

    link: Any
    posted: int
    domain: Any
    regions: list[Any]
    segments: list[Segment]


class PushedPartition:
    """See the module."""

    def __init__(self, partition: Partition, worker: Any, *, most_bytes: int) -> None:
        self.partition = partition
        self.marks = ReplicaMarks(partition.kernel)
        self.pushing = Pushing(self.marks)
        self.pushing.owner = self
        self._worker = worker
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._rings: dict[PushRing, tuple[Any, list[Segment]]] = {}
        self._ahead: dict[PushRing, FileGrant] = {}  # granted, and not taken yet
        self._others: list[Any] = []  # workers whose producers write it, too
        self._left: list[_Left] = []  # of rings that have ended
        partition.on_roll.append(self._rolled)
        partition.before_give_back.append(self._may_give_back)
        partition.on_flush.append(self._flushed)
        worker.lead(self.pushing)

    def also_written_by(self, worker: Any) -> None:
        """Producers of another transport's worker may write the partition."""
        if worker is not self._worker:
            self._others.append(worker)
            worker.push_elsewhere(self.pushing)

    def set_counted(self, brokers: Iterable[int], *, stands_still: bool = False) -> None:
        """The high watermark waits for these brokers, or stands still."""
        self._worker.count_replicas(self.pushing, list(brokers), stands_still=stands_still)

    def _flushed(self) -> None:
        """The thread that flushes holds the partition's flush lock."""
        self._worker.flushed(self.pushing)

    def start(self, link: Any, memory: RingMemory, grant: FileGrant) -> PushRing:
        """Push to a follower from where its log ends, which `grant` says.  LogError when it lacks
        more than the ring can take, or its log does not end in one of the local segments."""
        self.sweep()
        self.partition.ensure_head(1)
        ring = PushRing(
            link,
            self.marks,
            memory.window,
            memory.acks,
            memory.ring.entries,
            memory.image,
            file_id=grant.file_id,
            address=grant.address,
            rkey=grant.rkey,
            length=grant.length,
            segment_base_offset=grant.segment_base_offset,
            position=grant.position,
            offset=grant.offset,
            most_bytes=self._most_bytes,
            slot_address=grant.slot_address,
            slot_rkey=grant.slot_rkey,
        )
        with self._lock:
            segments = self.partition.segments
            if not any(s.base_offset == grant.segment_base_offset for s in segments):
                # It was deleted after the follower has asked where to begin.
                raise LogError(
                    f"broker {link.broker} goes on in the segment of"
                    f" {self.partition.topic_partition} that begins at offset"
                    f" {grant.segment_base_offset}, which is not here",
                    hint="let it ask again where to begin",
                )
            held: list[Segment] = []
            before: Segment | None = None
            for segment in segments:
                if segment.base_offset >= grant.segment_base_offset:
                    self._add(ring, memory.domain, held, segment, before)
                    before = segment
            self._rings[ring] = (memory.domain, held)
            # Its log ends there: it has everything below, which the grant says.
            self.marks.confirm(link.broker, grant.offset, grant.position, grant.segment_base_offset)
            self._worker.start_push(self.pushing, ring)
        return ring

    def _add(
        self,
        ring: PushRing,
        domain: Any,
        held: list[Segment],
        segment: Segment,
        before: Segment | None,
    ) -> None:
        segment.acquire()
        held.append(segment)
        self._worker.add_source(
            self.pushing,
            ring,
            segment.base_offset,
            _register(domain, segment),
            size_before=before.size if before is not None else -1,
            end_before=before.end_offset if before is not None else -1,
        )

    def _may_give_back(self, partition: Partition) -> bool:
        return not self._rings  # a transport may have the head pinned

    def _rolled(self, partition: Partition, old: Segment, new: Segment) -> None:
        with self._lock:
            for ring, (domain, held) in self._rings.items():
                # A ring to which a segment was not named is given no later one.
                if new not in held and ring.state == PushState.PUSHING:
                    try:
                        self._add(ring, domain, held, new, old)
                    except (KdirectError, OSError) as e:  # the others go on
                        log.info("%s: %s", partition.topic_partition, e)
                        self._worker.lack_source(self.pushing, ring)
                self._drop_done(ring, held)

    def _drop_done(self, ring: PushRing, held: list[Segment]) -> None:
        done, outgrown = self._worker.drop_sources(ring)
        for region in outgrown:
            region.deregister()
        for region in done:
            region.deregister()
            held.pop(0).release()

    def grant_ahead(self, ring: PushRing, grant: FileGrant) -> bool:
        """The follower's file for the segment after its present one.  False: it is taken when the
        follower has confirmed the one before, by `ring_event`."""
        taken = bool(
            self._worker.grant_ahead(
                self.pushing, ring, grant.file_id, grant.address, grant.rkey, grant.length
            )
        )
        with self._lock:
            if taken:
                self._ahead.pop(ring, None)
            else:
                self._ahead[ring] = grant
        return taken

    def ring_event(self, ring: PushRing) -> None:
        """The worker's `on_push` for one of the rings."""
        with self._lock:
            grant = self._ahead.get(ring)
            domain, held = self._rings.get(ring, (None, []))
            if ring.wants_source:
                for segment in held:
                    if segment.base_offset == ring.pushed[0]:
                        self._worker.renew_source(
                            self.pushing, ring, segment.base_offset, _register(domain, segment)
                        )
        if grant is not None:
            self.grant_ahead(ring, grant)

    def push(self) -> None:
        """Records were committed by another thread than the worker's."""
        self._worker.push(self.pushing)

    def stop(self, ring: PushRing) -> None:
        """Push nothing more under this grant.  Its sources stay until `sweep` finds that nothing is
        sent from them any more, until `close`, or until the queue pair is closed."""
        with self._lock:
            self._worker.end_push(self.pushing, ring)
            domain, held = self._rings.pop(ring, (None, []))
            if held:
                posted = self._worker.sends(ring.link)[0]
                self._left.append(_Left(ring.link, posted, domain, ring.regions, held))
            self._ahead.pop(ring, None)

    def sweep(self) -> None:
        """Give back the sources of rings that have ended, once all that was sent from them has
        arrived: a follower that comes and goes over one link holds no segment that was deleted.
        On a thread."""
        with self._lock:
            left, self._left = self._left, []
            for x in left:
                if self._worker.sends(x.link)[1] < x.posted:
                    self._left.append(x)
                    continue
                for region in x.regions:
                    region.deregister()
                for segment in x.segments:
                    segment.release()

    def link_closed(self, domain: Any) -> None:
        """Nothing is under way in this protection domain any more, which is closed."""
        with self._lock:
            done = [x for x in self._left if x.domain is domain]
            self._left = [x for x in self._left if x.domain is not domain]
        for x in done:
            for segment in x.segments:
                segment.release()

    def resign(self) -> None:
        """Push and count nothing any more.  The second call does nothing."""
        for worker in self._others:
            worker.push_no_more_elsewhere(self.pushing)
        self._others.clear()
        self._worker.resign(self.pushing)

    def close(self) -> None:
        """The leadership is over.  Once the queue pairs have nothing under way."""
        self.partition.on_roll.remove(self._rolled)
        self.partition.before_give_back.remove(self._may_give_back)
        self.partition.on_flush.remove(self._flushed)
        self.resign()
        with self._lock:
            for _, held in self._rings.values():
                for segment in held:
                    segment.release()
            for x in self._left:
                for segment in x.segments:
                    segment.release()
            self._rings.clear()
            self._left.clear()
        self.marks.close()


def _register(domain: Any, segment: Segment) -> Any:
    """What exists of a segment that is acquired, as a source; a head grows, and is registered
    again then."""
    memory = Memory.wrap(segment.fd, segment.address, segment.mapped_length, True, segment)
    return domain.register(memory, Access.LOCAL_WRITE)
