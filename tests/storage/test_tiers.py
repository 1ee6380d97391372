"""A tiered topic at a real broker over real stores: copied, deleted here, read by stock clients,
deleted there."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import OffsetSpec

import kdirect
from kdirect.format.remote_metadata import RemoteSegment, RemoteSegmentUpdate, parse_record
from tests.object_servers import SILENT, Gate, gate_to
from tests.storage.tiered_broker import SEGMENT_BYTES, TOPIC, TP, TieredBroker, tiered_broker

RECORDS = 2000  # of some 120 bytes: seven segments


@pytest.fixture(params=["directory", "s3", "gcs"])
def tiers(request: Any, object_stores: Any, tmp_path: Path) -> Iterator[TieredBroker]:
    with tiered_broker(object_stores[request.param].fresh(), tmp_path / "log") as found:
        yield found


@pytest.fixture
def place(object_stores: Any) -> Any:
    return object_stores["directory"].fresh()


def everything(start: int = 0, end: int = RECORDS) -> list[tuple[int, int]]:
    return [(i, i) for i in range(start, end)]


def test_everything_is_read_wherever_it_lies(tiers: TieredBroker) -> None:
    tiers.create()
    tiers.produce(0, RECORDS)
    tiers.settle()
    local = tiers.partition.local_log_start_offset
    assert local > RECORDS * 0.8 and tiers.partition.log_start_offset == 0
    assert len(tiers.objects()) == tiers.figure("remote_metadata_count") >= 6
    assert tiers.consume(0, RECORDS) == everything()
    for start in (1, local - 1, local, local + 1):
        assert tiers.consume(start, RECORDS - start) == everything(start)
    for transport in ("shm", "tcp"):
        settings = {"bootstrap.servers": tiers.address, "transport": transport}
        with kdirect.connect(settings) as session:
            offsets = [
                offset
                for batch in session.reader(TP, 0, RECORDS)
                for offset in batch.column("offset").to_pylist()
            ]
        assert offsets == list(range(RECORDS)), transport


def test_times_are_found_in_both_tiers(tiers: TieredBroker) -> None:
    tiers.create()
    base = int(time.time() * 1000) - 100_000
    tiers.produce(0, RECORDS, at_ms=base)
    tiers.settle()
    local = tiers.partition.local_log_start_offset
    for offset in (0, 1, RECORDS // 2, local - 1, local, local + 1, RECORDS - 1):
        found = tiers.offset_for(OffsetSpec.for_timestamp(base + offset))
        assert found == offset
    assert tiers.offset_for(OffsetSpec.for_timestamp(0)) == 0
    assert tiers.offset_for(OffsetSpec.for_timestamp(base + RECORDS)) == -1
    assert tiers.offset_for(OffsetSpec.max_timestamp()) == RECORDS - 1
    assert tiers.offset_for(OffsetSpec.earliest()) == 0
    assert tiers.offset_for(OffsetSpec.latest()) == RECORDS


def test_a_topic_that_is_deleted_leaves_nothing(tiers: TieredBroker) -> None:
    tiers.create()
    tiers.produce(0, RECORDS)
    tiers.settle()
    assert tiers.objects()
    tiers.admin.delete_topics([TOPIC])[TOPIC].result(20)
    tiers.wait(lambda: not tiers.objects(), "objects of a deleted topic stay")
    tiers.wait(lambda: tiers.figure("remote_metadata_count") == 0)
    tiers.create()  # again, with another id
    tiers.produce(0, RECORDS)
    tiers.settle()
    assert tiers.consume(0, RECORDS) == everything()


def test_retention_counts_both_tiers(tiers: TieredBroker) -> None:
    tiers.create(retention_bytes=3 * SEGMENT_BYTES)
    tiers.produce(0, RECORDS)
    tiers.settle()
    tiers.wait(lambda: tiers.partition.log_start_offset > 0)
    tiers.settle()
    kept = tiers.figure("remote_bytes") + tiers.partition.size
    assert 2 * SEGMENT_BYTES < kept < 4 * SEGMENT_BYTES, "whole segments go"
    assert len(tiers.objects()) == tiers.figure("remote_metadata_count")
    start = tiers.partition.log_start_offset
    assert tiers.consume(start, RECORDS - start) == everything(start)
    with pytest.raises(AssertionError, match="out of range"):
        tiers.consume(0, 1)


def test_records_are_deleted_in_the_cold_part(tiers: TieredBroker) -> None:
    tiers.create()
    tiers.produce(0, RECORDS)
    tiers.settle()
    before = len(tiers.objects())
    where = confluent_kafka.TopicPartition(TOPIC, 0, RECORDS // 2)
    assert tiers.admin.delete_records([where])[where].result(20).low_watermark == RECORDS // 2
    tiers.wait(lambda: len(tiers.objects()) < before)
    tiers.settle()
    assert 0 < len(tiers.objects()) < before
    assert tiers.consume(RECORDS // 2, RECORDS // 2) == everything(RECORDS // 2)
    assert tiers.offset_for(OffsetSpec.earliest()) == RECORDS // 2


def test_a_restart_goes_on(object_stores: Any, tmp_path: Path) -> None:
    place = object_stores["directory"].fresh()
    with tiered_broker(place, tmp_path / "log") as tiers:
        tiers.create()
        tiers.produce(0, RECORDS)
        tiers.settle()
        assert tiers.consume(0, RECORDS) == everything()
        objects = tiers.objects()
    with tiered_broker(place, tmp_path / "log") as tiers:
        assert tiers.objects() == objects
        assert tiers.partition.log_start_offset == 0
        assert tiers.consume(0, RECORDS) == everything()
        assert tiers.figure("remote_index_misses") == 0, "indexes survive"
        tiers.produce(RECORDS, RECORDS)
        tiers.settle()
        assert tiers.consume(0, 2 * RECORDS) == everything(0, 2 * RECORDS)


def test_the_metadata_topic_is_kafkas(place: Any, tmp_path: Path) -> None:
    """A stock consumer reads it: each segment begins, and is finished."""
    with tiered_broker(place, tmp_path / "log") as tiers:
        tiers.create()
        tiers.produce(0, RECORDS)
        tiers.settle()
        consumer = confluent_kafka.Consumer(
            {"bootstrap.servers": tiers.address, "group.id": "m", "log_level": 0}
        )
        consumer.assign([confluent_kafka.TopicPartition("__remote_log_metadata", 0, 0)])
        count = 2 * tiers.figure("remote_metadata_count")
        records = []
        while len(records) < count:
            records += [parse_record(m.value()) for m in consumer.consume(count, 1.0)]
        consumer.close()
        states = Counter((type(r), r.state.name) for r in records)
        segments = tiers.figure("remote_metadata_count")
        assert states == {
            (RemoteSegment, "COPY_SEGMENT_STARTED"): segments,
            (RemoteSegmentUpdate, "COPY_SEGMENT_FINISHED"): segments,
        }


# -- stores that fail ------------------------------------------------------------------------------


@contextmanager
def behind_a_gate(stores: Any, tmp_path: Path, **more: Any) -> Iterator[tuple[Gate, TieredBroker]]:
    """A broker whose objects go to S3 through a gate."""
    with (
        gate_to(stores["s3"].fresh()) as (gate, place),
        tiered_broker(place, tmp_path / "log", **more) as tiers,
    ):
        yield gate, tiers


def test_a_segment_is_one_put_and_nothing_else(object_stores: Any, tmp_path: Path) -> None:
    with behind_a_gate(object_stores, tmp_path) as (gate, tiers):
        tiers.create()
        tiers.produce(0, RECORDS)
        tiers.settle()
        segments = tiers.figure("remote_metadata_count")
        of_segments = [r.line for r in gate.requests if r.path.endswith(".kseg")]
        assert Counter(of_segments) == {"PUT": segments}
        others = [r for r in gate.requests if not r.path.endswith(".kseg")]
        assert Counter(r.method for r in others if "/owners/" in r.path) == {"PUT": 1}
        # Whose they are is looked at before, after and beside the marker's PUT, once for all.
        assert len(others) <= 4 and len(gate.requests) == segments + len(others)


def test_a_store_that_is_away_costs_space_only(object_stores: Any, tmp_path: Path) -> None:
    with behind_a_gate(object_stores, tmp_path) as (gate, tiers):
        gate.fault = lambda request: (503, "ServiceUnavailable")
        tiers.create()
        tiers.produce(0, RECORDS)
        tiers.wait(lambda: tiers.figure("remote_copy_errors") > 0)
        assert tiers.partition.local_log_start_offset == 0
        assert tiers.figure("remote_copy_lag_segments") >= 6
        assert tiers.consume(0, RECORDS) == everything()
        gate.fault = lambda request: None
        tiers.settle()
        assert tiers.consume(0, RECORDS) == everything()
        assert len(tiers.objects()) == tiers.figure("remote_metadata_count")


def test_a_put_that_hangs_is_given_up(object_stores: Any, tmp_path: Path) -> None:
    hung: list[str] = []

    def fault(request: Any) -> str | None:
        if request.method == "PUT" and request.path.endswith(".kseg") and len(hung) < 2:
            hung.append(request.path)
            return SILENT
        return None

    limit = {"remote_log_copy_timeout_ms": 500}
    with behind_a_gate(object_stores, tmp_path, **limit) as (gate, tiers):
        gate.fault = fault
        tiers.create()
        tiers.produce(0, RECORDS)
        tiers.settle()
        assert tiers.figure("remote_copies_given_up") == 2
        assert tiers.consume(0, RECORDS) == everything()


def test_a_slow_store_delays_nobody_else(object_stores: Any, tmp_path: Path) -> None:
    """Every request for what is cold takes a second: a Fetch of it is answered after 500 ms, and
    producers and consumers of what is new do not notice."""
    count = 700
    with behind_a_gate(object_stores, tmp_path) as (gate, tiers):
        tiers.create()
        tiers.produce(0, count)
        tiers.settle()

        def slow(request: Any) -> None:
            if request.method in ("GET", "HEAD"):
                time.sleep(1)

        gate.fault = slow
        cold = confluent_kafka.Consumer(
            {"bootstrap.servers": tiers.address, "group.id": "c", "log_level": 0}
        )
        cold.assign([confluent_kafka.TopicPartition(TOPIC, 0, 0)])
        began = time.monotonic()
        got: list[int] = []
        waits: list[float] = []
        number = count
        while len(got) < count and time.monotonic() < began + 60:
            got += [int(m.value()[:8]) for m in cold.consume(1000, 0.01) if not m.error()]
            at = time.monotonic()
            tiers.produce(number, 20)
            assert tiers.consume(number, 20)[0] == (number, number)
            waits.append(time.monotonic() - at)
            number += 20
        cold.close()
        assert got[:count] == list(range(count))
        assert time.monotonic() - began > 3, "the store was not slow"
        assert sorted(waits)[len(waits) // 2] < 0.5, f"the tail waited: {waits}"


def test_the_rate_of_copying_holds_within_a_segment(place: Any, tmp_path: Path) -> None:
    rate = 20_000
    limit = {"remote_log_manager_copy_max_bytes_per_second": rate}
    with tiered_broker(place, tmp_path / "log", **limit) as tiers:
        tiers.create(segment_bytes=65536)
        began = time.monotonic()
        tiers.produce(0, 700)
        tiers.settle()
        spent = time.monotonic() - began
        assert tiers.figure("remote_copy_bytes") / spent < 1.5 * rate
