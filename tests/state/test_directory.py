"""The directory of a job: a lock, logs whose torn end is cut, files that are whole or an error."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kdirect.errors import StateDirectoryError
from kdirect.state.batches import Partition
from kdirect.state.directory import JobDirectory, LineLog, replaced

JOB = {"plan": {"kind": "aggregate"}, "vparts": 256}


def opened(
    path: Path | None, job: dict[str, Any] = JOB, plan_hash: str = "ab" * 32
) -> JobDirectory:
    return JobDirectory.open(path, job, plan_hash=plan_hash)


def test_attempts_are_remembered(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        job = opened(tmp_path / "job")
        assert job.attempt == number - 1
        job.write_attempt(number)
        assert job.attempt == number
        job.close()


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """Files of this process cannot grow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_attempt_that_cannot_be_written_is_an_error_that_names_file_room_and_remedy(
    tmp_path: Path,
) -> None:
    job = opened(tmp_path / "job")
    job.write_attempt(1)
    with no_room(), pytest.raises(StateDirectoryError) as raised:
        job.write_attempt(2)
    said = str(raised.value)
    assert f"{tmp_path / 'job' / 'attempt'}: it cannot be written: " in said
    assert re.search(r"\d+ KiB are free", said) and "make room" in raised.value.hint
    assert job.attempt == 1
    job.write_attempt(2)
    job.close()
    job = opened(tmp_path / "job")
    assert job.attempt == 2
    job.close()
    assert not list((tmp_path / "job").glob("*.new"))


def test_a_log_that_cannot_be_shortened_stays_whole_and_takes_no_other_line(tmp_path: Path) -> None:
    log = LineLog(tmp_path / "log")
    for number in range(3):
        log.append({"number": number})
    with no_room(), pytest.raises(StateDirectoryError, match=r"log: it cannot be .*KiB are free"):
        log.keep([{"number": 2}])
    with pytest.raises(StateDirectoryError, match="could not be replaced"):
        log.append({"number": 3})
    log.close()
    log = LineLog(tmp_path / "log")
    assert [entry["number"] for entry in log.entries] == [0, 1, 2]
    log.append({"number": 3})
    log.close()


def test_a_job_that_finds_no_room_at_its_start_says_so(tmp_path: Path) -> None:
    with no_room(), pytest.raises(StateDirectoryError, match="KiB are free") as raised:
        opened(tmp_path / "job")
    assert "make room" in raised.value.hint
    opened(tmp_path / "job").close()


def test_a_second_job_is_refused_and_told_of_the_first(tmp_path: Path) -> None:
    code = (
        "import sys; from kdirect.state.directory import JobDirectory\n"
        "job = JobDirectory.open(sys.argv[1], {'a': 1}, plan_hash='x')\n"
        "print('open', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(StateDirectoryError, match=rf"{tmp_path}.*process {other.pid}\b"):
            JobDirectory.open(tmp_path, {"a": 1}, plan_hash="x")
    finally:
        other.kill()
        other.communicate()
    JobDirectory.open(tmp_path, {"a": 1}, plan_hash="x").close()


def test_a_second_job_of_the_same_process_is_refused(tmp_path: Path) -> None:
    first = opened(tmp_path)
    with pytest.raises(StateDirectoryError, match=f"process {os.getpid()}"):
        opened(tmp_path)
    first.close()
    opened(tmp_path).close()


def test_a_child_made_by_fork_does_not_hold_the_directory(tmp_path: Path) -> None:
    job = opened(tmp_path)
    ready_in, ready_out = os.pipe()
    end_in, end_out = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end_out)
        os.write(ready_out, b".")
        os.read(end_in, 1)
        os._exit(0)
    try:
        os.read(ready_in, 1)
        job.close()
        opened(tmp_path).close()
    finally:
        for fd in (end_in, end_out, ready_in, ready_out):
            os.close(fd)
        os.waitpid(child, 0)


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_torn_last_line_is_cut_and_appending_goes_on(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "log"
    log = LineLog(path)
    log.append({"batch": 0})
    log.append({"batch": 1, "ranges": {"t": [0, 5]}})
    log.close()
    whole = path.read_bytes()
    last = len(whole) - whole.index(b"\n") - 1
    path.write_bytes(whole[:-cut])
    log = LineLog(path)
    assert log.entries == ({"batch": 0},)
    assert cut < last
    log.append({"batch": 1})
    log.close()
    assert LineLog(path).entries == ({"batch": 0}, {"batch": 1})


def test_a_line_that_is_found_is_on_disk_before_another_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator was killed between a line and its fsync.  Its successor went on with the batch
    and logged the commit; then the host went, and the commit alone was on disk."""
    on_disk: dict[int, bytes] = {}
    sync = os.fsync

    def noting(fd: int) -> None:
        sync(fd)
        with contextlib.suppress(IsADirectoryError):
            on_disk[os.fstat(fd).st_ino] = Path(f"/proc/self/fd/{fd}").read_bytes()

    def killed(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", noting)
    job = opened(tmp_path)
    with monkeypatch.context() as dying, pytest.raises(KeyboardInterrupt):
        dying.setattr(os, "fsync", killed)
        job.batches.append({"number": 0})
    job.close()
    job = opened(tmp_path)
    assert job.batches.last == {"number": 0}
    job.commits.append({"number": 0})
    job.close()
    for log in (job.batches, job.commits):
        assert b'"number":0' in on_disk[log.path.stat().st_ino]


def test_the_name_of_a_new_directory_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the end of the host takes all that was synced in it."""
    synced: list[str] = []
    sync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")) or sync(fd)
    )
    opened(tmp_path / "a" / "job").close()
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "job")} <= set(synced)


def test_a_last_line_with_a_wrong_crc_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = LineLog(path)
    log.append({"batch": 0})
    log.append({"batch": 1})
    log.close()
    path.write_bytes(path.read_bytes().replace(b'"batch":1', b'"batch":2'))
    assert LineLog(path).last == {"batch": 0}


def test_a_damaged_line_that_others_follow_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = LineLog(path)
    for batch in range(3):
        log.append({"batch": batch})
    log.close()
    path.write_bytes(path.read_bytes().replace(b'"batch":1', b'"batch":7'))
    with pytest.raises(StateDirectoryError, match="line 2 is damaged"):
        LineLog(path)


def test_a_log_is_replaced_by_what_is_kept(tmp_path: Path) -> None:
    log = LineLog(tmp_path / "log")
    for batch in range(5):
        log.append({"batch": batch})
    log.keep(list(log.entries[3:]))
    log.append({"batch": 5})
    log.close()
    assert LineLog(tmp_path / "log").entries == ({"batch": 3}, {"batch": 4}, {"batch": 5})


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    with pytest.raises(RuntimeError), replaced(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_where_the_job_begins_to_read_is_said_once(tmp_path: Path) -> None:
    first = {Partition("t", 0): 7, Partition("t", 1): 0}
    for starts in (first, {}):
        job = opened(tmp_path)
        assert job.starts(lambda starts=starts: starts) == first
        job.close()


def test_the_ids_of_topics_are_those_that_were_met_first(tmp_path: Path) -> None:
    for found, wanted in (
        ({"t": "1"}, {"t": "1"}),
        ({"t": "2", "u": "3"}, {"t": "1", "u": "3"}),
        ({}, {"t": "1", "u": "3"}),
    ):
        job = opened(tmp_path)
        assert job.topic_ids(found) == wanted
        job.close()
    (tmp_path / "topics.json").write_text('{"t": 1}')
    job = opened(tmp_path)
    with pytest.raises(StateDirectoryError, match=r"topics\.json"):
        job.topic_ids({})
    job.close()


@pytest.mark.parametrize("text", ["", "{}", '{"ranges": [["t", 0, -1, 0]]}', '{"ranges": 1}'])
def test_damaged_first_offsets_are_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    job = opened(tmp_path)
    (tmp_path / "starts.json").write_text(text)
    with pytest.raises(StateDirectoryError, match=r"starts\.json"):
        job.starts(dict)
    job.close()


def test_the_directory_of_another_job_is_refused(tmp_path: Path) -> None:
    opened(tmp_path).close()
    with pytest.raises(StateDirectoryError, match="another job: plan_hash differ"):
        opened(tmp_path, plan_hash="cd" * 32)
    with pytest.raises(StateDirectoryError, match="vparts differ"):
        opened(tmp_path, {**JOB, "vparts": 64})
    opened(tmp_path).close()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 99}', "\x00\xff"])
def test_a_damaged_description_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    opened(tmp_path).close()
    (tmp_path / "job.json").write_text(text)
    with pytest.raises(StateDirectoryError, match=r"job\.json"):
        opened(tmp_path)


def test_state_without_its_description_is_refused(tmp_path: Path) -> None:
    job = opened(tmp_path)
    job.batches.append({"batch": 0})
    job.close()
    (tmp_path / "job.json").unlink()
    with pytest.raises(StateDirectoryError, match=r"no job\.json"):
        opened(tmp_path)


def test_a_damaged_attempt_is_an_error(tmp_path: Path) -> None:
    opened(tmp_path).close()
    (tmp_path / "attempt").write_text("many")
    with pytest.raises(StateDirectoryError, match="attempt"):
        opened(tmp_path)


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateDirectoryError, match="cannot be used"):
        opened(tmp_path / "file")


def test_a_temporary_directory_goes_with_the_job() -> None:
    job = opened(None)
    assert job.path.is_dir()
    job.close()
    assert not job.path.exists()


def test_each_directory_has_memory_of_its_own(tmp_path: Path) -> None:
    one, two = opened(tmp_path / "one"), opened(tmp_path / "two")
    found = [job.map_state(tmp_path) for job in (one, two, one)]
    assert len({mapped.path for mapped in found}) == 2
    assert all(mapped.path.stat().st_mode & 0o777 == 0o700 for mapped in found)
    for mapped in found:
        mapped.close()
    memory = one.map_state()
    assert memory.path.parent == Path("/dev/shm")
    memory.remove()
    assert not memory.path.exists()
    one.close()
    two.close()
