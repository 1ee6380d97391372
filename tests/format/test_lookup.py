"""The search for one record of a batch: what a reader of all its records would find."""

from __future__ import annotations

import random

import pytest

from kdirect.errors import (
    BatchTooLargeError,
    CorruptBatchError,
    FormatError,
    UnsupportedFormatError,
)
from kdirect.format.batch import stamp
from kdirect.format.codec import decode_records, encode_records
from kdirect.format.lookup import find_record

T = 1_700_000_000_000
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


def encoded(times, codec="none"):
    return encode_records([(b"k", b"v" * 20, [("h", b"x")], t) for t in times], codec)


@pytest.mark.parametrize("codec", CODECS)
def test_the_first_record_late_enough(seed, codec):
    rng = random.Random(seed)
    times = [T + rng.randrange(1000) for _ in range(200)]
    data = bytearray(encoded(times, codec))
    stamp(data, 5000, 3)
    records = decode_records(bytes(data), "t", 0)[0]
    for _ in range(300):
        wanted, start = T + rng.randrange(-10, 1010), 5000 + rng.randrange(-10, 210)
        expected = next(
            (
                (r.offset, r.timestamp)
                for r in records
                if r.timestamp >= wanted and r.offset >= start
            ),
            None,
        )
        assert find_record(data, "t-0", wanted, start) == expected


def test_append_time_is_the_time_of_all(ref):
    data = ref.simple([(b"k", b"v")] * 3, base_offset=7, attributes=8, max_timestamp=T + 5)
    assert (
        find_record(data, "t-0", T + 5, 8) == (8, T + 5) and find_record(data, "t-0", T + 6) is None
    )


def test_markers_and_what_compaction_emptied_have_no_records(ref):
    marker = ref.batch(
        ref.record(0, 0, b"\0\0\0\1", b"\0\0\0\0\0\0"), 1, attributes=0x30, max_timestamp=T
    )
    emptied = ref.batch(b"", 0, last_offset_delta=4, max_timestamp=T)
    assert find_record(marker, "t-0", 0) is find_record(emptied, "t-0", 0) is None


@pytest.mark.parametrize("codec", CODECS)
def test_damage_is_a_declared_error(seed, codec, ref):
    rng = random.Random(seed)
    good = encoded([T + i for i in range(50)], codec)
    for _ in range(300):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.1:
            del data[rng.randrange(len(data)) :]
        elif rng.random() < 0.9:
            data = bytearray(ref.fix_crc(bytes(data)))
        try:
            find_record(data, "t-0 offset 5", T + 25)
        except FormatError as e:
            assert "t-0 offset 5" in str(e)


def test_errors_name_the_batch(ref):
    with pytest.raises(CorruptBatchError, match="at t-0 offset 5 "):
        find_record(encoded([T])[:-1], "t-0 offset 5", 0)
    with pytest.raises(UnsupportedFormatError, match="at t-0 has the unknown codec 6"):
        find_record(ref.simple([(b"k", b"v")], attributes=6), "t-0", 0)
    with pytest.raises(CorruptBatchError, match="t-0"):
        find_record(
            encode_records([(None, bytes(1 << 20), None, T)], "zstd"),
            "t-0",
            0,
            max_decompressed_bytes=1000,
        )
    with pytest.raises(CorruptBatchError, match="at t-0: "):
        find_record(ref.batch(b"\x10\0\0", 1), "t-0", T + 1)


@pytest.mark.parametrize("codec", CODECS)
def test_records_longer_than_a_piece_are_passed_by_their_heads(codec):
    """Small and long ones in turn: some lie in one piece, some at an edge, some over several."""
    sizes = [10, 3 << 20, 20, 300_000, 1 << 20, (1 << 20) + 1, 5, 5 << 20, 0]
    data = encode_records([(None, bytes(n), None, T + i) for i, n in enumerate(sizes)], codec)
    for i in range(len(sizes)):
        assert find_record(data, "t-0", T + i) == (i, T + i)
    assert find_record(data, "t-0", T + len(sizes)) is None


@pytest.mark.parametrize("codec", CODECS[1:])
def test_the_search_ends_with_the_record_that_it_finds(codec):
    """What is behind it is not decompressed: the limit does not matter to it."""
    data = encode_records([(None, b"first", None, T), (None, bytes(9 << 20), None, T + 1)], codec)
    if codec not in ("zstd", "snappy"):  # which say at their head how much they stand for
        assert find_record(data, "t-0", T, max_decompressed_bytes=5 << 20) == (0, T)
    with pytest.raises(
        BatchTooLargeError, match=r"at t-0: .*more than 5242880 bytes; raise .*max\.batch\.bytes"
    ):
        find_record(data, "t-0", T + 2, max_decompressed_bytes=5 << 20)
