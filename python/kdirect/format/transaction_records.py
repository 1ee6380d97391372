"""Keys and values of the records of ``__transaction_state``, as Kafka writes them.  No I/O.

Kafka's own schemas (TransactionLogKey.json, TransactionLogValue.json), big endian.  Version 1 of a
value is written, which has compact types and tagged fields (KIP-915); version 0 is read as well::

    key, version 0     int16 0   string transactional id
    value, version 1   int16 1   int64 producer id   int16 producer epoch   int32 timeout
                       int8 state   compact nullable array of partitions, for each topic:
                           compact string topic   compact array of int32   tagged fields
                       int64 last update   int64 start
                       tagged fields: 0 int64 previous producer id   1 int64 next producer id
                                      2 int16 transaction version of the client
                                      64, 65 kdirect's own (`kdirect.format.attempt_records`)

A null value is a tombstone: nothing is known of the transactional id any more.
"""

from __future__ import annotations

import enum
import struct
from functools import lru_cache
from typing import NamedTuple

from kdirect.errors import FormatError
from kdirect.format.attempt_records import (
    ATTEMPT_TAG,
    IDENTITY_TAG,
    AttemptTag,
    IdentityRecord,
    attempt_tag,
    identity_tag,
    parse_attempt_tag,
    parse_identity_tag,
)
from kdirect.format.datapath import uvarint
from kdirect.format.record_fields import I16, I32, I64, FieldReader, raw_text
from kdirect.model import TopicPartition

_HEAD = struct.Struct(">hqhib")
_TIMES = struct.Struct(">qq")

_WHAT = "a record of __transaction_state"
NO_PRODUCER_ID = -1
NO_EPOCH = -1
_TAG_BYTES = {0: 8, 1: 8, 2: 2}


class State(enum.IntEnum):
    """Kafka's TransactionState.  DEAD and PREPARE_EPOCH_FENCE are never written."""

    EMPTY = 0
    ONGOING = 1
    PREPARE_COMMIT = 2
    PREPARE_ABORT = 3
    COMPLETE_COMMIT = 4
    COMPLETE_ABORT = 5
    DEAD = 6
    PREPARE_EPOCH_FENCE = 7

    @property
    def text(self) -> str:
        """Its name in Kafka's answers."""
        return "".join(word.capitalize() for word in self.name.split("_"))


class TransactionRecord(NamedTuple):
    """What is written of one transactional id.  Times in milliseconds since the epoch, -1: none.

    `previous_id`: the producer id of the transaction that was completed before, where an exhausted
    epoch made it change; `next_id`: the one that follows once this transaction is complete.
    `last_epoch` is the epoch before the present one; it is not in the record, as with Kafka.
    `version`: 2 where the client ends each transaction with a new epoch (KIP-890), else 0.
    `attempt`: whose attempt writes in it, where its identity ends it; `identity`: it is the record
    of such an identity, and of no transaction."""

    producer_id: int
    epoch: int
    timeout_ms: int
    state: State
    partitions: frozenset[TopicPartition] = frozenset()
    updated_ms: int = -1
    start_ms: int = -1
    previous_id: int = NO_PRODUCER_ID
    next_id: int = NO_PRODUCER_ID
    last_epoch: int = NO_EPOCH
    version: int = 0
    attempt: AttemptTag | None = None
    identity: IdentityRecord | None = None


# -- writing ---------------------------------------------------------------------------------------


def transaction_key(transactional_id: str) -> bytes:
    """FormatError: the id is too long."""
    raw = raw_text(transactional_id, _WHAT)
    return I16.pack(0) + I16.pack(len(raw)) + raw


def transaction_value(record: TransactionRecord) -> bytes:
    """The value of a record, version 1.  FormatError: the name of a topic is too long."""
    out = bytearray(
        _HEAD.pack(1, record.producer_id, record.epoch, record.timeout_ms, record.state)
    )
    if record.state is State.EMPTY:
        out += uvarint(0)
    else:
        out += _partitions(record.partitions)
    out += _TIMES.pack(record.updated_ms, record.start_ms)
    tags: list[tuple[int, bytes]] = []
    if record.previous_id != NO_PRODUCER_ID:
        tags.append((0, I64.pack(record.previous_id)))
    if record.next_id != NO_PRODUCER_ID:
        tags.append((1, I64.pack(record.next_id)))
    if record.version:
        tags.append((2, I16.pack(record.version)))
    if record.identity is not None:
        tags.append((IDENTITY_TAG, identity_tag(record.identity)))
    if record.attempt is not None:
        tags.append((ATTEMPT_TAG, attempt_tag(record.attempt)))
    out += uvarint(len(tags))
    for tag, value in tags:
        out += uvarint(tag) + uvarint(len(value)) + value
    return bytes(out)


@lru_cache(maxsize=256)  # a transaction is written several times with the same ones
def _partitions(partitions: frozenset[TopicPartition]) -> bytes:
    topics: dict[str, list[int]] = {}
    for tp in sorted(partitions):
        topics.setdefault(tp.topic, []).append(tp.partition)
    out = bytearray(uvarint(len(topics) + 1))
    for topic, indexes in topics.items():
        raw = raw_text(topic, _WHAT)
        out += uvarint(len(raw) + 1) + raw + uvarint(len(indexes) + 1)
        out += b"".join(map(I32.pack, indexes)) + uvarint(0)
    return bytes(out)


# -- markers ---------------------------------------------------------------------------------------

_BATCH_HEADER_BYTES = 61
_COMMIT = 1


def marker_commits(batch: bytes) -> bool:
    """Does a control batch commit a transaction, or abort it?  FormatError: it is no marker."""
    c = _Cursor(batch)
    c.pos = _BATCH_HEADER_BYTES
    c.uvarint()  # the record's length
    c.take(1)
    c.uvarint()
    c.uvarint()  # how far its time and offset are from the batch's
    if c.uvarint() != 4 << 1:  # of the key, zigzag encoded
        raise FormatError("a control batch is no marker of a transaction")
    if c.i16() != 0 or (kind := c.i16()) not in (0, _COMMIT):
        raise FormatError("a control batch has a kind that is not known")
    return kind == _COMMIT


# -- reading ---------------------------------------------------------------------------------------


class _Cursor(FieldReader):
    what = _WHAT


def parse_transaction_key(data: bytes) -> str | None:
    """The transactional id, or None for a key of a kind that we do not know.  FormatError."""
    c = _Cursor(data)
    return c.decoded(c.i16()) if c.i16() == 0 else None


def parse_transaction_value(data: bytes) -> TransactionRecord:
    """The value of a record, in version 0 or 1.  FormatError."""
    c = _Cursor(data)
    try:
        version, producer_id, epoch, timeout_ms, state = _HEAD.unpack(c.take(_HEAD.size))
        state = State(state)
    except ValueError as e:
        raise FormatError(f"a record of __transaction_state cannot be read: {e}") from e
    if version not in (0, 1):
        raise FormatError(f"a transaction value of version {version}")
    compact = version == 1
    partitions: set[TopicPartition] = set()
    for _ in range(c.uvarint() - 1 if compact else c.i32()):
        topic = c.decoded(c.uvarint() - 1 if compact else c.i16())
        for _ in range(c.uvarint() - 1 if compact else c.i32()):
            partitions.add(TopicPartition(topic, c.i32()))
        if compact:
            c.tags()
    updated_ms, start_ms = _TIMES.unpack(c.take(_TIMES.size))
    tags = c.tags() if compact else {}
    if any(len(tags[tag]) != size for tag, size in _TAG_BYTES.items() if tag in tags):
        raise FormatError("a tagged field of a record of __transaction_state has a wrong length")
    return TransactionRecord(
        producer_id,
        epoch,
        timeout_ms,
        state,
        frozenset(partitions),
        updated_ms,
        start_ms,
        I64.unpack(tags[0])[0] if 0 in tags else NO_PRODUCER_ID,
        I64.unpack(tags[1])[0] if 1 in tags else NO_PRODUCER_ID,
        NO_EPOCH,
        I16.unpack(tags[2])[0] if 2 in tags else 0,
        parse_attempt_tag(tags[ATTEMPT_TAG]) if ATTEMPT_TAG in tags else None,
        parse_identity_tag(tags[IDENTITY_TAG]) if IDENTITY_TAG in tags else None,
    )
