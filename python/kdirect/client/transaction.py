"""What a transactional producer does next: one table of phases, without I/O (KIP-98, KIP-360,
KIP-890).

Owns: the producer id and epoch of a transactional id, the phase of its transaction, which request
goes to a coordinator next, and what an answer means.  What may not enter: connections, clocks,
records.  The calls of the API set a goal; then `pending` is the request to send, `answered` and
`lost` take what became of it, and the goal is reached when nothing is pending.

The phases, and what leads from one to another:

    NEW ── initialize ──> INITIALIZING ── answered ──> READY
    READY ── begin ──> OPEN ── commit ──> COMMITTING ── answered ──> READY
    OPEN, FAILED ── abort ──> ABORTING ── answered ──> READY, or INITIALIZING for a new epoch
    OPEN, COMMITTING ── failed, answered ──> FAILED: only an abort helps
    any ── answered: fenced, or what nobody expects ──> FATAL: only another producer helps

There are two protocols, chosen by the feature `transaction.version` of the brokers:

- version 1: the client adds each partition at the coordinator (`AddPartitions`) before its first
  record, and the epoch stays from transaction to transaction;
- version 2: brokers add partitions by themselves, and each end of a transaction gives a new epoch.
  So what is late from an earlier transaction can never join a later one.

With version 1 a batch that failed for good leaves a gap in its sequence, and a request without an
answer may act late.  After both, the abort is followed by a request for a new epoch.

One thread at a time: the producer's lock.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kdirect.errors import (
    KdirectError,
    ProducerFencedError,
    TransactionAbortableError,
    TransactionError,
)
from kdirect.format.error_codes import ErrorCode, error_kind
from kdirect.model import TopicPartition


class Phase(enum.Enum):
    """See the module."""

    NEW = "not initialized"
    INITIALIZING = "being initialized"
    READY = "ready"
    OPEN = "in a transaction"
    COMMITTING = "being committed"
    ABORTING = "being aborted"
    FAILED = "to be aborted"
    FATAL = "ended for good"


class Next(enum.Enum):
    """What follows an answer."""

    GO_ON = "go on"  # with what is pending, if there is anything
    AGAIN = "again"  # the same request, after a pause
    SOON = "soon"  # the same: the transaction before is about to end
    ELSEWHERE = "elsewhere"  # the same, once its coordinator was looked for
    FAILED = "failed"  # `check` raises why


@dataclass(frozen=True, slots=True)
class InitProducer:
    """For an id and an epoch; with those of before, for the next epoch of them."""

    producer_id: int = -1
    epoch: int = -1


@dataclass(frozen=True, slots=True)
class AddPartitions:
    """Version 1: these partitions belong to the transaction."""

    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class AddOffsets:
    """Version 1: the offsets of this group belong to the transaction."""

    group_id: str


@dataclass(frozen=True, slots=True)
class GroupMetadata:
    """A member of a consumer group, as the coordinator of the group checks it; made by
    `Consumer.consumer_group_metadata`."""

    group_id: str
    generation: int = -1
    member_id: str = ""
    group_instance_id: str | None = None


@dataclass(frozen=True, slots=True)
class CommitOffsets:
    """The offsets of the next records to read, committed for the group with the transaction.  It
    goes to the coordinator of the group."""

    group: GroupMetadata
    offsets: Mapping[TopicPartition, int]


@dataclass(frozen=True, slots=True)
class EndTransaction:
    """Commit or abort."""

    commit: bool


Request = InitProducer | AddPartitions | AddOffsets | CommitOffsets | EndTransaction


@dataclass(frozen=True, slots=True)
class Answer:
    """Of a request: an error code for each of its parts, and the id and epoch that it gave (-1:
    none)."""

    codes: tuple[int, ...] = (0,)
    producer_id: int = -1
    epoch: int = -1
    detail: str = ""


_ELSEWHERE = (ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE)
_FENCED = (ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.PRODUCER_FENCED)
# The coordinator has forgotten the id, and takes no end of the transaction either.
_FORGOTTEN = (ErrorCode.UNKNOWN_PRODUCER_ID, ErrorCode.INVALID_PRODUCER_ID_MAPPING)
# An abort helps, whatever they answer.
_ABORTABLE = (
    ErrorCode.TRANSACTION_ABORTABLE,
    ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    ErrorCode.GROUP_AUTHORIZATION_FAILED,
    ErrorCode.OPERATION_NOT_ATTEMPTED,
    ErrorCode.FENCED_INSTANCE_ID,
    ErrorCode.UNKNOWN_MEMBER_ID,
    ErrorCode.ILLEGAL_GENERATION,
    ErrorCode.STALE_MEMBER_EPOCH,
)
# Of a batch: no abort helps.
_FATAL_FOR_BATCH = (
    ErrorCode.PRODUCER_FENCED,
    ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
    ErrorCode.UNSUPPORTED_VERSION,
)


@dataclass
class Transaction:
    """See the module.  `can_renew`: the coordinator gives a new epoch to whoever names the old one
    (Kafka 2.5 and later)."""

    transactional_id: str
    version: int = 1
    can_renew: bool = True
    phase: Phase = Phase.NEW
    producer_id: int = -1
    epoch: int = -1
    number: int = 0  # of transactions that were begun
    error: KdirectError | None = None  # FAILED, FATAL: why
    partitions: set[TopicPartition] = field(default_factory=set)  # of the open transaction
    _adding: list[TopicPartition] = field(default_factory=list)
    _groups: set[str] = field(default_factory=set)  # that were added
    _offsets: CommitOffsets | None = None
    _started: bool = False  # the coordinator knows of this transaction
    _doubt: bool = False  # version 1: it may know of it, or hear of it late
    _renew: bool = False  # version 1: the next transaction needs a new epoch
    _forgotten: bool = False  # there is no transaction to be ended

    # -- calls -------------------------------------------------------------------------------------

    def initialize(self) -> None:
        """Get a producer id, and end what an earlier producer of this transactional id has left."""
        if self.phase is not Phase.INITIALIZING:  # else a call before was too short
            self._require("init_transactions", Phase.NEW)
            self.phase = Phase.INITIALIZING

    def begin(self) -> None:
        """Open a transaction.  Nothing is sent."""
        self._require("begin_transaction", Phase.READY)
        self.phase = Phase.OPEN
        self.number += 1

    def write(self, partitions: Iterable[TopicPartition]) -> None:
        """Records go to these partitions in this transaction.  With version 1 a request to add new
        ones is pending then."""
        self.check_open()
        new = [tp for tp in partitions if tp not in self.partitions and tp not in self._adding]
        if self.version >= 2:
            self.partitions.update(new)
            self._started = self._started or bool(new)
        else:
            self._adding.extend(new)

    def send_offsets(self, group: GroupMetadata, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit these offsets with the transaction."""
        self.check_open()
        self._offsets = CommitOffsets(group, dict(offsets))
        self._started = self._started or self.version >= 2

    def commit(self) -> None:
        """End the transaction; its records were acknowledged, all of them."""
        if self.phase is not Phase.COMMITTING:
            self.check_open("commit_transaction")
            self.phase = Phase.COMMITTING
            self._end_of_nothing()

    def abort(self) -> None:
        """End the transaction; nothing of it is on its way any more."""
        if self.phase is not Phase.ABORTING:
            self._require("abort_transaction", Phase.OPEN, Phase.FAILED)
            self.phase = Phase.ABORTING
            self._adding.clear()
            self._offsets = None
            if self._forgotten:
                self._ended()
            else:
                self._end_of_nothing()

    def _end_of_nothing(self) -> None:
        if not (self._started or self._doubt or self._adding or self._offsets):
            self._ended()

    def check_abortable(self) -> None:
        """Raises unless there is a transaction that may be aborted."""
        self._require("abort_transaction", Phase.OPEN, Phase.FAILED)

    def failed(self, error: KdirectError, code: int = -1) -> None:
        """A batch of the transaction failed for good, with this error code if a broker refused
        it."""
        if self.phase in (Phase.OPEN, Phase.COMMITTING, Phase.FAILED):
            self._renew = True
            if code in _FATAL_FOR_BATCH:
                self._die(code, error)
            elif self.phase is not Phase.FAILED:
                self._fail(error)
        elif self.phase is Phase.ABORTING:
            self._renew = True

    def check_open(self, call: str = "produce") -> None:
        """Raises unless a transaction is open."""
        self._require(call, Phase.OPEN)

    def check(self) -> None:
        """Raises the error that the producer is in."""
        if self.phase in (Phase.FAILED, Phase.FATAL):
            assert self.error is not None
            raise self._as_raised()

    def _as_raised(self) -> KdirectError:
        # A new object each time: one that is raised twice would carry two tracebacks.
        assert self.error is not None
        fresh = type(self.error)(self.error.message, hint=self.error.hint)
        fresh.fatal = self.error.fatal
        fresh.__cause__ = self.error.__cause__
        return fresh

    def _require(self, call: str, *phases: Phase) -> None:
        if self.phase in phases:
            return
        self.check()
        hints = {
            Phase.NEW: "call init_transactions first",
            Phase.INITIALIZING: "call init_transactions until it returns",
            Phase.READY: "call begin_transaction first",
            Phase.COMMITTING: "call commit_transaction until it returns",
            Phase.ABORTING: "call abort_transaction until it returns",
        }
        raise TransactionError(
            f"{call}: the producer of {self.transactional_id!r} is {self.phase.value}",
            hint=hints.get(self.phase, "commit or abort the transaction first"),
        )

    # -- requests ----------------------------------------------------------------------------------

    @property
    def pending(self) -> Request | None:
        """What is to be sent now; None: the goal of the last call is reached."""
        match self.phase:
            case Phase.INITIALIZING if self.producer_id < 0 or not self.can_renew:
                return InitProducer()
            case Phase.INITIALIZING:
                return InitProducer(self.producer_id, self.epoch)
            case Phase.OPEN | Phase.COMMITTING if self._adding:
                return AddPartitions(tuple(self._adding))
            case Phase.OPEN | Phase.COMMITTING if self._offsets is not None:
                group = self._offsets.group.group_id
                if self.version < 2 and group not in self._groups:
                    return AddOffsets(group)
                return self._offsets
            case Phase.COMMITTING:
                return EndTransaction(True)
            case Phase.ABORTING:
                return EndTransaction(False)
        return None

    def lost(self, request: Request) -> None:
        """Nobody knows whether `request` has arrived; it is sent again, or given up with the
        call."""
        if not isinstance(request, InitProducer) and self.version < 2:
            self._renew = True  # it may act late, on the transaction after this one
            self._doubt = self._doubt or isinstance(request, AddPartitions | AddOffsets)

    def answered(self, request: Request, answer: Answer) -> Next:
        """The answer to `request`, which was pending when it was sent."""
        if type(request) is not type(self.pending):
            return Next.GO_ON  # the transaction has failed meanwhile
        worst = next((code for code in answer.codes if code), 0)
        if not worst:
            self._succeeded(request, answer)
            return Next.GO_ON
        if any(code in _ELSEWHERE for code in answer.codes):
            return Next.ELSEWHERE
        if ErrorCode.CONCURRENT_TRANSACTIONS in answer.codes:
            return Next.SOON
        if isinstance(request, EndTransaction) and self._had_nothing_to_end(request, worst):
            self._ended()
            return Next.GO_ON
        # A part that was not attempted says nothing of the reason.
        reasons = [c for c in answer.codes if c and c != ErrorCode.OPERATION_NOT_ATTEMPTED]
        code = next((c for c in reasons if not _may_pass(c)), 0)
        if not code and reasons:
            return Next.ELSEWHERE if isinstance(request, CommitOffsets) else Next.AGAIN
        self._refused(request, code or worst, answer.detail)
        return Next.FAILED

    def _had_nothing_to_end(self, request: EndTransaction, code: int) -> bool:
        """The request that would have begun the transaction at the coordinator never arrived."""
        nothing = self._doubt and not self._started and code == ErrorCode.INVALID_TXN_STATE
        return nothing and not request.commit

    def _succeeded(self, request: Request, answer: Answer) -> None:
        match request:
            case InitProducer():
                self.producer_id, self.epoch = answer.producer_id, answer.epoch
                self._forget_transaction()
                self.phase = Phase.READY
            case AddPartitions(partitions):
                self.partitions.update(partitions)
                self._adding = [tp for tp in self._adding if tp not in self.partitions]
                self._started = True
            case AddOffsets(group_id):
                self._groups.add(group_id)
                self._started = True
            case CommitOffsets():
                self._offsets = None
                self._started = True
            case EndTransaction():
                if answer.producer_id >= 0:
                    self.producer_id, self.epoch = answer.producer_id, answer.epoch
                    self._renew = False
                self._ended()

    def _ended(self) -> None:
        """The transaction is over."""
        # With version 2 every end that was asked for has brought a new epoch.  What failed before
        # anybody was told of the transaction had no record.
        renew = self._renew or self._forgotten
        self._forget_transaction()
        if renew and not self.can_renew:
            self._die(ErrorCode.UNSUPPORTED_VERSION, None)
        else:
            self.phase = Phase.INITIALIZING if renew else Phase.READY

    def _forget_transaction(self) -> None:
        self.partitions = set()
        self._adding = []
        self._groups = set()
        self._offsets = None
        self.error = None
        self._started = self._doubt = self._renew = self._forgotten = False

    def _refused(self, request: Request, code: int, detail: str) -> None:
        cause = _error(request, self.transactional_id, code, detail)
        if code in _FORGOTTEN and not isinstance(request, InitProducer) and self.can_renew:
            self._forgotten = True
            if self.phase is Phase.ABORTING:
                self.phase = Phase.FAILED
            self._fail(cause)
        elif code in _FENCED or not self._is_abortable(request, code):
            self._die(code, cause)
        else:
            self._adding.clear()
            self._offsets = None
            self._fail(cause)

    def _is_abortable(self, request: Request, code: int) -> bool:
        if isinstance(request, InitProducer):
            return False
        if isinstance(request, AddPartitions):
            return code not in (
                ErrorCode.INVALID_TXN_STATE,
                ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
            )
        return code in _ABORTABLE and self.phase is not Phase.ABORTING

    def _fail(self, cause: KdirectError) -> None:
        self.phase = Phase.FAILED
        self.error = TransactionAbortableError(
            f"the transaction of {self.transactional_id!r} failed: {cause.message}",
            hint="call abort_transaction, and begin again",
        )
        self.error.__cause__ = cause

    def _die(self, code: int, cause: KdirectError | None) -> None:
        self.phase = Phase.FATAL
        if code in _FENCED:
            self.error = ProducerFencedError(
                f"another producer with the transactional.id {self.transactional_id!r} has taken"
                " over, or the transaction took longer than transaction.timeout.ms",
                hint="close this producer",
            )
        else:
            what = error_kind(code).description if cause is None else cause.message
            self.error = TransactionError(
                f"the producer of {self.transactional_id!r} cannot go on: {what}",
                hint="close this producer, and make another",
            )
            self.error.fatal = True
        self.error.__cause__ = cause


def _may_pass(code: int) -> bool:
    # Of a topic that was just created, a broker may not have heard yet.
    return bool(error_kind(code).retriable) or code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def _error(request: Request, transactional_id: str, code: int, detail: str) -> KdirectError:
    what = {
        InitProducer: "a producer id",
        AddPartitions: "new partitions of the transaction",
        AddOffsets: "offsets of a group",
        CommitOffsets: "offsets of a group",
        EndTransaction: "the end of the transaction",
    }[type(request)]
    kind = error_kind(code)
    text = detail or kind.description.rstrip(".")
    return TransactionError(f"{what} for {transactional_id!r}: {text} ({kind.name})")
