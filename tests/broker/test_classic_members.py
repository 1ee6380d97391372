"""Classic members beside new ones: the online upgrade of a group and its way back (KIP-848)."""

from __future__ import annotations

import confluent_kafka
import pytest

import kdirect
from kdirect.broker import consumer_group_state as state
from kdirect.broker.classic_members import ClassicMembers
from kdirect.broker.consumer_group_state import ConsumerMember
from kdirect.broker.group_state import PREPARING, STABLE
from kdirect.broker.groups import Persist, Reply, SaveRows
from kdirect.format.consumer_group_records import ClassicProtocols
from kdirect.format.consumer_protocol import (
    Subscription,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)
from kdirect.format.error_codes import ErrorCode as E
from kdirect.model import TopicPartition
from tests.broker.test_consumer_group_clients import SETTINGS, make_topics, owned, poll_until
from tests.broker.test_consumer_groups import World


class Mixed(World):
    """A group with members of both protocols."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.old = ClassicMembers(self.machine)

    def take(self, effects):
        assert all(isinstance(e, Persist | Reply | SaveRows) for e in effects)
        return super().take([e for e in effects if not isinstance(e, Persist)])

    def classic_join(self, member="", *, owned=(), name="cooperative-sticky", instance=None):
        metadata = encode_subscription(Subscription(frozenset({"t"}), owned=frozenset(owned)))
        fresh = ConsumerMember(
            member,
            instance,
            client_id="c",
            rebalance_timeout_ms=500,
            classic=ClassicProtocols(10_000, ((name, metadata),)),
        )
        (answer,) = self.take(
            self.old.join(1, self.group, fresh, "consumer", self.now, require_member_id=True)
        )
        return answer

    def classic_sync(self, member, generation):
        (answer,) = self.take(
            self.old.sync(1, self.group, generation, member, None, "consumer", None, self.now)
        )
        return answer

    def stable_classic_group(self):
        """One member, `old`, of a classic group, that has all partitions of t."""
        metadata = encode_subscription(Subscription(frozenset({"t"})))
        arguments = ("g", "", None, "c", "/h", 10_000, 500, "consumer", [("range", metadata)])
        effects = self.classic.join(1, *arguments, self.now, require_member_id=False)
        (joined,) = self.take(effects)
        given = encode_assignment(TopicPartition("t", i) for i in range(4))
        assigned = [(joined.member_id, given)]
        self.take(
            self.classic.sync(
                1, "g", joined.generation, joined.member_id, None, None, None, assigned, self.now
            )
        )
        return joined.member_id, joined.generation


def test_a_new_member_upgrades_the_group_and_its_leaving_takes_it_back():
    w = Mixed()
    old, generation = w.stable_classic_group()
    new = w.join("new")
    assert new.error == 0 and new.assignment == frozenset()  # old still has all of them
    assert "g" not in w.classic.groups
    assert w.group.members[old].classic is not None
    assert w.old.heartbeat(w.group, generation, old, None, w.now) == E.REBALANCE_IN_PROGRESS
    again = w.classic_join(old, name="range")  # an eager member has given all of it back
    assert (again.error, again.leader, again.generation) == (0, "", new.epoch)
    given = decode_assignment(w.classic_sync(old, again.generation).assignment)
    assert len(given) == 2
    assert len(w.beat("new", new.epoch).assignment) == 2
    assert w.group.state() == state.STABLE
    assert w.old.heartbeat(w.group, again.generation, old, None, w.now) == E.NONE
    check = w.machine.check_commit
    assert check(w.group, old, again.generation, 8) == E.NONE
    assert check(w.group, old, again.generation - 1, 8) == E.ILLEGAL_GENERATION

    w.beat("new", -1)
    back = w.classic.groups["g"]
    assert "g" not in w.machine.groups and back.state == PREPARING
    assert set(back.members) == {old} and back.protocol == "range"
    assert {tp.partition for tp in decode_assignment(back.members[old].assignment)} >= {
        tp.partition for tp in given
    }
    assert not any(v for k, v in w.saved.items() if k[:2] != b"\0\2")


def test_a_cooperative_member_gives_back_before_another_is_given():
    w = Mixed()
    w.join("new")
    named = w.classic_join()
    assert named.error == E.MEMBER_ID_REQUIRED
    first = w.classic_join(named.member_id)
    assert decode_assignment(w.classic_sync(named.member_id, first.generation).assignment) == []
    kept = w.beat("new", 1).assignment
    assert w.old.heartbeat(w.group, first.generation, named.member_id, None, w.now) == E.NONE
    w.beat("new", 1, owned=kept)
    beat = w.old.heartbeat(w.group, first.generation, named.member_id, None, w.now)
    assert beat == E.REBALANCE_IN_PROGRESS  # what it is to have is free
    second = w.classic_join(named.member_id)
    given = decode_assignment(w.classic_sync(named.member_id, second.generation).assignment)
    assert len(given) == 2
    # A second one: it has to give back, and what it still names is not given away.
    w.join("third")
    told = w.classic_join(named.member_id, owned=given)
    left = decode_assignment(w.classic_sync(named.member_id, told.generation).assignment)
    held = {tp for tp, m in w.group.holders.items() if m == named.member_id}
    assert len(held) == 2 and set(left) <= set(given)


def test_a_classic_member_that_does_not_join_or_sync_is_fenced():
    w = Mixed()
    old, generation = w.stable_classic_group()
    w.join("new")
    w.old.heartbeat(w.group, generation, old, None, w.now)
    w.now += 500
    w.expire()
    assert "new" in w.group.members and old not in w.group.members
    w.classic_join("x")
    w.now += 500
    w.expire()
    assert set(w.group.members) == {"new"}  # it did not sync


@pytest.mark.parametrize("kind", ["upgrades", "downgrades"])
def test_the_policy_keeps_a_group_as_it_is(kind):
    w = Mixed(**{kind: False})
    w.stable_classic_group()
    answer = w.join("new")
    if kind == "upgrades":
        assert answer.error == E.GROUP_ID_NOT_FOUND
        assert w.classic.groups["g"].state == STABLE
    else:
        w.beat("new", -1)
        assert len(w.group.members) == 1 and "g" not in w.classic.groups


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_stock_clients_roll_over_to_the_new_protocol_and_back(strategy):
    """librdkafka's: a classic member, a new one beside it, and the way back."""
    settings = {**SETTINGS, "group_min_session_timeout_ms": 1000}
    with kdirect.Broker(**settings) as broker:
        make_topics(broker, t=4)
        common = {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": "g",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
        old = confluent_kafka.Consumer(
            {
                **common,
                "partition.assignment.strategy": strategy,
                "heartbeat.interval.ms": 100,
                "session.timeout.ms": 6000,
            }
        )
        new = confluent_kafka.Consumer({**common, "group.protocol": "consumer"})
        groups = broker.server.groups
        try:
            old.subscribe(["t"])
            poll_until([old], lambda _: len(owned(old)) == 4)
            new.subscribe(["t"])
            poll_until([old, new], lambda _: len(owned(old)) == len(owned(new)) == 2)
            assert not owned(old) & owned(new)
            assert set(groups.consumer.groups) == {"g"} and not groups.coordinator.groups
            old.commit(offsets=[confluent_kafka.TopicPartition("t", 0, 0)], asynchronous=False)
            new.close()
            poll_until([old], lambda _: len(owned(old)) == 4)
            assert set(groups.coordinator.groups) == {"g"} and not groups.consumer.groups
        finally:
            old.close()


def test_subscriptions_of_all_versions_and_what_is_cut_short():
    owned = frozenset({TopicPartition("t", 1)})
    for version in range(4):
        s = Subscription(frozenset({"t", "u"}), b"x", owned, 7, "rack", version)
        data = encode_subscription(s)
        read = decode_subscription(data)
        assert (read.topics, read.user_data, read.version) == (s.topics, b"x", version)
        assert read.owned == (owned if version >= 1 else frozenset())
        assert read.generation == (7 if version >= 2 else -1)
        assert read.rack == ("rack" if version >= 3 else None)
    with pytest.raises(kdirect.FormatError):
        decode_subscription(data[:-1])
