"""Tiered topics at a real broker: which properties it refuses and how, what it shows of them, and
what clients are told of offsets that are in remote storage only.  Nothing is copied here; where a
test needs that, it says what counts as copied."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import admin as confluent_admin

import kdirect
from kdirect.broker.config import BrokerConfig
from kdirect.errors import ConfigError, TieredOffsetError
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.format.schema import build
from kdirect.log import checkpoint
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition
from kdirect.wire.channel import Channel
from kdirect.wire.connection import Connection
from tests.broker.test_topic_properties import alter, create, described

TIERED = {"remote.storage.enable": "true"}
SECRET = "hunter2-of-the-store"
NOWHERE = "s3://bucket/logs?endpoint_override=127.0.0.1:9&scheme=http&region=us-east-1"
TP = TopicPartition("t", 0)
HOUR = 3_600_000


def properties(directory: Path, **more: Any) -> dict[str, Any]:
    return {
        "log.dirs": str(directory / "log"),
        "remote.log.storage.system.enable": "true",
        "remote.log.storage.uri": NOWHERE,
        "rsm.config.access_key": "a key",
        "rsm.config.secret_key": SECRET,
        **{name.replace("_", "."): value for name, value in more.items()},
    }


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Any]:
    with kdirect.Broker(properties=properties(tmp_path)) as b:
        yield b


def admin(broker: Any) -> confluent_admin.AdminClient:
    return confluent_admin.AdminClient(
        {"bootstrap.servers": broker.bootstrap_servers, "log_level": 0}
    )


@pytest.fixture
def client(tiers: Any) -> Any:
    return admin(tiers)


def refused(call: Any, words: str) -> None:
    with pytest.raises(confluent_kafka.KafkaException) as e:
        call()
    error = e.value.args[0]
    assert error.name() == "INVALID_CONFIG" and re.search(words, error.str()), error.str()


# -- which properties ------------------------------------------------------------------------------

WRONG: tuple[tuple[dict[str, str], str], ...] = (
    ({"retention.ms": "1000", "local.retention.ms": "1001"},
     r"local\.retention\.ms: '1001'.*above retention\.ms, which is 1000; give at most 1000"),
    ({"retention.ms": "1000", "local.retention.ms": "-1"}, r"local\.retention\.ms: '-1'"),
    ({"local.retention.ms": "604800001"}, r"above retention\.ms, which is 604800000"),
    ({"retention.bytes": "9", "local.retention.bytes": "10"},
     r"local\.retention\.bytes: '10'.*above retention\.bytes, which is 9"),
    ({"retention.bytes": "9", "local.retention.bytes": "-1"}, r"local\.retention\.bytes: '-1'"),
    ({"remote.log.copy.disable": "true", "local.retention.ms": "5"},
     r"local\.retention\.ms: '5'.*remote\.log\.copy\.disable=true.*-2"),
    ({"remote.log.copy.disable": "true", "local.retention.bytes": "5"},
     r"local\.retention\.bytes: '5'.*give -1, which is retention\.bytes, or -2"),
    ({"cleanup.policy": "compact"}, "what is compacted is not tiered"),
    ({"local.retention.ms": "5", "remote.copy.lag.ms": "6"}, r"remote\.copy\.lag\.ms: '6'"),
    ({"retention.bytes": "5", "remote.copy.lag.bytes": "6"}, r"remote\.copy\.lag\.bytes: '6'"),
)  # fmt: skip
WRONG_ALONE = (
    ("remote.copy.lag.ms", "-2", "at least -1"),
    ("local.retention.ms", "-3", "at least -2"),
    ("cleanup.policy", "keep", "delete, compact"),
    ("remote.log.client.access", "presigned", "inherit, broker"),
)


@pytest.mark.parametrize(("own", "words"), WRONG, ids=[" ".join(own) for own, _ in WRONG])
def test_what_does_not_go_together(client: Any, own: dict[str, str], words: str) -> None:
    refused(lambda: create(client, "t", TIERED | own), words)
    refused(lambda: create(client, "t", TIERED | own, validate_only=True), words)
    create(client, "t", own)  # it counts for tiered topics only
    refused(lambda: alter(client, "t", "remote.storage.enable", "true"), words)
    assert described(client, "t")["remote.storage.enable"] == ("false", False)


@pytest.mark.parametrize(("name", "value", "words"), WRONG_ALONE)
def test_what_no_topic_may_have(client: Any, name: str, value: str, words: str) -> None:
    refused(lambda: create(client, "t", TIERED | {name: value}), words)
    create(client, "t", TIERED)
    refused(lambda: alter(client, "t", name, value), words)
    create(client, "plain", {})
    refused(lambda: alter(client, "plain", name, value), words)


def test_what_is_allowed_and_shown(client: Any, tiers: Any) -> None:
    own = {
        "remote.storage.enable": "true", "local.retention.ms": "1000", "retention.ms": "1000",
        "local.retention.bytes": "-1", "remote.copy.lag.ms": "-1", "remote.copy.lag.bytes": "0",
        "remote.log.copy.disable": "false", "remote.log.delete.on.disable": "true",
        "remote.log.client.access": "broker",
    }  # fmt: skip
    create(client, "t", own)
    create(client, "plain", {"local.retention.ms": "999999999999"})  # counts for tiered topics only
    shown = described(client, "t")
    assert {name: shown[name] for name in own} == {n: (v, True) for n, v in own.items()}
    plain = described(client, "plain")
    assert plain["local.retention.bytes"] == ("-2", False)
    assert plain["remote.storage.enable"] == ("false", False)
    config = tiers.server.logs.partitions[TP].config
    assert config.remote_storage and config.remote_client_access == "broker"
    alter(client, "t", "remote.log.copy.disable", "true")
    assert tiers.server.logs.partitions[TP].config.remote_copy_disable
    refused(lambda: alter(client, "t", "local.retention.ms", "999"), "remote.log.copy.disable=true")


def test_switching_a_topic_off_needs_a_word_about_its_remote_part(client: Any, tiers: Any) -> None:
    create(client, "t", TIERED)
    partition = tiers.server.logs.partitions[TP]
    words = "remote.storage.enable: 'false'.*remote.log.delete.on.disable=true"
    refused(lambda: alter(client, "t", "remote.storage.enable", "false"), words)
    delete = confluent_admin.AlterConfigOpType.DELETE
    refused(lambda: alter(client, "t", "remote.storage.enable", None, delete), words)
    where = confluent_admin.ConfigResource(
        confluent_admin.RESOURCE_TOPIC, "t", set_config={"retention.ms": "5"}
    )
    refused(lambda: client.alter_configs([where])[where].result(10), words)
    assert partition.is_tiered
    alter(client, "t", "remote.log.delete.on.disable", "true")
    alter(client, "t", "remote.storage.enable", "false")
    assert not partition.is_tiered
    alter(client, "t", "remote.log.delete.on.disable", "false")  # it is off already
    alter(client, "t", "remote.storage.enable", "true")
    assert partition.is_tiered


def test_internal_topics_are_not_tiered(client: Any, tiers: Any) -> None:
    words = "internal topics are not tiered"
    refused(lambda: create(client, "__remote_log_metadata", TIERED), words)
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": tiers.bootstrap_servers, "group.id": "g", "log_level": 0}
    )
    create(client, "t", {})
    consumer.commit(offsets=[confluent_kafka.TopicPartition("t", 0, 0)], asynchronous=False)
    consumer.close()
    refused(lambda: alter(client, "__consumer_offsets", "remote.storage.enable", "true"), words)


def test_without_the_brokers_switch_no_topic_is_tiered(broker: Any) -> None:
    client = admin(broker)
    words = "remote.storage.enable: 'true'.*remote.log.storage.system.enable=true"
    refused(lambda: create(client, "t", TIERED), words)
    create(client, "t", {})
    refused(lambda: alter(client, "t", "remote.storage.enable", "true"), words)


def test_a_broker_that_has_tiered_topics_does_not_start_without(
    tmp_path: Path, broker_process: Any
) -> None:
    given = properties(tmp_path)
    with kdirect.Broker(properties=given) as b:
        client = admin(b)
        for name in ("b", "a", "plain"):
            create(client, name, TIERED if name != "plain" else {})
        del client
    off = {n: v for n, v in given.items() if not n.startswith(("remote.", "rsm."))}
    words = r"topics a, b are tiered; .*remote\.log\.storage\.uri"
    with pytest.raises(ConfigError, match=words), kdirect.Broker(properties=off):
        pass
    with pytest.raises(AssertionError, match=r"topics a, b are tiered"):
        broker_process(tmp_path / "log")
    with kdirect.Broker(properties=given) as b:
        assert b.server.logs.partitions[TopicPartition("a", 0)].is_tiered


# -- the broker's own ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"remote.log.storage.uri": None}, "remote.log.storage.uri is missing"),
        ({"remote.log.storage.uri": "bucket/logs"}, "names no kind of store"),
        ({"remote.log.storage.uri": "s3://me:topsecret@bucket/x"}, "holds credentials"),
        ({"remote.log.storage.uri": "s3://bucket/x?secret_key=topsecret"}, "holds credentials"),
        ({"log.local.retention.ms": "5", "log.retention.ms": "4"}, "log.local.retention.ms: '5'"),
        ({"log.local.retention.bytes": "-1", "log.retention.bytes": "4"}, "at most 4, or -2"),
        ({"remote.log.reader.threads": "0"}, "at least 1"),
        ({"remote.log.client.access": "direct"}, "config, presigned, broker"),
        ({"rsm.confg.x": "1"}, "unknown option 'rsm.confg.x'"),
        ({"rsm.config.": "1"}, "unknown option 'rsm.config.'"),
    ],
    ids=str,
)
def test_what_is_refused_of_the_broker(tmp_path: Path, own: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as e:
        BrokerConfig(properties(tmp_path) | own)
    assert "topsecret" not in str(e.value) and SECRET not in str(e.value)


def test_defaults_are_kafkas() -> None:
    config = BrokerConfig({})
    for name, value in {
        "remote.log.storage.system.enable": False,
        "remote.log.manager.copier.thread.pool.size": 10,
        "remote.log.manager.expiration.thread.pool.size": 10,
        "remote.log.manager.task.interval.ms": 30_000,
        "remote.log.manager.copy.max.bytes.per.second": (1 << 63) - 1,
        "remote.log.manager.fetch.max.bytes.per.second": (1 << 63) - 1,
        "remote.log.reader.threads": 10,
        "remote.log.reader.max.pending.tasks": 100,
        "remote.fetch.max.wait.ms": 500,
        "remote.list.offsets.request.timeout.ms": 30_000,
        "remote.log.index.file.cache.total.size.bytes": 1 << 30,
        "log.local.retention.ms": -2,
        "log.local.retention.bytes": -2,
        "rlmm.config.remote.log.metadata.topic.replication.factor": 1,  # it is alone
    }.items():
        assert config[name] == value, name
    clustered = BrokerConfig({"zookeeper.connect": "127.0.0.1:1"})
    assert clustered["rlmm.config.remote.log.metadata.topic.replication.factor"] == 3


def test_stock_properties_of_a_plugin_are_taken_without_effect() -> None:
    given = {
        "remote.log.storage.manager.class.name": "org.example.Store",
        "remote.log.metadata.manager.listener.name": "PLAINTEXT",
        "remote.log.manager.thread.pool.size": "2",
    }
    assert set(BrokerConfig(given).ignored) == set(given)


def test_secrets_are_shown_nowhere(
    tmp_path: Path, client: Any, tiers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    where = confluent_admin.ConfigResource(confluent_admin.RESOURCE_BROKER, "1")
    shown = client.describe_configs([where])[where].result(10)
    row = shown["rsm.config.secret_key"]
    assert row.value is None and row.is_sensitive and row.is_read_only
    assert "rsm.config.*" not in shown
    assert shown["remote.log.storage.uri"].value == NOWHERE
    assert all(SECRET not in str(r.value) for r in shown.values())
    config = BrokerConfig(properties(tmp_path))
    assert config["rsm.config.secret_key"] == SECRET and "rsm.config.*" not in config
    assert SECRET not in repr(config) and SECRET not in caplog.text


# -- what clients get ------------------------------------------------------------------------------


def half_cold(broker: Any, client: Any) -> Partition:
    """A topic with 40 records: [0, 20) are in remote storage only."""
    create(client, "t", TIERED | {"local.retention.ms": "1000"})
    partition: Partition = broker.server.logs.partitions[TP]
    producer = kdirect.Producer({"bootstrap.servers": broker.bootstrap_servers, "transport": "tcp"})
    old = int(time.time() * 1000) - HOUR
    for _ in range(4):
        for i in range(10):
            producer.produce("t", value=b"v%d" % i, partition=0, timestamp=old)
        producer.flush()
        partition.roll()
    producer.close()
    assert partition.log_end_offset == 40
    partition.note_tiered(20)
    partition.apply_retention(old + HOUR)
    assert partition.local_log_start_offset == 20
    return partition


def list_offset(connection: Any, timestamp: int, version: int) -> tuple[int, int]:
    part = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": timestamp}
    request = build(
        p.ListOffsetsRequest,
        replica_id=-1,
        isolation_level=0,
        topics=[{"name": "t", "partitions": [part]}],
    )
    found = connection.call(request, version).topics[0].partitions[0]
    return found.error_code, found.offset


def test_the_ends_of_the_log(tiers: Any, client: Any, raw: Any) -> None:
    half_cold(tiers, client)
    connection = raw(tiers.bootstrap_servers)
    for version in range(1, 11):
        assert list_offset(connection, -2, version) == (0, 0), "the whole log's start"
        assert list_offset(connection, -1, version) == (0, 40)
        local = (0, 20) if version >= 8 else (ErrorCode.UNSUPPORTED_VERSION, -1)
        assert list_offset(connection, -4, version) == local
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": tiers.bootstrap_servers, "group.id": "g", "log_level": 0}
    )
    assert consumer.get_watermark_offsets(confluent_kafka.TopicPartition("t", 0)) == (0, 40)
    consumer.close()


def test_a_topic_that_is_not_tiered_has_one_start(broker: Any, raw: Any) -> None:
    client = admin(broker)
    create(client, "t", {})
    for version in (8, 10):
        assert list_offset(raw(), -4, version) == list_offset(raw(), -2, version) == (0, 0)


def test_records_are_deleted_across_both_parts(tiers: Any, client: Any, raw: Any) -> None:
    partition = half_cold(tiers, client)
    connection = raw(tiers.bootstrap_servers)

    def delete(offset: int) -> int:
        at = confluent_kafka.TopicPartition("t", 0, offset)
        return int(client.delete_records([at])[at].result(10).low_watermark)

    assert delete(7) == 7 and partition.first_kept_offset == 20
    starts = checkpoint.read_offsets(partition.directory.parent / checkpoint.LOG_STARTS)
    assert starts[TP] == 7, "on disk before it was answered"
    assert list_offset(connection, -2, 8) == (0, 7) and list_offset(connection, -4, 8) == (0, 20)
    assert delete(30) == 30 and partition.first_kept_offset == 30
    assert list_offset(connection, -2, 8) == (0, 30) == list_offset(connection, -4, 8)


def test_a_killed_broker_keeps_the_log_start_that_it_answered(
    tmp_path: Path, broker_process: Any, raw: Any
) -> None:
    """Remote objects below it may be gone by then."""
    given = {n.replace(".", "_"): v for n, v in properties(tmp_path).items()
             if n.startswith("remote.")}  # fmt: skip
    process = broker_process(**given)
    create(admin(process), "t", TIERED)
    producer = kdirect.Producer(
        {"bootstrap.servers": process.bootstrap_servers, "transport": "tcp"}
    )
    for i in range(40):
        producer.produce("t", value=b"v%d" % i, partition=0)
    producer.close()
    for offset in (7, 23):
        with kdirect.connect({"bootstrap.servers": process.bootstrap_servers}) as session:
            session.admin.delete_records({TP: offset})
        process.kill()
        process.start()
        connection = raw(process.bootstrap_servers)
        assert list_offset(connection, -2, 8) == (0, offset) == list_offset(connection, -4, 8)


def fetch(connection: Any, offset: int, version: int) -> Any:
    part = {
        "partition": 0, "current_leader_epoch": -1, "fetch_offset": offset,
        "last_fetched_epoch": -1, "log_start_offset": -1, "partition_max_bytes": 1 << 20,
    }  # fmt: skip
    request = build(
        p.FetchRequest,
        replica_id=-1,
        max_wait_ms=0,
        min_bytes=1,
        max_bytes=1 << 20,
        isolation_level=0,
        session_id=0,
        session_epoch=-1,
        topics=[{"topic": "t", "partitions": [part]}],
        forgotten_topics_data=[],
    )
    return connection.call(request, version).responses[0].partitions[0]


def test_a_fetch_of_what_no_metadata_names_is_an_error(tiers: Any, client: Any, raw: Any) -> None:
    """Never OFFSET_OUT_OF_RANGE, by which a consumer would skip what there is, and never records of
    another offset."""
    half_cold(tiers, client)
    connection = raw(tiers.bootstrap_servers)
    for version in (4, 11, 12):
        for offset in (0, 19):
            cold = fetch(connection, offset, version)
            assert cold.error_code == ErrorCode.KAFKA_STORAGE_ERROR and not cold.records
        hot = fetch(connection, 20, version)
        assert hot.error_code == 0 and int.from_bytes(hot.records[:8], "big") == 20
        assert fetch(connection, 41, version).error_code == ErrorCode.OFFSET_OUT_OF_RANGE


def test_access_to_a_cold_offset_is_refused_by_name(tiers: Any, client: Any) -> None:
    half_cold(tiers, client)
    host, _, port = tiers.bootstrap_servers.rpartition(":")
    connection = Connection(host, int(port), timeout_ms=10_000)
    channel = Channel(connection, "shm")
    try:
        for offset in (0, 19, -2):
            grant = channel.consume_access([(TP, offset, -1)]).partitions[0]
            assert grant.error_code == TieredOffsetError.code and grant.file_id == -1, offset
            assert "of t-0 is in remote storage only" in grant.error_message
        hot = channel.consume_access([(TP, 20, -1), (TP, 5, -1)]).partitions
        assert (hot[0].error_code, hot[0].start_offset, hot[0].log_start_offset) == (0, 20, 0)
        assert hot[1].error_code == TieredOffsetError.code, "one does not fail the other"
    finally:
        channel.close()
        connection.close()


def test_a_consumer_over_shm_goes_over_to_fetch(tiers: Any, client: Any) -> None:
    """It asks for access, is refused, and asks by Fetch; what is hot it READs."""
    half_cold(tiers, client)
    before = tiers.statistics()["broker_requests_by_api"].get("Fetch", 0)
    with kdirect.Consumer(
        {"bootstrap.servers": tiers.bootstrap_servers, "transport": "shm", "group.id": "g"}
    ) as consumer:
        consumer.assign([kdirect.TopicPartition("t", 0)])
        consumer.seek(kdirect.TopicPartition("t", 0), 20)
        got = [consumer.poll(5) for _ in range(20)]
        assert [m.offset() for m in got if m is not None] == list(range(20, 40))
        assert tiers.statistics()["broker_requests_by_api"].get("Fetch", 0) == before
        consumer.seek(kdirect.TopicPartition("t", 0), 3)
        assert [consumer.poll(0.1) for _ in range(10)] == [None] * 10
    assert tiers.statistics()["broker_requests_by_api"]["Fetch"] > before


def test_what_is_not_copied_does_not_go(tiers: Any, client: Any) -> None:
    """While the store is away a tiered topic keeps everything here that retention keeps at all,
    whatever local retention says."""
    create(client, "t", TIERED | {"local.retention.ms": "1", "local.retention.bytes": "1",
                                  "retention.ms": "-1"})  # fmt: skip
    partition: Partition = tiers.server.logs.partitions[TP]
    producer = kdirect.Producer({"bootstrap.servers": tiers.bootstrap_servers, "transport": "tcp"})
    for i in range(5):
        producer.produce("t", value=b"v%d" % i, partition=0)
        producer.flush()
        partition.roll()
    producer.close()
    time.sleep(0.01)
    assert tiers.server.logs.apply_retention(int(time.time() * 1000) + HOUR) == 0
    assert (partition.log_start_offset, partition.local_log_start_offset) == (0, 0)
    assert partition.size > 0 and len(partition.sealed_segments()) >= 4
