"""The group coordinator's decisions, on a clock of the test's own, and a random walk through
them."""

from __future__ import annotations

import random

import pytest

from kdirect.broker.group_state import (
    COMPLETING,
    EMPTY,
    FOREVER,
    PREPARING,
    STABLE,
    JoinResult,
    SyncResult,
)
from kdirect.broker.groups import GroupCoordinator, GroupSettings, Persist, Reply
from kdirect.format.error_codes import ErrorCode as E


class World:
    """A coordinator, a clock, and what was answered."""

    def __init__(self, **settings):
        self.coordinator = GroupCoordinator(GroupSettings(**settings))
        self.now = 1000.0
        self.tokens = 0
        self.answers: dict[int, JoinResult | SyncResult] = {}
        self.persisted = 0
        self.client = "client"

    def take(self, effects):
        for effect in effects:
            if isinstance(effect, Persist):
                self.persisted += 1
            else:
                assert isinstance(effect, Reply)
                assert effect.token not in self.answers, "a token was answered twice"
                self.answers[effect.token] = effect.result

    def join(
        self,
        member="",
        *,
        group="g",
        instance=None,
        protocols=(("range", b"m"),),
        session=10000,
        rebalance=60000,
        kind="consumer",
        **more,
    ):
        self.tokens += 1
        effects = self.coordinator.join(
            self.tokens,
            group,
            member,
            instance,
            self.client,
            "/host",
            session,
            rebalance,
            kind,
            list(protocols),
            self.now,
            **more,
        )
        self.take(effects)
        return self.tokens

    def joined(self, **keywords):
        """A dynamic member by both steps: token of the second."""
        first = self.answers[self.join(**keywords)]
        assert first.error == E.MEMBER_ID_REQUIRED
        return self.join(first.member_id, **keywords), first.member_id

    def sync(self, generation, member, assignments=(), *, instance=None, group="g"):
        self.tokens += 1
        self.take(
            self.coordinator.sync(
                self.tokens, group, generation, member, instance, None, None, assignments, self.now
            )
        )
        return self.tokens

    def heartbeat(self, generation, member, instance=None):
        return self.coordinator.heartbeat("g", generation, member, instance, self.now)

    def leave(self, member, instance=None):
        error, effects = self.coordinator.leave("g", member, instance, self.now)
        self.take(effects)
        return error

    def pass_time(self, ms):
        self.now += ms
        self.take(self.coordinator.expire(self.now))

    @property
    def group(self):
        return self.coordinator.groups["g"]


def two_members():
    """A stable group of two: (world, leader, follower)."""
    w = World()
    _, leader = w.joined()
    w.sync(1, leader, [(leader, b"all")])
    second, follower = w.joined()
    assert second not in w.answers and w.heartbeat(1, leader) == E.REBALANCE_IN_PROGRESS
    again = w.join(leader)
    assert w.answers[again].generation == w.answers[second].generation == 2
    assert (
        w.answers[again].leader == leader
        and len(w.answers[again].members) == 2
        and w.answers[second].members == ()
    )
    waiting = w.sync(2, follower)
    assert waiting not in w.answers and w.group.state == COMPLETING
    w.sync(2, leader, [(leader, b"one"), (follower, b"two")])
    assert w.answers[waiting].assignment == b"two" and w.group.state == STABLE
    return w, leader, follower


def test_one_member_joins_syncs_and_leaves():
    w = World()
    token, member = w.joined()
    answer = w.answers[token]
    assert (answer.error, answer.generation, answer.protocol, answer.leader) == (
        0,
        1,
        "range",
        member,
    )
    assert answer.members == ((member, None, b"m"),)
    assert w.answers[w.sync(1, member, [(member, b"x")])].assignment == b"x"
    assert w.persisted == 1
    assert (
        w.heartbeat(1, member) == 0
        and w.heartbeat(2, member) == E.ILLEGAL_GENERATION
        and w.heartbeat(1, "who") == E.UNKNOWN_MEMBER_ID
    )
    assert w.leave(member) == 0
    assert w.group.state == EMPTY and w.group.generation == 2
    assert w.heartbeat(2, member) == E.UNKNOWN_MEMBER_ID


def test_two_members_and_one_leaves():
    w, leader, follower = two_members()
    assert w.leave(leader) == 0
    assert w.group.state == PREPARING and w.heartbeat(2, follower) == E.REBALANCE_IN_PROGRESS
    assert w.answers[w.sync(2, follower)].error == E.REBALANCE_IN_PROGRESS
    answer = w.answers[w.join(follower)]
    assert answer.generation == 3 and answer.leader == follower


def test_a_silent_member_is_removed_after_its_session():
    w, leader, _ = two_members()
    for _ in range(3):
        w.pass_time(5000)
        assert w.coordinator.heartbeat("g", 2, leader, None, w.now) in (0, E.REBALANCE_IN_PROGRESS)
    assert set(w.group.members) == {leader} and w.group.state == PREPARING


def test_a_rebalance_goes_on_without_those_who_do_not_come():
    w, leader, follower = two_members()
    token, newcomer = w.joined(rebalance=20000)
    for _ in range(13):
        w.pass_time(5000)
        for member in (leader, follower):
            w.coordinator.heartbeat("g", 2, member, None, w.now)
    answer = w.answers[token]
    assert (
        answer.generation == 3
        and answer.leader == newcomer
        and [m[0] for m in answer.members] == [newcomer]
    )


def test_a_leader_that_never_assigns_is_removed():
    w = World()
    _, leader = w.joined(rebalance=5000)
    token, follower = w.joined(rebalance=5000)
    w.join(leader, rebalance=5000)
    assert w.answers[token].error == 0 and w.group.state == COMPLETING
    waiting = w.sync(2, follower)
    w.pass_time(5000)
    assert w.answers[waiting].error == E.REBALANCE_IN_PROGRESS and leader not in w.group.members


def test_a_follower_that_rejoins_unchanged_gets_the_present_generation():
    w, leader, follower = two_members()
    answer = w.answers[w.join(follower)]
    assert answer.generation == 2 and answer.members == () and w.group.state == STABLE
    changed = w.join(follower, protocols=[("range", b"other")])
    assert changed not in w.answers and w.group.state == PREPARING
    assert w.answers[w.join(leader)].generation == w.answers[changed].generation == 3


def test_the_protocol_is_one_that_all_have_and_most_prefer():
    w = World()
    _, a = w.joined(protocols=[("x", b""), ("y", b"")])
    _, b = w.joined(protocols=[("y", b""), ("x", b"")])
    token, _ = w.joined(protocols=[("z", b""), ("y", b"")])
    w.join(a, protocols=[("x", b""), ("y", b"")])
    w.join(b, protocols=[("y", b""), ("x", b"")])
    assert w.answers[token].protocol == "y"
    assert w.answers[w.join(protocols=[("x", b"")])].error == E.INCONSISTENT_GROUP_PROTOCOL
    assert w.answers[w.join(kind="connect")].error == E.INCONSISTENT_GROUP_PROTOCOL
    assert w.answers[w.join(protocols=[])].error == E.INCONSISTENT_GROUP_PROTOCOL


def test_bounds_of_what_a_member_may_ask():
    w = World(max_size=1)
    assert w.answers[w.join(group="")].error == E.INVALID_GROUP_ID
    assert w.answers[w.join(session=10)].error == E.INVALID_SESSION_TIMEOUT
    assert w.answers[w.join("unknown")].error == E.UNKNOWN_MEMBER_ID
    w.joined()
    assert w.answers[w.join()].error == E.GROUP_MAX_SIZE_REACHED
    assert w.answers[w.sync(1, "unknown")].error == E.UNKNOWN_MEMBER_ID
    assert w.leave("unknown") == E.UNKNOWN_MEMBER_ID
    assert w.coordinator.leave("other", "m", None, w.now)[0] == E.UNKNOWN_MEMBER_ID


def test_names_that_no_record_can_hold_are_refused():
    """A member's id is its client or instance id with 37 characters behind it; bytes count, not
    characters."""
    w = World()
    for long in ("g" * 32768, "ü" * 16384):
        assert w.answers[w.join(group=long)].error == E.INVALID_GROUP_ID
        assert w.answers[w.join(protocols=[("range", b""), (long, b"")])].error == E.INVALID_REQUEST
        assert w.answers[w.join(kind=long)].error == E.INVALID_REQUEST
        assert w.coordinator.check_commit(long, -1, "", None, w.now) == E.INVALID_GROUP_ID
    assert w.answers[w.join(instance="i" * 32731)].error == E.INVALID_REQUEST
    w.client = "c" * 32731
    assert w.answers[w.join()].error == E.INVALID_REQUEST
    assert not w.coordinator.groups and not w.persisted
    w.client = "c" * 32730
    assert len(w.answers[w.join()].member_id) == 32767
    assert len(w.answers[w.join(group="g" * 32767, instance="i" * 32730)].member_id) == 32767


def test_an_id_that_is_not_used_is_forgotten():
    w = World()
    token = w.join()
    assert w.answers[token].error == E.MEMBER_ID_REQUIRED and w.coordinator.deadline("g") < FOREVER
    w.pass_time(10000)
    assert "g" not in w.coordinator.groups


def test_an_empty_groups_first_rebalance_waits_for_company():
    w = World(initial_rebalance_delay_ms=3000)
    first, a = w.joined()
    assert first not in w.answers
    w.pass_time(2000)
    second, _ = w.joined()
    w.pass_time(1000)  # somebody came: it waits once more
    assert first not in w.answers
    w.pass_time(3000)
    assert w.answers[first].generation == w.answers[second].generation == 1
    assert len(w.answers[first].members) == 2 and w.answers[first].leader == a


def static_pair():
    w = World()
    a = w.answers[w.join(instance="i1")]
    assert a.error == 0
    token = w.join(instance="i2")
    w.join(a.member_id, instance="i1")
    b = w.answers[token]
    w.sync(2, a.member_id, [(a.member_id, b"A"), (b.member_id, b"B")], instance="i1")
    w.sync(2, b.member_id, instance="i2")
    return w, a.member_id, b.member_id


def test_a_restarted_static_member_takes_its_place_without_a_rebalance():
    w, a, b = static_pair()
    back = w.answers[w.join(instance="i2")]
    assert (
        back.error == 0
        and back.generation == 2
        and back.member_id != b
        and back.leader == a
        and w.group.state == STABLE
    )
    assert w.answers[w.sync(2, back.member_id, instance="i2")].assignment == b"B"
    assert w.heartbeat(2, b, "i2") == E.FENCED_INSTANCE_ID
    assert w.answers[w.join(b, instance="i2")].error == E.FENCED_INSTANCE_ID


def test_a_restarted_static_leader_does_not_assign_again():
    w, a, _ = static_pair()
    old_client = w.answers[w.join(instance="i1")]
    assert old_client.leader == a and old_client.member_id != a and old_client.members == ()
    new_client = w.answers[w.join(instance="i1", understands_skip=True)]
    assert (
        new_client.leader == new_client.member_id
        and len(new_client.members) == 2
        and new_client.skip_assignment
    )
    assert w.group.state == STABLE


def test_a_static_member_with_another_subscription_causes_a_rebalance():
    w, a, _ = static_pair()
    token = w.join(instance="i2", protocols=[("range", b"other")])
    assert token not in w.answers and w.group.state == PREPARING
    assert w.answers[w.join(a, instance="i1")].generation == w.answers[token].generation == 3


def test_a_static_member_survives_a_missed_rebalance_until_its_session_ends():
    w, a, b = static_pair()
    token, _ = w.joined(rebalance=5000, session=60000)
    for _ in range(12):
        w.pass_time(5000)
        for member, instance in ((a, "i1"), (b, "i2")):
            w.coordinator.heartbeat("g", 2, member, instance, w.now)
    assert w.answers[token].generation == 3 and {a, b} <= set(w.group.members)
    w.pass_time(10000)
    assert not {a, b} & set(w.group.members)


def test_commits_are_checked_like_heartbeats():
    w, leader, _ = two_members()
    check = w.coordinator.check_commit
    assert check("g", 2, leader, None, w.now) == 0
    assert check("g", 1, leader, None, w.now) == E.ILLEGAL_GENERATION
    assert check("g", -1, "", None, w.now) == E.UNKNOWN_MEMBER_ID
    assert check("", -1, "", None, w.now) == E.INVALID_GROUP_ID
    assert (
        check("alone", -1, "", None, w.now) == 0
        and check("alone", 3, "m", None, w.now) == E.UNKNOWN_MEMBER_ID
    )
    assert check("new", 3, "m", None, w.now) == E.ILLEGAL_GENERATION


@pytest.mark.parametrize("round_", range(20))
def test_a_random_walk_answers_every_token_once_and_ends_empty(seed, round_):
    rng = random.Random(seed * 100 + round_)
    w = World(initial_rebalance_delay_ms=rng.choice([0, 3000]))
    known: list[tuple[str, str | None]] = []
    asked: set[int] = set()

    def member():
        return rng.choice(known) if known and rng.random() < 0.9 else ("nobody", None)

    for _ in range(300):
        what = rng.random()
        if what < 0.15:
            instance = rng.choice([None, None, "s1", "s2"])
            token = w.join(
                instance=instance,
                protocols=[("range", rng.choice([b"1", b"2"]))],
                understands_skip=rng.random() < 0.5,
            )
            asked.add(token)
        elif what < 0.45:
            who, instance = member()
            asked.add(
                w.join(
                    who, instance=instance, protocols=[("range", rng.choice([b"1", b"1", b"2"]))]
                )
            )
        elif what < 0.65:
            who, instance = member()
            generation = w.coordinator.groups["g"].generation if "g" in w.coordinator.groups else 0
            everyone = [(m, m.encode()) for m, _ in known]
            asked.add(w.sync(generation - (rng.random() < 0.1), who, everyone, instance=instance))
        elif what < 0.8:
            group = w.coordinator.groups.get("g")
            for m in list(group.members.values()) if group else []:
                if rng.random() < 0.8:
                    w.coordinator.heartbeat(
                        "g", group.generation, m.member_id, m.instance_id, w.now
                    )
        elif what < 0.85:
            w.leave(*member())
        else:
            w.pass_time(rng.choice([10, 1000, 6000]))
        group = w.coordinator.groups.get("g")
        known = [(m.member_id, m.instance_id) for m in group.members.values()] if group else []
        known += [(i, None) for i in group.pending] if group else []
        if group and group.state in (STABLE, COMPLETING):
            assert group.leader in group.members and group.protocol == "range"
            assert all(m.join_token is None for m in group.members.values())
        if group and group.state == STABLE:
            assert all(m.sync_token is None for m in group.members.values())
        waiting = {
            t
            for m in (group.members.values() if group else [])
            for t in (m.join_token, m.sync_token)
            if t is not None
        }
        assert asked - set(w.answers) == waiting
    for _ in range(60):
        w.pass_time(60000)
        group = w.coordinator.groups.get("g")
        if group is None or group.state == EMPTY:
            break
    group = w.coordinator.groups.get("g")
    assert group is None or (group.state == EMPTY and not group.members)
    assert asked == set(w.answers)


def test_a_rebalance_whose_last_member_leaves_does_not_wait_for_an_id_that_was_given_out():
    w = World()
    _, member = w.joined()
    other_token, other = w.joined()
    assert other_token not in w.answers and w.coordinator.groups["g"].state == PREPARING
    assert w.answers[w.join()].error == E.MEMBER_ID_REQUIRED
    for leaving in (member, other):
        error, effects = w.coordinator.leave("g", leaving, None, w.now)
        assert error == 0
        w.take(effects)
    assert w.coordinator.groups["g"].state == EMPTY
    assert w.answers[other_token].error == E.UNKNOWN_MEMBER_ID
