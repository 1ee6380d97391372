"""What coordinator and executors say to each other, as values with a form in JSON.

A message is one JSON object with its ``type``; on a connection it follows its length, four bytes
big endian.  `Output` is followed by `size` bytes of an Arrow stream, `PartFollows` and
`FetchedPart` by `size` bytes of a file, each in frames of any length.  Whatever arrives is checked
before anything looks at it: a message of another version or shape is a `FormatError`.

=================  =====================  ==========================================================
from executor      from coordinator       when
=================  =====================  ==========================================================
`Hello`            `Welcome`              an executor connects; all of them are welcomed together
                   `Restore`              its state is cold: load these parts, forget all else
`Listening`                               the receiving ends of its channels expect their peers
                   `Connect`              all are listening: connect the sending ends
`Ready`                                   channels to all peers are up, and what is lost is restored
                   `StartBatch`           to all, with the ranges that this one reads
`NotRestored`                             a part is damaged or gone: an older snapshot, please
`FetchPart`        `FetchedPart`          an executor that does not see the job's directory
`PartFollows`                             the same: its part of a snapshot, before `SnapshotDone`
`Working`                                 each second while an answer is owed: it goes on
`BatchDone`                               it leads nothing of the batch any more
                   `TakeOutput`           of the batch that is done
`Output`                                  the rows follow
                   `TakeSnapshot`         of the state after a batch that is committed
`SnapshotDone`                            its part is durable
`Failed`           `Stop`                 an error that ends the job; the end
`Arrived`          `Placed`               of a planned job: a process comes for one batch
                   `Leave`                of a planned job: the batch is done, hand out its output
=================  =====================  ==========================================================

In a *planned* job (`kdirect.state.planned_job`) somebody else starts the processes, for one batch
each: tasks of Spark.  Before its hello such a process says that it has arrived and whose state its
host has, and is told which executor it is.

Pure: reading from and writing to a connection is the driver's affair.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeAlias, get_args

from kdirect import errors
from kdirect.errors import FormatError, KdirectError, StateError
from kdirect.model import TopicPartition
from kdirect.state import batches
from kdirect.state.batches import (
    MOST_EXECUTORS,
    NO_BATCH,
    Part,
    Partition,
    Progress,
    Ranges,
    StateHeader,
)
from kdirect.state.plan import VPARTS, Plan, plan_from_json
from kdirect.state.strict import Members, canonical, checked_number, parse, shown

VERSION = 1
LONGEST_BYTES = 64 << 20  # of one message without the rows that follow an Output


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first words of an executor.  `address` is where its channels are reached, in the form of
    its transport.  `header` is of the state file that it found, or None.  `start` is the number of
    the start of its process, which the settings said: an older one has been replaced."""

    type: ClassVar[str] = "hello"
    executor: int
    token: str
    process_id: int
    host: str
    address: dict[str, Any]
    header: StateHeader | None
    start: int = 0
    version: int = VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """All executors are there.  `vparts` is the range that each leads; `addresses` are where each
    is reached; `options` are those of the engine, resolved.  `cold` says that this executor's state
    is of no use and a `Restore` follows."""

    type: ClassVar[str] = "welcome"
    attempt: int
    plan: Plan
    options: dict[str, Any]
    vparts: tuple[tuple[int, int], ...]
    addresses: tuple[dict[str, Any], ...]
    cold: bool
    version: int = VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Forget all state and load these parts of the snapshot after batch `batch`: of each only the
    virtual partitions that the executor leads.  NO_BATCH and no part: begin empty."""

    type: ClassVar[str] = "restore"
    attempt: int
    batch: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """The receiving ends of all channels of this executor expect their peers."""

    type: ClassVar[str] = "listening"
    attempt: int
    executor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """All executors are listening: connect the sending ends."""

    type: ClassVar[str] = "connect"
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Connected to all peers, and restored if told to: batches may begin."""

    type: ClassVar[str] = "ready"
    attempt: int
    executor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NotRestored:
    """The parts of the snapshot after `batch` cannot be used; `message` says why."""

    type: ClassVar[str] = "not_restored"
    attempt: int
    executor: int
    batch: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPart:
    """Send the file `file` of the snapshot after `batch`: this executor's host does not see the
    directory of the job."""

    type: ClassVar[str] = "fetch_part"
    attempt: int
    executor: int
    batch: int
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedPart:
    """The answer: `size` bytes of the file follow; none where it cannot be read."""

    type: ClassVar[str] = "fetched_part"
    attempt: int
    batch: int
    file: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFollows:
    """`size` bytes of the file `file` of the snapshot after `batch` follow, for the coordinator to
    write: this executor's host does not see the directory of the job."""

    type: ClassVar[str] = "part_follows"
    attempt: int
    batch: int
    file: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Working:
    """This executor goes on with what it owes an answer for.  `steps` counts what it has done since
    it came; see `kdirect.state.heartbeat`."""

    type: ClassVar[str] = "working"
    attempt: int
    executor: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartBatch:
    """Run a batch: read `ranges` (this executor's), apply rows and deltas of the virtual partitions
    in `vparts` only.

    That is all of them, unless some executors were cold: then the others read for them and leave
    their own state and kept output alone.  `emit` is False where the output was committed before
    and only the state is wanted.  `clock` is that of all partitions before the batch.  With
    `closes_all` no batch follows, and every window is emitted.
    """

    type: ClassVar[str] = "start_batch"
    attempt: int
    batch: int
    ranges: Ranges
    clock: dict[Partition, int]
    idle: frozenset[Partition]
    closed_before: int
    now_us: int
    closes_all: bool = False
    vparts: tuple[tuple[int, int], ...] = ((0, VPARTS),)
    emit: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDone:
    """This executor has sent all its deltas, merged all of the others', and emitted: its header
    says so.  `after` are the clocks that it computed, equal in all executors.  `counts` are those
    of the batch by name: rows, late, bad rows by reason, deltas, and so on.  `bad_rows` says of the
    first rows that were dropped where they are, and why."""

    type: ClassVar[str] = "batch_done"
    attempt: int
    batch: int
    executor: int
    after: Progress
    rows_out: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    bad_rows: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeOutput:
    """Send the kept output of this batch.  It may be asked for more than once."""

    type: ClassVar[str] = "take_output"
    attempt: int
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The kept output of a batch; `size` bytes of an Arrow IPC stream follow."""

    type: ClassVar[str] = "output"
    attempt: int
    batch: int
    executor: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeSnapshot:
    """Write the state after `batch` to the file `file` of the snapshot, and sync it."""

    type: ClassVar[str] = "take_snapshot"
    attempt: int
    batch: int
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotDone:
    """This executor's part of the snapshot is durable."""

    type: ClassVar[str] = "snapshot_done"
    attempt: int
    batch: int
    executor: int
    part: Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An error of an executor.  If it is `retriable`, because a broker does not answer for example,
    the job begins again; one that a repetition would meet again ends it.  `error` is the name of
    its class in `kdirect.errors`, and `topic`, `partition` and `offset` say of which record it is;
    empty and -1: of none."""

    type: ClassVar[str] = "failed"
    executor: int
    error: str
    message: str
    hint: str = ""
    retriable: bool = False
    topic: str = ""
    partition: int = -1
    offset: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """The first words of a process that comes for batch `batch` of a planned job.  `task` tells the
    processes of one batch apart, and a greater `start` is a newer process.  `states` are the
    executors whose state `host` has."""

    type: ClassVar[str] = "arrived"
    batch: int
    task: int
    start: int
    host: str
    process_id: int
    states: tuple[int, ...]
    version: int = VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The answer: be this executor."""

    type: ClassVar[str] = "placed"
    executor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """All executors have done the batch and keep its output: hand out your part, and leave.
    `counts` are those of all executors, and `closes` is the time below which all windows were
    emitted."""

    type: ClassVar[str] = "leave"
    attempt: int
    batch: int
    closes: int
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOver:
    """All executors have done the batch.  Until then one that leaves would be lost to the others,
    which are in the midst of it."""

    type: ClassVar[str] = "batch_over"
    attempt: int
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The end: close the channels, leave, and keep the files; with `forget`, remove them: the
    directory of the job has all that its next start needs.  `error`, `message` and `hint` are those
    of the error that ended the job, if one did."""

    type: ClassVar[str] = "stop"
    attempt: int
    forget: bool = False
    error: str = ""
    message: str = ""
    hint: str = ""


FromExecutor: TypeAlias = (
    Arrived
    | Hello
    | Listening
    | NotRestored
    | FetchPart
    | PartFollows
    | Ready
    | Working
    | BatchDone
    | Output
    | SnapshotDone
    | Failed
)
FromCoordinator: TypeAlias = (
    Placed
    | Welcome
    | Restore
    | FetchedPart
    | Connect
    | StartBatch
    | BatchOver
    | TakeOutput
    | TakeSnapshot
    | Leave
    | Stop
)
Message: TypeAlias = FromExecutor | FromCoordinator
_CLASSES: dict[str, Any] = {c.type: c for u in (FromExecutor, FromCoordinator) for c in get_args(u)}


def error_of(said: Failed | Stop) -> KdirectError:
    """The error that a message tells of, as one of its class."""
    found = getattr(errors, said.error, None)
    cls: type[KdirectError] = StateError
    if isinstance(found, type) and issubclass(found, KdirectError):
        cls = found
    if isinstance(said, Failed):
        error = cls(f"executor {said.executor}: {said.message}", hint=said.hint)
        if said.topic:
            error.topic_partition = TopicPartition(said.topic, said.partition)
            error.offset = said.offset if said.offset >= 0 else None
        return error
    return cls(said.message or "the job has ended", hint=said.hint)


def encode(message: Message) -> bytes:
    """The JSON of a message, without its length."""
    value = {"type": message.type}
    for member in fields(message):
        write = _WRITERS.get(member.name)
        given = getattr(message, member.name)
        value[member.name] = given if write is None else write(given)
    return canonical(value).encode()


def decode(data: bytes) -> Message:
    """The message in these bytes.  Raises FormatError, which says what is wrong with it."""
    if len(data) > LONGEST_BYTES:
        raise FormatError(f"message: it has {len(data)} bytes, more than {LONGEST_BYTES}")
    members = Members(parse(data, "message"), "message")
    cls = _CLASSES[members.choice("type", _CLASSES)]
    members.what = f"message {cls.type}"
    values = {member.name: _READERS[member.name](members, member.name) for member in fields(cls)}
    members.close()
    return cls(**values)


def decode_from_executor(data: bytes) -> FromExecutor:
    """As `decode`, of a message that an executor may send."""
    return _only(decode(data), get_args(FromExecutor))


def decode_from_coordinator(data: bytes) -> FromCoordinator:
    """As `decode`, of a message that the coordinator may send."""
    return _only(decode(data), get_args(FromCoordinator))


def _only(message: Any, classes: tuple[Any, ...]) -> Any:
    if not isinstance(message, classes):
        raise FormatError(f"message {message.type}: this side does not send it")
    return message


# -- members, each of one meaning wherever it occurs -----------------------------------------------


def _vparts_to_json(vparts: tuple[tuple[int, int], ...]) -> list[list[int]]:
    return [list(pair) for pair in vparts]


def _vparts(members: Members, name: str) -> tuple[tuple[int, int], ...]:
    found, end = [], 0
    for pair in members.items(name):
        if not isinstance(pair, list) or len(pair) != 2:
            raise members.refuse(name, pair, "[first, last)")
        first = checked_number(pair[0], end, VPARTS, f"{members.what}: {name}")
        end = checked_number(pair[1], first, VPARTS, f"{members.what}: {name}")
        found.append((first, end))
    return tuple(found)


def _objects(members: Members, name: str) -> tuple[dict[str, Any], ...]:
    found = members.items(name)
    for value in found:
        if not isinstance(value, dict):
            raise members.refuse(name, value, "an object")
    return tuple(found)


def _counts(members: Members, name: str) -> dict[str, int]:
    found = members.object(name)
    for key, value in found.items():
        checked_number(value, 0, (1 << 63) - 1, f"{members.what}: {name}: {shown(key)}")
    return found


def _executors(members: Members, name: str) -> tuple[int, ...]:
    what = f"{members.what}: {name}"
    found = members.items(name)
    return tuple(checked_number(value, 0, MOST_EXECUTORS - 1, what) for value in found)


def _version(members: Members, name: str) -> int:
    found = members.number(name, 0)
    if found != VERSION:
        raise FormatError(
            f"{members.what}: version {found} is not {VERSION}",
            hint="coordinator and executors must run the same version of kdirect",
        )
    return found


def _text(members: Members, name: str) -> str:
    return members.text(name)


def _file(members: Members, name: str) -> str:
    found = members.text(name, empty=False)
    if "/" in found or "\0" in found or found in (".", ".."):
        raise members.refuse(name, found, "the name of a file")
    return found


def _not_negative(members: Members, name: str) -> int:
    return members.number(name, 0)


_WRITERS: dict[str, Any] = {
    "header": lambda header: None if header is None else header.to_json(),
    "plan": lambda plan: plan.to_json(),
    "vparts": _vparts_to_json,
    "addresses": list,
    "parts": lambda parts: [part.to_json() for part in parts],
    "part": lambda part: part.to_json(),
    "ranges": batches.ranges_to_json,
    "clock": batches.clock_to_json,
    "idle": batches.partitions_to_json,
    "after": lambda after: after.to_json(),
    "bad_rows": list,
    "states": list,
}
_READERS: dict[str, Any] = {
    "version": _version,
    "executor": lambda m, name: m.number(name, 0, MOST_EXECUTORS - 1),
    "token": _text,
    "process_id": _not_negative,
    "host": _text,
    "address": lambda m, name: m.object(name),
    "header": lambda m, name: m.optional(name, StateHeader.from_json),
    "attempt": _not_negative,
    "plan": lambda m, name: plan_from_json(m.object(name)),
    "options": lambda m, name: m.object(name),
    "vparts": _vparts,
    "addresses": _objects,
    "cold": lambda m, name: m.boolean(name),
    "batch": lambda m, name: m.number(name, NO_BATCH),
    "parts": lambda m, name: m.each(name, Part.from_json),
    "part": lambda m, name: Part.from_json(m.take(name)),
    "ranges": lambda m, name: batches.ranges_from_json(m.take(name)),
    "clock": lambda m, name: batches.clock_from_json(m.take(name)),
    "idle": lambda m, name: batches.partitions_from_json(m.take(name)),
    "closed_before": lambda m, name: m.number(name),
    "now_us": lambda m, name: m.number(name),
    "emit": lambda m, name: m.boolean(name),
    "closes": lambda m, name: m.number(name),
    "closes_all": lambda m, name: m.boolean(name),
    "forget": lambda m, name: m.boolean(name),
    "retriable": lambda m, name: m.boolean(name),
    "after": lambda m, name: Progress.from_json(m.take(name)),
    "rows_out": _not_negative,
    "counts": _counts,
    "bad_rows": lambda m, name: m.texts(name),
    "size": _not_negative,
    "start": _not_negative,
    "task": _not_negative,
    "states": _executors,
    "steps": _not_negative,
    "file": _file,
    "error": _text,
    "message": _text,
    "hint": _text,
    "topic": _text,
    "partition": lambda m, name: m.number(name, -1),
    "offset": lambda m, name: m.number(name, -1),
}
