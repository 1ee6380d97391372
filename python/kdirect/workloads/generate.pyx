# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Makes the fields of records, without the GIL: see generate.h, where the loops are.

A `Filler` writes the fields of a few thousand records, one method call a field.  Chance has no
state: what a field of record number i holds depends on the seed, the name of the field and i alone.
Each method takes the name of a field, and after it what its values are.
"""

from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free, malloc

import functools
import hashlib

from kdirect.errors import ConfigError

cdef extern from "generate.h" nogil:
    ctypedef struct kd_rows:
        uint8_t* out
        int64_t stride
        int64_t count
        uint64_t first
        uint64_t step
    ctypedef struct kd_times:
        uint64_t start
        uint64_t step
        uint64_t disorder
        uint64_t late
        uint64_t late_share
        uint64_t unit
    ctypedef struct kd_mixture:
        uint64_t own
        uint64_t before
        uint64_t total
    ctypedef struct kd_reference:
        kd_mixture mixture
        uint64_t other
        uint64_t other_before
        uint64_t base
        uint64_t hot
        uint64_t hot_at
        uint64_t active
        uint64_t lead
    void kd_put_uniform(const kd_rows* rows, int width, uint64_t stream, uint64_t base,
                        uint64_t range)
    void kd_put_index(const kd_rows* rows, int width, uint64_t base, uint64_t scale)
    void kd_put_pareto(const kd_rows* rows, int width, uint64_t stream, uint64_t base,
                       uint64_t range, double alpha)
    ctypedef struct kd_zipf_bin:
        pass
    uint64_t kd_zipf_bins(uint64_t range, kd_zipf_bin* bins)
    void kd_zipf_prepare(kd_zipf_bin* bins, uint64_t n, double z, double* weight, uint64_t* order)
    void kd_put_zipf(const kd_rows* rows, int width, uint64_t stream, uint64_t base,
                     const kd_zipf_bin* bins, uint64_t n, double z)
    void kd_put_reals(const kd_rows* rows, int width, uint64_t stream, double low, double high)
    void kd_put_prices(const kd_rows* rows, int width, int real, uint64_t stream)
    void kd_put_letters(const kd_rows* rows, int64_t width, int64_t letters, uint64_t stream)
    void kd_put_choice(const kd_rows* rows, int64_t width, uint64_t stream, const uint8_t* texts,
                       uint64_t count)
    void kd_put_times(const kd_rows* rows, int width, uint64_t stream, const kd_times* times,
                      const kd_mixture* mixture)
    void kd_put_references(const kd_rows* rows, int width, uint64_t stream, const kd_reference* r)


cdef class _Zipf:
    """The table of a Zipf distribution over [0, range): some hundred KiB at most."""

    cdef kd_zipf_bin* bins
    cdef uint64_t count

    def __cinit__(self, uint64_t range, double z):
        cdef double* weight
        cdef uint64_t* order
        self.count = kd_zipf_bins(range, NULL)
        self.bins = <kd_zipf_bin*>calloc(self.count, sizeof(kd_zipf_bin))
        weight = <double*>malloc(self.count * sizeof(double))
        order = <uint64_t*>malloc(self.count * sizeof(uint64_t))
        try:
            if self.bins == NULL or weight == NULL or order == NULL:
                raise MemoryError
            kd_zipf_bins(range, self.bins)
            kd_zipf_prepare(self.bins, self.count, z, weight, order)
        finally:
            free(weight)
            free(order)

    def __dealloc__(self):
        free(self.bins)


_zipf = functools.lru_cache(maxsize=16)(_Zipf)


cdef class Filler:
    """Fills `rows`, a writable buffer of whole values of `layout`; the first one is record number
    `first`, each next one has a number that is `step` higher.  `go` says which of them are filled
    next.  Close it, or use it as a context manager."""

    cdef object _layout
    cdef bytes _seed
    cdef dict _fields           # name: (position, width, stream)
    cdef uint64_t _first
    cdef int64_t _start
    cdef Py_buffer _view
    cdef kd_rows _rows
    cdef bint _open

    def __cinit__(self):
        self._open = False

    def __init__(self, rows, layout, seed, uint64_t first, uint64_t step):
        self._layout = layout
        self._seed = repr(seed).encode()
        PyObject_GetBuffer(rows, &self._view, PyBUF_WRITABLE)
        self._open = True
        self._rows.stride = layout.size
        self._rows.step = step
        self._first = first
        self._fields = {}
        self.go(0, self._view.len // self._rows.stride)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __dealloc__(self):
        self.close()

    cpdef close(self):
        if self._open:
            self._open = False
            PyBuffer_Release(&self._view)

    def go(self, int64_t start, int64_t count):
        """Fill the rows [start, start + count) next."""
        if not self._open or start < 0 or count < 0 or (
                (start + count) * self._rows.stride > self._view.len):
            raise ConfigError(f"there are no rows [{start}, {start + count})",
                              hint="stay in the buffer that the filler was made for")
        self._start = start
        self._rows.count = count
        self._rows.first = self._first + <uint64_t>start * self._rows.step

    cdef int _at(self, str name, uint64_t* stream) except -1:
        """Go to a field; its width.  `stream` becomes that of its random numbers."""
        cdef int64_t position
        cdef int width
        if not self._open:
            raise ConfigError("the filler is closed", hint="make another one")
        known = self._fields.get(name)
        if known is None:
            field = self._layout.field(name)
            digest = hashlib.blake2b(name.encode(), digest_size=8, key=self._seed[:64]).digest()
            known = (field.position, field.kind.width, int.from_bytes(digest, "little"))
            self._fields[name] = known
        position, width, stream[0] = known
        self._rows.out = <uint8_t*>self._view.buf + self._start * self._rows.stride + position
        return width

    def uniform(self, str name, uint64_t base, uint64_t range):
        """Whole numbers in [base, base + range)."""
        cdef uint64_t stream
        cdef int width = self._at(name, &stream)
        with nogil:
            kd_put_uniform(&self._rows, width, stream, base, range)

    def index(self, str name, uint64_t base, uint64_t scale=1):
        """base + scale * the number of the record."""
        cdef uint64_t stream
        cdef int width = self._at(name, &stream)
        with nogil:
            kd_put_index(&self._rows, width, base, scale)

    def pareto(self, str name, uint64_t base, uint64_t range, double alpha):
        """base + k, where k is in [0, range) and P(k or more) falls as (k + 1)^-alpha."""
        cdef uint64_t stream
        cdef int width = self._at(name, &stream)
        with nogil:
            kd_put_pareto(&self._rows, width, stream, base, range, alpha)

    def zipf(self, str name, uint64_t base, uint64_t range, double z):
        """base + k, where k is in [0, range) with a chance in proportion to (k + 1)^-z."""
        cdef uint64_t stream
        cdef int width = self._at(name, &stream)
        cdef _Zipf table = _zipf(range, z)
        with nogil:
            kd_put_zipf(&self._rows, width, stream, base, table.bins, table.count, z)

    def reals(self, str name, double low, double high):
        """float32 or float64, uniform in [low, high)."""
        cdef uint64_t stream
        cdef int width = self._at(name, &stream)
        with nogil:
            kd_put_reals(&self._rows, width, stream, low, high)

    def prices(self, str name):
        """Prices in cents, 100 to 10^8, uniform in their logarithm: in a field of whole numbers, or
        of float64."""
        cdef uint64_t stream
        cdef int width = self._at(name, &stream)
        cdef int real = self._layout.field(name).kind.name == "float64"
        with nogil:
            kd_put_prices(&self._rows, width, real, stream)

    def letters(self, str name, int64_t count):
        """`count` random letters; the rest of the field is zero bytes."""
        cdef uint64_t stream
        cdef int64_t width = self._at(name, &stream)
        if not 0 <= count <= width:
            raise ConfigError(f"{count} letters do not fit into the field {name}",
                              hint=f"give 0 to {width}")
        with nogil:
            kd_put_letters(&self._rows, width, count, stream)

    def choice(self, str name, texts):
        """One of these texts."""
        cdef uint64_t stream, count = len(texts)
        cdef int64_t width = self._at(name, &stream)
        cdef bytes joined = b"".join(text.encode().ljust(width, b"\0") for text in texts)
        if not texts or len(joined) != width * len(texts):
            raise ConfigError(f"a text of the field {name} is longer than {width} bytes",
                              hint="give shorter ones, at least one")
        cdef const uint8_t* first = joined
        with nogil:
            kd_put_choice(&self._rows, width, stream, first, count)

    def times(self, str name, times, mixture=(1, 0, 1)):
        """Event times: `times` is an `EventTime`, `mixture` (records of this stream in an epoch,
        events before them in it, events of an epoch)."""
        cdef uint64_t stream
        cdef int width = self._at(name, &stream)
        cdef kd_times t
        cdef kd_mixture m
        t.start = times.start_us
        t.step = times.step_us
        t.disorder = times.disorder_us
        t.late = times.late_by_us
        t.late_share = <uint64_t>(min(max(times.late_share, 0.0), 1.0) * 2.0 ** 32)
        t.unit = 1000 if self._layout.field(name).kind.arrow.unit == "ms" else 1
        m.own, m.before, m.total = mixture
        with nogil:
            kd_put_times(&self._rows, width, stream, &t, &m)

    def references(self, str name, mixture, other, uint64_t base, *, uint64_t hot, uint64_t hot_at,
                   uint64_t active, uint64_t lead):
        """Ids of another stream, whose records are `other` (how many in an epoch, events before
        them in it); see generate.h."""
        cdef uint64_t stream
        cdef int width = self._at(name, &stream)
        cdef kd_reference r
        r.mixture.own, r.mixture.before, r.mixture.total = mixture
        r.other, r.other_before = other
        r.base = base
        r.hot = hot
        r.hot_at = hot_at
        r.active = active
        r.lead = lead
        with nogil:
            kd_put_references(&self._rows, width, stream, &r)
