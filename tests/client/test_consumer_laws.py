"""What a consumer promises when something goes wrong inside a call: nothing taken is lost, a record
counts as done only when the next call asks for another, and what one call could not do is left to
the next."""

from __future__ import annotations

import time
from itertools import islice

import pytest

import kdirect
from kdirect.client import connect
from kdirect.errors import BrokerError, KdirectError, OffsetOutOfRangeError, TimedOutError
from kdirect.model import TopicPartition
from kdirect.wire.environment import Environment
from tests.support import poll_until

SYNC_GROUP = 14
PATHS = pytest.mark.parametrize("transport", ["shm", "tcp"])
QUICK = {"heartbeat.interval.ms": 50, "session.timeout.ms": 6000, "auto.offset.reset": "earliest"}


@pytest.fixture
def make():
    """Consumers of a broker; settings as keyword arguments with `_` for `.`."""
    consumers = []

    def make(broker, **settings) -> kdirect.Consumer:
        settings = {name.replace("_", "."): value for name, value in settings.items()}
        consumers.append(
            kdirect.Consumer({"bootstrap.servers": broker.bootstrap_servers, **QUICK, **settings})
        )
        return consumers[-1]

    yield make
    for c in consumers:
        c.close()


def fill(broker, count, partitions=1, size=0):
    """Topic `t` with `count` records round robin, padded to `size` bytes, each a batch of its own:
    64 KiB of them are loaded at a time."""
    session = connect(broker.bootstrap_servers)
    session.admin.create_topic("t", partitions, if_not_exists=True)
    with session.producer() as producer:
        for i in range(count):
            producer.produce("t", (b"%d" % i).ljust(size), partition=i % partitions)
    return [TopicPartition("t", p) for p in range(partitions)]


def consumed(consumer, count, timeout=30.0):
    """The offsets of the next `count` records by `consume`; errors that may pass are waited out."""
    out = []
    deadline = time.monotonic() + timeout
    while len(out) < count and time.monotonic() < deadline:
        try:
            out += [m.offset() for m in consumer.consume(count - len(out), 0.2)]
        except KdirectError as e:
            assert e.retriable, e
    return out


def fails_once(monkeypatch, thing, name, error):
    """The next call of this method raises `error`."""
    method, calls = getattr(thing, name), []

    def call(*arguments):
        calls.append(name)
        if len(calls) == 1:
            raise error
        return method(*arguments)

    monkeypatch.setattr(thing, name, call)
    return calls


# -- what was taken is returned --------------------------------------------------------------------


@PATHS
def test_consume_returns_what_it_took_before_the_broker_went(broker_process, make, transport):
    broker = broker_process()
    (tp,) = fill(broker, 100)
    consumer = make(broker, transport=transport, connect_timeout_ms=300)
    consumer.assign({tp: 0})
    assert consumer.poll(20).offset() == 0  # the others are in hand
    broker.kill()
    taken = [m.offset() for m in consumer.consume(1000, 1.0)]
    assert len(taken) > 1 and consumer.position(tp) == taken[-1] + 1
    broker.start()
    fill(broker, 10)
    assert taken + consumed(consumer, 109 - len(taken)) == list(range(1, 110))


@PATHS
@pytest.mark.parametrize("error", [KeyboardInterrupt, kdirect.errors.BrokerUnavailableError])
def test_what_is_raised_inside_consume_loses_nothing(broker, make, transport, error, monkeypatch):
    """A signal's handler may raise anywhere: what was taken is handed out again.  A connection's
    end is the next call's."""
    (tp,) = fill(broker, 3000, size=100)
    consumer = make(broker, transport=transport)
    consumer.assign({tp: 0})
    pull, calls = consumer._reading.pull, []

    def third_raises(wait_ms):
        if len(calls) < 3 and consumer._reading.queue.popped:
            calls.append(consumer._reading.queue.popped)
            if len(calls) == 3:
                raise error("here")
        return pull(wait_ms)

    monkeypatch.setattr(consumer._reading, "pull", third_raises)
    taken = []
    try:
        taken = [m.offset() for m in consumer.consume(3000, 20)]
    except KeyboardInterrupt:
        assert error is KeyboardInterrupt
    assert len(calls) == 3 and calls[-1] < 3000
    assert consumer.position(tp) == len(taken) == (0 if error is KeyboardInterrupt else calls[-1])
    assert taken + consumed(consumer, 3000 - len(taken)) == list(range(3000))


@PATHS
def test_what_is_raised_while_columns_are_read_loses_nothing(broker, make, transport, monkeypatch):
    (tp,) = fill(broker, 1000)
    consumer = make(broker, transport=transport)
    consumer.assign({tp: 0})
    assert consumer.poll(20).offset() == 0  # what is in hand goes into the columns too
    feed = consumer._reading._feed

    def once(*arguments):
        monkeypatch.undo()
        feed(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(consumer._reading, "_feed", once)
    with pytest.raises(KeyboardInterrupt):
        consumer.poll_arrow(20)
    assert consumer.position(tp) == 1
    offsets = []
    while len(offsets) < 999:
        offsets += consumer.poll_arrow(20).column("offset").to_pylist()
    assert offsets == list(range(1, 1000))


@PATHS
def test_a_call_commits_nothing_that_it_has_not_returned(broker, make, transport, monkeypatch):
    (tp,) = fill(broker, 3000, size=100)
    consumer = make(broker, group_id="g", transport=transport, auto_commit_interval_ms=3_600_000)
    consumer.subscribe("t")
    pull = consumer._reading.pull

    def due(wait_ms):
        found = pull(wait_ms)
        if found:
            consumer._commit_due = consumer._attention = (
                True  # as the group's clock says, in the middle of the call
            )
        return found

    monkeypatch.setattr(consumer._reading, "pull", due)
    taken = consumer.consume(2500, 20)
    assert len(taken) > 700, "more than one run of batches"
    assert consumer.committed([tp]) == {tp: None}
    consumer.consume(1, 20)
    assert consumer.committed([tp]) == {tp: len(taken)}


# -- what one call could not do is left to the next ------------------------------------------------


REFUSED = BrokerError("injected", retriable=True)


@PATHS
@pytest.mark.parametrize("what", ["the committed offsets", "the first offsets"])
def test_partitions_given_out_are_read_though_a_poll_failed_on_the_way(
    broker, make, transport, what, monkeypatch
):
    tps = fill(broker, 10, 2)
    consumer = make(broker, group_id="g", transport=transport)
    if what == "the committed offsets":
        calls = fails_once(
            monkeypatch, consumer._membership, "committed", TimedOutError("injected")
        )
    else:
        calls = fails_once(monkeypatch, consumer._session, "earliest_offsets", REFUSED)
    given = []
    consumer.subscribe("t", on_assign=lambda c, partitions: given.append(partitions))
    with pytest.raises(KdirectError, match="injected"):
        consumer.poll(20)
    assert calls and consumer.assignment() == []
    got = islice(iter(lambda: consumer.poll(20), None), 10)
    assert sorted(m.value() for m in got) == [b"%d" % i for i in range(10)]
    assert given == [tps] == [consumer.assignment()]


def test_without_a_reset_each_poll_says_so_until_there_is_a_committed_offset(broker, make):
    a, b = fill(broker, 10, 2)
    one, two = (make(broker, group_id="g", auto_offset_reset="none") for _ in range(2))
    one.subscribe("t")
    for _ in range(3):
        with pytest.raises(OffsetOutOfRangeError, match="no committed offset"):
            one.poll(20)
    two.subscribe("t")
    deadline = time.monotonic() + 30
    while (
        one._membership.rebalances < 2 or two._membership.rebalances < 1
    ):  # nobody has read what was given out before
        assert time.monotonic() < deadline
        for c in (one, two):
            try:
                assert c.poll(0.01) is None
            except OffsetOutOfRangeError:
                pass
    one.commit(offsets={a: 3, b: 3}, asynchronous=False)
    got = {c: (m.partition(), m.offset()) for c in (one, two) if (m := c.poll(20))}
    assert sorted(got.values()) == [(0, 3), (1, 3)] and one.assignment() != two.assignment()


@pytest.mark.parametrize("decision", ["cut", "cut after"])
def test_a_leader_whose_assignments_did_not_arrive_makes_them_again(broker, proxy, make, decision):
    tps = fill(broker, 10, 2)
    proxy.once(SYNC_GROUP, decision)
    consumer = make(proxy, group_id="g", transport="tcp")
    consumer.subscribe("t")
    got = islice(iter(lambda: consumer.poll(20), None), 10)
    assert len(list(got)) == 10 and consumer.assignment() == tps


@PATHS
def test_a_reset_that_failed_is_tried_again(broker, make, transport, monkeypatch):
    (tp,) = fill(broker, 100)
    connect(broker.bootstrap_servers).admin.delete_records({tp: 40})
    consumer = make(broker, transport=transport)
    calls = fails_once(monkeypatch, consumer._session, "earliest_offsets", REFUSED)
    with pytest.raises(BrokerError, match="injected"):
        consumer.assign({tp: 5})
        consumer.poll(20)
    assert consumer.poll(20).offset() == 40 and len(calls) == 2


def test_partitions_that_were_added_are_read_though_a_poll_failed_on_the_way(
    broker, make, monkeypatch
):
    fill(broker, 1)
    consumer = make(broker, metadata_max_age_ms=100)
    consumer.subscribe("t")
    assert consumer.poll(20).partition() == 0
    connect(broker.bootstrap_servers).admin.create_partitions("t", 2)
    fill(broker, 2, 2)
    fails_once(monkeypatch, consumer._session, "earliest_offsets", REFUSED)
    got = []
    with pytest.raises(BrokerError, match="injected"):
        while len(got) < 3:
            got += consumer.consume(3, 20)
    got += islice(iter(lambda: consumer.poll(20), None), 2 - len(got))
    assert sorted(m.partition() for m in got) == [0, 1]


# -- whose commit it is ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", ["the next poll", "commit", "asynchronous commit", "unsubscribe", "close"]
)
def test_a_member_that_lost_its_place_does_not_commit_for_an_empty_group(broker, make, how):
    """The coordinator of a group without members takes any commit of nobody in particular."""
    (tp,) = fill(broker, 100)
    answered, events = [], []
    slow = make(broker, group_id="g", max_poll_interval_ms=1000, auto_commit_interval_ms=3_600_000)
    slow._on_commit = lambda error, offsets: answered.append(error and error.name)
    slow.subscribe(
        "t",
        on_revoke=lambda c, t: events.append("revoked"),
        on_lost=lambda c, t: events.append("lost"),
    )
    poll_until(lambda: slow._queue.popped >= 10, slow)
    poll_until(lambda: slow._membership.lost)  # no poll in time
    quick = make(broker, group_id="g")
    quick.subscribe("t")
    poll_until(lambda: quick._queue.popped and quick.position(tp) == 100, quick)
    quick.close()
    look = make(broker, group_id="g")
    assert look.committed([tp]) == {tp: 100}
    if how == "the next poll":
        slow._commit_due = slow._attention = True  # as the group's clock says
        slow.poll(0)
        slow._commits.settle(slow._on_commit, wait=True)
    elif how == "commit":
        with pytest.raises(BrokerError) as refused:
            slow.commit(offsets={tp: 10}, asynchronous=False)
        assert refused.value.name == "ILLEGAL_GENERATION"
    elif how == "asynchronous commit":
        slow.commit(offsets={tp: 10})
        slow.poll(0)
        assert answered == ["ILLEGAL_GENERATION"]
    elif how == "unsubscribe":
        slow.unsubscribe()
    else:
        slow.close()
    assert look.committed([tp]) == {tp: 100}
    assert how == "commit" or events == ["lost"]


def test_commits_between_generations_are_refused_and_those_of_no_member_are_not(broker, make):
    (tp,) = fill(broker, 1)
    consumer = make(broker, group_id="g")
    consumer.subscribe("t")
    with pytest.raises(BrokerError) as refused:
        consumer.commit(offsets={tp: 1}, asynchronous=False)
    assert refused.value.name == "REBALANCE_IN_PROGRESS" and consumer.committed([tp]) == {tp: None}
    poll_until(lambda: consumer.assignment() == [tp], consumer)
    assert consumer.commit(offsets={tp: 1}, asynchronous=False) == {tp: 1}
    consumer.assign({tp: 0})  # ends the subscription
    assert (
        consumer.commit(offsets={tp: 0}, asynchronous=False)
        == {tp: 0}
        == make(broker, group_id="g").committed([tp])
    )


# -- timeouts --------------------------------------------------------------------------------------


@PATHS
def test_a_negative_timeout_is_none(broker, make, transport, monkeypatch):
    """Each record comes when the call has looked for it five times."""
    (tp,) = fill(broker, 0)
    quick = {"fetch_wait_max_ms": 50}  # one look
    consumer = make(broker, group_id="g", transport=transport, **quick)
    consumer.assign({tp: 0})
    assert consumer.committed([tp], -1) == consumer.committed([tp], None) == {tp: None}
    pull, calls = consumer._reading.pull, []

    def late(*arguments, **named):
        calls.append(arguments)
        if len(calls) == 5:
            fill(broker, 1)
        return pull(*arguments, **named)

    monkeypatch.setattr(consumer._reading, "pull", late)
    assert consumer.poll(-1).offset() == 0
    calls.clear()
    assert [m.offset() for m in consumer.consume(1, -1)] == [1]
    monkeypatch.undo()
    pull = consumer._reading.pull_arrow
    monkeypatch.setattr(consumer._reading, "pull_arrow", late)
    calls.clear()
    assert consumer.poll_arrow(-0.5).column("offset").to_pylist() == [2]


class _Sleeping(Environment):
    """Time passes in `sleep`, and a little with each look at the clock; `slept` is kept."""

    def __init__(self):
        self.now = 1000.0
        self.slept = []

    def monotonic(self):
        self.now += 1e-5
        return self.now

    def sleep(self, seconds):
        self.slept.append((self.now - 1000.0, seconds))
        self.now += seconds


def test_a_poll_looks_less_often_the_longer_there_was_nothing(broker, make, monkeypatch):
    """While no broker can be asked to tell of the next record."""
    (tp,) = fill(broker, 1)
    consumer = make(broker, transport="shm")
    consumer.assign({tp: 0})
    assert consumer.poll(20).offset() == 0
    consumer._environment = clock = _Sleeping()
    consumer._empty_since = None
    monkeypatch.setattr(consumer._reading, "wait", lambda wait_ms: False)
    assert consumer.poll(60) is None
    for quiet, seconds in clock.slept:
        assert seconds <= max(50e-6, quiet / 4) and seconds <= max(0.005, quiet / 200), quiet
    assert max(seconds for _, seconds in clock.slept) <= 0.02
    assert len([quiet for quiet, _ in clock.slept if quiet > 10]) < 60 * 50
