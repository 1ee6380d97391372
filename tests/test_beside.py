"""`pytest --beside`: two processes make one run, whatever becomes of the second."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import beside
from tests.support import wait_until

ROOT = Path(__file__).resolve().parents[1]
CONFTEST = """
from tests import beside

beside.CALM = ("calm", "test_calm.py")

def pytest_addoption(parser):
    parser.addoption("--beside", action="store_true")

def pytest_configure(config):
    beside.register(config, {"GIVEN": "7"})
"""
CALM = """
import os
import pytest

def test_nice():
    assert os.nice(0) >= 10 and os.environ["GIVEN"] == "7"

@pytest.mark.parametrize("text", ["a b", "[]", "ä::"])
def test_texts(text):
    pass
"""
OTHERS = """
import os

def test_one():
    assert "GIVEN" not in os.environ

def test_two():
    pass
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A project with one file of each kind."""
    (tmp_path / "calm").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "calm" / "test_texts.py").write_text(CALM)
    (tmp_path / "test_others.py").write_text(OTHERS)
    return tmp_path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--beside", *arguments]


def environment() -> dict[str, str]:
    """Without what says that this process is itself the one beside another."""
    kept = {k: v for k, v in os.environ.items() if k not in (beside.PLACE, "PYTEST_ADDOPTS")}
    return {**kept, "PYTHONPATH": str(ROOT)}


def run(tree: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        command(*arguments), cwd=tree, env=environment(), capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def summary(said: str) -> str:
    """The one line that closes a run."""
    (line,) = re.findall(r"^=+ (.*) in [\d.]+s.* =+$", said, re.MULTILINE)
    assert said.rstrip().splitlines()[-1].count(line)
    return line


def test_both_are_one_run(tree: Path) -> None:
    status, said = run(tree)
    assert (status, summary(said)) == (0, "6 passed"), said
    assert "beside these: 4 tests" in said and "[100%]" in said


def test_a_failure_beside_fails_the_run(tree: Path) -> None:
    (tree / "calm" / "test_bad.py").write_text("def test_bad():\n    assert 'seen' == 'other'\n")
    status, said = run(tree)
    assert (status, summary(said)) == (1, "1 failed, 6 passed"), said
    assert "FAILED calm/test_bad.py::test_bad - AssertionError: assert 'seen' == 'other'" in said


@pytest.mark.parametrize("where", ["conftest", "test"])
def test_a_process_beside_that_dies_fails_the_run(tree: Path, where: str) -> None:
    if where == "test":
        code = "import os\n\ndef test_dies():\n    os.write(1, b'last words')\n    os._exit(0)\n"
        (tree / "calm" / "test_dies.py").write_text(code)
        status, said = run(tree, "-s")
    else:
        code = f"import os\nif os.environ.get({beside.PLACE!r}):\n    raise OSError('last words')\n"
        (tree / "calm" / "conftest.py").write_text(code)
        status, said = run(tree)
    assert status == 1 and "1 failed" in summary(said), said
    assert "last words" in said and "nothing was heard of" in said


def test_enough_failures_beside_end_the_run(tree: Path) -> None:
    bad = "".join(f"def test_bad_{number}():\n    assert False\n" for number in range(3))
    (tree / "calm" / "test_bad.py").write_text(bad)
    for most, ends in ((2, True), (4, False)):
        status, said = run(tree, f"--maxfail={most}")
        assert status != 0 and ("stopping after 2 failures" in said) == ends, said


def test_what_narrows_a_run_down_holds_for_both(tree: Path) -> None:
    for arguments, wanted in (
        (("-k", "one or nice"), "2 passed"),
        (("calm", "test_others.py::test_two"), "5 passed"),
        (("test_others.py",), "2 passed"),
    ):
        status, said = run(tree, *arguments)
        assert (status, summary(said).split(",")[0]) == (0, wanted), said


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_both(tree: Path, sent: signal.Signals) -> None:
    (tree / "calm" / "test_long.py").write_text(
        "import os, pathlib, time\n\ndef test_long():\n"
        "    pathlib.Path('pid').write_text(str(os.getpid()))\n    time.sleep(100)\n"
    )
    (tree / "test_waits.py").write_text("import time\n\ndef test_waits():\n    time.sleep(100)\n")
    process = subprocess.Popen(
        command(), cwd=tree, env=environment(), stdout=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 60
    while not ((tree / "pid").exists() and (tree / "pid").read_text()):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(sent)
    said = process.communicate(timeout=60)[0]
    assert process.returncode in (pytest.ExitCode.INTERRUPTED, -signal.SIGKILL), said
    pid = (tree / "pid").read_text()
    wait_until(lambda: not Path(f"/proc/{pid}/cmdline").exists(), f"the end of process {pid}")


def test_what_is_calm_is_there() -> None:
    assert not [path for path in beside.CALM if not (ROOT / path).exists()]
