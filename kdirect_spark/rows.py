"""The rows that a task reads of one range of offsets.

Owns: `TaskRange`, which says what is read, and `Rows`, which each way of reading extends: by the
records alone (`reading.RecordRows`), and by their values (`value_rows`, `record_values`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa

from kdirect.format.bad_values import Dropped, DropReason
from kdirect.model import TopicPartition
from kdirect_spark.settings import SourceSettings

# Why a value gives no row of values, where no event time is read and nothing is kept.
VALUE_REASONS = (DropReason.NULL_VALUE, DropReason.WRONG_SIZE, DropReason.NOT_DECODED)


@dataclass(frozen=True, slots=True)
class TaskRange:
    """The offsets [start, stop) of a partition, which a task reads by `session`.  `topic_id` and
    `live_ms`: see `Session.reader`."""

    settings: SourceSettings
    session: Any
    tp: TopicPartition
    start: int
    stop: int
    topic_id: str | None = None
    live_ms: int | None = None

    def reader(self, *, include_headers: bool) -> Any:
        """What reads its records as rows of Kafka's."""
        return self.session.reader(
            self.tp,
            self.start,
            self.stop,
            include_headers=include_headers,
            target_bytes=self.settings.batch_bytes,
            topic_id=self.topic_id,
            live_ms=self.live_ms,
        )


class Rows(ABC):
    """What a task reads a range with, until something of it is gone.  `reader` is a
    `client.reader.Reader` or the state engine's source, and belongs to the rows; `dropped` counts
    the values that gave no row."""

    reasons: ClassVar[tuple[DropReason, ...]] = ()  # which counts the statistics have

    def __init__(self, reader: Any, dropped: Dropped) -> None:
        self._reader = reader
        self.dropped = dropped

    @abstractmethod
    def batches(self) -> Generator[pa.RecordBatch, None, None]:
        """The rows, in the order of their offsets, in batches with at least one."""

    @abstractmethod
    def live_batches(self) -> Generator[tuple[pa.RecordBatch, pa.Array] | None, None, None]:
        """The same with the offsets of the rows' records, and None each time that nothing is
        there.  With `live_ms` only, as of `Session.reader`."""

    @property
    def next_offset(self) -> int:
        """The offset after what was yielded or dropped."""
        return int(self._reader.next_offset)

    @property
    def transport(self) -> str:
        """What the records are read over."""
        return str(self._reader.transport)

    @property
    def newest_ms(self) -> int:
        """The newest time of what was read, in ms since 1970; -1: there is none."""
        return int(self._reader.newest_ms)

    def statistics(self) -> dict[str, int]:
        """What was done, for taskStatisticsDir."""
        counts = self.dropped.counts
        return dict(self._reader.statistics()) | {r.value: counts.get(r, 0) for r in self.reasons}

    def check_topic(self) -> None:
        """UnknownTopicError if what was read may be another topic's (`Reader.check_topic`)."""
        self._reader.check_topic()

    def close(self) -> None:
        """Give back what the partition is read with."""
        self._reader.close()


def in_parts(batch: pa.RecordBatch, most_bytes: int) -> Iterator[pa.RecordBatch]:
    """A batch in parts of about so many bytes; nothing if it has no row."""
    rows = batch.num_rows
    if not rows:
        return
    parts = max(1, min(rows, batch.nbytes // most_bytes))
    each = -(-rows // parts)
    for start in range(0, rows, each):
        yield batch.slice(start, each)
