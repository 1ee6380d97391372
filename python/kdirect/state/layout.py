"""The byte layouts of the state backend, described once.

Owns: names, positions and sizes of what another process reads: the header of a mapped state file,
and the pages of a delta.  Nothing here does I/O or holds state.  Cython reads the same numbers from
``layout.pxd``, which ``make layout`` writes from this file.  Everything is
little endian; words are 8 bytes and lie at multiples of 8.

State header (the first 4 KiB of a state file; ``crc`` is the CRC-32C of bytes 16 to 128, and is
written last)::

     0          8         12       16                              48
    +----------+---------+--------+-------------------------------+
    | magic    | version | crc    | plan hash                     |
    +----------+---------+--------+-------------------------------+
    48         52         56         64         72        76
    +----------+----------+----------+----------+---------+--------+
    | executor | executors| attempt  | batch    | phase   | zero   |
    +----------+----------+----------+----------+---------+--------+
    80         88         96         104        112       116      120       128
    +----------+----------+----------+----------+---------+--------+---------+
    | catalogue| catalogue| limit    | top      | catalog.| virtual partitions |
    | position | bytes    |          |          | crc     | first, end, start  |
    +----------+----------+----------+----------+---------+--------+---------+

``top`` is the end of the memory that was ever allocated.  The catalogue says which blocks below it
hold tables and which are free; it is written when the phase becomes CLEAN or DONE.  The virtual
partitions that the executor leads are two words of 4 bytes at 116 and 120.  The word at 124 is the
CRC-32C of the boot id of the host: nothing is synced, so a file that outlives a start of its host,
because it is not on a tmpfs, may have a header that is whole before bytes that are not.

Page of a delta (what a channel sends: ``used`` bytes from its start)::

     0      1         2        4        8        12       16        20       24        32
    +------+---------+--------+--------+--------+--------+---------+--------+---------+
    | kind | version | sender | count  | used   | shape  | entry   | zero   | rows    |
    |      |         |        |        |        |        | words   |        |         |
    +------+---------+--------+--------+--------+--------+---------+--------+---------+
    | entries or tuples, one after the other ...                                      |
    +---------------------------------------------------------------------------------+

``entry words`` is the number of words of each entry, 0 where keys vary in length.  ``shape`` is the
CRC-32C of what decides how entries are read (key types, aggregates).  ``rows`` counts the rows that
are in the page.

Entry: ``bucket, state words, key words``; a state has one lane, the sender's.
Tuple: ``bucket, words of validity bytes (one byte an input), input words, key words``.
A key of variable length is ``length in bytes, bytes, zeros up to a multiple of 8``.
"""

from __future__ import annotations

# -- state header ----------------------------------------------------------------------------------
STATE_HEADER_BYTES = 4096
STATE_MAGIC = 0x3145544154534B44  # "DKSTATE1"
STATE_VERSION = 2
STATE_AT_MAGIC = 0
STATE_AT_VERSION = 8
STATE_AT_CRC = 12
STATE_AT_PLAN_HASH = 16
STATE_PLAN_HASH_BYTES = 32
STATE_AT_EXECUTOR = 48
STATE_AT_EXECUTORS = 52
STATE_AT_ATTEMPT = 56
STATE_AT_BATCH = 64
STATE_AT_PHASE = 72
STATE_AT_CATALOGUE = 80
STATE_AT_CATALOGUE_BYTES = 88
STATE_AT_LIMIT = 96
STATE_AT_TOP = 104
STATE_AT_CATALOGUE_CRC = 112
STATE_AT_VPARTS = 116
STATE_END = 128

# -- page of a delta -------------------------------------------------------------------------------
PAGE_AT_KIND = 0
PAGE_AT_VERSION = 1
PAGE_AT_SENDER = 2
PAGE_AT_COUNT = 4
PAGE_AT_USED = 8
PAGE_AT_SHAPE = 12
PAGE_AT_ENTRY_WORDS = 16
PAGE_AT_ROWS = 24
PAGE_HEADER_BYTES = 32
PAGE_VERSION = 1
PAGE_ENTRIES = 1
PAGE_TUPLES = 2

# -- index word: 16 bits of tag, 48 of position ----------------------------------------------------
INDEX_TAG_SHIFT = 48
INDEX_POSITION_MASK = (1 << 48) - 1

VPARTS = 256
VPART_SHIFT = 56

if STATE_AT_VPARTS + 12 != STATE_END or PAGE_AT_ROWS + 8 != PAGE_HEADER_BYTES:
    raise AssertionError("layout: fields do not add up")
