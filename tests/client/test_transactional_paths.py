"""Transactions of `kdirect.Producer` with our own broker, on each path that batches can take."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

import confluent_kafka
import pyarrow as pa
import pytest

import kdirect
from kdirect import (
    DeliveryError,
    ProducerFencedError,
    TimedOutError,
    TopicPartition,
    TransactionAbortableError,
    TransactionError,
)
from kdirect.broker.handlers_enter import EnterHandlers
from kdirect.client.transaction import AddPartitions, GroupMetadata
from kdirect.client.transaction_link import TransactionLink
from kdirect.wire.cluster import TRANSACTION, Cluster
from tests.support import wait_until

PATHS = {
    "shared": ({}, "rdma"),
    "compare-and-swap": ({"rdma.produce.atomic": "cas"}, "rdma"),
    "write-and-send": ({"rdma.notify": "send"}, "rdma"),
    "exclusive": ({"rdma.produce": "exclusive"}, "rdma"),
    "two-sided": ({"produce.path": "send"}, "send"),
    "tcp": ({"transport": "tcp"}, "tcp"),
}
ALL = pytest.mark.parametrize("path", PATHS)
TOGETHER = pytest.mark.parametrize("path", [path for path in PATHS if path != "exclusive"])


@pytest.fixture
def topic(broker):
    name = f"t{uuid.uuid4().hex[:8]}"
    with kdirect.connect(broker.bootstrap_servers) as session:
        session.admin.create_topic(name, 2, configs={"max.message.bytes": "20000"})
    return name


def ready(broker, name, path="shared", **more):
    settings = {
        "bootstrap.servers": broker.bootstrap_servers,
        "transactional.id": name,
        **PATHS[path][0],
    }
    made = kdirect.Producer({**settings, **more})
    made.init_transactions(30)
    return made


def size(broker, topic):
    """How many offsets both partitions have, those of markers too."""
    with kdirect.Consumer({"bootstrap.servers": broker.bootstrap_servers}) as reader:
        return sum(reader.get_watermark_offsets(TopicPartition(topic, p))[1] for p in range(2))


def read(broker, topic):
    """All values of both partitions, in order, whether they were committed or not."""
    settings = {"bootstrap.servers": broker.bootstrap_servers, "auto.offset.reset": "earliest"}
    with kdirect.Consumer(settings) as reader:
        tps = [TopicPartition(topic, p) for p in range(2)]
        ends = {tp: reader.get_watermark_offsets(tp)[1] for tp in tps}
        values = []
        for tp in tps:
            reader.assign({tp: 0})
            while reader.position(tp) < ends[tp]:
                message = reader.poll(1)
                if message is None:
                    break  # what is left are markers
                values.append(message.value().decode())
    return sorted(values)


def seen_by_librdkafka(broker, topic, count):
    """The first values that a read_committed consumer of librdkafka sees."""
    reader = confluent_kafka.Consumer({
        "bootstrap.servers": broker.bootstrap_servers, "group.id": uuid.uuid4().hex,
        "auto.offset.reset": "earliest", "isolation.level": "read_committed",
    })  # fmt: skip
    reader.assign([confluent_kafka.TopicPartition(topic, p, 0) for p in range(2)])
    values = []
    try:
        while len(values) < count:
            message = reader.poll(20)
            assert message is not None, f"only {values}"
            assert message.error() is None
            values.append(message.value().decode())
    finally:
        reader.close()
    return sorted(values)


@ALL
@pytest.mark.parametrize("linger_ms", [0, 5])
def test_many_transactions(broker, topic, path, linger_ms):
    written = []
    with ready(broker, topic, path, **{"linger.ms": linger_ms}) as made:
        for i in range(20):
            made.begin_transaction()
            for k in range(7):
                made.produce(topic, f"{i}-{k}", partition=k % 2)
                written.append(f"{i}-{k}")
            made.commit_transaction()
        made.begin_transaction()
        big = "b" * 15_000
        offset = made.produce_sync(topic, big, partition=0)
        made.commit_transaction()
        statistics = made.statistics()
    assert offset > 0
    written.append(big)
    assert statistics[f"{PATHS[path][1]}_records"] == len(written), "another path was taken"
    assert seen_by_librdkafka(broker, topic, len(written)) == sorted(written)
    assert read(broker, topic) == sorted(written)
    assert size(broker, topic) == len(written) + 41, "a marker was written twice"


def seen(broker, topic, settings, offset):
    """What our reader of committed records sees of partition 0 from an offset on."""
    tp = TopicPartition(topic, 0)
    base = {"bootstrap.servers": broker.bootstrap_servers, "isolation.level": "read_committed"}
    with kdirect.Consumer({**base, **settings}) as reader:
        end = reader.get_watermark_offsets(tp)[1]
        reader.assign({tp: offset})
        values = []
        while reader.position(tp) < end:
            message = reader.poll(0.5)
            if message is None:
                break  # what is left are markers, or aborted
            values.append((message.offset(), message.value().decode()))
    return values


@TOGETHER
def test_what_is_aborted_is_seen_by_no_reader_of_committed_records(broker, topic, path):
    """Aborted and committed transactions of two producers, batch between batch, and plain
    records."""
    made = [ready(broker, f"{topic}-{i}", path) for i in range(2)]
    plain = kdirect.Producer({"bootstrap.servers": broker.bootstrap_servers, "transport": "tcp"})
    expected = []
    for turn in range(8):
        for one in made:
            one.begin_transaction()
        for k in range(3):
            for i, one in enumerate(made):
                commits = (turn + i) % 3 > 0
                text = f"{turn}-{i}-{k} {'committed' if commits else 'aborted'}"
                offset = one.produce_sync(topic, text, partition=0)
                if commits:
                    expected.append((offset, text))
        text = f"plain {turn}"
        expected.append((plain.produce_sync(topic, text, partition=0), text))
        for i, one in enumerate(made):
            if (turn + i) % 3:
                one.commit_transaction()
            else:
                one.abort_transaction()
    for one in (*made, plain):
        one.close()
    texts = sorted(text for _, text in expected)
    assert seen_by_librdkafka(broker, topic, len(texts)) == texts
    for settings in ({"transport": "shm"}, {"transport": "tcp"}, {"transport": "auto"}):
        for offset in (0, expected[3][0], expected[20][0] + 1):
            wanted = [one for one in expected if one[0] >= offset]
            assert seen(broker, topic, settings, offset) == wanted, settings


@ALL
def test_offsets_are_committed_with_the_records(broker, topic, path):
    tp, group = TopicPartition(topic, 0), GroupMetadata(f"g-{topic}")
    settings = {"bootstrap.servers": broker.bootstrap_servers, "group.id": group.group_id}
    with ready(broker, topic, path) as made, kdirect.Consumer(settings) as reader:
        for turn in range(4):
            made.begin_transaction()
            made.produce(topic, str(turn), partition=turn % 2)
            made.send_offsets_to_transaction({tp: 10 + turn}, group)
            if turn % 2:
                made.abort_transaction()
            else:
                made.commit_transaction()
                made.begin_transaction()  # which finds the one before complete
                made.produce(topic, f"after {turn}", partition=1)
                made.commit_transaction()
            assert reader.committed([tp]) == {tp: 10 + turn - turn % 2}


@ALL
def test_the_next_producer_of_a_name_fences_the_one_before(broker, topic, path):
    old = ready(broker, topic, path)
    old.begin_transaction()
    old.produce(topic, "left open", partition=0)
    old.flush()
    new = ready(broker, topic, path)
    old.produce(topic, "late", partition=0)
    with pytest.raises(TransactionError):
        old.commit_transaction()
    with pytest.raises(ProducerFencedError):
        old.abort_transaction()
    new.begin_transaction()
    new.produce(topic, "new", partition=0)
    new.commit_transaction()
    new.close()
    old.close()
    assert "new" in read(broker, topic)
    assert "late" not in read(broker, topic)


@ALL
def test_a_record_that_is_refused_ends_the_transaction_and_not_the_producer(broker, topic, path):
    failed = []
    with ready(broker, topic, path) as made:
        for i in range(3):
            made.begin_transaction()
            made.produce(topic, f"before {i}", partition=0)
            made.produce(
                topic, b"x" * 50_000, partition=0, on_delivery=lambda e, _: failed.append(e)
            )
            with pytest.raises(TransactionAbortableError):
                made.commit_transaction()
            made.abort_transaction()
            made.begin_transaction()
            made.produce(topic, f"good {i}", partition=0)
            made.commit_transaction()
    assert len(failed) == 3
    assert all(isinstance(e, DeliveryError) for e in failed)
    assert {f"good {i}" for i in range(3)} <= set(read(broker, topic))


@pytest.mark.parametrize("path", ["shared", "exclusive"])
@pytest.mark.parametrize("columns", [False, True], ids=["records", "columns"])
def test_one_request_enters_all_partitions_of_a_leader(broker, monkeypatch, path, columns):
    """What is gathered, or comes in one table, is known when the first batch is sent.  A producer
    that leaves a transaction says that once, too."""
    asked, grants = [], EnterHandlers._grants

    def counted(handlers, connection, request):
        asked.append((sum(len(t.partitions) for t in request.topics), request.leaves))
        return grants(handlers, connection, request)

    monkeypatch.setattr(EnterHandlers, "_grants", counted)
    name = f"t{uuid.uuid4().hex[:8]}"
    with kdirect.connect(broker.bootstrap_servers) as session:
        session.admin.create_topic(name, 12)
    with ready(broker, name, path, **{"linger.ms": 5000}) as made:
        for turn in range(3):
            made.begin_transaction()
            if columns:
                values = pa.array([b"%d" % i for i in range(12)], pa.binary())
                numbers = pa.array(range(12), pa.int32())
                made.send_arrow(pa.table({"value": values, "partition": numbers}), name)
            else:
                for i in range(12):
                    made.produce(name, f"{turn}", partition=i)
            made.commit_transaction()
        assert made.statistics()["rdma_records"] == 36
    leaves = [(12, True)] if path == "exclusive" else []
    assert asked == [(12, False), *leaves] * 3


def test_two_producers_share_a_partition(broker, topic):
    """Each with transactions of its own; the markers of both come between their batches."""
    made = [ready(broker, f"{topic}-{i}") for i in range(2)]
    plain = kdirect.Producer(
        {"bootstrap.servers": broker.bootstrap_servers, "rdma.produce": "shared"}
    )
    for turn in range(10):
        for i, one in enumerate(made):
            one.begin_transaction()
            one.produce(topic, f"{i}-{turn}", partition=0)
        plain.produce(topic, f"plain-{turn}", partition=0)
        for one in made:
            one.commit_transaction()
    for one in (*made, plain):
        one.close()
    names = ("0", "1", "plain")
    assert read(broker, topic) == sorted(f"{n}-{turn}" for n in names for turn in range(10))


def test_a_plain_exclusive_producer_makes_room_for_markers(broker, topic):
    """Its head is recalled: a marker cannot come between WRITEs whose places it counts itself."""
    settings = {"bootstrap.servers": broker.bootstrap_servers, "rdma.produce": "auto"}
    with kdirect.Producer(settings) as plain, ready(broker, topic, "tcp") as made:
        for turn in range(5):
            plain.produce(topic, f"plain-{turn}", partition=0)
            plain.flush()
            made.begin_transaction()
            made.produce(topic, f"mine-{turn}", partition=0)
            made.commit_transaction()
    assert read(broker, topic) == sorted(f"{n}-{i}" for n in ("plain", "mine") for i in range(5))


def test_nobody_waits_while_the_coordinator_is_looked_for(broker, topic, monkeypatch):
    """One thread looks for a coordinator that does not answer; `poll` of another one returns, and
    so does `close`."""
    lease, go_on = Cluster.lease_coordinator, threading.Event()

    def slow(cluster, key, kind, timeout_ms):
        assert kind == TRANSACTION
        assert go_on.wait(30)
        return lease(cluster, key, kind, timeout_ms)

    monkeypatch.setattr(Cluster, "lease_coordinator", slow)
    settings = {"bootstrap.servers": broker.bootstrap_servers, "transactional.id": topic}
    made = kdirect.Producer(settings)
    errors = []

    def begin():
        try:
            made.init_transactions(20)
        except kdirect.KdirectError as e:
            errors.append(e)

    beginner = threading.Thread(target=begin)
    others = [threading.Thread(target=made.poll, args=(0,)), threading.Thread(target=made.close)]
    try:
        beginner.start()
        for other in others:
            other.start()
            other.join(5)
            assert not other.is_alive()
        beginner.join(5)
        assert not beginner.is_alive()
        assert isinstance(errors[0], kdirect.ClosedError)
    finally:
        go_on.set()
        for thread in (beginner, *others):
            thread.join(30)


@pytest.mark.parametrize("ends", [False, True], ids=["goes on", "aborted meanwhile"])
def test_nobody_waits_while_a_partition_is_added(broker, topic, monkeypatch, ends):
    """In the first protocol the client asks, and the coordinator may be slow: other threads use the
    producer meanwhile, and may even end the transaction."""
    choose, send, go_on = TransactionLink._choose_protocol, TransactionLink._send, threading.Event()
    asking = threading.Event()

    def first(link, connection):
        choose(link, connection)
        link._machine.version = 1

    def slow(link, request, left_ms):
        if isinstance(request, AddPartitions):
            asking.set()
            if not go_on.is_set():
                link._not_before = link._monotonic() + 0.01
                return
        send(link, request, left_ms)

    monkeypatch.setattr(TransactionLink, "_choose_protocol", first)
    monkeypatch.setattr(TransactionLink, "_send", slow)
    made = ready(broker, topic)
    made.begin_transaction()
    errors = []

    def told(error, message):
        errors.append(error)

    def produce():
        with suppress(TransactionError):  # of what comes after the end
            for i in range(3):
                made.produce(topic, f"{i}", partition=0, on_delivery=told)

    threads = [threading.Thread(target=produce)]
    try:
        threads[0].start()
        assert asking.wait(30)
        threads.append(threading.Thread(target=made.poll, args=(0,)))
        threads.append(threading.Thread(target=made.statistics))
        if ends:
            threads.append(threading.Thread(target=made.abort_transaction))
        for thread in threads[1:]:
            thread.start()
            thread.join(20)
            assert not thread.is_alive(), "it waits for the lock"
        assert threads[0].is_alive() or ends
    finally:
        go_on.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join(30)
    if not ends:
        made.commit_transaction()
    made.begin_transaction()
    made.produce(topic, "after", partition=1)
    made.commit_transaction()
    made.close()
    assert seen_by_librdkafka(broker, topic, 1 if ends else 4)[-1] == "after"
    assert [e is None for e in errors] == ([False] if ends else [True] * 3)


def test_a_coordinator_that_is_found_too_late_is_left(broker, topic, monkeypatch):
    """Nobody takes what the search has found, so `close` ends that connection."""
    lease, found = Cluster.lease_coordinator, []

    def slow(cluster, key, kind, timeout_ms):
        time.sleep(0.3)
        found.append(lease(cluster, key, kind, 10_000))
        return found[0]

    monkeypatch.setattr(Cluster, "lease_coordinator", slow)
    settings = {"bootstrap.servers": broker.bootstrap_servers, "transactional.id": topic}
    made = kdirect.Producer(settings)
    with pytest.raises(TimedOutError):
        made.init_transactions(0.1)
    wait_until(lambda: bool(found), 20)
    made.close()
    wait_until(lambda: found[0].closed, 20)


def test_the_example_runs_to_its_end():
    example = Path(__file__).resolve().parents[2] / "examples/exactly_once.py"
    run = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout == "10 transactions committed, 4 aborted, written over shared\n"
