"""What a job does when it starts: go on, hand out what is kept, or rebuild what was lost.

Pure: `decide` goes from what the directory and the executors' headers say to a `Resume`, or raises
an error that says why this state cannot be gone on with.

With N the last batch in ``batches.log``, an executor's state is of use if its header says

* DONE N, or CLEAN N if N was committed: it has batch N;
* CLEAN N-1 or DONE N-1, if N was not committed: it is as it was before N.

Everything else is *cold*: no file, another number of executors, other virtual partitions, within a
batch (DIRTY), or too old.
Cold executors load their virtual partitions from the newest snapshot, of batch S, and the batches
S+1..N run again from the log for them alone: the others only read.  The output of committed
batches is not given again; that of N is, if it was not committed.  So a window is handed out once,
by batch number, whatever was killed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kdirect.errors import DataLossError, StateDirectoryError
from kdirect.state.batches import (
    NO_BATCH,
    BatchRecord,
    Manifest,
    Partition,
    Phase,
    StateHeader,
)
from kdirect.state.plan import VPARTS

EVERYTHING = ((0, VPARTS),)  # all virtual partitions: a batch that is no repetition
_NEW = "start a new job in an empty directory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is known at the start of an attempt.

    `headers` has one for each executor of this attempt, None where it found no file, and `vparts`
    the range that each leads; an executor that leads nothing has nothing to lose.  `records` are
    the lines of batches.log that are kept, `committed` the last batch in commits.log.
    `log_starts` is the first offset that each partition still has."""

    plan_hash: str
    attempt: int
    headers: tuple[StateHeader | None, ...]
    vparts: tuple[tuple[int, int], ...]
    records: Mapping[int, BatchRecord]
    committed: int
    manifests: tuple[Manifest, ...]
    log_starts: Mapping[Partition, int]

    @property
    def last(self) -> int:
        """The newest batch that was begun."""
        return max(self.records, default=self.committed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One batch to run: for these ranges of virtual partitions, with or without its output."""

    batch: int
    vparts: tuple[tuple[int, int], ...]
    emit: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """How to get to the state after the last batch.

    The executors in `cold` restore `snapshot` (None: they begin empty), then `steps` run.  `offer`
    says that the last batch was not committed: its output, kept or made by the last step, is to be
    handed out."""

    cold: frozenset[int]
    snapshot: Manifest | None
    steps: tuple[Step, ...]
    offer: bool


def decide(situation: Situation) -> Resume:
    """How the job goes on.  Raises StateDirectoryError or DataLossError if it cannot."""
    _check(situation)
    last, committed = situation.last, situation.committed
    executors = len(situation.headers)
    levels = [
        _level(header, executors, led, last, committed == last) if led[0] < led[1] else last
        for header, led in zip(situation.headers, situation.vparts)
    ]
    cold = frozenset(i for i, level in enumerate(levels) if level is None)
    before = frozenset(i for i, level in enumerate(levels) if level == last - 1)
    snapshot = _newest(situation) if cold else None
    at = NO_BATCH if snapshot is None else snapshot.number
    steps = []
    for number in range(at + 1 if cold else last, last + 1):
        needing = sorted(cold | (before if number == last else frozenset()))
        if needing and number != NO_BATCH:
            steps.append(
                Step(
                    batch=number,
                    vparts=_joined([situation.vparts[i] for i in needing]),
                    emit=number > committed,
                )
            )
    for planned in steps:
        _check_kept(situation, planned.batch)
    return Resume(cold=cold, snapshot=snapshot, steps=tuple(steps), offer=last > committed)


def _level(
    header: StateHeader | None,
    executors: int,
    vparts: tuple[int, int],
    last: int,
    is_committed: bool,
) -> int | None:
    """The batch that the state has, or None if it is cold."""
    if header is None or header.phase is Phase.DIRTY:
        return None
    if (header.executors, header.vparts) != (executors, vparts):
        return None
    if header.batch == last and (header.phase is Phase.DONE or is_committed):
        return last
    return last - 1 if header.batch == last - 1 and not is_committed else None


def _newest(situation: Situation) -> Manifest | None:
    """The newest snapshot whose batch was committed.  One of an uncommitted batch would lack its
    output; none is ever taken."""
    usable = [m for m in situation.manifests if m.number <= situation.committed]
    return max(usable, key=lambda m: m.number, default=None)


def _joined(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ascending ranges, those that touch made one."""
    found: list[tuple[int, int]] = []
    for first, last in ranges:
        if found and found[-1][1] == first:
            found[-1] = (found[-1][0], last)
        else:
            found.append((first, last))
    return tuple(found)


def _check(situation: Situation) -> None:
    """Do directory and files belong together?"""
    last, committed = situation.last, situation.committed
    numbers = sorted(situation.records)
    if numbers and numbers != list(range(numbers[0], numbers[-1] + 1)):
        raise StateDirectoryError("batches.log: batches are missing", hint=_NEW)
    if not last - 1 <= committed <= last:
        raise StateDirectoryError(
            f"batches.log ends with batch {last}, and commits.log with {committed}", hint=_NEW
        )
    for manifest in situation.manifests:
        if manifest.plan_hash != situation.plan_hash:
            raise _foreign(f"snapshot {manifest.number}", manifest.plan_hash, situation.plan_hash)
    for executor, header in enumerate(situation.headers):
        if header is None:
            continue
        what = f"the state file of executor {executor}"
        if header.plan_hash != situation.plan_hash:
            raise _foreign(what, header.plan_hash, situation.plan_hash)
        if header.executors == len(situation.headers) and header.executor != executor:
            raise StateDirectoryError(
                f"{what} is that of executor {header.executor}",
                hint="give each executor a file of its own",
            )
        if header.batch > last or header.attempt > situation.attempt:
            raise StateDirectoryError(
                f"{what} knows batch {header.batch} of attempt {header.attempt}, the directory "
                f"only batch {last} of attempt {situation.attempt}",
                hint="the directory is an old copy: use the newest one, or remove the state files",
            )


def _foreign(what: str, found: str, wanted: str) -> StateDirectoryError:
    return StateDirectoryError(
        f"{what} belongs to a job with another plan ({found}, not {wanted})",
        hint="run the plan that it was started with, or give this job a directory of its own",
    )


def _check_kept(situation: Situation, number: int) -> None:
    """Can batch `number` be read again?"""
    record = situation.records.get(number)
    if record is None:
        raise StateDirectoryError(
            f"state was lost, and batch {number} is needed to rebuild it: no snapshot has it, and "
            "batches.log begins later",
            hint=_NEW,
        )
    for tp, wanted in sorted(record.ranges.items()):
        start = situation.log_starts.get(tp, 0)
        if wanted.start < min(start, wanted.end):
            raise DataLossError(
                f"state was lost, and offsets {wanted.start} to {wanted.end} of {tp.topic}-"
                f"{tp.partition} are needed to rebuild it; the topic begins at {start}",
                hint="raise the topic's retention above snapshot_interval; " + _NEW,
            )
