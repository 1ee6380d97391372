"""The form of the benchmark's figures: what each has, and how they are written and shown.

Owns: `FIGURE`, the keys of every figure; the machine and the commit that stand in its settings; the
JSON file; the table that is printed.
"""

from __future__ import annotations

import json
import math
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

from catalogue import Row

HERE = Path(__file__).resolve().parent
FIGURE = ("row", "value", "unit", "against", "against_value", "ratio", "settings")


def complete(row: Row, figure: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """The figure with every key of `FIGURE` in that order and the machine in its settings;
    ValueError when it is malformed.  Its value may be None if `not_measured` in its settings says
    why."""
    unknown = set(figure) - set(FIGURE)
    value = figure.get("value")
    why = figure.get("settings", {}).get("not_measured")
    if (
        unknown
        or not isinstance(figure.get("unit"), str)
        or not (isinstance(value, int | float) or (value is None and isinstance(why, str)))
    ):
        raise ValueError(
            f"row {row.name}: figure {figure!r} needs a unit, a value (or settings with the reason"
            f" why it was not_measured), and no keys except {', '.join(FIGURE)}"
        )
    out = {"row": row.name, "against": None, "against_value": None, "ratio": None, **figure}
    if out["ratio"] is None and out["value"] is not None and out["against_value"]:
        out["ratio"] = out["value"] / out["against_value"]
    if not all(
        math.isfinite(out[key])
        for key in ("value", "against_value", "ratio")
        if out[key] is not None
    ):
        raise ValueError(f"row {row.name}: figure {figure!r} is not finite")
    out["settings"] = {**figure.get("settings", {}), **shared}
    return {key: out[key] for key in FIGURE}


def machine() -> dict[str, Any]:
    """What a reader needs to weigh a figure: processor, kernel, Python, commit."""
    model = "unknown"
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return {
        "cpu": model,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def commit() -> str:
    """The commit checked out, with a + when the tree differs from it; `unknown` outside of git."""
    try:

        def git(*arguments: str) -> str:
            return subprocess.run(
                ["git", "-C", str(HERE), *arguments],
                capture_output=True,
                text=True,
                check=True,
                timeout=10,
            ).stdout.strip()

        return git("rev-parse", "--short=12", "HEAD") + (
            "+" if git("status", "--porcelain", "--untracked-files=no") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def write(target: Path, figures: list[dict[str, Any]]) -> None:
    partial = target.with_name(target.name + ".partial")
    partial.write_text(json.dumps(figures, indent=1) + "\n")
    partial.replace(target)


# What a figure says of where it was taken.
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


def table(figures: list[dict[str, Any]]) -> str:
    """The figures as text: a line each, with the settings that tell figures of a row apart; the
    JSON has them all."""
    shown = [("row", "of", "value", "unit", "against", "its value", "ratio")]
    silent = ENVIRONMENT | {
        "samples",
        "rounds",
        "runs",
        "records",
        "rows",
        "chunk_bytes",
        "mb_per_s",
    }
    for f in figures:
        same_row = [g["settings"] for g in figures if g["row"] == f["row"]]
        own = {
            k: v
            for k, v in f["settings"].items()
            if k not in silent and any(g.get(k) != v for g in same_row)
        }
        own = {
            k: v
            for k, v in own.items()
            if k == "p99_us"
            or (isinstance(v, int | str) and not isinstance(v, bool) and len(str(v)) <= 24)
        }
        shown.append(
            (
                f["row"],
                " ".join(
                    f"{k}={_number(v) if isinstance(v, float) else v}" for k, v in own.items()
                ),
                _number(f["value"]),
                f["unit"],
                f["against"] or "",
                _number(f["against_value"]),
                "" if f["ratio"] is None else f"{f['ratio']:.2f}",
            )
        )
    widths = [max(len(line[i]) for line in shown) for i in range(len(shown[0]))]
    right = (2, 5, 6)
    lines = [
        "  ".join(
            c.rjust(w) if i in right else c.ljust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in shown
    ]
    lines.insert(1, "  ".join("-" * w for w in widths))
    missing: dict[tuple[str, str], list[str]] = {}  # what a line says, and ways of doing it
    for f in figures:
        if f["value"] is None:
            said = missing.setdefault((f["row"].split(".")[0], f["settings"]["not_measured"]), [])
            said += [way for way in [f["settings"].get("path")] if way and way not in said]
    for (row, why), ways in missing.items():
        which = f" ({', '.join(ways)})" if ways else ""
        lines.append(f"{row} was not measured{which}: {why}")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if value == 0 or 0.01 <= abs(value) < 10_000:
        return f"{value:.4g}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.3g}"
