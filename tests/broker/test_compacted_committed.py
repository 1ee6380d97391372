"""One-sided readers of committed records of a compacted topic: whether they are in old files, in
new ones, or come from one to the other, they see no record that was aborted, and end with the table
that the committed records make."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from tests.broker.played_coordinator import Coordinator
from tests.broker.test_one_sided_committed import read_by_reads, reader
from tests.log.compacted_logs import compact

LOOKS = 10  # so often nothing comes before a reader is taken to be at the end
PRODUCERS, KEYS = 4, 12


class History:
    """Random transactions over a few keys.  `committed`: (key, value) by offset."""

    def __init__(self, broker, seed: int) -> None:
        self.coordinator = Coordinator(broker, cleanup_policy="compact", delete_retention_ms="0")
        self.partition = self.coordinator.partition
        self.chance = random.Random(seed)
        self.written: dict[int, tuple[bytes, bytes]] = {}
        self.open: dict[int, list[int]] = defaultdict(list)
        self.committed: dict[int, tuple[bytes, bytes]] = {}
        self.cleaned_to: int | None = None

    def step(self) -> None:
        producer = self.chance.randrange(PRODUCERS)
        if producer in self.open and self.chance.random() < 0.4:
            self.end(producer)
        elif self.chance.random() < 0.05:
            self.partition.roll()
        else:
            key, text = b"k%d" % self.chance.randrange(KEYS), f"{len(self.written)}"
            offset = self.coordinator.write(producer, text, key=key)
            self.written[offset] = key, text.encode()
            self.open[producer].append(offset)

    def end(self, producer: int) -> None:
        commit = self.chance.random() < 0.5
        self.coordinator.end(producer, commit=commit)
        for offset in self.open.pop(producer):
            if commit:
                self.committed[offset] = self.written[offset]

    def compact(self) -> None:
        """Everything that may be, but for a few batches at the end."""
        self.partition.roll()
        self.step()
        self.cleaned_to = compact(self.partition, self.cleaned_to).end_offset

    def table(self, start: int = 0) -> dict[bytes, bytes]:
        stable = self.partition.last_stable_offset
        return dict(kv for at, kv in sorted(self.committed.items()) if start <= at < stable)


class Follower:
    """A reader of committed records by READs, and the table that it has made."""

    def __init__(self, broker, history: History, start: int = 0) -> None:
        self.history = history
        self.start = start
        self.consumer = reader(broker, start)
        self.offset = start - 1
        self.table: dict[bytes, bytes] = {}

    def read(self, most: int) -> None:
        """At most so many records."""
        nothing = 0
        while most and nothing < LOOKS:
            message = self.consumer.poll(0)
            if message is None:
                nothing += 1
                continue
            nothing = 0
            most -= 1
            assert message.error() is None and message.offset() > self.offset
            self.offset = message.offset()
            assert self.history.committed[self.offset] == (message.key(), message.value())
            self.table[message.key()] = message.value()

    def read_to_end(self) -> None:
        self.read(1 << 30)
        assert self.table == self.history.table(self.start)

    def left_out(self) -> int:
        """How many batches were left out by the lists."""
        figures = read_by_reads(self.consumer)
        self.consumer.close()
        return figures["aborted_batches"]


@pytest.mark.parametrize("seed", range(3))
def test_lists_beside_files_that_are_compacted(broker, seed):
    """What was entered before it was compacted is read by the list that it came with; what is
    entered later by one of its own, for a file that reaches over several old ones."""
    history = History(broker, seed)
    beside = Follower(broker, history)
    left_out_of_old_files = 0
    for _ in range(4):
        for _ in range(80):
            history.step()
        beside.read_to_end()
        ends = history.partition.last_stable_offset
        starts = [0, *(history.chance.randrange(ends) for _ in range(3))]
        behind = [Follower(broker, history, start) for start in starts]
        for one in behind:
            one.read(history.chance.choice((1, 3)))
        files = [s.base_offset for s in history.partition.segments]
        history.compact()
        assert [s.base_offset for s in history.partition.segments] != files
        for one in behind:
            one.read_to_end()
            left_out_of_old_files += one.left_out()
        fresh = Follower(broker, history)
        fresh.read_to_end()
        fresh.left_out()
    for producer in list(history.open):
        history.end(producer)
    beside.read_to_end()
    assert beside.left_out() > 20 and left_out_of_old_files > 20
