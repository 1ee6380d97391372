"""Records on three brokers in this process: the error codes that clients go by, on the wire, and
stock clients that produce and consume through leaders, followers and a stopped leader."""

from __future__ import annotations

import uuid
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient

import kdirect
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode as E
from kdirect.format.schema import build
from kdirect.model import EARLIEST_OFFSET, LATEST_OFFSET, TopicPartition
from tests.broker.conftest import Raw, call_on_loop
from tests.members.wire import (
    RECORD,
    ask,
    create,
    epoch_end,
    fetch,
    fetch_by_id,
    fetch_request,
    list_offset,
    metadata,
    partition_row,
    produce,
    produce_request,
)
from tests.support import poll_until, wait_until

T0 = TopicPartition("t", 0)
NO_ID = uuid.UUID(int=9)


def code(row: Any) -> E:
    return E(row.error_code)


def led_by_the_first(ours: list[Any], name: str = "t", **configs: Any) -> Any:
    """A topic with one partition that the first broker leads and all keep."""
    ids = tuple(range(1, len(ours) + 1))
    assert code(create(ours[0], name, assignment={0: ids}, **configs)) is E.NONE
    for broker in ours:
        wait_until(
            lambda b=broker: metadata(b, [name]).topics[0].error_code == 0, "the topic is seen"
        )
    wait_until(
        lambda: code(list_offset(ours[0], TopicPartition(name, 0))) is E.NONE, "the leader leads"
    )


def test_whoever_does_not_lead_says_so_and_names_the_leader(brokers: Any) -> None:
    ours = brokers(2)
    led_by_the_first(ours)
    follower = ours[1]
    row, answer = produce(follower, T0)
    assert code(row) is E.NOT_LEADER_OR_FOLLOWER
    assert (row.current_leader.leader_id, row.current_leader.leader_epoch) == (1, 0)
    host, _, port = ours[0].bootstrap_servers.rpartition(":")
    assert [(n.node_id, n.host, n.port) for n in answer.node_endpoints] == [(1, host, int(port))]
    for version in (3, 7, 9):  # which have no place for the leader
        assert code(produce(follower, T0, version=version)[0]) is E.NOT_LEADER_OR_FOLLOWER
    topic_id = metadata(follower, ["t"], version=12).topics[0].topic_id
    row, answer = produce(follower, T0, version=13, topic_id=topic_id)
    assert code(row) is E.NOT_LEADER_OR_FOLLOWER and answer.responses[0].topic_id == topic_id
    assert row.current_leader.leader_id == answer.node_endpoints[0].node_id == 1
    row, answer = produce(ours[0], T0, version=13, topic_id=topic_id)
    assert code(row) is E.NONE and answer.responses[0].topic_id == topic_id
    assert code(produce(ours[0], T0, version=13, topic_id=NO_ID)[0]) is E.UNKNOWN_TOPIC_ID
    assert code(produce(follower, T0, acks=1)[0]) is E.NOT_LEADER_OR_FOLLOWER
    old = fetch(follower, T0, version=10)  # before a client may read from followers
    assert code(old) is E.NOT_LEADER_OR_FOLLOWER
    assert code(list_offset(follower, T0)) is E.NOT_LEADER_OR_FOLLOWER
    assert code(epoch_end(follower, T0, 0)) is E.NOT_LEADER_OR_FOLLOWER
    nowhere = TopicPartition("nowhere", 0)
    assert code(produce(ours[0], nowhere)[0]) is E.UNKNOWN_TOPIC_OR_PARTITION
    assert code(fetch(ours[0], nowhere)) is E.UNKNOWN_TOPIC_OR_PARTITION


def test_no_fetch_names_a_leader_without_its_address(brokers: Any) -> None:
    """kafka-python turns to a leader that is named at once: where its metadata is of before that
    broker came it raises, and asks that broker for nothing any more."""
    ours = brokers(2)
    led_by_the_first(ours)
    assert code(create(ours[0], "elsewhere", assignment={0: (1,)})) is E.NONE
    elsewhere = TopicPartition("elsewhere", 0)
    found = wait_until(
        lambda: row if code(row := fetch(ours[1], elsewhere)) is E.NOT_LEADER_OR_FOLLOWER else None,
        "the other broker knows who leads",
    )
    assert found.current_leader is None
    topic_id = metadata(ours[1], ["elsewhere"], version=12).topics[0].topic_id
    found, answer = fetch_by_id(ours[1], elsewhere, topic_id)
    assert code(found) is E.NOT_LEADER_OR_FOLLOWER
    assert (found.current_leader.leader_id, found.current_leader.leader_epoch) == (1, 0)
    host, _, port = ours[0].bootstrap_servers.rpartition(":")
    assert [(n.node_id, n.host, n.port) for n in answer.node_endpoints] == [(1, host, int(port))]
    assert code(fetch_by_id(ours[1], elsewhere, NO_ID)[0]) is E.UNKNOWN_TOPIC_ID
    ours[0].stop()
    wait_until(lambda: partition_row(ours[1], T0).leader_id == 2, "the other one leads")
    epoch = partition_row(ours[1], T0).leader_epoch
    for wrong, error in ((epoch - 1, E.FENCED_LEADER_EPOCH), (epoch + 1, E.UNKNOWN_LEADER_EPOCH)):
        row = wait_until(
            lambda wrong=wrong, error=error: (
                r if code(r := fetch(ours[1], T0, epoch=wrong)) is error else None
            ),
            "epochs are compared",
        )
        assert row.current_leader is None


def test_leader_epochs_of_clients_are_compared(brokers: Any) -> None:
    ours = brokers(2)
    led_by_the_first(ours)
    assert code(produce(ours[0], T0)[0]) is E.NONE
    ours[0].stop()
    wait_until(lambda: partition_row(ours[1], T0).leader_id == 2, "the other one leads")
    epoch = partition_row(ours[1], T0).leader_epoch
    assert epoch > 0
    found = wait_until(
        lambda: r if code(r := fetch(ours[1], T0, epoch=epoch)) is E.NONE else None, "it serves"
    )
    assert bytes(found.records)
    assert code(fetch(ours[1], T0, epoch=epoch - 1)) is E.FENCED_LEADER_EPOCH
    assert code(fetch(ours[1], T0, epoch=epoch + 1)) is E.UNKNOWN_LEADER_EPOCH
    assert code(list_offset(ours[1], T0, epoch=epoch - 1)) is E.FENCED_LEADER_EPOCH
    assert code(epoch_end(ours[1], T0, 0, current=epoch + 1)) is E.UNKNOWN_LEADER_EPOCH
    end = epoch_end(ours[1], T0, 0, current=epoch)
    assert (code(end), end.leader_epoch, end.end_offset) == (E.NONE, 0, 1)


def test_a_log_that_diverges_is_told_where(brokers: Any) -> None:
    ours = brokers(2)
    led_by_the_first(ours)
    assert code(produce(ours[0], T0)[0]) is E.NONE
    found = fetch(ours[0], T0, 1, last_epoch=0)
    assert code(found) is E.NONE and found.diverging_epoch is None
    assert code(produce(ours[0], T0)[0]) is E.NONE
    ours[0].stop()
    wait_until(lambda: partition_row(ours[1], T0).leader_id == 2, "the other one leads")
    wait_until(lambda: code(produce(ours[1], T0)[0]) is E.NONE, "it serves")
    # A reader that had three records of the old epoch, of which the last was never committed.
    diverged = fetch(ours[1], T0, 3, last_epoch=0)
    assert code(diverged) is E.NONE and not diverged.records
    assert (diverged.diverging_epoch.epoch, diverged.diverging_epoch.end_offset) == (0, 2)


def test_too_few_replicas_in_sync_refuse_acks_all_alone(brokers: Any) -> None:
    ours = brokers(2)
    led_by_the_first(ours, min_insync_replicas=2)
    assert code(produce(ours[0], T0)[0]) is E.NONE
    ours[1].stop()
    wait_until(lambda: list(partition_row(ours[0], T0).isr_nodes) == [1], "it left")
    wait_until(lambda: code(produce(ours[0], T0)[0]) is E.NOT_ENOUGH_REPLICAS, "it is refused")
    row, _ = produce(ours[0], T0, acks=1)
    assert code(row) is E.NONE
    # What one replica has is not committed: the high watermark stands still.
    assert list_offset(ours[0], T0).offset == 1 and row.base_offset == 1
    ours[1].start()
    wait_until(lambda: sorted(partition_row(ours[0], T0).isr_nodes) == [1, 2], "it is back")
    wait_until(lambda: code(produce(ours[0], T0)[0]) is E.NONE, "it is taken again")
    assert list_offset(ours[0], T0).offset >= 3


def stop_following(broker: Any) -> None:
    """From now on the broker fetches nothing from leaders; it lives, and stays in sync until it has
    lagged for too long.  With rdma.replicate=false no leader writes to it either."""
    call_on_loop(broker, broker.server.member.replicas._fetcher.stop)


def test_acks_all_ends_in_time_with_the_codes_of_kafka(brokers: Any) -> None:
    ours = brokers(2, rdma_replicate=False)
    led_by_the_first(ours, min_insync_replicas=2)
    assert code(produce(ours[0], T0)[0]) is E.NONE
    stop_following(ours[1])
    late, _ = produce(ours[0], T0, timeout_ms=200)
    assert code(late) is E.REQUEST_TIMED_OUT
    assert code(produce(ours[0], T0, acks=1)[0]) is E.NONE  # waits for nobody
    assert list_offset(ours[0], T0).offset == 1  # what only the leader has is not committed
    waiting = Raw(ours[0].bootstrap_servers, timeout_s=30)
    waiting.send(produce_request(T0, timeout_ms=25_000), 10)
    ours[1].stop()
    row = waiting.receive().responses[0].partition_responses[0]
    assert code(row) is E.NOT_ENOUGH_REPLICAS_AFTER_APPEND
    waiting.close()


def test_commits_by_rdma_count_at_once_where_no_follower_is_left(brokers: Any) -> None:
    ours = brokers(2)
    led_by_the_first(ours, min_insync_replicas=1)
    settings = {
        "bootstrap.servers": ours[0].bootstrap_servers,
        "transport": "shm",
        "delivery.timeout.ms": 5000,
        "request.timeout.ms": 5000,
    }
    with closing(kdirect.Producer(settings)) as producer:
        producer.produce_sync("t", RECORD, partition=0)
        ours[1].stop()
        wait_until(lambda: list(partition_row(ours[0], T0).isr_nodes) == [1], "it left")
        for offset in range(1, 5):
            assert producer.produce_sync("t", RECORD, partition=0) == offset


def test_a_producer_is_told_that_too_few_replicas_are_in_sync(
    brokers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ours = brokers(2)
    led_by_the_first(ours, min_insync_replicas=2)
    ours[1].stop()
    wait_until(lambda: list(partition_row(ours[0], T0).isr_nodes) == [1], "it left")
    settings = {
        "bootstrap.servers": ours[0].bootstrap_servers,
        "transport": "shm",
        "delivery.timeout.ms": 1000,
        "request.timeout.ms": 1000,
    }
    with (
        closing(kdirect.Producer(settings)) as producer,
        pytest.raises(kdirect.DeliveryError, match=r"min\.insync\.replicas"),
    ):
        producer.produce_sync("t", RECORD, partition=0)
    # It has asked many times, which fills no log.
    assert not [r for r in caplog.records if "GetProduceAccess" in r.getMessage()]
    with closing(kdirect.Producer({**settings, "acks": "1"})) as producer:
        assert producer.produce_sync("t", RECORD, partition=0) == 0


def test_kafka_clients_append_to_a_head_that_rdma_producers_share(brokers: Any) -> None:
    ours = brokers(2)
    led_by_the_first(ours)
    settings = {
        "bootstrap.servers": ours[0].bootstrap_servers,
        "transport": "shm",
        "rdma.produce": "shared",
    }
    with closing(kdirect.Producer(settings)) as producer:
        producer.produce_sync("t", RECORD, partition=0)
        for acks, offset in ((-1, 1), (1, 2)):
            row, _ = produce(ours[0], T0, acks=acks)
            assert (code(row), row.base_offset) == (E.NONE, offset)
        producer.produce_sync("t", RECORD, partition=0)
    assert list_offset(ours[0], T0).offset == 4


def test_what_waits_at_a_leader_that_goes_is_told_at_once(brokers: Any) -> None:
    ours = brokers(2, auto_leader_rebalance_enable=False, rdma_replicate=False)
    led_by_the_first(ours)
    ours[0].stop()
    wait_until(lambda: partition_row(ours[1], T0).leader_id == 2, "the other one leads")
    ours[0].start()
    wait_until(lambda: sorted(partition_row(ours[1], T0).isr_nodes) == [1, 2], "it is back")
    reader, writer = (Raw(ours[1].bootstrap_servers, timeout_s=30) for _ in range(2))
    reader.send(fetch_request(T0, 0, max_wait_ms=25_000), 10)
    stop_following(ours[0])
    writer.send(produce_request(T0, timeout_ms=25_000), 10)
    tail = ours[1].server.logs.partitions[T0]
    wait_until(lambda: tail.log_end_offset == 1, "the leader has it")
    assert code(elect(ours[0], T0)) is E.NONE
    assert code(reader.receive().responses[0].partitions[0]) is E.NOT_LEADER_OR_FOLLOWER
    row = writer.receive().responses[0].partition_responses[0]
    assert code(row) is E.NOT_LEADER_OR_FOLLOWER
    assert row.current_leader.leader_id == 1
    reader.close()
    writer.close()


def test_a_new_leader_shows_no_end_before_it_knows_it(
    brokers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (broker,) = brokers(1)
    led_by_the_first([broker])
    assert code(produce(broker, T0)[0]) is E.NONE
    replicas = broker.server.member.replicas
    monkeypatch.setattr(replicas, "knows_high_watermark", lambda tp: False)
    assert code(list_offset(broker, T0)) is E.OFFSET_NOT_AVAILABLE
    assert code(list_offset(broker, T0, version=4)) is E.LEADER_NOT_AVAILABLE
    assert list_offset(broker, T0, EARLIEST_OFFSET).offset == 0
    monkeypatch.undo()
    assert list_offset(broker, T0).offset == 1


def test_a_replica_that_is_being_made_leads_not_yet(
    brokers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all requests, clients know REPLICA_NOT_AVAILABLE as an answer to Fetch only: sarama took
    it from ListOffsets for the end, where it asks for the leader again at what Kafka answers."""
    (broker,) = brokers(1)
    led_by_the_first([broker])
    monkeypatch.delitem(broker.server.member.replicas._replicas, T0)
    assert code(fetch(broker, T0)) is E.REPLICA_NOT_AVAILABLE
    for timestamp in (LATEST_OFFSET, EARLIEST_OFFSET, 0):
        assert code(list_offset(broker, T0, timestamp)) is E.NOT_LEADER_OR_FOLLOWER
    assert code(epoch_end(broker, T0, 0)) is E.NOT_LEADER_OR_FOLLOWER
    monkeypatch.undo()
    assert list_offset(broker, T0).offset == 0


def test_followers_serve_consumers_below_their_high_watermark(brokers: Any) -> None:
    ours = brokers(2, racks=["a", "b"])
    led_by_the_first(ours)
    assert code(produce(ours[0], T0)[0]) is E.NONE
    sent = wait_until(
        lambda: r if (r := fetch(ours[0], T0, rack="b")).preferred_read_replica == 2 else None,
        "the consumer is sent to its rack",
    )
    assert code(sent) is E.NONE and not sent.records
    assert fetch(ours[0], T0, rack="b", version=11).preferred_read_replica == 2
    assert fetch(ours[0], T0, rack="a").preferred_read_replica == -1
    assert bytes(fetch(ours[0], T0).records) == bytes(fetch(ours[0], T0, rack="a").records)
    near = wait_until(
        lambda: r if (r := fetch(ours[1], T0, rack="b")).records else None, "the follower has it"
    )
    assert bytes(near.records) == bytes(fetch(ours[0], T0).records)
    assert code(fetch(ours[1], T0, 7, rack="b")) is E.OFFSET_NOT_AVAILABLE
    assert code(fetch(ours[0], T0, 7)) is E.OFFSET_OUT_OF_RANGE


def test_records_are_deleted_on_all_replicas(brokers: Any) -> None:
    ours = brokers(2)
    led_by_the_first(ours)
    for _ in range(3):
        assert code(produce(ours[0], T0)[0]) is E.NONE
    rows = [{"partition_index": 0, "offset": 2}]
    request = build(
        p.DeleteRecordsRequest, topics=[{"name": "t", "partitions": rows}], timeout_ms=20_000
    )
    row = ask(ours[0], request, 2).topics[0].partitions[0]
    assert (code(row), row.low_watermark) == (E.NONE, 2)
    assert [b.server.logs.partitions[T0].log_start_offset for b in ours] == [2, 2]
    assert list_offset(ours[0], T0, EARLIEST_OFFSET).offset == 2
    assert list_offset(ours[0], T0, LATEST_OFFSET).offset == 3
    assert code(ask(ours[1], request, 2).topics[0].partitions[0]) is E.NOT_LEADER_OR_FOLLOWER


def reassign(broker: Any, tp: TopicPartition, replicas: list[int] | None) -> Any:
    rows = [{"partition_index": tp.partition, "replicas": replicas}]
    request = build(
        p.AlterPartitionReassignmentsRequest,
        topics=[{"name": tp.topic, "partitions": rows}],
        timeout_ms=20_000,
    )
    return ask(broker, request, 0).responses[0].partitions[0]


def reassignments(broker: Any) -> Any:
    request = build(p.ListPartitionReassignmentsRequest, topics=None, timeout_ms=20_000)
    return ask(broker, request, 0).topics


def elect(broker: Any, tp: TopicPartition, *, unclean: bool = False) -> Any:
    rows = [{"topic": tp.topic, "partitions": [tp.partition]}]
    request = build(
        p.ElectLeadersRequest,
        election_type=int(unclean),
        topic_partitions=rows,
        timeout_ms=20_000,
    )
    return ask(broker, request, 2).replica_election_results[0].partition_result[0]


def test_a_partition_moves_to_other_brokers_with_its_records(brokers: Any) -> None:
    ours = brokers(3, log_segment_delete_delay_ms=100)
    assert code(create(ours[0], "t", assignment={0: (1,)})) is E.NONE
    wait_until(lambda: code(produce(ours[0], T0)[0]) is E.NONE, "it serves")
    assert code(reassign(ours[1], T0, None)) is E.NO_REASSIGNMENT_IN_PROGRESS
    assert code(reassign(ours[1], T0, [2, 9])) is E.INVALID_REPLICA_ASSIGNMENT
    assert code(reassign(ours[2], T0, [2, 3])) is E.NONE
    wait_until(
        lambda: sorted(partition_row(ours[0], T0).replica_nodes) == [2, 3], "the partition moved"
    )
    assert not reassignments(ours[0])
    wait_until(lambda: not list(ours[0].log_dirs[0].glob("t-*")), "the old replica is gone")
    leader = wait_until(
        lambda: next(
            (b for b, n in zip(ours, (1, 2, 3), strict=True)
             if n == partition_row(ours[0], T0).leader_id), None
        ), "it is led"
    )  # fmt: skip
    found = wait_until(lambda: r if (r := fetch(leader, T0)).records else None, "it has the record")
    assert found.high_watermark >= 1


def test_the_preferred_leader_is_elected_on_demand(brokers: Any) -> None:
    ours = brokers(2, auto_leader_rebalance_enable=False)
    led_by_the_first(ours)
    assert code(elect(ours[1], T0)) is E.ELECTION_NOT_NEEDED
    ours[0].stop()
    wait_until(lambda: partition_row(ours[1], T0).leader_id == 2, "the other one leads")
    assert code(elect(ours[1], T0)) is E.PREFERRED_LEADER_NOT_AVAILABLE
    ours[0].start()
    wait_until(lambda: sorted(partition_row(ours[1], T0).isr_nodes) == [1, 2], "it is back")
    assert code(elect(ours[1], T0)) is E.NONE
    assert partition_row(ours[1], T0).leader_id == 1


def test_an_unclean_election_takes_whoever_lives(brokers: Any) -> None:
    ours = brokers(3)
    assert code(create(ours[0], "t", assignment={0: (2, 3)})) is E.NONE
    wait_until(lambda: partition_row(ours[0], T0).leader_id == 2, "the topic is led")
    assert code(elect(ours[0], T0, unclean=True)) is E.ELECTION_NOT_NEEDED
    ours[2].stop()
    wait_until(lambda: list(partition_row(ours[0], T0).isr_nodes) == [2], "it left")
    ours[1].stop()
    wait_until(lambda: partition_row(ours[0], T0).leader_id == -1, "nobody leads")
    assert code(elect(ours[0], T0, unclean=True)) is E.ELIGIBLE_LEADERS_NOT_AVAILABLE
    ours[2].start()
    wait_until(lambda: list(partition_row(ours[0], T0).offline_replicas) == [2], "it is back")
    assert partition_row(ours[0], T0).leader_id == -1  # it was not in sync
    assert code(elect(ours[0], T0, unclean=True)) is E.NONE
    row = wait_until(
        lambda: r if (r := partition_row(ours[0], T0)).leader_id == 3 else None, "it leads"
    )
    assert list(row.isr_nodes) == [3]


def test_a_reassignment_under_way_is_listed_and_cancelled(brokers: Any) -> None:
    ours = brokers(2)
    stop_following(ours[1])
    assert code(create(ours[0], "t", assignment={0: (1,)})) is E.NONE
    wait_until(lambda: code(produce(ours[0], T0)[0]) is E.NONE, "it serves")
    assert code(reassign(ours[0], T0, [2])) is E.NONE
    ((row,),) = [topic.partitions for topic in reassignments(ours[1])]
    assert sorted(row.replicas) == [1, 2]
    assert (list(row.adding_replicas), list(row.removing_replicas)) == ([2], [1])
    assert partition_row(ours[0], T0).leader_id == 1  # while the new replica has nothing
    assert code(reassign(ours[1], T0, None)) is E.NONE
    wait_until(lambda: list(partition_row(ours[0], T0).replica_nodes) == [1], "it is as before")
    assert not reassignments(ours[0])
    wait_until(lambda: not (ours[1].log_dirs[0] / "t-0").exists(), "the new replica is gone")
    # The leader begins a new epoch, and refuses for a moment what clients repeat.
    wait_until(lambda: code(produce(ours[0], T0)[0]) is E.NONE, "it serves again")


@pytest.mark.parametrize("idempotent", [False, True])
def test_stock_clients_survive_the_end_of_a_leader(brokers: Any, idempotent: bool) -> None:
    ours = brokers(3)
    servers = ",".join(b.bootstrap_servers for b in ours)
    assert code(create(ours[0], "t", partitions=3, factor=3)) is E.NONE
    producer = Producer(
        {"bootstrap.servers": servers, "acks": "all", "enable.idempotence": idempotent}
    )
    failed: list[Any] = []
    sent = 0

    def send(count: int) -> None:
        nonlocal sent
        for _ in range(count):
            producer.produce(
                "t",
                key=str(sent),
                value=str(sent),
                on_delivery=lambda error, message: failed.append(error) if error else None,
            )
            sent += 1
            producer.poll(0)

    consumer = Consumer(
        {"bootstrap.servers": servers, "group.id": "g", "auto.offset.reset": "earliest"}
    )
    consumer.subscribe(["t"])
    values: list[int] = []
    collecting = _Collecting(consumer, values)
    try:
        send(200)
        assert producer.flush(20) == 0
        poll_until(lambda: len(set(values)) == sent, collecting, timeout_s=40)
        send(100)
        ours[1].stop()
        send(100)
        assert producer.flush(30) == 0 and not failed
        poll_until(lambda: len(set(values)) == sent, collecting, timeout_s=40)
        consumer.commit(asynchronous=False)
    finally:
        consumer.close()
    assert set(values) == set(range(sent))
    if idempotent:
        assert len(values) == sent
    ours[1].start()
    topic = AdminClient({"bootstrap.servers": servers})
    wait_until(
        lambda: all(
            len(x.isrs) == 3 for x in topic.list_topics("t", 10).topics["t"].partitions.values()
        ),
        "all are in sync again",
    )
    assert RECORD


class _Collecting:
    """A consumer whose messages' values are kept."""

    def __init__(self, consumer: Consumer, values: list[int]) -> None:
        self._consumer = consumer
        self._values = values

    def poll(self, timeout_s: float) -> Any:
        message = self._consumer.poll(timeout_s)
        if message is None or message.error():
            return None
        self._values.append(int(message.value()))
        return message
