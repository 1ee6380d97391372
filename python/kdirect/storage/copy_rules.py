"""What the configuration of a tiered topic means for one log: which segment is copied next, and
where the log may begin.  Pure functions over facts of one moment.

Sizes are bytes, times are milliseconds since the epoch, -1 means without limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kdirect.format.remote_metadata import RemoteSegment
from kdirect.storage.remote_segments import RemoteSegments

# Between two tries, if they fail.
FIRST_PAUSE_MS = 1_000
LONGEST_PAUSE_MS = 60_000


class LocalSegment(NamedTuple):
    """A sealed segment that is here.  `newest_ms`: its largest timestamp; where no record has one,
    when its file was last written.  `has_aborted`: transactions end in it that were aborted."""

    base_offset: int
    end_offset: int
    size: int
    newest_ms: int
    has_aborted: bool = False


class LocalLog(NamedTuple):
    """What a partition says of itself at one moment.

    Whole log: from `log_start_offset` to `end_offset`.  Here: from `local_start_offset` on, in
    `sealed` segments, oldest first, and in the active one, which has `active_bytes`.  Records below
    `stable_offset` are committed and of no open transaction.  `epochs`: (leader epoch, offset at
    which it starts), ascending.  `told_end`: up to where it was told that it is copied; None: that
    is not known."""

    log_start_offset: int
    local_start_offset: int
    stable_offset: int
    end_offset: int
    sealed: tuple[LocalSegment, ...]
    active_bytes: int
    epochs: tuple[tuple[int, int], ...]
    told_end: int | None = None

    @property
    def size(self) -> int:
        return sum(segment.size for segment in self.sealed) + self.active_bytes


class TierConfig(NamedTuple):
    """The settings of a tiered topic.  `copies`: are further segments copied
    (``remote.log.copy.disable``)?  `deletes_all`: is the topic tiered no longer, and all that was
    copied to be deleted (``remote.log.delete.on.disable``)?  The lags are those of KIP-1241, where
    0 copies at once; where a topic says -1 they are the limits of local retention."""

    copies: bool = True
    deletes_all: bool = False
    retention_ms: int = -1
    retention_bytes: int = -1
    copy_lag_ms: int = 0
    copy_lag_bytes: int = 0


class Span(NamedTuple):
    """Offsets of the log up to `end_offset`, in a remote segment or a sealed local one."""

    end_offset: int
    size: int
    newest_ms: int


def next_to_copy(
    local: LocalLog, config: TierConfig, tiered_end: int, now_ms: int
) -> LocalSegment | None:
    """The oldest sealed segment that is not copied up to its end, if it may be copied now: only
    what is below the last stable offset, and only once the copy lag is over (KIP-1241)."""
    if not config.copies or config.deletes_all:
        return None
    behind = local.size
    for segment in local.sealed:
        behind -= segment.size
        if segment.end_offset <= max(tiered_end, local.log_start_offset):
            continue
        if segment.end_offset > local.stable_offset:
            return None
        return segment if _lag_is_over(segment, config, behind, now_ms) else None
    return None


def _lag_is_over(segment: LocalSegment, config: TierConfig, behind: int, now_ms: int) -> bool:
    """`behind`: how many bytes of the local log come after the segment."""
    lag_ms, lag_bytes = config.copy_lag_ms, config.copy_lag_bytes
    if lag_ms == 0 or lag_bytes == 0:
        return True
    age_ms = now_ms - segment.newest_ms
    old = lag_ms > 0 and (age_ms >= lag_ms or age_ms < 0)  # a time to come says nothing
    return old or (lag_bytes > 0 and behind >= lag_bytes)


def kept_from(local: LocalLog, remote: RemoteSegments, config: TierConfig, now_ms: int) -> int:
    """Where the log begins by ``retention.ms`` and ``retention.bytes``, which count both tiers: the
    end of the last span that need not be kept, or the present log start.  The active segment is
    always kept, and so is what is not committed."""
    start = local.log_start_offset
    if config.retention_ms >= 0:
        for span in _spans(local, remote, start):
            if now_ms - span.newest_ms <= config.retention_ms:
                break
            start = span.end_offset
    if config.retention_bytes >= 0:
        excess = whole_size(local, remote, start) - config.retention_bytes
        for span in _spans(local, remote, start) if excess > 0 else ():
            excess -= span.size
            if excess < 0:
                break
            start = span.end_offset
    return start


def first_anywhere(local: LocalLog, remote: RemoteSegments, aside: Sequence[RemoteSegment]) -> int:
    """The first offset that is in any tier, from the log start on.  The leader before may have
    moved the log start and deleted segments below it, and this broker, a follower then, not have
    heard of it.  Where one of the segments that were put `aside` has the log start, nothing was
    deleted, and nothing is said."""
    start, local_start = local.log_start_offset, local.local_start_offset
    if start >= local_start or any(s.base_offset <= start < s.end_offset for s in aside):
        return start
    found = remote.at_or_after(start)
    return local_start if found is None else min(max(found.base_offset, start), local_start)


def whole_size(local: LocalLog, remote: RemoteSegments, start: int) -> int:
    """Bytes of the log from `start` on, each counted once wherever it lies: also where copies are
    there that local retention may not rely on, because they are about to go."""
    total = remote.bytes_from(start) + local.active_bytes
    for segment in local.sealed:
        begin, end = max(start, segment.base_offset), segment.end_offset
        if begin < end:
            missing = end - begin - remote.held(begin, end)
            total += segment.size * missing // (end - segment.base_offset)
    return total


def _spans(local: LocalLog, remote: RemoteSegments, start: int) -> Iterator[Span]:
    """The log from `start` on in spans that retention keeps or drops, as far as it is sealed and
    committed.  A gap among remote segments (a damaged object was left out when the metadata was
    made again) is a span of no bytes that is older than all: nothing stays for it."""
    offset = start
    while True:
        segment = remote.at(offset)
        if segment is not None:
            share = segment.size * (segment.end_offset - offset)
            size = share // (segment.end_offset - segment.base_offset)
            newest = segment.max_timestamp_ms
            if newest < 0:
                newest = segment.event_timestamp_ms  # when it was copied
            span = Span(segment.end_offset, size, newest)
        else:
            found = next((s for s in local.sealed if s.base_offset <= offset < s.end_offset), None)
            gap = None if found is not None else remote.gap(offset)
            if gap is not None and gap[1] <= local.local_start_offset:
                span = Span(gap[1], 0, 0)
            elif found is None or found.size == 0:
                return
            else:
                span = Span(found.end_offset, found.size, found.newest_ms)
        if span.end_offset > local.stable_offset:
            return
        yield span
        offset = span.end_offset


def pause_ms(failures: int) -> int:
    """How long to wait after so many failures in a row."""
    return min(FIRST_PAUSE_MS << min(failures - 1, 16), LONGEST_PAUSE_MS)


__all__ = [
    "LocalLog",
    "LocalSegment",
    "TierConfig",
    "first_anywhere",
    "kept_from",
    "next_to_copy",
    "pause_ms",
    "whole_size",
]
