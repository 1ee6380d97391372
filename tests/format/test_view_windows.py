"""Views and memory: nothing is copied, and owners are kept as long as they are needed and no
longer."""

from __future__ import annotations

import gc
import mmap
import struct
import weakref

import pyarrow as pa
import pytest

from kdirect import blocks
from kdirect.errors import ConfigError, CorruptBatchError
from kdirect.format.codec import ArrowDecoder, encode_records
from tests.format.viewed import CODECS, Owned, at_offset, check_places, long_views


def numbers_of(found: pa.RecordBatch) -> list[int]:
    return [number for *_, number in long_views(found["value"])]


# -- nothing is copied -----------------------------------------------------------------------------


def test_long_values_stay_where_they_were_fed(ref):
    rows = [(b"key", b"v" * 4096)] * 500
    owned = Owned(b"".join(ref.simple(rows, base_offset=500 * i) for i in range(4)))
    decoder = ArrowDecoder("t", 0, views=True)
    live, arrow = blocks.statistics()["block_live_bytes"], pa.total_allocated_bytes()
    assert decoder.feed_address(owned.address, len(owned), owned) == len(owned)
    found = decoder.take()
    assert blocks.statistics()["block_live_bytes"] - live < 300_000
    assert pa.total_allocated_bytes() - arrow < 100_000
    assert check_places(found, owned) == 2000
    places = list(long_views(found["value"]))
    assert owned.memory.raw.find(b"v" * 4096) == places[0][0] - owned.address
    assert {number for *_, number in places} == {0}
    # The data buffer has what was taken, and no more.
    (buffer,) = found["value"].buffers()[2:]
    assert (buffer.address, buffer.size) == (owned.address, len(owned))


def test_short_values_keep_nothing(ref):
    owned = Owned(ref.simple([(b"key", b"12 bytes ...")] * 50))
    gone = weakref.ref(owned)
    decoder = ArrowDecoder("t", 0, views=True)
    decoder.feed_address(owned.address, len(owned), owned)
    found = decoder.take()
    assert len(found["value"].buffers()) == len(found["key"].buffers()) == 2
    del owned
    assert gone() is None
    assert set(found["value"].to_pylist()) == {b"12 bytes ..."}


def test_a_column_keeps_memory_only_if_it_refers_to_it(ref):
    decoder = ArrowDecoder("t", 0, views=True)
    decoder.feed(ref.simple([(b"key", b"v" * 50)] * 50))
    found = decoder.take()
    assert (len(found["key"].buffers()), len(found["value"].buffers())) == (2, 3)


def test_a_small_batch_does_not_hold_large_memory(ref):
    one = ref.simple([(b"k", b"x" * 100)])
    for codec in (0, 3):
        decoder = ArrowDecoder("t", 0, views=True)
        before = blocks.statistics()["block_live_bytes"]
        data = one
        if codec:  # a frame of blocks of 4 MiB: its bound is 4 MiB
            block = pa.Codec("lz4_raw").compress(one[61:], asbytes=True)
            frame = struct.pack("<IBBBI", 0x184D2204, 0x60, 0x70, 0x73, len(block)) + block
            frame += bytes(4)
            data = ref.batch(frame, 1, attributes=codec)
        decoder.feed(data + ref.simple([(b"k", b"x" * 3_000_000)], base_offset=1)[:-1])
        found = decoder.take()
        assert found["value"].to_pylist() == [b"x" * 100]
        assert blocks.statistics()["block_live_bytes"] - before < 100_000


@pytest.mark.parametrize("codec", CODECS[1:])
def test_each_compressed_batch_is_a_data_buffer(codec):
    rows = [(None, b"value %d " % i * 5, None, 0) for i in range(100)]
    data = b"".join(at_offset(encode_records(rows, codec), 100 * i) for i in range(5))
    plain = at_offset(encode_records(rows), 500)
    owned = Owned(data + plain)
    decoder = ArrowDecoder("t", 0, views=True)
    assert decoder.feed_address(owned.address, len(owned), owned) == len(owned)
    found = decoder.take()
    del owned, decoder
    gc.collect()
    numbers = [number for *_, number in long_views(found["value"])]
    assert numbers == [n for n in range(6) for _ in range(100)]
    assert found["value"].to_pylist() == [row[1] for row in rows] * 6


@pytest.mark.parametrize("codec", CODECS[1:])
def test_compressed_batches_between_others(codec):
    """Those before and after them in the same window have one data buffer."""
    codecs = ("none", codec, "none", codec, codec, "none")
    data = b"".join(
        at_offset(encode_records([(b"%d" % i * 20, b"v%d" % i * 20, None, 0)] * 3, name), 3 * i)
        for i, name in enumerate(codecs)
    )
    decoder = ArrowDecoder("t", 0, views=True)
    assert decoder.feed(data) == len(data)
    found = decoder.take()
    found.validate(full=True)
    assert numbers_of(found)[::3] == [0, 1, 0, 2, 3, 0]
    assert found["key"].to_pylist()[::3] == [b"%d" % i * 20 for i in range(6)]
    assert found["value"].to_pylist()[::3] == [b"v%d" % i * 20 for i in range(6)]


# -- owners ----------------------------------------------------------------------------------------


def test_the_owner_goes_with_the_last_array(ref):
    owned = Owned(ref.simple([(b"k" * 20, b"v" * 50)] * 9))
    gone = weakref.ref(owned)
    decoder = ArrowDecoder("t", 0, views=True)
    decoder.feed_address(owned.address, len(owned), owned)
    del owned
    assert gone() is not None and decoder.rows == 9
    found = decoder.take()
    part = found["key"].slice(3, 2)
    found = found["value"]
    gc.collect()
    assert gone() is not None and found.to_pylist() == [b"v" * 50] * 9
    del found
    assert gone() is not None and part.to_pylist() == [b"k" * 20] * 2
    del part
    assert gone() is None
    assert decoder.rows == 0


def test_an_owner_of_nothing_that_was_taken_is_not_kept(ref):
    one = ref.simple([(b"k" * 20, b"v" * 50)] * 9)
    for data in (b"", one[:-1], ref.simple([(None, b"v" * 20)], attributes=0x20)):
        owned = Owned(data)
        gone = weakref.ref(owned)
        decoder = ArrowDecoder("t", 0, views=True)
        decoder.feed_address(owned.address, len(owned), owned)
        del owned
        assert gone() is None and decoder.rows == 0
    decoder = ArrowDecoder("t", 0, views=True)
    owned = Owned(one[:-1] + b"?")
    gone = weakref.ref(owned)
    decoder.feed(one)
    with pytest.raises(CorruptBatchError):
        ArrowDecoder("t", 0, views=True).feed_address(owned.address, len(owned), owned)
    del owned
    assert gone() is None
    assert decoder.take().num_rows == 9


def test_a_decoder_that_is_dropped_drops_the_owners(ref):
    owned = Owned(ref.simple([(None, b"v" * 50)] * 9))
    gone = weakref.ref(owned)
    decoder = ArrowDecoder("t", 0, views=True)
    decoder.feed_address(owned.address, len(owned), owned)
    del owned, decoder
    assert gone() is None


def test_a_fed_bytearray_keeps_its_size_while_it_is_shown(ref):
    data = bytearray(ref.simple([(None, b"v" * 50)] * 9))
    decoder = ArrowDecoder("t", 0, views=True)
    decoder.feed(data)
    found = decoder.take()
    with pytest.raises(BufferError):
        data.clear()
    del found
    data.clear()


# -- windows ---------------------------------------------------------------------------------------


def test_windows_of_one_owner_that_continue_are_one_data_buffer(ref):
    parts = [ref.simple([(None, b"v%d" % i * 20)] * 2, base_offset=2 * i) for i in range(6)]
    owned = Owned(b"".join(parts))
    decoder = ArrowDecoder("t", 0, views=True)
    position = 0
    for i, part in enumerate(parts):
        # What follows at other addresses: the same window again, or the rest of it.
        begin = 0 if i % 2 else position
        decoder.feed_address(owned.address + begin, position - begin + len(part), owned)
        position += len(part)
    found = decoder.take()
    assert check_places(found, owned) == 12 and set(numbers_of(found)) == {0}
    (buffer,) = found["value"].buffers()[2:]
    assert (buffer.address, buffer.size) == (owned.address, len(owned))
    assert found["value"].to_pylist() == [b"v%d" % (i // 2) * 20 for i in range(12)]


def test_windows_of_several_owners(ref):
    parts = [ref.simple([(None, b"v%d" % i * 20)], base_offset=i) for i in range(6)]
    first, second = Owned(b"".join(parts[::2])), Owned(b"".join(parts[1::2]))
    decoder = ArrowDecoder("t", 0, views=True)
    places = [0, 0]
    for i, part in enumerate(parts):
        owned = (first, second)[i % 2]
        decoder.feed_address(owned.address + places[i % 2], len(part), owned)
        places[i % 2] += len(part)
    found = decoder.take()
    assert check_places(found, first, second) == 6 and numbers_of(found) == [0, 1] * 3
    assert found["value"].to_pylist() == [b"v%d" % i * 20 for i in range(6)]


def test_a_gap_between_windows_is_in_no_data_buffer(ref):
    one = ref.simple([(None, b"v" * 50)])
    two = ref.simple([(None, b"w" * 50)], base_offset=1)
    owned = Owned(one + b"secret" + two)
    decoder = ArrowDecoder("t", 0, views=True)
    decoder.feed_address(owned.address, len(one), owned)
    decoder.feed_address(owned.address + len(one) + 6, len(two), owned)
    found = decoder.take()
    assert numbers_of(found) == [0, 1]
    assert [b.size for b in found["value"].buffers()[2:]] == [len(one), len(two)]
    assert found["value"].to_pylist() == [b"v" * 50, b"w" * 50]


def test_a_data_buffer_ends_with_the_last_batch_that_was_taken(ref):
    one = ref.simple([(None, b"v" * 50)] * 3)
    two = ref.simple([(None, b"w" * 50)] * 3, base_offset=3)
    for after in (two[:-1], two[:-1] + b"?"):
        owned = Owned(one + after)
        decoder = ArrowDecoder("t", 0, views=True)
        assert decoder.feed_address(owned.address, len(owned), owned) == len(one)
        (buffer,) = decoder.take()["value"].buffers()[2:]
        assert (buffer.address, buffer.size) == (owned.address, len(one))


def test_offsets_that_do_not_fit_begin_another_data_buffer(ref):
    """Two batches with more than 2 GiB between them, of which no record is wanted."""
    first = ref.simple([(None, b"v" * 50)], base_offset=10)
    last = ref.simple([(None, b"w" * 50)], base_offset=20)
    header = bytearray(ref.simple([(None, b"x")])[:61])
    skipped = (1 << 31) - 64
    struct.pack_into(">i", header, 8, skipped - 12)
    n = len(first) + skipped + len(last)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, n, flags=flags)
    memory[: len(first)] = first
    memory[len(first) : len(first) + 61] = bytes(header)
    memory[n - len(last) :] = last
    decoder = ArrowDecoder("t", 0, start_offset=10, check_crc=False, views=True)
    assert decoder.feed(memory) == n
    found = decoder.take()
    found.validate(full=True)
    assert numbers_of(found) == [0, 1]
    assert [b.size for b in found["value"].buffers()[2:]] == [len(first), len(last)]
    assert found["value"].to_pylist() == [b"v" * 50, b"w" * 50]
    del found
    memory.close()


def test_bytes_outside_of_the_window_are_refused(ref):
    data = ref.simple([(None, b"v" * 50)])
    owned = Owned(data * 3)
    n, middle = len(data), owned.address + len(data)
    decoder = ArrowDecoder("t", 0, views=True)
    for address, length in (
        (middle - 1, n),
        (middle + 1, n),
        (middle, n + 1),
        (middle - n, n),
        (middle + n, n),
        (owned.address, 3 * n),
        (middle, 2**64 - 1),
        (0, n),
        (2**64 - 1, n),
    ):
        decoder.window(middle, n, owned)
        with pytest.raises(ConfigError, match="leave the window"):
            decoder.feed_address(address, length)
        assert decoder.rows == 0
    decoder.window(owned.address, len(owned), owned)
    assert decoder.feed_address(middle, n) == n
    found = decoder.take()
    (buffer,) = found["value"].buffers()[2:]
    assert (buffer.address, buffer.size) == (middle, n)
    decoder.window(owned.address, len(owned), owned)
    decoder.take()
    gone = weakref.ref(owned)
    del owned, found, buffer
    assert gone() is None


def test_memory_without_an_owner_is_refused(ref):
    owned = Owned(ref.simple([(None, b"v" * 50)]))
    decoder = ArrowDecoder("t", 0, views=True)
    with pytest.raises(ConfigError, match="no window declares") as caught:
        decoder.feed_address(owned.address, len(owned))
    assert "owner" in caught.value.hint and decoder.rows == 0
    decoder.feed_address(owned.address, len(owned), owned)
    with pytest.raises(ConfigError, match="no window declares"):
        decoder.feed_address(owned.address, len(owned))
    with pytest.raises(ConfigError, match="without an owner"):
        decoder.window(owned.address, len(owned), None)
    with pytest.raises(ConfigError, match="wraps around"):
        decoder.feed_address(owned.address, 2**64 - 1, owned)
    assert decoder.take().num_rows == 1
    # A copying decoder needs no owner, and keeps none.
    gone = weakref.ref(owned)
    decoder = ArrowDecoder("t", 0)
    assert decoder.feed_address(owned.address, len(owned), owned) == len(owned)
    del owned
    assert gone() is None and decoder.take()["value"].to_pylist() == [b"v" * 50]


# -- targets ---------------------------------------------------------------------------------------


def test_pending_bytes_count_what_views_show(ref):
    rows = [(b"k" * 3, b"x" * 100)] * 1000
    decoder = ArrowDecoder("t", 0, views=True)
    decoder.feed(ref.simple(rows))
    assert decoder.pending_bytes == 1000 * (103 + 16 + 16 + 5 + 4 + 8 + 8 + 4)
    record = ref.record(0, 0, b"k", b"v", [(b"h", b"w" * 30), (b"i", None)])
    decoder = ArrowDecoder("t", 0, views=True, include_headers=True)
    decoder.feed(ref.batch(record, 1))
    assert decoder.pending_bytes == 2 + 16 + 16 + 5 + 4 + 8 + 8 + 4 + 4 + 2 * (4 + 16) + 32
    data = b"".join(ref.simple(rows[:10], base_offset=10 * i) for i in range(20))
    decoder = ArrowDecoder("t", 0, views=True, target_bytes=5000)
    while position := decoder.feed(data):
        data = data[position:]
    assert decoder.full and 5000 <= decoder.pending_bytes < 5000 + 2000
