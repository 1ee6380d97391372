"""Mistakes that planned jobs can have, to be planted one at a time.

The schedules of `tests.state.simulate_planned` have to find each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

from kdirect.state import coordinator
from kdirect.state.batches import BatchRecord
from kdirect.state.job import HandOut, Job, LogCommit, Planned, WriteAttempt
from tests.state.planned_world import PlannedWorld, Visitor

_let_leave, _log_commit, _planned = (
    coordinator._let_leave,
    coordinator._log_commit,
    coordinator._planned,
)
_decide, _to_json = coordinator.recovery.decide, BatchRecord.to_json
_leave, _carry_out = Visitor.leave, PlannedWorld.carry_out


def commit_not_logged() -> Any:
    """The next batch is logged, and the commit of the one before is not."""

    def wrong(job: Job) -> Any:
        job, effects = _log_commit(job)
        return job, tuple(e for e in effects if not isinstance(e, LogCommit))

    return mock.patch.object(coordinator, "_log_commit", wrong)


def commit_logged_when_done() -> Any:
    """A batch is committed when it is done, though the caller may ask for it again."""

    def wrong(job: Job) -> Any:
        job, effects = _let_leave(job)
        if any(isinstance(effect, HandOut) for effect in effects):
            job, more = _log_commit(job)
            effects = (*effects, *more)
        return job, effects

    return mock.patch.object(coordinator, "_let_leave", wrong)


def output_not_kept() -> Any:
    """Whoever leaves takes its output with it."""

    def wrong(visitor: Visitor, message: Any) -> None:
        file = visitor.file
        _leave(visitor, message)
        file.kept = Counter()

    return mock.patch.object(Visitor, "leave", wrong)


def other_ranges_accepted() -> Any:
    """A batch is repeated, whatever its offsets are said to be."""
    return mock.patch.object(coordinator, "check_planned", lambda job, plan: None)


def logged_anew() -> Any:
    """A repeated batch gets a new line in the log, with another time."""

    def wrong(job: Job, event: Planned) -> Any:
        if event.number == job.last:
            job = replace(job, records={n: r for n, r in job.records.items() if n < event.number})
        return _planned(job, event)

    return mock.patch.dict(coordinator._HANDLERS, {Planned: wrong})


def left_before_the_snapshot() -> Any:
    """Executors leave while they write their parts."""
    return mock.patch.object(coordinator, "_let_leave", lambda job: _let_leave(
        replace(job, taking=None)))  # fmt: skip


def planned_is_committed() -> Any:
    """The batch that is planned counts as committed, and not the one before."""

    def wrong(job: Job) -> int:
        logged = -1 if job.committed is None else job.committed.number
        return logged if job.planned is None else max(logged, job.planned.number)

    return mock.patch.object(Job, "last_committed", property(wrong))


def closes_all_not_logged() -> Any:
    """After another start the last batch closes as any other."""

    def wrong(record: BatchRecord) -> Any:
        return {**_to_json(record), "closes_all": False}

    return mock.patch.object(BatchRecord, "to_json", wrong)


def clocks_of_a_repetition_forgotten() -> Any:
    """What runs again before its commit is logged keeps no clocks, which that commit needs."""

    def wrong(situation: Any) -> Any:
        return _decide(replace(situation, committed=max(situation.committed, situation.last)))

    return mock.patch.object(coordinator.recovery, "decide", wrong)


def attempts_used_twice() -> Any:
    """The number of the attempt that was made durable does not run ahead."""

    def wrong(world: PlannedWorld, effect: Any) -> None:
        if isinstance(effect, WriteAttempt):
            world.attempt = max(world.attempt, 1)
        else:
            _carry_out(world, effect)

    return mock.patch.object(PlannedWorld, "carry_out", wrong)


def snapshot_is_waited_for_by_nobody() -> Any:
    """When the last part of a snapshot is there, nobody is let leave."""
    return mock.patch.object(coordinator, "_when_written", lambda job: (job, ()))


MISTAKES: tuple[Callable[[], Any], ...] = (
    commit_not_logged,
    commit_logged_when_done,
    output_not_kept,
    other_ranges_accepted,
    logged_anew,
    left_before_the_snapshot,
    planned_is_committed,
    closes_all_not_logged,
    clocks_of_a_repetition_forgotten,
    attempts_used_twice,
    snapshot_is_waited_for_by_nobody,
)
