"""What a controller does when it is asked to change who is in sync, who leads, or which brokers
have the replicas of a partition.

Each function takes a draft and one row of a request, changes the draft, and says what to answer for
that row when the draft is committed.
"""

from __future__ import annotations

from collections.abc import Iterable

from kdirect.cluster import reassignment
from kdirect.cluster.assignment import refuse_replicas
from kdirect.cluster.codes import DONE, Code, Outcome
from kdirect.cluster.draft import Draft
from kdirect.cluster.election import (
    Fleet,
    How,
    Partition,
    Rules,
    Standing,
    candidates,
    change,
    has_failed,
    note_lost,
    review,
    standing,
)
from kdirect.cluster.image import Image
from kdirect.cluster.partition_state import NO_LEADER, PartitionState
from kdirect.cluster.requests import (
    AlterInSync,
    ElectionKind,
    InSyncAnswer,
    InSyncRow,
    ReassignmentRow,
    ReassignRow,
    ReplicasFailed,
    RowOutcome,
)
from kdirect.model import TopicPartition

_UNKNOWN = Outcome(Code.UNKNOWN_TOPIC_OR_PARTITION, "there is no such partition")
_DAMAGED = Outcome(
    Code.KAFKA_STORAGE_ERROR, "the node of its state is damaged; the controller's log names it"
)

# What depends on who is registered, or has a replica, when a proposal is looked at.
_MAY_BE_ACCEPTED_LATER = (Code.INELIGIBLE_REPLICA, Code.INVALID_REQUEST)


# -- who is in sync --------------------------------------------------------------------------------


def alter_in_sync(draft: Draft, request: AlterInSync, row: InSyncRow) -> InSyncAnswer:
    """A leader's proposal (KIP-497; the order of the checks is Kafka's)."""
    tp = row.partition
    partition = draft.find(tp)
    state = partition.state if partition is not None else None
    if partition is None or state is None or draft.is_damaged(tp):
        return InSyncAnswer(tp, Code.UNKNOWN_TOPIC_OR_PARTITION)
    in_sync = tuple(broker for broker, _ in row.in_sync)
    code = _refuse_in_sync(draft.fleet, partition, state, request.broker, row)
    if code is not None:
        if row.repeated and code in _MAY_BE_ACCEPTED_LATER and request.broker == state.leader:
            state = draft.renew(tp)
        return InSyncAnswer(tp, code, state)
    if set(in_sync) != set(state.in_sync):
        added = {b: number for b, number in row.in_sync if b not in state.in_sync}
        known = {**dict(partition.incarnations), **added}
        partition = partition._replace(incarnations=tuple(sorted(known.items())))
        ordered = [b for b in partition.replicas if b in in_sync]
        rules = draft.rules(tp.topic)
        draft.set_partition(
            tp, change(partition, draft.fleet, rules, leader=state.leader, in_sync=ordered)
        )
        partition = draft.find(tp)
        assert partition is not None
    return InSyncAnswer(tp, Code.NONE, partition.state)


def _refuse_in_sync(
    fleet: Fleet, partition: Partition, state: PartitionState, asker: int, row: InSyncRow
) -> Code | None:
    in_sync = {broker for broker, _ in row.in_sync}
    if row.leader_epoch > state.leader_epoch or row.version > state.version:
        return Code.NOT_CONTROLLER  # the asker has heard of a newer controller than this one
    if row.leader_epoch < state.leader_epoch:
        return Code.FENCED_LEADER_EPOCH
    if asker != state.leader or asker not in in_sync or len(in_sync) != len(row.in_sync):
        return Code.INVALID_REQUEST
    if not in_sync <= set(partition.replicas):
        return Code.INVALID_REQUEST
    if in_sync == set(state.in_sync):
        return None  # as it is: the asker has missed the answer to the same proposal
    if row.version < state.version:
        return Code.INVALID_UPDATE_VERSION
    for broker, incarnation in row.in_sync:
        if broker in state.in_sync:
            continue
        there = fleet.live.get(broker)
        if there is None or there.incarnation != incarnation or broker in fleet.leaving:
            return Code.INELIGIBLE_REPLICA
        if has_failed(partition, broker, there):
            return Code.INELIGIBLE_REPLICA
    return None


# -- replicas that fail ----------------------------------------------------------------------------


def fail_replica(draft: Draft, request: ReplicasFailed, tp: TopicPartition) -> RowOutcome:
    """The log of a replica has failed, or has no room: see `ReplicasFailed`."""
    partition = draft.find(tp)
    if partition is not None and draft.is_damaged(tp):
        return RowOutcome(tp, _DAMAGED)
    if partition is None or partition.state is None or request.broker not in partition.replicas:
        return RowOutcome(tp, _UNKNOWN)
    if request.is_full:
        return RowOutcome(tp, _hand_over(draft, tp, partition, partition.state, request.broker))
    failed = {**dict(partition.failed), request.broker: request.incarnation}
    after = partition._replace(failed=tuple(sorted(failed.items())))
    after = review(after, draft.fleet, draft.rules(tp.topic))
    draft.set_partition(tp, _forget_failed(after, draft.fleet))
    return RowOutcome(tp)


def _forget_failed(partition: Partition, fleet: Fleet) -> Partition:
    """Without the failures of processes that have ended, where nobody counts on what they had."""
    state = partition.state
    assert state is not None
    counts = {*state.in_sync, *state.eligible}
    lives = {(b, there.incarnation) for b, there in fleet.live.items()}
    kept = tuple(x for x in partition.failed if x in lives or x[0] in counts)
    return partition._replace(failed=kept)


def _hand_over(
    draft: Draft, tp: TopicPartition, partition: Partition, state: PartitionState, broker: int
) -> Outcome:
    """Have the others that are in sync go on without it; one of them leads, if it led."""
    others = [b for b in partition.replicas if b in state.in_sync and b != broker]
    rules = draft.rules(tp.topic)
    if state.leader != broker:
        if state.leader == NO_LEADER or broker not in state.in_sync:
            return Outcome(Code.ELECTION_NOT_NEEDED, f"nobody waits for broker {broker}")
        after = change(partition, draft.fleet, rules, leader=state.leader, in_sync=others)
        draft.set_partition(tp, after)
        return DONE
    ready = [b for b in others if standing(partition, b, draft.fleet) is Standing.SAME]
    chosen = next((b for b in ready if b not in draft.fleet.leaving), None)
    if chosen is None:
        return Outcome(Code.ELIGIBLE_LEADERS_NOT_AVAILABLE, "no other broker is in sync")
    draft.set_partition(tp, change(partition, draft.fleet, rules, leader=chosen, in_sync=ready))
    return DONE


# -- who leads -------------------------------------------------------------------------------------


def settle(draft: Draft, tp: TopicPartition) -> bool:
    """Bring a partition to where the rules want it: see `election.review` and
    `reassignment.finish`.  Did anything change?"""
    before = draft.find(tp)
    if before is None or draft.is_damaged(tp):
        return False
    rules = draft.rules(tp.topic)
    after = review(note_lost(tp, before, draft.fleet), draft.fleet, rules)
    after = _end_eligible(reassignment.finish(after, draft.fleet, rules), rules)
    if after.state is not None and after.state.version < 0 and after.state == before.state:
        # Its node was deleted by hand.  Whoever read it before must not take it for the same.
        state = after.state
        after = after._replace(state=state._replace(leader_epoch=state.leader_epoch + 1))
    if after == before:
        return False
    draft.set_partition(tp, after)
    return True


def _end_eligible(partition: Partition, rules: Rules) -> Partition:
    """Nobody is eligible when enough are in sync, as after ``min.insync.replicas`` was lowered."""
    state = partition.state
    enough = min(rules.min_in_sync, len(partition.target))
    if state is None or not state.eligible or state.leader == NO_LEADER:
        return partition
    if len(state.in_sync) < enough:
        return partition
    known = tuple((b, n) for b, n in partition.incarnations if b in state.in_sync)
    return partition._replace(state=state._replace(eligible=()), incarnations=known)


def elect(draft: Draft, kind: ElectionKind, tp: TopicPartition) -> RowOutcome:
    """ElectLeaders (KIP-460)."""
    partition = draft.find(tp)
    if partition is not None and draft.is_damaged(tp):
        return RowOutcome(tp, _DAMAGED)
    if partition is None or partition.state is None:
        return RowOutcome(tp, _UNKNOWN)
    if kind is ElectionKind.PREFERRED:
        return RowOutcome(tp, _elect_preferred(draft, tp, partition, partition.state))
    return RowOutcome(tp, _elect_unclean(draft, tp, partition, partition.state))


def preferred_is_ready(partition: Partition, fleet: Fleet) -> bool:
    """Is the preferred leader, the first of the replicas, in sync and able to lead?"""
    first = partition.replicas[0]
    return (
        partition.state is not None
        and first in partition.state.in_sync
        and first not in fleet.leaving
        and standing(partition, first, fleet) is Standing.SAME
    )


def _elect_preferred(
    draft: Draft, tp: TopicPartition, partition: Partition, state: PartitionState
) -> Outcome:
    first = partition.replicas[0]
    if state.leader == first:
        return Outcome(Code.ELECTION_NOT_NEEDED, "the preferred leader leads already")
    if not preferred_is_ready(partition, draft.fleet):
        message = f"broker {first}, the preferred leader, is not in sync or does not live"
        return Outcome(Code.PREFERRED_LEADER_NOT_AVAILABLE, message)
    rules = draft.rules(tp.topic)
    draft.set_partition(
        tp, change(partition, draft.fleet, rules, leader=first, in_sync=state.in_sync)
    )
    return DONE


def _elect_unclean(
    draft: Draft, tp: TopicPartition, partition: Partition, state: PartitionState
) -> Outcome:
    rules = draft.rules(tp.topic)._replace(unclean=True)
    if (
        state.leader != NO_LEADER
        and standing(partition, state.leader, draft.fleet) is Standing.SAME
    ):
        return Outcome(Code.ELECTION_NOT_NEEDED, f"broker {state.leader} leads")
    chosen, how = next(candidates(partition, draft.fleet, rules), (NO_LEADER, None))
    if how is None:
        message = "no broker with a replica lives; start one"
        return Outcome(Code.ELIGIBLE_LEADERS_NOT_AVAILABLE, message)
    if how is How.IN_SYNC:
        after = review(partition, draft.fleet, rules)
    else:
        after = change(partition, draft.fleet, rules, leader=chosen, in_sync=(chosen,), how=how)
    draft.set_partition(tp, after)
    return DONE


def unbalanced(image: Image, fleet: Fleet, percent: int) -> tuple[TopicPartition, ...]:
    """Partitions that their preferred leaders should lead and can (Kafka's
    `checkAndTriggerAutoLeaderRebalance`): of those brokers which lead too few of theirs."""
    of_broker: dict[int, list[tuple[TopicPartition, bool, bool]]] = {}
    for tp, p in image.all_partitions():
        if p.state is not None:
            leads = p.state.leader == p.replicas[0]
            ready = not (p.adding or p.removing) and preferred_is_ready(p, fleet)
            of_broker.setdefault(p.replicas[0], []).append((tp, leads, ready))
    found: list[TopicPartition] = []
    for broker, rows in of_broker.items():
        missing = sum(not leads for _, leads, _ in rows)
        if broker in fleet.live and (missing * 100 > len(rows) * percent):
            found += [tp for tp, leads, ready in rows if ready and not leads]
    return tuple(found)


# -- which brokers ---------------------------------------------------------------------------------


def reassign(draft: Draft, row: ReassignRow) -> RowOutcome:
    """AlterPartitionReassignments (KIP-455), one partition: begin, begin again, or cancel."""
    tp = row.partition
    partition = draft.find(tp)
    if partition is None:
        return RowOutcome(tp, _UNKNOWN)
    if draft.is_damaged(tp):
        return RowOutcome(tp, _DAMAGED)
    rules = draft.rules(tp.topic)
    after: Partition | Outcome
    if row.target is None:
        after = reassignment.cancel(partition, draft.fleet, rules)
    else:
        wrong = refuse_replicas(row.target, dict.fromkeys(draft.fleet.live))
        if wrong:
            message = f"bad assignment of partition {tp}: {wrong}"
            return RowOutcome(tp, Outcome(Code.INVALID_REPLICA_ASSIGNMENT, message))
        after = reassignment.start(partition, row.target, draft.fleet, rules)
    if isinstance(after, Outcome):
        return RowOutcome(tp, after)
    draft.set_partition(tp, after)
    return RowOutcome(tp)


def list_reassignments(
    image: Image, partitions: Iterable[TopicPartition] | None
) -> tuple[ReassignmentRow, ...]:
    """ListPartitionReassignments: those that are moving."""
    if partitions is None:
        found = list(image.all_partitions())
    else:
        found = [(tp, p) for tp in partitions if (p := image.find(tp)) is not None]
    return tuple(
        ReassignmentRow(tp, p.replicas, p.adding, p.removing)
        for tp, p in found
        if p.adding or p.removing
    )
