"""`kdirect doctor` where RDMA works, and where one thing has been taken away."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import BrokerProcess
from tests.verbs.conftest import TRANSPORT, rdma_address

pytestmark = pytest.mark.skipif(TRANSPORT != "verbs", reason="needs an RNIC")


def run_doctor(*arguments: str, before: str = "") -> tuple[int, str, dict[str, str]]:
    """(exit status, last line, verdict of each step); `before` is run in a mount namespace of its
    own."""
    command = [sys.executable, "-m", "kdirect.cli", "doctor", *arguments]
    if before:
        command = ["unshare", "-m", "sh", "-c", before + '; exec "$@"', "sh", *command]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    lines = run.stdout.splitlines()
    assert lines, run.stderr
    steps = {
        line[6:20].strip(): line.split()[0]
        for line in lines[:-1]
        if line and not line.startswith(" ")
    }
    return run.returncode, lines[-1], steps


def test_all_is_well_on_this_host(tmp_path: Path) -> None:
    status, last, steps = run_doctor("--bind-address", rdma_address(), "--log-dirs", str(tmp_path))
    assert (status, last) == (
        0,
        "verbs would be used on this host (no broker was named: --broker HOST:PORT)",
    )
    assert all(
        steps[name] == "ok"
        for name in (
            "pyverbs",
            "device",
            "device files",
            "gid",
            "memlock",
            "open",
            "memory",
            "mapping",
            "ping",
        )
    )


def test_all_is_well_with_a_broker(broker: BrokerProcess) -> None:
    status, last, steps = run_doctor("--broker", broker.bootstrap_servers)
    assert (status, last) == (
        0,
        f"verbs would be used with the broker at {broker.bootstrap_servers}",
    )
    assert (steps["broker"], steps["verbs ping"], steps["shm ping"]) == (
        "ok",
        "ok",
        "NO",
    )  # this one offers verbs alone


def test_a_broker_that_offers_only_shm(own_broker) -> None:
    broker = own_broker(rdma_transports="shm")
    status, last, steps = run_doctor("--broker", broker.bootstrap_servers)
    assert status == 1 and steps["ping"] == "ok" and steps["verbs ping"] == "NO"
    assert "offered: shm" in last and last.endswith("transport=auto would take shm")


def test_a_gid_that_is_none() -> None:
    status, last, steps = run_doctor("--gid-index", "900")
    assert status == 1 and steps["gid"] == "NO" and ": gid: GID index 900 is empty" in last
    status, last, steps = run_doctor("--bind-address", "192.0.2.1")
    assert status == 1 and steps["gid"] == "NO" and "192.0.2.1" in last


@pytest.fixture
def port_down() -> Iterator[str]:
    """A soft-RoCE device whose network interface is down."""
    subprocess.run(["ip", "link", "add", "down0", "type", "dummy"], check=True)
    subprocess.run(
        ["rdma", "link", "add", "rxe_down", "type", "rxe", "netdev", "down0"], check=True
    )
    yield "rxe_down"
    subprocess.run(["rdma", "link", "delete", "rxe_down"], check=True)
    subprocess.run(["ip", "link", "delete", "down0"], check=True)


def test_a_port_that_is_down(port_down: str) -> None:
    status, last, steps = run_doctor("--device", port_down)
    assert status == 1 and steps["gid"] == "NO" and "rxe_down" in last


def test_no_device_files() -> None:
    """As in a container that was not given any."""
    status, last, steps = run_doctor(before="mount -t tmpfs none /dev/infiniband")
    assert (
        status == 1
        and steps["device files"] == "NO"
        and "/dev/infiniband has no uverbs device" in last
    )


def test_a_low_limit_of_locked_memory() -> None:
    """As of a user whose `ulimit -l` nobody has raised; root has the capability that makes it moot,
    so it goes too."""
    before = 'ulimit -l 256; set -- setpriv --bounding-set=-ipc_lock "$@"'
    status, last, steps = run_doctor(before=before)
    assert status == 1 and steps["memlock"] == "NO"
    assert (
        ": memlock: locked memory is limited to 256 KiB (ulimit -l); 65536 KiB are needed" in last
    )
