"""What the coordinator's directory remembers of batches, as values: ranges, records, manifests.

A *batch* is a fixed range of offsets of every topic partition.  Its record is durable before it
runs, so a repetition reads the same rows, drops the same late ones and closes the same windows.
Everything here has a form in JSON, which is checked when it is read.  Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from kdirect.errors import FormatError
from kdirect.state.plan import VPARTS
from kdirect.state.strict import INT64, Members, checked_number, shown
from kdirect.state.windows import TIME_MIN

NO_BATCH = -1  # "after batch -1" is the empty state
MOST_EXECUTORS = VPARTS
_LAST = INT64[1]


class Partition(NamedTuple):
    """A partition of a topic; ordered, so that every process goes through them in one order."""

    topic: str
    partition: int


class Range(NamedTuple):
    """Offsets ``[start, end)`` of one partition."""

    start: int
    end: int


Ranges: TypeAlias = dict[Partition, Range]
Clock: TypeAlias = dict[Partition, int]  # microseconds, or TIME_MIN where nothing was seen


def ranges_to_json(ranges: Mapping[Partition, Range]) -> list[list[Any]]:
    return [[tp.topic, tp.partition, r.start, r.end] for tp, r in sorted(ranges.items())]


def ranges_from_json(value: Any) -> Ranges:
    found: Ranges = {}
    for row in _rows(value, (str, int, int, int), "ranges"):
        tp = _partition(row, "ranges")
        start = checked_number(row[2], 0, _LAST, "ranges: start")
        found[tp] = Range(start, checked_number(row[3], start, _LAST, "ranges: end"))
    return _without_twins(found, value, "ranges")


def clock_to_json(clock: Mapping[Partition, int]) -> list[list[Any]]:
    return [[tp.topic, tp.partition, time] for tp, time in sorted(clock.items())]


def clock_from_json(value: Any) -> Clock:
    found = {
        _partition(row, "clock"): checked_number(row[2], *INT64, "clock: time")
        for row in _rows(value, (str, int, int), "clock")
    }
    return _without_twins(found, value, "clock")


def partitions_to_json(partitions: Iterable[Partition]) -> list[list[Any]]:
    return [[tp.topic, tp.partition] for tp in sorted(partitions)]


def partitions_from_json(value: Any) -> frozenset[Partition]:
    return frozenset(
        _partition(row, "partitions") for row in _rows(value, (str, int), "partitions")
    )


def _rows(value: Any, kinds: tuple[type, ...], what: str) -> list[list[Any]]:
    if not isinstance(value, list):
        raise FormatError(f"{what}: {shown(value)} is not a list")
    for row in value:
        if not isinstance(row, list) or tuple(type(part) for part in row) != kinds:
            names = ", ".join(kind.__name__ for kind in kinds)
            raise FormatError(f"{what}: {shown(row)} is not [{names}]")
    return value


def _partition(row: list[Any], what: str) -> Partition:
    if not row[0]:
        raise FormatError(f"{what}: a topic without a name")
    return Partition(row[0], checked_number(row[1], 0, (1 << 31) - 1, f"{what}: partition"))


def _without_twins(found: dict, value: list, what: str) -> dict:
    if len(found) != len(value):
        raise FormatError(f"{what}: a partition occurs twice")
    return found


# -- dealing ---------------------------------------------------------------------------------------


def deal_vparts(executors: int, only_read: int = 0) -> tuple[tuple[int, int], ...]:
    """For each executor the half-open range of virtual partitions that it leads.  Together they
    are all of them; sizes differ by at most one.  The first `only_read` executors lead none."""
    leaders = executors - only_read
    return ((0, 0),) * only_read + tuple(
        (i * VPARTS // leaders, (i + 1) * VPARTS // leaders) for i in range(leaders)
    )


def led_by(executor: int, owners: Sequence[int]) -> tuple[int, int]:
    """The range of virtual partitions that an executor leads, where `owners` leads each of them;
    ``(0, 0)`` for none."""
    led = [vpart for vpart, owner in enumerate(owners) if owner == executor]
    return (led[0], led[-1] + 1) if led else (0, 0)


def leader_of(vpart: int, executors: int, only_read: int = 0) -> int:
    """The executor whose range has the virtual partition, dealt as by `deal_vparts`."""
    return only_read + ((vpart + 1) * (executors - only_read) - 1) // VPARTS


def deal_partitions(
    partitions: Iterable[Partition], readers: int
) -> tuple[tuple[Partition, ...], ...]:
    """For each of `readers` executors the topic partitions that it reads, in turn."""
    ordered = sorted(partitions)
    return tuple(tuple(ordered[i::readers]) for i in range(readers))


# -- what is durable -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """One line of ``batches.log``, durable before the batch runs.

    `ranges` has every partition of every input, with an empty range where there is nothing new.
    `now_us` is the wall clock that `max_ahead_us` is compared with.  Partitions in `idle` hold no
    window open; their ranges are empty.  `clock` is the vector clock after batch number-1, and
    `closed_before` the time below which all windows were emitted by then.
    """

    number: int
    ranges: Ranges
    now_us: int
    idle: frozenset[Partition] = frozenset()
    clock: Clock
    closed_before: int = TIME_MIN
    closes_all: bool = False

    def __post_init__(self) -> None:
        if self.ranges.keys() != self.clock.keys() or not self.idle <= self.ranges.keys():
            raise FormatError(f"batch {self.number}: ranges, clock and idle differ in partitions")
        for tp in self.idle:
            if self.ranges[tp].start != self.ranges[tp].end:
                raise FormatError(f"batch {self.number}: idle partition {tp} has records to read")

    def to_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "ranges": ranges_to_json(self.ranges),
            "now_us": self.now_us,
            "idle": partitions_to_json(self.idle),
            "clock": clock_to_json(self.clock),
            "closed_before": self.closed_before,
            "closes_all": self.closes_all,
        }

    @classmethod
    def from_json(cls, value: Any) -> BatchRecord:
        members = Members(value, "batch record")
        found = cls(
            number=members.number("number", 0),
            ranges=ranges_from_json(members.take("ranges")),
            now_us=members.number("now_us"),
            idle=partitions_from_json(members.take("idle")),
            clock=clock_from_json(members.take("clock")),
            closed_before=members.number("closed_before"),
            closes_all=members.boolean("closes_all"),
        )
        members.close()
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The clocks after a batch: what the next record will say.  A leader has it when it is done."""

    clock: Clock
    closes: int

    def to_json(self) -> dict[str, Any]:
        return {"clock": clock_to_json(self.clock), "closes": self.closes}

    @classmethod
    def from_json(cls, value: Any) -> Progress:
        members = Members(value, "progress")
        found = cls(clock=clock_from_json(members.take("clock")), closes=members.number("closes"))
        members.close()
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One line of ``commits.log``: the caller has taken the output of batch `number` and asked for
    more, so it is never handed out again."""

    number: int
    after: Progress

    def to_json(self) -> dict[str, Any]:
        return {"number": self.number, "after": self.after.to_json()}

    @classmethod
    def from_json(cls, value: Any) -> Commit:
        members = Members(value, "commit")
        found = cls(
            number=members.number("number", 0), after=Progress.from_json(members.take("after"))
        )
        members.close()
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One file of a snapshot: virtual partitions ``[first, last)`` with its size and checksum."""

    file: str
    first: int
    last: int
    size: int
    crc: int

    def to_json(self) -> list[Any]:
        return [self.file, self.first, self.last, self.size, self.crc]

    @classmethod
    def from_json(cls, value: Any) -> Part:
        ((file, first, last, size, crc),) = _rows([value], (str, int, int, int, int), "part")
        if not file or "/" in file or "\0" in file or file in (".", ".."):
            raise FormatError(f"part: {shown(file)} is not the name of a file")
        if not 0 <= first < last <= VPARTS or size < 0 or not 0 <= crc < 1 << 32:
            raise FormatError(f"part: {shown(value)} is out of range")
        return cls(file=file, first=first, last=last, size=size, crc=crc)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A whole snapshot: the state after batch `number`, which was committed.  It is written when
    all its parts are durable; their ranges cover every virtual partition once."""

    number: int
    plan_hash: str
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        end = 0
        for part in sorted(self.parts, key=lambda part: part.first):
            if part.first != end:
                raise FormatError(f"snapshot {self.number}: virtual partition {end} is not once")
            end = part.last
        if end != VPARTS:
            raise FormatError(f"snapshot {self.number}: virtual partitions from {end} are missing")

    def parts_of(self, vparts: Iterable[tuple[int, int]]) -> tuple[Part, ...]:
        """The parts that hold any of these ranges of virtual partitions."""
        wanted = tuple(vparts)
        return tuple(
            part
            for part in self.parts
            if any(part.first < last and first < part.last for first, last in wanted)
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "plan_hash": self.plan_hash,
            "parts": [part.to_json() for part in self.parts],
        }

    @classmethod
    def from_json(cls, value: Any) -> Manifest:
        members = Members(value, "manifest")
        found = cls(
            number=members.number("number", 0),
            plan_hash=members.text("plan_hash", empty=False),
            parts=members.each("parts", Part.from_json),
        )
        members.close()
        return found


class Phase(Enum):
    """What a state file's header says of its contents."""

    CLEAN = "clean"  # exactly the state after `batch`
    DIRTY = "dirty"  # somewhere within `batch`: of no use
    DONE = "done"  # the state after `batch`, whose output is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class StateHeader:
    """The header of an executor's state file, as its owner reports it.

    `vparts` is the range of virtual partitions that the state has: the same number of executors may
    lead others in another mode.  With DONE comes `after`, the clocks after the batch, which is kept
    with the output."""

    plan_hash: str
    executor: int
    executors: int
    vparts: tuple[int, int]
    attempt: int
    batch: int
    phase: Phase
    after: Progress | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "plan_hash": self.plan_hash,
            "executor": self.executor,
            "executors": self.executors,
            "vparts": list(self.vparts),
            "attempt": self.attempt,
            "batch": self.batch,
            "phase": self.phase.value,
            "after": None if self.after is None else self.after.to_json(),
        }

    @classmethod
    def from_json(cls, value: Any) -> StateHeader:
        members = Members(value, "state header")
        executors = members.number("executors", 1, MOST_EXECUTORS)
        ((first, last),) = _rows([members.take("vparts")], (int, int), "state header: vparts")
        if not 0 <= first <= last <= VPARTS:
            raise FormatError(f"state header: vparts: {first} to {last} is no range")
        found = cls(
            plan_hash=members.text("plan_hash", empty=False),
            executor=members.number("executor", 0, executors - 1),
            executors=executors,
            vparts=(first, last),
            attempt=members.number("attempt", 0),
            batch=members.number("batch", NO_BATCH),
            phase=Phase(members.choice("phase", [phase.value for phase in Phase])),
            after=members.optional("after", Progress.from_json),
        )
        members.close()
        if (found.phase is Phase.DONE) != (found.after is not None):
            raise FormatError(
                "state header: clocks belong to a batch that is done, and to no other"
            )
        return found
