"""The driver of the copying queries that are killed: a program for the tests (sink_kills.py).

    python sink_kill_driver.py KILLS

Reads one JSON object a line, runs a query that copies a topic, and answers when it has ended.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent.parent))  # behind the installed package

from tests.spark.sink_kills import RUN_S  # noqa: E402
from tests.spark.slash_kill_driver import session  # noqa: E402
from tests.spark.slash_kills import ANSWER  # noqa: E402


def run(spark: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Copy what is in the topic; `error` says why it failed."""
    query = (
        spark.readStream.format("kdirect")
        .option("kafka.bootstrap.servers", given["servers"])
        .option("subscribe", given["source"])
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", str(given["rows"]))
        .option("transport", given["transport"])
        .load()
        .repartition(given["tasks"])
        .select("key", "value")
        .writeStream.format("kdirect")
        .option("kafka.bootstrap.servers", given["servers"])
        .option("topic", given["target"])
        .option("checkpointLocation", given["checkpoint"])
        .option("transport", given["transport"])
        .trigger(availableNow=True)
        .start()
    )
    error = None
    try:
        if not query.awaitTermination(RUN_S):
            error = f"it did not end within {RUN_S} s: {query.status}"
    except Exception as e:
        error = str(e)
    finally:
        query.stop()
    return {"error": error}


def main() -> None:
    # A task is tried three times.
    spark = session(Path(sys.argv[1]), [], "local[2,3]", "pyspark.daemon")
    for line in sys.stdin:
        print(ANSWER + json.dumps(run(spark, json.loads(line))), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
