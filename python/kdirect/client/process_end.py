"""What becomes of the producers of a process when it forks or ends.

Owns: which producers there are.  A child has those of its parent closed, for their queue pairs and
their threads stayed with the parent.  A process that ends waits a moment for records that nobody
flushed.  What may not enter: how a producer closes or flushes.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from kdirect.errors import KdirectError

log = logging.getLogger("kdirect.client")

EXIT_S = 5.0  # how long the end of the process may wait for records that nobody flushed


class Flushable(Protocol):
    """What a producer has for the end of its process."""

    def __len__(self) -> int:
        """Records not delivered yet."""

    def flush(self, timeout: float | None = None) -> int:
        """Wait for them, for so many seconds."""


# Each with what closes it in a forked child; until it is garbage, for a closed one has no records.
_alive: weakref.WeakKeyDictionary[Flushable, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def add(producer: Flushable, forked: Callable[[Any], None]) -> None:
    """`forked(producer)` is called in a child of this process, where it may touch nothing that
    other threads of the parent had a lock of."""
    _alive[producer] = forked


def _forked() -> None:
    for producer, forked in list(_alive.items()):
        forked(producer)
    _alive.clear()


def _at_exit() -> None:
    for producer in list(_alive):
        if len(producer):
            log.warning(
                "the process ends with %d records not delivered: flush or close the producer",
                len(producer),
            )
            try:
                producer.flush(EXIT_S)
            except KdirectError as e:
                log.error("%s", e)


os.register_at_fork(after_in_child=_forked)
atexit.register(_at_exit)
