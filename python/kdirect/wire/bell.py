"""A bell by which one thread wakes another that waits for connections.

Owns: one descriptor.  Whoever waits passes the bell to `connection.wait_for_any`, which hushes it;
a bell that was rung before somebody waits ends that wait at once, so no ring is lost.
"""

from __future__ import annotations

import os
import threading
import weakref


class Bell:
    """`ring` may be called by any thread, also after `close`; the rest by the one that waits.  The
    descriptor is closed, too, when nobody holds the bell any more."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()  # guards the descriptor, whose number may soon be another's
        self._pid = os.getpid()
        self._end = weakref.finalize(self, os.close, self._fd)

    def fileno(self) -> int:
        """Readable once the bell was rung."""
        return self._fd

    def ring(self) -> None:
        with self._lock:
            # A forked child shares the descriptor, and must not wake its parent.
            if self._end.alive and self._pid == os.getpid():
                os.eventfd_write(self._fd, 1)

    def hush(self) -> bool:
        """Was it rung since the last call?  It is silent then."""
        with self._lock:
            try:
                return self._end.alive and os.eventfd_read(self._fd) > 0
            except BlockingIOError:
                return False

    def close(self) -> None:
        with self._lock:
            self._end()
