"""A replica's head, as its leader writes it (KafkaDirect §4.3.2).

Owns: what one replica grants to its leader in one leadership: the head file, the file after it
ahead of its turn, and the slot that the leader WRITEs its high watermark into.  The head is like
one of an exclusive producer, but what arrives is committed as it is stamped
(`kdirect.broker.push_tables`).  What may not enter: who leads, when a log is compared and cut
(`kdirect.cluster.following_replica`), messages.

Life: constructed once the log is known to be a prefix of the leader's; `grant`; `grant_ahead` each
time that `on_rolled` is called, and before; `end`, once and for good, before anybody is granted the
head again, also after `on_ended`, and before the log is cut.

Threads: `head_event` is the worker's callback for heads and may be called on the worker's thread; a
roll, and the note of a new leader epoch, wait for the disk, so the caller hands it to a thread that
may.  One thread at a time; `end` may come from any thread, and waits for it.

Memory: each granted file has a key in the leader's protection domain.  It ends before the file is
used by others (`end`), or, when the file was left for the next, before it is sealed.  The slot
belongs to the leader's WRITEs until `end`.  Acknowledgements are staged in memory that stays
registered until the worker has no WRITE of it under way.  A file that the leader was inside of
when the grant ended stays mapped until `forget`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from kdirect.broker.order import AbortReason
from kdirect.errors import LogError
from kdirect.format import layout
from kdirect.log.head import PreparedHead
from kdirect.log.partition import Partition
from kdirect.log.segment import Segment
from kdirect.rdma.contract import Access, Memory

log = logging.getLogger("kdirect.broker.rdma")

# A leader that is inside a copy for longer is stopped or hangs: the log goes on in a fresh file.
DEREGISTER_MS = 20
NEVER_MS = 1 << 40  # a leader leaves no holes: its order is its own

HEAD_ABORTED, HEAD_AHEAD, HEAD_WAITING = 2, 4, 5  # as in kdirect.broker.order


class AckRing(NamedTuple):
    """Where the leader wants its acknowledgements: two halves of `entries` entries."""

    address: int
    rkey: int
    entries: int


class FileGrant(NamedTuple):
    """A file that the leader may write.  `address` is that of position 0.  `segment_base_offset`,
    `position`, `offset`: where the replica's log ends; -1: the file is granted ahead."""

    file_id: int
    address: int
    rkey: int
    length: int
    segment_base_offset: int
    position: int
    offset: int
    slot_address: int
    slot_rkey: int


class _File:
    """One granted file."""

    def __init__(self, file_id: int, requests: Any, region: Any, staging: Any) -> None:
        self.file_id = file_id
        self.requests = requests
        self.region = region
        self.staging = staging
        self.segment: Segment | None = None
        self.prepared: PreparedHead | None = None


class FollowedHead:
    """See the module.  `worker`, `domain`, `qp`: of the queue pair on which the leader writes;
    `leader_epoch`: of its leadership.

    `on_rolled(head)`: the replica goes on in the file that was granted ahead; the leader wants the
    next.  `on_ended(head, reason)`: nothing more is taken from the leader under this grant."""

    def __init__(
        self,
        partition: Partition,
        worker: Any,
        domain: Any,
        qp: Any,
        acks: AckRing,
        *,
        window: int,
        leader_epoch: int,
        new_file_id: Callable[[], int],
        on_rolled: Callable[[FollowedHead], None],
        on_ended: Callable[[FollowedHead, AbortReason], None],
    ) -> None:
        self.partition = partition
        self.leader_epoch = leader_epoch
        self.on_rolled = on_rolled
        self.on_ended = on_ended
        self._worker = worker
        self._domain = domain
        self._qp = qp
        self._acks = acks
        self._half = 0
        self._window = window
        self._new_file_id = new_file_id
        self._present: _File | None = None
        self._next: _File | None = None
        self._left: list[_File] = []  # whose last acknowledgements may be under way
        self._hung: list[_File] = []  # which the leader was inside of when this ended
        self._lock = threading.RLock()
        self.refused = False  # nothing more is taken; `end` follows
        self.ended = False
        self.vacated = True  # False: the leader may still be inside a copy into the file
        partition.before_give_back.append(self._may_give_back)
        self._slot = domain.register(
            Memory.anonymous(layout.SLOT_BYTES, "kdirect-followed"),
            Access.LOCAL_WRITE | Access.REMOTE_WRITE,
        )

    def _may_give_back(self, partition: Partition) -> bool:
        return self.ended  # until then the leader may write all of the head

    # -- granting ----------------------------------------------------------------------------------

    def grant(self) -> FileGrant:
        """Let the leader write the head from its tail on.  StorageFullError."""
        with self._lock:
            partition = self.partition
            kernel = partition.kernel
            room = partition.config.segment_bytes - kernel.end_position
            segment = partition.ensure_head(max(1, room)).acquire()
            view = kernel.view()
            memory = Memory.wrap(segment.fd, segment.address, segment.mapped_length, True, segment)
            file = self._open(memory, view.end_position, int(kernel.capacity), segment.base_offset)
            file.segment = segment
            self._present = file
            return self._granted(file, int(kernel.capacity), view.end_position, view.log_end_offset)

    def grant_ahead(self) -> FileGrant | None:
        """The file for the segment after the present one; None: there is one already, or this has
        ended.  StorageFullError."""
        with self._lock:
            if self._next is not None or self._present is None or self.refused:
                return None
            prepared = self.partition.prepare_next()
            length = min(prepared.length, self.partition.config.segment_bytes)
            memory = Memory.wrap(prepared.fd, prepared.address, prepared.length, True, prepared)
            self._half ^= 1
            file = self._open(memory, 0, length, -1)
            file.prepared = prepared
            self._next = file
            return self._granted(file, length, 0, -1)

    def _open(self, memory: Memory, position: int, capacity: int, base: int) -> _File:
        region = self._domain.register(
            memory, Access.LOCAL_WRITE | Access.REMOTE_WRITE, position, capacity - position
        )
        staging = self._domain.register(
            Memory.anonymous(self._acks.entries * layout.ACK_BYTES, "kdirect-acks"),
            Access.LOCAL_WRITE,
        )
        requests = self._worker.open_head(
            self.partition.kernel,
            base,
            position,
            self.leader_epoch,
            shared=False,
            entries=self._window,
            hole_timeout_ms=NEVER_MS,
            ahead_bytes=capacity if base < 0 else 0,
            stamped=True,
            told=self._slot,
        )
        requests.owner = self
        file = _File(self._new_file_id(), requests, region, staging)
        self._worker.install(
            file.file_id,
            requests,
            self._qp,
            self._acks.address + self._half * self._acks.entries * layout.ACK_BYTES,
            self._acks.rkey,
            self._acks.entries,
            staging,
            False,
        )
        return file

    def _granted(self, file: _File, length: int, position: int, offset: int) -> FileGrant:
        return FileGrant(
            file.file_id,
            file.region.address - position,
            file.region.rkey,
            length,
            file.segment.base_offset if file.segment is not None else -1,
            position,
            offset,
            self._slot.address,
            self._slot.rkey,
        )

    # -- news of the worker ------------------------------------------------------------------------

    def head_event(self, requests: Any) -> None:
        """The worker's `on_head` for one of this replica's heads."""
        with self._lock:
            if self.ended or self.refused:
                return
            if requests.state == HEAD_ABORTED:
                self._refuse(requests.why)
            elif requests.state == HEAD_WAITING:
                self._note_epochs(requests)
            if self._next is not None and self._next.requests.waiting and not self.refused:
                self._roll()
            self._sweep()

    def _note_epochs(self, requests: Any) -> None:
        """A batch begins a leader epoch: it is on disk before the batch is committed."""
        while (at := self._worker.waiting_request(requests)) is not None:
            position, length = at
            file = self._present
            assert file is not None and file.segment is not None
            view = memoryview(
                Memory.wrap(
                    file.segment.fd, file.segment.address, file.segment.mapped_length, False, file
                )
            )
            last = self.partition.learn_epochs(
                bytes(view[position : position + length]), at_most=self.leader_epoch
            )
            if last > self.leader_epoch:
                log.warning(
                    "%s: its leader writes records of epoch %d under a grant of epoch %d",
                    self.partition.topic_partition,
                    last,
                    self.leader_epoch,
                )
                self._refuse(AbortReason.FENCED)
                return
            self._worker.go_on(requests)

    def _roll(self) -> None:
        """The leader has begun the next segment, so everything of the present one has arrived."""
        old, new = self._present, self._next
        assert old is not None and new is not None and new.prepared is not None
        if old.requests.waiting:  # it waits for an epoch; the roll comes after that
            return
        self._worker.close_head(old.requests, False)
        if not old.region.deregister(DEREGISTER_MS):
            self.vacated = False
        prepared = new.prepared
        try:
            segment = self.partition.roll_into(prepared)
        except LogError as e:
            log.error("%s cannot roll: %s", self.partition.topic_partition, e)
            self._refuse(AbortReason.NO_ROOM)
            return
        new.segment, new.prepared = segment, None
        self._left.append(old)
        self._present, self._next = new, None
        self._worker.begin_head(new.requests, segment.base_offset, self.leader_epoch)
        self.on_rolled(self)

    def _sweep(self) -> None:
        """Give back files that were left, once their acknowledgements are written."""
        for file in list(self._left):
            if self._worker.is_answered(file.file_id):
                self._left.remove(file)
                self._drop(file)

    def _drop(self, file: _File) -> None:
        self._worker.remove(file.file_id)
        self._worker.forget_head(file.requests)
        file.staging.deregister()
        if file.segment is not None:
            file.segment.release()
        if file.prepared is not None:
            file.prepared.discard()

    # -- the end -----------------------------------------------------------------------------------

    def _refuse(self, why: AbortReason) -> None:
        """Nothing more of the leader is committed, and it is told so through its ring.  Its keys
        stay until `end`: what it has under way would break the queue pair without them, which
        other partitions share, and lands after the tail, where nobody looks."""
        self.refused = True
        for file in (self._present, self._next):
            if file is not None:
                self._worker.close_head(file.requests, False)
                self._worker.retire(file.file_id, True)
        self.on_ended(self, why)

    def end(self) -> bool:
        """Take the leader's keys away; nothing that it writes from here on reaches the log, and
        what it wrote after the last commit is zeros again.  False: it is still inside a copy, so
        the head moves to a fresh file (`Partition.fence_head`)."""
        with self._lock:
            if self.ended:
                return self.vacated
            self.ended = True
            self.partition.before_give_back.remove(self._may_give_back)
            files = [f for f in (self._present, self._next) if f is not None]
            for file in files:
                self._worker.close_head(file.requests, False)
                self._worker.retire(file.file_id, True)
            for file in files:
                if not file.region.deregister(DEREGISTER_MS):
                    self.vacated = False
            self._slot.deregister()
            if self.vacated:
                self.partition.kernel.clear_tail()
            else:
                self.partition.fence_head()
            for file in [*self._left, *files]:
                if not self.vacated and file in files:
                    self._hung.append(file)
                else:
                    self._drop(file)
            self._left.clear()
            self._present = self._next = None
            return self.vacated

    def forget(self) -> None:
        """The leader's queue pair is closed: what it was inside of while the grant ended may go."""
        with self._lock:
            for file in self._hung:
                self._drop(file)
            self._hung.clear()
