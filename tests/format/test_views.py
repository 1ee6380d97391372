"""Columns that are views: the rows of the copying decoder, and its errors."""

from __future__ import annotations

import ctypes
import gc
import random
import struct
import threading
import time
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from kdirect.errors import CorruptBatchError, FormatError
from kdirect.format import batch
from kdirect.format.codec import (
    SCHEMA_VIEWS,
    SCHEMA_VIEWS_WITH_HEADERS,
    ArrowDecoder,
    encode_records,
)
from kdirect.format.compression import Compressor
from tests.format.viewed import (
    CODECS,
    Owned,
    as_copied,
    at_offset,
    check_places,
    long_views,
    some_batches,
)

# -- the same rows ---------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [*CODECS, None])
@pytest.mark.parametrize("headers", [False, True])
def test_the_rows_are_those_of_the_copying_decoder(seed, codec, headers):
    rng = random.Random(seed)
    used = set()
    for _ in range(12):
        batches = some_batches(rng, codec)
        used |= {info.compression for data in batches for info in batch.iterate_batches(data)}
        everything = b"".join(batches)
        last = 40 * len(batches)
        start = rng.randrange(last) if rng.random() < 0.5 else 0
        settings: dict[str, Any] = {
            "include_headers": headers,
            "start_offset": start,
            "stop_offset": rng.randrange(start, last) if rng.random() < 0.3 else last,
            "target_rows": rng.choice((30, 1000)),
        }
        copies = ArrowDecoder("t", 3, **settings)
        views = ArrowDecoder("t", 3, views=True, **settings)
        assert views.views and not copies.views
        owned = Owned(everything)
        position, taken = 0, []
        while position < len(everything):
            n = min(len(everything) - position, rng.choice((len(everything), 8192)))
            consumed = copies.feed_address(owned.address + position, n)
            assert consumed == views.feed_address(owned.address + position, n, owned)
            assert (views.rows, views.next_offset) == (copies.rows, copies.next_offset)
            if consumed == 0 and not views.full:
                n = views.next_batch_bytes
                assert n == copies.next_batch_bytes
                consumed = copies.feed_address(owned.address + position, n)
                assert consumed == views.feed_address(owned.address + position, n, owned)
            position += consumed
            if views.full or position == len(everything) or rng.random() < 0.2:
                taken.append((copies.take(), views.take()))
        del owned
        gc.collect()
        for expected, found in taken:
            found.validate(full=True)
            assert found.schema == views.schema
            assert as_copied(found).equals(expected)
    assert codec in used if codec else len(used) > 2


@pytest.mark.parametrize("headers", [False, True])
def test_feed_declares_its_argument_as_the_window(seed, headers):
    """Bytes-like objects of all kinds, and a decoder that is fed from several."""
    rng = random.Random(seed)
    kinds = (bytes, bytearray, memoryview, pa.py_buffer, lambda data: memoryview(bytearray(data)))
    for _ in range(10):
        batches = some_batches(rng)
        copies = ArrowDecoder("t", 0, include_headers=headers)
        views = ArrowDecoder("t", 0, include_headers=headers, views=True)
        for data in batches:
            assert copies.feed(data) == views.feed(rng.choice(kinds)(data)) == len(data)
        gc.collect()
        found = views.take()
        found.validate(full=True)
        assert as_copied(found).equals(copies.take())


def test_schemas():
    for headers, schema in ((False, SCHEMA_VIEWS), (True, SCHEMA_VIEWS_WITH_HEADERS)):
        decoder = ArrowDecoder("t", 0, include_headers=headers, views=True)
        assert decoder.schema == schema == decoder.take().schema
        assert schema.field("key").type == schema.field("value").type == pa.binary_view()
        assert schema.names == ArrowDecoder("t", 0, include_headers=headers).schema.names
    element = SCHEMA_VIEWS_WITH_HEADERS.field("headers").type.value_type
    assert [f.type for f in element] == [pa.string(), pa.binary_view()]


@pytest.mark.parametrize("first_key", range(5))
@pytest.mark.parametrize("first_null", range(5))
def test_keys_and_nulls_that_begin_late(ref, first_key, first_null):
    rows = [
        (
            b"key%d" % i * 4 if i >= first_key and i % 4 else None,
            None if i >= first_null and i % 3 == 2 else b"value %d" % i * (i % 3),
        )
        for i in range(24)
    ]
    for cut in (1, 3, 7, 24):
        data = b"".join(ref.simple(rows[i : i + cut], base_offset=i) for i in range(0, 24, cut))
        decoder = ArrowDecoder("t", 0, views=True)
        assert decoder.feed(data) == len(data)
        found = decoder.take()
        found.validate(full=True)
        assert list(zip(found["key"].to_pylist(), found["value"].to_pylist())) == rows


def test_values_of_all_sizes(ref):
    sizes = [*range(70), 511, 512, 8191, 8192, 70_000, 1 << 20, (1 << 20) + 1]
    rows = [(b"k" * (n % 90), bytes([n % 251]) * n) for n in sizes]
    for pairs in (rows, [(None, v) for _, v in rows], [(v, k) for k, v in rows]):
        decoder = ArrowDecoder("t", 0, views=True)
        decoder.feed(ref.simple(pairs))
        found = decoder.take()
        found.validate(full=True)
        assert list(zip(found["key"].to_pylist(), found["value"].to_pylist())) == pairs


def test_null_columns_are_shared():
    data = encode_records([(None, b"x" * 20, None, 0)] * 500)
    found = []
    for _ in range(2):
        decoder = ArrowDecoder("t", 0, views=True)
        decoder.feed(data)
        found.append(decoder.take()["key"])
    assert found[0].null_count == 500 and found[0].type == pa.binary_view()
    assert [b.address for b in found[0].buffers()] == [b.address for b in found[1].buffers()]


# -- what others make of them ----------------------------------------------------------------------


@pytest.fixture
def taken(seed) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Rows as views, and as copies."""
    data = b"".join(some_batches(random.Random(seed)))
    decoders = [ArrowDecoder("t", 0, include_headers=True, views=v) for v in (True, False)]
    for decoder in decoders:
        assert decoder.feed(bytearray(data)) == len(data)
    return decoders[0].take(), decoders[1].take()


def test_slices_and_concatenations(taken):
    views, copies = taken
    half = views.num_rows // 2
    parts = [views.slice(0, half), views.slice(half)]
    both = pa.Table.from_batches([*parts, views]).select(["key", "value"]).combine_chunks()
    both.validate(full=True)
    for name in ("key", "value"):
        expected = copies[name].to_pylist()
        assert both[name].to_pylist() == expected + expected
        assert parts[1][name].to_pylist() == expected[half:]
        (chunk,) = both[name].chunks
        for _ in long_views(chunk):  # its views stay within the data buffers, too
            pass


def test_ipc(taken):
    views, copies = taken
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, views.schema) as writer:
        writer.write_batch(views)
    expected = as_copied(views)
    (found,) = pa.ipc.open_stream(out.getvalue())
    found.validate(full=True)
    assert found.equals(views) and expected.equals(copies)


def test_compute_functions(taken):
    """pyarrow 26 casts this type, and cannot filter, take or sort it."""
    views, copies = taken
    for name in ("key", "value"):
        copied = views[name].cast(pa.binary())
        assert copied.equals(copies[name])
        assert pc.binary_length(copied).equals(pc.binary_length(copies[name]))
        assert pc.is_valid(views[name]).equals(pc.is_valid(copies[name]))
        assert views[name].null_count == copies[name].null_count


def test_polars(taken):
    polars = pytest.importorskip("polars")
    views, copies = taken
    frame = polars.from_arrow(pa.Table.from_batches([views]).select(["key", "value", "offset"]))
    assert frame["value"].to_list() == copies["value"].to_pylist()
    assert frame["key"].to_list() == copies["key"].to_pylist()


def test_duckdb(taken):
    duckdb = pytest.importorskip("duckdb")
    views, copies = taken
    table = pa.Table.from_batches([views])
    found = duckdb.connect().register("t", table).execute("select key, value from t").fetchall()
    assert found == list(zip(copies["key"].to_pylist(), copies["value"].to_pylist(), strict=True))


# -- damage ----------------------------------------------------------------------------------------


def outcome(decoder: ArrowDecoder, data: bytes) -> object:
    """The rows, or the error."""
    owned = Owned(data)
    try:
        if decoder.views:
            consumed = decoder.feed_address(owned.address, len(owned), owned)
        else:
            consumed = decoder.feed_address(owned.address, len(owned))
    except FormatError as e:
        return type(e), str(e), e.hint
    found = decoder.take()
    found.validate(full=True)
    if decoder.views:
        check_places(found)
        found = as_copied(found)
    return consumed, found


@pytest.mark.parametrize("crc", [False, True])
@pytest.mark.parametrize("codec", CODECS)
def test_damaged_batches_give_the_same_errors(ref, codec, crc):
    """Each bit of a batch that is flipped; with `crc`, the CRC is right for it."""
    rows = [
        (b"key" * i, b"value %d" % i * i, [("h", b"w" * 20)] if i == 2 else [], i) for i in range(4)
    ]
    good = encode_records(rows * 3, codec)
    for position in range(len(good)):
        for bit in (0, 3, 7) if codec == "none" else (position % 8,):
            data = bytearray(good)
            data[position] ^= 1 << bit
            damaged = bytes(data)
            if crc:
                length = struct.unpack_from(">i", damaged, 8)[0]
                if length != len(good) - 12:
                    continue
                damaged = ref.fix_crc(damaged)
            for headers in (False, True):
                found = [
                    outcome(
                        ArrowDecoder(
                            "t",
                            0,
                            include_headers=headers,
                            views=views,
                            max_decompressed_bytes=1 << 20,
                        ),
                        damaged,
                    )
                    for views in (False, True)
                ]
                assert found[0] == found[1], (position, bit)


@pytest.mark.parametrize("codec", CODECS)
def test_a_broken_batch_leaves_the_pending_rows(ref, codec):
    """Its good records, of which views were made already, come before the broken one."""
    good = encode_records([(b"k" * 20, b"good" * 20, [("h", b"w" * 20)], 0)] * 5)
    records = b"".join(ref.record(i, 0, b"k" * 30, b"bad" * 30) for i in range(9)) + b"\xff" * 9
    broken = ref.batch(records, 10, base_offset=5)
    if codec != "none":
        packed = bytes(Compressor(codec).run(records))
        broken = ref.batch(packed, 10, base_offset=5, attributes=CODECS.index(codec))
    for headers in (False, True):
        decoder = ArrowDecoder("t", 0, include_headers=headers, views=True)
        assert decoder.feed(good + broken) == len(good)
        before = decoder.pending_bytes
        for _ in range(2):
            with pytest.raises(CorruptBatchError, match="a number in a record"):
                decoder.feed(broken)
        assert (decoder.rows, decoder.pending_bytes) == (5, before)
        more = at_offset(encode_records([(None, b"more" * 20, None, 0)] * 5, codec), 5)
        assert decoder.feed(more) == len(more)
        found = decoder.take()
        found.validate(full=True)
        assert found["value"].to_pylist() == [b"good" * 20] * 5 + [b"more" * 20] * 5
        assert found["key"].to_pylist() == [b"k" * 20] * 5 + [None] * 5


@pytest.mark.parametrize("headers", [False, True])
def test_bytes_that_change_while_they_are_read(ref, seed, headers):
    """Another thread changes lengths: a batch is refused, or each view stays within the window.

    What views show may be anything then; the CRC of a batch that nobody changes excludes it."""
    rng = random.Random(seed)
    records = b"".join(
        ref.record(
            i,
            i,
            b"k" * rng.choice((0, 5, 30)),
            b"v" * rng.choice((3, 20, 150)),
            [(b"h", b"x" * 20)] * (i % 3 == 2 if headers else 0),
        )
        for i in range(400)
    )
    owned = Owned(ref.batch(records, 400))
    memory = (ctypes.c_ubyte * len(owned)).from_address(owned.address)
    good = bytes(memory)
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
            decoder = ArrowDecoder("t", 0, check_crc=False, include_headers=headers, views=True)
            try:
                decoder.feed_address(owned.address, len(owned), owned)
            except FormatError:
                refused += 1
                assert decoder.rows == 0
            else:
                found = decoder.take()
                assert found.num_rows in (0, 400)
                check_places(found, owned)
                taken += 1
    finally:
        stop.set()
        writer.join()
    print(f"taken {taken}, refused {refused}")
    assert taken + refused > 10
