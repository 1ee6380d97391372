"""What a batch of attempts has written becomes visible in all partitions of a broker at one moment,
also where room for the markers has to be made first."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

import kdirect
from kdirect.client.attempts import COMMITTED
from tests.support import wait_until

PARTITIONS = 8
ROUNDS = 3


def stable_offsets(admin: AdminClient, topic: str) -> list[int]:
    """The last stable offset of each partition, of one moment: it is one request."""
    wanted = {TopicPartition(topic, p): OffsetSpec.latest() for p in range(PARTITIONS)}
    found = admin.list_offsets(
        wanted, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=10
    )
    return [found[TopicPartition(topic, p)].result(10).offset for p in range(PARTITIONS)]


class Looks:
    """Looks all the time, on a thread of its own."""

    def __init__(self, address: str, topic: str) -> None:
        self._address, self._topic = address, topic
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.seen: list[list[int]] = []

    def _run(self) -> None:
        admin = AdminClient({"bootstrap.servers": self._address, "log_level": 0})
        while not self._ends.is_set():
            with contextlib.suppress(KafkaException):
                self.seen.append(stable_offsets(admin, self._topic))

    def __enter__(self) -> Looks:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ends.set()
        self._thread.join(30)


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_a_commit_after_a_restart_is_whole(broker_process: Any, transport: str) -> None:
    """A broker that was killed has heads without room."""
    broker = broker_process()
    settings = {"bootstrap.servers": broker.bootstrap_servers, "transport": transport}
    with kdirect.connect(settings) as session:
        session.admin.create_topic("t", PARTITIONS)
    rows = {
        "value": pa.array([b"v"] * PARTITIONS),
        "partition": pa.array(range(PARTITIONS), pa.int32()),
    }
    for batch in range(ROUNDS):
        with kdirect.connect(settings) as session:
            attempt = session.join_attempt("i", "q", "r", batch)
            with session.attempt_producer(attempt) as producer:
                producer.send_arrow(pa.table(rows), "t")
                producer.flush()
        broker.kill()
        broker.start()
        with kdirect.connect(settings) as session, Looks(broker.bootstrap_servers, "t") as looks:
            wait_until(lambda looks=looks: looks.seen)
            assert session.commit_attempts("i", "q", "r", batch, [attempt]) == COMMITTED
        parts = [offsets for offsets in looks.seen if len(set(offsets)) != 1]
        assert not parts, f"seen in part: {parts}"
