"""One version of kdirect in all processes of a query.

Law: what one process pickles and another one reads (readers and writers), and what the JVM half and
the Python half say to each other, is no format that versions agree on.  So both sides compare
versions before anything else is read, and an error names both.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

import kdirect
from kdirect.errors import VersionMismatchError

JAR = "KDIRECT_JAR_VERSION"  # set by the shim for the Python processes that it starts
REMEDY = (
    "install the same version on every host, or let one jar carry it to all of them (docs/spark.md,"
    " Delivery)"
)


def check_jar() -> None:
    """Raise VersionMismatchError if the shim that started this process has another version."""
    given = os.environ.get(JAR, kdirect.__version__)
    if given != kdirect.__version__:
        _refuse(f"the shim's jar is of kdirect {given}, but {_this()}")


class SameVersion:
    """A mixin for what is pickled on the driver and used in tasks: a process with another version
    refuses it with a VersionMismatchError.  The content is pickled by itself, so that the version
    is compared before any class is looked up that the other version may not have."""

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _open, (kdirect.__version__, pickle.dumps((type(self), vars(self))))


def _open(version: str, packed: bytes) -> Any:
    if version != kdirect.__version__:
        _refuse(f"the query was planned by kdirect {version}, but {_this()}")
    cls, state = pickle.loads(packed)
    out = cls.__new__(cls)
    vars(out).update(state)
    return out


def _this() -> str:
    place = Path(str(kdirect.__file__)).parent.parent
    return f"{sys.executable} on {socket.gethostname()} has kdirect {kdirect.__version__} ({place})"


def _refuse(what: str) -> NoReturn:
    from kdirect_spark.clear_errors import hide_traceback

    e = VersionMismatchError(what, hint=REMEDY)
    hide_traceback(e)
    raise e
