"""Who leads a partition, and who is in sync, when brokers come and go.  Pure functions.

**Who may lead**, the first of these that there is; each in the order of the assignment:

1. a broker that is in sync, lives, and is the process that was in sync; one that is shutting down
   only if there is no other;
2. one that was in sync, died and came back with all that it had confirmed;
3. one that is eligible (KIP-966), lives, and has all that it had confirmed;
4. one that was in sync and came back after it may have lost records, when the same is true of all
   that were in sync or eligible: no better one will come;
5. if unclean election is allowed for the topic: any that lives.

A new leader has a new leader epoch.

**Who is in sync.**  A broker leaves when it dies, when its log directory fails, when it comes back
as another process (the leader takes it in again when it has caught up), and when it shuts down.  If
all died, all stay: each of them has every committed record, and without a leader nothing more is
committed.  (Kafka keeps the one that died last.)  The set is never empty.

**Eligible** are those that left while fewer than ``min.insync.replicas`` stay.  While that is so
the high watermark stands still, so they keep having every committed record.  When enough are in
sync again, nobody is eligible, for records may be committed without them.  An unclean election
ends it too.  Who comes back after it may have lost records is not eligible any more.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from kdirect.cluster.partition_state import NO_INCARNATION, NO_LEADER, PartitionState
from kdirect.model import TopicPartition

LOST = 0  # in place of the incarnation that had a replica's records, where they are gone


class LiveBroker(NamedTuple):
    """A broker that is registered.  `intact_since`: its logs have all that its processes confirmed
    from this incarnation on; those of `lost` from a later one: see `note_lost`."""

    incarnation: int
    rack: str | None = None
    intact_since: int = 0
    lost: Mapping[TopicPartition, int] = {}


class Fleet(NamedTuple):
    """The brokers that live, and those among them that are shutting down."""

    live: Mapping[int, LiveBroker]
    leaving: frozenset[int] = frozenset()


class Rules(NamedTuple):
    """A topic's, as far as elections go."""

    min_in_sync: int = 1
    unclean: bool = False


class Partition(NamedTuple):
    """What the controller knows of one.  `replicas` are all; those of `adding` and `removing` come
    and go in a reassignment.  `state`: None until the partition had its first leader, whose epoch
    is `first_epoch`.  `incarnations`: of those in sync or eligible, as far as known.  `failed`:
    (broker, incarnation) of processes whose replica cannot be used, because the directory that it
    lies in has failed; another process of that broker may have it mended, and lack records that
    were confirmed."""

    replicas: tuple[int, ...]
    adding: tuple[int, ...] = ()
    removing: tuple[int, ...] = ()
    state: PartitionState | None = None
    incarnations: tuple[tuple[int, int], ...] = ()
    first_epoch: int = 0
    failed: tuple[tuple[int, int], ...] = ()

    @property
    def target(self) -> tuple[int, ...]:
        """The replicas when the reassignment is done."""
        return tuple(b for b in self.replicas if b not in self.removing)

    @property
    def origin(self) -> tuple[int, ...]:
        """The replicas before the reassignment."""
        return tuple(b for b in self.replicas if b not in self.adding)


class How(enum.Enum):
    """Why a broker may lead: see the module."""

    IN_SYNC = "it is in sync"
    RETURNED = "it was in sync and came back"
    ELIGIBLE = "it is eligible"
    LAST = "it was in sync and may have lost records, and there is no better one"
    UNCLEAN = "unclean election is allowed"


class Standing(enum.Enum):
    """What became of a broker that was in sync or eligible."""

    SAME = "the process lives that had the records"
    RETURNED = "another process lives; the records are there"
    LOSSY = "another process lives; records may be lost"
    DEAD = "no process lives, or its replica has failed"


def has_failed(partition: Partition, broker: int, there: LiveBroker) -> bool:
    """Can the broker, which lives as `there` says, not use its replica?"""
    return (broker, there.incarnation) in partition.failed


def standing(partition: Partition, broker: int, fleet: Fleet) -> Standing:
    """What became of it since it was known to have every committed record."""
    there = fleet.live.get(broker)
    if there is None or has_failed(partition, broker, there):
        return Standing.DEAD
    known = dict(partition.incarnations).get(broker, NO_INCARNATION)
    if known in (NO_INCARNATION, there.incarnation):
        return Standing.SAME
    # What a process had not synced when its disk failed may be gone with it.
    failed = dict(partition.failed).get(broker, NO_INCARNATION)
    intact = known != LOST and known >= there.intact_since and known > failed
    return Standing.RETURNED if intact else Standing.LOSSY


def note_lost(tp: TopicPartition, partition: Partition, fleet: Fleet) -> Partition:
    """The partition without the belief that a broker's process has its records, where that broker
    says that this replica was lost since: it comes back as one that may have lost records."""
    state = partition.state
    if state is None:
        return partition
    known = dict(partition.incarnations)
    for b in (*state.in_sync, *state.eligible):
        there = fleet.live.get(b)
        since = there.lost.get(tp) if there is not None else None
        if since is not None and known.get(b, LOST) < since:
            known[b] = LOST
    incarnations = tuple(sorted(known.items()))
    return (
        partition
        if known == dict(partition.incarnations)
        else partition._replace(incarnations=incarnations)
    )


def candidates(partition: Partition, fleet: Fleet, rules: Rules) -> Iterator[tuple[int, How]]:
    """Who may lead, the best first."""
    state = partition.state
    if state is None:
        return
    stand = {b: standing(partition, b, fleet) for b in (*state.in_sync, *state.eligible)}
    in_sync = [b for b in partition.replicas if b in state.in_sync]
    same = [b for b in in_sync if stand[b] is Standing.SAME]
    yield from ((b, How.IN_SYNC) for b in same if b not in fleet.leaving)
    yield from ((b, How.IN_SYNC) for b in same if b in fleet.leaving)
    yield from ((b, How.RETURNED) for b in in_sync if stand[b] is Standing.RETURNED)
    for b in partition.replicas:
        if b in state.eligible and stand[b] in (Standing.SAME, Standing.RETURNED):
            yield b, How.ELIGIBLE
    if all(s is Standing.LOSSY for s in stand.values()):
        yield from ((b, How.LAST) for b in in_sync)
    if rules.unclean:
        yield from (
            (b, How.UNCLEAN)
            for b in partition.replicas
            if b in fleet.live and not has_failed(partition, b, fleet.live[b])
        )


def review(partition: Partition, fleet: Fleet, rules: Rules) -> Partition:
    """The partition after the brokers' coming and going; the same if nothing changes."""
    state = partition.state
    if state is None:
        return _first(partition, fleet)
    same = [b for b in state.in_sync if standing(partition, b, fleet) is Standing.SAME]
    staying = tuple(b for b in same if b not in fleet.leaving)
    if state.leader in staying:
        if staying == state.in_sync:
            return _forget_lossy(partition, fleet)
        return change(partition, fleet, rules, leader=state.leader, in_sync=staying)
    chosen, how = next(candidates(partition, fleet, rules), (NO_LEADER, None))
    if how is How.IN_SYNC:
        in_sync = staying if chosen in staying else tuple(same)
        if (chosen, in_sync) == (state.leader, state.in_sync):
            return partition  # it is shutting down, and nobody can take over
        return change(partition, fleet, rules, leader=chosen, in_sync=in_sync)
    if how is not None:
        return change(partition, fleet, rules, leader=chosen, in_sync=(chosen,), how=how)
    return _without_leader(partition, fleet, rules)


def _first(partition: Partition, fleet: Fleet) -> Partition:
    """The first state of a new partition: all replicas that live are in sync."""
    live = tuple(b for b in partition.replicas if b in fleet.live)
    leader = next((b for b in live if b not in fleet.leaving), live[0] if live else NO_LEADER)
    if leader == NO_LEADER:
        return partition
    incarnations = tuple((b, fleet.live[b].incarnation) for b in sorted(live))
    incarnation = fleet.live[leader].incarnation
    state = PartitionState(leader, partition.first_epoch, live, 0, incarnation=incarnation)
    return partition._replace(state=state, incarnations=incarnations, first_epoch=0)


def _forget_lossy(partition: Partition, fleet: Fleet) -> Partition:
    """Take those out of the eligible that came back after they may have lost records."""
    state = partition.state
    assert state is not None
    eligible = tuple(
        b for b in state.eligible if standing(partition, b, fleet) is not Standing.LOSSY
    )
    if eligible == state.eligible:
        return partition
    kept = tuple((b, n) for b, n in partition.incarnations if b in (*state.in_sync, *eligible))
    return partition._replace(state=state._replace(eligible=eligible), incarnations=kept)


def _without_leader(partition: Partition, fleet: Fleet, rules: Rules) -> Partition:
    """Nobody may lead: wait for one of those that have every committed record."""
    state = partition.state
    assert state is not None
    stand = {b: standing(partition, b, fleet) for b in (*state.in_sync, *state.eligible)}
    intact = tuple(b for b in state.in_sync if stand[b] is not Standing.LOSSY)
    # The high watermark stood still: what is eligible has as much as those in sync had.
    waiting = intact or tuple(b for b in state.eligible if stand[b] is not Standing.LOSSY)
    in_sync = waiting or state.in_sync
    if state.leader == NO_LEADER and in_sync == state.in_sync:
        return _forget_lossy(partition, fleet)
    return change(partition, fleet, rules, leader=NO_LEADER, in_sync=in_sync)


def change(
    partition: Partition,
    fleet: Fleet,
    rules: Rules,
    *,
    leader: int,
    in_sync: Iterable[int],
    how: How | None = None,
    renew: bool = False,
) -> Partition:
    """The partition with this leader and these in sync; the eligible follow from them.  The leader
    epoch grows if the leader is another one, or another process (`how`), or if `renew` says so."""
    state = partition.state
    assert state is not None
    in_sync = tuple(in_sync)
    eligible: tuple[int, ...] = ()
    if how is not How.UNCLEAN and len(in_sync) < min(rules.min_in_sync, len(partition.target)):
        eligible = tuple(
            b
            for b in dict.fromkeys((*state.in_sync, *state.eligible))
            if b not in in_sync
            and b in partition.replicas
            and standing(partition, b, fleet) is not Standing.LOSSY
        )
    known = dict(partition.incarnations)
    for b in (*in_sync, *eligible):
        # Of others than the one elected, the process that had the records stays known.
        if b in fleet.live and (b not in known or (b == leader and how is not None)):
            known[b] = fleet.live[b].incarnation
    kept = tuple(sorted((b, n) for b, n in known.items() if b in (*in_sync, *eligible)))
    renewed = renew or how is not None or leader != state.leader
    new = PartitionState(
        leader,
        state.leader_epoch + renewed,
        in_sync,
        state.version,
        eligible,
        dict(kept).get(leader, NO_INCARNATION),
    )
    return partition._replace(state=new, incarnations=kept)
