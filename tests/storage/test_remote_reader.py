"""What a reader of remote segments brings is what the log has, whatever the size of batches and
reads; what it asks of the store, and what it does when the store or an object fails."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from kdirect import metrics
from kdirect.errors import (
    ClosedError,
    CorruptObjectError,
    ObjectNotFoundError,
    OffsetOutOfRangeError,
    RemoteStorageError,
)
from kdirect.format.batch import iterate_batches
from kdirect.format.segment_files import AbortedTransaction
from kdirect.log.partition import Partition
from kdirect.storage.chunk_cache import CHUNK_BYTES
from tests.log.conftest import make_batch, stamped
from tests.storage.tiered import NOW, Tiers, got, large_batch, read

Open = Callable[..., Partition]


def local(p: Partition, offset: int, max_bytes: int) -> bytes:
    return b"".join(p.read(offset, max_bytes))


def filled(open_partition: Open, rng: random.Random, batches: int, **config: Any) -> Partition:
    p = open_partition(**{"segment_bytes": 32 << 10, "index_interval_bytes": 1000, **config})
    for _ in range(batches):
        times = [NOW + rng.randrange(-5000, 5000) for _ in range(rng.randrange(1, 5))]
        data = make_batch(len(times), value_bytes=rng.randrange(300), timestamps=times)
        assert p.append(data).error == 0
    return p


def test_every_offset_is_what_the_log_has(tiers: Tiers, open_partition: Open, seed: int) -> None:
    rng = random.Random(seed)
    p = filled(open_partition, rng, 500)
    segments = tiers.add_sealed(p)
    assert len(segments) > 3
    reader = tiers.reader()
    for offset in range(segments[-1].end_offset):
        limit = rng.choice([1, 200, 1000, 10_000])
        found = read(reader, tiers, offset, limit)
        assert found.first <= offset < found.next
        # The log's own answer goes on in the next segment.
        assert local(p, offset, limit).startswith(found.data)
        end = tiers.segments.at(offset).end_offset
        assert found.next == end or len(found.data) + 1500 > limit
    total = b""
    offset = 0
    while offset < segments[-1].end_offset:
        found = read(reader, tiers, offset, rng.randrange(1, 50_000))
        assert found.first == offset
        offset = found.next
        total += found.data
    assert local(p, 0, len(total)) == total
    # Each tail and each chunk came once.
    assert len(tiers.handler.gets) == 2 * len(segments)
    counts = reader.statistics()
    assert counts["remote_get_requests"] == len(tiers.handler.gets)
    assert counts["remote_get_bytes"] == sum(n for _, _, n in tiers.handler.gets)
    assert counts["remote_index_misses"] == len(segments)
    assert counts["remote_fetch_bytes"] > len(total)
    assert set(counts) <= metrics.names("storage")


def big_log(rng: random.Random, sizes: list[int], base: int = 0) -> tuple[bytes, int]:
    out = []
    for size in sizes:
        out.append(large_batch(2, size // 2, base))
        base += 2
    return b"".join(out), base


def test_batches_that_lie_in_several_chunks(tiers: Tiers, seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([100, 5000, 400_000, CHUNK_BYTES, 3 * CHUNK_BYTES]) for _ in range(25)]
    log, end = big_log(rng, sizes)
    # Borders within a header, too: a batch that begins a few bytes before the end of a chunk.
    for left in (1, 11, 12, 13, 60, 61, 62):
        gap = -len(log) % CHUNK_BYTES - left
        gap += CHUNK_BYTES if gap < 1000 else 0
        log += large_batch(1, 2 * gap - len(large_batch(1, gap, 0)), end)
        end += 1
        assert -len(log) % CHUNK_BYTES == left
        log += large_batch(1, 300, end)
        end += 1
    tiers.add(log, 0, end)
    batches = list(iterate_batches(log))
    reader = tiers.reader()
    for info in batches:
        at, after = info.position, info.position + info.size
        for limit in (1, info.size - 1, info.size):
            found = read(reader, tiers, info.next_offset - 1, limit)
            assert found.data == log[at:after]
        if after < len(log):
            none = reader.read(tiers.segments.at_or_after, info.base_offset, info.size - 1,
                               at_least_one=False)  # fmt: skip
            assert none.result(30) == []
        found = read(reader, tiers, info.base_offset, 4 * CHUNK_BYTES, at_least_one=False)
        assert log[at:].startswith(found.data)
        follows = next((b for b in batches if b.base_offset == found.next), None)
        assert follows is None or len(found.data) + follows.size > 4 * CHUNK_BYTES
    whole = got(reader.read(tiers.segments.at_or_after, 0, len(log)).result(30))
    assert whole.data == log


@pytest.mark.parametrize("chunk_bytes", [0, CHUNK_BYTES, 2 * CHUNK_BYTES])
def test_a_cache_that_is_too_small(tiers: Tiers, seed: int, chunk_bytes: int) -> None:
    log, end = big_log(random.Random(seed), [300_000] * 20)
    tiers.add(log, 0, end)
    reader = tiers.reader(chunk_bytes=chunk_bytes, index_bytes=0)
    offset, total = 0, b""
    while offset < end:
        found = read(reader, tiers, offset, 900_000)
        total += found.data
        offset = found.next
        assert reader.statistics()["remote_chunk_bytes"] <= chunk_bytes
    assert total == log
    assert list(tiers.cache_directory.rglob("*.*")) == []


def compacted(rng: random.Random, base: int, count: int) -> tuple[bytes, int, dict[int, int]]:
    """A log as Kafka's cleaner leaves it, its end, and for each offset the base offset of the batch
    that a read of it begins with; -1: none."""
    out, gone, starts, offset = [], [], {}, base
    for i in range(count):
        records = rng.randrange(1, 4)
        if rng.random() < 0.5 or i >= count - 2:
            gone += range(offset, offset + records)
        else:
            out.append(stamped(make_batch(records, timestamp_ms=NOW), offset))
            starts |= dict.fromkeys([*gone, *range(offset, offset + records)], offset)
            gone = []
        offset += records
    starts |= dict.fromkeys(gone, -1)
    return b"".join(out), offset, starts


def test_offsets_that_compaction_has_removed(tiers: Tiers, seed: int) -> None:
    rng = random.Random(seed)
    expected: dict[int, int] = {}
    base = 0
    for _ in range(3):
        log, end, starts = compacted(rng, base, 60)
        index, position, since = b"", 0, 0
        for info in iterate_batches(log):
            if since > 200:
                index += (info.next_offset - 1 - base).to_bytes(4, "big")
                index += info.position.to_bytes(4, "big")
                since = 0
            since += info.size
            position += info.size
        times = NOW.to_bytes(8, "big") + (0).to_bytes(4, "big")
        tiers.add(log, base, end, indexes=(index, times))
        first = min(s for s in starts.values() if s >= 0)
        expected |= {o: first for o, s in expected.items() if s == -1}
        expected |= starts
        base = end
    reader = tiers.reader()
    for offset, start in expected.items():
        future = reader.read(tiers.segments.at_or_after, offset, 500, dense_from=base)
        views = future.result(30)
        assert (got(views).first if views else -1) == start, offset
    # Where kdirect wrote the log nothing may be missing.
    missing = next(o for o, s in expected.items() if s > o)
    with pytest.raises(CorruptObjectError, match="kseg: the record batch at position"):
        reader.read(tiers.segments.at_or_after, missing, 500).result(30)


def test_a_segment_whose_tail_is_not_known(tiers: Tiers, open_partition: Open) -> None:
    p = filled(open_partition, random.Random(1), 1200, segment_bytes=1 << 20)
    p.roll()
    path = min(p.directory.glob("*.log"))
    log = path.read_bytes()
    end = p.segments[0].end_offset
    # Larger than what is guessed, so that a second look is needed.
    aborted = tuple(AbortedTransaction(7, i, i, i) for i in range(end))
    assert end > 2500
    tiers.add(log, 0, end, with_custom=False, aborted=aborted, interval=100)
    reader = tiers.reader()
    assert read(reader, tiers, 5, 1000).data == local(p, 5, 1000)
    assert len(tiers.handler.gets) == 3


def test_times_are_those_of_the_log(tiers: Tiers, open_partition: Open, seed: int) -> None:
    rng = random.Random(seed)
    p = filled(open_partition, rng, 400)
    segments = tiers.add_sealed(p)
    end = segments[-1].end_offset
    reader = tiers.reader()
    for start in (0, segments[1].base_offset + 3, end - 1):
        p.delete_records(start)
        times = [NOW + rng.randrange(-5000, 5000) for _ in range(60)]
        for timestamp in [NOW - 6000, NOW + 4990, NOW + 6000, *times]:
            answer = reader.find_time(tiers.segments.at_or_after, timestamp, start)
            expected = p.offset_for_timestamp(timestamp)
            if expected is not None and expected[0] >= end:
                expected = None  # in the part that is not tiered
            assert answer.result(30) == expected, (timestamp, start)
    assert reader.statistics()["remote_get_requests"] <= 2 * len(segments)


def test_an_object_that_is_gone_is_looked_up_once_more(tiers: Tiers, open_partition: Open) -> None:
    p = filled(open_partition, random.Random(2), 150)
    (segment, *_) = tiers.add_sealed(p)
    log = tiers.path(segment).read_bytes()[: segment.size]
    again = tiers.add(log, 0, segment.end_offset)
    tiers.segments.remove(again.segment_id)
    tiers.path(segment).unlink()
    answers = iter([segment, again])
    reader = tiers.reader()
    found = reader.read(lambda _: next(answers), 5, 1000).result(30)
    assert got(found).data == local(p, 5, 1000)
    later = replace(again, base_offset=6)
    for find, error in (
        ([segment, segment], ObjectNotFoundError),
        ([segment, later], ObjectNotFoundError),
        ([later], OffsetOutOfRangeError),
        ([segment, None], ObjectNotFoundError),
        ([None], OffsetOutOfRangeError),
    ):
        rest = iter(find)
        with pytest.raises(error):
            reader.read(lambda _, rest=rest: next(rest), 5, 1000).result(30)
        assert list(rest) == []


def test_records_that_no_segment_has(tiers: Tiers) -> None:
    """They are not passed over: what comes after them is not what was asked for."""
    log, end = big_log(random.Random(10), [1000] * 10)
    last = list(iterate_batches(log))[-1]
    lacking = tiers.add(log[: last.position], 0, end)
    after, after_end = big_log(random.Random(11), [1000] * 10, end)
    tiers.add(after, end, after_end)
    later, later_end = big_log(random.Random(12), [1000] * 10, after_end + 5)
    tiers.add(later, after_end + 5, later_end)
    reader = tiers.reader()
    assert read(reader, tiers, last.base_offset - 1, 5000).next == last.base_offset
    with pytest.raises(CorruptObjectError, match=f"{tiers.path(lacking).name}.*is missing"):
        read(reader, tiers, last.base_offset, 1000)
    for offset in (after_end, later_end):
        for dense_from in (0, later_end):
            with pytest.raises(OffsetOutOfRangeError):
                read(reader, tiers, offset, 1000, dense_from=dense_from)
    assert read(reader, tiers, after_end + 5, 1000).first == after_end + 5


def test_a_cut_object_is_named(tiers: Tiers) -> None:
    log, end = big_log(random.Random(3), [400_000] * 6)
    segment = tiers.add(log, 0, end)
    reader = tiers.reader()
    assert read(reader, tiers, 0, 10).first == 0  # the indexes are here
    path = tiers.path(segment)
    path.write_bytes(path.read_bytes()[: 2 * CHUNK_BYTES])
    with pytest.raises(CorruptObjectError, match=path.name):
        read(reader, tiers, end - 1, 1000)


def test_another_segments_object_is_named(tiers: Tiers, open_partition: Open) -> None:
    log = min(filled(open_partition, random.Random(4), 300).directory.glob("*.log")).read_bytes()
    end = list(iterate_batches(log))[-1].next_offset
    first, second = tiers.add(log, 0, end), tiers.add(log, 0, end)
    tiers.path(first).write_bytes(tiers.path(second).read_bytes())
    with pytest.raises(CorruptObjectError, match=f"{tiers.path(first).name}.*another"):
        tiers.reader().read(lambda _: first, 0, 1000).result(30)


@pytest.mark.parametrize("wrong", [{"size": 1000}, {"end_offset": 19}])
def test_an_object_that_contradicts_its_metadata(tiers: Tiers, wrong: dict[str, int]) -> None:
    log, end = big_log(random.Random(13), [1000] * 10)
    segment = replace(tiers.add(log, 0, end), **wrong)
    with pytest.raises(CorruptObjectError, match=f"{tiers.path(segment).name}.*metadata says"):
        tiers.reader().read(lambda _: segment, 0, 1000).result(30)


def test_a_full_queue_and_a_store_that_hangs(tiers: Tiers) -> None:
    log, end = big_log(random.Random(5), [400_000] * 10)
    tiers.add(log, 0, end)
    reader = tiers.reader(threads=2, max_pending=3)
    tiers.handler.hold.clear()
    started = time.monotonic()
    futures = [reader.read(tiers.segments.at_or_after, 0, 100) for _ in range(9)]
    assert [f is not None for f in futures] == [True] * 5 + [False] * 4
    counts = reader.statistics()
    assert counts["remote_fetch_refused"] == 4 and counts["remote_reader_queue"] >= 3
    reader.close()
    assert time.monotonic() - started < 1.0
    for future in futures[:5]:
        with pytest.raises(ClosedError):
            future.result(1)
    with pytest.raises(ClosedError):
        reader.read(tiers.segments.at_or_after, 0, 100)


def test_a_failed_request_fails_who_waits_and_is_not_kept(tiers: Tiers) -> None:
    log, end = big_log(random.Random(6), [400_000] * 4)
    tiers.add(log, 0, end)
    reader = tiers.reader()
    assert read(reader, tiers, 0, 10).first == 0

    def fail(_name: str, _at: int, _data: bytes) -> bytes:
        raise OSError(5, "the disk of the store is broken")

    tiers.handler.fault = fail
    tiers.handler.delay_s = 0.2
    before = len(tiers.handler.gets)
    futures = [reader.read(tiers.segments.at_or_after, end - 1, 10) for _ in range(4)]
    for future in futures:
        with pytest.raises(RemoteStorageError, match="kseg"):
            future.result(30)
    assert len(tiers.handler.gets) == before + 1
    tiers.handler.fault = lambda _name, _at, data: data
    assert read(reader, tiers, end - 1, 10).next == end
    assert reader.statistics()["remote_fetch_errors"] == 4
    assert reader.statistics()["remote_get_errors"] == 1


def settled(tiers: Tiers, quiet_s: float = 0.1) -> int:
    """Requests so far, once no more come."""
    count = -1
    while count != len(tiers.handler.gets):
        count = len(tiers.handler.gets)
        time.sleep(quiet_s)
    return count


def test_who_reads_on_finds_chunks_that_were_read_ahead(tiers: Tiers) -> None:
    end = 0
    for _ in range(4):
        log, after = big_log(random.Random(7), [256_000] * 20, end)
        tiers.add(log, end, after)
        end = after
    reader = tiers.reader(threads=4)
    chunks = sum(-(-s.size // CHUNK_BYTES) for s in tiers.segments)
    # A read here and there asks for what it needs.
    read(reader, tiers, 30, 1000)
    assert settled(tiers) == 2
    offset, grown = 0, []
    while offset < end:
        before = len(tiers.handler.gets)
        offset = read(reader, tiers, offset, 520_000).next
        grown.append(settled(tiers, 0.02) - before)
    # Everything came once: the tails, and each chunk.
    assert len(tiers.handler.gets) == len(set(tiers.handler.gets)) == 4 + chunks
    assert max(grown) > 3
    # Nobody waited for the next segment: its tail and its first chunk were there.
    counts = reader.statistics()
    assert counts["remote_chunks_ahead"] > chunks - 5
    assert counts["remote_chunks_unused"] == 0


def test_reading_ahead_leaves_a_thread(tiers: Tiers) -> None:
    log, end = big_log(random.Random(8), [256_000] * 60)
    tiers.add(log, 0, end)
    reader = tiers.reader(threads=3)
    offset = 0
    for _ in range(3):
        offset = read(reader, tiers, offset, 1_000_000).next
    settled(tiers)
    tiers.handler.hold.clear()
    waiting = reader.read(tiers.segments.at_or_after, offset, 20_000_000)
    time.sleep(0.2)
    assert not waiting.done()
    # What is here already is answered, though two threads hang in the store.
    assert read(reader, tiers, 0, 1000).first == 0
    tiers.handler.hold.set()
    assert got(waiting.result(30)).first == offset


def test_the_throttle_holds(tiers: Tiers) -> None:
    log, end = big_log(random.Random(9), [256_000] * 16)
    tiers.add(log, 0, end)
    reader = tiers.reader(bytes_per_second=8 << 20)
    started = time.monotonic()
    read(reader, tiers, 0, len(log))
    took = time.monotonic() - started
    assert 0.25 < took < 5


def test_many_readers_and_little_room(tiers: Tiers, seed: int) -> None:
    """Readers here and there and one after another, in caches that hold next to nothing."""
    rng, end, logs = random.Random(seed), 0, []
    for _ in range(4):
        log, after = big_log(rng, [rng.randrange(1000, 300_000) for _ in range(20)], end)
        tiers.add(log, end, after, interval=50_000)
        logs.append((end, log))
        end = after
    starts = {
        info.base_offset: (log, info.position) for _, log in logs for info in iterate_batches(log)
    }
    reader = tiers.reader(threads=6, chunk_bytes=3 * CHUNK_BYTES, index_bytes=600)

    def run(seed: int) -> None:
        own = random.Random(seed)
        offset = own.randrange(end)
        for _ in range(60):
            found = read(reader, tiers, offset, own.choice([1, 5000, 500_000, 3_000_000]))
            log, at = starts[found.first]
            assert found.first <= offset < found.next
            assert found.data == log[at : at + len(found.data)]
            offset = found.next if own.random() < 0.8 and found.next < end else own.randrange(end)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(seed, seed + 8)))
    counts = reader.statistics()
    assert counts["remote_chunk_bytes"] <= 3 * CHUNK_BYTES
    assert counts["remote_index_bytes"] <= 600
    assert counts["remote_fetch_errors"] == 0
