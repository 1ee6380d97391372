"""The bytes of a channel (Slash section 6), described once.

Owns: names, positions and sizes of what the two ends of a channel read in each other's bytes.
Nothing here does I/O or holds state.  Cython reads the same numbers from ``layout.pxd``, which
``make layout`` writes from this file; a test fails when the two differ.  All fields are little
endian.

Ring of a channel: c slots of m bytes in the receiver's registered memory.  Buffer number n lies in
slot ``n % c``, and is one WRITE.  Its payload ends where its footer begins, and its footer ends
where the slot ends, so that the WRITE covers exactly the buffer and its last 8 bytes are aligned::

    0                      m - 32 - length        m - 32            m
    +----------------------+----------------------+-----------------+
    | bytes of before,     | payload              | footer          |
    | never read           | `length` bytes       | 32 bytes        |
    +----------------------+----------------------+-----------------+
                           ^ the WRITE begins here             here ^ it ends

Footer::

     0          8       12      16        20       24      28      30     31           32
    +----------+-------+-------+---------+--------+-------+-------+------+------------+
    | sequence | batch | epoch | attempt | length | crc   | flags | kind | generation |
    | u64      | u32   | u32   | u32     | u32    | 32c   | u16   | u8   | u8         |
    +----------+-------+-------+---------+--------+-------+-------+------+------------+

``sequence`` is the number of the buffer in the life of the channel, from 0.  ``batch``, ``epoch``,
``attempt`` and ``kind`` are the sender's, and mean nothing to the channel.  ``length`` is that of
the payload.  The CRC-32C covers the payload, the footer before the CRC, and the footer after it.
``generation`` is the turn of the ring in which the buffer was written, ``n // c % 255 + 1``: it is
never 0, which a slot holds before its first buffer, and differs from that of the turn before.  The
receiver polls it.  It is in the last 8 bytes of the WRITE, which land last and together
(`kdirect.rdma.contract`); the CRC catches a fabric that breaks this rule.

Flags::

    1  END_OF_EPOCH   the last buffer of its epoch
    2  END_OF_BATCH   the last buffer of its batch
    4  NOTIFIED       it was sent by WRITE_WITH_IMM: it has a completion at the receiver
    8  LAST_CREDIT    the sender has no credit left, and may sleep until it is woken

Credit word: 8 aligned bytes of the sender's registered memory, which the receiver overwrites by one
WRITE: how many buffers it has given back in the life of the channel::

     0                    8
    +--------------------+
    | buffers given back |
    | u64                |
    +--------------------+

Offer: what one end tells the other before they connect, carried by their owners::

     0       4      6          8       12           16        24     28           32
    +-------+------+----------+-------+------------+---------+------+------------+--------------+
    | magic | role | reserved | slots | slot bytes | address | rkey | length of  | address of   |
    | KDC1  | u16  | 0        | u32   | u32        | u64     | u32  | what is    | the queue    |
    |       |      |          |       |            |         |      | next, u32  | pair         |
    +-------+------+----------+-------+------------+---------+------+------------+--------------+

``role`` is 1 of a sender, whose ``address`` is that of its credit word, and 2 of a receiver, whose
``address`` is that of its ring.

Immediate data of both directions: the sender sends the low 32 bits of the buffer's sequence, the
receiver those of the credit word.  They only wake; what they say is read where it lies.
"""

from __future__ import annotations

# -- footer ----------------------------------------------------------------------------------------
FOOTER_SEQUENCE = 0
FOOTER_BATCH = 8
FOOTER_EPOCH = 12
FOOTER_ATTEMPT = 16
FOOTER_LENGTH = 20
FOOTER_CRC = 24
FOOTER_FLAGS = 28
FOOTER_KIND = 30
FOOTER_GENERATION = 31
FOOTER_BYTES = 32

FLAG_END_OF_EPOCH = 1
FLAG_END_OF_BATCH = 2
FLAG_NOTIFIED = 4
FLAG_LAST_CREDIT = 8
# The flags that a sender's owner may set; the others are the channel's.
FLAGS_OF_OWNER = FLAG_END_OF_EPOCH | FLAG_END_OF_BATCH

GENERATIONS = 255  # 1 to 255

# -- ring ------------------------------------------------------------------------------------------
# As many as the paper's: more than 8 lose to the caches, and 64 KiB saturate every fabric.
DEFAULT_SLOTS = 8
DEFAULT_SLOT_BYTES = 64 << 10
MOST_SLOTS = 1024
LEAST_SLOT_BYTES = 64
MOST_SLOT_BYTES = 1 << 30
SLOT_ALIGNMENT = 8

# -- credit word -----------------------------------------------------------------------------------
CREDIT_BYTES = 8

# -- offer -----------------------------------------------------------------------------------------
OFFER_MAGIC = b"KDC1"
OFFER_ROLE = 4
OFFER_SLOTS = 8
OFFER_SLOT_BYTES = 12
OFFER_ADDRESS = 16
OFFER_RKEY = 24
OFFER_QUEUE_PAIR_LENGTH = 28
OFFER_BYTES = 32  # before the address of the queue pair

ROLE_SENDER = 1
ROLE_RECEIVER = 2

if FOOTER_CRC % 8 or FOOTER_CRC + 8 != FOOTER_BYTES or FOOTER_GENERATION != FOOTER_BYTES - 1:
    raise AssertionError("layout: the CRC and the generation are not in the last 8 bytes")
if DEFAULT_SLOT_BYTES % SLOT_ALIGNMENT or FOOTER_BYTES % SLOT_ALIGNMENT:
    raise AssertionError("layout: a footer is not aligned")
