"""Snapshots: what is written comes back; what is damaged, foreign or incomplete is an error."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdirect.errors import StateDirectoryError
from kdirect.format.batch import crc32c
from kdirect.state import snapshots
from kdirect.state.batches import Manifest, Part
from kdirect.state.snapshot_writer import SnapshotWriter
from kdirect.state.snapshots import Section

PLAN = "12" * 32


def section_of(number: int) -> Section:
    return Section({"of": number}, np.arange(number * 7, dtype=np.uint64))


def written(root: Path, batch: int = 7, executors: int = 2) -> Manifest:
    directory = snapshots.snapshot_directory(root, batch)
    each = 256 // executors
    parts = tuple(
        snapshots.write_part(
            directory,
            f"part-{i}-of-{executors}",
            [section_of(n) for n in range(i, 9 * i)],
            executors=executors,
            vparts=(i * each, (i + 1) * each),
            plan_hash=PLAN,
            batch=batch,
        )
        for i in range(executors)
    )
    manifest = Manifest(number=batch, plan_hash=PLAN, parts=parts)
    snapshots.write_manifest(root, manifest)
    return manifest


def read(root: Path, manifest: Manifest, part: Part) -> snapshots.PartReader:
    directory = snapshots.snapshot_directory(root, manifest.number)
    return snapshots.PartReader(directory, part, plan_hash=PLAN, batch=manifest.number)


def test_a_snapshot_that_was_half_removed_goes_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A kill left its manifest with some of its parts: it stayed, and each start warned of it."""
    for batch in (3, 7):
        written(tmp_path, batch)

    def killed(directory: Path, **_: Any) -> None:
        next(directory.glob("part*")).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as dying, pytest.raises(KeyboardInterrupt):
        dying.setattr(shutil, "rmtree", killed)
        snapshots.forget(tmp_path, 3)
    assert [manifest.number for manifest in snapshots.manifests(tmp_path)] == [7]
    assert not caplog.records
    snapshots.forget(tmp_path, 7)
    assert not list(tmp_path.iterdir())


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    manifest = written(tmp_path)
    assert snapshots.manifests(tmp_path) == (manifest,)
    for i, part in enumerate(manifest.parts):
        with read(tmp_path, manifest, part) as reader:
            assert (reader.executors, reader.vparts) == (2, (128 * i, 128 * i + 128))
            heads = []
            for section in reader:
                heads.append(section.head)
                assert checked_words(section.data) == list(range(section.head["of"] * 7))
            assert heads == [{"of": n} for n in range(i, 9 * i)]


def checked_words(data: memoryview) -> list[int]:
    words = np.frombuffer(data, np.uint64)
    assert words.ctypes.data % 64 == 0
    return words.tolist()


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


# In a process of its own: a file that is mapped and cut short ends its reader by a signal.
CUT_SHORT = """
import json, os, sys
from pathlib import Path
from kdirect.errors import StateDirectoryError
from kdirect.state import snapshots
from kdirect.state.batches import Part

path, plan, how = Path(sys.argv[1]), sys.argv[2], sys.argv[4]
part = Part.from_json(json.loads(sys.argv[3]))
reader = snapshots.PartReader(path.parent, part, plan_hash=plan, batch=7)
if how == "cut":
    os.truncate(path, 0)
else:
    with open(path, "r+b") as file:
        file.seek(part.size - 64)
        file.write(bytes(8))
try:
    for section in reader:
        sum(bytes(section.data))
except StateDirectoryError as e:
    print(e, e.hint)
"""


@pytest.mark.parametrize(
    ("how", "what"), [("cut", "cut short while it was read"), ("write", "has changed")]
)
def test_a_part_that_changes_while_it_is_read_is_refused_by_name(
    tmp_path: Path, how: str, what: str
) -> None:
    """It was mapped: what was cut off under it ended the process (SIGBUS)."""
    manifest = written(tmp_path)
    part = manifest.parts[1]
    path = snapshots.snapshot_directory(tmp_path, 7) / part.file
    given = json.dumps([part.file, part.first, part.last, part.size, part.crc])
    found = subprocess.run(
        [sys.executable, "-c", CUT_SHORT, path, PLAN, given, how], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert f"{path}: " in found.stdout and what in found.stdout and snapshots.OTHER in found.stdout


def test_each_flipped_byte_of_a_part_is_found(tmp_path: Path) -> None:
    manifest = written(tmp_path)
    path = snapshots.snapshot_directory(tmp_path, 7) / manifest.parts[0].file
    whole = path.read_bytes()
    for at in range(0, len(whole), 37):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(StateDirectoryError, match="CRC"):
            read(tmp_path, manifest, manifest.parts[0])


def head_of(changes: dict[str, Any]) -> bytes:
    values = {"plan": PLAN, "batch": 7, "executors": 2, "sections": [[{}, 64]], **changes}
    return json.dumps({k: v for k, v in values.items() if v is not None}).encode()


def forged(root: Path, name: str, *, magic: int = snapshots.MAGIC, version: int = 2,
           head: bytes | None = None, length: int | None = None) -> Part:  # fmt: skip
    """A part whose CRC is right."""
    head = head_of({}) if head is None else head
    length = len(head) if length is None else length
    fixed = struct.pack("<QIIQQ32x", magic, version, 0, length, 0)
    data = fixed + head + bytes(-len(head) % 64) + bytes(64)
    (snapshots.snapshot_directory(root, 7) / name).write_bytes(data)
    return Part(file=name, first=0, last=128, size=len(data), crc=crc32c(data))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"magic": 1}, "this is no part of a snapshot"),
        ({"version": 1}, "a part of version 1; this build reads 2"),
        ({"length": 1 << 40}, "are not JSON"),
        ({"head": b"[]"}, "not an object"),
        ({"head": head_of({"plan": "ff"})}, "another plan or batch"),
        ({"head": head_of({"batch": 8})}, "another plan or batch"),
        ({"head": head_of({"executors": 0})}, "executors"),
        ({"head": head_of({"more": 1})}, "more"),
        ({"head": head_of({"sections": None})}, "sections"),
        ({"head": head_of({"sections": [[{}]]})}, "not described"),
        ({"head": head_of({"sections": [[{}, 65]]})}, "a section"),
        ({"head": head_of({"sections": [[{}, -1]]})}, "a section"),
        ({"head": head_of({"sections": []})}, "do not fill it"),
    ],
    ids=str,
)
def test_a_forged_part_with_a_matching_manifest_is_refused(
    tmp_path: Path, changes: dict, what: str
) -> None:
    manifest = written(tmp_path)
    assert len(list(read(tmp_path, manifest, forged(tmp_path, "good")))) == 1
    part = forged(tmp_path, "forged", **changes)
    with pytest.raises(StateDirectoryError, match=what) as raised:
        read(tmp_path, manifest, part)
    assert "forged: " in str(raised.value)


def test_a_part_that_is_given_up_leaves_no_file(tmp_path: Path) -> None:
    part = snapshots.write_part(
        tmp_path, "part", [section_of(3)], executors=1, vparts=(0, 256), plan_hash=PLAN,
        batch=7, cancelled=lambda: True,
    )  # fmt: skip
    assert part is None
    assert not list(tmp_path.iterdir())


def test_what_never_became_a_snapshot_goes_with_the_one_after_it(tmp_path: Path) -> None:
    for batch in (1, 2, 3, 4, 5):
        written(tmp_path, batch)
    for batch in (2, 4):
        (snapshots.snapshot_directory(tmp_path, batch) / snapshots.MANIFEST).unlink()
    snapshots.forget(tmp_path, 3)
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [1, 4, 5]


def test_a_writer_tells_what_became_of_each_copy_and_nothing_after_its_end() -> None:
    said: list[Any] = []
    part = Part(file="p", first=0, last=256, size=0, crc=0)
    go, thread = threading.Event(), threading.get_ident()

    def write(sections: Any, cancelled: Any) -> Part:
        assert threading.get_ident() != thread
        go.wait(10)
        if sections == "bad":
            raise OSError("no room")
        return part

    writer = SnapshotWriter()
    writer.write("good", write, said.append, said.append)  # type: ignore[arg-type]
    assert not said
    go.set()
    writer.write("bad", write, said.append, said.append)  # type: ignore[arg-type]
    writer.wait()
    assert said[0] == part and isinstance(said[1], OSError)
    go.clear()
    writer.write("late", write, said.append, said.append)  # type: ignore[arg-type]
    threading.Timer(0.05, go.set).start()
    writer.close()
    assert len(said) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"version": 3},
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
