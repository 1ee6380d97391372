"""Draws the row `slash-skew` as figure 10d of the Slash paper: throughput by the exponent of the
Zipf distribution of the keys, for Slash and for its baseline.

    cd bench/results; python ../plot_skew.py slash.json slash-skew.png

The paper's plot is of two nodes with 10 cores each over InfiniBand; ours is two processes on one
host.  Shapes compare, heights do not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

UNITS = ("M records/s", "M records/CPU s")
COLOURS = {"slash": "#0b6e99", "uppar colocated": "#c9752d", "uppar split": "#6a8f3c"}


def series(figures: list[dict[str, Any]], unit: str) -> dict[str, list[tuple[float, float]]]:
    """(z, rate) of each mode, in the order of z."""
    found: dict[str, dict[float, float]] = {name: {} for name in COLOURS}
    for f in figures:
        if f["row"] == "slash-skew" and f["unit"] == unit:
            z = f["settings"]["z"]
            found["slash"][z] = f["value"]
            if f["against"] in found:
                found[f["against"]][z] = f["against_value"]
    return {name: sorted(points.items()) for name, points in found.items() if points}


def main(source: Path, target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figures = json.loads(source.read_text())
    canvas, axes = pyplot.subplots(1, len(UNITS), figsize=(10, 4.2))
    for panel, unit in zip(axes, UNITS, strict=True):
        for name, points in series(figures, unit).items():
            panel.plot(
                *zip(*points, strict=True), "o-", color=COLOURS[name], markersize=3, label=name
            )
        panel.set_ylim(bottom=0)
        panel.set_xlabel("z of the keys' Zipf distribution", fontsize=8)
        panel.set_ylabel(unit, fontsize=8)
        panel.tick_params(labelsize=7)
        panel.legend(fontsize=7)
    canvas.suptitle("YSB by skew (figure 10d)", fontsize=9)
    canvas.tight_layout()
    canvas.savefig(target, dpi=80, metadata={"Software": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
