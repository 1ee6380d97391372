"""Threads that take turns by a seed, in virtual time.

Owns: `Turns`, which lets one of its threads run at a time, from one `pause` to the next, and
chooses by chance which goes on; `SimulatedThreads`, which puts them in the place of those of
`RemoteLogs`.  Nothing here knows what they do.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from typing import Any

from kdirect.errors import ClosedError
from kdirect.storage.remote_threads import RemoteThreads
from tests.objects.faulty import VirtualClock

_idle: list[_Worker] = []


class Ended(BaseException):
    """The process that the thread belonged to is dead."""


class Life:
    """One process."""

    is_over = False


class _Task:
    def __init__(self, turns: Turns, work: Callable[[], object], life: Life, due_s: float) -> None:
        self.turns = turns
        self.work = work
        self.life = life
        self.due_s = due_s
        self.ready: Callable[[], bool] | None = None
        self.worker: _Worker | None = None
        self.is_done = False


class _Worker:
    """A real thread, which does one task after the other."""

    def __init__(self) -> None:
        self.go = threading.Lock()
        self.go.acquire()
        self.task: _Task
        threading.Thread(target=self._run, name="turns", daemon=True).start()

    def _run(self) -> None:
        while True:
            self.go.acquire()
            task = self.task
            try:
                task.work()
            except Ended:
                pass
            except BaseException as error:
                task.turns.failures.append(error)
            task.is_done = True
            _idle.append(self)
            task.turns.back.release()


class Turns:
    """See the module.  `failures`: what tasks have ended with.  What runs on other threads than
    those of tasks is not paused."""

    def __init__(self, rng: random.Random, clock: VirtualClock) -> None:
        self.rng = rng
        self.clock = clock
        self.failures: list[BaseException] = []
        self.back = threading.Lock()
        self.back.acquire()
        self._tasks: list[_Task] = []
        self._current: _Task | None = None

    def spawn(self, work: Callable[[], object], life: Life, delay_s: float = 0.0) -> None:
        """ClosedError for a process that is dead."""
        if life.is_over:
            raise ClosedError("the broker is dead")
        self._tasks.append(_Task(self, work, life, self.clock.now_s + delay_s))

    def pause(self, seconds: float, ready: Callable[[], bool] | None = None) -> None:
        """Let others go on for so long, or until something is ready."""
        task = self._current
        if task is None:
            return
        if not task.life.is_over:
            task.due_s, task.ready = self.clock.now_s + seconds, ready
            self.back.release()
            assert task.worker is not None
            task.worker.go.acquire()
        if task.life.is_over:
            raise Ended

    @property
    def is_dead(self) -> bool:
        """Does the task that runs belong to a process that is dead?"""
        return self._current is not None and self._current.life.is_over

    def run_until(self, until_s: float) -> None:
        """Let tasks go on until then."""
        while True:
            now = self.clock.now_s
            able = [t for t in self._tasks if t.due_s <= now or (t.ready is not None and t.ready())]
            if able:
                self._resume(self.rng.choice(able))
                continue
            due = min((t.due_s for t in self._tasks), default=until_s)
            if due >= until_s:
                break
            self.clock.now_s = max(due, now)
        self.clock.now_s = max(self.clock.now_s, until_s)

    def end(self, life: Life) -> None:
        """The process dies: each of its threads ends where it is."""
        life.is_over = True
        for task in [t for t in self._tasks if t.life is life]:
            if task.worker is None:
                self._tasks.remove(task)
            else:
                self._resume(task)

    def _resume(self, task: _Task) -> None:
        if task.worker is None:
            task.worker = _idle.pop() if _idle else _Worker()
            task.worker.task = task
        self._current = task
        task.worker.go.release()
        self.back.acquire()
        self._current = None
        if task.is_done:
            self._tasks.remove(task)


class SimulatedThreads(RemoteThreads):
    """Those of one process."""

    def __init__(self, turns: Turns, life: Life, interval_s: float) -> None:
        super().__init__(copiers=1, expirers=1, interval_s=interval_s)
        self._turns = turns
        self._life = life
        self._look: Callable[[Any], object] | None = None

    def clock(self) -> float:
        return self._turns.clock.now_s

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        self._turns.pause(timeout_s, event.is_set)
        return event.is_set()

    def copy(self, work: Callable[[], None]) -> None:
        self._turns.spawn(work, self._life, self._turns.rng.random() * 0.5)

    expire = put = copy

    def start_looking(
        self, look: Callable[[Any], object], all_of: Callable[[], Iterable[Any]]
    ) -> None:
        if self._look is not None:
            return
        self._look = look
        for one in self._wakes:
            self.copy(lambda one=one: self._look_at(one))

        def look_for_ever() -> None:
            while True:
                self._turns.pause(self._interval_s)
                for each in all_of():
                    self.wake(each)

        self._turns.spawn(look_for_ever, self._life)

    def wake(self, one: Any) -> None:
        if one not in self._wakes and not self._life.is_over:
            self._wakes[one] = None
            if self._look is not None:
                self.copy(lambda: self._look_at(one))

    def _look_at(self, one: Any) -> None:
        assert self._look is not None
        del self._wakes[one]
        self._look(one)

    def close(self) -> None:
        pass


__all__ = ["Ended", "Life", "SimulatedThreads", "Turns"]
