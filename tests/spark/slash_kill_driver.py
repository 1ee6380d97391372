"""The driver of the queries that are killed: a program for the tests.

    python slash_kill_driver.py KILLS [JAR ...]

It has a Spark session of its own, reads one JSON object a line from standard input, does it, and
answers by a line that begins with ANSWER.  KILLS is the directory of the kills
(slash_kill_daemon.py); the program writes its process ids there.  With jars, those of Delta, its
session can write Delta tables too.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent.parent))  # behind the installed package

from tests.spark import slash_runs  # noqa: E402
from tests.spark.slash_kills import ANSWER, LIMIT_S, PIDS, WORKLOADS  # noqa: E402

DELTA = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # By default 50 tasks read the log of a table.
    "spark.databricks.delta.snapshotPartitions": "2",
}

# A JVM that is killed soon has no use for the second compiler, which takes half of its time.
QUICK_TO_START = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def session(
    kills: Path, jars: list[str], master: str = "local[2]", daemon: str = "slash_kill_daemon"
) -> Any:
    """A session with the daemon that kills."""
    from kdirect_spark import session_builder

    builder = session_builder("kdirect kills", master)
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.memory": "700m",
        "spark.sql.session.timeZone": "UTC",
        "spark.log.level": "OFF",
        "spark.python.daemon.module": daemon,
        # What a killed JVM leaves goes with the directory of the test.
        "spark.local.dir": str(kills / "local"),
        "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={kills} {QUICK_TO_START}",
        **({"spark.driver.extraClassPath": os.pathsep.join(jars), **DELTA} if jars else {}),
    }.items():
        builder = builder.config(name, value)
    found = builder.getOrCreate()
    jvm = found.sparkContext._jvm.java.lang.ProcessHandle.current().pid()
    unnamed = kills / f"{PIDS}.new"
    unnamed.write_text(json.dumps([os.getpid(), jvm]))
    unnamed.rename(kills / PIDS)  # whoever sees it finds it whole
    return found


def topic_of(given: dict[str, Any]) -> slash_runs.Topic:
    workload, _, settings, _ = WORKLOADS[given["query"]]
    return slash_runs.Topic(
        workload=workload,
        query=given["query"],
        topics=given["topics"],
        servers=given["servers"],
        settings=settings,
    )


def expect(spark: Any, given: dict[str, Any]) -> dict[str, Any]:
    """What Spark's batch SQL makes of the topics."""
    frame = topic_of(given).frame(lambda: spark.read)
    Path(given["to"]).write_bytes(pickle.dumps(slash_runs.rows_of(frame)))
    return {}


def run(spark: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Run the query until it ends or fails."""
    from kdirect_spark import slash

    directory = Path(given["directory"])
    stream = topic_of(given).frame(lambda: spark.readStream, **given["source"])
    frame = slash.accelerate(stream, stateDir=directory / "state", **given["accelerate"])
    grown = given["grown"]
    query = (
        frame.writeStream.format(given["sink"])
        .option("path", str(directory / "rows"))
        .option("checkpointLocation", str(directory / "checkpoint"))
        .trigger(**({"processingTime": "0 seconds"} if grown else {"availableNow": True}))
        .start()
    )
    error = None
    try:
        if grown:
            while query.isActive and not Path(grown).exists():
                time.sleep(0.05)
            query.processAllAvailable()
        elif not query.awaitTermination(LIMIT_S):
            error = f"it did not end within {LIMIT_S} s: {query.status}"
    except Exception as e:
        error = str(e)
    finally:
        query.stop()
    figures = [report.observedMetrics.get("slash") for report in query.recentProgress]
    told = [of["figures"] for of in figures if of is not None and of["figures"] is not None]
    return {
        "error": error,
        "watermark": told[-1]["watermark"] if told else None,
        "late": sum(one["late"] for one in told),
        "batches": [one["batch"] for one in told],
    }


def written(spark: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The rows in the sink."""
    rows = slash_runs.written(spark, Path(given["directory"]), given["sink"])
    Path(given["to"]).write_bytes(pickle.dumps(rows))
    return {}


def main() -> None:
    spark = session(Path(sys.argv[1]), sys.argv[2:])
    for line in sys.stdin:
        given = json.loads(line)
        answer = {"expect": expect, "run": run, "written": written}[given["do"]](spark, given)
        print(ANSWER + json.dumps(answer), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
