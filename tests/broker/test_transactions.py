"""The machine that coordinates transactions: its answers, its records, and seeded schedules.

More schedules: ``make txn-schedules COUNT=... SEED=...``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from kdirect.broker import transactions as machine
from kdirect.broker.transactions import NeedsId, Reply, Transactions, Write
from kdirect.errors import FormatError
from kdirect.format import transaction_records as records
from kdirect.format.error_codes import ErrorCode as E
from kdirect.format.transaction_records import State, TransactionRecord
from kdirect.model import TopicPartition
from tests.broker import transaction_world
from tests.broker.transaction_schedules import failing

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
SCHEDULES = 150


class Desk:
    """The machine with a log that takes everything at once."""

    def __init__(self) -> None:
        self.machine = Transactions()
        self.now = 1000
        self.ids = iter(range(7, 100))

    def ask(self, name: str, *arguments: Any) -> Reply:
        act = getattr(self.machine, name)
        made = act(*arguments, self.now)
        if isinstance(made, NeedsId):
            made = act(*arguments, self.now, next(self.ids))
        if isinstance(made, Reply):
            return made
        markers = self.machine.written(made)
        if markers is not None:
            done = self.machine.complete(markers, self.now)
            assert done is not None
            self.machine.written(done)
        return made.reply

    def record(self, name: str = "x") -> TransactionRecord:
        found = self.machine.entries[name].record
        assert found is not None
        return found


# -- records ---------------------------------------------------------------------------------------


def test_a_record_is_what_kafka_writes() -> None:
    """Bytes of Kafka's schema, version 1, by hand."""
    record = TransactionRecord(
        5, 2, 60_000, State.ONGOING, frozenset((T0, T1)), 30, 20, previous_id=4, version=2
    )
    expected = bytes.fromhex(
        "0001 0000000000000005 0002 0000ea60 01 02 0274 03 00000000 00000001 00"
        "000000000000001e 0000000000000014 02 00 08 0000000000000004 02 02 0002"
    )
    assert records.transaction_value(record) == expected
    assert records.parse_transaction_value(expected) == record
    assert records.transaction_key("a") == bytes.fromhex("0000 0001 61")


def test_a_record_of_an_older_broker_is_read() -> None:
    """Version 0, as brokers before transaction.version 1 write it; Empty has a null list."""
    head = "0000 0000000000000005 0002 0000ea60"
    value = bytes.fromhex(f"{head} 00 ffffffff 000000000000001e ffffffffffffffff")
    found = records.parse_transaction_value(value)
    assert found == TransactionRecord(5, 2, 60_000, State.EMPTY, updated_ms=30)
    topics = "00000001 0001 74 00000001 00000001"
    value = bytes.fromhex(f"{head} 01 {topics} 000000000000001e 0000000000000014")
    assert records.parse_transaction_value(value).partitions == {T1}


def test_damaged_records_are_refused() -> None:
    value = records.transaction_value(
        TransactionRecord(5, 2, 1, State.ONGOING, frozenset((T0,)), 3, 2, version=2)
    )
    for end in range(len(value)):
        with pytest.raises(FormatError):
            records.parse_transaction_value(value[:end])
    with pytest.raises(FormatError):
        records.parse_transaction_value(value[:16] + b"\x63" + value[17:])
    with pytest.raises(FormatError):
        records.parse_transaction_key(b"\0\0\0\5ab")
    assert records.parse_transaction_key(b"\0\7\0\1a") is None


# -- answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 2])
def test_a_transaction_commits(version: int) -> None:
    desk = Desk()
    assert desk.ask("init", "x", 1000, None) == Reply(0, 7, 0)
    assert desk.ask("add", "x", 7, 0, [T0], version).code == 0
    assert desk.record().state is State.ONGOING
    assert desk.machine.verify("x", 7, 0, [T0, T1]) == {T0: 0, T1: E.TRANSACTION_ABORTABLE}
    bumped = 1 if version else 0
    assert desk.ask("end", "x", 7, 0, True, version) == Reply(0, 7, bumped)
    assert desk.record().state is State.COMPLETE_COMMIT
    # The answer was lost: it is asked once more.
    assert desk.ask("end", "x", 7, 0, True, version) == Reply(0, 7, bumped)
    assert desk.ask("end", "x", 7, 0, False, version).code == E.INVALID_TXN_STATE
    assert desk.ask("add", "x", 7, bumped, [T1], version).code == 0


def test_a_new_producer_fences_the_one_before() -> None:
    desk = Desk()
    desk.ask("init", "x", 1000, None)
    desk.ask("add", "x", 7, 0, [T0], 0)
    assert desk.ask("init", "x", 1000, None).code == E.CONCURRENT_TRANSACTIONS
    assert desk.record().state is State.COMPLETE_ABORT
    assert desk.ask("init", "x", 1000, None) == Reply(0, 7, 2)
    assert desk.ask("end", "x", 7, 0, True, 0).code == E.PRODUCER_FENCED
    assert desk.ask("end", "x", 7, 1, False, 0).code == E.PRODUCER_FENCED
    assert desk.ask("add", "x", 7, 0, [T0], 0).code == E.PRODUCER_FENCED
    assert desk.ask("add", "x", 8, 2, [T0], 0).code == E.INVALID_PRODUCER_ID_MAPPING
    assert desk.ask("add", "y", 7, 2, [T0], 0).code == E.INVALID_PRODUCER_ID_MAPPING
    assert desk.ask("end", "x", 7, 2, True, 0).code == E.INVALID_TXN_STATE


def test_a_producer_goes_on_after_an_error() -> None:
    """KIP-360: it names what it has; an answer that was lost is given once more."""
    desk = Desk()
    desk.ask("init", "x", 1000, None)
    assert desk.ask("init", "x", 1000, (7, 0)) == Reply(0, 7, 1)
    assert desk.ask("init", "x", 1000, (7, 0)) == Reply(0, 7, 1)
    assert desk.ask("init", "x", 1000, None) == Reply(0, 7, 2)
    assert desk.ask("init", "x", 1000, (7, 1)).code == E.PRODUCER_FENCED
    assert desk.ask("init", "x", 1000, (9, 2)).code == E.PRODUCER_FENCED
    desk.ask("add", "x", 7, 2, [T0], 0)
    assert desk.ask("init", "x", 1000, (7, 0)).code == E.PRODUCER_FENCED
    assert desk.record().state is State.ONGOING, "one that is fenced has aborted a transaction"


@pytest.mark.parametrize("version", [0, 2])
def test_used_up_epochs_bring_a_new_id(version: int) -> None:
    desk = Desk()
    desk.ask("init", "x", 1000, None)
    entry = desk.machine.entries["x"]
    entry.record = desk.record()._replace(epoch=machine.LAST_EPOCH)
    desk.ask("add", "x", 7, machine.LAST_EPOCH, [T0], version)
    ended = desk.ask("end", "x", 7, machine.LAST_EPOCH, True, version)
    if version:
        assert ended == Reply(0, 8, 0)
        assert desk.ask("end", "x", 7, machine.LAST_EPOCH, True, version) == ended
    else:
        assert desk.ask("init", "x", 1000, None) == Reply(0, 8, 0)


def test_the_epoch_of_a_fence_is_nobodys() -> None:
    """After it there is none: the record would not hold a fence of it."""
    desk = Desk()
    desk.ask("init", "x", 1000, None)
    last = machine.LAST_EPOCH
    desk.machine.install("x", desk.record()._replace(epoch=last))
    assert desk.ask("add", "x", 7, last, [T0], 0).code == 0
    desk.now += 1001
    (fence,) = desk.machine.timed_out(desk.now)
    markers = desk.machine.written(fence)
    assert markers is not None and markers.epoch == last + 1
    done = desk.machine.complete(markers, desk.now)
    assert done is not None and done.record is not None
    desk.machine.written(done)
    assert records.parse_transaction_value(records.transaction_value(done.record)).epoch == last + 1
    for version in (0, 2):
        assert desk.ask("add", "x", 7, last + 1, [T0], version).code == E.PRODUCER_FENCED
        for commit in (True, False):
            assert desk.ask("end", "x", 7, last + 1, commit, version).code == E.PRODUCER_FENCED
    assert desk.ask("init", "x", 1000, None) == Reply(0, 8, 0)


def test_an_empty_transaction_is_aborted_with_a_new_epoch() -> None:
    desk = Desk()
    desk.ask("init", "x", 1000, None)
    assert desk.ask("end", "x", 7, 0, False, 2) == Reply(0, 7, 1)
    assert desk.record().state is State.COMPLETE_ABORT
    assert desk.ask("end", "x", 7, 1, False, 2) == Reply(0, 7, 2)
    assert desk.ask("end", "x", 7, 2, True, 2).code == E.INVALID_TXN_STATE


def test_the_end_of_the_next_transaction_waits_for_the_markers_of_this_one() -> None:
    """Its producer knows the epoch that comes next, and may abort before it has sent anything."""
    desk = Desk()
    desk.ask("init", "x", 1000, None)
    desk.ask("add", "x", 7, 0, [T0], 2)
    write = desk.machine.end("x", 7, 0, True, 2, desk.now)
    assert isinstance(write, machine.Write) and write.reply == Reply(0, 7, 1)
    markers = desk.machine.written(write)
    assert markers is not None
    assert desk.ask("end", "x", 7, 1, False, 2).code == E.CONCURRENT_TRANSACTIONS
    done = desk.machine.complete(markers, desk.now)
    assert done is not None
    desk.machine.written(done)
    assert desk.ask("end", "x", 7, 1, False, 2) == Reply(0, 7, 2)


def test_what_takes_too_long_is_aborted() -> None:
    desk = Desk()
    desk.ask("init", "x", 1000, None)
    desk.ask("add", "x", 7, 0, [T0], 2)
    assert desk.machine.timed_out(desk.now + 1000) == []
    (write,) = desk.machine.timed_out(desk.now + 1001)
    assert desk.ask("end", "x", 7, 0, True, 2).code == E.CONCURRENT_TRANSACTIONS
    markers = desk.machine.written(write)
    assert markers == machine.Markers("x", 7, 1, False, frozenset((T0,)))
    assert desk.ask("end", "x", 7, 0, True, 2).code == E.PRODUCER_FENCED
    assert desk.ask("end", "x", 7, 0, False, 2).code == E.PRODUCER_FENCED


def test_ids_that_nobody_uses_are_forgotten() -> None:
    desk = Desk()
    desk.ask("init", "x", 1000, None)
    desk.ask("init", "y", 1000, None)
    desk.ask("add", "y", 8, 0, [T0], 0)
    assert desk.machine.expired(desk.now + 499, 500) == []
    (write,) = desk.machine.expired(desk.now + 500, 500)
    assert write == Write("x", None, Reply(0))
    desk.machine.written(write)
    assert list(desk.machine.entries) == ["y"]


def test_the_next_coordinator_completes_what_was_prepared() -> None:
    desk = Desk()
    desk.ask("init", "x", 1000, None)
    desk.ask("add", "x", 7, 0, [T0], 0)
    write = desk.machine.end("x", 7, 0, True, 0, desk.now)
    assert isinstance(write, Write) and write.record is not None
    value = records.transaction_value(write.record)
    after = Transactions()
    markers = after.install("x", records.parse_transaction_value(value))
    assert markers == machine.Markers("x", 7, 0, True, frozenset((T0,)))
    assert after.init("x", 1000, None, desk.now) == Reply(E.CONCURRENT_TRANSACTIONS)
    done = after.complete(markers, desk.now)
    assert done is not None and after.complete(markers, desk.now) is None


# -- schedules -------------------------------------------------------------------------------------


def test_schedules() -> None:
    found = failing(0, SCHEDULES)
    assert found is None, f"python -m tests.broker.transaction_schedules --seed {found[0]}: {found}"


def test_schedules_do_something() -> None:
    """They see commits and aborts that were told, failovers, and transactions that nobody ended."""
    worlds = [transaction_world.play(seed, 3000) for seed in range(30)]
    told = [outcome for world in worlds for outcome in world.told.values()]
    assert told.count("commit") > 50 and told.count("abort") > 20
    assert sum(world.coordinator.epoch for world in worlds) > 100
    assert sum(len(world.begun) - len(world.told) for world in worlds) > 50


def _no_fence(old: Any, name: str, record: TransactionRecord, now_ms: int) -> Any:
    record = record._replace(state=State.PREPARE_ABORT, updated_ms=now_ms, last_epoch=-1)
    return old._write(name, record, Reply(E.CONCURRENT_TRANSACTIONS))


def _at_once(old: Any, name: str, record: Any, reply: Reply) -> Any:
    """What is not in the log yet counts already."""
    write = Write(name, record, reply)
    entry = old.entries.setdefault(name, machine.Entry())
    entry.pending = write
    if record is not None:
        entry.record = record
    return write


@pytest.mark.parametrize(
    ("where", "mistake"),
    [
        ("_fence", _no_fence),
        ("_write", _at_once),
        ("complete", lambda self, markers, now_ms: None),
        ("install", lambda self, name, r: self.entries.update({name: machine.Entry(r)})),
    ],
)
def test_a_mistake_is_found(where: str, mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transactions, where, mistake)
    try:
        found = failing(0, 400)
    except Exception:
        return  # the machine itself has come apart
    assert found is not None
