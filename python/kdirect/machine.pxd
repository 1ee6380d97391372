"""What compiled modules of every room ask of the machine, declared once.

Law: nothing of ours is imported here, and nothing is compiled from it alone.  machine.h has the
bodies; the mutexes are those of pthreads.
"""
from libc.stdint cimport int64_t

cdef extern from "machine.h" nogil:
    void kd_pause()
    int64_t kd_now_ns()     # monotonic: deadlines and durations
    int64_t kd_wall_ns()    # since 1970: timestamps

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t*, const void*)
    int pthread_mutex_destroy(pthread_mutex_t*)
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)
