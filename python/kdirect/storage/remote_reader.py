"""`RemoteReader`: records out of remote segments.

Owns: which requests are made of the object store, and when; the order of everything between a
question and its answer; what is counted.  Questions come from any thread, an event loop as well:
they are put into a queue (`reader_threads`), and the answer is a future.  Bytes that are handed on
have been checked (`segment_walk`); an object that is damaged is an error that names it.

Requests: indexes come with one ranged GET of the object's tail, whose place is in the metadata, and
stay in files (`index_cache`); the log's bytes come in chunks of 1 MiB, which are kept in memory
(`chunk_cache`) and are read ahead for who reads on (`read_ahead`), into the next segment as well.
No object is read whole, none is listed.

`find(offset)` is the caller's: the remote segment that holds an offset, or where none does, the
next one; None where there is no more.  It is called on the threads of the reader.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from kdirect.errors import (
    ClosedError,
    CorruptObjectError,
    FormatError,
    ObjectNotFoundError,
    OffsetOutOfRangeError,
    RemoteStorageError,
)
from kdirect.format.batch import iterate_batches
from kdirect.format.remote_metadata import RemoteSegment
from kdirect.format.segment_files import AbortedTransaction
from kdirect.format.segment_object import (
    needs,
    parse_custom_metadata,
    parse_tail,
    require_identity,
)
from kdirect.log.time_lookup import first_in_batch
from kdirect.objects.store import ObjectStore
from kdirect.storage.chunk_cache import CHUNK_BYTES, Chunk, ChunkCache
from kdirect.storage.index_cache import IndexCache, Sections
from kdirect.storage.read_ahead import ReadAhead
from kdirect.storage.reader_threads import ReaderThreads
from kdirect.storage.segment_indexes import SegmentIndexes
from kdirect.storage.segment_walk import ANY_TIME, SegmentWalk
from kdirect.storage.throttle import UNLIMITED, Throttle
from kdirect.storage.upload import identity_of, key_of

Find = Callable[[int], RemoteSegment | None]
_Result = TypeVar("_Result")
# Of the end of an object, where nobody says where its tail is.
_GUESSED_TAIL = 64 << 10
_LARGEST_PLAIN_BATCH = 1 << 30
# Bytes that were found damaged are asked for again, but not by each client that comes to them.
DAMAGE_KEPT_S = 5.0
_MOST_DAMAGED = 1000  # whose times are remembered


class CommittedRead(NamedTuple):
    """Whole batches that end before `end_offset`, and the aborted transactions of which their
    reader has to know, by their markers."""

    buffers: list[memoryview]
    aborted: list[AbortedTransaction]
    end_offset: int


class RemoteReader:
    """The remote segments of one cluster, read from `store`.  Life: construct, which looks at the
    files of `index_directory`; ask; `close`, which waits for nothing."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        cluster_id: str,
        index_directory: Path,
        index_bytes: int,
        chunk_bytes: int,
        threads: int = 10,
        max_pending: int = 100,
        bytes_per_second: int = UNLIMITED,
        max_plain_batch_bytes: int = _LARGEST_PLAIN_BATCH,
    ) -> None:
        self._store = store
        self._cluster_id = cluster_id
        self._indexes = IndexCache(index_directory, index_bytes)
        self._chunks = ChunkCache(chunk_bytes)
        self.throttle = Throttle(bytes_per_second)
        self._max_plain_batch_bytes = max_plain_batch_bytes
        self._threads = ReaderThreads(threads, max_pending, name="kdirect-remote-read")
        self._read_ahead = ReadAhead()
        self._damaged: dict[uuid.UUID, float] = {}  # when their bytes were dropped
        self._counted = threading.Lock()
        self._counts = dict.fromkeys(
            (
                "remote_fetch_requests",
                "remote_fetch_refused",
                "remote_fetch_errors",
                "remote_fetch_bytes",
                "remote_get_requests",
                "remote_get_errors",
                "remote_get_bytes",
            ),
            0,
        )

    def reconfigure(self, *, threads: int, bytes_per_second: int, index_bytes: int) -> None:
        """Any thread.  The files of indexes are fewer once the next one comes."""
        self._threads.resize(threads)
        self.throttle.bytes_per_second = bytes_per_second
        self._indexes.max_bytes = index_bytes

    # -- questions ---------------------------------------------------------------------------------

    def read(
        self,
        find: Find,
        offset: int,
        max_bytes: int,
        *,
        at_least_one: bool = True,
        dense_from: int = 0,
    ) -> Future[list[memoryview]] | None:
        """Whole record batches from the one that holds `offset` on, at most `max_bytes`, out of one
        segment; with `at_least_one`, the first one however long it is.  None: the queue is full.

        Below `dense_from` offsets may be missing: where compaction has removed the rest of a
        segment, the next one is read, and the answer is empty if there is none.  CorruptObjectError
        when the first batch is damaged; what is sound before a damaged one is handed on.  An object
        that is gone is looked up once more.  OffsetOutOfRangeError when no segment has the offset.
        """
        return self._ask(lambda: self._read(find, offset, max_bytes, at_least_one, dense_from))

    def find_time(
        self, find: Find, timestamp_ms: int, start_offset: int, *, dense_from: int = 0
    ) -> Future[tuple[int, int] | None] | None:
        """(offset, timestamp) of the first record of `timestamp_ms` or later at `start_offset` or
        higher, or None.  None in place of a future: the queue is full."""
        return self._ask(lambda: self._find_time(find, timestamp_ms, start_offset, dense_from))

    def read_committed(
        self,
        find: Find,
        offset: int,
        max_bytes: int,
        *,
        stable: int,
        local_start: int,
        dense_from: int = 0,
    ) -> Future[CommittedRead] | None:
        """As `read`, but only what begins below the last stable offset `stable`, with the aborted
        transactions that a reader of committed records has to know; whoever asks knows those that
        end at `local_start` or above.  Errors also of the segments after the one that is read,
        where their transaction indexes are wanted."""
        return self._ask(
            lambda: self._read_committed(find, offset, max_bytes, stable, local_start, dense_from)
        )

    def forget(self, segment: RemoteSegment) -> None:
        """It is gone: keep nothing of it.  It unlinks files."""
        self._chunks.forget(segment.segment_id)
        self._indexes.remove(segment.segment_id)

    def retain(self, segment_ids: Collection[uuid.UUID]) -> None:
        """After a start: keep the files of these segments only."""
        self._indexes.retain(segment_ids)

    def close(self) -> None:
        """Answers that are not there yet are ClosedErrors.  Threads that the store keeps waiting
        are left to themselves."""
        self._threads.close()

    def statistics(self) -> dict[str, int]:
        with self._counted:
            counts = dict(self._counts)
        return {
            **counts,
            "remote_reader_queue": self._threads.queue_length,
            **self._chunks.statistics(),
            **self._indexes.statistics(),
        }

    def _ask(self, task: Callable[[], _Result]) -> Future[_Result] | None:
        self._count("remote_fetch_requests", 1)
        answer = self._threads.submit(lambda: self._answer(task))
        if answer is None:
            self._count("remote_fetch_refused", 1)
        return answer

    def _answer(self, task: Callable[[], _Result]) -> _Result:
        try:
            return task()
        except BaseException:
            self._count("remote_fetch_errors", 1)
            raise

    def _count(self, name: str, n: int) -> None:
        with self._counted:
            self._counts[name] += n

    # -- answers -----------------------------------------------------------------------------------

    def _read(
        self, find: Find, offset: int, max_bytes: int, at_least_one: bool, dense_from: int
    ) -> list[memoryview]:
        segment = _holding(find, offset)
        if segment is None:
            raise OffsetOutOfRangeError(
                f"no remote segment holds offset {offset}",
                hint="it was deleted, or is not copied yet: ask for the log's start",
            )
        while segment is not None:
            read = partial(self._read_one, find, offset, max_bytes, at_least_one, dense_from)
            out, segment = self._again_if_gone(segment, partial(_holding, find, offset), read)
            if out is not None:
                self._count("remote_fetch_bytes", sum(map(len, out)))
                return out
            # Compaction has removed the rest of it.
            offset = segment.end_offset
            segment = _holding(find, offset)
        return []

    def _again_if_gone(
        self,
        segment: RemoteSegment,
        find: Callable[[], RemoteSegment | None],
        task: Callable[[RemoteSegment], _Result],
    ) -> tuple[_Result, RemoteSegment]:
        """What `task` returns, and of which segment: when its object is gone, of the one that
        `find` gives then."""
        try:
            return self._checked(segment, task), segment
        except ObjectNotFoundError:
            self.forget(segment)
            fresh = find()
            if fresh is None or fresh.segment_id == segment.segment_id:
                raise
        return self._checked(fresh, task), fresh

    def _checked(self, segment: RemoteSegment, task: Callable[[RemoteSegment], _Result]) -> _Result:
        """What `task` returns.  Where it finds damage the segment's chunks are dropped, once in a
        while: it may have happened on the way, and an object that was restored is to be seen."""
        try:
            return task(segment)
        except CorruptObjectError:
            now = time.monotonic()
            with self._counted:
                known = self._damaged
                news = now >= known.get(segment.segment_id, -DAMAGE_KEPT_S) + DAMAGE_KEPT_S
                if news:
                    if len(known) >= _MOST_DAMAGED:
                        known.clear()
                    known[segment.segment_id] = now
            if news:
                self._chunks.forget(segment.segment_id)
            raise

    def _read_one(
        self,
        find: Find,
        offset: int,
        max_bytes: int,
        at_least_one: bool,
        dense_from: int,
        segment: RemoteSegment,
    ) -> list[memoryview] | None:
        """None when nothing is left in the segment."""
        walk = self._walk(segment, offset, dense_from)
        log = (segment.topic_id, segment.partition)
        first, last = (
            min(at, segment.size - 1) // CHUNK_BYTES
            for at in (walk.position, walk.position + max(max_bytes, 1) - 1)
        )
        depth = self._read_ahead.depth(log, offset)
        self._ahead(find, segment, first + 1, last - first + depth)
        if walk.find(ANY_TIME, offset) is None:
            return None
        out = walk.take(max_bytes, at_least_one=at_least_one)
        if out:
            last = (walk.position - 1) // CHUNK_BYTES
            chunk = (segment.segment_id, last)
            self._read_ahead.ended(log, offset, walk.next_offset, chunk)
        return out

    def _find_time(
        self, find: Find, timestamp_ms: int, start_offset: int, dense_from: int
    ) -> tuple[int, int] | None:
        offset = start_offset
        while (segment := find(offset)) is not None:
            if segment.max_timestamp_ms >= timestamp_ms:
                look = partial(self._find_time_in, timestamp_ms, start_offset, dense_from)
                found, segment = self._again_if_gone(segment, partial(find, offset), look)
                if found is not None:
                    return found
            offset = segment.end_offset
        return None

    def _find_time_in(
        self, timestamp_ms: int, start_offset: int, dense_from: int, segment: RemoteSegment
    ) -> tuple[int, int] | None:
        indexes = self._indexes_of(segment)
        late = max(indexes.offset_before(timestamp_ms), start_offset)
        walk = self._walk(segment, late, dense_from)
        while (batch := walk.find(timestamp_ms, start_offset)) is not None:
            found = first_in_batch(
                walk.batch(),
                batch,
                f"{self._where(segment)} offset {batch.base_offset}",
                timestamp_ms,
                start_offset,
                self._max_plain_batch_bytes,
            )
            if found is not None:
                return found
            walk.skip()
        return None

    def _read_committed(
        self,
        find: Find,
        offset: int,
        max_bytes: int,
        stable: int,
        local_start: int,
        dense_from: int,
    ) -> CommittedRead:
        found: list[memoryview] = []
        end, has_transactions = offset, False
        for buffer in self._read(find, offset, max_bytes, True, dense_from):
            size = 0
            for batch in iterate_batches(buffer, check_crc=False):  # which was checked
                # Only of a log that has lost its local end: a transaction that never ended.
                if batch.base_offset >= stable:
                    break
                size += batch.size
                end = batch.next_offset
                has_transactions |= batch.is_transactional and not batch.is_control
            if size:
                found.append(buffer[:size])
        aborted = self._aborted(find, offset, end, local_start) if has_transactions else []
        return CommittedRead(found, aborted, end)

    def _aborted(
        self, find: Find, start: int, end: int, local_start: int
    ) -> list[AbortedTransaction]:
        """Of the segments from the one that holds `start` on, as far as needed: a transaction may
        end long after its records."""
        found: list[AbortedTransaction] = []
        at = start
        while at < local_start:
            segment = _holding(find, at)
            if segment is None:
                raise CorruptObjectError(
                    f"no remote segment holds offset {at}, where a transaction that has records"
                    f" from offset {start} to {end - 1} may have been aborted",
                    hint="`kdirect remote verify` names what is lost; restore it, or read with"
                    " isolation.level=read_uncommitted",
                )
            if not segment.txn_index_empty:
                (some, is_all), segment = self._again_if_gone(
                    segment,
                    partial(_holding, find, at),
                    lambda segment: self._indexes_of(segment).aborted(start, end),
                )
                found += some
                if is_all:
                    break
            at = segment.end_offset
        return found

    # -- what of an object is here -----------------------------------------------------------------

    def _walk(self, segment: RemoteSegment, offset: int, dense_from: int) -> SegmentWalk:
        return SegmentWalk(
            segment,
            self._indexes_of(segment),
            self._where(segment),
            partial(self._chunk, segment),
            offset,
            dense_from,
        )

    def _indexes_of(self, segment: RemoteSegment) -> SegmentIndexes:
        try:
            return self._indexes.get(segment, lambda: self._get_indexes(segment))
        except FormatError as e:
            raise CorruptObjectError(f"{self._where(segment)}: {e.message}", hint=e.hint) from e

    def _chunk(self, segment: RemoteSegment, number: int) -> Chunk:
        return self._chunks.get(
            (segment.segment_id, number), lambda: self._get_chunk(segment, number)
        )

    def _ahead(self, find: Find, segment: RemoteSegment, first: int, count: int) -> None:
        """Have `count` chunks from `first` on read while somebody else has nothing to do, and the
        rest of them from the next segment."""
        for number in range(first, first + count):
            if number * CHUNK_BYTES >= segment.size:
                rest = partial(self._ahead_next, find, segment, first + count - number)
                self._threads.ahead((segment.segment_id, "next"), rest)
                return
            key = (segment.segment_id, number)
            if key in self._chunks:
                continue
            if not self._chunks.has_room_ahead(CHUNK_BYTES):
                return
            load = partial(self._get_chunk, segment, number)
            if not self._threads.ahead(key, partial(self._chunks.get_ahead, key, load)):
                return

    def _ahead_next(self, find: Find, segment: RemoteSegment, count: int) -> None:
        following = find(segment.end_offset)
        if following is not None:
            position, _ = self._indexes_of(following).locate(segment.end_offset)
            self._ahead(find, following, position // CHUNK_BYTES, count)

    # -- requests ----------------------------------------------------------------------------------

    def _get_chunk(self, segment: RemoteSegment, number: int) -> Chunk:
        position = number * CHUNK_BYTES
        length = min(CHUNK_BYTES, segment.size - position)
        return Chunk(self._get(segment, position, length))

    def _get_indexes(self, segment: RemoteSegment) -> Sections:
        """The tail of an object, by one GET if its place is known, and its indexes."""
        custom = parse_custom_metadata(segment.custom)
        if custom is not None and custom.tail is not None:
            size, wanted = custom.tail.object_bytes, custom.tail.length
        else:
            found = self._store.size(self._key(segment))
            if found is None:
                raise ObjectNotFoundError(
                    f"{self._where(segment)} is not there",
                    hint="it was deleted, or never stored: `kdirect remote verify` tells",
                )
            size, wanted = found, min(found, _GUESSED_TAIL)
        tail = self._get(segment, size - wanted, wanted)
        while (wanted := needs(tail, size)) > len(tail):
            tail = self._get(segment, size - wanted, wanted)
        facts, sections = parse_tail(tail, size)
        require_identity(facts, identity_of(segment, self._cluster_id), segment.base_offset)
        if (facts.log_bytes, facts.end_offset) != (segment.size, segment.end_offset):
            raise CorruptObjectError(
                f"it has {facts.log_bytes} bytes of log up to offset {facts.end_offset}, and its"
                f" metadata says {segment.size} up to {segment.end_offset}",
                hint="`kdirect remote verify` compares all objects with the metadata",
            )
        return sections

    def _get(self, segment: RemoteSegment, position: int, length: int) -> memoryview:
        """One ranged GET."""
        self.throttle.take(length, lambda: self._threads.closed)
        if self._threads.closed:
            raise ClosedError("the reader of remote segments is closed")
        self._count("remote_get_requests", 1)
        try:
            data = memoryview(self._store.get(self._key(segment), position, length)).cast("B")
        except RemoteStorageError as e:
            self._count("remote_get_errors", 1)
            if type(e) is RemoteStorageError:
                self._require_whole(segment, position + length)
            raise
        self._count("remote_get_bytes", len(data))
        return data

    def _require_whole(self, segment: RemoteSegment, end: int) -> None:
        """CorruptObjectError when an object ends before `end`."""
        size = self._store.size(self._key(segment))
        if size is not None and size < end:
            raise CorruptObjectError(
                f"{self._where(segment)} has {size} bytes, and its metadata says at least {end}",
                hint="the object was cut: restore it from a good copy",
            )

    # -- names -------------------------------------------------------------------------------------

    def _key(self, segment: RemoteSegment) -> str:
        return key_of(segment, self._cluster_id)

    def _where(self, segment: RemoteSegment) -> str:
        """The object, for messages."""
        uri = self._store.uri.partition("?")[0].rstrip("/")
        return f"{uri}/{self._key(segment)}"


def _holding(find: Find, offset: int) -> RemoteSegment | None:
    """The segment that holds an offset.  Compaction leaves gaps within segments and never between
    them: what begins later is not what was asked for."""
    found = find(offset)
    return None if found is None or found.base_offset > offset else found


__all__ = ["CommittedRead", "Find", "RemoteReader"]
