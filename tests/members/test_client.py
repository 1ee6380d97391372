"""kdirect's clients over three brokers, each in a process of its own, while leaders are stopped,
killed and paused: no error reaches the caller, no record is lost, doubled or out of order, and the
end of a log never goes back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import pytest

import kdirect
from kdirect.model import TopicPartition
from kdirect.wire.channel import Channel
from tests.support import wait_until

TP = TopicPartition("t", 0)
FAST = {"reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 200}


class Trio:
    """Three brokers, and what was produced to `TP`."""

    def __init__(self, cluster: kdirect.Cluster) -> None:
        self.cluster = cluster
        self.session = kdirect.connect({"bootstrap.servers": cluster.bootstrap_servers, **FAST})
        self.session.admin.create_topic(TP.topic, 1, replication_factor=3)
        wait_until(lambda: self.leader() > 0, "the partition has a leader")
        self.sent = 0
        self.failed: list[Any] = []

    def leader(self) -> int:
        return self.session.cluster.topic(TP.topic, refresh=True).partition(0).leader

    def in_sync(self) -> tuple[int, ...]:
        return self.session.cluster.topic(TP.topic, refresh=True).partition(0).in_sync_replicas

    def producer(self, **settings: Any) -> kdirect.Producer:
        servers = self.cluster.bootstrap_servers
        return kdirect.Producer({"bootstrap.servers": servers, **FAST, **settings})

    def produce(self, producer: kdirect.Producer, count: int) -> None:
        def delivered(error: Any, message: Any) -> None:
            if error is not None:
                self.failed.append(error)

        for _ in range(count):
            producer.produce(TP.topic, b"%d" % self.sent, partition=0, on_delivery=delivered)
            self.sent += 1

    def has_read_all(self, consumer: kdirect.Consumer, got: list[int], wait_s: float = 0.2) -> bool:
        """One more look, into `got`; has every record been read?"""
        message = consumer.poll(wait_s)
        if message is not None:
            assert message.error() is None
            got.append(int(message.value()))
        return len({*got}) == self.sent

    def log(self) -> list[int]:
        end = self.session.latest_offsets([TP])[TP]
        with closing(self.session.reader(TP, 0, end)) as reader:
            return [int(v) for b in reader.batches() for v in b.column("value").to_pylist()]

    def check(self) -> None:
        assert self.failed == []
        assert self.log() == list(range(self.sent))


@pytest.fixture
def trio(cluster: Callable[..., kdirect.Cluster]) -> Iterator[Trio]:
    made = Trio(cluster(3))
    yield made
    made.session.close()


@contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[None]:
    """`work` is done again and again on a thread of its own."""
    over = threading.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            while not over.is_set():
                work()
        except BaseException as e:
            failed.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(60)
        if failed:
            raise failed[0]
    assert not thread.is_alive()


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"rdma.produce": "exclusive"}, id="exclusive"),
        pytest.param({"rdma.produce": "shared"}, id="shared"),
        pytest.param({"transport": "tcp"}, id="tcp"),
    ],
)
def test_a_producer_goes_on_when_leaders_stop_and_die(trio: Trio, settings: dict[str, Any]) -> None:
    cluster = trio.cluster
    with closing(trio.producer(**settings)) as producer:
        for end in (cluster.stop, cluster.kill):
            trio.produce(producer, 200)
            assert producer.flush(60) == 0
            leader = trio.leader()
            trio.produce(producer, 100)
            end(leader)
            trio.produce(producer, 100)
            assert producer.flush(60) == 0
            assert wait_until(trio.leader, "another leader") != leader
            cluster.start(leader)
            wait_until(lambda: len(trio.in_sync()) == 3, "the replica came back", 60)
    trio.check()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_consumer_reads_on_when_leaders_stop_and_die(trio: Trio, transport: str) -> None:
    cluster = trio.cluster
    consumer = kdirect.Consumer(
        {
            "bootstrap.servers": cluster.bootstrap_servers,
            "transport": transport,
            "group.id": "g",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            **FAST,
        }
    )
    got: list[int] = []
    read_all = partial(trio.has_read_all, consumer, got)

    with closing(consumer), closing(trio.producer()) as producer:
        consumer.assign({TP: 0})
        for end in (cluster.stop, cluster.kill):
            trio.produce(producer, 100)
            wait_until(read_all, "everything was read")
            leader = trio.leader()
            end(leader)
            trio.produce(producer, 100)
            assert producer.flush(60) == 0
            wait_until(read_all, "everything was read after the leader's end", 60)
            cluster.start(leader)
            wait_until(lambda: len(trio.in_sync()) == 3, "the replica came back", 60)
    assert got == list(range(trio.sent))
    trio.check()


@pytest.mark.timeout(180)
def test_a_group_goes_on_when_each_broker_dies_in_turn(trio: Trio) -> None:
    """Its coordinator among them; what it has committed is not read again."""
    cluster = trio.cluster

    def member() -> kdirect.Consumer:
        return kdirect.Consumer(
            {
                "bootstrap.servers": cluster.bootstrap_servers,
                "group.id": "g",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                **FAST,
            }
        )

    got: list[int] = []
    consumer = member()
    read_all = partial(trio.has_read_all, consumer, got)
    with closing(trio.producer()) as producer:
        consumer.subscribe([TP.topic])
        for node_id in cluster.node_ids:
            trio.produce(producer, 50)
            wait_until(read_all, "everything was read", 60)
            consumer.commit(asynchronous=False)
            cluster.kill(node_id)
            trio.produce(producer, 50)
            assert producer.flush(60) == 0
            wait_until(read_all, "everything was read after a broker's end", 60)
            consumer.commit(asynchronous=False)
            cluster.start(node_id)
            wait_until(lambda: len(trio.in_sync()) == 3, "the replica came back", 60)
    consumer.close()
    assert got == list(range(trio.sent))
    with closing(member()) as another:
        assert another.committed([TP])[TP] == trio.sent
    trio.check()


@pytest.mark.timeout(180)
def test_readers_notice_that_the_leader_hangs(trio: Trio) -> None:
    """The slots that they look at stay as they are; they belong to a process that is stopped.  A
    consumer that never waits notices it, too."""
    cluster = trio.cluster
    consumer = kdirect.Consumer(
        {
            "bootstrap.servers": cluster.bootstrap_servers,
            "group.id": "g",
            "enable.auto.commit": False,
            **FAST,
        }
    )
    got: list[int] = []
    read_all = partial(trio.has_read_all, consumer, got, wait_s=0)

    with closing(consumer), closing(trio.producer(transport="tcp")) as producer:
        consumer.assign({TP: 0})
        trio.produce(producer, 10)
        assert producer.flush(60) == 0
        wait_until(read_all, "everything was read")
        assert trio.session.latest_offsets([TP]) == {TP: 10}
        leader = trio.leader()
        cluster.pause(leader)
        try:
            wait_until(lambda: trio.leader() not in (leader, -1), "another leader", 60)
            with closing(trio.producer()) as another:
                trio.produce(another, 10)
                assert another.flush(60) == 0
            wait_until(read_all, "what the next leader has was read", 60)
            wait_until(lambda: trio.session.latest_offsets([TP]) == {TP: 20}, "its end", 60)
        finally:
            cluster.resume(leader)
    trio.check()


@pytest.mark.timeout(180)
def test_the_end_of_a_log_never_goes_back(trio: Trio) -> None:
    """As Spark's latestOffset sees it, by slots."""
    ends: list[int] = []
    known = {TP.topic: str(trio.session.admin.list_topics()[TP.topic].topic_id)}

    def look() -> None:
        ends.append(trio.session.watermarks([TP], topic_ids=known)[TP][1])

    with closing(trio.producer()) as producer, meanwhile(look):
        for end in (trio.cluster.kill, trio.cluster.stop):
            trio.produce(producer, 200)
            assert producer.flush(60) == 0
            leader = trio.leader()
            end(leader)
            trio.produce(producer, 200)
            assert producer.flush(60) == 0
            trio.cluster.start(leader)
            wait_until(lambda: len(trio.in_sync()) == 3, "the replica came back", 60)
        wait_until(lambda: ends[-1] == trio.sent, "the whole log was seen")
    assert ends == sorted(ends)
    trio.check()


@pytest.mark.timeout(180)
def test_a_leader_that_was_paused_commits_nothing_more(trio: Trio) -> None:
    """Its producer writes to the next leader; what the old one says when it goes on is not
    believed."""
    cluster = trio.cluster
    with closing(trio.producer()) as producer:
        trio.produce(producer, 100)
        assert producer.flush(60) == 0
        leader = trio.leader()
        cluster.pause(leader)
        try:
            trio.produce(producer, 100)
            assert producer.flush(90) == 0
            assert trio.leader() != leader
        finally:
            cluster.resume(leader)
        trio.produce(producer, 100)
        assert producer.flush(60) == 0
        wait_until(lambda: len(trio.in_sync()) == 3, "the replica came back", 60)
    trio.check()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["kill", "pause"])
def test_a_reader_goes_on_when_its_broker_ends_while_it_grants_access(
    trio: Trio, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with closing(trio.producer()) as producer:
        trio.produce(producer, 100)
        assert producer.flush(60) == 0
    leader = trio.leader()
    granted = Channel.consume_access

    def ends_first(channel: Channel, *args: Any, **kwargs: Any) -> Any:
        monkeypatch.undo()
        getattr(trio.cluster, how)(leader)
        return granted(channel, *args, **kwargs)

    settings = {"bootstrap.servers": trio.cluster.bootstrap_servers, **FAST}
    # A paused broker leads until its session with ZooKeeper is over, for longer than a few tries.
    tries = {"request.timeout.ms": 1000, "connect.timeout.ms": 300}
    with closing(kdirect.connect({**settings, **tries})) as session:
        assert session.latest_offsets([TP]) == {TP: 100}
        monkeypatch.setattr(Channel, "consume_access", ends_first)
        with closing(session.reader(TP, 0, 100, timeout_ms=30_000)) as reader:
            read = [int(v) for b in reader.batches() for v in b.column("value").to_pylist()]
    assert Channel.consume_access is granted and read == list(range(100))
    if how == "pause":
        trio.cluster.resume(leader)
