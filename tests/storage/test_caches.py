"""What is kept in memory: one load for all who wait, the bound, and what was read ahead."""

from __future__ import annotations

import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from kdirect.errors import ClosedError
from kdirect.storage.chunk_cache import CHUNK_BYTES, Chunk, ChunkCache
from kdirect.storage.read_ahead import ReadAhead
from kdirect.storage.reader_threads import ReaderThreads

ID = uuid.UUID(int=1)


def chunk(n: int = CHUNK_BYTES) -> Chunk:
    return Chunk(bytes(n))


def test_many_who_want_one_chunk() -> None:
    cache = ChunkCache(8 * CHUNK_BYTES)
    loads: list[int] = []
    asked = threading.Barrier(8)

    def load() -> Chunk:
        loads.append(1)
        time.sleep(0.1)
        if len(loads) == 1:
            raise ValueError("the first load fails")
        return chunk()

    def ask(_: int) -> object:
        asked.wait(10)
        try:
            return cache.get((ID, 0), load)
        except ValueError as e:
            return e

    with ThreadPoolExecutor(8) as pool:
        failed = list(pool.map(ask, range(8)))
        assert len(loads) == 1 and len({id(e) for e in failed}) == 1
        found = list(pool.map(ask, range(8)))
    assert len(loads) == 2 and len({id(c) for c in found}) == 1
    assert isinstance(found[0], Chunk)


def test_the_bound_and_its_order() -> None:
    cache = ChunkCache(3 * CHUNK_BYTES)
    for i in (0, 1, 2, 0, 3):  # 1 is the one that was used least recently
        cache.get((ID, i), chunk)
    assert [(ID, i) in cache for i in range(4)] == [True, False, True, True]
    held = cache.get((ID, 0), chunk)
    cache.forget(ID)
    assert cache.statistics()["remote_chunk_bytes"] == 0 and len(held.data) == CHUNK_BYTES
    small = ChunkCache(CHUNK_BYTES - 1)
    assert len(small.get((ID, 0), chunk)) == CHUNK_BYTES
    assert small.statistics()["remote_chunk_bytes"] == 0


def test_reading_ahead_has_half_of_it() -> None:
    cache = ChunkCache(8 * CHUNK_BYTES)
    for i in range(10):
        cache.get_ahead((ID, i), chunk)
    assert [i for i in range(10) if (ID, i) in cache] == [0, 1, 2, 3]
    cache.get((ID, 0), chunk)
    for i in range(10):
        cache.get_ahead((ID, i), chunk)
    assert [i for i in range(10) if (ID, i) in cache] == [0, 1, 2, 3, 4]
    for i in range(100, 108):
        cache.get((ID, i), chunk)
    counts = cache.statistics()
    assert counts["remote_chunks_ahead"] == 5 and counts["remote_chunks_unused"] == 4
    assert cache.has_room_ahead(4 * CHUNK_BYTES)


def test_how_far_ahead() -> None:
    ahead = ReadAhead(remembered=100)
    assert ahead.depth("t-0", 0) == 0
    depths, offset = [], 0
    for n in (0, 0, 1, 1, 2, 3, 4, 5):
        depths.append(ahead.depth("t-0", offset))
        ahead.ended("t-0", offset, offset + 10, ("segment", n))
        offset += 10
    assert depths == [0, 1, 1, 2, 2, 4, 8, 8]
    assert ahead.depth("t-1", offset) == ahead.depth("t-0", offset + 1) == 0
    assert ahead.depth("t-0", 50) == 4  # asked once more
    for i in range(100):
        ahead.ended("t-2", i, i + 1, ("segment", 0))
    assert ahead.depth("t-0", offset) == 0


def test_work_ahead_leaves_a_thread_and_is_dropped() -> None:
    threads = ReaderThreads(3, 4, name="test")
    go = threading.Event()
    begun: list[int] = []

    def work(i: int) -> None:
        begun.append(i)
        go.wait(30)

    taken = [threads.ahead(i, lambda i=i: work(i)) for i in range(4)]
    assert all(taken)
    deadline = time.monotonic() + 10
    while len(begun) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    taken = [threads.ahead(i, lambda i=i: work(i)) for i in range(4, 9)]
    assert taken == [True, True, False, False, False]
    assert threads.submit(lambda: "at once").result(10) == "at once"
    assert begun == [0, 1]
    cancelled = threads.submit(lambda: go.wait(30))
    waiting = threads.submit(lambda: "later")
    waiting.cancel()
    go.set()
    assert cancelled.result(10)
    while len(begun) < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert begun == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 // 0).result(10)
    threads.ahead("fails", lambda: 1 // 0)
    assert threads.submit(lambda: "goes on").result(10) == "goes on"
    threads.close()
    with pytest.raises(ClosedError):
        threads.submit(lambda: None)
    assert not threads.ahead(1, lambda: None)
