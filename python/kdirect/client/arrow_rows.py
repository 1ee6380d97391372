"""Columns on their way into a topic: which rows go to which partition, and the columns of each.

Law: the columns are those of Spark's Kafka sink (value, key, headers, topic, partition) and
`timestamp`.  No loop over rows but for a partitioner that is the caller's own function; rows of a
partition keep their order.
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
    """(topic, columns, rows) of each topic: the argument's, else those that the column `topic`
    names.  ConfigError without either."""
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
    """(partition, columns) of each of the `count` partitions that gets rows.  The column
    `partition` goes before the keys; rows with neither go where ``sticky(bytes)`` says."""
    columns = {k: v for k, v in columns.items() if k in CARRIED or k == "partition"}
    for name in ("key", "partition"):
        if name in columns and columns[name].null_count == rows:
            del columns[name]
    given = columns.pop("partition", None)
    hashed = columns.get("key")
    if given is None and (count == 1 or (hashed is None and not keys.nulls_too)):
        yield (sticky(columns["value"].nbytes) if count > 1 else 0), columns
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
    """A column of timestamps, or of ms since 1970, as ms."""
    if column is None or pa.types.is_integer(column.type):
        return column
    return pc.cast(
        pc.cast(column, pa.timestamp("ms", getattr(column.type, "tz", None)), safe=False),
        pa.int64(),
    )


def _one_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """`column` as one array (a table's columns come in chunks)."""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
