"""Remote segments in each kind of object store: what is read, which requests a server gets, and who
waits when it is slow."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kdirect.errors import ObjectNotFoundError, RemoteUnavailableError
from kdirect.storage.chunk_cache import CHUNK_BYTES
from kdirect.storage.upload import key_of
from tests.object_servers import Gate, Place, Request, gate_to
from tests.storage.tiered import CLUSTER, Tiers, large_batch, read


def fill(tiers: Tiers, segments: int, size: int) -> bytes:
    """Segments of about so many bytes; all of the log."""
    rng, total, offset = random.Random(1), b"", 0
    for _ in range(segments):
        log, base = b"", offset
        while len(log) < size:
            log += large_batch(2, rng.randrange(9000), offset)
            offset += 2
        tiers.add(log, base, offset)
        total += log
    return total


@pytest.mark.parametrize("kind", ["directory", "s3", "gcs"])
def test_what_is_read_is_what_was_stored(
    object_stores: Mapping[str, Place], tmp_path: Path, kind: str
) -> None:
    tiers = Tiers(tmp_path, object_stores[kind].fresh().store())
    log = fill(tiers, 3, 2_500_000)
    reader = tiers.reader()
    offset, total = 0, b""
    while offset < tiers.segments.end_offset:
        found = read(reader, tiers, offset, 700_000)
        total += found.data
        offset = found.next
    assert total == log
    assert reader.statistics()["remote_get_requests"] == 3 * (1 + 3)
    gone = next(iter(tiers.segments))
    tiers.store.delete(key_of(gone, CLUSTER))
    reader = tiers.reader(index_bytes=0)
    with pytest.raises(ObjectNotFoundError, match=key_of(gone, CLUSTER)):
        read(reader, tiers, 0, 1000)
    tiers.close()


@pytest.fixture
def gated(object_stores: Mapping[str, Place], tmp_path: Path) -> Iterator[tuple[Gate, Tiers]]:
    with gate_to(object_stores["s3"].fresh()) as (gate, place):
        tiers = Tiers(tmp_path, place.store())
        yield gate, tiers
        tiers.close()


def test_the_requests_that_a_server_gets(gated: tuple[Gate, Tiers]) -> None:
    gate, tiers = gated
    fill(tiers, 2, 3_000_000)
    gate.requests.clear()
    reader = tiers.reader()
    offset = 0
    while offset < tiers.segments.end_offset:
        offset = read(reader, tiers, offset, 100_000).next
    # A HEAD for each object, then ranges: the tail, and chunks, each of them once.
    assert sorted(gate.lines) == ["GET"] * 8 + ["HEAD"] * 2
    ranges = [request.range for request in gate.requests if request.method == "GET"]
    lengths = [int(r.partition("-")[2]) - int(r.partition("=")[2].partition("-")[0]) + 1
               for r in ranges]  # fmt: skip
    assert max(lengths) <= CHUNK_BYTES
    assert sum(lengths) == reader.statistics()["remote_get_bytes"]


def test_a_slow_store_keeps_only_its_threads_waiting(gated: tuple[Gate, Tiers]) -> None:
    gate, tiers = gated
    fill(tiers, 1, 3_000_000)
    segment = next(iter(tiers.segments))
    reader = tiers.reader(threads=2, max_pending=4)
    read(reader, tiers, 0, 1000)

    def slow(request: Request) -> None:
        time.sleep(2.0)

    gate.fault = slow
    gaps: list[float] = []

    async def serve() -> None:
        """An event loop that has other things to do."""
        futures = []
        for offset in range(segment.end_offset - 8, segment.end_offset):
            future = reader.read(tiers.segments.at_or_after, offset, 1000)
            futures += [] if future is None else [asyncio.wrap_future(future)]
        assert 4 <= len(futures) <= 6
        waiting = asyncio.gather(*futures)
        while not waiting.done():
            before = time.monotonic()
            # What is in memory is answered as soon as a thread is free, what is not when it comes.
            await asyncio.sleep(0.005)
            gaps.append(time.monotonic() - before)
        await waiting

    started = time.monotonic()
    asyncio.run(serve())
    assert 2.0 <= time.monotonic() - started < 6
    assert max(gaps) < 1.0


def test_a_store_that_is_away_for_a_while(gated: tuple[Gate, Tiers]) -> None:
    gate, tiers = gated
    log = fill(tiers, 1, 1_500_000)
    reader = tiers.reader()
    gate.fault = lambda request: (503, "SlowDown")
    with pytest.raises(RemoteUnavailableError, match="kseg"):
        read(reader, tiers, 0, 1000)
    gate.fault = lambda request: None
    assert read(reader, tiers, 0, 1 << 30).data == log
