"""Arrows between rooms point one way, and modules do not import in circles: what import-linter
checks, for compiled modules too."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.tidy.tree import PACKAGES, ROOT, ident, sources

# What a room may import of kdirect, beside itself and what everyone may.  The same arrows as in
# pyproject.toml, where they hold for .py files; here they hold for compiled modules as well,
# cimports included.
EVERYONE = {"errors", "lazy_names", "model", "option_table", "options", "metrics", "machine"}
# Rows of `options` and `metrics`.
EVERYONE |= {"remote_options", "spark_options", "state_options", "remote_metrics", "state_metrics"}
EVERYONE |= {"failpoints", "blocks", "huge_pages", "sticky_assignment"}
EVERYONE |= {"transaction_options", "cleaner_options", "cleaner_metrics", "sasl_options"}
EVERYONE |= {"kafka_properties", "spin"}
EVERYONE |= {"thread_options"}
ARROWS = {
    "format": set(),
    "rdma": set(),
    "objects": set(),
    "log": {"format"},
    "client": {"format", "objects", "rdma", "wire"},
    "wire": {"format", "rdma"},
    "store": set(),
    "cluster": {"store"},
    "member": {"log", "format", "wire", "store", "cluster"},
    "state": {"client", "wire", "rdma", "format"},
    "workloads": {"state", "client", "format"},
    "storage": {"log", "format", "objects"},
    "broker": {
        "log",
        "format",
        "objects",
        "rdma",
        "storage",
        "wire",
        "store",
        "cluster",
        "member",
    },
    **dict.fromkeys(EVERYONE, EVERYONE),
}


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


def test_the_connector_knows_of_the_state_engine_what_users_know_and_its_source() -> None:
    """The words of plans and jobs, which have public names, what decodes values, checked JSON, and
    the connections by which tasks ask for their coordinator."""
    from kdirect.state import _HOME

    texts = {
        ident(p): p.read_text() for p in sources(".py") if PACKAGES["kdirect_spark"] in p.parents
    }
    inner = ("control", "messages", "source", "strict")
    allowed = {*_HOME.values(), *(f"kdirect.state.{name}" for name in inner)}
    for path, text in texts.items():
        assert imported_rooms(text) <= {"client", "format", "state"} | EVERYONE, path
        assert set(re.findall(r"^\s*from (kdirect\.state\.\w+)", text, re.MULTILINE)) <= allowed, (
            path
        )
        for names in re.findall(r"^\s*from kdirect\.state import (.+)", text, re.MULTILINE):
            named = {name.split()[0] for name in names.split(",")}
            assert named <= {*_HOME, *inner, "schema"}, path
        assert not re.search(r"^\s*import kdirect\.state", text, re.MULTILINE), path


def test_the_rules_of_a_cluster_know_what_a_store_promises_and_no_store() -> None:
    room = PACKAGES["kdirect"] / "cluster"
    text = "\n".join(p.read_text() for p in sources(".py", ".pyx") if room in p.parents)
    assert set(re.findall(r"kdirect\.store[.\w]*", text)) <= {"kdirect.store.contract"}


OUTSIDE = "os|io|time|socket|select|threading|queue|asyncio|random|pathlib|subprocess"
# The rules of the state engine; the other files of its room are kernels and drivers.
# fmt: off
RULES_OF_STATE = (
    "strict", "schema", "expressions", "aggregates", "windows", "plan", "batches", "messages",
    "clock", "helper", "leader", "job", "coordinator", "ranges", "recovery",
)
# fmt: on


# What is decided about remote segments; the other files of its room carry it out, read and keep.
RULES_OF_TIERS = (
    "remote_log", "remote_events", "remote_segments", "segment_states", "copy_rules", "lineage",
)  # fmt: skip


def what_it_touches(path: Path) -> list[str]:
    """Modules imported by a file that bring sockets, files, clocks, threads or chance."""
    return re.findall(rf"^\s*(?:import|from)\s+({OUTSIDE})\b", path.read_text(), re.MULTILINE)


def test_the_rules_of_a_cluster_touch_nothing() -> None:
    """No socket, file, clock, thread or process: what would bring them is not imported."""
    rules = [p for p in sources(".py", ".pyx") if PACKAGES["kdirect"] / "cluster" in p.parents]
    assert not {ident(path): found for path in rules if (found := what_it_touches(path))}


def test_the_rules_of_the_state_engine_touch_nothing() -> None:
    rules = [PACKAGES["kdirect"] / "state" / f"{name}.py" for name in RULES_OF_STATE]
    assert not {ident(path): found for path in rules if (found := what_it_touches(path))}
    text = "\n".join(path.read_text() for path in rules)
    rooms = imported_rooms(text) - {"state"}
    assert rooms <= EVERYONE | {"format"}


def test_the_rules_of_tiered_storage_touch_nothing() -> None:
    """No store, log, metadata topic, clock or thread: they import each other, and formats."""
    rules = [PACKAGES["kdirect"] / "storage" / f"{name}.py" for name in RULES_OF_TIERS]
    assert not {ident(path): found for path in rules if (found := what_it_touches(path))}
    text = "\n".join(path.read_text() for path in rules)
    assert imported_rooms(text) <= {"storage", "format"}
    inner = set(re.findall(r"^\s*from kdirect\.storage\.(\w+)", text, re.MULTILINE))
    assert inner <= set(RULES_OF_TIERS), "what carries decisions out decides nothing"


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
    # Every error but those that never leave the broker.
    inside = {"RefusedError", "RefusedRequestError", "StoreLostError", "TieredOffsetError"}
    errors = {c.__name__ for c in docs.error_classes()} - inside
    assert errors == {name for name, home in homes.items() if home == "kdirect.errors"}


@pytest.mark.parametrize(
    ("library", "owner"),
    [
        (r"kafka\.protocol", "python/kdirect/format/protocol.py"),
        (r"kafka(?!\.protocol)", "python/kdirect/format/error_codes.py"),
        ("pyverbs", "python/kdirect/rdma/verbs.py"),
        ("kazoo", "python/kdirect/store/zookeeper.py"),
        ("botocore", "python/kdirect/objects/presigned.py"),
    ],
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
