"""Draws the rows of `rows_produce`, and `produce-scaling` of the comparison with Kafka, beside what
KafkaDirect's paper says of its figures 6, 7, 10, 11 and 13.

    cd bench/results; python ../plot_produce.py 2026-11-21-produce.json 2026-11-21-vs-kafka.json
    2026-11-21-produce.png

The paper's plots cannot be read to a number; `PAPER` holds only what its text says, so theirs are
single points.  Their machine (56 Gbit/s InfiniBand, two hosts, C++ or Java) is not ours (shm on one
host, called from Python): shapes compare, heights do not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# (bytes, value): microseconds or GiB/s, in the words of §4.2.2 and §5.1.
PAPER: dict[str, dict[str, list[tuple[int, float]]]] = {
    "latency": {
        "paper, fig. 7: WriteWithImm": [(32, 1.5)],
        "paper, fig. 7: Write+Send": [(32, 2.5)],
    },
    "produce": {
        "paper, fig. 10: KafkaDirect": [(32, 90.0), (128 << 10, 345.0)],
        "paper, fig. 10: OSU Kafka": [(32, 180.0)],
    },
    "goodput": {
        "paper, fig. 7: all": [(512, 2.4)],
        "paper, fig. 11: KafkaDirect exclusive": [(32 << 10, 1.65)],
        "paper, fig. 11: Kafka": [(32 << 10, 280 / 1024)],
    },
    "scaling": {
        "paper, fig. 13: KafkaDirect": [(5, 630 / 1024)],
        "paper, fig. 13: Kafka": [(5, 190 / 1024)],
    },
}
COLOURS = {"imm": "#0b6e99", "send": "#c9752d", "two-sided": "#6a8f3c"}
NAMES = {"imm": "WRITE_WITH_IMM", "send": "Write+Send", "two-sided": "two-sided"}


def main(source: Path, comparison: Path, target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figures = json.loads(source.read_text())
    canvas, axes = pyplot.subplots(1, 4, figsize=(18, 4.2))
    lines(axes[0], figures, "produce-notify.latency", 1.0, "us, median; p99 dotted")
    for name, points in (PAPER["latency"] | PAPER["produce"]).items():
        axes[0].plot(
            *zip(*points, strict=True),
            "k" + "x+^v"[len(axes[0].texts) % 4],
            markersize=6,
            label=name,
        )
        axes[0].text(points[0][0], points[0][1], " " + name.removeprefix("paper, "), fontsize=6)
    axes[0].set_title("one request at a time (figures 7 and 10)", fontsize=9)
    lines(axes[1], figures, "produce-notify.goodput", 1 / (1 << 30), "GiB/s")
    for name, points in PAPER["goodput"].items():
        axes[1].plot(*zip(*points, strict=True), "kx", markersize=6)
        axes[1].text(points[0][0], points[0][1], " " + name.removeprefix("paper, "), fontsize=6)
    axes[1].set_title("many under way (figures 7 and 11)", fontsize=9)
    shared = [f for f in figures if f["row"] == "produce-shared"]
    labels = [
        f"{f['settings']['producers']} {f['settings']['atomic'].replace('none', 'exclusive')}"
        for f in shared
    ]
    axes[2].bar(labels, [f["value"] / (1 << 30) for f in shared], color="#0b6e99")
    axes[2].set_title(
        "producers of one partition, 32 KiB (figure 6: equal from 32 KiB on)", fontsize=9
    )
    axes[2].set_ylabel("GiB/s together", fontsize=8)
    scaling(
        axes[3], [f for f in json.loads(comparison.read_text()) if f["row"] == "produce-scaling"]
    )
    for panel in axes:
        panel.tick_params(labelsize=7)
    for panel in (*axes[:2], axes[3]):
        panel.legend(fontsize=6, loc="lower right")
    canvas.tight_layout()
    canvas.savefig(target, dpi=80, metadata={"Software": None})


def lines(panel: Any, figures: list[dict[str, Any]], row: str, scale: float, unit: str) -> None:
    for how, name in NAMES.items():
        points = sorted(
            (f["settings"]["size"], f)
            for f in figures
            if f["row"] == row and f["settings"]["notify"] == how
        )
        sizes = [size for size, _ in points]
        panel.plot(
            sizes,
            [f["value"] * scale for _, f in points],
            "o-",
            color=COLOURS[how],
            markersize=3,
            label=name,
        )
        if all("p99_us" in f["settings"] for _, f in points):
            panel.plot(
                sizes,
                [f["settings"]["p99_us"] for _, f in points],
                ":",
                color=COLOURS[how],
                linewidth=0.8,
            )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xlabel("bytes a record", fontsize=8)
    panel.set_ylabel(unit, fontsize=8)


def scaling(panel: Any, figures: list[dict[str, Any]]) -> None:
    """Producers that each have a partition, against one worker of the broker."""
    figures = sorted(figures, key=lambda f: f["settings"]["producers"])
    producers = [f["settings"]["producers"] for f in figures]
    panel.plot(
        producers,
        [f["value"] / (1 << 30) for f in figures],
        "o-",
        color=COLOURS["imm"],
        markersize=3,
        label="kdirect, one worker",
    )
    panel.plot(
        producers,
        [f["against_value"] / (1 << 30) for f in figures],
        "o-",
        color="#888888",
        markersize=3,
        label="Apache Kafka here, 8 workers",
    )
    for name, points in PAPER["scaling"].items():
        panel.plot(*zip(*points, strict=True), "kx", markersize=6)
        panel.text(
            points[0][0],
            points[0][1],
            " " + name.removeprefix("paper, ") + ", from here on",
            fontsize=6,
        )
    panel.set_yscale("log")
    panel.set_xlabel("producers, a partition each, on two cores with the broker", fontsize=8)
    panel.set_ylabel("GiB/s together", fontsize=8)
    panel.set_title("4 KiB records, one worker (figure 13)", fontsize=9)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
