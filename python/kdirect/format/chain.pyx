# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Whether a batch continues the log: what the CRC does not cover, compared with what its reader
knows.

Law of the room: no I/O, no state but `chain_t`, nothing outside the bytes given is read.

The CRC of a batch leaves out its base offset, its length, its leader epoch, its magic and itself,
because the broker stamps the first and the third.  A flipped bit there is found by comparison only:

- Base offset.  A log that kdirect wrote has no gaps: a batch begins where the one before it ended,
  and its last offset delta is under the CRC.  Below `dense_from` the log was written by Kafka,
  whose cleaner leaves gaps; there offsets only have to rise, and of two batches that overlap both
  are in doubt.
- Leader epoch.  It does not go back, and is not above the present one.
- Length.  The committed bytes end with a batch, and what follows a batch of a wrong length does not
  continue the log; the CRC of a batch of a wrong length fails.

Where no offset can be missing a batch's own header says whether it follows, so the decoders apply
the rule themselves, to the header that they have parsed anyway (`continues_dense`, `move_dense`).
They stop at a batch that does not follow, or whose CRC is wrong, and say nothing: `follow_batches`
finds the same fault and tells it.  Elsewhere, and for bytes that are sent on, `follow_batches` goes
first.

What stays undetected below `dense_from`: a base offset that moved within the gap before or after
its batch.
"""

from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from kdirect.format.batch cimport (
    BATCH_BAD_CRC, BATCH_BAD_LENGTH, BATCH_BAD_MAGIC, BATCH_OK, BATCH_TRUNCATED, batch_info,
    check_batch_crc, parse_batch_header)
from kdirect.format.layout cimport (
    BATCH_BASE_OFFSET, BATCH_HEADER_BYTES, BATCH_LAST_OFFSET_DELTA, BATCH_LEADER_EPOCH,
    BATCH_LENGTH, BATCH_LENGTH_PREFIX_BYTES, BATCH_MAGIC, BATCH_MAGIC_V2, BATCH_MIN_LENGTH)

from kdirect.format.wire cimport kd_get32, kd_get64, kd_get8, kd_prefetch

from kdirect.errors import CorruptBatchError
from kdirect.format.batch import batch_error

DAMAGED_HINT = "restore the segment from a good copy, or read past it with another offset"


cdef void start_chain(chain_t* c) noexcept nogil:
    c.next_offset = -1
    c.asked = 0
    c.dense_from = INT64_MAX
    c.end_offset = INT64_MAX
    c.least_epoch = 0
    c.greatest_epoch = INT32_MAX
    c.copied_epoch = -1


cdef int follow_batch(chain_t* c, const batch_info* info) noexcept nogil:
    cdef int64_t base = info.base_offset, after
    if base < 0 or info.last_offset_delta < 0 or base > INT64_MAX - 1 - info.last_offset_delta:
        return CHAIN_BAD_OFFSETS
    after = base + info.last_offset_delta + 1
    if c.next_offset < 0:
        if after <= c.asked:
            return CHAIN_NOT_ASKED
    elif base < c.next_offset:
        return CHAIN_OVERLAP
    elif base > c.next_offset and (c.next_offset >= c.dense_from or base > c.dense_from):
        return CHAIN_GAP
    if after > c.end_offset:
        return CHAIN_BEYOND
    if base >= c.dense_from:
        if info.leader_epoch < c.least_epoch or info.leader_epoch > c.greatest_epoch:
            return CHAIN_BAD_EPOCH
        c.least_epoch = info.leader_epoch
    elif info.leader_epoch != -1:      # which Kafka writes where it knows none
        if info.leader_epoch < c.copied_epoch:
            return CHAIN_BAD_EPOCH
        c.copied_epoch = info.leader_epoch
    c.next_offset = after
    return CHAIN_OK


cdef uint64_t _follow_fast(chain_t* c, const uint8_t* p, uint64_t n, uint64_t at,
                           int64_t* previous) noexcept nogil:
    """As far as whole batches follow each other without a gap, which is nearly always to the end:
    the position after them."""
    cdef int64_t next_offset = c.next_offset, base, delta
    cdef int32_t epoch
    cdef uint32_t length
    cdef const uint8_t* q
    while n - at >= BATCH_HEADER_BYTES:
        q = p + at
        base = <int64_t> kd_get64(q + BATCH_BASE_OFFSET)
        length = kd_get32(q + BATCH_LENGTH)
        delta = <int32_t> kd_get32(q + BATCH_LAST_OFFSET_DELTA)
        epoch = <int32_t> kd_get32(q + BATCH_LEADER_EPOCH)
        if base != next_offset or length < BATCH_MIN_LENGTH:
            break
        if length > n - at - BATCH_LENGTH_PREFIX_BYTES:
            break
        if kd_get8(q + BATCH_MAGIC) != BATCH_MAGIC_V2:
            break
        if delta < 0 or delta >= c.end_offset - base:
            break
        if base >= c.dense_from:
            if epoch < c.least_epoch or epoch > c.greatest_epoch:
                break
            c.least_epoch = epoch
        else:
            if epoch < c.copied_epoch:
                break
            c.copied_epoch = epoch
        # Batches of one producer are often of one size: the header of the eighth from here is
        # likely to be there.
        kd_prefetch(q + 8 * <size_t> (BATCH_LENGTH_PREFIX_BYTES + length))
        next_offset = base + delta + 1
        previous[0] = <int64_t> at
        at += BATCH_LENGTH_PREFIX_BYTES + length
    c.next_offset = next_offset
    return at


cdef int follow_batches(chain_t* c, const uint8_t* p, uint64_t n, uint64_t readable,
                        uint64_t* whole, batch_info* last) noexcept nogil:
    cdef chain_t start = c[0]
    cdef batch_info info
    cdef uint64_t first = whole[0], at = whole[0], need
    cdef int64_t previous = -1
    cdef int code = CHAIN_OK
    memset(&info, 0, sizeof(info))
    while at < n:
        if c.next_offset >= 0:
            at = _follow_fast(c, p, n, at, &previous)
            if at == n:
                break
        code = parse_batch_header(p + at, n - at, &info)
        if code == BATCH_TRUNCATED or (code == BATCH_OK and info.size > n - at):
            need = info.size if info.size else BATCH_HEADER_BYTES
            code = CHAIN_OK if need <= readable - at else CHAIN_CUT
            break
        if code != BATCH_OK:
            break
        code = follow_batch(c, &info)
        if code != CHAIN_OK:
            break
        previous = <int64_t> at
        at += info.size
    if code != CHAIN_OK and previous >= 0:
        # The fault shows here, but it may be that of the batch before: of its length, or of its
        # offsets.
        if check_batch_crc(p + previous, n - <uint64_t> previous, &info) != BATCH_OK:
            code = BATCH_BAD_CRC
            at = <uint64_t> previous
        elif code == CHAIN_OVERLAP and info.base_offset < c.dense_from:
            at = <uint64_t> previous
        if at == <uint64_t> previous:
            c[0] = start
            # once more, as far as all is well; the bytes may have changed meanwhile
            while first < at:
                if parse_batch_header(p + first, n - first,
                                      &info) != BATCH_OK or info.size > at - first \
                        or follow_batch(c, &info) != CHAIN_OK:
                    at = first
                    break
                first += info.size
        parse_batch_header(p + at, n - at, &info)
    whole[0] = at
    last[0] = info
    return code


cdef object chain_text(int code, const chain_t* c, const batch_info* info):
    cdef str offsets = f"{info.base_offset} and {info.last_offset_delta} more"
    if code == CHAIN_GAP or (code == CHAIN_OVERLAP and info.base_offset < c.next_offset):
        return (f"says that its base offset is {info.base_offset}, and offset {c.next_offset} comes"
                " next")
    if code == CHAIN_OVERLAP:
        return f"has offsets ({offsets}) that overlap those of the next one"
    if code == CHAIN_BEYOND:
        return (f"says that its offsets are {offsets}, and offset {c.end_offset} is the end of what"
                " can be read")
    if code == CHAIN_NOT_ASKED:
        return (f"is broken: its offsets run backwards ({offsets}, and offset {c.asked} was asked"
                " for)")
    if code == CHAIN_BAD_EPOCH:
        least = c.least_epoch if info.base_offset >= c.dense_from else c.copied_epoch
        return (f"says that its leader epoch is {info.leader_epoch}, and it cannot be below {least}"
                f" or above {c.greatest_epoch}")
    if code == CHAIN_CUT:
        return (f"says that it is {info.size} bytes long, and ends after the last byte that was"
                " committed")
    if code == CHAIN_BAD_OFFSETS:
        return f"is broken: its offsets run backwards ({offsets})"
    if code == BATCH_BAD_LENGTH:
        return "is broken: its length is impossible"
    if code == BATCH_BAD_CRC:
        return "does not match its CRC, or has a wrong length"
    if code == BATCH_BAD_MAGIC:
        return "is broken: its magic is not 2"
    return f"has fault {code}"


cdef object chain_error(int code, const chain_t* c, const batch_info* info, where, head):
    cdef bint may_be_old = code == BATCH_BAD_MAGIC and not 0 <= c.dense_from <= c.next_offset
    if may_be_old:
        return batch_error(code, where, head)
    return CorruptBatchError(f"record batch at {where} {chain_text(code, c, info)}",
                             hint=DAMAGED_HINT)
