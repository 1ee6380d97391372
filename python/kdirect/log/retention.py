"""Which segments of a log retention no longer keeps: a pure decision over what the segments say of
themselves.

`expired` is for a log that is here as a whole.  Of a tiered log (`kdirect.log.tiering`) local
segments go by `expired_locally`, whose rules are those of Kafka's ``UnifiedLog.deletableSegments``:
local retention instead of the log's, and only what is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kdirect.log.config import LogConfig
from kdirect.log.segment import Segment


def expired(
    segments: Sequence[Segment],
    config: LogConfig,
    high_watermark: int,
    log_start_offset: int,
    now_ms: int,
) -> int:
    """How many of the oldest segments are too old (``retention.ms``), too many
    (``retention.bytes``) or wholly below the log start. Never one with records that are not
    readable yet.  (One of which compaction has left nothing goes with its neighbours.)"""
    count = 0
    if not config.deletes:
        return count_below(segments, log_start_offset)
    if config.retention_ms >= 0:
        for segment in segments:
            is_empty = segment.size == 0 and segment is segments[-1]
            if is_empty or segment.end_offset > high_watermark:
                break
            if _age_ms(segment, now_ms) <= config.retention_ms:
                break
            count += 1
    if config.retention_bytes >= 0:
        excess = sum(s.size for s in segments) - config.retention_bytes
        for i, segment in enumerate(segments):
            excess -= segment.size
            is_empty = segment.size == 0 and segment is segments[-1]
            if excess < 0 or is_empty or segment.end_offset > high_watermark:
                break
            count = max(count, i + 1)
    return max(count, count_below(segments, log_start_offset))


def count_below(segments: Sequence[Segment], log_start_offset: int) -> int:
    """How many of the oldest segments are wholly below the log start, the last one left out."""
    count = 0
    for segment in segments[:-1]:
        if segment.end_offset > log_start_offset:
            break
        count += 1
    return count


class LocalExpiry(NamedTuple):
    """How many of the oldest local segments go; whether the active one is past local retention,
    too, and is to be sealed, so that it can be copied."""

    expired: int
    seals_active: bool


def expired_locally(
    segments: Sequence[Segment],
    config: LogConfig,
    high_watermark: int,
    log_start_offset: int,
    remote_end_offset: int,
    now_ms: int,
) -> LocalExpiry:
    """The same of a tiered log: what local retention (``local.retention.ms``,
    ``local.retention.bytes``) no longer keeps and is copied, for it ends at or below
    `remote_end_offset`; and what is wholly below the log start, copied or not."""
    count = count_below(segments, log_start_offset)
    seals_active = False
    limit_ms, limit_bytes = config.effective_local_retention_ms, config.effective_local_bytes
    rules: list[Callable[[Segment], bool]] = []
    if limit_ms >= 0:
        rules.append(lambda segment: _age_ms(segment, now_ms) > limit_ms)
    if limit_bytes >= 0:
        excess = sum(s.size for s in segments) - limit_bytes

        def is_too_much(segment: Segment) -> bool:
            nonlocal excess
            excess -= segment.size
            return excess >= 0

        rules.append(is_too_much)
    for is_expired in rules:
        for i, segment in enumerate(segments):
            end = segment.end_offset
            if segment.size == 0 or end > high_watermark or not is_expired(segment):
                break
            if segment is segments[-1]:
                seals_active = True
                break
            if end > max(remote_end_offset, log_start_offset):
                break
            count = max(count, i + 1)
    return LocalExpiry(count, seals_active)


def _age_ms(segment: Segment, now_ms: int) -> int:
    newest = segment.max_timestamp
    return now_ms - (newest if newest >= 0 else segment.modified_ms)
