"""Arrow to batches: types, splitting, codecs, and what is refused."""

from __future__ import annotations

import random
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kdirect.errors import ConfigError, FormatError
from kdirect.format import batch
from kdirect.format.codec import ArrowDecoder, ArrowEncoder, decode_records, encode_records

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def stamped(batches) -> bytes:
    """The batches one after the other with rising offsets, each checked as the broker checks it."""
    out = bytearray()
    offset = 0
    for b in batches:
        data = bytearray(b.data)
        info = batch.check_batch_bytes(data)
        assert (info.size, info.records_count, info.base_offset, info.leader_epoch) == (
            len(data),
            b.records_count,
            0,
            -1,
        )
        batch.stamp(data, offset, 0)
        offset += b.records_count
        out += data
    return bytes(out)


def rows_of(batches) -> list[tuple]:
    """(key, value, headers, timestamp ms) of every record."""
    records, _, _ = decode_records(stamped(batches), "t", 0)
    assert [r.offset for r in records] == list(range(len(records)))
    return [(r.key, r.value, r.headers, r.timestamp) for r in records]


def encode(values, keys=None, headers=None, timestamps=None, **settings):
    encoder = ArrowEncoder(**settings)
    return encoder.encode(values, keys, headers, timestamps, default_timestamp_ms=1234)


text = st.none() | st.binary(max_size=80)
header_lists = st.none() | st.lists(
    st.tuples(st.text(max_size=5), st.none() | st.binary(max_size=9)), max_size=3
)
stamps = st.none() | st.integers(-(2**53), 2**53)
rows_strategy = st.lists(st.tuples(text, text, header_lists, stamps), min_size=1, max_size=40)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=rows_strategy,
    codec=st.sampled_from(CODECS),
    batch_bytes=st.integers(1, 2000),
    used=st.sets(st.sampled_from(["key", "headers", "timestamp"])),
)
def test_round_trip(rows, codec, batch_bytes, used):
    keys = pa.array([r[0] for r in rows], pa.binary()) if "key" in used else None
    values = pa.array([r[1] for r in rows], pa.binary())
    headers = pa.array([r[2] for r in rows], HEADERS) if "headers" in used else None
    timestamps = pa.array([r[3] for r in rows], pa.int64()) if "timestamp" in used else None
    expected = [
        (
            r[0] if keys is not None else None,
            r[1],
            tuple(r[2] or ()) if headers is not None else (),
            r[3] if timestamps is not None and r[3] is not None else 1234,
        )
        for r in rows
    ]
    batches = encode(values, keys, headers, timestamps, compression=codec, batch_bytes=batch_bytes)
    assert rows_of(batches) == expected
    data = stamped(batches)
    decoder = ArrowDecoder("t", 0, include_headers=True)
    assert decoder.feed(data) == len(data)
    taken = decoder.take()
    taken.validate(full=True)
    assert taken["value"].to_pylist() == [r[1] for r in rows]
    assert taken["timestamp"].cast(pa.int64()).to_pylist() == [e[3] * 1000 for e in expected]
    assert [
        tuple((h["key"], h["value"]) for h in found or ()) for found in taken["headers"].to_pylist()
    ] == [e[2] for e in expected]
    whole = encode_records([(e[0], e[1], e[2], e[3]) for e in expected], codec)
    assert [
        (r.key, r.value, r.headers, r.timestamp) for r in decode_records(whole, "t", 0)[0]
    ] == expected


VALUES = [b"a", None, b"", b"ccc" * 100]


@pytest.mark.parametrize(
    "values",
    [
        pa.array(VALUES, pa.binary()),
        pa.array(VALUES, pa.large_binary()),
        pa.array([v and v.decode() for v in VALUES], pa.string()),
        pa.array([v and v.decode() for v in VALUES], pa.large_string()),
        pa.array(VALUES, pa.binary()).dictionary_encode(),
        pa.array([b"x", *VALUES, b"y"], pa.binary())[1:5],
        pa.chunked_array([VALUES[:1], [], VALUES[1:]], pa.binary()),
        pa.array(VALUES, pa.binary_view()),
        pa.array([v and v.decode() for v in VALUES], pa.string_view()),
        VALUES,
    ],
    ids=lambda v: str(getattr(v, "type", "list")),
)
def test_types_of_values_and_keys(values):
    expected = [v if v else (None if v is None else b"") for v in VALUES]
    for codec in ("none", "lz4"):
        assert [r[1] for r in rows_of(encode(values, compression=codec))] == expected
        assert [
            (r[0], r[1]) for r in rows_of(encode(pa.array([b"v"] * 4), values, compression=codec))
        ] == [(k, b"v") for k in expected]


def test_fixed_size_and_null_columns():
    assert [r[:2] for r in rows_of(encode(pa.array([b"ab", None], pa.binary(2)), pa.nulls(2)))] == [
        (None, b"ab"),
        (None, None),
    ]
    assert [r[1] for r in rows_of(encode(pa.nulls(3)))] == [None] * 3


def test_chunks_of_columns_need_not_match(seed):
    rng = random.Random(seed)
    values = [b"%d" % i * rng.randrange(1, 30) for i in range(500)]

    def cut(column, kind):
        edges = sorted({0, len(column), *(rng.randrange(len(column)) for _ in range(9))})
        return pa.chunked_array([pa.array(column[a:b], kind) for a, b in pairwise(edges)])

    stamps = list(range(500))
    headers = [[("h", b"%d" % i)] * (i % 3) for i in range(500)]
    batches = encode(
        cut(values, pa.binary()),
        cut(values[::-1], pa.string()),
        cut(headers, HEADERS),
        cut(stamps, pa.int64()),
        batch_bytes=3000,
    )
    assert rows_of(batches) == [
        (k, v, tuple(h), t) for k, v, h, t in zip(values[::-1], values, headers, stamps)
    ]
    assert len(batches) > 5


@pytest.mark.parametrize(
    "kind",
    [
        pa.timestamp("ms"),
        pa.timestamp("us", tz="UTC"),
        pa.timestamp("ns"),
        pa.timestamp("s"),
        pa.int64(),
        pa.int32(),
        pa.uint32(),
    ],
)
def test_timestamps(kind):
    stamps = pa.array([1_000_000, None, 7_000], pa.int64())
    if pa.types.is_timestamp(kind):
        stamps = stamps.cast(pa.timestamp("ms")).cast(pa.timestamp(kind.unit)).cast(kind)
    else:
        stamps = stamps.cast(kind)
    assert [r[3] for r in rows_of(encode(pa.array([b"x"] * 3), timestamps=stamps))] == [
        1_000_000,
        1234,
        7000,
    ]
    (one,) = encode(pa.array([b"x"] * 3), timestamps=stamps)
    info = batch.check_batch_bytes(one.data)
    assert (info.base_timestamp, info.max_timestamp) == (1_000_000, 1_000_000)


def test_batches_are_cut_at_batch_bytes():
    values = pa.array([b"v" * 100] * 1000)
    batches = encode(values, batch_bytes=16384)
    assert all(len(b) <= 16384 for b in batches) and all(len(b) > 16384 - 120 for b in batches[:-1])
    assert sum(b.records_count for b in batches) == 1000
    large = pa.array([b"s", b"L" * 50_000, b"s", b"s"])
    assert [b.records_count for b in encode(large, batch_bytes=1000)] == [1, 1, 2]
    assert [b.records_count for b in encode(pa.array([b"x"] * 5), batch_bytes=1)] == [1] * 5


@pytest.mark.parametrize("codec", CODECS)
def test_large_batches(codec, seed):
    """Many blocks of lz4, and output blocks that must grow."""
    noise = random.Random(seed).randbytes(300_000)
    values = [noise[:i] + b"a" * i for i in range(0, 300_000, 30_000)] * 4
    for batch_bytes in (1 << 16, 1 << 20, 64 << 20):
        assert [
            r[1]
            for r in rows_of(
                encode(pa.array(values, pa.binary()), compression=codec, batch_bytes=batch_bytes)
            )
        ] == values


@pytest.mark.parametrize("keyed", [False, True])
def test_lengths_at_the_borders_of_their_numbers(keyed, seed):
    """One, two and three bytes for lengths and offset deltas; values up to the end of the Arrow
    buffer; larger than the fast loop takes."""
    sizes = [
        0,
        1,
        31,
        32,
        33,
        62,
        63,
        64,
        65,
        1023,
        1024,
        1025,
        8180,
        8190,
        8191,
        8192,
        8193,
        (1 << 19) - 1,
        1 << 19,
        (1 << 19) + 1,
        1 << 20,
        0,
        5,
    ]
    rng = random.Random(seed)
    for order in (sizes, sizes[::-1]):
        values = [rng.randbytes(n) for n in order]
        keys = [rng.randbytes(n % 3000) for n in order] if keyed else None
        for batch_bytes in (1000, 1 << 20, 1 << 24):
            found = rows_of(
                encode(
                    pa.array(values, pa.binary()),
                    keys and pa.array(keys, pa.binary()),
                    batch_bytes=batch_bytes,
                )
            )
            assert [r[1] for r in found] == values and [r[0] for r in found] == (
                keys or [None] * len(values)
            )
    many = pa.array([b"%d" % i for i in range(20_000)])
    assert [
        r[1] for r in rows_of(encode(many, many if keyed else None, batch_bytes=1 << 24))
    ] == many.to_pylist()


@pytest.mark.parametrize("n", [50, 5000])
def test_the_largest_record_and_one_byte_more(n):
    encoder = ArrowEncoder(max_record_bytes=n + 8, batch_bytes=1 << 20)
    values = [b"a", b"b" * n, b"c" * n]
    assert len(rows_of(encoder.encode(pa.array(values), default_timestamp_ms=0))) == 3
    with pytest.raises(FormatError, match="row 2 is larger"):
        encoder.encode(pa.array([*values[:2], b"c" * (n + 3)]), default_timestamp_ms=0)


def test_data_that_does_not_shrink_is_left_as_it_is(seed):
    noise = random.Random(seed).randbytes(2000)
    for codec in CODECS[1:]:
        (one,) = encode(pa.array([noise]), compression=codec)
        assert batch.check_batch_bytes(one.data).compression == "none"
        assert (
            batch.check_batch_bytes(encode_records([(None, noise, None, 0)], codec)).compression
            == "none"
        )
        (one,) = encode(pa.array([b"x" * 2000]), compression=codec)
        assert batch.check_batch_bytes(one.data).compression == codec


def test_sequences_count_on_and_wrap():
    encoder = ArrowEncoder(batch_bytes=1)
    batches = encoder.encode(
        pa.array([b"x"] * 4),
        default_timestamp_ms=0,
        producer_id=99,
        producer_epoch=3,
        base_sequence=2**31 - 2,
    )
    found = [batch.check_batch_bytes(b.data) for b in batches]
    assert [i.base_sequence for i in found] == [2**31 - 2, 2**31 - 1, 0, 1]
    assert {(i.producer_id, i.producer_epoch) for i in found} == {(99, 3)}
    assert [
        batch.check_batch_bytes(b.data).base_sequence
        for b in encoder.encode(pa.array([b"x"] * 2), default_timestamp_ms=0)
    ] == [-1, -1]


def test_batches_outlive_the_encoder_and_cannot_be_written():
    encoder = ArrowEncoder(batch_bytes=500)
    first = encoder.encode(pa.array([b"one" * 30] * 50), default_timestamp_ms=0)
    copies = [bytes(b.data) for b in first]
    for _ in range(20):
        encoder.encode(pa.array([b"two" * 30] * 50), default_timestamp_ms=0)
    del encoder
    assert [bytes(b.data) for b in first] == copies
    with pytest.raises(TypeError):
        first[0].data[0] = 1
    assert "records" in repr(first[0])


def test_no_rows_make_no_batches():
    assert encode(pa.array([], pa.binary())) == []
    assert encode(pa.chunked_array([], pa.binary())) == []


def test_after_an_error_the_encoder_works_on():
    encoder = ArrowEncoder(max_record_bytes=100, batch_bytes=1000)
    with pytest.raises(FormatError, match=r"row 2 is larger than 100.*max.message.bytes"):
        encoder.encode(pa.array([b"a", b"b", b"c" * 200]), default_timestamp_ms=0)
    assert [r[1] for r in rows_of(encoder.encode(pa.array([b"d"]), default_timestamp_ms=0))] == [
        b"d"
    ]


def test_headers_that_cannot_be():
    with pytest.raises(FormatError, match="row 1 has no key"):
        encode(pa.array([b"a", b"b"]), headers=pa.array([[("k", b"")], [(None, b"x")]], HEADERS))
    with pytest.raises(FormatError, match="a header is null"):
        encode(pa.array([b"a"]), headers=pa.array([[None]], HEADERS))
    with pytest.raises(FormatError, match="no key"):
        encode_records([(None, b"x", [(None, b"")], 0)])
    with pytest.raises(ConfigError, match="column headers"):
        encode(pa.array([b"a"]), headers=pa.array([5]))


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"values": pa.array([1, 2])}, "value has type int64"),
        ({"values": None}, "value is missing"),
        (
            {"values": pa.array([b"a"]), "keys": pa.array([b"a", b"b"])},
            "key has 2 rows, value has 1",
        ),
        ({"values": pa.array([b"a"]), "keys": pa.array([1.5])}, "key has type double"),
        (
            {"values": pa.array([b"a"]), "timestamps": pa.array(["now"])},
            "timestamp has type string",
        ),
        ({"values": ["a", 1]}, "column value"),
    ],
)
def test_columns_that_do_not_fit(columns, words):
    with pytest.raises(ConfigError, match=words):
        encode(columns["values"], columns.get("keys"), None, columns.get("timestamps"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"compression": "brotli"}, "none, gzip, snappy, lz4, zstd"),
        ({"compression": "snappy", "level": 3}, "no level"),
        ({"compression": "lz4", "level": 18}, "1 to 17"),
        ({"compression": "gzip", "level": 10}, "1 to 9"),
        ({"batch_bytes": 0}, "batch_bytes"),
        ({"max_record_bytes": 2**31}, "max_record_bytes"),
    ],
)
def test_arguments_that_do_not_fit(arguments, words):
    with pytest.raises(ConfigError, match=words):
        ArrowEncoder(**arguments)


def test_levels():
    values = pa.array([b"%d" % (i * i) for i in range(5000)])
    sizes = {
        (c, level): sum(len(b) for b in encode(values, compression=c, level=level))
        for c, level in (("gzip", 1), ("gzip", 9), ("zstd", 1), ("zstd", 19), ("zstd", -9))
    }
    assert sizes["gzip", 9] < sizes["gzip", 1] and sizes["zstd", 19] < sizes["zstd", 1]
    assert sizes["zstd", 1] < sizes["zstd", -9]


def test_encode_records_takes_what_producers_have():
    rows = [("key", bytearray(b"v"), {"a": b"1"}.items(), 5), (memoryview(b"k"), None, None, -7)]
    found = decode_records(encode_records(rows), "t", 0)[0]
    assert [(r.key, r.value, r.headers, r.timestamp) for r in found] == [
        (b"key", b"v", (("a", b"1"),), 5),
        (b"k", None, (), -7),
    ]
    with pytest.raises(ConfigError, match="at least one"):
        encode_records([])
    with pytest.raises(ConfigError, match="value is a int"):
        encode_records([(None, 5, None, 0)])
    with pytest.raises(ConfigError, match="'deflate'"):
        encode_records([(None, b"", None, 0)], "deflate")
    info = batch.check_batch_bytes(
        encode_records(
            [(None, b"x", None, 0)],
            attributes=0x10,
            producer_id=5,
            producer_epoch=1,
            base_sequence=8,
        )
    )
    assert (info.is_transactional, info.producer_id, info.producer_epoch, info.base_sequence) == (
        True,
        5,
        1,
        8,
    )
