"""One producer and two brokers: each has a link of its own, over a transport of its own, and one
that goes takes down its own partitions only.  Real brokers, behind one session."""

from __future__ import annotations

import contextlib

import pytest

from kdirect.client import connect
from kdirect.client.produce_driver import ProduceDriver
from kdirect.errors import QueuePairError
from kdirect.format.codec import encode_records
from kdirect.model import TopicPartition
from kdirect.options import CLIENT

NEAR, FAR = TopicPartition("near", 0), TopicPartition("far", 0)


class OneCluster:
    """The metadata of several brokers behind one answer: each topic is led by a broker of its
    own."""

    def __init__(self, sessions):
        self._sessions = sessions
        first = next(iter(sessions.values())).cluster
        self.environment, self.settings = first.environment, first.settings
        self.timeout_ms, self.backoff = first.timeout_ms, first.backoff

    has_several_brokers = True

    def _of(self, tp):
        return self._sessions[tp.topic].cluster

    def leader_address(self, tp):
        return self._of(tp).leader_address(tp)

    def leader_address_at_hand(self, tp):
        return self._of(tp).leader_address_at_hand(tp)

    def connection_for(self, tp, channel="control", timeout_ms=None):
        return self._of(tp).connection_for(tp, channel, timeout_ms)

    def connection_at_hand(self, tp, channel="control"):
        return self._of(tp).connection_at_hand(tp, channel)

    def has_reached(self, channel):
        return all(session.cluster.has_reached(channel) for session in self._sessions.values())

    def leader_epoch(self, tp):
        return self._of(tp).leader_epoch(tp)

    def forget(self, topic):
        self._sessions[topic].cluster.forget(topic)


class OneSession:
    """What a producer needs of a session, over several brokers."""

    closed = False

    def __init__(self, sessions):
        self._sessions = sessions
        self.cluster = OneCluster(sessions)
        self.environment = self.cluster.environment

    def transport_to(self, tp):
        return self._sessions[tp.topic].transport_to(tp)

    def channel(self, tp, **sizes):
        return self._sessions[tp.topic].channel(tp, **sizes)

    def messages(self, tp, settings):
        return self._sessions[tp.topic].messages(tp, settings)

    def new_producer_id(self):
        return next(iter(self._sessions.values())).new_producer_id()


@pytest.fixture
def two(broker_process):
    """Makes (sessions by topic, a driver of both): the second broker by this transport."""
    with contextlib.ExitStack() as stack:

        def make(transport, **settings):
            sessions = {}
            for tp, over in ((NEAR, "shm"), (FAR, transport)):
                servers = broker_process().bootstrap_servers
                session = connect({"bootstrap.servers": servers, "transport": over})
                stack.callback(session.close)
                session.admin.create_topic(tp.topic, 1)
                sessions[tp.topic] = session
            resolved = CLIENT.resolve({"bootstrap.servers": "two:1", **settings})
            driver = ProduceDriver(OneSession(sessions), resolved)
            stack.callback(driver.abort)
            return sessions, driver

        yield make


def send(driver, tp, *values):
    for value in values:
        driver.send(tp, encode_records([(None, value, [], 1)]), 1, value)


def delivered(driver):
    """The values that were delivered; nothing has failed."""
    assert driver.wait_answered(20_000)
    outcomes = driver.outcomes()
    assert all(error is None for _, _, error in outcomes), outcomes
    return [value for value, _, _ in outcomes]


def log_of(session, tp):
    end = session.latest_offsets([tp])[tp]
    batches = session.reader(tp, 0, end).batches()
    return [value for batch in batches for value in batch.column("value").to_pylist()]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_each_partition_is_written_over_the_transport_to_its_leader(two, transport):
    sessions, driver = two(transport)
    for i in range(50):
        send(driver, NEAR, b"near %d" % i)
        send(driver, FAR, b"far %d" % i)
    assert len(delivered(driver)) == 100
    far = "exclusive" if transport == "shm" else "tcp"
    assert driver.paths() == {NEAR: "exclusive", FAR: far}
    counts = driver.statistics()
    assert counts["rdma_records"] == (100 if transport == "shm" else 50)
    assert len(list(driver.links)) == (2 if transport == "shm" else 1)
    assert log_of(sessions["near"], NEAR) == [b"near %d" % i for i in range(50)]
    assert log_of(sessions["far"], FAR) == [b"far %d" % i for i in range(50)]


def test_requests_in_sends_have_a_queue_pair_to_each_broker(two):
    sessions, driver = two("shm", **{"produce.path": "send"})
    for i in range(20):
        send(driver, NEAR, b"%d" % i)
        send(driver, FAR, b"%d" % i)
    assert len(delivered(driver)) == 40
    assert driver.paths() == dict.fromkeys((NEAR, FAR), "two-sided")
    first, second = (link.messages_at_hand for link in driver.links)
    assert first is not second and driver.statistics()["send_records"] == 40
    for tp in (NEAR, FAR):
        assert log_of(sessions[tp.topic], tp) == [b"%d" % i for i in range(20)]


def test_a_queue_pair_that_breaks_takes_down_its_own_partitions_only(two):
    sessions, driver = two("shm")
    send(driver, NEAR, b"0")
    send(driver, FAR, b"0")
    delivered(driver)
    near, far = driver.appender(NEAR), driver.appender(FAR)
    assert near.link is not far.link
    near.channel.qp.close()
    with contextlib.suppress(QueuePairError):
        send(driver, NEAR, b"1")
    send(driver, FAR, b"1")
    assert sorted(delivered(driver)) == [b"1", b"1"]
    assert driver.appender(FAR) is far and not far.broken
    assert driver.appender(NEAR) is not near
    for tp in (NEAR, FAR):
        assert log_of(sessions[tp.topic], tp) == [b"0", b"1"]
