"""Handles on the connections of a process: what sharing them means, and what a close ends."""

from __future__ import annotations

import gc

import pytest

import kdirect
from kdirect.errors import ClosedError
from kdirect.model import TopicPartition

TP = TopicPartition("t", 0)


@pytest.fixture
def settings(broker):
    settings = {"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"}
    with kdirect.connect(settings) as session:
        session.admin.create_topic("t", 1)
        with session.producer() as producer:
            for i in range(10):
                producer.produce("t", b"%d" % i, partition=0)
    return settings


def opened(broker):
    return broker.statistics()["broker_requests_by_api"]["OpenQueuePair"]


def test_handles_share_connections_and_do_not_close_each_other(broker, settings):
    first, second = kdirect.connect(settings), kdirect.connect(settings)
    assert first is not second and first.cluster is second.cluster
    first.close()
    first.close()
    assert first.closed and not second.closed
    assert second.watermarks([TP]) == {TP: (0, 10)}
    for use in (lambda: first.cluster, lambda: first.reader(TP, 0, 1), lambda: first.transport):
        with pytest.raises(ClosedError, match="session is closed"):
            use()
    cluster = second.cluster
    second.close()
    with pytest.raises(ClosedError):
        cluster.topics()
    with kdirect.connect(settings) as third:
        assert third.cluster is not cluster and third.list_topics() == {"t": 1}


def test_a_handle_that_is_dropped_leaves_the_connections_for_the_next(settings):
    cluster = kdirect.connect(settings).cluster
    gc.collect()
    assert kdirect.connect(settings).cluster is cluster


def test_an_admin_client_keeps_its_connections(settings):
    admin = kdirect.connect(settings).admin
    gc.collect()
    kdirect.connect(settings).close()
    assert list(admin.list_topics()) == ["t"]


def test_a_consumer_ends_its_own_use_alone(settings):
    with kdirect.connect(settings) as session:
        with kdirect.Consumer(settings) as consumer:
            consumer.assign({TP: 0})
            assert consumer.poll(10).value() == b"0"
        assert session.watermarks([TP]) == {TP: (0, 10)}
        cluster = session.cluster
    with kdirect.Consumer(settings) as consumer:
        assert list(consumer.list_topics()) == ["t"]
        again = consumer._session.cluster
        assert again is not cluster
    with pytest.raises(ClosedError):
        again.topics()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_reader_is_iterated_and_says_where_it_is(settings, transport):
    with kdirect.connect({**settings, "transport": transport}) as session:
        with session.reader(TP, 2, 8, target_rows=1) as reader:
            assert reader.next_offset == 2
            offsets = []
            for batch in reader:
                offsets += batch.column("offset").to_pylist()
                assert reader.next_offset == offsets[-1] + 1
                if len(offsets) == 3:
                    break
            assert [b.column("offset")[0].as_py() for b in reader] == [5, 6, 7], "it goes on"
            assert offsets == [2, 3, 4] and reader.next_offset == 8
            assert list(reader) == []
        assert reader.statistics()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_place_of_a_reader_does_not_pass_the_end_of_its_range(broker, settings, transport):
    with kdirect.Producer({**settings, "linger.ms": 1000}) as producer:
        for i in range(10):
            producer.produce("t", b"%d" % i, partition=0)  # in one batch, from offset 10 on
    with kdirect.connect({**settings, "transport": transport}) as session:
        for stop in (11, 12, 15, 20):
            with session.reader(TP, 10, stop) as reader:
                assert [b.column("offset").to_pylist() for b in reader] == [[*range(10, stop)]]
                assert reader.next_offset == stop


def test_a_reader_that_was_closed_serves_the_next(broker, settings):
    with kdirect.connect(settings) as session:
        with session.reader(TP, 0, 5) as reader:
            assert sum(b.num_rows for b in reader) == 5
        before = opened(broker)
        with session.reader(TP, 5, 10) as reader:
            assert sum(b.num_rows for b in reader) == 5
        assert opened(broker) == before


def test_what_users_see_of_a_consumer():
    seen = [name for name in dir(kdirect.Consumer) if not name.startswith("_")]
    assert sorted(seen) == [
        "assign",
        "assignment",
        "close",
        "commit",
        "committed",
        "consume",
        "consumer_group_metadata",
        "get_watermark_offsets",
        "incremental_assign",
        "incremental_unassign",
        "list_topics",
        "memberid",
        "offsets_for_times",
        "pause",
        "paused",
        "poll",
        "poll_arrow",
        "position",
        "resume",
        "seek",
        "statistics",
        "store_offsets",
        "subscribe",
        "unassign",
        "unsubscribe",
    ]
    assert "Record" not in dir(kdirect)
