"""Moves between log directories that go wrong at their end, seen from the log."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kdirect.errors import LogError
from kdirect.log import checkpoint, moves, relocation
from kdirect.log.manager import LogManager
from tests.log.conftest import make_batch, stamped
from tests.log.test_moves import (
    SMALL,
    TP,
    begin,
    carry_out,
    contents,
    copy_all,
    disk_error,
    fill,
    move,
    moving,
    names,
    opened,
    parents,
)

__all__ = ["opened", "parents"]  # fixtures


@pytest.mark.parametrize("of", ["new", "old"])
@pytest.mark.parametrize(
    "step",
    [
        "move, everything is copied",
        "move, checkpoints are written",
        "move, the copy has its name",
    ],
)
def test_a_directory_that_fails_while_a_partition_comes_or_goes(
    opened, parents, monkeypatch, of: str, step: str
) -> None:
    """The partition goes with it or is not in it: it is not lost unheard, nor lost and there."""
    m, p, under_way = moving(opened)
    first = p.directory.parent
    failing = under_way.parent if of == "new" else first
    copy_all(under_way)
    error = OSError(5, "Input/output error")
    with monkeypatch.context() as patch:
        patch.setattr(
            relocation, "reached", lambda name: name == step and m.note_failure(failing, error)
        )
        try:
            m.moves.finish(under_way)
        except OSError as e:
            m.moves.failed(under_way, e)
    assert list(m.offline) == [failing]
    is_lost = p.directory.parent == failing
    assert (TP in m.lost) == is_lost
    m.drop(failing)
    m.moves.remove_left()
    assert (TP in m.partitions) != is_lost and not m.moves.under_way()
    if not is_lost:
        fill(p, 1)
        assert len(contents(p)) == 21
    m = opened(clean=False)  # the directory is back
    assert len(contents(m.partitions[TP])) == (20 if is_lost else 21)
    if m.moves.under_way():
        m.moves.ask(TP, m.partitions[TP].directory.parent)
    m.moves.remove_left()
    assert names(parents) == [f"{m.partitions[TP].directory.parent.name}/t-0"]


@pytest.mark.parametrize("goes", ["when it was named", "by another hand"])
def test_a_copy_that_is_gone_is_made_again(opened, monkeypatch, goes: str) -> None:
    """The move does not wait for the next start."""
    m, p, under_way = moving(opened)
    copy_all(under_way)
    to, sync = under_way.parent, checkpoint.sync_directory
    if goes == "by another hand":
        under_way.copy.discard()
    else:
        with monkeypatch.context() as patch:
            patch.setattr(
                checkpoint,
                "sync_directory",
                lambda d: disk_error() if d == to and (to / "t-0").exists() else sync(d),
            )
            with pytest.raises(OSError):
                m.moves.finish(under_way)
    assert not (to / "t-0").exists() and not under_way.copy.directory.exists()
    fill(p, 1)
    carry_out(m, under_way)
    assert p.directory.parent == to and len(contents(p)) == 21


def no_room(*arguments: Any) -> None:
    raise OSError(28, "No space left on device")


def test_what_was_left_goes_where_there_is_no_room_for_another_name(
    opened, parents, monkeypatch
) -> None:
    """Or the next start after its topic was deleted would bring it back."""
    m = opened()
    fill(m.partitions[TP], 20)
    with monkeypatch.context() as patch:
        patch.setattr(moves, "leave", no_room)
        now = move(m)
    assert names(parents) == [f"{now.name}/t-0"]
    assert len(contents(m.partitions[TP])) == 20


@pytest.mark.parametrize("back", [True, False])
def test_what_cannot_be_removed_is_in_nobodys_way(opened, parents, monkeypatch, back: bool) -> None:
    """Neither of the partition that comes back, nor of a start, which knows what is older, also
    when some of it is gone."""
    m = opened()
    p = m.partitions[TP]
    fill(p, 20)
    first, unlink = p.directory.parent, Path.unlink

    def fails(path: Path, **named: Any) -> None:
        if path.parent == first / "t-0" and path.suffix == ".log":
            disk_error()
        unlink(path, **named)

    with monkeypatch.context() as patch:
        patch.setattr(moves, "leave", no_room)
        patch.setattr(Path, "unlink", fails)
        now = move(m)
    assert (first / "t-0" / checkpoint.PARTITION_METADATA).exists()
    fill(p, 5)
    if back:
        assert move(m) == first
    else:
        m = opened(clean=False)
    p = m.partitions[TP]
    assert p.directory.parent == (first if back else now) and len(contents(p)) == 25
    assert names(parents) == [f"{p.directory.parent.name}/t-0"]


def test_a_copy_that_is_given_up_goes_where_there_is_no_room_for_another_name(
    opened, parents, monkeypatch
) -> None:
    """Or the next start would go on with it."""
    m, p, under_way = moving(opened)
    under_way.step(5000)
    with monkeypatch.context() as patch:
        patch.setattr(moves, "leave", no_room)
        assert m.moves.ask(TP, p.directory.parent)
    m.moves.remove_left()
    assert names(parents) == [f"{p.directory.parent.name}/t-0"]
    m = opened()
    assert not m.moves.under_way()


def test_a_copy_whose_producers_are_not_known_takes_no_records(opened, monkeypatch) -> None:
    """What they have sent would be taken twice, once it leads."""
    m = opened(replicated=True)
    p = m.partitions[TP]
    p.follow_leader()
    ids = {"producer_id": 7, "producer_epoch": 0}
    for i in range(3):
        assert p.append_as_stamped(stamped(make_batch(sequence=i, **ids), i, 2)).error == 0
    under_way = begin(m)
    copy_all(under_way)
    with monkeypatch.context() as patch:
        patch.setattr(relocation, "load_producers", disk_error)
        with pytest.raises((OSError, LogError)):
            m.moves.finish(under_way, stands_still=True)
    with pytest.raises(LogError, match="Input/output error"):
        p.begin_epoch(3, replicated=False)
    with pytest.raises(LogError):  # closing it
        opened()
    m = opened(replicated=True)
    p = m.partitions[TP]
    p.begin_epoch(3, replicated=False)
    assert p.append(make_batch(sequence=2, **ids)).base_offset == 2


def test_a_copy_without_room_goes_and_leaves_the_room(
    tmp_path: Path, small_disk: Path, fill_disk, caplog
) -> None:
    """Once making room has not helped.  Neither does a move begin on a full disk."""
    to = small_disk / "b"
    with LogManager([tmp_path / "a", to], SMALL) as m:
        p = m.create_partition(TP)
        fill(p, 40)
        if p.directory.parent == to:
            move(m)
        under_way = begin(m)
        under_way.step(5000)
        fill_disk(small_disk)
        for is_over in (False, True):
            with pytest.raises((OSError, LogError)) as caught:
                carry_out(m, under_way)
            m.moves.failed(under_way, caught.value)
            assert under_way.is_over == is_over
        m.moves.remove_left()
        assert not list(to.glob("t-*")) and not m.offline and "no room" in caplog.text
        fill_disk(small_disk)
        with pytest.raises(OSError, match="No space"):
            m.moves.ask(TP, to)
        assert not list(to.glob("t-*")) and not m.moves.under_way() and not m.offline
        (small_disk / "ballast").unlink()
        fill(p, 1)
        assert len(contents(p)) == 41


def test_a_move_is_known_from_its_request_on(opened) -> None:
    """After a kill before anything was copied, and one while an earlier copy is cleared."""
    m = opened()
    fill(m.partitions[TP], 20)
    to = begin(m).parent
    for _ in range(2):
        m = opened(clean=False)
        (under_way,) = m.moves.under_way()
        assert under_way.parent == to
        under_way.step(5000)
        (under_way.copy.directory / "left").mkdir()
    under_way.copy.begin()
    assert os.listdir(under_way.copy.directory) == [checkpoint.PARTITION_METADATA]
    carry_out(m, under_way)
    assert m.partitions[TP].directory.parent == to and len(contents(m.partitions[TP])) == 20
