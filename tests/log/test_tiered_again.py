"""Logs that become tiered, are so no longer, and are so again: where they start."""

from __future__ import annotations

import pytest

from kdirect.errors import LogError, OffsetOutOfRangeError
from tests.log.conftest import TP
from tests.log.tiered_logs import NOW, cold, fill


def test_a_log_that_is_tiered_no_longer_starts_where_it_does_here(logs, batch) -> None:
    p = logs.open(local_retention_ms=1000)
    cold(p, batch, 3, 2)
    logs.open(remote_storage_enable=False, remote_log_delete_on_disable=True)
    assert not p.is_tiered and p.log_start_offset == p.local_log_start_offset == 20
    assert p.remote_end_offset == 0
    with pytest.raises(OffsetOutOfRangeError):
        p.read(19, 100)
    p.note_tiered(30)
    assert p.remote_end_offset == 0, "who copies may not have heard yet"
    logs.open(remote_storage_enable=True)
    assert p.remote_end_offset == 0, "the copies of before do not count"
    logs.open(remote_storage_enable=False, remote_log_delete_on_disable=True)
    p = logs.restart(clean=False)
    assert p.log_start_offset == 20


def test_a_log_that_becomes_tiered_starts_where_it_does_here(logs, batch) -> None:
    p = logs.open(remote_storage_enable=False, retention_ms=1000)
    fill(p, batch, 3)
    assert p.apply_retention(NOW) == 3 and p.log_start_offset == 30
    logs.open(remote_storage_enable=True, retention_ms=-1)
    p = logs.restart(clean=False)
    assert p.is_tiered and p.log_start_offset == 30, "what went before was never copied"


def test_a_log_that_becomes_tiered_again_keeps_its_start(logs, batch) -> None:
    """Whatever the checkpoint said before: what was below it is deleted from remote storage."""
    p = logs.open(local_retention_ms=1000)
    fill(p, batch, 3)
    p.note_tiered(20)
    assert p.apply_retention(NOW) == 2 and p.log_start_offset == 0
    logs.open(remote_storage_enable=False)
    assert p.log_start_offset == 20
    logs.open(local_retention_ms=1000)
    assert p.is_tiered
    p = logs.restart(clean=False)
    assert (p.log_start_offset, p.local_log_start_offset) == (20, 20)


def test_a_log_that_is_tiered_again_starts_before_what_is_here(logs, batch) -> None:
    """The checkpoint leaves a log out that starts with its first segment, if it is not tiered."""
    p = logs.open(local_retention_ms=1000)
    fill(p, batch, 3)
    p.move_log_start(20)  # which is on disk then
    logs.open(remote_storage_enable=False)
    logs.manager.checkpoint()
    assert TP not in logs.starts()
    logs.open(local_retention_ms=1000)
    p.note_tiered(30)
    assert p.apply_retention(NOW) == 1 and p.local_log_start_offset == 30
    p = logs.restart(clean=False)
    assert (p.log_start_offset, p.local_log_start_offset) == (20, 30)


def test_where_the_log_start_cannot_be_written_a_log_is_not_tiered(
    logs, batch, monkeypatch
) -> None:
    p = logs.open(remote_storage_enable=False)
    fill(p, batch, 2)

    def full() -> None:
        raise OSError(28, "no space")

    monkeypatch.setattr(p, "write_log_starts", full)
    with pytest.raises(LogError, match="log start offset 0"):
        logs.open(local_retention_ms=1000)
    assert not p.is_tiered
    p = logs.restart(clean=False)
    assert not p.is_tiered, "its properties are on disk after its log start"
