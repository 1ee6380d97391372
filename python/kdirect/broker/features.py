"""Feature levels, as ApiVersions and `kafka-features describe` tell of them.

Owns: which of Kafka's features this broker has, and at which level.  A level is never set by hand:
it follows from the requests that the broker serves, so that a client is told of a feature in the
moment in which all of it is there.  Levels are final: there is nothing to upgrade (KIP-584).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from kdirect.format import protocol as p

# The levels of one process never change, so one epoch covers them all.
EPOCH = 0


class Feature(NamedTuple):
    """A feature, its lowest and highest supported level, and whether the broker has it, which
    depends on the highest version served of each API."""

    name: str
    low: int
    high: int
    is_there: Callable[[Mapping[str, int]], bool]


def _serves(**highest: int) -> Callable[[Mapping[str, int]], bool]:
    return lambda served: all(served.get(name, -1) >= high for name, high in highest.items())


FEATURES = (
    # KIP-966: replicas that stay eligible below min.insync.replicas.
    Feature("eligible.leader.replicas.version", 0, 1, _serves(DescribeTopicPartitions=0)),
    # KIP-848: groups whose members the broker assigns.
    Feature("group.version", 0, 1, _serves(ConsumerGroupHeartbeat=0)),
    # What a cluster of Kafka 4.1 keeps of topics and brokers (4.1-IV1); there is no older form.
    Feature("metadata.version", 27, 27, _serves(Metadata=13)),
    # KIP-890: an epoch for each transaction, and partitions that the leader adds.
    Feature("transaction.version", 0, 2, _serves(AddPartitionsToTxn=4, EndTxn=5, Produce=12)),
)


def levels(apis: list[p.Api]) -> list[Feature]:
    """The features of a broker that serves `apis`, in the order of their names."""
    served = {a.name: a.high for a in apis}
    return [f for f in FEATURES if f.is_there(served)]
