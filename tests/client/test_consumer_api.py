"""The consumer as users call it: groups with stock members, offsets, pause and seek, errors of one
partition, ends."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import confluent_kafka
import kafka
import kafka.coordinator.assignors.range
import kafka.coordinator.assignors.roundrobin
import pytest

import kdirect
from kdirect.client import connect
from kdirect.client.assignors import ASSIGNORS
from kdirect.errors import (
    BrokerError,
    ClosedError,
    ConfigError,
    CorruptBatchError,
    KdirectError,
    OffsetOutOfRangeError,
    UnknownTopicError,
)
from kdirect.model import TopicPartition
from tests.support import poll_until

PATHS = pytest.mark.parametrize("transport", ["shm", "tcp"])
QUICK = {"heartbeat.interval.ms": 50, "session.timeout.ms": 6000, "auto.offset.reset": "earliest"}


@pytest.fixture
def made(broker):
    """(broker in this process, factory of consumers for it); settings as keyword arguments with `_`
    for `.`."""
    consumers = []

    def make(**settings) -> kdirect.Consumer:
        settings = {name.replace("_", "."): value for name, value in settings.items()}
        consumers.append(
            kdirect.Consumer({"bootstrap.servers": broker.bootstrap_servers, **QUICK, **settings})
        )
        return consumers[-1]

    yield broker, make
    for c in consumers:
        c.close()


def fill(broker, name="t", partitions=1, count=0, first=0, **configs):
    """A topic with `count` records round robin; their values are their numbers."""
    session = connect(broker.bootstrap_servers)
    session.admin.create_topic(name, partitions, configs=configs, if_not_exists=True)
    with session.producer() as producer:
        for i in range(first, first + count):
            producer.produce(
                name, b"%d" % i, b"k%d" % i, partition=i % partitions, timestamp=1000 + i
            )
    return [TopicPartition(name, p) for p in range(partitions)]


def take(consumer, count, timeout=20.0):
    """The next `count` records; fewer when they do not come in time."""
    out = []
    deadline = time.monotonic() + timeout
    while len(out) < count and time.monotonic() < deadline:
        message = consumer.poll(0.1)
        if message is not None:
            assert message.error() is None
            out.append(message)
    return out


# -- reading ---------------------------------------------------------------------------------------


@PATHS
def test_messages_positions_seek_and_times(made, transport):
    broker, make = made
    a, b = fill(broker, "t", 2, 1000)
    consumer = make(transport=transport)
    consumer.assign([a, b])  # no offsets and no group: auto.offset.reset
    got = take(consumer, 1000)
    assert [
        (m.topic(), m.offset(), m.value(), m.key(), m.timestamp(), m.headers(), len(m))
        for m in got
        if m.partition() == 1
    ] == [
        ("t", n, b"%d" % i, b"k%d" % i, (0, 1000 + i), None, len(str(i)))
        for n, i in enumerate(range(1, 1000, 2))
    ]
    assert consumer.poll(0) is None and consumer.poll(0.05) is None
    assert (consumer.position(a), consumer.position(b)) == (500, 500)
    assert consumer.get_watermark_offsets(a) == (0, 500)
    assert consumer.offsets_for_times({a: 1500, b: 1501}) == {a: 250, b: 250}
    assert consumer.offsets_for_times({a: 99_000}) == {a: None}
    consumer.seek(a, 10)
    consumer.seek(b, -1)
    assert consumer.position(a) == 10
    assert [m.offset() for m in take(consumer, 5)] == [10, 11, 12, 13, 14]
    assert consumer.position(a) == 15  # though more is in hand
    consumer.seek(a, -2)
    assert consumer.poll(5).offset() == 0
    assert [m.offset() for m in consumer.consume(100, 5)] == list(range(1, 101))
    consumer.seek(a, 490)
    assert len(consumer.consume(100, 5)) == 10  # what is at hand, without waiting for the rest
    consumer.seek(confluent_kafka.TopicPartition("t", 0, 499))
    for message in consumer:
        assert message.offset() == 499
        break
    assert set(consumer.list_topics()) == {"t"} and consumer.assignment() == [a, b]


@PATHS
def test_pausing_keeps_what_is_in_hand(made, transport):
    broker, make = made
    tps = fill(broker, "t", 3, 900)
    consumer = make(transport=transport)
    consumer.subscribe("t")
    first = take(consumer, 10)
    tp = TopicPartition("t", first[0].partition())
    consumer.pause([tp])
    assert consumer.paused() == [tp] and consumer.position(tp) == 10
    others = take(consumer, 600)
    assert {m.partition() for m in others} == {0, 1, 2} - {tp.partition}
    assert consumer.poll(0.05) is None
    consumer.resume([tp])
    assert [m.offset() for m in take(consumer, 290)] == list(range(10, 300))
    consumer.pause(tps)
    fill(broker, "t", 3, 3, 900)
    assert consumer.poll(0.1) is None and consumer.poll_arrow(0.1) is None
    consumer.resume(tps)
    assert sorted(int(m.value()) for m in take(consumer, 3)) == [900, 901, 902]


@PATHS
def test_records_and_columns_may_be_mixed(made, transport, seed):
    broker, make = made
    tps = fill(broker, "t", 2, 3000)
    rng = random.Random(seed)
    consumer = make(transport=transport)
    consumer.assign(dict.fromkeys(tps, 0))
    seen: dict[int, list[bytes]] = {0: [], 1: []}
    while sum(map(len, seen.values())) < 3000:
        if rng.random() < 0.7:
            for m in consumer.consume(rng.randrange(1, 60), 5):
                seen[m.partition()].append(m.value())
        else:
            batch = consumer.poll_arrow(
                5, max_rows=rng.randrange(1, 200), max_bytes=rng.choice([1, 1000, 1 << 20])
            )
            p = batch.column("partition")[0].as_py()
            assert batch.column("offset")[0].as_py() == len(seen[p])
            seen[p] += batch.column("value").to_pylist()
        if rng.random() < 0.1:
            tp = rng.choice(tps)
            consumer.pause([tp])
            consumer.resume([tp])
    assert seen == {p: [b"%d" % i for i in range(p, 3000, 2)] for p in (0, 1)}


@PATHS
@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_what_stock_producers_write(made, transport, codec):
    broker, make = made
    fill(broker)
    theirs = confluent_kafka.Producer(
        {"bootstrap.servers": broker.bootstrap_servers, "compression.type": codec, "linger.ms": 20}
    )
    for i in range(100):
        theirs.produce(
            "t",
            b"%d" % i * 10,
            None if i % 2 else b"k",
            timestamp=2000 + i,
            headers=[("h", b"%d" % i), ("n", None)] if i % 3 == 0 else None,
        )
    assert theirs.flush(20) == 0
    python = kafka.KafkaProducer(bootstrap_servers=broker.bootstrap_servers)
    python.send("t", b"python", key=b"p", timestamp_ms=7, headers=[("x", b"y")]).get(20)
    python.close()
    consumer = make(transport=transport)
    consumer.subscribe(["t"])
    got = take(consumer, 101)
    assert [(m.value(), m.key(), m.timestamp()[1], m.headers()) for m in got[:100]] == [
        (
            b"%d" % i * 10,
            None if i % 2 else b"k",
            2000 + i,
            [("h", b"%d" % i), ("n", None)] if i % 3 == 0 else None,
        )
        for i in range(100)
    ]
    assert (got[100].value(), got[100].key(), got[100].timestamp()[1], got[100].headers()) == (
        b"python",
        b"p",
        7,
        [("x", b"y")],
    )


# -- groups ----------------------------------------------------------------------------------------


def test_assignors_agree_with_kafka_pythons(seed):
    rng = random.Random(seed)
    theirs = {
        "range": kafka.coordinator.assignors.range.RangePartitionAssignor,
        "roundrobin": kafka.coordinator.assignors.roundrobin.RoundRobinPartitionAssignor,
    }
    for turn in range(200):
        counts = {f"topic{i}": rng.randrange(1, 9) for i in range(rng.randrange(1, 5))}
        read = [
            frozenset(rng.sample(sorted(counts), rng.randrange(1, len(counts) + 1)))
            for _ in range(rng.randrange(1, 6))
        ]
        static = rng.randrange(3)
        if turn % 2:
            # What kafka-python's roundrobin can do: members that read the same topics, and no
            # static ones.
            read, static = [frozenset(counts)] * len(read), 0
        members = [
            (f"m{rng.randrange(1000)}-{i}", f"i{i}" if i < static else None, topics)
            for i, topics in enumerate(read)
        ]
        cluster = SimpleNamespace(
            partitions_for_topic=lambda topic, counts=counts: set(range(counts[topic]))
        )
        their_members = [
            SimpleNamespace(
                member_id=m,
                group_instance_id=instance,
                metadata=SimpleNamespace(topics=sorted(topics)),
            )
            for m, instance, topics in members
        ]
        for name, assignor in theirs.items():
            if name == "roundrobin" and not turn % 2:
                continue
            ours = {m: sorted(tps) for m, tps in ASSIGNORS[name](members, counts).items()}
            expected = {
                m: sorted((t, p) for t, p in a.partitions())
                for m, a in assignor.assign(cluster, their_members).items()
            }
            assert ours == expected, (name, members, counts)


@PATHS
@pytest.mark.parametrize("strategy", ["range", "roundrobin"])
def test_one_group_of_two_kdirect_members_and_one_of_librdkafka(made, transport, strategy):
    broker, make = made
    tps = fill(broker, "t", 6, 600)
    events: list[tuple[str, str, int]] = []
    held: dict[str, set] = {"a": set(), "b": set(), "k": set()}

    def callbacks(name):
        def on_assign(c, given):
            held[name] |= {(tp.topic, tp.partition) for tp in given}
            events.append((name, "assign", len(given)))

        def on_revoke(c, given):
            held[name] -= {(tp.topic, tp.partition) for tp in given}
            events.append((name, "revoke", len(given)))

        return {"on_assign": on_assign, "on_revoke": on_revoke}

    settings = {
        "group.id": "g",
        "transport": transport,
        "partition.assignment.strategy": strategy,
        "auto.commit.interval.ms": 100,
    }
    a = make(**settings)
    a.subscribe(["t"], **callbacks("a"))
    got = take(a, 600)
    assert events == [("a", "assign", 6)] and len(got) == 600 and a.memberid()
    k = confluent_kafka.Consumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": "g",
            "partition.assignment.strategy": strategy,
            **QUICK,
        }
    )
    k.subscribe(["t"], **callbacks("k"))
    b = make(**settings)
    b.subscribe(["t"], **callbacks("b"))
    again = poll_until(lambda: [len(held[n]) for n in "abk"] == [2, 2, 2], a, b, k)
    assert again == [], "what was committed when it was given back is not read again"
    assert held["a"] | held["b"] | held["k"] == set(tps)
    fill(broker, "t", 6, 600, 600)
    rest = []
    deadline = time.monotonic() + 30
    while len(rest) < 600 and time.monotonic() < deadline:
        rest += [m for c in (a, b, k) if (m := c.poll(0.01)) is not None]
    assert sorted(int(m.value()) for m in rest) == list(range(600, 1200))
    a.close()
    assert held["a"] == set()
    poll_until(lambda: len(held["b"]) == 3 == len(held["k"]), b, k)
    k.close()
    poll_until(lambda: len(held["b"]) == 6, b)
    poll_until(lambda: b.committed(tps) == dict.fromkeys(tps, 200), b)
    b.unsubscribe()
    assert held["b"] == set() and b.assignment() == []
    alternating = {name: [kind for n, kind, _ in events if n == name] for name in "ab"}
    assert all(
        kinds[i] != kinds[i + 1] for kinds in alternating.values() for i in range(len(kinds) - 1)
    ), events


@PATHS
def test_commits_and_where_a_group_goes_on(made, transport):
    broker, make = made
    (tp,) = fill(broker, "t", 1, 100)
    consumer = make(group_id="g", enable_auto_commit=False, transport=transport)
    consumer.subscribe("t")
    got = take(consumer, 10)
    assert consumer.committed([tp]) == {tp: None}
    assert consumer.commit(got[4], asynchronous=False) == {tp: 5}
    assert consumer.commit(offsets={tp: 7}, asynchronous=False) == {tp: 7}
    assert consumer.committed([tp]) == {tp: 7}
    answered = []
    consumer._on_commit = lambda error, offsets: answered.append((error, offsets))
    assert consumer.commit() is None  # positions, asynchronously
    poll_until(lambda: bool(answered), consumer)
    assert answered == [(None, {tp: 10})]
    consumer.close()
    consumer = make(group_id="g", transport=transport)
    consumer.subscribe("t")
    assert [m.offset() for m in take(consumer, 5)] == [10, 11, 12, 13, 14]
    consumer.close()  # commits what was handed out
    consumer = make(
        group_id="g",
        enable_auto_offset_store=False,
        auto_commit_interval_ms=50,
        transport=transport,
    )
    consumer.assign([tp])  # outside of the group's management: at its offset
    got = take(consumer, 20)
    assert got[0].offset() == 15
    consumer.store_offsets(got[2])
    poll_until(lambda: consumer.committed([tp]) == {tp: 18}, consumer)
    with pytest.raises(ConfigError, match="not assigned"):
        consumer.store_offsets(offsets={TopicPartition("t", 5): 1})
    consumer.close()
    stock = confluent_kafka.Consumer(
        {"bootstrap.servers": broker.bootstrap_servers, "group.id": "g"}
    )
    assert stock.committed([confluent_kafka.TopicPartition("t", 0)])[0].offset == 18
    stock.close()


def test_auto_commit_holds_back_what_is_being_worked_on(made):
    """A record counts as done when the next poll asks for another: a crash in between repeats
    it."""
    broker, make = made
    (tp,) = fill(broker, "t", 1, 10)
    consumer = make(group_id="g", auto_commit_interval_ms=50)
    consumer.subscribe("t")
    assert take(consumer, 3)[-1].offset() == 2
    time.sleep(0.3)
    look = make(group_id="g")
    assert look.committed([tp])[tp] in (None, 0, 1, 2)
    assert consumer.poll(5).offset() == 3
    poll_until(lambda: look.committed([tp])[tp] == 3)


def test_offsets_chosen_when_partitions_are_given_out(made):
    broker, make = made
    a, b = fill(broker, "t", 2, 100)

    def on_assign(consumer, given):
        assert given == [a, b] and consumer.assignment() == [a, b]
        consumer.seek(a, 45)
        consumer.seek(b, -1)

    consumer = make(group_id="g")
    consumer.subscribe(["t"], on_assign=on_assign)
    assert [(m.partition(), m.offset()) for m in take(consumer, 5)] == [
        (0, o) for o in range(45, 50)
    ]
    assert consumer.poll(0.1) is None
    other = make(group_id="h")
    other.subscribe(["t"], on_assign=lambda c, given: c.assign(dict.fromkeys(given, 48)))
    assert sorted((m.partition(), m.offset()) for m in take(other, 4)) == [
        (0, 48),
        (0, 49),
        (1, 48),
        (1, 49),
    ]


def test_a_member_lives_while_it_works_and_is_replaced_when_it_stops_polling(broker_process):
    broker = broker_process(group_min_session_timeout_ms=100)
    (tp,) = fill(broker, "t", 1, 100)
    settings = {
        "bootstrap.servers": broker.bootstrap_servers,
        "group.id": "g",
        **QUICK,
        "session.timeout.ms": 400,
        "heartbeat.interval.ms": 50,
    }
    events = []
    with kdirect.Consumer(settings) as worker:
        worker.subscribe("t", on_revoke=lambda c, t: events.append("revoked"))
        take(worker, 1)
        time.sleep(1.2)  # three sessions long
        assert worker.poll(5).offset() == 1 and events == []
    settings["max.poll.interval.ms"] = 500
    with kdirect.Consumer(settings) as stuck, kdirect.Consumer(settings) as other:
        stuck.subscribe(
            "t",
            on_revoke=lambda c, t: events.append("given back"),
            on_lost=lambda c, t: events.append("lost"),
        )
        assert take(stuck, 1)[0].offset() == 2
        events.clear()
        other.subscribe("t")
        again = poll_until(lambda: other.assignment() == [tp], other) or [other.poll(5)]
        assert again[0].offset() == 2, "what was not committed is read again"
        with pytest.raises(BrokerError) as refused:
            stuck.commit(offsets={tp: 50}, asynchronous=False)
        assert refused.value.name in (
            "UNKNOWN_MEMBER_ID",
            "ILLEGAL_GENERATION",
        ) or "members" in str(refused.value)
        poll_until(lambda: "lost" in events, stuck, other)
        assert "given back" not in events[: events.index("lost")]


def test_a_consumer_that_is_dropped_leaves_its_group(made):
    broker, make = made
    (tp,) = fill(broker, "t", 1, 1)
    lone = kdirect.Consumer(
        {"bootstrap.servers": broker.bootstrap_servers, "group.id": "g", **QUICK}
    )
    lone.subscribe("t")
    take(lone, 1)
    thread = lone._membership._thread
    del lone
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    heir = make(group_id="g")
    began = time.monotonic()
    heir.subscribe("t")
    poll_until(lambda: heir.assignment() == [tp], heir)
    assert time.monotonic() - began < 5  # without waiting for a session to end


@PATHS
@pytest.mark.parametrize("group", [None, "g"])
def test_partitions_and_topics_that_come_later(made, transport, group):
    broker, make = made
    fill(broker, "logs-a", 1, 10)
    admin = connect(broker.bootstrap_servers).admin
    consumer = make(
        metadata_max_age_ms=200,
        transport=transport,
        auto_commit_interval_ms=100,
        **({"group_id": group} if group else {}),
    )
    consumer.subscribe("^logs-.*")
    assert len(take(consumer, 10)) == 10
    admin.create_partitions("logs-a", 3)
    fill(broker, "logs-a", 3, 9, 10)
    fill(broker, "logs-b", 1, 5, 100)
    fill(broker, "other", 1, 5)
    got = take(consumer, 14)
    assert sorted(int(m.value()) for m in got) == [*range(10, 19), *range(100, 105)]
    assert {tp.topic for tp in consumer.assignment()} == {"logs-a", "logs-b"} and len(
        consumer.assignment()
    ) == 4


# -- what goes wrong -------------------------------------------------------------------------------


@PATHS
def test_an_offset_out_of_range(made, transport):
    broker, make = made
    (tp,) = fill(broker, "t", 1, 100)
    connect(broker.bootstrap_servers).admin.delete_records({tp: 40})
    for reset, expected in (("earliest", 40), ("latest", 100)):
        consumer = make(transport=transport, auto_offset_reset=reset)
        consumer.assign({tp: 5})
        assert consumer.poll(0.3 if reset == "latest" else 5) is None or reset == "earliest"
        assert consumer.position(tp) == expected + (reset == "earliest")
        consumer.close()
    consumer = make(transport=transport, auto_offset_reset="none")
    with pytest.raises(OffsetOutOfRangeError, match="t-0"):
        consumer.assign({tp: 5})
        consumer.poll(5)
    consumer.assign({tp: 50})
    assert consumer.poll(5).offset() == 50
    with pytest.raises(OffsetOutOfRangeError, match="committed"):
        make(transport=transport, auto_offset_reset="none", group_id="new").assign([tp])


@PATHS
def test_a_broken_batch_concerns_its_partition_alone(broker_process, transport):
    broker = broker_process()
    a, b = fill(broker, "t", 2)
    with connect(broker.bootstrap_servers).producer() as producer:
        for i in range(20):
            producer.produce("t", b"value %d." % i, partition=i % 2)
    (segment,) = Path(broker.log_dir, "t-0").glob("*.log")
    with segment.open("r+b") as f:
        f.seek(segment.read_bytes().index(b"value 10."))
        f.write(b"VALUE")
    with kdirect.Consumer(
        {"bootstrap.servers": broker.bootstrap_servers, "transport": transport}
    ) as consumer:
        consumer.assign({a: 0, b: 0})
        got, errors = [], []
        deadline = time.monotonic() + 20
        while (len(got) < 15 or not errors) and time.monotonic() < deadline:
            try:
                message = consumer.poll(0.1)
            except CorruptBatchError as e:
                errors.append(e)
                continue
            if message is not None:
                got.append(message)
        assert Counter(m.partition() for m in got) == {0: 5, 1: 10}
        assert [(e.topic_partition, e.offset) for e in errors] == [(a, 5)]
        assert consumer.poll(0.1) is None  # told once; the other goes on
        consumer.seek(a, 6)
        assert [m.offset() for m in take(consumer, 4)] == [6, 7, 8, 9]
        consumer.incremental_unassign([b])
        consumer.seek(a, 4)
        assert consumer.poll(5).offset() == 4
        for _ in range(2):  # nothing else is left to read: told each time
            with pytest.raises(CorruptBatchError):
                consumer.poll(5)
        consumer.seek(a, 4)
        assert consumer.poll_arrow(5).column("offset").to_pylist() == [4]  # what is good first
        with pytest.raises(CorruptBatchError):
            consumer.poll_arrow(5)


def test_mistakes_are_named(made):
    broker, make = made
    (tp,) = fill(broker, "t", 1, 5)
    consumer = make()
    with pytest.raises(UnknownTopicError, match="missing"):
        consumer.subscribe(["t", "missing"])
    with pytest.raises(UnknownTopicError, match="t-7"):
        consumer.assign({TopicPartition("t", 7): 0})
    wrongs = [
        lambda: consumer.commit(),
        lambda: consumer.committed([tp]),
        lambda: consumer.seek(TopicPartition("t", 3), 0),
        lambda: consumer.assign(tp),
        lambda: consumer.assign({tp: -7}),
        lambda: consumer.subscribe([]),
        lambda: consumer.subscribe("^("),
        lambda: consumer.position(TopicPartition("u", 0)),
        lambda: consumer.pause([TopicPartition("u", 0)]),
        lambda: consumer.consume(0),
        lambda: make(group_id="g", partition_assignment_strategy="mine"),
        lambda: make(group_id="g", heartbeat_interval_ms=7000),
        lambda: make(group_id="g").store_offsets(offsets={tp: 1}),
    ]
    for wrong in wrongs:
        with pytest.raises(ConfigError):
            wrong()
    with pytest.raises(KdirectError, match="session"):
        c = make(group_id="g", session_timeout_ms=1000)
        c.subscribe("t")
        c.poll(5)
    consumer.close()
    for late in (
        lambda: consumer.poll(0),
        lambda: consumer.subscribe("t"),
        lambda: consumer.poll_arrow(0),
        lambda: consumer.consume(1, 0),
    ):
        with pytest.raises(ClosedError):
            late()


@PATHS
def test_a_forked_child_must_not_use_it(made, transport):
    broker, make = made
    fill(broker, "t", 1, 100)
    consumer = make(transport=transport, group_id="g")
    consumer.subscribe("t")
    take(consumer, 5)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            consumer.poll(0)
        except ClosedError as e:
            status = 0 if "forked" in str(e) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [m.offset() for m in take(consumer, 5)] == [5, 6, 7, 8, 9]


@PATHS
def test_a_group_outlives_its_broker(broker_process, transport):
    broker = broker_process()
    fill(broker, "t", 2, 100)
    settings = {
        "bootstrap.servers": broker.bootstrap_servers,
        "group.id": "g",
        "transport": transport,
        **QUICK,
        "auto.commit.interval.ms": 50,
    }
    with kdirect.Consumer(settings) as consumer:
        consumer.subscribe("t")
        got = take(consumer, 100)
        broker.kill()
        broker.start()
        fill(broker, "t", 2, 100, 100)
        deadline = time.monotonic() + 30
        while len({m.value() for m in got}) < 200 and time.monotonic() < deadline:
            try:
                message = consumer.poll(0.2)
            except KdirectError as e:
                assert e.retriable, e
                continue
            if message is not None:
                got.append(message)
        assert {int(m.value()) for m in got} == set(range(200))


def test_poll_wakes_for_a_record_and_a_thread_may_produce_meanwhile(made):
    broker, make = made
    fill(broker)
    for transport in ("shm", "tcp"):
        consumer = make(transport=transport, auto_offset_reset="latest")
        consumer.subscribe("t")
        consumer.poll(0)
        timer = threading.Timer(0.3, lambda: fill(broker, "t", 1, 1))
        timer.start()
        began = time.monotonic()
        assert consumer.poll(None) is not None
        assert 0.2 < time.monotonic() - began < 5
        timer.join()
        consumer.close()


@PATHS
def test_the_example_runs_to_its_end(transport):
    example = Path(__file__).resolve().parents[2] / "examples/produce_consume.py"
    run = subprocess.run(
        [sys.executable, str(example), "--transport", transport],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.endswith("10001 readings were read, 0 of them twice\n")
