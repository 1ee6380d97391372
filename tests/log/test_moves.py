"""Partitions that move between the log directories of one manager, seen from the log."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kdirect.broker.cleaner import LogCleaner
from kdirect.broker.config import BrokerConfig
from kdirect.errors import ClosedError, LogError, NotLeaderError
from kdirect.failpoints import VARIABLE
from kdirect.log import checkpoint, cleaning, directories, future_copy, relocation
from kdirect.log.config import LogConfig
from kdirect.log.kernel_transactions import admit_transaction, begin_verification
from kdirect.log.manager import LogManager
from kdirect.log.moves import Move
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition
from tests.log import compacted_logs
from tests.log.conftest import commit_at_tail, make_batch, stamped
from tests.log.test_truncation import contents

TP = TopicPartition("t", 0)
SMALL = LogConfig(segment_bytes=8192, file_delete_delay_ms=0)


@pytest.fixture
def parents(memory_path: Path) -> list[Path]:
    return [memory_path / "a", memory_path / "b"]


@pytest.fixture
def opened(parents: list[Path]) -> Iterator[Callable[..., LogManager]]:
    """opened(clean=) -> the manager, closed and opened again from the second call on."""
    managers: list[LogManager] = []

    def again(*, clean: bool = True, config: LogConfig = SMALL, **fields: Any) -> LogManager:
        if managers:
            managers.pop().close(clean=clean)
        manager = LogManager(parents, config, **fields).open()
        managers.append(manager)
        if TP not in manager.partitions:
            manager.create_partition(TP)
        return manager

    yield again
    for manager in managers:
        with contextlib.suppress(LogError):
            manager.close(clean=False)


def other(manager: LogManager, partition: Partition) -> Path:
    return next(d for d in manager.log_dirs if d != partition.directory.parent)


def begin(manager: LogManager, tp: TopicPartition = TP) -> Move:
    assert manager.moves.ask(tp, other(manager, manager.partitions[tp]))
    (move,) = manager.moves.under_way()
    return move


def moving(
    opened: Callable[..., LogManager], count: int = 20
) -> tuple[LogManager, Partition, Move]:
    """A partition of so many records whose move was asked for."""
    m = opened()
    p = m.partitions[TP]
    fill(p, count)
    return m, p, begin(m)


def copy_all(move: Move) -> None:
    """What there is now."""
    while move.step(1 << 20):
        pass


def carry_out(manager: LogManager, move: Move, *, stands_still: bool = False) -> None:
    while move.step(1 << 20) or not move.is_ready():
        pass
    assert manager.moves.finish(move, stands_still=stands_still)
    manager.moves.remove_left()


def move(manager: LogManager, *, stands_still: bool = False) -> Path:
    """There and done; the directory where it is now."""
    carry_out(manager, begin(manager), stands_still=stands_still)
    return manager.partitions[TP].directory.parent


def names(parents: list[Path]) -> list[str]:
    """The directories of partitions, whatever they are called."""
    return sorted(str(p.relative_to(p.parents[1])) for d in parents for p in d.glob("t-*"))


def fill(partition: Partition, count: int, *, value_bytes: int = 700) -> None:
    for i in range(count):
        fill_byte = b"%d" % (i % 10)
        assert partition.append(make_batch(value_bytes=value_bytes, fill=fill_byte)).error == 0


# -- what is the same afterwards -------------------------------------------------------------------


def test_a_log_goes_on_where_it_was(opened, parents) -> None:
    """Offsets, segments, epochs, indexes, and the object itself."""
    m = opened()
    p = m.partitions[TP]
    fill(p, 40)
    p.set_leader_epoch(5)
    fill(p, 3)
    first = p.directory.parent
    before, bases = contents(p), [s.base_offset for s in p.segments]
    now = move(m)
    assert now != first and names(parents) == [f"{now.name}/t-0"]
    assert m.partitions[TP] is p and contents(p) == before
    assert [s.base_offset for s in p.segments] == [*bases, 43]
    assert p.recovery_point == 43 == p.high_watermark
    assert p.end_offset_for_epoch(4) == (0, 40)
    for offset in range(43):
        assert p.source_for(offset).locate(offset)[1] == offset
    fill(p, 5)
    assert {s.path.parent for s in p.segments} == {now / "t-0"}
    assert move(m) == first and names(parents) == [f"{first.name}/t-0"]
    assert contents(p)[:43] == before and p.log_end_offset == 48
    whole = contents(p)
    for clean in (True, False):
        m = opened(clean=clean)
        p = m.partitions[TP]
        assert contents(p) == whole and p.leader_epoch == 5


def test_what_is_left_waits_as_what_is_deleted_does(opened, parents) -> None:
    """And makes room where there is none."""
    m = opened(config=LogConfig(segment_bytes=8192))
    fill(m.partitions[TP], 5)
    first = m.partitions[TP].directory.parent
    now = move(m)
    (gone,) = first.glob("t-*")
    assert gone.name.startswith("t-0.") and gone.name.endswith("-delete")
    assert list(gone.glob("*.log")) and move(m) == first
    m.removals.make_room(now)
    m.removals.make_room(first)
    assert names(parents) == [f"{first.name}/t-0"] and len(contents(m.partitions[TP])) == 5


@pytest.mark.parametrize("clean", [True, False])
def test_producers_and_open_transactions_are_known_there(opened, clean: bool) -> None:
    m = opened()
    p = m.partitions[TP]
    ids = {"producer_id": 7, "producer_epoch": 0, "transactional": True}
    _, ticket = begin_verification(p.kernel, 7, 0, 0, 0)
    assert admit_transaction(p.kernel, 7, 0, ticket)
    for i in range(3):
        assert p.append(make_batch(sequence=i, **ids)).base_offset == i
    move(m)
    assert p.last_stable_offset == 0
    assert p.append(make_batch(sequence=2, **ids)).base_offset == 2  # a repetition
    m = opened(clean=clean)
    p = m.partitions[TP]
    assert p.append(make_batch(sequence=1, **ids)).base_offset == 1
    assert p.append(make_batch(sequence=3, **ids)).base_offset == 3
    assert p.last_stable_offset == 0


def test_a_head_without_a_record_is_left_behind(opened, parents) -> None:
    """Who was granted it writes where nobody looks."""
    m = opened()
    p = m.partitions[TP]
    fill(p, 2)
    p.roll()
    head = p.ensure_head(100).acquire()
    told: list[Any] = []
    p.before_roll.append(told.append)
    move(m)
    assert told == [p]
    data = make_batch()
    ctypes.memmove(head.address, data, len(data))
    head.release()
    assert p.log_end_offset == 2
    fill(p, 1)
    assert len(contents(p)) == 3
    m = opened(clean=False)
    assert m.partitions[TP].log_end_offset == 3


def test_files_made_ahead_do_not_follow(opened) -> None:
    m = opened()
    p = m.partitions[TP]
    fill(p, 1)
    prepared = p.prepare_next()
    move(m)
    with pytest.raises(LogError, match="has moved to another log directory"):
        p.roll_into(prepared)
    prepared.discard()
    move(m)
    fill(p, 1)
    assert p.log_end_offset == 2 and not list(p.directory.glob("*.tmp"))


def test_whoever_reads_goes_on_in_the_old_bytes(opened) -> None:
    m = opened()
    p = m.partitions[TP]
    fill(p, 40)
    old = p.segments[0].acquire()
    buffers = p.read(0, 1 << 30)
    copied = [bytes(b) for b in buffers]
    move(m)
    assert [bytes(b) for b in buffers] == copied
    assert not p.is_current(old) and p.is_current(p.segments[0])
    with pytest.raises(ClosedError):
        old.acquire()
    old.release()
    assert len(contents(p)) == 40


def test_retention_counts_from_when_a_segment_was_written(opened) -> None:
    """Its records have no time."""
    m = opened()
    p = m.partitions[TP]
    fill(p, 1)
    p.roll()
    os.utime(p.segments[0].path, (1000, 1000))
    move(m)
    assert p.segments[0].modified_ms == 1_000_000


# -- while it is written, cut, shortened -----------------------------------------------------------


def test_moves_while_it_is_written_and_read(opened) -> None:
    """Every record once and in order, through four moves."""
    m = opened(config=LogConfig(segment_bytes=1 << 16, file_delete_delay_ms=0))
    p = m.partitions[TP]
    stop = threading.Event()
    failed: list[BaseException] = []
    read: list[int] = []

    def append() -> None:
        try:
            while not stop.is_set():
                assert p.append(make_batch(value_bytes=300)).error == 0
                time.sleep(0.0005)  # the copy has to be faster, also on a busy machine
        except BaseException as e:
            failed.append(e)

    def look() -> None:
        try:
            while True:
                ended = not threads[0].is_alive()
                at = len(read)
                for b in p.read(at, 1 << 16):
                    raw, position = bytes(b), 0
                    while position < len(raw):
                        base = int.from_bytes(raw[position : position + 8], "big")
                        read.append(base)
                        position += 12 + int.from_bytes(raw[position + 8 : position + 12], "big")
                if ended and len(read) == p.log_end_offset:
                    return
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=f) for f in (append, look)]
    for t in threads:
        t.start()
    try:
        for _ in range(4):
            far = p.log_end_offset + 20
            while p.log_end_offset < far and threads[0].is_alive():
                time.sleep(0.001)
            move(m)
    finally:
        stop.set()
        for t in threads:
            t.join(60)
    assert not failed, failed
    assert read == list(range(p.log_end_offset)) and len(read) > 80
    m = opened(clean=False, config=LogConfig(segment_bytes=1 << 16, file_delete_delay_ms=0))
    assert len(contents(m.partitions[TP])) == len(read)


@pytest.mark.parametrize("seed", range(4))
def test_a_table_that_is_compacted_meanwhile(opened, seed: int) -> None:
    """What was copied before is copied again; and a log that was moved is compacted as ever."""
    rng = random.Random(seed)
    m = opened()
    m.alter_topic("t", {"cleanup.policy": "compact"})
    p = m.partitions[TP]
    appended = compacted_logs.fill(p, rng, 60, 20)
    p.roll()
    under_way = begin(m)
    under_way.step(rng.randrange(1, 2 * p.size))
    compacted_logs.compact(p)
    under_way.step(rng.randrange(1, 2 * p.size))
    carry_out(m, under_way)
    table = compacted_logs.last_of_each_key(appended)
    assert compacted_logs.last_of_each_key(compacted_logs.records_of(p)) == table
    appended += compacted_logs.fill(p, rng, 20, 20)
    p.roll()
    compacted_logs.compact(p)
    table = compacted_logs.last_of_each_key(appended)
    for clean in (True, False):
        assert compacted_logs.last_of_each_key(compacted_logs.records_of(p)) == table
        p.flush()
        m = opened(clean=clean)
        p = m.partitions[TP]
        assert p.moved is not None and p.dense_from > 0


def test_a_compaction_that_a_move_ends_is_made_up_for(opened, monkeypatch) -> None:
    """Its files were in the directory that is left."""
    m = opened()
    m.alter_topic("t", {"cleanup.policy": "compact"})
    p = m.partitions[TP]
    appended = compacted_logs.fill(p, random.Random(1), 60, 20)
    p.roll()
    config = BrokerConfig.from_arguments({})
    cleaner = LogCleaner(config, m, lambda: compacted_logs.NOW)
    finish = cleaning._CleanedFiles.finish

    def moved_before(*arguments: Any) -> Any:
        move(m)
        monkeypatch.undo()
        return finish(*arguments)

    monkeypatch.setattr(cleaning._CleanedFiles, "finish", moved_before)
    assert cleaner.clean_one()
    assert cleaner.statistics()["cleaner_runs"] == 0
    assert cleaner.clean_one()
    assert cleaner.statistics()["cleaner_runs"] == 1
    assert not cleaner.statistics()["cleaner_uncleanable_partitions"] and not m.offline
    table = compacted_logs.last_of_each_key(appended)
    assert compacted_logs.last_of_each_key(compacted_logs.records_of(p)) == table
    # what the one before noted does not count where the log is not any more
    first = next(d for d in m.log_dirs if d != p.directory.parent)
    checkpoint.write_offsets(first / "cleaner-offset-checkpoint", {TP: 1 << 40})
    again = LogCleaner(config, m, lambda: compacted_logs.NOW)
    again.start()
    again.stop()
    assert again._cleaned_to == cleaner._cleaned_to


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_changes(opened, parents, seed: int) -> None:
    """Appends, rolls, deletions, cuts, restarts and crashes between the steps of moves: what the
    log has is what it would have without."""
    rng = random.Random(seed)
    m = opened()
    p = m.partitions[TP]
    expected: dict[int, bytes] = {}
    for _ in range(150):
        what = rng.choice("aaaaaarrdtfsssnmckx")
        if what == "a":
            for _ in range(rng.randrange(1, 6)):
                data = make_batch(value_bytes=rng.choice((10, 700)), fill=b"%d" % rng.randrange(10))
                offset = p.append(data).base_offset
                expected[offset] = data[57:]
        elif what == "r":
            p.roll()
        elif what == "d":
            start = p.delete_records(rng.randint(p.log_start_offset, p.log_end_offset))
            expected = {o: d for o, d in expected.items() if o >= start}
        elif what == "t" and rng.random() < 0.3:
            end = p.truncate_to(rng.randint(p.log_start_offset, p.log_end_offset))
            expected = {o: d for o, d in expected.items() if o < end}
        elif what == "f":
            p.flush()
        elif what == "s" or what == "n":
            for moved in m.moves.under_way():
                moved.step(rng.choice((100, 5000, 1 << 20)))
        elif what == "m":
            m.moves.ask(TP, rng.choice(m.log_dirs))
        elif what == "c":
            for moved in m.moves.under_way():
                m.moves.finish(moved)
        elif what == "k":
            p.ensure_head(100)
        elif what == "x" and rng.random() < 0.5:
            clean = rng.random() < 0.5
            if not clean:
                m.checkpoint()  # or the start would go back to where a segment begins
            m = opened(clean=clean)
            p = m.partitions[TP]
        got = {int.from_bytes(b[:8], "big"): b[57:] for b in contents(p)}
        assert {o: got[o] for o in got if o >= p.log_start_offset} == expected
        assert {s.path.parent for s in p.segments} == {p.directory}
        if rng.random() < 0.2:
            m.moves.remove_left()
    m.moves.remove_left()
    for moved in m.moves.under_way():
        carry_out(m, moved)
    assert names(parents) == [f"{p.directory.parent.name}/t-0"]
    m = opened()
    got = {int.from_bytes(b[:8], "big"): b[57:] for b in contents(m.partitions[TP])}
    start = m.partitions[TP].log_start_offset
    assert {o: got[o] for o in got if o >= start} == expected


def test_the_log_of_another_broker_keeps_its_segments(opened) -> None:
    m = opened(replicated=True)
    p = m.partitions[TP]
    p.follow_leader()
    for i in range(30):
        data = stamped(make_batch(value_bytes=700), i, 2 if i < 20 else 3)
        assert p.append_as_stamped(data).error == 0
    p.replicated(-1, 17)
    bases = [s.base_offset for s in p.segments]
    under_way = begin(m)
    with pytest.raises(NotLeaderError, match="once that is halted"):
        carry_out(m, under_way)
    carry_out(m, under_way, stands_still=True)
    assert [s.base_offset for s in p.segments] == bases and p.high_watermark == 17
    assert p.epochs_with_records() == [(2, 0), (3, 20)] and p.last_epoch == 3
    for i in range(30, 60):
        assert p.append_as_stamped(stamped(make_batch(value_bytes=700), i, 3)).error == 0
    assert move(m, stands_still=True)
    m = opened(replicated=True, clean=False)
    p = m.partitions[TP]
    assert p.log_end_offset == 60 and p.high_watermark == 17
    p.replicated(-1, 60)
    p.set_replicas({})
    assert len(contents(p)) == 60


def test_a_head_written_by_a_producer_is_copied_as_far_as_it_is_committed(opened) -> None:
    m = opened()
    p = m.partitions[TP]
    head = p.ensure_head(2000)
    data = make_batch()
    ctypes.memmove(head.address, data * 2, 2 * len(data))
    assert commit_at_tail(p.kernel, len(data), 0).error == 0
    under_way = begin(m)
    copy_all(under_way)
    assert commit_at_tail(p.kernel, len(data), 0).error == 0
    carry_out(m, under_way)
    assert len(contents(p)) == 2


# -- wishes ----------------------------------------------------------------------------------------


def test_a_wish_for_a_partition_to_come(opened, parents) -> None:
    m = opened()
    later = TopicPartition("t", 9)
    for d in (parents[0], parents[1]):
        assert not m.moves.ask(later, d)
    assert m.create_partition(later).directory.parent == parents[1]
    assert not m.moves.preferred


def test_the_directory_where_it_is_ends_a_move(opened, parents) -> None:
    m, p, under_way = moving(opened)
    under_way.step(5000)
    (future,) = m.moves.futures()
    assert future.topic_partition == TP and 0 < future.lag < 20 and 0 < future.size < p.size
    assert m.moves.ask(TP, p.directory.parent)
    assert under_way.is_over and not m.moves.under_way() and not m.moves.finish(under_way)
    m.moves.remove_left()
    assert names(parents) == [f"{p.directory.parent.name}/t-0"]


@pytest.mark.parametrize("clean", [True, False])
def test_a_start_goes_on_with_a_move(opened, parents, clean: bool) -> None:
    m = opened()
    p = m.partitions[TP]
    fill(p, 20)
    to = other(m, p)
    begin(m).step(5000)
    m = opened(clean=clean)
    (under_way,) = m.moves.under_way()
    assert under_way.parent == to
    carry_out(m, under_way)
    assert names(parents) == [f"{to.name}/t-0"] and len(contents(m.partitions[TP])) == 20


def test_a_copy_of_a_topic_that_is_gone_is_removed(opened, parents) -> None:
    m, _, under_way = moving(opened)
    under_way.step(5000)
    m.delete_topic("t")
    assert under_way.is_over
    with pytest.raises((ClosedError, OSError)):
        under_way.step(5000)
    under_way.copy.discard()
    m.moves.remove_left()
    assert names(parents) == []
    # as a crash would have left it, and a topic of the same name came
    stale = parents[1] / f"t-0.{'0' * 32}-future"
    stale.mkdir()
    checkpoint.write_partition_metadata(stale, checkpoint.new_id(), 0)
    m.create_partition(TP)
    m = opened()
    assert not m.moves.under_way() and not stale.exists()


# -- failures --------------------------------------------------------------------------------------


def disk_error(*arguments: Any, **named: Any) -> None:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("clean", [True, False])
def test_a_copy_that_may_have_its_name_does_not_count(
    opened, parents, monkeypatch, clean: bool
) -> None:
    """The name was given, and may not be on disk: the log stays where it is, whatever a start
    finds."""
    m, p, under_way = moving(opened)
    copy_all(under_way)
    first, to = p.directory.parent, under_way.parent
    sync = checkpoint.sync_directory
    with monkeypatch.context() as patch:
        named = to / "t-0"
        patch.setattr(
            checkpoint,
            "sync_directory",
            lambda d: disk_error() if d == to and named.exists() else sync(d),
        )
        patch.setattr(relocation.shutil, "rmtree", lambda *a, **k: None)
        with pytest.raises(OSError):
            m.moves.finish(under_way)
    assert (to / "t-0").exists() and p.directory.parent == first
    fill(p, 5)
    m = opened(clean=clean)
    p = m.partitions[TP]
    assert p.directory.parent == first and len(contents(p)) == 25
    assert names(parents) == [f"{first.name}/t-0"]
    assert move(m) == to
    assert len(contents(m.partitions[TP])) == 25


def test_nothing_is_taken_where_it_cannot_be_said_which_directory_counts(
    opened, monkeypatch
) -> None:
    m, p, under_way = moving(opened)
    copy_all(under_way)
    with monkeypatch.context() as patch:
        write = p._write_moved
        calls: list[Any] = []

        def once(moved: checkpoint.Moved) -> None:
            calls.append(moved)
            if moved.times:
                disk_error()
            write(moved)

        patch.setattr(p, "_write_moved", once)
        rename, final = os.rename, under_way.parent / "t-0"
        patch.setattr(
            relocation.os, "rename", lambda a, b: disk_error() if b == final else rename(a, b)
        )
        with pytest.raises(LogError, match="failed"):
            m.moves.finish(under_way)
    assert [c.times for c in calls] == [0, 2]
    with pytest.raises(LogError):
        p.append(make_batch(value_bytes=8000))


@pytest.mark.parametrize("at", ["copyfile", "sendfile", "fdatasync"])
def test_an_error_of_the_copy_leaves_the_log_alone(opened, monkeypatch, at: str) -> None:
    m, p, under_way = moving(opened)
    owner = future_copy.shutil if at == "copyfile" else future_copy.os
    with monkeypatch.context() as patch:
        patch.setattr(owner, at, disk_error)
        with pytest.raises(OSError):
            while under_way.step(1 << 20):
                pass
            m.moves.finish(under_way)
    m.moves.failed(under_way, OSError(5, "Input/output error"))
    assert not m.offline and not under_way.is_over
    fill(p, 1)
    carry_out(m, under_way)
    assert len(contents(p)) == 21


def test_a_full_disk_is_waited_for(tmp_path: Path, small_disk: Path, fill_disk) -> None:
    with LogManager([tmp_path / "a", small_disk / "b"], SMALL) as m:
        p = m.create_partition(TP)
        fill(p, 40)
        if p.directory.parent != tmp_path / "a":
            move(m)
        under_way = begin(m)
        fill_disk(small_disk)
        with pytest.raises((OSError, LogError)) as caught:
            carry_out(m, under_way)
        m.moves.failed(under_way, caught.value)
        assert not under_way.is_over and not m.offline
        (small_disk / "ballast").unlink()
        carry_out(m, under_way)
        assert p.directory.parent == small_disk / "b" and len(contents(p)) == 40


def test_a_directory_that_fails_ends_moves_to_it(opened, parents) -> None:
    m, p, under_way = moving(opened)
    under_way.step(5000)
    to = under_way.parent
    shutil.rmtree(to)
    to.write_bytes(b"")  # nothing can be made in it
    with pytest.raises(OSError) as caught:
        carry_out(m, under_way)
    m.moves.failed(under_way, caught.value)
    assert list(m.offline) == [to] and under_way.is_over
    fill(p, 1)
    assert len(contents(p)) == 21


def test_directories_of_two_replicas_are_left_to_people(opened, parents) -> None:
    m = opened()
    p = m.partitions[TP]
    fill(p, 3)
    move(m)
    twin = other(m, p) / "t-0"
    m.close()
    shutil.copytree(p.directory, twin)
    checkpoint.write_partition_metadata(twin, p.topic_id, 0)
    with pytest.raises(LogError, match="exists in"):
        LogManager(parents, SMALL).open()
    shutil.rmtree(twin)


# -- kills -----------------------------------------------------------------------------------------

SCRIPT = """
import sys
from pathlib import Path
from tests.log.test_moves import *
parents = [Path(d) for d in sys.argv[1:3]]
m = LogManager(parents, SMALL).open()
p = m.partitions[TP] if TP in m.partitions else m.create_partition(TP)
while True:
    under_way = begin(m)
    for _ in range(3):
        fill(p, 10)
        print(p.log_end_offset, flush=True)
        under_way.step(9000)
    while under_way.step(1 << 20) or not under_way.is_ready():
        pass
    m.moves.finish(under_way)
    m.moves.remove_left()
"""
STEPS = (
    "move, everything is copied",
    "move, checkpoints are written",
    "move, the copy has its name",
    "move, the old directory is left",
)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("times", [1, 2])
def test_one_directory_wins_after_a_kill(parents, step: str, times: int) -> None:
    """At each step of a move, the first and the second one: nothing is lost, and the next start
    has one directory, or one and a copy to go on with."""
    parents[0].parent.mkdir(exist_ok=True)
    killed = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, parents)],
        env={
            **os.environ,
            VARIABLE: f"{step}:{times}",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert killed.returncode == -9, killed.stderr
    end = int(killed.stdout.split()[-1])
    with LogManager(parents, SMALL) as m:
        p = m.partitions[TP]
        assert len(contents(p)) == end == p.log_end_offset == 30 * times
        fill(p, 1)
        for under_way in m.moves.under_way():
            carry_out(m, under_way)
        assert names(parents) == [f"{p.directory.parent.name}/t-0"]
        assert len(contents(p)) == end + 1
    assert directories.look_for_moves(parents[0])[1] == []
