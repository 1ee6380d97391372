"""The directory of a job: all that is known about it after every process of it was killed.

Owns: the names and the form of its files, the lock that keeps a second job out, and the rule that a
file is either whole or an error.  What may not enter: what a line of a log means, and who decides
that a batch begins (`kdirect.state.coordinator`).

    lock           held (flock) by the coordinator while the job runs; names its process
    job.json       the plan with its hash, and the options that the state depends on
    identity       a random name, which tells the job from a later one at the same path
    starts.json    the offsets that the job begins to read at
    topics.json    the id of each topic
    attempt        how many times the job was started
    batches.log    a line for each batch, on disk before the batch runs
    commits.log    a line for each batch whose output was taken by the caller
    snapshots/N/   the state after batch N: a part for each executor, and manifest.json

The executors' mapped state, and the output of the last batch that they keep, are no part of what
must survive a host, so they are elsewhere (`kdirect.state.mapped`): a tmpfs is best.

A line of a log is ``crc32 json``.  A torn last line is what a crash in the middle of an append
leaves, and is cut off; a damaged line before it is an error.  All other files are replaced whole: a
temporary file is written, synced and renamed, then the directory is synced.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kdirect.errors import DataLossError, FormatError, StateDirectoryError
from kdirect.state.batches import Partition, Range, ranges_from_json, ranges_to_json
from kdirect.state.locks import FileLock, holder_of
from kdirect.state.mapped import IDENTITY, TEMPORARY_PREFIX, MappedDirectory, Owner
from kdirect.state.strict import Members

FORMAT_VERSION = 2
STARTS, TOPICS = "starts.json", "topics.json"
MEMORY_ROOT = Path("/dev/shm")


RESTORE = "restore the file from a backup, or start a new job in an empty directory"
MAKE_ROOM = "make room on this file system, or mend it, then run the job again: nothing is lost"


def cannot_write(path: Path, error: OSError, what: str = "it") -> StateDirectoryError:
    """The error of a file that could not be written, with the room on its file system."""
    room = ""
    with contextlib.suppress(OSError):
        found = os.statvfs(path.parent)
        room = f"; {found.f_bavail * found.f_frsize >> 10} KiB are free there"
    why = error.strerror or error
    return StateDirectoryError(f"{path}: {what} cannot be written: {why}{room}", hint=MAKE_ROOM)


def sync_directory(path: Path) -> None:
    """Put the names in a directory on disk.  StateDirectoryError where that fails."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as e:
        raise cannot_write(path, e, "the directory") from e


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Any]:
    """A binary file to write that takes the place of `path` when the block ends well, and leaves no
    trace when it does not.  Its directory is made where it is missing.  StateDirectoryError, which
    says how much room there is, where it cannot be written."""
    name = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(prefix=path.name + ".", suffix=".new", dir=path.parent)
        with os.fdopen(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException as e:
        if name is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
        if isinstance(e, OSError):
            raise cannot_write(path, e) from e
        raise
    sync_directory(path.parent)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, on disk when this returns."""
    with replaced(path) as file:
        file.write(data)


def read_json(path: Path, what: str) -> dict[str, Any]:
    """The object in the file `path`.  StateDirectoryError when it is damaged; FileNotFoundError."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as e:
        raise StateDirectoryError(f"{path}: {what} cannot be read: {e}", hint=RESTORE) from e
    if not isinstance(value, dict):
        raise StateDirectoryError(f"{path}: {what} is no JSON object", hint=RESTORE)
    return value


def _locked(root: Path) -> FileLock:
    """Keep other jobs out of a directory."""
    path = root / "lock"
    try:
        return FileLock(path)
    except BlockingIOError:
        raise StateDirectoryError(
            f"{root}: another job runs in this directory (process {holder_of(path)})",
            hint="stop it, or give this job a directory of its own",
        ) from None


class LineLog:
    """A file of JSON lines that is only appended to, each line with its CRC.  One thread.

    An append that fails takes back what it had written.  Where that fails too, or where it is not
    known what is on disk, no other line is appended: one behind a torn line would make the file
    unreadable.  The next start reads what is there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._broken = ""  # why nothing can be appended any more
        self._entries = self._recover()
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by `close`
        self._sync_what_was_found()
        sync_directory(path.parent)

    @property
    def entries(self) -> tuple[dict[str, Any], ...]:
        """All lines, oldest first."""
        return tuple(self._entries)

    @property
    def last(self) -> dict[str, Any] | None:
        """The newest line."""
        return self._entries[-1] if self._entries else None

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add a line; it is on disk when this returns.  StateDirectoryError when that fails: then
        the line may be there at the next start only if all of it was written."""
        if self._broken:
            raise StateDirectoryError(f"{self.path}: {self._broken}", hint=MAKE_ROOM)
        before = self._file.seek(0, os.SEEK_END)
        try:
            self._write_whole(_line(entry))
        except OSError as e:
            self._take_back(before, e)
            raise cannot_write(self.path, e, "a line") from e
        try:
            os.fsync(self._file.fileno())
        except OSError as e:
            self._broken = f"it is not known what is on disk since an fsync failed: {e}"
            raise StateDirectoryError(f"{self.path}: {self._broken}", hint=MAKE_ROOM) from e
        self._entries.append(dict(entry))

    def _sync_what_was_found(self) -> None:
        """A process that was killed before its fsync left a line that can be read, and that the end
        of the host would take.  What follows from it must not be on disk before it is."""
        try:
            os.fsync(self._file.fileno())
        except OSError as e:
            self._file.close()
            raise cannot_write(self.path, e) from e

    def _write_whole(self, line: bytes) -> None:
        view = memoryview(line)
        while view:
            view = view[self._file.write(view) :]

    def _take_back(self, length: int, error: OSError) -> None:
        try:
            self._file.truncate(length)
        except OSError:
            self._broken = f"its last line is torn: {error}"

    def keep(self, entries: list[dict[str, Any]]) -> None:
        """Replace the whole log by `entries`.  StateDirectoryError where that fails: the log is as
        it was or as it should be, which the next start finds out, and takes no other line."""
        self._broken = "it could not be replaced by a shorter one"
        write_atomically(self.path, b"".join(_line(entry) for entry in entries))
        self._file.close()
        try:
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
        except OSError as e:
            raise cannot_write(self.path, e) from e
        self._broken = ""
        self._entries = list(entries)

    def close(self) -> None:
        self._file.close()

    def _recover(self) -> list[dict[str, Any]]:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return []
        entries: list[dict[str, Any]] = []
        at = 0
        while at < len(data):
            end = data.find(b"\n", at)
            entry = _parsed(data[at:end]) if end >= 0 else None
            if entry is None:
                if 0 <= end < len(data) - 1:
                    raise StateDirectoryError(
                        f"{self.path}: line {len(entries) + 1} is damaged, and others follow it",
                        hint=RESTORE,
                    )
                with open(self.path, "r+b") as file:
                    file.truncate(at)
                    os.fsync(file.fileno())
                break
            entries.append(entry)
            at = end + 1
        return entries


def _line(entry: Mapping[str, Any]) -> bytes:
    text = json.dumps(entry, separators=(",", ":"), sort_keys=True).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _parsed(line: bytes) -> dict[str, Any] | None:
    crc, _, text = line.partition(b" ")
    try:
        if int(crc, 16) != zlib.crc32(text):
            return None
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


class JobDirectory:
    """The files of one job.  `open` it with the plan; it is locked until `close`.  One thread.

    `batches` and `commits` are its logs.  Raises StateDirectoryError when another job holds the
    directory, when its files are damaged, or when they belong to another plan."""

    def __init__(self, path: Path, lock: FileLock, *, temporary: bool) -> None:
        self.path = path
        self.temporary = temporary
        self._lock = lock
        self._topic_ids: dict[str, str] | None = None
        self.identity = _identity(path / IDENTITY)
        self.attempt = _read_attempt(path / "attempt")
        self.batches = LineLog(path / "batches.log")
        self.commits = LineLog(path / "commits.log")

    @classmethod
    def open(
        cls, path: str | os.PathLike[str] | None, job: Mapping[str, Any], *, plan_hash: str
    ) -> JobDirectory:
        """The directory at `path`, made where it is missing; a temporary one for None.

        `job` is what has to be the same at every start: a directory of another job is refused."""
        temporary = path is None
        root = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX) if path is None else path)
        try:
            missing = [path for path in (root, *root.parents) if not path.exists()]
            (root / "snapshots").mkdir(parents=True, exist_ok=True)
            for path in missing:
                sync_directory(path.parent)
            lock = _locked(root)
        except OSError as e:
            raise StateDirectoryError(
                f"{root}: the directory of the job cannot be used: {e}",
                hint="give a directory that this user may write",
            ) from e
        try:
            _check_job(root, {"version": FORMAT_VERSION, "plan_hash": plan_hash, **job})
            return cls(root, lock, temporary=temporary)
        except BaseException:
            lock.close()
            raise

    @property
    def snapshots(self) -> Path:
        """Where the snapshots are."""
        return self.path / "snapshots"

    def map_state(self, root: str | os.PathLike[str] | None = None) -> MappedDirectory:
        """Where the executors of this host map their state: below `root`; by default in memory
        (/dev/shm), where a host has that, else in this directory.  Leftovers of other jobs there
        are removed."""
        if root is None and not MEMORY_ROOT.is_dir():
            return MappedDirectory(self.path / "executors")
        return MappedDirectory.of_job(Path(root or MEMORY_ROOT), self.owner)

    @property
    def owner(self) -> Owner:
        """What tells the mapped state of this job from that of others."""
        return Owner(
            directory=str(self.path.resolve()), identity=self.identity, temporary=self.temporary
        )

    def starts(self, made: Callable[[], Mapping[Partition, int]]) -> dict[Partition, int]:
        """Where the job begins to read: what `made` said at its first start."""
        path = self.path / STARTS
        try:
            found = Members(read_json(path, "the first offsets of the job"), STARTS)
            ranges = ranges_from_json(found.take("ranges"))
            found.close()
        except FileNotFoundError:
            ranges = {tp: Range(at, at) for tp, at in made().items()}
            write_atomically(path, json.dumps({"ranges": ranges_to_json(ranges)}).encode() + b"\n")
        except FormatError as e:
            raise StateDirectoryError(f"{path}: {e}", hint=RESTORE) from e
        return {tp: range_.start for tp, range_ in ranges.items()}

    def topic_ids(self, found: Mapping[str, str]) -> dict[str, str]:
        """The ids that the topics had when the job met them: those of `found`, for new ones."""
        path = self.path / TOPICS
        known: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError):
            known = read_json(path, "the ids of the topics")
        if not all(isinstance(value, str) for value in known.values()):
            raise StateDirectoryError(f"{path}: an id of a topic is no text", hint=RESTORE)
        if found.keys() - known.keys():
            known = {**found, **known}
            write_atomically(path, json.dumps(known, indent=1, sort_keys=True).encode() + b"\n")
        return known

    def check_topics(self, found: Mapping[str, str]) -> None:
        """DataLossError if a topic was made again since the job met it: its offsets are those of
        other records.  An id is empty where the brokers assign none."""
        if self._topic_ids is None or found.keys() - self._topic_ids.keys():
            self._topic_ids = self.topic_ids(found)
        for topic, now in found.items():
            known = self._topic_ids[topic]
            if known and now and known != now:
                raise DataLossError(
                    f"topic {topic} was made again: its id is {now}, and was {known}",
                    hint="start a new job in an empty directory",
                )

    def write_attempt(self, attempt: int) -> None:
        """Remember that the job was started once more."""
        write_atomically(self.path / "attempt", f"{attempt}\n".encode())
        self.attempt = attempt

    def close(self) -> None:
        """Let other jobs in.  A temporary directory is removed."""
        self.batches.close()
        self.commits.close()
        if self.temporary:
            shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _read_attempt(path: Path) -> int:
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return 0
    except ValueError as e:
        raise StateDirectoryError(f"{path}: this is no number", hint=RESTORE) from e


def _identity(path: Path) -> str:
    """The random name of the job, made at its first start."""
    with contextlib.suppress(FileNotFoundError):
        if found := path.read_text().strip():
            return found
    made = secrets.token_hex(16)
    write_atomically(path, made.encode() + b"\n")
    return made


def _check_job(root: Path, job: Mapping[str, Any]) -> None:
    """Write job.json, or compare it."""
    path = root / "job.json"
    wanted = json.loads(json.dumps(job))
    try:
        found = read_json(path, "the description of the job")
    except FileNotFoundError:
        kept = [name for name in ("batches.log", "commits.log") if (root / name).exists()]
        if kept or any((root / "snapshots").iterdir()):
            raise StateDirectoryError(
                f"{root}: there is state, but no job.json that says of what", hint=RESTORE
            ) from None
        write_atomically(path, json.dumps(wanted, indent=1, sort_keys=True).encode() + b"\n")
        return
    if found.get("version") != wanted["version"]:
        raise StateDirectoryError(
            f"{path}: format version {found.get('version')!r}; this build reads"
            f" {wanted['version']}",
            hint="use the build that wrote it, or start a new job in an empty directory",
        )
    changed = sorted(name for name in wanted if found.get(name) != wanted[name])
    if changed == ["overflow"] and (found.get("overflow"), wanted["overflow"]) == ("error", "wrap"):
        # Nothing has overflowed so far, or it was not committed.
        write_atomically(path, json.dumps(wanted, indent=1, sort_keys=True).encode() + b"\n")
    elif changed:
        raise StateDirectoryError(
            f"{root}: the directory belongs to another job: {', '.join(changed)} differ",
            hint="start a changed query in an empty directory",
        )
