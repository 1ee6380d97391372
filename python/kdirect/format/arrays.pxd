"""C interface of arrays.pyx."""
from libc.stdint cimport int64_t

from kdirect.blocks cimport Block
from kdirect.format.records cimport text_column

cdef int check_views() except -1
# ConfigError unless this pyarrow makes columns of views.
cdef object constant_array(object kind, int64_t rows, object what)
# An array of `rows` rows of `what`: a str, an int (int32), or None.

cdef Block fitting(Block block, size_t used)
# `block`, or a copy of its `used` bytes if they are at most a quarter of a block larger than
# 4 KiB: a caller may keep the arrays for long.

cdef object number_array(object kind, int64_t rows, Block numbers)
# An array of a type of 8 bytes, without nulls.

cdef object text_array(object kind, int64_t rows, const text_column* column, Block offsets,
                       Block data, Block validity)
# An array of binary or string.

cdef object view_array(int64_t rows, const text_column* column, Block views, Block validity,
                       list buffers)
# An array of binary_view over the data buffers `buffers`, which it keeps only if a view refers to
# one of them.

cdef object header_array(object kind, int64_t rows, const text_column* lists, Block offsets,
                         Block validity, object keys, object values)
# An array of the list type `kind`, whose elements are pairs of `keys` and `values`.  Keys that are
# not UTF-8 are mended.

cdef object timestamp_type_array(int64_t rows, list types)
# The timestamp types of `rows` rows; `types` has (first row, timestamp type) where the type
# changes.
