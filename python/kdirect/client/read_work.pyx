# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""READ work requests and their completions, as everything in this room that READs needs them.

Owns: posting one READ, or several that are outstanding together, waiting for their completions, and
the exceptions that a failed one means.  What may not enter: what the bytes are.

A caller waits for all of its READs before it returns, so no READ of a queue pair is under way
between two calls.  There is no lock: a queue pair and its completion queue have one owner
(`kdirect.wire.channel` says which).
"""

from libc.errno cimport ENOMEM
from libc.stdint cimport INT64_MAX, UINT32_MAX, int64_t, uint32_t, uint64_t
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from kdirect.rdma.contract cimport WC_SUCCESS, CompletionQueue, QueuePair, work_completion

from kdirect.errors import ProtocolError, QueuePairError, TimedOutError
from kdirect.rdma.contract import STATUS_NAMES

cdef int64_t READ_TIMEOUT_NS = 30 * 1000000000


cdef int64_t now_ns() noexcept nogil:
    cdef timespec ts
    clock_gettime(CLOCK_MONOTONIC, &ts)
    return <int64_t> ts.tv_sec * 1000000000 + ts.tv_nsec


cdef int c_read(QueuePair qp, CompletionQueue cq, uint64_t local_address, uint32_t lkey,
                uint32_t length, uint64_t remote_address, uint32_t rkey,
                uint32_t* status) noexcept nogil:
    """READ and wait for the completion.  0, READ_FAILED (with `status`, or an errno + 1000) or
    READ_TIMED_OUT."""
    return c_read_pieces(qp, cq, local_address, lkey, length, length, remote_address, rkey, status)


cdef int c_read_pieces(QueuePair qp, CompletionQueue cq, uint64_t local_address, uint32_t lkey,
                       uint64_t total, uint32_t piece, uint64_t remote_address, uint32_t rkey,
                       uint32_t* status) noexcept nogil:
    """READ `total` bytes in pieces of `piece` bytes (the last one may be shorter), of which at most
    READS_AHEAD are outstanding together.  Returns when all have completed, with what `c_read`
    returns.  The failure reported is the first one; the READs after it are flushed."""
    cdef work_completion wc[READS_AHEAD]
    cdef uint64_t posted = 0
    cdef uint32_t length
    cdef int rc, n, i, outstanding = 0, spins = 0, refused = 0
    cdef bint failed = False
    cdef int64_t deadline = 0
    while True:
        while posted < total and not failed and not refused and outstanding < READS_AHEAD:
            length = <uint32_t> (total - posted) if total - posted < piece else piece
            rc = qp.c_post_read(0, local_address + posted, lkey, length, remote_address + posted,
                                rkey)
            if rc == ENOMEM and outstanding:
                break
            if rc != 0:
                refused = rc            # reported only if no READ before it says why
                break
            posted += length
            outstanding += 1
        if outstanding == 0:
            if refused and not failed:
                status[0] = 1000 + refused
            return READ_FAILED if failed or refused else 0
        n = cq.c_poll(wc, READS_AHEAD)
        if n < 0:
            status[0] = 1000 - n
            return READ_FAILED
        for i in range(n):
            outstanding -= 1
            if wc[i].status != WC_SUCCESS and not failed:
                status[0] = wc[i].status
                failed = True
        if n:
            spins = 0
            deadline = 0
            continue
        spins += 1
        if spins & 1023 == 0:
            if deadline == 0:
                deadline = now_ns() + READ_TIMEOUT_NS
            elif now_ns() > deadline:
                return READ_TIMED_OUT


cdef raise_read(int rc, uint32_t status, what):
    """The exception for what `c_read` returned, if that is not 0."""
    if rc == READ_TIMED_OUT:
        raise TimedOutError(f"{what}: no completion in 30 s",
                            hint="the broker's host does not answer; check the network path")
    if status >= 1000:
        raise QueuePairError(f"{what}: the queue pair is not usable (errno {status - 1000})",
                             hint="the broker left; a new connection is needed")
    raise QueuePairError(f"{what}: {STATUS_NAMES.get(status, status)}",
                         hint="access ended (revoked, or the broker left); ask for it again")


cdef int check_location(str what, int64_t address, int64_t rkey, int64_t length) except -1:
    """ProtocolError for numbers of a grant that cannot be: they travel as signed 64-bit ones.
    `length` is not negative."""
    if address < 0 or address > INT64_MAX - length or not 0 <= rkey <= <int64_t> UINT32_MAX:
        raise ProtocolError(f"{what}: the broker granted {length} bytes at address {address} under "
                            f"key {rkey}", hint="broker and client are of different versions")
    return 0
