"""A broker that is restarted under streams: they wait for it, and nothing is lost; exactly-once,
nothing is doubled either.

`KDIRECT_RESTARTS=10` restarts it as often, for up to 20 seconds each time; `make test` does it once
with SIGTERM and once with SIGKILL, for longer than a client tries to connect."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import kdirect
from kdirect.model import TopicPartition
from tests.spark.committed import Committed
from tests.support import BrokerProcess, wait_until

pytestmark = pytest.mark.spark

RESTARTS = int(os.environ.get("KDIRECT_RESTARTS", "2"))
IS_LONG = RESTARTS > 2
PARTITIONS = 2
SOURCE, TARGET, ONCE = "source", "target", "once"


@contextmanager
def numbers(servers: str) -> Iterator[Callable[[], int]]:
    """A thread produces 0, 1, 2, ... to the partitions of SOURCE in turn.  Yields how many were
    acknowledged."""
    over = threading.Event()
    failed: list[Any] = []
    acknowledged = 0

    def delivered(error: Any, message: Any) -> None:
        nonlocal acknowledged
        if error is not None:
            failed.append(error)
        acknowledged += 1

    def run() -> None:
        sent = 0
        settings = {"bootstrap.servers": servers, "reconnect.backoff.max.ms": 200}
        with closing(kdirect.Producer(settings)) as producer:
            while not over.wait(0.005):
                producer.produce(
                    SOURCE, b"%d" % sent, partition=sent % PARTITIONS, on_delivery=delivered
                )
                producer.poll(0)
                sent += 1
            assert producer.flush(60) == 0

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield lambda: acknowledged
    finally:
        over.set()
        thread.join(90)
    assert not thread.is_alive() and failed == []


class Streams:
    """Streams of SOURCE into a table, into TARGET, and exactly-once into ONCE."""

    def __init__(self, spark: Any, session: Any, servers: str, transport: str, home: Path) -> None:
        self._spark = spark
        self._session = session
        self._servers = servers
        self._transport = transport
        self._home = home
        self._queries: list[Any] = []

    def _source(self) -> Any:
        return (
            self._spark.readStream.format("kdirect")
            .option("kafka.bootstrap.servers", self._servers)
            .option("subscribe", SOURCE)
            .option("startingOffsets", "earliest")
            .option("transport", self._transport)
            .load()
        )

    def _start(self, writer: Any, name: str) -> None:
        self._queries.append(
            writer.option("checkpointLocation", str(self._home / f"{name}-checkpoint"))
            .trigger(processingTime="100 milliseconds")
            .start()
        )

    def start_table(self) -> None:
        number = self._source().selectExpr("CAST(CAST(value AS STRING) AS INT) AS n")
        writer = number.writeStream.format("parquet").option("path", str(self._home / "table"))
        self._start(writer, "table")

    def start_copy(self, target: str) -> None:
        writer = (
            self._source()
            .select("value")
            .writeStream.format("kdirect")
            .option("kafka.bootstrap.servers", self._servers)
            .option("topic", target)
            .option("exactlyOnce", str(target == ONCE).lower())
            .option("transport", self._transport)
        )
        self._start(writer, target)

    def _check(self) -> None:
        for query in self._queries:
            if query.exception() is not None:
                raise query.exception()

    def _done(self, name: str) -> list[int]:
        """The micro-batches that a query has committed."""
        self._check()
        return [int(p.name) for p in (self._home / f"{name}-checkpoint/commits").glob("[0-9]*")]

    def through(self, name: str) -> int:
        """How many records a query has read and written, by its checkpoint."""
        done = self._done(name)
        if not done:
            return 0
        offsets = self._home / f"{name}-checkpoint/offsets" / str(max(done))
        return sum(json.loads(offsets.read_text().splitlines()[-1])[SOURCE].values())

    def table(self) -> list[int]:
        return [row.n for row in self._spark.read.parquet(str(self._home / "table")).collect()]

    def copy(self) -> set[int]:
        found: set[int] = set()
        written = [TopicPartition(TARGET, p) for p in range(PARTITIONS)]
        for tp, end in self._session.latest_offsets(written).items():
            with closing(self._session.reader(tp, 0, end)) as reader:
                for batch in reader.batches():
                    found.update(int(v) for v in batch.column("value").to_pylist())
        return found

    def stop(self) -> None:
        for query in self._queries:
            query.stop()


def all_go_on(streams: Streams, records: int) -> None:
    for name in ("table", TARGET, ONCE):
        wait_until(lambda n=name: streams.through(n) >= records, f"{name} goes on", 90)


@pytest.mark.timeout(180 + 120 * RESTARTS)
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_streams_wait_for_a_broker_that_is_restarted(
    spark: Any, own_broker: BrokerProcess, tmp_path: Path, transport: str, seed: int
) -> None:
    servers = own_broker.bootstrap_servers
    rng = random.Random(seed)
    with closing(kdirect.connect({"bootstrap.servers": servers, "transport": "tcp"})) as session:
        for topic in (SOURCE, TARGET, ONCE):
            session.admin.create_topic(topic, PARTITIONS)
        streams = Streams(spark, session, servers, transport, tmp_path)
        try:
            with numbers(servers) as acknowledged:
                streams.start_table()
                for target in (TARGET, ONCE):
                    streams.start_copy(target)
                # A sink waits for a broker once a micro-batch has shown that its address is right.
                all_go_on(streams, 1)
                for i in range(RESTARTS):
                    (own_broker.stop if i % 2 == 0 else own_broker.kill)()
                    time.sleep(rng.uniform(1, 20) if IS_LONG else 7)
                    own_broker.start()
                    before = acknowledged()
                    wait_until(lambda n=before: acknowledged() > n + 50, "the producer goes on", 60)
                    all_go_on(streams, acknowledged())
            total = acknowledged()
            all_go_on(streams, total)
        finally:
            streams.stop()
        assert sorted(streams.table()) == list(range(total)), "a table has each record once"
        assert streams.copy() == set(range(total))
        with closing(Committed(servers, ONCE, PARTITIONS)) as committed:
            assert sorted(map(int, committed.all())) == list(range(total)), "and so has the sink"
            assert committed.held_back() == 0
