"""A broker that is connected and does not answer, while a consumer reads from it and from another:
no poll waits for it, and its records come once it goes on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

import kdirect
from kdirect.model import TopicPartition
from tests.client.conftest import CUT
from tests.support import stop_process, wait_until

FIND_COORDINATOR = 10
A, B = TopicPartition("a", 0), TopicPartition("b", 0)
BROKER = """
import sys, kdirect
from kdirect.broker.cluster_view import ClusterLayout, Node
ports = [int(x) for x in sys.argv[2:4]]
nodes = [Node(i, "127.0.0.1", port) for i, port in enumerate(ports, 1)]
me = int(sys.argv[1])
layout = ClusterLayout({nodes[0]: {"a": 1}, nodes[1]: {"b": 1}})
properties = {"node.id": me + 1, "log.segment.bytes": 16384, "rdma.device": "nosuch0"}
with kdirect.Broker(
    sys.argv[4], f"127.0.0.1:{ports[me]}", layout=layout, properties=properties
):
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def brokers(tmp_path):
    """(bootstrap servers, the process of each broker); the first leads `a`, the second `b`."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [str(s.getsockname()[1]) for s in held]
    for s in held:
        s.close()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", BROKER, str(i), *ports, str(tmp_path / f"log{i}")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        yield [f"127.0.0.1:{port}" for port in ports], processes
    finally:
        for process in processes:
            os.kill(process.pid, signal.SIGCONT)
            process.stdin.close()
            process.wait(30)
            process.stdout.close()


def put(server, tp, first, end):
    with kdirect.Producer({"bootstrap.servers": server, "transport": "tcp"}) as producer:
        for i in range(first, end):
            producer.produce_sync(tp.topic, b"%d" % i + b"." * 1000, partition=0)


@pytest.mark.parametrize("how", ["poll", "columns"])
def test_no_poll_waits_for_a_broker_that_hangs(brokers, how):
    (first, second), (_, process) = brokers
    put(first, A, 0, 40)
    put(second, B, 0, 40)  # three files
    settings = {
        "bootstrap.servers": f"{first},{second}",
        "transport": "shm",
        "request.timeout.ms": 20_000,
        "rdma.device": "nosuch0",
    }
    got = {A: [], B: []}
    longest = 0.0

    with kdirect.Consumer(settings) as consumer:

        def poll():
            nonlocal longest
            began = time.monotonic()
            if how == "poll":
                message = consumer.poll(0.1)
                if message is not None:
                    got[TopicPartition(message.topic(), 0)].append(message.offset())
            else:
                batch = consumer.poll_arrow(0.1, max_rows=3)
                if batch is not None:
                    tp = TopicPartition(batch["topic"][0].as_py(), 0)
                    got[tp] += batch["offset"].to_pylist()
            longest = max(longest, time.monotonic() - began)

        consumer.assign({A: 0, B: 0})
        while not got[A] or not got[B]:
            poll()
        longest = 0.0
        stop_process(process.pid)  # its first file is READ to its end all the same
        until = time.monotonic() + 20
        while len(got[A]) < 40 and time.monotonic() < until:
            poll()
        for _ in range(5):
            poll()
        assert got[A] == list(range(40)) and 0 < len(got[B]) < 40
        put(first, A, 40, 50)
        while len(got[A]) < 50 and time.monotonic() < until:
            poll()
        assert got[A] == list(range(50))
        assert longest < 5, "a poll waited for the broker that hangs"
        process.send_signal(signal.SIGCONT)
        until = time.monotonic() + 20
        while len(got[B]) < 40 and time.monotonic() < until:
            poll()
        assert got[B] == list(range(40))


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda session: session.list_topics(), id="topics"),
        pytest.param(lambda session: session.new_producer_id(), id="producer id"),
    ],
)
def test_another_broker_is_asked_where_one_hangs(brokers, ask):
    """What any broker can answer takes seconds, not request.timeout.ms."""
    servers, (first, second) = brokers
    settings = {"bootstrap.servers": ",".join(servers), "request.timeout.ms": 20_000}
    with kdirect.connect({**settings, "transport": "tcp"}) as session:
        assert len(session.list_topics()) == 2
        port = session.cluster.control_connection().port
        asked = first if servers[0].endswith(f":{port}") else second
        stop_process(asked.pid)
        began = time.monotonic()
        ask(session)
        assert time.monotonic() - began < 10
        assert session.cluster.control_connection().port != port


def test_auto_commit_does_not_wait_for_a_coordinator(broker, new_topic, proxy):
    """A poll hands records out while nobody says who coordinates the group, and what was handed out
    is committed once somebody does."""
    tp = TopicPartition(new_topic(1), 0)
    put(broker.bootstrap_servers, tp, 0, 30)
    looked_for = False

    def lost(api_key, version, correlation_id, body):
        nonlocal looked_for
        looked_for |= api_key == FIND_COORDINATOR
        return CUT if api_key == FIND_COORDINATOR else None

    proxy.decide = lost
    settings = {
        "bootstrap.servers": proxy.bootstrap_servers,
        "transport": "tcp",
        "group.id": tp.topic,
        "auto.commit.interval.ms": 50,
        "request.timeout.ms": 3000,
    }
    with kdirect.Consumer(settings) as consumer:
        consumer.assign({tp: 0})
        longest, got, began = 0.0, 0, time.monotonic()
        while not looked_for or got < 30 or time.monotonic() - began < 2:
            before = time.monotonic()
            got += consumer.poll(0.05) is not None
            longest = max(longest, time.monotonic() - before)
            assert before - began < 30
        assert longest < 1, "a poll waited for the coordinator"
        proxy.decide = lambda *request: None
        wait_until(
            lambda: consumer.poll(0.05) is None and consumer.committed([tp]) == {tp: 30},
            "the positions were committed",
        )


def test_one_broker_is_not_watched(broker, new_topic):
    """Where there is no other, nobody can take its partitions over."""
    with kdirect.Producer({"bootstrap.servers": broker.bootstrap_servers}) as producer:
        producer.produce_sync(new_topic(1), b"x", partition=0)
        assert producer._driver._silent.next_look == 0.0
