"""Records out of the partitions a consumer reads: whose turn it is, and one decoder's worth of
messages in hand.

Owns: turns, and the step from bytes to messages or columns.  Which partitions are read, where each
goes on and what went wrong is `read_partitions`', which path brings a partition's bytes is
`read_paths`', where it is read is its cursor's.  Groups, callbacks, waiting and the order of polls
are the consumer's.

What is done for a record does not grow with the number of partitions: over RDMA those that had
nothing sleep until a slot READ shows that their slots changed, over TCP `TcpRound` names those that
have something.  The two paths take turns.

One thread at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from kdirect.client.cold import ColdCursor
from kdirect.client.cursor import DirectCursor, TcpCursor
from kdirect.client.direct import DirectFetcher
from kdirect.client.lost_broker import LOST, as_left, has_moved, look_again
from kdirect.client.read_partitions import MOVED_AGAIN_S, ReadPartitions
from kdirect.client.silence import Silence
from kdirect.client.starting_offsets import OffsetLookup
from kdirect.errors import (
    AccessDeniedError,
    KdirectError,
    NotLeaderError,
    TimedOutError,
    UnknownTopicError,
)
from kdirect.format.codec import ArrowDecoder
from kdirect.model import TopicPartition
from kdirect.wire.bell import Bell

log = logging.getLogger("kdirect.client")

NO_STOP = 2**63 - 1
ENTER_AGAIN_MS = 100.0  # between two looks whether brokers that were asked have answered
Take = Callable[[TopicPartition], bool]


class Reading(ReadPartitions):
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
        super().__init__(session, settings, bell, views=views)
        self._max_batch: int = settings["max.batch.bytes"]
        self._silence = Silence(session.cluster, settings, bell)
        self._tcp_first = False  # of two paths, which has the next turn

    # -- bytes to messages -------------------------------------------------------------------------

    def tell(self) -> None:
        """Raise an error that was not raised yet; or the first again, when no partition is left
        that could bring a record."""
        if self.untold:
            raise self.untold.pop(0)
        if self.failed and len(self.failed) == len(self._cursors):
            raise next(iter(self.failed.values()))

    def pull(self, wait_ms: float) -> bool:
        """Go round the partitions once: True when `queue` has messages then.  Waits up to `wait_ms`
        only where TCP alone can bring any."""
        return self._go_round(self._messages, wait_ms)

    def pull_arrow(
        self, wait_ms: float, *, max_bytes: int, max_rows: int, include_headers: bool, views: bool
    ) -> pa.RecordBatch | None:
        """The same for columns: records of one partition, about `max_bytes` or `max_rows` of them
        at most.  `views`: see `Reader.batches`."""
        found: list[pa.RecordBatch] = []

        def take(tp: TopicPartition) -> bool:
            batch = self._columns(tp, max_bytes, max_rows, include_headers, views)
            if batch is not None:
                found.append(batch)
            return batch is not None

        if len(self.queue):
            tp = TopicPartition(self.queue.topic, self.queue.partition)
            if tp in self._cursors and self._attempt(take, tp):
                return found[0]
        self._go_round(take, wait_ms)
        return found[0] if found else None

    def _go_round(self, take: Take, wait_ms: float) -> bool:
        for fetcher in self.paths.direct.moved():
            elsewhere = NotLeaderError("partitions are to be read at other brokers")
            self._seek_broker(self.paths.direct.drop(fetcher), elsewhere, MOVED_AGAIN_S)
        if self._lost.searching:
            self._look_for_lost()
        if len(self._stale) > len(self._lost):  # those that are lost are stale, too
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
        turns = self._turns
        if self._tcp_first and self._go_round_tcp(take):
            self._tcp_first = False
            return True
        if self._go_round_direct(take):
            self._tcp_first = True
            return True
        if not self._tcp_first and self._go_round_tcp(take):
            self._tcp_first = True
            return True
        tcp = self.paths.tcp
        if tcp is not None and not turns.order and not turns.asleep:  # TCP alone may wait
            return wait_ms > 0 and self._step(wait_ms) and self._go_round(take, 0.0)
        return False

    def wait(self, wait_ms: float) -> bool | None:
        """After a silence: see `Silence.wait`."""
        turns, alone, tcp = self._turns, self.alone, self.paths.tcp
        besides = tcp.waits_on if tcp is not None else []
        if self._stale or self._held_again or besides is None:
            return None
        if turns.order and (alone is None or alone.slot_that_tells() < 0):
            return None
        state = turns.given, alone, alone.next_offset if alone is not None else 0
        return self._silence.wait(state, self._asleep, besides, wait_ms)

    def _asleep(self) -> dict[DirectFetcher, dict[TopicPartition, int]]:
        """The partitions that have nothing before their slots change, and where they are."""
        alone, asleep = self.alone, self._turns.asleep.items()
        if alone is not None and (home := self.paths.direct.home(alone.tp)) is not None:
            asleep = {home: {alone.slot_index: alone.tp}}.items()
        out: dict[DirectFetcher, dict[TopicPartition, int]] = {}
        for fetcher, slots in asleep:
            for tp in slots.values():
                if tp in fetcher and tp in self._cursors and tp not in self.paused:
                    out.setdefault(fetcher, {})[tp] = self._cursors[tp].next_offset
        return out

    def _step(self, wait_ms: float) -> bool:
        """Bring news over TCP: see `TcpRound.step`."""
        tcp = self.paths.tcp
        if self._stale:  # no answer over TCP tells when their brokers are there
            wait_ms = min(wait_ms, ENTER_AGAIN_MS)
        news: bool = tcp.step(wait_ms)
        if tcp.in_vain:
            self._in_vain(tcp.in_vain.pop())
            tcp.in_vain.clear()
        return news

    def _go_round_direct(self, take: Take) -> bool:
        """Look at partitions that are read by READs, until one has something.

        Partitions that had nothing sleep until their slots change, so one that has records does not
        wait until the others were visited.
        """
        turns = self._turns
        if turns.asleep and turns.order and turns.since_wake >= len(turns.order):
            turns.wake(self._lose_fetcher, fresh=False)
        if turns.order and self._visit(take):
            return True
        if turns.asleep:
            turns.wake(self._lose_fetcher, fresh=True)
            return self._visit(take)
        return False

    def _visit(self, take: Take) -> bool:
        turns = self._turns.order
        single = len(self._cursors) == 1
        for _ in range(len(turns)):
            tp = turns.popleft()
            cursor = self._cursors.get(tp)
            direct = type(cursor) is DirectCursor
            if not (direct or isinstance(cursor, ColdCursor)) or (
                tp in self.paused or tp in self.failed
            ):
                self._turns.drop(tp)
                continue
            turns.append(tp)
            if single and direct:
                self.alone = cursor
            if self._attempt(take, tp):
                self._turns.since_wake += 1
                return True
            if direct and not single and self._cursors.get(tp) is cursor:
                self._turns.put_to_sleep(tp, cursor, self.paths.direct.fetcher_of(tp))
        return False

    def _go_round_tcp(self, take: Take) -> bool:
        tcp = self.paths.tcp
        if tcp is None:
            return False
        self._step(0.0)
        return any(tcp.ready and self._attempt(take, tcp.next_ready()) for _ in range(tcp.ready))

    def _attempt(self, take: Take, tp: TopicPartition) -> bool:
        try:
            return take(tp)
        except LOST as e:
            if type(self._cursors[tp]) is TcpCursor:
                raise
            fetcher = self.paths.direct.home(tp)
            with_it = self.paths.direct.drop(fetcher) if fetcher is not None else []
            self._lose([tp, *with_it], e)
            if isinstance(e, TimedOutError) and not self._others_are_read():
                raise  # the broker was waited for
            return False
        except AccessDeniedError:
            # The slot of its next file is not to be had, or its broker takes its time.  To enter it
            # again is to find another way, or the answer.
            self._wait(tp)
            return False
        except KdirectError as error:
            over_tcp = type(self._cursors[tp]) is TcpCursor  # which has left a replica already
            why = error if over_tcp else as_left(self._session.cluster, tp, error)
            if over_tcp or not has_moved(why):
                self._refused(tp, why)
                return False
            try:
                look_again(self._session.cluster, tp, self._topic_ids.get(tp.topic))
            except UnknownTopicError as gone:
                self._refused(tp, gone)
            else:
                self._look_elsewhere(tp, why)
            return False

    def _messages(self, tp: TopicPartition) -> bool:
        """Fill the queue with messages of `tp`."""
        held = self._held.pop(tp, None)
        if held is not None:
            self.queue.swap(held)
            return not self.queue.empty
        return self._cursors[tp].fill_queue(self.queue)  # type: ignore[no-any-return]

    def _columns(
        self, tp: TopicPartition, max_bytes: int, max_rows: int, include_headers: bool, views: bool
    ) -> pa.RecordBatch | None:
        """Records of `tp`, those in hand first."""
        start = self.next_offset(tp)
        in_hand = b""
        if self._in_hand(tp):
            in_hand = self.queue.data
            self.queue.clear()
        elif (held := self._held.pop(tp, None)) is not None:
            in_hand = held.data
        decoder = ArrowDecoder(
            tp.topic,
            tp.partition,
            start_offset=start,
            stop_offset=NO_STOP,
            include_headers=include_headers,
            target_bytes=max_bytes,
            target_rows=max_rows,
            max_decompressed_bytes=self._max_batch,
            views=views,
        )
        try:
            fed = 0
            while fed < len(in_hand) and not decoder.full:
                fed += decoder.feed(memoryview(in_hand)[fed:])
            if fed < len(in_hand):  # the target was reached: the rest stays messages
                rest = memoryview(in_hand)[fed:]
                self.queue.load(rest, tp.topic, tp.partition, decoder.next_offset, self._max_batch)
            else:
                self._feed(tp, decoder)
        except BaseException:
            self._move(tp, start)  # nobody gets what the decoder has
            raise
        return decoder.take() if decoder.rows else None

    def _feed(self, tp: TopicPartition, decoder: ArrowDecoder) -> None:
        """Fill `decoder` with what the partition's cursor brings."""
        cursor = self._cursors[tp]
        try:
            cursor.fill_decoder(decoder)
        except KdirectError:
            # What is good is handed out first; the next call comes to the same place again.
            if not decoder.rows:
                raise
            if self.paths.cursor(tp) is not cursor:
                self._wait(tp)  # its next file was refused

    # -- the end -----------------------------------------------------------------------------------

    def statistics(self) -> dict[str, int]:
        """What was read, by path; see docs/metrics.md."""
        return self.paths.statistics()

    def close(self) -> None:
        self.alone = None
        self.queue.clear()
        self._held.clear()
        self._cursors.clear()
        self._stale.clear()
        self._lost.clear()
        self._turns.clear()
        self._silence.close()
        self.paths.close()
