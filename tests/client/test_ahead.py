"""A producer alone on a partition is granted the next head while it fills the present one, and goes
on there without a pause.

What holds in every test: offsets without holes, each producer's records in the order it produced
them, none lost that was acknowledged and none there twice; and no file stays behind that is not
part of the log.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import confluent_kafka
import pytest

from kdirect.broker.head_access import HeadAccess
from kdirect.broker.produce_access import ProduceAccess
from kdirect.client import connect
from kdirect.client.direct_write import NO_ROOM_BUFFER, NO_ROOM_FILE, SENT
from kdirect.errors import KdirectError
from kdirect.log.head import PreparedHead
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition
from tests.support import stop_process, wait_until

TP = TopicPartition("t", 0)
SEGMENT_BYTES = 256 << 10
VALUE_BYTES = 1000
A_SEGMENT = SEGMENT_BYTES // (VALUE_BYTES + 100)  # so many records fit into one at least

# Produces "number" to a partition and says how many are acknowledged, for ever.
ENDLESS = """
import sys
from kdirect.client import connect
session = connect({"bootstrap.servers": sys.argv[1], "transport": "shm"})
producer = session.producer()
i = 0
while True:
    for _ in range(100):
        producer.produce("t", b"%d " % i + b"." * 1000, partition=int(sys.argv[2]))
        i += 1
    producer.flush()
    print(i, producer.statistics()["rdma_files_ahead"], flush=True)
"""


@pytest.fixture
def served(broker_process):
    """(session, broker) with topic `t`, of one partition by default, and small segments."""
    made = []

    def make(partitions: int = 1, **properties: object):
        broker = broker_process(**properties)
        session = connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"})
        session.admin.create_topic("t", partitions, configs={"segment.bytes": str(SEGMENT_BYTES)})
        made.append(session)
        return session, broker

    yield make
    for session in made:
        session.close()


@pytest.fixture
def endless():
    """Starts a producer process: endless(servers, partition)."""
    children = []

    def run(servers: str, partition: int = 0) -> subprocess.Popen:
        command = [sys.executable, "-c", ENDLESS, servers, str(partition)]
        children.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return children[-1]

    yield run
    for child in children:
        child.send_signal(signal.SIGCONT)
        child.kill()
        child.wait()


def value(i: int) -> bytes:
    return b"%d " % i + b"." * VALUE_BYTES


def log_of(session, tp: TopicPartition = TP) -> list[int]:
    """The number of every record; offsets are dense."""
    reader = session.reader(tp, 0, session.latest_offsets([tp])[tp])
    numbers: list[int] = []
    for batch in reader.batches():
        offsets = batch.column("offset").to_pylist()
        assert offsets == list(range(len(numbers), len(numbers) + len(offsets)))
        numbers += [int(v.split()[0]) for v in batch.column("value").to_pylist()]
    reader.close()
    return numbers


def leftovers(broker, partition: int = 0) -> list[str]:
    """Files under temporary names."""
    return sorted(p.name for p in broker.log_dir.glob(f"t-{partition}/*.tmp"))


@pytest.mark.parametrize("mode", ["exclusive", "auto"])
@pytest.mark.parametrize("notify", ["imm", "send"])
def test_a_producer_goes_on_from_segment_to_segment_without_asking_at_the_end_of_each(
    served, mode, notify
):
    session, broker = served()
    count = 30 * A_SEGMENT
    with session.producer(**{"rdma.produce": mode, "rdma.notify": notify}) as producer:
        for i in range(count):
            producer.produce("t", value(i), partition=0)
        producer.flush()
        statistics = producer.statistics()
    assert statistics["rdma_records"] == count and not statistics.get("tcp_records")
    assert statistics["rdma_files_ahead"] >= 15, "most segments were granted ahead"
    assert log_of(session) == list(range(count))
    segments = sorted((broker.log_dir / "t-0").glob("*.log"))
    assert len(segments) >= 28 and all(p.stat().st_size <= SEGMENT_BYTES for p in segments)
    wait_until(
        lambda: len(leftovers(broker)) <= 3, "one spare is kept, and given back after a while"
    )


def test_each_record_awaited_gets_its_own_offset_across_segments(served):
    session, _ = served()
    with session.producer() as producer:
        count = 6 * A_SEGMENT
        assert [producer.produce_sync("t", value(i), partition=0) for i in range(count)] == list(
            range(count)
        )
        assert producer.statistics()["rdma_files_ahead"] >= 2
        futures = [producer.send("t", value(i), partition=0) for i in range(count, 3 * count)]
        producer.flush()
        assert [f.result(10).offset() for f in futures] == list(range(count, 3 * count))
    assert log_of(session) == list(range(3 * count))


def test_a_kafka_client_gets_its_turn_although_the_next_file_is_granted(served):
    session, broker = served()
    plain = confluent_kafka.Producer(
        {"bootstrap.servers": broker.bootstrap_servers, "linger.ms": 1}
    )
    count = 40 * A_SEGMENT
    theirs = 0
    with session.producer() as producer:
        for i in range(count):
            producer.produce("t", value(i), partition=0)
            if (
                i % (2 * A_SEGMENT) == A_SEGMENT + A_SEGMENT // 2
            ):  # about when the next file is granted
                plain.produce("t", b"-1 ", partition=0)
                theirs += 1
        producer.flush()
        assert plain.flush(30) == 0
    log = log_of(session)
    assert [n for n in log if n >= 0] == list(range(count)) and log.count(-1) == theirs


def test_a_second_producer_joins_although_the_next_file_is_granted(served, endless):
    session, broker = served()
    child = endless(broker.bootstrap_servers)
    while int(child.stdout.readline().split()[1]) < 3:
        pass
    with session.producer() as producer:
        for i in range(3 * A_SEGMENT):
            producer.produce("t", b"-%d " % (i + 1), partition=0)
        producer.flush()
        assert producer.statistics()["rdma_records"] > 0
    before = int(child.stdout.readline().split()[0])
    while int(child.stdout.readline().split()[0]) < before + 1000:
        pass
    child.kill()
    child.wait()
    log = log_of(session)
    first = [n for n in log if n >= 0]
    assert first == list(range(len(first))), "the first producer goes on, in order"
    assert [-n for n in log if n < 0] == list(range(1, 3 * A_SEGMENT + 1))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_producer_that_dies_or_stops_with_the_next_file_in_its_hands(served, endless, number):
    """A partition for each try: one that had two producers grants nothing ahead for ten seconds."""
    tries = 4
    session, broker = served(tries)
    for partition in range(tries):
        child = endless(broker.bootstrap_servers, partition)
        while int(child.stdout.readline().split()[1]) < 2:
            pass
        child.send_signal(number)
        with session.producer(**{"delivery.timeout.ms": "20000"}) as producer:
            producer.produce_sync("t", b"-1 ", partition=partition)
        child.send_signal(signal.SIGCONT)
        child.kill()
        out = child.stdout.read().splitlines()
        child.wait()
        acknowledged = max(
            [int(line.split()[0]) for line in out if len(line.split()) == 2], default=0
        )
        log = log_of(session, TopicPartition("t", partition))
        theirs = [n for n in log if n >= 0]
        assert theirs == list(range(len(theirs))) and len(theirs) >= acknowledged
        assert log.count(-1) == 1
    for partition in range(tries):
        wait_until(
            lambda p=partition: len(leftovers(broker, p)) <= 3,
            f"files are left behind: {leftovers(broker, partition)}",
        )


def test_a_killed_broker_keeps_what_it_acknowledged_and_forgets_files_granted_ahead(
    served, endless
):
    session, broker = served()
    child = endless(broker.bootstrap_servers)
    for _ in range(3):
        files = 0
        while files < 2:
            acknowledged, files = map(int, child.stdout.readline().split())
        broker.kill()
        left = {p.stat().st_ino for p in (broker.log_dir / "t-0").glob("*.tmp")}
        broker.start()
        assert not left & {p.stat().st_ino for p in (broker.log_dir / "t-0").glob("*.tmp")}
        wait_until(
            lambda n=acknowledged: session.latest_offsets([TP])[TP] > n + A_SEGMENT,
            "the producer goes on",
        )
    stop_process(child.pid)
    log = log_of(session)
    assert log == list(range(len(log))) and len(log) >= acknowledged


def fill_until_granted_ahead(producer, first: int, *, second_half: bool) -> int:
    """Produce from number `first` on until the next file is granted and not yet opened; its
    acknowledgements go into the first half of the ring, unless `second_half`.  The next number."""
    for i in range(first, first + 20 * A_SEGMENT):
        assert producer.produce_sync("t", value(i), partition=0) == i
        path = producer._driver.appender(TP)
        if (
            (path.writer.other_half > 0) == second_half
            and path.next_asked is not None
            and path.next_asked.wait(5000)
        ):
            assert not path.next_asked.result(0).error_code
            return i + 1
    raise AssertionError("no file was granted ahead")


@pytest.mark.parametrize("second_half", [False, True])
def test_what_is_said_of_a_file_ahead_does_not_lie_in_the_way_of_another_grant(
    broker, monkeypatch, second_half
):
    """That one's acknowledgements come into the first half of the ring, however late the thread is
    that ends the file."""
    fence, slow, fenced = HeadAccess.fence, threading.Event(), threading.Event()

    def fence_slowly(access: HeadAccess, *, notify: bool):
        ahead = access.prepared is not None
        assert not ahead or slow.wait(20)
        fence(access, notify=notify)
        if ahead:
            fenced.set()

    with closing(
        connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"})
    ) as session:
        session.admin.create_topic("t", 1, configs={"segment.bytes": str(SEGMENT_BYTES)})
        with session.producer() as producer, session.producer(**{"rdma.produce": "off"}) as plain:
            count = fill_until_granted_ahead(producer, 0, second_half=second_half)
            path = producer._driver.appender(TP)
            monkeypatch.setattr(HeadAccess, "fence", fence_slowly)
            assert (
                plain.produce_sync("t", value(count), partition=0) == count
            )  # the head is recalled for it
            path.grant_by(1, time.monotonic() + 10)
            acks = broker.statistics()["rdma_acks"]
            assert path.writer.try_record(value(count + 1)) == SENT
            wait_until(lambda: broker.statistics()["rdma_acks"] > acks, "it is committed")
            time.sleep(0.05)
            slow.set()
            assert fenced.wait(20)
            assert path.writer.wait_acknowledged(path.writer.posted - 1, 5000), (
                "acknowledged as if nothing had been"
            )
            assert not path.writer.revoked
        assert log_of(session) == list(range(count + 2))


def test_segment_bytes_changed_while_the_next_file_is_granted(broker):
    """That file stays as long as it was granted; the size counts from the one after it."""
    with closing(
        connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"})
    ) as session:
        session.admin.create_topic("t", 1, configs={"segment.bytes": str(SEGMENT_BYTES)})
        with session.producer(**{"batch.bytes": 32 << 10}) as producer:
            count = 0
            for i in range(60):
                for _ in range(A_SEGMENT // 2):
                    producer.produce("t", value(count), partition=0)
                    count += 1
                producer.flush()
                session.admin.alter_configs(
                    "t", {"segment.bytes": str(SEGMENT_BYTES // (1, 2, 4)[i % 3])}
                )
            statistics = producer.statistics()
        assert (
            statistics["rdma_records"] == count
            and not statistics.get("tcp_records")
            and statistics["rdma_files_ahead"] >= 10
        )
        assert (
            broker.statistics()["rdma_heads_cut"] == 0 == broker.statistics()["rdma_heads_fenced"]
        )
        assert log_of(session) == list(range(count))


def test_the_next_file_may_have_the_id_of_the_one_before_the_present(broker):
    """There are 65,535 of them, and clients that come and go use them up."""
    grants = broker.server.access._grants
    with closing(
        connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"})
    ) as session:
        session.admin.create_topic("t", 1, configs={"segment.bytes": str(SEGMENT_BYTES)})
        with session.producer() as producer:
            count = before = present = reused = 0
            while reused < 5:
                assert producer.produce_sync("t", value(count), partition=0) == count
                count += 1
                file_id = producer._driver.appender(TP).writer.file_id
                if file_id != present:
                    reused += file_id == before
                    before, present = present, file_id
                if before and grants.get(before) is None:
                    grants._next = before
                assert count < 40 * A_SEGMENT
            assert producer.statistics()["rdma_files_ahead"] >= 5
        assert log_of(session) == list(range(count))


def test_a_file_that_cannot_become_the_head_goes_after_the_key_to_it(broker, monkeypatch):
    """Its producer may write it until then; it repeats what it wrote there."""
    roll_into, join, fence, discard = (
        Partition.roll_into,
        HeadAccess.join,
        HeadAccess.fence,
        PreparedHead.discard,
    )
    granted: list[PreparedHead | None] = []
    fenced: list[PreparedHead | None] = []
    discarded: list[bool] = []

    def failing(partition: Partition, prepared: PreparedHead):
        monkeypatch.setattr(
            prepared, "publish", lambda base_offset: os.rename("/nowhere", "/nowhere/else")
        )
        return roll_into(partition, prepared)

    def joining(access: HeadAccess, *arguments, **more):
        granted.append(access.prepared)
        return join(access, *arguments, **more)

    def fencing(access: HeadAccess, *, notify: bool):
        fence(access, notify=notify)
        fenced.append(access.prepared)

    def discarding(prepared: PreparedHead):
        if prepared.address and prepared in granted:
            discarded.append(prepared in fenced)
        discard(prepared)

    with closing(
        connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"})
    ) as session:
        session.admin.create_topic("t", 1, configs={"segment.bytes": str(SEGMENT_BYTES)})
        with session.producer(**{"batch.bytes": 32 << 10}) as producer:
            count = 20 * A_SEGMENT
            for i in range(count):
                if i == 5 * A_SEGMENT:
                    for owner, name, patched in (
                        (Partition, "roll_into", failing),
                        (HeadAccess, "join", joining),
                        (HeadAccess, "fence", fencing),
                        (PreparedHead, "discard", discarding),
                    ):
                        monkeypatch.setattr(owner, name, patched)
                if i == 12 * A_SEGMENT:
                    monkeypatch.setattr(Partition, "roll_into", roll_into)
                producer.produce("t", value(i), partition=0)
            producer.flush()
        assert discarded and all(discarded)
        assert log_of(session) == list(range(count))


def test_deleting_the_topic_while_the_next_file_is_granted(served, endless):
    session, broker = served(log_segment_delete_delay_ms=0)
    child = endless(broker.bootstrap_servers)
    while int(child.stdout.readline().split()[1]) < 2:
        pass
    session.admin.delete_topic("t")
    child.wait(30)
    wait_until(lambda: not list(broker.log_dir.glob("t-0*")), "the partition's files go")
    session.admin.create_topic("t", 1, configs={"segment.bytes": str(SEGMENT_BYTES)})
    with session.producer() as producer:
        assert producer.produce_sync("t", value(0), partition=0) == 0
    assert log_of(session) == [0]


def test_a_producer_is_told_of_a_deletion_that_meets_its_change_of_files(broker, monkeypatch):
    """The full head is sealed on a thread while the deletion begins: what is in the file ahead is
    not committed any more."""
    begun = threading.Event()
    roll_into, begin, fence = Partition.roll_into, ProduceAccess.begin_deletion, HeadAccess.fence

    def fencing(access: HeadAccess, *, notify: bool):
        time.sleep(
            0.3 if begun.is_set() else 0
        )  # what it writes now arrives, and nobody commits it
        fence(access, notify=notify)

    def held(partition: Partition, prepared: PreparedHead):
        armed.set()
        assert begun.wait(20)
        return roll_into(partition, prepared)

    def beginning(access: ProduceAccess, partitions):
        heads = begin(access, partitions)
        begun.set()
        return heads

    armed = threading.Event()
    ended: list[BaseException | None] = []
    with closing(
        connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"})
    ) as session:
        session.admin.create_topic("t", 1, configs={"segment.bytes": str(SEGMENT_BYTES)})
        producer = session.producer(**{"allow.auto.create.topics": "false"})

        def produce() -> None:
            try:
                for _ in range(100 * A_SEGMENT):
                    producer.produce("t", value(0), partition=0)
                producer.flush(15)
                ended.append(None)
            except Exception as e:
                ended.append(e)

        while producer.statistics().get("rdma_files_ahead", 0) < 1:
            producer.produce_sync("t", value(0), partition=0)
        monkeypatch.setattr(Partition, "roll_into", held)
        monkeypatch.setattr(ProduceAccess, "begin_deletion", beginning)
        monkeypatch.setattr(HeadAccess, "fence", fencing)
        thread = threading.Thread(target=produce)
        thread.start()
        assert armed.wait(20)
        began = time.monotonic()
        session.admin.delete_topic("t")
        thread.join(30)
        assert not thread.is_alive() and time.monotonic() - began < 10
        with pytest.raises(KdirectError):
            producer.close()
            raise ended[0] or AssertionError("nothing failed")


def test_deleting_the_topic_frees_the_file_that_was_granted_ahead(served):
    """Its producer lives on and keeps its connection."""
    session, broker = served(log_segment_delete_delay_ms=0)
    producer = session.producer()
    while producer.statistics().get("rdma_files_ahead", 0) < 2:
        producer.produce_sync("t", value(0), partition=0)
    for _ in range(A_SEGMENT * 3 // 4):  # the next file is asked for in the middle
        producer.produce_sync("t", value(0), partition=0)
    session.admin.delete_topic("t")

    def mapped() -> list[str]:
        with open(f"/proc/{broker.pid}/maps") as maps:
            return [
                line.split()[-2] for line in maps if "/t-0" in line and line.endswith("(deleted)\n")
            ]

    wait_until(lambda: not mapped(), "files of the deleted partition stay mapped")
    producer.close()


def test_records_that_are_refused_around_the_change_of_files(served):
    """A batch that the broker refuses in one file, with requests under way in the next."""
    session, _ = served()
    with session.producer(**{"enable.idempotence": "false"}) as producer:
        failed = []
        count = 12 * A_SEGMENT

        def report(error, message):
            if error is not None:
                failed.append(message)

        future_ms = int(time.time() * 1000) + 7_200_000  # an hour is allowed
        for i in range(count):
            refused = i % A_SEGMENT in (A_SEGMENT - 3, A_SEGMENT - 2)
            producer.produce(
                "t",
                value(i),
                partition=0,
                timestamp=future_ms if refused else 0,
                on_delivery=report,
            )
        producer.flush()
    log = log_of(session)
    assert len(log) == len(set(log)) and len(log) + len(failed) == count
    assert len(failed) == 2 * len([i for i in range(count) if i % A_SEGMENT == A_SEGMENT - 3])


@pytest.mark.parametrize("gone_on", [False, True])
@pytest.mark.parametrize("mode", ["exclusive", "auto"])
def test_a_partition_given_back_with_a_file_granted_ahead(served, mode, gone_on):
    """Nobody holds it any more, whether its writer stands in the file ahead or not, and the queue
    pair lasts, over which the producer writes other partitions."""
    session, broker = served()
    with session.producer(**{"rdma.produce": mode, "max.in.flight": 2}) as producer:
        path = None
        for i in range(20 * A_SEGMENT):
            producer.produce("t", value(i), partition=0)
            producer.flush()
            path = producer._driver.appender(TP)
            if (
                path.next_asked is not None
                and path.next_asked.wait(5000)
                and not path.next_asked.result(0).error_code
            ):
                break
        assert path.next_asked is not None and i < 20 * A_SEGMENT - 1
        router, writer = path.router, path.writer
        if gone_on:
            while writer.try_record(value(0)) != NO_ROOM_FILE:
                assert writer.wait_acknowledged(writer.posted - 1, 5000)
            assert path.take_next(time.monotonic() + 5)
            present = writer.file_id
            # The window is full when the file is: it goes on, and sends nothing.
            stop_process(broker.process.pid)
            try:
                threads = list(Path(f"/proc/{broker.pid}/task").glob("*/stat"))
                wait_until(
                    lambda: all(
                        t.read_text().rpartition(")")[2].split()[0] == "T" for t in threads
                    ),
                    "the broker is stopped",
                )
                assert [writer.try_record(v) for v in (b"", b"", value(0))] == [
                    SENT,
                    SENT,
                    NO_ROOM_BUFFER,
                ]
                assert writer.file_id != present
            finally:
                broker.process.send_signal(signal.SIGCONT)
            assert writer.wait_acknowledged(writer.posted - 1, 5000)
        producer._driver.give_back(TP)
        with session.producer(**{"rdma.produce": mode}) as other:
            other.produce("t", value(0), partition=0)
            other.flush()
            assert other.statistics()["rdma_records"] == 1
            router.drain()
            assert not router.broken
        producer.produce("t", value(1), partition=0)
        producer.flush()
        assert next(iter(producer._driver.links)).router is router and not router.broken
    wait_until(lambda: len(leftovers(broker)) <= 3, "the file ahead is discarded")


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_a_recall_that_meets_the_release_finds_a_ring(broker, monkeypatch, mode, ahead):
    """A WRITE into memory that is deregistered would break the queue pair, and with it what goes
    over it to other partitions."""
    release, met = ProduceAccess.release, []

    def recall_first(access: ProduceAccess, grant, *, clean: bool = True):
        if grant.partition.topic_partition == TP and not grant.released:
            met.append(grant.file_id)
            for file_id in [
                f for f, g in grant.peer.grants.items() if g.partition.topic_partition == TP
            ]:
                grant.head_access.engine.worker.recall(file_id)
        release(access, grant, clean=clean)

    with closing(
        connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"})
    ) as session:
        session.admin.create_topic("t", 1, configs={"segment.bytes": str(SEGMENT_BYTES)})
        session.admin.create_topic("other", 1)
        with session.producer(**{"rdma.produce": mode}) as producer:
            assert producer.produce_sync("other", value(0), partition=0) == 0
            assert producer.produce_sync("t", value(0), partition=0) == 0
            if ahead and mode == "exclusive":
                fill_until_granted_ahead(producer, 1, second_half=True)
            router = producer._driver.appender(TP).router
            monkeypatch.setattr(ProduceAccess, "release", recall_first)
            producer._driver.give_back(TP)
            assert met
            assert producer.produce_sync("other", value(1), partition=0) == 1
            router.drain()
            assert next(iter(producer._driver.links)).router is router and not router.broken
        assert broker.statistics()["rdma_clients_cut"] == 0
