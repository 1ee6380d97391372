"""Chunks of remote segments in memory: what is read of a log once is often read again, and what is
read ahead has to lie somewhere.

Owns: which chunks are kept, and that a chunk that several want is fetched once.  It knows no store
and no format.  What it has given out lives as long as somebody holds it, kept or not.

Bounds: the chunks that are kept never have more than `max_bytes`; those that were read ahead and
that nobody has asked for yet have half of it, so that reading ahead for one never throws out what
was read ahead for another.  What was used least recently goes first.
"""

from __future__ import annotations

import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from kdirect.storage.flights import Flights

CHUNK_BYTES = 1 << 20
Key = tuple[uuid.UUID, int]  # segment, number of the chunk in it


class Chunk:
    """Bytes of a log at an address, which is valid as long as the chunk is referenced."""

    __slots__ = ("_buffer", "address", "data")

    def __init__(self, data: Any) -> None:
        from pyarrow import py_buffer  # who has no remote segments never loads it

        self.data = memoryview(data).cast("B").toreadonly()
        self._buffer = py_buffer(self.data)
        self.address = int(self._buffer.address)

    def __len__(self) -> int:
        return len(self.data)


class ChunkCache:
    """Any thread may call; `load` is called on the thread that asks."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._chunks: OrderedDict[Key, Chunk] = OrderedDict()
        self._unread: set[Key] = set()  # read ahead, and not asked for yet
        self._unread_bytes = 0
        self._flights: Flights[Key, Chunk] = Flights()
        self._bytes = 0
        self._hits = 0
        self._misses = 0
        self._ahead = 0
        self._unused = 0

    def __contains__(self, key: Key) -> bool:
        """It is here, or on its way."""
        return key in self._chunks or key in self._flights

    def get(self, key: Key, load: Callable[[], Chunk]) -> Chunk:
        """The chunk; unless it is here or on its way, `load` brings it, whose errors pass."""
        found = self._look(key)
        if found is not None:
            return found
        return self._flights.join(key, lambda: self._load(key, load, ahead=False))

    def get_ahead(self, key: Key, load: Callable[[], Chunk]) -> None:
        """The same for whoever may ask later.  Nothing happens when it is here or on its way, or
        when there is no room for it."""
        if key not in self and self.has_room_ahead(CHUNK_BYTES):
            self._flights.join(key, lambda: self._load(key, load, ahead=True))

    def has_room_ahead(self, size: int) -> bool:
        """May so many bytes more be read ahead?"""
        return self._unread_bytes + size <= self.max_bytes // 2

    def forget(self, segment_id: uuid.UUID) -> None:
        """Keep nothing of a segment."""
        with self._lock:
            for key in [key for key in self._chunks if key[0] == segment_id]:
                self._drop(key)

    def _look(self, key: Key) -> Chunk | None:
        with self._lock:
            found = self._chunks.get(key)
            if found is None:
                self._misses += 1
                return None
            self._hits += 1
            self._chunks.move_to_end(key)
            self._take_from_unread(key, len(found))
            return found

    def _load(self, key: Key, load: Callable[[], Chunk], *, ahead: bool) -> Chunk:
        with self._lock:
            found = self._chunks.get(key)  # another load may have ended meanwhile
        if found is not None:
            return found
        chunk = load()
        with self._lock:
            self._chunks[key] = chunk
            self._bytes += len(chunk)
            if ahead:
                self._ahead += 1
                self._unread.add(key)
                self._unread_bytes += len(chunk)
            while self._bytes > self.max_bytes:
                self._drop(next(iter(self._chunks)))
        return chunk

    def _drop(self, key: Key) -> None:
        chunk = self._chunks.pop(key)
        self._bytes -= len(chunk)
        self._unused += self._take_from_unread(key, len(chunk))

    def _take_from_unread(self, key: Key, size: int) -> bool:
        if key not in self._unread:
            return False
        self._unread.remove(key)
        self._unread_bytes -= size
        return True

    def statistics(self) -> dict[str, int]:
        with self._lock:
            return {
                "remote_chunk_hits": self._hits,
                "remote_chunk_misses": self._misses,
                "remote_chunk_bytes": self._bytes,
                "remote_chunks_ahead": self._ahead,
                "remote_chunks_unused": self._unused,
            }
