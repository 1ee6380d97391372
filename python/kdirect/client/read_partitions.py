"""The partitions a consumer reads: a cursor for each, where each goes on, and what went wrong.

Owns: the cursors, paused partitions, partitions whose broker was lost, and errors that concern one
partition alone.  Which path brings a partition's bytes is `read_paths`', where it is read is its
cursor's.  How bytes become records, and whose turn it is, is `kdirect.client.reading`'s, which
stands on this.

Invariants:

- The next offset of a partition is that of the next record to hand out; it moves only when a record
  was handed out, or on `seek`.
- Nothing READ and checked is thrown away by pausing: what is in hand is kept until the partition is
  resumed.
- A partition with an error of its own (unknown topic, offset out of range, a broken batch) is set
  aside; the others go on.  The error is raised once, and again only when nothing else is left to
  read; `seek`, `assign` and `resume` take the partition up again.
- A broker that is lost takes down its own partitions only: they wait at their offsets while it is
  looked for where nobody waits (`lost_broker`), and are entered again once it was reached.  A loss
  is logged once.  It is an error for the caller only while no other partition is read, and then
  after each search that was in vain.

One thread at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from kdirect.client.cold import cold_reads
from kdirect.client.cursor import Cursor, DirectCursor, TcpCursor
from kdirect.client.direct import DirectFetcher
from kdirect.client.lost_broker import LOST, LostPartitions, as_moved, has_moved
from kdirect.client.message import Message, MessageQueue
from kdirect.client.read_paths import ReadPaths
from kdirect.client.starting_offsets import OffsetLookup, resolve, resolve_reached
from kdirect.client.tcp_multi_fetch import TcpRound
from kdirect.client.truncation import ReadEpochs
from kdirect.client.turns import Turns
from kdirect.errors import ConfigError, KdirectError, OffsetOutOfRangeError
from kdirect.model import EARLIEST_OFFSET, LATEST_OFFSET, TopicPartition
from kdirect.wire.bell import Bell

log = logging.getLogger("kdirect.client")

MOVED_AGAIN_S = 0.02  # after another broker was to be asked, or the same one again
PATIENCE_MS = 2000.0  # with a broker that is asked where cold records are
ENTER_AGAIN_S = 0.5  # after partitions of a broker that answered could not be entered


class ReadPartitions:
    """See the module.  `settings`: rows of the client table; `bell` ends a wait; `views`: see
    `Consumer`."""

    def __init__(
        self,
        session: OffsetLookup,
        settings: Mapping[str, Any],
        bell: Bell | None = None,
        *,
        views: bool = False,
    ) -> None:
        # Messages of the partition being handed out; the same object for the consumer's life.
        self.queue = MessageQueue(views)
        self.paused: set[TopicPartition] = set()
        self.failed: dict[TopicPartition, KdirectError] = {}
        self.untold: list[KdirectError] = []
        self.paths = ReadPaths(
            session,
            settings,
            lambda: TcpRound(session.cluster, settings, bell),
            besides=session.environment,
            cold=cold_reads(session, settings, session.environment, patience_ms=PATIENCE_MS),
        )
        # Of the one partition there is, once it was polled: polls may go to it directly.
        self.alone: DirectCursor | None = None
        self._session = session
        self._reset: str = settings["auto.offset.reset"]
        # Where each partition is read, after what is in hand.  One without a path has a plain
        # `Cursor`, and is in `_stale` or `failed`.
        self._cursors: dict[TopicPartition, Cursor] = {}
        self._stale: set[TopicPartition] = set()  # to be entered where their cursors are
        self._lost = LostPartitions(session.environment)  # of those: their broker is looked for
        self._epochs = ReadEpochs(session.cluster)
        self._topic_ids: dict[str, str] = {}  # of topics whose partitions were entered
        self._held: dict[TopicPartition, MessageQueue] = {}
        self._held_again: list[TopicPartition] = []  # of `_held`, those that were resumed
        self._turns = Turns()  # of those that are read by READs; others drop out in passing

    def __contains__(self, tp: TopicPartition) -> bool:
        return tp in self._cursors

    @property
    def partitions(self) -> list[TopicPartition]:
        """Those that are read."""
        return list(self._cursors)

    @property
    def reads(self) -> bool:
        """Are there partitions whose records READs bring?"""
        return len(self.paths.direct) > 0

    # -- what is read ------------------------------------------------------------------------------

    def assign(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Read exactly these partitions, from these offsets (-1 latest, -2 earliest).  Those that
        stay where they are go on undisturbed."""
        resolved, lost = self._resolve_reached(offsets)
        self.alone = None
        self.release([tp for tp in self._cursors if tp not in resolved])
        for tp, offset in resolved.items():
            if tp not in self._cursors or self.next_offset(tp) != offset or tp in self.failed:
                self._move(tp, offset)
        self._lose_each(lost)

    def add(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Read these too."""
        self.alone = None
        resolved, lost = self._resolve_reached(offsets)
        for tp, offset in resolved.items():
            self._move(tp, offset)
        self._lose_each(lost)

    def release(self, tps: Iterable[TopicPartition]) -> None:
        """Stop reading these."""
        self.alone = None
        tps = [tp for tp in tps if tp in self._cursors]
        for tp in tps:
            self._drop_messages(tp)
            del self._cursors[tp]
            self.paused.discard(tp)
            self.failed.pop(tp, None)
            self._stale.discard(tp)
            self._lost.discard(tp)
            self._epochs.forget(tp)
        self.paths.release(tps)
        self._forget_closed()

    def seek(self, tp: TopicPartition, offset: int) -> None:
        """Go on at `offset` (-1, -2) on this partition."""
        if tp not in self._cursors:
            raise ConfigError(
                f"{tp} is not assigned",
                hint="assign it, or seek in on_assign once the group has given it out",
            )
        self._move(tp, self.resolve({tp: offset})[tp])

    def next_offset(self, tp: TopicPartition) -> int:
        """Offset of the next record that will be handed out; -1 or -2 for a partition that begins
        at its latest or earliest offset, while its broker was not reached yet."""
        if tp not in self._cursors:
            raise ConfigError(f"{tp} is not assigned", hint="ask for a partition of assignment()")
        if self._in_hand(tp):
            return self.queue.next_offset  # type: ignore[no-any-return]
        held = self._held.get(tp)
        where = held if held is not None else self._cursors[tp]
        return where.next_offset  # type: ignore[no-any-return]

    def pause(self, tps: Iterable[TopicPartition]) -> None:
        for tp in tps:
            self._known(tp)
            self.alone = None
            self.paused.add(tp)
            if self._in_hand(tp):
                self._held[tp] = self.queue.detach()
            if type(self._cursors[tp]) is TcpCursor:
                self.paths.tcp.pause([tp])

    def resume(self, tps: Iterable[TopicPartition]) -> None:
        for tp in tps:
            self._known(tp)
            self.paused.discard(tp)
            if self.failed.pop(tp, None) is not None:
                self._stale.add(tp)
            if tp in self._held:
                self._held_again.append(tp)
            self._turns.give(tp)
            if type(self._cursors[tp]) is TcpCursor:
                self.paths.tcp.resume([tp])

    def next_alone(self) -> Message | None:
        """The next record of the only partition there is, where that needs no more than READs.
        None: `pull` sees to the rest, errors too; only with ``alone.idle`` has it nothing to do."""
        alone = self.alone
        if alone is None:
            return None
        try:
            return alone.next_message(self.queue)
        except KdirectError:
            self.alone = None  # `pull` comes to the same place and deals with it
            return None

    def resolve(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """See `starting_offsets.resolve`."""
        return resolve(self._session, offsets)

    def _resolve_reached(
        self, offsets: Mapping[TopicPartition, int]
    ) -> tuple[dict[TopicPartition, int], dict[TopicPartition, KdirectError]]:
        """See `starting_offsets.resolve_reached`."""
        others = any(tp not in self._lost for tp in self._cursors)
        return resolve_reached(self._session, offsets, others)

    def _resolve_entered(self, wanted: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
        """`wanted` with numbers for -1 and -2, without the partitions that have none now."""
        out = dict(wanted)
        for tp, offset in wanted.items():
            if offset >= 0:
                continue
            try:
                out[tp] = self._cursors[tp].next_offset = self.resolve({tp: offset})[tp]
            except LOST as e:
                del out[tp]
                self._lose([tp], e, ENTER_AGAIN_S)
            except KdirectError as e:
                del out[tp]
                self._stale.discard(tp)
                self._refused(tp, e)
        return out

    def reset_offset(self) -> int:
        """Where a partition without a committed offset starts; with auto.offset.reset=none an
        error."""
        if self._reset == "none":
            raise OffsetOutOfRangeError(
                "a partition has no committed offset",
                hint="auto.offset.reset=none is set: commit one, or assign with an offset",
            )
        return EARLIEST_OFFSET if self._reset == "earliest" else LATEST_OFFSET

    def rewind(self, messages: Iterable[Message]) -> None:
        """Hand these out again, which came in this order: nobody got them."""
        first: dict[TopicPartition, int] = {}
        for m in messages:
            first.setdefault(TopicPartition(m.topic(), m.partition()), m.offset())
        for tp, offset in first.items():
            self._move(tp, offset)

    def _known(self, tp: TopicPartition) -> None:
        if tp not in self._cursors:
            raise ConfigError(f"{tp} is not assigned", hint="name partitions of assignment()")

    def _in_hand(self, tp: TopicPartition) -> bool:
        queue = self.queue
        return len(queue) > 0 and queue.partition == tp.partition and queue.topic == tp.topic

    def _drop_messages(self, tp: TopicPartition) -> None:
        self._held.pop(tp, None)
        if self._in_hand(tp):
            self.queue.clear()

    def _move(self, tp: TopicPartition, offset: int) -> None:
        self._drop_messages(tp)
        self.alone = None
        self._epochs.forget(tp)
        self._cursors[tp] = Cursor(tp, offset)
        self.failed.pop(tp, None)
        self._stale.add(tp)

    # -- paths -------------------------------------------------------------------------------------

    def lost(self) -> None:
        """A connection broke: partitions that have no path any more are entered again when they are
        next needed, at the offsets where they are.  What is in hand stays."""
        for tp in self.paths.direct.drop_broken():
            self._wait(tp)
        self._forget_closed()
        # Over TCP for lack of something better: perhaps there are READs now.
        self._stale.update(tp for tp in self.paths.second_best if tp not in self.failed)

    @property
    def searching(self) -> bool:
        """Is a broker looked for that was lost?"""
        return self._lost.searching

    def _lose(
        self, tps: Iterable[TopicPartition], error: KdirectError, after_s: float = 0.0
    ) -> None:
        """The broker of these is lost: look for it, or for the leader if that is another one.
        Raises ClosedError at the session's end."""
        for tp in (tps := list(tps)):
            self._session.cluster.leave_replica(tp)
        self._seek_broker(tps, error, after_s)

    def _seek_broker(self, tps: list[TopicPartition], error: KdirectError, after_s: float) -> None:
        new = {tp for tp in tps if tp in self._cursors and tp not in self._lost}
        for tp in new:
            self._wait(tp)
        self._forget_closed()
        new -= self.failed.keys()
        if not new:
            return
        cluster, first = self._session.cluster, next(iter(new))
        self._lost.add(new, lambda: cluster.connection_for(first), after_s)
        log.log(
            logging.DEBUG if has_moved(error) else logging.WARNING,
            "%s; %s and %d other partitions wait until their broker is back",
            error.message,
            first,
            len(new) - 1,
        )

    def _look_elsewhere(self, tp: TopicPartition, error: KdirectError) -> None:
        """Another broker leads `tp`, or its leader is not ready: enter it again, in a moment."""
        self._lose([tp], error, MOVED_AGAIN_S)

    def _lose_each(self, lost: Mapping[TopicPartition, KdirectError]) -> None:
        """Of each broker by itself that could not be reached, its partitions with its error."""
        for error in dict.fromkeys(lost.values()):
            self._lose([tp for tp, e in lost.items() if e is error], error, ENTER_AGAIN_S)

    def _look_for_lost(self) -> None:
        """Have the partitions entered again whose brokers were reached."""
        reached, in_vain = self._lost.look()
        for error in in_vain:
            self._in_vain(error)
        if reached:
            # Over TCP for lack of something better: perhaps there are READs now.
            self._stale.update(tp for tp in self.paths.second_best if tp not in self.failed)

    def _in_vain(self, error: KdirectError) -> None:
        """A broker was looked for and not found."""
        if self._others_are_read():
            log.debug("others are read on: %s", error)
        else:
            self.untold.append(error)

    def _others_are_read(self) -> bool:
        """Is there a partition whose broker is not lost?"""
        tcp = self.paths.tcp
        return any(
            tp not in self._lost
            and tp not in self.failed
            and tp not in self.paused
            and not (tcp is not None and tcp.is_lost(tp))
            for tp in self._cursors
        )

    def _forget_closed(self) -> None:
        """Nobody sleeps at a fetcher that is closed."""
        self._turns.keep(self.paths.direct)

    def _wait(self, tp: TopicPartition) -> None:
        """`tp` has no path: it waits at its offset to be entered again."""
        self.alone = None
        self._epochs.note(self._cursors[tp])
        self._cursors[tp] = Cursor(tp, self._cursors[tp].next_offset)
        if tp not in self.failed:
            self._stale.add(tp)

    def enter(self) -> None:
        """Find paths for the partitions that were moved, are new, or lost theirs.  One request for
        each broker."""
        for _ in range(3):  # a reset may have to be entered again
            wanted = {
                tp: self._cursors[tp].next_offset
                for tp in self._stale
                if tp not in self.failed and tp not in self._lost
            }
            if not wanted:
                return
            if min(wanted.values()) < 0:
                wanted = self._resolve_entered(wanted)
            for tp in wanted:  # one that has a path may get another
                self._epochs.note(self._cursors[tp])
            entered = self.paths.enter(wanted)
            refused, lost = entered.refused, entered.lost
            without = refused.keys() | lost.keys() | entered.asked
            refused.update(self._epochs.check({tp: wanted[tp] for tp in wanted.keys() - without}))
            for tp in wanted:
                if tp not in refused and tp not in lost and tp not in entered.asked:
                    self._entered(tp)
            self._lose_each(lost)
            for tp, error in refused.items():
                self._stale.discard(tp)
                error = as_moved(self._session.cluster, tp, error)
                if has_moved(error):
                    self._look_elsewhere(tp, error)
                else:
                    self._refused(tp, error)
            if lost and not self._others_are_read():
                raise next(iter(lost.values()))
            if entered.asked:
                return

    def _entered(self, tp: TopicPartition) -> None:
        self._stale.discard(tp)
        topic_id = self._session.cluster.topic_id(tp.topic)
        if topic_id is not None:
            self._topic_ids[tp.topic] = topic_id
        if (epoch := self._epochs.before(tp, self._cursors[tp].next_offset)) >= 0:
            self.paths.follow(tp, epoch)
        cursor = self._cursors[tp] = self.paths.cursor(tp)
        if type(cursor) is not TcpCursor:
            self._turns.give(tp)
        elif tp in self.paused:
            self.paths.tcp.pause([tp])

    def _refused(self, tp: TopicPartition, error: KdirectError) -> None:
        """Set `tp` aside, or move it as auto.offset.reset says."""
        if isinstance(error, OffsetOutOfRangeError) and self._reset != "none":
            try:
                offset = getattr(error, "diverges_at", -1)
                if offset < 0:
                    offset = self.resolve({tp: self.reset_offset()})[tp]
                else:  # a paused partition may have messages in hand that were read before
                    offset = min(offset, self.next_offset(tp))
            except KdirectError:
                self._wait(tp)  # entered again by the next call, which comes to the same place
                raise
            log.warning(
                "%s; going on at offset %d (auto.offset.reset=%s)",
                error.message,
                offset,
                self._reset,
            )
            self._move(tp, offset)
            return
        error.topic_partition = tp
        error.offset = self._cursors[tp].next_offset
        self.failed[tp] = error
        self.untold.append(error)
        self._wait(tp)
        if self.paths.tcp is not None:
            self.paths.tcp.release([tp])

    def _lose_fetcher(self, fetcher: DirectFetcher, error: KdirectError) -> None:
        self._lose(self.paths.direct.drop(fetcher), error)
