"""Compacted topics of a running broker: the cleaner's threads beside producers and readers."""

from __future__ import annotations

import random
import time
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import admin as confluent_admin

import kdirect
from kdirect.broker.cleaner import CHECKPOINT, LogCleaner
from kdirect.broker.config import BrokerConfig
from kdirect.format import protocol as p
from kdirect.format.schema import build
from kdirect.log.checkpoint import read_offsets
from kdirect.log.config import LogConfig
from kdirect.log.manager import LogManager
from kdirect.model import TopicPartition
from tests.log.compacted_logs import NOW, fill, keyed, last_of_each_key, records_of
from tests.support import wait_until

QUICK = {
    "cleanup.policy": "compact",
    "segment.bytes": "16384",
    "min.cleanable.dirty.ratio": "0.1",
}
SOON = {"log.cleaner.backoff.ms": "50"}


def create(servers: str, name: str, **configs: str) -> confluent_admin.AdminClient:
    client = confluent_admin.AdminClient({"bootstrap.servers": servers, "log_level": 0})
    new = confluent_admin.NewTopic(name, 1, 1, config=configs)
    client.create_topics([new])[name].result(10)
    return client


def produce(servers: str, topic: str, records: list[tuple[Any, Any]], **settings: Any) -> list[Any]:
    """What became of each record: None, or its error."""
    out: list[Any] = []
    settings = {"bootstrap.servers": servers, "batch.size": 4000, "log_level": 0, **settings}
    client = confluent_kafka.Producer(settings)
    for key, value in records:
        client.produce(
            topic, value, key, on_delivery=lambda error, _: out.append(error), partition=0
        )
        client.poll(0)
    assert client.flush(30) == 0
    return out


def table_by_tcp(servers: str, topic: str) -> tuple[dict[bytes, bytes], int]:
    """What a table has that confluent-kafka's consumer makes, and from how many records."""
    settings = {"bootstrap.servers": servers, "group.id": "g", "enable.partition.eof": True}
    consumer = confluent_kafka.Consumer({**settings, "log_level": 0})
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
    table: dict[bytes, bytes] = {}
    count = 0
    while True:
        message = consumer.poll(10)
        assert message is not None
        if message.error():
            assert message.error().code() == confluent_kafka.KafkaError._PARTITION_EOF
            break
        count += 1
        _put(table, message.key(), message.value())
    consumer.close()
    return table, count


def _put(table: dict[bytes, bytes], key: bytes | None, value: bytes | None) -> None:
    assert key is not None
    if value is None:
        table.pop(key, None)
    else:
        table[key] = value


class DirectTable:
    """A table that kdirect's consumer keeps up with, over shm."""

    def __init__(self, servers: str, topic: str) -> None:
        self.consumer = kdirect.Consumer(
            {"bootstrap.servers": servers, "group.id": "d", "transport": "shm"}
        )
        self.consumer.assign({kdirect.TopicPartition(topic, 0): 0})
        self.table: dict[bytes, bytes] = {}
        self.position = 0

    def read_to(self, end: int) -> None:
        deadline = time.monotonic() + 30
        while self.position < end:
            message = self.consumer.poll(0.2)
            if message is None:
                at = self.consumer.position(kdirect.TopicPartition("t", 0))
                self.position = max(self.position, at)
                assert time.monotonic() < deadline, (self.position, end)
                continue
            assert not message.error(), message.error()
            assert message.offset() >= self.position, "offsets rise, whatever is missing"
            self.position = message.offset() + 1
            _put(self.table, message.key(), message.value())


def test_the_cleaner_works_beside_producers_and_readers(broker_process, tmp_path, seed) -> None:
    """Readers that are behind, one-sided and over TCP, one that keeps up, and one that begins
    anew see the same table; so does a broker that starts again, which goes on at its checkpoint."""
    rng = random.Random(seed)
    server = broker_process(**SOON)
    servers = server.bootstrap_servers
    create(servers, "t", **QUICK)
    table: dict[bytes, bytes] = {}
    behind, beside = DirectTable(servers, "t"), DirectTable(servers, "t")
    end = 0
    for codec in ("none", "gzip", "snappy", "lz4", "zstd", "none"):
        records = [
            (b"k%d" % rng.randrange(50), rng.choice([None, rng.randbytes(200)])) for _ in range(600)
        ]
        assert not any(produce(servers, "t", records, **{"compression.type": codec}))
        for key, value in records:
            _put(table, key, value)
        end += len(records)
        beside.read_to(end)
        assert beside.table == table
        if codec == "none":
            behind.read_to(end // 2)
    wait_until(lambda: table_by_tcp(servers, "t")[1] < end // 2, 30)
    assert table_by_tcp(servers, "t")[0] == table
    behind.read_to(end)
    assert behind.table == table, "it has met old files, gaps and new ones"
    fresh = DirectTable(servers, "t")
    fresh.read_to(end)
    assert fresh.table == table
    for reader in (behind, beside, fresh):
        reader.consumer.close()
    server.stop()
    offsets = read_offsets(server.log_dir / CHECKPOINT)
    assert offsets[TopicPartition("t", 0)] > end // 2
    again = broker_process(server.log_dir, **SOON)
    assert table_by_tcp(again.bootstrap_servers, "t")[0] == table


def test_a_topic_that_is_created_again_is_compacted_from_its_start(tmp_path) -> None:
    """What was noted of the log that had its name before does not count."""
    tp = TopicPartition("t", 0)
    rules = LogConfig(segment_bytes=16384, compacts=True, deletes=False)
    with LogManager([tmp_path], rules) as logs:
        config = BrokerConfig({"log.dirs": str(tmp_path)})
        cleaner = LogCleaner(config, logs, lambda: NOW)
        fill(logs.create_partition(tp), random.Random(1), 40, 400)
        assert cleaner.clean_one() and not cleaner.clean_one()
        cleaned_to = read_offsets(tmp_path / CHECKPOINT)[tp]
        logs.delete_topic("t")
        again = logs.create_partition(tp)
        appended = fill(again, random.Random(2), 60, 20)
        assert again.log_end_offset > cleaned_to
        assert cleaner.clean_one() and not cleaner.clean_one()
        kept = records_of(again)
        assert last_of_each_key(kept) == last_of_each_key(appended)
        assert len(kept) <= 20, "one record for each key"


@pytest.mark.parametrize("meanwhile", [False, True])
def test_what_comes_after_a_cut_is_compacted(tmp_path, meanwhile) -> None:
    """A copy is cut, also while it is compacted, and goes on above where its last cleaning ended
    before the cleaner looks at it."""
    tp = TopicPartition("t", 0)
    rules = LogConfig(segment_bytes=16384, compacts=True, deletes=False, min_cleanable_ratio=0)
    with LogManager([tmp_path], rules) as logs:
        cleaner = LogCleaner(BrokerConfig({"log.dirs": str(tmp_path)}), logs, lambda: NOW)
        log = logs.create_partition(tp)
        fill(log, random.Random(1), 40, 400)

        def cut(bytes_: int) -> None:
            log.truncate_to(min(log.log_end_offset, cleaned_to - 100))

        cleaned_to = log.log_end_offset
        if meanwhile:
            cleaner._throttle = cut
        cleaner.clean_one()
        cleaner._throttle = lambda bytes_: None
        cut(0)
        for i in range(8):
            assert log.append(keyed([(b"same", b"%d" % i)] * 10), NOW).error == 0
        assert log.log_end_offset <= cleaned_to
        fill(log, random.Random(2), 60, 20)
        assert log.log_end_offset > cleaned_to
        assert cleaner.clean_one()
        kept = [r for r in records_of(log) if r.key == b"same"]
        assert [r.value for r in kept] == [b"7"]
        assert read_offsets(tmp_path / CHECKPOINT)[tp] == log.log_end_offset


def test_a_topic_that_is_deleted_while_it_is_compacted_is_no_failure(tmp_path, caplog) -> None:
    rules = LogConfig(segment_bytes=16384, compacts=True, deletes=False, file_delete_delay_ms=0)
    with LogManager([tmp_path], rules) as logs:
        cleaner = LogCleaner(BrokerConfig({"log.dirs": str(tmp_path)}), logs, lambda: NOW)
        log = logs.create_partition(TopicPartition("t", 0))
        fill(log, random.Random(1), 40, 400)

        def delete(bytes_: int) -> None:
            if list(log.directory.glob("*.cleaned")):
                logs.delete_topic("t")

        cleaner._throttle = delete
        cleaner.clean_one()
        assert not logs.partitions and not list(tmp_path.glob("t-0*"))
        assert cleaner.statistics()["cleaner_uncleanable_partitions"] == 0
        assert not [r for r in caplog.records if r.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("policy", "code"), [("compact", "POLICY_VIOLATION"), ("compact,delete", None)]
)
def test_only_what_the_policy_lets_go_is_deleted_on_demand(broker, policy, code) -> None:
    """DeleteRecords is refused for a topic that is compacted and nothing else, as Kafka does."""
    servers = broker.bootstrap_servers
    client = create(servers, "t", **{"cleanup.policy": policy})
    assert not any(produce(servers, "t", [(b"k", b"1"), (b"l", b"2")]))
    where = confluent_kafka.TopicPartition("t", 0, 1)
    deleted = client.delete_records([where])[where]
    if code is None:
        assert deleted.result(10).low_watermark == 1
    else:
        with pytest.raises(confluent_kafka.KafkaException) as e:
            deleted.result(10)
        assert e.value.args[0].name() == code
    assert broker.server.logs.partitions[TopicPartition("t", 0)].log_start_offset == (not code)


@pytest.mark.parametrize("codec", ["none", "gzip", "zstd"])
def test_records_without_a_key_are_refused(broker, codec) -> None:
    servers = broker.bootstrap_servers
    create(servers, "t", **{"cleanup.policy": "compact,delete"})
    settings = {"compression.type": codec, "linger.ms": 50}
    errors = produce(servers, "t", [(b"k" * 50, b"1" * 100), (None, b"2" * 100)], **settings)
    assert [e.name() for e in errors if e] == ["INVALID_RECORD"] * len(errors)
    assert not any(produce(servers, "t", [(b"k" * 50, b"1" * 100)] * 20, **settings))


@pytest.mark.parametrize("codec", [0, 1])
@pytest.mark.parametrize("version", [8, 9])
def test_a_refusal_names_the_records_without_a_key(broker, raw, codec, version) -> None:
    """In Kafka's words, so that a client can tell which of its records are at fault."""
    create(broker.bootstrap_servers, "t", **{"cleanup.policy": "compact"})
    records = [(b"k", b"1"), (None, b"2"), (b"k", b"3"), (None, b"4")]
    batch = keyed(records, codec=codec, timestamp_ms=int(time.time() * 1000))
    request = build(
        p.ProduceRequest,
        acks=1,
        timeout_ms=1000,
        topic_data=[{"name": "t", "partition_data": [{"index": 0, "records": batch}]}],
    )
    (answer,) = raw().call(request, version).responses[0].partition_responses
    why = "Compacted topic cannot accept message without key in topic partition t-0"
    found = [(e.batch_index, e.batch_index_error_message) for e in answer.record_errors]
    assert (answer.error_code, found) == (87, [(1, why), (3, why)])
    assert answer.error_message.startswith(
        "One or more records have been rejected due to 2 record errors in total, and only showing"
        f" the first three errors at most: [RecordError(batchIndex=1, message='{why}'), "
    )


@pytest.mark.parametrize("empty", [False, True], ids=["a-record", "no-record"])
def test_kdirects_producer_writes_a_compacted_topic(broker, empty) -> None:
    """Its records are checked as all others; those of a topic that becomes compacted, too, also if
    the head that the producer was granted has no record yet."""
    servers = broker.bootstrap_servers
    client = create(servers, "t", **{"cleanup.policy": "delete"})
    errors = []
    producer = kdirect.Producer({"bootstrap.servers": servers, "transport": "shm"})
    far = int(time.time() * 1000) + 10 * 86_400_000  # is refused, after the head was granted
    producer.produce(
        "t", b"1", None, timestamp=far if empty else 0, on_delivery=lambda e, m: errors.append(e)
    )
    producer.flush(10)
    assert [e is None for e in errors] == [not empty], "any topic takes a record without a key"
    head = broker.server.logs.partitions[TopicPartition("t", 0)].head
    assert head is not None and (head.size == 0) is empty
    where = confluent_admin.ConfigResource(confluent_admin.RESOURCE_TOPIC, "t")
    where.add_incremental_config(
        confluent_admin.ConfigEntry(
            "cleanup.policy",
            "compact",
            incremental_operation=confluent_admin.AlterConfigOpType.SET,
        )
    )
    client.incremental_alter_configs([where])[where].result(10)
    for key in (None, b"k"):
        producer.produce("t", b"1", key, on_delivery=lambda e, m: errors.append(e))
        producer.flush(20)
    assert errors[1] is not None and errors[2] is None
    producer.close()


def test_what_cannot_be_compacted_is_counted_and_left_alone(broker_process) -> None:
    server = broker_process(**SOON)
    servers = server.bootstrap_servers
    client = create(servers, "t", **{**QUICK, "min.cleanable.dirty.ratio": "1"})
    produce(servers, "t", [(b"k%d" % i, b"x" * 1000) for i in range(100)])
    path = sorted((server.log_dir / "t-0").glob("*.log"))[1]
    with open(path, "r+b") as file:
        file.seek(500)
        file.write(b"damaged")
    where = confluent_admin.ConfigResource(confluent_admin.RESOURCE_TOPIC, "t")
    where.add_incremental_config(
        confluent_admin.ConfigEntry(
            "min.cleanable.dirty.ratio",
            "0",
            incremental_operation=confluent_admin.AlterConfigOpType.SET,
        )
    )
    client.incremental_alter_configs([where])[where].result(10)
    wait_until(lambda: "is not tried again" in server.errors.read_text(), 20)
    assert not any(produce(servers, "t", [(b"a", b"b")])), "its partition goes on"
    assert not list((server.log_dir / "t-0").glob("*.cleaned"))


def test_topics_are_compacted_by_the_brokers_policy(broker_process) -> None:
    server = broker_process(**SOON, **{"log.cleanup.policy": "compact"})
    servers = server.bootstrap_servers
    create(servers, "t")
    assert [e.name() for e in produce(servers, "t", [(None, b"1")]) if e] == ["INVALID_RECORD"]
    assert not any(produce(servers, "t", [(b"k", b"1")]))
    consumer = confluent_kafka.Consumer({"bootstrap.servers": servers, "group.id": "g"})
    place = confluent_kafka.TopicPartition("t", 0, 1)
    consumer.commit(offsets=[place], asynchronous=False)
    assert consumer.committed([place], timeout=10)[0].offset == 1
    consumer.close()
