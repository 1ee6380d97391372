"""Files, functions and lines are short."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.tidy.tree import ROOT, ident, sources, written_by_hand

LONGEST_FILE = 700
WIDTH = 100


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


@pytest.mark.parametrize("path", sources(".py", ".pyx", ".h", ".scala"), ids=ident)
def test_file_is_not_too_long(path: Path) -> None:
    lines = lines_of(path)
    assert lines <= LONGEST_FILE, f"{ident(path)} has {lines} lines: split it where the nouns part"


def too_wide(text: str, *, prose: bool) -> list[int]:
    """Numbers of the lines that are wider than WIDTH.  In Markdown (`prose`) a table's row and a
    line with an address may be: they cannot be broken."""
    return [
        number
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > WIDTH and not (prose and (line.startswith("|") or "://" in line))
    ]


@pytest.mark.parametrize("path", written_by_hand(), ids=ident)
def test_no_line_is_too_wide(path: Path) -> None:
    wide = too_wide(path.read_text(), prose=path.suffix == ".md")
    assert not wide, f"{ident(path)}: lines {wide} are wider than {WIDTH} columns"


def test_wide_lines_are_found() -> None:
    assert too_wide("a" * 101 + "\n" + "b" * 100 + "\n| " + "c" * 99, prose=False) == [1, 3]
    assert too_wide("| " + "c" * 99 + "\nhttps://" + "d" * 99 + "\n" + "e" * 101, prose=True) == [3]


def test_the_linter_has_no_exception_from_the_width() -> None:
    settings = (ROOT / "pyproject.toml").read_text()
    assert "E501" not in settings and f"line-length = {WIDTH}\n" in settings


def test_no_drawer_of_leftovers() -> None:
    drawers = [
        p
        for p in sources(".py", ".pyx")
        if p.stem in ("utils", "util", "helpers", "misc", "common") and "tests" not in p.parts
    ]
    assert not drawers, f"{drawers}: name a file for the noun it owns"


LONGEST = 60


def long_functions(path: Path) -> set[str]:
    """Names of functions of 60 lines or more, decorators and docstrings included."""
    text = path.read_text()
    if path.suffix == ".py":
        return {
            node.name
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.end_lineno is not None
            and node.end_lineno - node.lineno + 1 >= LONGEST
        }
    # Cython: from a line that begins a function to the next one that is not indented deeper.
    found = set()
    lines = [(i, x) for i, x in enumerate(text.splitlines()) if x.strip()]
    begins = re.compile(r"^([ \t]*)(?:async )?(?:def|cpdef|cdef)\b[^=]*?\b(\w+)\(")
    for at, (number, line) in enumerate(lines):
        match = begins.match(line)
        if match is None or line.lstrip().startswith(("cdef class", "cdef extern")):
            continue
        last = number
        depth = len(match[1].expandtabs())
        for inner, text_of in lines[at + 1 :]:
            bare = text_of.lstrip()
            if len(text_of) - len(bare) <= depth and not bare.startswith((")", "#")):
                break
            last = inner
        if last - number + 1 >= LONGEST:
            found.add(match[2])
    return found


def test_functions_are_short() -> None:
    found = {
        ident(p): names
        for p in sources(".py", ".pyx")
        if not {"tests", "bench"} & set(p.relative_to(ROOT).parts) and (names := long_functions(p))
    }
    assert not found, f"cut functions of {LONGEST} lines or more"
