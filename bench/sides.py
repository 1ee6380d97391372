"""What rows have in common: the figure that they return, and the process on the other side of what
they measure.

A row is measured by two processes where what is measured lies between two: this one, and a `Peer`
that runs calls for it.  Both take a core each (`spread`).
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Figure = dict[str, Any]


def figure(
    row: str, value: float, unit: str, against: str, against_value: float | None, **settings: Any
) -> Figure:
    """`value` of a row beside that of its yardstick, if it has one.  `settings`: what was measured;
    `lower_is_better` where it is."""
    return {
        "row": row,
        "value": value,
        "unit": unit,
        "against": against,
        "against_value": against_value,
        "ratio": value / against_value if against_value else None,
        "settings": settings,
    }


def quartiles(values: Sequence[float]) -> list[float]:
    """The three quartiles; of a single value (in a quick run) that value."""
    return statistics.quantiles(values) if len(values) > 1 else [*values] * 3


def spread_of(ours: Sequence[float], theirs: Sequence[float]) -> Figure:
    """For the settings of a figure, of which `ours` and `theirs` are the rounds."""
    return {
        "rounds": len(ours),
        "low": min(ours),
        "high": max(ours),
        "quartiles": quartiles(ours),
        "against_low": min(theirs),
        "against_high": max(theirs),
        "against_quartiles": quartiles(theirs),
    }


class Peer:
    """The other process: it runs `file`, whose main function calls `serve`.  `call(name, ...)` runs
    a method of the object that is served there and returns what it returned; `start` and `finish`
    are its two halves, between which this process does its own part."""

    def __init__(self, file: str) -> None:
        here = str(Path(__file__).parent)  # where PYTHONSAFEPATH keeps its modules out
        path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
        self.process = subprocess.Popen(
            [sys.executable, file, "peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def start(self, *call: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(call), file=self.process.stdin, flush=True)

    def finish(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the other process ended")
        return json.loads(line)

    def call(self, *call: Any) -> Any:
        self.start(*call)
        return self.finish()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]


def serve(served: Any) -> None:
    """Be the other process: run the calls of a `Peer`, methods of `served`, until it closes."""
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(served, name)(*arguments)), flush=True)


def spread(core: int) -> None:
    """One process a core, where there are two."""
    allowed = list(range(os.cpu_count() or 1))
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, {allowed[core % len(allowed)]})
