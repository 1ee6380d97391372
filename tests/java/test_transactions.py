"""What Kafka's own TransactionsTest asks of brokers, with Java's producer and consumer: the newest
client speaks the second protocol of KIP-890, the other one the first."""

from __future__ import annotations

import time
import uuid

import pytest
from py4j.protocol import Py4JJavaError

import kdirect

pytestmark = pytest.mark.slow
FENCED = {"ProducerFencedException", "InvalidProducerEpochException"}


@pytest.fixture(scope="module")
def broker():
    with kdirect.Broker(
        transaction_abort_timed_out_transaction_cleanup_interval_ms=50,
        transaction_state_log_num_partitions=2,
    ) as started:
        yield started


@pytest.fixture
def topic(broker):
    name = f"t{uuid.uuid4().hex[:8]}"
    with kdirect.connect(broker.bootstrap_servers) as session:
        session.admin.create_topic(name, 2)
    return name


@pytest.fixture
def make(java, broker):
    """``make(transactional id, setting=value, ...)``: a transactional producer."""
    made = []

    def one(name, **settings):
        made.append(java.producer(broker.bootstrap_servers, transactional_id=name, **settings))
        return made[-1]

    yield one
    for producer in made:
        producer.close(java.milliseconds(0))


@pytest.fixture
def read(java, broker):
    """``read(topic, isolation, setting=value, ...)``: the values up to the end, in order."""

    def all_of(topic, isolation="read_committed", **settings):
        consumer = java.consumer(
            broker.bootstrap_servers, isolation_level=isolation, enable_auto_commit="false",
            **settings,
        )  # fmt: skip
        partitions = [java.partition(topic, i) for i in range(2)]
        consumer.assign(partitions)
        ends = consumer.endOffsets(partitions)
        values, deadline = [], time.monotonic() + 20
        while any(consumer.position(tp) < ends[tp] for tp in partitions):
            assert time.monotonic() < deadline, values
            values += [record.value() for record in java.poll(consumer)]
        consumer.close()
        return sorted(values)

    return all_of


def error_of(call):
    """The name of the class of the error that a call raises, or of its cause."""
    with pytest.raises(Py4JJavaError) as raised:
        call()
    error = raised.value.java_exception
    if error.getClass().getSimpleName() in ("ExecutionException", "KafkaException"):
        error = error.getCause()
    return error.getClass().getSimpleName()


def send(java, producer, topic, *values):
    return [producer.send(java.record(topic, i % 2, None, value)) for i, value in enumerate(values)]


def test_committed_and_aborted_transactions(java, topic, make, read):
    producer = make("basic")
    producer.initTransactions()
    producer.beginTransaction()
    send(java, producer, topic, "aborted 1", "aborted 2")
    producer.flush()
    producer.abortTransaction()
    producer.beginTransaction()
    send(java, producer, topic, "committed 1", "committed 2")
    producer.commitTransaction()
    producer.beginTransaction()
    sent = send(java, producer, topic, "open 1", "open 2")
    producer.flush()
    assert all(java.get(f).hasOffset() for f in sent)
    assert read(topic) == ["committed 1", "committed 2"], "an open transaction is not read"
    everything = [f"{what} {i}" for what in ("aborted", "committed", "open") for i in (1, 2)]
    assert read(topic, "read_uncommitted") == everything
    producer.commitTransaction()
    assert read(topic) == ["committed 1", "committed 2", "open 1", "open 2"]
    assert error_of(producer.initTransactions) == "IllegalStateException"


def test_a_delayed_fetch_names_the_aborted_transactions(java, topic, make, read):
    """It waits for more bytes than there are, so its answer has all of them at once."""
    producers = [make(f"delayed-{i}") for i in range(2)]
    for producer in producers:
        producer.initTransactions()
    for turn in range(2):
        for i, producer in enumerate(producers):
            producer.beginTransaction()
            send(java, producer, topic, f"{turn} {i} x", f"{turn} {i} y")
            producer.flush()
        producers[0].abortTransaction()
        producers[1].commitTransaction()
    settings = {"fetch_min_bytes": 100_000, "fetch_max_wait_ms": 100}
    expected = [f"{turn} 1 {k}" for turn in range(2) for k in "xy"]
    assert read(topic, **settings) == expected


def test_offsets_are_sent_with_the_transaction(java, broker, topic, make, read):
    """Every second transaction is aborted, and what it has read is read once more."""
    with kdirect.connect(broker.bootstrap_servers) as session:
        session.admin.create_topic(f"{topic}-in", 1)
        with session.producer() as plain:
            for i in range(40):
                plain.produce(f"{topic}-in", b"%d" % i)
    consumer = java.consumer(
        broker.bootstrap_servers, group_id=topic, enable_auto_commit="false", max_poll_records=10
    )
    source = java.partition(f"{topic}-in", 0)
    consumer.assign([source])
    producer = make("offsets")
    producer.initTransactions()
    done, turn = 0, 0
    while done < 40:
        records = list(java.poll(consumer))
        if not records:
            continue
        producer.beginTransaction()
        send(java, producer, topic, *(record.value() for record in records))
        where = java.kafka.clients.consumer.OffsetAndMetadata(
            records[-1].offset() + 1, java.gateway.jvm.java.util.Optional.of(0), f"turn {turn}"
        )
        producer.sendOffsetsToTransaction({source: where}, consumer.groupMetadata())
        turn += 1
        if turn % 2:
            producer.commitTransaction()
            done += len(records)
        else:
            producer.abortTransaction()
            consumer.seek(source, done)
    kept = consumer.committed({source})[source]
    assert (kept.offset(), kept.metadata()) == (40, f"turn {turn - 1}")
    consumer.close()
    assert sorted(map(int, read(topic))) == list(range(40))


@pytest.mark.parametrize("by", ["commit", "offsets", "send", "begin"])
def test_who_is_fenced_is_told_so(java, topic, make, read, by):
    old, new = make(f"fenced-{by}"), make(f"fenced-{by}")
    old.initTransactions()
    old.beginTransaction()
    send(java, old, topic, "old 1", "old 2")
    old.flush()
    if by == "begin":
        old.abortTransaction()
    new.initTransactions()  # aborts what is open
    new.beginTransaction()
    send(java, new, topic, "new 1", "new 2")
    new.flush()
    offsets = {java.partition(topic, 0): java.kafka.clients.consumer.OffsetAndMetadata(110)}
    group = java.kafka.clients.consumer.ConsumerGroupMetadata("g")
    if by == "begin":
        old.beginTransaction()
    calls = {
        "commit": old.commitTransaction,
        "offsets": lambda: old.sendOffsetsToTransaction(offsets, group),
        "send": lambda: java.get(send(java, old, topic, "late")[0]),
        "begin": lambda: java.get(send(java, old, topic, "late")[0]),
    }
    assert error_of(calls[by]) in FENCED
    new.commitTransaction()
    assert read(topic) == ["new 1", "new 2"]


def test_a_transaction_that_takes_too_long_is_aborted(java, topic, make, read):
    producer = make("slow", transaction_timeout_ms=100)
    producer.initTransactions()
    producer.beginTransaction()
    assert java.get(send(java, producer, topic, "first")[0]).hasOffset()
    time.sleep(0.6)
    assert error_of(lambda: java.get(send(java, producer, topic, "second")[0])) in FENCED
    assert read(topic) == []
    assert read(topic, "read_uncommitted") == ["first"]


def test_transactions_are_described_and_their_epochs_grow(java, broker, topic, make):
    """By one with each transaction of the second protocol."""
    producer, admin = make(f"{topic}-epochs"), java.admin(broker.bootstrap_servers)
    producer.initTransactions()
    epochs = []
    for _ in range(3):
        producer.beginTransaction()
        send(java, producer, topic, "x")
        producer.flush()
        name = f"{topic}-epochs"
        found = java.get(admin.describeTransactions([name]).all())[name]
        assert found.state().toString() == "Ongoing"
        assert [str(tp) for tp in found.topicPartitions()] == [f"{topic}-0"]
        epochs.append(found.producerEpoch())
        producer.commitTransaction()
    options = java.kafka.clients.admin.ListTransactionsOptions()
    bumps = java.kafka.common.utils.AppInfoParser.getVersion().startswith("4.")
    assert epochs == ([0, 1, 2] if bumps else [0, 0, 0])
    if bumps:
        for pattern, expected in ((f"{topic}.*", [f"{topic}-epochs"]), ("nothing", [])):
            options.filterOnTransactionalIdPattern(pattern)
            listed = java.get(admin.listTransactions(options).all())
            assert [one.transactionalId() for one in java.list(listed)] == expected
        options.filterOnTransactionalIdPattern("(")
        refused = error_of(lambda: java.get(admin.listTransactions(options).all()))
        assert refused == "InvalidRegularExpression"
    admin.close()


@pytest.mark.parametrize("by", ["init", "offsets", "commit", "abort"])
def test_a_broker_that_is_gone_is_waited_for_as_long_as_the_client_says(java, by):
    with kdirect.Broker() as broker:
        producer = java.producer(
            broker.bootstrap_servers, transactional_id="x", max_block_ms=1000, linger_ms=0,
            request_timeout_ms=500, delivery_timeout_ms=1000,
        )  # fmt: skip
        if by != "init":
            with kdirect.connect(broker.bootstrap_servers) as session:
                session.admin.create_topic("t", 1)
            producer.initTransactions()
            producer.beginTransaction()
            java.get(producer.send(java.record("t", 0, None, "v")))
    offsets = {java.partition("t", 0): java.kafka.clients.consumer.OffsetAndMetadata(0)}
    group = java.kafka.clients.consumer.ConsumerGroupMetadata("g")
    calls = {
        "init": producer.initTransactions,
        "offsets": lambda: producer.sendOffsetsToTransaction(offsets, group),
        "commit": producer.commitTransaction,
        "abort": producer.abortTransaction,
    }
    assert error_of(calls[by]) == "TimeoutException"
    producer.close(java.milliseconds(0))
