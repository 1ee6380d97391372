"""One batch in one executor: reading, sending and merging, by the decisions of the pure machines.

Owns: the tasks of a batch and what they share.  The reader applies blocks of rows to the state and
ends epochs; a sender for each peer carries fragments to their leader; a receiver for each peer
merges what comes.  What to read and when to send is decided by `kdirect.state.helper`, what a delta
that has come means by `kdirect.state.leader`; how they take turns is the scheduler's.

A task never waits: it yields.  This file reads topics and channels; it writes no file.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pyarrow as pa

from kdirect.client.session import Session
from kdirect.errors import StateError, StateProtocolError
from kdirect.format.bad_values import SAMPLES, described
from kdirect.model import TopicPartition
from kdirect.rdma.layout import FLAG_END_OF_BATCH, FLAG_END_OF_EPOCH
from kdirect.state import clock as clocks
from kdirect.state import helper, leader, scheduler
from kdirect.state.batches import Partition, Phase, Progress, deal_partitions
from kdirect.state.exchange import Exchange, ReceivingEnd, SendingEnd, peer_name
from kdirect.state.executor_state import State
from kdirect.state.messages import BatchDone, StartBatch
from kdirect.state.plan import Plan
from kdirect.state.source import Block, TopicSource

BUFFERS_A_TURN = 8
COMPLETION_WAIT_MS = 1


class Kind(Enum):
    """What a buffer of a channel holds."""

    DELTA = 1  # a page of a fragment
    END = 2  # the end of an epoch; of a batch with the sender's clock


class Step(Enum):
    """Where an executor is: what `Observer.at` is told."""

    READ = "read"
    DELTA = "delta"
    MERGE = "merge"
    TRIGGER = "trigger"
    OUTPUT = "output"
    SNAPSHOT = "snapshot"  # before the state is copied
    PART = "part"  # before the copy is written, in a thread of its own
    RESTORE = "restore"


class Observer:
    """Is told of every step of an executor.  This one ignores them."""

    def at(self, step: Step, batch: int) -> None:
        """The executor is about to finish this step of a batch."""


@dataclass(slots=True)
class BatchResult:
    """What a batch put out in this executor.  `after` is None before it is done."""

    batch: int
    emit: bool
    output: list[pa.RecordBatch] = field(default_factory=list)
    after: Progress | None = None
    done: BatchDone | None = None
    counts: Counter[str] = field(default_factory=Counter)
    bad_rows: list[str] = field(default_factory=list)  # the first that were dropped


@dataclass(slots=True, kw_only=True)
class Tools:
    """What batches work with; it outlives each of them.  `look` raises when the coordinator has
    gone; it is called when nothing could be done for `idle_wait_ms`, and `stepped` for each block
    and page.  `mark` writes the header and keeps the output."""

    plan: Plan
    readers: int
    state: State
    exchange: Exchange
    session: Session
    observer: Observer
    look: Callable[[], None]
    stepped: Callable[[], None]
    idle_wait_ms: int
    mark: Callable[[Phase, BatchResult], None]
    epoch_bytes: int
    block_rows: int
    leading: leader.Leading
    # By peer: the number of the first buffer of the epoch that comes from it.
    begins: dict[int, int] = field(default_factory=dict)
    page_bytes: int | None = None  # of deltas, which a row has to fit into


@dataclass(slots=True)
class _Outgoing:
    """One epoch on its way to one peer: the pages of its fragment, then the buffer that ends it."""

    epoch: int
    pages: deque[Any]
    end: bytes
    flags: int


class BatchRun:
    """See the module.  Made for one batch; `run` it once."""

    def __init__(self, start: StartBatch, tools: Tools) -> None:
        self._start = start
        self._tools = tools
        self._result = BatchResult(start.batch, start.emit)
        self._outgoing: dict[int, _Outgoing | None] = dict.fromkeys(tools.exchange.senders)
        self._on_the_way: list[Any] = []  # deltas whose pages are not free yet
        self._inputs = {given.topic: (side, given) for side, given in enumerate(tools.plan.inputs)}
        self._sources: dict[Partition, TopicSource] = {}
        self._blocks: dict[Partition, Iterator[Block]] = {}
        self._sending: int | None = None  # the epoch that is on its way
        self._waits_for_completions = False

    def run(self) -> BatchResult:
        """Run the batch; the state is that after it, and the result is kept."""
        try:
            scheduler.run(self.begin(), self._sleep)
        finally:
            self.close()
        return self.result

    def begin(self) -> list[scheduler.Task]:
        """Begin the batch, and return its tasks.  `run` gives them their turns; a simulation does
        so itself, and calls `close` when all have ended or none is to go on."""
        start, tools = self._start, self._tools
        tools.state.begin_batch(start)
        self._tell(start)
        return [
            self._read(),
            *(self._send(peer) for peer in tools.exchange.senders),
            *(self._receive(peer) for peer in tools.exchange.receivers),
        ]

    @property
    def result(self) -> BatchResult:
        """What the batch put out; all its tasks have ended."""
        assert self._result.done is not None
        return self._result

    def close(self) -> None:
        """Leave the topics."""
        for source in self._sources.values():
            source.close()

    def _sleep(self) -> None:
        exchange = self._tools.exchange
        self._result.counts["waits"] += 1
        polls = self._waits_for_completions and not exchange.completion_wakes
        exchange.wait(COMPLETION_WAIT_MS if polls else self._tools.idle_wait_ms)
        self._tools.look()

    # -- reading -----------------------------------------------------------------------------------

    def _read(self) -> scheduler.Task:
        """Read, apply, and end epochs, until the last one has left."""
        tools = self._tools
        reading, effects = helper.begin(
            self._start,
            {topic: given.delay_us for topic, (_, given) in self._inputs.items()},
            epoch_bytes=tools.epoch_bytes,
            block_rows=tools.block_rows,
        )
        todo = deque(effects)
        told = False
        while reading.phase is not helper.Phase.SENT:
            worked = False
            if self._sending is not None and self._has_left():
                self._release()
                sent, self._sending = self._sending, None
                reading, effects = helper.step(reading, helper.Flushed(sent))
                todo.extend(effects)
                worked = True
            if todo:
                effect = todo.popleft()
                if isinstance(effect, helper.Read):
                    reading, effects = helper.step(reading, self._read_block(effect))
                    todo.extend(effects)
                else:
                    self._flush(effect)
                worked = True
            if reading.phase is helper.Phase.LAST and not told and not todo:
                # The rows of this executor's own keys are in its tables.
                self._tell(leader.OwnRead(reading.clock.entries))
                told = True
            yield worked

    def _read_block(self, asked: helper.Read) -> helper.BlockRead:
        """Apply the next block of a partition."""
        self._tools.stepped()
        tp = asked.tp
        side, _ = self._inputs[tp.topic]
        if tp not in self._sources:
            whole = self._start.ranges[tp]
            source = TopicSource.of_plan(
                self._tools.session,
                self._tools.plan,
                side,
                TopicPartition(tp.topic, tp.partition),
                whole.start,
                whole.end,
                now_us=self._start.now_us,
                block_rows=self._tools.block_rows,
                page_bytes=self._tools.page_bytes,
            )
            self._sources[tp] = source
            self._blocks[tp] = source.blocks()
        self._tools.observer.at(Step.READ, self._start.batch)
        whole = self._start.ranges[tp]
        block = next(self._blocks[tp], None)
        if block is None:
            # What is left of the range holds no record (compacted, or control records).
            self._end_source(tp)
            return helper.BlockRead(tp, whole.end, 0, None)
        if block.rows:
            self._result.counts["late"] += self._update(tp, block, side)
        self._result.counts["rows"] += block.rows
        self._result.counts["input_bytes"] += block.input_bytes
        if block.next_offset >= whole.end:
            self._end_source(tp)
        return helper.BlockRead(
            tp, min(block.next_offset, whole.end), block.input_bytes, block.clock_us
        )

    def _update(self, tp: Partition, block: Block, side: int) -> int:
        """Bring a block into the state; how many of its rows were late."""
        try:
            return self._tools.state.update(block, side)
        except StateError as e:
            first, last = block.offsets[0], block.offsets[-1]
            e.message = f"{tp.topic}-{tp.partition} offsets {first} to {last}: {e.message}"
            raise

    def _end_source(self, tp: Partition) -> None:
        source = self._sources.pop(tp)
        del self._blocks[tp]
        bad_rows = self._result.bad_rows
        for reason, count in source.dropped.counts.items():
            self._result.counts[str(reason.value)] += count
        for row in source.dropped.samples[: SAMPLES - len(bad_rows)]:
            bad_rows.append(described(source.tp, row))
        source.close()

    # -- sending -----------------------------------------------------------------------------------

    def _flush(self, effect: helper.Flush) -> None:
        """Hand the fragments of an epoch to the senders."""
        self._tools.observer.at(Step.DELTA, self._start.batch)
        self._sending = effect.epoch
        last = effect.clock is not None
        end = clocks.pack(effect.clock) if effect.clock is not None else b""
        for peer in self._outgoing:
            delta = self._tools.state.flush(peer)
            self._on_the_way.append(delta)
            self._result.counts["deltas"] += bool(delta.pages)
            for name in ("entries", "tuples"):
                self._result.counts["sent_" + name] += getattr(delta, name)
            self._outgoing[peer] = _Outgoing(
                effect.epoch,
                deque(delta.pages),
                end,
                FLAG_END_OF_BATCH if last else FLAG_END_OF_EPOCH,
            )
        self._result.counts["epochs"] += 1

    def _has_left(self) -> bool:
        """Is all memory of the epoch on its way free again?"""
        if any(out is not None for out in self._outgoing.values()):
            return False
        waiting = [s for s in self._tools.exchange.senders.values() if s.completed < s.sent]
        for sender in waiting:
            sender.refresh()
        self._waits_for_completions = any(s.completed < s.sent for s in waiting)
        return not self._waits_for_completions

    def _release(self) -> None:
        for delta in self._on_the_way:
            self._tools.state.release(delta.pages)
        self._on_the_way.clear()

    def _send(self, peer: int) -> scheduler.Task:
        """Send what is on its way to a peer, as it gives credits, until the batch has ended."""
        sender = self._tools.exchange.senders[peer]
        lacked_credit = False
        while True:
            out = self._outgoing[peer]
            if out is None:
                yield False
                continue
            worked = False
            while self._outgoing[peer] is not None and sender.may_send:
                self._send_buffer(peer, sender, out)
                worked = True
            lacks_credit = self._outgoing[peer] is not None
            self._result.counts["credit_waits"] += lacks_credit and not lacked_credit
            lacked_credit = lacks_credit and not worked
            if self._outgoing[peer] is None and out.flags == FLAG_END_OF_BATCH:
                return
            yield worked

    def _send_buffer(self, peer: int, sender: SendingEnd, out: _Outgoing) -> None:
        """Send the next buffer of an epoch; there is room for it."""
        start = self._start
        header = {"attempt": start.attempt, "batch": start.batch, "epoch": out.epoch}
        if out.pages:
            page = out.pages.popleft()
            source = self._tools.exchange.sources[page.chunk]
            header["kind"] = Kind.DELTA.value
            sent = sender.send_from(source, page.position, page.length, **header)
            self._result.counts["sent_bytes"] += page.length
        else:
            staging = sender.buffer()
            if staging is None or len(out.end) > len(staging):
                raise StateProtocolError(
                    f"the clock of {len(out.end) // 8} partitions does not fit in a buffer",
                    hint="raise the option slot_bytes",
                )
            staging[: len(out.end)] = out.end
            header |= {"kind": Kind.END.value, "flags": out.flags}
            sent = sender.send(len(out.end), **header)
            self._outgoing[peer] = None
        if not sent:
            raise StateProtocolError(f"the channel to {peer_name(peer)} did not take a buffer")
        self._result.counts["sent_buffers"] += 1

    # -- merging -----------------------------------------------------------------------------------

    def _receive(self, peer: int) -> scheduler.Task:
        """Merge what a peer sends, until it has ended its batch."""
        receiver = self._tools.exchange.receivers[peer]
        while True:
            worked = False
            for _ in range(BUFFERS_A_TURN):
                if not receiver.poll():
                    break
                worked = True
                if self._take(peer, receiver):
                    return
            yield worked

    def _take(self, peer: int, receiver: ReceivingEnd) -> bool:
        """Treat the present buffer of a peer as the leader decides.  Whether its batch has ended,
        or the buffer belongs to the next one."""
        self._tools.stepped()
        flags, batch, tools = receiver.flags, receiver.batch, self._tools
        number = receiver.sequence - tools.begins.get(peer, 0)
        is_of_attempt = receiver.attempt == self._start.attempt
        clock = None
        if flags & FLAG_END_OF_BATCH and is_of_attempt and batch == self._start.batch:
            dealt = deal_partitions(self._start.clock, tools.readers)
            theirs = dealt[peer] if peer < len(dealt) else ()
            clock = clocks.unpack(bytes(receiver.payload), theirs, peer_name(peer)).entries
        page = leader.Page(
            sender=peer,
            attempt=receiver.attempt,
            batch=batch,
            epoch=receiver.epoch,
            sequence=number,
            ends_epoch=bool(flags & FLAG_END_OF_EPOCH),
            clock=clock,
        )
        if not self._tell(page):
            return True
        # A buffer that has come before has a number below 0, or ends nothing.
        ends = flags & (FLAG_END_OF_EPOCH | FLAG_END_OF_BATCH)
        if ends and is_of_attempt and number >= 0:
            tools.begins[peer] = tools.begins.get(peer, 0) + number + 1
        return clock is not None

    def _tell(self, event: leader.Event) -> bool:
        """Take an event to the leader's machine and carry out what it decides.  False: the buffer
        of the event is left where it is."""
        tools = self._tools
        tools.leading, effects = leader.step(tools.leading, event)
        for effect in effects:
            if isinstance(effect, leader.Hold):
                return False
            self._carry_out(effect)
        return True

    def _carry_out(self, effect: leader.Effect) -> None:
        tools, result = self._tools, self._result
        match effect:
            case leader.MarkDirty():
                tools.mark(Phase.DIRTY, result)
            case leader.Merge(sender):
                receiver = tools.exchange.receivers[sender]
                if receiver.kind == Kind.DELTA.value:
                    tools.observer.at(Step.MERGE, result.batch)
                    result.counts["merged"] += tools.state.merge(sender, receiver)
                receiver.release()
            case leader.Drop(sender, reason):
                result.counts[f"dropped_{reason.value}"] += 1
                tools.exchange.receivers[sender].release()
            case leader.Refuse(sender, expected, found):
                raise StateProtocolError(
                    f"{peer_name(sender)} sent (attempt, batch, epoch, sequence) {found} where"
                    f" {expected} is next",
                    hint="all executors of a job must run the same version of kdirect",
                )
            case leader.Trigger(_, closes, _):
                tools.observer.at(Step.TRIGGER, result.batch)
                result.counts["keys"] = tools.state.keys()
                for rows in tools.state.trigger(closes):
                    tools.stepped()
                    result.output.append(rows)
            case leader.MarkDone(_, phase, after):
                result.after = after
                tools.observer.at(Step.OUTPUT, result.batch)
                tools.mark(phase, result)
            case leader.Report(message):
                result.after = message.after
                result.done = message
