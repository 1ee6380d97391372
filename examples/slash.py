"""The Yahoo! Streaming Benchmark as an ordinary streaming query of PySpark, and wrapped by Slash.

    python examples/slash.py [events]

It starts a broker, writes a topic of fixed records, and runs the same DataFrame twice: as Spark
does it, and by slash.accelerate.  Both write the same table.  A million events, the default, are
few: the more a batch has, and the more keys, the more is gained (docs/slash.md).
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pyspark.sql import functions as F

import kdirect
import kdirect.workloads
from kdirect_spark import session_builder, slash
from kdirect_spark.slash.workload_queries import value_options

BATCHES = 4


def views(spark: Any, servers: str, options: dict[str, str]) -> Any:
    """Views by campaign in windows of ten minutes: what a user would write."""
    events = spark.readStream.format("kdirect").options(**options).load()
    return (
        events.withWatermark("time", "5 seconds")
        .where("event_type = 0")
        .groupBy(F.window("time", "10 minutes"), "campaign")
        .count()
    )


def run(name: str, frame: Any, directory: Path, events: int) -> float:
    """Write the closed windows to a table; events a second, without the first batch."""
    query = (
        frame.writeStream.format("parquet")
        .option("path", str(directory / name))
        .option("checkpointLocation", str(directory / f"{name}-checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    while query.isActive and query.lastProgress is None:
        time.sleep(0.01)
    began = time.monotonic()
    query.awaitTermination()
    took = time.monotonic() - began
    rate = events * (BATCHES - 1) / BATCHES / took
    print(f"{name}: {rate:,.0f} events/s")
    return rate


def main() -> None:
    events = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    spark = (
        session_builder("slash", "local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    directory = Path(tempfile.mkdtemp(prefix="kdirect-slash-example-"))
    with kdirect.Broker() as broker, kdirect.connect(broker.bootstrap_servers) as session:
        # An hour of events, in whatever many records.
        workload = kdirect.workloads.ysb(keys=1_000, step_us=3_600_000_000 // events)
        (stream,) = workload.streams.values()
        kdirect.workloads.write(session, stream, "events", records=events, partitions=4)
        options = {
            "kafka.bootstrap.servers": broker.bootstrap_servers,
            "subscribe": "events",
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": str(-(-events // BATCHES)),
            "columns": "campaign,event_type,time",
            **value_options(stream.layout),
        }
        frame = views(spark, broker.bootstrap_servers, options)
        slash.explain(frame)
        fast = slash.accelerate(frame, stateDir=directory / "state")
        rates = {
            "unwrapped": run("unwrapped", frame, directory, events),
            "wrapped": run("wrapped", fast, directory, events),
        }
        tables = [
            {tuple(row) for row in spark.read.parquet(str(directory / name)).collect()}
            for name in rates
        ]
        assert tables[0] == tables[1], "the two tables differ"
        print(f"the same {len(tables[0])} rows; {rates['wrapped'] / rates['unwrapped']:.1f} times")
    spark.stop()
    shutil.rmtree(directory)


if __name__ == "__main__":
    main()
