"""C face of compression.pyx."""
from libc.stdint cimport uint64_t

cdef class Decompressor:
    cdef object _lz4
    cdef object _zstd
    cpdef object run(self, int codec, bytes data, uint64_t limit)
    cdef object _run_lz4(self, bytes data, uint64_t limit)
    cdef object _run_zstd(self, bytes data, uint64_t limit)

cdef class Compressor:
    cdef readonly int codec
    cdef readonly object level
    cdef object _tool
    cpdef object run(self, data)
    cdef object _run_lz4(self, data)
    cdef object _run_lz4_piece(self, data)
