"""What an error of file work says of the log directory in which it happened.

A directory has *failed* when its disk does not answer any more, was mounted read-only, or is gone:
nothing can be written there until people have mended it.  It is *full* when there is no room, which
may pass.  Everything else (no file descriptors, a damaged record) says nothing of the directory.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import uuid
from pathlib import Path

from kdirect.errors import StorageFullError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_FAILED = frozenset(
    {
        errno.EIO,
        errno.EROFS,
        errno.ENXIO,
        errno.ENODEV,
        errno.ESTALE,
        errno.EUCLEAN,
        errno.EREMOTEIO,
        errno.ENOTDIR,
    }
)
_PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN})


class Trouble(enum.Enum):
    """See the module."""

    NONE = "nothing is known to be wrong with the directory"
    FULL = "there is no room"
    FAILED = "the directory cannot be used any more"


def trouble_of(error: BaseException, directory: Path) -> Trouble:
    """What is wrong with a log directory after this error of work on its files.  Where the error
    does not say, it is tried out."""
    if is_full(error):
        return Trouble.FULL
    found = _system_error(error)
    if found is None or found.errno is None or found.errno in _PASSING:
        return Trouble.NONE
    if found.errno in _FAILED:
        return Trouble.FAILED
    return try_out(directory)


def is_full(error: BaseException | None) -> bool:
    """Was there no room?  It touches no disk."""
    if error is None or isinstance(error, StorageFullError):
        return error is not None
    found = _system_error(error)
    return found is not None and found.errno in _FULL


def try_out(directory: Path) -> Trouble:
    """Can a file be made in the directory, and written to disk?"""
    path = directory / f".{uuid.uuid4().hex}.tmp"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, b"x")
            os.fsync(fd)
        finally:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(path)
    except OSError as e:
        if e.errno in _PASSING:
            return Trouble.NONE
        return Trouble.FULL if e.errno in _FULL else Trouble.FAILED
    return Trouble.NONE


def _system_error(error: BaseException) -> OSError | None:
    """The error of a system call from which this one came."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.errno is not None:
            return found
        found = found.__cause__
    return None
