"""Which work the threads of a log directory begin next."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from kdirect.broker.room_threads import ROOM_THREADS, RoomThreads
from kdirect.log.urgent import Urgent
from tests.support import wait_until


class Slow:
    """Work that a disk holds until `go`."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.go.wait(60)
        return "slow"


@pytest.fixture
def threads() -> Iterator[RoomThreads]:
    made = RoomThreads("test-room")
    made.fails_over = True
    yield made
    made.shutdown(wait=True)


def fill(threads: RoomThreads) -> list[Slow]:
    """Slow work on all threads that take any."""
    slow = [Slow() for _ in range(ROOM_THREADS)]
    for one in slow:
        threads.submit(one)
    assert all(one.begun.wait(10) for one in slow)
    return slow


def test_a_slow_disk_does_not_hold_up_what_is_urgent(threads: RoomThreads) -> None:
    slow = fill(threads)
    try:
        later = threads.submit(lambda: "later")
        assert threads.submit(Urgent(lambda: "urgent")).result(10) == "urgent"
        assert threads.submit(Urgent(lambda: "again")).result(10) == "again"
        assert not later.done()
        slow[0].go.set()
        assert later.result(10) == "later"
    finally:
        for one in slow:
            one.go.set()


def test_what_is_urgent_takes_one_thread_of_its_own(threads: RoomThreads) -> None:
    """More would take the event loop's turns."""
    slow, first, second = fill(threads), Slow(), threading.Event()
    try:
        threads.submit(Urgent(first))
        assert first.begun.wait(10)
        waits = threads.submit(Urgent(second.set))
        assert not waits.done() and not second.is_set()
        first.go.set()
        waits.result(10)
    finally:
        for one in (*slow, first):
            one.go.set()


def test_what_is_urgent_begins_before_what_waited_longer(threads: RoomThreads) -> None:
    slow, done = fill(threads), []
    first = Slow()
    threads.submit(Urgent(first))
    works = [threads.submit(lambda: done.append("later"))]
    works += [threads.submit(Urgent(lambda: done.append("urgent"))) for _ in range(3)]
    assert first.begun.wait(10)
    first.go.set()
    works[-1].result(10)
    assert done == ["urgent"] * 3
    for one in slow:
        one.go.set()
    for work in works:
        work.result(10)


def test_what_waits_of_one_owner_is_hurried(threads: RoomThreads) -> None:
    slow, ours, theirs = fill(threads), object(), object()
    other = threads.submit(lambda: "other", theirs)
    work = threads.submit(lambda: "work", ours)
    threads.hurry(ours)
    assert work.result(10) == "work" and not other.done()
    for one in slow:
        one.go.set()
    assert other.result(10) == "other"


def test_what_fails_is_its_futures_alone(threads: RoomThreads) -> None:
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 / 0).result(10)
    assert threads.submit(lambda: "goes on").result(10) == "goes on"


def test_the_end_drops_what_has_not_begun() -> None:
    threads = RoomThreads("test-room")
    slow = fill(threads)
    waits = threads.submit(lambda: "never")
    threads.shutdown(wait=False)
    with pytest.raises(CancelledError):
        waits.result(10)
    with pytest.raises(RuntimeError):
        threads.submit(lambda: "too late")
    for one in slow:
        one.go.set()
    threads.shutdown(wait=True)


def names(prefix: str) -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith(prefix)}


def test_a_directory_has_two_threads_while_nothing_is_urgent(
    threads: RoomThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third one was begun where the two had done their work, and were not idle yet."""
    idle = []

    class Late(threading.Semaphore):
        """A pool's count of idle threads, which comes after the work's result."""

        def release(self, n: int = 1) -> None:
            idle.append(n)

    monkeypatch.setattr(threads._pool, "_idle_semaphore", Late(0))
    for number in range(20):
        assert threads.submit(lambda n=number: n).result(10) == number
        wait_until(lambda n=number: len(idle) > n or threads._running == 0, "it is done")
    assert len(names("test-room")) <= ROOM_THREADS


def test_a_broker_that_is_alone_has_no_third_thread() -> None:
    threads = RoomThreads("test-alone")
    slow = fill(threads)
    later, urgent = threads.submit(lambda: "later"), threads.submit(Urgent(lambda: "urgent"))
    try:
        assert len(names("test-alone")) == ROOM_THREADS and not urgent.done()
    finally:
        for one in slow:
            one.go.set()
    assert (urgent.result(10), later.result(10)) == ("urgent", "later")
    assert len(names("test-alone")) == ROOM_THREADS
    threads.shutdown(wait=True)
