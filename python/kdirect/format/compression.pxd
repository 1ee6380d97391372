"""C interface of compression.pyx."""
from libc.stdint cimport uint64_t

cdef class Decompressor:
    cpdef object run(self, int codec, bytes data, uint64_t limit)

cdef class Compressor:
    cdef readonly int codec
    cdef readonly object level
    cdef object _tool
    cpdef object run(self, data)
    cdef object _run_lz4(self, data)
    cdef object _run_lz4_piece(self, data)
