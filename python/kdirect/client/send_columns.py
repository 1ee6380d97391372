"""Arrow columns on their way into a producer: the half of `Producer.send_arrow` that knows columns.

Owns: the split of a table by topic and partition, and its encoding into batches.  What may not
enter: how a batch reaches its partition (`kdirect.client.produce_driver`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kdirect.client.arrow_rows import by_partition, by_topic, timestamps_ms
from kdirect.client.partitioner import Keys
from kdirect.client.topics import Topics
from kdirect.format.codec import ArrowEncoder
from kdirect.model import TopicPartition

# The partition of so many more bytes of a topic (with so many partitions) that have no preference.
NextOfRun = Callable[[str, int, int], int]


class ColumnEncoder:
    """See the module.  One thread at a time: the producer's lock."""

    def __init__(
        self, settings: dict[str, Any], topics: Topics, keys: Keys, next_of_run: NextOfRun
    ) -> None:
        self._topics = topics
        self._keys = keys
        self._next_of_run = next_of_run
        self._encoder = ArrowEncoder(
            compression=settings["compression.type"], batch_bytes=settings["batch.bytes"]
        )

    def split(
        self, data: pa.RecordBatch | pa.Table, topic: str | None
    ) -> Iterator[tuple[TopicPartition, dict[str, Any]]]:
        """The columns of each partition, in turn; the argument `topic` goes before the column."""
        for name, columns, rows in by_topic(data, topic):
            given = columns.get("partition")
            highest = 0
            if given is not None and pa.types.is_integer(given.type):
                highest = pc.max(given).as_py() or 0
            count = self._topics.count_for(name, highest)
            parts = by_partition(
                name, columns, rows, count, self._keys, partial(self._next_of_run, name, count)
            )
            for partition, part in parts:
                yield self._topics.partition_of(name, partition), part

    def encode(self, columns: dict[str, Any], default_timestamp_ms: int) -> Any:
        """Batches of about `batch.bytes` from the columns of one partition."""
        return self._encoder.encode(
            columns["value"],
            columns.get("key"),
            columns.get("headers"),
            timestamps_ms(columns.get("timestamp")),
            default_timestamp_ms=default_timestamp_ms,
        )
