"""The prefetch thread: order, bound of memory, errors, end."""

from __future__ import annotations

import threading
import time

import pyarrow as pa
import pytest

from kdirect_spark.prefetch import Prefetch, prefetched
from tests.support import wait_until

MIB = 1 << 20


def batch(i, size=MIB):
    return pa.RecordBatch.from_arrays(
        [pa.array([i], pa.int64()), pa.array([bytes(size)], pa.binary())], names=["i", "value"]
    )


def number(b):
    return b.column(0)[0].as_py()


def never_last(_):
    return False


def our_threads():
    return [t for t in threading.enumerate() if t.name == "kdirect-prefetch"]


@pytest.mark.parametrize("limit", [1, 3 * MIB, 1 << 30])
def test_everything_arrives_in_order_whatever_the_bound(limit):
    source = (batch(i) for i in range(20))
    assert [number(b) for b in prefetched(source, limit, never_last)] == list(range(20))
    assert not our_threads()


def test_memory_is_bounded_while_nobody_consumes():
    made = []

    def source():
        for i in range(1000):
            made.append(i)
            yield batch(i)

    ahead = Prefetch(source(), 4 * MIB)
    wait_until(lambda: len(made) >= 4)
    time.sleep(0.05)
    assert len(made) <= 5, (
        "3 whole batches wait (their offsets make them larger than 1 MiB), one is being handed in"
    )
    assert [number(next(ahead)) for _ in range(10)] == list(range(10))
    time.sleep(0.05)
    assert len(made) <= 15
    assert ahead.high_mark_bytes <= 4 * MIB
    ahead.close()
    assert not our_threads()


def test_a_batch_larger_than_the_bound_passes():
    assert [
        number(b) for b in prefetched((batch(i, 3 * MIB) for i in range(4)), MIB, never_last)
    ] == [0, 1, 2, 3]


def test_an_error_comes_after_the_batches_before_it():
    def source():
        yield batch(0, 10)
        yield batch(1, 10)
        raise OSError("the broker left")

    got = []
    with pytest.raises(OSError, match="the broker left"):
        for b in prefetched(source(), MIB, never_last):
            got.append(number(b))
    assert got == [0, 1]
    assert not our_threads()


def test_closing_the_generator_ends_thread_and_source():
    closed = threading.Event()

    def source():
        try:
            for i in range(10**9):
                yield batch(i, 10)
        finally:
            closed.set()

    it = prefetched(source(), MIB, never_last)
    assert number(next(it)) == 0
    it.close()
    assert closed.wait(10)
    assert not our_threads()


def test_a_single_batch_starts_no_thread_and_closes_its_source():
    closed = []

    def source():
        try:
            yield batch(7)
        finally:
            closed.append(True)

    it = prefetched(source(), MIB, lambda b: True)
    assert number(next(it)) == 7
    assert not our_threads()
    assert list(it) == []
    assert closed


def test_the_source_is_driven_by_one_thread_at_a_time():
    running = threading.Lock()

    def source():
        for i in range(200):
            assert running.acquire(blocking=False), "two threads in the source"
            running.release()
            yield batch(i, 10)

    assert len(list(prefetched(source(), 1000, never_last))) == 200
