"""Topics, properties, offsets and groups against a real broker; other clients confirm what was
done."""

from __future__ import annotations

import re
import struct
import threading
import time
from pathlib import Path

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient

from kdirect.client.admin import EARLIEST_OFFSET, LATEST_OFFSET, Admin
from kdirect.errors import BrokerError, ConfigError, UnknownTopicError
from kdirect.model import TopicPartition

CREATE_TOPICS, DELETE_TOPICS, LIST_OFFSETS, OFFSET_COMMIT, FIND_COORDINATOR = 19, 20, 2, 8, 10


@pytest.fixture
def admin(cluster):
    return Admin(cluster)


@pytest.fixture
def name(request):
    """A topic name of the test's own."""
    return request.node.name[:80].translate(str.maketrans("[]/ ", "...."))


@pytest.fixture
def produce(broker):
    """``produce(tp, {timestamp_ms: value, ...})``, one batch a record, by librdkafka."""
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": broker.bootstrap_servers, "linger.ms": 0}
    )

    def make(tp, records):
        for timestamp_ms, value in records.items():
            failed = []
            producer.produce(
                tp.topic,
                value,
                partition=tp.partition,
                timestamp=timestamp_ms,
                on_delivery=lambda e, m, failed=failed: failed.append(e),
            )
            assert producer.flush(10) == 0 and failed == [None]

    return make


# -- topics ----------------------------------------------------------------------------------------


def test_a_topic_from_its_creation_to_its_end(admin, broker, name):
    other = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    assert admin.create_topic(name, 3, configs={"retention.ms": 86_400_000}) is True
    assert len(other.list_topics(timeout=10).topics[name].partitions) == 3
    info = admin.describe_topic(name)
    assert (info.name, info.partitions, info.internal, info.replication_factor) == (
        name,
        3,
        False,
        1,
    )
    assert [p.partition for p in info.leaders] == [0, 1, 2]
    assert admin.list_topics()[name] == info
    admin.create_partitions(name, 5)
    assert (
        admin.describe_topic(name).partitions
        == 5
        == len(other.list_topics(timeout=10).topics[name].partitions)
    )
    assert admin.delete_topic(name) is True
    assert name not in admin.list_topics() and name not in other.list_topics(timeout=10).topics
    with pytest.raises(UnknownTopicError, match=f"topic '{name}' does not exist"):
        admin.describe_topic(name)


def test_a_topic_that_exists(admin, name):
    assert admin.create_topic(name)
    with pytest.raises(
        BrokerError, match=rf"creating topic '{name}': .*TOPIC_ALREADY_EXISTS"
    ) as caught:
        admin.create_topic(name)
    assert "if_not_exists" in caught.value.hint and caught.value.code == 36
    assert admin.create_topic(name, 9, if_not_exists=True) is False
    assert admin.describe_topic(name).partitions == 1


def test_a_deleted_topic_may_be_created_again(admin, name, produce):
    tp = TopicPartition(name, 0)
    ids = set()
    for _ in range(3):
        admin.create_topic(name)
        ids.add(admin.describe_topic(name).topic_id)
        assert admin.list_offsets({tp: LATEST_OFFSET}) == {tp: (0, -1)}
        produce(tp, {1: b"x"})
        admin.delete_topic(name)
    assert len(ids) == 3


@pytest.mark.parametrize(
    ("topic", "kwargs", "error", "message"),
    [
        ("a b", {}, ConfigError, "topic name 'a b'"),
        ("", {}, ConfigError, "topic name is empty"),
        ("..", {}, ConfigError, "'..' is not allowed"),
        ("x" * 250, {}, ConfigError, "250 characters"),
        ("t", {"partitions": 0}, ConfigError, "partitions 0"),
        ("t", {"partitions": 1 << 40}, ConfigError, "partitions 1099511627776"),
        ("t", {"partitions": {"retention.ms": 1}}, ConfigError, "partitions {"),
        ("t", {"replication_factor": 0}, ConfigError, "replication_factor 0"),
        ("t", {"replication_factor": 3}, BrokerError, "INVALID_REPLICATION_FACTOR"),
        ("t", {"configs": {"retention.ms": "soon"}}, BrokerError, "INVALID_CONFIG"),
        ("t", {"configs": {"retention.mss": 1}}, BrokerError, "INVALID_CONFIG"),
    ],
)
def test_wrong_topics_are_refused_with_a_remedy(admin, topic, kwargs, error, message):
    with pytest.raises(error, match=message) as caught:
        admin.create_topic(topic, **kwargs)
    assert caught.value.hint
    assert topic not in admin.list_topics()


def test_the_brokers_defaults(admin, name):
    admin.create_topic(name, -1, -1)
    assert admin.describe_topic(name).partitions >= 1


def test_topics_that_do_not_exist(admin, name):
    for call in (
        lambda: admin.delete_topic(name),
        lambda: admin.create_partitions(name, 2),
        lambda: admin.describe_topic(name),
    ):
        with pytest.raises(UnknownTopicError, match=name):
            call()
    assert admin.delete_topic(name, if_exists=True) is False


def test_partitions_are_only_added(admin, name):
    admin.create_topic(name, 3)
    for count in (2, 3):
        with pytest.raises(
            BrokerError, match=rf"adding partitions to topic '{name}': .*INVALID_PARTITIONS"
        ):
            admin.create_partitions(name, count)


@pytest.mark.parametrize("decision", ["cut", "cut after"])
def test_changes_whose_answer_was_lost_succeed(behind, proxy, admin, name, decision):
    unsure = Admin(behind())
    proxy.once(CREATE_TOPICS, decision, times=2)
    assert unsure.create_topic(name) is True
    assert name in admin.list_topics()
    proxy.once(DELETE_TOPICS, decision, times=2)
    assert unsure.delete_topic(name) is True
    assert name not in admin.list_topics()


def test_a_controller_that_moved_is_looked_for(behind, proxy, name):
    body = name.encode()
    not_controller = (
        b"\0"
        + struct.pack(">i", 0)
        + b"\2"
        + bytes([len(body) + 1])
        + body
        + bytes(16)
        + struct.pack(">h", 41)
        + b"\0"
        + struct.pack(">ih", -1, -1)
        + b"\0"
        + b"\0"
        + b"\0"
    )
    proxy.once(
        CREATE_TOPICS,
        lambda version: not_controller if version == 7 else pytest.fail(f"version {version}"),
        times=2,
    )
    assert Admin(behind()).create_topic(name) is True
    assert proxy.requests.count(CREATE_TOPICS) == 3


# -- properties ------------------------------------------------------------------------------------


def test_properties_are_set_and_taken_back(admin, broker, name):
    admin.create_topic(name, configs={"retention.ms": 1000, "cleanup.policy": "delete"})
    now = admin.describe_configs(name)
    assert now["retention.ms"].value == "1000" and not now["retention.ms"].is_default
    assert now["segment.bytes"].is_default
    admin.alter_configs(name, {"segment.bytes": 1 << 20, "retention.ms": None})
    now = admin.describe_configs(name)
    assert now["segment.bytes"].value == str(1 << 20) and not now["segment.bytes"].is_default
    assert now["retention.ms"].is_default and now["retention.ms"].value != "1000"
    resource = confluent_kafka.admin.ConfigResource(confluent_kafka.admin.ResourceType.TOPIC, name)
    other = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    theirs = other.describe_configs([resource])[resource].result(10)
    assert {k: v.value for k, v in theirs.items()} == {k: v.value for k, v in now.items()}
    admin.alter_configs(name, {})


def test_wrong_properties(admin, name):
    admin.create_topic(name)
    with pytest.raises(
        BrokerError,
        match=rf"altering properties of topic '{name}': .*(INVALID_CONFIG|INVALID_REQUEST)",
    ):
        admin.alter_configs(name, {"retention.ms": "soon"})
    with pytest.raises(UnknownTopicError, match="properties of topic 'not-there'"):
        admin.describe_configs("not-there")
    with pytest.raises(UnknownTopicError, match="properties of topic 'not-there'"):
        admin.alter_configs("not-there", {"retention.ms": 1})
    with pytest.raises(ConfigError, match="of what"):
        admin.describe_configs()
    with pytest.raises(ConfigError, match="no broker 77"):
        admin.describe_configs(broker=77)


def test_properties_of_the_broker(admin, cluster):
    found = admin.describe_configs(broker=cluster.nodes[0].node_id)
    assert "log.segment.bytes" in found


# -- offsets of partitions -------------------------------------------------------------------------


def test_offsets_of_many_partitions_in_one_request(behind, proxy, new_topic, produce):
    name, empty = new_topic(3), new_topic(1)
    for i in range(3):
        produce(TopicPartition(name, i), {1000 + j: b"x" for j in range(i)})
    tps = [TopicPartition(name, i) for i in range(3)]
    admin = Admin(behind())
    wanted = {
        tps[0]: LATEST_OFFSET,
        tps[1]: LATEST_OFFSET,
        tps[2]: EARLIEST_OFFSET,
        TopicPartition(empty, 0): LATEST_OFFSET,
    }
    assert admin.list_offsets(wanted) == {
        tps[0]: (0, -1),
        tps[1]: (1, -1),
        tps[2]: (0, -1),
        TopicPartition(empty, 0): (0, -1),
    }
    assert proxy.requests.count(LIST_OFFSETS) == 1
    assert admin.list_offsets({}) == {}


def test_offsets_by_time(admin, new_topic, produce):
    tp = TopicPartition(new_topic(), 0)
    produce(tp, {1000: b"a", 2000: b"b", 3000: b"c"})
    for asked, expected in {
        0: (0, 1000),
        1000: (0, 1000),
        1001: (1, 2000),
        2500: (2, 3000),
        3000: (2, 3000),
        3001: (-1, -1),
    }.items():
        assert admin.list_offsets({tp: asked}) == {tp: expected}, asked
    assert admin.list_offsets({tp: LATEST_OFFSET}, isolation_level="read_committed")[tp][0] == 3


def test_offsets_of_what_does_not_exist(admin, new_topic):
    with pytest.raises(UnknownTopicError, match="topic 'not-there'"):
        admin.list_offsets({TopicPartition("not-there", 0): LATEST_OFFSET})
    with pytest.raises(UnknownTopicError, match="no partition 4"):
        admin.list_offsets({TopicPartition(new_topic(), 4): LATEST_OFFSET})


def test_offsets_of_a_leader_that_moved_are_asked_again(behind, proxy, new_topic):
    name = new_topic(2)
    tps = [TopicPartition(name, i) for i in range(2)]
    topic = name.encode()

    def moved(version: int) -> bytes:
        """Partition 0 has moved, partition 1 answers."""
        partitions = [struct.pack(">ihqqi", i, 6 if i == 0 else 0, -1, 7, 0) for i in range(2)]
        if version >= 6:
            head = b"\0" + struct.pack(">i", 0) + b"\2" + bytes([len(topic) + 1]) + topic + b"\3"
            return head + b"".join(p + b"\0" for p in partitions) + b"\0\0"
        return (
            struct.pack(">iih", 0, 1, len(topic))
            + topic
            + struct.pack(">i", 2)
            + b"".join(partitions)
        )

    admin = Admin(behind())
    proxy.once(LIST_OFFSETS, moved)
    assert admin.list_offsets(dict.fromkeys(tps, LATEST_OFFSET)) == {
        tps[0]: (0, -1),
        tps[1]: (7, -1),
    }
    proxy.once(LIST_OFFSETS, "cut", times=2)
    assert admin.list_offsets(dict.fromkeys(tps, LATEST_OFFSET)) == dict.fromkeys(tps, (0, -1))


def test_records_are_deleted_up_to_an_offset(admin, new_topic, produce):
    tp = TopicPartition(new_topic(), 0)
    produce(tp, {1000 + i: b"x" for i in range(5)})
    assert admin.delete_records({tp: 3}) == {tp: 3}
    assert admin.list_offsets({tp: EARLIEST_OFFSET}) == {tp: (3, -1)}
    with pytest.raises(BrokerError, match=rf"deleting records of {tp}: .*OFFSET_OUT_OF_RANGE"):
        admin.delete_records({tp: 6})
    assert admin.delete_records({tp: -1}) == {tp: 5}
    assert (
        admin.list_offsets({tp: EARLIEST_OFFSET})
        == admin.list_offsets({tp: LATEST_OFFSET})
        == {tp: (5, -1)}
    )


# -- groups ----------------------------------------------------------------------------------------


def test_group_offsets_are_kept_and_seen_by_others(admin, broker, new_topic, name):
    topic = new_topic(2)
    tps = [TopicPartition(topic, i) for i in range(2)]
    group = f"group-{name}"
    assert admin.committed_offsets(group, tps) == dict.fromkeys(tps)
    admin.commit_offsets(group, {tps[0]: 5})
    admin.commit_offsets(group, {tps[0]: 7}, metadata="batch 3")
    assert admin.committed_offsets(group, tps) == {tps[0]: 7, tps[1]: None}
    assert admin.committed_offsets(group) == {tps[0]: 7}
    assert admin.committed_offsets(group, []) == {}
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": broker.bootstrap_servers, "group.id": group}
    )
    theirs = consumer.committed(
        [confluent_kafka.TopicPartition(topic, i) for i in range(2)], timeout=10
    )
    consumer.close()
    assert (theirs[0].partition, theirs[0].offset, theirs[0].metadata) == (0, 7, "batch 3")
    assert theirs[1].offset < 0
    assert group in [g.group for g in admin.list_groups()]


def test_a_group_with_live_members_keeps_its_offsets(admin, broker, new_topic, name):
    topic = new_topic()
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": name,
            "session.timeout.ms": 6000,
        }
    )
    joined = threading.Event()
    consumer.subscribe([topic], on_assign=lambda c, p: joined.set())
    deadline = time.monotonic() + 15
    while not joined.is_set() and time.monotonic() < deadline:
        consumer.poll(0.1)
    assert joined.is_set()
    with pytest.raises(
        BrokerError, match=rf"committing offset of {topic}-0 for group '{name}'"
    ) as caught:
        admin.commit_offsets(name, {TopicPartition(topic, 0): 1})
    assert "live members" in caught.value.hint
    group = {g.group: g for g in admin.list_groups()}[name]
    assert group.protocol_type == "consumer" and group.state in ("Stable", "")
    consumer.close()


def test_a_coordinator_that_moved_is_looked_for(behind, proxy, new_topic, name):
    tp = TopicPartition(new_topic(), 0)
    admin = Admin(behind())
    topic = tp.topic.encode()

    def moved(version: int) -> bytes:
        if version >= 8:
            return (
                b"\0"
                + struct.pack(">i", 0)
                + b"\2"
                + bytes([len(topic) + 1])
                + topic
                + b"\2"
                + struct.pack(">ih", 0, 16)
                + b"\0\0\0"
            )
        return struct.pack(">iih", 0, 1, len(topic)) + topic + struct.pack(">iih", 1, 0, 16)

    admin.commit_offsets(name, {tp: 1})
    assert proxy.requests.count(FIND_COORDINATOR) == 1
    proxy.once(OFFSET_COMMIT, moved)
    admin.commit_offsets(name, {tp: 2})
    assert proxy.requests.count(FIND_COORDINATOR) == 2
    assert admin.committed_offsets(name, [tp]) == {tp: 2}


def test_a_group_needs_a_name(admin, new_topic):
    with pytest.raises(ConfigError, match="group id is empty"):
        admin.commit_offsets("", {TopicPartition(new_topic(), 0): 1})


def test_group_offsets_survive_a_restart(broker_process):
    from kdirect.wire.cluster import Cluster

    b = broker_process()
    tp = TopicPartition("t", 0)
    with Cluster({"bootstrap.servers": b.bootstrap_servers, "connect.timeout.ms": 20000}) as c:
        admin = Admin(c)
        admin.create_topic("t")
        admin.commit_offsets("g", {tp: 42})
        b.stop()
        b.start()
        assert admin.committed_offsets("g", [tp]) == {tp: 42}


def test_the_examples_of_the_documentation_run(broker):
    root = Path(__file__).resolve().parents[2]
    names: dict = {}
    for page in ("docs/python-api.md", "ARCHITECTURE.md"):
        text = (root / page).read_text()
        for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            exec(block.replace("localhost:9092", broker.bootstrap_servers), names)
        names["admin"].create_topic("lines", if_not_exists=True)
    assert names["offset"] == 1
    assert names["batch"]["value"][0].as_py() == b"value"
    assert [r.value for r in names["records"]] == [b"%d" % i for i in range(100)]
    for topic in ("flights", "seats", "lines"):
        names["admin"].delete_topic(topic)
