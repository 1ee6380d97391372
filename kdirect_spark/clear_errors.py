"""How errors of the connector look in Spark: the sentence first, and no traceback above it; and how
Spark's Python processes end without one.

Law: Spark writes the traceback of a Python process into its own error, and our sentence would stand
last, below eight lines or more.  Spark leaves the traceback away where SPARK_HIDE_TRACEBACK is set
while the error is written (its `spark.sql.execution.pyspark.udf.hideTraceback.enabled`).  It is set
here just when an error of kdirect leaves the connector.  A worker that has written an error ends,
so no other error is affected.  Errors that are not kdirect's are bugs, and keep their traceback.
`KDIRECT_TRACEBACK=1` in the environment of the workers keeps all of them.

Spark ends its workers by closing their connection: those that wait for a task, when it stops; and
those whose rows it has enough of (`limit`).  A worker that still has something to say to it gets a
BrokenPipeError, at once where the connection is a Unix socket, and Spark's daemon prints the
traceback, although nothing went wrong.  In the workers that import this module it does not.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NoReturn, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from kdirect.errors import KdirectError

try:
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow as _Available
except ImportError:  # pyspark 4.0 and 4.1

    class _Available:  # type: ignore[no-redef]
        pass


log = logging.getLogger("kdirect_spark")

HIDE = "SPARK_HIDE_TRACEBACK"
KEEP = "KDIRECT_TRACEBACK"

# What Spark calls: of a data source, of a batch's reader, of a stream's, of writers.
_ENTRIES = (
    *("schema", "reader", "streamReader", "writer", "streamWriter"),
    *("partitions", "read", "pushFilters"),
    *("initialOffset", "latestOffset", "getDefaultReadLimit", "reportLatestOffset"),
    *("prepareForTriggerAvailableNow", "write", "commit", "abort"),
)

T = TypeVar("T")


def sentence_first(cls: type[T]) -> type[T]:
    """A class decorator: what Spark calls of this class says an error's sentence first.  What the
    class has from pyspark stays as it is, because pyspark asks what is overridden."""
    for name in _ENTRIES:
        for owner in cls.__mro__:
            found = vars(owner).get(name)
            if found is not None:
                if callable(found) and not owner.__module__.startswith("pyspark"):
                    setattr(cls, name, guarded(found))
                break
    return cls


def guarded(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that Spark calls, which says an error's sentence first."""
    if getattr(call, "says_sentence_first", False):
        return call

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            out = call(*args, **kwargs)
        except KdirectError as e:
            hide_traceback(e)
            raise
        return _guarded_items(out) if isinstance(out, Iterator) else out

    run.says_sentence_first = True  # type: ignore[attr-defined]
    return run


def _guarded_items(items: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from items
    except KdirectError as e:
        hide_traceback(e)
        raise


def hide_traceback(e: KdirectError) -> None:
    """To be called when an error of ours leaves the connector."""
    log.debug("this error ends a process of the connector", exc_info=e)
    if is_spark_worker() and not os.environ.get(KEEP):
        os.environ[HIDE] = "1"


class _TracebacksOfDaemon(ModuleType):
    """The module `traceback` for Spark's daemon: the whole of it, but for one error that it would
    print."""

    def __init__(self) -> None:
        super().__init__(traceback.__name__, traceback.__doc__)

    def __getattr__(self, name: str) -> Any:
        return getattr(traceback, name)

    def print_exc(self, *args: Any, **kwargs: Any) -> None:
        if os.environ.get(KEEP) or not _is_closed_by_spark(sys.exc_info()[1]):
            traceback.print_exc(*args, **kwargs)


def _is_closed_by_spark(error: BaseException | None) -> bool:
    """Does a worker end because of its closed connection alone?  An error of its own, which it
    could not tell any more, is in the context of the one that the connection raised."""
    return isinstance(error, BrokenPipeError) and (
        error.__context__ is None or _is_closed_by_spark(error.__context__)
    )


def end_quietly() -> None:
    """Let this process, if it is a worker of Spark's daemon, end without a traceback when Spark has
    closed its connection.  What the daemon prints is the last thing that a worker does, and only
    the daemon's own name of the module `traceback` is changed."""
    daemon = sys.modules.get("__main__")
    spec = getattr(daemon, "__spec__", None)
    if spec is not None and spec.name == "pyspark_kdirect.daemon":
        daemon = sys.modules.get("pyspark.daemon")  # which that program runs
    elif spec is None or spec.name != "pyspark.daemon":
        return
    if hasattr(daemon, "traceback"):
        daemon.traceback = _TracebacksOfDaemon()  # type: ignore[union-attr]


end_quietly()


def is_spark_worker() -> bool:
    """Whether this is a Python process that Spark has started, and not a program of the user's."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and str(spec.name).startswith(("pyspark.", "pyspark_kdirect."))


def is_kept_planner() -> bool:
    """Whether this process plans for further queries: nothing has gone wrong with this one."""
    return "pyspark_kdirect.planner" in sys.argv and sys.exc_info()[0] is None


def leave_with_spark() -> None:
    """End this process at once if it is a planner whose query was stopped: Spark has closed the
    connection, and what pyspark would still write to it ends in the traceback of a BrokenPipeError
    on a run that went well.  To be called last in a stream reader's stop()."""
    if isinstance(sys.exc_info()[1], EOFError) and is_spark_worker():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class RefusedStreamReader(DataSourceStreamReader, _Available):
    """A stream reader of which every call raises one error.

    When streamReader() raises, pyspark closes a reader that it does not have, and its user reads of
    an UnboundLocalError."""

    def __init__(self, error: KdirectError) -> None:
        self._error = error

    def _raise(self) -> NoReturn:
        hide_traceback(self._error)
        raise self._error

    def initialOffset(self) -> dict:
        self._raise()

    def latestOffset(self, *_: Any) -> dict:
        self._raise()

    def getDefaultReadLimit(self) -> Any:
        self._raise()

    def prepareForTriggerAvailableNow(self) -> None:
        self._raise()

    def reportLatestOffset(self) -> dict | None:
        self._raise()

    def partitions(self, start: dict, end: dict) -> list[InputPartition]:
        self._raise()

    def read(self, partition: InputPartition) -> Iterator[Any]:
        self._raise()

    def stop(self) -> None:
        """Nothing was opened."""
