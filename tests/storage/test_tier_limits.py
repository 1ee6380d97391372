"""What bounds copying and reading at a real broker: who waits, for whom, and for how long."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import confluent_kafka

from tests.object_servers import gate_to
from tests.storage.tiered_broker import TOPIC, TieredBroker, tiered_broker

RECORDS = 2000


def test_a_roll_wakes_the_copier(place: Any, tmp_path: Path) -> None:
    more = {"remote_log_manager_task_interval_ms": 3_600_000}
    with tiered_broker(place, tmp_path / "log", **more) as tiers:
        tiers.create()
        tiers.produce(0, 100)
        assert not tiers.objects()
        began = time.monotonic()
        tiers.partition.roll()
        tiers.wait(tiers.objects)
        assert time.monotonic() - began < 1.0


def test_what_waits_for_replies_is_not_copied(place: Any, tmp_path: Path) -> None:
    """Only what lies below the last stable offset."""
    with tiered_broker(place, tmp_path / "log") as tiers:
        tiers.create()
        tiers.produce(0, 100)
        partition = tiers.partition
        stable = partition.last_stable_offset
        assert stable == partition.log_end_offset == 100
        assert partition.sealed_segments() == [], "the active segment is never copied"
        partition.roll()
        (sealed,) = partition.sealed_segments()
        assert sealed.end_offset <= stable


def partitions_of(tiers: TieredBroker, count: int) -> None:
    """As many partitions, each with cold records."""
    tiers.create(partitions=count)
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": tiers.address, "batch.num.messages": 20, "linger.ms": 1}
    )
    for i in range(400 * count):
        producer.produce(TOPIC, b"%08d" % i + b"x" * 92, partition=i % count)
        if i % (20 * count) == 0:
            producer.flush()
    producer.flush()
    logs = tiers.broker.server.logs.partitions
    tiers.wait(
        lambda: all(logs[p].local_log_start_offset > 0 for p in logs if p.topic == TOPIC),
        "nothing is cold",
    )


def cold_consumer(tiers: TieredBroker, count: int) -> Any:
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": tiers.address, "group.id": "g", "log_level": 0}
    )
    consumer.assign([confluent_kafka.TopicPartition(TOPIC, i, 0) for i in range(count)])
    return consumer


def test_partitions_of_one_fetch_are_read_at_once(object_stores: Any, tmp_path: Path) -> None:
    count = 6
    with (
        gate_to(object_stores["s3"].fresh()) as (gate, place),
        tiered_broker(place, tmp_path / "log", remote_fetch_max_wait_ms=20_000) as tiers,
    ):
        partitions_of(tiers, count)
        under_way: list[int] = []
        most = 0
        lock = threading.Lock()

        def slow(request: Any) -> None:
            nonlocal most
            if request.method in ("GET", "HEAD"):
                with lock:
                    under_way.append(1)
                    most = max(most, len(under_way))
                time.sleep(0.5)
                with lock:
                    under_way.pop()

        gate.fault = slow
        consumer = cold_consumer(tiers, count)
        seen: set[int] = set()
        end = time.monotonic() + 30
        while len(seen) < count and time.monotonic() < end:
            seen |= {m.partition() for m in consumer.consume(100, 0.1) if not m.error()}
        consumer.close()
        assert len(seen) == count
        assert most >= count, f"no more than {most} requests were under way"


def test_a_full_queue_answers_without_records(object_stores: Any, tmp_path: Path) -> None:
    """And the records come in the end."""
    count = 6
    limits = {
        "remote_log_reader_threads": 1,
        "remote_log_reader_max_pending_tasks": 1,
        "remote_fetch_max_wait_ms": 100,
    }
    with (
        gate_to(object_stores["s3"].fresh()) as (gate, place),
        tiered_broker(place, tmp_path / "log", **limits) as tiers,
    ):
        partitions_of(tiers, count)

        def slow(request: Any) -> None:
            if request.method in ("GET", "HEAD"):
                time.sleep(0.2)

        gate.fault = slow
        consumer = cold_consumer(tiers, count)
        got = [0] * count
        end = time.monotonic() + 40
        while min(got) < 100 and time.monotonic() < end:
            for message in consumer.consume(500, 0.1):
                assert message.error() is None, message.error()
                assert message.offset() == got[message.partition()]
                got[message.partition()] += 1
        consumer.close()
        assert min(got) >= 100, got
        assert tiers.figure("remote_fetch_refused") > 0, "the queue was never full"


def test_the_rate_of_reading_holds(place: Any, tmp_path: Path) -> None:
    rate = 50_000
    more = {"remote_log_manager_fetch_max_bytes_per_second": rate}
    with tiered_broker(place, tmp_path / "log", **more) as tiers:
        tiers.create()
        tiers.produce(0, RECORDS)
        tiers.settle()
        began = time.monotonic()
        assert tiers.consume(0, RECORDS) == [(i, i) for i in range(RECORDS)]
        spent = time.monotonic() - began
        assert tiers.figure("remote_get_bytes") / spent < 1.5 * rate
