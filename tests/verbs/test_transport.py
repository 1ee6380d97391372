"""The choice of a transport where there is an RDMA device: each step of `transport=auto`; tests/client has the same without one."""

from __future__ import annotations

import logging

import pytest

from kdirect.errors import TransportError


def test_auto_takes_verbs_when_its_read_passes(own_broker, connect, caplog) -> None:
    broker = own_broker(rdma_transports="verbs,shm")
    with caplog.at_level(logging.INFO, "kdirect.client"):
        session = connect(broker, transport="auto")
        assert session.transport == "verbs"
    assert "a READ from the broker" in session.transport_reason and "GID" in session.transport_reason
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
    assert "the broker cannot offer verbs: there is no RDMA device 'nosuch0'" in session.transport_reason


def test_auto_takes_tcp_where_neither_passes(own_broker, connect) -> None:
    broker = own_broker(rdma_transports="verbs", rdma_gid_index=999)
    session = connect(broker, transport="auto")
    assert session.transport == "tcp"
    assert "GID index 999 is empty" in session.transport_reason and "shm: " in session.transport_reason


def test_a_gid_of_another_network_fails_the_choice_not_the_data(own_broker, connect) -> None:
    broker = own_broker(rdma_transports="verbs,shm")
    session = connect(broker, transport="verbs", rdma_bind_address="203.0.113.7")
    with pytest.raises(TransportError, match=r"no RDMA device has a RoCE v2 GID of 203\.0\.113\.7"):
        session.transport  # noqa: B018


def test_auto_takes_shm_where_no_data_flows(own_broker, connect) -> None:
    """Devices on both sides, but of networks that do not meet: the handshake may pass, the READ does not."""
    broker = own_broker(rdma_transports="verbs,shm", rdma_gid_index=0)  # the link-local one
    session = connect(broker, transport="auto")
    assert session.transport == "shm"
    assert "not verbs: " in session.transport_reason
    print(session.transport_reason)
