"""Bytes from anybody: the decoder takes them or raises a declared error, and touches nothing beyond
them.

Data lies directly before a page that may not be touched.  What is accepted is compared with the
reference.
"""

from __future__ import annotations

import ctypes
import random
import struct
import threading
import time

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdirect.errors import CorruptBatchError, FormatError, KdirectError, UnsupportedFormatError
from kdirect.format.codec import ArrowDecoder, decode_records, encode_records

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
text = st.none() | st.binary(max_size=40)
header = st.tuples(st.binary(max_size=4), text)
record = st.tuples(
    text,
    text,
    st.lists(header, max_size=3),
    st.integers(-(2**62), 2**62) | st.integers(-5, 5),
    st.integers(1, 3),
)
small = st.integers(-3, 200) | st.integers(-(2**63), 2**63 - 1)


def outcome(data: bytes, guarded) -> tuple[list[tuple] | None, str]:
    """Rows of the first batches in `data` (None: refused) by all decoders, which must agree, and
    why it was refused."""
    address = guarded.put(data)
    results: list[list[tuple] | None] = []
    why = ""
    for views, headers in ((False, False), (False, True), (True, False), (True, True)):
        decoder = ArrowDecoder(
            "t", 0, include_headers=headers, max_decompressed_bytes=1 << 20, views=views
        )
        try:
            consumed = decoder.feed_address(address, len(data), guarded)
        except (CorruptBatchError, UnsupportedFormatError) as e:
            assert e.hint and "t-0" in str(e)
            assert decoder.rows == 0
            results.append(None)
            why = str(e)
        else:
            assert 0 <= consumed <= len(data)
            taken = decoder.take()
            taken.validate(full=True)
            names = taken["headers"].to_pylist() if headers else [None] * taken.num_rows
            results.append(
                [
                    (o, t, k, v, tuple((h["key"], h["value"]) for h in found or ()))
                    for o, t, k, v, found in zip(
                        taken["offset"].to_pylist(),
                        taken["timestamp"].cast(pa.int64()).to_pylist(),
                        taken["key"].to_pylist(),
                        taken["value"].to_pylist(),
                        names,
                    )
                ]
            )
    assert results[2:] == results[:2]
    assert (results[0] is None) == (results[1] is None)
    try:
        records, _, _ = decode_records(bytes(data), "t", 0, max_decompressed_bytes=1 << 20)
    except (CorruptBatchError, UnsupportedFormatError):
        assert results[1] is None
        return None, why
    assert results[1] is not None, why
    assert [r[:4] for r in results[0] or []] == [r[:4] for r in results[1]]
    assert [(r.offset, r.key, r.value, r.headers) for r in records] == [
        (r[0], r[2], r[3], r[4]) for r in results[1]
    ]
    return results[1], why


def clamp(ms: int) -> int:
    ms = min(max(ms, -(2**63)), 2**63 - 1)
    return min(max(ms * 1000, -(2**63)), 2**63 - 1)


def against_reference(ref, data: bytes, guarded) -> list[tuple] | None:
    """`outcome`, and the reference must say the same of the first batch, which must be the only
    one."""
    found, why = outcome(data, guarded)
    try:
        rows = ref.read_batch(data)
    except ref.Malformed as e:
        assert found is None, f"the reference refuses: {e}"
        return None
    assert found is not None, f"the reference accepts what is refused: {why}"
    if rows is None:
        assert found == []
    else:
        assert found == [(r[0], clamp(r[1]), *r[2:]) for r in rows]
    return found


@settings(max_examples=150)
@given(st.binary(max_size=300))
def test_arbitrary_bytes(guarded, data):
    outcome(data, guarded)


@settings(max_examples=150)
@given(st.binary(max_size=200), st.integers(-1, 12), st.integers(-1, 40))
def test_arbitrary_records_in_a_good_frame(ref, guarded, data, count, last_delta):
    against_reference(ref, ref.batch(data, count, last_offset_delta=last_delta), guarded)


@settings(max_examples=200)
@given(st.lists(small, max_size=40), st.integers(0, 5))
def test_records_of_arbitrary_numbers(ref, guarded, numbers, count):
    """Varints get past the first checks, so lengths and counts that lie are met everywhere."""
    data = b"".join(ref.varint(n) for n in numbers)
    against_reference(ref, ref.batch(data, count, last_offset_delta=50), guarded)


def build(ref, rows, base_timestamp=1_700_000_000_000, **fields) -> bytes:
    records, delta = b"", -1
    for key, value, headers, timestamp_delta, step in rows:
        delta += step
        records += ref.record(delta, timestamp_delta, key, value, headers)
    return ref.batch(
        records, len(rows), last_offset_delta=max(delta, 0), base_timestamp=base_timestamp, **fields
    )


@settings(max_examples=150)
@given(
    st.lists(record, max_size=8),
    st.integers(0, 2**40),
    st.sampled_from([0, 8, 0x10, 0x20, 0x40]),
    st.integers(-(2**63), 2**63 - 1),
)
def test_good_batches_are_taken(ref, guarded, rows, base_offset, attributes, base_timestamp):
    found = against_reference(
        ref,
        build(ref, rows, base_timestamp, base_offset=base_offset, attributes=attributes),
        guarded,
    )
    assert found is not None and len(found) == (0 if attributes & 0x20 else len(rows))


edits = st.lists(
    st.tuples(
        st.integers(0, 10_000),
        st.sampled_from(["set", "insert", "delete", "repeat"]),
        st.integers(0, 255),
    ),
    min_size=1,
    max_size=4,
)


def edit(data: bytes, changes) -> bytes:
    out = bytearray(data)
    for position, how, byte in changes:
        position %= max(len(out), 1)
        if how == "set" and out:
            out[position] = byte
        elif how == "insert":
            out[position:position] = bytes([byte])
        elif how == "delete":
            del out[position : position + 1 + byte % 4]
        else:
            out[position:position] = out[position : position + byte]
    return bytes(out)


@settings(max_examples=250)
@given(st.lists(record, min_size=1, max_size=6), edits)
def test_mutated_records_with_the_crc_made_right(ref, guarded, rows, changes):
    good = build(ref, rows)
    count, last = struct.unpack_from(">i", good, 57)[0], struct.unpack_from(">i", good, 23)[0]
    against_reference(
        ref, ref.batch(edit(good[61:], changes), count, last_offset_delta=last), guarded
    )


FIELDS = ("length", "timestamp", "offset", "key", "value", "headers")
lies = (
    st.integers(-3, 3)
    | st.integers(50, 300)
    | st.integers(4000, 2**21)
    | st.integers(-(2**63), 2**63 - 1)
)


@settings(max_examples=500)
@given(
    keyed=st.booleans(),
    sizes=st.lists(st.integers(0, 70), min_size=2, max_size=5),
    where=st.integers(0, 4),
    field=st.sampled_from(FIELDS),
    lie=lies,
    relative=st.booleans(),
)
def test_one_number_that_lies(ref, guarded, keyed, sizes, where, field, lie, relative):
    """One number of one record is wrong, among records that the fast loop takes."""
    records = b""
    for i, size in enumerate([*sizes, 60, 60, 60]):
        key, value = b"key" * (i % 3) if keyed else None, b"v" * size
        parts = {
            "timestamp": i,
            "offset": i,
            "key": -1 if key is None else len(key),
            "value": size,
            "headers": 0,
        }

        def number(name, true, mine=i == where % len(sizes)):
            return ref.varint(
                true
                if name != field or not mine
                else min(max(true + lie, -(2**63)), 2**63 - 1)
                if relative
                else lie
            )

        body = (
            b"\0"
            + number("timestamp", parts["timestamp"])
            + number("offset", parts["offset"])
            + number("key", parts["key"])
            + (key or b"")
        )
        body += number("value", size) + value + number("headers", 0)
        records += number("length", len(body)) + body
    against_reference(ref, ref.batch(records, len(sizes) + 3), guarded)


@settings(max_examples=150)
@given(
    st.lists(record, min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_mutated_headers_with_the_crc_made_right(ref, guarded, rows, changes):
    data = bytearray(build(ref, rows))
    for position, byte in changes:
        data[position] = byte
    data[22] &= 0xF8  # the reference knows no codecs
    length = struct.unpack_from(">i", data, 8)[0]
    fixed = bytes(data)
    if 49 <= length <= len(data) - 12:
        fixed = ref.fix_crc(fixed[: 12 + length])
    against_reference(ref, fixed, guarded)


@settings(max_examples=100)
@given(
    st.lists(record, min_size=1, max_size=6), st.sampled_from(CODECS[1:]), edits, st.integers(1, 9)
)
def test_mutated_compressed_records(ref, guarded, rows, codec, changes, repeat):
    attributes = CODECS.index(codec)
    good = encode_records(
        [(k, v, [(b"h", x) for _, x in h], t % 10**12) for k, v, h, t, _ in rows] * repeat, codec
    )
    if good[22] & 7:
        data = ref.batch(edit(good[61:], changes), len(rows) * repeat, attributes=attributes)
        outcome(data, guarded)


@settings(max_examples=60)
@given(st.lists(record, min_size=1, max_size=4), st.sampled_from(CODECS), st.integers(0, 2**32))
def test_truncations_are_incomplete_never_wrong(ref, guarded, rows, codec, noise):
    one = encode_records([(k, v, None, 0) for k, v, *_ in rows], codec)
    rng = random.Random(noise)
    for n in {
        0,
        11,
        12,
        16,
        17,
        60,
        61,
        len(one) - 1,
        *(rng.randrange(len(one)) for _ in range(10)),
    }:
        cut = one[: max(0, min(n, len(one) - 1))]
        decoder = ArrowDecoder("t", 0)
        assert decoder.feed_address(guarded.put(cut), len(cut)) == 0 and decoder.rows == 0
        # The same bytes, cut by a writer that made length and CRC right, are refused or are a
        # shorter batch.
        if len(cut) >= 61:
            outcome(ref.fix_crc(cut[:8] + struct.pack(">i", len(cut) - 12) + cut[12:]), guarded)


@settings(max_examples=60)
@given(st.lists(record, min_size=1, max_size=30), st.data())
def test_an_interval_of_offsets_is_a_filter(ref, guarded, rows, data):
    encoded = build(ref, rows, base_offset=100)
    everything, _ = outcome(encoded, guarded)
    start, stop = sorted([data.draw(st.integers(95, 200)), data.draw(st.integers(95, 200))])
    decoder = ArrowDecoder("t", 0, start_offset=start, stop_offset=stop)
    assert decoder.feed(encoded) == len(encoded)
    assert decoder.take()["offset"].to_pylist() == [
        r[0] for r in everything or [] if start <= r[0] < stop
    ]


@pytest.mark.parametrize("headers", [False, True])
def test_memory_that_changes_under_the_reader(ref, guarded, headers, seed):
    """A hostile writer keeps writing while the decoder reads where the bytes lie.  Rows may be
    nonsense; memory stays whole."""
    rng = random.Random(seed)
    rows = [
        (
            b"k" * rng.randrange(9),
            b"v" * rng.randrange(90),
            [(b"h", b"x" * rng.randrange(9))] * (headers * rng.randrange(3)),
            0,
            1,
        )
        for _ in range(400)
    ]
    good = build(ref, rows)
    address = guarded.put(good)
    memory = (ctypes.c_ubyte * len(good)).from_address(address)
    lengths = [i for i in range(61, len(good)) if good[i] not in b"kvhx"]
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for _ in range(300):
                i = rng.choice(lengths)
                memory[i] = rng.choice((0xFF, 0x7F, 0xFE, 0x80, 0, 1))
                memory[i] = good[i]

    writer = threading.Thread(target=write)
    writer.start()
    taken = refused = 0
    try:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            decoder = ArrowDecoder("t", 0, check_crc=False, include_headers=headers)
            try:
                decoder.feed_address(address, len(good))
            except FormatError:
                refused += 1
                assert decoder.rows == 0
            else:
                found = decoder.take()
                for name in ("key", "value"):
                    found[name].validate(full=True)
                assert found.num_rows in (0, 400)
                taken += 1
    finally:
        stop.set()
        writer.join()
    print(f"taken {taken}, refused {refused}")
    assert taken + refused > 10


def test_every_error_is_declared():
    assert (
        issubclass(CorruptBatchError, FormatError)
        and issubclass(UnsupportedFormatError, FormatError)
        and issubclass(FormatError, KdirectError)
    )
