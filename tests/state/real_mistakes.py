"""Mistakes in what only real executors have: chains of rows, and the tasks of a batch.

Planted one at a time as those of `tests.state.mistakes`; the schedules with real executors have to
find each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np

from kdirect.state import append, batch_run, leader
from kdirect.state.append import AppendState
from kdirect.state.batch_run import BatchRun
from kdirect.state.plan import JoinPlan

_carry_out, _take = BatchRun._carry_out, BatchRun._take
_ended, _add, _adopt = AppendState._ended, AppendState._add, AppendState.adopt
_own, _gives_back = AppendState.own, JoinPlan.gives_back


def match_emitted_twice() -> Any:
    """The rows of a delta that comes again are kept again, and match again."""

    def wrong(run: BatchRun, effect: Any) -> None:
        if isinstance(effect, leader.Drop) and effect.reason is leader.DropReason.REPEATED:
            receiver = run._tools.exchange.receivers[effect.sender]
            if receiver.kind == batch_run.Kind.DELTA.value:
                effect = leader.Merge(effect.sender)
        _carry_out(run, effect)

    return mock.patch.object(BatchRun, "_carry_out", wrong)


def rows_of_older_attempts_kept() -> Any:
    """So are those of an attempt that has failed."""

    def wrong(run: BatchRun, effect: Any) -> None:
        if isinstance(effect, leader.Drop) and effect.reason is leader.DropReason.OLD_ATTEMPT:
            receiver = run._tools.exchange.receivers[effect.sender]
            if receiver.kind == batch_run.Kind.DELTA.value:
                effect = leader.Merge(effect.sender)
        _carry_out(run, effect)

    return mock.patch.object(BatchRun, "_carry_out", wrong)


def outer_row_before_its_window_closed() -> Any:
    """The rows of a window come out while a row that matches may still come."""

    def wrong(state: AppendState, closes: int) -> Any:
        early = 100 if isinstance(state.plan, JoinPlan) and state.plan.how != "inner" else 0
        return _ended(state, closes + early)

    return mock.patch.object(AppendState, "_ended", wrong)


def other_side_not_restored() -> Any:
    """A snapshot gives back the rows of the left side alone."""

    def wrong(state: AppendState, parsed: Any, lane: int | None) -> None:
        if lane is not None or not state.joins:
            return _add(state, parsed, lane)
        left = (parsed.flags & np.uint8(1)) == 0
        for bucket, rows in parsed.buckets_of():
            chosen = np.arange(parsed.count, dtype=np.uint32) if rows is None else rows
            state._table(bucket).add_parsed(parsed, chosen[left[chosen]])
        return None

    return mock.patch.object(AppendState, "_add", wrong)


def window_forgotten_with_its_process() -> Any:
    """The process that goes on with mapped state does not see its last window."""
    wrong = lambda state, catalogue: _adopt(state, catalogue[:-1])  # noqa: E731
    return mock.patch.object(AppendState, "adopt", wrong)


def null_matches_null() -> Any:
    """Rows with a null in their key are rows like others."""
    return mock.patch.object(append, "_nulls", lambda arrays, n: None)


def right_side_not_given_back() -> Any:
    """An outer join drops the rows of the right side with a null in their key."""
    wrong = lambda plan, side: side == 0 and _gives_back(plan, side)  # noqa: E731
    return mock.patch.object(JoinPlan, "gives_back", wrong)


def replay_for_all() -> Any:
    """Rows that are read again for an executor that lost its state reach all others too."""

    def wrong(state: AppendState, owners: Any) -> None:
        first = getattr(state, "first_owners", None)
        if first is None or -1 not in owners:
            state.first_owners = first = list(owners)  # type: ignore[attr-defined]
        _own(state, first)

    return mock.patch.object(AppendState, "own", wrong)


def memory_reused_under_way() -> Any:
    """The memory of an epoch is given back when it is posted, not when it has left."""

    def wrong(run: BatchRun) -> bool:
        return all(out is None for out in run._outgoing.values())

    return mock.patch.object(BatchRun, "_has_left", wrong)


def end_does_not_count() -> Any:
    """The numbers of an epoch's buffers begin with the first that comes in its batch, whatever it
    is."""

    def wrong(run: BatchRun, peer: int, receiver: Any) -> bool:
        if peer not in run.__dict__.setdefault("known", set()):
            run.known.add(peer)  # type: ignore[attr-defined]
            run._tools.begins[peer] = receiver.sequence
        return _take(run, peer, receiver)

    return mock.patch.object(BatchRun, "_take", wrong)


def late_rows_joined() -> Any:
    """A row of a window that was emitted is kept, and matches nothing that is left."""

    def begin(state: AppendState, closed_before: int) -> None:
        state.closed_before = max(closed_before - 1000, -(1 << 63))

    return mock.patch.object(AppendState, "begin", begin)


OF_REAL: tuple[Callable[[], Any], ...] = (
    match_emitted_twice,
    rows_of_older_attempts_kept,
    outer_row_before_its_window_closed,
    other_side_not_restored,
    window_forgotten_with_its_process,
    null_matches_null,
    right_side_not_given_back,
    replay_for_all,
    memory_reused_under_way,
    end_does_not_count,
    late_rows_joined,
)
