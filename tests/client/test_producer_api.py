"""The producer as users call it: partitions, callbacks, futures, linger, back-pressure, ends; stock
clients on the other side."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import defaultdict

import confluent_kafka
import kafka
import pyarrow as pa
import pytest

import kdirect
from kdirect.client import connect
from kdirect.client.partitioner import partition_for_key
from kdirect.errors import (
    BrokerUnavailableError,
    ClosedError,
    ConfigError,
    DeliveryError,
    UnknownTopicError,
)
from kdirect.model import TopicPartition
from tests.client.conftest import create, kafka_messages

PATHS = pytest.mark.parametrize("transport", ["shm", "tcp"])


@pytest.fixture
def made(broker):
    """(broker in this process, factory of producers for it)."""
    producers = []

    def make(**settings) -> kdirect.Producer:
        settings = {name.replace("_", "."): value for name, value in settings.items()}
        producers.append(
            kdirect.Producer({"bootstrap.servers": broker.bootstrap_servers, **settings})
        )
        return producers[-1]

    yield broker, make
    for p in producers:
        p.abort()


def test_a_control_connection_that_ends_is_told_and_what_is_under_way_is_repeated(made, caplog):
    """The queue pair may be whole yet, and nothing be wrong with it."""
    broker, make = made
    create(broker)
    producer = make(transport="shm")
    producer.produce("t", b"before", partition=0)
    producer.flush()
    (partition,) = producer._driver._partitions.values()
    for value in (b"one", b"two", b"three"):
        producer.produce("t", value, partition=0)
    partition.appender.channel.connection.abort(
        BrokerUnavailableError("the cable is out", hint="put it in")
    )
    producer._driver._recover(partition)
    producer.produce("t", b"after", partition=0)
    assert producer.flush() == 0
    assert [m.value() for m in kafka_messages(broker.bootstrap_servers, "t")] == [
        b"before",
        b"one",
        b"two",
        b"three",
        b"after",
    ]
    told = (
        r"t-0: (the connection to its leader ended \(the cable is out\)"
        r"|the RDMA connection broke \(.*\)); \d+ requests are repeated"
    )
    assert re.search(told, caplog.text)


# -- partitions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["murmur2_random", "consistent_random", "murmur2", "consistent"])
def test_keys_go_where_librdkafka_sends_them(made, seed, rule):
    broker, make = made
    create(broker, "theirs", 7)
    create(broker, "ours", 7)
    create(broker, "columns", 7)
    rng = random.Random(seed)
    keys = [rng.randbytes(rng.randrange(1, 40)) for _ in range(300)]
    sticky = rule.endswith("_random")
    if not sticky:
        keys += [None, b""]
    where: dict[str, dict] = {"theirs": {}, "ours": {}, "columns": {}}
    theirs = confluent_kafka.Producer(
        {"bootstrap.servers": broker.bootstrap_servers, "partitioner": rule, "linger.ms": 5}
    )
    for key in keys:
        theirs.produce(
            "theirs",
            b"",
            key,
            on_delivery=lambda e, m, key=key: where["theirs"].__setitem__(key, m.partition()),
        )
    assert theirs.flush(20) == 0
    ours = make(partitioner=rule, linger_ms=5)
    for key in keys:
        ours.produce(
            "ours",
            b"",
            key,
            on_delivery=lambda e, m, key=key: where["ours"].__setitem__(key, m.partition()),
        )
    ours.send_arrow(
        pa.record_batch(
            {"value": pa.array([b""] * len(keys), pa.binary()), "key": pa.array(keys, pa.binary())}
        ),
        "columns",
    )
    assert ours.flush() == 0
    with kdirect.Consumer(broker.bootstrap_servers) as consumer:
        consumer.assign({TopicPartition("columns", p): 0 for p in range(7)})
        for _ in keys:
            message = consumer.poll(10)
            where["columns"][message.key()] = message.partition()
    assert where["ours"] == where["theirs"] == where["columns"]


def test_own_partitioner_and_records_without_keys(made):
    broker, make = made
    create(broker, "t", 4)
    with kdirect.Producer(
        broker.bootstrap_servers, partitioner=lambda key, n: len(key or b"") % n
    ) as producer:
        assert [producer.send("t", b"", b"x" * i).result(10).partition() for i in range(8)] == [
            0,
            1,
            2,
            3,
            0,
            1,
            2,
            3,
        ]
        producer.send_arrow(
            pa.record_batch({"value": pa.array(["a", "b"]), "key": pa.array(["abc", None])}), "t"
        )
    assert [m.value() for m in kafka_messages(broker.bootstrap_servers, "t", 3)] == [b"", b"", b"a"]
    with (
        pytest.raises(UnknownTopicError, match="partition 9"),
        kdirect.Producer(broker.bootstrap_servers, partitioner=lambda *_: 9) as bad,
    ):
        bad.produce("t", b"")
    producer = make()
    assert (
        len({producer.send("t", b"%d" % i).result(10).partition() for i in range(20)}) == 1
    )  # a run, not one each


@PATHS
def test_keys_go_by_the_new_number_of_partitions_after_the_metadatas_age(made, transport):
    broker, make = made
    create(broker)
    producer = make(transport=transport, metadata_max_age_ms=300)
    patient = make(transport=transport)
    keys = [b"%d" % i for i in range(40)]
    assert {
        p.send("t", b"", k).result(10).partition() for p in (producer, patient) for k in keys
    } == {0}
    connect(broker.bootstrap_servers).admin.create_partitions("t", 4)
    time.sleep(0.4)
    assert [producer.send("t", b"", k).result(10).partition() for k in keys] == [
        partition_for_key(k, 4) for k in keys
    ]
    assert {patient.send("t", b"", k).result(10).partition() for k in keys} == {0}


@PATHS
def test_a_partition_that_was_added_is_found_at_once_when_it_is_named(made, transport):
    broker, make = made
    create(broker)
    producer, columns = make(transport=transport), make(transport=transport)
    producer.produce_sync("t", b"old")
    columns.send_arrow(pa.record_batch({"value": pa.array([b"old"])}), "t")
    columns.flush()
    admin = connect(broker.bootstrap_servers).admin
    with pytest.raises(UnknownTopicError, match="partition 3"):
        producer.produce("t", b"", partition=3)
    admin.create_partitions("t", 4)
    assert producer.produce_sync("t", b"new", partition=3) == 0
    rows = pa.record_batch(
        {"value": pa.array([b"a", b"b", b"c"]), "partition": pa.array([2, 2, 3], pa.int32())}
    )
    columns.send_arrow(rows, "t")
    columns.flush()
    assert [m.value() for m in kafka_messages(broker.bootstrap_servers, "t", 2)] == [b"a", b"b"]
    assert [m.value() for m in kafka_messages(broker.bootstrap_servers, "t", 3)] == [b"new", b"c"]
    with pytest.raises(UnknownTopicError, match="partition 4"):
        producer.produce("t", b"", partition=4)


# -- reports ---------------------------------------------------------------------------------------


@PATHS
@pytest.mark.parametrize("linger", [0, 5])
def test_callbacks_come_in_order_with_offsets_on_the_callers_thread(made, transport, linger):
    broker, make = made
    create(broker, "t", 2)
    producer = make(transport=transport, linger_ms=linger)
    reports = defaultdict(list)
    threads = set()

    def on_delivery(error, message):
        threads.add(threading.current_thread())
        reports[message.partition()].append(
            (
                error,
                message.offset(),
                message.value(),
                message.key(),
                message.topic(),
                message.timestamp()[1],
            )
        )

    for i in range(2000):
        producer.produce(
            "t", b"%d" % i, b"k", partition=i % 2, timestamp=1000 + i, on_delivery=on_delivery
        )
    assert producer.flush() == 0 and len(producer) == 0
    assert threads == {threading.current_thread()}
    for p in (0, 1):
        assert reports[p] == [
            (None, n, b"%d" % i, b"k", "t", 1000 + i) for n, i in enumerate(range(p, 2000, 2))
        ]
        assert [m.value() for m in kafka_messages(broker.bootstrap_servers, "t", p)] == [
            b"%d" % i for i in range(p, 2000, 2)
        ]


@pytest.mark.parametrize("window", [1, 4, 16])
def test_every_offset_is_reported_through_a_small_window(made, window):
    """The writer remembers the offsets of one window only; records with and without a report fill
    it."""
    broker, make = made
    create(broker)
    producer = make(transport="shm", max_in_flight=window)
    got = []
    for i in range(3000):
        producer.produce(
            "t",
            b"%d" % i,
            on_delivery=(lambda e, m: got.append((e, m.offset(), m.value()))) if i % 7 else None,
        )
    assert producer.flush() == 0
    assert got == [(None, i, b"%d" % i) for i in range(3000) if i % 7]
    assert producer.statistics()["rdma_records"] == 3000


@PATHS
def test_callbacks_without_poll_and_from_callbacks(made, transport):
    """Reports do not pile up when nobody polls; a callback may produce, as retries do."""
    broker, make = made
    create(broker)
    producer = make(transport=transport)
    seen = []

    def on_delivery(error, message):
        seen.append(message.value())
        if message.value() == b"10":
            producer.produce("t", b"again", on_delivery=on_delivery)

    for i in range(5000):
        producer.produce("t", b"%d" % i, on_delivery=on_delivery)
    deadline = time.monotonic() + 20
    while (
        len(seen) < 3000 and time.monotonic() < deadline
    ):  # the thread, or later calls of produce, see to it
        producer.produce("t", b"more", on_delivery=on_delivery)
        time.sleep(0.0001)
    assert len(seen) >= 3000, "produce serves reports that nobody polls for"
    producer.flush()
    producer.flush()
    assert seen.count(b"again") == 1 and {b"%d" % i for i in range(5000)} <= set(seen)


@PATHS
def test_futures(made, transport):
    broker, make = made
    create(broker, **{"max.message.bytes": 10_000})
    producer = make(transport=transport)
    first = producer.send("t", "text", key="k", headers={"h": b"v"}, timestamp=77)
    message = first.result(10)
    assert (message.offset(), message.value(), message.key(), message.headers()) == (
        0,
        b"text",
        b"k",
        [("h", b"v")],
    )
    assert message.timestamp() == (0, 77) and first.exception(0) is None and not first.cancel()
    assert [
        f.result(10).offset() for f in [producer.send("t", b"%d" % i) for i in range(50)]
    ] == list(range(1, 51))

    async def awaited():
        return (
            await asyncio.wait_for(asyncio.wrap_future(producer.send("t", b"async")), 10)
        ).offset()

    assert asyncio.run(awaited()) == 51
    assert producer.produce_sync("t", b"sync") == 52
    large = producer.send("t", os.urandom(20_000), headers=[("a", b"")])
    assert isinstance(large.exception(10), DeliveryError) and not large.exception().maybe_committed
    with pytest.raises(DeliveryError, match="t-0"):
        large.result()
    assert producer.send("t", b"after").result(10).offset() == 53


@PATHS
def test_an_error_that_nobody_was_told_is_raised_by_flush(made, transport):
    broker, make = made
    create(broker, **{"max.message.bytes": 1000})
    producer = make(transport=transport, linger_ms=1)
    producer.produce("t", os.urandom(5000))
    with pytest.raises(DeliveryError, match="t-0"):
        producer.flush()
    assert producer.flush() == 0  # once
    told = []
    producer.produce(
        "t",
        os.urandom(5000),
        on_delivery=lambda e, m: told.append((type(e), m.error() is e, m.offset())),
    )
    assert producer.flush() == 0 and told == [(DeliveryError, True, -1)]
    assert producer.statistics()["failed_records"] == 2


# -- batches ---------------------------------------------------------------------------------------


@PATHS
def test_linger_gathers_and_the_thread_sends(made, transport):
    broker, make = made
    create(broker)
    producer = make(transport=transport, linger_ms=300)
    end = time.monotonic() + 0.1
    count = 0
    while count < 1000 and time.monotonic() < end:
        producer.produce("t", b"v" * 100)
        count += 1
    watch = connect(broker.bootstrap_servers)
    tp = TopicPartition("t", 0)
    assert watch.latest_offsets([tp]) == {tp: 0} and len(producer) == count
    deadline = time.monotonic() + 10
    while watch.latest_offsets([tp])[tp] < count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert watch.latest_offsets([tp]) == {tp: count}
    stats = producer.statistics()
    assert stats.get("rdma_requests", 0) + stats.get("tcp_requests", 0) <= 1 + count // 10
    slow = make(transport=transport, linger_ms=600_000, batch_size=10_000)
    slow.produce("t", b"first")
    assert slow.flush() == 0  # what waits for the access to the partition does not linger
    for _ in range(250):
        slow.produce("t", b"v" * 100)
    deadline = time.monotonic() + 10
    while len(slow) > 100 and time.monotonic() < deadline:  # full batches do not linger
        time.sleep(0.01)
    assert 0 < len(slow) <= 100
    slow.close()
    assert watch.latest_offsets([tp]) == {tp: count + 251}


@PATHS
def test_order_is_kept_whichever_way_records_go(made, transport, seed):
    """Plain records, records with headers, columns and futures of one partition, mixed."""
    broker, make = made
    create(broker)
    rng = random.Random(seed)
    producer = make(transport=transport, linger_ms=rng.choice([0, 0, 2]))
    for i in range(600):
        how, value = rng.randrange(5), b"%d" % i
        if how == 0:
            producer.produce("t", value, headers=[("h", b"")])
        elif how == 1:
            producer.send_arrow(pa.record_batch({"value": pa.array([value], pa.binary())}), "t")
        elif how == 2:
            producer.send("t", value)
        elif how == 3 and rng.random() < 0.1:
            producer.produce_sync("t", value)
        else:
            producer.produce("t", value)
    producer.flush()
    assert [m.value() for m in kafka_messages(broker.bootstrap_servers, "t")] == [
        b"%d" % i for i in range(600)
    ]


@PATHS
@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_stock_clients_read_every_codec_headers_and_nulls(made, transport, codec):
    broker, make = made
    create(broker)
    with make(transport=transport, **{"compression.type": codec, "linger.ms": 20}) as producer:
        for i in range(50):
            producer.produce(
                "t",
                None if i % 10 == 3 else b"%d" % i * 20,
                None if i % 2 else "ключ",
                timestamp=5000 + i,
                headers=[("a", b"1"), ("a", None)] if i % 5 == 0 else None,
            )
    assert producer.statistics()["failed_records"] == 0
    expected = [
        (
            None if i % 10 == 3 else b"%d" % i * 20,
            None if i % 2 else "ключ".encode(),
            5000 + i,
            [("a", b"1"), ("a", None)] if i % 5 == 0 else [],
        )
        for i in range(50)
    ]
    rdkafka = kafka_messages(broker.bootstrap_servers, "t")
    assert [(m.value(), m.key(), m.timestamp()[1], m.headers() or []) for m in rdkafka] == expected
    if codec in ("snappy", "lz4"):
        return  # kafka-python wants libraries for these that are not installed
    consumer = kafka.KafkaConsumer(
        bootstrap_servers=broker.bootstrap_servers,
        auto_offset_reset="earliest",
        consumer_timeout_ms=10_000,
    )
    consumer.assign([kafka.TopicPartition("t", 0)])
    python = [next(consumer) for _ in range(50)]
    consumer.close()
    assert [(m.value, m.key, m.timestamp, list(m.headers)) for m in python] == expected


def test_arrow_reports(made):
    broker, make = made
    create(broker)
    reports = []
    producer = make(**{"batch.size": 20_000})
    rows = pa.record_batch({"value": pa.array([b"v" * 100] * 1000, pa.binary())})
    assert producer.send_arrow(rows, "t", on_delivery=lambda e, b: reports.append((e, b))) == 1000
    assert producer.flush() == 0
    assert len(reports) > 3 and all(e is None for e, _ in reports)
    at = 0
    for _, b in reports:
        assert (b.topic, b.partition, b.base_offset) == ("t", 0, at)
        at += b.records
    assert at == 1000


# -- ends and mistakes -----------------------------------------------------------------------------


def test_purge_tells_who_asked(made):
    broker, make = made
    create(broker)
    producer = make(linger_ms=600_000)
    told = []
    producer.produce(
        "t", b"told", on_delivery=lambda e, m: told.append((type(e), e.maybe_committed))
    )
    future = producer.send("t", b"future")
    producer.produce("t", b"quiet")
    producer.purge(in_flight=False)
    assert isinstance(future.exception(5), DeliveryError)
    assert told == [(DeliveryError, False)] and len(producer) == 0 and producer.flush() == 0
    producer.close()
    assert kafka_messages(broker.bootstrap_servers, "t") == []


def test_an_exception_in_the_with_block_drops_what_was_not_sent(made):
    broker, make = made
    create(broker)
    told = []
    with pytest.raises(ZeroDivisionError), make(linger_ms=600_000) as producer:
        producer.produce("t", b"v", on_delivery=lambda e, m: told.append(type(e)))
        raise ZeroDivisionError
    assert told == [DeliveryError]
    with pytest.raises(ClosedError):
        producer.produce("t", b"v")
    with pytest.raises(ClosedError):
        producer.flush()
    producer.close()


def test_a_missing_topic_is_made_where_the_broker_lets_it(made):
    broker, make = made
    producer = make()
    producer.produce("fresh", b"v")
    assert producer.flush(10) == 0
    assert [m.value() for m in kafka_messages(broker.bootstrap_servers, "fresh")] == [b"v"]
    with (
        kdirect.Broker(auto_create_topics_enable=False) as strict,
        kdirect.Producer(strict.bootstrap_servers) as refused,
    ):
        with pytest.raises(UnknownTopicError, match="topic 'fresh' does not exist"):
            refused.produce("fresh", b"v")
        create(strict, "fresh")
        refused.produce("fresh", b"v")


def test_mistakes_are_named(made):
    broker, make = made
    create(broker)
    producer = make()
    for wrong in (
        {"value": 5},
        {"value": b"", "key": 1.5},
        {"value": b"", "headers": [(None, b"")]},
        {"value": b"", "headers": {"a": 1}},
    ):
        with pytest.raises((ConfigError, kdirect.KdirectError), match="record"):
            producer.produce("t", **wrong)
    with pytest.raises(UnknownTopicError, match="missing"):
        make(allow_auto_create_topics=False).produce("missing", b"")
    with pytest.raises(UnknownTopicError, match="0 to 0"):
        producer.produce("t", b"", partition=1)
    with pytest.raises(ConfigError, match="linger"):
        kdirect.Producer({"bootstrap.servers": broker.bootstrap_servers, "linger.m": 5})
    with pytest.raises(ConfigError, match="partitioner"):
        kdirect.Producer({"bootstrap.servers": broker.bootstrap_servers, "partitioner": "mine"})
    assert bool(producer) and len(producer) == 0


@PATHS
def test_a_forked_child_must_not_use_it(made, transport):
    broker, make = made
    create(broker)
    producer = make(transport=transport, linger_ms=1)
    producer.produce_sync("t", b"parent")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            producer.produce("t", b"child")
        except ClosedError as e:
            status = 0 if "forked" in str(e) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert producer.produce_sync("t", b"parent again") == 1


def test_threads_share_a_producer_and_one_that_is_dropped_ends_its_thread(made):
    broker, make = made
    create(broker, "t", 3)
    producer = make(linger_ms=2)
    workers = [
        threading.Thread(
            target=lambda n=n: [
                producer.produce("t", b"%d:%d" % (n, i), partition=i % 3) for i in range(500)
            ]
        )
        for n in range(4)
    ]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    producer.flush()
    for p in range(3):
        values = [m.value() for m in kafka_messages(broker.bootstrap_servers, "t", p)]
        for n in range(4):
            mine = [v for v in values if v.startswith(b"%d:" % n)]
            assert mine == [b"%d:%d" % (n, i) for i in range(p, 500, 3)]
    lone = kdirect.Producer({"bootstrap.servers": broker.bootstrap_servers, "linger.ms": 1})
    lone.produce("t", b"x")
    lone.flush()
    thread = lone._thread
    del lone
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_the_end_of_the_process_sends_what_lingers(broker):
    create(broker)
    code = (
        "import kdirect, sys\n"
        "p = kdirect.Producer({'bootstrap.servers': sys.argv[1], 'linger.ms': 600000})\n"
        "for i in range(10): p.produce('t', b'%d' % i)\n"
    )
    subprocess.run([sys.executable, "-c", code, broker.bootstrap_servers], check=True, timeout=60)
    assert [m.value() for m in kafka_messages(broker.bootstrap_servers, "t")] == [
        b"%d" % i for i in range(10)
    ]
