"""How a follower READs sealed segments out of its leader's memory into its own log.

Owns: the queue pair for READs from one leader, the thread that posts them, and the segments that
are on their way (`Transfer`); the steps are `kdirect.broker.segment_pull`'s.  What lands is
committed by the commit kernel, as what a leader pushes: frames, CRCs, offsets and leader epochs are
checked, indexes and producers kept.  What may not enter: requests, and which segment is next
(`kdirect.broker.catch_up`).

Threads: one for each reader, while it has transfers: it posts, polls and commits, in turn for all
of them.  Others call `add`, `allow`, `stop`, and hear by `news` on their event loop.

Memory: a transfer holds the follower's head (acquired, and not given back by housekeeping), and a
key to it for its own READs, from its beginning until no READ is under way.  Then the bytes that
were not committed are zeros again.  The leader's memory is the leader's
(`kdirect.broker.segment_leases`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from kdirect.broker import segment_pull as machine
from kdirect.broker.scheduler import soon
from kdirect.broker.segment_pull import AskMore, Commit, End, Event, Phase, Read
from kdirect.errors import KdirectError, LogError
from kdirect.log.clock import now_ms
from kdirect.log.head import PreparedHead
from kdirect.log.kernel import UNKNOWN_EPOCH
from kdirect.log.mapped import Chain, whole_batches
from kdirect.log.partition import Partition
from kdirect.log.segment import Segment
from kdirect.log.segment_search import corrupt
from kdirect.member.throttle import Pace
from kdirect.rdma.contract import STATUS_NAMES, Access, Memory

log = logging.getLogger("kdirect.broker.rdma")

COMMIT_BYTES = 2 << 20  # at a time, so that nobody waits long for the kernel's mutex
SENDS = 64
WAIT_MS = 50
IDLE_S = 1.0
POSITION_BITS = 32

_numbers = itertools.count(1)


class Source(NamedTuple):
    """A leader's sealed segment, as it was leased and checked.  `address`: of position 0."""

    base_offset: int
    position: int
    size: int
    end_offset: int
    address: int
    rkey: int
    allowed: int


class Transfer:
    """One segment.  Life: construct on a thread that may wait for the disk, `SegmentReader.add`,
    and until `ended` is done it is the reader's.

    `pace()`: what holds it back at present.  `prepared`: the segment's files here, where there are
    any yet; they are the transfer's, whatever becomes of it.  `news`: None when the leader is to be
    asked for more, then a reason, empty where all is in the log."""

    def __init__(
        self,
        partition: Partition,
        source: Source,
        domain: Any,
        loop: asyncio.AbstractEventLoop,
        *,
        epoch: int,
        pace: Callable[[], Pace | None] = lambda: None,
        prepared: PreparedHead | None = None,
    ) -> None:
        self.number = next(_numbers) & 0x7FFFFFFF
        self.partition = partition
        self.source = source
        self.pace = pace
        self.news: asyncio.Queue[str | None] = asyncio.Queue()
        self.ended = asyncio.Event()
        self.allowed = source.allowed  # told by the loop
        self.stopping = ""  # why; told by the loop
        self.taken_bytes = 0
        self._loop = loop
        self._epoch = epoch
        self._segment: Segment | None
        try:
            self._segment = partition.begin_pull(source.base_offset, source.size, prepared)
        finally:
            if prepared is not None:
                prepared.discard()  # nothing, once it is the head
        try:
            self._check_place()
            segment, size = self._segment, source.size
            memory = Memory.wrap(segment.fd, segment.address, segment.mapped_length, True, segment)
            position = source.position
            access = Access.LOCAL_WRITE
            self.region = domain.register(memory, access, position, size - position)
        except BaseException:
            self._segment.release()
            raise
        self.pull = machine.begin(position, size, source.allowed)
        partition.before_give_back.append(self._may_give_back)

    def _check_place(self) -> None:
        view = self.partition.kernel.view()
        here = view.segment_base_offset, view.end_position
        if here != (self.source.base_offset, self.source.position):
            raise LogError(
                f"{self.partition.topic_partition} ends at position {here[1]} of its segment"
                f" {here[0]}, and its leader says that this is position {self.source.position} of"
                f" segment {self.source.base_offset}",
                hint="nothing to do: it is copied over TCP",
            )

    def _may_give_back(self, partition: Partition) -> bool:
        return self._segment is None

    # -- on the reader's thread --------------------------------------------------------------------

    def feed(self, event: Event) -> tuple[Read, ...]:
        """Something happened; the READs that are to be posted."""
        reads: list[Read] = []
        events = [event]
        while events:
            self.pull, effects = machine.step(self.pull, events.pop())
            for effect in effects:
                match effect:
                    case Read():
                        reads.append(effect)
                    case Commit(start, stop):
                        events.append(self._commit(start, stop))
                    case AskMore():
                        self._tell(None)
                    case End():
                        self._end()
        return tuple(reads)

    def _commit(self, start: int, stop: int) -> Event:
        try:
            return machine.Committed(self._commit_batches(start, stop))
        except (KdirectError, OSError) as e:
            return machine.Stop(str(e))
        except Exception as e:
            log.exception("what was read of %s could not be committed", self.partition)
            return machine.Stop(f"{type(e).__name__}: {e}")

    def _commit_batches(self, start: int, stop: int) -> int:
        """The whole batches of [start, stop); where they end.  LogError."""
        segment, kernel, size = self._segment, self.partition.kernel, self.source.size
        assert segment is not None
        while start < stop:
            known = Chain(int(kernel.log_end_offset), 0)
            limit = min(stop, start + COMMIT_BYTES)
            walk = whole_batches(segment.address, start, limit, size, known)
            if walk.position == start and limit < stop:
                walk = whole_batches(segment.address, start, stop, size, known)
            if walk.position == start:
                if walk.fault:
                    raise corrupt(segment, walk)
                break
            error = self._commit_run(segment, start, walk.position - start)
            if error:
                raise LogError(
                    f"batches of {self.partition.topic_partition} that were read from its leader,"
                    f" at position {start} of segment {segment.base_offset}, are refused with code"
                    f" {error}",
                    hint="nothing to do: they are copied over TCP",
                )
            self.taken_bytes += walk.position - start
            start = walk.position
        return start

    def _commit_run(self, segment: Segment, start: int, length: int) -> int:
        """0, or an error code.  A leader epoch is on disk before the first record of it."""
        partition = self.partition
        commit, at = partition.kernel.commit_as_stamped, (segment.base_offset, start, length)
        result = commit(*at, now_ms())
        if result.error == UNKNOWN_EPOCH:
            memory = Memory.wrap(segment.fd, segment.address, segment.mapped_length, False, segment)
            data = bytes(memoryview(memory)[start : start + length])
            last = partition.learn_epochs(data, at_most=self._epoch)
            if last > self._epoch:
                raise LogError(
                    f"the leader of {partition.topic_partition} has records of epoch {last}, and"
                    f" leads in epoch {self._epoch}"
                )
            result = commit(*at, now_ms())
        return int(result.error)

    def _end(self) -> None:
        """No READ is under way."""
        segment = self._segment
        assert segment is not None
        try:
            self.region.deregister()
            if self.pull.phase is Phase.DROPPED:
                self.partition.kernel.clear_tail(segment.base_offset, self.pull.posted)
            self.partition.before_give_back.remove(self._may_give_back)
            self._segment = None
            segment.release()
        finally:  # a fence waits for this
            self._tell(self.pull.reason)

    def _tell(self, what: str | None) -> None:
        soon(self._loop, self._told, what)

    def _told(self, what: str | None) -> None:
        self.news.put_nowait(what)
        if what is not None:
            self.ended.set()


class SegmentReader:
    """See the module.  Life: construct, `connect` on a thread, `close` once it has no transfers."""

    def __init__(self, device: Any, domain: Any) -> None:
        self.domain = domain
        self.is_broken = False  # what failed has failed for all READs of it
        self.is_closed = False
        self._cq = device.create_cq(depth=2 * SENDS)
        try:
            self.qp = domain.create_qp(
                self._cq, self._cq, max_send_wr=SENDS, max_recv_wr=1, max_send_bytes=64
            )
        except BaseException:
            self._cq.close()
            raise
        self._transfers: list[Transfer] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> bytes:
        return bytes(self.qp.address)

    def connect(self, address: bytes) -> None:
        """Reach the leader's end.  TransportError, QueuePairError."""
        self.qp.connect(address, active=True)

    # -- any thread --------------------------------------------------------------------------------

    def add(self, transfer: Transfer) -> None:
        """Begin."""
        with self._lock:
            self._transfers.append(transfer)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="kdirect-catch-up", daemon=True
                )
                self._thread.start()
        self._wake.set()

    def allow(self, transfer: Transfer, position: int) -> None:
        """The leader lets more be read."""
        transfer.allowed = max(transfer.allowed, position)
        self._wake.set()

    def stop(self, transfer: Transfer, reason: str) -> None:
        """Give it up; `Transfer.ended` follows."""
        transfer.stopping = transfer.stopping or reason
        self._wake.set()

    def close(self) -> None:
        """End the queue pair.  A second call does nothing."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = self.is_broken = True
            thread = self._thread
        if thread is not None:
            thread.join(10)
        self.qp.close()
        self._cq.close()

    # -- its thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._wake.clear()
            with self._lock:
                self._transfers = [t for t in self._transfers if not t.pull.is_over]
                transfers = list(self._transfers)
                if not transfers:
                    self._thread = None
                    return
            try:
                self._round(transfers)
            except Exception as e:
                log.exception("reading segments failed")
                for transfer in transfers:
                    self._feed(transfer, machine.Stop(f"{type(e).__name__}: {e}"))

    def _round(self, transfers: list[Transfer]) -> None:
        """A turn for each; then wait until there is something to do."""
        pause_s, is_busy = IDLE_S, False
        for transfer in transfers:
            if transfer.pull.is_over:
                continue
            if transfer.stopping and transfer.pull.phase is Phase.READING:
                self._feed(transfer, machine.Stop(transfer.stopping))
                continue
            if transfer.allowed > transfer.pull.allowed:
                self._feed(transfer, machine.Allowed(transfer.allowed))
            pace = transfer.pace()
            wait_s = 0.0 if pace is None else pace.wait_s()
            if wait_s > 0:
                pause_s = min(pause_s, wait_s)
            elif pace is None:
                is_busy |= self._feed(transfer, machine.Turn()) > 0
            else:
                pace.take(read := self._feed(transfer, machine.Turn(pace.most)))
                is_busy |= read > 0
            is_busy |= self._poll(transfers)
        if is_busy or any(t.pull.is_over for t in transfers):
            return
        if any(t.pull.under_way for t in transfers):
            self._cq.wait(WAIT_MS)
        else:
            self._wake.wait(pause_s)

    def _feed(self, transfer: Transfer, event: Event) -> int:
        """Bytes of READs that were posted."""
        count = 0
        for read in transfer.feed(event):
            wr_id = transfer.number << POSITION_BITS | read.start
            source = transfer.source
            at = read.start - source.position  # in the region
            try:
                self.qp.post_read(
                    *(wr_id, transfer.region, at, read.length),
                    *(source.address + read.start, source.rkey),
                )
                count += read.length
            except Exception as e:  # it is not under way: nobody may wait for its completion
                if not isinstance(e, KdirectError):
                    log.exception("a READ could not be posted")
                self.is_broken = True
                transfer.feed(machine.Lost(read.start, str(e)))
        return count

    def _poll(self, transfers: list[Transfer]) -> bool:
        done = self._cq.poll(SENDS)
        for wc in done:
            start = wc.wr_id & ((1 << POSITION_BITS) - 1)
            for transfer in transfers:
                if transfer.number == wc.wr_id >> POSITION_BITS:
                    if wc.ok:
                        transfer.feed(machine.Landed(start))
                    else:
                        self.is_broken = True
                        status = STATUS_NAMES.get(wc.status, str(wc.status))
                        transfer.feed(machine.Lost(start, f"a READ failed: {status}"))
        return bool(done)


__all__ = ["SegmentReader", "Source", "Transfer"]
