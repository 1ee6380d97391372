"""The record batches of one remote segment, one after another, out of its chunks.

Owns: that nothing is handed on which has not been checked.  Each batch is compared with its CRC and
with what is known of the log (`kdirect.format.chain`): offsets that follow each other, the leader
epochs of the segment's metadata, the batches that the index names.  That includes those that are
passed over on the way from an index entry, because a damaged one may hide the one that is looked
for.  The loops are compiled; here one round is a chunk.

Chunks come from the caller's `chunk(number)`, which may wait.  A batch that lies in one chunk is a
view of it; one that crosses a border is copied.  No more chunks are asked for than up to the first
batch border that the index knows after a position, whatever a damaged length says.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, NamedTuple

from kdirect.errors import CorruptObjectError
from kdirect.format import layout
from kdirect.format.remote_metadata import RemoteSegment
from kdirect.log.mapped import Chain, Walk, find_timestamp, whole_batches
from kdirect.storage.chunk_cache import CHUNK_BYTES, Chunk
from kdirect.storage.segment_indexes import SegmentIndexes

ANY_TIME = -(1 << 63)
_NO_OFFSET = _NO_END = (1 << 63) - 1
_NO_EPOCH = (1 << 31) - 1
_LENGTH = struct.Struct(">i")
# Looked at in one go on the way to a batch; an index interval, as a rule.
_SEARCH_BYTES = 64 << 10


class _Piece(NamedTuple):
    """Batches whose frames are whole: [start, end) of a buffer."""

    buffer: Chunk
    start: int
    end: int


class SegmentWalk:
    """Life: made at an offset, then `find`, then `take` or `batch` and `skip`.  `where` names the
    object in errors; below `dense_from` offsets may be missing."""

    def __init__(
        self,
        segment: RemoteSegment,
        indexes: SegmentIndexes,
        where: str,
        chunk: Callable[[int], Chunk],
        offset: int,
        dense_from: int = 0,
    ) -> None:
        self._segment = segment
        self._indexes = indexes
        self._where = where
        self._chunk = chunk
        self._dense_from = dense_from
        self._starts = [start for _, start in segment.leader_epochs]
        self.position, last = indexes.locate(offset)
        if self.position:
            self._known = self._chain(-1, last)
        else:
            self._known = self._chain(segment.base_offset)
        self._found: tuple[_Piece, Walk] | None = None

    @property
    def next_offset(self) -> int:
        """The offset after the batches that were taken or skipped."""
        return self._known.next_offset

    def _chain(self, next_offset: int, indexed: int = -1) -> Chain:
        """What is known of the batches from the one on that begins with `next_offset`, or ends with
        `indexed`, up to the end of its leader epoch."""
        known = Chain(next_offset, self._dense_from, self._segment.end_offset, indexed)
        i = max(bisect_right(self._starts, max(next_offset, indexed)) - 1, 0)
        if self._starts:
            epoch = self._segment.leader_epochs[i][0]
            known = known._replace(least_epoch=epoch, greatest_epoch=epoch)
        return known

    # -- the walk ----------------------------------------------------------------------------------

    def find(self, timestamp_ms: int, from_offset: int) -> Walk | None:
        """Go to the first batch with a record of `timestamp_ms` or later at `from_offset` or
        higher; None when there is none.  CorruptObjectError when a batch on the way is damaged."""
        while (piece := self._piece(_SEARCH_BYTES, at_least_one=True)) is not None:
            found = self._look(piece, timestamp_ms, from_offset)
            self.position += found.position - piece.start
            if found.fault:
                raise self._corrupt(found.fault, found.next_offset)
            if found.size:
                self._known = self._chain(found.base_offset)
                self._found = piece, found
                return found
            self._known = self._chain(found.next_offset)
        # Where compaction may have removed the tail nothing is missed.
        if self._dense_from < self._segment.end_offset != self._known.next_offset:
            raise self._corrupt("is missing", self._known.next_offset)
        return None

    def batch(self) -> memoryview:
        """The batch that `find` has found."""
        assert self._found is not None
        piece, found = self._found
        return piece.buffer.data[found.position : found.position + found.size]

    def skip(self) -> None:
        """Go past it."""
        assert self._found is not None
        found = self._found[1]
        self.position += found.size
        self._known = self._chain(found.next_offset)

    def take(self, max_bytes: int, *, at_least_one: bool) -> list[memoryview]:
        """Whole batches from here on, at most `max_bytes`; with `at_least_one`, the first one
        however long it is.  A damaged one ends them; CorruptObjectError if it is the first."""
        out: list[memoryview] = []
        left = max_bytes
        try:
            while left > 0 or (at_least_one and not out):
                piece = self._piece(max(left, 0), at_least_one=at_least_one and not out)
                if piece is None:
                    break
                # No batch has a record at such an offset: this looks at all of them.
                checked = self._look(piece, ANY_TIME, _NO_OFFSET)
                size = checked.position - piece.start
                if size:
                    out.append(piece.buffer.data[piece.start : checked.position])
                    left -= size
                    self.position += size
                    self._known = self._chain(checked.next_offset)
                if checked.fault:
                    raise self._corrupt(checked.fault, checked.next_offset)
        except CorruptObjectError:
            if not out:
                raise
        return out

    def _look(self, piece: _Piece, timestamp_ms: int, from_offset: int) -> Walk:
        """Walk over the batches of a piece, checking all of each, as far as they are sound or to
        the first one with a record of that time and offset."""
        start, known = piece.start, self._known
        while True:
            found = find_timestamp(
                piece.buffer.address, start, piece.end, timestamp_ms, from_offset, known
            )
            next_epoch = found.position > start and found.next_offset in self._starts
            if not (found.fault and next_epoch):
                return found  # type: ignore[no-any-return]
            start, known = found.position, self._chain(found.next_offset)

    # -- frames ------------------------------------------------------------------------------------

    def _piece(self, limit: int, *, at_least_one: bool) -> _Piece | None:
        """Batches from here on whose frames are whole, at most `limit` bytes; with `at_least_one`,
        the first one however long it is.  None at the end of the log, or when one does not fit."""
        if self.position >= self._segment.size:
            return None
        number, start = divmod(self.position, CHUNK_BYTES)
        chunk = self._chunk(number)
        stop = min(start + limit, len(chunk))
        frames = self._known._replace(end_offset=_NO_END, greatest_epoch=_NO_EPOCH)
        walk = whole_batches(chunk.address, start, stop, stop, frames)
        if walk.position > start:
            return _Piece(chunk, start, walk.position)
        if stop < len(chunk) and not at_least_one:
            return None
        # It is longer than that, or damaged.
        size = self._size_of_next(chunk, start)
        if start + size <= stop:
            raise self._corrupt(walk.fault, self._known.next_offset)
        if size > limit and not at_least_one:
            return None
        if start + size <= len(chunk):
            return _Piece(chunk, start, start + size)
        return _Piece(Chunk(self._bytes(chunk, start, size)), 0, size)

    def _size_of_next(self, chunk: Chunk, start: int) -> int:
        """How long the batch is that begins there, if it can be so long."""
        most = self._indexes.border_after(self.position) - self.position
        head = self._bytes(chunk, start, min(most, layout.BATCH_LENGTH_PREFIX_BYTES))
        size = -1
        if len(head) == layout.BATCH_LENGTH_PREFIX_BYTES:
            (length,) = _LENGTH.unpack_from(head, layout.BATCH_LENGTH)
            size = length + layout.BATCH_LENGTH_PREFIX_BYTES
        if not layout.BATCH_HEADER_BYTES <= size <= most:
            raise self._corrupt(
                f"says that it is {size} bytes long, where {most} are left", self._known.next_offset
            )
        return size

    def _bytes(self, chunk: Chunk, start: int, size: int) -> Any:
        """`size` bytes from `start` in a chunk on, and on in those after it."""
        parts = [chunk.data[start : start + size]]
        number = self.position // CHUNK_BYTES
        while (left := size - sum(map(len, parts))) > 0:
            number += 1
            parts.append(self._chunk(number).data[:left])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _corrupt(self, fault: str, next_offset: int) -> CorruptObjectError:
        after = f" (offset {next_offset} comes next)" if next_offset >= 0 else ""
        return CorruptObjectError(
            f"{self._where}: the record batch at position {self.position} of the segment that"
            f" begins at offset {self._segment.base_offset} {fault}{after}",
            hint="restore the object from a good copy, or read past it, from offset"
            f" {self._segment.end_offset} on",
        )


__all__ = ["ANY_TIME", "SegmentWalk"]
