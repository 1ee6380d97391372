"""Batches that are written by attempts: what a commit makes visible, to stock readers and ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import confluent_kafka as ck
import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

import kdirect
from kdirect.broker.transaction_store import COMMIT_BYTES
from kdirect.client.attempts import ALREADY_COMMITTED, COMMITTED, OPEN, Attempt
from kdirect.errors import (
    FencedRunError,
    OlderCheckpointError,
    TransactionError,
    UnknownAttemptError,
)
from tests.support import wait_until

PARTITIONS = 3


@pytest.fixture(scope="module")
def broker() -> Iterator[Any]:
    with kdirect.Broker(
        transaction_abort_timed_out_transaction_cleanup_interval_ms=100,
        transaction_state_log_num_partitions=3,
    ) as b:
        yield b


@pytest.fixture(params=["tcp", "shared", "exclusive"])
def session(broker: Any, request: Any) -> Iterator[Any]:
    settings = {"bootstrap.servers": broker.bootstrap_servers, "transport": "tcp"}
    if request.param != "tcp":
        settings |= {"transport": "shm", "rdma.produce": request.param}
    with kdirect.connect(settings) as s:
        yield s


@pytest.fixture
def topic(session: Any, request: Any) -> str:
    name = request.node.name.replace("[", "-").replace("]", "")
    session.admin.create_topic(name, PARTITIONS)
    return name


def values(broker: Any, topic: str, isolation: str = "read_committed") -> list[bytes]:
    """All that a stock reader of this isolation sees, up to the ends of its partitions."""
    consumer = ck.Consumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": "none",
            "isolation.level": isolation,
            "enable.partition.eof": True,
            "enable.auto.commit": False,
        }
    )
    try:
        consumer.assign([ck.TopicPartition(topic, i, 0) for i in range(PARTITIONS)])
        found, ended = [], set()
        while len(ended) < PARTITIONS:
            message = consumer.poll(10)
            assert message is not None, "the reader has not come to the end"
            if message.error() is None:
                found.append(message.value())
            elif message.error().code() == ck.KafkaError._PARTITION_EOF:
                ended.add(message.partition())
            else:
                raise AssertionError(message.error())
        return sorted(found)
    finally:
        consumer.close()


def write(session: Any, attempt: Attempt, topic: str, name: str, count: int = 6) -> list[bytes]:
    """Records of an attempt in all partitions, which has flushed and is gone."""
    sent = [b"%s %d" % (name.encode(), i) for i in range(count)]
    rows = pa.table(
        {
            "value": pa.array(sent, pa.binary()),
            "partition": pa.array([i % PARTITIONS for i in range(count)], pa.int32()),
        }
    )
    with session.attempt_producer(attempt) as producer:
        assert producer.send_arrow(rows, topic) == count
        assert producer.flush() == 0
    return sent


def test_a_commit_shows_what_it_names_and_nothing_else(
    broker: Any, session: Any, topic: str
) -> None:
    a, b, lost = (session.join_attempt(topic, "q", "r", 0) for _ in range(3))
    assert len({a.transactional_id, b.transactional_id, lost.transactional_id}) == 3
    sent = write(session, a, topic, "a") + write(session, b, topic, "b")
    dropped = write(session, lost, topic, "lost")
    assert values(broker, topic) == []
    assert session.commit_attempts(topic, "q", "r", 0, [a, b]) == COMMITTED
    assert values(broker, topic) == sorted(sent)
    assert values(broker, topic, "read_uncommitted") == sorted(sent + dropped)


def test_a_batch_that_is_repeated_changes_nothing(broker: Any, session: Any, topic: str) -> None:
    a = session.join_attempt(topic, "q", "r", 5)
    sent = write(session, a, topic, "a")
    assert session.commit_attempts(topic, "q", "r", 5, [a]) == COMMITTED
    assert session.commit_attempts(topic, "q", "r", 5, [a]) == ALREADY_COMMITTED
    assert session.join_attempt(topic, "q", "r", 5) is None
    assert session.join_attempt(topic, "q", "r", 4) is None
    # A new run of the query repeats it as well.
    assert session.join_attempt(topic, "q", "r2", 5) is None
    assert session.commit_attempts(topic, "q", "r2", 5, []) == ALREADY_COMMITTED
    assert values(broker, topic) == sent
    b = session.join_attempt(topic, "q", "r2", 6)
    assert b.transactional_id == a.transactional_id, "slots are used again"
    sent += write(session, b, topic, "b")
    assert session.commit_attempts(topic, "q", "r2", 6, [b]) == COMMITTED
    assert values(broker, topic) == sorted(sent)


def test_a_run_that_begins_before_the_last_batch_is_refused(session: Any, topic: str) -> None:
    """Its checkpoint is older: what it would write has numbers of batches with other rows."""
    for batch in (4, 5):
        session.commit_attempts(topic, "q", "r", batch, [])
    for call in (
        lambda: session.join_attempt(topic, "q", "r2", 4),
        lambda: session.commit_attempts(topic, "q", "r2", 4, []),
    ):
        with pytest.raises(OlderCheckpointError, match="batch 4, though 5 is committed"):
            call()
    assert session.join_attempt(topic, "q", "r", 4) is None, "nothing has changed"
    assert session.join_attempt(topic, "other", "r3", 0) is not None, "another query has its own"


def test_a_topic_that_comes_back_smaller_holds_nobody_up(session: Any, topic: str) -> None:
    """No marker can be written in a partition that is gone."""
    session.admin.create_topic(f"{topic}-gone", PARTITIONS)
    a = session.join_attempt(topic, "q", "r", 0)
    write(session, a, f"{topic}-gone", "a")
    session.admin.delete_topic(f"{topic}-gone")
    session.admin.create_topic(f"{topic}-gone", 1)
    assert session.commit_attempts(topic, "q", "r", 0, [a]) == COMMITTED
    b = session.join_attempt(topic, "q", "r", 1)
    write(session, b, topic, "b")
    assert session.commit_attempts(topic, "q", "r", 1, [b]) == COMMITTED


def test_a_new_run_fences_the_one_before(broker: Any, session: Any, topic: str) -> None:
    old = session.join_attempt(topic, "q", "r1", 0, owner="host-1 pid 1")
    write(session, old, topic, "old")
    new = session.join_attempt(topic, "q", "r2", 0, owner="host-2 pid 2")
    with pytest.raises(FencedRunError, match=r"r2.*q.*host-2 pid 2"):
        session.join_attempt(topic, "q", "r1", 0)
    with pytest.raises(FencedRunError, match="r2"):
        session.commit_attempts(topic, "q", "r1", 0, [old])
    with pytest.raises(FencedRunError, match="r2"):
        session.abort_attempts(topic, "q", "r1")
    with pytest.raises(UnknownAttemptError, match=old.transactional_id):
        session.commit_attempts(topic, "q", "r2", 0, [new, old])
    with pytest.raises(kdirect.KdirectError):
        write(session, old, topic, "late")
    sent = write(session, new, topic, "new")
    assert session.commit_attempts(topic, "q", "r2", 0, [new]) == COMMITTED
    assert values(broker, topic) == sent


def test_an_attempt_that_took_too_long_refuses_the_commit(
    broker: Any, session: Any, topic: str
) -> None:
    a = session.join_attempt(topic, "q", "r", 0, timeout_ms=200)
    b = session.join_attempt(topic, "q", "r", 0)
    write(session, a, topic, "a")
    write(session, b, topic, "b")
    with pytest.raises(UnknownAttemptError, match="batch 0"):
        session.commit_attempts(topic, "q", "r", 1, [b])
    wait_until(
        lambda: session.join_attempt(topic, "q", "r", 0).transactional_id == a.transactional_id,
        "its slot is free again",
    )
    with pytest.raises(UnknownAttemptError, match=a.transactional_id):
        session.commit_attempts(topic, "q", "r", 0, [a, b])
    assert values(broker, topic) == []
    session.abort_attempts(topic, "q", "r")
    assert values(broker, topic) == []
    c = session.join_attempt(topic, "q", "r", 0)
    sent = write(session, c, topic, "c")
    assert session.commit_attempts(topic, "q", "r", 0, [c]) == COMMITTED
    assert values(broker, topic) == sent


def test_what_became_of_an_attempt_is_said(broker: Any, session: Any, topic: str) -> None:
    a, b = (session.join_attempt(topic, "q", "r", 0) for _ in range(2))
    write(session, a, topic, "a")
    write(session, b, topic, "b")
    job = (topic, "q", "r", 0)
    assert session.check_attempt(*job, a) == OPEN
    session.commit_attempts(*job, [a])
    assert session.check_attempt(*job, b) == ALREADY_COMMITTED
    c = session.join_attempt(topic, "q", "r", 1)
    with pytest.raises(UnknownAttemptError, match=c.transactional_id):
        session.check_attempt(topic, "q", "r", 1, c._replace(epoch=c.epoch + 5))
    session.join_attempt(topic, "q", "r2", 1, owner="host-2 pid 2")
    with pytest.raises(FencedRunError, match="host-2 pid 2"):
        session.check_attempt(topic, "q", "r", 1, c)


def test_an_attempts_transaction_is_ended_by_its_batch_alone(
    broker: Any, session: Any, topic: str
) -> None:
    a = session.join_attempt(topic, "q", "r", 0)
    with session.attempt_producer(a) as producer:
        for call in (producer.commit_transaction, producer.abort_transaction):
            with pytest.raises(TransactionError, match="commit_attempts"):
                call()
        producer.produce(topic, b"x", partition=0)
        producer.flush()
    assert values(broker, topic) == []
    assert session.commit_attempts(topic, "q", "r", 0, [a]) == COMMITTED
    assert values(broker, topic) == [b"x"]


def test_a_commit_that_is_too_large_says_so_and_may_be_made_smaller(
    broker: Any, session: Any, topic: str
) -> None:
    attempts = [session.join_attempt(topic, "q", "r", 0) for _ in range(12)]
    sent = write(session, attempts[0], topic, "a")
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})

    def limit(size: int) -> None:
        change = ConfigEntry(
            "max.message.bytes", str(size), incremental_operation=AlterConfigOpType.SET
        )
        resource = ConfigResource(
            ConfigResource.Type.TOPIC, "__transaction_state", incremental_configs=[change]
        )
        admin.incremental_alter_configs([resource])[resource].result(10)

    limit(1000)
    try:
        with pytest.raises(TransactionError, match=r"max\.message\.bytes"):
            session.commit_attempts(topic, "q", "r", 0, attempts)
        assert values(broker, topic) == []
    finally:
        limit(COMMIT_BYTES)  # as the broker made it: other tests share it
    assert session.commit_attempts(topic, "q", "r", 0, attempts) == COMMITTED
    assert values(broker, topic) == sent


def test_a_batch_of_thousands_of_attempts_is_committed(broker: Any) -> None:
    """Their states are one record batch, which is larger than what a topic takes by default."""
    with kdirect.connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "tcp"}) as s:
        s.admin.create_topic("thousands", PARTITIONS)
        job = ("many" * 50, "query", "run", 0)
        attempts = [s.join_attempt(*job) for _ in range(3000)]
        sent = write(s, attempts[-1], "thousands", "sent")
        assert s.commit_attempts(*job, attempts) == COMMITTED
    assert values(broker, "thousands") == sent
