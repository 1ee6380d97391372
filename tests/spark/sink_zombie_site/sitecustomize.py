"""What Python does at its start in executors of sink_cluster.py: one task attempt waits at a place
that a file names until another file says to go on.  It outlives its executor.

A file says what came of it: that the broker refused what it wrote, or that it was written.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from places import ARMED, ENDED, GO_ON, TAKEN, ZOMBIE

LIMIT_S = 120


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def write(path: Path, text: str) -> None:
    """Whoever sees it finds it whole."""
    unnamed = path.with_suffix(".new")
    unnamed.write_text(text)
    unnamed.rename(path)


def watch(directory: Path) -> None:
    from kdirect import failpoints

    def reached(place: str) -> None:
        try:
            if (directory / ARMED).read_text() != place:
                return
            os.rename(directory / ARMED, directory / f"was {ARMED}")
        except FileNotFoundError:  # none is armed, or another process was faster
            return
        tell_what_comes_of_it()
        daemon = os.getppid()
        os.setpgid(0, 0)  # Spark's daemon ends its process group when the executor dies
        write(directory / TAKEN, str(parent_of(daemon)))
        deadline = time.monotonic() + LIMIT_S
        while not (directory / GO_ON).exists() and time.monotonic() < deadline:
            time.sleep(0.05)

    def tell_what_comes_of_it() -> None:
        """The rows that it has are sent and flushed, before it misses its executor."""
        from kdirect.client.attempt_producer import AttemptProducer

        send = AttemptProducer.send_arrow

        def send_and_flush(producer: AttemptProducer, *given: Any) -> None:
            try:
                send(producer, *given)
                producer.flush()
            except Exception as e:
                write(directory / ENDED, f"refused: {e}")
                raise
            write(directory / ENDED, "written")

        AttemptProducer.send_arrow = send_and_flush  # type: ignore[method-assign]

    failpoints.reached = reached


if ZOMBIE in os.environ:
    watch(Path(os.environ[ZOMBIE]))
