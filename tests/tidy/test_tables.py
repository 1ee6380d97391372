"""The tables of options, metrics and errors are well formed, and what is generated from tables and
layouts is fresh."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import pytest

from kdirect import layout_pxd
from tests.tidy.tree import PACKAGES, ROOT, ident, sources


@pytest.mark.parametrize("room", layout_pxd.rooms(PACKAGES["kdirect"]))
def test_layout_pxd_is_fresh(room: str) -> None:
    root = PACKAGES["kdirect"]
    written = (root / room / "layout.pxd").read_text()
    assert written == layout_pxd.render(room, root), "run `make layout`"


def test_docs_are_fresh() -> None:
    code = (
        "import sys, pathlib; from kdirect import docs;"
        " sys.stdout.write(docs.stale(pathlib.Path(sys.argv[1])))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "docs")],
        env={"PYTHONPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert not run.stdout, f"run `make docs`:\n{run.stdout}"


def test_the_state_engine_names_options_that_exist() -> None:
    from kdirect import docs

    known = {row.name for table in docs.option_tables() for row in table.rows}
    said = re.compile(r"\boption ([a-z][a-z_.]*[a-z])")
    found = [
        (ident(path), name)
        for path in sources(".py", ".pyx")
        if path.parent == PACKAGES["kdirect"] / "state"
        for name in said.findall(path.read_text())
    ]
    assert len(found) > 5
    assert [(where, name) for where, name in found if name not in known] == []


def test_option_tables_are_well_formed() -> None:
    from kdirect import docs, option_table

    assert len(docs.option_tables()) >= 3
    for table in docs.option_tables():
        assert table.rows, f"{table.title} has no rows"
        for row in table.rows:
            where = f"{table.title}: {row.name}"
            assert row.kind in option_table._PARSERS, f"{where}: kind {row.kind!r}"
            assert row.help.strip().endswith((".", ")", "?")), f"{where}: the help is a sentence"
            assert bool(row.choices) == (row.kind == "enum"), (
                f"{where}: choices are for enum, and enum has them"
            )
            assert not (row.required and row.default is not None), (
                f"{where}: a required option has no default"
            )
            if row.default is not None and not callable(row.default):
                parsed = row.parse(row.default)
                assert row.check is not None or parsed == row.default, (
                    f"{where}: the default {row.default!r} parses to {parsed!r}"
                )
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
    silent = [
        c.__name__
        for c in classes
        if not (c.__doc__ or "").strip()
        or (c is not classes[0] and c.__doc__ == c.__mro__[1].__doc__)
    ]
    assert not silent
    declared = {c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, Exception)}
    assert declared == set(classes), "an error outside of the tree"


def test_errors_come_from_the_tree_only() -> None:
    # An underscore marks one that never leaves its module.
    strays = []
    for path in sources(".py", ".pyx"):
        if (
            not {"python", "kdirect_spark"} & set(path.relative_to(ROOT).parts)
            or path.name == "errors.py"
        ):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.match(r"\s*(cdef )?class [^_]\w+\((\w*Error|\w*Exception)\)", line):
                strays.append(f"{ident(path)}:{number}: {line.strip()}")
    assert not strays, "declare these in kdirect/errors.py:\n" + "\n".join(strays)
