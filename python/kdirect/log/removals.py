"""Files of deleted segments, and directories of deleted partitions, that wait to be removed.

Law of the file: whoever deletes a segment gives its files to `Removals`, which renames them to
``*.deleted`` and removes them when ``file.delete.delay.ms`` has passed, as Kafka does.  The
directory of a partition comes here under the name that its deletion gave it
(``TOPIC-PARTITION.UUID-delete``), and waits for ``log.segment.delete.delay.ms`` of the broker.
Nobody opens what waits: readers that had it mapped go on in their mapping, as they do in a file
that is unlinked.

What waits takes room, so it does not wait where there is none: `make_room` removes everything on
the file system that is full, and what is deleted there within the next minute is removed at once.

What waits is known in memory only.  Nothing is removed when a broker stops: the next start, after a
stop or a crash, removes whatever has such a name (`kdirect.log.recovery`,
`kdirect.log.directories`).

Any thread may call.  It starts no thread: `on_sooner` says that something is due sooner than
anything before, `due_in` says when, and the broker calls `remove_due` then.
"""

from __future__ import annotations

import heapq
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.log")

DELETED_SUFFIX = ".deleted"
DELETED_DIRECTORY = "-delete"
STRAY_DIRECTORY = "-stray"
NAME_MAX = 255
FULL_S = 60.0  # for so long after a disk was full, nothing that is deleted there waits
MOST_AT_ONCE = 100  # of `remove_due`, so that a broker that stops does not wait for thousands


class Removals:
    """See the module.  `clock` counts seconds and never goes back.  A log directory is given with
    what lies in it: its disk may be full while another one is not."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.on_sooner: Callable[[], None] = lambda: None
        # Something could not be removed; it is not tried again until the next start.
        self.on_error: Callable[[Path, OSError], object] = lambda log_directory, error: None
        self._clock = clock
        # When each is due, and its log directory.  The heap may have older entries of a path: a
        # file of this name was replaced by a later one.
        self._waiting: dict[Path, tuple[float, Path]] = {}
        self._heap: list[tuple[float, Path]] = []
        self._full_until: dict[Path, float] = {}
        self._removed = 0
        self._lock = threading.Lock()  # of the fields; no file is touched while it is held
        self._work_lock = threading.Lock()  # of whoever removes

    def __len__(self) -> int:
        """How many files and directories wait."""
        return len(self._waiting)

    def forget(self, log_directory: Path | None = None) -> None:
        """Leave what waits to the next start: all of it, or that of one log directory."""
        with self._lock:
            for path, (_, where) in list(self._waiting.items()):
                if log_directory in (None, where):
                    del self._waiting[path]

    # -- what is deleted ---------------------------------------------------------------------------

    def remove_files(self, log_directory: Path, paths: Sequence[Path], delay_ms: int) -> None:
        """Remove files after `delay_ms`, and rename them now, in this order; those that are not
        there are left out.  OSError."""
        if not self._waits(log_directory, delay_ms):
            unlink(paths)
            return
        renamed = []
        try:
            for path in paths:
                later = path.with_name(path.name + DELETED_SUFFIX)
                try:
                    os.rename(path, later)
                except FileNotFoundError:
                    continue
                except OSError:  # a longer name may need room in the directory
                    path.unlink()
                    continue
                renamed.append(later)
        finally:
            self._add(log_directory, renamed, delay_ms)

    def keep_files(self, log_directory: Path, paths: Sequence[Path], delay_ms: int) -> None:
        """The same for files whose names others are about to take: what the names stand for is kept
        under a second one.  A file system without hard links keeps nothing."""
        if not self._waits(log_directory, delay_ms):
            return
        linked = []
        for path in paths:
            later = path.with_name(path.name + DELETED_SUFFIX)
            try:
                later.unlink(missing_ok=True)
                os.link(path, later)
            except FileNotFoundError:
                continue
            except OSError as e:
                log.debug("%s is replaced at once: %s", path, e)
                continue
            linked.append(later)
        self._add(log_directory, linked, delay_ms)

    def remove_directory(self, log_directory: Path, path: Path, delay_ms: int) -> None:
        """Remove a directory, which has got its last name, with all that is in it, after
        `delay_ms`."""
        if self._waits(log_directory, delay_ms):
            self._add(log_directory, [path], delay_ms)
        else:
            shutil.rmtree(path, ignore_errors=True)

    def _waits(self, log_directory: Path, delay_ms: int) -> bool:
        return delay_ms > 0 and self._full_until.get(log_directory, 0.0) <= self._clock()

    def _add(self, log_directory: Path, paths: Sequence[Path], delay_ms: int) -> None:
        if not paths:
            return
        due = self._clock() + delay_ms / 1000
        with self._lock:
            sooner = not self._heap or due < self._heap[0][0]
            for path in paths:
                self._waiting[path] = (due, log_directory)
                heapq.heappush(self._heap, (due, path))
        if sooner:
            self.on_sooner()

    # -- removal -----------------------------------------------------------------------------------

    def due_in(self) -> float | None:
        """Seconds until `remove_due` has something to do, 0.0 if it has now; None: nothing
        waits."""
        with self._lock:
            while self._heap and not self._is_valid(*self._heap[0]):
                heapq.heappop(self._heap)
            return max(0.0, self._heap[0][0] - self._clock()) if self._heap else None

    def _is_valid(self, due: float, path: Path) -> bool:
        return self._waiting.get(path, (None,))[0] == due

    def remove_due(self) -> int:
        """Remove what has waited long enough, the first `MOST_AT_ONCE` of it; how many."""
        found: list[tuple[Path, Path]] = []
        with self._lock:
            now = self._clock()
            while self._heap and self._heap[0][0] <= now and len(found) < MOST_AT_ONCE:
                due, path = heapq.heappop(self._heap)
                if self._is_valid(due, path):
                    found.append((path, self._waiting.pop(path)[1]))
        self._remove(found)
        return len(found)

    def make_room(self, log_directory: Path) -> bool:
        """The disk of this log directory is full: remove what waits there; whether anything was
        removed, by this or another thread."""
        before = self._removed
        device = _device(log_directory)
        with self._lock:
            self._full_until[log_directory] = self._clock() + FULL_S
            places = {where for _, where in self._waiting.values()}
        places = {w for w in places if w == log_directory or _device(w) == device}
        with self._lock:
            self._full_until.update(dict.fromkeys(places, self._full_until[log_directory]))
            found = [(path, where) for path, (_, where) in self._waiting.items() if where in places]
            for path, _ in found:
                del self._waiting[path]
        if found:
            log.info("the disk of %s is full: removing %d files at once", log_directory, len(found))
        self._remove(found)
        return self._removed != before

    def _remove(self, found: Sequence[tuple[Path, Path]]) -> None:
        failed: list[tuple[Path, OSError]] = []
        with self._work_lock:
            for path, log_directory in found:
                try:
                    if path.is_dir():
                        shutil.rmtree(path)
                    else:
                        path.unlink(missing_ok=True)
                except OSError as e:
                    log.warning("cannot remove %s, the next start tries again: %s", path, e)
                    failed.append((log_directory, e))
                else:
                    self._removed += 1
        for log_directory, error in failed:
            self.on_error(log_directory, error)


def gone_name(topic_partition: TopicPartition, suffix: str) -> str:
    """What the directory of a deleted (or stray) partition is called: no other one ever was, and,
    as in Kafka, of a long topic's name the end is left out."""
    ending = f"-{topic_partition.partition}.{uuid.uuid4().hex}{suffix}"
    return topic_partition.topic[: NAME_MAX - len(ending)] + ending


def unlink(paths: Sequence[Path]) -> None:
    """Remove files, in this order, that may not be there.  OSError."""
    for path in paths:
        path.unlink(missing_ok=True)


def _device(path: Path) -> int | None:
    try:
        return os.stat(path).st_dev
    except OSError:
        return None


__all__ = [
    "DELETED_DIRECTORY",
    "DELETED_SUFFIX",
    "STRAY_DIRECTORY",
    "Removals",
    "gone_name",
    "unlink",
]
