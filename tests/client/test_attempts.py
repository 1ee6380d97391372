"""Calls that are made where nobody waits for them, and their threads."""

from __future__ import annotations

import os
import threading
import time

import pytest

from kdirect.wire.attempt import Attempt


def ended(attempt):
    assert attempt.wait(10.0)
    return attempt.result()


def test_a_thread_takes_one_call_after_the_other():
    threads = set()
    for _ in range(50):
        threads.add(ended(Attempt(threading.current_thread)))
        time.sleep(0.002)  # it waits for the next by now
    assert len(threads) < 10


def test_a_call_that_hangs_holds_up_no_other():
    release = threading.Event()
    hanging = [Attempt(release.wait) for _ in range(5)]
    assert [ended(Attempt(lambda i=i: i)) for i in range(20)] == list(range(20))
    assert not any(attempt.done for attempt in hanging)
    began = time.monotonic()
    assert not hanging[0].wait(0.05) and time.monotonic() - began >= 0.05
    assert not hanging[0].wait(-1.0)
    release.set()
    assert [ended(attempt) for attempt in hanging] == [True] * 5


def test_what_a_call_raises_is_raised_by_its_result():
    def fail():
        raise ValueError("so it is")

    attempt = Attempt(fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="so it is"):
            ended(attempt)
    assert ended(Attempt(lambda: 7)) == 7


def test_threads_end_when_nothing_is_to_be_done():
    def threads():
        return [t for t in threading.enumerate() if t.name == "kdirect-attempt"]

    both = threading.Barrier(2)
    attempts = [Attempt(both.wait) for _ in range(2)]
    assert sorted(ended(attempt) for attempt in attempts) == [0, 1]
    assert len(threads()) >= 2
    deadline = time.monotonic() + 20
    while threads():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_several_may_wait_for_one():
    go = threading.Event()
    attempt = Attempt(go.wait)
    found = []
    waiting = [threading.Thread(target=lambda: found.append(attempt.wait(10.0))) for _ in range(4)]
    for thread in waiting:
        thread.start()
    go.set()
    for thread in waiting:
        thread.join()
    assert found == [True] * 4


def test_calls_from_many_threads_are_all_made_once():
    made = []

    def call_many():
        for _ in range(200):
            ended(Attempt(lambda: made.append(1)))

    callers = [threading.Thread(target=call_many) for _ in range(8)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert len(made) == 1600


def test_a_forked_process_has_threads_of_its_own():
    ended(Attempt(lambda: 1))
    time.sleep(0.01)  # the thread waits for its next call, and is not in the child
    child = os.fork()
    if child == 0:
        os._exit(0 if Attempt(lambda: 7).wait(10.0) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
