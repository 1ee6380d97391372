"""The directories in which executors map their state: whose they are, and when they are removed.

This file makes and removes directories.  Owns: their names, the description that says of which job
one is, the lock of all processes that use it, and the sweep of those that no job can use any more.
What may not enter: what the executors' files in it say (`kdirect.state.kept`).

    <root>/kdirect-state-<uid>-<16 hex digits>/    mode 0700; the root is /dev/shm by default
        lock           shared (flock) by every process that uses the directory
        job.json       the job's directory and identity, whether the job is temporary, and whether
                       that directory is on another host
        lock-N, state-N, output-N.arrow            of executor N

Nothing here is needed for the job to be exact: what is removed is rebuilt from the last snapshot
and the log.  The directory goes when its job stops and the snapshot has all (`remove`), when the
last process of a job that cannot come back leaves it (`leave`), and when the start of any job finds
one of those (`sweep`).  Files of executors that a job no longer has go when one of its executors
joins.  Of a job whose directory is on another host, nobody here can say whether it
comes back: what no process has used for a day goes.  Whoever removes one holds its lock alone, so
nothing goes that a live process uses, and of two sweeps one does it.  Only directories of this user
and files of these names are touched, and no symbolic link is followed: the root may be writable by
everybody, and a launcher may name any directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from kdirect.errors import StateDirectoryError
from kdirect.state.locks import FileLock

log = logging.getLogger("kdirect.state")

LOCK, DESCRIPTION, IDENTITY = "lock", "job.json", "identity"
TEMPORARY_PREFIX = "kdirect-state-"
_LOCK_TIMEOUT_S = 10.0  # for a sweep that looks at the directory just now
_NAME = re.compile(r"kdirect-state-(\d+)-[0-9a-f]{16}")
_FILE = re.compile(r"lock|job\.json|job\.\d+\.new|(lock|state)-\d+|output-\d+\.(arrow|new)")
_OF_EXECUTOR = re.compile(r"(?:state|output)-(\d+)(?:\.(?:arrow|new))?")
ABANDONED_S = 24 * 3600  # without any process, for state whose job is on another host


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Of which job mapped state is: the job's directory, and the random name in its file
    ``identity``, which tells it from a job that was made later at the same path.  `far`: this host
    does not see that directory."""

    directory: str
    identity: str
    temporary: bool
    far: bool = False

    def may_come_back(self) -> bool:
        """Can the job be started again, so that it goes on with this state?  Asked while no process
        of it lives."""
        if self.temporary:
            return False
        if self.far:
            return True  # for all that is known here
        try:
            return (Path(self.directory) / IDENTITY).read_text().strip() == self.identity
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True  # it cannot be seen from here, which says nothing


class MappedDirectory:
    """One of them, in use by this process until `close`.  StateDirectoryError where it cannot be
    used, or is not this user's own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._lock = _in_use(path)
        except OSError as e:
            raise StateDirectoryError(
                f"{path}: the directory for state in memory cannot be used: {e}",
                hint="remove it, or name another place (option state_memory)",
            ) from e

    @classmethod
    def of_job(cls, root: Path, owner: Owner) -> MappedDirectory:
        """The directory of a job below `root`, described.  Sweeps the root before."""
        sweep(root)
        text = f"{owner.directory}\0{owner.identity}"
        name = hashlib.sha256(os.fsencode(text)).hexdigest()[:16]
        found = cls(root / f"kdirect-state-{os.getuid()}-{name}")
        found.describe(owner)
        return found

    def belong(self, owner: Owner) -> None:
        """Describe the directory where the coordinator has not done so: on another host than its
        own.  Sweeps the root before, as the coordinator does there."""
        found = _owner(self.path)
        if found is None or replace(found, far=owner.far) != owner:
            sweep(self.path.parent)
            self.describe(owner)

    def keep_only(self, executors: int) -> None:
        """Remove the state of executors that the job has no more, of processes that have ended."""
        for name in os.listdir(self.path):
            match = _OF_EXECUTOR.fullmatch(name)
            if match is None or int(match[1]) < executors:
                continue
            with (
                contextlib.suppress(OSError),
                contextlib.closing(FileLock(self.path / f"lock-{match[1]}")),
            ):
                os.unlink(self.path / name)

    def describe(self, owner: Owner) -> None:
        """Write whose state this is.  StateDirectoryError where there is no room."""
        path = self.path / DESCRIPTION
        new = path.with_suffix(f".{os.getpid()}.new")
        try:
            new.write_text(json.dumps(asdict(owner), sort_keys=True))
            os.replace(new, path)
        except OSError as e:
            with contextlib.suppress(OSError):
                new.unlink()
            self.close()
            raise StateDirectoryError(
                f"{path}: the directory for state in memory cannot be written: {e}",
                hint="make room there, or name another place (option state_memory)",
            ) from e

    def close(self) -> None:
        """Use it no more.  The files stay."""
        self._lock.close()

    def leave(self) -> None:
        """Use it no more, and remove it if nobody else uses it and the job cannot come back."""
        self._lock.close()
        _clear(self.path)

    def remove(self) -> None:
        """Use it no more, and remove it with all files, if no other process uses it."""
        self._lock.close()
        with _alone(self.path) as alone:
            if alone:
                _remove(self.path)


def sweep(root: Path) -> list[Path]:
    """Remove the directories below `root` whose jobs cannot come back, and of temporary ones that
    were killed the jobs' directories too; those that were removed."""
    removed = []
    try:
        names = sorted(os.listdir(root))
    except OSError:
        return []
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None or int(match[1]) != os.getuid():
            continue
        if _clear(root / name):
            removed.append(root / name)
    return removed


def _clear(path: Path) -> bool:
    """Remove a directory that no process uses, if its job cannot come back; whether it did."""
    with _alone(path) as alone:
        if not alone:
            return False
        owner = _owner(path)
        if owner is not None:
            is_abandoned = owner.far and _unused_s(path) > ABANDONED_S
            if owner.may_come_back() and not is_abandoned:
                return False
            if owner.temporary:
                _remove_temporary(owner)
        _remove(path)
        log.info("%s: state that no job can use any more was removed", path)
        return True


def _unused_s(path: Path) -> float:
    """For how long no file was replaced there: executors replace their output at each batch."""
    times = [0.0]
    with contextlib.suppress(OSError):
        files = (entry for entry in os.scandir(path) if entry.name != LOCK)  # written just now
        times += [file.stat(follow_symlinks=False).st_mtime for file in files]
    return time.time() - max(times)


def _in_use(path: Path) -> FileLock:
    """Share the lock of the directory, which is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        # Between any two of these calls a sweep may remove the directory, which is empty as yet.
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):
            if not _is_own(path):
                raise PermissionError(f"{path} is not a directory of this user")
            return FileLock(path / LOCK, shared=True, timeout_s=_LOCK_TIMEOUT_S)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Hold the directory's lock alone: False if it is in use, not this user's, or gone."""
    lock = None
    with contextlib.suppress(OSError):
        if _is_own(path):
            lock = FileLock(path / LOCK)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.close()


def _is_own(path: Path) -> bool:
    found = os.stat(path, follow_symlinks=False)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _owner(path: Path) -> Owner | None:
    try:
        found = Owner(**json.loads((path / DESCRIPTION).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    kinds = (found.directory, found.identity, found.temporary, found.far)
    return found if tuple(map(type, kinds)) == (str, str, bool, bool) else None


def _remove(path: Path) -> None:
    """Remove a directory whose lock this process holds alone; the lock's name goes last.  A process
    that waits for the lock sees that it is gone, and makes the directory again."""
    names = filter(_FILE.fullmatch, os.listdir(path))
    for name in sorted(names, key=lambda name: name == LOCK):
        with contextlib.suppress(OSError):
            os.unlink(path / name)
    with contextlib.suppress(OSError):
        os.rmdir(path)


def _remove_temporary(owner: Owner) -> None:
    """The directory of a job that was made for one start, unless that goes on: a process of it that
    was replaced may have had mapped state of its own."""
    path = Path(owner.directory)
    is_named = (
        path.name.startswith(TEMPORARY_PREFIX)
        and path.parent == Path(tempfile.gettempdir()).resolve()
    )
    with contextlib.suppress(OSError):
        if is_named and _is_own(path) and (path / IDENTITY).read_text().strip() == owner.identity:
            with contextlib.closing(FileLock(path / LOCK)):  # which its coordinator holds
                shutil.rmtree(path, ignore_errors=True)
