"""Memory that is there: for rows that write more than a virtual machine's host has left to it."""

from __future__ import annotations

import contextlib
import mmap


def touch(length: int) -> None:
    """Write to so much memory and free it.  A virtual machine's host takes free memory away within
    seconds and gives it back at a few hundred megabytes a second, which is no property of what is
    measured.

    It is huge pages that are touched, where there are any: the host takes those alone, and files of
    a log get them.  Small pages come out of pieces that it has left, so that to touch them changes
    nothing."""
    with mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as free:
        with contextlib.suppress(OSError):  # a kernel without them
            free.madvise(mmap.MADV_HUGEPAGE)
        for page in range(0, length, mmap.PAGESIZE):
            free[page] = 1
