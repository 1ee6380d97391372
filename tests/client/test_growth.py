"""Producers and consumers over shm while heads grow beneath them, and are given back (KafkaDirect
§4.2.2, §4.4.2).

What holds: each record is there once, in the order of its producer, and a reader that follows sees
the same."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

import kdirect
from kdirect.broker import produce_access
from kdirect.broker.read_access import ReadAccess
from kdirect.client import connect
from kdirect.errors import ProtocolError
from kdirect.model import TopicPartition
from kdirect.wire.channel import Channel
from tests.support import wait_until

TP = TopicPartition("t", 0)


@pytest.fixture
def grown(broker):
    """(session over shm, the broker, its partition): a topic of one partition."""
    session = connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"})
    session.admin.create_topic("t", 1)
    yield session, broker, broker.server.logs.partitions[TP]
    session.close()


def disk_bytes(partition) -> int:
    return sum(f.stat().st_blocks * 512 for f in partition.directory.iterdir())


def leave_alone(broker, partition, until) -> None:
    """As if nothing had been appended for a while, again and again until the broker has drawn its
    conclusions."""
    deadline = time.monotonic() + 20
    while not until():
        assert time.monotonic() < deadline
        partition.flush_due(time.time_ns() // 1_000_000)
        partition._use.quiet_since = float("-inf")
        partition.flush_due(time.time_ns() // 1_000_000)
        time.sleep(0.02)


class Follower:
    """Reads the partition from its start, on a thread, for as long as it is told."""

    def __init__(self, settings) -> None:
        self.values: list[bytes] = []
        self.error: BaseException | None = None
        self._settings = settings
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with kdirect.Consumer(self._settings) as consumer:
                consumer.assign({TP: 0})
                while not self._stop.is_set():
                    for message in consumer.consume(1000, 0.02):
                        assert message.offset() == len(self.values)
                        self.values.append(message.value())
        except BaseException as e:
            self.error = e

    def end(self, count: int) -> list[bytes]:
        deadline = time.monotonic() + 60
        while len(self.values) < count and self.error is None and time.monotonic() < deadline:
            time.sleep(0.01)
        self._stop.set()
        self._thread.join()
        assert self.error is None, self.error
        return self.values


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
@pytest.mark.parametrize("size", [50, 9000])
def test_one_head_grows_beneath_producers_and_a_follower(grown, mode, size):
    session, _, partition = grown
    follower = Follower(session.settings)
    producers = 1 if mode == "exclusive" else 3
    count = 12_000_000 // producers // max(size, 1200)
    failures: list[BaseException] = []

    def produce(name: int) -> None:
        try:
            own = connect(session.settings)
            with own.producer(rdma_produce=mode) as producer:
                for i in range(count):
                    producer.produce("t", b"%d %d " % (name, i) + b"." * size, partition=0)
                producer.flush()
                assert producer.statistics()["rdma_records"] == count
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=produce, args=(i,)) for i in range(producers)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures
    values = follower.end(count * producers)
    for name in range(producers):
        own = [int(v.split()[1]) for v in values if v.startswith(b"%d " % name)]
        assert own == list(range(count))
    assert len(values) == count * producers
    assert len(partition.segments) == 1 and partition.statistics()["log_head_growths"] >= 2
    with kdirect.Consumer(session.settings, session=session) as late:
        late.assign({TP: 0})
        again = list(itertools.islice(iter(lambda: late.poll(20).value(), None), len(values)))
    assert again == values


@pytest.mark.parametrize("mode", ["exclusive", "shared", "tcp"])
def test_one_record_costs_some_pages(grown, mode):
    session, _, partition = grown
    with session.producer(rdma_produce="off" if mode == "tcp" else mode) as producer:
        producer.produce_sync("t", b"x" * 100, partition=0)
        assert disk_bytes(partition) <= 64 << 10
        assert (producer.statistics().get("rdma_records", 0) == 1) == (mode != "tcp")


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_producers_that_fall_silent_do_not_keep_the_head(grown, mode):
    """They go on when they have something to write, and so do readers that had all of it mapped."""
    session, broker, partition = grown
    follower = Follower(session.settings)
    names = range(1 if mode == "exclusive" else 2)
    producers = [connect(session.settings).producer(rdma_produce=mode) for _ in names]
    sent: dict[int, int] = dict.fromkeys(names, 0)

    def produce(count: int) -> None:
        for name in names:
            for _ in range(count):
                producers[name].produce(
                    "t", b"%d %d " % (name, sent[name]) + b"." * 5000, partition=0
                )
                sent[name] += 1
            producers[name].flush()

    for round_ in range(3):
        produce(600)
        full = partition.kernel.capacity
        unused = full - partition.kernel.end_position
        assert unused > produce_access.IDLE_BYTES
        given = partition.statistics()["log_given_back_bytes"]
        leave_alone(
            broker,
            partition,
            lambda given=given: partition.statistics()["log_given_back_bytes"] > given,
        )
        assert disk_bytes(partition) < partition.size + (512 << 10), f"round {round_}"
        assert (
            broker.statistics()["rdma_heads_cut"] == 0 == broker.statistics()["rdma_heads_fenced"]
        )
    for name in names:  # the last one, beside the other's
        producers[name].produce("t", b"%d %d " % (name, sent[name]), partition=0)
        sent[name] += 1
        producers[name].flush()
        assert producers[name].statistics()["rdma_records"] == sent[name] and not producers[
            name
        ].statistics().get("tcp_records")
        producers[name].close()
    values = follower.end(sum(sent.values()))
    for name in names:
        assert [int(v.split()[1]) for v in values if v.startswith(b"%d " % name)] == list(
            range(sent[name])
        )
    assert len(values) == sum(sent.values())


@pytest.mark.parametrize("when", ["opened", "granted"])
def test_a_quiet_head_stays_whole_once_its_pages_may_be_pinned(grown, monkeypatch, when):
    """Over verbs, from the moment at which a consumer's file is opened for it: its pages would not
    be the file's any more when the head grows again."""
    session, broker, partition = grown
    access = broker.server.access
    opened, go_on = threading.Event(), threading.Event()
    plain = ReadAccess._open_files

    def open_files(manager, peer, targets, wish):
        monkeypatch.setattr(peer.engine, "transport", "verbs")
        files = plain(manager, peer, targets, wish)
        opened.set()
        assert go_on.wait(30)
        return files

    with session.producer() as producer:
        for _ in range(100):
            producer.produce("t", b"." * 30_000, partition=0)
        producer.flush()
    leave_alone(broker, partition, lambda: access.produce.heads == {})
    partition.ensure_head(4 << 20)
    capacity = partition.kernel.capacity
    monkeypatch.setattr(ReadAccess, "_open_files", open_files)
    if when == "granted":
        go_on.set()
    follower = Follower(session.settings)
    assert opened.wait(30)
    if when == "granted":
        while not follower.values:
            time.sleep(0.01)
    for _ in range(5):
        partition._use.quiet_since = float("-inf")
        partition.flush_due(time.time_ns() // 1_000_000)
    assert partition.kernel.capacity == capacity
    go_on.set()
    monkeypatch.setattr(ReadAccess, "_open_files", plain)
    follower.end(100)
    wait_until(lambda: not len(access._grants))
    assert not access._grants.opening
    partition._use.quiet_since = float("-inf")
    partition.flush_due(time.time_ns() // 1_000_000)
    assert partition.kernel.capacity < capacity


@pytest.mark.parametrize("left", [100 << 10, 8 << 10], ids=["some", "little"])
def test_a_producer_that_falls_silent_does_not_keep_the_file_that_it_was_granted_ahead(grown, left):
    """However little of its head is unused: that file is as large as a whole one."""
    session, broker, _ = grown
    tp = TopicPartition("small", 0)
    session.admin.create_topic("small", 1, configs={"segment.bytes": str(256 << 10)})
    partition = broker.server.logs.partitions[tp]

    def waiting() -> list[str]:
        partition._spare._ready_at = float("-inf")
        return [f.name for f in partition.directory.glob("*.log.tmp")]

    with session.producer() as producer:
        count = 0
        for _ in range(2):
            files = broker.statistics()["rdma_heads_ahead"]
            while (
                broker.statistics()["rdma_heads_ahead"] < files + 3
                or partition.kernel.capacity - partition.kernel.end_position > left
            ):
                producer.produce_sync("small", b"%d " % count + b"." * 1000, partition=0)
                count += 1
            assert waiting() and producer._driver.appender(tp).next_asked is not None
            segment = partition.head
            leave_alone(broker, partition, lambda: not waiting())
            assert partition.head is segment
        for _ in range(300):
            assert (
                producer.produce_sync("small", b"%d " % count + b"." * 1000, partition=0) == count
            )
            count += 1
        statistics = producer.statistics()
    assert statistics["rdma_records"] == count and not statistics.get("tcp_records")
    assert broker.statistics()["rdma_heads_cut"] == 0 == broker.statistics()["rdma_heads_fenced"]


def test_a_broker_that_grants_the_same_again_is_not_asked_for_ever(grown, monkeypatch):
    session = grown[0]
    with session.producer() as producer:
        for i in range(30):
            producer.produce("t", b"%d " % i + b"." * 1000, partition=0)
        producer.flush()
    ask, asked = Channel.consume_access, []

    def short(channel, targets, *more, **named):
        answer = ask(channel, targets, *more, **named)
        asked.append(targets)
        for grant in answer.partitions:
            grant.length = 8192
            grant.last_readable_position = grant.last_stable_position = 7504  # seven batches
            grant.start_position = min(grant.start_position, 7504)
        return answer

    monkeypatch.setattr(Channel, "consume_access", short)
    with kdirect.Consumer(session.settings, session=session) as consumer:
        consumer.assign({TP: 0})
        got = []
        with pytest.raises(ProtocolError, match="granted again"):
            while (message := consumer.poll(5)) is not None:
                got.append(message.offset())
        assert got == list(range(len(got))) and 0 < len(got) < 9
    assert len(asked) == 2
