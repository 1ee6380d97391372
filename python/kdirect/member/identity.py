"""What a broker's log directories remember of its membership, in ``member.properties``.

The file says which process used the directories last (its incarnation), from which incarnation on
they have lost nothing that was confirmed (`intact_since`), and under which boot of the machine.  A
killed process loses nothing of what it wrote, and neither does a clean shutdown; a machine that
went down may have lost what was not synced.  So the number is carried on where the boot is the same
or the shutdown was clean, and in every log directory; else it begins again with this process.

The file is not synced: one that is lost with the power says what is true then, which is nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kdirect.cluster.fields import MOST_INT64
from kdirect.errors import CorruptLogError
from kdirect.log import checkpoint

log = logging.getLogger("kdirect.member")

FILE = "member.properties"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Identity(NamedTuple):
    """`boot`: the machine's boot.  `incarnation`: of the process that used the directory last."""

    boot: str
    incarnation: int
    intact_since: int


class Past(NamedTuple):
    """What the directories say to the process that begins.  `intact_since`: None if they may lack
    what was confirmed.  `own_incarnation`: of the process before, if it ran under this boot, and so
    has ended when the directories' lock is held; -1: not known."""

    intact_since: int | None = None
    own_incarnation: int = -1


def read_past(log_dirs: Sequence[Path], boot: str) -> Past:
    """Read what the process before has left, before the log opens: that removes the marks of a
    clean shutdown."""
    found = [_read(directory / FILE) for directory in log_dirs]
    first = found[0]
    if first is None or any(x != first for x in found):
        return Past()
    clean = all((directory / checkpoint.CLEAN_SHUTDOWN).exists() for directory in log_dirs)
    same_boot = bool(boot) and first.boot == boot
    return Past(
        first.intact_since if same_boot or clean else None,
        first.incarnation if same_boot else -1,
    )


def write_identity(log_dirs: Sequence[Path], identity: Identity) -> None:
    """Remember this process.  A directory that cannot be written is logged: it counts as one that
    has lost something."""
    lines = (
        "version=1",
        f"boot.id={identity.boot}",
        f"incarnation={identity.incarnation}",
        f"intact.since={identity.intact_since}",
    )
    for directory in log_dirs:
        try:
            data = ("\n".join(lines) + "\n").encode()
            checkpoint.replace_file(directory / FILE, data, sync=False)
        except OSError as e:
            log.error("cannot write %s: %s; check the disk", directory / FILE, e.strerror)


def boot_id() -> str:
    """Of this machine; empty where it cannot be told, and then every start is as after a crash."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _read(path: Path) -> Identity | None:
    try:
        found = checkpoint.read_properties(path)
    except CorruptLogError as e:
        log.warning("%s: this broker counts as one that may have lost records", e)
        return None
    if found is None or found.get("version") != "1":
        return None
    numbers = [_number(found.get(name)) for name in ("incarnation", "intact.since")]
    if -1 in numbers:
        return None
    return Identity(found.get("boot.id", ""), *numbers)


def _number(text: str | None) -> int:
    usable = text is not None and text.isascii() and text.isdigit() and len(text) < 20
    number = int(text or "") if usable else -1
    return number if number <= MOST_INT64 else -1
