"""Processes that die: producers and consumers that are killed, also in the middle of a WRITE, and a
broker that is killed."""

from __future__ import annotations

from collections.abc import Callable

import kdirect
from kdirect.client.session import Session
from kdirect.model import TopicPartition
from tests.support import BrokerProcess
from tests.verbs.conftest import TRANSPORT, WAIT_S, Bystander, Child, eventually, values_of

Children = Callable[..., Child]

WRITER = """
import sys
import kdirect
settings = {"bootstrap.servers": sys.argv[1], "transport": sys.argv[2]}
session = kdirect.connect({**settings, "client.id": "doomed"})
producer = session.producer()
value = b"." * int(sys.argv[4])
i = 0
while True:
    offset = producer.produce_sync(sys.argv[3], b"%d" % i + value, partition=0)
    assert "tcp_records" not in producer.statistics()
    print(i, offset, flush=True)
    i += 1
"""

# Half of a batch lies behind the tail when it stops; the other half, and the immediate data, never
# come.
HALF_A_WRITE = """
import sys, time
import kdirect
from kdirect.format.codec import encode_records
from kdirect.model import TopicPartition
settings = {"bootstrap.servers": sys.argv[1], "transport": sys.argv[2]}
session = kdirect.connect({**settings, "client.id": "doomed"})
tp = TopicPartition(sys.argv[3], 0)
channel = session.channel(tp, receives=16, sends=16)
ring = channel.remote_writable_memory(1024)
grant = channel.produce_access(tp, 1000, ring, 16)
batch = encode_records([(None, b"half " * 200, [], 1000)])
memory = channel.local_memory(4096)
memoryview(memory.memory)[: len(batch)] = batch
channel.qp.post_write(1, memory, 0, len(batch) // 2, grant.address + grant.position, grant.rkey)
assert channel.send_cq.wait(30000) and channel.send_cq.poll(1)[0].ok
print("half", flush=True)
time.sleep(600)
"""

READER = """
import sys
import kdirect
from kdirect.model import TopicPartition
settings = {"bootstrap.servers": sys.argv[1], "transport": sys.argv[2]}
session = kdirect.connect({**settings, "client.id": "doomed"})
consumer = kdirect.Consumer(settings, session=session)
consumer.assign({TopicPartition(sys.argv[3], 0): 0})
while True:
    record = consumer.poll(1)
    if record is not None:
        print(record.offset(), flush=True)
"""


def check_that_access_is_free(session: Session, tp: TopicPartition) -> int:
    """Somebody else writes over RDMA; the offset."""
    with session.producer() as producer:
        offset = producer.produce_sync(tp.topic, b"after", partition=0)
        if (
            producer.statistics().get("rdma_records") != 1
        ):  # the broker may not have seen the other's end yet

            def direct() -> bool:
                producer.produce_sync(tp.topic, b"after", partition=0)
                return bool(producer.statistics().get("rdma_records"))

            eventually(direct)
    return offset


def test_a_producer_killed_in_the_middle(
    session: Session, broker: BrokerProcess, tp, bystander: Bystander, child: Children
) -> None:
    writer = child(WRITER, broker.bootstrap_servers, TRANSPORT, tp.topic, "20000")
    writer.wait_for_lines(100)
    pairs = [tuple(map(int, line.split())) for line in writer.kill()]
    assert all(i == offset for i, offset in pairs)
    bystander.works()
    offset = check_that_access_is_free(session, tp)
    assert (
        len(pairs) <= offset <= len(pairs) + 1
    )  # one may have been committed and not acknowledged
    assert [v.rstrip(b".") for v in values_of(session, tp, 0, offset)] == [
        b"%d" % i for i in range(offset)
    ]


def test_a_producer_killed_with_half_a_batch_written(
    session: Session, broker: BrokerProcess, tp, bystander: Bystander, child: Children
) -> None:
    with session.producer() as producer:
        before = [producer.produce_sync(tp.topic, b"%d" % i, partition=0) for i in range(5)]
    assert before == list(range(5))
    writer = child(HALF_A_WRITE, broker.bootstrap_servers, TRANSPORT, tp.topic)
    writer.wait_for_lines(1)
    writer.kill()
    bystander.works()
    assert check_that_access_is_free(session, tp) == 5
    assert values_of(session, tp, 0, 6) == [*(b"%d" % i for i in range(5)), b"after"]


def test_a_consumer_killed_while_it_reads(
    session: Session, broker: BrokerProcess, tp, bystander: Bystander, child: Children
) -> None:
    with session.producer() as producer:
        for i in range(200):
            producer.produce(tp.topic, b"%d" % i, partition=0)
        producer.flush()
        reader = child(READER, broker.bootstrap_servers, TRANSPORT, tp.topic)
        reader.wait_for_lines(50)
        assert [int(line) for line in reader.kill()][:50] == list(range(50))
        bystander.works()
        assert producer.produce_sync(tp.topic, b"after", partition=0) == 200
        assert producer.statistics()["rdma_records"] == 201


def test_a_killed_broker_comes_back_with_all_it_acknowledged(own_broker, connect) -> None:
    broker = own_broker()
    session = connect(broker, delivery_timeout_ms=100_000)
    session.admin.create_topic("t", 1)
    tp = TopicPartition("t", 0)
    producer = session.producer()
    consumer = kdirect.Consumer(dict(session.settings), session=session)
    assert [producer.produce_sync("t", b"%d" % i, partition=0) for i in range(50)] == list(
        range(50)
    )
    assert producer.statistics()["rdma_records"] == 50
    consumer.assign({tp: 0})
    got = [consumer.poll(WAIT_S).value() for _ in range(30)]
    broker.kill()
    broker.start()
    for i in range(50, 100):
        producer.produce_sync("t", b"%d" % i, partition=0)
    producer.close()
    while len(got) < 100:
        record = consumer.poll(WAIT_S)
        assert record is not None, f"nothing more after {len(got)} records"
        got.append(record.value())
    assert got == [b"%d" % i for i in range(100)]
    assert session.transport == TRANSPORT
    with session.producer() as again:
        again.produce_sync("t", b"more", partition=0)
        eventually(
            lambda: (
                again.produce_sync("t", b"more", partition=0)
                and again.statistics().get("rdma_records")
            )
        )
    consumer.close()


def test_a_broker_killed_under_a_stream_of_writes(own_broker, connect, child: Children) -> None:
    """What was acknowledged is there, in order, when it comes back; the client's process repeats
    what was not."""
    broker = own_broker()
    session = connect(broker)
    session.admin.create_topic("t", 1)
    writer = child(
        WRITER.replace('assert "tcp', 'True or "tcp'),
        broker.bootstrap_servers,
        TRANSPORT,
        "t",
        "3000",
    )
    writer.wait_for_lines(100)
    broker.kill()
    known = len(writer.lines)
    broker.start()
    writer.wait_for_lines(known + 50)  # it goes on by itself
    pairs = [tuple(map(int, line.split())) for line in writer.kill()]
    fresh = connect(broker, client_id="fresh")
    tp = TopicPartition("t", 0)
    got = [int(v.rstrip(b".")) for v in values_of(fresh, tp)]
    assert [got[offset] for _, offset in pairs] == [i for i, _ in pairs]
    assert list(dict.fromkeys(got)) == list(range(len(set(got))))  # in order; at least once
