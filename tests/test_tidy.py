"""Tidiness that no linter looks at: the laws of the rooms, over every source in the tree.

Reads files and the tables; imports nothing compiled, so it runs in a clean clone too.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = {"build", "dist", "__pycache__", "target"}
LONG, TOO_LONG = 700, 800

# What a room may import of kdirect, beside itself and what everyone may.  The same arrows as in pyproject.toml, where they
# hold for .py files; here they hold for compiled modules as well, cimports included.
EVERYONE = {"errors", "model", "options", "metrics"}
ARROWS = {
    "format": set(),
    "rdma": set(),
    "log": {"format"},
    "client": {"format", "rdma"},
    "broker": {"log", "format", "rdma"},
    **dict.fromkeys(EVERYONE, EVERYONE),
}


def sources(*suffixes: str) -> list[Path]:
    """Files of the tree with one of these suffixes; what is generated, installed or hidden is left out."""
    found = []
    for directory, inner, names in os.walk(ROOT):
        inner[:] = [d for d in inner if d not in SKIPPED and not d.startswith(".")]
        found += [Path(directory, name) for name in names if name.endswith(suffixes)]
    return sorted(found)


def ident(path: Path) -> str:
    return str(path.relative_to(ROOT))


def written_text() -> list[Path]:
    return sources(".py", ".pyx", ".pxd", ".h", ".md", ".toml", ".in", ".json", ".scala", ".sbt") + [ROOT / "Makefile", ROOT / ".ci/run"]


@pytest.mark.parametrize("path", sources(".py", ".pyx", ".h", ".scala"), ids=ident)
def test_file_is_not_too_long(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    if lines > LONG:
        warnings.warn(f"{ident(path)} has {lines} lines; past {TOO_LONG} it must be split", stacklevel=1)
    assert lines <= TOO_LONG, f"{ident(path)} has {lines} lines: split it where the nouns part"


def test_no_drawer_of_leftovers() -> None:
    drawers = [p for p in sources(".py", ".pyx") if p.stem in ("utils", "util", "helpers", "misc", "common") and "tests" not in p.parts]
    assert not drawers, f"{drawers}: name a file for the noun it owns"


@pytest.mark.parametrize("path", sources(".py", ".pyx"), ids=ident)
def test_module_says_its_law(path: Path) -> None:
    text = path.read_text()
    if path.suffix == ".py":
        tree = ast.parse(text)
        assert not tree.body or ast.get_docstring(tree), f"{ident(path)} has no module docstring"
    else:
        body = re.sub(r"\A(\s*#.*\n|\s*\n)*", "", text)
        assert body.startswith(('"""', 'r"""')), f"{ident(path)} has no module docstring"


def test_no_paths_of_a_machine() -> None:
    # Spelled in parts, so that this file does not find itself.
    private = re.compile(
        "|".join([r"(?<![\w.])/" + "root/", r"/" + "home/[a-z]", r"(?<![\w.])/" + "work/", "/" + r"tmp/kd(?!irect)", "kd" + "venv"])
    )
    found = [
        f"{ident(p)}:{i}: {line.strip()}"
        for p in written_text()
        for i, line in enumerate(p.read_text().splitlines(), 1)
        if private.search(line)
    ]
    assert not found, "\n".join(found)


def test_layout_pxd_is_fresh() -> None:
    code = "from kdirect.format import layout; import sys; sys.stdout.write(layout.render_pxd())"
    run = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT / "python")}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == (ROOT / "python/kdirect/format/layout.pxd").read_text(), "run `make layout`"


def test_docs_are_fresh() -> None:
    code = "import sys, pathlib; from kdirect import docs; sys.stdout.write(docs.stale(pathlib.Path(sys.argv[1])))"
    run = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "docs")],
        env={"PYTHONPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert not run.stdout, f"run `make docs`:\n{run.stdout}"


def test_option_tables_are_well_formed() -> None:
    from kdirect import docs, options

    assert len(docs.option_tables()) >= 3
    for table in docs.option_tables():
        assert table.rows, f"{table.title} has no rows"
        for row in table.rows:
            where = f"{table.title}: {row.name}"
            assert row.kind in options._PARSERS, f"{where}: kind {row.kind!r}"
            assert row.help.strip().endswith((".", ")", "?")), f"{where}: the help is a sentence"
            assert bool(row.choices) == (row.kind == "enum"), f"{where}: choices are for enum, and enum has them"
            assert not (row.required and row.default is not None), f"{where}: a required option has no default"
            if row.default is not None and not callable(row.default):
                parsed = row.parse(row.default)
                assert row.check is not None or parsed == row.default, f"{where}: the default {row.default!r} parses to {parsed!r}"
            assert table.find(row.name) is row


def test_metrics_are_named_once() -> None:
    from kdirect.metrics import METRICS

    assert METRICS
    keys = [(m.room, m.name) for m in METRICS]
    assert len(keys) == len(set(keys))
    assert all(m.help.strip() and m.unit.strip() for m in METRICS)


def test_every_error_says_what_it_means() -> None:
    from kdirect import docs, errors

    classes = docs.error_classes()
    assert classes[0] is errors.KdirectError and len(classes) > 20
    silent = [c.__name__ for c in classes if not (c.__doc__ or "").strip() or (c is not classes[0] and c.__doc__ == c.__mro__[1].__doc__)]
    assert not silent
    declared = {c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, Exception)}
    assert declared == set(classes), "an error outside of the tree"


def test_errors_come_from_the_tree_only() -> None:
    # An underscore marks one that never leaves its module.
    strays = []
    for path in sources(".py", ".pyx"):
        if not {"python", "kdirect_spark"} & set(path.relative_to(ROOT).parts) or path.name == "errors.py":
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.match(r"\s*(cdef )?class [^_]\w+\((\w*Error|\w*Exception)\)", line):
                strays.append(f"{ident(path)}:{number}: {line.strip()}")
    assert not strays, "declare these in kdirect/errors.py:\n" + "\n".join(strays)


def imported_rooms(text: str) -> set[str]:
    """First name under `kdirect` of every import and cimport in a Python or Cython text."""
    found = set()
    for match in re.finditer(r"^\s*(?:from\s+kdirect\.(\w+)[\w.]*\s+c?import|c?import\s+kdirect\.(\w+))", text, re.MULTILINE):
        found.add(match[1] or match[2])
    for match in re.finditer(r"^\s*from\s+kdirect\s+c?import\s+\(?([\w, \n]+)", text, re.MULTILINE):
        found |= {name.split()[0] for name in match[1].split(",") if name.strip()}
    return found


@pytest.mark.parametrize("path", [p for p in sources(".py", ".pyx", ".pxd") if (ROOT / "python/kdirect") in p.parents], ids=ident)
def test_arrows_point_one_way(path: Path) -> None:
    room = path.relative_to(ROOT / "python/kdirect").parts[0].removesuffix(path.suffix)
    if room in ARROWS:
        wrong = imported_rooms(path.read_text()) - ARROWS[room] - EVERYONE - {room}
        assert not wrong, f"{ident(path)} imports {sorted(wrong)} of kdirect"


@pytest.mark.parametrize(
    ("library", "owner"), [("kafka", "python/kdirect/format/protocol.py"), ("pyverbs", "python/kdirect/rdma/verbs.py")]
)
def test_a_library_is_imported_in_one_place(library: str, owner: str) -> None:
    importing = re.compile(rf"^\s*(from|c?import)\s+{library}[\s.]", re.MULTILINE)
    users = {
        ident(p)
        for p in sources(".py", ".pyx")
        if {"python", "kdirect_spark"} & set(p.relative_to(ROOT).parts) and importing.search(p.read_text())
    }
    assert users <= {owner}
