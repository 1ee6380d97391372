"""Offsets that an open transaction has committed, while somebody deletes what they are about."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import confluent_kafka as ck
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

import kdirect
from kdirect.broker.topics import OFFSETS_TOPIC
from kdirect.format import layout
from kdirect.format import protocol as p
from kdirect.format.batch import crc32c, iterate_batches
from kdirect.format.error_codes import ErrorCode
from kdirect.format.group_records import CommittedOffset
from kdirect.format.schema import build
from kdirect.model import TopicPartition
from tests.broker.conftest import call_on_loop

AT = TopicPartition("t", 0)


class Sides:
    """A broker on one directory, a producer of transactions, and an administrator."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.port = 0
        self.start()
        self.admin = AdminClient({"bootstrap.servers": self.broker.bootstrap_servers})
        self.admin.create_topics([NewTopic("t", 1), NewTopic("out", 1)])["t"].result(10)
        self.producer = ck.Producer(
            {"bootstrap.servers": self.broker.bootstrap_servers, "transactional.id": "x"}
        )
        self.producer.init_transactions(10)

    def start(self) -> None:
        self.broker: Any = kdirect.Broker(
            log_dirs=self.path,
            listeners=f"PLAINTEXT://127.0.0.1:{self.port}",
            transaction_state_log_num_partitions=1,
            offsets_topic_num_partitions=1,
        )
        self.broker.start()
        self.port = int(self.broker.bootstrap_servers.rpartition(":")[2])

    def restart(self) -> None:
        self.broker.stop()
        self.start()

    def begin(self, offset: int) -> None:
        """A transaction that has committed an offset of group g, and has no end yet."""
        member = ck.Consumer({"bootstrap.servers": self.broker.bootstrap_servers, "group.id": "g"})
        self.producer.begin_transaction()
        self.producer.send_offsets_to_transaction(
            [ck.TopicPartition("t", 0, offset)], member.consumer_group_metadata(), 10
        )
        member.close()

    def committed(self) -> dict[str, int]:
        """The group's offsets, as they are in memory, by topic: by the broker's loop, which ends a
        transaction right after its answer."""
        found = call_on_loop(self.broker, lambda: self.broker.server.offsets.offsets("g"))
        return {tp.topic: committed.offset for tp, committed in found.items()}


@pytest.fixture
def sides(tmp_path: Path) -> Any:
    made = Sides(tmp_path)
    yield made
    made.broker.stop()


def delete_group(admin: Any) -> None:
    admin.delete_consumer_groups(["g"])["g"].result(10)


def delete_topic(admin: Any) -> None:
    admin.delete_topics(["t"])["t"].result(10)


@pytest.mark.parametrize("delete", [delete_group, delete_topic])
def test_what_is_deleted_does_not_come_back_with_the_commit(
    sides: Any, delete: Callable[[Any], None]
) -> None:
    """As Kafka: a group or a topic takes with it what transactions have committed of it so far."""
    sides.begin(7)
    delete(sides.admin)
    sides.producer.commit_transaction(10)
    assert sides.committed() == {}
    sides.restart()
    assert sides.committed() == {}


def test_an_old_offset_stays_while_a_transaction_commits_the_next(
    sides: Any, on_loop: Callable[..., Any]
) -> None:
    """The clean-up of old offsets takes neither the old one nor the one that is to follow."""
    offsets = sides.broker.server.offsets
    long_ago = CommittedOffset(3, -1, "", 1000)
    sides.begin(5)
    sides.producer.abort_transaction(10)  # the topic is there
    on_loop(sides.broker, lambda: offsets.commit("g", {AT: long_ago}))
    sides.begin(7)
    on_loop(sides.broker, sides.broker.server.groups.expire_offsets)
    assert sides.committed() == {"t": 3}
    sides.producer.commit_transaction(10)
    assert sides.committed() == {"t": 7}
    sides.restart()
    assert sides.committed() == {"t": 7}


def without_its_transaction(log: Path) -> bytes:
    """A log of offsets whose transaction was aborted long ago, as Kafka's cleaner leaves it: of the
    marker there is the head of its batch, which keeps the producer's epoch."""
    data, out = log.read_bytes(), b""
    for batch in iterate_batches(data):
        piece = bytearray(data[batch.position : batch.position + batch.size])
        if batch.is_control:
            del piece[layout.BATCH_HEADER_BYTES :]
            piece[8:12] = (len(piece) - 12).to_bytes(4, "big")
            piece[layout.BATCH_RECORDS_COUNT :] = bytes(4)
            crc = crc32c(bytes(piece[layout.BATCH_ATTRIBUTES :]))
            piece[layout.BATCH_CRC : layout.BATCH_ATTRIBUTES] = crc.to_bytes(4, "big")
        if batch.is_control or not batch.is_transactional:
            out += piece
    return out


def test_offsets_are_loaded_behind_a_marker_that_was_cleaned_away(sides: Any) -> None:
    sides.begin(7)
    sides.producer.abort_transaction(10)
    group = {"bootstrap.servers": sides.broker.bootstrap_servers, "group.id": "g"}
    plain = ck.Consumer(group)
    plain.commit(offsets=[ck.TopicPartition("t", 0, 9)], asynchronous=False)
    plain.close()
    sides.broker.stop()
    directory = Path(sides.path, f"{OFFSETS_TOPIC}-0")
    (log,) = directory.glob("*.log")
    *_, last = iterate_batches(log.read_bytes())
    (directory / f"{last.next_offset:020d}.log").touch()  # only sealed segments are cleaned
    log.write_bytes(without_its_transaction(log))
    metadata = directory / "partition.metadata"
    kept = [x for x in metadata.read_text().splitlines() if not x.startswith("kdirect")]
    metadata.write_text("\n".join(kept))
    sides.start()
    assert sides.committed() == {"t": 9}


def test_a_transaction_commits_nothing_of_a_group_without_a_name(
    sides: Any, raw: Callable[..., Any]
) -> None:
    """Nobody could read it: OffsetFetch refuses such a name, too."""
    connection = raw(sides.broker.bootstrap_servers)
    row = {"partition_index": 0, "committed_offset": 1, "committed_metadata": ""}
    begin = build(p.InitProducerIdRequest, transactional_id="x", transaction_timeout_ms=60_000)
    producer = connection.call(begin, 4)
    for name in ("", "g" * 40_000):
        commit = build(
            p.TxnOffsetCommitRequest, transactional_id="x", group_id=name,
            producer_id=producer.producer_id, producer_epoch=producer.producer_epoch,
            topics=[{"name": "t", "partitions": [row]}],
        )  # fmt: skip
        answer = connection.call(commit, 5)
        assert answer.topics[0].partitions[0].error_code == ErrorCode.INVALID_GROUP_ID


def test_a_member_with_an_old_epoch_can_abort(sides: Any, raw: Callable[..., Any]) -> None:
    """Of a stale epoch a transaction is told as of an old generation: for the other code clients of
    Kafka have no way but to end the producer."""
    connection = raw(sides.broker.bootstrap_servers)
    beat = build(
        p.ConsumerGroupHeartbeatRequest, group_id="new", member_id="m", member_epoch=0,
        rebalance_timeout_ms=1000, subscribed_topic_names=["t"], topic_partitions=[],
    )  # fmt: skip
    joined = connection.call(beat, 1)
    assert (joined.error_code, joined.member_epoch) == (0, 1)
    row = {"partition_index": 0, "committed_offset": 1, "committed_metadata": ""}
    commit = build(
        p.TxnOffsetCommitRequest, transactional_id="x", group_id="new", producer_id=0,
        producer_epoch=0, generation_id=7, member_id="m",
        topics=[{"name": "t", "partitions": [row]}],
    )  # fmt: skip
    answer = connection.call(commit, 5)
    assert answer.topics[0].partitions[0].error_code == ErrorCode.ILLEGAL_GENERATION
