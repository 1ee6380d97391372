"""Places at which a test ends the broker: ``KDIRECT_FAILPOINT=name``, or ``name:N`` for the Nth.

A process that has the variable set ends with SIGKILL when it comes there; for all others this is
one comparison.
"""

from __future__ import annotations

import os
import signal
import threading

VARIABLE = "KDIRECT_FAILPOINT"

_wanted, _, _number = os.environ.get(VARIABLE, "").partition(":")
_left = int(_number or 1)
_lock = threading.Lock()


def reached(name: str) -> None:
    """The process is at the place of this name."""
    global _left
    if not _wanted or name != _wanted:
        return
    with _lock:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


__all__ = ["VARIABLE", "reached"]
