"""What users get from pip: the wheel and the source distribution, built from this tree, and the
package that the tests run against."""

from __future__ import annotations

import ast
import email
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import kdirect

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = {
    "kdirect": ROOT / "python/kdirect",
    "pyspark_kdirect": ROOT / "python/pyspark_kdirect",
    "kdirect_spark": ROOT / "kdirect_spark",
}

# The sources of the JVM shim, which the connector compiles where it runs.
SHIM = {
    f"kdirect_spark/{path.relative_to(ROOT)}"
    for path in (ROOT / "jvm_shim" / "src" / "main").rglob("*")
    if path.is_file()
}


def build(hook: str, target: Path) -> Path:
    code = f"import sys; from setuptools import build_meta; build_meta.{hook}(sys.argv[1])"
    run = subprocess.run(
        [sys.executable, "-c", code, str(target)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory):
    with zipfile.ZipFile(build("build_wheel", tmp_path_factory.mktemp("wheel"))) as opened:
        yield opened


@pytest.fixture(scope="module")
def sdist_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    with tarfile.open(build("build_sdist", tmp_path_factory.mktemp("sdist"))) as opened:
        return {name.split("/", 1)[1] for name in opened.getnames() if "/" in name}


def shipped(suffixes: tuple[str, ...]) -> set[str]:
    """Paths inside the wheel of the tree's own files with these suffixes."""
    return {
        f"{package}/{path.relative_to(home)}"
        for package, home in PACKAGES.items()
        for path in home.rglob("*")
        if path.suffix in suffixes and path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.timeout(900)
def test_wheel_holds_the_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = {n for n in wheel.namelist() if ".dist-info/" not in n}
    expected = shipped((".py", ".pyi", ".pxd", ".h", ".json", ".typed")) | SHIM
    compiled = {re.sub(r"\.cpython-[\w-]+\.so$", "", n) for n in names if n.endswith(".so")}
    assert compiled == {n.removesuffix(".pyx") for n in shipped((".pyx",))}
    assert {n for n in names if not n.endswith(".so")} == expected
    assert {
        "kdirect/errors.py",
        "kdirect/py.typed",
        "kdirect_spark/py.typed",
        "pyspark_kdirect/py.typed",
        "kdirect/client/message.pyi",
        "kdirect/rdma/contract.pxd",
        "kdirect/format/messages/GetProduceAccessRequest.json",
        "kdirect_spark/__init__.py",
        "pyspark_kdirect/__init__.py",
        "kdirect_spark/jvm_shim/src/main/resources/META-INF/services/"
        "org.apache.spark.sql.sources.DataSourceRegister",
    } <= expected


@pytest.mark.timeout(900)
def test_wheel_metadata(wheel: zipfile.ZipFile) -> None:
    (path,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
    metadata = email.message_from_bytes(wheel.read(path))
    assert metadata["Name"] == "kdirect"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata["Requires-Python"].split(",")) == {">=3.10", "<3.14"}
    assert {"spark", "delta", "rdma", "dev"} <= set(metadata.get_all("Provides-Extra"))
    requires = metadata.get_all("Requires-Dist")
    assert any(re.match(r"pyspark.*extra == .spark.", r) for r in requires)
    assert {re.match(r"[\w-]+", r)[0] for r in requires if "extra" not in r} >= {
        "pyarrow",
        "kafka-python",
        "numpy",
    }
    assert not [
        r for r in requires if re.match(r"(pyspark|pandas|delta|pytest)", r) and "extra ==" not in r
    ]
    assert wheel.read(path.replace("METADATA", "entry_points.txt")).decode().split() == [
        "[console_scripts]",
        "kdirect",
        "=",
        "kdirect.cli:main",
    ]
    assert b"Apache License" in wheel.read(path.replace("METADATA", "licenses/LICENSE"))


@pytest.mark.timeout(900)
def test_sdist_holds_every_source_and_nothing_built(sdist_names: set[str]) -> None:
    needed = {
        str(p.relative_to(ROOT))
        for home in PACKAGES.values()
        for p in home.rglob("*")
        if p.suffix in (".py", ".pyi", ".pyx", ".pxd", ".h", ".json", ".typed")
        and p.is_file()
        and "__pycache__" not in p.parts
    }
    needed |= {"setup.py", "pyproject.toml", "LICENSE", "README.md", "Makefile", "build.sbt"}
    needed |= {"project/build.properties", "jvm_shim/sbt.py"}
    needed |= {name.removeprefix("kdirect_spark/") for name in SHIM}
    assert not needed - sdist_names
    assert not {
        n
        for n in sdist_names
        if n.endswith((".so", ".c", ".pyc")) or n.startswith(("build/", ".venv"))
    }


def test_the_package_imports_what_it_declares() -> None:
    """At run time: what types need is imported under TYPE_CHECKING."""
    declared = {"kafka", "pyarrow", "numpy", "cramjam", "zstandard", "re2"}
    optional = {"pyspark", "pandas", "kazoo", "botocore", "pyverbs", "py4j", "delta"}
    optional |= {"fastavro", "google", "ptars", "confluent_kafka"}
    optional |= {"setuptools", "Cython"}  # layout_pxd.py, of the build
    known = {*sys.stdlib_module_names, *PACKAGES, *declared, *optional}
    strays = []
    for home in PACKAGES.values():
        for path in sorted(home.rglob("*.py")):
            for_types: set[ast.AST] = set()
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                    for_types |= {inner for branch in node.body for inner in ast.walk(branch)}
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    names = [str(node.module)]
                else:
                    continue
                roots = {name.split(".")[0] for name in names}
                if node not in for_types and not roots <= known:
                    strays.append(f"{path.relative_to(ROOT)}:{node.lineno}: {names}")
    assert not strays, "\n".join(strays)


def test_sbt_and_pip_agree_on_versions() -> None:
    sbt = (ROOT / "build.sbt").read_text()
    metadata = (ROOT / "pyproject.toml").read_text()
    assert (
        re.search(r'^version = "(.*)"', metadata, re.M)[1]
        == re.search(r'version := "(.*)"', sbt)[1]
    )
    assert re.search(r'"pyspark==(.*)"', metadata)[1] == re.search(r'sparkVersion = "(.*)"', sbt)[1]


def test_tests_run_against_the_installed_package() -> None:
    """The tree's own copies lack the compiled modules (kdirect) or may differ from what Spark's
    workers import (kdirect_spark)."""
    if os.environ.get("KDIRECT_TREE"):
        pytest.skip("KDIRECT_TREE is set: tests run against the tree, built in place")
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None, f"{package} is not installed"
        assert "site-packages" in Path(spec.origin).parts, (
            f"{package} comes from {spec.origin}: use `make test`"
        )


def test_installed_version_is_the_declared_one() -> None:
    declared = re.search(
        r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert declared and importlib.metadata.version("kdirect") == declared[1] == kdirect.__version__
