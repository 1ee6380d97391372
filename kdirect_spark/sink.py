"""Writers of Spark's Python Data Source API: a batch write and the micro-batches of a stream.

Law: rows arrive as Arrow batches and leave through the producer of this worker process
(`kdirect.client`).  There is no loop over records.

At-least-once: a task returns its commit message after the broker has acknowledged every record.
Records that a failed task had sent stay in the topic, so a task or a micro-batch that runs again
leaves duplicates.  commit() has nothing to do, and abort() only logs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import datasource as api
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import ArrayType, BinaryType, DataType, IntegerType, StringType, StructType

from kdirect.errors import ConfigError
from kdirect_spark import worker
from kdirect_spark.settings import SinkSettings

log = logging.getLogger("kdirect_spark")

COLUMNS = ("value", "key", "headers", "topic", "partition")


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """How many rows of a task the broker has acknowledged."""

    rows: int


def check_schema(schema: StructType, settings: SinkSettings) -> None:
    """Raise ConfigError unless `schema` has the columns of Spark's Kafka sink, with types that can
    be written.  Other columns are ignored."""
    types = {field.name: field.dataType for field in schema.fields}
    if "value" not in types:
        raise ConfigError(
            f"the data to write has no column value (it has {', '.join(types) or 'none'})",
            hint="create it, for example with to_json(struct(...)) AS value",
        )
    for name in ("value", "key"):
        if name in types and not isinstance(types[name], StringType | BinaryType):
            raise _wrong_type(
                name, types[name], "string or binary", f"cast it: CAST({name} AS STRING)"
            )
    if settings.topic is None and "topic" not in types:
        raise ConfigError(
            "the sink does not know which topic to write to",
            hint="set the option topic, or give the data a column topic",
        )
    if settings.topic is None and not isinstance(types["topic"], StringType):
        raise _wrong_type("topic", types["topic"], "string", "cast it: CAST(topic AS STRING)")
    if "partition" in types and not isinstance(types["partition"], IntegerType):
        raise _wrong_type("partition", types["partition"], "int", "cast it: CAST(partition AS INT)")
    if "headers" in types and not _is_headers(types["headers"]):
        raise _wrong_type(
            "headers",
            types["headers"],
            "array<struct<key:string,value:binary>>",
            "build it with array(struct(... AS key, ... AS value))",
        )


def _is_headers(t: DataType) -> bool:
    if not isinstance(t, ArrayType) or not isinstance(t.elementType, StructType):
        return False
    fields = t.elementType.fields
    return [(f.name, type(f.dataType)) for f in fields] == [
        ("key", StringType),
        ("value", BinaryType),
    ]


def _wrong_type(column: str, found: DataType, wanted: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"column {column} has type {found.simpleString()}; the sink takes {wanted}", hint=remedy
    )


class _Writer:
    """What both writers share.  It is pickled into every task, so it holds settings only."""

    def __init__(self, schema: StructType, overwrite: bool, settings: SinkSettings) -> None:
        if overwrite:
            raise ConfigError(
                "a topic cannot be overwritten",
                hint='write with mode("append"), a stream with outputMode("append")',
            )
        check_schema(schema, settings)
        for warning in settings.warnings:
            log.warning("%s", warning)
        self._settings = settings

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Send all batches and wait until every record is acknowledged."""
        settings = self._settings
        rows = 0
        producer = None
        try:
            for batch in iterator:
                if batch.num_rows == 0:
                    continue
                producer = producer or worker.producer(settings.client)
                producer.send_arrow(outgoing(batch), settings.topic)
                rows += batch.num_rows
            if producer is not None:
                producer.flush()
        except BaseException:
            # The next task must not send records of this one, nor see its failures.
            worker.drop_producer(settings.client)
            raise
        finally:
            worker.settle()
        return Written(rows)

    def commit(self, messages: Any, *_: int) -> None:
        """Nothing to do: the records are in the topic already."""

    def abort(self, messages: Any, *_: int) -> None:
        done = sum(m.rows for m in messages if m is not None)
        log.warning(
            "a write failed; %d records of its finished tasks stay in the topic "
            "(the sink is at-least-once)",
            done,
        )


def outgoing(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The columns of Spark's Kafka sink.  As there, others are ignored, even a timestamp."""
    return batch.select([name for name in COLUMNS if name in batch.schema.names])


class KdirectWriter(_Writer, DataSourceArrowWriter):
    """Batch write, at-least-once."""


if hasattr(api, "DataSourceStreamArrowWriter"):

    class KdirectStreamWriter(_Writer, api.DataSourceStreamArrowWriter):
        """Stream write, at-least-once: a micro-batch that runs again after a failure is written
        again."""

else:  # pyspark 4.0 passes rows to a stream's writer

    class KdirectStreamWriter(_Writer, api.DataSourceStreamWriter):  # type: ignore[no-redef]
        """Stream write, at-least-once: a micro-batch that runs again after a failure is written
        again."""

        ROWS_PER_BATCH = 10_000

        def __init__(self, schema: StructType, overwrite: bool, settings: SinkSettings) -> None:
            super().__init__(schema, overwrite, settings)
            self._schema = schema

        def write(self, iterator: Iterator[Any]) -> Written:
            return super().write(self._batches(iterator))

        def _batches(self, rows: Iterator[Any]) -> Iterator[pa.RecordBatch]:
            from itertools import islice

            from pyspark.sql.pandas.types import to_arrow_schema

            schema = to_arrow_schema(
                StructType([f for f in self._schema.fields if f.name in COLUMNS])
            )
            while chunk := list(islice(rows, self.ROWS_PER_BATCH)):
                yield pa.RecordBatch.from_pylist(
                    [row.asDict(recursive=True) for row in chunk], schema=schema
                )
