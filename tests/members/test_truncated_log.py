"""An unclean election takes records away that were read, and the next leader has others at their
offsets: readers find out by the leader epochs (KIP-320), by Fetch and by READs alike."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import pytest

import kdirect
from kdirect.errors import TruncatedLogError
from kdirect.model import TopicPartition
from tests.support import wait_until

TP = TopicPartition("t", 0)
FAST = {"reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 200}
KEPT, LOST, OTHER = 40, 30, 60  # OTHER are more than were lost, so no offset is out of range


class Pair:
    """Two replicas of `TP`; the second one lacks records when it comes to lead."""

    def __init__(self, cluster: kdirect.Cluster) -> None:
        self.cluster = cluster
        self.session = kdirect.connect({"bootstrap.servers": cluster.bootstrap_servers, **FAST})
        configs = {"unclean.leader.election.enable": "true", "min.insync.replicas": 1}
        self.session.admin.create_topic(TP.topic, 1, replication_factor=2, configs=configs)
        wait_until(lambda: len(self.in_sync()) == 2, "both replicas are in sync")
        self.first = self.leader()
        self.second = next(i for i in cluster.node_ids if i != self.first)

    def partition(self) -> Any:
        return self.session.cluster.topic(TP.topic, refresh=True).partition(0)

    def leader(self) -> int:
        return int(self.partition().leader)

    def in_sync(self) -> tuple[int, ...]:
        return tuple(self.partition().in_sync_replicas)

    def settings(self, transport: str, **more: Any) -> dict[str, Any]:
        servers = self.cluster.bootstrap_servers
        return {"bootstrap.servers": servers, "transport": transport, **FAST, **more}

    def produce(self, kind: str, count: int) -> list[str]:
        values = [f"{kind}{i}" for i in range(count)]
        with closing(kdirect.Producer(self.settings("tcp"))) as producer:
            for value in values:
                producer.produce(TP.topic, value.encode(), partition=0)
            assert producer.flush(60) == 0
        return values

    def write_alone(self) -> list[str]:
        """Records that the second replica never has."""
        self.cluster.kill(self.second)
        wait_until(lambda: self.in_sync() == (self.first,), "the second replica is out", 60)
        return self.produce("lost", LOST)

    def elect_the_other(self) -> list[str]:
        """The second replica leads, and has other records."""
        self.cluster.kill(self.first)
        self.cluster.start(self.second)
        wait_until(lambda: self.leader() == self.second, "an unclean election", 60)
        return self.produce("other", OTHER)


@pytest.fixture
def pair(cluster: Callable[..., kdirect.Cluster]) -> Any:
    made = Pair(cluster(2))
    yield made
    made.session.close()


class Reads:
    """A consumer of `TP` from its start, and what it got."""

    def __init__(self, pair: Pair, transport: str, reset: str) -> None:
        self.consumer = kdirect.Consumer(pair.settings(transport, **{"auto.offset.reset": reset}))
        self.consumer.assign({TP: 0})
        self.got: list[str] = []

    def read_all(self, values: list[str]) -> None:
        """Until it has these, and no others."""
        wait_until(lambda: self._has(len(values)), lambda: f"the end came: {self.got[-3:]}", 60)
        assert self.got == values

    def _has(self, count: int) -> bool:
        message = self.consumer.poll(0.1)
        if message is not None:
            assert message.error() is None
            self.got.append(message.value().decode())
        return len(self.got) >= count


@pytest.mark.timeout(180)
def test_readers_find_out_where_the_logs_part(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """A consumer that may reset goes on there; others, and readers of a range, are told."""
    kept = pair.produce("kept", KEPT)
    end = KEPT + LOST + 10
    with ExitStack() as stack:
        consumers = {
            (transport, reset): Reads(pair, transport, reset)
            for transport in ("shm", "tcp")
            for reset in ("latest", "none")
        }
        ranges = []
        for transport in ("shm", "tcp"):
            session = stack.enter_context(kdirect.connect(pair.settings(transport)))
            reader = session.reader(TP, 0, end, target_rows=1, timeout_ms=60_000)
            ranges.append(stack.enter_context(closing(reader)).batches())
        for reads in consumers.values():
            stack.enter_context(closing(reads.consumer))
            reads.read_all(kept)
        lost = pair.write_alone()
        for reads in consumers.values():
            reads.read_all(kept + lost)
        for batches in ranges:
            rows = 0
            while rows < KEPT + LOST:
                rows += next(batches).num_rows
        other = pair.elect_the_other()
        for (_, reset), reads in consumers.items():
            if reset == "none":
                with pytest.raises(TruncatedLogError, match=r"t-0 was cut.*offset 70") as caught:
                    reads.read_all([*kept, *lost, "nothing of this kind"])
                assert caught.value.diverges_at == KEPT
                continue
            caplog.clear()
            reads.read_all(kept + lost + other)
            (line,) = [r.getMessage() for r in caplog.records if "was cut" in r.getMessage()]
            assert f"offset {KEPT + LOST}" in line and f"going on at offset {KEPT}" in line
        for batches in ranges:
            with pytest.raises(TruncatedLogError, match="offset 70"):
                for _ in batches:
                    pass


@pytest.mark.timeout(180)
def test_consumers_find_out_after_a_change_of_path(pair: Pair) -> None:
    """Those that are given another path between the last record that they read and the next one:
    from TCP to READs, from READs to TCP, and over TCP again."""
    kept = pair.produce("kept", KEPT)
    moves = {("tcp", "shm"), ("shm", "tcp"), ("tcp", "tcp")}
    with ExitStack() as stack:
        readers = {}
        for move in moves:
            reads = readers[move] = Reads(pair, "shm" if "shm" in move else "tcp", "none")
            stack.enter_context(closing(reads.consumer))
            reads.consumer.unassign()
            reading = reads.consumer._reading
            reading.paths.direct._tcp_only = move[0] == "tcp"
            reads.consumer.assign({TP: 0})
            reads.read_all(kept)
            assert reading.reads == (move[0] == "shm")
        lost = pair.write_alone()
        for reads in readers.values():
            reads.read_all(kept + lost)
        for (_, after), reads in readers.items():
            reading = reads.consumer._reading
            reading.paths.direct._tcp_only = after == "tcp"
            reading.paths.second_best.add(TP)
            reading.lost()  # what is the second best way is looked for again
        pair.elect_the_other()
        for move, reads in readers.items():
            with pytest.raises(TruncatedLogError, match=r"t-0 was cut.*offset 70") as caught:
                reads.read_all([*kept, *lost, f"nothing of {move}"])
            assert caught.value.diverges_at == KEPT, move
