"""Finding brokers and leaders: bootstrap, metadata and its cache, connections shared, leased and
found again."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from kdirect.client.admin import LATEST_OFFSET, Admin
from kdirect.client.tcp_append import TcpAppender
from kdirect.client.tcp_fetch import TcpFetcher
from kdirect.errors import (
    BrokerError,
    BrokerUnavailableError,
    ClosedError,
    ConfigError,
    ProtocolError,
    UnknownTopicError,
)
from kdirect.format import protocol
from kdirect.model import TopicPartition
from kdirect.wire.backoff import Backoff
from kdirect.wire.cluster import Cluster
from kdirect.wire.metadata import PartitionMetadata, TopicMetadata
from kdirect.wire.servers import parse_servers
from tests.support import stop_process

METADATA = 3


def unused_port() -> socket.socket:
    """A socket that holds a port on which nobody listens."""
    s = socket.socket()
    s.bind(("127.0.0.1", 0))
    return s


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        ("localhost:9092", ("localhost", 9092)),
        (" 10.0.0.1:1 ", ("10.0.0.1", 1)),
        ("[::1]:9092", ("::1", 9092)),
        ("PLAINTEXT://a-b.c_d:65535", ("a-b.c_d", 65535)),
        ("plaintext://[fe80::1%eth0]:9", ("fe80::1%eth0", 9)),
    ],
)
def test_servers_are_parsed(server, expected):
    assert parse_servers([server]) == [expected]


@pytest.mark.parametrize(
    "server",
    [
        "localhost",
        "localhost:",
        ":9092",
        "localhost:0",
        "localhost:65536",
        "host:port",
        "a b:1",
        "http://h:1/x",
        "",
    ],
)
def test_wrong_servers_are_named(server):
    with pytest.raises(ConfigError, match=r"bootstrap\.servers") as caught:
        Cluster({"bootstrap.servers": [server]})
    assert repr(server) in caught.value.message and "localhost:9092" in caught.value.hint


def test_only_plaintext():
    with pytest.raises(ConfigError, match="asks for SASL_SSL"):
        Cluster({"bootstrap.servers": "SASL_SSL://h:1"})


def test_missing_and_unknown_settings():
    with pytest.raises(ConfigError, match=r"bootstrap\.servers is missing"):
        Cluster({})
    with pytest.raises(ConfigError, match=r"did you mean bootstrap\.servers"):
        Cluster({"bootstrap.server": "h:1"})
    with pytest.raises(ConfigError, match=r"bootstrap\.servers is empty"):
        Cluster({"bootstrap.servers": ","})


def test_backoff_grows_and_ends():
    b = Backoff(10_000, 1, 4)
    started = time.monotonic()
    assert all(b.wait() for _ in range(5))
    assert time.monotonic() - started >= 0.8 * (1 + 2 + 4 + 4 + 4) / 1000
    assert not Backoff(1, 50, 50).wait()


def test_nobody_answers():
    with unused_port() as a, unused_port() as b:
        first, second = a.getsockname()[1], b.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(
            BrokerUnavailableError, match=rf"127\.0\.0\.1:{first} \(connection refused\)"
        ) as caught:
            Cluster({"bootstrap.servers": f"127.0.0.1:{first}", "connect.timeout.ms": 300}).topics()
        assert "kdirect broker --listeners" in caught.value.hint
        with pytest.raises(
            BrokerUnavailableError, match=rf"none of the bootstrap servers.*{first}.*{second}"
        ):
            Cluster(
                {
                    "bootstrap.servers": f"127.0.0.1:{first},127.0.0.1:{second}",
                    "connect.timeout.ms": 100,
                }
            ).topics()
        assert time.monotonic() - started < 5


def test_what_is_no_broker_is_told_at_once():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            s = listener.accept()[0]
            s.recv(1000)
            s.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        started = time.monotonic()
        with pytest.raises(ProtocolError, match="speaks HTTP"):
            Cluster({"bootstrap.servers": f"127.0.0.1:{listener.getsockname()[1]}"}).topics()
        assert time.monotonic() - started < 4  # without the five seconds of connect.timeout.ms
        thread.join()


def test_the_first_server_that_answers(broker):
    with unused_port() as s:
        servers = f"127.0.0.1:{s.getsockname()[1]},{broker.bootstrap_servers}"
        with Cluster({"bootstrap.servers": servers}) as c:
            assert c.control_connection().peer == broker.bootstrap_servers


def test_a_silent_server_leaves_time_to_those_after_it(broker):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, and never answers
        servers = f"127.0.0.1:{silent.getsockname()[1]},{broker.bootstrap_servers}"
        with Cluster({"bootstrap.servers": servers, "connect.timeout.ms": 4000}) as c:
            begun = time.monotonic()
            assert c.control_connection().peer == broker.bootstrap_servers
            assert time.monotonic() - begun < 4


def test_a_broker_that_comes_later_is_waited_for(broker_process):
    """The client starts first."""
    with unused_port() as s:
        port = s.getsockname()[1]
    c = Cluster({"bootstrap.servers": f"127.0.0.1:{port}", "connect.timeout.ms": 20000})
    found = []
    thread = threading.Thread(target=lambda: found.append(c.topics()))
    thread.start()
    time.sleep(0.2)
    broker_process(listeners=f"127.0.0.1:{port}")
    thread.join(20)
    assert found == [{}]
    c.close()


def test_topics_and_partitions_as_another_client_made_them(cluster, broker):
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    admin.create_topics([NewTopic("made-by-another", 3)])["made-by-another"].result(10)
    assert cluster.topics()["made-by-another"] == 3
    assert cluster.partitions("made-by-another") == [0, 1, 2]
    topic = cluster.topic("made-by-another")
    assert [p.partition for p in topic.partitions] == [0, 1, 2] and not topic.internal
    assert {p.leader for p in topic.partitions} == {n.node_id for n in cluster.nodes}
    assert cluster.cluster_id


def test_internal_topics_are_hidden(cluster):
    Admin(cluster).commit_offsets("a-group", {})
    names = cluster.topics()
    assert not any(name.startswith("__") for name in names)
    assert names.keys() <= cluster.topics(internal=True).keys()


def test_unknown_topics_are_named_and_not_created(cluster):
    with pytest.raises(UnknownTopicError, match="topic 'never-made' does not exist on 127"):
        cluster.topic("never-made")
    with pytest.raises(UnknownTopicError):
        cluster.connection_for(TopicPartition("never-made", 0))
    assert "never-made" not in cluster.topics()
    with pytest.raises(ConfigError, match="topic name 'a b'"):
        cluster.topic("a b")


def test_unknown_partitions_are_named(cluster, new_topic):
    name = new_topic(2)
    with pytest.raises(UnknownTopicError, match="has no partition 2") as caught:
        cluster.connection_for(TopicPartition(name, 2))
    assert caught.value.hint == "its partitions are 0 to 1"


def test_metadata_is_asked_for_once_and_again_when_forgotten_or_old(behind, proxy, new_topic):
    name = new_topic(4)
    c = behind(metadata_max_age_ms=60_000)
    tps = [TopicPartition(name, i) for i in range(4)]
    for tp in tps * 3:
        c.leader(tp)
    assert proxy.requests.count(METADATA) == 1
    c.forget(name)
    leaders, failed = c.leaders(tps)
    assert (set(map(len, leaders.values())), failed) == ({4}, {})
    assert proxy.requests.count(METADATA) == 2
    c.partitions(name, refresh=True)
    assert proxy.requests.count(METADATA) == 3
    young = behind(metadata_max_age_ms=1)
    young.topic(name)
    time.sleep(0.01)
    young.topic(name)
    assert young.statistics()["metadata_refreshes"] == 2


def test_one_broker_is_reached_where_it_answered_at_first(behind, proxy, new_topic):
    """The broker advertises its own address, the client came through another."""
    c = behind()
    tp = TopicPartition(new_topic(), 0)
    connection = c.connection_for(tp)
    assert connection.peer == proxy.bootstrap_servers
    assert (
        connection
        is c.control_connection()
        is c.connection_for(tp)
        is c.controller_connection()
        is c.coordinator_connection("g")
    )
    assert c.connection_for(tp, "data") is not connection
    assert c.statistics()["connects"] == 2


def test_leases_are_reused_and_broken_ones_are_not(cluster, new_topic):
    tp = TopicPartition(new_topic(), 0)
    a, b = cluster.lease(tp), cluster.lease(tp)
    assert a is not b and a is not cluster.connection_for(tp)
    cluster.give_back(a)
    assert cluster.lease(tp) is a
    a.submit(protocol.MetadataRequest(topics=[], allow_auto_topic_creation=False))
    cluster.give_back(a)  # with a request under way
    assert a.closed
    cluster.give_back(b)
    b.close()
    assert cluster.lease(tp) is not b
    many = [cluster.lease(tp) for _ in range(6)]
    for connection in many:
        cluster.give_back(connection)
    assert cluster.statistics()["idle_connections"] == 4 == sum(not m.closed for m in many)


def test_threads_share_the_connections(cluster, new_topic):
    tp = TopicPartition(new_topic(), 0)
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(cluster.connection_for(tp))) for _ in range(8)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join(10)
    assert len(found) == 8 and len(set(map(id, found))) == 1


def test_a_forked_child_opens_its_own(cluster, new_topic):
    name = new_topic(2)
    mine = cluster.control_connection()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = (
                2
                if cluster.partitions(name) != [0, 1]
                else 3
                if cluster.control_connection() is mine
                else 4
                if cluster.statistics()["connects"] != 1
                else 0
            )
            cluster.close()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert cluster.control_connection() is mine and cluster.partitions(name, refresh=True) == [0, 1]


def test_a_broker_that_restarts_is_found_again(broker_process):
    b = broker_process()
    with Cluster({"bootstrap.servers": b.bootstrap_servers, "connect.timeout.ms": 20000}) as c:
        Admin(c).create_topic("kept", 2)
        before = c.connection_for(TopicPartition("kept", 0))
        b.kill()
        b.start()
        after = c.connection_for(TopicPartition("kept", 0))
        assert after is not before and before.closed
        assert c.topics() == {"kept": 2}


def test_a_request_that_lost_its_connection_is_asked_again(behind, proxy, new_topic):
    name = new_topic(1)
    c = behind()
    c.control_connection()
    proxy.once(METADATA, "cut")
    assert c.partitions(name) == [0]
    proxy.once(METADATA, "cut after", times=2)
    assert c.topics()[name] == 1
    assert c.statistics()["connects"] >= 4


def test_retries_end_with_the_last_error(behind, proxy):
    c = behind(request_timeout_ms=300)
    proxy.once(METADATA, "cut", times=1000)
    started = time.monotonic()
    with pytest.raises(BrokerUnavailableError, match="closed the connection while answering"):
        c.topics()
    assert time.monotonic() - started < 4
    proxy.once(METADATA, None)
    assert isinstance(c.topics(), dict)


def test_errors_that_do_not_pass_are_not_retried(cluster):
    calls = []

    def use(connection):
        calls.append(connection)
        raise BrokerError("x", code=42, name="INVALID_REQUEST", retriable=len(calls) < 3)

    with pytest.raises(BrokerError):
        cluster.call(cluster.control_connection, use)
    assert len(calls) == 3


def test_a_closed_cluster(broker):
    c = Cluster({"bootstrap.servers": broker.bootstrap_servers})
    connection = c.control_connection()
    c.close()
    assert connection.closed
    with pytest.raises(ClosedError, match="client is closed"):
        c.topics()


def test_a_stopped_broker_does_not_hang_the_client(broker_process):
    b = broker_process()
    with Cluster({"bootstrap.servers": b.bootstrap_servers, "request.timeout.ms": 1000}) as c:
        c.topics()
        stop_process(b.pid)
        try:
            started = time.monotonic()
            with pytest.raises(TimeoutError, match="did not answer MetadataRequest within 1000 ms"):
                c.topics()
            assert time.monotonic() - started < 5
        finally:
            os.kill(b.pid, signal.SIGCONT)
        assert c.topics() == {}


@pytest.fixture
def three_brokers():
    """The addresses of librdkafka's in-process cluster: another implementation, and one with
    several brokers."""
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": "replaced", "test.mock.num.brokers": 3, "log_level": 0}
    )
    yield [f"{b.host}:{b.port}" for b in producer.list_topics(timeout=10).brokers.values()]
    producer.flush(10)


def test_leaders_on_three_brokers(three_brokers):
    """Partitions are written, read, counted and committed where their leaders are, from one
    bootstrap server."""
    producer = confluent_kafka.Producer({"bootstrap.servers": ",".join(three_brokers)})
    # Leaders are drawn by lot: of four partitions all have the same one time in 27, of 32 never.
    tps = [TopicPartition(f"t{topic}", partition) for topic in range(8) for partition in range(4)]
    for tp in tps:
        producer.produce(tp.topic, b"x", partition=tp.partition)  # makes the topic
    assert producer.flush(10) == 0
    with Cluster({"bootstrap.servers": three_brokers[1]}) as c:
        assert c.topics() == {f"t{topic}": 4 for topic in range(8)} and len(c.nodes) == 3
        leaders, failed = c.leaders(tps)
        assert len(leaders) > 1 and not failed
        for node, group in leaders.items():
            for tp in group:
                assert c.connection_for(tp).peer == f"{node.host}:{node.port}"
                with TcpFetcher(c, tp, 0) as fetcher, TcpAppender(c, tp) as appender:
                    data = bytes(fetcher.fetch(max_wait_ms=5000).data)
                    assert len(data) > 61
                    assert appender.append(data) == 1
        admin = Admin(c)
        assert {
            tp: offset
            for tp, (offset, _) in admin.list_offsets(dict.fromkeys(tps, LATEST_OFFSET)).items()
        } == dict.fromkeys(tps, 2)
        admin.commit_offsets("g", {tps[2]: 1})
        assert admin.committed_offsets("g", tps[2:4]) == {tps[2]: 1, tps[3]: None}


def told(epochs, topic_id="a"):
    """What a broker tells of a topic: the leader of each partition has the number of its epoch."""
    partitions = [PartitionMetadata(i, e, e, (1, 2), (1, 2)) for i, e in enumerate(epochs)]
    return TopicMetadata("t", topic_id, False, tuple(partitions))


def test_a_leader_of_an_older_epoch_is_not_believed():
    """The broker that names it has not heard of the newer one."""
    before = told([3, 5])
    assert told([4, 4]).newest(before) == told([4, 5])
    assert told([4, 4, 0]).newest(before) == told([4, 5, 0])
    assert told([2, 2]).newest(None) == told([2, 2])
    assert told([2, 2], "b").newest(before) == told([2, 2], "b"), "another topic of its name"
    assert told([2, 2], None).newest(told([3, 5], None)) == told([2, 2], None)
    assert told([-1, 6]).newest(before) == told([-1, 6]), "the broker knows no epochs"
