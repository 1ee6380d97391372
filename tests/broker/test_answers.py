"""Answers that stock clients rely on in detail: where Kafka sends an empty list, what it takes an
empty or missing field for."""

from __future__ import annotations

import uuid

import pytest

from kdirect.format import protocol as p
from kdirect.format.batch import encode_single_bytes
from kdirect.format.error_codes import ErrorCode as E
from kdirect.format.schema import build


def create(connection, name, partitions=1, version=7, **configs):
    topic = {"name": name, "num_partitions": partitions, "replication_factor": 1, "assignments": [],
             "configs": [{"name": k.replace("_", "."), "value": str(v)}
                         for k, v in configs.items()]}  # fmt: skip
    request = build(p.CreateTopicsRequest, topics=[topic], timeout_ms=1000, validate_only=False)
    (row,) = connection.call(request, version).topics
    return row


# -- DescribeTopicPartitions -----------------------------------------------------------------------
def describe(connection, *names, limit=2000, cursor=None):
    rows = [{"name": n} for n in names]
    return connection.call(
        build(
            p.DescribeTopicPartitionsRequest,
            topics=rows,
            response_partition_limit=limit,
            cursor=cursor,
        ),
        0,
    )


def test_lists_that_kafka_sends_empty_are_not_null(raw):
    connection = raw()
    create(connection, "t", 2)
    (topic,) = describe(connection, "t").topics
    for row in topic.partitions:
        assert (row.error_code, row.replica_nodes, row.isr_nodes) == (0, [1], [1])
        assert (row.eligible_leader_replicas, row.last_known_elr, row.offline_replicas) == (
            [],
            [],
            [],
        )
    refused = create(connection, "t")
    assert refused.error_code == E.TOPIC_ALREADY_EXISTS and refused.configs == []


def test_no_names_are_all_topics_in_pages(raw):
    connection = raw()
    for name, partitions in (("b", 2), ("a", 1), ("c", 3)):
        create(connection, name, partitions)
    every = [(t.name, i.partition_index) for t in describe(connection).topics for i in t.partitions]
    assert every == [("a", 0), ("b", 0), ("b", 1), ("c", 0), ("c", 1), ("c", 2)]
    seen, cursor = [], None
    for _ in range(10):
        page = describe(connection, limit=2, cursor=cursor)
        assert sum(len(t.partitions) for t in page.topics) <= 2
        seen += [(t.name, i.partition_index) for t in page.topics for i in t.partitions]
        if page.next_cursor is None:
            break
        cursor = {
            "topic_name": page.next_cursor.topic_name,
            "partition_index": page.next_cursor.partition_index,
        }
    assert seen == every
    (missing, there) = describe(connection, "nowhere", "a").topics[::-1]
    assert missing.error_code == E.UNKNOWN_TOPIC_OR_PARTITION and there.error_code == 0


# -- Fetch sessions --------------------------------------------------------------------------------
def fetch(connection, session_id, epoch, version=12, isolation=0):
    part = {"partition": 0, "current_leader_epoch": -1, "fetch_offset": 0, "last_fetched_epoch": -1,
            "log_start_offset": -1,
            "partition_max_bytes": 1 << 20}  # fmt: skip
    request = build(p.FetchRequest, replica_id=-1, max_wait_ms=0, min_bytes=1, max_bytes=1 << 20,
                    isolation_level=isolation,
                    session_id=session_id, session_epoch=epoch,
                    topics=[{"topic": "t", "partitions": [part]}],
                    forgotten_topics_data=[], rack_id="")  # fmt: skip
    return connection.call(request, version)


@pytest.mark.parametrize("version", [7, 12])
@pytest.mark.parametrize("epoch", [-1, 0])
@pytest.mark.parametrize("session_id", [-1, 0, 77])
def test_a_full_fetch_is_answered_whatever_session_it_ends(raw, session_id, epoch, version):
    """Kafka goes by the epoch: -1 wants no session, 0 a new one; the session that is named ends."""
    connection = raw()
    create(connection, "t")
    batch = encode_single_bytes(b"hello")
    request = build(
        p.ProduceRequest,
        acks=1,
        timeout_ms=1000,
        topic_data=[{"name": "t", "partition_data": [{"index": 0, "records": batch}]}],
    )
    assert connection.call(request, 9).responses[0].partition_responses[0].error_code == 0
    answer = fetch(connection, session_id, epoch, version)
    assert answer.error_code == 0
    assert (answer.session_id > 0) == (epoch == 0)
    assert answer.session_id != session_id or epoch == -1
    assert len(answer.responses[0].partitions[0].records) == len(batch)


@pytest.mark.parametrize("session_id", [-1, 0, 77])
def test_an_incremental_fetch_of_a_session_that_is_not_there(raw, session_id):
    connection = raw()
    create(connection, "t")
    answer = fetch(connection, session_id, 1)
    assert (answer.error_code, answer.session_id, answer.responses) == (
        E.FETCH_SESSION_ID_NOT_FOUND,
        0,
        [],
    )


@pytest.mark.parametrize("version", [4, 5, 11, 12])
@pytest.mark.parametrize(("isolation", "aborted"), [(0, None), (1, [])])
def test_aborted_transactions_are_listed_to_those_who_ask(raw, version, isolation, aborted):
    """Kafka sends null where read_uncommitted was asked for, and a list, here an empty one, for
    read_committed."""
    connection = raw()
    create(connection, "t")
    (row,) = fetch(connection, 0, -1, version, isolation).responses[0].partitions
    assert (row.error_code, row.aborted_transactions) == (0, aborted)
    assert not row.records


# -- topic ids -------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [None, "", "t", "another"])
def test_metadata_by_id_whatever_the_name(raw, name):
    connection = raw()
    topic_id = create(connection, "t", 2).topic_id
    request = build(
        p.MetadataRequest,
        topics=[{"topic_id": topic_id, "name": name}],
        allow_auto_topic_creation=True,
    )
    (row,) = connection.call(request, 12).topics
    assert (row.error_code, row.name, row.topic_id, len(row.partitions)) == (0, "t", topic_id, 2)
    unknown = build(
        p.MetadataRequest,
        topics=[{"topic_id": uuid.uuid4(), "name": name}],
        allow_auto_topic_creation=True,
    )
    (row,) = connection.call(unknown, 12).topics
    assert (row.error_code, row.name) == (E.UNKNOWN_TOPIC_ID, None)
    everything = connection.call(
        build(p.MetadataRequest, topics=None, allow_auto_topic_creation=False), 12
    )
    assert [t.name for t in everything.topics] == ["t"], "and nothing was created"


def test_metadata_of_no_name_and_no_id(raw):
    connection = raw()
    request = build(
        p.MetadataRequest, topics=[{"topic_id": None, "name": ""}], allow_auto_topic_creation=True
    )
    assert connection.call(request, 12).topics[0].error_code == E.INVALID_TOPIC_EXCEPTION


@pytest.mark.parametrize("name", [None, ""])
def test_deletion_by_id_with_an_empty_name(raw, name):
    connection = raw()
    topic_id = create(connection, "t").topic_id
    request = build(
        p.DeleteTopicsRequest, topics=[{"name": name, "topic_id": topic_id}], timeout_ms=1000
    )
    (row,) = connection.call(request, 6).responses
    assert (row.error_code, row.name, row.topic_id) == (0, "t", topic_id)
