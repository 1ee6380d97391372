"""The transactions that a broker coordinates.  Decisions only.

Law of the room: a pure machine.  No clock, no log, no sockets: times are passed in, and whoever
drives it (`kdirect.broker.transaction_coordinator`) appends what a `Write` says, tells `written` or
`failed`, has markers written, and tells `complete`.

One transactional id, as its record says (`kdirect.format.transaction_records`)::

    EMPTY --- add ---> ONGOING --- end ---> PREPARE_COMMIT --- markers ---> COMPLETE_COMMIT
      ^                   |  \\                                                   |
      |                   |   --- end, fence ---> PREPARE_ABORT --- markers ---> COMPLETE_ABORT
      |                   v                                                      |
      +---- init ---- (CONCURRENT_TRANSACTIONS)            init, add ------------+

- **The record decides.**  A transaction is committed when PREPARE_COMMIT is in the log, and aborted
  when PREPARE_ABORT is.  From there it goes one way: markers are written until all partitions have
  them, by the next coordinator if this one ends.
- **One change at a time.**  While a write is under way (`Entry.pending`), other requests about the
  id are answered with CONCURRENT_TRANSACTIONS, which clients retry.
- **Fencing.**  InitProducerId gives a higher epoch.  In the middle of a transaction it aborts it
  with an epoch that nobody is given (Kafka's PrepareEpochFence), and its sender asks again.  A
  transaction that takes too long is aborted in this way, too.
- **Two protocols (KIP-890).**  With the first one an epoch lasts until the next InitProducerId.
  With the second one (`version` 2) each end of a transaction raises the epoch, so a late request of
  the transaction before is told from one of the next; what the client retries has the epoch before.
  When the epochs of a producer id are used up, the next one begins with a new id.

Codes are Kafka's newest; what older versions of a request are told instead is the handlers' affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from kdirect.format.attempt_records import AttemptTag
from kdirect.format.error_codes import ErrorCode
from kdirect.format.transaction_records import (
    NO_EPOCH,
    NO_PRODUCER_ID,
    State,
    TransactionRecord,
)
from kdirect.model import TopicPartition

EPOCH_BUMPS = 2  # the transaction version whose clients have a new epoch for each transaction
LAST_EPOCH = 0x7FFE  # the highest that a producer is given; one more is for a fence, and nobody's
# How long an id of an attempt (`kdirect.broker.attempts`) is remembered after the time that it may
# take: each batch job has ids of its own, which nobody uses again.
ATTEMPT_EXPIRATION_MS = 3_600_000
_PREPARED = (State.PREPARE_COMMIT, State.PREPARE_ABORT)
_AT_REST = (State.EMPTY, State.COMPLETE_COMMIT, State.COMPLETE_ABORT)


class Reply(NamedTuple):
    """The answer to a request: an error code; with NONE the producer's id and epoch."""

    code: int
    producer_id: int = NO_PRODUCER_ID
    epoch: int = NO_EPOCH


class Write(NamedTuple):
    """A record to be appended, None: a tombstone; then `written` or `failed` is told.  `reply` is
    the answer once it is committed."""

    transactional_id: str
    record: TransactionRecord | None
    reply: Reply


class Markers(NamedTuple):
    """Markers that end a transaction in each of `partitions`; then `complete` is told."""

    transactional_id: str
    producer_id: int
    epoch: int
    commit: bool
    partitions: frozenset[TopicPartition]


class NeedsId(NamedTuple):
    """The decision needs a new producer id: ask once more with one."""


Decision: TypeAlias = Reply | Write | NeedsId


@dataclass(slots=True)
class Entry:
    """One transactional id.  `record` is None until its first one is in the log."""

    record: TransactionRecord | None = None
    pending: Write | None = None


@dataclass(slots=True)
class Transactions:
    """See the module.  `told_free(transactional id, tag)`: that of an attempt has ended, or was
    forgotten."""

    entries: dict[str, Entry] = field(default_factory=dict)
    told_free: Callable[[str, AttemptTag], None] = lambda name, tag: None

    # -- InitProducerId ----------------------------------------------------------------------------

    def init(
        self,
        name: str,
        timeout_ms: int,
        expected: tuple[int, int] | None,
        now_ms: int,
        new_id: int | None = None,
    ) -> Decision:
        """A producer begins.  `expected`: the (producer id, epoch) that it believes to have, where
        it goes on after an error."""
        entry = self.entries.get(name)
        if entry is None or entry.record is None:
            if entry is not None and entry.pending is not None:
                return Reply(ErrorCode.CONCURRENT_TRANSACTIONS)
            if new_id is None:
                return NeedsId()
            record = TransactionRecord(new_id, 0, timeout_ms, State.EMPTY, updated_ms=now_ms)
            return self._write(name, record, Reply(ErrorCode.NONE, new_id, 0))
        old = entry.record
        if entry.pending is not None:
            return Reply(ErrorCode.CONCURRENT_TRANSACTIONS)
        if expected is not None and not _may_be(old, *expected):
            return Reply(ErrorCode.PRODUCER_FENCED)
        if old.state in _PREPARED:
            return Reply(ErrorCode.CONCURRENT_TRANSACTIONS)
        if old.state is State.ONGOING:
            # Kafka fences here whatever the epoch; one that is fenced itself should abort nothing.
            if expected is not None and expected[1] != old.epoch:
                return Reply(ErrorCode.PRODUCER_FENCED)
            return self._fence(name, old, now_ms)
        return self._begin(name, old, timeout_ms, expected, now_ms, new_id)

    def _begin(
        self,
        name: str,
        old: TransactionRecord,
        timeout_ms: int,
        expected: tuple[int, int] | None,
        now_ms: int,
        new_id: int | None,
    ) -> Decision:
        """Nothing is under way: the next epoch, or the next producer id."""
        fresh = TransactionRecord(
            old.producer_id,
            old.epoch + 1,
            timeout_ms,
            State.EMPTY,
            updated_ms=now_ms,
            previous_id=old.previous_id,
        )
        own = expected is not None and expected[1] == old.epoch
        if expected is None or own:
            last = old.epoch if own else NO_EPOCH
            if old.epoch < LAST_EPOCH:
                fresh = fresh._replace(last_epoch=last)
            elif new_id is None:
                return NeedsId()
            else:
                fresh = fresh._replace(
                    producer_id=new_id, epoch=0, last_epoch=last, previous_id=old.producer_id
                )
        elif expected[1] == old.last_epoch and old.last_epoch != NO_EPOCH:
            # Its first call was successful, and the answer was lost.
            fresh = fresh._replace(epoch=old.epoch, last_epoch=old.last_epoch)
        else:
            return Reply(ErrorCode.PRODUCER_FENCED)
        return self._write(name, fresh, Reply(ErrorCode.NONE, fresh.producer_id, fresh.epoch))

    def _fence(self, name: str, old: TransactionRecord, now_ms: int) -> Write:
        """Abort a transaction with an epoch that nobody is given."""
        # Whatever protocol the producer spoke: its requests are to be refused, not to be taken for
        # retries of the end of its transaction.
        fenced = old._replace(
            epoch=min(old.epoch, LAST_EPOCH) + 1,
            last_epoch=NO_EPOCH,
            state=State.PREPARE_ABORT,
            updated_ms=now_ms,
            version=0,
        )
        return self._write(name, fenced, Reply(ErrorCode.CONCURRENT_TRANSACTIONS))

    # -- partitions --------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        producer_id: int,
        epoch: int,
        partitions: Iterable[TopicPartition],
        version: int,
        now_ms: int,
    ) -> Reply | Write:
        """The transaction has records in `partitions` from now on; it begins with the first."""
        if not name:
            return Reply(ErrorCode.INVALID_REQUEST)
        entry, old = self._find(name)
        if old is None or old.producer_id != producer_id:
            return Reply(ErrorCode.INVALID_PRODUCER_ID_MAPPING)
        if old.epoch != epoch or epoch > LAST_EPOCH:
            return Reply(ErrorCode.PRODUCER_FENCED)
        if entry.pending is not None or old.state in _PREPARED:
            return Reply(ErrorCode.CONCURRENT_TRANSACTIONS)
        added = frozenset(partitions)
        if old.state is State.ONGOING and added <= old.partitions:
            return Reply(ErrorCode.NONE)
        begins = old.state is not State.ONGOING
        record = old._replace(
            state=State.ONGOING,
            partitions=old.partitions | added,
            start_ms=now_ms if begins else old.start_ms,
            updated_ms=now_ms,
            version=version,
        )
        return self._write(name, record, Reply(ErrorCode.NONE))

    def verify(
        self, name: str, producer_id: int, epoch: int, partitions: Iterable[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        """Are these partitions in the transaction?  A code for each."""
        _, old = self._find(name)
        wanted = list(partitions)
        code: int | None = None
        if not name:
            code = ErrorCode.INVALID_REQUEST
        elif old is None or old.producer_id != producer_id:
            code = ErrorCode.INVALID_PRODUCER_ID_MAPPING
        elif old.epoch != epoch:
            code = ErrorCode.PRODUCER_FENCED
        elif old.state in _PREPARED:
            code = ErrorCode.CONCURRENT_TRANSACTIONS
        if code is not None or old is None:
            return dict.fromkeys(wanted, code or ErrorCode.NONE)
        return {
            tp: ErrorCode.NONE if tp in old.partitions else ErrorCode.TRANSACTION_ABORTABLE
            for tp in wanted
        }

    # -- the end -----------------------------------------------------------------------------------

    def end(
        self,
        name: str,
        producer_id: int,
        epoch: int,
        commit: bool,
        version: int,
        now_ms: int,
        new_id: int | None = None,
    ) -> Decision:
        """Commit or abort."""
        if not name:
            return Reply(ErrorCode.INVALID_REQUEST)
        entry, old = self._find(name)
        if old is None:
            return Reply(ErrorCode.INVALID_PRODUCER_ID_MAPPING)
        repeated = _is_repeated_end(old, producer_id, epoch)
        if old.producer_id != producer_id and not repeated:
            return Reply(ErrorCode.INVALID_PRODUCER_ID_MAPPING)
        if (epoch != old.epoch or epoch > LAST_EPOCH) and not repeated:
            return Reply(ErrorCode.PRODUCER_FENCED)
        if old.version >= EPOCH_BUMPS and old.state in _PREPARED and not repeated:
            # Of the next transaction, which its producer aborts before this one has its markers.
            return Reply(ErrorCode.CONCURRENT_TRANSACTIONS)
        if entry.pending is not None:
            return Reply(ErrorCode.CONCURRENT_TRANSACTIONS)
        if old.attempt is not None:  # its identity ends it, with others
            return Reply(ErrorCode.INVALID_TXN_STATE)
        if old.state is State.ONGOING:
            return self._prepare(name, old, commit, version, now_ms, new_id)
        if old.state in _PREPARED:
            same = commit == (old.state is State.PREPARE_COMMIT)
            code = ErrorCode.CONCURRENT_TRANSACTIONS if same else ErrorCode.INVALID_TXN_STATE
            return Reply(code)
        if version >= EPOCH_BUMPS and not commit and not repeated:
            # The client cannot know whether its transaction has got as far as here: the abort of
            # one without partitions raises the epoch all the same.
            empty = old._replace(partitions=frozenset(), start_ms=now_ms)
            return self._prepare(name, empty, False, version, now_ms, new_id)
        told = State.COMPLETE_COMMIT if commit else State.COMPLETE_ABORT
        bumped = max(version, old.version) >= EPOCH_BUMPS and not repeated
        if old.state is not told or bumped:
            return Reply(ErrorCode.INVALID_TXN_STATE)
        return Reply(ErrorCode.NONE, old.producer_id, old.epoch)

    def _prepare(
        self,
        name: str,
        old: TransactionRecord,
        commit: bool,
        version: int,
        now_ms: int,
        new_id: int | None,
    ) -> Write | NeedsId:
        record = old._replace(
            state=State.PREPARE_COMMIT if commit else State.PREPARE_ABORT,
            updated_ms=now_ms,
            version=version,
        )
        told = (old.producer_id, old.epoch)
        if version >= EPOCH_BUMPS:
            told = (old.producer_id, old.epoch + 1)
            record = record._replace(epoch=old.epoch + 1, last_epoch=old.epoch)
            if old.epoch >= LAST_EPOCH:
                if new_id is None:
                    return NeedsId()
                told = (new_id, 0)
                record = record._replace(next_id=new_id)
        return self._write(name, record, Reply(ErrorCode.NONE, *told))

    def complete(self, markers: Markers, now_ms: int) -> Write | None:
        """All partitions have their marker.  None: that transaction is another's business now."""
        entry, old = self._find(markers.transactional_id)
        if old is None or entry.pending is not None or _markers(old, markers) != markers:
            return None
        commit = old.state is State.PREPARE_COMMIT
        record = old._replace(
            state=State.COMPLETE_COMMIT if commit else State.COMPLETE_ABORT,
            partitions=frozenset(),
            updated_ms=now_ms,
        )
        if old.next_id != NO_PRODUCER_ID:
            record = record._replace(
                producer_id=old.next_id,
                epoch=0,
                previous_id=old.producer_id,
                next_id=NO_PRODUCER_ID,
            )
        return self._write(markers.transactional_id, record, Reply(ErrorCode.NONE))

    # -- time --------------------------------------------------------------------------------------

    def timed_out(self, now_ms: int) -> list[Write]:
        """Transactions that have taken longer than their producers allowed are to be aborted."""
        late = [
            (name, entry.record)
            for name, entry in self.entries.items()
            if entry.pending is None
            and entry.record is not None
            and entry.record.state is State.ONGOING
            and entry.record.start_ms + entry.record.timeout_ms < now_ms
        ]
        return [self._fence(name, record, now_ms) for name, record in late]

    def expired(self, now_ms: int, expiration_ms: int) -> list[Write]:
        """Transactional ids that nobody has used for so long are to be forgotten."""
        old = [
            name
            for name, entry in self.entries.items()
            if entry.pending is None
            and entry.record is not None
            and entry.record.state in _AT_REST
            and entry.record.updated_ms <= now_ms - _kept_ms(entry.record, expiration_ms)
        ]
        return [self._write(name, None, Reply(ErrorCode.NONE)) for name in old]

    # -- the log -----------------------------------------------------------------------------------

    def _find(self, name: str) -> tuple[Entry, TransactionRecord | None]:
        entry = self.entries.get(name)
        return (entry, entry.record) if entry is not None else (Entry(), None)

    def change(self, name: str, record: TransactionRecord, reply: Reply) -> Write:
        """For `kdirect.broker.attempts`: the record of an entry that has nothing pending."""
        return self._write(name, record, reply)

    def _write(self, name: str, record: TransactionRecord | None, reply: Reply) -> Write:
        write = Write(name, record, reply)
        self.entries.setdefault(name, Entry()).pending = write
        return write

    def written(self, write: Write) -> Markers | None:
        """It is in the log, and counts.  The markers that follow from it."""
        entry = self.entries.get(write.transactional_id)
        if entry is None or entry.pending is not write:
            return None  # given up meanwhile
        if write.record is None:
            del self.entries[write.transactional_id]
            self._tell_free(write.transactional_id, entry.record)
            return None
        entry.record, entry.pending = write.record, None
        self._tell_free(write.transactional_id, write.record)
        return _prepared(write.transactional_id, write.record)

    def failed(self, write: Write) -> None:
        """It may be in the log, or not: nobody was told that it counts."""
        entry = self.entries.get(write.transactional_id)
        if entry is None or entry.pending is not write:
            return
        entry.pending = None
        self._tell_free(write.transactional_id, entry.record)
        if entry.record is None:
            del self.entries[write.transactional_id]

    def _tell_free(self, name: str, record: TransactionRecord | None) -> None:
        if record is not None and record.attempt is not None and record.state in _AT_REST[1:]:
            self.told_free(name, record.attempt)

    def install(self, name: str, record: TransactionRecord) -> Markers | None:
        """What was read from the log, when this broker became the coordinator.  The markers that
        the one before may not have written."""
        self.entries[name] = Entry(record)
        return _prepared(name, record)

    def give_up(self, is_gone: Callable[[str], bool]) -> None:
        """Another broker coordinates these ids."""
        for name in [name for name in self.entries if is_gone(name)]:
            del self.entries[name]


def _kept_ms(record: TransactionRecord, expiration_ms: int) -> int:
    """How long an id is remembered after it was used."""
    if record.attempt is None:
        return expiration_ms
    return min(expiration_ms, record.timeout_ms + ATTEMPT_EXPIRATION_MS)


def _may_be(old: TransactionRecord, producer_id: int, epoch: int) -> bool:
    """May a producer believe to have this id, or have had it when its epochs were used up?"""
    if producer_id == old.producer_id:
        return True
    return producer_id == old.previous_id and epoch >= LAST_EPOCH


def _is_repeated_end(old: TransactionRecord, producer_id: int, epoch: int) -> bool:
    """Is the end of a transaction told once more by a client whose epoch was raised by the first
    time?"""
    if old.version < EPOCH_BUMPS or old.state not in (*_PREPARED, *_AT_REST[1:]):
        return False
    if old.producer_id == producer_id:
        return old.epoch == epoch + 1
    return old.previous_id == producer_id and epoch == LAST_EPOCH and old.epoch == 0


def _prepared(name: str, record: TransactionRecord) -> Markers | None:
    if record.state not in _PREPARED:
        return None
    commit = record.state is State.PREPARE_COMMIT
    return Markers(name, record.producer_id, record.epoch, commit, record.partitions)


def _markers(record: TransactionRecord, like: Markers) -> Markers | None:
    return _prepared(like.transactional_id, record)
