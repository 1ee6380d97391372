"""Kafka's own integration tests of tiered storage as a check list: which of ours proves what each
of them proves (`OURS`), and those of ours that were missing.

One has no counterpart. ``TransactionsWithTieredStoreTest`` runs Kafka's tests of transactions on a
tiered topic: the broker has no transactions and refuses producers that ask for them, so a consumer
that reads committed records only reads all of them.
"""

from __future__ import annotations

import importlib
import time
from pathlib import Path

import confluent_kafka
import pytest
from confluent_kafka.admin import NewPartitions, OffsetSpec

from kdirect.log import checkpoint
from kdirect.model import TopicPartition
from tests.broker.conftest import Raw
from tests.broker.test_moves import alter as alter_directory
from tests.object_servers import Place
from tests.storage.test_tier_deletion import alter
from tests.storage.tiered_broker import TOPIC, TP, TieredBroker, tiered_broker

RECORDS = 700  # three segments, two of which are cold
OURS = {
    "OffloadAndConsumeFromLeader": ("storage.test_tiers:test_everything_is_read_wherever_it_lies",),
    "OffloadAndTxnConsumeFromLeader": (
        "storage.test_tier_proofs:test_epochs_of_cold_records_are_told",
    ),
    "RollAndOffloadActiveSegment": (
        "storage.test_tier_limits:test_a_roll_wakes_the_copier",
        "log.test_tiering:test_the_active_segment_is_sealed_when_it_is_past_local_retention",
    ),
    "ListOffsets": ("storage.test_tiers:test_times_are_found_in_both_tiers",),
    "FetchFromLeaderWithCorruptedCheckpoint": (
        "storage.test_kafkas_tests:test_checkpoints_are_damaged",
        "log.test_tiering:test_a_lost_checkpoint_does_not_move_the_log_start_forward",
    ),
    "DeleteSegmentsByRetentionSize": ("storage.test_tiers:test_retention_counts_both_tiers",),
    "DeleteSegmentsByRetentionTime": (
        "storage.test_kafkas_tests:test_segments_are_deleted_by_their_age",
    ),
    "DeleteSegmentsDueToLogStartOffsetBreach": (
        "storage.test_tiers:test_records_are_deleted_in_the_cold_part",
    ),
    "DeleteTopic": (
        "storage.test_tiers:test_a_topic_that_is_deleted_leaves_nothing",
        "storage.test_tier_deletion:test_a_topic_goes_although_its_broker_dies",
        "members.test_tiered_cluster:test_a_deleted_topic_takes_its_objects_along",
    ),
    "EnableRemoteLogOnTopic": ("storage.test_kafkas_tests:test_a_topic_becomes_tiered_later",),
    "DisableRemoteLogOnTopic": (
        "storage.test_tier_deletion:test_a_topic_that_is_no_longer_tiered_keeps_what_is_here",
        "storage.test_tier_deletion:test_copies_that_are_switched_off_stay_readable",
        "members.test_tiered_members:test_a_topic_that_is_tiered_no_longer_leaves_nothing",
    ),
    "PartitionsExpand": ("storage.test_kafkas_tests:test_a_topic_gets_more_partitions",),
    "ReassignReplicaExpand": (
        "members.test_tiered_cluster:test_a_replica_that_was_wiped_takes_the_tail_only",
        "members.test_tiered_replicas:test_a_follower_that_was_away_starts_where_its_leader_begins",
    ),
    "ReassignReplicaMove": ("members.test_tiered_cluster:test_a_new_leader_goes_on",),
    "AlterLogDir": ("storage.test_kafkas_tests:test_a_partition_moves_between_log_directories",),
    "TransactionsWithTieredStore": (),
}


@pytest.mark.parametrize("name", OURS)
def test_the_tests_that_are_named_are_there(name: str) -> None:
    for ours in OURS[name]:
        module, _, test = ours.partition(":")
        assert callable(getattr(importlib.import_module(f"tests.{module}"), test)), ours
    if not OURS[name]:
        assert f"``{name}Test``" in (__doc__ or ""), "why not?"


def everything(start: int, end: int) -> list[tuple[int, int]]:
    return [(i, i) for i in range(start, end)]


def test_segments_are_deleted_by_their_age(place: Place, tmp_path: Path) -> None:
    """Those that are cold go from the store, the others stay in it."""
    with tiered_broker(place, tmp_path / "log") as tiers:
        tiers.create()
        hour = 3_600_000
        tiers.produce(0, RECORDS, at_ms=int(time.time() * 1000) - 2 * hour)
        tiers.partition.roll()
        tiers.produce(RECORDS, RECORDS)
        tiers.settle()
        before = len(tiers.objects())
        alter(tiers, retention_ms=hour)
        tiers.wait(lambda: tiers.partition.log_start_offset == RECORDS, "old records stay")
        tiers.wait(lambda: len(tiers.objects()) < before, "their objects stay")
        tiers.settle()
        assert len(tiers.objects()) == tiers.figure("remote_metadata_count") > 0
        assert tiers.offset_for(OffsetSpec.earliest()) == RECORDS
        assert tiers.consume(RECORDS, RECORDS) == everything(RECORDS, 2 * RECORDS)


def test_a_topic_becomes_tiered_later(place: Place, tmp_path: Path) -> None:
    with tiered_broker(place, tmp_path / "log") as tiers:
        tiers.create(remote_storage_enable="false", local_retention_bytes="-2")
        tiers.produce(0, RECORDS)
        time.sleep(0.5)
        assert not tiers.objects() and len(tiers.partition.segments) > 2
        alter(tiers, remote_storage_enable="true", local_retention_bytes="1")
        tiers.settle()
        assert tiers.partition.local_log_start_offset > 0 == tiers.partition.log_start_offset
        assert tiers.consume(0, RECORDS) == everything(0, RECORDS)
    with tiered_broker(place, tmp_path / "log") as tiers:
        assert tiers.consume(0, RECORDS) == everything(0, RECORDS)


def test_a_partition_moves_between_log_directories(place: Place, tmp_path: Path) -> None:
    """What is cold stays cold, the log starts where it did, and copying goes on."""
    directories = [tmp_path / "a", tmp_path / "b"]
    both = ",".join(map(str, directories))
    with tiered_broker(place, directories[0], log_dirs=both) as tiers:
        tiers.create()
        tiers.produce(0, RECORDS)
        tiers.settle()
        for round_ in (1, 2):
            produced = RECORDS * round_
            (to,) = [d for d in directories if d != tiers.partition.directory.parent]
            raw = Raw(tiers.address, timeout_s=30)
            assert alter_directory(raw, to, TP) == 0
            tiers.produce(produced, RECORDS)
            tiers.wait(lambda to=to: tiers.partition.directory.parent == to, "it does not move")
            raw.close()
            tiers.settle()
            assert tiers.partition.local_log_start_offset > 0 == tiers.partition.log_start_offset
            assert tiers.consume(0, produced + RECORDS) == everything(0, produced + RECORDS)
    with tiered_broker(place, directories[0], log_dirs=both) as tiers:
        assert tiers.partition.log_start_offset == 0
        assert tiers.consume(0, 3 * RECORDS) == everything(0, 3 * RECORDS)


def test_a_topic_gets_more_partitions(place: Place, tmp_path: Path) -> None:
    """What a new one has is copied, read, and known after a restart."""

    def read(tiers: TieredBroker) -> list[int]:
        consumer = confluent_kafka.Consumer(
            {"bootstrap.servers": tiers.address, "group.id": "g", "log_level": 0}
        )
        consumer.assign([confluent_kafka.TopicPartition(TOPIC, 2, 0)])
        got: list[int] = []
        end = time.monotonic() + 30
        while len(got) < RECORDS and time.monotonic() < end:
            got += [int(m.value()[:8]) for m in consumer.consume(500, 0.2) if not m.error()]
        consumer.close()
        return got

    new = TopicPartition(TOPIC, 2)
    with tiered_broker(place, tmp_path / "log") as tiers:
        tiers.create()
        tiers.produce(0, RECORDS)
        tiers.settle()
        before = set(tiers.objects())
        tiers.admin.create_partitions([NewPartitions(TOPIC, 3)])[TOPIC].result(20)
        producer = confluent_kafka.Producer({"bootstrap.servers": tiers.address, "log_level": 0})
        for i in range(RECORDS):
            producer.produce(TOPIC, b"%08d" % i + bytes(92), partition=2)
            if i % 20 == 0:
                producer.flush()
        producer.flush()
        logs = tiers.broker.server.logs.partitions
        tiers.wait(lambda: logs[new].local_log_start_offset > 0, "nothing of it is copied")
        assert {key.split("/")[2] for key in set(tiers.objects()) - before} == {"2"}
        assert tiers.consume(0, RECORDS) == everything(0, RECORDS)
    with tiered_broker(place, tmp_path / "log") as tiers:
        assert tiers.broker.server.logs.partitions[new].log_start_offset == 0
        assert read(tiers) == list(range(RECORDS))


@pytest.mark.parametrize("how", ["damaged", "empty", "gone"])
def test_checkpoints_are_damaged(place: Place, tmp_path: Path, how: str) -> None:
    """Nothing is lost of what is cold, and nothing is deleted for want of a log start."""
    log = tmp_path / "log"
    with tiered_broker(place, log) as tiers:
        tiers.create()
        tiers.produce(0, RECORDS)
        tiers.settle()
        objects = tiers.objects()
    names = (checkpoint.LOG_STARTS, checkpoint.RECOVERY_POINTS, checkpoint.HIGH_WATERMARKS)
    for name in (*names, checkpoint.CLEAN_SHUTDOWN):
        path = log / name
        if how == "gone" or name == checkpoint.CLEAN_SHUTDOWN:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(b"" if how == "empty" else b"\xff" * 50)
    with tiered_broker(place, log) as tiers:
        assert tiers.partition.log_start_offset == 0
        assert tiers.consume(0, RECORDS) == everything(0, RECORDS)
        tiers.produce(RECORDS, RECORDS)
        tiers.settle()
        assert set(objects) <= set(tiers.objects())
        assert tiers.consume(0, 2 * RECORDS) == everything(0, 2 * RECORDS)
