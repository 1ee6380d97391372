"""The harness of the benchmarks: calls, results and failures.  Shapes only: no figure is held
against a limit here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
NAMES = [
    "codec-decode",
    "codec-encode",
    "shm-read",
    "slot-poll",
    "consume-partitions",
    "produce-rtt",
    "produce-pipelined",
]
NAMES += [
    "produce-cpu",
    "produce-exclusive",
    "produce-rolls",
    "produce-shared",
    "produce-notify",
    "quiet",
    "stall",
]
NAMES += ["spark-read-ceiling"]
KEYS = ["row", "value", "unit", "against", "against_value", "ratio", "settings"]


def bench(*arguments: object, home: Path = ROOT / "bench") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(home / "run.py"), *map(str, arguments)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )


def test_list_names_the_rows() -> None:
    run = bench("--list")
    assert run.returncode == 0
    assert [line.split()[0] for line in run.stdout.splitlines()][: len(NAMES)] == NAMES


def test_unknown_row_names_the_nearest(tmp_path: Path) -> None:
    run = bench("--rows", "codec-decode slot-pol", "--json", tmp_path / "out.json")
    assert run.returncode == 2
    assert "'slot-pol'" in run.stderr and "did you mean slot-poll?" in run.stderr
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    "row",
    [
        *NAMES[:5],
        "produce-cpu",
        "produce-exclusive",
        "produce-rolls",
        "produce-shared",
        "produce-notify",
        "quiet",
        "stall",
    ],
)
def test_quick_row_has_the_agreed_shape(row: str, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out.json"
    run = bench("--rows", row, "--json", target, "--quick", "--seconds", 2)
    assert run.returncode == 0, run.stderr
    figures = json.loads(target.read_text())
    assert figures
    for figure in figures:
        assert list(figure) == KEYS
        assert figure["row"].startswith(row)
        assert figure["value"] > 0 and figure["unit"]
        settings = figure["settings"]
        assert {"cpu", "cores", "load_average", "python", "commit", "pinned_to"} <= set(settings)
        assert settings["quick"] is True
        assert figure["against"] is None or figure["ratio"] > 0
        assert figure["row"] in run.stdout


@pytest.fixture
def broken_bench(tmp_path: Path) -> Path:
    """The real harness beside rows of our own: one that works, one that raises, one that dies of a
    signal."""
    home = tmp_path / "bench"
    home.mkdir()
    (home / "run.py").write_text((ROOT / "bench/run.py").read_text())
    (home / "rows_format.py").write_text(
        "import os, signal\n"
        "def codec_decode(seconds, quick):\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)\n"
        "def codec_encode(seconds, quick):\n"
        "    return [{'value': 3.0, 'unit': 'rows/s', 'against': 'memcpy', 'against_value': 4,\n"
        "             'settings': {'codec': 'none'}},\n"
        "            {'value': 1e6, 'unit': 'rows/s', 'settings': {'codec': 'gzip'}}]\n"
    )
    (home / "rows_rdma.py").write_text(
        "def shm_read(seconds, quick):\n    return [{'value': float('nan'), 'unit': 'B/s'}]\n"
    )
    return home


def test_a_crash_keeps_the_other_rows(broken_bench: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    run = bench("--rows", "codec-decode,codec-encode,shm-read", "--json", target, home=broken_bench)
    assert run.returncode == 1
    assert "failed: codec-decode shm-read" in run.stderr
    figures = json.loads(target.read_text())
    assert [(f["row"], f["ratio"], f["settings"]["codec"]) for f in figures] == [
        ("codec-encode", 0.75, "none"),
        ("codec-encode", None, "gzip"),
    ]
    assert "codec=gzip" in run.stdout and "0.75" in run.stdout


def test_single_process_rows_are_pinned(broken_bench: Path, tmp_path: Path) -> None:
    for flag, pinned in ((), True), (("--no-pin",), False):
        assert (
            bench(
                "--rows", "codec-encode", "--json", tmp_path / "out.json", *flag, home=broken_bench
            ).returncode
            == 0
        )
        settings = json.loads((tmp_path / "out.json").read_text())[0]["settings"]
        assert (settings["pinned_to"] is not None) == pinned


COMPARE = """
import json, sys
import compare
before, after = json.loads(sys.argv[1])
def wrap(rounds):
    figure = {"row": "r", "unit": "us"}
    return [[{**figure, "value": v, "settings": {"size": 4, "commit": "x", **more}}
             for v, more in one] for one in rounds]
found = compare.compare("r", wrap(before), wrap(after))
print(json.dumps([[f["change"], f["settings"], compare.is_worse(f, 5)] for f in found]))
"""


def compared(before: list[list[object]], after: list[list[object]]) -> list[list[object]]:
    run = subprocess.run(
        [sys.executable, "-c", COMPARE, json.dumps([before, after])],
        capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "bench"), "PYTHONSAFEPATH": "1"},
    )  # fmt: skip
    return list(json.loads(run.stdout))


def test_a_comparison_knows_figures_by_their_place_and_what_is_better() -> None:
    less = {"lower_is_better": True}
    before = [[[10, less], [100, {}]], [[11, less], [110, {}]], [[12, less], [105, {}]]]
    after = [[[22, less], [210, {}]], [[20, less], [200, {}]], [[24, less], [220, {}]]]
    assert compared(before, after) == [[0.5, {"size": 4, **less}, True], [2.0, {"size": 4}, False]]


def test_values_that_overlap_are_not_worse_and_what_is_missing_is_told() -> None:
    assert compared([[[10, {}]], [[10, {}]]], [[[5, {}]], [[12, {}]]])[0][2] is False
    assert compared([[[10, {}]], [[10, {}]]], [[[5, {}]], []])[0][0] is None
    assert compared([[]], [[]]) == [[None, {}, False]]


def test_a_comparison_needs_another_checkout_that_is_installed(tmp_path: Path) -> None:
    # An empty BEFORE is the directory that make runs in.
    for before, remedy in (
        (str(tmp_path), f"run make install in {tmp_path}"),
        ("", "name the root of another one"),
    ):
        command = [sys.executable, str(ROOT / "bench/compare.py"), "--before", before]
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
        )
        assert run.returncode == 2 and remedy in run.stderr
