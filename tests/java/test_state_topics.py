"""What our cleaner leaves of __consumer_offsets and __transaction_state, read by Kafka's own tools:
its formatters over the protocol, its dump of the files; and by its broker."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

from kdirect.broker.cleaner import CHECKPOINT
from kdirect.broker.topics import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from kdirect.log.checkpoint import read_offsets
from kdirect.model import TopicPartition
from tests.java.conftest import class_path
from tests.support import alter_topic, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
CONSUMER = "org.apache.kafka.tools.consumer."
ROUNDS = 400
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def broker(broker_process: Any) -> Any:
    return broker_process(
        **{
            "log.cleaner.backoff.ms": "20",
            "log.cleaner.min.cleanable.ratio": "0.1",
            "transaction.state.log.num.partitions": "1",
        }
    )


def fill(servers: str) -> None:
    """Commits of a group outside of transactions, and of another in them."""
    plain = confluent_kafka.Consumer({"bootstrap.servers": servers, "group.id": "plain"})
    member = confluent_kafka.Consumer({"bootstrap.servers": servers, "group.id": "in"})
    producer = confluent_kafka.Producer({"bootstrap.servers": servers, "transactional.id": "x"})
    producer.init_transactions(30)
    for i in range(1, ROUNDS + 1):
        plain.commit(offsets=[confluent_kafka.TopicPartition("t", 0, i)], asynchronous=False)
        producer.begin_transaction()
        producer.send_offsets_to_transaction(
            [confluent_kafka.TopicPartition("t", 1, i)], member.consumer_group_metadata(), 30
        )
        if i % 4 == 1:
            producer.abort_transaction(30)
        else:
            producer.commit_transaction(30)
        if i == 1:
            for topic in (OFFSETS_TOPIC, TRANSACTIONS_TOPIC):
                alter_topic(servers, topic, segment_bytes=16384)
    plain.close()
    member.close()


def rows(printed: str) -> list[dict[str, Any]]:
    """What a formatter has printed: objects of JSON, without anything between them."""
    out, decoder, rest = [], json.JSONDecoder(), printed[printed.find("{") :]
    while rest.startswith("{"):
        row, end = decoder.raw_decode(rest)
        out.append(row)
        rest = rest[end:].lstrip()
    return out


def begin_again(kafka: Any, replaced: Path, ours: Path) -> None:
    """Kafka starts with our files of a partition in place of its own."""
    kafka.process.terminate()
    kafka.process.wait(60)
    for path in replaced.iterdir():
        if path.name != "partition.metadata":  # the topic's id
            path.unlink()
    for suffix in (".log", ".index", ".timeindex", ".txnindex", ".snapshot"):
        for path in ours.glob("*" + suffix):
            shutil.copy(path, replaced)
    for name in ("recovery-point-offset-checkpoint", "cleaner-offset-checkpoint"):
        (replaced.parent / name).unlink(missing_ok=True)
    with kafka.errors.open("a") as errors:
        kafka.process = subprocess.Popen(kafka.process.args, stdout=errors, stderr=errors)
    kafka._until_ready()


def committed(servers: str, group: str, partition: int) -> int:
    """What a group has committed; -1 where its coordinator is not ready yet."""
    consumer = confluent_kafka.Consumer({"bootstrap.servers": servers, "group.id": group})
    try:
        place = confluent_kafka.TopicPartition("t", partition)
        (found,) = consumer.committed([place], timeout=5)
        return int(found.offset)
    except confluent_kafka.KafkaException:
        return -1
    finally:
        consumer.close()


def test_kafka_loads_what_our_cleaner_leaves(broker: Any, tool: Any, tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "bench"))
    from versus.systems import Kafka

    tool("TopicCommand", "--create", "--topic", "t", "--partitions", "2")
    fill(broker.bootstrap_servers)
    log = TopicPartition(OFFSETS_TOPIC, 0)
    wait_until(lambda: read_offsets(broker.log_dir / CHECKPOINT).get(log, 0) > ROUNDS, "compacted")
    broker.stop()
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    kafka = Kafka(str(theirs), {"offsets.topic.num.partitions": "1"})
    try:
        kafka.create("t", 2)
        first = confluent_kafka.Consumer({"bootstrap.servers": kafka.address, "group.id": "first"})
        first.commit(offsets=[confluent_kafka.TopicPartition("t", 0, 1)], asynchronous=False)
        first.close()
        name = f"{OFFSETS_TOPIC}-0"
        begin_again(kafka, theirs / "kafka" / name, broker.log_dir / name)
        wait_until(lambda: committed(kafka.address, "plain", 0) == ROUNDS, "it was loaded", 60)
        assert committed(kafka.address, "in", 1) == ROUNDS
        assert committed(kafka.address, "first", 0) < 0
    finally:
        kafka.stop()


def test_kafkas_tools_read_what_our_cleaner_leaves(
    broker: Any, tool: Any, broker_jars: list[Path]
) -> None:
    servers = broker.bootstrap_servers
    tool("TopicCommand", "--create", "--topic", "t", "--partitions", "2")
    fill(servers)
    checkpoint = broker.log_dir / CHECKPOINT

    def cleaned(topic: str) -> int:
        return int(read_offsets(checkpoint).get(TopicPartition(topic, 0), 0))

    wait_until(lambda: cleaned(OFFSETS_TOPIC) > ROUNDS, "the offsets were compacted")
    wait_until(lambda: cleaned(TRANSACTIONS_TOPIC) > ROUNDS, "the ids were compacted")

    def shown(topic: str, formatter: str) -> list[dict[str, Any]]:
        return rows(
            tool(
                CONSUMER + "ConsoleConsumer", "--topic", topic, "--partition", "0",
                "--offset", "earliest", "--formatter", CONSUMER + formatter,
                "--isolation-level", "read_committed", "--timeout-ms", "4000",
            )
        )  # fmt: skip

    last: dict[tuple[str, int], int] = {}
    offsets = shown(OFFSETS_TOPIC, "OffsetsMessageFormatter")
    for row in offsets:
        key = row["key"]["data"]
        last[key["group"], key["partition"]] = row["value"]["data"]["offset"]
    assert last == {("plain", 0): ROUNDS, ("in", 1): ROUNDS}
    assert len(offsets) < ROUNDS
    states = shown(TRANSACTIONS_TOPIC, "TransactionLogMessageFormatter")
    assert {row["key"]["data"]["transactionalId"] for row in states} == {"x"}
    assert len(states) < ROUNDS
    command = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"
    described = tool(command, "--describe", "--group", "in")
    assert re.search(rf"^in\s+t\s+1\s+{ROUNDS}\s", described, re.MULTILINE), described
    broker.stop()
    for topic, decoder in ((OFFSETS_TOPIC, "offsets"), (TRANSACTIONS_TOPIC, "transaction-log")):
        files = sorted((broker.log_dir / f"{topic}-0").glob("*.log"))
        assert len(files) > 1
        names = ",".join(map(str, files))
        dumped = subprocess.run(
            ["java", "-cp", class_path(broker_jars), "-Dlog4j2.level=off",
             "kafka.tools.DumpLogSegments", f"--{decoder}-decoder", "--files", names,
             "--deep-iteration"],
            capture_output=True, text=True, timeout=60, check=True,
        ).stdout  # fmt: skip
        assert "isvalid: true" in dumped and "isvalid: false" not in dumped, dumped[-2000:]
        assert "Found corrupted" not in dumped and "Could not" not in dumped, dumped[-2000:]
