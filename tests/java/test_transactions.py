"""What Kafka's own TransactionsTest asks of brokers, with Java's producer and consumer: the newest
client speaks the second protocol of KIP-890, the other one the first."""

from __future__ import annotations

import time
import uuid

import pytest
from py4j.protocol import Py4JJavaError

import kdirect
from tests.support import wait_until

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
        return values_of(java, broker.bootstrap_servers, topic, isolation, **settings)

    return all_of


def values_of(java, servers, topic, isolation="read_committed", count=2, **settings):
    """The values in the first `count` partitions of a topic, in order."""
    consumer = java.consumer(
        servers, isolation_level=isolation, enable_auto_commit="false", **settings
    )
    partitions = [java.partition(topic, i) for i in range(count)]
    consumer.assign(partitions)
    ends = consumer.endOffsets(partitions)
    values, deadline = [], time.monotonic() + 20
    while any(consumer.position(tp) < ends[tp] for tp in partitions):
        assert time.monotonic() < deadline, values
        values += [record.value() for record in java.poll(consumer)]
    consumer.close()
    return sorted(values)


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


def test_nothing_beyond_an_undecided_record_is_read(java, broker, topic, make, read):
    """Neither by a poll, nor as the end, nor by its time."""
    undecided, other = make(f"{topic}-undecided"), make(f"{topic}-other")
    early, late = 1_700_000_000_000, 1_700_000_001_000
    tp = java.partition(topic, 0)

    def sent(producer, when, value):
        record = java.kafka.clients.producer.ProducerRecord(topic, 0, when, None, value)
        return java.get(producer.send(record)).offset()

    for producer in (undecided, other):
        producer.initTransactions()
        producer.beginTransaction()
    sent(other, early, "decided")
    other.commitTransaction()
    stable = sent(undecided, late, "undecided")
    other.beginTransaction()
    sent(other, late, "behind it")
    other.commitTransaction()
    consumer = java.consumer(broker.bootstrap_servers, isolation_level="read_committed")
    consumer.assign([tp])
    consumer.seekToEnd([tp])
    assert (consumer.position(tp), consumer.endOffsets([tp])[tp]) == (stable, stable)
    found = consumer.offsetsForTimes({tp: early})[tp]
    assert (found.offset(), found.timestamp()) == (0, early)
    assert consumer.offsetsForTimes({tp: late})[tp] is None
    consumer.seekToBeginning([tp])
    seen = [record.value() for _ in range(2) for record in java.poll(consumer)]
    assert seen == ["decided"] == read(topic)
    undecided.abortTransaction()
    assert consumer.offsetsForTimes({tp: late})[tp].offset() == stable
    consumer.close()
    assert read(topic) == ["behind it", "decided"]


def test_many_markers_for_one_broker(java, broker, topic, make):
    count = 50
    with kdirect.connect(broker.bootstrap_servers) as session:
        session.admin.create_topic(f"{topic}-many", count)
    producer = make(f"{topic}-many")
    producer.initTransactions()
    for what in ("aborted", "committed"):
        producer.beginTransaction()
        for i in range(count):
            producer.send(java.record(f"{topic}-many", i, None, f"{what} {i}"))
        producer.flush()
        (producer.commitTransaction if what == "committed" else producer.abortTransaction)()
    assert values_of(java, broker.bootstrap_servers, f"{topic}-many", count=count) == sorted(
        f"committed {i}" for i in range(count)
    )


def test_one_request_at_a_time(java, topic, make, read):
    producer = make("one", max_in_flight_requests_per_connection=1)
    producer.initTransactions()
    for turn in range(6):
        producer.beginTransaction()
        send(java, producer, topic, f"{turn} x", f"{turn} y")
        (producer.commitTransaction if turn % 2 else producer.abortTransaction)()
    assert read(topic) == [f"{turn} {k}" for turn in (1, 3, 5) for k in "xy"]


def test_a_transaction_may_be_empty(java, topic, make, read):
    """Nothing is sent, and each end counts; with the second protocol an abort, too, raises the
    epoch, also one that follows a commit at once."""
    producer = make("empty")
    producer.initTransactions()
    for end in (producer.commitTransaction, producer.abortTransaction, producer.abortTransaction):
        producer.beginTransaction()
        end()
    producer.beginTransaction()
    send(java, producer, topic, "committed 1", "committed 2")
    producer.commitTransaction()
    producer.beginTransaction()
    producer.abortTransaction()
    producer.beginTransaction()
    send(java, producer, topic, "committed 3")
    producer.commitTransaction()
    assert read(topic) == ["committed 1", "committed 2", "committed 3"]


def test_a_transaction_may_have_nothing_but_offsets(java, broker, topic, make):
    """They count with its commit, and for members of the group as soon as it is complete."""
    producer = make("only offsets")
    producer.initTransactions()
    tp = java.partition(topic, 0)
    at = java.kafka.clients.consumer.OffsetAndMetadata
    group = java.kafka.clients.consumer.ConsumerGroupMetadata(topic)
    consumer = java.consumer(broker.bootstrap_servers, group_id=topic)
    seen = []
    for offset, end in ((3, producer.commitTransaction), (7, producer.abortTransaction)):
        producer.beginTransaction()
        producer.sendOffsetsToTransaction({tp: at(offset)}, group)
        end()
        seen.append(consumer.committed({tp})[tp].offset())
    consumer.close()
    assert seen == [3, 3]


def test_after_a_record_that_is_too_large_the_transaction_can_only_be_aborted(
    java, topic, make, read
):
    producer = make("too large", max_request_size=1 << 23)
    producer.initTransactions()
    producer.beginTransaction()
    send(java, producer, topic, "aborted")
    large = java.record(topic, 1, None, "x" * (2 << 20))  # above message.max.bytes
    assert error_of(lambda: java.get(producer.send(large))) == "RecordTooLargeException"
    with pytest.raises(Py4JJavaError):
        producer.commitTransaction()
    producer.abortTransaction()
    producer.beginTransaction()
    send(java, producer, topic, "committed")
    producer.commitTransaction()
    assert read(topic) == ["committed"]


def test_transactions_of_every_codec(java, topic, make, read):
    """One batch of each transaction is compressed: whether it is aborted is not in its records."""
    codecs = ("none", "gzip", "snappy", "lz4", "zstd")
    for codec in codecs:
        producer = make(f"{topic}-{codec}", compression_type=codec, linger_ms=50)
        producer.initTransactions()
        for what in ("aborted", "committed"):
            producer.beginTransaction()
            send(java, producer, topic, *(f"{codec} {what} {i}" for i in range(10)))
            producer.flush()
            (producer.commitTransaction if what == "committed" else producer.abortTransaction)()
    assert read(topic) == sorted(f"{codec} committed {i}" for codec in codecs for i in range(10))
    assert len(read(topic, "read_uncommitted")) == 2 * 10 * len(codecs)


@pytest.mark.parametrize("when", ["in", "after"])
def test_an_administrator_fences_a_producer(java, broker, topic, make, read, when):
    """In its transaction, or after it: it cannot go on, and another one with its id can."""
    name, admin = f"{topic}-{when}", java.admin(broker.bootstrap_servers)
    old = make(name)
    old.initTransactions()
    old.beginTransaction()
    java.get(send(java, old, topic, "first")[0])
    if when == "after":
        old.commitTransaction()
    java.get(admin.fenceProducers([name]).all())
    admin.close()
    if when == "after":
        old.beginTransaction()
    assert error_of(lambda: java.get(send(java, old, topic, "late")[0])) in FENCED
    assert error_of(old.commitTransaction) in FENCED
    new = make(name)
    new.initTransactions()
    new.beginTransaction()
    send(java, new, topic, "second")
    new.commitTransaction()
    assert read(topic) == (["first", "second"] if when == "after" else ["second"])


def epoch_of(java, admin, topic):
    """The epoch of the only producer of a topic's first partition; None without one."""
    tp = java.partition(topic, 0)
    found = list(java.get(admin.describeProducers([tp]).all())[tp].activeProducers())
    assert len(found) <= 1
    return found[0].producerEpoch() if found else None


def test_a_record_that_timed_out_makes_the_epoch_grow(java, broker_process):
    """The broker dies in the transaction; the client aborts it and goes on with a new epoch."""
    process = broker_process(transaction_state_log_num_partitions=2)
    servers = process.bootstrap_servers
    with kdirect.connect(servers) as session:
        session.admin.create_topic("t", 2)
    admin = java.admin(servers)
    producer = java.producer(
        servers, transactional_id="x", linger_ms=0, request_timeout_ms=1000,
        delivery_timeout_ms=1500, reconnect_backoff_max_ms=200,
    )  # fmt: skip
    producer.initTransactions()
    producer.beginTransaction()
    send(java, producer, "t", "first")
    producer.commitTransaction()
    before = epoch_of(java, admin, "t")
    producer.beginTransaction()
    java.get(send(java, producer, "t", "aborted")[0])
    process.kill()
    late = send(java, producer, "t", "late")[0]
    assert error_of(lambda: java.get(late)) == "TimeoutException"
    process.start()
    producer.abortTransaction()
    producer.beginTransaction()
    send(java, producer, "t", "second", "third")
    producer.commitTransaction()
    assert values_of(java, servers, "t") == ["first", "second", "third"]
    assert epoch_of(java, admin, "t") > before
    for client in (producer, admin):
        client.close(java.milliseconds(1000))


def test_a_transactional_id_that_expired_has_to_be_made_again(java):
    with kdirect.Broker(
        transactional_id_expiration_ms=300,
        transaction_remove_expired_transaction_cleanup_interval_ms=50,
    ) as broker:
        with kdirect.connect(broker.bootstrap_servers) as session:
            session.admin.create_topic("t", 2)
        admin = java.admin(broker.bootstrap_servers)
        old = java.producer(broker.bootstrap_servers, transactional_id="x", linger_ms=0)
        old.initTransactions()
        old.beginTransaction()
        send(java, old, "t", "aborted")
        old.abortTransaction()
        wait_until(lambda: not java.list(java.get(admin.listTransactions().all())), "the expiry")
        old.beginTransaction()
        late = send(java, old, "t", "late")[0]
        assert error_of(lambda: java.get(late)) == "InvalidPidMappingException"
        old.close(java.milliseconds(0))
        new = java.producer(broker.bootstrap_servers, transactional_id="x")
        new.initTransactions()
        new.beginTransaction()
        send(java, new, "t", "committed")
        new.commitTransaction()
        assert values_of(java, broker.bootstrap_servers, "t") == ["committed"]
        for client in (new, admin):
            client.close(java.milliseconds(1000))


def test_a_producer_whose_state_expired_goes_on(java):
    with kdirect.Broker(
        producer_id_expiration_ms=300, log_retention_check_interval_ms=100
    ) as broker:
        with kdirect.connect(broker.bootstrap_servers) as session:
            session.admin.create_topic("t", 2)
        admin = java.admin(broker.bootstrap_servers)
        producer = java.producer(broker.bootstrap_servers, transactional_id="x")
        producer.initTransactions()
        for value in ("first", "second"):
            producer.beginTransaction()
            send(java, producer, "t", value)
            producer.commitTransaction()
            wait_until(lambda: epoch_of(java, admin, "t") is None, "the expiry")
        assert values_of(java, broker.bootstrap_servers, "t") == ["first", "second"]
        for client in (producer, admin):
            client.close(java.milliseconds(1000))
