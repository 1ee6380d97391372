"""Lists of aborted transactions that readers of committed records READ beside granted files.

Owns: the memory of one list (`kdirect.format.layout`) for each such grant: how large it is, where
it is cut from, and giving it back.  What is in it is the kernel's (`kdirect.log.aborted_list`).

Life of a list: made on a read thread when a file is opened for a reader, it goes to the grant, and
back when that ends (`ReadAccess.release`).  A file that changes no more has its list written at
once, and none where nothing in it was aborted.  Beside a slot the kernel writes it from the slot's
attachment to its detachment or last update, which come before it is given back.  The client alone
READs it, and a READ that comes too late finds the key ended, or a piece that rests
(`kdirect.broker.slices`).

Memory is bounded: a list has room for twice what it begins with.  When it is full the reader asks
for access again, and gets another one from where it is.  Whoever would have to know more than
MOST_ENTRIES of them reads by Fetch.

Threads: any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kdirect.broker.grants import Peer
from kdirect.broker.slices import Slice
from kdirect.errors import RefusedError
from kdirect.format import layout
from kdirect.format.error_codes import ErrorCode
from kdirect.log.kernel_transactions import aborted_in, write_aborted_list
from kdirect.log.partition import Partition
from kdirect.rdma.contract import Access, Memory

FIRST_ENTRIES = 25  # of a list beside a slot: 1 KiB, a piece of memory that lists share
MOST_ENTRIES = 1 << 18  # 10 MiB
NO_END = (1 << 63) - 1


@dataclass(eq=False, slots=True)
class AbortedRegion:
    """One list, for a reader from offset `start` on."""

    region: Any
    start: int
    entries: int

    @property
    def place(self) -> tuple[int, int, int]:
        """As `CommitKernel.attach_slot` takes it."""
        return self.region.address, self.entries, self.start

    def give_back(self, deregister: Callable[[Any], None]) -> None:
        """Nobody writes it any more.  `deregister` ends a key that is the list's alone."""
        if isinstance(self.region, Slice):
            self.region.give_back()
        else:
            deregister(self.region)


def region_beside_slot(peer: Peer, partition: Partition, start: int) -> AbortedRegion:
    """A list for a file of which more may be read in time; the kernel fills it when it is attached.
    RefusedError, RdmaError."""
    count = _count(partition, start, NO_END)
    return _region(peer, start, max(FIRST_ENTRIES, min(2 * count, MOST_ENTRIES)))


def region_of_finished(
    peer: Peer, partition: Partition, start: int, end: int
) -> AbortedRegion | None:
    """The list for a reader of [start, end) of a file that may be read to its end; None: nothing in
    it was aborted.  RefusedError, RdmaError."""
    count = _count(partition, start, end)
    if count == 0:
        return None
    made = _region(peer, start, count)
    if not write_aborted_list(partition.kernel, *made.place[:2], 0, start, end):
        made.give_back(lambda region: region.deregister())
        raise _deleted(partition, start)
    return made


def _count(partition: Partition, start: int, end: int) -> int:
    """How many entries there are for a reader of [start, end)."""
    count = aborted_in(partition.kernel, start, end)
    if count < 0:
        raise _deleted(partition, start)
    if count > MOST_ENTRIES:
        raise RefusedError(
            layout.ERROR_ACCESS_DISABLED,
            f"{count} transactions were aborted beside what is read of"
            f" {partition.topic_partition}, and a list tells {MOST_ENTRIES}; use TCP",
        )
    return count


def _deleted(partition: Partition, start: int) -> RefusedError:
    return RefusedError(
        ErrorCode.OFFSET_OUT_OF_RANGE,
        f"offset {start} of {partition.topic_partition} was deleted just now",
    )


def _region(peer: Peer, start: int, entries: int) -> AbortedRegion:
    length = layout.ABORTED_HEAD_BYTES + entries * layout.ABORTED_ENTRY_BYTES
    if entries <= FIRST_ENTRIES:
        return AbortedRegion(
            peer.slices.take(length, Access.REMOTE_READ, "kdirect-aborted"), start, entries
        )
    memory = Memory.anonymous(length, "kdirect-aborted")
    return AbortedRegion(
        peer.domain.register(memory, Access.REMOTE_READ, 0, length), start, entries
    )


__all__ = ["AbortedRegion", "region_beside_slot", "region_of_finished"]
