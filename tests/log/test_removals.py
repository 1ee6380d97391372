"""Deleted segments and partitions wait to be removed, unless the disk is full."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest

from kdirect.errors import StorageFullError
from kdirect.log.config import LogConfig
from kdirect.log.manager import LogManager
from kdirect.log.removals import FULL_S, MOST_AT_ONCE, Removals, gone_name
from kdirect.model import TopicPartition
from tests.log.compacted_logs import compact, fill, keyed, last_of_each_key, records_of

TP = TopicPartition("t", 0)


class Clock:
    """Seconds that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def removals(clock: Clock) -> Removals:
    return Removals(clock)


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def written(directory: Path, *files: str) -> list[Path]:
    paths = [directory / name for name in files]
    for path in paths:
        path.write_text(path.name)
    return paths


# -- what waits ------------------------------------------------------------------------------------


def test_files_are_renamed_now_and_removed_when_they_are_due(tmp_path, clock, removals) -> None:
    told: list[None] = []
    removals.on_sooner = lambda: told.append(None)
    paths = written(tmp_path, "1.log", "1.index")
    removals.remove_files(tmp_path, [*paths, tmp_path / "1.txnindex"], 60_000)
    assert names(tmp_path) == ["1.index.deleted", "1.log.deleted"]
    assert (len(removals), removals.due_in(), len(told)) == (2, 60.0, 1)
    removals.remove_files(tmp_path, written(tmp_path, "2.log"), 90_000)
    assert len(told) == 1, "it is due later, and nobody is woken for it"
    removals.remove_files(tmp_path, written(tmp_path, "3.log"), 1000)
    assert (removals.due_in(), len(told)) == (1.0, 2)
    clock.now += 0.9
    assert removals.remove_due() == 0 and len(removals) == 4
    clock.now += 0.1
    assert removals.remove_due() == 1 and "3.log.deleted" not in names(tmp_path)
    clock.now += 100
    assert removals.due_in() == 0.0 and removals.remove_due() == 3
    assert names(tmp_path) == [] and (len(removals), removals.due_in()) == (0, None)


def test_without_a_delay_nothing_waits(tmp_path, removals) -> None:
    removals.remove_files(tmp_path, written(tmp_path, "1.log"), 0)
    (kept,) = written(tmp_path, "2.log")
    removals.keep_files(tmp_path, [kept], 0)
    (tmp_path / "gone-delete").mkdir()
    written(tmp_path / "gone-delete", "1.log")
    removals.remove_directory(tmp_path, tmp_path / "gone-delete", 0)
    assert names(tmp_path) == ["2.log"] and removals.due_in() is None


def test_a_file_of_the_same_name_waits_for_its_own_time(tmp_path, clock, removals) -> None:
    """A segment that is compacted twice within the delay: the first removal must not take the
    second file."""
    for text in ("first", "second"):
        (path,) = written(tmp_path, "1.log")
        path.write_text(text)
        removals.remove_files(tmp_path, [path], 10_000)
        clock.now += 6
    later = tmp_path / "1.log.deleted"
    assert later.read_text() == "second" and removals.remove_due() == 0 and later.exists()
    assert removals.due_in() == pytest.approx(4)
    clock.now += 4
    assert removals.remove_due() == 1 and names(tmp_path) == []


def test_what_a_name_stood_for_is_kept(tmp_path, clock, removals) -> None:
    (path,) = written(tmp_path, "1.log")
    written(tmp_path, "1.log.deleted")  # of an earlier time
    removals.keep_files(tmp_path, [path, tmp_path / "1.txnindex"], 5000)
    (new,) = written(tmp_path, "1.log.swap")
    os.rename(new, path)
    assert path.read_text() == "1.log.swap"
    assert (tmp_path / "1.log.deleted").read_text() == "1.log"
    clock.now += 5
    assert removals.remove_due() == 1 and names(tmp_path) == ["1.log"]


def test_without_hard_links_nothing_is_kept(tmp_path, removals, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    removals.keep_files(tmp_path, written(tmp_path, "1.log"), 5000)
    assert names(tmp_path) == ["1.log"] and len(removals) == 0


def test_a_file_that_cannot_be_renamed_is_removed_at_once(tmp_path, removals, monkeypatch) -> None:
    """The longer name may need a block of the directory, and there is none."""

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", refuse)
    removals.remove_files(tmp_path, written(tmp_path, "1.log"), 5000)
    assert names(tmp_path) == [] and len(removals) == 0


def test_a_full_disk_keeps_nothing_that_waits(tmp_path, clock, removals) -> None:
    removals.remove_files(tmp_path, written(tmp_path, "1.log"), 60_000)
    (tmp_path / "t-0.x-delete").mkdir()
    written(tmp_path / "t-0.x-delete", "1.log")
    removals.remove_directory(tmp_path, tmp_path / "t-0.x-delete", 60_000)
    assert len(removals) == 2
    assert removals.make_room(tmp_path) and names(tmp_path) == []
    assert not removals.make_room(tmp_path), "nothing was left"
    clock.now += FULL_S - 1
    removals.remove_files(tmp_path, written(tmp_path, "2.log"), 60_000)
    assert names(tmp_path) == []
    clock.now += 1
    removals.remove_files(tmp_path, written(tmp_path, "3.log"), 60_000)
    assert names(tmp_path) == ["3.log.deleted"]


def test_another_disk_goes_on_waiting(small_disk, tmp_path, removals) -> None:
    here = tmp_path / "here"
    here.mkdir()
    for directory in (here, small_disk):
        removals.remove_files(directory, written(directory, "1.log"), 60_000)
    assert removals.make_room(small_disk)
    assert names(small_disk) == [] and names(here) == ["1.log.deleted"]
    removals.remove_files(here, written(here, "2.log"), 60_000)
    assert names(here) == ["1.log.deleted", "2.log.deleted"]


def test_what_cannot_be_removed_is_told_and_left_to_the_next_start(
    tmp_path, clock, removals, monkeypatch
) -> None:
    told: list[Path] = []
    removals.on_error = lambda directory, error: told.append(directory)
    removals.remove_files(tmp_path, written(tmp_path, "1.log", "2.log"), 1000)
    unlink = Path.unlink

    def fails(path: Path, missing_ok: bool = False) -> None:
        if path.name.startswith("1"):
            raise OSError(5, "Input/output error")
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", fails)
    clock.now += 1
    removals.remove_due()
    assert told == [tmp_path] and names(tmp_path) == ["1.log.deleted"] and len(removals) == 0


def test_one_round_is_bounded(tmp_path, clock, removals) -> None:
    paths = written(tmp_path, *(f"{n}.log" for n in range(MOST_AT_ONCE + 1)))
    removals.remove_files(tmp_path, paths, 1000)
    clock.now += 2
    assert removals.remove_due() == MOST_AT_ONCE and removals.due_in() == 0.0
    assert removals.remove_due() == 1 and names(tmp_path) == []


def test_the_heap_against_a_model(tmp_path, clock, removals, seed) -> None:
    """Whatever comes in whatever order, each file goes when its own time has come."""
    rng = random.Random(seed)
    model: dict[str, float] = {}
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    for _ in range(2000):
        kind = rng.random()
        directory = rng.choice(directories)
        if kind < 0.5:
            name, delay_ms = f"{rng.randrange(20)}.log", rng.choice([1, 500, 3000, 9000])
            removals.remove_files(directory, written(directory, name), delay_ms)
            model[f"{directory.name}/{name}.deleted"] = clock.now + delay_ms / 1000
        elif kind < 0.85:
            clock.now += rng.random()
            while removals.due_in() == 0.0:
                removals.remove_due()
            model = {path: due for path, due in model.items() if due > clock.now}
        elif kind < 0.9:
            removals.forget(directory)
            for path in [p for p in model if p.startswith(directory.name)]:
                (tmp_path / path).unlink()  # as the next start does
                del model[path]
        assert {f"{d.name}/{n}" for d in directories for n in names(d)} == set(model)
        assert len(removals) == len(model)
        due_in = removals.due_in()
        if model:
            assert due_in == pytest.approx(max(0.0, min(model.values()) - clock.now))
        else:
            assert due_in is None


@pytest.mark.parametrize(
    ("topic", "partition", "pattern"),
    [
        ("t", 0, r"t-0\.[0-9a-f]{32}-delete\Z"),
        ("x" * 249, 12, "x" * 212 + r"-12\.[0-9a-f]{32}-delete\Z"),
    ],
)
def test_the_name_of_a_deleted_partition_is_kafkas(topic, partition, pattern) -> None:
    name = gone_name(TopicPartition(topic, partition), "-delete")
    assert re.match(pattern, name) and len(name) <= 255


# -- of logs ---------------------------------------------------------------------------------------


def opened(directory: Path, clock: Clock | None = None, **fields) -> LogManager:
    manager = LogManager([directory], LogConfig(**{"segment_bytes": 4096, **fields}))
    if clock is not None:
        manager.removals._clock = clock
    return manager.open()


def waiting(directory: Path) -> list[str]:
    return [name for name in names(directory) if name.endswith(".deleted")]


def test_retention_and_delete_records_leave_files_for_the_delay(tmp_path, clock, batch) -> None:
    m = opened(tmp_path, clock, retention_bytes=0)
    p = m.create_partition(TP)
    for _ in range(4):
        p.append(batch())
        p.roll()
    held = p.read(0, 1 << 20)
    before = bytes(held[0])
    assert p.delete_records(1) == 1
    first = "00000000000000000000"
    suffixes = (".index", ".log", ".timeindex")
    assert [n for n in waiting(p.directory) if n.startswith(first)][:3] == [
        f"{first}{suffix}.deleted" for suffix in suffixes
    ]
    clock.now += 30
    assert m.apply_retention(0) == 3
    logs = [n for n in waiting(p.directory) if n.endswith(".log.deleted")]
    assert [int(n[:20]) for n in logs] == [0, 1, 2, 3]
    assert any(n.endswith(".snapshot.deleted") for n in waiting(p.directory))
    assert p.size == 0, "what waits is not counted"
    assert bytes(held[0]) == before, "a reader keeps what it has mapped"
    assert m.statistics()["log_removals_waiting"] == len(waiting(p.directory))
    clock.now += 30
    m.removals.remove_due()
    logs = [n for n in waiting(p.directory) if n.endswith(".log.deleted")]
    assert [int(n[:20]) for n in logs] == [1, 2, 3], "each waits for its own time"
    m.alter_topic("t", {"file.delete.delay.ms": "0"})
    p.append(batch())
    p.delete_records(5)
    p.roll()
    assert m.apply_retention(0) == 1
    logs = [n for n in waiting(p.directory) if n.endswith(".log.deleted")]
    assert [int(n[:20]) for n in logs] == [1, 2, 3], "without a delay it is gone at once"
    del held
    m.close()
    assert len(waiting(p.directory)) > 0, "a stop leaves them to the next start"
    m = opened(tmp_path)
    assert waiting(m.partitions[TP].directory) == [] and m.partitions[TP].log_end_offset == 5
    m.close()


def test_truncation_waits_for_nothing(tmp_path, batch) -> None:
    with opened(tmp_path) as m:
        p = m.create_partition(TP)
        for _ in range(3):
            p.append(batch())
            p.roll()
        p.truncate_to(1)
        assert waiting(p.directory) == []
        p.start_over(7)
        assert waiting(p.directory) == [] and len(m.removals) == 0


def test_compaction_keeps_what_it_replaces(tmp_path, clock, seed) -> None:
    """All segments of a group, the first of which gives the new one its name; twice, the second
    replaces a file that is waiting still."""
    m = opened(tmp_path, clock, compacts=True, deletes=False, min_cleanable_ratio=0.0)
    p = m.create_partition(TP)
    rng = random.Random(seed)
    appended = fill(p, rng, 60, 5)
    before = {s.path.name: s.path.read_bytes()[: s.size] for s in p.segments if s.sealed}
    dropped = compact(p)
    assert dropped.segments_after < dropped.segments_before == len(before)
    for name, data in before.items():
        assert (p.directory / f"{name}.deleted").read_bytes()[: len(data)] == data
    assert last_of_each_key(records_of(p)) == last_of_each_key(appended)
    clock.now += 50
    replaced = p.segments[0].path.read_bytes()
    for _ in range(30):
        p.append(keyed([(b"k0", rng.randbytes(20))]), 1)
    p.roll()
    compact(p, dropped.end_offset)
    first = p.directory / f"{p.segments[0].path.name}.deleted"
    assert first.read_bytes() == replaced
    clock.now += 10
    while m.removals.due_in() == 0.0:
        m.removals.remove_due()
    assert first.exists(), "it waits for its own time"
    clock.now += 50
    while m.removals.due_in() == 0.0:
        m.removals.remove_due()
    assert waiting(p.directory) == []
    table = last_of_each_key(records_of(p))
    m.close()
    with opened(tmp_path, compacts=True) as m:
        assert last_of_each_key(records_of(m.partitions[TP])) == table


def test_a_topic_that_is_made_again_while_its_old_directory_waits(tmp_path, clock, batch) -> None:
    with opened(tmp_path, clock) as m:
        old = m.create_partition(TP, {"file.delete.delay.ms": "1"})
        old.append(batch())
        assert m.delete_topic("t") == 1
        (gone,) = [name for name in names(tmp_path) if name.endswith("-delete")]
        assert re.match(r"t-0\.[0-9a-f]{32}-delete\Z", gone)
        assert (tmp_path / gone / "00000000000000000000.log").exists()
        new = m.create_partition(TP)
        assert new.topic_id != old.topic_id and new.append(batch(3)).base_offset == 0
        clock.now += 59
        assert m.removals.remove_due() == 0, "the broker's delay, as in Kafka"
        clock.now += 1
        assert m.removals.remove_due() == 1
        assert not (tmp_path / gone).exists() and new.log_end_offset == 3
        assert len(records_of(new)) == 3
        m.delete_topic("t")
    assert [name for name in names(tmp_path) if name.endswith("-delete")]
    with opened(tmp_path) as m:
        assert not [name for name in names(tmp_path) if name.startswith("t-")]


# -- on a full disk --------------------------------------------------------------------------------


def test_an_append_takes_the_room_of_files_that_wait(small_disk, fill_disk, batch) -> None:
    with opened(small_disk, segment_bytes=400 << 10) as m:
        p = m.create_partition(TP)
        big = batch(value_bytes=100 << 10)
        for _ in range(3):
            p.append(big)
        p.roll()
        p._spare.give_back()
        p.delete_records(3)
        assert waiting(p.directory)
        fill_disk(small_disk)
        # The head was allocated before; the records after it need a head of their own.
        assert [p.append(big).error for _ in range(5)] == [0] * 5, "they have their room"
        assert waiting(p.directory) == []
        # While the disk is known to be full, nothing waits any more.
        (small_disk / "ballast").unlink()
        p.roll()
        p.delete_records(8)
        assert waiting(p.directory) == [] and len(m.removals) == 0
        p._spare.give_back()
        fill_disk(small_disk)
        with pytest.raises(StorageFullError):
            for _ in range(10):
                p.append(big)
        (small_disk / "ballast").unlink()


def test_a_partition_is_made_in_the_room_of_one_that_waits(small_disk, fill_disk, batch) -> None:
    with opened(small_disk, segment_bytes=400 << 10) as m:
        m.create_partition(TP).append(batch(value_bytes=100 << 10))
        m.delete_topic("t")
        fill_disk(small_disk)
        new = m.create_partition(TP)
        assert new.append(batch()).error == 0 and len(m.removals) == 0
        (small_disk / "ballast").unlink()


def test_an_error_of_a_full_disk_ends_the_waiting(small_disk, batch) -> None:
    """A broker that is alone with one directory, whose failures count for nothing else."""
    with opened(small_disk) as m:
        p = m.create_partition(TP)
        p.append(batch())
        p.roll()
        p.delete_records(1)
        assert waiting(p.directory)
        m.look_into(p, OSError(28, "No space left on device"))
        assert waiting(p.directory) == []
