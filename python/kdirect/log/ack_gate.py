"""When records may be acknowledged, and read: one gate for every way in which they arrive.

Law of the room: a pure machine of offsets; no lock, no clock, no file.  It is fed with what became
durable (`flushed`, and, with replication, `replicated`) and answers with one offset: every record
below it may be acknowledged.  Offsets given to it only rise, until `truncated`.

====================  ===========================================================================
`holds`               acknowledgements wait, and the high watermark moves when the gate says so;
                      without it records may be read and acknowledged as soon as they are committed
`demand_flush(x)`     ``flush.messages`` was reached: also where the gate does not hold,
                      acknowledgements of records below ``x`` wait for the disk
`acknowledged(end)`   the answer, for a log that ends before offset ``end``
====================  ===========================================================================

Threads: one partition's gate is fed by whichever thread flushes, under the partition's flush lock,
and asked by any thread: each call reads an attribute once, so an answer may be late and is never
too large.  Only `demand_flush` is called without that lock: of two demands at the same time the
smaller one may stay, and an acknowledgement then waits for an earlier flush.
"""

from __future__ import annotations

from collections.abc import Mapping


class AckGate:
    """The gate of one partition.  `holds`: ``log.flush.before.ack``.  `on_disk`: every record below
    is on disk."""

    __slots__ = ("_demanded", "_replicas", "holds", "on_disk")

    def __init__(self, *, holds: bool, on_disk: int) -> None:
        self.holds = holds
        self.on_disk = on_disk
        self._demanded = 0
        self._replicas: dict[int, int] = {}  # broker id -> the end of what it has confirmed

    def flushed(self, offset: int) -> None:
        """Every record below `offset` is on disk."""
        self.on_disk = max(self.on_disk, offset)

    def demand_flush(self, offset: int) -> None:
        """Records below `offset` are to be on disk before any of them is acknowledged."""
        self._demanded = max(self._demanded, offset)

    @property
    def moves_high_watermark(self) -> bool:
        """Is it the gate that says up to where records may be read?  Else all that is committed
        may."""
        return self.holds or bool(self._replicas)

    def set_replicas(self, brokers: Mapping[int, int]) -> None:
        """These brokers, and only these, have to confirm records; with what each is known to have:
        every record below that offset."""
        self._replicas = dict(brokers)

    def replicated(self, broker: int, offset: int) -> None:
        """A broker has every record below `offset`.  One that need not confirm is not counted."""
        if broker in self._replicas:
            self._replicas[broker] = max(self._replicas[broker], offset)

    def truncated(self, offset: int) -> None:
        """The log ends before `offset` now: nothing above was ever confirmed."""
        self.on_disk = min(self.on_disk, offset)
        self._demanded = min(self._demanded, offset)
        self._replicas = {broker: min(end, offset) for broker, end in self._replicas.items()}

    @property
    def is_open(self) -> bool:
        """Does nothing that was appended so far wait, for the disk or for replicas?"""
        return not self.moves_high_watermark and self.on_disk >= self._demanded

    def acknowledged(self, log_end_offset: int) -> int:
        """Every record below this offset may be acknowledged."""
        limit, on_disk, replicas = log_end_offset, self.on_disk, self._replicas
        if self.holds or on_disk < self._demanded:
            limit = min(limit, on_disk)
        return min(limit, *replicas.values()) if replicas else limit

    def waits_for_disk(self, log_end_offset: int) -> bool:
        """Is there something that a flush, and not a replica, has to let out?"""
        on_disk = self.on_disk
        return (self.holds and on_disk < log_end_offset) or on_disk < self._demanded

    def waits(self, end_offset: int) -> bool:
        """Does an acknowledgement of records that end before `end_offset` have to wait?"""
        if not (self.holds or self._demanded or self._replicas):
            return False  # asked for every request
        return self.acknowledged(end_offset) < end_offset
