"""Writes that are exactly once: which attempts of a job's tasks count.  Decisions only.

Law of the room: a pure machine beside `kdirect.broker.transactions`, over the same entries.  No
clock, no log, no sockets.  Whoever drives it (`kdirect.broker.attempt_coordinator`) appends what a
`WriteMany` says as one record batch, which is in the log whole or not at all, and tells `written`
or `failed`; has the markers written; and tells `complete`.

An *identity* is what writes: a streaming query, or a batch job.  It has one *run* at a time, which
writes one *batch* after another.  A batch is written by *attempts*: each has a plain transaction of
its own, with a transactional id (a *slot* of the identity), a producer id and an epoch that are
handed out here.  An attempt never ends its transaction.  The commit of the batch does, for all::

    join ----> EMPTY --- first record ---> ONGOING ---- commit names it ----> PREPARE_COMMIT --,
                 \\                            \\                                                |
                  '------ commit, abort, ------'------> PREPARE_ABORT --- markers ---> COMPLETE_*
                         a new run, timeout                                  the slot is free

- **The record batch decides.**  A commit is one record batch: PREPARE_COMMIT of the attempts that
  it names, PREPARE_ABORT of all others that are open, and the identity's own record with the batch.
  So after any crash either all of it is known or nothing.  From there it goes one way.
- **Each batch once.**  What is not above the last committed batch of its query is answered with
  "committed", and changes nothing.
- **One run.**  The first join of a run that was not there before makes it the present one: what the
  run before has open is aborted.  A former run is refused from then on.
- **Seen when it is answered.**  A commit waits for the markers of what was aborted before in the
  partitions that it has written: readers would not get past its transactions there, and see the
  batch in other partitions.  What is open elsewhere does not matter.
- **All that it names, or nothing.**  An attempt that is not open with this id and epoch (it took
  too long, or is none) refuses the commit.
- **Nothing comes late.**  Each end raises the epoch of its transaction by one that nobody is given,
  so records of an attempt that come after it are refused wherever they come.
- **What was tried is decided.**  Where nobody knows whether a `WriteMany` is in the log, it is
  appended again until it is known to be; all it is about stays pending, and is CONCURRENT until
  then.  Else one of its records could be overtaken, and the rest count without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from kdirect.broker.transactions import (
    LAST_EPOCH,
    Entry,
    Markers,
    NeedsId,
    Reply,
    Transactions,
    Write,
)
from kdirect.format.attempt_records import NO_BATCH, AttemptTag, IdentityRecord
from kdirect.format.error_codes import ErrorCode
from kdirect.format.transaction_records import (
    NO_EPOCH,
    NO_PRODUCER_ID,
    State,
    TransactionRecord,
)

_OPEN = (State.EMPTY, State.ONGOING)
_FREE = (State.COMPLETE_COMMIT, State.COMPLETE_ABORT)
_NOTHING = Reply(ErrorCode.NONE)


class Job(NamedTuple):
    """Who asks: an identity, and its query and run."""

    identity: str
    query: str
    run: str


class Named(NamedTuple):
    """An attempt as it was handed out."""

    transactional_id: str
    producer_id: int
    epoch: int


class AttemptReply(NamedTuple):
    """The answer to a request: an error code and what it means.  Of a join `attempt`, unless the
    batch is `committed` already.  PRODUCER_FENCED: another run is the present one;
    INVALID_TXN_STATE: an attempt is not open; CONCURRENT_TRANSACTIONS: ask again."""

    code: int = ErrorCode.NONE
    message: str = ""
    attempt: Named | None = None
    committed: bool = False


class WriteMany(NamedTuple):
    """Records to be appended as one record batch; then `written` or `failed` is told.  `identity`
    has the record `record`, of the time `at_ms`, from now on; None: it is left as it is.  `reply`
    is the answer once it counts; where it `waits`, once all markers that follow are there, too."""

    identity: str
    record: IdentityRecord | None
    writes: tuple[Write, ...]
    reply: AttemptReply
    at_ms: int
    waits: bool

    @property
    def is_decision(self) -> bool:
        """Does it have to be appended until it is known to be in the log?"""
        return self.record is not None or len(self.writes) > 1


AttemptDecision: TypeAlias = AttemptReply | WriteMany | NeedsId
_CONCURRENT = AttemptReply(ErrorCode.CONCURRENT_TRANSACTIONS)


@dataclass(slots=True)
class _Identity:
    """`record` is None until its first one is in the log.  `names`: the ids of its attempts, as far
    as they were seen.  `slots`: how many slots have had their id looked for, which takes some fifty
    hashes for each.  `free`: ids that the next attempts may have, the one that was used last at the
    end; each is looked at again before it is handed out.  `committing`: attempts of commits whose
    markers may not be everywhere.  `forgetting`: a tombstone is under way.

    With `free` and `committing` a join looks at none of the attempts that are open."""

    record: IdentityRecord | None = None
    updated_ms: int = -1
    pending: WriteMany | None = None
    forgetting: bool = False
    names: set[str] = field(default_factory=set)
    slots: int = 0
    free: dict[str, None] = field(default_factory=dict)
    committing: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Attempts:
    """See the module.  `name_of(identity, slot)`: the transactional id of a slot."""

    transactions: Transactions
    name_of: Callable[[str, int], str]
    identities: dict[str, _Identity] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.transactions.told_free = self._is_free_again

    # -- requests ----------------------------------------------------------------------------------

    def join(
        self,
        job: Job,
        batch: int,
        timeout_ms: int,
        owner: str,
        now_ms: int,
        new_id: int | None = None,
    ) -> AttemptDecision:
        """An attempt of the batch begins."""
        found = self._identity(job.identity)
        if refused := self._refused(found, job):
            return refused
        record, is_new_run = found.record, found.record is None or found.record.run != job.run
        if self._is_committing(found) or (is_new_run and self._is_busy(found)):
            return _CONCURRENT
        committed = record is not None and batch <= record.last_batch(job.query)
        if committed and not is_new_run:
            return AttemptReply(committed=True)
        if is_new_run and (older := _begins_too_early(record, job, batch)):
            return older
        if is_new_run and record is not None:
            record = record.began(job.run, job.query, owner)
        elif is_new_run:
            record = IdentityRecord(job.run, job.query, owner)
        ends: list[Write] = []
        if committed:
            ends = self._ends(found, (), now_ms)
            return self._write(job, record, ends, AttemptReply(committed=True), now_ms)
        tag = AttemptTag(job.identity, job.query, job.run, batch, owner)
        # The attempts that are about to be aborted keep their slots.
        begun = self._begin(found, tag, timeout_ms, now_ms, new_id)
        if isinstance(begun, NeedsId):
            return begun
        name, fresh = begun
        if is_new_run:
            ends = self._ends(found, (), now_ms)
        write = self.transactions.change(name, fresh, _NOTHING)
        reply = AttemptReply(attempt=Named(name, fresh.producer_id, fresh.epoch))
        return self._write(job, record if is_new_run else None, [*ends, write], reply, now_ms)

    def commit(
        self, job: Job, batch: int, named: Iterable[Named], now_ms: int, owner: str = ""
    ) -> AttemptDecision:
        """The batch has these attempts, and no others."""
        found = self._identity(job.identity)
        if refused := self._refused(found, job):
            return refused
        if self._is_committing(found):
            return _CONCURRENT
        record, wanted = found.record, dict.fromkeys(named)
        is_new_run = record is None or record.run != job.run
        committed = record is not None and batch <= record.last_batch(job.query)
        if committed and not is_new_run:
            return AttemptReply(committed=True)
        if is_new_run and (older := _begins_too_early(record, job, batch)):
            return older
        if self._is_busy(found):
            return _CONCURRENT
        if is_new_run:
            began = record and record.began(job.run, job.query, owner)
            record = began or IdentityRecord(job.run, job.query, owner)
        if committed:
            ends = self._ends(found, (), now_ms)
            return self._write(job, record, ends, AttemptReply(committed=True), now_ms)
        for one in wanted:
            if why := self._not_open(one, job, batch):
                return AttemptReply(ErrorCode.INVALID_TXN_STATE, why)
        if self._is_held_back(found, wanted):
            return _CONCURRENT
        assert record is not None
        ends = self._ends(found, {one.transactional_id for one in wanted}, now_ms)
        record = record.committed(job.query, batch)
        return self._write(job, record, ends, AttemptReply(), now_ms, waits=True)

    def abort(self, job: Job, now_ms: int) -> AttemptDecision:
        """Whatever the run has open is given up."""
        found = self._identity(job.identity)
        if refused := self._refused(found, job):
            return refused
        if found.record is None or found.record.run != job.run:
            return AttemptReply()  # a run that has joined nothing
        if self._is_committing(found) or self._is_busy(found):
            return _CONCURRENT
        ends = self._ends(found, (), now_ms)
        if not ends:
            return AttemptReply()
        return self._write(job, None, ends, AttemptReply(), now_ms, waits=True)

    def check(self, job: Job, batch: int, named: Named) -> AttemptReply:
        """Is an attempt open, and if not, why?  Changes nothing."""
        found = self._identity(job.identity)
        if refused := self._refused(found, job):
            return refused
        if found.record is not None and batch <= found.record.last_batch(job.query):
            return AttemptReply(committed=True)
        why = self._not_open(named, job, batch)
        return AttemptReply(ErrorCode.INVALID_TXN_STATE, why) if why else AttemptReply()

    # -- the log -----------------------------------------------------------------------------------

    def written(self, many: WriteMany) -> list[Markers]:
        """All of it is in the log, and counts.  The markers that follow, which end as one."""
        found = self.identities.get(many.identity)
        if found is not None and found.pending is many:
            found.pending = None
            if many.record is not None:
                found.record, found.updated_ms = many.record, many.at_ms
        told = [self.transactions.written(write) for write in many.writes]
        group = [markers for markers in told if markers is not None]
        if found is not None:
            found.committing += [markers.transactional_id for markers in group if markers.commit]
        return group

    def failed(self, many: WriteMany) -> None:
        """None of it is in the log; or, where it is no decision, nobody knows."""
        found = self.identities.get(many.identity)
        if found is not None and found.pending is many:
            found.pending = None
        for write in many.writes:
            self.transactions.failed(write)
        if found is not None:  # a first record that is not there leaves an id that nobody has
            found.free.update(dict.fromkeys(write.transactional_id for write in many.writes))
        if found is not None and found.record is None and found.pending is None:
            del self.identities[many.identity]

    def complete(self, group: Sequence[Markers], now_ms: int) -> list[Write]:
        """All partitions have the markers of a group: records to be appended as one batch."""
        made = (self.transactions.complete(markers, now_ms) for markers in group)
        return [write for write in made if write is not None]

    def install(self, name: str, record: TransactionRecord) -> Markers | None:
        """What was read from the log, as `Transactions.install`."""
        if record.identity is not None:
            found = self.identities.setdefault(name, _Identity())
            found.record, found.updated_ms = record.identity, record.updated_ms
            return None
        markers = self.transactions.install(name, record)
        if record.attempt is not None:
            found = self.identities.setdefault(record.attempt.identity, _Identity())
            found.names.add(name)
            found.slots = len(found.names)  # so many of the first ones, in most cases
            if record.state in _FREE:
                found.free[name] = None
            elif record.state is State.PREPARE_COMMIT:
                found.committing.append(name)
        return markers

    def give_up(self, is_gone: Callable[[str], bool]) -> None:
        """Another broker coordinates these ids."""
        for name in [name for name in self.identities if is_gone(name)]:
            del self.identities[name]
        self.transactions.give_up(is_gone)

    # -- time --------------------------------------------------------------------------------------

    def expired(self, now_ms: int, expiration_ms: int) -> list[str]:
        """Identities that nobody has used for so long are to be forgotten; then `forgotten` is
        told.  Nobody may use them until then."""
        self._forget_names()
        old = [
            name
            for name, found in self.identities.items()
            if found.record is not None
            and found.pending is None
            and not found.forgetting
            and found.updated_ms <= now_ms - expiration_ms
            and not self._is_busy(found)
            and all(self._state(id_) in (None, *_FREE) for id_ in found.names)
        ]
        for name in old:
            self.identities[name].forgetting = True
        return old

    def _forget_names(self) -> None:
        """Forget the ids of attempts that the machine of transactions has forgotten."""
        entries = self.transactions.entries
        for identity, found in list(self.identities.items()):
            found.names = {name for name in found.names if name in entries}
            if not found.names:
                found.slots = 0
                found.free.clear()
                if found.record is None and found.pending is None:
                    del self.identities[identity]  # of which only attempts were left

    def forgotten(self, name: str, ok: bool) -> None:
        """The tombstone of an identity is in the log, or nobody knows."""
        found = self.identities.get(name)
        if found is not None:
            found.forgetting = False
            if ok:
                del self.identities[name]

    # -- looks -------------------------------------------------------------------------------------

    def is_identity(self, name: str) -> bool:
        """Is it the name of an identity, and so no producer's transactional id?"""
        found = self.identities.get(name)
        return found is not None and (found.record is not None or found.pending is not None)

    def run_of(self, identity: str) -> str | None:
        """The present run of an identity."""
        record = self._identity(identity).record
        return None if record is None else record.run

    def attempts(self, identity: str) -> Iterator[tuple[str, TransactionRecord]]:
        """The transactional ids that attempts of an identity have or had, with their records."""
        found = self.identities.get(identity)
        for name in sorted(found.names) if found is not None else ():
            entry = self.transactions.entries.get(name)
            record = entry.record if entry is not None else None
            if record is None or record.attempt is None or record.attempt.identity != identity:
                continue  # its id was forgotten, or taken by a producer
            yield name, record

    # -- within ------------------------------------------------------------------------------------

    def _identity(self, name: str) -> _Identity:
        return self.identities.get(name) or _Identity()

    def _refused(self, found: _Identity, job: Job) -> AttemptReply | None:
        """Why nothing may be decided for this run now, if so."""
        if found.pending is not None or found.forgetting:
            return _CONCURRENT
        if found.record is None:
            entry = self.transactions.entries.get(job.identity)
            if entry is not None:
                what = f"{job.identity!r} is the transactional.id of a producer"
                return AttemptReply(ErrorCode.INVALID_REQUEST, what)
        elif job.run in found.record.former:
            now = found.record
            return AttemptReply(
                ErrorCode.PRODUCER_FENCED,
                f"run {job.run} of query {job.query} writes no more as {job.identity!r}: since then"
                f" run {now.run} of query {now.query} ({now.owner}) has begun",
            )
        return None

    def _is_committing(self, found: _Identity) -> bool:
        """Has the last commit its markers not everywhere yet?"""
        while found.committing:
            if self._state(found.committing[-1]) is State.PREPARE_COMMIT:
                return True
            found.committing.pop()
        return False

    def _is_busy(self, found: _Identity) -> bool:
        """Is a change of an attempt under way?"""
        entries = self.transactions.entries
        return any(name in entries and entries[name].pending is not None for name in found.names)

    def _is_held_back(self, found: _Identity, wanted: Iterable[Named]) -> bool:
        """Has a partition of these attempts no marker yet of one that was aborted?"""
        written = [self.transactions.entries[one.transactional_id].record for one in wanted]
        partitions = frozenset().union(*(record.partitions for record in written if record))
        for name in found.names:
            entry = self.transactions.entries.get(name)
            record = None if entry is None else entry.record
            if record is not None and record.state is State.PREPARE_ABORT:
                if not partitions.isdisjoint(record.partitions):
                    return True
        return False

    def _state(self, name: str) -> State | None:
        entry = self.transactions.entries.get(name)
        return None if entry is None or entry.record is None else entry.record.state

    def _not_open(self, one: Named, job: Job, batch: int) -> str:
        """Why an attempt cannot be committed; "": it can."""
        entry = self.transactions.entries.get(one.transactional_id)
        record = None if entry is None else entry.record
        tag = None if record is None else record.attempt
        what = f"attempt {one.transactional_id} (producer {one.producer_id}, epoch {one.epoch})"
        if record is None or tag is None or tag.identity != job.identity:
            return f"{what} is not known"
        if (record.producer_id, record.epoch) != (one.producer_id, one.epoch):
            return f"{what} has ended: it was aborted, or took longer than its timeout"
        if (tag.query, tag.run, tag.batch) != (job.query, job.run, batch):
            return f"{what} belongs to batch {tag.batch} of query {tag.query}, run {tag.run}"
        return "" if record.state in _OPEN else f"{what} has ended"

    def _begin(
        self, found: _Identity, tag: AttemptTag, timeout_ms: int, now_ms: int, new_id: int | None
    ) -> tuple[str, TransactionRecord] | NeedsId:
        """A slot that is free, and its record."""
        while True:
            if not found.free:
                found.free[self.name_of(tag.identity, found.slots)] = None
                found.slots += 1
            name = next(reversed(found.free))
            entry = self.transactions.entries.get(name)
            if name not in self.identities and (entry is None or _is_free(entry)):
                break
            del found.free[name]
        old = None if entry is None else entry.record
        fresh = TransactionRecord(
            NO_PRODUCER_ID, 0, timeout_ms, State.EMPTY, updated_ms=now_ms, attempt=tag
        )
        if old is not None and old.epoch < LAST_EPOCH:
            fresh = fresh._replace(producer_id=old.producer_id, epoch=old.epoch + 1)
        elif new_id is None:
            return NeedsId()
        else:
            before = NO_PRODUCER_ID if old is None else old.producer_id
            fresh = fresh._replace(producer_id=new_id, previous_id=before)
        del found.free[name]
        return name, fresh

    def _is_free_again(self, name: str, tag: AttemptTag) -> None:
        """The transaction of an attempt is complete, or forgotten: its id is the next one's."""
        found = self.identities.get(tag.identity)
        if found is not None:
            found.free[name] = None

    def _ends(self, found: _Identity, committed: Iterable[str], now_ms: int) -> list[Write]:
        """The end of everything that is open."""
        wanted, out = set(committed), []
        for name in sorted(found.names):
            entry = self.transactions.entries.get(name)
            record = None if entry is None else entry.record
            if record is None or record.attempt is None or record.state not in _OPEN:
                continue
            # The epoch above is nobody's: what comes late of the attempt is refused, and is not
            # taken for a repeated end of its transaction.
            ended = record._replace(
                epoch=min(record.epoch, LAST_EPOCH) + 1,
                last_epoch=NO_EPOCH,
                state=State.PREPARE_COMMIT if name in wanted else State.PREPARE_ABORT,
                updated_ms=now_ms,
                version=0,
            )
            out.append(self.transactions.change(name, ended, _NOTHING))
        return out

    def _write(
        self,
        job: Job,
        record: IdentityRecord | None,
        writes: list[Write],
        reply: AttemptReply,
        now_ms: int,
        *,
        waits: bool = False,
    ) -> WriteMany:
        many = WriteMany(job.identity, record, tuple(writes), reply, now_ms, waits)
        found = self.identities.setdefault(job.identity, _Identity())
        if record is not None:
            found.pending = many
        found.names.update(write.transactional_id for write in writes)
        return many


def _begins_too_early(record: IdentityRecord | None, job: Job, batch: int) -> AttemptReply | None:
    """The refusal of a run that begins before the last committed batch.  A query that starts again
    repeats that batch at most.  Of one whose checkpoint is older, the numbers are those of batches
    that were committed with other rows, and nobody would notice that its own are never written."""
    last = NO_BATCH if record is None else record.last_batch(job.query)
    if batch >= last:
        return None
    return AttemptReply(
        ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
        f"run {job.run} of query {job.query} begins with batch {batch}, though {last} is committed:"
        " its checkpoint is older than what was written with it",
    )


def _is_free(entry: Entry) -> bool:
    """May another attempt have the id of this entry?  Not where a producer has taken it."""
    record = entry.record
    return (
        entry.pending is None
        and record is not None
        and record.state in _FREE
        and record.attempt is not None
    )
