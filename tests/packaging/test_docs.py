"""The `kdirect` commands of the pages: the options that they are given must exist.

`tests/client/test_admin.py` runs the Python programs of docs/python-api.md and ARCHITECTURE.md, and
test_readme.py the README's five minutes.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> list[tuple[str, str]]:
    """(page, line) of each call of `kdirect` in a fenced block that names no language."""
    return [
        (page.name, line.strip())
        for page in PAGES
        for block in re.findall(r"^```\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        for line in block.replace("\\\n", " ").splitlines()
        if line.startswith("kdirect ")
    ]


def test_commands_are_found() -> None:
    assert len(commands()) >= 7


@pytest.mark.parametrize(("page", "line"), commands(), ids=lambda x: x)
def test_commands_have_the_options_that_the_pages_give_them(page: str, line: str) -> None:
    words = shlex.split(line.split(" | ")[0])[1:]
    program = [str(Path(sys.executable).parent / "kdirect"), words[0]]
    if words[0] in ("topic", "cluster", "partition", "remote"):
        program.append(words[1])
    shown = subprocess.run([*program, "--help"], capture_output=True, text=True, check=True).stdout
    lost = [w for w in words if w.startswith("--") and w not in re.findall(r"--[\w-]+", shown)]
    assert not lost, f"{page}: {line}"
