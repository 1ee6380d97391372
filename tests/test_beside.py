"""`pytest --beside`: the processes of the parts make one run, whatever becomes of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import beside
from tests.support import wait_until

ROOT = Path(__file__).resolve().parents[1]
CONFTEST = """
import os
from pathlib import Path

import pytest
from tests import beside

beside.CALM = ("calm", "test_calm.py")
beside.APART = {"several brokers": ("apart",), "a later one": ("later",)}

def pytest_addoption(parser):
    parser.addoption("--beside", action="store_true")

def pytest_configure(config):
    beside.register(config, {"GIVEN": "7"})

@pytest.fixture
def part(pytestconfig):
    assert os.environ["GIVEN"] == "7" and pytestconfig.pluginmanager.has_plugin("part")

@pytest.fixture
def first_time(request):
    mark = Path(request.config.rootpath, "seen-" + request.node.name)
    seen = mark.exists()
    mark.touch()
    return not seen
"""
CALM = """
import os
import pytest

def test_nice(part):
    assert os.nice(0) >= 10

@pytest.mark.parametrize("text", ["a b", "[]", "ä::"])
def test_texts(text):
    pass
"""
APART = """
def test_apart(part):
    pass
"""
OTHERS = """
import os

def test_one(part):
    assert os.nice(0) == {nice}

def test_two():
    pass
"""
WAITS = """
import os, pathlib, pytest, time

@pytest.fixture
def started():
    yield
    pathlib.Path("ended-{0}").touch()

def test_waits(started):
    pathlib.Path("pid-{0}.new").write_text(str(os.getpid()))
    pathlib.Path("pid-{0}.new").rename("pid-{0}")
    time.sleep(100)
"""
IN_PARTS = ("calm/test_more.py", "apart/test_more.py", "test_more.py")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A project with one file of each part: 7 tests."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name, code in (
        ("calm/test_texts.py", CALM),
        ("apart/test_apart.py", APART),
        ("test_others.py", OTHERS.format(nice=os.nice(0))),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code)
    return tmp_path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "--beside", *arguments]


def environment() -> dict[str, str]:
    """Without what says that this process is itself one of several."""
    kept = {k: v for k, v in os.environ.items() if k not in (beside.PLACE, "PYTEST_ADDOPTS")}
    return {**kept, "PYTHONPATH": str(ROOT)}


def run(tree: Path, *arguments: str, free: str = "") -> tuple[int, str]:
    given = {**environment(), beside.FREE: free}
    done = subprocess.run(
        command(*arguments), cwd=tree, env=given, capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def summary(said: str) -> str:
    """The one line that closes a run."""
    (line,) = re.findall(r"^=+ (.*) in [\d.]+s.* =+$", said, re.MULTILINE)
    assert said.rstrip().splitlines()[-1].count(line)
    return line


def cases(file: Path) -> dict[str, list[str]]:
    """Test -> what a JUnit file says that is wrong with it."""
    return {
        case.attrib["name"]: [child.tag for child in case if child.tag != "properties"]
        for case in ET.parse(file).getroot().iter("testcase")
    }


def test_all_are_one_run(tree: Path) -> None:
    status, said = run(tree, "--junitxml=out.xml")
    assert (status, summary(said)) == (0, "7 passed"), said
    assert "4 of part 'calm', 2 of part 'all others', 1 of part 'several brokers'" in said
    for name in ("calm", "all others", "several brokers"):
        assert re.search(rf"^part '{name}' took \d+ s, from 0 s$", said, re.MULTILINE), said
    assert "[100%]" in said
    found = cases(tree / "out.xml")
    assert len(found) == 7 and not any(found.values())


def test_a_failure_in_any_part_fails_the_run(tree: Path) -> None:
    for name in IN_PARTS:
        (tree / name).write_text("def test_bad():\n    assert 'seen' == 'other'\n")
    status, said = run(tree, "--junitxml=out.xml")
    assert (status, summary(said)) == (1, "3 failed, 7 passed"), said
    for name in IN_PARTS:
        line = f"FAILED {name}::test_bad - AssertionError: assert 'seen' == 'other'"
        assert said.count(line) == 1, said
    assert cases(tree / "out.xml")["test_bad"] == ["failure"]
    status, said = run(tree, "--last-failed")
    assert (status, summary(said)) == (1, "3 failed"), said


def test_what_passes_alone_has_passed_and_is_named(tree: Path) -> None:
    code = "def test_late(first_time):\n    assert not first_time, 'too late'\n"
    bad = "def test_bad():\n    assert False, 'always'\n"
    for name in IN_PARTS:
        (tree / name).write_text(code.replace("late", f"late_{IN_PARTS.index(name)}"))
    status, said = run(tree, "--junitxml=out.xml")
    assert (status, summary(said)) == (0, "10 passed, 3 passed alone only"), said
    for index, name in enumerate(IN_PARTS):
        assert said.count(f"PASSED ALONE {name}::test_late_{index}\n") == 1, said
    assert said.count("AssertionError: too late") >= 3 and "once more, alone: 3 tests" in said
    assert len(cases(tree / "out.xml")) == 10
    for mark in tree.glob("seen-*"):
        mark.unlink()
    (tree / "apart" / "test_bad.py").write_text(bad)
    status, said = run(tree)
    assert (status, summary(said)) == (1, "1 failed, 10 passed, 3 passed alone only"), said


def test_of_many_failures_none_is_tried_again(tree: Path) -> None:
    most = beside.MOST_AGAIN
    (tree / "test_bad.py").write_text(
        "import pytest\n\n"
        f"@pytest.mark.parametrize('number', range({most + 1}))\n"
        "def test_bad(number, first_time):\n    assert not first_time\n"
    )
    status, said = run(tree)
    assert (status, summary(said)) == (1, f"{most + 1} failed, 7 passed"), said
    assert "alone" not in said


@pytest.mark.parametrize("name", IN_PARTS)
def test_a_process_that_dies_fails_the_run(tree: Path, name: str) -> None:
    """With the names of the tests of which nothing was heard."""
    code = "import os\n\ndef test_dies():\n    os.write(1, b'last words')\n    os._exit(0)\n"
    (tree / name).write_text(f"{code}\ndef test_after():\n    pass\n")
    status, said = run(tree, "--capture=sys")
    assert status == 1 and "1 failed" in summary(said), said
    assert "last words" in said and "nothing was heard of" in said
    for test in ("dies", "after"):
        assert f"\n{name}::test_{test}\n" in said, said


def test_a_process_that_does_not_begin_fails_the_run(tree: Path) -> None:
    code = "import os\nif os.environ.get('GIVEN'):\n    raise OSError('last words')\n"
    (tree / "calm" / "conftest.py").write_text(code)
    status, said = run(tree)
    assert (status, summary(said)) == (1, "1 failed, 3 passed"), said
    assert "last words" in said and "nothing was heard of 4 tests" in said


def test_a_part_begins_when_one_has_ended(tree: Path) -> None:
    """Not before, and whether or not the other one and the calm one have."""
    (tree / "later").mkdir()
    (tree / "later" / "test_later.py").write_text(
        "import pathlib\n\ndef test_later(part):\n"
        "    assert pathlib.Path('apart-ended').exists()\n    pathlib.Path('later-ran').touch()\n"
    )
    (tree / "apart" / "test_more.py").write_text(
        "import pathlib, time\n\ndef test_more():\n    time.sleep(1)\n"
        "    pathlib.Path('apart-ended').touch()\n"
    )
    waits = (
        "import pathlib, time\n\ndef test_waits():\n    until = time.monotonic() + 60\n"
        "    while not pathlib.Path('later-ran').exists():\n"
        "        assert time.monotonic() < until\n        time.sleep(0.05)\n"
    )
    for name in ("test_waits.py", "calm/test_waits.py"):
        (tree / name).write_text(waits)
    status, said = run(tree)
    assert (status, summary(said)) == (0, "11 passed"), said
    assert "of part 'several brokers', 1 of part 'a later one'" in said


def test_the_calm_part_begins_before_there_are_cores_for_others(tree: Path) -> None:
    free = tree / "free"
    (tree / "calm" / "test_more.py").write_text(
        "import pathlib, time\n\ndef test_more():\n    time.sleep(1)\n"
        "    assert not list(pathlib.Path().glob('*-ran'))\n    pathlib.Path('free').touch()\n"
    )
    for name in ("test_more.py", "apart/test_more.py"):
        (tree / name).write_text(
            "import os, pathlib\n\ndef test_more():\n    pathlib.Path('one-ran').touch()\n"
            f"    assert pathlib.Path('free').exists() and {beside.FREE!r} not in os.environ\n"
        )
    status, said = run(tree, free=str(free))
    assert (status, summary(said)) == (0, "10 passed"), said
    assert re.search(r"^part 'all others' took \d+ s, from [1-9]\d* s$", said, re.MULTILINE), said


def test_skipped_tests_are_told_with_their_reason(tree: Path) -> None:
    code = "import pytest\n\ndef test_skips():\n    pytest.skip('not today')\n"
    (tree / "apart" / "test_more.py").write_text(code)
    status, said = run(tree, "-rs")
    assert (status, summary(said)) == (0, "7 passed, 1 skipped"), said
    assert "SKIPPED [1] apart/test_more.py:4: not today" in said, said


def test_a_run_that_a_test_starts_is_a_run_of_its_own(tree: Path) -> None:
    """Not one more process of the part, whose reports would be taken for the part's."""
    (tree / "inner").mkdir()
    (tree / "inner" / "test_inner.py").write_text("def test_inner():\n    assert False\n")
    (tree / "test_starts.py").write_text(
        "import subprocess, sys\n\ndef test_starts(part):\n"
        "    command = [sys.executable, '-m', 'pytest', 'inner']\n"
        "    done = subprocess.run(command, capture_output=True, text=True)\n"
        "    assert '1 failed' in done.stdout, done.stdout\n"
    )
    status, said = run(tree, "--ignore=inner")
    assert (status, summary(said)) == (0, "8 passed"), said


def test_enough_failures_end_the_run(tree: Path) -> None:
    bad = "".join(f"def test_bad_{number}():\n    assert False\n" for number in range(3))
    (tree / "calm" / "test_bad.py").write_text(bad)
    for most, ends in ((2, True), (4, False)):
        status, said = run(tree, f"--maxfail={most}")
        assert status != 0 and ("stopping after 2 failures" in said) == ends, said
        assert "once more" not in said


def test_what_narrows_a_run_down_holds_for_all(tree: Path) -> None:
    for arguments, wanted in (
        (("-k", "one or nice"), "2 passed"),
        (("calm", "test_others.py::test_two"), "5 passed"),
        (("calm", "apart"), "5 passed"),
    ):
        status, said = run(tree, *arguments)
        assert (status, summary(said).split(",")[0]) == (0, wanted), said
        assert "side by side" in said


@pytest.mark.parametrize(
    "arguments",
    [("test_others.py", "-k", "two"), ("-k", "two"), ("-s", "-k", "two or text and not nice")],
)
def test_one_part_alone_runs_in_the_first_process(tree: Path, arguments: tuple[str, ...]) -> None:
    status, said = run(tree, *arguments)
    assert status == 0 and "side by side" not in said, said


def test_warnings_are_told(tree: Path) -> None:
    code = "import warnings\n\ndef test_warns():\n    warnings.warn('mind the gap')\n"
    (tree / "apart" / "test_more.py").write_text(code)
    status, said = run(tree)
    assert (status, summary(said)) == (0, "8 passed, 1 warning"), said
    assert "UserWarning: mind the gap" in said


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_all(tree: Path, sent: signal.Signals) -> None:
    """By way of the fixtures, which end what they have started."""
    for index, name in enumerate(IN_PARTS):
        (tree / name).write_text(WAITS.format(index))
    process = subprocess.Popen(
        command(), cwd=tree, env=environment(), stdout=subprocess.PIPE, text=True
    )
    pids = [tree / f"pid-{index}" for index in range(3)]
    until = time.monotonic() + 60
    while not all(pid.exists() for pid in pids):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(sent)
    said = process.communicate(timeout=60)[0]
    assert process.returncode in (pytest.ExitCode.INTERRUPTED, -signal.SIGKILL), said
    for index, file in enumerate(pids):
        wait_until(has_ended(int(file.read_text())), f"the end of the process of {file.name}")
        assert (tree / f"ended-{index}").exists()


def has_ended(pid: int) -> Callable[[], bool]:
    return lambda: not Path(f"/proc/{pid}/cmdline").exists()


def test_what_a_part_leaves_behind_ends_with_it(tree: Path) -> None:
    (tree / "apart" / "test_more.py").write_text(
        "import pathlib, subprocess\n\ndef test_leaves():\n"
        "    process = subprocess.Popen(['sleep', '100'])\n"
        "    pathlib.Path('pid').write_text(str(process.pid))\n"
    )
    status, said = run(tree)
    assert status == 0, said
    wait_until(has_ended(int((tree / "pid").read_text())), "the end of what was left behind")


def test_what_is_named_is_there() -> None:
    apart = [path for paths in beside.APART.values() for path in paths]
    assert not [path for path in (*beside.CALM, *apart) if not (ROOT / path).exists()]
