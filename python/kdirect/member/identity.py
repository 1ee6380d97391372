"""What a broker's log directories remember of its membership, in ``member.properties``.

The file says which process used the directory last (its incarnation), from which incarnation on it
has lost nothing that was confirmed (`intact_since`), and under which boot of the machine.  A killed
process loses nothing of what it wrote, and neither does a clean shutdown; a machine that went down
may have lost what was not synced.  So the number is carried on where the boot is the same or the
shutdown was clean; else it begins again with this process.

Each directory has a number of its own, for one of several may be another disk by now.  What is true
of a replica is said by the directory that it is in, and of one that is missing nothing is true: it
is *lost*, and made again, empty.  That, too, is remembered, for else the next process would find it
there and believe that it has all its records (`find_lost`).

The file is not synced: one that is lost with the power says what is true then, which is nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kdirect.cluster.fields import MOST_INT64
from kdirect.cluster.image import Image
from kdirect.cluster.partition_state import NO_INCARNATION
from kdirect.cluster.records import OWN
from kdirect.errors import CorruptLogError
from kdirect.log import checkpoint
from kdirect.log.directories import PARTITION_DIRECTORY
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.member")

FILE = "member.properties"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LOST = re.compile(r"([a-zA-Z0-9._-]{1,249})-(\d{1,10}):(\d{1,19})")


class Identity(NamedTuple):
    """`boot`: the machine's boot.  `incarnation`: of the process that used the directory last.
    `lost`: replicas that were made again, empty, as that incarnation."""

    boot: str
    incarnation: int
    intact_since: int
    lost: Mapping[TopicPartition, int] = {}


class Past(NamedTuple):
    """What the directories say to the process that begins.  `intact_since`: of those that lack
    nothing; None if all may lack what was confirmed.  `since`: of each directory.
    `own_incarnation`: of the process before, if it ran under this boot, and so has ended when the
    directories' lock is held; -1: not known."""

    intact_since: int | None = None
    own_incarnation: int = -1
    since: Mapping[Path, int | None] = {}
    lost: Mapping[TopicPartition, int] = {}


class Kept(NamedTuple):
    """A replica that was found: of which topic, and in which log directory."""

    topic_id: uuid.UUID | None
    log_dir: Path


def read_past(log_dirs: Sequence[Path], boot: str) -> Past:
    """Read what the process before has left, before the log opens: that removes the marks of a
    clean shutdown."""
    since: dict[Path, int | None] = {}
    lost: dict[TopicPartition, int] = {}
    own = -1
    for directory in log_dirs:
        found = _read(directory / FILE)
        since[directory] = None
        if found is None:
            continue
        same_boot = bool(boot) and found.boot == boot
        if same_boot:
            own = max(own, found.incarnation)
        if same_boot or (directory / checkpoint.CLEAN_SHUTDOWN).exists():
            since[directory] = found.intact_since
        for tp, number in found.lost.items():
            lost[tp] = max(number, lost.get(tp, 0))
    return Past(min(filter(None, since.values()), default=None), own, since, lost)


def find_lost(
    image: Image, node_id: int, past: Past, kept: Mapping[TopicPartition, Kept]
) -> dict[TopicPartition, int]:
    """The replicas of which less is true than `past.intact_since` says, each with the incarnation
    from which on something is; `OWN`: from the process on that begins.  `image`: the cluster.
    `kept`: what is in the log directories."""
    lost = {}
    for tp, partition in image.all_partitions():
        state = partition.state
        if state is None or node_id not in (*state.in_sync, *state.eligible):
            continue  # nobody believes that it has all records
        known = dict(partition.incarnations).get(node_id, NO_INCARNATION)
        topic_id = image.topics[tp.topic].record.topic_id
        here = kept.get(tp)
        since = past.since.get(here.log_dir) if here is not None else None
        if here is None or since is None or topic_id not in (None, here.topic_id):
            lost[tp] = OWN
        else:
            since = max(since, past.lost.get(tp, 0))
            if known < since:
                lost[tp] = since
    return lost


def write_identity(identities: Mapping[Path, Identity]) -> None:
    """Remember this process in each log directory.  One that cannot be written is logged: it counts
    as one that has lost something."""
    for directory, identity in identities.items():
        lines = [
            "version=1",
            f"boot.id={identity.boot}",
            f"incarnation={identity.incarnation}",
            f"intact.since={identity.intact_since}",
        ]
        if identity.lost:
            lost = (f"{tp}:{since}" for tp, since in identity.lost.items())
            lines.append(f"lost={','.join(lost)}")
        path = directory / FILE
        try:
            checkpoint.replace_file(path, ("\n".join(lines) + "\n").encode(), sync=False)
        except OSError as e:
            log.error("cannot write %s: %s; check the disk", path, e.strerror)
            with contextlib.suppress(OSError):
                path.unlink()  # what it says of the process before is not true of this one


def have_been_used(log_dirs: Sequence[Path]) -> bool:
    """Has a broker been a member of a cluster with these directories, or kept partitions there?"""
    for directory in log_dirs:
        if (directory / FILE).exists():
            return True
        try:
            with os.scandir(directory) as entries:
                if any(PARTITION_DIRECTORY.match(e.name) and e.is_dir() for e in entries):
                    return True
        except OSError:  # it is made, or refused, when the log opens
            continue
    return False


def boot_id() -> str:
    """Of this machine; empty where it cannot be told, and then every start is as after a crash."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _read(path: Path) -> Identity | None:
    try:
        found = checkpoint.read_properties(path)
    except (CorruptLogError, OSError) as e:
        log.warning("%s: this broker counts as one that may have lost records", e)
        return None
    if found is None or found.get("version") != "1":
        return None
    numbers = [_number(found.get(name)) for name in ("incarnation", "intact.since")]
    if -1 in numbers:
        return None
    lost = {}
    for text in filter(None, found.get("lost", "").split(",")):
        match = _LOST.fullmatch(text)
        if match is None:
            return None
        lost[TopicPartition(match[1], int(match[2]))] = int(match[3])
    return Identity(found.get("boot.id", ""), numbers[0], numbers[1], lost)


def _number(text: str | None) -> int:
    usable = text is not None and text.isascii() and text.isdigit() and len(text) < 20
    number = int(text or "") if usable else -1
    return number if number <= MOST_INT64 else -1
