"""Stock Kafka clients against a real broker: confluent-kafka (librdkafka), kafka-python, kcat."""

from __future__ import annotations

import subprocess
import threading
import time

import confluent_kafka
import kafka
import kafka.errors
import pytest
from confluent_kafka import admin as confluent_admin
from kafka.admin import KafkaAdminClient, NewTopic

import kdirect
from kdirect.format.batch import iterate_batches

CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]


def confluent_values(servers, topic, count, **more):
    """The first `count` (key, value) of a topic, read to the end by assigned partitions."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "reader",
            "enable.auto.commit": False,
            "check.crcs": True,
            **more,
        }
    )
    try:
        partitions = consumer.list_topics(topic, 10).topics[topic].partitions
        consumer.assign(
            [
                confluent_kafka.TopicPartition(topic, i, confluent_kafka.OFFSET_BEGINNING)
                for i in partitions
            ]
        )
        out = []
        deadline = time.monotonic() + 20
        while len(out) < count and time.monotonic() < deadline:
            for m in consumer.consume(count - len(out), 0.5):
                assert m.error() is None, m.error()
                out.append((m.key(), m.value()))
        return out
    finally:
        consumer.close()


def confluent_producer(servers, **more):
    return confluent_kafka.Producer({"bootstrap.servers": servers, "linger.ms": 2, **more})


def deliver(producer, topic, items, **more):
    failed = []
    for key, value in items:
        producer.produce(
            topic, value, key=key, on_delivery=lambda e, _: failed.append(e) if e else None, **more
        )
    assert producer.flush(20) == 0
    assert failed == []


@pytest.mark.parametrize("acks", ["0", "1", "all"])
@pytest.mark.parametrize("codec", CODECS)
def test_confluent_produces_and_consumes(broker, codec, acks):
    client = confluent_admin.AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    client.create_topics([confluent_admin.NewTopic("t", 2, 1)])["t"].result(10)
    items = [(b"key %d" % i, b"%s %d " % (codec.encode(), i) * 30) for i in range(300)]
    deliver(
        confluent_producer(broker.bootstrap_servers, **{"compression.type": codec, "acks": acks}),
        "t",
        items,
    )
    assert sorted(confluent_values(broker.bootstrap_servers, "t", len(items))) == sorted(items)


@pytest.mark.parametrize("codec", CODECS)
def test_kafka_python_produces_and_confluent_consumes(broker, codec):
    """kafka-python is idempotent by default; its own codecs are those whose libraries are there."""
    items = [(b"k", b"%d" % i * 40) for i in range(100)]
    try:
        producer = kafka.KafkaProducer(
            bootstrap_servers=broker.bootstrap_servers,
            compression_type=None if codec == "none" else codec,
        )
        futures = [producer.send("t", v, key=k, headers=[("h", b"1")]) for k, v in items]
        producer.flush(10)
        assert [f.get(5).offset for f in futures] == list(range(100))
        producer.close()
    except (AssertionError, RuntimeError) as e:
        assert f"Libraries for {codec} compression codec not found" in str(e)
        deliver(
            confluent_producer(
                broker.bootstrap_servers, **{"compression.type": codec, "enable.idempotence": True}
            ),
            "t",
            items,
        )
    assert confluent_values(broker.bootstrap_servers, "t", 100) == items
    consumer = kafka.KafkaConsumer(
        bootstrap_servers=broker.bootstrap_servers,
        auto_offset_reset="earliest",
        consumer_timeout_ms=10000,
    )
    if codec in ("none", "gzip"):  # those need no library of kafka-python's
        consumer.assign([kafka.TopicPartition("t", 0)])
        assert [(m.key, m.value) for _, m in zip(range(100), consumer)] == items
    consumer.close()


@pytest.mark.parametrize("acks", [0, 1, "all"])
def test_kafka_python_acks(broker, acks):
    producer = kafka.KafkaProducer(
        bootstrap_servers=broker.bootstrap_servers, acks=acks, enable_idempotence=False
    )
    for i in range(50):
        producer.send("t", b"%d" % i)
    producer.flush(10)
    producer.close()
    assert [v for _, v in confluent_values(broker.bootstrap_servers, "t", 50)] == [
        b"%d" % i for i in range(50)
    ]


def test_kcat(broker, kcat):
    program = kcat

    def kcat(*arguments, stdin=""):
        done = subprocess.run(
            [program, "-b", broker.bootstrap_servers, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    for codec in CODECS:
        kcat(
            "-P",
            "-t",
            codec,
            "-K",
            ":",
            *(() if codec == "none" else ("-z", codec)),
            stdin="".join(f"k:{i}\n" for i in range(100)),
        )
        assert kcat("-C", "-t", codec, "-e", "-q", "-f", "%o %k %s\n") == "".join(
            f"{i} k {i}\n" for i in range(100)
        )
        # librdkafka before 2.11.1 compresses only if it finds Produce version 0 on offer.
        stored = broker.server.logs.partitions[kdirect.TopicPartition(codec, 0)].read(0, 1 << 20)
        assert codec in {b.compression for data in stored for b in iterate_batches(data)}
    assert '"none" with 1 partitions' in kcat("-L")
    assert kcat("-C", "-t", "none", "-o", "-3", "-e", "-q") == "97\n98\n99\n"
    assert kcat("-Q", "-t", "none:0:-1").split()[-1] == "100"


def test_an_idempotent_producer_over_a_lost_connection(broker):
    """librdkafka repeats what it does not know to be committed; the log has it once and in
    order."""

    def cut_all(server):
        for connection in list(server._connections):
            connection.abort()

    producer = confluent_producer(
        broker.bootstrap_servers,
        **{"enable.idempotence": True, "linger.ms": 0, "batch.num.messages": 10},
    )
    failed = []
    for i in range(2000):
        producer.produce("t", b"%d" % i, on_delivery=lambda e, _: failed.append(e) if e else None)
        if i % 500 == 250:
            producer.poll(0)
            broker.server._loop.call_soon_threadsafe(cut_all, broker.server)
    assert producer.flush(30) == 0 and failed == []
    assert [v for _, v in confluent_values(broker.bootstrap_servers, "t", 2000)] == [
        b"%d" % i for i in range(2000)
    ]
    assert broker.server.logs.partitions[kdirect.TopicPartition("t", 0)].log_end_offset == 2000, (
        "and nothing twice"
    )


# -- groups ----------------------------------------------------------------------------------------
def test_two_members_share_a_topic_and_one_takes_over(broker):
    servers = broker.bootstrap_servers
    client = confluent_admin.AdminClient({"bootstrap.servers": servers})
    client.create_topics([confluent_admin.NewTopic("t", 4, 1)])["t"].result(10)
    settings = {"bootstrap.servers": servers, "group.id": "g", "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "session.timeout.ms": 6000, "heartbeat.interval.ms": 200}  # fmt: skip
    members = [confluent_kafka.Consumer(settings) for _ in range(2)]
    for m in members:
        m.subscribe(["t"])

    def poll_until(condition, what):
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, what
            for m in members:
                for message in m.consume(100, 0.05):
                    assert message.error() is None
                    seen.append(message.value())

    seen: list[bytes] = []
    poll_until(
        lambda: sorted(len(m.assignment()) for m in members) == [2, 2],
        "two members did not share four partitions",
    )
    deliver(confluent_producer(servers), "t", [(b"%d" % i, b"%d" % i) for i in range(200)])
    poll_until(lambda: len(seen) >= 200, "not everything was consumed")
    for m in members:
        m.commit(asynchronous=False)
    described = client.describe_consumer_groups(["g"])["g"].result(10)
    assert described.state.name == "STABLE" and len(described.members) == 2
    assert sorted(len(m.assignment.topic_partitions) for m in described.members) == [2, 2]
    members.pop().close()
    poll_until(lambda: len(members[0].assignment()) == 4, "the other member did not take over")
    deliver(confluent_producer(servers), "t", [(b"%d" % i, b"%d" % i) for i in range(200, 300)])
    poll_until(lambda: len(seen) >= 300, "not everything was consumed after the rebalance")
    assert sorted(int(v) for v in seen) == list(range(300)), "each record once"
    members.pop().close()
    assert client.describe_consumer_groups(["g"])["g"].result(10).state.name == "EMPTY"


@pytest.mark.parametrize("strategy", ["cooperative-sticky", "roundrobin"])
def test_strategies_of_assignment(broker, strategy):
    servers = broker.bootstrap_servers
    deliver(confluent_producer(servers), "t", [(None, b"x")])
    settings = {"bootstrap.servers": servers, "group.id": "g",
                "partition.assignment.strategy": strategy, "auto.offset.reset": "earliest",
                "heartbeat.interval.ms": 200, "session.timeout.ms": 6000}  # fmt: skip
    consumers = [confluent_kafka.Consumer(settings) for _ in range(2)]
    got = []
    deadline = time.monotonic() + 15
    for c in consumers:
        c.subscribe(["t"])
    while not got and time.monotonic() < deadline:
        for c in consumers:
            m = c.poll(0.1)
            if m is not None and m.error() is None:
                got.append(m.value())
    assert got == [b"x"]
    for c in consumers:
        c.close()


def test_a_static_member_comes_back_without_a_rebalance(broker):
    servers = broker.bootstrap_servers
    deliver(confluent_producer(servers), "t", [(None, b"x")])
    settings = {
        "bootstrap.servers": servers,
        "group.id": "g",
        "group.instance.id": "me",
        "auto.offset.reset": "earliest",
        "session.timeout.ms": 6000,
    }

    def read_one():
        consumer = confluent_kafka.Consumer(settings)
        consumer.subscribe(["t"])
        deadline = time.monotonic() + 15
        while (m := consumer.poll(0.2)) is None:
            assert time.monotonic() < deadline
        consumer.unassign()
        consumer.close()  # a static member does not leave
        return m.value()

    assert read_one() == b"x"
    generation = broker.server.groups.coordinator.groups["g"].generation
    deliver(confluent_producer(servers), "t", [(None, b"y")])
    assert read_one() in (b"x", b"y")
    group = broker.server.groups.coordinator.groups["g"]
    assert group.generation == generation and list(group.static) == ["me"]


def test_kafka_python_groups_commit_and_resume(broker):
    servers = broker.bootstrap_servers
    deliver(confluent_producer(servers), "t", [(None, b"%d" % i) for i in range(20)], partition=0)

    def consumer():
        return kafka.KafkaConsumer("t", bootstrap_servers=servers, group_id="g",
                                   auto_offset_reset="earliest", enable_auto_commit=False,
                                   consumer_timeout_ms=8000, heartbeat_interval_ms=300,
                                   session_timeout_ms=6000)  # fmt: skip

    first = consumer()
    assert [m.value for _, m in zip(range(10), first)] == [b"%d" % i for i in range(10)]
    first.commit({kafka.TopicPartition("t", 0): kafka.structs.OffsetAndMetadata(10, "note", -1)})
    first.close()
    second = consumer()
    assert [m.value for _, m in zip(range(10), second)] == [b"%d" % i for i in range(10, 20)]
    assert second.committed(kafka.TopicPartition("t", 0), metadata=True).metadata == "note"
    second.close()


# -- offsets and administration --------------------------------------------------------------------
def test_offsets_by_time(broker):
    servers = broker.bootstrap_servers
    base = 1_700_000_000_000
    producer = confluent_producer(servers, **{"linger.ms": 0, "batch.num.messages": 7})
    for i in range(100):
        producer.produce("t", b"x", timestamp=base + 1000 * i)
    producer.flush(10)
    consumer = confluent_kafka.Consumer({"bootstrap.servers": servers, "group.id": "g"})

    def offset(when):
        return consumer.offsets_for_times([confluent_kafka.TopicPartition("t", 0, when)], 10)[
            0
        ].offset

    assert [
        offset(base - 5),
        offset(base),
        offset(base + 1),
        offset(base + 50_000),
        offset(base + 99_000),
    ] == [0, 0, 1, 50, 99]
    assert offset(base + 99_001) == -1
    assert consumer.get_watermark_offsets(confluent_kafka.TopicPartition("t", 0), 10) == (0, 100)
    consumer.close()
    client = confluent_admin.AdminClient({"bootstrap.servers": servers})
    spec = {confluent_kafka.TopicPartition("t", 0): confluent_admin.OffsetSpec.max_timestamp()}
    assert next(iter(client.list_offsets(spec).values())).result(10).offset == 99


def test_the_time_of_the_append(broker):
    servers = broker.bootstrap_servers
    client = confluent_admin.AdminClient({"bootstrap.servers": servers})
    client.create_topics(
        [confluent_admin.NewTopic("t", 1, 1, config={"message.timestamp.type": "LogAppendTime"})]
    )["t"].result(10)
    before = time.time() * 1000
    told = []
    producer = confluent_producer(servers)
    producer.produce("t", b"x", timestamp=5, on_delivery=lambda e, m: told.append(m.timestamp()))
    producer.flush(10)
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": servers, "group.id": "g", "check.crcs": True}
    )
    consumer.assign([confluent_kafka.TopicPartition("t", 0, 0)])
    message = consumer.poll(10)
    assert (
        message.timestamp()[0] == confluent_kafka.TIMESTAMP_LOG_APPEND_TIME
        and message.timestamp() == told[0]
    )
    assert before - 1000 <= message.timestamp()[1] <= time.time() * 1000 + 1000
    consumer.close()


def test_seek_and_reset(broker):
    servers = broker.bootstrap_servers
    deliver(confluent_producer(servers), "t", [(None, b"%d" % i) for i in range(100)])
    consumer = kafka.KafkaConsumer(
        bootstrap_servers=servers, auto_offset_reset="earliest", consumer_timeout_ms=5000
    )
    tp = kafka.TopicPartition("t", 0)
    consumer.assign([tp])
    consumer.seek(tp, 42)
    assert next(consumer).value == b"42"
    consumer.seek(tp, 1000)  # out of range: back to the earliest
    assert next(consumer).value == b"0"
    consumer.seek_to_end(tp)
    assert consumer.position(tp) == 100
    consumer.close()


def test_administration_by_confluent(broker):
    servers = broker.bootstrap_servers
    client = confluent_admin.AdminClient({"bootstrap.servers": servers})
    new = confluent_admin.NewTopic("t", 2, 1, config={"retention.ms": "12345"})
    client.create_topics([new])["t"].result(10)
    for bad, says in (
        (confluent_admin.NewTopic("t", 1, 1), "TOPIC_ALREADY_EXISTS"),
        (confluent_admin.NewTopic("t", 0, 3), "TOPIC_ALREADY_EXISTS"),  # before all else
        (confluent_admin.NewTopic("bad name", 1, 1), "TOPIC_EXCEPTION"),
        (confluent_admin.NewTopic("u", 1, 3), "INVALID_REPLICATION_FACTOR"),
        (confluent_admin.NewTopic("u", 0, 1), "INVALID_PARTITIONS"),
        (confluent_admin.NewTopic("u", 1, 1, config={"nonsense": "1"}), "INVALID_CONFIG"),
        (
            confluent_admin.NewTopic("u", 1, 1, config={"cleanup.policy": "keep"}),
            "INVALID_CONFIG",
        ),
    ):
        with pytest.raises(confluent_kafka.KafkaException) as e:
            client.create_topics([bad])[bad.topic].result(10)
        assert says in e.value.args[0].name()
    client.create_topics([confluent_admin.NewTopic("checked", 1, 1)], validate_only=True)[
        "checked"
    ].result(10)
    assert set(client.list_topics(timeout=10).topics) == {"t"}

    resource = confluent_admin.ConfigResource(confluent_admin.RESOURCE_TOPIC, "t")

    def configs():
        return {
            k: (v.value, v.is_default)
            for k, v in client.describe_configs([resource])[resource].result(10).items()
        }

    assert configs()["retention.ms"] == ("12345", False) and configs()["segment.bytes"] == (
        str(64 << 20),
        True,
    )
    resource.add_incremental_config(
        confluent_admin.ConfigEntry(
            "retention.ms", "99", incremental_operation=confluent_admin.AlterConfigOpType.SET
        )
    )
    client.incremental_alter_configs([resource])[resource].result(10)
    assert configs()["retention.ms"] == ("99", False)
    back = confluent_admin.ConfigResource(confluent_admin.RESOURCE_TOPIC, "t")
    back.add_incremental_config(
        confluent_admin.ConfigEntry(
            "retention.ms", None, incremental_operation=confluent_admin.AlterConfigOpType.DELETE
        )
    )
    client.incremental_alter_configs([back])[back].result(10)
    assert configs()["retention.ms"] == (str(7 * 86_400_000), True)
    wrong = confluent_admin.ConfigResource(confluent_admin.RESOURCE_TOPIC, "t")
    wrong.add_incremental_config(
        confluent_admin.ConfigEntry(
            "retention.ms", "soon", incremental_operation=confluent_admin.AlterConfigOpType.SET
        )
    )
    with pytest.raises(confluent_kafka.KafkaException, match=r"retention\.ms"):
        client.incremental_alter_configs([wrong])[wrong].result(10)

    client.create_partitions([confluent_admin.NewPartitions("t", 5)])["t"].result(10)
    assert len(client.list_topics(timeout=10).topics["t"].partitions) == 5
    with pytest.raises(confluent_kafka.KafkaException, match="become more"):
        client.create_partitions([confluent_admin.NewPartitions("t", 3)])["t"].result(10)

    deliver(confluent_producer(servers), "t", [(None, b"%d" % i) for i in range(100)], partition=0)
    tp = confluent_kafka.TopicPartition("t", 0, 60)
    assert client.delete_records([tp])[tp].result(10).low_watermark == 60
    assert [v for _, v in confluent_values(servers, "t", 40)] == [b"%d" % i for i in range(60, 100)]

    cluster = client.describe_cluster().result(10)
    assert cluster.controller.id == 1 and len(cluster.nodes) == 1 and cluster.cluster_id
    client.delete_topics(["t"])["t"].result(10)
    assert "t" not in client.list_topics(timeout=10).topics
    with pytest.raises(confluent_kafka.KafkaException, match="UNKNOWN_TOPIC_OR_PART"):
        client.delete_topics(["t"])["t"].result(10)


def test_group_administration(broker):
    servers = broker.bootstrap_servers
    deliver(confluent_producer(servers), "t", [(None, b"%d" % i) for i in range(10)])
    client = confluent_admin.AdminClient({"bootstrap.servers": servers})
    given = confluent_kafka.ConsumerGroupTopicPartitions(
        "g", [confluent_kafka.TopicPartition("t", 0, 7)]
    )
    client.alter_consumer_group_offsets([given])["g"].result(10)

    def committed():
        asked = confluent_kafka.ConsumerGroupTopicPartitions("g")
        return [
            (x.topic, x.partition, x.offset)
            for x in client.list_consumer_group_offsets([asked])["g"].result(10).topic_partitions
        ]

    assert committed() == [("t", 0, 7)]
    assert {g.group_id for g in client.list_consumer_groups().result(10).valid} == {"g"}
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": servers, "group.id": "g", "session.timeout.ms": 6000}
    )
    consumer.subscribe(["t"])
    deadline = time.monotonic() + 15
    while (m := consumer.poll(0.2)) is None:
        assert time.monotonic() < deadline
    assert m.offset() == 7
    with pytest.raises(confluent_kafka.KafkaException, match=r"NON_EMPTY_GROUP|not empty"):
        client.delete_consumer_groups(["g"])["g"].result(10)
    consumer.close()
    client.delete_consumer_groups(["g"])["g"].result(10)
    assert committed() == []
    with pytest.raises(confluent_kafka.KafkaException):
        client.delete_consumer_groups(["g"])["g"].result(10)


def test_administration_by_kafka_python(broker):
    client = KafkaAdminClient(bootstrap_servers=broker.bootstrap_servers)
    client.create_topics([NewTopic("t", 3, 1, topic_configs={"max.message.bytes": "5000"})])
    assert client.list_topics() == ["t"]
    assert client.describe_topics(["t"])[0]["name"] == "t"
    assert client.describe_cluster()["controller_id"] == 1
    for ask in (
        client.list_groups,
        client.describe_log_dirs,
        client.list_partition_reassignments,
        client.list_transactions,
    ):
        ask()
    anything = kafka.admin.ResourcePatternFilter(
        kafka.admin.ResourceType.ANY, None, kafka.admin.ACLResourcePatternType.ANY
    )
    wanted = {
        "principal": None,
        "host": "*",
        "operation": kafka.admin.ACLOperation.ANY,
        "permission_type": kafka.admin.ACLPermissionType.ANY,
    }
    with pytest.raises(kafka.errors.SecurityDisabledError):
        client.describe_acls(kafka.admin.ACLFilter(resource_pattern=anything, **wanted))
    client.delete_topics(["t"])
    assert client.list_topics() == []
    client.close()


def test_an_unknown_topic_without_automatic_creation(broker_process):
    b = broker_process(auto_create_topics_enable=False)
    producer = confluent_producer(
        b.bootstrap_servers,
        **{"message.timeout.ms": 3000, "topic.metadata.propagation.max.ms": 500},
    )
    failed = []
    producer.produce("nowhere", b"x", on_delivery=lambda e, _: failed.append(e))
    producer.flush(10)
    assert failed and failed[0].code() in (
        confluent_kafka.KafkaError._UNKNOWN_TOPIC,
        confluent_kafka.KafkaError.UNKNOWN_TOPIC_OR_PART,
    )


def test_many_clients_at_once(broker):
    """Eight producers on threads of their own; each one's records are there, in its order."""

    def produce(n):
        producer = confluent_producer(broker.bootstrap_servers)
        for i in range(500):
            producer.produce("t", b"%d %d" % (n, i), partition=0)
        assert producer.flush(20) == 0

    confluent_producer(broker.bootstrap_servers).list_topics("t", 10)
    threads = [threading.Thread(target=produce, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    by_producer: dict[int, list[int]] = {}
    for _, value in confluent_values(broker.bootstrap_servers, "t", 4000):
        n, i = map(int, value.split())
        by_producer.setdefault(n, []).append(i)
    assert by_producer == {n: list(range(500)) for n in range(8)}
