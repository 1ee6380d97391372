"""The leader epochs of a partition and the offsets at which they start.

Law: both rise; the file ``leader-epoch-checkpoint`` says the same as the list.  Changes are made
with the partition's roll lock held; looking takes no lock, for the list is replaced and never
changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kdirect.log import checkpoint


def epoch_at(epochs: list[tuple[int, int]], offset: int) -> int:
    """The epoch of the batch at `offset`; 0 where nothing is known."""
    return next((epoch for epoch, start in reversed(epochs) if start <= offset), 0)


class LeaderEpochs:
    """(epoch, start offset) of each leadership that still has, or may get, records; at least
    one."""

    def __init__(self, directory: Path, epochs: list[tuple[int, int]]) -> None:
        self._directory = directory
        self._epochs = epochs

    def be_in(self, directory: Path) -> None:
        """The log is in another directory now, with the file as it is."""
        self._directory = directory

    def end_offset(self, epoch: int, log_end_offset: int) -> tuple[int, int]:
        """(the largest epoch not above `epoch`, the offset at which the next one starts).  All that
        is known is above `epoch`: (`epoch`, where that begins), for the records of `epoch` are
        deleted.  (-1, -1) for an epoch that is none, or above all that is known."""
        epochs = self._epochs
        if epoch < 0 or epoch > epochs[-1][0]:
            return -1, -1
        known = [i for i, (e, _) in enumerate(epochs) if e <= epoch]
        if not known:
            return epoch, epochs[0][1]
        i = known[-1]
        return epochs[i][0], epochs[i + 1][1] if i + 1 < len(epochs) else log_end_offset

    def at(self, offset: int) -> int:
        """The epoch of the batch at `offset`."""
        return epoch_at(self._epochs, offset)

    def add(self, epoch: int, start_offset: int) -> None:
        """A leadership that begins at `start_offset`, which is the log's end or is about to be."""
        # What was noted above that offset never got a record: a copy of another log was to be
        # appended, and there was no room for it.
        epochs = [*(e for e in self._epochs if e[1] <= start_offset), (epoch, start_offset)]
        checkpoint.write_leader_epochs(self._directory, epochs)
        self._epochs = epochs

    def write_truncated(self, offset: int) -> list[tuple[int, int]]:
        """The log is about to end before `offset`: forget, on disk, the leaderships that began
        there or later.  What is left, for `replace`."""
        kept = [e for e in self._epochs if e[1] < offset] or [(0, offset)]
        if kept != self._epochs:
            checkpoint.write_leader_epochs(self._directory, kept)
        return kept

    def write_emptied(
        self, offset: int, below: Sequence[tuple[int, int]] = ()
    ) -> list[tuple[int, int]]:
        """The log is about to begin again at `offset`, without a record here: forget, on disk, all
        leaderships but those that are known of what is `below` it.  What is left, for `replace`."""
        kept = [e for e in below if e[1] < offset] or [(0, offset)]
        checkpoint.write_leader_epochs(self._directory, kept)
        return kept

    def all(self) -> list[tuple[int, int]]:
        """(epoch, first offset) of each."""
        return list(self._epochs)

    def between(self, start: int, end: int) -> list[tuple[int, int]]:
        """(epoch, first offset) of each that has an offset in [`start`, `end`)."""
        epochs = self._epochs
        ends = [first for _, first in epochs[1:]] + [end]
        return [
            (epoch, max(first, start))
            for (epoch, first), last in zip(epochs, ends, strict=True)
            if max(first, start) < min(last, end)
        ]

    def replace(self, epochs: list[tuple[int, int]]) -> int:
        """Take what `write_truncated` has written; the last epoch."""
        self._epochs = epochs
        return epochs[-1][0]

    def trim(self, first_offset: int) -> None:
        """Forget those that have no record left: none below `first_offset` is kept."""
        gone = [e for e in self._epochs if e[1] <= first_offset]
        if len(gone) > 1 or (gone and gone[-1][1] < first_offset):
            self._epochs = [(gone[-1][0], first_offset), *self._epochs[len(gone) :]]
            checkpoint.write_leader_epochs(self._directory, self._epochs)
