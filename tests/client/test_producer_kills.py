"""Consume, transform, produce by our own clients, while the broker and the client are killed: no
reader of committed records, of whichever kind, ever sees a part of a transaction.

KDIRECT_ROUNDS=n runs n rounds, KDIRECT_SEED=s begins with that seed (`make producer-kills`).
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
import uuid
from pathlib import Path

import confluent_kafka
import pytest

import kdirect
from kdirect import TopicPartition
from tests.client.whole import seen_whole

ROUNDS = int(os.environ.get("KDIRECT_ROUNDS") or 5)
FIRST = int(os.environ.get("KDIRECT_SEED") or 0)
COUNT = 200
WORKER = Path(__file__).with_name("producer_worker.py")
OUT = [TopicPartition("out", p) for p in range(2)]
WAYS = (
    {"transport": "shm"},
    {"transport": "tcp"},
    {"transport": "shm", "linger.ms": "5"},
    {"transport": "shm", "rdma.notify": "send"},
    {"transport": "shm", "rdma.produce": "exclusive"},
    {"transport": "shm", "rdma.produce": "exclusive", "linger.ms": "5"},
    {"transport": "shm", "produce.path": "send"},
)


def stock_reader(servers):
    """What librdkafka reads."""
    reader = confluent_kafka.Consumer({
        "bootstrap.servers": servers, "group.id": uuid.uuid4().hex,
        "isolation.level": "read_committed", "enable.partition.eof": True,
        "enable.auto.commit": False, "reconnect.backoff.max.ms": 200,
    })  # fmt: skip
    try:
        reader.assign([confluent_kafka.TopicPartition("out", p, 0) for p in range(2)])
        found, ended, deadline = ([], []), set(), time.monotonic() + 20
        while len(ended) < 2:
            assert time.monotonic() < deadline, "a reader has not come to the ends"
            message = reader.poll(0.2)
            if message is None:
                continue
            if message.error() is None:
                found[message.partition()].append(message.value())
            elif message.error().code() == confluent_kafka.KafkaError._PARTITION_EOF:
                ended.add(message.partition())
        return found
    finally:
        reader.close()


def own_reader(servers, **settings):
    """What our consumer reads."""
    settings = {"isolation.level": "read_committed", **settings}
    with kdirect.Consumer({"bootstrap.servers": servers, **settings}) as reader:
        found, deadline = ([], []), time.monotonic() + 20
        with kdirect.connect({"bootstrap.servers": servers, **settings}) as session:
            ends = session.latest_offsets(OUT)
        reader.assign(dict.fromkeys(OUT, 0))
        while any(reader.position(tp) < ends[tp] for tp in OUT):
            assert time.monotonic() < deadline, "a reader has not come to the ends"
            message = reader.poll(0.2)
            if message is not None and message.offset() < ends[OUT[message.partition()]]:
                found[message.partition()].append(message.value())
        return found


READERS = {
    "librdkafka": stock_reader,
    "one-sided": lambda servers: own_reader(servers, transport="shm"),
    "tcp": lambda servers: own_reader(servers, transport="tcp"),
}


def check_whole(servers):
    """No reader sees a part of a transaction; how far the last one has come."""
    for read in READERS.values():
        count = seen_whole(lambda read=read: read(servers))
    return count


@pytest.mark.parametrize("seed", range(FIRST, FIRST + ROUNDS))
def test_no_part_of_a_transaction_is_seen(seed, broker_process):
    chance = random.Random(seed)
    arguments = [str(chance.choice([1, 7, 40]))]
    arguments += [f"{k}={v}" for k, v in chance.choice(WAYS).items()]
    broker = broker_process(transaction_state_log_num_partitions="2")
    servers = broker.bootstrap_servers
    with kdirect.connect(servers) as session:
        session.admin.create_topic("in", 1)
        session.admin.create_topic("out", 2)
        with session.producer() as producer:
            for i in range(COUNT):
                producer.produce("in", str(i), partition=0)

    def start():
        return subprocess.Popen([sys.executable, str(WORKER), servers, *arguments])

    worker = start()
    try:
        for _ in range(2):
            time.sleep(chance.uniform(0.2, 1.5))
            if chance.random() < 0.5:
                worker.kill()
                worker.wait()
                worker = start()
            else:
                broker.kill()
                broker.start()
            check_whole(servers)
        deadline = time.monotonic() + 60
        while check_whole(servers) < COUNT:
            assert time.monotonic() < deadline, "the numbers have stopped"
            if worker.poll() is not None:  # fenced, or its transaction was aborted by time
                worker = start()
            time.sleep(0.3)
        with kdirect.Consumer({"bootstrap.servers": servers, "group.id": "g"}) as reader:
            committed = reader.committed([TopicPartition("in", 0)])
        assert committed == {TopicPartition("in", 0): COUNT}
    finally:
        worker.kill()
        worker.wait()
