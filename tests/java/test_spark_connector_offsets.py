"""Where queries start, end and go on, by Spark's own Kafka connector and by format("kdirect"), both
on one broker.

A checkpoint moves from either to the other, though ours names the ids of topics.  What is no range
is an error in both, and so is a record whose time Spark cannot hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kdirect

# In a process of its own: the jars of a Spark session are chosen when its JVM starts.
SCRIPT = """
import json, sys
import kdirect
from kdirect_spark import session_builder
servers, jars, directory = sys.argv[1:]
spark = (session_builder("offsets", "local[2]").config("spark.jars", jars)
         .config("spark.ui.enabled", "false").config("spark.sql.shuffle.partitions", "2")
         .config("spark.log.level", "OFF").getOrCreate())
session = kdirect.connect({"bootstrap.servers": servers, "transport": "tcp"})
FORMATS = "kafka", "kdirect"

def fill(topic, values, **more):
    with session.producer() as producer:
        for value in values:
            producer.produce(topic, b"%d" % value, partition=0, **more)
        producer.flush()

def outcome(call):
    try:
        return call()
    except Exception as e:
        return "error: " + str(e)

def source(reader, name, topic, options):
    return (reader.format(name).option("kafka.bootstrap.servers", servers)
            .option("subscribe", topic).options(**options).load())

def batch(name, topic, **options):
    columns = "partition", "offset", "unix_micros(timestamp)"  # Python has no late years
    rows = lambda: source(spark.read, name, topic, options).selectExpr(*columns).collect()
    return outcome(lambda: sorted(map(tuple, rows())))

def stream(name, topic, **options):
    got = []
    def run():
        query = (source(spark.readStream, name, topic, options).writeStream
                 .foreachBatch(lambda df, i: got.extend(int(r.value) for r in df.collect()))
                 .option("checkpointLocation", directory + "/" + topic)
                 .trigger(availableNow=True).start())
        query.awaitTermination(120)
        return sorted(got)
    return outcome(run)

out = {"moved": []}
n = 0
for name in ("kdirect", "kafka", "kafka", "kdirect", "kdirect", "kafka"):
    fill("moves", range(n, n + 5))
    n += 5
    out["moved"].append(stream(name, "moves", startingOffsets="earliest"))
fill("moves", range(n, n + 2))
out["moved"].append(stream("kdirect", "moves"))
session.admin.delete_topic("moves")
session.admin.create_topic("moves", 1)
fill("moves", range(100))
out["created again"] = stream("kdirect", "moves")

at = lambda a, b: json.dumps({"ranges": {"0": a, "1": b}})
CASES = {
    "within": {"startingOffsets": at(2, 1), "endingOffsets": at(4, 3)},
    "empty": {"startingOffsets": at(4, 1), "endingOffsets": at(4, 3)},
    "at the end of the log": {"startingOffsets": at(10, 5)},
    "beyond the log": {"startingOffsets": at(50, 2)},
    "beyond the log, whatever is lost": {"startingOffsets": at(50, 2), "failOnDataLoss": "false"},
    "beyond its end": {"startingOffsets": at(5, 0), "endingOffsets": at(3, 2)},
    "a time after an offset": {"startingTimestamp": str(T0 + 3000), "endingOffsets": at(2, 2)},
    "an offset after a time": {"startingOffsets": at(9, 4), "endingTimestamp": str(T0 + 2000)},
    "a time after a time": {"startingTimestamp": str(T0 + 4000),
                            "endingTimestamp": str(T0 + 2000)},
    "a time without a record": {"startingTimestamp": str(T0 * 2),
                                "startingOffsetsByTimestampStrategy": "latest",
                                "endingTimestamp": str(T0 + 2000)},
}
out["ranges"] = {what: {name: batch(name, "ranges", **options) for name in FORMATS}
                 for what, options in CASES.items()}
for topic in ("late", "last"):
    out[topic] = {name: batch(name, topic) for name in FORMATS}
print(json.dumps(out))
"""
MOST_MS = (2**63 - 1) // 1000  # that Spark's timestamps hold


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_offsets_mean_the_same_to_both_formats(
    broker, connector_jars: list[Path], tmp_path: Path
) -> None:
    session = kdirect.connect(broker.bootstrap_servers)
    times = {"message.timestamp.after.max.ms": 2**63 - 1, "retention.ms": -1}
    for name, partitions in (("moves", 1), ("ranges", 2), ("late", 1), ("last", 1)):
        session.admin.create_topic(name, partitions, configs=times)
    t0 = 1_700_000_000_000
    with session.producer() as producer:
        for partition, count in ((0, 10), (1, 5)):
            for i in range(count):
                producer.produce("ranges", b"v", partition=partition, timestamp=t0 + 1000 * i)
        producer.produce("last", b"v", timestamp=MOST_MS)
        producer.produce("late", b"v", timestamp=t0)
        producer.produce("late", b"v", timestamp=MOST_MS + 1)
        producer.flush()
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            f"T0 = {t0}\n{SCRIPT}",
            broker.bootstrap_servers,
            ",".join(map(str, connector_jars)),
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    out = json.loads(run.stdout.splitlines()[-1])

    assert out["moved"] == [
        *(list(range(n, n + 5)) for n in range(0, 30, 5)),
        [30, 31],
    ], "each format goes on where the other stopped"
    assert (
        "DataLossError" in out["created again"]
        and "moves-0 was deleted and created again" in (out["created again"])
    )

    failed = {what for what, by in out["ranges"].items() if isinstance(by["kafka"], str)}
    assert failed == {
        "beyond the log",
        "beyond the log, whatever is lost",
        "beyond its end",
        "a time after an offset",
        "an offset after a time",
        "a time after a time",
        "a time without a record",
    }
    for what, by in out["ranges"].items():
        if what in failed:
            assert "ConfigError" in by["kdirect"] and "beyond its end" in by["kdirect"], what
            assert "ranges-" in by["kdirect"], what
        else:
            assert by["kdirect"] == by["kafka"], what

    assert out["last"]["kafka"] == out["last"]["kdirect"] == [[0, 0, MOST_MS * 1000]]
    assert f"offset 1 has timestamp value {MOST_MS + 1}" in out["late"]["kafka"]
    for words in ("BadTimestampError", "late-0 at offset 1", f"{MOST_MS + 1} ms"):
        assert words in out["late"]["kdirect"]
