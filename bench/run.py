"""Runs rows of the benchmark, each in a process of its own, and prints a table made from the JSON
it writes.

    make bench ROWS="codec-decode slot-poll" JSON=out.json       (no ROWS: all of them)
    make bench-list

Owns: the names of the rows, pinning, the form of the result, the table.  A row is a function in a
rows_*.py beside this file, ``fn(seconds: float, quick: bool) -> list[dict]``; each dict is a figure
with the keys of `FIGURE`, measured in the same run as the limit that it is held against.  `seconds`
is what the whole row may take, about; `quick` asks for one short round that shows only that it
works.

`main` takes other rows than its own: bench/vs_kafka.py holds kdirect against Kafka with the same
harness.

A row that dies, even of a signal, loses its own figures alone, and the run exits with 1; what it
had written is kept.  Rows of one process are pinned to one core (the last one allowed) unless
--no-pin is given; rows where two processes talk, and Spark's, are not.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FIGURE = ("row", "value", "unit", "against", "against_value", "ratio", "settings")


@dataclass(frozen=True)
class Row:
    """A row's name, where its function is, how many processes are at work in it (1: it is pinned),
    what it shows, the seconds that it needs before it can measure, which are taken off what it is
    given, and those that it may take beside three times what it is given."""

    name: str
    module: str
    processes: int
    help: str
    overhead_s: float = 0.0
    patience_s: float = 180.0

    @property
    def function(self) -> str:
        return self.name.replace("-", "_")


ROWS = (
    Row(
        "codec-decode",
        "rows_format",
        1,
        "record batches to Arrow, against a memcpy of the same bytes and the bare decompressors",
    ),
    Row(
        "codec-encode",
        "rows_format",
        1,
        "Arrow to record batches, against a memcpy of the same bytes and the bare compressors",
    ),
    Row(
        "state-update",
        "rows_state",
        1,
        "count and sum by key and window, beside one-thread group-bys of DuckDB and pyarrow",
    ),
    Row(
        "state-merge", "rows_state", 1, "a leader merges the delta of a helper: entries, and tuples"
    ),
    Row(
        "shm-read", "rows_rdma", 1, "one-sided READs by size over the shm provider, against memcpy"
    ),
    Row(
        "channel-bandwidth",
        "rows_channel",
        2,
        "buffers of 64 KiB through a channel over shm between two processes, against memcpy",
    ),
    Row(
        "channel-latency",
        "rows_channel",
        2,
        "round trips of 64 bytes through two channels over shm, against bare shared memory",
    ),
    Row(
        "slot-poll",
        "rows_direct",
        2,
        "an empty poll: one READ of the metadata slots, with no work of the broker;"
        " then a record at a time",
    ),
    Row(
        "consume-partitions",
        "rows_consume",
        2,
        "a record in each of 1,000 partitions: CPU seconds of a consumer, against confluent-kafka",
    ),
    Row(
        "produce-rtt",
        "rows_direct",
        2,
        "one acknowledged produce at a time: median and tail, against a bare eventfd round trip",
    ),
    Row("commit", "rows_commit", 2, "a commit at a time: median and tail, over shm and over TCP"),
    Row("txn-rdma", "rows_commit", 2, "100 records over shm, from their commit until visible"),
    Row(
        "produce-pipelined",
        "rows_direct",
        2,
        "unbatched produces under way together, one call a record, against memcpy",
    ),
    Row(
        "produce-cpu",
        "rows_produce",
        2,
        "the broker's CPU time for each committed produce of 100 bytes over shm",
    ),
    Row(
        "produce-exclusive",
        "rows_produce",
        2,
        "one exclusive producer of 32 KiB records, against memcpy, the CRC told apart",
    ),
    Row(
        "produce-rolls",
        "rows_produce",
        2,
        "the 99th percentile of an awaited produce of 4 KiB in a stream over many rolls",
    ),
    Row(
        "produce-shared",
        "rows_produce",
        6,
        "two and five producers of one partition, by FETCH_AND_ADD and COMPARE_AND_SWAP,"
        " against one alone",
    ),
    Row(
        "produce-notify",
        "rows_produce",
        2,
        "WRITE_WITH_IMM, WRITE and SEND, and the two-sided path, 32 B to 1 MiB:"
        " latency and goodput",
    ),
    Row(
        "quiet",
        "rows_log",
        2,
        "the disk that each of 1,000 partitions with one record takes;"
        " the start of a broker with 10,000",
        60,
    ),
    Row("compact", "rows_compact", 1, "a log compacted by a thread, against reads and writes", 20),
    Row(
        "tcp-cpu",
        "rows_tcp",
        2,
        "the broker's processor time for a Produce and a Fetch over TCP, together and one by one",
    ),
    Row(
        "idle",
        "rows_tcp",
        2,
        "the share of a core that 10,000 partitions and 1,000 connections take with nothing to do",
        60,
    ),
    Row(
        "stall",
        "rows_stall",
        4,
        "the longest wait of a pinging client while 1,000 partitions get their first record;"
        " 32 under memory pressure",
        60,
    ),
    Row(
        "push-sizes",
        "rows_cluster",
        4,
        "32-byte records pushed to two followers in WRITEs of 0 to 64 KiB: goodput, latency, CPU",
        30,
    ),
    Row(
        "push-cpu",
        "rows_cluster",
        4,
        "the leader's CPU time for a record of 100 bytes that two followers get, beyond its commit",
        10,
    ),
    Row(
        "catch-up",
        "rows_cluster",
        4,
        "1 GiB to a new replica, against memcpy, and the leader's CPU time meanwhile",
        15,
    ),
    Row(
        "cluster-idle",
        "rows_cluster",
        6,
        "CPU time of three idle brokers and their clients, ZooKeeper's told apart",
        15,
    ),
    Row(
        "workload-generate",
        "rows_workloads",
        1,
        "records of each workload's streams, against memcpy of as many bytes",
    ),
    Row(
        "slash-decode",
        "rows_workloads",
        1,
        "YSB's topic read and decoded to the columns of its query, against reading it alone",
        overhead_s=10.0,
    ),
    Row(
        "slash-engine",
        "rows_slash",
        3,
        "YSB by the state engine, at three numbers of keys: against reading and dropping by the"
        " same executors, and against partitioning by key (uppar)",
        30,
        patience_s=900.0,
    ),
    Row(
        "slash-skew",
        "rows_slash",
        3,
        "the same by the exponent of a Zipf distribution of the keys",
        30,
        patience_s=900.0,
    ),
    Row(
        "slash-ysb",
        "rows_slash_spark",
        3,
        "YSB as a stream of Spark, wrapped by slash.accelerate and unwrapped",
        60,
        patience_s=3600.0,
    ),
    Row(
        "slash-nb7",
        "rows_slash_spark",
        3,
        "NEXMark 7 as a stream of Spark, wrapped by slash.accelerate and unwrapped",
        60,
        patience_s=3600.0,
    ),
    Row(
        "slash-nb8",
        "rows_slash_spark",
        3,
        "NEXMark 8 as a stream of Spark, wrapped by slash.accelerate and unwrapped",
        60,
        patience_s=3600.0,
    ),
    Row(
        "slash-nb11",
        "rows_slash_spark",
        3,
        "NEXMark 11 as a stream of Spark, wrapped by slash.accelerate and unwrapped",
        60,
        patience_s=3600.0,
    ),
    Row(
        "slash-cm",
        "rows_slash_spark",
        3,
        "CM as a stream of Spark, wrapped by slash.accelerate and unwrapped",
        60,
        patience_s=3600.0,
    ),
    Row(
        "slash-ro",
        "rows_slash_spark",
        3,
        "RO as a stream of Spark, wrapped by slash.accelerate and unwrapped",
        60,
        patience_s=3600.0,
    ),
    Row(
        "slash-empty",
        "rows_slash_empty",
        3,
        "a batch of an accelerated query with four records, beside a bare barrier batch of Spark",
        60,
        patience_s=600.0,
    ),
    Row(
        "slash-recovery",
        "rows_recovery",
        3,
        "ten million keys back after every process was killed: loading the snapshot against reading"
        " its files, replaying against the live rate; and what snapshots cost",
        30,
        patience_s=900.0,
    ),
    Row(
        "slash-cold",
        "rows_slash_cold",
        3,
        "an accelerated query started again with ten million keys, cold and warm, beside Spark's"
        " own plan from its checkpoint",
        60,
        patience_s=3600.0,
    ),
    Row(
        "tier-copy",
        "rows_tiers",
        4,
        "sealed segments to a store, against bare pyarrow; requests; what producers wait meanwhile",
        patience_s=600.0,
    ),
    Row(
        "tier-fetch",
        "rows_tiers",
        3,
        "cold records through the broker, against bare GETs and the decode from memory",
        patience_s=600.0,
    ),
    Row(
        "tier-direct",
        "rows_tiers",
        3,
        "cold records past the broker into Arrow, against bare GETs and the decode from memory",
        patience_s=600.0,
    ),
    Row(
        "tier-tail",
        "rows_tiers",
        5,
        "produce and a consumer of the tail beside a reader of old records, against none",
        patience_s=600.0,
    ),
    Row(
        "tier-rebuild",
        "rows_tiers",
        3,
        "a broker made again from the store, with 512 MiB and 4 GiB, against a copy from a replica",
        patience_s=900.0,
    ),
    Row(
        "tier-backfill",
        "rows_backfill",
        3,
        "a Spark batch read of cold records past the broker, against hot ones, and through it",
        20,
        patience_s=900.0,
    ),
    Row(
        "spark-read-ceiling",
        "rows_spark",
        3,
        "a Spark batch read to noop, against a Python source that yields ready batches",
        20,
    ),
)


def main(
    arguments: list[str] | None = None,
    rows: tuple[Row, ...] = ROWS,
    script: Path = HERE / "run.py",
    together: bool = False,
) -> int:
    """Exit status: 0, 1 when a row failed, 2 for a wrong call.  `script`: what a child is started
    with; `together`: a quick run takes one child for all rows, because what they start costs more
    than they do."""
    parser = argparse.ArgumentParser(
        prog="bench/run.py", description="Run rows of the benchmark; see bench/run.py's own text."
    )
    parser.add_argument("--rows", default="", help="names, by spaces or commas (default: all)")
    parser.add_argument(
        "--json", default="bench/out/bench.json", help="where the figures go (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=40.0,
        help="about how long a row may measure (default: %(default)s)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one short round a row: shows that it works, not how fast",
    )
    parser.add_argument(
        "--no-pin", action="store_true", help="leave single-process rows to the scheduler"
    )
    parser.add_argument(
        "--add",
        action="store_true",
        help="keep the figures of other rows that the JSON has already",
    )
    parser.add_argument("--list", action="store_true", help="name the rows and stop")
    parser.add_argument("--child", metavar="ROW", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{row.name:20} {row.help}" for row in rows))
        return 0
    if options.child:
        own = [find(name, rows) for name in options.child.split(",")]
        return measure(
            own, Path(options.json), options.seconds, options.quick, pin=not options.no_pin
        )
    try:
        wanted = [find(name, rows) for name in options.rows.replace(",", " ").split()] or list(rows)
    except LookupError as e:
        print(f"bench: {e.args[0]}", file=sys.stderr)
        return 2
    groups = [wanted] if together and options.quick else [[row] for row in wanted]
    return run(
        groups,
        Path(options.json),
        options.seconds,
        options.quick,
        pin=not options.no_pin,
        script=script,
        add=options.add,
    )


def find(name: str, rows: tuple[Row, ...] = ROWS) -> Row:
    """The row of that name; LookupError names the nearest."""
    by_name = {row.name: row for row in rows}
    if name in by_name:
        return by_name[name]
    near = difflib.get_close_matches(name, by_name, n=1, cutoff=0.4)
    raise LookupError(
        f"no row {name!r}; "
        + (f"did you mean {near[0]}?" if near else "`make bench-list` names them all")
    )


def run(
    groups: list[list[Row]],
    target: Path,
    seconds: float,
    quick: bool,
    *,
    pin: bool,
    script: Path,
    add: bool,
) -> int:
    """Run the groups of rows one after another, each in a child, write `target` after each, print
    the table at the end."""
    target.parent.mkdir(parents=True, exist_ok=True)
    figures: list[dict[str, Any]] = []
    if add and target.exists():
        again = {row.name for rows in groups for row in rows}
        figures = [f for f in json.loads(target.read_text()) if f["row"].split(".")[0] not in again]
    failed = []
    environment = dict(os.environ)
    # Spark's workers and forked children find the rows' modules too.  The package comes from the
    # environment, never from the root.
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(HERE), *filter(None, [environment.get("PYTHONPATH")])]
    )
    for rows in groups:
        names = " ".join(row.name for row in rows)
        print(f"bench: {names} ...", file=sys.stderr, flush=True)
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="kdirect-bench-") as scratch:
            result = Path(scratch, "row.json")
            command = [
                sys.executable,
                str(script),
                "--child",
                names.replace(" ", ","),
                "--json",
                str(result),
                "--seconds",
                str(seconds),
            ]
            command += ["--quick"] * quick + ["--no-pin"] * (not pin)
            # Spark's start and the making of data come on top of what the row measures.
            status = run_to_end(
                command, environment, timeout=3 * seconds + max(row.patience_s for row in rows)
            )
            if result.exists():
                figures += json.loads(result.read_text())
            if status != 0:
                failed.append(names)
                print(
                    f"bench: {names} failed"
                    f" ({status if isinstance(status, str) else f'exit status {status}'})",
                    file=sys.stderr,
                )
        print(f"bench: {names} took {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        write(target, figures)
    print(table(json.loads(target.read_text())))
    if failed:
        print(
            f"bench: failed: {' '.join(failed)}; the other figures are in {target}", file=sys.stderr
        )
    return 1 if failed else 0


def run_to_end(command: list[str], environment: dict[str, str], timeout: float) -> int | str:
    """Exit status of `command`, or words when it had to be killed, with every process that it
    started (brokers, Spark's JVM)."""
    child = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return child.wait(timeout)
    except subprocess.TimeoutExpired:
        return f"no end after {timeout:.0f} s"
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def measure(rows: list[Row], target: Path, seconds: float, quick: bool, *, pin: bool) -> int:
    """In the child: call the rows' functions, complete and check their figures, write them to
    `target` after each."""
    allowed = sorted(os.sched_getaffinity(0))
    pinned = pin and all(row.processes == 1 for row in rows)
    if pinned:
        os.sched_setaffinity(0, {allowed[-1]})
    sys.path.insert(0, str(HERE))
    figures: list[dict[str, Any]] = []
    for row in rows:
        load = os.getloadavg()[0]
        function = getattr(importlib.import_module(row.module), row.function)
        found = function(seconds=max(seconds - row.overhead_s, seconds / 4), quick=quick)
        shared = {
            **machine(),
            "cores": len(allowed),
            "pinned_to": allowed[-1] if pinned else None,
            "load_average": round(load, 2),
            "quick": quick,
        }
        if not found:
            raise ValueError(f"row {row.name} came back without figures")
        figures += [complete(row, figure, shared) for figure in found]
        write(target, figures)
    return 0


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


def table(figures: list[dict[str, Any]]) -> str:
    """The figures as text: a line each, with the settings that tell figures of a row apart; the
    JSON has them all."""
    shown = [("row", "of", "value", "unit", "against", "its value", "ratio")]
    silent = {
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
    silent |= {"samples", "rounds", "runs", "records", "rows", "chunk_bytes", "mb_per_s"}
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


if __name__ == "__main__":
    sys.exit(main())
