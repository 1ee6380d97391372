"""Who leads what: the pure view, and what brokers of one layout answer."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import kdirect
from kdirect.broker.cluster_view import (
    MAX_NODES,
    NO_NODE,
    PRODUCER_ID_BITS,
    UNKNOWN_EPOCH,
    ClusterLayout,
    ClusterView,
    Node,
    PartitionView,
)
from kdirect.broker.groups import Group
from kdirect.errors import ConfigError
from kdirect.format import protocol as p
from kdirect.format.batch import encode_single_bytes
from kdirect.format.error_codes import ErrorCode
from kdirect.format.schema import build
from kdirect.model import TopicPartition

FIRST, SECOND = Node(7, "one", 9092), Node(3, "two", 9093)
LAYOUT = ClusterLayout({FIRST: {"a": 2}, SECOND: {"b": 1}})
ADDRESS = ("reached.as", 1)


def view(node_id: int = 7, layout: ClusterLayout | None = None, **epochs: int) -> ClusterView:
    """What broker `node_id` knows, with the partitions `topic_0=epoch` in its log."""
    held = {
        TopicPartition(topic, int(index)): epoch
        for name, epoch in epochs.items()
        for topic, _, index in [name.partition("_")]
    }
    return ClusterView(node_id, cluster_id=lambda: "id", local_epoch=held.get, layout=layout)


# -- the view --------------------------------------------------------------------------------------


def test_one_broker_leads_everything() -> None:
    v = view(7, t_0=4)
    assert v.nodes(ADDRESS) == (Node(7, *ADDRESS),)
    assert (v.controller_id, v.cluster_id) == (7, "id")
    assert v.leads("t") and v.leads("anything") and v.leader_of("anything") == 7
    assert v.partition(TopicPartition("t", 0)) == PartitionView(7, 4, (7,), (7,))
    assert v.coordinator_of("g") == 7 and v.coordinates("g")
    assert v.producer_id(5) == 5
    assert not v.topics_are_fixed


def test_a_partition_without_a_log_has_no_leader() -> None:
    assert view(7).partition(TopicPartition("t", 1)) == PartitionView(
        NO_NODE, UNKNOWN_EPOCH, (7,), (), (7,)
    )


def test_a_layout_says_which_broker_leads_a_topic() -> None:
    first, second = view(7, LAYOUT, a_0=2, b_0=9), view(3, LAYOUT, b_0=5)
    for v in (first, second):
        assert v.nodes(ADDRESS) == (FIRST, SECOND)
        assert v.node(3, ADDRESS) == SECOND
        assert v.controller_id == 7
        assert (v.leader_of("a"), v.leader_of("b")) == (7, 3)
        assert v.topics_are_fixed
        assert v.coordinator_of("g") == 7
    assert first.leads("a") and not first.leads("b")
    assert second.leads("b") and not second.leads("a")
    assert first.coordinates("g") and not second.coordinates("g")
    # The epoch of the broker that leads counts, not that of what another one has in its log.
    b = TopicPartition("b", 0)
    assert first.partition(b) == PartitionView(3, UNKNOWN_EPOCH, (3,), (3,))
    assert second.partition(b) == PartitionView(3, 5, (3,), (3,))
    assert first.partition(TopicPartition("b", 1)).leader == NO_NODE


def test_producer_ids_of_two_brokers_differ() -> None:
    first, second = view(7, LAYOUT), view(3, LAYOUT)
    assert first.producer_id(9) == 9
    assert second.producer_id(9) == (1 << PRODUCER_ID_BITS) + 9


def test_replicas_are_refused_with_the_reason() -> None:
    v = view(7)
    assert v.bad_replication_factor(-1) == v.bad_replication_factor(1) == ""
    assert "use 1" in v.bad_replication_factor(3)
    assert v.bad_assignment([[7], [7]]) == ""
    assert "[3]" in v.bad_assignment([[7], [3]])


@pytest.mark.parametrize(
    "led",
    [
        {},
        {Node(1, "h", 1): {}, Node(1, "h", 2): {}},
        {Node(1, "h", 1): {"a": 1}, Node(2, "h", 2): {"a": 1}},
        {Node(1, "h", 1): {"a": 0}},
        {Node(1, "h", 1): {"a/b": 1}},
        {Node(i, "h", i): {} for i in range(MAX_NODES + 1)},
    ],
)
def test_a_layout_that_does_not_fit_together_is_refused(led: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        ClusterLayout(led)
    assert caught.value.hint


def test_a_broker_that_its_layout_does_not_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="broker 8 is not in the layout") as caught:
        view(8, LAYOUT)
    assert "node.id" in caught.value.hint


def test_equal_layouts_give_equal_ids() -> None:
    again = ClusterLayout({FIRST: {"a": 2}, SECOND: {"b": 1}})
    assert again.cluster_id == LAYOUT.cluster_id
    assert again.topics == LAYOUT.topics
    assert LAYOUT.topics["a"].topic_id != LAYOUT.topics["b"].topic_id


# -- two brokers of one layout ---------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[kdirect.Broker, kdirect.Broker]]:
    """Broker 1 leads topic `a` (2 partitions), broker 2 leads `b`."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        nodes = [Node(i, *s.getsockname()) for i, s in enumerate(held, 1)]
        layout = ClusterLayout({nodes[0]: {"a": 2}, nodes[1]: {"b": 1}})
        for s in held:
            s.close()
        yield tuple(
            stack.enter_context(
                kdirect.Broker(
                    tmp_path / f"log{node.node_id}",
                    f"{node.host}:{node.port}",
                    layout=layout,
                    node_id=node.node_id,
                )
            )
            for node in nodes
        )  # type: ignore[misc]


def test_both_tell_the_same_of_the_cluster(pair: Any, raw: Any) -> None:
    answers = []
    for broker in pair:
        answer = raw(broker.bootstrap_servers).call(build(p.MetadataRequest, topics=None), 8)
        assert {t.name: [x.leader_id for x in t.partitions] for t in answer.topics} == {
            "a": [1, 1],
            "b": [2],
        }
        assert answer.controller_id == 1
        answers.append([(b.node_id, b.host, b.port) for b in answer.brokers])
        answers.append(answer.cluster_id)
        cluster = raw(broker.bootstrap_servers).call(build(p.DescribeClusterRequest), 0)
        assert [(b.broker_id, b.host, b.port) for b in cluster.brokers] == answers[-2]
    assert answers[:2] == answers[2:]


def test_who_does_not_lead_says_so(pair: Any, raw: Any) -> None:
    first = raw(pair[0].bootstrap_servers)
    batch = encode_single_bytes(b"v")
    produced = first.call(
        build(
            p.ProduceRequest,
            acks=1,
            timeout_ms=1000,
            transactional_id=None,
            topic_data=[{"name": "b", "partition_data": [{"index": 0, "records": batch}]}],
        ),
        7,
    )
    fetched = first.call(
        build(
            p.FetchRequest,
            max_wait_ms=0,
            min_bytes=0,
            max_bytes=1000,
            isolation_level=0,
            session_id=0,
            session_epoch=-1,
            topics=[
                {
                    "topic": "b",
                    "partitions": [
                        {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1000}
                    ],
                }
            ],
            forgotten_topics_data=[],
        ),
        10,
    )
    listed = first.call(
        build(
            p.ListOffsetsRequest,
            replica_id=-1,
            isolation_level=0,
            topics=[{"name": "b", "partitions": [{"partition_index": 0, "timestamp": -1}]}],
        ),
        3,
    )
    epochs = first.call(
        build(
            p.OffsetForLeaderEpochRequest,
            replica_id=-1,
            topics=[
                {
                    "topic": "b",
                    "partitions": [{"partition": 0, "current_leader_epoch": -1, "leader_epoch": 0}],
                }
            ],
        ),
        3,
    )
    assert [
        produced.responses[0].partition_responses[0].error_code,
        fetched.responses[0].partitions[0].error_code,
        listed.topics[0].partitions[0].error_code,
        epochs.topics[0].partitions[0].error_code,
    ] == [ErrorCode.NOT_LEADER_OR_FOLLOWER] * 4


def test_who_does_not_lead_gives_no_access(pair: Any) -> None:
    from kdirect.wire.channel import Channel
    from kdirect.wire.connection import Connection

    host, _, port = pair[0].bootstrap_servers.rpartition(":")
    connection = Connection(host, int(port), timeout_ms=10_000)
    channel = Channel(connection, "shm")
    try:
        produce = connection.request(
            p.GetProduceAccessRequest(
                connection_id=channel.connection_id,
                topic="b",
                partition=0,
                mode=2,
                min_bytes=1,
                ack_address=0,
                ack_rkey=0,
                ack_entries=16,
                max_in_flight=16,
                finished_file_id=-1,
                end_order=0,
                end_position=0,
                ahead_of_file_id=-1,
            )
        )
        consume = connection.request(
            p.GetConsumeAccessRequest(
                connection_id=channel.connection_id,
                partitions=[
                    p.GetConsumeAccessRequest.ConsumeTarget(
                        topic="b", partition=0, offset=0, finished_file_id=-1
                    )
                ],
            )
        )
        assert produce.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
        assert consume.partitions[0].error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
        assert "broker 2 leads b-0" in consume.partitions[0].error_message
    finally:
        channel.close()
        connection.close()


def test_one_broker_coordinates_all_groups(pair: Any, raw: Any) -> None:
    for broker in pair:
        found = raw(broker.bootstrap_servers).call(
            build(p.FindCoordinatorRequest, key="g", key_type=0), 1
        )
        assert (found.error_code, found.node_id) == (0, 1)
    second = raw(pair[1].bootstrap_servers)
    beat = second.call(build(p.HeartbeatRequest, group_id="g", generation_id=1, member_id="m"), 0)
    fetched = second.call(build(p.OffsetFetchRequest, group_id="g", topics=None), 5)
    assert {beat.error_code, fetched.error_code} == {ErrorCode.NOT_COORDINATOR}


def test_members_may_wait_while_their_group_is_loaded(
    pair: Any, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = pair[0]
    refuse = lambda group: ErrorCode.COORDINATOR_LOAD_IN_PROGRESS  # noqa: E731
    monkeypatch.setattr(first.server.groups.partitions, "refusal", refuse)
    asked = raw(first.bootstrap_servers)
    beat = build(p.HeartbeatRequest, group_id="g", generation_id=1, member_id="m")
    assert asked.call(beat, 0).error_code == ErrorCode.NONE
    leave = build(p.LeaveGroupRequest, group_id="g", member_id="m")
    assert asked.call(leave, 0).error_code == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS


def test_a_group_is_listed_and_described_by_its_coordinator_alone(pair: Any, raw: Any) -> None:
    """Although the other broker has something of it, from a time before the layout."""
    for broker in pair:
        broker.server.groups.coordinator.groups["g"] = Group("g")
    first, second = (raw(broker.bootstrap_servers) for broker in pair)

    def listed(broker: Any) -> list[str]:
        answer = broker.call(build(p.ListGroupsRequest), 2)
        assert answer.error_code == 0
        return [group.group_id for group in answer.groups]

    def described(broker: Any) -> tuple[int, str]:
        (row,) = broker.call(build(p.DescribeGroupsRequest, groups=["g"]), 3).groups
        return row.error_code, row.group_state

    assert (listed(first), listed(second)) == (["g"], [])
    assert described(first) == (0, "Empty")
    assert described(second)[0] == ErrorCode.NOT_COORDINATOR


def test_topics_of_the_layout_stay_as_they_are(pair: Any, raw: Any) -> None:
    first, second = (raw(b.bootstrap_servers) for b in pair)
    deleted = first.call(build(p.DeleteTopicsRequest, topic_names=["a", "b"], timeout_ms=1000), 3)
    grown = first.call(
        build(
            p.CreatePartitionsRequest,
            timeout_ms=1000,
            validate_only=False,
            topics=[{"name": n, "count": 9, "assignments": None} for n in ("a", "b")],
        ),
        1,
    )
    codes = [r.error_code for r in (*deleted.responses, *grown.results)]
    assert codes == [ErrorCode.POLICY_VIOLATION] * 4

    def create(connection: Any, name: str) -> int:
        topic = {
            "name": name,
            "num_partitions": 1,
            "replication_factor": 1,
            "assignments": [],
            "configs": [],
        }
        request = build(p.CreateTopicsRequest, topics=[topic], timeout_ms=1000, validate_only=False)
        return connection.call(request, 2).topics[0].error_code

    assert create(first, "b") == ErrorCode.TOPIC_ALREADY_EXISTS
    assert create(first, "new") == create(second, "new") == ErrorCode.POLICY_VIOLATION
