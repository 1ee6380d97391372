"""Kafka's tools move a partition between the log directories of a broker, and see it move."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kdirect
from kdirect.model import TopicPartition

pytestmark = pytest.mark.slow
REASSIGN = "org.apache.kafka.tools.reassign.ReassignPartitionsCommand"
WAIT_S = 60


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Any]:
    with kdirect.Broker([tmp_path / "a", tmp_path / "b"]) as b:
        yield b


def test_a_partition_is_reassigned_to_another_directory(tool, broker, tmp_path: Path) -> None:
    """At a rate that the tool sets and takes back."""
    with kdirect.connect(broker.bootstrap_servers) as session:
        session.admin.create_topic("t", 1)
        with session.producer() as producer:
            for i in range(5000):
                producer.produce("t", b"%d" % i * 20, partition=0)
    partition = broker.server.logs.partitions[TopicPartition("t", 0)]
    (to,) = [d for d in broker.log_dirs if d != partition.directory.parent]
    row = {"topic": "t", "partition": 0, "replicas": [1], "log_dirs": [str(to)]}
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"version": 1, "partitions": [row]}))
    given = ("--reassignment-json-file", str(plan))
    rate = ("--replica-alter-log-dirs-throttle", "50000")
    told = tool(REASSIGN, "--execute", *given, *rate)
    assert f"started moving log directory to {to} for replica t-0 with broker 1" in told, told
    told = json.loads(tool("LogDirsCommand", "--describe").splitlines()[-1])
    rows = {
        d["logDir"]: [(p["partition"], p["isFuture"]) for p in d["partitions"]]
        for b in told["brokers"]
        for d in b["logDirs"]
    }
    assert rows[str(to)] == [("t-0", True)] and partition.directory.parent != to
    told = tool(REASSIGN, "--verify", "--preserve-throttles", *given)
    assert re.search(r"replica t-0-1 is still in progress", told), told
    # A later plan may go faster.
    tool(REASSIGN, "--execute", "--additional", *given, *rate[:1], "500000000")
    deadline = time.monotonic() + WAIT_S
    while "t-0-1 completed successfully" not in (told := tool(REASSIGN, "--verify", *given)):
        assert time.monotonic() < deadline, told
    assert partition.directory.parent == to and partition.log_end_offset == 5000
    assert broker.statistics()["moves_finished"] == 1
