"""The same log into Apache Kafka's own cleaner and into ours: batch by batch, record by record."""

from __future__ import annotations

import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import admin as confluent_admin

from kdirect.format import layout
from kdirect.format.batch import iterate_batches
from kdirect.format.decode import ArrowDecoder
from kdirect.log.checkpoint import read_offsets
from kdirect.log.cleaning import Cleaning, Memory, dirt_of
from kdirect.log.config import LogConfig
from kdirect.log.manager import LogManager
from kdirect.model import TopicPartition
from tests.support import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(170)]
ROOT = Path(__file__).resolve().parents[2]
TP = TopicPartition("t", 0)
MIB = 1 << 20


def produce(servers: str, rng: random.Random) -> None:
    """Keys that come again, tombstones, every codec, with and without producer ids."""
    for codec in ("none", "gzip", "snappy", "lz4", "zstd", "none"):
        for idempotent in (False, True):
            producer = confluent_kafka.Producer(
                {
                    "bootstrap.servers": servers,
                    "compression.type": codec,
                    "enable.idempotence": idempotent,
                    "batch.size": 30_000,
                    "linger.ms": 20,
                }
            )
            for _ in range(400):
                value = None if rng.random() < 0.1 else rng.randbytes(1000)
                headers = [("h", b"x")] if rng.random() < 0.3 else None
                producer.produce("t", value, b"k%d" % rng.randrange(300), headers=headers)
            assert producer.flush(30) == 0


def segments(directory: Path) -> dict[int, list[Any]]:
    """By base offset, the batches: what their headers say, and their records."""
    out: dict[int, list[Any]] = {}
    for path in sorted(directory.glob("*.log")):
        data = path.read_bytes()
        rows = out[int(path.stem)] = []
        for b in iterate_batches(data):
            one = data[b.position : b.position + b.size]
            decoder = ArrowDecoder("t", 0, include_headers=True)
            decoder.feed(one)
            has_horizon = bool(b.attributes & layout.ATTRIBUTE_DELETE_HORIZON)
            rows.append(
                (
                    (b.base_offset, b.last_offset_delta, b.attributes, b.records_count),
                    (b.producer_id, b.producer_epoch, b.base_sequence, b.leader_epoch),
                    None if has_horizon else b.base_timestamp,  # the time of the cleaning
                    b.max_timestamp,
                    decoder.take().to_pylist(),
                )
            )
    return out


def test_our_cleaner_leaves_what_kafkas_leaves(broker_jars, tmp_path, seed) -> None:
    sys.path.insert(0, str(ROOT / "bench"))
    from versus.systems import Kafka

    config = {"cleanup.policy": "compact", "segment.bytes": str(MIB)}
    kafka = Kafka(str(tmp_path), {"log.cleaner.backoff.ms": "100", "log.cleaner.threads": "1"})
    try:
        kafka.create("t", 1, {**config, "min.cleanable.dirty.ratio": "1"})
        produce(kafka.address, random.Random(seed))
        theirs, ours = tmp_path / "kafka/t-0", tmp_path / "ours/t-0"
        ours.mkdir(parents=True)
        for path in theirs.glob("*.log"):
            shutil.copy(path, ours)
        where = confluent_admin.ConfigResource(
            confluent_admin.RESOURCE_TOPIC, "t", {**config, "min.cleanable.dirty.ratio": "0.01"}
        )
        kafka.admin.alter_configs([where])[where].result(10)
        active = max(int(path.stem) for path in theirs.glob("*.log"))
        checkpoint = tmp_path / "kafka/cleaner-offset-checkpoint"
        wait_until(lambda: read_offsets(checkpoint).get(TP) == active, 60)
        found = segments(theirs)
    finally:
        kafka.stop()
    settings = LogConfig(segment_bytes=MIB, compacts=True, deletes=False)
    with LogManager([tmp_path / "ours"], settings) as manager:
        partition = manager.partitions[TP]
        now_ms = int(time.time() * 1000)
        before = partition.size
        done = Cleaning(
            partition, dirt_of(partition, None, now_ms), Memory(8 * MIB, 0.9, MIB), now_ms
        ).run()
        assert done.end_offset == active and partition.size < before / 2
    mine = segments(ours)
    assert mine.keys() == found.keys(), "the same segments are joined"
    for base, batches in found.items():
        assert [row[0] for row in mine[base]] == [row[0] for row in batches], base
        assert mine[base] == batches, base
