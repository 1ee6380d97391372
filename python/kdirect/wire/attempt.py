"""A call that may wait long for a broker or a store, made where nobody waits for it.

Owns: the threads of these calls.  When a client loses a broker, each attempt to reach it again runs
this way.  Meanwhile a consumer reads from other brokers, and `produce`, `poll` and the producer's
own thread, which share one lock, go on.  So are the GETs of a reader of remote storage, many a
second.  Made by `Environment.spawn`.

A call has a thread to itself while it runs, so one that hangs holds up no other.  Then the thread
waits for the next call for a while: to start one takes as long as a GET of a fast store, and who
starts it waits until it has begun.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

IDLE_S = 1.0  # that a thread waits for its next call


class Attempt(Generic[T]):
    """Begins the call at once.  Once it is `done`, `result` returns what the call returned, or
    raises what it raised.  Thread-safe."""

    __slots__ = ("_call", "_error", "_over", "_value", "done")

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        # Held until the call is over.  An Event would do, and is several objects and calls.
        self._over = threading.Lock()
        self._over.acquire()
        self._value: list[T] = []
        self._error: BaseException | None = None
        self.done = False
        _run(self._make)

    def _make(self) -> None:
        call, self._call = self._call, None
        assert call is not None
        try:
            self._value.append(call())
        except BaseException as e:
            self._error = e
        finally:
            self.done = True
            self._over.release()

    def wait(self, seconds: float) -> bool:
        """Wait until the call is done, for so many seconds at most; whether it is."""
        if not self.done and self._over.acquire(timeout=max(0.0, seconds)):
            self._over.release()
        return self.done

    def result(self) -> T:
        """What the call returned; raises what it raised.  Only when it is done."""
        if self._error is not None:
            raise self._error
        return self._value[0]


class _Thread:
    """One thread: its first task, then what it is given while it waits."""

    __slots__ = ("_task", "_wake")

    def __init__(self, task: Callable[[], None]) -> None:
        self._task: Callable[[], None] | None = task
        self._wake = threading.Lock()
        self._wake.acquire()
        threading.Thread(target=self._run, name="kdirect-attempt", daemon=True).start()

    def give(self, task: Callable[[], None]) -> None:
        """The next one; only to a thread that was taken out of those that wait."""
        self._task = task
        self._wake.release()

    def _run(self) -> None:
        while (task := self._task) is not None:
            self._task = None
            task()
            del task  # what it has brought is not kept here
            waiting = _waiting
            waiting.append(self)
            if self._wake.acquire(timeout=IDLE_S):
                continue
            try:
                waiting.remove(self)
            except ValueError:
                self._wake.acquire()  # it was taken out just now


# The one that came last is given the next task: the others may end.  Each of the three things that
# are done to a list here is one step for all threads.
_waiting: list[_Thread] = []


def _run(task: Callable[[], None]) -> None:
    try:
        thread = _waiting.pop()
    except IndexError:
        _Thread(task)
    else:
        thread.give(task)


def _forget() -> None:
    """A child of this process has none of its threads."""
    global _waiting
    _waiting = []


os.register_at_fork(after_in_child=_forget)
