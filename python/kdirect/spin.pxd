"""How a thread spins that waits for another one, declared once; spin.h has the body.

Law: nothing of ours is imported here, and nothing is compiled from it alone.
"""
from libc.stdint cimport int64_t

cdef extern from "spin.h" nogil:
    void kd_spin(int64_t silent_ns)     # one turn of a spin without news for so long
