"""Huge pages (2 MiB) for the files of a tmpfs.

Whoever reads a file by read() or by a mapping walks its pages; with pages of 4 KiB that takes as
long as the copy of their bytes.  So segments and objects that lie on a tmpfs get huge ones.
"""

from libc.stdint cimport int64_t

cdef extern from "huge_map.h" nogil:
    int kd_allocate_huge(int fd, size_t length)


def allocate_huge(int fd, int64_t length):
    """Make a file on a tmpfs at least `length` bytes long, and give so much of it huge pages as far
    as they are to be had, also where the file system is not mounted for them (Linux 6.1 and later).
    0, or an errno: then there are small pages or holes.  Never more than an attempt:
    `os.posix_fallocate`, or whoever writes, sees to the rest.  The descriptor reads and writes."""
    cdef int rc
    with nogil:
        rc = kd_allocate_huge(fd, <size_t> length)
    return rc
