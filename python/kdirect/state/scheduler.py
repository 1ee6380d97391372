"""Generators as coroutines: reading, sending and merging in one thread (Slash section 5.3).

Owns: who runs next, and when the thread sleeps.  A task is a generator that yields True when it has
done something and goes on, and False when it cannot: it is parked until its next turn.  Every task
gets a turn in each round, so what merges is never further from what reads than one block.  When a
whole round has been in vain the thread sleeps until something comes; it never spins.

What may not enter: what a task does.  Pure but for `sleep`, which is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import TypeAlias

Task: TypeAlias = Generator[bool, None, None]


def run(tasks: Iterable[Task], sleep: Callable[[], None]) -> None:
    """Run all tasks to their ends.  What a task raises ends the others too."""
    left = list(tasks)
    try:
        while left:
            busy = False
            for task in tuple(left):
                try:
                    busy |= next(task)
                except StopIteration:
                    left.remove(task)
                    busy = True
            if not busy:
                sleep()
    finally:
        for task in left:
            task.close()
