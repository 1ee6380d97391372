"""Bench rows of the codec: record batches to Arrow and back, beside memcpy and the bare
(de)compressors.

One core.  Records of 110 bytes (100 of value) lie in batches of 16 KiB with CRC.  What is measured
and its limits take turns (A B C A B C ...), and each figure is the median of its turns.  A turn is
a chunk of 8 MiB.  A rate counts the bytes of the record batches before compression.

Time is the thread's CPU time: the work is one thread that never sleeps, and where others use the
core a wall clock's median says how often a turn was interrupted, not how long it took.  The ratio
by the wall clock is kept in the settings.

The limit is memcpy into memory that is warm and used again, because that is how the decoder gets
its memory: blocks return to free lists when Arrow lets them go.  memcpy into fresh memory, page
faults and all, is told beside it.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import random
import statistics
import time
import zlib
from collections.abc import Callable
from typing import Any

import cramjam
import pyarrow as pa
import zstandard
from sides import Figure, figure

from kdirect.format import batch
from kdirect.format.codec import ArrowDecoder, ArrowEncoder

VALUE_BYTES = 100
BATCH_BYTES = 16 << 10
CHUNK_BYTES = 8 << 20  # of records, and of each RecordBatch made of them or made into them
CHUNKS = 5  # different ones, so that together they are more than a cache holds
TIMESTAMP_MS = 1_700_000_000_000
RECORDS = 61  # where the records of a batch begin
VIEWED_BYTES = (16 << 10, 1 << 10, VALUE_BYTES)  # of the values that become views
CODECS = ("gzip", "snappy", "lz4", "zstd")
WARM = "memcpy of the same bytes into warm memory"
FRESH = "memcpy of the same bytes into fresh memory"

_libc = ctypes.CDLL(None)
_libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def noise_values(n: int, seed: int, value_bytes: int = VALUE_BYTES) -> pa.Array:
    """n values of `value_bytes` random bytes."""
    rng = random.Random(seed)
    return pa.array([rng.randbytes(value_bytes) for _ in range(n)], pa.binary())


def json_values(n: int) -> pa.Array:
    """n values of 100 bytes that compress as JSON does."""
    rng = random.Random(2)
    cities = ("Leipzig", "Porto", "Osaka", "Quito", "Accra")
    rows = (
        {
            "id": i,
            "user": rng.randrange(10_000),
            "ts": TIMESTAMP_MS + 13 * i,
            "amount": round(rng.random() * 100, 2),
            "city": rng.choice(cities),
        }
        for i in range(n)
    )
    return pa.array(
        [json.dumps(row).ljust(VALUE_BYTES)[:VALUE_BYTES].encode() for row in rows], pa.binary()
    )


def segment_of(batches: list[Any]) -> bytearray:
    """The batches as they lie in a segment: one behind the other, offsets stamped."""
    out = bytearray()
    offset = 0
    for b in batches:
        data = bytearray(b.data)
        batch.stamp(data, offset, 0)
        offset += b.records_count
        out += data
    return out


class Segment:
    """Record batches as they lie in a segment, and how many rows they hold."""

    def __init__(self, values: pa.Array, keys: pa.Array | None = None, codec: str = "none") -> None:
        self.values, self.keys = values, keys
        self.encoder = ArrowEncoder(batch_bytes=BATCH_BYTES, compression=codec)
        self.batches = self.encode()
        self.data = segment_of(self.batches)
        self.address = ctypes.addressof((ctypes.c_char * len(self.data)).from_buffer(self.data))
        self.rows = len(values)

    def encode(self) -> list[Any]:
        return self.encoder.encode(self.values, self.keys, default_timestamp_ms=TIMESTAMP_MS)

    def decode(self) -> None:
        """Into RecordBatches that are dropped at once."""
        self._take(ArrowDecoder("topic", 3, target_bytes=4 * CHUNK_BYTES))

    def view(self) -> None:
        """The same, with views of the segment instead of copies."""
        self._take(ArrowDecoder("topic", 3, target_bytes=4 * CHUNK_BYTES, views=True))

    def _take(self, decoder: ArrowDecoder) -> None:
        if (
            decoder.feed_address(self.address, len(self.data), self) != len(self.data)
            or decoder.take().num_rows != self.rows
        ):
            raise RuntimeError("rows were lost")


Turns = list[tuple[float, float]]  # CPU seconds, wall seconds


def in_turns(seconds: float, things: list[Any], *functions: Callable[[Any], object]) -> list[Turns]:
    """The turns of each function on one of `things`; they take turns until the time is up, three
    turns at least.

    In every turn each function gets another thing than the others, so that none finds warm what
    another has just read."""
    turns: list[Turns] = [[] for _ in functions]
    for function in functions:
        for thing in things:
            function(thing)
    end = time.perf_counter() + seconds
    turn = 0
    while turn < 3 or time.perf_counter() < end:
        for i, (function, found) in enumerate(zip(functions, turns, strict=True)):
            thing = things[(turn + i * len(things) // len(functions)) % len(things)]
            wall, cpu = time.perf_counter(), time.thread_time()
            function(thing)
            found.append((time.thread_time() - cpu, time.perf_counter() - wall))
        turn += 1
    return turns


def copy_fresh(segment: Segment) -> None:
    memory = mmap.mmap(-1, len(segment.data))
    view = (ctypes.c_char * len(segment.data)).from_buffer(memory)
    _libc.memcpy(ctypes.addressof(view), segment.address, len(segment.data))
    del view
    memory.close()


def decoded_figure(
    row: str, nbytes: int, rows: int, own: Turns, against: str, other: Turns, **settings: Any
) -> Figure:
    """Medians of CPU time; beside them the ratio of the best turns, and the ratio of the medians by
    the wall clock."""
    (cpu, wall), (other_cpu, other_wall) = (
        [statistics.median(t[clock] for t in turns) for clock in (0, 1)] for turns in (own, other)
    )
    settings |= {
        "rows_per_s": rows / cpu,
        "turns": len(own),
        "clock": "thread CPU",
        "ratio_of_best": round(min(other)[0] / min(own)[0], 3),
        "ratio_by_wall": round(other_wall / wall, 3),
        "record_bytes": round(nbytes / rows, 1),
        "batch_bytes": BATCH_BYTES,
        "chunk_bytes": nbytes,
    }
    rate, limit = nbytes / cpu / 1e9, nbytes / other_cpu / 1e9
    return figure(row, rate, "GB/s", against, limit, **settings)


def codec_decode(seconds: float, quick: bool) -> list[Figure]:
    """Record batches to Arrow."""
    return measure("codec-decode", seconds, quick, lambda segment: segment.decode())


def codec_views(seconds: float, quick: bool) -> list[Figure]:
    """Record batches to Arrow's views of them, against a memcpy and the decoder that copies."""
    share = (0.2 if quick else seconds / len(VIEWED_BYTES)) * 0.8
    warm = bytearray(2 * CHUNK_BYTES)
    warm_address = ctypes.addressof((ctypes.c_char * len(warm)).from_buffer(warm))
    out = []
    for value_bytes in VIEWED_BYTES:
        rows = (CHUNK_BYTES // 16 if quick else CHUNK_BYTES) // (value_bytes + 10)
        segments = [Segment(noise_values(rows, seed, value_bytes)) for seed in range(CHUNKS)]
        viewed, copied, decoded = in_turns(
            share,
            segments,
            lambda segment: segment.view(),
            lambda segment: _libc.memcpy(warm_address, segment.address, len(segment.data)),
            lambda segment: segment.decode(),
        )
        nbytes = sum(len(s.data) for s in segments) // CHUNKS
        out += [
            decoded_figure(
                "codec-views", nbytes, rows, viewed, against, other, value_bytes=value_bytes
            )
            for against, other in ((WARM, copied), ("the decoder that copies", decoded))
        ]
    return out


def codec_encode(seconds: float, quick: bool) -> list[Figure]:
    """Arrow to record batches."""
    return measure("codec-encode", seconds, quick, lambda segment: segment.encode())


def measure(
    row: str, seconds: float, quick: bool, work: Callable[[Segment], object]
) -> list[Figure]:
    share = (0.2 if quick else seconds / (2 + 3 + len(CODECS))) * 0.8
    rows = 5_000 if quick else CHUNK_BYTES // 110
    out = []
    warm = bytearray(2 * CHUNK_BYTES)
    warm_address = ctypes.addressof((ctypes.c_char * len(warm)).from_buffer(warm))
    keys = pa.array([b"key-%04d" % (i % 9999) for i in range(rows)], pa.binary())
    for keyed in (False, True):
        segments = [
            Segment(noise_values(rows, seed), keys if keyed else None) for seed in range(CHUNKS)
        ]
        own, copied, copied_fresh = in_turns(
            (2 if keyed else 3) * share,
            segments,
            work,
            lambda segment: _libc.memcpy(warm_address, segment.address, len(segment.data)),
            copy_fresh,
        )
        nbytes = sum(len(s.data) for s in segments) // CHUNKS
        out.append(
            decoded_figure(
                row,
                nbytes,
                rows,
                own,
                WARM,
                copied,
                codec="none",
                keys="8 bytes" if keyed else "none",
            )
        )
        if not keyed:
            out.append(
                decoded_figure(
                    row, nbytes, rows, own, FRESH, copied_fresh, codec="none", keys="none"
                )
            )
    values = json_values(rows // 4)
    plain = Segment(values)
    payloads = [bytes(b.data[RECORDS:]) for b in plain.batches]
    for codec in CODECS:
        segment = Segment(values, None, codec)
        if row == "codec-decode":
            bare = bare_decompression(
                codec,
                [bytes(b.data[RECORDS:]) for b in segment.batches],
                [len(p) for p in payloads],
            )
        else:
            bare = bare_compression(codec, payloads)
        own, other = in_turns(share, [segment], work, bare)
        what = "decompression" if row == "codec-decode" else "compression"
        out.append(
            decoded_figure(
                row,
                len(plain.data),
                len(values),
                own,
                f"bare {codec} {what}",
                other,
                codec=codec,
                keys="none",
            )
        )
    return out


def bare_decompression(
    codec: str, payloads: list[bytes], sizes: list[int]
) -> Callable[[Any], object]:
    """The calls that the decoder itself makes, with the sizes known; each result is dropped before
    the next, as the decoder does."""
    scratch = bytearray(2 * BATCH_BYTES)
    zstd = zstandard.ZstdDecompressor()
    calls: dict[str, Callable[[bytes, int], object]] = {
        "gzip": lambda payload, size: zlib.decompress(payload, 31, size),
        "snappy": lambda payload, size: cramjam.snappy.decompress_raw_into(payload, scratch),
        "lz4": lambda payload, size: cramjam.lz4.decompress_block_into(
            payload, scratch, output_len=size
        ),
        "zstd": lambda payload, size: zstd.decompress(payload, max_output_size=size),
    }
    call = calls[codec]
    if (
        codec == "lz4"
    ):  # one block a frame: 7 bytes of header and 4 of length before it, 4 of end mark behind it
        payloads = [payload[11:-4] for payload in payloads]

    def run(_: Any) -> None:
        for payload, size in zip(payloads, sizes, strict=True):
            call(payload, size)

    return run


def bare_compression(codec: str, payloads: list[bytes]) -> Callable[[Any], object]:
    """The calls that the encoder itself makes, at its level; each result is dropped before the
    next."""
    call: Callable[[bytes], object]
    if codec == "gzip":
        call = lambda payload: zlib.compress(payload, 6, 31)  # noqa: E731
    elif codec == "zstd":
        call = zstandard.ZstdCompressor(level=3).compress
    else:
        call = pa.Codec(codec).compress

    def run(_: Any) -> None:
        for payload in payloads:
            call(payload)

    return run
