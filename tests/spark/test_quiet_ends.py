"""Processes of Spark end without a traceback when nothing went wrong."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time

import pytest

from kdirect_spark import worker

WORKER = """
import time
{imported}

def main(infile, outfile):
    assert infile.read() == b""  # Spark has closed the connection
    outfile.write(b"what nobody reads")
    {ends}
"""


def ended(tmp_path, daemon: str, *, imported: str = "", ends: str = "") -> str:
    """What Spark's daemon and a worker of it write to their standard error, from the start of the
    daemon until the worker has ended because Spark has closed its connection."""
    (tmp_path / "pyspark_short_worker.py").write_text(WORKER.format(imported=imported, ends=ends))
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "PYTHON_UNIX_DOMAIN_ENABLED": "true",
        "PYTHON_WORKER_FACTORY_SOCK_DIR": str(tmp_path),
        "PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE": "1",  # as Spark sets it
        "SPARK_REUSE_WORKER": "1",
    }
    environment.pop("KDIRECT_TRACEBACK", None)
    running = subprocess.Popen(
        [sys.executable, "-m", daemon, "pyspark_short_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    length = struct.unpack("!i", running.stdout.read(4))[0]
    path = running.stdout.read(length).decode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        pid = struct.unpack("!i", connection.recv(4))[0]
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        state = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0]  # noqa: SIM115
        if state == "Z":
            break
        time.sleep(0.02)
    return running.communicate(timeout=20)[1].decode()


@pytest.mark.parametrize("daemon", ["pyspark.daemon", "pyspark_kdirect.daemon"])
def test_a_worker_that_spark_ends(tmp_path, daemon):
    said = ended(tmp_path, daemon)
    assert "BrokenPipeError" in said, "pyspark's daemon writes it by itself"
    said = ended(tmp_path, daemon, imported="import kdirect_spark.clear_errors")
    assert "Traceback" not in said
    said = ended(
        tmp_path,
        daemon,
        imported="import kdirect_spark.clear_errors",
        ends="raise ValueError('a bug')",
    )
    assert "Traceback" in said and "ValueError: a bug" in said, "other errors are told"


@pytest.mark.spark
def test_a_reader_that_is_cut_short_and_a_stream_that_is_stopped(
    topics, read, read_stream, said, tmp_path
):
    topic = topics.create()
    topics.fill(topic, [b"v" * 10_000] * 3000)
    assert len(read(topic, arrowBatchBytes="65536").limit(1).collect()) == 1
    query = (
        read_stream(topic, startingOffsets="earliest").writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path)).start()
    )  # fmt: skip
    query.processAllAvailable()
    query.stop()
    time.sleep(1)
    assert "Traceback" not in said(), said()[-3000:]


def test_a_warning_is_logged_once_for_each_query(caplog):
    worker.tell_once(["one of these tests", "another"])
    worker.tell_once(["another", "a third"])
    worker.tell_once(["another"], ("t", "a query", None))
    said = [record.message for record in caplog.records]
    assert said == ["one of these tests", "another", "a third", "another"]
