"""The two kinds of state behind one interface: cells of aggregates, and chains of rows.

Owns: which plans need which kind, how either is opened on mapped memory, and how its pages reach
the channels.  What may not enter: what a cell or a chain is (`kdirect.state.backend`,
`kdirect.state.append`), and when anything happens.

All that outlives a batch lies in the mapped memory.  One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from kdirect.errors import StateError
from kdirect.rdma.contract import Memory
from kdirect.state.append import AppendState, needs_append
from kdirect.state.arena import PageMemory, StateMemory
from kdirect.state.backend import Backend, Delta, Page
from kdirect.state.batches import Phase, Progress, StateHeader, led_by
from kdirect.state.exchange import ReceivingEnd
from kdirect.state.header import Catalogue, blocks_of, damaged, read_header, write_header
from kdirect.state.messages import StartBatch
from kdirect.state.plan import VPARTS, Plan
from kdirect.state.snapshots import Section
from kdirect.state.source import Block

NOBODY = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a state lives: the executor and its memory, who leads which virtual partition, and
    memory for pages."""

    executor: int
    executors: int
    owners: tuple[int, ...]
    memory: StateMemory
    pages: PageMemory


class State(Protocol):
    """The state of one executor.  The life of a batch is `begin_batch`, any number of `update`,
    `merge` and `flush`, one `trigger` and one `mark`."""

    def begin_batch(self, start: StartBatch) -> None:
        """Rows come for these virtual partitions, and of the windows that are open."""

    def update(self, block: Block, side: int) -> int:
        """Bring in the rows of a block; how many were late."""

    def flush(self, leader: int) -> Delta:
        """End the epoch of a leader's fragment."""

    def release(self, pages: Sequence[Page]) -> None:
        """The pages were sent."""

    def merge(self, sender: int, buffer: ReceivingEnd) -> int:
        """Merge the present buffer of a channel; how many entries or rows it had."""

    def keys(self) -> int:
        """How many keys there are in the open windows that this executor leads."""

    def trigger(self, closes: int) -> Iterable[pa.RecordBatch]:
        """Emit and drop the windows that the clock has closed."""

    def snapshot(self) -> list[Section]:
        """A copy of what this executor leads."""

    def restore(self, section: Section, executors: int, vparts: tuple[int, int]) -> None:
        """Add what this executor leads of a section of a snapshot by `executors`, whose writer led
        the virtual partitions `vparts`."""

    def mark(self, phase: Phase, attempt: int, batch: int, after: Progress | None) -> None:
        """Write the header of the state file."""


def owners_of(vparts: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """The executor that leads each virtual partition."""
    return tuple(
        next(i for i, (first, last) in enumerate(vparts) if first <= vpart < last)
        for vpart in range(VPARTS)
    )


def page_memory(
    *, page_bytes: int, footer_bytes: int, limit: int, on_chunk: Callable[[Memory], None]
) -> PageMemory:
    """Memory for fragments, of which each chunk is given to the exchange before it is used."""
    return PageMemory(
        Memory.anonymous,
        page_bytes=page_bytes,
        footer_bytes=footer_bytes,
        limit=limit,
        on_chunk=lambda _, chunk: on_chunk(chunk),
    )


def open_state(
    plan: Plan, place: Place, *, fresh: bool, mode: str, adaptive_ratio: float, epoch_bytes: int
) -> State:
    """The state of a plan: empty if `fresh`, else the one that lies in the memory.  StateError if
    that cannot be gone on with."""
    if needs_append(plan):
        return ChainState(plan, place, fresh=fresh)
    return CellState(
        plan,
        place,
        fresh=fresh,
        mode=mode,
        adaptive_ratio=adaptive_ratio,
        epoch_bytes=epoch_bytes,
    )


class CellState:
    """Aggregates in cells of fixed width: most plans."""

    def __init__(
        self,
        plan: Any,
        place: Place,
        *,
        fresh: bool,
        mode: str,
        adaptive_ratio: float,
        epoch_bytes: int,
    ) -> None:
        self._epoch_bytes = epoch_bytes
        self._applied_bytes = 0  # in this epoch
        self._records_left = 0  # in this batch
        self._backend = (Backend if fresh else Backend.attach)(
            plan,
            executor=place.executor,
            executors=place.executors,
            owners=place.owners,
            memory=place.memory,
            pages=place.pages,
            mode=mode,
            adaptive_ratio=adaptive_ratio,
        )

    def begin_batch(self, start: StartBatch) -> None:
        self._backend.closed_before = start.closed_before
        whole = start.vparts == ((0, VPARTS),)
        chosen = [v for first, last in start.vparts for v in range(first, last)]
        self._backend.apply_only(None if whole else chosen)
        self._applied_bytes = 0
        self._records_left = sum(r.end - r.start for r in start.ranges.values())

    def update(self, block: Block, side: int) -> int:
        return self._backend.update(
            block.columns,
            block.rows,
            time_us=block.time_us,
            expected_rows=self._expected_rows(block),
        ).late

    def _expected_rows(self, block: Block) -> float | None:
        """How many rows this epoch will have, if all input is as this block: it ends when it is
        full, or with the batch.  None if the block does not tell."""
        records_left, applied = self._records_left, self._applied_bytes
        self._records_left -= block.records
        self._applied_bytes += block.input_bytes
        if not block.input_bytes or not block.records:
            return None
        left = records_left * block.input_bytes / block.records
        return block.rows / block.input_bytes * min(self._epoch_bytes, applied + left)

    def flush(self, leader: int) -> Delta:
        self._applied_bytes = 0
        return self._backend.flush(leader)

    def release(self, pages: Sequence[Page]) -> None:
        self._backend.release(pages)

    def merge(self, sender: int, buffer: ReceivingEnd) -> int:
        return self._backend.merge(sender, buffer.address, buffer.length)

    def keys(self) -> int:
        return self._backend.keys_held()

    def trigger(self, closes: int) -> Iterable[pa.RecordBatch]:
        return self._backend.trigger(closes)

    def snapshot(self) -> list[Section]:
        return self._backend.snapshot()

    def restore(self, section: Section, executors: int, vparts: tuple[int, int]) -> None:
        self._backend.restore(section, executors, vparts)

    def mark(self, phase: Phase, attempt: int, batch: int, after: Progress | None) -> None:
        self._backend.mark(phase, attempt=attempt, batch=batch, after=after)


class ChainState:
    """Rows and intervals in chains: joins, sessions, lists, sets and extremes of strings."""

    def __init__(self, plan: Plan, place: Place, *, fresh: bool) -> None:
        self._plan, self._place = plan, place
        memory = place.memory
        found = None if fresh else read_header(memory)
        if found is None and not fresh:
            raise StateError(f"{memory.name} holds no state")
        self._state = AppendState(
            plan,
            memory,
            place.pages,
            executor=place.executor,
            executors=place.executors,
            owners=place.owners,
        )
        block = None
        if found is not None:
            blocks = blocks_of(found[1])
            own = [b for b in blocks if b[0] == found[1]["catalogue"]]
            block = own[0] if own else None
            try:
                memory.restore(found[1]["top"], blocks)
                self._state.adopt(found[1]["chains"], blocks)
            except (KeyError, TypeError, ValueError, OverflowError) as e:
                raise damaged(memory, e) from e
        self._catalogue = Catalogue(memory, block)

    def begin_batch(self, start: StartBatch) -> None:
        self._state.begin(start.closed_before)
        self._state.own(
            [
                owner if any(first <= v < last for first, last in start.vparts) else NOBODY
                for v, owner in enumerate(self._place.owners)
            ]
        )

    def update(self, block: Block, side: int) -> int:
        return self._state.update(block.columns, block.time_us, side, block.rows)

    def flush(self, leader: int) -> Delta:
        delta = self._state.flush(leader)
        pages = []
        for address, length in delta.pages:
            chunk, position = self._place.pages.place(address)
            pages.append(Page(address=address, chunk=chunk, position=position, length=length))
        return Delta(
            leader=leader,
            pages=tuple(pages),
            rows=delta.entries + delta.tuples,
            entries=delta.entries,
            tuples=delta.tuples,
        )

    def release(self, pages: Sequence[Page]) -> None:
        self._state.release([(page.address, page.length) for page in pages])

    def merge(self, sender: int, buffer: ReceivingEnd) -> int:
        return self._state.merge(sender, buffer.payload)

    def keys(self) -> int:
        return self._state.keys_held()

    def trigger(self, closes: int) -> Iterable[pa.RecordBatch]:
        return self._state.trigger(closes)

    def snapshot(self) -> list[Section]:
        return self._state.snapshot()

    def restore(self, section: Section, executors: int, vparts: tuple[int, int]) -> None:
        self._state.restore(section, executors, vparts)

    def mark(self, phase: Phase, attempt: int, batch: int, after: Progress | None) -> None:
        header = StateHeader(
            plan_hash=self._plan.hash,
            executor=self._place.executor,
            executors=self._place.executors,
            vparts=led_by(self._place.executor, self._place.owners),
            attempt=attempt,
            batch=batch,
            phase=phase,
            after=after,
        )
        if phase is Phase.DIRTY:
            write_header(self._place.memory, header)
            return
        content = {
            "chains": self._state.catalogue(),
            "blocks": self._state.blocks(),
            "after": None if after is None else after.to_json(),
        }
        write_header(self._place.memory, header, self._catalogue.write(content))
