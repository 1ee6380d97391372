"""Push replication between three real brokers over shm: leaders write into followers' files, and go
back to Fetch and on again through kills, stops, rolls and cut links."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

import kdirect
from kdirect.broker import access, led_log
from kdirect.broker.replication import Replication
from kdirect.broker.worker import CutReason
from kdirect.cluster.following_replica import Follow
from kdirect.cluster.partition_state import NO_LEADER
from kdirect.errors import BrokerUnavailableError
from tests.members.test_segments import SEGMENT_BYTES, TOPIC, Producing, sealed, state, wait_same
from tests.support import wait_until

TP = kdirect.TopicPartition(TOPIC, 0)


def make_topic(bootstrap_servers: str, *, replicas: int = 3, **config: Any) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0})
    config = {"segment.bytes": str(SEGMENT_BYTES), "min.insync.replicas": "2", **config}
    admin.create_topics([NewTopic(TOPIC, 1, replicas, config=config)])[TOPIC].result(30)


def written_files(cluster: kdirect.Cluster, node_id: int) -> set[int]:
    """The other brokers of whose replicas this process maps a file."""
    maps = Path(f"/proc/{cluster.pid(node_id)}/maps").read_text()
    found = set()
    for other in cluster.node_ids:
        directory = str(cluster.log_dirs(other)[0] / f"{TOPIC}-0")
        if other != node_id and directory in maps:
            found.add(other)
    return found


def wait_pushed(cluster: kdirect.Cluster, followers: int = 2) -> int:
    """Wait until the leader writes into so many replicas; the leader."""

    def pushes() -> bool:
        leader = state(cluster).leader
        return leader > 0 and len(written_files(cluster, leader)) == followers

    wait_until(pushes, lambda: f"{state(cluster)}", 30)
    return int(state(cluster).leader)


def check_values(cluster: kdirect.Cluster, producing: Producing) -> None:
    """All that was acknowledged is read, once and in order."""
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": cluster.bootstrap_servers, "group.id": "g", "log_level": 0}
    )
    consumer.assign([confluent_kafka.TopicPartition(TOPIC, 0, 0)])
    found: list[int] = []
    try:
        while len(found) < producing.acknowledged:
            message = consumer.poll(20)
            assert message is not None, f"{len(found)} of {producing.acknowledged} records"
            if message.error() is None:
                found.append(int(message.value()[:8]))
    finally:
        consumer.close()
    assert found == list(range(producing.acknowledged))


def said(cluster: kdirect.Cluster, node_id: int) -> list[str]:
    """What a broker has logged of how it copies."""
    text = cluster.log_file(node_id).read_text(errors="replace")
    return re.findall(r"copying from broker (\d+ over .*)", text)


def test_a_leader_writes_into_its_followers_files(cluster: Callable[..., kdirect.Cluster]) -> None:
    ours = cluster(3)
    make_topic(ours.bootstrap_servers)
    wait_until(lambda: state(ours).leader > 0, "there was a leader")
    leader = wait_pushed(ours)
    producing = Producing(ours)
    producing.send(1000)  # through many rolls
    wait_same(ours)
    assert len(sealed(ours, 1)) > 3
    assert len(written_files(ours, leader)) == 2
    for follower in set(ours.node_ids) - {leader}:
        assert f"{leader} over shm: it writes into this broker's files" in said(ours, follower)
    check_values(ours, producing)


def test_deleted_records_go_everywhere_at_once(cluster: Callable[..., kdirect.Cluster]) -> None:
    """A follower may hear of the new start before it hears that the records are committed."""
    ours = cluster(3)
    make_topic(ours.bootstrap_servers, **{"segment.bytes": str(64 << 20)})
    wait_until(lambda: state(ours).leader > 0, "there was a leader")
    wait_pushed(ours)
    tp = kdirect.TopicPartition(TOPIC, 0)
    settings = {"bootstrap.servers": ours.bootstrap_servers, "transport": "shm", "acks": "all",
                "request.timeout.ms": 10_000}  # fmt: skip
    with kdirect.connect(settings) as session, session.producer() as producer:
        for _ in range(12):
            for _ in range(2000):
                producer.produce(TOPIC, b"v" * 100, None, partition=0)
            assert producer.flush(30) == 0
            session.admin.delete_records({tp: -1})


def test_a_killed_leader_loses_nothing_and_is_pushed_to_again(
    cluster: Callable[..., kdirect.Cluster],
) -> None:
    ours = cluster(3)
    make_topic(ours.bootstrap_servers)
    wait_until(lambda: state(ours).leader > 0, "there was a leader")
    producing = Producing(ours)
    for _ in range(2):
        leader = wait_pushed(ours)
        producing.send(200)
        ours.kill(leader)
        producing.send(300)
        ours.start(leader)
        producing.send(100)
        wait_same(ours)
    wait_pushed(ours)
    producing.send(100)
    wait_same(ours)
    check_values(ours, producing)


def test_a_stopped_follower_holds_up_all_until_it_is_out_of_sync(
    cluster: Callable[..., kdirect.Cluster],
) -> None:
    ours = cluster(3)
    make_topic(ours.bootstrap_servers)
    wait_until(lambda: state(ours).leader > 0, "there was a leader")
    producing = Producing(ours)
    leader = wait_pushed(ours)
    producing.send(100)
    stopped = next(n for n in ours.node_ids if n != leader)
    ours.pause(stopped)
    try:
        alone = confluent_kafka.Producer(
            {"bootstrap.servers": ours.bootstrap_servers, "acks": 1, "log_level": 0}
        )
        alone.produce(TOPIC, b"%08d" % producing.acknowledged, partition=0)
        assert alone.flush(10) == 0, "acks=1 waited for a follower"
        producing.acknowledged += 1
        producing.send(300)  # acks=all: when its session has timed out
        assert stopped not in state(ours).in_sync_replicas
    finally:
        ours.resume(stopped)
    wait_same(ours)
    wait_pushed(ours)
    producing.send(100)
    wait_same(ours)
    check_values(ours, producing)


def test_without_replication_by_rdma_followers_fetch(
    zookeeper_connect: str, tmp_path: Path
) -> None:
    with kdirect.Cluster(
        3,
        tmp_path / "cluster",
        zookeeper_connect=zookeeper_connect,
        properties={"rdma.replicate": False, "log.segment.bytes": 1 << 20},
    ) as ours:
        make_topic(ours.bootstrap_servers)
        wait_until(lambda: state(ours).leader > 0, "there was a leader")
        producing = Producing(ours)
        producing.send(200)
        wait_same(ours)
        assert written_files(ours, state(ours).leader) == set()
        text = ours.log_file(1).read_text()
        assert "followers and leaders fetch over TCP: rdma.replicate=false" in text
        with kdirect.connect(
            {"bootstrap.servers": ours.bootstrap_servers, "transport": "tcp"}
        ) as session:
            told = sorted(str(session.admin.describe_replicas(n, [TOPIC])[TP]) for n in (1, 2, 3))
        why = "fetched over TCP: push is switched off at this broker"
        assert told == [why, why, "leads"]


# -- in one process --------------------------------------------------------------------------------


@pytest.fixture
def three(brokers: Callable[..., list[Any]]) -> Iterator[list[Any]]:
    yield brokers(3)


def sides(broker: Any) -> Any:
    """A broker's side of push."""
    return broker._server.member.replicas.push


def on_loop(broker: Any, work: Callable[[], Any]) -> Any:
    async def do() -> Any:
        return work()

    return asyncio.run_coroutine_threadsafe(do(), broker._server._loop).result(10)


def ways_of(brokers: list[Any], topic: str = TOPIC) -> list[str]:
    """How each replica gets its records; a leader: "LEADS"."""
    found = []
    for broker in brokers:
        replicas = list(broker._server.member.replicas._replicas.items())
        for replica in (r for tp, r in replicas if tp.topic == topic):
            push = replica._push
            found.append("LEADS" if replica.leader is not None else push and push.state.name)
    return sorted(map(str, found))


def test_a_cut_link_is_opened_again(three: list[Any]) -> None:
    servers = ",".join(b.bootstrap_servers for b in three)
    make_topic(servers)
    wait_until(lambda: ways_of(three) == ["LEADS", "PUSHED", "PUSHED"], lambda: f"{ways_of(three)}")
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": servers, "acks": "all", "log_level": 0, "linger.ms": 1}
    )
    errors: list[Any] = []
    for turn in range(4):
        for number in range(50):
            producer.produce(
                TOPIC,
                b"%d" % number,
                partition=0,
                on_delivery=lambda error, message: errors.append(error) if error else None,
            )
            if number == 25:
                producer.poll(0)
                cut_links(three, of_leader=turn % 2 == 0)
        assert producer.flush(20) == 0 and not errors
        wait_until(
            lambda: ways_of(three) == ["LEADS", "PUSHED", "PUSHED"], lambda: f"{ways_of(three)}", 20
        )


def cut_links(brokers: list[Any], *, of_leader: bool) -> None:
    for broker in brokers:
        side = sides(broker)
        if of_leader:
            on_loop(broker, lambda s=side: [s._close_out(x) for x in list(s._out.values())])
        else:
            opened = [t.result() for t in side._in.values() if t.done() and not t.exception()]
            on_loop(broker, lambda s=side, x=opened: [s._close_in(link) for link in x])


def link_of(follower: Any, leader: int) -> Any:
    """The queue pair by which this leader writes into the follower's files."""
    return sides(follower)._in[leader].result()


def two_topics(brokers: list[Any]) -> confluent_kafka.Producer:
    """Both led by broker 1, and pushed; a producer that waits for nobody but the leader."""
    servers = ",".join(b.bootstrap_servers for b in brokers)
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    topics = [NewTopic(t, 1, replica_assignment=[[1, 2, 3]]) for t in (TOPIC, "other")]
    for created in admin.create_topics(topics).values():
        created.result(30)
    for topic in (TOPIC, "other"):
        wait_until(lambda t=topic: ways_of(brokers, t) == ["LEADS", "PUSHED", "PUSHED"])
    return confluent_kafka.Producer(
        {"bootstrap.servers": servers, "acks": 1, "log_level": 0, "linger.ms": 0}
    )


def test_a_fenced_follower_breaks_no_link(three: list[Any]) -> None:
    """It hears of a new leader before the old one does, which goes on writing; the other partitions
    of the two brokers do not notice."""
    producer = two_topics(three)
    follower = three[1]
    link = link_of(follower, 1)
    replica = follower._server.member.replicas._replicas[kdirect.TopicPartition(TOPIC, 0)]
    tp = kdirect.TopicPartition("other", 0)
    logs = [b._server.logs.partitions[tp] for b in three]

    def produce(count: int) -> None:
        for _ in range(count):
            for topic in (TOPIC, "other"):
                producer.produce(topic, bytes(100), partition=0)
            producer.poll(0)

    produce(500)
    on_loop(follower, lambda: replica.feed(Follow(NO_LEADER, replica.epoch + 1)))

    def fenced() -> bool:
        produce(20)
        return replica._push is None and not replica.is_pushed

    wait_until(fenced, "the follower has taken its keys back")
    produce(500)
    assert producer.flush(20) == 0
    wait_until(lambda: len({log.log_end_offset for log in logs}) == 1, "all have the other topic")
    assert link.is_open and link_of(follower, 1) is link
    assert ways_of(three, "other") == ["LEADS", "PUSHED", "PUSHED"]
    assert [b.statistics()["replicas_fetched_bytes"] for b in three] == [0, 0, 0]


def test_a_transport_that_does_not_work_gives_way_to_the_next(
    brokers: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Both transports are shared memory here; by the one that is called shm queue pairs connect,
    and break before a record has come."""
    caplog.set_level(logging.INFO, "kdirect.member")
    real = access.open_transport
    monkeypatch.setattr(access, "open_transport", lambda transport, *others: real("shm", *others))
    ask = Replication.ask

    async def cut_or_ask(self: Replication, link: Any, copy: Any) -> Any:
        if link.engine.transport == "shm":
            self._cut("shm", link.qp.qp_num, CutReason.DISCONNECTED)
            raise BrokerUnavailableError("the link is cut")
        return await ask(self, link, copy)

    monkeypatch.setattr(Replication, "ask", cut_or_ask)
    ours = brokers(2, rdma_transports="shm,verbs")
    servers = ",".join(b.bootstrap_servers for b in ours)
    make_topic(servers, replicas=2)
    wait_until(lambda: ways_of(ours) == ["LEADS", "PUSHED"], lambda: f"{ways_of(ours)}")
    leader = next(i for i, b in enumerate(ours) if TP in leads(b))
    link = link_of(ours[1 - leader], leader + 1)
    assert link.engine.transport == "verbs"
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": servers, "acks": "all", "log_level": 0}
    )
    producer.produce(TOPIC, b"1", partition=0)
    assert producer.flush(20) == 0
    assert ways_of(ours) == ["LEADS", "PUSHED"] and link.works
    said = [r.message for r in caplog.records if "shm is not used to copy" in r.message]
    assert len(said) == 1 and "cut before a record came" in said[0]


def leads(broker: Any) -> set[Any]:
    replicas = broker._server.member.replicas._replicas
    return {tp for tp, replica in replicas.items() if replica.leader is not None}


def test_a_follower_with_smaller_segments_is_pushed_to(
    brokers: Callable[..., list[Any]],
) -> None:
    """``segment.bytes`` is each broker's own default here: 1 has larger ones than 2.  The leader
    alone begins segments, by its own."""
    ours = brokers(1, log_segment_bytes=1 << 18) + brokers(1, log_segment_bytes=1 << 17)
    servers = ",".join(b.bootstrap_servers for b in ours)
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    topics = [
        NewTopic(TOPIC, 1, replica_assignment=[[1, 2]]),
        NewTopic("other", 1, replica_assignment=[[2, 1]]),
    ]
    for created in admin.create_topics(topics).values():
        created.result(30)
    for topic in (TOPIC, "other"):
        wait_until(lambda t=topic: ways_of(ours, t) == ["LEADS", "PUSHED"], f"{topic} was pushed")
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": servers, "acks": "all", "log_level": 0, "batch.size": 16_384}
    )
    for _ in range(600):
        for topic in (TOPIC, "other"):
            producer.produce(topic, bytes(1000), partition=0)
    assert producer.flush(30) == 0
    for topic, most in ((TOPIC, 1 << 18), ("other", 1 << 17)):
        assert ways_of(ours, topic) == ["LEADS", "PUSHED"]
        tp = kdirect.TopicPartition(topic, 0)
        first, second = (b._server.logs.partitions[tp] for b in ours)
        assert first.log_end_offset == second.log_end_offset == 600
        assert [s.base_offset for s in first.segments] == [s.base_offset for s in second.segments]
        sizes = [s.size for s in second.segments[:-1]]
        assert len(sizes) > 1 and most // 2 < max(sizes) <= most


def test_segments_become_larger_while_they_are_pushed(
    brokers: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``segment.bytes`` is raised: what was granted before is too short for the next segments.
    Push ends and comes again, and nobody waits until the leader has given up."""
    monkeypatch.setattr(led_log, "FILE_WAIT_S", 600.0)
    ours = brokers(2)
    servers = ",".join(b.bootstrap_servers for b in ours)
    make_topic(servers, replicas=2)
    wait_until(lambda: ways_of(ours) == ["LEADS", "PUSHED"], lambda: f"{ways_of(ours)}")
    logs = [b._server.logs.partitions[TP] for b in ours]
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": servers, "acks": "all", "log_level": 0, "batch.size": 16_384}
    )

    def produce(count: int) -> None:
        for _ in range(count):
            producer.produce(TOPIC, bytes(1000), partition=0)
        assert producer.flush(20) == 0, f"{ways_of(ours)}"

    produce(200)
    for larger in (SEGMENT_BYTES * 4, SEGMENT_BYTES * 16):
        with kdirect.connect({"bootstrap.servers": servers, "transport": "tcp"}) as session:
            session.admin.alter_configs(TOPIC, {"segment.bytes": larger})
        wait_until(lambda n=larger: all(log.config.segment_bytes == n for log in logs))
        produce(3 * larger // 1000)
        wait_until(lambda: ways_of(ours) == ["LEADS", "PUSHED"], lambda: f"{ways_of(ours)}")
    fetched = sum(b.statistics()["replicas_fetched_bytes"] for b in ours)
    produce(3000)
    assert fetched == sum(b.statistics()["replicas_fetched_bytes"] for b in ours)
    assert ways_of(ours) == ["LEADS", "PUSHED"]
    assert len({log.log_end_offset for log in logs}) == 1
    kept = [[(s.base_offset, s.size) for s in log.segments] for log in logs]
    assert kept[0] == kept[1]
    assert max(size for _, size in kept[0]) > SEGMENT_BYTES * 8


def test_a_head_grows_while_it_is_written(three: list[Any]) -> None:
    """A quiet replica takes little of the disk; one that is written gets more, and no record comes
    by Fetch meanwhile."""
    servers = ",".join(b.bootstrap_servers for b in three)
    make_topic(servers, **{"segment.bytes": str(4 << 20)})
    wait_until(lambda: ways_of(three) == ["LEADS", "PUSHED", "PUSHED"], lambda: f"{ways_of(three)}")
    tp = kdirect.TopicPartition(TOPIC, 0)
    logs = [b._server.logs.partitions[tp] for b in three]
    assert all(log.kernel.capacity <= 1 << 20 for log in logs if log.is_copy)
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": servers, "acks": "all", "log_level": 0, "batch.size": 65_536}
    )
    for _ in range(11_000):
        producer.produce(TOPIC, bytes(1000), partition=0)
        producer.poll(0)
    assert producer.flush(30) == 0
    assert ways_of(three) == ["LEADS", "PUSHED", "PUSHED"]
    found = [b.statistics() for b in three]
    assert [x["replicas_fetched_bytes"] for x in found] == [0, 0, 0]
    assert sorted(x["replicas_pushed"] for x in found) == [0, 0, 2]
    assert sorted(x["replicas_pushed_here"] for x in found) == [0, 1, 1]
    assert sorted(x["replicas_push_links"] for x in found) == [1, 1, 2]
    assert max(x["replicas_pushed_bytes"] for x in found) > 2 * 11_000 * 1000
    assert sum(x["replicas_push_refusals"] + x["replicas_push_links_cut"] for x in found) == 0
    assert {log.log_end_offset for log in logs} == {11_000}
    assert len({tuple(s.base_offset for s in log.segments) for log in logs}) == 1
    assert len(logs[0].segments) == 3
