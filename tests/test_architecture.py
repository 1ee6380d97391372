"""ARCHITECTURE.md against the code: files, states, threads, locks and the functions of the walks.

tests/tidy/test_prose.py checks that every source file is named.  Here is checked that what the page
says of names is so: each file has one line, and what stands between backticks exists.  Reads files
only.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.tidy.tree import ROOT, sources

PAGE = (ROOT / "ARCHITECTURE.md").read_text()
PRODUCT = [
    path
    for path in sources(".py", ".pyx", ".pxd", ".h", ".scala")
    if path.relative_to(ROOT).parts[0] in ("python", "kdirect_spark", "jvm_shim")
]
TEXTS = {path: path.read_text() for path in PRODUCT}


def section(title: str) -> str:
    """The text below a heading, up to the next heading of the same level."""
    marks = title.split(" ")[0]
    after = PAGE.split(f"\n{title}\n", 1)[1]
    return re.split(rf"\n#{{1,{len(marks)}}} ", after, maxsplit=1)[0]


def rows(text: str) -> list[list[str]]:
    """The cells of the rows of every table in `text`, without heads and rules."""
    tables = re.findall(r"(?:^\|.*\n)+", text + "\n", re.MULTILINE)
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
        for table in tables
        for line in table.splitlines()[2:]
    ]


def members(path: Path, name: str) -> set[str]:
    """Names of the members of an enum."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return {
                target.id
                for statement in node.body
                if isinstance(statement, ast.Assign)
                for target in statement.targets
                if isinstance(target, ast.Name)
            }
    raise AssertionError(f"{path} has no class {name}")


def without_prose(text: str) -> str:
    """Source without its docstrings and comments, so that a name counts only where it is code."""
    return re.sub(r'"""(?:.|\n)*?"""|#.*', "", text)


CODE = {path: without_prose(text) for path, text in TEXTS.items()}


def unknown_names(text: str) -> list[str]:
    """Names between backticks that look like code of the product and do not occur in it.

    `Class.name` needs a file that defines the class and has the name; other names must be defined
    or assigned somewhere.
    """
    defined = set()
    by_class: dict[str, set[Path]] = {}
    for path, code in CODE.items():
        words = re.findall(r"\b(?:def|class|cpdef|cdef)\b[^(=:\n]*?\b(\w+)[(:]", code)
        defined |= set(words) | set(re.findall(r"\b(\w+)(?:: [^=\n]+)? = ", code))
        for name in re.findall(r"\bclass (\w+)", code):
            by_class.setdefault(name, set()).add(path)
    unknown = []
    for quoted in sorted(set(re.findall(r"`([A-Za-z_][\w.]*)`", text))):
        *owners, name = quoted.split(".")
        if owners:
            homes = by_class.get(owners[-1])
            known = homes is None or any(re.search(rf"\b{name}\b", CODE[p]) for p in homes)
        elif name.startswith("_"):
            known = name in defined
        else:
            known = name in by_class or not re.fullmatch(r"[A-Z][a-z]\w+", name)
        if not known:
            unknown.append(quoted)
    return unknown


def test_each_file_has_one_line_of_its_room() -> None:
    twice = []
    for room in re.split(r"\n### ", section("## Rooms"))[1:]:
        files = [
            f for row in rows(room) for f in re.findall(r"`([\w.]+\.(?:pyx?|h|scala))`", row[0])
        ]
        twice += [f"{room.splitlines()[0]}: {f}" for f, n in Counter(files).items() if n > 1]
    assert not twice


@pytest.mark.parametrize(
    ("title", "path", "name"),
    [
        (
            "### A producer's partition (`client/partition_writer.py`)",
            "python/kdirect/client/partition_writer.py",
            "State",
        ),
        (
            "### A head (`broker/head_life.py`)",
            "python/kdirect/broker/head_life.py",
            "State",
        ),
        (
            "### A replica (`cluster/following_replica.py`)",
            "python/kdirect/cluster/following_replica.py",
            "Phase",
        ),
    ],
)
def test_tables_of_states_are_those_of_the_machines(title: str, path: str, name: str) -> None:
    named = [word for row in rows(section(title)) for word in re.findall(r"[A-Z_]{3,}", row[0])]
    assert sorted(named) == sorted(members(ROOT / path, name))


def test_threads_are_those_that_are_started() -> None:
    named = set(re.findall(r"`(kdirect-[a-z-]+?)(?:-[A-Z])?`", section("## Threads")))
    started = {
        m[1].rstrip("-")
        for text in TEXTS.values()
        for m in re.finditer(
            r"(?:\bname=|thread_name_prefix=|RoomThreads\()"
            r"f?\"(kdirect-[a-z-]+)(?:\{[\w.]+\})?\"",
            text,
        )
    } - {"kdirect"}
    devices = {"kdirect-shm", "kdirect-verbs"}  # of `link_service.py`: f"kdirect-{transport}"
    assert named - devices == started
    assert devices <= named


def test_every_lock_that_is_named_exists() -> None:
    named = [
        (owner, name)
        for row in rows(section("### Locks"))
        for owner, name in re.findall(r"`([A-Z]\w+)\.(_?\w*lock|_producer_ids)`", row[0])
    ]
    assert len(named) > 8
    lost = [
        f"{owner}.{name}"
        for owner, name in named
        if not any(
            re.search(rf"\bclass {owner}\b", code) and re.search(rf"\bself\.{name}\b.*Lock\(", code)
            for code in CODE.values()
        )
    ]
    assert not lost


@pytest.mark.parametrize(
    "title",
    [
        "## A produced record",
        "## A replicated record",
        "## A read record",
        "## States",
        "## A cluster's metadata",
        "## Threads",
        "## Glossary",
    ],
)
def test_what_the_page_names_exists(title: str) -> None:
    assert not unknown_names(section(title))


def test_a_name_that_does_not_exist_is_found() -> None:
    text = "`Producer.no_such_method`, `NoSuchClass`, `_no_such_name`, `Producer.produce`, `_take`"
    assert unknown_names(text) == ["NoSuchClass", "Producer.no_such_method", "_no_such_name"]
