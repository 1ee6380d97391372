"""What a replica does with its log: who has confirmed what, high watermarks that are loaded, and
the leader epochs by which two logs find where they part."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kdirect.errors import StorageFullError
from kdirect.log import checkpoint
from kdirect.log.ack_gate import AckGate
from kdirect.log.config import LogConfig
from kdirect.log.kernel_head import freeze_head, thaw_head
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from kdirect.log.recovery import load_partition
from kdirect.model import TopicPartition
from tests.log.conftest import TP, stamped
from tests.log.test_truncation import contents


def append(p: Partition, batch, count: int, records: int = 1) -> None:
    for _ in range(count):
        assert p.append(batch(records)).error == 0


# -- confirmations ---------------------------------------------------------------------------------


def test_replicas_hold_readers_where_the_disk_does_not(open_partition, batch) -> None:
    """Without group commit a record may be read as soon as it is committed, unless replicas have to
    confirm it; without them again, at once."""
    p = open_partition()
    append(p, batch, 2)
    assert p.high_watermark == 2 and not p.acknowledgements_wait()
    p.set_replicas({2: 2, 3: 0})
    append(p, batch, 3)
    assert p.high_watermark == 2, "it does not go back"
    assert p.gate.waits(5) and not p.acknowledgements_wait(), "a flush does not help"
    p.replicated(2, 5)
    assert p.high_watermark == 2
    p.replicated(3, 4)
    assert p.high_watermark == 4 and len(contents(p)) == 4
    p.set_replicas({2: 5})
    assert p.high_watermark == 5, "the slowest need not confirm any more"
    append(p, batch, 1)
    assert p.high_watermark == 5
    p.set_replicas({})
    assert p.high_watermark == 6 and not p.acknowledgements_wait()
    append(p, batch, 1)
    assert p.high_watermark == 7


def test_other_settings_do_not_confirm_records(open_partition, batch) -> None:
    p = open_partition(flush_before_ack=True)
    p.set_replicas({2: 0})
    append(p, batch, 1)
    p.flush()
    p.reconfigure(LogConfig(segment_bytes=1 << 20))
    assert p.high_watermark == 0
    append(p, batch, 1)
    assert p.high_watermark == 0
    p.replicated(2, 2)
    assert p.high_watermark == 2


def test_a_replica_cannot_confirm_what_is_not_there_yet(open_partition, batch) -> None:
    """It has records of another leadership there, which it has yet to cut off."""
    p = open_partition(flush_before_ack=True)
    p.set_replicas({2: 30})
    append(p, batch, 1)
    p.flush()
    assert p.high_watermark == 0
    p.replicated(2, 40)
    assert p.high_watermark == 1
    append(p, batch, 1)
    p.flush()
    assert p.high_watermark == 1
    p.replicated(2, 2)
    assert p.high_watermark == 2


def test_a_gate_is_asked_while_its_replicas_change() -> None:
    class Changing(dict[int, int]):
        """Another thread puts an empty one in its place once it was looked at."""

        def __bool__(self) -> bool:
            gate.set_replicas({})
            return True

    gate = AckGate(holds=False, on_disk=0)
    gate._replicas = Changing({2: 5})
    assert gate.acknowledged(9) == 5
    assert gate.acknowledged(9) == 9


# -- a high watermark that is loaded ---------------------------------------------------------------


@pytest.mark.parametrize(("start", "found"), [(4, 4), (5, 6), (11, 12)])
def test_a_high_watermark_below_the_log_start(memory_path, batch, start, found) -> None:
    """The checkpoint of the high watermark may be older than that of the log start, or missing:
    what is deleted was readable, and nothing else is known to be."""
    config = LogConfig(segment_bytes=1 << 16)
    with LogManager([memory_path], config) as m:
        p = m.create_partition(TP)
        append(p, batch, 6, records=2)
        p.delete_records(start)
    p = load_partition(
        TP, memory_path / str(TP), config, clean=True, log_start_offset=start, high_watermark=0
    )
    try:
        assert (p.log_start_offset, p.high_watermark, p.log_end_offset) == (start, found, 12)
        p.set_replicas({2: found})
        append(p, batch, 1)
        p.replicated(2, 13)
        assert p.high_watermark == 13
    finally:
        p.close()


@pytest.mark.parametrize(
    ("start", "mark", "found"), [(0, 11, 8), (0, 8, 8), (0, 5, 4), (9, 11, 12), (9, 17, 16)]
)
def test_a_high_watermark_in_a_damaged_segment(
    memory_path, batch, caplog, start, mark, found
) -> None:
    """The broker starts, and serves its other partitions and what is sound of this one."""
    config, other = LogConfig(segment_bytes=1 << 16), TopicPartition("sound", 0)
    with LogManager([memory_path], config, replicated=True) as m:
        for tp in (TP, other):
            p = m.create_partition(tp)
            for _ in range(5):
                append(p, batch, 2, records=2)
                p.roll()
        m.partitions[TP].delete_records(start)
        damaged = m.partitions[TP].segments[2 if start == 0 else 0]
        assert damaged.base_offset == 8
        path = damaged.path
    marks = dict.fromkeys((TP, other), mark)
    checkpoint.write_offsets(memory_path / checkpoint.HIGH_WATERMARKS, marks)
    path.write_bytes(b"\xff" * path.stat().st_size)
    with LogManager([memory_path], config, replicated=True) as m:
        p = m.partitions[TP]
        assert (p.log_start_offset, p.high_watermark, p.log_end_offset) == (start, found, 20)
        assert m.partitions[other].high_watermark == mark - mark % 2
        assert ("is damaged" in caplog.text) == (8 <= mark < 12)
        p.follow_leader()
        p.replicated(-1, 20)
        assert p.high_watermark == 20
        assert len(contents(m.partitions[other])) == mark // 2


def test_a_log_starts_inside_a_segment(open_partition, batch) -> None:
    p = open_partition()
    for _ in range(3):
        append(p, batch, 2, records=2)
        p.roll()
    assert p.log_start_offset == 0
    p.delete_records(5)
    assert p.segments[0].base_offset == 4 and p.log_start_offset == 5


# -- leader epochs ---------------------------------------------------------------------------------


def test_an_epoch_whose_records_are_deleted(open_partition, batch) -> None:
    """Its replica goes on from where the first epoch that is left begins, as with Kafka."""
    p = open_partition()
    for epoch in (3, 6):
        p.set_leader_epoch(epoch)
        append(p, batch, 5)
        p.roll()
    p.delete_records(7)
    assert [p.end_offset_for_epoch(e) for e in (-1, 0, 3, 5, 6, 7)] == [
        (-1, -1), (0, 7), (3, 7), (5, 7), (6, 10), (-1, -1),
    ]  # fmt: skip


@pytest.mark.parametrize("deleted", [7, 10], ids=["in the middle", "all"])
def test_epochs_of_deleted_records_that_are_kept(open_partition, batch, deleted) -> None:
    """Their segment has not gone.  Replicas copy them, and compare their logs by them."""
    p = open_partition()
    for epoch in (3, 6):
        p.set_leader_epoch(epoch)
        append(p, batch, 5)
        if epoch == 3:
            p.roll()
    p.delete_records(deleted)
    p.follow_leader()
    assert (p.log_start_offset, p.first_kept_offset) == (deleted, 5)
    assert (p.last_epoch, p.epochs_with_records()) == (6, [(6, 5)])
    assert p.end_offset_for_epoch(3) == (3, deleted), "no reader goes below the log start"
    q = open_partition()
    assert (q.last_epoch, q.epochs_with_records()) == (6, [(6, 5)])


def test_epochs_that_kafka_forgot_are_read_from_the_batches(
    open_partition, batch, tmp_path
) -> None:
    """It cuts its file of epochs at the log start, although records below are kept."""
    p = open_partition()
    for epoch in (3, 6, 7):
        p.set_leader_epoch(epoch)
        append(p, batch, 2)
    p.delete_records(5)
    open_partition().close()
    file = tmp_path / "log" / str(TP) / checkpoint.LEADER_EPOCHS
    file.write_text("0\n1\n7 5\n")
    p = open_partition()
    assert p.epochs_with_records() == [(3, 0), (6, 2), (7, 4)]
    assert file.read_text() == "0\n3\n3 0\n6 2\n7 4\n"


def test_epochs_of_records_that_found_no_room(open_partition, batch, monkeypatch) -> None:
    """The epochs are noted before the records: what another leader sends in their place counts."""
    p = open_partition()
    append(p, batch, 1)

    def full(*arguments: object) -> None:
        raise StorageFullError("no", hint="none")

    copies = b"".join(stamped(batch(), o, 3 if o < 5 else 5) for o in range(1, 9))
    thaw = freeze_head(p.kernel)
    monkeypatch.setattr(p, "_make_room", full)
    with pytest.raises(StorageFullError):
        p.append_as_stamped(copies)
    monkeypatch.undo()
    assert p.leader_epoch == 5 and p.log_end_offset == 1
    thaw_head(p.kernel, thaw)
    assert p.append_as_stamped(stamped(batch(), 1, 6)).error == 0
    assert p.log_end_offset == 2
    assert p.end_offset_for_epoch(3) == (3, 1) and p.end_offset_for_epoch(6) == (6, 2)
    assert p.truncate_to(1) == 1
    assert p.end_offset_for_epoch(0) == (0, 1)


@pytest.mark.parametrize("clean", [False, True], ids=["crash", "clean"])
@pytest.mark.parametrize("text", [None, "rubbish"], ids=["missing", "damaged"])
def test_epochs_come_from_the_batches_where_their_file_is_lost(
    open_partition, batch, tmp_path: Path, clean, text
) -> None:
    """A reader takes a batch of an epoch that is not known for a damaged one."""
    p = open_partition()
    for epoch in (5, 7):
        p.set_leader_epoch(epoch)
        append(p, batch, 2)
        p.roll()
        append(p, batch, 2)
    wanted = contents(p)
    if clean:
        open_partition().flush()
    else:
        p.flush()
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "log", copy)
    if clean:
        (copy / checkpoint.CLEAN_SHUTDOWN).write_bytes(b"{}")
    file = copy / str(TP) / checkpoint.LEADER_EPOCHS
    file.unlink()
    if text is not None:
        file.write_text(text)
    with LogManager([copy], LogConfig()) as m:
        q = m.partitions[TP]
        assert contents(q) == wanted and q.leader_epoch == 7
        assert file.read_text() == "0\n2\n5 0\n7 4\n"
        assert q.end_offset_for_epoch(5) == (5, 4)
        append(q, batch, 1)
        assert contents(q)[8][12:16] == b"\0\0\0\7"
