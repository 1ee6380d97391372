"""A partition of groups: what a broker does when it is elected, reads, resigns; and what waits in
the groups of a partition that is given up."""

from __future__ import annotations

import random

import pytest

from kdirect.broker.coordinator_partition import (
    REFUSALS,
    TABLE,
    Committed,
    CoordinatorPartition,
    Effect,
    Elected,
    Loaded,
    Resigned,
    State,
    Unreadable,
    step,
)
from kdirect.broker.group_state import STABLE
from kdirect.broker.groups import GroupCoordinator, GroupSettings, Persist, Reply
from kdirect.format.error_codes import ErrorCode as E


def walk(*events, start=CoordinatorPartition()):
    """The states that the events lead to, and all effects."""
    effects = []
    for event in events:
        start, more = step(start, event)
        effects += more
    return start, effects


def test_an_elected_broker_waits_reads_and_coordinates():
    p, effects = walk(Elected(5))
    assert (p, effects) == (CoordinatorPartition(State.WAITING, 1, 5), [Effect.WAIT])
    p, effects = walk(Committed(1), start=p)
    assert (p.state, effects) == (State.LOADING, [Effect.LOAD])
    p, effects = walk(Loaded(1), start=p)
    assert (p.state, effects) == (State.ACTIVE, [Effect.INSTALL])
    p, effects = walk(Resigned(), start=p)
    assert (p.state, effects) == (State.ABSENT, [Effect.UNLOAD])


def test_what_was_read_in_an_earlier_tenure_is_not_installed():
    """Elected again, in a newer epoch, while the older load still runs: in one step or after a
    resignation."""
    for between in ((), (Resigned(),)):
        p, effects = walk(Elected(5), Committed(1), *between, Elected(7), Loaded(1))
        assert p == CoordinatorPartition(State.WAITING, 2, 7)
        assert effects == [Effect.WAIT, Effect.LOAD, Effect.WAIT]
        p, effects = walk(Committed(1), Unreadable(1), Committed(2), Loaded(1), start=p)
        assert (p.state, effects) == (State.LOADING, [Effect.LOAD])
        assert walk(Loaded(2), start=p) == (
            CoordinatorPartition(State.ACTIVE, 2, 7),
            [Effect.INSTALL],
        )


def test_the_same_election_told_twice_changes_nothing():
    p, _ = walk(Elected(5), Committed(1), Loaded(1))
    assert walk(Elected(5), Elected(4), start=p) == (p, [])
    assert walk(Elected(6), start=p)[1] == [Effect.UNLOAD, Effect.WAIT]


def test_a_partition_that_cannot_be_read_is_refused_until_the_next_election():
    p, _ = walk(Elected(5), Committed(1), Unreadable(1))
    assert REFUSALS[p.state] == E.COORDINATOR_NOT_AVAILABLE
    assert walk(Elected(6), start=p)[0].state is State.WAITING
    assert walk(Resigned(), start=p) == (CoordinatorPartition(State.ABSENT, 1, 5), [])


def test_only_an_active_partition_serves():
    assert [s for s in State if REFUSALS[s] == E.NONE] == [State.ACTIVE]
    # A state that holds groups in memory is left by `UNLOAD`, and entered by `INSTALL`, only.
    for (state, _), (after, effects) in TABLE.items():
        assert (Effect.INSTALL in effects) == (after is State.ACTIVE)
        assert (Effect.UNLOAD in effects) == (state is State.ACTIVE)


@pytest.mark.parametrize("round_", range(20))
def test_a_random_walk_installs_each_tenure_once_and_only_while_it_lasts(seed, round_):
    rng = random.Random(seed * 100 + round_)
    p, epoch = CoordinatorPartition(), 0
    asked: list[object] = []  # outcomes that are under way, of any tenure
    installed: list[int] = []
    for _ in range(500):
        what = rng.random()
        event: object
        if what < 0.15:
            epoch += rng.choice([0, 0, 1, 2])
            event = Elected(epoch)
        elif what < 0.25:
            event = Resigned()
        elif asked:
            event = asked.pop(rng.randrange(len(asked)))
        else:
            continue
        before = p
        p, effects = step(p, event)  # type: ignore[arg-type]
        for effect in effects:
            if effect is Effect.WAIT:
                asked.append(Committed(p.tenure))
            elif effect is Effect.LOAD:
                asked.append(rng.choice([Loaded, Loaded, Loaded, Unreadable])(p.tenure))
            elif effect is Effect.INSTALL:
                assert p.tenure not in installed and p.state is State.ACTIVE
                installed.append(p.tenure)
            else:
                assert before.state is State.ACTIVE
        assert p.epoch >= before.epoch and p.tenure >= before.tenure
        if p.state is State.ACTIVE:
            assert installed[-1] == p.tenure
    assert installed


# -- the groups in it ------------------------------------------------------------------------------


def joined(coordinator: GroupCoordinator, group: str, token: str, member: str = ""):
    return coordinator.join(
        token, group, member, None, "c", "/h", 10_000, 60_000, "consumer", [("range", b"")], 0.0,
        require_member_id=False,
    )  # fmt: skip


def test_members_that_wait_when_their_group_is_given_up_look_for_its_coordinator():
    c = GroupCoordinator(GroupSettings())
    (reply,) = joined(c, "g", "first")
    assert isinstance(reply, Reply)
    leader = reply.result.member_id  # type: ignore[union-attr]
    # In the middle of a join: the second has come, the first is still to come back.
    assert joined(c, "g", "second") == []
    joined(c, "other", "third")
    (given_up,) = c.give_up(["g", "unknown"])
    assert isinstance(given_up, Reply)
    assert (given_up.token, given_up.result.error) == ("second", E.NOT_COORDINATOR)
    assert set(c.groups) == {"other"} and c.give_up(["g"]) == []
    assert c.heartbeat("g", 1, leader, None, 0.0) == E.UNKNOWN_MEMBER_ID

    joined(c, "h", "a")
    leader = next(iter(c.groups["h"].members))
    joined(c, "h", "b")
    effects = joined(c, "h", "again", leader)
    assert [e.token for e in effects if isinstance(e, Reply)] == [*("again", "b")]
    follower = next(m for m in c.groups["h"].members if m != leader)
    # In the middle of a sync: the leader has not sent the assignment.
    assert c.sync("waits", "h", 2, follower, None, None, None, (), 0.0) == []
    (given_up,) = c.give_up(["h"])
    assert isinstance(given_up, Reply)
    assert (given_up.token, given_up.result.error) == ("waits", E.NOT_COORDINATOR)


def test_a_stable_group_that_is_given_up_leaves_nothing_to_answer():
    c = GroupCoordinator(GroupSettings())
    joined(c, "g", "first")
    member = next(iter(c.groups["g"].members))
    effects = c.sync("sync", "g", 1, member, None, None, None, [(member, b"x")], 0.0)
    assert [type(e) for e in effects] == [Persist, Reply] and c.groups["g"].state == STABLE
    assert c.give_up(list(c.groups)) == [] and c.groups == {}
