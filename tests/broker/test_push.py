"""Push replication between brokers' cores in processes of their own, over shm."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.broker.push_rig import RemoteNode, connect, follow
from tests.log.conftest import make_batch
from tests.support import stop_process, wait_until

SEGMENT_BYTES = 1 << 18


class Cluster:
    """A leader, 0, and its followers, 1 and so on; news of each follower goes to the leader."""

    def __init__(self, directory: Path, followers: int, **options: Any) -> None:
        options.setdefault("segment_bytes", SEGMENT_BYTES)
        self.leader = RemoteNode(0, directory / "0", **options)
        self.followers = [
            RemoteNode(i, directory / str(i), **options) for i in range(1, followers + 1)
        ]
        self.ended: list[tuple[int, str]] = []
        for follower in self.followers:
            follower.on_news(self._handler(follower))
        self.leader.on_news(lambda what, value: None)

    def _handler(self, follower: RemoteNode) -> Callable[[str, Any], None]:
        def handle(what: str, value: Any) -> None:
            if what == "ahead":
                self.leader.ahead(follower.number, value)
            elif what == "ended":
                self.ended.append((follower.number, value))

        return handle

    @property
    def nodes(self) -> list[RemoteNode]:
        return [self.leader, *self.followers]

    def start(self, *, most_bytes: int = 65536, window: int = 32, epoch: int = 1) -> None:
        self.leader.lead([f.number for f in self.followers], most_bytes, epoch)
        for follower in self.followers:
            connect(self.leader, follower)
            follow(self.leader, follower, window=window, epoch=epoch)

    def wait_replicated(self, end: int) -> None:
        wait_until(
            lambda: self.leader.state()["high_watermark"] == end, timeout_s=30, every_s=0.005
        )

    def check_equal(self) -> int:
        """Sealed segments are equal on all; how many there are."""
        expected = self.leader.sealed()
        for follower in self.followers:
            got = follower.sealed()
            assert {b: _hash(v) for b, v in got.items()} == {
                b: _hash(v) for b, v in expected.items()
            }
            assert follower.head() == self.leader.head()
        return len(expected)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(followers: int = 2, **options: Any) -> Cluster:
        made.append(Cluster(tmp_path, followers, **options))
        return made[-1]

    yield make
    for one in made:
        for node in one.nodes:
            node.end()


def test_records_reach_two_followers_through_rolls(cluster: Callable[..., Cluster]) -> None:
    c = cluster()
    c.start(most_bytes=4096)
    sent = 0
    for turn in range(12):
        batches = [make_batch(3, value_bytes=400 + 37 * turn) for _ in range(60)]
        c.leader.append(batches)
        sent += 3 * len(batches)
    c.wait_replicated(sent)
    assert c.check_equal() >= 3
    for follower in c.followers:
        wait_until(lambda f=follower: f.state()["high_watermark"] == sent, timeout_s=10)
        assert follower.epochs()[:2] == c.leader.epochs()[:2]
    assert c.leader.state()["ends"] == {1: sent, 2: sent}


def test_a_stopped_follower_holds_the_high_watermark_until_it_does_not_count(
    cluster: Callable[..., Cluster],
) -> None:
    c = cluster()
    c.start()
    c.leader.append([make_batch() for _ in range(5)])
    c.wait_replicated(5)
    slow = c.followers[1]
    stop_process(slow.process.pid)
    try:
        c.leader.append([make_batch() for _ in range(200)])
        wait_until(lambda: c.leader.state()["ends"][1] == 205, timeout_s=10)
        state = c.leader.state()
        assert state["high_watermark"] == 5 and state["ends"][2] == 5
        c.leader.count([1])
        assert c.leader.state()["high_watermark"] == 205
    finally:
        os.kill(slow.process.pid, signal.SIGCONT)
    wait_until(lambda: c.leader.state()["ends"][2] == 205, timeout_s=10)
    c.check_equal()


def test_producers_are_known_to_replicas(cluster: Callable[..., Cluster]) -> None:
    c = cluster(followers=1)
    c.start()
    c.leader.append(
        [make_batch(2, producer_id=7, producer_epoch=0, sequence=2 * i) for i in range(20)]
    )
    c.wait_replicated(40)
    (mine, end), (theirs, their_end) = c.leader.producers(), c.followers[0].producers()
    assert end == their_end == 40
    assert [(p.producer_id, p.producer_epoch, p.batches) for p in mine] == [
        (p.producer_id, p.producer_epoch, p.batches) for p in theirs
    ]


def test_the_high_watermark_moves_only_with_all_that_count(cluster: Callable[..., Cluster]) -> None:
    c = cluster()
    c.start()
    c.leader.count([1, 2, 9])  # 9 was not heard of
    c.leader.append([make_batch() for _ in range(3)])
    wait_until(lambda: c.leader.state()["ends"][1] == c.leader.state()["ends"][2] == 3)
    assert c.leader.state()["high_watermark"] == 0
    c.leader.count([1, 2], True)
    assert c.leader.state()["high_watermark"] == 0, "below min.insync.replicas it stands still"
    c.leader.count([1, 2])
    assert c.leader.state()["high_watermark"] == 3
