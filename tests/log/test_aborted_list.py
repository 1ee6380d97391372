"""The lists of aborted transactions that readers READ: what is in them when a slot tells of a last
stable offset, when they are full, and what they cannot begin with."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import random
import signal
import struct
import time

import pytest

from kdirect.format import layout
from kdirect.format.batch import crc32c
from kdirect.format.segment_files import AbortedTransaction, parse_transaction_index
from kdirect.log.aborted_index import AbortedFiles
from kdirect.log.kernel_head import seal_head
from kdirect.log.kernel_transactions import (
    aborted_in,
    aborted_index,
    aborted_transactions,
    admit_transaction,
    append_marker,
    begin_verification,
    forget_aborted,
    marker_batch,
    remove_aborted,
    write_aborted_list,
)
from kdirect.log.segment import Segment, file_name
from tests.log.conftest import make_batch

NOW = int(time.time() * 1000)
FOREVER = (1 << 63) - 1


class Memory:
    """A slot, and a list with room for so many entries beside it."""

    def __init__(self, entries: int, list_at: int = 64) -> None:
        self.entries = entries
        self.list_at = list_at
        self.map = mmap.mmap(-1, list_at + layout.ABORTED_HEAD_BYTES + 40 * entries)
        self.slot = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.address = self.slot + list_at

    def last_stable_offset(self) -> int:
        return struct.unpack_from("<q", self.map, layout.SLOT_LAST_STABLE_OFFSET)[0]

    def read(self) -> tuple[list[AbortedTransaction], bool, int]:
        """(the entries, is it full, the file id)"""
        raw = self.map[self.list_at :]
        guard, count, flags, file_id = struct.unpack_from("<IIHH", raw)
        assert guard == crc32c(raw[4:16])
        out = []
        for i in range(count):
            at = layout.ABORTED_HEAD_BYTES + i * layout.ABORTED_ENTRY_BYTES
            entry = raw[at : at + layout.ABORTED_ENTRY_BYTES]
            assert struct.unpack_from("<II", entry) == (crc32c(entry[4:]), i)
            out.append(AbortedTransaction(*struct.unpack_from("<qqqq", entry, 8)))
        return out, bool(flags & layout.ABORTED_FLAG_FULL), file_id


class Writers:
    """Producers with transactions on one kernel."""

    def __init__(self, kernel) -> None:
        self.kernel = kernel
        self.sequences: dict[int, int] = {}

    def write(self, producer: int) -> int:
        sequence = self.sequences.get(producer, 0)
        self.sequences[producer] = sequence + 1
        _, ticket = begin_verification(self.kernel, producer, 0, sequence, NOW)
        assert ticket == 0 or admit_transaction(self.kernel, producer, 0, ticket)
        data = make_batch(
            producer_id=producer, producer_epoch=0, sequence=sequence, transactional=True
        )
        result = self.kernel.append(data, NOW)
        assert result.error == 0
        return result.base_offset

    def end(self, producer: int, *, commit: bool = False) -> int:
        batch = marker_batch(producer, 0, 0, commit, NOW)
        return append_marker(self.kernel, batch, NOW).base_offset

    def abort(self, producer: int) -> tuple[int, int]:
        return self.write(producer), self.end(producer)


@pytest.fixture
def writers(head):
    h = head()
    made = Writers(h.kernel)
    made.head = h
    return made


def test_a_list_grows_with_what_is_aborted(writers) -> None:
    kernel, memory = writers.kernel, Memory(4)
    first = writers.abort(7)
    assert kernel.attach_slot(memory.slot, 5, aborted=(memory.address, 4, 0))
    assert memory.read() == ([(7, *first, first[1] + 1)], False, 5)
    begun = writers.write(8)
    second = writers.abort(7)
    writers.write(9)
    writers.end(9, commit=True)
    assert memory.read()[0][1:] == [(7, *second, begun)]
    third = (8, begun, writers.end(8))
    assert [e[:3] for e in memory.read()[0]] == [(7, *first), (7, *second), third]
    kernel.detach_slot(memory.slot)
    before = memory.read()
    writers.abort(7)
    assert memory.read() == before, "nobody writes it any more"


def end_where_no_page_may_be_written(writers: Writers, page: int) -> None:
    """A copy of this process aborts the transaction of producer 7.  It dies at the first store into
    the page at that address; what it has stored elsewhere before is seen here."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, mmap.PROT_READ)
        try:
            writers.end(7)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


@pytest.mark.parametrize("what", ["an entry", "the count", "the slot"])
def test_an_entry_comes_first_then_the_count_and_then_the_slot(writers, what) -> None:
    """Each of the three lies in a page of its own, and whoever writes it dies: what comes later in
    the order is not there yet."""
    page = mmap.PAGESIZE
    memory = Memory(4, 2 * page - layout.ABORTED_HEAD_BYTES)
    begun = writers.write(7)
    assert writers.kernel.attach_slot(memory.slot, 5, aborted=(memory.address, 4, 0))
    pages = {"the slot": 0, "the count": page, "an entry": 2 * page}
    end_where_no_page_may_be_written(writers, memory.slot + pages[what])
    entries, _, _ = memory.read()
    assert memory.last_stable_offset() == begun, "a slot tells of what no list has"
    assert [e[:2] for e in entries] == ([(7, begun)] if what == "the slot" else [])
    written = any(memory.map[2 * page : 2 * page + layout.ABORTED_ENTRY_BYTES])
    assert written == (what != "an entry")


@pytest.mark.parametrize("seed", range(4))
def test_who_reads_a_slot_and_then_the_list_knows_all_below(writers, seed) -> None:
    """At each moment of a random history; a list that is full tells what lies below its last
    entry's last stable offset."""
    chance, kernel = random.Random(seed), writers.kernel
    memory = Memory(chance.choice((3, 200)))
    assert kernel.attach_slot(memory.slot, 5, aborted=(memory.address, memory.entries, 0))
    open_ones: set[int] = set()
    full_at, file_end = -1, FOREVER
    for step in range(300):
        producer = chance.randrange(5)
        if producer in open_ones and chance.random() < 0.5:
            writers.end(producer, commit=chance.random() < 0.4)
            open_ones.discard(producer)
        else:
            writers.write(producer)
            open_ones.add(producer)
        if chance.random() < 0.1:  # cleaning takes entries out, which were told before
            index = aborted_index(kernel, 0, min(memory.last_stable_offset(), file_end))
            gone = chance.sample(index, min(len(index), 3))
            assert remove_aborted(kernel, [e.last_offset for e in gone]) == len(gone)
        if step in (100, 200):  # the slot tells of a segment that is sealed, if it is not stable
            file_end = min(file_end, seal_head(kernel).end_offset)
            writers.head.install()
        stable = min(memory.last_stable_offset(), file_end)
        entries, full, _ = memory.read()
        if full:
            full_at = step if full_at < 0 else full_at
            stable = min(stable, entries[-1].last_stable_offset)
        missing = set(aborted_transactions(kernel, 0, stable)) - set(entries)
        assert all(e.first_offset >= stable for e in missing), step
        if kernel.statistics()["log_slots"] == 0:
            break
    assert (full_at >= 0) == (memory.entries == 3)


def test_a_finished_file_has_a_list_of_its_range(writers) -> None:
    kernel = writers.kernel
    aborted = [writers.abort(i) for i in range(6)]
    begun = writers.write(20)
    aborted += [writers.abort(i) for i in range(4)]
    writers.end(20)
    start, end = aborted[2][0], aborted[4][1]
    assert aborted_in(kernel, start, end) == 3
    memory = Memory(3)
    assert write_aborted_list(kernel, memory.address, 3, 0, start, end)
    entries, full, file_id = memory.read()
    assert [e[1:3] for e in entries] == aborted[2:5] and not full and file_id == 0
    assert entries == aborted_transactions(kernel, start, end)
    # One that is open all the time keeps the others from the end of the list.
    assert aborted_in(kernel, begun, begun + 1) == 5
    memory = Memory(1)
    assert write_aborted_list(kernel, memory.address, 1, 0, begun, begun + 1)
    marker = aborted_index(kernel, 0, FOREVER)[-1].last_offset
    assert [e[:3] for e in memory.read()[0]] == [(20, begun, marker)]


def test_what_is_forgotten_is_not_told_as_if_it_were_all(writers) -> None:
    kernel, memory = writers.kernel, Memory(8)
    aborted = [writers.abort(i) for i in range(4)]
    assert kernel.attach_slot(memory.slot, 5, aborted=(memory.address, 8, 0))
    gone = aborted[1][1] + 1
    forget_aborted(kernel, gone)
    later = Memory(8)
    assert not write_aborted_list(kernel, later.address, 8, 0, gone - 1, FOREVER)
    assert aborted_in(kernel, gone - 1, FOREVER) == -1
    assert not kernel.attach_slot(later.slot, 6, aborted=(later.address, 8, 0))
    assert write_aborted_list(kernel, later.address, 8, 0, gone, FOREVER)
    assert [e[1:3] for e in later.read()[0]] == aborted[2:]
    aborted.append(writers.abort(9))
    assert [e[1:3] for e in memory.read()[0]] == aborted, "one that was there goes on"


def test_an_entry_that_cleaning_takes_out_stays_in_lists_that_have_it(writers) -> None:
    """Whoever has such a list may READ old bytes; and no entry comes twice, or not at all."""
    kernel, memory, full = writers.kernel, Memory(8), Memory(2)
    aborted = [writers.abort(i) for i in range(5)]
    assert kernel.attach_slot(memory.slot, 5, aborted=(memory.address, 8, 0))
    assert kernel.attach_slot(full.slot, 6, aborted=(full.address, 2, 0))
    assert remove_aborted(kernel, [aborted[3][1], aborted[1][1], 1 << 40]) == 2
    left = [aborted[i] for i in (0, 2, 4)]
    assert [e[1:3] for e in aborted_index(kernel, 0, FOREVER)] == left
    for producer in (8, 9):
        aborted.append(writers.abort(producer))
        left.append(aborted[-1])
    assert [e[1:3] for e in memory.read()[0]] == aborted
    assert full.read()[1] and [e[1:3] for e in full.read()[0]] == aborted[:2]
    later = Memory(8)
    assert write_aborted_list(kernel, later.address, 8, 0, 0, FOREVER)
    assert [e[1:3] for e in later.read()[0]] == left
    assert remove_aborted(kernel, []) == 0
    forget_aborted(kernel, left[1][1] + 1)
    left.append(writers.abort(7))
    assert [e[1:3] for e in memory.read()[0]] == [*aborted, left[-1]]
    assert [e[1:3] for e in aborted_index(kernel, 0, FOREVER)] == left[2:]


def test_a_file_is_written_again_where_as_many_entries_are_others(writers, tmp_path) -> None:
    kernel = writers.kernel
    files, segments = AbortedFiles(tmp_path), [Segment(tmp_path, 0, end_offset=1000)]
    for _ in range(2):
        marker = writers.abort(7)[1]
        files.write(kernel, segments)
        (entry,) = parse_transaction_index((tmp_path / file_name(0, ".txnindex")).read_bytes())
        assert entry.last_offset == marker
        assert remove_aborted(kernel, [marker]) == 1
    files.write(kernel, segments)
    assert not list(tmp_path.iterdir())
