"""What the records of ``__transaction_state`` say of writes that are exactly once, beside what
Kafka says in them.  No I/O.

Both are tagged fields of Kafka's own value (`kdirect.format.transaction_records`), which its tools
and brokers pass over.  Big endian; a *text* is an int16 length and UTF-8::

    tag 64, of an identity     int8 version 0   text run   text query   text owner
                               int16 count, for each former run: text
                               int16 count, for each query: text query   int64 last committed batch
    tag 65, of an attempt      int8 version 0   text identity   text query   text run   int64 batch
                               text owner

An identity's record has Kafka's state EMPTY and no producer id: nobody writes in a transaction of
that name.  Former runs and queries are in the order in which they came, the newest last.
"""

from __future__ import annotations

from typing import NamedTuple

from kdirect.errors import FormatError
from kdirect.format.group_records import partition_of
from kdirect.format.record_fields import I16, I64, TEXT_BYTES, FieldReader, raw_text

IDENTITY_TAG = 64
ATTEMPT_TAG = 65
NO_BATCH = -1
KEPT_RUNS = 64  # former ones that an identity remembers
KEPT_QUERIES = 8  # whose last batch it remembers
LONGEST_IDENTITY = 1024  # bytes; Kafka's limit of a name in a key is TEXT_BYTES

_WHAT = "what a record of __transaction_state says of an attempt"
_VERSION = b"\0"


class IdentityRecord(NamedTuple):
    """Who writes under an identity now: its `run` of a `query`, whose processes call themselves
    `owner`; runs before it; and the last committed batch of each query."""

    run: str
    query: str
    owner: str
    former: tuple[str, ...] = ()
    queries: tuple[tuple[str, int], ...] = ()

    def last_batch(self, query: str) -> int:
        """The last committed batch of a query; NO_BATCH: none that is known."""
        return dict(self.queries).get(query, NO_BATCH)

    def began(self, run: str, query: str, owner: str) -> IdentityRecord:
        """The same with another run, which is the present one from now on."""
        former = (*self.former, self.run)[-KEPT_RUNS:]
        return self._replace(run=run, query=query, owner=owner, former=former)

    def committed(self, query: str, batch: int) -> IdentityRecord:
        """The same with a further batch."""
        others = tuple(row for row in self.queries if row[0] != query)
        return self._replace(queries=(*others, (query, batch))[-KEPT_QUERIES:])


class AttemptTag(NamedTuple):
    """Whose attempt writes in the transaction of a record."""

    identity: str
    query: str
    run: str
    batch: int
    owner: str


def attempt_id(identity: str, slot: int, partitions: int) -> str:
    """The transactional id of an identity's attempt in a slot: one that ``__transaction_state``
    keeps in the same partition as the identity, so that one record batch may change both."""
    wanted = partition_of(identity, partitions)
    salt = 0
    while partition_of(name := f"{identity}-attempt-{slot}-{salt}", partitions) != wanted:
        salt += 1
    return name


# -- writing ---------------------------------------------------------------------------------------


def _text(value: str) -> bytes:
    raw = raw_text(value, _WHAT)
    return I16.pack(len(raw)) + raw


def identity_tag(record: IdentityRecord) -> bytes:
    """FormatError: a text is too long."""
    return b"".join(
        (
            _VERSION,
            _text(record.run),
            _text(record.query),
            _text(record.owner),
            I16.pack(len(record.former)),
            *map(_text, record.former),
            I16.pack(len(record.queries)),
            *(_text(query) + I64.pack(batch) for query, batch in record.queries),
        )
    )


def attempt_tag(tag: AttemptTag) -> bytes:
    """FormatError: a text is too long."""
    return b"".join(
        (
            _VERSION,
            _text(tag.identity),
            _text(tag.query),
            _text(tag.run),
            I64.pack(tag.batch),
            _text(tag.owner),
        )
    )


# -- reading ---------------------------------------------------------------------------------------


class _Fields(FieldReader):
    what = _WHAT

    def begin(self) -> None:
        if (version := self.take(1)) != _VERSION:
            raise FormatError(f"{_WHAT} has version {version[0]}, which is not known")

    def text(self) -> str:
        return self.decoded(self.i16())

    def end(self) -> None:
        if self.left():
            raise FormatError(f"{_WHAT} has {self.left()} bytes too many")


def parse_identity_tag(data: bytes) -> IdentityRecord:
    """FormatError."""
    c = _Fields(data)
    c.begin()
    run, query, owner = c.text(), c.text(), c.text()
    former = tuple(c.text() for _ in range(c.i16()))
    queries = tuple((c.text(), c.i64()) for _ in range(c.i16()))
    c.end()
    return IdentityRecord(run, query, owner, former, queries)


def parse_attempt_tag(data: bytes) -> AttemptTag:
    """FormatError."""
    c = _Fields(data)
    c.begin()
    tag = AttemptTag(c.text(), c.text(), c.text(), c.i64(), c.text())
    c.end()
    return tag


assert LONGEST_IDENTITY + 64 < TEXT_BYTES
