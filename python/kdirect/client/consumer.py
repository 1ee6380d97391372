"""`kdirect.Consumer`: records or Arrow batches from partitions that the caller names, or that a
consumer group gives out.

Owns: the calls, what they mean while partitions are the group's, and the waiting for records.  What
a poll does besides is `consumer_upkeep`'s: rebalances, commits that are due, new partitions.  Bytes
and positions are `reading`'s, the group's protocol is `group`'s.

Names and habits are confluent-kafka's: timeouts are **seconds** (None or negative: for ever), a
record is a `Message` with methods, offsets to commit are those of the next record.  What differs,
and why, is a table in docs/python-api.md; the rules that matter:

- What goes wrong is raised, never handed out as a message.  An error of one partition is raised
  once and sets that partition aside.
- A record counts as done when the next poll asks for another: that is what auto-commit commits.  A
  crash repeats records, and loses none.
- One thread at a time.  Callbacks run inside `poll`, `consume`, `poll_arrow`, `unsubscribe` and
  `close`, on the caller's thread.
- A consumer belongs to the process that made it: in a forked child every call is a ClosedError.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from kdirect.client.admin import TopicInfo
from kdirect.client.arguments import (
    OFFSET_INVALID,
    OFFSET_STORED,
    Offsets,
    as_offsets,
    as_partition,
    as_partitions,
    offset_after,
)
from kdirect.client.commits import OnCommit
from kdirect.client.connections import Handle, open_handle
from kdirect.client.consumer_upkeep import SLICE_MS, ConsumerUpkeep, Rebalance
from kdirect.client.lost_broker import LOST
from kdirect.client.message import Message
from kdirect.client.reader import LONGEST_WAIT_S
from kdirect.client.silence import LONGEST_LOOK_MS, SILENT_S, pause_s
from kdirect.client.subscription import Subscription
from kdirect.client.transaction import GroupMetadata
from kdirect.errors import (
    BrokerError,
    ConfigError,
    KdirectError,
    TimedOutError,
)
from kdirect.model import TopicPartition
from kdirect.options import CLIENT

log = logging.getLogger("kdirect.client")

LOOK_EVERY = 64  # of so many polls without time that find nothing, one looks whether brokers hang
TRIES = 3  # lost connections in a row before one is raised

_alive: weakref.WeakSet[Consumer] = weakref.WeakSet()


def _forked() -> None:
    for consumer in list(_alive):
        consumer._attention = True


os.register_at_fork(after_in_child=_forked)


class Consumer(ConsumerUpkeep):
    """Reads partitions.  `settings`: client settings (docs/options.md), or "host:port".

    ``subscribe(topics)`` with `group.id` shares the topics' partitions with the group's other
    members, whichever client they run; without it all partitions are read.  ``assign({tp:
    offset})`` names partitions itself.  Then `poll`, `consume`, `poll_arrow`, or iterate.
    `on_commit(error, offsets)` is called with what became of asynchronous commits.

    `views`: ``message.value()`` is a memoryview of the bytes where they lie, which stay as they are
    as long as it lives (see `Reader.batches`), and not a bytes object.  Values of up to 64 bytes
    are copied, as are all keys and headers.
    """

    def __init__(
        self,
        settings: Mapping[str, Any] | str,
        *,
        session: Handle | None = None,
        on_commit: OnCommit | None = None,
        views: bool = False,
    ) -> None:
        given = {"bootstrap.servers": settings} if isinstance(settings, str) else dict(settings)
        self.settings = CLIENT.resolve({k: v for k, v in given.items() if v is not None})
        self._owns_session = session is None  # and closes it
        session = session if session is not None else open_handle(self.settings, Handle)
        super().__init__(session, self.settings, on_commit, views)
        self._idle_polls = 0
        self._spin_s = self.settings["poll.spin.us"] / 1e6
        self._empty_since: float | None = None  # no record since
        self._popped = 0  # by the queue, then
        _alive.add(self)

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Message]:
        """Records for ever."""
        while True:
            message = self.poll(None)
            if message is not None:
                yield message

    # -- what is read ------------------------------------------------------------------------------

    def subscribe(
        self,
        topics: Iterable[str] | str,
        on_assign: Rebalance | None = None,
        on_revoke: Rebalance | None = None,
        on_lost: Rebalance | None = None,
    ) -> None:
        """Read these topics; a name that begins with ``^`` is a regular expression.  Replaces the
        subscription there was.

        The callbacks get (consumer, partitions): `on_assign` when partitions were given out and
        before their first record (`seek` works in it), `on_revoke` before they are given back
        (positions may still be committed), `on_lost` when others have them already (default:
        `on_revoke`).  UnknownTopicError for a name that does not exist.
        """
        self._check()
        membership = self._membership
        elsewhere = membership is not None and membership.finds_topics
        subscription = Subscription(topics, elsewhere=elsewhere)
        self.unsubscribe()
        self._subscription = subscription
        self._callbacks = (on_assign, on_revoke, on_lost)
        self._topics = subscription.look_up(self._session.cluster, must_exist=True)
        self._next_metadata = self._end_of("metadata.max.age.ms")
        if membership is not None:
            self._join(membership)
        else:
            self._give_out(
                [
                    TopicPartition(name, i)
                    for name, count in self._topics.items()
                    for i in range(count)
                ]
            )

    def unsubscribe(self) -> None:
        """Give all partitions back, and leave the group."""
        self._check()
        self._give_back(lost=self._lost)
        if self._topics is not None and self._membership is not None:
            self._membership.leave()
        self._topics = None

    def assign(self, partitions: Offsets) -> None:
        """Read exactly these partitions.  ``{tp: offset}``, or partitions without offsets (also
        confluent-kafka's TopicPartition): those start at the group's committed offset, else as
        auto.offset.reset says.  Offsets: -1 latest, -2 earliest.  Inside `on_assign` it sets where
        the partitions given out start; elsewhere it ends a subscription, and errors of a partition
        are raised here."""
        self._check()
        offsets = as_offsets(partitions)
        if not self._in_callback and self._topics is not None:
            self.unsubscribe()
        elif self._in_callback and self._membership is not None and self._membership.incremental:
            raise ConfigError(
                "assign in a callback of a member whose partitions come and go one by one",
                hint="use incremental_assign and incremental_unassign",
            )
        self._reading.assign(self._starts(offsets))
        if self._commits is not None:
            self._commits.keep(offsets)
        self._start_timers()
        if not self._in_callback:
            self._reading.enter()
            self._reading.tell()

    def unassign(self) -> None:
        self.assign({})

    def incremental_assign(self, partitions: Offsets) -> None:
        """Read these too."""
        self._check()
        self._reading.add(self._starts(as_offsets(partitions)))
        self._start_timers()

    def incremental_unassign(self, partitions: Iterable[Any]) -> None:
        """Stop reading these."""
        self._check()
        self._reading.release(as_partitions(partitions))

    def assignment(self) -> list[TopicPartition]:
        """The partitions read now."""
        return self._reading.partitions

    def position(self, partition: Any) -> int:
        """Offset of the next record that will be handed out."""
        return self._reading.next_offset(as_partition(partition))

    def seek(self, partition: Any, offset: int | None = None) -> None:
        """Go on at `offset` (-1 latest, -2 earliest; None: ``partition.offset``) on an assigned
        partition, also in `on_assign`."""
        self._check()
        if offset is None:
            offset = getattr(partition, "offset", None)
        if not isinstance(offset, int):
            raise ConfigError(
                f"seek of {partition} to {offset!r}",
                hint="give an offset, -1 (latest) or -2 (earliest)",
            )
        self._reading.seek(as_partition(partition), offset)

    def pause(self, partitions: Iterable[Any]) -> None:
        """Hand out no records of these until `resume`; nothing in hand is lost, and the group keeps
        its member."""
        self._reading.pause(as_partitions(partitions))

    def resume(self, partitions: Iterable[Any]) -> None:
        self._reading.resume(as_partitions(partitions))

    def paused(self) -> list[TopicPartition]:
        return sorted(self._reading.paused)

    # -- records -----------------------------------------------------------------------------------

    def poll(self, timeout: float | None = None) -> Message | None:
        """The next record, or None when there is none within `timeout` seconds (None or negative:
        wait for ever)."""
        if not self._attention:
            message = self._queue.pop()
            if message is not None:
                return message
            if self._membership is None and self._topics is None:
                message = self._reading.next_alone()
                if message is not None:
                    return message
                if timeout == 0 and (alone := self._reading.alone) is not None and alone.idle:
                    self._idle_polls += 1
                    looks = self._idle_polls % LOOK_EVERY == 0
                    if not (looks and self._session.cluster.has_several_brokers):
                        return None
        return self._queue.pop() if self._wait(self._pull, timeout) else None

    def consume(self, num_messages: int = 1, timeout: float | None = None) -> list[Message]:
        """Up to `num_messages` records: waits up to `timeout` seconds for the first one only (None
        or negative: for ever), then takes what is at hand, for no longer than `timeout` again, or
        0.1 seconds if that is longer.  What was taken is returned: errors, commits and rebalances
        that come meanwhile are the next call's."""
        if num_messages < 1:
            raise ConfigError(f"consume of {num_messages} messages", hint="give at least 1")
        if not self._wait(self._pull, timeout):
            return []
        until = float("inf")
        if timeout is not None and timeout >= 0:
            until = self._environment.monotonic() + max(timeout, SLICE_MS / 1000)
        out: list[Message] = self._queue.take(num_messages)
        while len(out) < num_messages and self._environment.monotonic() < until:
            try:
                if not self._pull(0.0):
                    break
            except KdirectError as e:
                log.info("%d records are handed out before the next call meets: %s", len(out), e)
                if isinstance(e, LOST):
                    self._reading.lost()
                break
            except BaseException:  # a signal's handler raised: nobody gets them
                self._reading.rewind(out)
                raise
            out += self._queue.take(num_messages - len(out))
        return out

    def poll_arrow(
        self,
        timeout: float | None = None,
        *,
        max_bytes: int = 4 << 20,
        max_rows: int = 1 << 20,
        include_headers: bool = False,
        views: bool = False,
    ) -> pa.RecordBatch | None:
        """Records of one partition as columns (key, value, topic, partition, offset, timestamp,
        timestampType, and headers on demand), about `max_bytes` or `max_rows` at most, or None when
        there are none within `timeout` seconds (None or negative: wait for ever). May be mixed with
        `poll`.

        `views`: keys, values and values of headers are `binary_view` columns over the bytes where
        they lie, without a copy; see `Reader.batches`."""
        found: list[pa.RecordBatch] = []

        def take(wait_ms: float) -> bool:
            batch = self._reading.pull_arrow(
                wait_ms,
                max_bytes=max_bytes,
                max_rows=max_rows,
                include_headers=include_headers,
                views=views,
            )
            if batch is not None:
                found.append(batch)
            return batch is not None

        return found[0] if self._wait(take, timeout) else None

    def _pull(self, wait_ms: float) -> bool:
        return not self._queue.empty or self._reading.pull(wait_ms)

    def _wait(self, take: Callable[[float], bool], timeout: float | None) -> bool:
        """Until `take` got something, the time is over, or there is an error to tell.  Commits
        positions and gives partitions back: nothing may have been taken that was not returned yet.
        """
        self._polls += 1
        self._waiting = True
        try:
            return self._go_on(take, timeout)
        finally:
            self._waiting = False

    def _go_on(self, take: Callable[[float], bool], timeout: float | None) -> bool:
        reading = self._reading
        if (
            self._closed
            or self._attention
            or self._membership is not None
            or self._topics is not None
        ):
            self._serve(timeout, idle=False)
        deadline = None
        failures = 0
        if self._popped != self._queue.popped:
            self._popped = self._queue.popped
            self._empty_since = None
        left_ms = began = 0.0
        while True:
            try:
                if take(min(left_ms, LONGEST_LOOK_MS)):
                    self._empty_since = None
                    return True
                if not reading.searching:
                    failures = 0
            except LOST as e:
                failures += 1
                reading.lost()
                if failures > TRIES or self._session.closed or isinstance(e, TimedOutError):
                    raise
                log.info("reading goes on after: %s", e)
                continue
            if reading.untold or reading.failed:
                reading.tell()
            now = self._environment.monotonic()
            if deadline is None:
                if timeout == 0:
                    return False
                deadline = float("inf") if timeout is None or timeout < 0 else now + timeout
            if now >= deadline:
                return False
            left_ms = (deadline - now) * 1000
            if self._attention or now >= self._next_metadata:
                self._serve(left_ms / 1000)
                continue
            if self._empty_since is None:
                self._empty_since = now
            empty_s = now - self._empty_since
            spun = empty_s >= self._spin_s or not reading.reads
            if spun and now - began < LONGEST_WAIT_S:  # else it has waited already, over TCP
                told = reading.wait(left_ms) if empty_s >= SILENT_S else None
                if told is None:
                    self._environment.sleep(min(pause_s(empty_s), deadline - now))
                elif told:
                    self._empty_since = None
                now = self._environment.monotonic()
            elif not spun:
                os.sched_yield()  # who brings the next record may want this very processor
            began = now

    # -- offsets -----------------------------------------------------------------------------------

    def commit(
        self,
        message: Message | None = None,
        offsets: Offsets | None = None,
        asynchronous: bool = True,
    ) -> dict[TopicPartition, int] | None:
        """Commit for the group: the record `message` as done, or `offsets` (of the next records),
        or, with neither, the positions.

        Asynchronous: sent now, answered by `on_commit` inside a later poll.  Otherwise returns what
        was committed; BrokerError when the group has been rebalanced meanwhile, or this consumer is
        not a member now that it subscribed.
        """
        self._check()
        commits = self._commits
        if commits is None:
            raise ConfigError("commit without group.id", hint="set group.id")
        if message is not None and offsets is not None:
            raise ConfigError("commit of a message and of offsets", hint="give one of them")
        if message is not None:
            wanted = offset_after(message)
        elif offsets is not None:
            wanted = as_offsets(offsets)
            for tp, offset in wanted.items():
                if offset < 0:
                    raise ConfigError(
                        f"commit of offset {offset} of {tp}",
                        hint="give the offset of the next record",
                    )
        else:
            wanted = commits.due()
        return self._commit(wanted, asynchronous=asynchronous)

    def store_offsets(self, message: Message | None = None, offsets: Offsets | None = None) -> None:
        """Mark as done what auto-commit, or `commit()`, shall commit; with
        enable.auto.offset.store=false only."""
        self._check()
        if self.settings["enable.auto.offset.store"]:
            raise ConfigError(
                "store_offsets with enable.auto.offset.store=true",
                hint="set it to false: then only stored offsets are committed",
            )
        given = offset_after(message) if message is not None else as_offsets(offsets or {})
        if self._commits is not None:
            self._commits.store(given)

    def committed(
        self, partitions: Iterable[Any], timeout: float | None = None
    ) -> dict[TopicPartition, int | None]:
        """The group's committed offsets, None where there is none.  `timeout` in seconds; None or
        negative: request.timeout.ms."""
        self._check()
        if self._membership is None:
            raise ConfigError("committed without group.id", hint="set group.id")
        return self._membership.committed(
            as_partitions(partitions), None if timeout is None or timeout < 0 else timeout * 1000
        )

    def get_watermark_offsets(self, partition: Any) -> tuple[int, int]:
        """(log start offset, high watermark) now; over RDMA one READ."""
        self._check()
        tp = as_partition(partition)
        return self._session.watermarks([tp])[tp]

    def offsets_for_times(self, times_ms: Offsets) -> dict[TopicPartition, int | None]:
        """``{tp: ms since 1970}`` -> offset of the first record of that time or later, None: there
        is no such record."""
        self._check()
        return self._session.offsets_for_times(as_offsets(times_ms))

    def list_topics(self) -> dict[str, TopicInfo]:
        """All topics that are not internal."""
        self._check()
        return self._session.admin.list_topics()

    def consumer_group_metadata(self) -> GroupMetadata:
        """This member of its group, for `Producer.send_offsets_to_transaction`; ask for it with
        each transaction.  ConfigError without a group."""
        self._check()
        if self._membership is None:
            raise ConfigError("a consumer without group.id has no group", hint="set group.id")
        return self._membership.metadata

    def memberid(self) -> str | None:
        """This member's id in its group, as the coordinator gave it; None outside of a group."""
        return self._membership.member_id or None if self._membership is not None else None

    # -- the end -----------------------------------------------------------------------------------

    def statistics(self) -> dict[str, int]:
        """What was read, by path, and `messages` handed out one by one; see docs/metrics.md."""
        out = {"messages": self._queue.popped} | self._reading.statistics()
        if self._membership is not None:
            out["rebalances"] = self._membership.rebalances
        if self._commits is not None:
            out["direct_commits"] = self._commits.direct_commits
        return out

    def close(self) -> None:
        """Commit (with enable.auto.commit), call `on_revoke`, leave the group, give access back.
        More than once is nothing."""
        if self._closed:
            return
        if self._pid != os.getpid():
            self._closed = self._attention = True
            return
        try:
            if self._topics is None and self._auto_commit and self._reading.partitions:
                self._try_to_commit("at the end")
            elif self._topics is not None:
                self._give_back(lost=self._lost)
            if self._commits is not None:
                self._commits.settle(self._on_commit, wait=True)
        finally:
            self._closed = self._attention = True
            if self._commits is not None:
                self._commits.close()
            if self._membership is not None:
                self._membership.close()
            self._reading.close()
            if self._bell is not None:
                self._bell.close()
            if self._owns_session:
                self._session.close()


__all__ = ["OFFSET_INVALID", "OFFSET_STORED", "BrokerError", "Consumer"]
