"""Compaction of transactions: which of their records and markers go, and when an aborted one leaves
the aborted index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kdirect.format import layout
from kdirect.format.batch import iterate_batches
from kdirect.format.segment_files import AbortedTransaction, parse_transaction_index
from kdirect.log.cleaned_transactions import ABORT, COMMIT, CleanedTransactions
from kdirect.log.config import LogConfig
from kdirect.log.kernel_transactions import (
    aborted_transactions,
    admit_transaction,
    begin_verification,
    marker_batch,
)
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from tests.log.compacted_logs import NOW, compact, keyed, last_of_each_key, records_of
from tests.log.conftest import TP
from tests.log.test_moves import move


def test_markers_go_after_the_records_of_their_transactions() -> None:
    walk = CleanedTransactions([AbortedTransaction(7, 10, 30, 5)])
    assert not walk.discards_batch(7, 9, transactional=True), "the one before was committed"
    assert not walk.discards_marker(7, 9, COMMIT)
    assert walk.discards_batch(7, 15, transactional=True), "it is aborted"
    assert not walk.discards_batch(7, 16, transactional=False)
    assert not walk.discards_marker(7, 30, ABORT), "records of it were met"
    assert not walk.discards_batch(7, 31, transactional=True)
    assert not walk.discards_marker(7, 32, COMMIT)
    assert walk.discards_marker(7, 40, COMMIT), "nothing of a later transaction is left"
    assert walk.discards_marker(7, 42, None), "an empty marker was cleaned before"
    assert walk.discards_marker(7, 44, ABORT), "nobody is told of it"
    assert walk.take_forgotten() == set()


def test_a_transaction_without_records_leaves_the_index_unless_somebody_reads_old_ones() -> None:
    """Its marker goes only where nobody is told of it any more."""
    aborted = [AbortedTransaction(7, 10, 30, 5), AbortedTransaction(8, 40, 60, 5)]
    for held, forgotten in (
        ([], {30, 60}),
        ([(0, 10), (31, 40), (61, 99)], {30, 60}),
        ([(30, 31)], {60}),
        ([(0, 11)], {60}),
        ([(20, 50)], set()),
    ):
        walk = CleanedTransactions(aborted, held)
        for producer, marker in ((7, 30), (8, 60)):
            assert walk.discards_marker(producer, marker, ABORT) == (marker in forgotten)
        assert walk.take_forgotten() == forgotten and walk.take_forgotten() == set()


def test_a_marker_that_is_missing_ends_its_transaction_all_the_same() -> None:
    walk = CleanedTransactions([AbortedTransaction(7, 10, 30, 5)])
    assert walk.discards_batch(7, 15, transactional=True)
    assert not walk.discards_batch(7, 31, transactional=True), "it is of the next one"


def transact(p: Partition, producer: tuple[int, int, int], records: list, **how: Any) -> None:
    """A transaction of a producer: id, epoch, sequence."""
    number, epoch, sequence = producer
    commit = how.pop("commit")
    _, ticket = begin_verification(p.kernel, number, epoch, sequence, NOW)
    admit_transaction(p.kernel, number, epoch, ticket)
    batch = keyed(records, producer=producer, transactional=True, **how)
    assert p.append(batch, NOW).error == 0
    assert p.append_marker(marker_batch(number, epoch, 0, commit, NOW), NOW).error == 0


def aborted_files(p: Partition) -> list[AbortedTransaction]:
    """What the ``.txnindex`` files say."""
    found = [parse_transaction_index(f.read_bytes()) for f in p.directory.glob("*.txnindex")]
    return sorted(entry for entries in found for entry in entries)


def markers(p: Partition) -> dict[int, int]:
    """The attributes of control batches with a record, by offset."""
    data = b"".join(bytes(b) for b in p.read(p.log_start_offset, 1 << 20))
    return {b.base_offset: b.attributes for b in iterate_batches(data) if b.is_control}


def roll_on(p: Partition) -> None:
    """One more dirty segment."""
    p.append(keyed([(b"z", b"1")]))
    p.roll()


@pytest.mark.parametrize("codec", [0, 1])
def test_aborted_records_go_and_committed_ones_stay(open_partition, codec) -> None:
    """Before and after a restart, and however often the log is compacted.  The aborted index says
    the same as before until a cleaning finds none of the records."""
    settings = {"compacts": True, "deletes": False, "delete_retention_ms": 0}
    p = open_partition(**settings)
    transact(p, (1, 0, 0), [(b"a", b"1"), (b"b", b"1")], codec=codec, commit=True)
    transact(p, (2, 0, 0), [(b"a", b"2"), (b"c", b"2")], codec=codec, commit=False)
    transact(p, (3, 0, 0), [(b"b", b"3")], codec=codec, commit=True)
    transact(p, (2, 1, 0), [(b"e", b"2")], codec=codec, commit=True)
    p.append(keyed([(b"d", b"4")]))
    p.roll()
    compact(p)
    wanted = {b"a": b"1", b"b": b"3", b"d": b"4", b"e": b"2"}
    for restarts in (False, True):
        if restarts:
            p = open_partition(clean=False, **settings)
        assert last_of_each_key(records_of(p)) == wanted
        (aborted,) = aborted_transactions(p.kernel, 0, p.log_end_offset)
        assert (aborted.producer_id, aborted.first_offset) == (2, 3)
        assert p.last_stable_offset == p.log_end_offset
    for i in range(3):
        p.append(keyed([(b"b", b"5"), (b"d", b"5")]))
        p.roll()
        compact(p, None, now_ms=NOW + i)
        assert not aborted_transactions(p.kernel, 0, p.log_end_offset)
        assert not aborted_files(p)
        assert (aborted.last_offset in markers(p)) == (i == 0)
    wanted = {b"a": b"1", b"b": b"5", b"d": b"5", b"e": b"2"}
    for _ in range(2):
        assert last_of_each_key(records_of(p)) == wanted
        p = open_partition(clean=False, **settings)
        assert not aborted_transactions(p.kernel, 0, p.log_end_offset)


def test_a_marker_goes_after_its_delete_horizon(open_partition) -> None:
    """Whether its transaction was committed or aborted."""
    p = open_partition(compacts=True, deletes=False, delete_retention_ms=1000)
    transact(p, (1, 0, 0), [(b"a", b"1")], commit=True)
    transact(p, (2, 0, 0), [(b"b", b"1")], commit=False)
    transact(p, (1, 0, 1), [(b"c", b"1")], commit=True)
    transact(p, (2, 0, 1), [(b"a", b"2"), (b"c", b"2")], commit=True)
    transact(p, (1, 0, 2), [(b"d", b"1")], commit=True)
    before = markers(p)
    assert list(before) == [1, 3, 5, 8, 10]
    horizon = layout.ATTRIBUTE_DELETE_HORIZON
    stamped = {at: a | horizon if at in (1, 3, 5) else a for at, a in before.items()}
    gone = {at: a for at, a in before.items() if at in (8, 10)}
    rounds = ((0, before), (1, stamped), (1000, stamped), (1001, gone), (9999, gone))
    for after_ms, wanted in rounds:
        roll_on(p)
        compact(p, None, now_ms=NOW + after_ms)
        assert markers(p) == wanted, after_ms


def test_an_aborted_transaction_is_told_of_as_long_as_old_bytes_are_read(open_partition) -> None:
    """A reader has acquired a segment with its records, which a cleaning has removed from the log.
    Whatever it asks, and however often the log is compacted, it is told of the transaction; and
    whoever reads the log as it is finds the marker."""
    p = open_partition(compacts=True, deletes=False, delete_retention_ms=0)
    transact(p, (2, 0, 0), [(b"a", b"2")], commit=False)
    transact(p, (2, 0, 1), [(b"a", b"3")], commit=True)
    roll_on(p)
    old = p.read(0, 1 << 20)
    (aborted,) = aborted_transactions(p.kernel, 0, p.log_end_offset)
    for i in range(4):
        compact(p, None, now_ms=NOW + i)
        roll_on(p)
        assert aborted_transactions(p.kernel, 0, p.log_end_offset) == [aborted]
        assert aborted_files(p) == [aborted]
        assert markers(p)[aborted.last_offset] & layout.ATTRIBUTE_DELETE_HORIZON == 0
    assert [b.base_offset for b in iterate_batches(bytes(old[0]))][:2] == [0, 1]
    old.clear()
    assert p.held_offsets() == []
    compact(p, None, now_ms=NOW + 4)
    assert aborted_transactions(p.kernel, 0, p.log_end_offset) == []
    assert markers(p)[aborted.last_offset] & layout.ATTRIBUTE_DELETE_HORIZON
    roll_on(p)
    compact(p, None, now_ms=NOW + 5)
    assert aborted.last_offset not in markers(p)
    assert last_of_each_key(records_of(p)) == {b"a": b"3", b"z": b"1"}


def test_a_reader_holds_bytes_that_another_object_of_the_log_stands_for(open_partition) -> None:
    """It reads the active segment before that has a head again, as after a start."""
    settings = {"compacts": True, "deletes": False, "delete_retention_ms": 0}
    p = open_partition(**settings)
    transact(p, (2, 0, 0), [(b"a", b"2")], commit=False)
    transact(p, (2, 0, 1), [(b"a", b"3")], commit=True)
    p = open_partition(**settings)
    old = p.read(0, 1 << 20)
    (aborted,) = aborted_transactions(p.kernel, 0, p.log_end_offset)
    for i in range(4):
        roll_on(p)
        compact(p, None, now_ms=NOW + i)
        assert aborted_transactions(p.kernel, 0, p.log_end_offset) == [aborted]
    assert [b.base_offset for b in iterate_batches(bytes(old[0]))] == [0, 1, 2, 3]
    old.clear()
    roll_on(p)
    compact(p, None, now_ms=NOW + 4)
    assert aborted_transactions(p.kernel, 0, p.log_end_offset) == []


@pytest.mark.parametrize("replicated", [False, True])
def test_readers_in_the_directory_that_a_log_has_left_are_known(
    tmp_path: Path, replicated: bool
) -> None:
    """Those of a copy of another broker's log, too, whose active segment stays the active one."""
    config = LogConfig(compacts=True, deletes=False, delete_retention_ms=0)
    dirs = [tmp_path / "there", tmp_path / "here"]
    with LogManager(dirs, config, replicated=replicated) as m:
        p = m.create_partition(TP)
        transact(p, (2, 0, 0), [(b"a", b"2")], commit=False)
        transact(p, (2, 0, 1), [(b"a", b"3")], commit=True)
        if replicated:
            p.follow_leader()
        p.replicated(-1, 4)
        old = p.read(0, 1 << 20)
        (aborted,) = aborted_transactions(p.kernel, 0, p.log_end_offset)
        move(m, stands_still=replicated)
        assert p.held_offsets() == [(0, 4)]
        if replicated:
            p.begin_epoch(1, replicated=False)
        for i in range(4):
            roll_on(p)
            compact(p, None, now_ms=NOW + i)
            assert aborted_transactions(p.kernel, 0, p.log_end_offset) == [aborted]
        assert [b.base_offset for b in iterate_batches(bytes(old[0]))] == [0, 1, 2, 3]
        old.clear()
        roll_on(p)
        compact(p, None, now_ms=NOW + 4)
        assert aborted_transactions(p.kernel, 0, p.log_end_offset) == []


def test_a_producer_that_has_aborted_before_is_compacted_as_others(open_partition) -> None:
    p = open_partition(compacts=True, deletes=False)

    def transact(sequence: int, key: bytes, value: bytes, *, commit: bool) -> None:
        _, ticket = begin_verification(p.kernel, 1, 0, sequence, NOW)
        admit_transaction(p.kernel, 1, 0, ticket)
        batch = keyed([(key, value)], producer=(1, 0, sequence), transactional=True)
        assert p.append(batch, NOW).error == 0
        assert p.append_marker(marker_batch(1, 0, 0, commit, NOW), NOW).error == 0

    transact(0, b"b", b"1", commit=False)
    p.append(keyed([(b"a", b"1")]))
    p.roll()
    cleaned_to = compact(p).end_offset
    transact(1, b"a", b"2", commit=True)
    transact(2, b"b", b"2", commit=False)
    p.append(keyed([(b"c", b"1")]))
    p.roll()
    compact(p, cleaned_to)
    assert [(r.key, r.value) for r in records_of(p)] == [(b"a", b"2"), (b"c", b"1")]
