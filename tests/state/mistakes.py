"""Mistakes that an engine like this can have, to be planted one at a time.

The simulation has to find each.  Every one of them is a rule left out, or two steps exchanged, in
the machines of `kdirect.state`, or in what a driver does with their effects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from kdirect.state import coordinator, helper, leader, recovery
from kdirect.state.batches import Phase
from kdirect.state.clock import VectorClock
from kdirect.state.job import HandOut, LogBatch, LogCommit
from kdirect.state.windows import Session, Tumbling
from tests.state.actors import Executor

_page, _expected, _ended, _start_leader = (
    leader._page,
    leader._expected,
    leader._ended,
    leader._start,
)
_begin = helper.begin
_decide, _level = recovery.decide, recovery._level
_offer, _next_batch, _snapshot_done = (
    coordinator._offer,
    coordinator._next_batch,
    coordinator._snapshot_done,
)
_closes, _seen = VectorClock.closes, VectorClock.seen
_restore, _write_part = Executor.restore, Executor.write_part


def _page_that_merges(leading: Any, page: Any, reason: leader.DropReason) -> Any:
    after, effects = _page(leading, page)
    if leading.running is not None and effects == (leader.Drop(page.sender, reason),):
        return after, (leader.Merge(page.sender),)
    return after, effects


def repeated_delta_merged() -> Any:
    """A page that was merged before is merged again."""
    wrong = lambda a, b: _page_that_merges(a, b, leader.DropReason.REPEATED)  # noqa: E731
    return mock.patch.object(leader, "_page", wrong)


def attempts_not_fenced() -> Any:
    """A page of an older attempt is merged."""
    wrong = lambda a, b: _page_that_merges(a, b, leader.DropReason.OLD_ATTEMPT)  # noqa: E731
    return mock.patch.object(leader, "_page", wrong)


def next_batch_not_held() -> Any:
    """A page of the next batch is merged before this executor has begun it."""

    def wrong(leading: Any, page: Any) -> Any:
        after, effects = _page(leading, page)
        if leading.batch is not None and effects == (leader.Hold(page.sender),):
            return after, (leader.Merge(page.sender),)
        return after, effects

    return mock.patch.object(leader, "_page", wrong)


def greatest_entry_closes() -> Any:
    """Windows close when the fastest partition has passed them, not the slowest."""

    def wrong(clock: Any, idle: Any, before: int) -> int:
        return max([before, *(t for tp, t in clock.entries.items() if tp not in idle)])

    return mock.patch.object(VectorClock, "closes", wrong)


def idle_partitions_counted() -> Any:
    """A partition that the log says is idle holds windows open."""
    return mock.patch.object(VectorClock, "closes", lambda c, idle, b: _closes(c, frozenset(), b))


def closing_falls() -> Any:
    """What was closed is open again when an idle partition comes back late."""

    def wrong(clock: Any, idle: Any, before: int) -> int:
        return _closes(clock, idle, -(1 << 63))

    return mock.patch.object(VectorClock, "closes", wrong)


def delay_left_out() -> Any:
    """The clock does not wait for rows that are late within the delay."""
    return mock.patch.object(VectorClock, "seen", lambda c, tp, time, _: _seen(c, tp, time, 0))


def one_executor_not_awaited() -> Any:
    """Windows are emitted before the last executor has sent its last delta."""

    def wrong(leading: Any, executor: int, clock: Any) -> Any:
        if leading.executors > 2 and len(leading.ended) == leading.executors - 2:
            absent = {*range(leading.executors)} - leading.ended - {executor}
            leading = replace(leading, ended=leading.ended | absent)
        return _ended(leading, executor, clock)

    return mock.patch.object(leader, "_ended", wrong)


@contextmanager
def clock_not_carried() -> Iterator[None]:
    """The clock of a batch begins empty, not with the logged entries."""

    def empty(start: Any) -> Any:
        return replace(start, clock=dict.fromkeys(start.clock, -(1 << 63)))

    def begin(start: Any, *rest: Any, **more: Any) -> Any:
        return _begin(empty(start), *rest, **more)

    def start(leading: Any, message: Any) -> Any:
        return _start_leader(leading, empty(message))

    with mock.patch.object(helper, "begin", begin), mock.patch.object(leader, "_start", start):
        yield


def not_marked_dirty() -> Any:
    """The header still says CLEAN or DONE while a batch changes the state."""

    def wrong(leading: Any, start: Any) -> Any:
        leading, _ = _start_leader(leading, start)
        return leading, ()

    return mock.patch.object(leader, "_start", wrong)


def dirty_state_used() -> Any:
    """A state within a batch is taken for the state before it."""

    def wrong(header: Any, *rest: Any) -> Any:
        if header is not None and header.phase is Phase.DIRTY:
            header = replace(header, phase=Phase.CLEAN, batch=max(header.batch - 1, -1))
        return _level(header, *rest)

    return mock.patch.object(recovery, "_level", wrong)


def number_of_executors_ignored() -> Any:
    """After a change of their number executors go on with the ranges that they had."""

    def wrong(header: Any, executors: int, vparts: Any, *rest: Any) -> Any:
        if header is not None:
            header = replace(header, executors=executors, executor=0, vparts=vparts)
        return _level(header, executors, vparts, *rest)

    return mock.patch.object(recovery, "_level", wrong)


def mode_ignored() -> Any:
    """As many executors in another mode go on with the ranges that they had."""

    def wrong(header: Any, executors: int, vparts: Any, *rest: Any) -> Any:
        if header is not None:
            header = replace(header, vparts=vparts)
        return _level(header, executors, vparts, *rest)

    return mock.patch.object(recovery, "_level", wrong)


def one_batch_too_few() -> Any:
    """The repetition begins one batch too late."""

    def wrong(situation: Any) -> Any:
        resume = _decide(situation)
        return replace(resume, steps=resume.steps[1:]) if len(resume.steps) > 1 else resume

    return mock.patch.object(recovery, "decide", wrong)


def repeated_for_all() -> Any:
    """A repetition changes the states that were not lost, too."""

    def wrong(situation: Any) -> Any:
        resume = _decide(situation)
        steps = tuple(replace(step, vparts=recovery.EVERYTHING) for step in resume.steps)
        return replace(resume, steps=steps)

    return mock.patch.object(recovery, "decide", wrong)


def committed_when_handed_out() -> Any:
    """The commit is logged before the caller has the output."""

    def wrong(job: Any) -> Any:
        job, effects = _offer(job)
        if any(isinstance(effect, HandOut) for effect in effects):
            effects = (LogCommit(job.offered), *effects)
        return job, effects

    return mock.patch.object(coordinator, "_offer", wrong)


def logged_after_it_runs() -> Any:
    """The executors are told of a batch before it is durable."""

    def wrong(job: Any) -> Any:
        job, effects = _next_batch(job)
        return job, tuple(sorted(effects, key=lambda effect: isinstance(effect, LogBatch)))

    return mock.patch.object(coordinator, "_next_batch", wrong)


def handed_output_forgotten() -> Any:
    """What the caller has is not committed when it asks for more."""
    return mock.patch.dict(
        coordinator._HANDLERS, {coordinator.Handed: lambda job, event: (job, ())}
    )


def log_cut_at_newest_snapshot() -> Any:
    """Only what the newest snapshot needs is kept in the log of batches."""

    def wrong(job: Any, done: Any) -> Any:
        after, effects = _snapshot_done(job, done)
        newest = max((m.number for m in after.manifests), default=-1)
        return after, tuple(
            effect._replace(batches=newest)
            if isinstance(effect, coordinator.ForgetSnapshot)
            else effect
            for effect in effects
        )

    return mock.patch.dict(coordinator._HANDLERS, {coordinator.SnapshotDone: wrong})


def snapshot_of_what_runs() -> Any:
    """A part has the state at the time when it is written, not when it was to be taken."""

    def wrong(executor: Executor, message: Any, cells: dict) -> None:
        assert executor.file is not None and executor.welcome is not None
        vparts = executor.welcome.vparts[executor.index]
        _write_part(executor, message, executor.file.part(*vparts))

    return mock.patch.object(Executor, "write_part", wrong)


def late_by_the_unlogged_clock() -> Any:
    """A row is late by what its reader has seen so far, not by what was logged."""

    def wrong(executor: Executor, start: Any) -> int:
        times = executor.reading.clock.entries.values()
        return max([start.closed_before, *times])

    return mock.patch.object(Executor, "late_clock", wrong)


def late_by_one() -> Any:
    """A row at the very edge of the late ones is dropped with them."""
    below = Tumbling.late_below
    wrong = lambda window, closed: below(window, closed) + (closed > -(1 << 63))  # noqa: E731
    return mock.patch.object(Tumbling, "late_below", wrong)


def session_closes_when_touched() -> Any:
    """A session closes at its end, when a row at this very time may still come."""
    return mock.patch.object(Session, "is_closed", lambda window, end, closes: end <= closes)


def restored_on_top() -> Any:
    """A snapshot is loaded into a state that is not empty."""

    def wrong(executor: Executor, message: Any) -> None:
        old = None if executor.file is None else executor.file.cells
        _restore(executor, message)
        if old is not None and executor.file is not None:
            executor.file.cells = {**old, **executor.file.cells}

    return mock.patch.object(Executor, "restore", wrong)


def last_epoch_without_rest() -> Any:
    """The last epoch goes before the rows since the one before are in it."""
    go_on = helper._go_on

    def wrong(reading: Any) -> Any:
        after, effects = go_on(reading)
        if len(reading.left) == 1 and not effects and after.sending is not None:
            return after, effects
        if len(reading.left) == 1 and reading.epoch > 0:
            (tp,) = reading.left
            left = reading.left[tp]
            if left.end - left.start == 1:
                return go_on(replace(reading, left={}))
        return after, effects

    return mock.patch.object(helper, "_go_on", wrong)


MISTAKES: tuple[Callable[[], Any], ...] = (
    repeated_delta_merged,
    attempts_not_fenced,
    next_batch_not_held,
    greatest_entry_closes,
    idle_partitions_counted,
    closing_falls,
    delay_left_out,
    one_executor_not_awaited,
    clock_not_carried,
    not_marked_dirty,
    dirty_state_used,
    number_of_executors_ignored,
    mode_ignored,
    one_batch_too_few,
    repeated_for_all,
    committed_when_handed_out,
    logged_after_it_runs,
    handed_output_forgotten,
    log_cut_at_newest_snapshot,
    snapshot_of_what_runs,
    late_by_the_unlogged_clock,
    late_by_one,
    session_closes_when_touched,
    restored_on_top,
    last_epoch_without_rest,
)


@contextmanager
def planted(mistake: Callable[[], Any]) -> Iterator[None]:
    """The engine with this mistake."""
    with mistake():
        yield
