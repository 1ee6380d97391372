"""Tiered storage of a cluster of broker processes: what leaders copy and delete, what followers
know of it, and that none of it is lost when they die."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kdirect
from tests.members import tiered_kills
from tests.members.tiers import METADATA, TOPIC, TP, Tiers, properties


@pytest.fixture
def tiers(
    cluster: Callable[..., kdirect.Cluster], tmp_path: Path
) -> Iterator[Callable[..., Tiers]]:
    """``tiers(**properties)``: three brokers, and their store."""
    made: list[Tiers] = []

    def start(count: int = 3, **more: Any) -> Tiers:
        store = tmp_path / "store"
        store.mkdir(exist_ok=True)
        made.append(Tiers(cluster(count, **properties(store, **more)), store))
        return made[-1]

    yield start
    for each in made:
        each.close()


def test_a_new_leader_goes_on(tiers: Callable[..., Tiers]) -> None:
    """The leader copies, and all replicas delete what is copied.  The leader dies; the next one
    reads, copies and deletes, and the old one follows."""
    cluster = tiers()
    cluster.create()
    cluster.produce(600)
    cluster.settle()
    assert len(cluster.acknowledged) == 600
    first = cluster.leader()
    assert {s.broker_id for s in cluster.segments().values()} == {first}
    cluster.cluster.kill(first)
    cluster.wait(lambda: cluster.leader() not in (-1, first), "another leader")
    cluster.check()
    cluster.produce(600)
    cluster.settle()
    cluster.check()
    assert len({s.broker_id for s in cluster.segments().values()}) == 2
    cluster.cluster.start(first)
    cluster.wait(lambda: cluster.in_sync() == [1, 2, 3], "all are in sync")
    cluster.settle()
    cluster.check()
    # Log starts move everywhere, and what is below goes.
    cluster.session.admin.delete_records({TP: 500})
    cluster.wait(lambda: min(s.end_offset for s in cluster.segments().values()) > 500, "it goes")
    cluster.settle()
    assert min(cluster.read()) == 500
    cluster.check()
    # All of them die.
    for broker in (1, 2, 3):
        cluster.cluster.kill(broker)
    for broker in (1, 2, 3):
        cluster.cluster.start(broker)
    cluster.wait(lambda: min(cluster.read()) == 500, "all is there")
    cluster.produce(300)
    cluster.settle()
    cluster.check()


def test_a_replica_that_was_wiped_takes_the_tail_only(tiers: Callable[..., Tiers]) -> None:
    cluster = tiers()
    cluster.create()
    cluster.produce(400)
    first = cluster.leader()
    cluster.cluster.kill(first)
    cluster.wait(lambda: cluster.leader() not in (-1, first), "another leader")
    cluster.produce(600)  # in a later leader epoch
    cluster.settle()
    (directory,) = cluster.cluster.log_dirs(first)
    shutil.rmtree(directory)
    cluster.cluster.start(first)
    cluster.wait(lambda: cluster.in_sync() == [1, 2, 3], "all are in sync")
    cluster.settle()
    end = max(s.end_offset for s in cluster.segments().values())
    assert cluster.local_bases(first) == [end]
    # It has the leader epochs of what it never had, and so leads without losing anything.
    others = [b for b in (1, 2, 3) if b != first]
    for other in others:
        cluster.cluster.kill(other)
    cluster.wait(lambda: cluster.leader() == first, "it leads")
    assert len(cluster.read()) == 1000
    cluster.check()


def test_a_deleted_topic_takes_its_objects_along(tiers: Callable[..., Tiers]) -> None:
    """The broker that is to delete the objects dies; the next one goes on."""
    cluster = tiers(zookeeper_session_timeout_ms=3000)
    cluster.create()
    cluster.produce(1000)
    cluster.settle()
    owner = cluster.leader(METADATA)
    others = [b for b in (1, 2, 3) if b != owner]
    cluster.cluster.pause(owner)  # it deletes nothing, but is alive to the others for a while
    settings = {
        "bootstrap.servers": cluster.cluster.address(others[0]),
        "transport": "tcp",
        "request.timeout.ms": 4000,  # the one that is stopped may be the controller
    }
    with kdirect.connect(settings) as session:
        cluster.wait(lambda: deleted(session), "the topic is deleted")
    cluster.cluster.kill(owner)
    cluster.wait(lambda: not cluster.objects(), "its objects are gone")
    cluster.cluster.start(owner)
    cluster.wait(lambda: not cluster.segments(), "nothing is known of it")


def deleted(session: Any) -> bool:
    session.admin.delete_topic(TOPIC)
    return True


def test_a_zombie_takes_nothing_away(tiers: Callable[..., Tiers]) -> None:
    """A leader that was stopped in its tracks goes on when another one has copied and deleted.
    What it was uploading is nobody's, and is swept."""
    cluster = tiers(zookeeper_session_timeout_ms=3000, remote_orphan_age_ms=3000)
    cluster.create()
    cluster.produce(600)
    first = cluster.leader()
    cluster.cluster.pause(first)
    cluster.wait(lambda: cluster.leader() not in (-1, first), "another leader")
    cluster.produce(600)
    cluster.wait(lambda: len(cluster.segments()) > 5, "it copies")
    cluster.cluster.resume(first)
    cluster.wait(lambda: cluster.in_sync() == [1, 2, 3], "all are in sync")
    cluster.settle()
    assert len(cluster.read()) == 1200
    cluster.check()


def test_leaders_that_are_killed_at_work_lose_nothing(tiers: Callable[..., Tiers]) -> None:
    """Two rounds of `tests.members.tiered_kills`: between an upload and its record, and between a
    record and a deletion."""
    cluster = tiers()
    assert [tiered_kills.run(cluster, seed) for seed in (3, 10)] == [True] * 2
