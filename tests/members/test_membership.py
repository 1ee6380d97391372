"""Brokers join a cluster over a real ZooKeeper: registration, the controller, what all see."""

from __future__ import annotations

import asyncio
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kdirect.cluster import controller as rules
from kdirect.cluster import paths, records
from kdirect.cluster.codes import Code
from kdirect.cluster.requests import (
    AlterConfig,
    ConfigOf,
    CreateTopic,
    DeleteTopic,
    GrowTopic,
    Reassign,
    ReassignRow,
    ShutDown,
)
from kdirect.errors import BrokerUnavailableError, TimedOutError
from kdirect.member import membership
from kdirect.member.peers import Lane, Peers
from kdirect.model import TopicPartition
from kdirect.store.contract import Create
from kdirect.store.zookeeper import ZookeeperStore
from tests.members.company import SESSION_MS, WAIT_S, Company, run_company, state_of


@pytest.fixture
def run(zookeeper_connect: str, tmp_path: Path) -> Any:
    return partial(run_company, zookeeper_connect, tmp_path)


def test_brokers_find_one_another_and_elect_one_controller(run: Any, nodes: Any) -> None:
    async def test(company: Company) -> None:
        members = await company.start(3)
        assert {m.metadata.cluster_id for m in members} == {members[0].metadata.cluster_id}
        assert not any(m.membership.is_controller for m in company.others())
        await company.controller().create("t")  # once it has begun
        assert company.controller().membership.is_controller
        for m in members:
            node = await asyncio.to_thread(nodes.get, paths.broker(m.node_id))
            assert node[1].czxid == m.metadata.incarnation
            assert m.metadata.endpoint(2, "PLAINTEXT") == members[1].endpoints[0][1:]
            assert m.metadata.endpoint(2, "ELSEWHERE") is None

    run(test)


def test_an_impatient_question_ends_no_connection(run: Any) -> None:
    async def test(company: Company) -> None:
        await company.start(2)
        await company.controller().create("t", factor=1)  # once it has begun
        (other,) = company.others()
        await other.create("u", factor=1)
        lane = (company.controller().node_id, Lane.CONTROL)
        link = other.peers._links[lane]
        asked, may_answer = company.controller().hold_answers()
        with pytest.raises(TimedOutError, match="CreateTopic within"):
            await other.ask(CreateTopic(None, "v", uuid.uuid4()), timeout_s=0.2)
        assert asked.is_set()
        assert other.peers._links[lane] is link and link.error is None
        may_answer.set()
        await other.create("w", factor=1)
        assert other.peers._links[lane] is link and link.error is None

    run(test)


def test_nothing_is_remembered_of_topics_that_were_deleted(run: Any) -> None:
    async def test(company: Company) -> None:
        (member,) = await company.start(1)

        def known() -> set[str]:
            return set(member.session.picture.image.versions)

        await member.create("stays", factor=1)
        before = known()
        for number in range(3):
            await member.create(f"t{number}", factor=1, partitions=5)
            answer = await member.ask(DeleteTopic(None, f"t{number}"))
            assert answer.outcome.code is Code.NONE
        await company.until(lambda: set(member.metadata.image.topics) == {"stays"})
        assert {path for path in known() - before if "/t" in path.replace("/topics", "")} == set()

    run(test)


def test_a_start_that_has_failed_within_is_told_and_tried_again(
    run: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(company: Company) -> None:
        member = company.member(1)
        registration, failed = member.membership._registration, []

        def fail_once() -> Any:
            if not failed:
                failed.append(1)
                raise ZeroDivisionError
            return registration()

        monkeypatch.setattr(member.membership, "_registration", fail_once)
        await asyncio.wait_for(member.start(), WAIT_S)
        assert failed and "ZeroDivisionError" in caplog.text

    monkeypatch.setattr(membership, "TICK_S", 0.1)
    run(test)


def test_what_a_broker_reads_is_no_older_than_its_registration(run: Any) -> None:
    """A server that lags shows an older tree, without topics of which this broker has replicas;
    after a write of its own session it shows what was there before."""
    asked: list[Any] = []

    class Recorder(ZookeeperStore):
        def read(self, wanted: Any, done: Any, *, watch: bool = False) -> None:
            asked.extend(wanted if len(wanted) == 1 else ())
            super().read(wanted, done, watch=watch)

        def commit(self, operations: Any, done: Any) -> None:
            asked.extend(operations)
            super().commit(operations, done)

    async def test(company: Company) -> None:
        await company.start(1)
        await company.controller().create("t", factor=1)
        asked.clear()
        second = company.member(
            2, open_store=lambda: Recorder(company.connect, session_timeout_ms=SESSION_MS)
        )
        await second.start()
        assert second.metadata.topic("t") is not None
        registered = [o for o in asked if isinstance(o, Create) and o.path == paths.broker(2)]
        assert asked.index(registered[0]) < asked.index(paths.CHANGES)

    run(test)


def test_topics_are_created_and_deleted_through_any_broker(run: Any) -> None:
    async def test(company: Company) -> None:
        members = await company.start(3)
        for m in members:
            await m.create(f"by-{m.node_id}", partitions=3)
            # Whoever asked sees it with the answer.
            assert m.metadata.topic(f"by-{m.node_id}") is not None
        names = {f"by-{m.node_id}" for m in members}
        await company.until(
            lambda: all(
                set(m.metadata.image.topics) == names
                and all(state_of(m, name, i).leader > 0 for name in names for i in range(3))
                for m in members
            )
        )
        first = members[0].metadata.topic("by-1")
        assert first is not None
        for m in members:
            assert m.metadata.topic_by_id(first.record.topic_id) == ("by-1", first)
            assert {len(p.state.in_sync) for p in first.partitions} == {3}
        other = company.others()[0]
        answer = await other.ask(GrowTopic(None, "by-1", 5))
        assert answer.outcome.code is Code.NONE
        answer = await other.ask(DeleteTopic(None, "by-2"))
        assert answer.outcome.code is Code.NONE
        assert other.metadata.topic("by-2") is None
        change = AlterConfig(None, ConfigOf.TOPIC, "by-1", {"retention.ms": "5"})
        assert (await other.ask(change)).outcome.code is Code.NONE
        await company.until(
            lambda: all(
                "by-2" not in m.metadata.image.topics
                and len(m.metadata.topic("by-1").partitions) == 5
                and m.metadata.topic("by-1").config == {"retention.ms": "5"}
                for m in members
            )
        )
        assert (await other.ask(DeleteTopic(None, "by-2"))).outcome.code is (
            Code.UNKNOWN_TOPIC_OR_PARTITION
        )

    run(test)


def test_a_topic_of_the_same_name_is_another_one(run: Any) -> None:
    async def test(company: Company) -> None:
        members = await company.start(2)
        for _ in range(3):
            answer = await members[0].create("again", partitions=2, factor=2)
            made = answer.rows[0].topic_id
            await company.until(
                lambda made=made: all(
                    (t := m.metadata.topic("again"))
                    and t.record.topic_id == made
                    and state_of(m, "again", 1) is not None
                    for m in members
                )
            )
            assert (await members[1].ask(DeleteTopic(None, "again"))).outcome.code is Code.NONE

    run(test)


@pytest.mark.parametrize("how", ["stop", "lose_session"])
def test_another_broker_becomes_controller(run: Any, how: str) -> None:
    async def test(company: Company) -> None:
        members = await company.start(3)
        await members[0].create("before", partitions=6)
        old = company.controller()
        others = company.others()
        before = old.metadata.incarnation
        await getattr(old, how)()
        if how == "stop":
            await company.until(
                lambda: company.agree(*others) and len(others[0].metadata.brokers) == 2
            )
            await company.until(
                lambda: all(
                    state_of(m, "before", i).leader != old.node_id
                    and old.node_id not in state_of(m, "before", i).in_sync
                    for m in others
                    for i in range(6)
                )
            )
        else:
            await company.until(
                lambda: company.agree(*members) and old.metadata.incarnation > before
            )
            assert old.membership.sessions_expired == 1
            assert -1 in {seen.incarnation for seen in old.seen[3:]}
        await others[0].create("after", factor=2)
        assert others[0].metadata.image.topics.keys() == {"before", "after"}

    run(test)


def test_a_question_waits_for_the_next_controller(run: Any) -> None:
    async def test(company: Company) -> None:
        await company.start(3)
        old, (asker, _) = company.controller(), company.others()
        asked = [asyncio.ensure_future(asker.create(f"t{i}", factor=2)) for i in range(20)]
        await old.stop()
        await asyncio.gather(*asked)
        assert len(asker.metadata.image.topics) == 20

    run(test)


def test_a_killed_broker_is_noticed_by_its_links(run: Any) -> None:
    """Its session lives, and yet the others lead within moments."""

    async def test(company: Company) -> None:
        await company.start(3)
        watcher, (victim, other) = company.controller(), company.others()
        await watcher.create("t", partitions=3)
        store = victim.fall_silent()
        try:
            await company.until(
                lambda: all(
                    state_of(m, "t", i).leader in (watcher.node_id, other.node_id)
                    for m in (watcher, other)
                    for i in range(3)
                ),
                timeout_s=2,
            )
            assert victim.node_id in watcher.metadata.brokers
        finally:
            await asyncio.to_thread(store.close)

    run(test)


def test_a_killed_controller_is_noticed_by_its_links(run: Any, nodes: Any) -> None:
    async def test(company: Company) -> None:
        await company.start(3)
        victim, others = company.controller(), company.others()
        await others[0].create("t", partitions=3)
        store = victim.fall_silent()
        try:
            await company.until(
                lambda: all(
                    m.metadata.controller_id in (others[0].node_id, others[1].node_id)
                    and state_of(m, "t", i).leader in (others[0].node_id, others[1].node_id)
                    for m in others
                    for i in range(3)
                ),
                timeout_s=2,
            )
            # The dead one's session goes on.
            assert await asyncio.to_thread(nodes.exists, paths.broker(victim.node_id))
        finally:
            await asyncio.to_thread(store.close)
        await company.until(lambda: victim.node_id not in others[0].metadata.brokers)
        await others[1].create("after", factor=2)

    run(test)


def test_a_controller_that_fails_is_followed_by_another_one(
    run: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step, failures = rules.step, []

    def fail_once(controller: Any, event: Any) -> Any:
        if isinstance(event, DeleteTopic) and not failures:
            failures.append(event)
            raise ZeroDivisionError
        return step(controller, event)

    async def test(company: Company) -> None:
        members = await company.start(3)
        await members[0].create("t")
        monkeypatch.setattr(rules, "step", fail_once)
        answer = await members[0].ask(DeleteTopic(None, "t"))
        assert answer.outcome.code is Code.NONE
        assert failures and "the controller has failed at DeleteTopic" in caplog.text

    run(test)


def test_an_answer_that_is_lost_is_asked_for_again(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was asked for has been done by then, and that is the answer."""

    async def test(company: Company) -> None:
        members = await company.start(3)
        asker = company.others()[0]
        await asker.create("t", assignment={0: (1,), 1: (2,)}, factor=1)
        call, lost = Peers.call, []

        async def lose_one(self: Peers, *arguments: Any, **keywords: Any) -> Any:
            answer = await call(self, *arguments, **keywords)
            if self is asker.peers and not lost:
                lost.append(arguments)
                raise BrokerUnavailableError("the connection was lost")
            return answer

        async def twice(request: Any) -> Any:
            lost.clear()
            answer = await asker.ask(request)
            assert lost and answer.outcome.code is Code.NONE, answer
            return answer

        monkeypatch.setattr(Peers, "call", lose_one)
        await twice(GrowTopic(None, "t", 3))
        await twice(GrowTopic(None, "t", 5, ((2,), (3,))))
        assert [p.replicas for p in asker.metadata.topic("t").partitions[3:]] == [(2,), (3,)]
        tp = TopicPartition("t", 0)
        # Nobody fetches here, so it goes on until it is cancelled.
        moved = await twice(Reassign(None, (ReassignRow(tp, (2, 3)),)))
        assert moved.rows[0].outcome.code is Code.NONE
        cancelled = await twice(Reassign(None, (ReassignRow(tp, None),)))
        assert cancelled.rows[0].outcome.code is Code.NONE
        assert asker.metadata.partition(tp).replicas == (1,)
        # What others have done, or nobody, is no success.
        answer = await asker.ask(GrowTopic(None, "t", 5))
        assert answer.outcome.code is Code.INVALID_PARTITIONS
        lost.clear()
        answer = await asker.ask(GrowTopic(None, "t", 4))
        assert lost and answer.outcome.code is Code.INVALID_PARTITIONS
        lost.clear()
        answer = await asker.ask(Reassign(None, (ReassignRow(tp, None),)))
        assert lost and answer.rows[0].outcome.code is Code.NO_REASSIGNMENT_IN_PROGRESS
        assert members

    run(test)


def test_more_changes_than_are_kept_are_missed(run: Any) -> None:
    """A broker whose picture is far back reads everything."""

    async def test(company: Company) -> None:
        await company.start(2)
        controller, (other,) = company.controller(), company.others()
        picture = other.session.picture
        look, picture.look = picture.look, lambda: None  # its watch is missed
        whole = picture.times_read_whole
        for i in range(records.MOST_CHANGES + 5):
            await controller.create(f"t{i}", factor=1)
        assert not other.metadata.image.topics
        picture.look = look
        look()
        await company.until(lambda: len(other.metadata.image.topics) == records.MOST_CHANGES + 5)
        assert picture.times_read_whole == whole + 1
        # And from here on changes only.
        await controller.create("last", factor=1)
        await company.until(lambda: "last" in other.metadata.image.topics)
        assert picture.times_read_whole == whole + 1

    run(test)


def test_controlled_shutdown_moves_leaders_first(run: Any) -> None:
    async def test(company: Company) -> None:
        members = await company.start(3)
        await members[0].create("t", partitions=6)
        await members[0].create("alone", partitions=3, factor=1)
        for leaving in (company.others()[0], company.controller()):
            await leaving.membership.shut_down_in_order()
            assert all(state_of(leaving, "t", i).leader != leaving.node_id for i in range(6))
            # It is registered and in the picture still.
            assert leaving.metadata.is_live(leaving.node_id)

    run(test)


def test_an_older_incarnation_is_refused(run: Any) -> None:
    async def test(company: Company) -> None:
        members = await company.start(2)
        stale = ShutDown(None, 1, members[0].metadata.incarnation - 1)
        for m in members:
            assert (await m.ask(stale)).outcome.code is Code.STALE_BROKER_EPOCH

    run(test)


def test_producer_ids_are_given_once(run: Any) -> None:
    async def test(company: Company) -> None:
        members = await company.start(3)
        blocks = await asyncio.gather(
            *(m.membership.producer_id_block() for m in members for _ in range(10))
        )
        firsts = sorted(block.first for block in blocks)
        assert firsts == [1000 * i for i in range(30)]
        assert all(block.limit == block.first + 1000 for block in blocks)
        # From an id on, above which nothing was given.
        assert (await members[0].membership.producer_id_block(10**6)).first == 10**6
        assert (await members[1].membership.producer_id_block()).first == 10**6 + 1000

    run(test)


def test_a_topic_that_exists_is_told(run: Any) -> None:
    async def test(company: Company) -> None:
        members = await company.start(2)
        await members[0].create("t", factor=2)
        for m in members:
            answer = await m.ask(CreateTopic(None, "t", uuid.uuid4()))
            assert answer.outcome.code is Code.TOPIC_ALREADY_EXISTS

    run(test)
