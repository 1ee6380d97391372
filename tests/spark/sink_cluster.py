"""The exactly-once sink on a Spark cluster of two workers on this host: a copy of a slow task that
Spark runs speculatively, and an executor that is killed while a task of it lives on, and writes
after the commit.

    python tests/spark/sink_cluster.py DIRECTORY

It is a program, since a process has one Spark session, and that of the tests is a local one.  Its
executors find sink_zombie_site, by which one task attempt waits where the directory says so.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent.parent))  # behind the installed package

from kdirect import Broker  # noqa: E402
from kdirect_spark import session_builder  # noqa: E402
from tests.spark.committed import Committed  # noqa: E402
from tests.spark.conftest import Topics  # noqa: E402
from tests.spark.sink_zombie_site.places import ARMED, ENDED, GO_ON, TAKEN, ZOMBIE  # noqa: E402
from tests.spark.slash_cluster import cluster  # noqa: E402
from tests.support import wait_until  # noqa: E402

PARTITIONS, TASKS = 2, 3
ROWS, ROWS_OF_BATCH = 30, 10


def session(url: str, directory: Path) -> Any:
    builder = session_builder("sink on a cluster", url)
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.driver.memory": "700m",
        "spark.executor.memory": "512m",
        "spark.executor.cores": "1",
        "spark.driver.host": "127.0.0.1",
        "spark.log.level": "OFF",
        "spark.sql.shuffle.partitions": str(TASKS),
        "spark.local.dir": str(directory / "local"),
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.executorEnv.PYTHONPATH": str(HERE / "sink_zombie_site"),
        f"spark.executorEnv.{ZOMBIE}": str(directory),
        "spark.speculation": "true",
        "spark.speculation.interval": "50ms",
        "spark.speculation.multiplier": "1.0",
        "spark.speculation.quantile": "0.3",
        "spark.speculation.minTaskRuntime": "2s",
        "spark.locality.wait": "0s",
    }.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def arm(directory: Path, place: str) -> None:
    """The next task attempt that comes to this place waits there."""
    (directory / "new").write_text(place)
    (directory / "new").rename(directory / ARMED)


def a_slow_task(spark: Any, servers: str, directory: Path) -> None:
    """A task attempt has written, and does not end.  A copy of it counts."""
    Topics(servers).create_named("slow", PARTITIONS)
    arm(directory, "sink, records are sent")
    (
        spark.range(0, ROWS, 1, TASKS).selectExpr("CAST(id AS STRING) AS value")
        .write.format("kdirect").mode("append").option("kafka.bootstrap.servers", servers)
        .option("topic", "slow").save()
    )  # fmt: skip
    assert (directory / TAKEN).exists(), "no attempt has waited"
    (directory / TAKEN).unlink()
    assert not (directory / ENDED).exists(), "the batch is committed without it"
    seen = Committed(servers, "slow", PARTITIONS)
    try:
        assert sorted(map(int, seen.all())) == list(range(ROWS))
        assert seen.held_back() == 0
        print("a slow task: its copy counts")
    finally:
        seen.close()


def a_lost_executor(spark: Any, servers: str, directory: Path) -> None:
    """An executor is killed within a micro-batch, whose tasks are tried elsewhere.  One of its task
    attempts lives on, and writes when others have written for it and are committed."""
    topics = Topics(servers)
    topics.create_named("from", 1)
    topics.create_named("to", PARTITIONS)
    topics.fill("from", [b"%d" % i for i in range(ROWS)], key=lambda i: b"%d" % i)
    checkpoint = directory / "checkpoint"

    def kill() -> None:
        wait_until(lambda: (checkpoint / "commits" / "0").exists(), "a first micro-batch", 90)
        arm(directory, "sink, an attempt has joined")
        wait_until(lambda: (directory / TAKEN).exists(), "an attempt of a later one", 60)
        os.kill(int((directory / TAKEN).read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    seen = Committed(servers, "to", PARTITIONS)
    try:
        query = (
            spark.readStream.format("kdirect").option("kafka.bootstrap.servers", servers)
            .option("subscribe", "from").option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", str(ROWS_OF_BATCH)).load().select("key", "value")
            .repartition(TASKS).writeStream.format("kdirect")
            .option("kafka.bootstrap.servers", servers).option("topic", "to")
            .option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
        )  # fmt: skip
        with seen.watched(lambda values: len(values) % ROWS_OF_BATCH == 0):
            assert query.awaitTermination(120), query.status
            killer.join()
            assert sorted(map(int, seen.all())) == list(range(ROWS))
            ends = seen.ends()
            (directory / GO_ON).touch()
            wait_until(lambda: (directory / ENDED).exists(), "the late attempt writes", 60)
        said = (directory / ENDED).read_text()
        assert said.startswith("refused"), said
        assert sorted(map(int, seen.all())) == list(range(ROWS))
        assert seen.held_back() == 0 and seen.ends() == ends
        print("an executor killed, whose task writes late:", said)
    finally:
        seen.close()


def main(directory: Path) -> None:
    # Spark runs no copy of a task on the host of the first.
    with cluster(directory, 2, apart=True) as url, Broker() as broker:
        spark = session(url, directory)
        try:
            a_slow_task(spark, broker.bootstrap_servers, directory)
            a_lost_executor(spark, broker.bootstrap_servers, directory)
        finally:
            spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
