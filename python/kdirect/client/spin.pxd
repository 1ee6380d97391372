"""What a loop that polls a completion queue needs: the processor's pause and a clock without the
GIL.  The clock measures how long a spin takes, and nothing that a simulation would have to move."""
from libc.stdint cimport int64_t
from posix.time cimport CLOCK_MONOTONIC, CLOCK_REALTIME, clock_gettime, timespec

cdef extern from *:
    """
    #if defined(__x86_64__) || defined(__i386__)
    #define kd_spin_pause() __builtin_ia32_pause()
    #else
    #define kd_spin_pause() ((void) 0)
    #endif
    """
    void pause "kd_spin_pause"() noexcept nogil


cdef inline int64_t monotonic_ns() noexcept nogil:
    """Nanoseconds since some fixed moment."""
    cdef timespec ts
    clock_gettime(CLOCK_MONOTONIC, &ts)
    return <int64_t> ts.tv_sec * 1000000000 + ts.tv_nsec


cdef inline int64_t now_ms() noexcept nogil:
    """Milliseconds since 1970."""
    cdef timespec ts
    clock_gettime(CLOCK_REALTIME, &ts)
    return <int64_t> ts.tv_sec * 1000 + ts.tv_nsec // 1000000
