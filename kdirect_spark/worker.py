"""What lives in a Spark worker process from task to task.

Law: all state here belongs to one process id; Spark forks its workers, so nothing is opened at
import and nothing of a parent is used.  The sessions themselves are cached by
`kdirect.client.connect`.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from typing import Any

from kdirect.errors import KdirectError

log = logging.getLogger("kdirect_spark")

# Spark's daemon runs gc.collect() after every task, which takes 45 ms over the modules of pyspark
# and pyarrow.  Frozen objects are not looked at.  Repeated in the first tasks, when the last
# modules have been imported.
SETTLING_TASKS = 4

_tasks = 0
_pid = 0
_lock = threading.Lock()
_producers: dict[tuple, Any] = {}


def settle() -> None:
    """Called at the end of a worker's tasks: keeps Spark's collections cheap."""
    global _tasks
    _own_process()
    if _tasks < SETTLING_TASKS:
        _tasks += 1
        gc.freeze()


def session(settings: dict[str, Any]) -> Any:
    """The session of this process for `settings`."""
    # Imported when first needed: Spark imports this package in every session, to see which formats
    # there are.
    from kdirect.client.session import connect

    return connect(settings)


def producer(settings: dict[str, Any]) -> Any:
    """The producer of this process for `settings`, kept across tasks."""
    key = _key(settings)
    with _lock:
        _own_process()
        found = _producers.get(key)
        if found is None:
            found = _producers[key] = session(settings).producer()
        return found


def drop_producer(settings: dict[str, Any]) -> None:
    """Forget the producer after a failure, with everything it may still hold."""
    with _lock:
        found = _producers.pop(_key(settings), None) if _pid == os.getpid() else None
    if found is not None:
        try:
            found.abort()
        except KdirectError as e:
            log.debug("giving up a producer after a failure: %s", e)


def _own_process() -> None:
    global _pid, _tasks
    if _pid != os.getpid():
        _pid, _tasks = os.getpid(), 0
        _producers.clear()


def _key(settings: dict[str, Any]) -> tuple:
    return tuple(
        sorted(
            (name, tuple(value) if isinstance(value, list) else value)
            for name, value in settings.items()
        )
    )
