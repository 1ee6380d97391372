"""Why the produce worker ends a head or cuts a peer: values that are compared, each with a text for
the log."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path

import pytest

import kdirect
from kdirect.broker.order import AbortReason
from kdirect.broker.worker import CutReason
from kdirect.client import connect

BROKER = Path(__file__).resolve().parents[2] / "python/kdirect/broker"


@pytest.mark.parametrize(
    ("reasons", "declared", "prefix"),
    [(AbortReason, "order.pxd", "WHY_"), (CutReason, "produce_tables.pxd", "CUT_")],
    ids=["heads", "peers"],
)
def test_every_reason_has_a_value_and_a_text_of_its_own(reasons, declared, prefix):
    codes = {
        name: int(code)
        for name, code in re.findall(
            rf"^    {prefix}(\w+) = (\d+)", (BROKER / declared).read_text(), re.MULTILINE
        )
    }
    codes.pop("NONE", None)
    assert len(codes) > 3
    assert {reason.name: reason.value for reason in reasons if reason.name != "NONE"} == codes
    assert len({reason.text for reason in reasons}) == len(reasons)
    assert all(reason.text for reason in reasons)


def test_a_client_that_goes_is_no_fault_and_not_counted(broker, caplog):
    """A disconnected peer is the one that a warning is not due for."""
    connect(broker.bootstrap_servers).admin.create_topic("t", 1)
    caplog.set_level(logging.DEBUG, "kdirect.broker.rdma")
    with kdirect.Producer(
        {"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"}
    ) as producer:
        producer.produce_sync("t", b"v", partition=0)
        next(iter(producer._driver.links)).channel.qp.close()
        until = time.monotonic() + 10
        while (
            not any("has disconnected" in r.message for r in caplog.records)
            and time.monotonic() < until
        ):
            time.sleep(0.01)
        # Before the producer ends: then its other queue pair may be seen to go, too.
        (told,) = [r for r in caplog.records if "has disconnected" in r.message]
    assert told.levelno == logging.DEBUG
    assert not [
        r
        for r in caplog.records
        if r.name == "kdirect.broker.rdma" and r.levelno >= logging.WARNING
    ]
    assert broker.statistics()["rdma_clients_cut"] == 0
