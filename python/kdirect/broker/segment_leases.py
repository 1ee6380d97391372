"""The sealed segments that followers of other brokers READ (catch-up).

Owns: the leader's part of catch-up for one link: the queue pair that READs come over, and the
segments that are leased.  A READ costs this broker nothing: all that it does is to answer
AskSegments, which leases several segments at once; a throttle holds the follower back by leasing
one, and a piece of it at a time.

**A lease** keeps a sealed segment mapped and registered for READs of one follower.  Whatever
retention deletes meanwhile is unlinked, and its mapping stays.  It ends when the follower gives it
back, or asks for segments that are not the next ones; when this broker leads the partition no
longer (`end`); and with the link: a follower that is gone keeps nothing.

**Bounds**: one answer leases at most `MOST_AHEAD` segments, and more than one only as long as they
have at most `AHEAD_BYTES` together and half of the link's `MOST_LEASES` are free for first ones.
So the memory that is mapped and registered does not grow with the log.

**Throttle**: what a follower may READ is charged when it is allowed, a piece of a second at a time,
because a READ is not seen here.

Threads: construct, `open`, `give_back` and `close` on a thread that may wait; the rest on the event
loop.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

from kdirect.errors import KdirectError, RefusedError
from kdirect.format import layout
from kdirect.format.error_codes import ErrorCode
from kdirect.log.partition import Partition
from kdirect.log.replica_log import SealedExtent
from kdirect.member.throttle import Pace
from kdirect.model import TopicPartition
from kdirect.rdma.contract import Access, Memory

log = logging.getLogger("kdirect.broker.rdma")

MOST_LEASES = 64  # of one link
MOST_AHEAD = 8  # that one answer leases
AHEAD_BYTES = 512 << 20  # of several segments that one answer leases


class _Lease(NamedTuple):
    tp: TopicPartition
    sealed: SealedExtent
    region: Any


class SegmentLeases:
    """See the module.  `device`, `domain`: of the link's end here."""

    def __init__(self, device: Any, domain: Any) -> None:
        self._device = device
        self._domain = domain
        self._cq: Any = None
        self._qp: Any = None
        self._leases: dict[int, _Lease] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._leases)

    # -- the queue pair ----------------------------------------------------------------------------

    def open(self, address: bytes) -> bytes:
        """A queue pair that a follower's end at `address` may READ over, in place of the one that
        there was; its own address."""
        with self._lock:
            self._check_open()
            self._end_queue_pair()
            # Nothing is posted here, so nobody waits for the queue.
            self._cq = self._device.create_cq(depth=16)
            self._qp = self._domain.create_qp(
                self._cq, self._cq, max_send_wr=1, max_recv_wr=1, max_send_bytes=64
            )
            self._qp.connect(address, active=False)
            return bytes(self._qp.address)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RefusedError(layout.ERROR_UNKNOWN_CONNECTION, "the link is closed")

    def _end_queue_pair(self) -> None:
        qp, cq, self._qp, self._cq = self._qp, self._cq, None, None
        if qp is not None:
            qp.close()
        if cq is not None:  # also one for which no queue pair could be made
            cq.close()

    # -- leases ------------------------------------------------------------------------------------

    async def answer(
        self,
        tp: TopicPartition,
        partition: Partition,
        x: Any,
        pace: Pace | None,
        read: Callable[..., Awaitable[Any]],
    ) -> dict[str, Any]:
        """The segments of a row of AskSegmentsResponse, for row `x` of the request: none where the
        log goes on in its last segment.  `read` awaits work on a thread.  RefusedError,
        OffsetOutOfRangeError."""
        numbers = [int(x.lease)]
        if x.lease < 0:
            most = MOST_AHEAD if pace is None else 1
            numbers = await read(partial(self._lease, tp, partition, x.offset, most))
        return {"segments": [self._told(tp, number, x, pace) for number in numbers]}

    def _told(self, tp: TopicPartition, number: int, x: Any, pace: Pace | None) -> dict[str, Any]:
        """What the follower is told of a lease."""
        lease = self._leases.get(number)
        if lease is None or lease.tp != tp:
            raise RefusedError(
                ErrorCode.INVALID_REQUEST, f"{tp}: there is no lease {number} of it on this link"
            )
        sealed = lease.sealed
        read_to = sealed.position if x.lease < 0 else int(x.position)
        if not sealed.position <= read_to <= sealed.size:
            raise RefusedError(
                ErrorCode.INVALID_REQUEST, f"{tp}: position {read_to} is not in the leased segment"
            )
        allowed, wait_ms = _allow(pace, read_to, sealed.size)
        return {
            "lease": number,
            "base_offset": sealed.base_offset,
            "position": sealed.position,
            "size": sealed.size,
            "end_offset": sealed.end_offset,
            "address": lease.region.address,
            "rkey": lease.region.rkey,
            "allowed": allowed,
            "wait_ms": wait_ms,
        }

    def _lease(self, tp: TopicPartition, partition: Partition, offset: int, most: int) -> list[int]:
        """Hold the sealed segment of `offset` and those after it, `most` of them; their numbers.
        On a thread.

        Whoever asks may be reading the one before them, and reads under no other lease of the
        partition any more.  So nobody has to give one back while it goes on; and those whose answer
        came to nobody, because the replica was fenced meanwhile, end here, too."""
        held = [(n, lease) for n, lease in list(self._leases.items()) if lease.tp == tp]
        self.give_back([n for n, lease in held if lease.sealed.end_offset != offset])
        if len(self._leases) >= MOST_LEASES:
            raise RefusedError(
                layout.ERROR_ACCESS_DISABLED,
                f"{tp}: {MOST_LEASES} segments are leased on this link already",
            )
        numbers: list[int] = []
        size = 0
        try:
            while len(numbers) < most and (sealed := partition.sealed_extent(offset)) is not None:
                size += sealed.size
                is_room = size <= AHEAD_BYTES and 2 * len(self._leases) < MOST_LEASES
                if numbers and not is_room:
                    sealed.extent.release()
                    break
                numbers.append(self._hold(tp, sealed))
                offset = sealed.end_offset
        except (KdirectError, OSError):  # where that one is asked for first, it is told
            if not numbers:
                raise
        except BaseException:
            self.give_back(numbers)
            raise
        return numbers

    def _hold(self, tp: TopicPartition, sealed: SealedExtent) -> int:
        """Register a segment for READs; the number of its lease."""
        extent = sealed.extent
        try:
            # The file is the log's, and is held by `extent` until the key has ended.
            memory = Memory.wrap(
                extent.fd, extent.address, extent.mapped_length, False, extent.owner
            )
            with self._lock:
                self._check_open()
                region = self._domain.register(memory, Access.REMOTE_READ, 0, extent.length)
                number = next(self._numbers)
                self._leases[number] = _Lease(tp, sealed, region)
                return number
        except BaseException:
            extent.release()
            raise

    def are_held(self, tp: TopicPartition) -> bool:
        """Is some segment of this partition leased?"""
        return any(lease.tp == tp for lease in list(self._leases.values()))

    def end(self, tp: TopicPartition) -> None:
        """All leases of a partition, which this broker leads no longer."""
        self.give_back([n for n, lease in list(self._leases.items()) if lease.tp == tp])

    def give_back(self, numbers: list[int]) -> None:
        """The follower needs these no more; numbers that are not known are nothing.  Waits for a
        follower that is inside a READ."""
        for number in numbers:
            lease = self._leases.pop(number, None)
            if lease is not None:
                lease.region.deregister()
                lease.sealed.extent.release()

    def close(self) -> None:
        """With the link, before its domain."""
        with self._lock:
            self._is_closed = True
            self._end_queue_pair()
        self.give_back(list(self._leases))


def _allow(pace: Pace | None, read_to: int, size: int) -> tuple[int, int]:
    """Up to which position may be read, and how many ms to wait before more is asked for."""
    if pace is None or read_to == size:
        return size, 0
    if pace.wait_s() <= 0:
        count = min(size - read_to, pace.most)
        pace.take(count)
        read_to += count
    return read_to, math.ceil(1000 * pace.wait_s())


__all__ = ["AHEAD_BYTES", "MOST_AHEAD", "MOST_LEASES", "SegmentLeases"]
