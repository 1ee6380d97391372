"""Draws the rows slash-ysb to slash-ro: accelerated queries, Spark's own plan of the same
DataFrames, and the same plans in the state engine without Spark.

    cd bench/results; python ../plot_slash_spark.py slash-spark.json slash-spark.png

A run that was cut off is drawn as an outline: it was no faster than that.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

UNITS = ("M rows/s", "M rows/CPU s")
ROWS = ("slash-ysb", "slash-nb7", "slash-nb8", "slash-nb11", "slash-cm", "slash-ro")
FASTER = " (the faster)"
COLOURS = {
    "Spark, RocksDB": "#c9752d",
    "Spark, memory": "#d9a441",
    "slash": "#0b6e99",
    "the engine alone": "#9fb8c3",
}


def settings(figures: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, tuple[float, bool]]]]:
    """By the name of a setting, by unit, by system: the rate, and whether it was cut off."""
    found: dict[str, dict[str, dict[str, tuple[float, bool]]]] = {}
    for f in figures:
        if f["row"] not in ROWS:
            continue
        said = f["settings"]
        keys = f"\n{said['keys']:,} keys" if "keys" in said else ""
        name = f"{f['row'].removeprefix('slash-').upper()}\n{said['batch_events'] / 1e6:g} M{keys}"
        of_unit = found.setdefault(name, {}).setdefault(f["unit"], {})
        of_unit["slash"] = f["value"], False
        of_unit[f["against"].removesuffix(FASTER)] = f["against_value"], said["against_cut_off"]
    return found


def main(source: Path, target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = settings(json.loads(source.read_text()))
    canvas, axes = pyplot.subplots(len(UNITS), 1, figsize=(11, 7))
    width = 0.8 / len(COLOURS)
    for panel, unit in zip(axes, UNITS, strict=True):
        for i, (system, colour) in enumerate(COLOURS.items()):
            for at, rates in enumerate(found.values()):
                if system not in rates[unit]:
                    continue
                rate, cut_off = rates[unit][system]
                panel.bar(
                    at + (i - 1.5) * width,
                    rate,
                    width,
                    facecolor="none" if cut_off else colour,
                    edgecolor=colour,
                    linestyle="--" if cut_off else "-",
                )
            panel.bar(0, 0, color=colour, label=system)
        panel.set_yscale("log")
        panel.set_xticks(range(len(found)), found, fontsize=7)
        panel.set_ylabel(unit, fontsize=8)
        panel.tick_params(labelsize=7)
        panel.grid(axis="y", linewidth=0.3)
    axes[0].legend(fontsize=7, ncols=len(COLOURS))
    canvas.suptitle("The same DataFrame, by events of a micro-batch", fontsize=9)
    canvas.tight_layout()
    canvas.savefig(target, dpi=80, metadata={"Software": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
