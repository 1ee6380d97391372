"""Modules say their law in plain English, and ARCHITECTURE.md names each source file."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from tests.tidy.tree import ROOT, ident, sources, written_by_hand


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
    # The scripts of the guest mount the machine's files below such a path.
    texts = [p for p in [*written_by_hand(), *sources(".json")] if p.suffix != ".sh"]
    found = [
        f"{ident(p)}:{i}: {line.strip()}"
        for p in texts
        for i, line in enumerate(p.read_text().splitlines(), 1)
        if private.search(line)
    ]
    assert not found, "\n".join(found)


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
        if path.name != "CHANGELOG.md"
        for page in re.findall(r"\bdocs/[\w-]+\.md", path.read_text())
        if not (ROOT / page).exists()
    ]
    assert not lost, "\n".join(lost)


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
