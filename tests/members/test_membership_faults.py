"""What stands in a member's way: a store that goes away, sessions that expire, ids in use, other
clusters' directories, nodes that somebody has edited.
"""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient

from kdirect.cluster import paths, records
from kdirect.cluster.requests import CreateTopic
from kdirect.errors import (
    BrokerUnavailableError,
    ConfigError,
    CorruptMetadataError,
    LogError,
    TimedOutError,
)
from kdirect.log import checkpoint
from kdirect.member import identity, membership, registration
from kdirect.member.loop_store import LoopStore
from kdirect.store.contract import Delete
from kdirect.store.zookeeper import ZookeeperStore
from kdirect.store.zookeeper_server import ZookeeperServer, free_port
from tests.members.company import SESSION_MS, Company, run_company, state_of
from tests.support import stop_process


@pytest.fixture
def run(zookeeper_connect: str, tmp_path: Path) -> Any:
    return partial(run_company, zookeeper_connect, tmp_path)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[ZookeeperServer]:
    with ZookeeperServer(tmp_path / "zookeeper", tick_ms=200) as server:
        yield server


# -- the store goes away ---------------------------------------------------------------------------


def test_a_killed_store_comes_back(own_server: ZookeeperServer, tmp_path: Path) -> None:
    async def test(company: Company) -> None:
        members = await company.start(3)
        await members[0].create("before", partitions=3)
        await company.until(lambda: all(state_of(m, "before", 2) for m in members))
        incarnations = [m.metadata.incarnation for m in members]
        await asyncio.to_thread(own_server.kill)
        asked = asyncio.ensure_future(members[0].create("while-away"))
        with pytest.raises(TimedOutError, match="ZooKeeper"):
            await members[1].ask(_create("never"), timeout_s=0.3)
        for m in members:  # all goes on as it was
            assert state_of(m, "before").leader in (1, 2, 3)
            assert len(m.metadata.brokers) == 3
        await asyncio.to_thread(own_server.start)
        await asked
        for m in members:
            await m.create(f"after-{m.node_id}")
        await company.until(lambda: all(len(m.metadata.image.topics) in (5, 6) for m in members))
        assert [m.metadata.incarnation for m in members] == incarnations
        # The generation says what was missed: nothing had to be read whole again.
        assert {m.session.picture.times_read_whole for m in members} == {1}

    run_company(own_server.connect, tmp_path, test)


def test_a_store_that_stops_for_longer_than_a_session(
    own_server: ZookeeperServer, tmp_path: Path
) -> None:
    """Whether the sessions are over when it goes on is its own affair; all find together."""

    async def test(company: Company) -> None:
        members = await company.start(3)
        await members[0].create("t", partitions=3)
        stop_process(own_server.pid)
        try:
            with pytest.raises(TimedOutError):
                await members[0].ask(_create("lost"), timeout_s=5)
        finally:
            os.kill(own_server.pid, signal.SIGCONT)
        for m in members:
            await m.create(f"after-{m.node_id}", factor=1)
        await company.until(
            lambda: (
                company.agree(*members)
                and all(
                    len(m.metadata.brokers) == 3
                    and len([n for n in m.metadata.image.topics if n.startswith("after")]) == 3
                    and state_of(m, "t").leader in m.metadata.brokers
                    for m in members
                )
            )
        )

    run_company(own_server.connect, tmp_path, test)


def test_a_store_that_is_not_there(tmp_path: Path) -> None:
    async def test(company: Company) -> None:
        member = company.member(1, zookeeper_connection_timeout_ms=300)
        with pytest.raises(BrokerUnavailableError, match="does not answer within 300 ms"):
            await member.start()

    run_company(f"127.0.0.1:{free_port('127.0.0.1')}", tmp_path, test)


def test_a_chroot_that_is_not_there(zookeeper: ZookeeperServer, tmp_path: Path) -> None:
    async def test(company: Company) -> None:
        with pytest.raises(ConfigError, match="has no node /nowhere"):
            await company.member(1).start()

    run_company(zookeeper.connect + "/nowhere", tmp_path, test)


def test_a_store_that_refuses_the_next_session(
    zookeeper_connect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker tries again, now and then, and is back when somebody has mended it."""
    monkeypatch.setattr(membership, "TICK_S", 0.1)
    opened: list[str] = []

    def open_store() -> ZookeeperStore:
        opened.append(zookeeper_connect + ("/gone" if 1 <= len(opened) <= 2 else ""))
        return ZookeeperStore(opened[-1], session_timeout_ms=SESSION_MS)

    async def test(company: Company) -> None:
        member = await company.member(1, open_store=open_store).start()
        before = member.metadata.incarnation
        await member.lose_session()
        await company.until(lambda: member.metadata.incarnation > before)
        assert len(opened) == 4
        assert any("has no node" in told for told in member.membership.reports.told)
        await member.create("after", factor=1)

    run_company(zookeeper_connect, tmp_path, test)


def test_a_broker_stops_soon_while_the_store_is_away(
    own_server: ZookeeperServer, tmp_path: Path
) -> None:
    async def test(company: Company) -> None:
        members = await company.start(2)
        await members[0].create("t", factor=2)
        await asyncio.to_thread(own_server.kill)
        with pytest.raises(TimedOutError):  # by then the session is known to be suspended
            await members[0].ask(_create("never"), timeout_s=0.3)
        await asyncio.wait_for(members[0].membership.shut_down_in_order(), 1)
        await asyncio.wait_for(members[0].stop(), 10)

    run_company(own_server.connect, tmp_path, test)


def test_every_session_expires(run: Any) -> None:
    async def test(company: Company) -> None:
        members = await company.start(3)
        await members[0].create("t", partitions=3)
        before = [m.metadata.incarnation for m in members]
        await asyncio.gather(*(m.lose_session() for m in members))
        await company.until(
            lambda: (
                company.agree(*members)
                and all(m.metadata.incarnation > b for m, b in zip(members, before, strict=True))
            )
        )
        # No process has ended, so nothing was lost, and each may lead again.
        await company.until(
            lambda: all(state_of(m, "t", i).leader > 0 for m in members for i in range(3))
        )
        for m in members:
            there = m.metadata.brokers[m.node_id]
            assert there.intact_since == before[m.node_id - 1] < there.incarnation
        await members[0].create("after")

    run(test)


# -- ids -------------------------------------------------------------------------------------------


def test_an_id_in_use(run: Any) -> None:
    async def test(company: Company) -> None:
        members = await company.start(2)
        impostor = company.member(1, directory=company.directory / "elsewhere")
        port = members[0].endpoints[0].port
        with pytest.raises(ConfigError, match=f"id 1 is in use: a broker at 127.0.0.1:{port} "):
            await impostor.start()
        assert members[1].metadata.endpoint(1, "PLAINTEXT") == ("127.0.0.1", port)

    run(test)


def test_a_copied_directory_does_not_take_the_id_of_a_broker_that_lives(run: Any) -> None:
    async def test(company: Company) -> None:
        (member,) = await company.start(1)
        with pytest.raises(ConfigError, match="is in use"):
            await company.member(1, directory=member.directory).start()
        await member.create("t", factor=1)

    run(test)


def test_a_killed_broker_comes_back_inside_its_old_session(run: Any) -> None:
    async def test(company: Company) -> None:
        members = await company.start(3)
        await members[0].create("t", partitions=3)
        victim = company.others()[0]
        old, since = victim.metadata.incarnation, victim.metadata.brokers[victim.node_id]
        store = victim.fall_silent()
        try:
            back = await asyncio.wait_for(company.member(victim.node_id).start(), 3)
            assert back.metadata.incarnation > old
            assert back.metadata.brokers[back.node_id].intact_since == since.intact_since
        finally:
            await asyncio.to_thread(store.close)

    run(test)


@pytest.mark.parametrize("when", ["before it is looked at again", "before it is deleted"])
def test_a_node_that_another_broker_has_made_meanwhile_stays(
    run: Any, nodes: KazooClient, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Between the look at the node of the process before and its deletion."""

    async def test(company: Company) -> None:
        await company.start(2)
        victim = company.others()[0]
        store = victim.fall_silent()
        live = company.controller()
        dial, commit = registration._dial, LoopStore.commit_later
        path = paths.broker(victim.node_id)
        node = (await asyncio.to_thread(nodes.get, paths.broker(live.node_id)))[0]

        def another() -> None:
            transaction = nodes.transaction()
            transaction.delete(path)
            transaction.create(path, node, ephemeral=True)
            transaction.set_data(paths.BROKER_IDS, b"")
            assert not [x for x in transaction.commit() if isinstance(x, Exception)]

        async def dialled(host: str, port: int) -> OSError | None:
            found = await dial(host, port)
            if when == "before it is looked at again" and found is not None:
                await asyncio.to_thread(another)
            return found

        async def committed(self: LoopStore, *operations: Any) -> Any:
            if when == "before it is deleted" and any(
                isinstance(operation, Delete) and operation.path == path for operation in operations
            ):
                await asyncio.to_thread(another)
            return await commit(self, *operations)

        monkeypatch.setattr(registration, "_dial", dialled)
        monkeypatch.setattr(LoopStore, "commit_later", committed)
        try:
            with pytest.raises(ConfigError, match=rf"id {victim.node_id} is in use.*and answers"):
                await company.member(victim.node_id).start()
        finally:
            await asyncio.to_thread(store.close)
        assert await asyncio.to_thread(nodes.exists, path)

    run(test)


def test_the_node_of_a_silent_session_is_waited_for(run: Any, nodes: KazooClient) -> None:
    async def test(company: Company) -> None:
        (first,) = await company.start(1)
        value = records.encode_broker(
            records.BrokerRegistration(
                (records.Endpoint("PLAINTEXT", "127.0.0.1", free_port("127.0.0.1")),),
                {"PLAINTEXT": "PLAINTEXT"},
            )
        )
        path = paths.broker(2)
        await asyncio.to_thread(nodes.create, path, value, ephemeral=True)
        starting = asyncio.ensure_future(company.member(2).start())
        await company.until(lambda: 2 in first.metadata.brokers)
        await first.create("t", factor=1)
        assert not starting.done()
        await asyncio.to_thread(nodes.delete, path)
        await starting

    run(test)


def test_the_node_of_a_silent_session_that_does_not_end(run: Any, nodes: KazooClient) -> None:
    async def test(company: Company) -> None:
        nodes.ensure_path("/brokers/ids")
        nodes.create(paths.broker(1), b"what?", ephemeral=True)
        with pytest.raises(ConfigError, match=r"id 1 is in use.*has not ended in 0.4 s"):
            await company.member(
                1, zookeeper_session_timeout_ms=200, zookeeper_connection_timeout_ms=20_000
            ).start()

    run(test)


def test_another_clusters_directory(run: Any) -> None:
    async def test(company: Company) -> None:
        (member,) = await company.start(1)
        stranger = company.member(2)
        properties = {"version": "1", "cluster.id": "other", "node.id": "2"}
        checkpoint.write_properties(stranger.directory / checkpoint.META_PROPERTIES, properties)
        with pytest.raises(LogError, match=r"belongs to cluster other, and zookeeper\.connect"):
            await stranger.start()
        # The first broker of a cluster brings its id along.
        assert member.metadata.brokers.keys() == {1}

    run(test)


def test_the_first_broker_brings_its_clusters_id(run: Any, nodes: KazooClient) -> None:
    async def test(company: Company) -> None:
        first = company.member(1)
        properties = {"version": "1", "cluster.id": "mine", "node.id": "1"}
        checkpoint.write_properties(first.directory / checkpoint.META_PROPERTIES, properties)
        await first.start()
        assert nodes.get(paths.CLUSTER_ID)[0] == records.encode_cluster_id("mine")
        (second,) = await company.start(1)
        assert second.metadata.cluster_id == "mine"

    run(test)


def _wipe(nodes: KazooClient) -> None:
    """Of the test's chroot, all that there is."""
    for name in nodes.get_children("/"):
        nodes.delete(f"/{name}", recursive=True)


def test_an_emptied_store_is_no_new_cluster(run: Any, nodes: KazooClient) -> None:
    """A broker of the old cluster would found a new one, and its topics would be unknown there."""

    async def test(company: Company) -> None:
        (first,) = await company.start(1)
        cluster_id = first.metadata.cluster_id
        properties = {"version": "1", "cluster.id": cluster_id, "node.id": "1"}
        checkpoint.write_properties(first.directory / checkpoint.META_PROPERTIES, properties)
        await first.stop()
        await asyncio.to_thread(_wipe, nodes)
        with pytest.raises(ConfigError, match=r"knows no cluster.*was emptied.*restore what"):
            await company.member(1).start()
        assert nodes.get_children("/") == []  # nothing was written
        # The same of a directory whose records alone are left.
        (first.directory / identity.FILE).unlink()
        (first.directory / "t-0").mkdir()
        with pytest.raises(ConfigError, match="knows no cluster"):
            await company.member(1).start()
        # The remedy that the error tells.
        nodes.ensure_path("/cluster")
        nodes.create(paths.CLUSTER_ID, records.encode_cluster_id(cluster_id))
        back = await company.member(1).start()
        assert back.metadata.cluster_id == cluster_id

    run(test)


@pytest.mark.parametrize(
    "boot, clean, intact", [("same", False, True), ("other", False, False), ("other", True, True)]
)
def test_what_a_broker_has_lost(
    run: Any, monkeypatch: pytest.MonkeyPatch, boot: str, clean: bool, intact: bool
) -> None:
    """A machine that went down may have lost what was not synced; a clean shutdown synced it."""

    async def test(company: Company) -> None:
        (member,) = await company.start(1)
        first = member.metadata.incarnation
        assert member.metadata.brokers[1].intact_since == first
        await member.stop()
        if boot == "other":
            changed = company.directory / "boot_id"
            changed.write_text("another boot\n")
            monkeypatch.setattr(identity, "BOOT_ID", changed)
        if clean:
            (member.directory / checkpoint.CLEAN_SHUTDOWN).touch()
        back = await company.member(1).start()
        there = back.metadata.brokers[1]
        assert there.intact_since == (first if intact else there.incarnation)
        await back.stop()
        (member.directory / checkpoint.CLEAN_SHUTDOWN).unlink(missing_ok=True)
        again = await company.member(1).start()
        assert again.metadata.brokers[1].intact_since == there.intact_since

    run(test)


# -- nodes that somebody has edited ----------------------------------------------------------------


def test_nodes_that_somebody_deletes(run: Any, nodes: KazooClient) -> None:
    async def test(company: Company) -> None:
        members = await company.start(3)
        await members[0].create("t")
        for path in (paths.CONTROLLER, paths.CHANGES, paths.broker(1), paths.broker(3)):
            await asyncio.to_thread(nodes.delete, path)
            await members[2].create(f"after{path.replace('/', '-')}", factor=1)
        await company.until(
            lambda: (
                company.agree(*members)
                and all(len(m.metadata.image.topics) == 5 for m in members)
                and all(m.metadata.brokers.keys() == {1, 2, 3} for m in members)
            )
        )

    run(test)


def test_nodes_that_somebody_damages(run: Any, nodes: KazooClient) -> None:
    """Each is told with its remedy, and all else goes on."""

    async def test(company: Company) -> None:
        members = await company.start(3)
        for name in ("a", "b", "c"):
            await members[0].create(name)
        nodes.set(paths.topic("a"), b"{")
        nodes.set("/brokers/topics/b/partitions/0/state", b"[]")
        nodes.set(paths.topic_config("c"), b"nothing")
        nodes.create(paths.BROKER_IDS + "/xyz", b"")
        nodes.create(paths.broker(77), b"{}", ephemeral=True)
        old = company.controller()
        await old.stop()
        others = [m for m in members if m is not old]
        late = await company.member(9).start()
        for m in (*others, late):
            await m.create(f"by-{m.node_id}")
        controller = company.members[late.metadata.controller_id]
        for m in (controller, late):
            told = "\n".join(m.membership.reports.told)
            for path in ("/topics/a", "b/partitions/0/state", "/ids/xyz", "/ids/77"):
                assert path in told, told
            assert "; restore the node from a backup" in told
        assert late.metadata.brokers.keys() == {9, *(m.node_id for m in others)}
        assert late.metadata.topic("a") is None
        # Mended: the controller and all others take it again.
        nodes.set(
            paths.topic("a"),
            records.encode_topic(records.TopicAssignment(None, ((1, 2, 3),))),
        )
        await company.until(lambda: late.metadata.topic("a") is not None)

    run(test)


def test_changes_that_somebody_damages(run: Any, nodes: KazooClient) -> None:
    async def test(company: Company) -> None:
        members = await company.start(3)
        await members[0].create("t")
        spoiled = (
            b"",
            b'{"version":1,"generation":9000000000000,"changes":[]}',
            b'{"version":1,"generation":9000000000001,"changes":[[9000000000001,["/a//b","x"]]]}',
        )
        for number, value in enumerate(spoiled):
            nodes.set(paths.CHANGES, value)
            await members[number].create(f"after-{number}", factor=1)
        await company.until(lambda: all(len(m.metadata.image.topics) == 4 for m in members))

    run(test)


def test_an_epoch_that_somebody_damages(run: Any, nodes: KazooClient) -> None:
    """Nobody is controller until it is mended."""

    async def test(company: Company) -> None:
        members = await company.start(3)
        await members[0].create("t")
        nodes.set(paths.CONTROLLER_EPOCH, b"many")
        await company.until(lambda: all(m.metadata.controller_id == -1 for m in members))
        with pytest.raises(TimedOutError, match="no broker is known to be controller"):
            await members[0].ask(_create("never"), timeout_s=0.3)
        assert any(paths.CONTROLLER_EPOCH in told for told in members[0].membership.reports.told)
        nodes.set(paths.CONTROLLER_EPOCH, b"1000")
        await members[0].create("after")
        assert nodes.get(paths.CONTROLLER_EPOCH)[0] == b"1001"

    run(test)


def test_a_damaged_cluster_id(run: Any, nodes: KazooClient) -> None:
    async def test(company: Company) -> None:
        nodes.create("/cluster")
        nodes.create(paths.CLUSTER_ID, b"{}")
        with pytest.raises(CorruptMetadataError, match=r"no field id; write the id of"):
            await company.member(1).start()

    run(test)


def test_a_damaged_block_of_producer_ids(run: Any, nodes: KazooClient) -> None:
    async def test(company: Company) -> None:
        (member,) = await company.start(1)
        nodes.create(paths.PRODUCER_ID_BLOCK, b"7")
        with pytest.raises(CorruptMetadataError, match="above every producer id"):
            await member.membership.producer_id_block()

    run(test)


def _create(name: str) -> Any:
    return CreateTopic(None, name, uuid.uuid4())
