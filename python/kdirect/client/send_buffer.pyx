# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The bytes of a writer's requests, from the call that sends them until nobody needs them any more.

Owns: the ring of registered memory that requests are encoded into, the window of requests with
their tags, and the values that are not copied.  What may not enter: when a request is done with
(`kdirect.client.direct_write` says so), and the transport.

A request takes one contiguous stretch of the ring.  Where the transport reads a large value from
where the caller has it, the stretch has a *hole* of the value's length: nobody writes it, and the
value itself, a `bytes`, which never changes, is kept here by reference for as long as the request
may have to be repeated.  The hole takes its room of the ring all the same, so that the values that
are kept are never more than the ring holds.

A request may have a *tag*, any object but None, under which its outcome is told.  The slot of the
request holds the writer's one reference to the tag, in a list, so that the garbage collector sees
it.  Whoever takes an acknowledgement has no GIL and touches no reference: the base offset or the
error goes into the slot, and `collect` and `take_refused`, which have the GIL, hand the tag on.  A
slot with a tag is not used again before that: the writer sends nothing more than a window after
`collected` while there are tags.  What is in flight when the writer is
dropped loses its tag with `clear`, or with this object.

A value is given up at the next call that has the GIL after its request's bytes were freed (`drop`),
not by whoever takes the acknowledgement, who has none.  One thread at a time, as `direct_write`
says.
"""

from cpython.bytes cimport PyBytes_GET_SIZE
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from kdirect.rdma.contract cimport MemoryRegion


cdef class SendBuffer:
    """See the module.  Requests are named by their sequence numbers; `window` (a power of two)
    bounds those that are not freed.  `outcomes`: where the outcomes of requests with a tag go."""

    def __cinit__(self):
        self.requests = NULL

    def __init__(self, uint64_t window, list outcomes):
        self.window = window
        self._values = [None] * window
        self._tags = [None] * window
        self._outcomes = outcomes
        self.requests = <request_t*> calloc(window, sizeof(request_t))
        if self.requests == NULL:
            raise MemoryError()

    def __dealloc__(self):
        free(self.requests)

    cdef set_region(self, MemoryRegion region):
        """Use this memory from now on; no request may be in the buffer."""
        self.region = region
        self.capacity = region.length
        self.clear()

    cdef clear(self):
        """Free everything, and forget the tags."""
        self._taken = self._write_at = self._free_from = 0
        if self._kept > self._dropped:
            self._values = [None] * self.window
        self._dropped = self._kept = 0
        if self.tagged:
            self._tags = [None] * self.window
        self.tagged = 0

    cdef bytes copy(self, uint64_t sequence):
        """The bytes of a request that is not freed."""
        cdef request_t* r = self.c_request(sequence)
        cdef const char* data = <const char*> self.region.data + r.start
        cdef bytes value
        cdef uint32_t after
        if r.hole == 0:
            return data[:r.length]
        value = self._values[sequence & (self.window - 1)]
        after = r.hole + <uint32_t> PyBytes_GET_SIZE(value)
        return data[:r.hole] + value + data[after:r.length]

    cdef void keep(self, uint64_t sequence, bytes value) noexcept:
        """Hold on to what fills the hole of the request that was sent last.  `drop` comes first:
        its slot was another's."""
        if self._dropped >= self._kept:
            self._dropped = sequence
        self._values[sequence & (self.window - 1)] = value
        self._kept = sequence + 1

    cdef void drop(self, uint64_t freed) noexcept:
        """Let go of the values of the requests before `freed`."""
        cdef uint64_t upto = freed if freed < self._kept else self._kept
        while self._dropped < upto:
            self._values[self._dropped & (self.window - 1)] = None
            self._dropped += 1

    cdef set_tag(self, uint64_t sequence, tag):
        """Remember under which tag this request, the latest, was sent."""
        if self.tagged == 0:
            self.collected = sequence
        self._tags[sequence & (self.window - 1)] = tag
        self.tagged += 1

    cdef bint collect(self, uint64_t acknowledged) except -1:
        """Hand on the tags of the requests before `acknowledged` that were not refused, as outcomes
        (tag, base offset, None).  Was there any slot to look at?"""
        cdef request_t* r
        cdef uint64_t slot
        if self.tagged == 0 or self.collected >= acknowledged:
            return False
        while self.collected < acknowledged:
            slot = self.collected & (self.window - 1)
            r = &self.requests[slot]
            if r.error == 0 and self._tags[slot] is not None:
                self._outcomes.append((self._tags[slot], r.base_offset, None))
                self._tags[slot] = None
                self.tagged -= 1
            self.collected += 1
        return True

    cdef list requests_between(self, uint64_t first, uint64_t end):
        """[(bytes, records, tag)] of these requests, which are not freed."""
        cdef uint64_t s
        return [
            (self.copy(s), self.c_request(s).records, self._tags[s & (self.window - 1)])
            for s in range(first, end)
        ]

    cdef list take_refused(self, uint64_t first, uint64_t end):
        """[(bytes, records, tag, error code)] of those among these requests that were refused; they
        are like the others then, and have no tag."""
        cdef uint64_t s, slot
        cdef request_t* r
        out = []
        for s in range(first, end):
            slot = s & (self.window - 1)
            r = &self.requests[slot]
            if r.error:
                tag = self._tags[slot]
                if tag is not None:
                    self._tags[slot] = None
                    self.tagged -= 1
                out.append((self.copy(s), r.records, tag, r.error))
                r.error = 0
        return out

    cdef request_t* c_request(self, uint64_t sequence) noexcept nogil:
        return &self.requests[sequence & (self.window - 1)]

    cdef bint c_reserve(self, uint64_t n, uint64_t* start) noexcept nogil:
        """Find room for `n` contiguous bytes, which `c_take` takes; False: there is none."""
        cdef uint64_t at = self._write_at
        cdef uint64_t skipped = 0
        if at + n > self.capacity:
            skipped = self.capacity - at
            at = 0
        start[0] = at
        return self._taken + skipped + n <= self.capacity

    cdef void c_take(self, uint64_t start, uint64_t length) noexcept nogil:
        """So many bytes from where `c_reserve` found room are a request's."""
        if self._taken == 0:
            self._free_from = start     # also where the buffer became empty after room was found
        elif start != self._write_at:
            self._taken += self.capacity - self._write_at  # too little was left at the ring's end
        self._write_at = start + length
        self._taken += length

    cdef void c_free(self, uint64_t upto, uint64_t appended) noexcept nogil:
        """Free the bytes of every request before `upto`; `appended` were ever sent."""
        cdef request_t* r
        if upto == appended:
            self._taken = self._write_at = self._free_from = 0
            return
        r = self.c_request(upto)
        if r.start >= self._free_from:
            self._taken -= r.start - self._free_from
        else:
            self._taken -= self.capacity - self._free_from + r.start
        self._free_from = r.start
