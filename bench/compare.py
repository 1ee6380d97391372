"""Compares this checkout with another one: each runs its own rows, in turns on one machine, and the
medians are told in one table.

    make bench-compare BEFORE=../kdirect-before ROWS="produce-rtt slot-poll" ROUNDS=5 JSON=out.json

Both checkouts are installed (`make install` in each).  Each side is run by its own bench/run.py
with the Python of its own environment, because some rows reach into the package that they were
written for.  Each row is run before, after, after, before, and so on, so that a machine that grows
faster or slower meanwhile does not favour one of them.

Figures are matched by what they say of themselves: the row, the unit, whether less is better, and
the parameters in their settings (sizes, counts of partitions, modes, how it was measured).  A
figure for which the other side has no equal is not compared; the table says why.  Two figures that
say the same of themselves can still be measured by code that differs.  So the definitions of
bench/*.py that differ between the checkouts are named after the table, and in the entries of the
rows whose module has them.

The JSON has an entry for each figure: the medians, every value of every round, and the other
numbers that the row measured (99th percentiles, the broker's CPU time).

A figure is worse when its median is more than `--limit` per cent worse, and when in addition not
even the best of the values after reaches the median before: on a shared machine the medians of the
same code differ, too.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import statistics
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from catalogue import ROWS, find  # noqa: E402
from figures import ENVIRONMENT, write  # noqa: E402

Figure = dict[str, Any]
SIDES = ("before", "after")
NAMES = {"before": "the other checkout", "after": "this checkout"}
# What a run finds out, though it is no fraction.  A key that is missing here costs a comparison,
# which is told; it never makes one that is wrong.
FOUND = {
    "callback",
    "mb_per_s",
    "memory_limit",
    "pings",
    "records",
    "rolls",
    "rolls_ahead",
    "rounds",
    "runs",
    "samples",
    "segment_bytes",
    "spread",
    "turns",
}


@dataclass(frozen=True)
class Checkout:
    """An installed checkout: its root and its environment's interpreter."""

    root: Path
    python: Path

    def environment(self) -> dict[str, str]:
        """Variables that let Spark, and whatever else starts Python by name, find this checkout's
        environment, whichever of the two started the comparison."""
        variables = dict(os.environ)
        variables.pop("PYTHONPATH", None)
        variables["PYTHONSAFEPATH"] = "1"
        variables["PYSPARK_PYTHON"] = variables["PYSPARK_DRIVER_PYTHON"] = str(self.python)
        variables["PATH"] = os.pathsep.join(
            [str(self.python.parent), *filter(None, [variables.get("PATH")])]
        )
        return variables

    def rows(self) -> dict[str, str]:
        """The names of its rows, and what each says that it shows; RuntimeError if it cannot say
        them."""
        listing = subprocess.run(
            [str(self.python), str(self.root / "bench/run.py"), "--list"],
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if listing.returncode != 0:
            raise RuntimeError(
                f"{self.root / 'bench/run.py'} --list failed, so this checkout's rows are not"
                f" known: {listing.stderr.strip() or listing.returncode}"
            )
        lines = [line.split(None, 1) for line in listing.stdout.splitlines() if line.strip()]
        return {name: " ".join(rest) for name, *rest in lines}

    def measure(self, row: str, scratch: Path, seconds: float, quick: bool) -> list[Figure]:
        """The figures of one turn of a row; those that it had written when it failed."""
        scratch.unlink(missing_ok=True)
        command = [str(self.python), str(self.root / "bench/run.py"), "--rows", row]
        command += ["--json", str(scratch), "--seconds", str(seconds), *["--quick"] * quick]
        subprocess.run(
            command, env=self.environment(), stdout=subprocess.DEVNULL, check=False
        )  # it says on stderr what failed
        figures = json.loads(scratch.read_text()) if scratch.exists() else []
        scratch.unlink(missing_ok=True)
        return list(figures)

    def definitions(self) -> dict[str, dict[str, str]]:
        """By module of bench/, then by name: its functions, classes and constants, in a form in
        which neither format nor docstring is left."""
        return {
            path.stem: _definitions(path.read_text())
            for path in sorted((self.root / "bench").glob("*.py"))
        }


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, 1 when a figure is worse or could not be compared, 2 for a wrong call."""
    options = _parser().parse_args(arguments)
    sides = {
        "before": Checkout(options.before, options.before.absolute() / ".venv/bin/python"),
        "after": Checkout(HERE.parent, Path(sys.executable)),
    }
    if options.before.resolve() == HERE.parent:
        print(
            "bench: --before (BEFORE=) is this checkout itself: name the root of another one",
            file=sys.stderr,
        )
        return 2
    if not sides["before"].python.exists():
        print(
            f"bench: {sides['before'].python} is not there: run make install in {options.before}",
            file=sys.stderr,
        )
        return 2
    try:
        listed = {side: checkout.rows() for side, checkout in sides.items()}
        rows = wanted(options.rows, listed)
    except (LookupError, RuntimeError) as e:
        print(f"bench: {e.args[0]}", file=sys.stderr)
        return 2
    options.json.parent.mkdir(parents=True, exist_ok=True)
    scratch = options.json.with_name(options.json.name + ".round")
    differing = differences(*(sides[side].definitions() for side in SIDES))
    modules = {row.name: row.module for row in ROWS}
    compared: list[dict[str, Any]] = []
    for row in rows:
        lacking = [side for side in SIDES if row not in listed[side]]
        if lacking:
            compared.append(entry_of(row, {}, [], f"{NAMES[lacking[0]]} has no such row"))
        else:
            turns = in_turns(sides, row, scratch, options)
            entries = compare(row, turns["before"], turns["after"])
            for entry in entries:
                entry["differing_code"] = differing.get(modules[row], [])
            compared += entries
        write(options.json, compared)
    print(table(compared, options.limit))
    for module, names in differing.items():
        print(f"bench: the checkouts differ in {module}.py: {', '.join(names)}")
    for row in rows:
        texts = [listed[side].get(row) for side in SIDES]
        if None not in texts and texts[0] != texts[1]:
            print(f"bench: {row} described itself as: {texts[0]}; now as: {texts[1]}")
    return 1 if any(e["change"] is None or is_worse(e, options.limit) for e in compared) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench/compare.py", description="Compare two checkouts; see the file's own text."
    )
    parser.add_argument(
        "--before",
        type=Path,
        required=True,
        help="root of the other checkout, which `make install` was run in",
    )
    parser.add_argument(
        "--rows", default="", help="names, by spaces or commas (default: all of both)"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="how often each is run (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        help="about how long a row may measure (default: %(default)s)",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=5.0,
        help="per cent worse that are told (default: %(default)s)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("bench/out/compare.json"),
        help="where the figures go (default: %(default)s)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one short round a row: shows that it works, not how fast",
    )
    return parser


def wanted(names: str, listed: dict[str, dict[str, str]]) -> list[str]:
    """The rows that were asked for, or all: this checkout's, then those that only the other has;
    LookupError for a name that neither has."""
    known = list(dict.fromkeys([*listed["after"], *listed["before"]]))
    asked = names.replace(",", " ").split()
    for name in asked:
        if name not in known:
            find(name)  # names the nearest
    return asked or known


def in_turns(
    sides: dict[str, Checkout], row: str, scratch: Path, options: argparse.Namespace
) -> dict[str, list[list[Figure]]]:
    """What each side measured in each round of a row; the sides begin by turns."""
    turns: dict[str, list[list[Figure]]] = {side: [] for side in SIDES}
    for number in range(options.rounds):
        for side in SIDES if number % 2 == 0 else reversed(SIDES):
            turns[side].append(sides[side].measure(row, scratch, options.seconds, options.quick))
    return turns


def compare(
    row: str, before: list[list[Figure]], after: list[list[Figure]]
) -> list[dict[str, Any]]:
    """An entry for each figure of a row.  `change` is the factor by which the median is better
    (above 1) or worse (below), None where it was not compared, and then `why` says why not."""
    rounds = {"before": before, "after": after}
    failed = [
        f"the row failed in {empty} of {len(turns)} rounds of {NAMES[side]}"
        for side, turns in rounds.items()
        if (empty := sum(not figures for figures in turns))
    ]
    found = {side: _by_definition(turns) for side, turns in rounds.items()}
    entries = [] if any(found.values()) else [entry_of(row, {}, [], "; ".join(failed))]
    for definition in dict.fromkeys([*found["after"], *found["before"]]):
        sides = {side: found[side].get(definition, []) for side in SIDES}
        some = (sides["after"] or sides["before"])[0]
        why = "; ".join(failed) or None
        for side, other in (SIDES, SIDES[::-1]):
            if why:
                break
            if not sides[side]:
                why = f"{NAMES[side]} has no such figure" + _difference(
                    some, definition, found[side], found[other]
                )
            elif len(sides[side]) < len(rounds[side]):
                why = f"{NAMES[side]} did not measure it in every round"
        entries.append(entry_of(row, sides, [*sides["before"], *sides["after"]], why))
    return entries


def entry_of(
    row: str, sides: dict[str, list[Figure]], figures: list[Figure], why: str | None
) -> dict[str, Any]:
    """An entry of the result: `sides` has the figure's rounds, `figures` the same in one list."""
    some: Figure = figures[0] if figures else {"row": row, "unit": "", "settings": {}}
    settings = [figure["settings"] for figure in figures]
    values = {side: [figure["value"] for figure in sides.get(side, [])] for side in SIDES}
    medians = {side: statistics.median(v) if v else None for side, v in values.items()}
    change = None if why else _change(some, medians["before"], medians["after"])
    numbers = {
        key
        for s in settings
        for key, value in s.items()
        if key not in ENVIRONMENT
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and (key in FOUND or isinstance(value, float))
    }
    return {
        "row": some["row"],
        "unit": some["unit"],
        "settings": _parameters(some),
        "machine": {
            key: value
            for key, value in some["settings"].items()
            if key in ENVIRONMENT - {"commit", "load_average", "time"}
        },
        "commits": {
            side: sorted({f["settings"].get("commit", "unknown") for f in sides.get(side, [])})
            for side in SIDES
        },
        **values,
        "median": medians,
        "change": change,
        "why": why or (None if change is not None else "a median is 0"),
        "also": {
            key: {side: [f["settings"].get(key) for f in sides.get(side, [])] for side in SIDES}
            for key in sorted(numbers)
        },
    }


def _change(figure: Figure, old: float | None, new: float | None) -> float | None:
    if old is None or new is None or old == new:
        return None if old is None or new is None else 1.0
    if figure["settings"].get("lower_is_better"):
        old, new = new, old
    return new / old if old and new else None


def _parameters(figure: Figure) -> dict[str, Any]:
    """What of the settings says what was measured, not what was found or where."""
    return {
        key: value
        for key, value in figure["settings"].items()
        if key not in ENVIRONMENT | FOUND and isinstance(value, bool | int | str)
    }


def _by_definition(rounds: list[list[Figure]]) -> dict[str, list[Figure]]:
    """The rounds of each figure, by what it says of itself; a row may have several figures that say
    the same (held against other limits), which are told apart by their order."""
    found: dict[str, list[Figure]] = {}
    for figures in rounds:
        seen: Counter[str] = Counter()
        for figure in figures:
            said = json.dumps(
                [figure["row"], figure["unit"], sorted(_parameters(figure).items())], default=str
            )
            seen[said] += 1
            found.setdefault(f"{said} {seen[said]}", []).append(figure)
    return found


def _difference(
    figure: Figure, definition: str, lacking: dict[str, Any], having: dict[str, list[Figure]]
) -> str:
    """In what the figure differs from its likely counterpart: of the figures with the same row that
    no equal was found for, the one at the same place; nothing when there is none."""
    name = figure["row"]

    def left(found: dict[str, list[Figure]], other: dict[str, Any]) -> list[str]:
        return [d for d, f in found.items() if d not in other and f[0]["row"] == name]

    place = left(having, lacking).index(definition)
    counterparts = left(lacking, having)
    if place >= len(counterparts):
        return ""
    counterpart = lacking[counterparts[place]][0]
    there = {"unit": counterpart["unit"], **_parameters(counterpart)}
    here = {"unit": figure["unit"], **_parameters(figure)}
    return ": " + ", ".join(
        f"{key} is {there.get(key, 'missing')} there, {here.get(key, 'missing')} here"
        for key in dict.fromkeys([*here, *there])
        if here.get(key) != there.get(key)
    )


def differences(
    before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]
) -> dict[str, list[str]]:
    """By module: the names of definitions that are not the same in both, or only in one; this file
    is left out, because it measures nothing."""
    differing = {
        module: sorted(
            name
            for name in {*before.get(module, {}), *after.get(module, {})}
            if before.get(module, {}).get(name) != after.get(module, {}).get(name)
        )
        for module in sorted({*before, *after} - {Path(__file__).stem})
    }
    return {module: names for module, names in differing.items() if names}


def _definitions(source: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for statement in ast.parse(source).body:
        for node in ast.walk(statement):
            body = getattr(node, "body", None)
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or not body:
                continue
            if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
                node.body = body[1:] or [ast.Pass()]
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            names = [statement.name]
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = [ast.unparse(target) for target in targets]
        else:
            continue  # imports, and what runs when it is the main program
        found |= dict.fromkeys(names, ast.dump(statement))
    return found


def is_worse(entry: dict[str, Any], limit: float) -> bool:
    """Is the median more than `limit` per cent worse, and does not even the best value after reach
    the median before?"""
    if entry["change"] is None or entry["change"] >= 1 - limit / 100:
        return False
    lower = bool(entry["settings"].get("lower_is_better"))
    old, new = entry["before"], entry["after"]
    best = min(new) if lower else max(new)
    median = statistics.median(old)
    return best > median if lower else best < median


def table(compared: list[dict[str, Any]], limit: float) -> str:
    """The entries as text, a line each; why figures were not compared is said after them."""
    lines = []
    for entry in compared:
        of = " ".join(
            f"{k}={v}"
            for k, v in entry["settings"].items()
            if isinstance(v, int | str) and len(str(v)) <= 24 and v is not True
        )
        medians = [entry["median"][side] for side in SIDES]
        values = ["-" if median is None else f"{median:,.4g}" for median in medians]
        change = (
            "not compared"
            if entry["change"] is None
            else f"{entry['change']:.2f}" + (" worse" if is_worse(entry, limit) else "")
        )
        lines.append((entry["row"], of, *values, entry["unit"], change))
    shown = [("row", "of", "before", "after", "unit", "change"), *lines]
    widths = [max(len(line[i]) for line in shown) for i in range(len(shown[0]))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in shown
    ]
    whys = [
        f"bench: {e['row']} was not compared: {e['why']}" for e in compared if e["change"] is None
    ]
    return "\n".join([*text, *dict.fromkeys(whys)])


if __name__ == "__main__":
    sys.exit(main())
