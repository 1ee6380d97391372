"""Requests about a topic through a broker that has not heard of it: another one has just been told
that it is there."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode as E
from kdirect.format.schema import build
from kdirect.model import TopicPartition
from tests.broker.conftest import call_on_loop
from tests.members.test_brokers import alter, code, described
from tests.members.wire import RECORD, ask, create, list_offset, metadata, produce
from tests.support import wait_until

LATE_S = 1.0
LIST = "leader.replication.throttled.replicas"


@contextmanager
def hearing_late(broker: Any) -> Iterator[None]:
    """What changes in the metadata comes to the broker's picture a second later."""
    picture = broker.server.member.membership._session.picture
    look = picture.look
    loop = broker.server._loop

    def later() -> None:
        loop.call_later(LATE_S, look)

    picture.look = later
    try:
        yield
    finally:
        call_on_loop(broker, lambda: delattr(picture, "look"))


def knows(broker: Any, name: str) -> bool:
    return metadata(broker, [name]).topics[0].error_code == E.NONE


def test_configs_are_told_and_changed_where_the_topic_was_not_heard_of(brokers: Any) -> None:
    ours = brokers(2)
    with hearing_late(ours[1]):
        create(ours[0], "t", partitions=1, factor=1, retention_ms=1234567)
        assert not knows(ours[1], "t")
        assert described(ours[1], 2, "t")["retention.ms"] == "1234567"
        create(ours[0], "u", partitions=1, factor=1)
        assert not knows(ours[1], "u")
        assert code(alter(ours[1], 2, "u", segment_bytes=2 << 20)) is E.NONE
        assert described(ours[0], 2, "u")["segment.bytes"] == str(2 << 20)
        assert code(alter(ours[1], 2, "missing", segment_bytes=2 << 20)) is (
            E.UNKNOWN_TOPIC_OR_PARTITION
        )
        assert knows(ours[1], "u")


def test_a_list_is_added_to_as_another_broker_has_left_it(brokers: Any) -> None:
    """The list was added to as this broker had heard of it: what came between was lost."""
    ours = brokers(2)
    create(ours[0], "t", partitions=1, factor=1)
    wait_until(lambda: knows(ours[1], "t"), "it was heard of")
    with hearing_late(ours[1]):
        assert code(alter(ours[0], 2, "t", **{LIST.replace(".", "_"): "0:1"})) is E.NONE
        configs = [{"name": LIST, "config_operation": 2, "value": "0:2"}]
        resource = {"resource_type": 2, "resource_name": "t", "configs": configs}
        request = build(p.IncrementalAlterConfigsRequest, resources=[resource], validate_only=False)
        assert code(ask(ours[1], request, 1).responses[0]) is E.NONE
        assert described(ours[0], 2, "t")[LIST] == "0:1,0:2"


def test_an_unheard_topic_grows_moves_and_goes(brokers: Any) -> None:
    ours = brokers(2)
    with hearing_late(ours[1]):
        create(ours[0], "t", assignment={0: (1,)})
        grow = build(
            p.CreatePartitionsRequest,
            topics=[{"name": "t", "count": 2, "assignments": None}],
            timeout_ms=20_000,
            validate_only=False,
        )
        assert code(ask(ours[1], grow, 3).results[0]) is E.NONE
        create(ours[0], "u", assignment={0: (1,)})
        assert not knows(ours[1], "u")
        # The number of its replicas is not to change: it has one, whatever this broker knows.
        assert moved(ours[1], "u", 1, 2) is E.INVALID_REPLICATION_FACTOR
        create(ours[0], "v", assignment={0: (1,)})
        assert not knows(ours[1], "v")
        elect = build(
            p.ElectLeadersRequest,
            election_type=0,
            topic_partitions=[{"topic": "v", "partitions": [0]}],
            timeout_ms=20_000,
        )
        (row,) = ask(ours[1], elect, 2).replica_election_results
        assert code(row.partition_result[0]) is E.ELECTION_NOT_NEEDED
        create(ours[0], "w", assignment={0: (1,)})
        assert not knows(ours[1], "w")
        by_id = metadata(ours[0], ["w"]).topics[0].topic_id
        deleted = delete(ours[1], None, by_id)
        assert (code(deleted), deleted.name, deleted.topic_id) == (E.NONE, "w", by_id)
        create(ours[0], "x", assignment={0: (1,)})
        assert not knows(ours[1], "x")
        assert code(delete(ours[1], "x", None)) is E.NONE
        assert code(delete(ours[1], None, uuid.uuid4())) is E.UNKNOWN_TOPIC_ID


def moved(broker: Any, topic: str, *replicas: int) -> E:
    """What becomes of a reassignment that must not change the number of replicas."""
    partitions = [{"partition_index": 0, "replicas": list(replicas)}]
    request = build(
        p.AlterPartitionReassignmentsRequest,
        timeout_ms=20_000,
        allow_replication_factor_change=False,
        topics=[{"name": topic, "partitions": partitions}],
    )
    return code(ask(broker, request, 1).responses[0].partitions[0])


def delete(broker: Any, name: str | None, topic_id: uuid.UUID | None) -> Any:
    topics = [{"name": name, "topic_id": topic_id}]
    return ask(broker, build(p.DeleteTopicsRequest, topics=topics, timeout_ms=20_000), 6).responses[
        0
    ]


def test_records_are_deleted_by_a_leader_that_has_not_heard_that_it_leads(brokers: Any) -> None:
    ours = brokers(2)
    with hearing_late(ours[1]):
        create(ours[0], "t", assignment={0: (2, 1)})
        tp = TopicPartition("t", 0)
        assert not knows(ours[1], "t")
        row = deleted_records(ours[1], tp, 0)
        assert (code(row), row.low_watermark) == (E.NONE, 0)
    assert code(produce(ours[1], tp, RECORD)[0]) is E.NONE
    row = deleted_records(ours[1], tp, 1)
    assert (code(row), row.low_watermark) == (E.NONE, 1)
    assert code(deleted_records(ours[0], tp, 1)) is E.NOT_LEADER_OR_FOLLOWER
    unknown = TopicPartition("u", 0)
    assert code(deleted_records(ours[1], unknown, 0)) is E.UNKNOWN_TOPIC_OR_PARTITION


def deleted_records(broker: Any, tp: TopicPartition, offset: int) -> Any:
    partitions = [{"partition_index": tp.partition, "offset": offset}]
    request = build(
        p.DeleteRecordsRequest,
        topics=[{"name": tp.topic, "partitions": partitions}],
        timeout_ms=20_000,
    )
    return ask(broker, request, 2).topics[0].partitions[0]


def test_nothing_is_acknowledged_by_a_replica_of_a_deleted_topic(
    brokers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are removed one topic after the other.  While a topic waited for its turn, its replica
    took records for a new one of the same name, and they went with it."""
    (broker,) = brokers(1)
    for name in ("first", "t"):
        create(broker, name, partitions=1, factor=1)
        wait_until(lambda tp=TopicPartition(name, 0): code(list_offset(broker, tp)) is E.NONE)
    local = broker.server.member._local
    begun, go_on = threading.Event(), asyncio.Event()
    remove = local._remove

    async def held(partitions: list[TopicPartition], work: Any) -> None:
        begun.set()
        await go_on.wait()
        await remove(partitions, work)

    monkeypatch.setattr(local, "_remove", held)
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0})
    admin.delete_topics(["first"])["first"].result(20)
    assert begun.wait(20)
    admin.delete_topics(["t"])["t"].result(20)
    admin.create_topics([NewTopic("t", 1, 1)])["t"].result(20)
    wait_until(lambda: knows(broker, "t"), "the new topic is heard of")
    failed: list[Any] = []
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "acks": 1, "linger.ms": 0})
    producer.produce("t", b"v", on_delivery=lambda error, _: failed.append(error))
    assert producer.flush(1) == 1, "the replica that takes it is not there yet"
    call_on_loop(broker, go_on.set)
    assert producer.flush(20) == 0 and failed == [None]
    wait_until(lambda: list_offset(broker, TopicPartition("t", 0)).offset == 1, "it is there")
