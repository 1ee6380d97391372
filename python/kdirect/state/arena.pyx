# cython: language_level=3, boundscheck=False
"""The memory of state: one mapped file without pointers, the pages of deltas, and logs in both.

Owns: blocks of a power of two bytes within a mapping (StateMemory), 64 KiB pages that the fabric
reads (PageMemory), and the chains of segments that tables append to (Log).  Nothing here knows what
the bytes mean.

Invariants: a place in a StateMemory is a position, the distance from its start, so another process
that maps the same file reads the same tables.  A block is in use, or in the free list of its size,
or part of a spare stretch, never two of these.  Blocks are reused last in, first out, because
touching a fresh page costs about ten updates of a table.  The file has memory for every block that
is handed out (fallocate), so that a full file system is an error here and not a SIGBUS later.  A
segment never moves: positions stay valid until its log is cleared.  One thread uses a memory.
"""

import bisect
import errno
import mmap
import os

from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport uint8_t, uint32_t, uint64_t, uintptr_t
from posix.mman cimport MAP_FAILED, MAP_SHARED, PROT_READ, PROT_WRITE, munmap
from posix.mman cimport mmap as c_mmap

from kdirect.errors import ConfigError, StateLimitError
from kdirect.state.layout cimport PAGE_HEADER_BYTES, STATE_HEADER_BYTES

cdef enum:
    SMALLEST_LOG = 12
    LARGEST_LOG = 40
    SEGMENT_LARGEST_LOG = 26   # a log grows by doubling segments up to 64 MiB
    LEAST_LIMIT = 1 << 16
    BACKED_STEP = 1 << 22

SMALLEST_BLOCK_LOG = SMALLEST_LOG


def block_log(uint64_t need):
    """The logarithm of the smallest block of at least `need` bytes."""
    return max(SMALLEST_LOG, (need - 1).bit_length()) if need > 1 else SMALLEST_LOG


cdef class StateMemory:
    """Blocks of one mapped file of at most `limit` bytes.

    `StateMemory.open(path, limit)` maps a file (on tmpfs, so that it survives its process), and
    makes it if it does not exist; `StateMemory.anonymous(limit)` has no name and goes with its last
    mapping.  The first STATE_HEADER_BYTES are the header's.  `close()` unmaps: the caller must know
    that no table is used any more.
    """

    def __cinit__(self):
        self.base = NULL
        self._fd = -1

    @staticmethod
    def anonymous(limit, name="kdirect state"):
        """Memory of this process and of those that inherit or receive its descriptor."""
        return _mapped(os.memfd_create(name, os.MFD_CLOEXEC), limit, name)

    @staticmethod
    def open(path, limit):
        """The file at `path`; made if it does not exist.  Its bytes stay what they are: nothing in
        them is used before a catalogue was restored (`restore`)."""
        path = os.fspath(path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return _mapped(fd, limit, path)

    @property
    def address(self):
        return <uintptr_t>self.base

    def __getbuffer__(self, Py_buffer* view, int flags):
        if self.base == NULL:
            raise BufferError("the state memory is closed")
        PyBuffer_FillInfo(view, self, self.base, self.limit, 0, flags)

    cdef uint64_t c_allocate(self, int log) except 0:
        cdef uint64_t position, size = <uint64_t>1 << log
        if log < SMALLEST_LOG or log > LARGEST_LOG:
            raise ValueError(f"no block has 2**{log} bytes")
        if self._free[log]:
            position = self._free[log].pop()
        else:
            position = self._from_spare(size)
            if not position:
                position = self._from_end(size)
        self.allocated += size
        return position

    def allocate(self, int log):
        """The position of a block of 2**log bytes, whose contents are whatever was there."""
        return self.c_allocate(log)

    cdef int c_release(self, uint64_t position, int log) except -1:
        if position % (1 << SMALLEST_LOG) or position + (<uint64_t>1 << log) > self.top:
            raise ValueError(f"no block of 2**{log} bytes lies at {position}")
        self._free[log].append(position)
        self.allocated -= <uint64_t>1 << log
        return 0

    def release(self, uint64_t position, int log):
        """Give a block back.  Nobody may use it after this."""
        self.c_release(position, log)

    def restore(self, uint64_t top, used):
        """Take over what a catalogue says: blocks (position, log) in use, below `top`; the rest is
        free.  ValueError if blocks overlap or lie elsewhere: then nothing has changed."""
        cdef uint64_t at = STATE_HEADER_BYTES, position, size
        cdef list spare = []
        cdef uint64_t allocated = 0
        if top > self.limit or top < at or top % (1 << SMALLEST_LOG):
            raise ValueError(f"memory up to {top} lies outside of {self.limit} bytes")
        for position, log in sorted(used):
            if not SMALLEST_LOG <= log <= LARGEST_LOG:
                raise ValueError(f"no block has 2**{log} bytes")
            size = <uint64_t>1 << log
            if position < at or position % (1 << SMALLEST_LOG) or position + size > top:
                raise ValueError(f"a block of {size} bytes cannot lie at {position}")
            if position > at:
                spare.append((at, position - at))
            at = position + size
            allocated += size
        if at < top:
            spare.append((at, top - at))
        if os.fstat(self._fd).st_size < <object>top:
            raise ValueError("the file is shorter than its catalogue says")
        self._free = [[] for _ in range(LARGEST_LOG + 1)]
        self._spare = spare
        self.allocated = allocated
        self.top = top
        self._back(top)

    def _from_end(self, uint64_t size):
        """The position of `size` bytes after all others; or, where there is no room, in between,
        made of free blocks of other sizes.  StateLimitError if there is none either."""
        cdef uint64_t position = self.top
        full = None
        if position + size <= self.limit:
            try:
                self._back(position + size)
                self.top += size
                return position
            except StateLimitError as e:
                full = e
        self._gather_spare()
        position = self._from_spare(size)
        if position:
            return position
        if full is not None:
            raise full
        raise StateLimitError(
            f"{self.name} may hold {self.limit} bytes of state and {self.allocated} are in use; "
            f"{size} more are needed",
            hint="raise the option state_limit, use more executors, or make windows shorter")

    def _back(self, uint64_t end):
        """Makes sure that the file has memory below `end`."""
        cdef uint64_t to
        if end <= self._backed:
            return
        to = min(self.limit, (end + BACKED_STEP - 1) // BACKED_STEP * BACKED_STEP)
        for to in (to, end):
            try:
                os.posix_fallocate(self._fd, self._backed, to - self._backed)
            except OSError as e:
                if e.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT):
                    raise
                if to == end:
                    raise StateLimitError(
                        f"the file system of {self.name} has no room: {self.allocated} bytes of "
                        f"state are in use, {end - self._backed} more are needed",
                        hint="make room there, or lower the option state_limit") from e
            else:
                break
        self._backed = to

    def _from_spare(self, uint64_t size):
        """The position of `size` bytes cut from the first spare stretch that has them, or 0."""
        cdef uint64_t position, bytes_
        for i, (position, bytes_) in enumerate(self._spare):
            if bytes_ >= size:
                if bytes_ == size:
                    del self._spare[i]
                else:
                    self._spare[i] = (position + size, bytes_ - size)
                return position
        return 0

    def _gather_spare(self):
        """Makes free blocks of all sizes into spare stretches, joined where they touch."""
        stretches = list(self._spare)
        for log, positions in enumerate(self._free):
            stretches += [(p, 1 << log) for p in positions]
            positions.clear()
        joined = []
        for position, bytes_ in sorted(stretches):
            if joined and joined[-1][0] + joined[-1][1] == position:
                joined[-1] = (joined[-1][0], joined[-1][1] + bytes_)
            else:
                joined.append((position, bytes_))
        self._spare = joined

    def close(self):
        """Unmap.  The file stays."""
        if self.base != NULL:
            munmap(self.base, self.limit)
            self.base = NULL
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __dealloc__(self):
        if self.base != NULL:
            munmap(self.base, self.limit)
        if self._fd >= 0:
            try:
                os.close(self._fd)
            except Exception:
                pass


cdef StateMemory _mapped(int fd, limit, name):
    """Takes over `fd`."""
    cdef StateMemory memory = StateMemory.__new__(StateMemory)
    cdef void* p
    memory._fd = fd
    memory.name = name
    if limit < LEAST_LIMIT:
        raise ConfigError(f"{limit} bytes cannot hold state",
                          hint=f"set state_limit to {LEAST_LIMIT} or more")
    memory.limit = limit // mmap.PAGESIZE * mmap.PAGESIZE
    size = os.fstat(fd).st_size
    if size < <object>memory.limit:
        os.ftruncate(fd, memory.limit)
    p = c_mmap(NULL, memory.limit, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
    if p == MAP_FAILED:
        raise StateLimitError(f"cannot map {memory.limit} bytes of {name}",
                              hint="lower state_limit or raise `ulimit -v`")
    memory.base = <uint8_t*>p
    memory.top = STATE_HEADER_BYTES
    memory._free = [[] for _ in range(LARGEST_LOG + 1)]
    memory._spare = []
    memory._back(STATE_HEADER_BYTES)
    return memory


cdef class PageMemory:
    """Pages that a channel sends from.

    `allocate(bytes)` returns memory with `.address` and `.length` (an rdma Memory, so that it can
    be registered); `on_chunk(number, memory)` is called for each new chunk before any of its pages
    is used.  The last `footer_bytes` of a page belong to the channel, from the end of what is sent
    until its completion: then the pages come back by `release`.
    """

    def __init__(self, allocate, page_bytes=1 << 16, footer_bytes=64, limit=1 << 30, on_chunk=None,
                 chunk_bytes=1 << 22):
        if page_bytes < 4096 or page_bytes % 8 or footer_bytes % 8 or page_bytes > 1 << 24:
            raise ConfigError(f"a page of {page_bytes} bytes with a footer of {footer_bytes} "
                              "cannot be used", hint="choose a multiple of 8 from 4096 to 16 MiB")
        if footer_bytes + PAGE_HEADER_BYTES + 1024 > page_bytes:
            raise ConfigError(f"a footer of {footer_bytes} bytes fills a page of {page_bytes}")
        self.page_bytes = page_bytes
        self.room = page_bytes - footer_bytes
        self.chunk_bytes = max(1, chunk_bytes // page_bytes) * page_bytes
        self.limit = limit
        self.chunks = []
        self._allocate = allocate
        self._on_chunk = on_chunk
        self._free = []
        self._starts = []
        self._chunk_of = {}

    cdef uint64_t c_take(self) except 0:
        if not self._free:
            self._add_chunk()
        return self._free.pop()

    def _add_chunk(self):
        if (len(self.chunks) + 1) * <object>self.chunk_bytes > self.limit:
            raise StateLimitError(
                f"deltas may use {self.limit} bytes and all of them wait to be sent",
                hint="raise the option fragment_limit, or make epochs shorter")
        chunk = self._allocate(self.chunk_bytes)
        if chunk.length < self.chunk_bytes:
            raise ValueError("a chunk is shorter than what was asked for")
        number = len(self.chunks)
        if self._on_chunk is not None:
            self._on_chunk(number, chunk)
        self.chunks.append(chunk)
        self._chunk_of[chunk.address] = number
        bisect.insort(self._starts, chunk.address)
        pages = range(chunk.address, chunk.address + self.chunk_bytes, self.page_bytes)
        self._free += reversed(pages)

    cdef int c_release(self, uint64_t address) except -1:
        self.place(address)
        self._free.append(address)
        return 0

    def release(self, uint64_t address):
        """The page at `address` is not used any more, by the fabric neither."""
        self.c_release(address)

    def place(self, uint64_t address):
        """(number of its chunk, position in it) of the page at `address`."""
        at = bisect.bisect_right(self._starts, address) - 1
        start = self._starts[at] if at >= 0 else 0
        position = <object>address - start
        if at < 0 or position >= self.chunk_bytes or position % self.page_bytes:
            raise ValueError(f"no page lies at {address:#x}")
        return self._chunk_of[start], position


cdef class Log:
    """A chain of segments that is appended to: `c.tail` to `c.end` is free to write.

    Whoever appends asks for room (`c_room`) and moves `c.tail`, without the GIL if it likes.
    Nothing that was appended moves or straddles segments.
    """

    def __init__(self, StateMemory memory, int first_log=SMALLEST_LOG):
        self.memory = memory
        self.c.base = memory.base
        self._segments = []
        self._first_log = max(SMALLEST_LOG, first_log)

    cdef int c_room(self, uint64_t need) except -1:
        """Makes room for `need` bytes in one piece; segments double up to 64 MiB."""
        cdef int log
        cdef uint64_t position
        if self.c.end - self.c.tail >= need:
            return 0
        if self._segments:
            self._segments[-1][2] = self.c.tail
            log = min(self._segments[-1][1] + 1, SEGMENT_LARGEST_LOG)
        else:
            log = self._first_log
        log = max(log, block_log(need))
        position = self.memory.c_allocate(log)
        self._segments.append([position, log, position])
        self.c.tail = position
        self.c.end = position + (<uint64_t>1 << log)
        return 0

    cdef int c_first(self, int log) except -1:
        """The first segment, which is not there yet, will have 2**log bytes."""
        self._first_log = max(SMALLEST_LOG, log)
        return 0

    def append(self, data):
        """The position of `data`, padded with zeros to whole words."""
        cdef const uint8_t[::1] view = data
        cdef uint64_t n = view.shape[0], padded = (n + 7) & ~<uint64_t>7, position, i
        self.c_room(padded)
        position = self.c.tail
        for i in range(n):
            self.c.base[position + i] = view[i]
        for i in range(n, padded):
            self.c.base[position + i] = 0
        self.c.tail += padded
        return position

    def stretches(self):
        """[(begin, end)] of what was appended, in order."""
        if self._segments:
            self._segments[-1][2] = self.c.tail
        return [(position, end) for position, _, end in self._segments if end > position]

    def segments(self):
        """[(position, log, end of what is used)], for a catalogue."""
        if self._segments:
            self._segments[-1][2] = self.c.tail
        return [tuple(s) for s in self._segments]

    def restore(self, segments):
        """Go on with the segments of a catalogue, whose blocks the memory has taken over already
        (`StateMemory.restore`)."""
        for position, log, end in segments:
            if not position <= end <= position + (1 << log) or end % 8:
                raise ValueError(f"a segment at {position} cannot end at {end}")
        self._segments = [list(s) for s in segments]
        if self._segments:
            position, log, end = self._segments[-1]
            self.c.tail = end
            self.c.end = position + (1 << log)

    @property
    def used(self):
        return sum(end - begin for begin, end in self.stretches())

    cdef int c_clear(self) except -1:
        cdef int log
        for position, log, _ in reversed(self._segments):
            self.memory.c_release(position, log)
        self._segments = []
        self.c.tail = self.c.end = 0
        return 0

    def clear(self):
        """Give all segments back."""
        self.c_clear()
