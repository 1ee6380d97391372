"""Segments: one file of record batches with its two indexes.

Law of the room: segment files are created, mapped, lengthened, shortened and unlinked here, and,
for a new head, in `kdirect.log.head`; a copy that replaces one is made in `kdirect.log.truncation`.

- The active segment is mapped shared and writable once, with addresses for all that it may become;
  the commit kernel writes through that mapping.  Its bytes are allocated in steps before they are
  touched (never sparse: a full disk must show as ENOSPC, not as a bus error on first touch), and
  given back when they are not used.  `mapped_length` says how many exist: nobody touches, registers
  or grants more.
- A sealed segment is immutable.  Its file is shortened to its records only when nobody can have it
  mapped.  Until the last grant is released, the bytes after the records are a hole and the length
  is kept: a file that is cut while others map it kills whoever reads past its new end (SIGBUS).
- Deletion takes the files' names away, at once or by way of others (`kdirect.log.removals`);
  mappings of holders live on.
- Mappings and descriptors exist while somebody has acquired the segment, and a little longer for a
  few recently used ones.  So their number is bounded by how many partitions are written to, not by
  the size of the log.

Locks: a segment's lock guards its fields and is held for moments only, because readers take it on
an event loop.  Files are lengthened, shortened and unmapped without it, by a thread that holds the
partition's roll lock, or by the one that gave back the last reference.

Positions are bytes from the start of the file; a batch lies in [position, position + size).  Where
batches lie is looked up by `kdirect.log.segment_search`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from kdirect.errors import ClosedError, LogError
from kdirect.huge_pages import allocate_huge
from kdirect.log.checkpoint import sync_data
from kdirect.log.config import PAGE_BYTES, whole_pages
from kdirect.log.growth import HUGE_BYTES, LEAST_GIVEN_BACK, HeadBytes
from kdirect.log.idle import Detached, IdleMappings
from kdirect.log.index import OffsetIndex, TimeIndex
from kdirect.log.kernel import CommitKernel
from kdirect.log.kernel_head import install_head, resize_head, seal_head
from kdirect.log.mapped import Mapping, punch_hole
from kdirect.log.removals import unlink

log = logging.getLogger("kdirect.log")

LOG_SUFFIX = ".log"
SUFFIXES = (LOG_SUFFIX, OffsetIndex.suffix, TimeIndex.suffix)
TRANSACTION_SUFFIX = ".txnindex"  # only beside segments that have aborted transactions
TEMPORARY_SUFFIX = ".tmp"
IDLE_MAPPINGS = 32


def file_name(base_offset: int, suffix: str) -> str:
    """Kafka's name: the base offset in twenty digits."""
    return f"{base_offset:020d}{suffix}"


def segment_files(directory: Path, base_offset: int) -> list[Path]:
    """All files that a segment may have; the log last, so that what a crash leaves of their removal
    is a segment."""
    suffixes = (TRANSACTION_SUFFIX, TimeIndex.suffix, OffsetIndex.suffix, LOG_SUFFIX)
    return [directory / file_name(base_offset, suffix) for suffix in suffixes]


_idle = IdleMappings(IDLE_MAPPINGS)


class Segment:
    """One segment of a partition.

    Its offsets are those from `base_offset` up to, and without, `end_offset`; `size` is how many
    bytes of records it has.  For the head, both follow the kernel.  `fd`, `address`,
    `mapped_length` are -1, 0, 0 while it is not mapped.

    Life: dormant (a file, perhaps mapped), head (`become_head`), sealed (`take_from_kernel`, then
    `finish_seal`), and in the end `close`, `delete`, or `supersede` where another object stands for
    the file.  Any thread may call; `acquire` before using an address, `release` after.  `grow`,
    `give_back`, `take_from_kernel` and `finish_seal` are called with the partition's roll lock
    held.
    """

    def __init__(
        self,
        directory: Path,
        base_offset: int,
        *,
        size: int = 0,
        end_offset: int | None = None,
        sealed: bool = False,
        max_timestamp: int | None = None,
        dense_from: int = 0,
    ) -> None:
        self.directory = directory
        self.base_offset = base_offset
        self.path = directory / file_name(base_offset, LOG_SUFFIX)
        self.sealed = sealed
        self.synced = False  # sealed, and everything of it is on disk
        # Found longer than its records after a crash: clients of the dead broker may still map it.
        self.keep_length = False
        self.offset_index = OffsetIndex(directory / file_name(base_offset, OffsetIndex.suffix))
        self.time_index = TimeIndex(directory / file_name(base_offset, TimeIndex.suffix))
        self.fd = -1
        self.file_length = size  # of the file, whatever of it is allocated
        # Of that, what exists: all but for a head that was given back while others had it mapped.
        self._allocated = size
        self.deleted = False
        self.dense_from = dense_from  # below it offsets may be missing
        self._size = size
        self._end_offset = base_offset if end_offset is None else end_offset
        self._max_timestamp = max_timestamp
        self._kernel: CommitKernel | None = None  # of the head
        self._mapping: Mapping | None = None
        self._references = 0
        self.acquisitions = 0  # so far
        self._lock = threading.RLock()
        self._superseded = False
        self._closed = False
        self.index_told = False  # that the index is wrong has been logged (`segment_search`)
        self._pid = os.getpid()

    @classmethod
    def create_empty(cls, directory: Path, base_offset: int) -> Segment:
        """An active segment without records and without preallocated bytes; its name keeps the log
        end."""
        segment = cls(directory, base_offset)
        os.close(os.open(segment.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
        return segment

    def __repr__(self) -> str:
        kind = "sealed" if self.sealed else "head" if self.is_head else "active"
        offsets = f"[{self.base_offset}, {self.end_offset})"
        return f"Segment({self.path}, {kind}, offsets {offsets}, {self.size} bytes)"

    # -- what it holds -----------------------------------------------------------------------------

    @property
    def is_head(self) -> bool:
        """The kernel writes it: allocated and mapped."""
        return self._kernel is not None

    def extent(self) -> tuple[int, int]:
        """(`size`, `end_offset`) of one moment."""
        kernel = self._kernel
        if kernel is not None:
            view = kernel.view()
            if view.segment_base_offset == self.base_offset:
                return view.end_position, view.log_end_offset
        with self._lock:  # a thread that is sealing it has set the values when it unlocks
            return self._size, self._end_offset

    @property
    def size(self) -> int:
        """Bytes of records; what follows in the file is zeros."""
        return self.extent()[0]

    @property
    def end_offset(self) -> int:
        """The offset after the last record."""
        return self.extent()[1]

    def extend_to(self, end_offset: int) -> None:
        """Before anybody else knows the segment: offsets up to there are its own, and missing."""
        self._end_offset = end_offset

    @property
    def max_timestamp(self) -> int:
        """Largest timestamp of its records in ms, -1 when none has one."""
        with self._lock:
            if self._kernel is not None:
                return int(self._kernel.timestamps()[1])
            if self._max_timestamp is None:
                last = self._with_indexes(self.time_index.last)
                self._max_timestamp = last[0] if last is not None else -1
            return self._max_timestamp

    @property
    def modified_ms(self) -> int:
        """When the file was last written (ms since the epoch), for records without timestamps."""
        try:
            return os.stat(self.path).st_mtime_ns // 1_000_000
        except FileNotFoundError:
            return 0

    # -- mapping -----------------------------------------------------------------------------------

    @property
    def address(self) -> int:
        mapping = self._mapping
        return mapping.address if mapping is not None else 0

    @property
    def mapped_length(self) -> int:
        """Bytes that are mapped and exist."""
        mapping = self._mapping
        return min(mapping.length, self._allocated) if mapping is not None else 0

    @property
    def reserved_length(self) -> int:
        """Bytes that a head may grow to: so many have an address."""
        mapping = self._mapping
        return mapping.length if mapping is not None else 0

    def map(self, *, writable: bool = False) -> None:
        """Map its records, unless they are mapped already.  Without an `acquire` the mapping of a
        sealed segment may be ended at any time.  `writable`: some RNICs register memory for reads
        only if the process may write it."""
        with self._lock:
            self._map(writable)
            idle = self._references == 0 and not self.is_head
        if idle:
            _idle.add(self)

    def _map(self, writable: bool) -> None:
        if self._closed:
            raise ClosedError(
                f"segment {self.path} is closed", hint="look the segment up again in its partition"
            )
        if self._mapping is None:
            try:
                fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                raise ClosedError(
                    f"segment {self.path} was deleted",
                    hint="its records are below the log start offset",
                ) from None
            except OSError as e:
                raise LogError(
                    f"cannot open {self.path}: {e}",
                    hint="raise the limit on open files (ulimit -n)",
                ) from e
            try:
                length = os.fstat(fd).st_size
                # What may lie after the records is about to be cut off, or is a hole.
                self._mapping = Mapping(fd, min(length, self._size), writable=writable)
            except BaseException:
                os.close(fd)
                raise
            self.fd = fd
            self.file_length = self._allocated = length
        elif writable:
            self._mapping.make_writable()

    def _with_indexes(self, function):  # type: ignore[no-untyped-def]
        """Call `function` with both indexes open; they stay so as long as the segment is mapped."""
        self.offset_index.open()
        self.time_index.open()
        try:
            return function()
        finally:
            if self._mapping is None:
                self.offset_index.close()
                self.time_index.close()

    def acquire(self) -> Segment:
        """Map it and keep it mapped, at its length, until the matching `release`."""
        with self._lock:
            self._map(False)
            self._references += 1
            self.acquisitions += 1
            first = self._references == 1
        if first:
            _idle.discard(self)
        return self

    def acquire_nowait(self) -> bool:
        """`acquire`, if the segment and its indexes are mapped already and no other thread has its
        lock; else False.  While it is acquired, nobody does file work under that lock."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            indexed = self.offset_index.mapping is not None and self.time_index.mapping is not None
            if self._mapping is None or self._closed or not indexed:
                return False
            self._references += 1
            self.acquisitions += 1
            first = self._references == 1
        finally:
            self._lock.release()
        if first:
            _idle.discard(self)
        return True

    def release(self) -> None:
        """Give back one `acquire`.  The last one trims a sealed file and closes a deleted one."""
        detached = None
        with self._lock:
            self._references -= 1
            if self._references > 0 or self.is_head:
                return
            ended, longer = self._is_over(), self._is_longer()
            if ended or longer:
                detached = self._detach()
        if detached is None:
            _idle.add(self)
            return
        _idle.discard(self)
        detached.end()
        if longer and not ended:
            self._shorten()

    def release_nowait(self) -> bool:
        """`release`, unless that unmaps or cuts a file, or another thread has the segment's lock.
        Then False, and nothing has changed: call `release` on a thread that may wait."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._references < 2 and not self.is_head:
                if self._is_over() or self._is_longer() or not _idle.add_nowait(self):
                    return False
            self._references -= 1
            return True
        finally:
            self._lock.release()

    def _is_over(self) -> bool:
        """Does its mapping end with its last holder?"""
        return self.deleted or self._superseded or self._closed

    def _is_longer(self) -> bool:
        """Is the file to be cut after its records?"""
        return self.sealed and self.file_length > self._size

    @property
    def references(self) -> int:
        return self._references

    def unmap_if_idle(self) -> bool:
        """Unmap unless it is acquired.  False when another thread has its lock: this never waits,
        because the caller may hold the lock of another segment."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            detached = self._detach_if_unused()
        finally:
            self._lock.release()
        self._end(detached)
        return True

    def _detach_if_unused(self) -> Detached | None:
        return self._detach() if self._references == 0 and not self.is_head else None

    def _detach(self) -> Detached:
        """Forget mappings and descriptor; under the lock.  The caller ends them without it."""
        found = (self._mapping, self.offset_index.detach(), self.time_index.detach())
        detached = Detached([m for m in found if m is not None], self.fd)
        self._mapping, self.fd = None, -1
        return detached

    def _end(self, detached: Detached | None) -> None:
        if detached is not None:
            _idle.discard(self)
            detached.end()

    def _shorten(self) -> None:
        """Cut the file after its records, when nobody maps more of it.  Not in a forked child,
        which inherits this object but not the right to change files."""
        if os.getpid() != self._pid or self.keep_length:
            return
        try:
            os.truncate(self.path, self._size)
            self.file_length = self._allocated = self._size
        except OSError as e:
            log.warning("cannot shorten %s to %d bytes: %s", self.path, self._size, e)

    # -- head --------------------------------------------------------------------------------------

    def adopt(self, mapping: Mapping, fd: int, allocated: int, file_length: int = 0) -> None:
        """Take a writable mapping for all that the head may become, and the file's
        descriptor.  `allocated` bytes exist."""
        with self._lock:
            assert self._mapping is None
            self._mapping = mapping
            self.fd = fd
            self._allocated = allocated
            self.file_length = max(allocated, file_length)

    def become_head(
        self,
        kernel: CommitKernel,
        segment_bytes: int,
        created_ms: int,
        *,
        first_timestamp: int = -1,
    ) -> None:
        """Hand the mapped, allocated file to the kernel, with the reference that
        `PreparedHead.publish` or `reopen_as_head` took; the kernel holds it until `finish_seal`."""
        last = self.time_index.last()
        max_timestamp, max_offset = (
            (last[0], self.base_offset + last[1]) if last is not None else (-1, self.base_offset)
        )
        with self._lock:
            assert self._mapping is not None and self._references > 0
            install_head(
                kernel,
                self._mapping.address,
                min(self._allocated, max(segment_bytes, self._size)),
                position=self._size,
                segment_base_offset=self.base_offset,
                offset_index_address=self.offset_index.address,
                offset_index_capacity=self.offset_index.capacity,
                offset_index_entries=self.offset_index.entries,
                time_index_address=self.time_index.address,
                time_index_capacity=self.time_index.capacity,
                time_index_entries=self.time_index.entries,
                last_indexed_timestamp=max_timestamp,
                first_timestamp=first_timestamp,
                max_timestamp=max_timestamp,
                max_timestamp_offset=max_offset,
                created_ms=created_ms,
            )
            self._kernel = kernel

    def grow(self, wanted: HeadBytes) -> None:
        """Allocate more of the head's files, then tell the kernel.  OSError when the disk is full:
        then nothing has changed."""
        kernel = self._kernel
        assert kernel is not None
        before, more = self.file_length, wanted.log - self._allocated
        try:
            if more >= HUGE_BYTES:
                allocate_huge(self.fd, wanted.log)
            if more > 0:
                os.posix_fallocate(self.fd, self._allocated, more)
            self.offset_index.grow(wanted.offset_index)
            self.time_index.grow(wanted.time_index)
        except OSError:
            # Only this mapping reaches past the length that the file had, and nobody has touched it
            # there.
            os.ftruncate(self.fd, before)
            punch_hole(self.fd, self._allocated, before - self._allocated)
            raise
        with self._lock:
            self._allocated = max(self._allocated, wanted.log)
            self.file_length = max(before, wanted.log)
        resize_head(kernel, wanted.log, self.offset_index.capacity, self.time_index.capacity)

    def give_back(self, acquisitions: int) -> int:
        """Free what lies after the head's records; how many bytes.  0, and nothing done, if it is
        not worth the work, or if somebody has acquired the segment since the counter of that name
        was `acquisitions`.  Nobody may write the head by other means than the kernel.

        Where others have it mapped a hole is punched and the length is kept; they may not have it
        pinned."""
        kernel = self._kernel
        assert kernel is not None
        index_bytes = [  # one that is full stays as it is
            min(whole_pages((n + 2) * x.entry_bytes), x.capacity * x.entry_bytes)
            for n, x in zip(kernel.index_entries(), self._indexes, strict=True)
        ]
        with self._lock:
            kept = max(PAGE_BYTES, whole_pages(kernel.end_position))
            unused = self._allocated - kept
            entries = [n // x.entry_bytes for n, x in zip(index_bytes, self._indexes, strict=True)]
            if (
                self.acquisitions != acquisitions
                or unused < LEAST_GIVEN_BACK
                or not resize_head(kernel, kept, *entries)
            ):
                return 0
            alone = self._references == 1 and not self.keep_length
            self._allocated = kept
            if alone:
                self.file_length = kept
        if alone:
            os.ftruncate(self.fd, kept)
        else:
            punch_hole(self.fd, kept, self.file_length - kept)
        for index, length in zip(self._indexes, index_bytes, strict=True):
            index.shrink(length)
        return unused

    @property
    def _indexes(self) -> tuple[OffsetIndex, TimeIndex]:
        return self.offset_index, self.time_index

    def take_from_kernel(self) -> None:
        """Take the head from the kernel: it is sealed from now on, and `finish_seal` is to
        follow."""
        with self._lock:
            assert self._kernel is not None
            head = seal_head(self._kernel)
            assert head is not None
            self._size = head.size
            self._end_offset = head.end_offset
            self._max_timestamp = head.max_timestamp
            self.offset_index.entries = head.offset_entries
            self.time_index.entries = head.time_entries
            self.sealed = True
            self._kernel = None

    def finish_seal(self) -> None:
        """Free what lies after the records, trim the indexes, give back the kernel's reference.
        File work, with no lock held that a reader takes."""
        try:
            for index in self._indexes:
                index.trim(index.entries)
            if self._references > 1 and self.file_length > self._size:
                punch_hole(self.fd, self._size, self.file_length - self._size)
        except OSError as e:
            # It is sealed all the same: whoever uses an index that is too long notices.
            log.warning("cannot trim the files of %s: %s", self.path, e)
        self.release()

    def mark_sealed(self) -> None:
        """Seal a segment that is not the head: it takes no more records."""
        with self._lock:
            self.sealed = True
            longer = self._references == 0 and self.file_length > self._size
            detached = self._detach_if_unused() if longer else None
        self._end(detached)
        if longer:
            self._shorten()

    def supersede(self) -> None:
        """Another Segment object stands for the file from now on, because it becomes the head, or
        another file takes its name: holders keep this mapping, and the file is not touched."""
        with self._lock:
            self._superseded = True
            self.sealed = True
            detached = self._detach_if_unused()
        self._end(detached)

    def end_replaced(self) -> None:
        """Another file has its name, with other records: holders keep their mapping of the old
        file, and nobody can acquire it any more."""
        with self._lock:
            self._superseded = True
        self.close()

    # -- indexes -----------------------------------------------------------------------------------

    def _entries(self) -> tuple[int, int]:
        kernel = self._kernel
        if kernel is not None:
            return kernel.index_entries()  # type: ignore[no-any-return]
        self.offset_index.open()
        self.time_index.open()
        return self.offset_index.entries, self.time_index.entries

    def index_entries(self) -> tuple[int, int]:
        """How many entries its offset index and its time index have.  The caller has acquired the
        segment.  The indexes stay mapped as long, so they are looked up without the lock: a page of
        them may have to come from a disk."""
        with self._lock:
            return self._entries()

    # -- disk --------------------------------------------------------------------------------------

    def sync(self, *, with_indexes: bool = False) -> None:
        """fdatasync the file (and the indexes, which only matters once it is sealed)."""
        paths = [self.path]
        if with_indexes:
            paths += [self.offset_index.path, self.time_index.path]
        sync_data(paths)

    def close(self) -> None:
        """End its use.  Holders keep their mapping; a file that nobody maps ends at its records."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.keep_length = False
            detached = self._detach_if_unused()
            longer = (
                detached is not None
                and not self.deleted
                and not self._superseded
                and self.file_length > self._size
            )
        self._end(detached)
        if longer:
            self._shorten()

    def delete(self, remove: Callable[[Sequence[Path]], None] = unlink) -> None:
        """Remove the files, at once or as `remove` does; whoever has acquired the segment may go on
        reading."""
        with self._lock:
            self.deleted = True
            detached = self._detach_if_unused()
        aborted = self.directory / file_name(self.base_offset, TRANSACTION_SUFFIX)
        remove((self.path, self.offset_index.path, self.time_index.path, aborted))
        self._end(detached)
