"""How a partition comes to its next head: growing, rolling, replacing, giving back.

Law of the room: `Rolling` is the part of `kdirect.log.partition.Partition` that exchanges heads,
with the same locks.  Files are made ready before and cleared away after; between them, under
``_lock``, lists are exchanged and the kernel is told, and nothing else.  While a head is sealed its
kernel is frozen, so that what the next one begins with is known.

Callbacks: ``before_roll(partition)`` runs before a head is sealed that has records or is too small,
``on_roll(partition, sealed, new)`` after the next active segment is in place (also when a dormant
segment becomes the head: then both stand for the same file, and the old object keeps its shorter
mapping).  They run in the thread that rolls, which holds ``_roll_lock``: they must not wait for a
thread that may append or roll.  ``before_give_back(partition)`` says whether the unused part of the
head may be freed: False while somebody may write it, or has it pinned; in a thread of housekeeping,
which holds ``_roll_lock`` as well.  It is asked of every quiet head, however little of it is
unused: who was granted a head may keep more than that head.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kdirect.errors import ClosedError, LogError, StorageFullError
from kdirect.failpoints import reached
from kdirect.log import producer_state
from kdirect.log.aborted_index import AbortedFiles
from kdirect.log.ack_gate import AckGate
from kdirect.log.clock import now_ms
from kdirect.log.config import PAGE_BYTES, LogConfig
from kdirect.log.flushing import Flushing
from kdirect.log.growth import (
    GRANT_BYTES,
    LEAST_GIVEN_BACK,
    STEP_BYTES,
    HeadUse,
    head_bytes,
    next_capacity,
)
from kdirect.log.head import PreparedHead, SpareHead, cannot_allocate, reopen_as_head
from kdirect.log.kernel import NO_HEAD
from kdirect.log.kernel_head import freeze_head, roll_without_head, thaw_head
from kdirect.log.kernel_producers import known_producers
from kdirect.log.kernel_transactions import forget_aborted
from kdirect.log.mapped import first_timestamp
from kdirect.log.producers import ProducerEntry
from kdirect.log.removals import Removals, unlink
from kdirect.log.retention import count_below
from kdirect.log.segment import Segment
from kdirect.log.tiering import Tiering
from kdirect.log.trouble import is_full

log = logging.getLogger("kdirect.log")

RollCallback = Callable[[Any, Segment, Segment], None]
T = TypeVar("T")


class Rolling(Tiering):
    """See the module.  What it works on is made by `Partition`."""

    head_config: LogConfig  # by which heads are made: a copy's are as large as its leader's
    before_roll: list[Callable[[Any], None]]
    on_roll: list[RollCallback]
    before_give_back: list[Callable[[Any], bool]]
    gate: AckGate
    removals: Removals | None = None  # of deleted segments; without them nothing waits
    _aborted: AbortedFiles
    write_checkpoints: Callable[[], None]
    _jitter_ms: int
    _configure_kernel: Callable[[], None]
    _cut_at: Callable[[int, int], int]  # of `kdirect.log.cutting`: moves a head to another file
    _flush_lock: threading.Lock
    _spare: SpareHead
    _use: HeadUse
    _closed: bool
    _is_copy: bool
    _cut_failure: LogError | None  # files and memory say different things since then
    _disk: Flushing
    _rolls: int
    _growths: int
    _given_back: int

    def _make_room(self, base: int, error: int, length: int, now_ms: int) -> None:
        with self._roll_lock:
            self._check_open()
            if error == NO_HEAD:
                if not self._segments[-1].is_head:
                    self._open_head(length, now_ms)
            elif self.kernel.segment_base_offset == base:
                head = self._segments[-1]
                room = self.kernel.capacity - self.kernel.end_position
                if self.kernel.over or (room < length and not self._grow(head, length)):
                    if not self._lengthened(head):
                        self._roll(now_ms, length)

    def make_room(self) -> Segment:
        """The head is full: grow it, or, where it has what ``segment.bytes`` allows, roll; the
        head.  StorageFullError."""
        with self._roll_lock:
            self._check_open()
            head = self._segments[-1]
            if not head.is_head:
                return self._open_head(GRANT_BYTES, now_ms())
            room = self.kernel.capacity - self.kernel.end_position
            if not self.kernel.over and self._grow(head, room + 1):
                return head
            return self._roll(now_ms(), GRANT_BYTES)

    def ensure_head(self, min_bytes: int) -> Segment:
        """The head, with room for `min_bytes`, and for `GRANT_BYTES` if it may have that; grows or
        rolls when needed.  StorageFullError."""
        if min_bytes > self.head_config.segment_bytes:
            raise LogError(
                f"{min_bytes} bytes do not fit into a segment of {self.topic_partition}"
                f" ({self.head_config.segment_bytes} bytes)",
                hint="raise segment.bytes of the topic or send smaller batches",
            )
        with self._roll_lock:
            self._check_open()
            self._use.wanted(time.monotonic())
            head = self._segments[-1]
            wanted = max(min_bytes, GRANT_BYTES)
            if not head.is_head:
                return self._open_head(min_bytes, now_ms(), wanted)
            room = self.kernel.capacity - self.kernel.end_position
            wanted = max(min_bytes, min(wanted, self._limit(head) - self.kernel.end_position))
            if self.kernel.over:
                return self._roll(now_ms(), wanted)
            try:
                if room >= wanted or self._grow(head, wanted):
                    return head
            except StorageFullError:
                if room < min_bytes:
                    raise
            if room >= min_bytes:
                return head
            if self._lengthened(head):
                return self.ensure_head(min_bytes)
            return self._roll(now_ms(), wanted)

    def head_nowait(self, min_bytes: int) -> Segment | None:
        """The head, if it has the room that `ensure_head` would make; else None, and `ensure_head`
        makes it, on a thread that may wait.  ClosedError."""
        self._check_open()
        head = self._segments[-1]
        if not head.is_head or self.kernel.over:
            return None
        self._use.wanted(time.monotonic())
        wanted = max(min_bytes, min(GRANT_BYTES, self._limit(head) - self.kernel.end_position))
        return head if self.kernel.capacity - self.kernel.end_position >= wanted else None

    def _limit(self, head: Segment) -> int:
        """How many bytes the head may grow to: those that it has addresses for, and that
        ``segment.bytes`` allows by now."""
        return min(head.reserved_length, self.head_config.segment_bytes)

    def lengthen_head(self) -> None:
        """Let the head of a copy, if there is one, have addresses for all that its leader's segment
        may become: a leader that writes it cannot move its records.  StorageFullError."""
        with self._roll_lock:
            self._check_open()
            head = self._segments[-1]
            if head.is_head and head.size == 0:
                self._roll(now_ms())  # which puts another one in its place
            elif head.is_head:
                self._lengthened(head)

    def _lengthened(self, head: Segment) -> bool:
        """The head of a copy is full because it has addresses for less than the leader's segment
        may have: move its records to a file that has them, in the same segment.  False: it is full
        because its leader's is."""
        if not self._is_copy or self.kernel.over or head.size == 0:
            return False
        if head.reserved_length >= self.head_config.segment_bytes:
            return False
        self._cut_at(len(self._segments) - 1, int(self.kernel.log_end_offset))
        return True

    def _grow(self, head: Segment, length: int) -> bool:
        """Allocate more of the head, so that `length` bytes have room; False when the head may not
        become so large.  StorageFullError leaves it as it was."""
        end, capacity, limit = self.kernel.end_position, self.kernel.capacity, self._limit(head)
        if end + length > limit or capacity >= limit:
            return False
        now = time.monotonic()
        quick = self._use.quickly(now)
        wanted = head_bytes(
            self.head_config, next_capacity(capacity, end + length, limit, quick=quick)
        )
        least = head_bytes(self.head_config, min(limit, end + length))
        try:
            self._allocated(lambda: head.grow(wanted))
        except OSError:
            # Not so much, then, and only what is needed now.
            try:
                head.grow(least)
            except OSError as e:
                raise cannot_allocate(self.directory, sum(least) - capacity, e) from e
        self._use.grew(now)
        self._growths += 1
        return True

    def _give_back(self) -> None:
        """Free what a head does not use that nobody has appended to for a while; the roll lock is
        held."""
        head = self._segments[-1]
        kernel = self.kernel
        if not head.is_head or not self._use.is_quiet(time.monotonic(), kernel.log_end_offset):
            return
        acquisitions = head.acquisitions
        if not all(may(self) for may in self.before_give_back):
            return
        if kernel.capacity - kernel.end_position >= LEAST_GIVEN_BACK + PAGE_BYTES:
            self._given_back += head.give_back(acquisitions)

    def roll(self) -> Segment:
        """Seal the head and put a new one in its place, unless it is empty; the head."""
        with self._roll_lock:
            self._check_open()
            active = self._segments[-1]
            if not active.is_head:
                return self._open_head(0, now_ms(), fresh=active.size > 0)
            return self._roll(now_ms())

    def take_head_back(self) -> Segment:
        """As `roll`, but an empty head is moved to a fresh file as well: whoever was granted it may
        write no more records into the log, and is told before.  The old file keeps its length, as
        in `fence_head`.  StorageFullError."""
        with self._roll_lock:
            self._check_open()
            old = self._segments[-1]
            if not old.is_head or old.size:
                return self.roll()
            for callback in self.before_roll:
                callback(self)
            old.keep_length = True
            return self._replace_empty(old, now_ms())

    def prepare_next(self) -> PreparedHead:
        """The files of a head to come, whole, for a producer that is granted them while it fills
        the present head.  The caller hands them to `roll_into`, or discards them.
        StorageFullError."""
        with self._roll_lock:
            self._check_open()
            spare = self._spare.take(self.head_config)
            if spare is not None:
                return spare
            prepared = self._allocated(lambda: PreparedHead(self.directory, self.head_config))
            prepared.populate(threading.Event())
            return prepared

    def roll_into(self, prepared: PreparedHead) -> Segment:
        """Seal the head and go on in `prepared`, into which a producer may have written already;
        the new head, acquired for the caller.  It stays as long as its producer was told, whatever
        ``segment.bytes`` is by now.  After an error the head is what it was, and
        `prepared` is to be discarded by the caller, once nobody can write into it."""
        with self._roll_lock:
            self._check_open()
            if prepared.directory != self.directory:
                raise LogError(
                    f"{self.topic_partition} has moved to another log directory, and a file that"
                    " was made ahead for it has not",
                    hint="nothing to do: whoever was granted the file asks for another one",
                )
            active = self._segments[-1]
            if not active.is_head:
                new = self._put_after(prepared, now_ms())
            elif active.size:
                new = self._roll(now_ms(), given=prepared)
            else:
                new = self._replace_empty(active, now_ms(), given=prepared)
            return new.acquire()

    def fence_head(self) -> Segment:
        """Move the head to a fresh file, although it may be empty: somebody may still write into
        the old file.  That one keeps its length for as long as it is mapped anywhere, and its pages
        must not be used again."""
        with self._roll_lock:
            self._check_open()
            old = self._segments[-1]
            if not old.is_head:
                return old
            old.keep_length = True
            return self._roll(now_ms()) if old.size else self._replace_empty(old, now_ms())

    def copy_head(self) -> Segment:
        """Move the head to a fresh file that has the same records, in a segment that begins at the
        same offset: somebody may still write into the old file, as in `fence_head`.  So does a
        replica whose leader hangs, for leaders alone decide where segments begin.  StorageFullError
        leaves the head as it was."""
        with self._roll_lock:
            self._check_open()
            old = self._segments[-1]
            if not old.is_head:
                return old
            old.keep_length = True
            if old.size == 0:
                return self._replace_empty(old, now_ms())
            self._cut_at(len(self._segments) - 1, int(self.kernel.log_end_offset))
            return self._segments[-1]

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(
                f"partition {self.topic_partition} is closed",
                hint="the broker is stopping or the topic was deleted",
            )
        if self._cut_failure is not None:
            raise self._cut_failure

    def _prepare(self, room: int, *, busy: bool = False) -> PreparedHead:
        """Files for the next head: a spare, or new ones with `room` bytes, or, where the partition
        is `busy`, with the largest step."""
        spare = self._spare.take(self.head_config)
        if spare is not None:
            return spare

        def with_room(capacity: int) -> PreparedHead:
            return self._allocated(
                lambda: PreparedHead(self.directory, self.head_config, capacity=capacity)
            )

        if busy:
            try:
                return with_room(max(room, STEP_BYTES))
            except StorageFullError:
                pass  # it begins small, as any other
        return with_room(max(1, room))

    def _allocated(self, allocate: Callable[[], T]) -> T:
        """What `allocate` returns, which leaves nothing behind when the disk is full: then it is
        called once more, where files of deleted segments had the room."""
        try:
            return allocate()
        except (StorageFullError, OSError) as e:
            removals = self.removals
            if removals is None or not is_full(e):
                raise
            if not removals.make_room(self.directory.parent):
                raise
        return allocate()

    def _open_head(
        self, min_bytes: int, now_ms: int, wanted: int = 0, *, fresh: bool = False
    ) -> Segment:
        """Make the dormant active segment the head, or, when it has no room (or `fresh`), put a new
        segment after it.  `min_bytes` of room exist then, `wanted` where that is allowed."""
        self._check_open()
        old = self._segments[-1]
        config = self.head_config
        kernel = self.kernel
        room = max(min_bytes, wanted)
        if not fresh and not old.sealed and old.size + min_bytes <= config.segment_bytes:
            new = self._allocated(lambda: reopen_as_head(old, config, room))
            with self._lock:
                new.become_head(
                    kernel,
                    config.segment_bytes,
                    now_ms,
                    first_timestamp=first_timestamp(new.address, new.size),
                )
                self._set_segments((*self._segments[:-1], new))
            old.supersede()
            self._leave((old,))
        else:
            return self._put_after(self._prepare(room), now_ms)
        self._disk.directory_changed = True
        self._use.opened(time.monotonic())
        self._tell(old, new)
        return new

    def _put_after(self, prepared: PreparedHead, now_ms: int) -> Segment:
        """Make `prepared` the head, after an active segment that is dormant and takes no more
        records; in its place if that one is empty, because then both have the same name."""
        old = self._segments[-1]
        replaces = old.size == 0
        new = prepared.publish(int(self.kernel.log_end_offset))
        if replaces:
            old.supersede()
        with self._lock:
            roll_without_head(self.kernel)
            new.become_head(self.kernel, prepared.config.segment_bytes, now_ms)
            if replaces:
                self._set_segments(self._segments[:-1])
            self._add_segment(new)
        self._snapshot_producers(*known_producers(self.kernel))
        if not replaces:
            old.mark_sealed()
        self._use.opened(time.monotonic())
        self._tell(old, new)
        return new

    def _roll(self, now_ms: int, room: int = 1, given: PreparedHead | None = None) -> Segment:
        """Seal the head, publish the next, with `room` bytes, or the one that is `given`.  An empty
        head stays, unless it was opened for a smaller ``segment.bytes`` than there is now.  Nothing
        has changed when it raises."""
        self._check_open()
        old = self._segments[-1]
        least = self.head_config.segment_bytes
        if not old.is_head or (old.size == 0 and old.reserved_length >= least):
            return old
        for callback in self.before_roll:
            callback(self)
        if old.size == 0:
            return self._replace_empty(old, now_ms, room)
        now = time.monotonic()
        busy = self._use.was_busy(now, old.size, self._limit(old))
        prepared = given if given is not None else self._prepare(room, busy=busy)
        # No commits from here on, so that what the next segment begins with is known.
        thaw = freeze_head(self.kernel)
        new = None
        try:
            producers, end_offset = known_producers(self.kernel)
            new = prepared.publish(end_offset)
            with self._lock:
                old.take_from_kernel()
                new.become_head(self.kernel, prepared.config.segment_bytes, now_ms)
                self._add_segment(new)
        except BaseException:
            thaw_head(self.kernel, thaw)
            if new is not None:
                prepared.withdraw(new)
            if given is None:
                prepared.discard()
            raise
        old.finish_seal()
        self._snapshot_producers(producers, end_offset)
        self._rolls += 1
        if busy and not prepared.is_pulled:
            self._spare.start(self.head_config)
        self._use.opened(now)
        self._tell(old, new)
        return new

    def _replace_empty(
        self, old: Segment, now_ms: int, room: int = 1, given: PreparedHead | None = None
    ) -> Segment:
        """Put another file (the one that is `given`) in place of an empty head's, under the same
        name; rolls when it has got records meanwhile."""
        prepared = given if given is not None else self._prepare(room)
        thaw = freeze_head(self.kernel)
        if old.size:
            thaw_head(self.kernel, thaw)
            if given is None:
                prepared.discard()
            return self._roll(now_ms, room, given)
        try:
            new = prepared.publish(int(self.kernel.log_end_offset))
        except BaseException:
            thaw_head(self.kernel, thaw)
            if given is None:
                prepared.discard()
            raise
        old.supersede()  # its file is replaced: nobody shortens the new one through it
        with self._lock:
            old.take_from_kernel()
            self._set_segments(self._segments[:-1])
            new.become_head(self.kernel, prepared.config.segment_bytes, now_ms)
            self._add_segment(new)
        old.release()
        self._rolls += 1
        self._use.opened(time.monotonic())
        self._tell(old, new)
        return new

    def _add_segment(self, new: Segment) -> None:
        self._set_segments((*self._segments, new))
        self._disk.directory_changed = True

    def _retire_active(self, *, although_unreadable: bool = False) -> bool:
        """Put an empty segment without allocated bytes after the active one, which is about to be
        deleted, or to be followed by another.  False when records have arrived in it meanwhile that
        are not readable yet, unless that does not matter."""
        old = self._segments[-1]
        was_head = old.is_head
        thaw = None
        if was_head:
            for callback in self.before_roll:
                callback(self)
            thaw = freeze_head(self.kernel)
        try:
            new = Segment.create_empty(self.directory, int(self.kernel.log_end_offset))
            with self._lock:
                if not although_unreadable and old.end_offset > self.kernel.high_watermark:
                    new.delete()
                    return False
                if was_head:
                    old.take_from_kernel()
                thaw = None
                roll_without_head(self.kernel)
                self._add_segment(new)
        finally:
            if thaw is not None:
                thaw_head(self.kernel, thaw)
        if was_head:
            old.finish_seal()
        self._snapshot_producers(*known_producers(self.kernel))
        old.mark_sealed()
        self._tell(old, new)
        return True

    def _move_start(self, offset: int) -> None:
        """Let the log start at `offset`, if it starts before; segments wholly below go.  Of a
        tiered log that is on disk first."""
        self.kernel.set_log_start_offset(offset)
        if self.is_tiered:
            self._put_start_on_disk()
        count = count_below(self._segments, int(self.kernel.log_start_offset))
        if not self._delete_oldest(count) and self.is_tiered:
            self._trim_epochs()

    def _trim_epochs(self) -> None:
        """Forget the epochs of records that are gone everywhere.  Not up to the log start: records
        below it may be kept here, and replicas copy these, too."""
        first = min(self.first_kept_offset, int(self.kernel.log_start_offset))
        self._epochs.trim(first)

    def _delete_oldest(self, count: int) -> int:
        if count == 0:
            return 0
        # The active one too: it needs a successor whose name remembers the log end.
        if count == len(self._segments) and not self._retire_active():
            return 0
        if self.is_tiered:
            if not self._keeps_start:
                self.kernel.set_log_start_offset(self._bases[count])
            self._put_start_on_disk()  # or the next start would find it where local segments begin
        with self._lock:
            doomed = self._segments[:count]
            self._set_segments(self._segments[count:])
            if not self.is_tiered:
                self.kernel.set_log_start_offset(self._bases[0])
        for segment in doomed:
            log.info(
                "deleting segment %s (offsets [%d, %d), %d bytes)",
                segment.path,
                segment.base_offset,
                segment.end_offset,
                segment.size,
            )
            reached("before a local deletion")
            segment.delete(self._remove_files)
            reached("after a local deletion")
        producer_state.delete_before(self.directory, self._bases[0], self._remove_files)
        forget_aborted(self.kernel, min(self._bases[0], int(self.kernel.log_start_offset)))
        self._trim_epochs()
        self._disk.directory_changed = True
        return count

    def _remove_files(self, paths: Sequence[Path]) -> None:
        """Remove files of deleted segments, after ``file.delete.delay.ms``.  OSError."""
        if self.removals is None:
            unlink(paths)
        else:
            delay_ms = self.config.file_delete_delay_ms
            self.removals.remove_files(self.directory.parent, paths, delay_ms)

    def _keep_files(self, paths: Sequence[Path]) -> None:
        """The same before other files take their names."""
        if self.removals is not None:
            delay_ms = self.config.file_delete_delay_ms
            self.removals.keep_files(self.directory.parent, paths, delay_ms)

    @property
    def _segment_ms(self) -> int:
        """After how long this segment ends."""
        config = self.config
        # The jitter as long as it is allowed: ``segment.jitter.ms`` may have changed meanwhile, and
        # one beyond ``max.compaction.lag.ms`` would end a segment with each append.
        whole = config.effective_segment_ms
        return whole - min(self._jitter_ms, config.segment_jitter_ms) % max(1, whole)

    def _draw_jitter(self) -> None:
        """Draw by how much sooner the newest segment ends, as Kafka's `LogConfig` does."""
        bound = min(self.config.segment_jitter_ms, self.config.segment_ms)
        if bound > 0:
            self._jitter_ms = random.randrange(bound)
            self._configure_kernel()

    def _tell(self, old: Segment, new: Segment) -> None:
        self._draw_jitter()
        for callback in self.on_roll:
            try:
                callback(self, old, new)
            except Exception:
                log.exception("callback after a roll of %s failed", self.topic_partition)

    def _snapshot_producers(
        self, entries: list[ProducerEntry], offset: int, *, sync: bool = False
    ) -> None:
        """Best effort: without a snapshot the next start reads more of the log.  The aborted index
        is on disk before it."""
        try:
            self._aborted.write(self.kernel, self._segments)
            producer_state.write_snapshot(self.directory, offset, entries, sync=sync)
        except OSError as e:
            log.warning("cannot write the producer snapshot of %s: %s", self.topic_partition, e)
