"""A cluster of broker processes with tiered storage in a directory, and what is in all of it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import confluent_kafka

import kdirect
from kdirect.cli_remote import _partitions
from kdirect.errors import KdirectError
from kdirect.format.remote_metadata import SegmentState
from kdirect.format.segment_object import parse_key
from kdirect.model import TopicPartition

TOPIC = "t"
TP = TopicPartition(TOPIC, 0)
METADATA = "__remote_log_metadata"
SEGMENT_BYTES = 16384
TIERED = {
    "remote.storage.enable": "true",
    "segment.bytes": str(SEGMENT_BYTES),
    "local.retention.bytes": "1",
    "retention.ms": "-1",
}
SETTLE_S = 60.0


def properties(store: Path, **more: Any) -> dict[str, Any]:
    """Of each broker."""
    return {
        "remote_log_storage_system_enable": True,
        "remote_log_storage_uri": store.as_uri(),
        "remote_log_manager_task_interval_ms": 200,
        "log_retention_check_interval_ms": 100,
        "rdma_transports": "",
        **more,
    }


class Tiers:
    """`cluster`: a `kdirect.Cluster` that runs; `store`: the directory of its objects."""

    def __init__(self, cluster: kdirect.Cluster, store: Path) -> None:
        self.cluster = cluster
        self.store = store
        self.topic = TOPIC
        self.acknowledged: dict[int, bytes] = {}  # offset -> value
        self.session = self.connect()

    def connect(self) -> Any:
        return kdirect.connect(
            {"bootstrap.servers": self.cluster.bootstrap_servers, "transport": "tcp"}
        )

    def close(self) -> None:
        self.session.close()

    @property
    def tp(self) -> TopicPartition:
        return TopicPartition(self.topic, 0)

    def create(self, replication: int = 3, **configs: Any) -> None:
        own = {name.replace("_", "."): str(value) for name, value in configs.items()}
        self.session.admin.create_topic(
            self.topic, 1, replication_factor=replication, configs={**TIERED, **own}
        )

    def leader(self, topic: str = "", partition: int = 0) -> int:
        found = self.session.cluster.topic(topic or self.topic, refresh=True).partition(partition)
        return int(found.leader)

    def in_sync(self) -> list[int]:
        found = self.session.cluster.topic(self.topic, refresh=True).partition(0)
        return sorted(found.in_sync_replicas)

    def wait(self, holds: Any, what: str, within_s: float = SETTLE_S) -> None:
        end = time.monotonic() + within_s
        why: BaseException | None = None
        while True:
            try:
                if holds():
                    return
            except KdirectError as e:  # a leader is being elected, say
                why = e
            assert time.monotonic() < end, f"{what}: {why or ''}"
            time.sleep(0.1)

    # -- producing ---------------------------------------------------------------------------------

    def produce(self, count: int, stop: threading.Event | None = None, **settings: Any) -> None:
        """Send records with acks=all; those that are acknowledged are noted."""
        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": self.cluster.bootstrap_servers,
                "acks": "all",
                "batch.num.messages": 20,
                "linger.ms": 2,
                "enable.idempotence": True,
                "message.timeout.ms": 60000,
                "log_level": 0,
                **settings,
            }
        )

        def delivered(error: Any, message: Any) -> None:
            if error is None:
                self.acknowledged[message.offset()] = message.value()

        for i in range(count):
            if stop is not None and stop.is_set():
                break
            producer.produce(self.topic, b"%08d" % i + os.urandom(92), callback=delivered)
            producer.poll(0.001 if i % 20 == 0 else 0)
        assert producer.flush(90) == 0

    # -- what is there -----------------------------------------------------------------------------

    def metadata(self) -> dict[Any, Any]:
        """(topic id, partition) -> its metadata."""
        return _partitions(self.session)

    def segments(self) -> dict[Any, Any]:
        """Segment id -> the remote segment."""
        return {i: s for found in self.metadata().values() for i, s in found.segments.items()}

    def objects(self) -> dict[Any, Path]:
        """Segment id -> object."""
        found = {}
        for path in self.store.rglob("*.kseg"):
            parsed = parse_key("", str(path.relative_to(self.store)))
            if parsed is not None:
                found[parsed[0].segment_id] = path
        return found

    def local_bases(self, broker: int) -> list[int]:
        """Where the segments begin that a broker has."""
        (directory,) = self.cluster.log_dirs(broker)
        return sorted(int(path.stem) for path in (directory / f"{self.topic}-0").glob("*.log"))

    def settle(self, *, local: bool = True) -> None:
        """Wait until all that is sealed is copied, all that goes is gone, and what is in the store
        is what the metadata says."""

        def settled() -> bool:
            segments = self.segments()
            finished = {
                i for i, s in segments.items() if s.state is SegmentState.COPY_SEGMENT_FINISHED
            }
            if not finished or finished != set(segments) or finished != set(self.objects()):
                return False
            end = max(
                (s.end_offset for s in segments.values() if s.topic == self.topic), default=-1
            )
            return not local or all(
                self.local_bases(broker) == [end] for broker in self.cluster.running
            )

        try:
            self.wait(settled, "it does not settle")
        except AssertionError as e:
            states = [(s.base_offset, s.end_offset, s.state.name) for s in self.segments().values()]
            bases = {b: self.local_bases(b) for b in self.cluster.running}
            keys = sorted(path.name for path in self.objects().values())
            raise AssertionError(f"{e}: {sorted(states)}, objects {keys}, local {bases}") from None

    def read(self, start: int | None = None) -> dict[int, bytes]:
        """All records from `start` on, each once; value by offset."""
        tp = self.tp
        end = self.session.latest_offsets([tp])[tp]
        if start is None:
            start = self.session.earliest_offsets([tp])[tp]
        got: list[tuple[int, bytes]] = []
        for batch in self.session.reader(tp, start, end):
            offsets, values = batch.column("offset"), batch.column("value")
            got += zip(offsets.to_pylist(), values.to_pylist(), strict=True)
        offsets = [offset for offset, _ in got]
        assert offsets == list(range(start, end)), (
            f"{start} to {end}: {offsets[:3]}..{offsets[-3:]}"
        )
        return dict(got)

    def check(self) -> None:
        """Every acknowledged record is there once, at its offset."""
        found = self.read()
        start = min(found)
        for offset, value in self.acknowledged.items():
            if offset >= start:
                assert found[offset] == value, f"offset {offset} has another record"


__all__ = ["METADATA", "SEGMENT_BYTES", "TIERED", "TOPIC", "TP", "Tiers", "properties"]
