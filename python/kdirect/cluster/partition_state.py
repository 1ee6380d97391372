"""What the metadata store says of one partition: the leader, its epoch, and who is in sync."""

from __future__ import annotations

from typing import NamedTuple

NO_LEADER = -1


class PartitionState(NamedTuple):
    """One version of a partition's state.

    `version` is that of the node in the store, and grows by one with each change (Kafka's partition
    epoch).  `in_sync` are the brokers that have every committed record; `eligible` those that left
    it while too few were in sync, and are still known to have every committed record (KIP-966's
    eligible leader replicas).
    """

    leader: int
    leader_epoch: int
    in_sync: tuple[int, ...]
    version: int
    eligible: tuple[int, ...] = ()
