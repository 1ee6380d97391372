"""Consume, transform, produce, while the broker and the client are killed: each number is there
once, in both partitions, for every reader with `read_committed`, at any time.

KDIRECT_ROUNDS=n runs n rounds, KDIRECT_SEED=s begins with that seed (`make txn-kills`).
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import confluent_kafka as ck
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from tests.client.whole import seen_whole
from tests.support import BrokerProcess

ROUNDS = int(os.environ.get("KDIRECT_ROUNDS") or 5)
FIRST = int(os.environ.get("KDIRECT_SEED") or 0)
COUNT = 300
WORKER = Path(__file__).with_name("txn_worker.py")
OPTIONS = {
    "transaction.state.log.num.partitions": "2",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
    "num.partitions": "2",
}


def visible(servers: str, wait_s: float = 20) -> list[list[bytes]]:
    """What is in both partitions, up to their last stable offsets."""
    consumer = ck.Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "reader",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
            "reconnect.backoff.max.ms": 200,
        }
    )
    try:
        consumer.assign([ck.TopicPartition("out", i, 0) for i in range(2)])
        found: list[list[bytes]] = [[], []]
        ended: set[int] = set()
        deadline = time.monotonic() + wait_s
        while len(ended) < 2 and time.monotonic() < deadline:
            message = consumer.poll(0.2)
            if message is None:
                continue
            if message.error() is None:
                found[message.partition()].append(message.value())
            elif message.error().code() == ck.KafkaError._PARTITION_EOF:
                ended.add(message.partition())
        assert len(ended) == 2, "a reader has not come to the ends"
        return found
    finally:
        consumer.close()


def committed(servers: str) -> int:
    """What the group has committed."""
    consumer = ck.Consumer({"bootstrap.servers": servers, "group.id": "g"})
    try:
        (found,) = consumer.committed([ck.TopicPartition("in", 0)], 20)
        return int(found.offset)
    finally:
        consumer.close()


def start_worker(servers: str, batch: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, str(WORKER), servers, str(batch)],
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("seed", range(FIRST, FIRST + ROUNDS))
def test_each_number_is_there_once(seed: int, broker_process: Callable[..., BrokerProcess]) -> None:
    chance = random.Random(seed)
    batch = chance.choice([1, 7, 40])
    broker = broker_process(**_words(OPTIONS))
    servers = broker.bootstrap_servers
    admin = AdminClient({"bootstrap.servers": servers})
    for future in admin.create_topics([NewTopic("in", 1), NewTopic("out", 2)]).values():
        future.result(10)
    plain = ck.Producer({"bootstrap.servers": servers})
    for i in range(COUNT):
        plain.produce("in", b"%d" % i, partition=0)
    plain.flush(10)
    worker: Any = start_worker(servers, batch)
    try:
        for _ in range(2):
            time.sleep(chance.uniform(0.2, 1.5))
            if chance.random() < 0.5:
                worker.kill()
                worker.wait()
                worker = start_worker(servers, batch)
            else:
                broker.kill()
                broker.start()
            seen_whole(lambda: visible(servers))
        deadline = time.monotonic() + 90
        while (count := seen_whole(lambda: visible(servers))) < COUNT:
            assert time.monotonic() < deadline, f"the numbers have stopped at {count}"
            if worker.poll() is not None:  # fenced, or its transaction was aborted by time
                worker = start_worker(servers, batch)
            time.sleep(0.3)
        assert committed(servers) == COUNT
    finally:
        worker.kill()
        worker.wait()


def _words(options: dict[str, str]) -> dict[str, str]:
    return {name.replace(".", "_"): value for name, value in options.items()}
