"""Moves between log directories that go wrong at their end, seen from the log."""

from __future__ import annotations

import pytest

from kdirect.log import checkpoint, relocation
from tests.log.test_moves import (
    TP,
    begin,
    carry_out,
    contents,
    disk_error,
    fill,
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
    m = opened()
    p = m.partitions[TP]
    fill(p, 20)
    first, under_way = p.directory.parent, begin(m)
    failing = under_way.parent if of == "new" else first
    while under_way.step(1 << 20):
        pass
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
    m = opened()
    p = m.partitions[TP]
    fill(p, 20)
    under_way = begin(m)
    while under_way.step(1 << 20):
        pass
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
