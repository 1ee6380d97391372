"""pyproject.toml alone names exact versions, and pip is held to all of them from the start."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.tidy.tree import ROOT


def test_pip_is_held_to_the_versions_of_pyproject(tmp_path: Path) -> None:
    """The Makefile finds them without a parser of TOML, which Python 3.10 does not have."""
    tomllib = pytest.importorskip("tomllib")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = settings["project"]
    required = [*settings["build-system"]["requires"], *project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        required += extra
    exact = {r for r in required if "==" in r.partition(";")[0]}
    constraints = tmp_path / "constraints.txt"
    subprocess.run(
        ["make", "-s", "-C", ROOT, f"VENV={tmp_path}", constraints], check=True, timeout=60
    )
    assert set(constraints.read_text().splitlines()) == exact
    names = Counter(re.split(r"[\[=]", r)[0].lower() for r in exact)
    assert names["pyspark"] == 1 and set(names.values()) == {1}, "two versions of one package"


def test_the_makefile_gives_pip_its_constraints() -> None:
    makefile = (ROOT / "Makefile").read_text()
    resolved = [x for x in re.findall(r"\$\(PIP.*", makefile) if "--no-deps" not in x]
    assert resolved and all("-c $(VENV)/constraints.txt" in x for x in resolved), resolved
    assert "[spark,delta,dev,bench]" in makefile


def test_the_tests_take_the_delta_that_pyproject_names() -> None:
    listed = re.findall(r"^delta \S+:(\S+) ", (ROOT / "bench/versus/jars.txt").read_text(), re.M)
    [named] = re.findall(r'"delta-spark==(.+?)"', (ROOT / "pyproject.toml").read_text())
    assert listed and set(listed) == {named}
