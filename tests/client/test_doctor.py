"""`kdirect doctor` where RDMA would not be used: it says why, and its exit status too.  tests/verbs
has the opposite."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from kdirect import doctor

NO_DEVICE = ("--device", "nosuch0")  # so that a machine with an RNIC answers the same


def run_doctor(*arguments: str) -> tuple[int, str, dict[str, str]]:
    """(exit status, last line, verdict of each step)."""
    run = subprocess.run(
        [sys.executable, "-m", "kdirect.cli", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = run.stdout.splitlines()
    assert lines, run.stderr
    steps = {
        line[6:20].strip(): line.split()[0]
        for line in lines[:-1]
        if line and not line.startswith(" ")
    }
    return run.returncode, lines[-1], steps


def test_without_a_device_it_fails_and_names_the_step(tmp_path: Path) -> None:
    status, last, steps = run_doctor(*NO_DEVICE, "--log-dirs", str(tmp_path))
    assert status == 1
    assert last.startswith("verbs would NOT be used on this host")
    refused = [step for step, verdict in steps.items() if verdict == "NO"]
    assert refused and refused[0] in ("pyverbs", "device", "device files", "gid")
    assert f": {refused[0]}: " in last and last.endswith(
        "transport=auto would take shm with a broker on this host, tcp with any other"
    )
    assert steps["shm"] == "ok" and steps["log directory"] == "note"
    assert run_doctor(*NO_DEVICE, "--transport", "shm")[0] == 0


def test_with_a_broker_of_this_host(broker) -> None:
    status, last, steps = run_doctor(*NO_DEVICE, "--broker", broker.bootstrap_servers)
    assert status == 1 and "transport=auto would take shm" in last
    assert (steps["broker"], steps["verbs ping"], steps["shm ping"]) == ("ok", "NO", "ok")
    status, last, _ = run_doctor(
        *NO_DEVICE, "--broker", broker.bootstrap_servers, "--transport", "shm"
    )
    assert (status, last) == (0, f"shm would be used with the broker at {broker.bootstrap_servers}")


def test_with_a_broker_that_offers_no_rdma(broker_process) -> None:
    broker = broker_process(**{"rdma.transports": ""})
    status, last, steps = run_doctor(
        *NO_DEVICE, "--broker", broker.bootstrap_servers, "--transport", "shm"
    )
    assert (
        status == 1 and "rdma.transports" in last and last.endswith("transport=auto would take tcp")
    )
    assert steps["shm ping"] == "NO"


def test_with_no_broker_at_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    status, last, steps = run_doctor(*NO_DEVICE, "--broker", address)
    assert status == 1 and steps["broker"] == "NO" and last.endswith("no transport would work")


def test_file_systems(tmp_path: Path) -> None:
    assert doctor.file_system(Path("/proc/self"))[1] == "proc"
    assert doctor.file_system(Path("/dev/shm")) == ("/dev/shm", "tmpfs")
    mount, kind = doctor.file_system(tmp_path)
    assert str(tmp_path).startswith(mount) and kind != "unknown"
    assert doctor.log_directory(str(tmp_path / "not" / "there")).detail.endswith(
        "it does not exist yet"
    )
