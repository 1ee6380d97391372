"""What is deleted, where, and what a crash or a store that refuses changes about it."""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

import kdirect
from kdirect.cli_remote import _partitions
from kdirect.format.remote_metadata import RemoteSegment, RemoteSegmentUpdate, SegmentState
from kdirect.format.segment_object import CustomMetadata, TailPlace, pack_custom_metadata
from kdirect.model import TopicPartition
from tests.object_servers import gate_to
from tests.storage.remote_kills import Process
from tests.storage.tiered_broker import TIERED, TOPIC, TieredBroker, tiered_broker

RECORDS = 2000
METADATA = TopicPartition("__remote_log_metadata", 0)


def alter(tiers: TieredBroker, **configs: Any) -> None:
    entries = [
        ConfigEntry(n.replace("_", "."), str(v), incremental_operation=AlterConfigOpType.SET)
        for n, v in configs.items()
    ]
    resource = ConfigResource(ConfigResource.Type.TOPIC, TOPIC, incremental_configs=entries)
    tiers.admin.incremental_alter_configs([resource])[resource].result(20)


def test_a_deletion_that_fails_is_repeated(object_stores: Any, tmp_path: Path) -> None:
    with (
        gate_to(object_stores["s3"].fresh()) as (gate, place),
        tiered_broker(place, tmp_path / "log") as tiers,
    ):
        tiers.create()
        tiers.produce(0, RECORDS)
        tiers.settle()

        def refuse(request: Any) -> Any:
            return (503, "SlowDown") if request.method == "DELETE" else None

        gate.fault = refuse
        alter(tiers, retention_bytes=1)
        tiers.wait(lambda: tiers.figure("remote_delete_errors") > 0)
        start = tiers.partition.log_start_offset
        assert start > 0, "the log start moves first"
        assert tiers.figure("remote_delete_lag_segments") > 0
        gate.fault = lambda request: None
        tiers.wait(lambda: not tiers.objects(), "deletions are not repeated")
        tiers.wait(lambda: tiers.figure("remote_metadata_count") == 0)


def test_local_segments_go_while_they_are_read(place: Any, tmp_path: Path) -> None:
    """A consumer that begins at 0 gets every record once, wherever it is by then."""
    with tiered_broker(place, tmp_path / "log") as tiers:
        tiers.create(local_retention_bytes=-2)
        tiers.produce(0, RECORDS)
        tiers.wait(lambda: not tiers.figure("remote_copy_lag_segments"))
        assert len(tiers.partition.segments) > 5
        consumer = confluent_kafka.Consumer(
            {"bootstrap.servers": tiers.address, "group.id": "g", "queued.min.messages": 1,
             "fetch.queue.backoff.ms": 1, "fetch.message.max.bytes": 4096, "log_level": 0}
        )  # fmt: skip
        consumer.assign([confluent_kafka.TopicPartition(TOPIC, 0, 0)])
        got: list[int] = []
        end = time.monotonic() + 30
        while len(got) < RECORDS and time.monotonic() < end:
            got += [m.offset() for m in consumer.consume(1, 1.0) if not m.error()]
            if len(got) == 300:
                alter(tiers, local_retention_bytes=1)
        consumer.close()
        assert got == list(range(RECORDS))
        assert tiers.partition.local_log_start_offset > 0


def test_a_topic_that_is_no_longer_tiered_keeps_what_is_here(place: Any, tmp_path: Path) -> None:
    with tiered_broker(place, tmp_path / "log") as tiers:
        tiers.create()
        tiers.produce(0, RECORDS)
        tiers.settle()
        local = tiers.partition.local_log_start_offset
        alter(tiers, remote_storage_enable="false", remote_log_delete_on_disable="true",
              local_retention_bytes="-2")  # fmt: skip
        tiers.wait(lambda: not tiers.objects(), "objects stay")
        tiers.wait(lambda: tiers.partition.log_start_offset == local)
        assert tiers.consume(local, RECORDS - local) == [(i, i) for i in range(local, RECORDS)]
    with tiered_broker(place, tmp_path / "log") as tiers:
        assert tiers.partition.log_start_offset == local


def test_copies_that_are_switched_off_stay_readable(place: Any, tmp_path: Path) -> None:
    with tiered_broker(place, tmp_path / "log") as tiers:
        tiers.create()
        tiers.produce(0, RECORDS)
        tiers.settle()
        alter(tiers, remote_log_copy_disable="true", local_retention_bytes="-2")
        objects = tiers.objects()
        tiers.produce(RECORDS, RECORDS)
        time.sleep(0.5)
        assert tiers.objects() == objects
        assert tiers.consume(0, 2 * RECORDS) == [(i, i) for i in range(2 * RECORDS)]


STEPS = (
    "before DELETE_PARTITION_MARKED",
    "after DELETE_PARTITION_MARKED",
    "before the DELETE:3",
    "after the DELETE:3",
    "before DELETE_SEGMENT_FINISHED:2",
    "before DELETE_PARTITION_FINISHED",
    "after DELETE_PARTITION_FINISHED",
)


@pytest.mark.parametrize("step", STEPS)
def test_a_topic_goes_although_its_broker_dies(step: str, tmp_path: Path) -> None:
    """Objects of a deleted topic go, also when the broker died in the middle of deleting it."""
    broker = Process(tmp_path, step)
    admin = AdminClient({"bootstrap.servers": broker.address, "log_level": 0})
    topic = confluent_kafka.admin.NewTopic(TOPIC, 2, 1, config=TIERED)
    admin.create_topics([topic])[TOPIC].result(20)
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": broker.address, "batch.num.messages": 20, "log_level": 0}
    )
    for i in range(RECORDS):
        producer.produce(TOPIC, b"%08d" % i + b"x" * 92, partition=i % 2)
        if i % 40 == 0:
            producer.flush()
    producer.flush()
    store = tmp_path / "store"

    def objects() -> int:
        return len(list(store.rglob("*.kseg")))

    wait(lambda: objects() >= 6)
    deletion = admin.delete_topics([TOPIC])[TOPIC]
    wait(lambda: not broker.is_alive)
    deletion.cancel()
    broker.end()
    broker = Process(tmp_path, "")
    try:
        wait(lambda: objects() == 0)
        with kdirect.connect({"bootstrap.servers": broker.address, "transport": "tcp"}) as session:
            if TOPIC in session.admin.list_topics():  # it died before the topic was marked
                session.admin.delete_topic(TOPIC)
            wait(lambda: not any(not m.is_gone for m in _partitions(session).values()))
    finally:
        broker.end(signal.SIGTERM)
    assert objects() == 0


def wait(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


def test_the_metadata_topic_does_not_grow_with_age(place: Any, tmp_path: Path) -> None:
    """Thousands of segments come and go; what is kept is what there is."""
    topic_id = uuid.UUID(int=99)
    custom = pack_custom_metadata(CustomMetadata(0, TailPlace(100, 10)))
    first = RemoteSegment(
        topic="gone", topic_id=topic_id, partition=0, segment_id=uuid.UUID(int=1), base_offset=0,
        end_offset=10, broker_id=1, max_timestamp_ms=5, event_timestamp_ms=5,
        leader_epochs=((0, 0),), size=100, custom=custom, state=SegmentState.COPY_SEGMENT_STARTED,
    )  # fmt: skip

    def life(number: int) -> list[Any]:
        segment_id = uuid.UUID(int=number + 1)
        begun = dataclasses.replace(
            first, segment_id=segment_id, base_offset=10 * number, end_offset=10 * number + 10
        )
        updates = [
            RemoteSegmentUpdate(
                topic="gone", topic_id=topic_id, partition=0, segment_id=segment_id, broker_id=1,
                event_timestamp_ms=5, custom=custom, state=state,
            )
            for state in list(SegmentState)[1:]
        ]  # fmt: skip
        return [begun, *updates]

    with tiered_broker(place, tmp_path / "log") as tiers:
        tiers.create()
        tiers.produce(0, RECORDS)
        tiers.settle()
        metadata = tiers.broker.server.remote.metadata
        written = threading.Semaphore(0)
        count = 0
        for number in range(4000):
            for record in life(number):
                metadata.write(record, lambda done: written.release())
                count += 1
        for _ in range(count):
            assert written.acquire(timeout=60)
        partition = tiers.broker.server.logs.partitions[METADATA]
        kept = tiers.figure("remote_metadata_count")
        tiers.wait(
            lambda: partition.log_end_offset - partition.log_start_offset < 12_000,
            "it is not rewritten",
        )
        assert partition.log_end_offset > count
        assert tiers.figure("remote_metadata_count") == kept
    with tiered_broker(place, tmp_path / "log") as tiers:
        assert tiers.figure("remote_metadata_count") == kept
        assert tiers.consume(0, RECORDS) == [(i, i) for i in range(RECORDS)]
