"""Which member of a classic consumer group reads which partition: Kafka's assignors.  Pure
decisions, no I/O.  The bytes in which they are sent are `kdirect.format.consumer_protocol`'s.

The group's leader computes the assignment of all members.  A group may therefore mix clients, as
long as they share an assignor by name.  `range` and `roundrobin` give each member exactly the
partitions that Kafka's Java client and librdkafka give it.  Both are eager: a member gives back all
its partitions before it joins again.  `cooperative-sticky` (KIP-429) is not: members say what they
own and read it on, and what is to move is given to nobody until its owner has given it back, which
makes a second rebalance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from kdirect.errors import ConfigError
from kdirect.format.consumer_protocol import Subscription
from kdirect.model import TopicPartition
from kdirect.sticky_assignment import assign_evenly

COOPERATIVE_STICKY = "cooperative-sticky"

# (member id, group instance id or None, topics) of every member
Members = Sequence[tuple[str, str | None, frozenset[str]]]
Assignment = dict[str, list[TopicPartition]]


def _sorted(members: Members) -> list[tuple[str, str | None, frozenset[str]]]:
    # Static members by their instance id, so that a restart with a new member id changes nothing.
    return sorted(members, key=lambda m: (m[1] is None, m[1] or m[0], m[0]))


def range_assignor(members: Members, partitions: Mapping[str, int]) -> Assignment:
    """Topic by topic, give each member that reads it neighbouring partitions.  If they do not
    divide evenly, the first members get one more.  `partitions`: topic -> number of partitions."""
    out: Assignment = {member_id: [] for member_id, _, _ in members}
    for topic in sorted(partitions):
        readers = [m[0] for m in _sorted(members) if topic in m[2]]
        if not readers:
            continue
        each, more = divmod(partitions[topic], len(readers))
        start = 0
        for i, member_id in enumerate(readers):
            n = each + (i < more)
            out[member_id] += [TopicPartition(topic, p) for p in range(start, start + n)]
            start += n
    return out


def roundrobin_assignor(members: Members, partitions: Mapping[str, int]) -> Assignment:
    """Give all partitions of all topics in turn, each to the next member that reads its topic.
    `partitions`: topic -> number of partitions."""
    order = _sorted(members)
    out: Assignment = {member_id: [] for member_id, _, _ in members}
    if not order:
        return out
    at = 0
    for topic in sorted(partitions):
        if not any(topic in m[2] for m in order):
            continue
        for p in range(partitions[topic]):
            while topic not in order[at % len(order)][2]:
                at += 1
            out[order[at % len(order)][0]].append(TopicPartition(topic, p))
            at += 1
    return out


def cooperative_sticky_assignor(
    subscriptions: Mapping[str, Subscription], partitions: Mapping[str, int]
) -> Assignment:
    """Spread partitions evenly, most of them where they are, and leave out for now what another
    member owns.  Of two members that claim a partition the one of the later generation has it; of
    the same generation, neither.  `partitions`: topic -> number of partitions."""
    claims: dict[TopicPartition, list[tuple[int, str]]] = {}
    for member_id, s in subscriptions.items():
        for tp in s.owned:
            claims.setdefault(tp, []).append((s.generation, member_id))
    previous: dict[str, set[tuple[str, int]]] = {member_id: set() for member_id in subscriptions}
    for tp, claimed in claims.items():
        latest = max(generation for generation, _ in claimed)
        owners = [member_id for generation, member_id in claimed if generation == latest]
        if len(owners) == 1:
            previous[owners[0]].add((tp.topic, tp.partition))
    topics = {member_id: s.topics for member_id, s in subscriptions.items()}
    wanted = assign_evenly(topics, partitions, previous)
    out: Assignment = {}
    for member_id, pairs in wanted.items():
        owned = subscriptions[member_id].owned
        tps = (TopicPartition(*pair) for pair in sorted(pairs))
        out[member_id] = [tp for tp in tps if tp in owned or tp not in claims]
    return out


ASSIGNORS: dict[str, Callable[[Members, Mapping[str, int]], Assignment]] = {
    "range": range_assignor,
    "roundrobin": roundrobin_assignor,
}


def check_strategies(names: Iterable[str]) -> list[str]:
    """The names of assignors as a list.  ConfigError if one is unknown, there is none, or they
    differ in whether members give everything back before a rebalance."""
    out = list(names)
    known = [*ASSIGNORS, COOPERATIVE_STICKY]
    hint = f"use one or more of {', '.join(ASSIGNORS)}, or {COOPERATIVE_STICKY}"
    for name in out:
        if name not in known:
            raise ConfigError(
                f"option partition.assignment.strategy: {name!r} is not known", hint=hint
            )
    if not out:
        raise ConfigError("option partition.assignment.strategy is empty", hint=hint)
    if COOPERATIVE_STICKY in out and len(set(out)) > 1:
        raise ConfigError(
            f"option partition.assignment.strategy: {COOPERATIVE_STICKY} cannot be together with"
            " the others, whose members give everything back before a rebalance",
            hint=hint,
        )
    return out
