"""The threads that do the broker's file and memory work, so that its event loop does none.

Owns: the thread pools, their sizes, and the way back to the event loop.  What may not enter: what
the work is.  The law of the broker: what creates, opens, maps, lengthens, cuts, syncs or removes a
file, touches pages that may not be in memory, or waits for a lock whose holder does one of these,
runs here.

====================  =========  ==========================================================
threads               how many   for what
====================  =========  ==========================================================
``kdirect-room-N``    2 each     of log directory N: room for appends, opening and ending
                                 heads, giving back segments; in a cluster a third one where
                                 both are busy and a fence, a truncation or a new epoch waits
``kdirect-admin``     1          topics, configs, deleted records, producer ids: one after
                                 the other, in the order of requests
``kdirect-read``      4          cold segments for Fetch and for read access
``kdirect-lookup``    1          lookups by time, which decode batches
``kdirect-upkeep``    1          retention, flushes that are due, checkpoints
====================  =========  ==========================================================

A log directory has threads of its own because a slow disk may hold all of them.  The numbers are
small because the threads share the interpreter's lock with the event loop: each thread that is
between two system calls makes the loop wait for its turn. (While 1,000 partitions got their first
records on two cores, a pinging client waited 206 ms at most with four room threads, 32 ms with
two.)
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import resource
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

from kdirect.broker.room_threads import RoomThreads
from kdirect.broker.scheduler import soon
from kdirect.errors import ClosedError, LogError
from kdirect.log.partition import Partition
from kdirect.log.segment import Segment
from kdirect.wire.environment import SYSTEM, Environment

log = logging.getLogger("kdirect.broker")

READ_THREADS = 4
TURN_S = 0.002  # how long the event loop does one kind of work before the others have their turn
DESCRIPTORS = 1 << 16

# `done(result, None)` or `done(None, error)`.
Done: TypeAlias = Callable[[Any, BaseException | None], None]
# `on_thread(partition, work, done)`: see FileThreads.for_partition.
OnThread: TypeAlias = Callable[[Partition, Callable[[], Any], Done], None]


def _report(result: Any, error: BaseException | None) -> None:
    if error is not None:
        log.error("work in the background failed", exc_info=error)


def make_room_for_descriptors() -> None:
    """Have the kernel make this process's table of descriptors as large as it may get, up to
    `DESCRIPTORS` (512 KiB).

    The table of a process with threads doubles when it is full, and the system call that needs it
    waits until every processor has passed a quiet state (`synchronize_rcu`): 10 to 20 ms, for a
    `dup` or an `accept` of the event loop as for any other."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = (DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, DESCRIPTORS)) - 1
    fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # the last ones are in use: then the table has that size
            os.close(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, highest))
    finally:
        os.close(fd)


class FileThreads:
    """See the module.  Life: construct, `start` on the event loop, `close` from any thread.
    Threads are started as they are needed."""

    def __init__(self, log_dirs: Sequence[Path], environment: Environment = SYSTEM) -> None:
        self._clock = environment.monotonic
        # Work on a partition's files has failed.  On the thread that did it.
        self.failed: Callable[[Partition, BaseException], None] = lambda partition, error: None
        self._rooms = {
            directory: RoomThreads(f"kdirect-room-{i}") for i, directory in enumerate(log_dirs)
        }
        self._admin = ThreadPoolExecutor(1, thread_name_prefix="kdirect-admin")
        self._reads = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="kdirect-read")
        self._lookups = ThreadPoolExecutor(1, thread_name_prefix="kdirect-lookup")
        self._upkeep = ThreadPoolExecutor(1, thread_name_prefix="kdirect-upkeep")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outcomes: deque[tuple[Done, Any, BaseException | None]] = deque()  # not reported yet
        self._turn_is_due = False
        self._under_way = 0  # of `for_partition`: counted on the loop
        self._settled = asyncio.Event()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Bind to the event loop that `done` is called on."""
        self._loop = loop

    def for_partition(self, partition: Partition, work: Callable[[], Any], done: Done) -> None:
        """Do `work` on a thread of the partition's log directory, then call `done` on the event
        loop, never before this returns.  Works of one partition may overlap: a caller that needs an
        order waits for `done`.  `Urgent` work does not wait for what allocates."""
        self._under_way += 1
        try:
            self._rooms[partition.directory.parent].submit(work, partition).add_done_callback(
                lambda f: self._tell(f, done, partition)
            )
        except RuntimeError:  # the pool is closed
            error = ClosedError(
                f"partition {partition.topic_partition} is closed", hint="the broker is stopping"
            )
            self._on_loop(done, None, error)

    def expect_failovers(self) -> None:
        """From now on a third thread of a directory does what is urgent while both are busy."""
        for room in self._rooms.values():
            room.fails_over = True

    def hurry(self, partition: Partition) -> None:
        """Another broker is to lead the partition, or this one: what waits of `for_partition` does
        not wait for the works of other partitions any more."""
        self._rooms[partition.directory.parent].hurry(partition)

    async def settled(self, timeout_s: float) -> None:
        """Wait until no work of `for_partition` is under way, but no longer than that."""
        if self._under_way:
            self._settled.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._settled.wait(), timeout_s)

    def _tell(self, future: Future[Any], done: Done, partition: Partition | None = None) -> None:
        if future.cancelled():
            self._on_loop(
                done, None, ClosedError("the broker is stopping", hint="ask again when it is back")
            )
        elif (error := future.exception()) is not None:
            self._on_loop(done, None, error)
            if partition is not None and isinstance(error, LogError | OSError):
                self.failed(partition, error)
        else:
            self._on_loop(done, future.result(), None)

    def _on_loop(self, done: Done, result: Any, error: BaseException | None) -> None:
        """Any thread.  It notes first and looks last, so that no outcome is left behind."""
        loop = self._loop
        if loop is None:
            return
        self._outcomes.append((done, result, error))
        if self._turn_is_due:
            return
        self._turn_is_due = True
        soon(loop, self._tell_outcomes)  # if it is closed, nobody waits any more

    def _tell_outcomes(self) -> None:
        """Call `done` for what the threads have finished; after `TURN_S` others have their turn."""
        self._turn_is_due = False
        end = self._clock() + TURN_S
        try:
            while self._outcomes:
                self._done(*self._outcomes.popleft())
                if self._clock() >= end:
                    return
        finally:
            if self._outcomes and not self._turn_is_due:
                self._turn_is_due = True
                asyncio.get_running_loop().call_soon(self._tell_outcomes)

    def _done(self, done: Done, result: Any, error: BaseException | None) -> None:
        self._under_way -= 1
        try:
            done(result, error)  # what it raises is the event loop's to log
        finally:
            if not self._under_way:
                self._settled.set()

    def release(self, segment: Segment) -> None:
        """Give back one `acquire` of a segment; on a thread when it is the last one, which may
        unmap or cut the file.  Any thread."""
        try:
            if not segment.release_nowait():
                self._rooms[segment.directory.parent].submit(segment.release)
        except RuntimeError:  # the pool is closed, and so is everything in a moment
            segment.release()

    def background(self, work: Callable[[], Any]) -> None:
        """Do what nobody waits for.  On the event loop."""
        self._under_way += 1
        try:
            self._reads.submit(work).add_done_callback(lambda f: self._tell(f, _report))
        except RuntimeError:  # the pool is closed, and so is everything in a moment
            self._under_way -= 1
            work()

    async def admin(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """What `work` returns or raises; works are done one after the other, in the order of the
        calls."""
        return await asyncio.get_running_loop().run_in_executor(self._admin, work, *arguments)

    async def read(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Read what is not in memory yet."""
        return await asyncio.get_running_loop().run_in_executor(self._reads, work, *arguments)

    async def look_up(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Read the log for long: one request after the other."""
        return await asyncio.get_running_loop().run_in_executor(self._lookups, work, *arguments)

    async def upkeep(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Periodic work, one after the other."""
        return await asyncio.get_running_loop().run_in_executor(self._upkeep, work, *arguments)

    def close(self) -> None:
        """Drop what has not begun, wait for what has; blocks."""
        for room in self._rooms.values():
            room.shutdown(wait=False)
        for pool in (self._admin, self._reads, self._lookups, self._upkeep):
            pool.shutdown(wait=False, cancel_futures=True)
        for room in self._rooms.values():
            room.shutdown(wait=True)
        for pool in (self._admin, self._reads, self._lookups, self._upkeep):
            pool.shutdown(wait=True)
