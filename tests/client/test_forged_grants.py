"""Grants of a broker that lies: a number that would lead out of the client's memory is a
ProtocolError, and others go on.  Refusals leave nothing half read."""

from __future__ import annotations

from itertools import islice

import pytest

import kdirect
from kdirect.client import connect
from kdirect.errors import BrokerError, ProtocolError
from kdirect.model import TopicPartition
from kdirect.wire.channel import Channel

A, B = TopicPartition("t", 0), TopicPartition("t", 1)
FAR = 200_000_000


@pytest.fixture
def session(broker):
    """Over shm, with a topic `t` of two partitions of ten records each."""
    session = connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"})
    session.admin.create_topic("t", 2)
    with session.producer() as producer:
        for i in range(20):
            producer.produce("t", b"%d" % i, partition=i % 2)
    yield session
    session.close()


def forge(monkeypatch, method, field, value, of):
    """In the answers to `method`, the grant of this partition has `value` in `field`; of the answer
    as a whole with None."""
    ask = getattr(Channel, method)

    def forged(channel, *arguments, **named):
        answer = ask(channel, *arguments, **named)
        if of is None:
            setattr(answer, field, value)
        for target, grant in zip(arguments[0], getattr(answer, "partitions", ()), strict=False):
            if target[0] == of:
                setattr(grant, field, value)
        return answer

    monkeypatch.setattr(Channel, method, forged)


@pytest.mark.parametrize(
    ("field", "value"),
    [("slot_index", FAR), ("slot_index", 1 << 20), ("address", -(1 << 62)),
     ("address", (1 << 63) - 1), ("rkey", -1), ("rkey", 1 << 32),
     ("length", -1), ("start_position", -1), ("last_readable_position", 1 << 40)],
)  # fmt: skip
def test_a_forged_read_grant_concerns_its_partition_alone(session, monkeypatch, field, value):
    with kdirect.Consumer(session.settings, session=session) as consumer:
        with monkeypatch.context() as forging:
            forge(forging, "consume_access", field, value, B)
            with pytest.raises(ProtocolError, match="the broker granted") as told:
                consumer.assign({A: 0, B: 0})
            assert told.value.topic_partition == B
            got = list(islice(iter(lambda: consumer.poll(20), None), 10))
            assert [(m.partition(), m.offset()) for m in got] == [(0, i) for i in range(10)]
            assert consumer.poll(0) is None
            with session.producer() as producer:
                producer.produce_sync("t", b"more", partition=0)
            assert consumer.poll(20).value() == b"more"  # A's slot is looked at as before
        consumer.resume([B])
        assert [(m.partition(), m.offset()) for m in consumer.consume(10, 20)] == [
            (1, i) for i in range(10)
        ]


@pytest.mark.parametrize(
    ("field", "value"),
    [("aborted_length", 0), ("aborted_length", 8), ("aborted_length", 1 << 40),
     ("aborted_length", -1), ("aborted_address", -8), ("aborted_address", 4),
     ("aborted_rkey", -1), ("aborted_rkey", 1 << 32)],
)  # fmt: skip
def test_a_forged_list_of_aborted_transactions_is_refused(session, monkeypatch, field, value):
    settings = {**session.settings, "isolation.level": "read_committed"}
    with kdirect.Consumer(settings) as consumer:
        with monkeypatch.context() as forging:
            forge(forging, "consume_access", field, value, B)
            with pytest.raises(ProtocolError, match="the broker granted") as told:
                consumer.assign({A: 0, B: 0})
            assert told.value.topic_partition == B
        consumer.resume([B])
        assert len(list(islice(iter(lambda: consumer.poll(20), None), 20))) == 20


@pytest.mark.parametrize(
    ("field", "value"),
    [("slot_count", 0), ("slot_count", FAR), ("slot_address", -4096), ("slot_rkey", 1 << 32)],
)
def test_a_forged_slot_region_is_refused(session, monkeypatch, field, value):
    with kdirect.Consumer(session.settings, session=session) as consumer:
        with monkeypatch.context() as forging:
            forge(forging, "consume_access", field, value, None)
            with pytest.raises(ProtocolError, match="metadata slots"):
                consumer.assign({A: 0})
        consumer.resume([A])
        assert consumer.poll(20).offset() == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("file_id", 1 << 16), ("file_id", FAR), ("file_id", -1), ("address", -1),
     ("address", (1 << 63) - 1), ("rkey", -1), ("rkey", 1 << 32),
     ("length", -1), ("position", -1), ("word_address", -8), ("word_address", 4),
     ("word_rkey", 1 << 32)],
)  # fmt: skip
def test_a_forged_write_grant_is_refused(session, monkeypatch, field, value):
    with (
        session.producer(
            rdma_produce="shared" if field.startswith("word") else "exclusive"
        ) as producer,
        monkeypatch.context() as forging,
    ):
        forge(forging, "produce_access", field, value, None)
        with pytest.raises(ProtocolError, match="t-0: the broker granted"):
            producer.produce_sync("t", b"no", partition=0)
    with session.producer() as producer:
        assert producer.produce_sync("t", b"yes", partition=0) == 10


def test_a_request_for_access_that_failed_leaves_nobody_where_it_stood(session, monkeypatch):
    with kdirect.Consumer(session.settings, session=session) as consumer:
        consumer.assign({A: 0})
        assert len(list(islice(iter(lambda: consumer.poll(20), None), 10))) == 10
        ask, calls = Channel.consume_access, []

        def once(channel, targets, *more, **named):
            calls.append(targets)
            if len(calls) == 1:
                raise BrokerError("injected", retriable=True)
            return ask(channel, targets, *more, **named)

        monkeypatch.setattr(Channel, "consume_access", once)
        consumer.seek(A, 3)
        assert consumer.poll(20).offset() == 3 and len(calls) == 2
