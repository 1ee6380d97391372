"""Which segments of a log retention no longer keeps: a pure decision over what the segments say of
themselves."""

from __future__ import annotations

from collections.abc import Sequence

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
    readable yet."""
    count = 0
    if config.retention_ms >= 0:
        for segment in segments:
            newest = segment.max_timestamp
            if segment.size == 0 or segment.end_offset > high_watermark:
                break
            if now_ms - (newest if newest >= 0 else segment.modified_ms) <= config.retention_ms:
                break
            count += 1
    if config.retention_bytes >= 0:
        excess = sum(s.size for s in segments) - config.retention_bytes
        for i, segment in enumerate(segments):
            excess -= segment.size
            if excess < 0 or segment.size == 0 or segment.end_offset > high_watermark:
                break
            count = max(count, i + 1)
    for i, segment in enumerate(segments[:-1]):
        if segment.end_offset > log_start_offset:
            break
        count = max(count, i + 1)
    return count
