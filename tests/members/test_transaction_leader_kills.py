"""A leader is killed in the middle of a transaction whose batches are written over RDMA: the
transaction commits or aborts as a whole, no reader of committed records ever sees a part of one
that did not commit, and the producer goes on with the next.

KDIRECT_ROUNDS=n runs n rounds, KDIRECT_SEED=s begins with that seed (`make txn-leader-kills`).
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

import kdirect
from kdirect import KdirectError, TopicPartition

ROUNDS = int(os.environ.get("KDIRECT_ROUNDS") or 2)
FIRST = int(os.environ.get("KDIRECT_SEED") or 0)
PARTITIONS = 3
OUT = [TopicPartition("out", i) for i in range(PARTITIONS)]
PROPERTIES = {
    "zookeeper.session.timeout.ms": 3000,
    "replica.lag.time.max.ms": 3000,
    "transaction.state.log.num.partitions": 2,
    "offsets.topic.num.partitions": 2,
}
WAYS: tuple[dict[str, object], ...] = (
    {},
    {"rdma.produce": "exclusive"},
    {"linger.ms": 5},
    {"rdma.produce": "exclusive", "linger.ms": 5},
)
BEFORE, AFTER, RECORDS = 3, 3, 12  # transactions before and after the kill, records of each


class Reader(threading.Thread):
    """Everything that one reader of committed records is ever given, by partition."""

    def __init__(self, servers: str, transport: str) -> None:
        super().__init__(daemon=True)
        self.servers, self.transport = servers, transport
        self.seen: list[tuple[int, int, bytes]] = []  # (partition, offset, value)
        self.error: BaseException | None = None
        self.ends = threading.Event()

    def run(self) -> None:
        settings = {
            "bootstrap.servers": self.servers,
            "isolation.level": "read_committed",
            "transport": self.transport,
        }
        try:
            with kdirect.Consumer(settings) as consumer:
                consumer.assign(dict.fromkeys(OUT, 0))
                while not self.ends.is_set():
                    for m in consumer.consume(100, 0.2):
                        self.seen.append((m.partition(), m.offset(), m.value()))
        except BaseException as e:
            self.error = e


def stock(servers: str, count: int) -> list[bytes]:
    """What a reader of librdkafka sees from the start, once there are so many."""
    reader = confluent_kafka.Consumer({
        "bootstrap.servers": servers, "group.id": "none", "enable.auto.commit": False,
        "isolation.level": "read_committed",
    })  # fmt: skip
    try:
        reader.assign([confluent_kafka.TopicPartition("out", i, 0) for i in range(PARTITIONS)])
        found: list[bytes] = []
        deadline = time.monotonic() + 40
        while len(found) < count and time.monotonic() < deadline:
            found += [m.value() for m in reader.consume(100, 0.3) if m.error() is None]
        found += [m.value() for m in reader.consume(100, 1) if m.error() is None]
        return sorted(found)
    finally:
        reader.close()


def patiently(call: Callable[[], object]) -> None:
    """A call that ran out of time goes on with what it began."""
    deadline = time.monotonic() + 90
    while True:
        try:
            call()
            return
        except KdirectError as e:
            if not e.retriable or time.monotonic() >= deadline:
                raise


def transaction(
    producer: kdirect.Producer, number: int, kill: Callable[[], None], at: int
) -> list[bytes]:
    """One transaction, and `kill` after `at` of its records; its values, or [] if it aborted."""
    values = [b"%d %d" % (number, i) for i in range(RECORDS)]
    producer.begin_transaction()
    try:
        for i, value in enumerate(values):
            if i == at:
                producer.flush(20)
                kill()
            producer.produce("out", value, partition=i % PARTITIONS)
        if at == RECORDS:  # while it is committed
            thread = threading.Thread(target=kill)
            thread.start()
            try:
                patiently(lambda: producer.commit_transaction(20))
            finally:
                thread.join()
        else:
            patiently(lambda: producer.commit_transaction(20))
    except KdirectError as e:
        if not e.txn_requires_abort:
            raise
        patiently(lambda: producer.abort_transaction(20))
        return []
    return values


@pytest.mark.parametrize("seed", range(FIRST, FIRST + ROUNDS))
def test_no_part_of_a_transaction_is_seen(seed: int) -> None:
    chance = random.Random(seed)
    way = WAYS[(seed + 1) % len(WAYS)]
    at = chance.choice([1, RECORDS // 2, RECORDS - 1, RECORDS])
    with kdirect.Cluster(brokers=3, properties=PROPERTIES) as cluster:
        servers = cluster.bootstrap_servers
        admin = AdminClient({"bootstrap.servers": servers})
        topic = NewTopic("out", PARTITIONS, 3, config={"min.insync.replicas": "2"})
        admin.create_topics([topic])["out"].result(20)
        readers = [Reader(servers, "shm"), Reader(servers, "tcp")]
        settings = {"bootstrap.servers": servers, "transactional.id": "a", "transport": "shm"}
        with kdirect.Producer({**settings, **way}) as producer:
            patiently(lambda: producer.init_transactions(30))
            for reader in readers:
                reader.start()

            def kill() -> None:
                partitions = admin.list_topics("out", 10).topics["out"].partitions
                cluster.kill(partitions[chance.randrange(PARTITIONS)].leader)

            committed: list[bytes] = []
            for number in range(BEFORE):
                committed += transaction(producer, number, kill, -1)
            assert producer.statistics()["rdma_records"] == BEFORE * RECORDS
            committed += transaction(producer, BEFORE, kill, at)
            for number in range(BEFORE + 1, BEFORE + 1 + AFTER):
                after = transaction(producer, number, kill, -1)
                assert after or number == BEFORE + 1, "the producer does not go on"
                committed += after
        assert stock(servers, len(committed)) == sorted(committed)
        deadline = time.monotonic() + 40
        for reader in readers:
            while len(reader.seen) < len(committed) and time.monotonic() < deadline:
                time.sleep(0.1)
        time.sleep(0.5)  # for what should not come
        for reader in readers:
            reader.ends.set()
            reader.join(30)
            assert reader.error is None
            assert sorted(value for _, _, value in reader.seen) == sorted(committed)
            for partition in range(PARTITIONS):
                offsets = [offset for p, offset, _ in reader.seen if p == partition]
                assert offsets == sorted(set(offsets))
