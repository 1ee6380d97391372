"""Which batches of transactions a cleaning may remove, and which markers.

Law of the room: pure; told of batches in the order of their offsets.  As Kafka's
CleanedTransactionMetadata decides: the records of an aborted transaction go at once, and the marker
of a committed one once none of its records is left in the log.

Other than in Kafka, markers of aborted transactions stay.  A reader of old bytes, who may have been
granted them long ago, asks for the aborted index of now, so no entry may leave it; and a reader of
new bytes who is told of an aborted transaction drops what its producer sends until the marker
comes.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Iterable

from kdirect.format.segment_files import AbortedTransaction

ABORT, COMMIT = 0, 1


class CleanedTransactions:
    """See the module.  One for each walk over a log, with all aborted transactions of the log."""

    def __init__(self, aborted: Iterable[AbortedTransaction]) -> None:
        self._to_come = [(t.first_offset, t.producer_id) for t in aborted]
        heapq.heapify(self._to_come)
        self._aborting: set[int] = set()  # producers
        self._committed: set[int] = set()

    def _come_to(self, offset: int) -> None:
        while self._to_come and self._to_come[0][0] <= offset:
            self._aborting.add(heapq.heappop(self._to_come)[1])

    def discards_batch(self, producer_id: int, last_offset: int, *, transactional: bool) -> bool:
        """A batch of records: is it of an aborted transaction?"""
        self._come_to(last_offset)
        if not transactional:
            return False
        if producer_id in self._aborting:
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
            self._aborting.discard(producer_id)
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
