# cython: boundscheck=False, wraparound=False
"""The compiled loop of the TCP fallback: where the whole batches of fetched bytes end.

Looks at frames only (length, magic, offsets, leader epochs); CRC and records are the decoder's.  No
I/O, no state.  Whether offsets may be missing a client cannot know over Fetch: batches have to
rise, and to reach the offset asked for.  The high watermark of an answer is no bound: Kafka looks
at it before it reads.  A kdirect broker has compared the batches with its log before it sent them.
"""

from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint64_t

from kdirect.format.batch cimport batch_info
from kdirect.format.chain cimport CHAIN_OK, chain_t, chain_text, follow_batches, start_chain


def whole_batches(const uint8_t[::1] data, int64_t asked):
    """(bytes of whole batches at the start of `data`, offset after them, bytes that the next batch
    needs or 0, what is wrong or None, leader epoch of the last of them or -1).

    `asked` is the offset that `data` was asked for; its first batch may begin before it.
    """
    cdef uint64_t n = data.shape[0], whole = 0, needed = 0
    cdef int code = CHAIN_OK
    cdef batch_info info
    cdef chain_t chain
    start_chain(&chain)
    chain.asked = asked
    if n:
        with nogil:
            # Where the bytes are cut the broker has more: how many it does not say.
            code = follow_batches(&chain, &data[0], n, INT64_MAX, &whole, &info)
        if code == CHAIN_OK and whole < n:
            needed = info.size if info.size else 1
    next_offset = chain.next_offset if whole else asked
    wrong = None if code == CHAIN_OK else chain_text(code, &chain, &info)
    return whole, next_offset, needed, wrong, chain.copied_epoch if whole else -1


def located_batches(const uint8_t[::1] data, int64_t next_offset, int64_t dense_from,
                    int64_t end_offset, int least_epoch, int greatest_epoch):
    """The same for bytes of a located segment, of which more is known: the first batch continues
    the log at `next_offset`, from `dense_from` on no offset is missing, none is at `end_offset` or
    above, and leader epochs are within these two."""
    cdef uint64_t n = data.shape[0], whole = 0, needed = 0
    cdef int code = CHAIN_OK
    cdef batch_info info
    cdef chain_t chain
    start_chain(&chain)
    chain.next_offset = next_offset
    chain.dense_from = dense_from
    chain.end_offset = end_offset
    chain.least_epoch = least_epoch
    chain.greatest_epoch = greatest_epoch
    if n:
        with nogil:
            code = follow_batches(&chain, &data[0], n, INT64_MAX, &whole, &info)
        if code == CHAIN_OK and whole < n:
            needed = info.size if info.size else 1
    wrong = None if code == CHAIN_OK else chain_text(code, &chain, &info)
    epoch = chain.least_epoch if chain.next_offset > dense_from else chain.copied_epoch
    return whole, chain.next_offset, needed, wrong, epoch if whole else -1
