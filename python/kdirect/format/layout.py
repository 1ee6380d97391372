"""Every byte layout of logs and of the protocol of access, described once.

Owns: names, positions and sizes of the fields that two processes (or two runs of one) read in each
other's bytes.  Nothing here does I/O or holds state.  Cython reads the same numbers from
``layout.pxd``, which ``make layout`` writes from this file; a test fails when the two differ.

Record batch v2 (Kafka's own, big endian; the CRC covers ``attributes`` to the end)::

     0        8        12            16     17    21          23               27
    +--------+--------+-------------+------+-----+-----------+----------------+
    | base   | batch  | partition   | magic| crc | attributes| last offset    |
    | offset | length | leader epoch| = 2  |     |           | delta          |
    +--------+--------+-------------+------+-----+-----------+----------------+
    27       35       43          51         53         57           61
    +--------+--------+-----------+----------+----------+------------+---------
    | base   | max    | producer  | producer | base     | records    | records
    | timest.| timest.| id        | epoch    | sequence | count      | ...
    +--------+--------+-----------+----------+----------+------------+---------

``batch length`` counts the bytes after itself, so a batch occupies ``12 + batch length`` bytes.

Metadata slot (KafkaDirect section 4.4.2, figure 9; little endian, one cache line)::

     0       4       6       8              16             24             32
    +-------+-------+-------+--------------+--------------+--------------+
    | guard | flags | file  | segment base | last readable| high         |
    | crc32c|       | id    | offset       | position     | watermark    |
    +-------+-------+-------+--------------+--------------+--------------+
    32             40             48       52       56             64
    +--------------+--------------+--------+--------+--------------+
    | last stable  | last stable  | leader | update | log start    |
    | position     | offset       | epoch  | count  | offset       |
    +--------------+--------------+--------+--------+--------------+

``guard`` is the CRC-32C of bytes 4 to 64: a READ that overlaps an update does not match and is
repeated.  ``last readable position`` is the position in this file after its last batch below ``high
watermark``: 0 when the high watermark lies in an earlier segment, the file's end when it lies in a
later one.  A file may be sealed, and the high watermark lie in it: its slot is updated like that of
the last file, and gets SLOT_FLAG_SEALED once the high watermark and the last stable offset have
passed its end; before, once the high watermark alone has, SLOT_FLAG_READABLE, which is for readers
that do not wait for transactions.  So a reader that sees the flag finds the end of the file in
``last readable position``, and one that does not see it has not finished the file.

Acknowledgement entry (the broker WRITEs it into the producer's ring; little endian)::

     0        4       6       8       10      12       16             24
    +--------+-------+-------+-------+-------+--------+--------------+
    |sequence| file  | order | error | flags | batches| base offset  |
    |        | id    |       |       |       |        |              |
    +--------+-------+-------+-------+-------+--------+--------------+
    24             32
    +--------------+
    | log append   |
    | time, ms     |
    +--------------+

``sequence`` counts the entries of a grant from 0 (modulo 2**32); an entry of 0 batches is a notice,
not an answer.

Immediate data of a produce WRITE_WITH_IMM (figure 4): ``file id << 16 | order``.
Immediate data of an acknowledgement WRITE_WITH_IMM: ``file id << 16 | number of entries written``.

Notice of a produce request (what ``rdma.notify=send`` SENDs after a plain WRITE, instead of
immediate data; little endian)::

     0       2       4        8
    +-------+-------+--------+
    | file  | order | length |
    | id    |       |        |
    +-------+-------+--------+

Shared word (figure 5; 8 bytes in the processor's order, reserved by FETCH_AND_ADD or
COMPARE_AND_SWAP)::

     63     48 47                                          0
    +---------+---------------------------------------------+
    | order   | position                                    |
    +---------+---------------------------------------------+

A reservation of n bytes adds ``1 << 48 | n``.  What was there before is its order and its position.
The order wraps around out of the top.  A position beyond the file says that the file is full: the
first reservation that passes its end makes all later ones do so too, so exactly the orders below it
are valid.  The broker closes a word by adding ``1 << 46``.  Reservations that fail after that are
below 2**31 bytes each, so it would take 2**15 of them to reach the order.

Commit of offsets (a member of a group WRITEs it into a cell of its commit slot, with immediate
data ``file id << 16 | order``; little endian)::

     0       4        8            12      16       24
    +-------+--------+------------+-------+--------+--------------+--------------+-----
    | guard |sequence| generation | count | token  | entry        | entry        | ...
    |       |        |            |       |        |              |              |
    +-------+--------+------------+-------+--------+--------------+--------------+-----

    Entry:  0        8       12             16
           +--------+-------+--------------+
           | offset | index | leader epoch |
           +--------+-------+--------------+

``guard`` is the CRC-32C of everything after itself, so a torn commit is refused.  ``sequence``
counts the commits under a grant from 0 (modulo 2**32); its lower 16 bits are the order, which
modulo the number of cells says which cell it lies in.  ``token`` is the number that came with the
grant, ``index`` the place of the partition in the request for the slot, ``generation`` that of the
group, or the member's epoch.

Object (a remote segment with its indexes, as it lies in an object store; what is kdirect's own in
it is little endian).  The sections follow each other without gaps and may be empty, but for the
log.  What comes after the log's bytes is the tail of the object, and is got by one request::

    +-------+--------+------+-------------+----------+--------+-------+--------+---------+
    | log   | offset | time | transaction | producer | leader | topic | footer | trailer |
    |       | index  | index| index       | snapshot | epochs |       |        |         |
    +-------+--------+------+-------------+----------+--------+-------+--------+---------+
            |<----------------------------------- tail --------------------------------->|

The sections are Kafka's own files, byte for byte: ``.log``, ``.index``, ``.timeindex``,
``.txnindex`` (below), ``.snapshot`` and ``leader-epoch-checkpoint``; but for the topic, which is
JSON, ``{"partitions": 3, "configs": {"retention.ms": "-1"}}``: what a broker that has lost
everything must know of it before it may delete anything by its age.

Footer of an object::

     0       2       4       8       12      16       24        32         40          48
    +-------+-------+-------+-------+-------+--------+---------+----------+-----------+
    |version|section|broker |leader |parti- | base   | end     | largest  | smallest  |
    | = 1   |count  |id     |epoch  |tion   | offset | offset  | timestamp| timestamp |
    +-------+-------+-------+-------+-------+--------+---------+----------+-----------+
    48      64        80       82      84    88
    +-------+---------+--------+-------+-----+------------+---------+-------+
    | topic | segment |cluster |topic  | 0   | section,   | cluster | topic |
    | id    | id      |id bytes|bytes  |     | for each   | id      |       |
    +-------+---------+--------+-------+-----+------------+---------+-------+

    Section:  0      2      4         8          16       24
             +------+------+---------+----------+--------+
             | kind | 0    | crc32c  | position | length |
             +------+------+---------+----------+--------+

``end offset`` is the offset after the last record.  A timestamp of -1 is unknown.  Broker and
leader epoch are those of who copied the segment.

Trailer of an object, its last bytes::

     0               4               8          16
    +---------------+---------------+----------+
    | footer length | footer crc32c | KDSEGEND |
    +---------------+---------------+----------+

Custom metadata of a remote segment, as kdirect writes it into ``__remote_log_metadata``::

     0      4         6      8        12     16              24              32
    +------+---------+------+--------+------+---------------+---------------+
    | KSEG | version | 0    | leader | 0    | position of   | length of     |
    |      | = 1     |      | epoch  |      | the tail      | the tail      |
    +------+---------+------+--------+------+---------------+---------------+

``leader epoch`` is that of the leadership that wrote the record.  Where the tail is, is known once
the object is stored; both are 0 before.

Entry of a transaction index (Kafka's, big endian)::

     0         2            10             18            26                   34
    +---------+------------+--------------+-------------+--------------------+
    | version | producer   | first        | last        | last stable        |
    | = 0     | id         | offset       | offset      | offset             |
    +---------+------------+--------------+-------------+--------------------+

List of aborted transactions (a reader of committed records READs it beside a granted file; little
endian): the aborted index as far as that file needs it, by markers::

     0       4       8       10      12      16
    +-------+-------+-------+-------+-------+----------+----------+-----
    | guard | count | flags | file  | 0     | entry    | entry    | ...
    | crc32c|       |       | id    |       |          |          |
    +-------+-------+-------+-------+-------+----------+----------+-----

    Entry:  0       4       8            16             24            32            40
           +-------+-------+------------+--------------+-------------+-------------+
           | guard | number| producer   | first        | last        | last stable |
           | crc32c|       | id         | offset       | offset      | offset      |
           +-------+-------+------------+--------------+-------------+-------------+

Each ``guard`` is the CRC-32C of what follows it in the head, or in the entry.  ``number`` counts
entries from 0.  An entry is written once, before ``count`` covers it, and ``count`` before a slot
tells of a last stable offset above the entry's marker.  So who READs a slot, and then the list,
finds all that was aborted below that offset.  ABORTED_FLAG_FULL: there was no room for more entries
than these, which tell all below the last one's ``last stable offset``.
"""

from __future__ import annotations

# -- record batch v2 -------------------------------------------------------------------------------
BATCH_BASE_OFFSET = 0
BATCH_LENGTH = 8
BATCH_LEADER_EPOCH = 12
BATCH_MAGIC = 16
BATCH_CRC = 17
BATCH_ATTRIBUTES = 21
BATCH_LAST_OFFSET_DELTA = 23
BATCH_BASE_TIMESTAMP = 27
BATCH_MAX_TIMESTAMP = 35
BATCH_PRODUCER_ID = 43
BATCH_PRODUCER_EPOCH = 51
BATCH_BASE_SEQUENCE = 53
BATCH_RECORDS_COUNT = 57
BATCH_RECORDS = 61
BATCH_HEADER_BYTES = 61
BATCH_LENGTH_PREFIX_BYTES = 12  # base offset and batch length, not counted by batch length
BATCH_MIN_LENGTH = BATCH_HEADER_BYTES - BATCH_LENGTH_PREFIX_BYTES
BATCH_MAGIC_V2 = 2

ATTRIBUTE_CODEC_MASK = 0x07
ATTRIBUTE_LOG_APPEND_TIME = 0x08
ATTRIBUTE_TRANSACTIONAL = 0x10
ATTRIBUTE_CONTROL = 0x20
ATTRIBUTE_DELETE_HORIZON = 0x40

CODEC_NONE = 0
CODEC_GZIP = 1
CODEC_SNAPPY = 2
CODEC_LZ4 = 3
CODEC_ZSTD = 4

# -- index entries (Kafka's, big endian) -----------------------------------------------------------
OFFSET_INDEX_ENTRY_BYTES = 8  # u32 relative offset, u32 position
TIME_INDEX_ENTRY_BYTES = 12  # i64 timestamp ms, u32 relative offset
TRANSACTION_INDEX_ENTRY_BYTES = 34
TRANSACTION_INDEX_VERSION = 0

# -- metadata slot ---------------------------------------------------------------------------------
SLOT_GUARD = 0
SLOT_FLAGS = 4
SLOT_FILE_ID = 6
SLOT_SEGMENT_BASE_OFFSET = 8
SLOT_LAST_READABLE_POSITION = 16
SLOT_HIGH_WATERMARK = 24
SLOT_LAST_STABLE_POSITION = 32
SLOT_LAST_STABLE_OFFSET = 40
SLOT_LEADER_EPOCH = 48
SLOT_UPDATE_COUNT = 52
SLOT_LOG_START_OFFSET = 56
SLOT_BYTES = 64

SLOT_FLAG_ASSIGNED = 0x1
SLOT_FLAG_SEALED = 0x2  # no more comes through this slot: read on, then ask for the next file
# No more comes into the file, and all of it is below the high watermark, but not below the last
# stable offset: who does not ask for that reads on as after SLOT_FLAG_SEALED.
SLOT_FLAG_READABLE = 0x8
SLOT_FLAG_REVOKED = 0x4  # the partition is gone or moved: ask again, by name

# -- list of aborted transactions ------------------------------------------------------------------
ABORTED_GUARD = 0
ABORTED_COUNT = 4
ABORTED_FLAGS = 8
ABORTED_FILE_ID = 10
ABORTED_HEAD_BYTES = 16
ABORTED_ENTRY_GUARD = 0
ABORTED_ENTRY_NUMBER = 4
ABORTED_ENTRY_PRODUCER_ID = 8
ABORTED_ENTRY_FIRST_OFFSET = 16
ABORTED_ENTRY_LAST_OFFSET = 24
ABORTED_ENTRY_STABLE_OFFSET = 32
ABORTED_ENTRY_BYTES = 40

ABORTED_FLAG_FULL = 0x1

# -- acknowledgement entry -------------------------------------------------------------------------
ACK_SEQUENCE = 0
ACK_FILE_ID = 4
ACK_ORDER = 6
ACK_ERROR = 8
ACK_FLAGS = 10
ACK_BATCHES = 12
ACK_BASE_OFFSET = 16
ACK_LOG_APPEND_TIME = 24
ACK_BYTES = 32

ACK_FLAG_REVOKED = 0x1  # access ended with this request: nothing after it will be committed
# A repetition of an idempotent producer: the base offset is that of the original, or -1 if that is
# no longer known.
ACK_FLAG_DUPLICATE = 0x2
# Send no more under this grant; once everything is answered, ask for access again.
ACK_FLAG_RECALLED = 0x4

# -- immediate data --------------------------------------------------------------------------------
IMM_FILE_ID_SHIFT = 16
IMM_ORDER_MASK = 0xFFFF

# -- notice of a produce request -------------------------------------------------------------------
NOTICE_FILE_ID = 0
NOTICE_ORDER = 2
NOTICE_LENGTH = 4
NOTICE_BYTES = 8

# -- commit of offsets -----------------------------------------------------------------------------
OFFSETS_GUARD = 0
OFFSETS_SEQUENCE = 4
OFFSETS_GENERATION = 8
OFFSETS_COUNT = 12
OFFSETS_TOKEN = 16
OFFSETS_HEADER_BYTES = 24
OFFSETS_ENTRY_OFFSET = 0
OFFSETS_ENTRY_INDEX = 8
OFFSETS_ENTRY_LEADER_EPOCH = 12
OFFSETS_ENTRY_BYTES = 16

OFFSETS_CELLS = 4  # of a slot, so many commits may be under way; a power of two
OFFSETS_MOST_PARTITIONS = 1024  # of a slot; a member with more commits over TCP

# -- shared word and produce modes -----------------------------------------------------------------
SHARED_WORD_BYTES = 8
SHARED_ORDER_SHIFT = 48
SHARED_CLOSE_SHIFT = 46
SHARED_ONE_ORDER = 1 << SHARED_ORDER_SHIFT
SHARED_POSITION_MASK = SHARED_ONE_ORDER - 1

PRODUCE_EXCLUSIVE = 0
PRODUCE_SHARED = 1
PRODUCE_AUTO = 2  # exclusive while alone, shared with others

# -- Kafka requests in SENDs -----------------------------------------------------------------------
# The size of a client's receives, so of the broker's answers: far above any answer to a Produce of
# one partition.
TWO_SIDED_ANSWER_BYTES = 4096

# -- objects of remote segments --------------------------------------------------------------------
OBJECT_VERSION = 1
OBJECT_SECTIONS = 7

FOOTER_VERSION = 0
FOOTER_SECTION_COUNT = 2
FOOTER_BROKER_ID = 4
FOOTER_LEADER_EPOCH = 8
FOOTER_PARTITION = 12
FOOTER_BASE_OFFSET = 16
FOOTER_END_OFFSET = 24
FOOTER_MAX_TIMESTAMP = 32
FOOTER_MIN_TIMESTAMP = 40
FOOTER_TOPIC_ID = 48
FOOTER_SEGMENT_ID = 64
FOOTER_CLUSTER_ID_BYTES = 80
FOOTER_TOPIC_BYTES = 82
FOOTER_RESERVED = 84
FOOTER_HEAD_BYTES = 88

SECTION_KIND = 0
SECTION_RESERVED = 2
SECTION_CRC = 4
SECTION_POSITION = 8
SECTION_LENGTH = 16
SECTION_BYTES = 24

TRAILER_FOOTER_LENGTH = 0
TRAILER_FOOTER_CRC = 4
TRAILER_MAGIC = 8
TRAILER_BYTES = 16
OBJECT_MAGIC = b"KDSEGEND"

CUSTOM_METADATA_MAGIC = b"KSEG"
CUSTOM_METADATA_VERSION = 1
CUSTOM_METADATA_BYTES = 32  # Kafka's limit, which its operators may change, is 128

# -- kdirect's own Kafka API keys (a private range, far above Kafka's) -----------------------------
API_OPEN_QUEUE_PAIR = 32001
API_GET_PRODUCE_ACCESS = 32002
API_GET_CONSUME_ACCESS = 32003
API_RELEASE_ACCESS = 32004
API_LOCATE_RECORDS = 32005  # of brokers with tiered storage only
API_GET_COMMIT_SLOT = 32006

# Where LocateRecords says that records are.
LOCATION_OBJECT = 0
LOCATION_BROKER = 1
# Offsets up to which it is asked.
TO_LOCAL_LOG_START = -1
TO_TIERED_END = -2

# -- error codes of the access protocol, in addition to Kafka's ------------------------------------
# Another RDMA producer holds the partition, and one of the two wants it for itself.
ERROR_ACCESS_HELD = 32001
# The queue pair named does not belong to this TCP connection, or has ended.
ERROR_UNKNOWN_CONNECTION = 32002
# The broker cannot serve that transport.
ERROR_TRANSPORT_UNAVAILABLE = 32003
# This datapath is switched off at the broker.
ERROR_ACCESS_DISABLED = 32004
# The consumer's slot region, or the file id space, is used up.
ERROR_NO_FREE_SLOT = 32005
# Not now: Kafka clients write to the partition for which exclusive access was asked, or shared
# writes failed repeatedly.  Use TCP.
ERROR_ACCESS_CONTENDED = 32006

if BATCH_RECORDS != BATCH_RECORDS_COUNT + 4 or SLOT_LOG_START_OFFSET + 8 != SLOT_BYTES:
    raise AssertionError("layout: fields do not add up")
if ABORTED_ENTRY_STABLE_OFFSET + 8 != ABORTED_ENTRY_BYTES or ABORTED_HEAD_BYTES % 8:
    raise AssertionError("layout: a list of aborted transactions does not add up")
if ACK_LOG_APPEND_TIME + 8 != ACK_BYTES:
    raise AssertionError("layout: acknowledgement entry does not add up")
if OFFSETS_TOKEN + 8 != OFFSETS_HEADER_BYTES or (
    OFFSETS_ENTRY_LEADER_EPOCH + 4 != OFFSETS_ENTRY_BYTES
):
    raise AssertionError("layout: a commit of offsets does not add up")
if FOOTER_RESERVED + 4 != FOOTER_HEAD_BYTES or SECTION_LENGTH + 8 != SECTION_BYTES:
    raise AssertionError("layout: the footer of an object does not add up")
if TRAILER_MAGIC + len(OBJECT_MAGIC) != TRAILER_BYTES:
    raise AssertionError("layout: the trailer of an object does not add up")
