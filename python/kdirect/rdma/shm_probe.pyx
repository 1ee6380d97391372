# cython: language_level=3, boundscheck=False, wraparound=False
"""Hot loops that measure and stress a provider; for bench/ and tests/ only.

Law of the room: nothing in the product imports this.  Loops use the C interface of the contract,
without the GIL, and bare machine operations (memcpy, eventfd) to compare with.  Times are in ns.
"""

from libc.errno cimport ENOMEM
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy

from kdirect.machine cimport kd_now_ns, kd_pause
from kdirect.rdma.contract cimport (
    WC_RECV_RDMA_WITH_IMM, CompletionQueue, MemoryRegion, QueuePair, work_completion)

from kdirect.errors import RdmaError

cdef extern from "shm_ring.h" nogil:
    uint64_t kd_fetch_add(uint64_t*, uint64_t)
    int eventfd_read "read"(int, void*, size_t)
    int eventfd_write "write"(int, const void*, size_t)


def read_loop(QueuePair qp, CompletionQueue cq, MemoryRegion local, uint64_t remote, uint32_t rkey,
              uint32_t size, uint64_t local_span, uint64_t remote_span, int64_t count,
              uint64_t begin=0):
    """`count` READs of `size` bytes, one at a time, walking both spans round and round from
    operation `begin`; ns for all."""
    cdef uint64_t to = begin % (local_span // size) * size
    cdef uint64_t at = begin % (remote_span // size) * size
    cdef int64_t i, start
    cdef int rc = 0, k
    cdef work_completion wc
    wc.status = 0
    with nogil:
        start = kd_now_ns()
        for i in range(count):
            rc = qp.c_post_read(i, local.address + to, local.lkey, size, remote + at, rkey)
            if rc:
                break
            k = cq.c_poll(&wc, 1)
            while k == 0:
                k = cq.c_poll(&wc, 1)
            if wc.status:
                break
            to += size
            if to + size > local_span:
                to = 0
            at += size
            if at + size > remote_span:
                at = 0
        start = kd_now_ns() - start
    if rc or wc.status:
        raise RdmaError(f"READ failed: errno {rc}, status {wc.status}")
    return start


def memcpy_loop(uint64_t local, uint64_t remote, uint32_t size, uint64_t local_span,
                uint64_t remote_span, int64_t count, uint64_t begin=0):
    """The same walk with memcpy alone; `remote` is an address in this process."""
    cdef uint64_t to = begin % (local_span // size) * size
    cdef uint64_t at = begin % (remote_span // size) * size
    cdef int64_t i, start
    with nogil:
        start = kd_now_ns()
        for i in range(count):
            memcpy(<void*><uintptr_t> (local + to), <void*><uintptr_t> (remote + at), size)
            to += size
            if to + size > local_span:
                to = 0
            at += size
            if at + size > remote_span:
                at = 0
        start = kd_now_ns() - start
    return start


def write_loop(QueuePair qp, CompletionQueue cq, MemoryRegion local, uint64_t remote, uint32_t rkey,
               uint32_t size, uint64_t remote_span, int64_t count):
    """`count` WRITEs of `size` bytes from the start of `local`, walking `remote_span`."""
    cdef uint64_t at = 0
    cdef int64_t i, start
    cdef int rc = 0, k
    cdef work_completion wc
    wc.status = 0
    with nogil:
        start = kd_now_ns()
        for i in range(count):
            rc = qp.c_post_write(i, local.address, local.lkey, size, remote + at, rkey)
            if rc:
                break
            k = cq.c_poll(&wc, 1)
            if wc.status:
                break
            at += size
            if at + size > remote_span:
                at = 0
        start = kd_now_ns() - start
    if rc or wc.status:
        raise RdmaError(f"WRITE failed: errno {rc}, status {wc.status}")
    return start


def fetch_add_loop(QueuePair qp, CompletionQueue cq, MemoryRegion local, uint64_t remote,
                   uint32_t rkey, int64_t count):
    cdef int64_t i, start
    cdef int rc = 0, k
    cdef work_completion wc
    wc.status = 0
    with nogil:
        start = kd_now_ns()
        for i in range(count):
            rc = qp.c_post_fetch_add(i, local.address, local.lkey, remote, rkey, 1)
            if rc:
                break
            k = cq.c_poll(&wc, 1)
            if wc.status:
                break
        start = kd_now_ns() - start
    if rc or wc.status:
        raise RdmaError(f"FETCH_AND_ADD failed: errno {rc}, status {wc.status}")
    return start


def bare_fetch_add_loop(uint64_t address, int64_t count):
    """`count` bare fetch-and-adds of 8 bytes in this process."""
    cdef int64_t i, start
    with nogil:
        start = kd_now_ns()
        for i in range(count):
            kd_fetch_add(<uint64_t*><uintptr_t> address, 1)
        start = kd_now_ns() - start
    return start


def bounce(QueuePair qp, CompletionQueue cq, MemoryRegion local, uint64_t remote, uint32_t rkey,
           uint32_t size, int64_t count, bint first, int64_t timeout_ms):
    """`count` round trips of WRITE_WITH_IMM of `size` bytes, spinning: both sides call it, one with
    `first`.  Immediate data counts up and is checked.  Receives: 16 must be posted already.  ns for
    all."""
    cdef int64_t i = 0, start, deadline, sent = 0
    cdef int rc = 0, k, j
    cdef int bad = 0
    cdef work_completion[16] wcs
    with nogil:
        start = kd_now_ns()
        deadline = start + timeout_ms * 1000000
        if first:
            rc = qp.c_post_write_imm(0, local.address, local.lkey, size, remote, rkey, 0)
        while i < count and rc == 0 and not bad:
            k = cq.c_poll(wcs, 16)
            if k == 0:
                kd_pause()
                sent += 1
                if sent & 1023 == 0 and kd_now_ns() > deadline:
                    bad = -1
                continue
            for j in range(k):
                if wcs[j].status:
                    bad = wcs[j].status
                elif wcs[j].opcode == WC_RECV_RDMA_WITH_IMM:
                    if wcs[j].imm_data != <uint32_t> i:
                        bad = -2
                    i += 1
                    rc = qp.c_post_recv(i, 0, 0, 0)
                    if rc == 0 and (not first or i < count):
                        rc = qp.c_post_write_imm(i, local.address, local.lkey, size, remote, rkey,
                                                 <uint32_t> (i if first else i - 1))
        start = kd_now_ns() - start
    if rc or bad:
        raise RdmaError(f"round trip {i} of {count} failed: errno {rc}, status {bad}")
    return start


def bounce_asleep(QueuePair qp, cq, MemoryRegion local, uint64_t remote, uint32_t rkey,
                  int64_t count, bint first, spin_us=0, timeout_ms=10000):
    """As `bounce`, with both sides in `cq.wait` between; a lost wake-up is a timeout.  ns for all.
    """
    cdef int64_t i = 0, start = kd_now_ns()
    cdef int rc = 0, k, j
    cdef work_completion[16] wcs
    cdef CompletionQueue q = cq
    if first:
        rc = qp.c_post_write_imm(0, local.address, local.lkey, 8, remote, rkey, 0)
    while i < count:
        if rc:
            raise RdmaError(f"round trip {i} of {count} failed: errno {rc}")
        if not cq.wait(timeout_ms, spin_us):
            raise RdmaError(f"round trip {i} of {count}: a wake-up was lost")
        k = q.c_poll(wcs, 16)
        for j in range(k):
            if wcs[j].status:
                raise RdmaError(f"round trip {i} of {count} failed: status {wcs[j].status}")
            if wcs[j].opcode == WC_RECV_RDMA_WITH_IMM:
                if wcs[j].imm_data != <uint32_t> i:
                    raise RdmaError(f"round trip {i} of {count}: immediate data {wcs[j].imm_data}")
                i += 1
                rc = qp.c_post_recv(i, 0, 0, 0)
                if rc == 0 and (not first or i < count):
                    rc = qp.c_post_write_imm(i, local.address, local.lkey, 8, remote, rkey,
                                             <uint32_t> (i if first else i - 1))
    return kd_now_ns() - start


def eventfd_bounce(int mine, int theirs, int64_t count, bint first):
    """`count` bare eventfd round trips between two processes (blocking descriptors); ns for all."""
    cdef int64_t i, start
    cdef uint64_t v = 1
    with nogil:
        start = kd_now_ns()
        for i in range(count):
            v = 1
            if first:
                eventfd_write(theirs, &v, 8)
            eventfd_read(mine, &v, 8)
            if not first:
                v = 1
                eventfd_write(theirs, &v, 8)
        start = kd_now_ns() - start
    return start
