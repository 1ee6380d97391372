"""The coordinator's own assignors (KIP-848): `uniform` and `range`.  Pure.

Both are told which topics each member reads and what it was to have before, and answer what each
member is to have.  Topics are named by their ids.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping

from kdirect.format.consumer_group_records import Partition
from kdirect.sticky_assignment import assign_evenly

# By member id: the topics that it reads, or its partitions.
Subscriptions = Mapping[str, frozenset[uuid.UUID]]
Assignments = Mapping[str, frozenset[Partition]]
# (subscriptions, instance ids of static members, partitions of each topic, previous assignments)
Assignor = Callable[
    [Subscriptions, Mapping[str, str], Mapping[uuid.UUID, int], Assignments],
    dict[str, frozenset[Partition]],
]


def uniform(
    subscriptions: Subscriptions,
    instance_ids: Mapping[str, str],
    counts: Mapping[uuid.UUID, int],
    previous: Assignments,
) -> dict[str, frozenset[Partition]]:
    """As even as it can be, and with as few partitions moved as possible."""
    found = assign_evenly(subscriptions, counts, previous)
    return {member_id: frozenset(partitions) for member_id, partitions in found.items()}


def range_(
    subscriptions: Subscriptions,
    instance_ids: Mapping[str, str],
    counts: Mapping[uuid.UUID, int],
    previous: Assignments,
) -> dict[str, frozenset[Partition]]:
    """Topic by topic neighbouring partitions, so that the same member has the same numbers of
    topics that are joined.  Static members come first, by their instance ids."""
    order = sorted(subscriptions, key=lambda m: (m not in instance_ids, instance_ids.get(m, m), m))
    out: dict[str, set[Partition]] = {m: set() for m in order}
    for topic, count in counts.items():
        readers = [m for m in order if topic in subscriptions[m]]
        if not readers:
            continue
        each, more = divmod(count, len(readers))
        start = 0
        for i, member_id in enumerate(readers):
            n = each + (i < more)
            out[member_id].update((topic, p) for p in range(start, start + n))
            start += n
    return {member_id: frozenset(partitions) for member_id, partitions in out.items()}


ASSIGNORS: dict[str, Assignor] = {"uniform": uniform, "range": range_}
