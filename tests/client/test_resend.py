"""Requests that are repeated over a path that takes fewer at a time than the one that ended: what
finds no room waits its turn in the producer, and no call waits with the producer's lock for it.
Real brokers, killed and stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import pytest

import kdirect
from kdirect.client import connect
from kdirect.client.direct_append import DirectAppender
from kdirect.client.request_append import RequestAppender
from kdirect.errors import BufferFullError, DeliveryError
from kdirect.format.codec import encode_records
from kdirect.model import TopicPartition
from tests.support import stop_process, wait_until

TP = TopicPartition("t", 0)
UNDER_WAY = 1000
TIMEOUT_S = 20
FIRST = (
    b"first" + b"." * 200_000
)  # makes a head that has room for all that is under way: a broker that stands grants no more
SMALLER = pytest.mark.parametrize(
    "smaller",
    [{"rdma.max.in.flight": 1}, {"rdma.produce": "false"}],
    ids=["a window of one", "over TCP"],
)
"""What the broker that comes back offers: either takes fewer requests at a time than were under
way."""


@pytest.fixture
def served(broker_process):
    """(broker, settings) with topic `t` of two partitions."""
    broker = broker_process()
    connect(broker.bootstrap_servers).admin.create_topic("t", 2)
    return broker, {
        "bootstrap.servers": broker.bootstrap_servers,
        "transport": "shm",
        "delivery.timeout.ms": TIMEOUT_S * 1000,
    }


def stop(broker):
    stop_process(broker.pid)


def values(broker, partition=0):
    with kdirect.Consumer(
        {"bootstrap.servers": broker.bootstrap_servers, "transport": "tcp"}
    ) as consumer:
        tp = TopicPartition("t", partition)
        consumer.assign({tp: 0})
        end = consumer.get_watermark_offsets(tp)[1]
        return [consumer.poll(10).value() for _ in range(end)]


class StopsWhenRepeated:
    """A thread that stops the broker's process as soon as the producer's new path has sent
    something; `happened` then."""

    def __init__(self, broker, producer):
        self.happened = threading.Event()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(broker, producer))

    def _run(self, broker, producer):
        old = producer._driver.appender(TP)
        while not self._ends.is_set():
            path = producer._driver.appender(TP)
            if path is not old and (
                (isinstance(path, DirectAppender) and path.writer.posted)
                or (isinstance(path, RequestAppender) and path.requests)
            ):
                stop(broker)
                self.happened.set()
                return
            time.sleep(0.0001)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ends.set()
        self._thread.join(10)


def left_under_way(broker, producer, told, smaller):
    """Put requests under way to a broker that stands, kill it, bring it back with less to offer,
    and stop it when it has got some."""
    producer.produce_sync("t", FIRST, partition=0)
    stop(broker)
    for i in range(UNDER_WAY):
        producer.produce("t", b"%d" % i, partition=0, on_delivery=told)
    broker.kill()
    broker.properties.update(smaller)
    broker.start()


def longest_poll(producer, done, seconds):
    """Call `poll(0)` until `done()` or the time is over; how long the longest call took."""
    longest, until = 0.0, time.monotonic() + seconds
    while not done() and time.monotonic() < until:
        began = time.monotonic()
        producer.poll(0)
        longest = max(longest, time.monotonic() - began)
        time.sleep(0.001)
    return longest


@SMALLER
@pytest.mark.parametrize("told", [False, True], ids=["nobody is told", "callbacks"])
def test_poll_does_not_wait_for_room_and_nothing_is_lost(served, smaller, told):
    broker, settings = served
    heard = []
    with kdirect.Producer(settings) as producer:
        left_under_way(
            broker,
            producer,
            (lambda error, message: heard.append((error, message.value()))) if told else None,
            smaller,
        )
        with StopsWhenRepeated(broker, producer) as stopping:
            assert longest_poll(producer, stopping.happened.is_set, 15) < TIMEOUT_S / 4
            assert stopping.happened.is_set(), (
                "the broker answered everything before it could be stopped"
            )
            assert longest_poll(producer, lambda: False, 2) < TIMEOUT_S / 4
            assert len(producer) > UNDER_WAY / 2, (
                "too much was answered for the test to say something"
            )
        os.kill(broker.pid, signal.SIGCONT)
        producer.produce("t", b"last", partition=0)
        assert producer.flush() == 0
    expected = [b"%d" % i for i in range(UNDER_WAY)]
    assert values(broker) == [FIRST, *expected, b"last"]
    assert heard == ([(None, value) for value in expected] if told else [])


@SMALLER
def test_another_partition_is_written_meanwhile(served, smaller):
    """`produce` to another partition and `len` take the same lock."""
    broker, settings = served
    with kdirect.Producer({**settings, "max.block.ms": 0}) as producer:
        left_under_way(broker, producer, None, smaller)
        with StopsWhenRepeated(broker, producer) as stopping:
            over = threading.Event()
            polls = threading.Thread(target=longest_poll, args=(producer, over.is_set, 30))
            polls.start()
            assert stopping.happened.wait(15)
            longest, until = 0.0, time.monotonic() + 2
            while time.monotonic() < until:
                began = time.monotonic()
                assert len(producer) > 0
                longest = max(longest, time.monotonic() - began)
                time.sleep(0.001)
            assert longest < TIMEOUT_S / 4
            os.kill(broker.pid, signal.SIGCONT)
            wait_until(lambda: len(producer) == 0, "everything was answered")
            over.set()
            polls.join(60)
        assert producer.flush() == 0
    assert values(broker) == [FIRST, *(b"%d" % i for i in range(UNDER_WAY))]


@SMALLER
def test_what_finds_no_room_fails_when_its_time_is_over(served, smaller):
    broker, settings = served
    heard = []
    settings = {**settings, "delivery.timeout.ms": 4000, "request.timeout.ms": 1000}
    producer = kdirect.Producer(settings)
    left_under_way(
        broker, producer, lambda error, message: heard.append((error, message.value())), smaller
    )
    with StopsWhenRepeated(broker, producer) as stopping:
        longest_poll(producer, stopping.happened.is_set, 15)
        assert stopping.happened.is_set()
        longest_poll(producer, lambda: len(heard) == UNDER_WAY, 20)
    assert [value for _, value in heard] == [b"%d" % i for i in range(UNDER_WAY)], (
        "each is told of once, in order"
    )
    failed = [error for error, _ in heard if error is not None]
    assert failed and all(isinstance(e, DeliveryError) for e in failed)
    assert len(producer) == 0
    os.kill(broker.pid, signal.SIGCONT)
    assert producer.produce_sync("t", b"after", partition=0) > 0
    producer.close()
    log = values(broker)
    told = [value for error, value in heard if error is None]
    assert log[: len(told) + 1] == [FIRST, *told] and log[-1] == b"after"
    assert len(log) == len(set(log)), "nothing is there twice"


@SMALLER
def test_new_records_wait_behind_those_that_are_repeated(served, smaller):
    broker, settings = served
    with kdirect.Producer({**settings, "max.block.ms": 0}) as producer:
        left_under_way(broker, producer, None, smaller)
        taken = []
        with StopsWhenRepeated(broker, producer) as stopping:
            longest_poll(producer, stopping.happened.is_set, 15)
            assert stopping.happened.is_set()
            for i in range(50):
                with contextlib.suppress(BufferFullError):
                    producer.produce(
                        "t", b"new %d" % i, partition=0, headers=[("h", b"")] if i % 2 else None
                    )
                    taken.append(b"new %d" % i)
        os.kill(broker.pid, signal.SIGCONT)
        assert producer.flush() == 0
    assert values(broker) == [FIRST, *(b"%d" % i for i in range(UNDER_WAY)), *taken]


@SMALLER
def test_abort_and_purge_tell_of_what_waits(served, smaller):
    broker, settings = served
    for how in ("purge", "abort"):
        heard = []
        producer = kdirect.Producer(settings)
        broker.properties.pop(next(iter(smaller)), None)
        broker.kill()
        broker.start()
        left_under_way(
            broker, producer, lambda error, message, heard=heard: heard.append(error), smaller
        )
        with StopsWhenRepeated(broker, producer) as stopping:
            longest_poll(producer, stopping.happened.is_set, 15)
            assert stopping.happened.is_set()
            getattr(producer, how)()
        assert len(heard) == UNDER_WAY and any(isinstance(error, DeliveryError) for error in heard)
        os.kill(broker.pid, signal.SIGCONT)
        producer.abort()


# -- access to the next file -----------------------------------------------------------------------


def test_a_full_file_of_a_broker_that_stands_holds_nobody_up(broker_process):
    """Asking for the next file is a request to the broker: nobody waits for its answer longer than
    for room."""
    broker = broker_process(log_segment_bytes=65536)
    connect(broker.bootstrap_servers).admin.create_topic("t", 2)
    settings = {
        "bootstrap.servers": broker.bootstrap_servers,
        "transport": "shm",
        "max.block.ms": 0,
        "request.timeout.ms": 8000,
    }
    with kdirect.Producer(settings) as producer:
        sent = [b"%d " % 0 + b"v" * 1000]
        producer.produce_sync("t", sent[0], partition=0)
        writer = producer._driver.appender(TP).writer
        while writer.length - writer.position > 1300:
            sent.append(b"%d " % len(sent) + b"v" * 1000)
            producer.produce_sync("t", sent[-1], partition=0)
        first = len(sent)
        stop(broker)
        longest, until = 0.0, time.monotonic() + 3
        while time.monotonic() < until:
            began = time.monotonic()
            # The first does not fit any more.  Short ones would, and stay behind it.
            value = b"%d " % len(sent) + b"v" * (1 if (len(sent) - first) % 2 else 1400)
            with contextlib.suppress(BufferFullError):
                producer.produce("t", value, partition=0)
                sent.append(value)
            producer.poll(0)
            longest = max(longest, time.monotonic() - began)
            time.sleep(0.002)
        assert longest < 2
        os.kill(broker.pid, signal.SIGCONT)
        assert producer.flush() == 0
        assert producer.produce_sync("t", b"last", partition=0) == len(sent)
    assert values(broker) == [*sent, b"last"]


def test_a_partition_that_is_given_back_while_its_next_file_is_asked_for(broker_process):
    """Whatever the broker grants then is given back, too: somebody else may have the partition for
    itself."""
    broker = broker_process(log_segment_bytes=65536)
    connect(broker.bootstrap_servers).admin.create_topic("t", 2)
    settings = {
        "bootstrap.servers": broker.bootstrap_servers,
        "transport": "shm",
        "max.block.ms": 0,
        "rdma.produce": "exclusive",
    }
    with kdirect.Producer(settings) as producer:
        producer.produce_sync("t", b"v" * 1000, partition=0)
        writer = producer._driver.appender(TP).writer
        while writer.length - writer.position > 1300:
            producer.produce_sync("t", b"v" * 1000, partition=0)
        stop(broker)
        began = time.monotonic()
        producer.produce("t", b"v" * 1400, partition=0)  # it waits, and the next file is asked for
        assert time.monotonic() - began < 5
        threading.Timer(0.2, os.kill, (broker.pid, signal.SIGCONT)).start()
        producer.purge()
        producer._driver.give_back(TP)
        with kdirect.Producer(settings) as other:
            assert other.produce_sync("t", b"other", partition=0) > 25


def test_a_file_that_is_recalled_before_its_grant_is_known_is_given_back(broker_process):
    """The broker's word of a recall overtakes its answer to the request for access; the file it is
    of has no writer yet."""
    broker = broker_process(log_segment_bytes=65536)
    connect(broker.bootstrap_servers).admin.create_topic("t", 2)
    settings = {
        "bootstrap.servers": broker.bootstrap_servers,
        "transport": "shm",
        "max.block.ms": 0,
    }
    with (
        kdirect.Producer(settings) as producer,
        kdirect.Producer({**settings, "transport": "tcp"}) as other,
    ):
        producer.produce_sync("t", b"v" * 1000, partition=0)
        path = producer._driver.appender(TP)
        while path.writer.length - path.writer.position > 1300:
            producer.produce_sync("t", b"v" * 1000, partition=0)
        old = path.writer.file_id
        with producer._lock:  # its thread takes no answer meanwhile
            with contextlib.suppress(BufferFullError):
                producer._driver.send(
                    TP, encode_records([(None, b"v" * 1400, None, 0)]), 1, None, 0.0
                )
            others, until = 0, time.monotonic() + 30
            while not path.router.strays and time.monotonic() < until:
                time.sleep(1)  # the file is granted by now, if the machine is not too busy
                other.produce("t", b"other", partition=0)  # so it is recalled
                others += 1
                for _ in range(100):
                    path.router.drain()
                    time.sleep(0.01 if not path.router.strays else 0)
            assert path.router.strays, "the recall did not overtake the answer"
            producer._driver.send(TP, encode_records([(None, b"taken", None, 0)]), 1)
            assert path.writer.file_id != old
        assert other.flush() == producer.flush() == 0
        producer.produce_sync("t", b"last", partition=0)
    assert sorted(values(broker)[-others - 2 :]) == [b"last", *[b"other"] * others, b"taken"]
