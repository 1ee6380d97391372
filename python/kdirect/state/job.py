"""A job as its coordinator sees it: events, effects and state, as values.

What they do is in `coordinator.py`, whose docstring has the tables.  Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, TypeAlias

from kdirect.errors import KdirectError
from kdirect.state.batches import (
    NO_BATCH,
    BatchRecord,
    Commit,
    Manifest,
    Part,
    Partition,
    Progress,
    Range,
    deal_vparts,
)
from kdirect.state.messages import FromCoordinator, FromExecutor, Hello
from kdirect.state.plan import Plan
from kdirect.state.recovery import Step

# -- events ----------------------------------------------------------------------------------------


class Lost(NamedTuple):
    """The connection to this executor broke."""

    executor: int


class Ends(NamedTuple):
    """[first offset, next offset) of every partition of the inputs, at wall clock `now_us`."""

    ends: Mapping[Partition, Range]
    now_us: int


class Asked(NamedTuple):
    """The caller wants the next output."""

    now_us: int


class Handed(NamedTuple):
    """The caller has the output of this batch."""

    batch: int


class StopAsked(NamedTuple):
    """The caller wants no more."""

    now_us: int


class Planned(NamedTuple):
    """Of a planned job: batch `number` reads `ranges`, and all batches before it are committed.
    `ends` are [first offset, next offset) of every partition at wall clock `now_us`.  With
    `closes_all` it is the last one, and every window is emitted."""

    number: int
    ranges: Mapping[Partition, Range]
    ends: Mapping[Partition, Range]
    now_us: int
    closes_all: bool = False


Event: TypeAlias = FromExecutor | Lost | Ends | Asked | Handed | StopAsked | Planned

# -- effects ---------------------------------------------------------------------------------------


class WriteAttempt(NamedTuple):
    attempt: int


class LogBatch(NamedTuple):
    record: BatchRecord


class LogCommit(NamedTuple):
    commit: Commit


class Tell(NamedTuple):
    """Send a message on the connection of the last hello of this executor that `step` was given: a
    newer connection, whose hello still waits, must not get it."""

    executor: int
    message: FromCoordinator


class Disconnect(NamedTuple):
    executor: int


class AskEnds(NamedTuple):
    """`pause`: nothing was new when the ends were last asked for."""

    pause: bool


class HandOut(NamedTuple):
    batch: int


class WriteManifest(NamedTuple):
    manifest: Manifest


class ForgetSnapshot(NamedTuple):
    """Remove the snapshot `number`, then what batches.log says of batches up to `batches`."""

    number: int
    batches: int


class Finish(NamedTuple):
    """`error` is None if the job has come to its end, or was stopped."""

    error: KdirectError | None


Effect: TypeAlias = (
    WriteAttempt
    | LogBatch
    | LogCommit
    | Tell
    | Disconnect
    | AskEnds
    | HandOut
    | WriteManifest
    | ForgetSnapshot
    | Finish
)
Effects: TypeAlias = tuple[Effect, ...]

# -- state -----------------------------------------------------------------------------------------


class Phase(Enum):
    """What the coordinator waits for; the module's table says more."""

    GATHERING = "gathering"
    LISTENING = "listening"
    CONNECTING = "connecting"
    RUNNING = "running"
    OFFERING = "offering"
    WAITING = "waiting"
    SNAPSHOT = "snapshot"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What does not change while the job runs.

    `starts` are the first offsets of a job that is new, `until` the offsets at which it ends (None:
    never).  With `is_split` the first half of the executors reads and leads nothing, and the other
    half leads and reads nothing.  `max_restarts` attempts may fail in a row before all that was
    begun is done.  `is_planned`: the caller plans each batch (`planned_job`); `starts`, `until`,
    `max_offsets` and `max_restarts` have no meaning then."""

    plan: Plan
    executors: int
    options: Mapping[str, object] = field(default_factory=dict)
    starts: Mapping[Partition, int] = field(default_factory=dict)
    until: Mapping[Partition, int] | None = None
    is_split: bool = False
    max_offsets: int | None = None
    snapshot_interval_us: int = 30_000_000
    max_restarts: int = 5
    is_planned: bool = False

    @property
    def readers(self) -> int:
        """How many executors read: the first ones."""
        return self.executors // 2 if self.is_split else self.executors

    @property
    def vparts(self) -> tuple[tuple[int, int], ...]:
        """The range of virtual partitions that each executor leads."""
        return deal_vparts(self.executors, self.readers if self.is_split else 0)

    @property
    def idle_timeouts_us(self) -> dict[str, int | None]:
        """By topic; None: never."""
        return {
            given.topic: None if given.idle_timeout_ms is None else given.idle_timeout_ms * 1000
            for given in self.plan.inputs
        }

    @property
    def leaders(self) -> tuple[int, ...]:
        """The executors that lead any."""
        return tuple(i for i, (first, last) in enumerate(self.vparts) if first < last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taking:
    """The snapshot after `batch`, which executors write while later batches run; the parts that are
    on disk, by executor."""

    batch: int
    parts: Mapping[int, Part] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job at one attempt."""

    settings: Settings
    phase: Phase = Phase.GATHERING
    attempt: int
    records: Mapping[int, BatchRecord]
    committed: Commit | None
    manifests: tuple[Manifest, ...]
    unusable: frozenset[int] = frozenset()  # snapshots that could not be restored
    hellos: Mapping[int, Hello]
    ends: Ends | None = None
    heard: frozenset[int] = frozenset()  # executors that have said what is waited for
    steps: tuple[Step, ...] = ()  # that are still to run; the first one is running
    after: Progress | None = None  # the clocks after the newest batch that is done
    taking: Taking | None = None
    seen_ends: Mapping[Partition, int] = field(default_factory=dict)
    advanced_us: Mapping[Partition, int]  # when each partition was last seen to have new records
    snapshot_us: int | None = None  # when the last snapshot was begun
    offered: Commit | None = None  # what the driver was last told to hand out
    handed: Commit | None = None  # what the caller has and has not committed
    now_us: int = 0  # the latest wall clock that was heard of
    is_asked: bool = False  # the caller waits for output
    is_asking: bool = False  # an `AskEnds` is not answered yet
    is_stopping: bool = False
    restarts: int = 0
    planned: Planned | None = None  # of a planned job: the batch that is to run, or has run

    @property
    def last(self) -> int:
        """The newest batch that was logged."""
        return max(self.records, default=self.last_committed)

    @property
    def last_committed(self) -> int:
        """The newest batch that is committed; of a planned job, perhaps not in the log yet."""
        logged = NO_BATCH if self.committed is None else self.committed.number
        return logged if self.planned is None else max(logged, self.planned.number - 1)

    @property
    def is_all_in_snapshot(self) -> bool:
        """Does the directory have all that a next start needs, without any mapped state?  Then all
        is committed, and the newest snapshot is of the last batch."""
        if self.last > self.last_committed:
            return False
        usable = {m.number for m in self.manifests} - self.unusable
        return self.last == NO_BATCH or self.last in usable
