"""Splits Arrow columns that are sent to topics: which rows go to which partition.

Law: the columns are those of Spark's Kafka sink (value, key, headers, topic, partition), and
`timestamp`.  There is no loop over rows, unless the caller passes a function of its own as
partitioner.  Rows of a partition keep their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdirect.client.partitioner import Keys, check_partition
from kdirect.errors import ConfigError

CARRIED = ("value", "key", "headers", "timestamp")
Columns = dict[str, Any]


def by_topic(
    data: pa.RecordBatch | pa.Table, topic: str | None
) -> Iterator[tuple[str, Columns, int]]:
    """Yield (topic, columns, number of rows) for each topic: for `topic` if it is given, else for
    each value of the column `topic`.  Raises ConfigError if both are missing, if a row has no
    topic, or if there is no column `value`."""
    columns = {name: data.column(name) for name in data.schema.names}
    if "value" not in columns:
        raise ConfigError("the column `value` is missing", hint="name the column to send `value`")
    if topic is not None:
        yield topic, columns, data.num_rows
        return
    if "topic" not in columns:
        raise ConfigError(
            "no topic: neither an argument nor a column `topic`",
            hint="set the option topic, or add the column",
        )
    missing = columns["topic"].null_count
    if missing:
        raise ConfigError(
            f"{missing} rows have no topic", hint="fill the column `topic`, or set the option topic"
        )
    names = pc.unique(columns["topic"]).to_pylist()
    for name in names:
        if len(names) == 1:
            yield name, columns, data.num_rows
        else:
            mask = pc.equal(columns["topic"], name)
            part = {k: pc.filter(v, mask) for k, v in columns.items()}
            yield name, part, len(part["value"])


def by_partition(
    topic: str, columns: Columns, rows: int, count: int, keys: Keys, sticky: Callable[[int], int]
) -> Iterator[tuple[int, Columns]]:
    """Yield (partition, columns) for each of the topic's `count` partitions that gets rows.  The
    column `partition` takes precedence over keys.  Rows with neither go to the partition that
    ``sticky(bytes)`` returns.  Raises UnknownTopicError if a row names a partition that does not
    exist."""
    columns = {k: v for k, v in columns.items() if k in CARRIED or k == "partition"}
    for name in ("key", "partition"):
        if name in columns and columns[name].null_count == rows:
            del columns[name]
    given = columns.pop("partition", None)
    hashed = columns.get("key")
    if given is None and (count == 1 or (hashed is None and not keys.nulls_too)):
        yield (sticky(columns["value"].nbytes) if count > 1 else 0), columns
        return
    if given is not None and given.null_count == 0:
        bounds = pc.min_max(given).as_py()
        if bounds["min"] == bounds["max"]:  # one partition: nothing moves
            check_partition(topic, bounds["min"], count)
            yield bounds["min"], columns
            return
    wanted = np.full(rows, -1, dtype=np.int32)
    if given is not None:
        known = np.asarray(_one_array(pc.is_valid(given)))
        wanted[known] = np.asarray(_one_array(pc.fill_null(pc.cast(given, pa.int32()), 0)))[known]
        bad = wanted[known & ((wanted < 0) | (wanted >= count))]
        if len(bad):
            check_partition(topic, int(bad[0]), count)
    if (wanted < 0).any():
        found = keys.of_column(
            _one_array(hashed) if hashed is not None else pa.nulls(rows, pa.binary()), count
        )
        wanted = np.where(wanted < 0, found, wanted)
        if (wanted < 0).any():
            wanted[wanted < 0] = sticky(0)
    # One stable sort brings each partition's rows together in their order.
    order = np.argsort(wanted, kind="stable")
    ends = np.cumsum(np.bincount(wanted, minlength=count))
    rearranged = {k: v.take(pa.array(order)) for k, v in columns.items()}
    start = 0
    for partition, end in enumerate(ends.tolist()):
        if end > start:
            yield partition, {k: v.slice(start, end - start) for k, v in rearranged.items()}
        start = end


def timestamps_ms(column: Any) -> Any:
    """A column of timestamps, or of integers that are ms since 1970, as integers in ms."""
    if column is None or pa.types.is_integer(column.type):
        return column
    return pc.cast(
        pc.cast(column, pa.timestamp("ms", getattr(column.type, "tz", None)), safe=False),
        pa.int64(),
    )


def _one_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """`column` as one array.  (The columns of a table are chunked.)"""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
