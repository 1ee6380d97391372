"""Cuts of a log that fail half-way, and files that take the place of an empty one."""

from __future__ import annotations

from typing import Any

import pytest

from kdirect.errors import LogError
from kdirect.log import checkpoint
from kdirect.log.epochs import LeaderEpochs
from kdirect.log.segment import Segment
from kdirect.log.truncation import CutSegment
from tests.log.test_truncation import contents


def disk_error(*arguments: Any) -> None:
    raise OSError(5, "Input/output error")


def test_a_cut_whose_checkpoint_cannot_be_written_changes_nothing(
    open_partition, batch, monkeypatch
) -> None:
    p = open_partition()
    for _ in range(10):
        assert p.append(batch()).error == 0
    with monkeypatch.context() as patch:
        patch.setattr(p, "write_checkpoints", disk_error)
        with pytest.raises(LogError, match="was not cut at offset 5"):
            p.truncate_to(5)
    assert p.log_end_offset == 10 and len(contents(p)) == 10
    assert not list(p.directory.glob("*.tmp"))
    assert p.append(batch()).base_offset == 10
    p.flush()
    assert p.truncate_to(5) == 5
    p = open_partition()
    assert p.log_end_offset == 5


@pytest.mark.parametrize(
    ("owner", "method"),
    [(LeaderEpochs, "write_truncated"), (Segment, "delete"), (CutSegment, "publish")],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_after_a_cut_that_failed_nothing_is_appended_and_a_restart_recovers(
    open_partition, batch, monkeypatch, owner, method
) -> None:
    """Files and memory say different things: new records in the one file and old ones in the other
    would be a log that never was."""
    p = open_partition(segment_bytes=8192)
    p.set_leader_epoch(3)
    for i in range(40):
        assert p.append(batch(value_bytes=700, fill=b"%d" % (i % 10))).error == 0
    before = contents(p)
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, disk_error)
        with pytest.raises(LogError, match="failed"):
            p.truncate_to(12)
    readable = contents(p)
    assert len(readable) in (12, 40) and readable == before[: len(readable)]
    for change in (
        lambda: p.append(batch()),
        lambda: p.ensure_head(100),
        lambda: p.truncate_to(5),
        lambda: p.delete_records(3),
        p.roll,
    ):
        with pytest.raises(LogError, match="cutting t-0 at offset 12 failed"):
            change()
    with pytest.raises(LogError, match="cutting"):
        open_partition(segment_bytes=8192)
    assert not (p.directory.parent / checkpoint.CLEAN_SHUTDOWN).exists()
    q = open_partition(segment_bytes=8192)
    end = q.log_end_offset
    assert 12 <= end <= 40 and contents(q) == before[:end]
    assert q.append(batch()).base_offset == end
    assert q.truncate_to(12) == 12


def test_a_cut_without_a_head_leaves_none(open_partition, batch) -> None:
    p = open_partition()
    for _ in range(10):
        p.append(batch())
    p = open_partition()
    assert p.truncate_to(5) == 5 and p.kernel.capacity == 0
    assert not p.segments[-1].is_head
    assert p.append(batch()).base_offset == 5


# -- an active segment that is empty ---------------------------------------------------------------


def test_a_file_granted_ahead_takes_the_place_of_an_empty_segment(open_partition, batch) -> None:
    """Both have the same name: were both in the list, deleting the older would delete the head."""
    p = open_partition()
    p.roll_into(p.prepare_next()).release()
    assert [s.base_offset for s in p.segments] == [0]
    for i in range(3):
        assert p.append(batch()).base_offset == i
    p.roll()
    p.delete_records(3)
    assert [s.base_offset for s in p.segments] == [3] and p.segments[0].path.exists()
    for i in range(3, 6):
        assert p.append(batch()).base_offset == i
    p = open_partition()
    assert (p.log_start_offset, p.log_end_offset) == (3, 6) and len(contents(p)) == 3


def test_room_after_an_empty_segment_that_is_too_small_for_a_grant(open_partition, batch) -> None:
    p = open_partition(segment_bytes=8192)
    p.make_room()
    assert [s.base_offset for s in p.segments] == [0] and p.segments[0].is_head
    assert p.append(batch()).base_offset == 0
