"""Options of a cluster have the effects that their names promise: those that other tests do not
show by the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kdirect.broker.config import BrokerConfig
from kdirect.broker.topics import OFFSETS_TOPIC
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode as E
from kdirect.format.schema import build
from kdirect.member.membership import settings_of
from kdirect.model import TopicPartition
from tests.members.company import Company, run_company, state_of
from tests.members.test_brokers_records import code, stop_following
from tests.members.wire import ask, create, metadata, partition_row, produce
from tests.support import wait_until

T0 = TopicPartition("t", 0)


@pytest.mark.parametrize(
    ("name", "value", "field", "expected"),
    [
        ("auto.leader.rebalance.enable", "false", "rebalance", False),
        ("leader.imbalance.check.interval.seconds", "7", "rebalance_interval_ms", 7000),
        ("leader.imbalance.per.broker.percentage", "33", "rebalance_percent", 33),
        ("unclean.leader.election.enable", "true", "unclean", True),
        ("min.insync.replicas", "2", "min_in_sync", 2),
    ],
)
def test_a_controller_goes_by_them(name: str, value: str, field: str, expected: Any) -> None:
    given = {"zookeeper.connect": "h:1"}
    default, changed = (
        settings_of(BrokerConfig({**given, **more})) for more in ({}, {name: value})
    )
    assert getattr(changed, field) == expected != getattr(default, field)
    assert changed == default._replace(**{field: expected})


@pytest.mark.parametrize("enabled", [True, False])
def test_controlled_shutdown_enable(zookeeper_connect: str, tmp_path: Path, enabled: bool) -> None:
    async def test(company: Company) -> None:
        await company.start(2, controlled_shutdown_enable=enabled)
        leaving, stays = company.others()[0], company.controller()
        await stays.create("t", assignment={0: (leaving.node_id, stays.node_id)}, factor=2)
        await company.until(lambda: state_of(leaving, "t") is not None)
        await leaving.membership.shut_down_in_order()
        leader = stays.node_id if enabled else leaving.node_id
        assert state_of(leaving, "t").leader == leader
        await leaving.stop()
        await company.until(lambda: state_of(stays, "t").leader == stays.node_id)

    run_company(zookeeper_connect, tmp_path, test)


def test_unclean_leader_election_enable_of_a_topic(brokers: Any) -> None:
    ours = brokers(2)
    first, second = ours
    for name, unclean in (("t", "false"), ("u", "true")):
        created = create(
            first, name, assignment={0: (1, 2)}, unclean_leader_election_enable=unclean
        )
        assert code(created) is E.NONE
        tp = TopicPartition(name, 0)
        wait_until(lambda tp=tp: code(produce(first, tp)[0]) is E.NONE, "it serves")
    second.stop()
    wait_until(lambda: list(partition_row(first, T0).isr_nodes) == [1], "it left")
    first.stop()
    second.start()
    u0 = TopicPartition("u", 0)
    wait_until(lambda: partition_row(second, u0).leader_id == 2, "it leads uncleanly")
    assert partition_row(second, T0).leader_id == -1
    first.start()
    wait_until(lambda: partition_row(second, T0).leader_id == 1, "it waited for this one")


def test_replica_lag_time_max_ms(brokers: Any) -> None:
    """With the default of 30 s it would outlast the wait."""
    ours = brokers(2, replica_lag_time_max_ms=500, rdma_replicate=False)
    assert code(create(ours[0], "t", assignment={0: (1, 2)})) is E.NONE
    wait_until(lambda: code(produce(ours[0], T0)[0]) is E.NONE, "it serves")
    assert sorted(partition_row(ours[0], T0).isr_nodes) == [1, 2]
    stop_following(ours[1])
    assert code(produce(ours[0], T0, acks=1)[0]) is E.NONE
    wait_until(lambda: list(partition_row(ours[0], T0).isr_nodes) == [1], "it lags for too long")


@pytest.mark.parametrize("factor", [1, 2])
def test_offsets_topic_replication_factor(brokers: Any, factor: int) -> None:
    properties = {"offsets.topic.num.partitions": 2}
    ours = brokers(2, **{name.replace(".", "_"): value for name, value in properties.items()})
    for broker in ours:
        broker.server.config._values["offsets.topic.replication.factor"] = factor
    request = build(p.FindCoordinatorRequest, key="g", key_type=0)

    def found() -> bool:
        return bool(ask(ours[0], request, 2).error_code == 0)

    wait_until(found, "there is a coordinator")
    rows = metadata(ours[0], [OFFSETS_TOPIC]).topics[0].partitions
    assert {len(row.replica_nodes) for row in rows} == {factor} and len(rows) == 2
    # As Kafka's tools do not let anybody change where a group's offsets are.
    grow = build(
        p.CreatePartitionsRequest,
        topics=[{"name": OFFSETS_TOPIC, "count": 5, "assignments": None}],
        timeout_ms=10_000,
        validate_only=False,
    )
    row = ask(ours[1], grow, 3).results[0]
    assert code(row) is E.INVALID_REQUEST and OFFSETS_TOPIC in row.error_message
    assert len(metadata(ours[0], [OFFSETS_TOPIC]).topics[0].partitions) == 2
