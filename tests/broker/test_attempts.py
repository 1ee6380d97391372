"""The machine of writes that are exactly once: its answers, its records, and seeded schedules.

More schedules: ``make exactly-once-schedules COUNT=... SEED=...``.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from kdirect.broker.attempts import AttemptReply, Attempts, Job, Named, WriteMany
from kdirect.broker.transactions import (
    ATTEMPT_EXPIRATION_MS,
    LAST_EPOCH,
    NeedsId,
    Reply,
    Transactions,
    Write,
)
from kdirect.errors import FormatError
from kdirect.format import attempt_records as records
from kdirect.format.attempt_records import AttemptTag, IdentityRecord, attempt_id
from kdirect.format.batch import check_batch_bytes
from kdirect.format.codec import decode_records
from kdirect.format.error_codes import ErrorCode as E
from kdirect.format.group_records import partition_of
from kdirect.format.plain_batch import encode_records
from kdirect.format.transaction_records import (
    State,
    TransactionRecord,
    parse_transaction_value,
    transaction_value,
)
from kdirect.model import TopicPartition
from tests.broker import attempt_world
from tests.broker.attempt_mistakes import MISTAKES
from tests.broker.attempt_schedules import STEPS, failing
from tests.schedules import found_at

T0 = TopicPartition("t", 0)
SCHEDULES = 60
# Where mistakes were found that show in few schedules.
FOUND_AT = {"commits behind aborts": 6}
PARTITIONS = 50


class Desk:
    """The machine with a log that takes everything at once, and markers that are there at once."""

    def __init__(self) -> None:
        self.machine = Attempts(Transactions(), lambda name, slot: f"{name}-{slot}")
        self.now = 1000
        self.ids = iter(range(7, 1000))
        self.last: WriteMany | None = None

    def _made(self, decide: Any) -> AttemptReply:
        made = decide(None)
        if isinstance(made, NeedsId):
            made = decide(next(self.ids))
        if isinstance(made, AttemptReply):
            return made
        self.last = made
        group = self.machine.written(made)
        for write in self.machine.complete(group, self.now):
            self.machine.transactions.written(write)
        return made.reply

    def join(self, batch: int = 0, run: str = "r", query: str = "q", who: str = "x") -> Any:
        job = Job(who, query, run)
        return self._made(
            lambda new: self.machine.join(job, batch, 1000, f"host of {run}", self.now, new)
        )

    def attempt(self, *which: Any, **more: Any) -> Named:
        reply = self.join(*which, **more)
        assert reply.attempt is not None, reply
        return reply.attempt

    def commit(
        self, named: list[Named], batch: int = 0, run: str = "r", query: str = "q", who: str = "x"
    ) -> AttemptReply:
        job = Job(who, query, run)
        return self._made(lambda _: self.machine.commit(job, batch, named, self.now))

    def add(self, named: Named) -> None:
        made = self.machine.transactions.add(*named, [T0], 2, self.now)
        assert not isinstance(made, Reply)
        self.machine.transactions.written(made)

    def state(self, named: Named) -> State:
        record = self.machine.transactions.entries[named.transactional_id].record
        assert record is not None
        return record.state


# -- records ---------------------------------------------------------------------------------------


def test_records_come_back_as_they_were_written() -> None:
    identity = IdentityRecord("r2", "q", "host", ("r0", "r1"), (("p", 3), ("q", 7)))
    found = parse_transaction_value(
        transaction_value(TransactionRecord(-1, -1, 0, State.EMPTY, identity=identity))
    )
    assert found.identity == identity and found.attempt is None
    tag = AttemptTag("x", "q", "r", 1 << 40, "höst")
    record = TransactionRecord(
        5, 2, 60_000, State.ONGOING, frozenset((T0,)), 3, 2, version=2, attempt=tag
    )
    assert parse_transaction_value(transaction_value(record)) == record


@pytest.mark.parametrize("parse", [records.parse_identity_tag, records.parse_attempt_tag])
def test_a_record_that_is_cut_or_damaged_is_refused(parse: Any) -> None:
    whole = (
        records.identity_tag(IdentityRecord("r", "q", "h", ("a",), (("q", 1),)))
        if parse is records.parse_identity_tag
        else records.attempt_tag(AttemptTag("x", "q", "r", 1, "h"))
    )
    parse(whole)
    for broken in (b"\1" + whole[1:], whole + b"\0", *(whole[:n] for n in range(len(whole)))):
        with pytest.raises(FormatError):
            parse(broken)


def test_a_batch_of_several_records_is_as_kafka_writes_it() -> None:
    rows = [(b"k", b"v" * 300), (b"gone", None), (None, b""), (b"", b"x")]
    data = encode_records(rows, 1234)
    info = check_batch_bytes(data)
    assert (info.records_count, info.size, info.last_offset_delta) == (4, len(data), 3)
    found, taken, after = decode_records(data, "t", 0, 0)
    assert (taken, after) == (len(data), 4)
    assert [(row.key, row.value) for row in found] == rows
    assert {row.timestamp for row in found} == {1234}


def test_an_attempts_id_is_kept_where_its_identity_is() -> None:
    for identity in ("a", "6c1f-uuid", "ü" * 40):
        names = [attempt_id(identity, slot, PARTITIONS) for slot in range(30)]
        assert len(set(names)) == 30
        wanted = partition_of(identity, PARTITIONS)
        assert {partition_of(name, PARTITIONS) for name in names} == {wanted}


# -- answers ---------------------------------------------------------------------------------------


def test_a_commit_is_one_change_of_all_that_is_open() -> None:
    desk = Desk()
    a, b, other = desk.attempt(), desk.attempt(), desk.attempt()
    for named in (a, other):
        desk.add(named)
    assert desk.commit([a, b]).code == E.NONE
    assert desk.last is not None
    ends = {w.transactional_id: w.record.state for w in desk.last.writes if w.record is not None}
    assert ends == {
        a.transactional_id: State.PREPARE_COMMIT,
        b.transactional_id: State.PREPARE_COMMIT,
        other.transactional_id: State.PREPARE_ABORT,
    }
    assert desk.last.record is not None and desk.last.record.last_batch("q") == 0
    assert all(w.record.epoch == 1 for w in desk.last.writes if w.record is not None)


def test_ids_are_as_many_as_attempts_at_one_time() -> None:
    desk = Desk()
    for batch in range(50):
        named = [desk.attempt(batch) for _ in range(3)]
        assert desk.commit(named[:2], batch).code == E.NONE
    assert len(desk.machine.transactions.entries) == 3


def test_many_attempts_at_one_time_have_their_ids_looked_for_once() -> None:
    """A search takes some fifty hashes: a job of 400 tasks took the event loop 24 s."""
    desk = Desk()
    asked: list[int] = []

    def name_of(identity: str, slot: int) -> str:
        asked.append(slot)
        return f"{identity}-{slot}"

    desk.machine.name_of = name_of
    assert len({desk.attempt() for _ in range(300)}) == 300
    assert len(asked) <= 302, "the first one is asked for again until the identity is kept"


def test_a_join_looks_at_none_of_the_attempts_that_are_open() -> None:
    """A job of 10,000 tasks took the event loop tens of seconds."""

    class Counted(dict[str, Any]):
        looks = 0

        def get(self, *which: Any) -> Any:
            self.looks += 1
            return super().get(*which)

    desk = Desk()
    entries = desk.machine.transactions.entries = Counted()

    def looks() -> int:
        before = entries.looks
        desk.attempt(1)
        return entries.looks - before

    assert desk.commit([desk.attempt(0) for _ in range(50)]).code == E.NONE
    for _ in range(50):
        desk.attempt(1)  # those of the ids that there are
    few = looks()
    for _ in range(300):
        desk.attempt(1)
    assert looks() == few <= 5


def test_ids_are_used_again_however_their_attempts_end() -> None:
    desk = Desk()
    first = [desk.attempt() for _ in range(4)]
    desk.add(first[0])
    desk.now += 2000
    (late,) = desk.machine.transactions.timed_out(desk.now)
    markers = desk.machine.transactions.written(late)
    assert markers is not None
    name = first[0].transactional_id
    assert name != desk.attempt().transactional_id, "it has no markers yet"
    done = desk.machine.transactions.complete(markers, desk.now)
    assert done is not None
    desk.machine.transactions.written(done)
    assert desk.attempt().transactional_id == name, "after its timeout"
    made = desk.machine.join(Job("x", "q", "r"), 0, 1000, "host", desk.now, next(desk.ids))
    assert isinstance(made, WriteMany) and made.reply.attempt is not None
    desk.machine.failed(made)
    assert desk.attempt().transactional_id == made.reply.attempt.transactional_id
    assert desk._made(lambda _: desk.machine.abort(Job("x", "q", "r"), desk.now)).code == E.NONE
    names = {desk.attempt().transactional_id for _ in range(6)}
    assert names == set(desk.machine.transactions.entries), "after an abort"


def test_the_next_coordinator_uses_the_ids_that_there_are() -> None:
    desk, other = Desk(), Desk()
    committed = [desk.attempt() for _ in range(3)]
    assert desk.commit(committed).code == E.NONE
    still = [desk.attempt(1) for _ in range(5)]
    asked: list[int] = []
    other.machine.name_of = lambda identity, slot: asked.append(slot) or f"{identity}-{slot}"
    identity = desk.machine.identities["x"].record
    other.machine.install("x", TransactionRecord(-1, -1, 0, State.EMPTY, identity=identity))
    for name, entry in desk.machine.transactions.entries.items():
        assert entry.record is not None
        other.machine.install(name, entry.record)
    fresh = other.attempt(1)
    assert fresh.transactional_id not in {one.transactional_id for one in still}
    assert asked == [5] * len(asked), "it looks at none that is open"
    assert other.commit([*still, fresh], 1).code == E.NONE


def test_a_slot_whose_epochs_are_used_up_gets_another_producer_id() -> None:
    desk = Desk()
    first = desk.attempt()
    entry = desk.machine.transactions.entries[first.transactional_id]
    assert entry.record is not None
    entry.record = entry.record._replace(epoch=LAST_EPOCH)
    assert desk.commit([first._replace(epoch=LAST_EPOCH)]).code == E.NONE
    assert entry.record.epoch == LAST_EPOCH + 1
    again = desk.attempt(1)
    assert again.transactional_id == first.transactional_id
    assert again.producer_id != first.producer_id and again.epoch == 0


def test_a_repeated_batch_is_committed_already() -> None:
    desk = Desk()
    assert desk.commit([desk.attempt(4)], 4) == AttemptReply()
    for batch in (4, 3):
        assert desk.join(batch).committed and desk.commit([], batch).committed
    assert desk.join(4, "r2").committed, "a new run has it as well"
    assert desk.join(4, "r").code == E.PRODUCER_FENCED
    assert not desk.join(4, "r3", "another query").committed


@pytest.mark.parametrize("call", ["join", "commit", "abort"])
def test_a_former_run_is_told_who_writes(call: str) -> None:
    desk = Desk()
    old = desk.attempt(0, "r1")
    desk.attempt(0, "r2", "q2")
    if call == "join":
        reply = desk.join(0, "r1")
    elif call == "commit":
        reply = desk.commit([old], 0, "r1")
    else:
        reply = desk._made(lambda _: desk.machine.abort(Job("x", "q", "r1"), desk.now))
    assert reply.code == E.PRODUCER_FENCED
    assert all(text in reply.message for text in ("r1", "r2", "q2", "host of r2"))
    assert desk.state(old) is State.COMPLETE_ABORT


def test_what_became_of_an_attempt_is_said_and_nothing_changes() -> None:
    desk = Desk()
    job = Job("x", "q", "r1")

    def check(named: Named, batch: int = 0, job: Job = job) -> AttemptReply:
        before = deepcopy((desk.machine.identities, desk.machine.transactions.entries))
        made = desk.machine.check(job, batch, named)
        assert (desk.machine.identities, desk.machine.transactions.entries) == before
        return made

    a, b, c = (desk.attempt(0, "r1") for _ in range(3))
    assert check(a) == AttemptReply()
    unknown = check(a, job=Job("x", "q", "a run that has not joined"))
    assert unknown.code == E.INVALID_TXN_STATE and desk.machine.run_of("x") == "r1"
    desk.add(c)
    desk.now += 2000
    (late,) = desk.machine.transactions.timed_out(desk.now)
    desk.machine.transactions.written(late)
    ended = check(c)
    assert ended.code == E.INVALID_TXN_STATE and "timeout" in ended.message
    assert desk.commit([a], 0, "r1").code == E.NONE
    assert check(b).committed and check(a).committed
    d = desk.attempt(1, "r1")
    desk.attempt(1, "r2")
    fenced = check(d, 1)
    assert fenced.code == E.PRODUCER_FENCED and "host of r2" in fenced.message


def test_an_attempt_that_is_not_open_refuses_the_commit() -> None:
    desk = Desk()
    a, b = desk.attempt(), desk.attempt()
    of_other = desk.attempt(who="y")
    later = desk.attempt(1)
    cases = {
        "not known": [a, Named("nobody", 1, 0)],
        "y-0": [a, of_other],
        "belongs to batch 1": [a, later],
        "epoch 9": [a, b._replace(epoch=9)],
    }
    for text, named in cases.items():
        reply = desk.commit(named)
        assert reply.code == E.INVALID_TXN_STATE and text in reply.message
    desk.add(b)
    desk.now += 2000
    (late,) = desk.machine.transactions.timed_out(desk.now)
    assert desk.commit([a]).code == E.CONCURRENT_TRANSACTIONS, "it is about to end"
    desk.machine.transactions.written(late)
    reply = desk.commit([a, b])
    assert reply.code == E.INVALID_TXN_STATE and "timeout" in reply.message
    assert desk.state(a) is State.EMPTY, "nothing was committed"
    assert desk.commit([a]).code == E.NONE


def test_a_commit_waits_for_aborts_before_it_in_its_partitions() -> None:
    desk = Desk()
    old = desk.attempt(0, "r1")
    desk.add(old)
    job = Job("x", "q", "r2")
    made = desk.machine.join(job, 0, 1000, "host", desk.now, next(desk.ids))
    assert isinstance(made, WriteMany) and made.reply.attempt is not None
    group = desk.machine.written(made)
    a = made.reply.attempt
    assert desk.state(old) is State.PREPARE_ABORT
    desk.add(a)
    assert desk.commit([a], run="r2").code == E.CONCURRENT_TRANSACTIONS, "readers wait at the old"
    for write in desk.machine.complete(group, desk.now):
        desk.machine.transactions.written(write)
    assert desk.commit([a], run="r2").code == E.NONE


def test_a_commit_does_not_wait_for_aborts_elsewhere() -> None:
    desk = Desk()
    desk.add(desk.attempt(0, "r1"))
    made = desk.machine.join(Job("x", "q", "r2"), 0, 1000, "host", desk.now, next(desk.ids))
    assert isinstance(made, WriteMany) and made.reply.attempt is not None
    desk.machine.written(made)
    assert desk.commit([made.reply.attempt], run="r2").code == E.NONE, "it has no partition of it"


def test_only_its_batch_ends_an_attempt() -> None:
    desk = Desk()
    a = desk.attempt()
    desk.add(a)
    made = desk.machine.transactions.end(*a, True, 2, desk.now)
    assert made == Reply(E.INVALID_TXN_STATE)
    assert desk.commit([a]).code == E.NONE
    made = desk.machine.transactions.end(*a, True, 2, desk.now)
    assert made == Reply(E.PRODUCER_FENCED)


def test_a_producer_that_takes_an_attempts_id_ends_it() -> None:
    desk = Desk()
    a = desk.attempt()
    made = desk.machine.transactions.init(a.transactional_id, 1000, None, desk.now)
    assert not isinstance(made, Reply | NeedsId)
    desk.machine.transactions.written(made)
    assert desk.commit([a]).code == E.INVALID_TXN_STATE
    assert desk.attempt().transactional_id != a.transactional_id, "the id is the producer's"


def test_a_producers_id_is_no_identity() -> None:
    desk = Desk()
    made = desk.machine.transactions.init("x", 1000, None, desk.now, 500)
    assert not isinstance(made, Reply | NeedsId)
    desk.machine.transactions.written(made)
    assert desk.join().code == E.INVALID_REQUEST
    assert not desk.machine.is_identity("x")
    desk.attempt(who="y")
    assert desk.machine.is_identity("y")


def test_so_many_queries_and_runs_are_remembered() -> None:
    desk = Desk()
    for i in range(records.KEPT_QUERIES + 1):
        run, query = f"r{i}", f"q{i}"
        assert desk.commit([desk.attempt(3, run, query)], 3, run, query).code == E.NONE
    last = desk.machine.identities["x"].record
    assert last is not None
    assert last.last_batch("q0") == records.NO_BATCH and last.last_batch("q1") == 3
    for i in range(records.KEPT_RUNS):
        assert desk.join(9, f"later {i}").code == E.NONE
    assert desk.join(9, "later 0").code == E.PRODUCER_FENCED
    assert desk.join(9, "r0").code == E.NONE, "nobody knows it any more"


def test_an_identity_that_nobody_uses_is_forgotten() -> None:
    desk = Desk()
    a = desk.attempt()
    desk.now += 5000
    assert desk.machine.expired(desk.now, 1000) == [], "an attempt is open"
    assert desk.commit([a]).code == E.NONE
    assert desk.machine.expired(desk.now, 1000) == []
    desk.now += 1000
    assert desk.machine.expired(desk.now, 1000) == ["x"]
    assert desk.join().code == E.CONCURRENT_TRANSACTIONS, "its tombstone is under way"
    desk.machine.forgotten("x", False)
    assert desk.join().committed
    assert desk.machine.expired(desk.now, 1000) == ["x"]
    desk.machine.forgotten("x", True)
    assert not desk.join().committed


def test_ids_of_attempts_that_ended_are_forgotten_soon() -> None:
    """A batch job has ids of its own, one for each task: they would be kept for a week."""
    desk, week = Desk(), 604_800_000
    transactions = desk.machine.transactions
    producer = transactions.init("p", 1000, None, desk.now, 5)
    assert isinstance(producer, Write) and transactions.written(producer) is None
    first = [desk.attempt(who="job") for _ in range(3)]
    assert desk.commit(first, who="job").code == E.NONE
    desk.attempt(7, who="joined, and died")
    assert transactions.expired(desk.now + ATTEMPT_EXPIRATION_MS, week) == []
    desk.now += ATTEMPT_EXPIRATION_MS + 1000
    open_now = desk.attempt(1, who="job")
    gone = transactions.expired(desk.now, week)
    assert len(gone) == 3 and "p" not in {write.transactional_id for write in gone}
    for write in gone:
        transactions.written(write)
    assert desk.machine.expired(desk.now, week) == [], "batches are remembered longer"
    assert desk.machine.identities["job"].names == {open_now.transactional_id}
    assert desk.join(0, who="job").committed
    again = desk.attempt(1, who="job")
    assert again.producer_id not in {one.producer_id for one in first}
    assert desk.commit([open_now, again], 1, who="job").code == E.NONE
    # Read back, they are of an identity of which nothing else is known.
    desk.machine.identities["joined, and died"].record = None
    assert desk.machine.expired(desk.now, week) == []
    assert "joined, and died" not in desk.machine.identities


# -- schedules -------------------------------------------------------------------------------------


def test_schedules() -> None:
    found = failing(0, SCHEDULES)
    assert found is None, f"python -m tests.broker.attempt_schedules --seed {found[0]}: {found}"


def test_schedules_do_something() -> None:
    """They see failovers, runs that are fenced, and batches that were committed before the end."""
    worlds = [attempt_world.play(seed, STEPS) for seed in range(20)]
    assert sum(world.coordinator.epoch for world in worlds) > 40
    assert sum(len(world.former) for world in worlds) > 60
    steps = [step for world in worlds for step in world.path]
    for what in ("lost", "repeated", "killed", "fails", "attempt"):
        assert sum(step[0] == what for step in steps) > 20, what


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str) -> None:
    kind = MISTAKES[mistake]

    def fails(first: int, schedules: int, step: int = 1) -> Any:
        return failing(first, schedules, step, kind)

    found = found_at(fails, FOUND_AT.get(mistake), 0, 400)
    assert found is not None
    seed, world, broken = found
    again = fails(seed, 1)
    assert again is not None and (again[1].path, again[2]) == (world.path, broken)
    assert failing(seed, 1) is None, "without the mistake nothing is wrong"
