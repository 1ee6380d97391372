"""Locks on files, held by a process for as long as it lives or until it closes them.

Owns: how a lock is taken, and the two rules that make it safe.  A lock counts only while its path
still names the file that is locked: whoever removes a directory holds the lock of it, and another
process that waited for that lock must not believe that it has the new one.  And a child made by
fork holds nothing: its copies of the descriptors are closed there, so that the lock ends with the
process that took it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import weakref
from pathlib import Path

WAIT_S = 0.05

_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


class FileLock:
    """The lock of the file `path`, which is made where it is missing: exclusive, or `shared` with
    any number of others that share it.  An exclusive one writes the process id into the file.

    Waits up to `timeout_s` for processes that hold it; BlockingIOError then.  Other OSErrors where
    the file cannot be made; a symbolic link is one of them."""

    def __init__(self, path: Path, *, shared: bool = False, timeout_s: float = 0.0) -> None:
        deadline = time.monotonic() + timeout_s
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        self._fd = -1
        while self._fd < 0:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(path, flags, 0o600)
            try:
                fcntl.flock(fd, kind | fcntl.LOCK_NB)
                if _is_at(fd, path):
                    self._fd = fd
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(WAIT_S)
            finally:
                if self._fd < 0:
                    os.close(fd)
        _held.add(self)
        if not shared:
            # Only messages need it: a full file system is no reason not to hold the lock.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Let others have it.  The file stays."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def holder_of(path: Path) -> str:
    """The process id that the holder of an exclusive lock wrote, or "unknown"."""
    try:
        return path.read_text(errors="replace").strip()[:20] or "unknown"
    except OSError:
        return "unknown"


def _is_at(fd: int, path: Path) -> bool:
    """Is this still the file at `path`?"""
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(fd))


def _after_fork_in_child() -> None:
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
