"""The class that Spark instantiates for `format("kdirect")`.

Law: it opens nothing.  It turns options into settings, and settings into readers and writers.
Spark builds this object in several processes.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from kdirect.errors import ConfigError
from kdirect_spark.settings import FORMAT, SourceSettings, sink_settings, source_settings
from kdirect_spark.sink import KdirectStreamWriter, KdirectWriter
from kdirect_spark.source import KdirectBatchReader, stream_reader

KAFKA_ROW = StructType(
    [
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("timestampType", IntegerType()),
    ]
)
HEADERS = StructField(
    "headers",
    ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())])),
)


def row_schema(settings: SourceSettings) -> StructType:
    """The row of Spark's Kafka connector, or that of the values, or the selected columns of it."""
    if settings.values is not None:
        return settings.values.row(settings.columns)
    row = [*KAFKA_ROW.fields, HEADERS] if settings.include_headers else KAFKA_ROW.fields
    return StructType(
        row
        if settings.columns is None
        else [field for field in row if field.name in settings.columns]
    )


class KdirectDataSource(DataSource):
    """Reads and writes topics of a kdirect broker, with the options and rows of Spark's Kafka
    connector (docs/spark.md)."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return row_schema(source_settings(self.options, streaming=None))

    def reader(self, schema: StructType) -> DataSourceReader:
        return KdirectBatchReader(self._source(schema, streaming=False))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return stream_reader(self._source(schema, streaming=True))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return KdirectWriter(schema, overwrite, sink_settings(self.options))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        return KdirectStreamWriter(schema, overwrite, sink_settings(self.options))

    def _source(self, schema: StructType, *, streaming: bool) -> SourceSettings:
        options: MutableMapping[str, str] = self.options
        settings = source_settings(options, streaming=streaming, schema=schema)
        expected = row_schema(settings)
        same = schema.simpleString() == expected.simpleString()
        if settings.values is not None and not (same and all(f.nullable for f in schema)):
            raise ConfigError(
                f"by its options this query has the columns {expected.simpleString()}, by "
                f".schema(...) {_with_nullability(schema)}",
                hint="remove .schema(...), or else valueSchema and columns",
            )
        if not same:
            raise ConfigError(
                f"kdirect's rows have a fixed schema, {expected.simpleString()}, "
                f"not {schema.simpleString()}",
                hint="remove .schema(...) and select or parse the columns afterwards",
            )
        return settings


def _with_nullability(schema: StructType) -> str:
    fields = [
        f"{f.name}:{f.dataType.simpleString()}{'' if f.nullable else ' NOT NULL'}" for f in schema
    ]
    return f"struct<{','.join(fields)}>"
