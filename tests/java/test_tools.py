"""Kafka's own command-line tools against our broker."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import kdirect

pytestmark = pytest.mark.slow


def test_topics_and_offsets(broker, tool):
    session = kdirect.connect(broker.bootstrap_servers)
    tool(
        "TopicCommand",
        "--create",
        "--topic",
        "t",
        "--partitions",
        "2",
        "--replication-factor",
        "1",
        "--config",
        "retention.ms=7000",
    )
    with session.producer() as producer:
        for i in range(5):
            producer.produce("t", b"%d" % i, partition=i % 2)
        producer.flush()
    shown = tool("TopicCommand", "--describe", "--topic", "t")
    assert re.search(
        r"Topic: t\s.*PartitionCount: 2\s+ReplicationFactor: 1\s+Configs: retention\.ms=7000", shown
    ), shown
    assert len(re.findall(r"Partition: [01]\s+Leader: 1\s+Replicas: 1\s+Isr: 1", shown)) == 2, shown
    assert tool("GetOffsetShell", "--topic", "t").split() == ["t:0:3", "t:1:2"]


def test_groups(broker, tool):
    session = kdirect.connect(broker.bootstrap_servers)
    session.admin.create_topic("t", 1)
    with session.producer() as producer:
        for i in range(5):
            producer.produce("t", b"%d" % i)
        producer.flush()
    command = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"
    tool(
        command, "--group", "g", "--reset-offsets", "--to-offset", "2", "--topic", "t", "--execute"
    )
    assert tool(command, "--list").split() == ["g"]
    described = tool(command, "--describe", "--group", "g")
    assert re.search(r"^g\s+t\s+0\s+2\s+5\s+3\s", described, re.MULTILINE), described


def test_properties_and_reassignment(broker, tool, tmp_path: Path):
    kdirect.connect(broker.bootstrap_servers).admin.create_topic("t", 1)
    where = ["--entity-type", "topics", "--entity-name", "t"]
    tool(
        "kafka.admin.ConfigCommand",
        "--alter",
        *where,
        "--add-config",
        "min.insync.replicas=1,retention.ms=7000",
    )
    shown = tool("kafka.admin.ConfigCommand", "--describe", *where)
    assert re.findall(r"^  ([\w.]+=\w+) ", shown, re.MULTILINE) == [
        "min.insync.replicas=1",
        "retention.ms=7000",
    ]
    plan = tmp_path / "plan.json"
    plan.write_text(
        json.dumps({"version": 1, "partitions": [{"topic": "t", "partition": 0, "replicas": [1]}]})
    )
    command = "org.apache.kafka.tools.reassign.ReassignPartitionsCommand"
    assert "Successfully started" in tool(
        command, "--reassignment-json-file", str(plan), "--execute"
    )
    assert "Reassignment of partition t-0 is completed" in tool(
        command, "--reassignment-json-file", str(plan), "--verify"
    )
