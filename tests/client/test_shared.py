"""Many producers of one partition at once: RDMA producers in processes of their own, Kafka's
clients, producers that die or stop in the middle (KafkaDirect §4.2.2).

What holds in every test: offsets without holes, each producer's records in the order it produced
them, none lost that was acknowledged, and, idempotence being the default, none there twice."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict

import confluent_kafka
import pytest

import kdirect
from kdirect.broker.shared_word import Loopback, SharedWord
from kdirect.client import connect
from kdirect.errors import AccessDeniedError
from kdirect.model import TopicPartition
from kdirect.rdma import open_device
from tests.support import stop_process

TP = TopicPartition("t", 0)

# Sends records "name number" and says how many are acknowledged; with a number of records it ends
# by itself.
PRODUCER = """
import sys, time
from kdirect.client import connect
servers, name, count, size = sys.argv[1], sys.argv[2].encode(), int(sys.argv[3]), int(sys.argv[4])
settings = dict(x.split("=") for x in sys.argv[5:])
settings = {"transport": "shm", "rdma.produce": "shared", **settings}
session = connect({"bootstrap.servers": servers, **settings})
producer = session.producer()
i = 0
while count == 0 or i < count:
    for _ in range(50):
        producer.produce("t", b"%s %d " % (name, i) + b"." * size, partition=0)
        i += 1
        if i == count:
            break
    producer.flush()
    print(i, flush=True)
    if count == 0 or count > 5000:
        # Endless, and read line by line; or to be under way for as long as what happens to the
        # broker.
        time.sleep(0.002)
statistics = producer.statistics()
producer.close()
rdma, tcp = (statistics.get(name, 0) for name in ("rdma_records", "tcp_records"))
print("rdma", rdma, "tcp", tcp, flush=True)
"""


@pytest.fixture
def start():
    """Starts producer processes: start(servers, name, count=0, size=100, **settings)."""
    children = []

    def run(
        servers: str, name: str, count: int = 0, size: int = 100, **settings: object
    ) -> subprocess.Popen:
        arguments = [f"{k.replace('_', '.')}={v}" for k, v in settings.items()]
        child = subprocess.Popen(
            [sys.executable, "-c", PRODUCER, servers, name, str(count), str(size), *arguments],
            stdout=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        return child

    yield run
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGCONT)
        child.kill()
        child.wait()


@pytest.fixture
def served(broker_process):
    """(session, broker) with topic `t` of one partition and, unless told otherwise, short patience
    with holes."""
    made = []

    def make(segment_bytes: int = 1 << 22, **properties: object):
        broker = broker_process(**{"rdma.produce.hole.timeout.ms": 200, **properties})
        session = connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"})
        session.admin.create_topic("t", 1, configs={"segment.bytes": str(segment_bytes)})
        made.append(session)
        return session, broker

    yield make
    for session in made:
        session.close()


def log_of(session, tp=TP):
    """Every value of the partition; offsets are dense."""
    reader = session.reader(tp, 0, session.latest_offsets([tp])[tp])
    values = []
    for batch in reader.batches():
        offsets = batch.column("offset").to_pylist()
        assert offsets == list(range(len(values), len(values) + len(offsets)))
        values += batch.column("value").to_pylist()
    reader.close()
    return values


def by_producer(values):
    out = defaultdict(list)
    for value in values:
        name, number = value.split()[:2]
        out[name.decode()].append(int(number))
    return out


def acknowledged(child):
    """How many records the producer knows to be in the log, and its counts by path."""
    lines = child.stdout.read().splitlines()
    numbers = [int(x) for x in lines if x.isdigit()]
    counts = next((x.split() for x in lines if x.startswith("rdma")), None)
    return (numbers[-1] if numbers else 0), counts


def wait_for(child, records):
    """Until the producer has that many records acknowledged; how many."""
    while (n := int(child.stdout.readline())) < records:
        pass
    return n


def wait_for_growth(session, records, timeout_s=20):
    """Until so many more records are in the log."""
    start = session.latest_offsets([TP])[TP]
    deadline = time.monotonic() + timeout_s
    while session.latest_offsets([TP])[TP] < start + records:
        assert time.monotonic() < deadline, (
            f"the log stands still at {session.latest_offsets([TP])[TP]}"
        )
        time.sleep(0.01)


def test_five_rdma_producers_and_kafka_clients_on_one_partition_through_many_segments(
    served, start
):
    session, broker = served(segment_bytes=65536, **{"rdma.produce.hole.timeout.ms": 5000})
    servers = broker.bootstrap_servers
    children = {f"p{i}": start(servers, f"p{i}", 2000, 100) for i in range(5)}
    kafka_python = pytest.importorskip("kafka")
    plain = kafka_python.KafkaProducer(bootstrap_servers=servers, acks="all")
    idempotent = confluent_kafka.Producer(
        {"bootstrap.servers": servers, "linger.ms": 1, "enable.idempotence": True}
    )
    futures = []
    for i in range(400):
        futures.append(plain.send("t", b"kafka %d" % i, partition=0))
        idempotent.produce("t", b"confluent %d" % i, partition=0)
        idempotent.poll(0)
        if i % 20 == 0:
            time.sleep(0.01)
    plain.flush()
    assert idempotent.flush(30) == 0
    offsets = [f.get(10).offset for f in futures]
    assert offsets == sorted(set(offsets))
    for name, child in children.items():
        assert child.wait(60) == 0
        count, (_, rdma, _, tcp) = acknowledged(child)
        assert (count, int(rdma), int(tcp)) == (2000, 2000, 0), name  # nobody was sent to TCP
    found = by_producer(log_of(session))
    assert found == {
        **{name: list(range(2000)) for name in children},
        "kafka": list(range(400)),
        "confluent": list(range(400)),
    }
    plain.close()


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_write_and_send_carries_what_write_with_imm_does(served, start, mode):
    """`rdma.notify=send`, alone and beside a producer that notifies the other way, through several
    segments."""
    session, broker = served(segment_bytes=262144, **{"rdma.produce.hole.timeout.ms": 5000})
    servers = broker.bootstrap_servers
    children = {
        "sends": start(
            servers, "sends", 3000, 300, rdma_notify="send", rdma_produce=mode, max_in_flight=64
        )
    }
    if mode == "shared":
        children["imm"] = start(servers, "imm", 3000, 300)
    for name, child in children.items():
        assert child.wait(60) == 0
        count, (_, rdma, _, tcp) = acknowledged(child)
        assert (count, int(rdma), int(tcp)) == (3000, 3000, 0), name
    assert by_producer(log_of(session)) == {name: list(range(3000)) for name in children}


def test_two_producers_in_auto_mode_share_and_one_alone_writes_exclusively(broker):
    session = connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"})
    session.admin.create_topic("auto", 1)
    tp = TopicPartition("auto", 0)
    with session.producer() as first, session.producer() as second:
        for i in range(100):
            first.produce("auto", b"first %d" % i, partition=0)
        first.flush()
        assert first.statistics()["paths"] == {str(tp): "exclusive"}
        for i in range(100):
            second.produce("auto", b"second %d" % i, partition=0)
            first.produce("auto", b"first %d" % (100 + i), partition=0)
        first.flush()
        second.flush()
        assert first.statistics()["paths"] == second.statistics()["paths"] == {str(tp): "shared"}
        assert (
            first.statistics()["rdma_records"] == 200 and second.statistics()["rdma_records"] == 100
        )
    found = by_producer(log_of(session, tp))
    assert found == {"first": list(range(200)), "second": list(range(100))}
    session.close()


def test_exclusive_access_is_refused_to_a_second_producer_and_handed_over(served, start):
    session, broker = served()
    servers = broker.bootstrap_servers
    alone = {"bootstrap.servers": servers, "transport": "shm", "rdma.produce": "exclusive"}
    with kdirect.Producer(alone) as first:
        first.produce_sync("t", b"first 0", partition=0)
        other = kdirect.Producer(alone)
        with pytest.raises(AccessDeniedError, match=r"t-0 is written by another RDMA producer"):
            other.produce_sync("t", b"other", partition=0)
        other.abort()
        first.produce_sync("t", b"first 1", partition=0)
    with kdirect.Producer(alone) as second:  # released
        second.produce_sync("t", b"second 0", partition=0)
    child = start(servers, "gone", 0, 10, rdma_produce="exclusive")
    wait_for(child, 50)
    child.kill()
    with kdirect.Producer(alone) as third:  # its holder is gone
        third.produce_sync("t", b"third 0", partition=0)
        with kdirect.Producer({**alone, "rdma.produce": "auto"}) as other:
            other.produce_sync(
                "t", b"other 0", partition=0
            )  # over TCP; the holder steps aside and comes back
            assert other.statistics()["tcp_records"] == 1
        third.produce_sync("t", b"third 1", partition=0)
        assert third.statistics()["rdma_records"] >= 1
    found = by_producer(log_of(session))
    assert (
        found["first"] == [0, 1]
        and found["other"] == [0]
        and found["second"] == [0]
        and found["third"] == [0, 1]
    )
    assert found["gone"] == list(range(len(found["gone"])))


@pytest.mark.parametrize("how", ["killed", "stopped", "rubbish"])
def test_a_producer_that_fails_in_the_middle_is_cut_out_and_the_others_go_on(served, start, how):
    session, broker = served()
    servers = broker.bootstrap_servers
    others = [start(servers, f"p{i}", 0) for i in range(2)]
    for child in others:
        wait_for(child, 100)
    victim = subprocess.Popen(
        [sys.executable, "-c", VICTIM, servers, how], stdout=subprocess.PIPE, text=True
    )
    said, n = victim.stdout.readline().split()
    assert said == "reserved"
    if how == "killed":
        victim.kill()
    elif how == "stopped":
        stop_process(victim.pid)
    wait_for_growth(session, 2000)  # they regain access by themselves
    if how == "stopped":
        victim.send_signal(signal.SIGCONT)
        assert victim.stdout.readline() == "woke up\n"  # and writes where it had reserved
    wait_for_growth(session, 2000)
    for child in others:
        child.send_signal(signal.SIGKILL)
        child.wait()
    victim.kill()
    victim.wait()
    time.sleep(0.3)
    found = by_producer(log_of(session))
    for i, child in enumerate(others):
        count, _ = acknowledged(child)
        assert found[f"p{i}"] == list(range(len(found[f"p{i}"]))) and len(found[f"p{i}"]) >= count
    assert set(found) <= {"p0", "p1", "victim"} and found["victim"] == list(range(int(n)))


@pytest.mark.parametrize("mode", ["shared", "exclusive", "off"])
def test_a_broker_that_is_killed_under_load_has_everything_once_and_in_order(served, start, mode):
    """Three lives of a broker on the same files; what producers repeat after each is recognised
    (mode `off`: over Kafka's protocol)."""
    session, broker = served()
    children = {
        name: start(
            broker.bootstrap_servers, name, 20000, 100, rdma_produce=mode, connect_timeout_ms=20000
        )
        for name in (["a"] if mode == "exclusive" else ["a", "b"])
    }
    for child in children.values():
        wait_for(
            child, 50
        )  # a broker that goes while a producer opens its first connection is another matter
    for _ in range(2):
        wait_for_growth(session, 2000)
        broker.kill()
        broker.start()
    numbers = {name: list(range(20000)) for name in children}
    for name, child in children.items():
        count, paths = acknowledged(child)
        assert child.wait(60) == 0 and count == 20000, (
            f"{name} ended early: {child.stderr and child.stderr.read()}"
        )
        assert mode == "off" or int(paths[1]) > 0, paths
    assert by_producer(log_of(session)) == numbers


# Writes records as it should, then reserves room behind one and stops; when it wakes up, it writes
# there.  It reserves by COMPARE_AND_SWAP, as producers may, so that nothing is reserved when the
# others have filled the head or it has moved on: then all of it once more.
VICTIM = """
import sys, time
from kdirect.client import connect
from kdirect.errors import QueuePairError
from kdirect.model import TopicPartition
tp = TopicPartition("t", 0)
session = connect({"bootstrap.servers": sys.argv[1], "transport": "shm", "rdma.produce": "shared"})
producer = session.producer()
def reserve(path):
    # (order, position) of 500 bytes of the head, or None when they do not fit or access has ended.
    writer, qp, cq = path.writer, path.channel.qp, path.channel.send_cq
    writer.wait_completed()
    word, taken = 0, -1
    while word != taken:
        if taken >= 0:
            word = taken
        if (word & (1 << 48) - 1) + 500 > writer.length:
            return None
        new = word + (1 << 48 | 500) & (1 << 64) - 1
        try:
            qp.post_compare_swap(0, memory, 0, writer.word_address, writer.word_rkey, word, new)
        except QueuePairError:
            return None
        while not (done := cq.poll(1)):
            pass
        if not done[0].ok:
            return None
        taken = int.from_bytes(memoryview(memory.memory)[:8], "little")
    return word >> 48, word & (1 << 48) - 1
reserved = None
n = 0
while reserved is None:
    producer.produce_sync("t", b"victim %d" % n, partition=0)
    n += 1
    if not producer._driver.is_direct(tp):
        continue
    path = producer._driver.open(tp)
    memory = path.channel.local_memory(4096)
    reserved = reserve(path)
order, position = reserved
writer, qp = path.writer, path.channel.qp
def write(filler):
    memoryview(memory.memory)[:500] = filler * 500
    address, immediate = writer.address + position, writer.file_id << 16 | order
    qp.post_write_imm(0, memory, 0, 500, address, writer.rkey, immediate)
if sys.argv[2] == "rubbish":
    write(b"\\xa5")
print("reserved", n, flush=True)
time.sleep(1)
print("woke up", flush=True)
try:
    write(b"\\x5a")
except Exception as e:
    print(e, flush=True)
time.sleep(60)
"""


def test_a_word_that_two_threads_close_is_closed_once(monkeypatch):
    """The second would take the first for a reservation beyond the end: where the head ends would
    not be known."""
    device = open_device("shm")
    loopback = Loopback(device)
    add, both = Loopback.fetch_add, threading.Barrier(2)

    def slowly(*arguments):
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # both, if there are two
        return add(*arguments)

    word = SharedWord(loopback, 1000)
    assert word.reserve(24) == (0, 1000)
    monkeypatch.setattr(Loopback, "fetch_add", slowly)
    found = []
    threads = [threading.Thread(target=lambda: found.append(word.close())) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    monkeypatch.undo()
    assert found == [(1, 1024), (1, 1024)] and word.close() == (1, 1024)
    reserved = word.reserve(8)
    assert reserved.order == 1 and reserved.position > 1 << 40, "beyond the end of every file"
    word.end()
    loopback.close()
    device.close()
