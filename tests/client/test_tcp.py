"""The TCP datapath against a real broker, and through a proxy that loses and forges answers."""

from __future__ import annotations

import os
import random
import signal
import struct
import threading
import time

import confluent_kafka
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.record import MemoryRecordsBuilder

from kdirect.client.admin import Admin
from kdirect.client.tcp_append import TcpAppender
from kdirect.client.tcp_fetch import TcpFetcher
from kdirect.client.tcp_kernel import whole_batches
from kdirect.errors import (
    BrokerError,
    ClosedError,
    CorruptBatchError,
    DeliveryError,
    OffsetOutOfRangeError,
    ProtocolError,
    TimedOutError,
    UnknownTopicError,
    UnsupportedFormatError,
)
from kdirect.model import LATEST_OFFSET, TopicPartition
from kdirect.wire.cluster import Cluster
from tests.client.conftest import produce_answer
from tests.support import stop_process

PRODUCE, FETCH, METADATA = 0, 1, 3


def make_batch(values: list[bytes], timestamp_ms: int = 1_000_000, compression: int = 0) -> bytes:
    """One record batch, encoded by kafka-python."""
    builder = MemoryRecordsBuilder(magic=2, compression_type=compression, batch_size=1 << 26)
    for i, value in enumerate(values):
        assert (
            builder.append(timestamp=timestamp_ms + i, key=None, value=value, headers=[])
            is not None
        )
    builder.close()
    return bytes(builder.buffer())


def stamped(batch: bytes, base_offset: int) -> bytes:
    """The batch as the broker keeps it: base offset and leader epoch 0 in place."""
    return struct.pack(">q", base_offset) + batch[8:12] + bytes(4) + batch[16:]


def read_all(cluster: Cluster, tp: TopicPartition, **kwargs) -> bytes:
    """All bytes of a partition."""
    out = bytearray()
    with TcpFetcher(cluster, tp, 0, **kwargs) as fetcher:
        while True:
            fetched = fetcher.fetch(max_wait_ms=0)
            out += fetched.data
            if fetcher.next_offset >= fetched.high_watermark:
                return bytes(out)


def values_of(servers: str, tp: TopicPartition, count: int) -> list[bytes]:
    """The first `count` values as librdkafka reads them."""
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": servers, "group.id": "g", "enable.auto.commit": False}
    )
    consumer.assign([confluent_kafka.TopicPartition(tp.topic, tp.partition, 0)])
    values: list[bytes] = []
    deadline = time.monotonic() + 20
    while len(values) < count and time.monotonic() < deadline:
        for message in consumer.consume(count - len(values), 0.5):
            assert message.error() is None and message.offset() == len(values)
            values.append(message.value())
    consumer.close()
    return values


def end_offset(cluster: Cluster, tp: TopicPartition) -> int:
    return Admin(cluster).list_offsets({tp: LATEST_OFFSET})[tp][0]


# -- whole batches ---------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 5), max_size=5), st.data())
def test_whole_batches_of_any_prefix(counts, data):
    log, ends, offset = b"", [(0, 0)], 0
    for count in counts:
        log += stamped(make_batch([b"v"] * count), offset)
        offset += count
        ends.append((len(log), offset))
    cut = data.draw(st.integers(0, len(log)))
    whole, next_offset, needed, wrong, _ = whole_batches(log[:cut], 0)
    at = max(i for i, (end, _) in enumerate(ends) if end <= cut)
    assert (whole, next_offset, wrong) == (*ends[at], None)
    left = cut - whole
    if left == 0:
        assert needed == 0
    else:
        size = ends[at + 1][0] - ends[at][0]
        assert needed == (size if left >= 12 else 1)


@given(st.binary(max_size=300), st.integers(0, 2**63 - 1))
def test_any_bytes_are_walked_within_bounds(data, offset):
    whole, next_offset, *_ = whole_batches(data, offset)
    assert 0 <= whole <= len(data) and next_offset >= offset


@pytest.mark.parametrize(
    ("batch", "asked", "wrong"),
    [
        (stamped(make_batch([b"a"]), 4), 5, "offsets run backwards"),
        (stamped(make_batch([b"a"]), -1), 0, "offsets run backwards"),
        (stamped(make_batch([b"a"]), 2**63 - 1), 0, "offsets run backwards"),
        (make_batch([b"a"])[:8] + b"\0\0\0\0" + bytes(60), 0, "length is impossible"),
        (make_batch([b"a"])[:16] + b"\1" + make_batch([b"a"])[17:], 0, "magic is not 2"),
    ],
    ids=["before", "negative", "last", "length", "magic"],
)
def test_broken_frames_are_told(batch, asked, wrong):
    assert whole_batches(batch, asked)[0] == 0
    assert wrong in whole_batches(batch, asked)[3]


# -- append ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("acks", ["all", "1", "-1", 1])
def test_append_answers_with_the_base_offset(cluster, broker, new_topic, acks):
    tp = TopicPartition(new_topic(), 0)
    first, second = make_batch([b"one", b"two"]), make_batch([b"three"])
    with TcpAppender(cluster, tp, acks) as appender:
        assert appender.append(first) == 0
        assert appender.append(bytearray(second)) == 2
        assert appender.statistics() == {
            "batches": 2,
            "written_bytes": len(first) + len(second),
            "retries": 0,
            "in_flight": 0,
        }
    assert values_of(broker.bootstrap_servers, tp, 3) == [b"one", b"two", b"three"]
    assert read_all(cluster, tp) == stamped(first, 0) + stamped(second, 2)


def test_acks_0_does_not_wait(cluster, new_topic):
    tp = TopicPartition(new_topic(), 0)
    with TcpAppender(cluster, tp, "0") as appender:
        assert [appender.append(make_batch([b"x"])) for _ in range(20)] == [-1] * 20
    deadline = time.monotonic() + 10
    while end_offset(cluster, tp) < 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert end_offset(cluster, tp) == 20


def test_many_requests_under_way_keep_their_order(cluster, broker, new_topic):
    tp = TopicPartition(new_topic(), 0)
    with TcpAppender(cluster, tp, window=16) as appender:
        appends = []
        for i in range(500):
            appends.append(appender.submit(make_batch([b"value %d" % i])))
            assert appender.statistics()["in_flight"] <= 16
        appender.flush()
        assert [a.result() for a in appends] == list(range(500))
        assert all(a.done and a.error is None for a in appends)
    assert values_of(broker.bootstrap_servers, tp, 500) == [b"value %d" % i for i in range(500)]


def test_poll_takes_answers_in_without_waiting(cluster, new_topic):
    with TcpAppender(cluster, TopicPartition(new_topic(), 0)) as appender:
        append = appender.submit(make_batch([b"x"]))
        deadline = time.monotonic() + 10
        while appender.poll() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert append.done and append.base_offset == 0


def test_the_bytes_under_way_are_bounded(broker, new_topic):
    tp = TopicPartition(new_topic(), 0)
    with (
        Cluster({"bootstrap.servers": broker.bootstrap_servers, "send.buffer.bytes": 1 << 20}) as c,
        TcpAppender(c, tp) as appender,
    ):
        batch = make_batch([bytes(400_000)])
        for _ in range(10):
            appender.submit(batch)
            assert appender.statistics()["in_flight"] <= 2
        appender.flush()
        assert end_offset(c, tp) == 10


def test_threads_append_to_one_partition(cluster, new_topic):
    tp = TopicPartition(new_topic(), 0)
    offsets: list[int] = []
    with TcpAppender(cluster, tp) as appender:

        def write() -> None:
            offsets.extend(appender.append(make_batch([b"x"])) for _ in range(50))

        threads = [threading.Thread(target=write) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(20)
    assert sorted(offsets) == list(range(200))


def test_a_refused_batch_fails_alone(cluster, new_topic):
    tp = TopicPartition(new_topic(max_message_bytes=10_000), 0)
    with TcpAppender(cluster, tp) as appender:
        good, bad, after = (appender.submit(make_batch([v])) for v in (b"a", bytes(20_000), b"b"))
        with pytest.raises(
            DeliveryError, match=rf"not delivered to {tp}: .*MESSAGE_TOO_LARGE"
        ) as caught:
            bad.result()
        assert "max.message.bytes" in caught.value.hint and not caught.value.maybe_committed
        assert isinstance(caught.value.__cause__, BrokerError) and caught.value.__cause__.code == 10
        assert (good.result(), after.result()) == (0, 1)
        appender.flush()  # what `result` has raised is not raised again
        appender.submit(make_batch([bytes(20_000)]))
        with pytest.raises(DeliveryError, match="MESSAGE_TOO_LARGE"):
            appender.flush()
        appender.flush()
    assert end_offset(cluster, tp) == 2


def test_a_corrupt_batch_is_refused(cluster, new_topic, seed):
    tp = TopicPartition(new_topic(), 0)
    batch = bytearray(make_batch([b"some value"]))
    at = random.Random(seed).randrange(21, len(batch))
    batch[at] ^= 0x10
    with (
        TcpAppender(cluster, tp) as appender,
        pytest.raises(DeliveryError, match=r"CORRUPT_MESSAGE|INVALID_RECORD") as caught,
    ):
        appender.append(batch)
    assert not caught.value.maybe_committed and end_offset(cluster, tp) == 0


def test_an_unknown_topic(cluster):
    with (
        TcpAppender(cluster, TopicPartition("not-there", 0)) as appender,
        pytest.raises(DeliveryError, match="topic 'not-there' does not exist") as e,
    ):
        appender.append(make_batch([b"x"]))
    assert not e.value.maybe_committed and isinstance(e.value.__cause__, UnknownTopicError)


def test_wrong_arguments(cluster):
    with pytest.raises(TypeError):
        TcpAppender(cluster, TopicPartition("t", 0)).submit("text")
    with pytest.raises(KeyError):
        TcpAppender(cluster, TopicPartition("t", 0), "2")


@pytest.mark.parametrize("code", [6, 5, 3, 7, 19])
def test_passing_errors_are_waited_out_with_fresh_metadata(behind, proxy, cluster, new_topic, code):
    tp = TopicPartition(new_topic(), 0)
    c = behind()
    with TcpAppender(c, tp) as appender:
        appender.append(make_batch([b"first"]))
        asked = proxy.requests.count(METADATA)
        proxy.once(PRODUCE, produce_answer(tp, code), times=2)
        assert appender.append(make_batch([b"second"])) == 1
        assert appender.statistics()["retries"] == 2 and proxy.requests.count(METADATA) == asked + 2
    assert end_offset(cluster, tp) == 2


def test_a_passing_error_loses_nothing_of_what_is_under_way(behind, proxy, broker, new_topic):
    tp = TopicPartition(new_topic(), 0)
    with TcpAppender(behind(), tp, window=8) as appender:
        appender.append(make_batch([b"0"]))
        proxy.once(PRODUCE, produce_answer(tp, 6), times=3)
        appends = [appender.submit(make_batch([b"%d" % i])) for i in range(1, 40)]
        appender.flush()
        assert sorted(a.result() for a in appends) == list(range(1, 40))
    assert sorted(map(int, values_of(broker.bootstrap_servers, tp, 40))) == list(range(40))


def test_a_passing_error_that_stays_fails_in_time(behind, proxy, new_topic):
    tp = TopicPartition(new_topic(), 0)
    with TcpAppender(behind(), tp, timeout_ms=300) as appender:
        proxy.once(PRODUCE, produce_answer(tp, 6), times=1000)
        started = time.monotonic()
        with pytest.raises(
            DeliveryError, match=rf"not delivered to {tp} within 300 ms: .*NOT_LEADER_OR_FOLLOWER"
        ) as caught:
            appender.append(make_batch([b"x"]))
        assert time.monotonic() - started < 3 and not caught.value.maybe_committed
        proxy.once(PRODUCE, produce_answer(tp, 7), times=1000)
        with pytest.raises(DeliveryError, match="REQUEST_TIMED_OUT") as caught:
            appender.append(make_batch([b"x"]))
        assert caught.value.maybe_committed


@pytest.mark.parametrize("answered", ["all", "the first two"])
def test_batches_behind_a_refused_one_say_why_it_was_refused(behind, proxy, new_topic, answered):
    tp = TopicPartition(new_topic(), 0)
    with TcpAppender(behind(), tp, timeout_ms=300, window=1) as appender:
        refusal, sent = produce_answer(tp, 19), 0

        def decide(key, version, correlation_id, frame):
            nonlocal sent
            if key != PRODUCE:
                return None
            sent += 1
            return refusal(version) if answered == "all" or sent <= 2 else "silent"

        proxy.decide = decide
        batches = [appender.submit(make_batch([b"%d" % i])) for i in range(3)]
        for batch in batches:
            with pytest.raises(DeliveryError, match=r"within 300 ms: .*NOT_ENOUGH_REPLICAS"):
                batch.result()


@pytest.mark.parametrize("decision", ["cut", "cut after"])
def test_a_connection_lost_with_requests_under_way(behind, proxy, broker, new_topic, decision):
    """Every value is there, in the order of its first appearance; those whose answers were lost may
    be there twice."""
    tp = TopicPartition(new_topic(), 0)
    with TcpAppender(behind(), tp, window=8) as appender:
        appender.append(make_batch([b"0"]))
        count = 0

        def decide(key, version, correlation_id, frame):
            nonlocal count
            count += key == PRODUCE
            return decision if key == PRODUCE and count % 13 == 0 else None

        proxy.decide = decide
        for i in range(1, 60):
            appender.submit(make_batch([b"%d" % i]))
        appender.flush()
        assert appender.statistics()["retries"] >= 1
        proxy.once(PRODUCE, None)
        last = appender.append(make_batch([b"60"]))
    values = [int(v) for v in values_of(broker.bootstrap_servers, tp, last + 1)]
    assert list(dict.fromkeys(values)) == list(range(61))
    if decision == "cut":
        assert len(values) >= 61


@pytest.mark.parametrize(("decision", "maybe"), [("cut", True), ("cut after", True)])
def test_answers_that_never_come_may_have_been_committed(behind, proxy, new_topic, decision, maybe):
    tp = TopicPartition(new_topic(), 0)
    with TcpAppender(behind(), tp, timeout_ms=1000) as appender:
        appender.append(make_batch([b"0"]))
        proxy.once(PRODUCE, decision, times=1000)
        with pytest.raises(
            DeliveryError, match=r"within 1000 ms: the broker at .* closed the connection"
        ) as caught:
            appender.append(make_batch([b"1"]))
        assert caught.value.maybe_committed is maybe
        proxy.once(PRODUCE, None)
        assert appender.append(make_batch([b"2"])) >= 1


def test_a_silent_broker_times_the_request_out_and_it_is_sent_again(
    behind, proxy, cluster, new_topic
):
    tp = TopicPartition(new_topic(), 0)
    c = behind(request_timeout_ms=1000)
    control = c.control_connection()
    with TcpAppender(c, tp) as appender:
        proxy.once(PRODUCE, "silent")
        assert appender.append(make_batch([b"x"])) == 1
        assert end_offset(cluster, tp) == 2
        assert not control.closed  # only the data connection was given up
        proxy.once(PRODUCE, "silent", times=1000)
        stuck = appender.submit(make_batch([b"y"]))
        with pytest.raises(TimedOutError, match=r"1 batches .* not acknowledged after 50 ms"):
            appender.flush(timeout_ms=50)
        proxy.once(PRODUCE, None)
        stuck.result()


def test_a_garbled_answer_is_final(behind, proxy, new_topic):
    tp = TopicPartition(new_topic(), 0)
    with TcpAppender(behind(), tp) as appender:
        proxy.once(PRODUCE, b"\xff" * 30)
        with pytest.raises(DeliveryError, match="malformed answer to ProduceRequest") as caught:
            appender.append(make_batch([b"x"]))
        assert caught.value.maybe_committed and isinstance(caught.value.__cause__, ProtocolError)
        proxy.once(PRODUCE, produce_answer(TopicPartition("other", 7), 0))
        with pytest.raises(DeliveryError, match="does not hold that partition"):
            appender.append(make_batch([b"x"]))
        assert appender.append(make_batch([b"x"])) >= 0


def test_what_was_acknowledged_survives_a_killed_broker(broker_process):
    """SIGKILL under load; every acknowledged batch is read afterwards, at the offset that was
    told."""
    b = broker_process()
    tp = TopicPartition("t", 0)
    with Cluster({"bootstrap.servers": b.bootstrap_servers, "connect.timeout.ms": 20000}) as c:
        Admin(c).create_topic("t")
        with TcpAppender(c, tp, window=8) as appender:
            appends = [(i, appender.submit(make_batch([b"%d" % i]))) for i in range(100)]
            acknowledged = {a.base_offset: i for i, a in appends if a.done and a.error is None}
            b.kill()
            b.start()
            appends += [(i, appender.submit(make_batch([b"%d" % i]))) for i in range(100, 200)]
            appender.flush()
            acknowledged |= {a.result(): i for i, a in appends}
        values = values_of(b.bootstrap_servers, tp, end_offset(c, tp))
        assert {o: int(values[o]) for o in acknowledged} == acknowledged
        assert set(map(int, values)) == set(range(200))


def test_a_fork_may_not_use_the_parents(cluster, new_topic):
    tp = TopicPartition(new_topic(), 0)
    with TcpAppender(cluster, tp) as appender, TcpFetcher(cluster, tp, 0) as fetcher:
        appender.append(make_batch([b"x"]))
        fetcher.fetch()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                for call in (lambda: appender.submit(b""), lambda: fetcher.fetch()):
                    with pytest.raises(ClosedError, match="belongs to process"):
                        call()
                with TcpAppender(cluster, tp) as own:
                    status = 0 if own.append(make_batch([b"child"])) == 1 else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert appender.append(make_batch([b"x"])) == 2
        assert len(fetcher.fetch().data) > 0
    with pytest.raises(ClosedError):
        appender.append(b"")
    with pytest.raises(ClosedError):
        fetcher.fetch()


# -- fetch -----------------------------------------------------------------------------------------


@pytest.fixture
def filled(cluster, new_topic):
    """(partition, batches as the broker keeps them): 60 batches of 1 to 6 records."""
    tp = TopicPartition(new_topic(), 0)
    batches, offset = [], 0
    with TcpAppender(cluster, tp) as appender:
        for i in range(60):
            batch = make_batch([b"value %d" % i * 50] * (i % 6 + 1))
            appender.submit(batch)
            batches.append(stamped(batch, offset))
            offset += i % 6 + 1
    return tp, batches


@pytest.mark.parametrize("read_ahead", [False, True])
@pytest.mark.parametrize("max_bytes", [1, 700, 5000, 1 << 20])
def test_fetches_of_any_size_give_whole_batches_once_each(cluster, filled, max_bytes, read_ahead):
    tp, batches = filled
    with TcpFetcher(cluster, tp, 0, read_ahead=read_ahead) as fetcher:
        got, seen = bytearray(), 0
        while seen < len(batches):
            fetched = fetcher.fetch(max_bytes, 100)
            assert (
                fetched.high_watermark == fetched.last_stable_offset == 210
                and fetched.log_start_offset == 0
            )
            whole, _, needed, wrong, _ = whole_batches(fetched.data, 0)
            assert (whole, needed, wrong) == (len(fetched.data), 0, None) and whole > 0
            got += fetched.data
            while len(b"".join(batches[:seen])) < len(got):
                seen += 1
        assert bytes(got) == b"".join(batches)
        assert fetcher.next_offset == 210
        assert len(fetcher.fetch(max_bytes, 0).data) == 0
        assert fetcher.statistics()["read_bytes"] == len(got)


def test_a_start_within_a_batch_gets_that_batch(cluster, filled):
    tp, batches = filled
    with TcpFetcher(cluster, tp, 4) as fetcher:  # batches hold [0,1) [1,3) [3,6) ...
        assert bytes(fetcher.fetch(1).data) == batches[2]
        assert fetcher.next_offset == 6
        fetcher.seek(209)
        assert bytes(fetcher.fetch().data) == batches[59]


def test_an_idle_fetch_ends_after_its_wait_and_wakes_for_a_record(cluster, new_topic):
    tp = TopicPartition(new_topic(), 0)
    with TcpFetcher(cluster, tp, 0) as fetcher, TcpAppender(cluster, tp) as appender:
        started = time.monotonic()
        assert len(fetcher.fetch(max_wait_ms=60).data) == 0
        assert time.monotonic() - started >= 0.055
        timer = threading.Timer(0.1, lambda: appender.append(make_batch([b"x"])))
        timer.start()
        started = time.monotonic()
        assert len(fetcher.fetch(max_wait_ms=10_000).data) > 0
        assert time.monotonic() - started < 5
        timer.join()


@pytest.mark.parametrize("offset", [211, 10**12])
def test_an_offset_out_of_range_is_told_with_the_range(cluster, filled, offset):
    tp, _ = filled
    with (
        TcpFetcher(cluster, tp, offset) as fetcher,
        pytest.raises(OffsetOutOfRangeError, match=rf"offset {offset} of {tp} is out of range"),
    ):
        fetcher.fetch()


def test_deleted_records_are_out_of_range(cluster, filled):
    tp, _ = filled
    Admin(cluster).delete_records({tp: 100})
    with TcpFetcher(cluster, tp, 0) as fetcher:
        with pytest.raises(OffsetOutOfRangeError):
            fetcher.fetch()
        fetcher.seek(100)
        assert fetcher.fetch().log_start_offset == 100


def test_a_batch_larger_than_what_was_asked_for_comes_whole(cluster, new_topic):
    tp = TopicPartition(new_topic(), 0)
    batch = make_batch([bytes(100_000)])
    with TcpAppender(cluster, tp) as appender:
        appender.append(batch)
        appender.append(batch)
    with TcpFetcher(cluster, tp, 0) as fetcher:
        assert bytes(fetcher.fetch(1000).data) == stamped(batch, 0)
        assert bytes(fetcher.fetch(1000).data) == stamped(batch, 1)


def fetch_answer(tp: TopicPartition, code: int, records: bytes, high_watermark: int = 100):
    """The body of a fetch response, version 12 (flexible) or 4 to 11."""

    def answer(version: int) -> bytes:
        topic = tp.topic.encode()
        body = struct.pack(">i", 0) + (struct.pack(">hi", 0, 0) if version >= 7 else b"")
        if version >= 12:
            body = b"\0" + body + b"\2" + bytes([len(topic) + 1]) + topic + b"\2"
        else:
            body += struct.pack(">ih", 1, len(topic)) + topic + struct.pack(">i", 1)
        body += struct.pack(">ihqqq", tp.partition, code, high_watermark, high_watermark, 0)
        n = len(records)
        if version >= 12:
            size = bytes([(n + 1) & 0x7F | 0x80, (n + 1) >> 7 & 0x7F | 0x80, (n + 1) >> 14])
            return body + b"\0" + struct.pack(">i", -1) + size + records + b"\0\0\0"
        return (
            body
            + struct.pack(">i", -1)
            + (struct.pack(">i", -1) if version >= 11 else b"")
            + struct.pack(">i", n)
            + records
        )

    return answer


@pytest.mark.parametrize("code", [3, 5, 6, 74, 75, 78])
def test_fetches_wait_passing_errors_out(behind, proxy, filled, code):
    tp, batches = filled
    c = behind()
    with TcpFetcher(c, tp, 0) as fetcher:
        proxy.once(FETCH, fetch_answer(tp, code, b""), times=2)
        assert bytes(fetcher.fetch().data) == b"".join(batches)
        assert fetcher.statistics()["retries"] == 2


@pytest.mark.parametrize("decision", ["cut", "cut after"])
@pytest.mark.parametrize("read_ahead", [False, True])
def test_fetches_go_on_after_a_lost_connection(behind, proxy, filled, decision, read_ahead):
    tp, batches = filled
    with TcpFetcher(behind(), tp, 0, read_ahead=read_ahead) as fetcher:
        got = bytes(fetcher.fetch(5000).data)
        proxy.once(FETCH, decision, times=2)
        while fetcher.next_offset < 210:
            got += fetcher.fetch(5000).data
        assert got == b"".join(batches)
        assert fetcher.statistics()["retries"] >= 1


@pytest.mark.parametrize(
    ("records", "error", "message"),
    [
        (b"\0" * 40, CorruptBatchError, "its length is impossible"),
        (
            stamped(make_batch([b"x"]), 0)[:8] + b"\x7f\0\0\0\0\0\0\0\2" + bytes(80),
            UnsupportedFormatError,
            "2130706444 bytes, 67108864 are allowed",
        ),
        (stamped(make_batch([b"x"]), 5)[:50], ProtocolError, "cut a batch"),
    ],
    ids=["zeros", "huge", "cut"],
)
def test_broken_records_are_refused(behind, proxy, filled, records, error, message):
    tp, batches = filled
    with TcpFetcher(behind(), tp, 0) as fetcher:
        proxy.once(FETCH, fetch_answer(tp, 0, records), times=3)
        with pytest.raises(error, match=message) as caught:
            fetcher.fetch()
        assert str(tp) in str(caught.value) and caught.value.hint
        proxy.once(FETCH, None)
        assert bytes(fetcher.fetch().data) == b"".join(batches)


def test_good_batches_before_a_broken_one_are_handed_on(behind, proxy, filled):
    tp, batches = filled
    with TcpFetcher(behind(), tp, 0) as fetcher:
        proxy.once(FETCH, fetch_answer(tp, 0, batches[0] + b"\0" * 40))
        assert bytes(fetcher.fetch().data) == batches[0]
        assert bytes(fetcher.fetch(1).data) == batches[1]


def test_a_garbled_fetch_answer(behind, proxy, filled):
    tp, _ = filled
    with TcpFetcher(behind(), tp, 0) as fetcher:
        proxy.once(FETCH, b"\xff" * 40)
        with pytest.raises(ProtocolError, match="malformed answer to FetchRequest"):
            fetcher.fetch()
        assert len(fetcher.fetch().data) > 0


def test_an_unknown_topic_or_partition_for_reading(cluster, new_topic):
    for tp in (TopicPartition("not-there", 0), TopicPartition(new_topic(), 7)):
        with (
            TcpFetcher(cluster, tp, 0) as fetcher,
            pytest.raises(UnknownTopicError, match=tp.topic),
        ):
            fetcher.fetch()


def test_a_topic_deleted_under_a_reader(cluster, filled):
    tp, _ = filled
    with TcpFetcher(cluster, tp, 0) as fetcher:
        fetcher.fetch(1)
        Admin(cluster).delete_topic(tp.topic)
        with pytest.raises(UnknownTopicError, match=f"topic '{tp.topic}' does not exist"):
            fetcher.fetch()


def test_a_reader_survives_a_restart(broker_process):
    b = broker_process()
    tp = TopicPartition("t", 0)
    with Cluster({"bootstrap.servers": b.bootstrap_servers, "connect.timeout.ms": 20000}) as c:
        Admin(c).create_topic("t")
        with TcpAppender(c, tp) as appender, TcpFetcher(c, tp, 0) as fetcher:
            appender.append(make_batch([b"before"]))
            assert len(fetcher.fetch().data) > 0
            b.kill()
            b.start()
            appender.append(make_batch([b"after"]))
            assert bytes(fetcher.fetch(max_wait_ms=5000).data) == stamped(make_batch([b"after"]), 1)


def test_a_stopped_broker_times_a_fetch_out(broker_process):
    b = broker_process()
    tp = TopicPartition("t", 0)
    with Cluster({"bootstrap.servers": b.bootstrap_servers}) as patient:
        Admin(patient).create_topic("t")
    with (
        Cluster({"bootstrap.servers": b.bootstrap_servers, "request.timeout.ms": 1000}) as c,
        TcpFetcher(c, tp, 0) as fetcher,
    ):
        fetcher.fetch(max_wait_ms=0)
        stop_process(b.pid)
        try:
            with pytest.raises(TimedOutError, match="did not answer FetchRequest"):
                fetcher.fetch(max_wait_ms=50)
        finally:
            os.kill(b.pid, signal.SIGCONT)
        assert len(fetcher.fetch(max_wait_ms=0).data) == 0
