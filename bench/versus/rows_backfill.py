"""A Spark batch query over records that are in remote storage only: kdirect's connector past its
broker, beside Spark's Kafka connector and Apache Kafka with tiered storage.

Owns: the two brokers with tiered storage (Kafka's by the store of its own tests, which is a
directory, as kdirect's is), topics of the same records that are cold at both, and the query, in a
session of Spark with two task slots.  A topic is cold when neither broker has a file with the
records that are read; that is looked at before and after.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rows_backfill import (
    MASTER,
    SIZES,
    TOPIC_PARTITIONS,
    counted,
    ending,
    require_cold,
    segments_of,
)
from rows_spark import to_noop
from tiers import TIERED, WAIT_S, batch_of, batches_of, fill, local_start
from versus import systems
from versus.measure import rate_figure, turns
from versus.rows_spark import session, source
from versus.systems import Kafka, Kdirect, Pair, System

BAR = 3.0
OFTEN = {"remote.log.manager.task.interval.ms": "500", "log.retention.check.interval.ms": "500"}
OF_KDIRECT = {
    "remote.log.storage.system.enable": "true",
    "remote.log.client.access": "config",
    **OFTEN,
}
OF_KAFKA = {
    "remote.log.storage.system.enable": "true",
    "remote.log.storage.manager.class.name": (
        "org.apache.kafka.server.log.remote.storage.LocalTieredStorage"
    ),
    "rsm.config.delete.on.close": "false",
    "remote.log.metadata.manager.listener.name": "PLAINTEXT",
    "rlmm.config.remote.log.metadata.topic.replication.factor": "1",
    "rlmm.config.remote.log.metadata.topic.num.partitions": "1",
    "log.initial.task.delay.ms": "1000",
    **OFTEN,
}


class TieredPair(Pair):
    """Two brokers with tiered storage; `logs` and `objects`: the directories of each."""

    def __init__(self, kdirect: Kdirect, kafka: Kafka, directory: Path) -> None:
        super().__init__(kdirect, kafka)
        self.logs = {system.key: directory / system.key for system in self.both}
        self.objects = {system.key: objects_of(directory, system.key) for system in self.both}

    @contextmanager
    def cold_topic(self, value_bytes: int, quick: bool) -> Iterator[tuple[str, int]]:
        """A topic with the same records at both, and the offset where what is cold of each of its
        partitions ends."""
        segments, size = segments_of(quick)
        batch = batch_of(value_bytes)
        count = batches_of(batch, segments, size)
        stop = (count - 1) * batch.records
        configs = {**TIERED, "segment.bytes": str(size), "local.retention.bytes": "1"}
        with self.topic("cold", TOPIC_PARTITIONS, configs) as topic:
            for system in self.both:
                fill(system.address, topic, TOPIC_PARTITIONS, batch, count)
            for system in self.both:
                self._until(lambda s=system: self._is_cold(s, topic, stop), f"{topic} is cold")
            yield topic, stop
            self.require_cold(topic, stop)
        for system in self.both:  # the next one finds as much memory
            self._until(lambda s=system: not self._has_objects(s, topic), f"{topic} is deleted")

    def _is_cold(self, system: System, topic: str, stop: int) -> bool:
        logs = self.logs[system.key]
        return all(local_start(logs, topic, n) >= stop for n in range(TOPIC_PARTITIONS))

    def require_cold(self, topic: str, stop: int) -> None:
        for system in self.both:
            require_cold(self.logs[system.key], topic, TOPIC_PARTITIONS, stop)

    def _has_objects(self, system: System, topic: str) -> bool:
        where = self.objects[system.key]
        return any(path.is_file() and topic in str(path) for path in where.rglob("*"))

    def _until(self, is_so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not is_so():
            if time.monotonic() > deadline:
                raise RuntimeError(f"not within {WAIT_S:g} s: {what}")
            time.sleep(0.1)


def objects_of(directory: Path, key: str) -> Path:
    return directory / f"objects-{key}"


@contextmanager
def tiered_pair() -> Iterator[TieredPair]:
    directory = Path(systems.directory(), "tiered")
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        for system in (Kdirect, Kafka):
            objects_of(directory, system.key).mkdir(parents=True)
        uri = objects_of(directory, Kdirect.key).as_uri()
        kdirect = Kdirect(str(directory), **OF_KDIRECT, **{"remote.log.storage.uri": uri})
        stack.callback(kdirect.stop)
        store = {"rsm.config.dir": str(objects_of(directory, Kafka.key))}
        kafka = Kafka(str(directory), {**OF_KAFKA, **store}, ("tiered",))
        stack.callback(kafka.stop)
        yield TieredPair(kdirect, kafka, directory)


def tier_backfill(seconds: float, quick: bool) -> list[dict[str, Any]]:
    """`spark.read.format(...)` of cold records to Spark's noop sink."""
    out = []
    with tiered_pair() as both:
        spark = session(MASTER)
        for value_bytes in SIZES[1:2] if quick else SIZES:
            with both.cold_topic(value_bytes, quick) as (topic, stop):
                records = stop * TOPIC_PARTITIONS
                runs = {}
                for system in both.both:
                    reader = source(spark.read, system, topic).option(
                        "endingOffsets", ending(topic, TOPIC_PARTITIONS, stop)
                    )
                    if system.key == Kdirect.key:
                        reader = reader.option("coldReads", "direct")
                    frame = reader.load()
                    found = counted(frame)
                    if found != records:
                        raise RuntimeError(f"{found} of {records} came from {system.label}")
                    runs[system.key] = lambda frame=frame: records / to_noop(frame)
                both.require_cold(topic, stop)
                rates = turns(1 if quick else 3, runs, memory=0 if quick else 1 << 30)
            middle = {key: sorted(found)[len(found) // 2] for key, found in rates.items()}
            out.append(
                rate_figure(
                    "tier-backfill", "rows/s", "consumeRate", rates, both, bar=BAR,
                    value_bytes=value_bytes, rows=records, master=MASTER,
                    partitions=TOPIC_PARTITIONS, segment_bytes=segments_of(quick)[1],
                    mb_per_s=round(middle["kdirect"] * value_bytes / 1e6),
                    kafka_mb_per_s=round(middle["kafka"] * value_bytes / 1e6),
                )
            )  # fmt: skip
    return out
