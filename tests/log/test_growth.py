"""Heads that cost what is used: they grow in place with what is appended, and give back what nobody
uses."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import threading
import time
from pathlib import Path

import pytest

from kdirect.errors import LogError, StorageFullError
from kdirect.format.batch import iterate_batches
from kdirect.log import growth
from kdirect.log import growth as growth_module
from kdirect.log import manager as manager_module
from kdirect.log import rolling as rolling_module
from kdirect.log import segment as segment_module
from kdirect.log.config import LogConfig
from kdirect.log.growth import GRANT_BYTES, head_bytes, next_capacity
from kdirect.log.manager import LogManager
from kdirect.log.mapped import copy_bytes
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition
from tests.log.conftest import commit_at_tail

TP = TopicPartition("t", 0)
NOW = int(time.time() * 1000)
LONG_AGO = float("-inf")


def offsets(partition: Partition, start: int = 0) -> list[int]:
    return [
        i.base_offset for b in partition.read(start, 1 << 30) for i in iterate_batches(bytes(b))
    ]


def disk_bytes(directory: Path) -> int:
    """What the files of a partition occupy."""
    return sum(f.stat().st_blocks * 512 for f in directory.iterdir())


def allocated(partition: Partition) -> int:
    return os.stat(partition.head.path).st_blocks * 512


def leave_alone(partition: Partition) -> None:
    """As if nothing had been appended for a while."""
    partition.flush_due(NOW)  # it is noted how far the log has come
    partition._use.quiet_since = LONG_AGO
    partition.flush_due(NOW)


def tail_is_zeros(partition: Partition) -> bool:
    head, end = partition.head, partition.kernel.end_position
    return not any(copy_bytes(head.address + end, head.mapped_length - end))


# -- the rules -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capacity", "need", "limit", "quick", "expected"),
    [
        (4096, 4097, 64 << 20, False, 16 << 10),
        (4096, 4097, 64 << 20, True, 64 << 10),
        (4096, 100_000, 64 << 20, False, 102_400),
        (1 << 20, (1 << 20) + 1, 64 << 20, False, 4 << 20),
        (1 << 20, (1 << 20) + 1, 64 << 20, True, 16 << 20),
        (700 << 10, 900 << 10, 64 << 20, False, 4 << 20),  # whole huge pages
        (16 << 20, (16 << 20) + 1, 64 << 20, False, 64 << 20),
        (
            4 << 20,
            (4 << 20) + 1,
            24 << 20,
            False,
            24 << 20,
        ),  # rather all of it than a small last step
        (8192, 12_000, 16384, False, 16384),
        (16384, 16384, 16384, True, 16384),
    ],
)
def test_steps(capacity, need, limit, quick, expected) -> None:
    assert next_capacity(capacity, need, limit, quick=quick) == expected


@pytest.mark.parametrize(
    ("capacity", "need", "limit", "expected"),
    [
        (1 << 20, (1 << 20) + 1, 1 << 30, 16 << 20),  # less than the largest step
        (16 << 20, (16 << 20) + 1, 1 << 30, 80 << 20),
        (80 << 20, (80 << 20) + 1, 1 << 30, 144 << 20),
        (16 << 20, 100 << 20, 1 << 30, 100 << 20),  # more is needed
        (1000 << 20, (1000 << 20) + 1, 1 << 30, 1 << 30),
    ],
)
def test_steps_that_may_not_be_larger(capacity, need, limit, expected) -> None:
    assert next_capacity(capacity, need, limit, quick=True) == expected


@pytest.mark.parametrize("rolled", [False, True])
def test_a_large_head_grows_in_steps(memory_path, batch, monkeypatch, rolled) -> None:
    """Of a partition that leads, too: nobody waits for more zeros than those of one step."""
    with LogManager([memory_path], LogConfig(segment_bytes=16 << 20)) as m:
        monkeypatch.setattr(growth_module, "STEP_BYTES", 1 << 20)
        monkeypatch.setattr(rolling_module, "STEP_BYTES", 1 << 20)
        p = m.create_partition(TP)
        data = batch(value_bytes=200_000)
        if rolled:  # after one that was filled quickly, before there is a spare
            while p.kernel.end_position < 12 << 20:
                p.append(data)
            p.roll()
            assert allocated(p) == p.kernel.capacity == 1 << 20
        before = p.kernel.capacity
        while p.kernel.end_position < 12 << 20:
            p.append(data)
            assert p.kernel.capacity <= before + (1 << 20)
            before = p.kernel.capacity
        assert allocated(p) >= p.kernel.capacity > 12 << 20


@pytest.mark.parametrize("interval", [1, 100, 4096])
def test_an_index_is_not_full_before_its_head(interval) -> None:
    config = LogConfig(index_interval_bytes=interval)
    for capacity in (4096, 16 << 10, 1 << 20):
        sizes = head_bytes(config, capacity)
        # An entry is written for more than `interval` bytes; the time index keeps one for the seal.
        assert (
            sizes.offset_index // 8 >= capacity // (interval + 1) + 1
            and sizes.time_index // 12 >= capacity // (interval + 1) + 2
        )


# -- growing ---------------------------------------------------------------------------------------


def test_a_partition_with_one_record_costs_some_pages(memory_path, batch) -> None:
    with LogManager([memory_path], LogConfig()) as m:
        p, q = m.create_partition(TP), m.create_partition(TopicPartition("t", 1))
        p.append(batch(value_bytes=100))
        assert disk_bytes(p.directory) <= 24 << 10
        q.ensure_head(100)  # what a producer that writes the head itself is granted
        assert q.kernel.capacity >= GRANT_BYTES and disk_bytes(q.directory) <= 64 << 10
    with LogManager([memory_path], LogConfig()) as m:
        for i in range(2):
            m.partitions[TopicPartition("t", i)].append(batch(value_bytes=100))
            assert disk_bytes(m.partitions[TopicPartition("t", i)].directory) <= 24 << 10, (
                "after a restart as well"
            )


@pytest.mark.parametrize("pace", ["slowly", "quickly"])
def test_segments_are_those_that_kafka_would_have(memory_path, batch, seed, pace) -> None:
    """A new one where a request does not fit into ``segment.bytes``, however the head has grown
    until then."""
    rng = random.Random(seed)
    with LogManager([memory_path], LogConfig(segment_bytes=256 << 10)) as m:
        p = m.create_partition(TP)
        bases, size, capacities = [0], 0, set()
        for offset in range(600):
            data = batch(value_bytes=rng.choice([10, 1000, 9000]))
            if size + len(data) > 256 << 10:
                bases.append(offset)
                size = 0
            size += len(data)
            if pace == "slowly":
                p._use._grew_at = p._use.opened_at = LONG_AGO
            assert p.append(data).base_offset == offset
            assert (
                p.kernel.end_position
                <= p.kernel.capacity
                == p.head.mapped_length
                == os.stat(p.head.path).st_size
            )
            assert allocated(p) >= p.kernel.capacity, "never sparse"
            capacities.add(p.kernel.capacity)
            if offset % 50 == 0:
                assert tail_is_zeros(p)
        assert [s.base_offset for s in p.segments] == bases and len(bases) > 5
        assert len(capacities) >= 2 and p.statistics()["log_head_growths"] >= 1
        if pace == "slowly":
            assert p.statistics()["log_head_growths"] >= len(bases)
        assert offsets(p) == list(range(600))
    with LogManager([memory_path], LogConfig(segment_bytes=256 << 10)) as m:
        assert offsets(m.partitions[TP]) == list(range(600))


def test_growth_is_no_roll(open_partition, batch) -> None:
    p = open_partition(segment_bytes=1 << 20)
    told = []
    p.append(batch())
    head, address = p.head, p.head.address
    p.before_roll.append(lambda _: told.append("before"))
    p.on_roll.append(lambda *_: told.append("after"))
    view = p.read(0, 100)[0]
    for _ in range(2):
        p.append(batch(value_bytes=30_000))
    assert p.head is head and head.address == address and not told and len(p.segments) == 1
    assert bytes(view) == bytes(p.read(0, 100)[0])
    assert p.make_room() is head and p.kernel.capacity == 1 << 20, (
        "a head that is said to be full grows, as long as it may"
    )
    assert p.make_room() is not head and told == ["before", "after"]


@pytest.mark.parametrize("segment_bytes", [8 << 20, (8 << 20) + 8192])
def test_a_head_with_records_gets_huge_pages_as_it_grows(memory_path, batch, segment_bytes) -> None:
    with LogManager([memory_path], LogConfig(segment_bytes=segment_bytes)) as m:
        p = m.create_partition(TP)
        views = []
        for i in range(80):
            assert p.append(batch(value_bytes=100_000, fill=b"%d" % (i % 10))).base_offset == i
            views += p.read(i, 1)
        assert len(p.segments) == 1 and p.kernel.capacity == segment_bytes and tail_is_zeros(p)
        for i, view in enumerate(views):
            assert b"%d" % (i % 10) * 1000 in bytes(view)


def test_a_full_disk_in_a_step(small_disk, fill_disk, batch) -> None:
    """The request fails, and nothing else; when there is space again it is appended."""
    with LogManager([small_disk], LogConfig(segment_bytes=512 << 10)) as m:
        p = m.create_partition(TP)
        data = batch(value_bytes=900)
        n = 0
        for _ in range(4):
            ballast = small_disk / "ballast"
            fill_disk(small_disk)
            before = None
            with pytest.raises(StorageFullError, match="bytes of a segment"):
                while True:
                    before = (p.log_end_offset, p.kernel.capacity, p.kernel.end_position)
                    n += p.append(data).error == 0
            if p.head is not None:
                assert (
                    before == (p.log_end_offset, p.kernel.capacity, p.kernel.end_position)
                    and p.log_end_offset == n
                )
                assert p.kernel.capacity == p.head.mapped_length == os.stat(p.head.path).st_size
                assert tail_is_zeros(p)
            assert offsets(p) == list(range(n))
            ballast.unlink()
            assert p.append(data).base_offset == n
            n += 1
    with LogManager([small_disk], LogConfig(segment_bytes=512 << 10)) as m:
        assert offsets(m.partitions[TP]) == list(range(n))


def test_all_of_a_disk_can_be_used(small_disk, batch) -> None:
    """Where a large step has no space, a small one is made; and a busy partition does without a
    whole head."""
    with LogManager([small_disk], LogConfig(segment_bytes=512 << 10)) as m:
        p = m.create_partition(TP)
        data = batch(value_bytes=3000)
        n = 0
        with pytest.raises(StorageFullError):
            while True:
                n += p.append(data).error == 0
                p._spare.give_back()
        assert n * len(data) > 900 << 10, "of 1 MiB"
        assert offsets(p) == list(range(n))
        p.delete_records(p.head.base_offset)  # the end of a broker needs some space, too


@pytest.mark.parametrize("granted_ahead", [False, True])
def test_a_roll_where_no_thread_can_be_started(
    memory_path, batch, monkeypatch, granted_ahead
) -> None:
    """There is no spare then, and nothing else is missing: neither now nor when threads start
    again."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "kdirect-spare-head":
            raise RuntimeError("can't start new thread")
        start(thread)

    with LogManager([memory_path], LogConfig(segment_bytes=64 << 10)) as m:
        p = m.create_partition(TP)
        for _ in range(9):
            p.append(batch(value_bytes=5000))
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refused)
            if granted_ahead:
                p.roll_into(p.prepare_next()).release()
            else:
                p.roll()
            for i in range(9, 30):
                assert p.append(batch(value_bytes=5000)).base_offset == i
        for i in range(30, 60):
            assert p.append(batch(value_bytes=5000)).base_offset == i
        assert offsets(p) == list(range(60)) and len(p.segments) > 4


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("records", [0, 5])
def test_a_file_granted_ahead_that_cannot_become_the_head_is_its_callers(
    memory_path, batch, monkeypatch, published, records
) -> None:
    """A producer may still write into it: it stays until the caller, who ends the producer's key,
    discards it."""

    def refuse(*arguments):
        raise StorageFullError("no", hint="none")

    with LogManager([memory_path], LogConfig(segment_bytes=64 << 10)) as m:
        p = m.create_partition(TP)
        p.ensure_head(100)
        for _ in range(records):
            p.append(batch())
        head, files = p.head, sorted(p.directory.iterdir())
        prepared = p.prepare_next()
        address = prepared.address
        with monkeypatch.context() as patch:
            if published and records:  # an empty head's name is given to the file last of all
                patch.setattr(segment_module.Segment, "take_from_kernel", lambda segment: False)
            else:
                patch.setattr(prepared, "publish", refuse)
            with pytest.raises(LogError):
                p.roll_into(prepared)
        assert f"{address:x}-" in Path("/proc/self/maps").read_text(), "its memory is there"
        assert p.head is head
        assert p.append(batch()).base_offset == records
        prepared.discard()
        prepared.discard()
        assert f"{address:x}-" not in Path("/proc/self/maps").read_text()
        assert sorted(p.directory.iterdir()) == files
        for i in range(records + 1, 30):
            assert p.append(batch(value_bytes=5000)).base_offset == i
        assert offsets(p) == list(range(30))


# -- giving back -----------------------------------------------------------------------------------


def test_a_quiet_partition_gives_its_head_back(memory_path, batch) -> None:
    with LogManager([memory_path], LogConfig(segment_bytes=4 << 20)) as m:
        p = m.create_partition(TP)
        for _ in range(30):
            p.append(batch(value_bytes=40_000))
        head, full, size = p.head, p.kernel.capacity, p.head.size
        assert full == 4 << 20
        p.flush_due(NOW)
        assert p.kernel.capacity == full, "not at once"
        leave_alone(p)
        assert (
            p.head is head
            and p.kernel.capacity
            == head.mapped_length
            == os.stat(head.path).st_size
            == -(-size // 4096) * 4096
        )
        assert (
            disk_bytes(p.directory) <= size + (32 << 10)
            and p.statistics()["log_given_back_bytes"] == full - p.kernel.capacity
        )
        assert tail_is_zeros(p) and offsets(p) == list(range(30))
        given = p.statistics()["log_given_back_bytes"]
        leave_alone(p)
        assert p.statistics()["log_given_back_bytes"] == given, "once"
        for i in range(30, 60):
            assert p.append(batch(value_bytes=40_000)).base_offset == i
        assert p.head is head and tail_is_zeros(p) and offsets(p) == list(range(60))
        assert head.offset_index.capacity >= p.kernel.index_entries()[0] > 20


@pytest.mark.parametrize("interval", [1, 4096])
def test_giving_back_leaves_a_full_index_as_it_is(memory_path, batch, interval) -> None:
    """The kernel is not told of more entries than there are: it would write them behind the
    mapping."""
    with LogManager(
        [memory_path], LogConfig(index_max_bytes=4096, index_interval_bytes=interval)
    ) as m:
        p = m.create_partition(TP)
        n = 0
        while p.kernel.index_entries()[0] < 4096 // 8:
            data = batch(value_bytes=interval, timestamp_ms=NOW)
            head = p.ensure_head(len(data))
            ctypes.memmove(
                head.address + p.kernel.end_position, data, len(data)
            )  # as by RDMA, where a full index is no end
            assert commit_at_tail(p.kernel, len(data), NOW).error == 0
            n += 1
        leave_alone(p)
        assert p.statistics()["log_given_back_bytes"] > 0
        given_back = p.kernel.capacity
        assert head.offset_index.capacity == 4096 // 8 == p.kernel.index_entries()[0]
        small = batch(value_bytes=0, timestamp_ms=NOW)
        assert given_back - p.kernel.end_position >= len(small), "there is room, but in the index"
        assert p.append(small).base_offset == n
        assert p.segments[-1] is not head and offsets(p) == list(range(n + 1))


def test_who_has_a_quiet_head_mapped_keeps_its_length(memory_path, batch) -> None:
    with LogManager([memory_path], LogConfig(segment_bytes=4 << 20)) as m:
        p = m.create_partition(TP)
        p.ensure_head(3 << 20)
        p.append(batch(value_bytes=40_000))
        head = p.head.acquire()
        length = head.mapped_length
        leave_alone(p)
        assert (
            os.stat(head.path).st_size == length > head.mapped_length == p.kernel.capacity == 40_960
        )
        assert allocated(p) < 64 << 10, "a hole"
        p.append(batch(value_bytes=1_000_000))
        assert allocated(p) >= p.kernel.capacity >= 1_040_000 and tail_is_zeros(p)
        head.release()
        p.roll()
        assert os.stat(head.path).st_size == head.size and offsets(p) == [0, 1]


def test_a_head_that_somebody_writes_is_not_given_back(open_partition, batch) -> None:
    p = open_partition(segment_bytes=4 << 20)
    p.ensure_head(3 << 20)
    p.append(batch())
    capacity = p.kernel.capacity
    asked = []
    p.before_give_back.append(lambda partition: asked.append(partition) or False)
    leave_alone(p)
    assert asked == [p] and p.kernel.capacity == capacity
    # ... nor when somebody came while the others were asked
    p.before_give_back[:] = [lambda partition: partition.head.acquire() is not None]
    leave_alone(p)
    assert p.kernel.capacity == capacity
    p.head.release()
    p.before_give_back.clear()
    leave_alone(p)
    assert p.kernel.capacity == 4096
    p.ensure_head(1000)
    p._use.quiet_since = LONG_AGO
    p.ensure_head(1 << 20)
    p.flush_due(NOW)
    assert p.kernel.capacity > 1 << 20, "who asks for the head has time to begin"


def test_appends_beside_giving_back(memory_path, batch, seed, monkeypatch) -> None:
    """Two threads append, two read, one gives back again and again."""
    for module in ("rolling", "segment"):
        monkeypatch.setattr(f"kdirect.log.{module}.LEAST_GIVEN_BACK", 4096)
    monkeypatch.setattr(growth, "QUIET_S", 0.0)
    m = LogManager(
        [memory_path], LogConfig(segment_bytes=256 << 10, index_interval_bytes=200)
    ).open()
    p = m.create_partition(TP)
    errors: list[BaseException] = []
    done = threading.Event()

    def guarded(work, *arguments) -> threading.Thread:
        def run() -> None:
            try:
                work(*arguments)
            except BaseException as e:
                errors.append(e)
                done.set()

        return threading.Thread(target=run)

    def append(i: int) -> None:
        rng = random.Random(seed + i)
        for _ in range(700):
            assert p.append(batch(value_bytes=rng.choice([20, 500, 5000]))).error == 0
            if rng.random() < 0.1:
                time.sleep(0.001)

    def read() -> None:
        at = 0
        while not (done.is_set() and at >= p.log_end_offset):
            for buffer in p.read(at, 50_000):
                for info in iterate_batches(buffer):  # CRCs, straight from the mapping
                    assert info.base_offset == at
                    at = info.next_offset
            time.sleep(0.0005)

    def give_back() -> None:
        while not done.is_set():
            p.flush_due(NOW)

    appenders = [guarded(append, i) for i in range(2)]
    others = [guarded(read), guarded(read), guarded(give_back)]
    for t in appenders + others:
        t.start()
    for t in appenders:
        t.join()
    done.set()
    for t in others:
        t.join()
    assert not errors, errors
    statistics = p.statistics()
    assert statistics["log_given_back_bytes"] > 0 and statistics["log_head_growths"] > 10
    assert offsets(p) == list(range(1400)) and tail_is_zeros(p)
    m.close()
    with LogManager([memory_path]) as m:
        assert offsets(m.partitions[TP]) == list(range(1400))


# -- restarts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("given_back", [False, True])
def test_a_broker_killed_between_steps_comes_back(memory_path, batch, given_back) -> None:
    """With files longer than their records, or just as long, or shorter than ``segment.bytes``:
    whatever the last step left."""
    config = LogConfig(segment_bytes=1 << 20, index_interval_bytes=500)
    with LogManager([memory_path / "log"], config) as m:
        p = m.create_partition(TP)
        seen = set()
        n = 0
        while len(p.segments) == 1:
            p.append(batch(value_bytes=4000))
            n += 1
            if p.kernel.capacity in seen:
                continue
            seen.add(p.kernel.capacity)
            if given_back:
                leave_alone(p)
            image = memory_path / "image"
            shutil.copytree(memory_path / "log", image)
            (image / ".kafka_cleanshutdown").unlink(missing_ok=True)
            for _ in range(2):  # killed, then stopped
                with LogManager([image], config) as other:
                    q = other.partitions[TP]
                    assert offsets(q) == list(range(q.log_end_offset)) and q.log_end_offset >= n
                    assert q.append(batch(value_bytes=10)).base_offset == q.log_end_offset - 1 >= n
                    assert (
                        q.kernel.capacity == q.head.mapped_length < q.head.size + 8192
                        and tail_is_zeros(q)
                    )
            shutil.rmtree(image)
        assert len(seen) >= 3


def test_reopening_takes_what_is_needed_and_larger_segments_count_from_the_next_roll(
    open_partition, batch
) -> None:
    p = open_partition(segment_bytes=64 << 10)
    p.append(batch(value_bytes=10_000))
    p = open_partition(segment_bytes=64 << 10)
    assert p.append(batch(value_bytes=10_000)).error == 0
    assert p.kernel.capacity <= 24 << 10 and p.head.reserved_length == 64 << 10
    p.reconfigure(LogConfig(segment_bytes=1 << 20))
    while len(p.segments) == 1:
        p.append(batch(value_bytes=10_000))
    assert p.segments[0].size <= 64 << 10 and p.head.reserved_length == 1 << 20


@pytest.mark.parametrize("records", [0, 1])
def test_a_head_that_somebody_may_still_write_moves_to_a_fresh_file(
    open_partition, batch, records
) -> None:
    p = open_partition(segment_bytes=1 << 20)
    p.ensure_head(100)
    for _ in range(records):
        p.append(batch())
    old, inode = p.head.acquire(), os.stat(p.head.path).st_ino
    length = old.mapped_length
    new = p.fence_head()
    assert new is p.head is not old and os.stat(new.path).st_ino != inode and old.sealed
    assert os.fstat(old.fd).st_size == length, "its pages are not used again"
    assert p.append(batch(value_bytes=100_000)).base_offset == records and tail_is_zeros(p)
    old.release()
    assert offsets(p) == list(range(records + 1))
    p = open_partition(segment_bytes=1 << 20)
    assert offsets(p) == list(range(records + 1))


# -- locks that an event loop takes ----------------------------------------------------------------


def test_no_file_work_is_done_with_a_lock_held_that_readers_take(
    memory_path, batch, monkeypatch
) -> None:
    """Growing, rolling, giving back, retention, deletion and the end of a broker: none of them
    makes who looks at a partition wait for a file."""
    seen: set[str] = set()
    wrong: list[str] = []
    locked = []

    def watch(owner, name: str) -> None:
        do = getattr(owner, name)

        def watched(*arguments, **named):
            seen.add(name)
            held = [what for what, lock in locked if lock._is_owned()]
            if held:
                wrong.append(f"{name} with the lock of {held}")
            return do(*arguments, **named)

        monkeypatch.setattr(owner, name, watched)

    for name in (
        "rename",
        "truncate",
        "ftruncate",
        "posix_fallocate",
        "unlink",
        "fsync",
        "fdatasync",
        "mkdir",
    ):
        watch(os, name)
    watch(segment_module, "punch_hole")
    add = Partition._add_segment

    def added(partition: Partition, segment) -> None:
        locked.append((segment.path.name, segment._lock))
        add(partition, segment)

    monkeypatch.setattr(Partition, "_add_segment", added)
    with LogManager([memory_path], LogConfig(segment_bytes=256 << 10)) as m:
        p = m.create_partition(TP)
        locked.append(("the partition", p._lock))
        held = []
        for i in range(150):
            p.append(batch(value_bytes=5000))
            if i % 20 == 0:
                held.append(p.head.acquire())
        p.roll()
        p.ensure_head(200 << 10)
        p.append(batch())
        leave_alone(p)
        p.append(batch(value_bytes=100_000))
        p.fence_head()
        p.delete_records(80)
        p.flush()
        for segment in held:
            segment.release()
        p.append(batch(timestamp_ms=NOW - 3_600_000))
        p.reconfigure(LogConfig(segment_bytes=256 << 10, retention_ms=0))
        p.apply_retention(NOW + 10_000)
        p.append(batch())
        m.removals.make_room(memory_path)
        m.delete_topic("t")
    assert not wrong, wrong
    assert seen >= {
        "rename",
        "truncate",
        "ftruncate",
        "posix_fallocate",
        "unlink",
        "fsync",
        "punch_hole",
    }
    assert len(locked) >= 5


def test_looking_at_partitions_does_not_wait_for_who_makes_or_deletes_them(
    memory_path, monkeypatch
) -> None:
    with LogManager([memory_path]) as m:
        p = m.create_partition(TP)
        inside, go_on = threading.Event(), threading.Event()
        load = manager_module.load_partition

        def slow(*arguments, **named):
            inside.set()
            assert go_on.wait(30)
            return load(*arguments, **named)

        monkeypatch.setattr(manager_module, "load_partition", slow)
        maker = threading.Thread(target=m.create_partition, args=(TopicPartition("t", 1),))
        maker.start()
        assert inside.wait(30)
        found: list[object] = []
        looker = threading.Thread(
            target=lambda: found.extend(
                [m.partitions_of("t"), m.topic_id("t"), m.statistics()["log_partitions"]]
            )
        )
        looker.start()
        looker.join(20)
        go_on.set()
        maker.join()
        looker.join()
        assert found == [[p], p.topic_id, 1]
        assert [x.topic_partition.partition for x in m.partitions_of("t")] == [0, 1]
        assert m.partitions_of("none") == [] and m.topic_id("none") is None
        m.delete_topic("t")
        assert m.partitions_of("t") == [] and m.topic_id("t") is None
