"""The comparison with Kafka: every row runs, on both systems, and its report is made.  Shapes only:
no figure is held against a limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
NAMES = [
    "produce-latency",
    "produce-bandwidth",
    "produce-scaling",
    "consume-latency",
    "consume-bandwidth",
    "empty-fetch",
    "end-to-end",
    "spark-read",
    "spark-available-now",
    "spark-sink",
    "micro-batch",
    "event-delay",
    "consumer-scaling",
    "backlog",
]
KEYS = ["row", "value", "unit", "against", "against_value", "ratio", "settings"]


def versus(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "bench/vs_kafka.py"), *map(str, arguments)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )


def test_list_names_the_rows() -> None:
    run = versus("--list")
    assert run.returncode == 0
    assert [line.split()[0] for line in run.stdout.splitlines()] == NAMES


def test_unknown_row_names_the_nearest(tmp_path: Path) -> None:
    run = versus("--rows", "spark-reed", "--json", tmp_path / "out.json")
    assert run.returncode == 2 and "did you mean spark-read?" in run.stderr
    assert not (tmp_path / "out.json").exists()


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_row_runs_on_both_systems(
    broker_jars: list[Path], connector_jars: list[Path], tmp_path: Path
) -> None:
    target = tmp_path / "out.json"
    run = versus("--quick", "--seconds", 4, "--json", target)
    assert run.returncode == 0, run.stderr[-6000:]
    figures = json.loads(target.read_text())
    assert list(dict.fromkeys(f["row"].split(".")[0] for f in figures)) == NAMES
    for figure in figures:
        assert list(figure) == KEYS
        assert figure["against"].startswith("Apache Kafka 4.1")
        assert figure["value"] >= 0 and figure["against_value"] >= 0
        settings = figure["settings"]
        assert {"cpu", "cores", "load_average", "commit", "factor", "results"} <= set(settings)
        assert set(settings["results"]) >= {"kdirect", "kafka"}
        for result in settings["results"].values():
            assert any(name.startswith(("publish", "consume", "endToEnd")) for name in result), (
                result
            )
    assert "set_up" in figures[0]["settings"]

    report = target.with_suffix(".md").read_text()
    for name in NAMES:
        assert any(f["row"].startswith(name) for f in figures)
    for section in (
        "## Bars",
        "## All figures",
        "## What was not measured, and why",
        "log.segment.delete.delay.ms",
    ):
        assert section in report
    plots = sorted(p.name for p in tmp_path.glob("*.png"))
    assert plots == ["out-consume.png", "out-produce.png", "out-spark.png"]
    assert all(f"]({name})" in report for name in plots)


def in_bench(
    code: str, *arguments: object, **environment: object
) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, because the benchmark's modules are not a package that is
    installed."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "bench"), "PYTHONSAFEPATH": "1",
             **{k: str(v) for k, v in environment.items()}},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("cluster", ["-8XVn2dQSbW0zH5J3q7FPA", "MkU3OEVBNTcwNTJENDM2Qk"])
def test_no_cluster_id_is_taken_for_an_option(cluster: str) -> None:
    """One random id in 64 begins with a dash, and as an argument of its own Kafka's tool takes it
    for an option."""
    code = (
        "import sys; from versus import systems;"
        " print(*systems.format_arguments(*sys.argv[1:]), sep='\\n')"
    )
    run = in_bench(code, cluster, "server.properties")
    arguments = run.stdout.splitlines()
    assert f"--cluster-id={cluster}" in arguments, run.stderr
    assert cluster not in arguments


def test_a_jar_with_another_sum_is_not_used(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; from versus import jars;"
        " jars.LIST = pathlib.Path(sys.argv[1]); jars.jars('broker')"
    )
    (tmp_path / "jars.txt").write_text("broker org.slf4j:slf4j-api:1.7.36 " + "0" * 64 + "\n")
    (tmp_path / "org.slf4j-slf4j-api-1.7.36.jar").write_bytes(b"something else")
    run = in_bench(code, tmp_path / "jars.txt", KDIRECT_JARS=tmp_path)
    assert run.returncode != 0 and "SHA-256" in run.stderr
    assert not (tmp_path / "org.slf4j-slf4j-api-1.7.36.jar").exists()
