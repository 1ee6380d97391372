"""A broker whose topic is in the object store only, but for its head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kdirect
from kdirect.format.remote_metadata import RemoteSegment
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition
from kdirect.storage.upload import key_of
from tests.object_servers import Place
from tests.support import wait_until

TOPIC = "cold"
TP = TopicPartition(TOPIC, 0)
SEGMENT_BYTES = 16384
RECORDS = 1200


def value_of(i: int, size: int = 90) -> bytes:
    return f"{i:08d}".encode() * (size // 8)


class ColdLog:
    """The broker, and what is known of its topic."""

    def __init__(self, broker: Any, place: Place, size: int) -> None:
        self.broker = broker
        self.place = place
        self.size = size
        self.records = 0

    @property
    def servers(self) -> str:
        return str(self.broker.bootstrap_servers)

    @property
    def partition(self) -> Partition:
        return self.broker.server.logs.partitions[TP]  # type: ignore[no-any-return]

    @property
    def segments(self) -> list[RemoteSegment]:
        """Those that are to be read, in their order."""
        logs = self.broker.server.remote.logs
        start = self.partition.log_start_offset
        return [x.segment for x in logs.pieces(self.partition.topic_id, 0, start)]

    def key(self, segment: RemoteSegment) -> str:
        return key_of(segment, self.broker.server.logs.cluster_id)

    def settings(self, **more: Any) -> dict[str, Any]:
        """Of a client with the credentials of the store."""
        own = {f"remote.config.{n}": v for n, v in self.place.config.items()}
        given = {name.replace("_", "."): value for name, value in more.items()}
        return {
            "bootstrap.servers": self.servers,
            "remote.storage.uri": self.place.uri,
            **own,
            "auto.offset.reset": "earliest",
            **given,
        }

    def produce(self, count: int, batch: int = 20) -> None:
        """Records in batches of `batch`."""
        with kdirect.Producer(
            {"bootstrap.servers": self.servers, "transport": "tcp", "linger.ms": 50}
        ) as producer:
            for _ in range(count):
                producer.produce(TOPIC, value_of(self.records, self.size), partition=0)
                self.records += 1
                if self.records % batch == 0:
                    producer.flush()

    def settle(self) -> None:
        """Return when only the head is left at the broker."""
        partition = self.partition
        wait_until(
            lambda: partition.segments and len(partition.segments) == 1,
            lambda: f"{len(partition.segments)} segments are left",
        )

    def copied(self) -> None:
        """Return when all but the head is in the store, too."""
        partition = self.partition
        remote = self.broker.server.remote
        wait_until(
            lambda: remote.end_offset(partition) == partition.segments[-1].base_offset,
            "the copy of the last sealed segment",
        )

    def gets_of_the_broker(self) -> int:
        """Ranged GETs that it has made for somebody's Fetch."""
        return int(self.broker.server.remote.reader.statistics()["remote_get_requests"])


def properties(directory: Path, place: Place, access: str) -> dict[str, Any]:
    return {
        "log.dirs": str(directory / "log"),
        "remote.log.storage.system.enable": "true",
        "remote.log.storage.uri": place.uri,
        "remote.log.manager.task.interval.ms": "100",
        "remote.log.client.access": access,
        "log.retention.check.interval.ms": "50",
        **{f"rsm.config.{name}": value for name, value in place.config.items()},
    }


@contextmanager
def cold_log(
    directory: Path,
    place: Place,
    access: str = "config",
    *,
    records: int = RECORDS,
    size: int = 90,
    batch: int = 20,
    segment_bytes: int = SEGMENT_BYTES,
    more: Mapping[str, Any] | None = None,
    local_retention: str = "1",
    settle: bool = True,
) -> Iterator[ColdLog]:
    """`records` records, of which all but those of the head are in the store only; with another
    `local_retention` and without `settle` they are in both."""
    with kdirect.Broker(properties=properties(directory, place, access) | dict(more or {})) as b:
        log = ColdLog(b, place, size)
        with kdirect.connect(b.bootstrap_servers) as session:
            session.admin.create_topic(
                TOPIC,
                1,
                configs={
                    "remote.storage.enable": "true",
                    "segment.bytes": str(segment_bytes),
                    "local.retention.bytes": local_retention,
                },
            )
        log.produce(records, batch)
        if settle:
            log.settle()
        else:
            log.copied()
        yield log
