"""Whatever is wrong with an object, what is read of it is what was written, or an error that names
it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdirect.errors import CorruptObjectError, KdirectError, RemoteStorageError
from kdirect.format.batch import iterate_batches
from kdirect.format.remote_metadata import RemoteSegment
from kdirect.storage.remote_reader import RemoteReader
from tests.log.conftest import make_batch, stamped
from tests.storage.tiered import NOW, Tiers, got, large_batch

EPOCHS = ((3, 0), (4, 20), (7, 41))


def made_log() -> tuple[bytes, int]:
    out, offset, rng = b"", 0, random.Random(11)
    while offset < 60:
        records = rng.randrange(1, 4)
        if any(offset < start < offset + records for _, start in EPOCHS):
            continue
        epoch = max(e for e, start in EPOCHS if start <= offset)
        times = [NOW + rng.randrange(-100, 100) for _ in range(records)]
        data = make_batch(records, value_bytes=rng.randrange(60), timestamps=times)
        out += stamped(data, offset, epoch)
        offset += records
    return out, offset


class Case:
    """One segment that is read by a new reader each time, out of damaged bytes."""

    def __init__(self, directory: Path) -> None:
        self.tiers = Tiers(directory)
        self.log, self.end = made_log()
        self.segment: RemoteSegment = self.tiers.add(
            self.log, 0, self.end, epochs=EPOCHS, interval=200
        )
        self.times = self._times(self.reader())

    def reader(self) -> RemoteReader:
        return self.tiers.reader(chunk_bytes=1 << 30, index_bytes=0, threads=1)

    def _times(self, reader: RemoteReader) -> list[object]:
        find = self.tiers.segments.at_or_after
        out: list[object] = []
        for timestamp in range(NOW - 110, NOW + 110, 20):
            try:
                out.append(reader.find_time(find, timestamp, 0).result(30))
            except KdirectError as e:
                out.append(e)
        return out

    def check(self) -> int:
        """Everything is read; how many errors there were."""
        reader = self.reader()
        bytes_of = {}
        for info in iterate_batches(self.log):
            piece = self.log[info.position : info.position + info.size]
            bytes_of |= dict.fromkeys(range(info.base_offset, info.next_offset), piece)
        errors: list[KdirectError] = []
        for offset in bytes_of:
            for limit in (1, 700) if offset % 3 == 0 else (1,):
                try:
                    views = reader.read(self.tiers.segments.at_or_after, offset, limit).result(30)
                except KdirectError as e:
                    errors.append(e)
                    continue
                data = b"".join(views)
                assert data.startswith(bytes_of[offset])
                assert data in self.log
        for found, expected in zip(self._times(reader), self.times, strict=True):
            if isinstance(found, KdirectError):
                errors.append(found)
            else:
                assert found == expected
        reader.close()
        name = self.tiers.path(self.segment).name
        for error in errors:
            assert isinstance(error, CorruptObjectError | RemoteStorageError), error
            assert name in str(error)
        return len(errors)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    made = Case(tmp_path_factory.mktemp("damaged"))
    assert made.check() == 0
    yield made
    made.tiers.close()


CHANGES = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=3
)


@settings(max_examples=60, deadline=None)
@given(changes=CHANGES, cut=st.one_of(st.none(), st.floats(0, 1)))
def test_wrong_bytes_are_named_or_harmless(
    case: Case, changes: list[tuple[float, int]], cut: float | None
) -> None:
    path = case.tiers.path(case.segment)
    whole = path.read_bytes()
    data = bytearray(whole)
    for place, flips in changes:
        data[int(place * len(data))] ^= flips
    if cut is not None:
        del data[int(cut * len(data)) :]
    path.write_bytes(data)
    try:
        errors = case.check()
        assert errors or data == whole
    finally:
        path.write_bytes(whole)


def test_every_byte_of_a_batchs_header(case: Case) -> None:
    """Those that its CRC leaves out are compared with what is known: offset, length, leader epoch,
    magic and the CRC itself."""
    path = case.tiers.path(case.segment)
    whole = path.read_bytes()
    infos = list(iterate_batches(case.log))
    try:
        for info in (infos[0], infos[len(infos) // 2], infos[-1]):
            for at in range(info.position, info.position + 61, 3):
                data = bytearray(whole)
                data[at] ^= 1
                path.write_bytes(data)
                assert case.check() > 0, (info.position, at)
    finally:
        path.write_bytes(whole)


def test_a_damaged_length_brings_no_whole_object(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path)
    log, end = b"", 0
    while len(log) < 12 << 20:
        log += large_batch(1, 100_000, end)
        end += 1
    (second, *_) = list(iterate_batches(log))[1:2]
    damaged = bytearray(log)
    damaged[second.position + 8] = 0x00
    damaged[second.position + 9] = 0xA0  # ten megabytes
    segment = tiers.add(log, 0, end)
    path = tiers.path(segment)
    path.write_bytes(bytes(damaged) + path.read_bytes()[len(log) :])
    reader = tiers.reader()
    # What is sound is handed on, and then the error.
    assert got(reader.read(tiers.segments.at_or_after, 0, 1 << 20).result(30)).next == 1
    with pytest.raises(CorruptObjectError, match=f"{path.name}: the record batch at position"):
        reader.read(tiers.segments.at_or_after, 1, 1000).result(30)
    assert sum(n for _, _, n in tiers.handler.gets) < 3 << 20
    tiers.close()
