"""Spark Connect: a batch, a stream and the sink through a server of its own process, which has the
shim's jar or has it not.  The client is a Python of its own: a process has one kind of session."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import die_with_parent, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
STARTED = re.compile(r"Spark Connect server started at:? .*:(\d+)")
CLIENT = """
import json, sys
from pyspark.sql import SparkSession, functions as F

remote, servers, topic, batch, streamed, checkpoint, how = sys.argv[1:]
how = json.loads(how)
spark = SparkSession.builder.remote(remote).getOrCreate()

def source(reader, name):
    return (reader.format("kdirect").option("kafka.bootstrap.servers", servers)
            .option("subscribe", name).option("startingOffsets", "earliest").load())

def sink(writer, name):
    return (writer.format("kdirect").option("kafka.bootstrap.servers", servers)
            .option("topic", name))

def values(name):
    rows = source(spark.read, name).select(F.col("value").cast("string").alias("v")).collect()
    return sorted(int(row.v) for row in rows)

frame = source(spark.read, topic)
out = {"connect": "connect" in type(spark).__module__, "topic": values(topic),
       "columns": frame.columns, "count": frame.count(),
       "plan": frame._explain_string(extended=False)}
sink(frame.selectExpr("STRING(1000 + INT(STRING(value))) AS value").write, batch).save(**how)
out["batch"] = values(batch)
query = (sink(source(spark.readStream, topic).select("value").writeStream, streamed)
         .option("checkpointLocation", checkpoint).trigger(availableNow=True).start())
assert query.awaitTermination(240)
out["streamed"] = values(streamed)
out["rows"] = sum(p.sources[0].numInputRows for p in query.recentProgress)
print(json.dumps(out))
spark.stop()
"""


@contextmanager
def connect_server(directory: Path, shim: bool) -> Iterator[str]:
    """A Spark Connect server with the shim or without; its address, as a client names it."""
    from pyspark import find_spark_home

    from kdirect_spark import shim as shim_module

    logged = directory / "connect.log"
    command = [
        str(Path(find_spark_home._find_spark_home()) / "bin/spark-submit"),
        "--class", "org.apache.spark.sql.connect.service.SparkConnectServer",
        "--master", "local[2]",
        # A short life: compiling its code for speed would take longer than what it does.
        "--driver-java-options", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "--conf", "spark.connect.grpc.binding.address=127.0.0.1",
        "--conf", "spark.connect.grpc.binding.port=0",
        "--conf", "spark.ui.enabled=false",
        "--conf", "spark.sql.shuffle.partitions=2",
        "--conf", f"spark.sql.warehouse.dir={directory / 'warehouse'}",
        "--conf", "spark.python.unix.domain.socket.enabled=true",
        *(["--jars", str(shim_module.jar())] if shim else []),
        "spark-internal",
    ]  # fmt: skip
    environment = {
        **os.environ, "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1", "PYTHONSAFEPATH": "1",
    }  # fmt: skip
    with open(logged, "w") as log:
        server = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env=environment,
            preexec_fn=die_with_parent,
        )
    try:

        def port() -> str | None:
            text = logged.read_text()
            assert server.poll() is None, text[-3000:]
            found = STARTED.search(text)
            return found and found[1]

        yield f"sc://127.0.0.1:{wait_until(port, 'the server started', 120, 0.1)}"
    finally:
        server.terminate()
        server.wait(60)


@pytest.mark.parametrize("shim", [True, False], ids=["with the shim", "without"])
def test_batch_stream_and_sink(broker, topics, tmp_path: Path, shim: bool) -> None:
    topic, batch, streamed = topics.create(2), topics.create(), topics.create(2)
    for p in range(2):
        topics.fill(topic, [b"%d" % n for n in range(p, 200, 2)], p)
    with connect_server(tmp_path, shim) as remote:
        done = subprocess.run(
            [
                sys.executable, "-c", CLIENT, remote, broker.bootstrap_servers, topic, batch,
                streamed, str(tmp_path / "checkpoint"),
                # A batch without a mode appends where the shim is there.
                json.dumps({} if shim else {"mode": "append"}),
            ],
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
            cwd=tmp_path,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )  # fmt: skip
        said = (tmp_path / "connect.log").read_text()[-3000:]
        assert done.returncode == 0, done.stderr[-3000:] + said
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["connect"], "the client had no Connect session"
    assert found["columns"] == [
        "key", "value", "topic", "partition", "offset", "timestamp", "timestampType",
    ]  # fmt: skip
    assert found["topic"] == found["streamed"] == list(range(200))
    assert found["batch"] == list(range(1000, 1200))
    assert found["count"] == found["rows"] == 200
    # What the bytes of the log become in the server's JVM.
    assert ("ColumnarToRow" in found["plan"]) is shim, found["plan"]
