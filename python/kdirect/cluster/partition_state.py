"""What the metadata store says of one partition: the leader, its epoch, and who is in sync."""

from __future__ import annotations

from typing import NamedTuple

NO_LEADER = -1
NO_INCARNATION = -1


class PartitionState(NamedTuple):
    """One version of a partition's state.

    `version` is that of the node in the store, and grows by one with each change (Kafka's partition
    epoch).  `in_sync` are the brokers that have every committed record.  `eligible` are those that
    left it while too few were in sync: the high watermark stands still as long as there are any,
    so they have every committed record, too (KIP-966's eligible leader replicas).

    `incarnation` is that of the leader when it was elected.  A broker that has restarted since then
    may have lost records that it appended in this epoch; if it led on, it would give their offsets
    to other records of the same epoch.  So it does not lead until the controller has elected again,
    which makes a new epoch.  `NO_INCARNATION`: whoever wrote the state did not know (one node).
    """

    leader: int
    leader_epoch: int
    in_sync: tuple[int, ...]
    version: int
    eligible: tuple[int, ...] = ()
    incarnation: int = NO_INCARNATION


def leads(state: PartitionState, broker: int, incarnation: int) -> bool:
    """Does the state name this incarnation of the broker as the leader?"""
    return state.leader == broker and state.incarnation in (NO_INCARNATION, incarnation)
