"""How a task of Real-Time Mode reads: what it yields, and how far it says that it came."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from kdirect.errors import ConfigError, ShimError
from kdirect.model import TopicPartition
from kdirect_spark import real_time
from kdirect_spark.datasource import row_schema
from kdirect_spark.real_time import LiveRows, LiveTask, live_partitions, worker_stream
from kdirect_spark.settings import source_settings

pytestmark = pytest.mark.spark

A, B = TopicPartition("a", 0), TopicPartition("b", 2)


def settings_of(address, topic, **options):
    given = {"kafka.bootstrap.servers": address, "subscribe": topic}
    return source_settings(
        given | {k.replace("__", "."): v for k, v in options.items()}, streaming=True
    )


def read(settings, starts, seconds, meanwhile=lambda first: None):
    """(rows as (range, value, next offset), marks as {range: next offset}, time of each row)
    of one task that reads for so long."""
    schema = to_arrow_schema(
        StructType([*row_schema(settings).fields, *real_time.COLUMNS]), timezone="UTC"
    )
    (partition,) = live_partitions(settings, starts, {}, {}, is_empty=False)
    until = int((time.time() + seconds) * 1000)
    partition = real_time.LivePartition(
        partition.plan.replace("0" * real_time.DIGITS, f"{until:0{real_time.DIGITS}d}")
    )
    first = threading.Event()  # a row has come
    thread = threading.Thread(target=meanwhile, args=(first,))
    thread.start()
    rows, marks, at = [], {}, []
    for batch in LiveTask(settings, partition, LiveRows(schema)).batches():
        assert batch.schema.equals(schema)
        for row in batch.to_pylist():
            number, following = row[real_time.RANGE], row[real_time.NEXT]
            if number < 0:
                marks[-1 - number] = following
                assert all(v is None for k, v in row.items() if not k.startswith("__"))
            else:
                rows.append((number, row.get("value", row), following))
                marks[number] = following
                at.append(time.time())
                first.set()
    thread.join()
    return rows, marks, at


def test_a_clock_that_is_set_back_prolongs_no_batch(topics, broker, monkeypatch):
    name = topics.create(1)
    settings = settings_of(broker.bootstrap_servers, name)
    real, began = time.time, time.monotonic()
    clock = SimpleNamespace(**vars(time))
    clock.time = lambda: real() - (3600 if time.monotonic() - began > 0.5 else 0)
    monkeypatch.setattr(real_time, "time", clock)
    read(settings, {TopicPartition(name, 0): 0}, 2)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_records_are_handed_out_as_they_come(topics, broker, transport):
    """From several partitions in turn, with the offset after each; and the task ends in time."""
    name = topics.create(2)
    topics.fill(name, [b"old"], 1)
    sent = {}

    def produce(first):
        assert first.wait(20)
        for i in range(5):
            time.sleep(0.15)
            sent[b"%d" % i] = time.time()
            topics.fill(name, [b"%d" % i], i % 2, **{"linger.ms": 0})

    settings = settings_of(
        broker.bootstrap_servers, name, transport=transport, coalescePartitions="1"
    )
    starts = {TopicPartition(name, 0): 0, TopicPartition(name, 1): 0}
    rows, marks, at = read(settings, starts, 4, produce)
    assert [r for r in rows if r[0] == 0] == [(0, b"0", 1), (0, b"2", 2), (0, b"4", 3)]
    assert [r for r in rows if r[0] == 1] == [(1, b"old", 1), (1, b"1", 2), (1, b"3", 3)]
    assert marks == {0: 3, 1: 3}
    came = {value: when for (_, value, _), when in zip(rows, at)}
    assert came[b"0"] < sent[b"4"]  # and not at the end


def test_records_of_transactions(topics, broker):
    """What is open holds back; what was aborted and the marks of the end are passed over."""
    name = topics.create(1)
    topics.transact(name, [(b"yes", True), (b"no", False), (b"again", True)])
    settings = settings_of(broker.bootstrap_servers, name, kafka__isolation__level="read_committed")
    rows, marks, _ = read(settings, {TopicPartition(name, 0): 0}, 0.6)
    assert [value for _, value, _ in rows] == [b"yes", b"again"]
    assert marks == {0: 6}


def test_values_as_columns(topics, broker):
    """Values that do not decode move the offset on."""
    name = topics.create(1)
    topics.fill(name, [b'{"n":1}', b"{", b'{"n":3}', b"["])
    settings = settings_of(
        broker.bootstrap_servers,
        name,
        valueFormat="json",
        valueSchema="n long",
        valueMode="DROPMALFORMED",
    )
    rows, marks, _ = read(settings, {TopicPartition(name, 0): 0}, 0.4)
    assert [(row["n"], following) for _, row, following in rows] == [(1, 1), (3, 4)]
    assert marks == {0: 4}


def test_what_is_planned():
    settings = settings_of("h:1", "a")
    plan = live_partitions(settings, {A: 5, B: 7}, {"a": "i"}, {A: ("x", "y")}, is_empty=False)
    assert [json.loads(p.plan[len(real_time.BEGIN) : -len(real_time.END)]) for p in plan] == [
        {"until": "0" * 16, "ranges": [["a", 0, 5, "i"]]},
        {"until": "0" * 16, "ranges": [["b", 2, 7, ""]]},
    ]
    assert [p.hosts for p in plan] == ["kdirect.hosts[x,y]", ""]
    joined = settings_of("h:1", "a", coalescePartitions="1")
    (one,) = live_partitions(joined, {A: 5, B: 7}, {}, {}, is_empty=True)
    assert '"until": "0000000000000001"' in one.plan and one.plan.count('[["a"') == 1
    # Where there is no partition a task waits for the end, so that batches do not rush.
    (none,) = live_partitions(settings, {}, {}, {}, is_empty=False)
    assert '"ranges": []' in none.plan
    rows, marks, _ = read(settings, {}, 0.2)
    assert rows == [] and marks == {0: 0}


def test_what_is_refused():
    for name in ("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "minPartitions"):
        with pytest.raises(ConfigError, match=name):
            real_time.check(settings_of("h:1", "a", **{name: "4"}))
    with pytest.raises(ConfigError, match="arrow"):
        real_time.check(settings_of("h:1", "a", valueFormat="arrow", valueSchema="n long"))
    with pytest.raises(ShimError, match="Python worker"):
        worker_stream()


def test_a_batch_reaches_the_jvm_before_the_next_one_is_made():
    done = []

    class Stream:
        def flush(self):
            done.append("flush")

    def batches():
        for i in range(2):
            done.append(i)
            yield pa.record_batch({"i": [i]})

    for _ in real_time.flushed(batches(), Stream()):
        pass
    assert done == [0, "flush", 1, "flush"]
