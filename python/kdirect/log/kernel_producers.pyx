# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The producer table of a kernel, read and replaced as a whole.

Owns what snapshots, recovery and upkeep do with the table, under the kernel's mutex.  What a commit
makes of it is `kdirect.log.producers`; the files are `kdirect.log.producer_state`, and what they
say is put together in `kdirect.log.producer_history`.
"""

from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport free

from kdirect.log.kernel cimport CommitKernel
from kdirect.log.producers cimport (
    copy_producers, entries_of, expire, forget_producers, load_entry, producer_state,
    reserve_producers, store_producer)
from kdirect.log.state cimport kernel_state
from kdirect.machine cimport pthread_mutex_lock, pthread_mutex_unlock


def known_producers(CommitKernel kernel):
    """All remembered producers, as ProducerEntry, and the log end offset they stand for."""
    cdef kernel_state* s = <kernel_state*> kernel._state
    cdef producer_state* copy
    cdef int n
    cdef int64_t end
    with nogil:
        pthread_mutex_lock(&s.lock)
        n = copy_producers(&s.producers, &copy)
        end = s.log_end
        pthread_mutex_unlock(&s.lock)
    if n < 0:
        raise MemoryError()
    try:
        return entries_of(copy, n), end
    finally:
        free(copy)


def set_producers(CommitKernel kernel, entries):
    """Replace the producer table (recovery)."""
    cdef kernel_state* s = <kernel_state*> kernel._state
    cdef producer_state p
    cdef int error
    with nogil:
        pthread_mutex_lock(&s.lock)
        forget_producers(&s.producers)
        pthread_mutex_unlock(&s.lock)
    for entry in entries:
        load_entry(&p, entry)
        with nogil:
            pthread_mutex_lock(&s.lock)
            error = reserve_producers(&s.producers, 1)
            if error == 0:
                store_producer(&s.producers, &p)
            pthread_mutex_unlock(&s.lock)
        if error:
            raise MemoryError()


def expire_producers(CommitKernel kernel, int64_t before_ms):
    """Forget producers that last appended before `before_ms`; how many."""
    cdef kernel_state* s = <kernel_state*> kernel._state
    cdef uint32_t had, left
    with nogil:
        pthread_mutex_lock(&s.lock)
        had = s.producers.count
        expire(&s.producers, before_ms)
        left = s.producers.count
        pthread_mutex_unlock(&s.lock)
    return had - left
