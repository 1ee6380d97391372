"""What outlives a restart, a kill, a full disk; and that an idle broker sleeps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import confluent_kafka
import kafka
import pytest
from confluent_kafka import admin as confluent_admin

import kdirect
from kdirect.format import protocol as p
from kdirect.format.batch import encode_single_bytes
from kdirect.format.error_codes import ErrorCode
from kdirect.format.group_records import CommittedOffset
from kdirect.format.schema import build
from kdirect.model import TopicPartition
from tests.support import cpu_ticks


def produce(servers, topic, values, **more):
    """Deliver all; the errors of those that failed."""
    producer = confluent_kafka.Producer({"bootstrap.servers": servers, "linger.ms": 1, **more})
    failed = []
    for v in values:
        producer.produce(
            topic, v, partition=0, on_delivery=lambda e, _: failed.append(e) if e else None
        )
    assert producer.flush(30) == 0
    return failed


def values_of(servers, topic, count):
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": servers, "group.id": "reader", "enable.auto.commit": False}
    )
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, confluent_kafka.OFFSET_BEGINNING)])
    out: list[bytes] = []
    deadline = time.monotonic() + 20
    while len(out) < count and time.monotonic() < deadline:
        out += [m.value() for m in consumer.consume(count - len(out), 0.3)]
    consumer.close()
    return out


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_everything_is_there_after_a_restart(broker_process, end):
    b = broker_process()
    client = confluent_admin.AdminClient({"bootstrap.servers": b.bootstrap_servers})
    client.create_topics([confluent_admin.NewTopic("t", 2, 1, config={"retention.ms": "987654"})])[
        "t"
    ].result(10)
    client.create_topics([confluent_admin.NewTopic("gone", 2, 1)])["gone"].result(10)
    client.delete_topics(["gone"])["gone"].result(10)
    assert produce(b.bootstrap_servers, "t", [b"%d" % i for i in range(1000)]) == []
    consumer = kafka.KafkaConsumer(
        bootstrap_servers=b.bootstrap_servers, group_id="g", enable_auto_commit=False
    )
    consumer.assign([kafka.TopicPartition("t", 0)])
    consumer.commit(
        {kafka.TopicPartition("t", 0): kafka.structs.OffsetAndMetadata(321, "here", -1)}
    )
    consumer.close()
    with_id = str(
        client.describe_topics(confluent_kafka.TopicCollection(["t"]))["t"].result(10).topic_id
    )
    cluster = client.describe_cluster().result(10).cluster_id

    if end == "stop":
        assert b.stop() == 0
    else:
        b.kill()
    b.start()
    client = confluent_admin.AdminClient({"bootstrap.servers": b.bootstrap_servers})
    assert client.describe_cluster().result(10).cluster_id == cluster
    assert (
        str(client.describe_topics(confluent_kafka.TopicCollection(["t"]))["t"].result(10).topic_id)
        == with_id
    )
    assert set(client.list_topics(timeout=10).topics) == {"t", "__consumer_offsets"}
    resource = confluent_admin.ConfigResource(confluent_admin.RESOURCE_TOPIC, "t")
    assert (
        client.describe_configs([resource])[resource].result(10)["retention.ms"].value == "987654"
    )
    assert values_of(b.bootstrap_servers, "t", 1000) == [b"%d" % i for i in range(1000)]
    consumer = kafka.KafkaConsumer(
        bootstrap_servers=b.bootstrap_servers, group_id="g", enable_auto_commit=False
    )
    committed = consumer.committed(kafka.TopicPartition("t", 0), metadata=True)
    assert (committed.offset, committed.metadata) == (321, "here")
    consumer.close()
    assert produce(b.bootstrap_servers, "t", [b"more"]) == []
    assert values_of(b.bootstrap_servers, "t", 1001)[-1] == b"more"
    assert b.stop() == 0
    assert "Traceback" not in b.errors.read_text()


@pytest.mark.parametrize("flush", ["false", "true"])
def test_a_kill_in_full_flight_loses_nothing_acknowledged(broker_process, flush):
    """Small segments, so that rolls are under way too.  What was acknowledged is there, in order,
    once."""
    b = broker_process(**{"log.segment.bytes": 65536, "log.flush.before.ack": flush})
    acknowledged: list[bytes] = []
    producer = confluent_kafka.Producer({"bootstrap.servers": b.bootstrap_servers, "linger.ms": 0,
                                         "batch.num.messages": 20,
                                         "message.timeout.ms": 60000,
                                         "enable.idempotence": True})  # fmt: skip
    stop = threading.Event()

    def run():
        i = 0
        while not stop.is_set():
            try:
                producer.produce(
                    "t",
                    b"%d " % i + b"x" * 200,
                    partition=0,
                    on_delivery=lambda e, m: acknowledged.append(m.value()) if e is None else None,
                )
            except BufferError:
                producer.poll(0.05)
                continue
            i += 1
            producer.poll(0)

    thread = threading.Thread(target=run)
    thread.start()
    deadline = time.monotonic() + 90
    while len(acknowledged) < 2000 and time.monotonic() < deadline:
        time.sleep(0.01)
    b.kill()
    stop.set()
    thread.join()
    producer.purge()
    producer.flush(5)
    assert len(acknowledged) >= 2000
    b.start()
    got = values_of(b.bootstrap_servers, "t", len(acknowledged))
    assert got[: len(acknowledged)] == acknowledged
    assert len(set(got)) == len(got)


def test_a_group_goes_on_over_a_restart(broker_process):
    """The member's session, generation and assignment are in the log: it only sees its coordinator
    come back."""
    b = broker_process()
    assert produce(b.bootstrap_servers, "t", [b"1"]) == []
    rebalances = []
    consumer = confluent_kafka.Consumer({"bootstrap.servers": b.bootstrap_servers, "group.id": "g",
                                         "auto.offset.reset": "earliest",
                                         "heartbeat.interval.ms": 200,
                                         "reconnect.backoff.max.ms": 200})  # fmt: skip
    consumer.subscribe(["t"], on_assign=lambda c, ps: rebalances.append(len(ps)))
    deadline = time.monotonic() + 15
    while (m := consumer.poll(0.2)) is None or m.error():
        assert time.monotonic() < deadline
    b.kill()
    b.start()
    assert produce(b.bootstrap_servers, "t", [b"2"]) == []
    values = []
    while b"2" not in values:
        m = consumer.poll(0.2)
        assert time.monotonic() < deadline + 15
        if m is not None and not m.error():
            values.append(m.value())
    assert rebalances == [1]
    consumer.close()


def test_producer_ids_are_never_given_twice(tmp_path, raw):
    seen = []
    for _ in range(3):
        with kdirect.Broker(log_dirs=tmp_path) as b:
            connection = raw(b.bootstrap_servers)
            for _ in range(1500):
                connection.send(
                    build(p.InitProducerIdRequest, transactional_id=None, transaction_timeout_ms=0),
                    1,
                )
            seen += [connection.receive().producer_id for _ in range(1500)]
    assert len(set(seen)) == len(seen) == 4500


def test_a_deletion_that_a_crash_interrupted_is_finished(tmp_path, raw):
    with kdirect.Broker(log_dirs=tmp_path, num_partitions=3) as b:
        raw(b.bootstrap_servers).call(
            build(
                p.MetadataRequest,
                topics=[{"name": "t"}, {"name": "u"}],
                allow_auto_topic_creation=True,
            ),
            8,
        )
    state = json.loads((tmp_path / "topics.json").read_text())
    state["topics"]["t"]["deleting"] = True
    (tmp_path / "topics.json").write_text(json.dumps(state))
    with kdirect.Broker(log_dirs=tmp_path, log_segment_delete_delay_ms=0) as b:
        assert {x.topic for x in b.server.logs.partitions} == {"u"}
        names = {
            t.name
            for t in raw(b.bootstrap_servers).call(build(p.MetadataRequest, topics=None), 8).topics
        }
    assert names == {"u"} and not list(tmp_path.glob("t-*"))


def test_a_creation_that_a_crash_interrupted_is_finished(tmp_path, raw):
    with kdirect.Broker(log_dirs=tmp_path, num_partitions=3) as b:
        raw(b.bootstrap_servers).call(
            build(p.MetadataRequest, topics=[{"name": "t"}], allow_auto_topic_creation=True), 8
        )
    subprocess.run(["rm", "-r", tmp_path / "t-1"], check=True)
    with kdirect.Broker(log_dirs=tmp_path) as b:
        topic = raw(b.bootstrap_servers).call(build(p.MetadataRequest, topics=None), 8).topics[0]
        assert [x.error_code for x in topic.partitions] == [0, 0, 0]


def test_a_copied_log_is_adopted(tmp_path, raw):
    with kdirect.Broker(log_dirs=tmp_path) as b:
        connection = raw(b.bootstrap_servers)
        assert produce(b.bootstrap_servers, "t", [b"1", b"2"]) == []
        created = connection.call(build(p.MetadataRequest, topics=None), 10).topics[0]
    (tmp_path / "topics.json").unlink()
    with kdirect.Broker(log_dirs=tmp_path) as b:
        topic = raw(b.bootstrap_servers).call(build(p.MetadataRequest, topics=None), 10).topics[0]
        assert (topic.name, topic.topic_id) == ("t", created.topic_id)
        assert values_of(b.bootstrap_servers, "t", 2) == [b"1", b"2"]


def test_kafka_reads_the_offsets_topic_as_its_own(broker):
    """The records have the keys and values of Kafka's schemas; a stock client reads them."""
    assert produce(broker.bootstrap_servers, "t", [b"1"]) == []
    client = confluent_admin.AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    given = confluent_kafka.ConsumerGroupTopicPartitions(
        "g", [confluent_kafka.TopicPartition("t", 0, 1)]
    )
    client.alter_consumer_group_offsets([given])["g"].result(10)
    consumer = kafka.KafkaConsumer(
        bootstrap_servers=broker.bootstrap_servers,
        auto_offset_reset="earliest",
        consumer_timeout_ms=5000,
    )
    consumer.assign([kafka.TopicPartition("__consumer_offsets", 0)])
    record = next(consumer)
    assert record.key == b"\0\x01\0\x01g\0\x01t\0\0\0\0"
    assert record.value[:10] == b"\0\x03" + (1).to_bytes(8, "big")
    consumer.close()


def test_offsets_of_empty_groups_expire(broker, on_loop):
    server = broker.server
    produce(broker.bootstrap_servers, "t", [b"1"])
    tp = TopicPartition("t", 0)
    now = time.time_ns() // 1_000_000
    on_loop(
        broker,
        lambda: server.offsets.commit(
            "old", {tp: CommittedOffset(1, -1, "", now - 8 * 86_400_000)}
        ),
    )
    on_loop(broker, lambda: server.offsets.commit("new", {tp: CommittedOffset(1, -1, "", now)}))
    on_loop(broker, server.groups.expire_offsets)
    assert server.offsets.groups() == {"new"}


def test_deleting_a_topic_deletes_what_groups_committed_in_it(broker):
    produce(broker.bootstrap_servers, "t", [b"1"])
    client = confluent_admin.AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    given = confluent_kafka.ConsumerGroupTopicPartitions(
        "g", [confluent_kafka.TopicPartition("t", 0, 1)]
    )
    client.alter_consumer_group_offsets([given])["g"].result(10)
    client.delete_topics(["t"])["t"].result(10)
    assert broker.server.offsets.groups() == set()


# -- group commit ----------------------------------------------------------------------------------
def test_with_group_commit_many_producers_share_an_fsync(raw):
    with kdirect.Broker(log_flush_before_ack=True) as b:
        connections = [raw(b.bootstrap_servers) for _ in range(8)]
        connections[0].call(
            build(p.MetadataRequest, topics=[{"name": "t"}], allow_auto_topic_creation=True), 8
        )
        row = {"name": "t", "partition_data": [{"index": 0, "records": encode_single_bytes(b"v")}]}
        message = build(
            p.ProduceRequest, transactional_id=None, acks=-1, timeout_ms=1000, topic_data=[row]
        )
        for _ in range(50):
            for c in connections:
                c.send(message, 8)
        offsets = [
            c.receive().responses[0].partition_responses[0].base_offset
            for c in connections
            for _ in range(50)
        ]
        assert sorted(offsets) == list(range(400))
        statistics = b.statistics()
        assert 0 < statistics["broker_flushes"] < 400
        partition = b.server.logs.partitions[TopicPartition("t", 0)]
        assert partition.high_watermark == partition.recovery_point == 400


# -- a full disk -----------------------------------------------------------------------------------
@pytest.fixture
def tiny_disk(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    where = tmp_path / "disk"
    where.mkdir()
    if (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", where], capture_output=True
        ).returncode
        != 0
    ):
        pytest.skip("needs root that may mount")
    yield where
    subprocess.run(["umount", "-l", where], check=True)


def test_a_full_disk_refuses_writes_and_serves_reads(tiny_disk, raw):
    with kdirect.Broker(
        log_dirs=tiny_disk / "log", log_segment_bytes=256 << 10, log_index_size_max_bytes=4096
    ) as b:
        servers = b.bootstrap_servers
        connection = raw(servers)
        connection.call(
            build(
                p.MetadataRequest,
                topics=[{"name": "t"}, {"name": "u"}],
                allow_auto_topic_creation=True,
            ),
            8,
        )
        batch = encode_single_bytes(b"v" * 50_000)

        def append(topic):
            row = {"name": topic, "partition_data": [{"index": 0, "records": batch}]}
            message = build(
                p.ProduceRequest, transactional_id=None, acks=-1, timeout_ms=1000, topic_data=[row]
            )
            return connection.call(message, 8).responses[0].partition_responses[0]

        count = 0
        while (answer := append("t")).error_code == 0:
            count += 1
            assert count < 100
        assert (
            answer.error_code == ErrorCode.KAFKA_STORAGE_ERROR
            and "no space" in answer.error_message
        )
        assert append("u").error_code == ErrorCode.KAFKA_STORAGE_ERROR
        failed = produce(servers, "t", [b"x" * 50_000], **{"message.timeout.ms": 1500})
        assert failed, "the producer retried until its time was up"
        assert len(values_of(servers, "t", count)) == count > 5, "what was acknowledged is readable"
        names = {t.name for t in raw(servers).call(build(p.MetadataRequest, topics=None), 8).topics}
        assert names == {"t", "u"}
        # Room again: writes go on where they stopped.
        partition = b.server.logs.partitions[TopicPartition("t", 0)]
        partition.delete_records(partition.segments[-1].base_offset)
        assert append("t").base_offset == count
    with kdirect.Broker(
        log_dirs=tiny_disk / "log", log_segment_bytes=256 << 10, log_index_size_max_bytes=4096
    ) as b:
        assert b.server.logs.partitions[TopicPartition("t", 0)].log_end_offset == count + 1


# -- the process -----------------------------------------------------------------------------------
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_stop_it_cleanly(broker_process, number):
    b = broker_process()
    # With a producer at work and a fetch that waits.
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": b.bootstrap_servers, "message.timeout.ms": 1000}
    )
    producer.produce("t", b"x")
    assert producer.flush(10) == 0
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": b.bootstrap_servers,
            "group.id": "g",
            "fetch.wait.max.ms": 30000,
            "auto.offset.reset": "latest",
        }
    )
    consumer.subscribe(["t"])
    consumer.poll(1)
    begin = time.monotonic()
    b.process.send_signal(number)
    assert b.process.wait(20) == 0
    assert time.monotonic() - begin < 10
    assert Path(b.log_dir, ".kafka_cleanshutdown").exists()
    assert "Traceback" not in b.errors.read_text()


def test_an_idle_broker_uses_no_cpu(broker_process, raw):
    """Connections are open, topics and records are there, a consumer waits: nothing runs."""
    b = broker_process(num_partitions=20)
    connections = [raw(b.bootstrap_servers) for _ in range(10)]
    connections[0].call(
        build(p.MetadataRequest, topics=[{"name": "t"}], allow_auto_topic_creation=True), 8
    )
    assert produce(b.bootstrap_servers, "t", [b"x"] * 100) == []
    part = {
        "partition": 0,
        "current_leader_epoch": -1,
        "fetch_offset": 100,
        "partition_max_bytes": 1000,
        "log_start_offset": -1,
    }
    waiting = build(p.FetchRequest, replica_id=-1, max_wait_ms=60000, min_bytes=1, max_bytes=1000,
                    isolation_level=0, session_id=0,
                    session_epoch=-1, topics=[{"topic": "t", "partitions": [part]}],
                    forgotten_topics_data=[], rack_id="")  # fmt: skip
    for c in connections[1:]:
        c.send(waiting, 11)
    time.sleep(0.5)
    before = cpu_ticks(b.pid)
    time.sleep(2)
    assert cpu_ticks(b.pid) - before <= 5
