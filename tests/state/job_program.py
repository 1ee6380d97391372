"""A job in a process of its own, which keeps every batch that it gets in a file: a program for the
tests, which kill it.

    python job_program.py '{"bootstrap": .., "directory": .., "output": .., "plan": .., ..}'
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pyarrow as pa

from kdirect.state.launcher import LocalLauncher
from kdirect.state.plan import plan_from_json
from kdirect.state.stream_job import run


def main(given: dict) -> None:
    """Run the job to the ends of its topics."""
    output = Path(given["output"])
    launcher = LocalLauncher(given["command"]) if given.get("command") else None
    with run(
        plan_from_json(given["plan"]),
        given["bootstrap"],
        directory=given["directory"],
        until="latest",
        launcher=launcher,
        **given["settings"],
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


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
