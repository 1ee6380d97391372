"""Topic properties: every one of Kafka's is known; a value that asks for what is so already is
taken and kept, any other is refused."""

from __future__ import annotations

import json

import confluent_kafka
import kafka.errors
import pytest
from confluent_kafka import admin as confluent_admin
from kafka.admin import ConfigResource, ConfigResourceType, KafkaAdminClient, NewTopic

import kdirect
from kdirect.model import TopicPartition
from kdirect.options import TOPIC
from tests.support import wait_until

# Values that change nothing here, each beside one that would (None: there is none), and a word of
# the reason.
HARMLESS = {
    "cleanup.policy": ("delete", "keep", "delete, compact"),
    "compression.gzip.level": ("-1", "0", ""),
    "compression.lz4.level": ("9", "18", "at most 17"),
    "compression.type": ("producer", "none", "uncompressed"),
    "compression.zstd.level": ("3", "23", "at most 22"),
    "delete.retention.ms": ("86400000", "-1", "at least 0"),
    "file.delete.delay.ms": ("60000", "-1", "at least 0"),
    "follower.replication.throttled.replicas": ("", "0:1", "nothing is replicated"),
    "leader.replication.throttled.replicas": ("", "*", "nothing is replicated"),
    "local.retention.bytes": ("-2", "-3", "at least -2"),
    "local.retention.ms": ("-2", "-3", "at least -2"),
    "max.compaction.lag.ms": ("9223372036854775807", "0", "at least 1"),
    "min.cleanable.dirty.ratio": ("0.5", "1.5", "at most 1"),
    "min.compaction.lag.ms": ("0", "-1", "at least 0"),
    "min.insync.replicas": ("1", "2", "one broker"),
    "preallocate": ("true", "false", "bytes that exist"),
    "remote.log.copy.disable": ("false", "perhaps", "true or false"),
    "remote.log.delete.on.disable": ("false", "perhaps", "true or false"),
    "remote.storage.enable": ("false", "true", "tiered storage"),
    "segment.jitter.ms": ("0", "-1", "at least 0"),
    "unclean.leader.election.enable": ("false", "true", "election"),
}


@pytest.fixture
def client(broker):
    return confluent_admin.AdminClient(
        {"bootstrap.servers": broker.bootstrap_servers, "log_level": 0}
    )


def create(client, name, configs, **more):
    client.create_topics([confluent_admin.NewTopic(name, 1, 1, config=configs)], **more)[
        name
    ].result(10)


def described(client, name):
    """Property -> (value, is it the topic's own?)."""
    where = confluent_admin.ConfigResource(confluent_admin.RESOURCE_TOPIC, name)
    return {
        k: (v.value, not v.is_default)
        for k, v in client.describe_configs([where])[where].result(10).items()
    }


def alter(client, topic, name, value, how=confluent_admin.AlterConfigOpType.SET):
    where = confluent_admin.ConfigResource(confluent_admin.RESOURCE_TOPIC, topic)
    where.add_incremental_config(
        confluent_admin.ConfigEntry(name, value, incremental_operation=how)
    )
    client.incremental_alter_configs([where])[where].result(10)


def test_the_table_and_this_one_name_the_same():
    assert {row.name for row in TOPIC.rows} >= set(HARMLESS)


def test_what_asks_for_nothing_is_taken_shown_and_kept(tmp_path):
    values = {name: value for name, (value, *_) in HARMLESS.items()}
    with kdirect.Broker(log_dirs=tmp_path) as b:
        client = confluent_admin.AdminClient(
            {"bootstrap.servers": b.bootstrap_servers, "log_level": 0}
        )
        create(client, "plain", {})
        before = described(client, "plain")
        assert {n: v for n, v in before.items() if n in values} == {
            n: (v, False) for n, v in values.items()
        }
        create(client, "t", values)
        assert {n: v for n, v in described(client, "t").items() if n in values} == {
            n: (v, True) for n, v in values.items()
        }
        alter(client, "plain", "min.insync.replicas", "1")
        del client  # it ends while its broker is there, or it would take its time
    assert json.loads((tmp_path / "topics.json").read_text())["topics"]["plain"]["configs"] == {
        "min.insync.replicas": "1"
    }
    with kdirect.Broker(log_dirs=tmp_path) as b:
        client = confluent_admin.AdminClient(
            {"bootstrap.servers": b.bootstrap_servers, "log_level": 0}
        )
        assert {n: v for n, v in described(client, "t").items() if n in values} == {
            n: (v, True) for n, v in values.items()
        }
        assert described(client, "plain") == {**before, "min.insync.replicas": ("1", True)}
        alter(
            client, "plain", "min.insync.replicas", None, confluent_admin.AlterConfigOpType.DELETE
        )
        assert described(client, "plain") == before
        del client


@pytest.mark.parametrize("name", HARMLESS)
def test_what_asks_for_more_is_refused_by_name_and_reason(client, name):
    good, bad, reason = HARMLESS[name]

    def refused(call):
        with pytest.raises(confluent_kafka.KafkaException) as e:
            call()
        error = e.value.args[0]
        assert error.name() == "INVALID_CONFIG"
        assert name in error.str() and repr(bad) in error.str() and reason in error.str(), (
            error.str()
        )

    refused(lambda: create(client, "t", {name: bad}))
    refused(lambda: create(client, "t", {name: bad}, validate_only=True))
    create(client, "t", {name: good})
    refused(lambda: alter(client, "t", name, bad))
    where = confluent_admin.ConfigResource(
        confluent_admin.RESOURCE_TOPIC, "t", set_config={name: bad}
    )
    refused(lambda: client.alter_configs([where])[where].result(10))
    assert described(client, "t")[name] == (good, True)


def test_values_that_count_only_for_what_is_not_here(client):
    """A property of compaction, tiered storage or the broker's own compression asks for nothing,
    whatever its value."""
    values = {"delete.retention.ms": "5", "local.retention.ms": "1000",
              "min.cleanable.dirty.ratio": "0.01",
              "compression.zstd.level": "-7", "compression.gzip.level": "6",
              "remote.log.copy.disable": "true"}  # fmt: skip
    create(client, "t", values)
    assert {n: v for n, v in described(client, "t").items() if n in values} == {
        n: (v, True) for n, v in values.items()
    }


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [("min.insync.replica", "min.insync.replicas"), ("segment.byte", "segment.bytes")],
)
def test_an_unknown_name_is_an_error_that_names_the_nearest(client, unknown, nearest):
    create(client, "t", {})
    for call in (
        lambda: create(client, "u", {unknown: "1"}),
        lambda: alter(client, "t", unknown, "1"),
    ):
        with pytest.raises(confluent_kafka.KafkaException) as e:
            call()
        assert (
            e.value.args[0].name() == "INVALID_CONFIG"
            and f"did you mean {nearest}?" in e.value.args[0].str()
        )


def test_lists_are_appended_to_and_subtracted_from(client):
    create(client, "t", {})
    kinds = confluent_admin.AlterConfigOpType
    alter(client, "t", "cleanup.policy", "delete", kinds.APPEND)
    assert described(client, "t")["cleanup.policy"] == ("delete", True)
    alter(client, "t", "leader.replication.throttled.replicas", "0:1", kinds.SUBTRACT)
    assert described(client, "t")["leader.replication.throttled.replicas"] == ("", True)
    for name, value, how in (
        ("cleanup.policy", "keep", kinds.APPEND),
        ("retention.ms", "1", kinds.APPEND),
    ):
        with pytest.raises(confluent_kafka.KafkaException, match=name):
            alter(client, "t", name, value, how)
    assert described(client, "t")["cleanup.policy"] == ("delete", True)


def test_a_topic_without_a_cleanup_policy_keeps_its_records(tmp_path):
    """As in Kafka, a list of no policy is allowed: neither retention nor DeleteRecords removes
    anything, until a policy is appended."""
    kinds = confluent_admin.AlterConfigOpType
    settings = {"log_dirs": tmp_path, "log_retention_check_interval_ms": 50}
    with kdirect.Broker(**settings) as b:
        client = confluent_admin.AdminClient(
            {"bootstrap.servers": b.bootstrap_servers, "log_level": 0}
        )
        create(client, "t", {"retention.ms": "10"})
        alter(client, "t", "cleanup.policy", "delete", kinds.SUBTRACT)
        create(client, "u", {"cleanup.policy": "", "retention.ms": "10"})
        for name in ("t", "u"):
            assert described(client, name)["cleanup.policy"] == ("", True)
            producer = confluent_kafka.Producer({"bootstrap.servers": b.bootstrap_servers})
            producer.produce(name, b"v", timestamp=1)
            assert producer.flush(10) == 0
        del client, producer
    with kdirect.Broker(**settings) as b:
        client = confluent_admin.AdminClient(
            {"bootstrap.servers": b.bootstrap_servers, "log_level": 0}
        )
        first = confluent_kafka.TopicPartition("t", 0, 0)
        create(client, "deleted", {"retention.ms": "10"})
        producer = confluent_kafka.Producer({"bootstrap.servers": b.bootstrap_servers})
        producer.produce("deleted", b"v", timestamp=1)
        assert producer.flush(10) == 0
        partitions = {name: b.server.logs.partitions[TopicPartition(name, 0)] for name in "tu"}
        emptied = b.server.logs.partitions[TopicPartition("deleted", 0)]
        wait_until(lambda: emptied.log_start_offset == 1)  # retention has looked at all of them
        assert [x.log_start_offset for x in partitions.values()] == [0, 0]
        everything = confluent_kafka.TopicPartition("t", 0, confluent_kafka.OFFSET_END)
        with pytest.raises(confluent_kafka.KafkaException) as e:
            client.delete_records([everything])[first].result(10)
        assert e.value.args[0].name() == "POLICY_VIOLATION"
        for name in ("t", "u"):
            alter(client, name, "cleanup.policy", "delete", kinds.APPEND)
            assert described(client, name)["cleanup.policy"] == ("delete", True)
        wait_until(lambda: all(x.log_start_offset == 1 for x in partitions.values()))
        del client, producer


@pytest.mark.parametrize(
    "name",
    [
        "retention.ms",
        "message.timestamp.before.max.ms",
        "flush.messages",
        "segment.ms",
        "retention.bytes",
    ],
)
@pytest.mark.parametrize("value", [str(1 << 63), "9" * 30])
def test_a_number_beyond_64_bits(client, name, value):
    with pytest.raises(confluent_kafka.KafkaException, match=name) as e:
        create(client, "t", {name: value})
    assert e.value.args[0].name() == "INVALID_CONFIG"
    assert "t" not in client.list_topics(timeout=10).topics


def test_the_broker_has_no_dynamic_properties_to_take_back(client):
    """Kafka's tool that moves partitions takes its throttles back, set or not."""
    kinds = confluent_admin.AlterConfigOpType

    def ask(*operations):
        where = confluent_admin.ConfigResource(confluent_admin.RESOURCE_BROKER, "1")
        for name, value, how in operations:
            where.add_incremental_config(
                confluent_admin.ConfigEntry(name, value, incremental_operation=how)
            )
        client.incremental_alter_configs([where])[where].result(10)

    gone = ("leader.replication.throttled.rate", None, kinds.DELETE)
    ask(gone, ("follower.replication.throttled.rate", None, kinds.DELETE))
    with pytest.raises(confluent_kafka.KafkaException, match="cannot change while it runs"):
        ask(gone, ("num.partitions", "3", kinds.SET))


def test_by_kafka_python(broker):
    client = KafkaAdminClient(bootstrap_servers=broker.bootstrap_servers)
    client.create_topics(
        [
            NewTopic(
                "t",
                1,
                1,
                topic_configs={
                    "min.insync.replicas": "1",
                    "unclean.leader.election.enable": "false",
                },
            )
        ]
    )
    with pytest.raises(
        kafka.errors.InvalidConfigurationError, match=r"min\.insync\.replicas.*one broker"
    ):
        client.create_topics([NewTopic("u", 1, 1, topic_configs={"min.insync.replicas": "2"})])
    shown = client.describe_configs([ConfigResource(ConfigResourceType.TOPIC, "t")])
    assert "min.insync.replicas" in str(shown)
    client.close()
