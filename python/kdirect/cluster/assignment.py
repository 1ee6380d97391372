"""Which brokers get the replicas of new partitions, and whether an assignment that was given holds.

Kafka's rules (`AdminUtils.assignReplicasToBrokers`).  Without racks: the first replica of
successive partitions goes round the brokers from a start, and the others follow it at a distance
that grows by one with each round, so that the partitions led by one broker have their other
replicas spread over all brokers.  With racks: the brokers are put in an order in which racks
alternate, and a partition gets no two replicas in a rack (or on a broker) while there is a rack (or
a broker) without one.

`start` and `shift` are drawn by the caller: the rules themselves are repeatable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from kdirect.cluster.codes import Code, Outcome

Replicas: TypeAlias = tuple[int, ...]
Racks: TypeAlias = Mapping[int, str | None]  # of the brokers that may get replicas


def assign(
    racks: Racks, partitions: int, factor: int, *, start: int, shift: int, first: int = 0
) -> tuple[Replicas, ...] | Outcome:
    """Replicas of partitions `first`, `first` + 1 and so on, `partitions` of them, or why there
    are none.

    If a broker has no rack, racks do not count (Kafka's RackAwareMode.Safe).
    """
    refusal = refuse_factor(factor, len(racks)) or refuse_count(partitions)
    if refusal is not None:
        return refusal
    known = {broker: rack for broker, rack in racks.items() if rack is not None}
    aware = len(known) == len(racks)
    brokers = alternate_racks(known) if aware else tuple(sorted(racks))
    found = []
    for partition in range(first, first + partitions):
        grown = _shift(shift, first, partition, len(brokers))
        if aware:
            found.append(_by_rack(brokers, known, partition, factor, start, grown))
        else:
            found.append(_plain(brokers, partition, factor, start, grown))
    return tuple(found)


def assign_more(
    racks: Racks, existing: Sequence[Replicas], count: int
) -> tuple[Replicas, ...] | Outcome:
    """Replicas of the partitions that are added to a topic until it has `count`
    (`AdminZkClient.addPartitions`): as many for each as partition 0 has, and the round goes on from
    its first broker."""
    brokers = sorted(racks)
    start = next((i for i, broker in enumerate(brokers) if broker >= existing[0][0]), 0)
    added = count - len(existing)
    factor = len(existing[0])
    return assign(racks, added, factor, start=start, shift=start, first=len(existing))


def _shift(shift: int, first: int, partition: int, brokers: int) -> int:
    """Grows by one whenever a round over the brokers begins, counted from partition 0 on."""
    rounds = partition // brokers
    before = (first - 1) // brokers if first > 0 else 0
    return shift + rounds - before


def _place(first: int, shift: int, replica: int, brokers: int) -> int:
    """Kafka's replicaIndex: where the replica after the first one goes; never where that is."""
    return (first + 1 + (shift + replica) % (brokers - 1)) % brokers


def _plain(brokers: Sequence[int], partition: int, factor: int, start: int, shift: int) -> Replicas:
    first = (partition + start) % len(brokers)
    others = (brokers[_place(first, shift, j, len(brokers))] for j in range(factor - 1))
    return (brokers[first], *others)


def alternate_racks(racks: Mapping[int, str]) -> tuple[int, ...]:
    """The brokers in an order in which racks take turns: racks by name, brokers by number."""
    by_rack: dict[str, list[int]] = {}
    for broker in sorted(racks):
        by_rack.setdefault(racks[broker], []).append(broker)
    turns = [by_rack[rack] for rack in sorted(by_rack)]
    longest = max(map(len, turns))
    return tuple(row[i] for i in range(longest) for row in turns if i < len(row))


def _by_rack(
    brokers: Sequence[int],
    racks: Mapping[int, str],
    partition: int,
    factor: int,
    start: int,
    shift: int,
) -> Replicas:
    count = len(set(racks.values()))
    first = (partition + start) % len(brokers)
    chosen = [brokers[first]]
    used = {racks[brokers[first]]}
    place = 0
    while len(chosen) < factor:
        broker = brokers[_place(first, shift * count, place, len(brokers))]
        if broker not in chosen and (racks[broker] not in used or len(used) == count):
            chosen.append(broker)
            used.add(racks[broker])
        place += 1
    return tuple(chosen)


# -- checks ----------------------------------------------------------------------------------------


def refuse_factor(factor: int, brokers: int) -> Outcome | None:
    """Why there cannot be `factor` replicas on so many brokers."""
    if factor < 1:
        message = f"replication factor {factor}; give at least 1"
    elif factor > brokers:
        message = (
            f"replication factor {factor} is larger than the number of brokers that live, {brokers}"
        )
    else:
        return None
    return Outcome(Code.INVALID_REPLICATION_FACTOR, message)


def refuse_count(partitions: int) -> Outcome | None:
    """Why there cannot be so many new partitions."""
    if partitions >= 1:
        return None
    return Outcome(Code.INVALID_PARTITIONS, f"{partitions} partitions; give at least 1")


def refuse_replicas(replicas: Replicas, brokers: Racks) -> str:
    """What is wrong with the replicas of one partition; empty if nothing is."""
    if not replicas:
        return "it has no replicas"
    if len(set(replicas)) != len(replicas):
        return f"replicas {list(replicas)} name a broker twice"
    unknown = sorted(set(replicas) - set(brokers))
    if unknown:
        return f"brokers {unknown} do not live"
    return ""


def refuse_assignment(
    assignment: Mapping[int, Replicas], brokers: Racks, *, first: int = 0, factor: int | None = None
) -> Outcome | None:
    """Why partitions `first` and on cannot have the replicas that were given.  `factor`: that of
    the partitions that exist."""
    expected = list(range(first, first + len(assignment)))
    if sorted(assignment) != expected or not expected:
        wrong = f"its partitions are not numbered from {first} without gaps"
        return Outcome(Code.INVALID_REPLICA_ASSIGNMENT, f"bad assignment: {wrong}")
    factor = factor if factor is not None else len(assignment[first])
    for partition in expected:
        wrong = refuse_replicas(assignment[partition], brokers)
        if not wrong and len(assignment[partition]) != factor:
            wrong = f"{len(assignment[partition])} replicas, where other partitions have {factor}"
        if wrong:
            message = f"bad assignment of partition {partition}: {wrong}"
            return Outcome(Code.INVALID_REPLICA_ASSIGNMENT, message)
    return None


def refuse_more(
    given: Sequence[Replicas], existing: Sequence[Replicas], count: int, brokers: Racks
) -> Outcome | None:
    """Why the partitions that are added to a topic cannot have the replicas that were given."""
    added = count - len(existing)
    if len(given) != added:
        message = f"the assignment is of {len(given)} partitions, and {added} are added"
        return Outcome(Code.INVALID_REPLICA_ASSIGNMENT, message)
    rows = dict(enumerate(given, len(existing)))
    return refuse_assignment(rows, brokers, first=len(existing), factor=len(existing[0]))
