"""Compaction of one log: what is kept, what a crash leaves, and what readers see meanwhile."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kdirect.errors import ClosedError, ConfigError, CorruptLogError
from kdirect.failpoints import VARIABLE
from kdirect.format import layout
from kdirect.format.batch import CODEC_NAMES, crc32c, iterate_batches
from kdirect.format.compression import Compressor
from kdirect.log.cleaning import Cleaning, dirt_of
from kdirect.log.cleaning_rules import CompactionRules, SegmentFacts, grouped, look_at
from kdirect.log.config import LogConfig
from kdirect.log.key_offsets import KeyOffsets, siphash128
from kdirect.log.manager import LogManager
from kdirect.model import TopicPartition
from tests.log.compacted_logs import (
    MEMORY,
    NOW,
    compact,
    fill,
    keyed,
    last_of_each_key,
    records_of,
)

TP = TopicPartition("t", 0)
DAY = 86_400_000


# -- the table of keys -----------------------------------------------------------------------------


def test_the_hash_is_siphash_of_its_authors() -> None:
    """Vectors of the reference implementation."""
    secret = bytes(range(16))
    assert siphash128(secret, b"").hex() == "a3817f04ba25a8e66df67214c7550293"
    assert siphash128(secret, b"\0").hex() == "da87c1d86b99af44347659119b22fc45"


def test_the_table_knows_the_last_offset_of_each_key_until_it_is_full() -> None:
    table = KeyOffsets(1000, 0.9)
    model = {}
    rng = random.Random(5)
    offset = 0
    while len(model) < 900:
        key = b"key-%d" % rng.randrange(2000)
        assert table.put(key, offset)
        model[key] = offset
        offset += 1
    assert not table.put(b"one more", offset), "a table that is full says so"
    assert all(table.get(key) == last for key, last in model.items())
    assert table.get(b"unknown") == -1 and table.used == 900
    assert table.latest_offset == offset - 1
    with pytest.raises(ConfigError, match="holds no key"):
        KeyOffsets(0)


# -- rules -----------------------------------------------------------------------------------------


def facts(base: int, end: int, size: int, newest: int = 0, first: int = 0) -> SegmentFacts:
    return SegmentFacts(base, end, size, 8, 12, newest, lambda: first)


LOG = [facts(0, 100, 50, 1000, 900), facts(100, 200, 30, 2000, 1900), facts(200, 250, 20, 3000)]
RULES = CompactionRules(0.5, 0, 1 << 62)
OLD = CompactionRules(0.5, 0, 100)


@pytest.mark.parametrize(
    ("rules", "state", "found"),
    [
        (RULES, {}, (0, 200, 0, 80, 0, False)),
        (RULES, {"cleaned_to": 100}, (100, 200, 50, 30, 0, False)),
        # not above the last stable offset, in whole segments
        (RULES, {"last_stable": 150}, (0, 100, 0, 50, 0, False)),
        (RULES, {"last_stable": 50}, (0, 0, 0, 0, 0, False)),
        # nothing that is younger than the minimal lag
        (CompactionRules(0.5, 5000, 1 << 62), {"now_ms": 6500}, (0, 100, 0, 50, 0, False)),
        # what is too old is due, however little it is
        (OLD, {"now_ms": 2100, "cleaned_to": 100}, (100, 200, 50, 30, 100, False)),
        # a checkpoint that does not fit the log
        (RULES, {"cleaned_to": 251}, (0, 200, 0, 80, 0, True)),
        (RULES, {"log_start": 120, "cleaned_to": 50}, (120, 200, 50, 30, 0, True)),
        # one of another log, that had the name before
        (RULES, {"cleaned_to": 100, "gaps_below": 0}, (0, 200, 0, 80, 0, True)),
        (RULES, {"cleaned_to": 100, "log_start": 100, "gaps_below": 0},
         (100, 200, 50, 30, 0, False)),
    ],
)  # fmt: skip
def test_what_of_a_log_may_be_compacted(rules, state, found) -> None:
    known = {"log_start": 0, "last_stable": 250, "gaps_below": 250, "cleaned_to": None}
    known |= {"now_ms": 10_000, **state}
    assert tuple(look_at(LOG, rules, **known)) == found


def test_a_log_is_due_by_its_ratio_or_its_delay() -> None:
    state = {"log_start": 0, "last_stable": 250, "gaps_below": 250, "now_ms": 10_000}
    dirt = look_at(LOG, RULES, cleaned_to=100, **state)
    assert dirt.ratio == 30 / 80 and dirt.is_due(0.3) and not dirt.is_due(0.4)
    assert look_at(LOG, CompactionRules(0.9, 0, 100), cleaned_to=100, **state).is_due(0.9)
    assert not look_at(LOG, RULES, cleaned_to=200, **state).is_due(0.0)


def test_neighbours_are_joined_as_far_as_one_segment_may_grow() -> None:
    log = [facts(i * 10, i * 10 + 10, 40) for i in range(5)]
    assert grouped(log, 100, 1000) == [[0, 1], [2, 3], [4]]
    assert grouped(log, 1000, 24) == [[0, 1], [2, 3], [4]], "the time indexes fill up"
    far = [facts(0, 10, 10), facts(10, 20, 0), facts(1 << 31, (1 << 31) + 5, 10)]
    assert grouped(far, 100, 1000) == [[0, 1], [2]], "offsets have 31 bits in an index"


# -- one log ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_a_compacted_log_makes_the_same_table(open_partition, seed) -> None:
    """Again and again, with every codec, with a table that is too small for the keys, beside a
    reader that began before; and what is left of the clean part is one record for each key."""
    rng = random.Random(seed)
    p = open_partition(compacts=True, deletes=False)
    appended = []
    cleaned_to = None
    for round_ in range(4):
        appended += fill(p, rng, 40, 30)
        before = p.read(p.log_start_offset, 1 << 30)
        held = [bytes(b) for b in before]
        table_bytes = rng.choice([1 << 20, 24 * 12])
        done = compact(p, cleaned_to, table_bytes=table_bytes)
        cleaned_to = done.end_offset
        assert [bytes(b) for b in before] == held, "who reads the old files goes on"
        kept = records_of(p)
        assert set(kept) <= set(appended), "offsets, values and timestamps stay what they were"
        assert last_of_each_key(kept) == last_of_each_key(appended)
        clean = [r.key for r in kept if r.offset < cleaned_to]
        assert len(clean) == len(set(clean)), f"round {round_}: one record for each key"
        for offset in rng.sample(range(p.log_end_offset), 20):
            assert [r for r in records_of(p, offset) if r.offset >= offset] == [
                r for r in kept if r.offset >= offset
            ]
        clean_end = rng.random() < 0.5
        end = p.log_end_offset
        p = open_partition(compacts=True, deletes=False, clean=clean_end)
        assert records_of(p) == kept and p.log_end_offset == end
        assert not list(p.directory.glob("*.cleaned")) + list(p.directory.glob("*.swap"))


def test_tombstones_stay_until_their_horizon(open_partition) -> None:
    p = open_partition(compacts=True, deletes=False, delete_retention_ms=1000)
    p.append(keyed([(b"a", b"1"), (b"b", b"1")]))
    p.append(keyed([(b"a", None)]))
    p.roll()
    done = compact(p, None, now_ms=NOW)
    assert [(r.key, r.value) for r in records_of(p)] == [(b"b", b"1"), (b"a", None)]
    batches = list(iterate_batches(bytes(p.read(2, 1000)[0])))
    assert batches[0].attributes & 64 and batches[0].base_timestamp == NOW + 1000, "its horizon"
    assert records_of(p)[1].timestamp_ms == NOW, "the record's own time stays"
    p.append(keyed([(b"c", b"1")]))
    p.roll()
    done = compact(p, done.end_offset, now_ms=NOW + 999)
    assert [r.key for r in records_of(p)] == [b"b", b"a", b"c"]
    p.append(keyed([(b"d", b"1")]))
    p.roll()
    compact(p, done.end_offset, now_ms=NOW + 1000)
    assert [r.key for r in records_of(p)] == [b"b", b"c", b"d"]


def test_an_idle_producer_is_known_after_its_records_are_gone(open_partition) -> None:
    """Its last batch stays, empty, so that what it repeats after a crash is noticed."""
    p = open_partition(compacts=True, deletes=False)
    repeated = keyed([(b"a", b"1"), (b"b", b"1")], producer=(9, 0, 0))
    p.append(repeated)
    p.append(keyed([(b"a", b"2"), (b"b", b"2"), (b"c", b"2")]))
    p.roll()
    compact(p)
    first = next(iter(iterate_batches(bytes(p.read(0, 1000)[0]))))
    assert (first.records_count, first.last_offset_delta, first.producer_id) == (0, 1, 9)
    for path in p.directory.glob("*.snapshot"):
        path.unlink()
    p = open_partition(compacts=True, deletes=False, clean=False)
    result = p.append(repeated)
    assert result.duplicate and result.base_offset == 0
    assert p.append(keyed([(b"z", b"1")], producer=(9, 0, 7))).error == 45, "out of order"


def test_what_is_damaged_is_not_compacted(open_partition) -> None:
    p = open_partition(compacts=True, deletes=False)
    p.append(keyed([(b"a", b"1" * 100)]))
    p.append(keyed([(b"a", b"2" * 100)]))
    p.roll()
    p.flush()
    path = p.segments[0].path
    damaged = bytearray(path.read_bytes())
    damaged[120] ^= 1
    with open(path, "r+b") as file:  # in place: it is mapped
        file.write(damaged)
    with pytest.raises(CorruptLogError, match="damaged"):
        compact(p)
    assert path.read_bytes() == damaged and not list(p.directory.glob("*.cleaned"))


@pytest.mark.parametrize("codec", [0, 1])
def test_records_that_could_not_be_compacted_are_refused(open_partition, codec) -> None:
    """A record whose offset is not one of its batch would end each cleaning of the log."""
    p = open_partition(compacts=True, deletes=False)
    header = layout.BATCH_HEADER_BYTES
    batch = bytearray(keyed([(b"a", b"1"), (b"b", b"1")]))
    assert batch[header + 3] == 0, "the first one's offset delta"
    for delta, error in ((-1, 87), (2, 87), (1, 0)):
        batch[header + 3] = delta << 1 if delta >= 0 else 1
        records = bytes(batch[header:])
        if codec:
            records = bytes(Compressor(CODEC_NAMES[codec]).run(records))
        data = batch[:header] + records
        data[layout.BATCH_ATTRIBUTES + 1] = codec
        data[layout.BATCH_LENGTH : layout.BATCH_LENGTH + 4] = (len(data) - 12).to_bytes(4, "big")
        checked = bytes(data[layout.BATCH_ATTRIBUTES :])
        data[layout.BATCH_CRC : layout.BATCH_ATTRIBUTES] = crc32c(checked).to_bytes(4, "big")
        assert p.append(bytes(data), NOW).error == error
    p.append(keyed([(b"b", b"2")]))
    p.roll()
    compact(p)
    assert [(r.key, r.value) for r in records_of(p)][-1] == (b"b", b"2")


def test_records_without_a_key_are_named_on_a_thread_beside_compressed_ones(open_partition) -> None:
    """The event loop names them where that takes no decompressing: small batches may stand for any
    number of bytes."""
    p = open_partition(compacts=True, deletes=False, max_plain_batch_bytes=1 << 20)
    bad = keyed([(b"k", b"1"), (None, b"2")])
    assert p.append(keyed([(b"k", b"1")]), NOW).error == 0  # the head is there from here on
    refused = p.append_nowait(bad, NOW)
    assert (refused.error, refused.records) == (87, (1,))
    large = keyed([(b"k", bytes(1 << 19))], codec=4)
    assert p.append_nowait(bad + large, NOW) is None
    refused = p.append(bad + large, NOW)
    assert (refused.error, refused.records) == (87, (1,))
    assert p.append(large * 3, NOW).error == 87, "together they are too large to be looked at"
    assert p.append(large, NOW).error == 0 and p.log_end_offset == 2


def test_a_cleaning_that_is_stopped_leaves_the_log_as_it_was(open_partition) -> None:
    p = open_partition(compacts=True, deletes=False)
    appended = fill(p, random.Random(1), 30, 10)
    calls = []

    def stop(bytes_: int) -> None:
        calls.append(bytes_)
        if len(calls) == 4:
            raise ClosedError("the broker is stopping")

    with pytest.raises(ClosedError):
        Cleaning(p, dirt_of(p, None, NOW), MEMORY, NOW, stop).run()
    assert records_of(p) == appended and not list(p.directory.glob("*.cleaned"))


def test_a_log_that_is_cut_meanwhile_is_not_exchanged(open_partition) -> None:
    p = open_partition(compacts=True, deletes=False)
    fill(p, random.Random(2), 30, 10)
    cut_at = p.segments[0].end_offset - 1

    def cut(bytes_: int) -> None:
        if p.log_end_offset > cut_at and list(p.directory.glob("*.cleaned")):
            p.truncate_to(cut_at)

    with pytest.raises(ClosedError, match="cut while it was compacted"):
        Cleaning(p, dirt_of(p, None, NOW), MEMORY, NOW, cut).run()
    assert p.log_end_offset <= cut_at and records_of(p)


def test_retention_deletes_what_compaction_has_emptied(open_partition) -> None:
    """An empty segment does not keep those after it."""
    p = open_partition(compacts=True, deletes=True, retention_ms=1000, segment_bytes=4096)
    for i in range(4):
        p.append(keyed([(b"a", b"%d" % i * 2000)]))
        p.roll()
    compact(p, None, now_ms=NOW)
    assert [s.size for s in p.segments].count(0) >= 2, "some have nothing left"
    assert p.apply_retention(int(time.time() * 1000) + DAY) > 0
    assert p.log_start_offset == 4 and not records_of(p)


# -- crashes ---------------------------------------------------------------------------------------

_PLACES = (
    "compaction, cleaned files are written",
    "compaction, swap files are named",
    "compaction, old segments are gone",
    "compaction, a swap file has its name",
    "compaction, a group is done",
)
_CHILD = """
import random, sys
from pathlib import Path
from kdirect.log.config import LogConfig
from kdirect.log.manager import LogManager
from kdirect.model import TopicPartition
from tests.log.compacted_logs import compact
config = LogConfig(
    segment_bytes=8192, compacts=True, deletes=False, file_delete_delay_ms=int(sys.argv[2])
)
manager = LogManager([Path(sys.argv[1])], config).open()
compact(manager.partitions[TopicPartition("t", 0)])
"""


@pytest.mark.parametrize("delay_ms", [60_000, 0])
@pytest.mark.parametrize("place", [f"{name}:{n}" for name in _PLACES for n in (1, 2)])
def test_a_crash_at_any_step_leaves_the_same_table(
    memory_path: Path, place: str, delay_ms: int
) -> None:
    """The next start finishes the exchange, or undoes it; nothing else is lost, and compaction
    goes on from there.  Replaced files that were to stay for a while are removed."""
    config = LogConfig(segment_bytes=8192, compacts=True, deletes=False)
    with LogManager([memory_path], config) as manager:
        appended = fill(manager.create_partition(TP), random.Random(3), 60, 200)
    run = subprocess.run(
        [sys.executable, "-c", _CHILD, str(memory_path), str(delay_ms)],
        env={**os.environ, VARIABLE: place, "PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
    )
    assert run.returncode == -9, "it ended at that step"
    with LogManager([memory_path], config) as manager:
        p = manager.partitions[TP]
        kept = records_of(p)
        assert set(kept) <= set(appended) and p.log_end_offset == len(appended)
        assert last_of_each_key(kept) == last_of_each_key(appended)
        names = [path.name for path in p.directory.iterdir()]
        assert not [n for n in names if n.endswith((".cleaned", ".swap", ".corrupt", ".deleted"))]
        ends = [s.end_offset for s in p.segments]
        assert [s.base_offset for s in p.segments][1:] == ends[:-1], "no gap, no overlap"
        compact(p)
        clean = records_of(p)
        assert len({r.key for r in clean}) == len(clean)
        assert last_of_each_key(clean) == last_of_each_key(appended)
