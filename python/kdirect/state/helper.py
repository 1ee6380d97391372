"""What an executor decides while it reads a batch: which rows next, and when to send deltas.

Pure: `begin` and `step` give a new state and effects.  The rows of a batch are read in blocks, the
partitions in turn.  Rows of keys that the executor leads go into its own tables; those of others
into fragments.  After `epoch_bytes` of input, and at the end of the batch, every fragment goes to
its leader as the delta of one epoch (Slash §7.2.2): the epoch number grows, the pages written so
far are read-only until they are sent, then they are used again.  Reading goes on while a delta is
on its way; the next one waits for it.  Every epoch goes to every peer, if only as one page that
says that there is nothing: so each leader counts what it has of each sender.

====================  ============================================================================
event                 what it does
====================  ============================================================================
`BlockRead`           rows of one partition have been applied, up to an offset
`Flushed`             every page of an epoch has left and its memory is free again
====================  ============================================================================

====================  ============================================================================
effect                what the driver does
====================  ============================================================================
`Read`                read a block of one partition; answer `BlockRead`, perhaps of fewer rows
`Flush`               send every fragment with the epoch's number; answer `Flushed`.  With
                      `clock`: this epoch is the batch's last, and its last page carries the clock
====================  ============================================================================

At most one `Read` and one `Flush` are under way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, TypeAlias

from kdirect.errors import StateProtocolError
from kdirect.state.batches import Partition, Range
from kdirect.state.clock import VectorClock
from kdirect.state.messages import StartBatch

BLOCK_ROWS = 65_536


class BlockRead(NamedTuple):
    """The rows of `tp` below offset `upto` are applied.  `size` is how many bytes of the log they
    took, `max_time_us` the latest event time that is valid, also of rows that were not kept."""

    tp: Partition
    upto: int
    size: int
    max_time_us: int | None


class Flushed(NamedTuple):
    """All pages of epoch `epoch` have been sent, and may be written again."""

    epoch: int


Event: TypeAlias = BlockRead | Flushed


class Read(NamedTuple):
    """Read offsets ``[start, end)`` of `tp`; a driver may apply fewer, but at least one offset."""

    tp: Partition
    start: int
    end: int


class Flush(NamedTuple):
    """Send what every fragment holds as epoch `epoch`."""

    epoch: int
    clock: VectorClock | None


Effect: TypeAlias = Read | Flush


class Phase(Enum):
    """Where a reader is within its batch."""

    READING = "reading"
    FULL = "full"  # the epoch is full, and the one before is still on its way
    ENDING = "ending"  # everything is read, and the epoch before the last is still on its way
    LAST = "last"  # the last epoch is on its way
    SENT = "sent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One executor's share of one batch."""

    phase: Phase
    left: Mapping[Partition, Range]  # what is still to be read, in turn: the first one is next
    clock: VectorClock  # of the partitions that this executor reads
    delays_us: Mapping[str, int]  # by topic
    epoch_bytes: int
    block_rows: int
    epoch: int = 0  # that rows are applied to
    filled: int = 0  # bytes of input in it
    sending: int | None = None  # the epoch that is on its way


def begin(
    start: StartBatch,
    delays_us: Mapping[str, int],
    *,
    epoch_bytes: int,
    block_rows: int = BLOCK_ROWS,
) -> tuple[Reading, tuple[Effect, ...]]:
    """The batch begins.  `start.ranges` has every partition that this executor reads."""
    reading = Reading(
        phase=Phase.READING,
        left={tp: r for tp, r in sorted(start.ranges.items()) if r.start < r.end},
        clock=VectorClock(start.clock).only(start.ranges),
        delays_us=delays_us,
        epoch_bytes=epoch_bytes,
        block_rows=block_rows,
    )
    return _go_on(reading)


def step(reading: Reading, event: Event) -> tuple[Reading, tuple[Effect, ...]]:
    """The state and the effects after an event.  StateProtocolError if nothing asked for it."""
    if isinstance(event, BlockRead):
        return _block_read(reading, event)
    return _flushed(reading, event)


def _block_read(reading: Reading, event: BlockRead) -> tuple[Reading, tuple[Effect, ...]]:
    asked = next(iter(reading.left.items()), None)
    if reading.phase is not Phase.READING or asked is None or asked[0] != event.tp:
        raise StateProtocolError(f"a block of {event.tp} was read that nothing asked for")
    tp, range_ = asked
    if not range_.start < event.upto <= range_.end or event.size < 0:
        raise StateProtocolError(f"a block of {tp} ends at {event.upto}, outside of {range_}")
    left = dict(reading.left)
    del left[tp]
    if event.upto < range_.end:
        left[tp] = Range(event.upto, range_.end)  # the last one: partitions take turns
    return _go_on(
        replace(
            reading,
            left=left,
            filled=reading.filled + event.size,
            clock=reading.clock.seen(tp, event.max_time_us, reading.delays_us[tp.topic]),
        )
    )


def _go_on(reading: Reading) -> tuple[Reading, tuple[Effect, ...]]:
    """What comes after a block, or at the start."""
    if not reading.left:
        return _flush(replace(reading, phase=Phase.ENDING))
    if reading.filled >= reading.epoch_bytes:
        return _flush(replace(reading, phase=Phase.FULL))
    return replace(reading, phase=Phase.READING), (_next_read(reading),)


def _next_read(reading: Reading) -> Read:
    tp, range_ = next(iter(reading.left.items()))
    return Read(tp, range_.start, min(range_.end, range_.start + reading.block_rows))


def _flush(reading: Reading) -> tuple[Reading, tuple[Effect, ...]]:
    """Send the epoch, unless the one before is on its way."""
    if reading.sending is not None:
        return reading, ()
    last = reading.phase is Phase.ENDING
    flush = Flush(reading.epoch, reading.clock if last else None)
    phase = Phase.LAST if last else Phase.READING
    reading = replace(
        reading, phase=phase, sending=reading.epoch, epoch=reading.epoch + 1, filled=0
    )
    return reading, (flush,) if last else (flush, _next_read(reading))


def _flushed(reading: Reading, event: Flushed) -> tuple[Reading, tuple[Effect, ...]]:
    if event.epoch != reading.sending:
        raise StateProtocolError(f"epoch {event.epoch} was sent, which was not on its way")
    reading = replace(reading, sending=None)
    if reading.phase is Phase.LAST:
        return replace(reading, phase=Phase.SENT), ()
    return _flush(reading) if reading.phase in (Phase.FULL, Phase.ENDING) else (reading, ())
