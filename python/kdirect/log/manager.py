"""The log manager: all partitions of a broker, in one or more log directories.

Law of the room: owns the list of partitions, the checkpoints and the marker of a clean shutdown;
whose the directories are, and what lies in them, is `kdirect.log.directories`.  It runs no thread
and reads no clock: the broker calls `apply_retention`, `flush_due` and `checkpoint` when they are
due.

Life: construct, `open`, use, `close`.  A process that dies without `close` leaves no clean-shutdown
marker, and the next `open` recovers.  Any thread may call.

**Directories that fail.**  Where there are several directories, or other brokers may have replicas,
one whose disk has failed (`trouble`) goes offline for good: nothing is written there any more, its
partitions are told of (`on_failed`) and let go (`drop`), and new ones are made elsewhere.  A broker
that is alone with one directory has no better one: it goes on as far as it can.

Locks: ``_change_lock`` is held by whatever opens, closes, makes, alters or deletes, and may wait
for the disk.  Looking at partitions takes no lock: the dictionaries are replaced entry by entry,
and copied at once before they are walked.

What is deleted waits in `removals`, of which the broker calls `remove_due`; `close` leaves it to
the next start.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from kdirect.errors import ClosedError, ConfigError, CorruptLogError, KdirectError, LogError
from kdirect.log import checkpoint
from kdirect.log.config import LogConfig
from kdirect.log.directories import (
    DirectoryLocks,
    identify,
    look_for_moves,
    make_directories,
    partition_directories,
    read_meta,
    settle_move,
    tiered_topics,
)
from kdirect.log.kernel_producers import expire_producers
from kdirect.log.kernel_transactions import has_late_transaction
from kdirect.log.moves import DirectoryMoves
from kdirect.log.partition import Partition
from kdirect.log.recovery import load_partition
from kdirect.log.relocation import InPlace
from kdirect.log.remote_rules import refuse_tiered, refuse_without_system
from kdirect.log.removals import Removals
from kdirect.log.trouble import Trouble, is_full, trouble_of
from kdirect.model import TopicPartition, check_topic_name

log = logging.getLogger("kdirect.log")

LOST_START = -1  # the checkpoint of log starts is missing or damaged


class LogManager:
    """See the module.  `log_dirs` are created when missing; `config` holds the broker's defaults,
    and each topic may override them.  `node_id` and `cluster_id` are kept in ``meta.properties``: a
    directory of another node or cluster is refused; without a `cluster_id`, the one on disk or a
    new one is taken.  `replicated`: other brokers may have replicas, so of each log only what was
    below the high watermark may be read until a leader says more."""

    def __init__(
        self,
        log_dirs: Sequence[str | Path],
        config: LogConfig | None = None,
        *,
        node_id: int = 1,
        cluster_id: str | None = None,
        replicated: bool = False,
    ) -> None:
        if not log_dirs:
            raise ConfigError("no log directory is given", hint="set log.dirs")
        if isinstance(log_dirs, str | Path):
            log_dirs = [log_dirs]
        self.log_dirs = [Path(d).absolute() for d in log_dirs]
        if len(set(self.log_dirs)) != len(self.log_dirs):
            raise ConfigError(
                "a log directory is named twice", hint="remove the repetition from log.dirs"
            )
        self.config = config or LogConfig()
        self.node_id = node_id
        self.cluster_id = cluster_id or ""
        self.replicated = replicated
        self.offline: dict[Path, str] = {}  # directories that have failed, and why
        self.lost: dict[TopicPartition, uuid.UUID | None] = {}  # in them, with ids of topics
        # A directory has failed; a partition could not be written for lack of room.  Any thread.
        self.on_failed: Callable[[Path], None] = lambda directory: None
        self.on_full: Callable[[Partition], None] = lambda partition: None
        self.on_changed: Callable[[Partition], None] = lambda new_or_configured: None
        self.removals = Removals()
        self.removals.on_error = self.note_failure
        self.partitions: dict[TopicPartition, Partition] = {}
        self.moves = DirectoryMoves(self)
        self._wanted_cluster_id = cluster_id
        self._adopts = False
        self._locks = DirectoryLocks()
        self._plain = self.config.with_overrides({})  # of every topic without properties of its own
        self._by_topic: dict[str, dict[int, Partition]] = {}
        self._change_lock = threading.RLock()
        self._checkpoint_lock = threading.Lock()
        self._offline_lock = threading.Lock()
        self._opened = False

    # -- open, close -------------------------------------------------------------------------------

    def open(self) -> LogManager:
        """Lock the directories and load every partition in them, recovering those of a crash."""
        with self._change_lock:
            if self._opened:
                raise LogError("the log manager is open already")
            try:
                for directory in self.log_dirs:
                    self._unless_failed(directory, self._locks.take)
                for directory in self.usable_dirs:
                    self._unless_failed(directory, read_meta)
                self.cluster_id = identify(
                    self.usable_dirs,
                    self.node_id,
                    self.cluster_id,
                    wanted=self._wanted_cluster_id,
                    adopt=self._adopts,
                )
                if not self.config.remote_system:
                    tiered = [self._unless_failed(d, tiered_topics) for d in self.usable_dirs]
                    refuse_tiered(sorted({name for found in tiered for name in found or ()}))
                futures = self._settle_moves()
                clean = [
                    self._unless_failed(directory, self._load_directory)
                    for directory in self.usable_dirs
                ]
                if False in clean:
                    # A recovery point above what was recovered would vouch for records to come.
                    self.checkpoint()
                self.moves.resume(futures)
            except BaseException:
                for partition in self.partitions.values():
                    partition.close(clean=False)
                self.partitions.clear()
                self._by_topic.clear()
                self._locks.release()
                raise
            self._opened = True
        return self

    def _settle_moves(self) -> list[tuple[TopicPartition, Path]]:
        """Of each partition that was being moved one directory stays; the copies that were not
        done."""
        paths: dict[TopicPartition, list[Path]] = {}
        futures: list[tuple[TopicPartition, Path]] = []
        for directory in self.usable_dirs:
            here, found = self._unless_failed(directory, look_for_moves) or ((), ())
            futures += found
            for tp, path in here:
                paths.setdefault(tp, []).append(path)
        for tp, several in paths.items():
            if len(several) > 1:
                settle_move(tp, several)
        return futures

    def _unless_failed(self, directory: Path, work: Callable[[Path], Any]) -> Any:
        """Do one step of `open`.  Of a broker whose partitions others have, a directory that has
        failed is left out, as long as there is another one."""
        try:
            return work(directory)
        except (LogError, OSError) as e:
            others = [d for d in self.usable_dirs if d != directory]
            if not (self.replicated and others and isinstance(e.__cause__ or e, OSError)):
                raise
            if trouble_of(e, directory) is not Trouble.FAILED:
                raise
            self.offline[directory] = str(e)
            self.drop(directory)
            log.error("log directory %s is left out, for it has failed: %s", directory, e)
            return None

    def belong_to(self, cluster_id: str, *, adopt: bool = False) -> None:
        """Before `open`: the directories are those of this cluster, or new; with `adopt`, they
        become its own, whatever they were."""
        self._wanted_cluster_id = self.cluster_id = cluster_id
        self._adopts = adopt

    def __enter__(self) -> LogManager:
        return self if self._opened else self.open()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _load_directory(self, directory: Path) -> bool:
        """Load what is there; whether the broker before had closed it cleanly."""
        marker = directory / checkpoint.CLEAN_SHUTDOWN
        clean = marker.exists()
        recovery_points = checkpoint.read_offsets(directory / checkpoint.RECOVERY_POINTS)
        log_starts = checkpoint.read_known_offsets(directory / checkpoint.LOG_STARTS)
        marks = checkpoint.read_offsets(directory / checkpoint.HIGH_WATERMARKS)
        unsynced: list[Path] = []
        loaded = 0
        for tp, path in partition_directories(directory):
            if tp in self.partitions:
                raise CorruptLogError(
                    f"partition {tp} exists in {self.partitions[tp].directory} and in {path}",
                    hint="move one away",
                )
            start = log_starts.get(tp) if log_starts is not None else LOST_START
            known = (recovery_points.get(tp, 0), start, marks.get(tp, 0))
            self._load(tp, path, clean, *known, unsynced)
            loaded += 1
        try:
            checkpoint.sync_paths(directory, unsynced)
        except OSError as e:
            raise LogError(
                f"what was recovered in {directory} cannot be synced: {e}", hint="check the disk"
            ) from e
        if clean:
            marker.unlink()  # from the first append on it is not true any more
            checkpoint.sync_directory(directory)
        if loaded:
            log.info(
                "loaded %d partitions from %s after %s",
                loaded,
                directory,
                "a clean shutdown" if clean else "a crash",
            )
        return clean

    def _load(
        self,
        tp: TopicPartition,
        path: Path,
        clean: bool,
        recovery_point: int,
        log_start_offset: int | None,
        high_watermark: int,
        unsynced: list[Path],
    ) -> None:
        lost_start = log_start_offset == LOST_START
        try:
            files = os.listdir(path)
            own = checkpoint.TOPIC_PROPERTIES in files
            partition = load_partition(
                tp,
                path,
                self._own_config(path) if own else self._plain,
                clean=clean,
                recovery_point=recovery_point,
                log_start_offset=None if lost_start else log_start_offset,
                lost_start=lost_start,
                # Alone, this is the only replica: all that was found is on disk, and may be read.
                high_watermark=high_watermark if self.replicated else None,
                files=files,
                unsynced=unsynced,
            )
            self._add(partition)
        except KdirectError:
            raise
        except OSError as e:
            raise LogError(
                f"partition {tp} in {path} cannot be loaded: {e}",
                hint="check the disk and the permissions there",
            ) from e

    def _own_config(self, path: Path) -> LogConfig:
        """The configuration of a partition whose topic has properties of its own."""
        overrides = checkpoint.read_properties(path / checkpoint.TOPIC_PROPERTIES)
        try:
            return self.config.with_overrides(overrides)
        except ConfigError as e:
            raise CorruptLogError(
                f"{path / checkpoint.TOPIC_PROPERTIES} is damaged: {e}",
                hint="restore it, or remove it: topics.json has the properties of its topic, too",
            ) from e

    def close(self, clean: bool = True) -> None:
        """Close every partition.  With `clean`, everything is on disk afterwards and the marker
        says so; without, the directories are left as a crash would leave them, but for shortened
        files."""
        with self._change_lock:
            if not self._opened:
                return
            self._opened = False
            failed: list[KdirectError | OSError] = []
            try:
                for partition in self.partitions.values():
                    if partition.directory.parent in self.offline:  # there was no time to drop it
                        partition.abandon()
                        continue
                    try:
                        partition.close(clean=clean)
                    except (KdirectError, OSError) as e:
                        log.error("closing %s failed: %s", partition.topic_partition, e)
                        failed.append(e)
                if clean:
                    self.checkpoint()
                    if not failed:
                        for directory in self.usable_dirs:
                            checkpoint.replace_file(
                                directory / checkpoint.CLEAN_SHUTDOWN,
                                b'{"version":0,"brokerEpoch":-1}',
                            )
            finally:
                self.removals.forget()
                self._locks.release()
            if failed:
                raise failed[0]

    # -- partitions --------------------------------------------------------------------------------

    def create_partition(
        self,
        topic_partition: TopicPartition,
        overrides: Mapping[str, Any] | None = None,
        topic_id: uuid.UUID | None = None,
    ) -> Partition:
        """A new, empty partition; see `create_partitions`."""
        return self.create_partitions([topic_partition], overrides, topic_id)[0]

    def create_partitions(
        self,
        topic_partitions: Sequence[TopicPartition],
        overrides: Mapping[str, Any] | None = None,
        topic_id: uuid.UUID | None = None,
    ) -> list[Partition]:
        """New, empty partitions of one topic, all or none, each in the log directory that has
        fewest.  `overrides` are topic properties; `topic_id` is needed once per topic: further
        partitions take that of the first.

        Their directories get their names once what is in them is on disk, so a crash leaves whole
        ones, and such as the next start removes.  Many cost hardly more syncs than one."""
        for topic, number in topic_partitions:
            check_topic_name(topic)
            if number < 0:
                raise ConfigError(f"partition number {number} is negative")
        with self._change_lock:
            self._check_open()
            for tp in topic_partitions:
                if tp in self.partitions:
                    raise LogError(f"partition {tp} exists already")
            config = self.config.with_overrides(overrides) if overrides else self._plain
            refuse_without_system(config, [tp.topic for tp in topic_partitions[:1]])
            if topic_id is None and topic_partitions:
                topic_id = self.topic_id(topic_partitions[0].topic) or checkpoint.new_id()
            made: list[Partition] = []
            named: list[Path] = []
            try:
                places = self._places(topic_partitions)
                for parent, some in places.items():
                    try:
                        self._make_directories(parent, some, config, topic_id, named)
                        for tp in some:
                            directory = parent / str(tp)
                            files = os.listdir(directory)
                            new = load_partition(tp, directory, config, clean=True, files=files)
                            made.append(new)
                    except OSError as e:
                        self.note_failure(parent, e)
                        raise LogError(
                            f"cannot create partition {', '.join(map(str, some[:10]))} in {parent}:"
                            f" {e}",
                            hint="check its space and permissions",
                        ) from e
                with self._offline_lock:  # what is here when a directory fails is let go
                    if not places.keys().isdisjoint(self.offline):
                        raise LogError(
                            "a log directory failed while partitions were made in it",
                            hint="ask again: they are made in another one",
                        )
                    for partition in made:
                        self._add(partition)
            except BaseException:
                for partition in made:
                    partition.close(clean=False)
                for directory in named:  # or the next try would find them
                    shutil.rmtree(directory, ignore_errors=True)
                raise
            return [self.partitions[tp] for tp in topic_partitions]

    def _make_directories(self, parent: Path, *arguments: Any) -> None:
        """`make_directories`; on a full disk once more, when what waited there is removed."""
        try:
            make_directories(parent, *arguments)
        except OSError as e:
            if not is_full(e) or not self.removals.make_room(parent):
                raise
            make_directories(parent, *arguments)

    def _places(self, topic_partitions: Sequence[TopicPartition]) -> dict[Path, list[Any]]:
        """The log directories of new partitions: those that were asked for, else that with the
        fewest.  LogError."""
        usable = self.usable_dirs
        if not usable:
            raise LogError("all log directories have failed", hint="check the disks")
        held = dict.fromkeys(usable, 0)
        if len(held) > 1:
            for partition in self.partitions.values():
                if partition.directory.parent in held:
                    held[partition.directory.parent] += 1
        places: dict[Path, list[Any]] = {}
        for tp in topic_partitions:
            wanted = self.moves.preferred.pop(tp, None)
            parent = wanted if wanted in held else min(usable, key=lambda d: held[d])
            held[parent] += 1
            places.setdefault(parent, []).append(tp)
        return places

    def _add(self, partition: Partition) -> None:
        topic, number = partition.topic_partition
        partition.removals = self.removals
        partition.write_checkpoints = self.checkpoint
        partition.write_log_starts = partial(self._checkpoint_starts, partition.directory.parent)
        self.partitions[partition.topic_partition] = partition
        self._by_topic.setdefault(topic, {})[number] = partition
        self.on_changed(partition)

    def _remove(self, partition: Partition) -> None:
        topic, number = partition.topic_partition
        self.moves.forget(partition)
        del self.partitions[partition.topic_partition]
        del self._by_topic[topic][number]
        if not self._by_topic[topic]:
            del self._by_topic[topic]

    def topic_id(self, topic: str) -> uuid.UUID | None:
        """The id that the partitions of `topic` share, or None."""
        partitions = list(self._by_topic.get(topic, {}).values())
        return partitions[0].topic_id if partitions else None

    def partitions_of(self, topic: str) -> list[Partition]:
        """The partitions of a topic by number; empty when there is none."""
        return sorted(
            self._by_topic.get(topic, {}).values(), key=lambda p: p.topic_partition.partition
        )

    def alter_topic(self, topic: str, overrides: Mapping[str, Any]) -> None:
        """Replace the overrides of a topic."""
        config = self.config.with_overrides(overrides)
        refuse_without_system(config, [topic])
        with self._change_lock:
            self._check_open()
            for partition in self.partitions_of(topic):
                path = partition.directory / checkpoint.TOPIC_PROPERTIES
                write = partial(checkpoint.write_properties, path, config.overrides or {})
                partition.reconfigure(config, write)
                self.on_changed(partition)

    def reconfigure(self, config: LogConfig) -> None:
        """Have other settings for all that topics do not set themselves, at once: those of
        partitions that are there, and of those to come.  Nothing of it is put on disk here."""
        with self._change_lock:
            self.config = config
            self._plain = config.with_overrides({})
            by_topic: dict[str, LogConfig] = {}
            for tp, partition in list(self.partitions.items()):
                if tp.topic not in by_topic:
                    by_topic[tp.topic] = config.with_overrides(partition.config.overrides)
                partition.reconfigure(by_topic[tp.topic])
                self.on_changed(partition)

    def delete_topic(self, topic: str) -> int:
        """Delete all partitions of `topic`: their slots are revoked, their directories renamed and
        removed after ``log.segment.delete.delay.ms``; how many there were."""
        with self._change_lock:
            return self.delete_partitions([p.topic_partition for p in self.partitions_of(topic)])

    def delete_partitions(
        self, topic_partitions: Sequence[TopicPartition], *, keep: bool = False
    ) -> int:
        """The same for some partitions, of which those that are not here are left out.  `keep` as
        in `Partition.delete`."""
        with self._change_lock:
            self._check_open()
            found = [self.partitions.get(tp) for tp in topic_partitions]
            doomed = [partition for partition in found if partition is not None]
            for partition in doomed:
                # When this fails, the next try finds it here.
                partition.delete(keep=keep, delay_ms=self.config.file_delete_delay_ms)
                self._remove(partition)
            try:
                if doomed:
                    self.checkpoint()
            except OSError as e:  # the next one leaves them out, too
                names = ", ".join(str(p.topic_partition) for p in doomed)
                log.error("no checkpoint after the deletion of %s: %s", names, e)
            return len(doomed)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """While no partition is made, altered, moved or deleted by another thread.  ClosedError."""
        with self._change_lock:
            self._check_open()
            yield

    def _check_open(self) -> None:
        if not self._opened:
            raise ClosedError("the log manager is not open", hint="the broker is stopping")

    # -- what the broker calls from time to time ---------------------------------------------------

    def apply_retention(self, now_ms: int) -> int:
        """Delete what retention no longer keeps, forget expired producers; how many segments
        went."""
        deleted = 0
        for partition in self._each():
            try:
                deleted += partition.apply_retention(now_ms)
                expire_producers(partition.kernel, now_ms - partition.config.producer_expiration_ms)
            except ClosedError:
                continue
            except (KdirectError, OSError) as e:
                log.error("retention of %s failed: %s", partition.topic_partition, e)
                self.look_into(partition, e)
        return deleted

    def flush_due(self, now_ms: int) -> int:
        """Flush the partitions whose policy asks for it, and sealed segments; how many were
        flushed."""
        flushed = 0
        for partition in self._each():
            try:
                flushed += partition.flush_due(now_ms)
            except (KdirectError, OSError) as e:
                log.error("flush of %s failed: %s", partition.topic_partition, e)
                self.look_into(partition, e)
        return flushed

    def checkpoint(self) -> None:
        """Write recovery points, log start offsets and high watermarks, so that a crash costs
        less."""
        with self._checkpoint_lock:  # two threads would write the same temporary files
            partitions = self._each()
            failed: list[OSError] = []
            for directory in self.usable_dirs:
                mine = [p for p in partitions if p.directory.parent == directory]
                try:
                    self._write_offsets(directory, mine)
                except OSError as e:
                    self.note_failure(directory, e)
                    if directory not in self.offline:
                        failed.append(e)
            if failed:
                raise failed[0]

    def _write_offsets(self, directory: Path, mine: list[Partition]) -> None:
        """The checkpoints of one directory."""
        checkpoint.write_offsets(
            directory / checkpoint.RECOVERY_POINTS,
            {p.topic_partition: p.recovery_point for p in mine},
        )
        self._write_starts(directory, mine)
        checkpoint.write_offsets(
            directory / checkpoint.HIGH_WATERMARKS,
            {p.topic_partition: p.high_watermark for p in mine},
        )

    @contextmanager
    def checkpoints_of_move(self, partition: Partition, to: Path) -> Iterator[InPlace]:
        """Within it a partition goes on in another directory, whose checkpoints name it before
        that; those of the one that it leaves do so no more after it.  OSError before it begins.
        What it gives lets that be the partition's directory, unless one of the two has failed."""
        left = partition.directory.parent
        with self._checkpoint_lock:
            self._write_offsets(to, [*self._in(to), partition])
            yield partial(self._while_they_work, (to, left))
            partition.write_log_starts = partial(self._checkpoint_starts, to)
            try:
                self._write_offsets(left, self._in(left))
            except OSError as e:  # the next one leaves it out, too
                log.error("no checkpoint of %s after %s was moved: %s", left, partition, e)

    def _while_they_work(self, directories: Sequence[Path], go: Callable[[], None]) -> None:
        """Call `go`, after which a partition is in another directory.  One that fails meanwhile
        takes what is in it along, so it is to be there or not.  OSError where one has failed."""
        with self._offline_lock:
            failed = [d for d in directories if d in self.offline]
            if not failed:
                go()
                return
        raise OSError(errno.EIO, "the log directory has failed", str(failed[0]))

    def _write_starts(self, directory: Path, mine: list[Partition]) -> None:
        """Of a log that is not tiered the first segment's name says as much."""
        checkpoint.write_offsets(
            directory / checkpoint.LOG_STARTS,
            {
                p.topic_partition: p.log_start_offset
                for p in mine
                if p.is_tiered or p.log_start_offset > p.first_kept_offset
            },
        )

    def _checkpoint_starts(self, directory: Path) -> None:
        """Bring the log starts of one directory to the disk, as they are now.  OSError."""
        with self._checkpoint_lock:
            if directory in self.offline:
                raise OSError(errno.EIO, "the log directory has failed", str(directory))
            try:
                self._write_starts(directory, self._in(directory))
            except OSError as e:
                self.note_failure(directory, e)
                raise

    # -- directories that fail ---------------------------------------------------------------------

    @property
    def usable_dirs(self) -> list[Path]:
        """The log directories that have not failed."""
        return [d for d in self.log_dirs if d not in self.offline]

    def look_into(self, partition: Partition, error: BaseException) -> None:
        """Work on the files of a partition ended with this error: is it the directory's?  Any
        thread; it may touch the disk."""
        found = self.note_failure(partition.directory.parent, error)
        if found is Trouble.FULL:
            self.on_full(partition)

    def note_failure(self, directory: Path, error: BaseException) -> Trouble:
        """Work in this log directory ended with that error.  What it says of the directory, which
        goes offline if it has failed; if it is full, nothing that is deleted waits there.  Any
        thread."""
        if is_full(error):
            self.removals.make_room(directory)
        if not self.replicated and len(self.log_dirs) == 1:
            return Trouble.NONE
        found = trouble_of(error, directory)
        with self._offline_lock:
            if found is not Trouble.FAILED or directory in self.offline or not self._opened:
                return found
            self.offline[directory] = str(error)
            self.lost.update({p.topic_partition: p.topic_id for p in self._in(directory)})
        log.error("log directory %s has failed, its partitions are offline: %s", directory, error)
        self.on_failed(directory)
        return found

    def _in(self, directory: Path) -> list[Partition]:
        return [p for p in self._each() if p.directory.parent == directory]

    def drop(self, directory: Path) -> None:
        """Let go of the partitions in a directory that has failed; its files stay as they are."""
        self.removals.forget(directory)
        with self._change_lock:
            for partition in self._in(directory):
                partition.abandon()
                self._remove(partition)

    def _each(self) -> list[Partition]:
        return list(self.partitions.values())

    def late_transactions(self, before_ms: int) -> int:
        """In how many partitions a transaction is open whose producer is silent since then."""
        return sum(has_late_transaction(p.kernel, before_ms) for p in self._each())

    def statistics(self) -> dict[str, int]:
        """Sums over all partitions; see the metrics of room `log`."""
        total: dict[str, int] = {
            "log_partitions": len(self.partitions),
            "log_directories_failed": len(self.offline),
            "log_removals_waiting": len(self.removals),
        }
        for partition in self._each():
            for name, value in partition.statistics().items():
                total[name] = total.get(name, 0) + value
        return total
