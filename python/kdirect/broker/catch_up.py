"""How a replica that lacks sealed segments of its leader gets them: it READs them, one after the
other, into its own log.

Owns: the follower's part of catch-up but for the READs (`kdirect.broker.segment_reader`): which
segment is next, what is asked of the leader (AskSegments, OpenReading), the check of what it
answers, and that no more than `MOST_PULLS` partitions of one leader are read at a time; the others
go on by Fetch until it is their turn.

Walk of one replica: once there is a queue pair, records of Fetch are thrown away, and segments are
leased, as many as the leader gives at once.  They are read, and the leader is told where the log
ends now, until it ends in the leader's last segment.  Then Fetch goes on, and the leader offers to
push.  So a leader has little to do for each segment.

While a segment is read, the files of the next one are made here: to zero new pages takes as long as
to fill them.  So two files are held at a time.  While the last one that is leased is read, the next
ones are asked for.

Whatever ends it, `close` returns when no READ is under way and nothing that was not committed is
left after the log's end.

All on the event loop, except where said.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from kdirect.broker.segment_reader import SegmentReader, Source, Transfer
from kdirect.errors import BrokerUnavailableError, KdirectError, ProtocolError, RefusedError
from kdirect.format import protocol as p
from kdirect.log.head import PreparedHead
from kdirect.log.partition import Partition
from kdirect.member.throttle import Pace
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.member")

MOST_PULLS = 4  # partitions of one leader at a time
MOST_SEGMENT_BYTES = (1 << 31) - 1
MOST_WAIT_MS = 1000
TELL_S = 0.5  # between two words to the leader of where the log ends


class CatchUps:
    """What all replicas of this broker share.  `send(link, kind, **fields)`: the response of a
    link's leader to a request of that kind; `ask(link, kind, tp, row)`: its row about a partition;
    `thread(work)` and `on_thread(copy, work)`: what `work` returns on a thread that may wait;
    `pace(tp)`: what holds this broker's replica back."""

    def __init__(
        self,
        *,
        send: Callable[..., Awaitable[Any]],
        ask: Callable[..., Awaitable[Any]],
        thread: Callable[..., Awaitable[Any]],
        on_thread: Callable[..., Awaitable[Any]],
        background: Callable[[Callable[[], Any]], None],
        pace: Callable[[TopicPartition], Pace | None],
    ) -> None:
        self.send = send
        self.ask = ask
        self.thread = thread
        self.on_thread = on_thread
        self.background = background
        self.pace = pace
        self.taken_bytes = 0
        self._turns: dict[int, asyncio.Semaphore] = {}  # by leader
        self._tasks: set[asyncio.Task[None]] = set()

    def turns(self, leader: int) -> asyncio.Semaphore:
        """Of the partitions of this leader."""
        if leader not in self._turns:
            self._turns[leader] = asyncio.Semaphore(MOST_PULLS)
        return self._turns[leader]

    async def reader(self, link: Any) -> SegmentReader:
        """The link's reader, opened where there is none."""
        task = link.reader
        if task is not None and task.done():
            failed = task.cancelled() or task.exception() is not None
            if failed or task.result().is_broken:
                task = None
        if task is None:
            before, link.reader = link.reader, None
            task = link.reader = asyncio.get_running_loop().create_task(self._open(link, before))
        return await asyncio.shield(task)  # type: ignore[no-any-return]

    async def _open(self, link: Any, before: asyncio.Task[SegmentReader] | None) -> SegmentReader:
        if before is not None and not before.cancelled() and before.exception() is None:
            self.background(before.result().close)
        reader: SegmentReader = await self.thread(link.new_reader)
        try:
            response = await self.send(link, p.OpenReadingRequest, address=reader.address)
            if response.error_code != 0:
                raise RefusedError(response.error_code, response.error_message)
            await self.thread(partial(reader.connect, bytes(response.address)))
        except BaseException:
            self.background(reader.close)
            raise
        return reader

    def give_back(self, link: Any, leases: list[int]) -> None:
        """Tell the leader that nothing is read under these leases any more."""
        self._begin(self._give_back(link, leases))

    def disown(self, link: Any, asked: asyncio.Future[Any]) -> None:
        """Nobody waits for this answer any more: what it leases is given back."""
        self._begin(self._disown(link, asked))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _disown(self, link: Any, asked: asyncio.Future[Any]) -> None:
        with contextlib.suppress(KdirectError, OSError):  # then there is none
            row = await asked
            if row.segments:
                await self._give_back(link, [x.lease for x in row.segments])

    async def _give_back(self, link: Any, leases: list[int]) -> None:
        try:
            await self.send(link, p.AskSegmentsRequest, released=leases, topics=[])
        except (KdirectError, OSError) as e:  # they end with the link, then
            log.debug("leases of broker %d were not given back: %s", link.leader, e)


class CatchUp:
    """One replica's.  `copy`: its `CopyByPush`; `stop_copying`, `progressed`: see
    `kdirect.member.push.PushableCopy`.  Life: construct, `run` once, `close`."""

    def __init__(
        self,
        shared: CatchUps,
        link: Any,
        copy: Any,
        *,
        stop_copying: Callable[[], Awaitable[None]],
        progressed: Callable[[], None],
    ) -> None:
        self._shared = shared
        self._link = link
        self._copy = copy
        self._stop_copying = stop_copying
        self._progressed = progressed
        self._reader: SegmentReader | None = None
        self._transfer: Transfer | None = None
        self._opening: asyncio.Task[Transfer] | None = None
        self._ahead: asyncio.Task[Any] | None = None
        self._preparing: asyncio.Future[PreparedHead | None] | None = None
        self._given_up = threading.Event()  # a thread that faults in pages looks at it
        self._leases: list[int] = []  # that the leader holds: of what is read, and of what is next
        self._next: deque[Any] = deque()  # segments that are leased, and not yet read
        self._asks = asyncio.Lock()  # an answer is known by its partition, so one at a time
        self._told_at = 0.0
        self._why = ""  # it is to stop
        self._stopped = asyncio.Event()
        self._segments = self._bytes = 0  # so far

    async def run(self) -> None:
        """Return when the log ends in the leader's last segment.  KdirectError."""
        turns = self._shared.turns(self._link.leader)
        await self._turn(turns)
        try:
            await self._read_all()
        finally:
            turns.release()

    async def _turn(self, turns: asyncio.Semaphore) -> None:
        """Wait for this replica's turn.  BrokerUnavailableError: it is to stop, before or now."""
        taken = asyncio.ensure_future(turns.acquire())
        stopped = asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait((taken, stopped), return_when=asyncio.FIRST_COMPLETED)
            if self._why:
                raise BrokerUnavailableError(self._why)
        except BaseException:
            if taken.done():
                turns.release()
            taken.cancel()
            raise
        finally:
            stopped.cancel()

    async def _read_all(self) -> None:
        """From the segment in which the log ends to the leader's last sealed one."""
        copy = self._copy
        self._reader = await self._shared.reader(self._link)
        await self._stop_copying()
        await self._lease(copy.partition.log_end_offset)
        loop = asyncio.get_running_loop()
        while self._next:
            leased = self._next.popleft()
            source = checked(copy.tp, leased, copy.partition.log_end_offset)
            prepared, self._preparing = self._preparing, None
            self._ahead = loop.create_task(self._look_ahead(source.end_offset))
            await self._pull(leased, source, None if prepared is None else prepared.result())
            self._tell(loop.time())
            await self._ahead

    @property
    def is_reading(self) -> bool:
        """Has Fetch stopped, and are segments read?"""
        return self._reader is not None

    @property
    def has_arrived(self) -> bool:
        """Has something been read?"""
        return self._bytes > 0

    def _tell(self, now: float) -> None:
        """Tell the leader where the log ends, but not too often: it looks at what it is told."""
        if now - self._told_at >= TELL_S:
            self._told_at = now
            self._progressed()

    async def _look_ahead(self, offset: int) -> None:
        """Lease the segment that begins at `offset`, unless it is leased, and make its files."""
        copy = self._copy
        if not self._next:
            await self._lease(offset)
        if self._next:
            size = checked(copy.tp, self._next[0], offset).size
            prepare = partial(_prepared, copy.partition, size, self._given_up)
            self._preparing = asyncio.ensure_future(self._shared.on_thread(copy, prepare))
            await asyncio.shield(self._preparing)

    async def _lease(self, offset: int) -> None:
        """Ask the leader for its segment that holds `offset`, and those after it."""
        asked = asyncio.ensure_future(self._ask(-1, offset, 0))
        try:
            row = await asyncio.shield(asked)
        except asyncio.CancelledError:  # the leader may have leased some, and not be asked again
            self._shared.disown(self._link, asked)
            raise
        # The leader holds none any more but these and that of the segment before them.
        self._leases = [*self._leases[-1:], *(x.lease for x in row.segments)]
        self._next.extend(row.segments)

    async def _ask(self, lease: int, offset: int, position: int) -> Any:
        copy = self._copy
        row = {
            "partition": copy.tp.partition,
            "leader_epoch": copy.epoch,
            "lease": lease,
            "offset": offset,
            "position": position,
        }
        async with self._asks:
            return await self._shared.ask(self._link, p.AskSegmentsRequest, copy.tp, row)

    async def _pull(self, leased: Any, source: Source, prepared: PreparedHead | None) -> None:
        """One segment.  KdirectError."""
        copy, shared, reader = self._copy, self._shared, self._reader
        assert reader is not None
        make = partial(
            Transfer,
            *(copy.partition, source, self._link.domain, asyncio.get_running_loop()),
            epoch=copy.epoch,
            pace=partial(shared.pace, copy.tp),
            prepared=prepared,
        )
        self._opening = asyncio.ensure_future(shared.on_thread(copy, make))
        transfer = await asyncio.shield(self._opening)
        self._opening, self._transfer = None, transfer
        reader.add(transfer)
        if self._why:
            reader.stop(transfer, self._why)
        wait_ms = leased.wait_ms
        while (news := await transfer.news.get()) is None:
            wait_ms = await self._allow_more(reader, transfer, leased.lease, wait_ms)
        self._over()
        if news:
            raise BrokerUnavailableError(news)
        if copy.partition.log_end_offset != source.end_offset:
            raise ProtocolError(
                f"the leader of {copy.tp} said that its segment {source.base_offset} ends at offset"
                f" {source.end_offset}, and it ends at {copy.partition.log_end_offset}"
            )

    async def _allow_more(
        self, reader: SegmentReader, transfer: Transfer, lease: int, wait_ms: int
    ) -> int:
        """Ask until more may be read; how long to wait before the next time."""
        before = transfer.allowed
        while transfer.allowed == before and not transfer.ended.is_set():
            await asyncio.sleep(min(max(wait_ms, 1), MOST_WAIT_MS) / 1000)
            row = await self._ask(lease, transfer.source.base_offset, before)
            if not row.segments:
                raise ProtocolError(f"the leader of {self._copy.tp} does not know lease {lease}")
            wait_ms = row.segments[0].wait_ms
            reader.allow(transfer, min(row.segments[0].allowed, transfer.source.size))
        return wait_ms

    def _over(self) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            self._shared.taken_bytes += transfer.taken_bytes
            self._bytes += transfer.taken_bytes
            self._segments += 1

    def _say(self) -> None:
        if self._segments:
            log.info(
                "%s: %d bytes of %d segments were read from broker %d over %s",
                *(self._copy.tp, self._bytes, self._segments, self._link.leader),
                self._link.engine.transport,
            )
            self._segments = 0

    def _return(self) -> None:
        leases, self._leases = self._leases, []
        if leases:
            self._shared.give_back(self._link, leases)

    def stop(self, why: str) -> None:
        """Read no more; `run` raises."""
        self._why = self._why or why
        self._stopped.set()
        if self._reader is not None and self._transfer is not None:
            self._reader.stop(self._transfer, why)

    async def close(self) -> None:
        """Once `run` has returned, raised or was given up.  When this is done, nothing that is read
        can reach the log any more."""
        await self._discard_ahead()
        if self._opening is not None:
            try:
                self._transfer = await self._opening
            except Exception as e:  # `run` has raised it, unless it was given up
                log.debug("%s: no segment was opened: %s", self._copy.tp, e)
            else:
                assert self._reader is not None
                self._reader.add(self._transfer)
            self._opening = None
        if self._transfer is not None and self._reader is not None:
            self._reader.stop(self._transfer, "it was given up")
            await self._transfer.ended.wait()
            self._over()
        self._return()
        self._say()

    async def _discard_ahead(self) -> None:
        """What was made for the next segment."""
        self._given_up.set()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.cancel()
            await asyncio.wait([ahead])
            ahead.cancelled() or ahead.exception()  # it was looked at
        preparing, self._preparing = self._preparing, None
        if preparing is not None:
            try:
                prepared = await preparing
                if prepared is not None:
                    await self._shared.on_thread(self._copy, prepared.discard)
            except Exception as e:  # whatever it is, Fetch goes on
                log.warning("%s: no files ahead are removed: %s", self._copy.tp, e)


def _prepared(partition: Partition, size: int, given_up: threading.Event) -> PreparedHead | None:
    """Files for the next segment; None where they cannot be made: whether there is room then, is
    asked when its turn comes."""
    try:
        return partition.prepare_pull(size, given_up)
    except (KdirectError, OSError) as e:
        log.debug("no files ahead for %s: %s", partition.topic_partition, e)
        return None


def checked(tp: TopicPartition, leased: Any, end: int) -> Source:
    """What a leader says of a segment, which is to be read where the log ends, at offset `end`.
    Nothing of it is believed: what it leads to is a READ of the leader's own memory, and a file of
    at most 2 GiB here.  ProtocolError."""
    facts = {
        f"base offset {leased.base_offset}": 0 <= leased.base_offset <= end,
        f"end offset {leased.end_offset}": leased.end_offset > end,
        f"size {leased.size}": 0 < leased.size <= MOST_SEGMENT_BYTES,
        f"position {leased.position}": 0 <= leased.position < leased.size
        and (leased.position == 0) == (leased.base_offset == end),
        f"allowed {leased.allowed}": leased.position <= leased.allowed <= leased.size,
        f"address {leased.address}": 0 < leased.address < (1 << 63) - MOST_SEGMENT_BYTES,
        f"rkey {leased.rkey}": 0 <= leased.rkey < 1 << 32,
        f"wait of {leased.wait_ms} ms": leased.wait_ms >= 0,
    }
    wrong = [name for name, is_so in facts.items() if not is_so]
    if wrong:
        raise ProtocolError(
            f"the leader of {tp} has answered about the segment that holds offset {end} with"
            f" {', '.join(wrong)}, which cannot be"
        )
    return Source(
        leased.base_offset,
        leased.position,
        leased.size,
        leased.end_offset,
        leased.address,
        leased.rkey,
        leased.allowed,
    )


__all__ = ["CatchUp", "CatchUps", "checked"]
