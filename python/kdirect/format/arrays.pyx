# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Finished columns to Arrow arrays.

It owns the schemas of decoded records, and what Arrow is told of the memory of a column: which
buffers an array has, and what keeps each of them alive.  How rows get into columns is in
decode.pyx.

Invariants
- An array keeps its blocks; a block returns to its free list when the last array that shows it is
  gone.  A small array does not keep a large block (`fitting`).
- Columns with the same value in every row are shared, read-only memory of the process.  They are
  made once and are then only read.
"""

import pyarrow as pa

from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport INT32_MAX, int32_t, int64_t, uintptr_t
from libc.string cimport memcpy, memset

from kdirect.blocks cimport Block, take_block
from kdirect.errors import ConfigError
from kdirect.format.records cimport COLUMN_MIXED, COLUMN_NULL, text_column

cdef extern from "views.h" nogil:
    enum:
        KD_VIEW_BYTES


cdef list _fields(object kind):
    """The fields of records whose columns of bytes are of the type `kind`."""
    header = pa.struct([pa.field("key", pa.string()), pa.field("value", kind)])
    return [
        pa.field("key", kind), pa.field("value", kind), pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()), pa.field("timestamp", pa.timestamp("us", tz="UTC")),
        pa.field("timestampType", pa.int32()),
        pa.field("headers", pa.list_(pa.field("element", header)))]


# Before version 19 pyarrow makes no array of views out of buffers.
VIEWS_SINCE = 19
cdef bint _has_views = int(pa.__version__.split(".")[0]) >= VIEWS_SINCE
cdef object _BINARY_VIEW = pa.binary_view() if _has_views else pa.binary()


cdef int check_views() except -1:
    if not _has_views:
        raise ConfigError(f"pyarrow {pa.__version__} makes no columns of views",
                          hint=f"install pyarrow {VIEWS_SINCE} or newer, or leave views out")
    return 0


SCHEMA_WITH_HEADERS = pa.schema(_fields(pa.binary()))
SCHEMA = SCHEMA_WITH_HEADERS.remove(7)
SCHEMA_VIEWS_WITH_HEADERS = pa.schema(_fields(_BINARY_VIEW))
SCHEMA_VIEWS = SCHEMA_VIEWS_WITH_HEADERS.remove(7)

cdef object _from_buffers = pa.Array.from_buffers
cdef object _foreign_buffer = pa.foreign_buffer
cdef object _BINARY = pa.binary()
cdef object _INT32 = pa.int32()


# -- columns with one value in every row -----------------------------------------------------------

# value -> (rows, buffers); the buffers are read-only and shared by all decoders of the process
cdef dict _constants = {}
cdef enum:
    CONSTANTS_MAX = 64
cdef object _NULL_VIEW = object()


cdef tuple _constant(object what, int64_t rows):
    """Buffers of a column with at least `rows` rows of `what`: a str, an int (int32), None
    (binary null), or _NULL_VIEW."""
    cdef tuple found = _constants.get(what)
    cdef int64_t capacity = 1024, i, n
    cdef Block first, second
    cdef int32_t* numbers
    cdef bytes text
    if found is not None and <int64_t>found[0] >= rows:
        return found[1]
    while capacity < rows:
        capacity *= 2
    if what is _NULL_VIEW:
        first = take_block(capacity * KD_VIEW_BYTES)
        memset(first.data, 0, capacity * KD_VIEW_BYTES)
        return _keep(what, capacity, (_buffer(first, capacity // 8),
                                      _buffer(first, capacity * KD_VIEW_BYTES)))
    first = take_block((capacity + 1) * sizeof(int32_t))
    numbers = <int32_t*>first.data
    if what is None:
        memset(numbers, 0, (capacity + 1) * sizeof(int32_t))
        buffers = (_buffer(first, capacity // 8), _buffer(first, (capacity + 1) * sizeof(int32_t)),
                   _buffer(first, 0))
    elif isinstance(what, str):
        text = what.encode()
        n = len(text)
        if capacity > INT32_MAX // n:
            capacity = INT32_MAX // n
        second = take_block(capacity * n)
        for i in range(capacity):
            numbers[i] = <int32_t>(i * n)
        numbers[capacity] = <int32_t>(capacity * n)
        memcpy(second.data, PyBytes_AS_STRING(text), n)
        i = n
        while i < capacity * n:
            memcpy(second.data + i, second.data, min(i, capacity * n - i))
            i *= 2
        buffers = (None, _buffer(first, (capacity + 1) * sizeof(int32_t)),
                   _buffer(second, capacity * n))
    else:
        for i in range(capacity):
            numbers[i] = what
        buffers = (None, _buffer(first, capacity * sizeof(int32_t)))
    return _keep(what, capacity, buffers)


cdef tuple _keep(object what, int64_t capacity, tuple buffers):
    _constants.pop(what, None)
    while len(_constants) >= CONSTANTS_MAX:
        del _constants[next(iter(_constants))]
    _constants[what] = (capacity, buffers)
    return buffers


cdef object constant_array(object kind, int64_t rows, object what):
    return _from_buffers(kind, rows, list(_constant(what, rows)), rows if what is None else 0)


# -- columns of their own memory -------------------------------------------------------------------

cdef object _buffer(Block block, int64_t n):
    return _foreign_buffer(<uintptr_t>block.data, n, block)


cdef Block fitting(Block block, size_t used):
    cdef Block smaller
    if block.capacity <= 4096 or used * 4 > block.capacity:
        return block
    smaller = take_block(used)
    memcpy(smaller.data, block.data, used)
    return smaller


cdef object _fitting_buffer(Block block, int64_t n):
    return _buffer(fitting(block, n), n)


cdef object number_array(object kind, int64_t rows, Block numbers):
    return _from_buffers(kind, rows, [None, _fitting_buffer(numbers, rows * 8)], 0)


cdef object _validity_bits(int64_t rows, const text_column* column, Block validity):
    if column.state == COLUMN_MIXED:
        return _fitting_buffer(validity, (rows + 7) // 8)
    return None


cdef object text_array(object kind, int64_t rows, const text_column* column, Block offsets,
                       Block data, Block validity):
    if column.state == COLUMN_NULL:
        return constant_array(kind, rows, None)
    bits = _validity_bits(rows, column, validity)
    return _from_buffers(kind, rows, [bits, _fitting_buffer(offsets, (rows + 1) * 4),
                                      _fitting_buffer(data, column.used)],
                         0 if bits is None else -1)


cdef object view_array(int64_t rows, const text_column* column, Block views, Block validity,
                       list buffers):
    if column.state == COLUMN_NULL:
        return _from_buffers(_BINARY_VIEW, rows, list(_constant(_NULL_VIEW, rows)), rows)
    bits = _validity_bits(rows, column, validity)
    own = [bits, _fitting_buffer(views, rows * KD_VIEW_BYTES)]
    return _from_buffers(_BINARY_VIEW, rows, own + buffers if column.refers else own,
                         0 if bits is None else -1)


cdef object header_array(object kind, int64_t rows, const text_column* lists, Block offsets,
                         Block validity, object keys, object values):
    try:
        keys.validate(full=True)
    except pa.ArrowInvalid:
        # Not UTF-8: replace malformed bytes, as Kafka's Java client does.
        keys = pa.array([key.decode("utf-8", "replace") for key in keys.view(_BINARY).to_pylist()],
                        pa.string())
    elements = pa.StructArray.from_arrays([keys, values], fields=list(kind.value_type))
    bits = _validity_bits(rows, lists, validity)
    return _from_buffers(kind, rows, [bits, _fitting_buffer(offsets, (rows + 1) * 4)],
                         0 if bits is None else -1, children=[elements])


cdef object timestamp_type_array(int64_t rows, list types):
    cdef Block block
    cdef int32_t* numbers
    cdef int64_t row
    cdef int32_t kind
    if len(types) == 1:
        return constant_array(_INT32, rows, types[0][1])
    block = take_block(rows * 4)
    numbers = <int32_t*>block.data
    for i, (first, kind) in enumerate(types):
        for row in range(first, types[i + 1][0] if i + 1 < len(types) else rows):
            numbers[row] = kind
    return _from_buffers(_INT32, rows, [None, _buffer(block, rows * 4)], 0)
