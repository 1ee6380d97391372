"""Snapshots: what is written comes back; what is damaged, foreign or incomplete is an error."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path

import pyarrow as pa
import pytest

from kdirect.errors import StateDirectoryError
from kdirect.state import snapshots
from kdirect.state.batches import Manifest, Part

PLAN = "12" * 32
SCHEMA = pa.schema([("key", pa.int64()), ("count", pa.int64())])
ALL = (0, 256)


def batch_of(vpart: int) -> pa.RecordBatch:
    schema = SCHEMA.with_metadata({"of": str(vpart)})
    return pa.record_batch([[vpart, vpart + 1], [1, vpart]], schema=schema)


def written(root: Path, batch: int = 7, executors: int = 2) -> Manifest:
    directory = snapshots.snapshot_directory(root, batch)
    each = 256 // executors
    parts = tuple(
        snapshots.write_part(
            directory,
            f"part-{i}-of-{executors}.arrow",
            ((v, batch_of(v)) for v in range(i * each, (i + 1) * each) if v % 3),
            vparts=(i * each, (i + 1) * each),
            plan_hash=PLAN,
            batch=batch,
        )
        for i in range(executors)
    )
    manifest = Manifest(number=batch, plan_hash=PLAN, parts=parts)
    snapshots.write_manifest(root, manifest)
    return manifest


def read(
    root: Path, manifest: Manifest, part: Part, vparts: tuple[int, int] = ALL
) -> list[tuple[int, pa.RecordBatch]]:
    directory = snapshots.snapshot_directory(root, manifest.number)
    return list(
        snapshots.read_part(directory, part, plan_hash=PLAN, batch=manifest.number, vparts=vparts)
    )


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    manifest = written(tmp_path)
    assert snapshots.manifests(tmp_path) == (manifest,)
    found = [item for part in manifest.parts for item in read(tmp_path, manifest, part)]
    assert [v for v, _ in found] == [v for v in range(256) if v % 3]
    assert all(batch.equals(batch_of(v), check_metadata=True) for v, batch in found)


def test_only_the_virtual_partitions_asked_for_are_read(tmp_path: Path) -> None:
    manifest = written(tmp_path)
    assert [v for v, _ in read(tmp_path, manifest, manifest.parts[1], (100, 134))] == [
        128, 130, 131, 133,
    ]  # fmt: skip


def test_parts_without_a_manifest_are_no_snapshot(tmp_path: Path) -> None:
    older = written(tmp_path, 3)
    written(tmp_path, 9)
    (snapshots.snapshot_directory(tmp_path, 9) / snapshots.MANIFEST).unlink()
    assert snapshots.manifests(tmp_path) == (older,)


def test_snapshots_come_in_order_and_what_never_became_one_does_not_count(tmp_path: Path) -> None:
    for batch in (9, 1, 12, 4):
        written(tmp_path, batch)
    (tmp_path / f"{11:020}").mkdir()
    assert [manifest.number for manifest in snapshots.manifests(tmp_path)] == [1, 4, 9, 12]


def left_out(root: Path, caplog: pytest.LogCaptureFixture, what: str) -> None:
    """The only snapshot is not used, and a warning says why."""
    caplog.clear()
    assert snapshots.manifests(root) == ()
    (record,) = caplog.records
    assert re.search(what, record.getMessage())


def test_a_truncated_part_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest = written(tmp_path)
    path = snapshots.snapshot_directory(tmp_path, 7) / manifest.parts[0].file
    path.write_bytes(path.read_bytes()[:-1])
    left_out(tmp_path, caplog, rf"{path}.*manifest says")
    with pytest.raises(StateDirectoryError, match="manifest says"):
        read(tmp_path, manifest, manifest.parts[0])
    path.unlink()
    left_out(tmp_path, caplog, "missing")
    with pytest.raises(StateDirectoryError, match="cannot be read"):
        read(tmp_path, manifest, manifest.parts[0])


def test_each_flipped_byte_of_a_part_is_found(tmp_path: Path) -> None:
    manifest = written(tmp_path)
    path = snapshots.snapshot_directory(tmp_path, 7) / manifest.parts[0].file
    whole = path.read_bytes()
    for at in range(0, len(whole), 37):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(StateDirectoryError, match="CRC"):
            read(tmp_path, manifest, manifest.parts[0])


def test_a_foreign_part_with_a_matching_manifest_is_refused(tmp_path: Path) -> None:
    manifest = written(tmp_path)
    directory = snapshots.snapshot_directory(tmp_path, 7)
    name = manifest.parts[0].file
    foreign = snapshots.write_part(
        directory, name, [(0, batch_of(0))], vparts=(0, 128), plan_hash="ff", batch=7
    )
    with pytest.raises(StateDirectoryError, match="another plan or batch"):
        read(tmp_path, manifest, foreign)
    outside = snapshots.write_part(
        directory, name, [(200, batch_of(0))], vparts=(0, 128), plan_hash=PLAN, batch=7
    )
    with pytest.raises(StateDirectoryError, match="record batch 0 is of no virtual partition"):
        read(tmp_path, manifest, outside)
    text = b"not arrow"
    (directory / name).write_bytes(text)
    forged = Part(file=name, first=0, last=128, size=len(text), crc=zlib.crc32(text))
    with pytest.raises(StateDirectoryError, match="no Arrow file"):
        read(tmp_path, manifest, forged)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"number": 8},
        {"parts": []},
        {"parts": [["../../elsewhere", 0, 256, 0, 0]]},
        {"parts": None},
        {"more": 1},
    ],
    ids=str,
)
def test_a_changed_manifest_is_refused(
    tmp_path: Path, change: dict, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path)
    path = snapshots.snapshot_directory(tmp_path, 7) / snapshots.MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    left_out(tmp_path, caplog, snapshots.MANIFEST)


def test_a_damaged_manifest_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(tmp_path)
    path = snapshots.snapshot_directory(tmp_path, 7) / snapshots.MANIFEST
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    left_out(tmp_path, caplog, "cannot be read")
