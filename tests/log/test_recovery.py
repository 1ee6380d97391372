"""Starting after a crash: what was acknowledged and flushed is there, nothing else than a prefix of
what was appended.

The crash model.  A file consists of pages; a sync makes the present content of the segment files
durable, and their names. At a crash the disk holds, sector by sector, either what the last sync
left or anything written since; a file created since may be missing, short, or full of zeros;
indexes and producer snapshots may be anything at all.  Checkpoints are replaced atomically, so they
are what was written last.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import struct
import time
from pathlib import Path

import pytest

from kdirect.errors import CorruptLogError
from kdirect.format.batch import iterate_batches
from kdirect.log.config import LogConfig
from kdirect.log.kernel_producers import known_producers
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from kdirect.log.segment_search import position_for
from kdirect.model import TopicPartition
from tests.log.conftest import commit_at_tail, stamped

TP = TopicPartition("t", 0)
NOW = int(time.time() * 1000)
SECTOR = 512
PAGE = 4096
ROUNDS = 50


def all_batches(partition: Partition) -> dict[int, bytes]:
    """Base offset -> bytes of every readable batch."""
    out: dict[int, bytes] = {}
    offset = partition.log_start_offset
    while buffers := partition.read(offset, 50_000):
        for buffer in buffers:
            data = bytes(buffer)
            for info in iterate_batches(data):  # checks the CRC
                if info.next_offset <= offset:
                    continue
                assert info.base_offset == offset or not out, f"gap before {info.base_offset}"
                out[info.base_offset] = data[info.position : info.position + info.size]
                offset = info.next_offset
    assert offset == partition.log_end_offset == partition.high_watermark
    return out


class Crashing:
    """A broker's log directory, what was appended to it, and what of it is durable."""

    def __init__(self, root: Path, rng: random.Random, make_batch, **fields) -> None:
        self.root, self.rng, self.make_batch = root, rng, make_batch
        self.config = LogConfig(
            segment_bytes=rng.choice([8192, 16384, 65536]),
            index_interval_bytes=rng.choice([200, 4096]),
            **fields,
        )
        self.directory = root / "log0"
        self.starts = 0
        self.appended: dict[int, bytes] = {}  # base offset -> stamped bytes
        self.sequences = dict.fromkeys((1, 2), 0)
        self.last_request: dict[int, tuple[int, bytes]] = {}  # producer -> offset, request
        self.acknowledged = 0  # every record below is flushed
        self.durable: dict[str, bytes] = {}
        self.manager = LogManager([self.directory], self.config).open()
        self.manager.create_partition(TP)
        self.sync()

    @property
    def partition(self) -> Partition:
        return self.manager.partitions[TP]

    def sync(self) -> None:
        self.partition.flush()
        self.note_syncs()
        assert self.acknowledged == self.partition.log_end_offset

    def note_syncs(self) -> None:
        """What the log says is on disk is, up to its recovery point; not what lies behind it."""
        p = self.partition
        if p.recovery_point > self.acknowledged or not self.durable:
            self.acknowledged = p.recovery_point
            for segment in p.segments:
                if segment.base_offset <= self.acknowledged:
                    synced = position_for(segment, min(self.acknowledged, segment.end_offset))
                    content = segment.path.read_bytes()
                    self.durable[segment.path.name] = content[:synced].ljust(len(content), b"\0")

    def append(self) -> None:
        rng, p = self.rng, self.partition
        records = rng.randrange(1, 4)
        fill = bytes([rng.randrange(1, 256)])
        producer = rng.choice([None, 1, 2])
        sizes = {
            "value_bytes": rng.choice([0, 10, 100, 1000, 2000]),
            "fill": fill,
            "timestamp_ms": NOW - rng.randrange(1000),
        }
        if producer is None:
            data = self.make_batch(records, **sizes)
        else:
            data = self.make_batch(
                records,
                producer_id=producer,
                producer_epoch=0,
                sequence=self.sequences[producer],
                **sizes,
            )
        if (
            rng.random() < 0.5
            and p.head is not None
            and p.head.is_head
            and p.kernel.capacity - p.kernel.end_position >= len(data)
        ):
            ctypes.memmove(p.head.address + p.kernel.end_position, data, len(data))
            r = commit_at_tail(p.kernel, len(data), NOW)
        else:
            r = p.append(data, NOW)
        assert r.error == 0 and not r.duplicate
        self.appended[r.base_offset] = stamped(data, r.base_offset)
        if producer is not None:
            self.sequences[producer] += records
            self.last_request[producer] = (r.base_offset, data)

    def scribble(self) -> None:
        """An RDMA producer wrote behind the tail and never got a commit."""
        p = self.partition
        if p.head is not None and p.head.is_head:
            one = self.make_batch(2, value_bytes=100)
            data = (one * 2)[: p.kernel.capacity - p.kernel.end_position]
            if p.log_end_offset == 0:
                # It names offset 0, as the first batch of a log does: after a crash nobody can tell
                # that it was never committed.
                self.appended[0] = one
            ctypes.memmove(p.head.address + p.kernel.end_position, data, len(data))

    def give_back(self) -> None:
        """Nothing was appended for a while."""
        p = self.partition
        p._use.quiet_since = float("-inf")
        self.manager.flush_due(NOW)
        p._use.quiet_since = float("-inf")
        self.manager.flush_due(NOW)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            dice = self.rng.random()
            if dice < 0.77:
                self.append()
            elif dice < 0.80:
                self.give_back()
            elif dice < 0.88:
                self.sync()
            elif dice < 0.92:
                self.partition.roll()
            elif dice < 0.95:
                self.manager.checkpoint()
            elif dice < 0.97:
                self.manager.flush_due(NOW)
            elif dice < 0.98:
                self.partition.delete_records(
                    self.rng.randrange(self.partition.log_start_offset, self.acknowledged + 1)
                )
            else:
                self.scribble()
            self.note_syncs()

    def crash(self) -> None:
        """Leave a disk image of the model in a fresh directory, and start from it."""
        rng = self.rng
        self.starts += 1
        image = self.root / f"log{self.starts}"
        shutil.copytree(self.directory, image)
        # The start of the log may be lost again, but not what is readable: remember what is
        # allowed.
        for path in sorted((image / str(TP)).iterdir()):
            if path.suffix == ".log":
                self.crash_segment(path)
            elif path.suffix in (".index", ".timeindex", ".snapshot"):
                self.crash_anything(path)
        if rng.random() < 0.2:
            (image / str(TP) / "head.log.tmp").write_bytes(b"left over")
        self.manager.close(clean=False)
        shutil.rmtree(self.directory)
        self.directory = image
        self.manager = LogManager([image], self.config).open()

    def crash_segment(self, path: Path) -> None:
        rng = self.rng
        new = path.read_bytes()
        old = self.durable.get(path.name)
        if old is None:
            fate = rng.random()
            if fate < 0.2:
                path.unlink()
                return
            old = bytes(rng.choice([0, len(new), len(new)]))
        length = max(len(old), len(new)) if rng.random() < 0.7 else len(old)
        old, new = old.ljust(length, b"\0"), new.ljust(length, b"\0")
        written = rng.choice([0.0, 0.3, 0.7, 1.0])
        out = bytearray(old)
        for page in range(0, length, PAGE):
            torn = rng.random() < 0.1
            take = rng.random() < written
            for at in range(page, min(page + PAGE, length), SECTOR):
                if rng.random() < 0.5 if torn else take:
                    out[at : at + SECTOR] = new[at : at + SECTOR]
        path.write_bytes(out)

    def crash_anything(self, path: Path) -> None:
        rng = self.rng
        fate = rng.random()
        data = bytearray(path.read_bytes())
        if fate < 0.2:
            path.unlink()
        elif fate < 0.4:
            path.write_bytes(data[: rng.randrange(len(data) + 1)])
        elif fate < 0.6:
            for _ in range(3):
                if data:
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
        elif fate < 0.7:
            path.write_bytes(bytes(len(data)))

    def check(self) -> None:
        p = self.partition
        end = p.log_end_offset
        assert end >= self.acknowledged, (
            f"flushed records are gone: the log ends at {end}, {self.acknowledged} was acknowledged"
        )
        found = all_batches(p)
        for offset, data in found.items():
            assert self.appended[offset] == data, f"batch {offset} is not what was appended"
        start = p.log_start_offset
        expected = [o for o in self.appended if start <= o < end]
        assert [o for o in found if o >= start] == expected
        assert (
            end == 0
            or end in self.appended
            or end == max(self.appended) + count(self.appended[max(self.appended)])
        )
        self.check_indexes(p)
        self.check_producers(p)

    def check_indexes(self, p: Partition) -> None:
        for offset in self.appended:
            if p.log_start_offset <= offset < p.log_end_offset:
                segment = p.source_for(offset).segment
                assert segment.base_offset + 0 <= offset
                position = position_for(segment, offset)
                segment.acquire()
                head = ctypes.string_at(segment.address + position, 8)
                segment.release()
                assert struct.unpack(">q", head)[0] == offset

    def check_producers(self, p: Partition) -> None:
        """Repeat the last request of each producer: it is a repetition if it survived, and appended
        if not."""
        end = p.log_end_offset
        for offset in [o for o in self.appended if o >= end]:
            del self.appended[offset]
        for producer, (offset, request) in list(self.last_request.items()):
            if p.log_start_offset <= offset < end:
                r = p.append(request, NOW)
                assert (r.error, r.duplicate, r.base_offset) == (0, True, offset)
            else:
                # Lost: the client would send everything since the last acknowledgement again; here
                # it starts a new life.
                del self.last_request[producer]
                fresh = self.make_batch(
                    1, producer_id=producer, producer_epoch=0, sequence=self.sequences[producer]
                )
                r = p.append(fresh, NOW)
                if r.error == 0:
                    self.appended[r.base_offset] = stamped(fresh, r.base_offset)
                    self.sequences[producer] += 1
                else:
                    assert r.error == 45
                    survived = [
                        e for e in known_producers(p.kernel)[0] if e.producer_id == producer
                    ]
                    self.sequences[producer] = survived[0].batches[-1][1] + 1


def count(data: bytes) -> int:
    return int(struct.unpack(">i", data[57:61])[0])


@pytest.mark.parametrize("hold", [False, True], ids=["plain", "group-commit"])
def test_after_a_crash_there_is_a_prefix_with_everything_flushed(
    memory_path, batch, seed, hold, monkeypatch
) -> None:
    give_back_heads_of_some_pages(monkeypatch)
    for round_ in range(ROUNDS):
        crash_some_times(memory_path / str(round_), seed + round_, batch, hold)


def test_bytes_at_the_start_of_a_log_may_become_its_first_batch(
    memory_path, batch, monkeypatch
) -> None:
    """A seed of the test above that failed: it had not thought of that."""
    give_back_heads_of_some_pages(monkeypatch)
    crash_some_times(memory_path / "0", 3971204467, batch, hold=False)


def give_back_heads_of_some_pages(monkeypatch) -> None:
    for module in ("rolling", "segment"):
        monkeypatch.setattr(f"kdirect.log.{module}.LEAST_GIVEN_BACK", 4096)


def crash_some_times(root: Path, seed: int, batch, hold: bool) -> None:
    rng = random.Random(seed)
    root.mkdir()
    c = Crashing(root, rng, batch, flush_before_ack=hold)
    try:
        for _ in range(rng.randrange(1, 4)):
            c.run(rng.randrange(1, 60))
            c.crash()
            c.check()
            c.sync()
        c.manager.close()
        c.manager = LogManager([c.directory], c.config).open()
        c.check()
    except BaseException:
        print(f"seed {seed}")
        raise
    finally:
        c.manager.close()
        shutil.rmtree(root)


def killed(partition_directory: Path, to: Path) -> Path:
    """A copy of the log directory as a kill -9 leaves it: nothing lost, no marker."""
    shutil.copytree(partition_directory.parent, to)
    (to / ".kafka_cleanshutdown").unlink(missing_ok=True)
    return to


def reopen(directory: Path, **fields) -> LogManager:
    return LogManager([directory], LogConfig(**{"segment_bytes": 1 << 20, **fields})).open()


def test_a_killed_broker_loses_nothing(open_partition, batch, tmp_path) -> None:
    p = open_partition(segment_bytes=8192)
    for _ in range(50):
        p.append(batch(2, value_bytes=200))
    before = all_batches(p)
    with reopen(killed(p.directory, tmp_path / "copy"), segment_bytes=8192) as m:
        q = m.partitions[TP]
        assert all_batches(q) == before and q.recovery_point == 100, "recovered records are synced"
        assert q.append(batch()).base_offset == 100


@pytest.mark.parametrize("records", [0, 3])
def test_bytes_of_a_producer_that_names_an_older_epoch_are_no_record(
    open_partition, batch, tmp_path, records
) -> None:
    """They lie where the next record is to be, in a segment without any, and were not committed."""
    p = open_partition()
    for _ in range(records):
        p.append(batch())
    if records:
        p.roll()
    p.set_leader_epoch(2)
    for epoch in (0, 1, 2):
        directory = killed(p.directory, tmp_path / f"copy{epoch}")
        path = directory / "t-0" / f"{records:020d}.log"
        landed = stamped(batch(), records, epoch)
        path.write_bytes(landed.ljust(PAGE, b"\0"))
        with reopen(directory) as m:
            q = m.partitions[TP]
            taken = epoch == 2  # which looks like one that was
            assert q.log_end_offset == records + taken
            assert q.append(batch()).base_offset == records + taken
            assert list(all_batches(q)) == list(range(records + taken + 1))


@pytest.mark.parametrize("damage", ["truncate", "flip", "zero", "rubbish behind"])
def test_damage_behind_the_recovery_point_cuts(
    open_partition, batch, tmp_path, seed, damage, caplog
) -> None:
    rng = random.Random(seed)
    p = open_partition(segment_bytes=64 << 10, index_interval_bytes=500)
    datas = [batch(1, value_bytes=100 + i) for i in range(100)]
    for data in datas:
        p.append(data)
    size = p.head.size
    ends = [0]
    for data in datas:
        ends.append(ends[-1] + len(data))
    for i in range(8):
        directory = killed(p.directory, tmp_path / f"copy{i}")
        path = directory / "t-0" / "00000000000000000000.log"
        original = path.read_bytes()
        content = bytearray(original)
        at = rng.randrange(size)
        if damage == "truncate":
            content = content[:at]
        elif damage == "flip":
            content[at] ^= 1 << rng.randrange(8)
        elif damage == "zero":
            content[at : at + 600] = bytes(600)
        else:
            at = size
            content[at : at + 300] = rng.randbytes(300)
        path.write_bytes(content)
        if damage == "zero":  # zeros may hit zeros
            at = next(i for i in range(at, size + 1) if i == size or content[i] != original[i])
        survivors = sum(end <= at for end in ends) - 1
        caplog.clear()
        with reopen(directory, segment_bytes=64 << 10, index_interval_bytes=500) as m:
            q = m.partitions[TP]
            found = all_batches(q)
            if damage == "flip" and at - ends[survivors] in range(12, 16):
                assert len(found) in (survivors, 100), (
                    "the leader epoch: covered by neither the CRC nor the offsets, and worth no cut"
                )
            else:
                assert len(found) == survivors
            assert (
                len(found) == 100
                or "is cut at offset" in caplog.text
                or damage in ("truncate", "zero")
            )
            assert q.append(batch()).base_offset == len(found)
            assert len(all_batches(q)) == len(found) + 1


def test_what_a_crash_leaves_preallocated_is_shortened_by_a_clean_close(
    open_partition, batch, tmp_path
) -> None:
    p = open_partition(segment_bytes=64 << 10)
    p.ensure_head(1)
    empty = killed(p.directory, tmp_path / "empty")
    p.append(batch())
    p.roll()
    p.append(batch())
    some = killed(p.directory, tmp_path / "some")
    for directory, sizes in ((empty, [0]), (some, [len(batch()), len(batch())])):
        path = directory / "t-0" / f"{0:020d}.log"
        with open(path, "ab") as f:
            f.truncate(64 << 10)
        with reopen(directory) as m:
            q = m.partitions[TP]
            assert (
                q.log_end_offset == len(sizes) - (sizes == [0])
                and [s.size for s in q.segments] == sizes
            )
            assert os.stat(path).st_size == 64 << 10, "clients of the broker that died may map it"
        with reopen(directory) as m:
            q = m.partitions[TP]
            assert [
                os.stat(s.path).st_size for s in q.segments
            ] == sizes and q.log_end_offset == len(sizes) - (sizes == [0])


def test_a_gap_sets_later_segments_aside(open_partition, batch, tmp_path, caplog) -> None:
    p = open_partition(segment_bytes=8192)
    for _ in range(12):
        p.append(batch(value_bytes=3000))
    bases = [s.base_offset for s in p.segments]
    directory = killed(p.directory, tmp_path / "copy")
    (directory / "t-0" / f"{bases[2]:020d}.log").unlink()
    with reopen(directory, segment_bytes=8192) as m:
        q = m.partitions[TP]
        assert q.log_end_offset == bases[2] and len(all_batches(q)) == bases[2]
        aside = sorted(f.name for f in q.directory.glob("*.corrupt"))
        assert aside == [f"{b:020d}.log.corrupt" for b in bases[3:]] and "set aside" in caplog.text
        for _ in range(12):
            assert q.append(batch(value_bytes=3000)).error == 0
    with reopen(directory, segment_bytes=8192) as m:
        assert m.partitions[TP].log_end_offset == bases[2] + 12


@pytest.mark.parametrize("preallocated", [True, False])
def test_a_segment_that_is_missing_below_the_recovery_point(
    open_partition, batch, tmp_path, caplog, preallocated
) -> None:
    """What is older is the remnant of a deletion; but when its file is whole, it may as well be
    what Kafka's cleaner left: it is kept."""
    p = open_partition(segment_bytes=8192)
    for _ in range(12):
        p.append(batch(value_bytes=3000))
    p.flush()
    directory = killed(p.directory, tmp_path / "copy")
    (directory / "recovery-point-offset-checkpoint").write_text("0\n1\nt 0 12\n")
    bases = [s.base_offset for s in p.segments]
    (directory / "t-0" / f"{bases[1]:020d}.log").unlink()
    if preallocated:
        os.truncate(directory / "t-0" / f"{0:020d}.log", 8192)
    with reopen(directory, segment_bytes=8192) as m:
        q = m.partitions[TP]
        first = bases[2] if preallocated else 0
        assert (q.log_start_offset, q.log_end_offset) == (first, 12)
        assert (q.directory / f"{0:020d}.log.corrupt").exists() == preallocated
        assert f"offsets [{bases[1]}, {bases[2]}) of t-0 are missing" in caplog.text
        got = [i.base_offset for b in q.read(first, 1 << 20) for i in iterate_batches(bytes(b))]
        assert got == [*range(first, bases[1] if first == 0 else first), *range(bases[2], 12)]


def test_below_the_recovery_point_only_frames_are_looked_at(
    open_partition, batch, tmp_path, caplog
) -> None:
    p = open_partition()
    size = len(batch(value_bytes=100))
    for _ in range(20):
        p.append(batch(value_bytes=100))
    directory = killed(p.directory, tmp_path / "copy")
    path = directory / "t-0" / "00000000000000000000.log"
    content = bytearray(path.read_bytes())
    content[3 * size + 100] ^= 1
    path.write_bytes(content)
    (directory / "recovery-point-offset-checkpoint").write_text("0\n1\nt 0 20\n")
    with reopen(directory) as m:
        assert m.partitions[TP].log_end_offset == 20, (
            "synced records behind a flipped bit are kept; readers check CRCs"
        )
    assert (directory / "recovery-point-offset-checkpoint").read_text() == "0\n1\nt 0 20\n"
    content[5 * size + 16] = 9
    path.write_bytes(content)
    (directory / ".kafka_cleanshutdown").unlink()
    with reopen(directory) as m:
        assert m.partitions[TP].log_end_offset == 5 and "below its recovery point" in caplog.text
        point = (directory / "recovery-point-offset-checkpoint").read_text()
        assert point == "0\n1\nt 0 5\n", "it must not vouch for the records to come"


def test_indexes_are_rebuilt_as_they_were(open_partition, batch, tmp_path) -> None:
    fields = {"segment_bytes": 16384, "index_interval_bytes": 300}
    p = open_partition(**fields)
    rng = random.Random(3)
    for i in range(200):
        p.append(
            batch(2, value_bytes=rng.randrange(300), timestamp_ms=NOW - 1000 + rng.randrange(i + 1))
        )
    p = open_partition(clean=True, **fields)
    originals = {
        f.name: f.read_bytes()
        for f in p.directory.iterdir()
        if f.suffix in (".index", ".timeindex")
    }
    assert len(originals) > 6
    for clean in (True, False):
        directory = killed(p.directory, tmp_path / f"copy{clean}")
        if clean:
            (directory / ".kafka_cleanshutdown").write_text("")
        else:
            (directory / "recovery-point-offset-checkpoint").write_text("0\n1\nt 0 400\n")
        for i, name in enumerate(sorted(originals)):
            path = directory / "t-0" / name
            if i % 3 == 0:
                path.unlink()
            elif i % 3 == 1:
                path.write_bytes(originals[name] + b"\0" * 5)
            elif not clean:
                path.write_bytes(originals[name][:-8] + b"\xff" * 8)
        with reopen(directory, **fields) as m:
            rebuilt = m.partitions[TP].directory
            assert {
                f.name: f.read_bytes()
                for f in rebuilt.iterdir()
                if f.suffix in (".index", ".timeindex")
            } == originals


def test_a_wrong_index_costs_time_and_no_records(open_partition, batch, caplog) -> None:
    fields = {"segment_bytes": 16384, "index_interval_bytes": 300}
    p = open_partition(**fields)
    for _ in range(300):
        p.append(batch(value_bytes=100))
    p = open_partition(**fields)
    path = p.segments[1].offset_index.path
    entries = list(struct.iter_unpack(">II", path.read_bytes()))
    p.close()
    path.write_bytes(
        b"".join(struct.pack(">II", o, max(0, position + 37)) for o, position in entries)
    )
    p = open_partition(**fields)
    for offset in range(300):
        data = bytes(p.read(offset, 1)[0])
        assert struct.unpack(">q", data[:8])[0] == offset
    assert "which is wrong" in caplog.text


def test_a_cleanly_closed_log_is_not_scanned_but_damage_at_its_end_is_told(
    open_partition, batch
) -> None:
    p = open_partition(segment_bytes=16384, index_interval_bytes=300)
    for _ in range(100):
        p.append(batch(value_bytes=100))
    p = open_partition(segment_bytes=16384, index_interval_bytes=300)
    first, last = p.segments[0].path, p.segments[-1].path
    p.close()
    content = bytearray(first.read_bytes())
    content[500:600] = bytes(100)
    first.write_bytes(content)
    p = open_partition(segment_bytes=16384, index_interval_bytes=300)
    assert p.log_end_offset == 100, "sealed segments are trusted after a clean shutdown"
    p.close()
    with open(last, "ab") as f:
        f.write(b"rubbish that is no batch" * 10)
    with pytest.raises(CorruptLogError, match="kafka_cleanshutdown"):
        open_partition(segment_bytes=16384)


# -- idempotence over restarts ---------------------------------------------------------------------


@pytest.mark.parametrize("how", ["clean", "killed", "killed without snapshots", "damaged snapshot"])
def test_producers_are_remembered_over_a_restart(open_partition, batch, tmp_path, how) -> None:
    p = open_partition(segment_bytes=8192)
    requests = [
        batch(2, producer_id=5, producer_epoch=1, sequence=2 * i, value_bytes=700) for i in range(8)
    ]
    for i, request in enumerate(requests):
        assert p.append(request).base_offset == 2 * i
    assert len(p.segments) > 1
    if how in ("clean", "damaged snapshot"):
        p.close()
        open_manager = p.directory.parent
        if how == "damaged snapshot":
            for path in p.directory.glob("*.snapshot"):
                path.write_bytes(path.read_bytes()[:-1])
        p = open_partition(segment_bytes=8192)
        assert p.directory.parent == open_manager
    else:
        directory = killed(p.directory, tmp_path / "copy")
        if how == "killed without snapshots":
            for path in (directory / "t-0").glob("*.snapshot"):
                path.unlink()
        p = (m := reopen(directory, segment_bytes=8192)).partitions[TP]
    remembered = range(4, 8) if how != "clean" else range(7, 8)
    for i in remembered:
        r = p.append(requests[i])
        assert (r.error, r.duplicate, r.base_offset) == (0, True, 2 * i), i
    assert p.append(requests[0]).error == 46
    assert p.append(batch(1, producer_id=5, producer_epoch=1, sequence=20)).error == 45
    assert p.append(batch(1, producer_id=5, producer_epoch=0, sequence=16)).error == 47
    assert p.append(batch(1, producer_id=5, producer_epoch=1, sequence=16)).base_offset == 16
    if "killed" in how:
        m.close()


def test_five_batches_are_remembered_over_a_clean_restart(open_partition, batch) -> None:
    p = open_partition()
    requests = [batch(2, producer_id=5, producer_epoch=1, sequence=2 * i) for i in range(8)]
    for request in requests:
        p.append(request)
    p = open_partition()
    for i in range(3, 8):
        r = p.append(requests[i])
        assert (r.error, r.duplicate, r.base_offset) == (0, True, 2 * i), i


def test_files_that_do_not_belong_are_left_alone_or_named(open_partition, batch) -> None:
    p = open_partition()
    p.append(batch())
    p.close()
    (p.directory / "notes.txt").write_text("mine")
    (p.directory / "00000000000000000099.index").write_bytes(b"")
    (p.directory / "00000000000000000000.log.swap").write_bytes(b"")
    (p.directory.parent / "lost+found").mkdir()
    p = open_partition()
    assert p.log_end_offset == 1 and (p.directory / "notes.txt").exists()
    assert (
        not (p.directory / "00000000000000000099.index").exists()
        and not (p.directory / "00000000000000000000.log.swap").exists()
    )
    p.close()
    (p.directory / "backup.log").write_bytes(b"")
    with pytest.raises(CorruptLogError, match=r"backup\.log"):
        open_partition()
