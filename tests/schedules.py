"""What the simulations by seed share: their command line, all cores, and what they print.

A simulation is a module that is also a program, ``python -m tests.cluster.simulate``, with a
function `failing(first, schedules, step)`: the first seed that fails with its run and what broke,
or None.  A run has its steps in `path`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[1]

Found = tuple[int, Any, str] | None


class Failing(Protocol):
    """The first of so many seeds, every `step`-th, that fails, with its run and what broke."""

    def __call__(self, first: int, schedules: int, step: int = 1) -> Found: ...


def on_all_cores(module: str, first: int, schedules: int) -> tuple[bool, str]:
    """Run so many seeds of `module`, in a process for each core.  Whether any has failed, and what
    they said."""
    cores = len(os.sched_getaffinity(0))
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", module, "--first", str(first + core)),
                *("--schedules", str(schedules - core), "--step", str(cores)),
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for core in range(cores)
    ]
    told = [process.communicate()[0] for process in processes]
    return any(process.returncode for process in processes), "".join(told)


def found_at(
    failing: Failing, hint: int | None, first: int, schedules: int, step: int = 1
) -> Found:
    """What `failing` finds from `first` on.  It looks at the seed `hint` before, where the same
    was found once: a change of the simulation makes another schedule of it, so it may hold now."""
    if hint is not None and (found := failing(hint, 1)) is not None:
        return found
    return failing(first, schedules, step)


def command_line(module: str, failing: Failing, arguments: list[str], doc: str | None) -> bool:
    """The program `module`: run the seeds that the arguments name.  Whether any has failed."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=doc)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--schedules", type=int, default=1000, help="how many seeds")
    parser.add_argument("--step", type=int, default=1, help="every so-and-so-many-th of them")
    parser.add_argument("--cores", action="store_true", help="a process for each core")
    parser.add_argument("--seed", type=int, help="this one alone, with all its steps")
    options = parser.parse_args(arguments)
    if options.cores:
        failed, told = on_all_cores(module, options.first, options.schedules)
        print(told, end="")
        return failed
    alone = options.seed is not None
    begun = time.monotonic()
    if alone:
        found = failing(options.seed, 1)
    else:
        found = failing(options.first, options.schedules, options.step)
    if found is not None:
        seed, run, broken = found
        for number, move in enumerate(run.path if alone else (), 1):
            print(f"{number:4} {' '.join(map(str, move))}")
        print(f"seed {seed}: BROKEN: {broken}")
        print(f"python -m {module} --seed {seed}")
    print(f"{time.monotonic() - begun:.1f} s")
    return found is not None
