"""Clusters of this machine, from Python and from the command line: what users and scripts call."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import confluent_kafka
import pytest

import kdirect
from kdirect.broker.config import read_properties
from kdirect.errors import ConfigError
from kdirect.model import TopicPartition
from kdirect.store.zookeeper_server import free_port
from tests.support import wait_until


def kdirect_command(*arguments: object) -> tuple[int, str, str]:
    run = subprocess.run(
        [sys.executable, "-m", "kdirect.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return run.returncode, run.stdout, run.stderr


def test_secrets_are_on_no_command_line(zookeeper_connect: str, tmp_path: Path) -> None:
    """They are in a file that its owner alone reads, and arrive as they are."""
    secret = " a\\b=c #d"
    properties = {"rsm.config.secret_key": secret}
    with kdirect.Cluster(
        1, tmp_path, zookeeper_connect=zookeeper_connect, properties=properties
    ) as made:
        (process,) = made._processes.values()
        command = Path(f"/proc/{process.process.pid}/cmdline").read_text()
        assert "secret_key" not in command and "--config" in command
        (path,) = tmp_path.rglob("broker-*.properties")
        assert path.stat().st_mode & 0o777 == 0o600
        assert read_properties(path) == properties


def test_a_broker_that_waits_for_its_cluster_is_stopped(tmp_path: Path) -> None:
    nobody = f"127.0.0.1:{free_port('127.0.0.1')}"
    at = ("--zookeeper-connect", nobody, "--zookeeper-connection-timeout-ms", "600000")
    with subprocess.Popen(
        [sys.executable, "-m", "kdirect.cli", "broker", "--log-dirs", tmp_path, *at],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as broker:
        try:
            assert broker.stdout is not None
            next(line for line in broker.stdout if "log directories" in line)
            broker.terminate()
            said = broker.communicate(timeout=20)[0]
            assert broker.returncode == 0, said
            assert "before it has joined" in said and "Traceback" not in said
        finally:
            broker.kill()


def test_a_broker_of_this_process_is_stopped_while_it_waits_for_its_cluster(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor() as others:
        host, port = silent.getsockname()
        properties = {
            "zookeeper.connect": f"{host}:{port}",
            "zookeeper.session.timeout.ms": 600_000,
        }
        broker = kdirect.Broker(tmp_path / "log", properties=properties)
        for _ in range(2):  # on the same directories again
            starting = [others.submit(broker.start), others.submit(broker.start)]
            waits = silent.accept()[0]
            began = time.monotonic()
            broker.stop()
            for future in starting:
                with pytest.raises(kdirect.KdirectError, match="stopped before it served"):
                    future.result(timeout=20)
            assert time.monotonic() - began < 20
            waits.close()
    alone = kdirect.Broker(tmp_path / "log").start()
    alone.stop()


def test_a_broker_that_has_ended_by_itself_is_started_again(
    cluster: Callable[..., kdirect.Cluster],
) -> None:
    brokers = cluster(1)
    pid = brokers.pid(1)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert brokers.running == []
    brokers.start(1)
    assert brokers.running == [1] and brokers.pid(1) != pid
    brokers.wait_for_members()


def test_a_broker_is_killed_and_comes_back(cluster: Callable[..., kdirect.Cluster]) -> None:
    brokers = cluster(3, racks=["a", "b", "b"])
    at = ("--bootstrap-servers", brokers.bootstrap_servers)
    assert kdirect_command("topic", "create", "t", *at)[:2] == (0, "created t\n")
    with kdirect.connect(
        {"bootstrap.servers": brokers.bootstrap_servers, "transport": "tcp"}
    ) as session:
        found = session.admin.describe_cluster()
        assert [(b.node_id, b.rack) for b in found.brokers] == [(1, "a"), (2, "b"), (3, "b")]
        (partition,) = session.admin.describe_topic("t").leaders
        assert sorted(partition.replicas) == sorted(partition.in_sync_replicas) == [1, 2, 3]
        assert kdirect_command("cluster", "health", *at)[:2] == (0, "well\n")

        def replicas(command: str, *more: str) -> list[str]:
            return re.findall(r"(?m)^ *replica.*", kdirect_command(command, "describe", *more)[1])

        followers = [n for n in partition.replicas if n != partition.leader]
        told = [f"  replica {n}\tpushed over shm" for n in followers]
        wait_until(lambda: replicas("topic", "t", *at) == told, "both were pushed to")
        lines = {f"replicas of broker {n}\tpushed over shm 1" for n in followers}
        assert lines < set(replicas("cluster", *at))
        lost = partition.leader
        brokers.kill(lost)
        assert brokers.running == [n for n in (1, 2, 3) if n != lost]
        failed: list[object] = []
        producer = confluent_kafka.Producer(
            {"bootstrap.servers": brokers.bootstrap_servers, "acks": "all", "log_level": 0}
        )
        producer.produce("t", b"v", on_delivery=lambda e, m: failed.append(e))
        assert producer.flush(30) == 0 and failed == [None]
        status, out, _ = kdirect_command("cluster", "health", *at)
        assert (status, out) == (1, "under-replicated\tt:0\n")
        _, out, _ = kdirect_command("topic", "describe", "t", *at)
        assert re.search(r"offsets \[0, 1\)\tleader (\d)\tepoch [1-9]\d*\treplicas", out), out
        assert f"leader {lost}" not in out

        brokers.start(lost)
        wait_until(lambda: session.admin.health().is_well, "the broker's replica was in sync")
        status, out, errors = kdirect_command("partition", "elect", "t:0", *at)
        assert (status, out) == (0, "t:0\telected\n"), errors
        wait_until(
            lambda: session.admin.describe_topic("t").leaders[0].leader == partition.replicas[0],
            "the preferred replica led",
        )


def test_a_partition_moves_to_other_brokers(cluster: Callable[..., kdirect.Cluster]) -> None:
    brokers = cluster(3)
    at = ("--bootstrap-servers", brokers.bootstrap_servers)
    with kdirect.connect(
        {"bootstrap.servers": brokers.bootstrap_servers, "transport": "tcp"}
    ) as session:
        session.admin.create_topic("t", 1, 1)
        with session.producer() as producer:
            for number in range(100):
                producer.produce("t", b"%d" % number)
            producer.flush()
        (partition,) = session.admin.describe_topic("t").leaders
        others = [n for n in (1, 2, 3) if n != partition.leader]
        wanted = ",".join(map(str, others))
        status, _, errors = kdirect_command("partition", "reassign", f"t:0={wanted}", "--wait", *at)
        assert status == 0, errors
        wait_until(
            lambda: session.admin.describe_topic("t").leaders[0].replicas == tuple(others),
            "the partition had moved",
        )
        assert session.admin.list_reassignments() == {}
        tp = TopicPartition("t", 0)
        assert wait_until(lambda: session.latest_offsets([tp])[tp] == 100, "its records are there")
        wait_until(
            lambda: not (brokers.log_dirs(partition.leader)[0] / "t-0").exists(),
            "the old replica was removed",
        )
        status, _, errors = kdirect_command("partition", "reassign", "t:0=9", *at)
        assert status == 1 and "moving t-0" in errors


def test_the_command_starts_a_cluster_and_ends_all_of_it(tmp_path: Path) -> None:
    """With a ZooKeeper of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kdirect.cli", "cluster", "start", "--brokers", "2"]
        + ["--directory", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        told = [process.stdout.readline() for _ in range(3)]
        pids = [int(pid) for pid in re.findall(r"^broker \d pid (\d+)$", "".join(told), re.M)]
        assert len(pids) == 2
        ready = re.fullmatch(r"kdirect cluster ready on (\S+:\d+,\S+:\d+)\n", told[2])
        assert ready is not None, told
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        status, out, errors = kdirect_command("cluster", "describe", "--broker", ready[1])
        assert status == 0 and "broker 2\t" in out and "offline partitions\t0\n" in out, errors
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    finally:
        process.kill()
        process.stdout.close()


def _children(pid: int) -> dict[int, str]:
    """The processes that a process has started, and their command lines."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {int(n): Path(f"/proc/{n}/cmdline").read_text().replace("\0", " ") for n in found}


def test_the_command_tells_of_ends_and_ends_without_its_zookeeper(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kdirect.cli", "cluster", "start", "--brokers", "2"]
        + ["--directory", str(tmp_path)]
        # One that has not noticed the store's end asks for its orderly stop four times 10 s.
        + ["--set", "controlled.shutdown.enable=false"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        next(line for line in process.stdout if line.startswith("kdirect cluster ready on "))
        children = _children(process.pid)
        (server,) = [pid for pid, line in children.items() if "ZooKeeperServerMain" in line]
        second = next(pid for pid, line in children.items() if "node.id=2" in line)
        os.kill(second, signal.SIGKILL)
        said = next(line for line in process.stderr if "broker 2 ended" in line)
        assert "by SIGKILL" in said and "nothing starts it again" in said
        assert f"{tmp_path}/broker-2.log" in said
        os.kill(server, signal.SIGKILL)
        rest = process.stderr.read()
        assert process.wait(60) == 1
        assert re.search(r"kdirect: the cluster's ZooKeeper at \S+ ended by SIGKILL", rest), rest
        assert "zookeeper.log" in rest and "Traceback" not in rest
        assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    finally:
        process.kill()
        process.communicate()


def test_the_command_ends_with_its_last_broker(tmp_path: Path, zookeeper_connect: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kdirect.cli", "cluster", "start", "--brokers", "1"]
        + ["--directory", str(tmp_path), "--zookeeper-connect", zookeeper_connect],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        pid = int(process.stdout.readline().removeprefix("broker 1 pid "))
        os.kill(pid, signal.SIGKILL)
        assert "no broker of the cluster runs any more" in process.communicate(timeout=60)[1]
        assert process.returncode == 1
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"brokers": 0}, "a cluster of 0 brokers"),
        ({"brokers": 3, "racks": ["a"]}, "1 racks for 3 brokers"),
    ],
)
def test_what_cannot_be_started_is_an_error(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        kdirect.Cluster(**arguments)  # type: ignore[arg-type]


def test_a_broker_that_does_not_start_says_why(tmp_path: Path) -> None:
    made = kdirect.Cluster(1, tmp_path, zookeeper_connect="two words:1")
    with pytest.raises(kdirect.BrokerUnavailableError, match=r"zookeeper\.connect"):
        made.start()
    assert made.running == []
    with pytest.raises(ConfigError, match="call start"):
        made.pid(1)
