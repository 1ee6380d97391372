"""The README's five minutes, as a reader would type them: its blocks are run as they stand, but for
the port."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text()
ADDRESS = "127.0.0.1:9092"


def block(containing: str) -> str:
    """The one fenced block of the README that has this text."""
    found = [
        b
        for b in re.findall(r"^```\w*\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
        if containing in b
    ]
    assert len(found) == 1, f"{len(found)} blocks of README.md contain {containing!r}"
    return found[0]


@pytest.fixture
def broker(tmp_path: Path):
    """The README's broker command, on a free port and a directory of our own; yields the
    address."""
    words = shlex.split(block("kdirect broker"))
    words[words.index(ADDRESS)] = "127.0.0.1:0"
    words[words.index("--log-dirs") + 1] = str(tmp_path / "log")
    words[0] = str(Path(sys.executable).parent / words[0])
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    said = re.fullmatch(r"kdirect broker ready on (\S+)\n", line)
    try:
        assert said, line
        yield said[1]
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(30)
        process.stdout.close()
    assert status == 0


def run_python(code: str, tmp_path: Path) -> str:
    script = tmp_path / "example.py"
    script.write_text(code)
    run = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    assert "Traceback" not in run.stderr, run.stderr[-4000:]
    return run.stdout


@pytest.mark.timeout(600)
def test_plain_python(tmp_path: Path) -> None:
    assert run_python(block("import tempfile"), tmp_path).split() == ["shm", "[[b'hello']]"]


def run_lines(lines: str, broker: str) -> str:
    """Run the lines of a block in turn, as a shell would; what the last one printed."""
    scripts = Path(sys.executable).parent
    printed = ""
    for line in lines.replace(ADDRESS, broker).splitlines():
        line = re.sub(r"(^|\| )(kdirect .*)", rf"\g<1>{scripts}/\g<2> --broker {broker}", line)
        run = subprocess.run(
            ["bash", "-o", "pipefail", "-c", line],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert run.returncode == 0, f"{line}: {run.stderr}"
        printed = run.stdout
    return printed


def test_kcat(broker: str, kcat: str) -> None:
    assert sorted(run_lines(block("kcat"), broker).split()) == ["1", "2", "3", "4", "5"]


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_spark(broker: str, tmp_path: Path) -> None:
    """`kdirect produce` writes the numbers here: it does the same as kcat, and is always there."""
    topics = "".join(
        line for line in block("kcat").splitlines(keepends=True) if line.startswith("kdirect")
    )
    assert topics.count("\n") == 2
    run_lines(topics + "seq 1 5 | kdirect produce numbers", broker)

    shown = run_python(block("session_builder").replace(ADDRESS, broker), tmp_path)
    numbers = [
        row.split("|")[3].strip()
        for row in shown.splitlines()
        if re.match(r"\|\s*\d+\|\s*\d+\|", row)
    ]
    assert numbers == ["1", "2", "3", "4", "5"]
    assert sorted(int(n) for n in re.findall(r"\|\s*doubled\|\s*\d+\|\s*(\d+)\|", shown)) == [
        2,
        4,
        6,
        8,
        10,
    ]


def test_commands_named_are_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    commands = re.findall(r"^make ([a-z-]+)", README, re.MULTILINE)
    assert commands[:2] == ["demo", "test"]
    assert not [c for c in commands if not re.search(rf"^{c}:", makefile, re.MULTILINE)]


def test_links_lead_somewhere() -> None:
    for page in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        *(ROOT / "docs").glob("*.md"),
    ]:
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
