"""One flipped bit in a segment, seen by the broker's own readers: Fetch, lookups by time, a start
after a crash and a clean one.

What they hand on has the right offsets; else CorruptLogError says which batch of which file does
not continue the log.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kdirect.errors import CorruptBatchError, CorruptLogError, FormatError, UnsupportedFormatError
from kdirect.format.batch import BatchInfo, encode_single_bytes, iterate_batches, stamp
from kdirect.log import checkpoint
from kdirect.log.config import LogConfig
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition

TP = TopicPartition("t", 0)
NOW = int(time.time() * 1000)
NOT_UNDER_THE_CRC = 21  # bytes at the start of a batch
CONFIG = LogConfig(segment_bytes=1 << 16, index_interval_bytes=200)
LONGER = int(os.environ.get("KDIRECT_FLIPS", "0"))
Flip = tuple[Path, int, int, BatchInfo]


def flips_of(segments: list[Path], rng: random.Random) -> list[Flip]:
    """(file, position, bit, batch): every bit of what the CRC leaves out, and one of each other
    byte; or as many as are asked for."""
    out: list[Flip] = []
    for path in segments:
        for batch in iterate_batches(path.read_bytes().rstrip(b"\0") + bytes(8)):
            for at in range(batch.size):
                bits = range(8) if at < NOT_UNDER_THE_CRC or LONGER else (rng.randrange(8),)
                out += [(path, batch.position + at, bit, batch) for bit in bits]
    return rng.sample(out, min(LONGER, len(out))) if LONGER else out


def flip(path: Path, position: int, bit: int) -> None:
    with open(path, "r+b", buffering=0) as f:
        byte = os.pread(f.fileno(), 1, position)[0]
        os.pwrite(f.fileno(), bytes([byte ^ 1 << bit]), position)


def where(flipped: Flip) -> str:
    path, position, bit, batch = flipped
    return (
        f"byte {position - batch.position} bit {bit} of the batch of offset"
        f" {batch.base_offset} in {path.name}"
    )


def offsets(p: Partition, start: int) -> Iterator[tuple[int, int]]:
    """(base offset, offset after it) of each batch that a Fetch from `start` on gets, without its
    CRC."""
    while buffers := p.read(start, 300):
        for buffer in buffers:
            for info in iterate_batches(bytes(buffer), check_crc=False):
                yield info.base_offset, info.next_offset
                start = info.next_offset


def fill(p: Partition, make_batch, batches: int = 4) -> list[tuple[int, int]]:
    """A sealed segment and a head of one to three records a batch, a timestamp of its own for each
    record."""
    out: list[tuple[int, int]] = []
    for segment in range(2):
        if segment:
            p.roll()
        for i in range(batches):
            n = 1 + i % 3
            base = p.log_end_offset
            result = p.append(make_batch(n, timestamps=[NOW + 10 * (base + k) for k in range(n)]))
            assert result.error == 0
            out.append((base, base + n))
    return out


def files(p: Partition) -> list[Path]:
    return [s.path for s in p.segments]


def test_a_fetch_never_gets_an_offset_that_is_wrong(open_partition, batch, seed) -> None:
    """CRCs are its reader's to check."""
    rng = random.Random(seed)
    p = open_partition(
        segment_bytes=CONFIG.segment_bytes, index_interval_bytes=CONFIG.index_interval_bytes
    )
    good = fill(p, batch)
    told = 0
    flips = flips_of(files(p), rng)
    for flipped in flips:
        path, position, bit, damaged = flipped
        start = rng.randrange(damaged.next_offset)
        expected = [(a, b) for a, b in good if b > start]
        flip(path, position, bit)
        got = []
        try:
            for found in offsets(p, start):
                got.append(found)
            assert [a for a, _ in got] == [a for a, _ in expected], where(flipped)
        except CorruptLogError as e:
            told += 1
            assert [a for a, _ in got] == [a for a, _ in expected[: len(got)]], where(flipped)
            assert (
                f"position {damaged.position} of the segment that begins at offset" in e.message
            ), f"{where(flipped)}: {e}"
            assert str(path) in e.message and "restore" in e.hint
        except FormatError:  # of iterate_batches, for which only frames of the last batch count
            raise AssertionError(where(flipped)) from None
        finally:
            flip(path, position, bit)
        if position - damaged.position < 8 or 12 <= position - damaged.position < 17:
            assert len(got) < len(expected), f"{where(flipped)} was not noticed"
    assert told
    assert list(offsets(p, 0)) == good


def test_a_lookup_by_time_is_right_or_an_error(open_partition, batch, seed) -> None:
    rng = random.Random(seed)
    p = open_partition(
        segment_bytes=CONFIG.segment_bytes, index_interval_bytes=CONFIG.index_interval_bytes
    )
    fill(p, batch)
    end, told = p.log_end_offset, 0
    flips = flips_of(files(p), rng)
    for flipped in flips:
        path, position, bit, damaged = flipped
        wanted = rng.choice([damaged.base_offset, damaged.next_offset - 1, rng.randrange(end)])
        flip(path, position, bit)
        try:
            assert p.offset_for_timestamp(NOW + 10 * wanted - 5) == (wanted, NOW + 10 * wanted), (
                where(flipped)
            )
        except (CorruptLogError, CorruptBatchError, UnsupportedFormatError) as e:
            told += 1
            assert "offset" in e.message and "restore" in e.hint, f"{where(flipped)}: {e}"
        finally:
            flip(path, position, bit)
    assert told > len(flips) / 3


def test_a_wrong_index_changes_no_answer(open_partition, batch, seed, caplog) -> None:
    rng = random.Random(seed)
    p = open_partition(
        segment_bytes=CONFIG.segment_bytes, index_interval_bytes=CONFIG.index_interval_bytes
    )
    good = fill(p, batch, 12)
    sealed = p.segments[0]
    index = sealed.offset_index.path
    assert sealed.offset_index.path.stat().st_size >= 3 * 8
    for position in range(index.stat().st_size):
        for bit in range(8):
            flip(index, position, bit)
            start = rng.randrange(p.log_end_offset)
            try:
                assert list(offsets(p, start)) == [(a, b) for a, b in good if b > start], (
                    f"byte {position} bit {bit} of the index"
                )
            finally:
                flip(index, position, bit)
    assert sum("is wrong" in r.message for r in caplog.records) <= 1, "it is logged once a segment"


@pytest.mark.parametrize("clean", [True, False])
def test_a_start_keeps_what_is_right_and_tells_the_rest(
    memory_path, batch, seed, clean, caplog
) -> None:
    """After a crash the log is cut at the damage above its recovery point; what is below is kept,
    and reading it is an error."""
    rng = random.Random(seed)
    with LogManager([memory_path / "log"], CONFIG) as m:
        p = m.create_partition(TP)
        good = fill(p, batch)
        p.flush(good[5][0])
        paths = files(p)
        m.checkpoint()
        if not clean:
            shutil.copytree(memory_path / "log", memory_path / "kept")
    if clean:
        shutil.copytree(memory_path / "log", memory_path / "kept")
    told = 0
    flips = flips_of(
        [memory_path / "kept" / path.relative_to(memory_path / "log") for path in paths], rng
    )
    for path, position, bit, damaged in rng.sample(
        flips, len(flips) if LONGER else len(flips) // 3
    ):
        flipped = path, position, bit, damaged
        shutil.rmtree(memory_path / "log")
        shutil.copytree(memory_path / "kept", memory_path / "log")
        flip(memory_path / "log" / path.relative_to(memory_path / "kept"), position, bit)
        caplog.clear()
        got = []
        try:
            with LogManager([memory_path / "log"], CONFIG) as m:
                p = m.partitions[TP]
                for found in offsets(p, 0):
                    got.append(found)
                if p.log_end_offset < good[-1][1]:  # cut: what was acknowledged and is gone is told
                    assert not clean and f"position {damaged.position}" in caplog.text, where(
                        flipped
                    )
                    told += 1
        except CorruptLogError as e:
            assert "position" in e.message and str(path.name) in e.message, f"{where(flipped)}: {e}"
            assert "restore" in e.hint or "recovered" in e.hint
            told += 1
        assert [a for a, _ in got] == [a for a, _ in good[: len(got)]], where(flipped)
    assert told


# -- logs that Kafka wrote -------------------------------------------------------------------------


def copied(directory: Path, bases: list[int], epoch: int = 0) -> Path:
    """A closed log of one segment with a batch at each of these offsets, as Kafka's cleaner leaves
    it; the segment's path."""
    partition = directory / "t-0"
    partition.mkdir(parents=True)
    data = bytearray()
    for base in bases:
        one = bytearray(encode_single_bytes(b"v%d" % base, b"k", NOW + base))
        stamp(one, base, epoch)
        data += one
    path = partition / f"{bases[0]:020d}.log"
    path.write_bytes(data)
    path.with_suffix(".index").write_bytes(b"")
    path.with_suffix(".timeindex").write_bytes(
        struct.pack(">qi", NOW + bases[-1], bases[-1] - bases[0])
    )
    (directory / ".kafka_cleanshutdown").write_text('{"version":0}')
    return path


def test_gaps_are_accepted_where_kafka_wrote_the_log_and_nowhere_else(tmp_path) -> None:
    copied(tmp_path / "log", [0, 1, 7, 8, 20])
    with LogManager([tmp_path / "log"], CONFIG) as m:
        p = m.partitions[TP]
        assert p.dense_from == p.log_end_offset == 21
        assert [a for a, _ in offsets(p, 0)] == [0, 1, 7, 8, 20]
        for _ in range(3):
            p.append(encode_single_bytes(b"v"))
        head = p.segments[-1].path
        assert [a for a, _ in offsets(p, 0)] == [0, 1, 7, 8, 20, 21, 22, 23]
        last = list(iterate_batches(head.read_bytes().rstrip(b"\0") + bytes(8)))[-2]
        flip(
            head, last.position + 7, 3
        )  # 22 becomes 30: above what Kafka wrote no offset is missing
        with pytest.raises(
            CorruptLogError, match="its base offset is 30, and offset 22 comes next"
        ):
            list(offsets(p, 21))
        flip(head, last.position + 7, 3)
    with LogManager([tmp_path / "log"], CONFIG) as m:  # it is noted for the next start
        assert m.partitions[TP].dense_from == 21
        assert checkpoint.read_partition_metadata(tmp_path / "log" / "t-0").dense_from == 21


def test_a_log_of_a_kdirect_that_did_not_note_it_is_taken_as_it_is(tmp_path, batch) -> None:
    with LogManager([tmp_path / "log"], CONFIG) as m:
        p = m.create_partition(TP)
        good = fill(p, batch)
        path = p.directory / checkpoint.PARTITION_METADATA
        topic_id = p.topic_id
    path.write_text("\n".join(path.read_text().splitlines()[:2]))
    with LogManager([tmp_path / "log"], CONFIG) as m:
        p = m.partitions[TP]
        assert (p.topic_id, p.dense_from, list(offsets(p, 0))) == (topic_id, good[-1][1], good)


@pytest.mark.parametrize("clean", [True, False], ids=["stopped", "killed"])
def test_the_offset_from_which_kdirect_wrote_the_log_may_be_damaged(tmp_path, batch, clean) -> None:
    """A number that is no offset is told; one above the log's end says no more than that end."""
    with LogManager([tmp_path / "log"], CONFIG) as m:
        p = m.create_partition(TP)
        good = fill(p, batch)
        path = p.directory / checkpoint.PARTITION_METADATA
    lines = path.read_text().splitlines()[:2]
    for number in ("-1", "9" * 30, "9" * 6000, "1e999"):
        path.write_text("\n".join([*lines, f"{checkpoint.DENSE_FROM}: {number}"]))
        if not clean:
            (tmp_path / "log" / ".kafka_cleanshutdown").unlink(missing_ok=True)
        with (
            pytest.raises(CorruptLogError, match=r"partition\.metadata is damaged"),
            LogManager([tmp_path / "log"], CONFIG),
        ):
            pass
    path.write_text("\n".join([*lines, f"{checkpoint.DENSE_FROM}: 99999999999"]))
    with LogManager([tmp_path / "log"], CONFIG) as m:
        p = m.partitions[TP]
        assert (p.dense_from, list(offsets(p, 0))) == (p.log_end_offset, good)


def test_of_two_batches_that_overlap_in_a_copied_log_neither_is_handed_on(tmp_path) -> None:
    path = copied(tmp_path / "log", [0, 1, 7, 8, 20])
    batches = list(iterate_batches(path.read_bytes()))
    with LogManager([tmp_path / "log"], CONFIG) as m:
        p = m.partitions[TP]
        for bit in range(4, 63):  # of the base offset 7: it lies above 8 then
            flip(path, batches[2].position + 7 - bit // 8, bit % 8)
            got = []
            with pytest.raises(CorruptLogError, match="position"):
                for found in offsets(p, 0):
                    got.append(found)
            assert [a for a, _ in got] == [0, 1]
            flip(path, batches[2].position + 7 - bit // 8, bit % 8)


def test_leader_epochs_in_a_copied_log_do_not_go_back(tmp_path) -> None:
    path = copied(tmp_path / "log", [0, 1, 2, 3], epoch=5)
    batches = list(iterate_batches(path.read_bytes()))
    with LogManager([tmp_path / "log"], CONFIG) as m:
        p = m.partitions[TP]
        assert [a for a, _ in offsets(p, 0)] == [0, 1, 2, 3]
        flip(path, batches[2].position + 15, 2)  # 5 becomes 1
        with pytest.raises(CorruptLogError, match="leader epoch is 1"):
            list(offsets(p, 0))
