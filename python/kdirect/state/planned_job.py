"""A planned job: somebody else says what each batch reads, and starts the executors for it.

Pure.  In such a job (`job.Settings.is_planned`) the coordinator asks no broker which records are
new, and starts no process.  Its caller *plans* each batch: the number, the range of every
partition, and with it that all batches before are committed.  Processes come for one batch each,
hand out their own part of its output, and leave; others come for the next one, or once more for
this one.  So every batch is an attempt of its own (`coordinator`), which begins with the hellos of
whoever came.  This is how the tasks of a micro-batch of Spark are executors: Spark's offset log
says what a batch reads, before the batch runs.

Owns: what makes a planned batch acceptable, its record, and which process becomes which executor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kdirect.errors import DataLossError, StateDirectoryError
from kdirect.state.batches import NO_BATCH, BatchRecord, Partition, Range
from kdirect.state.clock import VectorClock
from kdirect.state.job import Job, Planned
from kdirect.state.messages import Arrived
from kdirect.state.ranges import check_kept, idle_partitions
from kdirect.state.windows import TIME_MIN

_OLD_COPY = "start a new query: with a new checkpoint and an empty state directory"


def check_planned(job: Job, plan: Planned) -> None:
    """Can this batch be the next one of the job, or its last one again?  StateDirectoryError where
    the caller's records and the directory do not belong together."""
    committed = NO_BATCH if job.committed is None else job.committed.number
    if plan.number == job.last and committed < job.last:
        # Only the ends: where the first batch began is known here alone, and need not be kept by
        # the caller until that batch is done.
        ends = {tp: range_.end for tp, range_ in plan.ranges.items()}
        if ends != {tp: range_.end for tp, range_ in job.records[job.last].ranges.items()}:
            raise StateDirectoryError(
                f"batch {plan.number} was begun with other offsets than it is to be repeated with",
                hint=_OLD_COPY,
            )
        return
    if plan.number == job.last + 1:
        _check_goes_on(job, plan)
        return
    where = "no batch" if job.last == NO_BATCH else f"batch {job.last}"
    if committed == job.last != NO_BATCH:
        where += ", which is committed"
    raise StateDirectoryError(
        f"batch {plan.number} is to run, and the state directory ends with {where}: it is that of"
        " another query, an older or newer copy, or was removed",
        hint="bring back the directory that belongs to the checkpoint, or " + _OLD_COPY,
    )


def _check_goes_on(job: Job, plan: Planned) -> None:
    """Does the batch begin where the one before it ended?"""
    before = job.records.get(job.last)
    for tp, range_ in sorted(before.ranges.items()) if before is not None else ():
        now = plan.ranges.get(tp)
        if now is None:
            raise DataLossError(
                f"{tp.topic}-{tp.partition} is gone, and was read up to {range_.end}",
                hint="the topic was made again: " + _OLD_COPY,
            )
        if now.start != range_.end:
            raise StateDirectoryError(
                f"{tp.topic}-{tp.partition} is to be read from offset {now.start}, and the state"
                f" has it up to {range_.end}",
                hint=_OLD_COPY,
            )
    check_kept({tp: range_.start for tp, range_ in plan.ranges.items()}, plan.ends)


def planned_record(job: Job) -> BatchRecord:
    """The record of the batch that is planned; the one before it is committed and done."""
    plan = job.planned
    assert plan is not None
    known = {} if job.after is None else job.after.clock
    return BatchRecord(
        number=plan.number,
        ranges=dict(plan.ranges),
        now_us=job.now_us,
        idle=idle_of(job, plan.ranges, plan.ends, job.now_us),
        clock={tp: known.get(tp, TIME_MIN) for tp in plan.ranges},
        closed_before=TIME_MIN if job.after is None else job.after.closes,
        closes_all=plan.closes_all,
    )


def idle_of(
    job: Job, ranges: Mapping[Partition, Range], ends: Mapping[Partition, Range], now_us: int
) -> frozenset[Partition]:
    """The partitions that hold no window open in a batch of these ranges."""
    return idle_partitions(ranges, ends, job.advanced_us, job.settings.idle_timeouts_us, now_us)


def would_close(job: Job, ends: Mapping[Partition, Range], now_us: int) -> bool:
    """Would a batch that reads nothing emit windows, because partitions have become idle?"""
    if job.last == NO_BATCH:
        return False
    empty = {tp: Range(r.end, r.end) for tp, r in ends.items()}
    idle = idle_of(job, empty, ends, now_us)
    after = job.after
    if after is None and job.committed is not None and job.committed.number == job.last:
        after = job.committed.after
    if after is None:  # the clocks are known once a batch has run
        return bool(idle)
    clock = VectorClock({tp: after.clock.get(tp, TIME_MIN) for tp in empty})
    return clock.closes(idle, after.closes) > after.closes


def deal_executors(arrived: Sequence[Arrived]) -> dict[int, int]:
    """Which executor each task becomes: where state of an executor is, if possible, so that nothing
    is rebuilt because tasks came to other hosts.  On one host, all that is left to choose, a task
    becomes the executor of its own number."""
    tasks = {a.task: a for a in arrived}
    found: dict[int, int] = {}
    executors = range(len(tasks))
    left = set(executors)
    # Those who could become few others choose first.
    for task in sorted(tasks, key=lambda task: (len(set(tasks[task].states)), task)):
        mine = left.intersection(tasks[task].states)
        if mine:
            found[task] = task if task in mine else min(mine)
            left.remove(found[task])
    for task in sorted(tasks.keys() - found.keys(), key=lambda task: (task not in left, task)):
        found[task] = task if task in left else min(left)
        left.remove(found[task])
    return found
