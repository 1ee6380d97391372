"""Copies of logs that were compacted: offsets stay what they are, whoever compacts, and when."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kdirect.log.checkpoint import CLEAN_SHUTDOWN
from kdirect.log.config import LogConfig
from kdirect.log.kernel import NOT_CONTIGUOUS
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from tests.log.compacted_logs import Kept, compact, fill, keyed, last_of_each_key, records_of
from tests.log.test_replica_log import TP, logs_of

INVALID_RECORD = 87
CONFIG = LogConfig(segment_bytes=16384, index_interval_bytes=300, compacts=True)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[Partition]]:
    """The logs of a leader and of a follower."""
    with logs_of(tmp_path, CONFIG, CONFIG) as (leader, follower):
        leader.begin_epoch(1, replicated=True)
        follower.follow_leader()
        yield [leader, follower]


def committed(leader: Partition) -> None:
    """The other brokers have everything."""
    leader.replicated(-1, leader.log_end_offset)


def copy(leader: Partition, follower: Partition, rng: random.Random, rounds: int = 1 << 30) -> None:
    """What a fetch does, again and again."""
    while follower.log_end_offset < leader.log_end_offset and rounds > 0:
        rounds -= 1
        copied = leader.read_for_replica(follower.log_end_offset, rng.choice([1, 500, 5000]))
        assert copied.buffers
        follower.copy_segments_of(copied.segment_bytes)
        follower.note_gaps_below(leader.dense_from)
        follower.begin_segment(copied.segment)
        for buffer in copied.buffers:
            assert follower.append_as_stamped(bytes(buffer)).error == 0
        follower.replicated(-1, leader.high_watermark)


@pytest.mark.parametrize("number", range(4))
def test_a_copy_has_what_its_compacted_leader_has(
    pair: list[Partition], tmp_path: Path, number: int, seed: int
) -> None:
    """Whatever was compacted before a record was copied, here or there, or in between."""
    rng = random.Random(f"{seed} {number}")
    leader, follower = pair
    written = []
    for _ in range(4):
        written += fill(leader, rng, 25, 10)
        copy(leader, follower, rng, rng.randrange(20))
        committed(leader)
        if rng.random() < 0.8:
            compact(leader)
        copy(leader, follower, rng, rng.randrange(20))
        if rng.random() < 0.5:
            compact(follower)
    written += fill(leader, rng, 3, 10)
    committed(leader)
    compact(leader)
    copy(leader, follower, rng)
    follower.begin_segment(leader.segments[-1].base_offset)
    assert follower.log_end_offset == leader.log_end_offset == follower.high_watermark
    table = last_of_each_key(written)
    assert last_of_each_key(records_of(leader)) == last_of_each_key(records_of(follower)) == table
    assert follower.segments[-1].base_offset == leader.segments[-1].base_offset
    known = set(written)
    assert set(records_of(follower)) <= known
    compact(follower)
    compact(leader, leader.log_start_offset)
    assert records_of(follower) == records_of(leader)
    # It leads, and is read as it was.
    follower.begin_epoch(2, replicated=True)
    assert follower.append(keyed([(b"k0", b"last")])).error == 0
    follower.replicated(-1, follower.log_end_offset)
    table[b"k0"] = b"last"
    found = records_of(follower)
    assert last_of_each_key(found) == table
    for offset in (r.offset for r in rng.sample(found, 5)):
        assert records_of(follower, offset)[0].offset <= offset
    directory = follower.directory.parent
    assert _recovered(directory) == found


def _recovered(directory: Path) -> list[Kept]:
    """The records of a log as a broker finds them that starts after a crash."""
    again = directory.parent / "again"
    shutil.copytree(directory, again)
    (again / CLEAN_SHUTDOWN).unlink(missing_ok=True)
    with LogManager([again], CONFIG) as logs:
        return records_of(logs.partitions[TP])


def test_a_copy_takes_gaps_only_where_its_leader_says_so(pair: list[Partition]) -> None:
    leader, follower = pair
    for i in range(6):
        assert leader.append(keyed([(b"a", b"%d" % i), (b"b%d" % i, b"")])).error == 0
        leader.roll()
    for i in range(4):
        assert leader.append(keyed([(b"a", b"later"), (b"c", b"%d" % i)])).error == 0
    committed(leader)
    compact(leader)
    (thinned,) = leader.read_for_replica(0, 1).buffers
    assert follower.append_as_stamped(bytes(thinned)).error == INVALID_RECORD
    (missing,) = leader.read_for_replica(12, 1).buffers
    assert follower.append_as_stamped(bytes(missing)).error == NOT_CONTIGUOUS
    assert follower.log_end_offset == 0
    follower.note_gaps_below(leader.dense_from)
    assert leader.dense_from == 12
    result = follower.append_as_stamped(bytes(thinned))
    assert (result.error, result.base_offset, result.last_offset) == (0, 0, 1)
    assert follower.append_as_stamped(bytes(missing)).error == 0, "up to the end of the gap"
    (beyond,) = leader.read_for_replica(16, 1).buffers
    assert follower.append_as_stamped(bytes(beyond)).error == NOT_CONTIGUOUS
    assert follower.log_end_offset == 14


def test_sealed_segments_are_leased_only_where_no_offset_is_missing(pair: list[Partition]) -> None:
    """A follower READs them as they are, and compares positions."""
    leader, _ = pair
    fill(leader, random.Random(1), 60, 5)
    committed(leader)
    compact(leader)
    fill(leader, random.Random(2), 60, 5)
    assert leader.sealed_extent(0) is None
    extent = leader.sealed_extent(leader.dense_from)
    assert extent is not None and extent.base_offset == leader.dense_from
    extent.extent.release()


def test_the_policy_may_change_after_a_log_was_compacted(pair: list[Partition]) -> None:
    """The gaps stay, and a copy has to take them."""
    leader, follower = pair
    rng = random.Random(3)
    fill(leader, rng, 40, 5)
    committed(leader)
    compact(leader)
    for p in pair:
        p.config = replace(p.config, compacts=False, deletes=True)
    copy(leader, follower, rng)
    assert records_of(follower) == records_of(leader)


def test_a_log_is_cut_where_records_are_missing(pair: list[Partition]) -> None:
    """It ends at the offset that was asked for, or its replica would cut it for ever."""
    leader, follower = pair
    for i in range(8):
        assert leader.append(keyed([(b"a", b"%d" % i), (b"a", b"")])).error == 0
    leader.roll()
    assert leader.append(keyed([(b"b", b"x"), (b"a", b"last")])).error == 0
    leader.roll()
    assert leader.append(keyed([(b"c", b"y")])).error == 0
    committed(leader)
    compact(leader)
    copy(leader, follower, random.Random(4))
    assert [r.offset for r in records_of(follower)] == [16, 17, 18]
    follower.follow_leader()
    assert follower.truncate_to(9) == 9
    assert follower.log_end_offset == 9 and follower.read_for_replica(0, 100).buffers == []
    copy(leader, follower, random.Random(5))
    assert records_of(follower) == records_of(leader)
