"""Which batches of transactions a cleaning may remove, and which markers.

Law of the room: pure; told of batches in the order of their offsets.  As Kafka's
CleanedTransactionMetadata decides: the records of an aborted transaction go at once, and the marker
of a transaction once none of its records is left in the log, after its delete horizon.

Other than in Kafka, the entry of the aborted index that an aborted transaction has stays, and with
it the marker, as long as somebody may read records of it in a segment that left the log: see
`kdirect.log.transactions` for the life of an entry.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kdirect.format.segment_files import AbortedTransaction

ABORT, COMMIT = 0, 1


@dataclass(slots=True)
class _Aborting:
    """An aborted transaction between its first record and its marker."""

    first_offset: int
    last_offset: int
    has_records: bool = False


class CleanedTransactions:
    """See the module.  One for each walk over a log, with all aborted transactions of the log.
    `held`: the offsets [base, end) of segments that left the log before the walk, and are read."""

    def __init__(
        self, aborted: Iterable[AbortedTransaction], held: Sequence[tuple[int, int]] = ()
    ) -> None:
        self._to_come = [(t.first_offset, t.last_offset, t.producer_id) for t in aborted]
        heapq.heapify(self._to_come)
        self._held = held
        self._aborting: dict[int, _Aborting] = {}  # by producer
        self._committed: set[int] = set()  # producers
        self._forgotten: set[int] = set()

    def _come_to(self, offset: int) -> None:
        while self._to_come and self._to_come[0][0] <= offset:
            first, last, producer_id = heapq.heappop(self._to_come)
            self._aborting[producer_id] = _Aborting(first, last)

    def discards_batch(self, producer_id: int, last_offset: int, *, transactional: bool) -> bool:
        """A batch of records: is it of an aborted transaction?"""
        self._come_to(last_offset)
        if not transactional:
            return False
        found = self._aborting.get(producer_id)
        if found is not None and last_offset < found.last_offset:
            found.has_records = True
            return True
        self._committed.add(producer_id)
        return False

    def discards_marker(self, producer_id: int, last_offset: int, kind: int | None) -> bool:
        """A control batch, with the type of its record, None where it is empty: is nothing left of
        the transaction that it ends?"""
        self._come_to(last_offset)
        if kind is None:
            return True
        if kind == ABORT:
            found = self._aborting.pop(producer_id, None)
            if found is None:
                return True
            if found.has_records or self._is_held(found):
                return False
            self._forgotten.add(found.last_offset)
            return True
        if kind == COMMIT:
            seen = producer_id in self._committed
            self._committed.discard(producer_id)
            return not seen
        return False

    def _is_held(self, found: _Aborting) -> bool:
        first, last = found.first_offset, found.last_offset
        return any(base <= last and first < end for base, end in self._held)

    def take_forgotten(self) -> set[int]:
        """The offsets of markers, since the last call, whose transactions leave the aborted index,
        because readers need not be told of them any more."""
        found, self._forgotten = self._forgotten, set()
        return found


def marker_kind(key: bytes | None) -> int | None:
    """The type of a control record, by its key: a version and a type, 16 bits each."""
    if key is None or len(key) < 4:
        return None
    return int(struct.unpack_from(">h", key, 2)[0])
