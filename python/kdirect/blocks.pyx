# cython: language_level=3, boundscheck=False, wraparound=False
"""Memory for columns, batches and what GETs bring, reused while it is warm.

Owns: blocks of a power of two bytes, 64-byte aligned, and the free lists they return to.  A fresh
page costs more to touch than to fill, so a stream of batches of about the same size must get the
same memory again: a Block that nobody refers to any more goes back to the free list of its size.

Invariants: at most RETAINED_BYTES lie in free lists of a process; a block is in a free list or in
one Block object, never in both; the lists are touched only under the GIL.  A forked child has its
own copy. Blocks of HUGE_BYTES and more are mapped on their own and ask for huge pages.
"""

from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport uint8_t, uintptr_t
from libc.stdlib cimport free
from libc.string cimport memcpy
from posix.mman cimport MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap, munmap
from posix.stdlib cimport posix_memalign

cdef extern from *:
    """
    #include <sys/mman.h>
    static void kd_advise_huge(void *p, size_t n) {
    #ifdef MADV_HUGEPAGE
        (void)madvise(p, n, MADV_HUGEPAGE);
    #else
        (void)p, (void)n;
    #endif
    }
    """
    void kd_advise_huge(void* p, size_t n) nogil

cdef enum:
    SMALLEST_LOG = 10       # 1 KiB
    LARGEST_LOG = 40
    HUGE_LOG = 22           # 4 MiB
    PER_CLASS = 32
    HUGE_PAGE = 1 << 21

cdef size_t RETAINED_BYTES = 96 << 20

cdef void* _free[LARGEST_LOG + 1][PER_CLASS]
cdef int _free_count[LARGEST_LOG + 1]
cdef size_t _retained = 0
cdef size_t _live = 0


cdef uint8_t* _allocate(int log) noexcept:
    cdef void* p = NULL
    cdef size_t n = <size_t>1 << log
    cdef size_t head
    if log < HUGE_LOG:
        return NULL if posix_memalign(&p, 64, n) else <uint8_t*>p
    p = mmap(NULL, n + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    if p == MAP_FAILED:
        return NULL
    head = (HUGE_PAGE - <uintptr_t>p % HUGE_PAGE) % HUGE_PAGE
    if head:
        munmap(p, head)
    if head < HUGE_PAGE:
        munmap(<uint8_t*>p + head + n, HUGE_PAGE - head)
    kd_advise_huge(<uint8_t*>p + head, n)
    return <uint8_t*>p + head


cdef void _release(uint8_t* p, int log) noexcept:
    if log < HUGE_LOG:
        free(p)
    else:
        munmap(p, <size_t>1 << log)


cdef inline int _log_of(size_t n) noexcept nogil:
    cdef int log = SMALLEST_LOG
    while log < LARGEST_LOG and (<size_t>1 << log) < n:
        log += 1
    return log


cdef class Block:
    """`capacity` bytes; a writable buffer.  Goes back to its free list with the last reference."""

    def __cinit__(self):
        self.data = NULL
        self.capacity = 0

    def __dealloc__(self):
        global _retained, _live
        cdef int log
        if self.data == NULL:
            return
        log = _log_of(self.capacity)
        _live -= self.capacity
        if _free_count[log] < PER_CLASS and _retained + self.capacity <= RETAINED_BYTES:
            _free[log][_free_count[log]] = self.data
            _free_count[log] += 1
            _retained += self.capacity
        else:
            _release(self.data, log)
        self.data = NULL

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.data, self.capacity, 0, flags)

    def put(self, Py_ssize_t position, const uint8_t[::1] data):
        """Copy `data` to `position`, while other threads run.  ValueError if it does not fit."""
        cdef size_t length = data.shape[0]
        if position < 0 or length > self.capacity or <size_t>position > self.capacity - length:
            raise ValueError(f"{length} bytes at {position} of {self.capacity}")
        if length:
            with nogil:
                memcpy(self.data + position, &data[0], length)

    @property
    def address(self):
        return <uintptr_t>self.data

    def __len__(self):
        return self.capacity


cdef Block take_block(size_t n):
    global _retained, _live
    cdef int log = _log_of(n)
    cdef Block block
    if (<size_t>1 << log) < n:
        raise MemoryError(n)
    block = Block.__new__(Block)
    if _free_count[log]:
        _free_count[log] -= 1
        block.data = <uint8_t*>_free[log][_free_count[log]]
        _retained -= <size_t>1 << log
    else:
        block.data = _allocate(log)
        if block.data == NULL:
            raise MemoryError(n)
    block.capacity = <size_t>1 << log
    _live += block.capacity
    return block


def take(size_t n):
    """A Block of at least `n` bytes; contents are whatever was there.  Once nobody refers to it,
    nor to a memoryview of it or of a part of it, it is free again.  MemoryError."""
    return take_block(n)


cdef Block expand(Block block, size_t used, size_t need):
    cdef Block larger
    if block is not None and block.capacity >= need:
        return block
    larger = take_block(need)
    if used:
        memcpy(larger.data, block.data, used)
    return larger


def statistics():
    """Bytes of blocks in use and in the free lists of this process."""
    return {"block_live_bytes": _live, "block_retained_bytes": _retained}


def trim():
    """Give the free lists back to the operating system."""
    global _retained
    cdef int log
    for log in range(SMALLEST_LOG, LARGEST_LOG + 1):
        while _free_count[log]:
            _free_count[log] -= 1
            _release(<uint8_t*>_free[log][_free_count[log]], log)
    _retained = 0
