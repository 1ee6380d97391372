"""A broker that resigns from a partition, and leads it again: what its clients see of it.

One broker plays both parts, the leader that was and the one that is; between the two it refuses its
clients as any broker does that does not lead."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

import kdirect
from kdirect.errors import NotEnoughReplicasError, NotLeaderError, UnknownTopicError
from kdirect.model import TopicPartition

TP = TopicPartition("t", 0)
PATHS = [
    pytest.param({"rdma.produce": "exclusive"}, id="exclusive"),
    pytest.param({"rdma.produce": "shared"}, id="shared"),
    pytest.param({"transport": "tcp"}, id="tcp"),
]


class Leader:
    """A broker whose leadership of `TP` is lost and won at will.  It has what a cluster's replicas
    tell the rooms of access (`kdirect.broker.access.Leadership`)."""

    def __init__(self, broker: kdirect.Broker) -> None:
        self.broker = broker
        self.access: Any = broker.server.access
        self.epoch = 0
        self.knows = True
        self.enough = True
        self.asked: list[int] = []
        self.refused = threading.Event()

    # -- Leadership ----------------------------------------------------------------------------

    def leader(self, tp: TopicPartition, epoch: int = -1) -> Any:
        self.asked.append(epoch)
        if not self.access.produce.leads(tp):
            self.refused.set()
        return self.broker.server.logs.partitions[tp]

    def may_append(self, tp: TopicPartition) -> None:
        if not self.enough:
            self.refused.set()
            raise NotEnoughReplicasError(f"{tp} has too few replicas")

    def knows_high_watermark(self, tp: TopicPartition) -> bool:
        if not self.knows:
            self.refused.set()
        return self.knows

    # -- what a test does ----------------------------------------------------------------------

    def run(self, work: Callable[[], Any]) -> Any:
        """On the broker's event loop."""

        async def on_the_loop() -> Any:
            result = work()
            return await result if asyncio.isfuture(result) else result

        loop = self.broker._loop
        assert loop is not None
        return asyncio.run_coroutine_threadsafe(on_the_loop(), loop).result(20)

    @property
    def partition(self) -> Any:
        return self.broker.server.logs.partitions[TP]

    def resign(self) -> None:
        self.refused.clear()
        self.run(lambda: self.access.resign(TP))

    def lead(self) -> None:
        self.partition.set_leader_epoch(self.partition.leader_epoch + 1)
        self.run(lambda: self.access.lead(TP))


@pytest.fixture
def leader() -> Iterator[Leader]:
    with kdirect.Broker() as broker:
        with kdirect.connect(broker.bootstrap_servers) as session:
            session.admin.create_topic(TP.topic, 1)
        yield Leader(broker)


def producer_of(leader: Leader, **settings: Any) -> kdirect.Producer:
    return kdirect.Producer({"bootstrap.servers": leader.broker.bootstrap_servers, **settings})


def log_of(leader: Leader) -> list[bytes]:
    with kdirect.connect(
        {"bootstrap.servers": leader.broker.bootstrap_servers, "transport": "tcp"}
    ) as session:
        end = session.latest_offsets([TP])[TP]
        with closing(session.reader(TP, 0, end)) as reader:
            return [v for b in reader.batches() for v in b.column("value").to_pylist()]


@contextmanager
def in_background(work: Callable[[], Any]) -> Iterator[None]:
    """`work` begins at once, on a thread of its own, and is done at the end."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as e:
            failed.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join(20)
    assert not thread.is_alive() and failed == []


def values(start: int, stop: int) -> list[bytes]:
    return [b"%d" % i for i in range(start, stop)]


@pytest.mark.parametrize("settings", PATHS)
def test_a_producer_goes_on_with_the_next_leader(leader: Leader, settings: dict[str, Any]) -> None:
    """No record is lost, doubled or out of order, and no error reaches the caller."""
    failed: list[Any] = []

    def delivered(error: Any, message: Any) -> None:
        if error is not None:
            failed.append(error)

    with closing(producer_of(leader, **settings)) as producer:
        for turn in range(3):
            for value in values(turn * 100, turn * 100 + 100):
                producer.produce(TP.topic, value, partition=0, on_delivery=delivered)
            if turn == 2:
                break
            leader.resign()
            leader.lead()
        producer.flush(30)
    assert failed == []
    assert log_of(leader) == values(0, 300)


@pytest.mark.parametrize("settings", PATHS[:2])
def test_what_is_sent_while_nobody_leads_waits(leader: Leader, settings: dict[str, Any]) -> None:
    leader.access.leadership = leader
    with closing(producer_of(leader, **settings)) as producer:
        producer.produce(TP.topic, b"0", partition=0)
        producer.flush(30)
        leader.resign()
        with in_background(
            lambda: [producer.produce(TP.topic, value, partition=0) for value in values(1, 50)]
        ):
            assert leader.refused.wait(20), "nobody asked the leader that was"
            leader.lead()
        producer.flush(30)
    assert log_of(leader) == values(0, 50)
    assert max(leader.asked) == 1, "requests for access name the leader epoch"


def test_the_first_record_waits_for_a_leader(leader: Leader) -> None:
    leader.access.leadership = leader
    leader.resign()
    with closing(producer_of(leader)) as producer:
        with in_background(lambda: producer.produce(TP.topic, b"0", partition=0)):
            assert leader.refused.wait(20)
            leader.lead()
        producer.flush(30)
    assert log_of(leader) == [b"0"]


def test_a_kafka_client_is_told_to_look_for_the_leader(leader: Leader) -> None:
    leader.resign()
    settings = {"transport": "tcp", "delivery.timeout.ms": 300}
    with closing(producer_of(leader, **settings)) as producer:
        errors: list[Any] = []
        producer.produce(TP.topic, b"0", on_delivery=lambda e, m: errors.append(e))
        producer.flush(20)
    (error,) = errors
    assert "NOT_LEADER_OR_FOLLOWER" in str(error)
    leader.lead()
    assert log_of(leader) == []


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_consumer_reads_on_at_the_next_leader(leader: Leader, transport: str) -> None:
    leader.access.leadership = leader
    consumer = kdirect.Consumer(
        {
            "bootstrap.servers": leader.broker.bootstrap_servers,
            "transport": transport,
            "group.id": "g",
            "auto.offset.reset": "earliest",
        }
    )
    got: list[bytes] = []

    def read(count: int) -> None:
        while len(got) < count:
            message = consumer.poll(20)
            assert message is not None and message.error() is None
            got.append(message.value())

    with closing(consumer), closing(producer_of(leader)) as producer:
        consumer.assign({TP: 0})
        for turn in range(3):
            for value in values(turn * 10, turn * 10 + 10):
                producer.produce(TP.topic, value, partition=0)
            producer.flush(30)
            read(turn * 10 + 10)
            leader.resign()
            assert consumer.poll(0) is None
            if transport == "shm":
                with in_background(lambda: leader.refused.wait(20)):
                    while not leader.refused.is_set():
                        assert consumer.poll(0.05) is None
            leader.lead()
    assert got == values(0, 30)


def test_a_range_is_read_across_leaders(leader: Leader) -> None:
    with closing(producer_of(leader)) as producer:
        for value in values(0, 10):
            producer.produce(TP.topic, value, partition=0)
        producer.flush(30)
        with (
            kdirect.connect(leader.broker.bootstrap_servers) as session,
            closing(session.reader(TP, 0, 20, target_rows=1)) as reader,
        ):
            batches = reader.batches()
            got = [next(batches).column("value")[0].as_py() for _ in range(10)]
            leader.resign()
            leader.lead()
            for value in values(10, 20):
                producer.produce(TP.topic, value, partition=0)
            producer.flush(30)
            got += [b.column("value")[0].as_py() for b in batches]
    assert got == values(0, 20)


def test_latest_offsets_wait_for_a_leader_that_knows_them(leader: Leader) -> None:
    leader.access.leadership = leader
    with closing(producer_of(leader)) as producer:
        producer.produce(TP.topic, b"0", partition=0)
        producer.flush(30)
    with kdirect.connect(leader.broker.bootstrap_servers) as session:
        assert session.latest_offsets([TP]) == {TP: 1}
        leader.resign()
        leader.knows = False
        leader.lead()
        found: list[Any] = []
        with in_background(lambda: found.append(session.watermarks([TP], topic_ids={}))):
            assert leader.refused.wait(20)
            assert not found
            leader.knows = True
        assert found == [{TP: (0, 1)}]


def test_a_topic_that_is_deleted_is_not_taken_for_one_that_moved(leader: Leader) -> None:
    with kdirect.connect(leader.broker.bootstrap_servers) as session:
        old = {TP.topic: str(session.admin.list_topics()[TP.topic].topic_id)}
        assert session.watermarks([TP]) == {TP: (0, 0)}
        leader.resign()
        session.admin.delete_topic(TP.topic)
        session.admin.create_topic(TP.topic, 1)
        with pytest.raises(UnknownTopicError, match="t-0 was deleted"):
            session.watermarks([TP], topic_ids=old)
        leader.lead()
        new = {TP.topic: str(session.admin.list_topics()[TP.topic].topic_id)}
        assert new != old
        assert session.watermarks([TP], topic_ids=new) == {TP: (0, 0)}


def test_acknowledgements_wait_for_replicas_unless_the_leader_is_enough(leader: Leader) -> None:
    """Producers with acks=all wait for the high watermark, those with acks=1 do not."""
    leader.partition.set_replicas({2: 0})
    with (
        closing(producer_of(leader, **{"acks": "all", "rdma.produce": "shared"})) as careful,
        closing(producer_of(leader, **{"acks": "1", "rdma.produce": "shared"})) as quick,
    ):
        careful.produce(TP.topic, b"0", partition=0)
        assert careful.flush(0.1) == 1
        quick.produce(TP.topic, b"1", partition=0)
        assert quick.flush(30) == 0
        assert careful.flush(0) == 1
        for end, left in ((1, 0), (2, 0)):
            leader.partition.replicated(2, end)
            leader.run(lambda: leader.access.high_watermark_moved(TP))
            assert careful.flush(30 if left == 0 else 0) == left
        careful.produce(TP.topic, b"2", partition=0)
        assert careful.flush(0.1) == 1
        leader.partition.replicated(2, 3)
        leader.run(lambda: leader.access.high_watermark_moved(TP))
        assert careful.flush(30) == 0
    assert log_of(leader) == values(0, 3)


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_what_replicas_have_not_confirmed_is_repeated_at_the_next_leader(
    leader: Leader, mode: str
) -> None:
    """The records are in the log already: the producer's sequence tells."""
    first, *others = values(0, 11)
    with closing(producer_of(leader, **{"rdma.produce": mode})) as producer:
        producer.produce(TP.topic, first, partition=0)
        assert producer.flush(30) == 0  # until then nothing else of its producer id goes out
        leader.partition.set_replicas({2: 1})
        for value in others:
            producer.produce(TP.topic, value, partition=0)
        assert producer.flush(0.1) == 10
        leader.resign()
        leader.partition.set_replicas({})
        leader.lead()
        assert producer.flush(30) == 0
    assert log_of(leader) == values(0, 11)


def test_too_few_replicas_are_waited_for(leader: Leader) -> None:
    leader.access.leadership = leader
    leader.enough = False
    with closing(producer_of(leader, acks="1")) as quick:
        quick.produce(TP.topic, b"0", partition=0)
        assert quick.flush(30) == 0
    with closing(producer_of(leader)) as careful:
        leader.refused.clear()
        with in_background(lambda: careful.produce(TP.topic, b"1", partition=0)):
            assert leader.refused.wait(20)
            leader.enough = True
        assert careful.flush(30) == 0
    assert log_of(leader) == [b"0", b"1"]


def test_appends_fail_from_the_resignation_on(leader: Leader) -> None:
    leader.resign()
    produce = leader.access.produce
    with pytest.raises(NotLeaderError):
        leader.run(lambda: produce.append(leader.partition, b"x", 0))
    leader.resign()  # nothing more happens
    leader.lead()
    leader.lead()
    assert leader.run(lambda: produce.leads(TP))
