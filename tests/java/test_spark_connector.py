"""Spark's own Kafka connector against our broker: the rows are those of format("kdirect"), read and
written."""

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
from kdirect_spark import session_builder
servers, jars, directory = sys.argv[1:]
spark = (session_builder("connector", "local[2]").config("spark.jars", jars)
         .config("spark.ui.enabled", "false").config("spark.sql.shuffle.partitions", "2")
         .config("spark.log.level", "ERROR").getOrCreate())

def source(reader, name, topic):
    return (reader.format(name).option("kafka.bootstrap.servers", servers)
            .option("subscribe", topic).option("startingOffsets", "earliest")
            .option("includeHeaders", "true").load())

def rows(name, topic):
    return sorted(map(str, source(spark.read, name, topic).collect()))

out = {name: rows(name, "t") for name in ("kafka", "kdirect")}
columns = ["key", "value", "headers", "partition"]
copied = source(spark.readStream, "kafka", "t").select(*columns)
(copied.writeStream.format("kafka").option("kafka.bootstrap.servers", servers)
 .option("topic", "copy").option("checkpointLocation", directory)
 .trigger(availableNow=True).start().awaitTermination())
for what, topic in (("copied", "copy"), ("original", "t")):
    found = source(spark.read, "kdirect", topic).select(*columns).collect()
    out[what] = sorted(str(r) for r in found)
print(json.dumps(out))
"""


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rows_are_those_of_our_own_format(
    broker, connector_jars: list[Path], tmp_path: Path
) -> None:
    session = kdirect.connect(broker.bootstrap_servers)
    for name in ("t", "copy"):
        session.admin.create_topic(name, 2)
    for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
        with session.producer(**{"compression.type": codec, "linger.ms": 5}) as producer:
            for i in range(100):
                headers = [("h", b"%d" % i), ("empty", None)] if i % 3 == 0 else None
                producer.produce("t", b"%s %d" % (codec.encode(), i) if i % 10 else None,
                                 key=b"k" if i % 2 else None,
                                 partition=i % 2, headers=headers,
                                 timestamp=1_700_000_000_000 + i)  # fmt: skip
            producer.flush()
    command = [
        sys.executable,
        "-c",
        SCRIPT,
        broker.bootstrap_servers,
        ",".join(map(str, connector_jars)),
        str(tmp_path / "checkpoint"),
    ]
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    rows = json.loads(run.stdout.splitlines()[-1])
    assert len(rows["kafka"]) == 500
    assert rows["kafka"] == rows["kdirect"]
    assert rows["copied"] == rows["original"]
