"""The report of a comparison: Markdown with plots, made from the JSON of a run and from nothing
else.

Owns: what a reader sees first (bars and whether they were reached), the tables, the plots, and the
plain words: how it was measured, what was not, and what bounds a figure whose bar was missed.
Running it again on the same JSON gives the same text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Figure = dict[str, Any]
COMMAND = "make bench-vs-kafka"
TITLES = {
    "produce-latency": "Produce, one acknowledged record at a time (p50)",
    "produce-latency.after-silence": "The same, the first after 10 ms of silence",
    "produce-bandwidth": "Produce into one partition, unbatched and pipelined",
    "produce-bandwidth.batched": "Produce into one partition, batched, one call a record",
    "produce-bandwidth.columns": "Produce Arrow columns (`send_arrow`) beside Kafka batched",
    "produce-scaling": "Unbatched 4 KiB records over partitions, a producer process for each",
    "produce-scaling.one-core-of-broker": "What one core of the broker takes",
    "commit": "A commit of offsets that is waited for, one at a time (p50)",
    "txn": "A transaction of 100 records, commit to visible (p50)",
    "consume-latency": "Consume, one committed record at a time (p50)",
    "consume-latency.backlog": "One poll a record out of a backlog (p50)",
    "consume-latency.views": "Consume one committed record at a time, as a view (p50)",
    "consume-bandwidth": "Consume a topic from its start",
    "consume-bandwidth.views": "Consume a topic from its start into views",
    "empty-fetch": "Empty fetches of one consumer: a slot READ a call",
    "empty-fetch.loop": "The same in a loop without returning to Python",
    "empty-fetch.poll": "The same through Consumer.poll(0)",
    "end-to-end": "Producer to consumer, a record every 2 ms (p50), ends spinning",
    "end-to-end.defaults": "The same, kdirect with its defaults (p50)",
    "spark-read": "Spark batch read",
    "spark-available-now": "Spark stream, AvailableNow",
    "tier-backfill": "Spark batch read of cold records, two task slots",
    "spark-sink": "Spark batch write (Kafka's sink tuned)",
    "spark-available-now.few-records": (
        "Spark stream, AvailableNow, over 100 records: starting and ending a query"
    ),
    "spark-first-query": "The same as the first query of a session",
    "micro-batch": "Micro-batches of one row, each as it comes",
    "micro-batch.same-session": "Micro-batches of one row, the same settings of Spark",
    "micro-batch.async-progress": (
        "Micro-batches of one row, asynchronous progress tracking on both sides"
    ),
    "event-delay": "Delay of events, 400 a second (p50)",
    "event-delay.bursts": "Delay of events, with 2000 more every ten seconds (p50)",
    "consumer-scaling": "CPU of the broker for 1 to 64 consumers",
    "backlog": "Seconds a GB while the backlog grows",
    "backlog.partitions": "Seconds a GB over more partitions",
    "replicate-latency": "Produce with acks=all and three replicas, one record at a time (p50)",
    "replicate-latency.p99": "Produce with acks=all and three replicas, one at a time (p99)",
    "replicate-bandwidth": "Produce with acks=all and three replicas, unbatched and pipelined",
    "replicate-factor": "Produce with acks=all, unbatched and pipelined, over replicas",
    "replicate-factor.three-of-one": "Bandwidth with three replicas over that with one",
    "replicate-slow": "Produce with acks=1 while one of three replicas is stopped (p50)",
    "replicate-slow.all-running": "Produce with acks=1 while all of three replicas run (p50)",
    "replicate-slow.times": "p50 with one replica stopped over that with all running",
    "failover": "From SIGKILL of the leader to an acknowledged record (p90)",
    "failover.stopped": "From SIGSTOP of the leader to an acknowledged record (p90)",
}
# The setting by which the figures of a row differ, and what to call it.
AXES = {"replicas": "replicas", "record_bytes": "bytes a record", "value_bytes": "bytes a value",
        "partitions": "partitions", "consumers": "consumers",
        "backlog_bytes": "bytes of backlog"}  # fmt: skip
PANELS = {
    "produce": ("produce-latency", "produce-latency.after-silence", "produce-bandwidth",
                "produce-bandwidth.batched",
                "produce-bandwidth.columns", "produce-scaling"),
    "consume": ("consume-latency", "consume-bandwidth", "end-to-end", "empty-fetch",
                "consumer-scaling", "backlog"),
    "spark": ("spark-read", "spark-available-now", "tier-backfill", "spark-sink", "micro-batch",
              "event-delay", "event-delay.bursts"),
    "replicate": ("replicate-latency", "replicate-latency.tcp-push", "replicate-latency.tcp-fetch",
                  "replicate-bandwidth", "replicate-bandwidth.tcp-push",
                  "replicate-bandwidth.tcp-fetch", "replicate-factor",
                  "replicate-factor.tcp-fetch", "failover", "failover.tcp-fetch"),
}  # fmt: skip
NOT_MEASURED = """\
- **RDMA hardware.** No RNIC was there. kdirect ran over its `shm` transport, whose READs and WRITEs
  are copies that the initiator makes in mapped memory; Kafka ran over loopback TCP. Neither crossed
  a network, so no figure here is one of InfiniBand or RoCE, and `ib_read_bw` is no limit of it.
  `make bench-rdma` holds kdirect's READs over `verbs` beside `ib_read_bw` and `ib_read_lat`, in a
  guest with soft-RoCE; docs/rdma.md has its figures.
- **Replication between machines.** The rows `replicate-*` and `failover` have all brokers of a
  cluster on this machine's cores; a leader and its followers share them, which the paper's did not.
- **OSU's RDMA-Kafka and the original KafkaDirect.** Both need an RNIC; the paper has their figures.
- **Several machines and many cores.** Broker and clients share this machine's cores; with more than
  two the brokers get the upper half.
- **Security, compression.** Off on both sides.
- **Spark in a cluster.** One JVM, one task slot (`local[1]`), two in `tier-backfill`."""
METHOD = """Except in the rows over clusters, both brokers run at the same time, in processes of
their own with their logs on tmpfs, and take turns (A B A B) within each figure; a figure is the
median of its rounds, and the rounds are in the JSON. What is idle costs nothing (kdirect) or about
a hundredth of a core (Kafka).
Everything is warmed up first: connections, topics, the brokers' JVM, and the JVM of Kafka's own
perf tools, which stays the same for a whole row. Latencies are in HDR histograms of three digits;
those of paced work count from the moment a record was due (no coordinated omission), those of
one-at-a-time work are the calls themselves. Fields of results have the names of OpenMessaging's
benchmark, latencies in milliseconds.

Kafka's side has the fastest client for each purpose: librdkafka one at a time and end to end, a
bare socket for a single Fetch, Kafka's own ProducerPerformance and ConsumerPerformance for
bandwidth, Spark's Kafka connector with a tuned sink. kdirect's side is its public Python API.

Both logs lie on the same tmpfs, whose pages are small unless it was mounted otherwise. kdirect's
broker asks the kernel for huge pages for its segments, as it does for every user; Kafka's files
have what the mount gives. Topics are emptied between turns. Before a turn of the sink, of bandwidth
and of replicas more memory than it writes is touched and freed, as much for the one as for the
other, since a virtual machine's host takes free memory back. Both connectors run in one Spark
session with the settings of `kdirect_spark.session_builder`, which serve both, unless a row says
otherwise.

`tier-backfill` has two brokers of its own, both with tiered storage in a directory on tmpfs
(Kafka's by the store of its own tests), a topic of two partitions with segments of 64 MiB, and a
session with two task slots. What is read is in neither broker's log directory, which is looked at
before and after. kdirect's tasks read the objects past the broker (`coldReads=direct`).

The rows over clusters (`replicate-*`, `failover`) run one cluster at a time, with three brokers of
each and four where four replicas are shown, and ZooKeeper beside kdirect's. Every round starts both
with empty directories, Kafka's first in the first round and kdirect's in the next; the warm-up
before (seconds in the JSON) is not counted. Kafka's brokers are three voters with heaps of 512 MiB.
A row without a suffix is kdirect's own way: its client over shm, and replicas that the leader
pushes to (failover: a stock client). `tcp-push` has a stock client over TCP instead, `tcp-fetch`
and `shm-fetch` have replicas that fetch over TCP. Before a path counts it is shown that it is the
one that its name says, and that acks=all waits for a replica in sync that stands still."""


def write(target: Path) -> Path:
    """Write the report of the run in `target` beside it, with its plots; its path."""
    figures = json.loads(target.read_text())
    out = target.with_suffix(".md")
    plots = draw(figures, target)
    out.write_text(text(figures, target.name, plots))
    return out


def text(figures: list[Figure], name: str, plots: list[str]) -> str:
    first = figures[0]["settings"]
    loads = [f["settings"]["load_average"] for f in figures]
    commits = sorted({f["settings"]["commit"] for f in figures})
    parts = [
        "# kdirect beside Apache Kafka",
        f"Made from [{name}]({name}) by `{COMMAND}`; do not edit.",
    ]
    parts.append(
        _table(
            ("", ""),
            [
                ("processor", f"{first['cpu']}, {first['cores']} cores"),
                ("kernel, Python", f"{first['kernel']}, {first['python']}"),
                ("commit, time", f"{', '.join(commits)}, {figures[0]['settings']['time']}"),
                ("against", figures[0]["against"]),
                ("load average before each row", f"{min(loads)} to {max(loads)}"),
            ],
        )
    )
    if first.get("quick"):
        parts.append("**A quick run: it shows that everything works, not how fast.**")
    parts += ["## Bars", _bars(figures)]
    bounds = _bounds(figures)
    if bounds:
        parts += ["### What bounds those that were missed", bounds]
    parts += ["## Plots", *(f"![{plot}]({plot})" for plot in plots)] if plots else []
    parts += [
        "## All figures",
        "`factor`: how many times better kdirect is. `spread`: lowest and highest round.",
    ]
    for row in dict.fromkeys(f["row"] for f in figures):
        of_row = [f for f in figures if f["row"] == row]
        parts += [f"### {title(of_row[0])}", _rows(of_row)]
    parts += [
        "## How it was measured",
        METHOD,
        _set_up(figures),
        "## What was not measured, and why",
        NOT_MEASURED,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def title(figure: Figure) -> str:
    """What a reader calls its row; that of a path of replication, the path too."""
    row, settings = figure["row"], figure["settings"]
    if "path" not in settings:
        return TITLES.get(row, row)
    row = row.removesuffix(f".{settings['path']}")
    return f"{TITLES.get(row, row)}, {settings['path_means']}"


def goals(figures: list[Figure]) -> str:
    """Every bar and limit in a line of text, with what was reached."""
    lines = []
    for f in figures:
        s = f["settings"]
        what = f"{f['row']} ({_at(s)})" if _at(s) else f["row"]
        if "bar" in s:
            reached = f"{_factor(s['factor']) or 'nothing'} against Kafka"
            lines.append(f"goal: {what}: {reached}, goal {s['bar']:g}x: {_outcome(f, 'bar')}")
        if "limit" in s:
            reached = quantity(f["value"], f["unit"]) or "nothing"
            lines.append(f"goal: {what}: {reached}, goal {s['limit']}: {_outcome(f, 'limit')}")
    return "\n".join(lines)


def _outcome(figure: Figure, goal: str) -> str:
    if figure["value"] is None:
        return "not measured"
    return "reached" if figure["settings"][f"{goal}_met"] else "missed"


def _bars(figures: list[Figure]) -> str:
    lines = []
    for f in figures:
        s = f["settings"]
        if f["value"] is None and ("bar" in s or "limit" in s):
            goal = s.get("limit") or f"{s['bar']:g}x"
            lines.append((title(f), _at(s), "", quantity(f["against_value"], f["unit"]), "", goal,
                          f"not measured: {s['not_measured']}"))  # fmt: skip
            continue
        if "limit" in s:
            lines.append((title(f), _at(s), quantity(f["value"], f["unit"]),
                          quantity(f["against_value"], f["unit"]), _factor(s["factor"]),
                          s["limit"], _verdict(s["limit_met"])))  # fmt: skip
        if "bar" in s:
            lines.append((title(f), _at(s), quantity(f["value"], f["unit"]),
                          quantity(f["against_value"], f["unit"]),
                          _factor(s["factor"]), f"{s['bar']:g}x",
                          _verdict(s["bar_met"])))  # fmt: skip
        if "memcpy_bar" in s:
            limit = next(iter(s["limits"].values()))
            lines.append((TITLES[f["row"]] + ", of memcpy", _at(s), quantity(f["value"], f["unit"]),
                          quantity(limit, "B/s"),
                          f"{100 * s['ratio_to_memcpy']:.0f} %", f"{100 * s['memcpy_bar']:.0f} %",
                          _verdict(s["memcpy_bar_met"])))  # fmt: skip
        if "ratio_to_ready" in s:
            limit = s["limits"][next(iter(s["limits"]))]
            lines.append((TITLES[f["row"]] + ", of ready batches", _at(s),
                          quantity(f["value"], f["unit"]), quantity(limit, "rows/s"),
                          f"{100 * s['ratio_to_ready']:.0f} %", "95 %",
                          _verdict(s["ratio_to_ready"] >= 0.95)))  # fmt: skip
        if "cpu_bar" in s:
            lines.append((TITLES[f["row"]] + ", broker's CPU", "",
                          f"{s['kdirect_broker_cpu_s']:g} s",
                          f"{s['kafka_broker_cpu_us_per_fetch']:g} us a fetch", "", "0 s",
                          _verdict(s["cpu_bar_met"])))  # fmt: skip
    return _table(("what", "at", "kdirect", "Kafka (or the limit)", "factor", "bar", ""), lines)


def _verdict(met: bool) -> str:
    return "reached" if met else "**missed**"


def _bounds(figures: list[Figure]) -> str:
    """The words for rows that missed a bar; they were found with a profile and hold for the machine
    of the committed result."""
    words = json.loads(Path(__file__).with_name("bounds.json").read_text())
    missed = []
    for f in figures:
        s = f["settings"]
        if f["value"] is None:
            continue
        missed_one = s.get("bar_met") is False or s.get("limit_met") is False
        names = [f["row"]] if missed_one else []
        names += [f["row"] + ".memcpy"] if s.get("memcpy_bar_met") is False else []
        names += [f["row"] + ".ready"] if s.get("ratio_to_ready", 1) < 0.95 else []
        names += [f["row"] + ".cpu"] if s.get("cpu_bar_met") is False else []
        missed += [name for name in names if name not in missed]
    return "\n".join(f"- **{name}**: {words.get(name, 'not looked into yet.')}" for name in missed)


def _rows(figures: list[Figure]) -> str:
    lines = []
    for f in figures:
        s = f["settings"]
        more = [f"not measured: {s['not_measured']}"] if f["value"] is None else []
        more += [f"`{k}={v}`" for k, v in s.get("settings_of_kdirect", {}).items()]
        more += [
            f"{k.removesuffix('_us').replace('_', ' ')} {v:g} us"
            for k, v in s.items()
            if k.endswith(("p99_us", "p50_us"))
        ]
        more += [
            f"{k.replace('_', ' ')} {v:g}"
            for k, v in s.items()
            if "cpu" in k and isinstance(v, int | float) and not isinstance(v, bool)
        ]
        for name, limit in s.get("limits", {}).items():
            unit = "B/s" if name.endswith("per_s") else "rows/s"
            of = name.split(",")[0].removesuffix("_bytes_per_s").replace("_", " ")
            more.append(f"{of} {quantity(limit, unit)}")
        if "mb_per_s" in s:
            more.append(f"{s['mb_per_s']} and {s['kafka_mb_per_s']} MB/s")
        durations = {
            key: r["durations_ms"] for key, r in s["results"].items() if "durations_ms" in r
        }
        more += [
            f"{key}: " + ", ".join(f"{k} {v:g}" for k, v in d.items()) + " ms"
            for key, d in durations.items()
        ]
        lines.append((_at(s), quantity(f["value"], f["unit"]), _spread(f, "kdirect"),
                      quantity(f["against_value"], f["unit"]),
                      _spread(f, "kafka"), _factor(s["factor"]), "; ".join(more)))  # fmt: skip
    how = figures[0]["settings"].get("how")
    return (f"{how[0].upper()}{how[1:]}.\n\n" if how else "") + _table(
        ("at", "kdirect", "spread", "Kafka", "spread", "factor", "beside"), lines
    )


def _at(settings: dict[str, Any]) -> str:
    return ", ".join(f"{settings[key]:,} {label}" for key, label in AXES.items()
                     if key in settings and not
                     (key == "partitions" and settings[key] == 1))  # fmt: skip


def _spread(figure: Figure, key: str) -> str:
    result = figure["settings"]["results"].get(key, {})
    runs = result.get("runs") or result.get("medians_us") or result.get("broker_cpu_cores") or []
    return f"{quantity(min(runs), '')}-{quantity(max(runs), '')}" if len(runs) > 1 else ""


def _factor(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}x" if value >= 20 else f"{value:.1f}x"


def quantity(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    scaled, unit = (value / 1e6, "MB/s") if unit == "B/s" else (value, unit)
    for limit, divisor, prefix in ((1e9, 1e9, " G"), (1e6, 1e6, " M"), (1e4, 1e3, " k")):
        if abs(scaled) >= limit and unit != "us":
            return f"{scaled / divisor:.3g}{prefix} {unit}".strip()
    return f"{scaled:.3g} {unit}".strip() if abs(scaled) < 1000 else f"{scaled:,.0f} {unit}".strip()


def _set_up(figures: list[Figure]) -> str:
    found = next((f["settings"]["set_up"] for f in figures if "set_up" in f["settings"]), None)
    if found is None:
        return ""
    lines = [
        (f"{system}: `{key}`", f"`{value}`")
        for system, settings in found.items()
        for key, value in settings.items()
    ]
    return "Settings of the brokers, where they are not the defaults:\n\n" + _table(
        ("setting", "value"), lines
    )


def _table(head: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    rows = [head, tuple("---" for _ in head), *lines]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows
    )


def draw(figures: list[Figure], target: Path) -> list[str]:
    """The plots of the rows that are there, as PNG files beside the JSON; their names."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = []
    for theme, rows in PANELS.items():
        present = [row for row in rows if any(f["row"] == row for f in figures)]
        if not present:
            continue
        across = min(3, len(present))
        down = -(-len(present) // across)
        canvas, axes = pyplot.subplots(
            down, across, figsize=(4.6 * across, 3.3 * down), squeeze=False
        )
        for panel, row in zip(axes.flat, present, strict=False):
            _panel(panel, [f for f in figures if f["row"] == row])
        for panel in list(axes.flat)[len(present) :]:
            panel.set_visible(False)
        canvas.tight_layout()
        name = f"{target.stem}-{theme}.png"
        canvas.savefig(target.with_name(name), dpi=80, metadata={"Software": None})
        pyplot.close(canvas)
        names.append(name)
    return names


def _panel(panel: Any, figures: list[Figure]) -> None:
    axis = next(
        (a for a in AXES if len({f["settings"].get(a) for f in figures}) == len(figures) > 1), None
    )
    unit = figures[0]["unit"]
    scale: Callable[[float], float] = (lambda v: v / 1e6) if unit == "B/s" else (lambda v: v)
    labels = [f"{f['settings'][axis]:,}" if axis else "" for f in figures]
    for shift, (key, name, colour) in enumerate(
        (("value", "kdirect", "#0b6e99"), ("against_value", "Kafka", "#c9752d"))
    ):
        heights = [scale(f[key] or 0) for f in figures]
        panel.bar(
            [i + 0.4 * shift for i in range(len(figures))], heights, 0.38, label=name, color=colour
        )
    panel.set_xticks([i + 0.2 for i in range(len(figures))], labels, fontsize=7)
    if len(figures) > 1:
        panel.set_yscale("log")
    else:
        panel.set_ylim(bottom=0)  # two bars side by side are read by their lengths
    panel.set_ylabel(
        {"B/s": "MB/s"}.get(unit, unit)
        + (", less is better" if figures[0]["settings"]["lower_is_better"] else ""),
        fontsize=8,
    )
    panel.set_title(title(figures[0]), fontsize=8)
    if axis:
        panel.set_xlabel(AXES[axis], fontsize=8)
    panel.tick_params(axis="y", labelsize=7)
    panel.legend(fontsize=7)
