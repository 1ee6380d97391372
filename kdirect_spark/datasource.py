"""The class that Spark instantiates for `format("kdirect")`.

Law: it opens nothing.  It turns options into settings, and settings into readers and writers.
Spark builds this object in several processes.
"""

from __future__ import annotations

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
from kdirect_spark.clear_errors import RefusedStreamReader, sentence_first
from kdirect_spark.pushed_reading import batch_reader
from kdirect_spark.real_time import LiveReader, without_columns
from kdirect_spark.settings import FORMAT, SourceSettings, sink_settings, source_settings
from kdirect_spark.shim_options import for_sink, for_source, is_real_time, pushed
from kdirect_spark.sink import KdirectStreamWriter, KdirectWriter
from kdirect_spark.source import stream_reader

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
LOADED_BY = "kdirectloadedby"  # by this option the shim says which kind of query asks

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


@sentence_first
class KdirectDataSource(DataSource):
    """Reads and writes topics of a kdirect broker, with the options and rows of Spark's Kafka
    connector (docs/spark.md)."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        loaded_by = {name.lower(): value for name, value in self.options.items()}.get(LOADED_BY)
        streaming = None if loaded_by is None else loaded_by == "stream"
        return row_schema(source_settings(for_source(self.options), streaming=streaming))

    def reader(self, schema: StructType) -> DataSourceReader:
        asked = pushed(self.options)
        counts = asked.counted is not None  # then `schema` is not that of rows
        settings = self._source(None if counts else schema, streaming=False)
        return batch_reader(settings, asked, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        try:
            if is_real_time(self.options):
                row = without_columns(schema)
                return LiveReader(self._source(row, streaming=True), schema)
            return stream_reader(self._source(schema, streaming=True))
        except ConfigError as e:
            return RefusedStreamReader(e)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return KdirectWriter(schema, overwrite, sink_settings(for_sink(self.options)))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        settings = sink_settings(for_sink(self.options), real_time=is_real_time(self.options))
        return KdirectStreamWriter(schema, overwrite, settings)

    def _source(self, schema: StructType | None, *, streaming: bool) -> SourceSettings:
        settings = source_settings(for_source(self.options), streaming=streaming, schema=schema)
        if schema is None:
            return settings
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
                hint="remove .schema(...), or create the table without columns, and select or "
                "parse the columns afterwards",
            )
        return settings


def _with_nullability(schema: StructType) -> str:
    fields = [
        f"{f.name}:{f.dataType.simpleString()}{'' if f.nullable else ' NOT NULL'}" for f in schema
    ]
    return f"struct<{','.join(fields)}>"
