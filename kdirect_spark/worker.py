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
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from kdirect.errors import KdirectError

log = logging.getLogger("kdirect_spark")

# Spark's daemon runs gc.collect() after every task, which takes 45 ms for the objects of pyspark's
# and pyarrow's modules.  The collector skips frozen objects.  Freezing is repeated in the first
# tasks, which still make what is kept, and after a task that has imported more: a process that has
# read may write next.
SETTLING_TASKS = 4

# Spark keeps a worker as long as its executor.  Of all brokers and settings that its tasks have
# had, so many stay connected, for reading and for writing each: those that were used last.
MOST_KEPT = 16

_tasks = 0
_modules = 0
_pid = 0
_lock = threading.Lock()
_producers: OrderedDict[tuple, Any] = OrderedDict()  # those used last stand last
_sessions: OrderedDict[tuple, Any] = OrderedDict()
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
        _sessions.move_to_end(key)
        old = _oldest(_sessions)
    if old is not None:
        old.close()


def producer(settings: dict[str, Any]) -> Any:
    """The producer of this process for `settings`; it is kept for the tasks that follow."""
    key = _key(settings)
    with _lock:
        _own_process()
        found = _producers.get(key)
        if found is None:
            found = _producers[key] = session(settings).producer()
        _producers.move_to_end(key)
        old = _oldest(_producers)
    if old is not None:  # a task that has ended has flushed it, and has no use for the rest
        _give_up(old)
    return found


def drop_producer(settings: dict[str, Any]) -> None:
    """Drop the producer after a failure, with every record that it still holds."""
    with _lock:
        found = _producers.pop(_key(settings), None) if _pid == os.getpid() else None
    if found is not None:
        _give_up(found)


def _give_up(producer: Any) -> None:
    try:
        producer.abort()
    except KdirectError as e:
        log.debug("giving up a producer: %s", e)


def _oldest(kept: OrderedDict[tuple, Any]) -> Any:
    """What is to go, and no longer among those that are `kept`; None where they are few."""
    return kept.popitem(last=False)[1] if len(kept) > MOST_KEPT else None


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
