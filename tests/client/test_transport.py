"""The choice of a transport where there is no RDMA device: each step of `transport=auto`, and what
a demand that cannot be met says.

tests/verbs/test_transport.py has the same with a device.  Here it is named wrong on purpose, so
that a machine with an RNIC answers alike.
"""

from __future__ import annotations

import logging
import threading

import pytest

import kdirect
from kdirect.errors import TransportError
from kdirect.format import layout
from kdirect.format import protocol as p
from kdirect.model import TopicPartition
from kdirect.wire.connection import Connection
from tests.support import stop_process

NO_DEVICE = {"rdma.device": "nosuch0"}


def open_session(servers: str, **settings: str) -> kdirect.client.session.Session:
    return kdirect.connect({"bootstrap.servers": servers, **NO_DEVICE, **settings})


def test_auto_takes_shm_on_one_host_and_says_why_not_verbs(broker_process, caplog) -> None:
    with caplog.at_level(logging.INFO, "kdirect.client"):
        session = open_session(broker_process().bootstrap_servers)
        assert session.transport == "shm"
    assert "shares this host's memory" in session.transport_reason
    assert "not verbs: " in session.transport_reason and "RDMA device" in session.transport_reason
    assert f"transport shm: {session.transport_reason}" in caplog.text
    session.close()


def test_auto_takes_tcp_where_shm_is_not_offered_either(broker_process, caplog) -> None:
    with caplog.at_level(logging.WARNING, "kdirect.client"):
        session = open_session(broker_process(rdma_transports="verbs").bootstrap_servers)
        assert session.transport == "tcp"
    assert "verbs: " in session.transport_reason and "RDMA device" in session.transport_reason
    assert "shm: " in session.transport_reason and "offered: verbs" in session.transport_reason
    assert f"transport tcp: {session.transport_reason}" in caplog.text
    session.admin.create_topic("t", 1)
    with session.producer() as producer:
        producer.produce("t", b"over tcp", partition=0)
        producer.flush()
    reader = session.reader(TopicPartition("t", 0), 0, 1)
    assert [v for b in reader.batches() for v in b.column("value").to_pylist()] == [b"over tcp"]
    assert reader.transport == "tcp"
    reader.close()
    session.close()


def test_verbs_without_a_device_is_one_clear_error(broker_process) -> None:
    session = open_session(broker_process().bootstrap_servers, transport="verbs")
    for _ in range(2):  # it does not depend on who asks first
        with pytest.raises(
            TransportError, match=r"transport=verbs cannot be had: .*RDMA device"
        ) as e:
            session.transport  # noqa: B018
        assert e.value.hint
    session.close()


def test_tcp_is_taken_without_looking(broker_process) -> None:
    session = open_session(broker_process().bootstrap_servers, transport="tcp")
    assert (session.transport, session.transport_reason) == ("tcp", "transport=tcp is set")
    session.close()


def test_a_broker_without_a_device_refuses_verbs_with_the_reason_and_serves_on(
    broker_process,
) -> None:
    broker = broker_process(rdma_device="nosuch0")
    host, _, port = broker.bootstrap_servers.rpartition(":")
    connection = Connection(host, int(port), timeout_ms=10_000)
    for _ in range(2):
        answer = connection.request(
            p.OpenQueuePairRequest(transport="verbs", address=b"anything", max_recv=1)
        )
        assert answer.error_code == layout.ERROR_TRANSPORT_UNAVAILABLE
        assert (
            "cannot offer verbs" in answer.error_message and "RDMA device" in answer.error_message
        )
    connection.close()
    session = open_session(broker.bootstrap_servers)
    assert session.transport == "shm"
    session.close()


def test_another_broker_is_asked_where_the_first_ends_during_the_proof(broker_process) -> None:
    brokers = {(b := broker_process()).bootstrap_servers: b for _ in range(2)}
    session = open_session(",".join(brokers))
    control = session.cluster.control_connection()
    asked = brokers[f"{control.host}:{control.port}"]
    stop_process(asked.pid)  # so it ends with the question unanswered
    end = threading.Timer(0.5, asked.kill)
    end.start()
    try:
        assert session.transport == "shm"
    finally:
        end.join()
    session.close()
