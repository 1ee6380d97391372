"""Deleted segments and topics of a running broker wait on disk for file.delete.delay.ms."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

import kdirect
from kdirect.format import protocol as p
from kdirect.format.schema import build
from kdirect.model import TopicPartition
from tests.broker.conftest import Raw
from tests.support import wait_until

LONG_MS = "3600000"  # longer than any test
QUICK_MS = "50"
SMALL = {"segment.bytes": "4096"}
GONE = re.compile(r"(.*)-0\.[0-9a-f]{32}-delete")


def connect(servers: str) -> Any:
    return kdirect.connect({"bootstrap.servers": servers, "transport": "tcp"})


def produce(servers: str, topic: str, count: int, *, keys: int = 0) -> None:
    """`count` records of 1000 bytes in as many batches, on `keys` keys."""
    settings = {"bootstrap.servers": servers, "transport": "tcp", "batch.bytes": 1100}
    with kdirect.Producer(settings) as producer:
        for i in range(count):
            key = b"%d" % (i % keys) if keys else None
            producer.produce(topic, b"x" * 1000, key=key, partition=0)
            producer.flush()


def logs(directory: Path, suffix: str) -> list[int]:
    """The base offsets of the log files with this suffix."""
    return sorted(int(name[:20]) for name in os.listdir(directory) if name.endswith(suffix))


def gone(log_dir: Path) -> list[str]:
    return [match[1] for match in map(GONE.fullmatch, os.listdir(log_dir)) if match]


def inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def described_sizes(servers: str) -> dict[str, int]:
    """The size of each topic, as DescribeLogDirs tells it."""
    raw = Raw(servers)
    (row,) = raw.call(build(p.DescribeLogDirsRequest, topics=None), 1).results
    raw.close()
    return {topic.name: sum(x.partition_size for x in topic.partitions) for topic in row.topics}


def test_deleted_segments_wait_and_go(broker_process) -> None:
    """By DeleteRecords and by retention, with a delay that is long, short, or none."""
    server = broker_process(log_retention_check_interval_ms=50)
    servers = server.bootstrap_servers
    delays = {"long": LONG_MS, "quick": QUICK_MS, "none": "0"}
    with connect(servers) as session:
        for topic, delay in delays.items():
            session.admin.create_topic(topic, 1, configs={**SMALL, "file.delete.delay.ms": delay})
            produce(servers, topic, 12)
            before = logs(server.log_dir / f"{topic}-0", ".log")
            assert len(before) > 3
            session.admin.delete_records({TopicPartition(topic, 0): before[2]})
            here = server.log_dir / f"{topic}-0"
            assert logs(here, ".log") == before[2:]
            if topic == "long":
                assert logs(here, ".log.deleted") == before[:2]
                names = os.listdir(here)
                assert f"{before[0]:020d}.index.deleted" in names
                assert f"{before[0]:020d}.timeindex.deleted" in names
            if topic == "none":
                assert logs(here, ".deleted") == []
            session.admin.alter_configs(topic, {"retention.bytes": "0"})
            wait_until(lambda here=here: len(logs(here, ".log")) == 1, "retention")
        long = server.log_dir / "long-0"
        waiting = logs(long, ".log.deleted")
        assert len(waiting) == len(before), "the last of them, too, which was the active one"
        assert not logs(server.log_dir / "none-0", ".deleted")
        wait_until(lambda: not logs(server.log_dir / "quick-0", ".deleted"), "the removal")
        kept = sum(os.stat(long / f"{b:020d}.log").st_size for b in logs(long, ".log"))
        assert described_sizes(servers)["long"] <= kept, "what waits is not counted"
        server.kill()
        assert logs(long, ".log.deleted") == waiting
        server.start()
        assert logs(long, ".deleted") == [], "the next start removes what waited"
    server.stop()


def test_segments_that_compaction_replaced_wait(broker_process) -> None:
    server = broker_process(log_cleaner_backoff_ms=50, log_segment_delete_delay_ms=LONG_MS)
    servers = server.bootstrap_servers
    configs = {**SMALL, "cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01"}
    with connect(servers) as session:
        session.admin.create_topic("t", 1, configs=configs)
        produce(servers, "t", 20, keys=2)
        here = server.log_dir / "t-0"
        new, old = here / f"{0:020d}.log", here / f"{0:020d}.log.deleted"
        # The first segment has both names until the new one takes one of them.
        wait_until(lambda: inode(old) not in (None, inode(new)), "the compaction")
    assert server.stop() == 0
    assert old.exists(), "a stop leaves it"
    server.properties["log.cleaner.enable"] = False  # or the next compaction leaves some
    server.start()
    assert logs(here, ".deleted") == []


def test_a_deleted_topic_waits_while_one_of_its_name_is_made(broker_process) -> None:
    server = broker_process(log_segment_delete_delay_ms=LONG_MS)
    servers = server.bootstrap_servers
    long_name = "x" * 249
    with connect(servers) as session:
        for topic in ("t", long_name):
            session.admin.create_topic(topic, 1)
        produce(servers, "t", 3)
        for topic in ("t", long_name):
            session.admin.delete_topic(topic)
        assert sorted(gone(server.log_dir)) == ["t", "x" * (255 - 2 - 33 - 7)]
        session.admin.create_topic("t", 1)
        produce(servers, "t", 1)
        tp = TopicPartition("t", 0)
        assert session.latest_offsets([tp])[tp] == 1, "it has nothing of the old one"
        (old,) = [n for n in os.listdir(server.log_dir) if n.startswith("t-0.")]
        old_log = server.log_dir / old / f"{0:020d}.log"
        assert old_log.stat().st_size > (server.log_dir / "t-0" / old_log.name).stat().st_size / 2
        server.kill()
        assert old_log.exists()
        server.start()
        assert gone(server.log_dir) == [], "the next start removes it"
        assert session.latest_offsets([tp])[tp] == 1
    server.stop()


@pytest.mark.parametrize("delay", [QUICK_MS, "0"])
def test_a_deleted_topic_is_removed(broker_process, delay) -> None:
    server = broker_process(log_segment_delete_delay_ms=delay)
    with connect(server.bootstrap_servers) as session:
        session.admin.create_topic("t", 3)
        produce(server.bootstrap_servers, "t", 1)
        session.admin.delete_topic("t")
        if delay == "0":
            assert not list(server.log_dir.glob("t-*"))
        wait_until(lambda: not list(server.log_dir.glob("t-*")), "the removal")
    assert server.stop() == 0


def test_the_delay_of_the_broker_is_changed_while_it_runs(broker_process) -> None:
    """As in Kafka: a topic without one of its own takes it from then on."""
    server = broker_process(log_segment_delete_delay_ms=LONG_MS)
    with connect(server.bootstrap_servers) as session:
        admin = session.admin
        found = admin.describe_configs(broker=1)["log.segment.delete.delay.ms"]
        assert found.value == LONG_MS
        admin.create_topic("t", 1)
        assert admin.describe_configs("t")["file.delete.delay.ms"].value == LONG_MS
        admin.alter_configs(None, {"log.segment.delete.delay.ms": "0"}, broker=1)
        assert admin.describe_configs("t")["file.delete.delay.ms"].value == "0"
        admin.delete_topic("t")
        assert not list(server.log_dir.glob("t-*"))
