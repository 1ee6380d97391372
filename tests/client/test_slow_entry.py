"""Producers whose leader takes long to let a transaction in: a WRITE over RDMA waits for that, and
other threads do not."""

from __future__ import annotations

import signal
import threading

import pyarrow as pa
import pytest

import kdirect
from kdirect import TopicPartition
from kdirect.client.direct_append import DirectAppender
from tests.support import stop_process, wait_until


@pytest.fixture(params=["exclusive", "shared"])
def made(broker_process, request):
    """A broker of its own, and a producer that has committed a transaction on both partitions."""
    broker = broker_process()
    settings = {"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"}
    with kdirect.connect(settings) as session:
        session.admin.create_topic("t", 2)
    producer = kdirect.Producer(
        {**settings, "rdma.produce": request.param, "transactional.id": "slow"}
    )
    producer.init_transactions(30)
    producer.begin_transaction()
    for partition in range(2):
        producer.produce("t", b"first", partition=partition)
    producer.commit_transaction()
    yield broker, producer
    producer.close()


def committed(broker, partition):
    tp = TopicPartition("t", partition)
    with kdirect.Consumer(
        {"bootstrap.servers": broker.bootstrap_servers, "isolation.level": "read_committed"}
    ) as reader:
        reader.assign({tp: 0})
        end, values = reader.get_watermark_offsets(tp)[1], []
        while reader.position(tp) < end and (message := reader.poll(5)) is not None:
            values.append(message.value())
    return values


def in_thread(errors, call, *args, **kwargs):
    """A thread that calls, and leaves its error in `errors`."""

    def run():
        try:
            call(*args, **kwargs)
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def asked_to_enter(producer):
    """Has the leader of partition 0 been asked, without an answer yet?"""
    appender = producer._driver.appender(TopicPartition("t", 0))
    return isinstance(appender, DirectAppender) and appender._entering is not None


COLUMNS = pa.table({"value": [b"0", b"1"]})


@pytest.mark.parametrize("columns", [False, True])
def test_other_threads_go_on_meanwhile(made, columns):
    """The broker stands until `poll` and `produce` of another thread, and a `produce` of the same,
    have returned.  They would wait for as long as it stands, if they had to wait for the lock."""
    broker, producer = made
    told, errors, expected = [], [], {0: [b"first", b"0", b"1"], 1: [b"first", b"2"]}
    producer.begin_transaction()
    stop_process(broker.process.pid)
    try:
        if columns:
            first = in_thread(errors, producer.send_arrow, COLUMNS.append_column(
                "partition", pa.array([0, 0], pa.int32())), "t")  # fmt: skip
        else:

            def both():
                for value in (b"0", b"1"):
                    producer.produce("t", value, partition=0)

            first = in_thread(errors, both)
        wait_until(lambda: asked_to_enter(producer), "the leader is asked")
        others = [
            in_thread(errors, producer.poll, 0),
            in_thread(
                errors,
                producer.produce,
                "t",
                b"2",
                partition=1,
                on_delivery=lambda error, message: told.append((error, message.value())),
            ),
            *([] if columns else [first]),
        ]
        for thread in others:
            thread.join(30)
        assert not any(thread.is_alive() for thread in others), "they wait for the broker"
        assert asked_to_enter(producer)
    finally:
        broker.process.send_signal(signal.SIGCONT)
    first.join(60)
    assert not first.is_alive()
    producer.commit_transaction(60)
    assert (errors, told) == ([], [(None, b"2")])
    assert {p: committed(broker, p) for p in expected} == expected


def test_a_transaction_that_is_aborted_before_it_was_let_in(made):
    """The answer to the request of before says nothing of the next transaction."""
    broker, producer = made
    producer.begin_transaction()
    stop_process(broker.process.pid)
    try:
        producer.produce("t", b"aborted", partition=0)
        assert asked_to_enter(producer)
        with pytest.raises(kdirect.TimedOutError):
            producer.abort_transaction(0.1)
    finally:
        broker.process.send_signal(signal.SIGCONT)
    producer.abort_transaction(60)
    for i in range(3):
        producer.begin_transaction()
        for partition in range(2):
            producer.produce("t", b"%d" % i, partition=partition)
        producer.commit_transaction(60)
    assert [committed(broker, p) for p in range(2)] == [[b"first", b"0", b"1", b"2"]] * 2
