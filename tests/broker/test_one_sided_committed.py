"""Readers of committed records over shm: they READ, and leave out what was aborted by READs of the
lists beside the files.  The coordinator is played by the test, which looks after every step."""

from __future__ import annotations

import random
import struct
import threading
import time

import pytest

import kdirect
from kdirect.broker import aborted_regions, handlers_fetch
from kdirect.client import connect
from kdirect.errors import ProtocolError
from kdirect.format.batch import crc32c, iterate_batches
from kdirect.log.kernel_transactions import aborted_index, aborted_transactions
from tests.broker.played_coordinator import NOW, TP, Coordinator
from tests.log.compacted_logs import compact
from tests.support import wait_until


def reader(broker, offset=0, **settings):
    made = kdirect.Consumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "isolation.level": "read_committed",
            "transport": "shm",
            **settings,
        }
    )
    made.assign({TP: offset})
    return made


def taken(consumer, expected):
    """What the consumer sees now: `expected`, and what comes beyond that in a few more looks.  A
    look may only move it to the next file."""
    out, extra, until = [], 5, time.monotonic() + 10
    while extra and time.monotonic() < until:
        message = consumer.poll(0)
        if message is not None:
            out.append(message.value().decode())
        elif len(out) >= len(expected):
            extra -= 1
    return out


def read_by_reads(consumer):
    """The counters, if no record came by a Fetch."""
    figures = consumer.statistics()
    assert figures["reads"] > 0
    assert figures.get("fetched_bytes", 0) == 0
    return figures


class History:
    """Random transactions of some producers, and what of them may be seen."""

    def __init__(self, broker, seed: int, **configs: str) -> None:
        self.coordinator = Coordinator(broker, **configs)
        self.chance = random.Random(seed)
        self.open: dict[int, list[int]] = {}
        self.told: dict[int, str] = {}  # by offset: committed records, and plain ones
        self.written: dict[int, str] = {}
        self.count = 0

    def step(self) -> None:
        chance, coordinator = self.chance, self.coordinator
        producer, what = chance.randrange(4), chance.random()
        self.count += 1
        if producer in self.open and what < 0.4:
            commit = chance.random() < 0.4
            coordinator.end(producer, commit=commit)
            for offset in self.open.pop(producer):
                if commit:
                    self.told[offset] = self.written[offset]
        elif what < 0.5:
            text = f"plain {self.count}"
            offset = coordinator.write(100, text, transactional=False)
            self.told[offset] = self.written[offset] = text
        elif what < 0.53:
            coordinator.partition.roll()
        else:
            offset = coordinator.write(producer, f"{producer} {self.count}")
            self.open.setdefault(producer, []).append(offset)
            self.written[offset] = f"{producer} {self.count}"

    def end_all(self) -> None:
        for producer in list(self.open):
            self.coordinator.end(producer, commit=False)
            del self.open[producer]

    def visible(self, offset: int = 0) -> list[str]:
        stable = self.coordinator.partition.last_stable_offset
        return [text for at, text in sorted(self.told.items()) if offset <= at < stable]


@pytest.mark.parametrize("seed", range(3))
def test_after_every_step_what_is_committed_and_below_the_last_stable_offset(broker, seed):
    history = History(broker, seed)
    follower, seen = reader(broker), []
    with follower:
        for step in range(400):
            history.step()
            if history.chance.random() < 0.3:
                seen += taken(follower, history.visible()[len(seen) :])
                assert seen == history.visible(), f"step {step}"
            if step in (150, 399):
                start = history.chance.randrange(history.coordinator.partition.log_end_offset)
                with reader(broker, start) as other:
                    wanted = history.visible(start)
                    assert taken(other, wanted) == wanted, f"from {start} at {step}"
        history.end_all()
        seen += taken(follower, history.visible()[len(seen) :])
        assert seen == history.visible()
        figures = read_by_reads(follower)
        assert figures["aborted_batches"] > 20 and figures["aborted_reads"] > 0


def test_a_full_list_is_left_for_another_one(broker):
    """One reader stays in one file while hundreds of transactions are aborted in it."""
    coordinator = Coordinator(broker)
    with reader(broker) as follower:
        expected, seen = [], []
        for i in range(300):
            coordinator.write(i % 3, f"aborted {i}")
            coordinator.end(i % 3, commit=False)
            if i % 10 == 0:
                coordinator.write(7, f"kept {i}")
                coordinator.end(7, commit=True)
                expected.append(f"kept {i}")
            if i % 7 == 0:
                seen += taken(follower, expected[len(seen) :])
                assert seen == expected
        seen += taken(follower, expected[len(seen) :])
        assert seen == expected
        figures = read_by_reads(follower)
        assert figures["aborted_batches"] == 300
        assert 2 < figures["access_requests"] < 40, "lists grow by factors"
    with reader(broker) as late:  # whose list is large from the beginning
        assert taken(late, expected) == expected
        assert read_by_reads(late)["aborted_batches"] == 300


@pytest.mark.parametrize("transport", ["shm", "auto"])
def test_who_would_have_to_know_of_too_many_reads_by_fetch(broker, monkeypatch, transport):
    """Also in the middle of a file, once its list is full."""
    monkeypatch.setattr(aborted_regions, "MOST_ENTRIES", 60)
    coordinator = Coordinator(broker)
    coordinator.write(1, "first")
    coordinator.end(1, commit=True)
    with reader(broker, transport=transport) as follower:
        assert taken(follower, ["first"]) == ["first"]
        coordinator.write(50, "long")  # it keeps all that come after from being passed
        for i in range(200):
            coordinator.write(i % 3, f"aborted {i}")
            coordinator.end(i % 3, commit=False)
        coordinator.write(7, "kept")
        coordinator.end(7, commit=True)
        coordinator.end(50, commit=True)
        assert taken(follower, ["long", "kept"]) == ["long", "kept"]
        assert follower.statistics()["fetched_bytes"] > 0
        coordinator.write(7, "last")
        coordinator.end(7, commit=True)
        assert taken(follower, ["last"]) == ["last"]


def test_a_long_transaction_among_many_that_are_aborted(broker):
    """It holds all of them back, so that every one ends before the first can be read."""
    coordinator = Coordinator(broker)
    with reader(broker) as follower:
        coordinator.write(50, "long")
        for i in range(100):
            coordinator.write(1, f"aborted {i}")
            coordinator.end(1, commit=False)
            assert taken(follower, []) == []
        coordinator.end(50, commit=True)
        assert taken(follower, ["long"]) == ["long"]
        coordinator.write(50, "never seen")
        coordinator.end(50, commit=False)
        coordinator.write(1, "last")
        assert taken(follower, []) == []
        coordinator.end(1, commit=True)
        assert taken(follower, ["last"]) == ["last"]
        read_by_reads(follower)


def test_a_topic_without_transactions_costs_no_read_of_a_list(broker):
    coordinator = Coordinator(broker)
    with reader(broker) as follower:
        for i in range(20):
            coordinator.write(1, f"{i}", transactional=False)
            assert taken(follower, [f"{i}"]) == [f"{i}"]
        assert read_by_reads(follower)["aborted_reads"] == 0


@pytest.mark.parametrize("batch_rows", [1, 1000])
def test_a_range_reader(broker, batch_rows):
    """It ends with what is aborted, too."""
    history = History(broker, 5)
    for _ in range(200):
        history.step()
    history.end_all()
    end = history.coordinator.partition.last_stable_offset
    settings = {"isolation.level": "read_committed", "transport": "shm"}
    with connect({"bootstrap.servers": broker.bootstrap_servers, **settings}) as session:
        for start in (0, end // 2):
            with session.reader(TP, start, end, target_rows=batch_rows) as ranged:
                values = [v.decode() for b in ranged for v in b.column("value").to_pylist()]
                assert values == history.visible(start)
                assert ranged.next_offset == end
                figures = ranged.statistics()
                assert figures["reads"] > 0 and not figures.get("fetched_bytes")


def test_old_files_are_deleted_under_a_reader(broker):
    """What retention takes away takes its part of the index along; a reader that is in it reads on
    by the list that it has, or is told that its offset is gone."""
    history = History(broker, 9)
    partition = history.coordinator.partition
    with reader(broker) as slow:
        for _ in range(60):
            history.step()
        expected = history.visible()
        first = slow.poll(0)
        for _ in range(100):
            history.step()
        history.end_all()
        partition.roll()
        before = len(aborted_index(partition.kernel, 0, 1 << 60))
        keep = partition.segments[len(partition.segments) // 2].base_offset
        partition.delete_records(keep)
        assert len(aborted_index(partition.kernel, 0, 1 << 60)) < before
        with reader(broker, keep) as late:
            wanted = history.visible(keep)
            assert taken(late, wanted) == wanted
        seen = [first.value().decode()] if first is not None else []
        slow_end = len(expected)
        while len(seen) < slow_end and (message := slow.poll(0)) is not None:
            seen.append(message.value().decode())
        assert seen == history.visible()[: len(seen)]


def test_what_was_aborted_is_told_as_long_as_its_old_bytes_are_read(broker, monkeypatch):
    """A reader stops in a file, which the cleaner replaces several times meanwhile; the delete
    horizon of markers passes, too.  It goes on in the old bytes, and sees nothing that was aborted,
    nor does anybody who begins anew; and when it is gone, so are the markers."""
    monkeypatch.setattr(aborted_regions, "FIRST_ENTRIES", 2)
    coordinator = Coordinator(broker, delete_retention_ms="0")
    partition = coordinator.partition
    settings = {"fetch.min.read.bytes": 2048, "fetch.max.read.bytes": 4096}

    def write(number: int) -> None:
        coordinator.write(number % 3, f"aborted {number}" + "." * 500, key=b"%d" % number)
        coordinator.end(number % 3, commit=False)
        coordinator.write(number % 3, f"kept {number}", key=b"k%d" % number)
        coordinator.end(number % 3, commit=True)

    def clean(rounds: int) -> None:
        for number in range(rounds):
            coordinator.write(9, "filler", key=b"filler", transactional=False)
            partition.roll()
            compact(partition, now_ms=NOW + number)

    with reader(broker, **settings) as slow:
        for number in range(20):
            write(number)
        partition.roll()
        seen = []
        while len(seen) < 3:
            if (message := slow.poll(0.1)) is not None:
                seen.append(message.value().decode())
        index = aborted_index(partition.kernel, 0, 1 << 60)
        assert partition.held_offsets() == []
        clean(4)
        assert partition.held_offsets() and aborted_index(partition.kernel, 0, 1 << 60) == index
        kept = [f"kept {number}" for number in range(20)]
        with reader(broker) as late:
            assert taken(late, [*kept, "filler"]) == [*kept, "filler"]
        seen += taken(slow, kept[3:])
        assert [text for text in seen if text != "filler"] == kept
        read_by_reads(slow)
    wait_until(lambda: not partition.held_offsets(), 10)
    clean(3)
    assert aborted_index(partition.kernel, 0, 1 << 60) == []
    data = b"".join(bytes(b) for b in partition.read(0, 1 << 20))
    left = {b.base_offset for b in iterate_batches(data) if b.is_control}
    assert left and not left & {entry.last_offset for entry in index}
    with reader(broker) as late:
        assert taken(late, [*kept, "filler"]) == [*kept, "filler"]


def test_what_is_deleted_while_a_fetch_asks_what_was_aborted_is_not_told(broker, monkeypatch):
    """The bytes are there still, and what says that they were aborted is not."""
    coordinator = Coordinator(broker)
    partition = coordinator.partition
    for producer, text, commit in ((1, "aborted", False), (2, "kept", True)):
        coordinator.write(producer, text)
        coordinator.end(producer, commit=commit)
    partition.roll()
    coordinator.write(2, "later")
    coordinator.end(2, commit=True)

    def ask(kernel, start, end):
        partition.delete_records(partition.segments[-1].base_offset)
        return aborted_transactions(kernel, start, end)

    monkeypatch.setattr(handlers_fetch, "aborted_transactions", ask)
    with reader(broker, transport="tcp", **{"auto.offset.reset": "earliest"}) as follower:
        assert taken(follower, ["later"]) == ["later"]


def list_of(broker):
    """The bytes of the one list that is granted, in the broker's memory."""
    (found,) = [g.aborted for g in broker.server.access._grants if g.aborted is not None]
    at = found.region.address - found.region.memory.address
    return memoryview(found.region.memory)[at : at + found.region.length]


def put_head(view, count, file_id):
    body = struct.pack("<IHHI", count, 0, file_id, 0)
    view[:16] = struct.pack("<I", crc32c(body)) + body


def put_entry(view, number, *fields):
    body = struct.pack("<Iqqqq", number, *fields)
    at = 16 + 40 * number
    view[at : at + 40] = struct.pack("<I", crc32c(body)) + body


@pytest.mark.parametrize(
    "forged", ["too many", "of another file", "not in order", "ends before it begins"]
)
def test_a_list_that_cannot_be_is_refused(broker, forged):
    """A count beyond its room leads nowhere, and what is torn is READ again."""
    coordinator = Coordinator(broker)
    with reader(broker) as follower:
        assert taken(follower, []) == []
        coordinator.write(1, "x", transactional=False)
        assert taken(follower, ["x"]) == ["x"]  # there is a file, and a list beside it
        view = list_of(broker)
        file_id = int.from_bytes(view[10:12], "little")
        coordinator.write(2, "y")
        coordinator.end(2, commit=True)
        if forged == "too many":
            put_head(view, 26, file_id)
        elif forged == "of another file":
            put_head(view, 0, file_id + 1)
        elif forged == "not in order":
            put_entry(view, 0, 7, 10, 20, 21)
            put_entry(view, 1, 7, 10, 20, 21)
            put_head(view, 2, file_id)
        else:
            put_entry(view, 0, 7, 10, 10, 11)
            put_head(view, 1, file_id)
        with pytest.raises(ProtocolError, match="list of aborted transactions"):
            taken(follower, ["y"])


def test_a_torn_list_is_read_again(broker):
    coordinator = Coordinator(broker)
    with reader(broker) as follower:
        coordinator.write(1, "x", transactional=False)
        assert taken(follower, ["x"]) == ["x"]
        view = list_of(broker)
        coordinator.write(2, "y")
        coordinator.end(2, commit=False)
        coordinator.write(2, "z")
        coordinator.end(2, commit=True)
        whole = bytes(view)
        view[20] ^= 1  # of the entry
        mend = threading.Timer(0.2, lambda: view.__setitem__(slice(None), whole))
        mend.start()
        assert taken(follower, ["z"]) == ["z"]
        mend.join()
        view[4] ^= 1  # of the head
        mend = threading.Timer(0.2, lambda: view.__setitem__(slice(None), bytes(whole)))
        coordinator.write(2, "u")
        coordinator.end(2, commit=True)
        mend.start()
        assert taken(follower, ["u"]) == ["u"]
        mend.join()
