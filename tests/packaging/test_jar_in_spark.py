"""The one jar in applications of spark-submit, with a Python that has pyspark, pyarrow and pandas
alone: batch, SQL, stream and sink, on one machine and on a cluster, on several versions of Spark.

The application is jar_jobs.py.  KDIRECT_SPARKS names the versions besides that of the tests.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kdirect_spark import one_jar, shim
from tests.packaging import bare_python
from tests.packaging.test_one_jar import bare, changed, jar  # noqa: F401 - fixtures
from tests.spark.slash_cluster import cluster
from tests.support import BrokerProcess

ROOT = Path(__file__).resolve().parent.parent.parent
JOBS = ROOT / "tests/packaging/jar_jobs.py"
VERSION = one_jar.kdirect.__version__
OTHER_SPARKS = os.environ.get("KDIRECT_SPARKS", "4.1.4 4.3.0").split()
METRICS = sorted(
    ["dataLoss", "offsetOutOfRange"]
    + [
        f"{which}{what}"
        for which in ("min", "max", "avg")
        for what in ("OffsetsBehindLatest", "TimeLagMs")
    ]
)
UNKNOWN = "kdirect's shim does not know this Spark"

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    broker = BrokerProcess(tmp_path_factory.mktemp("broker") / "log", {}).start()
    yield broker.bootstrap_servers
    broker.stop()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the packages are unpacked."""
    return tmp_path_factory.mktemp("cache")


def submit(
    python: Path, cache: Path, *arguments: object, **environment: str
) -> subprocess.CompletedProcess[str]:
    home = python.parents[1]
    (spark,) = home.glob("lib/python*/site-packages/pyspark")
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SPARK_", "KDIRECT"))
    }
    command = [str(spark / "bin" / "spark-submit"), "--conf", "spark.ui.enabled=false"]
    command += ["--conf", "spark.sql.shuffle.partitions=2", "--conf", "spark.log.level=WARN"]
    command += ["--conf", f"spark.sql.warehouse.dir={cache / 'warehouse'}"]
    return subprocess.run(
        [*command, *map(str, arguments)],
        env={**kept, "SPARK_HOME": str(spark), "PYSPARK_PYTHON": str(python),
             "PYSPARK_DRIVER_PYTHON": str(python), "SPARK_LOCAL_IP": "127.0.0.1",
             "XDG_CACHE_HOME": str(cache), **environment},
        cwd=cache, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip


def seen(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    (line,) = re.findall(r"^SEEN (.*)$", done.stdout, re.MULTILINE)
    return json.loads(line)


def rows(first: int, last: int, prefix: str = "") -> list[list[str]]:
    return [[str(i), f"{prefix}{i * 7}"] for i in range(first, last)]


def test_packages_from_a_repository_and_the_same_query_without_the_shim(
    jar, bare, servers, cache, tmp_path  # noqa: F811
):  # fmt: skip
    """With --packages, all is there.  Then the same jar as --py-files, where the JVM does not see
    it: the query goes on from its checkpoint, with Spark's own reading of rows."""
    one_jar.publish(jar, tmp_path / "maven")
    checkpoint = tmp_path / "checkpoint"
    found = seen(submit(
        bare, cache, "--master", "local[2]",
        "--packages", f"{one_jar.GROUP}:{one_jar.ARTIFACT}:{VERSION}",
        "--repositories", (tmp_path / "maven").as_uri(),
        "--conf", f"spark.jars.ivy={tmp_path / 'ivy'}",
        JOBS, servers, "packages", checkpoint,
    ))  # fmt: skip
    assert found["batch"] == rows(0, 100) and found["view"] == 100 and found["table"] == 100
    assert found["sink"] == rows(0, 100, "s") and found["metrics"] == METRICS
    assert found["columnar"] is True
    (path,) = found["jars"]
    assert path.startswith(str(tmp_path / "ivy"))

    done = submit(
        bare, cache, "--master", "local[2]", "--py-files", jar,
        JOBS, servers, "packages", checkpoint, PYTHONPATH=str(jar),
    )  # fmt: skip
    on = seen(done)
    # Spark's launcher sends what a Python program says to its standard output, errors too.
    assert done.stdout.count("spark-submit has started Spark without kdirect's shim") == 1
    assert on["columnar"] is False and on["jars"] == [] and on["metrics"] == []
    assert "needs kdirect's shim" in on["table"]
    assert sorted(on["batch"]) == sorted(rows(0, 100) * 2) and on["view"] == 200
    # Each row went through the query once: those of before were not read again.
    assert sorted(on["sink"]) == sorted(rows(0, 100, "s") * 2)
    assert set(json.loads(on["end"])) == set(json.loads(found["end"]))


def test_jars_on_a_cluster_of_two_workers_and_executors_of_another_version(
    jar, bare, servers, cache, tmp_path, monkeypatch  # noqa: F811
):  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))  # for the workers' executors, too
    with cluster(tmp_path, 2) as url:
        common = ("--master", url, "--conf", "spark.executor.memory=512m",
                  "--conf", "spark.driver.host=127.0.0.1", "--conf", "spark.executor.cores=1",
                  "--conf", "spark.scheduler.minRegisteredResourcesRatio=1.0")  # fmt: skip
        found = seen(submit(
            bare, cache, *common, "--jars", jar, JOBS, servers, "cluster", tmp_path / "checkpoint",
        ))  # fmt: skip
        assert found["batch"] == rows(0, 100) and found["sink"] == rows(0, 100, "s")
        assert found["view"] == found["table"] == 100 and found["columnar"] is True
        # The driver's jar for its planner, and for each executor the copy that Spark gave it.
        copies = [str(path) for path in tmp_path.glob(f"work-*/app-*/*/{jar.name}")]
        assert len(copies) == 2 and len({Path(path).parents[2] for path in copies}) == 2
        assert str(jar) in found["jars"] and {*found["jars"]} <= {str(jar), *copies}
        assert len(found["jars"]) >= 2

        # A kdirect that is installed on the executors' hosts, and is another one.
        other = another_version(tmp_path / "other")
        failed = submit(
            bare, cache, *common, "--conf", "spark.task.maxFailures=1",
            "--conf", f"spark.executorEnv.PYTHONPATH={other}",
            "--jars", jar, JOBS, servers, "no", tmp_path / "no",
        )  # fmt: skip
    assert failed.returncode != 0
    assert f"kdirect 0.0.9 is installed in {other}" in failed.stderr, failed.stderr[-3000:]
    assert re.search(r"but the jar \S+ is of kdirect " + re.escape(VERSION), failed.stderr)
    assert f"install kdirect=={VERSION} on every host" in failed.stderr


def another_version(directory: Path) -> Path:
    """kdirect as it is installed, but for its version."""
    for package in ("kdirect", "kdirect_spark", "pyspark_kdirect"):
        shutil.copytree(
            bare_python.SITE / package, directory / package,
            ignore=shutil.ignore_patterns("__pycache__", "jvm_shim"),
        )  # fmt: skip
    path = directory / "kdirect/__init__.py"
    path.write_text(path.read_text().replace(f'"{VERSION}"', '"0.0.9"'))
    return directory


def test_without_a_jar_tasks_of_another_version_than_the_planner_refuse(
    jar, bare, servers, cache, tmp_path  # noqa: F811
):  # fmt: skip
    other = another_version(tmp_path / "other")
    with zipfile.ZipFile(jar) as opened:
        (payload,) = [name for name in opened.namelist() if name.endswith(".zip")]
        with opened.open(payload) as packed, zipfile.ZipFile(packed) as inner:
            inner.extractall(cache / "packages")
    with cluster(tmp_path, 1) as url:
        # Spark takes the driver's path to the executors, where this relative one is no directory.
        failed = submit(
            bare, cache, "--master", url, "--conf", "spark.executor.memory=512m",
            "--conf", "spark.driver.host=127.0.0.1", "--conf", "spark.task.maxFailures=1",
            "--conf", f"spark.executorEnv.PYTHONPATH={other}{os.pathsep}{cache / 'packages'}",
            JOBS, servers, "no", tmp_path / "no", PYTHONPATH="packages",
        )  # fmt: skip
    assert failed.returncode != 0
    planned = f"VersionMismatchError: the query was planned by kdirect {VERSION}, but"
    assert planned in failed.stderr, failed.stderr[-3000:]
    assert re.search(r"has kdirect 0\.0\.9 \(\S+\); install the same version", failed.stderr)


def test_a_jar_without_modules_for_the_executors_python_says_so_first(
    jar, bare, servers, cache, tmp_path  # noqa: F811
):  # fmt: skip
    def other(manifest: dict) -> None:
        manifest["payloads"] = {"cpython-39-aarch64-linux-gnu": {}}

    tampered = changed(jar, tmp_path / "kdirect-other.jar", other)
    failed = submit(
        bare, cache, "--master", "local[1]", "--jars", tampered, JOBS, servers, "no", tmp_path
    )
    assert failed.returncode != 0
    (first,) = re.findall(r"^pyspark\S*AnalysisException: (.*)$", failed.stdout, re.MULTILINE)
    assert f"the jar {tampered} has compiled modules for cpython-39-aarch64-linux-gnu" in first
    assert "install kdirect==" in first


@pytest.mark.parametrize("version", OTHER_SPARKS)
def test_one_jar_on_other_versions_of_spark(
    version, jar, servers, cache, tmp_path  # noqa: F811
):  # fmt: skip
    python = bare_python.make(tmp_path / "env", spark=version)
    done = submit(
        python, cache, "--master", "local[2]", "--jars", jar,
        JOBS, servers, f"spark-{version}", tmp_path / "checkpoint",
    )  # fmt: skip
    found = seen(done)
    assert found["batch"] == rows(0, 100) and found["view"] == 100
    assert found["sink"] == rows(0, 100, "s")
    known = tuple(int(part) for part in version.split(".")[:2]) >= shim.FIRST_SPARK
    assert found["columnar"] is known and (found["table"] == 100) is known
    assert done.stderr.count(UNKNOWN) == (0 if known else 1), done.stderr[-3000:]
