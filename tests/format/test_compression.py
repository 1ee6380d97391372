"""The codecs by themselves: framings of other writers, limits, and broken data."""

from __future__ import annotations

import gzip
import random
import resource
import struct
import zlib

import pyarrow as pa
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kdirect.errors import BatchTooLargeError, CorruptBatchError, FormatError
from kdirect.format.codec import ArrowDecoder, decode_records, encode_records
from kdirect.format.compression import Compressor, Decompressor, codec_of

NAMES = ("gzip", "snappy", "lz4", "zstd")
SIZES = (0, 1, 100, 65_536, 65_537, 300_000)


def sample(n: int, seed: int = 7) -> bytes:
    return (b"some words again and again " * (n // 40 + 1))[: n // 2] + random.Random(
        seed
    ).randbytes(n - n // 2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", SIZES)
def test_round_trip_and_exact_limit(name, n):
    data, codec = sample(n), codec_of(name)
    packed = bytes(Compressor(name).run(data))
    tool = Decompressor()
    assert bytes(tool.run(codec, packed, n)) == bytes(tool.run(codec, packed, 1 << 30)) == data
    if n:
        with pytest.raises(FormatError, match=f"{name} data"):
            tool.run(codec, packed, n - 1)


@pytest.mark.parametrize("name", NAMES)
def test_truncations_and_flips(name, seed):
    """Broken data is refused or, where the format has no checksum, stays within the limit."""
    rng = random.Random(seed)
    data, codec, tool = sample(3000), codec_of(name), Decompressor()
    packed = bytes(Compressor(name).run(data))
    for n in [*range(40), *range(40, len(packed), 37)]:
        with pytest.raises(FormatError):
            tool.run(codec, packed[:n], 1 << 20)
    for _ in range(400):
        bad = bytearray(packed)
        for _ in range(rng.randrange(1, 4)):
            bad[rng.randrange(len(bad))] = rng.randrange(256)
        try:
            assert len(memoryview(tool.run(codec, bytes(bad), 5000))) <= 5000
        except FormatError:
            pass


@given(
    st.sampled_from(NAMES),
    st.binary(max_size=200),
    st.sampled_from(
        [b"", b"\x04\x22\x4d\x18", b"\x28\xb5\x2f\xfd", b"\x1f\x8b\x08\x00", b"\x82SNAPPY\0"]
    ),
)
def test_arbitrary_bytes(name, data, head):
    try:
        assert len(memoryview(Decompressor().run(codec_of(name), head + data, 10_000))) <= 10_000
    except FormatError:
        pass


def test_lz4_frames_are_such_that_java_reads_them():
    for n in SIZES[1:]:
        frame = bytes(Compressor("lz4").run(sample(n)))
        assert frame[:4] == b"\x04\x22\x4d\x18"
        assert frame[4] & 0xE0 == 0x60, "version 1, independent blocks"
        position, total = 7, 0
        while size := struct.unpack_from("<I", frame, position)[0]:
            position += 4 + (size & 0x7FFFFFFF)
            total += 1
        assert position + 4 == len(frame) and total == -(-n // 65_536)


def test_lz4_frames_with_everything_in_them():
    linked = pa.Codec("lz4").compress(sample(300_000), asbytes=True)
    assert linked[4] & 0x20 == 0, "the library links blocks; should it stop, our own framing can go"
    assert bytes(Decompressor().run(3, linked + b"ignored, as Kafka does", 1 << 20)) == sample(
        300_000
    )
    # content size and block checksums move the blocks; the header's own checksum is then wrong,
    # which only the library can tell
    with pytest.raises(FormatError, match="lz4 data is broken"):
        Decompressor().run(3, linked[:4] + bytes([linked[4] | 8]) + linked[5:], 1 << 20)


def test_snappy_as_java_writes_it():
    data = sample(200_000)
    raw = pa.Codec("snappy")
    chunks = [raw.compress(data[i : i + 32_768], asbytes=True) for i in range(0, len(data), 32_768)]
    framed = (
        b"\x82SNAPPY\0"
        + struct.pack(">ii", 1, 1)
        + b"".join(struct.pack(">i", len(c)) + c for c in chunks)
    )
    assert bytes(Decompressor().run(2, framed, len(data))) == data
    with pytest.raises(FormatError, match="more than"):
        Decompressor().run(2, framed, len(data) - 1)
    with pytest.raises(FormatError, match="broken"):
        Decompressor().run(2, framed[:-1], 1 << 20)
    assert bytes(Decompressor().run(2, framed[:16], 10)) == b""


def test_zstd_frames_with_and_without_content_size():
    for n in SIZES:
        data = sample(n)
        for size in (False, True):
            for checksum in (False, True):
                packed = zstandard.ZstdCompressor(
                    level=5, write_content_size=size, write_checksum=checksum
                ).compress(data)
                assert Decompressor().run(4, packed, n) == data
    several = (
        zstandard.compress(b"one")
        + struct.pack("<II", 0x184D2A53, 3)
        + b"skp"
        + zstandard.compress(b"two")
    )
    assert Decompressor().run(4, several, 6) == b"onetwo"
    with pytest.raises(FormatError, match="more than 5"):
        Decompressor().run(4, several, 5)
    stream = zstandard.ZstdCompressor().compressobj()
    pieces = (
        b"".join(
            stream.compress(b"%d" % i) + stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
            for i in range(100)
        )
        + stream.flush()
    )
    assert Decompressor().run(4, pieces, 190) == b"".join(b"%d" % i for i in range(100))


def test_gzip_members_may_follow_one_another():
    assert Decompressor().run(1, gzip.compress(b"one") + gzip.compress(b"two"), 6) == b"onetwo"
    with pytest.raises(FormatError):
        Decompressor().run(1, zlib.compress(b"not gzip"), 100)


def bombs() -> list[tuple[str, bytes]]:
    rle = (
        b"".join(struct.pack("<I", (128 << 10) << 3 | 1 << 1)[:3] + b"x" for _ in range(8191))
        + struct.pack("<I", (128 << 10) << 3 | 3)[:3]
        + b"x"
    )
    content = struct.pack("<Q", 1 << 62)
    member = zlib.compressobj(9, zlib.DEFLATED, 31)
    return [
        ("gzip", b"".join(member.compress(bytes(1 << 20)) for _ in range(200)) + member.flush()),
        ("snappy", b"\xff\xff\xff\xff\x0f" + b"\x00" * 50),
        ("snappy", b"\x80\x80\x80\x40" + b"\x00a" + b"\xfe\x01\x00" * (5 << 20)),
        (
            "lz4",
            b"\x04\x22\x4d\x18\x60\x70\x73"
            + struct.pack("<I", (1 << 20) + 10)
            + b"\x1fa\x01\0"
            + b"\xff" * (1 << 20)
            + b"\0" * 6
            + b"\0\0\0\0",
        ),
        ("zstd", b"\x28\xb5\x2f\xfd\x00\x58" + rle),
        ("zstd", b"\x28\xb5\x2f\xfd\xe0" + content + b"\x01\x00\x00"),
    ]


@pytest.mark.parametrize(
    ("name", "bomb"), bombs(), ids=lambda x: x if isinstance(x, str) else str(len(x))
)
def test_bombs_are_refused_before_they_burst(ref, name, bomb):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FormatError):
        Decompressor().run(codec_of(name), bomb, 8 << 20)
    data = ref.batch(bomb, 1, attributes=codec_of(name))
    for read in (
        ArrowDecoder("t", 3, max_decompressed_bytes=8 << 20).feed,
        lambda d: decode_records(d, "t", 3, max_decompressed_bytes=8 << 20),
    ):
        with pytest.raises(CorruptBatchError, match="t-3: record batch at offset 0"):
            read(data)
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        < (60 << 10) + 5 * len(bomb) // 1024
    )


def test_the_decoder_s_limit_names_the_remedy():
    data = encode_records([(None, b"x" * 100_000, None, 0)], "zstd")
    with pytest.raises(
        CorruptBatchError, match="more than 5000 bytes; raise max_decompressed_bytes"
    ):
        ArrowDecoder("t", 0, max_decompressed_bytes=5000).feed(data)
    with pytest.raises(CorruptBatchError, match="zstd data is broken"):
        bad = data[:61] + b"\0" + data[62:]
        ArrowDecoder("t", 0, check_crc=False).feed(bad)


def together(pieces) -> bytes:
    return b"".join(bytes(x) for x in pieces)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [*SIZES, 3_000_000])
def test_pieces_are_the_whole_and_end_at_the_limit(name, n):
    data, codec, tool = sample(n), codec_of(name), Decompressor()
    packed = bytes(Compressor(name).run(data))
    assert together(tool.pieces(codec, packed, n)) == data
    if n:
        with pytest.raises(
            BatchTooLargeError, match=f"{name} data decompresses to more than {n - 1} bytes"
        ):
            together(tool.pieces(codec, packed, n - 1))


@pytest.mark.parametrize("name", NAMES)
def test_pieces_of_broken_data_are_refused_or_stay_within_the_limit(name, seed):
    rng = random.Random(seed)
    data, codec, tool = sample(3000), codec_of(name), Decompressor()
    packed = bytes(Compressor(name).run(data))
    for n in [*range(40), *range(40, len(packed), 37)]:
        with pytest.raises(FormatError):
            together(tool.pieces(codec, packed[:n], 1 << 20))
    for _ in range(400):
        bad = bytearray(packed)
        for _ in range(rng.randrange(1, 4)):
            bad[rng.randrange(len(bad))] = rng.randrange(256)
        try:
            assert len(together(tool.pieces(codec, bytes(bad), 5000))) <= 5000
        except FormatError:
            pass


def test_pieces_of_other_writers_framings():
    data, raw, tool = sample(300_000), pa.Codec("snappy"), Decompressor()
    chunks = [raw.compress(data[i : i + 32_768], asbytes=True) for i in range(0, len(data), 32_768)]
    framed = (
        b"\x82SNAPPY\0"
        + struct.pack(">ii", 1, 1)
        + b"".join(struct.pack(">i", len(c)) + c for c in chunks)
    )
    assert [len(x) for x in tool.pieces(2, framed, len(data))][:2] == [32_768, 32_768]
    assert together(tool.pieces(2, framed, len(data))) == data
    assert (
        together(tool.pieces(3, pa.Codec("lz4").compress(data, asbytes=True), len(data))) == data
    ), "linked blocks"
    for size in (False, True):
        frames = [
            zstandard.ZstdCompressor(level=x, write_content_size=size).compress(data)
            for x in (1, 22)
        ]
        assert (
            together(
                tool.pieces(
                    4, struct.pack("<II", 0x184D2A53, 3) + b"skp" + b"".join(frames), 600_000
                )
            )
            == 2 * data
        )
    members = (
        gzip.compress(b"one") * 20_000
    )  # quadratic, if what follows a member were copied whole each time
    assert (
        together(tool.pieces(1, members, 60_000))
        == bytes(tool.run(1, members, 60_000))
        == b"one" * 20_000
    )


def test_a_zstd_frame_that_states_more_than_its_blocks_hold_is_broken():
    """The library would allocate what the frame states."""
    frame = (
        b"\x28\xb5\x2f\xfd\xa0"
        + struct.pack("<I", 60 << 20)
        + struct.pack("<I", 5 << 3 | 1)[:3]
        + b"hello"
    )
    for read in (Decompressor().run, lambda *a: together(Decompressor().pieces(*a))):
        with pytest.raises(FormatError, match="zstd data is broken"):
            read(4, frame, 64 << 20)
