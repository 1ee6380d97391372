"""Topics that are created, grow and go: bounds, and what a failure or a crash in between leaves."""

from __future__ import annotations

import errno
import json
import logging
import os

import pytest

import kdirect
from kdirect.broker.topics import MAX_PARTITIONS
from kdirect.errors import ConfigError
from kdirect.format import protocol as p
from kdirect.format.batch import encode_single_bytes
from kdirect.format.error_codes import ErrorCode as E
from kdirect.format.schema import build


def wanted(name, partitions=1):
    return {
        "name": name,
        "num_partitions": partitions,
        "replication_factor": 1,
        "assignments": [],
        "configs": [],
    }


def create(connection, *topics, validate_only=False):
    request = build(
        p.CreateTopicsRequest,
        topics=[wanted(*t) for t in topics],
        timeout_ms=1000,
        validate_only=validate_only,
    )
    return [t.error_code for t in connection.call(request, 5).topics]


def grow(connection, *topics, validate_only=False):
    rows = [{"name": name, "count": count, "assignments": None} for name, count in topics]
    answer = connection.call(
        build(p.CreatePartitionsRequest, topics=rows, timeout_ms=1000, validate_only=validate_only),
        1,
    )
    return [r.error_code for r in answer.results]


def partitions(connection):
    return {
        t.name: len(t.partitions)
        for t in connection.call(build(p.MetadataRequest, topics=None), 8).topics
    }


# -- bounds ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("validate_only", [True, False])
@pytest.mark.parametrize("count", [MAX_PARTITIONS + 1, 2_000_000_000])
def test_a_topic_cannot_have_any_number_of_partitions(tmp_path, raw, count, validate_only):
    with kdirect.Broker(log_dirs=tmp_path) as b:
        connection = raw(b.bootstrap_servers)
        assert create(connection, ("t", 2)) == [0]
        assert grow(connection, ("t", count), validate_only=validate_only) == [E.INVALID_PARTITIONS]
        assert create(connection, ("u", count), validate_only=validate_only) == [
            E.INVALID_PARTITIONS
        ]
        with pytest.raises(ConfigError, match="at most"):
            b.server.topics.grow(b.server.topics.get("t"), count)
        assert partitions(connection) == {"t": 2}
    assert json.loads((tmp_path / "topics.json").read_text())["topics"]["t"]["partitions"] == 2


def test_a_request_cannot_make_any_number_of_partitions(broker, raw, monkeypatch):
    monkeypatch.setattr("kdirect.broker.handlers_cluster.MAX_PARTITIONS", 10)
    connection = raw()
    assert create(connection, ("a", 6), ("b", 5), ("c", 4)) == [0, E.INVALID_PARTITIONS, 0]
    assert partitions(connection) == {"a": 6, "c": 4}
    assert create(connection, ("d", 1)) == [0]
    assert grow(connection, ("c", 12)) == [E.INVALID_PARTITIONS]
    assert grow(connection, ("a", 9), ("d", 9), ("c", 10)) == [0, E.INVALID_PARTITIONS, 0]
    assert partitions(connection) == {"a": 9, "c": 10, "d": 1}


def test_a_topics_file_that_promises_too_many_partitions_is_not_believed(tmp_path, raw, caplog):
    """As a broker left it that took any number: the next start would make directories for ever."""
    with kdirect.Broker(log_dirs=tmp_path) as b:
        assert create(raw(b.bootstrap_servers), ("t", 3)) == [0]
    state = json.loads((tmp_path / "topics.json").read_text())
    state["topics"]["t"]["partitions"] = 2_000_000_000
    (tmp_path / "topics.json").write_text(json.dumps(state))
    with (
        caplog.at_level(logging.ERROR, logger="kdirect.broker"),
        kdirect.Broker(log_dirs=tmp_path) as b,
    ):
        assert partitions(raw(b.bootstrap_servers)) == {"t": 3}
    assert "topic t cannot have 2000000000 partitions" in caplog.text


# -- deletion --------------------------------------------------------------------------------------
def delete(connection, name):
    return (
        connection.call(build(p.DeleteTopicsRequest, topic_names=[name], timeout_ms=1000), 4)
        .responses[0]
        .error_code
    )


def append(connection, name="t"):
    row = {"name": name, "partition_data": [{"index": 0, "records": encode_single_bytes(b"v")}]}
    request = build(
        p.ProduceRequest, transactional_id=None, acks=-1, timeout_ms=1000, topic_data=[row]
    )
    return connection.call(request, 8).responses[0].partition_responses[0].error_code


def commit(connection, name, offset, group="g"):
    part = {
        "partition_index": 0,
        "committed_offset": offset,
        "committed_metadata": None,
        "committed_leader_epoch": -1,
    }
    request = build(p.OffsetCommitRequest, group_id=group, generation_id_or_member_epoch=-1,
                    member_id="",
                    topics=[{"name": name, "partitions": [part]}])  # fmt: skip
    return connection.call(request, 6).topics[0].partitions[0].error_code


def committed(connection, name, group="g"):
    topics = [{"name": name, "partition_indexes": [0]}]
    return (
        connection.call(build(p.OffsetFetchRequest, group_id=group, topics=topics), 5)
        .topics[0]
        .partitions[0]
        .committed_offset
    )


def test_a_deletion_that_cannot_be_noted_leaves_the_topic(broker, raw):
    connection = raw()
    assert create(connection, ("t",)) == [0]
    in_the_way = broker.log_dirs[0] / "topics.json.tmp"
    in_the_way.mkdir()
    assert delete(connection, "t") == E.KAFKA_STORAGE_ERROR
    assert append(connection) == 0 and partitions(connection) == {"t": 1}
    in_the_way.rmdir()
    assert delete(connection, "t") == 0 and partitions(connection) == {}
    assert create(connection, ("t",)) == [0] and append(connection) == 0


def test_a_creation_that_cannot_be_noted_leaves_nothing(broker, raw):
    connection = raw()
    in_the_way = broker.log_dirs[0] / "topics.json.tmp"
    in_the_way.mkdir()
    assert create(connection, ("t",)) == [E.KAFKA_STORAGE_ERROR]
    assert partitions(connection) == {}
    in_the_way.rmdir()
    assert create(connection, ("t",)) == [0] and append(connection) == 0


def test_a_deletion_that_fails_in_the_middle_can_be_tried_again(tmp_path, raw, monkeypatch):
    rename = os.rename

    def failing(source, target):
        if str(source).endswith("t-1"):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    with kdirect.Broker(log_dirs=tmp_path, log_segment_delete_delay_ms=0) as b:
        connection = raw(b.bootstrap_servers)
        assert create(connection, ("t", 3)) == [0]
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", failing)
            assert delete(connection, "t") == E.KAFKA_STORAGE_ERROR
        assert append(connection) == E.UNKNOWN_TOPIC_OR_PARTITION
        assert delete(connection, "t") == 0
        assert not list(tmp_path.glob("t-*"))
        assert create(connection, ("t",)) == [0] and append(connection) == 0
    with kdirect.Broker(log_dirs=tmp_path) as b:
        assert partitions(raw(b.bootstrap_servers)) == {"t": 1}


def test_a_topic_that_is_created_again_is_not_read_from_an_old_offset(tmp_path, raw):
    """Though a crash came between its mark in the topics file and the deletion of what groups
    committed in it."""
    with kdirect.Broker(log_dirs=tmp_path) as b:
        connection = raw(b.bootstrap_servers)
        assert create(connection, ("t",), ("u",)) == [0, 0]
        assert commit(connection, "t", 777) == commit(connection, "u", 5) == 0
    state = json.loads((tmp_path / "topics.json").read_text())
    state["topics"]["t"]["deleting"] = True
    (tmp_path / "topics.json").write_text(json.dumps(state))
    for _ in range(2):
        with kdirect.Broker(log_dirs=tmp_path) as b:
            connection = raw(b.bootstrap_servers)
            create(connection, ("t",))
            assert committed(connection, "t") == -1
            assert committed(connection, "u") == 5


def test_offsets_of_a_deleted_topic_are_forgotten_though_that_cannot_be_noted(broker, raw, caplog):
    connection = raw()
    assert create(connection, ("t",)) == [0] and commit(connection, "t", 777) == 0
    broker.server.offsets.partition_of("g").close(clean=False)
    assert delete(connection, "t") == 0
    assert create(connection, ("t",)) == [0] and committed(connection, "t") == -1
    assert "offsets of group g in deleted topics stay on disk" in caplog.text
