"""Who is in sync, who leads, who has the replicas: a controller, event by event."""

from __future__ import annotations

import pytest

from kdirect.cluster import paths
from kdirect.cluster.codes import Code
from kdirect.cluster.controller import Ticked
from kdirect.cluster.image import Settings
from kdirect.cluster.partition_state import NO_LEADER
from kdirect.cluster.requests import (
    AlterInSync,
    ElectionKind,
    ElectLeaders,
    InSyncRow,
    ListReassignments,
    Reassign,
    ReassignmentRow,
    ReassignRow,
    ReplicasFailed,
    ShutDown,
)
from kdirect.model import TopicPartition
from kdirect.store.contract import (
    Create,
)
from tests.cluster.desk import T0, T1, Desk, alter, elect, start, stop
from tests.cluster.test_records import as_old_tools_write

# -- in sync ---------------------------------------------------------------------------------------


def test_a_leader_changes_who_is_in_sync() -> None:
    desk = Desk()
    desk.create("t", [(0, 1, 2)])
    answer = alter(desk, 0, 0, 1)
    (row,) = answer.rows
    assert (row.code, row.state) == (Code.NONE, desk.state())
    assert desk.state()[:4] == (0, 0, (0, 1), 1)
    # The same again, as after a lost answer: as it is.
    answer = alter(desk, 0, 0, 1, version=0)
    assert (answer.rows[0].code, answer.rows[0].state.version) == (Code.NONE, 1)
    alter(desk, 0, 0, 2, 1)
    assert desk.state()[:4] == (0, 0, (0, 1, 2), 2)


@pytest.mark.parametrize(
    ("leader", "in_sync", "changes", "code"),
    [
        (1, (1, 0), {}, Code.INVALID_REQUEST),  # not the leader
        (0, (1,), {}, Code.INVALID_REQUEST),  # without the leader
        (0, (0, 3), {}, Code.INVALID_REQUEST),  # not a replica
        (0, (0, 0), {}, Code.INVALID_REQUEST),
        (0, (), {}, Code.INVALID_REQUEST),
        (0, (0, 1), {"leader_epoch": 1}, Code.FENCED_LEADER_EPOCH),
        (0, (0, 1), {"leader_epoch": 3}, Code.NOT_CONTROLLER),
        (0, (0, 1), {"version": 3}, Code.INVALID_UPDATE_VERSION),
        (0, (0, 1), {"version": 9}, Code.NOT_CONTROLLER),
        (0, (0, 1), {"in_sync": ((0, 0), (1, 12345))}, Code.INELIGIBLE_REPLICA),
        (0, (0, 1), {"partition": T1}, Code.UNKNOWN_TOPIC_OR_PARTITION),
        (0, (0, 1), {"partition": TopicPartition("x", 0)}, Code.UNKNOWN_TOPIC_OR_PARTITION),
    ],
)
def test_a_proposal_that_cannot_be_is_refused(leader, in_sync, changes, code) -> None:
    desk = Desk(4)
    desk.create("t", [(0, 1, 2)])
    stop(desk, 0)
    start(desk, 0)
    alter(desk, 1, 1, 0)
    desk.ask(ElectLeaders(None, ElectionKind.PREFERRED, (T0,)))
    alter(desk, 0, 0)
    before = desk.state()
    assert before[:4] == (0, 2, (0,), 4)
    answer = alter(desk, leader, *in_sync, **changes)
    assert answer.rows[0].code is code
    assert desk.state() == before


def test_a_broker_that_died_or_shuts_down_cannot_join() -> None:
    desk = Desk()
    desk.create("t", [(0, 1, 2)])
    alter(desk, 0, 0)
    old = desk.in_sync(0, 1)
    desk.ask(ShutDown(None, 2, desk.live(2).incarnation))
    assert alter(desk, 0, 0, 2).rows[0].code is Code.INELIGIBLE_REPLICA
    stop(desk, 1)
    assert alter(desk, 0, 0, in_sync=old).rows[0].code is Code.INELIGIBLE_REPLICA
    start(desk, 1)
    assert alter(desk, 0, 0, in_sync=old).rows[0].code is Code.INELIGIBLE_REPLICA
    assert alter(desk, 0, 0, 1).rows[0].code is Code.NONE


def test_the_refusal_of_a_proposal_ends_a_copy_that_comes_later() -> None:
    desk = Desk()
    desk.create("t", [(0, 1, 2)])
    alter(desk, 0, 0, 1)
    before, leader = desk.state(), desk.live(0).incarnation
    stop(desk, 2)
    desk.register(2)  # the controller has not heard of it yet
    returned = desk.tree.get(paths.broker(2)).created
    late = InSyncRow(T0, 0, before.version, (*desk.in_sync(0, 1), (2, returned)))
    answer = desk.ask(AlterInSync(None, 0, leader, (late._replace(repeated=True),)))
    assert answer.rows[0].code is Code.INELIGIBLE_REPLICA
    renewed = desk.state()
    assert answer.rows[0].state == renewed == before._replace(version=before.version + 1)
    desk.brokers()  # now it could be accepted
    answer = desk.ask(AlterInSync(None, 0, leader, (late,)))
    assert answer.rows[0].code is Code.INVALID_UPDATE_VERSION
    assert desk.state() == renewed


def test_only_the_leader_gives_a_state_a_new_version() -> None:
    desk = Desk()
    desk.create("t", [(0, 1, 2)])
    before = desk.state()
    answer = alter(desk, 1, 1, repeated=True)
    assert answer.rows[0].code is Code.INVALID_REQUEST
    assert desk.state() == before


def test_a_request_of_a_process_that_is_gone_is_refused() -> None:
    desk = Desk()
    desk.create("t", [(0, 1)])
    row = InSyncRow(T0, 0, 0, desk.in_sync(0))
    for broker, incarnation in ((0, 1), (9, 1)):
        answer = desk.ask(AlterInSync(None, broker, incarnation, (row,)))
        assert answer.outcome.code is Code.STALE_BROKER_EPOCH
        answer = desk.ask(ShutDown(None, broker, incarnation))
        assert answer.outcome.code is Code.STALE_BROKER_EPOCH


# -- replicas that fail ----------------------------------------------------------------------------


def fail(desk: Desk, broker: int, *partitions: TopicPartition, full: bool = False) -> list[Code]:
    incarnation = desk.live(broker).incarnation
    answer = desk.ask(ReplicasFailed(None, broker, incarnation, partitions, full))
    return [row.outcome.code for row in answer.rows]


def test_a_directory_that_fails_moves_its_own_leaders() -> None:
    desk = Desk()
    desk.create("t", [(0, 1, 2), (0, 1, 2)])
    assert fail(desk, 0, T0, TopicPartition("t", 7)) == [
        Code.NONE,
        Code.UNKNOWN_TOPIC_OR_PARTITION,
    ]
    assert desk.state(T0)[:3] == (1, 1, (1, 2))
    assert desk.state(T1)[:3] == (0, 0, (0, 1, 2))
    assert alter(desk, 1, 0, 1, 2).rows[0].code is Code.INELIGIBLE_REPLICA
    assert elect(desk, ElectionKind.PREFERRED, T0) == [Code.PREFERRED_LEADER_NOT_AVAILABLE]
    assert fail(desk, 2, T0) == [Code.NONE]  # a follower's
    assert desk.state(T0)[:3] == (1, 1, (1,))
    desk.begin()  # another controller
    assert dict(desk.partition(T0).failed) == {n: desk.live(n).incarnation for n in (0, 2)}
    stop(desk, 0)
    start(desk, 0)  # its directory is mended
    assert alter(desk, 1, 0, 1).rows[0].code is Code.NONE
    assert elect(desk, ElectionKind.PREFERRED, T0) == [Code.NONE]
    assert desk.state(T0)[:3] == (0, 2, (0, 1))


def test_a_partition_whose_replicas_have_all_failed_waits_for_one_in_sync() -> None:
    desk = Desk()
    desk.create("t", [(0, 1, 2)])
    alter(desk, 0, 0, 1)
    assert fail(desk, 0, T0) + fail(desk, 1, T0) == [Code.NONE] * 2
    assert desk.state()[:3] == (NO_LEADER, 2, (1,))
    assert elect(desk, ElectionKind.UNCLEAN, T0) == [Code.NONE]
    assert desk.state()[:3] == (2, 3, (2,)), "one whose replica has failed is not elected"
    desk.create("u", [(0,)])
    u = TopicPartition("u", 0)
    fail(desk, 0, u)
    assert elect(desk, ElectionKind.UNCLEAN, u) == [Code.ELIGIBLE_LEADERS_NOT_AVAILABLE]
    stop(desk, 0)
    start(desk, 0)
    assert desk.state(u)[:3] == (0, 2, (0,))


def test_what_failed_and_was_mended_may_lack_records() -> None:
    """What was not synced when a disk failed may be gone, though the machine ran on."""
    desk = Desk()
    desk.create("t", [(0, 1)], min_insync_replicas="2")
    assert fail(desk, 0, T0) + fail(desk, 1, T0) == [Code.NONE] * 2
    assert (desk.state()[:3], desk.state().eligible) == ((NO_LEADER, 2, (1,)), (0,))
    stop(desk, 0)
    start(desk, 0)
    assert (desk.state()[:3], desk.state().eligible) == ((NO_LEADER, 2, (1,)), ())
    stop(desk, 1)
    desk.begin()  # another controller
    start(desk, 1)
    assert desk.state()[:3] == (1, 3, (1,)), "no better one will come"
    assert alter(desk, 1, 0, 1).rows[0].code is Code.NONE


def test_a_leader_without_room_hands_over_and_may_come_back() -> None:
    desk = Desk()
    desk.create("t", [(0, 1, 2)])
    assert fail(desk, 0, T0, full=True) == [Code.NONE]
    assert desk.state()[:3] == (1, 1, (1, 2))
    assert alter(desk, 1, 0, 1, 2).rows[0].code is Code.NONE
    stop(desk, 0, 2)
    assert fail(desk, 1, T0, full=True) == [Code.ELIGIBLE_LEADERS_NOT_AVAILABLE]
    assert desk.state()[:3] == (1, 1, (1,))


def test_a_follower_without_room_is_in_sync_no_more() -> None:
    desk = Desk()
    desk.create("t", [(0, 1, 2)], min_insync_replicas="2")
    assert fail(desk, 1, T0, full=True) == [Code.NONE]
    assert desk.state()[:3] == (0, 0, (0, 2))
    assert fail(desk, 1, T0, full=True) == [Code.ELECTION_NOT_NEEDED]
    assert fail(desk, 2, T0, full=True) == [Code.NONE]
    assert desk.state()[:3] == (0, 0, (0,))
    assert desk.state().eligible == (2,), "it has every committed record, as long as nothing is"


def test_only_the_process_that_lives_says_what_failed() -> None:
    desk = Desk()
    desk.create("t", [(0, 1, 2)])
    answer = desk.ask(ReplicasFailed(None, 0, desk.live(0).incarnation + 1, (T0,)))
    assert answer.outcome.code is Code.STALE_BROKER_EPOCH
    assert desk.state()[:3] == (0, 0, (0, 1, 2))


# -- elections -------------------------------------------------------------------------------------


def test_leaders_move_when_a_broker_dies_and_a_returning_one_does_not_lead() -> None:
    desk = Desk()
    desk.create("t", [(0, 1, 2), (1, 2, 0)])
    stop(desk, 0)
    assert desk.state(T0)[:3] == (1, 1, (1, 2))
    assert desk.state(T1)[:3] == (1, 0, (1, 2))  # the leader stays, and so does its epoch
    start(desk, 0)
    assert desk.state(T0)[:3] == (1, 1, (1, 2))


def test_a_broker_that_is_back_before_anybody_noticed_has_another_incarnation() -> None:
    desk = Desk()
    desk.create("t", [(0, 1), (1, 0)])
    desk.unregister(0)
    start(desk, 0)
    assert desk.state(T0)[:3] == (1, 1, (1,))
    assert desk.state(T1)[:3] == (1, 0, (1,))


def test_a_bounce_that_no_controller_saw_is_seen_by_the_next_one() -> None:
    desk = Desk()
    desk.create("t", [(0, 1)])
    desk.create("alone", [(0,)])
    desk.unregister(0)
    desk.register(0)
    desk.begin()
    assert desk.state(T0)[:3] == (1, 1, (1,))
    # There is no other one: it leads again, in a new epoch.
    alone = desk.state(TopicPartition("alone", 0))
    assert alone[:3] == (0, 1, (0,))
    assert alone.incarnation == desk.live(0).incarnation


def test_all_who_died_together_may_lead_when_they_return() -> None:
    desk = Desk()
    desk.create("t", [(0, 1, 2)])
    alter(desk, 0, 0, 1)
    stop(desk, 0, 1)
    assert desk.state()[:3] == (NO_LEADER, 1, (0, 1))
    stop(desk, 2)
    start(desk, 2)
    assert desk.state().leader == NO_LEADER
    start(desk, 1)
    assert desk.state()[:3] == (1, 2, (1,))


def test_a_partition_gets_its_first_leader_when_a_broker_comes() -> None:
    desk = Desk()
    desk.write(Create(paths.topic("t"), b'{"version":1,"partitions":{"0":[1,0]}}'))
    desk.unregister(0)
    desk.unregister(1)
    desk.begin()
    assert desk.partition().state is None
    start(desk, 0)
    assert desk.state()[:3] == (0, 0, (0,))


def test_eligible_replicas_are_elected_when_the_last_in_sync_lost_power() -> None:
    desk = Desk()
    desk.create("t", [(0, 1, 2)], min_insync_replicas="2")
    alter(desk, 0, 0)
    assert (desk.state().in_sync, desk.state().eligible) == ((0,), (1, 2))
    stop(desk, 0, 1, 2)
    assert desk.state()[:3] == (NO_LEADER, 1, (0,))
    start(desk, 0, intact=False)  # it may have lost what it had: wait for those who have it
    assert (desk.state().leader, desk.state().in_sync) == (NO_LEADER, (1, 2))
    start(desk, 2)
    assert desk.state()[:3] == (2, 2, (2,))
    assert desk.state().eligible == (1,)


def test_a_power_loss_of_all_leaves_nobody_better_to_wait_for() -> None:
    desk = Desk()
    desk.create("t", [(0, 1)])
    stop(desk, 0, 1)
    start(desk, 0, intact=False)
    assert desk.state()[:3] == (NO_LEADER, 1, (1,))
    stop(desk, 0)
    start(desk, 1, intact=False)
    assert desk.state()[:3] == (1, 2, (1,))


def test_whoever_lost_power_is_not_eligible_any_more() -> None:
    desk = Desk()
    desk.create("t", [(0, 1, 2)], min_insync_replicas="2")
    alter(desk, 0, 0)
    stop(desk, 1)
    assert desk.state().eligible == (1, 2)
    start(desk, 1, intact=False)
    assert desk.state().eligible == (2,)


def test_an_unclean_election_takes_whoever_lives_and_ends_eligibility() -> None:
    desk = Desk()
    desk.create("t", [(0, 1, 2)], min_insync_replicas="2", unclean_leader_election_enable="true")
    alter(desk, 0, 0)
    stop(desk, 1, 2)
    start(desk, 1, intact=False)
    stop(desk, 0)
    assert desk.state()[:3] == (1, 1, (1,))
    assert desk.state().eligible == ()


def test_preferred_election_on_demand() -> None:
    desk = Desk()
    desk.create("t", [(0, 1), (1, 2)])
    stop(desk, 0)
    none = TopicPartition("t", 9)
    assert elect(desk, ElectionKind.PREFERRED, T0, T1, none) == [
        Code.PREFERRED_LEADER_NOT_AVAILABLE,
        Code.ELECTION_NOT_NEEDED,
        Code.UNKNOWN_TOPIC_OR_PARTITION,
    ]
    start(desk, 0)
    assert elect(desk, ElectionKind.PREFERRED, T0) == [Code.PREFERRED_LEADER_NOT_AVAILABLE]
    alter(desk, 1, 1, 0)
    answer = desk.ask(ElectLeaders(None, ElectionKind.PREFERRED, None))
    assert [(r.partition, r.outcome.code) for r in answer.rows] == [(T0, Code.NONE)]
    assert desk.state()[:3] == (0, 2, (0, 1))


def test_unclean_election_on_demand() -> None:
    desk = Desk()
    desk.create("t", [(0, 1)])
    alter(desk, 0, 0)
    assert elect(desk, ElectionKind.UNCLEAN, T0) == [Code.ELECTION_NOT_NEEDED]
    stop(desk, 0, 1)
    assert elect(desk, ElectionKind.UNCLEAN, T0) == [Code.ELIGIBLE_LEADERS_NOT_AVAILABLE]
    start(desk, 1)
    assert desk.state().leader == NO_LEADER
    assert elect(desk, ElectionKind.UNCLEAN, T0) == [Code.NONE]
    assert desk.state()[:3] == (1, 2, (1,))


@pytest.mark.parametrize("enabled", [True, False])
def test_leaders_are_rebalanced_when_it_is_time(enabled: bool) -> None:
    desk = Desk(settings=Settings(rebalance=enabled, rebalance_interval_ms=1000))
    desk.create("t", [(0, 1), (1, 0)])
    stop(desk, 0)
    start(desk, 0)
    for tp in (T0, T1):
        alter(desk, 1, 1, 0, tp=tp)
    desk.feed(Ticked(999))
    assert desk.state(T0).leader == 1
    desk.feed(Ticked(1000))
    assert desk.state(T0).leader == (0 if enabled else 1)


def test_leaders_are_not_rebalanced_below_the_limit() -> None:
    for percent, leader in ((50, 1), (49, 0)):
        settings = Settings(rebalance_interval_ms=1000, rebalance_percent=percent)
        desk = Desk(settings=settings)
        desk.create("t", [(0, 1)])
        stop(desk, 0)
        start(desk, 0)
        alter(desk, 1, 1, 0)
        desk.create("u", [(0, 1)])  # one of the two that broker 0 should lead is led by 1
        desk.feed(Ticked(1000))
        assert desk.state(T0).leader == leader


def test_controlled_shutdown_moves_leaders_first() -> None:
    desk = Desk()
    desk.create("t", [(0, 1), (1, 0)])
    desk.create("alone", [(0,)])
    desk.create("lagging", [(0, 1)])
    lagging = TopicPartition("lagging", 0)
    alter(desk, 0, 0, tp=lagging)
    answer = desk.ask(ShutDown(None, 0, desk.live(0).incarnation))
    assert (answer.outcome.code, answer.rows) == (Code.NONE, (lagging,))
    assert desk.state(T0)[:3] == (1, 1, (1,))
    assert desk.state(T1)[:3] == (1, 0, (1,))
    assert desk.state(TopicPartition("alone", 0))[:3] == (0, 0, (0,))
    stop(desk, 0)
    start(desk, 0)
    assert alter(desk, 1, 1, 0).rows[0].code is Code.NONE


def test_controlled_shutdown_is_answered_when_the_leaders_have_moved() -> None:
    desk = Desk(hold=True)
    desk.create("t", [(0, 1)])
    desk.commit_held()
    assert desk.ask(ShutDown(None, 0, desk.live(0).incarnation)) is None
    desk.commit_held()
    assert desk.answers[max(desk.answers)].rows == ()
    assert desk.state().leader == 1


# -- reassignment ----------------------------------------------------------------------------------


def move(desk: Desk, *target: int, tp: TopicPartition = T0) -> Code:
    (row,) = desk.ask(Reassign(None, (ReassignRow(tp, target),))).rows
    return row.outcome.code


def cancel(desk: Desk, tp: TopicPartition = T0) -> Code:
    (row,) = desk.ask(Reassign(None, (ReassignRow(tp, None),))).rows
    return row.outcome.code


def test_a_partition_moves_to_three_other_brokers() -> None:
    desk = Desk(6)
    desk.create("t", [(0, 1, 2)])
    assert move(desk, 3, 4, 5) is Code.NONE
    assert desk.partition()[:3] == ((3, 4, 5, 0, 1, 2), (3, 4, 5), (0, 1, 2))
    assert desk.state()[:3] == (0, 1, (0, 1, 2))
    listed = desk.ask(ListReassignments(None)).rows
    assert listed == (ReassignmentRow(T0, (3, 4, 5, 0, 1, 2), (3, 4, 5), (0, 1, 2)),)
    alter(desk, 0, 0, 1, 2, 3, 4)
    assert desk.partition().adding
    answer = alter(desk, 0, 0, 1, 2, 3, 4, 5)
    assert answer.rows[0].code is Code.NONE
    assert desk.partition()[:3] == ((3, 4, 5), (), ())
    assert desk.state()[:3] == (3, 2, (3, 4, 5))
    assert desk.ask(ListReassignments(None)).rows == ()
    assert desk.ask(ListReassignments(None, (T0, T1))).rows == ()


def test_the_leader_stays_if_it_is_in_the_target() -> None:
    desk = Desk(4)
    desk.create("t", [(0, 1)])
    move(desk, 3, 0)
    alter(desk, 0, 0, 3)
    assert desk.partition()[:3] == ((3, 0), (), ())
    assert desk.state()[:3] == (0, 2, (3, 0))


def test_fewer_replicas_are_there_at_once() -> None:
    desk = Desk()
    desk.create("t", [(0, 1, 2)])
    assert move(desk, 1, 2) is Code.NONE
    assert desk.partition()[:3] == ((1, 2), (), ())
    assert (desk.state().leader, desk.state().in_sync) == (1, (1, 2))


def test_another_target_begins_again_from_where_it_came() -> None:
    desk = Desk(6)
    desk.create("t", [(0, 1)])
    move(desk, 2, 3)
    alter(desk, 0, 0, 1, 2)
    assert move(desk, 4, 1) is Code.NONE
    assert desk.partition()[:3] == ((4, 1, 0), (4,), (0,))
    assert desk.state().in_sync == (0, 1)
    assert move(desk, 0, 1) is Code.NONE  # back
    assert desk.partition()[:3] == ((0, 1), (), ())


def test_cancelling_goes_back() -> None:
    desk = Desk(4)
    desk.create("t", [(0, 1)])
    assert cancel(desk) is Code.NO_REASSIGNMENT_IN_PROGRESS
    move(desk, 2, 3)
    alter(desk, 0, 0, 1, 2)
    assert cancel(desk) is Code.NONE
    assert desk.partition()[:3] == ((0, 1), (), ())
    assert desk.state()[:3] == (0, 2, (0, 1))


def test_cancelling_moves_the_leader_back_and_never_to_one_that_lags() -> None:
    desk = Desk(4)
    desk.create("t", [(0, 1)])
    move(desk, 2, 3)
    alter(desk, 0, 0, 1, 2)
    stop(desk, 0)
    stop(desk, 1)
    assert desk.state()[:3] == (2, desk.state().leader_epoch, (2,))
    assert cancel(desk) is Code.INVALID_REPLICA_ASSIGNMENT
    start(desk, 1)
    alter(desk, 2, 2, 1)
    assert cancel(desk) is Code.NONE
    assert (desk.state().leader, desk.state().in_sync) == (1, (1,))


@pytest.mark.parametrize("target", [(0, 9), (0, 0), (), (2,)])
def test_a_target_that_cannot_be_is_refused(target) -> None:
    desk = Desk()
    desk.create("t", [(0, 1)])
    stop(desk, 2)
    assert move(desk, *target) is Code.INVALID_REPLICA_ASSIGNMENT
    assert move(desk, 0, tp=T1) is Code.UNKNOWN_TOPIC_OR_PARTITION
    assert desk.partition()[:3] == ((0, 1), (), ())


def test_a_reassignment_goes_on_under_the_next_controller() -> None:
    desk = Desk(4)
    desk.create("t", [(0, 1)])
    move(desk, 2, 3)
    desk.begin()
    assert desk.partition()[:3] == ((2, 3, 0, 1), (2, 3), (0, 1))
    alter(desk, 0, 0, 1, 2, 3)
    assert desk.partition()[:3] == ((2, 3), (), ())


def test_the_node_of_old_tools_is_taken() -> None:
    desk = Desk(4)
    desk.create("t", [(0, 1)])
    wanted = {T0: (2, 3), T1: (0,)}
    desk.write(Create(paths.REASSIGNMENTS, as_old_tools_write(wanted)))
    desk.begin()
    assert desk.partition().adding == (2, 3)
    assert desk.tree.get(paths.REASSIGNMENTS) is None


def test_a_replica_that_failed_may_come_again_when_it_has_been_moved_away() -> None:
    """It is made in another directory then."""
    desk = Desk(3)
    desk.create("t", [(0, 1)])
    assert fail(desk, 0, T0) == [Code.NONE]
    assert move(desk, 1, 2) is Code.NONE
    assert alter(desk, 1, 1, 2).rows[0].code is Code.NONE
    assert desk.partition(T0).replicas == (1, 2) and not desk.partition(T0).failed
    assert move(desk, 1, 0) is Code.NONE
    assert alter(desk, 1, 0, 1, 2).rows[0].code is Code.NONE
    assert desk.partition(T0).replicas == (1, 0)
