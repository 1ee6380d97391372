"""The thread that copies partitions to other log directories of the broker (AlterReplicaLogDirs).

Owns: how fast they are copied, in which order, and what has to stand still for the last step.  What
is to be moved is `kdirect.log.moves`'; the thread is there as long as anything is.

Moves take turns, a piece each.  ``replica.alter.log.dirs.io.max.bytes.per.second`` holds all of
them back together.  One that fails is tried again after a while, from where it was: a disk that is
full may have room then.

In a cluster each broker moves its own replica, whether it leads or follows.  One that follows is
halted for the last step: its leader may be writing its head by RDMA.  It is moved only while it is
in sync: what is true of a replica is said by the directory that it is in (`member.identity`), and
one that lacks records must not come into a directory that never lost any.

Threads: the event loop, and the mover's own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from kdirect.errors import KdirectError, NotLeaderError
from kdirect.log.manager import LogManager
from kdirect.log.moves import Move
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.broker")

RATE = "replica.alter.log.dirs.io.max.bytes.per.second"
PIECE_BYTES = 4 << 20
LEAST_BYTES = 1 << 16  # at once, however low the rate is
PAUSE_S = 0.1  # while nothing can be done
LEAST_WAIT_S = 0.001
RETRY_S = 2.0  # after a failure
HALT_S = 30.0  # for a replica to let go of its log


class Halting(Protocol):
    """Those who follow other brokers; `kdirect.member.replicas.Replicas`.  On the event loop."""

    def is_in_sync(self, tp: TopicPartition) -> bool:
        """Has this replica all that was committed, by what the cluster knows?"""

    def halt(self, tp: TopicPartition) -> Awaitable[None]:
        """Until `resume`, nothing is done with the log."""

    def resume(self, partition: Partition) -> None:
        """Lead or follow again, if the replica is still to be here."""


class DirectoryMover:
    """See the module.  `config` has the broker's properties by name.  `replicas`, set before
    `start`: None for a broker that is alone.  `on_moved(partition)`: it is in another directory; on
    the mover's thread.  Life: `start` once the logs are open, `stop`, which waits."""

    def __init__(self, config: Mapping[str, Any], logs: LogManager) -> None:
        self.replicas: Halting | None = None
        self.on_moved: Callable[[Partition], None] = lambda partition: None
        self._config = config
        self._logs = logs
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = threading.Event()
        self._owed = 0.0  # bytes that were copied sooner than the rate allows
        self._again_at: dict[Move, float] = {}  # after a failure
        self._copied = 0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Go on with what an earlier run of the broker had begun."""
        self._loop = loop
        self.wake()

    def wake(self) -> None:
        """A move may have been asked for, or given up.  Any thread."""
        with self._lock:
            if self._thread is None and self._has_work() and not self._stopping.is_set():
                self._thread = threading.Thread(target=self._run, name="kdirect-mover", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Return when nothing is copied any more.  What is under way goes on after the next start.
        The event loop must run."""
        self._stopping.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def statistics(self) -> dict[str, int]:
        """Counters, by the names of `kdirect.metrics`; any thread."""
        return {
            "moves_under_way": len(self._logs.moves.under_way()),
            "moves_finished": self._logs.moves.finished,
            "moves_copied_bytes": self._copied,
        }

    # -- the thread --------------------------------------------------------------------------------

    def _has_work(self) -> bool:
        return bool(self._logs.moves.under_way()) or self._logs.moves.has_left

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._logs.moves.remove_left()
                self._logs.moves.end_lost()
                moves = self._logs.moves.under_way()
                self._again_at = {m: at for m, at in self._again_at.items() if m in moves}
                progressed = [self._go_on(move) for move in moves]
            except Exception:  # the thread goes on: others wait for it, too
                log.exception("a look for partitions to move failed")
                progressed = []
            with self._lock:
                if not self._has_work():
                    self._thread = None
                    return
            if not any(progressed):
                self._stopping.wait(PAUSE_S)

    def _go_on(self, move: Move) -> bool:
        """A piece of one move; was there anything to do?"""
        if self._stopping.is_set() or time.monotonic() < self._again_at.get(move, 0.0):
            return False
        rate = int(self._config[RATE])
        if rate == 0:
            return False
        try:
            copied = move.step(min(PIECE_BYTES, max(LEAST_BYTES, rate)))
            self._pay(copied)
            if move.is_ready(max(LEAST_BYTES, rate // 10)) and not self._stopping.is_set():
                return self._finish(move)
            return copied > 0
        except Exception as e:
            if move.is_over:
                log.debug("moving %s has ended: %s", move.partition.topic_partition, e)
            else:
                self._logs.moves.failed(move, e)
                self._again_at[move] = time.monotonic() + RETRY_S
            return False
        finally:
            if move.is_over:
                move.copy.discard()

    def _pay(self, copied: int) -> None:
        """Wait until so much may have been copied at the rate, which may change meanwhile: at a low
        one, that takes hours."""
        self._copied += copied
        self._owed += copied
        paid = time.monotonic()
        while not self._stopping.is_set():
            rate = int(self._config[RATE])
            wait = self._owed / rate if rate else PAUSE_S
            if wait <= LEAST_WAIT_S:
                return
            self._stopping.wait(min(wait, PAUSE_S))
            now = time.monotonic()
            self._owed = max(0.0, self._owed - (now - paid) * rate)
            paid = now

    def _finish(self, move: Move) -> bool:
        """The last step; False: it is not possible now."""
        partition = move.partition
        try:
            if self.replicas is None or not partition.is_copy:
                done = self._logs.moves.finish(move)
            elif self._on_loop(self._halt(partition)):
                try:
                    done = self._logs.moves.finish(move, stands_still=True)
                finally:
                    self._on_loop(self._resume(partition))
            else:
                return False
        except NotLeaderError as e:  # it leads no longer
            log.debug("%s", e)
            return False
        if done:
            self.on_moved(partition)
        return done

    def _on_loop(self, work: Any) -> Any:
        """What a coroutine returns on the event loop.  KdirectError where it does not in time."""
        assert self._loop is not None
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(HALT_S)
        except concurrent.futures.TimeoutError as e:
            future.cancel()
            raise KdirectError(
                f"a replica did not let go of its log within {HALT_S:g} s",
                hint="its move is tried again by itself; see why it is busy if this comes again",
            ) from e

    # -- on the event loop -------------------------------------------------------------------------

    async def _halt(self, partition: Partition) -> bool:
        """False: the replica is not to be moved now."""
        assert self.replicas is not None
        tp = partition.topic_partition
        if not partition.is_copy or not self.replicas.is_in_sync(tp):
            return False
        try:
            await self.replicas.halt(tp)
        except BaseException:
            self.replicas.resume(partition)
            raise
        return True

    async def _resume(self, partition: Partition) -> None:
        assert self.replicas is not None
        if not self._stopping.is_set():
            self.replicas.resume(partition)


def directory_of(logs: LogManager, path: str) -> Path | None:
    """The log directory that a client names."""
    return next((d for d in logs.log_dirs if str(d) == path), None)


__all__ = ["DirectoryMover", "directory_of"]
