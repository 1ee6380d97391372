"""A log of which a part is in remote storage only: what it keeps here, what it answers, what is on
disk before anything goes.  Nothing is copied here: the tests say what counts as copied."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kdirect.errors import ClosedError, LogError, OffsetOutOfRangeError, TieredOffsetError
from kdirect.log import checkpoint, producer_state
from kdirect.log.config import LogConfig
from kdirect.log.kernel_producers import known_producers
from kdirect.log.manager import LogManager
from kdirect.log.retention import expired_locally
from tests.log.conftest import TP, stamped
from tests.log.tiered_logs import HOUR, NOW, TIERED, Logs, bases, cold, fill, records


def test_only_what_is_copied_goes_and_the_log_start_stays(logs, batch) -> None:
    p = logs.open(local_retention_ms=1000)
    assert p.is_tiered and p.remote_end_offset == 0
    fill(p, batch, 4)
    assert p.apply_retention(NOW) == 0, "nothing is copied, so nothing goes, however old"
    p.note_tiered(15)
    assert p.apply_retention(NOW) == 1, "the second one ends at 20"
    p.note_tiered(30)
    assert p.apply_retention(NOW) == 2 and bases(p) == [30, 40]
    assert (p.log_start_offset, p.local_log_start_offset, p.first_kept_offset) == (0, 30, 30)
    p.note_tiered(1 << 40)
    assert p.apply_retention(NOW) == 1 and bases(p) == [40], "never the active one"
    assert (p.log_start_offset, p.local_log_start_offset) == (0, 40)


def test_whole_retention_deletes_nothing_that_is_not_copied(logs, batch) -> None:
    p = logs.open(retention_ms=1000, local_retention_ms=-2, retention_bytes=1)
    fill(p, batch, 3)
    assert p.apply_retention(NOW) == 0 and p.log_start_offset == 0
    p.note_tiered(30)
    assert p.apply_retention(NOW) == 3 and p.log_start_offset == 0, "-2: as retention.*"


def test_local_bytes_count_what_is_here(logs, batch) -> None:
    p = logs.open()
    fill(p, batch, 5)
    size = p.segments[0].size
    p.note_tiered(50)
    assert p.size == 5 * size + p.segments[-1].size
    logs.open(local_retention_bytes=3 * size)
    assert p.apply_retention(NOW) == 2 and p.size == 3 * size + p.segments[-1].size
    assert p.apply_retention(NOW) == 0
    logs.open(local_retention_bytes=-1)
    assert p.apply_retention(NOW) == 0


@pytest.mark.parametrize("is_head", [True, False])
def test_the_active_segment_is_sealed_when_it_is_past_local_retention(logs, batch, is_head) -> None:
    """As in Kafka: or a quiet topic would never be copied whole."""
    p = logs.open(local_retention_ms=1000)
    for _ in range(3):
        p.append(batch(timestamp_ms=NOW - HOUR))
    p = p if is_head else logs.restart()
    assert p.segments[-1].is_head is is_head
    assert p.apply_retention(NOW) == 0
    assert bases(p) == [0, 3] and [s.base_offset for s in p.sealed_segments()] == [0]
    assert p.apply_retention(NOW) == 0 and bases(p) == [0, 3]
    p.note_tiered(3)
    assert p.apply_retention(NOW) == 1 and bases(p) == [3]
    assert (p.log_start_offset, p.log_end_offset) == (0, 3)
    with pytest.raises(TieredOffsetError, match="offset 2 of t-0 is in remote storage only"):
        p.read(2, 1000)
    assert p.read(3, 1000) == [] and p.append(batch()).base_offset == 3


def test_without_copies_the_whole_logs_retention_counts(logs, batch) -> None:
    """remote.log.copy.disable: as in Kafka, retention.* applies here, and the log start moves."""
    p = logs.open(local_retention_ms=1000)
    fill(p, batch, 4)
    p.note_tiered(10)
    assert p.apply_retention(NOW) == 1 and p.log_start_offset == 0
    logs.open(remote_log_copy_disable=True, retention_ms=1000, local_retention_ms=-2)
    assert p.apply_retention(NOW) == 3
    assert p.log_start_offset == p.local_log_start_offset == 40
    assert logs.starts()[TP] == 40, "on disk before anything goes: remote objects go after it"


def test_what_is_not_readable_yet_stays(logs, batch) -> None:
    p = logs.open(local_retention_ms=1000)
    fill(p, batch, 3)
    p.set_replicas({2: 15})
    p.note_tiered(30)
    q = expired_locally(p.segments, p.config, 15, 0, 30, NOW)
    assert q == (1, False)
    assert [s.end_offset for s in p.sealed_segments()] == [10, 20, 30], "the mark does not go back"


def test_a_copy_deletes_by_local_retention_but_never_rolls(logs, batch) -> None:
    p = logs.open(local_retention_ms=1000)
    fill(p, batch, 2)
    for _ in range(2):
        p.append(batch(timestamp_ms=NOW - HOUR))
    p.follow_leader()
    p.note_tiered(20)
    assert p.apply_retention(NOW) == 2 and bases(p) == [20] and p.log_start_offset == 0
    assert p.apply_retention(NOW + 10 * HOUR) == 0 and bases(p) == [20]
    logs.open(remote_storage_enable=False, remote_log_delete_on_disable=True)
    assert p.apply_retention(NOW + 10 * HOUR) == 0, "its leader's log start says what goes"


# -- reading ---------------------------------------------------------------------------------------


def test_a_cold_offset_is_never_answered_from_another_segment(logs, batch) -> None:
    p = logs.open(local_retention_ms=1000)
    cold(p, batch, 5, 3)
    p.move_log_start(5)
    for offset in (5, 9, 10, 29):
        for read in (
            lambda o: p.read(o, 1 << 20),
            lambda o: p.read_nowait(o, 1 << 20),
            lambda o: p.read(o, 1 << 20, committed_only=True),
            p.source_for,
            p.skip_gap,
            lambda o: p.read_for_replica(o, 1 << 20),
            lambda o: p.read_for_replica_nowait(o, 1 << 20),
            p.sealed_extent,
            p.truncate_to,
        ):
            with pytest.raises(TieredOffsetError, match=rf"offset {offset} of t-0.* at 30;"):
                read(offset)
    for offset in (-1, 0, 4, 52):
        for read in (lambda o: p.read(o, 100), p.source_for, p.sealed_extent, p.truncate_to):
            with pytest.raises(OffsetOutOfRangeError, match=rf"offset {offset} of t-0"):
                read(offset)
    assert records(p.read(30, 1 << 20)) == list(range(30, 51))
    assert records(p.read_for_replica(30, 1 << 20).buffers) == list(range(30, 40))
    assert p.skip_gap(30) == 30 and p.source_for(30).base_offset == 30


def test_a_cold_offset_is_no_offset_out_of_range() -> None:
    """A handler of the one must not answer the other by accident: a consumer would start anew."""
    assert not issubclass(TieredOffsetError, OffsetOutOfRangeError)
    assert issubclass(TieredOffsetError, LogError) and TieredOffsetError.code == 109


def test_lookups_by_time_cover_the_local_part(logs, batch) -> None:
    p = logs.open(local_retention_ms=1000)
    cold(p, batch, 3, 2)
    assert p.offset_for_timestamp(0) == (20, NOW - HOUR)
    assert p.offset_for_timestamp(NOW) == (30, NOW) == p.largest_timestamp()


def test_epochs_of_the_cold_part_stay(logs, batch) -> None:
    p = logs.open(local_retention_ms=1000)
    for epoch in (1, 4, 6):
        p.set_leader_epoch(epoch)
        fill(p, batch, 1)
    before = [p.end_offset_for_epoch(e) for e in range(7)]
    p.note_tiered(p.segments[-1].base_offset)
    assert p.apply_retention(NOW + HOUR) == 3
    assert [p.end_offset_for_epoch(e) for e in range(7)] == before
    p = logs.restart()
    assert [p.end_offset_for_epoch(e) for e in range(7)] == before
    assert p.epochs_with_records() == [(6, p.first_kept_offset)], "replicas compare what is here"
    start = p.end_offset_for_epoch(1)[1]
    p.move_log_start(start)
    assert p.end_offset_for_epoch(1) == (1, start) and p.end_offset_for_epoch(4)[0] == 4
    stored = checkpoint.read_leader_epochs(p.directory)
    assert stored[0] in ((1, start), (4, start)), "those below the log start are forgotten"


def test_readers_go_on_while_segments_become_cold(logs, batch) -> None:
    """A reader gets a record or is told that it is cold; never another one, never nothing."""
    p = logs.open(local_retention_ms=1000)
    fill(p, batch, 60, each=3)
    failures: list[BaseException] = []
    told = [0]

    def read() -> None:
        try:
            for _ in range(4):
                for offset in range(180):
                    try:
                        assert records(p.read(offset, 1))[0] == offset
                    except TieredOffsetError:
                        told[0] += 1
        except BaseException as e:
            failures.append(e)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for end in range(3, 181, 3):
        p.note_tiered(end)
        p.apply_retention(NOW)
        time.sleep(0.001)
    for reader in readers:
        reader.join()
    assert not failures and told[0] > 0 and p.log_start_offset == 0


# -- the log start ---------------------------------------------------------------------------------


def test_the_log_start_is_on_disk_before_a_local_segment_goes(logs, batch, monkeypatch) -> None:
    p = logs.open(local_retention_ms=1000)
    fill(p, batch, 2)
    p.note_tiered(20)
    seen: list[dict] = []
    delete = type(p.segments[0]).delete
    monkeypatch.setattr(
        type(p.segments[0]), "delete", lambda s, *how: (seen.append(logs.starts()), delete(s, *how))
    )
    p.apply_retention(NOW)
    assert seen == [{TP: 0}, {TP: 0}]
    p = logs.restart(clean=False)
    assert (p.log_start_offset, p.local_log_start_offset) == (0, 20)
    p = logs.restart()
    assert (p.log_start_offset, p.local_log_start_offset) == (0, 20)


def test_where_the_log_start_cannot_be_written_nothing_goes(logs, batch, monkeypatch) -> None:
    p = logs.open(local_retention_ms=1000)
    fill(p, batch, 2)
    p.note_tiered(20)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "no space")

    monkeypatch.setattr(checkpoint, "replace_file", fail)
    with pytest.raises(LogError, match=r"the log start offset 0 of t-0 cannot be written"):
        p.apply_retention(NOW)
    with pytest.raises(LogError, match=r"the log start offset 12 of t-0 cannot be written"):
        p.move_log_start(12)
    assert bases(p) == [0, 10, 20]
    monkeypatch.undo()
    assert p.move_log_start(12) == 12 and logs.starts() == {TP: 12}, "the next try writes it"
    assert bases(p) == [10, 20]


def test_moving_the_log_start(logs, batch) -> None:
    p = logs.open(local_retention_ms=1000)
    cold(p, batch, 4, 2)
    assert p.move_log_start(7) == 7 and logs.starts() == {TP: 7} and bases(p) == [20, 30, 40]
    assert p.move_log_start(3) == 7, "it never goes back"
    assert p.delete_records(25) == 25 and bases(p) == [20, 30, 40]
    assert (p.local_log_start_offset, p.first_kept_offset) == (25, 20)
    assert p.delete_records(30) == 30 and bases(p) == [30, 40]
    with pytest.raises(OffsetOutOfRangeError, match="its high watermark is 41"):
        p.move_log_start(42)
    assert p.delete_records(-1) == 41 and bases(p) == [40], "the last one stays"
    p = logs.restart(clean=False)
    assert (p.log_start_offset, p.log_end_offset) == (41, 41)


def test_segments_below_the_log_start_go_although_not_copied(logs, batch) -> None:
    p = logs.open()
    fill(p, batch, 3)
    p.move_log_start(20)
    assert bases(p) == [20, 30]
    p.kernel.set_log_start_offset(30)
    assert p.apply_retention(NOW) == 1 and bases(p) == [30]


def test_a_lost_checkpoint_does_not_move_the_log_start_forward(logs, batch) -> None:
    """What is below the log start is deleted from remote storage, so it must not be guessed too
    high."""
    p = logs.open(local_retention_ms=1000)
    cold(p, batch, 4, 3)
    p.move_log_start(7)
    for damage in (b"", b"nonsense\n", None):
        logs.manager.close()
        logs.manager = None
        path = logs.directory / checkpoint.LOG_STARTS
        path.unlink() if damage is None else path.write_bytes(damage)
        p = logs.open()
        assert (p.log_start_offset, p.local_log_start_offset) == (7, 30), damage


def test_an_empty_directory_goes_on_behind_what_is_tiered(logs, batch) -> None:
    """A broker that lost its disk: the log is led, and empty here."""
    p = logs.open()
    p.start_over(50, log_start=20, epochs=[(0, 20), (3, 30)])
    assert (p.log_start_offset, p.local_log_start_offset, p.log_end_offset) == (20, 50, 50)
    assert logs.starts() == {TP: 20} and p.leader_epoch == 3
    p.set_leader_epoch(4)
    assert [p.append(batch()).base_offset for _ in range(3)] == [50, 51, 52]
    assert records(p.read(50, 1 << 20)) == [50, 51, 52]
    for clean in (False, True):
        p = logs.restart(clean=clean)
        assert (p.log_start_offset, p.first_kept_offset, p.log_end_offset) == (20, 50, 53)
        assert [p.end_offset_for_epoch(e) for e in (0, 3, 4)] == [(0, 30), (3, 50), (4, 53)]


@pytest.mark.parametrize("seed", range(12))
def test_no_crash_takes_a_promise_back(memory_path, batch, seed) -> None:
    """Appends, copies, retention and moves of the log start, in any order, with crashes between:
    the log start never goes back behind what was returned, and never passes what was asked for;
    what is in neither place is below it."""
    rng = random.Random(seed)
    logs = Logs(memory_path / "log")
    logs.config = LogConfig(segment_bytes=4096, remote_system=True, retention_ms=-1)
    p = logs.open(local_retention_ms=1000)
    promised = copied = 0
    try:
        for _ in range(60):
            step = rng.choice(
                ["append", "append", "roll", "copy", "retain", "move", "crash", "stop"]
            )
            if step == "append":
                for _ in range(rng.randrange(1, 6)):
                    p.append(batch(timestamp_ms=NOW - HOUR))
                p.flush()
            elif step == "roll":
                p.roll()
            elif step == "copy":
                ends = [s.end_offset for s in p.sealed_segments()]
                if ends:
                    copied = max(copied, rng.choice(ends))
                    p.note_tiered(copied)
            elif step == "retain":
                p.apply_retention(NOW)
            elif step == "move":
                promised = p.move_log_start(rng.randrange(p.high_watermark + 1))
            else:
                end = p.log_end_offset
                p = logs.restart(clean=step == "stop")
                assert p.log_end_offset == end
                p.note_tiered(copied)
            assert p.log_start_offset == promised
            assert p.first_kept_offset <= max(copied, promised)
            for offset in range(promised, p.log_end_offset):
                if offset < p.first_kept_offset:
                    assert offset < copied
                    with pytest.raises(TieredOffsetError):
                        p.read(offset, 1)
                else:
                    assert records(p.read(offset, 1))[0] == offset
    finally:
        logs.manager.close(clean=False)


@pytest.mark.parametrize("seed", range(8))
def test_a_kill_between_any_two_file_operations(memory_path, batch, seed, monkeypatch) -> None:
    """The process dies at some unlink or rename of a retention, or of a move of the log start."""
    rng = random.Random(seed)
    logs = Logs(memory_path / "log")
    p = logs.open(local_retention_ms=1000)
    fill(p, batch, 6)
    p.flush()
    promised, copied = p.move_log_start(3), 40
    p.note_tiered(copied)
    left = rng.randrange(0, 14)

    class Killed(BaseException):
        pass

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def one(*args: Any, **more: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return call(*args, **more)

        return one

    monkeypatch.setattr(os, "rename", counted(os.rename))
    monkeypatch.setattr(os, "unlink", counted(os.unlink))
    monkeypatch.setattr(Path, "unlink", counted(Path.unlink))
    asked = 3
    try:
        for asked in (15, 33):
            p.apply_retention(NOW)
            promised = p.move_log_start(asked)
    except Killed:
        pass
    monkeypatch.undo()
    p = logs.restart(clean=False)
    try:
        assert promised <= p.log_start_offset <= asked and p.log_end_offset == 61
        assert p.first_kept_offset <= max(copied, p.log_start_offset)
        kept = max(p.first_kept_offset, p.log_start_offset)
        assert records(p.read(kept, 1 << 20)) == list(range(kept, 61))
    finally:
        logs.manager.close(clean=False)


# -- what may be copied ----------------------------------------------------------------------------


def test_sealed_segments_are_what_a_copier_needs(logs, batch) -> None:
    p = logs.open(local_retention_ms=1000, index_interval_bytes=100)
    p.set_leader_epoch(1)
    for sequence in range(10):
        p.append(batch(producer_id=7, producer_epoch=0, sequence=sequence, timestamp_ms=NOW + 3))
        if sequence == 4:
            p.set_leader_epoch(2)
    p.roll()
    p.append(batch(producer_id=8, producer_epoch=0, sequence=0))
    (only,) = p.sealed_segments()
    assert (only.base_offset, only.end_offset, only.max_timestamp) == (0, 10, NOW + 3)
    assert only.epochs == ((1, 0), (2, 5)) and only.segment is p.segments[0]
    data = only.open()
    assert len(data) == only.size and records([data]) == list(range(10))
    offset_index, time_index = only.read_indexes()
    assert len(offset_index) % 8 == 0 and len(time_index) % 12 == 0 and offset_index and time_index
    assert int.from_bytes(offset_index[-8:-4], "big") < 10
    assert int.from_bytes(time_index[-12:-4], "big") == NOW + 3
    entries = producer_state.unpack_snapshot(p.producers_at(10))
    assert [(e.producer_id, e.batches[-1][1]) for e in entries] == [(7, 9)]
    p.note_tiered(10)
    p.apply_retention(NOW + HOUR)
    assert p.first_kept_offset == 10 and records([data]) == list(range(10)), "it was open"
    del data
    with pytest.raises(ClosedError):
        only.open()
    with pytest.raises(ClosedError):
        only.read_indexes()
    assert producer_state.unpack_snapshot(p.producers_at(10)) == entries


def test_nothing_above_the_last_stable_offset_may_be_copied(logs, batch) -> None:
    p = logs.open()
    p.follow_leader()  # what comes is readable when its leader says so
    for offset in range(12):
        p.append_as_stamped(stamped(batch(), offset))
        if offset % 4 == 3:
            p.begin_segment(offset + 1)
    assert bases(p)[:4] == [0, 4, 8, 12] and p.sealed_segments() == []
    p.set_replicas({-1: 9})
    assert [(s.base_offset, s.end_offset) for s in p.sealed_segments()] == [(0, 4), (4, 8)]


def test_a_missing_snapshot_is_made_anew_and_changes_nothing(logs, batch) -> None:
    p = logs.open()
    for segment in range(4):
        for i in range(3):
            data = batch(producer_id=segment, producer_epoch=2, sequence=i, timestamp_ms=NOW)
            p.append(data)
        p.roll()
    ends = [s.end_offset for s in p.sealed_segments()]
    assert ends == [3, 6, 9, 12] and [s.base_offset for s in p.sealed_segments(6)] == [6, 9]
    whole = {end: producer_state.unpack_snapshot(p.producers_at(end)) for end in ends}
    assert [e.producer_id for e in sorted(whole[12])] == [0, 1, 2, 3]
    producer_state.snapshot_path(p.directory, 9).unlink()
    producer_state.snapshot_path(p.directory, 6).write_bytes(b"damaged")
    files = sorted(os.listdir(p.directory))
    for end in ends:
        made = producer_state.unpack_snapshot(p.producers_at(end))
        assert [(e.producer_id, e.producer_epoch, e.batches[-1]) for e in sorted(made)] == [
            (e.producer_id, e.producer_epoch, e.batches[-1]) for e in sorted(whole[end])
        ]
    assert sorted(os.listdir(p.directory)) == files
    for offset in (-1, 13):
        with pytest.raises(OffsetOutOfRangeError, match="the producers of t-0"):
            p.producers_at(offset)


# -- replicas --------------------------------------------------------------------------------------


def test_a_replica_starts_behind_what_is_tiered(logs, batch) -> None:
    """It takes its leader's records from the local start on, and what is known of those below."""
    p = logs.open()
    p.follow_leader()
    producers = [producer_state.ProducerEntry(9, 1, NOW, -1, -1, ((0, 4, 40, 44),))]
    p.start_over(50, log_start=20, epochs=[(2, 20), (5, 41)], producers=producers)
    assert (p.log_start_offset, p.local_log_start_offset, p.log_end_offset) == (20, 50, 50)
    assert p.high_watermark == 50 and p.end_offset_for_epoch(2) == (2, 41)
    p.append_as_stamped(stamped(batch(), 50, 5))
    p.append_as_stamped(stamped(batch(), 51, 6))
    assert p.end_offset_for_epoch(5) == (5, 51)
    with pytest.raises(TieredOffsetError):
        p.read(49, 100)
    again = batch(producer_id=9, producer_epoch=1, sequence=0, records=5)
    p.begin_epoch(7, replicated=False)
    result = p.append(again)
    assert result.duplicate and result.base_offset == 40, "the producer's sequences are known"
    for clean in (False, True):
        p = logs.restart(clean=clean)
        assert (p.log_start_offset, p.local_log_start_offset, p.log_end_offset) == (20, 50, 52)
        assert p.end_offset_for_epoch(2) == (2, 41)
        assert [e.producer_id for e in known_producers(p.kernel)[0]] == [9]


def test_a_replica_starts_over_and_keeps_its_log_start(logs, batch) -> None:
    p = logs.open(local_retention_ms=1000)
    fill(p, batch, 3)
    p.move_log_start(5)
    p.follow_leader()
    p.note_tiered(30)
    p.start_over(80)
    assert (p.log_start_offset, p.log_end_offset, p.high_watermark) == (5, 80, 80)
    assert p.remote_end_offset == 30
    p.follow_log_start(60)
    assert p.log_start_offset == 60 and bases(p) == [80] and logs.starts() == {TP: 60}
    p.start_over(40)
    assert (p.log_start_offset, p.log_end_offset) == (40, 40), "nothing below is in this log"
    p.start_over(40, log_start=10)
    assert (p.log_start_offset, p.local_log_start_offset) == (10, 40)


def test_a_replica_follows_the_log_start_and_keeps_what_is_above(logs, batch) -> None:
    p = logs.open(local_retention_ms=1000)
    cold(p, batch, 4, 1)
    p.follow_leader()
    p.follow_log_start(5)
    assert (p.log_start_offset, bases(p)) == (5, [10, 20, 30, 40]) and logs.starts() == {TP: 5}
    p.follow_log_start(25)
    assert (p.log_start_offset, bases(p)) == (25, [20, 30, 40])
    p = logs.restart(clean=False)
    assert (p.log_start_offset, p.local_log_start_offset) == (25, 25)


def test_a_cut_below_what_is_here(logs, batch) -> None:
    """An elected leader has less than is kept here: nothing of it stays, and the copies of what
    comes next do not count yet."""
    p = logs.open(local_retention_ms=1000)
    p.set_leader_epoch(3)
    cold(p, batch, 4, 3)
    p.move_log_start(4)
    p.follow_leader()
    assert p.cut_after_epoch(3, 17) == 17
    assert (p.log_start_offset, p.local_log_start_offset, p.log_end_offset) == (4, 17, 17)
    assert p.remote_end_offset == 17 and p.end_offset_for_epoch(2) == (2, 4)
    p.append_as_stamped(stamped(batch(), 17, 4))
    assert p.end_offset_for_epoch(3) == (3, 17) and records(p.read_for_replica(17, 99).buffers)
    p = logs.restart(clean=False)
    assert (p.log_start_offset, p.log_end_offset) == (4, 18)


def test_a_cut_makes_copies_above_it_count_no_more(logs, batch) -> None:
    p = logs.open(local_retention_ms=1000)
    fill(p, batch, 3)
    p.note_tiered(30)
    p.truncate_to(15)
    assert p.remote_end_offset == 15
    for _ in range(5):
        p.append(batch(timestamp_ms=NOW - HOUR))
    p.roll()
    assert p.apply_retention(NOW) == 1 and bases(p)[0] == 10, "[10, 20) was not copied as it is"


def test_readers_are_held_at_a_mark_that_is_older_than_what_is_here(logs, batch) -> None:
    p = logs.open(local_retention_ms=1000)
    cold(p, batch, 3, 2)
    p.hold_readers_at(7)
    assert p.high_watermark == 20, "what is tiered was committed"


# -- configuration ---------------------------------------------------------------------------------


def test_a_broker_without_tiered_storage_refuses_tiered_topics(logs, batch) -> None:
    p = logs.open(local_retention_ms=1000)
    cold(p, batch, 3, 2)
    logs.manager.create_partition(type(TP)("plain", 0))
    logs.manager.create_partition(type(TP)("second", 0), TIERED)
    logs.manager.close()
    logs.manager = None
    before = logs.starts()
    with pytest.raises(ValueError, match=r"topics second, t are tiered; set it to true"):
        LogManager([logs.directory], LogConfig()).open()
    assert logs.starts() == before
    p = logs.open()
    assert (p.log_start_offset, p.local_log_start_offset) == (0, 20)


def test_nothing_is_tiered_without_the_brokers_switch(memory_path, batch) -> None:
    with LogManager([memory_path / "log"], LogConfig()) as manager:
        with pytest.raises(ValueError, match="topic t is tiered"):
            manager.create_partition(TP, TIERED)
        p = manager.create_partition(TP)
        with pytest.raises(ValueError, match="topic t is tiered"):
            manager.alter_topic("t", TIERED)
        assert not p.is_tiered and p.remote_end_offset == 0
        p.append(batch())
        assert p.local_log_start_offset == p.log_start_offset == 0
        p.delete_records(1)
        assert p.local_log_start_offset == p.log_start_offset == 1


def test_what_the_copier_is_told_of_lags(logs) -> None:
    config = logs.config
    assert config.with_overrides(TIERED).effective_copy_lag_ms == 0
    for own, ms, size in (
        ({"remote.copy.lag.ms": 5, "remote.copy.lag.bytes": 7}, 5, 7),
        ({"remote.copy.lag.ms": -1, "remote.copy.lag.bytes": -1}, -1, -1),
        ({"remote.copy.lag.ms": -1, "local.retention.ms": 9}, 9, 0),
        ({"remote.copy.lag.bytes": -1, "retention.bytes": 8}, 0, 8),
    ):
        c = config.with_overrides(TIERED | own)
        assert (c.effective_copy_lag_ms, c.effective_copy_lag_bytes) == (ms, size)
