"""Cutting a log short: whatever was appended, rolled, cut and reopened before, the log, its
indexes, leader epochs and producers are those of what was kept."""

from __future__ import annotations

import contextlib
import random
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from kdirect.errors import LogError, OffsetOutOfRangeError
from kdirect.format import layout
from kdirect.format.batch import iterate_batches
from kdirect.log import checkpoint
from kdirect.log.config import LogConfig
from kdirect.log.kernel import NOT_CONTIGUOUS
from kdirect.log.kernel_producers import known_producers
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from kdirect.log.segment import Segment
from kdirect.model import TopicPartition
from tests.log.conftest import make_batch, stamped
from tests.log.test_kernel import Slots

TP = TopicPartition("t", 0)
NOW = int(time.time() * 1000)
FENCED = 74
ROUNDS = 30


def contents(p: Partition) -> list[bytes]:
    """Every readable batch, with offset and leader epoch."""
    out: list[bytes] = []
    offset = p.log_start_offset
    while buffers := p.read(offset, 20_000):
        for buffer in buffers:
            data = bytes(buffer)
            for info in iterate_batches(data):
                if info.next_offset > offset:
                    out.append(data[info.position : info.position + info.size])
                    offset = info.next_offset
    assert offset == p.high_watermark
    return out


class Model:
    """What a log that is appended to, cut and reopened should hold: batches, each with its offset,
    its leader epoch and its producer's sequence."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        self.rng = rng
        self.config = LogConfig(
            segment_bytes=rng.choice([8192, 16384, 65536]),
            index_interval_bytes=rng.choice([200, 4096]),
        )
        self.directory = root / "log0"
        self.copies = 0
        self.batches: list[tuple[int, int, bytes]] = []  # offset, end offset, bytes
        self.epoch = 0
        self.manager = LogManager([self.directory], self.config).open()
        self.manager.create_partition(TP)

    @property
    def partition(self) -> Partition:
        return self.manager.partitions[TP]

    @property
    def end(self) -> int:
        return self.batches[-1][1] if self.batches else 0

    def sequence(self, producer: int) -> int:
        """The next one, by what is in the log."""
        for _, _, data in reversed(self.batches):
            info = next(iterate_batches(data))
            if info.producer_id == producer:
                return info.base_sequence + info.records_count
        return 0

    def new_batch(self) -> bytes:
        rng = self.rng
        size = rng.choice([0, 50, 500, 1500])
        producer = rng.choice([-1, 1, 2])
        sequence = self.sequence(producer) if producer > 0 else -1
        return make_batch(
            rng.randrange(1, 4), value_bytes=size, fill=bytes([rng.randrange(1, 256)]),
            timestamp_ms=NOW - rng.randrange(1000), producer_id=producer,
            producer_epoch=0 if producer > 0 else -1, sequence=sequence,
        )  # fmt: skip

    def note(self, data: bytes) -> None:
        records = struct.unpack(">i", data[57:61])[0]
        self.batches.append((self.end, self.end + records, stamped(data, self.end, self.epoch)))

    def append(self) -> None:
        data = self.new_batch()
        offset = self.end
        if self.rng.random() < 0.3:  # a copy of another log, perhaps of a later leadership
            self.epoch += self.rng.random() < 0.3
            result = self.partition.append_as_stamped(stamped(data, offset, self.epoch), NOW)
        else:
            result = self.partition.append(data, NOW)
        assert (result.error, result.duplicate, result.base_offset) == (0, False, offset)
        self.note(data)

    def lead(self) -> None:
        self.epoch += 1
        self.partition.set_leader_epoch(self.epoch)

    def cut(self) -> None:
        offset = self.rng.randrange(self.end + 1)
        kept = [b for b in self.batches if b[1] <= offset]
        end = kept[-1][1] if kept else 0
        was_head = self.partition.segments[-1].is_head
        assert self.partition.truncate_to(offset) == (end if offset < self.end else self.end)
        assert self.partition.segments[-1].is_head == was_head
        if offset < self.end:
            self.batches = kept
            self.epoch = struct.unpack(">i", kept[-1][2][12:16])[0] if kept else 0

    def reopen(self, *, clean: bool) -> None:
        if not clean:  # what a kill leaves: nothing lost, no marker, checkpoints as they were
            self.copies += 1
            copy = self.directory.parent / f"log{self.copies}"
            shutil.copytree(self.directory, copy)
        self.manager.close(clean=clean)
        if not clean:
            self.directory = copy
        self.manager = LogManager([self.directory], self.config).open()

    def check(self) -> None:
        p = self.partition
        assert p.log_end_offset == p.high_watermark == self.end
        assert contents(p) == [data for _, _, data in self.batches]
        for at, end, data in self.batches:
            epoch = struct.unpack(">i", data[12:16])[0]
            assert p.epochs_of(p.source_for(at), at)[0] == epoch
            assert p.source_for(at).locate(end - 1)[1] == at
        assert p.recovery_point <= self.end
        known = {
            e.producer_id: e.batches[-1][1] + 1 for e in known_producers(p.kernel)[0] if e.batches
        }
        wanted = {producer: self.sequence(producer) for producer in (1, 2)}
        assert known == {k: v for k, v in wanted.items() if v}
        times = [s.max_timestamp for s in p.segments if s.size]
        assert all(t <= NOW for t in times)
        found = p.offset_for_timestamp(NOW - 1001)
        assert (found is not None and found[0] == 0) == bool(self.batches)


def test_a_log_is_what_was_kept(memory_path, seed) -> None:
    for round_ in range(ROUNDS):
        rng = random.Random(seed + round_)
        root = memory_path / str(round_)
        root.mkdir()
        m = Model(root, rng)
        try:
            for _ in range(60):
                what = rng.random()
                if what < 0.6:
                    m.append()
                elif what < 0.7:
                    m.partition.roll()
                elif what < 0.85:
                    m.cut()
                    m.check()
                elif what < 0.9:
                    m.lead()
                elif what < 0.93:
                    m.partition.flush()
                else:
                    m.reopen(clean=rng.random() < 0.5)
                    m.check()
            m.check()
        except BaseException:
            print(f"round {round_}: seed {seed + round_}")
            raise
        finally:
            m.manager.close()
            shutil.rmtree(root)


class Killed(Exception):
    """The process ends here."""


@pytest.mark.parametrize("flushed", [False, True], ids=["unflushed", "flushed"])
def test_a_crash_in_the_middle_of_a_cut_recovers(memory_path, monkeypatch, flushed) -> None:
    """Before and after each change of a file that a cut makes: the log that is found begins with
    what was to be kept and goes on with what there was."""
    config = LogConfig(segment_bytes=8192, index_interval_bytes=300)
    manager = LogManager([memory_path / "log"], config).open()
    p = manager.create_partition(TP)
    datas = []
    for i in range(40):
        if i % 7 == 6:
            p.set_leader_epoch(i)
        data = make_batch(1, value_bytes=700, producer_id=5, producer_epoch=0, sequence=i)
        assert p.append(data, NOW).error == 0
        datas.append(stamped(data, i, p.leader_epoch))
    if flushed:
        p.flush()
        manager.checkpoint()
    assert len(p.segments) > 3
    copies: list[Path] = []

    def copy() -> None:
        to = memory_path / f"copy{len(copies)}"
        with contextlib.suppress(FileNotFoundError):
            shutil.copytree(memory_path / "log", to)
            copies.append(to)

    def watched(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            copy()
            try:
                return original(*args, **kwargs)
            finally:
                copy()

        monkeypatch.setattr(owner, name, call)

    watched(checkpoint.os, "rename")
    watched(checkpoint.os, "fsync")
    watched(Segment, "delete")
    cut = 17
    assert p.truncate_to(cut) == cut
    monkeypatch.undo()
    manager.close(clean=False)
    assert len(copies) > 20
    ends = set()
    for path in copies:
        with LogManager([path], config).open() as m:
            q = m.partitions[TP]
            end = q.log_end_offset
            ends.add(end)
            assert cut <= end <= 40 and contents(q) == datas[:end]
            (entry,) = known_producers(q.kernel)[0]
            assert entry.batches[-1][1] == end - 1
            assert q.epochs_of(q.source_for(end - 1), end - 1)[0] <= q.leader_epoch
            assert q.truncate_to(cut) == cut
            again = make_batch(1, producer_id=5, producer_epoch=0, sequence=cut)
            result = q.append(again, NOW)
            assert (result.error, result.base_offset) == (0, cut)
            assert contents(q)[:cut] == datas[:cut]
    assert {cut, 40} <= ends and len(ends) > 2


def test_readers_of_what_is_cut_off_keep_their_bytes(open_partition, batch) -> None:
    p = open_partition(segment_bytes=16384, index_interval_bytes=300)
    for _ in range(30):
        assert p.append(batch(value_bytes=1000)).error == 0
    before = [bytes(x) for x in p.read(0, 1 << 20)]
    held = p.read(0, 1 << 20)
    old = p.segments
    slots = Slots(1)
    p.kernel.attach_slot(slots.address(0), 9)
    assert p.truncate_to(20) == 20
    assert slots.read(0)["flags"] == layout.SLOT_FLAG_ASSIGNED | layout.SLOT_FLAG_REVOKED
    assert [bytes(x) for x in held] == before
    for _ in range(20):
        assert p.append(batch(value_bytes=900, fill=b"n")).error == 0
    assert [bytes(x) for x in held] == before, "new records are not written into the old file"
    assert all(not s.path.exists() or s.base_offset <= 20 for s in old)
    assert len(contents(p)) == 40


def test_what_cannot_be_cut(open_partition, batch) -> None:
    p = open_partition()
    for _ in range(5):
        p.append(batch(2))
    p.delete_records(4)
    for offset in (3, 11, -1):
        with pytest.raises(OffsetOutOfRangeError):
            p.truncate_to(offset)
    assert p.truncate_to(10) == 10, "nothing to do"
    assert p.truncate_to(7) == 6, "a batch is kept whole or not at all"
    assert p.append(batch()).base_offset == 6


def test_a_cut_without_space_changes_nothing(open_partition, batch, monkeypatch) -> None:
    p = open_partition()
    for _ in range(5):
        p.append(batch())

    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("kdirect.log.truncation.os.sendfile", full)
        with pytest.raises(LogError):
            p.truncate_to(3)
    assert p.log_end_offset == 5 and len(contents(p)) == 5
    assert not list(p.directory.glob("*.tmp"))
    assert p.append(batch()).base_offset == 5


# -- batches that keep what they carry -------------------------------------------------------------


def test_a_copy_keeps_offsets_and_epochs(open_partition, batch, tmp_path) -> None:
    """A follower that copies a leader's bytes has the leader's log, and its producers."""
    leader = open_partition(segment_bytes=8192)
    for i in range(30):
        if i in (10, 20):
            leader.set_leader_epoch(i)
        data = batch(2, value_bytes=200, producer_id=3, producer_epoch=0, sequence=2 * i)
        assert leader.append(data, NOW).error == 0
    with LogManager([tmp_path / "follower"], LogConfig(segment_bytes=16384)) as m:
        follower = m.create_partition(TP)
        while follower.log_end_offset < 60:
            for buffer in leader.read(follower.log_end_offset, 3000):
                result = follower.append_as_stamped(buffer, NOW)
                assert result.error == 0
        assert contents(follower) == contents(leader)
        assert follower.leader_epoch == 20
        for epoch in (0, 10, 20):
            assert follower.end_offset_for_epoch(epoch) == leader.end_offset_for_epoch(epoch)
        (mine,), (its,) = known_producers(follower.kernel)[0], known_producers(leader.kernel)[0]
        assert mine.batches == its.batches


def test_what_does_not_go_on_is_refused(open_partition, batch) -> None:
    p = open_partition()
    one = batch(2)
    assert p.append_as_stamped(stamped(one, 0, 3)).base_offset == 0
    assert p.leader_epoch == 3
    view = p.kernel.view()
    for data, error in (
        (stamped(one, 1, 3), NOT_CONTIGUOUS),
        (stamped(one, 3, 3), NOT_CONTIGUOUS),
        (stamped(one, 2, 3) + stamped(one, 2, 3), NOT_CONTIGUOUS),
        (stamped(one, 2, 2), FENCED),
        (stamped(one, 2, 4) + stamped(one, 4, 3), FENCED),
        (stamped(one, 2, -1), FENCED),
        (stamped(one, 2, 3)[:-1], 2),
        (stamped(one, 2, 3)[:-1] + b"?", 2),
        (b"", 2),
    ):
        assert p.append_as_stamped(data).error == error
    assert p.kernel.view() == view and p.leader_epoch == 3
    both = stamped(one, 2, 3) + stamped(one, 4, 7)
    result = p.append_as_stamped(both)
    assert (result.error, result.base_offset, result.last_offset, result.batches) == (0, 2, 5, 2)
    assert p.leader_epoch == 7 and p.end_offset_for_epoch(3) == (3, 4)
    assert p.append(batch()).base_offset == 6, "the present leadership's own records"


def test_bytes_in_the_head_are_committed_as_they_are(batch, head) -> None:
    h = head(base_offset=10)
    h.kernel.set_leader_epoch(2)
    one = stamped(batch(2), 10, 2)
    h.put(0, one)
    assert h.kernel.commit_as_stamped(10, 5, len(one), NOW).error == -3, "not the tail"
    r = h.kernel.commit_as_stamped(10, 0, len(one), NOW)
    assert (r.error, r.base_offset, r.last_offset, h.bytes) == (0, 10, 11, one)
    later = stamped(batch(), 12, 3)
    h.put(len(one), later)
    assert h.kernel.commit_as_stamped(10, len(one), len(later), NOW).error == -6
    assert h.map[len(one) : len(one) + len(later)] == later, "it stays until the epoch was told"
    h.kernel.set_leader_epoch(3)
    assert h.kernel.commit_as_stamped(10, len(one), len(later), NOW).error == 0
    end = h.kernel.end_position
    h.put(end, stamped(batch(), 99, 3))
    assert h.kernel.commit_as_stamped(10, end, len(batch()), NOW).error == NOT_CONTIGUOUS
    assert not any(h.map[end : end + 200]), "the tail is zeros again"
