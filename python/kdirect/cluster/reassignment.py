"""How the replicas of a partition move to other brokers (KIP-455): grow, wait, shrink.  Pure.

While it lasts the replicas are the target and those before, in this order (Kafka's
`ReplicaAssignment.reassignTo`).  It ends when all of the target are in sync: then those outside of
it go, and the leader with them if it is one of them.  Another target, or going back (cancelling),
begins again from the replicas before the reassignment; those that were only being added go at once.

Each step has a new leader epoch, because a leader learns its followers when its epoch begins.
"""

from __future__ import annotations

from kdirect.cluster.codes import Code, Outcome
from kdirect.cluster.election import Fleet, Partition, Rules, Standing, change, standing
from kdirect.cluster.partition_state import NO_LEADER


def start(
    partition: Partition, target: tuple[int, ...], fleet: Fleet, rules: Rules
) -> Partition | Outcome:
    """The partition on its way to `target`, or why it cannot go there."""
    if target == partition.replicas and not (partition.adding or partition.removing):
        return partition
    origin = partition.origin
    replicas = tuple(dict.fromkeys((*target, *origin)))
    return _replace(
        partition,
        partition._replace(
            replicas=replicas,
            adding=tuple(b for b in replicas if b not in origin),
            removing=tuple(b for b in replicas if b not in target),
        ),
        fleet,
        rules,
    )


def cancel(partition: Partition, fleet: Fleet, rules: Rules) -> Partition | Outcome:
    """The partition with the replicas that it had before, or why it cannot go back."""
    if not partition.adding and not partition.removing:
        message = "no reassignment of the partition is in progress"
        return Outcome(Code.NO_REASSIGNMENT_IN_PROGRESS, message)
    back = partition._replace(replicas=partition.origin, adding=(), removing=())
    return _replace(partition, back, fleet, rules)


def finish(partition: Partition, fleet: Fleet, rules: Rules) -> Partition:
    """The partition without those that go, if all of the target are in sync and one of them can
    lead; else the same."""
    state = partition.state
    if state is None or not (partition.adding or partition.removing):
        return partition
    if not set(partition.target) <= set(state.in_sync):
        return partition
    done = partition._replace(replicas=partition.target, adding=(), removing=())
    replaced = _replace(partition, done, fleet, rules)
    return partition if isinstance(replaced, Outcome) else replaced


def _replace(
    before: Partition, after: Partition, fleet: Fleet, rules: Rules
) -> Partition | Outcome:
    """`after`, whose replicas are others, with a state that fits them.  A replica that has failed
    and goes may come again, in another directory."""
    failed = tuple(x for x in after.failed if x[0] in after.replicas)
    after = after._replace(failed=failed)
    state = before.state
    if state is None:
        return after
    in_sync = tuple(b for b in state.in_sync if b in after.replicas)
    if not in_sync:
        message = (
            "no replica that is in sync would stay, so an unclean election would be needed;"
            " start a broker that is"
        )
        return Outcome(Code.INVALID_REPLICA_ASSIGNMENT, message)
    leader = state.leader
    if leader not in in_sync and leader != NO_LEADER:
        ready = [b for b in in_sync if standing(before, b, fleet) is Standing.SAME]
        ordered = [b for b in after.target if b in ready] + ready
        ordered.sort(key=lambda b: b in fleet.leaving)
        if not ordered:
            message = "no replica that would stay is in sync and lives; start its broker"
            return Outcome(Code.INVALID_REPLICA_ASSIGNMENT, message)
        leader = ordered[0]
    renew = leader != NO_LEADER
    return change(after, fleet, rules, leader=leader, in_sync=in_sync, renew=renew)
