"""When ``__remote_log_metadata`` is written again, and how a broker that is alone does it.

Law of the room: a record of the topic says what has happened to a segment, and not what a key has
come to, so the log cleaner cannot know which of them count, and the topic is not compacted.
Instead the records of a partition that count are written again and everything before them is
deleted, when it is loaded and whenever it has grown to several times what counts.  The new records
are on disk before the old ones go, so a crash in between finds both, and the later ones win.

In a cluster the leader does it (`kdirect.broker.metadata_appends`), by the same numbers.

On the event loop, except `at_start`.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Protocol

from kdirect.broker.appends import Appends
from kdirect.broker.state_topic import Row, failure, pieces
from kdirect.errors import KdirectError
from kdirect.log.clock import now_ms
from kdirect.log.partition import Partition

log = logging.getLogger("kdirect.storage")

REWRITE_RECORDS = 10_000  # a partition with fewer superseded records is left alone
REWRITE_FACTOR = 4


class Live(Protocol):
    """What counts."""

    def live_rows(self, index: int) -> list[Row]:
        """The rows of one partition that count."""

    def live_count(self) -> int:
        """How many rows count, in all partitions."""


class MetadataRewriting:
    """See the module."""

    def __init__(self, table: Live, appends: Appends) -> None:
        self._table = table
        self._appends = appends

    def at_start(self, partition: Partition) -> None:
        """A partition was loaded: write it again if that is worth it.  File work, before the broker
        serves."""
        if self._is_worth_it(partition):
            _rewrite(partition, self._table.live_rows(partition.topic_partition.partition))

    def soon(self, partition: Partition) -> None:
        """Write it again on a thread if it is worth it, while nothing is appended: what the table
        holds is what is in the log."""
        tp = partition.topic_partition
        if not self._is_worth_it(partition) or not self._appends.is_free(tp):
            return
        self._appends.hold(tp)
        rows = self._table.live_rows(tp.partition)

        def done(result: None, error: BaseException | None) -> None:
            if error is not None:
                log.error("%s could not be rewritten", tp, exc_info=error)
            self._appends.release(tp)

        self._appends.on_thread(partition, partial(_rewrite, partition, rows), done)

    def _is_worth_it(self, partition: Partition) -> bool:
        kept = partition.log_end_offset - partition.log_start_offset
        if kept < REWRITE_RECORDS:
            return False
        return kept >= REWRITE_RECORDS + REWRITE_FACTOR * self._table.live_count()


def _rewrite(partition: Partition, rows: list[Row]) -> None:
    """File work.  The new records are on disk before the old ones go."""
    before = partition.log_end_offset - partition.log_start_offset
    try:
        partition.roll()
        start = partition.log_end_offset
        now = now_ms()
        for data in pieces(rows, now):
            error = failure(partition, partition.append(data, now))
            if error is not None:
                raise error
        partition.flush()
        partition.delete_records(start)
    except KdirectError as e:
        log.warning(
            "%s could not be rewritten, it stays as long as it is: %s", partition.topic_partition, e
        )
        return
    log.info("rewrote %s: %d records became %d", partition.topic_partition, before, len(rows))
