"""The frame of a batch: CRC, header, stamps, and the batch of one record."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.record import MemoryRecords
from kafka.record.util import calc_crc32c

from kdirect.errors import CorruptBatchError, UnsupportedFormatError
from kdirect.format import batch

SMALL = (b"k", b"value")


def test_crc_of_the_published_check_value():
    assert batch.crc32c(b"123456789") == 0xE3069283
    assert batch.crc32c(b"") == 0
    assert batch.crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4
    assert batch.crc32c(b"\xff" * 32) == 0x62A8AB43


@pytest.mark.parametrize("name", batch.crc32c_implementations())
def test_every_crc_implementation_agrees_at_every_length_and_seam(name: str, seed: int):
    rng = random.Random(seed)
    for n in [*range(1200), *(rng.randrange(80_000) for _ in range(60))]:
        data = rng.randbytes(n + 3)[3:]
        cut = rng.randrange(n + 1)
        whole = batch.crc32c_by(name, data)
        assert whole == batch.crc32c_by("table", data) == batch.crc32c(data), n
        assert whole == batch.crc32c_by(name, data[cut:], batch.crc32c_by(name, data[:cut])), (
            n,
            cut,
        )
    assert batch.crc32c_by(name, data) == calc_crc32c(data)


def test_an_unknown_crc_implementation_is_named():
    with pytest.raises(UnsupportedFormatError, match="'abacus'"):
        batch.crc32c_by("abacus", b"")


def test_header_fields(ref):
    data = ref.simple(
        [SMALL] * 3,
        base_offset=7,
        leader_epoch=5,
        attributes=0x10,
        base_timestamp=100,
        max_timestamp=102,
        producer_id=9,
        producer_epoch=2,
        base_sequence=40,
    )
    info = batch.check_batch_bytes(data + b"whatever follows")
    assert (info.position, info.size, info.base_offset, info.leader_epoch) == (0, len(data), 7, 5)
    assert (info.attributes, info.last_offset_delta, info.records_count, info.next_offset) == (
        0x10,
        2,
        3,
        10,
    )
    assert (info.base_timestamp, info.max_timestamp) == (100, 102)
    assert (info.producer_id, info.producer_epoch, info.base_sequence) == (9, 2, 40)
    assert (info.compression, info.timestamp_type, info.is_transactional, info.is_control) == (
        "none",
        0,
        True,
        False,
    )


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"length": 48}, CorruptBatchError, "impossible length"),
        ({"length": -1}, CorruptBatchError, "impossible length"),
        ({"length": 2**31 - 1}, CorruptBatchError, "impossible length"),
        ({"length": 5000}, CorruptBatchError, "cut off"),
        ({"magic": 1}, UnsupportedFormatError, "before 0.11"),
        ({"magic": 0}, UnsupportedFormatError, "old magic 0"),
        ({"magic": 3}, UnsupportedFormatError, "unknown magic 3"),
        ({"crc": 1}, CorruptBatchError, "CRC"),
        ({"last_offset_delta": 3}, CorruptBatchError, "records count"),
        ({"last_offset_delta": -1}, CorruptBatchError, "records count"),
        ({"attributes": 5}, CorruptBatchError, "attributes"),
        ({"attributes": 0x100}, CorruptBatchError, "attributes"),
    ],
)
def test_what_a_produced_batch_may_not_be(ref, fields, error, words):
    with pytest.raises(error, match=words) as caught:
        batch.check_batch_bytes(ref.simple([SMALL] * 3, **fields))
    assert caught.value.hint


def test_a_produced_batch_needs_a_record(ref):
    with pytest.raises(CorruptBatchError, match="records count"):
        batch.check_batch_bytes(ref.batch(b"", 0))


def test_every_flipped_bit_is_noticed(ref):
    data = ref.simple([SMALL] * 2)
    for position in range(21, len(data)):
        for bit in range(8):
            bad = bytearray(data)
            bad[position] ^= 1 << bit
            with pytest.raises(CorruptBatchError, match="CRC"):
                batch.check_batch_bytes(bad)


def test_every_truncation_is_cut_off(ref):
    data = ref.simple([SMALL] * 2)
    for n in range(len(data)):
        with pytest.raises(CorruptBatchError, match="cut off"):
            batch.check_batch_bytes(data[:n])


def test_stamps_do_not_touch_the_crc_unless_they_must(ref):
    data = bytearray(ref.simple([SMALL] * 2))
    crc = bytes(data[17:21])
    batch.stamp(data, 1 << 40, 77)
    info = batch.check_batch_bytes(data)
    assert (info.base_offset, info.leader_epoch, bytes(data[17:21])) == (1 << 40, 77, crc)
    batch.stamp(data, 5, 1, log_append_time=1_800_000_000_000)
    info = batch.check_batch_bytes(data)
    assert (info.timestamp_type, info.max_timestamp, info.base_offset) == (1, 1_800_000_000_000, 5)
    assert bytes(data[17:21]) != crc


def test_iterate_batches_leaves_a_partial_tail_and_names_the_position(ref):
    one, two = ref.simple([SMALL] * 2), ref.simple([SMALL], base_offset=2)
    for tail in range(len(one)):
        assert [i.position for i in batch.iterate_batches(one + two + one[:tail])] == [0, len(one)]
    broken = bytearray(one + two + one)
    broken[len(one) + 30] ^= 1
    found = batch.iterate_batches(broken)
    assert next(found).size == len(one)
    with pytest.raises(CorruptBatchError, match=f"position {len(one)}"):
        next(found)
    assert len(list(batch.iterate_batches(broken, check_crc=False))) == 3
    assert list(batch.iterate_batches(b"")) == []


def test_iterate_batches_takes_what_compaction_leaves(ref):
    thinned = ref.batch(ref.record(3, 0, None, b"x"), 1, last_offset_delta=9)
    empty = ref.batch(b"", 0, base_offset=10, last_offset_delta=4)
    assert [(i.records_count, i.next_offset) for i in batch.iterate_batches(thinned + empty)] == [
        (1, 10),
        (0, 15),
    ]


@given(
    key=st.none() | st.binary(max_size=300),
    value=st.none() | st.binary(max_size=300),
    timestamp=st.integers(-(2**63), 2**63 - 1),
)
def test_a_batch_of_one_record(key, value, timestamp):
    data = batch.encode_single_bytes(value, key, timestamp)
    assert batch.check_batch_bytes(data).size == len(data)
    (found,) = list(MemoryRecords(data).next_batch())
    assert (found.key, found.value, found.timestamp, found.offset, found.headers) == (
        key,
        value,
        timestamp,
        0,
        [],
    )


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_batch_or_a_declared_error(data):
    try:
        assert batch.check_batch_bytes(data).size <= len(data)
    except (CorruptBatchError, UnsupportedFormatError):
        pass


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 255)), max_size=6), st.integers(0, 90))
def test_header_mutations_are_a_batch_or_a_declared_error(ref, edits, cut):
    data = bytearray(ref.simple([SMALL] * 2))
    for position, byte in edits:
        data[position] = byte
    data = bytes(data)[:cut]
    if len(data) >= 61:
        data = ref.fix_crc(data)
    for guess in (data, data[: cut // 2]):
        try:
            list(batch.iterate_batches(guess))
            info = batch.check_batch_bytes(guess)
            assert info.records_count == info.last_offset_delta + 1 >= 1
        except (CorruptBatchError, UnsupportedFormatError):
            pass


def test_length_field_of_every_value_near_the_borders(ref):
    data = ref.simple([SMALL])
    for length in (*range(-2, 120), 2**31 - 13, 2**31 - 12, 2**31 - 1, -(2**31)):
        bad = data[:8] + struct.pack(">i", length) + data[12:]
        if length == len(data) - 12:
            assert batch.check_batch_bytes(bad)
        else:
            with pytest.raises(CorruptBatchError):
                batch.check_batch_bytes(bad)
