"""Requests about groups, frame by frame, and the timer that all groups share."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

import kdirect
from kdirect.errors import StorageFullError
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode as E
from kdirect.format.schema import build

LONG = "x" * 40_000


@pytest.fixture
def broker():
    with kdirect.Broker(group_min_session_timeout_ms=100) as b:
        yield b


def join(
    connection, group, *, version=7, instance=None, protocol="range", session=300, client="raw"
):
    message = build(p.JoinGroupRequest, group_id=group, session_timeout_ms=session,
                    rebalance_timeout_ms=60000, member_id="",
                    group_instance_id=instance, protocol_type="consumer",
                    protocols=[{"name": protocol, "metadata": b""}])  # fmt: skip
    connection.next_id += 1
    connection.waiting.append((message.API_KEY, version, connection.next_id))
    connection.socket.sendall(p.encode_request(message, version, connection.next_id, client))
    return connection.receive()


def stable_member(connection, group):
    """One member whose session ends in 300 ms."""
    answer = join(connection, group, version=2)
    assert answer.error_code == 0
    given = [{"member_id": answer.member_id, "assignment": b"a"}]
    sync = build(
        p.SyncGroupRequest,
        group_id=group,
        generation_id=answer.generation_id,
        member_id=answer.member_id,
        assignments=given,
    )
    assert connection.call(sync, 1).error_code == 0


def test_names_that_are_too_long_are_refused_and_other_groups_go_on(broker, raw, until):
    """Newer versions carry names that the records of __consumer_offsets cannot."""
    connection = raw()
    stable_member(connection, "before")
    assert join(connection, LONG).error_code == E.INVALID_GROUP_ID
    assert join(connection, "g", instance=LONG).error_code == E.INVALID_REQUEST
    assert join(connection, "g", protocol=LONG).error_code == E.INVALID_REQUEST
    assert join(connection, "g", client="c" * 32760).error_code == E.INVALID_REQUEST
    part = {
        "partition_index": 0,
        "committed_offset": 1,
        "committed_metadata": None,
        "committed_leader_epoch": -1,
    }
    commit = build(p.OffsetCommitRequest, group_id=LONG, generation_id_or_member_epoch=-1,
                   member_id="",
                   topics=[{"name": "t", "partitions": [part]}])  # fmt: skip
    connection.call(
        build(p.MetadataRequest, topics=[{"name": "t"}], allow_auto_topic_creation=True), 8
    )
    assert connection.call(commit, 8).topics[0].partitions[0].error_code == E.INVALID_GROUP_ID
    named = build(p.InitProducerIdRequest, transactional_id=LONG, transaction_timeout_ms=1000)
    assert connection.call(named, 4).error_code == E.INVALID_REQUEST
    stable_member(connection, "after")
    groups = broker.server.groups.coordinator.groups
    assert set(groups) == {"before", "after"}
    until(lambda: not any(g.members for g in groups.values()), what="the end of the sessions")


def test_a_group_that_cannot_be_saved_does_not_stop_the_timer_of_all(
    broker, raw, until, monkeypatch, caplog
):
    connection = raw()
    for group in ("bad", "good"):
        stable_member(connection, group)
    save = broker.server.offsets.save_group

    def failing(group, record):
        if group == "bad":
            raise RuntimeError("cannot be saved")
        return save(group, record)

    monkeypatch.setattr(broker.server.offsets, "save_group", failing)
    groups = broker.server.groups.coordinator.groups
    for _ in range(2):
        until(lambda: not any(g.members for g in groups.values()), what="the end of the sessions")
        assert "saving of group bad failed" in caplog.text
        stable_member(connection, "good")
    until(lambda: not groups["good"].members, what="the end of the session")


def test_a_group_whose_records_stay_can_be_deleted_once_more(broker, raw, monkeypatch):
    """One of KIP-848 that has no offsets; it was forgotten, and came back with the next start."""
    connection = raw()

    def heartbeat(member, epoch):
        message = build(
            p.ConsumerGroupHeartbeatRequest,
            group_id="g",
            member_id=member,
            member_epoch=epoch,
            rebalance_timeout_ms=1000,
            subscribed_topic_names=["t"],
            topic_partitions=[],
        )
        return connection.call(message, 1)

    def delete():
        (row,) = connection.call(build(p.DeleteGroupsRequest, groups_names=["g"]), 2).results
        return row.error_code

    assert heartbeat("m", 0).error_code == 0
    assert heartbeat("m", -1).error_code == 0

    async def failing(group):
        raise StorageFullError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(broker.server.offsets, "forget_group", failing)
        assert delete() == E.KAFKA_STORAGE_ERROR
    assert delete() == 0
    assert delete() == E.GROUP_ID_NOT_FOUND


def test_a_group_is_empty_as_soon_as_its_last_session_has_ended(broker, raw, until):
    """The last member is a real client that is killed.  A request that comes before the timer of
    its session has had its turn finds the group as it is: without members."""
    session = kdirect.connect(broker.bootstrap_servers)
    session.admin.create_topic("t", 1)
    session.close()
    code = """
import sys, kdirect
consumer = kdirect.Consumer({"bootstrap.servers": sys.argv[1], "group.id": "g", "transport": "tcp",
                             "session.timeout.ms": 1500, "heartbeat.interval.ms": 200})
consumer.subscribe(["t"])
while not consumer.assignment():
    consumer.poll(0.1)
print("joined", flush=True)
while True:
    consumer.poll(0.1)
"""
    client = subprocess.Popen(
        [sys.executable, "-c", code, broker.bootstrap_servers], stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None and client.stdout.readline() == "joined\n"
    client.kill()
    client.wait(10)
    client.stdout.close()
    group = broker.server.groups.coordinator.groups["g"]
    connection = raw()
    connection.call(build(p.ListGroupsRequest), 0)  # it is accepted, and waited on
    (member,) = group.members.values()
    loop, over = broker.server._loop, threading.Event()

    def hold_the_loop() -> None:
        """Until the request is in the socket's buffer and the session is over."""
        over.wait(10)

    loop.call_soon_threadsafe(hold_the_loop)
    connection.send(build(p.DescribeGroupsRequest, groups=["g"]), 0)
    connection.send(build(p.DeleteGroupsRequest, groups_names=["g"]), 1)
    time.sleep(max(0.0, member.deadline / 1000 - time.monotonic()) + 0.05)
    over.set()
    described = connection.receive().groups[0]
    assert (described.group_state, described.members) == ("Empty", [])
    assert connection.receive().results[0].error_code == 0
    assert "g" not in broker.server.groups.coordinator.groups


def test_a_group_is_empty_once_its_last_member_has_left_though_an_id_was_given_out(broker, raw):
    """Whoever was given an id and has not come back with it is no member: nobody waits for it."""
    connection, other = raw(), raw()
    first = join(connection, "g", version=2, session=30_000)
    assert join(other, "g", version=7, session=30_000).error_code == E.MEMBER_ID_REQUIRED
    leave = build(p.LeaveGroupRequest, group_id="g", member_id=first.member_id)
    connection.send(leave, 1)
    connection.send(build(p.DeleteGroupsRequest, groups_names=["g"]), 1)
    assert connection.receive().error_code == 0
    assert connection.receive().results[0].error_code == 0
