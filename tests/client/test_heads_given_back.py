"""Heads that a producer gives back while records are under way: it does so though its program calls
nothing more."""

from __future__ import annotations

import signal
import uuid

import pytest

import kdirect
from kdirect import TopicPartition
from kdirect.client.run_partition import RUN_BYTES
from tests.support import stop_process, wait_until


def settings_of(broker):
    return {
        "bootstrap.servers": broker.bootstrap_servers,
        "transport": "shm",
        "rdma.produce": "exclusive",
    }


def make_topic(broker, partitions):
    name = f"t{uuid.uuid4().hex[:8]}"
    with kdirect.connect(settings_of(broker)) as session:
        session.admin.create_topic(name, partitions)
    return name


def test_records_without_a_key_that_have_moved_on(broker):
    """They have no callbacks, so that no call has to look for what became of them.  Others get the
    partition that was left."""
    topic = make_topic(broker, 2)
    with kdirect.Producer(settings_of(broker)) as producer:
        for _ in range(RUN_BYTES // 1000 + 10):
            producer.produce(topic, b"x" * 1000)
        paths = producer._driver.paths
        wait_until(
            lambda: sorted(paths().values()) == ["exclusive", "idle"],
            f"the one of before is given back: {paths()}",
        )
        (left,) = (tp.partition for tp, path in paths().items() if path == "idle")
        with kdirect.Producer(settings_of(broker)) as other:
            other.produce(topic, b"other", partition=left)
            other.flush()
            assert other._driver.paths() == {TopicPartition(topic, left): "exclusive"}


@pytest.mark.parametrize("headers", [None, {"a": b"b"}])
def test_records_that_come_while_it_is_given_back(broker_process, headers):
    """The first of them is not answered before the broker goes on."""
    broker = broker_process()
    topic = make_topic(broker, 1)
    tp = TopicPartition(topic, 0)
    with kdirect.Producer(settings_of(broker)) as producer:
        assert producer.produce_sync(topic, b"0", partition=0) == 0
        stop_process(broker.process.pid)
        try:
            producer.produce(topic, b"1", partition=0)
            with producer._lock:
                producer._driver.give_back(tp)
            producer.produce(topic, b"2", partition=0, headers=headers)
            assert producer._driver.paths() == {tp: "exclusive"}
        finally:
            broker.process.send_signal(signal.SIGCONT)
        wait_until(lambda: producer._driver.paths() == {tp: "idle"}, "it is given back")
