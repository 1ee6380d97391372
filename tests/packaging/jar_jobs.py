"""Batch, SQL, stream and sink as one application, for spark-submit with a Python that has no
kdirect of its own.  Prints what it saw as one line of JSON.

    spark-submit ... jar_jobs.py SERVERS TOPIC CHECKPOINT [ROWS]

It is run twice with one checkpoint to see a query go on.  Where the program finds kdirect_spark
(--packages, --py-files), it makes its session by it; otherwise (--jars) nothing here names kdirect
but the format, as in jobs that move over.
"""

from __future__ import annotations

import json
import os
import re
import sys

from pyspark.sql import DataFrame, SparkSession

FORMAT = "kdirect"


def rows(frame: DataFrame) -> list[list[str]]:
    chosen = frame.selectExpr("CAST(key AS STRING)", "CAST(value AS STRING)")
    return sorted([list(row) for row in chosen.collect()], key=lambda row: int(row[0]))


def jars_of_python_workers() -> list[str]:
    """The jars of ours on the path of Python processes that the shim has started on this host."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as f:
                words = f.read().split(b"\0")
            with open(f"/proc/{name}/cmdline", "rb") as f:
                is_daemon = re.search(rb"pyspark(_kdirect)?\.daemon", f.read())
        except OSError:
            continue
        if is_daemon and any(word.startswith(b"KDIRECT_JAR_VERSION=") for word in words):
            for word in words:
                if word.startswith(b"PYTHONPATH="):
                    entries = word.removeprefix(b"PYTHONPATH=").decode().split(os.pathsep)
                    found |= {entry for entry in entries if re.search("kdirect[^/]*jar$", entry)}
    return sorted(found)


def main(servers: str, topic: str, checkpoint: str, count: int) -> None:
    try:
        from kdirect_spark import session_builder
    except ImportError:
        builder = SparkSession.builder
    else:
        builder = session_builder()
    spark = builder.getOrCreate()
    at = {"kafka.bootstrap.servers": servers}
    source = {**at, "subscribe": topic, "startingOffsets": "earliest"}

    spark.range(0, count, 1, 2).selectExpr(
        "CAST(id AS STRING) AS key", "CAST(id * 7 AS STRING) AS value"
    ).write.format(FORMAT).options(**at, topic=topic).mode("append").save()
    batch = spark.read.format(FORMAT).options(**source).load()
    seen = {"batch": rows(batch)}
    plan = batch._jdf.queryExecution().executedPlan().toString()
    seen["columnar"] = "Columnar" in plan

    options = ", ".join(f"'{name}' '{value}'" for name, value in source.items())
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW v USING {FORMAT} OPTIONS ({options})")
    seen["view"] = spark.sql("SELECT count(*) FROM v WHERE offset >= 0").first()[0]
    try:
        spark.sql(f"CREATE TABLE t USING {FORMAT} OPTIONS ({options})")
        seen["table"] = spark.sql("SELECT count(*) FROM t").first()[0]
        spark.sql("DROP TABLE t")
    except Exception as e:
        seen["table"] = str(e).splitlines()[0]

    query = (
        spark.readStream.format(FORMAT).options(**source).load()
        .selectExpr("key", "concat('s', CAST(value AS STRING)) AS value")
        .writeStream.format(FORMAT).options(**at, topic=f"{topic}-out")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True).start()
    )  # fmt: skip
    query.awaitTermination()
    out = {**at, "subscribe": f"{topic}-out", "kafka.isolation.level": "read_committed"}
    seen["sink"] = rows(spark.read.format(FORMAT).options(**out).load())
    progress = [p for p in query.recentProgress if p["sources"][0]["endOffset"]]
    seen["end"] = progress[-1]["sources"][0]["endOffset"] if progress else None
    seen["metrics"] = sorted(progress[-1]["sources"][0].get("metrics") or {}) if progress else None
    seen["jars"] = jars_of_python_workers()
    print("SEEN " + json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]) if len(sys.argv) > 4 else 100)
