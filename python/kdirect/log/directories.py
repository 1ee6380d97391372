"""Log directories on disk: whose they are, which partitions lie in them, how new ones come to be.

Law of the file: it knows names and ``meta.properties``, and opens no log.  A directory belongs to
one node of one cluster, and to one broker at a time (``.lock``).  Deleted partitions that waited to
be removed, and what a crash has left of a creation, are removed where directories are walked.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from kdirect.errors import CorruptLogError, LogError
from kdirect.log import checkpoint
from kdirect.log.config import LogConfig
from kdirect.log.future_copy import FUTURE_DIRECTORY
from kdirect.log.recovery import begin_directory
from kdirect.log.removals import DELETED_DIRECTORY, gone_name
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.log")

LOCK_FILE = ".lock"
INDEX_CACHE = "remote-log-index-cache"  # of `kdirect.storage`, beside the partitions, as Kafka's
PARTITION_DIRECTORY = re.compile(r"([a-zA-Z0-9._-]{1,249})-(\d{1,10})\Z")
_NEW_SUFFIX = "-new"  # of directories that are being made


Found: TypeAlias = tuple[TopicPartition, Path]


class DirectoryLocks:
    """The locks that one broker has on its directories, until `release` or its end."""

    def __init__(self) -> None:
        self._descriptors: list[int] = []

    def take(self, directory: Path) -> None:
        """Make the directory, unless it is there, and lock it."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            fd = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as e:
            raise LogError(
                f"log directory {directory} cannot be used: {e}",
                hint="check log.dirs and the permissions there",
            ) from e
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            os.close(fd)
            raise LogError(
                f"log directory {directory} is in use by another broker",
                hint="stop it or choose other log.dirs",
            ) from e
        self._descriptors.append(fd)

    def release(self) -> None:
        for fd in self._descriptors:
            os.close(fd)
        self._descriptors.clear()


def identify(
    directories: Sequence[Path],
    node_id: int,
    cluster_id: str,
    *,
    wanted: str | None,
    adopt: bool,
) -> str:
    """The cluster of the directories, which are this node's: the one that is `wanted`, that they
    name (`cluster_id`, until one of them does), or a new one.  New directories are marked; with
    `adopt` all are.  LogError for those of another node or cluster."""
    found: dict[Path, dict[str, str] | None] = {
        directory: read_meta(directory) for directory in directories
    }
    for directory, properties in found.items():
        if properties is None:
            continue
        node = properties.get("node.id", properties.get("broker.id"))
        if node is not None and not (node.isascii() and node.isdigit()):
            raise CorruptLogError(
                f"{directory / checkpoint.META_PROPERTIES} is damaged: node {node!r}",
                hint="restore it, or remove it to start with defaults",
            )
        if node is not None and node != str(node_id):
            raise LogError(
                f"{directory} belongs to node {node}, and this is node {node_id}",
                hint="set node.id, or use other log.dirs",
            )
        cluster = properties.get("cluster.id", "")
        if adopt:
            if cluster != wanted:
                path = directory / checkpoint.META_PROPERTIES
                adopted = {**properties, "cluster.id": str(wanted)}
                checkpoint.write_properties(path, adopted)
            continue
        if cluster and wanted and cluster != wanted:
            raise LogError(
                f"{directory} belongs to cluster {cluster}, not {wanted}",
                hint="use other log.dirs",
            )
        if cluster and cluster_id and cluster != cluster_id:
            raise LogError(
                f"{directory} belongs to cluster {cluster}, other log directories to {cluster_id}",
                hint="use log.dirs of one cluster",
            )
        cluster_id = cluster or cluster_id
    cluster_id = cluster_id or checkpoint.encode_id(checkpoint.new_id())
    for directory, properties in found.items():
        if properties is None or "cluster.id" not in properties:
            checkpoint.write_properties(
                directory / checkpoint.META_PROPERTIES,
                {
                    "version": "1",
                    "cluster.id": cluster_id,
                    "node.id": str(node_id),
                    "directory.id": checkpoint.encode_id(checkpoint.new_id()),
                },
            )
    return cluster_id


def partition_directories(directory: Path) -> Iterator[tuple[TopicPartition, Path]]:
    """The partitions in a log directory; deleted ones, and what a creation that was not finished
    has left, are removed."""
    with os.scandir(directory) as entries:
        names = sorted(e.name for e in entries if e.is_dir() and e.name != INDEX_CACHE)
    for name in names:
        path = directory / name
        whole = name.removesuffix(_NEW_SUFFIX)
        unfinished = whole != name and PARTITION_DIRECTORY.match(whole)
        if unfinished or name.endswith(DELETED_DIRECTORY):
            shutil.rmtree(path, ignore_errors=True)
            continue
        match = PARTITION_DIRECTORY.match(name)
        if match is None and FUTURE_DIRECTORY.match(name):
            continue  # `kdirect.log.moves` goes on with it
        if match is None:
            log.warning("%s is no partition: it is left alone", path)
            continue
        tp = TopicPartition(match[1], int(match[2]))
        yield tp, path


def look_for_moves(directory: Path) -> tuple[list[Found], list[Found]]:
    """(the partitions in a log directory, what copies of others were under way there)."""
    names = [(name, FUTURE_DIRECTORY.match(name)) for name in os.listdir(directory)]
    here = [_found(directory, name, name) for name, future in names if future is None]
    futures = [_found(directory, name, future[1]) for name, future in names if future is not None]
    return [f for f in here if f is not None], [f for f in futures if f is not None]


def _found(directory: Path, name: str, partition: str) -> Found | None:
    match = PARTITION_DIRECTORY.match(partition)
    if match is None:
        return None
    return TopicPartition(match[1], int(match[2])), directory / name


def leave(path: Path, topic_partition: TopicPartition) -> Path:
    """Give a partition's directory, or a copy that is not wanted, the name of one that is to be
    removed, on disk; its path then.  Whoever walks the log directory removes it."""
    gone = path.with_name(gone_name(topic_partition, DELETED_DIRECTORY))
    os.rename(path, gone)
    checkpoint.sync_directory(path.parent)
    return gone


def leave_older(path: Path, topic_partition: TopicPartition, moved: checkpoint.Moved) -> list[Path]:
    """A partition is to come to `path`, which was `moved`.  What it has left there, and could not
    be removed, makes room: where it is then.  Anything else stays.  OSError."""
    try:
        known = checkpoint.read_partition_metadata(path)
    except CorruptLogError:
        return []
    found = known.moved if known is not None else None
    if found is not None and found.replica == moved.replica and found.times < moved.times:
        return [leave(path, topic_partition)]
    return []


def remove_in_place(path: Path) -> None:
    """Remove the directory of a partition that was moved, under its own name; what says so goes
    last, so a start goes by it.  OSError."""
    metadata = path / checkpoint.PARTITION_METADATA
    for found in path.iterdir():
        if found != metadata:
            found.unlink(missing_ok=True)
    checkpoint.sync_directory(path)
    metadata.unlink(missing_ok=True)
    path.rmdir()


def settle_move(topic_partition: TopicPartition, paths: Sequence[Path]) -> None:
    """Directories of one partition: a broker that moved it has died before it removed what it had
    left.  The one that was moved most often stays.  Where they are not of one replica, all do."""
    try:
        known = {path: checkpoint.read_partition_metadata(path) for path in paths}
    except CorruptLogError:
        return
    moved = {p: m.moved for p, m in known.items() if m is not None and m.moved is not None}
    replicas = {m.replica for m in moved.values()}
    times = {m.times for m in moved.values()}
    if len(moved) != len(paths) or len(replicas) != 1 or len(times) != len(paths):
        return
    newest = max(moved, key=lambda path: moved[path].times)
    for path in paths:
        if path != newest:
            log.warning("%s is removed: its partition was moved to %s", path, newest)
            leave(path, topic_partition)


def make_directories(
    parent: Path,
    topic_partitions: Sequence[TopicPartition],
    config: LogConfig,
    topic_id: uuid.UUID | None,
    named: list[Path],
) -> None:
    """Empty logs, on disk; `named` gets those that have their names."""
    assert topic_id is not None
    fresh: list[Path] = []
    try:
        for tp in topic_partitions:
            if (parent / str(tp)).exists():
                raise FileExistsError(errno.EEXIST, "there is something", str(parent / str(tp)))
            fresh.append(parent / f"{tp}{_NEW_SUFFIX}")
            shutil.rmtree(fresh[-1], ignore_errors=True)
            begin_directory(fresh[-1], config, topic_id)
        paths = [path for unnamed in fresh for path in (*unnamed.iterdir(), unnamed)]
        checkpoint.sync_paths(parent, paths)
        for unnamed, tp in zip(fresh, topic_partitions, strict=True):
            os.rename(unnamed, parent / str(tp))
            named.append(parent / str(tp))
        checkpoint.sync_directory(parent)
    except BaseException:
        for unnamed in fresh:
            shutil.rmtree(unnamed, ignore_errors=True)
        raise


def tiered_topics(directory: Path) -> set[str]:
    """The topics that are tiered among those that have partitions in a log directory."""
    found = set()
    for match in filter(None, map(PARTITION_DIRECTORY.match, os.listdir(directory))):
        own = checkpoint.read_properties(directory / match[0] / checkpoint.TOPIC_PROPERTIES)
        if own is not None and own.get("remote.storage.enable") == "true":
            found.add(match[1])
    return found


def read_meta(directory: Path) -> dict[str, str] | None:
    """``meta.properties``; None: there is none."""
    return checkpoint.read_properties(directory / checkpoint.META_PROPERTIES)
