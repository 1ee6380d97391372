"""Schedules of the real drivers against a model: produce, roll, copy, retention, deletion, crash
and restart, changes of the configuration, over a store that fails; and mistakes that they find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kdirect.errors import KdirectError
from kdirect.log.partition import Partition
from kdirect.storage import copy_rules, remote_log, remote_logs
from kdirect.storage.remote_logs import RemoteLogs
from kdirect.storage.segment_states import PartitionMetadata
from tests.storage.driver_schedules import quiet, run
from tests.storage.world import bytes_here

COUNT = 300


@pytest.fixture(autouse=True)
def _quiet() -> None:
    quiet()


@pytest.mark.parametrize("first", range(0, COUNT, 50))
def test_schedules(first: int) -> None:
    total: Counter[str] = Counter()
    for seed in range(first, first + 50):
        try:
            total += run(seed)[0]
        except Exception as e:
            raise AssertionError(f"seed {seed}: {e}") from e
    print(dict(total))
    for what in ("stored", "local_deleted", "deaths", "switched", "records_deleted", "outages"):
        assert total[what] > 20, total
    assert total["topics_deleted"] == 10


def test_a_seed_repeats_a_run() -> None:
    assert run(3) == run(3)


Patch = Callable[[pytest.MonkeyPatch], None]


def _log_start_stays_in_memory(patch: pytest.MonkeyPatch) -> None:
    """As it was when a topic became tiered again."""
    reconfigure = Partition.reconfigure

    def changed(partition: Partition, config: Any, write: Any = lambda: None) -> None:
        start, partition._start_on_disk = partition._start_on_disk, partition.log_start_offset
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(partition, "_put_start_on_disk", lambda: None)
            reconfigure(partition, config, write)
        partition._start_on_disk = start

    patch.setattr(Partition, "reconfigure", changed)


def _bytes_count_twice(patch: pytest.MonkeyPatch) -> None:
    """As it was while copies were about to go."""

    def twice(local: Any, remote: Any, start: int) -> int:
        return int(remote.bytes_from(start)) + bytes_here(local, start)

    patch.setattr(copy_rules, "whole_size", twice)


def _a_failed_deletion_is_done(patch: pytest.MonkeyPatch) -> None:
    ended = remote_log.DeleteEnded
    patch.setattr("kdirect.storage.remote_events.DeleteEnded", lambda i, done: ended(i, True))


def _a_copy_that_counts_is_given_up(patch: pytest.MonkeyPatch) -> None:
    update = PartitionMetadata._update

    def both(metadata: PartitionMetadata, record: Any) -> None:
        update(metadata, record)
        if (segment := metadata.segments.get(record.segment_id)) is not None:
            metadata.given_up[record.segment_id] = segment

    patch.setattr(PartitionMetadata, "_update", both)


def _a_sweep_deletes_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(remote_logs, "delete_given_up", lambda *arguments: iter(()))


def _an_upload_that_failed_is_there(patch: pytest.MonkeyPatch) -> None:
    put = RemoteLogs._put

    def always(self: RemoteLogs, *arguments: Any) -> Any:
        try:
            return put(self, *arguments)
        except KdirectError:
            return remote_log.TailPlace(1, 1)

    patch.setattr(RemoteLogs, "_put", always)


def _nothing_is_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(remote_log, "next_to_copy", lambda *arguments: None)


def _the_log_start_does_not_move(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Partition, "move_log_start", lambda self, offset: offset)


# Each with a seed that finds it.  The first two were defects, and their seeds found them.
MISTAKES: dict[str, tuple[Patch, int]] = {
    "a log start that is not on disk": (_log_start_stays_in_memory, 59),
    "bytes that count twice": (_bytes_count_twice, 2),
    "a deletion that failed is done": (_a_failed_deletion_is_done, 0),
    "a copy that counts is given up": (_a_copy_that_counts_is_given_up, 2),
    "a sweep that deletes nothing": (_a_sweep_deletes_nothing, 17),
    "an upload that failed is there": (_an_upload_that_failed_is_there, 0),
    "nothing is copied": (_nothing_is_copied, 4),
    "a log start that moves nowhere": (_the_log_start_does_not_move, 3),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_schedules_find(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, seed = MISTAKES[name]
    run(seed)
    plant(monkeypatch)
    with pytest.raises(Exception) as found:
        run(seed)
    print(f"seed {seed}: {found.value}")
