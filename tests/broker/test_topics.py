"""Topics that are created, grow and go: bounds, and what a failure or a crash in between leaves."""

from __future__ import annotations

import json
import logging

import pytest

import kdirect
from kdirect.broker.topics import MAX_PARTITIONS
from kdirect.errors import ConfigError
from kdirect.format import protocol as p
from kdirect.format.protocol import ErrorCode as E
from kdirect.format.schema import build


def wanted(name, partitions=1):
    return {"name": name, "num_partitions": partitions, "replication_factor": 1, "assignments": [], "configs": []}


def create(connection, *topics, validate_only=False):
    request = build(p.CreateTopicsRequest, topics=[wanted(*t) for t in topics], timeout_ms=1000, validate_only=validate_only)
    return [t.error_code for t in connection.call(request, 5).topics]


def grow(connection, *topics, validate_only=False):
    rows = [{"name": name, "count": count, "assignments": None} for name, count in topics]
    answer = connection.call(build(p.CreatePartitionsRequest, topics=rows, timeout_ms=1000, validate_only=validate_only), 1)
    return [r.error_code for r in answer.results]


def partitions(connection):
    return {t.name: len(t.partitions) for t in connection.call(build(p.MetadataRequest, topics=None), 8).topics}


# -- bounds --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("validate_only", [True, False])
@pytest.mark.parametrize("count", [MAX_PARTITIONS + 1, 2_000_000_000])
def test_a_topic_cannot_have_any_number_of_partitions(tmp_path, raw, count, validate_only):
    with kdirect.Broker(log_dirs=tmp_path) as b:
        connection = raw(b.bootstrap_servers)
        assert create(connection, ("t", 2)) == [0]
        assert grow(connection, ("t", count), validate_only=validate_only) == [E.INVALID_PARTITIONS]
        assert create(connection, ("u", count), validate_only=validate_only) == [E.INVALID_PARTITIONS]
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
    assert grow(connection, ("a", 9), ("c", 12), ("d", 9), ("c", 10)) == [0, E.INVALID_PARTITIONS, E.INVALID_PARTITIONS, 0]
    assert partitions(connection) == {"a": 9, "c": 10, "d": 1}


def test_a_topics_file_that_promises_too_many_partitions_is_not_believed(tmp_path, raw, caplog):
    """As a broker left it that took any number: the next start would make directories for ever."""
    with kdirect.Broker(log_dirs=tmp_path) as b:
        assert create(raw(b.bootstrap_servers), ("t", 3)) == [0]
    state = json.loads((tmp_path / "topics.json").read_text())
    state["topics"]["t"]["partitions"] = 2_000_000_000
    (tmp_path / "topics.json").write_text(json.dumps(state))
    with caplog.at_level(logging.ERROR, logger="kdirect.broker"), kdirect.Broker(log_dirs=tmp_path) as b:
        assert partitions(raw(b.bootstrap_servers)) == {"t": 3}
    assert "topic t cannot have 2000000000 partitions" in caplog.text
