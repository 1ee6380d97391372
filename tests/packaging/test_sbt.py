"""build.sbt: the tests of the shim in Scala, and a jar like that of `make jar`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
import zipfile
from pathlib import Path

import pytest

from kdirect_spark import one_jar

ROOT = Path(__file__).resolve().parent.parent.parent
VERSION = one_jar.kdirect.__version__


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sbt_tests_the_shim_and_publishes_the_same_jar(sbt_jars: list[Path], tmp_path: Path):
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "jvm_shim" / "src", tree / "jvm_shim" / "src")
    (tree / "project").mkdir()
    for name in ("build.sbt", "project/build.properties"):
        shutil.copy(ROOT / name, tree / name)
    run = subprocess.run(
        [sys.executable, ROOT / "jvm_shim/sbt.py", "--directory", tree, "test", "publish"],
        capture_output=True, text=True, timeout=880, check=False,
        env={k: v for k, v in os.environ.items() if k not in ("SPARK_HOME", "KDIRECT_PYTHON")},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    tests = len(re.findall(r'^  (?:directory\.)?test\("', _suites(), re.MULTILINE))
    passed = re.search(r"Passed: Total (\d+), Failed 0, Errors 0, Passed (\d+)", run.stdout)
    assert passed is not None and passed[1] == passed[2] == str(tests) != "0", run.stdout[-3000:]

    stem = f"{one_jar.ARTIFACT}-{VERSION}"
    published = tree.joinpath("dist/maven", *one_jar.GROUP.split("."), one_jar.ARTIFACT, VERSION)
    theirs = _contents(published / f"{stem}.jar")
    mine = _contents(one_jar.build(tmp_path))
    assert set(theirs) == set(mine)
    different = [name for name in mine if mine[name] != theirs[name]]
    assert not different, different
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", (published / f"{stem}.pom").read_text())
    pom = ET.fromstring(text.replace("xsi:", ""))
    fields = {child.tag: child.text for child in pom}
    named = (fields["groupId"], fields["artifactId"], fields["version"])
    assert named == (one_jar.GROUP, one_jar.ARTIFACT, VERSION)
    scopes = {found.findtext("scope") for found in pom.iter("dependency")}
    assert scopes == {"provided", "test"}  # --packages fetches neither


def _suites() -> str:
    found = (ROOT / "jvm_shim/src/test/scala").rglob("*Suite.scala")
    return "\n".join(path.read_text() for path in found)


def _contents(jar: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(jar) as opened:
        names = [name for name in opened.namelist() if not name.endswith("/")]
        return {name: opened.read(name) for name in names if name != "META-INF/MANIFEST.MF"}
