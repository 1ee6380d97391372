"""Transactions in a log: who may open one, what ends it, and what the last stable offset and the
aborted index are, whatever was rolled, cut, replicated or reopened before, beside a plain model.

KDIRECT_ROUNDS=n runs n histories, KDIRECT_SEED=s begins with that seed (`make txn-histories`).
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kdirect.format.batch import iterate_batches
from kdirect.format.segment_files import AbortedTransaction, parse_transaction_index
from kdirect.log import producer_history
from kdirect.log.config import LogConfig
from kdirect.log.kernel import UNVERIFIED_TRANSACTION, CommitKernel
from kdirect.log.kernel_marks import advance_high_watermark
from kdirect.log.kernel_producers import expire_producers, known_producers
from kdirect.log.kernel_transactions import (
    aborted_transactions,
    admit_transaction,
    append_marker,
    begin_verification,
    marker_batch,
    unstable_transactions,
)
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from tests.log.conftest import TP, commit_at_tail, make_batch, stamped

NOW = int(time.time() * 1000)
OUT_OF_ORDER, OLD_EPOCH, BAD_STATE, COORDINATOR_FENCED, INVALID = 45, 47, 48, 52, 87
ROUNDS = int(os.environ.get("KDIRECT_ROUNDS") or 25)
FIRST = int(os.environ.get("KDIRECT_SEED") or 0)


def data_batch(producer: int, epoch: int, sequence: int, records: int = 1, size: int = 20) -> bytes:
    return make_batch(
        records,
        value_bytes=size,
        timestamp_ms=NOW,
        producer_id=producer,
        producer_epoch=epoch,
        sequence=sequence,
        transactional=True,
    )


def admit(kernel, producer: int, epoch: int, sequence: int = 0) -> None:
    error, ticket = begin_verification(kernel, producer, epoch, sequence, NOW)
    assert error == 0
    assert ticket == 0 or admit_transaction(kernel, producer, epoch, ticket)


def mark(kernel, producer: int, epoch: int, *, commit: bool, coordinator: int = 0):
    return append_marker(kernel, marker_batch(producer, epoch, coordinator, commit, NOW), NOW)


def test_a_transaction_is_opened_only_when_it_was_verified(head) -> None:
    h = head()
    data = data_batch(7, 0, 0)
    for _ in range(2):
        assert h.kernel.append(data, NOW).error == UNVERIFIED_TRANSACTION
    h.put(0, data)
    assert commit_at_tail(h.kernel, len(data), NOW).error == UNVERIFIED_TRANSACTION
    assert h.kernel.log_end_offset == 0 and not any(h.map[: len(data)])
    assert known_producers(h.kernel)[0] == []
    admit(h.kernel, 7, 0)
    assert h.kernel.append(data, NOW).base_offset == 0
    assert h.kernel.append(data, NOW).duplicate
    assert h.kernel.append(data_batch(7, 0, 1), NOW).base_offset == 1, "it is open"
    assert (h.kernel.high_watermark, h.kernel.last_stable_offset) == (2, 0)
    assert mark(h.kernel, 7, 0, commit=True).base_offset == 2
    assert h.kernel.last_stable_offset == h.kernel.log_end_offset == 3
    assert h.kernel.append(data_batch(7, 0, 1), NOW).duplicate, "a repetition opens nothing"
    assert h.kernel.append(data_batch(7, 0, 2), NOW).error == UNVERIFIED_TRANSACTION


def test_a_ticket_is_worthless_after_a_marker(head) -> None:
    h = head()
    _, ticket = begin_verification(h.kernel, 7, 3, 0, NOW)
    assert begin_verification(h.kernel, 7, 3, 5, NOW) == (0, ticket), "one for all who ask"
    assert not admit_transaction(h.kernel, 7, 3, ticket + 1)
    assert not admit_transaction(h.kernel, 7, 2, ticket)
    assert not admit_transaction(h.kernel, 8, 3, ticket)
    assert mark(h.kernel, 7, 3, commit=False).error == 0
    assert not admit_transaction(h.kernel, 7, 3, ticket), "the coordinator has ended it"
    assert h.kernel.append(data_batch(7, 3, 0), NOW).error == UNVERIFIED_TRANSACTION
    _, later = begin_verification(h.kernel, 7, 3, 0, NOW)
    assert later != ticket and admit_transaction(h.kernel, 7, 3, later)
    assert begin_verification(h.kernel, 7, 3, 0, NOW) == (0, 0), "nothing is to be asked"
    assert begin_verification(h.kernel, 7, 2, 0, NOW)[0] == OLD_EPOCH
    assert mark(h.kernel, 7, 3, commit=False).error == 0
    assert h.kernel.append(data_batch(7, 3, 0), NOW).error == UNVERIFIED_TRANSACTION


def test_an_epoch_that_was_not_confirmed_keeps_no_other_out(head) -> None:
    """A request may carry any epoch; the coordinator refuses one that is nobody's.  The producer
    itself could not begin its transaction in the partition then, until a marker came."""
    h = head()
    _, forged = begin_verification(h.kernel, 7, 9, 0, NOW)
    error, own = begin_verification(h.kernel, 7, 3, 0, NOW)
    assert error == 0 and own not in (0, forged)
    assert not admit_transaction(h.kernel, 7, 9, forged)
    assert admit_transaction(h.kernel, 7, 3, own)
    assert h.kernel.append(data_batch(7, 3, 0), NOW).error == 0


def test_a_batch_does_not_overtake_the_first_one_of_a_verification(head) -> None:
    h = head()
    _, ticket = begin_verification(h.kernel, 7, 0, 5, NOW)
    assert begin_verification(h.kernel, 7, 0, 0, NOW) == (0, ticket)
    assert admit_transaction(h.kernel, 7, 0, ticket)
    assert h.kernel.append(data_batch(7, 0, 5), NOW).error == OUT_OF_ORDER
    assert h.kernel.append(data_batch(7, 0, 0, 5), NOW).error == 0
    assert h.kernel.append(data_batch(7, 0, 5), NOW).error == 0


def test_what_producers_may_not_write(head) -> None:
    h = head()
    admit(h.kernel, 7, 0)
    control = marker_batch(7, 0, 0, True, NOW)
    assert h.kernel.append(control, NOW).error == INVALID
    h.put(0, control)
    assert commit_at_tail(h.kernel, len(control), NOW).error == INVALID
    plain = make_batch(1, producer_id=7, producer_epoch=0, sequence=1)
    assert h.kernel.append(data_batch(7, 0, 0) + plain, NOW).error == INVALID
    assert h.kernel.append(make_batch(1, transactional=True), NOW).error == INVALID
    assert h.kernel.append(data_batch(7, 0, 0), NOW).error == 0
    assert h.kernel.append(plain, NOW).error == BAD_STATE
    other = make_batch(1, producer_id=8, producer_epoch=0, sequence=0)
    assert h.kernel.append(other, NOW).error == 0, "others are not concerned"


def test_markers_are_judged_as_kafka_does(head) -> None:
    h = head()
    assert mark(h.kernel, 7, 1, commit=True, coordinator=3).error == 0, "of one that is not known"
    assert mark(h.kernel, 7, 0, commit=True, coordinator=3).error == OLD_EPOCH
    assert mark(h.kernel, 7, 1, commit=True, coordinator=2).error == COORDINATOR_FENCED
    assert append_marker(h.kernel, data_batch(7, 1, 0), NOW).error == INVALID
    assert append_marker(h.kernel, b"", NOW).error == INVALID
    damaged = bytearray(marker_batch(7, 1, 3, True, NOW))
    damaged[-1] ^= 1
    assert append_marker(h.kernel, bytes(damaged), NOW).error == 2
    assert h.kernel.log_end_offset == 1
    (batch,) = iterate_batches(h.bytes)
    assert batch.is_control and batch.is_transactional
    (entry,) = known_producers(h.kernel)[0]
    assert (entry.producer_epoch, entry.coordinator_epoch, entry.transaction_start) == (1, 3, -1)


def test_after_a_marker_with_a_higher_epoch_sequences_begin_again(head) -> None:
    h = head()
    admit(h.kernel, 7, 0)
    assert h.kernel.append(data_batch(7, 0, 0, 3), NOW).error == 0
    assert mark(h.kernel, 7, 1, commit=True).error == 0
    assert h.kernel.append(data_batch(7, 0, 3), NOW).error == OLD_EPOCH
    admit(h.kernel, 7, 1)
    assert h.kernel.append(data_batch(7, 1, 3), NOW).error == OUT_OF_ORDER
    assert h.kernel.append(data_batch(7, 1, 0), NOW).error == 0
    assert mark(h.kernel, 7, 1, commit=True).error == 0
    admit(h.kernel, 7, 1, 1)
    assert h.kernel.append(data_batch(7, 1, 1), NOW).error == 0, "the same epoch goes on"


def test_expiry_keeps_who_has_a_transaction_open(head) -> None:
    h = head()
    for producer in (7, 8):
        admit(h.kernel, producer, 0)
        assert h.kernel.append(data_batch(producer, 0, 0), NOW).error == 0
    assert mark(h.kernel, 8, 0, commit=True).error == 0
    assert expire_producers(h.kernel, NOW + 1) == 1
    assert [e.producer_id for e in known_producers(h.kernel)[0]] == [7]
    assert mark(h.kernel, 7, 0, commit=False).error == 0
    assert expire_producers(h.kernel, NOW + 1) == 1


def test_a_marker_is_stable_only_below_the_high_watermark(head) -> None:
    h = head(hold_high_watermark=True)
    admit(h.kernel, 7, 0)
    first = h.kernel.append(data_batch(7, 0, 0), NOW)
    assert mark(h.kernel, 7, 0, commit=False).error == 0
    assert h.kernel.last_stable_offset == 0
    advance_high_watermark(h.kernel, 1, first.end_position, 0)
    assert (h.kernel.high_watermark, h.kernel.last_stable_offset) == (1, 0)
    assert [t.marker_offset for t in unstable_transactions(h.kernel)] == [1]
    advance_high_watermark(h.kernel, 2, h.kernel.end_position, 0)
    assert h.kernel.last_stable_offset == 2 and unstable_transactions(h.kernel) == []
    assert aborted_transactions(h.kernel, 0, 2) == [AbortedTransaction(7, 0, 1, 2)]
    assert aborted_transactions(h.kernel, 2, 9) == aborted_transactions(h.kernel, 0, 0) == []


# -- beside a model --------------------------------------------------------------------------------


@dataclass
class Batch:
    producer: int  # -1: of none
    offset: int
    records: int
    epoch: int = 0
    marker: bool | None = None  # does it commit?

    @property
    def end(self) -> int:
        return self.offset + self.records


@dataclass
class Model:
    """A log as the list of its batches; what follows from them is computed from the first on."""

    batches: list[Batch] = field(default_factory=list)
    start: int = 0

    @property
    def end(self) -> int:
        return self.batches[-1].end if self.batches else 0

    def cut(self, offset: int) -> None:
        self.batches = [b for b in self.batches if b.end <= offset]

    def transactions(
        self, since: int = 0
    ) -> tuple[dict[int, int], list[tuple[int, int, int, bool]]]:
        """({producer: first offset} of those that are open, (producer, first offset, marker,
        whether it commits) of the others), by the batches that end after `since`."""
        open_ones: dict[int, int] = {}
        ended = []
        for b in self.batches:
            if b.end <= since:
                continue
            if b.marker is not None:
                if b.producer in open_ones:
                    ended.append((b.producer, open_ones.pop(b.producer), b.offset, b.marker))
            elif b.producer >= 0:
                open_ones.setdefault(b.producer, b.offset)
        return open_ones, ended

    def stable(self, high_watermark: int) -> set[int]:
        """What is deleted may be forgotten, and need not be."""
        found = set()
        for since in (0, self.start):
            open_ones, ended = self.transactions(since)
            late = [first for _, first, at, _ in ended if at >= high_watermark]
            stable = min([high_watermark, *open_ones.values(), *late])
            found.add(max(stable, min(self.start, high_watermark)))
        return found

    def aborted(self, start: int, end: int) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
        """(producer, marker) of those that have a record in [start, end) which is kept, and of
        those that might have one."""
        needed, possible = set(), set()
        for producer, first, at, commits in self.transactions()[1]:
            if commits or at < start or first >= end:
                continue
            possible.add((producer, at))
            for b in self.batches:
                if b.producer == producer and b.marker is None and first <= b.offset < at:
                    if b.end > max(start, self.start) and b.offset < end:
                        needed.add((producer, at))
        return needed, possible


class World:
    """A partition and its model, driven by one seed."""

    def __init__(self, path: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.path = path
        self.config = LogConfig(segment_bytes=self.rng.choice([8192, 16384, 1 << 20]))
        self.model = Model()
        self.manager = LogManager([path], self.config).open()
        self.p: Partition = self.manager.create_partition(TP)
        self.producers = list(range(1, 2 + self.rng.randrange(4)))
        self.held = False  # does a replica hold the high watermark?

    def append(self) -> None:
        rng, p = self.rng, self.p
        producer = rng.choice([-1, *self.producers])
        records, size = rng.choice([1, 1, 2, 5]), rng.choice([10, 300, 1500])
        offset = p.log_end_offset
        if producer < 0:
            data = make_batch(records, value_bytes=size, timestamp_ms=NOW)
            epoch = 0
        else:
            mine = [b for b in self.model.batches if b.producer == producer]
            epoch = mine[-1].epoch if mine else 0
            same = [b for b in mine if b.epoch == epoch and b.marker is None]
            sequence = sum(b.records for b in same)
            data = data_batch(producer, epoch, sequence, records, size)
            if producer not in self.model.transactions(p.log_start_offset)[0]:
                if producer not in self.model.transactions()[0]:
                    error = p.append(data, NOW).error
                    if error == OUT_OF_ORDER and self.is_forgotten(same):
                        return
                    assert error == UNVERIFIED_TRANSACTION
                admit(p.kernel, producer, epoch, sequence)
        result = p.append(data, NOW)
        assert (result.error, result.duplicate, result.base_offset) == (0, False, offset)
        self.model.batches.append(Batch(producer, offset, records, epoch))

    def is_forgotten(self, batches: list[Batch]) -> bool:
        """A cut makes the table of producers out of what is above the log start.  A marker then
        brings back who has nothing there, at its epoch and with no sequence, as in Kafka."""
        return bool(batches) and all(b.end <= self.p.log_start_offset for b in batches)

    def end(self) -> None:
        rng, offset = self.rng, self.p.log_end_offset
        producer, commit = rng.choice(self.producers), rng.random() < 0.5
        mine = [b.epoch for b in self.model.batches if b.producer == producer]
        epoch = (mine[-1] if mine else 0) + rng.randrange(2)
        result = self.p.append_marker(marker_batch(producer, epoch, 0, commit, NOW), NOW)
        assert (result.error, result.base_offset) == (0, offset)
        self.model.batches.append(Batch(producer, offset, 1, epoch, commit))

    def copy(self) -> None:
        """What comes from a leader is not judged: a transaction that nobody verified here."""
        p, offset = self.p, self.p.log_end_offset
        producer = self.rng.choice(self.producers)
        mine = [b for b in self.model.batches if b.producer == producer]
        epoch = mine[-1].epoch if mine else 0
        same = [b for b in mine if b.epoch == epoch and b.marker is None]
        if self.rng.random() < 0.6:
            data = data_batch(producer, epoch, sum(b.records for b in same))
            one = Batch(producer, offset, 1, epoch)
        else:
            commit = self.rng.random() < 0.5
            data = marker_batch(producer, epoch, 0, commit, NOW)
            one = Batch(producer, offset, 1, epoch, commit)
        assert p.append_as_stamped(stamped(data, offset, p.leader_epoch), NOW).error == 0
        self.model.batches.append(one)

    def roll(self) -> None:
        self.p.roll()

    def cut(self) -> None:
        if self.model.batches:
            at = self.rng.choice(self.model.batches[-8:]).offset
            if at >= max(self.p.log_start_offset, self.p.local_log_start_offset):
                assert self.p.truncate_to(at) == at
                self.model.cut(at)

    def hold(self) -> None:
        self.p.set_replicas({} if self.held else {1: self.p.high_watermark})
        self.held = not self.held

    def replicate(self) -> None:
        between = [b.end for b in self.model.batches if b.end > self.p.high_watermark]
        if self.held and between:
            self.p.replicated(1, self.rng.choice(between))

    def delete(self) -> None:
        if self.rng.random() < 0.3 and self.model.batches:
            at = self.rng.choice(self.model.batches).offset
            # Above it, what is open may be forgotten with its records.
            if self.p.log_start_offset < at <= self.p.last_stable_offset:
                self.p.move_log_start(at)
                self.model.start = max(self.model.start, at)

    def reopen(self) -> None:
        self.p.flush()
        self.manager.close(clean=self.rng.random() < 0.5)
        self.manager = LogManager([self.path], self.config).open()
        self.p = self.manager.partitions[TP]
        self.held = False
        # Deletions below the log start are on disk a little later.
        self.model.start = self.p.log_start_offset

    def check(self) -> None:
        p, model, rng = self.p, self.model, self.rng
        assert p.log_end_offset == model.end
        stable = p.last_stable_offset
        assert stable in model.stable(p.high_watermark), unstable_transactions(p.kernel)
        first = p.local_log_start_offset
        for _ in range(3):
            start = rng.randint(first, max(first, model.end))
            end = rng.randint(start, max(first, model.end))
            entries = aborted_transactions(p.kernel, start, end)
            found = {(e.producer_id, e.last_offset) for e in entries}
            needed, possible = model.aborted(start, end)
            assert needed <= found <= possible, (start, end)
        # What a reader of committed records gets ends at the last stable offset, or in the batch
        # before which the log starts now.
        at = max(p.log_start_offset, first)
        while buffers := p.read(at, 1 << 16, committed_only=True):
            for buffer in buffers:
                for batch in iterate_batches(bytes(buffer)):
                    at = max(at, batch.next_offset)
        assert at <= stable or not model.batches
        assert at == stable or stable == p.log_start_offset


def run(path: Path, seed: int) -> None:
    world = World(path, seed)
    actions = [world.append] * 8 + [world.end] * 4 + [world.copy] * 3
    actions += [world.roll, world.cut, world.hold, world.replicate, world.replicate]
    actions += [world.delete, world.reopen]
    try:
        for _ in range(70):
            world.rng.choice(actions)()
            world.check()
    finally:
        world.manager.close()


# 1121: a cut to a log start that was moved forgets a producer, and a marker brings it back.
@pytest.mark.parametrize("number", [*range(FIRST, FIRST + ROUNDS), 1121])
def test_random_histories(memory_path, number) -> None:
    run(memory_path / "log", number)


def test_a_log_start_above_an_open_transaction(open_partition) -> None:
    p = open_partition(segment_bytes=1 << 16)
    for producer in (7, 8):
        admit(p.kernel, producer, 0)
        assert p.append(data_batch(producer, 0, 0, 2), NOW).error == 0
        p.roll()
    assert p.last_stable_offset == 0
    assert p.delete_records(1) == 1 and p.last_stable_offset == 1
    assert p.delete_records(3) == 3 and p.last_stable_offset == 3
    assert [s.base_offset for s in p.segments] == [2, 4]
    assert p.read(3, 1 << 16, committed_only=True) == []
    assert p.append_marker(marker_batch(7, 0, 0, False, NOW), NOW).error == 0
    assert p.last_stable_offset == 3
    assert p.append_marker(marker_batch(8, 0, 0, True, NOW), NOW).error == 0
    assert p.last_stable_offset == 6
    assert [e.producer_id for e in aborted_transactions(p.kernel, 3, 6)] == [7]


# -- files -----------------------------------------------------------------------------------------


def abort_one(p: Partition, producer: int) -> None:
    sequence = sum(
        e.batches[-1][1] + 1 for e in known_producers(p.kernel)[0]
        if e.producer_id == producer and e.batches
    )  # fmt: skip
    admit(p.kernel, producer, 0, sequence)
    assert p.append(data_batch(producer, 0, sequence), NOW).error == 0
    assert p.append_marker(marker_batch(producer, 0, 0, False, NOW), NOW).error == 0


def test_aborted_transactions_are_in_kafkas_files(open_partition) -> None:
    p = open_partition()
    abort_one(p, 7)
    abort_one(p, 8)
    p.roll()
    abort_one(p, 7)
    p.close()
    files = sorted(p.directory.glob("*.txnindex"))
    assert [f.name for f in files] == [f"{0:020d}.txnindex", f"{4:020d}.txnindex"]
    assert list(parse_transaction_index(files[0].read_bytes())) == [
        AbortedTransaction(7, 0, 1, 2),
        AbortedTransaction(8, 2, 3, 4),
    ]
    q = open_partition(clean=False)
    assert [e.first_offset for e in aborted_transactions(q.kernel, 0, 6)] == [0, 2, 4]
    assert q.truncate_to(4) == 4
    assert not files[1].exists(), "it has no entry any more"
    assert [e.first_offset for e in aborted_transactions(q.kernel, 0, 6)] == [0, 2]


@pytest.mark.parametrize("damage", ["cut", "version", "order"])
def test_a_damaged_index_is_made_of_the_log(open_partition, damage) -> None:
    p = open_partition()
    for _ in range(3):
        abort_one(p, 7)
    p.roll()
    abort_one(p, 7)
    p.roll()
    p.close()
    path = min(p.directory.glob("*.txnindex"))
    data = path.read_bytes()
    damaged = {
        "cut": data[:-5],
        "version": data[:34] + b"\0\7" + data[36:],
        "order": data[34:] + data[:34],
    }
    path.write_bytes(damaged[damage])
    q = open_partition()
    assert [e.last_offset for e in aborted_transactions(q.kernel, 0, 8)] == [1, 3, 5, 7]
    q.roll()
    q.close()
    assert path.read_bytes() == data


def test_who_looks_while_a_log_is_cut_is_told_of_all_that_was_aborted(
    open_partition, monkeypatch
) -> None:
    """Replicas are read while they are cut (KIP-392).  What is below the cut stays known while
    batches tell of producers again."""
    p = open_partition()
    abort_one(p, 7)
    p.roll()
    abort_one(p, 7)
    abort_one(p, 8)
    known = aborted_transactions(p.kernel, 0, 6)
    assert [e.last_offset for e in known] == [1, 3, 5]
    looks = []

    def look(kernel: CommitKernel, *more: Any) -> None:
        looks.append((p.last_stable_offset, aborted_transactions(kernel, 0, 6)))
        add_batches(kernel, *more)
        looks.append((p.last_stable_offset, aborted_transactions(kernel, 0, 6)))

    add_batches = producer_history._add_batches
    monkeypatch.setattr(producer_history, "_add_batches", look)
    p.append(make_batch(), NOW)
    assert p.truncate_to(6) == 6
    assert looks == [(6, known)] * 2
    abort_one(p, 8)
    assert aborted_transactions(p.kernel, 0, 8) == [*known, AbortedTransaction(8, 6, 7, 8)]
