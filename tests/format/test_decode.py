"""Batches to Arrow: columns, offsets, targets, and what is refused."""

from __future__ import annotations

import gc
import json
import threading

import pyarrow as pa
import pytest
from kafka.record import MemoryRecords

from kdirect import blocks
from kdirect.errors import ConfigError, CorruptBatchError, FormatError, UnsupportedFormatError
from kdirect.format import batch
from kdirect.format.codec import ArrowDecoder, decode_records, encode_records
from kdirect.model import Record

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


def decode(data, **settings) -> list[dict]:
    """All rows, taken in one batch, which must be valid Arrow of the decoder's schema."""
    decoder = ArrowDecoder("t", 0, include_headers=True, **settings)
    consumed = decoder.feed(data)
    assert consumed == len(data)
    taken = decoder.take()
    taken.validate(full=True)
    assert taken.schema == decoder.schema
    return taken.to_pylist()


def offsets(data, **settings) -> list[int]:
    return [row["offset"] for row in decode(data, **settings)]


def plain(row: dict) -> list:
    """A row as `rows.json` has it."""
    text = lambda b: None if b is None else b.decode()  # noqa: E731
    headers = [[h["key"], text(h["value"])] for h in row["headers"] or []]
    return [
        text(row["key"]),
        text(row["value"]),
        headers,
        row["timestamp"].value // 10**6 if hasattr(row["timestamp"], "value") else row["timestamp"],
    ]


def milliseconds(taken: pa.RecordBatch) -> list[int]:
    return [t // 1000 for t in taken["timestamp"].cast(pa.int64()).to_pylist()]


# -- golden ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("writer", ["librdkafka", "kafka-python", "java"])
def test_batches_of_other_libraries(golden, writer, codec):
    rows = json.loads((golden / "rows.json").read_text())
    data = (golden / f"{writer}-{codec}.bin").read_bytes()
    (info,) = batch.iterate_batches(data)
    assert info.compression == codec
    decoder = ArrowDecoder("golden", 3, include_headers=True)
    assert decoder.feed(data) == len(data)
    taken = decoder.take()
    taken.validate(full=True)
    found = [
        plain({**row, "timestamp": ms}) for row, ms in zip(taken.to_pylist(), milliseconds(taken))
    ]
    assert found == rows
    assert taken["offset"].to_pylist() == list(range(40))
    assert taken["headers"].null_count == 30  # no headers: null, as Spark's connector has it
    assert set(taken["topic"].to_pylist()) == {"golden"} and set(
        taken["partition"].to_pylist()
    ) == {3}
    assert set(taken["timestampType"].to_pylist()) == {0}
    records, consumed, next_offset = decode_records(data, "golden", 3)
    assert (consumed, next_offset) == (len(data), 40)
    as_text = [[x if x is None else x.decode() for x in (r.key, r.value)] for r in records]
    assert as_text == [r[:2] for r in rows] and [r.timestamp for r in records] == [
        r[3] for r in rows
    ]
    assert [[[k, None if v is None else v.decode()] for k, v in r.headers] for r in records] == [
        r[2] for r in rows
    ]


def test_log_append_time(golden):
    data = (golden / "java-log-append-time.bin").read_bytes()
    found = decode(data)
    assert [r["offset"] for r in found] == [100, 101, 102, 103, 104]
    assert {r["timestampType"] for r in found} == {1}
    records, _, _ = decode_records(data, "t", 0)
    assert {(r.timestamp, r.timestamp_type) for r in records} == {(1712345678901, 1)}
    taken = ArrowDecoder("t", 0)
    taken.feed(data)
    assert milliseconds(taken.take()) == [1712345678901] * 5


def test_transactional_records_are_read_and_their_marker_is_skipped(golden):
    data = (golden / "java-transactional.bin").read_bytes() + (
        golden / "java-control.bin"
    ).read_bytes()
    decoder = ArrowDecoder("t", 0)
    assert decoder.feed(data) == len(data)
    assert (decoder.rows, decoder.next_offset) == (5, 206)
    assert decode_records(data, "t", 0)[2] == 206


def test_of_a_control_batch_only_frame_and_crc_count(ref):
    for count in (0, 1, 1 << 30):
        data = ref.batch(b"\0" * 5, count, attributes=0x20, last_offset_delta=0)
        assert (ArrowDecoder("t", 0).feed(data), decode_records(data, "t", 0)) == (
            len(data),
            ([], len(data), 1),
        )


def test_what_compaction_leaves(golden):
    data = (golden / "java-compacted.bin").read_bytes()
    assert offsets(data) == [301, 303]
    for start, stop, expected in (
        (302, 400, [303]),
        (300, 302, [301]),
        (304, 306, []),
        (302, 303, []),
    ):
        decoder = ArrowDecoder("t", 0, start_offset=start, stop_offset=stop)
        assert decoder.feed(data) == len(data) and decoder.next_offset == 306
        assert decoder.take()["offset"].to_pylist() == expected
        assert [r.offset for r in decode_records(data, "t", 0, start, stop)[0]] == expected
    empty = (golden / "java-compacted-empty.bin").read_bytes()
    decoder = ArrowDecoder("t", 0)
    assert (decoder.feed(empty), decoder.rows, decoder.next_offset) == (61, 0, 306)


@pytest.mark.parametrize("magic", [0, 1])
def test_old_formats_name_the_remedy(golden, magic):
    data = (golden / f"java-magic{magic}.bin").read_bytes()
    for read in (ArrowDecoder("old", 4).feed, lambda d: decode_records(d, "old", 4)):
        with pytest.raises(
            UnsupportedFormatError, match=rf"old-4 offset 0 has the old magic {magic}.*0\.11"
        ):
            read(data)


def test_kafka_python_reads_ours_and_we_read_its_own(seed):
    rows = [
        (
            None if i % 3 else b"k%d" % i,
            b"v" * (i * 7 % 200),
            [("h", b"1"), ("h", None)][: i % 3],
            1_700_000_000_000 - i * i,
        )
        for i in range(300)
    ]
    for codec in ("none", "gzip"):
        data = encode_records(rows, codec)
        found = MemoryRecords(data).next_batch()
        assert found.validate_crc()
        assert [(r.key, r.value, r.headers, r.timestamp) for r in found] == rows
        assert [
            (r.key, r.value, list(r.headers), r.timestamp) for r in decode_records(data, "t", 0)[0]
        ] == rows


# -- columns ---------------------------------------------------------------------------------------


def test_schema_is_spark_s(ref):
    types = pytest.importorskip("pyspark.sql.types")
    from pyspark.sql.pandas.types import to_arrow_schema

    fields = [
        ("key", types.BinaryType()),
        ("value", types.BinaryType()),
        ("topic", types.StringType()),
        ("partition", types.IntegerType()),
        ("offset", types.LongType()),
        ("timestamp", types.TimestampType()),
        ("timestampType", types.IntegerType()),
    ]
    header = types.StructType(
        [
            types.StructField("key", types.StringType()),
            types.StructField("value", types.BinaryType()),
        ]
    )
    for include, more in ((False, []), (True, [("headers", types.ArrayType(header))])):
        expected = to_arrow_schema(
            types.StructType([types.StructField(n, t) for n, t in fields + more]), timezone="UTC"
        )
        decoder = ArrowDecoder("t", 0, include_headers=include)
        assert decoder.take().schema.equals(expected, check_metadata=True)
        decoder.feed(ref.simple([(b"k", b"v")]))
        assert decoder.take().schema.equals(expected, check_metadata=True)


@pytest.mark.parametrize("first_key", range(5))
@pytest.mark.parametrize("first_null", range(5))
def test_keys_and_nulls_that_begin_late(ref, first_key, first_null):
    """Columns change their form when the first key, or the first null, comes: within a batch and
    between batches."""
    rows = [
        (
            b"key%d" % i if i >= first_key and i % 4 else None,
            None if i >= first_null and i % 3 == 2 else b"v%d" % i,
        )
        for i in range(24)
    ]
    for cut in (1, 3, 7, 24):
        data = b"".join(ref.simple(rows[i : i + cut], base_offset=i) for i in range(0, 24, cut))
        assert [(r["key"], r["value"]) for r in decode(data)] == rows


def test_mixed_timestamp_types(ref):
    data = b"".join(
        ref.simple(
            [(None, b"x")] * 2, base_offset=2 * i, attributes=8 * (i % 3 == 1), max_timestamp=99 + i
        )
        for i in range(7)
    )
    decoder = ArrowDecoder("t", 0)
    decoder.feed(data)
    taken = decoder.take()
    assert taken["timestampType"].to_pylist() == [0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0]
    assert milliseconds(taken)[2:4] == [100, 100]


def test_timestamps_beyond_microseconds_are_clamped(ref):
    low, high = -(2**63), 2**63 - 1
    cases = [
        (high, 0),
        (high, 5),
        (low, 0),
        (low, -5),
        (2**62, 2**62),
        (0, high),
        (0, low),
        (-1, 0),
        (9223372036854775, 0),
        (9223372036854775, 1),
        (0, -1),
    ]
    for base, delta in cases:
        decoder = ArrowDecoder("t", 0)
        decoder.feed(ref.batch(ref.record(0, delta, None, b"x"), 1, base_timestamp=base))
        (found,) = decoder.take()["timestamp"].cast(pa.int64()).to_pylist()
        exact = (base + delta) * 1000
        assert found == (exact if abs(exact) <= high else high if exact > 0 else low), (base, delta)
    decoder.feed(ref.simple([(None, b"x")], base_offset=1, attributes=8, max_timestamp=high))
    assert decoder.take()["timestamp"].cast(pa.int64()).to_pylist() == [high]


def test_header_keys_that_are_not_utf8_are_mended(ref):
    records = ref.record(0, 0, None, b"x", [("é".encode(), b"1")]) + ref.record(
        1, 0, None, b"y", [(b"\xff\xfe", b"2"), (b"ok", None)]
    )
    found = decode(ref.batch(records, 2))
    assert [h["key"] for r in found for h in r["headers"]] == ["é", "\ufffd\ufffd", "ok"]
    assert [h[0] for r in decode_records(ref.batch(records, 2), "t", 0)[0] for h in r.headers] == [
        "é",
        "\ufffd\ufffd",
        "ok",
    ]


def test_headers_are_checked_even_when_nobody_wants_them(ref):
    good = ref.record(0, 0, b"k", b"v", [(b"h", b"1")] * 40)
    decoder = ArrowDecoder("t", 0)
    decoder.feed(ref.batch(good, 1))
    assert decoder.take().to_pylist()[0]["value"] == b"v"
    body = (
        b"\0"
        + ref.varint(0) * 2
        + ref.text(b"k")
        + ref.text(b"v")
        + ref.varint(1)
        + ref.varint(-1)
        + ref.varint(-1)
    )
    for include in (False, True):
        with pytest.raises(CorruptBatchError, match="header"):
            ArrowDecoder("t", 0, include_headers=include).feed(
                ref.batch(ref.varint(len(body)) + body, 1)
            )


def test_values_of_all_sizes(ref, seed):
    sizes = [*range(200), 511, 512, 513, 8191, 8192, 70_000, 1 << 20]
    rows = [(b"k" * (n % 90), bytes([n % 251]) * n) for n in sizes]
    assert [(r["key"], r["value"]) for r in decode(ref.simple(rows))] == rows
    assert [(r["key"], r["value"]) for r in decode(ref.simple([(None, v) for _, v in rows]))] == [
        (None, v) for _, v in rows
    ]
    assert [(r["key"], r["value"]) for r in decode(ref.simple([(v, k) for k, v in rows]))] == [
        (v, k) for k, v in rows
    ]


def test_taken_batches_keep_their_memory(ref):
    """What is taken stays as it is while the decoder works on, and after it is gone; memory that
    nobody holds is used again."""
    decoder = ArrowDecoder("t", 0, target_bytes=1 << 16)
    taken = []
    for i in range(200):
        assert decoder.feed(
            ref.simple([(b"%d" % i, bytes([i % 256]) * 300)] * 40, base_offset=40 * i)
        )
        taken.append(decoder.take())
    del decoder
    for i, found in enumerate(taken):
        found.validate(full=True)
        assert set(found["value"].to_pylist()) == {bytes([i % 256]) * 300} and set(
            found["key"].to_pylist()
        ) == {b"%d" % i}
    held = blocks.statistics()["block_live_bytes"]
    del taken, found
    gc.collect()
    after = blocks.statistics()
    assert after["block_live_bytes"] < held
    assert after["block_retained_bytes"] > 0
    blocks.trim()
    assert blocks.statistics()["block_retained_bytes"] == 0


def test_a_small_batch_does_not_hold_large_memory(ref):
    decoder = ArrowDecoder("t", 0)
    before = blocks.statistics()["block_live_bytes"]
    decoder.feed(
        ref.simple([(b"k", b"x" * 100)])
        + ref.simple([(b"k", b"x" * 3_000_000)], base_offset=1)[:-1]
    )
    taken = decoder.take()
    assert blocks.statistics()["block_live_bytes"] - before < 100_000
    assert taken.num_rows == 1


# -- offsets and targets ---------------------------------------------------------------------------


def test_nothing_outside_the_interval(ref):
    data = b"".join(ref.simple([(None, b"%d" % i)] * 10, base_offset=10 * i) for i in range(5))
    for start in range(0, 52, 3):
        for stop in range(start, 52, 4):
            expected = list(range(start, min(stop, 50)))
            decoder = ArrowDecoder("t", 0, start_offset=start, stop_offset=stop)
            assert decoder.feed(data) == len(data)
            assert decoder.take()["offset"].to_pylist() == expected
            assert decoder.next_offset == max(50, start)
            assert [r.offset for r in decode_records(data, "t", 0, start, stop)[0]] == expected


def test_bytes_fed_twice_give_rows_once(ref):
    data = b"".join(ref.simple([(None, b"x")] * 5, base_offset=5 * i) for i in range(4))
    decoder = ArrowDecoder("t", 0)
    assert decoder.feed(data) == decoder.feed(data) == len(data)
    assert decoder.take()["offset"].to_pylist() == list(range(20))
    assert (decoder.feed(data), decoder.rows) == (len(data), 0)


def test_feed_stops_at_the_target_and_take_begins_anew(ref):
    one = ref.simple([(None, b"x" * 100)] * 10)
    data = b"".join(ref.simple([(None, b"x" * 100)] * 10, base_offset=10 * i) for i in range(20))
    decoder = ArrowDecoder("t", 0, target_rows=25)
    position = decoder.feed(data)
    assert (position, decoder.rows, decoder.full) == (3 * len(one), 30, True)
    assert decoder.feed(data[position:]) == 0
    assert decoder.take().num_rows == 30 and not decoder.full and decoder.rows == 0
    assert decoder.feed(data[position:]) == 3 * len(one)
    decoder = ArrowDecoder("t", 0, target_bytes=5000)
    while position := decoder.feed(data):
        data = data[position:]
    assert decoder.full and 5000 <= decoder.pending_bytes < 5000 + 2000


def test_pending_bytes_are_what_arrow_counts(ref):
    decoder = ArrowDecoder("topic", 0)
    decoder.feed(ref.simple([(b"key", b"x" * 100)] * 1000))
    pending = decoder.pending_bytes
    # Not get_total_buffer_size(): constant columns are slices of buffers that all batches of the
    # process share.
    assert abs(decoder.take().nbytes - pending) < pending * 0.35
    assert pending == 1000 * (103 + 4 + 4 + 9 + 4 + 8 + 8 + 4)


def test_incomplete_batches_wait(ref):
    one = ref.simple([(b"k", b"value")] * 3)
    for n in range(len(one)):
        decoder = ArrowDecoder("t", 0)
        assert decoder.feed(one + one[:n]) == len(one)
        assert (decoder.rows, decoder.next_offset) == (3, 3)
        assert decoder.next_batch_bytes == (len(one) if n >= 12 else 0)
        assert decode_records(one[:n], "t", 0, 7) == ([], 0, 7)


@pytest.mark.parametrize("codec", CODECS)
def test_a_broken_batch_leaves_the_good_ones_before_it(codec):
    rows = [(b"k", b"value %d" % i, None, 5) for i in range(50)]
    good = bytearray(encode_records(rows, codec))
    bad = bytearray(encode_records(rows, codec))
    batch.stamp(bad, 50, 0)
    bad[-3] ^= 1
    decoder = ArrowDecoder("topic", 9)
    assert decoder.feed(good + bad) == len(good)
    assert decoder.rows == 50
    with pytest.raises(CorruptBatchError, match="topic-9 offset 50 does not match its CRC"):
        decoder.feed(bad)
    assert decoder.rows == 50 and decoder.next_offset == 50
    assert decoder.take()["offset"].to_pylist() == list(range(50))
    assert len(decode_records(good + bad, "topic", 9)[0]) == 50
    with pytest.raises(CorruptBatchError, match="topic-9 offset 50"):
        decode_records(bad, "topic", 9)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"last_offset_delta": -1}, "contradicts"),
        ({"base_offset": -5}, "contradicts"),
        ({"base_offset": 2**63 - 2}, "contradicts"),
        ({"last_offset_delta": 1}, "offsets do not rise"),
    ],
)
def test_headers_that_contradict_themselves(ref, fields, words):
    data = ref.simple([(None, b"x")] * 3, **fields)
    decoder = ArrowDecoder("t", 0)
    decoder.feed(ref.simple([(b"k", b"before")]))
    for read in (
        decoder.feed,
        ArrowDecoder("t", 0, include_headers=True, start_offset=-10).feed,
        lambda d: decode_records(d, "t", 0),
    ):
        with pytest.raises(CorruptBatchError, match=words):
            read(data)
    assert decoder.take().to_pylist()[0]["value"] == b"before"


def test_counts_that_do_not_fit_the_bytes(ref):
    records = ref.record(0, 0, None, b"x") + ref.record(1, 0, None, b"y")
    for count, words in (
        (-1, "contradicts"),
        (2**31 - 1, "contradicts"),
        (1, "left after"),
        (3, "contradicts"),
        (0, "left after"),
    ):
        with pytest.raises(CorruptBatchError, match=words):
            ArrowDecoder("t", 0).feed(ref.batch(records, count, last_offset_delta=10))
    with pytest.raises(UnsupportedFormatError, match="codec 6"):
        ArrowDecoder("t", 0).feed(ref.batch(records, 2, attributes=6))


def test_without_crc_checks_the_rest_is_still_checked(ref):
    data = ref.simple([(None, b"x")], crc=0)
    with pytest.raises(CorruptBatchError, match="CRC"):
        ArrowDecoder("t", 0).feed(data)
    assert ArrowDecoder("t", 0, check_crc=False).feed(data) == len(data)
    assert len(decode_records(data, "t", 0, check_crc=False)[0]) == 1


def test_settings_out_of_range():
    for settings in (
        {"target_rows": 0},
        {"target_bytes": 0},
        {"target_bytes": 1 << 31},
        {"max_decompressed_bytes": 0},
    ):
        with pytest.raises(ConfigError, match="out of range"):
            ArrowDecoder("t", 0, **settings)
    with pytest.raises(ConfigError, match="topic"):
        ArrowDecoder("", 0)


def test_records_are_records(ref):
    (found,), consumed, next_offset = decode_records(
        ref.simple([(b"k", b"v")], base_offset=4), "topic", 2
    )
    assert found == Record("topic", 2, 4, 1_700_000_000_000, 0, b"k", b"v")
    assert next_offset == 5 and consumed


def test_two_decoders_in_two_threads(ref):
    """The inner loops hold no GIL and share nothing but read-only columns."""
    data = b"".join(ref.simple([(b"k", b"v" * 50)] * 200, base_offset=200 * i) for i in range(50))
    found: dict[int, int] = {}

    def work(n: int) -> None:
        total = 0
        for _ in range(20):
            decoder = ArrowDecoder(f"topic-{n}", n, target_rows=3000)
            position = 0
            while position < len(data):
                position += decoder.feed(memoryview(data)[position:])
                taken = decoder.take()
                assert (
                    taken["topic"][0].as_py() == f"topic-{n}"
                    and taken["partition"][taken.num_rows - 1].as_py() == n
                )
                total += taken.num_rows
        found[n] = total

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(3), 20 * 10000)


def test_errors_cross_processes(ref):
    import pickle

    with pytest.raises(FormatError) as caught:
        ArrowDecoder("t", 0).feed(ref.simple([(None, b"x")], crc=1))
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and type(again) is CorruptBatchError
