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
used by others (`end`), or, when the file was left for the next, before it is sealed.  The slot, and
what acknowledgements are staged in, are cut from regions of the link, whose keys stay: nobody looks
at the slot after `end`, and it serves another replica only if the leader has said that it writes no
more.  A file that the leader was inside of when the grant ended stays mapped until `forget`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from kdirect.broker.closing import end_all
from kdirect.broker.order import AbortReason
from kdirect.broker.slices import Slices
from kdirect.errors import KdirectError
from kdirect.format import layout
from kdirect.log.growth import STEP_BYTES
from kdirect.log.head import PreparedHead
from kdirect.log.partition import Partition
from kdirect.log.segment import Segment
from kdirect.rdma.contract import Access, Memory

log = logging.getLogger("kdirect.broker.rdma")

# A leader that is inside a copy for longer is stopped or hangs: the log goes on in a fresh file.
DEREGISTER_MS = 20
# A leader is granted so much of the head at first, and this many times more each time that it wants
# more, but by no more than `STEP_BYTES` at once: a quiet partition takes little of the disk, and a
# busy one does not wait while the whole of a large segment is zeroed.
FIRST_BYTES, GROWTH = 1 << 16, 8
NEVER_MS = 1 << 40  # a leader leaves no holes: its order is its own

HEAD_ABORTED, HEAD_WAITING = 2, 5  # as in kdirect.broker.order


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
        self.length = 0  # up to which the leader may write
        self.outgrown: list[Any] = []  # regions of before it grew

    def deregister(self) -> bool:
        """Take the leader's keys away.  False: it is still inside a copy."""
        gone = [region.deregister(DEREGISTER_MS) for region in [*self.outgrown, self.region]]
        return all(gone)


class FollowedHead:
    """See the module.  `worker`, `domain`, `qp`: of the queue pair on which the leader writes;
    `leader_epoch`: of its leadership.

    `new_file_id()` gives ids that nobody else at this worker has, until `free_file_id(id)`.
    `spawn(partition, work)`: do work on a thread that may wait for the disk.

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
        free_file_id: Callable[[int], None] = lambda file_id: None,
        spawn: Callable[[Partition, Callable[[], None]], None] | None = None,
        slices: Slices | None = None,
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
        self._free_file_id = free_file_id
        self._spawn = spawn
        self._present: _File | None = None
        self._next: _File | None = None
        self._left: list[_File] = []  # whose last acknowledgements may be under way
        self._hung: list[_File] = []  # which the leader was inside of when this ended
        self._lock = threading.RLock()
        self.refused = False  # nothing more is taken; `end` follows
        self._keys_taken = False
        self.ended = False
        self.vacated = True  # False: the leader may still be inside a copy into the file
        self._granted_at = -1  # where the log ended
        self._slices = Slices(domain) if slices is None else slices
        self._slot = self._slices.take(
            layout.SLOT_BYTES, Access.LOCAL_WRITE | Access.REMOTE_WRITE, "kdirect-followed"
        )
        partition.before_give_back.append(self._may_give_back)
        # Set before `end`: the leader has said that nothing of it is on its way any more.
        self.leader_has_stopped = False

    def _may_give_back(self, partition: Partition) -> bool:
        return self.ended  # until then the leader may write all of the head

    # -- granting ----------------------------------------------------------------------------------

    def grant(self) -> FileGrant:
        """Let the leader write the head from its tail on.  StorageFullError."""
        with self._lock:
            partition = self.partition
            partition.lengthen_head()
            kernel = partition.kernel
            end = int(kernel.end_position)
            wanted = max(FIRST_BYTES, min(2 * end, end + STEP_BYTES))
            wanted = min(partition.head_config.segment_bytes, wanted)
            segment = partition.ensure_head(max(1, wanted - end)).acquire()
            view = kernel.view()
            memory = Memory.wrap(segment.fd, segment.address, segment.mapped_length, True, segment)
            at = view.end_position, int(kernel.capacity), segment.base_offset
            try:
                file = self._open(memory, *at)
            except BaseException:
                segment.release()
                raise
            file.segment = segment
            file.length = int(kernel.capacity)
            self._present = file
            self._granted_at = int(view.log_end_offset)
            return self._granted(file, file.length, view.end_position, view.log_end_offset)

    @property
    def has_arrived(self) -> bool:
        """Has something that the leader wrote become records?"""
        return 0 <= self._granted_at < self.partition.log_end_offset

    @property
    def may_grow(self) -> bool:
        """Is less granted of the present file than it may have?"""
        file = self._present
        return file is not None and file.segment is not None and file.length < self._most(file)

    def is_too_short(self, segment_bytes: int) -> bool:
        """Is all of the present file granted, and may the leader's segment have more?  The file was
        made before ``segment.bytes`` was raised there."""
        file = self._present
        return file is not None and not self.may_grow and file.length < segment_bytes

    def _most(self, file: _File) -> int:
        assert file.segment is not None
        return min(self.partition.head_config.segment_bytes, file.segment.reserved_length)

    def grow(self) -> FileGrant | None:
        """The present file again, longer; None: it is as long as it may be, or this has ended.
        StorageFullError."""
        with self._lock:
            file, partition = self._present, self.partition
            if file is None or file.segment is None or self.refused or not self.may_grow:
                return None
            kernel, segment = partition.kernel, file.segment
            wanted = max(FIRST_BYTES, min(GROWTH * file.length, file.length + STEP_BYTES))
            room = min(self._most(file), wanted) - int(kernel.end_position)
            if partition.ensure_head(room) is not segment:
                self._refuse(AbortReason.NO_ROOM)
                return None
            view, capacity = kernel.view(), int(kernel.capacity)
            memory = Memory.wrap(segment.fd, segment.address, segment.mapped_length, True, segment)
            # What is under way goes by the key that it had.
            file.outgrown.append(file.region)
            file.region = self._register(memory, view.end_position, capacity)
            file.length = capacity
            self._worker.grow_head(file.requests)
            return self._granted(file, capacity, view.end_position, view.log_end_offset)

    def grant_ahead(self) -> FileGrant | None:
        """The file for the segment after the present one; None: there is one already, or this has
        ended.  StorageFullError."""
        with self._lock:
            if self._next is not None or self._present is None or self.refused:
                return None
            prepared = self.partition.prepare_next()
            length = min(prepared.length, self.partition.head_config.segment_bytes)
            memory = Memory.wrap(prepared.fd, prepared.address, prepared.length, True, prepared)
            self._half ^= 1
            try:
                file = self._open(memory, 0, length, -1)
            except BaseException:
                self._half ^= 1
                prepared.discard()
                raise
            file.prepared = prepared
            file.length = length
            self._next = file
            return self._granted(file, length, 0, -1)

    def _open(self, memory: Memory, position: int, capacity: int, base: int) -> _File:
        with contextlib.ExitStack() as undo:
            file_id = self._new_file_id()
            undo.callback(self._free_file_id, file_id)
            region = self._register(memory, position, capacity)
            undo.callback(region.deregister)
            staging = self._slices.take(
                self._acks.entries * layout.ACK_BYTES, Access.LOCAL_WRITE, "kdirect-acks"
            )
            undo.callback(staging.give_back)
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
            undo.callback(self._worker.forget_head, requests)
            requests.owner = self
            file = _File(file_id, requests, region, staging)
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
            undo.pop_all()
        return file

    def _register(self, memory: Memory, position: int, capacity: int) -> Any:
        access = Access.LOCAL_WRITE | Access.REMOTE_WRITE
        return self._domain.register(memory, access, position, capacity - position)

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

    # -- watching ----------------------------------------------------------------------------------

    def watch(self) -> None:
        """Have the worker tell of the next move of this replica's high watermark."""
        file = self._present
        if file is not None:
            self._worker.watch_followed(file.requests)

    # -- news of the worker ------------------------------------------------------------------------

    def head_told(self, requests: Any) -> None:
        """The worker's `on_head`; the work is done on a thread."""
        if self._spawn is None:
            self.head_event(requests)
        else:
            self._spawn(self.partition, lambda: self.head_event(requests))

    def head_event(self, requests: Any) -> None:
        """The worker's `on_head` for one of this replica's heads."""
        with self._lock:
            if self.ended or self.refused:
                return
            try:
                if requests.state == HEAD_ABORTED:
                    self._refuse(requests.why)
                elif requests.state == HEAD_WAITING:
                    self._note_epochs(requests)
                if self._next is not None and self._next.requests.waiting and not self.refused:
                    self._roll()
            except (KdirectError, OSError) as e:
                log.error("%s cannot go on: %s", self.partition.topic_partition, e)
                self._refuse(AbortReason.NO_ROOM)
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
        if not old.deregister():
            self.vacated = False
        segment = self.partition.roll_into(new.prepared)
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
        steps: list[Callable[[], object]] = [
            partial(self._worker.remove, file.file_id),
            partial(self._worker.forget_head, file.requests),
            partial(self._free_file_id, file.file_id),
            file.staging.give_back,
        ]
        if file.segment is not None:
            steps.append(file.segment.release)
        if file.prepared is not None:
            steps.append(file.prepared.discard)
        end_all("a replica's head", *steps)

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
        the head moves to a fresh file (`Partition.copy_head`).  StorageFullError: there is no room
        for that; call this again before anything else is done with the log."""
        with self._lock:
            if self.ended:
                return self.vacated
            files = [f for f in (self._present, self._next) if f is not None]
            if not self._keys_taken:
                self._keys_taken = self.refused = True
                for file in files:
                    self._worker.close_head(file.requests, False)
                    self._worker.retire(file.file_id, True)
                for file in files:
                    if not file.deregister():
                        self.vacated = False
            if self.vacated:
                self.partition.kernel.clear_tail()
            else:
                self.partition.copy_head()
            self.ended = True
            self.partition.before_give_back.remove(self._may_give_back)
            done = list(self._left)
            (done if self.vacated else self._hung).extend(files)
            self._left.clear()
            self._present = self._next = None
            if self.leader_has_stopped and self.vacated:
                self._slot.give_back()
            end_all("a replica's head", *(partial(self._drop, file) for file in done))
            return self.vacated

    def forget(self) -> None:
        """The leader's queue pair is closed: what it was inside of while the grant ended may go,
        and so may everything of a grant that could not be ended, because the directory fails."""
        with self._lock:
            files, self._hung = self._hung, []
            if not self.ended:
                self.ended = self.refused = self._keys_taken = True
                self.vacated = False
                self.partition.before_give_back.remove(self._may_give_back)
                files += [*self._left, *(f for f in (self._present, self._next) if f is not None)]
                self._left.clear()
                self._present = self._next = None
            end_all("a replica's head", *(partial(self._drop, file) for file in files))
