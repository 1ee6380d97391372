"""The threads that compact logs.

Owns: which log is compacted next, by whom, how fast, and where its last cleaning ended
(``cleaner-offset-checkpoint`` of each log directory, in Kafka's format).  How a log is compacted is
`kdirect.log.cleaning`.

In a cluster each broker compacts its own copies, those that it leads and those that follow, each
up to its own last stable offset, so below what was committed.

A thread takes the dirtiest log that is due, compacts it, and looks for the next; when there is
none, it sleeps for ``log.cleaner.backoff.ms``.  The properties may change at any time
(`reconfigure`): pauses end, threads come and go at once, and what a cleaning may use is asked when
it begins; a thread that is to go first ends the cleaning that it has begun.  A log whose compaction
fails for another reason than its end or a full disk is *uncleanable* until the broker starts again,
as in Kafka: it is left alone, counted, and named in the log.

Threads: `start` and `stop` on any one thread, `reconfigure` on any; the cleaner's own take
``_lock`` to choose and to note, and hold it for no file work but the checkpoint's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kdirect.errors import ClosedError, KdirectError, StorageFullError
from kdirect.log import checkpoint
from kdirect.log.cleaning import Cleaned, Cleaning, Memory, dirt_of
from kdirect.log.cleaning_rules import Dirt
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.broker")

CHECKPOINT = checkpoint.CLEANED
SHORTEST_PAUSE_S = 0.001


class LogCleaner:
    """See the module.  `config` has the broker's properties by name, as they are when one is asked
    for; `time_ms` is its clock.  Life: `start`, `stop`, which waits for the threads."""

    def __init__(
        self, config: Mapping[str, Any], logs: LogManager, time_ms: Callable[[], int]
    ) -> None:
        self._config = config
        self._logs = logs
        self._time_ms = time_ms
        self._lock = threading.Lock()
        self._woken = threading.Condition(self._lock)  # of threads that pause
        self._changes = 0  # how often the properties have changed, which ends pauses
        self._running = self._stopping = False
        self._threads: dict[int, threading.Thread] = {}  # by number, those that are to work
        self._cleaned_to: dict[TopicPartition, int] = {}
        self._under_way: set[TopicPartition] = set()
        self._uncleanable: set[Partition] = set()
        self._paid_until = 0.0  # when what was read and written would have been, at the limit
        self._max_dirty = 0.0
        self._runs = self._bytes_read = self._bytes_written = self._records_removed = 0

    def start(self) -> None:
        """The logs are open: read the checkpoints, and begin.  What one says of a log that was
        moved to another directory is old."""
        here: dict[Path, set[TopicPartition]] = defaultdict(set)
        for tp, partition in list(self._logs.partitions.items()):
            here[partition.directory.parent].add(tp)
        for directory in self._logs.usable_dirs:
            found = checkpoint.read_offsets(directory / CHECKPOINT)
            self._cleaned_to.update({tp: end for tp, end in found.items() if tp in here[directory]})
        with self._lock:
            self._running = True
            self._start_threads()

    def reconfigure(self) -> None:
        """The properties have changed: whoever pauses goes on by them, and as many threads as they
        say work.  Any thread; waits for no cleaning."""
        with self._lock:
            self._changes += 1
            self._paid_until = 0.0
            self._woken.notify_all()
            if self._running and not self._stopping:
                self._start_threads()

    def stop(self) -> None:
        """Return when no log is compacted any more.  What is under way ends between two pieces, and
        is done again after the next start."""
        with self._lock:
            self._stopping = True
            self._woken.notify_all()
            threads = list(self._threads.values())
        for thread in threads:
            thread.join()

    # -- the threads -------------------------------------------------------------------------------

    def _count(self) -> int:
        config = self._config
        return int(config["log.cleaner.threads"]) if config["log.cleaner.enable"] else 0

    def _start_threads(self) -> None:
        for i in range(self._count()):
            if i not in self._threads:
                self._threads[i] = threading.Thread(
                    target=self._run, args=(i,), name=f"kdirect-cleaner-{i}", daemon=True
                )
                self._threads[i].start()

    def _has_work(self, number: int) -> bool:
        """Is this thread to go on?  One that is not wanted any more does not count from here on, so
        that another of its number may begin."""
        with self._lock:
            if self._stopping:
                return False
            if number < self._count():
                return True
            del self._threads[number]
            return False

    def _run(self, number: int) -> None:
        while self._has_work(number):
            seen = self._changes
            try:
                found = self.clean_one()
            except Exception:
                log.exception("a look for logs to compact failed")
                found = False
            if not found:
                self._pause(self._config["log.cleaner.backoff.ms"] / 1000, seen)

    def _pause(self, seconds: float, seen: int) -> None:
        """Return after so long, or once the properties are others than those `seen`, or when the
        broker stops."""
        with self._woken:
            self._woken.wait_for(
                lambda: self._stopping or self._changes != seen, max(seconds, SHORTEST_PAUSE_S)
            )

    def _memory(self) -> Memory:
        """What one thread may use of that of all."""
        config, count = self._config, max(1, self._count())
        return Memory(
            config["log.cleaner.dedupe.buffer.size"] // count,
            config["log.cleaner.io.buffer.load.factor"],
            max(4096, config["log.cleaner.io.buffer.size"] // count),
        )

    def clean_one(self) -> bool:
        """Compact the dirtiest log that is due; False: none is."""
        chosen = self._choose()
        if chosen is None:
            return False
        partition, dirt = chosen
        directory = partition.directory
        try:
            began = time.monotonic()
            done = Cleaning(partition, dirt, self._memory(), self._time_ms(), self._throttle).run()
            self._note(partition, done, time.monotonic() - began)
        except ClosedError as e:
            log.debug("compaction of %s ended: %s", partition.topic_partition, e)
            return not self._stopping and self._is_here(partition)
        except (KdirectError, OSError) as e:
            # Its topic was deleted, or it was moved to another log directory: the files went.
            if partition.is_closed or partition.directory != directory:
                log.debug("compaction of %s ended: %s", partition.topic_partition, e)
            else:
                self._failed(partition, e)
        finally:
            with self._lock:
                self._under_way.discard(partition.topic_partition)
        return True

    def _is_here(self, partition: Partition) -> bool:
        return self._logs.partitions.get(partition.topic_partition) is partition

    def _choose(self) -> tuple[Partition, Dirt] | None:
        with self._lock:
            here = list(self._logs.partitions.values())
            self._uncleanable = {p for p in self._uncleanable if self._is_here(p)}
            best: tuple[Partition, Dirt] | None = None
            self._max_dirty = 0.0
            for partition in here:
                tp = partition.topic_partition
                if not partition.config.compacts or tp in self._under_way:
                    continue
                if partition in self._uncleanable:
                    continue
                dirt = self._look(partition)
                if dirt is None:
                    continue
                self._max_dirty = max(self._max_dirty, dirt.ratio)
                due = dirt.is_due(partition.config.min_cleanable_ratio)
                if due and (best is None or dirt.ratio > best[1].ratio):
                    best = partition, dirt
            if best is not None:
                self._under_way.add(best[0].topic_partition)
            return best

    def _look(self, partition: Partition) -> Dirt | None:
        tp = partition.topic_partition
        self._note_cut(partition)
        try:
            dirt = dirt_of(partition, self._cleaned_to.get(tp), self._time_ms())
        except (KdirectError, OSError) as e:
            log.debug("%s cannot be looked at: %s", tp, e)
            return None
        if dirt.is_reset and partition.config.deletes is False:
            log.warning(
                "%s was compacted up to offset %s, and has offsets [%d, %d): it is compacted from"
                " its start",
                *(tp, self._cleaned_to.get(tp), partition.log_start_offset),
                partition.log_end_offset,
            )
        if dirt.is_reset:
            self._cleaned_to[tp] = dirt.first_dirty
        return dirt

    def _note_cut(self, partition: Partition) -> None:
        """What comes above the offset where a log was cut is dirty, wherever the last cleaning of
        it ended."""
        cut, tp = partition.take_cut(), partition.topic_partition
        if cut < self._cleaned_to.get(tp, 0):
            self._cleaned_to[tp] = cut
            self._write(partition.directory.parent)

    def _throttle(self, bytes_: int) -> None:
        """So many bytes were read or written: wait until that is allowed.  ClosedError when the
        broker stops."""
        with self._lock:
            now, seen = time.monotonic(), self._changes
            limit = self._config["log.cleaner.io.max.bytes.per.second"]
            self._paid_until = max(self._paid_until, now) + bytes_ / limit
            wait_s = self._paid_until - now
        if wait_s > SHORTEST_PAUSE_S:
            self._pause(min(wait_s, threading.TIMEOUT_MAX), seen)
        if self._stopping:
            raise ClosedError("the broker is stopping", hint="nothing to do")

    # -- what came of it ---------------------------------------------------------------------------

    def _note(self, partition: Partition, done: Cleaned, seconds: float) -> None:
        tp = partition.topic_partition
        with self._lock:
            self._runs += 1
            self._bytes_read += done.bytes_read
            self._bytes_written += done.bytes_written
            self._records_removed += done.records_read - done.records_kept
            self._cleaned_to[tp] = min(done.end_offset, partition.take_cut())
            self._write(partition.directory.parent)
        log.info(
            "compacted %s up to offset %d in %.2f s: %d of %d records and %d of %d bytes are left,"
            " in %d of %d segments",
            *(tp, done.end_offset, seconds, done.records_kept, done.records_read),
            *(done.bytes_written, done.bytes_read, done.segments_after, done.segments_before),
        )

    def moved(self, partition: Partition) -> None:
        """A log is in another directory now.  Any thread."""
        with self._lock:
            if partition.topic_partition in self._cleaned_to:
                self._write(partition.directory.parent)

    def _write(self, directory: Path) -> None:
        """The checkpoint of one directory; without it the next start compacts more."""
        mine = {
            p.topic_partition: self._cleaned_to[p.topic_partition]
            for p in list(self._logs.partitions.values())
            if p.directory.parent == directory and p.topic_partition in self._cleaned_to
        }
        try:
            checkpoint.write_offsets(directory / CHECKPOINT, mine)
        except OSError as e:
            log.warning("cannot write %s: %s", directory / CHECKPOINT, e)

    def _failed(self, partition: Partition, error: KdirectError | OSError) -> None:
        self._logs.look_into(partition, error)
        if isinstance(error, StorageFullError):
            log.error("no room to compact %s: %s", partition.topic_partition, error)
            self._pause(self._config["log.cleaner.backoff.ms"] / 1000, self._changes)
            return
        log.error(
            "compaction of %s failed, and it is not tried again until the next start: %s",
            *(partition.topic_partition, error),
        )
        with self._lock:
            self._uncleanable.add(partition)

    def statistics(self) -> dict[str, int]:
        """Counters, by the names of `kdirect.metrics`; any thread."""
        return {
            "cleaner_runs": self._runs,
            "cleaner_bytes_read": self._bytes_read,
            "cleaner_bytes_written": self._bytes_written,
            "cleaner_records_removed": self._records_removed,
            "cleaner_uncleanable_partitions": len(self._uncleanable),
            "cleaner_max_dirty_percent": int(100 * self._max_dirty),
        }
