"""Ranges of topics as blocks of columns: against real brokers, and against what was written."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import kdirect
from kdirect.client.session import Session
from kdirect.errors import BadValueError, ConfigError
from kdirect.format.bad_values import DropReason
from kdirect.format.fixed_layout import FixedLayout
from kdirect.model import TopicPartition
from kdirect.state.expressions import column, literal
from kdirect.state.plan import Input
from kdirect.state.source import Block, TopicSource

LAYOUT = FixedLayout.of("key:int64", "kind:int32", "price:float64", "time:int64", size=40)
NOW_US = 1_700_000_000_000_000
FORMATS = ("fixed", "json", "arrow")
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
TOPIC = "events"


@pytest.fixture(params=["shm", "tcp"])
def session(request: pytest.FixtureRequest, broker_process: Any) -> Iterator[Session]:
    process = broker_process()
    with kdirect.connect(
        {"bootstrap.servers": process.bootstrap_servers, "transport": request.param}
    ) as opened:
        yield opened


@pytest.fixture
def over_shm(broker_process: Any) -> Iterator[Session]:
    with kdirect.connect(broker_process().bootstrap_servers) as opened:
        yield opened


def events(count: int, seed: int = 1) -> Any:
    rng = np.random.default_rng(seed)
    rows = np.zeros(count, LAYOUT.dtype())
    rows["key"] = rng.integers(-5, 50, count)
    rows["kind"] = rng.integers(0, 3, count)
    rows["price"] = rng.random(count)
    rows["time"] = NOW_US // 1000 + np.arange(count) - rng.integers(0, 30, count)
    return rows


def values_of(rows: Any, value_format: str) -> list[bytes]:
    if value_format == "fixed":
        return [row.tobytes() for row in rows]
    names = [field.name for field in LAYOUT.fields]
    dicts = [{name: row[name].item() for name in names} for row in rows]
    if value_format == "json":
        return [json.dumps(row).encode() for row in dicts]
    out = []
    for start in range(0, len(dicts), 7):
        sink = io.BytesIO()
        batch = pa.RecordBatch.from_pylist(dicts[start : start + 7], LAYOUT.schema())
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        out.append(sink.getvalue())
    return out


def write(
    session: Session, values: list[bytes | None], *, partitions: int = 1, **settings: Any
) -> None:
    """Value i goes to partition i mod `partitions`."""
    session.admin.create_topic(TOPIC, partitions)
    with session.producer(batch_bytes=4096, **settings) as producer:
        for start in range(0, len(values), 1500):
            part = values[start : start + 1500]
            to = [(start + i) % partitions for i in range(len(part))]
            columns = [pa.array(part, pa.binary()), pa.array(to, pa.int32())]
            producer.send_arrow(
                pa.RecordBatch.from_arrays(columns, names=["value", "partition"]), TOPIC
            )
        producer.flush()


def input_of(value_format: str, **settings: Any) -> Input:
    settings = {"time": "time", "time_unit": "ms", **settings}
    if value_format == "fixed":
        return Input(topic=TOPIC, value_format="fixed", layout=LAYOUT, **settings)
    return Input(topic=TOPIC, value_format=value_format, schema=LAYOUT.schema(), **settings)


def read(
    session: Session, given: Input, partition: int = 0, start: int = 0, stop: int | None = None,
    columns: tuple[str, ...] = ("key", "price"), **settings: Any,
) -> tuple[list[Block], TopicSource]:  # fmt: skip
    tp = TopicPartition(TOPIC, partition)
    if stop is None:
        stop = session.latest_offsets([tp])[tp]
    with TopicSource(session, given, tp, start, stop, columns=columns, **settings) as source:
        blocks = list(source.blocks())
    assert source.next_offset == stop
    for block in blocks:
        assert set(block.columns) == set(columns)
        assert {len(c) for c in block.columns.values()} | {len(block.offsets)} == {block.rows}
        if block.rows and block.time_us is not None:
            bounds = (block.time_us.min(), block.time_us.max())
            assert (block.min_time_us, block.max_time_us) == bounds
    return blocks, source


def joined(blocks: list[Block], name: str) -> np.ndarray:
    if name in ("offsets", "time_us"):
        return np.concatenate([getattr(block, name) for block in blocks])
    return np.concatenate([block.columns[name].to_numpy() for block in blocks])


def clock(blocks: list[Block]) -> int | None:
    return max((b.clock_us for b in blocks if b.clock_us is not None), default=None)


@pytest.mark.parametrize("value_format", FORMATS)
def test_rows_are_what_was_written(session: Session, value_format: str) -> None:
    rows = events(4000)
    write(session, values_of(rows, value_format), partitions=2)
    given = input_of(value_format, where=column("kind").equals(0) & (column("price") < 0.75))
    for partition in (0, 1):
        if value_format == "arrow":
            own = np.concatenate([rows[s : s + 7] for s in range(7 * partition, len(rows), 14)])
        else:
            own = rows[partition::2]
        kept = own[(own["kind"] == 0) & (own["price"] < 0.75)]
        blocks, source = read(session, given, partition, block_rows=256)
        assert source.transport == session.settings["transport"]
        assert max(block.rows for block in blocks) <= 256 and len(blocks) > 2
        assert np.array_equal(joined(blocks, "key"), kept["key"])
        assert np.array_equal(joined(blocks, "price"), kept["price"])
        assert np.array_equal(joined(blocks, "time_us"), kept["time"] * 1000)
        assert clock(blocks) == int(own["time"].max()) * 1000
        assert source.dropped.total == 0
        assert sum(block.input_bytes for block in blocks) > 0
        moved = source.statistics()
        assert (moved.get("reads", 0) > 0) == (session.settings["transport"] == "shm")


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("value_format", FORMATS)
def test_compressed_batches_and_parts_of_a_range(
    over_shm: Session, value_format: str, codec: str
) -> None:
    rows = events(900)
    values = values_of(rows, value_format)
    write(over_shm, values, compression_type=codec)
    per_value = 7 if value_format == "arrow" else 1
    for start, stop in ((0, len(values)), (13, 57), (100, 101), (50, 50)):
        blocks, _ = read(over_shm, input_of(value_format), start=start, stop=stop)
        part = rows[start * per_value : stop * per_value]
        keys = joined(blocks, "key") if blocks else np.array([])
        assert np.array_equal(keys, part["key"])
        if len(part):
            offsets = np.repeat(np.arange(start, stop), per_value)[: len(part)]
            assert np.array_equal(joined(blocks, "offsets"), offsets)
            assert blocks[-1].next_offset == stop


BAD = {
    "fixed": (b"short", DropReason.WRONG_SIZE, "", "the value has 5 bytes, the layout 40"),
    "json": (b'{"key":"x"}', DropReason.NOT_DECODED, "key", "field key: it is no int64"),
    "arrow": (b"junk", DropReason.NOT_DECODED, "", "not one Arrow stream, nor"),
}


@pytest.mark.parametrize("value_format", FORMATS)
def test_bad_rows_are_dropped_and_counted(over_shm: Session, value_format: str) -> None:
    rows = events(70)
    values: list[bytes | None] = list(values_of(rows, value_format))
    bad, reason, field, _ = BAD[value_format]
    values[3:3] = [bad, None, bad]
    write(over_shm, values)
    blocks, source = read(over_shm, input_of(value_format))
    assert np.array_equal(joined(blocks, "key"), rows["key"])
    assert source.dropped.counts == {reason: 2, DropReason.NULL_VALUE: 1}
    assert [(row.offset, row.field) for row in source.dropped.samples] == [(3, field), (5, field)]


@pytest.mark.parametrize("value_format", FORMATS)
def test_failfast_names_the_row(session: Session, value_format: str) -> None:
    values: list[bytes | None] = list(values_of(events(70), value_format))
    bad, _, _, says = BAD[value_format]
    values[3:3] = [None, bad, bad]
    write(session, [v for v in values for _ in range(2)], partitions=2)
    with pytest.raises(BadValueError, match=says) as caught:
        read(session, input_of(value_format, mode="FAILFAST"), partition=1)
    assert caught.value.topic_partition == TopicPartition(TOPIC, 1)
    assert caught.value.offset == 4
    assert "events-1 offset 4" in str(caught.value)
    assert "mode=PERMISSIVE" in caught.value.hint
    # Null values alone are no errors.
    blocks, source = read(session, input_of(value_format, mode="FAILFAST"), partition=1, stop=4)
    assert source.dropped.counts == {DropReason.NULL_VALUE: 1}
    assert blocks[0].rows >= 3


@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize("tested", [False, True])
def test_event_times_that_are_not_acceptable(
    over_shm: Session, value_format: str, tested: bool
) -> None:
    rows = events(40)
    latest = NOW_US + 60_000_000
    rows["kind"] = 0
    rows["time"][[5, 6]] = (-1, -(2**63))
    rows["time"][[7, 8]] = (latest // 1000 + 1, 2**63 - 1)
    rows["time"][9] = latest // 1000
    # What `where` drops is judged too, and moves the clock.
    rows["time"][10], rows["kind"][10] = 2**62, 1
    rows["time"][11], rows["kind"][11] = latest // 1000 - 1, 1
    rows["time"][9] -= 5
    write(over_shm, values_of(rows, value_format))
    # The decoder makes the one test itself, the other one it cannot.
    where = column("kind").equals(0) if tested else (column("kind") * 2).equals(0)
    given = input_of(value_format, where=where)
    blocks, source = read(over_shm, given, latest_us=latest)
    kept = np.delete(rows, [5, 6, 7, 8, 10, 11])
    assert np.array_equal(joined(blocks, "key"), kept["key"])
    assert clock(blocks) == latest - 1000
    counts = {DropReason.BEFORE_1970: 2, DropReason.TOO_FAR_AHEAD: 3}
    assert source.dropped.counts == counts
    per_value = 7 if value_format == "arrow" else 1
    bad = [n // per_value for n in (5, 6, 7, 8, 10)]
    assert [(row.offset, row.field) for row in source.dropped.samples] == [(n, "time") for n in bad]
    with pytest.raises(BadValueError, match=f"offset {bad[0]}: field time: .* 1970"):
        read(over_shm, input_of(value_format, where=where, mode="FAILFAST"), latest_us=latest)


def test_failfast_names_the_first_row_whatever_is_wrong_with_it(over_shm: Session) -> None:
    """A value that did not decode was named before an event time at a lower offset."""
    good, early = b'{"key":1,"time":5}', b'{"key":1,"time":-5}'
    write(over_shm, [good, early, good, b"{", early])
    with pytest.raises(BadValueError, match="offset 1: field time"):
        read(over_shm, input_of("json", mode="FAILFAST"), columns=("key",))
    _, source = read(over_shm, input_of("json"), columns=("key",))
    assert [row.offset for row in source.dropped.samples] == [1, 3, 4]


def test_a_null_event_time_is_counted(over_shm: Session) -> None:
    write(over_shm, [b'{"key":1,"time":5}', b'{"key":2}', b'{"key":3,"time":null}'])
    blocks, source = read(over_shm, input_of("json"), columns=("key",))
    assert joined(blocks, "key").tolist() == [1]
    assert source.dropped.counts == {DropReason.NULL_TIME: 2}
    # Without an event time nobody asks for it.
    blocks, source = read(over_shm, input_of("json", time=None), columns=("key",))
    assert joined(blocks, "key").tolist() == [1, 2, 3] and blocks[0].time_us is None
    assert source.dropped.total == 0 and blocks[0].clock_us is None


def test_a_condition_is_the_same_however_it_is_made(over_shm: Session) -> None:
    """What the decoder tests itself, and what pyarrow evaluates, against numpy."""
    rows = events(3000)
    write(over_shm, values_of(rows, "fixed"))
    k, p, t = rows["key"], rows["price"], rows["time"]
    middle = int(np.median(t))
    conditions = [
        (column("key") > 10, k > 10),
        (literal(10) > column("key"), k < 10),
        (literal(10) <= column("key"), k >= 10),
        (column("key").differs(3) & (column("price") > 0.5), (k != 3) & (p > 0.5)),
        ((column("key") < 0) | (column("time") >= middle), (k < 0) | (t >= middle)),
        (~(column("key") < 7) & (column("time") < middle), (k >= 7) & (t < middle)),
        ((column("key") < 7) & column("key").is_null(), k < -(2**40)),
        (column("key") > 1.5, k > 1.5),
        (column("key") > 2**40, k > 2**40),
        (column("kind") < 2**40, k == k),
        ((column("key") + column("kind")).equals(4), k + rows["kind"] == 4),
    ]
    for where, mask in conditions:
        blocks, _ = read(over_shm, input_of("fixed", where=where))
        assert np.array_equal(joined(blocks, "price"), p[mask]), where
        assert np.array_equal(joined(blocks, "offsets"), np.flatnonzero(mask)), where


def test_blocks_may_be_left_in_the_midst(over_shm: Session) -> None:
    rows = events(5000)
    write(over_shm, values_of(rows, "fixed"))
    tp = TopicPartition(TOPIC, 0)
    given = input_of("fixed")
    source = TopicSource(over_shm, given, tp, 0, 5000, columns=("key",), block_rows=300)
    first = next(source.blocks())
    kept = first.columns["key"].to_numpy()
    source.close()
    assert source.next_offset == first.next_offset == first.rows <= 300
    # The next source goes on there, over the same grant, and disturbs nobody's columns.
    blocks, _ = read(over_shm, given, start=first.next_offset)
    keys = np.concatenate([kept, joined(blocks, "key")])
    assert np.array_equal(keys, rows["key"])


def test_the_next_source_of_a_partition_asks_the_broker_nothing(over_shm: Session) -> None:
    write(over_shm, values_of(events(600), "fixed"))
    before, _ = read(over_shm, input_of("fixed"), stop=300)
    parked = over_shm.parked
    assert len(parked._parked) == 1
    place = parked._parked[0]
    after, _ = read(over_shm, input_of("fixed"), start=300, stop=600)
    now = parked._parked[0]
    assert len(parked._parked) == 1 and now.paths is place.paths and now.cursor is place.cursor
    assert sum(block.rows for block in (*before, *after)) == 600


def test_a_batch_larger_than_a_block_is_cut(over_shm: Session) -> None:
    rows = events(2000)
    session = over_shm
    session.admin.create_topic(TOPIC, 1)
    with session.producer(batch_bytes=1 << 20) as producer:
        producer.send_arrow(
            pa.RecordBatch.from_arrays([LAYOUT.values(rows)], names=["value"]), TOPIC
        )
    blocks, _ = read(session, input_of("fixed"), block_rows=700)
    assert [block.rows for block in blocks] == [700, 700, 600]
    assert [block.next_offset for block in blocks] == [700, 1400, 2000]
    assert np.array_equal(joined(blocks, "key"), rows["key"])
    assert [block.input_bytes > 0 for block in blocks] == [True, False, False]
    # Whoever stops after the first piece goes on with the second.
    tp = TopicPartition(TOPIC, 0)
    with TopicSource(
        session, input_of("fixed"), tp, 0, 2000, columns=("key",), block_rows=700
    ) as source:
        next(source.blocks())
        assert source.next_offset == 700
    blocks, _ = read(session, input_of("fixed"), start=700, block_rows=700)
    assert np.array_equal(joined(blocks, "key"), rows["key"][700:])


def test_falling_to_tcp_is_said(broker_process: Any, caplog: pytest.LogCaptureFixture) -> None:
    process = broker_process(rdma_consume="false")
    with kdirect.connect({"bootstrap.servers": process.bootstrap_servers}) as session:
        write(session, values_of(events(10), "fixed"))
        with caplog.at_level(logging.WARNING, "kdirect.state"):
            for _ in range(2):
                _, source = read(session, input_of("fixed"))
                assert source.transport == "tcp"
    told = [r.getMessage() for r in caplog.records if r.name == "kdirect.state"]
    assert len(told) == 1 and told[0].startswith("events-0 is read over TCP, not one-sidedly: ")


def test_what_cannot_be_read_is_named(broker: Any) -> None:
    with kdirect.connect(broker.bootstrap_servers) as session:
        given = input_of("fixed")
        with pytest.raises(ConfigError, match="there is no column nokey"):
            TopicSource(session, given, TopicPartition(TOPIC, 0), 0, 1, columns=("nokey",))
        with pytest.raises(ConfigError, match="reads the topic events, not other-0"):
            TopicSource(session, given, TopicPartition("other", 0), 0, 1, columns=("key",))


@pytest.mark.parametrize("block_rows", [100, 150, 250, 1000])
def test_a_block_is_full_before_the_last_batch_of_a_sealed_file(
    session: Session, block_rows: int
) -> None:
    """A batch that does not fit any more and ends a file is the first of the next block."""
    rows = events(6000)
    session.admin.create_topic(TOPIC, 1, configs={"segment.bytes": 64 << 10})
    with session.producer() as producer:
        for start in range(0, len(rows), 100):
            values = LAYOUT.values(np.ascontiguousarray(rows[start : start + 100]))
            producer.send_arrow(pa.RecordBatch.from_arrays([values], names=["value"]), TOPIC)
            producer.flush()
    for start in (0, 50, 3333):
        blocks, _ = read(session, input_of("fixed"), start=start, block_rows=block_rows)
        assert np.array_equal(joined(blocks, "key"), rows["key"][start:])
