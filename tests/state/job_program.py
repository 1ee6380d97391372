"""A job in a process of its own, which keeps every batch that it gets in a file: a program for the
tests, which kill it.

    python job_program.py '{"bootstrap": .., "directory": .., "output": .., "plan": .., ..}'

``"die": [moment, number, mark]`` lets it kill itself at a moment of the coordinator, the number-th
time; only the process that makes the file `mark` does it.  A moment is what is made durable
(`batch`, `commit`, `attempt`, `manifest`, `forget`), and when: after that, `before` it, or with
half of the line written (`torn`).  ``"rest_at": n`` lets it wait for its end with the n-th batch
that it gets, and ``"patient": true`` wait for its executors when it ends, however long.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from kdirect.state import coordinator_server, directory, snapshots
from kdirect.state.launcher import LocalLauncher
from kdirect.state.plan import plan_from_json
from kdirect.state.stream_job import run


class Death:
    """Kills this process when `now` is called for the number-th time."""

    def __init__(self, number: int, mark: str) -> None:
        self._left = number
        self._mark = mark

    def now(self, before: Callable[[], object] = lambda: None) -> None:
        self._left -= 1
        if self._left:
            return
        try:
            os.close(os.open(self._mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        before()
        os.kill(os.getpid(), signal.SIGKILL)


def prepare(moment: str, number: int, mark: str) -> None:
    """Let the process die at the moment."""
    death = Death(number, mark)
    what, _, when = moment.partition(" ")
    owner, name = {
        "batch": (directory.LineLog, "append"),
        "commit": (directory.LineLog, "append"),
        "attempt": (directory.JobDirectory, "write_attempt"),
        "manifest": (snapshots, "write_manifest"),
        "forget": (snapshots, "forget"),
    }[what]
    real = getattr(owner, name)

    def dying(first: Any, *rest: Any, **named: Any) -> Any:
        if name == "append" and not first.path.name.startswith(what):
            return real(first, *rest)
        if when == "before":
            death.now()
        if when == "torn":
            line = directory._line(rest[0])
            death.now(lambda: first._file.write(line[: len(line) // 2]))
        result = real(first, *rest, **named)
        if not when:
            death.now()
        return result

    setattr(owner, name, dying)


def main(given: dict) -> None:
    """Run the job to the ends of its topics, if the settings say nothing else."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process ignores it
    output = Path(given["output"])
    launcher = LocalLauncher(given["command"]) if given.get("command") else None
    if "die" in given:
        prepare(*given["die"])
    if given.get("patient"):
        coordinator_server.STOP_TIMEOUT_S = 3600.0
    left = given.get("rest_at", 0)
    with run(
        plan_from_json(given["plan"]),
        given["bootstrap"],
        directory=given["directory"],
        launcher=launcher,
        **{"until": "latest", **given["settings"]},
    ) as job:
        for number, table in job:
            path = output / f"{number:06}.arrow"
            if path.exists():
                # It was handed out before, and not committed: it has to be the same.
                with pa.ipc.open_file(path) as before:
                    rows = before.read_all()
                order = [(name, "ascending") for name in rows.column_names]
                assert rows.sort_by(order).equals(table.sort_by(order)), f"batch {number} changed"
            new = path.with_suffix(".new")
            with pa.ipc.new_file(new, table.schema) as writer:
                writer.write_table(table)
            os.replace(new, path)
            print(number, flush=True)
            left -= 1
            if not left:
                signal.pause()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
