"""What an executor decides as the leader of its virtual partitions.

Pure: `step(leading, event)` gives a new state and effects.  Pages of deltas come from every other
executor over a channel each, in order.  A page says (attempt, batch, epoch, sequence); from each
sender exactly the next one is merged:

* an older attempt, or one that was merged before: dropped without effect and counted;
* a page of the next batch, before this executor was told to run that: left where it is, unread;
* anything else, which is a gap or a newer attempt: an error that names the peer.

So each delta counts once, whatever is repeated (Slash §7.2.2).  The pages of different senders are
merged in any order: the state is a CRDT, and each sender's floats have a lane of their own.

When the last page of every executor for the batch is merged, its own rows included, the vector
clock is whole.  The least entry that is not idle says what closes, and only then are windows
emitted and dropped (P1).  Every executor computes the same clocks from the same pages.

====================  ============================================================================
event                 what it does
====================  ============================================================================
`StartBatch`          the coordinator's message: the batch begins
`Page`                a page has come from a peer
`OwnRead`             this executor has applied all rows that it reads itself
====================  ============================================================================

====================  ============================================================================
effect                what the driver does, in this order
====================  ============================================================================
`MarkDirty`           write it into the state's header before anything of the batch is applied
`Merge`               apply the page, then give it back to the channel
`Drop`                give it back unread
`Hold`                leave it, and what follows it, until the next batch begins
`Refuse`              end the attempt with an error that names the peer
`Trigger`             emit (or only drop) the windows that close between two times; keep the output
`MarkDone`            header: DONE with the clocks beside the kept output, or CLEAN without
`Report`              tell the coordinator
====================  ============================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple, TypeAlias

from kdirect.errors import StateProtocolError
from kdirect.state.batches import Partition, Progress
from kdirect.state.batches import Phase as HeaderPhase
from kdirect.state.clock import VectorClock
from kdirect.state.messages import BatchDone, StartBatch
from kdirect.state.windows import TIME_MAX


class Page(NamedTuple):
    """The footer of a page, checked by the channel.  `clock` are the entries of the partitions that
    the sender reads, on the last page of its batch and on no other."""

    sender: int
    attempt: int
    batch: int
    epoch: int
    sequence: int
    ends_epoch: bool = False
    clock: Mapping[Partition, int] | None = None


class OwnRead(NamedTuple):
    """All rows of this executor's ranges are applied or sent."""

    clock: Mapping[Partition, int]


Event: TypeAlias = StartBatch | Page | OwnRead


class MarkDirty(NamedTuple):
    """The state is within `batch`."""

    batch: int


class Merge(NamedTuple):
    """Apply the page of `sender`."""

    sender: int


class DropReason(Enum):
    """Why a page changed nothing; the metric that counts it."""

    OLD_ATTEMPT = "old_attempt"
    REPEATED = "repeated"


class Drop(NamedTuple):
    """Give the page of `sender` back."""

    sender: int
    reason: DropReason


class Hold(NamedTuple):
    """The page of `sender` belongs to the next batch."""

    sender: int


class Refuse(NamedTuple):
    """The page of `sender` cannot be: `expected` and `found` are (attempt, batch, epoch,
    sequence)."""

    sender: int
    expected: tuple[int, int, int, int]
    found: tuple[int, int, int, int]


class Trigger(NamedTuple):
    """Windows that close between `before` and `closes` are complete.  `emit` is False if their rows
    were handed out before."""

    before: int
    closes: int
    emit: bool


class MarkDone(NamedTuple):
    """The state is that after `batch`."""

    batch: int
    phase: HeaderPhase
    after: Progress


class Report(NamedTuple):
    """Say so to the coordinator; the driver adds what it counted."""

    message: BatchDone


Effect: TypeAlias = MarkDirty | Merge | Drop | Hold | Refuse | Trigger | MarkDone | Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Leading:
    """One executor of one attempt as a leader, from batch to batch."""

    executor: int
    executors: int
    attempt: int
    vparts: tuple[int, int]
    running: StartBatch | None = None
    batch: int | None = None  # that runs, or the last one that ran in this attempt
    clock: VectorClock = field(default_factory=lambda: VectorClock({}))
    ended: frozenset[int] = frozenset()
    expected: tuple[tuple[int, int], ...] = ()  # of each sender: (epoch, sequence)

    @property
    def takes_part(self) -> bool:
        """Does the running batch change this executor's own state?"""
        return self.running is not None and any(
            first < self.vparts[1] and self.vparts[0] < last for first, last in self.running.vparts
        )


def step(leading: Leading, event: Event) -> tuple[Leading, tuple[Effect, ...]]:
    """The state and the effects after an event.  StateProtocolError for a message out of turn."""
    if isinstance(event, Page):
        return _page(leading, event)
    if isinstance(event, OwnRead):
        if leading.running is None or leading.executor in leading.ended:
            raise StateProtocolError("rows were read outside of a batch")
        return _ended(leading, leading.executor, event.clock)
    return _start(leading, event)


def _start(leading: Leading, start: StartBatch) -> tuple[Leading, tuple[Effect, ...]]:
    in_turn = leading.batch is None or start.batch == leading.batch + 1
    if start.attempt != leading.attempt or leading.running is not None or not in_turn:
        raise StateProtocolError(
            f"executor {leading.executor} was told to begin batch {start.batch} of attempt "
            f"{start.attempt}, out of turn"
        )
    leading = replace(
        leading,
        running=start,
        batch=start.batch,
        clock=VectorClock(start.clock),
        ended=frozenset(),
        expected=((0, 0),) * leading.executors,
    )
    return leading, (MarkDirty(start.batch),) if leading.takes_part else ()


def _page(leading: Leading, page: Page) -> tuple[Leading, tuple[Effect, ...]]:
    sender = page.sender
    if page.attempt < leading.attempt:
        return leading, (Drop(sender, DropReason.OLD_ATTEMPT),)
    found = (page.attempt, page.batch, page.epoch, page.sequence)
    expected = _expected(leading, sender)
    if found < expected:
        return leading, (Drop(sender, DropReason.REPEATED),)
    is_next = found == expected
    if leading.running is None and (is_next or leading.batch is None) and found[0] == expected[0]:
        return leading, (Hold(sender),)
    if not is_next or sender in leading.ended:
        return leading, (Refuse(sender, expected, found),)
    return _merge(leading, page)


def _expected(leading: Leading, sender: int) -> tuple[int, int, int, int]:
    """What the next page of `sender` must say.  Before the first batch of the attempt it may be the
    first page of any."""
    if leading.batch is None:
        return leading.attempt, 0, 0, 0
    if sender in leading.ended:
        return leading.attempt, leading.batch + 1, 0, 0
    return leading.attempt, leading.batch, *leading.expected[sender]


def _merge(leading: Leading, page: Page) -> tuple[Leading, tuple[Effect, ...]]:
    sender = page.sender
    epoch, sequence = page.epoch, page.sequence + 1
    if page.ends_epoch or page.clock is not None:
        epoch, sequence = page.epoch + 1, 0
    expected = list(leading.expected)
    expected[sender] = (epoch, sequence)
    leading = replace(leading, expected=tuple(expected))
    if page.clock is None:
        return leading, (Merge(sender),)
    leading, effects = _ended(leading, sender, page.clock)
    return leading, (Merge(sender), *effects)


def _ended(
    leading: Leading, executor: int, clock: Mapping[Partition, int]
) -> tuple[Leading, tuple[Effect, ...]]:
    """Everything of `executor` in this batch is here.  With the last one the windows close."""
    start = leading.running
    assert start is not None
    leading = replace(leading, ended=leading.ended | {executor}, clock=leading.clock.merged(clock))
    if len(leading.ended) < leading.executors:
        return leading, ()
    closes = leading.clock.closes(start.idle, start.closed_before)
    if start.closes_all:
        closes = TIME_MAX
    after = Progress(clock=dict(leading.clock.entries), closes=closes)
    report = Report(
        BatchDone(
            attempt=leading.attempt, batch=start.batch, executor=leading.executor, after=after
        )
    )
    takes_part = leading.takes_part
    leading = replace(leading, running=None)
    if not takes_part:
        return leading, (report,)
    phase = HeaderPhase.DONE if start.emit else HeaderPhase.CLEAN
    return leading, (
        Trigger(start.closed_before, closes, start.emit),
        MarkDone(start.batch, phase, after),
        report,
    )


def begin(executor: int, attempt: int, vparts: tuple[tuple[int, int], ...]) -> Leading:
    """A leader at the start of an attempt, before any batch."""
    return Leading(
        executor=executor, executors=len(vparts), attempt=attempt, vparts=vparts[executor]
    )
