"""What hears of it when a topic is deleted: a producer whose records are not acknowledged yet, and
a planner that watches where the log ends, also where another topic has the name by then."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import kdirect
from kdirect.errors import DeliveryError, UnknownTopicError
from kdirect.model import TopicPartition
from tests.support import BrokerProcess, wait_until

TP = TopicPartition("t", 0)
PATHS: dict[str, dict[str, Any]] = {
    "tcp": {"transport": "tcp"},
    "exclusive": {"transport": "shm", "rdma.produce": "exclusive"},
    "shared": {"transport": "shm", "rdma.produce": "shared"},
}


@contextmanager
def disk_held_up(broker: kdirect.Broker, tp: TopicPartition) -> Iterator[threading.Event]:
    """Nothing more of a partition gets to the disk until the block ends; set: something is to."""
    waiting, may_sync = threading.Event(), threading.Event()
    disk = broker._server.logs.partitions[tp]._disk
    sync = disk.sync

    def held(segments: Any, end_offset: int) -> None:
        waiting.set()
        assert may_sync.wait(60)
        sync(segments, end_offset)

    disk.sync = held
    try:
        yield waiting
    finally:
        may_sync.set()


@pytest.mark.parametrize("path", ["exclusive", "shared"])
def test_what_waits_for_the_disk_fails_when_its_topic_is_deleted(tmp_path: Path, path: str) -> None:
    """Nobody told these producers: they heard of it at the end of delivery.timeout.ms."""
    failed: list[Any] = []
    with kdirect.Broker(tmp_path, log_flush_before_ack=True) as broker:
        servers = {"bootstrap.servers": broker.bootstrap_servers}
        with kdirect.connect(servers) as session:
            session.admin.create_topic(TP.topic, 1)
            with closing(kdirect.Producer({**servers, **PATHS[path]})) as producer:
                producer.produce(TP.topic, b"on disk", partition=0)
                assert producer.flush(10) == 0
                assert producer.statistics()["paths"] == {str(TP): path}
                with disk_held_up(broker, TP) as waiting:
                    producer.produce(
                        TP.topic, b"v", partition=0, on_delivery=lambda e, m: failed.append(e)
                    )
                    assert waiting.wait(10) and not failed
                    began = time.monotonic()
                    session.admin.delete_topic(TP.topic)
                    wait_until(lambda: (producer.poll(0), failed)[1], "the producer heard of it")
                assert time.monotonic() - began < 20  # delivery.timeout.ms is 120 s
    (error,) = failed
    assert isinstance(error, DeliveryError) and isinstance(error.__cause__, UnknownTopicError)


def settings(broker: kdirect.Broker | BrokerProcess, transport: str) -> dict[str, str]:
    return {"bootstrap.servers": broker.bootstrap_servers, "transport": transport}


def put(session: kdirect.Session, topic: str, records: int) -> None:
    session.admin.create_topic(topic, 1)
    with session.producer() as producer:
        for _ in range(records):
            producer.produce_sync(topic, b"v", None, partition=0)


def put_elsewhere(broker: BrokerProcess | kdirect.Broker, topic: str, records: int) -> None:
    """Delete the topic, and give its name to another, unseen by the session under test."""
    with kdirect.connect(settings(broker, "tcp") | {"client.id": "other"}) as other:
        other.admin.delete_topic(topic)
        put(other, topic, records)


def id_of(session: kdirect.Session, topic: str) -> dict[str, str]:
    found = session.admin.list_topics()[topic].topic_id
    assert found is not None
    return {topic: found}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_watermarks_of_a_topic_that_was_deleted_and_created_again(transport: str) -> None:
    """A planner must learn of it even where the new topic has more records than the old one:
    offsets alone show nothing.  It is told until it knows the new topic's id."""
    with kdirect.Broker() as broker, kdirect.connect(settings(broker, transport)) as session:
        put(session, TP.topic, 1)
        old = id_of(session, TP.topic)
        assert session.watermarks([TP], topic_ids=old) == {TP: (0, 1)}
        put_elsewhere(broker, TP.topic, 2)
        for _ in range(3):
            with pytest.raises(UnknownTopicError, match="t-0 was deleted"):
                session.watermarks([TP], topic_ids=old)
        assert session.watermarks([TP]) == {TP: (0, 2)}
        with pytest.raises(UnknownTopicError, match="t-0 was deleted"):
            session.watermarks([TP], topic_ids=old)
        new = id_of(session, TP.topic)
        assert session.watermarks([TP], topic_ids=new) == {TP: (0, 2)}


def test_watermarks_whose_slots_were_lost_tell_of_another_topic(tmp_path: Path) -> None:
    """No slot is there to say that the topic was deleted: the broker that had it is gone."""
    broker = BrokerProcess(tmp_path / "log").start()
    with kdirect.connect(settings(broker, "shm")) as session:
        put(session, TP.topic, 1)
        old = id_of(session, TP.topic)
        assert session.watermarks([TP], topic_ids=old) == {TP: (0, 1)}
        put_elsewhere(broker, TP.topic, 2)
        broker.kill()
        broker.start()
        with pytest.raises(UnknownTopicError, match="t-0 was deleted"):
            session.watermarks([TP], topic_ids=old)
        assert session.watermarks([TP], topic_ids=id_of(session, TP.topic)) == {TP: (0, 2)}
    broker.stop()


def test_a_broker_that_is_behind_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cluster, one that has not heard of the topic yet may be asked for its id."""
    with kdirect.Broker() as broker, kdirect.connect(settings(broker, "shm")) as session:
        put(session, TP.topic, 1)
        known = id_of(session, TP.topic)
        cluster = session._shared.cluster
        refresh, answers = cluster.refresh, [{}]
        monkeypatch.setattr(
            cluster, "refresh", lambda *a, **k: answers.pop() if answers else refresh(*a, **k)
        )
        with pytest.raises(UnknownTopicError, match="t-0 was deleted"):
            session.watermarks([TP], topic_ids=known)
        assert not answers
        assert session.watermarks([TP], topic_ids=known) == {TP: (0, 1)}


def test_a_topic_that_is_being_deleted_is_not_listed(tmp_path: Path) -> None:
    """It is unknown to who asks for it by its name; a planner that listed it took the next topic
    of its name for it."""
    with kdirect.Broker(tmp_path) as broker, kdirect.connect(settings(broker, "tcp")) as session:
        put(session, TP.topic, 1)
        partition = broker.server.logs.partitions[TP]
        revoke, listed = partition.kernel.revoke_slots, []

        class Kernel:
            def __getattr__(self, name: str) -> Any:
                return getattr(kernel, name)

            def revoke_slots(self) -> None:
                with kdirect.connect(settings(broker, "tcp") | {"client.id": "other"}) as other:
                    listed.append(other.admin.list_topics())
                revoke()

        kernel, partition.kernel = partition.kernel, Kernel()
        session.admin.delete_topic(TP.topic)
        assert listed and all(TP.topic not in topics for topics in listed)
