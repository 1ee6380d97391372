"""One Spark session and one broker process for all tests of this room; topics of their own for each
test."""

from __future__ import annotations

import gc
import itertools
import os
import re
import stat
import time
from collections import Counter

import pytest

from tests.support import BrokerProcess

_numbers = itertools.count()


def _kind(descriptor: int) -> str:
    """What a descriptor of this process is of, without its number; "" when it is closed by now."""
    try:
        return re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{descriptor}"))
    except OSError:
        return ""


@pytest.fixture(scope="session")
def spark(tmp_path_factory):
    """local[2], quiet, as `kdirect_spark.session_builder` makes it."""
    from kdirect_spark import session_builder

    # py4j's server for foreachBatch asks `select`, which knows no descriptor above 1023, and its
    # thread ends without a word.  A new descriptor is the lowest that is free, so few may be open.
    gc.collect()
    kinds = Counter(_kind(int(name)) for name in os.listdir("/proc/self/fd"))
    assert kinds.total() < 500, (
        f"the tests before these keep too many descriptors: {kinds.most_common(12)}"
    )
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = session_builder("kdirect tests", "local[2]")
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.memory": "2g",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
        "spark.log.level": "ERROR",
    }.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    yield session
    session.stop()


@pytest.fixture(scope="session")
def said(spark):
    """What Spark's processes have written to their standard error, which is that of this process,
    since this test began."""
    where = f"/proc/{spark.sparkContext._gateway.proc.pid}/fd/2"
    if not stat.S_ISREG(os.stat(where).st_mode):
        pytest.skip("standard error is not captured (pytest -s)")

    def read() -> str:
        with open(where, errors="replace") as f:
            return f.read()

    return read


@pytest.fixture(scope="session")
def broker(tmp_path_factory):
    process = BrokerProcess(
        tmp_path_factory.mktemp("broker") / "log",
        {
            "log.retention.check.interval.ms": 500,
            "log.cleaner.backoff.ms": 200,
            "transaction.abort.timed.out.transaction.cleanup.interval.ms": 200,
        },
    ).start()
    yield process
    process.stop()


@pytest.fixture
def own_broker(tmp_path):
    """A broker that the test may kill."""
    process = BrokerProcess(tmp_path / "own-log").start()
    yield process
    if process.process is not None:
        process.stop()


class Topics:
    """Makes and fills topics with Kafka's own client library (confluent-kafka), which knows nothing
    of kdirect."""

    def __init__(self, address: str) -> None:
        from confluent_kafka.admin import AdminClient

        self.address = address
        self.admin = AdminClient({"bootstrap.servers": address, "log_level": 0})

    def create(self, partitions: int = 1, prefix: str = "t", **config: object) -> str:
        name = f"{prefix}-{next(_numbers)}"
        self.create_named(name, partitions, **config)
        return name

    def create_named(self, name: str, partitions: int = 1, **config: object) -> None:
        from confluent_kafka.admin import NewTopic

        topic = NewTopic(
            name, partitions, 1, config={k.replace("_", "."): str(v) for k, v in config.items()}
        )
        for future in self.admin.create_topics([topic]).values():
            future.result(20)

    def add_partitions(self, name: str, total: int) -> None:
        from confluent_kafka.admin import NewPartitions

        for future in self.admin.create_partitions([NewPartitions(name, total)]).values():
            future.result(20)

    def delete(self, name: str) -> None:
        for future in self.admin.delete_topics([name]).values():
            future.result(20)

    def delete_records(self, name: str, partition: int, before: int) -> None:
        from confluent_kafka import TopicPartition

        for future in self.admin.delete_records([TopicPartition(name, partition, before)]).values():
            future.result(20)

    def fill(
        self,
        name: str,
        values,
        partition: int = 0,
        *,
        key=None,
        headers=None,
        timestamp_ms: int | None = None,
        **settings,
    ) -> None:
        """Produce `values` to one partition; `key` and `timestamp_ms` may be functions of the
        index."""
        from confluent_kafka import Producer

        errors = []
        producer = Producer(
            {
                "bootstrap.servers": self.address,
                "linger.ms": 5,
                "enable.idempotence": False,
                "log_level": 0,
                **settings,
            }
        )
        for i, value in enumerate(values):
            stamp = (
                {}
                if timestamp_ms is None
                else {"timestamp": timestamp_ms(i) if callable(timestamp_ms) else timestamp_ms}
            )
            while True:
                try:
                    producer.produce(
                        name,
                        value,
                        key(i) if callable(key) else key,
                        partition,
                        headers=headers,
                        on_delivery=lambda e, _: errors.append(e) if e else None,
                        **stamp,
                    )
                    break
                except BufferError:
                    producer.poll(0.1)
        assert producer.flush(30) == 0
        assert not errors, errors[:3]

    def transact(self, name: str, transactions) -> None:
        """Write transactions of one record each to partition 0: (value, is it committed?)."""
        from confluent_kafka import Producer

        producer = Producer({
            "bootstrap.servers": self.address, "transactional.id": name, "log_level": 0,
        })  # fmt: skip
        producer.init_transactions(30)
        for value, commits in transactions:
            producer.begin_transaction()
            producer.produce(name, value, partition=0)
            if commits:
                producer.commit_transaction(30)
            else:
                producer.flush(30)
                producer.abort_transaction(30)

    def consume(self, name: str, partitions: int) -> list[tuple]:
        """(partition, offset, key, value, timestamp_ms, headers) of everything in the topic, by
        confluent-kafka."""
        from confluent_kafka import Consumer, TopicPartition

        consumer = Consumer(
            {
                "bootstrap.servers": self.address,
                "group.id": "none",
                "log_level": 0,
                "enable.auto.commit": False,
                "enable.partition.eof": True,
            }
        )
        consumer.assign([TopicPartition(name, p, 0) for p in range(partitions)])
        out, ends, deadline = [], 0, time.monotonic() + 30
        while ends < partitions:
            assert time.monotonic() < deadline, f"only {len(out)} records came"
            for message in consumer.consume(1000, 0.5):
                if message.error():
                    ends += 1
                else:
                    out.append(
                        (
                            message.partition(),
                            message.offset(),
                            message.key(),
                            message.value(),
                            message.timestamp()[1],
                            message.headers(),
                        )
                    )
        consumer.close()
        return sorted(out, key=lambda r: r[:2])


@pytest.fixture(scope="session")
def topics_of():
    """Topics(address), for brokers of a test's own."""
    return Topics


@pytest.fixture
def topics(broker):
    return Topics(broker.bootstrap_servers)


@pytest.fixture
def read(spark, broker):
    """A batch DataFrame of a topic, with more options by name (a double underscore stands for a
    dot)."""

    def build(topic=None, *, address=broker.bootstrap_servers, **options):
        reader = spark.read.format("kdirect").option("kafka.bootstrap.servers", address)
        if topic is not None:
            reader = reader.option("subscribe", topic)
        return reader.options(**{k.replace("__", "."): v for k, v in options.items()}).load()

    return build


@pytest.fixture
def read_stream(spark, broker):
    def build(topic=None, *, address=broker.bootstrap_servers, **options):
        reader = spark.readStream.format("kdirect").option("kafka.bootstrap.servers", address)
        if topic is not None:
            reader = reader.option("subscribe", topic)
        return reader.options(**{k.replace("__", "."): v for k, v in options.items()}).load()

    return build


def text(e: BaseException) -> str:
    """What a user sees of an error in Spark."""
    return str(e)


@pytest.fixture
def refused():
    """A context manager: the block must fail with an error of Spark that contains all the words."""
    import contextlib

    @contextlib.contextmanager
    def check(*words: str):
        with pytest.raises(Exception) as caught:
            yield
        for word in words:
            assert word in text(caught.value), f"{word!r} is not in:\n{text(caught.value)[-3000:]}"

    return check
