"""Log directories copied from Kafka: compacted topics, and what its groups have committed."""

from __future__ import annotations

import struct
import time

import confluent_kafka

import kdirect
from kdirect.format import group_records
from kdirect.format.batch import encode_single_bytes, stamp
from kdirect.format.group_records import CommittedOffset
from kdirect.model import TopicPartition

NOW = int(time.time() * 1000)
DAY = 86_400_000


def segment(directory, base, offsets, record=lambda o: (b"k%d" % o, b"v%d" % o), when=NOW):
    """A sealed segment with one batch for each of `offsets`."""
    directory.mkdir(parents=True, exist_ok=True)
    data = bytearray()
    for o in offsets:
        key, value = record(o)
        batch = bytearray(encode_single_bytes(value, key, when))
        stamp(batch, o, 0)
        data += batch
    (directory / f"{base:020d}.log").write_bytes(data)
    (directory / f"{base:020d}.index").write_bytes(b"")
    (directory / f"{base:020d}.timeindex").write_bytes(struct.pack(">qi", when, offsets[-1] - base))
    (directory.parent / ".kafka_cleanshutdown").write_text('{"version":0}')


def test_consumers_go_on_behind_what_kafkas_cleaner_removed(tmp_path):
    """Over Kafka's protocol and over RDMA, from an offset that is there and from one that is
    not."""
    segments = {0: [*range(5), 20, 21], 50: range(50, 80), 100: range(100, 105)}
    for base, offsets in segments.items():
        segment(tmp_path / "t-0", base, offsets)
    left = [o for offsets in segments.values() for o in offsets]
    with kdirect.Broker(log_dirs=tmp_path) as b:
        for start in (0, 10, 30, 90):
            wanted = [o for o in left if o >= start]
            got: list[int] = []
            other = confluent_kafka.Consumer(
                {
                    "bootstrap.servers": b.bootstrap_servers,
                    "group.id": "g",
                    "enable.auto.commit": False,
                }
            )
            other.assign([confluent_kafka.TopicPartition("t", 0, start)])
            deadline = time.monotonic() + 15
            while len(got) < len(wanted) and time.monotonic() < deadline:
                got += [m.offset() for m in other.consume(len(wanted), 0.3)]
            other.close()
            assert got == wanted
            got = []
            with kdirect.Consumer({"bootstrap.servers": b.bootstrap_servers}) as consumer:
                consumer.assign([kdirect.TopicPartition("t", 0)])
                consumer.seek(kdirect.TopicPartition("t", 0), start)
                deadline = time.monotonic() + 15
                while len(got) < len(wanted) and time.monotonic() < deadline:
                    got += [m.offset() for m in consumer.consume(len(wanted), 0.3)]
                assert consumer.statistics()["reads"] > 0
            assert got == wanted


def test_what_groups_had_committed_in_kafka_outlives_the_brokers_retention(tmp_path):
    def record(o):
        return group_records.offset_key("g", "t", o), group_records.offset_value(
            CommittedOffset(100 + o, -1, "", NOW - DAY)
        )

    segment(tmp_path / "t-0", 0, range(3))
    segment(tmp_path / "t-1", 0, range(3))
    segment(tmp_path / "__consumer_offsets-0", 0, range(2), record, when=NOW - 30 * DAY)
    for _ in range(2):
        with kdirect.Broker(log_dirs=tmp_path, log_retention_bytes=1) as b:
            offsets = b.server.offsets.offsets("g")
            assert {tp: c.offset for tp, c in offsets.items()} == {
                TopicPartition("t", 0): 100,
                TopicPartition("t", 1): 101,
            }
            partition = b.server.logs.partitions[TopicPartition("__consumer_offsets", 0)]
            assert partition.config.compacts and not partition.config.deletes
            b.server.logs.apply_retention(NOW)
            assert partition.log_start_offset == 0 and len(partition.read(0, 1 << 20)) == 1
