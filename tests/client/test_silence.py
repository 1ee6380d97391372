"""What a consumer does when no records come: it waits at the brokers, costs next to nothing, and
has the first record, a rebalance or a seek at once."""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager

import pytest

import kdirect
from kdirect.client import connect, consumer, silence
from kdirect.client.silence import FetchWait
from kdirect.errors import BrokerUnavailableError
from kdirect.model import TopicPartition
from kdirect.options import CLIENT
from kdirect.wire.bell import Bell
from kdirect.wire.connection import wait_for_any

PATHS = pytest.mark.parametrize("transport", ["shm", "tcp"])
COUNTS = pytest.mark.parametrize("partitions", [1, 3])
LONG_S = 60


@pytest.fixture
def never_looks(monkeypatch):
    """A consumer that is silent looks at no slot by itself for longer than a test takes, and no
    Fetch ends without records: only what wakes it brings it back."""
    monkeypatch.setattr(silence, "FIRST_WAIT_MS", LONG_S * 1000)
    monkeypatch.setattr(silence, "LONGEST_WAIT_MS", LONG_S * 1000)
    monkeypatch.setattr(silence, "LONGEST_LOOK_MS", LONG_S * 1000)
    monkeypatch.setattr(consumer, "LONGEST_LOOK_MS", LONG_S * 1000)
    monkeypatch.setattr(silence, "SILENT_S", 0.05)
    monkeypatch.setattr(consumer, "SILENT_S", 0.05)


def topic(broker, partitions):
    """The partitions of topic `t`, with a record in each."""
    session = connect(broker.bootstrap_servers)
    session.admin.create_topic("t", partitions)
    with session.producer() as producer:
        for p in range(partitions):
            producer.produce_sync("t", b"first", partition=p)
    return [TopicPartition("t", p) for p in range(partitions)]


def read_all(c, tps):
    """Have `c` read what `topic` wrote."""
    c.assign(dict.fromkeys(tps, 0))
    for _ in tps:
        assert c.poll(LONG_S / 2).value() == b"first"


@contextmanager
def silent(broker, tps, transport, **settings):
    """A consumer that has read all and waits in a `poll` on a thread: yields it, and a function
    that returns what that poll has brought."""
    given = {name.replace("_", "."): value for name, value in settings.items()}
    given |= {"bootstrap.servers": broker.bootstrap_servers, "transport": transport}
    with kdirect.Consumer(given) as c:
        read_all(c, tps)
        got = []
        waiting = threading.Thread(target=lambda: got.append(c.poll(LONG_S)))

        def ended():
            waiting.join(LONG_S / 2)
            assert not waiting.is_alive(), "the poll waits on"
            return got[0]

        waits = broker.statistics()["broker_fetch_waits"]
        waiting.start()
        deadline = time.monotonic() + 20
        while broker.statistics()["broker_fetch_waits"] == waits:
            assert time.monotonic() < deadline, "no Fetch waits at the broker"
            time.sleep(0.01)
        yield c, ended


@PATHS
@COUNTS
def test_the_first_record_after_a_silence_ends_the_wait(broker, never_looks, transport, partitions):
    tps = topic(broker, partitions)
    with silent(broker, tps, transport) as (_, ended), connect(broker.bootstrap_servers) as session:
        with session.producer() as producer:
            producer.produce_sync("t", b"second", partition=partitions - 1)
        assert ended().value() == b"second"


@PATHS
def test_records_between_silences_are_all_read(broker, never_looks, transport):
    """Each silence begins where the last record was, also of partitions that had none."""
    tps = topic(broker, 3)
    with (
        connect(broker.bootstrap_servers) as session,
        session.producer() as producer,
        silent(broker, tps, transport) as (c, ended),
    ):
        producer.produce_sync("t", b"0", partition=0)
        assert ended().value() == b"0"
        for i in range(1, 7):
            later = threading.Timer(
                0.3, producer.produce_sync, ("t", b"%d" % i), {"partition": i % 3}
            )
            later.start()
            assert c.poll(LONG_S / 2).value() == b"%d" % i
            later.join()


@COUNTS
def test_a_silent_consumer_looks_at_no_slots(broker, monkeypatch, partitions):
    """But once in LONGEST_LOOK_MS, and twice at the start of each poll."""
    monkeypatch.setattr(consumer, "SILENT_S", 0.05)
    tps = topic(broker, partitions)
    with silent(broker, tps, "shm") as (c, ended):
        before = c.statistics()["slot_reads"]
        time.sleep(3)
        assert c.statistics()["slot_reads"] - before <= 3 * 4
        with connect(broker.bootstrap_servers) as session, session.producer() as producer:
            producer.produce_sync("t", b"second", partition=0)
        assert ended().value() == b"second"


@PATHS
def test_a_seek_after_a_silence_is_obeyed_at_once(broker, never_looks, transport):
    tps = topic(broker, 3)
    given = {"bootstrap.servers": broker.bootstrap_servers, "transport": transport}
    with kdirect.Consumer(given) as c:
        read_all(c, tps)
        assert c.poll(1.0) is None
        c.seek(tps[1], 0)
        assert c.poll(LONG_S / 2).partition() == 1
        assert c.poll(0.5) is None
        c.incremental_unassign(tps[1:])
        assert c.poll(0.5) is None
        c.incremental_assign({tps[2]: 0})
        assert c.poll(LONG_S / 2).partition() == 2


@PATHS
def test_a_pause_in_silence_holds_and_a_resume_brings_what_came(broker, never_looks, transport):
    tps = topic(broker, 2)
    given = {"bootstrap.servers": broker.bootstrap_servers, "transport": transport}
    with (
        kdirect.Consumer(given) as c,
        connect(broker.bootstrap_servers) as session,
        session.producer() as producer,
    ):
        read_all(c, tps)
        assert c.poll(0.5) is None
        c.pause(tps[:1])
        producer.produce_sync("t", b"held", partition=0)
        assert c.poll(1.0) is None
        c.resume(tps[:1])
        assert c.poll(LONG_S / 2).value() == b"held"


@PATHS
def test_a_rebalance_ends_the_wait_of_a_silent_member(broker, never_looks, transport):
    """A member that waits for records at the brokers hears at once what its heartbeats bring."""
    topic(broker, 2)
    given = {
        "bootstrap.servers": broker.bootstrap_servers,
        "transport": transport,
        "group.id": "g",
        "heartbeat.interval.ms": 50,
        "auto.offset.reset": "latest",
        "enable.auto.commit": False,
    }
    with kdirect.Consumer(given) as old, kdirect.Consumer(given) as new:
        old.subscribe(["t"])
        while len(old.assignment()) < 2:
            old.poll(0.1)
        assert old.poll(0.5) is None
        waiting = threading.Thread(target=old.poll, args=(LONG_S / 2,), daemon=True)
        waiting.start()
        new.subscribe(["t"])
        deadline = time.monotonic() + LONG_S / 4
        while not new.assignment() and time.monotonic() < deadline:
            new.poll(0.1)
        assert len(new.assignment()) == len(old.assignment()) == 1
        (tp,) = old.assignment()
        with connect(broker.bootstrap_servers) as session, session.producer() as producer:
            producer.produce_sync(tp.topic, b"end", partition=tp.partition)
        waiting.join(LONG_S)
        assert not waiting.is_alive()


def test_where_no_broker_can_be_asked_slots_are_looked_at(broker, monkeypatch):
    monkeypatch.setattr(consumer, "SILENT_S", 0.05)
    tps = topic(broker, 3)
    with kdirect.Consumer({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"}) as c:
        read_all(c, tps)

        def refuse(*_, **__):
            raise BrokerUnavailableError("refused")

        monkeypatch.setattr(c._session.cluster, "lease", refuse)
        before = c.statistics()["slot_reads"]
        assert c.poll(1.0) is None
        assert c.statistics()["slot_reads"] - before > 8
        with connect(broker.bootstrap_servers) as session, session.producer() as producer:
            producer.produce_sync("t", b"second", partition=2)
        assert c.poll(LONG_S / 2).value() == b"second"


def test_no_poll_waits_for_a_broker_that_hangs_when_it_is_asked(broker, monkeypatch):
    """The records of others, and of itself over RDMA, are not held up by the connection to it."""
    monkeypatch.setattr(consumer, "SILENT_S", 0.05)
    tps = topic(broker, 3)
    with kdirect.Consumer({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"}) as c:
        read_all(c, tps)
        hangs, goes_on = threading.Event(), threading.Event()
        lease = c._session.cluster.lease

        def hang(*args, **kwargs):
            hangs.set()
            assert goes_on.wait(LONG_S)
            return lease(*args, **kwargs)

        monkeypatch.setattr(c._session.cluster, "lease", hang)
        deadline = threading.Timer(LONG_S / 4, goes_on.set)
        deadline.start()
        while not hangs.is_set():
            assert c.poll(0.1) is None
        with connect(broker.bootstrap_servers) as session, session.producer() as producer:
            producer.produce_sync("t", b"second", partition=2)
        assert c.poll(LONG_S / 2).value() == b"second"
        assert not goes_on.is_set(), "a poll has waited for the connection"
        deadline.cancel()
        waits = broker.statistics()["broker_fetch_waits"]
        goes_on.set()
        until = time.monotonic() + 20
        while broker.statistics()["broker_fetch_waits"] == waits:
            assert time.monotonic() < until, "no Fetch waits at the broker"
            assert c.poll(0.1) is None


def test_a_silence_after_another_waits_on_the_same_connections(broker, monkeypatch):
    monkeypatch.setattr(consumer, "SILENT_S", 0.05)
    tps = topic(broker, 3)
    with (
        connect(broker.bootstrap_servers) as session,
        session.producer() as producer,
        silent(broker, tps, "shm") as (c, ended),
    ):
        producer.produce_sync("t", b"0", partition=0)
        assert ended().value() == b"0"
        descriptors = []
        for i in range(1, 20):
            waits = broker.statistics()["broker_fetch_waits"]
            while broker.statistics()["broker_fetch_waits"] == waits:
                assert c.poll(0.02) is None
            producer.produce_sync("t", b"%d" % i, partition=i % 3)
            assert c.poll(LONG_S / 2).value() == b"%d" % i
            descriptors.append(len(os.listdir("/proc/self/fd")))
        assert descriptors[-1] <= descriptors[5] + 2, descriptors  # every partition was written


# -- how long a Fetch waits ------------------------------------------------------------------------


def waits(count, **settings):
    """How long `count` Fetches wait that find nothing."""
    rule = FetchWait.of(CLIENT.resolve({"bootstrap.servers": "b:1", **settings}))
    out = [rule.first_ms]
    while len(out) < count:
        out.append(rule.after(out[-1], found=False))
    assert rule.after(out[-1], found=True) == out[0]
    return out


def test_a_fetch_waits_longer_the_longer_there_was_nothing():
    assert waits(6) == [500, 1000, 2000, 4000, 5000, 5000]


@pytest.mark.parametrize("name", ["fetch.wait.max.ms", "fetch.max.wait.ms"])
@pytest.mark.parametrize("given", [0, 7, 500, 60_000])
def test_a_wait_that_was_set_is_obeyed(name, given):
    assert waits(3, **{name: given}) == [given] * 3


def test_records_are_not_held_back_for_longer_in_silence():
    assert waits(3, **{"fetch.min.bytes": 2}) == [500] * 3


def test_consumers_ask_as_often_as_was_set(broker):
    """Over TCP, of three seconds: at most five Fetches, and as many as there is time for where each
    waits for 10 ms only."""
    tps = topic(broker, 2)
    asked = {}
    for given in ({}, {"fetch.wait.max.ms": 10}):
        settings = {"bootstrap.servers": broker.bootstrap_servers, "transport": "tcp", **given}
        with kdirect.Consumer(settings) as c:
            read_all(c, tps)
            before = c.statistics()["fetches"]
            deadline = time.monotonic() + (3 if not given else 30)
            while time.monotonic() < deadline and c.statistics()["fetches"] < before + 20:
                assert c.poll(0.5) is None
            asked[bool(given)] = c.statistics()["fetches"] - before
    assert asked[False] <= 5
    assert asked[True] >= 20


# -- the bell --------------------------------------------------------------------------------------


def test_a_bell_that_was_rung_before_ends_a_wait_once():
    bell = Bell()
    bell.ring()
    bell.ring()
    assert wait_for_any([], LONG_S * 1000, bell)
    assert not wait_for_any([], 1, bell)
    assert not bell.hush()
    threading.Timer(0.05, bell.ring).start()
    assert wait_for_any([], LONG_S * 1000, bell)


def test_a_bell_that_is_closed_rings_nobody():
    bell = Bell()
    fd = bell.fileno()
    bell.close()
    with pytest.raises(OSError):
        os.fstat(fd)
    bell.close()
    bell.ring()
    assert not bell.hush()


def test_the_bell_of_a_fork_does_not_wake_the_parent():
    bell = Bell()
    child = os.fork()
    if child == 0:
        bell.ring()
        os._exit(0)
    os.waitpid(child, 0)
    assert not bell.hush()


def test_a_bell_that_nobody_holds_is_closed():
    bell = Bell()
    fd = bell.fileno()
    del bell
    with pytest.raises(OSError):
        os.fstat(fd)
