"""Which batches of transactions a cleaning may remove, and which markers.

Law of the room: pure; told of batches in the order of their offsets.  Kafka's
CleanedTransactionMetadata decides the same: the records of an aborted transaction go at once, its
marker once none of its batches is left in the log, and the marker of a committed one once none of
its records is.  `aborted` holds what stays to be said in the ``.txnindex`` of the new segment.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Iterable
from typing import NamedTuple

from kdirect.errors import CorruptLogError

ABORT, COMMIT = 0, 1
_ENTRY = struct.Struct(">hqqqq")


class AbortedTransaction(NamedTuple):
    """An entry of a ``.txnindex``: of an aborted transaction, the offsets of its first record and
    of its marker, and what was the last stable offset then."""

    first_offset: int
    producer_id: int
    last_offset: int
    last_stable_offset: int


def unpack_aborted(data: bytes) -> list[AbortedTransaction]:
    """The entries of a ``.txnindex`` file.  CorruptLogError."""
    if len(data) % _ENTRY.size:
        raise CorruptLogError(
            f"a transaction index has {len(data)} bytes, and its entries have {_ENTRY.size}",
            hint="remove it and restart: it is made from the log",
        )
    out = []
    for version, producer, first, last, stable in _ENTRY.iter_unpack(data):
        if version != 0 or not 0 <= first <= last:
            raise CorruptLogError(
                f"a transaction index has an entry of version {version} from offset {first} to"
                f" {last}",
                hint="remove it and restart: it is made from the log",
            )
        out.append(AbortedTransaction(first, producer, last, stable))
    return out


def pack_aborted(aborted: Iterable[AbortedTransaction]) -> bytes:
    """The bytes of a ``.txnindex`` file."""
    return b"".join(
        _ENTRY.pack(0, a.producer_id, a.first_offset, a.last_offset, a.last_stable_offset)
        for a in aborted
    )


class CleanedTransactions:
    """See the module.  One for each walk over a log; `aborted` is taken and cleared for each new
    segment."""

    def __init__(self) -> None:
        self.aborted: list[AbortedTransaction] = []
        self._to_come: list[AbortedTransaction] = []  # a heap, by first offset
        self._under_way: dict[int, tuple[AbortedTransaction, bool]] = {}  # was a batch seen?
        self._committed: set[int] = set()

    def add_aborted(self, aborted: Iterable[AbortedTransaction]) -> None:
        """Aborted transactions that reach into the segment that is walked next."""
        for transaction in aborted:
            heapq.heappush(self._to_come, transaction)

    def _come_to(self, offset: int) -> None:
        while self._to_come and self._to_come[0].first_offset <= offset:
            transaction = heapq.heappop(self._to_come)
            self._under_way.setdefault(transaction.producer_id, (transaction, False))

    def discards_batch(self, producer_id: int, last_offset: int, *, transactional: bool) -> bool:
        """A batch of records: is it of an aborted transaction?"""
        self._come_to(last_offset)
        if not transactional:
            return False
        found = self._under_way.get(producer_id)
        if found is None:
            self._committed.add(producer_id)
            return False
        self._under_way[producer_id] = (found[0], True)
        return True

    def discards_marker(self, producer_id: int, last_offset: int, kind: int | None) -> bool:
        """A control batch, with the type of its record, None where it is empty: is nothing left of
        the transaction that it ends?"""
        self._come_to(last_offset)
        if kind is None:
            return True
        if kind == ABORT:
            found = self._under_way.pop(producer_id, None)
            if found is None or not found[1]:
                return True
            self.aborted.append(found[0])
            return False
        if kind == COMMIT:
            seen = producer_id in self._committed
            self._committed.discard(producer_id)
            return not seen
        return False


def marker_kind(key: bytes | None) -> int | None:
    """The type of a control record, by its key: a version and a type, 16 bits each."""
    if key is None or len(key) < 4:
        return None
    return int(struct.unpack_from(">h", key, 2)[0])
