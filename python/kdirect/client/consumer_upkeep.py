"""What a consumer does besides handing out records: rebalances and their callbacks, commits, and
partitions that are new.

Owns: the subscription as it is now, what the group has given, and when to commit and to look for
topics.  A poll calls `_serve` where there is something of that to do; a thread of the member only
notes what is due (`_look_at_clock`).  The API and the waiting are `kdirect.client.consumer`'s.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from kdirect.client.arguments import OFFSET_INVALID, OFFSET_STORED
from kdirect.client.commits import Commits, OnCommit
from kdirect.client.connections import Handle
from kdirect.client.consumer_group import ConsumerMembership, check_protocol
from kdirect.client.direct_commits import DirectCommits
from kdirect.client.group import Membership
from kdirect.client.group_member import OUT, GroupMember
from kdirect.client.group_owner import GroupOwner
from kdirect.client.reading import Reading
from kdirect.client.subscription import Subscription
from kdirect.errors import ClosedError, KdirectError
from kdirect.model import EARLIEST_OFFSET, TopicPartition
from kdirect.wire.bell import Bell

log = logging.getLogger("kdirect.client")

SLICE_MS = 100.0  # longest single wait for the group
BESIDES_MS = 5.0  # the same while partitions are read
COMMIT_AGAIN_S = 0.2  # while the coordinator is looked for

Rebalance = Callable[[Any, list[TopicPartition]], None]  # the first is the consumer


class ConsumerUpkeep:
    """See the module.  One thread at a time, but for `_call`, `_activity` and `_look_at_clock`,
    which the thread of the member calls."""

    def __init__(
        self, session: Handle, settings: dict[str, Any], on_commit: OnCommit | None, views: bool
    ) -> None:
        self.settings = settings
        self._session = session
        self._environment = session.environment
        # Of a member: its thread tells the thread that polls of rebalances and what is due.
        self._bell = Bell() if settings["group.id"] else None
        self._reading = Reading(session, settings, self._bell, views=views)
        self._queue = self._reading.queue
        self._group_owner = GroupOwner(self)
        self._membership: GroupMember | None = None
        self._commits: Commits | None = None  # of a consumer with a group
        if settings["group.id"]:
            check_protocol(settings)
            kind = ConsumerMembership if settings["group.protocol"] == "consumer" else Membership
            self._membership = kind(session.cluster, settings, self._group_owner)
            self._commits = Commits(
                self._membership,
                self._reading,
                DirectCommits(session, self._membership, self._reading),
                auto_store=settings["enable.auto.offset.store"],
            )
        self._auto_commit = self._membership is not None and settings["enable.auto.commit"]
        # Subscribed topics that exist, with their partitions; None: no subscription.
        self._topics: dict[str, int] | None = None
        self._subscription: Subscription | None = None
        self._callbacks: tuple[Rebalance | None, ...] = (None, None, None)
        self._on_commit = on_commit
        self._commit_due = self._metadata_due = False
        self._next_commit = self._next_metadata = float("inf")
        self._given: list[TopicPartition] | None = None  # by the group, and not read yet
        self._attention = False  # the next poll has more to do than to hand out a record
        self._polls = 0
        self._waiting = False  # inside a poll: the group need not wonder
        self._in_callback = False
        self._closed = False
        self._pid = os.getpid()

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise ClosedError(
                "the consumer belongs to the process that was forked from",
                hint="make one in this process",
            )
        if self._closed:
            raise ClosedError("the consumer is closed", hint="make a new one")

    def _serve(self, timeout: float | None, *, idle: bool = True) -> None:
        """What a poll does besides handing out records: commits, rebalances, new partitions.
        `idle`: there is no record to hand out meanwhile."""
        self._check()
        self._attention = False
        membership = self._membership
        if self._commits is not None and self._commits.under_way:
            self._commits.settle(self._on_commit)
        if membership is None:
            if self._environment.monotonic() >= self._next_metadata:
                self._look_for_partitions()
            return
        if self._topics is None:
            self._commit_what_is_due()
            return
        if self._metadata_due or self._environment.monotonic() >= self._next_metadata:
            self._look_for_partitions()
        if membership.lost:
            log.warning("group %s: partitions lost: %s", membership.group_id, membership.lost)
            self._give_back(lost=True)
            self._join(membership)
        elif membership.rebalancing:
            if not membership.incremental:
                self._give_back(lost=False)
            self._join(membership)
        elif membership.state == OUT:
            self._join(membership)
        self._commit_what_is_due()  # not before: what is lost is others' to commit
        if not membership.settled and self._given is None:
            self._attention = True  # it may take longer
            self._given = membership.advance(self._patience_ms(timeout, idle))
        if self._given is not None:
            self._attention = True  # should it fail, the next poll tries again
            if membership.incremental:
                self._change(membership, self._given)
            else:
                self._give_out(self._given)

    def _join(self, membership: GroupMember) -> None:
        assert self._subscription is not None and self._topics is not None
        self._given = None  # of the generation before
        membership.join(self._topics, self._subscription.regex)

    def _patience_ms(self, timeout: float | None, idle: bool) -> float:
        """How long to wait for the group now."""
        left = SLICE_MS if timeout is None or timeout < 0 else min(SLICE_MS, timeout * 1000)
        if self._reading.partitions:  # which are read on meanwhile
            left = min(left, BESIDES_MS) if idle else 0.0
        return left

    def _change(self, membership: GroupMember, tps: list[TopicPartition]) -> None:
        """Bring what is read to what the group has given, partition by partition.  What is to be
        given back comes first: the group has to know of it before anything is taken."""
        before = self._reading.partitions
        gone = sorted(set(before) - set(tps))
        if gone:
            if self._auto_commit:
                self._try_to_commit("before partitions were given back")
            try:
                self._call_back(self._callbacks[1], gone)
            finally:
                self._release(gone)
                told_later = membership.gave_back(self._reading.partitions)
                self._given = None if told_later else self._given
            if told_later:
                return
        new = sorted(set(tps).difference(before))
        starts = self._starts(dict.fromkeys(new, OFFSET_STORED))
        if not membership.took(tps):
            self._given = None  # it says what has changed
            return
        self._reading.add(starts)
        self._given = None
        self._start_timers()
        if new or not before:
            self._call_back(self._callbacks[0], new)

    def _release(self, tps: list[TopicPartition]) -> None:
        self._reading.release(tps)
        if self._commits is not None:
            self._commits.keep(self._reading.partitions)

    def _give_out(self, tps: list[TopicPartition]) -> None:
        self._reading.assign(self._starts(dict.fromkeys(tps, OFFSET_STORED)))
        self._given = None
        self._start_timers()
        self._call_back(self._callbacks[0], tps)

    @property
    def _lost(self) -> bool:
        """Others may have the partitions already."""
        return self._membership is not None and bool(self._membership.lost)

    def _give_back(self, *, lost: bool) -> None:
        tps = self._reading.partitions
        if self._topics is not None and tps:
            if not lost and self._auto_commit:
                self._try_to_commit("before partitions were given back")
            try:
                self._call_back(
                    (self._callbacks[2] or self._callbacks[1]) if lost else self._callbacks[1], tps
                )
            finally:
                self._forget()
        else:
            self._forget()

    def _forget(self) -> None:
        self._given = None
        self._reading.assign({})
        if self._commits is not None:
            self._commits.keep(())

    def _call_back(self, callback: Rebalance | None, tps: list[TopicPartition]) -> None:
        if callback is not None:
            self._in_callback = True
            try:
                callback(self, tps)
            finally:
                self._in_callback = False

    def _starts(self, offsets: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
        """`offsets`, with the committed offset or what auto.offset.reset says where it is to be
        that."""
        out = dict(offsets)
        stored = [tp for tp, o in out.items() if o in (OFFSET_STORED, OFFSET_INVALID)]
        if not stored:
            return out
        committed = (
            self._commits.look_up(stored) if self._commits is not None else dict.fromkeys(stored)
        )
        for tp, offset in committed.items():
            out[tp] = self._reading.reset_offset() if offset is None else offset
        return out

    def _look_for_partitions(self) -> None:
        """Topics that match now, and partitions that were added: from a topic that grows nothing is
        missed."""
        self._metadata_due = False
        self._next_metadata = self._end_of("metadata.max.age.ms")
        if self._membership is not None and self._membership.finds_topics:
            return
        assert self._topics is not None and self._subscription is not None
        found = self._subscription.look_up(self._session.cluster, must_exist=False)
        if found == self._topics:
            return
        before = self._topics
        membership = self._membership
        if membership is None:
            reading = self._reading
            reading.release([tp for tp in reading.partitions if tp.topic not in found])
            reading.add(
                {
                    TopicPartition(name, i): EARLIEST_OFFSET
                    for name, count in found.items()
                    for i in range(before.get(name, 0), count)
                }
            )
        elif found.keys() != before.keys() or membership.is_leader:
            membership.rebalancing = True
        self._topics = found  # not before: should it fail, it is tried again

    # -- commits -----------------------------------------------------------------------------------

    def _commit(
        self, wanted: dict[TopicPartition, int], *, asynchronous: bool
    ) -> dict[TopicPartition, int] | None:
        """See `Consumer.commit`."""
        commits = self._commits
        assert commits is not None
        if not wanted:
            return None if asynchronous else {}
        if asynchronous:
            commits.send(wanted)
            return None
        commits.settle(self._on_commit, wait=True)
        commits.commit(wanted)
        return wanted

    def _commit_what_is_due(self) -> None:
        commits = self._commits
        if commits is None or not self._commit_due:
            return
        self._commit_due = False
        if self._membership is not None and not self._membership.is_reached():
            self._next_commit = self._environment.monotonic() + COMMIT_AGAIN_S
            return
        try:
            self._check()
            self._commit(commits.due(), asynchronous=True)
        except KdirectError as e:
            log.warning("auto-commit: %s", e)

    def _try_to_commit(self, when: str) -> None:
        assert self._commits is not None
        try:
            self._check()
            self._commit(self._commits.due(), asynchronous=False)
        except KdirectError as e:
            log.warning("offsets were not committed %s: %s", when, e)

    # -- timers ------------------------------------------------------------------------------------

    def _start_timers(self) -> None:
        if self._membership is not None and self._reading.partitions and self._auto_commit:
            self._next_commit = self._end_of("auto.commit.interval.ms")
            self._membership.start_thread()

    def _end_of(self, setting: str) -> float:
        """When the time of a setting in milliseconds is over."""
        milliseconds: float = self.settings[setting]
        return self._environment.monotonic() + milliseconds / 1000

    def _call(self) -> None:
        """Have the poll that waits, or the next one, `_serve`.  For the thread of the member."""
        self._attention = True
        if self._bell is not None:
            self._bell.ring()

    def _activity(self) -> int:
        """A number that moves as long as the consumer is polled."""
        if self._waiting:
            return -int(self._environment.monotonic() * 1e9)
        return self._polls + self._queue.popped

    def _look_at_clock(self, now: float) -> float:
        """Note what the next poll has to do by now; when to look again."""
        interval: float = self.settings["auto.commit.interval.ms"] / 1000
        commits = self._auto_commit and now >= self._next_commit
        if commits:
            self._next_commit = now + interval
            self._commit_due = True
        if now >= self._next_metadata:
            self._metadata_due = commits = True
        if not commits:
            return min(now + interval, self._next_commit, self._next_metadata)
        self._call()
        return now + min(interval, 1.0)  # a commit that could not be made is due again by then
