"""What of a partition's log is on disk: fsync, shared by all who wait for it.

Law of the room: a `Flushing` belongs to one partition.  It syncs the files that it is told of, and
feeds the partition's `AckGate`; it decides neither when to flush nor what may be
read.  After an fsync has failed, what is on disk is unknown: every later one is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from kdirect.errors import LogError
from kdirect.log import checkpoint
from kdirect.log.ack_gate import AckGate
from kdirect.log.segment import Segment

log = logging.getLogger("kdirect.log")


class Flushing:
    """See the module.  `name` of the partition is for messages.  `sync` is called with the
    partition's flush lock held.  `directory_changed`: files were created,
    renamed or removed since the directory was synced."""

    def __init__(self, name: str, directory: Path, gate: AckGate) -> None:
        self.gate = gate
        self.directory_changed = True
        self.failure: BaseException | None = None
        self.count = 0  # fsyncs that succeeded
        self._name = name
        self._directory = directory

    def be_in(self, directory: Path) -> None:
        """The log is in another directory now, with its files and their names on disk."""
        self._directory = directory
        self.directory_changed = False

    def sync(self, segments: Sequence[Segment], end_offset: int) -> None:
        """Put those of `segments` on disk that are not; then every record below `end_offset` is.
        LogError."""
        if self.failure is not None:
            raise LogError(
                f"an earlier fsync of {self._name} failed: {self.failure}",
                hint="check the disk and restart the broker;"
                " records that were acknowledged are safe",
            )
        try:
            for segment in segments:
                if segment.end_offset > self.gate.on_disk:
                    sealed = segment.sealed
                    segment.sync(with_indexes=sealed)
                    segment.synced = sealed
            if self.directory_changed:
                self.directory_changed = False
                checkpoint.sync_directory(self._directory)
        except OSError as e:
            self.failure = e
            log.error("fsync of %s failed: %s", self._name, e)
            raise LogError(
                f"fsync of {self._name} failed: {e}", hint="check the disk and restart the broker"
            ) from e
        self.count += 1
        self.gate.flushed(end_offset)


__all__ = ["Flushing"]
