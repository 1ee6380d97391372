"""Runs rows of the benchmark, each in a process of its own, and prints a table made from the JSON
it writes.

    make bench ROWS="codec-decode slot-poll" JSON=out.json       (no ROWS: all of them)
    make bench-list

Owns: how rows are run, and pinning.  `catalogue` names the rows and says what one is; `figures`
has the form of their results.

`main` takes other rows than its own: bench/vs_kafka.py holds kdirect against Kafka with the same
harness.

A row that dies, even of a signal, loses its own figures alone, and the run exits with 1; what it
had written is kept.  Rows of one process are pinned to one core (the last one allowed) unless
--no-pin is given; rows where two processes talk, and Spark's, are not.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # Python leaves the script's folder out where PYTHONSAFEPATH is set

from catalogue import ROWS, Row, find  # noqa: E402
from figures import complete, machine, table, write  # noqa: E402


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


if __name__ == "__main__":
    sys.exit(main())
