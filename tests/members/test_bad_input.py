"""What others of a cluster do wrong: one clear error, and the others go on.  Ids in use, other
clusters' directories and edited nodes are in `test_membership_faults`; factors and assignments that
cannot be in `test_brokers`."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.security import ACL, make_acl

import kdirect
from kdirect.cluster import paths
from kdirect.cluster.codes import Code
from kdirect.cluster.requests import AlterConfig, ConfigOf
from kdirect.errors import ConfigError
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode as E
from kdirect.format.schema import build
from kdirect.model import TopicPartition
from kdirect.store.zookeeper_server import ZookeeperServer
from tests.members.company import Company, run_company
from tests.members.conftest import TEST_PROPERTIES, wait_for_members
from tests.members.test_brokers_records import code
from tests.members.test_membership_faults import _create
from tests.members.wire import ask, create, list_offset, partition_row, produce
from tests.support import wait_until

T0 = TopicPartition("t", 0)


@pytest.fixture
def run(zookeeper_connect: str, tmp_path: Path) -> Any:
    return partial(run_company, zookeeper_connect, tmp_path)


def may(**permissions: bool) -> list[ACL]:
    """What anybody may do with a node; the test itself may change that again."""
    return [make_acl("world", "anyone", admin=True, **permissions)]


def test_a_store_that_may_only_be_read(run: Any, nodes: KazooClient) -> None:
    async def test(company: Company) -> None:
        nodes.set_acls("/", may(read=True))
        with pytest.raises(ConfigError, match="does not let this broker create /cluster"):
            await company.member(1).start()
        nodes.set_acls("/", may(all=True))
        await company.member(1).start()

    run(test)


def test_a_store_that_does_not_take_new_topics(run: Any, nodes: KazooClient) -> None:
    """Whoever asks is told, and all else goes on."""

    async def test(company: Company) -> None:
        members = await company.start(2)
        await members[0].create("t", factor=2)
        await asyncio.to_thread(nodes.set_acls, paths.TOPICS, may(read=True, write=True))
        answer = await members[1].ask(_create("refused"))
        assert answer.outcome.code is Code.UNKNOWN_SERVER_ERROR
        assert f"does not take {paths.topic('refused')}" in answer.outcome.message
        answer = await members[1].ask(AlterConfig(None, ConfigOf.TOPIC, "t", {"a": "b"}))
        assert answer.outcome.code is Code.NONE
        assert members[1].metadata.topic("refused") is None
        await asyncio.to_thread(nodes.set_acls, paths.TOPICS, may(all=True))
        await members[1].create("taken", factor=1)

    run(test)


def test_a_store_that_takes_no_controller(run: Any, nodes: KazooClient) -> None:
    async def test(company: Company) -> None:
        members = await company.start(2)
        await asyncio.to_thread(nodes.set_acls, paths.CONTROLLER_EPOCH, may(read=True))
        (left,) = company.others()  # asked before: the one that is left may see its end at once
        await company.controller().stop()
        await company.until(lambda: left.metadata.controller_id == -1)
        told = left.membership.reports.told
        while not any("takes no controller" in text for text in told):
            left.session.host.noticed()
            await asyncio.sleep(0.01)
        await asyncio.to_thread(nodes.set_acls, paths.CONTROLLER_EPOCH, may(all=True))
        left.session.host.noticed()
        await left.create("after", factor=1)
        assert members

    run(test)


def as_replica(broker_id: int, incarnation: int, session_id: int = 0) -> Any:
    partition = {
        "partition": 0,
        "leader_epoch": 0,
        "fetch_offset": 0,
        "log_start_offset": 0,
        "pushed": False,
        "full": False,
    }
    return build(
        p.FetchAsReplicaRequest,
        broker_id=broker_id,
        incarnation=incarnation,
        session_id=session_id,
        answers=0,
        max_wait_ms=0,
        max_bytes=1 << 20,
        topics=[{"topic": "t", "partitions": [partition]}],
        forgotten=[],
    )


def test_replica_requests_of_nobody_who_is_registered(brokers: Any) -> None:
    """A process that was a broker, or never was one, is no replica: it gets nothing, and what it
    says that it has does not count."""
    ours = brokers(2)
    assert code(create(ours[0], "t", assignment={0: (1, 2)})) is E.NONE
    wait_until(lambda: code(produce(ours[0], T0)[0]) is E.NONE, "it serves")
    alive = ours[1].server.member.membership.metadata.incarnation
    for broker_id, incarnation in ((7, 1), (7, alive), (2, alive - 1), (2, -1), (-1, -1), (7, -1)):
        answer = ask(ours[0], as_replica(broker_id, incarnation), 0)
        assert E(answer.error_code) is E.STALE_BROKER_EPOCH, (broker_id, incarnation)
        assert not answer.topics
    assert sorted(partition_row(ours[0], T0).isr_nodes) == [1, 2]
    assert code(produce(ours[0], T0)[0]) is E.NONE


def test_partitions_go_on_while_the_store_is_away(tmp_path: Path) -> None:
    """All replicas are in sync, so nobody has to be asked; when it is back nothing is lost."""
    request = build(p.InitProducerIdRequest, transactional_id=None, transaction_timeout_ms=1)
    with ZookeeperServer(tmp_path / "zookeeper", tick_ms=200) as server:
        ours = [
            kdirect.Broker(
                tmp_path / f"broker-{node_id}",
                properties={
                    **TEST_PROPERTIES,
                    "node.id": node_id,
                    "zookeeper.connect": server.connect,
                    "zookeeper.session.timeout.ms": 4000,
                },
            )
            for node_id in (1, 2)
        ]
        try:
            for broker in ours:
                broker.start()
            wait_for_members(ours)
            assert code(create(ours[0], "t", assignment={0: (1, 2)})) is E.NONE
            wait_until(lambda: code(produce(ours[0], T0)[0]) is E.NONE, "it serves")
            end = list_offset(ours[0], T0).offset
            ids = {ask(ours[0], request, 4).producer_id}
            server.kill()
            for number in range(10):
                row = produce(ours[0], T0)[0]
                assert (code(row), row.base_offset) == (E.NONE, end + number)
                ids.add(ask(ours[0], request, 4).producer_id)  # of the block that it has
            server.start()
            assert code(create(ours[1], "u", assignment={0: (2, 1)})) is E.NONE
            u0 = TopicPartition("u", 0)
            wait_until(lambda: code(produce(ours[1], u0)[0]) is E.NONE, "it serves, too")
            assert sorted(partition_row(ours[1], T0).isr_nodes) == [1, 2]
            assert list_offset(ours[0], T0).offset == end + 10
            ids |= {ask(broker, request, 4).producer_id for broker in ours}
            assert len(ids) == 13 and min(ids) >= 0
        finally:
            for broker in reversed(ours):
                broker.stop()
