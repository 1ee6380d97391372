"""`make test` on a machine that has what the README asks for, and nothing else.

What a test needs beyond that is a skip with its reason; continuous integration installs it and
makes the skip a failure.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

# What every Debian has, and Java.  Other programs come from a fixture that skips where they are not
# there.
ALWAYS_THERE = {"bash", "make", "rm", "mount", "umount", "unshare", "java"}
# Rooms that are collected only where their packages were asked for.
ELSEWHERE = {ROOT / "tests/guest", ROOT / "tests/verbs"}


@pytest.mark.parametrize(("strict", "outcome"), [("0", "skipped"), ("1", "error")])
@pytest.mark.parametrize(
    "test", ["tests/broker/test_clients.py::test_kcat", "tests/packaging/test_readme.py::test_kcat"]
)
def test_without_kcat(test: str, strict: str, outcome: str, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for program in ("bash", "rm"):
        (tmp_path / "bin" / program).symlink_to(Path("/bin", program))
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp",
         str(tmp_path / "temp"), test],
        env={**os.environ, "PATH": str(tmp_path / "bin"), "KDIRECT_NO_SKIPS": strict,
             "PYTHONSAFEPATH": "1"},
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.stdout.splitlines()[-1].startswith(f"1 {outcome}"), run.stdout
    assert "kcat is not installed (apt-get install kcat)" in run.stdout
    assert run.returncode == (0 if outcome == "skipped" else 1)


def test_without_jars(tmp_path: Path) -> None:
    """Kafka's jars can be neither found nor fetched: there is no Java here, as there may be no
    network elsewhere."""
    test = "tests/packaging/test_bench_versus.py::test_every_row_runs_on_both_systems"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp",
         str(tmp_path / "temp"), test],
        env={**os.environ, "PATH": str(tmp_path), "KDIRECT_JARS": str(tmp_path / "jars"),
             "KDIRECT_NO_SKIPS": "0", "PYTHONSAFEPATH": "1"},
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (
        run.stdout.splitlines()[-1].startswith("1 skipped") and "cannot be fetched" in run.stdout
    ), run.stdout


def test_no_test_starts_a_program_that_may_be_missing() -> None:
    strays = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if ELSEWHERE & set(path.parents):
            continue
        for call in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(call, ast.Call)
                and ast.unparse(call.func).startswith("subprocess.")
                and call.args
            ):
                command = call.args[0]
                first = (
                    command.elts[0] if isinstance(command, ast.List) and command.elts else command
                )
                if (
                    isinstance(first, ast.Constant)
                    and str(first.value).split()[0] not in ALWAYS_THERE
                ):
                    strays.append(f"{path.relative_to(ROOT)}:{call.lineno}: {first.value}")
    assert not strays, "\n".join(strays)


def test_continuous_integration_installs_what_tests_skip_without() -> None:
    assert "command -v kcat >/dev/null || missing+=(kcat)" in (ROOT / ".ci/run").read_text()
