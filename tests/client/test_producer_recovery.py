"""A producer whose broker is killed, stopped, or takes access back: what was under way is repeated
without being asked for, and no call waits longer than it is told.  Real brokers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import os
import signal
import socket
import threading
import time
import weakref

import pyarrow as pa
import pytest

import kdirect
from kdirect.client import connect
from kdirect.errors import (
    BrokerUnavailableError,
    BufferFullError,
    DeliveryError,
    KdirectError,
    TimedOutError,
)
from kdirect.model import TopicPartition
from tests.support import stop_process, wait_until

PATHS = pytest.mark.parametrize("transport", ["shm", "tcp"])


@pytest.fixture
def served(broker_process):
    """(broker, settings) with topic `t`; producers made of the settings."""

    def make(partitions=1, **settings):
        broker = broker_process()
        connect(broker.bootstrap_servers).admin.create_topic("t", partitions)
        return broker, {
            "bootstrap.servers": broker.bootstrap_servers,
            **{k.replace("_", "."): v for k, v in settings.items()},
        }

    return make


@contextlib.contextmanager
def stopped(broker):
    """Every thread of the broker's process stands."""
    stop_process(broker.pid)
    try:
        yield
    finally:
        with contextlib.suppress(AssertionError, ProcessLookupError):
            os.kill(broker.pid, signal.SIGCONT)


def values(broker, partition=0):
    with kdirect.Consumer(
        {"bootstrap.servers": broker.bootstrap_servers, "transport": "tcp"}
    ) as consumer:
        tp = TopicPartition("t", partition)
        consumer.assign({tp: 0})
        end = consumer.get_watermark_offsets(tp)[1]
        return [consumer.poll(10).value() for _ in range(end)]


def longest(call, seconds):
    """How long the longest of many calls within `seconds` took."""
    most, until = 0.0, time.monotonic() + seconds
    while (began := time.monotonic()) < until:
        with contextlib.suppress(BufferFullError):
            call()
        most = max(most, time.monotonic() - began)
    return most


# -- what was under way is repeated ----------------------------------------------------------------


@PATHS
@pytest.mark.parametrize("how", ["futures", "polls"])
def test_what_was_under_way_when_the_broker_was_killed_is_repeated_by_itself(
    served, transport, how
):
    """Nobody asks for the result: the thread repeats it for a future, `poll(0)` for a report."""
    broker, settings = served(transport=transport, delivery_timeout_ms=60_000)
    with kdirect.Producer(settings) as producer:
        producer.produce_sync("t", b"first")
        told = []
        with stopped(broker):
            if how == "futures":
                future = producer.send("t", b"under way")
            else:
                producer.produce(
                    "t", b"under way", on_delivery=lambda e, m: told.append((e, m.offset()))
                )
            time.sleep(0.1)  # until it has left
            broker.kill()
        broker.start()
        began = time.monotonic()
        if how == "futures":
            assert concurrent.futures.wait([future], 30).done and future.result(0).offset() >= 0
        else:
            while not told and time.monotonic() - began < 30:
                producer.poll(0)
                time.sleep(0.01)
            assert told and told[0][0] is None
        assert time.monotonic() - began < 20
    assert values(broker) == [b"first", b"under way"]


def test_what_was_under_way_when_the_queue_pair_broke_is_repeated_by_itself(served):
    broker, settings = served(transport="shm")
    with kdirect.Producer(settings) as producer:
        producer.produce_sync("t", b"first")
        path = producer._driver.appender(TopicPartition("t", 0))
        with stopped(broker):
            future = producer.send("t", b"under way")
            path.channel.qp.close()
        assert concurrent.futures.wait([future], 30).done and future.result(0).offset() == 1
    assert values(broker) == [b"first", b"under way"]


def test_one_partition_that_expires_does_not_take_the_others_with_it(served):
    """They share a queue pair, which ends with the requests that are given up."""
    broker, settings = served(3, transport="shm", delivery_timeout_ms=3000)
    with kdirect.Producer(settings) as producer:
        for partition in range(3):
            producer.produce_sync("t", b"first", partition=partition)
        with stopped(broker):
            overdue = producer.send("t", b"overdue", partition=0)
            time.sleep(2)
            kept = producer.send("t", b"kept", partition=1)
            until = time.monotonic() + 20
            while not overdue.done() and time.monotonic() < until:
                producer.poll(0.1)  # raises nothing
            assert (
                isinstance(overdue.exception(0), DeliveryError)
                and overdue.exception(0).maybe_committed
            )
            assert not kept.done()
        assert concurrent.futures.wait([kept], 30).done and kept.exception(0) is None
        assert producer.flush() == 0
        assert producer.produce_sync("t", b"last", partition=2) == 1
    assert values(broker, 1) == [b"first", b"kept"]


# -- no call waits longer than it is told ----------------------------------------------------------


def test_a_full_send_buffer_over_tcp_is_told_at_once_and_its_records_fail_in_time(served):
    """Fewer requests than the window: only their bytes are too many."""
    broker, settings = served(
        transport="tcp",
        linger_ms=1,
        max_block_ms=0,
        delivery_timeout_ms=3000,
        send_buffer_bytes=1 << 20,
        batch_bytes=256 << 10,
    )
    producer = kdirect.Producer(settings)
    producer.produce_sync("t", b"first")
    with stopped(broker):
        assert longest(lambda: producer.produce("t", b"v" * 20_000), 5) < 1.5
        assert producer.statistics()["failed_records"] > 0
        began = time.monotonic()
        with pytest.raises(DeliveryError):
            producer.flush(0.1)
        assert time.monotonic() - began < 1.5
    producer.abort()


@pytest.mark.parametrize("way", ["tcp", "send"])
def test_what_comes_after_requests_that_were_given_up_does_not_wait_for_the_broker(served, way):
    """The partition is written by a new appender then, and the broker is no stranger to it."""
    more = {"transport": "tcp"} if way == "tcp" else {"transport": "shm", "produce_path": "send"}
    broker, settings = served(
        linger_ms=1, max_block_ms=0, request_timeout_ms=2500, batch_bytes=65536, **more
    )
    with kdirect.Producer(settings) as producer:
        producer.produce_sync("t", b"first")
        with stopped(broker):
            producer.produce("t", b"given up")
            wait_until(
                lambda: (
                    producer.poll(0.01)
                    or producer._driver.appender(TopicPartition("t", 0)).connected is False
                )
            )
            producer.purge()
            assert longest(lambda: producer.produce("t", b"next"), 1) < 1.5
            assert longest(lambda: producer.poll(0.01), 1) < 1.5
            producer.purge()
        assert producer.produce_sync("t", b"last") > 0
    assert values(broker)[0] == b"first" and values(broker)[-1] == b"last"


def test_a_socket_that_is_full_holds_nobody_up_and_the_rest_leaves_later(served):
    broker, settings = served(
        transport="tcp",
        linger_ms=1,
        max_block_ms=0,
        send_buffer_bytes=64 << 20,
        buffer_memory=64 << 20,
    )
    sent = []

    def produce():
        producer.produce("t", b"%d " % len(sent) + b"v" * 200_000)
        sent.append(b"%d" % len(sent))

    with kdirect.Producer(settings) as producer:
        producer.produce_sync("t", b"first")
        with stopped(broker):
            assert longest(produce, 3) < 1.5
            assert len(producer) == len(sent) > 20, "more than a socket holds"
        assert producer.flush() == 0
    assert [v.split()[0] for v in values(broker)] == [b"first", *sent]


def test_acks_0_leaves_when_the_socket_has_room(served):
    broker, settings = served(
        transport="tcp",
        acks=0,
        linger_ms=1,
        max_block_ms=0,
        send_buffer_bytes=64 << 20,
        buffer_memory=64 << 20,
    )
    with kdirect.Producer(settings) as producer:
        producer.produce("t", b"first", partition=0)
        assert producer.flush() == 0
        with stopped(broker):
            for i in range(60):
                producer.produce("t", b"%d " % i + b"v" * 200_000, partition=0)
        assert producer.flush(30) == 0
        until = time.monotonic() + 30
        while len(values(broker)) < 61 and time.monotonic() < until:
            time.sleep(0.05)
    assert [v.split()[0] for v in values(broker)] == [b"first", *(b"%d" % i for i in range(60))]


def test_the_end_of_a_run_while_the_broker_stands_holds_nobody_up(served):
    """Records without a key change their partition every 8 MiB, which takes two requests."""
    broker, settings = served(
        3, transport="shm", max_block_ms=0, delivery_timeout_ms=60_000, request_timeout_ms=3000
    )
    with kdirect.Producer(settings) as producer:
        producer.produce_sync("t", b"first")
        taken = 0

        def produce():
            nonlocal taken
            producer.produce("t", b"%d " % taken + b"v" * 2000)
            taken += 1

        with stopped(broker):
            assert longest(produce, 3) < 1
        assert producer.flush() == 0
        before = taken
        while taken < before + 30_000:  # 60 MB
            try:
                produce()
            except BufferFullError:
                time.sleep(0.0005)
        assert producer.flush() == 0
    in_log = [[int(v.split()[0]) for v in values(broker, p) if v != b"first"] for p in range(3)]
    assert sorted(n for log in in_log for n in log) == list(range(taken))
    assert all(log and log[-1] >= before for log in in_log), (
        "a run goes on elsewhere once the broker answers"
    )


def test_abort_does_not_wait_for_a_broker_that_stands(served):
    broker, settings = served(3, transport="shm", request_timeout_ms=20_000)
    producer = kdirect.Producer(settings)
    for partition in range(3):
        producer.produce_sync("t", b"first", partition=partition)
    with stopped(broker):
        future = producer.send("t", b"under way", partition=0)
        began = time.monotonic()
        producer.abort()
        assert time.monotonic() - began < 2
        assert future.exception(0).maybe_committed
    with kdirect.Producer(
        {**settings, "rdma.produce": "exclusive"}
    ) as other:  # the broker has seen it go
        assert other.produce_sync("t", b"other", partition=1) == 1


@PATHS
@pytest.mark.parametrize("call", ["flush", "poll", "result"])
def test_a_thread_that_waits_lets_others_produce(served, transport, call):
    broker, settings = served(transport=transport, linger_ms=5, max_block_ms=0)
    producer = kdirect.Producer(settings)
    producer.produce_sync("t", b"first")
    ends = threading.Event()

    def wait():
        with contextlib.suppress(TimedOutError):
            while not ends.is_set():
                {"flush": producer.flush, "poll": producer.poll, "result": waited.result}[call](
                    60 if call == "result" else 0.5
                )

    with stopped(broker):
        waited = producer.send("t", b"under way")
        time.sleep(0.05)
        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.1)
        times = []
        until = time.monotonic() + 3
        while (began := time.monotonic()) < until:
            with contextlib.suppress(BufferFullError):
                producer.produce("t", b"more")
            times.append(time.monotonic() - began)
            time.sleep(0.001)
        ends.set()
    thread.join(60)
    producer.flush()
    producer.abort()
    times.sort()
    assert len(times) > 30 and times[len(times) // 2] < 0.05, (
        len(times),
        times[len(times) // 2],
        times[-1],
    )


# -- callbacks of futures run without the producer's lock ------------------------------------------


@PATHS
def test_a_done_callback_may_take_a_lock_that_a_thread_in_produce_holds(served, transport):
    broker, settings = served(transport=transport)
    mine, begun, got = threading.Lock(), threading.Event(), []

    def on_done(future):
        begun.set()
        got.append(mine.acquire(timeout=20))

    with kdirect.Producer(settings) as producer:
        producer.produce_sync("t", b"first")
        with mine:
            with stopped(broker):
                future = producer.send("t", b"second")
                future.add_done_callback(on_done)
            assert begun.wait(20)
            producer.produce("t", b"third")  # while the callback waits for this thread
        assert producer.flush() == 0
        assert wait_until(lambda: got == [True])
        mine.release()
    assert values(broker) == [b"first", b"second", b"third"]


@PATHS
def test_a_record_sent_by_a_done_callback_is_not_lost(served, transport):
    """Its batch is refused when it is sent; the callback sends into the same partition then."""
    broker, settings = served(transport=transport, linger_ms=20)
    connect(settings).admin.alter_configs("t", {"max.message.bytes": "1000"})
    again = []

    def on_done(future):
        again.append(producer.send("t", b"shorter"))

    with kdirect.Producer(settings) as producer:
        producer.send("t", os.urandom(5000)).add_done_callback(on_done)
        assert wait_until(lambda: again and again[0].done())
        assert again[0].exception(0) is None and producer.flush() == 0
        purged = producer.send("t", b"purged")
        purged.add_done_callback(on_done)
        producer.purge()
        assert isinstance(purged.exception(0), DeliveryError)
        assert again[1].result(20).offset() == 1
    assert values(broker) == [b"shorter", b"shorter"]


def test_thousands_of_done_callbacks_send_again_and_one_waits(served):
    broker, settings = served(transport="tcp", linger_ms=5)
    done = []

    def on_done(future):
        if future.result(0).value() == b"0":
            done.append(producer.send("t", b"waited for").result(20))
        else:
            done.append(producer.send("t", b"again"))

    with kdirect.Producer(settings) as producer:
        for i in range(3000):
            producer.send("t", b"%d" % i).add_done_callback(on_done)
        assert wait_until(lambda: len(done) == 3000)
        assert producer.flush() == 0
    assert len(values(broker)) == 6000


# -- what was taken is taken once, and sent --------------------------------------------------------


@pytest.mark.parametrize(
    "extra", [{"headers": {"h": b"1"}}, {"compression_type": "lz4"}], ids=["headers", "compression"]
)
def test_a_record_that_produce_raised_for_was_not_taken(served, extra):
    """Its partition has no path yet, and the broker is away: what is tried again until it is taken
    is in the log once."""
    more = {k: v for k, v in extra.items() if k != "headers"}
    broker, settings = served(2, transport="shm", connect_timeout_ms=300, **more)
    with kdirect.Producer(settings) as producer:
        producer.produce_sync("t", b"first", partition=0)
        broker.kill()
        time.sleep(0.2)
        taken = False
        try:
            producer.produce("t", b"once", partition=1, headers=extra.get("headers"))
            taken = True
        except KdirectError:
            assert len(producer) == 0, "raised, and taken all the same"
        broker.start()
        if not taken:
            producer.produce("t", b"once", partition=1)
        assert producer.flush() == 0
    assert values(broker, 1) == [b"once"]


@PATHS
@pytest.mark.parametrize("linger", [0, 300])
def test_a_producer_that_is_dropped_sends_what_it_has_first_and_goes_then(
    served, transport, linger
):
    broker, settings = served(transport=transport, linger_ms=linger)

    def produce():
        producer = kdirect.Producer(settings)
        for i in range(10):
            producer.produce("t", b"%d" % i, headers={"h": b""})
        return weakref.ref(producer)

    dropped = produce()
    gc.collect()
    assert wait_until(lambda: len(values(broker)) == 10)
    assert wait_until(lambda: gc.collect() >= 0 and dropped() is None)
    assert values(broker) == [b"%d" % i for i in range(10)]


@PATHS
def test_a_negative_timeout_waits_for_everything(served, transport):
    _, settings = served(transport=transport, linger_ms=300)
    with kdirect.Producer(settings) as producer:
        for _ in range(3):
            producer.produce("t", b"v")
        assert producer.flush(-1) == 0 and len(producer) == 0
        told = []
        producer.produce("t", b"v", on_delivery=lambda e, m: told.append(e))
        assert producer.poll(-1) == 1 and told == [None]
        assert producer.poll(-1) == 0  # there is nothing to wait for


@PATHS
def test_columns_for_a_partition_never_written_wait_for_a_broker_that_is_away(served, transport):
    """There is no way to the partition yet, so nothing waits in a backlog of it."""
    broker, settings = served(2, transport=transport, connect_timeout_ms=300)
    with kdirect.Producer(settings) as producer:
        producer.send_arrow(_columns([b"a"], 0), "t")
        assert producer.flush(30) == 0
        broker.kill()
        sending = threading.Thread(target=producer.send_arrow, args=(_columns([b"b"], 1), "t"))
        sending.start()
        sending.join(2)  # some attempts to connect
        # Over TCP a request waits for its connection by itself.
        assert transport == "tcp" or sending.is_alive(), "it gave up, or says that it has sent"
        broker.start()
        sending.join(60)
        assert not sending.is_alive() and producer.flush(30) == 0
    assert values(broker, 0) == [b"a"] and values(broker, 1) == [b"b"]


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_partition_is_chosen_while_the_broker_that_was_reached_is_away(served, transport):
    """Whether it has RDMA is not known yet to this producer, and nobody can be asked."""
    broker, settings = served(2, transport=transport, connect_timeout_ms=300)
    with contextlib.closing(connect(settings)) as session:
        assert len(session.cluster.partitions("t")) == 2
        broker.kill()
        failed = []

        def send():
            try:
                with session.producer() as producer:
                    producer.send_arrow(pa.record_batch({"value": [b"a", b"b"]}), "t")
                    failed.append(producer.flush(30))
            except KdirectError as e:
                failed.append(e)

        sending = threading.Thread(target=send)
        sending.start()
        sending.join(2)
        assert sending.is_alive(), f"it gave up: {failed}"
        broker.start()
        sending.join(60)
        assert not sending.is_alive() and failed == [0]
    assert sorted(values(broker, 0) + values(broker, 1)) == [b"a", b"b"]


def test_columns_for_a_broker_that_was_never_reached_are_refused():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]  # nobody listens there
    settings = {"bootstrap.servers": f"127.0.0.1:{port}", "connect.timeout.ms": 300}
    with kdirect.Producer(settings) as producer, pytest.raises(BrokerUnavailableError):
        producer.send_arrow(_columns([b"a"], 0), "t")


def _columns(values, partition):
    return pa.record_batch(
        {
            "value": pa.array(values, pa.binary()),
            "partition": pa.array([partition] * len(values), pa.int32()),
        }
    )
