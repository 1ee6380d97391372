"""What queries over cold records cost the broker and the store, and what they say: how often the
broker is asked where records lie, which objects are fetched, what is told when they cannot be.

Clients reach the store through a gate, which counts their requests; the broker reaches it directly.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import pytest

import kdirect
from kdirect.storage.upload import key_of
from tests.object_servers import CUT, KEY_ID, SECRET, Gate, Place, gate_to
from tests.spark.test_tiered import options, rows, stream_on, told
from tests.storage.tiered_broker import TP, TieredBroker, tiered_broker

pytestmark = [pytest.mark.spark, pytest.mark.slow]
OBJECTS = 30
RECORDS = (OBJECTS + 1) * 20
EXPECTED = [(i, i) for i in range(RECORDS)]
SIZE = 1500  # of a value: one batch of twenty fills a segment
AT_MS = int(time.time() * 1000) - 1_000_000


class Seen:
    """A broker with a cold topic of many small objects, and what clients ask it and its store."""

    def __init__(self, tiers: TieredBroker, gate: Gate, through: Place) -> None:
        self.tiers, self.gate, self.through = tiers, gate, through
        remote = tiers.broker.server.remote
        remote.locations._store = through.store()
        self.asked = 0
        answer = remote.locations.answer

        def counted(header: Any, wanted: Any) -> Any:
            self.asked += 1
            return answer(header, wanted)

        remote.locations.answer = counted

    def produce(self) -> None:
        self.tiers.create()
        self.tiers.produce(0, RECORDS, size=SIZE, at_ms=AT_MS)
        self.tiers.settle()
        assert len(self.segments) >= OBJECTS

    @property
    def segments(self) -> list[Any]:
        partition = self.tiers.partition
        logs = self.tiers.broker.server.remote.logs
        return [x.segment for x in logs.pieces(partition.topic_id, 0, partition.log_start_offset)]

    @property
    def borders(self) -> list[int]:
        """Where objects begin, and where the last one ends."""
        found = self.segments
        return [x.base_offset for x in found] + [found[-1].end_offset]

    def begin(self) -> None:
        """Count from now on."""
        self.asked = 0
        self.gate.requests.clear()

    @property
    def gets(self) -> Counter[int]:
        """How often each object was asked for, by its number."""
        cluster_id = self.tiers.broker.server.logs.cluster_id
        keys = [key_of(x, cluster_id) for x in self.segments]
        paths = [unquote(x.path) for x in self.gate.requests if x.method == "GET"]
        return Counter(next(i for i, k in enumerate(keys) if path.endswith(k)) for path in paths)

    def options(self, **more: Any) -> dict[str, str]:
        return options(self.tiers, **more) | {"kdirect.remote.uri": self.through.uri}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, object_stores: Any) -> Iterator[Seen]:
    place = object_stores["s3"].fresh()
    log = tmp_path_factory.mktemp("queries") / "log"
    with (
        gate_to(place) as (gate, through),
        tiered_broker(place, log, remote_log_client_access="config") as tiers,
    ):
        found = Seen(tiers, gate, through)
        found.produce()
        yield found


@pytest.fixture
def statistics(tmp_path: Path) -> Path:
    (tmp_path / "told").mkdir()
    return tmp_path / "told"


def test_many_small_objects_are_as_many_tasks(spark, seen, statistics):
    """The broker is asked once, each object is fetched once, and who waits for it says so."""
    seen.begin()
    wait_s = 0.03

    def slow(request: Any) -> None:
        if request.method == "GET":
            time.sleep(wait_s)

    seen.gate.fault = slow
    try:
        count = len(seen.segments)
        frame = spark.read.format("kdirect").options(
            **seen.options(
                coldReads="direct", minPartitions=count + 1, taskStatisticsDir=statistics
            )
        ).load()  # fmt: skip
        assert rows(frame) == EXPECTED
    finally:
        seen.gate.fault = lambda request: None
    assert seen.asked == 1, "each task asked, or the planner did so twice"
    assert seen.gets == dict.fromkeys(range(count), 1)
    cold = [x for x in told(statistics) if x["transport"] == "objects"]
    assert sorted((x["start"], x["stop"]) for x in cold) == list(pairwise(seen.borders))
    waits = [x["client_cold_wait_ms"] for x in cold]
    assert min(waits) >= wait_s * 1000 * 0.8, waits


@pytest.mark.parametrize("trigger", [{"availableNow": True}, {"processingTime": "0 seconds"}])
def test_a_micro_batch_asks_once(spark, seen, statistics, trigger):
    most = 200
    seen.begin()
    local_start = seen.tiers.partition.local_log_start_offset
    name = f"once{len(trigger)}{next(iter(trigger))}"
    query = (
        spark.readStream.format("kdirect")
        .options(
            **seen.options(
                coldReads="direct", maxOffsetsPerTrigger=most, minPartitions=7,
                taskStatisticsDir=statistics,
            )
        ).load()
        .selectExpr("offset", "cast(cast(substring(value, 1, 8) as string) as int) as n")
        .writeStream.format("memory").queryName(name).trigger(**trigger).start()
    )  # fmt: skip
    try:
        if "availableNow" in trigger:
            query.awaitTermination()
        else:
            query.processAllAvailable()
    finally:
        query.stop()
    found = [(x.offset, x.n) for x in spark.table(name).collect()]
    assert sorted(found) == EXPECTED
    starts = [
        json.loads(p["sources"][0]["startOffset"] or "{}")
        for p in query.recentProgress
        if p["numInputRows"]
    ]
    assert len(starts) == -(-RECORDS // most)
    cold = sum(start < local_start for start in range(0, RECORDS, most))
    assert seen.asked == cold, (seen.asked, starts)
    begun = {x["start"] for x in told(statistics) if x["start"] < local_start}
    assert len(begun) >= 7 * cold
    if "availableNow" in trigger:
        assert begun <= {*seen.borders, *range(0, RECORDS, most)}, "a task begins in an object"


def test_times_choose_the_objects(spark, seen):
    """What is outside of the times is not fetched."""
    borders = seen.borders
    for first, last in ((0, 5), (7, 12), (20, None)):
        limits = {"startingTimestamp": AT_MS + borders[first]}
        end = RECORDS
        if last is not None:
            end = borders[last]
            limits["endingTimestamp"] = AT_MS + end
        seen.begin()
        frame = spark.read.format("kdirect").options(**seen.options(coldReads="direct", **limits))
        assert rows(frame.load()) == [(i, i) for i in range(borders[first], end)]
        assert seen.gets == dict.fromkeys(range(first, last or len(seen.segments)), 1)


def test_a_store_that_cannot_be_read_is_told_once(spark, said, seen):
    """By each process that reads: at most two, as the session has two cores."""
    wrong = {"kdirect.remote.secret.secret_key": "a-secret-that-is-wrong"}
    before = said().count("are read through the broker")
    given = seen.options(coldReads="auto", minPartitions=8, **{"kafka.client.id": "told-once"})
    assert rows(spark.read.format("kdirect").options(**(given | wrong)).load()) == EXPECTED
    warnings = said().count("are read through the broker") - before
    assert 1 <= warnings <= 2
    assert "a-secret-that-is-wrong" not in said()


def test_what_retention_has_taken_away_is_a_loss(spark, object_stores, tmp_path):
    """A checkpoint lies below the log start, and above it all is cold."""
    from tests.storage.test_tier_deletion import alter

    place = object_stores["directory"].fresh()
    with tiered_broker(place, tmp_path / "log", remote_log_client_access="config") as tiers:

        def read(loss: str) -> None:
            given = options(tiers, coldReads="direct", failOnDataLoss=loss)
            stream_on(spark, given, tmp_path)

        tiers.create()
        tiers.produce(0, 100, size=SIZE)
        tiers.settle()
        read("true")
        tiers.produce(100, RECORDS - 100, size=SIZE)
        alter(tiers, retention_bytes=8 * 20 * SIZE)
        tiers.wait(lambda: tiers.partition.log_start_offset > 100)
        tiers.settle()
        start, hot = tiers.partition.log_start_offset, tiers.partition.local_log_start_offset
        assert 100 < start < hot, "nothing is cold"
        with pytest.raises(Exception, match=f"t-0 no longer has offsets 100 to {start}"):
            read("true")
        read("false")
        found = spark.read.parquet(str(tmp_path / "rows")).collect()
        expected = [*range(100), *range(start, RECORDS)]
        assert sorted((x.offset, x.n) for x in found) == [(i, i) for i in expected]


def test_signed_urls_are_told_nowhere(
    spark, said, object_stores, tmp_path, caplog, capsys, monkeypatch
):
    """Whole reads with them by a session and a client that have no key, with errors on the way: not
    a signature, nor the broker's key, stands in what anybody says, plans or throws."""
    for name in [x for x in os.environ if x.startswith("AWS_")]:
        monkeypatch.delenv(name)
    place = object_stores["s3"].fresh()
    count = 200
    with (
        gate_to(place) as (gate, through),
        tiered_broker(place, tmp_path / "log", remote_log_client_access="presigned") as tiers,
    ):
        seen = Seen(tiers, gate, through)
        tiers.create()
        tiers.produce(0, count, size=SIZE)
        tiers.settle()
        refused = [(503, "SlowDown"), (403, "AccessDenied"), CUT]

        hit: set[str] = set()

        def fault(request: Any) -> Any:
            if not refused or request.path in hit:
                return None
            hit.add(request.path)
            return refused.pop()

        given = {
            "kafka.bootstrap.servers": tiers.address,
            "subscribe": "t",
            "startingOffsets": "earliest",
            "coldReads": "direct",
        }
        spark.sparkContext.setLogLevel("INFO")
        try:
            frame = spark.read.format("kdirect").options(**given).load()
            gate.fault = fault
            assert rows(frame) == [(i, i) for i in range(count)]
            assert not refused and seen.gets
            frame.explain(True)
            shown = capsys.readouterr().out + frame._jdf.queryExecution().toString()
            assert "kdirect" in shown.lower()
            with caplog.at_level(logging.DEBUG):
                hit.clear()
                refused += [(503, "SlowDown"), (403, "AccessDenied")]
                settings = {"bootstrap.servers": tiers.address, "cold.reads": "direct"}
                with kdirect.connect(settings) as session, session.reader(TP, 0, count) as reader:
                    assert sum(batch.num_rows for batch in reader) == count
                    assert reader.statistics()["client_cold_gets"] > 0
            assert not refused
            lost = key_of(seen.segments[3], tiers.broker.server.logs.cluster_id)
            place.store().delete(lost)
            with pytest.raises(Exception, match=lost) as caught:
                rows(frame)
        finally:
            spark.sparkContext.setLogLevel("ERROR")
        signatures = {
            parse_qs(x.query)["X-Amz-Signature"][0] for x in gate.requests if x.method == "GET"
        }
        assert len(signatures) > 3
    everything = said() + caplog.text + shown + str(caught.value)
    assert "TaskSetManager" in everything, "Spark's own log was not captured"
    told_of = [x for x in (*signatures, "X-Amz", KEY_ID, SECRET) if x in everything]
    assert not told_of
