"""CountRecords: what a broker says of how many records lie in a range of offsets is what reading
the range gives, or it says nothing."""

from __future__ import annotations

import random

import pytest

import kdirect
from kdirect.client.record_counts import CountWanted
from kdirect.errors import KdirectError
from kdirect.log import record_count
from kdirect.log.record_count import Allowance, CountedRange
from tests.broker.played_coordinator import NOW, TP, Coordinator
from tests.log.compacted_logs import compact, keyed

KEYS = 12


class History:
    """Random batches of several records, of none or of one of three transactions, over a few keys;
    now and then the log is compacted, or begins later, or its leader restarts."""

    def __init__(self, broker, seed: int) -> None:
        self.chance = random.Random(seed)
        self.coordinator = Coordinator(broker, cleanup_policy="compact,delete")
        self.partition = self.coordinator.partition
        self.open: set[int] = set()
        self.cleaned_to: int | None = None

    def step(self) -> None:
        chance = self.chance
        key = b"k%d" % chance.randrange(KEYS)
        if chance.random() < 0.6:
            records = [(b"k%d" % chance.randrange(KEYS), b"v") for _ in range(chance.randint(1, 9))]
            self.partition.append(keyed(records, codec=chance.choice([0, 4])), NOW)
        elif self.open and chance.random() < 0.5:
            producer = chance.choice(sorted(self.open))
            self.open.remove(producer)
            self.coordinator.end(producer, commit=chance.random() < 0.5)
        else:
            producer = chance.randrange(3)
            self.open.add(producer)
            self.coordinator.write(producer, "in a transaction", key=key)
        if chance.random() < 0.05:
            self.partition.roll()

    def compact(self) -> None:
        self.partition.roll()
        self.step()
        self.cleaned_to = compact(self.partition, self.cleaned_to).end_offset

    def ranges(self, end: int) -> list[CountWanted]:
        start = self.partition.log_start_offset
        ends = [sorted(self.chance.randint(start, end) for _ in range(2)) for _ in range(10)]
        return [CountWanted(TP, a, b) for a, b in [(start, end), *ends]]


def read(session, x: CountWanted) -> int:
    with session.reader(x.tp, x.start, x.stop) as reader:
        return sum(batch.num_rows for batch in reader)


@pytest.mark.parametrize("seed", range(4))
def test_counts_are_what_reading_gives(broker, seed, monkeypatch) -> None:
    if seed % 2:  # several answers for one range, each of a few batches
        monkeypatch.setattr(record_count, "MOST_BYTES", 400)
    history = History(broker, seed)
    levels = ("read_uncommitted", "read_committed")
    settings = {"bootstrap.servers": broker.bootstrap_servers}
    sessions = {x: kdirect.connect(settings | {"isolation.level": x}) for x in levels}
    told = dict.fromkeys(levels, 0)
    untold = dict.fromkeys(levels, 0)
    for turn in range(8):
        for _ in range(25):
            history.step()
        if turn % 3 == 1:
            history.compact()
        if turn == 5:
            history.partition.delete_records(history.partition.last_stable_offset // 3)
        for level, session in sessions.items():
            _, end = session.watermarks([TP])[TP]
            wanted = history.ranges(end)
            found = session.count_records(wanted)
            assert found.keys() <= set(wanted)
            for x in wanted:
                if x in found:
                    assert found[x] == read(session, x), (seed, turn, level, x)
            told[level] += len(found)
            untold[level] += len(wanted) - len(found)
    # The whole partition is always told without transactions; ends within what was compacted are
    # not, nor what transactions may have aborted.
    assert told["read_uncommitted"] > untold["read_uncommitted"] > 0
    assert 0 < told["read_committed"] < untold["read_committed"]
    whole = CountWanted(TP, history.partition.log_start_offset, history.partition.high_watermark)
    assert sessions["read_uncommitted"].count_records([whole]).keys() == {whole}


def test_without_a_transaction_committed_records_are_counted(broker) -> None:
    coordinator = Coordinator(broker)
    for number in range(7):
        coordinator.write(1, f"{number}", transactional=False)
    coordinator.write(2, "open")
    session = kdirect.connect(
        {"bootstrap.servers": broker.bootstrap_servers, "isolation.level": "read_committed"}
    )
    before, over = CountWanted(TP, 0, 7), CountWanted(TP, 0, 8)
    assert session.count_records([before, over]) == {before: 7}
    coordinator.end(2, commit=True)
    after = CountWanted(TP, 8, 9)  # a marker alone
    assert session.count_records([before, over, after]) == {before: 7, after: 0}


def test_what_is_not_there_is_not_counted(broker) -> None:
    coordinator = Coordinator(broker)
    for number in range(20):
        coordinator.write(1, f"{number}", transactional=False)
    coordinator.partition.delete_records(5)
    session = kdirect.connect(broker.bootstrap_servers)
    topic_id = session.admin.list_topics()["t"].topic_id
    there, below, above = (CountWanted(TP, *x) for x in ((5, 20), (4, 20), (5, 21)))
    gone = CountWanted(kdirect.TopicPartition("none", 0), 0, 1)
    wanted = [there, below, above, gone]
    assert session.count_records(wanted, topic_ids={"t": topic_id}) == {there: 15}
    session.admin.create_topic("u", 1)
    of_another = {"t": session.admin.list_topics()["u"].topic_id}
    assert session.count_records([there], topic_ids=of_another) == {}


def test_a_damaged_batch_tells_no_number(broker) -> None:
    coordinator = Coordinator(broker, segment_bytes="100000")
    for _ in range(3):
        coordinator.partition.append(keyed([(b"k", b"v")] * 4), NOW)
    coordinator.partition.roll()
    (segment, *_) = coordinator.partition.segments
    size = len(keyed([(b"k", b"v")] * 4))
    assert coordinator.partition.count_records(0, 12, committed_only=False) == CountedRange(12, 12)
    with open(segment.path, "r+b") as f:
        f.seek(size + 57 + 3)  # the number of records of the second batch
        f.write(b"\x03")
    session = kdirect.connect(broker.bootstrap_servers)
    whole, first = CountWanted(TP, 0, 12), CountWanted(TP, 0, 4)
    assert session.count_records([whole, first]) == {first: 4}
    with pytest.raises(KdirectError):
        read(session, whole)


def test_a_batch_is_counted_in_part_at_both_ends(broker) -> None:
    coordinator = Coordinator(broker)
    coordinator.partition.append(keyed([(b"k", b"v")] * 50), NOW)
    count = coordinator.partition.count_records
    assert count(10, 30, committed_only=False) == CountedRange(20, 30)
    assert count(0, 0, committed_only=False) == CountedRange(0, 0)
    assert count(50, 50, committed_only=True) == CountedRange(0, 50)
    assert count(30, 10, committed_only=False) is None


def test_all_ranges_of_an_answer_have_one_allowance(broker) -> None:
    coordinator = Coordinator(broker)
    batch = keyed([(b"k", b"v")] * 4)
    for _ in range(9):
        coordinator.partition.append(batch, NOW)
    count = coordinator.partition.count_records
    allowance = Allowance(3 * len(batch))
    for reached in (12, 4, 4):  # then a batch each, so that every answer comes further
        found = count(0, 36, committed_only=False, allowance=allowance)
        assert found == CountedRange(reached, reached)
    session = kdirect.connect(broker.bootstrap_servers)
    looked_at = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_count, "MOST_BYTES", 3 * len(batch))
        whole = record_count.count

        def counted(*arguments, **more):
            found = whole(*arguments, **more)
            looked_at.append(found.next_offset - arguments[2])
            return found

        patch.setattr(record_count, "count", counted)
        wanted = [CountWanted(TP, 0, 36), CountWanted(TP, 0, 8)]
        assert session.count_records(wanted) == {wanted[0]: 36, wanted[1]: 8}
    assert looked_at == [12, 4, 12, 4, 12]
