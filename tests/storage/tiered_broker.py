"""A broker with tiered storage for tests, in this process, and what stock clients see of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import confluent_kafka
from confluent_kafka.admin import AdminClient, NewTopic

import kdirect
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition
from tests.object_servers import Place

TOPIC = "t"
TP = TopicPartition(TOPIC, 0)
SEGMENT_BYTES = 32768
TIERED = {
    "remote.storage.enable": "true",
    "segment.bytes": str(SEGMENT_BYTES),
    "local.retention.bytes": "1",
    "retention.ms": "-1",
}
WAIT_S = 60.0


def properties(place: Place, log_dir: Path, **more: Any) -> dict[str, Any]:
    return {
        "log.dirs": str(log_dir),
        "remote.log.storage.system.enable": "true",
        "remote.log.storage.uri": place.uri,
        **{f"rsm.config.{name}": value for name, value in place.config.items()},
        "remote.log.manager.task.interval.ms": "200",
        "log.retention.check.interval.ms": "50",
        **{name.replace("_", "."): str(value) for name, value in more.items()},
    }


def object_keys(place: Place) -> list[str]:
    """Without the markers of who owns them."""
    return sorted(info.key for info in place.store().list() if "/owners/" not in info.key)


class TieredBroker:
    """`place`: where its objects go."""

    def __init__(self, broker: Any, place: Place, log_dir: Path) -> None:
        self.broker = broker
        self.place = place
        self.log_dir = log_dir
        self.address: str = broker.bootstrap_servers
        self.admin = AdminClient({"bootstrap.servers": self.address, "log_level": 0})

    def create(self, name: str = TOPIC, partitions: int = 1, **configs: Any) -> None:
        own = {n.replace("_", "."): str(v) for n, v in configs.items()}
        topic = NewTopic(name, partitions, 1, config={**TIERED, **own})
        self.admin.create_topics([topic])[name].result(20)

    def produce(self, start: int, count: int, *, size: int = 100, at_ms: int | None = None) -> None:
        """Records whose values begin with their number, in batches of twenty; their timestamps are
        `at_ms` and each 1 ms later."""
        producer = confluent_kafka.Producer(
            {"bootstrap.servers": self.address, "batch.num.messages": 20, "linger.ms": 1,
             "log_level": 0}
        )  # fmt: skip
        failed: list[Any] = []
        for i in range(start, start + count):
            more = {} if at_ms is None else {"timestamp": at_ms + i}
            producer.produce(
                TOPIC,
                b"%08d" % i + b"x" * (size - 8),
                partition=0,
                callback=lambda error, _: failed.append(error) if error else None,
                **more,
            )
            if i % 20 == 19:
                producer.flush()
        assert producer.flush(20) == 0 and not failed

    @property
    def partition(self) -> Partition:
        found: Partition = self.broker.server.logs.partitions[TP]
        return found

    def figure(self, name: str) -> int:
        return int(self.broker.statistics()[name])

    def wait(
        self,
        condition: Callable[[], object],
        what: str = "it did not come",
        wait_s: float = WAIT_S,
    ) -> None:
        end = time.monotonic() + wait_s
        while not condition():
            assert time.monotonic() < end, what
            time.sleep(0.02)

    def settle(self) -> None:
        """Everything sealed is copied, what may go here is gone, and nothing is to be deleted."""

        def settled() -> bool:
            return (
                len(self.partition.segments) == 1
                and not self.figure("remote_copy_lag_segments")
                and not self.figure("remote_delete_lag_segments")
            )

        self.wait(settled, "it does not settle")

    def objects(self) -> list[str]:
        return object_keys(self.place)

    def consume(self, start: int, count: int, **settings: Any) -> list[tuple[int, int]]:
        """(offset, number) of the records that a stock consumer gets."""
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": self.address,
                "group.id": "g",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "log_level": 0,
                **settings,
            }
        )
        consumer.assign([confluent_kafka.TopicPartition(TOPIC, 0, start)])
        got: list[tuple[int, int]] = []
        end = time.monotonic() + WAIT_S
        try:
            while len(got) < count and time.monotonic() < end:
                for message in consumer.consume(min(500, count - len(got)), 0.5):
                    if message.error():
                        raise AssertionError(str(message.error()))
                    got.append((message.offset(), int(message.value()[:8])))
        finally:
            consumer.close()
        return got

    def offset_for(self, spec: Any) -> int:
        """ListOffsets by a stock client."""
        where = confluent_kafka.TopicPartition(TOPIC, 0)
        return int(self.admin.list_offsets({where: spec})[where].result(20).offset)


@contextmanager
def tiered_broker(place: Place, log_dir: Path, **more: Any) -> Iterator[TieredBroker]:
    with kdirect.Broker(properties=properties(place, log_dir, **more)) as broker:
        yield TieredBroker(broker, place, log_dir)


__all__ = [
    "SEGMENT_BYTES",
    "TIERED",
    "TOPIC",
    "TP",
    "TieredBroker",
    "object_keys",
    "properties",
    "tiered_broker",
]
