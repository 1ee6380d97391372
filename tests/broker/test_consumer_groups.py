"""The rules of KIP-848's groups, on a clock of the test's own, and seeded schedules of them."""

from __future__ import annotations

import dataclasses
import os

import pytest

from kdirect.broker import consumer_group_state as state
from kdirect.broker.consumer_groups import (
    ConsumerGroupCoordinator,
    ConsumerGroupSettings,
    Heartbeat,
)
from kdirect.broker.groups import GroupCoordinator, GroupSettings, Reply, SaveRows
from kdirect.broker.topic_patterns import matching, problem
from kdirect.format import consumer_group_records as records
from kdirect.format.error_codes import ErrorCode as E
from kdirect.sticky_assignment import assign_evenly
from tests.broker.group_schedules import FakeTopics, run

SCHEDULES = int(os.environ.get("KDIRECT_SCHEDULES", "40"))


class World:
    """A coordinator, its topics (t: 4 partitions), and what it wrote."""

    def __init__(self, **settings):
        self.topics = FakeTopics()
        self.topics.create("t", 4)
        self.classic = GroupCoordinator(GroupSettings())
        settings = ConsumerGroupSettings(refresh_ms=0, **settings)
        self.machine = ConsumerGroupCoordinator(settings, self.topics, self.classic)
        self.now = 1000.0
        self.saved = {}

    def take(self, effects):
        answers = []
        for effect in effects:
            if isinstance(effect, SaveRows):
                self.saved.update(effect.rows)
            else:
                assert isinstance(effect, Reply)
                answers.append(effect.result)
        return answers

    def beat(self, member, epoch, **fields):
        (answer,) = self.take(
            self.machine.heartbeat(1, Heartbeat("g", member, epoch, **fields), self.now)
        )
        return answer

    def join(self, member, *, topics=("t",), **fields):
        given = {"rebalance_timeout_ms": 500, "owned": frozenset(), **fields}
        return self.beat(member, 0, topics=frozenset(topics), **given)

    def expire(self):
        self.take(self.machine.expire(self.now))

    @property
    def group(self):
        return self.machine.groups["g"]


def test_schedules_hold():
    """No partition has two readers, and each group comes to rest, evenly."""
    seen = run(0)
    for seed in range(1, SCHEDULES):
        seen += run(seed)
    assert seen["failover"] and seen["static"] and seen["silence"]


def test_a_second_member_is_given_what_the_first_has_given_back():
    w = World()
    a = w.join("a")
    assert (a.error, a.epoch, len(a.assignment)) == (0, 1, 4)
    b = w.join("b")
    assert (b.epoch, b.assignment) == (2, frozenset())  # all of it is still held by a
    told = w.beat("a", 1)
    assert told.epoch == 1 and len(told.assignment) == 2
    assert w.beat("b", 2).assignment is None
    assert w.group.state() == state.RECONCILING
    done = w.beat("a", 1, owned=told.assignment)
    assert done.epoch == 2
    b = w.beat("b", 2)
    assert len(b.assignment) == 2 and not b.assignment & told.assignment
    assert w.group.state() == state.STABLE


def test_a_member_that_gives_nothing_back_is_fenced_and_so_is_a_silent_one():
    w = World()
    w.join("a")
    w.join("b")
    w.beat("a", 1)
    w.now += 499
    w.expire()
    assert set(w.group.members) == {"a", "b"}
    w.now += 1
    w.expire()
    assert set(w.group.members) == {"b"}
    assert w.beat("a", 1).error == E.UNKNOWN_MEMBER_ID
    assert len(w.beat("b", 2).assignment) == 4
    w.now += 45_000
    w.expire()
    assert w.group.state() == state.EMPTY
    assert w.beat("b", 3).error == E.UNKNOWN_MEMBER_ID


def test_epochs_fence_all_but_a_member_that_missed_one_answer():
    w = World()
    everything = w.join("a").assignment
    w.topics.grow("t")
    assert w.beat("a", 1, owned=everything).epoch == 2
    assert w.beat("a", 3).error == E.FENCED_MEMBER_EPOCH
    assert w.beat("a", 1).error == E.FENCED_MEMBER_EPOCH  # it does not say what it has
    assert w.beat("a", 1, owned=everything).epoch == 2
    w.topics.grow("t")
    assert w.beat("a", 2).epoch == 3
    assert w.beat("a", 1, owned=everything).error == E.FENCED_MEMBER_EPOCH
    again = w.join("a")  # as a fenced member does
    assert (again.epoch, len(again.assignment)) == (3, 6)


def test_static_members_come_back_to_their_partitions():
    w = World()
    w.join("a", instance_id="one")
    w.join("b", instance_id="two")
    left = w.beat("a", 1).assignment
    w.beat("a", 1, owned=left)
    assert w.join("c", instance_id="one").error == E.UNRELEASED_INSTANCE_ID
    assert w.beat("x", 2, instance_id="one").error == E.FENCED_INSTANCE_ID
    assert w.beat("x", 2, instance_id="none").error == E.UNKNOWN_MEMBER_ID
    assert w.beat("a", -2, instance_id="one").epoch == -2
    epoch = w.group.epoch
    back = w.join("c", instance_id="one")
    assert back.assignment == left
    assert w.group.epoch == epoch  # nobody else notices
    w.beat("c", -1, instance_id="one")
    assert len(w.beat("b", 2).assignment) == 4


def test_a_member_that_joins_under_an_instance_id_holds_nothing_for_ever():
    w = World()
    all_of_it = w.join("a").assignment
    again = w.join("a", instance_id="i")
    assert (again.error, again.assignment) == (0, all_of_it)
    assert w.join("b", instance_id="j").error == 0
    w.beat("a", again.epoch, owned=all_of_it)
    # Neither may one take the id of the other.
    assert w.join("a", instance_id="j").error == E.INVALID_REQUEST
    assert w.join("a", instance_id="k").error == E.INVALID_REQUEST
    w.beat("a", -1, instance_id="i")
    w.beat("b", -1, instance_id="j")
    assert not w.group.holders and not w.group.static
    assert w.join("c").assignment == all_of_it


def test_requests_that_no_group_takes():
    w = World(max_size=1)
    join = {"topics": frozenset("t"), "rebalance_timeout_ms": 1, "owned": frozenset()}
    assert w.beat("a", 0).error == E.INVALID_REQUEST
    for missing in join:
        assert w.beat("a", 0, **{**join, missing: -1 if "ms" in missing else None}).error == (
            E.INVALID_REQUEST
        )
    assert w.beat("", 0, **join).error == E.INVALID_REQUEST
    assert w.beat("a", -3).error == E.INVALID_REQUEST
    assert w.beat("a", -2).error == E.INVALID_REQUEST
    assert w.beat("a" * 40_000, 0, **join).error == E.INVALID_REQUEST
    assert w.beat("a", 0, **join, rack_id="").error == E.INVALID_REQUEST
    assert w.beat("a", 0, **join, assignor="best").error == E.UNSUPPORTED_ASSIGNOR
    assert w.beat("a", 1).error == E.GROUP_ID_NOT_FOUND
    assert w.beat("a", -1).error == E.GROUP_ID_NOT_FOUND
    assert not w.machine.groups and not w.saved
    made = w.beat("", 0, **join, chosen_id=False)  # version 0: the broker makes an id
    assert made.error == 0 and len(made.member_id) == 36
    assert w.join("b").error == E.GROUP_MAX_SIZE_REACHED


def test_commits_carry_the_epoch_of_the_member():
    w = World()
    w.join("a")
    check = w.machine.check_commit
    assert check(w.group, "a", 1, 9) == E.NONE
    assert check(w.group, "a", 1, 8) == E.UNSUPPORTED_VERSION
    assert check(w.group, "a", 0, 9) == E.STALE_MEMBER_EPOCH
    assert check(w.group, "b", 1, 9) == E.UNKNOWN_MEMBER_ID
    assert check(w.group, "", -1, 9) == E.UNKNOWN_MEMBER_ID
    assert w.machine.check_fetch(w.group, None, -1) == E.NONE
    assert w.machine.check_fetch(w.group, "a", 2) == E.STALE_MEMBER_EPOCH
    w.beat("a", -1)
    assert check(w.group, "", -1, 9) == E.NONE


def test_a_group_is_read_back_from_its_records_and_deleted_by_tombstones():
    w = World()
    w.join("a", topics=(), regex="t.*", instance_id="one", rack_id="r")
    w.join("b")
    w.beat("a", 1)
    rows = {records.parse_key(key): value for key, value in w.saved.items() if value is not None}
    read = state.load("g", rows)
    w.machine.restore(read, w.now)
    assert dict(read.all_rows()) == w.saved
    assert read.members["a"].state == state.UNREVOKED
    a = read.members["a"]
    assert read.holders == dict.fromkeys(a.assigned | a.revoking, "a")
    w.now += 500
    w.expire()  # the time to give back began with the new coordinator
    assert set(w.group.members) == {"b"}
    w.beat("b", -1)
    gone = dict(w.machine.forget_empty("g"))
    assert not [k for k, v in w.saved.items() if v is not None and k not in gone]


def test_expressions_follow_the_topics():
    w = World()
    first = w.join("a", topics=(), regex="t.*")
    assert len(first.assignment) == 4
    w.topics.create("t2", 2)
    w.topics.create("other", 2)
    assert len(w.beat("a", 1).assignment) == 6
    assert w.group.regexes["t.*"].topics == {"t", "t2"}
    w.beat("a", 2, regex="")
    assert not w.group.regexes and not w.group.topics


def test_names_come_before_what_an_expression_adds():
    """Kafka evaluates an expression after it has answered for the names, and clients count on it;
    what the expression alone stands for does not wait."""
    w = World()
    w.machine.settings = dataclasses.replace(w.machine.settings, refresh_ms=60_000)
    w.topics.create("t2", 4)
    w.topics.create("u", 1)
    other = w.join("b", topics=("t2",))
    assert len(other.assignment) == 4
    first = w.join("a", topics=("u",), regex="t2")
    assert {topic for topic, _ in first.assignment} == {w.topics.facts("u").topic_id}
    assert not w.group.regexes
    # "t2" is no new topic of the group, and it is a's all the same.
    w.beat("a", first.epoch, owned=first.assignment)
    given_back = w.beat("b", other.epoch, owned=other.assignment)
    w.beat("b", given_back.epoch, owned=given_back.assignment)
    rest = w.beat("a", w.group.members["a"].epoch, owned=first.assignment)
    assert len(rest.assignment) == 2 and w.group.state() == state.STABLE
    third = w.join("c", topics=("u",), regex="t2")  # it is known by now
    assert third.epoch == rest.epoch + 1 and len(w.group.targets["c"]) >= 1
    assert w.group.regexes["t2"].version == 0
    alone = w.machine.heartbeat(
        1,
        Heartbeat("h", "d", 0, regex="t.*", rebalance_timeout_ms=500, owned=frozenset()),
        w.now,
    )
    assert len(w.take(alone)[0].assignment) == 8


def test_what_is_no_expression():
    assert problem("(") and problem("(?=a)") and problem(r"(a)\1") and problem("a" * 20_000)
    assert problem("((a{1000}){1000}){1000}")
    assert not problem("orders-[0-9]+")
    assert matching("a.*", ["ab", "ba", "a"]) == {"ab", "a"}
    assert matching("(a*)*b", ["a" * 200]) == frozenset()  # at once


@pytest.mark.parametrize("data", [b"", b"\0", b"\0\3\0\5g", b"\0\5\0\1g"])
def test_keys_that_are_cut_short(data):
    with pytest.raises(records.FormatError):
        records.parse_key(data)


def test_readers_of_different_topics_are_as_even_as_single_moves_make_them():
    held = assign_evenly(
        {"a": ["x"], "b": ["x", "y"], "c": ["y"]},
        {"x": 6, "y": 2},
        {"b": [("x", i) for i in range(6)]},
    )
    assert sorted(map(len, held.values())) == [2, 3, 3]
    assert len(set().union(*held.values())) == 8
