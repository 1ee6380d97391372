"""A replica's log, as the world of the search and of the simulation needs it.

The world looks at a log through these methods alone, so a log in a real kernel can take the place
of this one: a method that changes the log returns the changed one.
"""

from __future__ import annotations

from typing import NamedTuple

from kdirect.cluster.following_replica import NO_EPOCH
from kdirect.cluster.leading_replica import epoch_end

Record = tuple[int, int]  # the leader epoch it was appended in, and its number in that epoch


class ModelLog(NamedTuple):
    """The records from offset `start` on, in a tuple."""

    records: tuple[Record, ...] = ()
    start: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.records)

    @property
    def last_epoch(self) -> int:
        return self.records[-1][0] if self.records else NO_EPOCH

    def between(self, begin: int, end: int) -> tuple[Record, ...]:
        """The records with offsets in [begin, end); those that were deleted are left out."""
        return self.records[max(begin - self.start, 0) : max(end - self.start, 0)]

    def append(self, records: tuple[Record, ...]) -> ModelLog:
        return self._replace(records=self.records + records)

    def truncate(self, epoch: int, offset: int) -> ModelLog:
        """No record at `offset` or above it, and none of an epoch above `epoch`, stays."""
        kept = self.between(self.start, offset)
        return self._replace(records=tuple(record for record in kept if record[0] <= epoch))

    def start_over(self, offset: int) -> ModelLog:
        return ModelLog((), offset)

    def delete_below(self, offset: int) -> ModelLog:
        return ModelLog(self.between(offset, self.end), offset)

    def epoch_end(self, asked: int) -> tuple[int, int]:
        epochs: list[tuple[int, int]] = []
        for place, (epoch, _) in enumerate(self.records, self.start):
            if not epochs or epochs[-1][0] != epoch:
                epochs.append((epoch, place))
        return epoch_end(epochs, self.start, self.end, asked)
