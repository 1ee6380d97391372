"""Vector clocks: how far event time has come in each topic partition (Slash §5.1).

An entry is the greatest event time read from its partition less the input's delay, or TIME_MIN
while nothing was read.  The reader of a partition is the only one that moves its entry, and tells
it to every leader at the end of a batch.  A window may be emitted when the least entry has passed
its end (P1).  An entry for each topic partition, not for each executor, survives a change of the
number of executors.

Law: an entry never falls, merging is idempotent, commutative and associative, and `closes` never
falls.  Pure; a clock is an immutable value.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kdirect.errors import FormatError
from kdirect.state.batches import Partition
from kdirect.state.windows import TIME_MIN, clamp


@dataclass(frozen=True, slots=True)
class VectorClock:
    """The entries of some partitions."""

    entries: Mapping[Partition, int]

    def seen(self, tp: Partition, max_time_us: int | None, delay_us: int) -> VectorClock:
        """After rows of `tp` of which the latest has this event time; None: no row had one."""
        if max_time_us is None:
            return self
        time = clamp(max_time_us - delay_us)
        if time <= self.entries[tp]:
            return self
        return VectorClock({**self.entries, tp: time})

    def merged(self, other: Mapping[Partition, int]) -> VectorClock:
        """The greater of both entries of each partition."""
        found = dict(self.entries)
        for tp, time in other.items():
            found[tp] = max(time, found.get(tp, TIME_MIN))
        return VectorClock(found)

    def only(self, partitions: Iterable[Partition]) -> VectorClock:
        return VectorClock({tp: self.entries[tp] for tp in partitions})

    def closes(self, idle: frozenset[Partition], before: int) -> int:
        """The event time that all partitions but the idle ones have passed.  If all are idle, none
        holds a window open that another one has passed, so the furthest of them counts.  At least
        `before`: a partition that is no longer idle may come late, but what was emitted stays so.
        """
        counted = [time for tp, time in self.entries.items() if tp not in idle]
        if not counted:
            return max([before, *self.entries.values()])
        return max(before, min(counted))


def pack(clock: VectorClock) -> bytes:
    """The entries in the order of their partitions, eight bytes each, little endian: what goes with
    the last page of a batch.  Sender and receiver know the partitions from the batch."""
    times = [clock.entries[tp] for tp in sorted(clock.entries)]
    return struct.pack(f"<{len(times)}q", *times)


def unpack(data: bytes | memoryview, partitions: Iterable[Partition], what: str) -> VectorClock:
    """The clock that a peer packed for these partitions.  `what` names the peer in the error."""
    ordered = sorted(partitions)
    if len(data) != 8 * len(ordered):
        raise FormatError(
            f"{what}: a clock of {len(data)} bytes for {len(ordered)} partitions",
            hint="all executors of a job must run the same version of kdirect",
        )
    return VectorClock(dict(zip(ordered, struct.unpack(f"<{len(ordered)}q", data))))
