"""How far to read ahead of whom.  Pure.

A read that begins where another one ended is a step of a sequence.  The first step asks for one
chunk more than it needs; with every new chunk that the sequence reaches it is twice as many, up to
`DEEPEST`.  Reads here and there ask for nothing.  Who reads is not known, and need not be: two
readers of the same place share what they make the other one find.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

DEEPEST = 8
REMEMBERED = 4096


class _Step(NamedTuple):
    depth: int  # of a read that begins here
    chunk: Hashable  # the last one of the read that ended here


class ReadAhead:
    """Any thread may call."""

    def __init__(self, deepest: int = DEEPEST, remembered: int = REMEMBERED) -> None:
        self._deepest = deepest
        self._remembered = remembered
        self._lock = threading.Lock()
        self._steps: OrderedDict[tuple[Hashable, int], _Step] = OrderedDict()

    def depth(self, log: Hashable, offset: int) -> int:
        """How many chunks to read after those that a read at `offset` needs."""
        with self._lock:
            step = self._steps.get((log, offset))
        return step.depth if step is not None else 0

    def ended(self, log: Hashable, offset: int, next_offset: int, chunk: Hashable) -> None:
        """A read from `offset` on ended before `next_offset`, in `chunk`."""
        with self._lock:
            before = self._steps.get((log, offset))
            depth = 1
            if before is not None:
                depth = before.depth * 2 if before.chunk != chunk else before.depth
            self._steps[log, next_offset] = _Step(min(depth, self._deepest), chunk)
            self._steps.move_to_end((log, next_offset))
            if len(self._steps) > self._remembered:
                self._steps.popitem(last=False)
