"""Log directories that fail, seen from the log: what is an error of the directory, and what of the
others goes on."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from kdirect.errors import CorruptLogError, LogError, StorageFullError
from kdirect.log import checkpoint, directories
from kdirect.log.head import SpareHead
from kdirect.log.manager import LogManager
from kdirect.log.trouble import Trouble, trouble_of
from kdirect.model import TopicPartition


def caused(number: int) -> LogError:
    """As file work raises it."""
    try:
        raise LogError("no", hint="none") from OSError(number, "no")
    except LogError as e:
        return e


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (caused(errno.EIO), Trouble.FAILED),
        (OSError(errno.EROFS, "read-only"), Trouble.FAILED),
        (caused(errno.ENOSPC), Trouble.FULL),
        (StorageFullError("full", hint="none"), Trouble.FULL),
        (caused(errno.EMFILE), Trouble.NONE),
        (CorruptLogError("damaged", hint="none"), Trouble.NONE),
        (OSError(errno.ENOENT, "it was deleted meanwhile"), Trouble.NONE),
    ],
)
def test_what_an_error_says_of_its_directory(
    tmp_path: Path, error: BaseException, found: Trouble
) -> None:
    assert trouble_of(error, tmp_path) is found
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_gone_has_failed(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert trouble_of(caused(errno.ENOENT), gone) is Trouble.FAILED
    gone.write_bytes(b"")
    assert trouble_of(caused(errno.EEXIST), gone) is Trouble.FAILED


def test_the_partitions_of_other_directories_go_on(tmp_path: Path, batch) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    told: list[Path] = []
    with LogManager(directories) as m:
        m.on_failed = told.append
        logs = [m.create_partition(TopicPartition("t", n)) for n in range(4)]
        assert [p.directory.parent for p in logs] == directories * 2
        directories[1].rename(tmp_path / "away")
        directories[1].write_bytes(b"")
        m.checkpoint()
        m.checkpoint()
        assert told == [directories[1]] and m.usable_dirs == directories[:1]
        assert set(m.lost) == {TopicPartition("t", 1), TopicPartition("t", 3)}
        assert m.statistics()["log_directories_failed"] == 1
        m.drop(directories[1])
        assert logs[0].append(batch()).error == 0
        assert sorted(m.partitions) == [TopicPartition("t", 0), TopicPartition("t", 2)]
        made = m.create_partition(TopicPartition("u", 0))
        assert made.directory.parent == directories[0]
    assert (directories[0] / checkpoint.CLEAN_SHUTDOWN).exists()


def test_a_replica_starts_without_a_directory_that_has_failed(tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    with LogManager(directories, replicated=True) as m:
        for n in range(4):
            m.create_partition(TopicPartition("t", n))
    directories[0].rename(tmp_path / "away")
    directories[0].write_bytes(b"")
    with pytest.raises(LogError, match="cannot be used"):
        LogManager(directories).open()  # alone, nobody else has what is in it
    with LogManager(directories, replicated=True) as m:
        assert list(m.offline) == directories[:1] and len(m.partitions) == 2
    directories[1].rename(tmp_path / "away too")
    directories[1].write_bytes(b"")
    with pytest.raises(LogError, match="cannot be used"):
        LogManager(directories, replicated=True).open()


def test_a_broker_with_one_directory_and_no_others_goes_on(tmp_path: Path, batch) -> None:
    with LogManager([tmp_path / "a"]) as m:
        p = m.create_partition(TopicPartition("t", 0))
        m.look_into(p, caused(errno.EIO))
        assert not m.offline and p.append(batch()).error == 0


def test_nothing_is_made_in_a_directory_that_fails_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would let go of it: its directory's partitions are gone through by then."""
    with LogManager([tmp_path / "a", tmp_path / "b"], replicated=True) as m:
        first = m.create_partition(TopicPartition("t", 0))
        begin = directories.begin_directory

        def fails_meanwhile(directory: Path, *arguments: Any) -> None:
            begin(directory, *arguments)
            if directory.parent == first.directory.parent:
                m.look_into(first, caused(errno.EIO))

        monkeypatch.setattr(directories, "begin_directory", fails_meanwhile)
        wanted = [TopicPartition("t", n) for n in (1, 2)]  # one in each directory
        with pytest.raises(LogError, match="failed while"):
            m.create_partitions(wanted)
        assert list(m.partitions) == list(m.lost) == [TopicPartition("t", 0)]
        made = m.create_partitions(wanted)
        assert {p.directory.parent for p in made} == set(m.usable_dirs)


def test_what_is_no_partition_is_left_alone(tmp_path: Path) -> None:
    for name in ("t-0-new", "backup-new"):
        (tmp_path / name).mkdir()
    with LogManager([tmp_path]) as m:
        assert not m.partitions
    assert (tmp_path / "backup-new").exists() and not (tmp_path / "t-0-new").exists()


def mapped(directory: Path) -> int:
    """Mappings of files below it."""
    return sum(str(directory) in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize(
    ("step", "is_clean"),
    [("spare", True), ("spare", False), ("flush", True), ("_snapshot_producers", True)],
)
def test_a_partition_whose_end_fails_holds_no_file(
    tmp_path: Path, batch, monkeypatch: pytest.MonkeyPatch, step: str, is_clean: bool
) -> None:
    manager = LogManager([tmp_path / "a"]).open()
    log = manager.create_partition(TopicPartition("t", 0))
    log.append(batch())
    log.roll()
    log.append(batch())
    assert mapped(log.directory)

    def fail(*arguments: Any, **more: Any) -> None:
        raise OSError(errno.EIO, "planted")

    if step == "spare":
        monkeypatch.setattr(SpareHead, "give_back", fail)
    else:
        monkeypatch.setattr(log, step, fail)
    with pytest.raises(OSError, match="planted"):
        log.close(clean=is_clean)
    assert not mapped(log.directory)
    monkeypatch.undo()
    manager.close(clean=False)


def test_a_directory_that_has_failed_holds_up_no_end(tmp_path: Path, batch) -> None:
    """The broker may stop before it has let go of what was in it."""
    directories = [tmp_path / "a", tmp_path / "b"]
    m = LogManager(directories).open()
    logs = [m.create_partition(TopicPartition("t", n)) for n in range(2)]
    for log in logs:
        log.append(batch())
    directories[1].rename(tmp_path / "away")
    directories[1].write_bytes(b"")
    m.checkpoint()
    assert list(m.offline) == [directories[1]]
    m.close()
    assert not mapped(tmp_path)
    assert (directories[0] / checkpoint.CLEAN_SHUTDOWN).exists()
