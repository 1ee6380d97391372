"""How the coordinator tells an executor that hangs from one that has much to do.

Owns: when an executor says that it goes on, and which executors have said nothing, or nothing new,
for too long.  What may not enter: how that is sent, and what is done about it.

The thread that does the work says it itself: no other thread could know that this one hangs.  It
counts *steps* (blocks read, pages merged, parts of a state that were restored, put out or written)
and looks at the clock at each of them.  An executor that waits for its peers wakes for it.

An executor that owes an answer and says nothing for `stall_timeout` hangs: its process was stopped,
or its thread waits for what never comes.  Its peers wait for it, and say so.  When all of them
speak and none has made a step for half as long again, they wait for each other: all that owe an
answer are held to hang.  Pure; the clock is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

LONGEST_INTERVAL_S = 1.0
SHORTEST_INTERVAL_S = 0.02
A_TIMEOUT = 4  # intervals, at least
# Of the limit, until all are held to hang: longer, so that one that is stopped is found first.
WITHOUT_STEPS = 1.5


def interval_s(stall_timeout_s: float) -> float:
    """How often an executor speaks.  0, for no limit, is as good as a long one."""
    if stall_timeout_s <= 0:
        return LONGEST_INTERVAL_S
    return max(SHORTEST_INTERVAL_S, min(LONGEST_INTERVAL_S, stall_timeout_s / A_TIMEOUT))


class Heart:
    """The executor's side.  `say(steps)` sends; it is called from the thread that calls `step`."""

    def __init__(
        self, say: Callable[[int], None], interval_s: float, clock: Callable[[], float]
    ) -> None:
        self.steps = 0
        self.interval_s = interval_s
        self._say = say
        self._clock = clock
        self._due = clock() + interval_s

    def step(self, steps: int = 1) -> bool:
        """Something was done: so many steps, by this thread or by one that writes for it.  Was it
        time to say so?"""
        self.steps += steps
        return self.wait()

    def wait(self) -> bool:
        """Nothing could be done, and the thread is awake.  Was it time to say so?"""
        now = self._clock()
        if now < self._due:
            return False
        self._due = now + self.interval_s
        self._say(self.steps)
        return True

    def end(self) -> None:
        """Say nothing more, and let go of who was called."""
        self._say = _nothing


def _nothing(steps: int) -> None:
    pass


class Watch:
    """The coordinator's side: `heard` at every message of an executor, `stalled` at every turn."""

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._said_at: dict[int, float] = {}
        self._steps: dict[int, int] = {}
        self._work: object = None
        self._began_at = self._stepped_at = self._looked_at = clock()

    def heard(self, executor: int, steps: int | None = None) -> None:
        """An executor said how many steps it has made; None: something else, which is a step."""
        now = self._clock()
        self._said_at[executor] = now
        if steps is None or steps != self._steps.get(executor):
            self._stepped_at = now
        if steps is not None:
            self._steps[executor] = steps

    def stalled(self, work: object, owing: Collection[int]) -> dict[int, str]:
        """The executors of `owing`, which owe an answer, that hang, and why.  `work` is what they
        were told to do: another value, or nobody who owes an answer, is a new beginning."""
        now, limit = self._clock(), self._timeout_s
        # This thread was elsewhere: what was said meanwhile has not been heard yet.
        away = now - self._looked_at > limit / 2
        self._looked_at = now
        if work != self._work or not owing or away or limit <= 0:
            self._work = work
            self._began_at = now
            return {}
        found = {
            executor: f"said nothing for {limit:g} s"
            for executor in owing
            if now - max(self._began_at, self._said_at.get(executor, 0)) > limit
        }
        last = WITHOUT_STEPS * limit
        if not found and now - max(self._began_at, self._stepped_at) > last:
            found = dict.fromkeys(owing, f"made no step for {last:g} s, nor did the others")
        if found:
            self._began_at = now
        return found
