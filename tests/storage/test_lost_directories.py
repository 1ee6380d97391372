"""A broker with tiered topics that has lost a part of what it had: a directory of a partition, its
metadata, or what it knew of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from kdirect.broker.topics import REMOTE_METADATA_TOPIC
from kdirect.errors import CorruptObjectError, LogError, RemoteUnavailableError
from kdirect.objects.store import ObjectStore
from kdirect.storage.rebuild import read_objects
from tests.object_servers import Place
from tests.storage.test_remote_tools import NOBODYS, rebuild
from tests.storage.tiered_broker import object_keys, tiered_broker

RECORDS = 2000


@pytest.fixture
def end(place: Place, tmp_path: Path) -> int:
    """What is tiered below this offset of a broker that has stopped."""
    with tiered_broker(place, tmp_path / "log") as tiers:
        tiers.create()
        tiers.produce(0, RECORDS)
        tiers.settle()
        return tiers.partition.local_log_start_offset


def everything(start: int, end: int) -> list[tuple[int, int]]:
    return [(i, i) for i in range(start, end)]


def test_a_lost_partition_goes_on_behind_its_copies(place: Place, tmp_path: Path, end: int) -> None:
    """Else new records get the offsets of old ones, and readers a mixture of both."""
    shutil.rmtree(tmp_path / "log" / "t-0")
    with tiered_broker(place, tmp_path / "log") as tiers:
        assert tiers.partition.log_end_offset == end
        tiers.produce(end, RECORDS)
        tiers.settle()
        assert tiers.consume(0, end + RECORDS) == everything(0, end + RECORDS)
    with tiered_broker(place, tmp_path / "log") as tiers:
        assert tiers.consume(0, end + RECORDS) == everything(0, end + RECORDS)


def test_a_log_of_yesterday_goes_on_behind_its_copies(place: Place, tmp_path: Path) -> None:
    """A directory was restored that is older than the copies."""
    with tiered_broker(place, tmp_path / "log") as tiers:
        tiers.create()
        tiers.produce(0, RECORDS // 2)
        tiers.settle()
    shutil.copytree(tmp_path / "log" / "t-0", tmp_path / "backup")
    with tiered_broker(place, tmp_path / "log") as tiers:
        tiers.produce(RECORDS // 2, RECORDS)
        tiers.settle()
        end = tiers.partition.local_log_start_offset
    shutil.rmtree(tmp_path / "log" / "t-0")
    shutil.copytree(tmp_path / "backup", tmp_path / "log" / "t-0")
    with tiered_broker(place, tmp_path / "log") as tiers:
        tiers.produce(end, RECORDS)
        tiers.settle()
        assert tiers.consume(0, end + RECORDS) == everything(0, end + RECORDS)


def test_a_lost_partition_whose_copy_is_damaged(place: Place, tmp_path: Path, end: int) -> None:
    store = place.store()
    key = object_keys(place)[1]
    store.delete(key)
    shutil.rmtree(tmp_path / "log" / "t-0")
    with pytest.raises(CorruptObjectError, match=key), tiered_broker(place, tmp_path / "log"):
        pass


@pytest.mark.parametrize("lost", ["metadata", "metadata and partition", "metadata and topics.json"])
def test_nothing_is_swept_when_the_metadata_is_lost(
    place: Place,
    tmp_path: Path,
    end: int,
    lost: str,
    capsys: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Every object would look like one that nobody owns."""
    log = tmp_path / "log"
    objects = object_keys(place)
    for directory in log.glob(f"{REMOTE_METADATA_TOPIC}-*"):
        shutil.rmtree(directory)
    if "partition" in lost:
        shutil.rmtree(log / "t-0")
    if "topics.json" in lost:
        (log / "topics.json").unlink()
    with (
        pytest.raises(LogError, match=r"__remote_log_metadata.*rebuild"),
        tiered_broker(place, log, remote_orphan_age_ms=1),
    ):
        pass
    assert "did not end in order" not in caplog.text
    assert object_keys(place) == objects
    log.rename(tmp_path / "away")
    assert rebuild(capsys, place, log)[0] == 0
    with tiered_broker(place, log) as tiers:
        assert tiers.consume(0, end) == everything(0, end)


def test_what_the_metadata_does_not_know_stays(place: Place, tmp_path: Path, end: int) -> None:
    """It may be another broker's, or the metadata an older copy."""
    with tiered_broker(place, tmp_path / "log", remote_orphan_age_ms=1) as tiers:
        keys = tiers.objects()
        unknown = keys[0][: -len(NOBODYS)] + NOBODYS
        place.store().put(unknown, 4, [b"data"])
        with pytest.raises(AssertionError, match="it did not come"):
            tiers.wait(lambda: unknown not in tiers.objects(), wait_s=3)


# -- rebuilding ------------------------------------------------------------------------------------


def test_a_rebuilt_log_of_a_later_leadership_goes_on(
    place: Place, tmp_path: Path, capsys: Any
) -> None:
    """Metadata that says it is of a later leadership than the broker's ends all its work."""
    log = tmp_path / "log"
    with tiered_broker(place, log) as tiers:
        tiers.create()
    (log / "t-0" / "leader-epoch-checkpoint").write_text("0\n1\n7 0\n")
    with tiered_broker(place, log) as tiers:
        assert tiers.partition.leader_epoch == 7
        tiers.produce(0, RECORDS)
        tiers.settle()
        end = tiers.partition.local_log_start_offset
    shutil.rmtree(log)
    assert rebuild(capsys, place, log)[0] == 0
    with tiered_broker(place, log) as tiers:
        tiers.produce(end, RECORDS)
        tiers.settle()
        assert tiers.consume(0, end + RECORDS) == everything(0, end + RECORDS)


def test_a_store_that_does_not_answer_ends_the_rebuilding(
    place: Place, tmp_path: Path, end: int, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left out of the metadata is an orphan, and deleted one day."""
    store = place.store()
    keys = object_keys(place)
    get_tail = ObjectStore.get_tail

    def once_away(self: ObjectStore, key: str, size: int, length: int) -> memoryview:
        if key == keys[1]:
            raise RemoteUnavailableError(f"get of {key}: 503")
        return get_tail(self, key, size, length)

    monkeypatch.setattr(ObjectStore, "get_tail", once_away)
    with pytest.raises(RemoteUnavailableError):
        read_objects(store, keys[0].partition("/")[0], lambda text: None)
    shutil.rmtree(tmp_path / "log")
    status, _, said = rebuild(capsys, place, tmp_path / "log")
    assert status != 0 and keys[1] in said
