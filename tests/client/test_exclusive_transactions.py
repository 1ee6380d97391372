"""Transactional producers that hold their heads alone (`rdma.produce=exclusive`): the markers come
between their batches, and whoever else wants the partition gets what is theirs.

What holds in every test: readers of committed records, of whichever kind, see each transaction that
was committed, whole and once, and nothing of the others.
"""

from __future__ import annotations

import random
import threading
import uuid

import confluent_kafka
import pytest

import kdirect
from kdirect import AccessDeniedError, KdirectError, ProducerFencedError, TopicPartition
from kdirect.broker import head_access, head_driver
from kdirect.client import machine_driver
from kdirect.client.direct_append import DirectAppender
from kdirect.client.transaction import GroupMetadata
from kdirect.client.transaction_entry import EntryAnswer
from kdirect.errors import ProtocolError
from tests.support import wait_until

SEGMENT_BYTES = 256 << 10


@pytest.fixture
def topic(broker):
    return make_topic(broker)


def make_topic(broker, partitions=1, **configs):
    name = f"t{uuid.uuid4().hex[:8]}"
    with kdirect.connect(broker.bootstrap_servers) as session:
        session.admin.create_topic(
            name, partitions, configs={k.replace("_", "."): str(v) for k, v in configs.items()}
        )
    return name


def ready(broker, name, **more):
    settings = {"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"}
    made = kdirect.Producer(
        {**settings, "rdma.produce": "exclusive", "transactional.id": name, **more}
    )
    made.init_transactions(30)
    return made


def by_tcp(broker, name):
    """A Kafka client's transactional producer."""
    made = confluent_kafka.Producer(
        {"bootstrap.servers": broker.bootstrap_servers, "transactional.id": name, "linger.ms": 0}
    )
    made.init_transactions(30)
    return made


def transaction(made, topic, values, *, commit=True):
    """One transaction; the values, where it is committed."""
    made.begin_transaction()
    for value in values:
        made.produce(topic, value, partition=0)
    if commit:
        made.commit_transaction()
        return list(values)
    made.flush()
    made.abort_transaction()
    return []


def committed(broker, topic, *, partition=0, **settings):
    """What our reader of committed records sees of a partition."""
    tp = TopicPartition(topic, partition)
    base = {"bootstrap.servers": broker.bootstrap_servers, "isolation.level": "read_committed"}
    with kdirect.Consumer({**base, **settings}) as reader:
        end = reader.get_watermark_offsets(tp)[1]
        reader.assign({tp: 0})
        values = []
        while reader.position(tp) < end:
            message = reader.poll(0.5)
            if message is None:
                break  # what is left are markers, or aborted
            values.append(message.value().decode())
    return values


def stock(broker, topic):
    """What librdkafka's sees."""
    reader = confluent_kafka.Consumer({
        "bootstrap.servers": broker.bootstrap_servers, "group.id": uuid.uuid4().hex,
        "isolation.level": "read_committed", "enable.partition.eof": True,
        "enable.auto.commit": False,
    })  # fmt: skip
    reader.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
    values = []
    try:
        while True:
            message = reader.poll(20)
            assert message is not None, f"only {len(values)} values"
            if message.error() is not None:
                return values
            values.append(message.value().decode())
    finally:
        reader.close()


def check(broker, topic, expected):
    """`expected`: by producer, each in order."""
    texts = [value for values in expected.values() for value in values]
    for seen in (
        committed(broker, topic, transport="shm"),
        committed(broker, topic, transport="tcp"),
        stock(broker, topic),
    ):
        assert sorted(seen) == sorted(texts)
        for name, values in expected.items():
            assert [v for v in seen if v.startswith(f"{name} ")] == values


def test_one_head_serves_all_transactions(broker, topic):
    """Nothing is given back between: the marker is put after the last batch."""
    before = broker.statistics()
    expected = []
    with ready(broker, topic) as made:
        for i in range(40):
            values = [f"a {i}-{k}" for k in range(1 + i % 7)]
            expected += transaction(made, topic, values, commit=i % 3 != 1)
        assert made.statistics()["paths"] == {f"{topic}-0": "exclusive"}
    after = broker.statistics()
    assert after["rdma_exclusive_heads"] - before.get("rdma_exclusive_heads", 0) == 1
    assert after["rdma_recalls"] == before.get("rdma_recalls", 0)
    check(broker, topic, {"a": expected})


@pytest.mark.parametrize("linger_ms", [0, 5])
def test_transactions_go_on_from_file_to_file(broker, linger_ms):
    """Files are granted ahead, and fill up anywhere: within a transaction, and at its marker."""
    topic = make_topic(broker, segment_bytes=SEGMENT_BYTES)
    expected = []
    with ready(broker, topic, **{"linger.ms": linger_ms}) as made:
        for i in range(60):
            values = [f"a {i}-{k}" + "." * (20_000 + 777 * i % 5_000) for k in range(1 + i % 4)]
            expected += transaction(made, topic, values, commit=i % 5 != 2)
        statistics = made.statistics()
    assert statistics["rdma_records"] == statistics["rdma_requests"] > 100 or linger_ms
    assert "tcp_records" not in statistics or statistics["tcp_records"] == 0
    check(broker, topic, {"a": expected})


def test_markers_of_other_producers_come_in_the_middle(broker, topic):
    """Their records were there before the head was held.  The holder makes room for each marker and
    goes on alone: that somebody ends a transaction does not mean that he writes on."""
    expected = {"a": [], "b": []}
    others = [by_tcp(broker, f"{topic}-{i}") for i in range(6)]
    for i, other in enumerate(others):
        other.begin_transaction()
        other.produce(topic, f"b {i}", partition=0)
        other.flush(20)
    with ready(broker, f"{topic}-mine") as made:
        for i, other in enumerate(others):
            made.begin_transaction()
            made.produce(topic, f"a {i}-0", partition=0)
            made.flush()
            if i % 2:
                other.commit_transaction(20)
                expected["b"].append(f"b {i}")
            else:
                other.abort_transaction(20)
            made.produce(topic, f"a {i}-1", partition=0)
            made.flush()
            assert made.statistics()["paths"] == {f"{topic}-0": "exclusive"}
            made.commit_transaction()
            expected["a"] += [f"a {i}-0", f"a {i}-1"]
    assert broker.statistics()["rdma_recalls"] >= len(others)
    check(broker, topic, expected)


def log_end(broker, topic):
    """The offset after the last record or marker of partition 0."""
    with kdirect.Consumer({"bootstrap.servers": broker.bootstrap_servers}) as reader:
        return reader.get_watermark_offsets(TopicPartition(topic, 0))[1]


def test_a_grant_that_comes_late_is_entered(broker, topic, monkeypatch):
    """A holder that is recalled asks for the next grant, does not wait for the answer, and enters
    its transaction meanwhile.  What is granted then is the broker's to append to until the producer
    has entered it, too: a marker and a batch would take the same place."""
    monkeypatch.setattr(head_driver, "RECALL_CHECK_S", 10.0)  # the holder is waited for
    grant_by = DirectAppender.grant_by
    impatient = []

    def no_time(appender, size, deadline):
        if appender._asked is None and appender.writer.recalled:
            impatient.append(appender.tp)
            deadline = 0.0
        return grant_by(appender, size, deadline)

    monkeypatch.setattr(DirectAppender, "grant_by", no_time)
    others = [by_tcp(broker, f"{topic}-{i}") for i in range(2)]
    for i, other in enumerate(others):
        other.begin_transaction()
        other.produce(topic, f"b {i}", partition=0)
        other.flush(20)
    with ready(broker, f"{topic}-mine") as made:
        made.begin_transaction()
        made.produce(topic, "a 0", partition=0)
        made.flush()
        for i, other in enumerate(others):
            recalls, end = broker.statistics()["rdma_recalls"], log_end(broker, topic)
            other.commit_transaction(20)
            wait_until(
                lambda recalls=recalls, end=end: (
                    broker.statistics()["rdma_recalls"] > recalls or log_end(broker, topic) > end
                ),
                60,
            )
            made.produce(topic, f"a {i + 1}", partition=0)
            made.flush()
        made.commit_transaction()
    check(broker, topic, {"a": ["a 0", "a 1", "a 2"], "b": ["b 0", "b 1"]})
    assert len(impatient) == 2


def test_a_holder_is_fenced_in_the_middle(broker, topic):
    """The next producer of its name writes at once, although the other still holds the head."""
    old = ready(broker, topic)
    expected = transaction(old, topic, ["a 1", "a 2"])
    old.begin_transaction()
    old.produce(topic, "a left open", partition=0)
    old.flush()
    new = ready(broker, topic)
    expected += transaction(new, topic, ["a 3"])
    old.produce(topic, "a late", partition=0)
    with pytest.raises((ProducerFencedError, kdirect.TransactionError)):
        old.commit_transaction()
    expected += transaction(new, topic, ["a 4"])
    old.close()
    expected += transaction(new, topic, ["a 5"])
    new.close()
    check(broker, topic, {"a": expected})


def test_a_holder_is_fenced_between_two_transactions(broker, topic):
    """It has no transaction that would be aborted, and knows nothing: its head is recalled for the
    next one that enters transactions, too."""
    old = ready(broker, topic)
    expected = transaction(old, topic, ["a 1"])
    new = ready(broker, topic)
    expected += transaction(new, topic, ["a 2"])
    old.begin_transaction()
    old.produce(topic, "a late", partition=0)
    with pytest.raises(kdirect.TransactionError):
        old.commit_transaction()
    expected += transaction(new, topic, ["a 3"])
    old.close()
    new.close()
    check(broker, topic, {"a": expected})


def test_a_head_is_not_taken_before_it_is_entered(broker, topic, monkeypatch):
    """Two that ask for it would take it from each other again and again.  One that does not enter
    what it was granted keeps it for a moment only."""
    monkeypatch.setattr(machine_driver, "EXCLUSIVE_WAIT_S", 0.1)
    enter = DirectAppender._enter_transaction
    asks = []
    a, b = (ready(broker, f"{topic}-{name}") for name in "ab")

    def after_the_other(appender, deadline):
        if asks:
            asks.pop()()
        return enter(appender, deadline)

    def refused():
        with pytest.raises(AccessDeniedError):
            b.produce(topic, "b 1", partition=0)

    monkeypatch.setattr(DirectAppender, "_enter_transaction", after_the_other)
    monkeypatch.setattr(head_access, "ENTER_S", 600.0)
    b.begin_transaction()
    asks.append(refused)
    expected = transaction(a, topic, ["a 1"])
    b.abort_transaction()
    b.begin_transaction()
    b.produce(topic, "b 2", partition=0)  # between two transactions it is given in turn
    b.commit_transaction()
    monkeypatch.setattr(head_access, "ENTER_S", 0.0)
    asks.append(lambda: transaction(b, topic, ["b 3"]))
    expected += transaction(a, topic, ["a 2"])
    assert not asks
    a.close()
    b.close()
    check(broker, topic, {"a": expected, "b": ["b 2", "b 3"]})


def test_a_transaction_that_takes_too_long():
    """The coordinator aborts it while the head is held: it is recalled for the marker, and what
    comes late is refused."""
    often = {"transaction_abort_timed_out_transaction_cleanup_interval_ms": "50"}
    with kdirect.Broker(**often) as broker:
        topic = make_topic(broker)
        made = ready(broker, topic, **{"transaction.timeout.ms": 300})
        expected = transaction(made, topic, ["a 1"])
        made.begin_transaction()
        made.produce(topic, "a too slow", partition=0)
        made.flush()
        recalls = broker.statistics()["rdma_recalls"]
        wait_until(lambda: broker.statistics()["rdma_recalls"] > recalls, 60)
        made.produce(topic, "a late", partition=0)
        with pytest.raises(kdirect.KdirectError):
            made.commit_transaction(30)
        made.close()
        with ready(broker, topic) as new:
            expected += transaction(new, topic, ["a 2"])
        check(broker, topic, {"a": expected})


def test_others_are_kept_off_as_by_every_exclusive_head(broker, topic):
    """Who writes by RDMA is refused, within a transaction and between two."""
    with ready(broker, topic) as made:
        expected = transaction(made, topic, ["a 1"])
        plain = kdirect.Producer(
            {"bootstrap.servers": broker.bootstrap_servers, "rdma.produce": "exclusive"}
        )
        with pytest.raises(AccessDeniedError):
            plain.produce(topic, "b 1", partition=0)
        made.begin_transaction()
        made.produce(topic, "a 2", partition=0)
        made.flush()
        with pytest.raises(AccessDeniedError), ready(broker, f"{topic}-b") as second:
            transaction(second, topic, ["c 1"])
        made.commit_transaction()
        plain.close()
    check(broker, topic, {"a": [*expected, "a 2"]})


def both_written(made, topic):
    """The producer has had a way to both partitions."""
    for partition in (0, 1):
        made.begin_transaction()
        made.produce(topic, "warm", partition=partition)
        made.abort_transaction()


@pytest.mark.parametrize("linger_ms", [0, 5])
@pytest.mark.parametrize("warm", [False, True])
def test_who_waits_for_a_holder_in_vain_gives_its_own_heads_back(
    broker, monkeypatch, warm, linger_ms
):
    """The holder may wait for one of them.  The transaction can only be aborted, and whether there
    was a way to the partition before is no matter."""
    topic = make_topic(broker, 2)
    a, b = (ready(broker, f"{topic}-{name}", **{"linger.ms": linger_ms}) for name in "ab")
    if warm:
        both_written(a, topic)
        both_written(b, topic)
    for made, own in ((a, 0), (b, 1)):
        made.begin_transaction()
        made.produce(topic, "1", partition=own)
        made.flush()
    monkeypatch.setattr(machine_driver, "EXCLUSIVE_WAIT_S", 0.1)
    with pytest.raises(KdirectError) as caught:
        a.produce(topic, "2", partition=1)
        a.commit_transaction(20)
    assert caught.value.txn_requires_abort and not (caught.value.fatal or caught.value.retriable)
    with pytest.raises(kdirect.TransactionAbortableError):
        a.produce(topic, "3", partition=0)
    monkeypatch.setattr(machine_driver, "EXCLUSIVE_WAIT_S", 60.0)
    b.produce(topic, "b", partition=0)  # which `a` has held, and has not aborted yet
    b.commit_transaction(30)
    a.abort_transaction(30)
    a.begin_transaction()
    for partition in (0, 1):
        a.produce(topic, "a", partition=partition)
    a.commit_transaction(30)
    a.close()
    b.close()
    assert committed(broker, topic) == ["b", "a"]
    assert committed(broker, topic, partition=1) == ["1", "a"]


@pytest.mark.parametrize("warm", [False, True])
def test_two_that_wait_for_each_other_both_come_through(broker, warm):
    """Each does what docs/transactions.md says: abort, and begin again."""
    topic = make_topic(broker, 2)
    late = {"transaction.timeout.ms": 20_000}
    a, b = (ready(broker, f"{topic}-{name}", **late) for name in "ab")
    if warm:
        both_written(a, topic)
        both_written(b, topic)
    meeting = threading.Barrier(2)
    aborted, errors = [], []

    def run(made, name, first):
        try:
            for attempt in range(20):
                made.begin_transaction()
                try:
                    made.produce(topic, name, partition=first)
                    made.flush()
                    if not attempt:
                        meeting.wait(60)
                    made.produce(topic, name, partition=1 - first)
                    made.commit_transaction()
                    return
                except KdirectError as e:
                    if not e.txn_requires_abort:
                        raise
                    aborted.append(name)
                    made.abort_transaction()
            errors.append(f"{name} never came through")
        except Exception as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=one) for one in ((a, "a", 0), (b, "b", 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert aborted, "neither waited for the other"
    a.close()
    b.close()
    for partition in (0, 1):
        assert sorted(committed(broker, topic, partition=partition)) == ["a", "b"]


def test_a_transaction_that_a_coordinator_refuses_gives_its_heads_back(broker, topic):
    """Before it is aborted: nothing more is written in it."""
    a, b = (ready(broker, f"{topic}-{name}") for name in "ab")
    a.begin_transaction()
    a.produce(topic, "a", partition=0)
    a.flush()
    nobody = GroupMetadata(topic, 7, "who has left")
    with pytest.raises(kdirect.TransactionAbortableError):
        a.send_offsets_to_transaction({TopicPartition(topic, 0): 1}, nobody)
    expected = transaction(b, topic, ["b 1"])
    a.abort_transaction()
    a.close()
    b.close()
    check(broker, topic, {"b": expected})


@pytest.mark.parametrize("seed", range(4))
def test_others_come_and_go(broker, seed):
    """Two that hold the head in turn, a Kafka client with transactions, one without, in any
    order."""
    chance = random.Random(seed)
    topic = make_topic(broker, segment_bytes=SEGMENT_BYTES)
    made = {name: ready(broker, f"{topic}-{name}") for name in ("a", "b")}
    other = by_tcp(broker, f"{topic}-c")
    plain = kdirect.Producer({"bootstrap.servers": broker.bootstrap_servers, "transport": "tcp"})
    expected = {"a": [], "b": [], "c": [], "d": []}
    pending = []  # of the Kafka client's open transaction
    for i in range(40):
        name = chance.choice("aaaabbbbcd")
        values = [f"{name} {i}-{k}" + "." * chance.randrange(9_000) for k in range(3)]
        if name in made:
            expected[name] += transaction(made[name], topic, values, commit=chance.random() < 0.7)
        elif name == "d":
            for value in values:
                plain.produce_sync(topic, value, partition=0)
            expected["d"] += values
        elif pending:
            if chance.random() < 0.7:
                other.commit_transaction(20)
                expected["c"] += pending
            else:
                other.abort_transaction(20)
            pending = []
        else:
            other.begin_transaction()
            for value in values:
                other.produce(topic, value, partition=0)
            other.flush(20)
            pending = values
    if pending:
        other.abort_transaction(20)
    for one in (*made.values(), plain):
        one.close()
    check(broker, topic, expected)


def test_the_place_that_a_broker_names_is_checked(broker, topic, monkeypatch):
    """Bytes from outside: what lies before is others', and what lies after is nobody's."""
    take = DirectAppender._take_entry
    wrong = {}

    def forged(appender, entry, answer):
        if wrong and answer is not None:
            answer = EntryAnswer(answer.code, wrong.get("position", answer.position),
                                 wrong.get("order", answer.order))  # fmt: skip
        return take(appender, entry, answer)

    monkeypatch.setattr(DirectAppender, "_take_entry", forged)
    for one in ({"position": 0}, {"position": 1 << 60}, {"order": 1 << 16}):
        made = ready(broker, f"{topic}-{one}")
        transaction(made, topic, ["a 1"])
        wrong.update(one)
        made.begin_transaction()
        with pytest.raises((ProtocolError, kdirect.DeliveryError), match="does not go on"):
            made.produce_sync(topic, "a 2", partition=0)
        wrong.clear()
        made.abort_transaction()
        made.close()


def test_a_broker_that_does_not_answer_takes_the_head_back(broker, topic, monkeypatch):
    """A producer that cannot say that it leaves is recalled for the marker, and goes on after."""
    leave = DirectAppender.leave_transaction

    def silent(appender):
        if appender.entered and leaves["all"]:
            return leave(appender)
        return None

    leaves = {"all": True}
    monkeypatch.setattr(DirectAppender, "leave_transaction", silent)
    expected = []
    with ready(broker, topic) as made:
        for i in range(10):
            leaves["all"] = i % 3 == 0
            expected += transaction(made, topic, [f"a {i}"], commit=i % 4 > 0)
        assert made.statistics()["paths"] == {f"{topic}-0": "exclusive"}
    check(broker, topic, {"a": expected})
