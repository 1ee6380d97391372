"""Whether a remote segment is a part of a log's history, told by leader epochs.  Pure.

An unclean election may take records away that were copied already; the log goes on with other ones
at the same offsets, in a later epoch.  A segment counts only if each of its epochs is one of the
log, and has there the offsets that the segment has of it (KIP-405, Kafka's
``isRemoteSegmentWithinLeaderEpochs``).
"""

from __future__ import annotations

from kdirect.format.remote_metadata import RemoteSegment
from kdirect.storage.copy_rules import LocalLog

Epochs = tuple[tuple[int, int], ...]


def epochs_between(epochs: Epochs, start: int, end: int) -> Epochs:
    """(epoch, first offset) of each epoch that has an offset in [`start`, `end`); the first one
    begins at `start`."""
    ends = [first for _, first in epochs[1:]] + [end]
    found = [
        (epoch, max(first, start))
        for (epoch, first), last in zip(epochs, ends, strict=True)
        if max(first, start) < min(last, end)
    ]
    if not found or found[0][1] > start:  # the log knows of no epoch there: it is the first one
        found.insert(0, (epochs[0][0] if epochs else 0, start))
    return tuple(found)


def belongs(segment: RemoteSegment, local: LocalLog) -> bool:
    """Are the records of the segment, from the log start on, those of the log?"""
    if segment.end_offset > local.end_offset:
        return False
    if segment.end_offset <= local.log_start_offset:
        return True  # no record of it is read any more
    starts = dict(local.epochs)
    order = [epoch for epoch, _ in local.epochs]
    for i, (epoch, first) in enumerate(segment.leader_epochs):
        following = segment.leader_epochs[i + 1 : i + 2]
        last = following[0][1] if following else segment.end_offset
        if last <= local.log_start_offset:
            continue  # the log may have forgotten this epoch
        if epoch not in starts:
            return False
        start, at = starts[epoch], order.index(epoch)
        end = local.epochs[at + 1][1] if at + 1 < len(order) else local.end_offset
        if last > end or max(first, local.log_start_offset) < start:
            return False
        if i > 0 and first != start:
            return False
    return True


__all__ = ["belongs", "epochs_between"]
