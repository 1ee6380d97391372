"""Replicas that move between the log directories of their brokers, leaders and followers, while
records are produced with acks=all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

import kdirect
from kdirect.failpoints import VARIABLE
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.format.replica_fetch import Feed
from kdirect.format.schema import build
from kdirect.model import TopicPartition
from tests.broker.conftest import Raw
from tests.broker.test_moves import SHM, STEPS, Writer, alter, move, place, readers
from tests.members.conftest import TEST_PROPERTIES, wait_for_members
from tests.support import BrokerProcess, wait_until

TP = TopicPartition("t", 0)
IDS = (1, 2, 3)

Start = Callable[..., kdirect.Broker]


@pytest.fixture
def start(zookeeper_connect: str, tmp_path: Path) -> Iterator[Start]:
    """``start(node_id)``: a broker of two log directories, in this process."""
    with ExitStack() as stack:

        def started(node_id: int, **properties: Any) -> kdirect.Broker:
            given = {
                "node.id": node_id,
                "zookeeper.connect": zookeeper_connect,
                "log.segment.delete.delay.ms": 0,
                **TEST_PROPERTIES,
                **properties,
            }
            directories = [str(d) for d in directories_of(tmp_path, node_id)]
            broker = kdirect.Broker(directories, properties=given)
            stack.callback(broker.stop)
            return broker.start()

        yield started


def directories_of(tmp_path: Path, node_id: int) -> list[Path]:
    return [tmp_path / f"{node_id}-a", tmp_path / f"{node_id}-b"]


def create(broker: kdirect.Broker) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0})
    config = {"segment.bytes": str(1 << 17), "min.insync.replicas": "2"}
    admin.create_topics([NewTopic("t", 1, 3, config=config)])["t"].result(30)


def in_sync(broker: kdirect.Broker) -> set[int]:
    found = broker.server.member.membership.metadata.partition(TP)
    return set(found.state.in_sync) if found is not None and found.state is not None else set()


def wait_until_in_sync(brokers: dict[int, kdirect.Broker]) -> None:
    def are() -> bool:
        here = all(TP in b.server.logs.partitions for b in brokers.values())
        return here and all(in_sync(b) == set(IDS) for b in brokers.values())

    wait_until(are, "all are in sync")


def wait_until_fed(brokers: dict[int, kdirect.Broker], feed: Feed) -> None:
    """Wait until one leads, and the others get their records in this way."""

    def are() -> bool:
        found = [b.server.member.replicas.feeding().get(TP) for b in brokers.values()]
        feeds = [Feed.STOPPED if x is None else x.feed for x in found]  # it is halted
        return sorted(feeds) == sorted([Feed.LEADS, feed, feed])

    wait_until(are, lambda: str([b.server.member.replicas.feeding() for b in brokers.values()]))


def log_of(broker: kdirect.Broker) -> Any:
    return broker.server.logs.partitions[TP]


@pytest.mark.parametrize("replicate", [True, False], ids=["pushed", "fetched"])
@pytest.mark.parametrize("way", ["exclusive", "shared", "tcp"])
def test_leaders_and_followers_move(
    start: Start, tmp_path: Path, way: str, replicate: bool
) -> None:
    """Each replica twice; nothing is lost, all logs are the same, and whoever leads next has all
    of it."""
    brokers = {n: start(n, **{"rdma.replicate": str(replicate).lower()}) for n in IDS}
    wait_for_members(list(brokers.values()))
    create(brokers[1])
    wait_until_in_sync(brokers)
    servers = ",".join(b.bootstrap_servers for b in brokers.values())
    settings = {"transport": "tcp"} if way == "tcp" else {**SHM, "rdma.produce": way}
    raws = {n: Raw(b.bootstrap_servers, timeout_s=60) for n, b in brokers.items()}
    with ExitStack() as stack:
        for raw in raws.values():
            stack.callback(raw.close)
        writer = Writer("w", {"bootstrap.servers": servers, "acks": "all", **settings})
        reading = readers(servers, stack)
        for thread in (writer, *reading):
            thread.start()
        for _ in range(2):
            for n in IDS:
                wait_until_fed(brokers, Feed.PUSHED if replicate else Feed.FETCHED)
                far = writer.sent + 300
                wait_until(lambda far=far: writer.sent > far or writer.failed, "more was sent", 60)
                move(raws[n], directories_of(tmp_path, n))
        writer.stopping.set()
        writer.join(90)
        assert not writer.failed, writer.failed
        for r in reading:
            r.wanted = writer.sent
        expected = [b"w %d" % i for i in range(writer.sent)]
        for r in reading:
            r.join(130)
            assert not r.failed, r.failed
            assert r.values == expected
    wait_until_in_sync(brokers)
    logs = [log_of(b) for b in brokers.values()]
    wait_until(lambda: len({x.log_end_offset for x in logs}) == 1, "all have all")
    assert len({tuple(s.base_offset for s in x.segments if s.size) for x in logs}) == 1
    for n, x in zip(IDS, logs, strict=True):
        assert x.moved.times == 2
        assert {s.path.parent for s in x.segments} == {x.directory}
        found = [p for d in directories_of(tmp_path, n) for p in d.glob("t-*")]
        assert found == [x.directory]
    leader = brokers[1].server.member.membership.metadata.leader_of(TP)
    brokers.pop(leader).stop()
    rest = ",".join(b.bootstrap_servers for b in brokers.values())
    with ExitStack() as stack:
        for r in readers(rest, stack):
            r.wanted = len(expected)
            r.start()
            r.join(130)
            assert not r.failed, r.failed
            assert r.values == expected


def test_a_replica_that_is_not_in_sync_waits(start: Start, tmp_path: Path) -> None:
    """And a follower may be asked for a partition that the broker is to have later."""
    brokers = {n: start(n) for n in IDS}
    wait_for_members(list(brokers.values()))
    create(brokers[1])
    wait_until_in_sync(brokers)
    leader = brokers[1].server.member.membership.metadata.leader_of(TP)
    follower = next(n for n in IDS if n != leader)
    raw = Raw(brokers[follower].bootstrap_servers, timeout_s=60)
    mover = brokers[follower].server.mover
    asked: list[TopicPartition] = []
    halts = mover.replicas

    class NotInSync:
        """Says so at first."""

        def is_in_sync(self, tp: TopicPartition) -> bool:
            asked.append(tp)
            return len(asked) > 3 and bool(halts.is_in_sync(tp))

        halt, resume = staticmethod(halts.halt), staticmethod(halts.resume)

    mover.replicas = NotInSync()
    move(raw, directories_of(tmp_path, follower))
    assert len(asked) > 3
    here, _ = place(raw)
    assert alter(raw, here, TopicPartition("t", 1)) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    raw.close()


def dead(broker: BrokerProcess) -> bool:
    assert broker.process is not None
    return broker.process.poll() is not None


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("of", ["leader", "follower"])
def test_a_broker_that_is_killed_while_its_replica_moves(
    zookeeper_connect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, of: str
) -> None:
    """What was acknowledged is in all logs once it is back, and the move is made."""
    with ExitStack() as stack:
        brokers: dict[int, BrokerProcess] = {}
        for n in IDS:
            properties = {
                "node.id": n,
                "zookeeper.connect": zookeeper_connect,
                "log.segment.delete.delay.ms": 0,
                **TEST_PROPERTIES,
            }
            process = BrokerProcess(tmp_path / f"broker-{n}", properties)
            process.log_dir = Path(",".join(map(str, directories_of(tmp_path, n))))
            stack.callback(process.kill)
            with monkeypatch.context() as patch:
                patch.setenv(VARIABLE, step)
                brokers[n] = process.start()
        servers = ",".join(b.bootstrap_servers for b in brokers.values())
        with kdirect.connect({"bootstrap.servers": servers, "transport": "tcp"}) as session:
            wait_until(lambda: len(session.admin.describe_cluster().brokers) == 3, "all are there")
            session.admin.create_topic("t", 1, 3, {"min.insync.replicas": "2"})
            leader = session.admin.describe_topic("t").leaders[0].leader
            writer = Writer("w", {"bootstrap.servers": servers, "acks": "all", **SHM})
            writer.start()
            wait_until(lambda: writer.sent > 500 or writer.failed, "some was sent")
            victim = leader if of == "leader" else next(n for n in IDS if n != leader)
            raw = Raw(brokers[victim].bootstrap_servers, timeout_s=60)
            here, _ = place(raw)
            (to,) = [str(d) for d in directories_of(tmp_path, victim) if str(d) != here]
            topics = [{"name": "t", "partitions": [0]}]
            dirs = [{"path": to, "topics": topics}]
            raw.send(build(p.AlterReplicaLogDirsRequest, dirs=dirs), 2)
            wait_until(lambda: dead(brokers[victim]), "it was killed", 60)
            raw.close()
            brokers[victim].kill()
            brokers[victim].start()
            raw = Raw(brokers[victim].bootstrap_servers, timeout_s=60)
            wait_until(lambda: place(raw) == (to, False), "the move was made", 90)
            raw.close()
            writer.stopping.set()
            writer.join(90)
            assert not writer.failed, writer.failed

            def all_in_sync() -> bool:
                found = session.admin.describe_topic("t").leaders[0].in_sync_replicas
                return sorted(found) == list(IDS)

            wait_until(all_in_sync, "all are in sync again", 60)
        for n in IDS:  # the one that is left leads, and has everything
            if n != victim:
                brokers[n].stop()
        for r in readers(brokers[victim].bootstrap_servers, stack):
            r.wanted = writer.sent
            r.start()
            r.join(130)
            assert not r.failed, r.failed
            assert r.values == [b"w %d" % i for i in range(writer.sent)]
