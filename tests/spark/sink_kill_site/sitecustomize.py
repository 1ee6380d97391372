"""What Python does at its start in a driver of sink_kills.py, its workers, its commits and its
broker: it comes to named places (`kdirect.failpoints`), and kills a process where a file says so.

KDIRECT_KILLS is a directory with files ``armed-N-T.json``: who dies (`pids`; "itself" is the
process that comes there) when somebody comes to the place `at` for the T-th time from now on.  Only
the process that can rename the file takes part, so that each coming counts once.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable
from pathlib import Path

KILLS = "KDIRECT_KILLS"


def comes_to(directory: Path, place: str) -> None:
    for armed in sorted(directory.glob("armed-*.json")):
        _, number, left = armed.stem.split("-")
        try:
            kill = json.loads(armed.read_text())
            if kill["at"] != place:
                continue
            fires = left == "1"
            name = f"fired-{number}" if fires else f"armed-{number}-{int(left) - 1}"
            os.rename(armed, directory / f"{name}.json")
        except FileNotFoundError:  # another process was faster
            continue
        if fires:
            kill_all(os.getpid() if pid == "itself" else pid for pid in kill["pids"])


def kill_all(pids: Iterable[int]) -> None:
    """Send signal 9; one that has ended is none of them."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def watch(directory: Path) -> None:
    """From now on this process, and what is forked from it, looks for kills."""
    from kdirect import failpoints

    failpoints.reached = lambda place: comes_to(directory, place)


if KILLS in os.environ:
    watch(Path(os.environ[KILLS]))
