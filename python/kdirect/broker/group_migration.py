"""Groups that change their protocol while they have members (KIP-848).  Pure.

A classic group becomes one of the new protocol when the first member of that joins: what its
members were assigned is what they have and are to have.  It goes back when the last member of the
new protocol is gone: what the others were to have is then their assignment.
"""

from __future__ import annotations

from collections.abc import Mapping

from kdirect.broker.consumer_group_state import ConsumerGroup, ConsumerMember
from kdirect.broker.group_state import STABLE, Group, Member
from kdirect.format.consumer_group_records import ClassicProtocols, Partition, TopicFacts
from kdirect.format.consumer_protocol import (
    PROTOCOL_TYPE,
    decode_assignment,
    decode_subscription,
    encode_assignment,
)
from kdirect.model import TopicPartition


def can_be_new(group: Group) -> bool:
    """Do its members speak of topics and partitions?"""
    return group.protocol_type == PROTOCOL_TYPE


def to_new(group: Group, topics: Mapping[str, TopicFacts], now_ms: float) -> ConsumerGroup:
    """The group with the new protocol.  `topics`: those that exist.  FormatError: a member does not
    keep to the format of subscriptions and assignments."""
    new = ConsumerGroup(group.group_id, group.generation, group.generation, since_ms=now_ms)
    for m in group.members.values():
        name = group.protocol if group.protocol is not None else m.protocols[0][0]
        subscription = decode_subscription(m.metadata(name))
        assigned = frozenset(
            (topics[tp.topic].topic_id, tp.partition)
            for tp in decode_assignment(m.assignment)
            if tp.topic in topics
        )
        member = ConsumerMember(
            m.member_id,
            m.instance_id,
            subscription.rack,
            m.client_id,
            m.client_host,
            subscription.topics,
            rebalance_timeout_ms=m.rebalance_timeout_ms,
            classic=ClassicProtocols(m.session_timeout_ms, tuple(m.protocols)),
            epoch=group.generation,
            previous_epoch=group.generation,
            assigned=assigned - new.holders.keys(),
            session_deadline=now_ms + m.session_timeout_ms,
        )
        new.put(member)
        new.targets[m.member_id] = member.assigned
    return new


def subscribed(group: Group) -> frozenset[str]:
    """The topics that the members of a classic group read, and have.  FormatError."""
    names: set[str] = set()
    for m in group.members.values():
        name = group.protocol if group.protocol is not None else m.protocols[0][0]
        names |= decode_subscription(m.metadata(name)).topics
        names.update(tp.topic for tp in decode_assignment(m.assignment))
    return frozenset(names)


def to_classic(group: ConsumerGroup, now_ms: float) -> Group:
    """The group with the classic protocol; all its members speak it."""
    old = Group(
        group.group_id,
        state=STABLE,
        generation=group.epoch,
        protocol_type=PROTOCOL_TYPE,
        since_ms=now_ms,
    )
    names = group.names()
    for m in group.members.values():
        assert m.classic is not None
        old.members[m.member_id] = Member(
            m.member_id,
            m.instance_id,
            m.client_id,
            m.client_host,
            m.classic.session_timeout_ms,
            m.rebalance_timeout_ms,
            list(m.classic.protocols),
            assignment_of(m, group.target(m), names),
            deadline=now_ms + m.classic.session_timeout_ms,
        )
        if m.instance_id is not None:
            old.static[m.instance_id] = m.member_id
    old.leader = next(iter(old.members), None)
    old.protocol = old.vote()
    return old


def assignment_of(
    member: ConsumerMember, partitions: frozenset[Partition], names: Mapping[object, str]
) -> bytes:
    """Partitions as a classic member is told of them, in the version of its subscription."""
    assert member.classic is not None
    version = decode_subscription(member.classic.protocols[0][1]).version
    return encode_assignment(
        (TopicPartition(names[topic], i) for topic, i in partitions if topic in names), version
    )
