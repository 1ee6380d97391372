# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Transactions in a log: which are open, which were aborted, and the last stable offset.

Law of the room: functions over `kernel_state`, called by the modules of the kernel with its mutex
held.  No lock, no I/O, no clock, no Python object; the only allocation grows a table.

The rules are Kafka's (ProducerAppendInfo, ProducerStateManager):

- A producer's first transactional batch opens a transaction, which its marker, a control batch that
  only a coordinator writes, ends.  Batches without the bit are refused while it is open
  (INVALID_TXN_STATE).
- A transaction is opened only where its coordinator has confirmed it (KIP-890): a *verification* is
  begun, which gives a ticket, and admitted by that ticket.  A marker takes tickets and admissions
  away, so what a coordinator said before it ended the transaction opens no other one.
- A marker with an older epoch than the producer's is refused (INVALID_PRODUCER_EPOCH), one of an
  older coordinator, too (TRANSACTION_COORDINATOR_FENCED).  After a marker with a higher epoch the
  producer goes on in that epoch, at sequence 0 (KIP-890's second protocol).
- The last stable offset is the least of the high watermark and of the first batch of a transaction
  that is open, or whose marker is not below the high watermark yet.
- An abort leaves an entry of the aborted index: producer id, first offset, offset of the marker,
  and the first offset of the oldest transaction that was open then, or the offset after the marker.

Life of an entry of the aborted index.  `end_transaction` makes it, from the marker, and recovery
from a file.  It goes when the log is cut below its marker (`cut_transactions`), when retention has
deleted its marker (`forget_aborted`), and when cleaning has left nothing to be told of
(`remove_aborted`).  For the last, three rules, because readers ask the index of now, whatever bytes
they have:

1. Whoever can have one of its records needs it.  So it goes only when a whole walk over the log has
   met none, and no segment of its offsets that left the log before that walk is acquired any more
   (`KeptSegments.held_offsets`): those may have records of it.  Else a later cleaning looks again.
2. Whoever has it and not its marker would drop what the producer sends later.  So the marker stays
   until the entry is gone: only a walk that finds, or makes, an index without it gives the marker's
   batch the delete horizon after which a later one removes the marker.
3. It leaves memory before the segments are exchanged in memory, and ``.txnindex`` on disk with the
   segment that it belongs to.

The table of transactions is ordered by their first offsets, the aborted index by markers; both are
those of the records that are kept here.
"""

from libc.errno cimport ENOMEM
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport realloc
from libc.string cimport memmove, memset

from kdirect.format.batch cimport batch_info
from kdirect.format.layout cimport (
    ATTRIBUTE_CODEC_MASK, ATTRIBUTE_CONTROL, ATTRIBUTE_TRANSACTIONAL, BATCH_ATTRIBUTES,
    BATCH_BASE_SEQUENCE, BATCH_BASE_TIMESTAMP, BATCH_CRC, BATCH_HEADER_BYTES, BATCH_LENGTH,
    BATCH_LENGTH_PREFIX_BYTES, BATCH_MAGIC, BATCH_MAGIC_V2, BATCH_MAX_TIMESTAMP,
    BATCH_PRODUCER_EPOCH, BATCH_PRODUCER_ID, BATCH_RECORDS, BATCH_RECORDS_COUNT)
from kdirect.format.wire cimport (
    kd_get16, kd_get32, kd_get_varint, kd_put16, kd_put32, kd_put64)
from kdirect.log.producers cimport (
    find_producer, producer_state, reserve_producers, restore_batch, start_producer, store_producer)
from kdirect.log.results cimport (
    COMMIT_COORDINATOR_FENCED, COMMIT_INVALID_PRODUCER_EPOCH, COMMIT_INVALID_RECORD,
    COMMIT_INVALID_TXN_STATE, COMMIT_OK, COMMIT_OUT_OF_ORDER_SEQUENCE, COMMIT_STORAGE_ERROR,
    COMMIT_UNVERIFIED_TRANSACTION)
from kdirect.log.state cimport aborted_t, kernel_state, mark_t, transaction_t

cdef extern from "crc32c.h" nogil:
    uint32_t kd_crc32c(uint32_t crc, const void* data, size_t n)


# -- judging ---------------------------------------------------------------------------------------

cdef int check_transaction(kernel_state* s) noexcept nogil:
    cdef const batch_info* first = &s.infos[0]
    cdef bint transactional = (first.attributes & ATTRIBUTE_TRANSACTIONAL) != 0
    cdef const producer_state* known
    cdef uint32_t i
    for i in range(1, s.infos_count):
        if ((s.infos[i].attributes & ATTRIBUTE_TRANSACTIONAL) != 0) != transactional:
            return COMMIT_INVALID_RECORD
    if first.producer_id < 0:
        return COMMIT_INVALID_RECORD if transactional else COMMIT_OK
    known = find_producer(&s.producers, first.producer_id)
    if not transactional:
        if known != NULL and known.transaction_start != -1:
            return COMMIT_INVALID_TXN_STATE
        return COMMIT_OK
    if known == NULL:
        return COMMIT_UNVERIFIED_TRANSACTION
    if known.transaction_start != -1 and known.epoch == first.producer_epoch:
        return COMMIT_OK
    if not known.admitted or known.ticket_epoch != first.producer_epoch:
        return COMMIT_UNVERIFIED_TRANSACTION
    if first.base_sequence > known.least_sequence:
        return COMMIT_OUT_OF_ORDER_SEQUENCE    # what came before was refused
    if reserve_transactions(s, 1) != 0:
        return COMMIT_STORAGE_ERROR
    if s.scratch.transaction_start == -1:
        s.scratch.transaction_start = s.log_end
    s.scratch.admitted = False
    s.scratch.ticket = 0
    return COMMIT_OK


cdef int check_marker(kernel_state* s, int64_t producer_id, int16_t producer_epoch,
                      int32_t coordinator_epoch) noexcept nogil:
    cdef const producer_state* known = find_producer(&s.producers, producer_id)
    if producer_id < 0 or producer_epoch < 0:
        return COMMIT_INVALID_RECORD
    if known != NULL:
        s.scratch = known[0]
    else:
        start_producer(&s.scratch, producer_id)
        if reserve_producers(&s.producers, 1) != 0:
            return COMMIT_STORAGE_ERROR
    if producer_epoch < s.scratch.epoch:
        return COMMIT_INVALID_PRODUCER_EPOCH
    if coordinator_epoch < s.scratch.coordinator_epoch:
        return COMMIT_COORDINATOR_FENCED
    if reserve_transactions(s, 1) != 0:
        return COMMIT_STORAGE_ERROR
    _take_marker(&s.scratch, producer_epoch, coordinator_epoch)
    return COMMIT_OK


cdef void _take_marker(producer_state* p, int16_t producer_epoch,
                       int32_t coordinator_epoch) noexcept nogil:
    if producer_epoch != p.epoch:
        p.epoch = producer_epoch
        p.count = 0
        p.start_sequence = 0
    p.coordinator_epoch = coordinator_epoch
    p.transaction_start = -1
    p.admitted = False
    p.ticket = 0


# -- the table of transactions ---------------------------------------------------------------------

cdef int reserve_transactions(kernel_state* s, uint32_t more) noexcept nogil:
    cdef uint32_t capacity
    cdef void* grown
    if s.transactions_count + more > s.transactions_capacity:
        capacity = max(<uint32_t> 8, s.transactions_capacity * 2, s.transactions_count + more)
        grown = realloc(s.transactions, capacity * sizeof(transaction_t))
        if grown == NULL:
            return ENOMEM
        s.transactions = <transaction_t*> grown
        s.transactions_capacity = capacity
    if s.aborted_count + more > s.aborted_capacity:
        capacity = max(<uint32_t> 8, s.aborted_capacity * 2, s.aborted_count + more)
        grown = realloc(s.aborted, capacity * sizeof(aborted_t))
        if grown == NULL:
            return ENOMEM
        s.aborted = <aborted_t*> grown
        s.aborted_capacity = capacity
    return 0


cdef void begin_transaction(kernel_state* s, int64_t producer_id,
                            const mark_t* start) noexcept nogil:
    cdef uint32_t at = s.transactions_count
    while at > 0 and s.transactions[at - 1].start.offset > start.offset:
        at -= 1
    memmove(&s.transactions[at + 1], &s.transactions[at],
            (s.transactions_count - at) * sizeof(transaction_t))
    s.transactions[at].producer_id = producer_id
    s.transactions[at].first_offset = start.offset
    s.transactions[at].marker = -1
    s.transactions[at].start = start[0]
    s.transactions_count += 1


cdef void end_transaction(kernel_state* s, int64_t producer_id, int64_t marker_offset,
                          bint is_abort) noexcept nogil:
    cdef transaction_t* ended = NULL
    cdef int64_t stable = marker_offset + 1
    cdef uint32_t i
    for i in range(s.transactions_count):
        if s.transactions[i].marker != -1:
            continue
        if ended == NULL and s.transactions[i].producer_id == producer_id:
            ended = &s.transactions[i]
        elif s.transactions[i].first_offset < stable:
            stable = s.transactions[i].first_offset
    if ended == NULL:
        return
    ended.marker = marker_offset
    s.transactions_ended += 1
    if is_abort and not (s.aborted_count
                         and s.aborted[s.aborted_count - 1].last_offset >= marker_offset):
        s.aborted[s.aborted_count].producer_id = producer_id
        s.aborted[s.aborted_count].first_offset = ended.first_offset
        s.aborted[s.aborted_count].last_offset = marker_offset
        s.aborted[s.aborted_count].stable_offset = stable
        s.aborted_count += 1


cdef void note_batch(kernel_state* s, const batch_info* b, const uint8_t* p, int64_t base,
                     uint64_t position, int64_t now_ms) noexcept nogil:
    cdef producer_state* known
    cdef producer_state entry
    cdef marker_t marker
    cdef mark_t start
    if b.producer_id < 0:
        return
    if b.attributes & ATTRIBUTE_CONTROL:
        if not read_marker(p, b, &marker):
            return
        known = find_producer(&s.producers, b.producer_id)
        if known != NULL:
            entry = known[0]
        else:
            start_producer(&entry, b.producer_id)
        _take_marker(&entry, b.producer_epoch, marker.coordinator_epoch)
        entry.last_time_ms = now_ms
        store_producer(&s.producers, &entry)
        end_transaction(s, b.producer_id, b.base_offset, marker.is_abort)
        return
    restore_batch(&s.producers, b, now_ms)
    if b.attributes & ATTRIBUTE_TRANSACTIONAL:
        known = find_producer(&s.producers, b.producer_id)
        if known != NULL and known.transaction_start == -1:
            known.transaction_start = b.base_offset
            known.admitted = False
            known.ticket = 0
            start.base = base
            start.position = position
            start.offset = b.base_offset
            begin_transaction(s, b.producer_id, &start)


cdef void settle_stable(kernel_state* s) noexcept nogil:
    cdef uint32_t i, kept = 0
    if s.transactions_ended:
        for i in range(s.transactions_count):
            if 0 <= s.transactions[i].marker < s.readable.offset:
                s.transactions_ended -= 1
                continue
            s.transactions[kept] = s.transactions[i]
            kept += 1
        s.transactions_count = kept
    if s.transactions_unknown:
        if s.stable.offset > s.readable.offset:
            s.stable = s.readable
    elif s.transactions_count and s.transactions[0].start.offset < s.readable.offset:
        s.stable = s.transactions[0].start
    else:
        s.stable = s.readable


cdef void keep_ended(kernel_state* s, int64_t end_offset) noexcept nogil:
    cdef uint32_t i, kept = 0
    for i in range(s.transactions_count):
        if 0 <= s.transactions[i].marker < end_offset:
            s.transactions[kept] = s.transactions[i]
            kept += 1
    s.transactions_count = kept
    s.transactions_ended = kept


cdef void cut_transactions(kernel_state* s, int64_t end_offset, bint empty) noexcept nogil:
    keep_ended(s, -1 if empty else end_offset)
    s.transactions_unknown = True
    while s.aborted_count and (empty or s.aborted[s.aborted_count - 1].last_offset >= end_offset):
        s.aborted_count -= 1
    s.aborted_from = min(s.aborted_from, end_offset)


cdef void start_transactions_at(kernel_state* s) noexcept nogil:
    cdef mark_t start
    cdef uint32_t i
    start.base = s.base
    for i in range(s.sealed_count):
        if s.log_start < s.sealed[i].end_offset:
            start.base = s.sealed[i].base
            break
    start.position = 0                  # a batch that begins at the log start or before
    start.offset = s.log_start
    for i in range(s.transactions_count):
        if s.transactions[i].start.offset >= s.log_start:
            break
        if s.transactions[i].start.base < start.base:
            s.transactions[i].start = start
        s.transactions[i].start.offset = s.log_start


# -- markers ---------------------------------------------------------------------------------------

cdef bint read_marker(const uint8_t* p, const batch_info* b, marker_t* out) noexcept nogil:
    cdef const uint8_t* end = p + b.size
    cdef const uint8_t* at = p + BATCH_RECORDS
    cdef int64_t number
    cdef uint16_t kind
    cdef int i
    if b.attributes & ATTRIBUTE_CODEC_MASK or b.size < BATCH_RECORDS:
        return False
    at = kd_get_varint(at, end, &number)           # the record's length
    if at == NULL or at >= end:
        return False
    at += 1                                        # its attributes
    for i in range(3):                             # timestamp and offset, then length of the key
        at = kd_get_varint(at, end, &number)
        if at == NULL:
            return False
    if number < 4 or number > end - at:
        return False
    kind = kd_get16(at + 2)
    if kind != MARKER_IS_ABORT and kind != MARKER_IS_COMMIT:
        return False
    at = kd_get_varint(at + number, end, &number)  # the length of the value
    if at == NULL or number < 6 or number > end - at:
        return False
    out.coordinator_epoch = <int32_t> kd_get32(at + 2)
    out.is_abort = kind == MARKER_IS_ABORT
    return True


cdef void write_marker(uint8_t* out, int64_t producer_id, int16_t producer_epoch,
                       int32_t coordinator_epoch, bint commit, int64_t now_ms) noexcept nogil:
    # Length, attributes, differences of timestamp and offset, length of the key; then the key:
    # version 0 and type; the length of the value, the value: version 0 and epoch; no headers.
    cdef uint8_t* r = out + BATCH_RECORDS
    memset(out, 0, MARKER_BYTES)
    kd_put32(out + BATCH_LENGTH, MARKER_BYTES - BATCH_LENGTH_PREFIX_BYTES)
    out[BATCH_MAGIC] = BATCH_MAGIC_V2
    kd_put16(out + BATCH_ATTRIBUTES, ATTRIBUTE_CONTROL | ATTRIBUTE_TRANSACTIONAL)
    kd_put64(out + BATCH_BASE_TIMESTAMP, <uint64_t> now_ms)
    kd_put64(out + BATCH_MAX_TIMESTAMP, <uint64_t> now_ms)
    kd_put64(out + BATCH_PRODUCER_ID, <uint64_t> producer_id)
    kd_put16(out + BATCH_PRODUCER_EPOCH, <uint16_t> producer_epoch)
    kd_put32(out + BATCH_BASE_SEQUENCE, <uint32_t> -1)
    kd_put32(out + BATCH_RECORDS_COUNT, 1)
    r[0] = (MARKER_BYTES - BATCH_HEADER_BYTES - 1) << 1
    r[4] = 4 << 1
    r[8] = MARKER_IS_COMMIT if commit else MARKER_IS_ABORT
    r[9] = 6 << 1
    kd_put32(r + 12, <uint32_t> coordinator_epoch)
    kd_put32(out + BATCH_CRC,
             kd_crc32c(0, out + BATCH_ATTRIBUTES, MARKER_BYTES - BATCH_ATTRIBUTES))
