"""The partitions a consumer reads: where each stands, which path brings its bytes, and what went
wrong with it.

Owns: positions, paused partitions, errors that concern one partition alone, one decoder's worth of
messages in hand, and the two paths: `DirectFetcher` over RDMA for all partitions that its broker
grants, `TcpRound` for the others.  Groups, callbacks, waiting and the order of polls are the
consumer's.

Invariants:

- A position is the offset of the next record to hand out; it moves only when a record was handed
  out, or on `seek`.
- Nothing READ and checked is thrown away by pausing: what is in hand is kept until the partition is
  resumed.
- A partition with an error of its own (unknown topic, offset out of range, a broken batch) is set
  aside; the others go on.  The error is told once, and again only when nothing else is left to
  read; `seek`, `assign` and `resume` take the partition up again.
- What is done for a record does not grow with the number of partitions: over RDMA those that had
  nothing sleep until a slot READ shows that their slots changed, over TCP `TcpRound` names those
  that have something.  The two paths take turns.
- Lost connections are not errors of partitions: they are raised as they are, and the next call
  opens the paths anew.

One thread at a time.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from kdirect.client.direct import DirectFetcher
from kdirect.client.message import Message, MessageQueue
from kdirect.client.partition_feed import Feed
from kdirect.client.session import Session
from kdirect.client.tcp_multi_fetch import TcpRound
from kdirect.errors import (
    AccessDeniedError,
    BrokerUnavailableError,
    ClosedError,
    ConfigError,
    KdirectError,
    OffsetOutOfRangeError,
    QueuePairError,
    TimedOutError,
)
from kdirect.format.codec import ArrowDecoder
from kdirect.model import EARLIEST_OFFSET, LATEST_OFFSET, TopicPartition

log = logging.getLogger("kdirect.client")

NO_STOP = 2**63 - 1
LOST = (QueuePairError, BrokerUnavailableError, ClosedError, TimedOutError)


class Reading:
    """See the module.  `settings`: rows of the client table."""

    def __init__(self, session: Session, settings: Mapping[str, Any]) -> None:
        self.queue = (
            MessageQueue()
        )  # messages of the partition being handed out; the same object for the consumer's life
        self.positions: dict[TopicPartition, int] = {}  # behind what is in hand
        self.paused: set[TopicPartition] = set()
        self.failed: dict[TopicPartition, KdirectError] = {}
        self.untold: list[KdirectError] = []
        self._session = session
        self._settings = settings
        self._reset: str = settings["auto.offset.reset"]
        self._max_batch: int = settings["max.batch.bytes"]
        self._held: dict[TopicPartition, MessageQueue] = {}
        self._stale: set[TopicPartition] = set()  # to be entered at their positions
        self._held_again: list[TopicPartition] = []  # of `_held`, those that were resumed
        # Read by the fetcher and to be looked at, the next one first; others drop out in passing.
        self._turns: deque[TopicPartition] = deque()
        self._in_turns: set[TopicPartition] = set()
        # By slot: read by the fetcher, and has nothing before its slot changes.
        self._asleep: dict[int, TopicPartition] = {}
        # Visits that found a record since the slots of those asleep were looked at.
        self._since_wake = 0
        self._tcp_first = False  # of two paths, which has the next turn
        self._told_over_tcp = False
        self.fetcher: DirectFetcher | None = None
        self.alone: Feed | None = (
            None  # of the one partition there is, once it was polled: polls may go to it directly
        )
        self.tcp: TcpRound | None = None

    # -- what is read ------------------------------------------------------------------------------

    def assign(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Read exactly these partitions, from these offsets (-1 latest, -2 earliest).  Those that
        stay where they are go on undisturbed."""
        resolved = self.resolve(offsets)
        self.alone = None
        self.release([tp for tp in self.positions if tp not in resolved])
        for tp, offset in resolved.items():
            if tp not in self.positions or self.position(tp) != offset or tp in self.failed:
                self._move(tp, offset)

    def add(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Read these too."""
        self.alone = None
        for tp, offset in self.resolve(offsets).items():
            self._move(tp, offset)

    def release(self, tps: Iterable[TopicPartition]) -> None:
        """Stop reading these."""
        self.alone = None
        tps = [tp for tp in tps if tp in self.positions]
        for tp in tps:
            self._drop_messages(tp)
            del self.positions[tp]
            self.paused.discard(tp)
            self.failed.pop(tp, None)
            self._stale.discard(tp)
        if self.tcp is not None:
            self.tcp.release(tps)
        if self.fetcher is not None:
            direct = [tp for tp in tps if tp in self.fetcher]
            if direct and not self.positions:
                self._drop_direct()
            elif direct:
                try:
                    self.fetcher.release(direct)
                except LOST:
                    self.lost()

    def seek(self, tp: TopicPartition, offset: int) -> None:
        """Go on at `offset` (-1, -2) on this partition."""
        if tp not in self.positions:
            raise ConfigError(
                f"{tp} is not assigned",
                hint="assign it, or seek in on_assign once the group has given it out",
            )
        self._move(tp, self.resolve({tp: offset})[tp])

    def position(self, tp: TopicPartition) -> int:
        """Offset of the next record that will be handed out."""
        if tp not in self.positions:
            raise ConfigError(f"{tp} is not assigned", hint="ask for a partition of assignment()")
        if self._in_hand(tp):
            return self.queue.position
        held = self._held.get(tp)
        return held.position if held is not None else self.positions[tp]

    def pause(self, tps: Iterable[TopicPartition]) -> None:
        for tp in tps:
            self._known(tp)
            self.alone = None
            self.paused.add(tp)
            if self._in_hand(tp):
                self._held[tp] = self.queue.detach()
            if self.tcp is not None and tp in self.tcp:
                self.tcp.pause([tp])

    def resume(self, tps: Iterable[TopicPartition]) -> None:
        for tp in tps:
            self._known(tp)
            self.paused.discard(tp)
            if self.failed.pop(tp, None) is not None:
                self._stale.add(tp)
            if tp in self._held:
                self._held_again.append(tp)
            self._take_turns(tp)
            if self.tcp is not None and tp in self.tcp:
                self.tcp.resume([tp])

    def next_alone(self) -> Message | None:
        """The next record of the only partition there is, where that needs no more than READs.
        None: `pull` sees to the rest, errors too; only with ``alone.idle`` has it nothing to do."""
        alone = self.alone
        if alone is None:
            return None
        try:
            return alone.next(self.queue, self.positions)
        except KdirectError:
            self.alone = None  # `pull` comes to the same place and deals with it
            return None

    def resolve(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """`offsets` with numbers for -1 and -2."""
        out = dict(offsets)
        earliest = [tp for tp, o in out.items() if o == EARLIEST_OFFSET]
        latest = [tp for tp, o in out.items() if o == LATEST_OFFSET]
        for tp, offset in out.items():
            if offset < EARLIEST_OFFSET:
                raise ConfigError(
                    f"offset {offset} of {tp} cannot be",
                    hint="give an offset, -1 (latest) or -2 (earliest)",
                )
        if earliest:
            out |= self._session.earliest_offsets(earliest)
        if latest:
            out |= self._session.latest_offsets(latest)
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

    def _is_read(self, tp: TopicPartition) -> bool:
        return (self.fetcher is not None and tp in self.fetcher) or (
            self.tcp is not None and tp in self.tcp
        )

    def _known(self, tp: TopicPartition) -> None:
        if tp not in self.positions:
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
        self.positions[tp] = offset
        self.failed.pop(tp, None)
        self._stale.add(tp)

    # -- paths -------------------------------------------------------------------------------------

    def lost(self) -> None:
        """A connection broke: open the paths anew at the positions, when they are next needed.
        What is in hand stays."""
        self._drop_direct()
        tcp, self.tcp = self.tcp, None
        if tcp is not None:
            tcp.close()
        self._stale = set(self.positions) - set(self.failed)

    def _drop_direct(self) -> None:
        self.alone = None
        fetcher, self.fetcher = self.fetcher, None
        self._turns.clear()
        self._in_turns.clear()
        self._asleep.clear()
        if fetcher is not None:
            fetcher.close()

    def enter(self) -> None:
        """Open the files, or the places in the round, of partitions that were moved or are new.
        One request for all."""
        for _ in range(3):  # a reset may have to be entered again
            stale = {tp: self.positions[tp] for tp in self._stale if tp not in self.failed}
            if not stale:
                return
            if self._session.transport == "tcp":
                self._enter_tcp(stale)
                continue
            if self.fetcher is None or self.fetcher.channel.closed:
                if self.fetcher is not None:
                    self.lost()
                    continue
                try:
                    self.fetcher = DirectFetcher(
                        self._session.channel(next(iter(stale))), self._settings
                    )
                except AccessDeniedError as e:  # no queue pair is to be had, by the broker's limits
                    self._read_over_tcp(stale, e)
                    continue
            try:
                refused = self.fetcher.enter(stale)
            except LOST:
                raise
            except AccessDeniedError as e:
                self._read_over_tcp(stale, e)
            except KdirectError:
                for tp, offset in stale.items():
                    self._enter_alone(tp, offset)
            else:
                self._entered(stale, refused)

    def _enter_alone(self, tp: TopicPartition, offset: int) -> None:
        assert self.fetcher is not None
        self._stale.discard(tp)
        try:
            self._entered({tp: offset}, self.fetcher.enter({tp: offset}))
        except LOST:
            self._stale.add(tp)
            raise
        except AccessDeniedError as e:
            self._read_over_tcp({tp: offset}, e)
        except KdirectError as e:
            self._refused(tp, e)

    def _entered(
        self, offsets: Mapping[TopicPartition, int], refused: Mapping[TopicPartition, KdirectError]
    ) -> None:
        """The fetcher reads `offsets` but for what was `refused`: that goes over TCP where it is
        access that was refused."""
        self._stale.difference_update(offsets)
        granted = [tp for tp in offsets if tp not in refused]
        for tp in granted:
            self._take_turns(tp)
        if self.tcp is not None:
            self.tcp.release(granted)
        denied = {tp: e for tp, e in refused.items() if isinstance(e, AccessDeniedError)}
        if denied:
            self._read_over_tcp({tp: offsets[tp] for tp in denied}, next(iter(denied.values())))
        for tp, error in refused.items():
            if tp not in denied:
                self._refused(tp, error)

    def _read_over_tcp(self, offsets: Mapping[TopicPartition, int], why: AccessDeniedError) -> None:
        """Told once for a consumer, which may have thousands of partitions more than the broker has
        slots for it."""
        level = logging.DEBUG if self._told_over_tcp else logging.WARNING
        self._told_over_tcp = True
        others = f" and {len(offsets) - 1} other partitions are" if len(offsets) > 1 else " is"
        log.log(level, "%s%s read over TCP: %s", next(iter(offsets)), others, why)
        self._enter_tcp(offsets)

    def _enter_tcp(self, offsets: Mapping[TopicPartition, int]) -> None:
        if self.tcp is None:
            self.tcp = TcpRound(self._session.cluster, self._settings)
        self.tcp.assign(offsets)
        self.tcp.pause(self.paused & offsets.keys())
        self._stale.difference_update(offsets)

    def _refused(self, tp: TopicPartition, error: KdirectError) -> None:
        """Set `tp` aside, or move it as auto.offset.reset says."""
        if isinstance(error, OffsetOutOfRangeError) and self._reset != "none":
            try:
                offset = self.resolve({tp: self.reset_offset()})[tp]
            except KdirectError:
                self._stale.add(tp)  # entered again by the next call, which comes to the same place
                raise
            log.warning(
                "%s; going on at offset %d (auto.offset.reset=%s)",
                error.message,
                offset,
                self._reset,
            )
            self._move(tp, offset)
            return
        self.alone = None
        error.topic_partition = tp  # type: ignore[attr-defined]
        error.offset = self.positions[tp]  # type: ignore[attr-defined]
        self.failed[tp] = error
        self.untold.append(error)
        if self.tcp is not None:
            self.tcp.release([tp])

    # -- bytes to messages -------------------------------------------------------------------------

    def tell(self) -> None:
        """Raise an error that was not told yet; or the first again, when no partition is left that
        could bring a record."""
        if self.untold:
            raise self.untold.pop(0)
        if self.failed and len(self.failed) == len(self.positions):
            raise next(iter(self.failed.values()))

    def pull(self, wait_ms: float) -> bool:
        """Go round the partitions once: True when `queue` has messages then.  Waits up to `wait_ms`
        only where TCP alone can bring any."""
        return self._go_round(self._messages, wait_ms)

    def pull_arrow(
        self, wait_ms: float, *, max_bytes: int, max_rows: int, include_headers: bool
    ) -> pa.RecordBatch | None:
        """The same for columns: records of one partition, about `max_bytes` or `max_rows` of them
        at most."""
        found: list[pa.RecordBatch] = []

        def take(tp: TopicPartition) -> bool:
            batch = self._columns(tp, max_bytes, max_rows, include_headers)
            if batch is not None:
                found.append(batch)
            return batch is not None

        if len(self.queue):
            tp = TopicPartition(self.queue.topic, self.queue.partition)
            if tp in self.positions and self._attempt(take, tp):
                return found[0]
        self._go_round(take, wait_ms)
        return found[0] if found else None

    def _go_round(self, take: Any, wait_ms: float) -> bool:
        if self._stale:
            self.enter()
        while self._held_again:
            tp = self._held_again.pop()
            if (
                tp in self._held
                and tp not in self.paused
                and tp not in self.failed
                and self._attempt(take, tp)
            ):
                return True
        if self._tcp_first and self._go_round_tcp(take):
            self._tcp_first = False
            return True
        found, direct = self._go_round_direct(take)
        if found:
            self._tcp_first = True
            return True
        if not self._tcp_first and self._go_round_tcp(take):
            self._tcp_first = True
            return True
        if self.tcp is not None and not direct and wait_ms > 0 and self.tcp.step(wait_ms):
            return self._go_round(take, 0.0)
        return False

    def _go_round_direct(self, take: Any) -> tuple[bool, bool]:
        """(something was taken, there are partitions to look at by READs).

        Partitions that had nothing sleep until their slots change, so one that has records does not
        wait until the others were visited.
        """
        fetcher = self.fetcher
        if fetcher is None:
            return False, False
        if self._asleep and self._turns and self._since_wake >= len(self._turns):
            self._wake(fetcher, fresh=False)
        if self._visit(fetcher, take):
            return True, True
        if self._asleep:
            self._wake(fetcher, fresh=True)
            if self._visit(fetcher, take):
                return True, True
        return False, bool(self._turns or self._asleep)

    def _visit(self, fetcher: DirectFetcher, take: Any) -> bool:
        turns = self._turns
        for _ in range(len(turns)):
            tp = turns.popleft()
            if tp in self.paused or tp in self.failed or tp not in fetcher:
                self._in_turns.discard(tp)
                continue
            turns.append(tp)
            if len(self.positions) == 1:
                self.alone = fetcher.feed(tp)
            if self._attempt(take, tp):
                self._since_wake += 1
                return True
            slot = (
                fetcher.slot_that_tells(tp, self.positions[tp]) if len(self.positions) > 1 else -1
            )
            if slot >= 0 and tp not in self.failed:
                turns.pop()
                self._in_turns.discard(tp)
                self._asleep[slot] = tp
        return False

    def _wake(self, fetcher: DirectFetcher, *, fresh: bool) -> None:
        self._since_wake = 0
        for slot in fetcher.changed(fresh=fresh):
            tp = self._asleep.pop(slot, None)
            if tp is not None:
                self._take_turns(tp)

    def _take_turns(self, tp: TopicPartition) -> None:
        if tp not in self._in_turns:
            self._in_turns.add(tp)
            self._turns.append(tp)

    def _go_round_tcp(self, take: Any) -> bool:
        tcp = self.tcp
        if tcp is None:
            return False
        tcp.step(0.0)
        return any(tcp.ready and self._attempt(take, tcp.next_ready()) for _ in range(tcp.ready))

    def _attempt(self, take: Any, tp: TopicPartition) -> bool:
        try:
            return take(tp)
        except LOST:
            raise
        except (
            AccessDeniedError
        ) as e:  # between two files of a partition: the next one's slot is not to be had
            self._read_over_tcp({tp: self.positions[tp]}, e)
            return False
        except KdirectError as e:
            self._refused(tp, e)
            return False

    def _messages(self, tp: TopicPartition) -> bool:
        queue = self.queue
        held = self._held.pop(tp, None)
        if held is not None:
            queue.swap(held)
            return not queue.empty
        topic, partition = tp
        position = self.positions[tp]
        fetcher = self.fetcher
        if fetcher is not None and tp in fetcher:
            while True:
                feed = fetcher.feed(tp)
                try:
                    if feed.load(queue, position):
                        return True
                finally:
                    self.positions[tp] = position = feed.after
                if feed.idle or not fetcher.fill(tp, position):
                    return False
        tcp = self.tcp
        if tcp is None or tp not in tcp:
            return False
        tcp.take_error(tp)
        while len(data := tcp.window(tp)):
            consumed = queue.load(data, topic, partition, position, self._max_batch)
            tcp.consume(tp, consumed)
            self.positions[tp] = position = queue.after
            if not consumed:
                break
            if not queue.empty:
                return True
        return False

    def _columns(
        self, tp: TopicPartition, max_bytes: int, max_rows: int, include_headers: bool
    ) -> pa.RecordBatch | None:
        start = self.position(tp)
        in_hand = b""
        if self._in_hand(tp):
            in_hand = self.queue.data
            self.queue.clear()
        elif (held := self._held.pop(tp, None)) is not None:
            in_hand = held.data
        after = self.positions[tp]
        decoder = ArrowDecoder(tp.topic, tp.partition, start_offset=start, stop_offset=NO_STOP, include_headers=include_headers,
                               target_bytes=max_bytes, target_rows=max_rows, max_decompressed_bytes=self._max_batch)  # fmt: skip
        try:
            fed = 0
            while fed < len(in_hand) and not decoder.full:
                fed += decoder.feed(memoryview(in_hand)[fed:])
            if fed < len(in_hand):  # the target was reached: the rest stays messages
                self.queue.load(
                    memoryview(in_hand)[fed:],
                    tp.topic,
                    tp.partition,
                    decoder.next_offset,
                    self._max_batch,
                )
                return decoder.take() if decoder.rows else None
            try:
                self._feed(tp, decoder, after)
            except KdirectError:
                if not decoder.rows:
                    raise  # else: what is good first; the next call comes to the same place again
                if not self._is_read(tp):
                    self._stale.add(tp)  # its next file was refused
        except BaseException:
            self._move(tp, start)  # what the decoder has, nobody gets
            raise
        self.positions[tp] = max(after, decoder.next_offset)
        return decoder.take() if decoder.rows else None

    def _feed(self, tp: TopicPartition, decoder: ArrowDecoder, after: int) -> None:
        fetcher, tcp = self.fetcher, self.tcp
        if fetcher is not None and tp in fetcher:
            while not decoder.full:
                if not fetcher.decode(tp, decoder) and not fetcher.fill(
                    tp, max(after, decoder.next_offset)
                ):
                    return
        elif tcp is not None and tp in tcp:
            tcp.take_error(tp)
            while not decoder.full and len(data := tcp.window(tp)):
                consumed = decoder.feed(data)
                tcp.consume(tp, consumed)
                if not consumed:
                    return

    # -- the end -----------------------------------------------------------------------------------

    def statistics(self) -> dict[str, int]:
        out = dict(self.fetcher.statistics()) if self.fetcher is not None else {}
        if self.tcp is not None:
            out |= self.tcp.statistics()
        return out

    def close(self) -> None:
        self.queue.clear()
        self._held.clear()
        self.positions.clear()
        self._stale.clear()
        self._drop_direct()
        tcp, self.tcp = self.tcp, None
        if tcp is not None:
            tcp.close()
