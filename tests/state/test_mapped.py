"""The directories of mapped state: they go with their jobs, and never from under a process."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from kdirect.errors import StateDirectoryError
from kdirect.state import mapped as mapped_module
from kdirect.state.directory import JobDirectory
from kdirect.state.locks import FileLock
from kdirect.state.mapped import MappedDirectory, Owner, sweep

HOLD = """
import sys
from pathlib import Path
from kdirect.state.mapped import MappedDirectory
found = MappedDirectory(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def job(path: Path) -> JobDirectory:
    return JobDirectory.open(path, {"plan": 1}, plan_hash="ab")


def left_behind(root: Path, directory: Path) -> Path:
    """State that a job in `directory` mapped below `root`, all of whose processes were killed."""
    opened = job(directory)
    mapped = opened.map_state(root)
    (mapped.path / "state-0").write_bytes(b"state")
    mapped.close()
    opened.close()
    return mapped.path


def remove(directory: Path) -> None:
    for path in sorted(directory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    directory.rmdir()


def test_state_of_a_job_whose_directory_is_gone_is_swept(tmp_path: Path) -> None:
    root = tmp_path / "memory"
    gone, stays = (left_behind(root, tmp_path / name) for name in ("gone", "stays"))
    remove(tmp_path / "gone")
    job(tmp_path / "other").map_state(root).close()
    assert not gone.exists()
    assert (stays / "state-0").exists()


def test_state_of_an_earlier_job_at_the_same_path_is_swept_and_never_used(tmp_path: Path) -> None:
    root, directory = tmp_path / "memory", tmp_path / "job"
    before = left_behind(root, directory)
    remove(directory)
    after = left_behind(root, directory)
    assert before != after
    assert not before.exists()


def test_state_that_a_process_uses_is_not_swept(tmp_path: Path) -> None:
    root = tmp_path / "memory"
    mapped = left_behind(root, tmp_path / "job")
    remove(tmp_path / "job")
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(mapped)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == "held\n"
        assert sweep(root) == []
        assert (mapped / "state-0").exists()
    finally:
        other.kill()
        other.communicate()
    assert sweep(root) == [mapped]


def test_a_temporary_job_that_was_killed_goes_with_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    opened = JobDirectory.open(None, {"plan": 1}, plan_hash="ab")
    mapped = opened.map_state(tmp_path / "memory")
    assert sweep(tmp_path / "memory") == []
    mapped.close()  # as the end of its process does
    opened._lock.close()
    assert sweep(tmp_path / "memory") == [mapped.path]
    assert not opened.path.exists()


def test_what_others_put_there_is_not_touched(tmp_path: Path) -> None:
    root, target = tmp_path / "memory", tmp_path / "target"
    root.mkdir()
    target.mkdir()
    (target / "state-0").write_text("mine")
    link = root / f"kdirect-state-{os.getuid()}-{'a' * 16}"
    link.symlink_to(target)
    names = ["other", f"kdirect-state-{os.getuid()}-short", f"kdirect-state-987654-{'b' * 16}"]
    for name in names:
        (root / name).mkdir()
    assert sweep(root) == []
    assert (target / "state-0").read_text() == "mine"
    assert not (target / "lock").exists()
    with pytest.raises(StateDirectoryError, match="not a directory of this user"):
        MappedDirectory(link)
    if os.getuid() == 0:
        foreign = root / f"kdirect-state-0-{'c' * 16}"
        foreign.mkdir()
        os.chown(foreign, 12345, 12345)
        assert sweep(root) == []
        with pytest.raises(StateDirectoryError, match="not a directory of this user"):
            MappedDirectory(foreign)


def test_a_directory_without_a_description_goes(tmp_path: Path) -> None:
    """A process was killed while it made the directory."""
    path = tmp_path / f"kdirect-state-{os.getuid()}-{'e' * 16}"
    MappedDirectory(path).close()
    assert sweep(tmp_path) == [path]


def far_state(root: Path, digit: str, *, temporary: bool, age_s: float = 0) -> Path:
    """State that executors left behind whose job has its directory on another host."""
    path = root / f"kdirect-state-{os.getuid()}-{digit * 16}"
    mapped = MappedDirectory(path)
    mapped.belong(Owner(directory="/far", identity="x", temporary=temporary, far=True))
    (path / "state-0").write_bytes(b"state")
    mapped.close()
    for file in path.iterdir():
        os.utime(file, (time.time() - age_s,) * 2)
    return path


def test_state_of_jobs_of_other_hosts_goes_when_they_cannot_come_back_or_after_a_day(
    tmp_path: Path,
) -> None:
    stays = far_state(tmp_path, "a", temporary=False, age_s=mapped_module.ABANDONED_S - 60)
    old = far_state(tmp_path, "b", temporary=False, age_s=mapped_module.ABANDONED_S + 60)
    # The executors of the next job on this host sweep.
    temporary = far_state(tmp_path, "c", temporary=True)
    assert not old.exists()
    assert (stays / "state-0").exists() and (temporary / "state-0").exists()
    assert sweep(tmp_path) == [temporary]


def test_the_last_process_of_a_job_that_cannot_come_back_removes_its_state(tmp_path: Path) -> None:
    for temporary in (True, False):
        path = far_state(tmp_path, "a", temporary=temporary)
        first, second = MappedDirectory(path), MappedDirectory(path)
        first.leave()
        assert (path / "state-0").exists()
        second.leave()
        assert path.exists() is not temporary


def test_a_process_that_leaves_does_not_remove_the_directory_of_a_job_that_goes_on(
    tmp_path: Path,
) -> None:
    """One that was stopped and replaced, and had mapped state of its own: it removed the temporary
    directory under the job."""
    opened = JobDirectory.open(None, {}, plan_hash="x")
    mapped = MappedDirectory(tmp_path / "own")
    mapped.belong(opened.owner)
    mapped.leave()
    assert opened.snapshots.is_dir()
    again = MappedDirectory(tmp_path / "own")
    again.belong(opened.owner)
    opened._lock.close()  # as if its process had been killed
    again.leave()
    assert not opened.path.exists()


def test_only_files_of_executors_are_removed(tmp_path: Path) -> None:
    """A launcher may name a directory in which others keep files."""
    mapped = MappedDirectory(tmp_path)
    ours = ["job.json", "job.12.new", "lock-3", "state-12", "output-0.arrow", "output-0.new"]
    for name in (*ours, "mine", "state-mine", "output-0.csv"):
        (tmp_path / name).touch()
    mapped.remove()
    assert sorted(os.listdir(tmp_path)) == ["mine", "output-0.csv", "state-mine"]


def test_the_state_of_executors_that_a_job_has_no_more_goes(tmp_path: Path) -> None:
    """It stayed, in memory, until the job with fewer executors stopped."""
    mapped = MappedDirectory(tmp_path)
    for name in ("state-0", "state-1", "state-2", "output-2.arrow", "output-2.new", "state-30"):
        (tmp_path / name).touch()
    held = FileLock(tmp_path / "lock-30")  # by a process that is about to end
    mapped.keep_only(2)
    left = [name for name in os.listdir(tmp_path) if not name.startswith("lock")]
    assert sorted(left) == ["state-0", "state-1", "state-30"]
    held.close()
    mapped.close()


def test_a_directory_that_cannot_be_looked_at_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_behind(tmp_path / "memory", tmp_path / "job")

    def refused(*_: object, **__: object) -> str:
        raise PermissionError

    owner = Owner(directory=str(tmp_path / "job"), identity="x", temporary=False)
    assert not owner.may_come_back()
    monkeypatch.setattr(Path, "read_text", refused)
    assert owner.may_come_back()


@pytest.mark.parametrize("name", ["mkdir", "_is_own"])
def test_a_sweep_between_two_steps_of_making_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It removes the directory, which is empty: once before each of the calls."""
    path = tmp_path / f"kdirect-state-{os.getuid()}-{'f' * 16}"
    path.mkdir()
    owner = os if name == "mkdir" else mapped_module
    real = getattr(owner, name)
    swept = []

    def after_a_sweep(*given: Any) -> Any:
        if Path(given[0]) != path or swept:
            return real(*given)
        if name == "_is_own":
            swept.append(path.rmdir())
            return real(*given)
        try:
            return real(*given)
        finally:
            swept.append(path.rmdir())

    monkeypatch.setattr(owner, name, after_a_sweep)
    MappedDirectory(path).close()
    assert swept
    assert (path / "lock").exists()


def _race(root: str, path: str, is_user: bool, users: Any) -> None:
    """Use the directory again and again, or sweep it while it has `users`; exit with 1 if it went
    while it was used."""
    if not is_user:
        while users.value:
            sweep(Path(root))
        os._exit(0)
    for _ in range(50):
        mapped = MappedDirectory(Path(path))
        mine = mapped.path / f"lock-{os.getpid()}"
        mine.touch()
        time.sleep(0.001)
        went = not mine.exists() or not (mapped.path / "lock").exists()
        if went:
            break
        mine.unlink()
        mapped.close()
    with users.get_lock():
        users.value -= 1
    os._exit(went)


def test_processes_that_sweep_and_use_one_directory_at_once(tmp_path: Path) -> None:
    path = tmp_path / f"kdirect-state-{os.getuid()}-{'f' * 16}"
    context = multiprocessing.get_context("fork")
    users = context.Value("i", 3)
    processes = [
        context.Process(target=_race, args=(str(tmp_path), str(path), i < 3, users))
        for i in range(6)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 6
