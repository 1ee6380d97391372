"""Transactions of a stock producer, read by a stream and by a batch: the scenarios of the two
suites of Spark's Kafka connector (KafkaMicroBatchSourceSuite, KafkaRelationSuite), for both
isolation levels."""

from __future__ import annotations

import pytest
from confluent_kafka import Producer

pytestmark = pytest.mark.spark


@pytest.fixture
def transactions(broker):
    """A function: in one transaction of a producer of its own, write numbers to partition 0 of a
    topic; then commit, abort, or leave it open and return what ends it."""
    made = []

    def write(topic, first, last, end):
        if not made:
            made.append(Producer({
                "bootstrap.servers": broker.bootstrap_servers, "log_level": 0,
                "transactional.id": f"of-{topic}",
            }))  # fmt: skip
            made[0].init_transactions(30)
        producer = made[0]
        producer.begin_transaction()
        for number in range(first, last + 1):
            producer.produce(topic, b"%d" % number, partition=0)
        assert producer.flush(30) == 0
        ends = {"commit": producer.commit_transaction, "abort": producer.abort_transaction}
        if end == "open":
            return ends["commit"]
        ends[end](30)
        return None

    return write


class Stream:
    """A query with three offsets a micro-batch, which runs whenever somebody asks for what is new:
    so nothing is read in the middle of a step."""

    def __init__(self, read_stream, topic, checkpoint, level):
        self._batches = []
        self._writer = (
            read_stream(
                topic, startingOffsets="earliest", maxOffsetsPerTrigger="3",
                kafka__isolation__level=level,
            )
            .selectExpr("CAST(CAST(value AS STRING) AS INT) AS number", "offset")
            .writeStream.foreachBatch(self._keep)
            .option("checkpointLocation", checkpoint).trigger(availableNow=True)
        )  # fmt: skip

    def _keep(self, frame, _):
        self._batches.append([row.number for row in frame.orderBy("offset").collect()])

    def new(self):
        """The micro-batches since the last call, as lists of numbers."""
        self._batches.clear()
        assert self._writer.start().awaitTermination(60)
        return list(self._batches)


@pytest.fixture
def stream(read_stream, topics, tmp_path):
    return lambda topic, level: Stream(read_stream, topic, str(tmp_path / "c"), level)


def test_a_stream_reads_committed_records(stream, topics, transactions):
    topic = topics.create(1)
    query = stream(topic, "read_committed")
    assert query.new() == [[]], "Spark runs the first micro-batch of a query, whatever there is"
    commit = transactions(topic, 1, 5, "open")
    assert query.new() == [], "nothing is committed"
    commit(30)
    # Offsets 0, 1, 2, then 3, 4, and 5, which is the marker.
    assert query.new() == [[1, 2, 3], [4, 5]]
    # A whole micro-batch without a record, twice: offsets 6 to 11.
    transactions(topic, 6, 10, "abort")
    assert query.new() == [[], []]
    transactions(topic, 11, 15, "commit")
    assert query.new() == [[11, 12, 13], [14, 15]]
    # Offsets 18 to 24: a micro-batch that begins with a record and ends with an aborted one, one
    # with a gap in its middle, and one that begins with a marker.
    transactions(topic, 16, 16, "commit")
    transactions(topic, 17, 17, "abort")
    transactions(topic, 18, 18, "commit")
    transactions(topic, 19, 19, "abort")
    assert query.new() == [[16], [18], []]


def test_a_stream_reads_uncommitted_records_too(stream, topics, transactions):
    topic = topics.create(1)
    query = stream(topic, "read_uncommitted")
    commit = transactions(topic, 1, 5, "open")
    assert query.new() == [[1, 2, 3], [4, 5]]
    commit(30)
    assert query.new() == [[]], "the marker"
    transactions(topic, 6, 10, "abort")
    assert query.new() == [[6, 7, 8], [9, 10]]
    transactions(topic, 11, 15, "commit")
    assert query.new() == [[11, 12, 13], [14, 15]]


@pytest.mark.parametrize("level", ["read_committed", "read_uncommitted"])
def test_a_batch_reads_what_is_committed(read, topics, transactions, level):
    topic = topics.create(2)

    def numbers(**ends):
        frame = read(topic, kafka__isolation__level=level, **ends)
        return sorted(int(bytes(row.value)) for row in frame.select("value").collect())

    committed = level == "read_committed"
    transactions(topic, 1, 5, "commit")
    assert numbers() == [1, 2, 3, 4, 5]
    transactions(topic, 6, 10, "abort")
    aborted = [] if committed else [6, 7, 8, 9, 10]
    assert numbers() == [1, 2, 3, 4, 5, *aborted]
    transactions(topic, 11, 15, "commit")
    assert numbers() == [1, 2, 3, 4, 5, *aborted, 11, 12, 13, 14, 15]
    # Both ends within what was aborted.
    within = {"startingOffsets": f'{{"{topic}":{{"0":8,"1":-2}}}}',
              "endingOffsets": f'{{"{topic}":{{"0":10,"1":-1}}}}'}  # fmt: skip
    assert numbers(**within) == aborted[2:4]
    commit = transactions(topic, 16, 20, "open")
    last = [] if committed else [16, 17, 18, 19, 20]
    assert numbers() == [1, 2, 3, 4, 5, *aborted, 11, 12, 13, 14, 15, *last]
    commit(30)
