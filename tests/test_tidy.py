"""Tidiness that no linter looks at: the laws of the rooms, over every source in the tree.

Reads files and the tables; imports nothing compiled, so it runs in a clean clone too.
"""

from __future__ import annotations

import ast
import inspect
import io
import os
import re
import subprocess
import sys
import tokenize
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = {"build", "dist", "__pycache__", "target"}
LONG, TOO_LONG = 700, 840
WIDTH = 100

# What a room may import of kdirect, beside itself and what everyone may.  The same arrows as in
# pyproject.toml, where they hold for .py files; here they hold for compiled modules as well,
# cimports included.
EVERYONE = {"errors", "model", "option_table", "options", "metrics", "machine"}
ARROWS = {
    "format": set(),
    "rdma": set(),
    "log": {"format"},
    "client": {"format", "rdma", "wire"},
    "wire": {"format", "rdma"},
    "broker": {"log", "format", "rdma", "wire"},
    **dict.fromkeys(EVERYONE, EVERYONE),
}


def sources(*suffixes: str) -> list[Path]:
    """Files of the tree with one of these suffixes; what is generated, installed or hidden is left
    out."""
    found = []
    for directory, inner, names in os.walk(ROOT):
        inner[:] = [d for d in inner if d not in SKIPPED and not d.startswith(".")]
        found += [Path(directory, name) for name in names if name.endswith(suffixes)]
    return sorted(found)


def ident(path: Path) -> str:
    return str(path.relative_to(ROOT))


def written_text() -> list[Path]:
    return sources(
        ".py", ".pyx", ".pxd", ".h", ".md", ".toml", ".in", ".json", ".scala", ".sbt"
    ) + [ROOT / "Makefile", ROOT / ".ci/run"]


@pytest.mark.parametrize("path", sources(".py", ".pyx", ".h", ".scala"), ids=ident)
def test_file_is_not_too_long(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    if lines > LONG:
        warnings.warn(
            f"{ident(path)} has {lines} lines; past {TOO_LONG} it must be split", stacklevel=1
        )
    assert lines <= TOO_LONG, f"{ident(path)} has {lines} lines: split it where the nouns part"


def written_by_hand() -> list[Path]:
    """Code, prose, settings and scripts: everything but data."""
    suffixes = (
        ".py", ".pyi", ".pyx", ".pxd", ".h", ".scala", ".sbt", ".md", ".sh", ".toml", ".in",
    )  # fmt: skip
    return [*sources(*suffixes), ROOT / "Makefile", ROOT / ".ci/run"]


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
        "|".join(
            [
                r"(?<![\w.])/" + "root/",
                r"/" + "home/[a-z]",
                r"(?<![\w.])/" + "work/",
                "/" + r"tmp/kd(?!irect)",
                "kd" + "venv",
            ]
        )
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
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == (ROOT / "python/kdirect/format/layout.pxd").read_text(), (
        "run `make layout`"
    )


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


def imported_rooms(text: str) -> set[str]:
    """First name under `kdirect` of every import and cimport in a Python or Cython text."""
    found = set()
    for match in re.finditer(
        r"^\s*(?:from\s+kdirect\.(\w+)[\w.]*\s+c?import|c?import\s+kdirect\.(\w+))",
        text,
        re.MULTILINE,
    ):
        found.add(match[1] or match[2])
    for match in re.finditer(r"^\s*from\s+kdirect\s+c?import\s+\(?([\w, \n]+)", text, re.MULTILINE):
        found |= {name.split()[0] for name in match[1].split(",") if name.strip()}
    return found


@pytest.mark.parametrize(
    "path",
    [p for p in sources(".py", ".pyx", ".pxd") if (ROOT / "python/kdirect") in p.parents],
    ids=ident,
)
def test_arrows_point_one_way(path: Path) -> None:
    room = path.relative_to(ROOT / "python/kdirect").parts[0].removesuffix(path.suffix)
    if room in ARROWS:
        wrong = imported_rooms(path.read_text()) - ARROWS[room] - EVERYONE - {room}
        assert not wrong, f"{ident(path)} imports {sorted(wrong)} of kdirect"


# -- circles ---------------------------------------------------------------------------------------

PACKAGES = {"kdirect": ROOT / "python/kdirect", "kdirect_spark": ROOT / "kdirect_spark"}


def module_name(path: Path) -> str:
    """`kdirect.log.kernel` for its .pyx and its .pxd; a room's name for its `__init__`."""
    package, root = next((n, r) for n, r in PACKAGES.items() if r in path.parents)
    parts = [package, *path.relative_to(root).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(text: str, known: set[str]) -> set[str]:
    """Those of `known` that a Python or Cython text imports or cimports, wherever it does: at the
    top, within a function, for type checkers."""
    found = set()
    for match in re.finditer(
        r"^[ \t]*from[ \t]+([\w.]+)[ \t]+c?import[ \t]+(\([^)]*\)|[^\n]*)", text, re.MULTILINE
    ):
        for name in re.findall(r"\w+", re.sub(r"#.*", "", match[2])):
            inner = f"{match[1]}.{name}"
            found.add(inner if inner in known else match[1])
    for match in re.finditer(r"^[ \t]*c?import[ \t]+([\w., \t]+)", text, re.MULTILINE):
        found |= {name.split()[0] for name in match[1].split(",") if name.strip()}
    return found & known


def import_graph() -> dict[str, set[str]]:
    """Module -> modules of ours that it imports."""
    paths = [
        p
        for p in sources(".py", ".pyx", ".pxd")
        if any(root in p.parents for root in PACKAGES.values())
    ]
    known = {module_name(p) for p in paths} - {"kdirect"}
    graph: dict[str, set[str]] = {name: set() for name in known}
    for path in paths:
        name = module_name(path)
        if name in known:
            graph[name] |= imported_modules(path.read_text(), known) - {name}
    return graph


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules each of which reaches all others of its set."""
    reached = {}
    for name in graph:
        seen: set[str] = set()
        waiting = [name]
        while waiting:
            for other in graph[waiting.pop()] - seen:
                seen.add(other)
                waiting.append(other)
        reached[name] = seen
    found = []
    left = {name for name in graph if name in reached[name]}
    while left:
        name = min(left)
        circle = {other for other in left if other in reached[name] and name in reached[other]}
        found.append(circle)
        left -= circle
    return found


def circles_still_to_be_cut() -> set[tuple[str, str]]:
    """(importer, imported): the exceptions that pyproject.toml lists."""
    text = (ROOT / "pyproject.toml").read_text()
    contract = text[text.index('type = "acyclic_siblings"') :]
    return set(re.findall(r'"([\w.]+) -> ([\w.]+)"', contract))


def test_modules_do_not_import_in_circles() -> None:
    graph = import_graph()
    for importer, imported in circles_still_to_be_cut():
        graph.get(importer, set()).discard(imported)
    assert circles(graph) == []


def test_circles_that_have_been_cut_are_no_exceptions() -> None:
    graph = import_graph()
    circle_of = {name: i for i, circle in enumerate(circles(graph)) for name in circle}
    stale = {
        (a, b)
        for a, b in circles_still_to_be_cut()
        if b not in graph.get(a, set()) or circle_of.get(a, -1) != circle_of.get(b, -2)
    }
    assert not stale, "take these out of pyproject.toml"


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"a"}}
    assert circles(graph) == [{"a", "b", "c"}]
    text = """
from kdirect.log cimport kernel
from kdirect.log.commit cimport (  # a comment
    commit,
)
if TYPE_CHECKING:
    from kdirect.log.partition import Partition
def f():
    import kdirect.log.segment
"""
    known = {f"kdirect.log.{m}" for m in ("kernel", "commit", "partition", "segment", "head")}
    assert imported_modules(text, known) == known - {"kdirect.log.head"}


def test_no_room_imports_the_package_that_names_them_all() -> None:
    """Only the command line and the doctor, which stand above all rooms, may."""
    whole = re.compile(r"^[ \t]*(import kdirect|from kdirect c?import .*\b[A-Z].*)$", re.MULTILINE)
    found = {
        ident(p)
        for p in sources(".py", ".pyx", ".pxd")
        if PACKAGES["kdirect"] in p.parents and whole.search(p.read_text())
    }
    assert found <= {"python/kdirect/cli.py", "python/kdirect/doctor.py"}


def test_the_stub_of_the_package_names_what_it_has() -> None:
    import kdirect
    from kdirect import docs

    stub = ast.parse((PACKAGES["kdirect"] / "__init__.pyi").read_text())
    homes = {
        alias.asname or alias.name: node.module
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert homes == kdirect._HOME
    (listed,) = [ast.literal_eval(n.value) for n in stub.body if isinstance(n, ast.Assign)]
    assert sorted(listed) == sorted(kdirect.__all__) == sorted([*homes, "__version__"])
    # Every error but the one that never leaves the broker.
    errors = {c.__name__ for c in docs.error_classes()} - {"RefusedError"}
    assert errors == {name for name, home in homes.items() if home == "kdirect.errors"}


# -- long functions --------------------------------------------------------------------------------

LONGEST = 60
# Functions that are still to be cut, by file.
STILL_LONG: dict[str, set[str]] = {
    "python/kdirect/client/gather.pyx": {"add"},
    "python/kdirect/log/recovery.py": {"_load_after_crash", "load_partition"},
    "python/kdirect/wire/cluster.py": {"refresh"},
}


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
    assert found == STILL_LONG, f"cut functions of {LONGEST} lines or more, or take out what is cut"


@pytest.mark.parametrize(
    ("library", "owner"),
    [("kafka", "python/kdirect/format/protocol.py"), ("pyverbs", "python/kdirect/rdma/verbs.py")],
)
def test_a_library_is_imported_in_one_place(library: str, owner: str) -> None:
    importing = re.compile(rf"^\s*(from|c?import)\s+{library}[\s.]", re.MULTILINE)
    users = {
        ident(p)
        for p in sources(".py", ".pyx")
        if {"python", "kdirect_spark"} & set(p.relative_to(ROOT).parts)
        and importing.search(p.read_text())
    }
    assert users <= {owner}


def locks_nobody_takes(text: str) -> set[str]:
    """Names of attributes that hold a lock which the file never enters or acquires: a promise that
    is not kept."""
    made = set(re.findall(r"\bself\.(\w+)\s*(?::[^=\n]+)?=\s*(?:threading\.)?R?Lock\(\)", text))
    entered = re.findall(
        r"\bwith\s+(?:[\w\[\]()]+\.)*(\w+)(?:\s+as\s+\w+)?\s*[:,]", text
    ) + re.findall(r"\.(\w+)\.acquire\(", text)
    return made - set(entered)


def test_every_lock_is_taken_by_somebody() -> None:
    product = [
        p
        for p in sources(".py", ".pyx")
        if {"python", "kdirect_spark"} & set(p.relative_to(ROOT).parts)
    ]
    assert {
        ident(path): names for path in product if (names := locks_nobody_takes(path.read_text()))
    } == {}


def test_a_lock_that_nobody_takes_is_found() -> None:
    made = (
        "self._a = threading.Lock()\nself.b: RLock = threading.RLock()\n"
        "self._c = threading.Lock()\nself._d = Lock()\n"
    )
    assert locks_nobody_takes(made) == {"_a", "b", "_c", "_d"}
    assert locks_nobody_takes(
        made + "with self._a:\n    pass\nwith state.b, other:\n    x._c.acquire()\n"
    ) == {"_d"}


# -- prose -----------------------------------------------------------------------------------------

# Words and phrases that have no right use here, and what to write instead.  English readers take
# "behind" for "before": a batch follows another one, or has higher offsets.
DIALECT = {
    r"anew": "again",
    r"none such": "no such, or say what is missing",
    r"a thread an attempt|one (?:lock|thread|queue) a \w+": "one for each",
    r"told apart": "distinguished",
    r"for want of": "for lack of",
    r"(?:lie|lies|reads?|goes|go|going) (?:on )?behind (?:the|it|its|them|that|what)": "after",
    r"offsets? behind": "after",
    r"beside (?:that|this|them|it)": "in addition to",
    r"of no use any more": "useless, or closed",
    r"(?:what|who) there is none": "say what is missing",
}
# Files whose docstrings are still to be read as a newcomer would.
UNREAD = frozenset(
    [
        "python/kdirect/broker/groups.py",
        "python/kdirect/broker/offsets.py",
        "python/kdirect/broker/shared_word.py",
        "python/kdirect/client/consumer.py",
        "python/kdirect/client/direct.py",
        "python/kdirect/client/direct_write.pyx",
        "python/kdirect/client/idempotence.pyx",
        "python/kdirect/client/message.pxd",
        "python/kdirect/client/message.pyx",
        "python/kdirect/client/partition_feed.pyx",
        "python/kdirect/client/paths.py",
        "python/kdirect/client/produce_paths.py",
        "python/kdirect/client/producer.py",
        "python/kdirect/client/reading.py",
        "python/kdirect/client/tcp_append.py",
        "python/kdirect/client/topics.py",
        "python/kdirect/log/commit.pxd",
        "python/kdirect/log/kernel.pxd",
        "python/kdirect/log/recovery.py",
        "python/kdirect/log/segment.py",
        "python/kdirect/wire/attempt.py",
        "python/kdirect/wire/cluster.py",
    ]
)


def prose_of_python(text: str) -> str:
    """The comments and docstrings of Python or Cython source.  A string that stands as a statement
    of its own is a docstring."""
    found = []
    before = "NEWLINE"
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "COMMENT" or (
            kind == "STRING" and before in ("NEWLINE", "NL", "INDENT", "DEDENT")
        ):
            found.append(token.string)
        if kind not in ("COMMENT", "NL"):
            before = kind
    return "\n".join(found)


def dialect(prose: str) -> list[str]:
    """What `prose` says in words of `DIALECT`, each with the remedy."""
    words = " ".join(re.sub(r"(?m)^\s*#", " ", prose).split())
    return [
        f"{match[0]!r}: write {remedy}"
        for pattern, remedy in DIALECT.items()
        for match in re.finditer(rf"\b(?:{pattern})\b", words, re.IGNORECASE)
    ]


def prose_files() -> list[Path]:
    """Pages, and the sources of the product, the examples and the demo."""
    roots = {"python", "kdirect_spark", "examples", "demo"}
    code = [p for p in sources(".py", ".pyx", ".pxd") if p.relative_to(ROOT).parts[0] in roots]
    return code + [p for p in sources(".md") if p.name != "CHANGELOG.md"]


@pytest.mark.parametrize("path", prose_files(), ids=ident)
def test_prose_is_plain_english(path: Path) -> None:
    text = path.read_text()
    found = dialect(text if path.suffix == ".md" else prose_of_python(text))
    if ident(path) not in UNREAD:
        assert not found, f"{ident(path)}: " + "; ".join(found)


def test_the_finder_finds_dialect_in_docstrings_and_comments_only() -> None:
    source = (
        'def f():\n    """Asks the broker\n    anew."""\n    x = "none such"  # told\n    # apart\n'
    )
    assert [f.split(":")[0] for f in dialect(prose_of_python(source))] == ["'anew'", "'told apart'"]
    assert dialect("The next file lies behind the head.  One lock a producer.")
    assert not dialect("The broker listens behind a firewall; a renewed lease; beside the point.")


def test_pages_that_sources_name_exist() -> None:
    lost = [
        f"{ident(path)}: {page}"
        for path in [*sources(".py", ".pyx", ".pxd", ".md"), ROOT / "Makefile"]
        if path.name not in ("CHANGELOG.md", "test_tidy.py")
        for page in re.findall(r"\bdocs/[\w-]+\.md", path.read_text())
        if not (ROOT / page).exists()
    ]
    assert not lost, "\n".join(lost)


# -- ARCHITECTURE.md names every source file -------------------------------------------------------

# Files that come or go in a change that is under way: neither their presence nor their absence in
# ARCHITECTURE.md is an error.
MOVING: frozenset[str] = frozenset()


def rooms_of_architecture(text: str) -> dict[str, set[str]]:
    """Names of files in the tables below "Rooms", by the room in the heading above each table."""
    found: dict[str, set[str]] = {}
    rooms: list[str] = []
    for line in text.split("\n## Rooms\n", 1)[1].split("\n## ", 1)[0].splitlines():
        if line.startswith("### "):
            rooms = re.findall(r"`(\w+)/`", line) or ["kdirect"]
        elif rooms and line.startswith("| `"):
            for room in rooms:
                names = re.findall(r"`([\w.]+\.(?:py|pyx|pxd|pyi|h|scala))`", line.split("|")[1])
                found.setdefault(room, set()).update(names)
    return found


def source_files() -> dict[str, set[str]]:
    """Source files by room.  A .pxd or .pyi belongs to the file whose name it shares."""
    found: dict[str, set[str]] = {}
    for path in sources(".py", ".pyx", ".pxd", ".pyi", ".h", ".scala"):
        parts = path.relative_to(ROOT).parts
        if parts[0] not in ("python", "kdirect_spark", "jvm_shim") or "pyspark_kdirect" in parts:
            continue
        if path.suffix in (".pxd", ".pyi") and any(
            path.with_suffix(s).exists() for s in (".py", ".pyx", ".h")
        ):
            continue
        if path.stem == "__init__":
            continue
        room = parts[0] if parts[0] != "python" else parts[2] if len(parts) > 3 else "kdirect"
        found.setdefault(room, set()).add(path.name)
    return found


def test_every_source_file_is_named_in_the_architecture() -> None:
    named, there = rooms_of_architecture((ROOT / "ARCHITECTURE.md").read_text()), source_files()
    named["kdirect_spark"] = named["jvm_shim"] = named["kdirect_spark"] | named["jvm_shim"]
    missing = {
        room: sorted(names - named.get(room, set()) - MOVING) for room, names in there.items()
    }
    stale = {
        room: sorted(names - there.get(room, set()) - there.get("jvm_shim", set()) - MOVING)
        for room, names in named.items()
        if room != "jvm_shim"
    }
    assert not any(missing.values()), f"give each a line in its room: {missing}"
    assert not any(stale.values()), f"these files are gone: {stale}"


# -- decisions by the text of a message ------------------------------------------------------------

# Where text for people stands.  As an attribute of anything; as a name of its own; as what an
# exception prints.
_ATTRIBUTE = (
    r"(?:\w+(?: \[ [^\]]* \]| \( \))? \. )+"
    r"(?:message|why|reason|hint|text|fault|broken|strerror|args)"
)
_PRINTED = r"(?:str|repr) \( (?:\w+ \. )*(?:e|err|error|exc|exception|cause|why|reason) \)"
_PEOPLES_TEXT = rf"(?:\b{_ATTRIBUTE}\b|\b(?:message|why|reason|hint|fault)\b|\b{_PRINTED})"
_CHANGED = r"(?: \. (?:lower|upper|strip|casefold) \( \)| \[ [^\]]* \])*"


def logical_lines(text: str) -> list[tuple[int, str]]:
    """(number, statement) of Python or Cython source: tokens with one space between them, every
    string as `S`, no comments, and the name of a constant that is a string as `S` too."""
    lines: list[tuple[int, str]] = []
    words: list[str] = []
    first = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        depth += (kind == "FSTRING_START") - (kind == "FSTRING_END")
        if kind in ("NEWLINE", "ENDMARKER"):
            if words:
                lines.append((first, " ".join(words)))
            words = []
        elif kind in ("STRING", "FSTRING_END") and depth == 0:
            words.append("S")
        elif kind in ("NAME", "NUMBER", "OP", "ERRORTOKEN") and depth == 0 and token.string.strip():
            words.append(token.string)
        if len(words) == 1:
            first = token.start[0]
    constants = {
        m[1] for _, line in lines if (m := re.fullmatch(r"([A-Z_]\w*)(?: : [\w .]+)? = S", line))
    }
    if not constants:
        return lines
    named = re.compile(rf"(?<!\. )\b(?:{'|'.join(sorted(constants))})\b")
    return [(number, named.sub("S", line)) for number, line in lines]


def decisions_by_text(text: str) -> list[int]:
    """Lines of Python or Cython source that decide something by text that is meant for people: a
    message, a reason, what an exception prints.  Who rewords it would break them."""
    people, changed = _PEOPLES_TEXT, _CHANGED
    patterns = [
        rf"\bS (?:not )?in {people}",
        rf"(?<!\bfor )\b\w+ (?:not )?in (?:{_ATTRIBUTE}\b|{_PRINTED})",
        rf"{people}{changed} (?:==|!=) S\b",
        rf"\bS (?:==|!=) {people}",
        rf"{people}{changed} (?:not )?in [(\[{{] S\b",
        rf"{people}{changed} \. (?:startswith|endswith|find|rfind|index|count) \(",
        rf"\bre \. (?:search|match|fullmatch|findall|finditer) \( .*{people}",
        rf"^match {people}{changed} :",
        rf"\b(?:match|search|fullmatch) \( {people}{changed} \)",
    ]
    found = re.compile("|".join(patterns))
    return [number for number, line in logical_lines(text) if found.search(line)]


PLANTED = (
    'if "no more" in head.why:',
    'code = A if "collides" in e.message else B',
    'if reason == "disconnected":',
    'if reason != "disconnected" and ready:',
    'if "disconnected" == self.reason:',
    'level = DEBUG if reason in ("disconnected", "closed") else WARNING',
    'elif "timed out" not in str(e):',
    "if word in str(error):",
    "return any(word in e.message for word in WORDS)",
    'if e.args[0] == "gone":',
    'if e.message.lower().startswith("no room"):',
    'while not peer.fault.endswith("gone"):',
    'if re.search("no more", str(e)):',
    'if re.match(r"(a|b)", head.why):',
    "if WORDS.search(e.message):",
    'if e.strerror == "No space left on device":',
    'DISCONNECTED = "disconnected"\nif reason == DISCONNECTED:',
    'match e.message:\n    case "gone":\n        pass',
    'if e.message == f"{tp} is gone":',
    'if (\n    ready\n    and "gone"\n    in e.hint\n):',
    'cdef int f(head):\n    if "no more" in head.why: return <int> 1\n'
    '    return (<Head> head).why == "gone"',
)
INNOCENT = (
    "if head.why is AbortReason.NO_ROOM:",
    "if reason is CutReason.DISCONNECTED:",
    "if e.code == ErrorCode.NOT_LEADER_OR_FOLLOWER:",
    "if e.errno in (errno.ENOSPC, errno.EDQUOT):",
    'return f"{e.message}; {e.hint}" if e.hint else e.message',
    'raise ConfigError(f"{name}: {e.message}", hint=e.hint or "use transport=tcp") from e',
    "for part in e.args:",
    'if "reason" in settings:',
    '"""Whether "gone" in e.message, or reason == "gone"."""',
    '# if "gone" in e.message:',
    "text = \"if reason == 'gone'\"",
    'log.warning("it is cut: %s", reason)',
    'if transport == "tcp" and why:',
    "cdef inline int f(const uint8_t* p) noexcept nogil:\n    return <int> p[0]",
)


@pytest.mark.parametrize("source", PLANTED)
def test_the_finder_finds_a_decision_by_text(source: str) -> None:
    assert decisions_by_text(source + "\n"), logical_lines(source + "\n")


@pytest.mark.parametrize("source", INNOCENT)
def test_the_finder_leaves_the_innocent_alone(source: str) -> None:
    assert not decisions_by_text(source + "\n"), logical_lines(source + "\n")


def test_the_finder_names_the_line() -> None:
    assert decisions_by_text(
        'import os\n\n\ndef f(e):\n    """A word."""\n'
        '    return (\n        "gone" in e.message\n    )\n'
    ) == [6]


def test_nothing_is_decided_by_the_text_of_a_message() -> None:
    found = []
    for path in sources(".py", ".pyx", ".pxd"):
        if "tests" not in path.relative_to(ROOT).parts:
            text = path.read_text()
            found += [
                f"{ident(path)}:{n}: {text.splitlines()[n - 1].strip()}"
                for n in decisions_by_text(text)
            ]
    assert not found, "use an enum, an error's class or its code:\n" + "\n".join(found)
