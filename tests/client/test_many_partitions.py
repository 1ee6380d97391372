"""A consumer of very many partitions: what it does for a record does not grow with them, and none
waits for the others.

Counted are requests, the partitions that they name, READs of slots and visits of partitions; never
seconds.
"""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace

import pytest

import kdirect
from kdirect.client import connect, tcp_multi_fetch
from kdirect.errors import BrokerError, UnknownTopicError
from kdirect.format import protocol
from kdirect.model import TopicPartition
from kdirect.wire.connection import Connection
from kdirect.wire.metadata import PartitionMetadata, TopicMetadata

PATHS = pytest.mark.parametrize("transport", ["shm", "tcp"])


@pytest.fixture
def broker():
    """A broker whose head files are small: there are many."""
    with kdirect.Broker(**{"log.segment.bytes": 1 << 20, "rdma.slots.per.consumer": 256}) as b:
        yield b


@pytest.fixture
def few_slots():
    with kdirect.Broker(**{"log.segment.bytes": 1 << 20, "rdma.slots.per.consumer": 8}) as b:
        yield b


@pytest.fixture
def consumer_of():
    """Makes consumers of a broker; settings as keyword arguments with `_` for `.`."""
    consumers = []

    def make(broker, **settings) -> kdirect.Consumer:
        settings = {name.replace("_", "."): value for name, value in settings.items()}
        consumers.append(
            kdirect.Consumer({"bootstrap.servers": broker.bootstrap_servers, **settings})
        )
        return consumers[-1]

    yield make
    for c in consumers:
        c.close()


@pytest.fixture
def fetched(monkeypatch):
    """How many partitions each Fetch named, in order."""
    counts: list[int] = []
    submit = Connection.submit

    def counting(self, message, *arguments):
        if message.API_KEY == protocol.FetchRequest.API_KEY:
            counts.append(sum(len(topic.partitions) for topic in message.topics))
        return submit(self, message, *arguments)

    monkeypatch.setattr(Connection, "submit", counting)
    return counts


@pytest.fixture
def no_time(monkeypatch):
    """Time stands still for the fetches over TCP: none is made because time has passed."""
    begin = tcp_multi_fetch.TcpRound.__init__

    def frozen(self, *arguments):
        begin(self, *arguments)
        self._environment = SimpleNamespace(monotonic=lambda: 1000.0, sleep=lambda s: None)

    monkeypatch.setattr(tcp_multi_fetch.TcpRound, "__init__", frozen)


def topic(broker, partitions, records=0, size=1, **configs):
    """Topic `t` with `records` in each partition; their values are their offsets."""
    session = connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "tcp"})
    session.admin.create_topic(
        "t", partitions, configs={k.replace("_", "."): str(v) for k, v in configs.items()}
    )
    produce(broker, {p: range(records) for p in range(partitions)}, size)
    return {TopicPartition("t", p): 0 for p in range(partitions)}


def produce(broker, values, size=1):
    session = connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "tcp"})
    with session.producer(**{"batch.bytes": 4096}) as producer:
        for p, numbers in values.items():
            for n in numbers:
                producer.produce("t", (b"%d" % n).ljust(size), partition=p)


def take(consumer, count):
    """(partition, offset) of the next `count` records."""
    out = []
    for _ in range(20 * count + 100):
        message = consumer.poll(1.0)
        if message is not None:
            assert message.value().rstrip() == b"%d" % message.offset()
            out.append((message.partition(), message.offset()))
        if len(out) == count:
            return out
    raise AssertionError(f"{len(out)} of {count} records came")


def visits(consumer, monkeypatch):
    """Counts the partitions that are looked at for a record."""
    counted = []
    attempt = consumer._reading._attempt

    def counting(take, tp):
        counted.append(tp)
        return attempt(take, tp)

    monkeypatch.setattr(consumer._reading, "_attempt", counting)
    return counted


# -- over TCP --------------------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [30, 300])
def test_fetches_name_each_partition_a_few_times(
    broker, consumer_of, fetched, no_time, monkeypatch, partitions
):
    offsets = topic(broker, partitions, 1)
    consumer = consumer_of(broker, transport="tcp")
    consumer.assign(offsets)
    counted = visits(consumer, monkeypatch)
    assert sorted(take(consumer, partitions)) == [(p, 0) for p in range(partitions)]
    assert len(fetched) <= 2 * math.log2(partitions) + 6
    assert sum(fetched) <= 4 * partitions
    assert len(counted) <= 3 * partitions
    assert consumer.statistics()["fetch_partitions"] == sum(fetched)


def test_one_consume_brings_what_one_fetch_brought(broker, consumer_of, fetched, no_time):
    offsets = topic(broker, 300, 1)
    consumer = consumer_of(broker, transport="tcp")
    consumer.assign(offsets)
    got = consumer.consume(1000, 5.0)
    assert len(got) == 300
    assert sum(fetched) <= 4 * 300


def test_a_partition_with_bytes_in_hand_does_not_make_the_quiet_ones_wait(broker, consumer_of):
    offsets = topic(broker, 2)
    produce(broker, {0: range(20_000)}, 200)
    consumer = consumer_of(broker, transport="tcp")
    consumer.assign(offsets)
    take(consumer, 10)
    produce(broker, {1: [0]})
    assert (1, 0) in take(consumer, 15_000)


def test_a_paused_partition_with_bytes_in_hand_lets_the_others_wait_at_the_broker(
    broker, consumer_of, fetched
):
    offsets = topic(broker, 2)
    produce(broker, {0: range(2_000)}, 200)
    consumer = consumer_of(broker, transport="tcp", fetch_wait_max_ms=100)
    consumer.assign(offsets)
    take(consumer, 5)
    consumer.pause([TopicPartition("t", 0)])
    consumer.poll(0.2)
    del fetched[:]
    assert consumer.poll(1.0) is None
    assert len(fetched) <= 12
    consumer.resume([TopicPartition("t", 0)])
    assert take(consumer, 1995) == [(0, n) for n in range(5, 2000)]


def test_what_is_in_hand_is_bounded(broker, consumer_of):
    """One answer in hand, and one more on its way, have room for 16 partitions each."""
    partitions, size = 100, 1000
    offsets = topic(broker, partitions, 30, size)
    consumer = consumer_of(broker, transport="tcp", fetch_max_read_bytes=8192)
    consumer.assign(offsets)
    count = 0
    while count < 30 * partitions:
        count += len(take(consumer, 50))
        assert (
            consumer.statistics()["fetched_bytes"] - count * size
            <= 2 * 16 * 8192 + count * 100 + 65536
        )


def test_partitions_without_a_leader_cost_one_look_at_the_metadata(cluster, broker, monkeypatch):
    offsets = topic(broker, 50)
    cluster.topic("t")
    refreshed = []
    refresh = cluster.refresh

    def leaderless(topics, **settings):
        refreshed.append(topics)
        found = refresh(topics, **settings)
        cluster._state().nodes.clear()
        return found

    monkeypatch.setattr(cluster, "refresh", leaderless)
    cluster.forget("t")
    found, failed = cluster.leaders([*offsets, TopicPartition("t", 50)])
    assert not found and failed.keys() == {*offsets, TopicPartition("t", 50)}
    assert all(isinstance(failed[tp], BrokerError) for tp in offsets)
    assert isinstance(failed[TopicPartition("t", 50)], UnknownTopicError)
    assert len(refreshed) <= 1


def test_a_partition_is_found_without_a_look_at_each():
    compared = []

    class Number(int):
        def __eq__(self, other):
            compared.append(other)
            return int(self) == other

        def __gt__(self, other):
            compared.append(other)
            return int(self) > other

        __hash__ = int.__hash__

    metadata = TopicMetadata(
        "t",
        None,
        False,
        tuple(PartitionMetadata(p, 1, 0, (1,), (1,)) for p in range(5000) if p != 77),
    )
    assert metadata.partition(Number(4321)).partition == 4321
    assert len(compared) < 30
    for missing in (77, 5000, -1):
        with pytest.raises(UnknownTopicError, match=f"no partition {missing}"):
            metadata.partition(missing)


# -- over shm --------------------------------------------------------------------------------------


def test_partitions_beyond_the_slots_are_told_of_once_and_share_fetches(
    few_slots, consumer_of, fetched, no_time, caplog
):
    offsets = topic(few_slots, 120, 1)
    consumer = consumer_of(few_slots, transport="shm")
    with caplog.at_level(logging.WARNING, "kdirect.client"):
        consumer.assign(offsets)
        assert sorted(take(consumer, 120)) == [(p, 0) for p in range(120)]
    (told,) = [r.getMessage() for r in caplog.records if "read over TCP" in r.getMessage()]
    assert "111 other partitions" in told and "rdma.slots.per.consumer" in told
    statistics = consumer.statistics()
    assert statistics["access_requests"] == 1
    assert statistics["reads"] == 8
    assert sum(fetched) <= 4 * 112
    consumer.incremental_unassign(list(offsets)[:100])
    produce(few_slots, {119: [1]})
    assert take(consumer, 1) == [(119, 1)]


@pytest.mark.parametrize("how", ["poll", "poll_arrow"])
def test_a_partition_that_gets_no_slot_after_its_sealed_files_goes_on_over_tcp(
    few_slots, consumer_of, caplog, how
):
    """Sealed files need no slot, head files do: there are more of them than slots."""
    partitions = 24
    offsets = topic(few_slots, partitions, 40, 1000, segment_bytes=16384)
    consumer = consumer_of(few_slots, transport="shm")
    consumer.assign(offsets)
    got = dict.fromkeys(range(partitions), 0)
    for _ in range(5000):
        if how == "poll":
            message = consumer.poll(0.2)
            came = [(message.partition(), message.offset())] if message is not None else []
        else:
            batch = consumer.poll_arrow(0.2)
            came = (
                list(zip(*(batch[c].to_pylist() for c in ("partition", "offset")), strict=True))
                if batch is not None
                else []
            )
        for partition, offset in came:
            assert offset == got[partition]
            got[partition] += 1
        if sum(got.values()) == 40 * partitions:
            break
    assert set(got.values()) == {40}, got
    assert sum("read over TCP" in r.getMessage() for r in caplog.records) == 1


def test_partitions_without_records_share_their_slot_reads(broker, consumer_of):
    offsets = topic(broker, 200)
    consumer = consumer_of(broker, transport="shm")
    consumer.assign(offsets)
    for _ in range(3):
        before = consumer.statistics()["slot_reads"]
        assert consumer.poll(0) is None
        assert consumer.statistics()["slot_reads"] - before <= 3
    produce(broker, {150: [0]})
    assert take(consumer, 1) == [(150, 0)]


@PATHS
def test_a_record_costs_no_visit_of_the_quiet_partitions(
    broker, consumer_of, monkeypatch, transport
):
    offsets = topic(broker, 200, 1)
    consumer = consumer_of(broker, transport=transport)
    consumer.assign(offsets)
    take(consumer, 200)
    assert consumer.poll(0) is None
    counted = visits(consumer, monkeypatch)
    for n in range(1, 20):
        produce(broker, {n % 3: [(n + 2) // 3 if n % 3 else n // 3]})
        (got,) = take(consumer, 1)
        assert got[0] == n % 3
    assert len(counted) <= 19 * 5


def test_a_busy_partition_does_not_let_the_sleeping_ones_wait(broker, consumer_of):
    offsets = topic(broker, 50, 1)
    consumer = consumer_of(broker, transport="shm")
    consumer.assign(offsets)
    take(consumer, 50)
    assert consumer.poll(0) is None
    produce(broker, {0: range(1, 20_001)}, 200)
    take(consumer, 10)
    produce(broker, {49: [1]})
    assert (49, 1) in take(consumer, 2_000)


@PATHS
def test_partitions_move_between_pause_seek_and_sleep(broker, consumer_of, seed, transport):
    """Whatever is done between polls, each partition goes on where it should."""
    import random

    chance = random.Random(seed)
    partitions = 20
    offsets = topic(broker, partitions)
    consumer = consumer_of(broker, transport=transport, fetch_wait_max_ms=20)
    consumer.assign(offsets)
    written, read, paused = [0] * partitions, [0] * partitions, set()

    def see(message):
        p = message.partition()
        assert p not in paused
        assert message.offset() == read[p]
        read[p] += 1

    for _ in range(300):
        p = chance.randrange(partitions)
        tp = TopicPartition("t", p)
        what = chance.choice(
            ("produce", "produce", "poll", "poll", "poll", "pause", "resume", "seek", "move")
        )
        if what == "produce":
            count = chance.choice((1, 1, 50))
            produce(broker, {p: range(written[p], written[p] + count)})
            written[p] += count
        elif what == "pause":
            consumer.pause([tp])
            paused.add(p)
        elif what == "resume":
            consumer.resume([tp])
            paused.discard(p)
        elif what == "seek":
            read[p] = chance.randint(0, written[p])
            consumer.seek(tp, read[p])
        elif what == "move":
            consumer.incremental_unassign([tp])
            paused.discard(p)
            consumer.incremental_assign({tp: read[p]})
        else:
            for message in consumer.consume(chance.choice((1, 5, 200)), 0):
                see(message)
    consumer.resume(consumer.paused())
    paused.clear()
    for _ in range(2000):
        if read == written:
            break
        for message in consumer.consume(500, 0.2):
            see(message)
    assert read == written


# -- consume ---------------------------------------------------------------------------------------


def test_consume_ends_although_there_is_always_more(broker, consumer_of, monkeypatch):
    offsets = topic(broker, 50, 1)
    consumer = consumer_of(broker, transport="tcp")
    consumer.assign(offsets)
    now = [0.0]

    def monotonic():
        now[0] += 0.02
        return now[0]

    take(consumer, 1)
    environment = SimpleNamespace(monotonic=monotonic, sleep=lambda s: None)
    monkeypatch.setattr(consumer, "_environment", environment)
    began = now[0]
    assert 0 < len(consumer.consume(1000, 0.3)) < 49
    assert now[0] - began < 1.0


def test_partitions_that_lose_their_slots_one_by_one_do_not_each_ask_for_all(
    few_slots, consumer_of, fetched, no_time
):
    """Each goes over to TCP alone, while a Fetch for those before it waits at the broker."""
    partitions = 120
    offsets = topic(few_slots, partitions, 20, 1000, segment_bytes=8192)
    consumer = consumer_of(few_slots, transport="shm", fetch_wait_max_ms=20)
    consumer.assign(offsets)
    assert len(take(consumer, 20 * partitions)) == 20 * partitions
    assert sum(fetched) <= 6 * partitions


def test_a_resumed_partition_does_not_wait_for_a_fetch_that_waits(broker, consumer_of):
    offsets = topic(broker, 2)
    consumer = consumer_of(broker, transport="tcp", fetch_wait_max_ms=25_000)
    consumer.assign(offsets)
    consumer.pause([TopicPartition("t", 1)])
    assert consumer.poll(0.2) is None
    produce(broker, {1: [0]})
    consumer.resume([TopicPartition("t", 1)])
    assert take(consumer, 1) == [(1, 0)]
    before = consumer.statistics()["fetches"]
    assert consumer.poll(0.2) is None
    assert consumer.statistics()["fetches"] == before
