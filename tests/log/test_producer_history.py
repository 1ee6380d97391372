"""Which producers are known when a log is opened: those whose records were deleted until they
expire, and none of a log that was dropped."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kdirect.log import producer_state
from kdirect.log.clock import now_ms
from kdirect.log.config import LogConfig
from kdirect.log.kernel_producers import expire_producers, known_producers
from kdirect.log.manager import LogManager
from kdirect.log.segment import Segment
from tests.log.conftest import TP

DAY_MS = 86_400_000


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("snapshot", ["below", "at", "above"])
def test_producers_whose_records_were_deleted_are_known(
    open_partition, batch, snapshot, clean
) -> None:
    """The newest snapshot is below, at or above the log's start; all of the producer's records are
    deleted in each case."""
    p = open_partition()
    sent = [batch(2, producer_id=5, producer_epoch=1, sequence=2 * i) for i in range(3)]
    for request in sent:
        assert p.append(request).error == 0
    if snapshot == "below":
        p.roll()
        p.append(batch(2))
    elif snapshot == "at":
        p.roll()
    else:
        p.append(batch(1))
        p.roll()
        p.append(batch(1))
        p.roll()
    end = p.log_end_offset
    start = end - 1 if snapshot == "above" else end
    assert p.delete_records(start) == start
    if snapshot == "below":  # a clean end writes one at the log's end
        kept = {path: path.read_bytes() for path in p.directory.glob("*.snapshot")}
        p.close()
        for _, path in producer_state.list_snapshots(p.directory):
            path.unlink()
        for path, data in kept.items():
            path.write_bytes(data)
    else:
        open_partition(clean=clean).close()
    newest = producer_state.list_snapshots(p.directory)[-1][0]
    assert (newest > start) - (newest < start) == {"below": -1, "at": 0, "above": 1}[snapshot]
    p = open_partition(clean=clean)
    assert (p.log_start_offset == start or not clean) and p.log_end_offset == end
    again = p.append(sent[-1])
    assert (again.error, again.duplicate, p.log_end_offset) == (0, True, end)
    assert p.append(batch(1, producer_id=5, producer_epoch=1, sequence=7)).error == 45
    assert p.append(batch(1, producer_id=5, producer_epoch=1, sequence=6)).base_offset == end


@pytest.mark.parametrize("deleted", [False, True])
def test_producers_expire_however_often_the_log_is_opened(open_partition, batch, deleted) -> None:
    """As with Kafka, their time is that of the snapshot."""
    p = open_partition()
    then = now_ms() - DAY_MS // 2
    request = batch(1, producer_id=5, producer_epoch=1, sequence=0, timestamp_ms=then)
    assert p.append(request, then).error == 0
    if deleted:
        p.roll()
        p.delete_records(1)
    for _ in range(3):
        p = open_partition()
        assert [e.timestamp_ms for e in known_producers(p.kernel)[0]] == [then]
    assert expire_producers(p.kernel, then) == 0
    assert expire_producers(p.kernel, then + 1) == 1


def test_a_time_to_come_in_a_snapshot_is_now(open_partition, batch) -> None:
    """Else a clock that was wrong for a moment would keep a producer for ever."""
    p = open_partition()
    p.append(batch(1, producer_id=5, producer_epoch=1, sequence=0), now_ms() + 1000 * DAY_MS)
    p = open_partition()
    (known,) = known_producers(p.kernel)[0]
    assert known.timestamp_ms <= now_ms()


def test_a_crash_while_a_log_starts_over_brings_no_producer_back(
    open_partition, batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What this replica had of them, others may never have had."""
    p = open_partition()
    request = batch(2, producer_id=5, producer_epoch=1, sequence=0)
    p.append(request)
    p.roll()
    assert producer_state.list_snapshots(p.directory)
    created, copies = Segment.create_empty, tmp_path / "copies"

    def crashed(directory: Path, offset: int) -> object:
        segment = created(directory, offset)
        shutil.copytree(directory.parent, copies)
        return segment

    monkeypatch.setattr(Segment, "create_empty", crashed)
    p.start_over(50)
    with LogManager([copies], LogConfig(segment_bytes=1 << 20)) as m:
        q = m.partitions[TP]
        assert q.log_end_offset == 50
        assert known_producers(q.kernel)[0] == []
        assert q.append(request).base_offset == 50
