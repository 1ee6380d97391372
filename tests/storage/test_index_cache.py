"""Indexes of remote segments in files: what a restart finds, what damage does, and what is kept."""

from __future__ import annotations

import os
import random
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from kdirect.format.ids import encode_id
from kdirect.format.remote_metadata import RemoteSegment
from kdirect.storage.index_cache import IndexCache
from tests.log.conftest import make_batch
from tests.storage.tiered import Tiers, got, read

SUFFIXES = (".index", ".sums", ".timeindex", ".txnindex")


@pytest.fixture
def segments(tiers: Tiers, open_partition: Callable) -> list[RemoteSegment]:
    p = open_partition(segment_bytes=16 << 10, index_interval_bytes=500)
    while len(p.segments) < 6:
        assert p.append(make_batch(3, value_bytes=100)).error == 0
    return tiers.add_sealed(p)


def tails(tiers: Tiers) -> int:
    """How many requests were for indexes."""
    return sum(at > 0 for _, at, _ in tiers.handler.gets)


def files(tiers: Tiers) -> list[Path]:
    return sorted((tiers.cache_directory).iterdir())


def read_all(tiers: Tiers, segments: list[RemoteSegment]) -> None:
    reader = tiers.reader()
    for s in segments:
        offset = s.end_offset - 1
        assert read(reader, tiers, offset, 1).next == s.end_offset
    reader.close()


def test_kafkas_names(tiers: Tiers, segments: list[RemoteSegment]) -> None:
    read_all(tiers, segments)
    assert [f.name for f in files(tiers)] == sorted(
        f"{s.base_offset}_{encode_id(s.segment_id)}{suffix}"
        for s in segments
        for suffix in SUFFIXES
    )
    for s in segments:
        data = tiers.path(s).read_bytes()
        index = next(f for f in files(tiers) if f.name.startswith(f"{s.base_offset}_"))
        assert index.suffix == ".index" and data[s.size :].startswith(index.read_bytes())


def test_a_restart_asks_for_nothing(tiers: Tiers, segments: list[RemoteSegment]) -> None:
    read_all(tiers, segments)
    assert tails(tiers) == len(segments)
    (tiers.cache_directory / "somebody-elses.txt").write_text("left alone")
    half = f"{7}_{encode_id(uuid.uuid4())}"
    for suffix in (".index", ".timeindex.tmp"):
        (tiers.cache_directory / (half + suffix)).write_bytes(b"x")
    read_all(tiers, segments)
    assert tails(tiers) == len(segments)
    assert len(files(tiers)) == 4 * len(segments) + 1


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("what", ["flipped", "cut", "longer", "missing", "another"])
def test_damaged_files_are_fetched_anew(
    tiers: Tiers, segments: list[RemoteSegment], suffix: str, what: str, seed: int
) -> None:
    read_all(tiers, segments)
    before = {f.name: f.read_bytes() for f in files(tiers)}
    rng = random.Random(seed)
    victim = segments[2]
    stem = f"{victim.base_offset}_{encode_id(victim.segment_id)}"
    path = tiers.cache_directory / (stem + suffix)
    data = bytearray(path.read_bytes())
    if what == "missing":
        path.unlink()
    elif what == "another":
        other = segments[3]
        name = f"{other.base_offset}_{encode_id(other.segment_id)}{suffix}"
        shutil.copy(path.with_name(name), path)
    elif what == "longer":
        path.write_bytes(data + bytes(12))
    elif data:
        # Of an index the last bit, which leaves it as sane as it was.
        at = rng.randrange(len(data)) if what == "cut" else len(data) - 1
        data[at] ^= 1
        path.write_bytes(data if what == "flipped" else data[:at])
    harmless = path.exists() and path.read_bytes() == before[path.name]
    count = tails(tiers)
    read_all(tiers, segments)
    assert tails(tiers) == count + (not harmless)
    assert {f.name: f.read_bytes() for f in files(tiers)} == before


def test_all_files_swapped_with_those_of_another_segment(
    tiers: Tiers, segments: list[RemoteSegment]
) -> None:
    """Each file fits its sums, and they tell of another segment."""
    read_all(tiers, segments)
    first, second = (
        tiers.cache_directory / f"{s.base_offset}_{encode_id(s.segment_id)}" for s in segments[1:3]
    )
    for suffix in SUFFIXES:
        shutil.copy(f"{second}{suffix}", f"{first}{suffix}")
    count = tails(tiers)
    read_all(tiers, segments)
    assert tails(tiers) == count + 1


def test_the_bound_holds_and_the_oldest_go(tiers: Tiers, segments: list[RemoteSegment]) -> None:
    read_all(tiers, segments)
    size = sum(f.stat().st_size for f in files(tiers))
    bound = size * 3 // 5
    # A restart with less room keeps what was used last.
    for i, s in enumerate(segments):
        for f in files(tiers):
            if encode_id(s.segment_id) in f.name:
                os.utime(f, (1000 + i, 1000 + i))
    cache = IndexCache(tiers.cache_directory, bound)
    assert sum(f.stat().st_size for f in files(tiers)) <= bound
    kept = [s.segment_id in cache for s in segments]
    assert kept == sorted(kept) and 2 <= sum(kept) < 5
    reader = tiers.reader(index_bytes=bound)
    for _ in range(2):
        for s in segments:
            read(reader, tiers, s.base_offset, 1)
            assert sum(f.stat().st_size for f in files(tiers)) <= bound
            assert reader.statistics()["remote_index_bytes"] <= bound
    assert tails(tiers) > 2 * len(segments)


def test_segments_that_are_gone(tiers: Tiers, segments: list[RemoteSegment]) -> None:
    read_all(tiers, segments)
    cache = IndexCache(tiers.cache_directory, 1 << 30)

    def never() -> None:
        raise AssertionError("it is here")

    held = [cache.get(s, never) for s in segments]
    expected = [x.locate(s.end_offset - 1) for x, s in zip(held, segments, strict=True)]
    assert all(position > 0 for position, _ in expected)
    cache.remove(segments[0].segment_id)
    cache.retain({segments[3].segment_id})
    assert len(files(tiers)) == 4
    assert [s.segment_id in cache for s in segments] == [s is segments[3] for s in segments]
    assert cache.statistics()["remote_index_bytes"] == sum(f.stat().st_size for f in files(tiers))
    # Who has them goes on.
    again = [x.locate(s.end_offset - 1) for x, s in zip(held, segments, strict=True)]
    assert again == expected
    assert [x.border_after(0) for x in held] > [0] * len(held)


def test_a_directory_that_takes_no_files(tiers: Tiers, segments: list[RemoteSegment]) -> None:
    tiers.cache_directory.write_text("a file")
    reader = tiers.reader()
    for s in segments[:3]:
        views = reader.read(tiers.segments.at, s.base_offset, 1 << 20).result(30)
        assert got(views).data == tiers.path(s).read_bytes()[: s.size]
    read(reader, tiers, segments[0].base_offset, 1)
    gets = list(tiers.handler.gets)  # some come from reading ahead
    assert len(gets) == len(set(gets))
