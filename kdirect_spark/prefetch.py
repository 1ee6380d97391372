"""Decodes ahead of Spark on a thread, within a bound of memory.

Law: knows iterators of Arrow batches and nothing else.

Invariants:
- At most `limit_bytes` of finished batches wait, in addition to the batch that is being decoded and
  the one that the consumer holds.  One batch is admitted whatever its size, because otherwise a
  large one could never pass.
- The source iterator runs in one thread at a time.  The thread that ran it last closes it.
- An exception of the source reaches the consumer after every batch before it.
- After `close()` the thread ends at its next batch.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator

import pyarrow as pa

JOIN_TIMEOUT_S = 10.0


class Prefetch:
    """Iterates `source` on a thread of its own.  It has one consumer, whose thread may call
    `close()` any number of times."""

    def __init__(self, source: Generator[pa.RecordBatch, None, None], limit_bytes: int) -> None:
        self._source = source
        self._limit_bytes = limit_bytes
        self._changed = threading.Condition()
        self._ready: deque[pa.RecordBatch] = deque()
        self._ready_bytes = 0
        self.high_mark_bytes = 0
        self._error: BaseException | None = None
        self._ended = False
        self._closed = False
        # A daemon thread, so that a worker process that has to end does not wait for a READ.
        self._thread = threading.Thread(target=self._run, name="kdirect-prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            for batch in self._source:
                size = batch.nbytes
                with self._changed:
                    while (
                        self._ready
                        and self._ready_bytes + size > self._limit_bytes
                        and not self._closed
                    ):
                        self._changed.wait()
                    if self._closed:
                        break
                    self._ready.append(batch)
                    self._ready_bytes += size
                    self.high_mark_bytes = max(self.high_mark_bytes, self._ready_bytes)
                    self._changed.notify_all()
                del batch
        except BaseException as e:
            error = e
        finally:
            try:
                self._source.close()
            except BaseException as e:
                error = error or e
            with self._changed:
                self._error = error
                self._ended = True
                self._changed.notify_all()

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        with self._changed:
            while not self._ready and not self._ended and not self._closed:
                self._changed.wait()
            if self._closed:
                raise StopIteration
            if self._ready:
                batch = self._ready.popleft()
                self._ready_bytes -= batch.nbytes
                self._changed.notify_all()
                return batch
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        raise StopIteration

    def close(self) -> None:
        """Stop the thread and drop the batches that wait."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._ready_bytes = 0
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_TIMEOUT_S)


def prefetched(
    source: Generator[pa.RecordBatch, None, None],
    limit_bytes: int,
    is_last: Callable[[pa.RecordBatch], bool],
) -> Iterator[pa.RecordBatch]:
    """`source`, decoded ahead.  The caller decodes the first batch itself.  A thread starts only if
    more batches follow, so that the small reads of short micro-batches cost no thread."""
    ahead: Prefetch | None = None
    try:
        for batch in source:
            if not is_last(batch):
                ahead = Prefetch(source, limit_bytes)
            yield batch
            del batch
            if ahead is not None:
                yield from ahead
                return
    finally:
        if ahead is not None:
            ahead.close()
        else:
            source.close()
