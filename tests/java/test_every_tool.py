"""All of Kafka's command-line tools against our broker: what each of them prints.
(tests/java/test_tools.py looks at a few more closely.)"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import kdirect

pytestmark = pytest.mark.slow
TOOLS = "org.apache.kafka.tools."
GROUPS = TOOLS + "consumer.group.ConsumerGroupCommand"
CONSOLE = TOOLS + "consumer.ConsoleConsumer"
CONFIGS = "kafka.admin.ConfigCommand"


@pytest.fixture
def topic(broker) -> str:
    """A topic with five records in the first of two partitions."""
    session = kdirect.connect(broker.bootstrap_servers)
    session.admin.create_topic("t", 2)
    with session.producer() as producer:
        for i in range(5):
            producer.produce("t", b"%d" % i, partition=0)
        producer.flush()
    return "t"


def test_topics(tool, topic):
    tool("TopicCommand", "--alter", "--topic", topic, "--partitions", "3")
    assert "PartitionCount: 3" in tool("TopicCommand", "--describe")
    assert tool("TopicCommand", "--list").split() == [topic]
    assert tool("TopicCommand", "--describe", "--under-replicated-partitions").strip() == ""
    assert tool("GetOffsetShell").split() == ["t:0:5", "t:1:0", "t:2:0"]
    tool("TopicCommand", "--delete", "--topic", topic)
    assert tool("TopicCommand", "--list").split() == []


def test_records_are_deleted_and_directories_described(tool, topic, tmp_path: Path):
    plan = {"partitions": [{"topic": topic, "partition": 0, "offset": 2}], "version": 1}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    told = tool("DeleteRecordsCommand", "--offset-json-file", str(tmp_path / "plan.json"))
    assert re.search(r"t-0\s+low_watermark: 2", told), told
    assert tool("GetOffsetShell", "--time", "-2").split() == ["t:0:2", "t:1:0"]
    told = json.loads(tool("LogDirsCommand", "--describe").splitlines()[-1])
    ((directory,),) = [b["logDirs"] for b in told["brokers"]]
    assert {p["partition"] for p in directory["partitions"]} == {"t-0", "t-1"}


def test_producers_and_consumers(tool, topic):
    properties = "bootstrap.servers=SERVERS"
    load = ("--topic", topic, "--num-records", "500", "--record-size", "100")
    told = tool("ProducerPerformance", *load, "--throughput", "-1", "--producer-props", properties)
    assert "500 records sent" in told
    tool("ConsumerPerformance", "--topic", topic, "--messages", "505")
    told = tool(CONSOLE, "--topic", topic,
                "--from-beginning", "--partition", "0", "--max-messages", "3")  # fmt: skip
    assert told.split() == ["0", "1", "2"]


def test_groups(tool, topic):
    reset = ("--reset-offsets", "--to-offset", "2", "--topic", f"{topic}:0", "--execute")
    tool(GROUPS, "--group", "g", *reset)
    assert tool(GROUPS, "--list").split() == ["g"]
    assert re.search(r"^g\s+t\s+0\s+2\s+5\s+3\s", tool(GROUPS, "--describe", "--all-groups"), re.M)
    assert "Empty" in tool(GROUPS, "--describe", "--group", "g", "--state")
    assert re.search(r"^g\s+Classic", tool("GroupsCommand", "--list"), re.M)
    tool(GROUPS, "--delete-offsets", "--group", "g", "--topic", topic)
    assert "successful" in tool(GROUPS, "--delete", "--group", "g")


def test_the_cluster(tool, topic, broker):
    assert "already elected" in tool(
        "LeaderElectionCommand",
        "--election-type",
        "preferred",
        "--topic",
        topic,
        "--partition",
        "0",
    )
    assert re.search(r"Produce\(0\): 0 to \d+", tool("BrokerApiVersionsCommand"))
    told = tool("MetadataQuorumCommand", "describe", "--status")
    assert re.search(r"LeaderId:\s+1\b", told) and re.search(r"CurrentVoters:.*\b1\b", told)
    assert re.search(r"^1\s.*Leader", tool("MetadataQuorumCommand", "describe", "--replication"),
                     re.M)  # fmt: skip
    told = tool("FeatureCommand", "describe")
    assert re.search(r"metadata\.version.*FinalizedVersionLevel: 4\.1-IV1", told), told
    assert "Cluster ID:" in tool("ClusterTool", "cluster-id", "--bootstrap-server", "SERVERS")
    told = tool("ClusterTool", "list-endpoints", "--bootstrap-server", "SERVERS")
    assert broker.bootstrap_servers.rpartition(":")[2] in told
    assert "TransactionalId" in tool("TransactionsCommand", "list")


def test_properties(tool, topic):
    one = ("--entity-type", "brokers", "--entity-name", "1")
    tool(CONFIGS, "--alter", *one, "--add-config", "log.retention.ms=700000")
    assert "log.retention.ms=700000" in tool(CONFIGS, "--describe", *one)
    every = ("--entity-type", "brokers", "--entity-default")
    tool(CONFIGS, "--alter", *every, "--add-config", "log.retention.ms=800000")
    assert "log.retention.ms=800000" in tool(CONFIGS, "--describe", *every)
    tool(CONFIGS, "--alter", *one, "--delete-config", "log.retention.ms")
    assert "retention.ms=800000" in tool(CONFIGS, "--describe", "--all", "--entity-type", "topics",
                                         "--entity-name", topic)  # fmt: skip
    group = ("--entity-type", "groups", "--entity-name", "g")
    tool(CONFIGS, "--alter", *group, "--add-config", "consumer.session.timeout.ms=50000")
    assert "consumer.session.timeout.ms=50000" in tool(CONFIGS, "--describe", *group)
    assert "kdirect" in tool(
        CONFIGS, "--describe", "--entity-type", "broker-loggers", "--entity-name", "1"
    )
    assert tool(CONFIGS, "--describe", "--entity-type", "users") == ""
    tool("ClientMetricsCommand", "--alter", "--name", "m", "--metrics", "a.", "--interval", "1000")
    assert tool("ClientMetricsCommand", "--list").split() == ["m"]
    assert "interval.ms=1000" in tool("ClientMetricsCommand", "--describe")
