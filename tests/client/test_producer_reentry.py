"""What a producer promises where its own thread comes back to it while it opens a way (a signal
handler that flushes or closes it), where a broker moves, and where several partitions fail at once.
Real brokers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time

import pytest

import kdirect
from kdirect.client import connect
from kdirect.client.direct_append import DirectAppender
from kdirect.client.idempotence import ProducerIdentity
from kdirect.client.produce_driver import ProduceDriver
from kdirect.errors import (
    BrokerUnavailableError,
    ClosedError,
    DeliveryError,
    KdirectError,
    ProtocolError,
)
from kdirect.format.codec import encode_records
from kdirect.model import TopicPartition
from kdirect.options import CLIENT
from tests.support import stop_process

A, B = TopicPartition("t", 0), TopicPartition("t", 1)


@contextlib.contextmanager
def after(seconds, handle):
    """Call `handle` in this thread, as a signal handler, so many seconds from now."""
    before = signal.signal(signal.SIGALRM, lambda *_: handle())
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def held(broker_process):
    """A producer of a partition that another one has for itself: for a second it waits for it."""
    settings = {
        "bootstrap.servers": broker_process().bootstrap_servers,
        "transport": "shm",
        "rdma.produce": "exclusive",
    }
    with connect(settings) as session, kdirect.Producer(settings) as holder:
        session.admin.create_topic("t", 1)
        holder.produce("t", b"held", partition=0)
        holder.flush()
        producer = kdirect.Producer(settings)
        yield producer
        producer.abort()


@pytest.mark.parametrize("end", [lambda p: p.close(0.05), lambda p: p.abort()])
def test_a_signal_handler_may_close_a_producer_that_opens_a_way(held, end):
    with after(0.2, lambda: end(held)), pytest.raises(ClosedError):
        held.produce("t", b"not sent", partition=0)
    with pytest.raises(ClosedError):
        held.produce("t", b"not sent", partition=0)
    assert all(link.channel is None for link in held._driver.links)
    assert held.statistics()["paths"] == {"t-0": "idle"}


def test_a_signal_handler_may_produce_and_flush_while_a_way_is_opened(held):
    told, left = [], []

    def handle():
        held.produce("t", b"later", partition=0, on_delivery=lambda e, m: told.append(e))
        left.append(held.flush(0.05))

    with after(0.2, handle), pytest.raises(KdirectError):
        held.produce("t", b"not sent", partition=0)
    assert left == [1] and told == []
    held.abort()
    assert [type(error) for error in told] == [DeliveryError]


def test_what_a_broker_had_not_answered_goes_to_it_where_it_comes_back(tmp_path):
    with contextlib.ExitStack() as listeners:
        ports = [
            listeners.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for _ in range(2)
        ]
    first, second = (f"127.0.0.1:{port}" for port in ports)
    settings = {"bootstrap.servers": f"{first},{second}", "transport": "shm"}
    properties = {"rdma.transports": "shm"}
    with connect(settings) as session, kdirect.Producer(session.settings, session=session) as p:
        with kdirect.Broker(tmp_path, first, properties=properties):
            session.admin.create_topic("t", 2)
            p.produce("t", b"0", partition=0)
            p.produce("t", b"0", partition=1)
            assert p.flush() == 0
        with kdirect.Broker(tmp_path, second, properties=properties):
            begun = time.monotonic()
            told = []
            for i in range(2):
                p.produce("t", b"1", partition=i, on_delivery=lambda e, m: told.append(e))
            assert p.flush(30) == 0 and told == [None, None]
            assert time.monotonic() - begun < 15, "the delivery timeout is 120 s"
            assert set(p.statistics()["paths"].values()) == {"exclusive"}
            assert session.latest_offsets([A, B]) == {A: 2, B: 2}


def test_the_failure_of_one_partition_hides_no_failure_of_another(broker_process):
    broker = broker_process()
    settings = {"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"}
    with connect(settings) as session:
        session.admin.create_topic("t", 2)
        producer = kdirect.Producer(
            {**session.settings, "delivery.timeout.ms": 400}, session=session
        )
        driver = producer._driver
        batch = bytearray(encode_records([(None, b"x" * 100, [], 1)]))
        for tp in (A, B):
            driver.send(tp, bytes(batch), 1)
        driver.flush()
        batch[-1] ^= 1  # damaged before it was sent: the broker refuses it for good
        driver.send(B, bytes(batch), 1)
        time.sleep(0.3)  # its refusal has come, and nobody has looked
        stop_process(broker.pid)
        try:
            with pytest.raises(DeliveryError, match="t-0"):
                producer.produce_sync("t", b"y", partition=0)
        finally:
            os.kill(broker.pid, signal.SIGCONT)
        with pytest.raises(DeliveryError, match="t-1: a batch of 1 records"):
            driver.raise_errors()
        producer.abort()


@pytest.mark.parametrize("what", ["closes", "flushes"])
def test_a_signal_handler_may_act_while_requests_are_taken_back(broker_process, monkeypatch, what):
    """After a refusal the producer waits for the answers to what it sent later."""
    settings = {"bootstrap.servers": broker_process().bootstrap_servers, "transport": "shm"}
    with connect(settings) as session:
        session.admin.create_topic("t", 1)
        producer = kdirect.Producer(session.settings, session=session)
        driver = producer._driver
        batch = bytearray(encode_records([(None, b"x" * 100, [], 1)]))
        driver.send(A, bytes(batch), 1)
        driver.flush()
        take_back, calls = DirectAppender.take_back, []

        def interrupted(appender, *, wait=False):
            if wait and not calls:
                calls.append(what)
                if what == "closes":
                    producer.abort()
                else:
                    with contextlib.suppress(DeliveryError):
                        producer.flush()
            return take_back(appender, wait=wait)

        monkeypatch.setattr(DirectAppender, "take_back", interrupted)
        batch[-1] ^= 1  # damaged before it was sent: the broker refuses it
        driver.send(A, bytes(batch), 1)
        with contextlib.suppress(DeliveryError, ClosedError):
            producer.flush()
        assert calls == [what] and len(producer) == 0
        if what == "flushes":
            batch[-1] ^= 1
            driver.send(A, bytes(batch), 1)
            producer.flush()
        producer.abort()


def test_other_threads_produce_while_one_waits_for_its_offset(broker_process):
    broker = broker_process()
    settings = {"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"}
    with kdirect.Producer(settings) as producer:
        producer.produce_sync("t", b"0", partition=0)
        offsets = []
        waits = threading.Thread(
            target=lambda: offsets.append(producer.produce_sync("t", b"1", partition=0))
        )
        stop_process(broker.pid)
        try:
            waits.start()
            begun = time.monotonic()
            while len(producer) == 0 and time.monotonic() - begun < 30:
                time.sleep(0.01)  # until its record is under way
            begun = time.monotonic()
            for _ in range(5):
                producer.produce("t", b"2", partition=0)
            assert time.monotonic() - begun < 30 and waits.is_alive()
        finally:
            os.kill(broker.pid, signal.SIGCONT)
        waits.join(30)
        assert offsets == [1]
        assert producer.flush() == 0


def test_a_producer_whose_ids_are_used_up_says_so(broker_process, monkeypatch):
    with pytest.raises(ProtocolError, match="producer id 7 are used up"):
        ProducerIdentity(7, 32767, lambda: None).renew()
    broker = broker_process()
    settings = {"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"}
    with connect(settings) as session:
        session.admin.create_topic("t", 1)
        ids = [(session.new_producer_id()[0], 32767)]  # the last epoch
        monkeypatch.setattr(session, "new_producer_id", lambda: ids.pop() if ids else None)
        driver = ProduceDriver(session, CLIENT.resolve(session.settings))
        batch = encode_records([(None, b"x", [], 1)])
        driver.send(A, batch, 1)
        driver.flush()
        stop_process(broker.pid)
        try:
            driver.send(A, batch, 1, "tag")
            driver.expire(A)
            assert [tag for tag, _, error in driver.outcomes() if error is not None] == ["tag"]
        finally:
            os.kill(broker.pid, signal.SIGCONT)
        driver.abort()


def test_what_expires_is_told_though_no_new_producer_id_can_be_had(broker_process, monkeypatch):
    broker = broker_process()
    settings = {"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"}
    with connect(settings) as session:
        session.admin.create_topic("t", 1)
        producer_id, _ = session.new_producer_id()
        ids = [(producer_id, 32767)]  # the last epoch

        def new_producer_id():
            if not ids:
                raise BrokerUnavailableError("away", hint="wait")
            return ids.pop()

        monkeypatch.setattr(session, "new_producer_id", new_producer_id)
        driver = ProduceDriver(session, CLIENT.resolve(session.settings))
        batch = encode_records([(None, b"x", [], 1)])
        driver.send(A, batch, 1)
        driver.flush()
        stop_process(broker.pid)
        try:
            driver.send(A, batch, 1, "tag")
            driver.expire(A)
            assert [tag for tag, _, error in driver.outcomes() if error is not None] == ["tag"]
            assert driver.in_flight == 0
        finally:
            os.kill(broker.pid, signal.SIGCONT)
        ids.append((producer_id + 1, 0))
        driver.send(A, batch, 1, "again")
        driver.flush()
        assert driver.appender(A).last_offset >= 1
        driver.abort()
