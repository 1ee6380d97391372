"""The small text files beside the segments: Kafka's checkpoints and metadata.

Law of the room: a file is replaced whole (write, fsync, rename, fsync of the directory), so a
reader finds the old or the new one.  A checkpoint that cannot be understood is treated as missing
where the log itself can answer, and is an error where it cannot.

====================================  =========================================================
``recovery-point-offset-checkpoint``  a log dir: per partition, below which everything is on disk
``log-start-offset-checkpoint``       a log dir: per partition, below which records are deleted;
                                      without those that start with their first segment, unless
                                      they are tiered
``replication-offset-checkpoint``     a log dir: per partition, the high watermark
``cleaner-offset-checkpoint``         a log dir: per partition, up to where it was compacted
``leader-epoch-checkpoint``           a partition: leader epochs and the offsets they start at
``partition.metadata``                a partition: the topic id; since which offset kdirect wrote it
``meta.properties``                   a log dir: whose it is
``topic.properties``                  a partition: overrides of its topic (kdirect's own)
====================================  =========================================================
"""

from __future__ import annotations

import base64
import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kdirect.errors import CorruptLogError
from kdirect.log.mapped import sync_file_system
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.log")

RECOVERY_POINTS = "recovery-point-offset-checkpoint"
LOG_STARTS = "log-start-offset-checkpoint"
HIGH_WATERMARKS = "replication-offset-checkpoint"
CLEANED = "cleaner-offset-checkpoint"
LEADER_EPOCHS = "leader-epoch-checkpoint"
PARTITION_METADATA = "partition.metadata"
DENSE_FROM = "kdirect_dense_from"
MOVED = "kdirect_moved"
META_PROPERTIES = "meta.properties"
TOPIC_PROPERTIES = "topic.properties"
CLEAN_SHUTDOWN = ".kafka_cleanshutdown"
LARGEST_OFFSET = (1 << 63) - 1
LARGEST_EPOCH = (1 << 31) - 1
SYNC_EACH = 64


def sync_directory(directory: Path) -> None:
    """Make creations, renames and removals in `directory` durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_paths(directory: Path, paths: Sequence[Path]) -> None:
    """Make what is in these files and directories, all below `directory`, durable; missing ones are
    left out.  Many of them by one sync of the file system, which costs less than a wait for
    each."""
    if len(paths) > SYNC_EACH:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sync_file_system(fd)
        finally:
            os.close(fd)
        return
    for path in paths:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def sync_data(paths: Sequence[Path]) -> None:
    """Make the bytes of files that are written through a mapping durable; missing ones are left
    out."""
    for path in paths:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)


def replace_file(path: Path, data: bytes, *, sync: bool = True, sync_name: bool = True) -> None:
    """Put `data` in place of the file, all or nothing; it is on disk then.  Without `sync_name` the
    caller syncs the directory: of several files that are new there, once."""
    temporary = path.with_name(path.name + ".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        if sync:
            os.fsync(fd)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    os.rename(temporary, path)
    if sync and sync_name:
        sync_directory(path.parent)


# -- offset checkpoints ----------------------------------------------------------------------------


def write_offsets(path: Path, offsets: Mapping[TopicPartition, int]) -> None:
    """Version, count, then ``topic partition offset`` a line."""
    lines = [
        "0",
        str(len(offsets)),
        *(f"{tp.topic} {tp.partition} {offset}" for tp, offset in sorted(offsets.items())),
    ]
    replace_file(path, ("\n".join(lines) + "\n").encode())


def read_offsets(path: Path) -> dict[TopicPartition, int]:
    """The offsets by partition; a missing or damaged file (said in the log) is empty."""
    return read_known_offsets(path) or {}


def read_known_offsets(path: Path) -> dict[TopicPartition, int] | None:
    """The same; None for a file that is missing or damaged."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as e:
        log.warning("checkpoint %s cannot be read (%s): going on without it", path, e)
        return None
    try:
        if lines[0] != "0" or int(lines[1]) != len(lines) - 2:
            raise ValueError("unknown version or wrong count")
        out = {}
        for line in lines[2:]:
            topic, partition, offset = line.split(" ")
            if not 0 <= int(offset) <= LARGEST_OFFSET:
                raise ValueError(f"offset {offset} of {topic}-{partition}")
            out[TopicPartition(topic, int(partition))] = int(offset)
        return out
    except (ValueError, IndexError) as e:
        log.warning("checkpoint %s is damaged (%s): going on without it", path, e)
        return None


# -- leader epochs ---------------------------------------------------------------------------------


def write_leader_epochs(
    directory: Path,
    epochs: Sequence[tuple[int, int]],
    *,
    sync: bool = True,
    sync_name: bool = True,
) -> None:
    """(epoch, start offset), rising in both."""
    text = (
        "\n".join(["0", str(len(epochs)), *(f"{epoch} {start}" for epoch, start in epochs)]) + "\n"
    )
    replace_file(directory / LEADER_EPOCHS, text.encode(), sync=sync, sync_name=sync_name)


def read_leader_epochs(directory: Path) -> list[tuple[int, int]]:
    """(epoch, start offset) in order; a missing or damaged file is empty."""
    try:
        lines = (directory / LEADER_EPOCHS).read_text().splitlines()
        if lines[0] != "0" or int(lines[1]) != len(lines) - 2:
            raise ValueError("unknown version or wrong count")
        epochs = []
        for line in lines[2:]:
            epoch, start = line.split(" ")
            if not (0 <= int(epoch) <= LARGEST_EPOCH and 0 <= int(start) <= LARGEST_OFFSET):
                raise ValueError(f"epoch {epoch} from offset {start}")
            epochs.append((int(epoch), int(start)))
        return sorted(epochs)
    except FileNotFoundError:
        return []
    except (ValueError, IndexError, OSError) as e:
        log.warning(
            "checkpoint %s is damaged (%s): going on without it", directory / LEADER_EPOCHS, e
        )
        return []


# -- identities ------------------------------------------------------------------------------------


def new_id() -> uuid.UUID:
    """A random id whose text does not begin with a dash, as Kafka draws them: its tools take ids as
    arguments."""
    while True:
        drawn = uuid.uuid4()
        if not encode_id(drawn).startswith("-"):
            return drawn


def encode_id(value: uuid.UUID) -> str:
    """Kafka's text form of a 128-bit id: URL-safe base64 without padding."""
    return base64.urlsafe_b64encode(value.bytes).decode().rstrip("=")


def decode_id(text: str) -> uuid.UUID:
    """The reverse of `encode_id`; ValueError."""
    return uuid.UUID(bytes=base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))


class Moved(NamedTuple):
    """A replica that was moved between log directories: an id that all its directories share, drawn
    before its first move, and how often it was moved.  Of two directories with one id the one that
    was moved more often has everything."""

    replica: uuid.UUID
    times: int


class PartitionMetadata(NamedTuple):
    """What ``partition.metadata`` says: the topic's id, and the offset from which on kdirect wrote
    the log, so that no offset is missing there.  None: the file is Kafka's, or of a kdirect that
    did not note it.  `moved`: None, it never was."""

    topic_id: uuid.UUID
    dense_from: int | None
    moved: Moved | None = None


def write_partition_metadata(
    directory: Path,
    topic_id: uuid.UUID,
    dense_from: int,
    moved: Moved | None = None,
    *,
    sync: bool = True,
) -> None:
    """Kafka's file; it reads the first two lines and leaves the others alone."""
    text = f"version: 0\ntopic_id: {encode_id(topic_id)}\n{DENSE_FROM}: {dense_from}"
    if moved is not None:
        text += f"\n{MOVED}: {encode_id(moved.replica)} {moved.times}"
    replace_file(directory / PARTITION_METADATA, text.encode(), sync=sync)


def read_partition_metadata(directory: Path) -> PartitionMetadata | None:
    """None for a partition without the file; CorruptLogError when it is damaged."""
    path = directory / PARTITION_METADATA
    try:
        fields = dict(line.split(": ", 1) for line in path.read_text().splitlines() if line)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        raise CorruptLogError(
            f"{path} is damaged ({e})", hint="remove it to give the topic a new id"
        ) from e
    try:
        if fields["version"] != "0":
            raise ValueError(f"version {fields['version']}")
        dense_from = int(fields[DENSE_FROM]) if DENSE_FROM in fields else None
        if dense_from is not None and not 0 <= dense_from <= LARGEST_OFFSET:
            raise ValueError(f"{DENSE_FROM} is no offset")
        moved = _parse_moved(fields[MOVED]) if MOVED in fields else None
        return PartitionMetadata(decode_id(fields["topic_id"]), dense_from, moved)
    except (KeyError, ValueError) as e:
        raise CorruptLogError(
            f"{path} is damaged ({e})", hint="remove it to give the topic a new id"
        ) from e


def _parse_moved(text: str) -> Moved:
    replica, _, times = text.partition(" ")
    if not (times.isascii() and times.isdigit()):
        raise ValueError(f"{MOVED} has no number")
    return Moved(decode_id(replica), int(times))


def write_properties(path: Path, properties: Mapping[str, str], *, sync: bool = True) -> None:
    """Java's properties format, as far as our values need it."""
    lines = [f"{name}={value}" for name, value in sorted(properties.items())]
    replace_file(path, ("\n".join(["#", *lines]) + "\n").encode(), sync=sync)


def read_properties(path: Path) -> dict[str, str] | None:
    """Name -> value; None when the file is missing; CorruptLogError when it is no text of that
    format."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as e:
        raise CorruptLogError(
            f"{path} cannot be read ({e})", hint="restore it, or remove it to start with defaults"
        ) from e
    out = {}
    for raw in text.splitlines():
        line = raw.strip()
        if not line or line.startswith(("#", "!")):
            continue
        name, sign, value = line.partition("=")
        if not sign:
            raise CorruptLogError(
                f"{path} is damaged: line {line!r} is no property", hint="restore it, or remove it"
            )
        out[name.strip()] = value.strip()
    return out
