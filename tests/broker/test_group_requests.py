"""Requests about groups, frame by frame, and the timer that all groups share."""

from __future__ import annotations

import pytest

import kdirect
from kdirect.format import protocol as p
from kdirect.format.protocol import ErrorCode as E
from kdirect.format.schema import build

LONG = "x" * 40_000


@pytest.fixture
def broker():
    with kdirect.Broker(group_min_session_timeout_ms=100) as b:
        yield b


def join(connection, group, *, version=7, instance=None, protocol="range", session=300, client="raw"):
    message = build(p.JoinGroupRequest, group_id=group, session_timeout_ms=session, rebalance_timeout_ms=60000, member_id="",
                    group_instance_id=instance, protocol_type="consumer", protocols=[{"name": protocol, "metadata": b""}])  # fmt: skip
    connection.next_id += 1
    connection.waiting.append((message.API_KEY, version, connection.next_id))
    connection.socket.sendall(p.encode_request(message, version, connection.next_id, client))
    return connection.receive()


def stable_member(connection, group):
    """One member whose session ends in 300 ms."""
    answer = join(connection, group, version=2)
    assert answer.error_code == 0
    given = [{"member_id": answer.member_id, "assignment": b"a"}]
    sync = build(p.SyncGroupRequest, group_id=group, generation_id=answer.generation_id, member_id=answer.member_id, assignments=given)
    assert connection.call(sync, 1).error_code == 0


def test_names_that_are_too_long_are_refused_and_other_groups_go_on(broker, raw, until):
    """Newer versions carry names that the records of __consumer_offsets cannot."""
    connection = raw()
    stable_member(connection, "before")
    assert join(connection, LONG).error_code == E.INVALID_GROUP_ID
    assert join(connection, "g", instance=LONG).error_code == E.INVALID_REQUEST
    assert join(connection, "g", protocol=LONG).error_code == E.INVALID_REQUEST
    assert join(connection, "g", client="c" * 32760).error_code == E.INVALID_REQUEST
    part = {"partition_index": 0, "committed_offset": 1, "committed_metadata": None, "committed_leader_epoch": -1}
    commit = build(p.OffsetCommitRequest, group_id=LONG, generation_id_or_member_epoch=-1, member_id="",
                   topics=[{"name": "t", "partitions": [part]}])  # fmt: skip
    connection.call(build(p.MetadataRequest, topics=[{"name": "t"}], allow_auto_topic_creation=True), 8)
    assert connection.call(commit, 8).topics[0].partitions[0].error_code == E.INVALID_GROUP_ID
    stable_member(connection, "after")
    groups = broker.server.groups.coordinator.groups
    assert set(groups) == {"before", "after"}
    until(lambda: not any(g.members for g in groups.values()), what="the end of the sessions")


def test_a_group_that_cannot_be_saved_does_not_stop_the_timer_of_all(broker, raw, until, monkeypatch, caplog):
    connection = raw()
    for group in ("bad", "good"):
        stable_member(connection, group)
    save = broker.server.offsets.save_group

    def failing(group, record):
        if group == "bad":
            raise RuntimeError("cannot be saved")
        save(group, record)

    monkeypatch.setattr(broker.server.offsets, "save_group", failing)
    groups = broker.server.groups.coordinator.groups
    for _ in range(2):
        until(lambda: not any(g.members for g in groups.values()), what="the end of the sessions")
        assert "saving of group bad failed" in caplog.text
        stable_member(connection, "good")
    until(lambda: not groups["good"].members, what="the end of the session")
