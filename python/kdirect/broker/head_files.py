"""What becomes of a head's file when RDMA producers are done with it: the work on threads.

Owns: fencing a head and repairing its file, replacing it by the file that was granted ahead, and
removing a file that was granted ahead in vain.  Decides nothing (`kdirect.broker.head_life` does).

All methods run on a thread of the partition's log directory, except where said: they wait for
producers that are inside a copy, for the partition's roll lock and for the disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from kdirect.broker.head_access import HeadAccess
from kdirect.errors import KdirectError
from kdirect.log.head import PreparedHead
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from kdirect.log.segment import Segment
from kdirect.log.urgent import Urgent
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.broker.rdma")


class HeadFiles:
    """See the module."""

    def __init__(self, logs: LogManager) -> None:
        self._logs = logs
        self.fenced = 0  # heads that a producer did not leave in time
        # The segment that a partition is about to roll away from.  Written by the thread that
        # rolls, before it looks whether producers have access to it; read by the event loop after
        # it has given access.  So one of the two notices the other.
        self.rolling: dict[TopicPartition, Segment] = {}

    def is_current(self, access: HeadAccess) -> bool:
        """Is its partition still one of the log?  Any thread."""
        return self._logs.partitions.get(access.partition.topic_partition) is access.partition

    def ensure_head(self, partition: Partition, min_bytes: int) -> Segment:
        """The partition's head, with so much room.  A roll that is under way is over when the
        partition's own `ensure_head` returns, so what was noted of it before is of no use."""
        self.rolling.pop(partition.topic_partition, None)
        return partition.ensure_head(min_bytes)

    def putting_away(self, access: HeadAccess, rolls: bool, min_bytes: int) -> Callable[[], bool]:
        """`put_away`, to be done on a thread; where no fresh file is needed, a failover may wait
        for it."""
        work = partial(self.put_away, access, rolls, min_bytes)
        return work if rolls else Urgent(work)

    def put_away(self, access: HeadAccess, rolls: bool, min_bytes: int) -> bool:
        """Nobody writes the head any more when this returns, and its tail is zeros, or its file is
        not the head.  `rolls`: the log goes on in a fresh file; `min_bytes`: room that will be
        asked for.  False when a producer can still write the head, because there is no room for a
        fresh file."""
        partition = access.partition
        access.fence(notify=False)
        end = access.written_end()
        head = access.segment
        assert head is not None  # only a head is put away; a file granted ahead is discarded
        if not self.is_current(access) or partition.head is not head or head.sealed:
            if not access.vacated:
                head.keep_length = True
            return True
        try:
            if not access.vacated:
                self.fenced += 1
                log.warning(
                    "%s: a producer did not leave its head in time: the log goes on in a fresh"
                    " file",
                    partition.topic_partition,
                )
                partition.fence_head()
            else:
                partition.kernel.clear_tail(head.base_offset, end)
                if rolls:
                    partition.make_room()
            if min_bytes:
                self.ensure_head(partition, min_bytes)
        except (KdirectError, OSError) as e:  # whoever asks for access next is told
            log.error("%s cannot be rolled: %s", partition.topic_partition, e)
            return access.vacated or partition.head is not head
        return True

    def succeed(self, access: HeadAccess, successor: HeadAccess) -> Segment:
        """Seal the head, which its producer has left, and put the file that was granted ahead in
        its place.  Raises when that is not possible: then the head stays, and the other file is
        removed."""
        access.fence(notify=False)
        assert access.segment is not None and successor.prepared is not None
        if not access.vacated:
            access.segment.keep_length = True
        try:
            return access.partition.roll_into(successor.prepared)
        except BaseException:
            self.discard(successor.prepared, successor, notify=True)
            self.put_away(access, False, 0)
            raise

    def discard(
        self, file: PreparedHead, successor: HeadAccess | None, *, notify: bool = False
    ) -> None:
        """Remove a file that does not become the head, after the key to it, if it was granted to
        `successor`."""
        if successor is not None:
            successor.fence(notify=notify)
        file.discard()
