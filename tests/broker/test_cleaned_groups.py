"""What groups have committed is the same, however often their log was compacted, and whatever of it
is exchanged while it is loaded."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kdirect.broker import state_topic
from kdirect.broker.offsets import GroupTable
from kdirect.broker.state_topic import COMPACTED, FOR_EVER, StateTopic, due_configs
from kdirect.broker.topics import OFFSETS_TOPIC
from kdirect.errors import CorruptLogError
from kdirect.format import group_records as records
from kdirect.format import layout
from kdirect.format.batch import encode_single_bytes, iterate_batches
from kdirect.format.group_records import CommittedOffset, GroupRecord
from kdirect.format.record_list import encode_records
from kdirect.log.cleaning import Cleaning, dirt_of
from kdirect.log.config import LogConfig
from kdirect.log.kernel_transactions import admit_transaction, begin_verification, marker_batch
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition
from tests.log.compacted_logs import MEMORY, NOW

LOG = TopicPartition(OFFSETS_TOPIC, 0)
GROUPS = ("a", "b", "c")
PLACES = [TopicPartition("t", i) for i in range(3)]
PRODUCERS = (7, 8, 9)
DAY_MS = 86_400_000


def topic(partition: Partition) -> StateTopic:
    """As much of it as reads a partition."""
    topics: Any = SimpleNamespace(partition=lambda name, index: partition)
    nothing: Any = None
    return StateTopic(
        OFFSETS_TOPIC, nothing, what="the offsets of consumer groups", partitions=1,
        configs=COMPACTED, topics=topics, appends=nothing, admin=nothing,
    )  # fmt: skip


def loaded(partition: Partition) -> GroupTable:
    table = GroupTable()
    topic(partition).read(partition, table.apply, pending=table.pending)
    return table


def shown(table: GroupTable) -> tuple[Any, ...]:
    """What a coordinator tells of a table."""
    offsets = {group: dict(found) for group, found in table.offsets.items() if found}
    return offsets, table.groups, {group: table.unstable.of_group(group) for group in GROUPS}


class History:
    """Random commits, deletions and transactions, in the log and in a table that was there."""

    def __init__(self, partition: Partition, rng: random.Random) -> None:
        self.partition, self.rng = partition, rng
        self.table = GroupTable()
        self.open: set[int] = set()
        self.sequences = dict.fromkeys(PRODUCERS, 0)
        self.number = 0
        self.cleaned_to: int | None = None
        self.now_ms = NOW

    def step(self) -> None:
        what = self.rng.random()
        if what < 0.45:
            self.commit()
        elif what < 0.55:
            self.save_group()
        elif what < 0.75:
            self.commit_in_transaction(self.rng.choice(PRODUCERS))
        elif what < 0.92 and self.open:
            self.end(self.rng.choice(sorted(self.open)))
        elif what >= 0.92:
            self.partition.roll()

    def _row(self) -> tuple[bytes, bytes]:
        self.number += 1
        tp = self.rng.choice(PLACES)
        key = records.offset_key(self.rng.choice(GROUPS), tp.topic, tp.partition)
        return key, records.offset_value(CommittedOffset(self.number, -1, "", NOW))

    def commit(self) -> None:
        key, value = self._row()
        self._append(key, None if self.rng.random() < 0.25 else value)

    def save_group(self) -> None:
        key = records.group_key(self.rng.choice(GROUPS))
        self.number += 1
        record = GroupRecord("consumer", self.number, "range", None, 1, ())
        self._append(key, None if self.rng.random() < 0.3 else records.group_value(record))

    def _append(self, key: bytes, value: bytes | None) -> None:
        batch = encode_single_bytes(value, key, self.now_ms)
        assert self.partition.append(batch, self.now_ms).error == 0
        self.table.apply(key, value)

    def commit_in_transaction(self, producer: int) -> None:
        kernel, sequence = self.partition.kernel, self.sequences[producer]
        error, ticket = begin_verification(kernel, producer, 0, sequence, self.now_ms)
        assert not error
        assert not ticket or admit_transaction(kernel, producer, 0, ticket)
        rows = [self._row() for _ in range(self.rng.randint(1, 3))]
        batch = encode_records(
            [(key, value, None, self.now_ms) for key, value in rows],
            producer_id=producer, producer_epoch=0, base_sequence=sequence,
            attributes=layout.ATTRIBUTE_TRANSACTIONAL,
        )  # fmt: skip
        assert self.partition.append(batch, self.now_ms).error == 0
        self.sequences[producer] += len(rows)
        self.open.add(producer)
        for key, value in rows:
            self.table.pending(producer, key, value)

    def end(self, producer: int) -> None:
        commit = self.rng.random() < 0.6
        marker = marker_batch(producer, 0, 1, commit, self.now_ms)
        assert self.partition.append_marker(marker, self.now_ms).error == 0
        self.open.discard(producer)
        self.table.ended(producer, commit)

    def clean(self) -> None:
        dirt = dirt_of(self.partition, self.cleaned_to, self.now_ms)
        done = Cleaning(self.partition, dirt, MEMORY, self.now_ms).run()
        self.cleaned_to = done.end_offset


@pytest.fixture
def partition(tmp_path: Path) -> Iterator[Partition]:
    config = LogConfig(segment_bytes=1 << 16, compacts=True, deletes=False)
    with LogManager([tmp_path], config) as logs:
        yield logs.create_partition(LOG)


@pytest.mark.parametrize("round_", range(12))
def test_what_a_group_has_committed_outlives_every_cleaning(
    partition: Partition, seed: int, round_: int
) -> None:
    """Days go by between cleanings, so tombstones and markers go as well."""
    history = History(partition, random.Random(seed * 100 + round_))
    fewest = 1 << 62
    for _ in range(60):
        for _ in range(20):
            history.step()
        history.now_ms += history.rng.choice([0, DAY_MS // 3, 2 * DAY_MS])
        if history.rng.random() < 0.6:
            history.clean()
        assert shown(loaded(partition)) == shown(history.table)
        fewest = min(fewest, partition.size)
    for producer in sorted(history.open):
        history.end(producer)
    partition.roll()
    for _ in range(3):
        history.now_ms += 2 * DAY_MS
        history.clean()
        history.cleaned_to = None  # all of it is looked at once more
    assert shown(loaded(partition)) == shown(history.table)
    data = b"".join(map(bytes, partition.read(partition.log_start_offset, 1 << 20)))
    batches = list(iterate_batches(data))
    kept = sum(b.records_count for b in batches if not b.is_control)
    assert kept <= len(GROUPS) * (len(PLACES) + 1), "the last of each key, and no tombstone"


@pytest.mark.parametrize("round_", range(8))
def test_segments_are_exchanged_while_a_log_is_loaded(
    partition: Partition, seed: int, round_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(partition, random.Random(seed * 100 + round_))
    for _ in range(400):
        history.step()
    monkeypatch.setattr(state_topic, "READ_BYTES", 300)
    read, reads = partition.read, []

    def read_and_clean(offset: int, size: int) -> Any:
        reads.append(offset)
        if len(reads) % 5 == 0:
            history.now_ms += 1000
            history.cleaned_to = None
            history.clean()
        return read(offset, size)

    monkeypatch.setattr(partition, "read", read_and_clean)
    size = partition.size
    assert shown(loaded(partition)) == shown(history.table)
    assert len(reads) > 20 and partition.size < size


@pytest.mark.parametrize("with_transactions", [False, True])
def test_a_damaged_batch_is_named_wherever_it_lies(
    partition: Partition, seed: int, with_transactions: bool
) -> None:
    """In the middle of several small segments, which are read at once; markers, too."""
    history = History(partition, random.Random(seed))
    for i in range(24):
        history.commit()
        if with_transactions:
            history.commit_in_transaction(7)
            history.end(7)
        if i % 8 == 7:
            partition.roll()
    known = shown(loaded(partition))
    for segment in partition.segments[:-1]:
        data = bytearray(segment.path.read_bytes()[: segment.size])
        for batch in iterate_batches(bytes(data)):
            # What the CRC covers, and the CRC itself.
            first, end = batch.position + layout.BATCH_CRC, batch.position + batch.size
            place, bit = history.rng.randrange(first, end), 1 << history.rng.randrange(8)
            with open(segment.path, "r+b", buffering=0) as file:
                os.pwrite(file.fileno(), bytes([data[place] ^ bit]), place)
                with pytest.raises(CorruptLogError, match=f"record {batch.base_offset} of"):
                    loaded(partition)
                os.pwrite(file.fileno(), bytes([data[place]]), place)
    assert shown(loaded(partition)) == known


OWN = {**COMPACTED, "compression.type": "producer", "segment.bytes": "104857600"}


@pytest.mark.parametrize(
    ("found", "due"),
    [
        (OWN, None),
        ({"cleanup.policy": "compact, delete", "segment.bytes": "5"}, None),
        ({}, OWN),
        ({**FOR_EVER, "segment.bytes": str(4 << 20)}, OWN),
        (
            {**FOR_EVER, "segment.bytes": "1048576", "min.insync.replicas": "2"},
            {**OWN, "segment.bytes": "1048576", "min.insync.replicas": "2"},
        ),
        ({"cleanup.policy": "delete", "retention.ms": "5"}, {**OWN, "retention.ms": "5"}),
    ],
    ids=["as made", "changed", "copied", "old", "old with more", "by somebody"],
)
def test_the_properties_that_a_topic_is_to_have(
    found: dict[str, str], due: dict[str, str] | None
) -> None:
    assert due_configs(found, OWN) == due
    assert due is None or due_configs(due, OWN) is None
