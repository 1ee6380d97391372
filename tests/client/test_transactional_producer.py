"""Transactions of `kdirect.Producer` against Apache Kafka: both protocols, read back by
confluent-kafka and by our own consumer."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
import uuid
from pathlib import Path

import confluent_kafka
import pytest

import kdirect
from kdirect import (
    ConfigError,
    DeliveryError,
    ProducerFencedError,
    TopicPartition,
    TransactionAbortableError,
    TransactionError,
)
from kdirect.client.idempotence import ProducerIdentity
from kdirect.client.transaction import GroupMetadata
from kdirect.client.transaction_link import TransactionLink
from kdirect.format.batch import check_batch_bytes
from kdirect.format.codec import encode_records

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def kafka(broker_jars):
    """The address of Apache Kafka."""
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        from versus.systems import Kafka
    finally:
        sys.path.remove(str(ROOT / "bench"))
    with tempfile.TemporaryDirectory() as directory:
        system = Kafka(
            directory, {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "200"}
        )
        try:
            yield system.address
        finally:
            system.stop()


@pytest.fixture(params=[1, 2], ids=["first-protocol", "second-protocol"])
def protocol(request, monkeypatch):
    """With which protocol: Kafka serves a client that knows the first one only, too."""
    if request.param == 1:
        choose = TransactionLink._choose_protocol

        def first(link, connection):
            choose(link, connection)
            link._machine.version = 1

        monkeypatch.setattr(TransactionLink, "_choose_protocol", first)
    return request.param


@pytest.fixture
def topic(kafka):
    name = f"t{uuid.uuid4().hex[:8]}"
    with kdirect.connect({"bootstrap.servers": kafka, "transport": "tcp"}) as session:
        session.admin.create_topic(name, 2, configs={"max.message.bytes": "20000"})
    return name


def producer(kafka, name="", **more):
    settings = {"bootstrap.servers": kafka, "transport": "tcp", "linger.ms": 1}
    name = name or f"id-{uuid.uuid4().hex[:8]}"
    return kdirect.Producer({**settings, "transactional.id": name, **more})


def ready(kafka, name="", **more):
    made = producer(kafka, name, **more)
    made.init_transactions(60)
    return made


def committed(kafka, topic, until):
    """Values that a read_committed consumer of librdkafka sees, up to the value `until`, which is
    the last of partition 0."""
    reader = confluent_kafka.Consumer({
        "bootstrap.servers": kafka, "group.id": uuid.uuid4().hex,
        "auto.offset.reset": "earliest", "isolation.level": "read_committed",
        "enable.partition.eof": True,
    })  # fmt: skip
    reader.assign([confluent_kafka.TopicPartition(topic, p, 0) for p in range(2)])
    values, ended, last = [], set(), False
    try:
        while not (last and 1 in ended):
            message = reader.poll(20)
            assert message is not None, f"only {values}"
            if message.error() is None:
                values.append(message.value().decode())
                last |= values[-1] == until
                ended.discard(message.partition())
            else:
                ended.add(message.partition())
    finally:
        reader.close()
    return sorted(v for v in values if v != until)


def finish(kafka, topic):
    """Write a last record, after which every transaction before has ended."""
    with ready(kafka) as last:
        last.begin_transaction()
        last.produce(topic, "END", partition=0)
        last.commit_transaction()
    return "END"


def test_committed_is_seen_and_aborted_is_not(kafka, topic, protocol):
    with ready(kafka) as made:
        for i in range(3):
            made.begin_transaction()
            for p in range(2):
                made.produce(topic, f"c{i}{p}", partition=p)
            made.commit_transaction()
            made.begin_transaction()
            made.send(topic, f"a{i}", partition=i % 2).result(20)
            made.produce(topic, f"never sent {i}", partition=0)
            made.abort_transaction()
        made.begin_transaction()
        made.commit_transaction()
    values = committed(kafka, topic, finish(kafka, topic))
    assert values == [f"c{i}{p}" for i in range(3) for p in range(2)]


def test_offsets_are_committed_with_the_records(kafka, topic, protocol):
    source = topic
    with ready(kafka) as made:
        made.begin_transaction()
        for i in range(6):
            made.produce(source, str(i), partition=0)
        made.commit_transaction()
    target = f"{topic}-out"
    with kdirect.connect({"bootstrap.servers": kafka, "transport": "tcp"}) as session:
        session.admin.create_topic(target, 2)
    settings = {
        "bootstrap.servers": kafka, "transport": "tcp", "group.id": topic,
        "auto.offset.reset": "earliest", "enable.auto.commit": False,
        "isolation.level": "read_committed",
    }  # fmt: skip
    tp = TopicPartition(source, 0)
    with kdirect.Consumer(settings) as reader, ready(kafka) as made:
        reader.subscribe([source])
        for turn in range(3):
            batch = []
            while len(batch) < 2:
                message = reader.poll(20)
                assert message is not None
                batch.append(message)
            made.begin_transaction()
            for message in batch:
                made.produce(target, message.value(), partition=0)
            made.send_offsets_to_transaction(
                {tp: batch[-1].offset() + 1}, reader.consumer_group_metadata()
            )
            if turn == 1:
                made.abort_transaction()
            else:
                made.commit_transaction()
            assert reader.committed([tp]) == {tp: 2 if turn < 2 else 6}
    assert committed(kafka, target, finish(kafka, target)) == ["0", "1", "4", "5"]


def test_a_member_that_is_gone_commits_nothing(kafka, topic, protocol):
    with ready(kafka) as made:
        made.begin_transaction()
        made.produce(topic, "x", partition=0)
        gone = GroupMetadata(f"g-{topic}", 7, "nobody")
        with pytest.raises(TransactionAbortableError, match="ILLEGAL_GENERATION"):
            made.send_offsets_to_transaction({TopicPartition(topic, 0): 1}, gone)
        with pytest.raises(TransactionAbortableError):
            made.commit_transaction()
        made.abort_transaction()
    assert committed(kafka, topic, finish(kafka, topic)) == []


def test_the_next_producer_of_a_name_fences_the_one_before(kafka, topic, protocol):
    old = ready(kafka, topic)
    old.begin_transaction()
    old.send(topic, "left open", partition=0).result(20)
    new = ready(kafka, topic)
    with pytest.raises(ProducerFencedError) as caught:
        old.commit_transaction()
    assert caught.value.fatal
    with pytest.raises(ProducerFencedError):
        old.begin_transaction()
    new.begin_transaction()
    new.produce(topic, "new", partition=0)
    new.commit_transaction()
    new.close()
    old.close()
    assert committed(kafka, topic, finish(kafka, topic)) == ["new"]


def test_a_record_that_is_refused_ends_the_transaction_and_not_the_producer(kafka, topic, protocol):
    failed = []
    with ready(kafka) as made:
        for i in range(2):
            made.begin_transaction()
            made.produce(topic, f"before {i}", partition=0)
            made.produce(
                topic, b"x" * 50_000, partition=0, on_delivery=lambda e, _: failed.append(e)
            )
            made.produce(topic, f"after {i}", partition=0)
            with pytest.raises(TransactionAbortableError, match="MESSAGE_TOO_LARGE"):
                made.commit_transaction()
            with pytest.raises(TransactionAbortableError) as caught:
                made.produce(topic, "more", partition=0)
            assert caught.value.txn_requires_abort
            made.abort_transaction()
            made.begin_transaction()
            made.produce(topic, f"good {i}", partition=0)
            made.commit_transaction()
    assert all(isinstance(e, DeliveryError) for e in failed)
    assert len(failed) == 2
    assert committed(kafka, topic, finish(kafka, topic)) == ["good 0", "good 1"]


def test_a_transaction_that_takes_too_long_is_aborted(kafka, topic):
    with ready(kafka, **{"transaction.timeout.ms": 500}) as made:
        made.begin_transaction()
        made.send(topic, "slow", partition=0).result(20)
        last = finish(kafka, topic)
        assert committed(kafka, topic, last) == []  # its end was waited for
        with pytest.raises(TransactionError) as caught:
            made.commit_transaction()
        assert caught.value.fatal or caught.value.txn_requires_abort


def test_what_a_killed_producer_leaves_is_aborted(kafka, topic):
    program = f"""
        import kdirect, os, signal
        made = kdirect.Producer({{"bootstrap.servers": {kafka!r}, "transport": "tcp",
                                 "transactional.id": {topic!r}}})
        made.init_transactions()
        made.begin_transaction()
        made.send({topic!r}, "left", partition=0).result(20)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=os.environ, check=False, timeout=60
    )
    assert run.returncode == -9
    ready(kafka, topic).close()
    assert committed(kafka, topic, finish(kafka, topic)) == []


def test_a_producer_that_is_closed_leaves_no_connection(kafka, topic):
    group = GroupMetadata(f"g-{topic}")
    kept = []  # what is forgotten would close its sockets anyhow

    def once():
        kept.append(ready(kafka, topic))
        with kept[-1] as made:
            made.begin_transaction()
            made.produce(topic, "x", partition=0)
            made.send_offsets_to_transaction({TopicPartition(topic, 0): 1}, group)
            made.commit_transaction()

    once()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        once()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_calls_need_a_name_and_an_order(kafka, topic):
    settings = {"bootstrap.servers": kafka, "transport": "tcp"}
    with (
        kdirect.Producer(settings) as plain,
        pytest.raises(ConfigError, match=r"transactional\.id"),
    ):
        plain.init_transactions()
    for wrong in ({"acks": "1"}, {"enable.idempotence": False}):
        with pytest.raises(ConfigError, match=r"transactional\.id"):
            kdirect.Producer({**settings, "transactional.id": "x", **wrong})
    with producer(kafka) as made:
        for call in (made.begin_transaction, lambda: made.produce(topic, "x", partition=0)):
            with pytest.raises(TransactionError, match="init_transactions"):
                call()
        made.init_transactions()
        with pytest.raises(TransactionError, match="begin_transaction"):
            made.produce(topic, "x", partition=0)
        with pytest.raises(ConfigError, match="consumer_group_metadata"):
            made.send_offsets_to_transaction({}, "group")


# -- without a broker ------------------------------------------------------------------------------


def test_batches_say_that_they_belong_to_a_transaction():
    identity = ProducerIdentity(7, 3, None, transactional=True)
    batch = encode_records([(b"k", b"v" * 100, [("h", b"x")], 5)])
    first, second = (check_batch_bytes(identity.stamp(batch)) for _ in range(2))
    assert first.is_transactional
    assert second.is_transactional
    assert (second.producer_id, second.producer_epoch, second.base_sequence) == (7, 3, 1)
    identity.restart(7, 3)
    assert identity.next_sequence == 2
    identity.restart(7, 4)
    assert check_batch_bytes(identity.stamp(batch)).base_sequence == 0
    plain = ProducerIdentity(7, 3, None)
    assert not check_batch_bytes(plain.stamp(batch)).is_transactional
