"""Five mistakes that a replication like this can have, to be planted one at a time.

The search and the simulation have to find each.  Every one of them is a rule left out or two steps
exchanged in the machines of `kdirect.cluster`, or in what the model world does with a completion.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from kdirect.cluster import following_replica, leading_replica
from kdirect.cluster.following_replica import EpochEnd, Fenced, Follow, Following, Phase
from kdirect.cluster.leading_replica import Confirmed, Follower, Leading
from tests.cluster import moves
from tests.cluster.effects import lead
from tests.cluster.world import World, Write


def _joins_without_the_epochs_start(leading: Leading, follower: Follower) -> bool:
    registered = (follower.broker, follower.incarnation) in leading.registered
    return follower.linked and follower.end >= leading.high_watermark and registered


@contextmanager
def epoch_start_left_out() -> Iterator[None]:
    """A follower joins when it has reached the high watermark, wherever the epoch starts."""
    with mock.patch.object(leading_replica, "may_join", _joins_without_the_epochs_start):
        yield


def _smaller(leading: Leading) -> tuple[int, ...]:
    in_sync = {*leading.state.in_sync}
    return tuple(sorted(in_sync if leading.proposed is None else in_sync & {*leading.proposed}))


@contextmanager
def smaller_in_sync_used() -> Iterator[None]:
    """A leader that has proposed a change counts the replicas that are in both sets."""
    with mock.patch.object(Leading, "counted", property(_smaller)):
        yield


_answered = following_replica._answered


def _answered_by_anybody(following: Following, event: EpochEnd) -> Any:
    return _answered(following, event._replace(leader_epoch=following.epoch))


@contextmanager
def answer_of_another_epoch_used() -> Iterator[None]:
    """A replica truncates by what a leader of another epoch answered."""
    with mock.patch.object(following_replica, "_answered", _answered_by_anybody):
        yield


_fence = following_replica._fence
_compare = following_replica._compare
_start = following_replica._start


def _compare_first(following: Following, event: Follow) -> Any:
    if event.leader in (following.broker, -1):
        return _fence(following, event)
    following = following._replace(leader=event.leader, epoch=event.epoch, told=0, next=None)
    return _compare(following)


def _then_fence(following: Following) -> Any:
    fence = following_replica.Fence(following.epoch)
    return following._replace(phase=Phase.FENCING), (fence,)


def _then_follow(following: Following, event: Fenced) -> Any:
    if following.phase is not Phase.FENCING or event.epoch < following.epoch:
        return following, ()
    if following.leader in (following.broker, -1):
        return _fenced(following, event)
    return _start(following._replace(end=event.end, last_epoch=event.last_epoch))


_fenced = following_replica._fenced


@contextmanager
def revoked_after_truncation() -> Iterator[None]:
    """A replica compares and truncates, and takes the old leader's access away after that."""
    with (
        mock.patch.object(following_replica, "_fence", _compare_first),
        mock.patch.object(following_replica, "_start", _then_fence),
        mock.patch.object(following_replica, "_fenced", _then_follow),
    ):
        yield


def _counted_when_complete(world: World, write: Write) -> World:
    leading = world.replicas[write.leader].leading
    if leading is None or leading.state.leader_epoch != write.epoch:
        return world
    end = write.place + len(write.records)
    return lead(world, write.leader, Confirmed(write.to, write.incarnation, write.epoch, end))


@contextmanager
def completion_counted() -> Iterator[None]:
    """A leader takes the completion of a WRITE for the follower's word that it has the records."""
    with mock.patch.object(moves, "completed", _counted_when_complete):
        yield


@contextmanager
def restarted_leader_leads_on() -> Iterator[None]:
    """A broker leads in the epoch in which it led before it restarted."""
    with mock.patch.object(moves, "leads", lambda state, broker, _: state.leader == broker):
        yield


def _least_end(leading: Leading) -> int:
    ends = [f.end for f in leading.followers if f.broker in leading.counted]
    return max(leading.high_watermark, min([leading.end, *ends]))


@contextmanager
def too_few_in_sync_show() -> Iterator[None]:
    """The high watermark moves on while fewer than ``min.insync.replicas`` are in sync."""
    with mock.patch.object(leading_replica, "high_watermark_of", _least_end):
        yield


MISTAKES = {
    mistake.__name__: mistake
    for mistake in (
        epoch_start_left_out,
        smaller_in_sync_used,
        answer_of_another_epoch_used,
        revoked_after_truncation,
        completion_counted,
    )
}

# Further ones, which need crashes: only the simulation looks for them.
AFTER_CRASHES = {
    mistake.__name__: mistake for mistake in (restarted_leader_leads_on, too_few_in_sync_show)
}
