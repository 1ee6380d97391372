"""Groups of KIP-848 with a stock client (librdkafka's), and through a restart of the broker."""

from __future__ import annotations

import time

import confluent_kafka
import pytest
from confluent_kafka import ConsumerGroupState, ConsumerGroupType, KafkaException
from confluent_kafka.admin import AdminClient

import kdirect
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode as E
from kdirect.format.schema import build

SETTINGS = {
    "group_consumer_session_timeout_ms": 6000,
    "group_consumer_heartbeat_interval_ms": 100,
}


def consumer(broker, group="g", **more):
    return confluent_kafka.Consumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": group,
            "group.protocol": "consumer",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            **more,
        }
    )


def make_topics(broker, **partitions):
    with kdirect.connect(broker.bootstrap_servers) as session:
        for name, count in partitions.items():
            session.admin.create_topic(name, count)


def poll_until(consumers, done, seconds=20):
    """Poll all until `done`; the values that were read."""
    values = []
    end = time.monotonic() + seconds
    while not done(values):
        assert time.monotonic() < end, [c.assignment() for c in consumers]
        for c in consumers:
            message = c.poll(0.02)
            if message is not None and message.error() is None:
                values.append(message.value())
    return values


def owned(consumer):
    return {(tp.topic, tp.partition) for tp in consumer.assignment()}


def heartbeat(raw, group, member, epoch, version=1, **fields):
    request = build(
        p.ConsumerGroupHeartbeatRequest,
        group_id=group,
        member_id=member,
        member_epoch=epoch,
        **fields,
    )
    return raw.call(request, version)


JOIN = {"rebalance_timeout_ms": 1000, "topic_partitions": []}


def test_members_share_what_they_read_and_give_it_back():
    with kdirect.Broker(**SETTINGS) as broker:
        make_topics(broker, t1=4, t2=2)
        producer = confluent_kafka.Producer({"bootstrap.servers": broker.bootstrap_servers})
        for i in range(40):
            producer.produce("t1", str(i), partition=i % 4)
        producer.flush()
        a, b = consumer(broker), consumer(broker)
        a.subscribe(["t1"])
        read = poll_until([a], lambda values: len(values) == 40)
        a.commit(asynchronous=False)
        b.subscribe(["^t.*"])  # evaluated by the broker
        everything = {("t1", i) for i in range(4)} | {("t2", i) for i in range(2)}
        again = poll_until(
            [a, b], lambda _: owned(a) | owned(b) == everything and len(owned(b)) == 3
        )
        assert not owned(a) & owned(b)
        assert not again and len(set(read)) == 40  # it goes on from what was committed
        make_topics(broker, t3=2)  # the expression stands for it, too
        poll_until([a, b], lambda _: ("t3", 1) in owned(b))

        group = broker.server.groups.consumer.groups["g"]
        poll_until([a, b], lambda _: group.state() == "Stable" and len(owned(a) | owned(b)) == 8)
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        (row,) = admin.list_consumer_groups(types={ConsumerGroupType.CONSUMER}).result().valid
        assert (row.group_id, row.state) == ("g", ConsumerGroupState.STABLE)
        assert not admin.list_consumer_groups(types={ConsumerGroupType.CLASSIC}).result().valid
        told = admin.describe_consumer_groups(["g"])["g"].result()
        found = [
            sorted((x.topic, x.partition) for x in m.assignment.topic_partitions)
            for m in told.members
        ]
        assert sorted(found) == sorted([sorted(owned(a)), sorted(owned(b))])
        with pytest.raises(KafkaException, match="NON_EMPTY"):
            admin.delete_consumer_groups(["g"])["g"].result()
        a.close()
        poll_until([b], lambda _: len(owned(b)) == 8)
        b.close()
        admin.delete_consumer_groups(["g"])["g"].result()  # at once: its members have left
        assert not admin.list_consumer_groups().result().valid


def test_names_are_assigned_before_what_an_expression_adds():
    """librdkafka's own test 0045 asks for this order of a broker, as Kafka has it."""
    with kdirect.Broker(**SETTINGS) as broker:
        make_topics(broker, x1=4, x2=4, y=2)
        given = []

        def assign(consumer, partitions):
            given.append(sorted((tp.topic, tp.partition) for tp in partitions))
            consumer.incremental_assign(partitions)

        a = consumer(broker)
        a.subscribe(["^x.*", "y"], on_assign=assign)
        poll_until([a], lambda _: len(owned(a)) == 10)
        names = [("y", 0), ("y", 1)]
        assert given == [names, [(t, i) for t in ("x1", "x2") for i in range(4)]]
        a.unsubscribe()
        poll_until([a], lambda _: not owned(a))
        given.clear()
        a.subscribe(["^x.*"], on_assign=assign)
        poll_until([a], lambda _: len(owned(a)) == 8)
        assert len(given) == 1
        a.close()


def test_members_go_on_after_a_restart_of_the_broker(tmp_path):
    settings = {**SETTINGS, "log_dirs": tmp_path}
    with kdirect.Broker(**settings) as broker:
        make_topics(broker, t=3)
        address = broker.bootstrap_servers
        a = consumer(broker)
        a.subscribe(["t"])
        poll_until([a], lambda _: len(owned(a)) == 3)
        lost = []
        a.subscribe(["t"], on_revoke=lambda c, tps: lost.append(tps), on_lost=lost.append)
        before = broker.server.groups.consumer.groups["g"]
    with kdirect.Broker(**settings, listeners=address) as broker:
        after = broker.server.groups.consumer.groups["g"]
        assert dict(after.all_rows()) == dict(before.all_rows())
        (member,) = after.members.values()
        first = member.session_deadline
        poll_until([a], lambda _: member.session_deadline > first)
        assert after.epoch == before.epoch and not lost
        a.close()


def test_frames_that_are_refused(raw):
    with kdirect.Broker(**SETTINGS) as broker:
        make_topics(broker, t=2)
        connection = raw(broker.bootstrap_servers)
        names = {"subscribed_topic_names": ["t"], **JOIN}
        bad = heartbeat(connection, "g", "m", 0, subscribed_topic_regex="(", **JOIN)
        assert bad.error_code == E.INVALID_REGULAR_EXPRESSION and "missing )" in bad.error_message
        assert heartbeat(connection, "g", "m", 3).error_code == E.GROUP_ID_NOT_FOUND
        made = heartbeat(connection, "g", "", 0, version=0, **names)
        assert made.error_code == 0 and made.member_id and made.member_epoch == 1
        assert [t.partitions for t in made.assignment.topic_partitions] == [[0, 1]]
        stale = heartbeat(connection, "g", made.member_id, 7)
        assert stale.error_code == E.FENCED_MEMBER_EPOCH and stale.assignment is None
        describe = build(p.ConsumerGroupDescribeRequest, group_ids=["g", "none"])
        told, none = connection.call(describe, 1).groups
        assert (told.group_state, told.assignor_name) == ("Stable", "uniform")
        assert told.members[0].member_type == 1
        assert told.members[0].subscribed_topic_regex == ""  # Kafka's word for none
        (listed,) = connection.call(build(p.ListGroupsRequest), 5).groups
        assert (listed.group_id, listed.group_type) == ("g", "consumer")
        assert none.error_code == E.GROUP_ID_NOT_FOUND
        classic = build(p.DescribeGroupsRequest, groups=["g"])
        (told,) = connection.call(classic, 6).groups
        assert told.error_code == E.GROUP_ID_NOT_FOUND
        part = {"partition_index": 0, "committed_offset": 1, "committed_metadata": None}
        commit = {"group_id": "g", "topics": [{"name": "t", "partitions": [part]}]}
        for epoch, code in ((1, E.NONE), (0, E.STALE_MEMBER_EPOCH)):
            request = build(
                p.OffsetCommitRequest,
                generation_id_or_member_epoch=epoch,
                member_id=made.member_id,
                **commit,
            )
            answer = connection.call(request, 9)
            assert answer.topics[0].partitions[0].error_code == code
        group = {"group_id": "g", "member_id": made.member_id, "member_epoch": 5, "topics": None}
        (row,) = connection.call(build(p.OffsetFetchRequest, groups=[group]), 9).groups
        assert row.error_code == E.STALE_MEMBER_EPOCH


def test_an_administrator_removes_members(raw):
    """By LeaveGroup, as Kafka's Admin does: a static one by its instance id, others by theirs."""
    with kdirect.Broker(**SETTINGS) as broker:
        make_topics(broker, t=2)
        connection = raw(broker.bootstrap_servers)
        names = {"subscribed_topic_names": ["t"], **JOIN}
        assert heartbeat(connection, "g", "a", 0, instance_id="i", **names).error_code == 0
        assert heartbeat(connection, "g", "b", 0, **names).error_code == 0
        group = broker.server.groups.consumer.groups["g"]

        def leave(member, instance=None):
            row = {"member_id": member, "group_instance_id": instance}
            request = build(p.LeaveGroupRequest, group_id="g", members=[row])
            (answer,) = connection.call(request, 5).members
            return answer.error_code

        assert leave("", "none") == leave("c") == E.UNKNOWN_MEMBER_ID
        assert leave("b", "i") == E.FENCED_INSTANCE_ID
        assert len(group.members) == 2
        assert leave("", "i") == 0 and set(group.members) == {"b"}
        assert heartbeat(connection, "g", "a", 1).error_code == E.UNKNOWN_MEMBER_ID
        assert leave("b") == 0 and not group.members
