"""Where the bytes of a partition's log are: an ordered list of sources, one for each segment.

Law of the room: a `Partition` reads and grants through its sources only, so a segment may be
somewhere else than in a local file: on a storage node, or in a tier of object storage.  There is
one implementation today, `LocalSource`, the file of a `Segment`.

A source tells three things: at which position an offset lies (`locate`), what a one-sided reader
needs to read the bytes without the broker (`grant`), and the bytes (`read`).  It does not know how
far they may be read: that is the kernel's mark, and the callers pass it as `stop`.

Ownership.  What `read` returns keeps its bytes mapped as long as somebody holds the buffer.  A
`FileExtent` holds what it names until its `release` was called, exactly once; whoever registered
its memory ends the key before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

from kdirect.log.mapped import Chain, MappedBytes, whole_batches
from kdirect.log.segment import Segment
from kdirect.log.segment_search import corrupt, locate, search_is_resident

Release: TypeAlias = Callable[[Segment], None]


class FileExtent(NamedTuple):
    """What a one-sided reader is granted: today `length` bytes of a local file, mapped at `address`
    (`mapped_length` bytes of it), to be registered in the reader's protection domain.  `owner`
    keeps the mapping; `release` gives it back, and may do file work."""

    fd: int
    address: int
    mapped_length: int
    length: int
    owner: Segment
    release: Callable[[], None]


class SegmentSource(Protocol):
    """One segment of a log, wherever its bytes are."""

    @property
    def base_offset(self) -> int:
        """Of its first record."""

    @property
    def end_offset(self) -> int:
        """The offset after its last record."""

    @property
    def size(self) -> int:
        """Bytes of its records."""

    def locate(self, offset: int) -> tuple[int, int]:
        """(position, base offset) of the batch that holds `offset`; the end for `end_offset`."""

    def grant(self) -> FileExtent:
        """Its bytes for a one-sided reader.  ClosedError when it was deleted."""

    def read(
        self,
        position: int,
        length: int,
        stop: int,
        known: Chain,
        *,
        at_least_one: bool,
        release: Release | None,
    ) -> memoryview | None:
        """Whole batches from `position` on, at most `length` bytes, none that ends after `stop`;
        with `at_least_one`, the first one however long it is.  None when there is none.
        CorruptLogError for a first batch that does not continue the log (`known`)."""

    def map_indexes(self) -> None:
        """Do what `hold_nowait` does not, so that it holds while the segment stays mapped."""

    def hold_nowait(self, offset: int, length: int, stop: int, *, release: Release | None) -> bool:
        """Keep it readable until `end_hold`, if the bytes that `read` would touch are in memory and
        nobody is to be waited for; else False, and nothing has changed."""

    def end_hold(self, release: Release | None) -> None:
        """Undo `hold_nowait`."""


class LocalSource:
    """The local file of a segment.  Any thread may call."""

    __slots__ = ("segment",)

    def __init__(self, segment: Segment) -> None:
        self.segment = segment

    @property
    def base_offset(self) -> int:
        return self.segment.base_offset

    @property
    def end_offset(self) -> int:
        return self.segment.end_offset

    @property
    def size(self) -> int:
        return self.segment.size

    def locate(self, offset: int) -> tuple[int, int]:
        return locate(self.segment, offset)

    def grant(self) -> FileExtent:
        segment = self.segment.acquire()
        mapped = segment.mapped_length  # of a head: what is allocated of it by now
        length = mapped
        if segment.sealed:
            # No more than there is: registration may pin pages, and would fill the hole after the
            # records again.
            length = min(mapped, max(1, -(-segment.size // 4096)) * 4096)
        return FileExtent(segment.fd, segment.address, mapped, length, segment, segment.release)

    def read(
        self,
        position: int,
        length: int,
        stop: int,
        known: Chain,
        *,
        at_least_one: bool,
        release: Release | None,
    ) -> memoryview | None:
        segment = self.segment.acquire()
        owned = True
        try:
            walk = whole_batches(
                segment.address,
                position,
                position + max(length, 0),
                stop,
                known,
                at_least_one=at_least_one,
            )
            size = walk.position - position
            if size == 0:
                if walk.fault and at_least_one:
                    raise corrupt(segment, walk)
                return None
            owned = False  # the buffer releases the segment
            return memoryview(MappedBytes(segment, segment.address + position, size, release))
        finally:
            if owned:
                segment.release()

    def map_indexes(self) -> None:
        segment = self.segment.acquire()
        try:
            segment.index_entries()
        finally:
            segment.release()

    def hold_nowait(self, offset: int, length: int, stop: int, *, release: Release | None) -> bool:
        if not self.segment.acquire_nowait():
            return False
        if search_is_resident(self.segment, offset, length, stop):
            return True
        self.end_hold(release)
        return False

    def end_hold(self, release: Release | None) -> None:
        (release or Segment.release)(self.segment)
