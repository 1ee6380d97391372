"""AlterReplicaLogDirs: partitions that move between the log directories of a broker while clients
of every kind write and read them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import confluent_kafka
import confluent_kafka.admin
import pytest
from kafka.admin import KafkaAdminClient

import kdirect
from kdirect.failpoints import VARIABLE
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.format.schema import build
from kdirect.model import TopicPartition
from tests.broker.conftest import Raw
from tests.support import BrokerProcess, wait_until

TP = TopicPartition("t", 0)
SHM = {"transport": "shm"}
WRITERS: dict[str, list[dict[str, Any]]] = {
    "exclusive": [{**SHM, "rdma.produce": "exclusive"}],
    "shared": [{**SHM, "rdma.produce": "shared"}, {**SHM, "rdma.produce": "shared"}],
    "beside-tcp": [{**SHM, "rdma.produce": "shared"}, {"transport": "tcp"}],
    "tcp": [{"transport": "tcp"}],
}


def describe(raw: Raw, topics: Any = None) -> dict[str, list[tuple[bool, int, int]]]:
    """(is it a copy to come, lag, size) of the partition in each directory that has any of it."""
    answer = raw.call(build(p.DescribeLogDirsRequest, topics=topics), 4)
    return {
        d.log_dir: [
            (row.is_future_key, row.offset_lag, row.partition_size)
            for t in d.topics
            for row in t.partitions
            if (t.name, row.partition_index) == TP
        ]
        for d in answer.results
    }


def alter(raw: Raw, directory: str | Path, tp: TopicPartition = TP) -> int:
    """Have a partition moved; the code of the answer."""
    topics = [{"name": tp.topic, "partitions": [tp.partition]}]
    dirs = [{"path": str(directory), "topics": topics}]
    answer = raw.call(build(p.AlterReplicaLogDirsRequest, dirs=dirs), 2)
    ((topic,),) = [answer.results]
    assert (topic.topic_name, topic.partitions[0].partition_index) == tp
    return int(topic.partitions[0].error_code)


def place(raw: Raw) -> tuple[str, bool]:
    """(directory where the partition is, is a copy under way)."""
    found = describe(raw)
    (here,) = [d for d, rows in found.items() if any(not row[0] for row in rows)]
    return here, any(row[0] for rows in found.values() for row in rows)


def move(raw: Raw, directories: list[Path]) -> str:
    """To the other directory, and wait; where it is then."""
    here, _ = place(raw)
    (to,) = [str(d) for d in directories if str(d) != here]
    assert alter(raw, to) == ErrorCode.NONE
    wait_until(lambda: place(raw) == (to, False), "the partition is in its new directory", 60)
    return to


class Writer(threading.Thread):
    """Produces numbers with its own name, one after the other, until it is stopped."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.label, self.settings = name, settings
        self.sent = 0
        self.failed: list[Any] = []
        self.stopping = threading.Event()
        self.statistics: dict[str, Any] = {}

    def _told(self, error: Any, message: Any) -> None:
        if error is not None:
            self.failed.append(error)

    def run(self) -> None:
        try:
            with closing(kdirect.Producer({**self.settings, "linger.ms": 1})) as producer:
                while not self.stopping.is_set():
                    value = b"%s %d" % (self.label.encode(), self.sent)
                    producer.produce("t", value, partition=0, on_delivery=self._told)
                    self.sent += 1
                    if self.sent % 20 == 0:
                        time.sleep(0.002)
                assert producer.flush(60) == 0
                self.statistics = producer.statistics()
        except BaseException as e:
            self.failed.append(e)


class Reader(threading.Thread):
    """Reads all values, until `wanted` says how many there are."""

    def __init__(self, consumer: Any) -> None:
        super().__init__(daemon=True)
        self.values: list[bytes] = []
        self.offsets: list[int] = []
        self.wanted: int | None = None
        self.failed: list[BaseException] = []
        self.statistics: dict[str, Any] = {}
        self._consumer = consumer

    def run(self) -> None:
        try:
            deadline = time.monotonic() + 120
            while self.wanted is None or len(self.values) < self.wanted:
                assert time.monotonic() < deadline, f"{len(self.values)} of {self.wanted}"
                message = self._consumer.poll(0.1)
                if message is None:
                    continue
                assert message.error() is None, message.error()
                self.values.append(message.value())
                self.offsets.append(message.offset())
            if hasattr(self._consumer, "statistics"):
                self.statistics = self._consumer.statistics()
        except BaseException as e:
            self.failed.append(e)


def readers(servers: str, stack: ExitStack) -> list[Reader]:
    """A one-sided reader, and a stock client."""
    ours = stack.enter_context(
        kdirect.Consumer({"bootstrap.servers": servers, **SHM, "auto.offset.reset": "earliest"})
    )
    ours.assign({TP: 0})
    theirs = confluent_kafka.Consumer(
        {"bootstrap.servers": servers, "group.id": "g", "enable.auto.commit": False}
    )
    stack.callback(theirs.close)
    theirs.assign([confluent_kafka.TopicPartition("t", 0, 0)])
    return [Reader(ours), Reader(theirs)]


@pytest.fixture
def directories(tmp_path: Path) -> list[Path]:
    return [tmp_path / "a", tmp_path / "b"]


@pytest.fixture
def serving(directories: list[Path]) -> Iterator[Callable[..., BrokerProcess]]:
    """serving(**properties) -> a broker of two directories in a process of its own."""
    started: list[BrokerProcess] = []

    def start(**properties: Any) -> BrokerProcess:
        process = BrokerProcess(
            directories[0].parent / "first",
            {
                "log.segment.bytes": 1 << 17,
                "log.segment.delete.delay.ms": 0,
                **{name.replace("_", "."): value for name, value in properties.items()},
            },
        )
        process.log_dir = Path(",".join(map(str, directories)))  # --log-dirs takes several
        started.append(process)
        return process.start()

    yield start
    for process in started:
        process.kill()


def create(servers: str, **configs: str) -> None:
    with kdirect.connect({"bootstrap.servers": servers, "transport": "tcp"}) as session:
        session.admin.create_topic("t", 1, configs=configs or None)


@pytest.mark.parametrize("way", WRITERS)
def test_every_record_is_read_once_and_in_order(serving, directories, way: str) -> None:
    """While a partition is moved six times."""
    servers = serving().bootstrap_servers
    create(servers)
    raw = Raw(servers, timeout_s=60)
    with ExitStack() as stack:
        settings = {"bootstrap.servers": servers}
        writers = [Writer(f"w{n}", {**settings, **x}) for n, x in enumerate(WRITERS[way])]
        reading = readers(servers, stack)
        for thread in (*writers, *reading):
            thread.start()
        seen = 0
        for _ in range(6):
            seen += 400
            while not all(len(r.values) >= seen for r in reading):
                assert not any(x.failed for x in (*writers, *reading))
                time.sleep(0.01)
            move(raw, directories)
        for w in writers:
            w.stopping.set()
            w.join(90)
        assert not any(w.failed for w in writers), [w.failed for w in writers]
        total = sum(w.sent for w in writers)
        for r in reading:
            r.wanted = total
        for r in reading:
            r.join(130)
            assert not r.failed, r.failed
            assert r.offsets == list(range(total))
            for w in writers:
                mine = [v for v in r.values if v.startswith(w.label.encode())]
                assert mine == [b"%s %d" % (w.label.encode(), i) for i in range(w.sent)]
        assert (writers[0].statistics.get("rdma_records", 0) > 0) == (way != "tcp")
        assert reading[0].statistics["reads"] > 0
        assert not reading[0].statistics.get("fetches")
    here, under_way = place(raw)
    raw.close()
    assert not under_way
    # what it has left is removed after the move is told of as over
    wait_until(
        lambda: [str(x) for d in directories for x in d.glob("t-*")] == [f"{here}/t-0"],
        "the directories that it has left are removed",
    )


def test_commits_go_on_while_the_topic_of_groups_moves(serving, directories) -> None:
    """Over RDMA, and what was committed last is known after a restart."""
    broker = serving()
    servers = broker.bootstrap_servers
    create(servers)
    with kdirect.Producer({"bootstrap.servers": servers, "transport": "tcp"}) as producer:
        producer.produce("t", b"x", partition=0)
    raw = Raw(servers, timeout_s=60)
    offsets = TopicPartition("__consumer_offsets", 0)
    settings = {"bootstrap.servers": servers, "group.id": "g", "auto.offset.reset": "earliest"}
    settings |= {**SHM, "enable.auto.commit": False}
    committed = 0
    with kdirect.Consumer(settings) as consumer:
        consumer.subscribe(["t"])
        wait_until(lambda: consumer.poll(0.1) is not None, "it has its partition")
        moved = 0
        while moved < 4:
            to = directories[moved % 2]
            assert alter(raw, to, offsets) == ErrorCode.NONE

            def is_there(to: Path = to) -> bool:
                nonlocal committed
                committed += 1
                consumer.commit(offsets={TP: committed}, asynchronous=False)
                return (to / str(offsets)).exists() and len(list(to.parent.glob("*/__c*"))) == 1

            wait_until(is_there, "the topic of groups is there", 60)
            moved += 1
        assert consumer.statistics()["direct_commits"] > 0
    broker.kill()
    broker.start()
    with kdirect.Consumer(settings) as consumer:
        assert consumer.committed([TP])[TP] == committed
    raw.close()


def come_back(broker: BrokerProcess) -> None:
    """Once it is killed."""
    assert broker.process is not None
    assert broker.process.wait(60) == -9
    broker.kill()
    broker.start()


STEPS = (
    "move, everything is copied",
    "move, checkpoints are written",
    "move, the copy has its name",
    "move, the old directory is left",
)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("way", ["exclusive", "tcp"])
def test_a_broker_that_is_killed_in_a_move(
    serving, directories, monkeypatch, step: str, way: str
) -> None:
    """What was acknowledged is there afterwards, in one directory, and the move is made."""
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, step)
        broker = serving()
    servers = broker.bootstrap_servers
    create(servers)
    raw = Raw(servers, timeout_s=60)
    settings = {"bootstrap.servers": servers, "acks": "all", **WRITERS[way][0]}
    acknowledged: list[bytes] = []
    sent = 0

    def told(error: Any, message: Any) -> None:
        if error is None:
            acknowledged.append(message.value())

    with closing(kdirect.Producer({**settings, "delivery.timeout.ms": 60_000})) as producer:
        for sent in range(1500):
            producer.produce("t", b"%d" % sent, partition=0, on_delivery=told)
        assert producer.flush(60) == 0
        here, _ = place(raw)
        (to,) = [str(d) for d in directories if str(d) != here]
        raw.send(
            build(
                p.AlterReplicaLogDirsRequest,
                dirs=[{"path": to, "topics": [{"name": "t", "partitions": [0]}]}],
            ),
            2,
        )
        back = threading.Thread(target=come_back, args=(broker,))
        back.start()
        for sent in range(1500, 3000):
            producer.produce("t", b"%d" % sent, partition=0, on_delivery=told)
        assert producer.flush(90) == 0
        back.join()
        raw.close()
    assert acknowledged == [b"%d" % i for i in range(3000)]
    raw = Raw(servers, timeout_s=60)
    wait_until(lambda: place(raw) == (to, False), "the move was made", 60)
    raw.close()
    with ExitStack() as stack:
        for reader in readers(servers, stack):
            reader.wanted = 3000
            reader.start()
            reader.join(130)
            assert not reader.failed, reader.failed
            assert reader.values == acknowledged
    assert [str(x) for d in directories for x in d.glob("t-*")] == [f"{to}/t-0"]


def test_a_copy_is_told_of_and_can_be_given_up(serving, directories) -> None:
    """At a rate that may change at run time; 0 stops it."""
    broker = serving(replica_alter_log_dirs_io_max_bytes_per_second="0")
    servers = broker.bootstrap_servers
    create(servers)
    raw = Raw(servers, timeout_s=60)
    settings = {"bootstrap.servers": servers, "transport": "tcp"}
    with kdirect.Producer(settings) as producer:
        for i in range(3000):
            producer.produce("t", b"%d" % i * 50, partition=0)
            if i % 100 == 99:
                producer.flush()
    here, _ = place(raw)
    (to,) = [str(d) for d in directories if str(d) != here]
    assert alter(raw, to) == alter(raw, to) == ErrorCode.NONE
    found = describe(raw, [{"topic": "t", "partitions": [0]}])
    assert found[to] == [(True, 3000, 0)] and found[here][0][:2] == (False, 0)
    assert describe(raw, [{"topic": "t", "partitions": [1]}]) == {here: [], to: []}
    assert alter(raw, here) == ErrorCode.NONE
    wait_until(lambda: describe(raw)[to] == [], "the copy was given up")
    assert alter(raw, to) == ErrorCode.NONE
    broker.kill()
    broker.start()
    raw = Raw(servers, timeout_s=60)
    assert place(raw) == (here, True), "it is known from the answer on"
    assert alter(raw, here) == ErrorCode.NONE
    wait_until(lambda: describe(raw)[to] == [], "the copy was given up")
    admin = KafkaAdminClient(bootstrap_servers=servers)
    admin.alter_replica_log_dirs({("t", 0, 1): to})
    admin.close()
    assert place(raw) == (here, True)
    change = confluent_kafka.admin.ConfigResource("BROKER", "1")
    change.add_incremental_config(
        confluent_kafka.admin.ConfigEntry(
            "replica.alter.log.dirs.io.max.bytes.per.second",
            "100000000",
            incremental_operation=confluent_kafka.admin.AlterConfigOpType.SET,
        )
    )
    client = confluent_kafka.admin.AdminClient({"bootstrap.servers": servers})
    for future in client.incremental_alter_configs([change]).values():
        future.result(30)
    wait_until(lambda: place(raw) == (to, False), "the partition was moved", 60)
    raw.close()


def test_what_cannot_be_moved(directories) -> None:
    """Kafka's codes; a wish for what is not there yet is kept."""
    with kdirect.Broker(directories) as broker:
        raw = Raw(broker.bootstrap_servers, timeout_s=30)
        create(broker.bootstrap_servers)
        assert alter(raw, "/nowhere") == ErrorCode.LOG_DIR_NOT_FOUND
        assert alter(raw, directories[0].name) == ErrorCode.LOG_DIR_NOT_FOUND
        long = TopicPartition("x" * 249, 0)
        assert alter(raw, directories[0], long) == ErrorCode.INVALID_TOPIC_EXCEPTION
        for index in (1, -1):
            unknown = TopicPartition("t", index)
            code = alter(raw, directories[0], unknown)
            assert code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        later = TopicPartition("later", 0)
        here, _ = place(raw)
        # two of two: the other directory would be taken
        assert alter(raw, here, later) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        with kdirect.connect(
            {"bootstrap.servers": broker.bootstrap_servers, "transport": "tcp"}
        ) as session:
            session.admin.create_topic("later", 1)
        logs = broker.server.logs
        assert str(logs.partitions[later].directory.parent) == here
        away = next(d for d in directories if str(d) != here)
        os.rename(away, away.with_name("away"))
        away.write_bytes(b"")
        logs.checkpoint()
        wait_until(lambda: away in logs.offline, "the directory is offline")
        assert alter(raw, away) == ErrorCode.KAFKA_STORAGE_ERROR
        raw.close()
