"""Consumer groups of a cluster: their coordinator is the leader of their partition of
__consumer_offsets, and what was committed outlives it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient

import kdirect
from kdirect.broker.state_topic import FOR_EVER
from kdirect.broker.topics import OFFSETS_TOPIC
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode as E
from kdirect.format.group_records import partition_of
from kdirect.format.schema import build
from kdirect.model import TopicPartition
from tests.broker.conftest import Raw
from tests.members.wire import ask, create, partition_row
from tests.support import alter_topic, wait_until

COORDINATORS = 3  # partitions of the topic of committed offsets
GROUPS = [f"group-{i}" for i in range(8)]


def coordinator_of(broker: Any, group: str) -> int:
    """The node that FindCoordinator names, once there is one."""
    request = build(p.FindCoordinatorRequest, key_type=0, coordinator_keys=[group])
    found: list[Any] = []

    def answered() -> bool:
        (row,) = ask(broker, request, 4).coordinators
        assert row.error_code in (E.NONE, E.COORDINATOR_NOT_AVAILABLE)
        found[:] = [row.node_id]
        return row.error_code == E.NONE

    wait_until(answered, "the coordinator was there")
    return found[0]


def commit_request(group: str, tp: TopicPartition, offset: int) -> Any:
    part = {
        "partition_index": tp.partition,
        "committed_offset": offset,
        "committed_leader_epoch": -1,
        "committed_metadata": None,
    }
    return build(
        p.OffsetCommitRequest,
        group_id=group,
        generation_id_or_member_epoch=-1,
        member_id="",
        topics=[{"name": tp.topic, "partitions": [part]}],
    )


def commit(broker: Any, group: str, tp: TopicPartition, offset: int) -> E:
    request = commit_request(group, tp, offset)
    return E(ask(broker, request, 8).topics[0].partitions[0].error_code)


def committed(broker: Any, group: str, tp: TopicPartition) -> tuple[E, int]:
    topics = [{"name": tp.topic, "partition_indexes": [tp.partition]}]
    request = build(p.OffsetFetchRequest, group_id=group, topics=topics)
    answer = ask(broker, request, 7)
    if answer.error_code:
        return E(answer.error_code), -1
    return E.NONE, answer.topics[0].partitions[0].committed_offset


def until_done(call: Callable[[], E], what: str) -> None:
    """A client's patience: until the coordinator is there and knows its groups."""
    seen: list[E] = []

    def done() -> bool:
        seen.append(call())
        assert seen[-1] in (
            E.NONE,
            E.NOT_COORDINATOR,
            E.COORDINATOR_LOAD_IN_PROGRESS,
            E.COORDINATOR_NOT_AVAILABLE,
        )
        return seen[-1] is E.NONE

    wait_until(done, what)


@pytest.fixture
def three(brokers: Any, request: Any) -> list[Any]:
    ours = brokers(
        3,
        offsets_topic_num_partitions=COORDINATORS,
        offsets_topic_segment_bytes=1 << 20,
        **getattr(request, "param", {}),
    )
    assert create(ours[0], "t", partitions=2, factor=2).error_code == 0
    return ours


def test_a_group_is_coordinated_by_the_leader_of_its_partition_alone(three: list[Any]) -> None:
    tp = TopicPartition("t", 0)
    leaders = {}
    for group in GROUPS:
        node = coordinator_of(three[0], group)
        assert all(coordinator_of(b, group) == node for b in three)
        index = partition_of(group, COORDINATORS)
        leaders[index] = node
        row = partition_row(three[0], TopicPartition(OFFSETS_TOPIC, index))
        assert row.leader_id == node and len(row.replica_nodes) == 3
        until_done(lambda g=group, n=node: commit(three[n - 1], g, tp, 7), "it was committed")
        for place, broker in enumerate(three, 1):
            expected = (E.NONE, 7) if place == node else (E.NOT_COORDINATOR, -1)
            assert committed(broker, group, tp) == expected
            if place != node:
                assert commit(broker, group, tp, 8) is E.NOT_COORDINATOR
                beat = build(p.HeartbeatRequest, group_id=group, generation_id=1, member_id="m")
                assert ask(broker, beat, 3).error_code == E.NOT_COORDINATOR
                described = ask(broker, build(p.DescribeGroupsRequest, groups=[group]), 5)
                assert described.groups[0].error_code == E.NOT_COORDINATOR
    assert len(set(leaders.values())) == 3, "the coordinators are spread"
    listed = []
    for broker in three:
        answer = ask(broker, build(p.ListGroupsRequest), 4)
        assert answer.error_code == 0
        listed += [row.group_id for row in answer.groups]
    assert sorted(listed) == GROUPS


@pytest.mark.parametrize(
    "three", [{}, {"log_flush_before_ack": True}], indirect=True, ids=["replicas", "disks"]
)
def test_commits_outlive_a_coordinator_that_stops_and_comes_back(three: list[Any]) -> None:
    tp = TopicPartition("t", 0)
    group = GROUPS[0]
    node = coordinator_of(three[0], group)
    until_done(lambda: commit(three[node - 1], group, tp, 41), "it was committed")
    three[node - 1].stop()
    others = [b for place, b in enumerate(three, 1) if place != node]
    wait_until(lambda: coordinator_of(others[0], group) != node, "another coordinates")
    second = coordinator_of(others[0], group)
    until_done(lambda: committed(three[second - 1], group, tp)[0], "the groups were loaded")
    assert committed(three[second - 1], group, tp) == (E.NONE, 41)
    until_done(lambda: commit(three[second - 1], group, tp, 42), "it was committed")
    three[node - 1].start()
    wait_until(lambda: committed(three[node - 1], group, tp)[0] == E.NOT_COORDINATOR, "it is back")
    three[second - 1].stop()
    wait_until(
        lambda: coordinator_of(three[node - 1], group) not in (second, -1), "another coordinates"
    )
    third = coordinator_of(three[node - 1], group)
    until_done(lambda: committed(three[third - 1], group, tp)[0], "the groups were loaded")
    assert committed(three[third - 1], group, tp) == (E.NONE, 42)


def test_a_member_that_waits_at_a_coordinator_that_resigns_is_sent_on(three: list[Any]) -> None:
    """The first member has joined and is asked to come back; the second waits for it."""
    group = GROUPS[1]
    node = coordinator_of(three[0], group)
    connection = Raw(three[node - 1].bootstrap_servers, timeout_s=30)

    def join(connection: Raw, **more: Any) -> Any:
        request = build(
            p.JoinGroupRequest,
            group_id=group,
            session_timeout_ms=30_000,
            rebalance_timeout_ms=60_000,
            member_id="",
            protocol_type="consumer",
            protocols=[{"name": "range", "metadata": b""}],
            **more,
        )
        connection.send(request, 3)

    def first() -> E:
        join(connection)
        return E(connection.receive().error_code)

    until_done(first, "the first has joined")
    waiting = Raw(three[node - 1].bootstrap_servers, timeout_s=30)
    join(waiting)
    members = three[node - 1].server.groups.coordinator.groups
    wait_until(lambda: len(members[group].members) == 2, "the second waits")
    stopping = threading.Thread(target=three[node - 1].stop)
    stopping.start()
    assert waiting.receive().error_code == E.NOT_COORDINATOR
    stopping.join()
    connection.close()
    waiting.close()


def test_offsets_in_a_deleted_topic_are_forgotten_wherever_its_replicas_were(
    three: list[Any],
) -> None:
    for name in ("gone", "kept"):
        assert create(three[0], name, assignment={0: (1,)}).error_code == 0
    gone, kept = TopicPartition("gone", 0), TopicPartition("kept", 0)
    nodes = {group: coordinator_of(three[0], group) for group in GROUPS}
    assert set(nodes.values()) == {1, 2, 3}
    for group, node in nodes.items():
        for tp in (gone, kept):
            until_done(lambda g=group, n=node, t=tp: commit(three[n - 1], g, t, 5), "committed")
    delete = build(
        p.DeleteTopicsRequest, topics=[{"name": "gone", "topic_id": None}], timeout_ms=20_000
    )
    assert ask(three[1], delete, 6).responses[0].error_code == 0
    for group, node in nodes.items():
        wait_until(
            lambda g=group, n=node: committed(three[n - 1], g, gone) == (E.NONE, -1), "forgotten"
        )
        assert committed(three[node - 1], group, kept) == (E.NONE, 5)


SOON = {"log_cleaner_backoff_ms": 20, "log_cleaner_min_cleanable_ratio": 0.1}
LOG = TopicPartition(OFFSETS_TOPIC, 0)


def commit_many(broker: Any, tp: TopicPartition, offsets: range) -> None:
    """Each offset for one of five groups."""
    connection = Raw(broker.bootstrap_servers, timeout_s=30)
    for offset in offsets:
        answer = connection.call(commit_request(f"g{offset % 5}", tp, offset), 8)
        assert answer.topics[0].partitions[0].error_code == E.NONE
    connection.close()


def test_every_replica_compacts_the_log_of_groups_and_any_of_them_has_all(brokers: Any) -> None:
    """Each broker compacts its own copy, and none of them waits for another; whoever is elected
    loads what all have committed."""
    ours = brokers(3, **SOON)
    assert create(ours[0], "t", partitions=1, factor=3).error_code == 0
    tp = TopicPartition("t", 0)
    node = coordinator_of(ours[0], "g0")
    until_done(lambda: commit(ours[node - 1], "g0", tp, 1), "it was committed")
    alter_topic(ours[0].bootstrap_servers, OFFSETS_TOPIC, segment_bytes=16384)
    commit_many(ours[node - 1], tp, range(1000))
    copies = [broker.server.logs.partitions[LOG] for broker in ours]
    wait_until(
        lambda: all(c.dense_from > 500 and c.size < 40_000 for c in copies),
        lambda: f"all were compacted: {[(c.dense_from, c.size) for c in copies]}",
    )
    assert {c.log_start_offset for c in copies} == {0}
    gone = {node}
    ours[node - 1].stop()
    for last in (1000, 2000):
        left = [b for place, b in enumerate(ours, 1) if place not in gone]
        wait_until(lambda b=left[0]: coordinator_of(b, "g0") not in gone, "another one coordinates")
        new = ours[coordinator_of(left[0], "g0") - 1]
        until_done(lambda b=new: committed(b, "g0", tp)[0], "the groups were loaded")
        expected = [(E.NONE, last - 5 + i) for i in range(5)]
        assert [committed(new, f"g{i}", tp) for i in range(5)] == expected
        if len(gone) == 1:
            commit_many(new, tp, range(1000, 2000))
            copies = [b.server.logs.partitions[LOG] for b in left]
            wait_until(lambda c=copies: all(x.dense_from > 1500 for x in c), "both go on")
            gone.add(ours.index(new) + 1)
            new.stop()


def test_the_log_of_groups_of_an_older_cluster_becomes_a_compacted_one(brokers: Any) -> None:
    ours = brokers(2, **SOON)
    servers = ours[0].bootstrap_servers
    assert create(ours[0], "t", partitions=1, factor=2).error_code == 0
    tp = TopicPartition("t", 0)
    node = coordinator_of(ours[0], "g0")
    until_done(lambda: commit(ours[node - 1], "g0", tp, 1), "it was committed")
    old = {**FOR_EVER, "segment.bytes": str(4 << 20), "flush.ms": "60000"}
    alter_topic(servers, OFFSETS_TOPIC, **old)
    copies = [broker.server.logs.partitions[LOG] for broker in ours]
    wait_until(lambda: all(c.config.deletes for c in copies), "they have the old properties")
    commit_many(ours[node - 1], tp, range(2, 100))
    other = ours[2 - node]
    ours[node - 1].stop()
    wait_until(lambda: coordinator_of(other, "g0") != node, "the other one coordinates")
    copy = other.server.logs.partitions[LOG]
    wait_until(lambda: copy.config.compacts and not copy.config.deletes, "it is compacted")
    assert copy.config.overrides == {
        "cleanup.policy": "compact",
        "compression.type": "producer",
        "flush.ms": "60000",
        "segment.bytes": str(100 << 20),
    }
    until_done(lambda: committed(other, "g0", tp)[0], "the groups were loaded")
    assert [committed(other, f"g{i}", tp) for i in range(5)] == [(E.NONE, 95 + i) for i in range(5)]


# -- real processes, stock clients -----------------------------------------------------------------


class Node(NamedTuple):
    """A broker of a cluster of processes, as `ask` wants one."""

    bootstrap_servers: str


def test_a_coordinator_that_was_deposed_while_it_hung_acknowledges_nothing(cluster: Any) -> None:
    made = cluster(3)
    nodes = {node_id: Node(made.address(node_id)) for node_id in made.node_ids}
    with kdirect.connect(
        {"bootstrap.servers": made.bootstrap_servers, "transport": "tcp"}
    ) as session:
        session.admin.create_topic("t", 1, 3)
    tp = TopicPartition("t", 0)
    old = coordinator_of(nodes[1], "g")
    until_done(lambda: commit(nodes[old], "g", tp, 1), "it was committed")
    connection = Raw(nodes[old].bootstrap_servers, timeout_s=60)
    connection.send(commit_request("g", tp, 2), 8)
    assert connection.receive().topics[0].partitions[0].error_code == E.NONE
    made.pause(old)
    connection.send(commit_request("g", tp, 3), 8)  # it is read when the broker goes on
    other = next(node_id for node_id in nodes if node_id != old)
    wait_until(lambda: coordinator_of(nodes[other], "g") != old, "another one coordinates", 60)
    new = coordinator_of(nodes[other], "g")
    until_done(lambda: committed(nodes[new], "g", tp)[0], "the groups were loaded")
    assert committed(nodes[new], "g", tp) == (E.NONE, 2)
    until_done(lambda: commit(nodes[new], "g", tp, 4), "it was committed")
    made.resume(old)
    assert connection.receive().topics[0].partitions[0].error_code in (
        E.NOT_COORDINATOR,
        E.COORDINATOR_NOT_AVAILABLE,
    )
    wait_until(lambda: committed(nodes[old], "g", tp)[0] == E.NOT_COORDINATOR, "it has resigned")
    assert committed(nodes[new], "g", tp) == (E.NONE, 4)
    connection.close()


CLASSIC = {
    "session.timeout.ms": 10_000,
    "heartbeat.interval.ms": 500,
    "partition.assignment.strategy": "cooperative-sticky",
}


class Reader:
    """A member of a group that commits each record before it notes it."""

    def __init__(self, servers: str, name: str, protocol: str) -> None:
        self.name = name
        self.noted: dict[tuple[str, int], list[int]] = {}  # acknowledged commits, in order
        self.errors: list[Exception] = []
        self._consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": servers,
                "group.id": "readers",
                "client.id": name,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "group.protocol": protocol,
                **(CLASSIC if protocol == "classic" else {}),
            }
        )
        self._consumer.subscribe(["t"])
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                message = self._consumer.poll(0.1)
                if message is None or message.error() is not None:
                    continue
                self._commit(message)
        except Exception as e:
            self.errors.append(e)
        finally:
            self._consumer.close()

    def _commit(self, message: Any) -> None:
        try:
            done = self._consumer.commit(message, asynchronous=False)
        except confluent_kafka.KafkaException as e:
            if e.args[0].fatal():
                raise
            return  # not acknowledged: nothing is promised
        assert all(tp.error is None for tp in done)
        place = (message.topic(), message.partition())
        self.noted.setdefault(place, []).append(message.offset() + 1)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(60)


class Writer:
    """Keeps records coming to all partitions."""

    def __init__(self, servers: str, partitions: int) -> None:
        self._producer = confluent_kafka.Producer(
            {"bootstrap.servers": servers, "enable.idempotence": True, "linger.ms": 5}
        )
        self._partitions = partitions
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        sent = 0
        while not self._stop.is_set():
            self._producer.produce("t", b"%d" % sent, partition=sent % self._partitions)
            sent += 1
            self._producer.poll(0)
            self._stop.wait(0.005)  # a pace
        self._producer.flush(60)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(90)


def progress(readers: list[Reader]) -> dict[Any, int]:
    """The highest acknowledged commit of each partition."""
    out: dict[Any, int] = {}
    for reader in readers:
        for place, offsets in list(reader.noted.items()):
            out[place] = max(out.get(place, 0), offsets[-1])
    return out


@pytest.fixture(params=["classic", "consumer"])
def running(cluster: Any, request: Any) -> Iterator[tuple[kdirect.Cluster, list[Reader]]]:
    made = cluster(
        3,
        **{
            "offsets.topic.num.partitions": 1,
            "group.consumer.session.timeout.ms": 10_000,
            "group.consumer.heartbeat.interval.ms": 500,
        },
    )
    with kdirect.connect(
        {"bootstrap.servers": made.bootstrap_servers, "transport": "tcp"}
    ) as session:
        session.admin.create_topic("t", 3, 3)
    writer = Writer(made.bootstrap_servers, 3)
    readers = [Reader(made.bootstrap_servers, f"reader-{i}", request.param) for i in range(2)]
    yield made, readers
    writer.close()
    for reader in readers:
        reader.close()


def test_a_group_goes_on_when_its_coordinator_is_killed(
    running: tuple[kdirect.Cluster, list[Reader]],
) -> None:
    """Twice, with the first one back in between: no commit is lost, and none goes back."""
    made, readers = running
    admin = AdminClient({"bootstrap.servers": made.bootstrap_servers})

    def both_commit_beyond(before: dict[Any, int]) -> bool:
        now = progress(readers)
        return len(now) == 3 and all(end > before.get(place, 0) + 5 for place, end in now.items())

    wait_until(lambda: both_commit_beyond({}), "the group began", timeout_s=60)
    for _ in range(2):
        described = admin.describe_consumer_groups(["readers"])["readers"].result(30)
        victim = described.coordinator.id
        before = progress(readers)
        made.kill(victim)
        wait_until(lambda b=before: both_commit_beyond(b), "the group goes on", timeout_s=60)
        described = admin.describe_consumer_groups(["readers"])["readers"].result(30)
        assert described.coordinator.id != victim
        stored = admin.list_consumer_group_offsets(
            [confluent_kafka.ConsumerGroupTopicPartitions("readers")]
        )["readers"].result(30)
        kept = {(tp.topic, tp.partition): tp.offset for tp in stored.topic_partitions}
        assert all(kept[place] >= end for place, end in before.items())
        made.start(victim)
        made.wait_for_members()
    for reader in readers:
        reader.close()
        assert not reader.errors
        for offsets in reader.noted.values():
            assert offsets == sorted(offsets), "a consumer was sent back"
    wait_until(
        lambda: (
            admin.describe_consumer_groups(["readers"])["readers"].result(30).state
            == confluent_kafka.ConsumerGroupState.EMPTY
        ),
        "both have left",
    )
    final = admin.list_consumer_group_offsets(
        [confluent_kafka.ConsumerGroupTopicPartitions("readers")]
    )["readers"].result(30)
    ends = progress(readers)
    for tp in final.topic_partitions:
        assert tp.offset >= ends[tp.topic, tp.partition], "a commit was lost"
