"""Readers of committed records over shm, while processes of other producers commit and abort: by
READs alone, each record of a committed transaction is seen once, and nothing else."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time

import kdirect
from kdirect import TopicPartition

WRITERS, TRANSACTIONS = 3, 25
WRITER = """
import json, sys
import kdirect

servers, number = sys.argv[1:3]
settings = {"bootstrap.servers": servers, "transactional.id": f"writer-{number}", "linger.ms": 0}
with kdirect.Producer(settings) as producer:
    producer.init_transactions(30)
    for commits, records in json.loads(sys.argv[3]):
        producer.begin_transaction()
        for partition, value in records:
            producer.produce("t", value, partition=partition)
        producer.commit_transaction() if commits else producer.abort_transaction()
"""


def plan(number: int) -> list[tuple[bool, list[tuple[int, str]]]]:
    """The transactions of one writer: does it commit, and its records with their partitions."""
    chance, out = random.Random(number), []
    for i in range(TRANSACTIONS):
        commits = chance.random() < 0.5
        outcome = "committed" if commits else "aborted"
        records = [
            (chance.randrange(2), f"{number} {i} {k} {outcome}")
            for k in range(chance.randint(1, 6))
        ]
        out.append((commits, records))
    return out


def committed(partition: int) -> list[str]:
    return [
        value
        for number in range(WRITERS)
        for commits, records in plan(number)
        for to, value in records
        if commits and to == partition
    ]


def follow(broker, running) -> dict[int, list[str]]:
    """What a consumer sees of both partitions while the writers run, and after."""
    seen: dict[int, list[str]] = {0: [], 1: []}
    wanted = sum(len(committed(p)) for p in range(2))
    settings = {
        "bootstrap.servers": broker.bootstrap_servers,
        "isolation.level": "read_committed",
        "transport": "shm",
    }
    with kdirect.Consumer(settings) as reader:
        reader.assign({TopicPartition("t", p): 0 for p in range(2)})
        until = time.monotonic() + 60
        while time.monotonic() < until:
            ended = not any(writer.poll() is None for writer in running)
            message = reader.poll(0.2)
            if message is not None:
                seen[message.partition()].append(message.value().decode())
            elif ended and sum(map(len, seen.values())) >= wanted:
                break
        figures = reader.statistics()
    assert figures["reads"] > 0 and figures["aborted_batches"] > 0
    assert figures.get("fetched_bytes", 0) == 0, "records came by Fetch"
    return seen


def test_while_processes_commit_and_abort(broker_process):
    broker = broker_process(log_segment_bytes=16384)
    with kdirect.connect(broker.bootstrap_servers) as session:
        session.admin.create_topic("t", 2)
    running = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                WRITER,
                broker.bootstrap_servers,
                str(number),
                json.dumps(plan(number)),
            ],
            stderr=subprocess.PIPE,
        )
        for number in range(WRITERS)
    ]
    try:
        seen = follow(broker, running)
        for writer in running:
            assert writer.wait(30) == 0, writer.stderr.read().decode()
    finally:
        for writer in running:
            writer.kill()
            writer.stderr.close()
            writer.wait()
    for partition in range(2):
        assert sorted(seen[partition]) == sorted(committed(partition))
    for number in range(WRITERS):  # what one writer wrote is in its order
        for partition in range(2):
            mine = [v for v in seen[partition] if v.startswith(f"{number} ")]
            assert mine == [v for v in committed(partition) if v.startswith(f"{number} ")]


def test_after_a_restart_of_the_broker_the_lists_are_those_from_before(broker_process):
    """Also what an open transaction has written is not seen, before and after."""
    settings = {"isolation.level": "read_committed", "transport": "shm"}

    def read(broker, count):
        with kdirect.Consumer({"bootstrap.servers": broker.bootstrap_servers, **settings}) as c:
            c.assign({TopicPartition("t", 0): 0})
            values = [message.value() for message in c.consume(count + 1, 1.5)]
            figures = c.statistics()
        assert figures["aborted_batches"] > 0 and figures.get("fetched_bytes", 0) == 0
        return values

    broker = broker_process(log_segment_bytes=4096)
    with kdirect.connect(broker.bootstrap_servers) as session:
        session.admin.create_topic("t", 1)
    made = [
        kdirect.Producer({"bootstrap.servers": broker.bootstrap_servers, "transactional.id": name})
        for name in ("ends", "stays open")
    ]
    expected = []
    for one in made:
        one.init_transactions(30)
    for i in range(12):
        value = b"%d" % i + b"." * 400
        made[0].begin_transaction()
        made[0].produce("t", value, partition=0)
        if i % 3:
            made[0].abort_transaction()
        else:
            made[0].commit_transaction()
            expected.append(value)
    made[1].begin_transaction()
    made[1].produce_sync("t", b"open", partition=0)
    made[0].begin_transaction()
    made[0].produce("t", b"committed after it", partition=0)
    made[0].commit_transaction()
    assert read(broker, len(expected)) == expected
    broker.kill()
    for one in made:
        one.close(0)
    broker.start()
    assert read(broker, len(expected)) == expected
