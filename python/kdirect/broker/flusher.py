"""Group commit: one fsync for all producers that wait for the same partition
(`log.flush.before.ack`).

While an fsync runs, later callers gather; what they appended may have missed the running one, so
they share the next.  Called on the event loop; the fsync itself runs on a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kdirect.errors import LogError
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition


class Flusher:
    """`on_flushed(topic partition)` is called after each fsync, on the event loop."""

    def __init__(self, on_flushed: Callable[[TopicPartition], None]) -> None:
        self.on_flushed = on_flushed
        # An fsync has failed.  On a thread.
        self.failed: Callable[[Partition, BaseException], None] = lambda partition, error: None
        self._waiting: dict[TopicPartition, list[asyncio.Future[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="kdirect-flush")
        self.flushes = 0

    async def flushed(self, partition: Partition) -> None:
        """Return when everything appended to `partition` so far is on disk; raises what the fsync
        raised."""
        await self.begin(partition)

    def begin(self, partition: Partition) -> asyncio.Future[None]:
        """The same, without waiting: nobody need look at the future."""
        tp = partition.topic_partition
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.get(tp)
        if waiting is None:
            self._waiting[tp] = [future]
            task = asyncio.ensure_future(self._run(partition))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            waiting.append(future)
        return future

    async def _run(self, partition: Partition) -> None:
        tp = partition.topic_partition
        loop = asyncio.get_running_loop()
        while self._waiting[tp]:
            batch, self._waiting[tp] = self._waiting[tp], []
            error: Exception | None = None
            try:
                self.flushes += 1
                await loop.run_in_executor(self._pool, partition.flush)
            except Exception as e:
                error = e
            for future in batch:
                if not future.done():
                    if error is None:
                        future.set_result(None)
                    else:
                        future.set_exception(error)
                        future.exception()  # marked as seen: with acks=0 nobody else looks
            if isinstance(error, LogError | OSError):
                self._look_into(partition, error)
            self.on_flushed(tp)
        del self._waiting[tp]

    def _look_into(self, partition: Partition, error: Exception) -> None:
        """Nobody waits for what the error says of the disk, which may take as long as it likes."""
        with contextlib.suppress(RuntimeError):  # the pool is closed: the broker stops
            self._pool.submit(self.failed, partition, error)

    def close(self) -> None:
        """Wait for running fsyncs; blocks."""
        self._pool.shutdown(wait=True)
