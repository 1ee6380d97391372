"""The bench row of a backfill: a Spark batch query over records that are in the object store only.

One broker with two topics of the same records, one of them cold (its local segments are deleted,
which is shown), and three queries over them, in turns, in one session of Spark with two task slots:
cold records past the broker, the same through it, and the hot ones over shm.  The store is a
directory on tmpfs, as the logs are.  How Apache Kafka does is in `versus.rows_backfill`.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memory import touch
from rows_spark import to_noop
from sides import Figure, Peer, figure, spread_of
from tiers import (
    QUICK_SEGMENT_BYTES,
    SEGMENT_BYTES,
    batch_of,
    batches_of,
    directory_store,
    fill,
    local_start,
    make_cold,
    properties,
    side,
)

MASTER = "local[2]"
TOPIC_PARTITIONS = 2  # as many as task slots: what is hot is read by a task for each
TOTAL_BYTES = 2 << 30  # of values, about, at each of `SIZES`
SIZES = (100, 1 << 10, 10 << 10)
COLD, HOT = "cold", "hot"
# By coldReads, `auto` of the topic that is hot: what records come over, and whether tasks and the
# broker get bytes from the store.
DID = {
    "direct": ("objects", True, False),
    "broker": ("tcp", False, True),
    "auto": ("shm", False, False),
}
LEAST_ROUNDS = 3


def tier_backfill(seconds: float, quick: bool) -> list[Figure]:
    """A batch query of cold records past the broker, beside the same query on hot ones over shm;
    what it costs the broker, beside the same query through it; and the bytes that it fetches."""
    from kdirect_spark import session_builder

    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = session_builder("bench", MASTER)
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "2g",
        "spark.log.level": "ERROR",
        # Half of a short run is the JVM's compiler.
        **({"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"} if quick else {}),
    }.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    figures: list[Figure] = []
    try:
        for value_bytes in SIZES[1:2] if quick else SIZES:
            with backfill(value_bytes, quick) as found:
                figures += found.figures(spark, seconds / len(SIZES), quick)
    finally:
        spark.stop()
    return figures


@contextmanager
def backfill(value_bytes: int, quick: bool) -> Iterator[Backfill]:
    """Both topics, at a broker that has nothing else to do: it is started again when they are made,
    with its default intervals."""
    import kdirect

    segments, size = segments_of(quick)
    batch = batch_of(value_bytes)
    with directory_store() as (directory, place), side() as peer:
        log = directory / "log"
        given = properties(place, remote_log_client_access="config")
        address = peer.call("start", str(log), given)
        with kdirect.connect({"bootstrap.servers": address, "transport": "tcp"}) as session:
            stop = make_cold(peer, session, COLD, batch, segments, size, TOPIC_PARTITIONS)
            configs = {"segment.bytes": size, "retention.ms": -1}
            session.admin.create_topic(HOT, TOPIC_PARTITIONS, configs=configs)
            count = batches_of(batch, segments, size)
            fill(address, HOT, TOPIC_PARTITIONS, batch, count)
        peer.call("stop")
        usual = {name: value for name, value in given.items() if not name.endswith("interval.ms")}
        address = peer.call("start", str(log), usual)
        yield Backfill(peer, address, log, place.uri, value_bytes, stop)
        peer.call("stop")


def segments_of(quick: bool) -> tuple[int, int]:
    """Sealed segments of a partition, and the bytes of each."""
    size = QUICK_SEGMENT_BYTES if quick else SEGMENT_BYTES
    return (3 if quick else TOTAL_BYTES // TOPIC_PARTITIONS // size), size


def require_cold(directory: Path, topic: str, partitions: int, stop: int) -> None:
    """RuntimeError where a broker has records below `stop` in its own files."""
    for number in range(partitions):
        start = local_start(directory, topic, number)
        if start < stop:
            raise RuntimeError(f"{topic}-{number} is not cold: offset {start} is in {directory}")


def counted(frame: Any) -> int:
    """Run the query; how many rows came to its sink."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as F

    seen = Observation()
    to_noop(frame.observe(seen, F.count(F.lit(1)).alias("rows")))
    return int(seen.get["rows"])


def ending(topic: str, partitions: int, stop: int) -> str:
    """The option `endingOffsets` of both connectors."""
    return json.dumps({topic: {str(number): stop for number in range(partitions)}})


class Backfill:
    """A broker that has both topics, up to offset `stop` of each partition."""

    def __init__(self, peer: Peer, address: str, log: Path, uri: str, value_bytes: int,
                 stop: int) -> None:  # fmt: skip
        self.peer, self.address, self.log, self.uri = peer, address, log, uri
        self.value_bytes, self.stop = value_bytes, stop
        self.rows = stop * TOPIC_PARTITIONS
        self.objects = Path(uri.removeprefix("file://"))

    def frame(self, spark: Any, topic: str, reads: str, told: Path | None = None) -> Any:
        reader = (
            spark.read.format("kdirect")
            .option("kafka.bootstrap.servers", self.address)
            .option("subscribe", topic)
            .option("endingOffsets", ending(topic, TOPIC_PARTITIONS, self.stop))
            .option("coldReads", reads)
            .option("kdirect.remote.uri", self.uri)
        )
        return (reader.option("taskStatisticsDir", str(told)) if told else reader).load()

    def run(self, frame: Any) -> tuple[float, float]:
        """Seconds of the query, and CPU seconds of the broker."""
        before = self.peer.call("cpu_s")
        took = to_noop(frame)
        return took, self.peer.call("cpu_s") - before

    def figures(self, spark: Any, seconds: float, quick: bool) -> list[Figure]:
        told = self.proven(spark, HOT, "auto"), self.proven(spark, COLD, "direct")
        self.proven(spark, COLD, "broker")
        ways = {"direct": (COLD, "direct"), "hot": (HOT, "auto"), "broker": (COLD, "broker")}
        frames = {way: self.frame(spark, *given) for way, given in ways.items()}
        took: dict[str, list[float]] = {way: [] for way in ways}
        cpu: dict[str, list[float]] = {way: [] for way in ways}
        began = time.monotonic()
        while not took["hot"] or (
            not quick and (len(took["hot"]) < LEAST_ROUNDS or time.monotonic() - began < seconds)
        ):
            for way in list(ways) if len(took["hot"]) % 2 else reversed(ways):
                touch(1 << 20 if quick else 1 << 30)
                wall, busy = self.run(frames[way])
                took[way].append(wall)
                cpu[way].append(busy)
        rates = {way: [self.rows / s for s in walls] for way, walls in took.items()}
        mid: Callable[[list[float]], float] = statistics.median
        said = {
            "value_bytes": self.value_bytes, "rows": self.rows, "master": MASTER,
            "topic_partitions": TOPIC_PARTITIONS, "segment_bytes": segments_of(quick)[1],
        }  # fmt: skip
        hot, cold = told
        needed = sum(path.stat().st_size for path in self.objects.rglob("*.kseg"))
        fetched = cold["client_cold_bytes"]
        return [
            figure(
                "tier-backfill", mid(rates["direct"]), "rows/s",
                "the same query where hot, over shm", mid(rates["hot"]), bar=0.75,
                mb_per_s=round(mid(rates["direct"]) * self.value_bytes / 1e6),
                tasks=cold["tasks"], against_tasks=hot["tasks"],
                through_the_broker=mid(rates["broker"]), waited_ms=cold["client_cold_wait_ms"],
                **said, **spread_of(rates["direct"], rates["hot"]),
            ),
            figure(
                "tier-backfill.cpu", mid(cpu["direct"]), "CPU s of the broker", "through it",
                mid(cpu["broker"]), lower_is_better=True, bar=0.01, **said,
                **spread_of(cpu["direct"], cpu["broker"]),
            ),
            figure(
                "tier-backfill.bytes", fetched / 1e6, "MB fetched", "the objects",
                needed / 1e6, lower_is_better=True, bar=1.05, gets=cold["client_cold_gets"],
                lookups_of_tasks=cold["client_cold_lookups"], **said,
            ),
        ]  # fmt: skip

    def proven(self, spark: Any, topic: str, reads: str) -> dict[str, Any]:
        """Run a query once, which warms Spark up, and show that it reads every record, where it is
        said to be, in the way that it is said to; what its tasks did."""
        if topic == COLD:
            require_cold(self.log, COLD, TOPIC_PARTITIONS, self.stop)
        with tempfile.TemporaryDirectory(prefix="kdirect-told-") as directory:
            before = self.peer.call("statistics")
            rows = counted(self.frame(spark, topic, reads, Path(directory)))
            after = self.peer.call("statistics")
            lines = [json.loads(line) for path in Path(directory).iterdir()
                     for line in path.read_text().splitlines()]  # fmt: skip
        got = {name: after[name] - before[name] for name in after}
        if rows != self.rows:
            raise RuntimeError(f"{rows} of {self.rows} records of {topic} were read")
        names = sorted({name for line in lines for name in line if name.startswith("client_cold")})
        found: dict[str, Any] = {n: sum(line.get(n, 0) for line in lines) for n in names}
        over = "+".join(sorted({line["transport"] for line in lines}))
        did = (over, found.get("client_cold_bytes", 0) > 0, got["remote_get_bytes"] > 0)
        if did != DID[reads]:
            raise RuntimeError(f"{topic} was not read in the way of coldReads={reads}: {did}")
        return {**found, "tasks": len(lines)}


__all__ = ["backfill", "counted", "ending", "require_cold", "segments_of", "tier_backfill"]
