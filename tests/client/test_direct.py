"""The RDMA paths end to end: a broker of its own in a process, real clients in others (KafkaDirect
§4.2.2, §4.4.2)."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import confluent_kafka
import pyarrow as pa
import pytest

import kdirect
from kdirect.client import connect
from kdirect.errors import (
    CorruptBatchError,
    DeliveryError,
    OffsetOutOfRangeError,
    TransportError,
    UnknownTopicError,
)
from kdirect.format.codec import encode_records
from kdirect.model import TopicPartition
from tests.support import cpu_ticks, stop_process, wait_until


def values_of(session, tp, start=0, stop=None, **settings):
    if stop is None:
        stop = session.latest_offsets([tp])[tp]
    reader = session.reader(tp, start, stop, **settings)
    try:
        return [v for batch in reader.batches() for v in batch.column("value").to_pylist()]
    finally:
        reader.close()


def kafka_values(servers, topic, count, partition=0):
    """What a stock Kafka client reads."""
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": servers, "group.id": "check", "auto.offset.reset": "earliest"}
    )
    consumer.assign([confluent_kafka.TopicPartition(topic, partition, 0)])
    out = []
    deadline = time.monotonic() + 30
    while len(out) < count and time.monotonic() < deadline:
        for message in consumer.consume(1000, 1.0):
            assert message.error() is None, message.error()
            assert message.offset() == len(out)
            out.append(message.value())
    consumer.close()
    return out


@pytest.fixture
def served(broker_process):
    """(session over shm, broker) with one topic `t` of one partition."""
    broker = broker_process()
    session = connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"})
    session.admin.create_topic("t", 1)
    yield session, broker
    session.close()


@pytest.fixture
def embedded(broker):
    """(session over shm, broker in this process), for what the broker's own counters show."""
    session = connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"})
    session.admin.create_topic("t", 1)
    yield session, broker
    session.close()


TP = TopicPartition("t", 0)


def test_a_record_written_by_rdma_is_read_by_rdma_and_by_a_stock_client(served):
    session, broker = served
    with session.producer() as producer:
        for i in range(1000):
            producer.produce(
                "t", b"value %d" % i, key=b"key %d" % i, partition=0, timestamp=1000 + i
            )
        producer.flush()
        stats = producer.statistics()
    assert (stats["rdma_records"], stats["rdma_requests"], stats.get("tcp_records", 0)) == (
        1000,
        1000,
        0,
    )
    reader = session.reader(TP, 0, 1000)
    batches = list(reader.batches())
    table = pa.Table.from_batches(batches)
    assert table.column("value").to_pylist() == [b"value %d" % i for i in range(1000)]
    assert table.column("key").to_pylist() == [b"key %d" % i for i in range(1000)]
    assert table.column("offset").to_pylist() == list(range(1000))
    assert table.column("timestamp").cast(pa.int64()).to_pylist() == [
        (1000 + i) * 1000 for i in range(1000)
    ]
    assert reader.transport == "shm"
    assert (
        reader.statistics()["read_bytes"] == stats["rdma_bytes"]
    )  # each byte READ once, none beyond the last readable position
    reader.close()
    assert kafka_values(broker.bootstrap_servers, "t", 1000) == [
        b"value %d" % i for i in range(1000)
    ]


def test_offsets_of_acknowledged_records(served):
    session, _ = served
    with session.producer() as producer:
        assert [producer.produce_sync("t", b"x", partition=0) for _ in range(50)] == list(range(50))


def test_reading_a_backlog_takes_no_cpu_of_the_broker(served):
    """The broker is stopped (SIGSTOP): slots and data are still read."""
    session, broker = served
    with session.producer() as producer:
        for _ in range(5000):
            producer.produce("t", b"v" * 100, partition=0)
    assert session.watermarks([TP]) == {TP: (0, 5000)}
    warm = session.reader(TP, 0, 10)
    assert sum(b.num_rows for b in warm.batches()) == 10
    consumer = kdirect.Consumer({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"})
    consumer.assign({TP: 0})
    stop_process(broker.pid)
    try:
        got = [consumer.poll(10).offset() for _ in range(5000)]
        assert consumer.poll(0.02) is None  # caught up: only slots are read
        assert session.watermarks([TP]) == {TP: (0, 5000)}
    finally:
        os.kill(broker.pid, signal.SIGCONT)
    assert got == list(range(5000))
    consumer.close()


def test_polling_an_idle_topic_costs_the_broker_nothing(served):
    session, broker = served
    with session.producer() as producer:
        producer.produce("t", b"v", partition=0)
    with kdirect.Consumer(
        {"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"}
    ) as consumer:
        consumer.assign({TP: 0})
        assert consumer.poll(10).value() == b"v"
        assert consumer.poll(0) is None
        time.sleep(0.3)  # whatever the broker still did for the requests before
        before, reads = cpu_ticks(broker.pid), consumer.statistics()["slot_reads"]
        for _ in range(100_000):
            assert consumer.poll(0) is None
        assert consumer.statistics()["slot_reads"] - reads >= 100_000
        assert (
            cpu_ticks(broker.pid) - before <= 1
        )  # a tick is 10 ms; 100,000 Kafka fetches take seconds


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_arrow_batches_and_positions_of_a_consumer(served, transport):
    session, broker = served
    session.admin.create_topic("two", 2)
    with session.producer() as producer:
        for i in range(3000):
            producer.produce("two", b"%d" % i, partition=i % 2)
    settings = {
        "bootstrap.servers": broker.bootstrap_servers,
        "transport": transport,
        "auto.offset.reset": "earliest",
    }
    with kdirect.Consumer(settings) as consumer:
        consumer.subscribe("two")
        seen: dict[int, list[bytes]] = {0: [], 1: []}
        while (batch := consumer.poll_arrow(0.5, max_bytes=16384)) is not None:
            (p,) = set(batch.column("partition").to_pylist())
            assert batch.column("offset")[0].as_py() == len(seen[p])
            seen[p] += batch.column("value").to_pylist()
            assert consumer.position(TopicPartition("two", p)) == len(seen[p])
        assert seen == {p: [b"%d" % i for i in range(p, 3000, 2)] for p in (0, 1)}
        consumer.seek(TopicPartition("two", 1), 1490)
        assert [consumer.poll(0.5).offset() for _ in range(10)] == list(range(1490, 1500))
        assert consumer.poll(0.02) is None


def test_one_read_refreshes_all_slots_of_a_consumer(served):
    session, broker = served
    session.admin.create_topic("many", 20)
    with session.producer() as producer:
        for p in range(20):
            producer.produce("many", b"%d" % p, partition=p)
    settings = {
        "bootstrap.servers": broker.bootstrap_servers,
        "transport": "shm",
        "auto.offset.reset": "earliest",
    }
    with kdirect.Consumer(settings) as consumer:
        consumer.subscribe("many")
        assert sorted(int(consumer.poll(10).value()) for _ in range(20)) == list(range(20))
        assert consumer.poll(0) is None  # all of them wait for their slots to change
        before = consumer.statistics()
        assert consumer.poll(0) is None
        after = consumer.statistics()
        assert after["slot_reads"] - before["slot_reads"] == 1
        # The smallest region that holds all 20.
        assert after["slot_read_bytes"] - before["slot_read_bytes"] == 20 * 64
        assert after["access_requests"] == 1


def test_moving_from_segment_to_segment_while_they_are_written(embedded):
    session, broker = embedded
    session.admin.create_topic("small", 1, configs={"segment.bytes": "65536"})
    tp = TopicPartition("small", 0)
    expected = [b"%06d" % i + b"." * 300 for i in range(5000)]
    with kdirect.Consumer(
        {"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"}
    ) as consumer:
        consumer.assign({tp: 0})
        got = []
        with session.producer() as producer:
            for i, value in enumerate(expected):
                producer.produce("small", value, partition=0)
                if i % 7 == 0:
                    while (record := consumer.poll(0)) is not None:
                        got.append(record.value())
            producer.flush()
            assert producer.statistics()["rdma_records"] == 5000
        while (record := consumer.poll(0.5)) is not None:
            got.append(record.value())
        assert got == expected
        # Segments read to their end are released: one file and the producer's are held, not
        # twenty-five.
        assert broker.statistics()["rdma_grants"] <= 2
        assert len(list(Path(broker.log_dirs[0], "small-0").glob("*.log"))) > 20
    assert values_of(session, tp) == expected
    assert kafka_values(broker.bootstrap_servers, "small", 5000) == expected


def test_reads_start_at_2_kib_grow_with_the_lag_and_shrink_when_caught_up(served):
    session, broker = served
    with session.producer() as producer:
        for _ in range(4000):
            producer.produce("t", b"v" * 1000, partition=0)
        producer.flush()
        with kdirect.Consumer(
            {"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"}
        ) as consumer:
            consumer.assign({TP: 0})
            stream = consumer._reading.paths.cursor(TP).stream
            assert stream.read_size == 2048
            sizes = []
            for _ in range(4000):
                assert consumer.poll(10) is not None
                sizes.append(stream.read_size)
            assert max(sizes) == 1 << 20
            for _ in range(40):
                producer.produce_sync("t", b"v", partition=0)
                assert consumer.poll(10) is not None
            assert stream.read_size == 2048


def test_a_batch_larger_than_the_read_buffer_and_reads_that_cut_batches(broker_process):
    broker = broker_process(**{"message.max.bytes": 8 << 20})
    session = connect(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "transport": "shm",
            "fetch.max.read.bytes": 2048,
            "fetch.buffer.bytes": 65536,
        }
    )
    session.admin.create_topic("t", 1)
    sizes = [1, 2000, 3000, 5 << 20, 10, 70_000]
    with session.producer(send_buffer_bytes=32 << 20, batch_bytes=6 << 20) as producer:
        for n in sizes:
            producer.send_arrow(
                pa.record_batch({"value": pa.array([os.urandom(n)], pa.binary())}), "t"
            )
    assert [len(v) for v in values_of(session, TP)] == sizes
    session.close()


def test_memory_of_a_reader_does_not_grow_with_the_backlog(served):
    session, _ = served
    session.admin.create_topic("big", 1)
    tp = TopicPartition("big", 0)
    rows = pa.record_batch({"value": pa.array([b"v" * 1000] * 10_000, pa.binary())})
    with session.producer() as producer:
        for _ in range(20):
            producer.send_arrow(rows, "big")  # 200 MB, several segments
    reader = session.reader(tp, 0, 200_000, target_bytes=1 << 20)
    most = total = 0
    for batch in reader.batches():
        total += batch.num_rows
        most = max(most, reader._place.paths.statistics()["buffer_bytes"], batch.nbytes)
    assert total == 200_000
    assert most <= 8 << 20
    reader.close()


def test_a_damaged_batch_is_told_and_not_handed_on(served):
    session, broker = served
    with session.producer() as producer:
        for i in range(10):
            producer.produce("t", b"value %d" % i, partition=0)
    (segment,) = Path(broker.log_dir, "t-0").glob("*.log")
    data = segment.read_bytes()
    with segment.open("r+b") as f:
        f.seek(data.index(b"value 7"))
        f.write(b"VALUE")
    with pytest.raises(CorruptBatchError, match=r"t-0"):
        values_of(session, TP)
    assert values_of(session, TP, 0, 7) == [b"value %d" % i for i in range(7)]


def test_a_second_producer_takes_tcp_and_both_are_kept(served):
    session, _ = served
    with session.producer() as first, session.producer() as second:
        first.produce_sync("t", b"first", partition=0)
        for i in range(500):
            second.produce("t", b"second %d" % i, partition=0)
            first.produce("t", b"first %d" % i, partition=0)
        second.flush()
        first.flush()
        assert (
            second.statistics().get("tcp_records", 0) + second.statistics().get("rdma_records", 0)
            == 500
        )
    got = Counter(values_of(session, TP))
    assert got == Counter(
        [b"first", *(b"second %d" % i for i in range(500)), *(b"first %d" % i for i in range(500))]
    )


def test_a_plain_kafka_producer_recalls_exclusive_access_and_nothing_is_lost(embedded):
    session, broker = embedded
    plain = confluent_kafka.Producer(
        {"bootstrap.servers": broker.bootstrap_servers, "linger.ms": 0}
    )
    with session.producer() as direct:
        for i in range(2000):
            direct.produce("t", b"direct %d" % i, partition=0)
            if i % 100 == 50:
                plain.produce("t", b"plain %d" % i, partition=0)
                plain.poll(0)
                time.sleep(0.005)
        assert plain.flush(20) == 0
        direct.flush()
    count = session.latest_offsets([TP])[TP]
    got = kafka_values(broker.bootstrap_servers, "t", count)
    assert set(got) == {b"direct %d" % i for i in range(2000)} | {
        b"plain %d" % i for i in range(50, 2000, 100)
    }
    # Order of the RDMA producer's records, repetitions (at least once) aside.
    firsts = list(dict.fromkeys(v for v in got if v.startswith(b"direct")))
    assert firsts == [b"direct %d" % i for i in range(2000)]
    assert broker.statistics()["rdma_recalls"] >= 1


WRITER = """
import sys
from kdirect.client import connect
session = connect({"bootstrap.servers": sys.argv[1], "transport": "shm"})
producer = session.producer()
i = 0
while True:
    offset = producer.produce_sync("t", b"%d" % i, partition=0)
    sys.stdout.write("%d %d\\n" % (i, offset))
    sys.stdout.flush()
    i += 1
"""


def test_a_producer_killed_in_the_middle_loses_access_and_leaves_no_trace(served):
    session, broker = served
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, broker.bootstrap_servers], stdout=subprocess.PIPE, text=True
    )
    acknowledged = [child.stdout.readline() for _ in range(2000)]
    child.kill()
    acknowledged += child.stdout.read().splitlines(keepends=True)
    child.wait()
    pairs = [tuple(map(int, line.split())) for line in acknowledged if line.endswith("\n")]
    assert all(i == offset for i, offset in pairs)
    with session.producer() as producer:  # exclusive access is free again
        offset = producer.produce_sync("t", b"after", partition=0)
        assert producer.statistics().get("rdma_records") == 1
    assert (
        len(pairs) <= offset <= len(pairs) + 1
    )  # one may have been committed and not acknowledged
    assert values_of(session, TP) == [b"%d" % i for i in range(offset)] + [b"after"]


def test_a_refused_batch_fails_alone_and_the_ones_behind_it_arrive(served):
    session, _ = served
    good = [encode_records([(None, b"good %d" % i, [], 1000)]) for i in range(3)]
    bad = bytearray(good[0])
    bad[-3] ^= 0xFF
    producer = session.producer()
    producer.produce_sync("t", b"before", partition=0)
    for data in (good[0], bytes(bad), good[1], good[2]):
        producer._driver.send(TP, data, 1)
    with pytest.raises(DeliveryError, match=r"t-0.*CORRUPT_MESSAGE"):
        producer.flush()
    producer.close()
    assert values_of(session, TP) == [b"before", b"good 0", b"good 1", b"good 2"]


def test_a_forged_file_id_is_cut_and_others_go_on(embedded):
    session, broker = embedded
    session.admin.create_topic("other", 1)
    with session.producer() as victim:
        victim.produce_sync("other", b"mine", partition=0)
        attacker = session.producer()
        attacker.produce_sync("t", b"one", partition=0)
        writer = attacker._driver.open(TP).writer
        victim_id = victim._driver.open(TopicPartition("other", 0)).writer.file_id
        channel = next(iter(attacker._driver.links)).channel
        memory = channel.local_memory(4096)
        channel.qp.post_write_imm(9, memory, 0, 0, 0, 0, victim_id << 16 | 1)
        deadline = time.monotonic() + 10
        while not next(iter(attacker._driver.links)).router.broken and time.monotonic() < deadline:
            next(iter(attacker._driver.links)).router.drain()
            time.sleep(0.01)
        assert next(iter(attacker._driver.links)).router.broken
        assert broker.statistics()["rdma_clients_cut"] >= 1
        assert victim.produce_sync("other", b"still", partition=0) == 1
        assert (
            attacker.produce_sync("t", b"two", partition=0) == 1
        )  # it may come back by the front door
        assert writer is not attacker._driver.open(TP).writer
        attacker.close()
    assert values_of(session, TopicPartition("other", 0)) == [b"mine", b"still"]


@pytest.mark.parametrize(
    ("size", "file_id", "length", "why"),
    [(7, 0, 8, "no produce request"), (9, 0, 8, "no produce request"),
     (0, 0, 8, "no produce request"), (8, 1, 8, "not granted"),
     (8, 0, 0, "announced"), (8, 0, 1 << 31, "announced")],
)  # fmt: skip
def test_a_malformed_notice_is_cut_and_others_go_on(embedded, caplog, size, file_id, length, why):
    session, broker = embedded
    session.admin.create_topic("other", 1)
    with session.producer(rdma_notify="send") as victim:
        victim.produce_sync("other", b"mine", partition=0)
        attacker = session.producer(rdma_notify="send")
        attacker.produce_sync("t", b"one", partition=0)
        if file_id:
            file_id = victim._driver.open(TopicPartition("other", 0)).writer.file_id
        else:
            file_id = attacker._driver.open(TP).writer.file_id
        channel = next(iter(attacker._driver.links)).channel
        memory = channel.local_memory(4096)
        memoryview(memory.memory)[:8] = struct.pack("<HHI", file_id, 1, length)
        channel.qp.post_send(9, memory, 0, size)
        deadline = time.monotonic() + 10
        while not next(iter(attacker._driver.links)).router.broken and time.monotonic() < deadline:
            next(iter(attacker._driver.links)).router.drain()
            time.sleep(0.01)
        assert next(iter(attacker._driver.links)).router.broken
        # It is counted once the connection has been closed.
        wait_until(lambda: broker.statistics()["rdma_clients_cut"] == 1)
        assert why in caplog.text
        assert victim.produce_sync("other", b"still", partition=0) == 1
        assert (
            attacker.produce_sync("t", b"two", partition=0) == 1
        )  # it may come back by the front door
        assert attacker.statistics()["rdma_records"] == 2
        attacker.close()
    assert values_of(session, TopicPartition("other", 0)) == [b"mine", b"still"]


def test_acknowledgements_do_not_travel_over_tcp(embedded):
    session, broker = embedded
    with session.producer() as producer:
        producer.produce_sync("t", b"x", partition=0)
        before = broker.statistics()
        for _ in range(3000):
            producer.produce("t", b"y" * 50, partition=0)
        producer.flush()
        after = broker.statistics()
    assert after["rdma_commits"] - before["rdma_commits"] == 3000
    steps = after["log_head_growths"] - before["log_head_growths"]
    requests = after["rdma_access_requests"] - before["rdma_access_requests"]
    assert steps <= 2 and requests <= 2 * steps + 1, (
        "one for each step by which the head grows, and one when half of it is full"
    )


def test_a_tcp_consumer_that_waits_is_woken_by_an_rdma_record(served):
    session, broker = served
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": "g",
            "fetch.wait.max.ms": 20000,
            "fetch.min.bytes": 1,
            "socket.timeout.ms": 60000,
        }
    )
    consumer.assign([confluent_kafka.TopicPartition("t", 0, 0)])
    assert consumer.poll(1.0) is None
    with session.producer() as producer:
        for i in range(5):
            begin = time.monotonic()
            producer.produce_sync("t", b"%d" % i, partition=0)
            message = consumer.poll(15)
            assert message is not None and message.value() == b"%d" % i
            assert time.monotonic() - begin < 10  # far below the fetch's own wait
            time.sleep(0.1)
    consumer.close()


def test_group_commit_acknowledges_rdma_requests_after_the_sync(broker_process):
    """log.flush.before.ack: acknowledged means on disk, and readers see a record no earlier."""
    broker = broker_process(**{"log.flush.before.ack": "true"})
    session = connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"})
    session.admin.create_topic("t", 1)
    with session.producer() as producer:
        assert [producer.produce_sync("t", b"%d" % i, partition=0) for i in range(20)] == list(
            range(20)
        )
        for i in range(20, 500):
            producer.produce("t", b"%d" % i, partition=0)
        producer.flush()
        assert producer.statistics()["rdma_records"] == 500
        assert session.watermarks([TP]) == {TP: (0, 500)}
    broker.kill()
    broker.start()
    assert values_of(session, TP) == [b"%d" % i for i in range(500)]
    session.close()


def test_records_of_a_topic_with_log_append_time_carry_the_brokers_time(served):
    session, _ = served
    session.admin.create_topic("stamped", 1, configs={"message.timestamp.type": "LogAppendTime"})
    tp = TopicPartition("stamped", 0)
    before = int(time.time() * 1000)
    with session.producer() as producer:
        producer.produce_sync("stamped", b"x", partition=0, timestamp=5)
        assert producer.statistics()["rdma_records"] == 1
    reader = session.reader(tp, 0, 1)
    (batch,) = reader.batches()
    reader.close()
    assert batch.column("timestampType").to_pylist() == [1]
    assert (
        before
        <= batch.column("timestamp").cast(pa.int64())[0].as_py() // 1000
        <= time.time() * 1000 + 1
    )


def test_a_broker_that_restarts_keeps_its_records_and_clients_come_back(broker_process):
    broker = broker_process()
    session = connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"})
    session.admin.create_topic("t", 1)
    producer = session.producer()
    consumer = kdirect.Consumer({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"})
    for i in range(100):
        producer.produce_sync("t", b"%d" % i, partition=0)
    consumer.assign({TP: 0})
    got = [consumer.poll(10).value() for _ in range(60)]
    broker.kill()
    broker.start()
    for i in range(100, 200):
        producer.produce_sync("t", b"%d" % i, partition=0)
    producer.close()
    while (record := consumer.poll(2)) is not None:
        got.append(record.value())
    assert got == [b"%d" % i for i in range(200)]
    consumer.close()
    session.close()


def test_wrong_transport_and_wrong_places_are_told(served):
    session, broker = served
    with pytest.raises(OffsetOutOfRangeError, match=r"t-0"):
        values_of(session, TP, 5, 10)
    with pytest.raises(UnknownTopicError, match="nowhere"):
        session.producer(allow_auto_create_topics=False).produce("nowhere", b"x")
    with pytest.raises(UnknownTopicError, match="partition 3"):
        session.producer().produce("t", b"x", partition=3)
    with pytest.raises(TransportError, match="verbs"):
        _ = connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "verbs"}).transport
    with pytest.raises(kdirect.errors.ConfigError, match="transport"):
        connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "smoke-signals"})


def test_rdma_can_be_switched_off_on_the_broker_and_auto_says_why(broker_process):
    broker = broker_process(**{"rdma.transports": ""})
    session = connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "auto"})
    assert session.transport == "tcp"
    assert "offers no RDMA (rdma.transports)" in session.transport_reason
    session.admin.create_topic("t", 1)
    with session.producer() as producer:
        for i in range(100):
            producer.produce("t", b"%d" % i, partition=0)
        producer.flush()
        assert producer.statistics()["tcp_records"] == 100
    assert values_of(session, TP) == [b"%d" % i for i in range(100)]
    with kdirect.Consumer({"bootstrap.servers": broker.bootstrap_servers}) as consumer:
        consumer.assign({TP: 95})
        assert [consumer.poll(2).value() for _ in range(5)] == [b"95", b"96", b"97", b"98", b"99"]
    with pytest.raises(TransportError, match="shm"):
        _ = connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"}).transport
    session.close()


@pytest.mark.parametrize(
    ("switch", "path"), [("rdma.produce", "produce"), ("rdma.consume", "consume")]
)
def test_each_datapath_can_be_switched_off_alone(broker_process, switch, path):
    broker = broker_process(**{switch: "false"})
    session = connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"})
    session.admin.create_topic("t", 1)
    with session.producer() as producer:
        producer.send_arrow(pa.record_batch({"value": pa.array([b"a", b"b"], pa.binary())}), "t")
        producer.flush()
        assert ("tcp_records" in producer.statistics()) == (path == "produce")
    reader = session.reader(TP, 0, 2)
    assert [v for b in reader.batches() for v in b.column("value").to_pylist()] == [b"a", b"b"]
    assert reader.transport == ("tcp" if path == "consume" else "shm")
    reader.close()
    session.close()


def test_columns_of_an_arrow_batch_reach_the_right_partitions(served):
    session, _ = served
    session.admin.create_topic("cols", 4)
    n = 1000
    data = pa.record_batch(
        {
            "value": pa.array([b"v%d" % i for i in range(n)], pa.binary()),
            "key": pa.array(
                [None if i % 10 == 0 else b"k%d" % (i % 50) for i in range(n)], pa.binary()
            ),
            "partition": pa.array([3 if i % 7 == 0 else None for i in range(n)], pa.int32()),
            "headers": pa.array(
                [[{"key": "h", "value": b"%d" % i}] if i % 2 else None for i in range(n)],
                pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
            ),
        }
    )
    with session.producer() as producer:
        assert producer.send_arrow(data, "cols") == n
    seen = {}
    for p in range(4):
        tp = TopicPartition("cols", p)
        reader = session.reader(tp, 0, session.latest_offsets([tp])[tp], include_headers=True)
        for batch in reader.batches():
            for row in batch.to_pylist():
                seen[row["value"]] = (p, row["key"], row["headers"])
        reader.close()
    assert len(seen) == n
    from kafka.partitioner.default import (
        murmur2 as reference,
    )  # Kafka's own partitioning, by another library

    for i in range(n):
        p, key, headers = seen[b"v%d" % i]
        assert key == (None if i % 10 == 0 else b"k%d" % (i % 50))
        assert (headers or None) == ([{"key": "h", "value": b"%d" % i}] if i % 2 else None)
        if i % 7 == 0:
            assert p == 3
        elif key is not None:
            assert p == (reference(key) & 0x7FFFFFFF) % 4
