"""Work on a log directory's threads that does not wait for others' room.

Fences, truncations and the beginning of an epoch are short, and a failover waits for them; to
allocate a segment takes a slow disk seconds, and its partition alone waits for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Urgent(Generic[T]):
    """`work`, which allocates nothing: a thread is left for it where all others are busy."""

    __slots__ = ("_work",)

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work

    def __call__(self) -> T:
        return self._work()
