"""What a Spark worker process keeps from task to task.

Law: all state belongs to one process id.  Spark forks its workers, so nothing is opened at import
and nothing of a parent process is used.  `kdirect.client.session.connect` caches the connections.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
from collections.abc import Iterable
from typing import Any

from kdirect.errors import KdirectError

log = logging.getLogger("kdirect_spark")

# Spark's daemon runs gc.collect() after every task, which takes 45 ms for the objects of pyspark's
# and pyarrow's modules.  The collector skips frozen objects.  Freezing is repeated in the first
# tasks, which still make what is kept, and after a task that has imported more: a process that has
# read may write next.
SETTLING_TASKS = 4

_tasks = 0
_modules = 0
_pid = 0
_lock = threading.Lock()
_producers: dict[tuple, Any] = {}
_sessions: dict[tuple, Any] = {}
_told: set[tuple[tuple[str | None, ...], str]] = set()


def settle() -> None:
    """Keep Spark's garbage collections cheap.  Called at the end of each task, and of other work
    that Spark has done by a process of its own, again and again."""
    global _tasks, _modules
    _own_process()
    if _tasks < SETTLING_TASKS or len(sys.modules) > _modules:
        _tasks, _modules = _tasks + 1, len(sys.modules)
        gc.freeze()


def tell_once(warnings: Iterable[str], about: tuple[str | None, ...] = ()) -> None:
    """Log these once in a process for each query that they are `about`: Spark makes the writer of a
    stream again for each micro-batch, in a process that it keeps, also for other queries."""
    with _lock:
        _own_process()
        new = [text for text in warnings if (about, text) not in _told]
        _told.update((about, text) for text in new)
    for text in new:
        log.warning("%s", text)


def session(settings: dict[str, Any]) -> Any:
    """The session of this process for `settings`."""
    # Imported at first use: Spark imports this package in every session to list its formats.
    from kdirect.client.session import connect

    return connect(settings)


def keep_session(settings: dict[str, Any]) -> None:
    """Keep the connections of `settings` open from task to task, whoever uses them."""
    key = _key(settings)
    with _lock:
        _own_process()
        if key not in _sessions:
            _sessions[key] = session(settings)


def producer(settings: dict[str, Any]) -> Any:
    """The producer of this process for `settings`; it is kept across tasks."""
    key = _key(settings)
    with _lock:
        _own_process()
        found = _producers.get(key)
        if found is None:
            found = _producers[key] = session(settings).producer()
        return found


def drop_producer(settings: dict[str, Any]) -> None:
    """Drop the producer after a failure, with every record that it still holds."""
    with _lock:
        found = _producers.pop(_key(settings), None) if _pid == os.getpid() else None
    if found is not None:
        try:
            found.abort()
        except KdirectError as e:
            log.debug("giving up a producer after a failure: %s", e)


def _own_process() -> None:
    global _pid, _tasks, _modules
    if _pid != os.getpid():
        _pid, _tasks, _modules = os.getpid(), 0, 0
        _producers.clear()
        _sessions.clear()
        _told.clear()


def _key(settings: dict[str, Any]) -> tuple:
    return tuple(
        sorted(
            (name, tuple(value) if isinstance(value, list) else value)
            for name, value in settings.items()
        )
    )
