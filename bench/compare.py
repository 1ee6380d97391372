"""Compares this checkout with another one: the same rows, in turns on one machine, and the medians
beside each other.

    make bench-compare BEFORE=../kdirect-before ROWS="produce-rtt slot-poll" ROUNDS=5 JSON=out.json

Both checkouts are installed (`make install` in each).  The rows are those of this checkout for
both, so that only the package differs; a row that asks for what the older package lacks fails
there, and is told as missing.  Each row is run before, after, after, before, and so on, so that a
machine that grows faster or slower meanwhile does not favour one of them.  The JSON keeps every
value of every round.

A figure is worse when its median is more than `--limit` per cent worse, and when in addition the
two sets of values lie apart: on a shared machine the medians of the same code differ, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import run as harness  # noqa: E402

ENVIRONMENT = {
    "cpu",
    "kernel",
    "python",
    "commit",
    "time",
    "cores",
    "pinned_to",
    "load_average",
    "quick",
}


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, 1 when a figure is worse or missing, 2 for a wrong call."""
    parser = argparse.ArgumentParser(
        prog="bench/compare.py", description="Compare two checkouts; see the file's own text."
    )
    parser.add_argument(
        "--before",
        type=Path,
        required=True,
        help="root of the other checkout, which `make install` was run in",
    )
    parser.add_argument("--rows", default="", help="names, by spaces or commas (default: all)")
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
    options = parser.parse_args(arguments)
    other = options.before / ".venv/bin/python"
    if options.before.resolve() == HERE.parent:
        print(
            "bench: --before (BEFORE=) is this checkout itself: name the root of another one",
            file=sys.stderr,
        )
        return 2
    if not other.exists():
        print(f"bench: {other} is not there: run make install in {options.before}", file=sys.stderr)
        return 2
    try:
        rows = [harness.find(name) for name in options.rows.replace(",", " ").split()] or list(
            harness.ROWS
        )
    except LookupError as e:
        print(f"bench: {e.args[0]}", file=sys.stderr)
        return 2
    pythons = {"before": str(other), "after": sys.executable}
    compared: list[dict[str, Any]] = []
    for row in rows:
        rounds: dict[str, list[list[dict[str, Any]]]] = {"before": [], "after": []}
        for number in range(options.rounds):
            for side in ("before", "after") if number % 2 == 0 else ("after", "before"):
                rounds[side].append(
                    one_round(row, pythons[side], options.json, options.seconds, options.quick)
                )
        compared += compare(row.name, rounds["before"], rounds["after"])
        options.json.parent.mkdir(parents=True, exist_ok=True)
        harness.write(options.json, compared)
    print(table(compared, options.limit))
    return 1 if any(f["change"] is None or is_worse(f, options.limit) for f in compared) else 0


def one_round(
    row: harness.Row, python: str, target: Path, seconds: float, quick: bool
) -> list[dict[str, Any]]:
    """The figures of one row with that interpreter's package; none when it fails."""
    scratch = target.with_name(target.name + ".round")
    scratch.unlink(missing_ok=True)
    scratch.parent.mkdir(parents=True, exist_ok=True)
    command = [
        python,
        str(HERE / "run.py"),
        "--rows",
        row.name,
        "--json",
        str(scratch),
        "--seconds",
        str(seconds),
    ]
    subprocess.run(command + ["--quick"] * quick, stdout=subprocess.DEVNULL, check=False)
    figures = json.loads(scratch.read_text()) if scratch.exists() else []
    scratch.unlink(missing_ok=True)
    return list(figures)


def compare(
    row: str, before: list[list[dict[str, Any]]], after: list[list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """One entry for each figure of a row, which is known by its place; `change` is the factor by
    which the median is better (above 1) or worse (below), None where a round of either has no such
    figure."""
    compared = []
    for place in range(max((len(figures) for figures in before + after), default=0)):
        sides = {
            "before": [f[place] for f in before if len(f) > place],
            "after": [f[place] for f in after if len(f) > place],
        }
        some = (sides["after"] or sides["before"])[0]
        settings = [f["settings"] for f in sides["before"] + sides["after"]]
        entry: dict[str, Any] = {
            "row": some["row"],
            "unit": some["unit"],
            "settings": {
                k: v
                for k, v in settings[0].items()
                if k not in ENVIRONMENT and all(s.get(k) == v for s in settings)
            },
            "machine": {
                k: v
                for k, v in settings[0].items()
                if k in ENVIRONMENT - {"commit", "load_average", "time"}
            },
            **{side: [f["value"] for f in figures] for side, figures in sides.items()},
            "change": None,
        }
        if len(sides["before"]) == len(before) and len(sides["after"]) == len(after) and before:
            old, new = statistics.median(entry["before"]), statistics.median(entry["after"])
            lower = bool(some["settings"].get("lower_is_better"))
            entry["change"] = (
                1.0
                if old == new
                else (old / new if new else None)
                if lower
                else (new / old if old else None)
            )
        compared.append(entry)
    if not compared:
        compared.append(
            {
                "row": row,
                "unit": "",
                "settings": {},
                "machine": {},
                "before": [],
                "after": [],
                "change": None,
            }
        )
    return compared


def is_worse(entry: dict[str, Any], limit: float) -> bool:
    """Is the median more than `limit` per cent worse, and does the better half of each set not
    reach the other's median?"""
    if entry["change"] is None or entry["change"] >= 1 - limit / 100:
        return False
    lower = bool(entry["settings"].get("lower_is_better"))
    old, new = entry["before"], entry["after"]
    best = min(new) if lower else max(new)
    median = statistics.median(old)
    return best > median if lower else best < median


def table(compared: list[dict[str, Any]], limit: float) -> str:
    """The entries as text, a line each."""
    lines = []
    for entry in compared:
        of = " ".join(
            f"{k}={v}"
            for k, v in entry["settings"].items()
            if isinstance(v, int | str) and len(str(v)) <= 24 and v is not True
        )
        values = [
            f"{statistics.median(entry[side]):,.4g}" if entry[side] else "-"
            for side in ("before", "after")
        ]
        change = (
            "missing"
            if entry["change"] is None
            else f"{entry['change']:.2f}" + (" worse" if is_worse(entry, limit) else "")
        )
        lines.append((entry["row"], of, *values, entry["unit"], change))
    shown = [("row", "of", "before", "after", "unit", "change"), *lines]
    widths = [max(len(line[i]) for line in shown) for i in range(len(shown[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in shown
    )


if __name__ == "__main__":
    sys.exit(main())
