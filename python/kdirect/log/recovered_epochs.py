"""Leader epochs of a log that is loaded: those of their file, and of batches where it lacks any."""

from __future__ import annotations

import logging
from pathlib import Path

from kdirect.errors import FormatError
from kdirect.format.batch import iterate_batches
from kdirect.log import checkpoint
from kdirect.log.mapped import MappedBytes
from kdirect.log.segment import Segment

log = logging.getLogger("kdirect.log")


def load_epochs(
    directory: Path,
    files: list[str],
    segments: list[Segment],
    start_offset: int,
    *,
    sync_name: bool,
) -> list[tuple[int, int]]:
    """Leader epochs that still have, or may get, records; at least one.  `files` are the names in
    the directory; where they are not those of the file, it is written, with `sync_name` so that its
    name is on disk as well."""
    end_offset = segments[-1].end_offset
    known = checkpoint.LEADER_EPOCHS in files
    stored = checkpoint.read_leader_epochs(directory) if known else []
    epochs = [e for e in stored if e[1] <= end_offset]
    if stored and not epochs:
        epochs = [(stored[0][0], start_offset)]
    if not epochs:
        epochs = _epochs_of_batches(segments) or [(0, start_offset)]
    elif epochs[0][1] > segments[0].base_offset:
        epochs = [*_epochs_below(segments, *epochs[0]), *epochs[1:]]
    if epochs != stored:
        # In a new directory ``partition.metadata`` is written next, and syncs all names.
        checkpoint.write_leader_epochs(directory, epochs, sync_name=sync_name)
    return epochs


def _epochs_below(segments: list[Segment], epoch: int, start: int) -> list[tuple[int, int]]:
    """The leader epochs up to `epoch`, the first one that the file has, which begins at `start`
    there.  Kafka forgets those of records below the log start, also where these are kept."""
    batches = _epochs_of_batches([s for s in segments if s.base_offset < start])
    below = [e for e in batches if e[0] <= epoch and e[1] < start]
    return below if below and below[-1][0] == epoch else [*below, (epoch, start)]


def _epochs_of_batches(segments: list[Segment]) -> list[tuple[int, int]]:
    """The leader epochs that the batches carry, where the file of them is missing or damaged: a
    reader takes a batch of an epoch that is not known for a damaged one.  Reads every header."""
    epochs: list[tuple[int, int]] = []
    for segment in segments:
        if segment.size == 0:
            continue
        segment.acquire()
        try:
            data = memoryview(MappedBytes(None, segment.address, segment.size))
            for batch in iterate_batches(data, check_crc=False):
                if batch.leader_epoch > (epochs[-1][0] if epochs else -1):
                    epochs.append((batch.leader_epoch, batch.base_offset))
        except FormatError as e:  # what can be read stays readable
            log.error("leader epochs in %s after a damaged batch are not known: %s", segment, e)
        finally:
            segment.release()
            segment.unmap_if_idle()
    return epochs
