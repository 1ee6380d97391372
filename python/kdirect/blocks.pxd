"""C interface of blocks.pyx."""
from libc.stdint cimport uint8_t

cdef class Block:
    cdef uint8_t* data
    cdef readonly size_t capacity
    cdef object __weakref__

cdef Block take_block(size_t n)
# A block of at least n bytes; contents are whatever was there.  Raises MemoryError.

cdef Block expand(Block block, size_t used, size_t need)
# A block of at least `need` bytes that starts with the `used` bytes of `block`: itself, if it is
# large enough.  `block` may be None.
