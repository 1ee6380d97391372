"""Completion queues of the verbs provider.

A CompletionQueue of the contract consists of one or more of the device's, each with its channel.
Another one is made when the queue pairs that use it could together overrun those that exist.  So it
cannot overrun, whatever depth the device allows.

Law of the room: the depths that the contract promises ("outstanding until polled") and the waiting.
A queue pair attaches itself, interprets its completions (`Attached.completed`) and says when it
ends.  What may not enter: pyverbs itself (use `kdirect.rdma.verbs`), registration, sockets.

Locks, in this order: completion queue, queue pair.  `VerbsCompletionQueue._lock` guards the
device's queues and what was drained from them.  It is not held while anything blocks.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from kdirect.errors import ClosedError, RdmaError
from kdirect.rdma.contract import CompletionQueue, WorkCompletion
from kdirect.rdma.verbs_limits import queue_error
from kdirect.rdma.verbs_opened import OpenedDevice


class Attached(Protocol):
    """What a completion queue asks of a queue pair."""

    sends_out: int  # send-side requests that were not polled yet
    receives_out: int

    @property
    def qp_num(self) -> int: ...

    def completed(self, wc: Any, ready: deque[Completed]) -> None:
        """The device completed `wc`: append to `ready` what that completes.  Under the lock of the
        completion queue."""


Completed = tuple[WorkCompletion, Attached, bool]  # completion, whose, whether it is a receive


class Shard:
    """One completion queue of the device, with its channel.  `free`: entries not reserved."""

    __slots__ = ("channel", "cq", "fd", "free")

    def __init__(self, cq: Any, channel: Any, fd: int, free: int) -> None:
        self.cq = cq
        self.channel = channel
        self.fd = fd
        self.free = free


class VerbsCompletionQueue(CompletionQueue):
    """See CompletionQueue and the module.  `fileno()` is an epoll descriptor over the channels and
    the descriptor of `wake`."""

    def __init__(
        self, opened: OpenedDevice, depth: int, on_close: Callable[[VerbsCompletionQueue], None]
    ) -> None:
        super().__init__(depth)
        self.opened = opened
        self._on_close = on_close
        self._lock = threading.Lock()
        self._shards: list[Shard] = []
        self._pairs: dict[int, Attached] = {}  # by number: those with completions to come
        self._ready: deque[Completed] = deque()
        # Queue pairs that went to ERROR since a waiter was last told.
        self._ends: deque[int] = deque()
        self._woken = False
        self._closed = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._wake_fd, select.EPOLLIN)

    # -- for queue pairs ---------------------------------------------------------------------------
    def reserve(self, entries: int) -> Shard:
        """A queue of the device with room for `entries` more completions."""
        self._check()
        with self._lock:
            for shard in self._shards:
                if shard.free >= entries:
                    shard.free -= entries
                    return shard
            context = self.opened.context
            size = max(entries, min(self.depth, context.max_cqe))
            if size > context.max_cqe:
                raise RdmaError(
                    f"{entries} completions of one queue pair are more than a completion queue of"
                    f" {self.opened.choice.device} holds ({context.max_cqe})",
                    hint="lower max_send_wr or max_recv_wr (rdma.max.in.flight)",
                )
            try:
                channel, fd = context.create_channel()
                try:
                    cq = context.create_cq(size, channel)
                except OSError:
                    context.destroy_channel(channel, fd)
                    raise
            except OSError as e:
                raise queue_error(e.errno or 0, "a completion queue", f"{size} entries") from e
            shard = Shard(cq, channel, fd, size - entries)
            self._epoll.register(fd, select.EPOLLIN)
            self._shards.append(shard)
        # A sleeper has asked the other device queues for an event, but not this one.
        self._signal()
        return shard

    def attach(self, qp: Attached) -> None:
        with self._lock:
            self._pairs[qp.qp_num] = qp

    def give_back(self, shard: Shard, entries: int) -> None:
        """A queue pair for which `reserve` made room could not be created."""
        with self._lock:
            shard.free += entries

    def release(
        self, qp: Attached, shard: Shard, entries: int, flushed: Iterable[Completed]
    ) -> None:
        """`qp` is destroyed.  `flushed` yields what it had outstanding; it runs under the lock."""
        with self._lock:
            self._ready.extend(flushed)
            if self._pairs.get(qp.qp_num) is qp:
                del self._pairs[qp.qp_num]
            shard.free += entries
        self._signal()

    def drain(self, n: int) -> None:
        """Take up to `n` completions of each device queue, for `poll` to return later."""
        with self._lock:
            self._drain(n)

    def ended(self, qp_num: int) -> None:
        """A queue pair went to ERROR: whoever sleeps here is told."""
        self._ends.append(qp_num)
        self._signal()

    def _signal(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            os.eventfd_write(self._wake_fd, 1)

    # -- taking ------------------------------------------------------------------------------------
    def _drain(self, n: int) -> None:
        """Move up to `n` completions of each device queue to `_ready`.  Under the lock."""
        context = self.opened.context
        for shard in self._shards:
            try:
                taken = context.poll(shard.cq, n)
            except OSError as e:
                raise RdmaError(
                    f"the completion queue cannot be polled: {e.strerror}",
                    hint="the device was removed or failed; open it again",
                ) from e
            for wc in taken:
                qp = self._pairs.get(wc.qp_num)
                if qp is not None:
                    qp.completed(wc, self._ready)

    def poll(self, n: int = 16) -> list[WorkCompletion]:
        self._check()
        with self._lock:
            if self._closed:
                raise self._closed_error()
            ready = self._ready
            if len(ready) < n:
                self._drain(n - len(ready))
            if not ready:
                return []
            out = []
            for _ in range(min(n, len(ready))):
                wc, qp, is_receive = ready.popleft()
                if is_receive:
                    qp.receives_out -= 1
                else:
                    qp.sends_out -= 1
                out.append(wc)
            return out

    # -- waiting -----------------------------------------------------------------------------------
    def _has_news(self) -> bool:
        """Whether there is something to tell a waiter: a completion, or the end of a queue pair."""
        with self._lock:
            if self._closed:
                raise self._closed_error()
            if not self._ready:
                self._drain(16)
            told = bool(self._ready or self._ends)
            self._ends.clear()
            return told

    def _consume_events(self) -> None:
        """Take what made `fileno()` readable."""
        with self._lock:
            if self._closed:
                return
            readable = {fd for fd, _ in self._epoll.poll(0)}
            while readable:
                for shard in self._shards:
                    if shard.fd in readable:
                        self.opened.context.take_cq_event(shard.channel, shard.cq)
                if self._wake_fd in readable:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake_fd)
                readable = {fd for fd, _ in self._epoll.poll(0)}

    def _request_events(self) -> None:
        with self._lock:
            if not self._closed:
                for shard in self._shards:
                    self.opened.context.request_notify(shard.cq)

    def wait(self, timeout_ms: float = -1, spin_us: float = 0) -> bool:
        self._check()
        deadline = None if timeout_ms < 0 else time.monotonic() + timeout_ms / 1000
        spin_until = time.monotonic() + spin_us / 1e6 if spin_us > 0 else 0.0
        armed = False
        while True:
            if self._has_news():
                return True
            if self._woken:
                self._woken = False
                return False
            now = time.monotonic()
            if now < spin_until:
                continue
            if deadline is not None and now >= deadline:
                return False
            if not armed:
                self._consume_events()
                self._request_events()
                armed = True
                continue  # what came before the request causes no event: look again
            self._epoll.poll(-1 if deadline is None else max(0.0, deadline - now) + 0.0005, 1)
            armed = False

    def fileno(self) -> int:
        return self._epoll.fileno()

    def arm(self) -> bool:
        self._check()
        self._consume_events()
        self._request_events()
        return self._has_news()

    def wake(self) -> None:
        self._check()
        self._woken = True
        self._signal()

    # -- life --------------------------------------------------------------------------------------
    def close(self) -> None:
        if self._closed or self.opened.forked:
            return
        with self._lock:
            if self._pairs:
                raise RdmaError(
                    f"the completion queue is used by {len(self._pairs)} queue pairs",
                    hint="close the queue pairs first",
                )
            self._closed = True
            for shard in self._shards:
                self._epoll.unregister(shard.fd)
                self.opened.context.destroy(shard.cq)
                self.opened.context.destroy_channel(shard.channel, shard.fd)
            self._shards.clear()
        self._signal()
        self._on_close(self)

    def __del__(self, _close: Any = os.close) -> None:  # the module may be gone by then
        if hasattr(self, "_epoll") and not self._epoll.closed:
            self._epoll.close()
            _close(self._wake_fd)

    def _check(self) -> None:
        self.opened.check_process()
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> ClosedError:
        return ClosedError("the completion queue is closed", hint="create another")

    def abandon(self) -> None:
        self._lock = threading.Lock()
