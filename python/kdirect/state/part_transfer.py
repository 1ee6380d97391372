"""Parts of snapshots on their way between hosts that share no directory.

This file reads and writes files.  Owns: how an executor finds out whether it sees the directory of
the job, and the bytes of a part as frames of a control connection.  What may not enter: what a part
holds (`kdirect.state.snapshots`), and when one is sent.

The coordinator writes a random mark beside the snapshots and tells it to all executors.  One that
finds the mark reads and writes parts itself.  For any other one they travel over its control
connection, and the coordinator writes and reads them: a snapshot is whole in its directory alone.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from kdirect.errors import StateProtocolError
from kdirect.state.directory import cannot_write, replaced, write_atomically

MARK = "mark"
FRAME_BYTES = 1 << 20


def leave_mark(root: Path) -> str:
    """Mark the directory of the snapshots, and return what was written."""
    mark = secrets.token_hex(16)
    write_atomically(root / MARK, mark.encode())
    return mark


def sees(root: Path, mark: str) -> bool:
    """Is this the directory that was marked, and not one of another host with the same name?"""
    try:
        return (root / MARK).read_text() == mark
    except (OSError, UnicodeDecodeError):
        return False


def frames(file: BinaryIO, size: int) -> Iterator[bytes]:
    """`size` bytes of a file, which is closed at the end.  What the file has lost since it was
    measured comes as zeros, which the CRC of the part refutes."""
    with file:
        while size > 0:
            data = file.read(min(FRAME_BYTES, size)) or bytes(min(FRAME_BYTES, size))
            size -= len(data)
            yield data


class Arriving:
    """A file that comes in frames: `take` each of them until it says that this was the last."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.left = size
        self._stack = contextlib.ExitStack()
        self._file = self._stack.enter_context(replaced(path))
        if not size:
            self._stack.close()

    def take(self, data: bytes) -> bool:
        """Write a frame; whether the file is whole and on disk now."""
        if not 0 < len(data) <= self.left:
            raise StateProtocolError(
                f"{self.path.name}: a frame of {len(data)} bytes, where {self.left} are left"
            )
        try:
            self._file.write(data)
        except OSError as e:
            self.close()
            raise cannot_write(self.path, e) from e
        self.left -= len(data)
        if not self.left:
            self._stack.close()
        return not self.left

    def close(self) -> None:
        """Forget what has come, unless it is whole."""
        with contextlib.suppress(_GivenUpError), self._stack.pop_all():
            raise _GivenUpError  # `replaced` removes what was not finished


class _GivenUpError(Exception):
    pass
