"""The 8-byte word that orders the producers of a shared head (KafkaDirect §4.2.2, figure 5).

A producer of a shared head adds to the word to reserve its place: the next order, and the position
where its bytes go.  The word counts orders in its high bits and positions in its low bits
(`kdirect.format.layout`, ``SHARED_*``).

Law of the room: owns the memory of the words, and the broker's queue pair with itself.  The broker
reserves and closes over that queue pair, as producers do over theirs, because atomics of an RNIC
are atomic among themselves, and not with those of the processor.  Who may reserve is decided
elsewhere (`kdirect.broker.produce_access`).

Memory: a word has a page of its own, so that a key to the word opens nothing else.  The broker
stores into it before its first key is given out, and never again.  The page lives as long as any
key to it.

Threads: any.  A loopback has one lock, under which an atomic takes a round trip to the broker's own
RNIC; a word has one lock, for two threads may close it.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any, NamedTuple

from kdirect.errors import RdmaError, TransportError
from kdirect.format import layout
from kdirect.rdma.contract import Access, Memory, MemoryRegion

log = logging.getLogger("kdirect.broker.rdma")

CLOSE = 1 << layout.SHARED_CLOSE_SHIFT
TIMEOUT_MS = 5000


class Reservation(NamedTuple):
    """What a word held before an atomic was added to it: the order, and the position in the head in
    bytes, that this atomic has reserved."""

    order: int
    position: int


class SharedWord:
    """The word of one head, which begins at `position` of the head.  `region` is the broker's own
    key to it; producers get theirs by `register`.  Life: construct, `close`, `end`."""

    def __init__(self, loopback: Loopback, position: int) -> None:
        self._loopback = loopback
        self.memory = Memory.anonymous(layout.SHARED_WORD_BYTES, "kdirect-word")
        memoryview(self.memory)[: layout.SHARED_WORD_BYTES] = position.to_bytes(8, sys.byteorder)
        self.region = self.register(loopback.domain)
        self.closed: Reservation | None = None  # what it held when it was closed
        self._lock = threading.Lock()  # two threads may close it

    def register(self, domain: Any) -> MemoryRegion:
        """A key to the word for the clients of a protection domain: it permits atomics only."""
        return domain.register(
            self.memory, Access.LOCAL_WRITE | Access.REMOTE_ATOMIC, 0, layout.SHARED_WORD_BYTES
        )  # type: ignore[no-any-return]

    def reserve(self, length: int) -> Reservation:
        """Reserve `length` bytes for the broker itself, which appends what came over TCP."""
        return self._loopback.fetch_add(self.region, layout.SHARED_ONE_ORDER + length)

    def close(self) -> Reservation:
        """Make every later reservation fail: its position lies after the end of any head.
        Returns what was reserved until now, or, when that cannot be told, as if the whole head
        was.  A second call returns the same."""
        with self._lock:
            if self.closed is None:
                try:
                    self.closed = self._loopback.fetch_add(self.region, CLOSE)
                except (RdmaError, TransportError) as e:
                    log.error("a shared word cannot be closed: %s", e)
                    self.closed = Reservation(0, layout.SHARED_POSITION_MASK)
            return self.closed

    def end(self) -> None:
        """End the broker's own key: it reserves no more."""
        self.region.deregister()


class Loopback:
    """The broker's queue pair with itself.  Life: made on an engine's device for its first shared
    head, and closed with the engine.  One that is `broken` is replaced before the next shared head;
    the words that it served cannot be closed, so their heads are aborted."""

    def __init__(self, device: Any) -> None:
        self._lock = threading.Lock()
        self.broken = False
        self.domain = device.alloc_pd()
        self._cq = device.create_cq(depth=16)
        self._other_cq = device.create_cq(depth=16)
        self._qp = self.domain.create_qp(
            self._cq, self._other_cq, max_send_wr=4, max_recv_wr=1, max_send_bytes=64
        )
        self._target = self.domain.create_qp(
            self._other_cq, self._other_cq, max_send_wr=1, max_recv_wr=1, max_send_bytes=64
        )
        address = self._qp.address
        self._target.connect(address, active=False)
        self._qp.connect(self._target.address, active=True)
        self._result = self.domain.register(
            Memory.anonymous(8, "kdirect-reserved"), Access.LOCAL_WRITE, 0, 8
        )
        self._view = memoryview(self._result.memory)[:8]

    def fetch_add(self, word: MemoryRegion, add: int) -> Reservation:
        """FETCH_AND_ADD on a word of this domain; what it held before.  Waits for its completion
        up to `TIMEOUT_MS`; TransportError without one, and the loopback is broken."""
        with self._lock:
            try:
                self._qp.post_fetch_add(1, self._result, 0, word.address, word.rkey, add)
                completions = self._cq.poll(1)
                while not completions:
                    if not self._cq.wait(TIMEOUT_MS, 20):
                        raise TransportError(
                            "an atomic of the broker on its own memory did not complete",
                            hint="see the device's state",
                        )
                    completions = self._cq.poll(1)
                if not completions[0].ok:
                    raise TransportError(
                        f"an atomic of the broker on its own memory failed: {completions[0]}",
                        hint="see the device's state",
                    )
            except (RdmaError, TransportError):
                self.broken = True
                raise
            old = int.from_bytes(self._view, sys.byteorder)
        return Reservation(old >> layout.SHARED_ORDER_SHIFT, old & layout.SHARED_POSITION_MASK)

    def close(self) -> None:
        self._qp.close()
        self._target.close()
        self.domain.close()
        self._cq.close()
        self._other_cq.close()
