"""Properties that are changed while the broker runs: they apply at once, are told with their
sources, and survive a restart."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

import kdirect
from kdirect.broker.changed_properties import PROPERTIES_FILE, value_of_group
from kdirect.broker.config import BrokerConfig
from kdirect.broker.member_properties import MemberProperties, usable_values
from kdirect.cluster import paths
from kdirect.errors import ConfigError, CorruptLogError, StorageFullError
from kdirect.format import protocol as p
from kdirect.format.schema import build
from tests.support import wait_until

BROKER, LOGGER, METRICS, GROUP = 4, 8, 16, 32
DYNAMIC, FOR_ALL, FILE, DEFAULT = 2, 3, 4, 5


def alter(connection, kind, name, *changes, validate_only=False):
    """Codes of an IncrementalAlterConfigs; `changes`: (property, value), None deletes."""
    configs = [
        {"name": n, "config_operation": 1 if value is None else 0, "value": value}
        for n, value in changes
    ]
    resource = {"resource_type": kind, "resource_name": name, "configs": configs}
    request = build(
        p.IncrementalAlterConfigsRequest, resources=[resource], validate_only=validate_only
    )
    (row,) = connection.call(request, 1).responses
    return row.error_code


def described(connection, kind, name):
    """Property -> (value, source)."""
    resource = {"resource_type": kind, "resource_name": name, "configuration_keys": None}
    request = build(p.DescribeConfigsRequest, resources=[resource], include_synonyms=True)
    (row,) = connection.call(request, 4).results
    assert row.error_code == 0, row.error_message
    return {c.name: (c.value, c.config_source) for c in row.configs}


def test_a_group_goes_on_beside_a_value_that_somebody_wrote_into_the_store():
    name, broker = "consumer.session.timeout.ms", BrokerConfig({})
    own = broker["group.consumer.session.timeout.ms"]
    for text, value in (("50000", 50_000), ("soon", own), ("", own), ("-1", own)):
        assert value_of_group(name, {name: text}, broker) == value
    assert value_of_group(name, {}, broker) == own


def test_the_nearest_value_counts_and_comes_back(tmp_path, raw):
    with kdirect.Broker(log_dirs=tmp_path, log_retention_ms=5000) as b:
        kdirect.connect(b.bootstrap_servers).admin.create_topic("t", 1)
        connection = raw(b.bootstrap_servers)

        def told():
            broker = described(connection, BROKER, "1")["log.retention.ms"]
            return broker, described(connection, 2, "t")["retention.ms"][0]

        assert told() == (("5000", FILE), "5000")
        assert alter(connection, BROKER, "", ("log.retention.ms", "6000")) == 0
        assert told() == (("6000", FOR_ALL), "6000")
        assert alter(connection, BROKER, "1", ("log.retention.ms", "7000")) == 0
        assert told() == (("7000", DYNAMIC), "7000")
        assert described(connection, BROKER, "") == {"log.retention.ms": ("6000", FOR_ALL)}
    with kdirect.Broker(log_dirs=tmp_path, log_retention_ms=5000) as b:
        connection = raw(b.bootstrap_servers)
        (partition,) = [x for tp, x in b.server.logs.partitions.items() if tp.topic == "t"]
        assert partition.config.retention_ms == 7000
        assert told() == (("7000", DYNAMIC), "7000")
        assert alter(connection, BROKER, "1", ("log.retention.ms", None)) == 0
        assert told() == (("6000", FOR_ALL), "6000")
        assert alter(connection, BROKER, "", ("log.retention.ms", None)) == 0
        assert told() == (("5000", FILE), "5000")
        assert partition.config.retention_ms == 5000


def test_the_cleaners_limits_change_with_the_others(broker, raw):
    kdirect.connect(broker.bootstrap_servers).admin.create_topic(
        "t", 1, configs={"cleanup.policy": "compact"}
    )
    connection = raw()
    assert alter(connection, BROKER, "1", ("log.cleaner.min.cleanable.ratio", "0.25")) == 0
    assert described(connection, 2, "t")["min.cleanable.dirty.ratio"] == ("0.25", DYNAMIC)
    (partition,) = broker.server.logs.partitions.values()
    assert partition.config.min_cleanable_ratio == 0.25


def test_a_smaller_limit_holds_for_the_next_batch(broker, raw):
    """By a stock client, for a topic that is there and for one that comes later; a topic's own
    property goes before it."""
    session = kdirect.connect(broker.bootstrap_servers)
    session.admin.create_topic("t", 1)
    session.admin.create_topic("own", 1, configs={"max.message.bytes": "100000"})
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    resource = ConfigResource(ResourceType.BROKER, "1")
    resource.add_incremental_config(
        ConfigEntry("message.max.bytes", "1000", incremental_operation=AlterConfigOpType.SET)
    )
    admin.incremental_alter_configs([resource])[resource].result(10)
    session.admin.create_topic("later", 1)
    failed = {}
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "linger.ms": 0})
    for topic in ("t", "later", "own"):
        producer.produce(
            topic, b"x" * 5000, on_delivery=lambda e, m: failed.update({m.topic(): e is not None})
        )
    producer.flush(10)
    assert failed == {"t": True, "later": True, "own": False}


def test_what_cannot_be_is_refused_and_changes_nothing(broker, raw, tmp_path):
    connection = raw()
    before = described(connection, BROKER, "1")
    for name, value in (
        ("log.dirs", "/tmp/x"),
        ("log.retention.ms", "soon"),
        ("log.segment.bytes", "1"),
        ("log.preallocate", "false"),
        ("min.insync.replicas", "2"),  # there is one broker
        ("nonsense", "1"),
    ):
        for whose in ("", "1"):
            assert alter(connection, BROKER, whose, (name, value)) == 42, name
    assert alter(connection, BROKER, "2", ("log.retention.ms", "1000")) == 42
    assert alter(connection, BROKER, "1", ("log.retention.ms", "1"), validate_only=True) == 0
    assert described(connection, BROKER, "1") == before


def test_what_concerns_sasl_logins_is_kept_and_shown(tmp_path, raw):
    """As by a Kafka whose listeners are all PLAINTEXT, though nothing asks for it; librdkafka's
    tests set such a property of a broker."""
    name = "sasl.kerberos.min.time.before.relogin"
    resource = ConfigResource(ResourceType.BROKER, "1", set_config={name: "58000"})
    with kdirect.Broker(log_dirs=tmp_path) as b:
        admin = AdminClient({"bootstrap.servers": b.bootstrap_servers, "log_level": 0})
        connection = raw(b.bootstrap_servers)
        assert described(connection, BROKER, "1")[name] == ("60000", DEFAULT)
        admin.alter_configs([resource])[resource].result(10)
        assert described(connection, BROKER, "1")[name] == ("58000", DYNAMIC)
        for whose, value in (("", "59000"), ("1", "soon")):
            assert alter(connection, BROKER, whose, (name, value)) == 42
        assert alter(connection, BROKER, "1", ("sasl.enabled.mechanisms", "PLAIN")) == 42
        del admin
    with kdirect.Broker(log_dirs=tmp_path) as b:
        connection = raw(b.bootstrap_servers)
        assert described(connection, BROKER, "1")[name] == ("58000", DYNAMIC)
        assert alter(connection, BROKER, "1", (name, None)) == 0
        assert described(connection, BROKER, "1")[name] == ("60000", DEFAULT)
    with kdirect.Broker(log_dirs=tmp_path, properties={name: "1"}) as b:
        assert described(raw(b.bootstrap_servers), BROKER, "1")[name] == ("1", FILE)
        assert b.server.config.ignored == (name,), "and a warning names it"


def test_groups_and_subscriptions_keep_their_properties(tmp_path, raw):
    with kdirect.Broker(log_dirs=tmp_path) as b:
        connection = raw(b.bootstrap_servers)
        assert alter(connection, GROUP, "g", ("consumer.session.timeout.ms", "50000")) == 0
        assert alter(connection, GROUP, "g", ("consumer.session.timeout.ms", "1")) == 40
        assert alter(connection, GROUP, "g", ("share.session.timeout.ms", "50000")) == 40
        assert alter(connection, METRICS, "m", ("match", "client_id=a.*"), ("metrics", "*")) == 0
        assert alter(connection, METRICS, "m", ("match", "client_id=(")) == 40
        assert alter(connection, METRICS, "m", ("match", "shoe=a")) == 40
        assert alter(connection, GROUP, "", ("consumer.session.timeout.ms", "50000")) == 42
    with kdirect.Broker(log_dirs=tmp_path) as b:
        connection = raw(b.bootstrap_servers)
        group = described(connection, GROUP, "g")
        assert group["consumer.session.timeout.ms"] == ("50000", 8)
        assert group["consumer.heartbeat.interval.ms"] == ("5000", DEFAULT)
        assert described(connection, METRICS, "m")["match"] == ("client_id=a.*", 7)
        for kind, name in ((GROUP, "g"), (METRICS, "m")):
            request = build(p.ListConfigResourcesRequest, resource_types=[kind])
            found = connection.call(request, 1).config_resources
            assert [(r.resource_type, r.resource_name) for r in found] == [(kind, name)]
        assert alter(connection, GROUP, "g", ("consumer.session.timeout.ms", None)) == 0
        request = build(p.ListConfigResourcesRequest, resource_types=[GROUP])
        assert connection.call(request, 1).config_resources == []


def beat(connection, group, member, epoch):
    fields = {"rebalance_timeout_ms": 60_000, "topic_partitions": []} if epoch == 0 else {}
    request = build(
        p.ConsumerGroupHeartbeatRequest,
        group_id=group,
        member_id=member,
        member_epoch=epoch,
        subscribed_topic_names=["t"] if epoch == 0 else None,
        **fields,
    )
    return connection.call(request, 1)


def test_a_groups_properties_hold_from_the_next_heartbeat_on(tmp_path, raw):
    limits = {
        "group_consumer_min_session_timeout_ms": 300,
        "group_consumer_min_heartbeat_interval_ms": 100,
    }
    with kdirect.Broker(log_dirs=tmp_path, **limits) as b:
        connection = raw(b.bootstrap_servers)
        names = ("consumer.session.timeout.ms", "consumer.heartbeat.interval.ms")
        joined = {g: beat(connection, g, "m", 0) for g in ("short", "other")}
        assert {a.heartbeat_interval_ms for a in joined.values()} == {5000}
        assert alter(connection, GROUP, "short", (names[0], "400"), (names[1], "150")) == 0
        for wrong in (("200", "150"), ("70000", "150"), ("400", "50"), ("400", "16000")):
            assert alter(connection, GROUP, "other", *zip(names, wrong, strict=True)) == 40
        assert alter(connection, GROUP, "other", (names[0], "400")) == 40  # heartbeats each 5000
        for group, interval in (("short", 150), ("other", 5000)):
            answer = beat(connection, group, "m", joined[group].member_epoch)
            assert (answer.error_code, answer.heartbeat_interval_ms) == (0, interval)
        time.sleep(1)
        codes = [beat(connection, g, "m", joined[g].member_epoch).error_code for g in joined]
        assert codes == [25, 0]  # UNKNOWN_MEMBER_ID: its session has ended


def test_levels_of_loggers(broker, raw):
    connection = raw()
    logger = logging.getLogger("kdirect.broker")
    before = logger.level
    try:
        assert alter(connection, LOGGER, "1", ("kdirect.broker", "DEBUG")) == 0
        assert logger.level == logging.DEBUG
        assert described(connection, LOGGER, "1")["kdirect.broker"] == ("DEBUG", 6)
        assert alter(connection, LOGGER, "1", ("kdirect.broker", "LOUD")) == 40
        assert alter(connection, LOGGER, "1", ("kdirect.broker", "OFF")) == 40
        assert alter(connection, LOGGER, "1", ("no.logger", "INFO")) == 40
        assert alter(connection, LOGGER, "", ("kdirect.broker", "INFO")) == 42
        assert alter(connection, LOGGER, "1", ("root", None)) == 42
        assert alter(connection, LOGGER, "1", ("kdirect.broker", None)) == 0
        assert logger.level == logging.NOTSET
    finally:
        logger.setLevel(before)


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"brokers": []})])
def test_a_damaged_file_is_an_error_with_its_name(tmp_path, text):
    with kdirect.Broker(log_dirs=tmp_path):
        pass
    (tmp_path / PROPERTIES_FILE).write_text(text)
    with pytest.raises(CorruptLogError, match=PROPERTIES_FILE):
        kdirect.Broker(log_dirs=tmp_path).start()


def test_a_value_that_is_no_longer_possible_is_an_error(tmp_path):
    document = {"version": 1, "brokers": {"1": {"min.insync.replicas": "3"}}}
    tmp_path.joinpath(PROPERTIES_FILE).write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=r"min\.insync\.replicas"):
        kdirect.Broker(log_dirs=tmp_path).start()


def test_values_of_the_broker_go_before_those_of_all():
    config = BrokerConfig({"message.max.bytes": "3000"})
    values = config.changed_by({"message.max.bytes": "4000"}, {})
    assert values["message.max.bytes"] == 4000 and config["message.max.bytes"] == 3000
    values = config.changed_by({"message.max.bytes": "4000"}, {"message.max.bytes": "5000"})
    config.change(values)
    assert config["message.max.bytes"] == 5000
    config.change(config.changed_by({}, {}))
    assert config["message.max.bytes"] == 3000


def test_what_a_store_says_that_cannot_be_has_no_effect(caplog):
    """Anybody may have written a cluster's store."""
    config = BrokerConfig({"log.retention.ms": "3000"})
    of_all = {"log.retention.ms": "soon", "nonsense": "1", "log.dirs": "/x", "log.preallocate": "0",
              "message.max.bytes": "4000", "log.roll.ms": "60000"}  # fmt: skip
    values = usable_values(config, [of_all, {"message.max.bytes": "5000"}])
    changed = {name: value for name, value in values.items() if value != config[name]}
    assert changed == {"message.max.bytes": 5000, "log.roll.ms": 60_000}
    for name in ("log.retention.ms", "nonsense", "log.dirs", "preallocation"):
        assert name in caplog.text


class FullLogs:
    """Logs whose properties apply once there is room, and when that was tried."""

    def __init__(self, failures):
        self.failures, self.config, self.tried = failures, None, []

    def reconfigure(self, config):
        self.tried.append(time.monotonic())
        if self.failures:
            raise self.failures.pop()
        self.config = config


async def member_with(logs, retention_ms="5000"):
    """The properties of a member in front of these logs, its metadata, and a function that tells
    of a change."""
    image = SimpleNamespace(
        broker_configs={paths.ALL_BROKERS: {"log.retention.ms": retention_ms}}, other_configs={}
    )
    told = []

    async def on_admin(work):
        await asyncio.get_running_loop().run_in_executor(None, work)

    properties = MemberProperties(lambda: SimpleNamespace(image=image), BrokerConfig({}), logs)
    await asyncio.wait_for(properties.follow(told.append, on_admin), 5)

    def change(value):
        image.broker_configs[paths.ALL_BROKERS] = {"log.retention.ms": value}
        told[0](None, None)

    return properties, change


def full(times):
    return [(StorageFullError("the disk is full"), OSError(5, "no"))[i % 2] for i in range(times)]


def test_what_does_not_apply_is_tried_again(caplog):
    """After longer and longer pauses, while the broker starts and serves."""

    async def go():
        logs = FullLogs(full(2))
        properties, change = await member_with(logs)
        assert logs.config is None and "do not apply yet" in caplog.text
        await asyncio.to_thread(wait_until, lambda: logs.config is not None)
        assert logs.config.retention_ms == 5000
        first, second, third = logs.tried
        assert third - second > 1.5 * (second - first) > 0.5
        change("6000")  # nothing is to be tried any more
        await properties.settled()
        assert (len(logs.tried), logs.config.retention_ms) == (4, 6000)
        await asyncio.sleep(0.6)
        assert len(logs.tried) == 4

    asyncio.run(asyncio.wait_for(go(), 30))


def test_a_newer_change_does_not_wait_for_the_next_try():
    async def go():
        logs = FullLogs(full(1))
        properties, change = await member_with(logs)
        change("6000")
        await properties.settled()
        assert logs.config.retention_ms == 6000
        await asyncio.sleep(0.6)
        assert len(logs.tried) == 2

    asyncio.run(asyncio.wait_for(go(), 30))


def test_a_broker_that_stops_tries_nothing_again():
    async def go():
        logs = FullLogs(full(1))
        properties, _ = await member_with(logs)
        properties.close()
        await asyncio.sleep(0.6)
        assert len(logs.tried) == 1

    asyncio.run(asyncio.wait_for(go(), 30))


def test_a_stock_client_sees_a_refusal(broker):
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    resource = ConfigResource(ResourceType.BROKER, "1")
    resource.add_incremental_config(
        ConfigEntry("log.dirs", "/x", incremental_operation=AlterConfigOpType.SET)
    )
    with pytest.raises(KafkaException, match="cannot change while it runs"):
        admin.incremental_alter_configs([resource])[resource].result(10)
