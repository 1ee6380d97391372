"""Logs copied from Kafka: its cleaner removes records from the middle and from the ends of sealed
segments."""

from __future__ import annotations

import logging
import struct
import time
from pathlib import Path

import pytest

from kdirect.errors import CorruptLogError
from kdirect.format.batch import encode_single_bytes, iterate_batches, stamp
from kdirect.log import checkpoint
from kdirect.log.config import LogConfig
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition

TP = TopicPartition("t", 0)
NOW = int(time.time() * 1000)
# Base offset -> offsets that are left.
SEGMENTS = {
    0: [*range(5), *range(20, 30)],
    50: [*range(50, 60), *range(70, 80)],
    100: [],
    120: range(130, 140),
    150: range(150, 155),
}
LEFT = [o for offsets in SEGMENTS.values() for o in offsets]


def copied(directory: Path, value_bytes: int = 20, entries: bool = True) -> Path:
    """A log directory as Kafka leaves it; with index entries for every third batch."""
    partition = directory / "t-0"
    partition.mkdir(parents=True)
    for base, offsets in SEGMENTS.items():
        data, index = bytearray(), b""
        for i, offset in enumerate(offsets):
            batch = bytearray(encode_single_bytes(b"x" * value_bytes, b"k%d" % offset, NOW))
            stamp(batch, offset, 0)
            if entries and i % 3 == 2:
                index += struct.pack(">II", offset - base, len(data))
            data += batch
        (partition / f"{base:020d}.log").write_bytes(data)
        (partition / f"{base:020d}.index").write_bytes(index)
        (partition / f"{base:020d}.timeindex").write_bytes(
            struct.pack(">qi", NOW, offsets[-1] - base) if offsets else b""
        )
    (directory / ".kafka_cleanshutdown").write_text('{"version":0}')
    return directory


def opened(directory: Path) -> LogManager:
    return LogManager([directory], LogConfig(segment_bytes=1 << 20)).open()


def read_from(p: Partition, offset: int, max_bytes: int = 1 << 20) -> list[int]:
    """The offsets that a consumer gets that begins at `offset`."""
    out: list[int] = []
    while buffers := p.read(offset, max_bytes):
        for buffer in buffers:
            found = [i.next_offset - 1 for i in iterate_batches(bytes(buffer))]
            out += [o for o in found if o >= offset]
            offset = max(offset, found[-1] + 1)
    return out


@pytest.mark.parametrize("crashed", [False, True])
@pytest.mark.parametrize("entries", [True, False])
def test_every_record_that_is_left_is_read_from_every_offset(
    tmp_path, caplog, entries, crashed
) -> None:
    m = opened(copied(tmp_path / "log", entries=entries))
    if crashed:
        m.checkpoint()
        m.close(clean=False)
        m = opened(tmp_path / "log")
        assert (
            "offsets [30, 50) of t-0 are missing" in caplog.text
            and "offsets [100, 120) of t-0 are missing" in caplog.text
        )
    caplog.clear()
    with m, caplog.at_level(logging.WARNING):
        p = m.partitions[TP]
        assert (p.log_start_offset, p.log_end_offset) == (0, 155)
        assert [s.base_offset for s in p.segments] == list(SEGMENTS) and not list(
            p.directory.glob("*.corrupt")
        )
        for offset in range(156):
            for max_bytes in (1, 300, 1 << 20):
                assert read_from(p, offset, max_bytes) == [o for o in LEFT if o >= offset], offset
            following = next(
                (s for s in (0, 50, 120, 150) if any(o >= offset for o in SEGMENTS[s])), None
            )
            assert p.source_for(p.skip_gap(offset)).base_offset == (
                following if following is not None else 150
            )
        assert p.append(encode_single_bytes(b"v")).base_offset == 155
        assert read_from(p, 81) == [*range(130, 140), *range(150, 156)]
    assert not caplog.records, "no index is wrong"


MISSING = ["offsets [30, 50) of t-0 are missing", "offsets [100, 120) of t-0 are missing"]


@pytest.mark.parametrize(
    ("policy", "cleaned", "told"),
    [
        pytest.param({}, {}, MISSING, id="never compacted"),
        pytest.param({"compacts": True}, {}, [], id="compacted"),
        pytest.param({}, {TP: 120}, [], id="compacted before"),
        pytest.param({}, {TP: 119}, MISSING[1:], id="compacted before, up to there"),
        pytest.param({}, {TopicPartition("t", 1): 120}, MISSING, id="another was compacted"),
    ],
)
def test_what_compaction_has_removed_is_no_reason_to_warn(
    tmp_path, caplog, policy, cleaned, told
) -> None:
    directory = copied(tmp_path / "log")
    checkpoint.write_offsets(directory / checkpoint.CLEANED, cleaned)
    config = LogConfig(segment_bytes=1 << 20, **policy)
    m = LogManager([directory], config).open()
    m.checkpoint()
    m.close(clean=False)
    caplog.clear()
    with caplog.at_level(logging.DEBUG), LogManager([directory], config).open() as again:
        assert read_from(again.partitions[TP], 0) == LEFT
    said = {r.getMessage().partition(":")[0]: r.levelno for r in caplog.records}
    assert {what: said[what] for what in MISSING} == {
        what: logging.WARNING if what in told else logging.DEBUG for what in MISSING
    }


def test_a_gap_in_a_file_of_whole_pages_is_no_damage(tmp_path) -> None:
    """Such a file is looked at when it is opened: it may be one that was preallocated."""
    directory = copied(
        tmp_path / "log",
        value_bytes=4096 - len(encode_single_bytes(b"", b"k22", NOW)) - 2,
        entries=False,
    )
    length = (directory / "t-0" / f"{50:020d}.log").stat().st_size
    assert length == 20 * 4096, "the gap is in the middle of it"
    with opened(directory) as m:
        assert read_from(m.partitions[TP], 0) == LEFT


def test_damage_in_a_sealed_segment_is_no_gap(tmp_path) -> None:
    directory = copied(tmp_path / "log", entries=False)
    path = directory / "t-0" / f"{50:020d}.log"
    content = bytearray(path.read_bytes())
    content[len(content) // 2 + 16] = 9  # the magic of a batch in the middle
    path.write_bytes(content)
    with opened(directory) as m:
        p = m.partitions[TP]
        assert read_from(p, 130)[0] == 130
        with pytest.raises(CorruptLogError, match="offset 79 was not found"):
            p.read(79, 1000)
