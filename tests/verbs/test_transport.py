"""The choice of a transport where there is an RDMA device: each step of `transport=auto`;
tests/client has the same without one."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kdirect
from kdirect.errors import TransportError
from kdirect.model import TopicPartition
from tests.support import BrokerProcess
from tests.verbs.conftest import WAIT_S, values_of


def test_auto_takes_verbs_when_its_read_passes(own_broker, connect, caplog) -> None:
    broker = own_broker(rdma_transports="verbs,shm")
    with caplog.at_level(logging.INFO, "kdirect.client"):
        session = connect(broker, transport="auto")
        assert session.transport == "verbs"
    assert (
        "a READ from the broker" in session.transport_reason and "GID" in session.transport_reason
    )
    assert f"transport verbs: {session.transport_reason}" in caplog.text


def test_auto_takes_shm_where_the_broker_offers_no_verbs(own_broker, connect) -> None:
    broker = own_broker(rdma_transports="shm")
    session = connect(broker, transport="auto")
    assert session.transport == "shm"
    assert "not verbs: " in session.transport_reason and "offered: shm" in session.transport_reason
    with pytest.raises(TransportError, match=r"transport=verbs cannot be had: .*offered: shm"):
        connect(broker, transport="verbs").transport  # noqa: B018


def test_auto_takes_shm_where_the_brokers_device_fails(own_broker, connect) -> None:
    broker = own_broker(rdma_transports="verbs,shm", rdma_device="nosuch0")
    session = connect(broker, transport="auto")
    assert session.transport == "shm"
    assert (
        "the broker cannot offer verbs: there is no RDMA device 'nosuch0'"
        in session.transport_reason
    )


def test_auto_takes_tcp_where_neither_passes(own_broker, connect) -> None:
    broker = own_broker(rdma_transports="verbs", rdma_gid_index=999)
    session = connect(broker, transport="auto")
    assert session.transport == "tcp"
    assert (
        "GID index 999 is empty" in session.transport_reason and "shm: " in session.transport_reason
    )


def test_a_gid_of_another_network_fails_the_choice_not_the_data(own_broker, connect) -> None:
    broker = own_broker(rdma_transports="verbs,shm")
    session = connect(broker, transport="verbs", rdma_bind_address="203.0.113.7")
    with pytest.raises(TransportError, match=r"no RDMA device has a RoCE v2 GID of 203\.0\.113\.7"):
        session.transport  # noqa: B018


def test_auto_takes_shm_where_no_data_flows(own_broker, connect) -> None:
    """Devices on both sides, but of networks that do not meet: the handshake may pass, the READ
    does not."""
    broker = own_broker(rdma_transports="verbs,shm", rdma_gid_index=0)  # the link-local one
    session = connect(broker, transport="auto")
    assert session.transport == "shm"
    assert "not verbs: " in session.transport_reason
    print(session.transport_reason)


@pytest.fixture
def low_limit(
    own_broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int], BrokerProcess]:
    """``low_limit(kib)``: a broker of a user whose `ulimit -l` nobody has raised; root's capability
    that makes it moot is taken away."""

    def start(kib: int) -> BrokerProcess:
        unprivileged = tmp_path / "python"
        unprivileged.write_text(
            f"#!/bin/sh\nulimit -l {kib}\n"
            f'exec setpriv --bounding-set=-ipc_lock {sys.executable} "$@"\n'
        )
        unprivileged.chmod(0o755)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(unprivileged))
            return own_broker(rdma_transports="verbs")

    return start


def test_auto_takes_tcp_where_the_broker_may_not_lock_memory(low_limit, connect) -> None:
    session = connect(low_limit(16), transport="auto")
    assert session.transport == "tcp"
    print(session.transport_reason)
    assert "locked memory is limited to 16 KiB" in session.transport_reason


@pytest.mark.parametrize(
    ("limit_kib", "value_bytes"),
    [(128, 8), (1024, 960 << 10)],
    ids=["no second queue pair", "no segment"],
)
def test_what_the_broker_cannot_register_is_served_over_tcp_and_the_limit_is_told(
    limit_kib: int, value_bytes: int, low_limit, connect, caplog
) -> None:
    """A head is as large as what is written into it: a large record needs more memory than may be
    locked."""
    broker = low_limit(limit_kib)  # enough for the ping and its slots
    session = connect(broker, transport="auto")
    assert session.transport == "verbs"
    session.admin.create_topic("t", 1)
    with caplog.at_level(logging.INFO, "kdirect"), session.producer() as producer:
        value = b"over TCP".ljust(value_bytes, b".")
        assert producer.produce_sync("t", value, partition=0) == 0
        assert producer.statistics()["tcp_records"] == 1
        assert values_of(session, TopicPartition("t", 0)) == [value]
        with kdirect.Consumer(dict(session.settings), session=session) as consumer:
            consumer.assign({TopicPartition("t", 0): 0})
            assert consumer.poll(WAIT_S).value() == value
    refused = re.compile(rf"locked memory is limited to {limit_kib} KiB, (\d+) KiB more are needed")
    for text in (broker.errors.read_text(), caplog.text):
        needed = refused.search(text)
        assert needed is not None and int(needed[1]) >= max(64, value_bytes >> 10), text
    assert (
        "t-0 is written over TCP" in caplog.text and caplog.text.count("t-0 is read over TCP") == 2
    )
