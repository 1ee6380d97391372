"""Produce and consume over verbs: a broker process and real clients.

KafkaDirect §4.2.2 and §4.4.2.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import confluent_kafka
import pyarrow as pa

import kdirect
from kdirect.client.session import Session
from kdirect.model import TopicPartition
from tests.support import BrokerProcess, stop_process
from tests.verbs.conftest import TRANSPORT, WAIT_S, eventually, kafka_values, values_of

Topics = Callable[..., TopicPartition]


def consumer_of(session: Session, tp: TopicPartition) -> kdirect.Consumer:
    consumer = kdirect.Consumer(dict(session.settings), session=session)
    consumer.assign({tp: 0})
    return consumer


def test_auto_picks_it_and_says_why(broker: BrokerProcess, connect) -> None:
    session = connect(broker, transport="auto")
    assert session.transport == TRANSPORT
    assert session.transport_reason


def test_a_record_written_over_verbs_is_read_over_verbs_and_by_a_stock_client(
    session: Session, broker: BrokerProcess, tp
) -> None:
    values = [b"value %d" % i for i in range(300)]
    with session.producer() as producer:
        for i, value in enumerate(values):
            producer.produce(tp.topic, value, key=b"key %d" % i, partition=0, timestamp=1000 + i)
        producer.flush()
        stats = producer.statistics()
    assert (stats["rdma_records"], stats["rdma_requests"]) == (300, 300)
    reader = session.reader(tp, 0, 300)
    table = pa.Table.from_batches(list(reader.batches()))
    assert reader.transport == TRANSPORT
    assert table.column("value").to_pylist() == values
    assert table.column("key").to_pylist() == [b"key %d" % i for i in range(300)]
    assert table.column("offset").to_pylist() == list(range(300))
    assert (
        reader.statistics()["read_bytes"] == stats["rdma_bytes"]
    )  # each byte READ once, none beyond the last readable position
    reader.close()
    assert kafka_values(broker, tp, 300) == values


def test_write_and_send_and_requests_in_sends(session: Session, tp) -> None:
    with (
        session.producer(rdma_notify="send", rdma_produce="shared") as producer,
        session.producer(produce_path="send") as two_sided,
    ):
        for i in range(100):
            producer.produce(tp.topic, b"notice %d" % i, partition=0)
            two_sided.produce(tp.topic, b"message %d" % i, partition=0)
        producer.flush()
        two_sided.flush()
        assert (
            producer.statistics()["rdma_records"] == two_sided.statistics()["send_records"] == 100
        )
    found = values_of(session, tp)
    for name in (b"notice", b"message"):
        assert [v for v in found if v.startswith(name)] == [
            b"%s %d" % (name, i) for i in range(100)
        ]


def test_offsets_of_acknowledged_records(session: Session, tp) -> None:
    with session.producer() as producer:
        assert [producer.produce_sync(tp.topic, b"x", partition=0) for _ in range(20)] == list(
            range(20)
        )
        assert producer.statistics()["rdma_records"] == 20


def test_reading_takes_no_part_of_the_broker(session: Session, broker: BrokerProcess, tp) -> None:
    """The broker is stopped (SIGSTOP): slots and data are still read."""
    with session.producer() as producer:
        for i in range(500):
            producer.produce(tp.topic, b"%d" % i * 20, partition=0)
    assert session.watermarks([tp]) == {tp: (0, 500)}
    consumer = consumer_of(session, tp)
    first = consumer.poll(WAIT_S)
    stop_process(broker.pid)
    try:
        got = [first.value(), *(consumer.poll(WAIT_S).value() for _ in range(499))]
        assert consumer.poll(0.02) is None  # caught up: only slots are read
        assert session.watermarks([tp]) == {tp: (0, 500)}
    finally:
        os.kill(broker.pid, signal.SIGCONT)
    assert got == [b"%d" % i * 20 for i in range(500)]
    consumer.close()


def test_reads_start_at_2_kib_and_grow_with_the_lag(session: Session, tp) -> None:
    with session.producer() as producer:
        producer.send_arrow(
            pa.record_batch({"value": pa.array([b"v" * 1000] * 3000, pa.binary())}), tp.topic
        )
        producer.flush()
        with consumer_of(session, tp) as consumer:
            stream = consumer._reading.paths.cursor(tp).stream
            assert stream.read_size == 2048
            sizes = set()
            for _ in range(3000):
                assert consumer.poll(WAIT_S) is not None
                sizes.add(stream.read_size)
            assert max(sizes) > 8192
            lagging = consumer.statistics()
            assert lagging["reads"] < 300  # 3 MB: from 2 KiB up, and not in 1,500 READs of 2 KiB
            for i in range(30):
                producer.produce_sync(tp.topic, b"v", partition=0)
                assert consumer.poll(WAIT_S).offset() == 3000 + i
            assert stream.read_size == 2048
            assert (
                consumer.statistics()["reads"] == lagging["reads"] + 30
            )  # caught up: a READ a record


def test_one_read_refreshes_all_slots_of_a_consumer(session: Session, topic: Topics) -> None:
    name = topic(8).topic
    with session.producer() as producer:
        for p in range(8):
            producer.produce(name, b"%d" % p, partition=p)
    with kdirect.Consumer(dict(session.settings), session=session) as consumer:
        consumer.assign({TopicPartition(name, p): 0 for p in range(8)})
        assert sorted(int(consumer.poll(WAIT_S).value()) for _ in range(8)) == list(range(8))
        before = consumer.statistics()
        for fetcher in consumer._reading.paths.direct:
            fetcher.refresh()
        after = consumer.statistics()
        assert after["slot_reads"] - before["slot_reads"] == 1
        assert after["slot_read_bytes"] - before["slot_read_bytes"] == 8 * 64


def test_moving_from_segment_to_segment_while_they_are_written(
    session: Session, broker: BrokerProcess, topic: Topics
) -> None:
    tp = topic(segment_bytes=65536)
    expected = [b"%06d" % i + b"." * 1000 for i in range(400)]
    got = []
    with consumer_of(session, tp) as consumer, session.producer() as producer:
        for i, value in enumerate(expected):
            producer.produce(tp.topic, value, partition=0)
            if i % 7 == 0:
                while (record := consumer.poll(0)) is not None:
                    got.append(record.value())
        producer.flush()
        assert producer.statistics()["rdma_records"] == 400
        while len(got) < 400:
            got.append(consumer.poll(WAIT_S).value())
    assert got == expected
    assert len(list(Path(broker.log_dir, f"{tp.topic}-0").glob("*.log"))) > 5
    assert values_of(session, tp) == expected


def test_a_plain_kafka_producer_recalls_exclusive_access_and_nothing_is_lost(
    session: Session, broker: BrokerProcess, tp
) -> None:
    plain = confluent_kafka.Producer(
        {"bootstrap.servers": broker.bootstrap_servers, "linger.ms": 0}
    )
    with session.producer() as direct:
        for i in range(200):
            direct.produce(tp.topic, b"direct %d" % i, partition=0)
            if i in (50, 150):
                plain.produce(tp.topic, b"plain %d" % i, partition=0)
                assert plain.flush(WAIT_S) == 0
        direct.flush()
        assert direct.statistics()["rdma_records"] >= 50
    got = kafka_values(broker, tp, session.latest_offsets([tp])[tp])
    assert set(got) == {b"direct %d" % i for i in range(200)} | {b"plain 50", b"plain 150"}
    firsts = list(
        dict.fromkeys(v for v in got if v.startswith(b"direct"))
    )  # order, repetitions (at least once) aside
    assert firsts == [b"direct %d" % i for i in range(200)]


def test_two_producers_of_one_partition(session: Session, tp) -> None:
    with session.producer() as first, session.producer() as second:
        first.produce_sync(tp.topic, b"first", partition=0)
        for i in range(50):
            second.produce(tp.topic, b"second %d" % i, partition=0)
            first.produce(tp.topic, b"first %d" % i, partition=0)
        second.flush()
        first.flush()
    assert Counter(values_of(session, tp)) == Counter(
        [b"first", *(b"%b %d" % (who, i) for who in (b"first", b"second") for i in range(50))]
    )


def test_megabytes_in_arrow_batches_over_segments(session: Session, tp) -> None:
    values = [os.urandom(5000) for _ in range(2000)]  # 10 MB, three segments
    with session.producer() as producer:
        assert (
            producer.send_arrow(pa.record_batch({"value": pa.array(values, pa.binary())}), tp.topic)
            == 2000
        )
        producer.flush()
        assert producer.statistics()["rdma_records"] == 2000
    assert values_of(session, tp) == values
    # Views keep the buffers that READs have filled, beside those that are filled after them.
    with session.reader(tp, 0, 2000, target_bytes=1 << 20) as reader:
        found = list(reader.batches(views=True))
        assert reader.transport == TRANSPORT
    assert [v for batch in found for v in batch["value"].to_pylist()] == values


def test_a_forked_child_connects_for_itself_and_the_parent_goes_on(
    session: Session, broker: BrokerProcess, tp
) -> None:
    """As PySpark's workers do, which are forked from a process that may have used RDMA."""
    with session.producer() as producer, consumer_of(session, tp) as consumer:
        for i in range(10):
            producer.produce_sync(tp.topic, b"%d" % i, partition=0)
            assert consumer.poll(WAIT_S).value() == b"%d" % i
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                mine = kdirect.connect(
                    {"bootstrap.servers": broker.bootstrap_servers, "transport": TRANSPORT}
                )
                status = (
                    0
                    if mine is not session
                    and values_of(mine, tp, 0, 10) == [b"%d" % i for i in range(10)]
                    else 2
                )
                mine.close()
            finally:
                os._exit(status)
        for i in range(10, 20):
            producer.produce_sync(tp.topic, b"%d" % i, partition=0)
            assert consumer.poll(WAIT_S).value() == b"%d" % i
        ended = eventually(lambda: (x := os.waitpid(pid, os.WNOHANG))[0] and x)
        assert os.waitstatus_to_exitcode(ended[1]) == 0
        producer.produce_sync(
            tp.topic, b"after", partition=0
        )  # its end took nothing from the parent
        assert consumer.poll(WAIT_S).value() == b"after"
        assert producer.statistics()["rdma_records"] == 21
