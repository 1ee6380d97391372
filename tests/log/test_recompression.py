"""Batches that a log keeps in the codec of its topic: what changes, and what does not."""

from __future__ import annotations

import struct
import time

import pytest

from kdirect.format import layout
from kdirect.format.batch import CODEC_NAMES, crc32c, iterate_batches
from kdirect.format.compression import Compressor, Decompressor
from kdirect.log.config import Codec
from kdirect.log.recompression import is_kept, recompressed
from tests.log.conftest import make_batch

CORRUPT, TOO_LARGE, INVALID = 2, 10, 87
CODECS = ("none", *CODEC_NAMES[1:])
KEPT = (
    "base_offset", "last_offset_delta", "base_timestamp", "max_timestamp",
    "producer_id", "producer_epoch", "base_sequence", "records_count",
)  # fmt: skip
HEAD = layout.BATCH_HEADER_BYTES


def sealed(batch: bytes, body: bytes, codec: int) -> bytes:
    """The batch with another body and codec, and a checksum of it."""
    head = bytearray(batch[:HEAD])
    struct.pack_into(">i", head, layout.BATCH_LENGTH, HEAD + len(body) - 12)
    attributes = head[layout.BATCH_ATTRIBUTES + 1] & ~7 | codec
    head[layout.BATCH_ATTRIBUTES + 1] = attributes
    crc = crc32c(bytes(head[layout.BATCH_ATTRIBUTES :]) + body)
    struct.pack_into(">I", head, layout.BATCH_CRC, crc)
    return bytes(head) + body


def in_codec(batch: bytes, name: str) -> bytes:
    tool = Compressor(name)
    return sealed(batch, bytes(tool.run(batch[HEAD:])), tool.codec)


def changed(data: bytes, name: str, level: int | None = None) -> bytes | None:
    out = recompressed(data, Codec(name, level), max_batch_bytes=1 << 20, max_plain_bytes=1 << 22)
    return None if out is None else bytes(out)


@pytest.mark.parametrize("source", CODECS)
@pytest.mark.parametrize("target", CODECS)
def test_from_each_codec_to_each(source: str, target: str) -> None:
    plain = make_batch(40, value_bytes=300, producer_id=7, producer_epoch=2, sequence=5)
    data = in_codec(plain, source) * 2
    assert is_kept(data, Codec(target)) == (source == target)
    out = changed(data, target)
    assert out is not None
    if source == target:
        assert out == data
    found = list(iterate_batches(out))  # with their checksums
    assert len(found) == 2
    for info in found:
        assert info.compression == target
        given = next(iterate_batches(plain))
        for name in KEPT:
            assert getattr(info, name) == getattr(given, name), name
        body = out[info.position + HEAD : info.position + info.size]
        codec = info.attributes & 7
        assert bytes(Decompressor().run(codec, body, 1 << 20) if codec else body) == plain[HEAD:]


@pytest.mark.parametrize(
    ("name", "least", "most"), [("gzip", 1, 9), ("lz4", 1, 12), ("zstd", -50, 19)]
)
def test_a_higher_level_makes_smaller_batches(name: str, least: int, most: int) -> None:
    plain = make_batch(3000, value_bytes=30, fill=b"some words")
    small, large = changed(plain, name, most), changed(plain, name, least)
    assert small is not None and large is not None and len(small) < len(large) < len(plain)


def test_the_kinds_of_batches_stay() -> None:
    batch = make_batch(3, producer_id=1, producer_epoch=0, sequence=0, transactional=True)
    out = changed(batch, "zstd")
    assert out is not None and next(iterate_batches(out)).is_transactional


@pytest.mark.parametrize("name", ["uncompressed", "gzip"])
def test_damage_is_not_hidden_by_a_new_checksum(open_partition, name: str) -> None:
    p = open_partition(compression_type=name)
    good = in_codec(make_batch(5, value_bytes=100), "lz4")
    damaged = bytearray(good)
    damaged[-1] ^= 1
    assert p.append(bytes(damaged)).error == CORRUPT
    broken = sealed(good, b"\xff" * 50, 3)  # a sound checksum of what nobody can decompress
    assert p.append(broken).error == INVALID
    few = sealed(good, bytes(Compressor("lz4").run(make_batch(4)[HEAD:])), 3)
    assert p.append(few).error == INVALID
    assert p.append(sealed(good, good[HEAD:], 5)).error == INVALID
    assert p.append(b"x" * 100).error
    assert p.append(good[:-5]).error
    assert p.log_end_offset == 0
    assert p.append(good).error == 0 and p.log_end_offset == 5


def test_limits_hold_before_and_after(open_partition) -> None:
    p = open_partition(compression_type="uncompressed", max_message_bytes=2000)
    assert p.append(in_codec(make_batch(1, value_bytes=5000), "gzip")).error == TOO_LARGE
    p = open_partition(compression_type="gzip", max_message_bytes=2000)
    assert p.append(make_batch(1, value_bytes=5000)).error == TOO_LARGE
    assert p.append(make_batch(1, value_bytes=1500)).error == 0
    bomb = in_codec(make_batch(1, value_bytes=1 << 20), "zstd")
    p = open_partition(compression_type="gzip", max_plain_batch_bytes=1 << 16)
    assert len(bomb) < 2000 and p.append(bomb).error == INVALID


def test_a_request_of_many_small_batches_stands_for_no_more_than_one_may(open_partition) -> None:
    """Each of them is within the limits; a request of 60 KB stood for gigabytes."""
    bomb = in_codec(make_batch(1, value_bytes=1 << 20), "zstd")
    assert len(bomb) < 300
    limits = {"max_batch_bytes": 2 << 20, "max_plain_bytes": 4 << 20}
    for name in ("none", "gzip"):
        out = recompressed(bomb * 3, Codec(name), **limits)
        assert out is not None and len(list(iterate_batches(out))) == 3
        assert recompressed(bomb * 4, Codec(name), **limits) is None
    out = recompressed(bomb * 3, Codec("none"), **{**limits, "max_batch_bytes": 1 << 20})
    assert out is not None and len(list(iterate_batches(out))) == 1, "the kernel sees the first"
    p = open_partition(
        segment_bytes=8 << 20,
        compression_type="uncompressed",
        max_message_bytes=2 << 20,
        max_plain_batch_bytes=4 << 20,
    )
    assert [p.append(bomb * n).error for n in (4, 3)] == [INVALID, 0]
    assert p.log_end_offset == 3
    # What comes without a codec is as long as it says.
    plain = make_batch(1, value_bytes=1 << 20)
    assert recompressed(plain * 5, Codec("lz4"), **limits) is not None


def test_repeats_of_an_idempotent_producer_are_found(open_partition) -> None:
    p = open_partition(compression_type="zstd")
    batches = [
        make_batch(2, producer_id=9, producer_epoch=0, sequence=2 * i, value_bytes=200)
        for i in range(3)
    ]
    assert [p.append(b).base_offset for b in batches] == [0, 2, 4]
    assert p.append(batches[1]).base_offset == 2 and p.log_end_offset == 6
    stored = [i for b in p.read(0, 1 << 20) for i in iterate_batches(bytes(b))]
    assert [(i.compression, i.producer_id, i.base_sequence) for i in stored] == [
        ("zstd", 9, 0), ("zstd", 9, 2), ("zstd", 9, 4),
    ]  # fmt: skip


def test_the_event_loop_appends_only_what_stays(open_partition) -> None:
    p = open_partition(compression_type="lz4")
    plain = make_batch(2)
    assert p.append(plain).error == 0  # the head is there from here on
    now = int(time.time() * 1000)
    assert p.append_nowait(plain, now) is None and p.log_end_offset == 2
    assert p.append_nowait(in_codec(plain, "lz4"), now).error == 0 and p.log_end_offset == 4
