"""Holds kdirect against Apache Kafka and Spark's Kafka connector: the same workloads on both, in
turns, in one run.

    make bench-vs-kafka ROWS="produce-latency spark-read" JSON=out.json
    (without ROWS: all of them, a minute or so each)

The harness is bench/run.py's, and so are the objects of the JSON.  Beside it a report in Markdown
with plots is written, with the same name: out.md, out-*.png.  Kafka comes as jars, kept in the
user's cache; see versus/jars.py.  `--report out.json` writes the report alone.

The rows replicate-* and failover start clusters of three and four brokers, one cluster at a time,
and take several minutes each; `--count 5` lets failover lose a leader five times in place of 20.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # where PYTHONSAFEPATH keeps it out

from catalogue import Row
from run import main

CLUSTERS_S = 1800.0  # a row over clusters may take so long: they start anew for each round
ROWS = (
    Row(
        "produce-latency",
        "versus.rows_produce",
        2,
        "one acknowledged record at a time, by size; and after silence",
        8,
    ),
    Row(
        "produce-bandwidth",
        "versus.rows_produce",
        2,
        "one partition, unbatched and batched, by size",
        8,
    ),
    Row(
        "produce-scaling",
        "versus.rows_produce",
        2,
        "1 to 8 partitions, a producer for each, and what a record costs the broker",
        8,
    ),
    Row(
        "tcp-produce",
        "versus.rows_tcp",
        2,
        "Produce requests over Kafka's protocol, by the broker's processor time",
        8,
    ),
    Row(
        "commit",
        "versus.rows_transactions",
        2,
        "a commit of offsets that is waited for, one at a time",
        8,
    ),
    Row(
        "txn",
        "versus.rows_transactions",
        2,
        "a transaction of 100 records, from its commit until they are visible",
        8,
    ),
    Row(
        "consume-latency",
        "versus.rows_consume",
        2,
        "one committed record at a time, by size; and out of a backlog",
        8,
    ),
    Row(
        "consume-bandwidth",
        "versus.rows_consume",
        2,
        "a topic from its start, by size, against memcpy too",
        8,
    ),
    Row(
        "empty-fetch",
        "versus.rows_consume",
        2,
        "asking an idle topic for news, and the broker's CPU for it",
        8,
    ),
    Row(
        "end-to-end",
        "versus.rows_latency",
        2,
        "from one process to another, a record every 2 ms",
        8,
    ),
    Row(
        "spark-read",
        "versus.rows_spark",
        3,
        "a Spark batch read to noop, by value size, against ready batches too",
        20,
    ),
    Row(
        "spark-available-now",
        "versus.rows_spark",
        3,
        "a Spark stream over all there is, by value size",
        20,
        900,
    ),
    Row(
        "spark-first-query",
        "versus.rows_spark",
        3,
        "the first query of a Spark session, from load() to its end",
        20,
        900,
    ),
    Row(
        "tier-backfill",
        "versus.rows_backfill",
        4,
        "a Spark batch read of cold records past the broker, beside Kafka with tiered storage",
        20,
        900,
    ),
    Row("spark-sink", "versus.rows_spark", 3, "a Spark batch write, by value size", 20),
    Row("micro-batch", "versus.rows_streams", 3, "micro-batches of one row, one after another", 20),
    Row(
        "event-delay",
        "versus.rows_streams",
        3,
        "400 events a second and bursts, from sensor to Spark",
        20,
    ),
    Row(
        "consumer-scaling",
        "versus.rows_latency",
        2,
        "1 to 64 consumers of a topic, and the broker's CPU",
        8,
    ),
    Row(
        "backlog",
        "versus.rows_consume",
        2,
        "seconds a GB while the backlog grows, and over more partitions",
        8,
    ),
    Row(
        "replicate-latency",
        "versus.rows_replicate",
        4,
        "acks=all with three replicas, one record at a time, by size",
        patience_s=CLUSTERS_S,
    ),
    Row(
        "replicate-bandwidth",
        "versus.rows_replicate",
        4,
        "acks=all with three replicas, unbatched and pipelined, by size",
        patience_s=CLUSTERS_S,
    ),
    Row(
        "replicate-factor",
        "versus.rows_replicate",
        5,
        "the same at 32 KiB with one to four replicas",
        patience_s=CLUSTERS_S,
    ),
    Row(
        "replicate-slow",
        "versus.rows_replicate",
        4,
        "acks=1 while one of three replicas is stopped",
        patience_s=CLUSTERS_S,
    ),
    Row(
        "failover",
        "versus.rows_failover",
        4,
        "from the loss of a leader until a record is acknowledged elsewhere (p90)",
        patience_s=2 * CLUSTERS_S,
    ),
)


def start(arguments: list[str]) -> int:
    if "--report" in arguments:
        from versus import report

        print(report.write(Path(arguments[arguments.index("--report") + 1])))
        return 0
    if "--child" in arguments:
        from versus import systems

        atexit.register(systems.stop_all)
        return main(arguments, ROWS)
    if "--count" in arguments:  # children inherit it
        from versus.rows_failover import COUNT

        at = arguments.index("--count")
        os.environ[COUNT] = str(int(arguments[at + 1]))
        arguments = arguments[:at] + arguments[at + 2 :]
    status = main(arguments, ROWS, Path(__file__).resolve(), together=True)
    target = (
        Path(arguments[arguments.index("--json") + 1])
        if "--json" in arguments
        else Path("bench/out/bench.json")
    )
    if status != 2 and "--list" not in arguments and target.exists():
        from versus import report

        figures = json.loads(target.read_text())
        print(report.goals(figures))
        if figures:
            print(f"bench: the report is {report.write(target)}", file=sys.stderr)
        if any(f["settings"].get("failed") for f in figures):
            return 1
    return status


if __name__ == "__main__":
    sys.exit(start(sys.argv[1:]))
