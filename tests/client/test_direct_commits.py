"""A consumer commits by WRITEs into its coordinator's memory, to brokers in processes of their own:
what was acknowledged is seen by every client and after a kill, and whatever ends the slot is told
as over TCP."""

from __future__ import annotations

import os
import signal

import confluent_kafka
import pytest
from confluent_kafka import admin as confluent_admin

import kdirect
from kdirect.client import connect
from kdirect.errors import BrokerError, KdirectError
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.model import TopicPartition
from tests.support import poll_until, stop_process, wait_until

TPS = [TopicPartition("t", i) for i in range(4)]


@pytest.fixture
def process(broker_process):
    started = broker_process(group_min_session_timeout_ms=100)
    with connect(started.bootstrap_servers) as session:
        session.admin.create_topic("t", 4)
        with session.producer() as producer:
            for i in range(400):
                producer.produce("t", b"%d" % i, partition=i % 4)
    return started


def consumer(process, **changed):
    c = kdirect.Consumer(
        {
            "bootstrap.servers": process.bootstrap_servers,
            "group.id": "g",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "transport": "shm",
            **changed,
        }
    )
    c.subscribe(["t"])
    return c


def assigned(*consumers, each):
    poll_until(lambda: all(len(c.assignment()) == each for c in consumers), *consumers)


def direct(c):
    return c.statistics()["direct_commits"]


def as_others_see(process):
    """Over TCP, by another client's administration."""
    admin = confluent_admin.AdminClient({"bootstrap.servers": process.bootstrap_servers})
    asked = confluent_kafka.ConsumerGroupTopicPartitions("g")
    found = admin.list_consumer_group_offsets([asked])["g"].result(10)
    return {TopicPartition(x.topic, x.partition): x.offset for x in found.topic_partitions}


def test_commits_are_seen_by_others_and_after_a_kill(process):
    with consumer(process) as c:
        assigned(c, each=4)
        for offset in range(1, 50):
            wanted = {TPS[offset % 4]: offset, TPS[(offset + 1) % 4]: offset}
            assert c.commit(offsets=wanted, asynchronous=False) == wanted
        assert direct(c) == 48, "the first of a generation goes over TCP"
        expected = {TPS[0]: 48, TPS[1]: 49, TPS[2]: 49, TPS[3]: 47}
        assert c.committed(TPS) == as_others_see(process) == expected
        process.kill()
        process.start()
        assert as_others_see(process) == expected
        assert c.committed(TPS) == expected
        # It goes on, over TCP at first: its member is known to the broker that came back.
        for offset in range(50, 60):
            c.commit(offsets={TPS[0]: offset}, asynchronous=False)
        assert as_others_see(process)[TPS[0]] == 59
        assert direct(c) > 48


def test_asynchronous_commits_are_answered_in_a_later_poll(process):
    told = []
    c = kdirect.Consumer(
        {"bootstrap.servers": process.bootstrap_servers, "group.id": "g", "transport": "shm",
         "enable.auto.commit": False},
        on_commit=lambda error, offsets: told.append((error, offsets)),
    )  # fmt: skip
    with c:
        c.subscribe(["t"])
        assigned(c, each=4)
        c.commit(offsets={TPS[0]: 0}, asynchronous=False)
        sent = [{TPS[0]: i} for i in range(1, 40)]  # more than there are cells
        for offsets in sent:
            c.commit(offsets=offsets)
        poll_until(lambda: len(told) == len(sent), c)
        assert told == [(None, offsets) for offsets in sent]
        assert direct(c) == len(sent)
        assert as_others_see(process) == {TPS[0]: 39}


def test_auto_commit_and_the_last_commit_of_a_consumer_that_closes(process):
    c = consumer(process, **{"enable.auto.commit": True, "auto.commit.interval.ms": 50})
    with c:
        poll_until(lambda: sum(c.position(tp) for tp in c.assignment()) == 400, c)
        poll_until(lambda: as_others_see(process) == dict.fromkeys(TPS, 100), c)
        for more in (101, 102, 103):
            with connect(process.bootstrap_servers) as session, session.producer() as producer:
                for tp in TPS:
                    producer.produce_sync("t", b"x", partition=tp.partition)
            expected = dict.fromkeys(TPS, more)
            poll_until(lambda expected=expected: as_others_see(process) == expected, c)
        assert direct(c) > 0
        with connect(process.bootstrap_servers) as session, session.producer() as producer:
            producer.produce_sync("t", b"x", partition=0)
        assert c.poll(10) is not None
        c.poll(0)
    assert as_others_see(process)[TPS[0]] == 104


def test_a_rebalance_fences_and_the_next_generation_commits_again(process):
    with consumer(process) as first:
        assigned(first, each=4)
        for offset in (1, 2):
            first.commit(offsets={TPS[0]: offset}, asynchronous=False)
        assert direct(first) == 1
        with consumer(process) as second:
            assigned(first, second, each=2)
            mine, others = first.assignment(), second.assignment()
            for offset in (3, 4, 5):
                first.commit(offsets={mine[0]: offset}, asynchronous=False)
                second.commit(offsets={others[0]: offset}, asynchronous=False)
            assert direct(first) == 3 and direct(second) == 2
            assert as_others_see(process) == {TPS[0]: 5, others[0]: 5, mine[0]: 5}


def test_a_member_whose_session_has_ended_is_told_so(process):
    with consumer(process) as c:
        assigned(c, each=4)
        for offset in (1, 2):
            c.commit(offsets={TPS[0]: offset}, asynchronous=False)
        # Somebody says that the member has left.
        with connect(process.bootstrap_servers) as session:
            connection = session.cluster.lease_coordinator("g")
            r = p.LeaveGroupRequest
            gone = r.MemberIdentity(member_id=c.memberid(), group_instance_id=None, reason="")
            connection.request(r(group_id="g", member_id=c.memberid(), members=[gone]))
            connection.close()
        with pytest.raises(BrokerError) as told:
            c.commit(offsets={TPS[0]: 3}, asynchronous=False)
        assert told.value.code in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION)
        assert as_others_see(process) == {TPS[0]: 2}
        poll_until(lambda: not c._membership.lost and len(c.assignment()) == 4, c)
        for offset in (4, 5):
            c.commit(offsets={TPS[0]: offset}, asynchronous=False)
        assert as_others_see(process) == {TPS[0]: 5}
        assert direct(c) == 2


def test_what_has_no_place_in_a_slot_goes_over_tcp(process):
    with connect(process.bootstrap_servers) as session:
        session.admin.create_topic("u", 1)
    other = TopicPartition("u", 0)
    with consumer(process) as c, consumer(process, transport="tcp", **{"group.id": "h"}) as plain:
        assigned(c, plain, each=4)
        for offset in (1, 2, 3):
            c.commit(offsets={TPS[0]: offset}, asynchronous=False)
            c.commit(offsets={other: offset}, asynchronous=False)
            c.commit(offsets={TPS[1]: offset})
            c.commit(offsets={other: offset, TPS[1]: offset})
            plain.commit(offsets={TPS[0]: offset}, asynchronous=False)
        c.commit(offsets={TPS[0]: 4}, asynchronous=False)
        assert as_others_see(process) == {TPS[0]: 4, TPS[1]: 3, other: 3}
        assert direct(c) > 0 and direct(plain) == 0


def test_a_broker_that_offers_none_is_committed_to_over_tcp(broker_process):
    process = broker_process(rdma_commit=False)
    with connect(process.bootstrap_servers) as session:
        session.admin.create_topic("t", 4)
    with consumer(process) as c:
        assigned(c, each=4)
        for offset in range(5):
            c.commit(offsets={TPS[0]: offset}, asynchronous=False)
        assert as_others_see(process) == {TPS[0]: 4} and direct(c) == 0


def test_both_ways_of_a_commit_share_its_time(process, monkeypatch):
    """Where no answer comes one-sidedly, TCP has what is left."""
    with consumer(process, **{"request.timeout.ms": 2000}) as c:
        assigned(c, each=4)
        for offset in (1, 2):
            c.commit(offsets={TPS[0]: offset}, asynchronous=False)
        assert direct(c) == 1
        left = []
        over_tcp = c._membership.commit

        def commit(offsets, timeout_ms=None):
            left.append(timeout_ms)
            os.kill(process.pid, signal.SIGCONT)
            over_tcp(offsets, 30_000)

        monkeypatch.setattr(c._membership, "commit", commit)
        stop_process(process.pid)
        c.commit(offsets={TPS[0]: 3}, asynchronous=False)
        assert direct(c) == 2 and len(left) == 1 and 0 < left[0] < 1500
    assert as_others_see(process) == {TPS[0]: 3}


def test_a_broker_that_is_stopped_holds_nobody_for_ever(process):
    with consumer(process, **{"request.timeout.ms": 1000}) as c:
        assigned(c, each=4)
        for offset in (1, 2):
            c.commit(offsets={TPS[0]: offset}, asynchronous=False)
        stop_process(process.pid)
        try:
            with pytest.raises(KdirectError):
                c.commit(offsets={TPS[0]: 3}, asynchronous=False)
        finally:
            os.kill(process.pid, signal.SIGCONT)

        def again():
            try:
                c.commit(offsets={TPS[0]: 4}, asynchronous=False)
            except KdirectError:
                c.poll(0)
                return False
            return True

        wait_until(again, "a commit that succeeds")
        assert as_others_see(process) == {TPS[0]: 4}
