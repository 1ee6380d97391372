"""The comparison with Kafka: every row runs, on both systems, and its report is made.  Shapes only:
no figure is held against a limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import jars_module

ROOT = Path(__file__).resolve().parent.parent.parent
NAMES = [
    "produce-latency",
    "produce-bandwidth",
    "produce-scaling",
    "tcp-produce",
    "commit",
    "txn",
    "consume-latency",
    "consume-bandwidth",
    "empty-fetch",
    "end-to-end",
    "spark-read",
    "spark-available-now",
    "spark-first-query",
    "tier-backfill",
    "spark-sink",
    "micro-batch",
    "event-delay",
    "consumer-scaling",
    "backlog",
]
CLUSTERS = [
    "replicate-latency",
    "replicate-bandwidth",
    "replicate-factor",
    "replicate-slow",
    "failover",
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
    assert [line.split()[0] for line in run.stdout.splitlines()] == [*NAMES, *CLUSTERS]


def test_unknown_row_names_the_nearest(tmp_path: Path) -> None:
    run = versus("--rows", "spark-reed", "--json", tmp_path / "out.json")
    assert run.returncode == 2 and "did you mean spark-read?" in run.stderr
    assert not (tmp_path / "out.json").exists()


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_row_runs_on_both_systems(
    broker_jars: list[Path], tiered_jars: list[Path], connector_jars: list[Path], tmp_path: Path
) -> None:
    target = tmp_path / "out.json"
    run = versus("--rows", " ".join(NAMES), "--quick", "--seconds", 4, "--json", target)
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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_row_over_clusters_runs(broker_jars: list[Path], tmp_path: Path) -> None:
    """One row of five, because each starts clusters of both systems for every path."""
    target = tmp_path / "out.json"
    names = "replicate-latency"
    run = versus("--rows", names, "--quick", "--seconds", 4, "--count", 1, "--json", target)
    assert run.returncode == 0, run.stderr[-6000:]
    figures = json.loads(target.read_text())
    assert list(dict.fromkeys(f["row"].split(".")[0] for f in figures)) == [names]
    for figure in figures:
        assert list(figure) == KEYS
        assert figure["against"].startswith("Apache Kafka 4.1") and figure["against_value"] > 0
        settings = figure["settings"]
        assert {"path", "path_means", "order", "results", "warm_up_s"} <= set(settings)
        measured = {"kafka", "kdirect"} if figure["value"] is not None else {"kafka"}
        assert set(settings["results"]) == measured
        # A stock client and replicas that fetch over TCP need nothing of the machine.
        assert settings["path"] != "tcp-fetch" or figure["value"] is not None, settings
        if figure["value"] is None:
            assert settings["not_measured"] in run.stdout
        for goal in {"bar", "limit"} & set(settings):
            assert f"goal: {figure['row']}" in run.stdout and f"{goal}_met" in settings
    assert (tmp_path / "out-replicate.png").exists()


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


def test_a_jar_with_a_classifier_is_fetched_beside_the_one_without(tmp_path: Path) -> None:
    """One module, two jars, in one call of Ivy: each is what its coordinates name."""
    listed = jars_module()
    every = {c: s for _, c, s in (x.split() for x in listed.LIST.read_text().splitlines())}
    plain = "org.apache.kafka:kafka-storage:4.1.0"
    lines = [f"two {c} {every[c]}\n" for c in (f"{plain}:test", plain)]
    listed.LIST = tmp_path / "jars.txt"
    listed.LIST.write_text("".join(lines))
    run = in_bench(
        "import pathlib, sys; from versus import jars;"
        " jars.LIST = pathlib.Path(sys.argv[1]); print(*jars.jars('two'))",
        listed.LIST, KDIRECT_JARS=tmp_path / "jars",
    )  # fmt: skip
    if "MissingJarsError" in run.stderr:
        pytest.skip("the jars cannot be fetched from Maven Central")
    assert run.returncode == 0, run.stderr
    names = [Path(path).name for path in run.stdout.split()]
    found = "org.apache.kafka-kafka-storage-4.1.0"
    assert names == [f"{found}-test.jar", f"{found}.jar"]


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


FIGURES = """
import json, sys
from versus import measure, report
from versus.lives import FIRST, KAFKA, STOCK_PUSH, Found
from catalogue import Row
from figures import complete, table

found = Found()
found.kafka.label = "Apache Kafka 4.1.0"
found.add(KAFKA, {512: [700_000] * 9})
found.add(FIRST, {512: [100_000] * 9})
found.missing[STOCK_PUSH.key] = "nothing is pushed"
figures = [
    measure.latency_figure(path.row("replicate-latency"), "publish", found.of(path, 512), found,
                           bar=bar, limit=("at most", 90), record_bytes=512, **found.told(path))
    for path, bar in ((FIRST, 6.5), (STOCK_PUSH, 1.3))
]
row = Row("replicate-latency", "", 4, "")
figures = [complete(row, figure, {"quick": True}) for figure in figures]
print(json.dumps(figures[1]))
print(table(figures))
print(report.goals(figures))
print(report._bars(figures))
"""


def test_what_is_not_possible_is_told_in_place_of_a_figure() -> None:
    run = in_bench(FIGURES)
    assert run.returncode == 0, run.stderr
    first, text = run.stdout.split("\n", 1)
    figure = json.loads(first)
    assert (figure["value"], figure["ratio"]) == (None, None)
    assert round(figure["against_value"]) == 700
    assert figure["settings"]["not_measured"] == "nothing is pushed"
    assert set(figure["settings"]["results"]) == {"kafka"}
    assert "replicate-latency was not measured (tcp-push): nothing is pushed\n" in text
    at = "(512 bytes a record)"
    for line in (
        f"goal: replicate-latency {at}: 7.0x against Kafka, goal 6.5x: reached",
        f"goal: replicate-latency {at}: 100 us, goal at most 90 us: missed",
        f"goal: replicate-latency.tcp-push {at}: nothing against Kafka, goal 1.3x: not measured",
    ):
        assert line in text.splitlines()
    assert "not measured: nothing is pushed |" in text


ORDER = """
import contextlib
from versus import lives
from versus.clusters import NotPossibleError

class Fake:
    address, settings = "", {}
    def __init__(self, brokers, **properties):
        print(self.key, brokers, properties.get("rdma.replicate", ""))
    def __enter__(self):
        return self
    def __exit__(self, *exception):
        pass

class Kafka(Fake):
    key = label = "kafka"

class Kdirect(Fake):
    key = label = "kdirect"

def prove(cluster, path):
    if path.pushed:
        raise NotPossibleError("nothing is\\n pushed")

def work(cluster, path):
    print("work", path.key)
    if path.own:
        raise RuntimeError("broken")
    return {1: path.key}

lives.KafkaCluster, lives.KdirectCluster, lives.prove = Kafka, Kdirect, prove
found = lives.lives(2, work, brokers=4)
print(found.order, found.missing, sorted(found.failed), found.of(lives.PATHS[3], 1))
"""


def test_clusters_alternate_and_a_path_that_is_not_possible_is_left_out() -> None:
    run = in_bench(ORDER)
    assert run.returncode == 0, run.stderr
    *lines, found = run.stdout.splitlines()
    first = ["kafka 4 ", "work kafka", "kdirect 4 true", "kdirect 4 false", "work shm-fetch"]
    second = ["kdirect 4 false", "work tcp-fetch", "kafka 4 ", "work kafka"]
    assert lines == [*first, "work tcp-fetch", *second]
    why = "nothing is pushed"
    missing = {"push": why, "tcp-push": why, "shm-fetch": "it failed: broken"}
    order = ["kafka", "kdirect", "kdirect", "kdirect", "kafka"]
    both = {"kdirect": ["tcp-fetch"] * 2, "kafka": ["kafka"] * 2}
    assert found == f"{order} {missing} {['shm-fetch']} {both}"


@pytest.mark.parametrize(
    ("samples", "expected"), [([5.0], 5.0), ([*range(20)], 17), ([2, 1], 2), ([*range(10)], 8)]
)
def test_the_ninetieth_percentile_is_one_of_the_samples(
    samples: list[float], expected: float
) -> None:
    code = "import json, sys; from versus.rows_failover import p90;" + (
        " print(p90(json.loads(sys.argv[1])))"
    )
    run = in_bench(code, json.dumps(samples))
    assert float(run.stdout) == expected, run.stderr
