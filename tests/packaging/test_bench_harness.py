"""The harness of the benchmarks: calls, results and failures.  Shapes only: no figure is held
against a limit here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
NAMES = [
    "codec-decode",
    "codec-views",
    "codec-encode",
    "state-update",
    "state-merge",
    "shm-read",
    "channel-bandwidth",
    "channel-latency",
    "slot-poll",
    "consume-partitions",
    "produce-rtt",
    "commit",
    "txn-rdma",
    "txn-exclusive",
    "produce-pipelined",
]
NAMES += [
    "produce-cpu",
    "produce-exclusive",
    "produce-rolls",
    "produce-shared",
    "produce-notify",
    "quiet",
    "compact",
    "load-offsets",
    "tcp-cpu",
    "idle",
    "stall",
]
NAMES += ["push-sizes", "push-cpu", "catch-up", "cluster-idle"]
NAMES += ["workload-generate", "slash-decode", "slash-engine", "slash-skew"]
NAMES += ["slash-ysb", "slash-nb7", "slash-nb8", "slash-nb11", "slash-cm", "slash-ro"]
NAMES += ["slash-empty", "slash-recovery", "slash-cold"]
NAMES += ["tier-copy", "tier-fetch", "tier-direct", "tier-tail", "tier-rebuild"]
NAMES += ["tier-backfill"]
NAMES += ["spark-read-ceiling", "spark-pushdown", "spark-values", "real-time"]
NAMES += ["latest-offset", "read-committed"]
NAMES += ["spark-sink-once", "spark-sink-micro", "attempts-join", "attempts-commit"]
HARNESS = ("run.py", "catalogue.py", "figures.py")
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
        *NAMES[:10],
        "produce-cpu",
        "produce-exclusive",
        "produce-rolls",
        "produce-shared",
        "produce-notify",
        "quiet",
        "stall",
        "catch-up",
        "workload-generate",
        "slash-decode",
        "tier-copy",
        "tier-fetch",
        "tier-direct",
        "tier-tail",
        "tier-rebuild",
        "latest-offset",
        "read-committed",
        "attempts-join",
        "attempts-commit",
        pytest.param("tier-backfill", marks=pytest.mark.spark),
    ],
)
def test_quick_row_has_the_agreed_shape(
    row: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if row.startswith("tier-") and row != "tier-backfill":
        request.getfixturevalue("s3proxy_jars")
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
    for name in HARNESS:
        (home / name).write_text((ROOT / "bench" / name).read_text())
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
def figure(value, settings):
    unit = settings.pop("unit", "us")
    return {"row": "r", "unit": unit, "value": value, "settings": settings}
def wrap(rounds):
    given = {"size": 4, "commit": "x"}
    return [[figure(value, {**given, **more}) for value, more in one] for one in rounds]
before, after = json.loads(sys.argv[1])
found = compare.compare("r", wrap(before), wrap(after))
print(json.dumps([{**f, "worse": compare.is_worse(f, 5)} for f in found]))
"""


def compared(before: list[list[list[Any]]], after: list[list[list[Any]]]) -> list[dict[str, Any]]:
    run = subprocess.run(
        [sys.executable, "-c", COMPARE, json.dumps([before, after])],
        capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "bench"), "PYTHONSAFEPATH": "1"},
    )  # fmt: skip
    return list(json.loads(run.stdout))


def test_a_comparison_knows_figures_by_their_parameters_and_what_is_better() -> None:
    less = {"lower_is_better": True}
    before = [[[10, less], [100, {}]], [[11, less], [110, {}]], [[12, less], [105, {}]]]
    after = [[[210, {}], [22, less]], [[200, {}], [20, less]], [[220, {}], [24, less]]]
    found = {bool(f["settings"].get("lower_is_better")): f for f in compared(before, after)}
    assert (found[True]["change"], found[True]["worse"]) == (0.5, True)
    assert found[True]["settings"] == {"size": 4, **less}
    assert (found[False]["change"], found[False]["worse"]) == (2.0, False)
    assert found[False]["settings"] == {"size": 4}


def test_figures_that_say_the_same_are_known_by_their_order() -> None:
    rounds = [[[10, {}], [100, {}]]]
    assert [f["change"] for f in compared(rounds, [[[20, {}], [300, {}]]])] == [2.0, 3.0]


def test_what_a_run_finds_out_is_kept_and_makes_no_other_figure() -> None:
    before = [[[10, {"p99_us": 1.5, "samples": 7}]], [[10, {"p99_us": 2.5, "samples": 8}]]]
    after = [[[10, {"p99_us": 3.5, "samples": 9}]], [[10, {"p99_us": 4.5, "samples": 9}]]]
    [figure] = compared(before, after)
    assert (figure["change"], figure["settings"]) == (1.0, {"size": 4})
    assert figure["also"] == {
        "p99_us": {"before": [1.5, 2.5], "after": [3.5, 4.5]},
        "samples": {"before": [7, 8], "after": [9, 9]},
    }


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({"size": 4}, {"size": 8}, "size is 4 there, 8 here"),
        ({"unit": "ms"}, {"unit": "us"}, "unit is ms there, us here"),
        ({"how": "one poll"}, {"how": "two polls"}, "how is one poll there, two polls here"),
        ({}, {"lower_is_better": True}, "lower_is_better is missing there, True here"),
    ],
)
def test_a_figure_that_is_defined_otherwise_is_not_compared(
    before: dict[str, object], after: dict[str, object], told: str
) -> None:
    found = compared([[[10, before]]] * 2, [[[10, after]]] * 2)
    assert [f["change"] for f in found] == [None, None]
    assert found[0]["why"] == f"the other checkout has no such figure: {told}"


def test_values_that_overlap_are_not_worse_and_what_is_missing_is_told() -> None:
    assert compared([[[10, {}]], [[10, {}]]], [[[5, {}]], [[12, {}]]])[0]["worse"] is False
    [figure] = compared([[[10, {}]], [[10, {}]]], [[[5, {}]], []])
    assert figure["change"] is None
    assert figure["why"] == "the row failed in 1 of 2 rounds of this checkout"
    assert (figure["before"], figure["after"]) == ([10, 10], [5])
    [figure] = compared([[]], [[]])
    assert (figure["change"], figure["settings"], figure["worse"]) == (None, {}, False)
    assert "the row failed in 1 of 1 rounds of the other checkout" in figure["why"]


def computed(expression: str) -> Any:
    """The value of an expression over the modules of bench/."""
    code = f"import json, rows_recovery, rows_slash, sides; print(json.dumps({expression}))"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "bench"), "PYTHONSAFEPATH": "1"},
    )  # fmt: skip
    return json.loads(run.stdout)


def test_a_figure_keeps_the_spread_of_both_sides() -> None:
    found = computed("sides.spread_of([4.0, 1.0, 2.0, 3.0, 5.0], [7.0])")
    assert (found["rounds"], found["low"], found["high"]) == (5, 1.0, 5.0)
    assert found["quartiles"] == [1.5, 3.0, 4.5]
    assert found["against_low"] == found["against_high"] == 7.0
    assert found["against_quartiles"] == [7.0] * 3


def test_batches_of_the_state_engine_take_half_of_what_is_free() -> None:
    sizes = "[rows_slash.batch_size(n << 30) for n in (2, 10, 11, 100)]"
    assert computed(sizes) == [4_000_000, 4_000_000, 12_000_000, 12_000_000]


def test_a_recovery_is_from_the_first_executor_to_the_last_with_the_cpu_time_of_all() -> None:
    begins = "[(10.0, 1, 3.0), (11.0, 2, 5.0), (12.0, 1, 4.0)]"
    ends = "[(13.0, 1, 4.5), (15.0, 2, 8.0), (14.0, 1, 5.5)]"
    assert computed(f"vars(rows_recovery._took({begins}, {ends}))") == {
        "wall_s": 5.0,
        "cpu_s": 5.5,
    }


@pytest.fixture
def two_checkouts(tmp_path: Path) -> tuple[Path, Path]:
    """Two checkouts with an environment each, whose rows reach into what only their own has."""
    roots = tmp_path / "old", tmp_path / "new"
    for root, value in zip(roots, (4.0, 2.0), strict=True):
        (root / ".venv/bin").mkdir(parents=True)
        (root / ".venv/bin/python").symlink_to(sys.executable)
        (root / "bench").mkdir()
        for name in (*HARNESS, "compare.py"):
            (root / "bench" / name).write_text((ROOT / "bench" / name).read_text())
        (root / f"bench/inside_{root.name}.py").write_text(f"VALUE = {value}\n")
        (root / "bench/rows_direct.py").write_text(
            "import os\n"
            "def slot_poll(seconds, quick):\n"
            f"    import inside_{root.name} as inside\n"
            "    return [{'value': inside.VALUE, 'unit': 'us', 'settings': {\n"
            "        'lower_is_better': True, 'took_s': 1.0, 'same': True}}]\n"
            "def produce_rtt(seconds, quick):\n"
            f"    'A text, which is no part of what is measured: {root.name}.'\n"
            "    return [{'value': 7, 'unit': os.environ['PYSPARK_PYTHON']}]\n"
        )
    rows = roots[0] / "bench/catalogue.py"
    rows.write_text(rows.read_text().replace('"quiet",', '"quiet-before",'))
    return roots


def test_each_checkout_runs_its_own_rows(two_checkouts: tuple[Path, Path], tmp_path: Path) -> None:
    old, new = two_checkouts
    command = [str(new / ".venv/bin/python"), str(new / "bench/compare.py"), "--before", str(old)]
    command += ["--rows", "slot-poll quiet-before quiet produce-rtt", "--rounds", "2"]
    command += ["--json", str(tmp_path / "out.json")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1, run.stderr
    poll, before_only, after_only, *rtt = json.loads((tmp_path / "out.json").read_text())
    assert (poll["row"], poll["change"], poll["why"]) == ("slot-poll", 2.0, None)
    assert (poll["before"], poll["after"]) == ([4.0, 4.0], [2.0, 2.0])
    assert poll["median"] == {"before": 4.0, "after": 2.0}
    assert poll["also"] == {"took_s": {"before": [1.0, 1.0], "after": [1.0, 1.0]}}
    # A function whose text alone differs is the same; one whose code differs is named.
    assert poll["differing_code"] == ["slot_poll"]
    assert "the checkouts differ in rows_direct.py: slot_poll\n" in run.stdout
    assert before_only["why"] == "this checkout has no such row"
    assert after_only["why"] == "the other checkout has no such row"
    assert "quiet was not compared: the other checkout has no such row" in run.stdout
    # What starts Python by name, as Spark does, starts each checkout's own.
    assert {e["unit"] for e in rtt} == {str(root / ".venv/bin/python") for root in (old, new)}
    assert f"unit is {old}/.venv/bin/python there" in rtt[0]["why"]


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
