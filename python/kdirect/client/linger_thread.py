"""The thread of a producer, which sends what lingers and takes in answers.

Owns: when the thread looks, and whether it holds the producer.  What may not enter: what a look
does (`Producer._work`).  The thread ends with its producer: it has a weak reference to it, and a
strong one only while there are records not delivered, which are sent though nobody else may have
the producer any longer.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Any

from kdirect.errors import KdirectError

log = logging.getLogger("kdirect.client")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.0005, 0.01  # between two looks at what is under way
IDLE_S = 60.0  # most between two looks whether the producer is still there


def send_what_lingers(producer: weakref.ref[Any], wake: threading.Event) -> None:
    """The thread's work; `wake` is set when there is something to do, and when the producer is
    gone."""
    pause = FIRST_PAUSE_S
    while True:
        p = producer()
        if p is None or p._closed:
            return
        try:
            wait = p._work(pause)
        except KdirectError as e:
            # There is no way to a partition now: its records wait for their delivery timeout.
            log.info("%s", e)
            wait = LONGEST_PAUSE_S
        p._resolve_futures()
        pause = FIRST_PAUSE_S if wait is None else min(2 * pause, LONGEST_PAUSE_S)
        if wait is None:
            del p  # nothing is under way: the producer may go
            wake.wait(IDLE_S)
        else:
            wake.wait(wait)
        wake.clear()
