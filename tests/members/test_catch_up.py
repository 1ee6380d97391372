"""Followers that lack sealed segments READ them out of their leader's memory: real brokers over
shm, under load, through kills, stops and throttles."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

import kdirect
from tests.members.test_push_cluster import check_values, make_topic, wait_pushed
from tests.members.test_segments import TOPIC, Producing, sealed, state, wait_same
from tests.support import wait_until


def read_bytes(cluster: kdirect.Cluster, node_id: int) -> int:
    """How many bytes of sealed segments a broker has said that it READ."""
    text = cluster.log_file(node_id).read_text(errors="replace")
    return sum(map(int, re.findall(r"(\d+) bytes of \d+ segments were read from broker", text)))


@contextmanager
def load(producing: Producing) -> Iterator[None]:
    """Records are produced meanwhile, as many as are acknowledged."""
    done = threading.Event()
    failures: list[BaseException] = []

    def produce() -> None:
        try:
            while not done.is_set():
                producing.send(50)
        except BaseException as e:
            failures.append(e)

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    assert not failures, failures[0]


def throttle(cluster: kdirect.Cluster, side: str, rate: int | None, *brokers: int) -> None:
    """Let replicas of the topic catch up at so many bytes per second; None: at any rate."""
    with kdirect.connect(
        {"bootstrap.servers": cluster.bootstrap_servers, "transport": "tcp"}
    ) as session:
        replicas = None if rate is None else "*"
        session.admin.alter_configs(TOPIC, {f"{side}.replication.throttled.replicas": replicas})
        for node_id in brokers:
            name = f"{side}.replication.throttled.rate"
            session.admin.alter_configs(None, {name: rate}, broker=node_id)


def empty(cluster: kdirect.Cluster, node_id: int) -> None:
    for directory in cluster.log_dirs(node_id):
        shutil.rmtree(directory)


def test_an_emptied_disk_is_filled_by_reads_under_load(
    cluster: Callable[..., kdirect.Cluster],
) -> None:
    ours = cluster(3)
    make_topic(ours.bootstrap_servers)
    producing = Producing(ours)
    wait_until(lambda: state(ours).leader > 0, "there was a leader")
    producing.send(3000)
    leader = wait_pushed(ours)
    follower = next(n for n in ours.node_ids if n != leader)
    ours.kill(follower)
    empty(ours, follower)
    with load(producing):
        ours.start(follower)
        wait_until(lambda: len(state(ours).in_sync_replicas) == 3, "all were in sync", 60)
    wait_same(ours)
    assert len(sealed(ours, follower)) > 30
    assert read_bytes(ours, follower) > 2_000_000
    wait_pushed(ours)
    check_values(ours, producing)


def test_a_follower_that_was_away_for_long_and_kills_meanwhile(
    cluster: Callable[..., kdirect.Cluster],
) -> None:
    """The follower dies while it reads, then the leader does while it is read from."""
    ours = cluster(3)
    make_topic(ours.bootstrap_servers)
    producing = Producing(ours)
    wait_until(lambda: state(ours).leader > 0, "there was a leader")
    leader = wait_pushed(ours)
    follower, other = (n for n in ours.node_ids if n != leader)
    ours.kill(follower)
    producing.send(2000)  # more than 20 segments
    assert len(sealed(ours, leader)) > 20
    throttle(ours, "leader", 200_000, leader, other)  # so that there is time to kill
    ours.start(follower)
    wait_until(lambda: len(sealed(ours, follower)) > 2, "segments were read")
    ours.kill(follower)
    ours.start(follower)
    before = len(sealed(ours, follower))
    wait_until(lambda: len(sealed(ours, follower)) > before + 2, "more segments were read")
    ours.kill(leader)
    producing.send(100)
    assert state(ours).leader == other
    throttle(ours, "leader", None)
    ours.start(leader)
    wait_same(ours)
    assert read_bytes(ours, follower) > 500_000
    wait_pushed(ours)
    producing.send(100)
    wait_same(ours)
    check_values(ours, producing)


@pytest.mark.parametrize(("side", "by_rdma"), [("leader", True), ("follower", False)])
def test_a_new_replica_is_throttled_and_others_are_not(
    cluster: Callable[..., kdirect.Cluster], side: str, by_rdma: bool
) -> None:
    ours = cluster(3, rdma_replicate=by_rdma)
    make_topic(ours.bootstrap_servers, replicas=2)
    producing = Producing(ours)
    wait_until(lambda: len(state(ours).in_sync_replicas) == 2, "there were two replicas")
    producing.send(3000)
    rate, leader = 500_000, state(ours).leader
    new = next(n for n in ours.node_ids if n not in state(ours).replicas)
    throttle(ours, side, 1, *ours.node_ids)
    with kdirect.connect(
        {"bootstrap.servers": ours.bootstrap_servers, "transport": "tcp"}
    ) as session:
        session.admin.reassign_partitions(
            {kdirect.TopicPartition(TOPIC, 0): [*state(ours).replicas, new]}
        )
    directory = ours.log_dirs(new)[0] / f"{TOPIC}-0"
    wait_until(lambda: any(directory.glob("*.log")), "it has begun")
    producing.send(300)  # replicas in sync take these; at the rate it would need days
    assert copied(directory) < 200_000
    throttle(ours, side, rate, *ours.node_ids)
    wait_until(lambda: copied(directory) > 200_000, "it goes faster")
    began, at_first = time.monotonic(), copied(directory)
    wait_until(lambda: copied(directory) - at_first > 1_500_000, "it goes on")
    found = (copied(directory) - at_first) / (time.monotonic() - began)
    assert 0.75 * rate < found < 1.2 * rate  # less on a busy machine
    throttle(ours, side, None)
    wait_same(ours)
    assert (read_bytes(ours, new) > 500_000) == by_rdma
    assert state(ours).leader == leader
    check_values(ours, producing)


def copied(directory: Path) -> int:
    """Bytes of sealed segments."""
    files = sorted(directory.glob("*.log"))[:-1] if directory.exists() else []
    return sum(file.stat().st_size for file in files)


def deleted_but_mapped(cluster: kdirect.Cluster, node_id: int) -> int:
    """How many segments a broker keeps mapped whose files it has deleted."""
    maps = Path(f"/proc/{cluster.pid(node_id)}/maps").read_text()
    here = re.escape(str(cluster.log_dirs(node_id)[0] / f"{TOPIC}-0"))
    return len(set(re.findall(rf"{here}/\d+\.log.* \(deleted\)", maps)))


def test_leases_end_with_the_leadership(cluster: Callable[..., kdirect.Cluster]) -> None:
    """Also those of a follower that has stopped: it keeps no deleted segment of a broker that leads
    no longer."""
    ours = cluster(3)
    with kdirect.connect(
        {"bootstrap.servers": ours.bootstrap_servers, "transport": "tcp"}
    ) as session:
        old = session.admin.describe_cluster().controller  # which does not stop
    other, new = (n for n in ours.node_ids if n != old)
    config = {"segment.bytes": "65536", "file.delete.delay.ms": "0"}
    wanted = NewTopic(TOPIC, 1, replica_assignment=[[old, other]], config=config)
    made = AdminClient({"bootstrap.servers": ours.bootstrap_servers, "log_level": 0})
    made.create_topics([wanted])[TOPIC].result(30)
    producing = Producing(ours)
    wait_until(lambda: len(state(ours).in_sync_replicas) == 2, "there were two replicas")
    producing.send(1000)
    assert state(ours).leader == old
    throttle(ours, "leader", 1, *ours.node_ids)
    tp = kdirect.TopicPartition(TOPIC, 0)
    tp, directory = kdirect.TopicPartition(TOPIC, 0), ours.log_dirs(new)[0] / f"{TOPIC}-0"
    settings = {"bootstrap.servers": ours.address(other), "transport": "tcp"}
    with kdirect.connect({**settings, "request.timeout.ms": 1000}) as session:
        session.admin.reassign_partitions({tp: [other, old, new]})
        # The files of what is read, and of the next one, which is leased by then.
        wait_until(lambda: len(list(directory.glob("*.log*"))) > 1, "segments were leased")
        with pytest.raises(kdirect.KdirectError, match=r"request\.timeout\.ms"):
            session.admin.delete_records({tp: -1})  # the new replica does not delete them in time
        wait_until(lambda: deleted_but_mapped(ours, old) > 0, "deleted segments were leased")
        ours.pause(new)
        try:
            with kdirect.connect(settings) as patient:
                patient.admin.elect_leaders([tp])
            wait_until(lambda: deleted_but_mapped(ours, old) == 0, "the leases ended", 15)
            # Else they have ended with the follower's link.
            assert new in known_to(ours, old), "the follower was given up before"
        finally:
            ours.resume(new)
    throttle(ours, "leader", None)
    wait_same(ours)


def known_to(cluster: kdirect.Cluster, node_id: int) -> set[int]:
    """The brokers that are there, as one of them has it."""
    settings = {"bootstrap.servers": cluster.address(node_id), "transport": "tcp"}
    with kdirect.connect(settings) as session:
        return {broker.node_id for broker in session.admin.describe_cluster().brokers}
