"""`make demo`: the queries of examples/flights.py, watched and checked.

Owns everything that the example does not need: progress, figures, the check of the result, the
search for Delta's jars, and a place for Spark's own log.  Writes Parquet if Delta's jars are not
available.  The broker runs inside this process; nothing is left running.

    python demo/run.py [--parquet] [--partitions 4] [--flights-per-batch 60000]
"""

from __future__ import annotations

import argparse
import glob
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import kdirect
from kdirect_spark import session_builder

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import flights as example

FLIGHTS = 336_776
TOPIC, BY_DAY = example.TOPIC, example.BY_DAY
JARS_TIMEOUT_S = 180


def main() -> int:
    parser = argparse.ArgumentParser(
        description="New York's flights of 2013 through a topic, Spark, a topic and Delta."
    )
    parser.add_argument(
        "--parquet", action="store_true", help="write Parquet without looking for Delta"
    )
    parser.add_argument(
        "--partitions", type=int, default=4, help="of the topic of flights (default: %(default)s)"
    )
    parser.add_argument(
        "--flights-per-batch",
        type=int,
        default=60_000,
        help="maxOffsetsPerTrigger (default: %(default)s)",
    )
    parser.add_argument(
        "--master", default="local[2]", help="Spark's master (default: %(default)s)"
    )
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="  %(name)s: %(message)s")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(
        prefix="kdirect-flights-", ignore_cleanup_errors=True
    ) as directory:
        work = Path(directory)
        table_format = "parquet" if options.parquet or not delta_is_there() else "delta"
        with kdirect.Broker(log_dirs=[str(work / "log")], listeners="127.0.0.1:0") as broker:
            say(f"broker ready on {broker.bootstrap_servers}")
            load(broker, options.partitions)
            spark, table_format = start_spark(options.master, table_format, work / "spark.log")
            try:
                summary = stream(spark, broker, work, table_format, options.flights_per_batch)
                fine = report(spark, broker, work, table_format, summary)
            except Exception:
                print(
                    f"\n--- the end of Spark's own log:\n{tail(work / 'spark.log')}",
                    file=sys.stderr,
                )
                raise
            finally:
                spark.stop()
    say(f"{'done' if fine else 'FAILED'} in {time.monotonic() - began:.0f} s")
    return 0 if fine else 1


def say(text: str) -> None:
    print(text, flush=True)


# -- the queries of the example --------------------------------------------------------------------


def load(broker: Any, partitions: int) -> None:
    """Produce all flights."""
    records = example.flights()
    began = time.monotonic()
    statistics = example.produce(broker.bootstrap_servers, records, partitions)
    seconds = time.monotonic() - began
    written, path = statistics.get("rdma_bytes", 0), "one-sided WRITEs"
    if not written:
        written, path = statistics.get("tcp_bytes", 0), "TCP"
    say(
        f"{records.num_rows:,} flights into topic {TOPIC} ({partitions} partitions) "
        f"in {seconds:.1f} s: {written / 1e6:.0f} MB by {path}"
    )


def stream(
    spark: Any, broker: Any, work: Path, table_format: str, flights_per_batch: int
) -> dict[str, Any]:
    """Run both queries to their ends; returns what the readers of the first one did."""
    servers = broker.bootstrap_servers
    statistics = work / "statistics"
    statistics.mkdir()
    before = broker_requests(broker)
    began = time.monotonic()
    rows = example.read_stream(
        spark,
        servers,
        TOPIC,
        example.SCHEMA,
        maxOffsetsPerTrigger=flights_per_batch,
        taskStatisticsDir=str(statistics),
    )
    query = example.write_topic(example.by_day(rows), servers, work / "checkpoint-flights")
    say(
        f"query 1: topic {TOPIC} -> flights and delays by day, airport and airline "
        f"-> topic {BY_DAY}"
    )
    read, dropped = follow(query)
    seconds = time.monotonic() - began
    requests = {
        name: count - before.get(name, 0) for name, count in broker_requests(broker).items()
    }

    say(f"query 2: topic {BY_DAY} -> {table_format} table")
    days = example.read_stream(spark, servers, BY_DAY, example.DAY_SCHEMA)
    follow(example.write_table(days, table_format, work / "table", work / "checkpoint-table"))
    tasks = [
        json.loads(line) for file in statistics.iterdir() for line in file.read_text().splitlines()
    ]
    return {
        "read": read,
        "dropped": dropped,
        "seconds": seconds,
        "requests": requests,
        "tasks": tasks,
    }


def follow(query: Any) -> tuple[int, int]:
    """Print a line for each micro-batch until the query ends; (rows read, rows too late)."""
    seen = -1
    rows = dropped = 0
    while True:
        active = query.isActive
        for progress in query.recentProgress:
            if progress["batchId"] > seen:
                seen = progress["batchId"]
                rows += progress["numInputRows"]
                late = sum(
                    operator["numRowsDroppedByWatermark"] for operator in progress["stateOperators"]
                )
                dropped += late
                watermark = progress["eventTime"].get("watermark", "")[:10]
                took = progress["durationMs"]["triggerExecution"] / 1000
                say(
                    f"  batch {seen}: {progress['numInputRows']:>7,} rows in {took:.1f} s"
                    + (f", event time past {watermark}" if watermark > "1970-01-01" else "")
                    + (f", {late} too late" if late else "")
                )
        if not active:
            query.awaitTermination()  # raises the error that ended it
            return rows, dropped
        time.sleep(0.1)


# -- the result ------------------------------------------------------------------------------------


def report(spark: Any, broker: Any, work: Path, table_format: str, summary: dict[str, Any]) -> bool:
    """Print the result and check it."""
    say(f"\nfrom the {table_format} table: airlines by flights, with the delay at departure")
    example.show(spark, table_format, work / "table")
    total, rows = spark.sql("SELECT sum(flights), count(*) FROM by_day").first()
    back = (
        spark.read.format("kdirect")
        .option("kafka.bootstrap.servers", broker.bootstrap_servers)
        .option("subscribe", BY_DAY)
        .load()
        .count()
    )

    tasks = summary["tasks"]
    one_sided = sum(t.get("read_bytes", 0) + t.get("slot_read_bytes", 0) for t in tasks)
    reads = sum(t.get("reads", 0) + t.get("slot_reads", 0) for t in tasks)
    transports = ", ".join(sorted({t["transport"] for t in tasks}))
    requests = (
        ", ".join(f"{name} {count}" for name, count in sorted(summary["requests"].items()) if count)
        or "none"
    )
    flights_read = summary["read"] - 1  # the closing record
    say(
        f"flights read by the stream  {flights_read:,} in {summary['seconds']:.1f} s, "
        f"{summary['dropped']} too late"
    )
    say(
        f"read one-sidedly            {one_sided / 1e6:,.1f} MB in {reads:,} READs, "
        f"transport {transports}"
    )
    say(
        f"requests to the broker      {requests} "
        f"(during the query that read them and wrote to {BY_DAY})"
    )
    say(
        f"rows by day                 {rows:,} in the {table_format} table, "
        f"{back:,} records in topic {BY_DAY}"
    )
    say(f"flights in the table        {total:,}")
    wrong = [
        text
        for text, bad in (
            (f"the stream read {flights_read:,} flights", flights_read != FLIGHTS),
            (f"the table counts {total:,} flights", total != FLIGHTS),
            (f"the table has {rows:,} rows and the topic {back:,} records", rows != back),
        )
        if bad
    ]
    for text in wrong:
        print(f"WRONG: {text}; {FLIGHTS:,} flights are in the data", file=sys.stderr)
    return not wrong


def broker_requests(broker: Any) -> dict[str, int]:
    """How many requests of each kind the broker has served."""
    return dict(broker.statistics()["broker_requests_by_api"])


# -- Spark -----------------------------------------------------------------------------------------


def start_spark(master: str, table_format: str, log_file: Path) -> tuple[Any, str]:
    """A session, with Delta if it is wanted and possible, and the format of the table.  Spark's own
    log goes to `log_file`."""
    builder = session_builder("flights", master)
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.driver.memory": "2g",
        "spark.log.level": "ERROR",
        "spark.databricks.delta.snapshotPartitions": "2",
    }.items():
        builder = builder.config(name, value)
    if table_format == "delta":
        try:
            with native_stderr_into(log_file):
                return with_delta(builder).getOrCreate(), "delta"
        except Exception as e:
            say(
                f"Delta cannot be used ({type(e).__name__}: {str(e).splitlines()[0][:100]}); "
                "writing Parquet"
            )
            from pyspark.sql import SparkSession

            SparkSession._instantiatedSession = None
            builder = start_over(builder)
    with native_stderr_into(log_file):
        return builder.getOrCreate(), "parquet"


def with_delta(builder: Any) -> Any:
    from delta import configure_spark_with_delta_pip

    builder = builder.config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
    return configure_spark_with_delta_pip(
        builder.config(
            "spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog"
        )
    )


def start_over(builder: Any) -> Any:
    for name in ("spark.sql.extensions", "spark.sql.catalog.spark_catalog", "spark.jars.packages"):
        builder._options.pop(name, None)
    return builder


def delta_is_there() -> bool:
    """Whether Delta's jars are in Ivy's cache, or could be fetched within JARS_TIMEOUT_S."""
    if find_spec("delta") is None:
        say("the package delta-spark is not installed; writing Parquet instead of a Delta table")
        return False
    from importlib.metadata import version

    if glob.glob(
        os.path.expanduser(f"~/.ivy2*/jars/io.delta_delta-spark_*-{version('delta-spark')}.jar")
    ):
        return True
    say(f"fetching Delta's jars (once; about a minute, {JARS_TIMEOUT_S} s at most) ...")
    code = (
        "from delta import configure_spark_with_delta_pip as with_delta; "
        "from pyspark.sql import SparkSession; "
        "with_delta(SparkSession.builder.master('local[1]')).getOrCreate().stop()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        errors = child.communicate(timeout=JARS_TIMEOUT_S)[1]
        if child.returncode == 0:
            return True
        why = next(
            (
                line.strip()
                for line in errors.splitlines()
                if "unresolved" in line.lower() or "Error" in line
            ),
            "see --parquet",
        )
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # together with the JVM that it started
        child.wait()
        why = f"not there after {JARS_TIMEOUT_S} s"
    say(f"Delta's jars are not available ({why}); writing Parquet instead of a Delta table")
    return False


@contextmanager
def native_stderr_into(path: Path) -> Iterator[None]:
    """Processes that start in this block write their errors to `path`.  The JVM logs a lot while it
    starts."""
    sys.stderr.flush()
    saved = os.dup(2)
    with open(path, "ab") as log:
        os.dup2(log.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def tail(path: Path, lines: int = 30) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return "(none)"


if __name__ == "__main__":
    sys.exit(main())
