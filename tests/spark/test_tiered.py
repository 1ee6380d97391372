"""Spark reads the cold part of a topic from the object store, past the broker."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kdirect.format.segment_object import parse_key
from tests.storage.tiered_broker import TieredBroker, tiered_broker

pytestmark = [pytest.mark.spark, pytest.mark.slow]
RECORDS = 6000
EXPECTED = [(i, i) for i in range(RECORDS)]


@pytest.fixture(params=["directory", "s3"])
def tiers(request: Any, object_stores: Any, tmp_path: Path) -> Iterator[TieredBroker]:
    place = object_stores[request.param].fresh()
    access = {"remote_log_client_access": "config"}
    with tiered_broker(place, tmp_path / "log", **access) as found:
        found.create(segment_bytes=262_144)
        found.produce(0, RECORDS, size=2000, at_ms=int(time.time() * 1000) - 100_000)
        found.settle()
        yield found


def stream_on(spark: Any, given: dict[str, str], directory: Path) -> None:
    """Take what is there as far as its checkpoint says into the rows of a directory."""
    (
        spark.readStream.format("kdirect").options(**given).load()
        .selectExpr("offset", "cast(cast(substring(value, 1, 8) as string) as int) as n")
        .writeStream.format("parquet")
        .option("path", str(directory / "rows"))
        .option("checkpointLocation", str(directory / "checkpoint"))
        .trigger(availableNow=True).start().awaitTermination()
    )  # fmt: skip


def options(tiers: TieredBroker, **more: Any) -> dict[str, str]:
    remote = {f"kdirect.remote.secret.{n}": v for n, v in tiers.place.config.items()}
    return {
        "kafka.bootstrap.servers": tiers.address,
        "subscribe": "t",
        "startingOffsets": "earliest",
        "kdirect.remote.uri": tiers.place.uri,
        **remote,
        **{name: str(value) for name, value in more.items()},
    }


def rows(frame: Any) -> list[tuple[int, int]]:
    found = frame.selectExpr("offset", "cast(substring(value, 1, 8) as string) as n").collect()
    return sorted((row.offset, int(row.n)) for row in found)


def told(directory: Path) -> list[dict[str, Any]]:
    lines = [x for path in directory.iterdir() for x in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def test_a_batch_reads_objects_with_a_task_each(spark, tiers, tmp_path):
    (tmp_path / "told").mkdir()
    before = tiers.figure("remote_fetch_requests")
    frame = (
        spark.read.format("kdirect")
        .options(**options(tiers, coldReads="direct", taskStatisticsDir=tmp_path / "told"))
        .load()
    )
    assert rows(frame) == EXPECTED
    assert tiers.figure("remote_fetch_requests") == before, "the broker read the store"
    statistics = told(tmp_path / "told")
    cold = [x for x in statistics if x.get("client_cold_gets")]
    assert {x["transport"] for x in cold if x["stop"] < RECORDS} == {"objects"}
    assert len(cold) > 1, "one task read all objects"
    assert sum(x["client_cold_lookups"] for x in cold) == 0, "a task asked the broker"
    stored = sum(info.size for info in tiers.place.store().list())
    assert sum(x["client_cold_bytes"] for x in cold) <= 1.05 * stored


@pytest.mark.parametrize("reads", ["auto", "broker"])
def test_the_rows_are_the_same_whichever_way_they_come(spark, tiers, reads):
    frame = spark.read.format("kdirect").options(**options(tiers, coldReads=reads)).load()
    assert rows(frame) == EXPECTED


def test_a_stream_reads_the_cold_part_once(spark, tiers, tmp_path):
    """And, as all of it is known beforehand, by tasks that begin where objects do."""
    (tmp_path / "told").mkdir()
    given = options(tiers, coldReads="direct", taskStatisticsDir=tmp_path / "told")
    for round_ in range(2):
        stream_on(spark, given, tmp_path)
        found = spark.read.parquet(str(tmp_path / "rows")).collect()
        expected = RECORDS * (round_ + 1)
        assert sorted((r.offset, r.n) for r in found) == [(i, i) for i in range(expected)]
        tiers.produce(RECORDS, RECORDS, size=2000)
        tiers.settle()
    starts = {x["start"] for x in told(tmp_path / "told")}
    assert len(starts) >= 6, "one task read all objects of a micro-batch"
    parsed = [parse_key("", key) for key in tiers.objects()]
    assert starts - {RECORDS} <= {found[1] for found in parsed if found is not None}


@pytest.mark.parametrize("tiers", ["s3"], indirect=True)
def test_wrong_credentials_are_told_or_gone_around(spark, tiers):
    wrong = {"kdirect.remote.secret.secret_key": "a-secret-that-is-wrong"}
    auto = spark.read.format("kdirect").options(**(options(tiers, coldReads="auto") | wrong))
    assert rows(auto.load()) == EXPECTED
    direct = spark.read.format("kdirect").options(**(options(tiers, coldReads="direct") | wrong))
    with pytest.raises(Exception, match=r"secret|credentials|refuse") as caught:
        rows(direct.load())
    assert "a-secret-that-is-wrong" not in str(caught.value)


def test_times_skip_objects(spark, tiers, tmp_path):
    (tmp_path / "told").mkdir()
    base = int(time.time() * 1000) - 100_000
    frame = spark.read.format("kdirect").options(
        **options(
            tiers, coldReads="direct", startingTimestamp=base + RECORDS // 2,
            taskStatisticsDir=tmp_path / "told",
        )
    ).load()  # fmt: skip
    found = rows(frame)
    assert found and found == [(i, i) for i in range(found[0][0], RECORDS)]
    assert found[0][0] > RECORDS // 4
    stored = sum(info.size for info in tiers.place.store().list())
    assert sum(x.get("client_cold_bytes", 0) for x in told(tmp_path / "told")) < 0.8 * stored


@pytest.mark.parametrize("kind", ["directory", "s3"])
def test_prefer_cold_takes_nothing_of_the_broker(spark, object_stores, tmp_path, kind):
    """No READ, no Fetch, and no GET that the broker makes, for what is in the store."""
    place = object_stores[kind].fresh()
    with tiered_broker(place, tmp_path / "log", remote_log_client_access="config") as tiers:
        tiers.create(local_retention_bytes=-2, segment_bytes=262_144)
        tiers.produce(0, RECORDS, size=2000)
        tiers.wait(lambda: not tiers.figure("remote_copy_lag_segments"))
        assert tiers.partition.local_log_start_offset == 0
        end = tiers.broker.server.remote.end_offset(tiers.partition)
        assert RECORDS // 2 < end < RECORDS
        (tmp_path / "told").mkdir()

        def asked() -> tuple[int, int]:
            fetches = tiers.broker.statistics()["broker_requests_by_api"].get("Fetch", 0)
            return fetches, tiers.figure("remote_get_requests")

        before = asked()
        given = options(
            tiers,
            preferCold="true",
            endingOffsets=json.dumps({"t": {"0": end}}),
            taskStatisticsDir=tmp_path / "told",
        )
        assert rows(spark.read.format("kdirect").options(**given).load()) == EXPECTED[:end]
        assert asked() == before
        statistics = told(tmp_path / "told")
        assert {x["transport"] for x in statistics} == {"objects"}
        assert not [x for x in statistics if x.get("read_bytes") or x.get("fetched_bytes")]
        assert sum(x["client_cold_bytes"] for x in statistics) > end * 2000
        # What follows is the broker's.
        given["endingOffsets"] = "latest"
        assert rows(spark.read.format("kdirect").options(**given).load()) == EXPECTED


def test_credentials_are_in_no_plan(spark, object_stores):
    secret = "a-secret-of-the-store"
    given = {
        "kafka.bootstrap.servers": "127.0.0.1:9",
        "subscribe": "t",
        "kdirect.remote.uri": "s3://tiers",
        "kdirect.remote.secret.access_key": secret,
        "kdirect.remote.secret.secret_key": secret,
    }
    stream = spark.readStream.format("kdirect").options(**given).load()
    plan = stream._jdf.queryExecution()
    assert secret not in plan.toString() and secret not in plan.analyzed().toString()
    named = {k.replace("secret.access_key", "access_key"): v for k, v in given.items()}
    with pytest.raises(Exception, match=r"kdirect\.remote\.secret\.access_key") as caught:
        spark.readStream.format("kdirect").options(**named).load()
    assert secret not in str(caught.value)
