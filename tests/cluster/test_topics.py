"""Topics and configs: what a controller does when it is asked, on a store that answers at once."""

from __future__ import annotations

import uuid

import pytest

from kdirect.cluster import paths, records
from kdirect.cluster.codes import Code
from kdirect.cluster.partition_state import NO_LEADER
from kdirect.cluster.requests import (
    AlterConfig,
    ConfigOf,
    CreateTopic,
    DeleteTopic,
    GrowTopic,
    Reassign,
    ReassignRow,
)
from kdirect.model import TopicPartition
from tests.cluster.desk import T0, T1, Desk, alter, stop
from tests.cluster.observer import Unchecked

# -- topics ----------------------------------------------------------------------------------------


def test_a_topic_is_created_with_all_its_nodes_in_one_commit() -> None:
    desk = Desk()
    before = desk.commits
    answer = desk.create("t", [(0, 1, 2), (1, 2, 0)], retention_ms="1000")
    (created,) = answer.rows
    assert (answer.outcome.code, created.replicas) == (Code.NONE, ((0, 1, 2), (1, 2, 0)))
    assert desk.commits == before + 1
    assert desk.state(T0)[:3] == (0, 0, (0, 1, 2))
    assert desk.state(T1)[:3] == (1, 0, (1, 2, 0))
    node = desk.tree.get(paths.topic_config("t"))
    assert records.decode_config("", node.value) == {"retention.ms": "1000"}
    record = records.decode_topic("", desk.tree.get(paths.topic("t")).value)
    assert record.topic_id == created.topic_id
    changed = records.decode_changes("", desk.tree.get(paths.CHANGES).value)
    assert changed.since(0) is not None
    assert set(changed.since(0)) == {
        paths.topic("t"), paths.topic_config("t"), paths.state(T0), paths.state(T1),
    }  # fmt: skip


def test_a_topic_that_has_records_begins_above_their_epochs() -> None:
    desk = Desk()
    wanted = CreateTopic(None, "t", uuid.uuid4(), assignment={0: (1,)}, first_epoch=7)
    assert desk.ask(wanted).outcome.code is Code.NONE
    assert desk.state(T0)[:3] == (1, 7, (1,))
    for epoch in (-1, 2**31):
        refused = wanted._replace(name="u", first_epoch=epoch)
        assert desk.ask(refused).outcome.code is Code.INVALID_REQUEST


def test_replicas_are_spread_and_leaders_are_even() -> None:
    desk = Desk(4, racks={0: "a", 1: "a", 2: "b", 3: "b"})
    wanted = CreateTopic(None, "t", uuid.uuid4(), partitions=8, factor=2, start=1)
    assert desk.ask(wanted).outcome.code is Code.NONE
    leaders = [desk.state(TopicPartition("t", p)).leader for p in range(8)]
    assert sorted(leaders) == [0, 0, 1, 1, 2, 2, 3, 3]
    for p in range(8):
        racks = {desk.racks[b] for b in desk.partition(TopicPartition("t", p)).replicas}
        assert racks == {"a", "b"}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"name": "t"}, Code.TOPIC_ALREADY_EXISTS),
        ({"name": "a.b"}, Code.INVALID_TOPIC_EXCEPTION),  # there is a_b
        ({"name": "a/b"}, Code.INVALID_TOPIC_EXCEPTION),
        ({"name": ""}, Code.INVALID_TOPIC_EXCEPTION),
        ({"factor": 4}, Code.INVALID_REPLICATION_FACTOR),
        ({"factor": 0}, Code.INVALID_REPLICATION_FACTOR),
        ({"partitions": 0}, Code.INVALID_PARTITIONS),
        ({"partitions": 10_001}, Code.INVALID_PARTITIONS),
        ({"assignment": {0: (0, 7)}}, Code.INVALID_REPLICA_ASSIGNMENT),
        ({"assignment": {0: (0, 0)}}, Code.INVALID_REPLICA_ASSIGNMENT),
        ({"assignment": {0: ()}}, Code.INVALID_REPLICA_ASSIGNMENT),
        ({"assignment": {0: (0, 1), 1: (1,)}}, Code.INVALID_REPLICA_ASSIGNMENT),
        ({"assignment": {1: (0, 1)}}, Code.INVALID_REPLICA_ASSIGNMENT),
        ({"assignment": {}}, Code.INVALID_REPLICA_ASSIGNMENT),
    ],
)
def test_a_topic_that_cannot_be_is_refused(changes, code) -> None:
    desk = Desk()
    desk.create("t", [(0,)])
    desk.create("a_b", [(0,)])
    before = desk.tree.changes
    wanted = CreateTopic(None, "new", uuid.uuid4())._replace(**changes)
    answer = desk.ask(wanted)
    assert answer.outcome.code is code
    assert answer.outcome.message
    assert desk.tree.changes == before


def test_validate_only_writes_nothing() -> None:
    desk = Desk()
    before = desk.tree.changes
    answer = desk.ask(CreateTopic(None, "t", uuid.uuid4(), partitions=2, validate_only=True))
    assert (answer.outcome.code, len(answer.rows[0].replicas)) == (Code.NONE, 2)
    desk.create("u", [(0,)])
    after = desk.tree.changes
    assert desk.ask(GrowTopic(None, "u", 2, validate_only=True)).outcome.code is Code.NONE
    assert (desk.tree.get(paths.topic("t")), after) == (None, desk.tree.changes)
    assert after > before


def test_a_topic_grows() -> None:
    desk = Desk()
    desk.create("t", [(1, 2)])
    assert desk.ask(GrowTopic(None, "t", 3)).outcome.code is Code.NONE
    # Kafka goes on from the first broker of partition 0.
    assert [desk.partition(TopicPartition("t", p)).replicas for p in range(3)] == [
        (1, 2), (2, 1), (0, 2),
    ]  # fmt: skip
    assert desk.ask(GrowTopic(None, "t", 4, ((2, 0),))).outcome.code is Code.NONE
    assert desk.state(TopicPartition("t", 3))[:3] == (2, 0, (2, 0))


def test_a_broker_that_dies_while_a_partition_is_added_does_not_lead_it() -> None:
    desk = Desk()
    desk.create("t", [(0, 1)])
    desk.hold = True
    desk.ask(GrowTopic(None, "t", 2, ((2, 1),)))
    desk.unregister(2)
    desk.brokers()
    desk.hold = False
    desk.commit_held()
    assert desk.state(T1)[:3] == (1, 1, (1,))


@pytest.mark.parametrize(
    ("wanted", "code"),
    [
        (GrowTopic(None, "none", 2), Code.UNKNOWN_TOPIC_OR_PARTITION),
        (GrowTopic(None, "t", 1), Code.INVALID_PARTITIONS),
        (GrowTopic(None, "t", 10_001), Code.INVALID_PARTITIONS),
        (GrowTopic(None, "t", 3, ((0, 1),)), Code.INVALID_REPLICA_ASSIGNMENT),
        (GrowTopic(None, "t", 2, ((0,),)), Code.INVALID_REPLICA_ASSIGNMENT),
        (GrowTopic(None, "t", 2, ((0, 9),)), Code.INVALID_REPLICA_ASSIGNMENT),
        (GrowTopic(None, "moving", 2), Code.REASSIGNMENT_IN_PROGRESS),
    ],
)
def test_growth_that_cannot_be_is_refused(wanted, code) -> None:
    desk = Desk()
    desk.create("t", [(0, 1)])
    desk.create("moving", [(0, 1)])
    desk.ask(Reassign(None, (ReassignRow(TopicPartition("moving", 0), (0, 2)),)))
    assert desk.ask(wanted).outcome.code is code


def test_a_topic_is_deleted_with_all_its_nodes() -> None:
    desk = Desk()
    desk.create("u", [(0,)])
    before = {p for p in desk.nodes() if p != paths.CHANGES}
    topic_id = desk.create("t", [(0, 1), (1, 2)]).rows[0].topic_id
    assert desk.ask(DeleteTopic(None, None, topic_id)).outcome.code is Code.NONE
    assert {p for p in desk.nodes() if p != paths.CHANGES} == before
    assert desk.ask(DeleteTopic(None, "t")).outcome.code is Code.UNKNOWN_TOPIC_OR_PARTITION
    assert desk.ask(DeleteTopic(None, None, topic_id)).outcome.code is Code.UNKNOWN_TOPIC_ID
    assert desk.create("t", [(0,)]).outcome.code is Code.NONE


def test_a_topic_is_not_used_while_it_is_being_deleted_and_the_next_controller_goes_on() -> None:
    desk = Desk(hold=True)
    desk.create("t", [(0, 1)])
    desk.commit_held()
    assert desk.ask(DeleteTopic(None, "t")) is None
    desk.commit_held()  # the mark; the commit that deletes the nodes waits
    assert desk.controller.image.find(T0) is None
    assert desk.create("t", [(0,)]) is None
    desk.hold = False
    desk.begin()
    assert desk.tree.get(paths.topic("t")) is None
    assert desk.tree.get(paths.deletion("t")) is None


def test_a_topic_that_is_being_deleted_cannot_be_created() -> None:
    desk = Desk(hold=True)
    desk.create("t", [(0, 1)])
    desk.commit_held()
    desk.ask(DeleteTopic(None, "t"))
    desk.create("t", [(0,)])
    desk.ask(DeleteTopic(None, "t"))
    desk.hold = False
    desk.commit_held()
    codes = [desk.answers[tag].outcome.code for tag in sorted(desk.answers)]
    # Both deletions are answered when the topic has gone.
    assert codes == [Code.NONE, Code.NONE, Code.TOPIC_ALREADY_EXISTS, Code.NONE]


def test_a_topic_too_large_for_one_commit_comes_and_goes_in_several() -> None:
    desk = Desk()
    desk.observer = Unchecked(desk.observer.tree)
    before = desk.commits
    answer = desk.create("t", [(p % 3, (p + 1) % 3) for p in range(4000)])
    assert answer.outcome.code is Code.NONE
    assert desk.commits - before > 2
    assert all(p.state is not None for _, p in desk.controller.image.all_partitions())
    before = desk.commits
    assert desk.ask(DeleteTopic(None, "t")).outcome.code is Code.NONE
    assert desk.commits - before > 2
    assert not [p for p in desk.nodes() if "/t" in p.replace("/topics", "")]


# -- configs ---------------------------------------------------------------------------------------


def test_configs_of_topics_and_brokers() -> None:
    desk = Desk()
    desk.create("t", [(0,)], a="1", b="2")

    def config(path: str) -> dict[str, str]:
        return records.decode_config(path, desk.tree.get(path).value)

    desk.ask(AlterConfig(None, ConfigOf.TOPIC, "t", {"b": None, "c": "3"}))
    assert config(paths.topic_config("t")) == {"a": "1", "c": "3"}
    desk.ask(AlterConfig(None, ConfigOf.TOPIC, "t", {"d": "4"}, whole=True))
    assert config(paths.topic_config("t")) == {"d": "4"}
    for name in ("1", paths.ALL_BROKERS):
        desk.ask(AlterConfig(None, ConfigOf.BROKER, name, {"e": "5"}))
        assert config(paths.broker_config(name)) == {"e": "5"}
    for of in (ConfigOf.GROUP, ConfigOf.METRICS):
        for name in ("..", "a/b é%2F"):
            path = paths.other_config(of.value, name)
            desk.ask(AlterConfig(None, of, name, {"e": "5"}))
            assert config(path) == {"e": "5"}
            assert paths.other_of_config(path) == (of.value, name)
            desk.begin()  # the next controller has read it
            desk.ask(AlterConfig(None, of, name, {"f": "6"}))
            assert config(path) == {"e": "5", "f": "6"}
            desk.ask(AlterConfig(None, of, name, {"e": None, "f": None}))
            assert desk.tree.get(path) is None  # nothing is kept of it
        for name in ("", "x" * 1025):
            answer = desk.ask(AlterConfig(None, of, name, {"e": "5"}))
            assert answer.outcome.code is Code.INVALID_REQUEST
    answer = desk.ask(AlterConfig(None, ConfigOf.TOPIC, "none", {}))
    assert answer.outcome.code is Code.UNKNOWN_TOPIC_OR_PARTITION
    answer = desk.ask(AlterConfig(None, ConfigOf.BROKER, "x", {}))
    assert answer.outcome.code is Code.INVALID_REQUEST


def test_allowing_unclean_election_elects() -> None:
    for of, name in ((ConfigOf.TOPIC, "t"), (ConfigOf.BROKER, paths.ALL_BROKERS)):
        desk = Desk()
        desk.create("t", [(0, 1)])
        alter(desk, 0, 0)
        stop(desk, 0)
        assert desk.state()[:3] == (NO_LEADER, 1, (0,))
        desk.ask(AlterConfig(None, of, name, {"unclean.leader.election.enable": "true"}))
        assert desk.state()[:3] == (1, 2, (1,))


def test_lowering_min_in_sync_ends_eligibility() -> None:
    desk = Desk()
    desk.create("t", [(0, 1, 2)], min_insync_replicas="2")
    alter(desk, 0, 0)
    assert desk.state().eligible == (1, 2)
    desk.ask(AlterConfig(None, ConfigOf.TOPIC, "t", {"min.insync.replicas": "1"}))
    assert (desk.state().in_sync, desk.state().eligible) == ((0,), ())
