"""A partition: reading, rolling, retention, flushing, and many threads at once."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import struct
import threading
import time

import pytest

from kdirect.errors import LogError, OffsetOutOfRangeError
from kdirect.format.batch import crc32c, iterate_batches
from kdirect.format.lookup import find_record
from kdirect.log import manager as manager_module
from kdirect.log import recovery
from kdirect.log.ack_gate import AckGate
from kdirect.log.config import NEVER, LogConfig
from kdirect.log.manager import LogManager
from kdirect.log.segment_search import position_for
from kdirect.model import LOG_APPEND_TIME, TopicPartition
from tests.log.conftest import commit_at_tail

NOW = int(time.time() * 1000)
HOUR = 3_600_000


def offsets(buffers) -> list[int]:
    return [i.base_offset for b in buffers for i in iterate_batches(bytes(b))]


# -- read ------------------------------------------------------------------------------------------


def test_read_gives_whole_batches_and_at_least_one(open_partition, batch, seed) -> None:
    rng = random.Random(seed)
    p = open_partition(segment_bytes=16384, index_interval_bytes=400)
    starts, sizes = [], []
    for _ in range(200):
        data = batch(rng.randrange(1, 4), value_bytes=rng.randrange(600))
        starts.append(p.append(data).base_offset)
        sizes.append(len(data))
    end = p.log_end_offset
    for _ in range(500):
        offset = rng.randrange(end)
        limit = rng.choice([0, 1, 500, 3000, 20_000, 1 << 30])
        buffers = p.read(offset, limit)
        first = max(i for i, s in enumerate(starts) if s <= offset)
        n = len(offsets(buffers))
        assert offsets(buffers) == starts[first : first + n]
        total = sum(len(b) for b in buffers)
        assert n == 1 or total <= limit
        # ... and not fewer than would have fitted, up to the end of a segment
        if first + n < len(starts) and total + sizes[first + n] <= limit:
            assert any(s.base_offset == starts[first + n] for s in p.segments)
    assert offsets(p.read(0, 1 << 30)) == starts, "all segments in one read, if it is large enough"
    assert p.read(end, 100) == []
    for offset in (-1, end + 1):
        with pytest.raises(OffsetOutOfRangeError, match=r"t-0 is outside \[0, "):
            p.read(offset, 100)


def test_buffers_are_read_only_views_of_the_mapping(open_partition, batch) -> None:
    p = open_partition()
    p.append(batch())
    (buffer,) = p.read(0, 100)
    assert isinstance(buffer, memoryview) and buffer.readonly and buffer.nbytes == p.head.size
    references = p.head.references
    del buffer
    assert p.head.references == references - 1


def test_segment_for_and_position_for(open_partition, batch) -> None:
    p = open_partition(segment_bytes=8192, index_interval_bytes=300)
    positions: dict[int, tuple[int, int]] = {}
    for _ in range(60):
        before = p.kernel.end_position
        base = p.kernel.segment_base_offset
        r = p.append(batch(3, value_bytes=100))
        if p.kernel.segment_base_offset != base:
            base, before = p.kernel.segment_base_offset, 0
        for offset in range(r.base_offset, r.last_offset + 1):
            positions[offset] = (base, before)
    for offset, (base, position) in positions.items():
        source = p.source_for(offset)
        assert (source.base_offset, source.locate(offset)[0]) == (base, position)
    head = p.source_for(180).segment
    assert (
        head is p.head
        and position_for(head, 180) == head.size == p.kernel.end_position
        and head.end_offset == 180
    )
    for segment, offset in ((p.segments[0], p.segments[0].end_offset + 1), (p.segments[1], 0)):
        with pytest.raises(OffsetOutOfRangeError):
            position_for(segment, offset)
    for offset in (-1, 181):
        with pytest.raises(OffsetOutOfRangeError):
            p.source_for(offset)


def test_offsets_by_timestamp(open_partition, batch, seed) -> None:
    rng = random.Random(seed)
    p = open_partition(segment_bytes=16384, index_interval_bytes=300)
    assert p.offset_for_timestamp(0) is None and p.largest_timestamp() is None
    times: list[int] = []
    for i in range(150):
        stamps = [
            NOW - 100_000 + 10 * i + rng.randrange(-300, 300) for _ in range(rng.randrange(1, 5))
        ]
        p.append(batch(len(stamps), timestamps=stamps, value_bytes=50))
        times += stamps
    p = open_partition(segment_bytes=16384, index_interval_bytes=300)
    p.append(batch(1, timestamps=[NOW - 90_000]))
    times.append(NOW - 90_000)
    for _ in range(300):
        wanted = rng.choice([rng.choice(times), rng.randrange(min(times) - 10, max(times) + 10)])
        expected = next(((i, t) for i, t in enumerate(times) if t >= wanted), None)
        assert p.offset_for_timestamp(wanted) == expected
    assert p.largest_timestamp() == (times.index(max(times)), max(times))
    p.delete_records(100)
    for wanted in (0, times[50], times[100], max(times)):
        assert p.offset_for_timestamp(wanted) == next(
            ((i, t) for i, t in enumerate(times) if t >= wanted and i >= 100), None
        )


def test_offsets_by_append_time(open_partition, batch) -> None:
    p = open_partition(timestamp_type=LOG_APPEND_TIME)
    for i in range(10):
        assert p.append(batch(2, timestamp_ms=5), NOW + i).log_append_time == NOW + i
    assert (
        p.offset_for_timestamp(NOW + 4) == (8, NOW + 4) and p.offset_for_timestamp(NOW + 10) is None
    )


def saying(data: bytes, largest: int) -> bytes:
    """The batch with another largest timestamp in its header than its records have."""
    data = data[:35] + struct.pack(">q", largest) + data[43:]
    return data[:17] + struct.pack(">I", crc32c(data[21:])) + data[21:]


def test_a_header_that_says_more_than_its_records_ends_a_lookup(
    open_partition, batch, monkeypatch
) -> None:
    """With a place from where on nothing is missed; batches are not opened one after the other to
    the end of the log."""
    p = open_partition()
    p.append(batch(2, timestamp_ms=NOW - 2 * HOUR))
    for _ in range(20):
        p.append(saying(batch(3, timestamp_ms=NOW - HOUR), NOW))
    p.append(batch(1, timestamp_ms=NOW))
    opened = []
    monkeypatch.setattr(
        "kdirect.log.time_lookup.find_record",
        lambda *a, **k: opened.append(a[1]) or find_record(*a, **k),
    )
    assert p.offset_for_timestamp(NOW - HOUR) == (2, NOW - HOUR), (
        "what records have is found as ever"
    )
    assert p.offset_for_timestamp(NOW - 1) == (4, NOW) == p.largest_timestamp()
    p.delete_records(
        6
    )  # in the middle of a batch, whose largest timestamp may have been that of a record before
    assert p.offset_for_timestamp(NOW - 1) == (10, NOW)
    assert opened == [f"t-0 offset {i}" for i in (2, 2, 2, 5, 8)]
    p.delete_records(62)
    assert p.offset_for_timestamp(NOW - 1) == (62, NOW) and p.offset_for_timestamp(NOW + 1) is None


# -- roll ------------------------------------------------------------------------------------------


def test_roll_by_time_counts_record_time(open_partition, batch) -> None:
    p = open_partition(segment_ms=HOUR)
    for minutes, segments in ((0, 1), (59, 1), (10, 1), (60, 1), (61, 2), (100, 2), (122, 3)):
        assert p.append(batch(timestamp_ms=NOW - 5 * HOUR + minutes * 60_000)).error == 0
        assert len(p.segments) == segments, minutes
    p = open_partition(segment_ms=HOUR)
    assert p.append(batch(timestamp_ms=NOW - 5 * HOUR + 180 * 60_000)).error == 0
    assert len(p.segments) == 3, "the first record of a dormant segment still counts"
    assert p.append(batch(timestamp_ms=NOW - 5 * HOUR + 183 * 60_000)).error == 0
    assert len(p.segments) == 4


def test_roll_by_clock_without_timestamps(open_partition, batch) -> None:
    p = open_partition(segment_ms=HOUR)
    for hours, segments in ((0, 1), (0.9, 1), (1.1, 2), (1.9, 2)):
        assert p.append(batch(timestamp_ms=-1), NOW + int(hours * HOUR)).error == 0
        assert len(p.segments) == segments, hours


def test_a_head_written_in_place_is_rolled_by_retention(open_partition, batch) -> None:
    p = open_partition(segment_ms=HOUR, retention_ms=-1)
    for hours in (4, 2):
        data = batch(timestamp_ms=NOW - hours * HOUR)
        head = p.ensure_head(len(data))
        ctypes.memmove(head.address + head.size, data, len(data))
        assert commit_at_tail(p.kernel, len(data), NOW).error == 0
    called = []
    p.before_roll.append(lambda partition: called.append(partition.head))
    assert len(p.segments) == 1 and p.apply_retention(NOW) == 0
    assert len(p.segments) == 2 and called == [p.segments[0]]


def test_jitter_ends_segments_sooner_and_not_together(open_partition, batch) -> None:
    """Records two minutes apart: without jitter a segment of an hour holds 31 of them."""
    p = open_partition(segment_ms=HOUR, segment_jitter_ms=HOUR // 2, timestamp_after_max_ms=NEVER)
    for i in range(400):
        assert p.append(batch(1, timestamp_ms=NOW + i * 120_000), NOW).error == 0
    counts = [s.end_offset - s.base_offset for s in p.segments[:-1]]
    assert len(counts) >= 12 and len(set(counts)) > 3
    assert all(16 <= n <= 31 for n in counts)
    p.reconfigure(LogConfig(segment_bytes=1 << 20, segment_ms=HOUR, timestamp_after_max_ms=NEVER))
    p.roll()
    before = len(p.segments)
    for i in range(400, 400 + 3 * 31):
        assert p.append(batch(1, timestamp_ms=NOW + i * 120_000), NOW).error == 0
    assert [s.end_offset - s.base_offset for s in p.segments[before - 1 :]] == [31] * 3


def test_jitter_is_less_than_what_compaction_leaves_of_a_segment(open_partition, batch) -> None:
    """Records a second apart; a jitter of 1000 days beside a lag of an hour ends no segment for
    each of them."""
    p = open_partition(
        segment_jitter_ms=24_000 * HOUR,
        segment_ms=24_000 * HOUR,
        max_compaction_lag_ms=HOUR,
        compacts=True,
        deletes=False,
        timestamp_after_max_ms=NEVER,
    )
    for i in range(200):
        assert p.append(batch(1, timestamp_ms=NOW + i * 1000), NOW).error == 0
    assert len(p.segments) < 10


def test_roll_tells_who_wants_to_know(open_partition, batch) -> None:
    p = open_partition(segment_bytes=8192)
    order: list[tuple] = []
    p.before_roll.append(lambda partition: order.append(("before", partition.log_end_offset)))
    p.on_roll.append(
        lambda _, old, new: order.append(
            ("after", old.base_offset, old.sealed, new.base_offset, new is p.head)
        )
    )
    p.on_roll.append(lambda *a: 1 / 0)
    for _ in range(3):
        assert p.append(batch(value_bytes=3000)).error == 0
    assert order == [("after", 0, True, 0, True), ("before", 2), ("after", 0, True, 2, True)]
    assert p.roll() is p.head and p.roll() is p.head and len(p.segments) == 3, (
        "an empty head is not rolled"
    )


def test_a_busy_partition_has_a_spare_head(open_partition, batch) -> None:
    p = open_partition(segment_bytes=64 << 10)
    p.append(batch())
    p.roll()
    p.append(batch(value_bytes=40_000))
    assert not list(p.directory.glob("spare*")), "a head that was not filled is followed by none"
    p.roll()
    p._spare._join()
    (spare,) = p.directory.glob("spare*.log.tmp")
    inode = spare.stat().st_ino
    assert spare.stat().st_blocks * 512 >= 64 << 10
    assert p.head.mapped_length == 64 << 10, "the head of a busy partition is whole from the start"
    p.append(batch(value_bytes=40_000))
    p.roll()
    assert p.head.path.stat().st_ino == inode, "the spare became the head"
    p.append(batch(value_bytes=40_000))
    p._spare._join()
    p.reconfigure(LogConfig(segment_bytes=128 << 10))
    p.roll()
    assert p.head.mapped_length == 128 << 10, "a spare of the wrong size is not used"
    p._spare._join()
    p._spare._ready_at -= 60
    p.flush_due(NOW)
    assert not list(p.directory.glob("*.tmp")), "an idle partition gives it back"
    p.append(batch(value_bytes=80_000))
    p.roll()
    p.close()
    assert not list(p.directory.glob("*.tmp"))


def test_a_batch_larger_than_a_segment_is_refused(open_partition, batch) -> None:
    p = open_partition(segment_bytes=8192)
    assert p.append(batch(value_bytes=10_000)).error == 18
    assert p.head is None, "and cost no preallocation"
    with pytest.raises(LogError, match=r"segment\.bytes"):
        p.ensure_head(9000)


@pytest.mark.parametrize("how", ["append", "ensure_head", "roll"])
def test_an_empty_head_that_is_too_small_by_now_is_replaced(open_partition, batch, how) -> None:
    """``segment.bytes`` was raised over it: nothing is sealed, and yet there must be room."""
    p = open_partition(segment_bytes=16384)
    small = p.ensure_head(100)
    told = []
    p.before_roll.append(lambda _: told.append("before"))
    p.on_roll.append(lambda _, old, new: told.append((old, new)))
    p.reconfigure(LogConfig(segment_bytes=1 << 20))
    data = batch(value_bytes=20_000)
    if how == "append":
        appender = threading.Thread(target=p.append, args=(data,), daemon=True)
        appender.start()
        appender.join(10)
        assert not appender.is_alive(), "it tries again and again"
    elif how == "ensure_head":
        assert p.ensure_head(20_000) is p.head
    else:
        assert p.roll() is p.head
    assert (
        p.kernel.capacity
        == p.head.mapped_length
        == os.stat(p.head.path).st_size
        <= p.head.reserved_length
        == 1 << 20
    )
    assert told == ["before", (small, p.head)] and small.sealed and len(p.segments) == 1
    if how != "append":
        p.append(data)
    assert offsets(p.read(0, 1 << 20)) == [0]
    before = p.head
    p.reconfigure(LogConfig(segment_bytes=16384))
    p.roll()
    assert p.head is not before, "it had records"
    small = p.head
    p.roll()
    assert p.head is small, "an empty head with room is left alone"
    p = open_partition()
    assert offsets(p.read(0, 1 << 20)) == [0] and p.log_end_offset == 1


# -- retention -------------------------------------------------------------------------------------


def test_retention_by_time(open_partition, batch) -> None:
    p = open_partition(segment_bytes=8192, retention_ms=HOUR)
    for i in range(10):
        p.append(batch(value_bytes=3000, timestamp_ms=NOW - 3 * HOUR + i * 20 * 60_000))
    assert len(p.segments) == 5
    assert p.apply_retention(NOW - 2 * HOUR) == 0
    gone = [s.path for s in p.segments[:3]]
    assert p.apply_retention(NOW) == 3 and not any(path.exists() for path in gone)
    assert (p.log_start_offset, p.log_end_offset) == (6, 10)
    with pytest.raises(OffsetOutOfRangeError):
        p.read(5, 10)
    assert offsets(p.read(6, 1 << 20)) == [6, 7, 8, 9]
    assert p.apply_retention(NOW + HOUR + 1) == 2, "the head too, once everything in it is too old"
    assert (p.log_start_offset, p.log_end_offset, p.size) == (10, 10, 0)
    assert p.head is None and p.segments[0].base_offset == 10, "nothing stays preallocated"
    assert p.append(batch()).base_offset == 10
    p = open_partition(segment_bytes=8192)
    assert (p.log_start_offset, p.log_end_offset) == (10, 11)


def test_retention_without_timestamps_goes_by_the_files(open_partition, batch) -> None:
    p = open_partition(segment_bytes=8192, retention_ms=HOUR)
    for _ in range(4):
        p.append(batch(value_bytes=3000, timestamp_ms=-1))
    assert p.apply_retention(NOW) == 0
    assert p.apply_retention(NOW + 2 * HOUR) == 2


def test_retention_by_size(open_partition, batch) -> None:
    p = open_partition(segment_bytes=8192, retention_ms=-1, retention_bytes=14_000)
    for _ in range(10):
        p.append(batch(value_bytes=3000))
    one = p.segments[0].size
    assert (
        p.size == 5 * one and p.apply_retention(NOW) == 2 and p.size == 3 * one > 14_000 > 2 * one
    )
    assert p.apply_retention(NOW) == 0
    p.reconfigure(LogConfig(segment_bytes=8192, retention_ms=-1, retention_bytes=0))
    assert p.apply_retention(NOW) == 3 and p.log_start_offset == p.log_end_offset == 10


def test_an_empty_log_survives_retention_and_restarts(open_partition, batch) -> None:
    p = open_partition(retention_ms=1)
    assert p.apply_retention(NOW) == 0 and len(p.segments) == 1
    p.append(batch(5))
    assert p.delete_records(-1) == 5
    p.apply_retention(NOW + HOUR)
    for _ in range(3):
        p = open_partition(retention_ms=1)
        assert (p.log_start_offset, p.log_end_offset) == (5, 5)
        assert p.apply_retention(NOW + HOUR) == 0


def test_delete_records(open_partition, batch) -> None:
    p = open_partition(segment_bytes=8192)
    for _ in range(10):
        p.append(batch(2, value_bytes=1500))
    assert p.delete_records(5) == 5 and p.segments[0].base_offset == 4
    assert offsets(p.read(5, 1))[0] == 4, "the batch that holds it is read whole"
    with pytest.raises(OffsetOutOfRangeError):
        p.read(4, 1)
    assert p.delete_records(3) == 5, "never back"
    for offset in (21, -2):
        with pytest.raises(OffsetOutOfRangeError):
            p.delete_records(offset)
    assert p.delete_records(-1) == 20 and p.head is not None
    p = open_partition(segment_bytes=8192)
    assert (p.log_start_offset, p.log_end_offset) == (20, 20)


# -- flush -----------------------------------------------------------------------------------------


def test_group_commit_shows_records_only_after_the_flush(open_partition, batch) -> None:
    p = open_partition(segment_bytes=8192, flush_before_ack=True)
    for _ in range(7):  # over two rolls: what a roll leaves behind is flushed with it
        assert p.append(batch(value_bytes=3000)).error == 0
        assert p.high_watermark == 0 and p.read(0, 1) == [], "a roll need not flush"
    p.flush()
    assert p.high_watermark == p.recovery_point == 7 and offsets(p.read(0, 1 << 20)) == list(
        range(7)
    )
    flushes = p.statistics()["log_flushes"]
    p.flush()
    p.flush(3)
    assert p.statistics()["log_flushes"] == flushes, "nothing to do"


def test_one_flush_serves_all_who_wait(open_partition, batch) -> None:
    p = open_partition(flush_before_ack=True)
    writers, each = 8, 25

    def work() -> None:
        for _ in range(each):
            r = p.append(batch())
            p.flush(r.last_offset + 1)
            assert p.high_watermark > r.last_offset and p.recovery_point > r.last_offset

    threads = [threading.Thread(target=work) for _ in range(writers)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert p.high_watermark == writers * each and p.statistics()["log_flushes"] <= writers * each
    print(f"{p.statistics()['log_flushes']} syncs for {writers * each} acknowledgements")


def test_flush_messages_and_flush_ms(open_partition, batch) -> None:
    p = open_partition(flush_messages=5)
    for i in range(12):
        p.append(batch())
        assert p.recovery_point == (i + 1) // 5 * 5
    p.reconfigure(LogConfig(segment_bytes=1 << 20, flush_ms=1000))
    start = p._last_flush_ms
    assert not p.flush_due(start + 999) and p.recovery_point == 10
    assert p.flush_due(start + 1000) and p.recovery_point == 12
    assert not p.flush_due(start + 9_000_000), "nothing to flush"
    p.append(batch())
    assert not p.flush_due(start + 9_000_500), "counted from when there was nothing to flush"


def test_sealed_segments_are_flushed_in_the_background(open_partition, batch) -> None:
    p = open_partition(segment_bytes=8192)
    for _ in range(7):
        p.append(batch(value_bytes=3000))
    assert p.recovery_point == 0 and p.config.flush_ms == NEVER
    assert p.flush_due(NOW) and p.recovery_point == 6 == p.head.base_offset
    assert not p.flush_due(NOW)


# -- many at once ----------------------------------------------------------------------------------


def test_appenders_readers_and_retention_at_once(tmp_path, batch, seed) -> None:
    """Four threads append over many rolls, two read from the start, one deletes: offsets stay
    contiguous and every acknowledged record is read until it is deleted."""
    m = LogManager(
        [tmp_path / "log"], LogConfig(segment_bytes=32 << 10, index_interval_bytes=1000)
    ).open()
    p = m.create_partition(TopicPartition("t", 0))
    errors: list[BaseException] = []
    acknowledged: dict[int, int] = {}
    done = threading.Event()

    def guarded(work, *arguments):
        def run() -> None:
            try:
                work(*arguments)
            except BaseException as e:
                errors.append(e)

        return threading.Thread(target=run)

    def append(i: int) -> None:
        rng = random.Random(seed + i)
        for n in range(400):
            data = batch(rng.randrange(1, 4), value_bytes=rng.randrange(700), fill=b"%d" % i)
            r = p.append(data)
            assert r.error == 0
            acknowledged[r.base_offset] = i
            if n % 100 == 50:
                p.roll()

    def read() -> None:
        offset = 0
        while not (done.is_set() and offset >= p.log_end_offset):
            try:
                buffers = p.read(offset, 10_000)
            except OffsetOutOfRangeError:
                offset = p.log_start_offset
                continue
            for b in buffers:
                for info in iterate_batches(b):  # CRC and frames, straight from the mapping
                    assert (
                        info.base_offset == offset or info.base_offset < offset <= info.last_offset
                    )
                    offset = info.next_offset
            if not buffers:
                time.sleep(0.001)

    def delete() -> None:
        while not done.is_set():
            p.delete_records(max(p.log_start_offset, p.high_watermark - 1000))
            m.flush_due(NOW)
            m.checkpoint()
            m.apply_retention(NOW)
            time.sleep(0.005)

    appenders = [guarded(append, i) for i in range(4)]
    others = [guarded(read), guarded(read), guarded(delete)]
    for t in appenders + others:
        t.start()
    for t in appenders:
        t.join()
    done.set()
    for t in others:
        t.join()
    assert not errors, errors
    assert p.log_end_offset == p.high_watermark and len(acknowledged) == 1600
    for b in p.read(p.log_start_offset, 1 << 30):
        for info in iterate_batches(bytes(b)):
            assert info.base_offset in acknowledged
    assert len(p.segments) < 60
    m.close()
    with LogManager([tmp_path / "log"]) as m:
        assert m.partitions[TopicPartition("t", 0)].log_end_offset == p.log_end_offset


def test_slots_see_every_segment_over_rolls(open_partition, batch) -> None:
    """What an RDMA consumer does: follow a slot to its sealed flag, then ask for the next
    segment."""
    p = open_partition(segment_bytes=8192)
    memory = mmap.mmap(-1, 64)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    p.kernel.attach_slot(address, 1)
    seen = []
    for _ in range(20):
        p.append(batch(value_bytes=1500))
        flags, base, readable = struct.unpack_from("<HxxqQ", memory, 4)
        if flags & 2:
            seen.append((base, readable))
            p.kernel.attach_slot(address, 1)
    p.kernel.detach_slot(address)
    assert [base for base, _ in seen] == [0, *[s.base_offset for s in p.segments[:-1]]]
    assert [readable for _, readable in seen] == [0, *[s.size for s in p.segments[:-1]]]


# -- a mark in a sealed segment --------------------------------------------------------------------


def test_segments_are_sealed_before_they_may_be_read(open_partition, batch) -> None:
    """The gate holds the high watermark in the first of three segments; what is read, and what
    slots say, goes up to there, segment by segment."""
    p = open_partition(flush_before_ack=True)
    p.gate.set_replicas({2: 0})
    size = len(batch())
    memory = (ctypes.c_char * 256)()
    address = ctypes.addressof(memory) + -ctypes.addressof(memory) % 64

    def slot(i: int) -> tuple[int, int, int, int]:
        """flags, segment, last readable position, high watermark."""
        raw = ctypes.string_at(address + 64 * i, 64)
        assert struct.unpack("<I", raw[:4])[0] == crc32c(raw[4:])
        return struct.unpack("<H", raw[4:6])[0], *struct.unpack("<qqq", raw[8:32])

    for i in range(3):
        for _ in range(4):
            assert p.append(batch()).error == 0
        assert p.kernel.attach_slot(address + 64 * i, i, 4 * i)
        if i < 2:
            p.roll()
    p.flush()
    assert p.recovery_point == 12 and p.high_watermark == 0 and p.read(0, 1 << 20) == []
    assert [slot(i) for i in range(3)] == [(1, 0, 0, 0), (1, 4, 0, 0), (1, 8, 0, 0)]
    for mark in range(1, 13):
        p.replicated(2, mark)
        assert p.high_watermark == mark and offsets(p.read(0, 1 << 20)) == list(range(mark))
        warm = p.read_nowait(mark - 1, 1 << 20)
        assert warm is None or offsets(warm) == [mark - 1]
        for i in range(3):
            records = min(max(mark - 4 * i, 0), 4)
            finished = i < 2 and mark >= 4 * (i + 1)
            told = 4 * (i + 1) if finished else mark
            assert slot(i) == (3 if finished else 1, 4 * i, records * size, told)
            assert p.is_finished(p.sources[i]) == finished
    assert not p.kernel.attach_slot(address, 7, 0), "a finished segment needs no slot"
    p.replicated(2, 9)
    assert p.high_watermark == 12, "it does not go back"


@pytest.mark.parametrize("clean", [False, True])
def test_a_mark_in_a_sealed_segment_is_there_after_a_restart(
    open_partition, batch, monkeypatch, clean
) -> None:
    p = open_partition(flush_before_ack=True)
    p.gate.set_replicas({2: 0})
    for _ in range(3):
        for _ in range(4):
            assert p.append(batch(2)).error == 0
        p.roll()
    p.flush()
    p.replicated(2, 11)
    assert p.high_watermark == 10, "the batch of offset 11 is not whole"
    load = recovery.load_partition
    monkeypatch.setattr(
        manager_module, "load_partition", lambda *a, **k: load(*a, **{**k, "high_watermark": 10})
    )
    p = open_partition(flush_before_ack=True, clean=clean)
    assert p.log_end_offset == 24 and p.high_watermark == 10
    assert offsets(p.read(0, 1 << 20)) == list(range(0, 10, 2))
    assert p.append(batch()).base_offset == 24 and p.high_watermark == 10
    p.gate.set_replicas({2: 10})
    p.flush()
    for mark in (14, 16, 22, 25):
        p.replicated(2, mark)
        assert p.high_watermark == mark
        assert offsets(p.read(0, 1 << 20)) == list(range(0, mark, 2))


def test_the_gate_opens_with_the_slowest() -> None:
    gate = AckGate(holds=False, on_disk=5)
    assert gate.acknowledged(9) == 9 and not gate.waits(9)
    gate.demand_flush(7)
    assert gate.acknowledged(9) == 5 and gate.waits(9) and not gate.waits(5)
    gate.flushed(7)
    assert gate.acknowledged(9) == 9
    gate.holds = True
    assert gate.acknowledged(9) == 7
    gate.set_replicas({1: 0, 2: 8})
    gate.replicated(3, 100)
    assert gate.acknowledged(9) == 0
    gate.replicated(1, 6)
    gate.replicated(1, 4)
    assert gate.acknowledged(9) == 6
    gate.truncated(5)
    assert gate.acknowledged(9) == 5 and gate.on_disk == 5
    gate.set_replicas({})
    gate.flushed(9)
    assert gate.acknowledged(9) == 9
