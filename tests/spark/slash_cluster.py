"""Accelerated queries on a cluster of its own: a master and two workers of one slot each, on this
host.  The rows are compared with Spark's batch SQL; then an executor of Spark is killed within a
batch, and they are compared again.

    python tests/spark/slash_cluster.py DIRECTORY

It is a program, since a process has one Spark session, and that of the tests is a local one.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark
from pyspark.errors import StreamingQueryException

from kdirect import Broker, workloads
from kdirect_spark import session_builder, slash
from tests.spark import slash_runs

HOME = Path(pyspark.__file__).parent
EVENTS = 40_000
START_S = 60
TOO_FEW_SLOTS = "SPARK-24819"


@contextlib.contextmanager
def cluster(directory: Path, workers: int, *, apart: bool = False) -> Iterator[str]:
    """A master and workers with a slot each, as long as the block lasts; the master's address.
    `apart`: each worker is on a host of its own, by its address."""
    environment = {
        **os.environ,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *arguments: str) -> Path:
        path = directory / f"{name}.log"
        command = [str(HOME / "bin" / "spark-class"), *arguments]
        with open(path, "wb") as log:
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        return path

    try:
        log = start(
            "master", "org.apache.spark.deploy.master.Master",
            "--host", "127.0.0.1", "--port", "0", "--webui-port", "0",
        )  # fmt: skip
        url = _said(log, r"spark://127\.0\.0\.1:[1-9]\d*")
        for i in range(workers):
            host = f"127.0.0.{2 + i if apart else 1}"
            start(
                f"worker-{i}", "org.apache.spark.deploy.worker.Worker", url,
                "--host", host, "--cores", "1", "--memory", "1g", "--webui-port", "0",
                "--work-dir", str(directory / f"work-{i}"),
            )  # fmt: skip
        yield url
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _said(log: Path, pattern: str) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if match := re.search(pattern, log.read_text(errors="replace")):
            return match[0]
        time.sleep(0.05)
    raise TimeoutError(f"{log}: nothing like {pattern}: {log.read_text(errors='replace')[-2000:]}")


def executors(url: str) -> list[int]:
    """The processes of Spark's executors of this application."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            driver = any(word.startswith(b"spark://CoarseGrainedScheduler@") for word in words)
            if driver and any(word.endswith(b"CoarseGrainedExecutorBackend") for word in words):
                worker = [w for w in words if w.startswith(b"spark://Worker@")]
                if worker or url.encode() in words:
                    found.append(int(name))
    return found


def wait_for_executors(spark: Any) -> None:
    """Until Spark knows two of them."""
    deadline = time.monotonic() + START_S
    while len(spark._jsc.sc().statusTracker().getExecutorInfos()) < 3:  # the driver is one
        if time.monotonic() > deadline:
            raise TimeoutError("there are no two executors")
        time.sleep(0.1)


class Killer(threading.Thread):
    """Kills one executor of Spark when the second batch of a query has begun."""

    def __init__(self, url: str, offsets: Path) -> None:
        super().__init__(daemon=True)
        self.killed: int | None = None
        self._url = url
        self._offsets = offsets

    def run(self) -> None:
        while not (self._offsets / "1").exists():
            time.sleep(0.01)
        time.sleep(0.15)
        self.killed = executors(self._url)[0]
        os.kill(self.killed, signal.SIGKILL)


def compare(spark: Any, topic: slash_runs.Topic, directory: Path) -> dict[str, Any]:
    """Run the query wrapped, and compare it; the figures of its last batch."""
    expected = slash_runs.rows_of(topic.frame(lambda: spark.read))
    stream = topic.frame(lambda: spark.readStream, maxOffsetsPerTrigger="9000")
    fast = slash.accelerate(stream, executors=2, stateDir=directory / "state")
    try:
        progress = slash_runs.run(fast, directory)
    except StreamingQueryException as e:
        # Spark waits for slots when a stage runs again, but refuses one that is submitted without.
        if TOO_FEW_SLOTS not in str(e):
            raise
        wait_for_executors(spark)
        progress = slash_runs.run(fast, directory)
    figures = progress[-1].observedMetrics["slash"]["figures"]
    wanted = slash_runs.closed(expected, slash_runs.time_of(figures["watermark"]))
    assert len(wanted) > 50
    slash_runs.assert_same(slash_runs.written(spark, directory), wanted)
    assert figures["bytes_written"] > 0
    return figures


def main(directory: Path) -> None:
    with cluster(directory, 2) as url, Broker() as broker:
        builder = session_builder("slash on a cluster", url)
        for name, value in {
            **slash_runs.SPARK,
            "spark.executor.memory": "512m",
            "spark.executor.cores": "1",
            "spark.driver.host": "127.0.0.1",
        }.items():
            builder = builder.config(name, value)
        spark = builder.getOrCreate()
        workload = workloads.ysb(keys=100, step_us=100_000)
        topic = slash_runs.write(broker.bootstrap_servers, workload, "ysb", EVENTS)
        print("as it is:", compare(spark, topic, directory / "calm"))
        assert len(executors(url)) == 2, executors(url)
        killer = Killer(url, directory / "killed" / "checkpoint" / "offsets")
        killer.start()
        print("an executor killed:", compare(spark, topic, directory / "killed"))
        assert killer.killed is not None
        wait_for_executors(spark)
        print("the batch:", len(slash_runs.rows_of(slash.accelerate(
            topic.frame(lambda: spark.read), executors=2))))  # fmt: skip
        spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
