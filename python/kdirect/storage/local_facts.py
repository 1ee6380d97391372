"""What tiers have to know of a partition and its files, and ask of them.

May wait for the disk; any thread.
"""

from __future__ import annotations

from kdirect.log.partition import Partition
from kdirect.storage.copy_rules import LocalLog, LocalSegment, TierConfig


def put_on_disk(partition: Partition, end_offset: int, now_ms: int) -> None:
    """A power failure must not let the log end before its copies do: other records would get their
    offsets.  LogError."""
    if partition.recovery_point < end_offset:
        partition.flush_due(now_ms)  # which takes sealed segments alone
    if partition.recovery_point < end_offset:
        partition.flush()


def local_log(partition: Partition) -> LocalLog:
    """What a partition says of itself.  May wait for the disk."""
    sealed = partition.sealed_segments()
    segments = tuple(
        LocalSegment(
            s.base_offset,
            s.end_offset,
            s.size,
            s.max_timestamp if s.max_timestamp >= 0 else s.segment.modified_ms,
            bool(s.aborted),
        )
        for s in sealed
    )
    return LocalLog(
        log_start_offset=partition.log_start_offset,
        local_start_offset=partition.local_log_start_offset,
        stable_offset=partition.last_stable_offset,
        end_offset=partition.log_end_offset,
        sealed=segments,
        active_bytes=max(0, partition.size - sum(s.size for s in segments)),
        epochs=tuple(partition.leader_epochs()),
        told_end=partition.remote_end_offset,
    )


def tier_config(partition: Partition) -> TierConfig:
    """The settings of its topic."""
    config = partition.config
    return TierConfig(
        copies=config.remote_storage and not config.remote_copy_disable,
        deletes_all=not config.remote_storage and config.remote_delete_on_disable,
        retention_ms=config.retention_ms,
        retention_bytes=config.retention_bytes,
        copy_lag_ms=config.effective_copy_lag_ms,
        copy_lag_bytes=config.effective_copy_lag_bytes,
    )


__all__ = ["local_log", "put_on_disk", "tier_config"]
