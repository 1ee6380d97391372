"""One Spark read over verbs: the plan in one Python process, the tasks in workers forked from
another.  A smoke test; the guest is slow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kdirect.client.session import Session
from kdirect.model import TopicPartition
from tests.support import BrokerProcess
from tests.verbs.conftest import TRANSPORT

RECORDS = 1000


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_batch_read(
    session: Session, broker: BrokerProcess, topic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = topic(2).topic
    with session.producer() as producer:
        for i in range(RECORDS):
            producer.produce(name, b"value %d" % i, partition=i % 2)
    assert session.watermarks([TopicPartition(name, p) for p in (0, 1)]) == {
        TopicPartition(name, p): (0, RECORDS // 2) for p in (0, 1)
    }
    # An emulated processor spends its time on compiling hot code otherwise.
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    from kdirect_spark import session_builder

    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.memory": "1g",
        "spark.log.level": "ERROR",
    }
    builder = session_builder("kdirect over verbs", "local[2]")
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    try:
        read = (
            spark.read.format("kdirect")
            .option("kafka.bootstrap.servers", broker.bootstrap_servers)
            .option("subscribe", name)
        )
        rows = (
            read.option("transport", TRANSPORT)
            .option("taskStatisticsDir", str(tmp_path))
            .load()
            .collect()
        )
    finally:
        spark.stop()
    got = sorted((row.partition, row.offset, bytes(row.value)) for row in rows)
    assert got == sorted((i % 2, i // 2, b"value %d" % i) for i in range(RECORDS))
    tasks = [
        json.loads(line) for file in tmp_path.iterdir() for line in file.read_text().splitlines()
    ]
    assert len(tasks) == 2 and {task["transport"] for task in tasks} == {TRANSPORT}
